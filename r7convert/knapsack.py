"""The exact knapsack under `fit`: one K per expert, at most two a layer, least error in so many steps.

A step is one more bit for one expert. Within a layer, for a pair of K and a number of experts at the higher one, the best choice
is the experts that gain most: a sort. That gives the layer's least error at every size (`Menu`), and a table over layers and steps
joins the layers (`share_steps`). Errors are integer ticks: sums do not depend on their order, so every machine of a run finds the
same answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations_with_replacement

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]

NEVER = np.int64(1 << 61)


def tick_bits(experts: int) -> int:
    """Bits for the dearest expert's ticks: a whole answer stays under 2**60, so that no sum here leaves int64, and one expert under
    2**48, so that a tick stays well above the rounding of the float64 costs it is made from."""
    return min(48, 60 - experts.bit_length())


class Menu:
    """One layer's least error at every size: `ticks[s]` for experts that use s steps more than all of them at the lowest target."""

    def __init__(self, costs: IntArray, targets: Sequence[int]) -> None:
        self.costs, self.targets = costs, targets
        self.pairs = list(combinations_with_replacement(range(len(targets)), 2))
        self.ticks = np.full(len(costs) * (targets[-1] - targets[0]) + 1, NEVER)
        self.pair = np.zeros(len(self.ticks), dtype=np.int64)
        for index, (low, high) in enumerate(self.pairs):
            raised = np.arange(len(costs) + 1 if low < high else 1)  # experts at the higher K
            changes = (costs[:, high] - costs[:, low])[self.gainers(low, high)]
            ticks = costs[:, low].sum() + np.concatenate([[0], np.cumsum(changes)])[raised]
            sizes = len(costs) * (targets[low] - targets[0]) + raised * (targets[high] - targets[low])
            better = ticks < self.ticks[sizes]
            self.ticks[sizes[better]] = ticks[better]
            self.pair[sizes[better]] = index

    def gainers(self, low: int, high: int) -> IntArray:
        """Experts, those that gain most from the higher K first; at equal gain the lower id."""
        return np.argsort(self.costs[:, high] - self.costs[:, low], kind="stable")

    def expert_bits(self, size: int) -> IntArray:
        low, high = self.pairs[self.pair[size]]
        bits = np.full(len(self.costs), self.targets[low], dtype=np.int64)
        if low < high:
            raised = (size - len(bits) * (self.targets[low] - self.targets[0])) // (self.targets[high] - self.targets[low])
            bits[self.gainers(low, high)[:raised]] = self.targets[high]
        return bits


def share_steps(menus: Sequence[Menu], spare: int) -> list[int]:
    """Split at most `spare` steps among the layers for the least sum of ticks: each layer's size."""
    spare = min(spare, sum(len(menu.ticks) - 1 for menu in menus))
    least = [np.full(spare + 1, NEVER)]  # least[n][s]: the first n layers in exactly s steps
    least[0][0] = 0
    reach = 0
    for menu in menus:
        row = np.full(spare + 1, NEVER)
        cheapest = np.minimum.accumulate(menu.ticks)
        for size in range(min(len(menu.ticks) - 1, spare) + 1):
            if size and menu.ticks[size] >= cheapest[size - 1]:
                continue  # a smaller size is as good
            end = min(reach, spare - size) + 1
            np.minimum(row[size : size + end], least[-1][:end] + menu.ticks[size], out=row[size : size + end])
        reach = min(reach + len(menu.ticks) - 1, spare)
        least.append(row)
    left = int(np.argmin(least[-1]))
    sizes = []
    for menu, row in zip(reversed(menus), reversed(least[:-1]), strict=True):
        options = np.arange(min(len(menu.ticks) - 1, left) + 1)
        size = int(np.argmin(row[left - options] + menu.ticks[options]))
        sizes.append(size)
        left -= size
    return sizes[::-1]
