"""Stage `stamp`: the corrected JSON written beside the weights, in place or into a folder of links. No weight is read.

In place the files are replaced one by one, each atomically: config.json first, since readers ask it first and a right block
there makes the others moot; then quantization_config.json; then hf_quant_config.json goes. A run that dies between them
leaves a folder whose stamp is still reported as due, and the same command finishes it: a repair of a half-repaired folder
ends in the same bytes. The originals stand under .r7convert/before-stamp/ before the first file is replaced.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from r7convert.errors import FormatError, ResourceError, UnsupportedError, UsageError, complain
from r7convert.format import ExpertName, SharedVectorName, parse_name
from r7convert.journal import MANIFEST, VERDICT, locked
from r7convert.progress import Progress
from r7convert.source import Folder
from r7convert.stamp import FILE, HF_FILE, TARGETS, Place, Repaired, StampFiles, diagnose, repair
from r7convert.store import PARTIAL, STATE_DIR, check_disjoint, encode_json, read_header, sync_folder, write_bytes, write_json

Json = Any

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
BACKUP = "before-stamp"
_UNFINISHED = "stamp-unfinished"
_STAMP_FILES = (CONFIG, FILE, HF_FILE)


@dataclass(frozen=True, slots=True)
class Restamped:
    """What a stamp run found and did. `written` are the files that changed; `backup` is where the originals are, in place."""

    target: str
    places: tuple[Place, ...]
    repaired: Repaired
    written: tuple[str, ...] = ()
    folder: str | None = None
    backup: str | None = None

    @property
    def due(self) -> bool:
        return bool(self.repaired.changes)

    def to_json(self) -> Json:
        return {
            "target": self.target,
            "due": self.due,
            "places": [
                {"place": p.name, "present": p.present, "quant_method": p.quant_method, "problems": p.problems} for p in self.places
            ],
            "changes": [change.to_json() for change in self.repaired.changes],
            "notes": list(self.repaired.notes),
            "written": list(self.written),
            "folder": self.folder,
            "backup": self.backup,
        }


def restamp(
    source: Path,
    *,
    output: Path | None = None,
    in_place: bool = False,
    target: str | None = None,
    progress: Progress | None = None,
) -> Restamped:
    """Repair the stamp of a checkpoint folder for a target; with neither `output` nor `in_place`, only say what is due.

    `output` becomes a whole folder: corrected JSON, hard links to the weights, copies of the small files. It appears under
    its name when complete.

    Raises:  UsageError (folders that overlap, an output that exists, the Hub's cache in place), UnsupportedError (a target
             that needs other tensors), FormatError, ResourceError (no hard links there, a folder in use).
    Source:  FORMAT.md section 3.
    """
    progress = progress or Progress()
    if output is not None and in_place:
        raise UsageError(complain("stamp", "two places to write", expected="--output or --in-place", found="both"))
    folder = Folder(source)
    sizes = folder.sizes()
    files = _read_stamp_files(folder)
    names = _tensor_names(folder)
    chosen = _check_target(target, natural_target(files, names))
    codebook = _codebook(files, names or ())
    report = Restamped(chosen, diagnose(files, codebook), repair(files, chosen, codebook=codebook))
    for note in report.repaired.notes:
        progress.say(f"note: {note}")
    if output is not None:
        if folder.left_out:
            progress.say(f"left out: {', '.join(folder.left_out)}")
        return _write_copy(folder, list(sizes), output, report)
    return _write_in_place(folder, report) if in_place else report


def natural_target(files: StampFiles, names: Iterable[str] | None) -> str:
    """The target that the tensors are laid out for, from their names, or from the blocks alone where no names are at hand.

    Raises:  UnsupportedError where neither says EXL3.
    """
    block = {**(files.quantization_file or {}), **(files.nested or {}), **(files.embedded or {})}
    forms = {_form(name) for name in names or ()} - {None}
    if "r7" in forms or (not forms and "r7_routed_experts" in block):
        return "r7"
    if "whole" in forms:
        return "r7" if "r7_routed_experts" in block else "exl3"
    if "ranked" in forms or "hybrid_tr3_tail" in files.config:
        return "slabs" if "r7convert_slabs" in block else "rank-sliced"
    if block.get("tensor_storage"):
        return "exl3"
    raise UnsupportedError(
        complain(CONFIG, "no sign of EXL3 experts", expected="r7_routed_experts, hybrid_tr3_tail or tensor_storage", found="none")
    )


def _form(name: str) -> str | None:
    match parse_name(name):
        case ExpertName(rank=rank):
            return "whole" if rank is None else "ranked"
        case SharedVectorName(kind="r7"):
            return "r7"
    return None


def _check_target(asked: str | None, natural: str) -> str:
    if asked is not None and asked not in TARGETS:
        raise UsageError(complain("--target", "unknown target", expected=f"one of {', '.join(TARGETS)}", found=asked))
    if asked is not None and asked != natural:
        what = "a stamp changes no tensor"
        do = f"For other tensors: r7convert repack SRC OUT --target {asked}."
        raise UnsupportedError(complain("--target", what, expected=f"{natural}, as the tensors are laid out", found=asked, do=do))
    return natural


def _read_stamp_files(folder: Folder) -> StampFiles:
    found: dict[str, Json] = {}
    for name in _STAMP_FILES:
        if name == CONFIG or (folder.path / name).exists():
            found[name] = folder.json(name)
            if not isinstance(found[name], dict):
                raise FormatError(complain(folder.path / name, "JSON", expected="an object", found=type(found[name]).__name__))
    return StampFiles(found[CONFIG], found.get(FILE), found.get(HF_FILE))


def _codebook(files: StampFiles, names: Iterable[str]) -> str:
    """What a block says, where markers of that name are there; else the one that markers name, mcg where there are none."""
    markers = {name.rpartition(".")[2] for name in names} & {"mcg", "mul1"}
    stated = next((block["codebook"] for block in files.places().values() if block is not None and "codebook" in block), None)
    return stated if isinstance(stated, str) and stated in markers else min(markers or {"mcg"})


def _tensor_names(folder: Folder) -> list[str] | None:
    """Names from the index, or from the one shard that needs none; None where only JSON was downloaded."""
    if (folder.path / INDEX).exists():
        index = folder.json(INDEX)
        weight_map = index.get("weight_map") if isinstance(index, dict) else None
        return list(weight_map) if isinstance(weight_map, dict) else None
    shards = sorted(folder.path.glob("*.safetensors"))
    return list(read_header(shards[0]).tensors) if len(shards) == 1 else None


def _new_bytes(report: Restamped) -> dict[str, bytes | None]:
    """File -> its new bytes, None to remove it; only files that changed, in the order in which they are replaced."""
    changed = {change.file for change in report.repaired.changes}
    after = report.repaired.files
    new = {CONFIG: encode_json(after.config), FILE: encode_json(after.quantization_file), HF_FILE: None}
    return {name: data for name, data in new.items() if name in changed}


# ---- in place ---------------------------------------------------------------------------------------------------------


def _write_in_place(folder: Folder, report: Restamped) -> Restamped:
    path, new = folder.path, _new_bytes(report)
    unfinished = path / STATE_DIR / _UNFINISHED
    if not new and not unfinished.exists():
        return report
    if folder.commit is not None:
        raise UsageError(complain(path, "this is the Hub's cache, which other programs share", do="Use --output DIR."))
    if (path / MANIFEST).exists():
        raise UsageError(complain(path, f"sealed by {MANIFEST}, which a new stamp would break", do="Use --output DIR, or repack."))
    with locked(path):
        if not unfinished.exists():
            _back_up(path, unfinished)
        for name, data in new.items():
            if data is None:
                (path / name).unlink(missing_ok=True)
            else:
                write_bytes(path / name, data)
        sync_folder(path)
        backup = _free_name(path / STATE_DIR / BACKUP)
        unfinished.rename(backup)
        sync_folder(backup.parent)
    return Restamped(report.target, report.places, report.repaired, tuple(new), str(path), str(backup))


def _back_up(path: Path, backup: Path) -> None:
    """Copy the originals; the backup has its name only when it is whole."""
    partial = backup.with_name(backup.name + PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    for name in _STAMP_FILES:
        if (path / name).exists():
            write_bytes(partial / name, (path / name).read_bytes())
    partial.rename(backup)
    sync_folder(backup.parent)


def _free_name(path: Path) -> Path:
    taken = 1
    free = path
    while free.exists():
        taken += 1
        free = path.with_name(f"{path.name}-{taken}")
    return free


# ---- a folder of links ------------------------------------------------------------------------------------------------


def _write_copy(folder: Folder, names: list[str], output: Path, report: Restamped) -> Restamped:
    source = folder.path
    check_disjoint(source, output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UsageError(complain(output, "output", expected="a new or empty folder", found="something there", do="Choose another."))
    partial = output.with_name(f".{output.name}.stamping")
    if partial.exists():  # a killed run left it: links and small files, nothing of value
        with locked(partial):
            pass
        shutil.rmtree(partial)
    try:
        with locked(partial):
            for name in names:
                if name not in (*_STAMP_FILES, MANIFEST, VERDICT):
                    _link_or_copy(source / name, partial / name)
            after = report.repaired.files
            write_json(partial / FILE, after.quantization_file)
            write_json(partial / CONFIG, after.config)
            sync_folder(partial)
        if (partial / STATE_DIR).exists():
            shutil.rmtree(partial / STATE_DIR)
        try:
            if output.exists():
                output.rmdir()
            partial.rename(output)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            raise ResourceError(complain(output, "made by another process meanwhile", do="Look whether it is what you want.")) from None
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    sync_folder(output.parent)
    return Restamped(report.target, report.places, report.repaired, (FILE, CONFIG), str(output))


def _link_or_copy(source: Path, place: Path) -> None:
    """Weights are linked, for they are large and never edited; small files are copied, so that an edit stays on one side."""
    if source.suffix != ".safetensors":
        shutil.copyfile(source, place)
        return
    try:
        os.link(source.resolve(), place)
    except OSError as error:
        do = "Choose a folder on the same disk, or copy: r7convert repack SRC OUT --target r7."
        raise ResourceError(complain(place, "cannot link weights", expected="a hard link", found=error.strerror, do=do)) from None
