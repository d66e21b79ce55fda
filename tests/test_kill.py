"""A run that is killed, at any moment, leaves nothing incomplete under a final name and is finished by the same command."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from r7convert.repack import repack
from r7convert.store import PARTIAL, STATE_DIR
from tests import kill
from tests.folders import sample, tree

KILLS = 10
RUN = """
import os, signal, sys, threading, time
from pathlib import Path
from r7convert.repack import repack
source, output, after = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
if after:
    threading.Timer(after, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
began = time.perf_counter()
repack(source, output, target="rank-sliced", tp=4, threads=2)
print(time.perf_counter() - began, flush=True)
os._exit(0)
"""


def run(source: Path, output: Path, after: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", RUN, str(source), str(output), str(after)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def check_whole(output: Path, expected: dict[str, str]) -> int:
    """Every file under a final name is the finished run's; returns how many there are."""
    found = {name: digest for name, digest in tree(output).items() if not name.startswith(STATE_DIR) and not name.endswith(PARTIAL)}
    assert found.items() <= expected.items(), found.keys() - expected.keys()
    if "MANIFEST.json" in found:
        assert found == expected
    return len(found)


def test_sigkill_at_random_moments(tmp_path: Path) -> None:
    source, output = sample(tmp_path / "s", mode="uniform", tail_tp=2, layers=9, experts=8, split=True), tmp_path / "o"
    whole = run(source, tmp_path / "whole", 0)
    assert whole.returncode == 0, whole.stderr
    expected, seconds = tree(tmp_path / "whole"), float(whole.stdout)
    seed = int.from_bytes(os.urandom(4), "little")
    print(f"moments from seeds 7 and {seed}")
    moments = [random.Random(7).uniform(0, seconds) for _ in range(KILLS // 2)]
    moments += [random.Random(seed).uniform(0, seconds) for _ in range(KILLS - KILLS // 2)]
    killed, left = 0, set()
    for number, moment in enumerate(moments):
        died = run(source, output, moment)
        killed += died.returncode == -signal.SIGKILL
        assert died.returncode in (0, -signal.SIGKILL), died.stderr
        if output.exists():
            left.add(check_whole(output, expected))
        if number % 2:  # every other time the next kill meets what the last one left
            repack(source, output, target="rank-sliced", tp=4)
            assert tree(output) == expected
            output.rename(tmp_path / f"done-{number}")
    assert killed >= KILLS // 2
    assert len(left) > 2, "the kills all hit the same moment"


@pytest.mark.parametrize(("target", "tp", "link"), [("rank-sliced", 1, False), ("r7", None, True)])
def test_death_at_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, tp: int | None, link: bool) -> None:
    """Not at random: before each rename, fsync, unlink and mkdir that a run makes, in turn."""
    source = sample(tmp_path / "s", mode="uniform", layers=4, hidden=128, intermediate=128, experts=2)
    before = tree(source)
    repack(source, tmp_path / "whole", target=target, tp=tp, link=link)
    expected, deaths = tree(tmp_path / "whole"), 0
    output = tmp_path / "o"
    for number in kill.at_every_step(monkeypatch, lambda: repack(source, output, target=target, tp=tp, threads=1, link=link)):
        deaths += 1
        if output.exists():
            check_whole(output, expected)
        repack(source, output, target=target, tp=tp, threads=1, link=link)
        assert tree(output) == expected
        assert tree(source) == before
        output.rename(tmp_path / f"done-{number}")
    assert deaths > 40


def test_death_of_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart that dies while it clears an older conversion leaves no seal on half a folder, and can be repeated."""
    source, output = sample(tmp_path / "s", mode="uniform", layers=4, hidden=128, intermediate=256, experts=2), tmp_path / "o"
    repack(source, tmp_path / "whole", target="rank-sliced", tp=2)
    repack(source, output, target="slabs", tp=1)
    older, expected, deaths = tree(output), tree(tmp_path / "whole"), 0
    run = partial(repack, source, output, target="rank-sliced", tp=2, threads=1)
    for number in kill.at_every_step(monkeypatch, lambda: run(restart=True)):
        deaths += 1
        if (output / "MANIFEST.json").exists():
            found = {name: digest for name, digest in tree(output).items() if not name.startswith(STATE_DIR)}
            assert found in (older, expected)
        if number % 7 == 0:
            run(restart=(output / "MANIFEST.json").exists())
            assert tree(output) == expected
            output.rename(tmp_path / f"done-{number}")
            repack(source, output, target="slabs", tp=1)
    assert deaths > 40
    assert tree(output) == expected


def test_sigterm_is_a_kill_too(tmp_path: Path) -> None:
    source = sample(tmp_path / "s", mode="uniform", tail_tp=2, layers=9, experts=8, split=True)
    process = subprocess.Popen([sys.executable, "-c", RUN, str(source), str(tmp_path / "o"), "0"], stdout=subprocess.DEVNULL)
    while not (tmp_path / "o").exists() and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    process.wait()
    repack(source, tmp_path / "o", target="rank-sliced", tp=4)
    repack(source, tmp_path / "whole", target="rank-sliced", tp=4)
    assert tree(tmp_path / "o") == tree(tmp_path / "whole")
