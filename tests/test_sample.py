from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from r7convert.errors import UnsupportedError, UsageError
from r7convert.format import (
    FIELD_DTYPE,
    MCG_MARKER,
    ExpertName,
    expected_shape,
    parse_name,
    parse_r7_block,
    parse_tail,
)
from r7convert.geometry import parse_geometry
from r7convert.sample import write_sample
from r7convert.sample_shape import Sample, k_table
from r7convert.store import hash_file, read_header, read_json


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hash_file(path).sha256 for path in sorted(folder.iterdir())}


def headers(folder: Path) -> dict[str, object]:
    return {name: entry for path in sorted(folder.glob("*.safetensors")) for name, entry in read_header(path).tensors.items()}


def test_f0_is_what_cases_say(tmp_path: Path) -> None:
    sample = write_sample(tmp_path / "f0")
    config = read_json(tmp_path / "f0/config.json")
    geometry = parse_geometry(config)
    assert geometry == sample.geometry
    assert (geometry.hidden, geometry.intermediate, geometry.experts, geometry.layers, geometry.first_moe) == (256, 512, 4, 5, 3)
    quantization = config["quantization_config"]
    assert quantization["quant_method"] == "modelopt"
    assert quantization == read_json(tmp_path / "f0/quantization_config.json")
    block = parse_r7_block(quantization["r7_routed_experts"])
    assert (block.moe_layers, block.k_values) == ((3, 4), (3, 4, 5))
    tail = parse_tail(config["hybrid_tr3_tail"])
    assert (tail.moe_layers, tail.tp, tail.bits, tail.experts) == ((5, 5), 1, 3, 4)
    assert sum(path.stat().st_size for path in (tmp_path / "f0").iterdir()) < 16 << 20
    for name in ("LICENSE", "README.md", "tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "f0" / name).stat().st_size > 0


def test_census_of_a_layer_and_its_sidecar(tmp_path: Path) -> None:
    write_sample(tmp_path / "s", experts=6)
    for layer in (3, 4):
        path = tmp_path / "s" / f"r7-experts-layer-{layer:03d}.safetensors"
        sidecar, header = read_json(path.with_suffix(".json")), read_header(path)
        assert len(header.tensors) == 2 + 6 * 3 * 3
        assert sidecar["shard"] == path.name
        assert sidecar["shard_sha256"] == hash_file(path).sha256
        assert sidecar["payload_sha256"] == hashlib.sha256(path.read_bytes()[header.data_start :]).hexdigest()
        assert len(sidecar["bit_map"]) == 18
        for module, bits in sidecar["bit_map"].items():
            assert header.tensors[f"{module}.trellis"].shape[2] == 16 * bits


def test_tensors_have_the_formats_shapes_and_the_index_finds_them(tmp_path: Path) -> None:
    sample = write_sample(tmp_path / "s", tail_tp=2)
    weight_map = read_json(tmp_path / "s/model.safetensors.index.json")["weight_map"]
    looked = 0
    for file in sorted(set(weight_map.values())):
        with safe_open(tmp_path / "s" / file, "np") as opened:
            assert opened.metadata() == {"format": "pt"}
            assert set(opened.keys()) == {name for name, where in weight_map.items() if where == file}
        for entry in read_header(tmp_path / "s" / file).tensors.values():
            match parse_name(entry.name):
                case ExpertName(proj=proj, field=field, rank=rank) as name:
                    bits = (
                        3
                        if rank is not None
                        else k_table(sample, name.layer)[name.expert][("gate_proj", "up_proj", "down_proj").index(proj)]
                    )
                    assert entry.shape == expected_shape(sample.geometry, proj, field, bits, 1 if rank is None else 2)
                    assert entry.dtype == FIELD_DTYPE[field]
                    looked += 1
    assert looked == 2 * 4 * 9 + 4 * 3 * 2 * 4


def test_values(tmp_path: Path) -> None:
    write_sample(tmp_path / "s", tail_tp=2)
    base = "model.layers.5.mlp"
    with safe_open(tmp_path / "s/model-carrier.safetensors", "pt") as opened:
        assert opened.get_tensor(f"{base}.experts.0.up_proj.rank1.mcg").item() == MCG_MARKER
        suh = [opened.get_tensor(f"{base}.experts.0.gate_proj.rank{rank}.suh") for rank in (0, 1)]
        assert suh[0].equal(suh[1])
        assert not suh[0].equal(opened.get_tensor(f"{base}.experts.1.gate_proj.rank0.suh"))
        svh = opened.get_tensor(f"{base}.experts.0.gate_proj.rank0.svh").float()
        assert svh.abs().min() >= 1
        assert svh.abs().max() < 1.6
        assert 0.3 < (svh > 0).float().mean() < 0.7
        weight = opened.get_tensor(f"{base}.shared_experts.gate_proj.weight").float()
        assert abs(weight.std() * 256**0.5 - 1) < 0.02
        words = opened.get_tensor(f"{base}.experts.0.gate_proj.rank0.trellis").numpy().view(np.uint16)
        assert abs(words.astype(np.float64).mean() / 32767.5 - 1) < 0.02


@pytest.mark.parametrize(
    ("choices", "expected"),
    [
        ({"mode": "uniform"}, [[3, 4, 3, 4], [4, 3, 4, 3]]),
        ({"mode": "odd"}, [[3, 3, 3, 4], [3, 3, 3, 4]]),
        ({"mode": "one-k"}, [[3, 3, 3, 3], [4, 4, 4, 4]]),
        ({"mode": "three-k"}, [[3, 4, 5, 3], [3, 4, 5, 3]]),
        ({"mode": "three-k,odd", "k_values": (3, 4, 5)}, [[3, 4, 5, 3], [3, 3, 3, 4]]),
        ({"mode": "uniform", "k_values": (3, 5)}, [[3, 5, 3, 5], [5, 3, 5, 3]]),
        ({"mode": "odd", "k_values": (4,)}, [[4, 4, 4, 4], [4, 4, 4, 4]]),
    ],
)
def test_modes_of_one_k_an_expert(choices: dict[str, object], expected: list[list[int]]) -> None:
    sample = Sample(**choices)
    for layer, row in zip((3, 4), expected, strict=True):
        assert k_table(sample, layer) == [(k, k, k) for k in row]


def test_mixed_mode_has_the_published_shape() -> None:
    sample = Sample(experts=256, layers=11)
    tables = [k_table(sample, layer) for layer in range(3, 11)]
    assert [len({k for row in table for k in row}) for table in tables] == [3, 2, 3, 2, 3, 2, 3, 2]
    rows = [row for table in tables for row in table]
    assert 0.2 < sum(gate != up for gate, up, _ in rows) / len(rows) < 0.4
    assert sum(down == gate + 1 for gate, _, down in rows) > len(rows) / 2
    assert all(table[0][0] != table[0][1] for table in tables)


@pytest.mark.parametrize(
    "choices",
    [
        {"nested": True},
        {"per_expert_vectors": True},
        {"mtp": "r7"},
        {"mtp": "none"},
        {"experts": 288, "hidden": 128, "intermediate": 128, "layers": 4},
        {"k_values": (3, 5), "mode": "mixed,three-k"},
        {"storage_for_experts": True, "hf_quant_config": True, "split": True},
        {"equal_tail_vectors": True, "tail_tp": 4},
        {"layers": 2, "dense": 0},
    ],
)
def test_variants_are_whole(tmp_path: Path, choices: dict[str, object]) -> None:
    sample = write_sample(tmp_path / "s", **choices)
    config, found = read_json(tmp_path / "s/config.json"), headers(tmp_path / "s")
    assert parse_geometry(config) == sample.geometry
    block = parse_r7_block(config["quantization_config"]["r7_routed_experts"])
    assert block.moe_layers == (sample.r7_layers[0], sample.r7_layers[-1])
    assert ("hybrid_tr3_tail" in config) == (sample.mtp == "tail")
    assert set(read_json(tmp_path / "s/model.safetensors.index.json")["weight_map"]) == set(found)
    root = "model.language_model.layers" if sample.nested else "model.layers"
    assert all(name.startswith(root) for name in found if ".layers." in name)
    moe = {int(name.split(".layers.")[1].split(".")[0]) for name in found if ".mlp.experts." in name}
    assert moe == set(range(sample.dense, sample.layers + (sample.mtp != "none")))
    assert any(name.endswith("experts.0.up_proj.suh") for name in found) == sample.per_expert_vectors
    assert (tmp_path / "s/hf_quant_config.json").exists() == sample.hf_quant_config
    storage = config["quantization_config"]["tensor_storage"]
    assert any(".mlp.experts." in module for module in storage) == sample.storage_for_experts
    assert storage[f"{root}.{sample.dense}.self_attn.o_proj"]["bits_per_weight"] == 6
    for record in storage.values():
        for name, stored in record["stored_tensors"].items():
            assert (tuple(stored["shape"]), stored["n_bytes"]) == (found[name].shape, found[name].nbytes)


def test_same_bytes_in_two_processes_and_other_bytes_for_another_seed(tmp_path: Path) -> None:
    write_sample(tmp_path / "a", seed=7)
    code = f"from pathlib import Path; from r7convert.sample import write_sample; write_sample(Path({str(tmp_path / 'b')!r}), seed=7)"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(Path(__file__).parents[1]), "PYTHONHASHSEED": "1"})
    write_sample(tmp_path / "c", seed=8)
    assert digests(tmp_path / "a") == digests(tmp_path / "b")
    assert digests(tmp_path / "a")["model-carrier.safetensors"] != digests(tmp_path / "c")["model-carrier.safetensors"]
    # The bytes are pinned over versions of numpy too: raw generator words are part of its promise.
    golden = json.loads((Path(__file__).parent / "data/sample_seed7.json").read_text())
    assert {name: digests(tmp_path / "a")[name] for name in golden} == golden


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"mode": "wild"}, "--mode.*got 'wild'"),
        ({"hidden": 200}, "--hidden: expected a multiple of 128, got 200"),
        ({"k_values": (3, 6)}, "--k-values"),
        ({"k_values": (4, 3)}, "--k-values"),
        ({"layers": 3}, "--dense"),
        ({"experts": 0}, "--experts"),
        ({"mtp": "odd"}, "--mtp"),
    ],
)
def test_choices_that_cannot_be(tmp_path: Path, choices: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        write_sample(tmp_path / "s", **choices)
    assert not (tmp_path / "s").exists()


def test_an_illegal_tail_tp_and_a_full_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"\[1, 2, 4\], got 8"):
        write_sample(tmp_path / "s", tail_tp=8)
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="new or empty folder"):
        write_sample(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
