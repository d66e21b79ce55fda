"""The corpus: one small document a finding, or a way in that must stay shut. corpus.json says through which door each goes, which
error it must end in, what that error must say, and what it did when it was found ("" where it never did any harm).
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from r7convert.errors import FormatError, ResourceError
from r7convert.journal import locked
from r7convert.store import STATE_DIR, check_plain_name, encode_json, find_twins, is_plain_name, read_header, read_json
from r7convert.verify import verify
from tests.folders import raw_shard
from tests.hostile import DOORS, EXAMPLES, Workshop, ask_checkpoint, bounded, check_command, header_of, with_header

FOLDER = Path(__file__).parent / "data" / "hostile"
CORPUS = json.loads((FOLDER / "corpus.json").read_text())


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("corpus"))


def document(workshop: Workshop, file: str) -> bytes:
    """A header of the corpus goes before the data of the good file."""
    door, raw = DOORS[CORPUS[file]["door"]], (FOLDER / file).read_bytes()
    return with_header(raw, header_of(workshop.raw(door))[1]) if door.form == "header" else raw


@pytest.mark.parametrize("file", list(CORPUS))
@pytest.mark.usefixtures("no_fsync", "without_numbers")
def test_what_was_found_stays_found(workshop: Workshop, file: str) -> None:
    entry = CORPUS[file]
    asked = workshop.send(DOORS[entry["door"]], document(workshop, file))
    assert asked.outcome == entry["error"]
    assert any(entry["says"] in str(error) for error in asked.errors) or entry["error"] == "sound", asked.errors


@pytest.mark.parametrize("file", [file for file, entry in CORPUS.items() if DOORS[entry["door"]].ask is ask_checkpoint])
def test_on_the_command_line(workshop: Workshop, file: str) -> None:
    """Exit code 3, one printable line an offender, nothing written."""
    door = DOORS[CORPUS[file]["door"]]
    folder, out = workshop.work / door.folder, workshop.work / "out"
    (folder / door.file).write_bytes(document(workshop, file))
    check_command(("inspect", str(folder)), {3})
    check_command(("repack", str(folder), str(out), "--target", "exl3", "--dry-run"), {3})
    assert not out.exists()
    (folder / door.file).write_bytes(workshop.raw(door))


def test_the_corpus_is_whole() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {*CORPUS, "corpus.json"}
    assert len(CORPUS) >= 60
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 500_000
    assert sum(bool(entry["was"]) for entry in CORPUS.values()) >= 30
    assert {entry["door"] for entry in CORPUS.values()} <= set(DOORS)


# ---- names ------------------------------------------------------------------------------------------------------------

WAYS_OUT = ("..", "../x", "/x", "C:\\x", "C:x", "\\\\host\\x", "a\\b", "a/b", "a\0b", "x.", "x ", "con", "NUL.json", "com1.safetensors")
WAYS_OUT += ("\ud800", "\udcff", "x" * 256, "\x1b[2J", "x\n", "\x85", ".hidden", "")


@pytest.mark.parametrize("name", WAYS_OUT)
def test_ways_out_of_a_folder(name: str) -> None:
    assert not is_plain_name(name)


def test_names_that_stay_inside() -> None:
    for name in ("console.json", "a.b.c", "model-00001-of-00002.safetensors", "模型.json", "com10.json", "x" * 255):
        assert check_plain_name(name, "x") == name


def test_twins() -> None:
    assert find_twins(["A.json", "a.json", "b"]) == ["A.json", "a.json"]
    assert find_twins(["\u00e9", "e\u0301"]) == ["e\u0301", "\u00e9"]
    assert find_twins(["a", "b"]) == []


# ---- what is no file --------------------------------------------------------------------------------------------------


def spoil(path: Path, kind: str) -> None:
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "endless device":
        path.symlink_to("/dev/zero")
    elif kind == "terminal":
        path.symlink_to("/dev/tty")
    elif kind == "dangling":
        path.symlink_to("nowhere")


KINDS = ("pipe", "folder", "loop", "endless device", "terminal", "dangling")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["config.json", "quantization_config.json", "model.safetensors.index.json", "model-carrier.safetensors"])
def test_what_stands_there_is_no_file(tmp_path: Path, workshop: Workshop, name: str, kind: str) -> None:
    folder = workshop.work / "source"
    spoil(folder / name, kind)
    with bounded(5):
        code = check_command(("inspect", str(folder)), {0, 3})
        check_command(("stamp", str(folder), "--check"), {3})
    assert code == (0 if name == "quantization_config.json" and kind not in ("loop", "dangling") else 3)
    workshop.fresh()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["MANIFEST.json", "config.json", "slabs.json", "model-carrier.safetensors"])
def test_a_judge_meets_what_is_no_file(workshop: Workshop, name: str, kind: str) -> None:
    folder = workshop.work / "sliced"
    spoil(folder / name, kind)
    with bounded(10):
        assert not verify(folder, threads=1).ok
    workshop.fresh()


@pytest.mark.parametrize("what", ["link", "file"])
def test_a_state_folder_that_is_none(tmp_path: Path, what: str) -> None:
    """A link there would have locks, journals and staged files written somewhere else."""
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "out"
    elsewhere.mkdir()
    folder.mkdir()
    if what == "link":
        (folder / STATE_DIR).symlink_to(elsewhere)
    else:
        (folder / STATE_DIR).write_text("")
    with pytest.raises(ResourceError, match="cannot write here"), locked(folder):
        raise AssertionError
    assert not list(elsewhere.iterdir())


# ---- bounded memory and time ------------------------------------------------------------------------------------------

READ = """
import resource, sys, time
from pathlib import Path
from r7convert.errors import FormatError
from r7convert.store import read_header, read_json
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[3]) << 20,) * 2)
read, began = {"header": read_header, "json": read_json}[sys.argv[1]], time.perf_counter()
try:
    outcome = f"{len(read(Path(sys.argv[2])).tensors):,} tensors"
