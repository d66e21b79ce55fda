"""The JSON of a sample checkpoint: config.json in a family's words, the quantization block of a kind, index, sidecars, tier map. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from r7convert import families
from r7convert.format import (
    HADAMARD,
    MCG_MULTIPLIER,
    MUL1_MULTIPLIER,
    PROJECTIONS,
    R7_SCHEMA,
    SHARED_H_SCHEMA,
    SHARED_H_V1,
    TAIL_FORMAT,
    TENSOR_SCHEMA,
    is_expert_name,
)
from r7convert.sample_shape import TAIL_BITS, Sample, k_table
from r7convert.sample_tensors import HEAD_DIM, HEADS, LORA, VOCAB, SampleTensor, experts_base
from r7convert.store import FileRecord

Json = Any

TIER_MAP = "tr3_bits.json"
_PRODUCER = {"name": "modelopt", "version": "0.41.0"}


def sidecar_json(sample: Sample, shard: str, record: FileRecord, payload_sha256: str) -> Json:
    layer = int(Path(shard).stem[-3:])
    bit_map = {
        f"{experts_base(sample, layer)}.{expert}.{proj}": k
        for expert, bits in enumerate(k_table(sample, layer))
        for proj, k in zip(PROJECTIONS, bits, strict=True)
    }
    return {
        "schema": R7_SCHEMA,
        "layer": layer,
        "shard": shard,
        "shard_sha256": record.sha256,
        "payload_sha256": payload_sha256,
        "bit_map": bit_map,
        "provenance": {"producer": "r7convert sample", "seed": sample.seed, "mode": sample.mode},
    }


def index_json(shards: Mapping[str, Sequence[SampleTensor]]) -> Json:
    weight_map = {t.name: shard for shard, tensors in shards.items() for t in tensors}
    total = sum(t.nbytes for tensors in shards.values() for t in tensors)
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}


def older_quant_config() -> Json:
    return {"producer": _PRODUCER, "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}


def storage_json(sample: Sample, tensors: Sequence[SampleTensor]) -> Json:
    """tensor_storage: a record for each EXL3 module, those of routed experts only where asked; for kind exl3, as exllamav3 writes
    it, for every module of the model.
    """
    is_whole = sample.kind == "exl3"
    modules: dict[str, list[SampleTensor]] = {}
    for t in tensors:
        if ".rank" not in t.name and ".r7_shared." not in t.name:
            modules.setdefault(t.name.rpartition(".")[0], []).append(t)
    torch_name = {"I16": "torch.int16", "F16": "torch.float16", "I32": "torch.int32", "F32": "torch.float32", "BF16": "torch.bfloat16"}
    records: dict[str, Json] = {}
    for module, stored in sorted(modules.items()):
        trellis = next((t for t in stored if t.name.endswith(".trellis")), None)
        forms = {t.name: {"shape": list(t.shape), "n_bytes": t.nbytes, "dtype": torch_name[t.dtype]} for t in stored}
        if trellis is None and is_whole:
            records[module] = {"stored_tensors": forms}
        elif trellis is not None and (is_whole or sample.storage_for_experts or not is_expert_name(trellis.name)):
            multiplier = {"mcg": MCG_MULTIPLIER, "mul1": MUL1_MULTIPLIER}[sample.codebook]
            records[module] = {
                "quant_format": "exl3",
                "stored_tensors": forms,
                "bits_per_weight": trellis.shape[-1] // 16,
                f"{sample.codebook}_multiplier": multiplier,
            }
    return records


def quantization_json(sample: Sample, tensors: Sequence[SampleTensor]) -> Json:
    """config.json's block, as published for each kind; for R7 the stamp of an earlier producer over EXL3 payloads."""
    if sample.kind == "r7":
        return _r7_quantization(sample, tensors)
    rows = [row for layer in sample.moe_layers for row in k_table(sample, layer)]
    bits = round(sum(sum(row) for row in rows) / (3 * len(rows)), 2)
    block: dict[str, Json] = {"quant_method": "exl3", "version": "1.6.5", "bits": bits, "head_bits": 16}
    if sample.kind == "rank-sliced":
        return block | {"codebook": "mcg", "tensor_storage": storage_json(sample, tensors)}
    block |= {"calibration": {"rows": 250, "cols": 2048}, "out_scales": "auto"}
    return block | ({"codebook": sample.codebook} if sample.storage else {})


