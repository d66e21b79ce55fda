"""Sample checkpoints for tests, ways to spoil them, and what a folder holds as safetensors and torch alone read it.

The last is the oracle of every byte comparison: it knows names and torch.cat, and nothing of r7convert's plans.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from r7convert.sample import write_sample

INDEX = "model.safetensors.index.json"
R7 = "r7-experts-layer-003.safetensors"
CARRIER = "model-carrier.safetensors"
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@cache
def _pristine(choices: tuple[tuple[str, Any], ...]) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="r7convert-samples-")) / "sample"
    atexit.register(shutil.rmtree, folder.parent, ignore_errors=True)
    write_sample(folder, **dict(choices))
    return folder


def sample(folder: Path, **choices: Any) -> Path:
    """A fresh copy of a sample checkpoint; each kind is made once a session."""
    shutil.copytree(_pristine(tuple(sorted(choices.items()))), folder)
    return folder


# ---- spoiling -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def edited_json(path: Path) -> Iterator[Any]:
    value = json.loads(path.read_text())
    yield value
    path.write_text(json.dumps(value))


@contextlib.contextmanager
def edited_shard(path: Path, *, index: bool = True) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors of a shard to change in place; the index follows unless told not to."""
    tensors = load(path)
    before = set(tensors)
    yield tensors
    save_file(tensors, path, metadata={"format": "pt"})
    if index:
        with edited_json(path.parent / INDEX) as value:
            for name in before - set(tensors):
                del value["weight_map"][name]
            value["weight_map"] |= dict.fromkeys(tensors, path.name)


def load(path: Path) -> dict[str, torch.Tensor]:
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def raw_shard(path: Path, header: Any, data: bytes) -> None:
    """A safetensors file with any header at all."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)


def read_raw(path: Path) -> tuple[dict[str, Any], bytes]:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


# ---- the oracle -----------------------------------------------------------------------------------------------------

_EXPERT = re.compile(r"(.+\.experts\.)(\d+)\.(\w+_proj|w[123])\.(?:rank(\d+)\.)?(trellis|suh|svh|mcg|mul1)")
_SHARED = re.compile(r"(.+\.layers\.\d+\.mlp\.experts\.)(?:r7_shared\.(gate_up|down)_|shared_h\.(\w+_proj)\.rank(\d+)\.)(suh|svh)")


def digest(tensor: torch.Tensor) -> str:
    flat = tensor.contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()


def contents(folder: Path) -> dict[str, str]:
    """SHA-256 of every tensor by name, routed experts made whole: ranks joined, and each expert with the hidden-side vectors it
    uses. Equal contents are equal checkpoints, in whatever form.
    """
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(set(weight_map.values())):
        for name, tensor in load(folder / file).items():
            assert weight_map[name] == file, f"{name} is in {file}, the index says {weight_map[name]}"
            assert name not in tensors
            tensors[name] = tensor
    assert set(tensors) == set(weight_map)

    made: dict[str, str] = {}
    parts: dict[tuple[str, int, str, str], dict[int, torch.Tensor]] = {}
    shared: dict[tuple[str, str], dict[int, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if m := _EXPERT.fullmatch(name):
            parts.setdefault((m[1], int(m[2]), m[3], m[5]), {})[int(m[4] or 0)] = tensor
        elif m := _SHARED.fullmatch(name):
            for proj in (m[3],) if m[3] else ("gate_proj", "up_proj") if m[2] == "gate_up" else ("down_proj",):
                shared.setdefault((m[1], proj), {})[int(m[4] or 0)] = tensor
        else:
            made[name] = digest(tensor)
    for (base, proj), ranks in shared.items():
        for expert in {key[1] for key in parts if key[0] == base}:
            field = "svh" if proj == "down_proj" else "suh"
            assert (base, expert, proj, field) not in parts
            parts[base, expert, proj, field] = ranks
    for (base, expert, proj, field), ranks in parts.items():
        pieces = [ranks[rank] for rank in range(len(ranks))]
        is_down = proj in ("down_proj", "w2")
        if field in ("mcg", "mul1") or field == ("svh" if is_down else "suh"):
            assert len({digest(piece) for piece in pieces}) == 1, (base, expert, proj, field)
            whole = pieces[0]
        else:
            whole = torch.cat(pieces, dim=1 if field == "trellis" and not is_down else 0)
        made[f"{base}{expert}.{proj}.{field}"] = digest(whole)
    return made


def tree(folder: Path) -> dict[str, str]:
    """SHA-256 of every file, by its path in the folder."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
