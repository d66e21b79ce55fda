"""Stage `encode-shared`: BF16 shared experts become EXL3, once, instead of at every start of every server.

    plan       which parts of which layers (shared_plan.py)
    encode     each layer to a shard of its own (shared_layer.py), layers shared among devices and ranks
    carry      shards that held a weight are written again without it, or go; everything else stays, or is linked to the output
    seal       index, quantization_config.json, config.json, MANIFEST.json

In place the folder stays as it was until everything is staged, then changes by one rename (journal.commit_change). Repeating a
command that was cut short encodes only the layers that are missing.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from r7convert import __version__
from r7convert.checkpoint import Checkpoint, read_checkpoint
from r7convert.devices import find_devices, tiles_per_s, work_on
from r7convert.errors import UsageError, complain
from r7convert.journal import MANIFEST, Journal, locked, manifest_digest, read_journal, read_manifest, staging
from r7convert.progress import Progress
from r7convert.shared_layer import encode_layer
from r7convert.shared_output import Work, all_figures, all_kept, write_output
from r7convert.shared_plan import Outcome, SharedLayer, plan_shared
from r7convert.source import Folder
from r7convert.store import (
    STATE_DIR,
    FileRecord,
    check_disjoint,
    check_free_space,
)
from r7convert.team import Team

Json = Any

_ROOM_FOR_JSON = 1 << 26


@dataclass(frozen=True)
class SharedReport:
    """What was encoded, with figures by module; what stays as it is, and why; what had the K asked for already.

    Units:   bytes of the matrices that change, before and after; `estimate_s` is of a dry run.
    """

    folder: str
    bits: int
    devices: tuple[str, ...]
    encoded: Mapping[str, Json]
    kept: Mapping[str, str]
    already: tuple[str, ...]
    bytes_before: int
    bytes_after: int
    seconds: float = 0.0
    estimate_s: float | None = None
    written: bool = False
    removed_files: tuple[str, ...] = ()

    def to_json(self) -> Json:
        return {
            "folder": self.folder,
            "bits": self.bits,
            "devices": list(self.devices),
            "encoded": dict(self.encoded),
            "kept": dict(self.kept),
            "already_encoded": list(self.already),
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "seconds": round(self.seconds, 3),
            "estimate_s": self.estimate_s,
            "written": self.written,
            "removed_files": list(self.removed_files),
        }


def encode_shared(
    folder: Path,
    *,
    output: Path | None = None,
    bits: int = 6,
    device: str = "auto",
    source: Path | None = None,
    layers: tuple[int, int] | None = None,
    min_snr: float | None = None,
    on_failure: Literal["keep", "stop"] = "stop",
    link: bool = False,
    dry_run: bool = False,
    restart: bool = False,
    team: Team | None = None,
    progress: Progress | None = None,
) -> SharedReport:
    """Encode the shared experts of a sealed folder in place, or of any checkpoint folder into `output`.

    `source` is a checkpoint to read the weights from in place of the folder's own. `on_failure` "keep" leaves a part that cannot
    be encoded, or falls under `min_snr` decibels, in BF16 with the reason in report and manifest; "stop" ends the run. `link`
    makes what is carried to `output` hard links.

    Raises:  UsageError (an unsealed folder in place, an output that holds something), FormatError and UnsupportedError (weights
             that cannot be encoded), ResourceError (no room, no device, a folder in use, a rank that died).
    Source:  FORMAT.md sections 4, 7 and 9.
    """
    team, progress = team or Team(), progress or Progress()
    if not 1 <= bits <= 8:
        raise UsageError(complain("--bits", "K", expected="1 to 8", found=bits))
    if min_snr is not None and not math.isfinite(min_snr):  # no signal is under NaN: the limit would be off, and no JSON could say so
        raise UsageError(complain("--min-snr", "limit", expected="a finite number of decibels", found=min_snr))
    devices = find_devices(device, team.local_rank)
    names = tuple(map(str, devices))
    options = {"bits": bits, "layers": list(layers or ()), "min_snr": min_snr, "on_failure": on_failure, "engine": devices[0].type}
    if dry_run:
        work = _prepare(folder, output, source, layers, link, options)
        seconds = sum(part.tiles for part in work.plan.parts) / sum(tiles_per_s(d, bits) for d in devices) if work.plan.layers else 0.0
        return _report(work, names, {}, work.plan.kept, estimate_s=round(seconds, 1))

    place = folder if output is None else output
    if output is None and not (folder / MANIFEST).exists() and not (folder / STATE_DIR).exists():
        do = "Name another folder with --output, or repack first."
        raise UsageError(complain(folder, "not sealed by r7convert: it is not changed in place", do=do))
    if output is not None:
        check_disjoint(folder, output)
        _check_new(output)
    started = time.monotonic()
    with locked(place) if team.is_first else contextlib.nullcontext():
        team.wait("the lock was taken")
        work = _prepare(folder, output, source, layers, link, options)
        if not work.plan.layers and output is None:
            return _report(work, names, {}, work.plan.kept)
        if team.is_first:
            _check_room(work, place)
            if output is None:
                staging(folder, restart=restart)
            Journal(work.stage, _fingerprint(work), restart=restart)
        team.wait("the journal was begun")
        journal = Journal(work.stage, _fingerprint(work), rank=team.rank)
        progress.start(sum(w.nbytes for part in work.plan.parts for w in part.weights), "encode-shared")
        outcomes = _encode(work, team, devices, journal, progress)
        every = team.gather((outcomes, journal.done), "its layers were done")
        removed: list[str] = []
        if team.is_first:
            for other, done in every:
                outcomes |= other
                journal.done |= done
            removed = write_output(work, outcomes, journal, progress)
        team.wait("the seal was written")
        progress.finish()
    figures = all_figures(outcomes)
    kept = all_kept(work.plan, outcomes)
    return _report(
        work, names, figures, kept, seconds=time.monotonic() - started, written=bool(figures or output), removed_files=tuple(removed)
    )


# ---- before ---------------------------------------------------------------------------------------------------------


def _prepare(
    folder: Path, output: Path | None, source: Path | None, layers: tuple[int, int] | None, link: bool, options: Mapping[str, Json]
) -> Work:
    checkpoint = read_checkpoint(folder)
    manifest = read_manifest(folder) if output is None or (folder / MANIFEST).exists() else None
    weights = checkpoint if source is None else read_checkpoint(source)
    plan = plan_shared(checkpoint, weights, options["bits"], layers)
    stage = folder / STATE_DIR / "staged" if output is None else output
    return Work(folder, output, checkpoint, weights, manifest, plan, stage, link, options)


def _check_new(output: Path) -> None:
    """An output is new, empty, or what a run of ours that was cut short left, be it between the seal and the journal's end."""
    if (output / MANIFEST).exists() and read_journal(output)[0] is None:
        if (output / STATE_DIR).exists():  # cut after its last step: the lock is all that is left of it
            with locked(output):
                pass
        raise UsageError(complain(output, "output is sealed already", do="Choose another, or run encode-shared on it in place."))
    if output.exists() and any(output.iterdir()) and not (output / STATE_DIR).exists():
        raise UsageError(complain(output, "output", expected="a new or empty folder", found="something there", do="Choose another."))


