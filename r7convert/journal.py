"""What makes a run resumable and a folder whole: the lock, the journal of finished files, the seal, and a change of what is sealed.

OUT/.r7convert/lock           held while a command writes to OUT
OUT/.r7convert/journal.jsonl  line 1 the fingerprint, then one line a finished file; gone once OUT is sealed
                              (journal-R.jsonl: those of rank R, where several processes share the work)
OUT/MANIFEST.json             the seal, written last: nothing is complete without it
OUT/.r7convert/staged/        what a change of the sealed OUT has made so far, with a journal of its own; OUT is as it was
OUT/.r7convert/committed/     the same, whole: whoever takes the lock next moves it into place
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from r7convert.errors import FormatError, ResourceError, UsageError, complain
from r7convert.format import is_int
from r7convert.store import (
    STATE_DIR,
    FileRecord,
    check_plain_name,
    find_twins,
    hash_file,
    is_plain_name,
    read_json,
    strict_json,
    sync_folder,
    write_json,
)

Json = Any

MANIFEST = "MANIFEST.json"
VERDICT = "VERDICT.json"
MANIFEST_FORMAT = "r7convert-manifest-v1"
JOURNAL = "journal.jsonl"
STAGED = "staged"
COMMITTED = "committed"
_BEFORE = "MANIFEST.before.json"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LOCK = "lock"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, creating the folder if need be. A change that a kill cut short is completed first. Where no run is
    left at work, as in a sealed folder or after an error before anything was begun, no state folder is left either.

    Raises:  ResourceError if another process holds it.
    """
    state = folder / STATE_DIR
    is_new = not folder.exists()
    try:
        state.mkdir(parents=True, exist_ok=True)
        if links := [path for path in (state, *state.iterdir()) if path.is_symlink()]:  # they would lead writes out of the folder
            raise ResourceError(complain(links[0], "cannot write here", expected="no link", found="one"))
        lock = FileLock(state / _LOCK)
        lock.acquire(timeout=0)
    except Timeout:
        raise ResourceError(complain(folder, "folder in use by another r7convert", do="Wait for it, or stop it.")) from None
    except OSError as error:
        _leave_no_trace(folder, is_new)
        found = "a link to nothing" if folder.is_symlink() and not folder.exists() else error.strerror
        raise ResourceError(complain(folder, "cannot write here", expected="a writable folder", found=found)) from None
    try:
        finish_change(folder)
        yield
        if (folder / MANIFEST).exists() and not any((state / name).exists() for name in (JOURNAL, STAGED, COMMITTED)):
            shutil.rmtree(state, ignore_errors=True)
    finally:
        lock.release()
        _leave_no_trace(folder, is_new)


def _leave_no_trace(folder: Path, is_new: bool) -> None:
    """Remove a state folder that holds nothing but the lock, and a folder that holds nothing at all, if it came with the lock."""
    state = folder / STATE_DIR
    with contextlib.suppress(OSError):
        if [path.name for path in state.iterdir()] == [_LOCK]:
            (state / _LOCK).unlink()
            state.rmdir()
        if is_new:
            folder.rmdir()


