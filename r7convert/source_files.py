"""Reading payload: tensors by position, matrices cut into columns on the way, long stretches in bounded pieces."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
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
        self._fill(name, offset, raw)
        return raw

    def _fill(self, name: str, offset: int, raw: Bytes) -> None:
        fd, view = self._fd(name), raw.data
        while view:
            count = os.preadv(fd, [view], offset)
            if count == 0:
                raise FormatError(complain(name, "file became shorter while it was read", do="Is something writing to it?"))
            view, offset = view[count:], offset + count

    def read_entry(self, entry: TensorEntry, *, passing: bool = False) -> Bytes:
        return self.read(entry.file, entry.offset, entry.nbytes, passing=passing)

    def read_rows(self, entries: Sequence[TensorEntry]) -> Bytes:
        """Tensors one after the other, passing (see `read`)."""
        whole, at = self._room(sum(entry.nbytes for entry in entries)), 0
        for entry in entries:
            self._fill(entry.file, entry.offset, whole[at : at + entry.nbytes])
            at += entry.nbytes
        return whole

    def read_columns(self, entries: Sequence[TensorEntry], rows: int, pieces: int) -> list[Bytes]:
        """The equal columns of a matrix of rows that tensors hold side by side, passing (see `read`): joined and cut by the kernel while
        it copies, which saves two passes over the bytes.
        """
        buffers = list(self._room(sum(entry.nbytes for entry in entries)).reshape(pieces, -1))
        tables = [buffer.reshape(rows, -1) for buffer in buffers]
        width, begin = tables[0].shape[1], 0
        for entry in entries:
            end = begin + entry.nbytes // rows  # of the row that all tensors make together
            spans = [(at, max(begin - at * width, 0), min(end - at * width, width)) for at in range(begin // width, -(-end // width))]
            self._scatter(entry, rows, [tables[at][:, first:last] for at, first, last in spans])
            begin = end
        return buffers

    def _scatter(self, entry: TensorEntry, rows: int, parts: Sequence[Bytes]) -> None:
        """Each row of a tensor into the same row of each part, from left to right."""
        fd, step, row_bytes = self._fd(entry.file), max(1, IOV_MAX // len(parts)), entry.nbytes // rows
        for first in range(0, rows, step):
            last = min(rows, first + step)
            vectors = [part[row].data for row in range(first, last) for part in parts]
            offset, nbytes = entry.offset + first * row_bytes, (last - first) * row_bytes
            if os.preadv(fd, vectors, offset) != nbytes:  # a short read: again, piece by piece, where it will say why
                lump, at = self.read(entry.file, offset, nbytes).reshape(last - first, row_bytes), 0
                for part in parts:
                    part[first:last] = lump[:, at : at + part.shape[1]]
                    at += part.shape[1]

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
