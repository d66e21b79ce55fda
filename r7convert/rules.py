"""What a target's reader takes, asked before a plan is made: choices, K, tp, rotation layout, tiers.

Pure but for a few vectors: whether the experts of a layer share their hidden-side vectors cannot be seen from headers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from r7convert import policy
from r7convert.checkpoint import Checkpoint
from r7convert.errors import Offences, UnsupportedError, UsageError, complain
from r7convert.experts import HIDDEN_FIELD, ExpertLayer, ranges
from r7convert.format import PER_EXPERT_V1, PROJECTIONS, SHARED_H_V1, SLICED, STOCK_READERS, TAIL_K_VALUES, check_tp, layer_of, legal_tps
from r7convert.ktable import KTable, Problem
from r7convert.moves import LayerPlan
from r7convert.stamp import TARGETS

Choose = Callable[[Problem], policy.Plan]

KERNEL_TIERS = 3
"""A slab kernel takes at most three tiers, and three must be {3, 4, 5}."""


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
    if target == "r7" and checkpoint.r7 is None:
        raise UnsupportedError(complain(checkpoint.where, "r7_routed_experts", expected="an R7 checkpoint for target r7", found="none"))


def is_moved(layer: ExpertLayer, target: str, tp: int | None) -> bool:
    """Whether a layer's experts get new files; the others stay in the shards they are in."""
    if target in SLICED:
        return True
    if target == "r7":  # only a carried tail changes shape, and only where another tp is asked for
        return layer.tp is not None and tp is not None and layer.tp != tp
    return layer.tp is not None or layer.hidden != "per_expert"


def choose_rotation_layout(checkpoint: Checkpoint, layers: Sequence[ExpertLayer], reader: str, wanted: str | None) -> tuple[str, list[str]]:
    """The layout of the whole output, and a note where the vectors forced it.

    Raises:  UnsupportedError if shared_h_v1 is asked for and a layer's experts do not share their vectors.
    Source:  FORMAT.md section 4: the layout is global, so one layer with own vectors forces per_expert_v1 for all.
    """
    if wanted == PER_EXPERT_V1 or reader == "r14":
        return PER_EXPERT_V1, []
    for layer in layers:
        odd = _first_own_vector(checkpoint, layer)
        if odd is None:
            continue
        if wanted == SHARED_H_V1:
            do = f"Use --rotation-layout {PER_EXPERT_V1}, or --drop-mtp if it is an MTP layer."
            raise UnsupportedError(complain(odd, SHARED_H_V1, expected="the vector of expert 0", found="another", do=do))
        return PER_EXPERT_V1, [f"rotation layout {PER_EXPERT_V1}: experts of layer {layer.layer} have hidden-side vectors of their own"]
    return SHARED_H_V1, []


def _first_own_vector(checkpoint: Checkpoint, layer: ExpertLayer) -> str | None:
    """The first hidden-side vector that differs from expert 0's, or None. Reads payload, and stops at the first difference."""
    if layer.hidden != "per_expert":
        return None
    for proj in PROJECTIONS:
        first: bytes | None = None
        for expert in range(checkpoint.geometry.experts):
            for entry in layer.parts(expert, proj, HIDDEN_FIELD[proj]):
                data = checkpoint.source.read(entry.file, entry.offset, entry.nbytes)
                first = data if first is None else first
                if data != first:
                    return f"{entry.file}: {entry.name}"
    return None


def target_bits(checkpoint: Checkpoint, layers: Sequence[ExpertLayer], choose: Choose) -> dict[int, Sequence[Sequence[int]]]:
    """K of every matrix after the policy has spoken: one an expert, at most two a layer.

    Raises:  UnsupportedError from the policy, or for a K no stock reader takes.
    """
    import numpy as np

    g = checkpoint.geometry
    bad = Offences()
    for layer in layers:
        if outside := sorted(set(layer.tiers) - TAIL_K_VALUES):
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
    for module in checkpoint.dense_exl3:
        missing = [field for field in ("suh", "svh", "mcg") if f"{module}.{field}" not in checkpoint.tensors]
        if missing and f"{module}.trellis" in carried:
            bad.add(
                module,
                "dense EXL3 module",
                expected="trellis, suh, svh and mcg",
                found=f"no {', '.join(missing)}",
                do="Nothing is assumed.",
            )
    numbers = [layer.layer for layer in layers]
    if target == "rank-sliced" and not partial:
        if numbers != list(range(numbers[0], numbers[-1] + 1)):
            bad.add("layers with routed experts", "moe_layers", expected="one contiguous range", found=ranges(numbers))
        for module in checkpoint.dense_exl3:
            layer = layer_of(module)
            if f"{module}.mcg" in checkpoint.tensors and f"{module}.trellis" in carried and layer not in numbers:
                bad.add(module, "dense EXL3 with an mcg marker", expected=f"a layer of {ranges(numbers)}", found=f"layer {layer}")
    if target == "slabs":
        for plan in layers:
            tiers = plan.source.tiers
            if len(tiers) > KERNEL_TIERS or (len(tiers) == KERNEL_TIERS and tiers != (3, 4, 5)):
                bad.add(f"layer {plan.layer}", "tiers", expected="at most two K, or exactly 3, 4 and 5", found=list(tiers))
    bad.check(UnsupportedError)


def slab_notes(layers: Sequence[LayerPlan]) -> list[str]:
    wide = [layer.layer for layer in layers if not layer.slabs.has_descriptors]
    return [f"layers {ranges(wide)}: over 256 experts in one tier, so slabs.json has no descriptors for them"] if wide else []
