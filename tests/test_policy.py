"""Policies against brute force, a greedy baseline and an independent dual bound; and one checkpoint of GLM-5.2's size."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from r7convert.errors import UnsupportedError
from r7convert.ktable import KTable, Problem
from r7convert.policy import LayerPlan, Plan, fit, lift, price_policies, refuse
from tests.policy_figures import EXPERTS, LAYERS, MATRIX_WEIGHTS, SPLIT_EXPERTS, THREE_K_LAYERS, draw_tables, table

UNIT = 3 * 256 // 8  # bytes of one bit for one expert of the small problems


def k_table(rows: list[list[int]], layer: int = 3, **weights: object) -> KTable:
    return KTable(layer, np.array(rows), **{name: np.array(value) for name, value in weights.items()})  # type: ignore[arg-type]


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    targets = draw(st.sampled_from([None, (3,), (3, 4), (3, 5), (4, 5), (3, 4, 5), (3, 4, 5, 6)]))
    experts = draw(st.integers(1, 4))
    weight = st.one_of(st.just(1.0), st.just(0.0), st.floats(1e-3, 1e3), st.floats(1e-12, 1e12))
    tables = []
    for layer in range(draw(st.integers(1, 3))):
        uniform = draw(st.booleans())
        row = st.sampled_from([3, 4, 5]).map(lambda k: [k] * 3) if uniform else st.lists(st.sampled_from([3, 4, 5]), min_size=3, max_size=3)
        bits = draw(st.lists(row, min_size=experts, max_size=experts))
        energy = draw(st.none() | st.lists(st.lists(weight, min_size=3, max_size=3), min_size=experts, max_size=experts))
        importance = draw(st.none() | st.lists(weight, min_size=experts, max_size=experts))
        given_weights = {name: value for name, value in (("energy", energy), ("importance", importance)) if value is not None}
        tables.append(k_table(bits, layer, **given_weights))
    return Problem(tuple(tables), 256, targets, draw(st.booleans()))


def legal_bits(problem: Problem, table: KTable) -> Iterator[np.ndarray]:
    """Every choice of K_e the rules allow in a layer."""
    if all(len(set(row)) == 1 for row in table.bits.tolist()) and len(set(table.bits[:, 0].tolist())) <= 2:
        yield table.bits[:, 0]
        return
    targets = problem.targets or range(3, max(table.bits.flat) + 1)
    for bits in itertools.product(targets, repeat=len(table.bits)):
        if len(set(bits)) <= 2:
            yield np.array(bits)


def error_of(problem: Problem, table: KTable, bits: np.ndarray) -> float:
    """The objective again, one matrix at a time, from the page's table written out anew."""
    fresh = {3: 0.0174, 4: 0.00453, 5: 0.00119, 6: 0.00032}
    after = {(3, 4): 0.0218, (3, 5): 0.0185, (4, 5): 0.00564, (4, 3): 0.0220, (5, 4): 0.0057, (5, 3): 0.0189}
    direct = {(3, 4): 0.00454, (3, 5): 0.00125, (4, 5): 0.00120, (4, 3): 0.0175, (5, 4): 0.0046, (5, 3): 0.0178}
    total = []
    for expert, proj in np.ndindex(table.bits.shape):
        old, new = int(table.bits[expert, proj]), int(bits[expert])
        if old == new:
            relative = fresh[old]
        elif problem.from_originals:
            relative = direct.get((old, new), fresh[new])
        else:
            relative = after.get((old, new), fresh[old] + fresh[new])
        weight = 1.0 if table.energy is None else table.energy[expert, proj]
        total.append(relative * weight * (1.0 if table.importance is None else table.importance[expert]))
    return math.fsum(total)


def frontier(problem: Problem) -> dict[int, float]:
    """Brute force: bytes -> least error of any legal plan of exactly that size."""
    best = {0: 0.0}
    for k_table in problem.tables:
        options: dict[int, float] = {}
        for bits in legal_bits(problem, k_table):
            size, error = int(bits.sum()) * UNIT, error_of(problem, k_table, bits)
            options[size] = min(error, options.get(size, math.inf))
        joined: dict[int, float] = {}
        for (a, x), (b, y) in itertools.product(best.items(), options.items()):
            joined[a + b] = min(x + y, joined.get(a + b, math.inf))
        best = joined
    return best


