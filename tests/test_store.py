"""The disk door: headers taken as hostile input, files that appear whole or not at all, bytes that safetensors itself reads."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save

from r7convert.errors import FormatError, ResourceError, UsageError
from r7convert.store import (
    FileRecord,
    WholeFile,
    check_disjoint,
    check_free_space,
    check_plain_name,
    encode_header,
    encode_json,
    hash_file,
    header_length,
    parse_header,
    read_header,
    read_json,
    strict_json,
    write_bytes,
    write_json,
)
from tests.folders import raw_shard

GOOD = {"a": {"dtype": "F16", "shape": [2], "data_offsets": [0, 4]}, "b": {"dtype": "I32", "shape": [], "data_offsets": [4, 8]}}


# ---- headers --------------------------------------------------------------------------------------------------------


def test_a_good_header(tmp_path: Path) -> None:
    raw_shard(tmp_path / "x.safetensors", {"__metadata__": {"k": "v"}, **GOOD}, bytes(8))
    header = read_header(tmp_path / "x.safetensors")
    assert header.metadata == {"k": "v"}
    assert [(t.name, t.dtype, t.shape, t.offset - header.data_start, t.nbytes) for t in header.tensors.values()] == [
        ("a", "F16", (2,), 0, 4),
        ("b", "I32", (), 4, 4),
    ]


@pytest.mark.parametrize("metadata", [None, {}, {"custom": "x"}])
def test_metadata_may_be_missing_null_or_anything_of_strings(tmp_path: Path, metadata: Any) -> None:
    for header in ({**GOOD}, {"__metadata__": metadata, **GOOD}):
        raw_shard(tmp_path / "x", header, bytes(8))
        assert read_header(tmp_path / "x").metadata == (header.get("__metadata__") or {})


BROKEN: list[tuple[Any, bytes, str]] = [
    ({**GOOD, "__metadata__": {"k": 1}}, bytes(8), "__metadata__"),
    ({**GOOD, "__metadata__": []}, bytes(8), "__metadata__"),
    (GOOD, bytes(7), "truncated"),
    (GOOD, bytes(9), "trailing"),
    (GOOD, b"", "truncated"),
    ({"a": {**GOOD["a"], "data_offsets": [4, 8]}}, bytes(8), "hole"),
    ({**GOOD, "b": {**GOOD["b"], "data_offsets": [2, 6]}}, bytes(8), "overlapping"),
    ({**GOOD, "b": {**GOOD["b"], "data_offsets": [0, 4]}}, bytes(4), "overlapping"),
    ({"a": {**GOOD["a"], "shape": [3]}}, bytes(4), "bytes of F16"),
    ({"a": {**GOOD["a"], "dtype": "F17"}}, bytes(4), "dtype"),
    ({"a": {**GOOD["a"], "dtype": ["F16"]}}, bytes(4), "dtype"),
    ({"a": {**GOOD["a"], "shape": [True, 2]}}, bytes(4), "shape"),
    ({"a": {**GOOD["a"], "shape": [-2]}}, bytes(4), "shape"),
    ({"a": {**GOOD["a"], "shape": [2.0]}}, bytes(4), "shape"),
    ({"a": {**GOOD["a"], "shape": 2}}, bytes(4), "shape"),
    ({"a": {**GOOD["a"], "shape": [1] * 65}}, bytes(4), "shape"),
    ({"a": {**GOOD["a"], "data_offsets": [4, 0]}}, bytes(4), "data_offsets"),
    ({"a": {**GOOD["a"], "data_offsets": [0, 4, 8]}}, bytes(4), "data_offsets"),
    ({"a": {**GOOD["a"], "data_offsets": [0, 1 << 70]}}, bytes(4), "data_offsets"),
    ({"a": {**GOOD["a"], "data_offsets": [0.0, 4]}}, bytes(4), "data_offsets"),
    ({"a": {**GOOD["a"], "extra": 1}}, bytes(4), "header entry"),
    ({"a": {"dtype": "F16"}}, bytes(4), "header entry"),
    ({"a": 3}, bytes(4), "header entry"),
    ([], b"", "object"),
    (b'{"a":1,"a":2}', b"", "duplicate JSON key"),
    (b'{"a":NaN}', b"", "finite"),
    (b'{"a":' + b"[" * 100_000, b"", "JSON"),
    (b"\xff\xfe{}", b"", "object"),
    (b' {"a":1}', b"", "first byte"),
    (b"{", b"", "JSON"),
    (b'{"a":"\xff"}', b"", "JSON"),
    (b"", b"", "object"),
]


@pytest.mark.parametrize(("header", "data", "word"), BROKEN, ids=[f"{n}-{word}" for n, (_, _, word) in enumerate(BROKEN)])
def test_broken_headers(tmp_path: Path, header: Any, data: bytes, word: str) -> None:
    raw_shard(tmp_path / "x.safetensors", header, data)
    with pytest.raises(FormatError, match=word):
        read_header(tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    ("raw", "word"),
    [
        (b"", "empty file"),
        (b"\x01\x02", "truncated"),
        ((1 << 40).to_bytes(8, "little") + b"{}", "header length"),
        ((50).to_bytes(8, "little") + b"{}", "truncated"),
        (b"version https://git-lfs.github.com/spec/v1\n", "pointer"),
        (b"# xet version 0\n", "pointer"),
    ],
)
def test_files_that_are_none(tmp_path: Path, raw: bytes, word: str) -> None:
    (tmp_path / "x").write_bytes(raw)
    with pytest.raises(FormatError, match=word):
        read_header(tmp_path / "x")


def test_paths_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FormatError, match="dangles"):
        read_header(tmp_path / "link")
    with pytest.raises(FormatError, match="missing"):
        read_header(tmp_path / "nothing")
    with pytest.raises(FormatError, match="folder"):
        read_header(tmp_path)


@settings(deadline=None)
@given(st.binary(max_size=200), st.integers(0, 300))
def test_any_bytes_are_a_header_or_an_error(raw: bytes, size: int) -> None:
    for parse in (lambda: parse_header(raw, file="x", size=8 + len(raw) + size), lambda: header_length(raw, len(raw) + size, "x")):
        try:
            parse()
        except FormatError:
            continue


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_one_changed_value_of_a_good_header_is_read_safely(data: Any) -> None:
    """Whatever a header says, no tensor that comes out lies outside the file."""
    header = json.loads(json.dumps(GOOD))
    entry = header[data.draw(st.sampled_from(["a", "b"]))]
    key = data.draw(st.sampled_from(["dtype", "shape", "data_offsets"]))
    numbers = st.integers(-(1 << 64), 1 << 64) | st.integers(-2, 10)
    entry[key] = data.draw(st.lists(numbers, max_size=3) | st.sampled_from(["F16", "I32", "U8", "F4", "x"]) | numbers)
    raw = json.dumps(header).encode()
    try:
        parsed = parse_header(raw, file="x", size=8 + len(raw) + 8)
    except FormatError:
        return
    for tensor in parsed.tensors.values():
        assert parsed.data_start <= tensor.offset <= tensor.offset + tensor.nbytes <= parsed.size


@settings(deadline=None, max_examples=50)
@given(
    st.dictionaries(
        st.text(min_size=1, max_size=20).filter(lambda n: n != "__metadata__"), st.lists(st.integers(0, 4), max_size=3), max_size=8
    )
)
def test_headers_of_the_official_writer_are_read(shapes: dict[str, list[int]]) -> None:
    raw = save({name: torch.zeros(shape, dtype=torch.float16) for name, shape in shapes.items()}, metadata={"format": "pt"})
    length = int.from_bytes(raw[:8], "little")
    header = parse_header(raw[8 : 8 + length], file="x", size=len(raw))
    assert {name: list(tensor.shape) for name, tensor in header.tensors.items()} == shapes


@settings(deadline=None, max_examples=50)
@given(
    st.dictionaries(
        st.text(min_size=1, max_size=20).filter(lambda n: n != "__metadata__"), st.lists(st.integers(0, 4), max_size=3), max_size=8
    ),
    st.dictionaries(st.text(max_size=10), st.text(max_size=10), max_size=3),
)
def test_headers_of_ours_are_read_by_the_official_reader(
    tmp_path_factory: pytest.TempPathFactory, shapes: dict[str, list[int]], metadata: dict[str, str]
) -> None:
    tensors = [(name, "I16", shape) for name, shape in shapes.items()]
    raw = encode_header(tensors, metadata, "x")
    assert len(raw) % 4096 == 0
    path = tmp_path_factory.getbasetemp() / "official.safetensors"
    values = {name: torch.randint(-9, 9, shape, dtype=torch.int16) for name, shape in shapes.items()}
    path.write_bytes(raw + b"".join(value.numpy().tobytes() for value in values.values()))
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == set(shapes)
        assert (file.metadata() or {}) == metadata
        for name, value in values.items():
            assert torch.equal(file.get_tensor(name), value)
    assert list(read_header(path).tensors) == [name for name, _, _ in sorted(tensors, key=lambda t: read_header(path).tensors[t[0]].offset)]


def test_headers_do_not_depend_on_the_order_of_metadata() -> None:
    tensors = [("a", "I16", [2])]
    assert encode_header(tensors, {"a": "1", "b": "2"}, "x") == encode_header(tensors, {"b": "2", "a": "1"}, "x")


def test_headers_that_cannot_be_written() -> None:
    with pytest.raises(FormatError, match="twice"):
        encode_header([("a", "I16", [2]), ("a", "I16", [2])], {}, "x")
    with pytest.raises(FormatError, match="Split"):
        encode_header([("a", "I16", [2])], {"long": "x" * 20_000_000}, "x")


# ---- JSON -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("raw", [b'{"a":1,"a":1}', b"NaN", b"[Infinity]", b"{", b"\xff", b"[" * 10_000, b"", b'{"a":1}x'])
def test_json_other_readers_would_take(raw: bytes) -> None:
    with pytest.raises(FormatError):
        strict_json(raw, "x")


def test_json_is_written_one_way(tmp_path: Path) -> None:
    value = {"b": [1, 2.5, "ü"], "a": None}
    write_json(tmp_path / "x", value)
    assert read_json(tmp_path / "x") == value
    assert list(read_json(tmp_path / "x")) == ["b", "a"]
    assert encode_json(value, compact=True) == '{"b":[1,2.5,"ü"],"a":null}\n'.encode()
    with pytest.raises(ValueError):
        encode_json(float("nan"))


# ---- whole files ----------------------------------------------------------------------------------------------------


def test_a_file_appears_whole(tmp_path: Path) -> None:
    path = tmp_path / "x"
    pieces = [b"small", bytes(1 << 17), b"", b"tail" * 1000] * 3
    with WholeFile(path) as file:
        for piece in pieces:
            file.write(piece)
            assert not path.exists()
    raw = b"".join(pieces)
    assert path.read_bytes() == raw
    assert file.record == FileRecord(len(raw), hashlib.sha256(raw).hexdigest()) == hash_file(path)
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_many_small_writes_are_gathered(tmp_path: Path) -> None:
    with WholeFile(tmp_path / "x") as file:
        for n in range(600_000):
            file.write(n.to_bytes(4, "little"))
        assert (tmp_path / "x.partial").stat().st_size > 0
    assert (tmp_path / "x").read_bytes() == b"".join(n.to_bytes(4, "little") for n in range(600_000))


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, (2 << 20) - 1, 2 << 20, (2 << 20) + 1, (4 << 20) + 4096 + 7])
@pytest.mark.parametrize("refuses", ["nothing", "open", "write"])
def test_past_the_page_cache_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nbytes: int, refuses: str) -> None:
    """Every length around the buffer's and the block's, where O_DIRECT works and where a file system has none."""
    raw, modes = np.random.default_rng(nbytes).bytes(nbytes), []
    really_open, really_write = os.open, os.write

    def is_direct(fd: int) -> bool:
        return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)

    def open_(path: Any, flags: int, mode: int = 0o777, **rest: Any) -> int:
        if flags & os.O_DIRECT and refuses == "open":
            os.close(really_open(path, flags & ~os.O_DIRECT, mode))  # as a kernel may: the file is made, the flag refused
            raise OSError(errno.EINVAL, "Invalid argument")
        return really_open(path, flags, mode, **rest)

    def write(fd: int, data: Any) -> int:
        modes.append(is_direct(fd))
        if is_direct(fd) and refuses == "write":
            raise OSError(errno.EINVAL, "Invalid argument")
        return really_write(fd, data)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "write", write)
    with WholeFile(tmp_path / "x") as file:
        for at in range(0, nbytes, 1_000_003):
            file.write(raw[at : at + 1_000_003])
    assert (tmp_path / "x").read_bytes() == raw
    assert file.record == FileRecord(nbytes, hashlib.sha256(raw).hexdigest())
    if refuses == "nothing" and nbytes >= 4096 and modes[0]:
        assert modes[-1] == (nbytes % 4096 == 0)
    if refuses == "open":
        assert not any(modes)


def test_an_error_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"old")

    def fail_half_way() -> None:
        with WholeFile(tmp_path / "x") as file:
            file.write(b"new")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_half_way()
    assert (tmp_path / "x").read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_a_partial_that_is_a_hard_link_is_never_written_into(tmp_path: Path) -> None:
    """A run with --link that was killed leaves the source's own inode under the partial name."""
    (tmp_path / "source").write_bytes(b"precious")
    os.link(tmp_path / "source", tmp_path / "x.partial")
    with WholeFile(tmp_path / "x") as file:
        file.write(b"new")
    assert (tmp_path / "source").read_bytes() == b"precious"


