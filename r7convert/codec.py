"""The codec in plain torch: every numeric operation of r7convert, slow and obvious. This file is the truth.

    encode    weight [in, out] --regularize--> rotated, suh, svh --search--> states --pack--> trellis
    decode    trellis --unpack--> states --codebook--> rotated, then suh, svh and two Hadamards
    forward   y = had(had(x * suh) @ rotated) * svh

What happens inside a tile is trellis.py; its names are handed on here, so that `codec.X` is the truth for every X that
cpu.py and kernels.py do fast. Everything runs on any device and gives the same bits on each: sums that decide bytes are
float64 trees in a fixed order, and the Hadamard transform is a butterfly rather than a matrix product.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .errors import FormatError, UnsupportedError, complain
from .trellis import (
    MCG,
    STATES,
    TILE,
    check_search,
    codebook,
    decode_tiles,
    from_tiles,
    pack_symbols,
    search_tiles,
    squared_error,
    to_tiles,
    tree_sum,
    unpack_states,
)

__all__ = [
    "BLOCK",
    "MCG",
    "MCG_MARKER",
    "STATES",
    "TILE",
    "Encoded",
    "Matrix",
    "Reencoded",
    "Regularized",
    "Search",
    "check_search",
    "codebook",
    "decode_matrix",
    "decode_tiles",
    "encode_matrix",
    "expert_forward",
    "from_tiles",
    "hadamard_128",
    "linear_forward",
    "module_seed",
    "pack_symbols",
    "reencode_matrix",
    "regularize",
    "search_tiles",
    "squared_error",
    "to_tiles",
    "tree_sum",
    "unpack_states",
]

MCG_MARKER = MCG - (1 << 32)  # as the int32 scalar that files hold
BLOCK = 128  # the Hadamard block
CODEBOOK_RMS = 1.24371088
ZERO_SCALE = 0.1  # what an all-zero row or column is divided by; its stored scale is 0

# Standard deviation at which Gaussian weights meet the codebook best, and the factors around it that are tried, in equal steps.
BEST_DEVIATION = {1: 1.40, 2: 1.23, 3: 1.17, 4: 1.12, 5: 1.07, 6: 1.01, 7: 0.93, 8: 0.91}
SCALE_STEP = 0.045
SCALE_TRIALS = tuple(1 + SCALE_STEP * nth for nth in range(-3, 4))
MAX_SAMPLE_TILES = 256
GAUSSIAN_TILES = 1024  # what the Gaussian's own best scale weighs beside them


class Search(Protocol):
    """What `search_tiles` is in trellis.py, cpu.py and kernels.py."""

    def __call__(self, tiles: Tensor, *, bits: int) -> tuple[Tensor, Tensor]: ...


class Hadamard(Protocol):
    """What `hadamard_128` is here and in kernels.py."""

    def __call__(self, x: Tensor, *, dim: int = -1, pre: Tensor | None = None, post: Tensor | None = None) -> Tensor: ...


class Decode(Protocol):
    """What `decode_matrix` is here and in kernels.py."""

    def __call__(self, trellis: Tensor, suh: Tensor, svh: Tensor, *, bits: int) -> Tensor: ...


@dataclass(frozen=True)
class Matrix:
    """One stored EXL3 matrix: trellis [in/16, out/16, 16*bits] int16, suh [in], svh [out] float16."""

    trellis: Tensor
    suh: Tensor
    svh: Tensor
    bits: int


@dataclass(frozen=True)
class Regularized:
    """A weight ready for the search: weight = diag(suh) H rotated H diag(svh), up to rounding."""

    rotated: Tensor  # [in, out] float32, `scale` included
    suh: Tensor  # [in] float16, 0 where the row is zero
    svh: Tensor  # [out] float16, 0 where the column is zero
    scale: float  # the global scale g that was chosen


@dataclass(frozen=True)
class Encoded:
    """A weight and what its encoding cost."""

    trellis: Tensor  # [in/16, out/16, 16*bits] int16
    suh: Tensor  # [in] float16
    svh: Tensor  # [out] float16
    bits: int
    proxy_error: float  # mean squared error of the rotated weights
    relative_error: float  # |W - decoded|^2 / |W|^2, the stored fp16 scales included; 0 for a zero weight
    worst_column: tuple[int, float]  # output channel with the largest relative error of its own

    @property
    def mcg(self) -> Tensor:
        """The codebook marker as it is stored: an int32 scalar."""
        return torch.tensor(MCG_MARKER, dtype=torch.int32)

    @property
    def matrix(self) -> Matrix:
        return Matrix(self.trellis, self.suh, self.svh, self.bits)


@dataclass(frozen=True)
class Reencoded:
    """A trellis at another K; suh and svh stay what they were."""

    trellis: Tensor  # [in/16, out/16, 16*bits] int16
    bits: int
    relative_error: float  # |decoded before - decoded after|^2 / |before|^2 of the rotated values


def module_seed(name: str) -> int:
    """The seed that a module's name stands for, so that the same module gives the same bytes everywhere."""
    return zlib.crc32(name.encode()) & 0x7FFFFFFF


