"""The part "numbers", for matrices that were encoded anew: their error against what they came from, measured again by the codec.

    lifted, lowered   |new - old|^2 / |old|^2 of the decoded trellises, in rotated space: suh and svh are the same on both sides
    encoded           |decoded - weight|^2 / |weight|^2 of the stored matrix and the source's weight, in weight space

The manifest states each figure as the encoder measured it. A matrix whose figure is not the stated one is not the matrix that was
made; one far above what its K costs on Gaussian weights (FORMAT.md section 7) is no encode of what it claims to come from.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from r7convert.evidence import Evidence, LayerExperts, Payloads
from r7convert.findings import Check, Part
from r7convert.format import FIELDS, PROJECTIONS, TensorEntry, expert_module, is_int
from r7convert.journal import MANIFEST
from r7convert.ktable import FRESH, expected_step
from r7convert.progress import Progress
from r7convert.team import Team

if TYPE_CHECKING:
    from torch import Tensor

Json = Any

SAME = 1e-3  # of a stated figure: sums in another order and float32 in between
REENCODED = {"from", "to", "relative_error", "original_error_before", "original_error"}
REMARKABLE, ABSURD = 1.25, 4.0  # times the figure for Gaussian weights
WORTH_NAMING = 3
QUICK_MATRICES = 16
"""--quick measures one in so many, the first of each sort among them."""


def check_errors(
    source: Evidence, output: Evidence, facts: Mapping[str, Json], part: Part, progress: Progress, team: Team, *, quick: bool = False
) -> None:
    """Judge every matrix whose K changed and every weight that was encoded, or of each a sample that the scope states; the part is
    left skipped where there is none.
    """
    stated, encoded = (value if isinstance(value := facts.get(key), dict) else {} for key in ("reencoded", "encoded"))
    changed = list(_changed(source, output)) if stated else []  # a K that nobody claims to have changed is the bytes part's to name
    weights = [
        e for e in source.carried if e.name.removesuffix(".weight") in encoded and e.name not in output.tensors and _is_whole(e, output)
    ]
    if not weights and not stated:
        return
    part.why_skipped = ""
    measured = changed[::QUICK_MATRICES] if quick else changed
    read = weights[::QUICK_MATRICES] if quick else weights
    nbytes = sum(entry.nbytes for _, _, before, _ in team.share(measured) for entry in before)
    progress.start(nbytes + sum(entry.nbytes for entry in team.share(read)), "errors")
    with Payloads(source.folder) as old, Payloads(output.folder) as new:
        recoded = {item[0]: _recoded_error(item, old, new, progress) for item in team.share(measured)}
        errors = {entry.name: _encoded_error(entry, output, old, new, progress) for entry in team.share(read)}
    for recoded_there, errors_there in team.gather((recoded, errors), "its matrices were decoded"):
        recoded |= recoded_there
        errors |= errors_there
    if not team.is_first:
        return
    if stated:
        named = part.check("matrices of another K are those the manifest names", "matrices")
        named.same("MANIFEST.json: reencoded", "modules", expected=sorted(module for module, *_ in changed), found=sorted(stated))
        _judge_recoded(measured, recoded, stated, facts, part)
        _name_worst(part, "matrices of another K", recoded, len(changed))
        _judge_summary(part.check("the manifest's errors are those of its matrices", "summaries"), facts)
    if weights:
        _judge_encoded(read, errors, output, encoded, part)
        _name_worst(part, "encoded matrices", {name: error for name, (error, _) in errors.items()}, len(weights))


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


def _is_whole(weight: TensorEntry, output: Evidence) -> bool:
    """Whether all that stands for a weight is there; where it is not the contract and the bytes part say so."""
    module = weight.name.removesuffix(".weight")
    return all(f"{module}.{field}" in output.tensors for field in FIELDS)


def _root(layer: LayerExperts) -> str:
    return min(layer.roots, default="model.layers")


def _recoded_error(changed: Changed, old: Payloads, new: Payloads, progress: Progress) -> float:
    from r7convert import codec

    module, proj, before, after = changed
    axis = 0 if proj == "down_proj" else 1
    was = codec.decode_tiles(_whole(old, before, axis), bits=before[0].shape[2] // 16).double()
    now = codec.decode_tiles(_whole(new, after, axis), bits=after[0].shape[2] // 16).double()
    progress.advance(sum(entry.nbytes for entry in before), module)
    return _relative(was, now)


def _encoded_error(
    entry: TensorEntry, output: Evidence, old: Payloads, new: Payloads, progress: Progress
) -> tuple[float, tuple[float, ...]]:
    """Relative squared error of an encoded weight, whole and of each output channel."""
    import torch

    from r7convert import codec

    module = entry.name.removesuffix(".weight")
    trellis, suh, svh = (_whole(new, [output.tensors[f"{module}.{field}"]], 0) for field in ("trellis", "suh", "svh"))
    dtype = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[entry.dtype]
    raw = np.ascontiguousarray(old.array(entry)).view(np.uint8).reshape(-1)
    weight = torch.from_numpy(raw).view(dtype).view(entry.shape).to(trellis.device).t().double()
    progress.advance(entry.nbytes, module)
    decoded = codec.decode_matrix(trellis, suh, svh, bits=trellis.shape[2] // 16).double()
    energy, lost = weight.square().sum(0), (weight - decoded).square().sum(0)
    return _relative(weight, decoded), tuple(torch.where(energy > 0, lost / energy, 0.0).tolist())


def _judge_recoded(
    changed: list[Changed], errors: Mapping[str, float], stated: Mapping[str, Json], facts: Mapping[str, Json], part: Part
) -> None:
    check = part.check("lifted and lowered matrices: error against what they came from", "matrices")
    policy = facts.get("policy")
    from_payload = not (isinstance(policy, dict) and policy.get("reference"))
    for module, _, before, after in changed:
        bits, new_bits = before[0].shape[2] // 16, after[0].shape[2] // 16
        said = stated.get(module)
        what = said if isinstance(said, dict) else {}
        check.expect((what.get("from"), what.get("to")) == (bits, new_bits), module, "K", expected=[bits, new_bits], found=said)
        bound = expected_step(bits, new_bits).step if from_payload and {bits, new_bits} <= FRESH.keys() else None
        _judge(check, module, errors[module], what.get("relative_error"), bound)


def _judge_summary(check: Check, facts: Mapping[str, Json]) -> None:
    """The form of each matrix's figures, and that their summary is theirs; the figures are measured again."""
    stated = {module: _object(said) for module, said in _object(facts.get("reencoded")).items()}
    for module, said in stated.items():
        whole = {"from", "to", "relative_error"} <= said.keys() <= REENCODED
        check.expect(whole, f"{MANIFEST}: reencoded", module, expected="from, to, relative_error", found=sorted(said))
    due: dict[str, float] = {}
    for kind, sign in (("lifted", 1), ("lowered", -1)):
        errors = [
            said["relative_error"]
            for said in stated.values()
            if is_int(said.get("from")) and is_int(said.get("to")) and sign * (said["to"] - said["from"]) > 0
            if isinstance(said.get("relative_error"), float)
        ]
        if errors:
            due |= {f"mean_of_{kind}": math.fsum(errors) / len(errors), f"worst_of_{kind}": max(errors)}
    found = _object(facts.get("errors"))
    same = found.keys() == due.keys() and all(
        isinstance(found[key], float) and math.isclose(found[key], value, rel_tol=1e-9) for key, value in due.items()
    )
    check.expect(same, MANIFEST, "errors", expected=due, found=found)


