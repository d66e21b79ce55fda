"""Without a GPU the doors of kernels.py give the codec's results, by the codec or by cpu.py."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from r7convert import codec, cpu, kernels
from r7convert.errors import FormatError


def words(*shape: int) -> torch.Tensor:
    return torch.randint(-32768, 32768, shape, dtype=torch.int16, generator=torch.Generator().manual_seed(1))


def test_every_door_has_the_codecs_signature() -> None:
    from inspect import signature

    doors = [name for name in kernels.__all__ if callable(getattr(kernels, name))]
    assert len(doors) >= 10
    for name in doors:
        ours, truth = signature(getattr(kernels, name)).parameters, signature(getattr(codec, name)).parameters
        without_hooks = {key: value for key, value in truth.items() if key not in ("search", "hadamard", "decode")}
        assert list(ours) == list(without_hooks), name
        assert [p.default for p in ours.values()] == [p.default for p in without_hooks.values()], name


def test_bits_and_values_are_the_codecs() -> None:
    trellis = words(2, 3, 80)
    states = codec.unpack_states(trellis, bits=5)
    assert torch.equal(kernels.unpack_states(trellis, bits=5), states)
    assert torch.equal(kernels.pack_symbols(states, bits=5), trellis)
    assert torch.equal(kernels.decode_tiles(trellis, bits=5), codec.decode_tiles(trellis, bits=5))
    x = torch.randn(128, 256)
    assert torch.equal(kernels.hadamard_128(x, dim=0), codec.hadamard_128(x, dim=0))


def test_the_search_is_cpus() -> None:
    tiles = torch.randn(3, 256, generator=torch.Generator().manual_seed(2))
    states, error = kernels.search_tiles(tiles, bits=6)
    expected_states, expected_error = cpu.search_tiles(tiles, bits=6)
    assert torch.equal(states, expected_states)
    assert torch.equal(error, expected_error)


def test_encode_and_reencode() -> None:
    weight = torch.randn(128, 128, generator=torch.Generator().manual_seed(3))
    encoded = kernels.encode_matrix(weight, bits=4, seed=5)
    expected = codec.encode_matrix(weight, bits=4, seed=5, search=cpu.search_tiles)
    assert torch.equal(encoded.trellis, expected.trellis)
    assert torch.equal(encoded.suh, expected.suh)
    same = kernels.reencode_matrix(encoded.trellis, bits_from=4, bits_to=4)
    assert torch.equal(same.trellis, encoded.trellis)


@pytest.mark.parametrize("bad", [torch.zeros(2, 255), torch.zeros(2, 256, dtype=torch.float16), torch.full((1, 256), torch.nan)])
def test_what_the_codec_refuses_is_refused(bad: torch.Tensor) -> None:
    with pytest.raises(FormatError):
        kernels.search_tiles(bad, bits=4)


def test_importing_the_door_asks_for_no_gpu_library() -> None:
    code = "import sys, r7convert.kernels; print([m for m in sys.modules if m.startswith(('cuda.core', 'numba'))])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
