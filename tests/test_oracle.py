"""Another implementation decodes our payloads to the same matrix: gptqmodel's plain-torch path, where it is importable.

Its package needs much to import (transformers, a regex library, ...). To run this test without that, unpack the sdist of
7.7.0 and put a folder `gptqmodel` with an empty __init__.py and its `utils` (less the import of `vram`) and `nn_modules` on
PYTHONPATH, beside the packages logbar, pypcre, threadpoolctl and device-smi.
"""

from __future__ import annotations

import pytest
import torch

from r7convert import codec, cpu


@pytest.mark.parametrize("bits", [3, 4, 5, 6])
def test_gptqmodel_decodes_the_same_matrix(bits: int) -> None:
    reader = pytest.importorskip("gptqmodel.nn_modules.exllamav3_torch", reason="gptqmodel is not importable", exc_type=ImportError)
    weight = torch.randn(128, 256, generator=torch.Generator().manual_seed(bits)) * 0.02
    encoded = codec.encode_matrix(weight, bits=bits, seed=bits, search=cpu.search_tiles)
    tensors = {"trellis": encoded.trellis, "suh": encoded.suh, "svh": encoded.svh, "mcg": encoded.mcg}
    theirs = reader.ExllamaV3TorchLinear.from_tensors(in_features=128, out_features=256, name="oracle", tensors=tensors)

    # It sums the two halves of a value in float32 and leaves out the rounding to float16 that kernels do.
    assert torch.equal(theirs.get_inner_weight_tensor(torch.float32).half(), codec.decode_tiles(encoded.trellis, bits=bits))
    decoded = codec.decode_matrix(encoded.trellis, encoded.suh, encoded.svh, bits=bits)
    assert torch.allclose(theirs.get_weight_tensor(torch.float32), decoded, atol=2**-11 * float(decoded.abs().max()))
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(9)).half()
    y, expected = theirs(x).double(), x.double() @ decoded.double()
    assert (y - expected).norm() < 4e-3 * expected.norm()
    assert float((theirs.get_weight_tensor(torch.float32) - weight).norm() / weight.norm()) ** 2 == pytest.approx(
        encoded.relative_error, rel=1e-2
    )
