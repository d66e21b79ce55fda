"""Hypothesis strategies that spoil a good document: keys, types and values of its JSON, and its bytes."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import strategies as st

_RAW, _TWICE = "@@raw:", "@@twice@@"

# Text that JSON readers take for a value, or nearly.
LITERALS = (
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "-1e999",
    "1E400",
    "-0",
    "3.0",
    "1" + "0" * 4000,
    "1" + "0" * 5000,
    "0." + "1" * 5000,
    "[" * 100_000,
    "[" * 150 + "]" * 150,
    '{"a":' * 900 + "1" + "}" * 900,
    '"\\ud800"',
    '"a\\udfff.json"',
    '"\\u0000"',
    '"\\u001b[31m"',
    "tru",
    "'x'",
    "01",
    "",
)
NAMES = (
    "",
    ".",
    "..",
    "../x.json",
    "../source/config.json",
    "../../../../../../etc/passwd",
    "/etc/passwd",
    "/dev/zero",
    "C:\\x.json",
    "C:x",
    "\\\\host\\share",
    "a\\b.json",
    "a/b.json",
    "a\0b",
    "CONFIG.JSON",
    "Config.json",
    "model-CARRIER.safetensors",
    "con",
    "aux.json",
    "NUL.safetensors",
    "x.",
    "x ",
    " x",
    "x\n",
    "x\r\ny",
    "\x1b[2J",
    "\u202egnp.exe",
    "\x85\u2028",
    "\ufeffconfig.json",
    "ü.json",
    "u\u0308.json",
    "x" * 256,
    "x" * 100_000,
    "9" * 5000,
    "٣",
    "²",
    "0x10",
    "1_000",
    "-1",
    "model.layers." + "9" * 5000 + ".mlp.experts.0.gate_proj.trellis",
    "model.layers.1.mlp.experts.999999.gate_proj.trellis",
    "model.layers.999999.mlp.experts.0.gate_proj.trellis",
    "model.layers.٣.mlp.experts.0.gate_proj.trellis",
    "model.layers.1.mlp.experts.0.gate_proj.rank" + "9" * 5000 + ".trellis",
    "model.layers.1.mlp.experts.0.gate_proj.sqg",
    "layers." * 3000,
    "__metadata__",
    "tier_map.json:" + "x" * 300,
    ":",
    "../tier_map.json:x",
    "{target}",
    "%s%n",
    "\ud800",
)
NUMBERS = (-(10**30), -(1 << 63), -1, 0, 1, 2, 3, 4, 6, 7, 16, 127, 128, 255, 256, 1 << 20, (1 << 31) - 1, 1 << 31, 1 << 53)
NUMBERS += ((1 << 63) - 1, 1 << 63, 1 << 64, 10**18, 128 * 10**15, 10**30)

leaves = st.one_of(
    st.sampled_from(NUMBERS),
    st.sampled_from(NAMES),
    st.sampled_from([None, True, False, 0.5, 3.0, -1.5, 1e308, [], {}, [[]], [None], {"": None}, [3, 4], [1, 1], ["x"], {"a": {"b": []}}]),
    st.integers(0, len(LITERALS) - 1).map(lambda n: f"{_RAW}{n}"),
    st.integers(-3, 300),
    st.text(max_size=8),
).map(copy.deepcopy)  # a later change may go into one of them


def text_of(value: Any) -> bytes:
    """One JSON value, with the literals and doubled keys that json.dumps has no words for."""
    raw = json.dumps(value, separators=(",", ":"))
    for n in range(len(LITERALS)):
        raw = raw.replace(f'"{_RAW}{n}"', LITERALS[n])
    return raw.replace(_TWICE, "").encode()


@st.composite
def spoiled(draw: st.DrawFn, document: Any) -> Any:
    """The value with one to three places changed; mostly near the root, where the keys with a meaning are."""
    made = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        made = _change(draw, made)
    return made


def _children(value: Any) -> list[Any]:
    return list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []


def _change(draw: st.DrawFn, root: Any) -> Any:
    holder, key, at = None, None, root
    while (children := _children(at)) and draw(st.integers(0, 5 if holder is None else 3)):
        holder, key = at, draw(st.sampled_from(children))
        at = holder[key]
    how = draw(st.sampled_from(["replace"] * 4 + ["remove", "add", "rename", "twice", "wrap", "other", "near", "many"]))
    if how == "remove" and holder is not None:
        del holder[key]
        return root
    if how in ("rename", "twice") and isinstance(holder, dict):
        new = f"{key}{_TWICE}" if how == "twice" else draw(st.sampled_from(NAMES) | st.sampled_from([str(key).upper(), f"{key}x"]))
        holder[new] = at if draw(st.booleans()) else draw(leaves)
        if how == "rename":
            del holder[key]
        return root
    if how == "add" and isinstance(at, dict):
        at[draw(st.sampled_from(NAMES) | st.text(max_size=5))] = draw(leaves)
        return root
    if how == "add" and isinstance(at, list):
        at.insert(draw(st.integers(0, len(at))), draw(leaves))
        return root
    if how == "many" and isinstance(at, list) and at:
        at *= draw(st.sampled_from([2, 300]))
        return root
    if how == "wrap":
        new = draw(st.sampled_from([[at], {"a": at}, [at, at], str(at)[:200]]))
    elif how == "other":
        new = copy.deepcopy(_somewhere(draw, root))
    elif how == "near" and isinstance(at, int) and not isinstance(at, bool):
        new = draw(st.sampled_from([at + 1, at - 1, -at, at * 2, float(at) if abs(at) < 1 << 53 else at, str(at), bool(at), [at]]))
    else:
        new = draw(leaves)
    if holder is None:
        return new
    holder[key] = new
    return root


def _somewhere(draw: st.DrawFn, at: Any) -> Any:
    while (children := _children(at)) and draw(st.booleans()):
        at = at[draw(st.sampled_from(children))]
    return at


@st.composite
def scratched(draw: st.DrawFn, raw: bytes) -> bytes:
    """The bytes with one to four stretches changed, removed, repeated or moved."""
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, min(len(raw), 20_000)))
        length = draw(st.integers(0, 40))
        how = draw(st.sampled_from(["put", "insert", "remove", "repeat", "cut", "front"]))
        piece = draw(st.binary(max_size=8) | st.sampled_from([literal.encode() for literal in LITERALS if len(literal) < 6000]))
        if how == "put":
            raw = raw[:at] + piece + raw[at + len(piece) :]
        elif how == "insert":
            raw = raw[:at] + piece + raw[at:]
        elif how == "remove":
            raw = raw[:at] + raw[at + length :]
        elif how == "repeat":
            raw = raw[:at] + raw[at : at + length] * 3 + raw[at:]
        elif how == "cut":
            raw = raw[:at]
        else:
            raw = draw(st.sampled_from([b"\xef\xbb\xbf", b"\xff\xfe", b"\0", b" ", b"version https://git-lfs.github.com/spec/v1\n"])) + raw
    return raw


lengths = st.sampled_from([0, 1, 7, 8, 1 << 20, 100_000_001, (1 << 31) - 1, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]) | st.integers(
    0, 4000
)
