"""The stage as a whole: every byte where it belongs, the same bytes every time, and nothing done that was refused."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from r7convert import open_slabs
from r7convert.errors import FormatError, R7Error, ResourceError, UnsupportedError, UsageError
from r7convert.format import MCG_MARKER, PROJECTIONS
from r7convert.journal import locked, read_manifest
from r7convert.moves import LayerPlan, Move
from r7convert.progress import Progress
from r7convert.repack import repack
from r7convert.source_files import Bytes
from r7convert.store import read_header
from tests.folders import CARRIER, INDEX, R7, contents, edited_json, edited_shard, load, raw_shard, read_raw, sample, tree

UNIFORM = {"mode": "uniform", "tail_tp": 2, "equal_tail_vectors": True}
GATE = "model.layers.3.mlp.experts.1.gate_proj"


def refused(error: type[R7Error], source: Path, output: Path, *words: str, **choices: Any) -> str:
    with pytest.raises(error) as caught:
        repack(source, output, **choices)
    for word in words:
        assert word in str(caught.value), str(caught.value)
    return str(caught.value)


# ---- bytes ----------------------------------------------------------------------------------------------------------

SAMPLES: dict[str, dict[str, Any]] = {
    "mixed": {},
    "uniform": {"mode": "uniform"},
    "uniform-equal-tail": UNIFORM,
    "odd": {"mode": "odd", "tail_tp": 4},
    "one-k": {"mode": "one-k"},
    "nested": {"mode": "uniform", "nested": True},
    "per-expert": {"mode": "uniform", "per_expert_vectors": True},
    "mtp-r7": {"mode": "uniform", "mtp": "r7"},
    "mtp-none": {"mode": "uniform", "mtp": "none"},
    "k34-split": {"mode": "uniform", "k_values": (3, 4), "split": True, "hf_quant_config": True, "storage_for_experts": True},
    "k35": {"mode": "uniform", "k_values": (3, 5), "tail_tp": 4},
}
RUNS = [
    *(("rank-sliced", tp, name) for tp in (1, 2, 4) for name in ("uniform", "uniform-equal-tail")),
    *(("rank-sliced", 2, name) for name in ("odd", "one-k", "nested", "per-expert", "mtp-r7", "mtp-none", "k34-split", "k35")),
    *(("slabs", tp, "mixed") for tp in (1, 2, 4)),
    *(("slabs", 4, name) for name in ("uniform-equal-tail", "odd", "nested", "per-expert", "mtp-r7", "mtp-none", "k34-split")),
    *(("r7", None, name) for name in ("mixed", "nested", "per-expert", "mtp-r7", "mtp-none", "k34-split")),
    *(("r7", 4, name) for name in ("mixed", "uniform-equal-tail")),
    *(("exl3", None, name) for name in ("mixed", "nested", "per-expert", "odd", "mtp-r7", "k34-split")),
]


@pytest.mark.parametrize(("target", "tp", "name"), RUNS, ids=[f"{t}-{tp}-{n}" for t, tp, n in RUNS])
def test_every_joined_tensor_is_the_sources(tmp_path: Path, target: str, tp: int | None, name: str) -> None:
    source, output = sample(tmp_path / "s", **SAMPLES[name]), tmp_path / "o"
    before = tree(source)
    made = repack(source, output, target=target, tp=tp)
    assert tree(source) == before
    expected = contents(source)
    assert len(expected) > 150
    assert contents(output) == expected
    _check_seal(output, made.files)
    _check_headers(output, target, tp)


def _check_seal(output: Path, files: Any) -> None:
    manifest = read_manifest(output)
    found = tree(output)
    del found["MANIFEST.json"], found["README.md"]  # the seal and the card stand outside it
    assert {name: record.sha256 for name, record in manifest.files.items()} == found
    assert dict(files) == manifest.files
    counts = manifest.facts["accounting"]
    assert sum(kind["bytes"] for kind in counts.values()) > 0


def _check_headers(output: Path, target: str, tp: int | None) -> None:
    for path in output.glob("*.safetensors"):
        header = read_header(path)
        assert header.metadata["format"] == "pt"
        assert header.data_start % 8 == 0
        if path.name.startswith("experts-"):
            assert header.data_start % 4096 == 0
            rank = path.stem.split("-")[4] if tp is not None else None
            assert (header.metadata.get("tp"), header.metadata.get("rank")) == (None if tp is None else str(tp), rank)
    assert not (output / "hf_quant_config.json").exists()
    assert (output / "LICENSE").exists()
    assert (output / "chat_template.jinja").exists()
    assert (output / "slabs.json").exists() == (target in ("rank-sliced", "slabs"))


def test_288_experts(tmp_path: Path) -> None:
    source = sample(tmp_path / "s", experts=288, hidden=128, intermediate=128, layers=4)
    repack(source, tmp_path / "o", target="slabs", tp=1)
    assert contents(tmp_path / "o") == contents(source)


def test_an_output_is_a_source_again(tmp_path: Path) -> None:
    source = sample(tmp_path / "s", **UNIFORM)
    repack(source, tmp_path / "four", target="rank-sliced", tp=4)
    repack(source, tmp_path / "two", target="rank-sliced", tp=2)
    repack(tmp_path / "four", tmp_path / "again", target="rank-sliced", tp=2)
    assert contents(tmp_path / "again") == contents(source)
    for path in (tmp_path / "two").glob("experts-*.safetensors"):
        assert load(path).keys() == load(tmp_path / "again" / path.name).keys()
        assert read_raw(path)[1] == read_raw(tmp_path / "again" / path.name)[1]
    repack(tmp_path / "four", tmp_path / "whole", target="exl3")
    assert contents(tmp_path / "whole") == contents(source)


@pytest.mark.parametrize("choices", [{}, UNIFORM], ids=["mixed", "uniform"])
def test_opened_slabs_are_the_tensors_of_the_files(tmp_path: Path, choices: dict[str, Any]) -> None:
    source, output, compared = sample(tmp_path / "s", **choices), tmp_path / "o", 0
    plan = repack(source, output, target="slabs", tp=2).plan
    for layer in plan.layers:
        for rank, file in enumerate(layer.files):
            slabs, tensors = open_slabs(output, layer.layer, rank), load(output / file)
            base = f"model.layers.{layer.layer}.mlp.experts"
            for t, k in enumerate(slabs.tiers):
                ids = [[e for e, row in enumerate(layer.bits) if row[p] == k] for p in range(3)]
                planes = [(e, "gate_proj") for e in ids[0]] + [(e, "up_proj") for e in ids[1]]
                assert slabs.gate_n[t] == len(ids[0])
                for at, (e, proj) in enumerate(planes):
                    assert torch.equal(slabs.w13[t][at], tensors[f"{base}.{e}.{proj}.rank{rank}.trellis"])
                for at, e in enumerate(ids[2]):
                    assert torch.equal(slabs.w2[t][at], tensors[f"{base}.{e}.down_proj.rank{rank}.trellis"])
                compared += len(planes) + len(ids[2])
            for e in range(4):
                fields = [(p, "suh" if p == "down_proj" else "svh") for p in PROJECTIONS]
                row = torch.cat([tensors[f"{base}.{e}.{p}.rank{rank}.{f}"] for p, f in fields])
                assert torch.equal(slabs.rotations[e], row)
            shared = "suh" if slabs.gate_suh.shape[0] == 1 else None
            name = f"{base}.shared_h.gate_proj.rank{rank}.suh" if shared else f"{base}.3.gate_proj.rank{rank}.suh"
            assert torch.equal(slabs.gate_suh[-1], tensors[name])
    assert compared == 3 * 2 * 12


# ---- the same every time --------------------------------------------------------------------------------------------


def test_two_processes_any_threads_one_folder(tmp_path: Path) -> None:
    source = sample(tmp_path / "s", **UNIFORM, split=True)
    code = "import sys; from pathlib import Path; from r7convert.repack import repack; a = sys.argv; "
    code += "repack(Path(a[1]), Path(a[2]), target='rank-sliced', tp=4, threads=int(a[3]))"
    for name, threads, seed in (("a", "1", "1"), ("b", "5", "2")):
        command = [sys.executable, "-c", code, str(source), str(tmp_path / name), threads]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONHASHSEED": seed, "TZ": f"UTC{seed}"})
    assert tree(tmp_path / "a") == tree(tmp_path / "b")
    assert len(tree(tmp_path / "a")) > 20


def test_nothing_of_the_machine_is_in_the_output(tmp_path: Path) -> None:
    source = sample(tmp_path / "s", **UNIFORM)
    repack(source, tmp_path / "o", target="rank-sliced", tp=2)
    for path in (tmp_path / "o").iterdir():
        raw = path.read_bytes() if path.suffix != ".safetensors" else json.dumps(read_raw(path)[0]).encode()
        for word in (str(tmp_path), str(Path.home()) + "/", socket.gethostname(), os.environ.get("USER", "\0") + "@"):
            assert word.encode() not in raw, path.name


def test_a_finished_folder_is_left_alone(tmp_path: Path) -> None:
    source, output = sample(tmp_path / "s", **UNIFORM), tmp_path / "o"
    first = repack(source, output, target="rank-sliced", tp=2)
    times = {path: path.stat().st_mtime_ns for path in output.iterdir()}
    again = repack(source, output, target="rank-sliced", tp=2)
    assert {path: path.stat().st_mtime_ns for path in output.iterdir()} == times
    assert again.files == first.files
    assert again.resumed == len(first.files)


# ---- header metadata ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metadata", [{}, {"__metadata__": {}}, {"__metadata__": None}, {"__metadata__": {"custom": "x", "rank": "9"}}])
@pytest.mark.parametrize("target", ["r7", "slabs"])
def test_header_metadata(tmp_path: Path, target: str, metadata: dict[str, Any]) -> None:
    source, output = sample(tmp_path / "s"), tmp_path / "o"
    for name in (CARRIER, R7):
        header, data = read_raw(source / name)
        raw_shard(source / name, metadata | {key: value for key, value in header.items() if key != "__metadata__"}, data)
    repack(source, output, target=target, tp=2 if target == "slabs" else None)
    assert contents(output) == contents(source)
    for path in output.glob("*.safetensors"):
        found = read_header(path).metadata
        assert found["format"] == "pt"
        if metadata.get("__metadata__") and ("layer-003" in path.name or path.name == CARRIER):
            assert found["custom"] == "x"
            assert found["rank"] == (path.stem.split("-")[4] if path.name.startswith("experts-") else "9")


def test_transformers_loads_every_file(tmp_path: Path) -> None:
    loader = pytest.importorskip("transformers.modeling_utils", reason="transformers is not importable", exc_type=ImportError)
    out = tmp_path / "out"
    repack(sample(tmp_path / "source", mode="uniform"), out, target="rank-sliced", tp=2)
    files = sorted(out.glob("*.safetensors"))
    assert len(files) == 7
    for path in files:  # transformers refuses a file whose metadata has no format it knows
        loaded, expected = loader.load_state_dict(path), load(path)
        assert loaded.keys() == expected.keys()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


def test_data_off_its_boundary_gets_a_new_header(tmp_path: Path) -> None:
    source = sample(tmp_path / "s")
    header, data = read_raw(source / CARRIER)
    raw = json.dumps(header).encode()
    raw_shard(source / CARRIER, raw + b" " * (-len(raw) % 8 + 3), data)
    repack(source, tmp_path / "o", target="r7")
    assert read_header(tmp_path / "o" / CARRIER).data_start % 4096 == 0
    assert contents(tmp_path / "o") == contents(source)


# ---- numbers --------------------------------------------------------------------------------------------------------

VECTORS = [
    (R7, f"{GATE}.svh"),
    (R7, "model.layers.3.mlp.experts.r7_shared.gate_up_suh"),
    (CARRIER, "model.layers.3.self_attn.o_proj.suh"),
    (CARRIER, "model.layers.5.mlp.experts.2.down_proj.rank0.suh"),
]


@pytest.mark.parametrize(("file", "name"), VECTORS)
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_what_is_not_finite_stops_or_marks(tmp_path: Path, file: str, name: str, value: float) -> None:
    source, output = sample(tmp_path / "s"), tmp_path / "o"
    with edited_shard(source / file) as tensors:
        tensors[name][[5, 9, 11]] = value
    refused(FormatError, source, output, name, "index 5", "3 in all", str(value), "--allow-nonfinite", target="slabs", tp=2)
    assert not [path for path in output.iterdir() if path.name in ("config.json", "MANIFEST.json", INDEX)]
    made = repack(source, output, target="slabs", tp=2, allow_nonfinite=True, restart=True)
    assert made.findings.nonfinite == {name: {"first": 5, "count": 3, "value": str(value)}}
    facts = read_manifest(output).facts
    assert facts["nonfinite"] == made.findings.nonfinite
    assert facts["allow_nonfinite"] is True
    assert contents(output) == contents(source)


def test_zeros_are_reported(tmp_path: Path) -> None:
    source = sample(tmp_path / "s")
    for file, name in VECTORS:
        with edited_shard(source / file) as tensors:
            tensors[name][[7, 8]] = 0
    made = repack(source, tmp_path / "o", target="slabs", tp=2)
    assert made.findings.zeros == {name: {"first": 7, "count": 2} for _, name in VECTORS}
    assert read_manifest(tmp_path / "o").facts["zeros"] == made.findings.zeros


@pytest.mark.parametrize("name", [f"{GATE}.mcg", "model.layers.3.self_attn.o_proj.mcg", "model.layers.5.mlp.experts.2.up_proj.rank0.mcg"])
def test_marker_of_another_codebook(tmp_path: Path, name: str) -> None:
    source = sample(tmp_path / "s")
    with edited_shard(source / (R7 if name == f"{GATE}.mcg" else CARRIER)) as tensors:
        tensors[name] = torch.tensor(0x83DCD12D - (1 << 32), dtype=torch.int32)
    refused(FormatError, source, tmp_path / "o", name, str(MCG_MARKER), target="slabs", tp=2)


def test_rank_copies_that_differ(tmp_path: Path) -> None:
    source = sample(tmp_path / "s", **UNIFORM)
    name = "model.layers.5.mlp.experts.2.up_proj.rank1.suh"
    with edited_shard(source / CARRIER) as tensors:
        tensors[name][0] += 1
    refused(FormatError, source, tmp_path / "o", name, "copies on every rank", target="rank-sliced", tp=4)


# ---- folders --------------------------------------------------------------------------------------------------------


def test_overlapping_folders_are_refused_untouched(tmp_path: Path) -> None:
    source = sample(tmp_path / "a" / "s")
    (tmp_path / "link").symlink_to(source)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    for output in (source, source / "out", source.parent, tmp_path / "link"):
        refused(UsageError, source, output, "may not contain each other", target="r7")
        refused(UsageError, tmp_path / "link", output, "may not contain each other", target="r7", restart=True)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_refusals_and_dry_runs_leave_nothing(tmp_path: Path) -> None:
    source = sample(tmp_path / "s")
    refused(UnsupportedError, source, tmp_path / "o", "mix K", target="rank-sliced", tp=2)
    refused(UnsupportedError, source, tmp_path / "o", "[1, 2, 4]", target="slabs", tp=8)
    refused(UsageError, source, tmp_path / "o", "--mixed-k", target="rank-sliced", tp=2, mixed_k="guess")
    dry = repack(source, tmp_path / "o", target="slabs", tp=2, dry_run=True)
    assert dry.files == {}
    assert dry.to_json()["payload_bytes"] > 0
    assert repack(source, tmp_path / "o", target="rank-sliced", tp=2, mixed_k="lift", dry_run=True).plan.reencoded > 0
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_an_output_that_holds_something_else(tmp_path: Path) -> None:
    source, output = sample(tmp_path / "s", **UNIFORM), tmp_path / "o"
    output.mkdir()
    (output / "thesis.txt").write_text("precious")
    for restart in (False, True):
        refused(UsageError, source, output, "1 files of something else", target="r7", restart=restart)
    assert [path.name for path in output.iterdir()] == ["thesis.txt"]
    refused(UsageError, source, output / "thesis.txt", "a file", target="r7")


def test_another_conversion_is_replaced_only_by_restart(tmp_path: Path) -> None:
    source, output = sample(tmp_path / "s", **UNIFORM), tmp_path / "o"
    repack(source, output, target="rank-sliced", tp=4)
    before = tree(output)
    refused(UsageError, source, output, "another conversion", "--restart", target="rank-sliced", tp=2)
    assert tree(output) == before
    repack(source, output, target="rank-sliced", tp=2, restart=True)
    repack(source, tmp_path / "fresh", target="rank-sliced", tp=2)
    assert tree(output) == tree(tmp_path / "fresh")


def test_an_unfinished_run_is_finished_only_by_its_own_command(tmp_path: Path) -> None:
    source, output = sample(tmp_path / "s"), tmp_path / "o"
    with edited_shard(source / R7) as tensors:
        tensors[f"{GATE}.svh"][0] = float("nan")
    refused(FormatError, source, output, GATE, target="slabs", tp=2)
    refused(UsageError, source, output, "unfinished run with another tp", target="slabs", tp=4)
    refused(UsageError, source, output, "unfinished run with another target: expected slabs, got exl3", target="exl3")
    with edited_shard(source / R7) as tensors:
        tensors[f"{GATE}.svh"][0] = 1.0
    refused(UsageError, source, output, "unfinished run with another files", target="slabs", tp=2)
    repack(source, output, target="slabs", tp=2, restart=True)
    repack(source, tmp_path / "fresh", target="slabs", tp=2)
    assert tree(output) == tree(tmp_path / "fresh")


def test_a_folder_in_use(tmp_path: Path) -> None:
    source = sample(tmp_path / "s")
    with locked(tmp_path / "o"):
        refused(ResourceError, source, tmp_path / "o", "in use", target="r7")


def test_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = sample(tmp_path / "s")
    monkeypatch.setattr("r7convert.store.shutil.disk_usage", lambda _: type("usage", (), {"free": 1000})())
    refused(ResourceError, source, tmp_path / "o", "free space", target="slabs", tp=2)
    assert not (tmp_path / "o").exists()


def test_a_disk_that_fills_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, output = sample(tmp_path / "s"), tmp_path / "o"
    really, left = os.fsync, [9]

    def fsync(fd: int) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise OSError(28, "No space left on device")
        really(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        refused(ResourceError, source, output, "No space left on device", target="slabs", tp=2, threads=1)
    assert not (output / "MANIFEST.json").exists()
    assert not list(output.glob("*.partial"))
    repack(source, output, target="slabs", tp=2)
    repack(source, tmp_path / "fresh", target="slabs", tp=2)
    assert tree(output) == tree(tmp_path / "fresh")


class Meddler(Progress):
    """Changes the source once something of it has been read."""

    def __init__(self, change: Callable[[], None]) -> None:
        self.change = change
        self.done = False

    def advance(self, nbytes: int, note: str = "") -> None:
        if not self.done and note == "layer 3":
            self.done = True
            self.change()


@pytest.mark.parametrize("change", ["longer", "newer"])
def test_a_source_that_changes_while_it_is_read(tmp_path: Path, change: str) -> None:
    source, output = sample(tmp_path / "s"), tmp_path / "o"
    path = source / R7

    def meddle() -> None:
        if change == "longer":
            with path.open("ab") as file:
                file.write(b"x")
        else:
            os.utime(path, ns=(1, 1))

    with pytest.raises(FormatError, match=f"{R7}: source file changed"):
        repack(source, output, target="slabs", tp=2, threads=1, progress=Meddler(meddle))
    assert not list(output.glob("experts-layer-003*"))


def test_a_source_that_changes_after_its_header_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = sample(tmp_path / "s")
    from r7convert import repack as stage

    planned = stage.plan_repack

    def meddle(*args: Any, **kwargs: Any) -> Any:
        os.utime(source / R7, ns=(1, 1))
        return planned(*args, **kwargs)

    monkeypatch.setattr(stage, "plan_repack", meddle)
    refused(FormatError, source, tmp_path / "o", R7, "changed since its header was read", target="slabs", tp=2)


# ---- links ----------------------------------------------------------------------------------------------------------


def test_hard_links(tmp_path: Path) -> None:
    source, output = sample(tmp_path / "s"), tmp_path / "o"
    repack(source, output, target="r7", link=True)
    repack(source, tmp_path / "copied", target="r7")
    assert tree(output) == tree(tmp_path / "copied")
    for name in (R7, CARRIER):
        assert (output / name).stat().st_ino == (source / name).stat().st_ino
        assert (tmp_path / "copied" / name).stat().st_ino != (source / name).stat().st_ino
    before = tree(source)
    repack(source, output, target="slabs", tp=2, restart=True)  # over the links: the source must not feel it
    assert tree(source) == before


def test_links_to_another_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = sample(tmp_path / "s")

    def link(*_: Any) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", link)
    refused(ResourceError, source, tmp_path / "o", "another file system", "Leave out --link", target="r7", link=True)


def test_reflinks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a file system that shares blocks a carried shard is cloned; here the kernel's part is played by a copy."""
    source, cloned = sample(tmp_path / "s"), []

    def ioctl(new: int, request: int, old: int) -> int:
        assert request == 0x40049409
        cloned.append(os.fstat(old).st_size)
        os.write(new, os.pread(old, cloned[-1], 0))
        return 0

    repack(source, tmp_path / "copied", target="r7")
    monkeypatch.setattr("r7convert.copying.fcntl.ioctl", ioctl)
    repack(source, tmp_path / "o", target="r7")
    assert tree(tmp_path / "o") == tree(tmp_path / "copied")
    assert sorted(cloned) == sorted(path.stat().st_size for path in source.glob("*.safetensors"))


