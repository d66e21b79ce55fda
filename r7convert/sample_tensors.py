"""Every tensor of a sample checkpoint: its name, shape, random stream and file. Pure; sample.py writes them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from r7convert.experts import HIDDEN_FIELD, shared_names
from r7convert.families import SPELLINGS
from r7convert.format import FIELD_DTYPE, PROJECTIONS, expected_shape, layer_of, tensor_nbytes
from r7convert.sample_shape import Sample, k_table

DENSE_BITS = 6
CARRIER = "model-carrier.safetensors"
CODEBOOK_STD = 1.24371088
VOCAB, HEADS, HEAD_DIM, LORA = 128, 4, 64, 128


@dataclass(frozen=True, slots=True)
class SampleTensor:
    """A tensor to write. `stream` names its random stream: copies of one vector on several ranks share it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    stream: str
    gain: float = 1.0

    @property
    def nbytes(self) -> int:
        return tensor_nbytes(self.dtype, self.shape)


def _exl3(name: str, shape: tuple[int, ...], stream: str | None = None, fan_in: int = 1) -> SampleTensor:
    """One tensor of an EXL3 matrix. Input scales hold the whole magnitude, 1/sqrt(in), so that outputs are near one."""
    field = name.rsplit(".", 1)[1].removeprefix("gate_up_").removeprefix("down_")
    gain = 1 / (CODEBOOK_STD * fan_in**0.5) if field == "suh" else 1.0
    return SampleTensor(name, FIELD_DTYPE[field], shape, stream or name, gain)


def _weight(name: str, rows: int, cols: int) -> SampleTensor:
    return SampleTensor(name, "BF16", (rows, cols), name, cols**-0.5)


def _norm(name: str, size: int) -> SampleTensor:
    return SampleTensor(name, "BF16", (size,), name)


def experts_base(sample: Sample, layer: int) -> str:
    return f"{sample.base(layer)}.{sample.words.spelling}.experts"


def expert_tensors(sample: Sample, layer: int) -> Iterator[SampleTensor]:
    """The routed experts of one layer in EXL3: whole or in ranks, hidden-side vectors where the kind and the choices put them."""
    geometry, base, words = sample.geometry, experts_base(sample, layer), SPELLINGS[sample.words.spelling].routed
    ranks = sample.tail_tp if sample.is_ranked(layer) else None
    is_own = ranks is not None or sample.kind == "exl3" or sample.per_expert_vectors
    if sample.shared_h and ranks is not None:
        is_own = False
        for proj in PROJECTIONS:
            for name in shared_names(base, proj, "shared_h", ranks):
                stream = f"{base}.shared_h.{proj}.{HIDDEN_FIELD[proj]}"
                yield _exl3(name, (sample.hidden,), stream, sample.hidden)
    elif not is_own:
        yield _exl3(f"{base}.r7_shared.gate_up_suh", (sample.hidden,), fan_in=sample.hidden)
        yield _exl3(f"{base}.r7_shared.down_svh", (sample.hidden,))
    for expert, bits in enumerate(k_table(sample, layer)):
        for proj, word, k in zip(PROJECTIONS, words, bits, strict=True):
            fan_in = sample.intermediate if proj == "down_proj" else sample.hidden
            for suffix in [""] if ranks is None else [f".rank{rank}" for rank in range(ranks)]:
                for field in ("trellis", "suh", "svh", sample.codebook):
                    if field == HIDDEN_FIELD[proj] and not is_own:
                        continue
                    name = stream = f"{base}.{expert}.{word}{suffix}.{field}"
                    if field == HIDDEN_FIELD[proj] and ranks is not None:
                        stream = f"{base}.{'all' if sample.equal_tail_vectors else expert}.{word}.{field}"
                    yield _exl3(name, expected_shape(geometry, proj, field, k, ranks or 1), stream, fan_in)


