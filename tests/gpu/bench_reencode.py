"""make bench-reencode: one layer of GLM-5.2's size lifted to one K an expert, and one of its shared experts encoded, on this GPU.

    python3 -m tests.gpu.bench_reencode [--folder DIR] [--experts 256]

The layer (4 GB) is written by the sample writer, lifted by `repack`, and what came out is checked before any figure is printed:
mean errors against FORMAT.md section 7, and matrices decoded by the codec against what the manifest says of them. Seconds are
wall-clock with reading, hashing and writing; the search's share is printed beside. Figures go to docs/log.md by hand.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import torch

from r7convert import codec, devices
from r7convert.checkpoint import read_checkpoint
from r7convert.encode_shared import encode_shared
from r7convert.evidence import gather
from r7convert.findings import Part
from r7convert.format import TensorEntry
from r7convert.journal import read_manifest
from r7convert.ktable import STEPS
from r7convert.progress import Progress
from r7convert.repack import repack
from r7convert.sample import write_sample
from r7convert.shared_layer import encode_part
from r7convert.shared_plan import SharedPart
from r7convert.team import Team
from r7convert.verify_errors import check_errors

HIDDEN, INTERMEDIATE = 6144, 2048
GLM_LAYERS, GLM_LIFTED = 75, 24_686  # docs/policies.md, `lift`
GOAL_S = {"gate_up_proj": 0.26, "down_proj": 0.14}
DEVICE = torch.device("cuda", 0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--experts", type=int, default=256)
    chosen = parser.parse_args()
    print(
        subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True).stdout.strip(),
        flush=True,
    )
    shared_expert()
    root = Path(tempfile.mkdtemp(dir=chosen.folder))
    try:
        lift(root, chosen.experts)
    finally:
        shutil.rmtree(root)


def shared_expert() -> None:
    """Both parts of a shared expert from host memory: copy, regularize, search, pack, decode and measure."""
    generator = torch.Generator().manual_seed(1)
    base = "model.layers.3.mlp.shared_experts"
    shapes = {"gate_proj": (INTERMEDIATE, HIDDEN), "up_proj": (INTERMEDIATE, HIDDEN), "down_proj": (HIDDEN, INTERMEDIATE)}
    weights = {name: (torch.randn(shape, generator=generator) * shape[1] ** -0.5).bfloat16() for name, shape in shapes.items()}
    total = 0.0
    for part, names in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        entries = tuple(TensorEntry(f"{base}.{name}.weight", "BF16", shapes[name], "", 0, 0) for name in names)
        job = SharedPart(f"{base}.{part}", tuple(f"{base}.{name}" for name in names), entries, ())
        times = []
        for _ in range(6):
            began = time.perf_counter()
            tensors, figures = encode_part(job, [weights[name] for name in names], bits=6, device=DEVICE)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        for name in names:
            stored = [tensors[f"{base}.{name}.{field}"] for field in ("trellis", "suh", "svh")]
            truth = weights[name].to(DEVICE).t().double()
            decoded = codec.decode_matrix(*stored, bits=6).double()
            error = float((decoded - truth).square().sum() / truth.square().sum())
            assert abs(error / figures[f"{base}.{name}"]["relative_error"] - 1) < 1e-3, "a figure that the codec does not find again"
            assert error < 0.00035, error
        median = statistics.median(times[1:])
        total += median
        print(f"encode {part} [{job.sides[0]}, {job.sides[1]}] K6: {median:.3f} s (first {times[0]:.2f}), goal {GOAL_S[part]}", flush=True)
    print(
        f"shared expert: {total:.3f} s, goal {sum(GOAL_S.values()):.2f}; 76 layers {76 * total:.0f} s, goal 32, without the disk",
        flush=True,
    )


def lift(root: Path, experts: int) -> None:
    began = time.perf_counter()
    source, output = root / "source", root / "lifted"
    write_sample(source, hidden=HIDDEN, intermediate=INTERMEDIATE, experts=experts, layers=1, dense=0, mtp="none", k_values=(3, 4))
    nbytes = sum(path.stat().st_size for path in source.iterdir())
    print(f"sample: {experts} experts, {nbytes / 1e9:.2f} GB in {time.perf_counter() - began:.1f} s", flush=True)

    rates = {bits: devices.tiles_per_s(DEVICE, bits) for bits in (4,)}
    began = time.perf_counter()
    made = repack(source, output, target="rank-sliced", tp=4, mixed_k="lift", device="cuda")
    spent = time.perf_counter() - began
    facts = read_manifest(output).facts
    matrices = len(facts["reencoded"])
    assert matrices == made.plan.reencoded
    tiles = HIDDEN * INTERMEDIATE // 256
    by_step: dict[tuple[int, int], list[float]] = {}
    for said in facts["reencoded"].values():
        by_step.setdefault((said["from"], said["to"]), []).append(said["relative_error"])
    for step, errors in sorted(by_step.items()):
        ratio = statistics.fmean(errors) / STEPS[step].step
        print(f"  K{step[0]} -> K{step[1]}: {len(errors)} matrices, mean error {statistics.fmean(errors):.5f}, {ratio:.3f} of the page's")
        assert abs(ratio - 1) < 0.02
        assert max(errors) < 1.02 * STEPS[step].step
    search = sum(tiles / rates.get(said["to"], rates[4]) for said in facts["reencoded"].values())
    size = sum(path.stat().st_size for path in output.iterdir())
    pace = f"{matrices} matrices in {spent:.1f} s, {matrices / spent:.1f} a second"
    print(f"lift: {pace}; search alone {search:.1f} s; {size / 1e9:.2f} GB written")
    hours = GLM_LIFTED / matrices * spent / 3600
    print(f"  GLM-5.2: {GLM_LIFTED:,} matrices of {GLM_LAYERS} layers at this pace: {hours:.2f} hours on this GPU", flush=True)

    part = Part("numbers")
    began = time.perf_counter()
    folders = [gather(place, [p.name for p in place.glob("*.safetensors")], part.check("headers", "files")) for place in (source, output)]
    check_errors(folders[0], folders[1], facts, part, Progress(), Team())
    assert not part.failures, [line for check in part.checks.values() for line in check.shown]
    print(f"verify's codec finds every figure again: {time.perf_counter() - began:.1f} s", flush=True)

    report = encode_shared(output, device="cuda")
    found = {k for module in report.encoded for k in read_checkpoint(output).shared_experts[0].bits}
    assert found == {6}
    print(f"encode-shared in place, one layer: {report.seconds:.2f} s with reading, writing and the seal", flush=True)


if __name__ == "__main__":
    main()
