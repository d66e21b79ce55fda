"""K policies: how mixed experts come to one K each, and at most two K a layer. Pure arithmetic on K tables.

A stock server takes a layer whose experts have one K each (gate = up = down) and at most two K among them. Such a layer is
*stock-shaped* and no policy touches it. For every other layer a policy chooses one K per expert; matrices with another payload K
are encoded again, which costs error, bytes or both:

    refuse   change nothing: say what is in the way and what the other two would cost
    lift     never lower: each expert at its largest K or above, in as few bytes as the two-K rule allows
    fit      the least total error that fits a byte budget, exactly (knapsack.py)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from r7convert.errors import Offences, UnsupportedError, complain
from r7convert.knapsack import Menu, share_steps, tick_bits
from r7convert.ktable import IntArray, KTable, Problem


@dataclass(frozen=True, eq=False)
class LayerPlan:
    """One layer's outcome. Shapes: payload_bits [E, 3], expert_bits [E], touched [E, 3]."""

    layer: int
    payload_bits: IntArray
    expert_bits: IntArray
    bytes_before: int
    bytes_after: int
    error_before: float
    error_after: float

    @property
    def tiers(self) -> tuple[int, ...]:
        return tuple(np.unique(self.expert_bits).tolist())

    @property
    def touched(self) -> NDArray[np.bool_]:
        return np.not_equal(self.payload_bits, self.expert_bits[:, None])

    @property
    def encodes(self) -> Counter[tuple[int, int]]:
        """(payload K, new K) -> matrices to encode."""
        experts, projections = np.nonzero(self.touched)
        return Counter(zip(self.payload_bits[experts, projections].tolist(), self.expert_bits[experts].tolist(), strict=True))


@dataclass(frozen=True, eq=False)
class Plan:
    """A policy's choice for every layer, priced. Bytes are trellis bytes; errors are weighted sums over matrices.

    `gap` (fit only): no plan within the budget that leaves stock-shaped layers alone has an error under `error_after - gap`.
    """

    policy: str
    layers: tuple[LayerPlan, ...]
    budget_bytes: int | None = None
    gap: float | None = None

    @property
    def bytes_before(self) -> int:
        return sum(layer.bytes_before for layer in self.layers)

    @property
    def bytes_after(self) -> int:
        return sum(layer.bytes_after for layer in self.layers)

    @property
    def error_before(self) -> float:
        return math.fsum(layer.error_before for layer in self.layers)

    @property
    def error_after(self) -> float:
        return math.fsum(layer.error_after for layer in self.layers)

    @property
    def encodes(self) -> Counter[tuple[int, int]]:
        total: Counter[tuple[int, int]] = Counter()
        for layer in self.layers:
            total += layer.encodes
        return total

    @property
    def lifted(self) -> int:
        return sum(count for (payload, new), count in self.encodes.items() if new > payload)

    @property
    def lowered(self) -> int:
        return sum(count for (payload, new), count in self.encodes.items() if new < payload)

    def describe(self) -> str:
        growth = 100 * (self.bytes_after / self.bytes_before - 1)
        return (
            f"{self.lifted:,} matrices lifted, {self.lowered:,} lowered, {self.bytes_after:,} bytes ({growth:+z.1f}%), "
            f"error {self.error_before:.5g} -> {self.error_after:.5g}"
        )


def refuse(problem: Problem, budget_bytes: int | None = None) -> Plan:
    """The plan that changes nothing.

    Raises:  UnsupportedError if a layer is not stock-shaped: which, how many experts, and the price of the other policies.
    """
    offences = Offences()
    mixed = [table for table in problem.tables if not table.is_stock_shaped]
    if mixed:
        prices = "; ".join(
            f"`--mixed-k {name}`: {plan.rstrip('.') if isinstance(plan, str) else plan.describe()}"
            for name, plan in price_policies(problem, budget_bytes).items()
        )
        experts = sum(len(table.mixed_experts) for table in mixed)
        found = f"{len(mixed)} of {len(problem.tables)} layers otherwise, {experts:,} experts mixed"
        rule, do = "one per expert and at most two a layer", f"Encode some again: {prices}."
        offences.add("routed experts", "K", expected=rule, found=found, do=do)
    for table in mixed:
        ids, tiers = table.mixed_experts, np.unique(table.bits).tolist()
        shown = ", ".join(map(str, ids[:8])) + (", ..." if len(ids) > 8 else "")
        offences.add(f"layer {table.layer}", f"{len(ids)} of {len(table.bits)} experts mix K [{shown}]; K in the layer: {tiers}")
    offences.check(UnsupportedError)
    return Plan("refuse", tuple(_settle(problem, table, table.bits[:, 0]) for table in problem.tables))


