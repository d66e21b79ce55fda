"""What a sample checkpoint is: its kind and family, its sizes, the K of every matrix. Pure; sample_tensors.py and sample.py go on."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from r7convert.errors import UsageError, complain
from r7convert.families import CANONICAL
from r7convert.format import HADAMARD, R7_K_VALUES, TAIL_K_VALUES, Geometry, check_tp

MODES = ("mixed", "uniform", "odd", "one-k", "three-k")
STOCK_MODES = ("uniform", "odd", "one-k")
KINDS: Mapping[str, frozenset[int]] = {"r7": R7_K_VALUES, "rank-sliced": TAIL_K_VALUES, "exl3": frozenset(range(1, 9))}
"""The kinds that can be written, and the K that each may have."""
TAIL_BITS = 3


@dataclass(frozen=True, slots=True)
class SampleFamily:
    """How one model family is written: the words of its config and of its names. `shared` and `mtp` are "" where it has none; `mtp` is
    the root of MTP layers that count from 0. `dense` is the key that holds a list of dense layers, or one word a layer.
    """

    architecture: str
    model_type: str
    count: str = "n_routed_experts"
    size: str = "moe_intermediate_size"
    shared_count: str = "n_shared_experts"
    mtp_count: str = "num_nextn_predict_layers"
    first_dense: str = "first_k_dense_replace"
    dense: str = "mlp_layer_types"
    root: str = "model.layers"
    spelling: str = CANONICAL
    shared: str = "shared_experts"
    mtp: str = "model.layers"


FAMILIES: Mapping[str, SampleFamily] = {
    "glm": SampleFamily("GlmMoeDsaForCausalLM", "glm_moe_dsa"),
    "deepseek": SampleFamily("DeepseekV3ForCausalLM", "deepseek_v3", dense="moe_layer_freq"),
    "deepseek-v4": SampleFamily("DeepseekV4ForCausalLM", "deepseek_v4", first_dense="", dense="", root="layers", spelling="ffn", mtp="mtp"),
    "qwen": SampleFamily(
        "Qwen3_5MoeForCausalLM",
        "qwen3_5_moe_text",
        count="num_experts",
        shared_count="shared_expert_intermediate_size",
        mtp_count="mtp_num_hidden_layers",
        first_dense="",
        dense="mlp_only_layers",
        shared="shared_expert",
        mtp="mtp.layers",
    ),
    "kimi": SampleFamily(
        "KimiLinearForCausalLM",
        "kimi_linear",
        count="num_experts",
        shared_count="num_shared_experts",
        mtp_count="",
        dense="",
        spelling="block_sparse_moe",
        mtp="",
    ),
    "minimax": SampleFamily(
        "MiniMaxM2ForCausalLM",
        "minimax_m2",
        count="num_local_experts",
        size="intermediate_size",
        shared_count="",
        mtp_count="",
        first_dense="",
        dense="",
        spelling="block_sparse_moe",
        shared="",
        mtp="",
    ),
}
"""DeepSeek's V4 and MiniMax's models have no dense layers, MiniMax's and Kimi's published ones no MTP layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What to write. The defaults are the fixture F0 of CASES.md.

    kind: "r7", "rank-sliced" or "exl3", see kinds.py; family: a key of FAMILIES.
    mode: how K falls in a layer, one word or several with commas, taken by the layers in turn:
        mixed    an own K per expert and projection, gate and up apart in expert 0 at least
        uniform  one K per expert, the two lowest of `k_values` by turns: lossless for rank-sliced
        odd      the same, split 3:1
        one-k    one K in the whole layer, the next layer has the next
        three-k  one K per expert, all of `k_values` by turns
    mtp: the multi-token-prediction layers' experts. For kind r7 in the older rank-sliced form, uniform K3, at `tail_tp` ("tail"),
        or in R7 form under the R7 block ("r7"); for other kinds as in all layers ("tail"); in BF16 ("bf16"); or no such
        layers ("none").
    tail_tp: ranks, of a tail or of a whole rank-sliced checkpoint. `equal_tail_vectors` gives all experts of a layer of it the same
        hidden-side vectors, as shared_h_v1 needs; `shared_h` is that layout.
    dense: layers without experts before the others; `dense_too`: more of them, in between.
    nested: a vision wrapper's shape: sizes under `text_config`, tensors under `model.language_model.layers`.
    split: carried tensors in one file a layer, as published, in place of a single carrier.
    codebook: of kind exl3; `storage` False leaves out tensor_storage and quantization_config.json, as older versions did.
    shared_bits: K of the shared experts, 0 for BF16.
    """

    kind: Literal["r7", "rank-sliced", "exl3"] = "r7"
    family: str = "glm"
    seed: int = 0
    mode: str = "mixed"
    hidden: int = 256
    intermediate: int = 512
    experts: int = 4
    layers: int = 5
    dense: int = 3
    dense_too: tuple[int, ...] = ()
    k_values: tuple[int, ...] = (3, 4, 5)
    mtp: Literal["tail", "r7", "bf16", "none"] = "tail"
    mtp_layers: int = 1
    tail_tp: int = 1
    equal_tail_vectors: bool = False
    shared_h: bool = False
    nested: bool = False
    per_expert_vectors: bool = False
    codebook: Literal["mcg", "mul1"] = "mcg"
    storage: bool = True
    storage_for_experts: bool = False
    shared_bits: int = 0
    hf_quant_config: bool = False
    split: bool = False

    @property
    def words(self) -> SampleFamily:
        return FAMILIES[self.family]

    @property
    def root(self) -> str:
        return "model.language_model.layers" if self.nested else self.words.root

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return tuple(layer for layer in range(self.dense, self.layers) if layer not in self.dense_too)

    @property
    def geometry(self) -> Geometry:
        mtp_layers, shared = self.mtp_layers * (self.mtp != "none"), int(self.words.shared != "")
        return Geometry(self.hidden, self.intermediate, self.experts, shared, self.layers, self.moe_layers, mtp_layers, self.nested)

    @property
    def r7_layers(self) -> tuple[int, ...]:
        """Layers whose experts are in R7 form."""
        if self.kind != "r7":
            return ()
        return self.moe_layers + tuple(range(self.layers, self.layers + self.mtp_layers * (self.mtp == "r7")))

    @property
    def all_layers(self) -> range:
        return range(self.layers + self.geometry.mtp_layers)

    def is_ranked(self, layer: int) -> bool:
        return self.kind == "rank-sliced" or (self.kind == "r7" and layer >= self.layers and self.mtp == "tail")

    def base(self, layer: int) -> str:
        """What the names of a layer's tensors begin with."""
        at_end = layer < self.layers or self.words.mtp in ("", "model.layers")
        return f"{self.root}.{layer}" if at_end else f"{self.words.mtp}.{layer - self.layers}"


