"""The part "numbers", for matrices that were encoded anew: their error against what they came from, measured again by the codec.

    lifted, lowered   |new - old|^2 / |old|^2 of the decoded trellises, in rotated space: suh and svh are the same on both sides
    encoded           |decoded - weight|^2 / |weight|^2 of the stored matrix and the source's weight, in weight space

The manifest states each figure as the encoder measured it. A matrix whose figure is not the stated one is not the matrix that was
made; one far above what its K costs on Gaussian weights (FORMAT.md section 7) is no encode of what it claims to come from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from r7convert.evidence import Evidence, LayerExperts, Payloads
from r7convert.findings import Check, Part
from r7convert.format import FIELDS, PROJECTIONS, TensorEntry, expert_module
from r7convert.ktable import FRESH, expected_step
from r7convert.progress import Progress

if TYPE_CHECKING:
    from torch import Tensor

Json = Any

SAME = 1e-3  # of a stated figure: sums in another order and float32 in between
REMARKABLE, ABSURD = 1.25, 4.0  # times the figure for Gaussian weights
WORTH_NAMING = 3


def check_errors(source: Evidence, output: Evidence, facts: Mapping[str, Json], part: Part, progress: Progress) -> None:
    """Judge every matrix whose K changed and every weight that was encoded; the part is left skipped where there is none."""
    stated, encoded = (value if isinstance(value := facts.get(key), dict) else {} for key in ("reencoded", "encoded"))
    changed = list(_changed(source, output)) if stated else []  # a K that nobody claims to have changed is the bytes part's to name
    weights = [entry for entry in source.carried if entry.name.removesuffix(".weight") in encoded and entry.name not in output.tensors]
    if not weights and not stated:
        return
    part.why_skipped = ""
    progress.start(sum(e.nbytes for _, _, before, _ in changed for e in before) + sum(e.nbytes for e in weights), "errors")
    if stated:
        _check_recoded(source, output, changed, stated, facts, part, progress)
    if weights:
        _check_encoded(source, output, weights, encoded, part, progress)


Changed = tuple[str, str, list[TensorEntry], list[TensorEntry]]
"""(module, projection, trellis pieces of the source, of the output)."""


def _changed(source: Evidence, output: Evidence) -> Iterator[Changed]:
    for number in sorted(source.expert_tensors.keys() & output.expert_tensors.keys()):
        theirs, ours = source.layer(number), output.layer(number)
        for expert in theirs.experts:
            for proj in PROJECTIONS:
                before, after = theirs.pieces(expert, proj, "trellis"), ours.pieces(expert, proj, "trellis")
                if before and after and theirs.bits(expert, proj) != ours.bits(expert, proj):
                    yield expert_module(_root(theirs), number, expert, proj), proj, before, after


def _root(layer: LayerExperts) -> str:
    return min(layer.roots, default="model.layers")


def _check_recoded(
    source: Evidence,
    output: Evidence,
    changed: list[Changed],
    stated: Mapping[str, Json],
    facts: Mapping[str, Json],
    part: Part,
    progress: Progress,
) -> None:
    from r7convert import codec

    named = part.check("matrices of another K are those the manifest names", "matrices")
    named.same("MANIFEST.json: reencoded", "modules", expected=sorted(module for module, *_ in changed), found=sorted(stated))
    check = part.check("lifted and lowered matrices: error against what they came from", "matrices")
    policy = facts.get("policy")
    from_payload = not (isinstance(policy, dict) and policy.get("reference"))
    errors: list[tuple[float, str]] = []
    with check.collecting(0), Payloads(source.folder) as old, Payloads(output.folder) as new:
        for module, proj, before, after in changed:
            axis = 0 if proj == "down_proj" else 1
            bits, new_bits = before[0].shape[2] // 16, after[0].shape[2] // 16
            was = codec.decode_tiles(_whole(old, before, axis), bits=bits).double()
            now = codec.decode_tiles(_whole(new, after, axis), bits=new_bits).double()
            error = _relative(was, now)
            said = stated.get(module)
            what = said if isinstance(said, dict) else {}
            check.expect((what.get("from"), what.get("to")) == (bits, new_bits), module, "K", expected=[bits, new_bits], found=said)
            bound = expected_step(bits, new_bits).step if from_payload and {bits, new_bits} <= FRESH.keys() else None
            _judge(check, module, error, what.get("relative_error"), bound)
            errors.append((error, module))
            progress.advance(sum(entry.nbytes for entry in before), module)
    _name_worst(part, "matrices of another K", errors)


def _check_encoded(
    source: Evidence, output: Evidence, weights: list[TensorEntry], stated: Mapping[str, Json], part: Part, progress: Progress
) -> None:
    import torch

    from r7convert import codec

    check = part.check("encoded matrices: error against the weight", "matrices")
    errors: list[tuple[float, str]] = []
    dtypes = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
    with check.collecting(0), Payloads(source.folder) as old, Payloads(output.folder) as new:
        for entry in weights:
            module = entry.name.removesuffix(".weight")
            pieces = {field: output.tensors[f"{module}.{field}"] for field in FIELDS}
            trellis, suh, svh = (_whole(new, [pieces[field]], 0) for field in ("trellis", "suh", "svh"))
            bits = pieces["trellis"].shape[2] // 16
            raw = np.ascontiguousarray(old.array(entry)).view(np.uint8).reshape(-1)
            weight = torch.from_numpy(raw).view(dtypes[entry.dtype]).view(entry.shape).to(trellis.device).t().double()
            error = _relative(weight, codec.decode_matrix(trellis, suh, svh, bits=bits).double())
            said = stated.get(module)
            what = said if isinstance(said, dict) else {}
            check.same(module, "K", expected=bits, found=what.get("bits"))
            _judge(check, module, error, what.get("relative_error"), FRESH.get(bits))
            errors.append((error, module))
            progress.advance(entry.nbytes, module)
    _name_worst(part, "encoded matrices", errors)


def _judge(check: Check, module: str, error: float, stated: Json, gaussian: float | None) -> None:
    same = isinstance(stated, float) and abs(error - stated) <= SAME * stated
    check.expect(same, module, "relative squared error", expected=f"{stated}, as the manifest says", found=f"{error:.6g}")
    if gaussian is not None:
        limit = ABSURD * gaussian
        check.expect(error <= limit, module, "relative squared error for this K", expected=f"at most {limit:.3g}", found=f"{error:.3g}")
        if REMARKABLE * gaussian < error <= limit:
            check.note(f"{module}: error {error:.3g}, {error / gaussian:.2f} times that of Gaussian weights")


def _name_worst(part: Part, what: str, errors: list[tuple[float, str]]) -> None:
    if errors:
        worst = ", ".join(f"{module} {error:.3g}" for error, module in sorted(errors, reverse=True)[:WORTH_NAMING])
        mean = sum(error for error, _ in errors) / len(errors)
        part.scope.append(f"{what}: {len(errors):,} decoded by the codec, mean error {mean:.3g}, worst {worst}")


def _whole(payloads: Payloads, pieces: list[TensorEntry], axis: int) -> Tensor:
    """A tensor joined from its ranks, where the codec is quickest: it is the same on every device."""
    import torch

    arrays = [payloads.array(entry) for entry in pieces]
    joined = torch.from_numpy(np.concatenate(arrays, axis) if len(arrays) > 1 else arrays[0])
    return joined.to("cuda" if torch.cuda.is_available() else "cpu")


def _relative(before: Tensor, after: Tensor) -> float:
    energy = float(before.square().sum())
    return float((after - before).square().sum()) / energy if energy else 0.0
