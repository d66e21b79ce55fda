"""The part "numbers" for slabs: every layer computed from what was written, and from the source by the codec.

Here: which layers and experts, on which devices, read from where. What is computed, and how it is judged: verify_layer.py.
A GPU computes every expert with the fused kernel. Without one the codec stands in for it, on a sample that the scope states.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from r7convert.devices import work_on
from r7convert.errors import FormatError, R7Error, UnsupportedError, UsageError, complain
from r7convert.evidence import HIDDEN_FIELD, Evidence, LayerExperts, Payloads
from r7convert.findings import LONG_BYTES, Part
from r7convert.format import PROJECTIONS, expert_module
from r7convert.progress import Progress
from r7convert.seal import Sealed
from r7convert.slab_layout import MAX_TIER
from r7convert.slabs import open_slabs, read_sidecar
from r7convert.store import read_json
from r7convert.team import Team

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from r7convert.codec import Matrix
    from r7convert.verify_layer import Expert

Json = Any

SIDECAR = "slabs.json"
CPU_WEIGHTS = 1 << 27
"""Weights of a layer that are decoded without a GPU: 3 experts of GLM-5.2, seconds a layer."""
QUICK_LAYERS, QUICK_EXPERTS = 8, 4
"""--quick takes one in so many."""


def choose_layers(layers: Sequence[int], *, quick: bool) -> list[int]:
    """All of them; quick: the first, every eighth, the last."""
    return sorted({*layers[::QUICK_LAYERS], *layers[-1:]}) if quick else list(layers)


def choose_experts(layer: int, experts: int, weights_each: int, *, on_gpu: bool, quick: bool) -> list[int]:
    """All of them, or as many as the budget allows, others in each layer."""
    most = experts if on_gpu else min(experts, max(1, CPU_WEIGHTS // weights_each))
    return sorted(random.Random(layer).sample(range(experts), max(1, most // QUICK_EXPERTS) if quick else most))


def read_activations(path: Path, folder: Path) -> Tensor:
    """The one tensor [N, H] of a safetensors file, as bfloat16 or float16.

    Raises:  UsageError unless it is one, finite, and as wide as the folder's layers.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        held = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UsageError(complain(path, "activations", expected="a safetensors file", found=error)) from None
    shapes = {name: f"{tensor.dtype} {[*tensor.shape]}" for name, tensor in held.items()}
    found = next(iter(held.values())) if len(held) == 1 else torch.empty(0)
    if found.ndim != 2 or not found.numel() or not found.is_floating_point() or not found.isfinite().all():
        raise UsageError(complain(path, "activations", expected="one tensor [N, H] of finite numbers", found=shapes))
    sidecar: Json = read_json(folder / SIDECAR) if (folder / SIDECAR).exists() else {}
    hidden = sidecar.get("hidden") if isinstance(sidecar, dict) else None
    if hidden is not None and hidden != found.shape[1]:
        raise UsageError(complain(path, "activations", expected=f"[N, {hidden}]", found=shapes))
    return found if found.dtype == torch.float16 else found.bfloat16()


@dataclass(frozen=True, slots=True)
class Task:
    """The experts of one layer that are computed, and the bytes to read for them."""

    layer: int
    experts: list[int]
    nbytes: int