class Journal:
    """The files of one run that are done, kept in OUT/.r7convert/journal.jsonl.

    `fingerprint` says what the run is: source digests, target, tp, policy, tool version. A journal of another
    fingerprint is refused with the first field that differs; `restart` discards it. Of several processes that share a run each
    appends to a file of its own and reads all of them.

    Raises:  UsageError (another run's journal), FormatError (an unreadable one).
    """

    def __init__(self, folder: Path, fingerprint: Mapping[str, Json], *, restart: bool = False, rank: int = 0) -> None:
        self.path = folder / STATE_DIR / (f"journal-{rank}.jsonl" if rank else JOURNAL)
        self.done: dict[str, FileRecord] = {}
        self.facts: dict[str, Json] = {}
        if restart:
            self.close()
        self._cut_torn_end()
        for path in _journals(folder):
            lines, _ = _read_lines(path)
            if lines:
                self._check_same(lines[0], fingerprint, folder)
            for line in lines[1:]:
                self.done[line["file"]] = FileRecord(line["size"], line["sha256"])
                if "facts" in line:
                    self.facts[line["file"]] = line["facts"]
        if not self.path.exists() or not self.path.stat().st_size:
            self.path.write_bytes(b"")
            self._append({"fingerprint": dict(fingerprint)})
            sync_folder(self.path.parent)

    def record(self, name: str, record: FileRecord, facts: Json = None) -> None:
        """Enter a finished file, and what was learnt while making it, so that a resumed run can say it too."""
        self._append({"file": name, "size": record.size, "sha256": record.sha256} | ({"facts": facts} if facts else {}))
        self.done[name] = record
        if facts:
            self.facts[name] = facts

    def is_done(self, folder: Path, name: str) -> bool:
        """True if the file stands under its final name with the size the journal has; its digest is verify's work."""
        record = self.done.get(name)
        path = folder / name
        return record is not None and path.is_file() and path.stat().st_size == record.size

    def close(self) -> None:
        """Forget the run: called once the folder is sealed."""
        forget_journals(self.path.parents[1])

    def _append(self, line: Json) -> None:
        with self.path.open("ab", buffering=0) as file:
            file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
            os.fsync(file.fileno())

    def _cut_torn_end(self) -> None:
        _, whole_bytes = _read_lines(self.path)
        if self.path.exists() and self.path.stat().st_size != whole_bytes:
            with self.path.open("r+b") as file:
                file.truncate(whole_bytes)

    def _check_same(self, line: Json, fingerprint: Mapping[str, Json], folder: Path) -> None:
        before = line["fingerprint"]
        for key in dict.fromkeys((*fingerprint, *before)):  # in the caller's order: what was typed comes before what follows from it
            if before.get(key) != fingerprint.get(key):
                raise UsageError(
                    complain(
                        folder,
                        f"unfinished run with another {key}",
                        expected=before.get(key),
                        found=fingerprint.get(key),
                        do="Repeat the earlier command to finish it, or use --restart to discard it.",
                    )
                )


def _journals(folder: Path) -> list[Path]:
    """The journals of a run, those of other ranks last."""
    state = folder / STATE_DIR
    return [state / JOURNAL, *sorted(state.glob("journal-*.jsonl"))]


def _read_lines(path: Path) -> tuple[list[Json], int]:
    """The lines before a torn end, and their bytes: a kill inside an append leaves at most one line without its newline."""
    if not path.exists():
        return [], 0
    raw = path.read_bytes()
    whole = raw[: raw.rfind(b"\n") + 1]
    lines = []
    for number, line in enumerate(whole.splitlines()):
        value = strict_json(line, f"{path}: line {number + 1}")
        if not (_is_first_line(value) if number == 0 else _is_file_line(value)):
            do = "Use --restart."
            raise FormatError(complain(path, "unreadable journal", expected="a fingerprint, then files", found=repr(value)[:80], do=do))
        lines.append(value)
    return lines, len(whole)


def _is_first_line(line: Json) -> bool:
    return isinstance(line, dict) and isinstance(line.get("fingerprint"), dict)


def _is_file_line(line: Json) -> bool:
    if not isinstance(line, dict) or not is_plain_name(line.get("file")) or not isinstance(line.get("facts", {}), dict):
        return False
    return parse_record({key: line.get(key) for key in ("size", "sha256")}) is not None


def parse_record(value: Json) -> FileRecord | None:
    """{"size", "sha256"} as a record, or None for anything else."""
    if not isinstance(value, dict) or set(value) != {"size", "sha256"}:
        return None
    size, sha256 = value["size"], value["sha256"]
    good = is_int(size) and 0 <= size < 1 << 63 and isinstance(sha256, str) and _SHA256.fullmatch(sha256)
    return FileRecord(size, sha256) if good else None


def forget_journals(folder: Path) -> None:
    """Remove what is left of a run's journals, once the folder is sealed or the run is discarded."""
    for path in _journals(folder):
        path.unlink(missing_ok=True)


def read_journal(folder: Path) -> tuple[Json | None, dict[str, FileRecord]]:
    """Fingerprint and finished files of the run that was cut short in `folder`, read without touching anything; None, {}
    where there is none.

    Raises:  FormatError (an unreadable one).
    """
    lines = [line for path in _journals(folder) for line in _read_lines(path)[0]]
    if not lines:
        return None, {}
    done = {line["file"]: FileRecord(line["size"], line["sha256"]) for line in lines if "file" in line}
    return lines[0]["fingerprint"], done


@dataclass(frozen=True, slots=True)
class Manifest:
    """MANIFEST.json. `files` has every file of the folder but the manifest and the verdict; `facts` is what the stage states
    (target, tp, reader, layout, accounting, source, marks) and is carried as it is.
    """

    tool: str
    files: dict[str, FileRecord]
    facts: dict[str, Json] = field(default_factory=dict)

    def to_json(self) -> Json:
        files = {name: {"size": r.size, "sha256": r.sha256} for name, r in sorted(self.files.items())}
        return {"format": MANIFEST_FORMAT, "tool": self.tool, **self.facts, "files": files}


