"""Tiles and the trellis, in plain torch: bits, states, values, and the search for the best states. Slow, obvious, the truth.

A tile is 16 x 16 weights of a rotated matrix, held as a ring of 256 symbols of K bits:

    symbols -> stream of 256*K bits -> 256 states of 16 overlapping bits -> 256 codebook values -> 16 x 16 weights

Decoding is table look-up. Encoding is a shortest path: two consecutive states share 16-K bits (a *node*), so the best
symbols for a tile are the cheapest closed walk over 256 steps of 65,536 states. FORMAT.md section 10 is the text that
this file says in code; cpu.py and kernels.py do the same work fast and are judged by it. codec.py builds matrices on
it and hands its names on: read that next.

Everything here runs on any device and gives the same bits on each.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from .errors import FormatError, complain

MCG = 0xCBAC1FED
MCG_MARKER = MCG - (1 << 32)  # as the int32 scalar that files hold
TILE = 256  # weights in a tile
STATES = 1 << 16


# ---------------------------------------------------------------- values and bits


@lru_cache(maxsize=16)
def _codebook(device: torch.device) -> Tensor:
    mixed = (torch.arange(STATES, dtype=torch.int64) * MCG) & 0xFFFFFFFF
    mixed = (mixed & 0x8FFF8FFF) ^ 0x3B603B60
    low, high = ((half & 0xFFFF).to(torch.int16).view(torch.float16) for half in (mixed, mixed >> 16))
    return (low + high).to(device)


def codebook(device: torch.device | str = "cpu") -> Tensor:
    """The mcg value of each of the 65,536 states.

    Shapes:  returns [65536] float16 on `device`; shared, not to be written to.
    Source:  FORMAT.md section 10, "mcg value".
    """
    return _codebook(torch.device(device))


def _check_bits(bits: int) -> None:
    if not 1 <= bits <= 8:
        raise FormatError(complain("codec", "bits a weight", expected="1 to 8", found=bits))


def unpack_states(trellis: Tensor, *, bits: int) -> Tensor:
    """The 256 states of each tile, in stream order.

    Shapes:  trellis [..., 16*bits] int16; returns [..., 256] int32, same device.
    Raises:  FormatError if the last dimension is not 16*bits or the type is not int16.
    Source:  FORMAT.md section 10, "Symbols and bits" and "State".
    """
    _check_bits(bits)
    if trellis.dtype != torch.int16 or trellis.shape[-1] != 16 * bits:
        raise FormatError(
            complain("trellis", "a row of one tile", expected=f"int16 [..., {16 * bits}]", found=f"{trellis.dtype} {[*trellis.shape]}")
        )
    # In the file the two 16-bit words of every 32-bit word are swapped; undo that to read the stream in order.
    words = trellis.reshape(*trellis.shape[:-1], 8 * bits, 2).flip(-1).flatten(-2).to(torch.int32) & 0xFFFF
    first_bit = (torch.arange(1, TILE + 1, device=trellis.device) * bits - 16) % (TILE * bits)
    word, offset = first_bit // 16, (first_bit % 16).to(torch.int32)
    head, tail = words[..., word], words[..., (word + 1) % (16 * bits)]
    # The shift is split so that no step leaves 31 bits.
    return ((head << offset) & 0xFFFF) | (tail >> (16 - offset))


def pack_symbols(symbols: Tensor, *, bits: int) -> Tensor:
    """The packed words of each tile; the inverse of `unpack_states`.

    Shapes:  symbols [..., 256] integers, of which the low `bits` bits count (so states do as well);
             returns [..., 16*bits] int16, same device.
    Source:  FORMAT.md section 10, "Symbols and bits".
    """
    _check_bits(bits)
    if symbols.shape[-1] != TILE:
        raise FormatError(complain("symbols", "a tile", expected=f"{TILE} symbols", found=symbols.shape[-1]))
    symbols = symbols.to(torch.int32) & ((1 << bits) - 1)
    word = torch.arange(16 * bits, device=symbols.device)
    words = torch.zeros(*symbols.shape[:-1], 16 * bits, dtype=torch.int32, device=symbols.device)
    for nth in range(16 // bits + 2):  # the most symbols that one word can touch
        index = word * 16 // bits + nth
        shift = ((word + 1) * 16 - (index + 1) * bits).to(torch.int32)
        symbol = symbols[..., index % TILE]
        words |= torch.where(shift >= 0, symbol << shift.clamp(min=0), symbol >> (-shift).clamp(min=0, max=31))
    words &= 0xFFFF
    return words.to(torch.int16).view(*words.shape[:-1], 8 * bits, 2).flip(-1).flatten(-2)


# ---------------------------------------------------------------- tiles


@lru_cache(maxsize=16)
def _positions(device: torch.device) -> tuple[Tensor, Tensor]:
    """Where stream position i sits in a row-major 16 x 16 tile, and the inverse."""
    i = torch.arange(TILE)
    lane, j = i // 8, i % 8
    row = 2 * (lane % 4) + (j & 1) + 8 * ((j >> 1) & 1)
    column = lane // 4 + 8 * (j >= 4)
    cell = row * 16 + column
    return cell.to(device), torch.argsort(cell).to(device)


def to_tiles(weight: Tensor) -> Tensor:
    """Cut a matrix into tiles, weights in stream order.

    Shapes:  weight [in, out], both multiples of 16; returns [in/16, out/16, 256], same dtype and device.
    Source:  FORMAT.md section 10, "Position".
    """
    if weight.ndim != 2 or weight.shape[0] % 16 or weight.shape[1] % 16:
        raise FormatError(complain("weight", "shape", expected="two multiples of 16", found=[*weight.shape]))
    cell, _ = _positions(weight.device)
    high, wide = weight.shape[0] // 16, weight.shape[1] // 16
    return weight.reshape(high, 16, wide, 16).transpose(1, 2).flatten(2)[..., cell]


def from_tiles(tiles: Tensor) -> Tensor:
    """Put tiles back into a matrix; the inverse of `to_tiles`."""
    _, place = _positions(tiles.device)
    high, wide = tiles.shape[:2]
    return tiles[..., place].view(high, wide, 16, 16).transpose(1, 2).reshape(high * 16, wide * 16)


def decode_tiles(trellis: Tensor, *, bits: int) -> Tensor:
    """Decode trellis tiles into the rotated weight matrix.

    Shapes:  trellis [in/16, out/16, 16*bits] int16; returns [in, out] float16, same device.
    Units:   values are codebook values, before suh, svh and Hadamard.
    Raises:  FormatError if the last dimension is not 16*bits.
    Source:  FORMAT.md section 10.
    Kernel:  kernels/decode.cu; must match bitwise.
    """
    values = codebook(trellis.device)
    rows = max(1, (1 << 22) // (TILE * max(1, trellis.shape[1])))  # bounds the int32 states to 16 MiB
    parts = [from_tiles(values[unpack_states(part, bits=bits)]) for part in torch.split(trellis, rows)]
    return torch.cat(parts)


# ---------------------------------------------------------------- search

_CHUNK_TILES = {"cpu": 16}  # the costs of a chunk stay in cache; other devices want more work at a time
_CHUNK_TILES_ELSEWHERE = 256


def _sweep(x: Tensor, cost: Tensor, values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Walk the trellis forward over x [n, steps]: node costs after it [n, nodes], and who won at each step and node."""
    n, nodes = cost.shape
    won = torch.empty(x.shape[1], n, nodes, dtype=torch.uint8, device=x.device)
    for step in range(x.shape[1]):
        miss = x[:, step, None] - values
        # A state's high 16-K bits are the node it comes from, its low 16-K bits the node it leads to.
        total = cost[:, :, None] + (miss * miss).view(n, nodes, 1 << bits)
        cost, best = total.view(n, 1 << bits, nodes).min(dim=1)  # the first, so the lowest state, among equals
        won[step] = best
    return cost, won


