"""Small harm done to a good output, for the tests of its judge: one bit, one name, one entry; sealed again where asked.

A change that is sealed again is what a wrong writer would have made: the seal is sound, so contract or bytes must see it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from r7convert.journal import MANIFEST, VERDICT, Manifest, read_manifest, write_manifest
from r7convert.store import encode_header, hash_file, read_header

Json = Any
SHORT_LIST = 2
INDEX = "model.safetensors.index.json"


def copy_output(output: Path, place: Path) -> Path:
    """A copy by hard links: whatever harms a file writes a new one, so the original is never touched."""
    shutil.copytree(output, place, copy_function=os.link)
    return place


def put(path: Path, data: bytes) -> None:
    """Replace a file, not its bytes: it may be a link."""
    path.unlink(missing_ok=True)
    path.write_bytes(data)


def reseal(folder: Path, *, facts: dict[str, Json] | None = None) -> None:
    """List and hash what stands there now, keeping what the manifest states unless `facts` changes it."""
    before = read_manifest(folder)
    (folder / MANIFEST).unlink()
    files = {path.name: hash_file(path) for path in sorted(folder.iterdir()) if path.is_file() and path.name != VERDICT}
    write_manifest(folder, Manifest(before.tool, files, {**before.facts, **(facts or {})}))


# ---- bits -----------------------------------------------------------------------------------------------------------


def flip_bit(path: Path, at: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    put(path, bytes(data))


def class_of(name: str) -> str:
    """A tensor name without its numbers: what tensors of one kind share."""
    return re.sub(r"\d+", "N", name)


def header_places(path: Path) -> dict[str, int]:
    """One byte of each class of a safetensors header: where a flipped bit means something else each time."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    text = raw[8 : 8 + length].decode()
    places = {"length word, low byte": 0, "length word, high byte": 7}
    patterns = {
        "metadata key": r'"__metadata__":\{"(f)ormat"|"__metadata__":\{[^}]*?"(\w)',
        "metadata value": r'"format":"(p)t"',
        "tensor name": r'"([a-z])[\w.]+":\{"dtype"',
        "dtype key": r'"(d)type"',
        "dtype": r'"dtype":"([A-Z])',
        "shape key": r'"(s)hape"',
        "shape": r'"shape":\[(\d)',
        "offsets key": r'"(d)ata_offsets"',
        "begin": r'"data_offsets":\[(\d)',
        "end": r'"data_offsets":\[\d+,\d*?(\d)\]',
        "punctuation": r'(:)\{"dtype"',
    }
    for label, pattern in patterns.items():
        m = re.search(pattern, text)
        assert m is not None, f"{path.name}: no {label} in its header"
        places[label] = 8 + len(text[: m.start(m.lastindex or 0)].encode())
    if text.endswith(" "):
        places["padding"] = 8 + length - 1
    return places


# ---- JSON -----------------------------------------------------------------------------------------------------------


def edit_json(path: Path, edit: Callable[[Json], object]) -> None:
    """`edit` changes the value in place; what it hands back is not looked at."""
    value = json.loads(path.read_text())
    edit(value)
    put(path, json.dumps(value).encode())


def edit_config(folder: Path, edit: Callable[[Json], object]) -> None:
    edit_json(folder / "config.json", edit)


def edit_block(folder: Path, edit: Callable[[Json], object]) -> None:
    """The quantization block in every place where it stands, so that the copies stay equal."""

    def in_config(config: Json) -> None:
        edit(config["quantization_config"])
        if "quantization_config" in config.get("text_config", {}):
            edit(config["text_config"]["quantization_config"])

    edit_json(folder / "config.json", in_config)
    edit_json(folder / "quantization_config.json", edit)


def one_bit_apart(value: Json) -> Json:
    """The nearest other value of the same JSON type, so that it still parses."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value ^ 1
    if isinstance(value, float):
        return value + 2.0**-40
    if isinstance(value, str):
        return chr(ord(value[0]) ^ 1) + value[1:] if value else "\x01"
    return 0  # null


def json_changes(value: Json, path: tuple[str | int, ...] = (), label: str = "") -> Iterator[tuple[str, tuple[str | int, ...], str]]:
    """(class, path, "value" or "key") of every leaf and every key. A class is a path without its numbers; the elements of a short
    list, as [first, last], are classes of their own.
    """
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        here = (*path, key)
        if isinstance(key, str):
            part = re.sub(r"\d+", "N", key)
        else:
            part = str(key) if len(value) <= SHORT_LIST else "N"
        name = f"{label}.{part}".lstrip(".")
        if isinstance(key, str):
            yield f"key {name}", here, "key"
        if not isinstance(inner, dict | list):
            yield name, here, "value"
        yield from json_changes(inner, here, name)


def apply_change(root: Json, path: tuple[str | int, ...], kind: str) -> None:
    for key in path[:-1]:
        root = root[key]
    last = path[-1]
    if kind == "value":
        root[last] = one_bit_apart(root[last])
    else:
        items = [(one_bit_apart(key) if key == last else key, value) for key, value in root.items()]
        root.clear()
        root.update(items)


# ---- tensors --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """A tensor with its bytes, as a writer would hold it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


def read_tensor(folder: Path, name: str) -> Held:
    for path in folder.glob("*.safetensors"):
        entry = read_header(path).tensors.get(name)
        if entry is not None:
            return Held(name, entry.dtype, entry.shape, path.read_bytes()[entry.offset : entry.offset + entry.nbytes])
    raise KeyError(name)


def rewrite_shard(path: Path, change: Callable[[list[Held]], list[Held]], metadata: dict[str, str] | None = None) -> None:
    """Write a shard again with other tensors, in the order given, and put index and total_size right."""
    header, raw = read_header(path), path.read_bytes()
    held = [Held(e.name, e.dtype, e.shape, raw[e.offset : e.offset + e.nbytes]) for e in header.tensors.values()]
    changed = change(held)
    head = encode_header([(t.name, t.dtype, t.shape) for t in changed], header.metadata if metadata is None else metadata, path)
    put(path, head + b"".join(t.data for t in changed))
    reindex(path.parent)


def reindex(folder: Path) -> None:
    headers = [read_header(path) for path in sorted(folder.glob("*.safetensors"))]
    weight_map = {name: header.file for header in headers for name in header.tensors}
    total = sum(entry.nbytes for header in headers for entry in header.tensors.values())

    def edit(index: Json) -> None:
        index["weight_map"] = dict(sorted(weight_map.items()))
        index["metadata"]["total_size"] = total

    edit_json(folder / INDEX, edit)


def change_tensor(folder: Path, pattern: str, change: Callable[[Held], Held | list[Held]]) -> str:
    """Change the first tensor (by name) that matches; returns its name."""
    names = sorted(name for path in folder.glob("*.safetensors") for name in read_header(path).tensors)
    name = next(name for name in names if re.search(pattern, name))
    path = next(path for path in folder.glob("*.safetensors") if name in read_header(path).tensors)

    def each(held: list[Held]) -> list[Held]:
        made: list[Held] = []
        for tensor in held:
            changed = change(tensor) if tensor.name == name else tensor
            made += changed if isinstance(changed, list) else [changed]
        return made

    rewrite_shard(path, each)
    return name


def renamed(to: Callable[[str], str]) -> Callable[[Held], Held]:
    return lambda tensor: replace(tensor, name=to(tensor.name))


def with_data(change: Callable[[bytes], bytes]) -> Callable[[Held], Held]:
    return lambda tensor: replace(tensor, data=change(tensor.data))
