"""Sizes from config.json in every family's words; two words that differ are refused, never ranked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from r7convert import families
from r7convert.errors import FormatError, InputError, UnsupportedError
from r7convert.format import Geometry
from r7convert.geometry import parse_geometry

GLM = Geometry(6144, 2048, 256, 1, 78, tuple(range(3, 78)), 1, False)
CONFIG = {
    "hidden_size": 6144,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_hidden_layers": 78,
    "first_k_dense_replace": 3,
    "num_nextn_predict_layers": 1,
}


def of(layers: int, **keys: Any) -> Geometry:
    return parse_geometry({"hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 8, "num_hidden_layers": layers, **keys})


def test_geometry() -> None:
    assert parse_geometry(CONFIG) == GLM
    assert GLM.first_moe == 3
    assert parse_geometry({"text_config": CONFIG, "hidden_size": 1}) == replace(GLM, nested=True)
    assert parse_geometry({"num_experts": 8, **{k: v for k, v in CONFIG.items() if k != "n_routed_experts"}}).experts == 8


@pytest.mark.parametrize("value", [None, True, 6144.0, "6144", 0, -1, [6144]])
@pytest.mark.parametrize("key", ["hidden_size", "moe_intermediate_size", "n_routed_experts", "num_hidden_layers"])
def test_sizes_are_real_integers(key: str, value: Any) -> None:
    with pytest.raises(FormatError, match=key):
        parse_geometry({**CONFIG, key: value})


@pytest.mark.parametrize("key", ["hidden_size", "moe_intermediate_size"])
def test_sizes_are_whole_hadamard_blocks(key: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{key}.*128.*6208"):
        parse_geometry({**CONFIG, key: 6208})


def test_no_list_of_layers_fills_memory() -> None:
    with pytest.raises(FormatError, match="num_hidden_layers: expected an integer from 1 to 4096, got 1000000000000"):
        of(10**12)


# ---- the words of families --------------------------------------------------------------------------------------------

# Keys as the families' published configs have them.
PUBLISHED: dict[str, tuple[dict[str, Any], Geometry]] = {
    "DeepSeek-V3": (
        {
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_hidden_layers": 61,
            "first_k_dense_replace": 3,
            "moe_layer_freq": 1,
            "num_nextn_predict_layers": 1,
        },
        Geometry(7168, 2048, 256, 1, 61, tuple(range(3, 61)), 1, False),
    ),
    "Qwen3-30B-A3B": (
        {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_hidden_layers": 48,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
        Geometry(2048, 768, 128, 0, 48, tuple(range(48)), 0, False),
    ),
    "Qwen3-Next-80B-A3B": (
        {
            "hidden_size": 2048,
            "intermediate_size": 5120,
            "moe_intermediate_size": 512,
            "num_experts": 512,
            "num_hidden_layers": 48,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "shared_expert_intermediate_size": 512,
        },
        Geometry(2048, 512, 512, 1, 48, tuple(range(48)), 0, False),
    ),
    "MiniMax-M2": (
        {
            "hidden_size": 3072,
            "intermediate_size": 1536,
            "num_local_experts": 256,
            "num_hidden_layers": 62,
            "num_mtp_modules": 3,
            "use_mtp": True,
            "shared_intermediate_size": 0,
        },
        Geometry(3072, 1536, 256, 0, 62, tuple(range(62)), 0, False),
    ),
    "Kimi-Linear-48B-A3B": (
        {
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "moe_intermediate_size": 1024,
            "num_experts": 256,
            "num_shared_experts": 1,
            "num_hidden_layers": 27,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "num_nextn_predict_layers": 0,
        },
        Geometry(2304, 1024, 256, 1, 27, tuple(range(1, 27)), 0, False),
    ),
}


@pytest.mark.parametrize("model", PUBLISHED)
def test_published_configs(model: str) -> None:
    config, geometry = PUBLISHED[model]
    assert parse_geometry(config) == geometry
    assert parse_geometry({"model_type": "wrapper", "text_config": config}) == replace(geometry, nested=True)


@pytest.mark.parametrize(
    ("keys", "moe_layers"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"first_k_dense_replace": 2}, [2, 3, 4, 5]),
        ({"first_k_dense_replace": 0}, [0, 1, 2, 3, 4, 5]),
        ({"first_k_dense_replace": 6}, []),
        ({"num_dense_layers": 2}, [2, 3, 4, 5]),
        ({"moe_layer_start_index": 1}, [1, 2, 3, 4, 5]),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, [2, 4]),
        ({"moe_layer_freq": [0, 1, 1, 0, 1, 1]}, [1, 2, 4, 5]),
        ({"first_k_dense_replace": 2, "moe_layer_freq": [0, 1, 1, 0, 1, 1]}, [2, 4, 5]),
        ({"decoder_sparse_step": 2}, [1, 3, 5]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, [1, 5]),
        ({"mlp_only_layers": [0, 5]}, [1, 2, 3, 4]),
        ({"mlp_only_layers": None, "first_k_dense_replace": None}, [0, 1, 2, 3, 4, 5]),
        ({"mlp_layer_types": ["dense", "sparse", "dense", "sparse", "sparse", "sparse"]}, [1, 3, 4, 5]),
        ({"mlp_layer_types": ["dense"] * 5 + ["sparse"] * 2}, [5]),
    ],
)
def test_layers_with_experts(keys: dict[str, Any], moe_layers: list[int]) -> None:
    assert list(of(6, **keys).moe_layers) == moe_layers


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"moe_layer_freq": [1, 1]}, "moe_layer_freq: expected 6 of 0 and 1, one a layer"),
        ({"moe_layer_freq": [1, 1, 1, 1, 1, 2]}, "moe_layer_freq: expected 6 of 0 and 1"),
        ({"moe_layer_freq": [1, 1, 1, 1, 1, True]}, "moe_layer_freq: expected 6 of 0 and 1"),
        ({"moe_layer_freq": 0}, "moe_layer_freq: expected an integer from 1 to"),
        ({"mlp_only_layers": [6]}, "mlp_only_layers: expected layers below 6"),
        ({"mlp_only_layers": 3}, "mlp_only_layers"),
        ({"mlp_layer_types": ["dense", "moe"]}, "mlp_layer_types: expected 6 of 'dense' and 'sparse'"),
        ({"first_k_dense_replace": 1.0}, "first_k_dense_replace"),
        ({"n_routed_experts": 4}, "keys of one size: expected one value, got n_routed_experts 4 and num_experts 8"),
        ({"num_nextn_predict_layers": 1, "mtp_num_hidden_layers": 2}, "got num_nextn_predict_layers 1 and mtp_num_hidden_layers 2"),
    ],
)
def test_words_that_cannot_be(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(FormatError, match=words):
        of(6, **keys)


def test_words_that_agree() -> None:
    assert of(6, n_routed_experts=8, num_local_experts=8).experts == 8
    assert of(6, num_experts=[8] * 6, moe_intermediate_size=[128] * 6) == of(6)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"num_experts": [8, 8, 4, 4, 8, 8]}, "num_experts: expected one number for all layers, got 4 in layers 2-3; 8 in layers 0-1, 4-5"),
        ({"moe_intermediate_size": [128, 128, 128, 128, 128, 256]}, "got 128 in layers 0-4; 256 in layers 5. Counts and sizes that differ"),
    ],
)
def test_counts_and_sizes_that_differ_by_layer(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        of(6, **keys)


KEYS = [
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "text_config",
    *families.ROUTED_EXPERTS,
    *families.EXPERT_SIZE,
    *families.SHARED_EXPERTS,
    *families.MTP_LAYERS,
    *families.FIRST_DENSE,
    families.SHARED_EXPERT_SIZE,
    families.FREQUENCY,
    families.STEP,
    families.DENSE_ONLY,
    families.LAYER_TYPES,
]
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from([128, 256, 1, 6, [128] * 6, ["dense"] * 6]),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(KEYS), values, max_size=8))
def test_any_config_is_read_or_refused(changes: dict[str, Any]) -> None:
    sound = {"hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 8, "num_hidden_layers": 6}
    try:
        made = parse_geometry({**sound, **changes})
    except InputError:
        return
    assert made.hidden % 128 == made.intermediate % 128 == 0
    assert all(0 <= layer < made.layers for layer in made.moe_layers)
