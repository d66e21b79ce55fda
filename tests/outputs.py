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

Choices = dict[str, Any]

# name: (what the source is, what is asked of repack; of several, one after the other, the last is judged against the one before)
OUTPUTS: dict[str, tuple[Choices, Choices | tuple[Choices, ...]]] = {
    "rank-sliced shared_h_v1": ({"mode": "uniform", "equal_tail_vectors": True}, {"target": "rank-sliced", "tp": 2}),
    "rank-sliced per_expert_v1": ({"mode": "uniform"}, {"target": "rank-sliced", "tp": 2, "reader": "r14"}),
    "slabs": ({"mode": "mixed"}, {"target": "slabs", "tp": 2}),
    "r7": ({"mode": "mixed", "tail_tp": 2}, {"target": "r7"}),
    "exl3": ({"mode": "mixed"}, {"target": "exl3"}),
    "r7 made anew": ({"mode": "mixed"}, ({"target": "slabs", "tp": 1}, {"target": "r7", "tp": 2})),
    "another tp": ({"mode": "uniform", "equal_tail_vectors": True}, ({"target": "slabs", "tp": 1}, {"target": "rank-sliced", "tp": 2})),
}


def make_chain(folder: Path, name: str) -> tuple[Path, Path]:
    """The folders of an output's last step: its source and what it made."""
    sample, choices = OUTPUTS[name]
    write_sample(folder / "source", **SMALLEST, **sample)
    source, made = folder / "source", folder / "output"
    for turn, step in enumerate(choices if isinstance(choices, tuple) else (choices,)):
        if turn:
            source, made = made, folder / f"output-{turn}"
        repack(source, made, **step)
    return source, made


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
            made[name] = Made(*make_chain(factory.mktemp("made"), name))
        return made[name]

    return get


def lines_of(verdict: Verdict) -> str:
    return "\n".join(line for part in verdict.parts for check in part.checks.values() for line in check.shown)


def failed_parts(verdict: Verdict) -> set[str]:
    return {part.name for part in verdict.parts if part.state == "failed"}
