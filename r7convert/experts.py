"""The routed experts of one layer, as headers describe them: which form they are in, the K of every matrix, and where each piece is.

Two forms exist on disk. *Whole*: one trellis for a matrix, as R7 and plain EXL3 write it. *Ranked*: tp pieces, as stock readers
want it and as R7 producers carry the MTP layer. The hidden-side vectors (suh of gate and up, svh of down) stand once per layer
(`r7_shared`, `shared_h`) or under every expert (`per_expert`). A reader of an ExpertLayer asks `parts` and need not know.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from r7convert.errors import Offences
from r7convert.format import (
    FIELD_DTYPE,
    FIELDS,
    PROJECTIONS,
    TILE,
    ExpertName,
    Geometry,
    SharedVectorName,
    TensorEntry,
    expected_shape,
    expert_module,
    legal_tps,
    rank_name,
    shared_h_name,
)

Hidden = Literal["r7_shared", "shared_h", "per_expert"]
HIDDEN_FIELD: Mapping[str, str] = {"gate_proj": "suh", "up_proj": "suh", "down_proj": "svh"}
MAX_K = 8


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """`tp` is None for whole matrices; `bits[e]` is K of expert e's gate, up and down; `tensors` has everything there is."""

    root: str
    layer: int
    tp: int | None
    hidden: Hidden
    bits: tuple[tuple[int, int, int], ...]
    tensors: Mapping[str, TensorEntry]

    @property
    def tiers(self) -> tuple[int, ...]:
        """The distinct K, ascending."""
        return tuple(sorted({k for row in self.bits for k in row}))

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.tensors.values())

    def parts(self, expert: int, proj: str, field: str) -> tuple[TensorEntry, ...]:
        """The pieces of one field in rank order (one where it is whole): slices, except that a hidden-side vector and mcg are
        whole on every rank.
        """
        if field == HIDDEN_FIELD[proj] and self.hidden != "per_expert":
            return self.shared_parts(proj)
        if self.tp is None:
            return (self.tensors[f"{expert_module(self.root, self.layer, expert, proj)}.{field}"],)
        return tuple(self.tensors[rank_name(self.root, self.layer, expert, proj, rank, field)] for rank in range(self.tp))

    def shared_parts(self, proj: str) -> tuple[TensorEntry, ...]:
        """The layer-wide hidden-side vector of a projection, in rank order; () where experts have their own."""
        if self.hidden == "r7_shared":
            return (self.tensors[r7_shared_name(self.root, self.layer, proj)],)
        if self.hidden == "shared_h":
            return tuple(self.tensors[shared_h_name(self.root, self.layer, proj, rank)] for rank in range(self.tp or 1))
        return ()


def r7_shared_name(root: str, layer: int, proj: str) -> str:
    return f"{root}.{layer}.mlp.experts.r7_shared.{'down_svh' if proj == 'down_proj' else 'gate_up_suh'}"


def ranges(numbers: Iterable[int]) -> str:
    """Numbers for people: "0-3, 7, 9-11"."""
    spans: list[list[int]] = []
    for n in sorted(numbers):
        if spans and n == spans[-1][1] + 1:
            spans[-1][1] = n
        else:
            spans.append([n, n])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)


LayerNames = list[tuple[ExpertName | SharedVectorName, TensorEntry]]


