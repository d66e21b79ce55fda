"""One layer of routed experts from its names: whatever headers and config.json contradict each other in is refused, both named.

The order is from the coarse to the fine: how the names are spelled, whole or ranked, which experts, where the hidden-side vectors
stand, which codebook; then every tensor there must be, its dtype and its shape. A later question is asked only where the earlier
ones have one answer, so that no refusal rests on a guess.
"""

from __future__ import annotations

from collections import Counter

from r7convert.errors import Offences
from r7convert.experts import HIDDEN_FIELD, MAX_K, Codebook, ExpertLayer, Hidden, Promise, shared_names
from r7convert.format import (
    FIELD_DTYPE,
    PROJECTIONS,
    TILE,
    ExpertName,
    Geometry,
    SharedVectorName,
    TensorEntry,
    expected_shape,
    legal_tps,
)
from r7convert.units import ranges

LayerNames = list[tuple[ExpertName | SharedVectorName, TensorEntry]]

_PACKED = {"suh": "su", "svh": "sv"}
_IN_PLACE_OF = {"mcg": "mul1", "mul1": "mcg", **_PACKED}
_FOUND_INSTEAD = {"mcg": "another codebook", "mul1": "another codebook", "su": "packed signs of an older EXL3", "sv": "packed signs"}


def build_layer(layer: int, names: LayerNames, geometry: Geometry, bad: Offences, promise: Promise) -> ExpertLayer | None:
    """One layer from its parsed names, or None after adding to `bad` whatever contradicts, is missing, unknown or misshapen.

    Source:  FORMAT.md sections 2 and 4, and the rows "dtypes" and "marker" of the cases.
    """
    before = len(bad)
    where = f"layer {layer}"
    experts = [(name, entry) for name, entry in names if isinstance(name, ExpertName)]
    _check_spelling(where, names, bad)
    _check_form(layer, experts, promise, bad)
    if len(bad) > before or not experts:
        return None
    tp = len({name.rank for name, _ in experts if name.rank is not None}) or None
    if tp is not None and tp not in legal_tps(geometry.intermediate):
        bad.add(where, "ranks of the routed experts", expected=f"one of {legal_tps(geometry.intermediate)}", found=tp)
        return None
    _check_count(where, experts, geometry.experts, bad)
    hidden = _hidden_layout(where, names, promise, tp, bad)
    codebook = _codebook(where, experts, promise, bad)
    if hidden is None or codebook is None or len(bad) > before:
        return None
    first = experts[0][0]
    trellises = {(name.expert, name.proj): entry for name, entry in experts if name.field == "trellis" and not name.rank}
    bits = _bits(trellises, geometry.experts, bad)
    made = ExpertLayer(first.root, layer, first.base, first.spelling, tp, hidden, codebook, bits, {e.name: e for _, e in names})
    _check_tensors(made, geometry, bad)
    return made if len(bad) == before else None


def sign(entry: TensorEntry) -> str:
    """A tensor as a sign: where it is, and its name."""
    return f"{entry.file}: {entry.name}"


def _check_spelling(where: str, names: LayerNames, bad: Offences) -> None:
    bases: dict[str, TensorEntry] = {}
    for name, entry in names:
        bases.setdefault(name.base, entry)
    if len(bases) > 1:
        bad.add(where, "names of its experts", expected="one spelling", found=" and ".join(map(sign, list(bases.values())[:2])))


