"""What a target's reader takes, asked before a plan is made: choices, forms, K, tiers, dense modules. One table says it.

Pure but for hidden-side vectors: whether the experts of a layer share theirs cannot be seen from headers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from r7convert import policy
from r7convert.checkpoint import Checkpoint
from r7convert.errors import Offences, UnsupportedError, UsageError, complain
from r7convert.experts import MAX_K, ExpertLayer, Hidden
from r7convert.format import (
    PER_EXPERT_V1,
    R7_K_VALUES,
    SHARED_H_V1,
    SLICED,
    STOCK_READERS,
    TAIL_K_VALUES,
    check_tp,
    layer_of,
    legal_tps,
    mtp_layer,
)
from r7convert.ktable import MAX_TIERS, KTable, Problem
from r7convert.moves import LAYOUTS, LayerPlan
from r7convert.stamp import TARGETS
from r7convert.units import ranges
from r7convert.vectors import Vectors

Choose = Callable[[Problem], policy.Plan]
Form = tuple[int | None, Hidden]
"""(tp, hidden) of a layer's output files, as moves.LayerPlan has them."""


@dataclass(frozen=True, slots=True)
class Takes:
    """What the readers of a target take of routed experts and of EXL3 beside them. Everything else here follows from this table."""

    ks: frozenset[int]
    any_names: bool = False
    """The words of every family, and MTP layers under a root of their own; else `{root}.{L}.mlp.experts.{E}.{gate|up|down}_proj`."""
    codebooks: tuple[str, ...] = ("mcg",)
    stock_k: bool = False
    """One K an expert, at most two a layer: `rank-sliced` may come there by a K policy."""
    tiers: bool = False
    """At most three K a layer, and three are 3, 4 and 5: what slab kernels have tables for."""
    one_range: bool = False
    """Layers with routed experts stand in one contiguous range of layers."""
    dense_in_range: bool = False
    """Dense EXL3 in the layers of that range alone."""


TAKES: Mapping[str, Takes] = {
    "r7": Takes(R7_K_VALUES, one_range=True),
    "rank-sliced": Takes(TAIL_K_VALUES, stock_k=True, one_range=True, dense_in_range=True),
    "slabs": Takes(TAIL_K_VALUES, any_names=True, tiers=True),
    "exl3": Takes(frozenset(range(1, MAX_K + 1)), any_names=True, codebooks=("mcg", "mul1")),
}
"""Source:  FORMAT.md sections 2, 4, 5 and 8."""
TAIL = replace(TAKES["rank-sliced"], dense_in_range=False)
"""What an R7-aware reader takes of the layers it has in a tail: the MTP layers."""
KERNEL_TIERS = 3


def check_choices(
    checkpoint: Checkpoint, target: str, tp: int | None, reader: str, rotation_layout: str | None, layers: tuple[int, int] | None
) -> None:
    def refuse(what: str, expected: object, found: object) -> None:
        raise UsageError(complain(what, f"for target {target}", expected=expected, found=found))

    if target not in TARGETS:
        raise UsageError(complain("--target", "target", expected=f"one of {', '.join(TARGETS)}", found=target))
    if reader not in STOCK_READERS:
        refuse("--reader", f"one of {', '.join(STOCK_READERS)}", reader)
    if target in SLICED and tp is None:
        refuse("--tp", f"one of {legal_tps(checkpoint.geometry.intermediate)}", "none")
    if target == "exl3" and tp is not None:
        refuse("--tp", "none: its matrices are whole", tp)
    if tp is not None:
        check_tp(tp, checkpoint.geometry.intermediate)
    if rotation_layout is not None and target not in SLICED:
        refuse("--rotation-layout", f"target {' or '.join(SLICED)}", rotation_layout)
    if rotation_layout not in (None, SHARED_H_V1, PER_EXPERT_V1):
        refuse("--rotation-layout", f"{SHARED_H_V1} or {PER_EXPERT_V1}", rotation_layout)
    if rotation_layout == SHARED_H_V1 and target == "rank-sliced" and reader == "r14":
        refuse("--rotation-layout", f"{PER_EXPERT_V1}: an r14 reader ignores the key and fails late", rotation_layout)
    if layers is not None and target not in SLICED:
        refuse("--layers", f"target {' or '.join(SLICED)}", f"{layers[0]}-{layers[1]}")
    if layers is not None and layers[0] > layers[1]:
        refuse("--layers", "A-B with A <= B", f"{layers[0]}-{layers[1]}")
    if not checkpoint.experts:
        raise UnsupportedError(complain(checkpoint.where, "routed experts in EXL3", expected="some", found="none"))


# ---- forms ----------------------------------------------------------------------------------------------------------


