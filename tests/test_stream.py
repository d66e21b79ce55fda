"""repack --stream against a loopback Hub: the same folder as the long way, within the bound, whatever cuts it short; and
--push-as-you-go: a branch that never looks whole before it is.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from r7convert.address import Repo
from r7convert.download import download
from r7convert.errors import NetworkError, ResourceError, UsageError, VerifyError
from r7convert.fetcher import Fetcher
from r7convert.hub import Stop, read_snapshot
from r7convert.journal import MANIFEST
from r7convert.push import LOOKS_WHOLE
from r7convert.repack import repack
from r7convert.sample import write_sample
from r7convert.source import Step
from r7convert.stream import stream
from r7convert.verify import verify
from tests.hub_server import Fault, HubServer

SOURCE, TARGET = Repo("org/glm"), Repo("org/out")
CHOICES: dict[str, Any] = {"target": "rank-sliced", "tp": 2}


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight small R7 layers of one K an expert, each in its own shard, carried tensors a file a layer, and a tail."""
    folder = tmp_path_factory.mktemp("stream") / "src"
    write_sample(folder, mode="uniform,odd", layers=9, dense=1, split=True, hidden=128, intermediate=256, experts=16)
    return folder


@pytest.fixture
def published(hub: HubServer, sample: Path) -> str:
    extra = {"plot.png": b"P", "model.gguf": b"G" * 100}
    return hub.add_repo(SOURCE.id, {path.name: path.read_bytes() for path in sample.iterdir()} | extra)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, sample: Path) -> Callable[[str], dict[str, bytes]]:
    """What the long way makes of the sample at a commit: download's receipt and `repack`."""
    made: dict[str, dict[str, bytes]] = {}

    def make(commit: str) -> dict[str, bytes]:
        if commit not in made:
            work = tmp_path_factory.mktemp("long")
            shutil.copytree(sample, work / "src")
            (work / "src/.cache/r7convert").mkdir(parents=True)
            (work / "src/.cache/r7convert/download.json").write_text(f'{{"repo": "{SOURCE.id}", "commit": "{commit}"}}')
            repack(work / "src", work / "out", **CHOICES)
            made[commit] = bytes_of(work / "out")
        return made[commit]

    return make


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


PAYLOAD = (".safetensors", ".incomplete", ".partial")