def _check_form(layer: int, experts: list[tuple[ExpertName, TensorEntry]], promise: Promise, bad: Offences) -> None:
    """Whole or ranked, one of the two, and as promised; ranks 0..tp-1 and no others."""
    where = f"layer {layer}"
    whole = next((entry for name, entry in experts if name.rank is None), None)
    ranks = {name.rank: entry for name, entry in reversed(experts) if name.rank is not None}
    ranked = next(iter(ranks.values()), None)
    if promise.form == "whole" and ranked is not None:
        what, do = "rank-sliced tensor", "Without hybrid_tr3_tail in config.json nothing says how it was sliced."
        if promise.by == "r7_routed_experts":
            what = "rank-sliced tensor in a layer that the config calls R7"
            do = "v1 slicer output is not R7: use the checkpoint it was sliced from."
        beside = f", beside {sign(whole)}" if whole is not None else ""
        bad.add(sign(ranked), what, expected=f"whole matrices, as {promise.by} says", found=f"ranks {ranges(ranks)}{beside}", do=do)
    if promise.form == "whole":
        return
    if whole is not None:
        beside = f"{sign(whole)}, beside {sign(ranked)}" if ranked is not None else sign(whole)
        what = "two layouts of its experts" if ranked is not None else "whole matrices"
        bad.add(where, what, expected=f"ranks alone, as {promise.by} says", found=beside)
        return
    due = set(range(promise.tp or len(ranks)))
    said = f"tp {promise.tp}, as {promise.by} says" if promise.tp else "0..tp-1, none missing"
    if beyond := sorted(ranks.keys() - due):
        bad.add(where, "ranks of the routed experts", expected=said, found=f"ranks {ranges(ranks)}, {sign(ranks[beyond[0]])}")
    elif missing := sorted(due - ranks.keys()):
        found = f"ranks {ranges(ranks)}, without {ranges(missing)}"
        bad.add(where, "ranks of the routed experts", expected=said, found=found, do="Is a shard missing?")


def _check_count(where: str, experts: list[tuple[ExpertName, TensorEntry]], count: int, bad: Offences) -> None:
    """Every expert 0..count-1 must be there, no other: counts that differ by layer are refused by name."""
    seen = Counter(name.expert for name, _ in experts)
    missing, extra = set(range(count)) - seen.keys(), seen.keys() - set(range(count))
    if missing or extra:
        found = f"{len(seen)}" + (f" (missing {ranges(missing)})" if missing else "") + (f" (unknown {ranges(extra)})" if extra else "")
        bad.add(where, "routed experts", expected=f"{count}, as config.json says", found=found, do="Pruned layers are not supported.")


def _hidden_layout(where: str, names: LayerNames, promise: Promise, tp: int | None, bad: Offences) -> Hidden | None:
    """Where the hidden-side vectors stand, if all signs say the same."""
    before = len(bad)
    shared = {name.kind: entry for name, entry in reversed(names) if isinstance(name, SharedVectorName)}
    own = next((e for name, e in names if isinstance(name, ExpertName) and name.field == HIDDEN_FIELD[name.proj]), None)
    if len(shared) > 1:
        bad.add(where, "shared hidden-side vectors", expected="one kind", found=" and ".join(sign(entry) for entry in shared.values()))
    for kind, entry in shared.items():
        if (kind == "shared_h") != (tp is not None):
            what = "shared hidden-side vector"
            bad.add(sign(entry), what, expected="r7_shared for whole matrices, shared_h for ranks", found=f"{kind} over tp {tp or 'none'}")
    if shared and own is not None:
        found = f"{sign(own)} and {sign(next(iter(shared.values())))}"
        bad.add(where, "hidden-side vectors", expected="under every expert or once a layer", found=found)
    hidden: Hidden = "per_expert" if not shared else "shared_h" if "shared_h" in shared else "r7_shared"
    if len(bad) == before and promise.hidden is not None and hidden != promise.hidden:
        seen = next(iter(shared.values()), own)
        expected = f"{promise.hidden}, as {promise.by} says"
        bad.add(where, "hidden-side vectors", expected=expected, found=f"{hidden}, {sign(seen) if seen else 'none at all'}")
    return hidden if len(bad) == before else None


