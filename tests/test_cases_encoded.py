"""Every row of CASES.md once more, with encoding on top: `lift`, `fit`, and shared experts encoded. The rows' names are the tests'.

The files of a lossless conversion meet these cases in the tests of their own modules; here each passes through the recoder and
through encode-shared. What only a refusal can show is shown with encoders that cost nothing: nothing is ever encoded there.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from r7convert import cpu
from r7convert.checkpoint import read_checkpoint
from r7convert.encode_shared import encode_shared
from r7convert.errors import R7Error
from r7convert.journal import MANIFEST, read_manifest
from r7convert.ktable import parse_budget
from r7convert.repack import repack
from r7convert.store import read_header, read_json
from r7convert.verify import verify
from tests import tamper
from tests.faults import Fault
from tests.folders import INDEX, edited_json, edited_shard, raw_shard, read_raw, sample, tree
from tests.hub_server import HubServer
from tests.outputs import lines_of
from tests.soak import Soak, remember
from tests.soak_stages import STAGES

SIZE: dict[str, Any] = {"hidden": 128, "intermediate": 256, "experts": 4, "layers": 4, "dense": 2}
R7 = "r7-experts-layer-002.safetensors"
BASE = "model.layers.2.mlp.experts"
POLICIES: dict[str, dict[str, Any]] = {"lift": {"mixed_k": "lift"}, "fit": {"mixed_k": "fit", "budget": parse_budget("+12%")}}
STOCK: dict[str, Any] = {"target": "rank-sliced", "tp": 2, "device": "cpu"}
Spoil = Callable[[Path], object]

pytestmark = pytest.mark.usefixtures("no_fsync")


@pytest.fixture(scope="module", autouse=True)
def remembered() -> Iterator[None]:
    """The search's answers are kept over the tests: most of them encode the same few matrices."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "search_tiles", remember(cpu.search_tiles))
        yield


def convert(source: Path, output: Path, policy: str, **choices: Any) -> Any:
    """One K an expert, then the shared experts: what a publisher does."""
    made = repack(source, output, **{**STOCK, **POLICIES[policy], **choices})
    encode_shared(output, device="cpu")
    return made


@pytest.fixture(scope="module", params=POLICIES)
def converted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Path, Any]:
    """(policy, source, output, what repack said); harm copies."""
    root = tmp_path_factory.mktemp("encoded")
    source = sample(root / "s", **SIZE, hf_quant_config=True)
    return request.param, source, root / "o", convert(source, root / "o", request.param)


COMMANDS: dict[str, Callable[[Path, Path], object]] = {
    **{name: (lambda source, output, name=name: repack(source, output, **STOCK, **POLICIES[name])) for name in POLICIES},
    "encode-shared": lambda source, output: encode_shared(source, output=output, device="cpu"),
}


@pytest.fixture(params=COMMANDS)
def refuses(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., str]:
    """Spoil a sample, run the command: it has to stop, with the source untouched and no output. Hands back what it says."""

    def check(spoil: Spoil, *words: str, only: tuple[str, ...] = tuple(COMMANDS)) -> str:
        if request.param not in only:
            pytest.skip(f"{request.param} carries it as it is")
        source = sample(tmp_path / "s", **SIZE)
        spoil(source)
        before = tree(source)
        with pytest.raises(R7Error) as error:
            COMMANDS[request.param](source, tmp_path / "o")
        assert tree(source) == before
        assert not (tmp_path / "o" / MANIFEST).exists()
        assert not list((tmp_path / "o").glob("*.safetensors")) or "scale vector" in str(error.value)
        for word in words:
            assert word in str(error.value), str(error.value)
        return str(error.value)

    return check


# ---- stamp ------------------------------------------------------------------------------------------------------------