def choose_forms(
    checkpoint: Checkpoint,
    layers: Sequence[ExpertLayer],
    vectors: Vectors,
    *,
    target: str,
    tp: int | None,
    reader: str,
    rotation_layout: str | None,
) -> tuple[dict[int, Form], list[str]]:
    """The form of each layer that gets new files, and a note where vectors forced a rotation layout. Other layers stay in the shards
    they are in.

    Raises:  UnsupportedError for vectors that the target has no place for.
    """
    if target in SLICED:
        layout, notes = _rotation_layout(layers, vectors, reader if target == "rank-sliced" else "r28", rotation_layout)
        return {layer.layer: (tp, LAYOUTS[layout]) for layer in layers}, notes
    plain: Form = (None, "per_expert")
    wanted = dict.fromkeys((layer.layer for layer in layers), plain) if target == "exl3" else _r7_forms(checkpoint, layers, vectors, tp)
    is_described = target == "exl3" or checkpoint.r7 is not None  # else the JSON is new: so are the files that it describes
    stays = {layer.layer for layer in layers if is_described and wanted[layer.layer] == (layer.tp, layer.hidden)}
    return {number: form for number, form in wanted.items() if number not in stays}, []


def _r7_forms(checkpoint: Checkpoint, layers: Sequence[ExpertLayer], vectors: Vectors, tp: int | None) -> dict[int, Form]:
    """What is R7 stays, its tail cut anew where another tp is asked for. Anything else becomes whole matrices with vectors of the
    layer; an MTP layer whose experts do not share theirs goes to the tail, as R7 producers have it.
    """
    forms: dict[int, Form] = {}
    bad = Offences()
    for layer in layers:
        is_mtp = layer.layer >= checkpoint.geometry.layers
        if checkpoint.r7 is not None:
            forms[layer.layer] = (layer.tp and (tp or layer.tp), layer.hidden)
        elif (odd := vectors.find_apart(layer)) is None:
            forms[layer.layer] = (None, "r7_shared")
        elif is_mtp:
            forms[layer.layer] = (tp or layer.tp or 1, layer.hidden)
        else:
            do = "R7 has one for gate and up and one for down."
            bad.add(odd, "hidden-side vector", expected=f"one for all experts of layer {layer.layer}", found="another", do=do)
    bad.check(UnsupportedError)
    return forms


def _rotation_layout(layers: Sequence[ExpertLayer], vectors: Vectors, reader: str, wanted: str | None) -> tuple[str, list[str]]:
    """The layout of the whole output.

    Raises:  UnsupportedError if shared_h_v1 is asked for and a layer's experts do not share their vectors.
    Source:  FORMAT.md section 4: the layout is global, so one layer with own vectors forces per_expert_v1 for all.
    """
    if wanted == PER_EXPERT_V1 or reader == "r14":
        return PER_EXPERT_V1, []
    for layer in layers:
        odd, why = vectors.find_own(layer), f"experts of layer {layer.layer} have hidden-side vectors of their own"
        if odd is None and layer.is_canonical:
            continue
        if odd is None:
            odd, why = layer.base, f"no reader knows shared vectors under {layer.base}"
        if wanted == SHARED_H_V1:
            do = f"Use --rotation-layout {PER_EXPERT_V1}, or --drop-mtp if it is an MTP layer."
            raise UnsupportedError(complain(odd, SHARED_H_V1, expected="the vector of expert 0, under mlp.experts", found=why, do=do))
        return PER_EXPERT_V1, [f"rotation layout {PER_EXPERT_V1}: {why}"]
    return SHARED_H_V1, []


# ---- K and layers ---------------------------------------------------------------------------------------------------


def target_bits(checkpoint: Checkpoint, layers: Sequence[ExpertLayer], choose: Choose) -> dict[int, Sequence[Sequence[int]]]:
    """K of every matrix after the policy has spoken: one an expert, at most two a layer.

    Raises:  UnsupportedError from the policy, or for a K no stock reader takes.
    """
    import numpy as np

    g = checkpoint.geometry
    bad = Offences()
    for layer in layers:
        if outside := sorted(set(layer.tiers) - TAKES["rank-sliced"].ks):
            bad.add(f"layer {layer.layer}", "K", expected=f"each of {sorted(TAIL_K_VALUES)}", found=outside)
    bad.check(UnsupportedError)
    tables = tuple(KTable(layer.layer, np.array(layer.bits, dtype=np.int64)) for layer in layers)
    chosen = choose(Problem(tables, g.hidden * g.intermediate))
    return {plan.layer: tuple((int(k),) * 3 for k in plan.expert_bits) for plan in chosen.layers}


