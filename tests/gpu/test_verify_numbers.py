"""The part numbers with the fused kernel: sound slabs pass with every expert computed, and what the CPU catches is caught here."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from r7convert.evidence import Payloads, gather
from r7convert.findings import Check, Part
from r7convert.format import PROJECTIONS
from r7convert.moe import load_experts
from r7convert.repack import repack
from r7convert.sample import write_sample
from r7convert.slabs import Slabs, open_slabs
from r7convert.verify import verify
from r7convert.verify_layer import BOUND, judge_layer
from r7convert.verify_numbers import read_matrix
from tests import tamper
from tests.random_slabs import Source, random_bits, random_slabs
from tests.test_moe import CORRUPTIONS, make

pytestmark = pytest.mark.gpu

SIZES: dict[str, Any] = {"hidden": 768, "intermediate": 512, "experts": 24, "layers": 5}


@pytest.mark.parametrize(
    ("sample", "choices"),
    [
        ({"mode": "mixed"}, {"target": "slabs", "tp": 1}),
        ({"mode": "mixed", "mtp": "r7"}, {"target": "slabs", "tp": 4}),
        ({"mode": "uniform", "equal_tail_vectors": True}, {"target": "rank-sliced", "tp": 2}),
        ({"mode": "uniform"}, {"target": "rank-sliced", "tp": 4, "reader": "r14"}),
        ({"mode": "mixed", "mtp": "none"}, {"target": "rank-sliced", "tp": 2, "mixed_k": "lift"}),
    ],
    ids=str,
)
def test_sound_folders_pass(tmp_path: Path, sample: dict[str, Any], choices: dict[str, Any]) -> None:
    write_sample(tmp_path / "s", **SIZES, **sample)
    repack(tmp_path / "s", tmp_path / "o", **choices)
    save_file({"x": torch.randn(200, 768)}, tmp_path / "x.safetensors")
    for rest in ({}, {"activations": tmp_path / "x.safetensors"}, {"quick": True}):
        verdict = verify(tmp_path / "o", source=tmp_path / "s", device="cuda", **rest)
        verdict.check()
        part = verdict.parts[3]
        assert any("fused kernel against codec in float64" in line for line in part.scope)
        for layer, row in part.layers.items():
            kept = row["bound"] == BOUND
            assert row["relative_l2"] < (BOUND / 4 if kept else row["bound"]), (layer, row)


def test_a_sample_of_one_layer_is_named_when_one_tile_is_wrong(tmp_path: Path) -> None:
    write_sample(tmp_path / "s", **SIZES, mode="mixed", mtp="none")
    repack(tmp_path / "s", tmp_path / "o", target="slabs", tp=2)
    harm = tamper.with_data(lambda data: bytes(len(data) // 8) + data[len(data) // 8 :])
    tamper.change_tensor(tmp_path / "o", r"layers\.4\..*\.7\.down_proj\.rank1\.trellis", harm)
    tamper.reseal(tmp_path / "o")
    part = verify(tmp_path / "o", source=tmp_path / "s", device="cuda").parts[3]
    lines = [line for check in part.checks.values() for line in check.shown]
    assert any(line.startswith("layer 4: expert 7: rank 1: down_proj: relative L2") for line in lines), lines
    assert len(lines) <= 2, "the layer may pass: one eighth of one expert of 24 on one of two ranks"


def test_tiers_that_outgrow_descriptors_are_judged_by_the_codec(tmp_path: Path) -> None:
    write_sample(tmp_path / "s", hidden=128, intermediate=128, experts=288, layers=4, mtp="none", mode="one-k")
    repack(tmp_path / "s", tmp_path / "o", target="slabs", tp=1)
    verdict = verify(tmp_path / "o", source=tmp_path / "s", device="cuda")
    verdict.check()
    part = verdict.parts[3]
    said = "by the codec, having no descriptors (over 256 matrices of one projection in a tier): layers 3"
    assert said in part.scope, part.scope
    assert part.layers["3"]["relative_l2"] < BOUND / 4


NAMED = {
    "swap_gate_and_up": "gate_proj",
    "exchange_planes": "down_proj",
    "shift_descriptor": "down_proj",
    "rotations_in_tier_order": "gate_proj, up_proj, down_proj",
    "suh_of_another_layer": "gate_proj, up_proj",
    "svh_of_another_layer": "down_proj",
    "one_wrong_k": "(K3, the source's K4)",
    "swap_halves": "gate_proj, up_proj",
}


@pytest.mark.parametrize("corrupt", CORRUPTIONS, ids=lambda f: f.__name__)
def test_each_corruption_is_named(corrupt: Callable[[Slabs], Slabs]) -> None:
    """What tests/test_moe.py knows to break, by the kernel: the verdict, and the expert and projection."""
    slabs, held = make(inner=256)
    source = Source([tuple(replace(m, **{f: getattr(m, f).cuda() for f in ("trellis", "suh", "svh")}) for m in e) for e in held.experts])
    assert judge(slabs, source) == []
    found = judge(corrupt(slabs), source)
    assert re.match(r"layer 3: expert \d: rank 0: ", found[0]), found
    assert any(NAMED[corrupt.__name__] in line for line in found), found
    assert found[-1] == "layer 3"


def test_two_ranks_that_changed_places(tmp_path: Path) -> None:
    write_sample(tmp_path / "s", **SIZES, mode="mixed", mtp="none")
    repack(tmp_path / "s", tmp_path / "o", target="slabs", tp=2)
    ranks = [load_experts(open_slabs(tmp_path / "o", 3, rank), "cuda") for rank in range(2)]
    theirs = gather(tmp_path / "s", [path.name for path in (tmp_path / "s").glob("*.safetensors")], Check("headers", "files")).layer(3)
    with Payloads(tmp_path / "s") as payloads:

        def original(expert: int) -> Any:
            return tuple(read_matrix(theirs, expert, proj, payloads, (768, 512), torch.device("cuda")) for proj in PROJECTIONS)

        for placed, state in ((ranks, "passed"), (ranks[::-1], "failed")):
            part = Part("numbers")
            judge_layer(3, original, range(24), placed, part)
            assert part.state == state
    lines = [line for check in part.checks.values() for line in check.shown]
    assert lines[0].startswith("layer 3: expert 0: rank 0: gate_proj, up_proj, down_proj: relative L2"), lines[0]
    assert part.checks["layers: slabs computed against the source"].failures == 0, "their sum is the same"


def judge(slabs: Slabs, source: Source) -> list[str]:
    part = Part("numbers")
    experts = range(slabs.experts)
    judge_layer(3, source.experts.__getitem__, experts, [load_experts(slabs, "cuda")], part)
    return [line.split(": relative")[0] for check in part.checks.values() for line in check.shown]


@pytest.mark.parametrize(("experts", "per_expert", "two_suh"), [(5, False, True), (37, True, False), (256, False, False)])
def test_mistakes_in_the_tables(experts: int, per_expert: bool, two_suh: bool) -> None:
    bits = random_bits(experts, (3, 4, 5), 7)
    bits[0], bits[1] = (3, 4, 5), (3, 4, 5)  # two matrices of one tier in a row
    slabs, source = random_slabs(bits, hidden=256, inner=128, per_expert=per_expert, two_suh=two_suh, device="cuda")
    assert judge(slabs, source) == []
    assert slabs.descriptors is not None
    descriptors = slabs.descriptors.clone()
    row = 2 * slabs.stride
    descriptors[row + 1] -= 1
    assert judge(replace(slabs, descriptors=descriptors), source)[0] == "layer 3: expert 1: rank 0: down_proj"
    rotations = slabs.rotations.clone()
    rotations[[0, 1]] = rotations[[1, 0]]
    found = judge(replace(slabs, rotations=rotations), source)
    assert found[:2] == [f"layer 3: expert {e}: rank 0: gate_proj, up_proj, down_proj" for e in (0, 1)]
    down = (slabs.down_svh.roll(1, dims=1)).contiguous()
    assert judge(replace(slabs, down_svh=down), source)[0] == "layer 3: expert 0: rank 0: down_proj"
