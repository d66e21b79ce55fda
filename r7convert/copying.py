"""Carrying a plan out: payload in, files out, one pass. Each source tensor is read once; every output byte is hashed on its way.

Nothing here decides anything: moves.py and carry.py say what goes where. What is checked on the way is what only payload can
tell: markers, equal copies of one vector on several ranks, and scale vectors that are not finite.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from r7convert.carry import CarriedShard
from r7convert.errors import FormatError, ResourceError, complain
from r7convert.format import MCG_MARKER, MUL1_MARKER, TensorEntry
from r7convert.moves import LayerPlan, Move
from r7convert.progress import Progress
from r7convert.source import Payload
from r7convert.source_files import CHUNK_BYTES, IOV_MAX, Bytes, SourceFiles, runs
from r7convert.store import PARTIAL, FileRecord, WholeFile, encode_header

Json = Any

MARKERS = {"mcg": MCG_MARKER, "mul1": MUL1_MARKER}
_FICLONE = 0x40049409
_AHEAD = 3
"""Moves that the kernel is told of in advance: a matrix is a few MB, and files are not read in the order they are in."""


class Recoder(Protocol):
    """What encodes trellises again where a policy changed their K: the kind of device, how many, and the originals it starts from."""

    engine: str
    devices: int
    reference: Json

    def recode(self, layer: LayerPlan, moves: Sequence[Move], read: Callable[[Move], Bytes]) -> Iterator[Bytes]:
        """For each move, in order: its whole trellis at `move.new_bits`, as bytes [in/16, out/16 * 32 * new_bits]. `read` gives the
        whole trellis of a move at its old K, likewise.
        """

    def facts(self, layer: int) -> Json:
        """What the report shall say of a layer that has been encoded: kept in the journal, so that a resumed run has it too."""


@dataclass
class Findings:
    """What a scan of scale vectors found, by tensor: {"first": index, "count": n}, and of non-finite ones the first value."""

    zeros: dict[str, Json] = field(default_factory=dict)
    nonfinite: dict[str, Json] = field(default_factory=dict)

    def to_json(self) -> Json:
        return {name: found for name, found in (("zeros", self.zeros), ("nonfinite", self.nonfinite)) if found}


class Stopped(Exception):
    """Another worker failed; this one gives up. Never seen outside a run."""


@dataclass
class Work:
    """What one job shares with the run: where to write, what to tell, when to stop, what it found."""

    output: Path
    progress: Progress
    stop: threading.Event
    allow_nonfinite: bool = False
    findings: Findings = field(default_factory=Findings)

    def advance(self, nbytes: int, note: str) -> None:
        if self.stop.is_set():
            raise Stopped
        self.progress.advance(nbytes, note)


# ---- layers ---------------------------------------------------------------------------------------------------------


def write_layer(layer: LayerPlan, payload: Payload, work: Work, recoder: Recoder | None = None) -> dict[str, FileRecord]:
    """Write the files of a layer side by side, in one pass over its moves.

    Raises:  FormatError (a marker that is not mcg, copies that differ, a scale that is not finite, a source that changes).
    """
    moves = list(layer.moves())
    note = f"layer {layer.layer}"
    with SourceFiles(payload) as source, contextlib.ExitStack() as stack:
        joiner = _Joiner(source, work)
        recoded: Iterator[Bytes] = iter(())
        if layer.reencoded:
            assert recoder is not None
            recoded = recoder.recode(layer, [move for move in moves if move.new_bits is not None], joiner.join)
        files = [stack.enter_context(WholeFile(work.output / name)) for name in layer.files]
        for rank, file in enumerate(files):
            file.write(layer.header(rank))
        for at, move in enumerate(moves):
            for entry in moves[at + _AHEAD].sources if at + _AHEAD < len(moves) else ():
                source.expect(entry)
            pieces = joiner.pieces(move, len(files)) if move.new_bits is None else list(cut(next(recoded), move, len(files)))
            for file, piece in zip(files, pieces, strict=True):
                file.write(piece.data)
            work.advance(sum(piece.nbytes for piece in pieces), note)
        source.check_unchanged()
    return {file.path.name: file.whole_record for file in files}


def cut(whole: Bytes, move: Move, pieces: int) -> Iterator[Bytes]:
    """Equal pieces of joined bytes along the move's axis; see moves.py."""
    if move.axis == "whole":
        yield from [whole] * pieces
    elif move.axis == "rows":
        yield from whole.reshape(pieces, -1)
    else:
        rows = whole.reshape(move.rows, pieces, -1)
        for at in range(pieces):
            yield np.ascontiguousarray(rows[:, at])


