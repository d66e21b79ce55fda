"""Small harm to a good output is found and named: one bit in each class of tensor and of header byte, and harm at random. That no class
of bytes is missing, JSON and manifest included, is tests/test_verify_classes.py.

All of it is sealed again but for the last test of the seal itself: it is what a wrong writer would have made.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from r7convert.errors import FormatError
from r7convert.journal import MANIFEST, VERDICT, read_manifest
from r7convert.store import read_header, read_json, strict_json
from r7convert.verify import verify
from tests import tamper
from tests.outputs import OUTPUTS, Made, failed_parts, lines_of

Json = Any
pytestmark = pytest.mark.usefixtures("no_fsync")


# ---- one bit in each class of tensor --------------------------------------------------------------------------------


def tensor_classes(folder: Path) -> dict[str, str]:
    """One tensor of each class, the last by name: not the one that a lazy check would look at first."""
    names = [name for path in sorted(folder.glob("*.safetensors")) for name in read_header(path).tensors]
    return {tamper.class_of(name): name for name in sorted(names)}


def locate(folder: Path, name: str) -> tuple[Path, int, int]:
    for path in folder.glob("*.safetensors"):
        if (entry := read_header(path).tensors.get(name)) is not None:
            return path, entry.offset, entry.nbytes
    raise KeyError(name)


@pytest.mark.usefixtures("without_numbers")
@pytest.mark.parametrize("name", OUTPUTS)
def test_one_bit_in_each_class_of_tensor_is_found_and_named(make: Callable[[str], Made], tmp_path: Path, name: str) -> None:
    made = make(name)
    classes = tensor_classes(made.output)
    expert = {kind for kind in classes if ".mlp.experts." in kind}
    assert len(expert) >= 10, "gate, up and down with their trellis, vectors and markers"
    assert len(classes) - len(expert) >= 24, "embeddings, head, norms, attention, routers, dense MLPs, shared experts, MTP"
    found = {}
    for kind, tensor in classes.items():
        folder = tamper.copy_output(made.output, tmp_path / "copy")
        path, offset, nbytes = locate(folder, tensor)
        tamper.flip_bit(path, offset + nbytes // 2, bit=len(found) % 8)
        tamper.reseal(folder)
        sealed = made.judge(folder)
        assert "bytes" in failed_parts(sealed), kind
        assert tensor in lines_of(sealed), f"{kind}: {lines_of(sealed)}"
        found[kind] = sealed
        shutil.rmtree(folder)
    assert found.keys() == classes.keys()


# ---- one bit in each class of header byte ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", OUTPUTS)
def test_one_bit_in_each_class_of_header_byte_is_found(make: Callable[[str], Made], tmp_path: Path, name: str) -> None:
    made = make(name)
    kinds = {tamper.class_of(path.name): path.name for path in sorted(made.output.glob("*.safetensors"))}
    assert kinds
    looked = 0
    for shard in kinds.values():
        for label, at in tamper.header_places(made.output / shard).items():
            folder = tamper.copy_output(made.output, tmp_path / "copy")
            tamper.flip_bit(folder / shard, at)
            tamper.reseal(folder)
            verdict = made.judge(folder)
            assert not verdict.ok, f"{shard}: {label}"
            assert shard in lines_of(verdict), f"{shard}: {label}: {lines_of(verdict)}"
            looked += 1
            shutil.rmtree(folder)
    assert looked >= 13 * len(kinds)


# ---- the seal -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OUTPUTS)
def test_one_bit_in_each_file_breaks_the_seal(make: Callable[[str], Made], tmp_path: Path, name: str) -> None:
    made = make(name)
    files = read_manifest(made.output).files
    assert files.keys() >= {path.name for path in made.output.iterdir()} - {MANIFEST, VERDICT, "README.md"}
    assert len(files) >= 9
    for n, file in enumerate(sorted(files)):
        folder = tamper.copy_output(made.output, tmp_path / str(n))
        tamper.flip_bit(folder / file, (folder / file).stat().st_size // 2, bit=n % 8)
        verdict = verify(folder, threads=1)
        assert "seal" in failed_parts(verdict)
        assert f"{file}: SHA-256" in lines_of(verdict)


# ---- harm at random -------------------------------------------------------------------------------------------------

ROUNDS = int(os.environ.get("R7_HARM_ROUNDS", "20"))
ODD_VALUES: tuple[Json, ...] = (None, True, 0, -1, 1.5, 10**30, "", "x", [], {}, [None], {"a": 1}, [[]])


def nodes(value: Json, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(inner for key, item in items for inner in nodes(item, (*path, key)))]


@pytest.mark.parametrize("name", OUTPUTS)
def test_json_of_any_other_shape_is_a_failure_and_no_crash(make: Callable[[str], Made], tmp_path: Path, name: str) -> None:
    made, draw = make(name), random.Random(name)
    for _ in range(ROUNDS):
        folder = tamper.copy_output(made.output, tmp_path / "copy")
        file = folder / draw.choice([name for name in sorted(read_manifest(folder).files) if name.endswith(".json")])
        value = read_json(file)
        *path, last = draw.choice([path for path in nodes(value) if path])
        place = value
        for key in path:
            place = place[key]
        odd = draw.choice([odd for odd in ODD_VALUES if odd != place[last] or type(odd) is not type(place[last])])
        place[last] = odd
        tamper.put(file, json.dumps(value).encode())
        tamper.reseal(folder)
        assert not made.judge(folder).ok, f"{file.name}: {[*path, last]} = {odd!r}"
        shutil.rmtree(folder)


@pytest.mark.parametrize("name", OUTPUTS)
def test_bytes_changed_cut_or_doubled_anywhere_are_found(make: Callable[[str], Made], tmp_path: Path, name: str) -> None:
    made, draw = make(name), random.Random(name)
    for _ in range(ROUNDS):
        folder = tamper.copy_output(made.output, tmp_path / "copy")
        file = folder / draw.choice(sorted(read_manifest(folder).files))
        data = bytearray(file.read_bytes())
        at = draw.randrange(min(len(data), draw.choice((6000, len(data)))))
        match draw.choice(("flip", "flip", "cut", "double")):
            case "flip":
                data[at] ^= 1 << draw.randrange(8)
            case "cut":
                del data[at:]
            case "double":
                data[at:at] = data[at : at + draw.randrange(1, 200)]
        is_harm = not (file.suffix == ".json" and same_json(bytes(data), file.read_bytes()))  # a space more is none
        tamper.put(file, bytes(data))
        tamper.reseal(folder)
        assert made.judge(folder).ok != is_harm, f"{file.name} at {at}"
        shutil.rmtree(folder)


def same_json(one: bytes, other: bytes) -> bool:
    try:
        return bool(strict_json(one, "one") == strict_json(other, "other"))
    except FormatError:
        return False
