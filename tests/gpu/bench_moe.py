"""Time the fused routed experts at GLM-5.2's geometry: `python -m tests.gpu.bench_moe [--quick] [--sweep] [--once N]`.

Checks first: every configuration that is timed is compared with the truth on four of its tokens. A time is the median over
replays of a graph of several calls, each with its own tokens and routes, so that one call's experts are not in the cache for the next.
The share is of the trellis bytes of the experts that were hit, against a copy measured in the same run.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch

from r7convert import moe, nvrtc, product
from r7convert.codec import Matrix
from r7convert.linear import linear_forward
from r7convert.moe import Experts, load_experts, moe_forward, moe_reference, moe_scratch_bytes
from tests.random_slabs import random_bits, random_call, random_scales, random_slabs, relative_l2

HIDDEN, INNER, EXPERTS, TOPK = 6144, 512, 256, 8
CALLS = {1: 32, 8: 16, 32: 8, 64: 8, 128: 8, 256: 4, 512: 4, 1024: 2, 2048: 2, 4096: 1}
GOALS = {1: 35, 8: 140, 32: 420, 128: 650}
EXLLAMAV3 = {1: 64, 8: 336, 32: 1215, 128: 1885}  # K3, BENCH.md, the best of its paths
DEVICE = "cuda"


def time_us(run: Callable[[], None], repeats: int = 9) -> float:
    """Median microseconds of a replay of what `run` launches."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(2 + repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times[2:])


