"""Stage `verify`: the independent judge of a sealed folder. Four parts, each saying what it looked at:

    seal      every file is the one the manifest lists
    contract  the target's readers would take the folder; FORMAT.md, re-implemented from the page
    bytes     ranks joined again and carried tensors, JSON and files equal the source's (needs the source)
    numbers   the fused kernel on the written slabs against the codec on the source; what was encoded anew against its origin

Writer and checker share the spec, never the code. Whatever fails is collected, counted and named; the verdict is written
beside the manifest it is bound to, and `push` asks for it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from r7convert.contract import INDEX, TARGETS, Claims, check_contract
from r7convert.devices import find_devices
from r7convert.errors import FormatError, UsageError, complain
from r7convert.evidence import Evidence, gather, is_mtp
from r7convert.findings import LONG_BYTES, Part
from r7convert.format import HADAMARD, MAX_SIZE, STOCK_READERS, is_int
from r7convert.geometry import parse_geometry
from r7convert.journal import MANIFEST, VERDICT, locked, manifest_digest
from r7convert.progress import Progress
from r7convert.seal import Sealed, check_seal
from r7convert.store import PARTIAL, STATE_DIR, check_disjoint, check_plain_name, read_json
from r7convert.team import Team
from r7convert.verdict import Verdict, write_verdict
from r7convert.verify_bytes import REENCODED, UNREAD, Compared, compare_carried, compare_layer
from r7convert.verify_claims import check_against_source, check_stated
from r7convert.verify_errors import check_errors
from r7convert.verify_files import compare_config, compare_files, compare_metadata, is_r7
from r7convert.verify_numbers import check_numbers, choose_layers, read_activations

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Json = Any

DEFAULT_READER = "r28"
ACCOUNTS = ("kept", "sliced", "joined", "spread", "gathered", *REENCODED, "dropped")
"""What may have become of a source tensor."""
_NO_SEAL = "there is no sound seal to judge by"
_TASK_TENSORS = 64


def verify(
    folder: Path,
    *,
    source: Path | None = None,
    tp: int | None = None,
    reader: str | None = None,
    threads: int | None = None,
    device: str = "auto",
    quick: bool = False,
    activations: Path | None = None,
    team: Team | None = None,
    progress: Progress | None = None,
) -> Verdict:
    """Judge a sealed folder, write VERDICT.json into it, and hand the verdict back; `verdict.check()` raises if it is bad.

    `tp` and `reader` are what the caller means to serve with; None takes what the manifest states. With `source` the part
    bytes compares every tensor with it, and numbers computes from slabs what the source's experts compute, on `device`; `quick`
    samples the files that are hashed, the layers of both and the matrices that are measured, and the parts say so. `activations` is
    a file with a tensor [N, H] to take in place of random ones. In a team files and tensors are shared; rank 0 has the verdict and
    writes it.

    Raises:  UsageError for folders that cannot be meant, ResourceError if the verdict cannot be written.
    Source:  DESIGN.md "Verification".
    """
    progress, team = progress or Progress(), team or Team()
    threads = threads or min(os.cpu_count() or 1, 8)
    if not folder.is_dir():
        raise UsageError(
            complain(folder, "output", expected="a folder that r7convert wrote", found="a file" if folder.exists() else "nothing")
        )
    if reader is not None and reader not in STOCK_READERS:
        raise UsageError(complain("--reader", "stock reader level", expected=f"one of {', '.join(STOCK_READERS)}", found=reader))
    if source is not None:
        if not source.is_dir():
            raise UsageError(complain(source, "source", expected="a checkpoint folder", found="none"))
        check_disjoint(source, folder)
    elif activations is not None:
        raise UsageError(complain("--activations", "for the comparison with a source", expected="--source", found="none"))
    effort = _Effort(
        find_devices(device, team.local_rank) if source else [], quick, read_activations(activations, folder) if activations else None
    )
    if not (folder / MANIFEST).exists() and not (folder / STATE_DIR).exists():
        return _judge(folder, source, tp, reader, threads, progress, Team(), effort)  # nothing of ours: leave not even a lock there
    with locked(folder) if team.is_first else contextlib.nullcontext():
        if team.is_first:
            (folder / (VERDICT + PARTIAL)).unlink(missing_ok=True)  # of a verify that was cut: it would stand there unlisted
        team.wait("the lock was taken")
        return _judge(folder, source, tp, reader, threads, progress, team, effort)


@dataclass(frozen=True, slots=True)
class _Effort:
    """What the comparison with a source works on, and how thoroughly."""

    devices: list[torch.device]
    quick: bool
    activations: Tensor | None


def _judge(
    folder: Path, source: Path | None, tp: int | None, reader: str | None, threads: int, progress: Progress, team: Team, effort: _Effort
) -> Verdict:
    seal, contract, compared = Part("seal"), Part("contract"), Part("bytes")
    numbers = Part("numbers", why_skipped="no source was given" if source is None else "it computes from what the contract promises")
    parts = (seal, contract, compared, numbers)
    sealed = check_seal(folder, seal, threads=threads, progress=progress, team=team, quick=effort.quick)
    manifest = sealed.manifest
    digest = manifest_digest(folder) if (folder / MANIFEST).is_file() else ""
    facts = manifest.facts if manifest else {}
    target, stated_tp = facts.get("target"), facts.get("tp")
    reader = reader or (facts["reader"] if facts.get("reader") in STOCK_READERS else DEFAULT_READER)
    judged_tp: int = stated_tp if _is_tp(stated_tp) else 1
    if manifest is None:
        contract.why_skipped = compared.why_skipped = _NO_SEAL
    elif target not in TARGETS:
        contract.check("the manifest says what this is", "claims").fail(MANIFEST, "target", expected=f"one of {TARGETS}", found=target)
        compared.why_skipped = "no target to judge by"
    else:
        _check_claims(contract, facts, tp)
        claims = Claims(target, judged_tp, reader, _object(facts.get("nonfinite")), _object(facts.get("encoded")))
        if team.is_first:
            output = check_contract(folder, manifest.files, contract, claims, threads=threads, progress=progress)
            check_stated(contract, manifest, output)
        else:
            shards = [name for name in manifest.files if name.endswith(".safetensors") and (folder / name).exists()]
            output = gather(folder, shards, contract.check("headers are sound", "files"))
        if source is None:
            compared.why_skipped = "no source was given"
        else:
            theirs = _compare(source, output, sealed, compared, threads=threads, progress=progress, team=team, quick=effort.quick)
            # What the headers do not promise is not decoded.
            promised = team.first((not contract.failures, not compared.failures), "its tensors were compared")
            if all(promised):
                check_errors(theirs, output, facts, numbers, progress, team, quick=effort.quick)
            if target not in ("rank-sliced", "slabs"):
                numbers.why_skipped = numbers.why_skipped and f"target {target} has no slabs: bytes covers it whole"
            elif promised[0]:
                how: dict[str, Any] = {"devices": effort.devices, "quick": effort.quick, "activations": effort.activations}
                check_numbers(theirs, output, facts, numbers, progress, team, sealed=sealed, **how)
    verdict = Verdict(digest, str(target or ""), judged_tp if manifest else 0, reader, parts)
    if team.is_first:
        write_verdict(folder, verdict)
    progress.finish()
    return verdict


def _check_claims(part: Part, facts: Mapping[str, Json], asked: int | None) -> None:
    """tp as the manifest states it and as the caller means to serve; whole targets have none."""
    target, stated = facts["target"], facts.get("tp")
    check = part.check("the manifest says what this is", "claims")
    if target in ("rank-sliced", "slabs"):
        check.expect(_is_tp(stated), MANIFEST, "tp", expected="a positive integer", found=stated)
    if asked is not None and (target != "r7" or stated is not None):
        check.expect(stated == asked, MANIFEST, "tp of this output", expected=asked, found=stated)
    if target == "rank-sliced":
        known = facts.get("reader", DEFAULT_READER) in STOCK_READERS
        check.expect(known, MANIFEST, "reader", expected=" or ".join(STOCK_READERS), found=facts.get("reader"))
    check.expect(facts.get("partial") is None, MANIFEST, "layers", expected="all of them", found=facts.get("partial"))


def _compare(
    source_folder: Path, output: Evidence, sealed: Sealed, part: Part, *, threads: int, progress: Progress, team: Team, quick: bool
) -> Evidence:
    """Every tensor of the source against the output's and back, then JSON and files; hands the source's headers back."""
    headers = part.check("the source's headers are sound", "files")
    source = gather(source_folder, _source_shards(source_folder), headers)
    manifest = sealed.manifest
    assert manifest is not None, "without one nothing is compared"
    facts = manifest.facts
    last_layer = _last_layer(output.folder) if facts.get("drop_mtp") is True else None
    dropped = {name for name in source.tensors if last_layer is not None and is_mtp(name, last_layer + 1)}
    layers = sorted({*source.expert_tensors, *output.expert_tensors})
    read = set(choose_layers(layers, quick=quick))
    skipped = sum(entry.nbytes for layer in layers if layer not in read for entry in source.expert_tensors.get(layer, ()))
    nbytes = sum(entry.nbytes for entry in source.tensors.values()) - skipped
    if team.is_first and nbytes > LONG_BYTES:
        progress.say(f"bytes: {nbytes / 1e9:.1f} GB of the source to read, and as much of the output{sealed.forecast(2 * nbytes)}")
    progress.start(nbytes, "bytes")
    done = Compared(part)
    mine: list[tuple[int, Compared]] = []
    with ThreadPoolExecutor(threads) as pool:
        tasks = team.share(list(enumerate(_tasks(source, output, dropped, read))))
        for (at, (note, _)), compared in zip(tasks, pool.map(lambda task: task[1][1](), tasks), strict=True):
            mine.append((at, compared))
            progress.advance(sum(nbytes for kind, (_, nbytes) in compared.tallies.items() if kind != UNREAD), note)
    every = [item for share in team.gather(mine, "its tensors were compared") for item in share]
    if not team.is_first:
        return source
    for _, compared in sorted(every, key=lambda item: item[0]):
        done.absorb(compared)
    _check_accounting(source, output, done, dropped, facts, part)

    check_against_source(part, facts, source, output, dropped)
    compare_config(source_folder, output, part, nominal=_mean_k(output), last_layer=last_layer)
    compare_metadata(source, output, part)
    stays_r7 = facts.get("target") == "r7" and is_r7(source_folder)
    nbytes = compare_files(source, output, part, stays_r7=stays_r7, listed=manifest.files, generated=_generated(output, stays_r7=stays_r7))
    for name, (count, size) in sorted(done.tallies.items()):
        part.scope.append(f"{name}{', left to numbers' if name in REENCODED else ''}: {count:,} tensors, {size:,} bytes")
    part.scope.append(f"JSON: config.json, index metadata; other files: {nbytes:,} bytes")
    if quick:
        part.scope.append(f"quick: bits of {len(read)} of {len(layers)} layers of experts; of the rest names and K")
    if dropped:
        part.scope.append(f"dropped by request: {len(dropped):,} tensors")
    return source


def _tasks(source: Evidence, output: Evidence, dropped: set[str], read: set[int]) -> Iterator[tuple[str, Callable[[], Compared]]]:
    for layer in sorted({*source.expert_tensors, *output.expert_tensors}):
        if not all(entry.name in dropped for entry in source.expert_tensors.get(layer, ())) or layer in output.expert_tensors:
            yield f"layer {layer}", partial(compare_layer, source, output, layer, bits=layer in read)
    carried = [entry for entry in source.carried if entry.name not in dropped]
    for at in range(0, len(carried), _TASK_TENSORS):
        yield "carried tensors", partial(compare_carried, source, output, carried[at : at + _TASK_TENSORS])


def _check_accounting(source: Evidence, output: Evidence, done: Compared, dropped: set[str], facts: Mapping[str, Json], part: Part) -> None:
    """Every tensor of either folder has its counterpart, and the manifest's sums are those found here."""
    account = part.check("every tensor accounted for, in source and output")
    account.saw(len(source.tensors) + len(output.tensors))
    for name in source.tensors.keys() - done.source_used - dropped:
        account.fail(f"source: {source.tensors[name].file}: {name}", "tensor", expected="in the output", found="no trace")
    for name in output.tensors.keys() - done.output_used:
        account.fail(f"{output.tensors[name].file}: {name}", "tensor", expected="from the source", found="no tensor it comes from")
    for name in dropped & done.source_used:
        account.fail(name, "dropped by request, says the manifest", expected="not in the output", found="there")
    sums = part.check("the manifest's accounting is true", "values")
    named, kinds = _object(facts.get("encoded")), {kind: _object(said) for kind, said in _object(facts.get("accounting")).items()}
    due = sorted(name.removesuffix(".weight") for name in done.encoded)
    sums.same_json(f"{MANIFEST}: encoded", expected=due, found=sorted(name for name in named if f"{name}.weight" in source.tensors))
    total = {key: sum(said[key] for said in kinds.values() if is_int(said.get(key))) for key in ("tensors", "bytes")}
    true = {"tensors": len(source.tensors), "bytes": sum(entry.nbytes for entry in source.tensors.values())}
    sums.same_json(f"{MANIFEST}: accounting, summed", expected=true, found=total)
    for kind in kinds:
        sums.expect(kind in ACCOUNTS, f"{MANIFEST}: accounting", "kind", expected=f"one of {', '.join(ACCOUNTS)}", found=kind)
    counts = {**{kind: done.tallies.get(kind, (0, 0)) for kind in REENCODED}, "dropped": (len(dropped), None)}
    for kind, (count, _) in counts.items():
        found = kinds.get(kind, {}).get("tensors", 0)
        sums.same(f"{MANIFEST}: accounting", f"{kind} tensors", expected=count, found=found)