def check_shape(problem: Problem, plan: Plan) -> None:
    for k_table, layer in zip(problem.tables, plan.layers, strict=True):
        assert layer.layer == k_table.layer
        assert len(layer.tiers) <= 2
        assert layer.bytes_after == 3 * layer.expert_bits.sum() * problem.bit_bytes
        assert math.isclose(layer.error_after, error_of(problem, k_table, layer.expert_bits), rel_tol=1e-12)
        if k_table.is_stock_shaped:
            assert not layer.touched.any()
            assert layer.error_after == layer.error_before
        else:
            assert set(layer.tiers) <= set(problem.targets_of(k_table))
    assert plan.lifted + plan.lowered == sum(layer.touched.sum() for layer in plan.layers)


@settings(max_examples=250, deadline=None)
@given(problems(), st.integers(0, 40))
def test_fit_is_the_brute_force_optimum(problem: Problem, spare: int) -> None:
    sizes = frontier(problem)
    budget = min(sizes) + spare * UNIT // 2  # half steps too: a budget need not be a whole number of them
    plan = fit(problem, budget)
    check_shape(problem, plan)
    best = min(error for size, error in sizes.items() if size <= budget)
    assert plan.bytes_after <= budget
    assert plan.gap is not None
    rounding = 1e-14 * best  # of this test's own sums
    assert best - rounding <= plan.error_after <= best + plan.gap + rounding
    assert plan.gap <= 1e-14 + 1e-13 * max(problem.errors(t, k).sum(axis=1).max() for t in problem.tables for k in (3, 4, 5, 6))


def test_weights_of_zero_leave_no_gap() -> None:
    """Found by the property above in a run of the whole suite: a scale was made up for costs that have none."""
    nothing = np.zeros(2)
    tables = tuple(KTable(layer, np.array([[3, 3, 3], [3, 3, 4]]), None, nothing) for layer in (0, 1))
    plan = fit(Problem(tables, 256), None)
    assert (plan.error_after, plan.gap) == (0.0, 0.0)


@settings(max_examples=100, deadline=None)
@given(problems(), st.integers(1, 1000))
def test_fit_refuses_less_than_the_minimum_and_names_it(problem: Problem, short: int) -> None:
    least = min(frontier(problem))
    with pytest.raises(UnsupportedError, match=f"at least {least:,}, got {least - short:,}"):
        fit(problem, least - short)
    assert fit(problem, least).bytes_after == least


@settings(max_examples=200, deadline=None)
@given(problems())
def test_lift_is_the_brute_force_optimum_or_impossible(problem: Problem) -> None:
    best = []
    for k_table in problem.tables:
        largest = k_table.bits.max(axis=1)
        options = [bits for bits in legal_bits(problem, k_table) if (bits >= largest).all()]
        best.append(min(((int(b.sum()) * UNIT, error_of(problem, k_table, b)) for b in options), default=None))
    if None in best:
        with pytest.raises(UnsupportedError, match=f"layer {best.index(None)}: lift"):
            lift(problem)
        return
    plan = lift(problem)
    check_shape(problem, plan)
    assert plan.lowered == 0
    for layer, expected in zip(plan.layers, best, strict=True):
        assert expected is not None
        assert layer.bytes_after == expected[0]
        assert math.isclose(layer.error_after, expected[1], rel_tol=1e-12)


def greedy_cut(problem: Problem, start: Plan, budget: int) -> float | None:
    """The baseline: lower one expert at a time to its layer's lower K, the least error for a byte first. Error, None if stuck."""
    bits = [layer.expert_bits.copy() for layer in start.layers]
    size = start.bytes_after
    while size > budget:
        moves = []
        for index, k_table in enumerate(problem.tables):
            if k_table.is_stock_shaped:
                continue
            tiers = sorted(set(bits[index].tolist()))
            lower = [k for k in problem.targets_of(k_table) if k < tiers[0]]
            low, high = (tiers[0], tiers[1]) if len(tiers) == 2 else (lower[-1] if lower else None, tiers[0])
            if low is None:
                continue
            price = (problem.errors(k_table, low) - problem.errors(k_table, high)).sum(axis=1) / (high - low)
            expert = min(np.flatnonzero(bits[index] == high), key=lambda e: price[e])
            moves.append((price[expert], index, expert, low, high))
        if not moves:
            return None
        _, index, expert, low, high = min(moves)
        bits[index][expert] = low
        size -= (high - low) * 3 * problem.bit_bytes
    return math.fsum(problem.errors(k_table, b[:, None]).sum() for k_table, b in zip(problem.tables, bits, strict=True))


@settings(max_examples=200, deadline=None)
@given(problems(), st.floats(0, 1))
def test_fit_never_loses_to_lift_cut_greedily_to_the_same_budget(problem: Problem, share: float) -> None:
    start = price_policies(problem)["lift"]
    if isinstance(start, str):
        return
    least = min(frontier(problem))
    budget = least + int(share * (start.bytes_after - least))
    plan, baseline = fit(problem, budget), greedy_cut(problem, start, budget)
    assert plan.gap is not None
    if baseline is not None:
        assert plan.error_after <= baseline * (1 + 1e-14) + plan.gap
    assert fit(problem, start.bytes_after).error_after <= start.error_after * (1 + 1e-14) + plan.gap


