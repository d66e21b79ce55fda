"""What a plan says before anything is written: files, accounting, config objects, and every refusal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from r7convert.checkpoint import read_checkpoint
from r7convert.errors import FormatError, R7Error, UnsupportedError, UsageError
from r7convert.format import PER_EXPERT_V1, SHARED_H_V1, parse_tail
from r7convert.plan import Plan, plan_repack
from r7convert.source import Folder
from tests.folders import CARRIER, edited_json, edited_shard, sample

ONE_K = {"mode": "uniform", "tail_tp": 2, "equal_tail_vectors": True}


def planned(folder: Path, **choices: Any) -> Plan:
    return plan_repack(read_checkpoint(folder), **choices)


def refused(folder: Path, error: type[R7Error], *words: str, **choices: Any) -> str:
    with pytest.raises(error) as caught:
        planned(folder, **choices)
    for word in words:
        assert word in str(caught.value), str(caught.value)
    return str(caught.value)


# ---- what a plan holds ----------------------------------------------------------------------------------------------


def test_rank_sliced(tmp_path: Path) -> None:
    plan = planned(sample(tmp_path / "s", **ONE_K), target="rank-sliced", tp=4)
    assert [layer.layer for layer in plan.layers] == [3, 4, 5]
    assert plan.layers[0].files == tuple(f"experts-layer-003-rank-{rank}-of-4.safetensors" for rank in range(4))
    assert [(shard.file, shard.as_is) for shard in plan.shards] == [(CARRIER, False)]
    assert plan.rotation_layout == SHARED_H_V1
    tail = parse_tail(plan.config["hybrid_tr3_tail"])
    assert (tail.moe_layers, tail.tp, tail.experts, tail.bits, tail.k_values) == ((3, 5), 4, 4, None, (3, 4))
    assert (tail.map_file, tail.rotation_layout) == ("tier_map.json", SHARED_H_V1)
    assert plan.tier_map() == {
        "3": {"bits": [3, 4, 3, 4]},
        "4": {"bits": [4, 3, 4, 3]},
        "5": {"bits": [3, 3, 3, 3]},
    }
    block = plan.config["quantization_config"]
    assert block == plan.quantization
    assert block["quant_method"] == "exl3"
    assert "r7_routed_experts" not in block
    assert "producer" not in block
    assert set(block["tensor_storage"]) == {f"model.layers.{n}.self_attn.{p}" for n in (3, 4) for p in ("o_proj", "q_b_proj")}


def test_slabs_have_no_tail_that_a_stock_reader_would_take(tmp_path: Path) -> None:
    plan = planned(sample(tmp_path / "s"), target="slabs", tp=2)
    assert "hybrid_tr3_tail" not in plan.config
    pointer = plan.config["quantization_config"]["r7convert_slabs"]
    assert pointer == {"schema": "r7convert-slabs-v1", "file": "slabs.json", "moe_layers": [3, 4, 5], "tp": 2}
    assert plan.layers[0].bits == plan.checkpoint.experts[3].bits
    assert plan.tier_map() is None


def test_r7_carries_everything(tmp_path: Path) -> None:
    plan = planned(sample(tmp_path / "s"), target="r7")
    assert plan.layers == ()
    assert {shard.as_is for shard in plan.shards} == {True}
    assert dict(plan.accounting) == {"kept": (221, plan.checkpoint.payload_bytes)}
    before = plan.checkpoint.config
    assert plan.config["quantization_config"]["r7_routed_experts"] == before["quantization_config"]["r7_routed_experts"]
    assert plan.config["hybrid_tr3_tail"] == before["hybrid_tr3_tail"]
    assert "r7-experts-layer-003.json" in plan.files


def test_r7_can_cut_its_tail_anew(tmp_path: Path) -> None:
    plan = planned(sample(tmp_path / "s"), target="r7", tp=4)
    assert [layer.layer for layer in plan.layers] == [5]
    assert plan.config["hybrid_tr3_tail"]["tp"] == 4
    assert plan.sidecar() is None


def test_exl3_has_a_record_for_every_module(tmp_path: Path) -> None:
    plan = planned(sample(tmp_path / "s"), target="exl3")
    storage = plan.config["quantization_config"]["tensor_storage"]
    assert len(storage) == 3 * 4 * 3 + 4
    module = "model.layers.5.mlp.experts.3.down_proj"
    assert storage[module] == {
        "quant_format": "exl3",
        "stored_tensors": {
            f"{module}.trellis": {"shape": [32, 16, 48], "n_bytes": 32 * 16 * 96, "dtype": "torch.int16"},
            f"{module}.suh": {"shape": [512], "n_bytes": 1024, "dtype": "torch.float16"},
            f"{module}.svh": {"shape": [256], "n_bytes": 512, "dtype": "torch.float16"},
            f"{module}.mcg": {"shape": [], "n_bytes": 4, "dtype": "torch.int32"},
        },
        "bits_per_weight": 3,
        "mcg_multiplier": 3417055213,
    }
    assert plan.accounting["spread"][0] == 4
    assert plan.accounting["joined"][0] == 48
    assert "hybrid_tr3_tail" not in plan.config


TARGETS = [("rank-sliced", 1), ("rank-sliced", 2), ("rank-sliced", 4), ("slabs", 4), ("r7", None), ("r7", 4), ("exl3", None)]


@pytest.mark.parametrize(("target", "tp"), TARGETS)
@pytest.mark.parametrize("drop_mtp", [False, True])
def test_every_tensor_is_accounted_for_once(tmp_path: Path, target: str, tp: int | None, drop_mtp: bool) -> None:
    plan = planned(sample(tmp_path / "s", **ONE_K, split=True), target=target, tp=tp, drop_mtp=drop_mtp)
    checkpoint = plan.checkpoint
    assert sum(count for count, _ in plan.accounting.values()) == len(checkpoint.tensors)
    assert sum(nbytes for _, nbytes in plan.accounting.values()) == checkpoint.payload_bytes
    assert ("dropped" in plan.accounting) == drop_mtp
    index = plan.index()
    assert index["metadata"]["total_size"] == plan.payload_bytes
    if drop_mtp:
        assert not [name for name in index["weight_map"] if ".layers.5." in name]
        assert plan.config["num_nextn_predict_layers"] == 0


def test_same_form_same_tp_is_kept(tmp_path: Path) -> None:
    plan = planned(sample(tmp_path / "s", mode="uniform", tail_tp=2), target="rank-sliced", tp=2)
    assert plan.rotation_layout == PER_EXPERT_V1
    fates = [{layer.fate(name) for name in layer.source.tensors} for layer in plan.layers]
    assert fates == [{"spread", "sliced"}, {"spread", "sliced"}, {"kept"}]


def test_sidecar_places_follow_the_headers(tmp_path: Path) -> None:
    plan = planned(sample(tmp_path / "s"), target="slabs", tp=4)
    sidecar = plan.sidecar()
    for layer in plan.layers:
        for rank, placed in enumerate(sidecar["layers"][str(layer.layer)]["ranks"]):
            assert placed["w13"][0]["offset"] == len(layer.header(rank))
            assert placed["w13"][0]["offset"] % 4096 == 0


def test_wide_tiers_have_no_descriptors_and_a_note(tmp_path: Path) -> None:
    folder = sample(tmp_path / "s", experts=288, hidden=128, intermediate=128, layers=4, mode="uniform")
    plan = planned(folder, target="rank-sliced", tp=1)
    assert any("layers 4: over 256 experts" in note for note in plan.notes)
    sidecar = plan.sidecar()
    assert sidecar["layers"]["4"]["descriptors"] is None
    assert sidecar["layers"]["3"]["descriptors"] is not None


# ---- rotation layout ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choices", "asked", "made"),
    [
        (ONE_K, {}, SHARED_H_V1),
        (ONE_K, {"reader": "r14"}, PER_EXPERT_V1),
        (ONE_K, {"rotation_layout": PER_EXPERT_V1}, PER_EXPERT_V1),
        ({"mode": "uniform"}, {}, PER_EXPERT_V1),
        ({"mode": "uniform"}, {"drop_mtp": True}, SHARED_H_V1),
        ({"mode": "uniform", "mtp": "none"}, {}, SHARED_H_V1),
        ({"mode": "uniform", "mtp": "r7"}, {}, SHARED_H_V1),
        ({"mode": "uniform", "mtp": "none", "per_expert_vectors": True}, {}, PER_EXPERT_V1),
    ],
)
def test_rotation_layout(tmp_path: Path, choices: dict[str, Any], asked: dict[str, Any], made: str) -> None:
    plan = planned(sample(tmp_path / "s", **choices), target="rank-sliced", tp=2, **asked)
    assert plan.rotation_layout == made
    assert ("rotation_layout" in plan.config["hybrid_tr3_tail"]) == (made == SHARED_H_V1)


def test_shared_layout_needs_shared_vectors(tmp_path: Path) -> None:
    folder = sample(tmp_path / "s", mode="uniform")
    refused(folder, UnsupportedError, "layers.5.", "gate_proj", ".suh", target="rank-sliced", tp=2, rotation_layout=SHARED_H_V1)


def test_one_vector_of_one_rank_decides(tmp_path: Path) -> None:
    folder = sample(tmp_path / "s", **ONE_K)
    with edited_shard(folder / CARRIER) as tensors:
        tensors["model.layers.5.mlp.experts.3.down_proj.rank1.svh"][7] += 1
    assert planned(folder, target="rank-sliced", tp=2).rotation_layout == PER_EXPERT_V1


def test_r14_does_not_know_the_shared_layout(tmp_path: Path) -> None:
    folder = sample(tmp_path / "s", **ONE_K)
    refused(folder, UsageError, "r14", "fails late", target="rank-sliced", tp=2, reader="r14", rotation_layout=SHARED_H_V1)


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"target": "rank-sliced"}, ("--tp", "[1, 2, 4]")),
        ({"target": "slabs"}, ("--tp",)),
        ({"target": "gguf"}, ("--target", "rank-sliced")),
        ({"target": "exl3", "tp": 2}, ("--tp", "whole")),
        ({"target": "rank-sliced", "tp": 2, "reader": "r15"}, ("--reader", "r14, r28")),
        ({"target": "rank-sliced", "tp": 2, "rotation_layout": "shared"}, ("--rotation-layout",)),
        ({"target": "r7", "rotation_layout": SHARED_H_V1}, ("--rotation-layout",)),
        ({"target": "r7", "layers": (3, 3)}, ("--layers",)),
        ({"target": "slabs", "tp": 2, "layers": (4, 3)}, ("--layers",)),
        ({"target": "slabs", "tp": 2, "layers": (40, 50)}, ("--layers", "40-50")),
    ],
)
def test_choices_that_make_no_sense(tmp_path: Path, choices: dict[str, Any], words: tuple[str, ...]) -> None:
    refused(sample(tmp_path / "s", **ONE_K), UsageError, *words, **choices)


@pytest.mark.parametrize("tp", [8, 3, 0, -1])
@pytest.mark.parametrize("target", ["rank-sliced", "slabs"])
def test_illegal_tp_gets_the_legal_list(tmp_path: Path, target: str, tp: int) -> None:
    refused(sample(tmp_path / "s", **ONE_K), UnsupportedError, "[1, 2, 4]", f"got {tp}", target=target, tp=tp)


def test_mixed_experts_are_named_and_priced(tmp_path: Path) -> None:
    text = refused(sample(tmp_path / "s"), UnsupportedError, target="rank-sliced", tp=2)
    for word in ("layer 3: 4 of 4 experts mix K", "layer 4:", "--mixed-k lift", "--mixed-k fit", "matrices lifted"):
        assert word in text


def test_three_k_in_a_layer_are_named(tmp_path: Path) -> None:
    folder = sample(tmp_path / "s", mode="three-k", mtp="none")
    refused(folder, UnsupportedError, "layer 3", "[3, 4, 5]", target="rank-sliced", tp=2)
    assert planned(folder, target="slabs", tp=2).layers[0].slabs.tiers == (3, 4, 5)


def test_mtp_must_agree_or_be_dropped(tmp_path: Path) -> None:
    folder = sample(tmp_path / "s", **ONE_K)
    with edited_json(folder / "config.json") as config:
        config["num_nextn_predict_layers"] = 0
    refused(folder, FormatError, "MTP", "--drop-mtp", target="r7")
    plan = planned(folder, target="r7", drop_mtp=True)
    assert "hybrid_tr3_tail" not in plan.config
    assert plan.accounting["dropped"][0] > 96


def test_declared_mtp_without_tensors_can_be_dropped(tmp_path: Path) -> None:
    folder = sample(tmp_path / "s", **ONE_K)
    with edited_shard(folder / CARRIER) as tensors:
        for name in [name for name in tensors if ".layers.5." in name]:
            del tensors[name]
    refused(folder, FormatError, "MTP", target="rank-sliced", tp=2)
    plan = planned(folder, target="rank-sliced", tp=2, drop_mtp=True)
    assert plan.config["num_nextn_predict_layers"] == 0
    assert plan.config["hybrid_tr3_tail"]["moe_layers"] == [3, 4]
    assert "dropped" not in plan.accounting


def test_dropping_the_mtp_layer_shortens_an_r7_block_over_it(tmp_path: Path) -> None:
    folder = sample(tmp_path / "s", mtp="r7")
    plan = planned(folder, target="r7", drop_mtp=True)
    for block in (plan.config["quantization_config"], plan.quantization):
        assert block["r7_routed_experts"]["moe_layers"] == [3, 4]
    assert "r7-experts-layer-005.json" not in plan.files


def test_dropping_reaches_a_nested_config(tmp_path: Path) -> None:
    plan = planned(sample(tmp_path / "s", nested=True), target="r7", drop_mtp=True)
    assert plan.config["text_config"]["num_nextn_predict_layers"] == 0
    assert plan.config["text_config"]["quantization_config"] == plan.config["quantization_config"]


def test_dense_exl3_outside_the_tail_is_refused_for_stock(tmp_path: Path) -> None:
    folder = sample(tmp_path / "s", **ONE_K)
    with edited_shard(folder / CARRIER) as tensors:
        for field, value in (("trellis", (16, 8, 96)), ("suh", (256,)), ("svh", (128,)), ("mcg", ())):
            dtype = {"trellis": torch.int16, "mcg": torch.int32}.get(field, torch.float16)
            tensors[f"lm_head.{field}"] = torch.ones(value, dtype=dtype)
        del tensors["lm_head.weight"]
    refused(folder, UnsupportedError, "lm_head: dense EXL3 with an mcg marker", target="rank-sliced", tp=2)
    assert "lm_head" in planned(folder, target="slabs", tp=2).config["quantization_config"]["tensor_storage"]


@pytest.mark.parametrize("field", ["mcg", "suh"])
@pytest.mark.parametrize("target", ["slabs", "exl3", "r7"])
def test_a_dense_module_without_its_marker_or_vector_is_refused(tmp_path: Path, field: str, target: str) -> None:
    folder = sample(tmp_path / "s")
    with edited_shard(folder / CARRIER) as tensors:
        del tensors[f"model.layers.3.self_attn.o_proj.{field}"]
    for name in ("config.json", "quantization_config.json"):
        with edited_json(folder / name) as value:
            del value.get("quantization_config", value)["tensor_storage"]["model.layers.3.self_attn.o_proj"]
    words = (f"model.layers.3.self_attn.o_proj: dense EXL3 module: expected trellis, suh, svh and mcg, got no {field}",)
    refused(folder, UnsupportedError, *words, target=target, tp=2 if target == "slabs" else None)


def test_a_gap_in_the_layers_is_refused_for_stock(tmp_path: Path) -> None:
    folder = sample(tmp_path / "s", mode="uniform")
    for name in ("config.json", "quantization_config.json"):
        with edited_json(folder / name) as value:
            value.get("quantization_config", value)["r7_routed_experts"]["moe_layers"] = [3, 3]
    with edited_json(folder / "config.json") as config:
        config["mlp_only_layers"] = [4]
    with edited_shard(folder / "r7-experts-layer-004.safetensors") as tensors:
        tensors.clear()
        tensors["model.extra"] = torch.ones(1)
    refused(folder, UnsupportedError, "expected one contiguous range, got 3, 5", target="rank-sliced", tp=2)
    assert [layer.layer for layer in planned(folder, target="slabs", tp=2).layers] == [3, 5]


def test_nothing_left_to_slice(tmp_path: Path) -> None:
    folder = sample(tmp_path / "s", mode="uniform")
    with edited_json(folder / "config.json") as config:
        del config["quantization_config"]["r7_routed_experts"]
        config["first_k_dense_replace"] = 5
    with edited_json(folder / "quantization_config.json") as value:
        del value["r7_routed_experts"]
    for layer in (3, 4):
        with edited_shard(folder / f"r7-experts-layer-00{layer}.safetensors") as tensors:
            tensors.clear()
            tensors[f"model.extra{layer}"] = torch.ones(1)
    refused(folder, UnsupportedError, "routed experts", target="slabs", tp=2, drop_mtp=True)


def test_other_weights_and_junk_stay_behind(tmp_path: Path) -> None:
    folder = sample(tmp_path / "s")
    for name in ("pytorch_model.bin", "evil.pkl", "half.partial", "old.safetensors", ".gitattributes", "notes.txt"):
        (folder / name).write_bytes(b"x")
    plan = planned(folder, target="r7")
    assert plan.left_out == (".gitattributes", "evil.pkl", "half.partial", "old.safetensors", "pytorch_model.bin")
    assert "notes.txt" in plan.files


def test_a_carried_file_in_the_way_of_an_outputs_name(tmp_path: Path) -> None:
    folder = sample(tmp_path / "s", **ONE_K)
    name = "experts-layer-003-rank-0-of-2.safetensors"
    (folder / CARRIER).rename(folder / name)
    with edited_json(folder / "model.safetensors.index.json") as index:
        index["weight_map"] = {n: name if f == CARRIER else f for n, f in index["weight_map"].items()}
    refused(folder, UnsupportedError, "in the way", name, target="rank-sliced", tp=2)


@pytest.mark.parametrize("shape", [lambda c: c | {"nested": True}, lambda c: c | {"per_expert_vectors": True}, lambda c: c])
def test_plans_read_no_payload_but_vectors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    read = Folder.read
    sizes = []
    monkeypatch.setattr(Folder, "read", lambda self, name, at, nbytes: sizes.append(nbytes) or read(self, name, at, nbytes))
    planned(sample(tmp_path / "s", **shape(ONE_K)), target="rank-sliced", tp=2)
    assert set(sizes) <= {512}