def test_stamp(converted: tuple[str, Path, Path, Any], tmp_path: Path) -> None:
    _, source, output, made = converted
    config, beside, old = (
        read_json(path) for path in (output / "config.json", output / "quantization_config.json", source / "config.json")
    )
    block = config["quantization_config"]
    assert block == beside
    assert (block["quant_method"], block["codebook"]) == ("exl3", "mcg")
    assert not {"producer", "quant_algo", "config_groups", "r7_routed_experts"} & block.keys()
    assert not (output / "hf_quant_config.json").exists()
    kept = json.dumps(config["r7convert_provenance"])
    assert json.dumps(old["quantization_config"]["producer"]) in kept, "the producer's block stands under provenance alone"
    assert config["hybrid_tr3_tail"]["moe_layers"] == [2, 4]
    changed = "\n".join(map(str, made.plan.changes))
    for key in ("quant_method: 'modelopt' -> 'exl3'", "producer: ", "r7_routed_experts: "):
        assert f"config.json: quantization_config.{key}" in changed
    again = tamper.copy_output(output, tmp_path / "again")
    assert not encode_shared(again, device="cpu").written
    assert tree(again) == tree(output)


# ---- index ------------------------------------------------------------------------------------------------------------


def three_fewer(source: Path) -> None:
    with edited_json(source / INDEX) as index:
        for proj in ("gate_proj", "up_proj", "down_proj"):
            del index["weight_map"][f"{BASE}.1.{proj}.trellis"]


def elsewhere(source: Path) -> None:
    with edited_json(source / INDEX) as index:
        index["weight_map"][f"{BASE}.1.up_proj.trellis"] = "not-there.safetensors"


def test_index_three_entries_deleted(refuses: Callable[..., str]) -> None:
    said = refuses(three_fewer, f"{BASE}.1.gate_proj.trellis", f"{BASE}.1.down_proj.trellis")
    assert INDEX in said


def test_index_points_to_a_missing_file(refuses: Callable[..., str]) -> None:
    refuses(elsewhere, "not-there.safetensors")


# ---- stub files -------------------------------------------------------------------------------------------------------

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345678\n"


@pytest.mark.parametrize("file", [R7, "model-carrier.safetensors", "quantization_config.json"])
def test_stub_files(refuses: Callable[..., str], file: str) -> None:
    began = time.process_time()
    refuses(lambda source: (source / file).write_bytes(POINTER), file, "this is a pointer")
    assert time.process_time() - began < 1


# ---- killed run -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["repack, lift", "repack, fit", "encode-shared in place"])
def test_killed_run(tmp_path: Path, name: str) -> None:
    """Real kills, by the harness of tests/soak.py, which asks verify and push in between; `make soak` has hundreds."""
    stage = next(stage for stage in STAGES if stage.name == name)
    with HubServer(tmp_path / "hub") as hub:
        work = Soak(tmp_path, hub)
        work.prepare(stage)
        steps = work.steps[name]["rename"]
        assert steps >= 8
        for number in (2, steps // 2, steps - 1):
            assert work.cut(stage, Fault("kill", "rename", number)) == "killed, resumed"


# ---- overlapping folders ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["equal", "inside", "around", "a link"])
@pytest.mark.parametrize("command", COMMANDS)
def test_overlapping_folders(tmp_path: Path, command: str, place: str) -> None:
    source = sample(tmp_path / "around" / "s", **SIZE)
    (tmp_path / "link").symlink_to(source)
    output = {"equal": source, "inside": source / "o", "around": source.parent, "a link": tmp_path / "link"}[place]
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in [source, *source.rglob("*")]}
    with pytest.raises(R7Error, match="may not contain each other"):
        COMMANDS[command](source, output)
    assert before == {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in [source, *source.rglob("*")]}


# ---- header metadata --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("metadata", [None, {}, "null", {"made_by": "me", "format": "np"}], ids=["none", "empty", "null", "custom"])
def test_header_metadata(tmp_path: Path, policy: str, metadata: Any) -> None:
    source = sample(tmp_path / "s", **{**SIZE, "layers": 3, "mtp": "none"})
    for shard in source.glob("*.safetensors"):
        header, data = read_raw(shard)
        header.pop("__metadata__", None)
        raw_shard(shard, header if metadata is None else {"__metadata__": None if metadata == "null" else metadata, **header}, data)
    convert(source, tmp_path / "o", policy)
    custom = {"made_by": "me"} if isinstance(metadata, dict) and metadata else {}
    shards = sorted((tmp_path / "o").glob("*.safetensors"))
    assert len(shards) >= 4
    for shard in shards:
        header = read_header(shard)
        assert header.metadata["format"] == "pt"
        assert shard.name.startswith("shared-experts") or custom.items() <= header.metadata.items()
        assert header.data_start % 8 == 0
        with safe_open(shard, "pt") as opened:
            assert len(list(opened.keys())) == len(header.tensors)
    assert verify(tmp_path / "o", source=source, threads=1).ok