def lift(problem: Problem) -> Plan:
    """Every expert at its largest K or above: fewest bytes first, then least error, then the lower K.

    Raises:  UnsupportedError if a layer holds a K above every target.
    """
    offences, layers = Offences(), []
    for table in problem.tables:
        largest, targets = table.bits.max(axis=1), problem.targets_of(table)
        if table.is_stock_shaped:
            layers.append(_settle(problem, table, largest))
        elif largest.max() > targets[-1]:
            offences.add(f"layer {table.layer}", "lift", expected=f"no K above {targets[-1]}", found=largest.max(), do="Admit a larger K.")
        else:
            high = min(k for k in targets if k >= largest.max())
            choices = [_settle(problem, table, np.where(largest <= low, low, high)) for low in targets if low <= high]
            layers.append(min(choices, key=lambda choice: (choice.bytes_after, choice.error_after)))
    offences.check(UnsupportedError)
    return Plan("lift", tuple(layers))


def fit(problem: Problem, budget_bytes: int | None = None) -> Plan:
    """The least total error within a byte budget, by default the payload's own bytes; at equal error, the fewest bytes.

    Units:   budget_bytes counts the trellis bytes of all tables, those of untouched layers included.
    Raises:  UnsupportedError if not even the lowest targets fit, with the least budget that would.
    """
    budget = problem.payload_bytes if budget_bytes is None else budget_bytes
    free = [table for table in problem.tables if not table.is_stock_shaped]
    lowest = sum(int(t.bits.sum()) if t.is_stock_shaped else t.bits.size * problem.targets_of(t)[0] for t in problem.tables)
    least = lowest * problem.bit_bytes
    if budget < least:
        do = "Raise --budget or admit a lower K."
        raise UnsupportedError(complain("fit", "budget in bytes", expected=f"at least {least:,}", found=f"{budget:,}", do=do))

    costs = [np.stack([problem.errors(table, k).sum(axis=1) for k in problem.targets_of(table)], axis=1) for table in free]
    experts, peak = sum(map(len, costs)), max((float(cost.max()) for cost in costs), default=0.0)
    scale = tick_bits(experts) - math.frexp(peak)[1]  # 2**scale ticks are one unit of error
    ticks = [np.rint(np.ldexp(cost, scale)).astype(np.int64) for cost in costs]
    menus = [Menu(tick, problem.targets_of(table)) for tick, table in zip(ticks, free, strict=True)]
    sizes = share_steps(menus, (budget - least) // (3 * problem.bit_bytes))

    chosen = iter([menu.expert_bits(size) for menu, size in zip(menus, sizes, strict=True)])
    layers = tuple(_settle(problem, t, t.bits[:, 0] if t.is_stock_shaped else next(chosen)) for t in problem.tables)
    # Rounding moved each expert's cost by at most half a tick, in this plan and in the best one; nothing where all costs are zero.
    return Plan("fit", layers, budget, gap=math.ldexp(experts, -scale) if peak else 0.0)


def price_policies(problem: Problem, budget_bytes: int | None = None) -> dict[str, Plan | str]:
    """What `lift` and `fit` would do: a plan each, or the reason why there is none."""
    policies: dict[str, Callable[[], Plan]] = {"lift": lambda: lift(problem), "fit": lambda: fit(problem, budget_bytes)}
    prices: dict[str, Plan | str] = {}
    for name, policy in policies.items():
        try:
            prices[name] = policy()
        except UnsupportedError as error:
            prices[name] = str(error)
    return prices


def _settle(problem: Problem, table: KTable, expert_bits: IntArray) -> LayerPlan:
    bytes_after = 3 * int(expert_bits.sum()) * problem.bit_bytes
    before = math.fsum(problem.errors(table, table.bits).flat)
    after = math.fsum(problem.errors(table, expert_bits[:, None]).flat)
    return LayerPlan(table.layer, table.bits, expert_bits, int(table.bits.sum()) * problem.bit_bytes, bytes_after, before, after)
