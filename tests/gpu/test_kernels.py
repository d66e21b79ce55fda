"""The kernels on a GPU, against codec.py. Every test here fails, rather than skips, without one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from r7convert import codec, kernels
from r7convert.errors import FormatError

pytestmark = pytest.mark.gpu

ALL_BITS = range(1, 9)
SEARCH_BITS = kernels.SEARCH_BITS
DEVIATION = codec.BEST_DEVIATION


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fill what torch hands out next with NaNs of all types, so that an output left unwritten shows."""
    assert torch.cuda.is_available(), "these tests need a CUDA GPU"
    poison = [torch.full((1 << size,), -1, dtype=torch.int64, device="cuda") for size in range(6, 24)]
    del poison


def cuda_generator(seed: int) -> torch.Generator:
    return torch.Generator("cuda").manual_seed(seed)


def random_words(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(-32768, 32768, shape, dtype=torch.int16, device="cuda", generator=cuda_generator(seed))


def gaussian_tiles(count: int, bits: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 256, device="cuda", generator=cuda_generator(seed)) * DEVIATION[bits]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in every bit; otherwise says where and what."""
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    as_int = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    a, b = (x.contiguous().view(as_int).cpu() for x in (a, b))
    differing = (a != b).nonzero()
    assert not len(differing), (
        f"{len(differing)} of {a.numel()} differ, first at {differing[0].tolist()}: {a[tuple(differing[0])]} {b[tuple(differing[0])]}"
    )
    return True


def relative_error(tiles: torch.Tensor, error: torch.Tensor) -> float:
    return float(error.sum() / tiles.double().square().sum())


# ---------------------------------------------------------------- bits


@pytest.mark.parametrize("bits", ALL_BITS)
def test_decode_has_every_state_right(bits: int) -> None:
    """A stream that visits all 65,536 states: at K bits a step, tiles of consecutive symbols of a counter would not; random tiles
    do, and the test counts that they did."""
    trellis = random_words(64, 96, 16 * bits, seed=bits)
    states = kernels.unpack_states(trellis, bits=bits)
    assert len(states.unique()) == 65536
    assert same_bits(states, codec.unpack_states(trellis, bits=bits))
    assert same_bits(kernels.decode_tiles(trellis, bits=bits), codec.decode_tiles(trellis, bits=bits))


@pytest.mark.parametrize("bits", ALL_BITS)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 7), (5, 8), (8, 9), (2, 33)])
def test_decode_at_odd_shapes(bits: int, rows: int, columns: int) -> None:
    trellis = random_words(rows, columns, 16 * bits, seed=rows * 100 + columns)
    assert same_bits(kernels.decode_tiles(trellis, bits=bits), codec.decode_tiles(trellis, bits=bits))


@pytest.mark.parametrize("bits", ALL_BITS)
@pytest.mark.parametrize("shape", [(1,), (3, 5), (2, 0, 4), (77, 3)])
def test_pack_is_the_inverse_of_unpack(bits: int, shape: tuple[int, ...]) -> None:
    words = random_words(*shape, 16 * bits, seed=bits)
    states = kernels.unpack_states(words, bits=bits)
    assert same_bits(kernels.pack_symbols(states, bits=bits), words)
    symbols = states & ((1 << bits) - 1)
    assert same_bits(kernels.pack_symbols(symbols.long(), bits=bits), words)
    assert same_bits(kernels.pack_symbols(symbols, bits=bits), codec.pack_symbols(symbols, bits=bits))


def test_unaligned_and_strided_inputs_are_taken() -> None:
    buffer = random_words(1 + 4 * 6 * 48)
    trellis = buffer[1:].view(4, 6, 48)
    assert trellis.data_ptr() % 16
    assert same_bits(kernels.decode_tiles(trellis, bits=3), codec.decode_tiles(trellis, bits=3))
    half = random_words(4, 6, 96)[:, ::2]
    assert same_bits(kernels.decode_tiles(half, bits=6), codec.decode_tiles(half, bits=6))


# ---------------------------------------------------------------- rotation


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "dim"), [((1, 128), -1), ((5, 384), 1), ((384, 5), 0), ((256, 300), 0), ((3, 128, 7), 1), ((2, 256), -1)]
)
@pytest.mark.parametrize("scales", ["", "pre", "post", "pre post"])
def test_hadamard_is_the_codecs_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...], dim: int, scales: str) -> None:
    x = torch.randn(*shape, device="cuda", generator=cuda_generator(3)).to(dtype)
    vector = torch.randn(shape[dim], device="cuda", generator=cuda_generator(4)).half()
    given = {name: vector * (i + 1) for i, name in enumerate(scales.split())}
    assert same_bits(kernels.hadamard_128(x, dim=dim, **given), codec.hadamard_128(x, dim=dim, **given))


def test_hadamard_refuses_another_side() -> None:
    with pytest.raises(FormatError, match="multiple of 128"):
        kernels.hadamard_128(torch.zeros(4, 100, device="cuda"))


@pytest.mark.parametrize("bits", ALL_BITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns"), [(8, 8), (16, 24), (24, 16), (3, 5)])
def test_decode_matrix_is_the_codecs_bit_for_bit(bits: int, dtype: torch.dtype, rows: int, columns: int) -> None:
    if rows % 8:
        with pytest.raises(FormatError, match="multiples of 128"):
            kernels.decode_matrix(random_words(rows, columns, 16 * bits), torch.ones(rows * 16), torch.ones(columns * 16), bits=bits)
        return
    trellis = random_words(rows, columns, 16 * bits, seed=bits)
    suh, svh = (torch.randn(16 * n, device="cuda", generator=cuda_generator(n)).half() for n in (rows, columns))
    suh[7], svh[100] = 0, 0
    ours, truth = (door(trellis, suh, svh, bits=bits, dtype=dtype) for door in (kernels.decode_matrix, codec.decode_matrix))
    assert same_bits(ours, truth)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_decode_matrix_is_the_codecs_where_sums_are_rounded(dtype: torch.dtype) -> None:
    """Words of zero are a tile of 1.84, and many of them sum past the 2,048 up to which float32 is exact: the additions are in the
    codec's order then too."""
    trellis = random_words(16, 24, 96)
    trellis[:, torch.arange(24) % 4 > 0] = 0
    suh, svh = (torch.randn(16 * n, device="cuda", generator=cuda_generator(n)).half() for n in (16, 24))
    truth = codec.decode_matrix(trellis, suh, svh, bits=6, dtype=dtype)
    assert float((truth.float() / suh.float()[:, None] / svh.float()).abs().max()) > 20000 / 128
    assert same_bits(kernels.decode_matrix(trellis, suh, svh, bits=6, dtype=dtype), truth)


def test_slices_at_odd_addresses() -> None:
    """A slice of a larger buffer need not stand where 16-byte loads may be made."""
    buffer = torch.randn(1000, device="cuda", generator=cuda_generator(1))
    trellis, suh, svh = random_words(8, 16, 48), buffer[1:129], buffer[131:387]
    assert svh.data_ptr() % 16
    assert same_bits(kernels.decode_matrix(trellis, suh, svh, bits=3), codec.decode_matrix(trellis, suh, svh, bits=3))
    odd = random_words(8 * 16 * 48 + 1)[1:].view(8, 16, 48)
    assert odd.data_ptr() % 16
    assert same_bits(kernels.decode_matrix(odd, suh, svh, bits=3), codec.decode_matrix(odd, suh, svh, bits=3))
    x = torch.randn(3, 256, device="cuda", generator=cuda_generator(2))
    assert same_bits(kernels.hadamard_128(x, post=svh), codec.hadamard_128(x, post=svh))


# ---------------------------------------------------------------- search


@pytest.mark.parametrize("bits", SEARCH_BITS)
def test_a_valid_stream_comes_back_without_loss(bits: int) -> None:
    words = random_words(1003, 16 * bits, seed=7)
    states = kernels.unpack_states(words, bits=bits)
    found, error = kernels.search_tiles(codec.codebook("cuda")[states].float(), bits=bits)
    assert float(error.max()) == 0.0
    assert (found == states).float().mean() > 0.999  # two streams may decode to the same values
    assert same_bits(kernels.unpack_states(kernels.pack_symbols(found, bits=bits), bits=bits), found)


@pytest.mark.parametrize("bits", SEARCH_BITS)
def test_error_is_within_a_thousandth_of_the_truths(bits: int) -> None:
    tiles = gaussian_tiles(1024, bits)
    found, error = kernels.search_tiles(tiles, bits=bits)
    _, least = codec.search_tiles(tiles, bits=bits)
    assert same_bits(error, codec.squared_error(tiles, found))
    ratio = float(error.sum() / least.sum())
    assert ratio <= 1.001


@pytest.mark.parametrize("bits", SEARCH_BITS)
def test_error_on_gaussian_tiles_is_section_7s(bits: int) -> None:
    """Of the search within 1% on enough tiles to say so; of a whole encode, its choice of scale and float16 scales included, too."""
    figure = {3: 0.0174, 4: 0.00453, 5: 0.00119, 6: 0.00032}[bits]
    tiles = gaussian_tiles(32768, bits, seed=8)
    _, error = kernels.search_tiles(tiles, bits=bits)
    assert relative_error(tiles, error) == pytest.approx(figure, rel=0.01, abs=0.000005)  # K6 is given in two digits
    weight = torch.randn(4096, 2048, device="cuda", generator=cuda_generator(9)).bfloat16() * 0.02
    assert kernels.encode_matrix(weight, bits=bits, seed=1).relative_error == pytest.approx(figure, rel=0.01, abs=0.000005)


@pytest.mark.parametrize("bits", SEARCH_BITS)
def test_states_close_into_a_ring(bits: int) -> None:
    found, _ = kernels.search_tiles(gaussian_tiles(700, bits, seed=1), bits=bits)
    assert same_bits(((found.roll(1, dims=1) << bits) | (found & ((1 << bits) - 1))) & 0xFFFF, found)


@pytest.mark.parametrize("bits", SEARCH_BITS)
def test_same_bytes_at_every_batch_size_order_and_run(bits: int) -> None:
    tiles = gaussian_tiles(1501, bits, seed=2)
    found, error = kernels.search_tiles(tiles, bits=bits)
    again, _ = kernels.search_tiles(tiles, bits=bits)
    assert same_bits(found, again)
    order = torch.randperm(len(tiles), device="cuda", generator=cuda_generator(5))
    shuffled, shuffled_error = kernels.search_tiles(tiles[order], bits=bits)
    assert same_bits(shuffled, found[order])
    assert same_bits(shuffled_error, error[order])
    for first, last in ((0, 1), (1, 2), (3, 10), (700, 1501)):
        part, _ = kernels.search_tiles(tiles[first:last], bits=bits)
        assert same_bits(part, found[first:last])


@pytest.mark.parametrize("bits", SEARCH_BITS)
def test_odd_tiles(bits: int) -> None:
    """Zeros, a constant, subnormals, one outlier, weights far outside the codebook: an ordinary answer, as good as the truth's."""
    tiles = gaussian_tiles(6, bits, seed=3)
    tiles[0], tiles[1], tiles[2] = 0.0, 0.75, 1e-40
    tiles[3, 100] = 25.0
    tiles[4] *= 100.0
    tiles[5] = torch.linspace(-1e30, 1e30, 256)
    found, error = kernels.search_tiles(tiles, bits=bits)
    _, least = codec.search_tiles(tiles, bits=bits)
    assert error.isfinite().all()
    assert ((found.roll(1, dims=1) << bits | (found & ((1 << bits) - 1))) & 0xFFFF == found).all()
    assert (error[:5] <= least[:5] * 1.02 + 1e-9).all()
    assert float(error[5] / least[5]) < 1.001


def test_search_refuses_what_the_codec_refuses() -> None:
    tiles = gaussian_tiles(4, 4)
    for bad in (float("nan"), float("inf")):
        spoiled = tiles.clone()
        spoiled[2, 17] = bad
        with pytest.raises(FormatError, match="tile 2"):
            kernels.search_tiles(spoiled, bits=4)
    with pytest.raises(FormatError, match="float32"):
        kernels.search_tiles(tiles.half(), bits=4)
    states, error = kernels.search_tiles(tiles[:0], bits=4)
    assert states.shape == (0, 256)
    assert error.shape == (0,)


# ---------------------------------------------------------------- matrices


@pytest.mark.parametrize(("bits", "shape"), [(6, (384, 256)), (3, (128, 512)), (4, (256, 128)), (5, (128, 128))])
def test_encode_matrix(bits: int, shape: tuple[int, int]) -> None:
    weight = torch.randn(*shape, device="cuda", generator=cuda_generator(6)).bfloat16() * 0.02
    weight[5], weight[:, 9] = 0, 0
    encoded = kernels.encode_matrix(weight, bits=bits, seed=11)
    truth = codec.encode_matrix(weight, bits=bits, seed=11)
    assert encoded.trellis.shape == (shape[0] // 16, shape[1] // 16, 16 * bits)
    assert encoded.suh[5] == 0
    assert encoded.svh[9] == 0
    assert encoded.relative_error <= truth.relative_error * 1.005
    decoded = codec.decode_matrix(encoded.trellis, encoded.suh, encoded.svh, bits=bits)
    assert (decoded[5] == 0).all()
    assert (decoded[:, 9] == 0).all()
    again = kernels.encode_matrix(weight, bits=bits, seed=11)
    assert same_bits(encoded.trellis, again.trellis)
    assert same_bits(encoded.suh, again.suh)


def test_reencode_matrix() -> None:
    trellis = random_words(8, 16, 48)
    lifted = kernels.reencode_matrix(trellis, bits_from=3, bits_to=4)
    assert lifted.relative_error == pytest.approx(0.0044, rel=0.1)
    same = kernels.reencode_matrix(trellis, bits_from=3, bits_to=3)
    assert same_bits(same.trellis, trellis)


def test_launches_from_other_threads() -> None:
    """devices.work_on has two jobs a GPU, each in a thread of its own."""
    tiles = gaussian_tiles(64, 4)
    found, _ = kernels.search_tiles(tiles, bits=4)
    with ThreadPoolExecutor(4) as pool:
        for again, _ in pool.map(lambda _: kernels.search_tiles(tiles, bits=4), range(8)):
            assert same_bits(again, found)


def test_captured_launches_replay() -> None:
    """Launches go on torch's current stream, also while it is being captured into a graph."""
    trellis = random_words(32, 32, 64)
    kernels.decode_tiles(trellis, bits=4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernels.decode_tiles(trellis, bits=4)
    trellis.copy_(random_words(32, 32, 64, seed=9))
    graph.replay()
    assert same_bits(out, codec.decode_tiles(trellis, bits=4))
