"""FORMAT.md's rules as code: names, shapes, geometry, and the JSON blocks, each rule met and broken once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from r7convert.errors import FormatError, UnsupportedError
from r7convert.format import (
    DTYPE_BITS,
    FIELDS,
    MCG_MARKER,
    PROJECTIONS,
    SHARED_H_SCHEMA,
    TENSOR_SCHEMA,
    ExpertName,
    Geometry,
    SharedExpertName,
    SharedVectorName,
    check_tp,
    expected_shape,
    expert_module,
    is_expert_name,
    layer_of,
    legal_tps,
    parse_name,
    parse_r7_block,
    parse_tail,
    rank_name,
    shared_h_name,
    tensor_nbytes,
)

GLM = Geometry(6144, 2048, 256, 1, 78, tuple(range(3, 78)), 1, False)


def test_marker_is_the_signed_form_of_the_page() -> None:
    assert MCG_MARKER == -877912083
    assert MCG_MARKER % (1 << 32) == 0xCBAC1FED


# ---- names ----------------------------------------------------------------------------------------------------------

roots = st.sampled_from(["model.layers", "model.language_model.layers"])


@given(roots, st.integers(0, 99_999), st.integers(0, 99_999), st.sampled_from(PROJECTIONS), st.sampled_from(FIELDS), st.integers(0, 99))
def test_expert_names_are_read_back(root: str, layer: int, expert: int, proj: str, field: str, rank: int) -> None:
    whole = f"{expert_module(root, layer, expert, proj)}.{field}"
    assert parse_name(whole) == ExpertName(root, layer, expert, proj, field)
    assert parse_name(rank_name(root, layer, expert, proj, rank, field)) == ExpertName(root, layer, expert, proj, field, rank)
    assert layer_of(whole) == layer
    shared = parse_name(shared_h_name(root, layer, proj, rank))
    assert shared == SharedVectorName(root, layer, "shared_h", "svh" if proj == "down_proj" else "suh", proj, rank)


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        ("model.layers.3.mlp.experts.r7_shared.gate_up_suh", SharedVectorName("model.layers", 3, "r7", "gate_up_suh")),
        ("model.layers.3.mlp.experts.r7_shared.down_svh", SharedVectorName("model.layers", 3, "r7", "down_svh")),
        ("model.layers.3.mlp.shared_experts.up_proj.weight", SharedExpertName("model.layers", 3, "shared_experts", "up_proj", "weight")),
        (
            "model.layers.3.mlp.shared_expert.down_proj.trellis",
            SharedExpertName("model.layers", 3, "shared_expert", "down_proj", "trellis"),
        ),
        ("model.layers.3.mlp.gate_proj.weight", None),
        ("model.layers.3.mlp.gate.weight", None),
        ("model.layers.03.mlp.experts.0.gate_proj.trellis", None),
        ("model.layers.3.mlp.experts.00.gate_proj.trellis", None),
        ("model.layers.3.mlp.experts.0.gate_proj.rank01.trellis", None),
        ("model.layers.3.mlp.experts.0.gate_proj.trellis.x", None),
        ("xmodel.layersx.3.mlp.experts.0.gate_proj.trellis", None),
        ("lm_head.weight", None),
    ],
)
def test_names(name: str, meaning: Any) -> None:
    assert parse_name(name) == meaning


@given(st.text(max_size=60))
def test_any_text_is_a_name_or_none(name: str) -> None:
    assert parse_name(name) is None or is_expert_name(name) or ".shared_" in name
    layer_of(name)


# ---- shapes ---------------------------------------------------------------------------------------------------------


def test_shapes_of_the_page() -> None:
    assert expected_shape(GLM, "gate_proj", "trellis", 3) == (384, 128, 48)
    assert expected_shape(GLM, "down_proj", "trellis", 5) == (128, 384, 80)
    assert expected_shape(GLM, "up_proj", "trellis", 4, 4) == (384, 32, 64)
    assert expected_shape(GLM, "down_proj", "trellis", 4, 4) == (32, 384, 64)
    assert [expected_shape(GLM, p, "suh", 3, 4) for p in PROJECTIONS] == [(6144,), (6144,), (512,)]
    assert [expected_shape(GLM, p, "svh", 3, 4) for p in PROJECTIONS] == [(512,), (512,), (6144,)]
    assert expected_shape(GLM, "up_proj", "mcg", 3) == ()
    assert legal_tps(2048) == [1, 2, 4, 8, 16]
    assert legal_tps(1536) == [1, 2, 3, 4, 6, 12]
    check_tp(16, 2048)
    with pytest.raises(UnsupportedError, match=r"one of \[1, 2, 4\], got 8"):
        check_tp(8, 512)


@given(st.sampled_from(sorted(DTYPE_BITS)), st.lists(st.integers(0, 9), max_size=4))
def test_bytes_of_a_tensor(dtype: str, shape: list[int]) -> None:
    bits = DTYPE_BITS[dtype]
    for n in shape:
        bits *= n
    if bits % 8:
        with pytest.raises(FormatError, match="whole bytes"):
            tensor_nbytes(dtype, shape)
    else:
        assert tensor_nbytes(dtype, shape) * 8 == bits


# ---- the R7 block ---------------------------------------------------------------------------------------------------

BLOCK = {
    "schema": "r7-complete-v2-checkpoint-v1",
    "codebook": "mcg",
    "bits": "mixed_tensor",
    "moe_layers": [3, 77],
    "k_values": [5, 3, 4],
    "feature": "anything",
    "unknown": {"is": "carried"},
}


def test_r7_block() -> None:
    parsed = parse_r7_block(BLOCK)
    assert (parsed.moe_layers, parsed.k_values) == ((3, 77), (3, 4, 5))
    for k_values in ([3, 4], [3, 5], [4]):
        assert parse_r7_block({**BLOCK, "k_values": k_values}).k_values == tuple(k_values)


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("schema", "glm52-sqg-atoms-v2-routed-v1", UnsupportedError),
        ("schema", "R7-complete-v2-checkpoint-v1", UnsupportedError),
        ("schema", None, UnsupportedError),
        ("codebook", "mul1", UnsupportedError),
        ("sqg_atoms", {}, UnsupportedError),
        ("bits", 3.5, FormatError),
        ("moe_layers", [3], FormatError),
        ("moe_layers", [4, 3], FormatError),
        ("moe_layers", [3, 77.0], FormatError),
        ("moe_layers", [False, 77], FormatError),
        ("moe_layers", [-1, 77], FormatError),
        ("moe_layers", "3-77", FormatError),
        ("k_values", [], FormatError),
        ("k_values", [3, 3], FormatError),
        ("k_values", [6], FormatError),
        ("k_values", [3.0], FormatError),
        ("k_values", [True], FormatError),
        ("k_values", 3, FormatError),
    ],
)
def test_r7_block_refusals(key: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=key.split("_")[0]):
        parse_r7_block({**BLOCK, key: value})


@pytest.mark.parametrize("value", [None, [], "x", 3])
def test_r7_block_that_is_no_object(value: Any) -> None:
    with pytest.raises(FormatError, match="object"):
        parse_r7_block(value)


# ---- the tail -------------------------------------------------------------------------------------------------------

TAIL = {
    "format": "exl3-trellis",
    "bits": 3,
    "codebook": "mcg",
    "experts_per_layer": 256,
    "moe_layers": [78, 78],
    "tensor_schema": TENSOR_SCHEMA,
    "tp": 4,
}
MIXED = {**TAIL, "bits": "mixed", "k_values": [3, 4], "bits_per_expert": "odd:name.json:bits"}


def test_tail() -> None:
    parsed = parse_tail(TAIL)
    assert (parsed.moe_layers, parsed.tp, parsed.experts, parsed.bits, parsed.k_values) == ((78, 78), 4, 256, 3, (3,))
    assert (parsed.map_file, parsed.map_field, parsed.rotation_layout) == (None, None, "per_expert_v1")
    assert parse_tail({**TAIL, "bits": 3.0}).bits == 3
    mixed = parse_tail({**MIXED, "rotation_layout": "shared_h_v1", "shared_h_tensor_schema": SHARED_H_SCHEMA})
    assert (mixed.bits, mixed.map_file, mixed.map_field) == (None, "odd:name.json", "bits")  # split at the LAST colon
    assert mixed.rotation_layout == "shared_h_v1"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("format", "exl3-trelis"),
        ("codebook", "mul1"),
        ("tensor_schema", TENSOR_SCHEMA.replace("rank", "r")),
        ("tp", 0),
        ("tp", 4.0),
        ("tp", True),
        ("tp", None),
        ("experts_per_layer", "256"),
        ("moe_layers", 78),
        ("bits", 7),
        ("bits", 3.5),
        ("bits", True),
        ("bits", "3"),
        ("bits", None),
        ("rotation_layout", "shared_h_v2"),
    ],
)
def test_tail_refusals(key: str, value: Any) -> None:
    with pytest.raises(FormatError, match=key):
        parse_tail({**TAIL, key: value})


@pytest.mark.parametrize(
    ("key", "value"), [("k_values", []), ("k_values", [2]), ("bits_per_expert", "map.json"), ("bits_per_expert", None), ("k_values", None)]
)
def test_mixed_tail_refusals(key: str, value: Any) -> None:
    with pytest.raises(FormatError, match=key):
        parse_tail({**MIXED, key: value})


def test_shared_layout_names_its_schema() -> None:
    with pytest.raises(FormatError, match="shared_h_tensor_schema"):
        parse_tail({**TAIL, "rotation_layout": "shared_h_v1"})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)


@given(json_values, st.dictionaries(st.sampled_from(sorted({**TAIL, **MIXED, **BLOCK})), json_values))
def test_hostile_blocks_meet_our_own_errors(value: Any, changes: dict[str, Any]) -> None:
    for parse, block in ((parse_r7_block, BLOCK), (parse_tail, TAIL), (parse_tail, MIXED)):
        for candidate in ({**block, **changes}, value if isinstance(value, dict) else {}):
            try:
                parse(candidate)
            except (FormatError, UnsupportedError):
                continue
