"""What a sample checkpoint holds: its sizes, the K of every matrix, and every tensor with its file. Pure; sample.py writes it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from r7convert.errors import UsageError, complain
from r7convert.format import (
    FIELD_DTYPE,
    FIELDS,
    HADAMARD,
    PROJECTIONS,
    R7_K_VALUES,
    Geometry,
    check_tp,
    expected_shape,
    expert_module,
    layer_of,
    rank_name,
    tensor_nbytes,
)

MODES = ("mixed", "uniform", "odd", "one-k", "three-k")
TAIL_BITS = 3
DENSE_BITS = 6
CARRIER = "model-carrier.safetensors"
CODEBOOK_STD = 1.24371088
VOCAB, HEADS, HEAD_DIM, LORA = 128, 4, 64, 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What to write. The defaults are the fixture F0 of CASES.md.

    mode: how K falls in a layer, one word or several with commas, taken by the R7 layers in turn:
        mixed    an own K per expert and projection, gate and up apart in expert 0 at least
        uniform  one K per expert, the two lowest of `k_values` by turns: lossless for rank-sliced
        odd      the same, split 3:1
        one-k    one K in the whole layer, the next layer has the next
        three-k  one K per expert, all of `k_values` by turns
    mtp: the multi-token-prediction layer's experts: in the older rank-sliced form, uniform K3, at `tail_tp` ("tail"); in
        R7 form under the R7 block ("r7"); or no such layer ("none"). `equal_tail_vectors` gives all experts of a tail the
        same hidden-side vectors, as shared_h_v1 needs.
    nested: a vision wrapper's shape: sizes under `text_config`, tensors under `model.language_model.layers`.
    split: carried tensors in one file a layer, as published, in place of a single carrier.
    """

    seed: int = 0
    mode: str = "mixed"
    hidden: int = 256
    intermediate: int = 512
    experts: int = 4
    layers: int = 5
    dense: int = 3
    k_values: tuple[int, ...] = (3, 4, 5)
    mtp: Literal["tail", "r7", "none"] = "tail"
    tail_tp: int = 1
    equal_tail_vectors: bool = False
    nested: bool = False
    per_expert_vectors: bool = False
    storage_for_experts: bool = False
    hf_quant_config: bool = False
    split: bool = False

    @property
    def root(self) -> str:
        return "model.language_model.layers" if self.nested else "model.layers"

    @property
    def geometry(self) -> Geometry:
        mtp_layers = int(self.mtp != "none")
        moe = tuple(range(self.dense, self.layers))
        return Geometry(self.hidden, self.intermediate, self.experts, 1, self.layers, moe, mtp_layers, self.nested)

    @property
    def r7_layers(self) -> range:
        return range(self.dense, self.layers + (self.mtp == "r7"))

    @property
    def all_layers(self) -> range:
        return range(self.layers + (self.mtp != "none"))


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


def check_sample(sample: Sample) -> None:
    def refuse(what: str, expected: object, found: object) -> None:
        raise UsageError(complain("sample", what, expected=expected, found=found))

    for mode in sample.mode.split(","):
        if mode not in MODES:
            refuse("--mode", f"one of {', '.join(MODES)}", repr(mode))
    for name, size in (("hidden", sample.hidden), ("intermediate", sample.intermediate)):
        if size < HADAMARD or size % HADAMARD:
            refuse(f"--{name}", f"a multiple of {HADAMARD}", size)
    if not 0 <= sample.dense < sample.layers:
        refuse("--dense", f"fewer than the {sample.layers} layers", sample.dense)
    if sample.experts < 1:
        refuse("--experts", "at least 1", sample.experts)
    if not sample.k_values or not set(sample.k_values) <= R7_K_VALUES or tuple(sorted(set(sample.k_values))) != sample.k_values:
        refuse("--k-values", f"ascending, out of {sorted(R7_K_VALUES)}", list(sample.k_values))
    if sample.mtp not in ("tail", "r7", "none"):
        refuse("--mtp", "tail, r7 or none", repr(sample.mtp))
    check_tp(sample.tail_tp, sample.intermediate)


