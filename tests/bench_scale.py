"""A whole GLM-5.2 R7 checkpoint, 346 GB of headers over files without blocks, through the command line: time and memory of each command.

    python -m tests.bench_scale [--work DIR] [--only commands,index]

Facts are asserted (tensors, bytes, nothing written, every target's answer), figures are printed. Memory is the peak of a process of
its own, by the kernel's count.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.bench_repack import write_hollow

TENSORS, BYTES = 173_000, 340_000_000_000
MOST_CPU_S, MOST_MIB = 60, 4096
TPS = (1, 2, 4, 8, 16)

COMMAND = """
import atexit, sys, time
from pathlib import Path
began = time.perf_counter()
def tell():
    peak = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024
    print(f"@@ {time.perf_counter() - began} {time.process_time()} {peak}", file=sys.stderr)
atexit.register(tell)
from r7convert.cli import run
run()
"""
INDEX = """
import json, sys, time
from pathlib import Path
from r7convert.store import read_json, write_json
path, count = Path(sys.argv[1]), int(sys.argv[2])
def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024
def name(n):
    layer, rest = divmod(n, 12288)
    expert, rest = divmod(rest, 48)
    proj, rest = divmod(rest, 16)
    rank, field = divmod(rest, 4)
    proj, field = ("gate_proj", "up_proj", "down_proj")[proj], ("trellis", "suh", "svh", "mcg")[field]
    return f"model.layers.{layer}.mlp.experts.{expert}.{proj}.rank{rank}.{field}", f"experts-layer-{layer:03d}-rank-{rank}-of-4.safetensors"
weight_map = dict(name(n) for n in range(count))
assert len(weight_map) == count
began = time.perf_counter()
write_json(path, {"metadata": {"total_size": 1}, "weight_map": weight_map}, compact=True)
wrote, at_write = time.perf_counter() - began, peak()
began = time.perf_counter()
again = read_json(path)
read = time.perf_counter() - began
assert again["weight_map"] == weight_map
print(json.dumps([path.stat().st_size, wrote, at_write, read]))
"""
READ_INDEX = """
import sys, time
from pathlib import Path
from r7convert.store import read_json
began = time.perf_counter()
count = len(read_json(Path(sys.argv[1]))["weight_map"])
print(count, time.perf_counter() - began, int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024)
"""


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--work", type=Path, default=Path("build/scale"))
    options.add_argument("--only", default="index,commands")
    chosen = options.parse_args()
    shutil.rmtree(chosen.work, ignore_errors=True)
    chosen.work.mkdir(parents=True)
    try:
        for part in chosen.only.split(","):
            {"commands": scale_commands, "index": scale_index}[part](chosen.work)
    finally:
        shutil.rmtree(chosen.work, ignore_errors=True)


def command(*words: object) -> tuple[int, Any, str]:
    """Exit code, JSON answer, and the figures: seconds, seconds of CPU, MiB at most."""
    done = subprocess.run([sys.executable, "-c", COMMAND, *map(str, words)], capture_output=True, text=True, check=False)
    said, _, figures = done.stderr.rpartition("@@ ")
    assert figures, done.stderr[-2000:]
    seconds, cpu, peak = map(float, figures.split())
    assert cpu < MOST_CPU_S, f"{words}: {cpu:.0f} s of CPU"
    assert peak < MOST_MIB, f"{words}: {peak:.0f} MiB"
    answer = json.loads(done.stdout) if done.stdout.startswith("{") else said
    return done.returncode, answer, f"{seconds:5.1f} s ({cpu:.1f} s of CPU), {peak:,.0f} MiB"


def scale_commands(work: Path) -> None:
    source, output = work / "source", work / "output"
    write_hollow(source)
    apparent = sum(path.stat().st_size for path in source.iterdir())
    on_disk = sum(path.stat().st_blocks * 512 for path in source.iterdir())
    assert apparent > BYTES
    assert on_disk < BYTES / 1000

    code, found, figures = command("inspect", source, "--json")
    assert code == 0, found
    assert found["tensors"] >= TENSORS
    print(f"source: {found['tensors']:,} tensors in {found['shards']} shards, {apparent:,} bytes, {on_disk / 1e6:.0f} MB on disk")
    answers = {answer["target"]: answer for answer in found["targets"]}
    assert answers["slabs"]["lossless"]
    assert answers["exl3"]["lossless"]
    assert not answers["rank-sliced"]["accepted"]
    assert answers["rank-sliced --mixed-k lift"]["accepted"]
    print(f"{'inspect':<62} {figures}", flush=True)

    runs: list[Sequence[object]] = [("r7",), ("exl3",)]
    runs += [("slabs", "--tp", tp) for tp in TPS]
    runs += [("rank-sliced", "--tp", tp, "--mixed-k", "lift") for tp in TPS]
    runs += [("rank-sliced", "--tp", 4, "--mixed-k", "fit", "--budget", "100%")]
    for words in runs:
        code, plan, figures = command("repack", source, output, "--target", *words, "--dry-run", "--json", "-q")
        # A whole output needs room that this disk may not have, and a dry run says so.
        assert code in (0, 5), f"{words}: exit code {code}: {plan}"
        if code == 0:
            accounted = plan["accounting"].values()
            assert sum(kind["tensors"] for kind in accounted) == found["tensors"]
            assert sum(kind["bytes"] for kind in accounted) == found["payload_bytes"]
            assert bool(plan["reencoded"]) == ("--mixed-k" in words)
        assert not output.exists()
        print(f"{'repack --dry-run --target ' + ' '.join(map(str, words)):<62} {figures}{', no room' if code else ''}", flush=True)

    code, said, figures = command("repack", source, output, "--target", "rank-sliced", "--tp", 4, "--dry-run")
    assert code == 3, said
    assert not output.exists()
    print(f"{'repack --dry-run --target rank-sliced --tp 4, refused':<62} {figures}", flush=True)
    shutil.rmtree(source)


def scale_index(work: Path) -> None:
    for count in (900_000, 3_735_552):
        path = work / "model.safetensors.index.json"
        done = subprocess.run([sys.executable, "-c", INDEX, str(path), str(count)], capture_output=True, text=True, check=True)
        size, wrote, at_write, read = json.loads(done.stdout)
        done = subprocess.run([sys.executable, "-c", READ_INDEX, str(path)], capture_output=True, text=True, check=True)
        entries, alone_s, alone_mib = done.stdout.split()
        assert int(entries) == count
        print(f"index of {count:,} entries, {size:,} bytes: written in {wrote:.1f} s, {at_write:,.0f} MiB with the map itself;", end=" ")
        print(
            f"read back in {read:.1f} s and equal; in a process of its own {float(alone_s):.1f} s, {float(alone_mib):,.0f} MiB", flush=True
        )
        path.unlink()


if __name__ == "__main__":
    began = time.perf_counter()
    main()
    print(f"in {time.perf_counter() - began:.0f} s")
