"""Kinds of source against targets: samples of each kind, and what the plan says of each pair. docs/targets.md is rendered from it."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from r7convert import policy
from r7convert.checkpoint import read_checkpoint
from r7convert.errors import R7Error, UnsupportedError
from r7convert.format import MCG_MARKER
from r7convert.ktable import Problem
from r7convert.plan import Plan, plan_repack
from r7convert.repack import repack
from r7convert.sample import write_sample
from r7convert.stamp import TARGETS
from r7convert.vectors import Vectors
from tests.folders import CARRIER, edited_shard

SMALL: dict[str, Any] = {"hidden": 128, "intermediate": 512, "experts": 3, "layers": 3, "dense": 1}
NO_DENSE = {"dense": 0, "layers": 2}
EXL3 = {"kind": "exl3"}
SLICED = {"kind": "rank-sliced", "mode": "uniform", "tail_tp": 4}
TP: Mapping[str, int | None] = {"rank-sliced": 2, "slabs": 2, "r7": None, "exl3": None}


def quantized_head(folder: Path) -> None:
    """The head in EXL3, as exllamav3 has it unless told otherwise."""
    with edited_shard(folder / CARRIER) as tensors:
        out, rows = tensors.pop("lm_head.weight").shape
        words = torch.randint(-(2**15), 2**15, (rows // 16, out // 16, 96), dtype=torch.int16, generator=torch.Generator().manual_seed(0))
        tensors |= {
            "lm_head.trellis": words,
            "lm_head.suh": torch.full((rows,), 0.1, dtype=torch.float16),
            "lm_head.svh": torch.ones(out, dtype=torch.float16),
            "lm_head.mcg": torch.tensor(MCG_MARKER, dtype=torch.int32),
        }


@dataclass(frozen=True)
class Kind:
    """A row: a sample, converted by `first` where no sample is written so, and changed by `edit`."""

    words: str
    sample: Mapping[str, Any]
    first: Mapping[str, Any] = field(default_factory=dict)
    edit: Callable[[Path], None] | None = None

    def write(self, folder: Path) -> Path:
        """The source folder, somewhere under a new `folder`."""
        source = folder / "source"
        write_sample(source, **{**SMALL, **self.sample})
        if self.edit is not None:
            self.edit(source)
        if self.first:
            source, before = folder / "converted", source
            repack(before, source, **self.first)
        return source


KINDS: Mapping[str, Kind] = {
    "r7": Kind("R7, a K for each projection", {"mode": "mixed", "tail_tp": 2}),
    "r7-one-k": Kind("R7, one K an expert", {"mode": "uniform", "equal_tail_vectors": True}),
    "r7-three-k": Kind("R7, one K an expert, three in a layer", {"mode": "three-k"}),
    "r7-whole-mtp": Kind("R7, its block over the MTP layer too", {"mode": "uniform", "mtp": "r7"}),
    "sliced": Kind("rank-sliced, `per_expert_v1`", SLICED),
    "sliced-shared": Kind("rank-sliced, `shared_h_v1`", {**SLICED, "shared_h": True}),
    "sliced-k6": Kind("rank-sliced, K6 among them", {**SLICED, "k_values": (4, 6)}),
    "sliced-from-r7": Kind("rank-sliced, cut from R7", {"mode": "uniform", "mtp": "none"}, {"target": "rank-sliced", "tp": 4}),
    "slabs": Kind("slabs, cut from R7", {"mode": "mixed"}, {"target": "slabs", "tp": 4}),
    "exl3": Kind("EXL3, a K for each tensor", {**EXL3, "mode": "mixed"}),
    "exl3-one-k": Kind("EXL3, one K an expert", {**EXL3, "mode": "uniform"}),
    "exl3-k8": Kind("EXL3, K2 and K8 among them", {**EXL3, "mode": "uniform", "k_values": (2, 8)}),
    "exl3-head": Kind("EXL3, the head too", {**EXL3, "mode": "uniform"}, edit=quantized_head),
    "exl3-gap": Kind("EXL3, a dense layer in between", {**EXL3, "mode": "uniform", "layers": 4, "dense_too": (2,)}),
    "exl3-mul1": Kind("EXL3, codebook mul1", {**EXL3, "mode": "uniform", "codebook": "mul1"}),
    "exl3-from-r7": Kind("EXL3, joined from R7", {"mode": "mixed", "mtp": "none"}, {"target": "exl3"}),
    "qwen": Kind("EXL3, MTP layers under `mtp.` (Qwen3.5)", {**EXL3, "mode": "uniform", "family": "qwen"}),
    "minimax": Kind("EXL3, `block_sparse_moe` (MiniMax)", {**EXL3, **NO_DENSE, "mode": "uniform", "family": "minimax", "mtp": "none"}),
    "deepseek-v4": Kind("EXL3, `ffn` (DeepSeek-V4)", {**EXL3, **NO_DENSE, "mode": "uniform", "family": "deepseek-v4"}),
}


@dataclass(frozen=True)
class Outcome:
    """`answer` is "lossless", "by policy" or "no", with the reason in the words of the error."""

    answer: str
    why: str = ""


def _never(_: Problem) -> policy.Plan:
    raise UnsupportedError("a policy was asked")


def outcome(source: Path, target: str) -> Outcome:
    """What the plan says: without a policy, then with one."""
    checkpoint = read_checkpoint(source)

    def plan(choose: Callable[[Problem], policy.Plan]) -> Plan:
        return plan_repack(checkpoint, target=target, tp=TP[target], choose=choose, vectors=Vectors(checkpoint.source))

    try:
        return Outcome("lossless" if not plan(policy.refuse).reencoded else "by policy")
    except R7Error as error:
        reason = str(error)
    try:
        return Outcome("by policy" if plan(policy.lift).reencoded else "lossless")
    except R7Error:
        return Outcome("no", _plain(reason.splitlines()[0]))


def _plain(reason: str) -> str:
    """Without the file and the layer of the sample that it came from."""
    reason = re.sub(r"^\S+\.safetensors: \S+(?=: hidden-side)", "NAME", reason)
    return re.sub(r"\blayer \d+", "layer L", reason)


INTRO = """# What becomes what

