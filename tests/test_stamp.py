from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from r7convert.errors import FormatError, R7Error, UnsupportedError
from r7convert.format import R7_SCHEMA, TAIL_FORMAT, TENSOR_SCHEMA
from r7convert.stamp import ABSENT, EMBEDDED, FILE, HF_FILE, NESTED, PROVENANCE, Change, StampFiles, diagnose, repair

PRODUCER = {"name": "modelopt", "version": "0.41.0"}
R7 = {"schema": R7_SCHEMA, "codebook": "mcg", "bits": "mixed_tensor", "moe_layers": [3, 4], "k_values": [3, 4], "target_bpw": 3.5}
TAIL = {
    "format": TAIL_FORMAT,
    "codebook": "mcg",
    "bits": 3,
    "experts_per_layer": 4,
    "moe_layers": [5, 5],
    "tensor_schema": TENSOR_SCHEMA,
    "tp": 1,
}
STORAGE = {"model.layers.3.self_attn.o_proj": {"quant_format": "exl3"}, "model.layers.3.mlp.experts.0.up_proj": {"quant_format": "exl3"}}
POISON = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "producer": PRODUCER,
    "config_groups": {"group_0": {}},
    "kv_cache_scheme": None,
    "ignore": ["lm_head"],
    "r7_routed_experts": R7,
    "tensor_storage": STORAGE,
    "some_new_key": {"carried": True},
}


def poisoned(**places: Any) -> StampFiles:
    config = {"hidden_size": 256, "quantization_config": POISON, "hybrid_tr3_tail": TAIL, **places.pop("config", {})}
    return copy.deepcopy(StampFiles(config, **{"quantization_file": POISON, **places}))


def assert_clean(files: StampFiles) -> None:
    block = files.embedded
    assert block is not None
    assert block["quant_method"] == "exl3"
    assert block["codebook"] == "mcg"
    assert not {"producer", "quant_algo", "quantization", "config_groups"} & set(block)
    assert files.quantization_file == block
    assert files.hf_quant_config is None
    assert [place.problems for place in diagnose(files)] == [()] * 4


def test_f0_is_repaired_and_each_changed_field_is_reported() -> None:
    before = poisoned()
    kept = copy.deepcopy(before)
    result = repair(before)
    assert before == kept, "a repair leaves its input alone"
    assert_clean(result.files)
    block = result.files.config["quantization_config"]
    assert block["bits"] == 3.5
    assert block["r7_routed_experts"] == R7
    assert block["ignore"] == ["lm_head"]
    assert block["tensor_storage"] == STORAGE
    assert block["some_new_key"] == {"carried": True}
    assert result.files.config["hybrid_tr3_tail"] == TAIL
    taken = {key: POISON[key] for key in ("quant_method", "quant_algo", "producer", "config_groups", "kv_cache_scheme")}
    assert result.files.config[PROVENANCE] == {"blocks": [{"place": EMBEDDED, "block": taken}]}
    changed = {change.path for change in result.changes if change.file == "config.json"}
    inside = {"quant_method", "quant_algo", "producer", "config_groups", "kv_cache_scheme", "bits", "codebook"}
    assert changed == {f"quantization_config.{key}" for key in inside} | {PROVENANCE}
    assert {change.path for change in result.changes if change.file == FILE} == inside
    assert Change("config.json", "quantization_config.kv_cache_scheme", None, ABSENT) in result.changes
    assert any(str(change) == "config.json: quantization_config.quant_method: 'modelopt' -> 'exl3'" for change in result.changes)


def test_diagnosis_names_all_four_places() -> None:
    files = poisoned(hf_quant_config={"producer": PRODUCER}, config={"text_config": {"quantization_config": POISON}})
    places = {place.name: place for place in diagnose(files)}
    assert list(places) == [EMBEDDED, NESTED, FILE, HF_FILE]
    for name in (EMBEDDED, NESTED, FILE):
        assert places[name].quant_method == "modelopt"
        assert any("producer" in problem for problem in places[name].problems)
    assert "old stamp would come back" in places[HF_FILE].problems[0]
    bare = {place.name: place for place in diagnose(StampFiles({"hidden_size": 256}))}
    assert not any(place.present for place in bare.values())
    assert "absent" in bare[EMBEDDED].problems[0]
    assert bare[NESTED].problems == bare[HF_FILE].problems == ()


