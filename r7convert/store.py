"""The disk door: hostile-input header reader, streaming safetensors writer, strict and atomic JSON, space and folder checks.

A file appears under its final name only when it is whole: `.partial` beside it, fsync, rename, fsync of the folder.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import shutil
import stat
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from r7convert.errors import FormatError, ResourceError, UsageError, complain
from r7convert.format import DTYPE_BITS, TensorEntry, is_int, tensor_nbytes
from r7convert.whole_file import DATA_ALIGNMENT
from r7convert.whole_file import PARTIAL as PARTIAL
from r7convert.whole_file import FileRecord as FileRecord
from r7convert.whole_file import WholeFile as WholeFile
from r7convert.whole_file import sync_folder as sync_folder

Json = Any

STATE_DIR = ".r7convert"
MAX_JSON_BYTES = 1 << 30
# The largest document there is, the index of 384 experts at tp 16, has 4.5 million entries; a header of a million tensors has as
# many values. What goes beyond would cost tens of bytes of memory for each of its own.
MAX_JSON_VALUES = 20_000_000
MAX_JSON_CONTAINERS = 5_000_000
MAX_JSON_DEPTH = 100
# The strictest reader stops at 100,000,000; we stop writing at 20,000,000 since hub helpers stop at 25,000,000.
MAX_HEADER_READ = 100_000_000
MAX_HEADER_WRITE = 20_000_000
_NO_FILE = frozenset({errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR, errno.ENXIO, errno.EINVAL, errno.EISDIR, errno.ENODEV})
# Names that Windows keeps for devices, whatever follows the first dot.
_DEVICES = frozenset({"CON", "PRN", "AUX", "NUL", *(f"{port}{n}" for port in ("COM", "LPT") for n in range(1, 10))})
POINTER_SIGNS = (b"version https://git-lfs", b"# xet version", b"version https://xet")


# ---- reading --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Header:
    """A safetensors header: `tensors` in file order, offsets absolute; `metadata` is {} where the file has none."""

    file: str
    size: int
    data_start: int
    metadata: dict[str, str]
    tensors: dict[str, TensorEntry]


def check_not_pointer(head: bytes, where: object) -> None:
    """Raises:  FormatError if the bytes are a Git LFS or Xet pointer in place of the file."""
    if head.startswith(POINTER_SIGNS):
        raise FormatError(
            complain(where, "this is a pointer, not the file", do="Fetch it with `hf download REPO` or `git lfs pull`, then run again.")
        )


def strict_json(raw: bytes, where: object) -> Json:
    """Parse JSON, refusing what other readers resolve in silence: duplicate keys, NaN and numbers that overflow to Infinity, bad
    UTF-8, halves of surrogate pairs. Depth and the number of values are bounded, and so are memory and time.

    Raises:  FormatError.
    """

    def no_duplicates(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
        made = dict(pairs)
        if len(made) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise FormatError(complain(where, "duplicate JSON key", expected="each key once", found=repr(twice)))
        return made

    def no_constant(word: str) -> NoReturn:
        raise FormatError(complain(where, "JSON number", expected="a finite number", found=word))

    def finite(digits: str) -> float:
        value = float(digits)
        return value if math.isfinite(value) else no_constant(digits)

    containers = raw.count(b"[") + raw.count(b"{")
    for what, count, most in (("values", raw.count(b","), MAX_JSON_VALUES), ("objects and lists", containers, MAX_JSON_CONTAINERS)):
        if count > most:
            raise FormatError(complain(where, f"JSON {what}", expected=f"at most {most:,}", found=f"{count:,}"))
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=no_duplicates, parse_constant=no_constant, parse_float=finite)
        if re.search(rb"\\u[dD][89a-fA-F]", raw):
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise FormatError(complain(where, "not valid JSON", expected="UTF-8 JSON", found=str(error)[:200])) from None
    if containers > MAX_JSON_DEPTH:
        _check_depth(value, where)
    return value


def _check_depth(value: Json, where: object) -> None:
    """Raises:  FormatError for a depth that recursion over the value would not survive."""
    level = [value]
    for _ in range(MAX_JSON_DEPTH):
        inside = (inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer))
        level = [inner for inner in inside if isinstance(inner, (dict, list))]
        if not level:
            return
    raise FormatError(complain(where, "depth of JSON", expected=f"at most {MAX_JSON_DEPTH}", found="more"))


def open_regular(path: Path) -> tuple[BinaryIO, int]:
    """A file opened to be read, and its bytes. A pipe or device is refused, and not waited for.

    Raises:  FormatError if it is missing, no regular file, or its name cannot be one; OSError where this machine is at fault.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        do = "The link dangles: fetch the blob it points to." if path.is_symlink() else "Download it, or point to a complete folder."
        raise FormatError(complain(path, "missing file", do=do)) from None
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno not in _NO_FILE:
            raise
        raise FormatError(complain(path, "cannot be opened", expected="a file", found=error)) from None
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        os.close(fd)
        found = "a folder" if stat.S_ISDIR(info.st_mode) else "no regular file"
        raise FormatError(complain(path, "not a file", expected="a regular file", found=found))
    return os.fdopen(fd, "rb"), info.st_size