def check_numbers(
    source: Evidence,
    output: Evidence,
    facts: Mapping[str, Json],
    part: Part,
    progress: Progress,
    team: Team,
    *,
    devices: Sequence[torch.device],
    sealed: Sealed,
    quick: bool = False,
    activations: Tensor | None = None,
) -> None:
    """Judge every layer that has slabs, or a stated sample; the whole team works, rank 0 has the findings.

    Raises:  nothing of the folders' making: that is found, not raised.
    Source:  DESIGN.md "Verification", FORMAT.md sections 5 and 10.
    """
    from r7convert.verify_layer import MOST_TOKENS

    part.why_skipped = ""
    on_gpu = devices[0].type == "cuda"
    try:
        tp, _, layers = read_sidecar(output.folder / SIDECAR)
    except FormatError as error:
        part.check("slabs.json is sound", "files").add_line(str(error))
        return
    there = sorted(layers.keys() & source.expert_tensors.keys())
    tasks = []
    for layer in choose_layers(there, quick=quick):
        layout = layers[layer][0]
        weights_each = 3 * layout.hidden * layout.inner * tp
        experts = choose_experts(layer, layout.experts, weights_each, on_gpu=on_gpu, quick=quick)
        share = sum(entry.nbytes for entry in source.expert_tensors[layer]) * len(experts) // layout.experts
        tasks.append(Task(layer, experts, 2 * share))
    total = sum(task.nbytes for task in tasks)
    if team.is_first and total > LONG_BYTES:
        how_much = f"{len(tasks)} of {len(there)} layers on {devices[0].type}, {total / 1e9:.1f} GB to read and decode"
        progress.say(f"numbers: {how_much}{sealed.forecast(total)}")
    mine = team.share(tasks)
    progress.start(sum(task.nbytes for task in mine), "numbers")

    def work(task: Task, device: torch.device) -> Part:
        return _check_layer(source, output.folder, task, tp, device, facts, activations, progress)

    done = {task.layer: found for task, found in work_on(devices, mine, work)}
    for share_of_team in team.gather(done, "its layers were computed"):
        done |= share_of_team
    if not team.is_first:
        return
    for layer in sorted(done):
        part.absorb(done[layer])
    count, of = sum(len(task.experts) for task in tasks), sum(layers[layer][0].experts for layer in there)
    how = "fused kernel against codec in float64" if on_gpu else "without a GPU: codec in float16 against codec in float64"
    tokens = "random activations" if activations is None else f"{min(len(activations), MOST_TOKENS)} activations of a file"
    sampled = "" if count == of else ", a sample"
    whole = f"{len(tasks)} of {len(there)} layers, {count:,} of {of:,} experts{sampled}"
    part.scope.append(f"slabs, {how}: {whole}, {tp} rank{'s' if tp > 1 else ''} summed, {tokens}")
    wide = [str(task.layer) for task in tasks if not layers[task.layer][0].has_descriptors]
    if on_gpu and wide:
        part.scope.append(
            f"by the codec, having no descriptors (over {MAX_TIER} matrices of one projection in a tier): layers {', '.join(wide)}"
        )
    _summarize(part)


def _summarize(part: Part) -> None:
    from r7convert.verify_layer import BOUND, SLACK, rank_of

    judged = {layer: row for layer, row in part.layers.items() if "bound" in row}
    if len(judged) < len(part.layers):
        part.scope.append(f"not judged, see the notes: layers {', '.join(layer for layer in part.layers if layer not in judged)}")
    if not judged:
        return
    worst = max(judged, key=lambda layer: rank_of(judged[layer]["relative_l2"]) / judged[layer]["bound"])
    row = judged[worst]
    error, alone = (f"{rank_of(row[key]):.2g}" for key in ("relative_l2", "worst_expert_l2"))
    part.scope.append(f"worst layer {worst}: relative L2 {error} (bound {row['bound']}), its worst expert {row['worst_expert']}: {alone}")
    recoded = [row["bound"] for row in judged.values() if row["bound"] > BOUND]
    if len(recoded) < len(judged):
        part.scope.append(f"bound {BOUND} for layers kept as they were: what readers accept between two fp16 paths")
    if recoded:
        part.scope.append(
            f"bound of {len(recoded)} layers with re-encoded matrices: {BOUND} + {SLACK} x root of the manifest's squared errors, "
            f"weighed by output; {min(recoded)} to {max(recoded)}"
        )


