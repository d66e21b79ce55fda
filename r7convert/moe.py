"""Routed experts computed from slabs, one layer on one rank: moe_forward is the fused kernel, moe_reference its truth.

    experts = load_experts(open_slabs(folder, layer, rank), "cuda")
    scratch = torch.empty(moe_scratch_bytes(experts, batch, topk), dtype=torch.uint8, device="cuda")
    partial = moe_forward(x, topk_ids, topk_weights, experts, scratch=scratch)      # ranks are summed by the caller

The kernels are kernels/moe.cu: four or five launches that a CUDA graph can capture, no host synchronisation, nothing allocated but
what the caller leaves out. Without a GPU, and where a tier outgrows the descriptors, moe_forward is moe_reference in float16: slow,
and the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from r7convert.codec import BLOCK, Matrix, expert_forward
from r7convert.errors import FormatError, Offences, UnsupportedError, UsageError, complain
from r7convert.format import PROJECTIONS
from r7convert.nvrtc import Kernel, load_kernel
from r7convert.product import Cut, choose_group, choose_token_blocks, cut_product, processors
from r7convert.slabs import Slabs

MAX_TOKENS = 2048
"""Tokens of one launch; more go in turns. At 64 tokens an expert, what a block takes, a turn decodes nothing twice."""
MAX_TOPK = 16
MAX_UNROUTED = 256
"""Pairs up to which each block finds its own, and moe_route is left out."""
KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


@dataclass(frozen=True)
class Experts:
    """The checked slabs of one layer and rank on one device."""

    slabs: Slabs
    one_suh: bool  # gate's and up's are the same numbers: x is rotated once

    @property
    def device(self) -> torch.device:
        return self.slabs.rotations.device

    @property
    def fused(self) -> bool:
        """Whether moe_forward is the kernel."""
        return self.device.type == "cuda" and self.slabs.descriptors is not None


def load_experts(slabs: Slabs, device: torch.device | str) -> Experts:
    """Check the tables against each other and move them to the device.

    Raises:  UnsupportedError for tiers or sides the kernel does not take; FormatError for tables that contradict each other, by
             expert and projection.
    """
    check_slabs(slabs)
    moved: dict[str, Any] = {}
    for field in fields(slabs):
        value = getattr(slabs, field.name)
        if isinstance(value, Tensor):
            moved[field.name] = value.to(device)
        elif isinstance(value, tuple) and value and isinstance(value[0], Tensor):
            moved[field.name] = tuple(tensor.to(device) for tensor in value)
    return Experts(replace(slabs, **moved), torch.equal(slabs.gate_suh, slabs.up_suh))


def check_slabs(slabs: Slabs) -> None:
    """Everything the kernel relies on: it checks nothing itself.

    Raises:  as `load_experts`.
    """
    where = f"layer {slabs.layer} rank {slabs.rank}"
    if not 1 <= len(slabs.tiers) <= 3 or not all(3 <= k <= 6 for k in slabs.tiers):
        raise UnsupportedError(complain(where, "tiers", expected="one to three K of 3..6", found=[*slabs.tiers]))
    sides = {"hidden": slabs.hidden, "inner": slabs.inner}
    for name, side in sides.items():
        if side <= 0 or side % BLOCK:
            raise UnsupportedError(complain(where, name, expected=f"a multiple of {BLOCK}", found=side))
    wrong = Offences()

    def expect(name: str, tensor: Tensor, dtype: torch.dtype, *shapes: tuple[int, ...]) -> None:
        if tuple(tensor.shape) not in shapes or tensor.dtype != dtype or not tensor.is_contiguous():
            expected = f"contiguous {dtype} {' or '.join(str([*s]) for s in shapes)}"
            wrong.add(f"{where}: {name}", "table", expected=expected, found=f"{tensor.dtype} {[*tensor.shape]}")

    hidden, inner, experts = slabs.hidden, slabs.inner, slabs.experts
    for t, k in enumerate(slabs.tiers):
        expect(f"w13[{t}]", slabs.w13[t], torch.int16, (slabs.gate_n[t] + slabs.up_n[t], hidden // 16, inner // 16, 16 * k))
        expect(f"w2[{t}]", slabs.w2[t], torch.int16, (slabs.down_n[t], inner // 16, hidden // 16, 16 * k))
    expect("rotations", slabs.rotations, torch.float16, (experts, 3 * inner), (slabs.stride, 3 * inner))
    for name in ("gate_suh", "up_suh", "down_svh"):
        expect(name, getattr(slabs, name), torch.float16, (1, hidden), (experts, hidden))
    expect("up_suh", slabs.up_suh, torch.float16, tuple(slabs.gate_suh.shape))
    expect("places", slabs.places, torch.int32, (3, experts, 2))
    if slabs.descriptors is not None:
        expect("descriptors", slabs.descriptors, torch.int32, (3 * slabs.stride,))
    wrong.check(FormatError)

    for projection, counts, row in zip(PROJECTIONS, (slabs.gate_n, slabs.up_n, slabs.down_n), _places(slabs).tolist(), strict=True):
        for expert, (tier, index) in enumerate(row):
            if not 0 <= tier < len(counts) or not 0 <= index < counts[tier]:
                expected = f"a tier of {len(counts)} and an index below its count"
                wrong.add(f"{where}: expert {expert}: {projection}", "descriptor", expected=expected, found=[tier, index])
    wrong.check(FormatError)


def _places(slabs: Slabs) -> Tensor:
    """[3, E, 2]: tier and index of every matrix, as the descriptors have them where there are any."""
    if slabs.descriptors is None:
        return slabs.places
    rows = slabs.descriptors.view(3, -1)[:, : slabs.experts]
    return torch.stack((rows >> 8, rows & 255), dim=-1)


# ---------------------------------------------------------------- the truth


def expert_matrices(slabs: Slabs, expert: int) -> tuple[Matrix, Matrix, Matrix]:
    """Gate, up and down of one expert as the slabs have them: what the kernel multiplies by.

    Source:  FORMAT.md section 5.
    """
    found = []
    for row, (tier, index) in enumerate(_places(slabs)[:, expert].tolist()):
        plane = (slabs.w13, slabs.w13, slabs.w2)[row][tier][index + (slabs.gate_n[tier] if row == 1 else 0)]
        found.append((plane, slabs.tiers[tier]))
    gate_svh, up_svh, down_suh = torch.split(slabs.rotations[expert], slabs.inner)

    def vector(table: Tensor) -> Tensor:
        return table[0 if table.shape[0] == 1 else expert]

    (gate, gate_bits), (up, up_bits), (down, down_bits) = found
    return (
        Matrix(gate, vector(slabs.gate_suh), gate_svh, gate_bits),
        Matrix(up, vector(slabs.up_suh), up_svh, up_bits),
        Matrix(down, down_suh, vector(slabs.down_svh), down_bits),
    )


def moe_reference(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, slabs: Slabs, *, dtype: torch.dtype = torch.float64) -> Tensor:
    """The same as moe_forward in plain torch, expert by expert. Runs on the device of its inputs.

    Shapes:  as moe_forward; returns [B, H] float64 for float64, else float32.
    Units:   `dtype` as in codec.expert_forward: float64 rounds nothing.
    Source:  FORMAT.md section 10, "Expert".
    """
    out = torch.zeros(x.shape, dtype=torch.promote_types(dtype, torch.float32), device=x.device)
    for expert in torch.unique(topk_ids).tolist():
        if not 0 <= expert < slabs.experts:
            continue
        token, slot = (topk_ids == expert).nonzero(as_tuple=True)
        result = expert_forward(x[token], *expert_matrices(slabs, expert), dtype=dtype)
        out.index_put_((token,), topk_weights[token, slot, None].to(out.dtype) * result.to(out.dtype), accumulate=True)
    return out


# ---------------------------------------------------------------- the kernel


@dataclass(frozen=True)
class _Plan:
    """The launches of one batch size, and where everything is in the scratch."""

    gate_up: Cut
    down: Cut
    max_items: int
    combine_group: int
    offsets: dict[str, int]
    nbytes: int


def _plan(experts: Experts, tokens: int, topk: int) -> _Plan:
    slabs = experts.slabs
    rows = tokens if slabs.gate_suh.shape[0] == 1 else tokens * topk
    return _plan_shapes(
        slabs.hidden, slabs.inner, slabs.experts, tokens, topk, rows, 1 if experts.one_suh else 2, processors(experts.device)
    )


@cache
def _plan_shapes(hidden: int, inner: int, experts: int, tokens: int, topk: int, rows: int, inputs: int, multiprocessors: int) -> _Plan:
    """`rows` and `inputs`: rows of rotated x, and how many rotations of it."""
    pairs = tokens * topk
    blocks = choose_token_blocks(pairs / experts)
    hit = experts * -math.expm1(-pairs / experts)  # experts that evenly spread routes meet
    items = max(hit, pairs / (8 * blocks))
    gate_up = cut_product(hidden, inner, items=items, token_blocks=blocks, matrices=2, processors=multiprocessors)
    down = cut_product(inner, hidden, items=items, token_blocks=blocks, matrices=1, processors=multiprocessors)
    most_hit = min(pairs, experts)
    max_items = most_hit + (pairs - most_hit) // (8 * blocks) if pairs > MAX_UNROUTED else pairs
    combine_group = choose_group(tokens * (hidden // BLOCK), topk, multiprocessors)

    width = 4 if gate_up.terms_apart else 2
    sizes = {f"in_{i}": rows * hidden * width for i in range(inputs)}
    sizes |= {"order": pairs * 4, "items": max_items * 16, "down_in": pairs * inner * width}
    sizes |= {"arrived": max_items * (gate_up.column_blocks // 2) * 4, "ready": max_items * 4}
    sizes |= {"gate_up": gate_up.splits * 2 * pairs * inner * 4, "down": down.splits * pairs * hidden * 4}
    offsets: dict[str, int] = {}
    at = 0
    for name, size in sizes.items():
        offsets[name], at = at, _aligned(at + size)
    return _Plan(gate_up, down, max_items, combine_group, offsets, at)


def _aligned(at: int) -> int:
    return -(-at // 256) * 256


def moe_scratch_bytes(experts: Experts, batch: int, topk: int) -> int:
    """Bytes of scratch that moe_forward needs for this batch; 0 without the kernel. A smaller batch may need more: more splits."""
    if not experts.fused:
        return 0
    return max((_plan(experts, part.stop - part.start, topk).nbytes for part in _turns(batch)), default=0)


def moe_forward(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    experts: Experts,
    *,
    scratch: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Route, and compute one rank's share of the routed experts: the sum over slots of weight * expert(x).

    Shapes:  x [B, H] bfloat16 or float16; topk_ids [B, k] int32 or int64, k of 1..16, ids outside 0..E-1 take no part;
             topk_weights [B, k] float32; scratch uint8 [moe_scratch_bytes], any content; out [B, H], float32 or x's dtype.
             Returns out, else a new tensor of x's dtype.
    Units:   float16 into both products, float32 everywhere else, one rounding at the end.
    Raises:  UsageError for shapes, dtypes, devices that do not fit, or too small a scratch.
    Source:  FORMAT.md sections 5 and 10.
    Kernel:  kernels/moe.cu; the same bits in every run; relative L2 against moe_reference under 4e-3.
    """
    _check_call(x, topk_ids, topk_weights, experts, out)
    out = torch.empty_like(x) if out is None else out
    if not experts.fused:
        return out.copy_(moe_reference(x, topk_ids, topk_weights, experts.slabs, dtype=torch.float16))
    batch, topk = topk_ids.shape
    need = moe_scratch_bytes(experts, batch, topk)
    if scratch is None:
        scratch = torch.empty(need, dtype=torch.uint8, device=x.device)
    if scratch.numel() * scratch.element_size() < need or scratch.device != x.device or scratch.data_ptr() % 256:
        found = f"{scratch.numel() * scratch.element_size()} on {scratch.device}"
        raise UsageError(complain("moe_forward", "scratch", expected=f"{need} bytes on {x.device}, aligned to 256", found=found))
    for part in _turns(batch):
        _launch(x[part], topk_ids[part], topk_weights[part], experts, scratch, out[part])
    return out


