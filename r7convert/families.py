"""Model families, as data: how each spells its experts' names, and under which keys config.json states their sizes.

A family is told by what stands in headers and config, never by its name: names are read by the one spelling that fits them, and a
size by whichever of its keys is there. Where two keys, or names and sizes, do not agree, the readers of this table refuse both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")
"""What the projections are called everywhere inside r7convert, in this order."""
W1_W3_W2 = ("w1", "w3", "w2")


@dataclass(frozen=True, slots=True)
class Spelling:
    """Names under `{root}.{layer}.{block}.`: routed experts are `experts.{E}.{routed}`, shared ones `{module}.{shared}`.

    `routed` and `shared` are the family's words for gate, up and down, `modules` its words for a shared expert.
    """

    block: str
    routed: tuple[str, str, str]
    modules: tuple[str, ...]
    shared: tuple[str, str, str]


SPELLINGS: Mapping[str, Spelling] = {
    row.block: row
    for row in (
        # FORMAT.md's own, which the schemas of R7 and of rank-sliced checkpoints spell out.
        # GLM-4.5 to 5.x, DeepSeek-V3, Kimi-K2, MiMo, ERNIE-4.5: shared_experts. Qwen2 to 3.x MoE: shared_expert. Hunyuan-3: shared_mlp.
        Spelling("mlp", GATE_UP_DOWN, ("shared_experts", "shared_expert", "shared_mlp"), GATE_UP_DOWN),
        # MiniMax-M1 and M2, Mixtral: no shared expert. Kimi-Linear: one, spelled in the other words.
        Spelling("block_sparse_moe", W1_W3_W2, ("shared_experts",), GATE_UP_DOWN),
        # LFM2: no shared expert.
        Spelling("feed_forward", W1_W3_W2, (), W1_W3_W2),
        # DeepSeek-V4 in its own words: roots `layers` and `mtp`.
        Spelling("ffn", W1_W3_W2, ("shared_experts",), W1_W3_W2),
    )
}
CANONICAL = "mlp"

ROUTED_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
"""DeepSeek, GLM and MiMo; Qwen, Kimi-Linear and Hunyuan; MiniMax and Mixtral; ERNIE."""
EXPERT_SIZE = ("moe_intermediate_size",)
EXPERT_SIZE_BESIDE: Mapping[str, str] = {"num_local_experts": "intermediate_size"}
"""Families without dense layers state the experts' size under the plain key: count's key -> size's key."""
SHARED_EXPERTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
SHARED_EXPERT_SIZE = "shared_expert_intermediate_size"
"""Qwen has one shared expert or none, and says so by its size."""
MTP_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
"""Not MiniMax's `num_mtp_modules`: its published checkpoints have 3 in the config and no such layers."""

FIRST_DENSE = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
"""How many layers are dense before the others. Most families; AFMoE and LFM2; ERNIE."""
FREQUENCY = "moe_layer_freq"
"""DeepSeek, Kimi-Linear: an integer, layer L where L % it == 0. MiMo: a list of 0 and 1, one a layer."""
STEP = "decoder_sparse_step"
"""Qwen: layer L where (L + 1) % it == 0."""
DENSE_ONLY = "mlp_only_layers"
LAYER_TYPES = "mlp_layer_types"
"""GLM-5.x: "dense" or "sparse", one a layer."""
