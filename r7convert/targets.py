"""What each target's JSON says: tail, tier map, tensor_storage, and the configs with a corrected stamp. Pure.

rank-sliced   one hybrid_tr3_tail over every layer with routed experts, a tier map beside it, no R7 block
slabs         no tail (no stock reader may take mixed experts for its own); `r7convert_slabs` points to slabs.json
r7            the R7 block and the tail as they are, stamp corrected; of a source that is not R7, both made anew
exl3          a tensor_storage record for every EXL3 module
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from r7convert.checkpoint import Checkpoint
from r7convert.format import (
    FIELDS,
    HADAMARD,
    MCG_MULTIPLIER,
    PROJECTIONS,
    R7_SCHEMA,
    RANK_SUFFIX,
    SHARED_H_SCHEMA,
    SHARED_H_V1,
    TAIL_FORMAT,
    TENSOR_SCHEMA,
    expert_module,
    tensor_nbytes,
)
from r7convert.moves import LayerPlan
from r7convert.slab_layout import SIDECAR, SIDECAR_FORMAT
from r7convert.stamp import Repaired, StampFiles, repair

Json = Any

TIER_MAP = "tier_map.json"
TIER_FIELD = "bits"
MTP_FIELDS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
_TORCH_NAMES = {"I16": "torch.int16", "F16": "torch.float16", "I32": "torch.int32"}


def tail_layers(checkpoint: Checkpoint, target: str, layers: Sequence[LayerPlan]) -> list[LayerPlan]:
    """The layers that a tail of our own covers: those in ranks, unless the target keeps the source's tail or wants none."""
    wants_one = target == "rank-sliced" or (target == "r7" and checkpoint.r7 is None)
    return [layer for layer in layers if layer.tp is not None] if wants_one else []


def has_tier_map(target: str, tail: Sequence[LayerPlan]) -> bool:
    """Some R7-aware releases do not take a mixed tail: there a single K is said as a number."""
    return bool(tail) and (target == "rank-sliced" or len(_ks(tail)) > 1)


def tail_of(target: str, layers: Sequence[LayerPlan], experts: int) -> Json:
    """One tail over all its layers, with integers where readers truncate.

    Source:  FORMAT.md section 4.
    """
    tail: dict[str, Json] = {"format": TAIL_FORMAT, "codebook": "mcg"}
    if has_tier_map(target, layers):
        tail |= {"bits": "mixed", "k_values": _ks(layers), "bits_per_expert": f"{TIER_MAP}:{TIER_FIELD}"}
    else:
        tail["bits"] = _ks(layers)[0]
    tail |= {
        "experts_per_layer": experts,
        "moe_layers": [layers[0].layer, layers[-1].layer],
        "tensor_schema": TENSOR_SCHEMA,
        "tp": layers[0].tp,
    }
    if layers[0].rotation_layout == SHARED_H_V1:
        tail |= {"rotation_layout": SHARED_H_V1, "shared_h_tensor_schema": SHARED_H_SCHEMA}
    return tail


def _ks(layers: Iterable[LayerPlan]) -> list[int]:
    return sorted({k for layer in layers for row in layer.bits for k in row})


def r7_block_of(layers: Sequence[LayerPlan]) -> Json:
    """`r7_routed_experts` over whole layers that share their vectors.

    Source:  FORMAT.md section 2.
    """
    return {
        "schema": R7_SCHEMA,
        "schema_version": 2,
        "codebook": "mcg",
        "bits": "mixed_tensor",
        "moe_layers": [layers[0].layer, layers[-1].layer],
        "k_values": _ks(layers),
        "tp_slice_quantum": HADAMARD,
        "bit_map_manifests": [bit_map_file(layer) for layer in layers],
    }


def bit_map_file(layer: LayerPlan) -> str:
    """The sidecar of an R7 shard."""
    return f"{layer.files[0].removesuffix('.safetensors')}.json"


def bit_map_of(layer: LayerPlan) -> Json:
    """K of every matrix, as R7's sidecar has it."""
    root = layer.source.root
    return {
        expert_module(root, layer.layer, expert, proj): k
        for expert, row in enumerate(layer.bits)
        for proj, k in zip(PROJECTIONS, row, strict=True)
    }


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
    drop_mtp: bool,
) -> Repaired:
    """config.json and quantization_config.json of the output, with every change for the report.

    Source:  FORMAT.md sections 3, 4 and 8.
    """
    files = StampFiles(checkpoint.config, checkpoint.quantization_file, checkpoint.hf_quant_config)
    if drop_mtp:
        files = _without_mtp(files, checkpoint.geometry.layers)
    bits = [k for layer in layers for row in layer.bits for k in row]
    nominal = round(sum(bits) / len(bits), 2) if bits else None
    storage = tensor_storage(checkpoint, kept, layers if target == "exl3" else (), experts_too=target == "exl3")
    if target == "r7" and checkpoint.r7 is not None:
        tail = files.config.get("hybrid_tr3_tail")
        return repair(files, "r7", tail=tail if tail is None else {**tail, "tp": tp or tail["tp"]}, tensor_storage=storage)
    ranked = tail_layers(checkpoint, target, layers)
    tail = tail_of(target, ranked, checkpoint.geometry.experts) if ranked else None
    extra: dict[str, Json] = {}
    if target == "r7":
        whole = [layer for layer in layers if layer.tp is None]
        extra["r7_routed_experts"] = r7_block_of(whole)
        if tail is None and not storage:  # these readers need a record where there is no tail
            storage = tensor_storage(checkpoint, (), whole, experts_too=True)
    elif target == "slabs":
        numbers = [layer.layer for layer in layers]
        extra["r7convert_slabs"] = {"schema": SIDECAR_FORMAT, "file": SIDECAR, "moe_layers": numbers, "tp": tp}
    return repair(files, target, tail=tail, tensor_storage=storage, bits=nominal, extra=extra)


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
