"""What a checkpoint is: every kind told by its signs, and every pair of signs that contradict each other refused with both named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from r7convert.checkpoint import read_checkpoint
from r7convert.errors import FormatError, InputError, UnsupportedError
from r7convert.inspect import inspect
from tests.folders import CARRIER, INDEX, edited_json, edited_shard, sample

SLICED = {"kind": "rank-sliced", "mode": "uniform", "tail_tp": 2}
BLOCKS = ("config.json", "quantization_config.json")


def refused(folder: Path, *words: str, error: type[InputError] = FormatError) -> str:
    with pytest.raises(error) as caught:
        read_checkpoint(folder)
    for word in words:
        assert word in str(caught.value)
    return str(caught.value)


def edit_blocks(folder: Path, **changes: Any) -> None:
    """Keys of the quantization block in both of its places; None takes one out."""
    for name in BLOCKS:
        if (folder / name).exists():
            with edited_json(folder / name) as value:
                block = value.get("quantization_config", value)
                block |= changes
                for key in [key for key, change in changes.items() if change is None]:
                    del block[key]


def edit_tail(folder: Path, **changes: Any) -> None:
    with edited_json(folder / "config.json") as config:
        config["hybrid_tr3_tail"] |= changes


# ---- each kind --------------------------------------------------------------------------------------------------------

KINDS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "r7", "r7_routed_experts over layers 3-4, K 3, 4, 5; hybrid_tr3_tail over layers 5, tp 1, per_expert_v1, K 3"),
    ({"mtp": "r7"}, "r7", "r7_routed_experts over layers 3-5, K 3, 4, 5"),
    ({"mtp": "bf16"}, "r7", "r7_routed_experts over layers 3-4, K 3, 4, 5"),
    (SLICED, "rank-sliced", "hybrid_tr3_tail over layers 3-5, tp 2, per_expert_v1, K 3, 4 by tr3_bits.json"),
    ({**SLICED, "shared_h": True}, "rank-sliced", "hybrid_tr3_tail over layers 3-5, tp 2, shared_h_v1, K 3, 4 by tr3_bits.json"),
    ({**SLICED, "mode": "one-k", "k_values": (6,)}, "rank-sliced", "hybrid_tr3_tail over layers 3-5, tp 2, per_expert_v1, K 6"),
    (
        {**SLICED, "mtp": "bf16", "tail_tp": 4},
        "rank-sliced",
        "hybrid_tr3_tail over layers 3-4, tp 4, per_expert_v1, K 3, 4 by tr3_bits.json",
    ),
    (
        {**SLICED, "mtp": "none", "nested": True},
        "rank-sliced",
        "hybrid_tr3_tail over layers 3-4, tp 2, per_expert_v1, K 3, 4 by tr3_bits.json",
    ),
    ({"kind": "exl3"}, "exl3", "whole matrices declared exl3, codebook mcg, a tensor_storage"),
    ({"kind": "exl3", "storage": False}, "exl3", "whole matrices declared exl3, codebook mcg, no tensor_storage"),
    ({"kind": "exl3", "codebook": "mul1"}, "exl3", "whole matrices declared exl3, codebook mul1, a tensor_storage"),
    ({"kind": "exl3", "k_values": (2, 7, 8), "shared_bits": 6}, "exl3", "whole matrices declared exl3, codebook mcg, a tensor_storage"),
    ({"kind": "exl3", "mtp": "bf16", "nested": True}, "exl3", "whole matrices declared exl3, codebook mcg, a tensor_storage"),
]


@pytest.mark.parametrize(("choices", "kind", "signs"), KINDS)
def test_kinds(tmp_path: Path, choices: dict[str, Any], kind: str, signs: str) -> None:
    found = inspect(read_checkpoint(sample(tmp_path / "s", **choices)))
    assert found.kind == f"{kind}: {signs}"
    assert (found.to_json()["kind"], found.to_json()["signs"]) == (kind, signs)
    layers = {layer.layer: (layer.tp, layer.codebook) for layer in found.checkpoint.experts.values()}
    assert set(layers) == ({3, 4} if choices.get("mtp") in ("bf16", "none") else {3, 4, 5})
    assert layers[3] == ({"rank-sliced": choices.get("tail_tp")}.get(kind), choices.get("codebook", "mcg"))
    assert found.shared_experts == {
        "EXL3 K6" if choices.get("shared_bits") else "BF16": (3, 4) if choices.get("mtp") == "none" else (3, 4, 5)
    }


def test_names_of_files_and_folders_say_nothing(tmp_path: Path) -> None:
    folder = sample(tmp_path / "GLM-R7-TR3-tp8", kind="exl3")
    (folder / CARRIER).rename(folder / "r7-experts-layer-003.safetensors")
    with edited_json(folder / INDEX) as index:
        index["weight_map"] = dict.fromkeys(index["weight_map"], "r7-experts-layer-003.safetensors")
    assert read_checkpoint(folder).kind == "exl3"


def test_a_method_that_only_one_block_has_is_enough(tmp_path: Path) -> None:
    folder = sample(tmp_path / "s", kind="exl3")
    with edited_json(folder / "config.json") as config:
        del config["quantization_config"]
    assert read_checkpoint(folder).kind == "exl3"


def test_original_weights_are_no_kind_of_ours(tmp_path: Path) -> None:
    folder = sample(tmp_path / "s", kind="exl3", mtp="bf16")
    with edited_shard(folder / CARRIER) as tensors:
        for name in [name for name in tensors if name.endswith((".trellis", ".suh", ".svh", ".mcg"))]:
            del tensors[name]
    with edited_json(folder / "config.json") as config:
        del config["quantization_config"]
    (folder / "quantization_config.json").unlink()
    made = read_checkpoint(folder)
    assert (made.kind, dict(made.experts)) == ("other", {})
    assert inspect(made).kind == "other: no routed experts in EXL3"


# ---- what is declared, against what is there ---------------------------------------------------------------------------


def test_rank_names_without_a_tail(tmp_path: Path) -> None:
    folder = sample(tmp_path / "s", **SLICED)
    with edited_json(folder / "config.json") as config:
        del config["hybrid_tr3_tail"]
    words = f"{CARRIER}: model.layers.3.mlp.experts.", ".rank1.", "expected whole matrices, as quant_method exl3", "got ranks 0-1"
    refused(folder, *words, "Without hybrid_tr3_tail")


@pytest.mark.parametrize("choices", [SLICED, {"kind": "exl3"}])
def test_experts_that_nothing_declares(tmp_path: Path, choices: dict[str, Any]) -> None:
    folder = sample(tmp_path / "s", **choices)
    edit_blocks(folder, quant_method="modelopt", tensor_storage=None) if choices == SLICED else edit_blocks(folder, quant_method="modelopt")
    with edited_json(folder / "config.json") as config:
        config.pop("hybrid_tr3_tail", None)
    with edited_json(folder / "quantization_config.json") as value:
        value.pop("tensor_storage", None)
    form = "rank 0" if choices == SLICED else "whole matrices"
    refused(folder, "routed experts of layer 3, which nothing in config.json declares", "and not 'modelopt'", f"got {form}")


def test_a_tail_over_whole_matrices(tmp_path: Path) -> None:
    tail = sample(tmp_path / "tail", **SLICED)
    folder = sample(tmp_path / "s", kind="exl3", mode="uniform")
    with edited_json(tail / "config.json") as theirs, edited_json(folder / "config.json") as config:
        config["hybrid_tr3_tail"] = theirs["hybrid_tr3_tail"]
    words = "layer 3: whole matrices: expected ranks alone, as hybrid_tr3_tail says", f"{CARRIER}: model.layers.3.mlp.experts."
    refused(folder, *words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tp": 4}, ("layer 3: ranks", "expected tp 4, as hybrid_tr3_tail says, got ranks 0-1, without 2-3")),
        ({"tp": 1}, ("layer 3: ranks", "expected tp 1, as hybrid_tr3_tail says, got ranks 0-1", ".rank1.")),
        ({"moe_layers": [3, 4]}, ("layer 5, which neither", "expected hybrid_tr3_tail over layers 3 to 4, got rank 0")),
        ({"moe_layers": [2, 5]}, ("layer 2: no routed experts, though hybrid_tr3_tail covers it",)),
        ({"moe_layers": [3, 6]}, ("hybrid_tr3_tail: moe_layers: expected layers below 6, got [3, 6]",)),
        ({"k_values": [3, 5]}, ("K: expected one of [3, 5], as hybrid_tr3_tail says, got [4]",)),
        ({"experts_per_layer": 8}, ("experts_per_layer: expected 4, got 8",)),
        ({"tensor_schema": "model.layers.{L}.mlp.experts.{E}.{proj}.{field}"}, ("tensor_schema",)),
        (
            {
                "rotation_layout": "shared_h_v1",
                "shared_h_tensor_schema": "model.layers.{L}.mlp.experts.shared_h.{proj}.rank{r}.{suh|svh}",
            },
            ("layer 3: hidden-side vectors: expected shared_h, as hybrid_tr3_tail says, got per_expert", ".rank0.s"),
        ),
    ],
)
def test_a_tail_that_says_otherwise(tmp_path: Path, changes: dict[str, Any], words: tuple[str, ...]) -> None:
    folder = sample(tmp_path / "s", **SLICED)
    edit_tail(folder, **changes)
    refused(folder, *words)


def test_a_tail_that_does_not_say_its_layout(tmp_path: Path) -> None:
    folder = sample(tmp_path / "s", **SLICED, shared_h=True)
    with edited_json(folder / "config.json") as config:
        del config["hybrid_tr3_tail"]["rotation_layout"]
    refused(folder, "expected per_expert, as hybrid_tr3_tail says, got shared_h", "experts.shared_h.")


def test_an_r7_block_over_ranks(tmp_path: Path) -> None:
    r7, folder = sample(tmp_path / "r7"), sample(tmp_path / "s", **SLICED)
    with edited_json(r7 / "config.json") as theirs:
        block = theirs["quantization_config"]["r7_routed_experts"] | {"moe_layers": [3, 5]}
    edit_blocks(folder, r7_routed_experts=block)
    both = "two descriptions of layers 3 to 5: expected one, got r7_routed_experts [3, 5] and hybrid_tr3_tail [3, 5]"
    refused(folder, both)
    with edited_json(folder / "config.json") as config:
        del config["hybrid_tr3_tail"]
    refused(folder, "rank-sliced tensor in a layer that the config calls R7", "as r7_routed_experts says, got ranks 0-1")


def test_the_pointer_to_slabs_beside_a_tail(tmp_path: Path) -> None:
    folder = sample(tmp_path / "s", **SLICED)
    edit_blocks(folder, r7convert_slabs={"tp": 2})
    refused(folder, "r7convert_slabs: expected no hybrid_tr3_tail beside it")
    for tp in ("2", True, 0, 10**15):
        edit_blocks(folder, r7convert_slabs={"tp": tp})
        refused(folder, "r7convert_slabs: tp: expected a positive integer")
    with edited_json(folder / "config.json") as config:
        del config["hybrid_tr3_tail"]
    edit_blocks(folder, r7convert_slabs={"tp": 4})
    refused(folder, "expected tp 4, as r7convert_slabs says, got ranks 0-1")


def test_r7_vectors_without_an_r7_block(tmp_path: Path) -> None:
    folder = sample(tmp_path / "s", mtp="none")
    edit_blocks(folder, r7_routed_experts=None, quant_method="exl3")
    refused(folder, "expected per_expert, as quant_method exl3 says, got r7_shared", ".experts.r7_shared.")


def test_exl3_without_a_trellis(tmp_path: Path) -> None:
    folder = sample(tmp_path / "s", kind="exl3", mtp="bf16")
    with edited_shard(folder / CARRIER) as tensors:
        for name in [name for name in tensors if name.endswith((".trellis", ".suh", ".svh", ".mcg"))]:
            del tensors[name]
        count = len(tensors)
    refused(folder, f"quant_method exl3: expected a trellis in some shard, got none in {count} tensors")


# ---- layers -----------------------------------------------------------------------------------------------------------


def test_a_layer_that_is_missing(tmp_path: Path) -> None:
    folder = sample(tmp_path / "s", kind="exl3", storage=False)
    with edited_shard(folder / CARRIER) as tensors:
        for name in [name for name in tensors if ".layers.4.mlp.experts." in name]:
            del tensors[name]
    refused(folder, "config.json: no routed experts in layers 4: expected 4 in layers 3-4, got layers 3")


def test_experts_in_a_layer_that_is_dense(tmp_path: Path) -> None:
    folder = sample(tmp_path / "s", kind="exl3")
    with edited_json(folder / "config.json") as config:
        config["mlp_layer_types"] = ["dense", "dense", "dense", "sparse", "dense"]
    refused(folder, "routed experts in layers 4, which it says are dense: expected layers 3, got layers 3-4")


@pytest.mark.parametrize("choices", [{}, {"kind": "exl3"}, SLICED])
def test_ranks_of_what_is_no_routed_expert(tmp_path: Path, choices: dict[str, Any]) -> None:
    folder = sample(tmp_path / "s", **choices)
    with edited_shard(folder / CARRIER) as tensors:
        tensors["model.layers.3.mlp.shared_experts.up_proj.rank1.weight"] = tensors.pop("model.layers.3.mlp.shared_experts.up_proj.weight")
    refused(folder, f"{CARRIER}: model.layers.3.mlp.shared_experts.up_proj.rank1.weight: rank 1 of a tensor that is no routed expert's")


# ---- codebooks and modules --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("there", "said"), [("mul1", "mcg"), ("mcg", "mul1")])
def test_a_codebook_that_the_markers_contradict(tmp_path: Path, there: str, said: str) -> None:
    folder = sample(tmp_path / "s", kind="exl3", codebook=there)
    edit_blocks(folder, codebook=said)
    refused(folder, f"expected {said}, as quant_method exl3 with codebook {said} says, got {there}", f".{there}: codebook marker")


def test_a_third_codebook(tmp_path: Path) -> None:
    folder = sample(tmp_path / "s", kind="exl3")
    edit_blocks(folder, codebook="3inst")
    refused(folder, "codebook: expected mcg or mul1, got '3inst'", error=UnsupportedError)


O_PROJ = "model.layers.3.self_attn.o_proj"


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("mul1", torch.zeros((), dtype=torch.int32), (f"{O_PROJ}.mcg and {O_PROJ}.mul1",)),
        ("su", torch.zeros(16, dtype=torch.int16), (f"{O_PROJ}.su: packed signs of an older EXL3",)),
        ("trellis", torch.zeros(16, 16, 40, dtype=torch.int16), (f"{O_PROJ}.trellis: K from the last dimension", "got [16, 16, 40]")),
        ("trellis", torch.zeros(16, 16, 144, dtype=torch.int16), ("K in 1..8, got [16, 16, 144]",)),
        ("trellis", torch.zeros(16, 16, dtype=torch.int16), ("got [16, 16]",)),
    ],
)
def test_modules_outside_the_experts(tmp_path: Path, field: str, value: torch.Tensor, words: tuple[str, ...]) -> None:
    folder = sample(tmp_path / "s", kind="exl3", storage=False)
    with edited_shard(folder / CARRIER) as tensors:
        tensors[f"{O_PROJ}.{field}"] = value
    refused(folder, *words)


# ---- tensor_storage ---------------------------------------------------------------------------------------------------

GATE = "model.layers.3.mlp.experts.1.gate_proj"


@pytest.mark.parametrize(
    ("module", "changes", "words"),
    [
        (GATE, {"bits_per_weight": 8}, (f"{GATE}: bits_per_weight: expected", f"as {CARRIER} has it, got 8")),
        (GATE, {"mul1_multiplier": 2212286765}, (f"mul1_multiplier: expected none, for there is no {GATE}.mul1, got 2212286765",)),
        (GATE, {"mcg_multiplier": 7}, ("mcg_multiplier: expected 3417055213, got 7",)),
        (
            GATE,
            {"stored_tensors": {f"{GATE}.suh": {"shape": [128]}}},
            (f"{GATE}.suh: shape: expected [256], as {CARRIER} has it, got [128]",),
        ),
        (
            GATE,
            {"stored_tensors": {f"{GATE}.bias": {"shape": [512]}}},
            (f"{GATE}.bias: expected a tensor of some shard, got no such tensor",),
        ),
        ("ghost", {"quant_format": "exl3"}, ("ghost: record of an EXL3 module: expected ghost.trellis in some shard, got no such tensor",)),
    ],
)
def test_records_that_are_untrue(tmp_path: Path, module: str, changes: dict[str, Any], words: tuple[str, ...]) -> None:
    folder = sample(tmp_path / "s", kind="exl3")
    with edited_json(folder / "quantization_config.json") as value:
        value["tensor_storage"].setdefault(module, {}).update(changes)
    refused(folder, f"quantization_config.json: tensor_storage: {module}", *words)


@pytest.mark.parametrize("value", [[], "x", 3])
def test_a_storage_that_is_none(tmp_path: Path, value: Any) -> None:
    folder = sample(tmp_path / "s", kind="exl3")
    edit_blocks(folder, tensor_storage=value)
    refused(folder, "config.json: quantization_config: tensor_storage: block: expected an object")


@pytest.mark.parametrize(("choices", "module"), [(SLICED, GATE), ({}, "lm_head"), ({"kind": "exl3"}, "lm_head")])
def test_records_that_an_earlier_form_left_behind_are_a_warning(tmp_path: Path, choices: dict[str, Any], module: str) -> None:
    folder = sample(tmp_path / "s", **choices)
    for name in BLOCKS:
        with edited_json(folder / name) as value:
            block = value.get("quantization_config", value)
            block.setdefault("tensor_storage", {})[module] = {"quant_format": "exl3", "bits_per_weight": 5}
    assert read_checkpoint(folder).warnings == (f"tensor_storage calls 1 modules EXL3 that are not, such as {module}: left out",)


def test_a_record_of_a_merged_payload_that_is_split_today(tmp_path: Path) -> None:
    folder = sample(tmp_path / "s")
    merged = "model.layers.3.mlp.shared_experts.gate_up_proj"
    for name in BLOCKS:
        with edited_json(folder / name) as value:
            value.get("quantization_config", value)["tensor_storage"][merged] = {"quant_format": "exl3", "bits_per_weight": 6}
    assert read_checkpoint(folder).warnings == (f"tensor_storage calls 1 modules EXL3 that are not, such as {merged}: left out",)
    with edited_shard(folder / CARRIER) as tensors:
        del tensors["model.layers.3.mlp.shared_experts.up_proj.weight"]
    refused(folder, f"{merged}: record of an EXL3 module")


def test_under_an_r7_block_the_payload_of_an_expert_counts(tmp_path: Path) -> None:
    folder = sample(tmp_path / "s", storage_for_experts=True)
    for name in BLOCKS:
        with edited_json(folder / name) as value:
            record = value.get("quantization_config", value)["tensor_storage"][GATE]
            record |= {"bits_per_weight": 8, "stored_tensors": {f"{GATE}.suh": {"shape": [256]}}}
    made = read_checkpoint(folder)
    assert GATE not in made.storage
    assert len(made.storage) > 20
    (warning,) = made.warnings
    assert warning.startswith("tensor_storage is untrue of 1 routed matrices, and the payload counts: config.json: quantization_config: ")
    assert f"{GATE}: bits_per_weight: expected" in warning
    for name in BLOCKS:
        with edited_json(folder / name) as value:
            value.get("quantization_config", value)["tensor_storage"]["model.layers.3.self_attn.o_proj"]["bits_per_weight"] = 8
    refused(folder, "model.layers.3.self_attn.o_proj: bits_per_weight: expected 6, as model-carrier.safetensors has it, got 8")


def test_a_multiplier_may_be_signed(tmp_path: Path) -> None:
    folder = sample(tmp_path / "s", kind="exl3")
    with edited_json(folder / "quantization_config.json") as value:
        value["tensor_storage"][GATE]["mcg_multiplier"] -= 1 << 32
    assert read_checkpoint(folder).kind == "exl3"


# ---- the JSON of one kind over the tensors of another -----------------------------------------------------------------

ONE_K = {"mode": "one-k", "k_values": (3,), "mtp": "none", "layers": 4}
FORMS: dict[str, dict[str, Any]] = {
    "r7": {},
    "r7, own vectors": {"per_expert_vectors": True},
    "tp 2": {"kind": "rank-sliced", "tail_tp": 2},
    "tp 4": {"kind": "rank-sliced", "tail_tp": 4},
    "tp 2, shared_h": {"kind": "rank-sliced", "tail_tp": 2, "shared_h": True},
    "mcg": {"kind": "exl3"},
    "mul1": {"kind": "exl3", "codebook": "mul1"},
}
# Whole matrices of codebook mcg with vectors of their own are R7 under an R7 block, and plain EXL3 without one.
# An R7 block takes vectors once a layer or under every expert.
TAKEN = {("r7, own vectors", "mcg"), ("mcg", "r7, own vectors"), ("r7", "r7, own vectors"), ("r7", "mcg"), ("r7, own vectors", "r7")}


@pytest.mark.parametrize("config_of", FORMS)
@pytest.mark.parametrize("tensors_of", FORMS)
def test_no_description_fits_another_form(tmp_path: Path, config_of: str, tensors_of: str) -> None:
    theirs = sample(tmp_path / "theirs", **ONE_K, **FORMS[config_of])
    folder = sample(tmp_path / "s", **ONE_K, **FORMS[tensors_of])
    for name in BLOCKS:
        with edited_json(theirs / name) as their_value, edited_json(folder / name) as value:
            # Records of modules are told apart elsewhere; here the form of the experts is what must tell.
            their_value.get("quantization_config", their_value)["tensor_storage"] = {"lm_head": {"quant_format": "exl3"}}
            value.clear()
            value |= their_value
    if config_of == tensors_of or (config_of, tensors_of) in TAKEN:
        assert read_checkpoint(folder).kind == FORMS[config_of].get("kind", "r7")
    else:
        text = refused(folder, "expected", "got")
        assert "layer 3" in text or "layers.3.mlp.experts." in text
