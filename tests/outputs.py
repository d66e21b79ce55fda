"""Good outputs for the tests of their judge: each target, each rotation layout, each form a hidden-side vector has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from r7convert.repack import repack
from r7convert.sample import write_sample
from r7convert.verdict import Verdict
from r7convert.verify import verify

SMALL: dict[str, Any] = {"hidden": 128, "intermediate": 256, "experts": 3, "layers": 3, "dense": 1}
SMALLEST: dict[str, Any] = {**SMALL, "experts": 2, "layers": 2}

# name: (what the source is, what is asked of repack)
OUTPUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "rank-sliced shared_h_v1": ({"mode": "uniform", "equal_tail_vectors": True}, {"target": "rank-sliced", "tp": 2}),
    "rank-sliced per_expert_v1": ({"mode": "uniform"}, {"target": "rank-sliced", "tp": 2, "reader": "r14"}),
    "slabs": ({"mode": "mixed"}, {"target": "slabs", "tp": 2}),
    "r7": ({"mode": "mixed", "tail_tp": 2}, {"target": "r7"}),
    "exl3": ({"mode": "mixed"}, {"target": "exl3"}),
}


@dataclass(frozen=True)
class Made:
    source: Path
    output: Path

    def judge(self, folder: Path | None = None, **choices: Any) -> Verdict:
        return verify(folder or self.output, source=self.source, threads=1, **choices)


def maker(factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """The outputs above by name, each made once; tests harm copies."""
    made: dict[str, Made] = {}

    def get(name: str) -> Made:
        if name not in made:
            folder = factory.mktemp("made")
            sample, choices = OUTPUTS[name]
            write_sample(folder / "source", **SMALLEST, **sample)
            repack(folder / "source", folder / "output", **choices)
            made[name] = Made(folder / "source", folder / "output")
        return made[name]

    return get


def lines_of(verdict: Verdict) -> str:
    return "\n".join(line for part in verdict.parts for check in part.checks.values() for line in check.shown)


def failed_parts(verdict: Verdict) -> set[str]:
    return {part.name for part in verdict.parts if part.state == "failed"}
