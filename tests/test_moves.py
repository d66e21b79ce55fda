"""Joining and cutting: whatever the ranks before and after, the whole matrix is the same."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from r7convert.copying import cut
from r7convert.format import TensorEntry
from r7convert.moves import Move
from r7convert.source_files import SourceFiles, runs


def move(axis: str, rows: int) -> Move:
    return Move(0, "gate_proj", "trellis", (), axis, rows)  # type: ignore[arg-type]


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 6), st.integers(1, 5))
def test_columns(rows: int, tiles: int, pieces: int, words: int) -> None:
    whole = np.arange(rows * pieces * tiles * words, dtype=np.int16).reshape(rows, pieces * tiles, words)
    made = list(cut(whole.view(np.uint8).reshape(-1), move("cols", rows), pieces))
    back = np.concatenate([piece.reshape(-1).view(np.int16).reshape(rows, tiles, words) for piece in made], axis=1)
    assert (back == whole).all()
    assert all(piece.flags.c_contiguous for piece in made)


@given(st.integers(1, 6), st.integers(1, 20))
def test_rows(pieces: int, nbytes: int) -> None:
    whole = np.arange(pieces * nbytes, dtype=np.uint8)
    assert (np.concatenate(list(cut(whole, move("rows", 1), pieces))) == whole).all()
    assert [piece.tolist() for piece in cut(whole, move("whole", 1), pieces)] == [whole.tolist()] * pieces


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 3)), max_size=12), st.integers(1, 20))
def test_runs_cover_every_tensor_once(tensors: list[tuple[int, int]], most_bytes: int) -> None:
    """Sizes, and gaps before each tensor, as a shard has them that lost neighbours."""
    entries, at = [], 100
    for number, (nbytes, gap) in enumerate(tensors):
        at += gap
        entries.append(TensorEntry(str(number), "U8", (nbytes,), "f", at, nbytes))
        at += nbytes
    covered, whole = [], []
    for offset, nbytes, inside in runs(entries, most_bytes):
        assert 0 < nbytes <= most_bytes
        covered += range(offset, offset + nbytes)
        for entry in inside:
            assert offset <= entry.offset <= entry.offset + entry.nbytes <= offset + nbytes
        whole += inside
    assert covered == [byte for entry in entries for byte in range(entry.offset, entry.offset + entry.nbytes)]
    assert [e.name for e in whole if e.nbytes] == [e.name for e in entries if 0 < e.nbytes <= most_bytes]


@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_pieces_are_equal(pieces: int) -> None:
    assert {piece.nbytes for piece in cut(np.zeros(64, np.uint8), move("cols", 2), pieces)} == {64 // pieces}


# ---- reading --------------------------------------------------------------------------------------------------------


class Here:
    """Payload in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.held: list[str] = []

    def identity(self) -> str:
        return ""

    def prepare(self, steps: object) -> None: ...

    def abandon(self) -> None: ...

    def acquire(self, name: str) -> Path:
        self.held.append(name)
        return self.folder / name

    def release(self, name: str) -> None:
        self.held.remove(name)


@pytest.mark.parametrize("most", [None, 97, 1000, 70_000])
@pytest.mark.parametrize(("rows", "pieces", "width"), [(3, 2, 5), (700, 4, 48), (2000, 1, 7), (5, 1000, 3)])
def test_columns_cut_while_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int, pieces: int, width: int, most: int | None
) -> None:
    """Also where the kernel returns less than was asked for."""
    raw = np.random.default_rng(0).bytes(9 + rows * pieces * width)
    (tmp_path / "f").write_bytes(raw)
    really, payload = os.preadv, Here(tmp_path)

    def short(fd: int, views: list[memoryview], offset: int) -> int:
        if most is None or (len(views) == 1 and len(views[0]) <= most):
            return really(fd, views, offset)
        return really(fd, [views[0][:most]], offset)

    monkeypatch.setattr(os, "preadv", short)
    entry = TensorEntry("t", "U8", (rows * pieces * width,), "f", 9, rows * pieces * width)
    with SourceFiles(payload) as source:
        source.expect(entry)
        made = source.read_columns([entry], rows, pieces)
        assert payload.held == ["f"]
    whole = np.frombuffer(raw[9:], np.uint8).reshape(rows, pieces, width)
    for at, piece in enumerate(made):
        assert (piece.reshape(rows, width) == whole[:, at]).all()
    assert payload.held == []


@pytest.mark.parametrize("most", [None, 50])
@pytest.mark.parametrize(("ranks", "pieces"), [(1, 4), (4, 8), (8, 4), (4, 1), (2, 3), (3, 2), (3, 3)])
def test_ranks_joined_and_cut_while_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, pieces: int, most: int | None
) -> None:
    """Any tp to any tp, in one pass: columns of a matrix whose ranks stand in files of their own, and rows of one."""
    rows, width = 700, 24 * 5
    whole = np.random.default_rng(0).integers(0, 256, (rows, width), np.uint8)
    entries = []
    for rank, part in enumerate(np.split(whole, ranks, axis=1)):
        (tmp_path / f"{rank}").write_bytes(bytes(rank) + part.tobytes())
        entries.append(TensorEntry(f"t{rank}", "U8", (part.size,), f"{rank}", rank, part.size))
    really = os.preadv

    def short(fd: int, views: list[memoryview], offset: int) -> int:
        return really(fd, views if most is None or len(views) == 1 else [views[0][:most]], offset)

    monkeypatch.setattr(os, "preadv", short)
    with SourceFiles(Here(tmp_path)) as source:
        made = source.read_columns(entries, rows, pieces)
        for piece, due in zip(made, np.split(whole, pieces, axis=1), strict=True):
            assert (piece.reshape(rows, -1) == due).all()
        assert (source.read_rows(entries) == np.concatenate([np.fromfile(tmp_path / e.file, np.uint8)[e.offset :] for e in entries])).all()
