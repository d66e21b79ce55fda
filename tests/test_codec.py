"""Matrices: rotations, regularization, encoding and the forward pass, against dense float64 written again here."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from torch import Tensor

from r7convert import codec, cpu
from r7convert.errors import FormatError, UnsupportedError


def dense_hadamard(size: int) -> np.ndarray:
    """Blocks of 128 on the diagonal, entries (-1)^popcount(r & c) / sqrt(128)."""
    block = np.array([[(-1) ** (r & c).bit_count() for c in range(128)] for r in range(128)]) / np.sqrt(128)
    return np.kron(np.eye(size // 128), block)


def gaussian(rows: int, columns: int, seed: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.02


def encode(weight: Tensor, bits: int, seed: int = 1, name: str = "weight") -> codec.Encoded:
    return codec.encode_matrix(weight, bits=bits, seed=seed, search=cpu.search_tiles, name=name)


def decode_by_hand(matrix: codec.Matrix) -> np.ndarray:
    rotated = codec.decode_tiles(matrix.trellis, bits=matrix.bits).double().numpy()
    rows, columns = rotated.shape
    inner = dense_hadamard(rows) @ rotated @ dense_hadamard(columns)
    return matrix.suh.double().numpy()[:, None] * inner * matrix.svh.double().numpy()


def test_module_seed_is_crc32_without_its_top_bit() -> None:
    assert codec.module_seed("123456789") == 0xCBF43926 & 0x7FFFFFFF  # the check value of CRC-32


def test_the_marker_is_the_one_of_the_page() -> None:
    encoded = encode(torch.zeros(128, 128), 3)
    assert encoded.mcg.dtype == torch.int32
    assert encoded.mcg.shape == ()
    assert encoded.mcg.item() == codec.MCG_MARKER == -877912083


# ---------------------------------------------------------------- rotations


def test_hadamard_is_the_dense_matrix_on_either_axis() -> None:
    x = torch.randn(256, 384, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    pre, post = torch.rand(384).double(), torch.rand(256).double()
    expected = (x.numpy() * pre.numpy()) @ dense_hadamard(384)
    assert np.allclose(codec.hadamard_128(x, pre=pre).numpy(), expected, atol=1e-12)
    expected = dense_hadamard(256) @ x.numpy() * post.numpy()[:, None]
    assert np.allclose(codec.hadamard_128(x, dim=0, post=post).numpy(), expected, atol=1e-12)
    assert torch.allclose(codec.hadamard_128(codec.hadamard_128(x)), x, atol=1e-12), "its own inverse"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_hadamard_rounds_half_precision_once(dtype: torch.dtype) -> None:
    x = torch.randn(3, 5, 128, generator=torch.Generator().manual_seed(0)).to(dtype)
    scale = torch.rand(128, generator=torch.Generator().manual_seed(1)).half()
    y = codec.hadamard_128(x, pre=scale, post=scale)
    assert y.dtype == dtype
    assert torch.equal(y, codec.hadamard_128(x.float(), pre=scale, post=scale).to(dtype))


def test_hadamard_refuses_other_sides() -> None:
    with pytest.raises(FormatError, match="expected a multiple of 128, got 192"):
        codec.hadamard_128(torch.zeros(2, 192))


@pytest.mark.parametrize("kind", ["random", "extreme"])
def test_decode_matrix_is_the_dense_computation(kind: str) -> None:
    generator = torch.Generator().manual_seed(8)
    random = torch.randint(-32768, 32768, (8, 16, 96), dtype=torch.int16, generator=generator)
    trellis = random if kind == "random" else torch.where(torch.arange(16)[:, None] % 4 == 0, random, 0)  # 0: tiles of 1.84
    suh, svh = (torch.randn(n, generator=generator).half() for n in (128, 256))
    suh[3], svh[200] = 0, 0
    rotated = codec.decode_tiles(trellis, bits=6).double().numpy()
    sums = dense_hadamard(128) @ rotated @ dense_hadamard(256) * 128
    expected = suh.double().numpy()[:, None] * sums / 128 * svh.double().numpy()
    ours = codec.decode_matrix(trellis, suh, svh, bits=6).numpy()
    if kind == "random":
        assert abs(sums).max() < 2048, "the sums are exact: three roundings, of suh/128 none"
        assert np.all(abs(ours - expected) <= 2**-23 * abs(expected))
    else:
        assert abs(sums).max() > 20000, "far past where float32 is exact"
        assert np.all(abs(ours - expected) <= 2**-20 * abs(expected).max())
    assert not ours[3].any()
    assert not ours[:, 200].any()


def test_decode_matrix_refuses_other_sides() -> None:
    with pytest.raises(FormatError, match=r"decode_matrix: shape: expected two multiples of 128, got \[128, 80\]"):
        codec.decode_matrix(torch.zeros(8, 5, 48, dtype=torch.int16), torch.ones(128), torch.ones(80), bits=3)


# ---------------------------------------------------------------- regularization


def test_regularize_follows_the_page_step_by_step() -> None:
    weight = gaussian(256, 128, 0) * torch.linspace(0.5, 2, 128) * torch.linspace(1, 3, 256)[:, None]
    found = codec.regularize(weight, bits=4, seed=77, search=cpu.search_tiles)

    octets = hashlib.shake_128((77).to_bytes(8, "little")).digest(48)
    signs = np.array([-1.0 if octets[k // 8] >> (7 - k % 8) & 1 else 1.0 for k in range(384)])
    w = weight.double().numpy()
    rms = np.sqrt((w**2).mean(0))
    sv = signs[256:] * rms / rms.mean()
    w = w / sv @ dense_hadamard(128)
    su = signs[:256] * np.sqrt((w**2).mean(1)) / 1.24371088
    w = dense_hadamard(256) @ (w / su[:, None])

    assert np.allclose(found.rotated.numpy(), w * found.scale, atol=1e-5)
    assert np.allclose(found.svh.double().numpy(), sv, rtol=2**-10)
    assert np.allclose(found.suh.double().numpy(), su / found.scale, rtol=2**-10)
    assert found.rotated.std() == pytest.approx(1.12, rel=0.06), "FORMAT.md: about 1.12 at K4, flat within 5%"
    assert abs(signs.mean()) < 0.2


def test_the_scale_is_as_good_as_the_best_of_the_trials() -> None:
    found = codec.regularize(gaussian(256, 384, 3), bits=6, seed=0, search=cpu.search_tiles)
    tiles = codec.to_tiles(found.rotated / found.scale).flatten(0, 1)
    around = codec.BEST_DEVIATION[6] / codec.CODEBOOK_RMS
    scales = [around * factor for factor in codec.SCALE_TRIALS]
    errors = [float(cpu.search_tiles(tiles * scale, bits=6)[1].sum()) / scale**2 for scale in (*scales, found.scale)]
    assert errors[-1] < min(errors[:-1]) * 1.01, "chosen on 24 of 384 tiles, so not always the very best"
    assert max(errors) > errors[-1] * 1.05, "the trials do not differ: nothing was chosen"
    steps = (found.scale / around - 1) / codec.SCALE_STEP * (24 + codec.GAUSSIAN_TILES) / 24
    assert steps * 8 == pytest.approx(round(steps * 8), abs=1e-2), "searches that differ in the last digits choose the same"


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (lambda w: w[:100], FormatError, r"mlp\.gate: shape: expected two multiples of 128, got \[100, 256\]"),
        (lambda w: w[:, :0], FormatError, "two multiples of 128"),
        (lambda w: w.index_put((torch.tensor(5), torch.tensor(7)), torch.tensor(torch.nan)), FormatError, r"1 weights .* \[5, 7\]"),
        (lambda w: w.index_put((torch.tensor(0), torch.tensor(255)), torch.tensor(torch.inf)), FormatError, r"1 weights .* \[0, 255\]"),
        (lambda w: w * 1e8, UnsupportedError, r"mlp\.gate: suh leaves the range of float16"),
        (lambda w: w * 1e-7, UnsupportedError, r"suh leaves the range of float16.*\(128 such\)"),
        (lambda w: w * 1e-40, UnsupportedError, "suh leaves the range of float16"),
        (lambda w: w * 3e38, UnsupportedError, "suh leaves the range of float16"),
        (lambda w: w * torch.where(torch.arange(256) == 9, 1e-6, 1.0), UnsupportedError, r"svh leaves .* at index 9 \(1 such\)"),
        (lambda w: w * torch.where(torch.arange(128) == 4, 1e-8, 1.0)[:, None], UnsupportedError, r"suh leaves .* at index 4 \(1 such\)"),
    ],
)
def test_what_cannot_be_encoded_is_named(spoil: object, error: type[Exception], message: str) -> None:
    weight = spoil(gaussian(128, 256, 1))  # type: ignore[operator]
    with pytest.raises(error, match=message):
        encode(weight, 6, name="mlp.gate")


# ---------------------------------------------------------------- encoding


@pytest.mark.parametrize(("bits", "figure"), [(3, 0.0174), (4, 0.00453), (5, 0.00119), (6, 0.00032)])
def test_encoding_costs_what_section_7_says_and_is_measured_right(bits: int, figure: float) -> None:
    weight = gaussian(256, 384, bits) * torch.linspace(0.5, 2, 384)
    encoded = encode(weight, bits)
    assert encoded.trellis.shape == (16, 24, 16 * bits)
    assert encoded.trellis.dtype == torch.int16
    assert encoded.suh.dtype == encoded.svh.dtype == torch.float16

    decoded = decode_by_hand(encoded.matrix)
    lost = (weight.double().numpy() - decoded) ** 2
    column = lost.sum(0) / (weight.double().numpy() ** 2).sum(0)
    assert encoded.relative_error == pytest.approx(lost.sum() / (weight.double() ** 2).sum().item(), rel=1e-4)
    assert encoded.worst_column == (column.argmax(), pytest.approx(column.max(), rel=1e-4))
    assert encoded.relative_error == pytest.approx(figure, rel=0.05)
    deviation = codec.BEST_DEVIATION[bits]
    assert encoded.proxy_error == pytest.approx(figure * deviation**2, rel=0.25)
    assert np.allclose(codec.decode_matrix(encoded.trellis, encoded.suh, encoded.svh, bits=bits).numpy(), decoded, atol=1e-6)


def test_same_input_and_seed_same_bytes() -> None:
    weight = gaussian(128, 256, 0).bfloat16()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = encode(weight, 5)
        torch.set_num_threads(2)
        two = encode(weight.float(), 5)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(one.trellis, two.trellis)
    assert torch.equal(one.suh, two.suh)
    assert torch.equal(one.svh, two.svh)
    assert (one.proxy_error, one.relative_error, one.worst_column) == (two.proxy_error, two.relative_error, two.worst_column)
    other = encode(weight, 5, seed=2)
    assert not torch.equal(one.suh, other.suh)
    # Bytes that every machine must come to: BF16 weights and seed in, SHA-256 out.
    exact = (torch.arange(128 * 256).view(128, 256) * 7919 % 251 - 125).bfloat16() / 4096
    encoded = encode(exact, 6)
    payload = b"".join(part.numpy().tobytes() for part in (encoded.trellis, encoded.suh, encoded.svh))
    assert hashlib.sha256(payload).hexdigest()[:16] == "a0d941cde8a55c8e"


def test_zero_rows_and_columns_stay_exactly_zero() -> None:
    weight = gaussian(256, 128, 4)
    weight[17] = 0.0
    weight[128:144] = 0.0
    weight[:, 100] = -0.0
    encoded = encode(weight, 4)
    assert encoded.suh.nonzero().flatten().tolist() == [k for k in range(256) if k != 17 and not 128 <= k < 144]
    assert encoded.svh.nonzero().flatten().tolist() == [n for n in range(128) if n != 100]
    assert encoded.suh.view(torch.int16)[17] == 0, "plus zero"
    decoded = codec.decode_matrix(encoded.trellis, encoded.suh, encoded.svh, bits=4)
    assert decoded.isfinite().all()
    assert torch.equal(decoded == 0, weight == 0)
    assert encoded.relative_error == pytest.approx(0.00453, rel=0.1)

    nothing = encode(torch.zeros(128, 256), 4)
    assert not nothing.suh.any()
    assert not nothing.svh.any()
    assert (nothing.relative_error, nothing.worst_column) == (0.0, (0, 0.0))


def test_subnormals_and_a_lone_weight_are_encoded() -> None:
    weight = gaussian(128, 128, 5)
    weight[3, ::2] = 1e-40
    weight[:, 7] = 0.0
    weight[64, 7] = 0.05
    encoded = encode(weight, 6)
    decoded = torch.from_numpy(decode_by_hand(encoded.matrix))
    assert decoded.isfinite().all()
    assert encoded.worst_column[1] < 0.01


def test_a_merged_matrix_can_be_cut_at_the_block() -> None:
    encoded = encode(gaussian(128, 256, 6), 6)
    whole = decode_by_hand(encoded.matrix)
    for first in (0, 128):
        cut = codec.Matrix(encoded.trellis[:, first // 16 : first // 16 + 8], encoded.suh, encoded.svh[first : first + 128], 6)
        assert np.array_equal(decode_by_hand(cut), whole[:, first : first + 128])


@pytest.mark.parametrize(("bits_from", "bits_to", "figure"), [(3, 4, 0.00439), (4, 3, 0.0174), (5, 5, 0.0)])
def test_reencoding_measures_its_step(bits_from: int, bits_to: int, figure: float) -> None:
    encoded = encode(gaussian(256, 256, 7), bits_from)
    again = codec.reencode_matrix(encoded.trellis, bits_from=bits_from, bits_to=bits_to, search=cpu.search_tiles)
    before = codec.decode_tiles(encoded.trellis, bits=bits_from).double()
    after = codec.decode_tiles(again.trellis, bits=bits_to).double()
    assert again.bits == bits_to
    assert again.relative_error == pytest.approx(float((before - after).square().sum() / before.square().sum()), rel=1e-9)
    assert again.relative_error == pytest.approx(figure, rel=0.03)


# ---------------------------------------------------------------- forward


def random_matrix(rows: int, columns: int, bits: int, seed: int) -> codec.Matrix:
    generator = torch.Generator().manual_seed(seed)
    trellis = torch.randint(-32768, 32768, (rows // 16, columns // 16, 16 * bits), dtype=torch.int16, generator=generator)
    suh = torch.randn(rows, generator=generator) * 0.1
    return codec.Matrix(trellis, suh.half(), torch.randn(columns, generator=generator).half(), bits)


def test_expert_is_the_dense_computation() -> None:
    gate, up, down = random_matrix(256, 128, 3, 0), random_matrix(256, 128, 5, 1), random_matrix(128, 256, 4, 2)
    x = torch.randn(9, 256, generator=torch.Generator().manual_seed(3)).half()
    wide = x.double().numpy()
    g, u = wide @ decode_by_hand(gate), wide @ decode_by_hand(up)
    expected = (g / (1 + np.exp(-g)) * u) @ decode_by_hand(down)

    exact = codec.expert_forward(x, gate, up, down, dtype=torch.float64)
    assert exact.dtype == torch.float64
    assert np.allclose(exact.numpy(), expected, rtol=1e-10, atol=1e-10 * np.abs(expected).max())
    half = codec.expert_forward(x, gate, up, down)
    assert half.dtype == torch.float16
    distance = np.linalg.norm(half.double().numpy() - expected) / np.linalg.norm(expected)
    assert 1e-5 < distance < 4e-3, "readers accept 4e-3 between two float16 paths; 0 would mean that nothing was rounded"
    swapped = codec.expert_forward(x, up, gate, down, dtype=torch.float64)
    assert not np.allclose(swapped.numpy(), expected, rtol=0.1)