# ---- dtypes -----------------------------------------------------------------------------------------------------------


def recast(name: str, dtype: torch.dtype) -> Spoil:
    def spoil(source: Path) -> None:
        with edited_shard(source / R7) as tensors:
            tensors[name] = tensors[name].to(dtype)

    return spoil


def test_dtypes_trellis_as_i32(refuses: Callable[..., str]) -> None:
    refuses(recast(f"{BASE}.1.up_proj.trellis", torch.int32), f"{BASE}.1.up_proj.trellis", "I16", "I32")


def test_dtypes_svh_as_f32(refuses: Callable[..., str]) -> None:
    refuses(recast(f"{BASE}.1.up_proj.svh", torch.float32), f"{BASE}.1.up_proj.svh", "F16", "F32")


# ---- marker -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["missing", "mul1", "both"])
def test_marker(refuses: Callable[..., str], what: str) -> None:
    def spoil(source: Path) -> None:
        with edited_shard(source / R7) as tensors:
            marker = tensors[f"{BASE}.1.up_proj.mcg"]
            if what != "both":
                del tensors[f"{BASE}.1.up_proj.mcg"]
            if what != "missing":
                tensors[f"{BASE}.1.up_proj.mul1"] = torch.full_like(marker, 0x83DCD12D - (1 << 32))

    refuses(spoil, f"{BASE}.1.up_proj")


# ---- wrong tp ---------------------------------------------------------------------------------------------------------


def test_wrong_tp(converted: tuple[str, Path, Path, Any], tmp_path: Path) -> None:
    policy, source, output, _ = converted
    folder = tamper.copy_output(output, tmp_path / "o")
    assert "tp of this output: expected 4, got 2" in lines_of(verify(folder, tp=4, threads=1))
    assert read_json(folder / "config.json")["hybrid_tr3_tail"]["tp"] == read_manifest(folder).facts["tp"] == 2
    for shard in folder.glob("experts-layer-*.safetensors"):
        assert read_header(shard).metadata.items() >= {"tp": "2", "rank": shard.name.split("-rank-")[1][0]}.items()
    gone = sorted(folder.glob("*-rank-1-of-2.safetensors"))
    assert len(gone) == 3
    for path in gone:
        path.unlink()
    assert not verify(folder, threads=1).ok
    for tp in (4, 3):
        with pytest.raises(R7Error, match=r"1, 2"):
            repack(source, tmp_path / "none", **{**STOCK, **POLICIES[policy], "tp": tp})
    assert not (tmp_path / "none").exists()


# ---- MTP --------------------------------------------------------------------------------------------------------------


def says(count: int) -> Spoil:
    def spoil(source: Path) -> None:
        with edited_json(source / "config.json") as config:
            config["num_nextn_predict_layers"] = count

    return spoil


def test_mtp_tensors_and_no_field(refuses: Callable[..., str]) -> None:
    refuses(says(0), "MTP layers", only=tuple(POLICIES))


def test_mtp_field_and_no_tensors(refuses: Callable[..., str]) -> None:
    refuses(says(2), "MTP layers", only=tuple(POLICIES))


@pytest.mark.parametrize("policy", POLICIES)
def test_mtp_dropped_by_request(tmp_path: Path, policy: str) -> None:
    source = sample(tmp_path / "s", **SIZE)
    convert(source, tmp_path / "o", policy, drop_mtp=True)
    config = read_json(tmp_path / "o" / "config.json")
    assert (config["num_nextn_predict_layers"], config["hybrid_tr3_tail"]["moe_layers"]) == (0, [2, 3])
    assert sorted(read_checkpoint(tmp_path / "o").experts) == [2, 3]
    assert verify(tmp_path / "o", source=source, threads=1).ok


