"""The Hub's commands as processes: huggingface_hub's variables, exit codes, kills, and nothing private in what is printed."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from r7convert.address import RECEIPT
from r7convert.cli_hub import _convert_lines
from r7convert.convert import Converted
from r7convert.push import LOOKS_WHOLE
from r7convert.sample import write_sample
from tests.hub_server import TOKEN, Fault, HubServer
from tests.sealed import seal

PRIVATE = re.compile(rf"{TOKEN}|\\b{re.escape(socket.gethostname())}\\b")
ROOT = Path(__file__).parents[1]
REPO = "org/glm"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, sealed and judged."""
    made = tmp_path_factory.mktemp("cli_hub") / "src"
    write_sample(made, hf_quant_config=True)
    seal(made)
    return made


@pytest.fixture
def server(tmp_path: Path) -> Iterator[HubServer]:
    """A Hub for processes: this one's huggingface_hub is left alone."""
    with HubServer(tmp_path / "hub") as running:
        yield running
    assert not running.errors, running.errors


def start(server: HubServer, tmp_path: Path, *words: object, **variables: str) -> subprocess.Popen[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    home = tmp_path / "home"
    home.mkdir(exist_ok=True)
    env = inherited | {"PYTHONPATH": str(ROOT), "HOME": str(home)} | server.env(home / "hf") | variables
    command = [sys.executable, "-m", "r7convert", *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd=tmp_path)


def run(server: HubServer, tmp_path: Path, *words: object, code: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
    child = start(server, tmp_path, *words, **variables)
    out, talk = child.communicate(timeout=60)
    assert child.returncode == code, talk
    assert "Traceback" not in talk
    assert not PRIVATE.search(out + talk)
    assert str(tmp_path / "home") not in out + talk
    return subprocess.CompletedProcess(child.args, child.returncode, out, talk)


def publish(server: HubServer, folder: Path) -> str:
    return server.add_repo(REPO, {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()})


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}


def test_download_by_endpoint_home_and_token(server: HubServer, folder: Path, tmp_path: Path) -> None:
    commit = publish(server, folder)
    server.repos[REPO].private = True
    rehearsed = run(server, tmp_path, "download", REPO, "out", "--dry-run")
    assert rehearsed.stdout.startswith(f"{REPO} at {commit}: {len(bytes_of(folder))} files, ")
    assert not (tmp_path / "out").exists()
    done = run(server, tmp_path, "download", f"hf://{REPO}@main", "out", "--json")
    said = json.loads(done.stdout)
    assert (said["commit"], said["fetched_bytes"]) == (commit, said["total_bytes"])
    assert done.stderr == "", "HF_HUB_DISABLE_PROGRESS_BARS holds"
    assert bytes_of(tmp_path / "out") == bytes_of(folder)
    assert not (tmp_path / "home" / ".cache").exists(), "HF_HOME holds"
    run(server, tmp_path, "download", REPO, "other", code=6, HF_TOKEN="")
    again = run(server, tmp_path, "download", REPO, "out")
    assert " ".join(again.stdout.split()).endswith("; 0 B fetched")
    assert again.stderr == "next: r7convert inspect out\n"


def test_offline_holds(server: HubServer, folder: Path, tmp_path: Path) -> None:
    publish(server, folder)
    done = run(server, tmp_path, "download", REPO, "out", code=6, HF_HUB_OFFLINE="1")
    assert done.stderr == f"error: {REPO}: offline. Unset HF_HUB_OFFLINE, or name a folder.\n"
    assert not server.requests


def test_offline_a_repository_is_its_cached_snapshot(server: HubServer, folder: Path, tmp_path: Path) -> None:
    files = {p.name: p.read_bytes() for p in folder.iterdir() if p.name not in ("MANIFEST.json", "VERDICT.json")}
    commit = server.add_repo(REPO, files)
    (tmp_path / "home").mkdir()
    fill = "import sys; from huggingface_hub import snapshot_download; snapshot_download(sys.argv[1])"
    env = os.environ | server.env(tmp_path / "home" / "hf")
    subprocess.run([sys.executable, "-c", fill, REPO], env=env, check=True, capture_output=True)
    server.requests.clear()
    said = json.loads(run(server, tmp_path, "inspect", REPO, "--json", HF_HUB_OFFLINE="1").stdout)
    assert said["source"] == {"repo": REPO, "commit": commit, "sealed": False}
    run(server, tmp_path, "repack", f"{REPO}@main", "out", "--target", "exl3", "-q", HF_HUB_OFFLINE="1")
    assert json.loads((tmp_path / "out" / "MANIFEST.json").read_text())["source"]["commit"] == commit
    assert run(server, tmp_path, "inspect", "org/none", code=6, HF_HUB_OFFLINE="1").stderr.startswith("error: org/none: offline")
    assert not server.requests


def test_waits_are_said_without_addresses(server: HubServer, folder: Path, tmp_path: Path) -> None:
    publish(server, folder)
    server.faults += [Fault("GET .*/tree/", status=429, headers={"Retry-After": "0"}), Fault("GET /cdn/", cut=10)]
    server.faults.append(Fault("GET /api/models/org/glm$", status=429, headers={"Retry-After": "4"}))
    talk = run(server, tmp_path, "download", REPO, "out").stderr
    assert "the Hub answers status 429; waiting 4 s, try 1 of 5\n" in talk
    assert bytes_of(tmp_path / "out") == bytes_of(folder)


def test_no_hub_there(server: HubServer, tmp_path: Path) -> None:
    """A refused port: bounded tries, then one line."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    server.repos.clear()
    began = time.monotonic()
    child = start(server, tmp_path, "fix-hub", REPO, HF_ENDPOINT=f"http://127.0.0.1:{port}")
    out, talk = child.communicate(timeout=60)
    assert (child.returncode, out) == (6, "")
    assert talk.startswith(f"error: {REPO}: connection lost: expected an answer, got ConnectError")
    assert talk.count("\n") == 1, talk
    assert time.monotonic() - began < 15


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_download_that_is_stopped_is_finished_by_the_next(server: HubServer, folder: Path, tmp_path: Path, number: int) -> None:
    publish(server, folder)
    children: list[subprocess.Popen[str]] = []
    server.faults.append(Fault("GET /cdn/", skip=1, call=lambda: children[0].send_signal(number), seconds=0.2))
    children.append(start(server, tmp_path, "download", REPO, "out"))
    _, talk = children[0].communicate(timeout=60)
    assert children[0].returncode == (-signal.SIGKILL if number == signal.SIGKILL else 130), talk
    assert not (tmp_path / "out" / RECEIPT).exists()
    whole = bytes_of(folder)
    assert all(data == whole[name] for name, data in bytes_of(tmp_path / "out").items()), "under a final name, and not whole"
    run(server, tmp_path, "download", REPO, "out")
    assert bytes_of(tmp_path / "out") == whole
    assert not list((tmp_path / "out").rglob("*.incomplete"))
    assert not list((tmp_path / "out").rglob("journal.jsonl"))


@pytest.mark.parametrize("words", [["download", REPO, "out"], ["repack", REPO, "out", "--target", "exl3", "--stream"]])
def test_ctrl_c_does_not_wait_for_a_stalled_server(server: HubServer, folder: Path, tmp_path: Path, words: list[str]) -> None:
    files = {p.name: p.read_bytes() for p in folder.iterdir() if p.name not in ("MANIFEST.json", "VERDICT.json")}
    server.add_repo(REPO, files)
    reached = threading.Event()
    server.faults.append(Fault("GET /cdn/", ranged=False, times=100, call=reached.set, seconds=60))
    child = start(server, tmp_path, *words)
    assert reached.wait(30)
    child.send_signal(signal.SIGINT)
    began = time.monotonic()
    _, talk = child.communicate(timeout=60)
    assert child.returncode == 130, talk
    assert time.monotonic() - began < 8
    assert "interrupted" in talk


def test_push_prints_the_commit_and_nothing_private(server: HubServer, folder: Path, tmp_path: Path) -> None:
    done = run(server, tmp_path, "push", folder, "org/out", "--private", "--tag", "v1")
    commit = server.repos["org/out"].branches["main"]
    assert done.stdout.splitlines()[-1] == f"{server.url}/org/out/commit/{commit}"
    assert done.stderr.splitlines()[-1] == f"next: look at {done.stdout.splitlines()[-1]}"
    assert server.repos["org/out"].tags == {"v1": commit}
    rehearsed = json.loads(run(server, tmp_path, "push", folder, "org/out@dev", "--dry-run", "--json").stdout)
    assert (rehearsed["commits"], rehearsed["sent"]) == (0, [])
    run(server, tmp_path, "push", folder, "org/out@dev", "--revision", "x", code=2)
    texts = {name: server.read("org/out", name).decode() for name in server.files("org/out") if not name.endswith(".safetensors")}
    assert len(texts) > 8
    for name, text in texts.items():
        assert not PRIVATE.search(text), name
        assert str(tmp_path) not in text
        assert str(folder) not in text


@pytest.mark.parametrize("after", [0, 1])
def test_a_push_killed_between_commits_is_finished_by_the_next(server: HubServer, folder: Path, tmp_path: Path, after: int) -> None:
    children: list[subprocess.Popen[str]] = []
    server.faults.append(Fault("POST .*/commit/", skip=after, call=lambda: children[0].kill(), cut=0))
    children.append(start(server, tmp_path, "push", folder, "org/out"))
    children[0].communicate(timeout=60)
    assert children[0].returncode == -signal.SIGKILL
    partial = server.files("org/out")
    assert after or not set(LOOKS_WHOLE) & set(partial)
    run(server, tmp_path, "push", folder, "org/out")
    for commit in server.history("org/out"):
        if any(name in commit.files for name in LOOKS_WHOLE):
            assert {p.name for p in folder.iterdir() if p.is_file()} <= set(commit.files)
    assert len(server.history("org/out")) == 3, "a commit was made twice"
    assert {name: server.read("org/out", name) for name in bytes_of(folder) if name != "README.md"} == {
        name: data for name, data in bytes_of(folder).items() if name != "README.md"
    }


def test_fix_hub(server: HubServer, folder: Path, tmp_path: Path) -> None:
    server.add_repo(REPO, {p.name: p.read_bytes() for p in folder.iterdir() if p.name not in ("MANIFEST.json", "VERDICT.json")})
    shown = run(server, tmp_path, "fix-hub", REPO)
    assert "config.json: quantization_config.quant_method: 'modelopt' -> 'exl3'" in shown.stdout
    assert shown.stderr == f"next: r7convert fix-hub {REPO} --create-pr  # proposes the repair\n"
    assert run(server, tmp_path, "fix-hub", REPO, "--create-pr").stdout.splitlines()[-1] == f"{server.url}/{REPO}/discussions/1"
    assert json.loads(run(server, tmp_path, "fix-hub", f"{REPO}@refs/pr/1", "--json").stdout)["due"] is False


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["download", "./here", "out"], 2, "error: ./here: repository: expected org/name"),
        (["download", "org/none", "out"], 6, "error: org/none: no such repository, or no access to it"),
        (["download", "org/none", "out", "--layers", "9-3"], 2, "error: --layers: range: expected A or A-B, ascending, got '9-3'"),
        (["push", "nowhere", "org/out"], 3, "error: nowhere: no MANIFEST.json: this folder is not sealed"),
    ],
)
def test_errors(server: HubServer, tmp_path: Path, words: list[str], code: int, text: str) -> None:
    done = run(server, tmp_path, *words, code=code)
    assert done.stderr.startswith(text)
    assert done.stdout == ""


def test_inspect_and_dry_run_of_a_repository_read_headers_alone(server: HubServer, folder: Path, tmp_path: Path) -> None:
    files = {p.name: p.read_bytes() for p in folder.iterdir() if p.name not in ("MANIFEST.json", "VERDICT.json")}
    commit = server.add_repo(REPO, files)
    said = json.loads(run(server, tmp_path, "inspect", f"{REPO}@{commit}", "--json").stdout)
    assert said["source"]["commit"] == commit
    plan = json.loads(run(server, tmp_path, "repack", REPO, "out", "--target", "exl3", "--dry-run", "--json").stdout)
    assert plan["payload_bytes"] > 1e6
    assert not (tmp_path / "out").exists()
    assert not [r for r in server.asked("GET /cdn/") if r.range is None]
    refused = run(server, tmp_path, "repack", REPO, "out", "--target", "exl3", code=2)
    assert "Use --stream, or first: r7convert download org/glm DIR." in refused.stderr


def test_a_stream_that_is_killed_is_finished_by_the_next(server: HubServer, folder: Path, tmp_path: Path) -> None:
    files = {p.name: p.read_bytes() for p in folder.iterdir() if p.name not in ("MANIFEST.json", "VERDICT.json")}
    server.add_repo(REPO, files)
    words = ["repack", REPO, "out", "--target", "exl3", "--stream", "--max-disk", "20MB"]
    children: list[subprocess.Popen[str]] = []
    server.faults.append(Fault("GET /cdn/", ranged=False, skip=1, call=lambda: children[0].kill(), seconds=0.2))
    children.append(start(server, tmp_path, *words))
    children[0].communicate(timeout=60)
    assert children[0].returncode == -signal.SIGKILL
    assert not (tmp_path / "out" / "MANIFEST.json").exists()
    done = run(server, tmp_path, *words)
    assert "on disk besides what stays" in done.stdout
    assert done.stderr.splitlines()[-1] == "next: r7convert verify out"
    assert not (tmp_path / "out" / ".r7convert").exists()
    run(server, tmp_path, "verify", "out")
    assert run(server, tmp_path, *words[:-1], "20 apples", code=2).stderr.startswith(
        "error: --max-disk: size: expected bytes, or such as 40GB"
    )
    assert "for a repository of the Hub" in run(server, tmp_path, "repack", folder, "x", "--target", "exl3", "--stream", code=2).stderr


def test_a_chain_says_what_its_stages_did(tmp_path: Path) -> None:
    encoded = {"kept": 0, "seconds": 61.2}
    judged = {"seal": "passed", "bytes": "passed"}
    said = Converted("t", tmp_path, {"repack": {"files": 3, "bytes": 2_400_000}, "encode-shared": encoded, "verify": judged}, None)
    assert list(_convert_lines(said))[1:4] == [
        "  repack: files 3, bytes 2.4 MB",
        "  encode-shared: kept 0, 1 min 1 s",
        "  verify: seal passed, bytes passed",
    ]
