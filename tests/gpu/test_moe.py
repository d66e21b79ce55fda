"""The fused kernel against its truth on a grid with odd sizes: everything poisoned, everything repeated."""

from __future__ import annotations

import pytest
import torch

from r7convert import codec, moe
from r7convert.codec import Matrix
from r7convert.linear import linear_forward
from r7convert.moe import load_experts, moe_forward, moe_reference, moe_scratch_bytes
from tests.random_slabs import random_bits, random_call, random_scales, random_slabs, relative_l2

pytestmark = pytest.mark.gpu

BOUND = 4e-3
DEVICE = "cuda"

# (pool of K, hidden, inner, experts, per_expert, two_suh)
LAYERS = {
    "one tier K3": ((3,), 256, 128, 4, False, False),
    "one tier K6, tp 1": ((6,), 768, 2048, 5, False, False),
    "K3/K4, tp 4": ((3, 4), 1536, 512, 64, False, False),
    "K4/K6, odd strips": ((4, 6), 384, 384, 9, True, True),
    "K3/K5, per expert": ((3, 5), 640, 256, 37, True, False),
    "K5/K6, two suh": ((5, 6), 512, 640, 3, False, True),
    "K3/K4/K5": ((3, 4, 5), 1024, 896, 16, False, False),
    "K3/K4/K5, per expert, 288": ((3, 4, 5), 128, 128, 288, True, True),
    "256 experts": ((3, 4), 256, 256, 256, False, False),
}
CALLS = [(1, 1), (1, 8), (3, 2), (17, 5), (65, 4), (257, 8), (1000, 3), (40, 16)]


@pytest.fixture(autouse=True)
def fresh():
    torch.cuda.synchronize()
    yield
    torch.cuda.synchronize()


def layer(name: str):
    pool, hidden, inner, experts, per_expert, two_suh = LAYERS[name]
    bits = random_bits(experts, pool, 7)
    slabs, _ = random_slabs(bits, hidden=hidden, inner=inner, per_expert=per_expert, two_suh=two_suh, seed=11, device=DEVICE)
    return load_experts(slabs, DEVICE)


def poisoned(experts: moe.Experts, batch: int, topk: int) -> torch.Tensor:
    return torch.full((moe_scratch_bytes(experts, batch, topk),), 0xFF, dtype=torch.uint8, device=DEVICE)  # every float a NaN


@pytest.mark.parametrize("name", LAYERS)
def test_matches_the_truth(name: str) -> None:
    experts = layer(name)
    errors = {}
    for nth, (batch, topk) in enumerate(CALLS):
        x, ids, weights = random_call(batch, topk, experts.slabs, dtype=(torch.float16, torch.bfloat16)[nth % 2], seed=nth, device=DEVICE)
        ids = ids.to((torch.int32, torch.int64)[nth % 2])
        out = torch.full((batch, experts.slabs.hidden), torch.nan, device=DEVICE)
        moe_forward(x, ids, weights, experts, scratch=poisoned(experts, batch, topk), out=out)
        errors[batch, topk] = relative_l2(out, moe_reference(x, ids, weights, experts.slabs))
        again = torch.full_like(out, torch.nan)
        moe_forward(x, ids, weights, experts, scratch=poisoned(experts, batch, topk), out=again)
        assert torch.equal(out, again), (batch, topk)
        narrow = moe_forward(x, ids, weights, experts)
        assert torch.equal(narrow, out.to(x.dtype))
    assert max(errors.values()) <= BOUND / 4, errors
    assert max(errors.values()) <= 2 * min(errors.values()), errors  # no growth with batch


def test_every_block_of_tokens_was_used() -> None:
    """The grid above reaches every instantiation."""
    seen = set()
    for name in LAYERS:
        slabs = layer(name).slabs
        for batch, topk in CALLS:
            seen.add(moe._plan(load_experts(slabs, DEVICE), batch, topk).gate_up.token_blocks)
    assert seen == {1, 2, 4}


