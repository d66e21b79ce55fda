"""The CPU search beside the truth, paired in one run: python -m tests.bench_cpu_search [--threads N] [--rounds N]

Checks first (an error within 1.00001 of the truth's, tile by tile), then times both in turn, on fresh tiles each time,
and prints medians. Rates are per second of processor time, so that other work on the machine does not count against
either; the ratio of wall times of the same pairs stands beside them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from r7convert import cpu, trellis


def rates(search: Callable[..., tuple[Tensor, Tensor]], tiles: Tensor, bits: int) -> tuple[float, float]:
    """Tiles per second of processor time and of wall time."""
    wall, processor = time.perf_counter(), time.process_time()
    search(tiles, bits=bits)
    return len(tiles) / (time.process_time() - processor), len(tiles) / (time.perf_counter() - wall)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    generator = torch.Generator().manual_seed(1)
    start = time.perf_counter()
    cpu.search_tiles(torch.zeros(1, 256), bits=3)
    print(f"first call (compile, or load from the cache): {time.perf_counter() - start:.1f} s; {options.threads} threads")
    print("     tiles per core-second                                wall           same       error       relative")
    print("K    truth     cpu   ratio (pairs)             ratio    tiles/s   states     cpu/truth   error")
    for bits in (3, 4, 5, 6):
        tiles = torch.randn(64, 256, generator=generator)
        truth_states, truth_error = trellis.search_tiles(tiles, bits=bits)
        states, error = cpu.search_tiles(tiles, bits=bits)
        worst = float((error / truth_error).max())
        if worst > 1.00001:
            raise SystemExit(f"K{bits}: a tile's error is {worst} of the truth's")
        pairs = []
        for _ in range(options.rounds):
            slow, slow_wall = rates(trellis.search_tiles, torch.randn(16 * options.threads, 256, generator=generator), bits)
            fast, fast_wall = rates(cpu.search_tiles, torch.randn(256 * options.threads, 256, generator=generator), bits)
            pairs.append((slow, fast, fast / slow, fast_wall / slow_wall, fast_wall))
        slow, fast, ratio, wall_ratio, wall = (statistics.median(column) for column in zip(*pairs, strict=True))
        spread = f"{ratio:5.1f} ({min(p[2] for p in pairs):.1f} to {max(p[2] for p in pairs):.1f})"
        same = f"{int((states == truth_states).all(1).sum())} of {len(tiles)}"
        whole = float(error.sum() / truth_error.sum())
        relative = float(error.sum() / tiles.double().square().sum())
        print(
            f"{bits}   {slow:6.1f} {fast:7.0f}   {spread:22} {wall_ratio:8.1f} {wall:10.0f}   {same}   {whole:.6f}   {relative:.6f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