def _r7_quantization(sample: Sample, tensors: Sequence[SampleTensor]) -> Json:
    first, last = sample.r7_layers[0], sample.r7_layers[-1]
    return {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "producer": _PRODUCER,
        "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}, "targets": ["Linear"]}},
        "ignore": ["lm_head", "*.self_attn.*", "*.mlp.gate", "*.shared_experts.*"],
        "r7_routed_experts": {
            "schema": R7_SCHEMA,
            "schema_version": 2,
            "feature": "r7-routed-experts",
            "codebook": "mcg",
            "bits": "mixed_tensor",
            "moe_layers": [first, last],
            "k_values": list(sample.k_values),
            "target_bpw": 3.5,
            "tp_slice_quantum": HADAMARD,
            "bit_map_manifests": [f"r7-experts-layer-{layer:03d}.json" for layer in sample.r7_layers],
        },
        "tensor_storage": storage_json(sample, tensors),
    }


# ---- rank-sliced ------------------------------------------------------------------------------------------------------


def _tail_layers(sample: Sample) -> list[int]:
    ranked = [layer for layer in sample.moe_layers if sample.is_ranked(layer)]
    return ranked + [layer for layer in range(sample.layers, len(sample.all_layers)) if sample.is_ranked(layer) and sample.mtp != "bf16"]


def _tail_bits(sample: Sample) -> set[int]:
    return {row[0] for layer in _tail_layers(sample) for row in k_table(sample, layer)}


def tier_map_json(sample: Sample) -> Json | None:
    if sample.kind != "rank-sliced" or len(_tail_bits(sample)) == 1:
        return None
    return {str(layer): {"bits": [row[0] for row in k_table(sample, layer)]} for layer in _tail_layers(sample)}


def _tail(sample: Sample) -> Json:
    layers, bits = _tail_layers(sample), _tail_bits(sample)
    tail: dict[str, Json] = {
        "format": TAIL_FORMAT,
        "codebook": "mcg",
        "bits": TAIL_BITS if sample.kind == "r7" else next(iter(bits)),
        "experts_per_layer": sample.experts,
        "moe_layers": [layers[0], layers[-1]],
        "tensor_schema": TENSOR_SCHEMA,
        "tp": sample.tail_tp,
    }
    if tier_map_json(sample) is not None:
        tail |= {"bits": "mixed", "k_values": sorted(bits), "bits_per_expert": f"{TIER_MAP}:bits"}
    if sample.shared_h:
        tail |= {"rotation_layout": SHARED_H_V1, "shared_h_tensor_schema": SHARED_H_SCHEMA}
    return tail


# ---- config.json ------------------------------------------------------------------------------------------------------


def config_json(sample: Sample, quantization: Json) -> Json:
    words = sample.words
    sizes: dict[str, Json] = {
        "model_type": words.model_type,
        "hidden_size": sample.hidden,
        "intermediate_size": sample.intermediate,
        words.size: sample.intermediate,
        words.count: sample.experts,
    }
    if words.shared_count:
        sizes[words.shared_count] = sample.intermediate if words.shared_count == families.SHARED_EXPERT_SIZE else 1
    sizes |= {"num_experts_per_tok": min(8, sample.experts), "num_hidden_layers": sample.layers}
    sizes |= _dense_keys(sample)
    if words.mtp_count:
        sizes[words.mtp_count] = sample.geometry.mtp_layers
    sizes |= {
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "q_lora_rank": LORA,
        "kv_lora_rank": LORA,
        "qk_nope_head_dim": HEAD_DIM // 2,
        "qk_rope_head_dim": HEAD_DIM // 2,
        "v_head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "hidden_act": "silu",
    }
    config: dict[str, Json] = {"architectures": [words.architecture], "torch_dtype": "bfloat16"}
    if sample.nested:
        text = {**sizes, "quantization_config": quantization} if sample.kind == "r7" else sizes
        config |= {"model_type": "glm_moe_vision", "text_config": text}
    else:
        config |= sizes
    config["quantization_config"] = quantization
    if _tail_layers(sample):
        config["hybrid_tr3_tail"] = _tail(sample)
    return config


def _dense_keys(sample: Sample) -> dict[str, Json]:
    """Which layers are dense, in the family's words: a first one, a list of them, or a word for each."""
    words = sample.words
    flags = [layer in sample.moe_layers for layer in range(sample.layers)]
    if words.dense == families.DENSE_ONLY:
        dense = [layer for layer, has_experts in enumerate(flags) if not has_experts]
        return {families.STEP: 1, families.DENSE_ONLY: dense}
    keys: dict[str, Json] = {words.first_dense: sample.dense} if words.first_dense else {}
    if sample.dense_too and words.dense == families.FREQUENCY:
        return {families.FREQUENCY: [int(has_experts) for has_experts in flags]}
    if sample.dense_too:
        keys[words.dense] = ["sparse" if has_experts else "dense" for has_experts in flags]
    return keys
