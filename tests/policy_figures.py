"""The table of docs/policies.md: what each policy costs on GLM-5.2's numbers. `python -m tests.policy_figures` prints it."""

from __future__ import annotations

import time

import numpy as np

from r7convert.ktable import KTable, Problem
from r7convert.policy import Plan, fit, lift

LAYERS, EXPERTS, MATRIX_WEIGHTS = 75, 256, 6144 * 2048
SPLIT_EXPERTS = 5_418  # experts whose gate and up differ
THREE_K_LAYERS = (5, 31, 52, 74)
SEED = 7


def draw_tables() -> tuple[KTable, ...]:
    """K tables with what FORMAT.md section 2 says of GLM-5.2: 75 layers of K3 and K4, four of them with K5 as well; gate and up
    differ in exactly 5,418 experts, most downs are one K above their gate. The rest is drawn, so bytes are near, not equal to, the
    published ones."""
    rng = np.random.default_rng(SEED)
    gate = 3 + (rng.random((LAYERS, EXPERTS)) < 0.2)
    up = gate.copy()
    split = rng.permutation(LAYERS * EXPERTS)[:SPLIT_EXPERTS]
    up.flat[split] = 7 - up.flat[split]  # 3 <-> 4
    down = gate + (rng.random((LAYERS, EXPERTS)) < 0.8)
    layers = np.arange(3, 3 + LAYERS)
    down[~np.isin(layers, THREE_K_LAYERS)] = down[~np.isin(layers, THREE_K_LAYERS)].clip(max=4)
    bits = np.stack([gate, up, down], axis=2)
    return tuple(KTable(int(layer), table) for layer, table in zip(layers, bits, strict=True))


def run_policies(from_originals: bool) -> dict[str, Plan]:
    problem = Problem(draw_tables(), MATRIX_WEIGHTS, from_originals=from_originals)
    lifted = lift(problem)
    return {
        "`lift`": lifted,
        "`fit --budget 95%`": fit(problem, problem.payload_bytes * 95 // 100),
        "`fit` (100%)": fit(problem),
        "`fit --budget 105%`": fit(problem, problem.payload_bytes * 105 // 100),
        "`fit` at the bytes of `lift`": fit(problem, lifted.bytes_after),
    }


def row(name: str, plan: Plan) -> str:
    share, error = plan.bytes_after / plan.bytes_before, plan.error_after / plan.error_before
    return f"| {name} | {plan.lifted:,} | {plan.lowered:,} | {plan.bytes_after / 1e9:.1f} | {share:.1%} | {error:.2f} |"


def table(from_originals: bool) -> list[str]:
    head = ["| policy | lifted | lowered | GB | of the payload | error, payload = 1 |", "|---|---|---|---|---|---|"]
    return head + [row(name, plan) for name, plan in run_policies(from_originals).items()]


if __name__ == "__main__":
    for from_originals, source in ((False, "payload"), (True, "originals")):
        started = time.perf_counter()
        lines = table(from_originals)
        print(f"Encoded from the {source}:\n", *lines, f"\n{time.perf_counter() - started:.1f} s\n", sep="\n")
