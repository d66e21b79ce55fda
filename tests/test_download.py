"""download against a loopback Hub, over real HTTP: what is fetched, what is proven, and what each fault ends in."""

from __future__ import annotations

import hashlib
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from r7convert.address import RECEIPT, Repo, read_origin
from r7convert.checkpoint import INDEX
from r7convert.download import download
from r7convert.errors import FormatError, InputError, NetworkError, ResourceError, UsageError
from r7convert.journal import Journal
from r7convert.progress import Progress
from r7convert.source import Folder
from tests.hub_server import TOKEN, Fault, HubServer

REPO = Repo("org/glm")
SHARDS = ("model-a.safetensors", "r7-experts-layer-003.safetensors", "r7-experts-layer-004.safetensors")


def checkpoint(seed: int = 0, shard_bytes: int = 300_000) -> dict[str, bytes]:
    """Files in the shape of an R7 repository, with what nobody needs strewn in. Payloads are noise."""
    rng = random.Random(seed)
    files = {name: rng.randbytes(shard_bytes + 7 * i) for i, name in enumerate(SHARDS)}
    weight_map = {
        "model.embed_tokens.weight": SHARDS[0],
        "model.layers.3.mlp.experts.0.gate_proj.trellis": SHARDS[1],
        "model.layers.4.mlp.experts.0.gate_proj.trellis": SHARDS[2],
    }
    files |= {
        "config.json": json.dumps({"seed": seed}).encode(),
        "quantization_config.json": b"{}",
        "tokenizer.json": b'{"t": 1}',
        "README.md": b"# card",
        "LICENSE": b"free",
        "chat_template.jinja": b"{{ x }}",
        "r7-experts-layer-003.json": b'{"bit_map": {}}',
        "r7-experts-layer-004.json": b'{"bit_map": {}}',
        INDEX: json.dumps({"metadata": {}, "weight_map": weight_map}).encode(),
    }
    foreign = {"model.gguf": b"G" * 5000, "old.safetensors": b"O" * 5000, "pytorch_model.bin": b"B" * 5000, "plot.png": b"P"}
    return files | foreign | {".gitattributes": b"x", "original/weights.safetensors": b"W" * 5000}


WANTED = set(checkpoint()) - {
    "model.gguf",
    "old.safetensors",
    "pytorch_model.bin",
    "plot.png",
    ".gitattributes",
    "original/weights.safetensors",
}


def fetched(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def assert_whole(folder: Path, files: dict[str, bytes]) -> None:
    assert fetched(folder) == {name: files[name] for name in WANTED}
    assert not list(folder.rglob("*.incomplete"))
    assert not (folder / ".r7convert" / "journal.jsonl").exists()


class Talk(Progress):
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.total = self.done = 0

    def say(self, line: str) -> None:
        self.lines.append(line)

    def start(self, total_bytes: int, label: str) -> None:
        self.total = total_bytes

    def advance(self, nbytes: int, note: str = "") -> None:
        self.done += nbytes


def test_fetches_what_a_conversion_needs_and_says_where_from(hub: HubServer, tmp_path: Path) -> None:
    files = checkpoint()
    commit = hub.add_repo(REPO.id, files)
    hub.page_size = 4
    talk = Talk()
    result = download(REPO, tmp_path / "out", progress=talk)
    assert_whole(tmp_path / "out", files)
    assert result.commit == commit
    assert read_origin(tmp_path / "out") == Repo(REPO.id, commit)
    assert (Folder(tmp_path / "out").repo, Folder(tmp_path / "out").commit) == (REPO.id, commit)
    assert {n: r.sha256 for n, r in result.files.items()} == {n: hashlib.sha256(files[n]).hexdigest() for n in WANTED}
    assert set(result.left_out) >= {"model.gguf", "old.safetensors", "plot.png"}
    assert talk.total == talk.done == result.total_bytes == sum(len(files[n]) for n in WANTED)
    assert hub.asked("GET /cdn/")
    assert not [r for r in hub.requests if r.port == "cdn" and r.authorized], "the token went to the CDN"


def test_a_second_run_fetches_nothing(hub: HubServer, tmp_path: Path) -> None:
    hub.add_repo(REPO.id, checkpoint())
    download(REPO, tmp_path / "out")
    hub.requests.clear()
    assert download(REPO, tmp_path / "out").fetched_bytes == 0
    assert not hub.asked("GET /cdn/")


def test_a_new_commit_brings_only_what_changed(hub: HubServer, tmp_path: Path) -> None:
    files = checkpoint()
    hub.add_repo(REPO.id, files)
    download(REPO, tmp_path / "out")
    files[SHARDS[1]] = b"new" * 1000
    commit = hub.commit(REPO.id, "main", "second", {SHARDS[1]: files[SHARDS[1]]})
    hub.requests.clear()
    result = download(REPO, tmp_path / "out")
    assert result.commit == commit
    assert result.fetched_bytes == 3000
    assert len(hub.asked("GET /cdn/")) == 1
    assert_whole(tmp_path / "out", files)


def test_dry_run_touches_nothing(hub: HubServer, tmp_path: Path) -> None:
    hub.add_repo(REPO.id, checkpoint())
    result = download(REPO, tmp_path / "out", dry_run=True)
    assert result.fetched_bytes == result.total_bytes > 900_000
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "hf_home").exists()


