"""Repacking against `cp -r` and `sync`, paired in one run; memory over size; headers at full scale; slabs opened against built.

    python -m tests.bench_repack [--pairs 5] [--gb 8] [--work DIR] [--warm] [--only copy,resize,memory,headers,slabs]

Both sides of a pair start with the same cold or warm caches (cold where /proc/sys/vm/drop_caches may be written), on the same
disk, in alternating order, and end with `sync`. Trellis words come from one pool of random bytes, so that a source of many GB is
written at the speed of the disk; nothing here compresses, so the values do not matter.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from r7convert import sample
from r7convert.sample_tensors import SampleTensor
from r7convert.store import FileRecord, encode_header

GLM = {"hidden": 6144, "intermediate": 2048, "split": True, "tail_tp": 4, "equal_tail_vectors": True}
DROP = Path("/proc/sys/vm/drop_caches")

REPACK = """
import json, os, resource, sys, time
from pathlib import Path
from r7convert.repack import repack
def used():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
began = time.perf_counter()
repack(Path(sys.argv[1]), Path(sys.argv[2]), target=sys.argv[3], tp=int(sys.argv[4]) if len(sys.argv) > 4 else None)
os.sync()
print(json.dumps([time.perf_counter() - began, used(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]))
"""
PLAN = """
import json, resource, sys, time
from pathlib import Path
from r7convert.checkpoint import read_checkpoint
from r7convert.plan import plan_repack
from r7convert.vectors import Vectors
began = time.perf_counter()
checkpoint = read_checkpoint(Path(sys.argv[1]))
read = time.perf_counter() - began
plan = plan_repack(checkpoint, target="slabs", tp=int(sys.argv[2]), drop_mtp=True, vectors=Vectors(checkpoint.source))
planned = time.perf_counter() - began
index = len(plan.index()["weight_map"])
indexed = time.perf_counter() - began
tensors, files = len(checkpoint.tensors), len(checkpoint.headers)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps([tensors, files, read, planned, index, indexed, time.process_time(), peak]))
"""


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--pairs", type=int, default=5)
    options.add_argument("--gb", type=float, default=8)
    options.add_argument("--work", type=Path, default=Path("build/bench"))
    options.add_argument("--warm", action="store_true", help="both sides with the source in the page cache")
    options.add_argument("--only", default="headers,copy,resize,slabs,memory")
    chosen = options.parse_args()
    shutil.rmtree(chosen.work, ignore_errors=True)
    chosen.work.mkdir(parents=True)
    parts = {"headers": bench_headers, "copy": bench_copy, "resize": bench_resize, "slabs": bench_slabs, "memory": bench_memory}
    try:
        for name in chosen.only.split(","):
            parts[name](chosen)
    finally:
        shutil.rmtree(chosen.work, ignore_errors=True)


# ---- sources --------------------------------------------------------------------------------------------------------


def write_source(folder: Path, layers: int, **choices: Any) -> int:
    """A sample of GLM-5.2's matrices with pooled trellis words; about 1.1 GB a layer. Returns its bytes."""
    pool = np.random.default_rng(0).bytes(64 << 20)
    really = sample._payload

    def pooled(tensor: SampleTensor, seed: int) -> Iterator[bytes]:
        if tensor.dtype != "I16" and tensor.nbytes < 1 << 20:
            yield from really(tensor, seed)
            return
        at = hash((tensor.name, seed)) % (len(pool) // 2)
        for begin in range(0, tensor.nbytes, len(pool) // 2):
            yield pool[at : at + min(len(pool) // 2, tensor.nbytes - begin)]

    sample._payload = pooled  # type: ignore[assignment]
    try:
        sample.write_sample(folder, **{**GLM, "mode": "uniform", "experts": 64, "dense": 1, "layers": layers, **choices})
    finally:
        sample._payload = really
    return sum(path.stat().st_size for path in folder.iterdir())


def write_hollow(folder: Path, **choices: Any) -> None:
    """All of GLM-5.2's headers over files without blocks: 346 GB to look at, a few MB on disk."""

    def hollow(path: Path, tensors: list[SampleTensor], seed: int, progress: object) -> tuple[FileRecord, str]:
        with path.open("wb") as file:
            header = encode_header([(t.name, t.dtype, t.shape) for t in tensors], {"format": "pt"}, path)
            file.write(header)
            size = len(header) + sum(t.nbytes for t in tensors)
            file.truncate(size)
        return FileRecord(size, "0" * 64), "0" * 64

    really, sample._write_shard = sample._write_shard, hollow  # type: ignore[assignment]
    try:
        sample.write_sample(folder, **{**GLM, "experts": 256, "layers": 78, "dense": 3, **choices})
    finally:
        sample._write_shard = really


# ---- parts ----------------------------------------------------------------------------------------------------------


def run(code: str, *arguments: object) -> list[float]:
    done = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return list(json.loads(done.stdout))


def bench_headers(chosen: argparse.Namespace) -> None:
    for kind, tp in (("r7", 4), ("rank-sliced", 8)):
        bench_kind_of_headers(chosen.work / "hollow", kind, tp)


def bench_kind_of_headers(source: Path, kind: str, tp: int) -> None:
    write_hollow(source, kind=kind, mode="uniform" if kind == "rank-sliced" else "mixed")
    rows = [run(PLAN, source, tp) for _ in range(3)]
    tensors, files, read, planned, index, indexed, used, rss = (statistics.median(column) for column in zip(*rows, strict=True))
    print(f"headers: {kind}: {tensors:,.0f} tensors in {files:.0f} files: read {read:.1f} s, planned {planned:.1f} s,", end=" ")
    print(f"index of {index:,.0f} names {indexed:.1f} s, CPU {used:.1f} s, peak RSS {rss:.0f} MiB (median of 3)")
    shutil.rmtree(source)


def same_caches(source: Path, *, warm: bool) -> str:
    """Bring the page cache into the same state before a side runs: empty, or with the source in it."""
    os.sync()
    if not warm:
        try:
            DROP.write_text("3\n")
        except OSError:
            warm = True
    if warm:
        subprocess.run(["sh", "-c", f"cat '{source}'/* > /dev/null"], check=True)
    return "warm" if warm else "cold"


def bench_copy(chosen: argparse.Namespace) -> None:
    source = chosen.work / "source"
    write_source(source, layers=max(2, round(chosen.gb / 1.15)))
    pair_with_cp(chosen, "copy", source, "rank-sliced", 4).rename(chosen.work / "kept")


def bench_resize(chosen: argparse.Namespace) -> None:
    """A rank-sliced checkpoint of tp 4, as published for stock servers, cut for tp 8 and joined for exl3."""
    source = chosen.work / "sliced"
    write_source(source, layers=max(2, round(chosen.gb / 1.15)), kind="rank-sliced")
    for target, tp in (("rank-sliced", 8), ("exl3", None)):
        shutil.rmtree(pair_with_cp(chosen, "resize", source, target, tp))
    shutil.rmtree(source)


def pair_with_cp(chosen: argparse.Namespace, label: str, source: Path, target: str, tp: int | None) -> Path:
    """Time both sides in turns, and hand back the last output of repack's."""
    output = chosen.work / "output"
    nbytes = sum(path.stat().st_size for path in source.iterdir())
    caches, rows, cpu, rss = "", [], {"cp": 0.0, "repack": 0.0}, 0.0

    def copied() -> float:
        before, began = os.times(), time.perf_counter()
        subprocess.run(["sh", "-c", f"cp -r '{source}' '{output}' && sync"], check=True)
        seconds, after = time.perf_counter() - began, os.times()
        cpu["cp"] += after.children_user + after.children_system - before.children_user - before.children_system
        return seconds

    def repacked() -> float:
        nonlocal rss
        seconds, used, peak = run(REPACK, source, output, target, *([tp] if tp else []))
        cpu["repack"] += used
        rss = max(rss, peak)
        return seconds

    kept = output.with_name(f"{output.name}-{target}-{tp}")
    for pair in range(chosen.pairs):
        sides: dict[str, Callable[[], float]] = {"cp": copied, "repack": repacked}
        times = {}
        for name in sorted(sides, reverse=bool(pair % 2)):
            caches = same_caches(source, warm=chosen.warm)
            times[name] = sides[name]()
            if name == "repack" and pair == chosen.pairs - 1:
                output.rename(kept)
            else:
                shutil.rmtree(output)
        load = os.getloadavg()[0]
        rows.append(times["repack"] / times["cp"])
        print(
            f"{label}: pair {pair + 1}: cp {times['cp']:.1f} s, repack {times['repack']:.1f} s, ratio {rows[-1]:.2f}, load {load:.1f}",
            flush=True,
        )
    what = f"{target}, tp {tp}" if tp else target
    print(f"{label}: {nbytes / 1e9:.2f} GB to {what}, {caches} caches: median ratio {statistics.median(rows):.2f}", end=" ")
    print(f"(from {min(rows):.2f} to {max(rows):.2f}), peak RSS {rss:.0f} MiB,", end=" ")
    print(f"CPU a pair: cp {cpu['cp'] / chosen.pairs:.1f} s, repack {cpu['repack'] / chosen.pairs:.1f} s")
    return kept


def bench_memory(chosen: argparse.Namespace) -> None:
    for factor in (0.5, 1, 2):
        source, output = chosen.work / "sized", chosen.work / "sized-output"
        nbytes = write_source(source, layers=max(2, round(factor * chosen.gb / 1.15)))
        _, _, rss = run(REPACK, source, output, "rank-sliced", 4)
        print(f"memory: {nbytes / 1e9:.2f} GB: peak RSS {rss:.0f} MiB", flush=True)
        shutil.rmtree(source)
        shutil.rmtree(output)


def bench_slabs(chosen: argparse.Namespace) -> None:
    """One layer of one rank: mapped by open_slabs, against stacked by a loader in plain torch from the same file's tensors."""
    import torch
    from safetensors import safe_open

    from r7convert import open_slabs

    folder = chosen.work / "kept"
    if not folder.exists():
        write_source(chosen.work / "source", layers=3)
        run(REPACK, chosen.work / "source", folder, "rank-sliced", 4)
    layer, rank = 1, 0
    path = next(folder.glob(f"experts-layer-{layer:03d}-rank-{rank}-of-4.safetensors"))
    path.read_bytes()  # both sides from the page cache

    def built() -> object:
        with safe_open(path, "pt") as file:
            base = f"model.layers.{layer}.mlp.experts"
            count = 1 + max(int(name.split(".")[5]) for name in file.keys() if name.split(".")[5].isdigit())  # noqa: SIM118
            get = file.get_tensor
            planes: dict[int, list[list[torch.Tensor]]] = {}
            for e in range(count):
                for p, proj in enumerate(("gate_proj", "up_proj", "down_proj")):
                    trellis = get(f"{base}.{e}.{proj}.rank{rank}.trellis")
                    planes.setdefault(trellis.shape[2] // 16, [[], [], []])[p].append(trellis)
            w13 = [torch.stack(gates + ups) for _, (gates, ups, _) in sorted(planes.items())]
            w2 = [torch.stack(downs) for _, (_, _, downs) in sorted(planes.items())]
            fields = (("gate_proj", "svh"), ("up_proj", "svh"), ("down_proj", "suh"))
            rows = [torch.cat([get(f"{base}.{e}.{p}.rank{rank}.{f}") for p, f in fields]) for e in range(count)]
            return w13, w2, torch.stack(rows)

    began = time.perf_counter()
    slabs = open_slabs(folder, layer, rank)
    first = time.perf_counter() - began
    w13, w2, rotations = built()  # type: ignore[misc]
    assert all(torch.equal(a, b) for a, b in zip([*slabs.w13, *slabs.w2, slabs.rotations], [*w13, *w2, rotations], strict=True))
    opened = statistics.median(_times(lambda: open_slabs(folder, layer, rank), 101))
    stacked = statistics.median(_times(built, 5))
    print(f"slabs: layer of {path.stat().st_size / 1e6:.0f} MB: opened in {opened * 1e6:.0f} us (first of a process", end=" ")
    print(f"{first * 1e3:.1f} ms, with slabs.json and torch), built in plain torch in {stacked * 1e3:.0f} ms: {stacked / opened:,.0f} x")


def _times(call: Callable[[], object], count: int) -> Iterator[float]:
    for _ in range(count):
        began = time.perf_counter()
        call()
        yield time.perf_counter() - began


if __name__ == "__main__":
    main()