# ---- which K ----------------------------------------------------------------------------------------------------------


def k_table(sample: Sample, layer: int) -> list[tuple[int, int, int]]:
    """K of (gate, up, down) of each expert of an R7 layer."""
    modes, ks = sample.mode.split(","), sample.k_values
    nth = layer - sample.dense
    mode = modes[nth % len(modes)]
    if mode == "mixed":
        return [_mixed_k(sample, layer, expert) for expert in range(sample.experts)]
    turns = {
        "uniform": lambda e: ks[:2][(e + nth) % len(ks[:2])],
        "odd": lambda e: ks[:2][(e % 4 == 3) % len(ks[:2])],
        "one-k": lambda e: ks[nth % len(ks)],
        "three-k": lambda e: ks[e % len(ks)],
    }
    return [(k, k, k) for k in map(turns[mode], range(sample.experts))]


def _mixed_k(sample: Sample, layer: int, expert: int) -> tuple[int, int, int]:
    """As in GLM-5.2: up differs from gate in about one expert of four, and most down projections lie one K above their gate.
    Every second layer has a pair of K, the others all of them.
    """
    draw = [byte / 256 for byte in hashlib.sha256(f"{sample.seed}/K/{layer}/{expert}".encode()).digest()[:4]]
    if (layer - sample.dense) % 2:
        ks = sample.k_values[:2]
    else:
        ks = sample.k_values
        if expert == 0:
            return ks[0], ks[len(ks) // 2], ks[-1]
    gate = int(draw[0] * max(len(ks) - 1, 1))
    apart = expert == 0 or draw[1] < 0.28
    up = (gate + 1) % len(ks) if apart else gate
    down = min(gate + 1, len(ks) - 1) if draw[2] < 0.75 else int(draw[3] * len(ks))
    return ks[gate], ks[up], ks[down]


# ---- which tensors ----------------------------------------------------------------------------------------------------


def _exl3(name: str, shape: tuple[int, ...], stream: str | None = None, fan_in: int = 1) -> SampleTensor:
    """One tensor of an EXL3 matrix. Input scales hold the whole magnitude, 1/sqrt(in), so that outputs are near one."""
    field = name.rsplit(".", 1)[1].removeprefix("gate_up_").removeprefix("down_")
    gain = 1 / (CODEBOOK_STD * fan_in**0.5) if field == "suh" else 1.0
    return SampleTensor(name, FIELD_DTYPE[field], shape, stream or name, gain)


def r7_tensors(sample: Sample, layer: int) -> Iterator[SampleTensor]:
    geometry, experts = sample.geometry, f"{sample.root}.{layer}.mlp.experts"
    if not sample.per_expert_vectors:
        yield _exl3(f"{experts}.r7_shared.gate_up_suh", (sample.hidden,), fan_in=sample.hidden)
        yield _exl3(f"{experts}.r7_shared.down_svh", (sample.hidden,))
    for expert, bits in enumerate(k_table(sample, layer)):
        for proj, k in zip(PROJECTIONS, bits, strict=True):
            hidden_side, fan_in = ("svh", sample.intermediate) if proj == "down_proj" else ("suh", sample.hidden)
            for field in FIELDS:
                if field != hidden_side or sample.per_expert_vectors:
                    name = f"{expert_module(sample.root, layer, expert, proj)}.{field}"
                    yield _exl3(name, expected_shape(geometry, proj, field, k), fan_in=fan_in)


def _tail_tensors(sample: Sample, layer: int) -> Iterator[SampleTensor]:
    geometry = sample.geometry
    for expert in range(sample.experts):
        for proj in PROJECTIONS:
            hidden_side, fan_in = ("svh", sample.intermediate) if proj == "down_proj" else ("suh", sample.hidden)
            for rank in range(sample.tail_tp):
                for field in FIELDS:
                    name = rank_name(sample.root, layer, expert, proj, rank, field)
                    stream = name
                    if field == hidden_side:
                        whose = "all" if sample.equal_tail_vectors else expert
                        stream = f"{sample.root}.{layer}.mlp.experts.{whose}.{proj}.{field}"
                    yield _exl3(name, expected_shape(geometry, proj, field, TAIL_BITS, sample.tail_tp), stream, fan_in)


def _dense_exl3(module: str, rows: int, cols: int) -> Iterator[SampleTensor]:
    shapes: dict[str, tuple[int, ...]] = {
        "trellis": (rows // 16, cols // 16, 16 * DENSE_BITS),
        "suh": (rows,),
        "svh": (cols,),
        "mcg": (),
    }
    for field, shape in shapes.items():
        yield _exl3(f"{module}.{field}", shape, fan_in=rows)


def _weight(name: str, rows: int, cols: int) -> SampleTensor:
    return SampleTensor(name, "BF16", (rows, cols), name, cols**-0.5)


def _norm(name: str, size: int) -> SampleTensor:
    return SampleTensor(name, "BF16", (size,), name)


def carried_tensors(sample: Sample) -> Iterator[SampleTensor]:
    """Everything but the R7 experts: embeddings, head, norms, attention, routers, dense MLPs, shared experts, the MTP tail."""
    hidden, inner = sample.hidden, sample.intermediate
    body = sample.root.removesuffix(".layers")
    yield _weight(f"{body}.embed_tokens.weight", VOCAB, hidden)
    yield _norm(f"{body}.norm.weight", hidden)
    yield _weight("lm_head.weight", VOCAB, hidden)
    for layer in sample.all_layers:
        base = f"{sample.root}.{layer}"
        yield _norm(f"{base}.input_layernorm.weight", hidden)
        yield _norm(f"{base}.post_attention_layernorm.weight", hidden)
        yield from _attention(f"{base}.self_attn", hidden, quantized=sample.dense <= layer < sample.layers)
        mlp = f"{base}.mlp"
        if layer >= sample.dense:
            yield _weight(f"{mlp}.gate.weight", sample.experts, hidden)
            yield SampleTensor(f"{mlp}.gate.e_score_correction_bias", "F32", (sample.experts,), f"{mlp}.bias", 0.1)
            mlp += ".shared_experts"
        yield _weight(f"{mlp}.gate_proj.weight", inner, hidden)
        yield _weight(f"{mlp}.up_proj.weight", inner, hidden)
        yield _weight(f"{mlp}.down_proj.weight", hidden, inner)
        if layer == sample.layers:
            yield _weight(f"{base}.eh_proj.weight", hidden, 2 * hidden)
            for norm in ("enorm", "hnorm", "shared_head.norm"):
                yield _norm(f"{base}.{norm}.weight", hidden)
    if sample.mtp == "tail":
        yield from _tail_tensors(sample, sample.layers)


def _attention(base: str, hidden: int, *, quantized: bool) -> Iterator[SampleTensor]:
    wide = HEADS * HEAD_DIM
    yield _weight(f"{base}.q_a_proj.weight", LORA, hidden)
    yield _norm(f"{base}.q_a_layernorm.weight", LORA)
    yield _weight(f"{base}.kv_a_proj_with_mqa.weight", LORA + HEAD_DIM // 2, hidden)
    yield _norm(f"{base}.kv_a_layernorm.weight", LORA)
    yield _weight(f"{base}.kv_b_proj.weight", 2 * wide, LORA)
    if quantized:
        yield from _dense_exl3(f"{base}.q_b_proj", LORA, wide)
        yield from _dense_exl3(f"{base}.o_proj", wide, hidden)
    else:
        yield _weight(f"{base}.q_b_proj.weight", wide, LORA)
        yield _weight(f"{base}.o_proj.weight", hidden, wide)


def r7_shard(layer: int) -> str:
    return f"r7-experts-layer-{layer:03d}.safetensors"


def carrier_of(name: str, sample: Sample) -> str:
    layer = layer_of(name)
    if not sample.split:
        return CARRIER
    if ".shared_experts." in name:
        return "model-sharedbf16.safetensors"
    return "model-base.safetensors" if layer is None else f"model-layer-{layer:03d}.safetensors"
