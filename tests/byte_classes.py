"""Every byte of an output belongs to a class of bytes: what a check that overlooks one byte of the class would overlook in all.

    a tensor's data         by its name without numbers
    a safetensors header    length word, padding, and each token of its JSON by what it says: a name, a shape, an offset, ...
    a JSON file             each key and each value by its path without numbers; punctuation; spaces
    any other file          the file

The classes come from the bytes themselves: the tokens of the JSON, the entries of the header. `spans` covers a file from its
first byte to its last, so that none can be missing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from r7convert.store import read_header
from tests.tamper import class_of

Steps = tuple[str | int, ...]
SHORT_LIST = 2
_TOKEN = re.compile(rb'(?P<string>"(?:[^"\\]|\\.)*")|(?P<word>[-+.\w]+)|(?P<mark>[{}\[\]:,])|(?P<space>\s+)')
_ENTRY = {"dtype": "dtype", "shape": "shape", "data_offsets": "offsets"}


@dataclass(frozen=True)
class Span:
    """Bytes [start, stop) of a file, and their class. `path` leads to the key or value where they are one in a JSON file."""

    start: int
    stop: int
    kind: str
    path: Steps = ()
    is_key: bool = False


def spans(path: Path) -> list[Span]:
    """The whole file, in order, without a gap."""
    if path.suffix == ".safetensors":
        found = list(_safetensors(path))
    elif path.suffix == ".json":
        found = list(json_tokens(path.read_bytes()))
    else:
        found = [Span(0, path.stat().st_size, "the file")]
    at = 0
    for span in found:
        assert span.start == at < span.stop, f"{path.name}: bytes {at} to {span.start} are of no class"
        at = span.stop
    assert at == path.stat().st_size, f"{path.name}: bytes from {at} on are of no class"
    return found


def _safetensors(path: Path) -> Iterator[Span]:
    raw, header = path.read_bytes(), read_header(path)
    yield Span(0, 8, "length word")
    for token in json_tokens(raw[8 : header.data_start]):
        yield Span(8 + token.start, 8 + token.stop, _header_class(token))
    for entry in header.tensors.values():
        yield Span(entry.offset, entry.offset + entry.nbytes, f"data {class_of(entry.name)}")


def _header_class(token: Span) -> str:
    if not token.path:
        return "padding" if token.kind == "space" else token.kind
    name, *inner = token.path
    if name == "__metadata__":
        return f"{'key' if token.is_key else 'value'} " + ".".join(map(str, token.path))
    if not inner:
        return "tensor name"
    return f"{inner[0]} key" if token.is_key else f"{inner[0]} {inner[1] if inner[0] == 'data_offsets' else ''}".strip()


def json_tokens(raw: bytes) -> Iterator[Span]:
    """The tokens of a JSON text. `path` has the names and the places in lists that lead to a key or value; its class is "key" or
    "value" and that path, without numbers, and without places in lists of more than two.
    """
    tokens = [(m.lastgroup, m.start(), m.end()) for m in _TOKEN.finditer(raw)]
    lengths = _list_lengths(raw, tokens)
    steps: list[Any] = []  # one for each object or list that is open: the key, or the place
    opened: list[int] = []  # where each began
    wants_key: list[bool] = []
    for kind, start, stop in tokens:
        mark = raw[start:stop]
        if kind == "space":
            yield Span(start, stop, "space")
        elif kind == "mark":
            if mark in b"{[":
                opened.append(start)
                steps.append("" if mark == b"{" else 0)
                wants_key.append(mark == b"{")
            elif mark in b"}]":
                for stack in (opened, steps, wants_key):
                    stack.pop()
            elif mark == b",":
                if isinstance(steps[-1], int):
                    steps[-1] += 1
                else:
                    wants_key[-1] = True
            else:
                wants_key[-1] = False
            yield Span(start, stop, "punctuation")
        else:
            is_key = bool(wants_key) and wants_key[-1]
            if is_key:
                steps[-1] = raw[start + 1 : stop - 1].decode()
            shown = [_shown(step, lengths[at]) for step, at in zip(steps, opened, strict=True)]
            yield Span(start, stop, f"{'key' if is_key else 'value'} {'.'.join(shown)}", tuple(steps), is_key)


def _shown(step: str | int, length: int) -> str:
    if isinstance(step, str):
        return class_of(step)
    return str(step) if length <= SHORT_LIST else "N"


def _list_lengths(raw: bytes, tokens: list[tuple[str | None, int, int]]) -> dict[int, int]:
    """Items of each list (commas plus one), by where it begins."""
    lengths: dict[int, int] = {}
    opened: list[int] = []
    for kind, start, _ in tokens:
        mark = raw[start : start + 1]
        if kind != "mark":
            continue
        if mark in b"{[":
            opened.append(start)
            lengths[start] = 1
        elif mark in b"}]":
            opened.pop()
        elif mark == b",":
            lengths[opened[-1]] += 1
    return lengths
