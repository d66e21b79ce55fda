"""`make release-check`: is what stands in dist/ fit to be uploaded? Nothing is uploaded here.

    python -m tests.release_check dist build/release [--torch SPEC]

The wheel is installed with all it depends on into a fresh environment, and converts a sample away from the checkout.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

from r7convert import __version__

ROOT = Path(__file__).parents[1]
CHAIN = (
    "--version",
    "sample source --mode uniform --tail-tp 2",
    "repack source stock --target rank-sliced --tp 4",
    "verify stock --source source --tp 4 --device cpu",
    "report stock",
)


def main() -> int:
    words = argparse.ArgumentParser()
    words.add_argument("dist", type=Path)
    words.add_argument("work", type=Path)
    words.add_argument("--torch", default="torch")
    asked = words.parse_args()
    head, state = changelog_head((ROOT / "CHANGELOG.md").read_text())
    problems = [f"CHANGELOG.md begins with {head}, the package is {__version__}"] if head != __version__ else []
    sdist, wheel = asked.dist / f"r7convert-{__version__}.tar.gz", asked.dist / f"r7convert-{__version__}-py3-none-any.whl"
    problems += [f"{path} is missing" for path in (sdist, wheel) if not path.exists()]
    problems = problems or archive_problems(sdist, wheel)
    if problems:
        print(*problems, sep="\n", file=sys.stderr)
        return 1
    try_wheel(wheel.resolve(), asked.work.resolve(), asked.torch)
    print(f"{sdist.name} and {wheel.name} are sound")
    print(f"next: {'date the head of CHANGELOG.md, then ' if state == 'unreleased' else ''}git tag v{__version__}; see docs/release.md")
    return 0


def changelog_head(text: str) -> tuple[str, str]:
    """The newest version, and its date or "unreleased"."""
    newest = re.search(r"^## (\S+) \((unreleased|\d{4}-\d\d-\d\d)\)$", text, re.MULTILINE)
    if newest is None:
        raise SystemExit("CHANGELOG.md: no head like `## 1.2.3 (2026-12-01)`")
    return newest[1], newest[2]


def archive_problems(sdist: Path, wheel: Path) -> list[str]:
    """What an archive lacks, or has of this machine."""
    with zipfile.ZipFile(wheel) as opened:
        names = set(opened.namelist())
    problems = [f"{wheel.name} lacks {name}" for name in ("r7convert/py.typed", "r7convert/_data/kernels/search.cu") if name not in names]
    with tarfile.open(sdist) as packed:
        inside = {name.partition("/")[2] for name in packed.getnames()}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    left_out = (".ci/", ".github/", ".gitignore")
    problems += [f"{sdist.name} lacks {name}" for name in tracked if name not in inside and not name.startswith(left_out)]
    return problems + [f"{sdist.name} has {name}, which git does not know" for name in sorted(inside - set(tracked)) if is_stray(name)]


def is_stray(name: str) -> bool:
    return Path(name).suffix in (".py", ".md", ".cu", ".cuh", ".toml", ".json", ".svg")


def try_wheel(wheel: Path, work: Path, torch: str) -> None:
    work.mkdir(parents=True, exist_ok=True)
    venv.create(work / "venv", with_pip=True, clear=True)
    subprocess.run([work / "venv/bin/python", "-m", "pip", "install", "-q", "--disable-pip-version-check", torch, wheel], check=True)
    folder = work / "run"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for line in CHAIN:
        print(f"$ r7convert {line}", flush=True)
        subprocess.run([work / "venv/bin/r7convert", *line.split()], check=True, cwd=folder, env=clean)


if __name__ == "__main__":
    sys.exit(main())
