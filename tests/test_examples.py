"""examples/ are run as their readers would run them, and judged by the codec and by verify."""

from __future__ import annotations

import ast
import json
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from r7convert.checkpoint import read_checkpoint
from r7convert.codec import Matrix, expert_forward
from r7convert.verify import verify
from tests.outputs import Made

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, *words: object) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent)}
    return subprocess.run([sys.executable, EXAMPLES / name, *map(str, words)], capture_output=True, text=True, timeout=60, env=env)


# ---- serve_layer.py ---------------------------------------------------------------------------------------------------


def source_experts(folder: Path, layer: int) -> list[tuple[Matrix, Matrix, Matrix]]:
    """The R7 experts of a layer, from the source's tensors by their names."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= {name: tensor for name, tensor in load_file(file).items() if f".layers.{layer}.mlp.experts." in name}
    root = f"model.layers.{layer}.mlp.experts"
    gate_up_suh, down_svh = found[f"{root}.r7_shared.gate_up_suh"], found[f"{root}.r7_shared.down_svh"]

    def matrix(expert: int, proj: str) -> Matrix:
        own = {field: found.get(f"{root}.{expert}.{proj}.{field}") for field in ("trellis", "suh", "svh")}
        suh, svh = (own["suh"], down_svh) if proj == "down_proj" else (gate_up_suh, own["svh"])
        assert own["trellis"] is not None
        assert suh is not None
        assert svh is not None
        return Matrix(own["trellis"], suh, svh, own["trellis"].shape[2] // 16)

    experts = sum(name.endswith("gate_proj.trellis") for name in found)
    return [(matrix(e, "gate_proj"), matrix(e, "up_proj"), matrix(e, "down_proj")) for e in range(experts)]


@pytest.mark.parametrize("name", ["slabs", "rank-sliced shared_h_v1"])
def test_the_reader_computes_what_the_source_computes(make: Callable[[str], Made], name: str) -> None:
    made = make(name)
    serve = runpy.run_path(str(EXAMPLES / "serve_layer.py"))["serve"]
    said = json.loads((made.output / "slabs.json").read_text())
    random = np.random.default_rng(7)
    x = random.standard_normal((5, said["hidden"]), np.float32)
    ids = np.stack([random.permutation(said["experts"])[:2] for _ in x])
    weights = random.random((5, 2), np.float32)
    layer = 1
    got = sum(serve(made.output, layer, rank, x, ids, weights) for rank in range(said["tp"]))
    truth = torch.zeros(x.shape, dtype=torch.float64)
    experts = source_experts(made.source, layer)
    for token, (chosen, shares) in enumerate(zip(ids, weights, strict=True)):
        for e, share in zip(chosen, shares, strict=True):
            truth[token] += float(share) * expert_forward(torch.from_numpy(x[token : token + 1]), *experts[e], dtype=torch.float64)[0]
    assert float((torch.from_numpy(got) - truth).norm() / truth.norm()) < 1e-5
    done = run("serve_layer.py", made.output, layer)
    assert "2 ranks: RMS " in done.stdout, done.stderr


def test_the_reader_has_forty_lines_and_needs_numpy_alone() -> None:
    text = (EXAMPLES / "serve_layer.py").read_text()
    tree = ast.parse(text)
    modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    modules |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert modules <= {"json", "sys", "pathlib", "numpy"}
    quiet = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or 0) + 1)
    }
    reader = [
        line
        for n, line in enumerate(text[: text.index("if __name__")].splitlines(), 1)
        if line.strip() and n not in quiet and line[0] != "#"
    ]
    assert len(reader) <= 40, len(reader)


# ---- check_reader.py --------------------------------------------------------------------------------------------------

problems = runpy.run_path(str(EXAMPLES / "check_reader.py"))["problems"]


def test_it_accepts_what_each_reader_takes(make: Callable[[str], Made], tmp_path: Path) -> None:
    # Copies, for verify leaves its verdict in the folder.
    shared = shutil.copytree(make("rank-sliced shared_h_v1").output, tmp_path / "shared" / "output")
    own = shutil.copytree(make("rank-sliced per_expert_v1").output, tmp_path / "own" / "output")
    for folder, reader, code in ((shared, "r28", 0), (shared, "r14", 1), (own, "r14", 0), (own, "r28", 0)):
        done = run("check_reader.py", folder, "--reader", reader, "--tp", 2)
        assert done.returncode == code, done.stdout + done.stderr
        assert verify(folder, reader=reader, tp=2).ok == (code == 0)
    assert done.stdout.splitlines()[-1] == "r28 at tp 2 would load output"
    assert "r14 does not know it" in run("check_reader.py", shared, "--reader", "r14", "--tp", 2).stdout
    assert "would not load" in run("check_reader.py", make("slabs").output, "--tp", 2).stdout
    assert "not a folder: expected a checkpoint folder" in run("check_reader.py", shared / "nowhere", "--tp", 2).stdout


def drop_tail(config: dict[str, Any]) -> None:
    del config["hybrid_tr3_tail"]


def poison(config: dict[str, Any]) -> None:
    config["quantization_config"]["quant_method"] = "modelopt"


@pytest.mark.parametrize(
    ("harm", "words"),
    [(drop_tail, "Without hybrid_tr3_tail in config.json nothing says how it was sliced"), (poison, "would be built unquantized")],
)
def test_it_names_what_is_wrong_with_the_config(
    make: Callable[[str], Made], tmp_path: Path, harm: Callable[[dict[str, Any]], None], words: str
) -> None:
    out = tmp_path / "out"
    shutil.copytree(make("rank-sliced per_expert_v1").output, out)
    config = json.loads((out / "config.json").read_text())
    harm(config)
    (out / "config.json").write_text(json.dumps(config))
    done = run("check_reader.py", out, "--reader", "r14", "--tp", 2)
    assert done.returncode == 1
    assert words in done.stdout
    assert done.stdout.splitlines()[-1] == "r14 at tp 2 would not load out"
    assert not verify(out, reader="r14", tp=2).ok


def test_it_names_a_wrong_tp_a_wrong_map_and_experts_that_mix_k(make: Callable[[str], Made], tmp_path: Path) -> None:
    good = make("rank-sliced per_expert_v1").output
    cp = read_checkpoint(good)
    assert not list(problems(cp, good, "r14", 2))
    assert any("ranks of another tp are dropped in silence" in line for line in problems(cp, good, "r14", 1))
    assert any("tensors that no rank asks for" in line for line in problems(cp, good, "r14", 1))
    assert any("tensors missing" in line for line in problems(cp, good, "r14", 4))
    tier_map = json.loads((good / "tier_map.json").read_text())
    tier_map["1"]["bits"] = [9 - k for k in tier_map["1"]["bits"]]
    (tmp_path / "tier_map.json").write_text(json.dumps(tier_map))
    assert list(problems(cp, tmp_path, "r14", 2)) == ["layer 1: the tier map and the payload differ in K"]
    mixed = list(problems(read_checkpoint(make("slabs").source), good, "r28", 2))
    assert any("differ in K: their stacks have unequal shapes" in line for line in mixed)
    assert any("an r7_routed_experts block remains" in line for line in mixed)
