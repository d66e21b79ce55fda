from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_demo_runs_and_every_folder_it_leaves_was_judged_ok(tmp_path: Path) -> None:
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "tests.demo", str(tmp_path / "demo")],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ},
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began < 120
    for target in ("slabs", "exl3", "rank-sliced"):
        assert f"ok for target {target}\n" in done.stdout
    assert done.stdout.count("$ r7convert verify") == done.stdout.count(": ok for target") == 4
    assert {path.parent.name for path in tmp_path.glob("demo/*/VERDICT.json")} == {"slabs", "exl3", "stock"}
    assert "9 matrices at K6" in done.stdout
    assert "opened in" in done.stdout