@pytest.mark.parametrize("place", [EMBEDDED, NESTED, FILE])
def test_a_block_in_any_one_place_is_enough(place: str) -> None:
    config: dict[str, Any] = {"hidden_size": 256, "text_config": {"hidden_size": 256}}
    if place == EMBEDDED:
        config["quantization_config"] = POISON
    if place == NESTED:
        config["text_config"]["quantization_config"] = POISON
    files = repair(StampFiles(config, POISON if place == FILE else None)).files
    assert_clean(files)
    assert files.embedded["r7_routed_experts"] == R7  # type: ignore[index]
    assert (files.nested is not None) == (place == NESTED)
    assert files.nested in (None, files.embedded)
    assert len(files.config[PROVENANCE]["blocks"]) == 1


def test_hf_quant_config_goes_to_provenance_whole() -> None:
    old = {"producer": PRODUCER, "quantization": {"quant_algo": "NVFP4"}}
    result = repair(poisoned(hf_quant_config=old))
    assert {"place": HF_FILE, "block": old} in result.files.config[PROVENANCE]["blocks"]
    assert Change(HF_FILE, "", old, ABSENT) in result.changes


@st.composite
def stamps(draw: Any) -> StampFiles:
    def block() -> Any:
        keys = draw(st.sets(st.sampled_from(sorted(POISON)))) | {"r7_routed_experts"}
        return {key: POISON[key] for key in draw(st.permutations(sorted(keys)))} | draw(
            st.sampled_from(
                [{}, {"quant_method": "exl3"}, {"bits": 4}, {"codebook": "mcg"}, {"quant_method": "exl3", "producer": PRODUCER}]
            )
        )

    config: dict[str, Any] = {"quantization_config": block()}
    if draw(st.booleans()):
        config["text_config"] = {"quantization_config": block()}
    if draw(st.booleans()):
        config["hybrid_tr3_tail"] = TAIL | {"bits": draw(st.sampled_from([3, 3.0]))}
    return StampFiles(config, block() if draw(st.booleans()) else None, {"producer": PRODUCER} if draw(st.booleans()) else None)


@given(stamps(), st.sampled_from(["r7", "rank-sliced", "exl3"]))
def test_repair_is_idempotent_and_finishes_a_repair_cut_short(files: StampFiles, target: str) -> None:
    try:
        once = repair(files, target)
    except UnsupportedError:
        return
    again = repair(once.files, target)
    assert again.changes == ()
    assert (again.files, list(again.files.config["quantization_config"])) == (once.files, list(once.files.config["quantization_config"]))
    # A kill after config.json, and after quantization_config.json, in the order in which restamp replaces them.
    for cut in (
        StampFiles(once.files.config, files.quantization_file, files.hf_quant_config),
        StampFiles(once.files.config, once.files.quantization_file, files.hf_quant_config),
    ):
        assert repair(cut, target).files == once.files


def test_sliced_targets_keep_no_r7_block_and_no_storage_of_experts() -> None:
    files = repair(poisoned(), "rank-sliced").files
    assert_clean(files)
    assert "r7_routed_experts" not in files.embedded  # type: ignore[operator]
    assert list(files.embedded["tensor_storage"]) == ["model.layers.3.self_attn.o_proj"]  # type: ignore[index]
    assert {"place": f"{EMBEDDED}.r7_routed_experts", "block": R7} in files.config[PROVENANCE]["blocks"]


def test_what_a_plan_hands_over_is_taken() -> None:
    tail = TAIL | {"moe_layers": [3, 5]}
    files = repair(poisoned(), "slabs", tail=tail, tensor_storage=STORAGE, bits=3.41, extra={"r7convert_slabs": "slabs.json"}).files
    assert_clean(files)
    assert files.config["hybrid_tr3_tail"] == tail
    assert files.embedded["bits"] == 3.41  # type: ignore[index]
    assert files.embedded["tensor_storage"] == STORAGE  # type: ignore[index]
    assert files.embedded["r7convert_slabs"] == "slabs.json"  # type: ignore[index]
    assert "hybrid_tr3_tail" not in repair(poisoned(), "exl3", tail=None).files.config


