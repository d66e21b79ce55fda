"""A file that appears under its name only when whole: written beside it, hashed on the way, synced, renamed, the folder synced."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

PARTIAL = ".partial"
DATA_ALIGNMENT = 4096
"""Where the data of our safetensors files begins, and what O_DIRECT asks of buffers, lengths and positions."""
_BUFFER_BYTES = 2 << 20
_PIECE_BYTES = 1 << 18
_O_DIRECT = getattr(os, "O_DIRECT", 0)


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What is known of a whole file: bytes and lower-case hex SHA-256, the Hub's own."""

    size: int
    sha256: str


def sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class WholeFile:
    """A file that appears under its name only when whole; SHA-256 taken while writing.

    Use as a context manager: `with WholeFile(path) as file: file.write(...)`, then `file.whole_record`. An error inside leaves
    nothing behind but what a kill would leave too: a `.partial` that the next run overwrites.

    Bytes go to the disk past the page cache where the file system allows it (O_DIRECT), large aligned pieces from where they
    are, others gathered in one aligned buffer: the fsync at the end finds nothing to wait for, and a copy is saved.

    `written`: the `.partial` has its bytes already, as a link or reflink; what is "written" is only hashed.
    """

    def __init__(self, path: Path, *, written: bool = False) -> None:
        self.path = path
        self.record: FileRecord | None = None
        self._partial = path.with_name(path.name + PARTIAL)
        self._is_written = written
        self._is_direct = False
        self._fd = self._open()
        self._view = memoryview(mmap.mmap(-1, _BUFFER_BYTES))
        self._filled = 0
        self._digest = hashlib.sha256()
        self._size = 0

    def _open(self) -> int:
        if self._is_written:
            return os.open(self._partial, os.O_RDONLY | os.O_CLOEXEC)
        # Never write into what is there: it may be the hard link of a run with --link that was killed, the source itself.
        self._partial.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            fd = os.open(self._partial, flags | _O_DIRECT, 0o666)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._partial.unlink(missing_ok=True)
            return os.open(self._partial, flags, 0o666)
        self._is_direct = bool(_O_DIRECT)
        return fd

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        if self._filled % DATA_ALIGNMENT == 0 and _is_aligned(view):
            self._flush()
            self._put(view)
            return
        while view:
            count = min(len(view), _BUFFER_BYTES - self._filled)
            self._view[self._filled : self._filled + count] = view[:count]
            self._filled += count
            view = view[count:]
            if self._filled == _BUFFER_BYTES:
                self._flush()

    def _flush(self) -> None:
        filled, self._filled = self._filled, 0
        self._put(self._view[:filled])

    def _put(self, view: memoryview) -> None:
        self._digest.update(view)
        self._size += len(view)
        if self._is_written:
            return
        if self._is_direct and len(view) % DATA_ALIGNMENT:
            aligned = len(view) // DATA_ALIGNMENT * DATA_ALIGNMENT
            self._write_out(view[:aligned])
            self._leave_direct()
            view = view[aligned:]
        self._write_out(view)

    def _write_out(self, view: memoryview) -> None:
        while view:
            try:
                view = view[os.write(self._fd, view) :]
            except OSError as error:
                if error.errno != errno.EINVAL or not self._is_direct:
                    raise
                self._leave_direct()  # a file system that opens such files and then refuses their writes

    def _leave_direct(self) -> None:
        fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~_O_DIRECT)
        self._is_direct = False

    @property
    def whole_record(self) -> FileRecord:
        """The record of a file that has been closed."""
        assert self.record is not None
        return self.record

    def close(self) -> FileRecord:
        self._flush()
        os.fsync(self._fd)
        os.close(self._fd)
        self._partial.replace(self.path)
        self._partial.unlink(missing_ok=True)  # rename does nothing between two links of one file
        sync_folder(self.path.parent)
        self.record = FileRecord(self._size, self._digest.hexdigest())
        return self.record

    def discard(self) -> None:
        os.close(self._fd)
        self._partial.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self.discard()
            return
        try:
            self.close()
        except BaseException:
            self._partial.unlink(missing_ok=True)
            raise


def _is_aligned(view: memoryview) -> bool:
    """True for a large piece that can go to the disk from where it is. A page boundary cannot be asked of read-only memory."""
    if len(view) < _PIECE_BYTES or len(view) % DATA_ALIGNMENT or view.readonly:
        return False
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) % DATA_ALIGNMENT == 0