@pytest.mark.parametrize("batch", [2048, 2049, 4096])
def test_large_batches_go_in_turns(batch: int) -> None:
    experts = layer("256 experts")
    call = random_call(batch, 8, experts.slabs, device=DEVICE)
    out = torch.full(call[0].shape, torch.nan, device=DEVICE)
    moe_forward(*call, experts, scratch=poisoned(experts, batch, 8), out=out)
    assert relative_l2(out, moe_reference(*call, experts.slabs)) <= BOUND / 4


def test_skewed_routes() -> None:
    """All tokens to one expert, and ids outside that take no part."""
    experts = layer("K3/K4, tp 4")
    x, ids, weights = random_call(300, 4, experts.slabs, device=DEVICE)
    ids[:, 0] = 5
    ids[::7, 1] = -1
    ids[::5, 2] = experts.slabs.experts
    ids[11] = -1
    out = torch.full(x.shape, torch.nan, device=DEVICE)
    moe_forward(x, ids, weights, experts, scratch=poisoned(experts, 300, 4), out=out)
    assert relative_l2(out, moe_reference(x, ids, weights, experts.slabs)) <= BOUND / 4
    assert out[11].eq(0).all()


def test_empty_batch() -> None:
    experts = layer("one tier K3")
    call = random_call(0, 2, experts.slabs, device=DEVICE)
    assert moe_forward(*call, experts).shape == (0, 256)


def test_graph_replays_with_new_inputs() -> None:
    experts = layer("K3/K4/K5")
    call = random_call(33, 4, experts.slabs, device=DEVICE)
    out = torch.empty(call[0].shape, device=DEVICE)
    scratch = poisoned(experts, 33, 4)
    moe_forward(*call, experts, scratch=scratch, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        moe_forward(*call, experts, scratch=scratch, out=out)
    for seed in range(5):
        fresh_call = random_call(33, 4, experts.slabs, seed=100 + seed, device=DEVICE)
        for held, new in zip(call, fresh_call, strict=True):
            held.copy_(new)
        out.fill_(torch.nan)
        scratch.fill_(0xFF)
        graph.replay()
        assert relative_l2(out, moe_reference(*fresh_call, experts.slabs)) <= BOUND / 4


def test_padded_planes_are_never_read() -> None:
    """FORMAT.md section 5 pads an empty tier with a zero plane and the rotations to `stride` rows: poison there stays unseen."""
    slabs, _ = random_slabs([(3, 4, 4), (3, 4, 4), (3, 4, 4)], hidden=256, inner=128, device=DEVICE)
    assert slabs.stride > slabs.experts
    from dataclasses import replace

    padding = torch.full((slabs.stride - slabs.experts, slabs.rotations.shape[1]), torch.nan, dtype=torch.float16, device=DEVICE)
    padded = replace(slabs, rotations=torch.cat([slabs.rotations, padding]))
    call = random_call(9, 2, slabs, device=DEVICE)
    assert torch.equal(moe_forward(*call, load_experts(padded, DEVICE)), moe_forward(*call, load_experts(slabs, DEVICE)))


@pytest.mark.parametrize("bits", [3, 4, 5, 6])
@pytest.mark.parametrize(("in_side", "out_side"), [(256, 128), (1024, 512), (640, 1152)])
def test_linear_matches_the_codec(bits: int, in_side: int, out_side: int) -> None:
    generator = torch.Generator(device=DEVICE).manual_seed(bits)

    def matrix(suh: torch.Tensor) -> Matrix:
        words = torch.randint(-32768, 32768, (in_side // 16, out_side // 16, 16 * bits), generator=generator, device=DEVICE).short()
        return Matrix(words, suh, random_scales(out_side, unit=1.0, generator=generator), bits)

    suh = random_scales(in_side, unit=in_side**-0.5, generator=generator)
    first, second = matrix(suh), matrix(suh.clone())
    for tokens in (1, 7, 16, 33, 200):
        x = torch.randn(tokens, in_side, generator=generator, device=DEVICE).bfloat16()
        want = [codec.linear_forward(x, m, dtype=torch.float64) for m in (first, second)]
        assert relative_l2(linear_forward(x, [first], dtype=torch.float32), want[0]) <= BOUND / 4
        assert relative_l2(linear_forward(x, [first, second], dtype=torch.float32), torch.cat(want, dim=1)) <= BOUND / 4
