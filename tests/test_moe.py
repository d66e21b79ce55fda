"""Routed experts from slabs without a GPU: the truth against experts that never saw a slab, and what it would catch.

The kernel itself is held to this truth in tests/gpu/test_moe.py. BOUND is what the two may differ by; every corruption below
is shown to exceed it by a factor of 25 at least, so that a verdict by this bound has a meaning.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from r7convert import codec
from r7convert.errors import FormatError, UnsupportedError, UsageError
from r7convert.linear import linear_forward
from r7convert.moe import MAX_TOPK, check_slabs, load_experts, moe_forward, moe_reference, moe_scratch_bytes
from r7convert.product import STRIP_CHANNELS, TOKEN_BLOCKS, choose_group, choose_splits, choose_token_blocks, cut_product
from r7convert.slabs import Slabs
from tests.random_slabs import random_bits, random_call, random_slabs, relative_l2

BOUND = 4e-3
MIXED = [(3, 4, 5), (3, 3, 4), (4, 4, 4), (5, 3, 3), (4, 4, 4), (3, 4, 4), (4, 3, 5)]


def make(bits=MIXED, *, hidden: int = 256, inner: int = 128, **options):
    return random_slabs(bits, hidden=hidden, inner=inner, **options)


class TestTruth:
    @pytest.mark.parametrize("per_expert", [False, True])
    @pytest.mark.parametrize("two_suh", [False, True])
    def test_slabs_compute_what_their_experts_do(self, per_expert: bool, two_suh: bool) -> None:
        slabs, source = make(per_expert=per_expert, two_suh=two_suh)
        call = random_call(9, 3, slabs)
        assert relative_l2(moe_reference(*call, slabs), source.forward(*call)) < 1e-12

    @pytest.mark.parametrize("pool", [(3,), (6,), (4, 6), (3, 4, 5)])
    def test_float16_rounding_is_within_the_bound(self, pool: tuple[int, ...]) -> None:
        slabs, _ = make(random_bits(5, pool, 1))
        call = random_call(6, 2, slabs)
        error = relative_l2(moe_reference(*call, slabs, dtype=torch.float16), moe_reference(*call, slabs))
        assert 1e-5 < error < BOUND / 2

    def test_ids_outside_take_no_part(self) -> None:
        slabs, source = make()
        x, ids, weights = random_call(5, 3, slabs)
        ids[0, 1], ids[2] = -1, len(MIXED)
        got = moe_reference(x, ids, weights, slabs)
        assert relative_l2(got, source.forward(x, ids, weights)) < 1e-12
        assert got[2].eq(0).all()
        assert got[0].ne(0).any()

    def test_ranks_add_up(self) -> None:
        """A rank owns its channels of gate, up and down: the sum over ranks is the whole expert."""
        whole, source = make([(3, 4, 4), (4, 3, 3)], inner=256)
        call = random_call(4, 2, whole)
        ranks = []
        for rank in range(2):
            tiles = slice(8 * rank, 8 * (rank + 1))
            rotations = whole.rotations.view(2, 3, 256)[:, :, 128 * rank : 128 * (rank + 1)].reshape(2, -1).contiguous()
            w13 = tuple(t[:, :, tiles].contiguous() for t in whole.w13)
            w2 = tuple(t[:, tiles].contiguous() for t in whole.w2)
            ranks.append(replace(whole, rank=rank, tp=2, inner=128, w13=w13, w2=w2, rotations=rotations))
        total = sum(moe_reference(*call, rank) for rank in ranks)
        assert relative_l2(total, source.forward(*call)) < 1e-12


def exchange(table: Tensor, a: int, b: int) -> Tensor:
    order = list(range(table.shape[0]))
    order[a], order[b] = b, a
    return table[order].contiguous()


def swap_gate_and_up(slabs: Slabs) -> Slabs:
    gate, up, down = slabs.descriptors.view(3, -1)
    w13 = tuple(torch.cat([t[n:], t[:n]]) for t, n in zip(slabs.w13, slabs.gate_n, strict=True))
    return replace(slabs, w13=w13, gate_n=slabs.up_n, up_n=slabs.gate_n, descriptors=torch.cat([up, gate, down]))


def exchange_planes(slabs: Slabs) -> Slabs:
    tier = slabs.tiers.index(4)
    return replace(slabs, w2=tuple(exchange(t, 0, 1) if i == tier else t for i, t in enumerate(slabs.w2)))


def shift_descriptor(slabs: Slabs) -> Slabs:
    descriptors = slabs.descriptors.clone()
    tier = slabs.tiers.index(4)
    at = int((descriptors[2 * slabs.stride :] == (tier << 8)).nonzero()[0]) + 2 * slabs.stride
    descriptors[at] += 1
    return replace(slabs, descriptors=descriptors)


def rotations_in_tier_order(slabs: Slabs) -> Slabs:
    gates = slabs.descriptors[: slabs.experts]
    return replace(slabs, rotations=slabs.rotations[gates.argsort()].contiguous())


def suh_of_another_layer(slabs: Slabs) -> Slabs:
    other, _ = make(seed=99)
    return replace(slabs, gate_suh=other.gate_suh, up_suh=other.up_suh)


def svh_of_another_layer(slabs: Slabs) -> Slabs:
    return replace(slabs, down_svh=make(seed=99)[0].down_svh)


def one_wrong_k(slabs: Slabs) -> Slabs:
    """A K4 tier read as K3: the first three quarters of every tile's words."""
    tier = slabs.tiers.index(4)
    tiers = tuple(3 if t == tier else k for t, k in enumerate(slabs.tiers))
    w13 = tuple(t[..., :48].contiguous() if i == tier else t for i, t in enumerate(slabs.w13))
    w2 = tuple(t[..., :48].contiguous() if i == tier else t for i, t in enumerate(slabs.w2))
    return replace(slabs, tiers=tiers, w13=w13, w2=w2)


