from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from r7convert.errors import FormatError, ResourceError, UnsupportedError, UsageError
from r7convert.journal import locked
from r7convert.restamp import restamp
from r7convert.sample import write_sample
from r7convert.store import read_json, write_bytes, write_json

STAMP_FILES = ("config.json", "quantization_config.json", "hf_quant_config.json")


def contents(folder: Path) -> dict[str, bytes]:
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file() and p.suffix != ".safetensors"
    }


def weights(folder: Path) -> dict[str, tuple[int, int, int]]:
    found = {p.name: (p.stat().st_ino, p.stat().st_mtime_ns, p.stat().st_size) for p in folder.glob("*.safetensors")}
    assert len(found) == 3
    return found


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_sample(tmp_path / "src", hf_quant_config=True)
    return tmp_path / "src"


def test_without_a_place_it_only_looks(source: Path) -> None:
    before = contents(source)
    report = restamp(source)
    assert report.due
    assert report.target == "r7"
    assert report.written == ()
    assert contents(source) == before


def test_in_place_changes_the_json_alone_and_keeps_the_originals(source: Path) -> None:
    before, kept = contents(source), weights(source)
    report = restamp(source, in_place=True)
    assert report.written == STAMP_FILES
    assert weights(source) == kept
    after = contents(source)
    for name in STAMP_FILES:
        assert after[f".r7convert/before-stamp/{name}"] == before[name]
    assert "hf_quant_config.json" not in after
    config = read_json(source / "config.json")
    assert config["quantization_config"] == read_json(source / "quantization_config.json")
    assert config["quantization_config"]["quant_method"] == "exl3"
    untouched = set(before) - set(STAMP_FILES)
    assert len(untouched) > 5
    assert {name: after[name] for name in untouched} == {name: before[name] for name in untouched}


def test_a_second_run_touches_nothing_and_a_second_repair_keeps_both_backups(source: Path) -> None:
    restamp(source, in_place=True)
    before = {path: path.stat() for path in source.iterdir()}
    again = restamp(source, in_place=True)
    assert not again.due
    assert again.written == ()
    assert {path: path.stat() for path in source.iterdir()} == before
    write_json(source / "hf_quant_config.json", {"producer": {"name": "modelopt"}})
    assert restamp(source, in_place=True).written == ("config.json", "hf_quant_config.json")
    assert (source / ".r7convert/before-stamp-2/hf_quant_config.json").exists()
    assert (source / ".r7convert/before-stamp/quantization_config.json").exists()


def test_output_is_a_whole_folder_of_links(source: Path, tmp_path: Path) -> None:
    before, kept = contents(source), weights(source)
    out = tmp_path / "deep" / "out"
    report = restamp(source, output=out)
    assert report.folder == str(out)
    assert contents(source) == before
    assert weights(source) == weights(out) == kept
    assert set(contents(out)) == set(before) - {"hf_quant_config.json"}
    assert (out / "README.md").stat().st_ino != (source / "README.md").stat().st_ino
    assert not restamp(out).due
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    other = restamp(source, output=tmp_path / "twin")
    assert other.due
    assert contents(tmp_path / "twin") == contents(out)


def run_until(event: int, job: Any) -> bool:
    """Run the job in a child that dies, as by SIGKILL, before its n-th change of the file system. True if it died."""
    pid = os.fork()
    if pid == 0:
        seen = 0

        def hook(name: str, _: Any) -> None:
            nonlocal seen
            if name in ("os.rename", "os.remove", "os.mkdir", "os.link", "os.rmdir", "shutil.rmtree"):
                seen += 1
                if seen > event:
                    os._exit(9)

        sys.addaudithook(hook)
        try:
            job()
        except BaseException:
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, 9)
    return code == 9


def test_killed_in_place_at_every_step_and_run_again(tmp_path: Path) -> None:
    write_sample(tmp_path / "clean", hf_quant_config=True, layers=4, experts=2)
    original = contents(tmp_path / "clean")
    restamp(tmp_path / "clean", in_place=True)
    expected = contents(tmp_path / "clean")
    steps = 0
    while True:
        source = tmp_path / str(steps)
        write_sample(source, hf_quant_config=True, layers=4, experts=2)
        died = run_until(steps, lambda source=source: restamp(source, in_place=True))
        for name in STAMP_FILES:  # never a torn file
            if (source / name).exists():
                assert (source / name).read_bytes() in (original[name], expected.get(name))
        if not died:
            break
        whole = all(contents(source).get(name) == expected.get(name) for name in STAMP_FILES)
        assert restamp(source).due != whole, "a half-applied stamp is reported as due"
        restamp(source, in_place=True)
        found = {name: data for name, data in contents(source).items() if not name.endswith(".partial")}
        assert found == expected
        steps += 1
    assert steps >= 8


