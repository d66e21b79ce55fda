"""How a product with a trellis matrix is cut for the GPU: the host half of kernels/product.cuh.

A block takes up to 8 * token_blocks tokens and, for each of its warps, a strip of out-channels; the in-channels are split over
`splits` blocks, whose sums are added by the kernel that follows. Pure arithmetic on shapes: the same shapes give the same
cut, so that scratch can be sized, and a captured graph replayed, without a look at the data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

STAGE_CHANNELS = 64  # in-channels a stage of the pipeline
STRIP_CHANNELS = 64  # out-channels a warp owns
MAX_WARPS = 4
TOKEN_BLOCKS = (1, 2, 4)  # instantiations, in blocks of 8 tokens
DEPTH = 2

FILL = 0.95  # of the blocks the GPU holds at once that a product should have; fitted to the sweeps of docs/log.md on an H200
MAX_SPLITS = 32
MIN_STAGES = 2  # a block's least share of the in-channels


@dataclass(frozen=True)
class Cut:
    """How one product is launched."""

    token_blocks: int
    warps: int
    splits: int
    column_blocks: int

    @property
    def item_tokens(self) -> int:
        return 8 * self.token_blocks

    @property
    def terms_apart(self) -> bool:
        """Activations are kept twice, see kernels/product.cuh."""
        return self.token_blocks <= 2

    @property
    def instance(self) -> str:
        """The template arguments."""
        return f"<{self.token_blocks},{DEPTH}>"

    def shared_bytes(self, max_bits: int) -> int:
        token_bytes = STAGE_CHANNELS * (4 if self.terms_apart else 2)
        strip_bytes = STAGE_CHANNELS * STRIP_CHANNELS * max_bits // 8
        return DEPTH * (self.item_tokens * token_bytes + self.warps * strip_bytes)


def count_warps(out_side: int) -> int:
    """Warps a block: the largest power of two up to MAX_WARPS that leaves none without a strip."""
    return math.gcd(out_side // STRIP_CHANNELS, MAX_WARPS)


def choose_token_blocks(tokens: float) -> int:
    """Blocks of 8 tokens for matrices that meet `tokens` tokens on average: room for most, so that few are decoded twice."""
    return next((n for n in TOKEN_BLOCKS if tokens <= 5.5 * n), TOKEN_BLOCKS[-1])


def choose_splits(in_side: int, blocks: float, *, warps: int, token_blocks: int, processors: int) -> int:
    """The fewest splits of the in-channels that fill the GPU once, `blocks` being the blocks of one split."""
    room = processors * (24 if token_blocks == 1 else 16) // warps  # as kernels/product.cuh asks for
    most = max(1, min(in_side // STAGE_CHANNELS // MIN_STAGES, MAX_SPLITS))
    return min(most, math.ceil(FILL * room / max(1.0, blocks)))


def choose_group(tasks: int, parts: int, processors: int) -> int:
    """Warps a task of a small kernel, each summing some of its parts: as many as still fit on the GPU at once, up to 8."""
    group = 8
    while group > 1 and (group > parts or tasks * group > 16 * processors):
        group //= 2
    return group


def cut_product(in_side: int, out_side: int, *, items: float, token_blocks: int, matrices: int, processors: int) -> Cut:
    """The launch of `matrices` products of one shape, each met by `items` blocks of tokens."""
    warps = count_warps(out_side)
    column_blocks = out_side // (warps * STRIP_CHANNELS) * matrices
    splits = choose_splits(in_side, items * column_blocks, warps=warps, token_blocks=token_blocks, processors=processors)
    return Cut(token_blocks=token_blocks, warps=warps, splits=splits, column_blocks=column_blocks)


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    import torch

    return torch.cuda.get_device_properties(device).multi_processor_count