def swap_halves(slabs: Slabs) -> Slabs:
    """Rank 1's channels where rank 0's should be, in gate and up alone."""
    half = slabs.inner // 32
    w13 = tuple(torch.cat([t[:, :, half:], t[:, :, :half]], dim=2).contiguous() for t in slabs.w13)
    return replace(slabs, w13=w13)


CORRUPTIONS = [
    swap_gate_and_up,
    exchange_planes,
    shift_descriptor,
    rotations_in_tier_order,
    suh_of_another_layer,
    svh_of_another_layer,
    one_wrong_k,
    swap_halves,
]


class TestCatches:
    @pytest.mark.parametrize("corrupt", CORRUPTIONS, ids=lambda f: f.__name__)
    def test_corruption_is_far_outside_the_bound(self, corrupt: Callable[[Slabs], Slabs]) -> None:
        slabs, source = make(inner=256)
        call = random_call(16, 4, slabs)
        want = source.forward(*call)
        assert relative_l2(moe_reference(*call, slabs), want) < 1e-12
        broken = corrupt(slabs)
        check_slabs(broken)  # nothing but the numbers gives it away
        assert relative_l2(moe_reference(*call, broken), want) > 25 * BOUND

    def test_gate_of_another_rank_is_caught_by_the_sum(self) -> None:
        slabs, source = make([(4, 4, 4)])
        other, other_source = make([(4, 4, 4)], seed=5)
        call = random_call(4, 1, slabs)
        swapped = replace(slabs, w13=other.w13), replace(other, w13=slabs.w13)
        got = sum(moe_reference(*call, rank) for rank in swapped)
        assert relative_l2(got, source.forward(*call) + other_source.forward(*call)) > 25 * BOUND


class TestChecks:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda s: {"tiers": (3, 4, 7)}, "tiers"),
            (lambda s: {"hidden": 192}, "multiple of 128"),
        ],
    )
    def test_what_the_kernel_does_not_take(self, change, message: str) -> None:
        slabs, _ = make()
        with pytest.raises(UnsupportedError, match=message):
            check_slabs(replace(slabs, **change(slabs)))

    def test_a_tier_of_more_than_256_is_computed_by_the_codec(self) -> None:
        slabs, source = make([(4, 4, 4)] * 257 + [(3, 3, 3)], hidden=128)
        assert slabs.descriptors is None
        x, _, weights = random_call(3, 2, slabs)
        call = x, torch.tensor([[256, 0], [257, 255], [1, 256]], dtype=torch.int32), weights
        assert not load_experts(slabs, "cpu").fused
        assert relative_l2(moe_reference(*call, slabs), source.forward(*call)) < 1e-12
        places = slabs.places.clone()
        places[1, 3, 1] = 257
        with pytest.raises(FormatError, match="expert 3: up_proj: descriptor"):
            check_slabs(replace(slabs, places=places))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda s: {"w13": (s.w13[0][1:], *s.w13[1:])}, r"w13\[0\]"),
            (lambda s: {"w2": tuple(t.int() for t in s.w2)}, r"w2\[0\].*int16"),
            (lambda s: {"rotations": s.rotations[:, 1:]}, "rotations"),
            (lambda s: {"down_svh": s.down_svh.expand(2, -1)}, "down_svh"),
            (lambda s: {"descriptors": torch.cat([s.descriptors[:1] + 200, s.descriptors[1:]])}, "expert 0: gate_proj: descriptor"),
            (
                lambda s: {"descriptors": torch.where(torch.arange(3 * s.stride) == s.stride + 2, -1, s.descriptors).int()},
                "expert 2: up_proj",
            ),
        ],
    )
    def test_tables_that_contradict_each_other(self, change, message: str) -> None:
        slabs, _ = make()
        with pytest.raises(FormatError, match=message):
            load_experts(replace(slabs, **change(slabs)), "cpu")

    def test_calls(self) -> None:
        slabs, _ = make()
        experts = load_experts(slabs, "cpu")
        x, ids, weights = random_call(4, 2, slabs)
        for wrong, message in [
            ((x.float(), ids, weights), "x: tensor"),
            ((x[:, :128], ids, weights), "x: tensor"),
            ((x, ids[:3], weights), "topk_ids"),
            ((x, ids.to(torch.int16), weights), "topk_ids"),
            ((x, ids, weights.half()), "topk_weights"),
            ((x, ids.expand(4, 2)[:, :0], weights[:, :0]), "topk_ids: shape"),
            ((x, ids.repeat(1, MAX_TOPK), weights.repeat(1, MAX_TOPK)), "topk_ids: shape"),
        ]:
            with pytest.raises(UsageError, match=message):
                moe_forward(*wrong, experts)
        with pytest.raises(UsageError, match="out"):
            moe_forward(x, ids, weights, experts, out=torch.empty(4, 256, dtype=torch.bfloat16))