def _source_shards(folder: Path) -> list[str]:
    """The shards the index names, or all there are where there is no index."""
    index: Json = read_json(folder / INDEX) if (folder / INDEX).exists() else {}
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if isinstance(weight_map, dict):
        return sorted({check_plain_name(file, folder / INDEX) for file in weight_map.values() if isinstance(file, str)})
    return sorted(path.name for path in folder.glob("*.safetensors"))


def _generated(output: Evidence, *, stays_r7: bool) -> set[str]:
    """Files beside the weights that this output has of its own: the tier map its tail names, and sidecars of R7 shards made anew."""
    if stays_r7:
        return set()
    sidecars = {
        f"{entry.file.removesuffix('.safetensors')}.json"
        for entries in output.expert_tensors.values()
        for entry in entries
        if ".r7_shared." in entry.name
    }
    try:
        tail = read_json(output.folder / "config.json").get("hybrid_tr3_tail")
    except (FormatError, AttributeError):
        return sidecars
    pointer = tail.get("bits_per_expert") if isinstance(tail, dict) else None
    return sidecars | ({pointer.rpartition(":")[0]} if isinstance(pointer, str) else set())


def _mean_k(output: Evidence) -> float | None:
    ks = [k for layer in output.expert_tensors for _, row in output.layer(layer).k_rows() for k in row]
    return round(sum(ks) / len(ks), 2) if ks else None


def _last_layer(folder: Path) -> int:
    return parse_geometry(read_json(folder / "config.json")).layers - 1


def _is_tp(value: Json) -> TypeGuard[int]:
    return is_int(value) and 0 < value <= MAX_SIZE // HADAMARD


def _object(value: Json) -> dict[str, Json]:
    """The value if it is an object, an empty one for anything else: what must be one is checked where it is judged."""
    return value if isinstance(value, dict) else {}