def test_mtp_is_carried_and_hashed(converted: tuple[str, Path, Path, Any]) -> None:
    _, source, output, _ = converted
    verdict = verify(output, source=source, threads=1)
    assert verdict.ok, lines_of(verdict)
    tail = [name for name in read_checkpoint(output).tensors if name.startswith("model.layers.4.")]
    assert len(tail) > 40
    (output / "VERDICT.json").unlink()


# ---- odd layers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mode", ["odd", "one-k", "three-k", "mixed"])
def test_odd_layers(tmp_path: Path, policy: str, mode: str) -> None:
    source = sample(tmp_path / "s", **{**SIZE, "layers": 3, "mtp": "none"}, mode=mode)
    before = read_checkpoint(source).experts[2]
    made = convert(source, tmp_path / "o", policy)
    after = read_checkpoint(tmp_path / "o").experts[2]
    assert all(len(set(row)) == 1 for row in after.bits)
    assert len(after.tiers) <= 2
    if mode in ("odd", "one-k"):
        assert after.bits == before.bits
        assert made.plan.reencoded == 0
    if mode == "odd":
        assert sorted(sum(row[0] == k for row in after.bits) for k in {row[0] for row in after.bits}) == [1, 3]
    sidecar = read_json(tmp_path / "o" / "slabs.json")["layers"]["2"]
    assert sum(sidecar["gate_n"]) == sum(sidecar["down_n"]) == SIZE["experts"]
    assert all(count for count in sidecar["gate_n"]), "an empty tier is no tier"
    assert verify(tmp_path / "o", source=source, threads=1).ok


# ---- numbers ----------------------------------------------------------------------------------------------------------


def holds(value: float, file: str = R7, name: str = f"{BASE}.1.up_proj.svh") -> Spoil:
    def spoil(source: Path) -> None:
        with edited_shard(source / file) as tensors:
            tensors[name].view(-1)[5] = value

    return spoil


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_not_finite_in_an_svh(refuses: Callable[..., str], value: float) -> None:
    refuses(holds(value), f"{BASE}.1.up_proj.svh", f"{value} at index 5, 1 in all", only=tuple(POLICIES))


def test_numbers_nan_in_a_shared_vector(refuses: Callable[..., str]) -> None:
    refuses(holds(float("nan"), name=f"{BASE}.r7_shared.down_svh"), "down_svh", "nan at index 5", only=tuple(POLICIES))


def test_numbers_nan_in_a_weight_to_encode(refuses: Callable[..., str]) -> None:
    name = "model.layers.2.mlp.shared_experts.up_proj.weight"
    refuses(holds(float("nan"), "model-carrier.safetensors", name), name, "not finite", "[0, 5]", only=("encode-shared",))


@pytest.mark.parametrize("policy", POLICIES)
def test_numbers_allowed_are_marked_and_zeros_reported(tmp_path: Path, policy: str) -> None:
    source = sample(tmp_path / "s", **{**SIZE, "layers": 3, "mtp": "none"})
    holds(float("nan"))(source)
    holds(0.0, name=f"{BASE}.2.up_proj.svh")(source)
    convert(source, tmp_path / "o", policy, allow_nonfinite=True)
    facts = read_manifest(tmp_path / "o").facts
    assert facts["nonfinite"] == {f"{BASE}.1.up_proj.svh": {"first": 5, "count": 1, "value": "nan"}}
    assert facts["zeros"] == {f"{BASE}.2.up_proj.svh": {"first": 5, "count": 1}}


# ---- no row is missing ------------------------------------------------------------------------------------------------

ROWS = ("stamp", "index", "stub files", "killed run", "overlapping folders", "header metadata", "dtypes", "marker", "wrong tp", "MTP")
ROWS += ("odd layers", "numbers")


def test_every_row_has_its_tests() -> None:
    tests = [name for name in globals() if name.startswith("test_")]
    for row in ROWS:
        assert any(name.startswith(f"test_{row.lower().replace(' ', '_')}") for name in tests), row