class TestWithoutGpu:
    def test_forward_is_the_reference_in_float16(self) -> None:
        slabs, _ = make()
        experts = load_experts(slabs, "cpu")
        call = random_call(4, 2, slabs, dtype=torch.bfloat16)
        out = torch.full((4, 256), torch.nan)
        assert moe_forward(*call, experts, out=out) is out
        assert torch.equal(out, moe_reference(*call, slabs, dtype=torch.float16))
        assert moe_forward(*call, experts).dtype == torch.bfloat16
        assert moe_scratch_bytes(experts, 4, 2) == 0

    def test_linear_is_the_codec_side_by_side(self) -> None:
        slabs, source = make([(6, 6, 6)])
        gate, up, down = source.experts[0]
        x = random_call(3, 1, slabs)[0]
        want = torch.cat([codec.linear_forward(x, gate), codec.linear_forward(x, up)], dim=1)
        assert torch.equal(linear_forward(x, [gate, up]), want)
        assert linear_forward(x, [gate], dtype=torch.float32).dtype == torch.float32
        for wrong, message in [([], "one or two"), ([down], "x: tensor"), ([replace(gate, bits=5), up], "trellis 0")]:
            with pytest.raises(UsageError, match=message):
                linear_forward(x, wrong)
        with pytest.raises(UsageError, match="one suh"):
            linear_forward(x, [gate, replace(up, suh=-up.suh)])


class TestCut:
    @pytest.mark.parametrize("side", range(128, 6272, 128))
    def test_every_strip_has_a_warp_and_every_warp_a_strip(self, side: int) -> None:
        for items in (0.5, 3.0, 1000.0):
            cut = cut_product(512, side, items=items, token_blocks=1, matrices=1, processors=132)
            assert cut.column_blocks * cut.warps * STRIP_CHANNELS == side
            assert cut.warps in (2, 4)  # the kernel takes these

    def test_token_blocks_follow_the_mean(self) -> None:
        assert [choose_token_blocks(n) for n in (0.1, 5, 10, 20, 40, 1000)] == [1, 1, 2, 4, 4, 4]

    @pytest.mark.parametrize("bits", [3, 4, 5, 6])
    def test_a_block_fits_the_smallest_card(self, bits: int) -> None:
        """99 KiB is what a block may have on sm_89 and sm_120; the kernel's own tables take 600 bytes of it."""
        for blocks in TOKEN_BLOCKS:
            assert cut_product(512, 512, items=1, token_blocks=blocks, matrices=1, processors=132).shared_bytes(bits) <= 99 * 1024 - 600

    def test_splits_leave_every_block_two_stages(self) -> None:
        for in_side in range(128, 6272, 128):
            for blocks in (0.5, 8, 96, 1000, 1e5):
                for warps in (2, 4):
                    splits = choose_splits(in_side, blocks, warps=warps, token_blocks=1, processors=132)
                    assert 1 <= splits <= max(1, in_side // 128)

    def test_choices_at_the_measured_geometry(self) -> None:
        """GLM-5.2 at tp 4 on 132 multiprocessors: the splits that the sweeps of docs/log.md found best."""
        chosen = {}
        for batch in (1, 8, 32, 128):
            hit = 256 * (1 - math.exp(-8 * batch / 256))
            gate_up = cut_product(6144, 512, items=hit, token_blocks=1, matrices=2, processors=132)
            down = cut_product(512, 6144, items=hit, token_blocks=1, matrices=1, processors=132)
            chosen[batch] = (gate_up.splits, down.splits)
        assert chosen == {1: (24, 4), 8: (4, 1), 32: (2, 1), 128: (1, 1)}

    def test_groups_fill_the_gpu_and_no_more(self) -> None:
        assert [choose_group(48, parts, 132) for parts in (1, 2, 3, 8, 24)] == [1, 2, 2, 8, 8]
        assert choose_group(132 * 16, 8, 132) == 1
        assert choose_group(132 * 8, 8, 132) == 2