@pytest.mark.parametrize(
    ("block", "tail", "bits"),
    [
        ({"bits": 4}, TAIL, 4),
        ({"bits": "mixed_tensor"}, TAIL, 3.5),
        ({"bits": True}, TAIL, 3.5),
        ({"r7_routed_experts": {k: v for k, v in R7.items() if k != "target_bpw"}}, TAIL, 3),
        ({"r7_routed_experts": {k: v for k, v in R7.items() if k != "target_bpw"}}, None, 3.5),
    ],
)
def test_bits_is_a_number_from_the_best_place(block: dict[str, Any], tail: Any, bits: float) -> None:
    files = StampFiles({"quantization_config": POISON | block, "hybrid_tr3_tail": tail})
    found = repair(files).files.config["quantization_config"]["bits"]
    assert (found, type(found)) == (bits, type(bits))


def test_a_tails_whole_float_becomes_the_integer_readers_truncate_to() -> None:
    result = repair(poisoned(config={"hybrid_tr3_tail": TAIL | {"bits": 3.0}}))
    assert Change("config.json", "hybrid_tr3_tail.bits", 3.0, 3) in result.changes
    assert type(result.files.config["hybrid_tr3_tail"]["bits"]) is int


@pytest.mark.parametrize(
    ("files", "target", "error", "words"),
    [
        (StampFiles({"quantization_config": {"quant_method": "modelopt"}}), "r7", UnsupportedError, "r7_routed_experts: expected one"),
        (StampFiles({"quantization_config": {"quant_method": "awq"}}), "exl3", UnsupportedError, "tensor_storage: expected one"),
        (StampFiles({"quantization_config": POISON}), "rank-sliced", UnsupportedError, "hybrid_tr3_tail: expected one"),
        (StampFiles({"quantization_config": POISON}), "slabs", UnsupportedError, "r7convert_slabs"),
        (StampFiles({"quantization_config": POISON | {"codebook": "mul1"}}), "r7", UnsupportedError, "codebook: expected mcg, got 'mul1'"),
        (StampFiles({"quantization_config": [1]}), "r7", FormatError, "expected an object, got list"),
        (
            StampFiles({"quantization_config": POISON}, POISON | {"r7_routed_experts": R7 | {"k_values": [3]}}),
            "r7",
            FormatError,
            "quantization_config.json: r7_routed_experts: two blocks that differ",
        ),
        (
            StampFiles({"quantization_config": POISON | {"r7_routed_experts": R7 | {"schema": "glm52-sqg-atoms-v2-routed-v1"}}}),
            "r7",
            UnsupportedError,
            "schema",
        ),
        (poisoned(config={"hybrid_tr3_tail": TAIL | {"format": "exl3-trelis"}}), "r7", FormatError, "format: expected exl3-trellis"),
    ],
)
def test_what_cannot_be_stamped_is_refused_by_name(files: StampFiles, target: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        repair(files, target)


JSONS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 9)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["mcg", "exl3", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["bits", "k_values", "blocks", "x"]), inner, max_size=3),
    max_leaves=6,
)


@given(st.data(), st.sampled_from(["r7", "rank-sliced", "slabs", "exl3"]))
def test_hostile_values_are_refused_or_repaired_for_good(data: Any, target: str) -> None:
    """Whatever stands in a field, the answer is an error of ours or a repair that needs no second one."""
    block, config = dict(POISON), {"hybrid_tr3_tail": TAIL, "text_config": {}, PROVENANCE: {}}
    for place, keys in ((block, [*POISON, "bits", "codebook", "r7convert_slabs"]), (config, list(config))):
        for key in data.draw(st.sets(st.sampled_from(keys), max_size=2)):
            place[key] = data.draw(JSONS)
    config["quantization_config"] = data.draw(st.sampled_from([block, block, block, None, [], "exl3"]))
    try:
        diagnose(StampFiles(config, block))
        once = repair(StampFiles(config, block), target)
    except R7Error:
        return
    assert repair(once.files, target).changes == ()
    assert [place.problems for place in diagnose(once.files)] == [()] * 4


def test_notes_say_what_r7_readers_need() -> None:
    alone = {key: value for key, value in POISON.items() if key != "tensor_storage"}
    assert "non-empty tensor_storage" in repair(StampFiles({"quantization_config": alone})).notes[0]
    assert "tp 4" in repair(poisoned(config={"hybrid_tr3_tail": TAIL | {"tp": 4}})).notes[0]
    assert repair(poisoned()).notes == ()
