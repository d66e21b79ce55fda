"""verify's figures of matrices encoded anew: true ones pass, and one bit or one digit off is named."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from r7convert.encode_shared import encode_shared
from r7convert.findings import Part
from r7convert.journal import Manifest, read_manifest, write_manifest
from r7convert.repack import repack
from r7convert.store import hash_file, read_header
from r7convert.verify import verify
from tests.folders import sample

SMALL = {"hidden": 128, "intermediate": 256, "mtp": "none", "experts": 2, "layers": 4, "split": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A sample, and its lift with encoded shared experts: everything that can be encoded anew has been."""
    root = tmp_path_factory.mktemp("errors")
    source = sample(root / "s", **SMALL)
    repack(source, root / "o", target="rank-sliced", tp=2, mixed_k="lift", device="cpu")
    encode_shared(root / "o", device="cpu")
    return source, root / "o"


def numbers(source: Path, output: Path) -> tuple[bool, Part]:
    verdict = verify(output, source=source, tp=2)
    return verdict.ok, next(part for part in verdict.parts if part.name == "numbers")


def test_true_figures_pass(folders: tuple[Path, Path]) -> None:
    source, output = folders
    ok, part = numbers(source, output)
    assert ok, verify(output, source=source).failure_lines()
    assert part.state == "passed"
    facts = read_manifest(output).facts
    looked = {name: check.looked_at for name, check in part.checks.items()}
    assert looked["encoded matrices: error against the weight"] >= 3 * len(facts["encoded"]) == 9
    assert looked["lifted and lowered matrices: error against what they came from"] >= 3 * len(facts["reencoded"]) > 6
    assert any("worst model.layers.3.mlp" in line for line in part.scope)


def resealed(folders: tuple[Path, Path], place: Path, **facts: Any) -> tuple[Path, Path]:
    """A copy of both whose manifest states other facts."""
    source, output = folders
    shutil.copytree(output, place)
    manifest = read_manifest(place)
    files = {name: hash_file(place / name) for name in manifest.files}
    write_manifest(place, Manifest(manifest.tool, files, {**manifest.facts, **facts}))
    return source, place


@pytest.mark.parametrize("kind", ["reencoded", "encoded"])
def test_one_bit_of_a_new_trellis_is_named(folders: tuple[Path, Path], tmp_path: Path, kind: str) -> None:
    source, output = folders
    module = next(iter(read_manifest(output).facts[kind]))
    shutil.copytree(output, tmp_path / "o")
    for path in sorted((tmp_path / "o").glob("*.safetensors")):
        entries = [e for name, e in read_header(path).tensors.items() if name.startswith(f"{module}.") and name.endswith(".trellis")]
        if entries:
            data = bytearray(path.read_bytes())
            for at in range(0, entries[0].nbytes, 4):
                data[entries[0].offset + at] ^= 0x10  # in every tile, so that the error moves by more than float32's noise
            path.write_bytes(data)
            break
    manifest = read_manifest(tmp_path / "o")
    files = {name: hash_file(tmp_path / "o" / name) for name in manifest.files}
    write_manifest(tmp_path / "o", Manifest(manifest.tool, files, manifest.facts))
    ok, part = numbers(source, tmp_path / "o")
    assert not ok
    shown = [line for check in part.checks.values() for line in check.shown]
    assert any(line.startswith(f"{module}: relative squared error") for line in shown)


def test_a_figure_that_is_not_true_or_not_there_is_named(folders: tuple[Path, Path], tmp_path: Path) -> None:
    facts = read_manifest(folders[1]).facts
    first, second = list(facts["reencoded"])[:2]
    stated = {name: dict(said) for name, said in facts["reencoded"].items() if name != second}
    stated[first]["relative_error"] *= 1.01
    ok, part = numbers(*resealed(folders, tmp_path / "o", reencoded=stated))
    assert not ok
    shown = "\n".join(line for check in part.checks.values() for line in check.shown)
    assert f"{first}: relative squared error: expected {stated[first]['relative_error']}, as the manifest says" in shown
    assert f"{second}: K: expected" in shown
    assert "MANIFEST.json: reencoded: modules" in shown


def test_an_encode_of_something_else_is_absurd(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Two modules that changed places, each with the figure that is true of it: the error is far from what its K costs."""
    source, output = folders
    module = next(iter(read_manifest(output).facts["encoded"]))
    shutil.copytree(output, tmp_path / "o")
    path = next(p for p in (tmp_path / "o").glob("shared-experts-*.safetensors"))
    entry = read_header(path).tensors[f"{module}.trellis"]
    data = bytearray(path.read_bytes())
    half = entry.nbytes // 2
    trellis = data[entry.offset : entry.offset + entry.nbytes]
    data[entry.offset : entry.offset + entry.nbytes] = trellis[half:] + trellis[:half]
    path.write_bytes(data)
    _, part = numbers(*resealed((source, tmp_path / "o"), tmp_path / "o2"))
    shown = "\n".join(line for check in part.checks.values() for line in check.shown)
    assert f"{module}: relative squared error for this K: expected at most 0.00128, got" in shown


def test_nothing_encoded_leaves_the_part_to_the_kernel(tmp_path: Path) -> None:
    source = sample(tmp_path / "s", **{**SMALL, "mode": "uniform"})
    for target, tp in (("rank-sliced", 2), ("exl3", None)):
        repack(source, tmp_path / target, target=target, tp=tp)
        verdict = verify(tmp_path / target, source=source, tp=tp)
        part = verdict.parts[-1]
        assert verdict.ok
        assert not any("matrices" in name for name in part.checks)
        assert part.why_skipped == ("" if tp else "target exl3 has no slabs: bytes covers it whole")
