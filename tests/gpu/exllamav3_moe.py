"""exllamav3's fused routed experts beside ours, on the same slabs: `python -m tests.gpu.exllamav3_moe [--batches 1,8,...] [--bits 3,4,6]`.

Needs its compiled extension on the path (`exllamav3_ext`, which its wheel brings or its package builds); where that is missing the
reason is printed and nothing else. A measure to compare with, never a source of code.

It has two fused paths for experts of one K, called here as its module calls them: one for few tokens (a slot for each pair, 256 at
most), and one for grouped tokens, whose sums are added by atomics or gathered in a fixed order. Its sorting of routes is left out of
its times; ours is in ours. Each path is compared with the truth on four tokens before it is timed; the quickest counts.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from r7convert.moe import Experts, moe_forward, moe_reference, moe_scratch_bytes
from tests.gpu.bench_moe import CALLS, DEVICE, EXPERTS, HIDDEN, INNER, TOPK, make, time_us
from tests.random_slabs import random_call, relative_l2

BOUND = 4e-3
FEW_SLOTS = 256  # most pairs of its path for few tokens
ROWS = 128  # of one expert that its grouped path takes by default; more if routes ask for them
SILU = 0

Call = tuple[Tensor, Tensor, Tensor]


def load() -> Any | None:
    """The extension, or None with the reason printed."""
    try:
        import exllamav3_ext
    except ImportError as error:
        print(f"exllamav3: skipped, {error}")
        return None
    missing = [name for name in ("exl3_moe", "exl3_moe_coop", "exl3_moe_gather") if not hasattr(exllamav3_ext, name)]
    if missing:
        print(f"exllamav3: skipped, no {', '.join(missing)} in {exllamav3_ext.__file__}")
        return None
    return exllamav3_ext


class Side:
    """Its pointer tables over our slabs of one K, and its scratch for one batch size."""

    def __init__(self, ext: Any, experts: Experts, batch: int, rows: int) -> None:
        slabs = experts.slabs
        (self.bits,) = slabs.tiers
        self.ext, self.batch, self.rows, self.count = ext, batch, max(ROWS, rows), slabs.experts
        self.hidden, self.inner = slabs.hidden, slabs.inner
        order = torch.arange(slabs.experts, device=DEVICE)

        def table(tensor: Tensor, step: int, first: int = 0) -> Tensor:
            return tensor.data_ptr() + (order * step + first) * tensor.element_size()

        plane = slabs.hidden * slabs.inner * self.bits // 16  # in words of 16 bits
        assert slabs.gate_suh.shape[0] == slabs.down_svh.shape[0] == 1, "vectors along H are one row for all experts"
        self.tables = (
            (table(slabs.w13[0], plane), table(slabs.gate_suh, 0), table(slabs.rotations, 3 * slabs.inner)),
            (
                table(slabs.w13[0], plane, plane * slabs.experts),
                table(slabs.up_suh, 0),
                table(slabs.rotations, 3 * slabs.inner, slabs.inner),
            ),
            (table(slabs.w2[0], plane), table(slabs.rotations, 3 * slabs.inner, 2 * slabs.inner), table(slabs.down_svh, 0)),
        )

    def few(self) -> Callable[[Call, Tensor], None]:
        """The path for few tokens."""
        slots, hidden, inner = self.batch * TOPK, self.hidden, self.inner
        half = {"dtype": torch.half, "device": DEVICE}
        scratch = (
            *(torch.empty(slots, hidden, **half) for _ in range(2)),
            *(torch.empty(slots, inner, **half) for _ in range(3)),
            torch.empty(slots, hidden, device=DEVICE),
        )
        length = slots * (inner // 128) + self.batch * (hidden // 128) + 2 * slots + 3
        counters = torch.zeros(length, dtype=torch.int, device=DEVICE)
        flat = [t for projection in self.tables for t in projection]

        def run(call: Call, out: Tensor) -> None:
            x, ids, weights = call
            self.ext.exl3_moe_coop(
                *(x, ids, weights, -1, -1, hidden, *flat, None, None, None, *[float(self.bits)] * 3, True, False),
                *(SILU, 0.0, True, *scratch, counters, out, None, None),
            )

        return run

    def grouped(self, *, by_atomics: bool) -> Callable[[Call, Tensor], None]:
        """The path for grouped tokens; routes are sorted once for each call, outside of what is timed."""
        groups = self.ext.exl3_moe_max_concurrency(0)
        temps = [torch.empty(groups, self.rows, side, dtype=torch.half, device=DEVICE) for side in (self.hidden,) * 2 + (self.inner,) * 2]
        slots = torch.empty(self.batch * TOPK, self.hidden, device=DEVICE)
        flat = [t for projection in self.tables for t in projection]
        sorted_calls: dict[int, tuple[Tensor, ...]] = {}

        def run(call: Call, out: Tensor) -> None:
            x, ids, weights = call
            if id(call) not in sorted_calls:
                expert = ids.reshape(-1)
                order = expert.argsort()
                counts = torch.bincount(expert, minlength=self.count + 1)
                starts = counts.cumsum(0) - counts
                token = torch.arange(self.batch, device=DEVICE).repeat_interleave(TOPK)[order]
                inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=DEVICE))
                active = (counts > 0).long()
                sorted_calls[id(call)] = (expert, counts, token, weights.reshape(-1)[order], inverse, starts, active, active.sum().cpu())
            expert, counts, token, weight, inverse, starts, active, number = sorted_calls[id(call)]
            out.zero_()  # both add to it
            place = (None, None) if by_atomics else (slots, starts)
            self.ext.exl3_moe(
                *(x, out, counts, token, weight, *temps, SILU, *[float(self.bits)] * 3, *flat, *(True, False) * 3),
                *(0.0, int(number), *place, 1, self.rows, 16),
            )
            if not by_atomics:
                n = self.count
                self.ext.exl3_moe_gather(out, slots, expert, inverse, starts[:n], starts[:n], active[:n], weight)

        return run


def make_calls(experts: Experts, batch: int, count: int) -> list[tuple[Call, Call]]:
    """(ours, theirs): the same numbers, in fp16; theirs wants 64-bit ids and fp16 weights, to which ours are rounded."""
    made = []
    for seed in range(count):
        x, ids, weights = random_call(batch, TOPK, experts.slabs, dtype=torch.float16, seed=seed, device=DEVICE)
        made.append(((x, ids, weights.half().float()), (x, ids.long(), weights.half())))
    return made


def compare(ext: Any, experts: Experts, batch: int) -> None:
    calls = make_calls(experts, batch, CALLS[batch])
    most = max(int(theirs[1].reshape(-1).bincount().max()) for _, theirs in calls)
    side = Side(ext, experts, batch, most)
    paths: dict[str, Callable[[], Callable[[Call, Tensor], None]]] = {
        "grouped, atomics": lambda: side.grouped(by_atomics=True),
        "grouped, gathered": lambda: side.grouped(by_atomics=False),
    }
    if batch * TOPK <= FEW_SLOTS:
        paths["few"] = side.few
    outs = [torch.empty(batch, HIDDEN, device=DEVICE) for _ in calls]
    pick = torch.linspace(0, batch - 1, min(4, batch), device=DEVICE).long()
    truth = moe_reference(*(t[pick] for t in calls[-1][0]), experts.slabs)

    scratch = torch.empty(moe_scratch_bytes(experts, batch, TOPK), dtype=torch.uint8, device=DEVICE)

    def ours(call: Call, out: Tensor) -> None:
        moe_forward(*call, experts, scratch=scratch, out=out)

    def timed(run: Callable[[Call, Tensor], None], which: int) -> tuple[float, float]:
        for out in outs:
            out.fill_(torch.nan)
        for pair, out in zip(calls, outs, strict=True):
            run(pair[which], out)
        error = relative_l2(outs[-1][pick], truth)
        each = time_us(lambda: [run(pair[which], out) for pair, out in zip(calls, outs, strict=True)] and None) / len(calls)
        return each, error

    own, error = timed(ours, 0)
    assert error <= BOUND, (batch, error)
    found = {}
    for name, make_path in paths.items():
        try:
            each, their_error = timed(make_path(), 1)
        except (RuntimeError, torch.AcceleratorError) as failure:
            print(f"  batch {batch}: {name}: {str(failure).splitlines()[0]}")
            continue
        if not their_error <= BOUND:
            print(f"  batch {batch}: {name}: not counted, relative L2 {their_error:.1e}")
            continue
        found[name] = (each, their_error)
    if not found:
        print(f"{side.bits:>3}{batch:>7}{own:>10.1f}  none of its paths")
        return
    best = min(found, key=lambda name: found[name][0])
    detail = ", ".join(f"{name} {each:.0f}" for name, (each, _) in found.items())
    ratio, their_error = found[best][0] / own, found[best][1]
    print(
        f"{side.bits:>3}{batch:>7}{own:>10.1f}{found[best][0]:>11.1f}{ratio:>7.2f}{error:>10.1e}{their_error:>10.1e}  {detail}", flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batches", default="1,8,32,128,512,1024,2048")
    parser.add_argument("--bits", default="3,4,6")
    options = parser.parse_args()
    ext = load()
    if ext is None:
        return
    print(f"H {HIDDEN}, I_r {INNER}, E {EXPERTS}, top-{TOPK}, one K; fp16; us")
    print(f"{'K':>3}{'batch':>7}{'ours':>10}{'exllamav3':>11}{'ratio':>7}{'error':>10}{'theirs':>10}  its paths")
    for bits in map(int, options.bits.split(",")):
        experts = make((bits,))
        for batch in map(int, options.batches.split(",")):
            compare(ext, experts, batch)


if __name__ == "__main__":
    main()