# ---------------------------------------------------------------- rotations


def _butterflies(x: Tensor, distances: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)) -> Tensor:
    """The transform of blocks of 128 along the last dimension, but for its factor. All orders of the distances are the same transform;
    where sums are rounded, the order shows in the last bits."""
    for distance in distances:
        a, b = x.reshape(*x.shape[:-1], -1, 2, distance).unbind(-2)
        x = torch.stack((a + b, a - b), dim=-2).flatten(-3)
    return x


def hadamard_128(x: Tensor, *, dim: int = -1, pre: Tensor | None = None, post: Tensor | None = None) -> Tensor:
    """Walsh-Hadamard transform of blocks of 128 along `dim`, scaled by 1/sqrt(128): had128(x * pre) * post.

    Shapes:  any x with x.shape[dim] a multiple of 128; pre, post [x.shape[dim]]; returns x's shape and dtype.
    Units:   arithmetic in float32 (float64 for float64 input), one rounding to x.dtype at the end.
             Order: times pre; butterflies over distances 1, 2, 4, ... 64; times 1/sqrt(128); times post.
    Raises:  FormatError if the side is not a multiple of 128.
    Source:  FORMAT.md section 10, "had128".
    Kernel:  kernels/hadamard.cu; same order of operations, must match bitwise.
    """
    side = x.shape[dim]
    if side % BLOCK:
        raise FormatError(complain("hadamard_128", "side", expected=f"a multiple of {BLOCK}", found=side))
    dtype = torch.promote_types(x.dtype, torch.float32)
    y = x.movedim(dim, -1).to(dtype)
    if pre is not None:
        y = y * pre.to(dtype)
    y = _butterflies(y) * (1 / math.sqrt(BLOCK))
    if post is not None:
        y = y * post.to(dtype)
    return y.movedim(-1, dim).to(x.dtype)


