"""What each target's JSON says: tail, tier map, tensor_storage, and the configs with a corrected stamp. Pure.

rank-sliced   one hybrid_tr3_tail over every layer with routed experts, a tier map beside it, no R7 block
slabs         no tail (no stock reader may take mixed experts for its own); `r7convert_slabs` points to slabs.json
r7            the R7 block and the tail as they are, stamp corrected
exl3          a tensor_storage record for every EXL3 module
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from r7convert.checkpoint import Checkpoint
from r7convert.format import (
    FIELDS,
    MCG_MULTIPLIER,
    RANK_SUFFIX,
    SHARED_H_SCHEMA,
    SHARED_H_V1,
    TAIL_FORMAT,
    TENSOR_SCHEMA,
    tensor_nbytes,
)
from r7convert.moves import LayerPlan
from r7convert.slab_layout import SIDECAR, SIDECAR_FORMAT
from r7convert.stamp import KEEP, Repaired, StampFiles, repair

Json = Any

TIER_MAP = "tier_map.json"
TIER_FIELD = "bits"
MTP_FIELDS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
_TORCH_NAMES = {"I16": "torch.int16", "F16": "torch.float16", "I32": "torch.int32"}


def tail_of(layers: Sequence[LayerPlan], experts: int, tp: int, rotation_layout: str) -> Json:
    """One tail over all layers, with integers where readers truncate.

    Source:  FORMAT.md section 4.
    """
    tail: dict[str, Json] = {
        "format": TAIL_FORMAT,
        "codebook": "mcg",
        "bits": "mixed",
        "k_values": sorted({row[0] for layer in layers for row in layer.bits}),
        "bits_per_expert": f"{TIER_MAP}:{TIER_FIELD}",
        "experts_per_layer": experts,
        "moe_layers": [layers[0].layer, layers[-1].layer],
        "tensor_schema": TENSOR_SCHEMA,
        "tp": tp,
    }
    if rotation_layout == SHARED_H_V1:
        tail |= {"rotation_layout": SHARED_H_V1, "shared_h_tensor_schema": SHARED_H_SCHEMA}
    return tail


def tier_map_of(layers: Sequence[LayerPlan]) -> Json:
    """K of each expert of each layer; a stock reader wants an entry for every layer of the tail's range."""
    return {str(layer.layer): {TIER_FIELD: [row[0] for row in layer.bits]} for layer in layers}


def storage_record(module: str, tensors: Iterable[tuple[str, str, Sequence[int]]]) -> Json:
    """A tensor_storage record from (name, dtype, shape) of a module's tensors."""
    stored: dict[str, Json] = {
        name: {"shape": list(shape), "n_bytes": tensor_nbytes(dtype, shape), "dtype": _TORCH_NAMES.get(dtype, dtype)}
        for name, dtype, shape in tensors
    }
    record: dict[str, Json] = {
        "quant_format": "exl3",
        "stored_tensors": stored,
        "bits_per_weight": stored[f"{module}.trellis"]["shape"][2] // 16,
    }
    return record | ({"mcg_multiplier": MCG_MULTIPLIER} if f"{module}.mcg" in stored else {})


def tensor_storage(checkpoint: Checkpoint, kept: Iterable[str], layers: Sequence[LayerPlan], *, experts_too: bool) -> dict[str, Json]:
    """Records for every EXL3 module of the output: the source's own for carried modules, made where it has none.

    `kept` are the names of carried tensors; `experts_too` adds the routed experts (target exl3).
    """
    said = dict((checkpoint.quantization_file or {}).get("tensor_storage") or {})
    said |= (checkpoint.quantization or {}).get("tensor_storage") or {}
    carried = set(kept)  # the source's record of an expert that gets shared vectors of its own is no longer true
    known = {module: record for module, record in said.items() if f"{module}.trellis" in carried}
    tensors = [(name, checkpoint.tensors[name].dtype, checkpoint.tensors[name].shape) for name in kept]
    if experts_too:
        tensors += [tensor for layer in layers for tensor in layer.tensors(0)]
    modules: dict[str, list[tuple[str, str, tuple[int, ...]]]] = {}
    for name, dtype, shape in tensors:
        module, _, field = name.rpartition(".")
        if field in FIELDS and not RANK_SUFFIX.search(name) and (experts_too or ".mlp.experts." not in name or module in known):
            modules.setdefault(module, []).append((name, dtype, shape))
    return {
        module: known.get(module) or storage_record(module, modules[module])
        for module in sorted(modules)
        if any(name == f"{module}.trellis" for name, _, _ in modules[module])
    }


