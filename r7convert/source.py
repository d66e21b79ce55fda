"""Where the bytes of a checkpoint are: the protocol that checkpoint.py reads through, and the plain folder behind it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar

from r7convert.address import read_origin
from r7convert.errors import FormatError, Offences, ResourceError, complain
from r7convert.format import TensorEntry
from r7convert.store import Header, check_not_pointer, read_header, read_json

Json = Any
P = ParamSpec("P")
R = TypeVar("R")

_POINTER_BYTES = 1024  # pointers have about 130
_COMPARED_BYTES = 1 << 22


class Source(Protocol):
    """Where the bytes of a checkpoint are. `where` is for messages and is never written to an output."""

    where: str
    repo: str | None
    commit: str | None
    left_out: Sequence[str]

    def sizes(self) -> Mapping[str, int]:
        """Bytes of every file at the top level, by plain name."""

    def json(self, name: str) -> Json:
        """Raises:  FormatError if missing, a pointer, or not strict JSON."""

    def headers(self, names: Sequence[str]) -> list[Header]:
        """Raises:  FormatError with every file that has none or a broken one."""

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        """A range of payload, for the few small reads a plan makes."""


@dataclass(frozen=True, slots=True)
class Step:
    """What one job of a run reads, whole files by name, and what it writes: name -> bytes at most."""

    inputs: tuple[str, ...]
    outputs: Mapping[str, int]


class Payload(Protocol):
    """Files of payload on this machine. One that has to be fetched first appears at `acquire`, and may go after `release`."""

    def identity(self) -> Json:
        """What an unfinished run compares, so that it never goes on with another source."""

    def prepare(self, steps: Sequence[Step]) -> None:
        """What will be acquired, in the order in which the run begins its jobs."""

    def abandon(self) -> None:
        """The run has failed: nobody waits any longer."""

    def acquire(self, name: str) -> Path:
        """The file, complete. Every acquire is followed by a release."""

    def release(self, name: str) -> None:
        """One reader less."""


class Folder:
    """A checkpoint folder on this machine, a cache snapshot (links into blobs) included.

    Raises:  FormatError for what is no folder; every dangling link and every pointer stub is named.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.where = str(path)
        if not path.is_dir():
            raise FormatError(
                complain(path, "not a folder", expected="a checkpoint folder", found="a file" if path.exists() else "nothing")
            )
        origin = read_origin(path)
        self.repo = origin.id if origin else None
        self.commit = origin.revision if origin else None
        self.left_out: Sequence[str] = ()
        self._stamps: dict[str, tuple[int, int]] = {}

    def sizes(self) -> Mapping[str, int]:
        bad, sizes = Offences(), {}
        left_out = []
        for path in sorted(self.path.iterdir()):
            if path.is_symlink() and not path.exists():
                bad.add(path, "dangling link", expected="the blob it points to", found="nothing", do="Download it again.")
            elif path.name.startswith(".") or path.name.endswith((".partial", ".incomplete")) or not path.is_file():
                left_out.append(path.name)
            else:
                status = path.stat()
                sizes[path.name] = status.st_size
                self._stamps[path.name] = status.st_size, status.st_mtime_ns
                if sizes[path.name] < _POINTER_BYTES:
                    collect(bad, check_not_pointer, path.read_bytes(), path)
        bad.check()
        self.left_out = tuple(left_out)
        return sizes

    def json(self, name: str) -> Json:
        return read_json(self.path / name)

    def headers(self, names: Sequence[str]) -> list[Header]:
        bad = Offences()
        found = [collect(bad, read_header, self.path / name) for name in names]
        bad.check()
        return [header for header in found if header is not None]

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        with (self.path / name).open("rb", buffering=0) as file:
            file.seek(offset)
            data = file.read(nbytes)
        if len(data) != nbytes:
            raise ResourceError(complain(self.path / name, "file is shorter than its header says", expected=nbytes, found=len(data)))
        return data

    def identity(self) -> Json:
        """Sizes and times: two checkpoints of one shape have equal headers, and only their payload differs."""
        return hashlib.sha256(repr(sorted(self._stamps.items())).encode()).hexdigest()

    def prepare(self, steps: Sequence[Step]) -> None:
        pass

    def abandon(self) -> None:
        pass

    def acquire(self, name: str) -> Path:
        """Raises:  FormatError if the file is another than when the folder was listed."""
        path = self.path / name
        status = path.stat()
        if (status.st_size, status.st_mtime_ns) != self._stamps.get(name):
            raise FormatError(complain(path, "source file changed since its header was read", do="Is something writing to it?"))
        return path

    def release(self, name: str) -> None:
        pass


def collect(bad: Offences, read: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | None:
    """The result of the call, or None with its FormatError added to the offences."""
    try:
        return read(*args, **kwargs)
    except FormatError as error:
        bad.lines.append(str(error))
        return None


def compare_payloads(source: Source, first: TensorEntry, second: TensorEntry) -> str:
    """Whether two tensors of one name are the same, in words for a message; reads until the first difference."""
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return f"{first.dtype} {list(first.shape)} and {second.dtype} {list(second.shape)}"
    for at in range(0, first.nbytes, _COMPARED_BYTES):
        count = min(_COMPARED_BYTES, first.nbytes - at)
        if source.read(first.file, first.offset + at, count) != source.read(second.file, second.offset + at, count):
            return "with different bytes"
    return "with equal bytes"