def decode_matrix(trellis: Tensor, suh: Tensor, svh: Tensor, *, bits: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weight that a stored matrix stands for: diag(suh) H decode(trellis) H diag(svh).

    Both factors of 1/sqrt(128) and the scales come last, so that little is rounded before: a sum of up to 512 values fits in float32,
    and so does every larger one below 2048, which is 13 standard deviations.

    Shapes:  trellis [in/16, out/16, 16*bits] int16, suh [in], svh [out]; returns [in, out] in `dtype`, worked out in float32.
             Order: butterflies along in over distances 1, 2, 4, 8; along out over 1, 8, 16, 32, 64, 2, 4; along in over 16, 32,
             64; times suh/128; times svh.
    Raises:  FormatError if a side is not a multiple of 128.
    Source:  FORMAT.md section 1, "Forward", with x the identity.
    Kernel:  kernels/decode.cu; must match bitwise.
    """
    rotated = decode_tiles(trellis, bits=bits)
    if rotated.shape[0] % BLOCK or rotated.shape[1] % BLOCK:
        raise FormatError(complain("decode_matrix", "shape", expected=f"two multiples of {BLOCK}", found=[*rotated.shape]))
    sums = _butterflies(_butterflies(rotated.float().T, (1, 2, 4, 8)).T, (1, 8, 16, 32, 64, 2, 4))
    sums = _butterflies(sums.T, (16, 32, 64)).T
    return (sums * (suh.float() / BLOCK)[:, None] * svh.float()).to(dtype)


# ---------------------------------------------------------------- encoding


def _signs(count: int, seed: int, device: torch.device) -> Tensor:
    """`count` values of +-1 from SHAKE-128 of the seed as 8 little-endian bytes, most significant bits first; 1 is -1."""
    stream = bytearray(hashlib.shake_128(seed.to_bytes(8, "little")).digest((count + 7) // 8))
    octets = torch.frombuffer(stream, dtype=torch.uint8).to(torch.int32)
    bits = (octets[:, None] >> torch.arange(7, -1, -1)) & 1
    return (1 - 2 * bits.flatten()[:count]).double().to(device)


def _energy(x: Tensor, dim: int) -> Tensor:
    """Sum of squares along `dim` in float64, in slices that bound memory."""
    return torch.cat([tree_sum(part.double().square(), dim) for part in torch.split(x, 512, dim=1 - dim)])


def _to_half(scale: Tensor, vector: str, name: str) -> Tensor:
    """Scales as they are stored. One that float16 cannot hold to 1 part in 256 would spoil its row: an error, not a NaN."""
    half = scale.half()
    lost = ~((half.double() - scale).abs() <= scale.abs() / 256)
    if lost.any():
        index = int(lost.nonzero()[0])
        found = f"{float(scale[index]):.3g} at index {index} ({int(lost.sum())} such)"
        what = f"{vector} leaves the range of float16"
        raise UnsupportedError(complain(name, what, expected="scales of 1e-5 to 65504", found=found, do="Keep this matrix in BF16"))
    return half


def _scale(energy: Tensor, count: int, unit: float | None) -> tuple[Tensor, Tensor]:
    """RMS over `unit` (the mean RMS where None) of each row or column: what to divide by, and what to store."""
    rms = (energy / count).sqrt()
    scale = rms / (tree_sum(rms, 0) / len(rms) if unit is None else unit)
    zero = rms == 0
    return torch.where(zero, ZERO_SCALE, scale), torch.where(zero, 0.0, scale)


def regularize(
    weight: Tensor,
    *,
    bits: int,
    seed: int,
    search: Search = search_tiles,
    hadamard: Hadamard = hadamard_128,
    name: str = "weight",
) -> Regularized:
    """Scale and rotate a weight so that its tiles look like the codebook's values.

    In this order, in float32 (scales in float64): columns over their RMS over its mean, and a sign; had128 along out;
    rows over their RMS / 1.2437, and a sign; had128 along in; times one scale for all, from seven trials on sample
    tiles, all searched in one batch. Signs come from SHAKE-128 of the seed, suh's first: the same on every device.

    Shapes:  weight [in, out], multiples of 128, BF16, FP16 or FP32.
    Raises:  FormatError for a shape or a weight that is not finite; UnsupportedError where float16 cannot hold a scale.
    Source:  FORMAT.md section 10, "Encoding".
    """
    if weight.ndim != 2 or weight.shape[0] % BLOCK or weight.shape[1] % BLOCK or not weight.numel():
        raise FormatError(
            complain(name, "shape", expected=f"two multiples of {BLOCK}", found=[*weight.shape], do="Keep this matrix in BF16")
        )
    bad = ~weight.isfinite()
    if bad.any():
        first = bad.nonzero()[0].tolist()
        raise FormatError(complain(name, f"{int(bad.sum())} weights are not finite, the first at [in, out] = {first}"))
    rows, columns = weight.shape
    signs = _signs(rows + columns, seed, weight.device)
    rotated = weight.float()

    divisor, scale = _scale(_energy(rotated, 0), rows, None)
    svh = _to_half(scale * signs[rows:], "svh", name)
    rotated = hadamard(rotated / (divisor * signs[rows:]).float(), dim=1)

    divisor, scale = _scale(_energy(rotated, 1), columns, CODEBOOK_RMS)
    _to_half(scale, "suh", name)
    rotated = hadamard(rotated / (divisor * signs[:rows]).float()[:, None], dim=0)

    g = _best_scale(rotated, bits=bits, search=search)
    return Regularized(rotated * g, _to_half(scale * signs[:rows] / g, "suh", name), svh, g)


def _best_scale(rotated: Tensor, *, bits: int, search: Search) -> float:
    """The scale of least relative error, estimated on up to 256 tiles spread over the matrix.

    The vertex of the parabola through the best trial and its neighbours, drawn towards the Gaussian's best: an outlier beyond the
    codebook's end costs as much as a tile, few tiles hold one, and so what a sample says is mostly noise. The best trial on 64 tiles
    alone cost 1.4% of error at K6, and 9% in one matrix of a hundred (docs/log.md). The vertex counts to an eighth of a step, so
    that searches which differ in the last digits agree.
    """
    tiles = to_tiles(rotated)
    high, wide = tiles.shape[:2]
    count = min(MAX_SAMPLE_TILES, max(4, high * wide // 16))
    golden = 0.6180339887498949
    rows, columns = [nth * high // count for nth in range(count)], [int(nth * golden % 1 * wide) for nth in range(count)]
    sample = tiles[rows, columns]
    around = BEST_DEVIATION[bits] / CODEBOOK_RMS
    trials = torch.tensor(SCALE_TRIALS, device=rotated.device) * around
    _, error = search((sample * trials[:, None, None]).flatten(0, 1), bits=bits)
    error = tree_sum(error.view(len(trials), count), 1) / trials.double().square()
    best = int(error.argmin())
    vertex = SCALE_TRIALS[best]
    if 0 < best < len(trials) - 1:
        below, least, above = error[best - 1 : best + 2].tolist()
        bend = below - 2 * least + above
        vertex += SCALE_STEP * round(4 * (below - above) / bend) / 8 if bend > 0 else 0.0
    factor = 1 + (vertex - 1) * count / (count + GAUSSIAN_TILES)
    return float(torch.tensor(factor * around, dtype=torch.float32))


def encode_matrix(
    weight: Tensor,
    *,
    bits: int,
    seed: int,
    search: Search = search_tiles,
    hadamard: Hadamard = hadamard_128,
    decode: Decode = decode_matrix,
    name: str = "weight",
) -> Encoded:
    """Encode a weight [in, out] (a Linear's weight transposed) and measure what it cost.

    Shapes:  weight [in, out], multiples of 128, BF16, FP16 or FP32, any device; the result is on the same device.
    Units:   errors are squared and relative, measured on the weight as a reader decodes it.
    Raises:  as `regularize`.
    Source:  FORMAT.md sections 9 and 10.
    """
    ready = regularize(weight, bits=bits, seed=seed, search=search, hadamard=hadamard, name=name)
    tiles = to_tiles(ready.rotated)
    states, error = search(tiles.flatten(0, 1), bits=bits)
    trellis = pack_symbols(states, bits=bits).view(*tiles.shape[:2], 16 * bits)
    decoded = decode(trellis, ready.suh, ready.svh, bits=bits)
    energy = _energy(weight.float(), 0)
    lost = _energy(weight.float() - decoded, 0)
    column_error = torch.where(energy > 0, lost / energy, 0.0)
    worst = int(column_error.argmax())
    whole = float(tree_sum(energy, 0))
    return Encoded(
        trellis=trellis,
        suh=ready.suh,
        svh=ready.svh,
        bits=bits,
        proxy_error=float(tree_sum(error, 0)) / weight.numel(),
        relative_error=float(tree_sum(lost, 0)) / whole if whole else 0.0,
        worst_column=(worst, float(column_error[worst])),
    )


def reencode_matrix(trellis: Tensor, *, bits_from: int, bits_to: int, search: Search = search_tiles) -> Reencoded:
    """Lift or lower a trellis to another K: decode to float16 values, search again; suh and svh stay.

    Shapes:  trellis [in/16, out/16, 16*bits_from] int16; any device.
    Source:  FORMAT.md section 7.
    """
    tiles = codebook(trellis.device)[unpack_states(trellis, bits=bits_from)].float()
    states, error = search(tiles.flatten(0, 1), bits=bits_to)
    packed = pack_symbols(states, bits=bits_to).view(*tiles.shape[:2], 16 * bits_to)
    energy = float(tree_sum(tree_sum(tiles.flatten(0, 1).double().square(), 1), 0))
    return Reencoded(packed, bits_to, float(tree_sum(error, 0)) / energy if energy else 0.0)


# ---------------------------------------------------------------- forward


def linear_forward(x: Tensor, matrix: Matrix, *, dtype: torch.dtype = torch.float16) -> Tensor:
    """had(had(x * suh) @ decode(trellis)) * svh for x [tokens, in] -> [tokens, out].

    Units:   with float16, the rotated input and the result are rounded to float16 and the rest is float32;
             with float64, nothing is rounded: what verify judges with.
    Source:  FORMAT.md sections 1 and 10.
    """
    wide = torch.promote_types(dtype, torch.float32)
    rotated = hadamard_128(x.to(wide), pre=matrix.suh).to(dtype)
    product = rotated.to(wide) @ decode_tiles(matrix.trellis, bits=matrix.bits).to(wide)
    return hadamard_128(product, post=matrix.svh).to(dtype)


def expert_forward(x: Tensor, gate: Matrix, up: Matrix, down: Matrix, *, dtype: torch.dtype = torch.float16) -> Tensor:
    """One expert on its tokens: down(silu(gate(x)) * up(x)); the caller weighs and sums in float32.

    Shapes:  x [tokens, hidden]; returns [tokens, hidden] in `dtype`. Shared vectors are the same tensor in gate and up.
    Units:   as `linear_forward`: float16 keeps every named quantity of FORMAT.md in float16, float64 rounds nothing.
    Source:  FORMAT.md section 10, "Expert".
    """
    wide = torch.promote_types(dtype, torch.float32)
    g = linear_forward(x, gate, dtype=dtype).to(wide)
    u = linear_forward(x, up, dtype=dtype).to(wide)
    a = (torch.nn.functional.silu(g) * u).to(dtype)
    return linear_forward(a, down, dtype=dtype)
