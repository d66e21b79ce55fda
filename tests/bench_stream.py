"""Peak disk, memory and time of `repack --stream` and `--push-as-you-go` on a generated repository of several gigabytes.

    python -m tests.bench_stream [--folder DIR] [--layers 40] [--max-disk 400MB]

A loopback Hub serves a sample checkpoint; the command runs as a process, and its disk is looked at every few milliseconds.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import resource
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from r7convert.cli_options import parse_size
from r7convert.sample import write_sample
from r7convert.terminal import format_table
from r7convert.units import in_bytes, in_time
from tests.hub_server import Blob, HubServer

ROOT = Path(__file__).parents[1]
PAYLOAD = (".safetensors", ".incomplete", ".partial")


@dataclass
class Gauge:
    """Payload bytes under a folder: at most, and looked at how often."""

    folder: Path
    peak: int = 0
    looks: int = 0

    def watch(self, stop: threading.Event) -> None:
        while not stop.wait(0.005):
            total = 0
            for where, _, names in os.walk(self.folder):
                for name in names:
                    if name.endswith(PAYLOAD):
                        try:
                            total += os.stat(os.path.join(where, name)).st_blocks * 512  # noqa: PTH116, PTH118
                        except OSError:
                            continue
            self.peak, self.looks = max(self.peak, total), self.looks + 1


def publish(hub: HubServer, folder: Path, repo: str) -> int:
    """Serve a folder's files from where they stand, with their true digests."""
    hub.add_repo(repo, {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".safetensors"})
    commit = hub.repos[repo].commits[hub.repos[repo].branches["main"]]
    total = 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        (hub.objects / digest).symlink_to(path)
        commit.files[path.name] = Blob(digest, path.stat().st_size, digest[:40], lfs=True)
        total += path.stat().st_size
    return total


def measure(hub: HubServer, work: Path, watched: str, *words: str) -> tuple[str, ...]:
    gauge, stop = Gauge(work / watched), threading.Event()
    watcher = threading.Thread(target=gauge.watch, args=(stop,))
    watcher.start()
    env = os.environ | hub.env(work / "home") | {"PYTHONPATH": str(ROOT)}
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    command = [
        sys.executable,
        "-c",
        _WITH_RSS,
        "repack",
        "org/big",
        "out",
        "--target",
        "rank-sliced",
        "--tp",
        "4",
        "--stream",
        "-q",
        *words,
    ]
    done = subprocess.run(command, env=env, cwd=work, capture_output=True, text=True)
    spent = time.monotonic() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    stop.set()
    watcher.join()
    if done.returncode:
        sys.exit(done.stderr)
    rss = int(done.stderr.split()[-1]) * 1024
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return in_time(spent), f"{cpu:.0f} s", in_bytes(rss), in_bytes(gauge.peak), f"{gauge.looks:,}"


_WITH_RSS = """
import resource, sys
from r7convert.cli import run
try:
    run()
finally:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--max-disk", default="400MB")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.folder) as made, HubServer(Path(made) / "hub", multipart_bytes=1 << 26) as hub:
        work = Path(made)
        shape = {"hidden": 1024, "intermediate": 1024, "experts": 64, "layers": asked.layers, "dense": 0}
        write_sample(work / "src", mode="uniform", split=True, **shape)
        total = publish(hub, work / "src", "org/big")
        bound = ("--max-disk", asked.max_disk)
        machine = f"{platform.machine()}, {os.cpu_count()} cores"
        print(f"{machine}; repository {in_bytes(total)}, bound {in_bytes(parse_size('--max-disk', asked.max_disk) or 0)}")
        rows = [("--stream", *measure(hub, work, "out/.r7convert/fetched", *bound))]
        subprocess.run(["rm", "-r", str(work / "out")], check=True)
        rows.append(("--push-as-you-go", *measure(hub, work, "out", *bound, "--push-as-you-go", "org/out")))
        headers = ("run", "wall", "cpu", "peak RSS", "peak disk", "looks")
        print("\n".join(format_table(headers, rows)))


if __name__ == "__main__":
    main()