def parse_manifest(value: Json, where: object = MANIFEST) -> Manifest:
    """Raises:  FormatError naming the key."""
    if not isinstance(value, dict) or value.get("format") != MANIFEST_FORMAT:
        found = repr(value.get("format")) if isinstance(value, dict) else type(value).__name__
        raise FormatError(complain(where, "format", expected=MANIFEST_FORMAT, found=found))
    files, tool = value.get("files"), value.get("tool")
    if not isinstance(files, dict) or not isinstance(tool, str):
        raise FormatError(complain(where, "manifest", expected="`files`, an object, and `tool`, a string"))
    records = {}
    for name, entry in files.items():
        check_plain_name(name, where)
        record = parse_record(entry)
        if record is None:
            raise FormatError(complain(where, f"files[{name!r}]", expected="size and sha256", found=repr(entry)[:80]))
        records[name] = record
    if twins := find_twins(records):
        raise FormatError(complain(where, "files whose names differ in case only", expected="one", found=twins))
    facts = {key: v for key, v in value.items() if key not in ("format", "tool", "files")}
    return Manifest(tool, records, facts)


def read_manifest(folder: Path) -> Manifest:
    """Raises:  FormatError; a folder without one is unfinished or none of ours."""
    path = folder / MANIFEST
    if not path.exists():
        raise FormatError(
            complain(folder, f"no {MANIFEST}: this folder is not sealed", do="Finish the run that wrote it by repeating its command.")
        )
    return parse_manifest(read_json(path), path)


def write_manifest(folder: Path, manifest: Manifest) -> FileRecord:
    """Write the seal. Everything it names must stand already."""
    return write_json(folder / MANIFEST, manifest.to_json())


def manifest_digest(folder: Path) -> str:
    """SHA-256 of MANIFEST.json's bytes: what a verdict is bound to."""
    return hash_file(folder / MANIFEST).sha256


# ---- a change of a sealed folder --------------------------------------------------------------------------------------


def staging(folder: Path, *, restart: bool = False) -> Path:
    """Where the new files of a change are written, each under its final name. `folder` stays sealed and as it was; what a run
    that was cut short has staged is still there, unless `restart`. Call it under the folder's lock.
    """
    staged = folder / STATE_DIR / STAGED
    if restart:
        shutil.rmtree(staged, ignore_errors=True)
    (staged / STATE_DIR).mkdir(parents=True, exist_ok=True)
    return staged


def commit_change(folder: Path, manifest: Manifest) -> None:
    """Put what is staged in place of what was. `manifest` is the new seal: files of the old one that it does not name go.

    One rename is the point of no return: a kill before it leaves the old folder, sealed; a kill after it an unsealed folder, or
    the old one, that `finish_change` (so, the next command that takes the lock) turns into the new.

    Raises:  FormatError if the manifest names a file that neither stands nor is staged.
    """
    staged = folder / STATE_DIR / STAGED
    for path in staged.iterdir():
        if path.is_file() and path.name not in manifest.files:
            path.unlink()
    for name, record in manifest.files.items():
        path = staged / name if (staged / name).exists() else folder / name
        size = path.stat().st_size if path.is_file() else "no file"
        if size != record.size:
            raise FormatError(complain(path, "size of a file to seal", expected=record.size, found=size))
    write_json(staged / MANIFEST, manifest.to_json())
    sync_folder(staged)
    staged.rename(folder / STATE_DIR / COMMITTED)
    sync_folder(folder / STATE_DIR)
    finish_change(folder)


def finish_change(folder: Path) -> None:
    """Complete a committed change, from wherever it was cut short; does nothing where there is none."""
    state = folder / STATE_DIR
    committed, before = state / COMMITTED, state / _BEFORE
    if not committed.is_dir():
        return
    if (committed / MANIFEST).exists():
        if (folder / MANIFEST).exists():
            (folder / VERDICT).unlink(missing_ok=True)
            (folder / MANIFEST).rename(before)
            sync_folder(state)
            sync_folder(folder)
        new = parse_manifest(read_json(committed / MANIFEST), committed / MANIFEST)
        for name in new.files:
            if (committed / name).exists():
                (committed / name).replace(folder / name)
        if before.exists():
            for name in parse_manifest(read_json(before), before).files.keys() - new.files.keys():
                (folder / name).unlink(missing_ok=True)
        sync_folder(folder)
        (committed / MANIFEST).rename(folder / MANIFEST)
        sync_folder(folder)
    shutil.rmtree(committed, ignore_errors=True)
    before.unlink(missing_ok=True)
