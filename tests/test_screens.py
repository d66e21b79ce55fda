"""Every command of the chain looked at on a terminal of 80 columns, and on a pipe."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from tests.test_docs import check_command

ROOT = Path(__file__).parents[1]
COLUMNS = 80
CHAIN = (
    "sample src --hidden 128 --intermediate 256 --experts 2 --layers 4 --dense 2",
    "inspect src",
    "stamp src --output stamped",
    "repack src slabs --target slabs --tp 2 --dry-run",
    "repack src slabs --target slabs --tp 2",
    "repack src exl3 --target exl3",
    "repack src lifted --target rank-sliced --tp 2 --mixed-k lift --device cpu",
    "encode-shared lifted --device cpu",
    "verify lifted",
    "verify lifted --source src --tp 2 --device cpu",
    "report lifted",
    "env",
)
FAIL = ("stamp src --check", "repack src no --target rank-sliced --tp 2", "verify lifted --tp 1", "report src")
SGR = re.compile(r"\x1b\[[0-9;]*m")


def variables() -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    return clean | {"TERM": "xterm-256color", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def lines_for(*commands: str, prefix: str = "", suffix: str = "") -> list[str]:
    return [sys.executable, "-m", "tests.screens", *(f"{prefix}r7convert {words}{suffix}" for words in commands)]


def on_terminal(folder: Path, *lines: str) -> str:
    """What a terminal of 80 columns receives, carriage returns included."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    child = subprocess.Popen(lines, stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder, env=variables())
    os.close(theirs)
    seen = b""
    while True:
        try:
            piece = os.read(ours, 1 << 16)
        except OSError:  # Linux's way to say that nobody holds the other end
            break
        if not piece:
            break
        seen += piece
    os.close(ours)
    assert child.wait() == 0
    return seen.decode()


def screens(text: str) -> dict[str, tuple[int, list[str]]]:
    """Command line -> exit code and the lines that stay on the screen."""
    found = {}
    for part in re.split(r"^\$ ", text.replace("\r\n", "\n"), flags=re.MULTILINE)[1:]:
        line, *shown, ended = part.rstrip("\n").split("\n")
        found[line] = (int(ended.removeprefix("= ")), [SGR.sub("", line.rpartition("\r")[2]) for line in shown])
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("screens")


@pytest.fixture(scope="module")
def terminal(folder: Path) -> str:
    return on_terminal(folder, *lines_for(*CHAIN, *FAIL))


def test_the_chain_fits_80_columns_and_ends_with_what_to_do_next(terminal: str) -> None:
    seen, looked = screens(terminal), 0
    assert len(seen) == len(CHAIN) + len(FAIL)
    for words in CHAIN:
        code, shown = seen[f"r7convert {words}"]
        assert code == 0, shown
        assert re.match(r"next: (r7convert |the same command|serve it)", shown[-1]), f"{words}: {shown[-1]}"
        for line in shown:
            assert len(line) <= COLUMNS, f"{words}: {line}"
            looked += 1
        for hint in (line for line in shown if line.startswith("next: r7convert ")):
            check_command(hint.removeprefix("next: r7convert ").partition("  #")[0])
    assert looked > 150
    for words in FAIL:
        code, shown = seen[f"r7convert {words}"]
        assert code in (3, 4)
        errors = [line for line in shown if line.startswith("error: ")]
        assert errors
        assert shown[-1].startswith("next: ") or any(line.endswith(".") for line in errors), f"{words}: {shown}"


def test_long_work_draws_layer_bytes_rate_and_time_left(terminal: str) -> None:
    drawn = re.findall(r"\r([^\r\n]*\S) *(?=[\r\n])", terminal)
    bar = r"encode-shared: +\d+% \S+ +[\d.]+[kM]?B of [\d.]+[kM]?B, [\d.]+[kM]?B/s, \d\d:\d\d left, layer \d"
    assert any(re.fullmatch(bar, line) for line in drawn), drawn
    assert max(map(len, drawn)) < COLUMNS


def test_colours_are_for_terminals_alone_and_for_those_who_want_them(terminal: str, folder: Path) -> None:
    errors = re.findall(r"^.*error:.*$", terminal, re.MULTILINE)
    assert len(errors) >= 4
    assert all(line.startswith("\x1b[31merror:\x1b[0m ") for line in errors)
    plain = on_terminal(folder, *lines_for("inspect src", *FAIL, prefix="NO_COLOR=1 "))
    assert "error: " in plain
    assert not SGR.search(plain)


def test_a_pipe_gets_whole_lines_and_the_switches_hold(folder: Path, terminal: str) -> None:
    assert terminal
    commands = (*CHAIN[1:2], *CHAIN[8:11], *FAIL)

    def piped(*lines: str) -> tuple[str, str]:
        done = subprocess.run(lines, capture_output=True, text=True, cwd=folder, env=variables(), check=True, timeout=120)
        return done.stdout, done.stderr

    out, talk = piped(*lines_for(*commands))
    assert not re.search(r"[\r\x1b]", out + talk)
    assert talk.count("next: ") >= len(CHAIN[8:11]) + 1
    assert not [line for line in out.splitlines() if len(line) > COLUMNS and not line.startswith("$ ")]
    quiet, talk = piped(*lines_for(*commands, suffix=" --quiet"))
    assert quiet.replace(" --quiet", "") == out, "a quiet run has the same results"
    assert {line.partition(":")[0] for line in talk.splitlines()} <= {"error", "next"}, "and of talk only what went wrong"
    assert talk.count("next: ") == 1  # of the error that does not say it itself
    as_json, _ = piped(*lines_for(*CHAIN[8:11], suffix=" --json"))
    made = [json.loads(part) for part in re.split(r"^\$ .*\n|^= 0\n", as_json, flags=re.MULTILINE) if part]
    assert [value["format"] for value in made] == ["r7convert-verdict-v1", "r7convert-verdict-v1", "r7convert-report-v1"]
