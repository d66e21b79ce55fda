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
MAX_WARPS = 8
TOKEN_BLOCKS = (1, 2, 4)  # instantiations, in blocks of 8 tokens
DEPTH = 2

# What the choice of `splits` is made by, fitted to the sweeps on an H200 in docs/log.md. The unit is what a multiprocessor at full
# speed takes for a stage of four warps. A block costs one for each 8 tokens besides its stages (prologue, sums out and in
# again), a round of blocks five before its first stage is there; a multiprocessor reaches these shares of its speed with 4, 8,
# ... 24 warps on it; and routes hit somewhat more or fewer experts than the mean.
BLOCK_COST = 1.0
ROUND_COST = 5.0
SPEED = (0.3, 0.55, 0.73, 0.86, 0.94, 1.0)
MARGIN = 1.04
MAX_SPLITS = 32
MIN_STAGES = 2  # a block's least share of the in-channels
FEW_ITEMS = 16  # up to which blocks are of eight warps: fewer blocks start sooner; above, of four, which spread more evenly


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


def count_warps(out_side: int, most: int) -> int:
    """Warps a block: the largest power of two up to `most` that leaves none without a strip."""
    return math.gcd(out_side // STRIP_CHANNELS, most)


def choose_token_blocks(tokens: float) -> int:
    """Blocks of 8 tokens for matrices that meet `tokens` tokens on average: room for most, so that few are decoded twice."""
    return next((n for n in TOKEN_BLOCKS if tokens <= 5.5 * n), TOKEN_BLOCKS[-1])


def choose_splits(in_side: int, blocks: float, *, warps: int, token_blocks: int, processors: int) -> int:
    """Splits of the in-channels that should end first, `blocks` being the blocks of one split."""
    stages = in_side // STAGE_CHANNELS
    room = 4 * len(SPEED) // warps  # blocks a multiprocessor takes at once
    best = (math.inf, 1)
    for splits in range(1, max(1, min(stages // MIN_STAGES, MAX_SPLITS)) + 1):
        each = math.ceil(max(1.0, blocks * MARGIN) * splits / processors)
        speed = SPEED[max(1, min(each, room) * warps // 4) - 1]
        work = each * (math.ceil(stages / splits) + BLOCK_COST * token_blocks) * warps / 4
        best = min(best, (work / speed + ROUND_COST * math.ceil(each / room), splits))
    return best[1]


def choose_group(tasks: int, parts: int, processors: int) -> int:
    """Warps a task of a small kernel, each summing some of its parts: as many as still fit on the GPU at once, up to 8."""
    group = 8
    while group > 1 and (group > parts or tasks * group > 16 * processors):
        group //= 2
    return group


def cut_product(in_side: int, out_side: int, *, items: float, token_blocks: int, matrices: int, processors: int) -> Cut:
    """The launch of `matrices` products of one shape, each met by `items` blocks of tokens."""
    warps = count_warps(out_side, MAX_WARPS if items <= FEW_ITEMS else MAX_WARPS // 2)
    column_blocks = out_side // (warps * STRIP_CHANNELS) * matrices
    splits = choose_splits(in_side, items * column_blocks, warps=warps, token_blocks=token_blocks, processors=processors)
    return Cut(token_blocks=token_blocks, warps=warps, splits=splits, column_blocks=column_blocks)


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    import torch

    return torch.cuda.get_device_properties(device).multi_processor_count