def check_reader(checkpoint: Checkpoint, target: str, layers: Sequence[LayerPlan], kept: Sequence[str], *, partial: bool) -> None:
    """What the target's reader refuses, or drops in silence, beyond K and tp.

    Source:  FORMAT.md sections 4 and 5.
    """
    bad = Offences()
    carried = set(kept)
    takes = TAKES[target]
    for layer in layers:
        _check_k(layer, TAIL if target == "r7" and layer.tp is not None else takes, bad)
    for module in checkpoint.dense_exl3:
        if f"{module}.trellis" in carried:
            _check_module(checkpoint, module, takes, bad)
    whole, ranked = ([layer.layer for layer in layers if (layer.tp is None) == is_whole] for is_whole in (True, False))
    for block, numbers in (("r7_routed_experts", whole), ("hybrid_tr3_tail", ranked)) if takes.one_range and not partial else ():
        if numbers and numbers != list(range(numbers[0], numbers[-1] + 1)):
            bad.add("layers with routed experts", f"moe_layers of {block}", expected="one contiguous range", found=ranges(numbers))
    for module in checkpoint.dense_exl3 if takes.dense_in_range and not partial else ():
        mtp = mtp_layer(f"{module}.", checkpoint.geometry.layers)
        at = layer_of(module) if mtp is None else mtp
        if f"{module}.mcg" in checkpoint.tensors and f"{module}.trellis" in carried and at not in ranked:
            found = "no layer" if at is None else f"layer {at}"
            do = "No stock server loads it there: another target does, or a checkpoint where it is not quantized."
            bad.add(module, "dense EXL3 with an mcg marker", expected=f"a layer of {ranges(ranked)}", found=found, do=do)
    bad.check(UnsupportedError)


def _check_module(checkpoint: Checkpoint, module: str, takes: Takes, bad: Offences) -> None:
    """A dense module is whole, and its marker one that the readers decode by."""
    markers = [marker for marker in ("mcg", "mul1") if f"{module}.{marker}" in checkpoint.tensors]
    missing = [field for field in ("suh", "svh") if f"{module}.{field}" not in checkpoint.tensors]
    if missing or len(markers) != 1:
        found = f"no {', '.join(missing)}" if missing else " and ".join(markers) or "no mcg"
        bad.add(module, "dense EXL3 module", expected="trellis, suh, svh and mcg", found=found, do="Nothing is assumed.")
    elif markers[0] not in takes.codebooks:
        bad.add(module, "codebook of a dense EXL3 module", expected=" or ".join(takes.codebooks), found=markers[0])


def check_words(checkpoint: Checkpoint, layers: Sequence[ExpertLayer], target: str) -> None:
    """Names and codebook, which no choice and no policy mends: asked before anything else.

    Raises:  UnsupportedError, every layer that the target's readers do not know.
    """
    bad, takes = Offences(), TAKES[target]
    for layer in layers:
        where, gate = f"layer {layer.layer}", layer.module(0, "gate_proj")
        if not takes.any_names and not layer.is_canonical:
            do = "Use --drop-mtp to leave the MTP layers out." if layer.layer >= checkpoint.geometry.layers else ""
            bad.add(where, "names of routed experts", expected="{root}.{L}.mlp.experts.{E}.gate_proj", found=gate, do=do)
        if layer.codebook not in takes.codebooks:
            bad.add(where, "codebook", expected=" or ".join(takes.codebooks), found=layer.codebook)
    bad.check(UnsupportedError)


def _check_k(layer: LayerPlan, takes: Takes, bad: Offences) -> None:
    """The K a layer will have."""
    where, ks = f"layer {layer.layer}", sorted({k for row in layer.bits for k in row})
    if outside := sorted(set(ks) - takes.ks):
        bad.add(where, "K", expected=f"each of {sorted(takes.ks)}", found=outside)
    if takes.tiers and (len(ks) > KERNEL_TIERS or (len(ks) == KERNEL_TIERS and ks != [3, 4, 5])):
        bad.add(where, "tiers", expected="at most two K, or exactly 3, 4 and 5", found=ks)
    if takes.stock_k:
        if mixed := [expert for expert, row in enumerate(layer.bits) if len(set(row)) > 1]:
            bad.add(where, "K", expected="one an expert", found=f"experts {ranges(mixed)} mix K")
        if len(ks) > MAX_TIERS:
            bad.add(where, "K", expected=f"at most {MAX_TIERS} in a layer", found=ks)


def slab_notes(layers: Sequence[LayerPlan]) -> list[str]:
    wide = [layer.layer for layer in layers if not layer.slabs.has_descriptors]
    return [f"layers {ranges(wide)}: over 256 experts in one tier, so slabs.json has no descriptors for them"] if wide else []
