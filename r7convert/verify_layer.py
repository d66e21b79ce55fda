"""One layer for the part "numbers": what its slabs compute, all ranks summed, against what the source's experts compute.

    want    sum of weight * expert(x): codec in float64, matrices as the source has them
    got     sum over ranks of moe_forward on the slabs: the kernel, or without a GPU the codec in float16

Activations and routes are drawn from the layer's number, and every expert at hand is hit equally often. The layer is judged
whole, and each expert alone on each rank; where one fails, its matrices are decoded on both sides to name the projection.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from r7convert.codec import Matrix, decode_matrix, expert_forward
from r7convert.errors import SHOWN_OFFENDERS
from r7convert.findings import Part
from r7convert.format import PROJECTIONS, TILE
from r7convert.moe import Experts, expert_matrices, moe_forward

Expert = tuple[Matrix, Matrix, Matrix]

BOUND = 4e-3
"""Relative L2 that readers' own tests accept between two such paths in fp16 (FORMAT.md section 10)."""
SLACK = 1.5
"""Of the error that re-encoding should cause: few tokens scatter around the expectation, and silu is not linear."""
SAME_WEIGHTS = 1e-3
TOPK = 8
LEAST_TOKENS, MOST_TOKENS = 16, 256


def judge_layer(
    layer: int,
    original: Callable[[int], Expert],
    experts: Sequence[int],
    ranks: Sequence[Experts],
    part: Part,
    *,
    recorded: Mapping[int, Sequence[float]] | None = None,
    activations: Tensor | None = None,
) -> None:
    """One layer, all of its ranks, on the device they were loaded to; `original(expert)` is the source's gate, up and down there.

    Units:   `recorded` are squared relative errors that re-encoding a matrix cost, gate, up, down. Of an expert they may add up,
             independent of each other, to SLACK times their root in relative L2; of a layer, weighed by each expert's output.
    """
    device, hidden = ranks[0].device, ranks[0].slabs.hidden
    x, ids, weights = (tensor.to(device) for tensor in draw_call(layer, experts, hidden, activations))
    want = torch.zeros(x.shape, dtype=torch.float64, device=device)
    alone = part.check("experts: each alone on each rank, against the source's channels", "experts on ranks")
    worst: tuple[float, int] = (-1.0, -1)
    expected = 0.0
    for expert in experts:
        matrices = original(expert)
        token, slot = (ids == expert).nonzero(as_tuple=True)
        rows, weight = x[token].contiguous(), weights[token, slot, None].double()
        to_it, fully = torch.full_like(token[:, None], expert, dtype=torch.int32), torch.ones(len(token), 1, device=device)
        squared = list((recorded or {}).get(expert, ()))
        bound = BOUND + SLACK * math.sqrt(math.fsum(squared))
        whole = torch.zeros(rows.shape, dtype=torch.float64, device=device)
        for rank, loaded in enumerate(ranks):  # one by one: ranks that changed places have the same sum
            share = cut_expert(matrices, rank, len(ranks))
            true = expert_forward(rows, *share, dtype=torch.float64)
            whole += true
            error = _relative(_forward(rows, to_it, fully, [loaded]), true)
            worst = max(worst, (rank_of(error), expert))
            alone.saw()
            if not error <= bound:  # NaN fails too
                names = _differing(share, loaded, expert, squared) if len(alone.shown) < SHOWN_OFFENDERS else []
                where = f"layer {layer}: expert {expert}: rank {rank}: {', '.join(names) or 'no projection alone'}"
                alone.fail(where, "relative L2", expected=f"at most {bound:.3g}", found=f"{error:.3g}")
        want.index_add_(0, token, weight * whole)
        expected += math.fsum(squared) * float((weight * whole).square().sum())
    got = _forward(x, ids, weights, ranks)
    error, norm = _relative(got, want), float(want.norm())
    bound = BOUND + (SLACK * math.sqrt(expected) / norm if norm else 0.0)
    check = part.check("layers: slabs computed against the source", "layers")
    check.expect(error <= bound, f"layer {layer}", "relative L2", expected=f"at most {bound:.3g}", found=f"{error:.3g}")
    part.layers[str(layer)] = {
        "relative_l2": _figure(error),
        "max_error": _figure(float((got - want).abs().max())),
        "bound": _figure(bound),
        "worst_expert": worst[1],
        "worst_expert_l2": _figure(worst[0]),
    }


def draw_call(layer: int, experts: Sequence[int], hidden: int, activations: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """x, topk_ids and topk_weights of one layer, the same on every machine: tokens step around a wheel of the experts, so that
    each is hit equally often and none twice by one token.

    Shapes:  x [N, H], ids int32 [N, k], weights float32 [N, k] that sum to 1; k is 8 or the number of experts.
    """
    generator = torch.Generator().manual_seed(layer)
    count, topk = len(experts), min(TOPK, len(experts))
    least = LEAST_TOKENS if activations is None else min(max(len(activations), LEAST_TOKENS), MOST_TOKENS)
    tokens = count * -(-least // count)
    x = torch.randn(tokens, hidden, generator=generator).bfloat16()
    if activations is not None:
        x = activations[torch.arange(tokens) % len(activations)]
    wheel = torch.tensor(experts, dtype=torch.int32)[torch.randperm(count, generator=generator)]
    steps = torch.randperm(count, generator=generator)[:topk]
    ids = wheel[(torch.arange(tokens)[:, None] + steps) % count]
    weights = torch.rand(tokens, topk, generator=generator) + 0.1
    return x, ids.contiguous(), weights / weights.sum(1, keepdim=True)


def _forward(x: Tensor, ids: Tensor, weights: Tensor, ranks: Sequence[Experts]) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for experts in ranks:
        out += moe_forward(x, ids, weights, experts, out=torch.empty(x.shape, dtype=torch.float32, device=x.device))
    return out


def cut_expert(matrices: Expert, rank: int, tp: int) -> Expert:
    """A rank's channels of a whole expert.

    Source:  FORMAT.md section 4: gate and up are cut along their output, down along its input.
    """
    gate, up, down = matrices
    inner = len(down.suh) // tp
    own, tiles = slice(rank * inner, (rank + 1) * inner), slice(rank * inner // TILE, (rank + 1) * inner // TILE)
    first, second = (Matrix(whole.trellis[:, tiles], whole.suh, whole.svh[own], whole.bits) for whole in (gate, up))
    return first, second, Matrix(down.trellis[tiles], down.suh[own], down.svh, down.bits)


def _differing(share: Expert, loaded: Experts, expert: int, squared: Sequence[float]) -> list[str]:
    """The projections whose decoded weights are not the source's."""
    named = []
    for p, (proj, true, stored) in enumerate(zip(PROJECTIONS, share, expert_matrices(loaded.slabs, expert), strict=True)):
        want, got = (decode_matrix(m.trellis, m.suh, m.svh, bits=m.bits).double() for m in (true, stored))
        if not _relative(got, want) <= SAME_WEIGHTS + (SLACK * math.sqrt(squared[p]) if squared else 0.0):
            named.append(proj if stored.bits == true.bits else f"{proj} (K{stored.bits}, the source's K{true.bits})")
    return named


def _relative(got: Tensor, want: Tensor) -> float:
    lost, norm = float((got - want).norm()), float(want.norm())
    return lost / norm if norm else lost


def rank_of(error: float | str) -> float:
    """For max: what is no number is worst."""
    return error if isinstance(error, float) and math.isfinite(error) else math.inf


def _figure(value: float) -> float | str:
    """Three digits; JSON has no words for what is not finite."""
    return float(f"{value:.3g}") if math.isfinite(value) else str(value)
