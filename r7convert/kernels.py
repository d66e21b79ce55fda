"""The GPU door: codec's functions, by kernels/*.cu, for tensors on a CUDA device.

Same names, same signatures, same errors as codec. A tensor that no kernel takes (on the CPU, of another type, at a K that
the kernel is not built for) goes to the codec, which computes or refuses it; a search on the CPU goes to cpu.py.

decode, pack, unpack and hadamard_128 match the codec bit for bit; search_tiles finds states whose error is at most 1.001 of
the codec's, the same ones at every batch size.

Importing this needs no GPU, and touches none; kernels are compiled when they are first wanted.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from r7convert import codec
from r7convert.codec import BLOCK, MCG, TILE, Encoded, Reencoded, check_search, from_tiles, squared_error, to_tiles
from r7convert.nvrtc import load_kernel, most_shared_bytes

__all__ = [
    "MCG",
    "SEARCH_BITS",
    "decode_matrix",
    "decode_tiles",
    "encode_matrix",
    "from_tiles",
    "hadamard_128",
    "pack_symbols",
    "reencode_matrix",
    "search_tiles",
    "to_tiles",
    "unpack_states",
]

SEARCH_BITS = range(3, 7)  # the K that search.cu is written for

_CPP_TYPES = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}


def _blocks(work: int, each: int) -> int:
    return -(-work // each)


def _is_trellis(trellis: Tensor, bits: int) -> bool:
    return trellis.is_cuda and trellis.dtype == torch.int16 and 1 <= bits <= 8 and trellis.shape[-1] == 16 * bits


def _aligned(x: Tensor) -> Tensor:
    """Contiguous, and at an address that 16-byte accesses can use (a slice of a file's buffer may not be)."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def unpack_states(trellis: Tensor, *, bits: int) -> Tensor:
    """As codec.unpack_states, bit for bit."""
    if not _is_trellis(trellis, bits):
        return codec.unpack_states(trellis, bits=bits)
    states = torch.empty(*trellis.shape[:-1], TILE, dtype=torch.int32, device=trellis.device)
    tiles = states.numel() // TILE
    if tiles:
        kernel = load_kernel("pack.cu", f"unpack_states<{bits}>", device=trellis.device)
        kernel.launch(_blocks(tiles, 8), 256, _aligned(trellis), states, tiles)
    return states


def pack_symbols(symbols: Tensor, *, bits: int) -> Tensor:
    """As codec.pack_symbols, bit for bit."""
    if not (symbols.is_cuda and 1 <= bits <= 8 and symbols.shape[-1] == TILE):
        return codec.pack_symbols(symbols, bits=bits)
    trellis = torch.empty(*symbols.shape[:-1], 16 * bits, dtype=torch.int16, device=symbols.device)
    tiles = symbols.numel() // TILE
    if tiles:
        kernel = load_kernel("pack.cu", f"pack_symbols<{bits}>", device=symbols.device)
        kernel.launch(_blocks(tiles * 8 * bits, 256), 256, symbols.to(torch.int32).contiguous(), trellis, tiles)
    return trellis


def decode_tiles(trellis: Tensor, *, bits: int) -> Tensor:
    """As codec.decode_tiles, bit for bit."""
    if not (_is_trellis(trellis, bits) and trellis.ndim == 3 and trellis.numel()):
        return codec.decode_tiles(trellis, bits=bits)
    rows, columns = trellis.shape[:2]
    out = torch.empty(rows * 16, columns * 16, dtype=torch.float16, device=trellis.device)
    kernel = load_kernel("decode.cu", f"decode_tiles<{bits}>", device=trellis.device)
    kernel.launch(_blocks(rows * _blocks(columns, 8), 4), 128, _aligned(trellis), out, rows, columns)
    return out


def hadamard_128(x: Tensor, *, dim: int = -1, pre: Tensor | None = None, post: Tensor | None = None) -> Tensor:
    """As codec.hadamard_128, bit for bit."""
    if not x.is_cuda or x.dtype not in _CPP_TYPES or x.shape[dim] % BLOCK or not x.numel():
        return codec.hadamard_128(x, dim=dim, pre=pre, post=post)
    x = _aligned(x)
    out = torch.empty_like(x)
    scales = [None if scale is None else _aligned(scale.to(x.device, torch.float32)) for scale in (pre, post)]
    dim %= x.ndim
    inner = x.shape[dim + 1 :].numel()
    blocks, blocks_a_side = x.numel() // inner // BLOCK, x.shape[dim] // BLOCK
    cpp = _CPP_TYPES[x.dtype]
    if inner == 1:
        kernel = load_kernel("hadamard.cu", f"hadamard_rows<{cpp}>", device=x.device)
        kernel.launch(_blocks(blocks, 32), 256, x, out, *scales, blocks, blocks_a_side)
    else:
        kernel = load_kernel("hadamard.cu", f"hadamard_columns<{cpp}>", device=x.device)
        kernel.launch(blocks * _blocks(inner, BLOCK), BLOCK, x, out, *scales, inner, blocks_a_side)
    return out


def search_shape(bits: int, most_shared_bytes: int) -> tuple[int, int]:
    """How many pairs of tiles a block of search.cu has in hand, two where they fit, and the shared memory they take (its Shared)."""
    nodes = (1 << 16) >> bits
    words = (nodes >> bits) * ((1 << bits) + 4) if bits >= 5 else nodes
    needed = {pairs: pairs * (2 * words * 4 + 2560) for pairs in (1, 2)}
    pairs = 2 if needed[2] <= most_shared_bytes else 1
    return pairs, needed[pairs]


class _Search:
    """search.cu for one device and K: two launches, and what they need."""

    def __init__(self, device: torch.device, bits: int) -> None:
        self.pairs, self.shared_bytes = search_shape(bits, most_shared_bytes(device))
        self.most_blocks = torch.cuda.get_device_properties(device).multi_processor_count
        self.history_words = self.pairs * (128 if bits <= 4 else 256) * ((1 << 16) >> bits)  # History::WORDS
        self.free, self.held = (
            load_kernel("search.cu", f"search_tiles<{bits}, {self.pairs}, {held}>", device=device) for held in ("false", "true")
        )

    def __call__(self, tiles: Tensor) -> tuple[Tensor, Tensor]:
        """States, and which tiles some path, closed or not, meets exactly."""
        count = len(tiles)
        states = torch.empty(tiles.shape, dtype=torch.int32, device=tiles.device)
        exact = torch.empty(count, dtype=torch.bool, device=tiles.device)
        queue = torch.zeros(1 + count, 2, dtype=torch.int32, device=tiles.device)
        blocks = min(self.most_blocks, _blocks(count, 2 * self.pairs))
        history = torch.empty(blocks * self.history_words, dtype=torch.int32, device=tiles.device)
        for kernel in (self.free, self.held):
            kernel.launch(blocks, 512, tiles, states, exact, history, queue, count, shared_bytes=self.shared_bytes)
        return states, exact


_search = cache(_Search)


def search_tiles(tiles: Tensor, *, bits: int) -> tuple[Tensor, Tensor]:
    """As codec.search_tiles, with costs in float16: relative error at most 1.001 of its, the same bytes at every batch size.

    A tile that some stream decodes to exactly comes back with zero error, as there. Weights beyond +-30 (the codebook ends
    at 3.95) are searched as +-30; their error is counted in full.
    """
    if not tiles.is_cuda:
        from r7convert import cpu  # numba takes a second to import

        return cpu.search_tiles(tiles, bits=bits)
    check_search(tiles, bits)
    if bits not in SEARCH_BITS or not len(tiles):
        return codec.search_tiles(tiles, bits=bits)
    tiles = tiles.contiguous()
    states, exact = _search(tiles.device, bits)(tiles)
    error = squared_error(tiles, states)
    missed = exact & (error > 0)
    if missed.any():  # several exact paths cross the seam, and the one that was followed does not close: the codec tries them all
        states[missed], error[missed] = codec.search_tiles(tiles[missed], bits=bits)
    return states, error


def decode_matrix(trellis: Tensor, suh: Tensor, svh: Tensor, *, bits: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """As codec.decode_matrix, bit for bit, in one pass over memory."""
    if (
        not (_is_trellis(trellis, bits) and trellis.ndim == 3 and trellis.numel() and dtype in _CPP_TYPES)
        or trellis.shape[0] % 8
        or trellis.shape[1] % 8
    ):
        return codec.decode_matrix(trellis, suh, svh, bits=bits, dtype=dtype)
    rows, columns = trellis.shape[:2]
    out = torch.empty(rows * 16, columns * 16, dtype=dtype, device=trellis.device)
    kernel = load_kernel("decode.cu", f"decode_matrix<{bits}, {_CPP_TYPES[dtype]}>", device=trellis.device)
    scales = [_aligned(scale.to(trellis.device, torch.float32)) for scale in (suh, svh)]
    kernel.launch((columns // 8, rows // 8), 256, _aligned(trellis), *scales, out, columns, shared_bytes=BLOCK * BLOCK * 4)
    return out


def encode_matrix(weight: Tensor, *, bits: int, seed: int, name: str = "weight") -> Encoded:
    """As codec.encode_matrix, with this module's search, rotation and decode."""
    return codec.encode_matrix(weight, bits=bits, seed=seed, search=search_tiles, hadamard=hadamard_128, decode=decode_matrix, name=name)


def reencode_matrix(trellis: Tensor, *, bits_from: int, bits_to: int) -> Reencoded:
    """As codec.reencode_matrix, with this module's search."""
    return codec.reencode_matrix(trellis, bits_from=bits_from, bits_to=bits_to, search=search_tiles)