class Gauge:
    """The bytes of payload under a folder at most, asked for as fast as can be."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.peak = self.looks = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Gauge:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.is_set():
            total = 0
            for where, _, names in os.walk(self.folder):  # it does not mind what vanishes under it
                for name in names:
                    with contextlib.suppress(OSError):
                        total += (Path(where) / name).stat().st_size if name.endswith(PAYLOAD) else 0
            self.peak, self.looks = max(self.peak, total), self.looks + 1
            time.sleep(0.001)


def largest(sample: Path) -> int:
    return max(path.stat().st_size for path in sample.glob("*.safetensors"))


def test_the_same_folder_as_the_long_way(
    hub: HubServer, published: str, expected: Callable[[str], dict[str, bytes]], sample: Path, tmp_path: Path
) -> None:
    got = download(SOURCE, tmp_path / "src")
    repack(tmp_path / "src", tmp_path / "long", **CHOICES)
    assert bytes_of(tmp_path / "long") == expected(got.commit)
    hub.requests.clear()
    done = stream(SOURCE, tmp_path / "out", **CHOICES)
    assert bytes_of(tmp_path / "out") == expected(published)
    assert [path.name for path in (tmp_path / "out").iterdir() if path.is_dir()] == []
    assert verify(tmp_path / "out", source=sample).ok
    assert done.peak_bytes < sum(path.stat().st_size for path in sample.glob("*.safetensors")) / 2
    whole = [r for r in hub.asked("GET /cdn/") if r.range is None]
    assert len(whole) <= len({r.path for r in whole}) + 1, "only the tail's shard is needed by two steps far apart"


def test_the_bound_holds_and_too_small_a_one_is_refused(
    hub: HubServer, published: str, expected: Callable[[str], dict[str, bytes]], sample: Path, tmp_path: Path
) -> None:
    with pytest.raises(ResourceError, match=r"--max-disk: room for one step: expected at least [\d,]+ bytes, got 1,000"):
        stream(SOURCE, tmp_path / "none", max_disk_bytes=1000, **CHOICES)
    bound = largest(sample)
    with Gauge(tmp_path / "out" / ".r7convert") as gauge:
        done = stream(SOURCE, tmp_path / "out", max_disk_bytes=bound, **CHOICES)
    assert bytes_of(tmp_path / "out") == expected(published)
    assert gauge.looks > 20
    assert 0 < gauge.peak <= bound
    assert 0 < done.peak_bytes <= bound


@pytest.mark.parametrize("after", [0, 3, 9, 17])
def test_a_run_cut_short_goes_on_where_it_stopped(
    hub: HubServer, published: str, expected: Callable[[str], dict[str, bytes]], tmp_path: Path, after: int
) -> None:
    hub.faults.append(Fault("GET /cdn/", ranged=False, skip=after, status=403, times=1000))
    with pytest.raises(NetworkError, match="status 403"):
        stream(SOURCE, tmp_path / "out", **CHOICES)
    assert not (tmp_path / "out" / MANIFEST).exists()
    there = set(bytes_of(tmp_path / "out"))
    hub.faults.clear()
    hub.requests.clear()
    moved = hub.commit(SOURCE.id, "main", "moved", {"config.json": b"{}"})
    done = stream(SOURCE, tmp_path / "out", **CHOICES)
    assert len(there) - 4 <= done.repacked.resumed <= len(there)
    assert bytes_of(tmp_path / "out") == expected(published), "at the commit it began with"
    assert not hub.asked(f"/resolve/{moved}/")


def test_faults_on_the_way(hub: HubServer, published: str, expected: Callable[[str], dict[str, bytes]], tmp_path: Path) -> None:
    hub.faults += [
        Fault("GET /cdn/", ranged=False, skip=1, cut=5000, times=2),
        Fault("GET /cdn/", ranged=False, skip=2, corrupt=True),
        Fault("HEAD /org/glm/resolve/", skip=2, status=429, headers={"Retry-After": "1"}),
        Fault("GET /cdn/", ranged=False, skip=3, status=503, times=2),
        Fault("GET /cdn/", ranged=True, skip=3, status=503, times=2),
    ]
    stream(SOURCE, tmp_path / "out", **CHOICES)
    assert bytes_of(tmp_path / "out") == expected(published)
    assert all(fault.times == 0 for fault in hub.faults)


def test_dry_run_fetches_headers_and_touches_nothing(hub: HubServer, published: str, tmp_path: Path) -> None:
    done = stream(SOURCE, tmp_path / "out", dry_run=True, push_to=TARGET, **CHOICES)
    assert done.repacked.plan.payload_bytes > 1e6
    assert not (tmp_path / "out").exists()
    assert not [r for r in hub.asked("GET /cdn/") if r.range is None]
    assert TARGET.id not in hub.repos


def test_matrices_are_encoded_again_on_the_way(hub: HubServer, tmp_path: Path) -> None:
    write_sample(tmp_path / "src", hidden=128, intermediate=256)
    hub.add_repo(SOURCE.id, {path.name: path.read_bytes() for path in (tmp_path / "src").iterdir()})
    stream(SOURCE, tmp_path / "out", mixed_k="lift", **CHOICES)
    assert verify(tmp_path / "out", source=tmp_path / "src").ok
    long = repack(tmp_path / "src", tmp_path / "long", mixed_k="lift", **CHOICES)
    assert long.plan.reencoded > 0
    weights = {name: data for name, data in bytes_of(tmp_path / "long").items() if name.endswith(".safetensors")}
    assert {name: data for name, data in bytes_of(tmp_path / "out").items() if name.endswith(".safetensors")} == weights


# ---- pushing as it goes -------------------------------------------------------------------------------------------------


def assert_published(hub: HubServer, whole: dict[str, bytes], ref: str = "main") -> None:
    shown = {name: hub.read(TARGET.id, name, ref) for name in hub.files(TARGET.id, ref) if name != ".gitattributes"}
    card = shown.pop("README.md")
    assert b"weights left this machine" in card
    assert shown == {name: data for name, data in whole.items() if name != "README.md"}
    for commit in hub.history(TARGET.id, ref):
        if any(name.startswith("experts-") for name in commit.files) and any(name in commit.files for name in LOOKS_WHOLE):
            assert set(shown) <= set(commit.files), f"commit {commit.title!r} looks whole and is not"


def test_finished_files_go_up_and_are_dropped(
    hub: HubServer,
    published: str,
    expected: Callable[[str], dict[str, bytes]],
    sample: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("r7convert.repack_run.HEADER_ROOM", 60_000)  # a MB a file is little only where files are large
    whole = expected(published)
    bound = 5 * largest(sample) // 2
    assert sum(map(len, whole.values())) > 2.5 * bound
    with Gauge(tmp_path / "out") as gauge:
        done = stream(SOURCE, tmp_path / "out", push_to=TARGET, private=True, max_disk_bytes=bound, **CHOICES)
    assert_published(hub, whole)
    assert hub.repos[TARGET.id].private
    assert gauge.looks > 20
    assert 0 < gauge.peak <= bound
    assert not list((tmp_path / "out").glob("*.safetensors"))
    assert done.url == f"{hub.url}/org/out/commit/{hub.repos[TARGET.id].branches['main']}"
    got = download(TARGET, tmp_path / "again")
    assert got.commit == hub.repos[TARGET.id].branches["main"]
    assert verify(tmp_path / "again", source=sample).ok, "what was published is a folder that verify passes"


@pytest.mark.parametrize("after", [0, 1, 7, 17])
def test_a_push_as_you_go_cut_short_is_finished(
    hub: HubServer, published: str, expected: Callable[[str], dict[str, bytes]], tmp_path: Path, after: int
) -> None:
    whole = expected(published)
    hub.faults.append(Fault("POST .*/commit/", skip=after, status=403, times=1000))
    with pytest.raises(NetworkError, match="status 403"):
        stream(SOURCE, tmp_path / "out", push_to=TARGET, **CHOICES)
    assert len(hub.history(TARGET.id)) == 1 + after
    assert not set(LOOKS_WHOLE) & set(hub.files(TARGET.id))
    hub.faults.clear()
    hub.requests.clear()
    stream(SOURCE, tmp_path / "out", push_to=TARGET, **CHOICES)
    assert_published(hub, whole)
    assert not list((tmp_path / "out").glob("*.safetensors"))
    uploads = [r.path for r in hub.asked("PUT /lfs/")]
    assert len(uploads) == len(set(uploads)), "a file went up twice"
    commits = len(hub.history(TARGET.id))
    again = stream(SOURCE, tmp_path / "out", push_to=TARGET, **CHOICES)
    assert len(hub.history(TARGET.id)) == commits
    assert again.url


def test_a_pull_request_as_you_go(hub: HubServer, published: str, expected: Callable[[str], dict[str, bytes]], tmp_path: Path) -> None:
    hub.add_repo(TARGET.id, {"config.json": b"{}", "old.safetensors": b"O"})
    with pytest.raises(UsageError, match="the branch holds another checkpoint"):
        stream(SOURCE, tmp_path / "out", push_to=TARGET, **CHOICES)
    stream(SOURCE, tmp_path / "out", push_to=TARGET, create_pr=True, **CHOICES)
    assert_published(hub, expected(published), "refs/pr/1")
    assert hub.repos[TARGET.id].pulls[1]["status"] == "open"
    assert set(hub.files(TARGET.id)) == {"config.json", "old.safetensors"}


def test_a_wrong_digest_there_is_named(hub: HubServer, published: str, tmp_path: Path) -> None:
    def meddle() -> None:
        repo = hub.repos[TARGET.id]
        head = repo.commits[repo.branches["main"]]
        name = next(name for name in head.files if name.startswith("experts-"))
        head.files[name] = hub.store(name, b"another")

    hub.faults.append(Fault("POST /api/models/org/out/commit/", skip=17, call=meddle))
    with pytest.raises(VerifyError, match=r"experts-layer-\d+-rank-\d-of-2\.safetensors: digest"):
        stream(SOURCE, tmp_path / "out", push_to=TARGET, **CHOICES)


# ---- the fetcher ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def three(hub: HubServer) -> Repo:
    hub.add_repo("org/three", {name: name.encode() * 1000 for name in ("a", "b", "c")})
    return Repo("org/three")


def test_a_file_that_two_steps_need_is_kept_or_fetched_again_as_room_allows(hub: HubServer, three: Repo, tmp_path: Path) -> None:
    snapshot = read_snapshot(three)
    steps = [Step(("a",), {}), Step(("b", "c"), {}), Step(("a",), {})]
    for bound, fetched in ((3000, 1), (2000, 2)):
        hub.requests.clear()
        with Fetcher(snapshot, tmp_path / "f", bound) as fetcher:
            fetcher.prepare(steps)
            for step in steps:
                for name in step.inputs:
                    assert fetcher.acquire(name).read_bytes() == name.encode() * 1000
                for name in step.inputs:
                    fetcher.release(name)
        assert fetcher.peak_bytes <= bound
        assert len(hub.asked("GET /org/three/resolve/.*/a$")) == fetched
        assert not (tmp_path / "f").exists()


def test_errors_and_ends_wake_who_waits(hub: HubServer, three: Repo, tmp_path: Path) -> None:
    snapshot = read_snapshot(three)
    hub.faults.append(Fault("GET /org/three/resolve/.*/b$", status=403, times=1000))
    with Fetcher(snapshot, tmp_path / "f", None) as fetcher:
        fetcher.prepare([Step(("a",), {}), Step(("b",), {})])
        fetcher.acquire("a")
        fetcher.release("a")
        with pytest.raises(NetworkError, match="status 403"):
            fetcher.acquire("b")
    hub.faults.clear()
    with Fetcher(snapshot, tmp_path / "f", 1000) as fetcher:
        fetcher.prepare([Step(("a",), {}), Step(("b",), {})])
        fetcher.acquire("a")
        threading.Timer(0.1, fetcher.abandon).start()
        with pytest.raises(Stop):
            fetcher.acquire("b")


def test_a_run_of_which_only_the_json_is_left_is_finished(
    hub: HubServer, published: str, expected: Callable[[str], dict[str, bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut after its last payload: there is no step left to make room for."""
    with monkeypatch.context() as patch:
        patch.setattr("r7convert.repack_run.Run.write_json_files", lambda self, journal: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            stream(SOURCE, tmp_path / "out", **CHOICES)
    stream(SOURCE, tmp_path / "out", **CHOICES)
    assert bytes_of(tmp_path / "out") == expected(published)


@pytest.mark.parametrize(
    ("kind", "choices"),
    [
        ({"kind": "rank-sliced", "tail_tp": 2, "equal_tail_vectors": True}, {"target": "rank-sliced", "tp": 4}),
        ({"kind": "rank-sliced", "tail_tp": 4}, {"target": "exl3"}),
        ({"kind": "exl3"}, {"target": "slabs", "tp": 2}),
        ({"kind": "r7", "per_expert_vectors": True, "mtp": "none"}, {"target": "rank-sliced", "tp": 2}),
    ],
    ids=["another tp", "joined", "cut", "own vectors"],
)
def test_every_kind_streams_to_what_repack_makes(hub: HubServer, tmp_path: Path, kind: dict[str, Any], choices: dict[str, Any]) -> None:
    write_sample(tmp_path / "src", mode="uniform", layers=3, dense=1, split=True, hidden=128, intermediate=512, experts=5, **kind)
    commit = hub.add_repo("org/kind", {path.name: path.read_bytes() for path in (tmp_path / "src").iterdir()})
    (tmp_path / "src/.cache/r7convert").mkdir(parents=True)
    (tmp_path / "src/.cache/r7convert/download.json").write_text(f'{{"repo": "org/kind", "commit": "{commit}"}}')
    repack(tmp_path / "src", tmp_path / "long", **choices)
    rehearsed = stream(Repo("org/kind"), tmp_path / "x", dry_run=True, **choices)
    vectors = [request for request in hub.requests if request.status == 206 and request.sent_bytes == 2 * 128]
    assert len(vectors) <= 3 * 3 * 2, "two experts of each projection and layer: all of them would be thousands of a real checkpoint"
    streamed = stream(Repo("org/kind"), tmp_path / "out", **choices)
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "long")
    assert streamed.repacked.plan.accounting == rehearsed.repacked.plan.accounting
    assert verify(tmp_path / "out", source=tmp_path / "src", device="cpu").ok
