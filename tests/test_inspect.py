from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from r7convert.checkpoint import build_checkpoint
from r7convert.inspect import Inspection, inspect
from r7convert.repack import repack
from r7convert.restamp import restamp
from r7convert.sample import write_sample
from r7convert.source import Folder
from r7convert.store import read_json, write_json
from tests.test_cli import invoke


class HeadersOnly(Folder):
    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        raise AssertionError(f"payload of {name} was read")


def look(folder: Path) -> Inspection:
    return inspect(build_checkpoint(HeadersOnly(folder)))


def sampled(tmp_path: Path, **choices: Any) -> Inspection:
    write_sample(tmp_path / "s", **choices)
    return look(tmp_path / "s")


def answers(found: Inspection) -> dict[str, tuple[bool, bool]]:
    return {answer.target: (answer.accepted, answer.lossless) for answer in found.targets}


def test_f0(tmp_path: Path) -> None:
    found = sampled(tmp_path)
    assert found.stamp_due
    assert [place.present for place in found.places] == [True, False, True, False]
    assert [(c.layer, c.tp, c.hidden, c.tiers, c.mixed_experts) for c in found.census] == [
        (3, None, "r7_shared", (3, 4, 5), 4),
        (4, None, "r7_shared", (3, 4), 4),
        (5, 1, "per_expert", (3,), 0),
    ]
    assert found.census[0].counts == {"gate_proj": {3: 1, 4: 3}, "up_proj": {4: 2, 5: 2}, "down_proj": {5: 4}}
    assert found.shared_experts == {"BF16": (3, 4, 5)}
    assert found.mtp == "layer 5: rank-sliced, tp 1, K3"
    assert answers(found) == {
        "r7": (True, True),
        "rank-sliced": (False, False),
        "rank-sliced --mixed-k lift": (True, False),
        "rank-sliced --mixed-k fit": (True, False),
        "slabs": (True, True),
        "exl3": (True, True),
    }
    why = {answer.target: answer for answer in found.targets}
    assert why["rank-sliced"].why.startswith("layers 3-4: experts that mix K")
    assert "matrices lifted" in why["rank-sliced --mixed-k lift"].cost


def test_bytes_by_class_sum_up_to_the_payload(tmp_path: Path) -> None:
    found = sampled(tmp_path)
    assert sum(found.bytes_by_class.values()) == found.checkpoint.payload_bytes
    bits = sum(k * n for c in found.census for row in c.counts.values() for k, n in row.items())
    assert found.bytes_by_class["routed experts: trellis"] == bits * 256 * 512 // 8
    assert found.bytes_by_class["shared experts"] == 3 * 3 * 256 * 512 * 2
    assert found.bytes_by_class["dense EXL3"] == 2 * (2 * 6 * 128 * 256 // 8 + 6 * 128 * 256 // 8 + 2 * (128 + 256 + 256 + 256) + 2 * 4)


@pytest.mark.parametrize(
    ("mode", "lossless", "mixed"),
    [("uniform", True, 0), ("one-k", True, 0), ("odd", True, 0), ("three-k", False, 0), ("three-k,uniform", False, 0), ("mixed", False, 8)],
)
def test_what_stock_servers_take_depends_on_k_alone(tmp_path: Path, mode: str, lossless: bool, mixed: int) -> None:
    found = sampled(tmp_path, mode=mode)
    assert sum(layer.mixed_experts for layer in found.census) == mixed
    told = answers(found)
    assert told["rank-sliced"] == (lossless, lossless)
    assert ("rank-sliced --mixed-k lift" in told) != lossless
    assert told["r7"] == told["slabs"] == told["exl3"] == (True, True)
    if mode == "three-k,uniform":
        assert found.targets[1].why.startswith("layers 3: ")


def test_variants(tmp_path: Path) -> None:
    nested = sampled(tmp_path / "nested", nested=True, per_expert_vectors=True, mtp="r7")
    assert nested.checkpoint.root == "model.language_model.layers"
    assert nested.places[1].quant_method == "modelopt"
    assert nested.mtp == "layer 5: whole matrices, K3, K4, K5"
    assert sampled(tmp_path / "none", mtp="none").mtp == "none"
    wide = sampled(tmp_path / "wide", experts=288, hidden=128, intermediate=128, layers=4, mtp="none")
    assert wide.census[0].counts["down_proj"].keys() == {3, 4, 5}
    assert sum(wide.census[0].counts["down_proj"].values()) == 288


def test_an_mtp_declaration_without_tensors_is_in_every_answer(tmp_path: Path) -> None:
    write_sample(tmp_path / "s", mtp="none", mode="uniform")
    config = read_json(tmp_path / "s/config.json")
    write_json(tmp_path / "s/config.json", config | {"num_nextn_predict_layers": 1})
    found = look(tmp_path / "s")
    assert "--drop-mtp" in found.mtp
    assert all(not answer.accepted and "MTP layers" in answer.why for answer in found.targets)


def test_a_repaired_stamp_is_right_and_a_hopeless_one_says_so(tmp_path: Path) -> None:
    write_sample(tmp_path / "s")
    restamp(tmp_path / "s", in_place=True)
    assert look(tmp_path / "s").stamp_due is False
    for name in ("config.json", "quantization_config.json"):
        value = read_json(tmp_path / "s" / name)
        (value.get("quantization_config") or value)["codebook"] = "mul1"
        write_json(tmp_path / "s" / name, value)
    assert look(tmp_path / "s").stamp_due is None


@pytest.mark.parametrize(("target", "tp"), [("r7", None), ("rank-sliced", 2), ("slabs", 4), ("exl3", None)])
def test_what_repack_writes_is_read_again_with_a_right_stamp(tmp_path: Path, target: str, tp: int | None) -> None:
    write_sample(tmp_path / "s", mode="uniform", nested=target == "exl3")
    repack(tmp_path / "s", tmp_path / "o", target=target, tp=tp)
    report = restamp(tmp_path / "o")
    assert (report.target, report.due) == (target, False)
    found = look(tmp_path / "o")
    assert found.stamp_due is False
    assert {layer.tp for layer in found.census[:2]} == {tp}
    assert answers(found)["slabs"] == (True, True)


def test_the_page_and_its_json(tmp_path: Path) -> None:
    write_sample(tmp_path / "s")
    found = json.loads(invoke("inspect", tmp_path / "s", "--json")[0])
    assert found["geometry"]["legal_tp"] == [1, 2, 4]
    assert found["stamp"]["due"] is True
    assert [row["layer"] for row in found["census"]] == [3, 4, 5]
    assert {row["target"] for row in found["targets"]} >= {"r7", "rank-sliced", "slabs", "exl3"}
    page = invoke("inspect", tmp_path / "s")[0]
    words = ("stamp: repair due", "hf_quant_config.json: absent", "K3:1 K4:3", "MTP: layer 5", "rank-sliced --mixed-k lift", "with loss")
    assert all(word in page for word in words)
    assert max(len(line) for line in page.splitlines() if str(tmp_path) not in line) <= 80


def test_many_layers_are_grouped_unless_all_are_asked_for(tmp_path: Path) -> None:
    write_sample(tmp_path / "s", hidden=128, intermediate=128, layers=17, mode="uniform", experts=2)
    short, long = (invoke("inspect", tmp_path / "s", *words)[0].splitlines() for words in ([], ["-v"]))
    assert any(line.startswith("3-16 ") for line in short)
    assert [line.split()[0] for line in long if line[:1].isdigit() and "layers" not in line] == [str(layer) for layer in range(3, 18)]
