"""The routed experts of one layer, as headers describe them: which form they are in, the K of every matrix, and where each piece is.

Two forms exist on disk. *Whole*: one trellis for a matrix, as R7 and plain EXL3 write it. *Ranked*: tp pieces, as stock readers
want it and as R7 producers carry the MTP layer. The hidden-side vectors (suh of gate and up, svh of down) stand once per layer
(`r7_shared`, `shared_h`) or under every expert (`per_expert`). A reader of an ExpertLayer asks `parts` and need not know, nor in
which words a model family spells its names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from r7convert.families import CANONICAL, SPELLINGS
from r7convert.format import PROJECTIONS, TensorEntry

Hidden = Literal["r7_shared", "shared_h", "per_expert"]
Codebook = Literal["mcg", "mul1"]
HIDDEN_FIELD: Mapping[str, str] = {"gate_proj": "suh", "up_proj": "suh", "down_proj": "svh"}
MAX_K = 8


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """`layer` counts MTP layers from num_hidden_layers on, whatever their names do. `tp` is None for whole matrices; `bits[e]` is K of
    expert e's gate, up and down; `base` is what the names of all its experts begin with, `spelling` a key of families.SPELLINGS;
    `codebook` is also the field that its markers are in; `tensors` has everything there is.
    """

    root: str
    layer: int
    base: str
    spelling: str
    tp: int | None
    hidden: Hidden
    codebook: Codebook
    bits: tuple[tuple[int, int, int], ...]
    tensors: Mapping[str, TensorEntry]

    @property
    def tiers(self) -> tuple[int, ...]:
        """The distinct K, ascending."""
        return tuple(sorted({k for row in self.bits for k in row}))

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.tensors.values())

    @property
    def fields(self) -> tuple[str, str, str, str]:
        """What a matrix consists of, the marker last."""
        return "trellis", "suh", "svh", self.codebook

    @property
    def is_canonical(self) -> bool:
        """Whether its names are `{root}.{layer}.mlp.experts.{E}.{proj}`, the only ones that the schemas of FORMAT.md know."""
        return self.base == f"{self.root}.{self.layer}.{CANONICAL}.experts"

    def module(self, expert: int, proj: str) -> str:
        """The name of one matrix as this checkpoint spells it, without a rank."""
        return f"{self.base}.{expert}.{SPELLINGS[self.spelling].routed[PROJECTIONS.index(proj)]}"

    def parts(self, expert: int, proj: str, field: str) -> tuple[TensorEntry, ...]:
        """The pieces of one field in rank order (one where it is whole): slices, except that a hidden-side vector and the marker
        are whole on every rank.
        """
        if field == HIDDEN_FIELD[proj] and self.hidden != "per_expert":
            return self.shared_parts(proj)
        module = self.module(expert, proj)
        if self.tp is None:
            return (self.tensors[f"{module}.{field}"],)
        return tuple(self.tensors[f"{module}.rank{rank}.{field}"] for rank in range(self.tp))

    def shared_parts(self, proj: str) -> tuple[TensorEntry, ...]:
        """The layer-wide hidden-side vector of a projection, in rank order; () where experts have their own."""
        if self.hidden == "per_expert":
            return ()
        return tuple(self.tensors[name] for name in shared_names(self.base, proj, self.hidden, self.tp))


def shared_names(base: str, proj: str, hidden: Hidden, tp: int | None) -> list[str]:
    """What the layer-wide hidden-side vector of a projection is called, in rank order."""
    if hidden == "r7_shared":
        return [f"{base}.r7_shared.{'down_svh' if proj == 'down_proj' else 'gate_up_suh'}"]
    return [f"{base}.shared_h.{proj}.rank{rank}.{HIDDEN_FIELD[proj]}" for rank in range(tp or 1)]


@dataclass(frozen=True, slots=True)
class Promise:
    """What config.json says of one layer's routed experts, and `by` which of its keys. Where it says nothing: None.

    `codebooks` are those that the form can have.
    """

    form: Literal["whole", "ranked"]
    by: str
    tp: int | None = None
    hidden: Hidden | None = None
    codebooks: tuple[Codebook, ...] = ("mcg",)
