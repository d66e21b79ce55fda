"""What makes a run resumable and a folder whole: the lock, the journal of finished files, and the manifest that seals.

OUT/.r7convert/lock           held while a command writes to OUT
OUT/.r7convert/journal.jsonl  line 1 the fingerprint, then one line a finished file; gone once OUT is sealed
OUT/MANIFEST.json             the seal, written last: nothing is complete without it
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from r7convert.errors import FormatError, ResourceError, UsageError, complain
from r7convert.format import is_int
from r7convert.store import STATE_DIR, FileRecord, check_plain_name, hash_file, read_json, sync_folder, write_json

Json = Any

MANIFEST = "MANIFEST.json"
VERDICT = "VERDICT.json"
MANIFEST_FORMAT = "r7convert-manifest-v1"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, creating the folder if need be. A sealed folder is left without a state folder.

    Raises:  ResourceError if another process holds it.
    """
    state = folder / STATE_DIR
    try:
        state.mkdir(parents=True, exist_ok=True)
        lock = FileLock(state / "lock")
        lock.acquire(timeout=0)
    except Timeout:
        raise ResourceError(complain(folder, "folder in use by another r7convert", do="Wait for it, or stop it.")) from None
    except OSError as error:
        raise ResourceError(complain(folder, "cannot write here", found=error.strerror, expected="a writable folder")) from None
    try:
        yield
        if (folder / MANIFEST).exists() and not (state / "journal.jsonl").exists():
            shutil.rmtree(state, ignore_errors=True)
    finally:
        lock.release()


class Journal:
    """The files of one run that are done, kept in OUT/.r7convert/journal.jsonl.

    `fingerprint` says what the run is: source digests, target, tp, policy, tool version. A journal of another
    fingerprint is refused with the first field that differs; `restart` discards it.

    Raises:  UsageError (another run's journal), FormatError (an unreadable one).
    """

    def __init__(self, folder: Path, fingerprint: Mapping[str, Json], *, restart: bool = False) -> None:
        self.path = folder / STATE_DIR / "journal.jsonl"
        self.done: dict[str, FileRecord] = {}
        if restart:
            self.path.unlink(missing_ok=True)
        lines = self._whole_lines()
        if lines:
            self._check_same(lines[0], fingerprint, folder)
            for line in lines[1:]:
                self.done[line["file"]] = FileRecord(line["size"], line["sha256"])
        else:
            self.path.write_bytes(b"")
            self._append({"fingerprint": dict(fingerprint)})
            sync_folder(self.path.parent)

    def record(self, name: str, record: FileRecord) -> None:
        self._append({"file": name, "size": record.size, "sha256": record.sha256})
        self.done[name] = record

    def is_done(self, folder: Path, name: str) -> bool:
        """True if the file stands under its final name with the size the journal has; its digest is verify's work."""
        record = self.done.get(name)
        path = folder / name
        return record is not None and path.is_file() and path.stat().st_size == record.size

    def close(self) -> None:
        """Forget the run: called once the folder is sealed."""
        self.path.unlink(missing_ok=True)

    def _append(self, line: Json) -> None:
        with self.path.open("ab", buffering=0) as file:
            file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
            os.fsync(file.fileno())

    def _whole_lines(self) -> list[Json]:
        lines, whole_bytes = _read_lines(self.path)
        if self.path.exists() and self.path.stat().st_size != whole_bytes:
            with self.path.open("r+b") as file:
                file.truncate(whole_bytes)
        return lines

    def _check_same(self, line: Json, fingerprint: Mapping[str, Json], folder: Path) -> None:
        before = line["fingerprint"]
        for key in sorted(set(before) | set(fingerprint)):
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


def _read_lines(path: Path) -> tuple[list[Json], int]:
    """The lines before a torn end, and their bytes: a kill inside an append leaves at most one line without its newline."""
    if not path.exists():
        return [], 0
    raw = path.read_bytes()
    whole = raw[: raw.rfind(b"\n") + 1]
    try:
        lines = [json.loads(line) for line in whole.splitlines()]
        if any(not isinstance(line, dict) for line in lines) or (lines and "fingerprint" not in lines[0]):
            raise ValueError("not a journal")
    except ValueError as error:
        raise FormatError(complain(path, "unreadable journal", found=error, expected="JSON lines", do="Use --restart.")) from None
    return lines, len(whole)


def read_journal(folder: Path) -> tuple[Json | None, dict[str, FileRecord]]:
    """Fingerprint and finished files of the run that was cut short in `folder`, read without touching anything; None, {}
    where there is none.

    Raises:  FormatError (an unreadable one).
    """
    lines, _ = _read_lines(folder / STATE_DIR / "journal.jsonl")
    if not lines:
        return None, {}
    return lines[0]["fingerprint"], {line["file"]: FileRecord(line["size"], line["sha256"]) for line in lines[1:]}


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
        if not (
            isinstance(entry, dict)
            and set(entry) == {"size", "sha256"}
            and is_int(entry["size"])
            and entry["size"] >= 0
            and isinstance(entry["sha256"], str)
            and len(entry["sha256"]) == 64
        ):
            raise FormatError(complain(where, f"files[{name!r}]", expected="size and sha256", found=repr(entry)[:80]))
        records[name] = FileRecord(entry["size"], entry["sha256"])
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