def test_layers_and_patterns(hub: HubServer, tmp_path: Path) -> None:
    hub.add_repo(REPO.id, checkpoint())
    names = set(download(REPO, tmp_path / "a", layers={4}, dry_run=True).files)
    assert {n for n in names if "r7-experts" in n or n.endswith("safetensors")} == {
        SHARDS[0],
        SHARDS[2],
        "r7-experts-layer-004.json",
    }
    assert set(download(REPO, tmp_path / "a", allow=["*.json"], ignore=["r7-*"], dry_run=True).files) == {
        "config.json",
        "quantization_config.json",
        "tokenizer.json",
        INDEX,
    }
    assert set(download(REPO, tmp_path / "a", allow=["CONFIG.json", ".\\config.json", "config.jso?"], dry_run=True).files) == {
        "config.json"
    }
    with pytest.raises(UsageError, match="nothing to download"):
        download(REPO, tmp_path / "a", allow=["none-*"], dry_run=True)


# ---- faults -----------------------------------------------------------------------------------------------------------


def test_connection_cut_mid_file_resumes_where_it_stopped(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 50_000)  # it keeps whole chunks, of 10 MB
    files = checkpoint()
    hub.add_repo(REPO.id, files)
    hub.faults.append(Fault("GET /cdn/", cut=100_000, times=2))
    download(REPO, tmp_path / "out")
    assert_whole(tmp_path / "out", files)
    assert [r for r in hub.asked("GET /cdn/") if r.range and r.range.startswith("bytes=100000")], "no range request picked up the rest"