def _check_room(work: Work, place: Path) -> None:
    touched = {work.checkpoint.tensors[name].file for part in work.plan.parts for name in part.replaced}
    need = sum(part.payload_bytes(work.plan.bits) for part in work.plan.parts)
    carried = touched if work.output is None or work.link else work.checkpoint.sizes.keys()
    need += sum(work.checkpoint.sizes[name] for name in carried)
    check_free_space(place, need + _ROOM_FOR_JSON)


def _fingerprint(work: Work) -> Json:
    return {
        "command": "encode-shared",
        "tool": __version__,
        **work.options,
        "folder": _identity(work.checkpoint),
        "source": _identity(work.weights),
    }


def _identity(checkpoint: Checkpoint) -> Json:
    """What an unfinished run compares: the seal of a sealed folder (a verdict may come and go), of any other its files."""
    source = checkpoint.source
    assert isinstance(source, Folder)
    seal = manifest_digest(source.path) if (source.path / MANIFEST).exists() else source.identity()
    return {"headers_sha256": checkpoint.headers_sha256, "files": seal}


# ---- encoding -------------------------------------------------------------------------------------------------------


def _encode(work: Work, team: Team, devices: Any, journal: Journal, progress: Progress) -> dict[int, Outcome]:
    """This rank's layers; those that stand already are read, not encoded again."""
    outcomes: dict[int, Outcome] = {}
    missing: list[SharedLayer] = []
    for layer in team.share(work.plan.layers):
        if journal.is_done(work.stage, layer.file):
            outcomes[layer.layer] = Outcome(**journal.facts[layer.file])
        else:
            missing.append(layer)

    def encode(layer: SharedLayer, device: Any) -> tuple[Outcome, FileRecord | None]:
        return encode_layer(
            layer,
            work.weights,
            work.stage / layer.file,
            bits=work.plan.bits,
            device=device,
            min_snr=work.options["min_snr"],
            keep_failures=work.options["on_failure"] == "keep",
        )

    for layer, (outcome, record) in work_on(devices, missing, encode):
        outcomes[layer.layer] = outcome
        if record is not None:
            journal.record(layer.file, record, outcome.to_json())
        progress.advance(sum(w.nbytes for part in layer.parts for w in part.weights), f"layer {layer.layer}")
    return outcomes


def _report(work: Work, devices: tuple[str, ...], figures: Mapping[str, Json], kept: Mapping[str, str], **rest: Any) -> SharedReport:
    parts = [part for part in work.plan.parts if not rest.get("written") or not kept.keys() & set(part.modules)]
    before = sum(work.checkpoint.tensors[name].nbytes for part in parts for name in part.replaced)
    after = sum(part.payload_bytes(work.plan.bits) for part in parts)
    return SharedReport(
        str(work.output or work.folder), work.plan.bits, devices, figures, dict(kept), work.plan.encoded, before, after, **rest
    )