def read_json(path: Path) -> Json:
    """Raises:  FormatError if the file is missing, a pointer, too large or not strict JSON."""
    file, size = open_regular(path)
    with file:
        head = file.read(64)
        check_not_pointer(head, path)
        if size > MAX_JSON_BYTES:
            raise FormatError(complain(path, "size of a JSON file", expected=f"at most {MAX_JSON_BYTES} bytes", found=size))
        file.seek(0)
        return strict_json(file.read(MAX_JSON_BYTES), path)


def header_length(prefix: bytes, size: int, where: object) -> int:
    """Length of the JSON header from a file's first bytes; `size` is the file's whole size.

    Raises:  FormatError for an empty, truncated or pointer file, or a length that cannot be.
    """
    if size == 0:
        raise FormatError(complain(where, "empty file", expected="a safetensors file", found="0 bytes", do="Download it again."))
    check_not_pointer(prefix, where)
    if size < 8 or len(prefix) < 8:
        raise FormatError(complain(where, "truncated file", expected="at least 8 bytes", found=size, do="Download it again."))
    length = int.from_bytes(prefix[:8], "little")
    if length > MAX_HEADER_READ:
        raise FormatError(complain(where, "header length", expected=f"at most {MAX_HEADER_READ} bytes", found=length))
    if 8 + length > size:
        raise FormatError(
            complain(where, "truncated file", expected=f"{8 + length} bytes of header", found=f"{size} bytes", do="Download it again.")
        )
    return length


def parse_header(raw: bytes, *, file: str, size: int) -> Header:
    """Check a header as hostile input: bounds, holes, overlap, order of nothing assumed, dtype x shape = bytes.

    Raises:  FormatError naming the tensor.
    Source:  FORMAT.md section 6.
    """
    if not raw.startswith(b"{"):
        raise FormatError(complain(file, "header", expected="a JSON object from the first byte", found=repr(raw[:8])))
    parsed = strict_json(raw, file)
    if not isinstance(parsed, dict):
        raise FormatError(complain(file, "header", expected="an object", found=type(parsed).__name__))
    metadata = parsed.pop("__metadata__", None)
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise FormatError(complain(file, "__metadata__", expected="an object of strings", found=repr(metadata)[:80]))
    data_start = 8 + len(raw)
    entries = [_parse_entry(name, value, file, data_start, size) for name, value in parsed.items()]
    entries.sort(key=lambda e: (e.offset, e.nbytes))
    at, before = data_start, "the header"
    for entry in entries:
        if entry.offset != at:
            what = "hole in the data" if entry.offset > at else "overlapping tensors"
            raise FormatError(complain(f"{file}: {entry.name}", f"{what} after {before}", expected=f"offset {at}", found=entry.offset))
        at, before = entry.offset + entry.nbytes, entry.name
    if at != size:
        what = "trailing bytes" if at < size else "truncated file"
        raise FormatError(complain(file, what, expected=f"{at} bytes", found=size, do="Download it again."))
    return Header(file, size, data_start, metadata, {entry.name: entry for entry in entries})


def _parse_entry(name: str, value: Json, file: str, data_start: int, size: int) -> TensorEntry:
    where = f"{file}: {name}"
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise FormatError(complain(where, "header entry", expected="dtype, shape, data_offsets", found=repr(value)[:80]))
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise FormatError(complain(where, "dtype", expected="a safetensors dtype", found=repr(dtype)[:80]))
    if not isinstance(shape, list) or len(shape) > 64 or not all(is_int(n) and 0 <= n < 1 << 63 for n in shape):
        raise FormatError(complain(where, "shape", expected="a list of sizes", found=repr(shape)[:80]))
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(is_int(n) and n >= 0 for n in offsets):
        raise FormatError(complain(where, "data_offsets", expected="[begin, end]", found=repr(offsets)[:80]))
    begin, end = offsets
    if begin > end or data_start + end > size:
        do = "The file is truncated: download it again." if begin <= end else ""
        raise FormatError(complain(where, "data_offsets", expected=f"within {size - data_start} bytes of data", found=offsets, do=do))
    nbytes = tensor_nbytes(dtype, shape)
    if nbytes != end - begin:
        raise FormatError(complain(where, f"bytes of {dtype} {shape}", expected=nbytes, found=end - begin))
    return TensorEntry(name, dtype, tuple(shape), file, data_start + begin, nbytes)


