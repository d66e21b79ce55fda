"""exllamav3's own search, decode and whole encode, for the bench to run beside ours. A measure to compare with, never a source of code.

Importing the package would load its models and compile all of its extension, for minutes. Its quantizer needs one Python file and
eight sources of the extension: a compiled `exllamav3_ext` is taken where one is importable, else those eight are built from what its
wheel carries; the instances that we do not ask for are named here and left empty.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

OTHER_BITS = (1, 2, 7, 8)

BINDING = """
#include <torch/extension.h>
#include "quant/quantize.cuh"
#include "quant/pack.cuh"
#include "quant/reconstruct.cuh"
#include "quant/comp_units/quantize_tiles_instances.cuh"
{empty}
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {{
    m.def("quantize_tiles", &quantize_tiles);
    m.def("quantize_tiles_scratch", &quantize_tiles_scratch);
    m.def("pack_trellis", &pack_trellis);
    m.def("reconstruct", &reconstruct);
    m.def("reconstruct_had_slice", &reconstruct_had_slice);
}}
"""


@dataclass(frozen=True)
class Side:
    """Its extension, and its quantizer where its Python can be imported."""

    extension: Any
    quantizer: Any | None
    version: str


@cache
def load() -> Side | None:
    """Both, or None with the reason printed."""
    spec = importlib.util.find_spec("exllamav3")
    if spec is None or spec.origin is None:
        print("exllamav3: skipped, not importable here")
        return None
    root = Path(spec.origin).parent
    version = (root / "version.py").read_text().split('"')[1]
    try:
        extension = (
            importlib.import_module("exllamav3_ext") if importlib.util.find_spec("exllamav3_ext") else _build(root / "exllamav3_ext")
        )
    except Exception as error:  # a compiler that is missing or too old: no comparison, and the reason
        print(f"exllamav3 {version}: skipped, {type(error).__name__}: {str(error)[-300:]}")
        return None
    sys.modules["exllamav3_ext"] = extension  # ext.py of the package takes it from there
    try:
        quantizer = _import_without_its_parents("exllamav3.modules.quant.exl3_lib.quantize", root)
    except ImportError as error:
        print(f"exllamav3 {version}: its encode is skipped, {error}")
        quantizer = None
    return Side(extension, quantizer, version)


def _import_without_its_parents(name: str, root: Path) -> ModuleType:
    """A module whose packages' own __init__ would import all the models."""
    packages = name.split(".")[:-1]
    for depth in range(1, len(packages) + 1):
        package = ModuleType(".".join(packages[:depth]))
        package.__path__ = [str(root.joinpath(*packages[1:depth]))]
        sys.modules.setdefault(package.__name__, package)
    return importlib.import_module(name)


def _build(root: Path) -> Any:
    from torch.utils.cpp_extension import load as compile_and_load

    folder = Path(os.environ.get("R7_SIDE_BUILD", "/tmp/r7_exllamav3_side"))
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"k{bits}_cb{cb}" for bits in OTHER_BITS for cb in range(3)] + [f"k{bits}_cb2_l160" for bits in OTHER_BITS]
    empty = "\n".join(f"fp_quantize_tiles_kernel quantize_tiles_kernel_{name}(bool) {{ return nullptr; }}" for name in names)
    empty += "".join(f"\nfp_quantize_tiles_kernel quantize_tiles_frac_kernel_a{bits}_maaaa() {{ return nullptr; }}" for bits in (1, 2, 3))
    binding = folder / "side_binding.cpp"
    binding.write_text(BINDING.format(empty=empty))
    sources = ["quantize.cu", "pack.cu", "exl3_devctx.cu", "reconstruct.cu"]
    sources += [f"comp_units/quantize_tiles_inst_k{bits}.cu" for bits in range(3, 7)]
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "{}.{}".format(*torch.cuda.get_device_capability()))
    return compile_and_load(
        name="exllamav3_ext",
        sources=[str(binding), *(str(root / "quant" / source) for source in sources)],
        extra_include_paths=[str(root)],
        extra_cflags=["-O2"],
        extra_cuda_cflags=["-O3", "--expt-relaxed-constexpr"],
        build_directory=str(folder),
    )


def search(side: Side, tiles: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Its search with the mcg codebook: values and states of each tile, in stream order."""
    device = tiles.device.index or 0
    optimized, wave = side.extension.quantize_tiles_scratch(device, bits, True, False, 256)
    nodes = 65536 >> bits
    if optimized:
        costs = torch.empty(1, dtype=torch.half, device=tiles.device)
        edges = torch.empty(wave, 256, nodes, dtype=torch.uint8, device=tiles.device)
    else:
        batch = 256 if bits < 4 else max(256, 2 * torch.cuda.get_device_properties(device).multi_processor_count)
        costs = torch.zeros(batch, 2, nodes, dtype=torch.half, device=tiles.device)
        edges = torch.zeros(batch, 256, nodes, dtype=torch.short, device=tiles.device)
    values, states = torch.zeros_like(tiles), torch.zeros_like(tiles, dtype=torch.short)
    side.extension.quantize_tiles(tiles, values, states, costs, edges, bits, True, False)
    return values, states.to(torch.int32) & 0xFFFF


def decode(side: Side, trellis: torch.Tensor, bits: int) -> torch.Tensor:
    out = torch.empty(trellis.shape[0] * 16, trellis.shape[1] * 16, dtype=torch.float16, device=trellis.device)
    side.extension.reconstruct(out, trellis, float(bits), True, False)
    return out


def decode_matrix(side: Side, trellis: torch.Tensor, suh: torch.Tensor, svh: torch.Tensor, bits: int) -> torch.Tensor:
    """Both rotations and scales with it; in float16 throughout."""
    out = torch.empty(trellis.shape[0] * 16, trellis.shape[1] * 16, dtype=torch.float16, device=trellis.device)
    side.extension.reconstruct_had_slice(out, trellis, suh, svh, float(bits), True, False, 0)
    return out


def encode_matrix(side: Side, weight: torch.Tensor, *, bits: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Its whole encode with no Hessian and with output scales: trellis, suh, svh."""
    assert side.quantizer is not None
    hessian = {"H": torch.empty(weight.shape[0], weight.shape[0], device="meta"), "device": weight.device}
    arguments = {"K": bits, "seed": seed, "devices": [weight.device.index or 0], "apply_out_scales": True, "mcg": True}
    _, _, tensors = side.quantizer.quantize_exl3(weight.to(torch.float32, copy=True), hessian, arguments, False)  # it works in place
    return tensors["trellis"], tensors["suh"], tensors["svh"]
