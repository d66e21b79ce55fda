from __future__ import annotations

import ast
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from r7convert import __version__
from r7convert.cli import app
from r7convert.cli_local import _rows
from r7convert.terminal import format_table

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "numpy", "numba", "huggingface_hub", "rich", "safetensors", "tqdm", "matplotlib")
COMMANDS = [command.name or command.callback.__name__.replace("_", "-") for command in app.registered_commands if command.callback]


def run(*words: object, code: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "r7convert", *map(str, words)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
        timeout=60,
    )
    assert done.returncode == code, done.stderr
    return done


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    spent = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert "Commands:" in run("--help").stdout
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    # Processor time, for the wall clock of a shared machine says nothing; it reads no more than a few files.
    assert min(spent) < 0.3, spent
    code = "import sys\ntry:\n    from r7convert.__main__ import main; main()\nfinally:\n    print(sorted(sys.modules))"
    for words in (["--help"], ["stamp", "--help"], ["--version"]):
        done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True, cwd=ROOT)
        modules = ast.literal_eval(done.stdout.splitlines()[-1])
        assert "r7convert.cli" in modules
        assert not set(HEAVY) & set(modules)


def test_every_command_has_the_three_switches_and_a_page() -> None:
    assert len(COMMANDS) >= 3
    listed = run("--help").stdout
    for name in COMMANDS:
        page = run(name, "--help").stdout
        assert f"\n  {name} " in listed
        for switch in ("--json", "-q, --quiet", "-v, --verbose"):
            assert switch in page, f"{name} has no {switch}"
        assert max(map(len, page.splitlines())) <= 80


def test_version_and_nothing_at_all() -> None:
    assert run("--version").stdout == f"r7convert {__version__}\n"
    assert "Commands:" in run(code=2).stderr + run(code=2).stdout


def test_completion_is_there() -> None:
    script = run("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1").stdout
    assert "_R7CONVERT_COMPLETE=complete_bash" in script
    words = run(_R7CONVERT_COMPLETE="complete_bash", COMP_WORDS="r7convert st", COMP_CWORD="1").stdout
    assert words.split() == ["stamp"]


def test_sample_stamp_and_stamp_again(tmp_path: Path) -> None:
    made = json.loads(run("sample", tmp_path / "s", "--json").stdout)
    assert made["files"] == len(list((tmp_path / "s").iterdir()))
    due = run("stamp", tmp_path / "s", "--check", "--json", code=3)
    assert json.loads(due.stdout)["due"]
    assert "a repair is due" in due.stderr
    first = run("stamp", tmp_path / "s", "--in-place").stdout
    assert "config.json: quantization_config.quant_method: 'modelopt' -> 'exl3'" in first
    assert "fields changed" in first
    assert run("stamp", tmp_path / "s", "--check").stdout == "stamp is right for target r7, nothing to change\n"
    assert run("stamp", tmp_path / "s", "--output", tmp_path / "links", "-q").stderr == ""
    assert (tmp_path / "links/config.json").exists()


def invoke(*words: object) -> tuple[str, str]:
    """Run a command in this process: quicker, where the process's own ways out are not what is tested."""
    done = CliRunner().invoke(app, [str(word) for word in words])
    if done.exception:
        raise done.exception
    return done.stdout, done.stderr


def test_repack_and_verify(tmp_path: Path) -> None:
    source, out = tmp_path / "s", tmp_path / "o"
    invoke("sample", source, "--mode", "uniform", "--tail-tp", 2)
    job = ("repack", source, out, "--target", "rank-sliced", "--tp", 2)
    assert json.loads(invoke(*job, "--dry-run", "--json")[0])["dry_run"]
    assert not out.exists()
    done, _ = invoke(*job, "-v")
    assert "target rank-sliced, tp 2, reader r28" in " ".join(done.split())
    assert "config.json: quantization_config.quant_method: 'modelopt' -> 'exl3'" in done
    assert "sealed by MANIFEST.json" in done
    assert "is complete already" in invoke(*job)[1]
    assert json.loads(invoke("verify", out, "--source", source, "--tp", 2, "--json")[0])["ok"]
    page = invoke("verify", out, "-v")[0].splitlines()
    assert page[-1] == f"{out}: ok for target rank-sliced"
    assert max(map(len, page[:-1])) <= 80
    wrong = run("verify", out, "--tp", 4, code=4)
    assert "NOT ok" in wrong.stdout
    assert "tp of this output: expected 4, got 2" in wrong.stderr