def test_a_server_that_stalls_is_asked_again(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    monkeypatch.setattr("r7convert.hub.READ_TIMEOUT_S", 0.2)
    files = checkpoint()
    hub.add_repo(REPO.id, files)
    stalls = [Fault("GET /cdn/", seconds=0.6), Fault(f"GET /org/glm/resolve/.*/{INDEX}", seconds=0.6)]
    hub.faults += stalls
    download(REPO, tmp_path / "out")
    assert_whole(tmp_path / "out", files)
    assert all(fault.times == 0 for fault in stalls)


def test_a_server_that_keeps_cutting_ends_in_one_line_and_a_rerun_completes(hub: HubServer, tmp_path: Path) -> None:
    files = checkpoint()
    hub.add_repo(REPO.id, files)
    digest = hashlib.sha256(files[SHARDS[2]]).hexdigest()
    hub.faults.append(Fault(f"GET /cdn/{digest}", cut=0, times=1000))
    with pytest.raises(NetworkError) as caught:
        download(REPO, tmp_path / "out")
    assert str(caught.value).startswith(f"org/glm: {SHARDS[2]}: connection lost")
    assert "\n" not in str(caught.value)
    assert SHARDS[2] not in fetched(tmp_path / "out")
    hub.faults.clear()
    hub.requests.clear()
    assert download(REPO, tmp_path / "out").fetched_bytes == len(files[SHARDS[2]])
    assert len(hub.asked("GET /cdn/")) == 1
    assert_whole(tmp_path / "out", files)


@pytest.mark.parametrize("where", ["GET /api/models/org/glm/revision|GET /api/models/org/glm$", "GET /api/.*/tree", "HEAD ", "GET /cdn/"])
def test_429_is_waited_out_as_long_as_it_asks(hub: HubServer, tmp_path: Path, where: str) -> None:
    files = checkpoint()
    hub.add_repo(REPO.id, files)
    hub.faults.append(Fault(where, status=429, headers={"Retry-After": "7"}))
    download(REPO, tmp_path / "out")
    assert_whole(tmp_path / "out", files)
    if where != "HEAD ":  # the client tries a failed HEAD again at once
        assert any(7 <= s < 9 for s in hub.sleeps)


@pytest.mark.parametrize("where", ["GET /api/models/org/glm$", "GET /api/.*/tree", "HEAD ", "GET /cdn/", "GET /org/glm/resolve"])
def test_503_is_tried_again_and_bounded(hub: HubServer, tmp_path: Path, where: str) -> None:
    files = checkpoint()
    hub.add_repo(REPO.id, files)
    hub.faults.append(Fault(where, status=503, times=2))
    download(REPO, tmp_path / "out")
    assert_whole(tmp_path / "out", files)


def test_503_for_good_ends_in_one_line(hub: HubServer, tmp_path: Path) -> None:
    hub.add_repo(REPO.id, checkpoint())
    hub.faults.append(Fault("GET /api", status=503, times=1000))
    with pytest.raises(NetworkError, match=r"^org/glm: the Hub refused: expected success, got status 503 .*Run again\.$"):
        download(REPO, tmp_path / "out")
    assert len(hub.requests) <= 7


def test_wrong_bytes_are_fetched_once_more(hub: HubServer, tmp_path: Path) -> None:
    files = checkpoint()
    hub.add_repo(REPO.id, files)
    hub.faults += [Fault("GET /cdn/", corrupt=True), Fault("GET /org/glm/resolve/.*/tokenizer.json", corrupt=True)]
    download(REPO, tmp_path / "out")
    assert_whole(tmp_path / "out", files)


def test_wrong_bytes_for_good_are_named_and_not_kept(hub: HubServer, tmp_path: Path) -> None:
    files = checkpoint()
    hub.add_repo(REPO.id, files)
    digest = hashlib.sha256(files[SHARDS[1]]).hexdigest()
    hub.faults.append(Fault(f"GET /cdn/{digest}", corrupt=True, times=1000))
    with pytest.raises(NetworkError, match=rf"^org/glm: {SHARDS[1]}: sha256: expected {digest}, got [0-9a-f]{{64}}\."):
        download(REPO, tmp_path / "out")
    assert SHARDS[1] not in fetched(tmp_path / "out")
    hub.faults.clear()
    download(REPO, tmp_path / "out")
    assert_whole(tmp_path / "out", files)


def test_a_branch_that_moves_does_not_mix_versions(hub: HubServer, tmp_path: Path) -> None:
    old = checkpoint(seed=1)
    first = hub.add_repo(REPO.id, old)
    digest = hashlib.sha256(old[SHARDS[2]]).hexdigest()
    new = checkpoint(seed=2)
    hub.faults.append(Fault(f"GET /cdn/{digest}", cut=0, times=1000, call=None))
    with pytest.raises(NetworkError):
        download(REPO, tmp_path / "out")
    second = hub.commit(REPO.id, "main", "moved", {n: d for n, d in new.items() if "/" not in n})
    hub.faults.clear()
    talk = Talk()
    assert download(REPO, tmp_path / "out", progress=talk).commit == first
    assert_whole(tmp_path / "out", old)
    assert first[:12] in talk.lines[0]
    assert second[:12] in talk.lines[0]
    assert download(REPO, tmp_path / "out").commit == second, "a finished download follows the branch"
    assert_whole(tmp_path / "out", new)


def test_a_branch_that_moves_under_a_running_download(hub: HubServer, tmp_path: Path) -> None:
    old, new = checkpoint(seed=1), checkpoint(seed=2)
    first = hub.add_repo(REPO.id, old)
    move = lambda: hub.commit(REPO.id, "main", "moved", {n: d for n, d in new.items() if "/" not in n})  # noqa: E731
    hub.faults.append(Fault("GET /cdn/", call=move))
    assert download(REPO, tmp_path / "out").commit == first
    assert_whole(tmp_path / "out", old)


def test_restart_takes_the_new_commit(hub: HubServer, tmp_path: Path) -> None:
    hub.add_repo(REPO.id, checkpoint(seed=1))
    hub.faults.append(Fault("GET /cdn/", status=403, times=1000))
    with pytest.raises(NetworkError, match="status 403"):
        download(REPO, tmp_path / "out")
    hub.faults.clear()
    new = checkpoint(seed=2)
    second = hub.commit(REPO.id, "main", "moved", new)
    assert download(REPO, tmp_path / "out", restart=True).commit == second
    assert_whole(tmp_path / "out", new)


# ---- refusals -----------------------------------------------------------------------------------------------------------


def test_an_unfinished_download_of_another_repository_is_refused(hub: HubServer, tmp_path: Path) -> None:
    hub.add_repo(REPO.id, checkpoint())
    hub.add_repo("org/other", checkpoint())
    hub.faults.append(Fault("GET /cdn/", status=403, times=1000))
    with pytest.raises(NetworkError):
        download(REPO, tmp_path / "out")
    with pytest.raises(UsageError, match="unfinished run with another"):
        download(Repo("org/other"), tmp_path / "out")


def test_incomplete_repository_is_refused_by_name(hub: HubServer, tmp_path: Path) -> None:
    files = checkpoint()
    del files[SHARDS[1]]
    hub.add_repo(REPO.id, files)
    with pytest.raises(InputError, match=SHARDS[1]):
        download(REPO, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_pointer_in_place_of_a_file_is_named_before_the_long_transfers(hub: HubServer, tmp_path: Path) -> None:
    files = checkpoint()
    files["quantization_config.json"] = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 99\n"
    hub.add_repo(REPO.id, files)
    hub.faults.append(Fault("GET /cdn/", seconds=0.3, times=100))
    with pytest.raises(FormatError, match=r"quantization_config\.json: this is a pointer"):
        download(REPO, tmp_path / "out")


def test_room_is_checked_first(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add_repo(REPO.id, checkpoint())
    usage = type("usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(ResourceError, match="free space"):
        download(REPO, tmp_path / "out")
    assert not hub.asked("GET /cdn/")
    assert not (tmp_path / "out").exists()


def test_files_of_somebody_else_are_not_replaced(hub: HubServer, tmp_path: Path) -> None:
    hub.add_repo(REPO.id, checkpoint())
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("mine")
    with pytest.raises(UsageError, match=r"config\.json: already there"):
        download(REPO, tmp_path / "out")
    assert (tmp_path / "out" / "config.json").read_text() == "mine"


def test_a_file_that_lost_bytes_since_is_fetched_again(hub: HubServer, tmp_path: Path) -> None:
    files = checkpoint()
    hub.add_repo(REPO.id, files)
    download(REPO, tmp_path / "out")
    os.truncate(tmp_path / "out" / SHARDS[0], 10)
    (tmp_path / "out" / "config.json").write_bytes(b'{"seed": 9}')  # same size, other bytes
    download(REPO, tmp_path / "out")
    assert_whole(tmp_path / "out", files)


@pytest.mark.parametrize(
    ("repo", "line"),
    [("org/none", "no such repository, or no access to it"), ("org/glm@nope", "no such branch, tag or commit")],
)
def test_what_is_not_there(hub: HubServer, tmp_path: Path, repo: str, line: str) -> None:
    hub.add_repo(REPO.id, checkpoint())
    with pytest.raises(NetworkError, match=line):
        download(Repo(*repo.split("@")), tmp_path / "out")


def test_private_repositories_need_the_token(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add_repo(REPO.id, checkpoint(), private=True)
    download(REPO, tmp_path / "out")
    monkeypatch.setenv("HF_TOKEN", "")
    with pytest.raises(NetworkError, match="no access") as caught:
        download(REPO, tmp_path / "other")
    monkeypatch.setenv("HF_TOKEN", TOKEN[:-1] + "x")
    with pytest.raises(NetworkError) as caught:
        download(REPO, tmp_path / "other")
    assert TOKEN[:12] not in str(caught.value)


def test_offline_is_said(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add_repo(REPO.id, checkpoint())
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(NetworkError, match=r"org/glm: offline\. Unset HF_HUB_OFFLINE"):
        download(REPO, tmp_path / "out")
    assert not hub.requests


def test_receipt_is_plain(hub: HubServer, tmp_path: Path) -> None:
    hub.add_repo(REPO.id, checkpoint())
    download(REPO, tmp_path / "out")
    text = (tmp_path / "out" / RECEIPT).read_text()
    assert TOKEN not in text
    assert str(tmp_path) not in text
    assert "127.0.0.1" not in text


def test_a_file_is_on_the_disk_before_the_journal_says_so(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut after the entry would else leave zeros of the right size, which a resume takes for proven."""
    hub.add_repo("org/two", {"config.json": b"{}", "model.safetensors": b"x" * 5000})
    sync, record, synced, entered = os.fsync, Journal.record, set[str](), list[str]()

    def noted(fd: int) -> None:
        synced.add(Path(f"/proc/self/fd/{fd}").readlink().name)
        sync(fd)

    def entering(self: Journal, name: str, *rest: Any) -> None:
        assert name in synced
        entered.append(name)
        record(self, name, *rest)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(Journal, "record", entering)
    download(Repo("org/two"), tmp_path / "out")
    assert sorted(entered) == ["config.json", "model.safetensors"]