def _turns(batch: int) -> Iterator[slice]:
    for start in range(0, batch, MAX_TOKENS):
        yield slice(start, min(start + MAX_TOKENS, batch))


def _check_call(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, experts: Experts, out: Tensor | None) -> None:
    wrong = Offences()

    def expect(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...]) -> None:
        good = tuple(tensor.shape) == shape and tensor.dtype in dtypes and tensor.device == experts.device and tensor.is_contiguous()
        if not good or tensor.data_ptr() % 8:
            expected = f"contiguous {' or '.join(map(str, dtypes))} {[*shape]} on {experts.device}"
            wrong.add(f"moe_forward: {name}", "tensor", expected=expected, found=f"{tensor.dtype} {[*tensor.shape]} on {tensor.device}")

    batch = x.shape[0] if x.ndim else 0
    topk = topk_ids.shape[1] if topk_ids.ndim == 2 else 0
    if not 1 <= topk <= MAX_TOPK:
        wrong.add("moe_forward: topk_ids", "shape", expected=f"[B, 1..{MAX_TOPK}]", found=[*topk_ids.shape])
    expect("x", x, (torch.bfloat16, torch.float16), (batch, experts.slabs.hidden))
    expect("topk_ids", topk_ids, (torch.int32, torch.int64), (batch, topk))
    expect("topk_weights", topk_weights, (torch.float32,), (batch, topk))
    if out is not None:
        expect("out", out, (torch.float32, x.dtype), (batch, experts.slabs.hidden))
    wrong.check(UsageError)