def _trace(won: Tensor, node: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Walk back from `node` [n]: the states [n, steps] and the node where that path starts."""
    states = torch.empty(won.shape[1], won.shape[0], dtype=torch.int32, device=won.device)
    for step in reversed(range(won.shape[0])):
        branch = won[step].gather(1, node[:, None]).squeeze(1).long()
        state = (branch << (16 - bits)) | node
        states[:, step] = state
        node = state >> bits
    return states, node


def _close(x: Tensor, node: Tensor, values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The best states for x among paths that start and end in `node`, and their cost."""
    cost = torch.full((x.shape[0], STATES >> bits), torch.inf, dtype=torch.float32, device=x.device)
    cost.scatter_(1, node[:, None], 0.0)
    cost, won = _sweep(x, cost, values, bits)
    states, _ = _trace(won, node, bits)
    return states, cost.gather(1, node[:, None]).squeeze(1)


def search_tiles(tiles: Tensor, *, bits: int) -> tuple[Tensor, Tensor]:
    """Find the states whose codebook values come closest to the given weights.

    A tile's stream is a ring, so a path must end in the node it started from. The first pass runs over positions
    128..255 and then 0..127 from a free start, and the node where its best path crosses from 255 to 0 becomes the
    closing node. The second pass finds the best path that starts and ends there.

    What is exact: the first pass's path (no path, closed or not, costs less: a lower bound), and the second's given
    the closing node. The closing node itself is a choice; trying all is 2^(16-K) times the work. A tile that some
    stream decodes to exactly comes back with zero error always: where the bound is zero and the result is not, every
    node that a zero path can cross is tried.

    Shapes:  tiles [n, 256] float32, finite, in stream order; returns states [n, 256] int32 and the squared error
             [n] float64, same device.
    Units:   costs are float32, cost + (x - value)^2 with a rounding after each of the three operations; among equal
             costs the lowest state (and, at the end of the first pass, the lowest node) wins.
    Raises:  FormatError on another shape or dtype, or a weight that is not finite.
    Source:  FORMAT.md section 10, "Encoding".
    Kernel:  cpu.search_tiles and kernels/search.cu; relative error at most 1.001 of this one's.
    """
    check_search(tiles, bits)
    values = codebook(tiles.device).float()
    chunk = _CHUNK_TILES.get(tiles.device.type, _CHUNK_TILES_ELSEWHERE)
    states = torch.empty(tiles.shape, dtype=torch.int32, device=tiles.device)
    for first in range(0, len(tiles), chunk):
        x = tiles[first : first + chunk]
        cost = torch.zeros(len(x), STATES >> bits, dtype=torch.float32, device=x.device)
        crossing, _ = _sweep(x[:, 128:], cost, values, bits)
        cost, won = _sweep(x[:, :128], crossing, values, bits)
        bound, node = cost.min(dim=1)
        _, node = _trace(won, node, bits)
        found, cost = _close(x, node, values, bits)
        for lost in ((bound == 0) & (cost > 0)).nonzero().flatten().tolist():
            nodes = (crossing[lost] == 0).nonzero().flatten()
            for node in torch.split(nodes, chunk):
                candidates, cost = _close(x[lost].expand(len(node), -1), node, values, bits)
                if (cost == 0).any():
                    found[lost] = candidates[cost == 0][0]
                    break
        states[first : first + chunk] = found
    return states, squared_error(tiles, states)


def check_search(tiles: Tensor, bits: int) -> None:
    """What every search demands of its input; raises FormatError."""
    _check_bits(bits)
    if tiles.ndim != 2 or tiles.shape[1] != TILE or tiles.dtype != torch.float32:
        raise FormatError(
            complain("tiles", "input of the search", expected=f"float32 [n, {TILE}]", found=f"{tiles.dtype} {[*tiles.shape]}")
        )
    if not tiles.isfinite().all():
        bad = (~tiles.isfinite()).nonzero()
        raise FormatError(complain(f"tile {bad[0, 0]}", f"{len(bad)} weights that are not finite"))


def squared_error(tiles: Tensor, states: Tensor) -> Tensor:
    """Squared distance of each tile from the values of its states: [n, 256], [n, 256] -> [n] float64."""
    values = codebook(tiles.device)
    parts = zip(torch.split(tiles, 4096), torch.split(states, 4096), strict=True)  # bounds the float64 copies
    return torch.cat([tree_sum((x.double() - values[state].double()).square(), dim=1) for x, state in parts])


def tree_sum(x: Tensor, dim: int) -> Tensor:
    """Sum in float64 along `dim` by halving: the same bits on every device and at every thread count."""
    x = x.movedim(dim, 0).double()
    while len(x) > 1:
        half = len(x) // 2
        folded = x[:half] + x[half : 2 * half]
        x = torch.cat((folded, x[-1:])) if len(x) % 2 else folded
    return x.sum(0)