def check_sample(sample: Sample) -> None:
    def refuse(what: str, expected: object, found: object) -> None:
        raise UsageError(complain("sample", what, expected=expected, found=found))

    if sample.kind not in KINDS:
        refuse("--kind", f"one of {', '.join(KINDS)}", repr(sample.kind))
    if sample.family not in FAMILIES:
        refuse("--family", f"one of {', '.join(FAMILIES)}", repr(sample.family))
    words = sample.words
    modes = STOCK_MODES if sample.kind == "rank-sliced" else MODES
    for mode in sample.mode.split(","):
        if mode not in modes:
            refuse("--mode", f"one of {', '.join(modes)}", repr(mode))
    for name, size in (("hidden", sample.hidden), ("intermediate", sample.intermediate)):
        if size < HADAMARD or size % HADAMARD:
            refuse(f"--{name}", f"a multiple of {HADAMARD}", size)
    if not 0 <= sample.dense < sample.layers:
        refuse("--dense", f"fewer than the {sample.layers} layers", sample.dense)
    if sample.dense and not (words.first_dense or words.dense):
        refuse("--dense", f"0: family {sample.family} has no dense layers", sample.dense)
    if sample.dense_too and (not words.dense or not sample.moe_layers or sample.kind != "exl3"):
        refuse("dense_too", "kind exl3 and a family that lists its dense layers", f"{sample.kind}, {sample.family}")
    if sample.experts < 1:
        refuse("--experts", "at least 1", sample.experts)
    allowed = KINDS[sample.kind]
    if not sample.k_values or not set(sample.k_values) <= allowed or tuple(sorted(set(sample.k_values))) != sample.k_values:
        refuse("--k-values", f"ascending, out of {sorted(allowed)}", list(sample.k_values))
    if sample.mtp not in ("tail", "r7", "bf16", "none"):
        refuse("--mtp", "tail, r7, bf16 or none", repr(sample.mtp))
    if sample.mtp != "none" and not words.mtp:
        refuse("--mtp", f"none: family {sample.family} has no MTP layers", sample.mtp)
    if sample.kind != "exl3" and words.spelling != CANONICAL:
        refuse("--family", f"one with FORMAT.md's own names for kind {sample.kind}", sample.family)
    if sample.codebook != "mcg" and sample.kind != "exl3":
        refuse("codebook", f"mcg for kind {sample.kind}", sample.codebook)
    check_tp(sample.tail_tp, sample.intermediate)


# ---- which K ----------------------------------------------------------------------------------------------------------


def k_table(sample: Sample, layer: int) -> list[tuple[int, int, int]]:
    """K of (gate, up, down) of each expert of a layer; those of an R7 checkpoint's tail have one K."""
    modes, ks = sample.mode.split(","), sample.k_values
    if sample.kind == "r7" and sample.is_ranked(layer):
        return [(TAIL_BITS,) * 3] * sample.experts
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
