"""A small but complete R7 checkpoint: what tests, the demo and benches convert when no real one is at hand.

Every kind of tensor and every JSON block of a published R7 checkpoint is here, at a size that geometry alone decides: a few
MB by default, any number of GB when asked. Trellis words are random, which any decoder takes and which decode to the
codebook's own near-Gaussian values; vectors are signs times magnitudes that keep activations near one. Each tensor has its
own random stream, seeded by its name, and only raw generator words are used, so the bytes depend on the seed alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from r7convert.errors import UsageError, complain
from r7convert.format import FIELDS, HADAMARD, MCG_MARKER, MCG_MULTIPLIER, PROJECTIONS, R7_SCHEMA, TAIL_FORMAT, TENSOR_SCHEMA, expert_module
from r7convert.progress import Progress
from r7convert.sample_shape import (
    HEAD_DIM,
    HEADS,
    LORA,
    TAIL_BITS,
    VOCAB,
    Sample,
    SampleTensor,
    carried_tensors,
    carrier_of,
    check_sample,
    k_table,
    r7_shard,
    r7_tensors,
)
from r7convert.store import FileRecord, WholeFile, encode_header, write_bytes, write_json

Json = Any
Words = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float32]

_CHUNK_WORDS = 1 << 18


def write_sample(folder: Path, *, progress: Progress | None = None, **choices: Any) -> Sample:
    """Write a sample checkpoint into a new or empty folder; `choices` are the fields of Sample. config.json comes last.

    Raises:  UsageError for a folder that holds something or a choice that cannot be; UnsupportedError for a tail tp that cuts
             a Hadamard block.
    Source:  FORMAT.md section 2, CASES.md "Fixture F0".
    """
    sample = Sample(**choices)
    check_sample(sample)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(complain(folder, "output", expected="a new or empty folder", found="something there", do="Choose another."))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        _write(folder, sample, progress or Progress())
    except BaseException:
        for path in folder.iterdir():  # it was empty: whatever is here is ours, and the same command must find it empty again
            path.unlink()
        raise
    return sample


def _write(folder: Path, sample: Sample, progress: Progress) -> None:
    shards: dict[str, list[SampleTensor]] = {r7_shard(layer): list(r7_tensors(sample, layer)) for layer in sample.r7_layers}
    for tensor in carried_tensors(sample):
        shards.setdefault(carrier_of(tensor.name, sample), []).append(tensor)
    progress.start(sum(t.nbytes for tensors in shards.values() for t in tensors), "sample")
    for shard, tensors in shards.items():
        # The safetensors library writes by falling dtype, then by name: expert 10 comes before expert 2, markers first.
        tensors.sort(key=lambda t: (("I32", "F32", "BF16", "F16", "I16").index(t.dtype), t.name))
        record, payload_sha256 = _write_shard(folder / shard, tensors, sample.seed, progress)
        if shard.startswith("r7-experts-"):
            write_json(folder / f"{Path(shard).stem}.json", _sidecar(sample, shard, record, payload_sha256))
    write_json(folder / "model.safetensors.index.json", _index(shards))
    _write_small_files(folder)
    quantization = _quantization_config(sample, [t for tensors in shards.values() for t in tensors])
    write_json(folder / "quantization_config.json", quantization)
    if sample.hf_quant_config:
        old = {"producer": quantization["producer"], "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
        write_json(folder / "hf_quant_config.json", old)
    write_json(folder / "config.json", _config(sample, quantization))
    progress.finish()


# ---- bytes ------------------------------------------------------------------------------------------------------------


def _payload(tensor: SampleTensor, seed: int) -> Iterator[bytes]:
    """The bytes of a tensor, in chunks of bounded size."""
    if tensor.name.endswith(".mcg"):
        yield MCG_MARKER.to_bytes(4, "little", signed=True)
        return
    generator = np.random.SFC64(int.from_bytes(hashlib.sha256(f"{seed}/{tensor.stream}".encode()).digest()[:16], "little"))
    left = tensor.nbytes
    while left:
        words = np.asarray(generator.random_raw(min(_CHUNK_WORDS, -(-left // 8))), "<u8")
        chunk = words.tobytes() if tensor.dtype == "I16" else _encode(tensor, _gaussian(words))
        yield chunk[:left]
        left -= min(len(chunk), left)


def _gaussian(words: Words) -> Floats:
    """One near-normal value a word, mean 0 and deviation 1: the sum of its four 16-bit parts."""
    sums = words.view("<u2").reshape(-1, 4).sum(axis=1, dtype=np.int32)
    return np.asarray((sums - 131070) * (3**0.5 / 65536), np.float32)


def _encode(tensor: SampleTensor, normal: Floats) -> bytes:
    """Values in the tensor's dtype: vectors of EXL3 are signed and near their gain, norms near 1, weights Gaussian."""
    if tensor.dtype == "F16":
        return (np.copysign(1 + np.abs(normal) / 8, normal) * np.float32(tensor.gain)).astype("<f2").tobytes()
    if tensor.dtype == "F32":
        return (normal * np.float32(tensor.gain)).astype("<f4").tobytes()
    values = 1 + normal / 16 if len(tensor.shape) == 1 else normal * np.float32(tensor.gain)
    bits = np.asarray(values, "<f4").view("<u4")
    return bytes(np.asarray((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, "<u2").tobytes())


def _write_shard(path: Path, tensors: Sequence[SampleTensor], seed: int, progress: Progress) -> tuple[FileRecord, str]:
    payload = hashlib.sha256()
    with WholeFile(path) as file:
        file.write(encode_header([(t.name, t.dtype, t.shape) for t in tensors], {"format": "pt"}, path))
        for tensor in tensors:
            for chunk in _payload(tensor, seed):
                file.write(chunk)
                payload.update(chunk)
                progress.advance(len(chunk), path.stem)
    assert file.record is not None
    return file.record, payload.hexdigest()


# ---- JSON -------------------------------------------------------------------------------------------------------------


def _sidecar(sample: Sample, shard: str, record: FileRecord, payload_sha256: str) -> Json:
    layer = int(shard.removesuffix(".safetensors")[-3:])
    bit_map = {
        expert_module(sample.root, layer, expert, proj): k
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


def _index(shards: dict[str, list[SampleTensor]]) -> Json:
    weight_map = {t.name: shard for shard, tensors in shards.items() for t in tensors}
    total = sum(t.nbytes for tensors in shards.values() for t in tensors)
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}


def _storage(tensors: Sequence[SampleTensor], *, experts: bool) -> Json:
    """tensor_storage: a record for each EXL3 module, those of routed experts only where asked."""
    modules: dict[str, list[SampleTensor]] = {}
    for t in tensors:
        module, _, field = t.name.rpartition(".")
        if field in FIELDS and ".rank" not in t.name and (experts or ".experts." not in t.name):
            modules.setdefault(module, []).append(t)
    torch_name = {"I16": "torch.int16", "F16": "torch.float16", "I32": "torch.int32"}
    return {
        module: {
            "quant_format": "exl3",
            "stored_tensors": {t.name: {"shape": list(t.shape), "n_bytes": t.nbytes, "dtype": torch_name[t.dtype]} for t in stored},
            "bits_per_weight": next(t.shape[-1] // 16 for t in stored if t.name.endswith(".trellis")),
            "mcg_multiplier": MCG_MULTIPLIER,
        }
        for module, stored in sorted(modules.items())
    }


def _quantization_config(sample: Sample, tensors: Sequence[SampleTensor]) -> Json:
    """The block as published: the stamp of an earlier producer over EXL3 payloads."""
    first, last = sample.r7_layers[0], sample.r7_layers[-1]
    return {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "producer": {"name": "modelopt", "version": "0.41.0"},
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
        "tensor_storage": _storage(tensors, experts=sample.storage_for_experts),
    }


def _config(sample: Sample, quantization: Json) -> Json:
    sizes: dict[str, Json] = {
        "model_type": "glm_moe_dsa",
        "hidden_size": sample.hidden,
        "intermediate_size": sample.intermediate,
        "moe_intermediate_size": sample.intermediate,
        "n_routed_experts": sample.experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": min(8, sample.experts),
        "num_hidden_layers": sample.layers,
        "first_k_dense_replace": sample.dense,
        "num_nextn_predict_layers": sample.geometry.mtp_layers,
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
    config: dict[str, Json] = {"architectures": ["GlmMoeDsaForCausalLM"], "torch_dtype": "bfloat16"}
    if sample.nested:
        config |= {"model_type": "glm_moe_vision", "text_config": {**sizes, "quantization_config": quantization}}
    else:
        config |= sizes
    config["quantization_config"] = quantization
    if sample.mtp == "tail":
        config["hybrid_tr3_tail"] = {
            "format": TAIL_FORMAT,
            "codebook": "mcg",
            "bits": TAIL_BITS,
            "experts_per_layer": sample.experts,
            "moe_layers": [sample.layers, sample.layers],
            "tensor_schema": TENSOR_SCHEMA,
            "tp": sample.tail_tp,
        }
    return config


def _write_small_files(folder: Path) -> None:
    """The files around the weights, as stubs that their readers take."""
    words = {"<unk>": 0, "<eos>": 1, "hello": 2, "world": 3}
    tokenizer = {"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"}}
    write_json(folder / "tokenizer.json", tokenizer)
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"})
    write_json(folder / "generation_config.json", {"eos_token_id": 1, "temperature": 1.0})
    write_bytes(folder / "chat_template.jinja", b"{% for m in messages %}{{ m.content }}<eos>{% endfor %}\n")
    write_bytes(folder / "LICENSE", b"The sample's weights are random numbers: do with them what you like.\n")
    write_bytes(folder / "README.md", b"---\nlicense: cc0-1.0\n---\n\n# An R7 sample\n\nRandom weights in the shape of an R7 checkpoint.\n")
