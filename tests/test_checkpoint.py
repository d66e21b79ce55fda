"""A source read whole, and every way in which one is refused by name."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from r7convert.checkpoint import read_checkpoint
from r7convert.errors import FormatError, InputError, UnsupportedError
from r7convert.source import Folder
from r7convert.units import ranges
from tests.folders import CARRIER, INDEX, R7, edited_json, edited_shard, raw_shard, read_raw, sample

GATE = "model.layers.3.mlp.experts.1.gate_proj"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"


def refused(folder: Path, *words: str, error: type[InputError] = FormatError) -> str:
    with pytest.raises(error) as caught:
        read_checkpoint(folder)
    text = str(caught.value)
    for word in words:
        assert word in text
    return text


# ---- what is read ---------------------------------------------------------------------------------------------------


def test_f0(tmp_path: Path) -> None:
    made = read_checkpoint(sample(tmp_path / "s"))
    assert list(made.experts) == [3, 4, 5]
    assert [(layer.tp, layer.hidden) for layer in made.experts.values()] == [(None, "r7_shared"), (None, "r7_shared"), (1, "per_expert")]
    assert made.experts[5].bits == ((3, 3, 3),) * 4
    for layer in (3, 4):
        bit_map = made.source.json(f"r7-experts-layer-00{layer}.json")["bit_map"]
        said = [tuple(bit_map[f"model.layers.{layer}.mlp.experts.{e}.{p}_proj"] for p in ("gate", "up", "down")) for e in range(4)]
        assert list(made.experts[layer].bits) == said
    assert any(row[0] != row[1] for row in made.experts[3].bits)
    assert sorted(made.dense_exl3.values()) == [6] * 4
    assert {(s.form, s.dtype, s.module) for s in made.shared_experts.values()} == {("weight", "BF16", "shared_experts")}
    assert (made.mtp.declared, made.mtp.layers, made.mtp.problem) == (1, (5,), None)
    assert made.payload_bytes == sum(header.size - header.data_start for header in made.headers.values())
    assert made.warnings == ()


VARIANTS: list[tuple[dict[str, Any], Any]] = [
    ({"nested": True}, lambda c: (c.root, c.geometry.nested) == ("model.language_model.layers", True)),
    ({"per_expert_vectors": True}, lambda c: c.experts[3].hidden == "per_expert"),
    ({"mtp": "r7"}, lambda c: c.experts[5].tp is None and c.tail is None and c.mtp.layers == (5,)),
    ({"mtp": "none"}, lambda c: list(c.experts) == [3, 4] and c.mtp.problem is None and not c.mtp.names),
    ({"k_values": (3, 4)}, lambda c: c.r7.k_values == (3, 4)),
    ({"tail_tp": 4}, lambda c: c.experts[5].tp == 4 and len(c.experts[5].parts(0, "gate_proj", "svh")) == 4),
    ({"storage_for_experts": True}, lambda c: GATE in c.quantization["tensor_storage"]),
    ({"hf_quant_config": True}, lambda c: c.hf_quant_config is not None),
    ({"experts": 288, "hidden": 128, "intermediate": 128, "layers": 4}, lambda c: len(c.experts[3].bits) == 288),
    ({"split": True}, lambda c: len(c.headers) > 5),
]


@pytest.mark.parametrize(("choices", "holds"), VARIANTS, ids=[next(iter(choices)) + str(n) for n, (choices, _) in enumerate(VARIANTS)])
def test_variants(tmp_path: Path, choices: dict[str, Any], holds: Any) -> None:
    made = read_checkpoint(sample(tmp_path / "s", **choices))
    assert holds(made)
    assert set(made.tensors) == set(made.weight_map)


def test_no_payload_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = sample(tmp_path / "s")
    for path in folder.glob("*.safetensors"):  # payload gone, sizes kept: whoever reads it reads zeros
        header, data = read_raw(path)
        raw_shard(path, header, bytes(len(data)))
    monkeypatch.setattr(Folder, "read", lambda *_: pytest.fail("payload was read"))
    assert list(read_checkpoint(folder).experts) == [3, 4, 5]


def test_snapshot_of_the_hubs_cache(tmp_path: Path) -> None:
    commit = "7c73450f05a151439d0f184f216b1eefcc394a31"
    store, snapshot = tmp_path / "models--org--name" / "blobs", tmp_path / "models--org--name" / "snapshots" / commit
    sample(tmp_path / "s")
    store.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted((tmp_path / "s").iterdir())):
        shutil.move(path, store / str(number))
        (snapshot / path.name).symlink_to(Path("../../blobs") / str(number))
    made = read_checkpoint(snapshot)
    assert (made.source.repo, made.source.commit) == ("org/name", commit)
    assert len(made.tensors) == 221
    for number in (0, 3):
        (store / str(number)).unlink()
    text = refused(snapshot, "dangling link")
    assert text.count("dangling link") == 2


def test_one_shard_needs_no_index(tmp_path: Path) -> None:
    folder = sample(tmp_path / "s")
    with edited_shard(folder / CARRIER) as tensors:
        for path in folder.glob("r7-experts-*.safetensors"):
            with edited_shard(path) as experts:
                tensors |= experts
                experts.clear()
            path.unlink()
    (folder / INDEX).unlink()
    made = read_checkpoint(folder)
    assert len(made.tensors) == 221
    assert made.warnings != ()  # no sidecar beside that shard


def test_what_is_no_part_of_a_checkpoint_is_left_out(tmp_path: Path) -> None:
    folder = sample(tmp_path / "s")
    (folder / ".cache").mkdir()
    (folder / "figures").mkdir()
    (folder / "half.safetensors.partial").write_bytes(b"x")
    shutil.copy(folder / R7, folder / "old.safetensors")
    made = read_checkpoint(folder)
    assert made.left_out == (".cache", "figures", "half.safetensors.partial")
    assert made.foreign == ("old.safetensors",)


# ---- the index ------------------------------------------------------------------------------------------------------


def test_entries_missing_from_the_index(tmp_path: Path) -> None:
    folder = sample(tmp_path / "s")
    names = [f"{GATE}.trellis", f"{GATE}.svh", f"{GATE}.mcg"]
    with edited_json(folder / INDEX) as index:
        for name in names:
            del index["weight_map"][name]
    refused(folder, *names, "stale")


def test_entry_for_a_missing_file(tmp_path: Path) -> None:
    folder = sample(tmp_path / "s")
    with edited_json(folder / INDEX) as index:
        index["weight_map"][f"{GATE}.trellis"] = "gone.safetensors"
    refused(folder, "gone.safetensors: missing file")


def test_entry_for_the_wrong_file(tmp_path: Path) -> None:
    folder = sample(tmp_path / "s")
    with edited_json(folder / INDEX) as index:
        index["weight_map"][f"{GATE}.trellis"] = CARRIER
    refused(folder, f"{GATE}.trellis", f"expected {R7}, got {CARRIER}")


def test_entry_for_a_tensor_that_is_not_there(tmp_path: Path) -> None:
    folder = sample(tmp_path / "s")
    with edited_json(folder / INDEX) as index:
        index["weight_map"]["model.ghost"] = CARRIER
    refused(folder, "model.ghost", "no such tensor")


@pytest.mark.parametrize(
    ("change", "word"), [("none", "with equal bytes"), ("last", "with different bytes"), ("shape", "F16 [512] and F16 [511]")]
)
def test_one_tensor_in_two_shards(tmp_path: Path, change: str, word: str) -> None:
    folder = sample(tmp_path / "s")
    name = f"{GATE}.svh"
    with edited_shard(folder / R7) as theirs, edited_shard(folder / CARRIER, index=False) as tensors:
        tensors[name] = theirs[name].clone()
        if change == "last":
            tensors[name][-1] += 1
        elif change == "shape":
            tensors[name] = tensors[name][:-1].clone()
    files = f"{CARRIER} and {R7}, "
    shown = word if change != "shape" else "F16 [511] and F16 [512]"
    refused(folder, f"{name}: tensor in two shards: expected one, {R7} by the index, got {files}{shown}")


def test_a_rank_in_two_shards(tmp_path: Path) -> None:
    folder = sample(tmp_path / "s", kind="rank-sliced", mode="uniform", tail_tp=2, split=True)
    names = [f"{GATE}.rank1.{field}" for field in ("trellis", "suh", "svh", "mcg")]
    with (
        edited_shard(folder / "model-layer-003.safetensors") as theirs,
        edited_shard(folder / "model-layer-004.safetensors", index=False) as ours,
    ):
        ours |= {name: theirs[name].clone() for name in names}
        ours[names[0]][3, 3, 3] += 1
    text = refused(folder, f"{names[0]}: tensor in two shards", "with different bytes")
    assert text.count("with equal bytes") == 3


def test_two_shards_with_everything_are_compared_no_further_than_they_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = sample(tmp_path / "s")
    shutil.copy(folder / CARRIER, folder / "again.safetensors")
    with edited_json(folder / INDEX) as index:
        index["weight_map"]["lm_head.weight"] = "again.safetensors"
    reads = []
    read = Folder.read
    monkeypatch.setattr(Folder, "read", lambda self, name, offset, nbytes: reads.append(name) or read(self, name, offset, nbytes))
    text = refused(folder, "tensor in two shards")
    assert text.count("with equal bytes") == 20
    assert len(reads) == 40


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "C:x.safetensors", ".hidden", "x\0", "", 7, None, ["x.safetensors"]]
)
def test_file_names_outside_the_folder(tmp_path: Path, name: Any) -> None:
    folder = sample(tmp_path / "s")
    with edited_json(folder / INDEX) as index:
        index["weight_map"][f"{GATE}.trellis"] = name
    refused(folder, f"{INDEX}: file name")


@pytest.mark.parametrize("value", [[], {"weight_map": {}}, {"weight_map": []}, {}])
def test_an_index_that_is_none(tmp_path: Path, value: Any) -> None:
    folder = sample(tmp_path / "s")
    (folder / INDEX).write_text(str(value).replace("'", '"'))
    refused(folder, INDEX)


# ---- stubs and broken files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [R7, "quantization_config.json", "config.json", "tokenizer.json", INDEX])
def test_pointer_in_place_of_a_file(tmp_path: Path, name: str) -> None:
    folder = sample(tmp_path / "s")
    (folder / name).write_bytes(POINTER)
    refused(folder, name, "this is a pointer", "Fetch it")


def test_broken_shards_are_named_together(tmp_path: Path) -> None:
    folder = sample(tmp_path / "s")
    (folder / R7).write_bytes(b"")
    (folder / CARRIER).write_bytes((folder / CARRIER).read_bytes()[:-1])
    refused(folder, f"{R7}: empty file", CARRIER, "truncated")


def test_missing_config(tmp_path: Path) -> None:
    folder = sample(tmp_path / "s")
    (folder / "config.json").unlink()
    refused(folder, "config.json: missing file")


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="not a folder"):
        read_checkpoint(tmp_path / "nothing")


# ---- dtypes, shapes, markers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("trellis", torch.zeros(16, 32, 48, dtype=torch.int32), ("dtype", "expected I16, got I32", "never cast")),
        ("svh", torch.ones(512, dtype=torch.float32), ("dtype", "expected F16, got F32")),
        ("svh", torch.ones(511, dtype=torch.float16), ("shape", "expected [512], got [511]")),
        ("trellis", torch.zeros(16, 31, 48, dtype=torch.int16), ("shape", "[16, 32, 48]", "[16, 31, 48]")),
        ("trellis", torch.zeros(16, 32, 50, dtype=torch.int16), ("K from the last dimension", "50")),
        ("mcg", torch.zeros(2, dtype=torch.int32), ("shape", "expected [], got [2]")),
        ("mcg", torch.zeros((), dtype=torch.int64), ("dtype", "I32", "I64")),
    ],
)
def test_dtype_and_shape(tmp_path: Path, name: str, value: torch.Tensor, words: tuple[str, ...]) -> None:
    folder = sample(tmp_path / "s")
    with edited_shard(folder / R7) as tensors:
        tensors[f"{GATE}.{name}"] = value
    refused(folder, R7, f"{GATE}.{name}", *words)


def test_marker_of_one_element_is_a_marker(tmp_path: Path) -> None:
    folder = sample(tmp_path / "s")
    with edited_shard(folder / R7) as tensors:
        tensors[f"{GATE}.mcg"] = tensors[f"{GATE}.mcg"].reshape(1)
    assert read_checkpoint(folder).tensors[f"{GATE}.mcg"].shape == (1,)


@pytest.mark.parametrize(("keep_mcg", "add_mul1", "word"), [(False, False, "nothing"), (False, True, "mul1"), (True, True, "mul1")])
def test_marker(tmp_path: Path, keep_mcg: bool, add_mul1: bool, word: str) -> None:
    folder = sample(tmp_path / "s")
    with edited_shard(folder / R7) as tensors:
        marker = tensors[f"{GATE}.mcg"] if keep_mcg else tensors.pop(f"{GATE}.mcg")
        if add_mul1:
            tensors[f"{GATE}.mul1"] = marker.clone()
    refused(folder, GATE, word)


# ---- K --------------------------------------------------------------------------------------------------------------


def test_k_outside_k_values(tmp_path: Path) -> None:
    folder = sample(tmp_path / "s")
    for name in ("config.json", "quantization_config.json"):
        with edited_json(folder / name) as value:
            block = value.get("quantization_config", value)["r7_routed_experts"]
            block["k_values"] = [3, 4]
    refused(folder, "expected one of [3, 4], as r7_routed_experts says, got [5]")


def test_bit_map_disagrees(tmp_path: Path) -> None:
    folder = sample(tmp_path / "s")
    with edited_json(folder / "r7-experts-layer-003.json") as sidecar:
        k = sidecar["bit_map"][GATE]
        sidecar["bit_map"][GATE] = k + 1
        del sidecar["bit_map"][GATE.replace("gate", "up")]
        sidecar["bit_map"]["model.layers.9.mlp.experts.0.up_proj"] = 3
    refused(folder, f"{GATE}: K: expected {k}", "up_proj: K", "unknown module 'model.layers.9")


def test_bit_map_that_is_true_is_no_number(tmp_path: Path) -> None:
    folder = sample(tmp_path / "s", mode="one-k", k_values=(3,))
    with edited_json(folder / "r7-experts-layer-003.json") as sidecar:
        sidecar["bit_map"][GATE] = 3.0
    refused(folder, GATE, "3.0")


def test_no_sidecar_is_a_warning(tmp_path: Path) -> None:
    folder = sample(tmp_path / "s")
    (folder / "r7-experts-layer-003.json").unlink()
    (warning,) = read_checkpoint(folder).warnings
    assert "[3]" in warning


# ---- other codecs and forms -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [("schema", "glm52-sqg-atoms-v2-routed-v1"), ("codebook", "mul1"), ("sqg_atoms", 1), ("moe_layers", [3, True]), ("k_values", [3.0])],
)
def test_r7_block(tmp_path: Path, key: str, value: Any) -> None:
    folder = sample(tmp_path / "s")
    for name in ("config.json", "quantization_config.json"):
        with edited_json(folder / name) as json:
            json.get("quantization_config", json)["r7_routed_experts"][key] = value
    refused(folder, key.split("_")[0], error=InputError)


def test_two_r7_blocks_that_differ(tmp_path: Path) -> None:
    folder = sample(tmp_path / "s")
    with edited_json(folder / "quantization_config.json") as value:
        value["r7_routed_experts"]["moe_layers"] = [3, 3]
    refused(folder, "quantization_config.json: r7_routed_experts")


def test_rank_names_under_the_r7_schema(tmp_path: Path) -> None:
    folder = sample(tmp_path / "s")
    (folder / R7).rename(folder / "r7-v1-layer-003-rank-00.safetensors")
    with edited_shard(folder / "r7-v1-layer-003-rank-00.safetensors") as tensors:
        for name in [name for name in tensors if ".experts.1." in name]:
            module, _, field = name.rpartition(".")
            tensors[f"{module}.rank0.{field}"] = tensors.pop(name)
    with edited_json(folder / INDEX) as index:
        index["weight_map"] = {n: "r7-v1-layer-003-rank-00.safetensors" if f == R7 else f for n, f in index["weight_map"].items()}
    refused(folder, "r7-v1-layer-003-rank-00", "rank-sliced tensor in a layer that the config calls R7", "v1 slicer")


def test_sqg_tensor(tmp_path: Path) -> None:
    folder = sample(tmp_path / "s")
    with edited_shard(folder / R7) as tensors:
        tensors["model.layers.3.mlp.experts.sqg_atoms"] = torch.ones(4)
    refused(folder, "sqg_atoms", "another codec")


def test_tensor_nobody_expects(tmp_path: Path) -> None:
    folder = sample(tmp_path / "s")
    with edited_shard(folder / R7) as tensors:
        tensors["model.layers.3.mlp.experts.1.gate_proj.bias"] = torch.ones(4)
        tensors[f"{GATE}.suh"] = torch.ones(256, dtype=torch.float16)
    text = refused(folder, "gate_proj.bias", "unknown tensor")
    assert f"{GATE}.suh" in text


def test_pruned_layer(tmp_path: Path) -> None:
    folder = sample(tmp_path / "s")
    with edited_shard(folder / R7) as tensors:
        for name in [name for name in tensors if ".experts.2." in name]:
            del tensors[name]
    refused(folder, "layer 3: routed experts: expected 4", "missing 2", "Pruned")


def test_layer_without_experts(tmp_path: Path) -> None:
    folder = sample(tmp_path / "s")
    with edited_shard(folder / R7) as tensors:
        tensors.clear()
        tensors["model.extra"] = torch.ones(4)
    refused(folder, "layer 3: no routed experts, though r7_routed_experts covers it")


def test_experts_no_block_covers(tmp_path: Path) -> None:
    folder = sample(tmp_path / "s")
    for name in ("config.json", "quantization_config.json"):
        with edited_json(folder / name) as value:
            value.get("quantization_config", value)["r7_routed_experts"]["moe_layers"] = [4, 4]
    refused(folder, "layer 3, which neither r7_routed_experts nor hybrid_tr3_tail covers")


@pytest.mark.parametrize(
    ("key", "value", "word"),
    [
        ("tp", 2, "tp 2"),
        ("experts_per_layer", 8, "experts_per_layer"),
        ("bits", 4, "K"),
        ("format", "exl3-trelis", "format"),
        ("tp", "1", "tp"),
    ],
)
def test_tail_against_payload(tmp_path: Path, key: str, value: Any, word: str) -> None:
    folder = sample(tmp_path / "s")
    with edited_json(folder / "config.json") as config:
        config["hybrid_tr3_tail"][key] = value
    refused(folder, word)


def test_rank_missing_from_the_tail(tmp_path: Path) -> None:
    folder = sample(tmp_path / "s", tail_tp=4)
    with edited_shard(folder / CARRIER) as tensors:
        for name in [name for name in tensors if ".rank2." in name]:
            del tensors[name]
    refused(folder, "layer 5: ranks of the routed experts")


@pytest.mark.parametrize(
    ("entry", "sound"), [({"bits": [3, 3, 3, 3]}, True), ({"tail_tr3": [0, 0, 0, 0]}, True), ({"bits": [3, 3, 4, 3]}, False)]
)
def test_mixed_tail_has_a_true_tier_map(tmp_path: Path, entry: Any, sound: bool) -> None:
    folder = sample(tmp_path / "s")
    with edited_json(folder / "config.json") as config:
        config["hybrid_tr3_tail"] |= {"bits": "mixed", "k_values": [3, 4], "bits_per_expert": "map.json:bits"}
    refused(folder, "map.json: missing tier map")
    (folder / "map.json").write_text("{}")
    refused(folder, "map.json: 5")
    with edited_json(folder / "map.json") as value:
        value["5"] = entry
    if sound:
        assert read_checkpoint(folder).tail is not None
    else:
        refused(folder, "K of expert 2: expected 3 in the payload, got 4")


# ---- MTP, and offenders together ------------------------------------------------------------------------------------


def test_mtp_declared_without_tensors(tmp_path: Path) -> None:
    folder = sample(tmp_path / "s")
    with edited_shard(folder / CARRIER) as tensors:
        for name in [name for name in tensors if ".layers.5." in name]:
            del tensors[name]
    problem = read_checkpoint(folder).mtp.problem
    assert problem is not None
    assert "expected tensors of 1 MTP layers, got none" in problem
    assert "--drop-mtp" in problem


def test_mtp_tensors_without_declaration(tmp_path: Path) -> None:
    folder = sample(tmp_path / "s")
    with edited_json(folder / "config.json") as config:
        config["num_nextn_predict_layers"] = 0
    problem = read_checkpoint(folder).mtp.problem
    assert problem is not None
    assert "layers [5]" in problem


@pytest.mark.parametrize(("declared", "found"), [(2, [5]), (1, [5, 6]), (3, [5, 6])])
def test_mtp_layers_are_counted(tmp_path: Path, declared: int, found: list[int]) -> None:
    folder = sample(tmp_path / "s", kind="exl3", mtp_layers=len(found))
    with edited_json(folder / "config.json") as config:
        config["num_nextn_predict_layers"] = declared
    made = read_checkpoint(folder)
    assert made.mtp.layers == tuple(found)
    problem = made.mtp.problem
    assert problem is not None
    assert f"expected tensors of {declared} MTP layers" in problem
    assert f"tensors of layers {found}" in problem
    assert "--drop-mtp" in problem


def test_an_mtp_layer_beyond_its_place(tmp_path: Path) -> None:
    folder = sample(tmp_path / "s", kind="exl3", storage=False)
    with edited_shard(folder / CARRIER) as tensors:
        for name in [name for name in tensors if ".layers.5." in name]:
            tensors[name.replace(".layers.5.", ".layers.6.")] = tensors.pop(name)
    problem = read_checkpoint(folder).mtp.problem
    assert problem is not None
    assert "expected tensors of 1 MTP layers, got" in problem
    assert "of layers [6]" in problem


def test_offenders_are_named_together_and_counted(tmp_path: Path) -> None:
    folder = sample(tmp_path / "s")
    with edited_shard(folder / R7) as tensors:
        for name in [name for name in tensors if name.endswith(".mcg")]:
            del tensors[name]
        for name in [name for name in tensors if name.endswith(".trellis")]:
            tensors[name] = tensors[name].to(torch.int32)
    text = refused(folder, "missing tensor")
    assert len(text.splitlines()) == 21
    assert text.endswith("... and 4 more")


def test_geometry_that_is_no_multiple(tmp_path: Path) -> None:
    folder = sample(tmp_path / "s")
    with edited_json(folder / "config.json") as config:
        config["moe_intermediate_size"] = 500
    refused(folder, "moe_intermediate_size", "128", error=UnsupportedError)


def test_ranges() -> None:
    assert ranges([3, 4, 5, 7, 9, 10]) == "3-5, 7, 9-10"
