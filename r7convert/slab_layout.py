"""Slabs: the tables an R7 loader builds at every start, as an order of tensors in a file. Pure arithmetic; slabs.py opens them.

One layer on one rank is one file. Its data section holds, in this order, the tables a kernel takes (FORMAT.md sections 5, 6):

    w13[t]       each tier ascending: the gate planes in expert order, then the up planes, no gap between
    w2[t]        each tier ascending: the down planes
    rotations    each expert in global order: gate svh, up svh, down suh, so that [E, 3*I_r] is one range
    gate_suh, up_suh, down_svh    [H] once (shared_h_v1) or [E, H] (per_expert_v1)
    markers      the mcg of every matrix

Every plane is a safetensors tensor under its stock name, so a stock loader reads the same file plane by plane. What a loader
would pad is not stored: an empty tier is a [0, ...] tensor, `rotations` has E rows, and kernels take the counts and stride.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from r7convert.format import PROJECTIONS, SHARED_H_V1, TILE

Json = Any

SIDECAR = "slabs.json"
SIDECAR_FORMAT = "r7convert-slabs-v1"
MAX_TIER = 256  # a descriptor has eight bits for the index in a tier


@dataclass(frozen=True, slots=True)
class SlabLayout:
    """The tables of one layer, the same on every rank. Index t runs over `tiers`; `inner` is I_r.

    `gates[t]`, `ups[t]`, `downs[t]` are the experts whose gate, up, down has K = tiers[t], ascending.
    """

    hidden: int
    inner: int
    experts: int
    tiers: tuple[int, ...]
    gates: tuple[tuple[int, ...], ...]
    ups: tuple[tuple[int, ...], ...]
    downs: tuple[tuple[int, ...], ...]

    @property
    def fc1_slots(self) -> tuple[int, ...]:
        return tuple(max(len(gate), len(up), 1) for gate, up in zip(self.gates, self.ups, strict=True))

    @property
    def stride(self) -> int:
        return sum(self.fc1_slots)

    def w13_shape(self, t: int) -> tuple[int, ...]:
        planes = len(self.gates[t]) + len(self.ups[t])
        return (planes, self.hidden // TILE, self.inner // TILE, TILE * self.tiers[t])

    def w2_shape(self, t: int) -> tuple[int, ...]:
        return (len(self.downs[t]), self.inner // TILE, self.hidden // TILE, TILE * self.tiers[t])

    @property
    def has_descriptors(self) -> bool:
        """False where a tier of one projection outgrows the eight bits a descriptor has."""
        return all(len(ids) <= MAX_TIER for table in (self.gates, self.ups, self.downs) for ids in table)

    def bits(self) -> list[list[int]]:
        """K as [E][3], columns gate, up, down: what `plan_slabs` made these tables from."""
        columns = []
        for table in (self.gates, self.ups, self.downs):
            k_of = {expert: k for k, ids in zip(self.tiers, table, strict=True) for expert in ids}
            columns.append([k_of[expert] for expert in range(self.experts)])
        return [list(row) for row in zip(*columns, strict=True)]

    def places(self) -> list[list[tuple[int, int]]]:
        """(tier, index in the tier) of every expert, rows gate, up, down."""
        made = []
        for table in (self.gates, self.ups, self.downs):
            place_of = {expert: (t, at) for t, ids in enumerate(table) for at, expert in enumerate(ids)}
            made.append([place_of[expert] for expert in range(self.experts)])
        return made

    def descriptors(self) -> list[int] | None:
        """[3 * stride], rows gate, up, down: (t << 8) | index in the tier; -1 from entry E on. None: see has_descriptors."""
        if not self.has_descriptors:
            return None
        unused = [-1] * (self.stride - self.experts)
        return [entry for row in self.places() for entry in (*((t << 8) | at for t, at in row), *unused)]


def plan_slabs(bits: Sequence[Sequence[int]], *, hidden: int, inner: int) -> SlabLayout:
    """The tables of a layer from its K.

    Shapes:  bits [E][3], columns gate, up, down; inner is the rank's share of the intermediate channels.
    Source:  FORMAT.md section 5.
    """
    tiers = tuple(sorted({k for row in bits for k in row}))
    gates, ups, downs = (tuple(tuple(e for e, row in enumerate(bits) if row[p] == k) for k in tiers) for p in range(3))
    return SlabLayout(hidden, inner, len(bits), tiers, gates, ups, downs)


def slab_order(layout: SlabLayout, rotation_layout: str) -> Iterator[tuple[int | None, str, str]]:
    """Every tensor of a rank's file as (expert, projection, field), in file order; expert None is a layer-wide vector.

    Source:  FORMAT.md section 6.
    """
    gate, up, down = PROJECTIONS
    for gate_ids, up_ids in zip(layout.gates, layout.ups, strict=True):
        yield from ((e, gate, "trellis") for e in gate_ids)
        yield from ((e, up, "trellis") for e in up_ids)
    for down_ids in layout.downs:
        yield from ((e, down, "trellis") for e in down_ids)
    for e in range(layout.experts):
        yield from ((e, gate, "svh"), (e, up, "svh"), (e, down, "suh"))
    for proj, field in ((gate, "suh"), (up, "suh"), (down, "svh")):
        yield from ((e, proj, field) for e in ([None] if rotation_layout == SHARED_H_V1 else range(layout.experts)))
    for e in range(layout.experts):
        yield from ((e, proj, "mcg") for proj in PROJECTIONS)


# ---- the sidecar ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Range:
    """A table in a file: bytes [offset, offset + 2 * prod(shape)); every table holds 16-bit elements."""

    offset: int
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return 2 * math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class RankSlabs:
    """Where one rank's tables of a layer are."""

    file: str
    w13: tuple[Range, ...]
    w2: tuple[Range, ...]
    rotations: Range
    gate_suh: Range
    up_suh: Range
    down_svh: Range


