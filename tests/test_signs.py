"""One layer of routed experts: every contradiction inside it, or with what config.json says of it, is refused with both signs named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from r7convert.checkpoint import read_checkpoint
from r7convert.errors import FormatError
from tests.folders import CARRIER, edited_shard, sample

Tensors = dict[str, torch.Tensor]
EXL3 = {"kind": "exl3", "storage": False}
SLICED = {"kind": "rank-sliced", "mode": "uniform", "tail_tp": 2}
BASE = "model.layers.3.mlp.experts"
GATE = f"{BASE}.1.gate_proj"


def harmed(folder: Path, harm: Callable[[Tensors], None], **choices: Any) -> str:
    """What reading says of a good sample after `harm` to its shard; the sample is read first, to show that it was good."""
    sample(folder, **choices)
    assert len(read_checkpoint(folder).experts) == 3
    with edited_shard(folder / CARRIER) as tensors:
        harm(tensors)
    with pytest.raises(FormatError) as caught:
        read_checkpoint(folder)
    return str(caught.value)


def rename(tensors: Tensors, old: str, new: str) -> None:
    found = [name for name in tensors if old in name]
    assert found
    for name in found:
        tensors[name.replace(old, new)] = tensors.pop(name)


# ---- layouts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choices", [EXL3, SLICED])
def test_whole_and_ranked_in_one_layer(tmp_path: Path, choices: dict[str, Any]) -> None:
    old, new = (f"{GATE}.", f"{GATE}.rank0.") if choices == EXL3 else (f"{GATE}.rank0.", f"{GATE}.")
    text = harmed(tmp_path / "s", lambda tensors: rename(tensors, old, new), **choices)
    if choices == EXL3:
        assert f"{CARRIER}: {GATE}.rank0." in text
        assert f"expected whole matrices, as quant_method exl3 says, got ranks 0, beside {CARRIER}: {BASE}.0." in text
    else:
        assert "layer 3: two layouts of its experts: expected ranks alone, as hybrid_tr3_tail says" in text
        assert f"got {CARRIER}: {GATE}.mcg, beside {CARRIER}: {BASE}.0." in text


def test_two_spellings_in_one_layer(tmp_path: Path) -> None:
    def harm(tensors: Tensors) -> None:
        rename(tensors, f"{GATE}.", "model.layers.3.block_sparse_moe.experts.1.w1.")

    text = harmed(tmp_path / "s", harm, **EXL3)
    assert "layer 3: names of its experts: expected one spelling" in text
    assert f"{BASE}.0." in text
    assert "block_sparse_moe.experts.1.w1." in text


def test_two_roots(tmp_path: Path) -> None:
    text = harmed(tmp_path / "s", lambda tensors: rename(tensors, "model.layers.3.mlp.", "model.language_model.layers.3.mlp."), **EXL3)
    assert "tensor root: expected one, got ['model.language_model.layers', 'model.layers']" in text


def test_words_of_two_families_in_one_name(tmp_path: Path) -> None:
    text = harmed(tmp_path / "s", lambda tensors: rename(tensors, f"{GATE}.", f"{BASE}.1.w1."), **EXL3)
    assert f"{BASE}.1.w1." in text
    assert "unknown tensor among the routed experts of an EXL3 layer" in text


# ---- ranks ------------------------------------------------------------------------------------------------------------


def test_a_rank_that_is_missing_everywhere(tmp_path: Path) -> None:
    def harm(tensors: Tensors) -> None:
        for name in [name for name in tensors if ".layers.3." in name and ".rank1." in name]:
            del tensors[name]

    assert "layer 3: ranks of the routed experts: expected tp 2, as hybrid_tr3_tail says, got ranks 0, without 1" in harmed(
        tmp_path / "s", harm, **SLICED
    )


def test_a_rank_that_one_matrix_lacks(tmp_path: Path) -> None:
    def harm(tensors: Tensors) -> None:
        del tensors[f"{GATE}.rank1.trellis"], tensors[f"{GATE}.rank1.mcg"]

    text = harmed(tmp_path / "s", harm, **SLICED)
    assert f"{GATE}.rank1.trellis: missing tensor" in text
    assert f"{GATE}.rank1.mcg: missing tensor" in text


@pytest.mark.parametrize("rank", [2, 7, 1000])
def test_a_rank_beyond_the_tp(tmp_path: Path, rank: int) -> None:
    def harm(tensors: Tensors) -> None:
        tensors[f"{GATE}.rank{rank}.trellis"] = tensors[f"{GATE}.rank1.trellis"].clone()

    text = harmed(tmp_path / "s", harm, **SLICED)
    assert (
        f"expected tp 2, as hybrid_tr3_tail says, got ranks 0-{'2' if rank == 2 else f'1, {rank}'}, {CARRIER}: {GATE}.rank{rank}." in text
    )


@pytest.mark.parametrize("word", ["rank01", "rank-1", "rank", "rank1e0", "rank１"])
def test_a_rank_that_is_no_number(tmp_path: Path, word: str) -> None:
    def harm(tensors: Tensors) -> None:
        tensors[f"{GATE}.{word}.trellis"] = tensors[f"{GATE}.rank1.trellis"].clone()

    text = harmed(tmp_path / "s", harm, **SLICED)
    assert f"{GATE}.{word}.trellis: unknown tensor among the routed experts" in text


def test_a_rank_of_another_k(tmp_path: Path) -> None:
    def harm(tensors: Tensors) -> None:
        rows, cols, words = tensors[f"{GATE}.rank1.trellis"].shape
        tensors[f"{GATE}.rank1.trellis"] = torch.zeros(rows, cols, words + 16, dtype=torch.int16)

    assert f"{GATE}.rank1.trellis: shape" in harmed(tmp_path / "s", harm, **SLICED)


# ---- hidden-side vectors ----------------------------------------------------------------------------------------------


def test_own_and_shared_vectors_together(tmp_path: Path) -> None:
    def harm(tensors: Tensors) -> None:
        for proj, field in (("gate_proj", "suh"), ("up_proj", "suh"), ("down_proj", "svh")):
            for rank in (0, 1):
                tensors[f"{BASE}.shared_h.{proj}.rank{rank}.{field}"] = torch.ones(256, dtype=torch.float16)

    text = harmed(tmp_path / "s", harm, **SLICED)
    assert "layer 3: hidden-side vectors: expected under every expert or once a layer, got" in text
    assert f"{BASE}.0." in text
    assert f"{BASE}.shared_h." in text


@pytest.mark.parametrize(
    ("name", "choices", "words"),
    [
        (f"{BASE}.r7_shared.gate_up_suh", SLICED, ("r7_shared.gate_up_suh: shared hidden-side vector", "got r7 over tp 2")),
        (
            f"{BASE}.shared_h.up_proj.rank0.suh",
            EXL3,
            ("shared_h.up_proj.rank0.suh: shared hidden-side vector", "got shared_h over tp none"),
        ),
    ],
)
def test_shared_vectors_of_the_other_form(tmp_path: Path, name: str, choices: dict[str, Any], words: tuple[str, ...]) -> None:
    def harm(tensors: Tensors) -> None:
        tensors[name] = torch.ones(256, dtype=torch.float16)

    text = harmed(tmp_path / "s", harm, **choices)
    assert all(word in text for word in words)


# ---- codebooks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("both", [True, False])
@pytest.mark.parametrize("codebook", ["mcg", "mul1"])
def test_mcg_and_mul1_in_one_layer(tmp_path: Path, both: bool, codebook: str) -> None:
    other = "mul1" if codebook == "mcg" else "mcg"

    def harm(tensors: Tensors) -> None:
        tensors[f"{GATE}.{other}"] = tensors[f"{GATE}.{codebook}"] if both else tensors.pop(f"{GATE}.{codebook}")
        tensors[f"{GATE}.{other}"] = tensors[f"{GATE}.{other}"].clone()

    text = harmed(tmp_path / "s", harm, **EXL3, codebook=codebook)
    assert "layer 3: codebook markers: expected one codebook" in text
    assert f"{CARRIER}: {GATE}.{other}" in text
    assert f".{codebook}" in text.replace(f"{GATE}.{other}", "")


def test_mul1_in_ranks(tmp_path: Path) -> None:
    def harm(tensors: Tensors) -> None:
        for name in [name for name in tensors if ".mlp.experts." in name and name.endswith(".mcg")]:
            tensors[name.removesuffix("mcg") + "mul1"] = tensors.pop(name)

    text = harmed(tmp_path / "s", harm, **SLICED)
    assert "codebook marker: expected mcg, as hybrid_tr3_tail says, got mul1, another codebook" in text


def test_no_marker_at_all(tmp_path: Path) -> None:
    def harm(tensors: Tensors) -> None:
        for name in [name for name in tensors if f"{BASE}." in name and name.endswith(".mcg")]:
            del tensors[name]

    text = harmed(tmp_path / "s", harm, **EXL3)
    assert "layer 3: codebook markers: expected mcg or mul1 at every matrix, got none" in text
    assert len(text.splitlines()) == 1


# ---- matrices ---------------------------------------------------------------------------------------------------------


def test_packed_signs_of_an_older_exl3(tmp_path: Path) -> None:
    def harm(tensors: Tensors) -> None:
        for name in [name for name in tensors if f"{BASE}." in name and name.endswith(("suh", "svh"))]:
            tensors[name.removesuffix("h")] = torch.zeros(tensors.pop(name).shape[0] // 16, dtype=torch.int16)

    text = harmed(tmp_path / "s", harm, **EXL3)
    assert "missing tensor: expected suh of gate_proj, got su, packed signs of an older EXL3" in text


def test_half_a_bit(tmp_path: Path) -> None:
    def harm(tensors: Tensors) -> None:
        tensors[f"{GATE}.trellis"] = torch.zeros(16, 32, 16 * 3 + 8, dtype=torch.int16)

    text = harmed(tmp_path / "s", harm, **EXL3, codebook="mul1")
    assert f"{GATE}.trellis: K from the last dimension: expected 16*K, K in 1..8, got [16, 32, 56]. Half a bit" in text


def test_counts_that_differ_by_layer(tmp_path: Path) -> None:
    def harm(tensors: Tensors) -> None:
        for name in [name for name in tensors if f"{BASE}.3." in name]:
            del tensors[name]
        rename(tensors, ".layers.4.mlp.experts.2.", ".layers.4.mlp.experts.9.")

    text = harmed(tmp_path / "s", harm, **EXL3)
    assert "layer 3: routed experts: expected 4, as config.json says, got 3 (missing 3)" in text
    assert "layer 4: routed experts: expected 4, as config.json says, got 4 (missing 2) (unknown 9)" in text