def test_encode_shared(tmp_path: Path) -> None:
    source, out = tmp_path / "s", tmp_path / "o"
    invoke("sample", source, "--hidden", 128, "--intermediate", 128, "--layers", 4, "--mtp", "none", "--experts", 2)
    invoke("repack", source, out, "--target", "slabs", "--tp", 1)
    job = ("encode-shared", out, "--device", "cpu")
    planned, _ = invoke(*job, "--dry-run")
    assert re.fullmatch(r"would encode 98.3 kB -> 38.4 kB on cpu, in about \d+ s; nothing was touched\n", planned)
    done, _ = invoke(*job)
    assert done.count("model.layers.3.mlp.shared_experts.") == 3
    assert "3 matrices at K6" in " ".join(done.split())
    assert "nothing to encode" in invoke(*job)[0]
    assert json.loads(invoke("verify", out, "--source", source, "--json")[0])["ok"]


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["encode-shared", ".", "--bits", "9"], 2, "error: --bits: K: expected 1 to 8, got 9"),
        (
            ["repack", ".", "o", "--target", "rank-sliced", "--layers", "9-3"],
            2,
            "error: --layers: range: expected A or A-B, ascending, got '9-3'",
        ),
        (["repack", ".", "o"], 2, "--target"),
        (["repack", ".", "o", "--target", "r7", "--threads", "-1"], 2, "'--threads'"),
        (["encode-shared", ".", "--min-snr", "nan"], 2, "error: --min-snr: limit: expected a finite number of decibels, got nan"),
        (["verify", "o", "--threads", "0"], 2, "'--threads'"),
        (
            ["repack", ".", "o", "--target", "slabs", "--budget", "3bpw"],
            2,
            "error: --budget: K policy: expected one for target rank-sliced",
        ),
        (["repack", ".", "o", "--target", "r7", "--mixed-k", "lift"], 2, "error: --mixed-k: K policy: expected one for target rank-sliced"),
        (["inspect", __file__], 3, "not a folder: expected the folder that holds config.json, got a file"),
        (["verify", "o"], 2, "error: o: output: expected a folder that r7convert wrote, got nothing"),
        (["stamp", "/nowhere", "--check"], 3, "error: /nowhere: no such folder."),
        (["stamp", "org/name", "--check"], 2, "error: org/name: a repository of the Hub: expected a folder"),
        (["stamp", "."], 2, "expected one of --output DIR, --in-place, --check"),
        (["stamp", ".", "--check", "--target", "r8"], 2, "r8"),
        (["sample", "x", "--mode", "wild"], 2, "error: sample: --mode: expected one of"),
        (["sample", "x", "--k-values", "3;4"], 2, "error: --k-values: list: expected integers"),
        (["sample", "x", "--tail-tp", "3"], 3, "expected one of [1, 2, 4], got 3"),
        (["nonsense"], 2, "nonsense"),
    ],
)
def test_errors_are_one_line_with_the_right_code(words: list[str], code: int, text: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "r7convert", *words],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == code
    assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_a_path_the_terminal_cannot_spell_is_no_error(tmp_path: Path) -> None:
    done = run("sample", tmp_path / "モデル", PYTHONIOENCODING="ascii")
    assert "\\u30e2" in done.stdout


def test_debug_shows_the_traceback() -> None:
    done = run("stamp", "/nowhere", "--check", code=3, R7_DEBUG="1")
    assert "Traceback" in done.stderr
    assert "error: /nowhere" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_ends_with_130_and_can_be_repeated(tmp_path: Path, number: int) -> None:
    size = ["--experts", "64", "--hidden", "1024", "--intermediate", "1024", "--layers", "12", "--dense", "0"]
    child = subprocess.Popen(
        [sys.executable, "-m", "r7convert", "sample", tmp_path / "s", *size],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    deadline = time.monotonic() + 30
    while not list(tmp_path.glob("s/*.json")) and time.monotonic() < deadline:
        time.sleep(0.01)
    child.send_signal(number)
    _, talk = child.communicate(timeout=30)
    assert child.returncode == 130
    assert talk == "interrupted: no file is left half-written, repeat the command to go on\n"
    assert not list(tmp_path.glob("s/*")), "the same command must find an empty folder"


def test_env_says_versions_and_no_private_paths() -> None:
    found: dict[str, Any] = json.loads(run("env", "--json", HF_HOME="/tmp/alice-secret", HF_TOKEN="hf_secret").stdout)
    assert found["r7convert"] == __version__
    assert found["packages"]["torch"]
    assert found["caches"]["huggingface"]["where"] == "set by HF_HOME"
    assert found["disk"]["here_free_bytes"] > 0
    assert "secret" not in json.dumps(found)
    assert str(Path.cwd()) not in json.dumps(found)
    human = format_table(("what", "value"), _rows("", found))
    assert max(map(len, human)) <= 80
    assert any(line.startswith("packages torch ") for line in human)
    assert any(line.endswith(" GB") for line in human)


def test_nothing_imports_click() -> None:
    looked = 0
    for path in [*ROOT.glob("r7convert/*.py"), *ROOT.glob("tests/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = (
                [a.name for a in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            assert not [name for name in names if name.split(".")[0] == "click"], path
            looked += len(names)
    assert looked > 100
