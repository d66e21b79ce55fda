"""The short form of `make soak`, and proof that the harness would see what it looks for."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from r7convert import whole_file
from r7convert.whole_file import FileRecord, WholeFile
from tests.faults import KINDS, Fault
from tests.hub_server import HubServer
from tests.soak import Soak
from tests.soak_stages import STAGES, Stage

CUTS = 24


def test_cuts_at_random(tmp_path: Path) -> None:
    """Some stages, some cuts, another seed each time; `make soak` has all of them."""
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "tests.soak", "--cuts", str(CUTS), "--stages", "5", "--json", str(report)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(report.read_text())
    assert sum(line["cuts"] for line in found["outcomes"]) == CUTS
    assert len({line["stage"] for line in found["outcomes"]}) == 5
    assert len({line["kind"] for line in found["outcomes"]}) > 10
    assert any("resumed" in line["outcome"] for line in found["outcomes"])
    assert all(sum(steps.values()) > 50 for steps in found["steps"].values())


# ---- the tap ----------------------------------------------------------------------------------------------------------


def in_child(root: Path, fault: str | None, work: str) -> subprocess.CompletedProcess[str]:
    """Python lines under a tap; what is printed last are its counts."""
    code = f"""
import json, os, sys
from pathlib import Path
from tests.faults import Fault, Tap
tap = Tap({str(root)!r}, {f"Fault.parse({fault!r})" if fault else None})
tap.install()
root = Path({str(root)!r})
try:
{chr(10).join("    " + line for line in work.strip().splitlines())}
except OSError as error:
    print(error.errno)
print(json.dumps([tap.counts, tap.struck]))
"""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


WORK = """
(root / "a").write_text("one")
with (root / "b").open("wb", buffering=0) as file:
    file.write(b"12345678")
    os.fsync(file.fileno())
os.replace(root / "b", root / "c")
(root / "c").read_bytes()
os.listdir(root)
(root / "d").mkdir()
(root / "a").unlink()
Path("/proc/self/stat").read_text()
"""


def test_every_call_under_the_root_is_counted_and_no_other(tmp_path: Path) -> None:
    ended = in_child(tmp_path, None, WORK)
    counts, struck = json.loads(ended.stdout)
    assert {step: counts[step] for step in ("create", "write", "fsync", "rename", "open", "list", "mkdir", "unlink")} == {
        "create": 2,
        "write": 2,
        "fsync": 1,
        "rename": 1,
        "open": 1,
        "list": 1,
        "mkdir": 1,
        "unlink": 1,
    }
    assert counts["read"] >= 1
    assert not struck


@pytest.mark.parametrize(
    ("fault", "number", "left"),
    [
        ("io:write:2", errno.EIO, {"a": b"one", "b": b""}),
        ("full:write:1", errno.ENOSPC, {"a": b""}),
        ("read-only:mkdir:1", errno.EROFS, {"a": b"one", "c": b"12345678"}),
        ("no-rename:rename:1", errno.EPERM, {"a": b"one", "b": b"12345678"}),
        ("no-fsync:fsync:1", errno.EINVAL, {"a": b"one", "b": b"12345678"}),
        ("denied:list:1", errno.EACCES, {"a": b"one", "c": b"12345678"}),
    ],
)
def test_an_error_strikes_at_its_step(tmp_path: Path, fault: str, number: int, left: dict[str, bytes]) -> None:
    ended = in_child(tmp_path, fault, WORK)
    said, told = ended.stdout.splitlines()
    assert int(said) == number
    assert json.loads(told)[1]
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == left


@pytest.mark.parametrize(
    ("fault", "left"),
    [
        ("kill:rename:1", {"a": b"one", "b": b"12345678"}),
        ("torn:write:2", {"a": b"one", "b": b"1234"}),
        ("power:fsync:1", {"a": b"o\0\0", "b": b"1234\0\0\0\0"}),
        ("power:rename:1", {"a": b"o\0\0", "b": b"12345678"}),
    ],
)
def test_a_kill_leaves_what_a_kill_leaves(tmp_path: Path, fault: str, left: dict[str, bytes]) -> None:
    assert in_child(tmp_path, fault, WORK).returncode == -signal.SIGKILL
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == left


# ---- the harness sees ---------------------------------------------------------------------------------------------------


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Soak]:
    with HubServer(tmp_path / "hub") as hub:
        yield Soak(tmp_path, hub)


def stage(name: str) -> Stage:
    return next(stage for stage in STAGES if stage.name == name)


def test_a_writer_without_partial_names_is_found(work: Soak, monkeypatch: pytest.MonkeyPatch) -> None:
    slabs = stage("repack slabs")
    work.prepare(slabs)
    assert work.cut(slabs, Fault("kill", "write", 9)) == "killed, resumed"
    monkeypatch.setattr(whole_file, "PARTIAL", "")
    with pytest.raises(AssertionError, match="stands under its final name and is not whole"):
        work.cut(slabs, Fault("torn", "write", 9))


def test_a_writer_that_does_not_sync_is_found(work: Soak, monkeypatch: pytest.MonkeyPatch) -> None:
    def close(self: WholeFile) -> FileRecord:
        self._flush()
        os.close(self._fd)
        self._partial.replace(self.path)
        self.record = FileRecord(self._size, self._digest.hexdigest())
        return self.record

    r7 = stage("repack r7")
    work.prepare(r7)
    assert work.cut(r7, Fault("power", "rename", 9)) == "killed, resumed"
    monkeypatch.setattr(WholeFile, "close", close)
    with pytest.raises(AssertionError, match="stands under its final name and is not whole"):
        work.cut(r7, Fault("power", "rename", 9))


def test_a_resume_that_makes_something_else_is_found(work: Soak) -> None:
    r7 = stage("repack r7")
    work.prepare(r7)
    work.worlds[r7.name].after.digests["out/LICENSE"] = "another"
    with pytest.raises(AssertionError, match=r"not what an uncut run leaves: \['out/LICENSE \(changed\)'\]"):
        work.cut(r7, Fault("kill", "rename", 5))


def test_an_error_without_an_exit_code_of_its_own_is_found(work: Soak, monkeypatch: pytest.MonkeyPatch) -> None:
    stamp = stage("stamp in place")
    work.prepare(stamp)
    assert work.cut(stamp, Fault("io", "write", 1)) == "exit 5, resumed"
    monkeypatch.setattr("r7convert.terminal._OUR_MISTAKES", (errno.EIO,))
    with pytest.raises(AssertionError, match=r"(?s)exit 1, expected 0 or 5 or 6: .*unexpected OSError"):
        work.cut(stamp, Fault("io", "write", 1))


def test_every_kind_strikes_at_some_step_of_some_stage(work: Soak) -> None:
    slabs = stage("repack slabs")
    work.prepare(slabs)
    assert set(KINDS) - set(work.kinds(slabs)) == {"dropped"}
    assert {"disk"} <= set(work.kinds(slabs))
