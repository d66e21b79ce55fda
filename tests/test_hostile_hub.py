"""A Hub that answers anything at all: what read_snapshot, inspect of a repository and download make of its listings and files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from r7convert.address import Repo
from r7convert.checkpoint import INDEX, build_checkpoint
from r7convert.download import download
from r7convert.errors import FormatError, NetworkError, R7Error
from r7convert.hub import MOST_LISTED, read_snapshot
from r7convert.remote import RemoteSource
from tests.folders import sample, tree
from tests.hostile import EXAMPLES, Asked, bounded
from tests.hub_server import Fault, HubServer
from tests.outputs import SMALLEST
from tests.spoil import spoiled, text_of
from tests.test_hostile import sent

FEW = 12
REPO = Repo("org/glm")
INFO, TREE = r"GET /api/models/org/glm(/revision/[^/]*)?$", r"GET /api/models/org/glm/tree/"


@pytest.fixture
def whole(hub: HubServer, tmp_path: Path) -> Iterator[HubServer]:
    source = sample(tmp_path / "source", **SMALLEST, mode="uniform")
    hub.add_repo(REPO.id, {path.name: path.read_bytes() for path in source.iterdir()})
    yield hub
    hub.faults.clear()


def answers(hub: HubServer) -> dict[str, Any]:
    """The good listing, as the server words it."""
    repo = hub.repos[REPO.id]
    commit = repo.commits[repo.branches["main"]]
    info = {"id": REPO.id, "sha": commit.id, "private": False, "tags": [], "downloads": 0, "siblings": []}
    files = []
    for name, blob in sorted(commit.files.items()):
        lfs = {"oid": blob.sha256, "size": blob.size, "pointerSize": 130} if blob.lfs else None
        files.append({"type": "file", "path": name, "size": blob.size, "oid": blob.oid, **({"lfs": lfs} if lfs else {})})
    return {INFO: info, TREE: files}


def ask(hub: HubServer, folder: Path, faults: list[Fault]) -> Asked:
    asked = Asked()
    for call in (
        lambda: read_snapshot(REPO),
        lambda: build_checkpoint(RemoteSource(REPO)),
        lambda: download(REPO, folder, dry_run=True),
    ):
        hub.faults[:] = [Fault(fault.pattern, body=fault.body, times=20) for fault in faults]
        with bounded():
            asked(call)
    hub.faults.clear()
    return asked


@pytest.mark.parametrize("what", [INFO, TREE])
@pytest.mark.usefixtures("no_fsync")
def test_spoiled_listings(whole: HubServer, tmp_path: Path, what: str) -> None:
    outcomes: Counter[str] = Counter()
    folder = tmp_path / "folder"

    @settings(settings.get_profile("hostile"), max_examples=-(-EXAMPLES // 4) or FEW)
    @given(spoiled(answers(whole)[what]))
    def send(value: Any) -> None:
        asked = ask(whole, folder, [Fault(what, body=text_of(value))])
        outcomes[asked.outcome] += 1
        sent["hub: listing" if what == TREE else "hub: repository", asked.outcome] += 1
        assert not folder.exists()

    send()
    print(f"{what}: {dict(outcomes)}")
    assert outcomes["NetworkError"] + outcomes["FormatError"] > 2


@pytest.mark.usefixtures("no_fsync")
def test_spoiled_indexes(whole: HubServer, tmp_path: Path) -> None:
    good = json.loads((tmp_path / "source" / INDEX).read_text())

    @settings(settings.get_profile("hostile"), max_examples=-(-EXAMPLES // 4) or FEW)
    @given(spoiled(good))
    def send(value: Any) -> None:
        whole.commit(REPO.id, "main", "spoiled", {INDEX: text_of(value)})
        sent["hub: index", ask(whole, tmp_path / "folder", []).outcome] += 1

    send()


WAYS_OUT = ["../escaped.json", "/tmp/escaped.json", "a/../../escaped.json", "C:\\escaped.json", "..\\escaped.json", "escaped\0.json"]
WAYS_OUT += ["\ud800.json", "x" * 300, ".git/config", ".r7convert/journal.jsonl", "con", "x.", ""]


@pytest.mark.parametrize("name", WAYS_OUT)
def test_a_listing_that_leads_out_of_the_folder(whole: HubServer, tmp_path: Path, name: str) -> None:
    """Nothing is written but in the folder, nor under such a name."""
    good = answers(whole)[TREE]
    entry = {**next(e for e in good if e["path"] == "config.json"), "path": name}
    whole.faults.append(Fault(TREE, body=json.dumps([*good, entry]).encode(), times=100))
    folder = tmp_path / "deep" / "folder"
    before = tree(tmp_path / "source")
    asked = Asked()
    with bounded():
        asked(download, REPO, folder)
    escaped = [path for path in [*tmp_path.rglob("*"), *Path("/tmp").glob("escaped*")] if "escaped" in path.name]
    assert not escaped
    assert tree(tmp_path / "source") == before
    if name.startswith("."):
        assert asked.outcome in ("sound", "FormatError")
        assert not (folder / name).exists()
    else:
        assert asked.outcome in ("FormatError", "NetworkError")
        assert not folder.exists()


def test_twins_in_a_listing(whole: HubServer, tmp_path: Path) -> None:
    whole.commit(REPO.id, "main", "twin", {"Config.json": b"{}"})
    with pytest.raises(FormatError, match=r"differ in case only.*--ignore"):
        download(REPO, tmp_path / "folder")
    assert not (tmp_path / "folder").exists()
    download(REPO, tmp_path / "folder", ignore=["Config.json"])


def test_a_listing_without_end(whole: HubServer) -> None:
    """Pages that each name a next one are not read for ever."""
    page = [{"type": "file", "path": f"x{n}.json", "size": 1, "oid": "0" * 40} for n in range(20_000)]
    link = {"Link": f'<{whole.url}/api/models/org/glm/tree/main?cursor=1>; rel="next"'}
    whole.faults.append(Fault(TREE, body=json.dumps(page).encode(), headers=link, times=10_000))
    with bounded(60), pytest.raises(NetworkError, match=f"{MOST_LISTED:,}"):
        read_snapshot(REPO)
    assert len(whole.requests) < 20


@pytest.mark.parametrize("commit", ["../../etc", "main", "", 5, None, "7" * 39, "\x1b[2J"])
def test_a_commit_that_is_none(whole: HubServer, commit: object) -> None:
    whole.faults.append(Fault(INFO, body=json.dumps({**answers(whole)[INFO], "sha": commit}).encode(), times=10))
    with pytest.raises(R7Error, match=r"commit|answer"):
        read_snapshot(REPO)