def read_header(path: Path) -> Header:
    """The checked header of a safetensors file on disk; `file` in the result is the plain name.

    Raises:  FormatError.
    """
    file, size = open_regular(path)
    with file:
        prefix = file.read(64)
        length = header_length(prefix, size, path)
        file.seek(8)
        raw = file.read(length)
    return parse_header(raw, file=path.name, size=size)


# ---- writing --------------------------------------------------------------------------------------------------------


def encode_header(tensors: Sequence[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str], where: object) -> bytes:
    """Length word and JSON of a safetensors header for (name, dtype, shape) laid out in the order given, padded with spaces
    so that the data begins at a multiple of 4096.

    Raises:  FormatError for a name given twice or a header over 20,000,000 bytes.
    """
    made: dict[str, Json] = {"__metadata__": {key: metadata[key] for key in sorted(metadata)}}
    at = 0
    for name, dtype, shape in tensors:
        if name in made:
            raise FormatError(complain(where, "tensor written twice", found=name, expected="each name once"))
        nbytes = tensor_nbytes(dtype, shape)
        made[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    raw = json.dumps(made, separators=(",", ":"), ensure_ascii=False).encode()
    length = -(-(8 + len(raw)) // DATA_ALIGNMENT) * DATA_ALIGNMENT - 8
    if length > MAX_HEADER_WRITE:
        raise FormatError(complain(where, "header", expected=f"at most {MAX_HEADER_WRITE} bytes", found=length, do="Split the file."))
    return length.to_bytes(8, "little") + raw.ljust(length, b" ")


def encode_json(value: Json, *, compact: bool = False) -> bytes:
    """The one way JSON is written: UTF-8, keys in the order given, no NaN, newline at the end."""
    style: dict[str, Any] = {"separators": (",", ":")} if compact else {"indent": 2}
    return (json.dumps(value, ensure_ascii=False, allow_nan=False, **style) + "\n").encode()


def write_bytes(path: Path, data: bytes) -> FileRecord:
    """Write a whole small file atomically."""
    with WholeFile(path) as file:
        file.write(data)
    assert file.record is not None
    return file.record


def write_json(path: Path, value: Json, *, compact: bool = False) -> FileRecord:
    return write_bytes(path, encode_json(value, compact=compact))


def hash_file(path: Path, chunk_bytes: int = 1 << 22) -> FileRecord:
    """Size and SHA-256 of a file, read once in bounded memory."""
    digest, size, buffer = hashlib.sha256(), 0, bytearray(chunk_bytes)
    with path.open("rb", buffering=0) as file:
        while n := file.readinto(buffer):
            digest.update(memoryview(buffer)[:n])
            size += n
    return FileRecord(size, digest.hexdigest())


# ---- folders --------------------------------------------------------------------------------------------------------


def check_plain_name(name: object, where: object) -> str:
    """A file name that stays inside its folder, here and on a machine it is copied to: no separators, drive, `..`, control
    characters or undecodable bytes, no hidden, overlong or device names, no space or dot at the end.

    Raises:  FormatError.
    """
    if (
        not isinstance(name, str)
        or not name
        or len(name.encode("utf-8", "surrogatepass")) > 255
        or name.startswith(".")
        or name.endswith(".")
        or any(c in name for c in '/\\:*?"<>|')
        or any(unicodedata.category(c) in ("Cc", "Cs") for c in name)
        or name != name.strip()
        or name.partition(".")[0].rstrip().upper() in _DEVICES
    ):
        raise FormatError(complain(where, "file name", expected="a plain name inside the folder", found=repr(name)[:120]))
    return name


def is_plain_name(name: object) -> bool:
    try:
        check_plain_name(name, "")
    except FormatError:
        return False
    return True


def find_twins(names: Iterable[str]) -> list[str]:
    """Names that are one file where letter case and the way an accent is written do not count, as on macOS and Windows."""
    seen: dict[str, list[str]] = {}
    for name in names:
        seen.setdefault(unicodedata.normalize("NFC", name).casefold(), []).append(name)
    return sorted(name for same in seen.values() if len(same) > 1 for name in same)


def check_disjoint(source: Path, output: Path) -> None:
    """Raises:  UsageError if one folder is, contains or lies inside the other, also through links."""
    a, b = source.resolve(), output.resolve()
    if a == b or a in b.parents or b in a.parents:
        raise UsageError(
            complain(output, "output and source may not contain each other", expected=f"a folder apart from {source}", found=b)
        )


def check_free_space(folder: Path, need_bytes: int) -> None:
    """Raises:  ResourceError if the file system of `folder` (or of its nearest parent that exists) has less."""
    place = folder
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < need_bytes:
        raise ResourceError(
            complain(folder, "free space", expected=f"{need_bytes:,} bytes", found=f"{free:,}", do="Free some, or choose another disk.")
        )
