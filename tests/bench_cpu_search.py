"""The CPU search beside the truth, paired in one run: python -m tests.bench_cpu_search [--threads N]

Checks first (same states on the same tiles, or an error within 1.00001), then times both in turn, on fresh tiles each
time, and prints medians. On a CPU only the ratios count; the rates say what this machine did while others used it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from r7convert import cpu, trellis


def rate(search: Callable[..., tuple[Tensor, Tensor]], tiles: Tensor, bits: int) -> float:
    start = time.perf_counter()
    search(tiles, bits=bits)
    return len(tiles) / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    generator = torch.Generator().manual_seed(1)
    start = time.perf_counter()
    cpu.search_tiles(torch.zeros(1, 256), bits=3)
    print(f"first call (compile, or load from the cache): {time.perf_counter() - start:.1f} s; {options.threads} threads")
    print("K   truth tiles/s   cpu tiles/s   ratio (pairs)              same states   error cpu/truth   relative error")
    for bits in (3, 4, 5, 6):
        tiles = torch.randn(64, 256, generator=generator)
        truth_states, truth_error = trellis.search_tiles(tiles, bits=bits)
        states, error = cpu.search_tiles(tiles, bits=bits)
        worst = float((error / truth_error).max())
        if worst > 1.00001:
            raise SystemExit(f"K{bits}: a tile's error is {worst} of the truth's")
        pairs = []
        for _ in range(options.rounds):
            slow = rate(trellis.search_tiles, torch.randn(16 * options.threads, 256, generator=generator), bits)
            fast = rate(cpu.search_tiles, torch.randn(512 * options.threads, 256, generator=generator), bits)
            pairs.append((slow, fast, fast / slow))
        slow, fast, ratio = (statistics.median(column) for column in zip(*pairs, strict=True))
        spread = f"{ratio:5.1f} ({min(p[2] for p in pairs):.1f} to {max(p[2] for p in pairs):.1f})"
        same = f"{int((states == truth_states).all(1).sum())} of {len(tiles)}"
        whole = float(error.sum() / truth_error.sum())
        relative = float(error.sum() / tiles.double().square().sum())
        print(f"{bits}   {slow:13.1f}   {fast:11.0f}   {spread:26} {same:13} {whole:.8f}        {relative:.6f}", flush=True)


if __name__ == "__main__":
    main()