def _check_layer(
    source: Evidence,
    folder: Path,
    task: Task,
    tp: int,
    device: torch.device,
    facts: Mapping[str, Json],
    activations: Tensor | None,
    progress: Progress,
) -> Part:
    from r7convert.moe import load_experts
    from r7convert.verify_layer import judge_layer

    part = Part("numbers")
    theirs = source.layer(task.layer)
    check = part.check("layers: slabs computed against the source", "layers")
    advance = task.nbytes // len(task.experts)
    with Payloads(source.folder) as payloads:
        try:
            ranks = [load_experts(open_slabs(folder, task.layer, rank), device) for rank in range(tp)]
            slabs = ranks[0].slabs
            sides = slabs.hidden, slabs.inner * tp

            def original(expert: int) -> Expert:
                progress.advance(advance, f"layer {task.layer}")
                gate, up, down = (read_matrix(theirs, expert, proj, payloads, sides, device) for proj in PROJECTIONS)
                return gate, up, down

            finite = [expert for expert in task.experts if _is_finite(theirs, expert, payloads)]
            if len(finite) < len(task.experts):
                check.note(f"layer {task.layer}: {len(task.experts) - len(finite)} experts are not finite in the source: left to bytes")
            if finite:
                recorded = _recorded(theirs, finite, facts)
                judge_layer(task.layer, original, finite, ranks, part, recorded=recorded, activations=activations)
            else:
                part.layers[str(task.layer)] = {"not_judged": "no expert of the source is finite"}
        except UnsupportedError as error:
            check.note(f"not judged: {error}")
            part.layers[str(task.layer)] = {"not_judged": str(error).splitlines()[0]}
        except R7Error as error:
            for line in str(error).splitlines():
                check.add_line(line)
    return part


# ---- the source -----------------------------------------------------------------------------------------------------


def read_matrix(layer: LayerExperts, expert: int, proj: str, payloads: Payloads, sides: tuple[int, int], device: torch.device) -> Matrix:
    """One matrix of the source, whole, of the sizes that the slabs have."""
    import torch

    from r7convert.codec import Matrix

    rows, columns = sides if proj != "down_proj" else sides[::-1]
    found = {}
    for field, shape, dtype, axis in (
        ("trellis", (rows // 16, columns // 16), "I16", 0 if proj == "down_proj" else 1),
        ("suh", (rows,), "F16", 0),
        ("svh", (columns,), "F16", 0),
    ):
        pieces = layer.pieces(expert, proj, field)
        pieces = pieces[:1] if field == HIDDEN_FIELD[proj] else pieces  # copies, which bytes compares
        where = f"source: {layer.where(expert, proj)}.{field}"
        stored = [(entry.dtype, list(entry.shape)) for entry in pieces]
        cut = [(kind, len(size), size[:axis], size[axis + 1 :]) for kind, size in stored]
        joined = [*stored[0][1]] if stored and all(form == cut[0] for form in cut) else []
        if joined:
            joined[axis] = sum(size[axis] for _, size in stored)
        if joined[:2] != [*shape] or stored[0][0] != dtype or len(joined) != (3 if field == "trellis" else 1):
            raise FormatError(complain(where, "tensor", expected=f"{dtype} {[*shape]}, ranks joined", found=stored))
        arrays = [payloads.array(entry) for entry in pieces]
        found[field] = torch.from_numpy(np.concatenate(arrays, axis) if len(arrays) > 1 else arrays[0]).to(device)
    bits = found["trellis"].shape[2] // 16
    if not 1 <= bits <= 8:
        raise FormatError(complain(f"source: {layer.where(expert, proj)}", "K", expected="1..8", found=bits))
    return Matrix(found["trellis"], found["suh"], found["svh"], bits)


def _is_finite(layer: LayerExperts, expert: int, payloads: Payloads) -> bool:
    entries = [entry for proj in PROJECTIONS for field in ("suh", "svh") for entry in layer.pieces(expert, proj, field)]
    return all(bool(np.isfinite(payloads.array(entry)).all()) for entry in entries if entry.dtype == "F16")


def _recorded(layer: LayerExperts, experts: Sequence[int], facts: Mapping[str, Json]) -> dict[int, list[float]]:
    """What the manifest says re-encoding cost; check_errors measures whether that is true."""
    claimed = facts.get("reencoded")
    stated: dict[str, Json] = claimed if isinstance(claimed, dict) else {}
    made = {}
    for expert in experts if stated else ():
        said = [stated.get(expert_module(min(layer.roots, default=""), layer.layer, expert, proj)) for proj in PROJECTIONS]
        errors = [one.get("relative_error") if isinstance(one, dict) else 0.0 for one in said]
        made[expert] = [error if isinstance(error, float) and 0 <= error < 1 else 0.0 for error in errors]
    return {expert: errors for expert, errors in made.items() if any(errors)}