@cache
def _kernel(door: str, device: torch.device) -> Kernel:
    return load_kernel("moe.cu", door, device=device)


def _launch(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, experts: Experts, scratch: Tensor, out: Tensor) -> None:
    slabs, device = experts.slabs, experts.device
    descriptors = slabs.descriptors
    assert descriptors is not None, "the kernel is not asked without them"
    tokens, topk = topk_ids.shape
    hidden, inner, pairs = slabs.hidden, slabs.inner, tokens * topk
    plan = _plan(experts, tokens, topk)
    gate_up, down = plan.gate_up, plan.down
    at = {name: scratch.data_ptr() + offset for name, offset in plan.offsets.items()}
    ids = (topk_ids, int(topk_ids.dtype == torch.int64), slabs.experts)
    apart = str(gate_up.terms_apart).lower()
    second_in = at.get("in_1", 0)
    by_token = slabs.gate_suh.shape[0] == 1

    def run(door: str, grid: int | tuple[int, ...], block: int, *arguments: object, shared_bytes: int = 0, first: bool = False) -> None:
        _kernel(door, device).launch(grid, block, *arguments, shared_bytes=shared_bytes, overlap=not first)

    def run_warps(door: str, warps: int, *arguments: object, first: bool = False) -> None:
        run(door, -(-warps // 8), 256, *arguments, first=first)

    columns = gate_up.column_blocks // 2
    counters = (at["arrived"], (at["ready"] - at["arrived"]) // 4 + plan.max_items)

    def multiply(cut: Cut, row: int, tiers: tuple[Tensor, ...], sources: tuple[int, ...], sides: tuple[int, int], *to: object) -> None:
        items = (at["items"], at["order"]) if routed else (0, 0)
        planes = ([tier.data_ptr() for tier in tiers] + [0, 0])[:3]
        tables = (
            descriptors.data_ptr() + 4 * row * slabs.stride,
            slabs.stride,
            *planes,
            _packed(slabs.tiers),
            _packed(slabs.gate_n),
        )
        grid = (cut.splits, cut.column_blocks, plan.max_items)
        arguments = (*ids, *items, *tables, *sources, *sides, pairs, *to, at["arrived"], at["ready"], columns)
        run(f"moe_product{cut.instance}", grid, 32 * cut.warps, *arguments, shared_bytes=cut.shared_bytes(max(slabs.tiers)))

    routed = pairs > MAX_UNROUTED
    if routed:
        route = (*ids, pairs, gate_up.item_tokens, plan.max_items, at["order"], at["items"])
        run("moe_route<1024>", 1, 1024, *route, shared_bytes=(12 + 2 * 32) * slabs.experts, first=True)
    rotations = (tokens if by_token else pairs) * (hidden // BLOCK) * (2 if second_in else 1)
    suh = (slabs.gate_suh, slabs.up_suh, slabs.gate_suh.shape[0])
    rotate = (x, KINDS[x.dtype], *ids, *suh, at["in_0"], second_in, tokens, topk, hidden, *counters)
    run_warps(f"moe_rotate<{apart}>", rotations, *rotate, first=not routed)

    rotated = (at["in_0"], second_in or at["in_0"], topk if by_token else 1)
    multiply(gate_up, 0, slabs.w13, rotated, (hidden, inner), at["gate_up"], slabs.rotations, at["down_in"])
    multiply(down, 2, slabs.w2, (at["down_in"], 0, 1), (inner, hidden), at["down"], 0, 0)
    group, one_svh = plan.combine_group, str(slabs.down_svh.shape[0] == 1).lower()
    combine = (at["down"], down.splits, *ids, topk_weights, slabs.down_svh, tokens, topk, hidden, out, KINDS[out.dtype], group)
    run_warps(f"moe_combine<{one_svh}>", tokens * (hidden // BLOCK) * group, *combine)


def _packed(numbers: tuple[int, ...]) -> int:
    """Up to three numbers of 16 bits in one kernel argument."""
    return sum(number << (16 * i) for i, number in enumerate(numbers))