def build_layer(
    layer: int, names: LayerNames, geometry: Geometry, bad: Offences, *, form: Literal["whole", "ranked", "either"]
) -> ExpertLayer | None:
    """One layer from its parsed names, or None after adding to `bad` whatever is missing, unknown, foreign or misshapen.

    `form` is the form the config promises.
    Source:  FORMAT.md sections 2 and 4, and the rows "dtypes" and "marker" of the cases.
    """
    before = len(bad)
    where = f"layer {layer}"
    ranks = {name.rank for name, _ in names if isinstance(name, ExpertName)} or {None}
    if form == "whole" and ranks != {None}:
        sliced = next(entry for name, entry in names if name.rank is not None)
        bad.add(
            f"{sliced.file}: {sliced.name}",
            "rank-sliced tensor in a layer that the config calls R7",
            expected="whole matrices",
            found=f"rank {next(iter(r for r in ranks if r is not None))}",
            do="v1 slicer output is not R7: use the checkpoint it was sliced from.",
        )
        return None
    tp = None if ranks == {None} else len(ranks)
    if (form == "ranked" and tp is None) or (tp is not None and ranks != set(range(tp))):
        found = (
            "whole matrices"
            if tp is None
            else f"{'whole matrices and ' if None in ranks else ''}ranks {ranges(r for r in ranks if r is not None)}"
        )
        bad.add(where, "ranks of the routed experts", expected="ranks 0..tp-1, none missing", found=found, do="Is a shard missing?")
        return None
    if tp is not None and tp not in legal_tps(geometry.intermediate):
        bad.add(where, "ranks of the routed experts", expected=f"one of {legal_tps(geometry.intermediate)}", found=tp)
        return None

    root = names[0][0].root
    tensors = {entry.name: entry for _, entry in names}
    _check_experts(where, names, geometry.experts, bad)
    kinds = {name.kind for name, _ in names if isinstance(name, SharedVectorName)}
    hidden: Hidden = "per_expert" if not kinds else "shared_h" if "shared_h" in kinds else "r7_shared"
    if len(kinds) > 1 or (hidden == "shared_h") > (tp is not None) or (hidden == "r7_shared") > (tp is None):
        bad.add(where, "shared hidden-side vectors", expected="r7_shared for whole matrices, shared_h for ranks", found=sorted(kinds))
    if len(bad) > before:
        return None

    expected: dict[str, tuple[str, str]] = {}  # name -> (proj, field)
    bits: list[tuple[int, int, int]] = []
    wrong_k: list[str] = []
    for expert in range(geometry.experts):
        row = []
        for proj in PROJECTIONS:
            module = expert_module(root, layer, expert, proj)
            stems = [module] if tp is None else [f"{module}.rank{rank}" for rank in range(tp)]
            shared_field = None if hidden == "per_expert" else HIDDEN_FIELD[proj]
            for stem in stems:
                for field in FIELDS:
                    if field != shared_field:
                        expected[f"{stem}.{field}"] = (proj, field)
            trellis = tensors.get(f"{stems[0]}.trellis")
            words = trellis.shape[2] if trellis is not None and len(trellis.shape) == 3 else 0
            if words % TILE or not 1 <= words // TILE <= MAX_K:
                wrong_k.append(f"{stems[0]}.trellis")
            row.append(words // TILE)
        bits.append((row[0], row[1], row[2]))
    for proj in PROJECTIONS if hidden != "per_expert" else ():
        for rank in range(tp or 1):
            name = r7_shared_name(root, layer, proj) if tp is None else shared_h_name(root, layer, proj, rank)
            expected[name] = (proj, HIDDEN_FIELD[proj])

    for name, (proj, field) in expected.items():
        entry = tensors.get(name)
        if entry is None:
            mul1 = name.removesuffix("mcg") + "mul1" if field == "mcg" else ""
            found = "mul1, another codebook" if mul1 in tensors else "nothing"
            do = "A marker is never assumed." if field == "mcg" else "Is the shard that holds it here?"
            bad.add(name, "missing tensor", expected=f"{field} of {proj}", found=found, do=do)
            continue
        if entry.dtype != FIELD_DTYPE[field]:
            bad.add(f"{entry.file}: {name}", "dtype", expected=FIELD_DTYPE[field], found=entry.dtype, do="Payloads are never cast.")
        k = bits[_expert_of(name, root, layer)][PROJECTIONS.index(proj)] if field == "trellis" else 0
        shape = expected_shape(geometry, proj, field, k, tp or 1)
        if entry.shape != shape and not (field == "mcg" and entry.shape == (1,)):
            bad.add(f"{entry.file}: {name}", "shape", expected=list(shape), found=list(entry.shape))
    for name in tensors.keys() - expected.keys():
        is_mul1 = name.endswith(".mul1")
        what = "mul1 marker, another codebook" if is_mul1 else "tensor no reader of this layer expects"
        bad.add(f"{tensors[name].file}: {name}", what, do="" if is_mul1 else f"The layer's hidden-side vectors are {hidden}.")
    for name in wrong_k:
        if name in tensors:
            bad.add(
                f"{tensors[name].file}: {name}",
                "K from the last dimension",
                expected=f"{TILE}*K, K in 1..{MAX_K}",
                found=list(tensors[name].shape),
            )
    if len(bad) > before:
        return None
    return ExpertLayer(root, layer, tp, hidden, tuple(bits), tensors)


def _expert_of(name: str, root: str, layer: int) -> int:
    return int(name[len(f"{root}.{layer}.mlp.experts.") :].split(".", 1)[0])


def _check_experts(where: str, names: LayerNames, count: int, bad: Offences) -> None:
    """Every expert 0..count-1 must be there, no other: pruned layers are refused by name."""
    seen = Counter(name.expert for name, _ in names if isinstance(name, ExpertName))
    missing, extra = set(range(count)) - seen.keys(), seen.keys() - set(range(count))
    if missing or extra:
        found = f"{len(seen)}" + (f" (missing {ranges(missing)})" if missing else "") + (f" (unknown {ranges(extra)})" if extra else "")
        bad.add(where, "routed experts", expected=f"{count}, as config.json says", found=found, do="Pruned layers are not supported.")
    if len({name.root for name, _ in names}) > 1:
        bad.add(where, "tensor root", expected="one", found=sorted({name.root for name, _ in names}))
