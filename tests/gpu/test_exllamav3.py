"""exllamav3, where it is importable, reads our payloads as we do, and we its: in both directions, on this machine's GPU."""

from __future__ import annotations

import pytest
import torch

from r7convert import codec, kernels
from tests.gpu import exllamav3_side

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def side() -> exllamav3_side.Side:
    found = exllamav3_side.load()
    if found is None:
        pytest.skip("exllamav3 is not importable here, or its extension neither is nor can be built")
    return found


def gaussian(rows: int, columns: int, seed: int) -> torch.Tensor:
    return (torch.randn(rows, columns, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)) * 0.02).bfloat16()


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("bits", kernels.SEARCH_BITS)
def test_it_decodes_our_payloads_to_the_same_matrix(side: exllamav3_side.Side, bits: int) -> None:
    encoded = kernels.encode_matrix(gaussian(512, 256, bits), bits=bits, seed=bits)
    assert torch.equal(exllamav3_side.decode(side, encoded.trellis, bits), codec.decode_tiles(encoded.trellis, bits=bits))
    theirs = exllamav3_side.decode_matrix(side, encoded.trellis, encoded.suh, encoded.svh, bits)
    assert relative(theirs, codec.decode_matrix(encoded.trellis, encoded.suh, encoded.svh, bits=bits)) < 2e-3


@pytest.mark.parametrize("bits", kernels.SEARCH_BITS)
def test_we_decode_its_payloads_to_the_same_matrix(side: exllamav3_side.Side, bits: int) -> None:
    if side.quantizer is None:
        pytest.skip("exllamav3's quantizer cannot be imported here")
    weight = gaussian(1024, 512, bits)
    trellis, suh, svh = exllamav3_side.encode_matrix(side, weight, bits=bits, seed=bits)
    assert torch.equal(kernels.decode_tiles(trellis, bits=bits), exllamav3_side.decode(side, trellis, bits))
    figure = {3: 0.0174, 4: 0.00453, 5: 0.00119, 6: 0.00032}[bits]
    assert relative(codec.decode_matrix(trellis, suh, svh, bits=bits), weight) ** 2 == pytest.approx(figure, rel=0.05)
