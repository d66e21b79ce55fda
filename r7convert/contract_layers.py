"""The contract on one layer of routed experts: names, dtypes, shapes and K, as headers say them (FORMAT.md sections 2, 4, 5, 8)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

from r7convert.evidence import HIDDEN_FIELD, R7_SHARED_FIELD, Key, LayerExperts
from r7convert.findings import Part
from r7convert.format import PROJECTIONS, RANK_SUFFIX, Geometry, TensorEntry, is_expert_name, parse_name

Layout = Literal["per_expert_v1", "shared_h_v1", "r7_shared", "per_expert"]
"""Where hidden-side vectors stand: under every expert and rank, once a layer and rank, once a layer, under every whole matrix."""

DTYPES = {"trellis": "I16", "suh": "F16", "svh": "F16", "mcg": "I32", "mul1": "I32"}
MARKERS = ("mcg", "mul1")
STOCK_K = frozenset({3, 4, 5, 6})
MOST_STOCK_K = 2
QUALIFIED_K = frozenset({3, 4})


def check_layer(
    layer: LayerExperts,
    part: Part,
    *,
    geometry: Geometry,
    tp: int | None,
    layout: Layout,
    roots: Collection[str],
    codebook: str = "mcg",
    any_names: bool = False,
) -> None:
    """Every tensor of the layer is there, none beside them, each of its dtype and shape; K is one over the ranks of a matrix.

    `tp` None: whole matrices. A stock reader meets an unknown name with a KeyError, and drops another rank's in silence.
    `any_names`: the words of other families are known too, and MTP layers under a root of their own.
    """
    names = part.check("expert tensors: none missing, none unknown")
    for entry in layer.unknown:
        names.fail(f"{entry.file}: {entry.name}", "name no reader knows", expected="a tensor of the schema", found=entry.name)
    for root in layer.roots if not any_names or layer.layer < geometry.layers else ():
        names.expect(root in roots, f"layer {layer.layer}", "tensor root", expected=" or ".join(sorted(roots)), found=root)
    stems = {f"{root}.{layer.layer}.mlp.experts" for root in layer.roots}
    named = len(layer.bases) == 1 and (any_names or layer.bases == stems)
    names.expect(named, f"layer {layer.layer}", "names of experts", expected=" or ".join(sorted(stems)), found=sorted(layer.bases))
    ranks: list[int | None] = [None] if tp is None else list(range(tp))
    at_expert = layout in ("per_expert_v1", "per_expert")

    due: set[Key] = set()
    for expert in range(geometry.experts):
        for proj in PROJECTIONS:
            fields = [field for field in ("trellis", "suh", "svh", codebook) if at_expert or field != HIDDEN_FIELD[proj]]
            due |= {(expert, proj, rank, field) for rank in ranks for field in fields}
    for key in sorted(due - layer.own.keys(), key=str):
        expert, proj, rank, field = key
        marker = "mul1, another codebook" if field == "mcg" and (expert, proj, rank, "mul1") in layer.own else "nothing"
        names.fail(f"{layer.where(expert, proj)}{_of(rank)}", "missing tensor", expected=field, found=marker)
    for key in sorted(layer.own.keys() - due, key=str):
        entry = layer.own[key]
        names.fail(
            f"{entry.file}: {entry.name}", "tensor beside the contract", expected=_why(key, geometry.experts, tp, layout), found=key[3]
        )

    shared = {(proj, rank, HIDDEN_FIELD[proj]) for proj in PROJECTIONS for rank in range(tp or 0)} if layout == "shared_h_v1" else set()
    r7_shared = set(R7_SHARED_FIELD.values()) if layout == "r7_shared" else set()
    for missing in sorted(shared - layer.shared_h.keys()) + sorted((name,) for name in r7_shared - layer.r7_shared.keys()):
        names.fail(f"layer {layer.layer}", "missing shared vector", expected=" ".join(map(str, missing)), found="nothing")
    strangers = [layer.shared_h[key] for key in layer.shared_h.keys() - shared]
    for entry in strangers + [layer.r7_shared[name] for name in layer.r7_shared.keys() - r7_shared]:
        names.fail(f"{entry.file}: {entry.name}", "shared vector beside the contract", expected=f"layout {layout}", found=entry.name)
    names.saw(len(due) + len(shared) + len(r7_shared))

    _check_shapes(layer, part, geometry, tp)


def _check_shapes(layer: LayerExperts, part: Part, geometry: Geometry, tp: int | None) -> None:
    shapes = part.check("expert tensors: dtype and shape")
    inner = geometry.intermediate // (tp or 1)
    for (_, proj, _, field), entry in layer.own.items():
        rows, cols = (inner, geometry.hidden) if proj == "down_proj" else (geometry.hidden, inner)
        last = entry.shape[-1] if entry.shape else 0
        fits = {
            "trellis": entry.shape == (rows // 16, cols // 16, last) and last > 0 and last % 16 == 0,
            "suh": entry.shape == (rows,),
            "svh": entry.shape == (cols,),
            **dict.fromkeys(MARKERS, entry.shape in ((), (1,))),
        }.get(field, False)
        due = {"trellis": f"I16 [{rows // 16}, {cols // 16}, 16*K]", "suh": f"F16 [{rows}]", "svh": f"F16 [{cols}]", "mcg": "I32 []"}
        good = fits and entry.dtype == DTYPES.get(field)
        shapes.expect(good, f"{entry.file}: {entry.name}", "dtype and shape", expected=due.get(field), found=_form(entry))
    for entry in [*layer.shared_h.values(), *layer.r7_shared.values()]:
        good = entry.dtype == "F16" and entry.shape == (geometry.hidden,)
        shapes.expect(good, f"{entry.file}: {entry.name}", "dtype and shape", expected=f"F16 [{geometry.hidden}]", found=_form(entry))

    one = part.check("K: one over all ranks of a matrix", "matrices")
    for expert in layer.experts:
        for proj in PROJECTIONS:
            ks = layer.bits(expert, proj)
            one.expect(len(ks) == 1 and 0 not in ks, layer.where(expert, proj), "K of its ranks", expected="one", found=sorted(ks))


def check_stock_k(layer: LayerExperts, stated: Sequence[int] | None, part: Part) -> None:
    """One K an expert, one or two a layer, in 3..6, and what the tier map states.

    Source:  FORMAT.md section 4, "the heart of the matter".
    """
    expert_k = part.check("K: one an expert, gate = up = down", "experts")
    layer_k = part.check("K: one or two in a layer, each in 3..6", "layers")
    mapped = part.check("K: as the tail states it", "experts")
    found: set[int] = set()
    for expert, ks in layer.k_rows():
        where = f"layer {layer.layer}: expert {expert}"
        expert_k.expect(len(set(ks)) == 1, where, "K of gate, up, down", expected="one", found=list(ks))
        found |= set(ks)
        said = stated[expert] if stated is not None and expert < len(stated) else None
        mapped.expect(set(ks) == {said}, where, "K", expected=f"{ks[0]}, as the payload has it", found=said)
    good = 1 <= len(found) <= MOST_STOCK_K and found <= STOCK_K
    layer_k.expect(good, f"layer {layer.layer}", "distinct K", expected="one or two out of 3..6", found=sorted(found))
    if good and not found <= QUALIFIED_K and not layer_k.notes:
        layer_k.note(f"layer {layer.layer} has K {sorted(found)}: stock code takes it, its authors qualified pairs of 3 and 4 alone")


def check_free_k(layer: LayerExperts, allowed: Collection[int], part: Part) -> None:
    """A K per projection, each one allowed."""
    check = part.check("K: each one the target's readers decode", "matrices")
    for expert, ks in layer.k_rows():
        for proj, k in zip(PROJECTIONS, ks, strict=True):
            check.expect(k in allowed, layer.where(expert, proj), "K", expected=f"one of {sorted(allowed)}", found=k)


def check_slab_tiers(layer: LayerExperts, part: Part) -> None:
    """The limits of slab readers: at most three tiers, three are exactly 3, 4, 5.

    Source:  FORMAT.md section 5.
    """
    found = sorted({k for _, ks in layer.k_rows() for k in ks})
    good = len(found) in (1, 2) or found == [3, 4, 5]
    part.check("tiers: at most three, three are 3, 4 and 5", "layers").expect(
        good, f"layer {layer.layer}", "tiers", expected="one, two, or 3, 4 and 5", found=found
    )


def check_rank_names(entries: Collection[TensorEntry], part: Part, *, tp: int | None) -> None:
    """No name outside the routed experts may end in `.rank<n>.<field>`: a stock reader drops another rank's in silence."""
    check = part.check("no `.rank<n>.` name a reader would drop")
    for entry in entries:
        m = RANK_SUFFIX.search(entry.name)
        routed = is_expert_name(entry.name) and parse_name(entry.name) is not None
        good = m is None or (routed and tp is not None and int(m[1]) < tp)
        expected = f"ranks 0..{tp - 1} of routed experts" if tp else "no ranks"
        check.expect(good, f"{entry.file}: {entry.name}", "rank in a name", expected=expected, found=m and m[0])


def _form(entry: TensorEntry) -> str:
    return f"{entry.dtype} {list(entry.shape)}"


def _of(rank: int | None) -> str:
    return "" if rank is None else f": rank {rank}"


def _why(key: Key, experts: int, tp: int | None, layout: Layout) -> str:
    expert, proj, rank, field = key
    if expert >= experts:
        return f"experts 0..{experts - 1}"
    if (rank is None) != (tp is None):
        return "whole matrices" if tp is None else "rank-sliced names"
    if rank is not None and tp is not None and rank >= tp:
        return f"ranks 0..{tp - 1}"
    if field == "mul1":
        return "mcg alone: mul1 is another codebook"
    return f"{HIDDEN_FIELD[proj]} of {proj} as {layout} has it"