def test_the_page_s_example() -> None:
    problem = Problem((k_table([[3, 3, 4], [3, 3, 4], [4, 4, 4]]),), 256)
    lifted = lift(problem).layers[0]
    assert lifted.expert_bits.tolist() == [4, 4, 4]
    assert lifted.encodes == {(3, 4): 4}
    assert lifted.error_after == pytest.approx(2 * 0.04813 + 3 * 0.00453)  # FORMAT.md: 0.048 for such an expert
    fitted = fit(problem, 11 * UNIT).layers[0]  # one step short: one of the two goes down
    assert fitted.expert_bits.tolist() == [4, 3, 4]
    assert fitted.encodes == {(4, 3): 1, (3, 4): 2}
    assert fitted.error_after == pytest.approx(0.0568 + 0.04813 + 3 * 0.00453)


def test_three_k_lift_takes_the_cheaper_pair() -> None:
    def lifted(counts: tuple[int, int]) -> tuple[int, ...]:
        rows = [[3, 3, 3]] * counts[0] + [[4, 4, 4]] * counts[1] + [[5, 5, 5]]
        return lift(Problem((k_table(rows),), 256)).layers[0].tiers

    assert lifted((1, 3)) == (4, 5)
    assert lifted((3, 1)) == (3, 5)
    assert lifted((2, 2)) == (3, 5)  # equal bytes: 4 -> 5 adds 0.0011 a matrix, 3 -> 4 adds 0.0044


def test_importance_moves_the_bits() -> None:
    rows = [[3, 3, 4], [3, 3, 4]]
    budget = 7 * UNIT
    for favourite in (0, 1):
        weights = [1.0, 1.0]
        weights[favourite] = 5.0
        problem = Problem((k_table(rows, importance=weights),), 256)
        assert fit(problem, budget).layers[0].expert_bits.argmax() == favourite


def test_targets_by_default_stop_at_each_layer_s_own_largest() -> None:
    low, high = k_table([[3, 3, 4], [3, 4, 4]], 3), k_table([[3, 3, 5], [3, 4, 4]], 4)
    problem = Problem((low, high), 256)
    assert problem.targets_of(low) == (3, 4)
    assert problem.targets_of(high) == (3, 4, 5)
    plan = fit(problem, 10**9)
    assert plan.layers[0].expert_bits.max() == 4
    assert fit(Problem((low, high), 256, (3, 4, 5, 6)), 10**9).layers[0].expert_bits.max() > 4


def test_refuse_passes_what_is_stock_shaped() -> None:
    plan = refuse(Problem((k_table([[3] * 3, [4] * 3]), k_table([[5] * 3, [5] * 3], 4)), 256))
    assert [layer.expert_bits.tolist() for layer in plan.layers] == [[3, 4], [5, 5]]
    assert (plan.lifted, plan.lowered, plan.error_after) == (0, 0, plan.error_before)


def test_refuse_says_where_and_what_the_others_cost() -> None:
    tables = (k_table([[3, 3, 4], [4] * 3]), k_table([[3] * 3, [4] * 3, [5] * 3], 4), k_table([[3] * 3], 5))
    with pytest.raises(UnsupportedError) as refused:
        refuse(Problem(tables, 256))
    first, second, third = str(refused.value).splitlines()
    assert "got 2 of 3 layers otherwise, 1 experts mixed. " in first
    assert "`--mixed-k lift`: 5 matrices lifted, 0 lowered" in first
    assert "`--mixed-k fit`:" in first
    assert second == "layer 3: 1 of 2 experts mix K [0]; K in the layer: [3, 4]"
    assert third == "layer 4: 0 of 3 experts mix K []; K in the layer: [3, 4, 5]"
    with pytest.raises(UnsupportedError, match=r"`--mixed-k fit`: fit: budget in bytes: expected at least 1,728, got 10"):
        refuse(Problem(tables, 256), 10)


# ---- the size of GLM-5.2 ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def glm() -> Problem:
    """K as FORMAT.md says, with energies and importances drawn so that no two experts are alike."""
    rng = np.random.default_rng(11)
    tables = [
        KTable(t.layer, t.bits, rng.lognormal(0, 0.3, t.bits.shape), rng.lognormal(0, 1.0, len(t.bits)).astype(float))
        for t in draw_tables()
    ]
    tables.append(KTable(78, np.full((EXPERTS, 3), 3)))  # the MTP layer
    return Problem(tuple(tables), MATRIX_WEIGHTS)


