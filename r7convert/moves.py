"""One layer's routed experts on their way from source to output: which bytes are joined, cut and written where. Pure.

A Move is one field of one matrix. Its source parts (one where the source is whole, else one a rank) are joined along its axis
and cut into as many equal pieces as there are output files:

    rows    pieces are ranges of bytes: down trellises (cut along in), vectors of the intermediate side
    cols    pieces are columns of every row of tiles: gate and up trellises (cut along out)
    whole   every file gets all of it: hidden-side vectors and markers; where the source has a copy a rank, all must be equal

A LayerPlan lists the moves of a layer in the order of its files, so that writing is one pass over them. What it makes is said
in the two words that say what a source is, `tp` and `hidden`: any form of a layer becomes any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from r7convert.experts import HIDDEN_FIELD, ExpertLayer, Hidden, shared_names
from r7convert.families import SPELLINGS
from r7convert.format import (
    FIELD_DTYPE,
    PER_EXPERT_V1,
    PROJECTIONS,
    SHARED_H_V1,
    Geometry,
    TensorEntry,
    expected_shape,
    tensor_nbytes,
)
from r7convert.slab_layout import SlabLayout, plan_slabs, slab_order
from r7convert.store import encode_header

Axis = Literal["rows", "cols", "whole"]
STEM = "experts"
R7_STEM = "r7-experts"
LAYOUTS: Mapping[str, Hidden] = {SHARED_H_V1: "shared_h", PER_EXPERT_V1: "per_expert"}
"""What the rotation layouts of ranked files are called where whole files are at hand too."""


@dataclass(frozen=True, slots=True)
class Move:
    """One field of one matrix (`expert` None: a vector the layer shares). `rows` counts the rows of tiles of a `cols` move.

    `new_bits` is None for bytes that stay as they are. A number asks for the joined trellis to be encoded again at that K,
    whole, before it is cut.
    """

    expert: int | None
    proj: str
    field: str
    sources: tuple[TensorEntry, ...]
    axis: Axis
    rows: int
    new_bits: int | None = None

    @property
    def where(self) -> str:
        return f"{self.sources[0].file}: {self.sources[0].name}"


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """The output files of one layer. `tp` None: one file of whole matrices; else a file a rank, in slab order.

    `hidden` says where the hidden-side vectors will stand. `bits` is the K each matrix will have; where it differs from the
    source's the trellis is encoded again.
    """

    source: ExpertLayer
    geometry: Geometry
    tp: int | None
    hidden: Hidden
    bits: Sequence[Sequence[int]]
    metadata: Mapping[str, str]

    @property
    def layer(self) -> int:
        return self.source.layer

    @property
    def rotation_layout(self) -> str:
        """The name that ranked files have for `hidden`."""
        return SHARED_H_V1 if self.hidden == "shared_h" else PER_EXPERT_V1

    @property
    def files(self) -> tuple[str, ...]:
        stem = f"{R7_STEM if self.hidden == 'r7_shared' else STEM}-layer-{self.layer:03d}"
        if self.tp is None:
            return (f"{stem}.safetensors",)
        return tuple(f"{stem}-rank-{rank}-of-{self.tp}.safetensors" for rank in range(self.tp))

    @property
    def slabs(self) -> SlabLayout:
        return plan_slabs(self.bits, hidden=self.geometry.hidden, inner=self.geometry.intermediate // (self.tp or 1))

    @property
    def reencoded(self) -> int:
        """Matrices whose K changes."""
        return sum(a != b for old, new in zip(self.source.bits, self.bits, strict=True) for a, b in zip(old, new, strict=True))

    def order(self) -> Iterator[tuple[int | None, str, str]]:
        """(expert, projection, field) of every tensor of a file; expert None is a vector the layer shares."""
        if self.tp is not None:
            yield from slab_order(self.slabs, self.rotation_layout)
            return
        if self.hidden == "r7_shared":
            yield from ((None, proj, HIDDEN_FIELD[proj]) for proj in ("gate_proj", "down_proj"))
        for expert in range(len(self.bits)):
            for proj in PROJECTIONS:
                own = (field for field in self.source.fields if self.hidden == "per_expert" or field != HIDDEN_FIELD[proj])
                yield from ((expert, proj, field) for field in own)

    def moves(self) -> Iterator[Move]:
        for expert, proj, field in self.order():
            if expert is None:
                yield Move(None, proj, field, self._shared_sources(proj), "whole", 1)
                continue
            sources = self.source.parts(expert, proj, field)
            if field == "trellis":
                old, new = (table[expert][PROJECTIONS.index(proj)] for table in (self.source.bits, self.bits))
                rows, _, _ = expected_shape(self.geometry, proj, field, old)
                axis: Axis = "rows" if proj == "down_proj" else "cols"
                yield Move(expert, proj, field, sources, axis, rows, None if old == new else new)
            else:
                is_whole = field in (self.source.codebook, HIDDEN_FIELD[proj])
                yield Move(expert, proj, field, sources, "whole" if is_whole else "rows", 1)

    def _shared_sources(self, proj: str) -> tuple[TensorEntry, ...]:
        """Every stored copy of what becomes one vector of the layer."""
        alike = [p for p in PROJECTIONS if self._shared_name(p, 0) == self._shared_name(proj, 0)]
        experts = range(len(self.bits)) if self.source.hidden == "per_expert" else range(1)
        copies = (self.source.parts(expert, p, HIDDEN_FIELD[p]) for p in alike for expert in experts)
        return tuple(dict.fromkeys(entry for entries in copies for entry in entries))

    def _shared_name(self, proj: str, rank: int) -> str:
        """The output's name of a layer-wide vector."""
        return shared_names(self.source.base, proj, self.hidden, self.tp)[rank]

    def tensors(self, rank: int) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """(name, dtype, shape) of every tensor of one file, in file order."""
        place = "" if self.tp is None else f".rank{rank}"
        for expert, proj, field in self.order():
            name = self._shared_name(proj, rank) if expert is None else f"{self.source.module(expert, proj)}{place}.{field}"
            k = self.bits[expert][PROJECTIONS.index(proj)] if expert is not None else 0
            shape = expected_shape(self.geometry, proj, field, k, self.tp or 1)
            if field == self.source.codebook:
                shape = self.source.parts(expert or 0, proj, field)[0].shape  # [] or [1], as the source has it
            yield name, FIELD_DTYPE[field], shape

    def header(self, rank: int) -> bytes:
        place = {} if self.tp is None else {"tp": str(self.tp), "rank": str(rank)}
        metadata = {**self.metadata, "format": "pt", "layer": str(self.layer), **place}
        return encode_header(list(self.tensors(rank)), metadata, self.files[rank])

    @property
    def file_nbytes(self) -> int:
        """Payload bytes of one of the files; all have the same."""
        return sum(tensor_nbytes(dtype, shape) for _, dtype, shape in self.tensors(0))

    def fate(self, name: str) -> str:
        """What becomes of a source tensor that is not encoded again: kept, cut into ranks, joined from ranks, or, of a hidden-side
        vector, spread from the layer to its experts or gathered from them.
        """
        before, after = self.source.tp or 0, self.tp or 0
        if self.source.hidden != self.hidden and self._is_hidden(name):
            if self.hidden == "per_expert":
                return "spread"
            if self.source.hidden == "per_expert":
                return "gathered"
        return "sliced" if before < after else "joined" if before > after else "kept"

    def _is_hidden(self, name: str) -> bool:
        """Whether a source tensor is a hidden-side vector, under an expert or the layer's own."""
        down = SPELLINGS[self.source.spelling].routed[2]
        return ".r7_shared." in name or ".shared_h." in name or name.endswith(".svh" if f".{down}." in name else ".suh")