class _Joiner:
    """Reads moves whole and checks what only payload can tell. A vector that many moves share is read once."""

    def __init__(self, source: SourceFiles, work: Work) -> None:
        self._source = source
        self._work = work
        self._shared: dict[str, Bytes] = {}

    def pieces(self, move: Move, count: int) -> list[Bytes]:
        """What each of `count` files gets."""
        if move.field == "trellis" and count <= IOV_MAX:
            if move.axis == "cols":
                return self._source.read_columns(move.sources, move.rows, count)
            return list(cut(self._source.read_rows(move.sources), move, count))
        return list(cut(self.join(move), move, count))

    def join(self, move: Move) -> Bytes:
        if move.axis == "whole":
            return self._join_equal(move)
        parts = [self._source.read_entry(entry) for entry in move.sources]
        for entry, part in zip(move.sources, parts, strict=True):
            check_values(entry, part, self._work)
        if len(parts) == 1:
            return parts[0]
        if move.axis == "rows":
            return np.concatenate(parts)
        return np.concatenate([part.reshape(move.rows, -1) for part in parts], axis=1).reshape(-1)

    def _join_equal(self, move: Move) -> Bytes:
        first = self._once(move.sources[0])
        for entry in move.sources[1:]:
            if not np.array_equal(self._once(entry), first):
                found = f"others than {move.sources[0].name}"
                raise FormatError(complain(f"{entry.file}: {entry.name}", "copies on every rank", expected="the same bytes", found=found))
        return first

    def _once(self, entry: TensorEntry) -> Bytes:
        """A tensor's checked bytes; a vector several moves ask for (no expert in its name) is kept."""
        if entry.name in self._shared:
            return self._shared[entry.name]
        data = self._source.read_entry(entry)
        check_values(entry, data, self._work)
        if ".r7_shared." in entry.name or ".shared_h." in entry.name:
            self._shared[entry.name] = data
        return data


def check_values(entry: TensorEntry, data: Bytes, work: Work) -> None:
    """Check a marker's value, and a scale vector for what is not finite; zeros are noted.

    Raises:  FormatError naming tensor, first index and count, unless the run allows what is not finite.
    """
    field_name = entry.name.rpartition(".")[2]
    where = f"{entry.file}: {entry.name}"
    if field_name in MARKERS:
        marker = int(data.view("<i4")[0]) if data.nbytes == 4 else None
        if marker != MARKERS[field_name]:
            expected = f"{field_name}, {MARKERS[field_name]}"
            raise FormatError(complain(where, "codebook marker", expected=expected, found=marker, do="Another codebook?"))
    elif field_name.endswith(("suh", "svh")) and entry.dtype == "F16":
        values = data.view("<f2")
        if not (bad := ~np.isfinite(values)).any():
            if not values.all():
                work.findings.zeros[entry.name] = {"first": int(np.argmin(values != 0)), "count": int((values == 0).sum())}
            return
        first, count = int(np.argmax(bad)), int(bad.sum())
        if not work.allow_nonfinite:
            do = "Use --allow-nonfinite to copy it and mark the manifest."
            found = f"{values[first]} at index {first}, {count} in all"
            raise FormatError(complain(where, "scale vector", expected="finite values", found=found, do=do))
        work.findings.nonfinite[entry.name] = {"first": first, "count": count, "value": str(values[first])}


# ---- carried shards -------------------------------------------------------------------------------------------------


def write_shard(shard: CarriedShard, payload: Payload, work: Work, *, link: bool) -> dict[str, FileRecord]:
    """Bring a carried shard over: hard-linked if asked for, else reflinked where the file system can, else copied; always read
    once, for its digest and its scale vectors.
    """
    path = work.output / shard.file
    with SourceFiles(payload) as source:
        shares = shard.as_is and _share_blocks(source.path(shard.file), path.with_name(path.name + PARTIAL), link=link)
        with WholeFile(path, written=shares) as file:
            for data in _shard_bytes(shard, source, work):
                file.write(data.data)
            source.check_unchanged()
    return {shard.file: file.whole_record}


def copy_file(name: str, payload: Payload, work: Work) -> dict[str, FileRecord]:
    """Copy a small file."""
    with SourceFiles(payload) as source:
        size = source.path(name).stat().st_size
        with WholeFile(work.output / name) as file:
            for at in range(0, size, CHUNK_BYTES):
                file.write(source.read(name, at, min(CHUNK_BYTES, size - at)).data)
            source.check_unchanged()
    return {name: file.whole_record}


def _shard_bytes(shard: CarriedShard, source: SourceFiles, work: Work) -> Iterator[Bytes]:
    """The bytes of the output shard in order, checked and told to the progress."""
    if shard.as_is:
        yield source.read(shard.file, 0, min(entry.offset for entry in shard.entries))
    else:
        tensors = [(entry.name, entry.dtype, entry.shape) for entry in shard.entries]
        yield np.frombuffer(encode_header(tensors, shard.metadata, shard.file), np.uint8)
    for offset, nbytes, entries in runs(shard.entries):
        data = source.read(shard.file, offset, nbytes, passing=True)
        for entry in entries:
            at = entry.offset - offset
            check_values(entry, data[at : at + entry.nbytes], work)
        yield data
        work.advance(nbytes, shard.file)


def _share_blocks(source: Path, target: Path, *, link: bool) -> bool:
    """Make `target` share the blocks of `source` without copying: a hard link if asked for, a reflink where it can be.

    Raises:  ResourceError if a hard link was asked for and cannot be.
    """
    target.unlink(missing_ok=True)
    if link:
        try:
            os.link(os.path.realpath(source), target)  # a snapshot's file is a link itself: link what it points to
        except OSError as error:
            why = "another file system" if error.errno == errno.EXDEV else str(error.strerror)
            raise ResourceError(
                complain(target, "cannot hard-link", found=why, expected="one file system", do="Leave out --link.")
            ) from None
        return True
    with source.open("rb") as old, target.open("wb") as new:
        try:
            fcntl.ioctl(new.fileno(), _FICLONE, old.fileno())
        except OSError:
            return False
    return True