def _judge_encoded(
    weights: list[TensorEntry],
    errors: Mapping[str, tuple[float, tuple[float, ...]]],
    output: Evidence,
    stated: Mapping[str, Json],
    part: Part,
) -> None:
    check = part.check("encoded matrices: error against the weight", "matrices")
    columns = part.check("encoded matrices: the output channel that is worst", "matrices")
    for entry in weights:
        module = entry.name.removesuffix(".weight")
        bits = output.tensors[f"{module}.trellis"].shape[2] // 16
        said = stated.get(module)
        what = said if isinstance(said, dict) else {}
        check.same(module, "K", expected=bits, found=what.get("bits"))
        error, of_column = errors[entry.name]
        _judge(check, module, error, what.get("relative_error"), FRESH.get(bits))
        _judge_worst(columns, module, of_column, what.get("worst_column"))


def _judge_worst(check: Check, module: str, of_column: tuple[float, ...], stated: Json) -> None:
    """The channel that is stated has the error that is stated, and none has more; two may be equal but for rounding."""
    worst = max(of_column)
    at, error = stated if isinstance(stated, list) and len(stated) == 2 else (-1, 0.0)
    same = False
    if isinstance(at, int) and is_int(at) and 0 <= at < len(of_column) and isinstance(error, float):
        same = abs(of_column[at] - error) <= SAME * error and of_column[at] >= (1 - SAME) * worst
    check.expect(same, module, "[channel, error]", expected=stated, found=[of_column.index(worst), worst])


def _judge(check: Check, module: str, error: float, stated: Json, gaussian: float | None) -> None:
    same = isinstance(stated, float) and abs(error - stated) <= SAME * stated
    check.expect(same, module, "relative squared error", expected=f"{stated}, as the manifest says", found=f"{error:.6g}")
    if gaussian is not None:
        limit = ABSURD * gaussian
        check.expect(error <= limit, module, "relative squared error for this K", expected=f"at most {limit:.3g}", found=f"{error:.3g}")
        if REMARKABLE * gaussian < error <= limit:
            check.note(f"{module}: error {error:.3g}, {error / gaussian:.2f} times that of Gaussian weights")


def _name_worst(part: Part, what: str, errors: Mapping[str, float], of: int) -> None:
    if errors:
        worst = sorted(((error, name.removesuffix(".weight")) for name, error in errors.items()), reverse=True)[:WORTH_NAMING]
        mean = math.fsum(errors.values()) / len(errors)
        named = ", ".join(f"{name} {error:.3g}" for error, name in worst)
        count = f"{len(errors):,}" if len(errors) == of else f"{len(errors):,} of {of:,}, a sample,"
        part.scope.append(f"{what}: {count} decoded by the codec, mean error {mean:.3g}, worst {named}")


def _whole(payloads: Payloads, pieces: list[TensorEntry], axis: int) -> Tensor:
    """A tensor joined from its ranks, where the codec is quickest: it is the same on every device."""
    import torch

    arrays = [payloads.array(entry) for entry in pieces]
    joined = torch.from_numpy(np.concatenate(arrays, axis) if len(arrays) > 1 else arrays[0])
    return joined.to("cuda" if torch.cuda.is_available() else "cpu")


def _object(value: Json) -> dict[str, Json]:
    return value if isinstance(value, dict) else {}


def _relative(before: Tensor, after: Tensor) -> float:
    energy = float(before.square().sum())
    return float((after - before).square().sum()) / energy if energy else 0.0
