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
    HADAMARD,
    MCG_MULTIPLIER,
    MUL1_MULTIPLIER,
    PROJECTIONS,
    R7_SCHEMA,
    RANK_SUFFIX,
    SHARED_H_SCHEMA,
    SHARED_H_V1,
    TAIL_FORMAT,
    TENSOR_SCHEMA,
    is_expert_name,
    tensor_nbytes,
)
from r7convert.moves import LayerPlan
from r7convert.slab_layout import SIDECAR, SIDECAR_FORMAT
from r7convert.stamp import Repaired, StampFiles, repair

Json = Any

TIER_MAP = "tier_map.json"
TIER_FIELD = "bits"
MTP_FIELDS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
MULTIPLIERS = {"mcg": MCG_MULTIPLIER, "mul1": MUL1_MULTIPLIER}
_STORED = {"trellis", "suh", "svh", *MULTIPLIERS}
_TORCH_NAMES = {"I16": "torch.int16", "F16": "torch.float16", "I32": "torch.int32", "BF16": "torch.bfloat16", "F32": "torch.float32"}


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
    return {layer.source.module(expert, proj): k for expert, row in enumerate(layer.bits) for proj, k in zip(PROJECTIONS, row, strict=True)}


def tier_map_of(layers: Sequence[LayerPlan]) -> Json:
    """K of each expert of each layer; a stock reader wants an entry for every layer of the tail's range."""
    return {str(layer.layer): {TIER_FIELD: [row[0] for row in layer.bits]} for layer in layers}


def storage_record(module: str, tensors: Iterable[tuple[str, str, Sequence[int]]]) -> Json:
    """A tensor_storage record from (name, dtype, shape) of a module's tensors."""
    stored = stored_forms(tensors)
    record: dict[str, Json] = {
        "quant_format": "exl3",
        "stored_tensors": stored,
        "bits_per_weight": stored[f"{module}.trellis"]["shape"][2] // 16,
    }
    return record | {f"{field}_multiplier": value for field, value in MULTIPLIERS.items() if f"{module}.{field}" in stored}


def stored_forms(tensors: Iterable[tuple[str, str, Sequence[int]]]) -> dict[str, Json]:
    """`stored_tensors` of a record."""
    return {
        name: {"shape": list(shape), "n_bytes": tensor_nbytes(dtype, shape), "dtype": _TORCH_NAMES.get(dtype, dtype)}
        for name, dtype, shape in tensors
    }


def tensor_storage(checkpoint: Checkpoint, kept: Iterable[str], layers: Sequence[LayerPlan], *, experts_too: bool) -> dict[str, Json]:
    """Records for every EXL3 module of the output: the source's own where it names exactly what the module has, else made.

    `kept` are the names of carried tensors; `experts_too` adds the routed experts and, as exllamav3 has them, the source's records of
    modules that are not quantized (target exl3).
    """
    said = checkpoint.storage
    stored = {module: record.get("stored_tensors") for module, record in said.items()}
    names = {module: set(forms) if isinstance(forms, Mapping) else set() for module, forms in stored.items()}
    carried = {name: (name, checkpoint.tensors[name].dtype, checkpoint.tensors[name].shape) for name in kept}
    modules: dict[str, list[tuple[str, str, tuple[int, ...]]]] = {}
    for tensor in [*carried.values(), *(tensor for layer in layers if experts_too for tensor in layer.tensors(0))]:
        module, _, field = tensor[0].rpartition(".")
        if field in _STORED and not RANK_SUFFIX.search(tensor[0]) and (experts_too or not is_expert_name(tensor[0]) or module in said):
            modules.setdefault(module, []).append(tensor)
    made = {}
    for module, tensors in modules.items():
        has = {name for name, _, _ in tensors}
        if f"{module}.trellis" in has:
            made[module] = said[module] if names.get(module) == has else storage_record(module, tensors)
    for module in said.keys() - made.keys() if experts_too else ():
        if names.get(module) and names[module] <= carried.keys() and f"{module}.trellis" not in names[module]:
            made[module] = {"stored_tensors": stored_forms(carried[name] for name in sorted(names[module]))}
    return dict(sorted(made.items()))


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
    return repair(files, target, tail=tail, tensor_storage=storage, bits=nominal, codebook=codebook_of(checkpoint), extra=extra)


def codebook_of(checkpoint: Checkpoint) -> str:
    """The one word that a block has for the codebook: what it says, where some module is of it; else the routed experts'."""
    stated = (checkpoint.quantization or {}).get("codebook")
    dense = {field for module in checkpoint.dense_exl3 for field in MULTIPLIERS if f"{module}.{field}" in checkpoint.tensors}
    experts = {layer.codebook for layer in checkpoint.experts.values()}
    return stated if isinstance(stated, str) and stated in experts | dense else min(experts or dense or {"mcg"})


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
