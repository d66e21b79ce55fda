"""exllamav3's own search and decode, for the bench to run beside ours: built from the sources that its wheel carries.

Importing the package would compile all of it, for minutes. Its search needs six of its files; the instances that we do not ask
for are named here and left empty. A measure to compare with, never a source of code.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import torch

OTHER_BITS = (1, 2, 7, 8)

BINDING = """
#include <torch/extension.h>
#include "quant/quantize.cuh"
#include "quant/reconstruct.cuh"
#include "quant/comp_units/quantize_tiles_instances.cuh"
{empty}
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {{
    m.def("quantize_tiles", &quantize_tiles);
    m.def("quantize_tiles_scratch", &quantize_tiles_scratch);
    m.def("reconstruct", &reconstruct);
    m.def("reconstruct_had_slice", &reconstruct_had_slice);
}}
"""


def build() -> Any | None:
    """The extension, or None with the reason printed."""
    spec = importlib.util.find_spec("exllamav3")
    if spec is None or spec.origin is None:
        print("exllamav3: skipped, not importable here")
        return None
    from torch.utils.cpp_extension import load

    root = Path(spec.origin).parent / "exllamav3_ext"
    folder = Path(os.environ.get("R7_SIDE_BUILD", "/tmp/r7_exllamav3_side"))
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"k{bits}_cb{cb}" for bits in OTHER_BITS for cb in range(3)] + [f"k{bits}_cb2_l160" for bits in OTHER_BITS]
    empty = "\n".join(f"fp_quantize_tiles_kernel quantize_tiles_kernel_{name}(bool) {{ return nullptr; }}" for name in names)
    empty += "".join(f"\nfp_quantize_tiles_kernel quantize_tiles_frac_kernel_a{bits}_maaaa() {{ return nullptr; }}" for bits in (1, 2, 3))
    binding = folder / "side_binding.cpp"
    binding.write_text(BINDING.format(empty=empty))
    sources = ["quantize.cu", "exl3_devctx.cu", "reconstruct.cu", *(f"comp_units/quantize_tiles_inst_k{bits}.cu" for bits in range(3, 7))]
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "{}.{}".format(*torch.cuda.get_device_capability()))
    try:
        return load(
            name="r7_exllamav3_side",
            sources=[str(binding), *(str(root / "quant" / source) for source in sources)],
            extra_include_paths=[str(root)],
            extra_cflags=["-O2"],
            extra_cuda_cflags=["-O3", "--expt-relaxed-constexpr"],
            build_directory=str(folder),
        )
    except Exception as error:  # a compiler that is missing or too old: no comparison, and the reason
        print(f"exllamav3: skipped, {type(error).__name__}: {str(error)[-300:]}")
        return None


def search(side: Any, tiles: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Its search with the mcg codebook: values and states of each tile, in stream order."""
    device = tiles.device.index or 0
    optimized, wave = side.quantize_tiles_scratch(device, bits, True, False, 256)
    nodes = 65536 >> bits
    if optimized:
        costs = torch.empty(1, dtype=torch.half, device=tiles.device)
        edges = torch.empty(wave, 256, nodes, dtype=torch.uint8, device=tiles.device)
    else:
        batch = 256 if bits < 4 else max(256, 2 * torch.cuda.get_device_properties(device).multi_processor_count)
        costs = torch.zeros(batch, 2, nodes, dtype=torch.half, device=tiles.device)
        edges = torch.zeros(batch, 256, nodes, dtype=torch.short, device=tiles.device)
    values, states = torch.zeros_like(tiles), torch.zeros_like(tiles, dtype=torch.short)
    side.quantize_tiles(tiles, values, states, costs, edges, bits, True, False)
    return values, states.to(torch.int32) & 0xFFFF


def decode(side: Any, trellis: torch.Tensor, bits: int) -> torch.Tensor:
    out = torch.empty(trellis.shape[0] * 16, trellis.shape[1] * 16, dtype=torch.float16, device=trellis.device)
    side.reconstruct(out, trellis, float(bits), True, False)
    return out
