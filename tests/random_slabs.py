"""Slabs of random experts for tests and benches of the fused kernel, and the experts they were made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from r7convert.codec import Matrix, expert_forward
from r7convert.format import PER_EXPERT_V1, SHARED_H_V1
from r7convert.slab_layout import plan_slabs
from r7convert.slabs import Slabs

Bits = Sequence[tuple[int, int, int]]


@dataclass(frozen=True)
class Source:
    """The experts of one rank before anything was put into slabs: (gate, up, down) by expert."""

    experts: list[tuple[Matrix, Matrix, Matrix]]

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, *, dtype: torch.dtype = torch.float64) -> Tensor:
        """The routed sum, token by token and slot by slot: shares nothing with moe.py."""
        out = torch.zeros(x.shape, dtype=torch.float64)
        for token in range(x.shape[0]):
            for slot in range(topk_ids.shape[1]):
                expert = int(topk_ids[token, slot])
                if 0 <= expert < len(self.experts):
                    out[token] += (
                        float(topk_weights[token, slot]) * expert_forward(x[token, None], *self.experts[expert], dtype=dtype)[0].double()
                    )
        return out


def random_bits(experts: int, pool: Sequence[int], seed: int) -> list[tuple[int, int, int]]:
    """K of gate, up and down, drawn one by one; every K of the pool occurs."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(pool), (experts, 3), generator=generator)
    drawn.view(-1)[: len(pool)] = torch.arange(len(pool))[: drawn.numel()]
    return [(pool[g], pool[u], pool[d]) for g, u, d in drawn.tolist()]


def random_scales(*shape: int, unit: float, generator: torch.Generator) -> Tensor:
    """Signs and sizes as a regularized weight has them: around `unit`, no two alike."""
    size = torch.rand(shape, generator=generator, device=generator.device) + 0.5
    sign = torch.randint(2, shape, generator=generator, device=generator.device) * 2 - 1
    return (unit * size * sign).half()


def random_slabs(
    bits: Bits, *, hidden: int, inner: int, per_expert: bool = False, two_suh: bool = False, seed: int = 0, device: str = "cpu"
) -> tuple[Slabs, Source]:
    """Random words (any words decode) under scales that keep numbers near 1. Gate's and up's suh are one unless `two_suh`."""
    experts = len(bits)
    layout = plan_slabs(bits, hidden=hidden, inner=inner)
    generator = torch.Generator(device=device).manual_seed(seed)

    def words(shape: tuple[int, ...]) -> Tensor:
        return torch.randint(-32768, 32768, shape, generator=generator, device=device, dtype=torch.int16)

    w13 = tuple(words(layout.w13_shape(t)) for t in range(len(layout.tiers)))
    w2 = tuple(words(layout.w2_shape(t)) for t in range(len(layout.tiers)))
    rows = experts if per_expert else 1
    gate_suh = random_scales(rows, hidden, unit=0.8 / hidden**0.5, generator=generator)
    up_suh = random_scales(rows, hidden, unit=0.8 / hidden**0.5, generator=generator) if two_suh else gate_suh.clone()
    down_svh = random_scales(rows, hidden, unit=1.0, generator=generator)
    rotations = random_scales(experts, 3 * inner, unit=1.0, generator=generator)
    rotations[:, 2 * inner :] *= 1.6 / inner**0.5
    descriptors = layout.descriptors()
    slabs = Slabs(
        layer=3,
        rank=0,
        tp=1,
        rotation_layout=PER_EXPERT_V1 if per_expert else SHARED_H_V1,
        hidden=hidden,
        inner=inner,
        experts=experts,
        tiers=layout.tiers,
        gate_n=tuple(map(len, layout.gates)),
        up_n=tuple(map(len, layout.ups)),
        down_n=tuple(map(len, layout.downs)),
        fc1_slots=layout.fc1_slots,
        stride=layout.stride,
        w13=w13,
        w2=w2,
        rotations=rotations,
        gate_suh=gate_suh,
        up_suh=up_suh,
        down_svh=down_svh,
        route_map=torch.arange(experts, dtype=torch.int32, device=device),
        descriptors=None if descriptors is None else torch.tensor(descriptors, dtype=torch.int32, device=device),
        places=torch.tensor(layout.places(), dtype=torch.int32, device=device),
    )

    def plane(table: tuple[Tensor, ...], ids: tuple[tuple[int, ...], ...], expert: int, first: Sequence[int]) -> tuple[Tensor, int]:
        tier = next(t for t, members in enumerate(ids) if expert in members)
        return table[tier][first[tier] + ids[tier].index(expert)], layout.tiers[tier]

    zeros = [0] * len(layout.tiers)
    made = []
    for e in range(experts):
        row = e if per_expert else 0
        svh, up_rotation, suh = (rotations[e, p * inner : (p + 1) * inner] for p in range(3))
        gate, gate_bits = plane(w13, layout.gates, e, zeros)
        up, up_bits = plane(w13, layout.ups, e, slabs.gate_n)
        down, down_bits = plane(w2, layout.downs, e, zeros)
        made.append(
            (
                Matrix(gate, gate_suh[row], svh, gate_bits),
                Matrix(up, up_suh[row], up_rotation, up_bits),
                Matrix(down, suh, down_svh[row], down_bits),
            )
        )
    return slabs, Source(made)


def random_call(
    batch: int, topk: int, slabs: Slabs, *, dtype: torch.dtype = torch.float16, seed: int = 0, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    """x, topk_ids (distinct within a token where the experts suffice) and topk_weights that sum to 1."""
    generator = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn(batch, slabs.hidden, generator=generator, device=device).to(dtype)
    scores = torch.rand(batch, slabs.experts, generator=generator, device=device)
    if topk <= slabs.experts:
        topk_ids = scores.topk(topk).indices
    else:
        topk_ids = torch.randint(slabs.experts, (batch, topk), generator=generator, device=device)
    weights = torch.rand(batch, topk, generator=generator, device=device) + 0.1
    return x, topk_ids.int().contiguous(), weights / weights.sum(1, keepdim=True)


def relative_l2(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())
