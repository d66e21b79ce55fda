"""The truth gives the same bytes on a GPU as on a CPU."""

from __future__ import annotations

import pytest
import torch

from r7convert import codec, cpu

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("bits", [3, 6])
def test_encoding_gives_the_same_bytes_on_both(bits: int) -> None:
    weight = (torch.arange(128 * 256).view(128, 256) * 7919 % 251 - 125).bfloat16() / 4096
    here = codec.encode_matrix(weight, bits=bits, seed=1, search=cpu.search_tiles)
    there = codec.encode_matrix(weight.cuda(), bits=bits, seed=1)
    assert there.trellis.is_cuda
    assert torch.equal(there.suh.cpu(), here.suh)
    assert torch.equal(there.svh.cpu(), here.svh)
    assert torch.equal(there.trellis.cpu(), here.trellis)
    assert (there.proxy_error, there.relative_error, there.worst_column) == (here.proxy_error, here.relative_error, here.worst_column)


def test_bits_values_and_rotations_are_the_same_on_both() -> None:
    generator = torch.Generator().manual_seed(0)
    for bits in range(1, 9):
        words = torch.randint(-32768, 32768, (8, 24, 16 * bits), dtype=torch.int16, generator=generator)
        assert torch.equal(codec.decode_tiles(words.cuda(), bits=bits).cpu(), codec.decode_tiles(words, bits=bits))
        assert torch.equal(codec.pack_symbols(codec.unpack_states(words.cuda(), bits=bits), bits=bits).cpu(), words)
    x = torch.randn(256, 384, generator=generator)
    assert torch.equal(codec.hadamard_128(x.cuda(), dim=0).cpu(), codec.hadamard_128(x, dim=0))