def _codebook(where: str, experts: list[tuple[ExpertName, TensorEntry]], promise: Promise, bad: Offences) -> Codebook | None:
    """The codebook of all markers there are. In a form that always has them each one that is missing is named later."""
    found = {name.field: entry for name, entry in reversed(experts) if name.field in ("mcg", "mul1")}
    if len(found) > 1:
        bad.add(where, "codebook markers", expected="one codebook", found=" and ".join(sign(entry) for entry in found.values()))
        return None
    if not found and len(promise.codebooks) > 1:
        expected, do = " or ".join(promise.codebooks), "EXL3's codebook without a marker is not supported, and none is assumed."
        bad.add(where, "codebook markers", expected=f"{expected} at every matrix", found=f"none, {sign(experts[0][1])} among others", do=do)
        return None
    made: Codebook = "mul1" if "mul1" in found else "mcg" if found else promise.codebooks[0]
    if made not in promise.codebooks:
        expected = f"{promise.codebooks[0]}, as {promise.by} says"
        bad.add(sign(found[made]), "codebook marker", expected=expected, found=f"{made}, another codebook")
        return None
    return made


def _bits(trellises: dict[tuple[int, str], TensorEntry], experts: int, bad: Offences) -> tuple[tuple[int, int, int], ...]:
    """K of every matrix, from its first trellis; 0 where there is none."""

    def bits(entry: TensorEntry | None) -> int:
        words = entry.shape[2] if entry is not None and len(entry.shape) == 3 else 0
        if entry is not None and (words % TILE or not 1 <= words // TILE <= MAX_K):
            do = "Half a bit of K is not supported." if words % TILE == TILE // 2 else ""
            bad.add(sign(entry), "K from the last dimension", expected=f"{TILE}*K, K in 1..{MAX_K}", found=list(entry.shape), do=do)
        return words // TILE

    def row(expert: int) -> tuple[int, int, int]:
        gate, up, down = (bits(trellises.get((expert, proj))) for proj in PROJECTIONS)
        return gate, up, down

    return tuple(map(row, range(experts)))


def _check_tensors(layer: ExpertLayer, geometry: Geometry, bad: Offences) -> None:
    """Every tensor the layer must have is there, of its dtype and shape, and no other."""
    expected: dict[str, tuple[str, str, int]] = {}  # name -> (proj, field, K)
    for expert, row in enumerate(layer.bits):
        for proj, k in zip(PROJECTIONS, row, strict=True):
            module = layer.module(expert, proj)
            at_expert = [field for field in layer.fields if layer.hidden == "per_expert" or field != HIDDEN_FIELD[proj]]
            for stem in [module] if layer.tp is None else [f"{module}.rank{rank}" for rank in range(layer.tp)]:
                expected |= {f"{stem}.{field}": (proj, field, k) for field in at_expert}
    for proj in PROJECTIONS if layer.hidden != "per_expert" else ():
        expected |= dict.fromkeys(shared_names(layer.base, proj, layer.hidden, layer.tp), (proj, HIDDEN_FIELD[proj], 0))

    for name, (proj, field, k) in expected.items():
        entry = layer.tensors.get(name)
        if entry is None:
            other = _IN_PLACE_OF.get(field, "")
            stands = other if other and f"{name.removesuffix(field)}{other}" in layer.tensors else ""
            do = "A marker is never assumed." if field == layer.codebook else "Is the shard that holds it here?" if not stands else ""
            found = f"{stands}, {_FOUND_INSTEAD[stands]}" if stands else "nothing"
            bad.add(name, "missing tensor", expected=f"{field} of {proj}", found=found, do=do)
            continue
        if entry.dtype != FIELD_DTYPE[field]:
            bad.add(sign(entry), "dtype", expected=FIELD_DTYPE[field], found=entry.dtype, do="Payloads are never cast.")
        shape = expected_shape(geometry, proj, field, k, layer.tp or 1)
        is_marker = field == layer.codebook and entry.shape == (1,)
        if entry.shape != shape and not is_marker:
            bad.add(sign(entry), "shape", expected=list(shape), found=list(entry.shape))
    for name in layer.tensors.keys() - expected.keys():
        field = name.rpartition(".")[2]
        what = "packed signs of an older EXL3" if field in _PACKED.values() else "tensor no reader of this layer expects"
        bad.add(
            sign(layer.tensors[name]), what, do=f"The layer's hidden-side vectors are {layer.hidden}, its codebook is {layer.codebook}."
        )