def copy_bandwidth() -> float:
    """Bytes a second, read plus written."""
    source = torch.randint(0, 255, (2 << 30,), dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    times = []
    for _ in range(9):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return 2 * source.numel() / statistics.median(times)


def make(pool: tuple[int, ...]) -> Experts:
    slabs, _ = random_slabs(random_bits(EXPERTS, pool, 3), hidden=HIDDEN, inner=INNER, seed=5, device=DEVICE)
    return load_experts(slabs, DEVICE)


class Bench:
    """Calls of one batch size, checked."""

    def __init__(self, experts: Experts, batch: int, calls: int | None = None) -> None:
        self.experts, self.batch = experts, batch
        self.calls = [
            random_call(batch, TOPK, experts.slabs, dtype=torch.bfloat16, seed=seed, device=DEVICE) for seed in range(calls or CALLS[batch])
        ]
        self.prepare()

    def prepare(self) -> None:
        self.scratch = torch.full((moe_scratch_bytes(self.experts, self.batch, TOPK),), 0xFF, dtype=torch.uint8, device=DEVICE)
        self.outs = [torch.full((self.batch, HIDDEN), torch.nan, dtype=torch.bfloat16, device=DEVICE) for _ in self.calls]

    def run(self) -> None:
        for call, out in zip(self.calls, self.outs, strict=True):
            moe_forward(*call, self.experts, scratch=self.scratch, out=out)

    def time(self) -> float:
        return time_us(self.run) / len(self.calls)

    def error(self) -> float:
        call = self.calls[-1]
        out = torch.full((self.batch, HIDDEN), torch.nan, device=DEVICE)
        moe_forward(*call, self.experts, scratch=self.scratch, out=out)
        pick = torch.linspace(0, self.batch - 1, min(4, self.batch), device=DEVICE).long()
        return relative_l2(out[pick], moe_reference(*(t[pick] for t in call), self.experts.slabs))

    def trellis_bytes(self) -> float:
        """Of the experts hit, the mean over calls."""
        slabs = self.experts.slabs
        bits = torch.tensor(slabs.tiers, device=DEVICE)[slabs.descriptors.view(3, -1)[:, : slabs.experts] >> 8].sum(0)
        return sum(int(bits[ids.unique().long()].sum()) for _, ids, _ in self.calls) / len(self.calls) * HIDDEN * INNER / 8

    def hit(self) -> float:
        return sum(len(ids.unique()) for _, ids, _ in self.calls) / len(self.calls)

    def breakdown(self) -> str:
        """Microseconds of each launch, one after the other, no overlap."""
        names = ("rotate", "gate_up", "down", "combine")
        names = names if self.batch * TOPK <= moe.MAX_UNROUTED else ("route", *names)
        launch = nvrtc.Kernel.launch
        nvrtc.Kernel.launch = lambda self, *a, **k: launch(self, *a, **{**k, "overlap": False})  # type: ignore[method-assign]
        try:
            apart = self.time()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                self.run()
                torch.cuda.synchronize()
        finally:
            nvrtc.Kernel.launch = launch  # type: ignore[method-assign]
        events = sorted((e for e in profile.events() if "moe_" in e.name), key=lambda e: e.time_range.start)
        times = [statistics.median(e.device_time for e in events[i :: len(names)]) for i in range(len(names))]
        return f"no overlap {apart:.1f} = " + " ".join(f"{n} {t:.1f}" for n, t in zip(names, times, strict=True))


def report(experts: Experts, batches: list[int], bandwidth: float) -> None:
    print(f"{'batch':>6}{'experts':>9}{'us':>9}{'goal':>6}{'exl3':>6}{'GB/s':>7}{'share':>7}{'error':>10}  launches")
    for batch in batches:
        bench = Bench(experts, batch)
        error = bench.error()
        assert error <= 4e-3, (batch, error)
        time = bench.time()
        rate = bench.trellis_bytes() / time * 1e6
        cut = moe._plan(experts, min(batch, moe.MAX_TOKENS), TOPK)
        detail = f"NB {cut.gate_up.token_blocks} splits {cut.gate_up.splits}/{cut.down.splits} " + (
            bench.breakdown() if batch <= 2048 else ""
        )
        print(
            f"{batch:>6}{bench.hit():>9.0f}{time:>9.1f}{GOALS.get(batch, ''):>6}{EXLLAMAV3.get(batch, ''):>6}"
            f"{rate / 1e9:>7.0f}{rate / bandwidth:>7.0%}{error:>10.1e}  {detail}",
            flush=True,
        )


def sweep(experts: Experts) -> None:
    """Splits of both products, and the depth of the pipeline."""
    held = product.choose_splits, product.DEPTH
    for batch, pairs in SWEEPS.items():
        bench = Bench(experts, batch, calls=max(2, CALLS[batch] // 2))
        for depth in (2, 3):
            product.DEPTH = depth
            times = {}
            for gate_up, down in pairs:
                moe._plan_shapes.cache_clear()
                product.choose_splits = lambda side, *_, g=gate_up, d=down, **__: g if side == HIDDEN else d
                bench.prepare()
                times[gate_up, down] = bench.time()
            found = "  ".join(f"{g}/{d} {t:.1f}" for (g, d), t in times.items())
            print(f"batch {batch}, depth {depth}: {found}", flush=True)
    product.choose_splits, product.DEPTH = held
    moe._plan_shapes.cache_clear()


SWEEPS = {
    1: [(16, 4), (24, 2), (24, 4), (32, 4), (48, 4)],
    8: [(3, 1), (4, 1), (6, 1), (8, 1), (12, 1), (6, 2)],
    32: [(1, 1), (2, 1), (3, 1), (4, 1)],
    128: [(1, 1), (2, 1), (3, 1)],
    1024: [(1, 1), (2, 1)],
}


def linear(bandwidth: float) -> None:
    """A shared expert's merged gate and up, and its down, in K6."""
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    for in_side, out_side, count in ((HIDDEN, 2048, 2), (2048, HIDDEN, 1)):
        suh = random_scales(in_side, unit=in_side**-0.5, generator=generator)
        sets = []
        for _ in range(8):
            words = [
                torch.randint(-32768, 32768, (in_side // 16, out_side // 16, 96), generator=generator, device=DEVICE).short()
                for _ in range(count)
            ]
            sets.append([Matrix(w, suh, random_scales(out_side, unit=1.0, generator=generator), 6) for w in words])
        for tokens in (1, 16, 128, 1024):
            x = torch.randn(tokens, in_side, generator=generator, device=DEVICE).bfloat16()
            time = time_us(lambda x=x, sets=sets: [linear_forward(x, s) for s in sets][-1]) / len(sets)
            rate = in_side * out_side * count * 6 / 8 / time * 1e6
            print(
                f"linear K6 [{in_side}, {count} x {out_side}] tokens {tokens}: {time:.1f} us, {rate / 1e9:.0f} GB/s, {rate / bandwidth:.0%}"
            )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--sweep", action="store_true", help="variants of the cut, and nothing else")
    parser.add_argument("--batches", default="", help="only these, with commas")
    parser.add_argument("--once", type=int, help="run this batch size once, for a profiler")
    options = parser.parse_args()
    if options.once:
        bench = Bench(make((3, 4)), options.once, calls=1)
        for _ in range(2):
            bench.run()
            torch.cuda.synchronize()
        return
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; copy {bandwidth / 1e9:.0f} GB/s")
    print(f"H {HIDDEN}, I_r {INNER}, E {EXPERTS}, top-{TOPK}; K3 and K4 mixed")
    mixed = make((3, 4))
    if options.sweep:
        sweep(mixed)
        return
    batches = [int(batch) for batch in options.batches.split(",") if batch] or ([1, 8, 32, 128, 1024] if options.quick else list(CALLS))
    report(mixed, batches, bandwidth)
    if not options.quick:
        for pool in ((3,), (4,), (6,)):
            print(f"K{pool[0]} alone")
            report(make(pool), [1, 8, 32, 128], bandwidth)
        linear(bandwidth)


if __name__ == "__main__":
    main()
