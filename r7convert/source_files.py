"""Reading payload: tensors by position, matrices cut into columns on the way, long stretches in bounded pieces."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from r7convert.errors import FormatError, complain
from r7convert.format import TensorEntry
from r7convert.source import Payload

Bytes = NDArray[np.uint8]

CHUNK_BYTES = 8 << 20
IOV_MAX = 1024
"""Pieces that one call of the kernel fills at most."""


class SourceFiles:
    """Payload of the files one job reads, by position. One thread, one SourceFiles."""

    def __init__(self, payload: Payload) -> None:
        self._payload = payload
        self._open: dict[str, tuple[int, os.stat_result, Path]] = {}
        self._scratch: Bytes = np.empty(0, np.uint8)

    def path(self, name: str) -> Path:
        self._fd(name)
        return self._open[name][2]

    def read(self, name: str, offset: int, nbytes: int, *, passing: bool = False) -> Bytes:
        """`nbytes` from `offset`. `passing`: the result is good until the next read that passes, and lies on a page boundary, so that
        it can go to the disk from where it is.
        """
        raw = self._room(nbytes) if passing else np.empty(nbytes, np.uint8)
        fd, view = self._fd(name), raw.data
        while view:
            count = os.preadv(fd, [view], offset)
            if count == 0:
                raise FormatError(complain(name, "file became shorter while it was read", do="Is something writing to it?"))
            view, offset = view[count:], offset + count
        return raw

    def read_entry(self, entry: TensorEntry, *, passing: bool = False) -> Bytes:
        return self.read(entry.file, entry.offset, entry.nbytes, passing=passing)

    def read_columns(self, entry: TensorEntry, rows: int, pieces: int) -> list[Bytes]:
        """The equal columns of a matrix of rows, passing (see `read`): cut by the kernel while it copies, which saves a pass over the
        bytes.
        """
        width = entry.nbytes // rows // pieces
        buffers = list(self._room(entry.nbytes).reshape(pieces, -1))
        fd, views = self._fd(entry.file), [buffer.data for buffer in buffers]
        step = max(1, IOV_MAX // pieces)
        for first in range(0, rows, step):
            last = min(rows, first + step)
            vectors = [view[row * width : (row + 1) * width] for row in range(first, last) for view in views]
            offset, nbytes = entry.offset + first * pieces * width, (last - first) * pieces * width
            if os.preadv(fd, vectors, offset) != nbytes:  # a short read: again, piece by piece, where it will say why
                lump = self.read(entry.file, offset, nbytes).reshape(last - first, pieces, width)
                for at, buffer in enumerate(buffers):
                    buffer.reshape(rows, width)[first:last] = lump[:, at]
        return buffers

    def _room(self, nbytes: int) -> Bytes:
        if self._scratch.nbytes < nbytes:
            self._scratch = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
        return self._scratch[:nbytes]

    def expect(self, entry: TensorEntry) -> None:
        """Let the kernel begin to read what will be asked for soon."""
        os.posix_fadvise(self._fd(entry.file), entry.offset, entry.nbytes, os.POSIX_FADV_WILLNEED)

    def check_unchanged(self) -> None:
        """Call before an output gets its final name.

        Raises:  FormatError if a file has another size or time than when it was opened.
        """
        for name, (fd, before, _) in self._open.items():
            after = os.fstat(fd)
            if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
                raise FormatError(complain(name, "source file changed while it was read", do="Is something writing to it?"))

    def _fd(self, name: str) -> int:
        if name not in self._open:
            path = self._payload.acquire(name)
            fd = os.open(path, os.O_RDONLY)
            self._open[name] = fd, os.fstat(fd), path
        return self._open[name][0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for name, (fd, _, _) in self._open.items():
            os.close(fd)
            self._payload.release(name)


def runs(entries: Iterable[TensorEntry], most_bytes: int = CHUNK_BYTES) -> Iterator[tuple[int, int, list[TensorEntry]]]:
    """(offset, bytes, tensors that lie in it whole) of reads of at most `most_bytes` that cover ascending tensors: neighbours
    together, a larger one in pieces.
    """
    start = end = -1
    whole: list[TensorEntry] = []
    for entry in entries:
        if entry.offset != end or entry.offset + entry.nbytes - start > most_bytes:
            if end > start:
                yield start, end - start, whole
            start, whole = entry.offset, []
            end = start
        if entry.nbytes > most_bytes:
            for at in range(0, entry.nbytes, most_bytes):
                yield entry.offset + at, min(most_bytes, entry.nbytes - at), []
            start = end = entry.offset + entry.nbytes
            continue
        end = entry.offset + entry.nbytes
        whole.append(entry)
    if end > start:
        yield start, end - start, whole
