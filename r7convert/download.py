"""download: the files of a repository that a conversion needs, whole and proven, in one folder.

The commit is resolved once and everything comes from it: a branch that moves meanwhile does not mix two versions. Each
file is checked against the Hub's own digest as soon as it has arrived, while it is still in the page cache.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from r7convert.address import RECEIPT, Repo
from r7convert.checkpoint import INDEX
from r7convert.errors import FormatError, InputError, NetworkError, Offences, UsageError, complain
from r7convert.format import layer_of
from r7convert.hub import LIBRARY, HubFile, Snapshot, Stop, patiently, read_snapshot, read_whole, speaking, transfer_bar
from r7convert.journal import Journal, locked, read_journal
from r7convert.progress import Progress
from r7convert.store import (
    MAX_JSON_BYTES,
    FileRecord,
    check_free_space,
    check_not_pointer,
    check_plain_name,
    find_twins,
    read_json,
    strict_json,
    sync_folder,
    write_json,
)

Json = Any

WORKERS = 4
GRACE_S = 2.0
# Other weights and pictures: nothing that a conversion reads or carries.
OTHER_WEIGHTS = frozenset({".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".h5", ".msgpack", ".npz", ".npy", ".parquet"})
PICTURES = frozenset({".png", ".jpg", ".jpeg", ".gif", ".webp", ".svg", ".mp4", ".pdf"})
_SIDECAR = re.compile(r"(.+-layer-\d+)\.json")


@dataclass(frozen=True, slots=True)
class Selection:
    """Which files of a snapshot are fetched, and which are left out."""

    files: list[HubFile]
    left_out: list[str]

    @property
    def total_bytes(self) -> int:
        return sum(file.size for file in self.files)


@dataclass(frozen=True, slots=True)
class Downloaded:
    """What a download did. `fetched_bytes` is less than `total_bytes` where files stood already."""

    repo: str
    revision: str
    commit: str
    files: dict[str, FileRecord]
    left_out: list[str]
    total_bytes: int
    fetched_bytes: int
    dry_run: bool = False

    def to_json(self) -> Json:
        files = {name: {"size": r.size, "sha256": r.sha256} for name, r in sorted(self.files.items())}
        facts = {"repo": self.repo, "revision": self.revision, "commit": self.commit, "total_bytes": self.total_bytes}
        return facts | {"fetched_bytes": self.fetched_bytes, "dry_run": self.dry_run, "left_out": self.left_out, "files": files}


def select_files(
    snapshot: Snapshot,
    index: Json | None,
    *,
    layers: Collection[int] | None = None,
    allow: Sequence[str] = (),
    ignore: Sequence[str] = (),
) -> Selection:
    """Config, tokenizer, licence, card, sidecars and the shards that the index names; of these, what `layers` and the
    patterns leave. Patterns are globs over whole names, case-sensitive everywhere; a backslash counts as a slash.

    Raises:  InputError naming the shards of the index that the repository lacks.
    """
    from huggingface_hub.utils import filter_repo_objects

    shards = _wanted_shards(snapshot, index, layers)
    names = []
    for name in snapshot.files:
        suffix = PurePosixPath(name).suffix.lower()
        if name.startswith(".") or suffix in OTHER_WEIGHTS | PICTURES or (suffix == ".safetensors" and name not in shards):
            continue
        sidecar = _SIDECAR.fullmatch(name)
        if sidecar and (partner := f"{sidecar[1]}.safetensors") in snapshot.files and partner not in shards:
            continue
        names.append(check_plain_name(name, snapshot.repo))
    chosen = sorted(filter_repo_objects(names, allow_patterns=list(allow) or None, ignore_patterns=list(ignore) or None))
    if twins := find_twins(chosen):
        do = "Leave one of them out with --ignore."
        raise FormatError(complain(snapshot.repo, "files whose names differ in case only", expected="one", found=twins, do=do))
    return Selection([snapshot.files[name] for name in chosen], sorted(set(snapshot.files) - set(chosen)))


def _wanted_shards(snapshot: Snapshot, index: Json | None, layers: Collection[int] | None) -> set[str]:
    if index is None:
        return {name for name in snapshot.files if name.endswith(".safetensors")}
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError(complain(f"{snapshot.repo}: {INDEX}", "weight_map", expected="an object of tensor: file", found="none"))
    shards = {check_plain_name(name, f"{snapshot.repo}: {INDEX}") for name in weight_map.values()}
    missing = Offences()
    for name in sorted(shards - set(snapshot.files)):
        missing.add(
            f"{snapshot.repo}@{snapshot.commit[:12]}", "the index names a file that the repository lacks", expected=name, found="none"
        )
    missing.check(InputError)
    if layers is None:
        return shards
    return {file for tensor, file in weight_map.items() if (layer := layer_of(tensor)) is None or layer in layers}


def download(
    repo: Repo,
    folder: Path,
    *,
    layers: Collection[int] | None = None,
    allow: Sequence[str] = (),
    ignore: Sequence[str] = (),
    restart: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Downloaded:
    """Fetch what a conversion needs into `folder`, resuming an earlier download of the same revision at its commit.

    Raises:  NetworkError, InputError (an incomplete repository, pointers in place of files), ResourceError (no room),
             UsageError (the folder holds something else).
    """
    progress = progress or Progress()
    unfinished, done = (None, {}) if restart else read_journal(folder)
    snapshot = _snapshot_to_finish(repo, unfinished, progress)
    index = strict_json(read_whole(snapshot, INDEX, MAX_JSON_BYTES), INDEX) if INDEX in snapshot.files else None
    selection = select_files(snapshot, index, layers=layers, allow=allow, ignore=ignore)
    if not selection.files:
        raise UsageError(complain(repo, "nothing to download", expected="files that the patterns let through", found="none"))
    known = {} if restart else _receipt_files(folder) | done
    todo = [file for file in selection.files if not _stands(folder / file.name, file, known)]
    need_bytes = sum(file.size for file in todo)
    if not restart:
        _check_ours(folder, todo, known)
    if not dry_run:
        check_free_space(folder, need_bytes)
        with locked(folder):
            fingerprint = {"command": "download", "repo": repo.id, "revision": snapshot.revision, "commit": snapshot.commit}
            journal = Journal(folder, fingerprint, restart=restart)
            _sweep(folder)
            _fetch_all(snapshot, todo, folder, journal, progress)
            known |= journal.done
            _write_receipt(folder, snapshot, selection, known)
            journal.close()
    files = {file.name: known.get(file.name) or FileRecord(file.size, file.sha256 or "") for file in selection.files}
    return Downloaded(
        snapshot.repo, snapshot.revision, snapshot.commit, files, selection.left_out, selection.total_bytes, need_bytes, dry_run
    )


def _snapshot_to_finish(repo: Repo, unfinished: Json | None, progress: Progress) -> Snapshot:
    """The snapshot now, or the one that an unfinished download of the same revision began with."""
    snapshot = read_snapshot(repo)
    began = unfinished or {}
    known = isinstance(began.get("commit"), str) and began["commit"] != snapshot.commit
    if not known or (began.get("repo"), began.get("revision")) != (repo.id, snapshot.revision):
        return snapshot
    progress.say(
        f"{repo}: moved from {began['commit'][:12]} to {snapshot.commit[:12]} since this download began; "
        f"finishing {began['commit'][:12]}. Use --restart for the new one."
    )
    return replace(read_snapshot(Repo(repo.id, began["commit"])), revision=snapshot.revision)


def _stands(path: Path, file: HubFile, known: Mapping[str, FileRecord]) -> bool:
    """True if an earlier download proved this very file and it still has its size."""
    record = known.get(file.name)
    if record is None or not path.is_file() or path.stat().st_size != file.size:
        return False
    if file.sha256 is not None:
        return record.sha256 == file.sha256
    try:  # small, and listed by a git id only
        return file.check(path, file.name) == record.sha256
    except NetworkError:
        return False


def _check_ours(folder: Path, todo: Sequence[HubFile], known: Mapping[str, FileRecord]) -> None:
    """Raises:  UsageError if the download would replace files that no download brought."""
    if known or (folder / ".cache" / "huggingface").is_dir():
        return
    foreign = Offences()
    for file in todo:
        if (folder / file.name).exists():
            foreign.add(
                folder / file.name, "already there, and from no download", do="Choose another folder, or use --restart to replace it."
            )
    foreign.check(UsageError)


def _fetch_all(snapshot: Snapshot, todo: Sequence[HubFile], folder: Path, journal: Journal, progress: Progress) -> None:
    """Small files first, so that a wrong repository is seen before the long transfers."""
    stop = threading.Event()
    progress.start(sum(file.size for file in todo), snapshot.repo)
    pool = ThreadPoolExecutor(WORKERS)
    futures: dict[Future[FileRecord], str] = {}
    try:
        for file in sorted(todo, key=lambda f: f.size):
            advance = partial(progress.advance, note=file.name)
            futures[pool.submit(fetch_file, snapshot, file, folder, advance, stop)] = file.name
        for future in as_completed(futures):
            journal.record(futures[future], future.result())
    except BaseException:
        stop.set()
        pool.shutdown(wait=False, cancel_futures=True)
        ended, _ = wait(futures, timeout=GRACE_S)  # no longer: a stalled server would hold an interrupted run for minutes
        for future in ended:  # what was whole at that moment need not come again
            if not future.cancelled() and future.exception() is None and futures[future] not in journal.done:
                journal.record(futures[future], future.result())
        raise
    pool.shutdown()
    progress.finish()


def fetch_file(snapshot: Snapshot, file: HubFile, folder: Path, advance: Callable[[int], None], stop: threading.Event) -> FileRecord:
    """One file into `folder`, proven. Bytes that differ from the listing are thrown away and fetched once more.

    Raises:  NetworkError, FormatError (a pointer), ResourceError; Stop once `stop` is set.
    """
    from huggingface_hub import hf_hub_download

    where, bar = f"{snapshot.repo}: {file.name}", transfer_bar(advance, stop)
    get = partial(hf_hub_download, snapshot.repo, file.name, revision=snapshot.commit, local_dir=folder, tqdm_class=bar, **LIBRARY)

    def attempt(again: bool) -> None:
        if stop.is_set():
            raise Stop
        get(force_download=again)

    for again in (False, True):
        with speaking(where):
            patiently(partial(attempt, again))
        path = folder / file.name
        try:
            sha256 = file.check(path, where)
        except NetworkError:
            path.unlink(missing_ok=True)
            if again:
                raise
            continue
        with path.open("rb") as opened:
            check_not_pointer(opened.read(64), where)
            os.fsync(opened.fileno())  # the client does not, and the journal is about to say that the file is there
        sync_folder(folder)
        return FileRecord(file.size, sha256)
    raise AssertionError("unreachable")


def _write_receipt(folder: Path, snapshot: Snapshot, selection: Selection, known: Mapping[str, FileRecord]) -> None:
    files = {f.name: {"size": known[f.name].size, "sha256": known[f.name].sha256} for f in selection.files}
    (folder / RECEIPT).parent.mkdir(parents=True, exist_ok=True)
    write_json(folder / RECEIPT, {"repo": snapshot.repo, "revision": snapshot.revision, "commit": snapshot.commit, "files": files})


def _receipt_files(folder: Path) -> dict[str, FileRecord]:
    """What an earlier, finished download brought: its receipt, or nothing where there is none of ours."""
    try:
        files = read_json(folder / RECEIPT)["files"]
        return {name: FileRecord(entry["size"], entry["sha256"]) for name, entry in files.items()}
    except (FormatError, LookupError, TypeError, AttributeError):
        return {}


def _sweep(folder: Path) -> None:
    """The client names its temporary files anew each time and never takes one up again: after a kill they are only waste."""
    for left in (folder / ".cache" / "huggingface" / "download").glob("*.incomplete"):
        left.unlink(missing_ok=True)
