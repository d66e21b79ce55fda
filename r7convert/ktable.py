"""What the K policies work on: K tables, what a new K costs a matrix, budgets and importances. Pure arithmetic."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from r7convert.errors import FormatError, Offences, UnsupportedError, UsageError, complain
from r7convert.format import TAIL_K_VALUES, TILE

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

STOCK_K = tuple(sorted(TAIL_K_VALUES))
MAX_TIERS = 2


class Step(NamedTuple):
    """Relative squared errors of one payload K -> new K; FORMAT.md section 7, measured on 65,536 Gaussian weights."""

    step: float  # against the decoded payload
    after: float  # against the original, encoded from the payload
    direct: float  # against the original, encoded from the original


FRESH = {3: 0.0174, 4: 0.00453, 5: 0.00119, 6: 0.00032}  # one encode of the original; what an untouched matrix has
STEPS = {
    (3, 4): Step(0.00439, 0.0218, 0.00454),
    (3, 5): Step(0.00113, 0.0185, 0.00125),
    (4, 5): Step(0.00114, 0.00564, 0.00120),
    (4, 3): Step(0.0174, 0.0220, 0.0175),
    (5, 4): Step(0.0045, 0.0057, 0.0046),
    (5, 3): Step(0.0177, 0.0189, 0.0178),
}


def expected_step(payload: int, new: int) -> Step:
    """The page's row, or, for the K6 rows it lacks, one fresh encode on top: the page's own steps cost 0.95 to 1.02 of that."""
    if payload == new:
        return Step(0.0, FRESH[payload], FRESH[payload])
    return STEPS.get((payload, new)) or Step(FRESH[new], FRESH[payload] + FRESH[new], FRESH[new])


_TABLE = np.array([[expected_step(a, b) for b in STOCK_K] for a in STOCK_K])  # [payload, new, (step, after, direct)]


@dataclass(frozen=True, eq=False)
class KTable:
    """The K of one layer's routed expert matrices, and what an error in each of them is worth.

    Shapes:  bits [E, 3], columns gate, up, down; energy [E, 3], ||W||^2 in weight space; importance [E]. The last two default to ones.
    Raises:  FormatError for another shape or a weight that is negative or not finite; UnsupportedError for a K outside 3..6.
    """

    layer: int
    bits: IntArray
    energy: FloatArray | None = None
    importance: FloatArray | None = None

    def __post_init__(self) -> None:
        shape, where = np.shape(self.bits), f"layer {self.layer}"
        if len(shape) != 2 or shape[0] < 1 or shape[1] != 3 or not np.issubdtype(self.bits.dtype, np.integer):
            raise FormatError(complain(where, "K table", expected="integers [E, 3]", found=f"{self.bits.dtype} {list(shape)}"))
        if not np.isin(self.bits, STOCK_K).all():
            raise UnsupportedError(complain(where, "payload K", expected=f"each of {STOCK_K}", found=np.unique(self.bits).tolist()))
        for name, value, expected in (("energy", self.energy, shape), ("importance", self.importance, shape[:1])):
            if value is not None and np.shape(value) != expected:
                raise FormatError(complain(where, name, expected=f"shape {list(expected)}", found=list(np.shape(value))))
            if value is not None and not (np.isfinite(value) & (value >= 0)).all():
                raise FormatError(complain(where, name, expected="finite numbers, none negative", found="others"))
        if not np.isfinite(self.weight.sum()):
            raise FormatError(complain(where, "energy times importance overflows", do="Scale the weights down."))

    @cached_property
    def weight(self) -> FloatArray:
        weight = np.ones(self.bits.shape) if self.energy is None else np.asarray(self.energy, dtype=np.float64)
        with np.errstate(over="ignore"):
            return weight if self.importance is None else weight * self.importance[:, None]

    @cached_property
    def mixed_experts(self) -> IntArray:
        return np.flatnonzero((self.bits != self.bits[:, :1]).any(axis=1))

    @property
    def is_stock_shaped(self) -> bool:
        return not len(self.mixed_experts) and len(np.unique(self.bits)) <= MAX_TIERS


@dataclass(frozen=True, eq=False)
class Problem:
    """The layers to bring into stock shape, and the rules that hold for every policy.

    `targets` are the K a re-encoded expert may get. By default each layer takes 3 up to its own largest payload K: above that a
    payload has little more to give, and only K3/K4 pairs are qualified by the servers' authors, so no layer leaves them unasked.
    `from_originals` prices encodes of the BF16 originals instead of the decoded payload.

    Units:   matrix_weights counts the weights of ONE matrix, H * I, the same for all of them.
    Raises:  UsageError for targets outside 3..6; FormatError for a matrix_weights that is no whole number of tiles.
    """

    tables: tuple[KTable, ...]
    matrix_weights: int
    targets: tuple[int, ...] | None = None
    from_originals: bool = False

    def __post_init__(self) -> None:
        if not self.tables or self.matrix_weights < 1 or self.matrix_weights % TILE**2:
            found = f"{len(self.tables)} layers, {self.matrix_weights} weights"
            raise FormatError(complain("K tables", "size", expected=f"layers, and matrices of whole {TILE}x{TILE} tiles", found=found))
        if self.targets is not None and (not self.targets or list(self.targets) != sorted(set(self.targets) & set(STOCK_K))):
            raise UsageError(complain("targets", "admissible K", expected=f"ascending, from {STOCK_K}", found=self.targets))

    @property
    def bit_bytes(self) -> int:
        """Bytes of one bit a weight in one matrix; trellis bytes = K * bit_bytes."""
        return self.matrix_weights // 8

    @property
    def payload_bytes(self) -> int:
        return sum(int(table.bits.sum()) for table in self.tables) * self.bit_bytes

    @property
    def weights(self) -> int:
        return sum(table.bits.size for table in self.tables) * self.matrix_weights

    def targets_of(self, table: KTable) -> tuple[int, ...]:
        return self.targets or tuple(range(STOCK_K[0], int(table.bits.max()) + 1))

    def errors(self, table: KTable, new_bits: IntArray | int) -> FloatArray:
        """Weighted error [E, 3] of each matrix against the original, at new K (a number, or one per expert as [E, 1])."""
        column = 2 if self.from_originals else 1
        return np.asarray(table.weight * _TABLE[table.bits - STOCK_K[0], new_bits - STOCK_K[0], column], dtype=np.float64)


@dataclass(frozen=True)
class Budget:
    """A parsed `--budget`: so many bytes, a share of the payload, or bits per weight."""

    kind: Literal["bytes", "share", "bpw"]
    amount: Fraction

    def in_bytes(self, problem: Problem) -> int:
        """Whole bytes for all routed expert trellises of the problem, rounded down."""
        of = {"bytes": Fraction(1), "share": Fraction(problem.payload_bytes), "bpw": Fraction(problem.weights, 8)}
        return math.floor(self.amount * of[self.kind])


_UNITS = {"": 1, "b": 1} | {p + "b": 1000**n for n, p in enumerate("kmgt", 1)} | {p + "ib": 1024**n for n, p in enumerate("kmgt", 1)}


def parse_budget(text: str) -> Budget:
    """Read BYTES (300000000000, 300GB, 280GiB), PERCENT of the payload (105%, +5%, -3%) or BPW (3.6bpw).

    Raises:  UsageError for anything else.
    """
    match = re.fullmatch(r"([+-]?)([0-9]{1,18}(?:\.[0-9]{1,18})?) ?(%|[a-z]*)", text.strip().lower())
    sign, number, unit = match.groups() if match else ("", "0", "?")
    amount = Fraction(number)
    if unit == "%":
        return Budget("share", {"": amount, "+": 100 + amount, "-": 100 - amount}[sign] / 100)
    if unit == "bpw" and not sign:
        return Budget("bpw", amount)
    if unit in _UNITS and not sign and not (unit in ("", "b") and "." in number):
        return Budget("bytes", amount * _UNITS[unit])
    raise UsageError(complain("--budget", "amount", expected="bytes (300GB, 280GiB), a share (105%, +5%) or 3.6bpw", found=repr(text)))


def parse_importance(document: object, experts: Mapping[int, int]) -> dict[int, FloatArray]:
    """Read {"<layer>": [weight of each expert]}: every layer of `experts` (layer -> E) and no other.

    Raises:  FormatError naming every layer that is missing, unknown, too long or short, or holds anything but finite numbers >= 0.
    """
    if not isinstance(document, dict):
        raise FormatError(complain("importance", "document", expected="an object", found=type(document).__name__))
    offences = Offences()
    expected = {str(layer): layer for layer in experts}
    for key in sorted(document.keys() - expected.keys()):
        offences.add("importance", f"key {key!r} is no layer of routed experts")
    found: dict[int, FloatArray] = {}
    for key, layer in expected.items():
        weights = document.get(key)
        if not isinstance(weights, list) or len(weights) != experts[layer]:
            length = f"{len(weights)} entries" if isinstance(weights, list) else "none" if weights is None else type(weights).__name__
            offences.add(f"importance of layer {layer}", "list", expected=f"{experts[layer]} weights", found=length)
        elif bad := [index for index, weight in enumerate(weights) if not _is_weight(weight)]:
            offences.add(f"importance of layer {layer}", f"expert {bad[0]}", expected="a finite number >= 0", found=repr(weights[bad[0]]))
        else:
            found[layer] = np.array(weights, dtype=np.float64)
    offences.check(FormatError)
    return found


def _is_weight(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max