def _module(sample: Sample, module: str, rows: int, cols: int, bits: int) -> Iterator[SampleTensor]:
    """A matrix outside the routed experts, in EXL3."""
    shapes: dict[str, tuple[int, ...]] = {
        "trellis": (rows // 16, cols // 16, 16 * bits),
        "suh": (rows,),
        "svh": (cols,),
        sample.codebook: (),
    }
    for field, shape in shapes.items():
        yield _exl3(f"{module}.{field}", shape, fan_in=rows)


def carried_tensors(sample: Sample) -> Iterator[SampleTensor]:
    """Everything but routed experts in EXL3: embeddings, head, norms, attention, routers, dense MLPs, shared experts, MTP."""
    hidden, words = sample.hidden, sample.words
    body = sample.root.removesuffix("layers")
    yield _weight(f"{body}embed_tokens.weight", VOCAB, hidden)
    yield _norm(f"{body}norm.weight", hidden)
    yield _weight("lm_head.weight", VOCAB, hidden)
    for layer in sample.all_layers:
        base = sample.base(layer)
        yield _norm(f"{base}.input_layernorm.weight", hidden)
        yield _norm(f"{base}.post_attention_layernorm.weight", hidden)
        yield from _attention(sample, f"{base}.self_attn", quantized=sample.dense <= layer < sample.layers)
        if layer in sample.moe_layers or layer >= sample.layers:
            yield from _around_experts(sample, layer)
        else:
            yield from _mlp(sample, f"{base}.mlp", PROJECTIONS)
        if layer >= sample.layers and base.startswith(sample.root):
            yield _weight(f"{base}.eh_proj.weight", hidden, 2 * hidden)
            for norm in ("enorm", "hnorm", "shared_head.norm"):
                yield _norm(f"{base}.{norm}.weight", hidden)
        elif layer >= sample.layers:
            yield _weight(f"{words.mtp}.fc.weight" if layer == sample.layers else f"{base}.fc.weight", hidden, 2 * hidden)


def _around_experts(sample: Sample, layer: int) -> Iterator[SampleTensor]:
    """Router and shared expert, and routed experts in BF16."""
    words, hidden = sample.words, sample.hidden
    mlp = f"{sample.base(layer)}.{words.spelling}"
    yield _weight(f"{mlp}.gate.weight", sample.experts, hidden)
    yield SampleTensor(f"{mlp}.gate.e_score_correction_bias", "F32", (sample.experts,), f"{mlp}.bias", 0.1)
    if words.shared:
        yield from _mlp(sample, f"{mlp}.{words.shared}", SPELLINGS[words.spelling].shared, sample.shared_bits)
    if words.shared == "shared_expert":
        yield _weight(f"{mlp}.shared_expert_gate.weight", 1, hidden)
    if layer >= sample.layers and sample.mtp == "bf16":
        for expert in range(sample.experts):
            yield from _mlp(sample, f"{mlp}.experts.{expert}", SPELLINGS[words.spelling].routed)


def _mlp(sample: Sample, base: str, words: tuple[str, ...], bits: int = 0) -> Iterator[SampleTensor]:
    hidden, inner = sample.hidden, sample.intermediate
    for word, rows, cols in zip(words, (hidden, hidden, inner), (inner, inner, hidden), strict=True):
        if bits:
            yield from _module(sample, f"{base}.{word}", rows, cols, bits)
        else:
            yield _weight(f"{base}.{word}.weight", cols, rows)


def _attention(sample: Sample, base: str, *, quantized: bool) -> Iterator[SampleTensor]:
    hidden, wide = sample.hidden, HEADS * HEAD_DIM
    yield _weight(f"{base}.q_a_proj.weight", LORA, hidden)
    yield _norm(f"{base}.q_a_layernorm.weight", LORA)
    yield _weight(f"{base}.kv_a_proj_with_mqa.weight", LORA + HEAD_DIM // 2, hidden)
    yield _norm(f"{base}.kv_a_layernorm.weight", LORA)
    yield _weight(f"{base}.kv_b_proj.weight", 2 * wide, LORA)
    if quantized:
        yield from _module(sample, f"{base}.q_b_proj", LORA, wide, DENSE_BITS)
        yield from _module(sample, f"{base}.o_proj", wide, hidden, DENSE_BITS)
    else:
        yield _weight(f"{base}.q_b_proj.weight", wide, LORA)
        yield _weight(f"{base}.o_proj.weight", hidden, wide)


# ---- which file -------------------------------------------------------------------------------------------------------


def plan_shards(sample: Sample) -> dict[str, list[SampleTensor]]:
    """File -> its tensors."""
    shards: dict[str, list[SampleTensor]] = {}
    for layer in sample.r7_layers:
        shards[r7_shard(layer)] = list(expert_tensors(sample, layer))
    for tensor in carried_tensors(sample):
        shards.setdefault(_carrier_of(tensor.name, sample), []).append(tensor)
    for layer in sample.all_layers:
        is_exl3 = layer in sample.moe_layers or (layer >= sample.layers and sample.mtp != "bf16")
        if is_exl3 and layer not in sample.r7_layers:
            for tensor in expert_tensors(sample, layer):
                shards.setdefault(_carrier_of(tensor.name, sample), []).append(tensor)
    return shards


def r7_shard(layer: int) -> str:
    return f"r7-experts-layer-{layer:03d}.safetensors"


def _carrier_of(name: str, sample: Sample) -> str:
    layer = layer_of(name)
    if not sample.split:
        return CARRIER
    if ".shared_experts." in name:
        return "model-sharedbf16.safetensors"
    return "model-base.safetensors" if layer is None else f"model-layer-{layer:03d}.safetensors"
