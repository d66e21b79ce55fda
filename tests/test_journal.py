"""journal: runs that resume, and a change of a sealed folder that a kill leaves old or lets the next command finish."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from r7convert.errors import FormatError, ResourceError, UsageError
from r7convert.journal import (
    MANIFEST,
    VERDICT,
    Journal,
    Manifest,
    commit_change,
    locked,
    read_journal,
    read_manifest,
    staging,
    write_manifest,
)
from r7convert.store import STATE_DIR, FileRecord, hash_file, write_bytes
from tests.kill import at_every_step

OLD = {"config.json": b"old config", "experts": b"the same in both", "bf16": b"goes"}
NEW = {"config.json": b"new config!", "experts": b"the same in both", "k6": b"comes"}


def write_old(folder: Path) -> None:
    folder.mkdir()
    write_manifest(folder, Manifest("test", {name: write_bytes(folder / name, data) for name, data in OLD.items()}))
    (folder / VERDICT).write_text("{}")
    (folder / "notes of a user").write_text("not ours")


def change(folder: Path) -> None:
    with locked(folder):
        staged = staging(folder)
        files = dict(read_manifest(folder).files)
        if "bf16" in files:
            del files["bf16"]
            for name in ("config.json", "k6"):
                files[name] = write_bytes(staged / name, NEW[name])
            commit_change(folder, Manifest("test", files))


def content(folder: Path) -> dict[str, bytes]:
    """The files the seal names, proven against it."""
    files = read_manifest(folder).files
    assert all(hash_file(folder / name) == record for name, record in files.items())
    return {name: (folder / name).read_bytes() for name in files}


def test_a_change_comes_whole(tmp_path: Path) -> None:
    write_old(tmp_path / "f")
    change(tmp_path / "f")
    assert content(tmp_path / "f") == NEW
    assert {path.name for path in (tmp_path / "f").iterdir()} == {*NEW, MANIFEST, "notes of a user"}


def test_a_kill_at_any_step_leaves_the_old_or_lets_the_next_lock_finish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, outcomes = tmp_path / "f", []
    write_old(folder)
    for _ in at_every_step(monkeypatch, lambda: change(folder)):
        if (folder / MANIFEST).exists():
            found = content(folder)
            assert found in (OLD, NEW)
            outcomes.append("old" if found == OLD else "new")
        else:
            outcomes.append("unsealed")
        with locked(folder):
            pass
        finished = content(folder)
        assert finished == (OLD if outcomes[-1] == "old" and not (folder / "k6").exists() else NEW)
        assert not (folder / VERDICT).exists() or finished == OLD
        change(folder)
        assert content(folder) == NEW
        assert not (folder / "bf16").exists()
        shutil.rmtree(folder)
        write_old(folder)
    assert outcomes == sorted(outcomes, key=["old", "unsealed", "new"].index), "the old, then none, then the new"
    assert set(outcomes) == {"old", "unsealed", "new"}
    assert len(outcomes) > 20


def test_a_staged_change_survives_other_commands(tmp_path: Path) -> None:
    write_old(tmp_path / "f")
    with locked(tmp_path / "f"):
        write_bytes(staging(tmp_path / "f") / "k6", b"half done")
    with locked(tmp_path / "f"):
        pass
    assert content(tmp_path / "f") == OLD
    with locked(tmp_path / "f"):
        assert (staging(tmp_path / "f") / "k6").exists()
        assert not (staging(tmp_path / "f", restart=True) / "k6").exists()


def test_a_seal_over_nothing_is_refused(tmp_path: Path) -> None:
    write_old(tmp_path / "f")
    with locked(tmp_path / "f"):
        staging(tmp_path / "f")
        with pytest.raises(FormatError, match="k6: size of a file to seal: expected 5, got no file"):
            commit_change(tmp_path / "f", Manifest("test", {"k6": FileRecord(5, "0" * 64)}))
    assert content(tmp_path / "f") == OLD


def test_ranks_journal_apart_and_read_together(tmp_path: Path) -> None:
    (tmp_path / STATE_DIR).mkdir()
    for rank in (0, 1):
        Journal(tmp_path, {"target": "r7"}, rank=rank).record(f"file-{rank}", FileRecord(rank, "0" * 64))
    with (tmp_path / STATE_DIR / "journal-1.jsonl").open("ab") as file:
        file.write(b'{"file": "torn')
    again = Journal(tmp_path, {"target": "r7"}, rank=1)
    assert set(again.done) == {"file-0", "file-1"}
    assert set(read_journal(tmp_path)[1]) == {"file-0", "file-1"}
    with pytest.raises(UsageError, match="unfinished run with another target"):
        Journal(tmp_path, {"target": "exl3"})
    again.close()
    assert read_journal(tmp_path) == (None, {})


def test_an_output_that_is_a_link_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with (
        pytest.raises(ResourceError, match="link: cannot write here: expected a writable folder, got a link to nothing"),
        locked(tmp_path / "link"),
    ):
        pass
    assert not (tmp_path / "gone").exists()


def test_a_lock_under_which_nothing_was_begun_leaves_no_trace(tmp_path: Path) -> None:
    for folder, stays in ((tmp_path / "new", False), (tmp_path, True)):
        with pytest.raises(FormatError), locked(folder):
            raise FormatError(str((folder / STATE_DIR / "lock").stat()))
        assert folder.exists() == stays
        assert not (folder / STATE_DIR).exists()
    with locked(tmp_path):
        Journal(tmp_path, {"a": 1})
    assert (tmp_path / STATE_DIR / "journal.jsonl").exists()