# ---- folders --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["a/b", "..", "../x", "/x", "C:x", "a\\b", "a\0", ".git", "", "x" * 256, " x", "x\n", None, 3, "a*", "ü" * 128]
)
def test_names_that_are_not_plain(name: Any) -> None:
    with pytest.raises(FormatError, match="file name"):
        check_plain_name(name, "index")


def test_plain_names() -> None:
    for name in ("model-00001-of-00002.safetensors", "ü.json", "a b"):
        assert check_plain_name(name, "index") == name


def test_overlapping_folders(tmp_path: Path) -> None:
    source = tmp_path / "a" / "source"
    source.mkdir(parents=True)
    (tmp_path / "link").symlink_to(source)
    for output in (
        source,
        source / "out",
        source.parent,
        tmp_path / "link",
        tmp_path / "link" / "out",
        tmp_path / "a" / "x" / ".." / "source",
    ):
        with pytest.raises(UsageError, match="may not contain each other"):
            check_disjoint(source, output)
    check_disjoint(source, tmp_path / "a" / "source2")


def test_free_space(tmp_path: Path) -> None:
    check_free_space(tmp_path / "not" / "there", 1)
    with pytest.raises(ResourceError, match="free space"):
        check_free_space(tmp_path, 1 << 60)


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_file_that_cannot_be_finished_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, refused)
    with pytest.raises(OSError, match="No space left"):
        write_bytes(tmp_path / "x", b"1")
    assert list(tmp_path.iterdir()) == []