def test_killed_output_at_every_step_and_run_again(tmp_path: Path) -> None:
    write_sample(tmp_path / "src", layers=4, experts=2)
    restamp(tmp_path / "src", output=tmp_path / "clean")
    expected = contents(tmp_path / "clean")
    steps = 0
    while True:
        out = tmp_path / f"out{steps}"
        if not run_until(steps, lambda out=out: restamp(tmp_path / "src", output=out)):
            break
        assert not out.exists() or contents(out) == expected or not contents(out)
        if not (out / "config.json").exists():
            restamp(tmp_path / "src", output=out)
        assert contents(out) == expected
        assert not (tmp_path / f".out{steps}.stamping").exists()
        steps += 1
    assert steps >= 6


def test_folders_it_will_not_write_to(source: Path, tmp_path: Path) -> None:
    before = contents(source)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine").write_text("mine")
    (tmp_path / "link").symlink_to(source)
    for output, words in (
        (source, "may not contain each other"),
        (source / "in", "may not contain each other"),
        (tmp_path, "may not contain each other"),
        (tmp_path / "link", "may not contain each other"),
        (tmp_path / "full", "new or empty"),
    ):
        with pytest.raises(UsageError, match=words):
            restamp(source, output=output)
    with pytest.raises(UsageError, match="two places"):
        restamp(source, output=tmp_path / "x", in_place=True)
    with locked(tmp_path / ".new.stamping"), pytest.raises(ResourceError, match="in use"):
        restamp(source, output=tmp_path / "new")
    with locked(source), pytest.raises(ResourceError, match="in use"):
        restamp(source, in_place=True)
    assert {name: data for name, data in contents(source).items() if not name.startswith(".r7convert")} == before


def test_a_sealed_folder_and_the_hubs_cache_are_not_stamped_in_place(source: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "hub/models--a--b/snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    for path in source.iterdir():
        (snapshot / path.name).symlink_to(path)
    with pytest.raises(UsageError, match=r"Hub's cache.*--output"):
        restamp(snapshot, in_place=True)
    restamp(snapshot, output=tmp_path / "out")
    assert weights(tmp_path / "out") == weights(source)
    write_json(source / "MANIFEST.json", {})
    with pytest.raises(UsageError, match=r"sealed by MANIFEST.json"):
        restamp(source, in_place=True)


def test_no_links_no_copies(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(ResourceError, match=r"cross-device.*same disk"):
        restamp(source, output=tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


@pytest.mark.parametrize("name", ["quantization_config.json", "model-carrier.safetensors"])
def test_a_pointer_stub_is_named(source: Path, name: str) -> None:
    write_bytes(source / name, b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 1\n")
    with pytest.raises(FormatError, match=f"{name}: this is a pointer"):
        restamp(source, in_place=True)
    assert not (source / ".r7convert").exists()


@pytest.mark.parametrize("target", ["rank-sliced", "slabs", "exl3"])
def test_a_stamp_cannot_change_what_the_tensors_are(source: Path, target: str) -> None:
    with pytest.raises(UnsupportedError, match=f"expected r7, as the tensors are laid out, got {target}. .*--target {target}"):
        restamp(source, target=target)
    with pytest.raises(UsageError, match="unknown target"):
        restamp(source, target="r8")


def test_the_target_follows_from_the_names(tmp_path: Path) -> None:
    write_sample(tmp_path / "s", mtp="tail")
    config = read_json(tmp_path / "s/config.json")
    # Only the tail's rank-sliced tensors are left, as after a slicer that forgot the stamp: a stock checkpoint.
    index = read_json(tmp_path / "s/model.safetensors.index.json")
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if not file.startswith("r7-")}
    write_json(tmp_path / "s/model.safetensors.index.json", index)
    report = restamp(tmp_path / "s", in_place=True)
    assert report.target == "rank-sliced"
    assert "r7_routed_experts" not in read_json(tmp_path / "s/quantization_config.json")
    # JSON alone, no index: the blocks decide.
    (tmp_path / "json").mkdir()
    write_json(tmp_path / "json/config.json", config)
    assert restamp(tmp_path / "json").target == "r7"
    for key in ("quantization_config", "hybrid_tr3_tail"):
        del config[key]
    write_json(tmp_path / "json/config.json", config)
    with pytest.raises(UnsupportedError, match="no sign of EXL3"):
        restamp(tmp_path / "json")


@pytest.mark.parametrize("call", ["rename", "rmdir"])
def test_an_output_that_another_process_makes_meanwhile_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    write_sample(tmp_path / "s", hidden=128, intermediate=128)
    output, real = tmp_path / "o", getattr(Path, call)
    if call == "rmdir":
        output.mkdir()

    def late(self: Path, *args: Path) -> Any:
        if self.name.endswith(".stamping") or self == output:
            (output / "theirs").mkdir(parents=True)
        return real(self, *args)

    monkeypatch.setattr(Path, call, late)
    with pytest.raises(ResourceError, match="made by another process meanwhile"):
        restamp(tmp_path / "s", output=output)
    assert [path.name for path in output.iterdir()] == ["theirs"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["o", "s"]