# ---- some layers only -----------------------------------------------------------------------------------------------


def test_some_layers_never_pass_as_whole(tmp_path: Path) -> None:
    source, output = sample(tmp_path / "s"), tmp_path / "o"
    repack(source, output, target="slabs", tp=2, layers=(4, 4))
    layer_files = {f"experts-layer-004-rank-{rank}-of-2.safetensors" for rank in range(2)}
    assert {path.name for path in output.iterdir()} == {*layer_files, INDEX, "slabs.json", "MANIFEST.json"}
    manifest = read_manifest(output)
    assert manifest.facts["partial"] == {"layers": [4, 4]}
    assert manifest.facts["accounting"]["outside"]["tensors"] > 100
    some = contents(output)
    assert len(some) == 4 * 3 * 4
    assert some.items() <= contents(source).items()
    assert open_slabs(output, 4, 1).tiers == (3, 4)
    refused(UsageError, source, output, "another conversion", target="slabs", tp=2)


# ---- the seam for re-encoding ---------------------------------------------------------------------------------------


class Pattern:
    """A recoder whose every trellis is one repeated byte: its new K."""

    engine, devices, reference = "pattern", 1, None

    def __init__(self) -> None:
        self.moves: list[Move] = []

    def recode(self, layer: LayerPlan, moves: Sequence[Move], read: Callable[[Move], Bytes]) -> Iterator[Bytes]:
        for move in moves:
            old = read(move)
            assert old.nbytes == move.sources[0].nbytes
            assert move.new_bits is not None
            self.moves.append(move)
            k = move.sources[0].shape[2] // 16
            yield np.full(old.nbytes // k * move.new_bits, move.new_bits, np.uint8)

    def facts(self, layer: int) -> Any:
        return {f"layer {layer}": {"from": 3, "to": 4, "relative_error": 0.25 * (layer - 2)}}


def test_reencoded_matrices_come_from_the_recoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, output, recoder = sample(tmp_path / "s"), tmp_path / "o", Pattern()
    monkeypatch.setattr("r7convert.repack._recoder", lambda *_: recoder)
    made = repack(source, output, target="rank-sliced", tp=2, mixed_k="lift")
    before, after = contents(source), contents(output)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {move.sources[0].name for move in recoder.moves}
    assert len(changed) == made.plan.reencoded > 5
    accounting = read_manifest(output).facts["accounting"]
    assert accounting["lifted"]["tensors"] == len(changed)
    facts = read_manifest(output).facts
    assert facts["reencoded"] == {f"layer {n}": {"from": 3, "to": 4, "relative_error": 0.25 * (n - 2)} for n in (3, 4)}
    assert facts["errors"] == {"mean_of_lifted": 0.375, "worst_of_lifted": 0.5}
    assert (facts["policy"]["name"], facts["policy"]["reference"]) == ("lift", None)
    bits = [set(row) for layer in made.plan.layers for row in layer.bits]
    assert all(len(ks) == 1 for ks in bits)
    name = next(iter(changed)).removesuffix(".trellis")
    layer = int(name.split(".")[2])
    piece = load(output / f"experts-layer-{layer:03d}-rank-1-of-2.safetensors")[f"{name}.rank1.trellis"]
    assert set(piece.view(torch.uint8).unique().tolist()) == {piece.shape[2] // 16}


def test_junk_is_left_out(tmp_path: Path) -> None:
    source = sample(tmp_path / "s")
    (source / ".cache").mkdir()
    (source / ".cache" / "x").write_text("x")
    (source / "old.safetensors").write_bytes((source / R7).read_bytes())
    made = repack(source, tmp_path / "o", target="r7")
    assert made.plan.left_out == (".cache", "old.safetensors")
    assert not (tmp_path / "o" / "old.safetensors").exists()


def test_custom_index_metadata_is_kept_and_the_total_is_true(tmp_path: Path) -> None:
    source = sample(tmp_path / "s")
    with edited_json(source / INDEX) as index:
        index["metadata"] = {"total_size": 7, "total_parameters": 9}
    made = repack(source, tmp_path / "o", target="slabs", tp=2)
    index = json.loads((tmp_path / "o" / INDEX).read_text())
    payload = sum(len(read_raw(path)[1]) for path in (tmp_path / "o").glob("*.safetensors"))
    assert index["metadata"] == {"total_size": payload, "total_parameters": 9}
    assert made.plan.payload_bytes == payload