Written by `make docs` from small samples of each kind, by asking the plan. A test converts every pair and lets `verify` judge it.

Rows are what a checkpoint is ([sources.md](sources.md)): `r7convert inspect` says which of them yours is, by its headers and config and
never by its name, and what each target makes of it. Columns are what to make of it. **lossless**: every byte is kept, joined, cut or
copied; ranks join to what they were cut from, so any tp becomes any other. **by policy**: some matrices are encoded again, as
`--mixed-k` says ([policies.md](policies.md)). **no**, with the reason that the command gives; where a checkpoint has several, the first.

"""
AFTER = """
What holds for all of them:

- A hidden-side vector that all experts of a layer share is stored once for `shared_h_v1` (`--rotation-layout`, the default where it
  can be) and `r7`, and under each expert for `per_expert_v1` and `exl3`. Going back and forth changes no bit.
- For `r7`, a layer becomes whole matrices under `r7_routed_experts`, where gate and up of all its experts have one input vector, and down
  one output vector. An MTP layer that has more of them goes to a tail of its own, as R7's producers have it, at `--tp` or the tp it has.
- Shared experts that are EXL3 stay as they are, BF16 ones until `encode-shared`. Dense EXL3 modules (attention, head, K1 to K8) are
  carried. A stock server takes those with an mcg marker in the layers of its tail alone, so `rank-sliced` refuses them elsewhere.
- A dense layer in between has no place in the one range of layers that a tail and an R7 block are.
- Matrices without a marker are another codebook, older than both: refused when read, whatever the target.
"""


def render() -> str:
    """docs/targets.md."""
    lines, reasons = [INTRO, "| from | " + " | ".join(f"`{target}`" for target in TARGETS) + " |\n", "|---" * 5 + "|\n"], list[str]()
    with tempfile.TemporaryDirectory() as scratch:
        for name, kind in KINDS.items():
            source = kind.write(Path(scratch) / name)
            cells = []
            for target in TARGETS:
                found = outcome(source, target)
                if found.why and found.why not in reasons:
                    reasons.append(found.why)
                cells.append(f"no ({reasons.index(found.why) + 1})" if found.why else found.answer)
            lines.append(f"| {kind.words} | " + " | ".join(cells) + " |\n")
    lines.append("\n" + "".join(f"{n}. `{why}`\n" for n, why in enumerate(reasons, 1)))
    return "".join([*lines, AFTER])