def dual_bound(problem: Problem, budget: int) -> float:
    """A lower bound found another way: bytes at a price for each bit, the best price by bisection. Weak duality, no knapsack."""
    fixed = sum(problem.errors(t, t.bits).sum() for t in problem.tables if t.is_stock_shaped)
    free = [t for t in problem.tables if not t.is_stock_shaped]
    costs = [np.stack([problem.errors(t, k).sum(axis=1) for k in problem.targets_of(t)], axis=1) for t in free]
    bits_left = (budget - sum(t.bits.sum() for t in problem.tables if t.is_stock_shaped) * problem.bit_bytes) / (3 * problem.bit_bytes)

    def solve(price: float) -> tuple[float, float]:
        error = size = 0.0
        for cost, t in zip(costs, free, strict=True):
            targets = np.array(problem.targets_of(t))
            choices = []
            for pair in itertools.combinations(range(len(targets)), 2):
                priced = cost[:, pair] + price * targets[list(pair)]
                pick = priced.argmin(axis=1)
                choices.append((priced.min(axis=1).sum(), targets[list(pair)][pick].sum()))
            value, used = min(choices)
            error, size = error + value, size + used
        return error - price * bits_left, size

    low, high = 0.0, 10.0
    bounds = []
    for _ in range(50):
        price = (low + high) / 2
        value, size = solve(price)
        bounds.append(value)
        low, high = (price, high) if size > bits_left else (low, price)
    return float(fixed + max(bounds))


def test_full_size_draw_is_what_the_page_says() -> None:
    bits = np.stack([t.bits for t in draw_tables()])
    assert bits.shape == (LAYERS, EXPERTS, 3) == (75, 256, 3)
    assert (bits[:, :, 0] != bits[:, :, 1]).sum() == SPLIT_EXPERTS == 5_418
    assert (bits[:, :, 2] == bits[:, :, 0] + 1).mean() > 0.5
    assert [t.layer for t in draw_tables() if len(np.unique(t.bits)) == 3] == list(THREE_K_LAYERS)
    assert not any(t.is_stock_shaped for t in draw_tables())


def test_full_size_policies(glm: Problem) -> None:
    lifted = lift(glm)
    assert lifted.lowered == 0
    assert all(len(layer.tiers) <= 2 for layer in lifted.layers)
    assert not lifted.layers[-1].touched.any()
    for budget in (glm.payload_bytes * 97 // 100, glm.payload_bytes, lifted.bytes_after - 1, lifted.bytes_after):
        plan = fit(glm, budget)
        assert plan.bytes_after <= budget
        assert all(len(layer.tiers) <= 2 for layer in plan.layers)
        assert not plan.layers[-1].touched.any()
        assert plan.gap is not None
        assert plan.gap < 1e-9 * plan.error_after
        assert sum(plan.encodes.values()) == sum(int(layer.touched.sum()) for layer in plan.layers)
        bound = dual_bound(glm, budget)
        assert bound * (1 - 1e-12) <= plan.error_after <= bound * (1 + 1e-4)
    assert plan.error_after <= lifted.error_after
    assert fit(glm).bytes_after <= glm.payload_bytes  # the default budget


def same(a: LayerPlan, b: LayerPlan) -> bool:
    return a.layer == b.layer and np.array_equal(a.expert_bits, b.expert_bits) and a.error_after == b.error_after


def test_full_size_plan_does_not_depend_on_the_order_of_layers(glm: Problem) -> None:
    first, again = fit(glm), fit(glm)
    assert all(same(a, b) for a, b in zip(first.layers, again.layers, strict=True))
    backwards = fit(Problem(glm.tables[::-1], glm.matrix_weights))
    assert backwards.error_after == pytest.approx(first.error_after, rel=1e-13)
    assert backwards.bytes_after == first.bytes_after


def test_full_size_greedy_cut_is_not_better(glm: Problem) -> None:
    few = Problem(glm.tables[::12], glm.matrix_weights)  # the greedy rule scans every layer for every move
    start = lift(few)
    for share in (0.995, 0.98):
        budget = int(start.bytes_after * share)
        baseline = greedy_cut(few, start, budget)
        assert baseline is not None
        assert fit(few, budget).error_after <= baseline


def test_the_user_page_shows_today_s_figures() -> None:
    page = (Path(__file__).parents[1] / "docs" / "policies.md").read_text()
    for from_originals in (False, True):
        lines = table(from_originals)
        assert len(lines) == 7
        assert "\n".join(lines) in page, "run `python -m tests.policy_figures` and put its tables into docs/policies.md"
