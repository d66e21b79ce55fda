"""Two processes that share a run over gloo: the bytes of one, a dead rank said and survived, and ranks that share nothing twice."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from r7convert.encode_shared import encode_shared
from r7convert.journal import MANIFEST, read_journal, read_manifest
from r7convert.repack import repack
from r7convert.store import hash_file
from r7convert.team import Team
from r7convert.verify import verify
from tests.folders import sample

SMALL = {"hidden": 128, "intermediate": 256, "experts": 2, "layers": 6, "tail_tp": 2, "split": True}


def torchrun(*words: object) -> subprocess.CompletedProcess[str]:
    """Two ranks on this machine."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *map(str, words)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd=Path(__file__).parents[1], start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=120)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)  # the ranks too
        raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file() and path.name != "VERDICT.json"}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process: a sample, its lift, and that with encoded shared experts."""
    root = tmp_path_factory.mktemp("alone")
    source = sample(root / "source", **SMALL)
    repack(source, root / "lifted", target="rank-sliced", tp=2, mixed_k="lift", device="cpu")
    shutil.copytree(root / "lifted", root / "encoded")
    encode_shared(root / "encoded", device="cpu")
    return root


def test_two_ranks_write_what_one_would(alone: Path, tmp_path: Path) -> None:
    lift = ("--target", "rank-sliced", "--tp", 2, "--mixed-k", "lift", "--device", "cpu")
    ran = torchrun("-m", "r7convert", "repack", alone / "source", tmp_path / "o", *lift)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("sealed by MANIFEST.json") == 1
    assert files(tmp_path / "o") == files(alone / "lifted")
    assert {path.name for path in (tmp_path / "o").iterdir()} == {path.name for path in (alone / "lifted").iterdir()}


def test_a_dead_rank_ends_the_run_and_a_repeat_completes_it(alone: Path, tmp_path: Path) -> None:
    out = tmp_path / "o"
    shutil.copytree(alone / "lifted", out)
    dying = Path(__file__).parent / "dying_rank.py"
    ran = torchrun(dying, "encode-shared", out, "--device", "cpu")
    assert ran.returncode != 0
    assert "rank 0: " in ran.stderr
    assert "another rank ended" in ran.stderr
    assert "Repeat the command: what is finished is kept." in ran.stderr
    # The folder is the one it was, sealed, and what the ranks had finished is staged.
    assert all(hash_file(out / name) == record for name, record in read_manifest(out).files.items())
    staged = [name for name in read_journal(out / ".r7convert" / "staged")[1] if name.startswith("shared-experts-")]
    assert 0 < len(staged) < 4
    stamps = {name: (out / ".r7convert" / "staged" / name).stat().st_mtime_ns for name in staged}

    ran = torchrun("-m", "r7convert", "encode-shared", out, "--device", "cpu")
    assert ran.returncode == 0, ran.stderr
    assert files(out) == files(alone / "encoded")
    assert stamps == {name: (out / name).stat().st_mtime_ns for name in staged}
    assert not (out / ".r7convert").exists()


def test_two_ranks_judge_what_one_would(alone: Path, tmp_path: Path) -> None:
    shutil.copytree(alone / "encoded", tmp_path / "o")
    ran = torchrun("-m", "r7convert", "verify", tmp_path / "o", "--source", alone / "source", "--tp", 2)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count(": ok for target") == 1
    assert verify(alone / "encoded", source=alone / "source", tp=2).ok
    assert (tmp_path / "o" / "VERDICT.json").read_bytes() == (alone / "encoded" / "VERDICT.json").read_bytes()
    (tmp_path / "o" / MANIFEST).write_bytes((tmp_path / "o" / MANIFEST).read_bytes().replace(b'"tp": 2', b'"tp": 1'))
    assert torchrun("-m", "r7convert", "verify", tmp_path / "o", "--source", alone / "source").returncode != 0


def test_every_item_has_one_rank() -> None:
    for size in (1, 2, 3, 8):
        shares = [Team(rank, size).share(range(7)) for rank in range(size)]
        assert sorted(item for share in shares for item in share) == list(range(7))
