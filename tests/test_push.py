"""push against a loopback Hub, over real HTTP: what arrives, in which order, what each fault ends in, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from r7convert import push as push_module
from r7convert.address import Repo
from r7convert.errors import FormatError, NetworkError, R7Error, ResourceError, UsageError, VerifyError
from r7convert.journal import MANIFEST, VERDICT
from r7convert.push import LOOKS_WHOLE, Pushed, push
from tests.hub_server import TOKEN, Fault, HubServer
from tests.sealed import judge, seal, write_sealed

REPO = Repo("org/out")


@pytest.fixture(scope="module")
def sealed_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sealed(tmp_path_factory.mktemp("sealed") / "out")


@pytest.fixture
def out(sealed_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the folder; commits hold one file each, so that there are several."""
    monkeypatch.setattr(push_module, "COMMIT_FILES", 1)
    return Path(shutil.copytree(sealed_once, tmp_path / "out"))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.name != "README.md"}


def weights(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.safetensors"))


def assert_there(hub: HubServer, folder: Path, ref: str = "main") -> None:
    """All files with the right bytes, a card, and at no commit a config or an index without everything else."""
    expected = contents(folder)
    shown = hub.files(REPO.id, ref)
    assert {name: hub.read(REPO.id, name, ref) for name in expected} == expected
    assert set(shown) - set(expected) <= {"README.md", ".gitattributes"}
    assert b"r7convert" in hub.read(REPO.id, "README.md", ref)
    assert_never_half(hub, folder, ref)


def assert_never_half(hub: HubServer, folder: Path, ref: str = "main", least: int = 2) -> None:
    history = hub.history(REPO.id, ref)
    assert len(history) >= least
    for commit in history:
        ours = any(name in commit.files for name in weights(folder))
        if ours and any(name in commit.files for name in LOOKS_WHOLE):
            assert set(contents(folder)) <= set(commit.files), f"commit {commit.title!r} looks whole and is not"


def test_a_new_repository(hub: HubServer, out: Path) -> None:
    result = push(out, REPO, private=True)
    assert_there(hub, out)
    assert hub.repos[REPO.id].private
    titles = [commit.title for commit in hub.history(REPO.id)]
    assert titles[1:] == [f"Weights, 1 of {len(weights(out))} files"] * len(weights(out)) + [f"Config, index and card; seal {seal_of(out)}"]
    assert result.commits == len(weights(out)) + 1
    assert result.url == f"{hub.url}/org/out/commit/{hub.repos[REPO.id].branches['main']}"
    assert result.commit == hub.repos[REPO.id].branches["main"]
    assert not [r for r in hub.requests if r.port == "cdn" and r.authorized]


def seal_of(folder: Path) -> str:
    import hashlib

    return hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()[:12]


def test_large_files_go_up_in_parts(hub: HubServer, out: Path) -> None:
    hub.multipart_bytes = 200_000
    push(out, REPO)
    assert_there(hub, out)
    assert len(hub.asked(r"PUT /lfs/\w+/\d+")) > 3


def test_a_second_push_sends_nothing(hub: HubServer, out: Path) -> None:
    first = push(out, REPO, tag="v1")
    hub.requests.clear()
    again = push(out, REPO, tag="v1")
    assert (again.sent, again.sent_bytes, again.commits, again.commit) == ((), 0, 0, first.commit)
    assert not [r for r in hub.requests if r.method in ("POST", "PUT")]
    assert again.url == first.url


def test_a_branch_and_a_tag(hub: HubServer, out: Path) -> None:
    result = push(out, Repo(REPO.id, "tp1"), tag="v1")
    assert_there(hub, out, "tp1")
    assert hub.repos[REPO.id].tags == {"v1": result.commit}
    assert set(hub.files(REPO.id, "main")) == {".gitattributes"}


def test_a_pull_request_is_a_draft_until_it_is_whole(hub: HubServer, out: Path) -> None:
    hub.add_repo(REPO.id, {"config.json": b"{}", "old.safetensors": b"O" * 100, "LICENSE": b"free", "hf_quant_config.json": b"{}"})
    main = hub.repos[REPO.id].branches["main"]
    hub.faults.append(Fault("POST .*/commit/", skip=1, status=403))
    with pytest.raises(NetworkError, match="status 403"):
        push(out, REPO, create_pr=True)
    pulls = hub.repos[REPO.id].pulls
    assert [pull["status"] for pull in pulls.values()] == ["draft"]
    assert not set(LOOKS_WHOLE) & set(hub.files(REPO.id, "refs/pr/1")), "the first commit takes the old config down"
    result = push(out, REPO, create_pr=True)
    assert list(pulls) == [1], "the unfinished pull request is taken up again"
    assert pulls[1]["status"] == "open"
    assert result.url == f"{hub.url}/org/out/discussions/1"
    assert_there(hub, out, "refs/pr/1")
    assert hub.repos[REPO.id].branches["main"] == main


def test_dry_run_writes_nothing_anywhere(hub: HubServer, out: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    rehearsed = push(out, REPO, dry_run=True)
    assert not hub.repos
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
    done = push(out, REPO)
    assert (rehearsed.sent, rehearsed.sent_bytes, rehearsed.commits) == (done.sent, done.sent_bytes, done.commits)
    assert [r for r in hub.requests if r.method == "PUT"]
    hub.requests.clear()
    assert push(out, REPO, dry_run=True).commits == 0
    assert push(out, Repo(REPO.id, "dev"), dry_run=True).sent == ()
    assert not [r for r in hub.requests if r.method in ("POST", "PUT")]


# ---- faults -----------------------------------------------------------------------------------------------------------

FAULTS: dict[str, Callable[[], Fault]] = {
    "429 creating the repository": lambda: Fault("POST /api/repos/create", status=429, headers={"Retry-After": "4"}),
    "429 at preupload": lambda: Fault("POST .*/preupload/", status=429, headers={"Retry-After": "4"}, times=2),
    "429 at the batch": lambda: Fault("POST .*/objects/batch", status=429, headers={"Retry-After": "4"}),
    "429 at a commit": lambda: Fault("POST .*/commit/", skip=1, status=429, headers={"Retry-After": "4"}),
    "503 at the upload": lambda: Fault("PUT /lfs/", status=503, times=2),
    "503 at every second step": lambda: Fault("POST .*/commit/", skip=1, status=503, times=2),
    "503 reading the branch": lambda: Fault("GET /api/models/.*/tree/", skip=1, status=503, times=2),
    "503 tagging": lambda: Fault("POST .*/tag/", status=503),
    "answer lost after a commit": lambda: Fault("POST .*/commit/", skip=1, cut=0),
    "answer lost after the last commit": lambda: Fault("POST .*/commit/", skip=3, cut=0),
    "answer lost after creating the repository": lambda: Fault("POST /api/repos/create", cut=0),
    "connection lost in an upload": lambda: Fault("PUT /lfs/", cut=0),
}


@pytest.mark.parametrize("name", FAULTS)
def test_passing_faults_are_waited_out(hub: HubServer, out: Path, name: str) -> None:
    fault = FAULTS[name]()
    hub.faults.append(fault)
    push(out, REPO, tag="v1")
    assert fault.times == 0, "the fault was never met"
    assert_there(hub, out)
    assert len(hub.history(REPO.id)) == 2 + len(weights(out)), "a commit was made twice"
    if "429" in name:
        assert any(4 <= s < 6 for s in hub.sleeps), hub.sleeps


@pytest.mark.parametrize("after", range(4))
def test_a_push_that_dies_between_commits_is_finished_by_the_next(hub: HubServer, out: Path, after: int) -> None:
    hub.faults.append(Fault("POST .*/commit/", skip=after, status=403))
    with pytest.raises(NetworkError, match=r"org/out@main: the Hub refused: expected success, got status 403"):
        push(out, REPO)
    assert len(hub.history(REPO.id)) == 1 + after
    assert_never_half(hub, out, least=1)
    arrived = set(hub.files(REPO.id)) - {".gitattributes"}
    hub.requests.clear()
    again = push(out, REPO)
    assert_there(hub, out)
    assert len(hub.history(REPO.id)) == 2 + len(weights(out))
    assert set(again.sent) == {*contents(out), "README.md"} - arrived
    assert len(hub.asked("PUT /lfs/")) <= len(weights(out)) - after, "blobs that are there are not sent again"


def test_faults_for_good_are_one_line_and_bounded(hub: HubServer, out: Path) -> None:
    hub.faults.append(Fault("POST .*/commit/", status=503, times=1000))
    with pytest.raises(NetworkError) as caught:
        push(out, REPO)
    assert str(caught.value) == "org/out@main: the Hub refused: expected success, got status 503 fault 503. Run again."
    assert len(hub.asked("POST .*/commit/")) == 6


def test_paths_in_texts_of_others_are_no_secret(hub: HubServer, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    (out / "generation_config.json").write_text('{"made_in": "/home/somebody/else"}')
    seal(out)
    push(out, REPO)
    assert b"/home/somebody" in hub.read(REPO.id, "generation_config.json")


def test_a_wait_over_five_minutes_is_said_not_waited(hub: HubServer, out: Path) -> None:
    hub.faults.append(Fault("POST /api/repos/create", status=429, headers={"RateLimit": '"api";r=0;t=900'}, times=1000))
    with pytest.raises(NetworkError, match=r"got status 429 fault 429\. Wait 901 s, then run again\."):
        push(out, REPO)
    assert not hub.sleeps
    hub.faults[:] = [Fault("POST /api/repos/create", status=429, headers={"RateLimit": '"api";r=0;t=20'})]
    push(out, REPO)
    assert hub.sleeps == [21]


def test_somebody_else_pushes_meanwhile(hub: HubServer, out: Path) -> None:
    """Their commit lands between our reading of the head and our commit on it: ours is refused, and the next push goes on."""
    hub.add_repo(REPO.id, {"notes.txt": b"1"})
    theirs: Callable[[], Any] = lambda: hub.commit(REPO.id, "main", "theirs", {"notes.txt": b"2"})  # noqa: E731
    hub.faults.append(Fault("POST .*/preupload/", call=theirs))
    with pytest.raises(NetworkError, match=r"status 412 A commit has happened since"):
        push(out, REPO)
    push(out, REPO)
    assert hub.read(REPO.id, "notes.txt") == b"2"
    assert set(contents(out)) <= set(hub.files(REPO.id))


def test_bytes_that_changed_since_the_seal_never_reach_the_branch(hub: HubServer, out: Path) -> None:
    name = weights(out)[0]
    data = bytearray((out / name).read_bytes())
    data[-1] ^= 1
    (out / name).write_bytes(data)
    with pytest.raises(VerifyError, match=rf"org/out: {name}: sha256 at upload: expected \w+, got \w+\. The file changed"):
        push(out, REPO)
    assert set(hub.files(REPO.id)) == {".gitattributes"}


def test_bytes_that_change_while_they_go_up_never_reach_the_branch(hub: HubServer, out: Path) -> None:
    """The client has hashed the file and then sends other bytes: the Hub refuses them, and we say why."""
    name = weights(out)[0]

    def change() -> None:
        data = bytearray((out / name).read_bytes())
        data[-1] ^= 1
        (out / name).write_bytes(data)

    hub.faults.append(Fault("POST .*/info/lfs/objects/batch", call=change))
    with pytest.raises(VerifyError, match=rf"org/out: {name}: sha256 at upload: expected \w+, got \w+\. The file changed"):
        push(out, REPO)
    assert set(hub.files(REPO.id)) == {".gitattributes"}


def test_wrong_digest_on_the_hub_is_named_at_the_end(hub: HubServer, out: Path) -> None:
    def meddle() -> None:
        repo = hub.repos[REPO.id]
        head = repo.commits[repo.branches["main"]]
        head.files["LICENSE"] = hub.store("LICENSE", b"another")

    last = 2 + len(weights(out)) * 2
    hub.faults.append(Fault("GET /api/models/org/out/tree/", skip=last, call=meddle))
    with pytest.raises(VerifyError, match=r"org/out@\w{12}: LICENSE: digest: expected"):
        push(out, REPO)


# ---- refusals -----------------------------------------------------------------------------------------------------------


def unsealed(out: Path) -> None:
    (out / MANIFEST).unlink()


def unjudged(out: Path) -> None:
    (out / VERDICT).unlink()


def failed(out: Path) -> None:
    judge(out, failed=True)


def resealed(out: Path) -> None:
    verdict = (out / VERDICT).read_bytes()
    seal(out, target="exl3")
    (out / VERDICT).write_bytes(verdict)


def truncated(out: Path) -> None:
    (out / weights(out)[1]).write_bytes(b"short")


def lost(out: Path) -> None:
    (out / "LICENSE").unlink()


def partial(out: Path) -> None:
    seal(out, partial={"layers": [3, 3]})


def telling_a_home(out: Path) -> None:
    seal(out, note=str(Path.home() / "models"))


def telling_the_folder(out: Path) -> None:
    seal(out, note=f"from {out.resolve()}")


def telling_another_token(out: Path) -> None:
    (out / "notes.json").write_text('{"token": "hf_' + "x" * 30 + '"}')
    seal(out)


def telling_a_token(out: Path) -> None:
    seal(out, note=TOKEN)


@pytest.mark.parametrize(
    ("spoil", "error", "says"),
    [
        (unsealed, FormatError, "not sealed"),
        (unjudged, VerifyError, "nobody judged this folder"),
        (failed, VerifyError, "failed"),
        (resealed, VerifyError, "verdict of another manifest"),
        (truncated, VerifyError, "size: expected"),
        (lost, VerifyError, r"LICENSE: size: expected \d+, got None"),
        (partial, UsageError, "a part of a checkpoint: expected all layers"),
        (telling_a_home, VerifyError, "a path of this machine"),
        (telling_the_folder, VerifyError, "a path of this machine"),
        (telling_another_token, VerifyError, r"notes\.json: a token of the Hub"),
        (telling_a_token, VerifyError, "token of the Hub"),
    ],
)
def test_folders_that_are_not_pushed(
    hub: HubServer, out: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Path], None], error: type[R7Error], says: str
) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    spoil(out)
    with pytest.raises(error, match=says) as caught:
        push(out, REPO)
    assert TOKEN not in str(caught.value)
    assert not hub.requests, "refused before the Hub was asked"


def test_limits_of_the_hub(hub: HubServer, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push_module, "MOST_FILE_BYTES", 100_000)
    with pytest.raises(ResourceError, match="size of one file"):
        push(out, REPO)
    monkeypatch.undo()
    monkeypatch.setattr(push_module, "MOST_FILES", 5)
    with pytest.raises(ResourceError, match="files: expected at most 5"):
        push(out, REPO)
    assert not hub.repos


def test_a_branch_with_another_checkpoint(hub: HubServer, out: Path) -> None:
    old = {"config.json": b"{}", "old.safetensors": b"O" * 100, "old.json": b"{}", "hf_quant_config.json": b"{}", "LICENSE": b"old"}
    old |= {"tier_map.json": b"{}", "slabs.json": b"{}"}  # of a conversion to another target
    hub.add_repo(REPO.id, dict(old))
    for dry_run in (True, False):
        with pytest.raises(UsageError, match=r"org/out@main: the branch holds another checkpoint: .*config\.json.*--replace"):
            push(out, REPO, dry_run=dry_run)
    assert len(hub.history(REPO.id)) == 1
    assert push(out, REPO, replace=True, dry_run=True).commits == 1 + len(weights(out))
    push(out, REPO, replace=True)
    assert_there(hub, out)
    assert not (set(old) - {"config.json", "LICENSE"}) & set(hub.files(REPO.id))


def test_destinations_that_cannot_be(hub: HubServer, out: Path) -> None:
    with pytest.raises(UsageError, match="no such repository"):
        push(out, REPO, create_pr=True)
    with pytest.raises(UsageError, match="Drop --revision"):
        push(out, Repo(REPO.id, "dev"), create_pr=True)
    hub.add_repo(REPO.id, {"notes.txt": b"1"})
    with pytest.raises(UsageError, match="visibility: expected private, got public"):
        push(out, REPO, private=True)
    hub.repos[REPO.id].tags["v1"] = hub.repos[REPO.id].branches["main"]
    with pytest.raises(UsageError, match="tag is taken"):
        push(out, REPO, tag="v1")
    assert len(hub.history(REPO.id)) == 1


def test_without_a_token(hub: HubServer, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "")
    with pytest.raises(NetworkError, match="HF_TOKEN"):
        push(out, REPO)


def test_result_is_plain(hub: HubServer, out: Path) -> None:
    result: Pushed = push(out, REPO)
    text = json.dumps(result.to_json())
    assert TOKEN not in text
    assert str(out) not in text
