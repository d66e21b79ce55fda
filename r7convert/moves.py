"""One layer's routed experts on their way from source to output: which bytes are joined, cut and written where. Pure.

A Move is one field of one matrix. Its source parts (one where the source is whole, else one a rank) are joined along its axis
and cut into as many equal pieces as there are output files:

    rows    pieces are ranges of bytes: down trellises (cut along in), vectors of the intermediate side
    cols    pieces are columns of every row of tiles: gate and up trellises (cut along out)
    whole   every file gets all of it: hidden-side vectors and markers; where the source has a copy a rank, all must be equal

A LayerPlan lists the moves of a layer in the order of its files, so that writing is one pass over them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from r7convert.experts import HIDDEN_FIELD, ExpertLayer
from r7convert.format import (
    FIELD_DTYPE,
    FIELDS,
    PROJECTIONS,
    SHARED_H_V1,
    Geometry,
    TensorEntry,
    expected_shape,
    expert_module,
    rank_name,
    shared_h_name,
    tensor_nbytes,
)
from r7convert.slab_layout import SlabLayout, plan_slabs, slab_order
from r7convert.store import encode_header

Axis = Literal["rows", "cols", "whole"]
STEM = "experts"


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
    """The output files of one layer. `tp` None: one file of whole matrices (target exl3); else a file a rank, in slab order.

    `bits` is the K each matrix will have; where it differs from the source's the trellis is encoded again.
    """

    source: ExpertLayer
    geometry: Geometry
    tp: int | None
    rotation_layout: str
    bits: Sequence[Sequence[int]]
    metadata: Mapping[str, str]

    @property
    def layer(self) -> int:
        return self.source.layer

    @property
    def files(self) -> tuple[str, ...]:
        stem = f"{STEM}-layer-{self.layer:03d}"
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
        if self.tp is None:
            return ((e, proj, field) for e in range(self.geometry.experts) for proj in PROJECTIONS for field in FIELDS)
        return slab_order(self.slabs, self.rotation_layout)

    def moves(self) -> Iterator[Move]:
        for expert, proj, field in self.order():
            sources = self.source.parts(expert or 0, proj, field)
            if field == "trellis":
                assert expert is not None
                old, new = (table[expert][PROJECTIONS.index(proj)] for table in (self.source.bits, self.bits))
                rows, _, _ = expected_shape(self.geometry, proj, field, old)
                axis: Axis = "rows" if proj == "down_proj" else "cols"
                yield Move(expert, proj, field, sources, axis, rows, None if old == new else new)
            else:
                is_whole = field in ("mcg", HIDDEN_FIELD[proj])
                yield Move(expert, proj, field, sources, "whole" if is_whole else "rows", 1)

    def tensors(self, rank: int) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """(name, dtype, shape) of every tensor of one file, in file order."""
        root, layer = self.source.root, self.layer
        for expert, proj, field in self.order():
            if expert is None:
                name = shared_h_name(root, layer, proj, rank)
            elif self.tp is None:
                name = f"{expert_module(root, layer, expert, proj)}.{field}"
            else:
                name = rank_name(root, layer, expert, proj, rank, field)
            k = self.bits[expert][PROJECTIONS.index(proj)] if expert is not None else 0
            shape = expected_shape(self.geometry, proj, field, k, self.tp or 1)
            if field == "mcg":
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

    def is_kept(self) -> bool:
        """True if every source tensor comes out under its own name with its own bytes."""
        same_layout = self.source.hidden == ("shared_h" if self.tp and self.rotation_layout == SHARED_H_V1 else "per_expert")
        return self.source.tp == self.tp and same_layout and not self.reencoded
