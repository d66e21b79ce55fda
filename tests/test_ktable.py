"""K tables, the error table, budgets and importances: every rule with an input that breaks it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from r7convert.errors import FormatError, R7Error, UnsupportedError, UsageError
from r7convert.ktable import FRESH, STEPS, KTable, Problem, expected_step, parse_budget, parse_importance

BITS = np.array([[3, 3, 4], [4, 4, 4]])


def test_steps_are_consistent() -> None:
    """The measured rows lie within 6% of the rule that stands in for the missing ones, and K6 rows follow the rule."""
    assert len(STEPS) == 6
    for (old, new), row in STEPS.items():
        assert row.step == pytest.approx(FRESH[new], rel=0.06)
        assert row.after == pytest.approx(FRESH[old] + row.step, rel=0.01)
        assert row.direct == pytest.approx(FRESH[new], rel=0.06)
    assert expected_step(4, 6) == pytest.approx((0.00032, 0.00485, 0.00032))
    assert expected_step(5, 5) == (0.0, 0.00119, 0.00119)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"bits": np.zeros((0, 3), int)}, FormatError, "K table"),
        ({"bits": np.zeros((2, 2), int)}, FormatError, "K table"),
        ({"bits": BITS.astype(float)}, FormatError, "K table"),
        ({"bits": np.array([[3, 3, 7]])}, UnsupportedError, "payload K"),
        ({"bits": np.array([[3, 2, 3]])}, UnsupportedError, "payload K"),
        ({"energy": np.ones(2)}, FormatError, "energy: expected shape"),
        ({"energy": np.array([[1, 1, 1], [1, 1, -1.0]])}, FormatError, "energy: expected finite"),
        ({"importance": np.ones(3)}, FormatError, "importance: expected shape"),
        ({"importance": np.array([1, np.nan])}, FormatError, "importance: expected finite"),
        ({"energy": np.full((2, 3), 1e200), "importance": np.full(2, 1e200)}, FormatError, "energy times importance overflows"),
    ],
)
def test_bad_tables_are_refused(fields: dict[str, np.ndarray], error: type[R7Error], message: str) -> None:
    with pytest.raises(error, match=f"layer 9: {message}"):
        KTable(9, **({"bits": BITS} | fields))


def test_stock_shape() -> None:
    assert not KTable(3, BITS).is_stock_shaped
    assert KTable(3, BITS).mixed_experts.tolist() == [0]
    assert KTable(3, BITS[1:]).is_stock_shaped
    assert not KTable(3, np.array([[3] * 3, [4] * 3, [5] * 3])).is_stock_shaped


def test_bad_problems_are_refused() -> None:
    for tables, weights in (((), 256), ((KTable(3, BITS),), 0), ((KTable(3, BITS),), 255)):
        with pytest.raises(FormatError, match="K tables"):
            Problem(tables, weights)
    for targets in ((), (2, 3), (4, 3), (3, 3), (7,)):
        with pytest.raises(UsageError, match="admissible K"):
            Problem((KTable(3, BITS),), 256, targets)


@pytest.mark.parametrize(
    ("text", "expected_bytes"),
    [
        ("1000", 1000),
        ("1000B", 1000),
        ("300GB", 300 * 10**9),
        ("280GiB", 280 * 2**30),
        ("1.5 kib", 1536),
        ("0.0001TB", 10**8),
        ("100%", 704),
        ("105%", 739),
        ("+5%", 739),
        ("-5%", 668),
        ("+0.5%", 707),
        ("4bpw", 768),
        ("3.6bpw", 691),
        ("3.6BPW", 691),
    ],
)
def test_budgets(text: str, expected_bytes: int) -> None:
    problem = Problem((KTable(3, BITS),), 256)
    assert (problem.payload_bytes, problem.weights) == (704, 1536)
    assert parse_budget(text).in_bytes(problem) == expected_bytes


@pytest.mark.parametrize(
    "text", ["", "GB", "1.5", "1.5B", "+300GB", "-1", "3.6", "+3bpw", "1e9", "300 XB", "5%%", "nan", "1,000", "٣", "0x10"]
)
def test_bad_budgets(text: str) -> None:
    with pytest.raises(UsageError, match="--budget: amount"):
        parse_budget(text)


@given(st.integers(0, 10**15))
def test_bytes_and_whole_percents_are_exact(amount: int) -> None:
    problem = Problem((KTable(3, BITS),), 256)
    assert parse_budget(str(amount)).in_bytes(problem) == amount
    assert parse_budget(f"{amount % 1000}%").in_bytes(problem) == amount % 1000 * 704 // 100


def test_importance() -> None:
    weights = parse_importance({"3": [0, 1.5], "4": [10, 2]}, {3: 2, 4: 2})
    assert {layer: w.tolist() for layer, w in weights.items()} == {3: [0.0, 1.5], 4: [10.0, 2.0]}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "expected an object, got list"),
        ({}, "layer 3: list: expected 2 weights, got none"),
        ({"3": [1, 1], "03": [1, 1]}, "key '03'"),
        ({"3": [1, 1], "4": [1, 1]}, "key '4'"),
        ({"3": [1]}, "expected 2 weights, got 1 entries"),
        ({"3": {"0": 1}}, "expected 2 weights, got dict"),
        ({"3": [1, -1]}, "expert 1: expected a finite number >= 0, got -1"),
        ({"3": [True, 1]}, "expert 0"),
        ({"3": ["1", 1]}, "expert 0"),
        ({"3": [1, float("nan")]}, "expert 1"),
        ({"3": [1, float("inf")]}, "expert 1"),
        ({"3": [1, 10**400]}, "expert 1"),
        ({"3": [None, 1]}, "expert 0"),
    ],
)
def test_bad_importance(document: object, message: str) -> None:
    with pytest.raises(FormatError, match="importance") as refused:
        parse_importance(document, {3: 2})
    assert message in str(refused.value)


def test_every_bad_layer_is_named() -> None:
    with pytest.raises(FormatError) as refused:
        parse_importance({"9": []}, {3: 2, 4: 1})
    assert len(str(refused.value).splitlines()) == 3