def place_slabs(layout: SlabLayout, rotation_layout: str, file: str, data_start: int) -> RankSlabs:
    """The ranges of a rank's file whose data section begins at `data_start`, in the order of `slab_order`."""
    at = data_start

    def place(*shape: int) -> Range:
        nonlocal at
        made = Range(at, shape)
        at += made.nbytes
        return made

    w13 = tuple(place(*layout.w13_shape(t)) for t in range(len(layout.tiers)))
    w2 = tuple(place(*layout.w2_shape(t)) for t in range(len(layout.tiers)))
    rows = 1 if rotation_layout == SHARED_H_V1 else layout.experts
    rotations = place(layout.experts, 3 * layout.inner)
    return RankSlabs(file, w13, w2, rotations, *(place(rows, layout.hidden) for _ in PROJECTIONS))


def sidecar_header(*, hidden: int, intermediate: int, experts: int, tp: int, rotation_layout: str) -> dict[str, Json]:
    sizes = {"hidden": hidden, "intermediate": intermediate, "experts": experts, "tp": tp}
    return {"format": SIDECAR_FORMAT, **sizes, "rotation_layout": rotation_layout, "layers": {}}


def sidecar_layer(layout: SlabLayout, ranks: Sequence[RankSlabs]) -> Json:
    """One layer of slabs.json: its tables' arithmetic, then where each rank's bytes are."""

    def ranged(value: Range) -> Json:
        return {"offset": value.offset, "shape": list(value.shape)}

    def rank(slabs: RankSlabs) -> Json:
        made: dict[str, Json] = {"file": slabs.file}
        for name in RANK_TABLES:
            value = getattr(slabs, name)
            made[name] = ranged(value) if isinstance(value, Range) else [ranged(v) for v in value]
        return made

    return {**_tables(layout), "ranks": [rank(slabs) for slabs in ranks]}


def _tables(layout: SlabLayout) -> dict[str, Json]:
    return {
        "bits": layout.bits(),
        "tiers": list(layout.tiers),
        "gate_n": [len(ids) for ids in layout.gates],
        "up_n": [len(ids) for ids in layout.ups],
        "down_n": [len(ids) for ids in layout.downs],
        "fc1_slots": list(layout.fc1_slots),
        "stride": layout.stride,
        "descriptors": layout.descriptors(),
        "route_map": list(range(layout.experts)),
    }


RANK_TABLES = tuple(f.name for f in fields(RankSlabs) if f.name != "file")
SIZES = ("hidden", "intermediate", "experts", "tp")
