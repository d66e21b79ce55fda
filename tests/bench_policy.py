"""How long `lift` and `fit` think about a whole checkpoint, and how near the optimum they prove to be: `python -m tests.bench_policy`."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable

import numpy as np

from r7convert.ktable import KTable, Problem
from r7convert.policy import Plan, fit, lift
from tests.policy_figures import MATRIX_WEIGHTS, draw_tables


def weigh(layer: int, bits: np.ndarray, rng: np.random.Generator, spread: float) -> KTable:
    return KTable(layer, bits, rng.lognormal(0, 0.3, bits.shape), rng.lognormal(0, spread, len(bits)))


def timed(policy: Callable[[], Plan]) -> tuple[float, Plan]:
    times = []
    for _ in range(5):
        started = time.perf_counter()
        plan = policy()
        times.append(time.perf_counter() - started)
    return float(np.median(times)), plan


def main() -> None:
    rng = np.random.default_rng(1)
    weighed = tuple(weigh(t.layer, t.bits, rng, 1.0) for t in draw_tables())
    wild = tuple(weigh(layer, rng.integers(3, 6, (288, 3)), rng, 3.0) for layer in range(92))
    problems = {
        "75 x 256, equal weights": Problem(draw_tables(), MATRIX_WEIGHTS),
        "75 x 256, drawn weights": Problem(weighed, MATRIX_WEIGHTS),
        "the same, K 3..6 from originals": Problem(weighed, MATRIX_WEIGHTS, (3, 4, 5, 6), from_originals=True),
        "92 x 288, K 3..5 uniform, weights drawn wide": Problem(wild, MATRIX_WEIGHTS),
    }
    print("| tables | lift, s | fit at 100%, s | fit at 115%, s | gap, share of the error |\n|---|---|---|---|---|")
    for name, problem in problems.items():
        lift_s, _ = timed(lambda problem=problem: lift(problem))  # type: ignore[misc]
        even_s, _ = timed(lambda problem=problem: fit(problem))  # type: ignore[misc]
        wide_s, plan = timed(lambda problem=problem: fit(problem, problem.payload_bytes * 115 // 100))  # type: ignore[misc]
        assert plan.gap is not None
        print(f"| {name} | {lift_s:.2f} | {even_s:.2f} | {wide_s:.2f} | {plan.gap / plan.error_after:.0e} |")
    print(f"\npeak RSS {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")


if __name__ == "__main__":
    main()