def repaired_stamp(
    checkpoint: Checkpoint,
    target: str,
    *,
    layers: Sequence[LayerPlan],
    kept: Sequence[str],
    tp: int | None,
    rotation_layout: str,
    drop_mtp: bool,
) -> Repaired:
    """config.json and quantization_config.json of the output, with every change for the report.

    Source:  FORMAT.md sections 3, 4 and 8.
    """
    geometry = checkpoint.geometry
    files = StampFiles(checkpoint.config, checkpoint.quantization_file, checkpoint.hf_quant_config)
    if drop_mtp:
        files = _without_mtp(files, geometry.layers)
    bits = [k for layer in layers for row in layer.bits for k in row]
    nominal = round(sum(bits) / len(bits), 2) if bits else None
    if target == "r7":
        tail = files.config.get("hybrid_tr3_tail")
        storage = tensor_storage(checkpoint, kept, (), experts_too=False)
        return repair(files, "r7", tail=tail if tail is None else {**tail, "tp": tp or tail["tp"]}, tensor_storage=storage)
    storage = tensor_storage(checkpoint, kept, layers, experts_too=target == "exl3")
    if target == "exl3":
        return repair(files, "exl3", tail=None, tensor_storage=storage, bits=nominal)
    assert tp is not None
    if target == "rank-sliced":
        return repair(
            files,
            "rank-sliced",
            tail=tail_of(layers, geometry.experts, tp, rotation_layout) if layers else KEEP,
            tensor_storage=storage,
            bits=nominal,
        )
    pointer = {"schema": SIDECAR_FORMAT, "file": SIDECAR, "moe_layers": [layer.layer for layer in layers], "tp": tp}
    return repair(files, "slabs", tail=None, tensor_storage=storage, bits=nominal, extra={"r7convert_slabs": pointer})


def _without_mtp(files: StampFiles, layers: int) -> StampFiles:
    """The same objects with no MTP layer: its count 0, blocks that cover it shortened or gone."""

    def shortened(block: Json) -> Json:
        if not isinstance(block, Mapping) or not isinstance(block.get("r7_routed_experts"), Mapping):
            return block
        r7 = block["r7_routed_experts"]
        first, last = r7["moe_layers"]
        return {**block, "r7_routed_experts": {**r7, "moe_layers": [first, min(last, layers - 1)]}}

    config = dict(files.config)
    if isinstance(config.get("text_config"), Mapping):
        text = {key: 0 if key in MTP_FIELDS else value for key, value in config["text_config"].items()}
        if "quantization_config" in text:
            text["quantization_config"] = shortened(text["quantization_config"])
        config["text_config"] = text
    config = {key: 0 if key in MTP_FIELDS else value for key, value in config.items()}
    if "quantization_config" in config:
        config["quantization_config"] = shortened(config["quantization_config"])
    tail = config.get("hybrid_tr3_tail")
    if tail is not None and tail["moe_layers"][0] >= layers:
        del config["hybrid_tr3_tail"]
    elif tail is not None:
        config["hybrid_tr3_tail"] = {**tail, "moe_layers": [tail["moe_layers"][0], min(tail["moe_layers"][1], layers - 1)]}
    return StampFiles(config, shortened(files.quantization_file), files.hf_quant_config)