except FormatError as error:
    outcome = str(error)
print(f"{time.perf_counter() - began:.1f}")
print(int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) // 1024)
print(outcome)
"""


def many_tensors(path: Path) -> None:
    entries = ",".join(f'"t{n}":{{"dtype":"F16","shape":[0],"data_offsets":[0,0]}}' for n in range(TENSORS))
    raw_shard(path, f"{{{entries}}}".encode(), b"")


def header_of_99_million(text: bytes) -> Callable[[Path], None]:
    return lambda path: raw_shard(path, b'{"a":' + text * (99_000_000 // len(text)), b"")


def json_of_300_million(text: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_bytes(b"[" + text * (300_000_000 // len(text)))

    return write


# `make fuzz` reads the million; a tenth of it is enough to see that memory and time are in proportion.
TENSORS = 1_000_000 if EXAMPLES else 100_000

LARGE: dict[str, tuple[str, Callable[[Path], None], int, float, str]] = {
    # what: (reader, writer, MiB of address space, seconds, what it says)
    "a header of many tensors": ("header", many_tensors, 300 + TENSORS // 600, 60, f"{TENSORS:,} tensors"),
    "99 MB of brackets": ("header", header_of_99_million(b"["), 800, 20, "objects and lists"),
    "99 MB of objects": ("header", header_of_99_million(b'{"a":'), 800, 20, "objects and lists"),
    "99 MB of small numbers": ("header", header_of_99_million(b"0,"), 800, 20, "JSON values"),
    "one name of 99 MB": ("header", header_of_99_million(b"x" * 99_000), 1200, 20, "not valid JSON"),
    "300 MB of empty lists": ("json", json_of_300_million(b"[],"), 1400, 20, "at most"),
    "300 MB of short strings": ("json", json_of_300_million(b'"ab",'), 1400, 20, "JSON values"),
}


@pytest.mark.parametrize("what", list(LARGE))
def test_crafted_to_fill_memory(tmp_path: Path, what: str) -> None:
    """Each in a process of its own with so much address space and no more: one that needs more dies and fails."""
    reader, write, most_mib, most_s, says = LARGE[what]
    write(tmp_path / "x")
    done = subprocess.run(
        [sys.executable, "-c", READ, reader, str(tmp_path / "x"), str(most_mib)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-500:]
    seconds, mib, outcome = done.stdout.split("\n", 2)
    print(f"{what}: {seconds} s, {mib} MiB: {outcome.strip()[-100:]}")
    assert says in outcome
    assert float(seconds) < most_s
    (tmp_path / "x").unlink()


def test_a_header_length_beyond_the_file_reads_nothing(tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for length in ((1 << 63) - 1, 1 << 63, (1 << 64) - 1, 100_000_001, 90_000_000):
        (tmp_path / "x").write_bytes(length.to_bytes(8, "little") + b"{}")
        with pytest.raises(FormatError, match=r"header length|truncated"):
            read_header(tmp_path / "x")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000


def test_an_index_of_missing_files_is_not_counted_anew_for_each(workshop: Workshop) -> None:
    """100,000 entries that each name another missing file: it was 10^10 comparisons."""
    folder = workshop.work / "source"
    weight_map = {f"t{n}": f"x{n}.safetensors" for n in range(100_000)}
    (folder / "model.safetensors.index.json").write_bytes(encode_json({"metadata": {}, "weight_map": weight_map}, compact=True))
    with bounded(15):
        check_command(("inspect", str(folder)), {3})
    workshop.fresh()


def test_deep_json_is_refused_before_anything_walks_it(tmp_path: Path) -> None:
    for depth, sound in ((99, True), (101, False), (900, False)):
        (tmp_path / "x").write_text('{"a":' * depth + "1" + "}" * depth)
        if sound:
            assert read_json(tmp_path / "x")
        else:
            with pytest.raises(FormatError, match="depth"):
                read_json(tmp_path / "x")
