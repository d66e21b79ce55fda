"""push: a sealed and verified folder to a repository, so that the branch never looks whole before it is.

Weights go up first, in commits of bounded size; index, config, manifest, verdict and card come together in the last one.
A push that was cut is repeated: what the Hub shows with the right digest is not sent again. At the end every digest the
Hub lists is compared with the manifest.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from r7convert.address import Repo
from r7convert.branch import Branch, Outgoing, find_repo, open_branch
from r7convert.card import CARD, render_card
from r7convert.checkpoint import CONFIG, HF_QUANT_CONFIG, INDEX, QUANT_CONFIG, SHARD, read_checkpoint
from r7convert.errors import Offences, ResourceError, UsageError, VerifyError, complain
from r7convert.hub import Snapshot, hub_api, patiently, read_snapshot, speaking
from r7convert.journal import MANIFEST, VERDICT, Manifest, manifest_digest, read_manifest
from r7convert.progress import Progress
from r7convert.slab_layout import SIDECAR
from r7convert.store import hash_file
from r7convert.targets import TIER_MAP
from r7convert.verdict import check_verdict

Json = Any

# A file over 50 GB cannot be fetched without xet; a folder over 10,000 files is refused by the Hub.
MOST_FILE_BYTES = 50_000_000_000
MOST_FILES = 10_000
# Commits of hundreds of large files time out; a lost one costs at most this much to repeat.
COMMIT_FILES = 64
COMMIT_BYTES = 50_000_000_000
# What makes a branch look like a checkpoint to a reader.
LOOKS_WHOLE = (CONFIG, INDEX, QUANT_CONFIG)
DRAFT_NOTE = "Opened by r7convert. A draft until every file is there: config and index come in the last commit."
WRITTEN = (CONFIG, QUANT_CONFIG, INDEX, TIER_MAP, SIDECAR, MANIFEST, VERDICT)
_SECRETS = re.compile(rb"\bhf_[A-Za-z0-9]{20,}")


@dataclass(frozen=True, slots=True)
class Parcel:
    """A folder ready to be sent: its weights, and what comes in the last commit."""

    folder: Path
    seal: str
    weights: tuple[Outgoing, ...]
    rest: tuple[Outgoing, ...]

    @property
    def files(self) -> tuple[Outgoing, ...]:
        return self.weights + self.rest


@dataclass(frozen=True, slots=True)
class Pushed:
    """What a push did, or with `dry_run` would do."""

    repo: str
    ref: str
    commit: str
    url: str
    sent: tuple[str, ...]
    already_there: int
    sent_bytes: int
    commits: int
    tag: str | None
    dry_run: bool = False

    def to_json(self) -> Json:
        names = ("repo", "ref", "commit", "url", "already_there", "sent_bytes", "commits", "tag", "dry_run")
        return {name: getattr(self, name) for name in names} | {"sent": list(self.sent)}


def push(
    folder: Path,
    repo: Repo,
    *,
    private: bool = False,
    create_pr: bool = False,
    replace: bool = False,
    tag: str | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Pushed:
    """Send a folder to `repo` (its revision being the branch), resuming an earlier push of the same folder.

    Raises:  VerifyError (unsealed, unverified or changed; or the Hub's digests differ at the end), UsageError (the branch
             holds another checkpoint), ResourceError (over the Hub's limits), NetworkError.
    """
    progress = progress or Progress()
    parcel = pack(folder, repo.id)
    before = find_repo(repo.id)
    check_destination(repo, before, private=private, create_pr=create_pr)
    if tag is not None and before is not None:
        _check_tag(parcel, repo.id, tag)
    if dry_run:
        return _rehearse(parcel, repo, before, create_pr=create_pr, replace=replace, tag=tag)
    title = f"r7convert {parcel.seal[:12]}" if create_pr else None
    branch = open_branch(repo.id, private=private, revision=repo.revision, pull_request_title=title, note=DRAFT_NOTE)
    if not branch.fresh and not replace:
        check_vacant(parcel, branch.head, branch.ref)
    todo = branch.missing(parcel.files)
    progress.start(sum(file.record.size for file in todo), str(repo))
    commits = 0
    for batch in _batches([file for file in todo if file in parcel.weights]):
        message = f"Weights, {len(batch)} of {len(parcel.weights)} files"
        commits += branch.commit(batch, message, delete=take_down(parcel, branch.head))
        progress.advance(sum(file.record.size for file in batch), batch[-1].name)
    foreign = find_foreign(parcel, branch.head)
    commits += branch.commit(parcel.rest, f"Config, index and card; seal {parcel.seal[:12]}", delete=foreign)
    progress.advance(sum(file.record.size for file in todo if file in parcel.rest), CONFIG)
    check_remote(parcel, branch.head)
    branch.publish()
    if tag is not None:
        _tag(branch, parcel, tag)
    progress.finish()
    sent = tuple(file.name for file in todo)
    sent_bytes = sum(file.record.size for file in todo)
    return Pushed(repo.id, branch.ref, branch.head.commit, branch.url, sent, len(parcel.files) - len(todo), sent_bytes, commits, tag)


def pack(folder: Path, repo: str) -> Parcel:
    """The files of a sealed and verified folder, in two lots.

    Raises:  FormatError (no seal), UsageError (made with --layers), VerifyError (no good verdict, a file missing or of another
             size, a secret in it), ResourceError (over the Hub's limits).
    """
    manifest = read_manifest(folder)
    verdict = check_verdict(folder)
    if manifest.facts.get("partial"):
        raise UsageError(complain(folder, "a part of a checkpoint", expected="all layers", found=manifest.facts["partial"]))
    bad = Offences()
    for name, record in manifest.files.items():
        if name == CARD:
            continue
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if size != record.size:
            bad.add(path, "size", expected=record.size, found=size, do="The folder changed since it was sealed: verify again.")
    bad.check(VerifyError)
    for name, record in manifest.files.items():
        if record.size > MOST_FILE_BYTES:
            bad.add(name, "size of one file", expected=f"at most {MOST_FILE_BYTES:,} bytes", found=f"{record.size:,}")
    if len(manifest.files) + 3 > MOST_FILES:
        bad.add(folder, "files", expected=f"at most {MOST_FILES:,} in a repository's folder", found=len(manifest.files) + 3)
    bad.check(ResourceError)
    seal = manifest_digest(folder)
    outgoing = [Outgoing(name, folder / name, record) for name, record in manifest.files.items() if name != CARD]
    outgoing += [Outgoing(name, folder / name, hash_file(folder / name)) for name in (MANIFEST, VERDICT)]
    outgoing.append(Outgoing.of_bytes(CARD, make_card(folder, repo, manifest, verdict)))
    weights = tuple(file for file in outgoing if file.name.endswith(SHARD))
    rest = tuple(file for file in outgoing if not file.name.endswith(SHARD))
    check_no_secrets(rest, folder)
    return Parcel(folder, seal, weights, rest)


def make_card(folder: Path, repo: str, manifest: Manifest, verdict: Json) -> bytes:
    """The card of a sealed folder; K comes from the payload's headers."""
    readme = folder / CARD
    before = readme.read_text(encoding="utf-8-sig", errors="replace") if readme.is_file() else ""
    census = {layer: found.bits for layer, found in read_checkpoint(folder).experts.items()}
    return render_card(repo, manifest, verdict, before, census).encode()


def check_no_secrets(files: Sequence[Outgoing], folder: Path) -> None:
    """Raises:  VerifyError if a text holds a token, or one that r7convert wrote tells where on this machine it was made."""
    private = [str(place).encode() for place in (Path.home(), folder.resolve()) if len(str(place)) > 5]
    token = os.environ.get("HF_TOKEN", "").encode()
    bad = Offences()
    for file in files:
        if not file.name.endswith((".json", ".md")) or file.record.size > 1 << 27:
            continue
        data = file.data if isinstance(file.data, bytes) else file.data.read_bytes()
        if _SECRETS.search(data) or (token and token in data):
            bad.add(file.name, "a token of the Hub stands in it", do="Remove it, and revoke the token.")
        elif file.name in WRITTEN and any(word in data for word in private):
            bad.add(file.name, "a path of this machine stands in it", do="Remove it from the source, and convert again.")
    bad.check(VerifyError)


def take_down(parcel: Parcel, head: Snapshot) -> list[str]:
    """What would make the branch look like a checkpoint in the middle of this push: config and index, while weights are due."""
    if all(file.is_there(head.files.get(file.name)) for file in parcel.weights):
        return []
    return [name for name in LOOKS_WHOLE if name in head.files]


def find_foreign(parcel: Parcel, head: Snapshot) -> list[str]:
    """Files of another checkpoint that would stay beside this one: shards and what describes them, a stamp that poisons."""
    ours = {file.name for file in parcel.files}
    shards = {name for name in head.files if name.endswith(SHARD) and name not in ours}
    beside = {name.removesuffix(SHARD) + ".json" for name in shards} | {HF_QUANT_CONFIG, SIDECAR, TIER_MAP, VERDICT}
    return sorted(shards | {name for name in beside if name in head.files and name not in ours})


def check_remote(parcel: Parcel, head: Snapshot) -> None:
    """Raises:  VerifyError naming what the Hub lists with another digest, or not at all."""
    bad = Offences()
    for file in parcel.files:
        remote = head.files.get(file.name)
        if not file.is_there(remote):
            found = "no such file" if remote is None else remote.sha256 or f"git blob {remote.git_oid}"
            bad.add(f"{head.repo}@{head.commit[:12]}: {file.name}", "digest", expected=file.record.sha256, found=found, do="Push again.")
    for name in find_foreign(parcel, head):
        bad.add(f"{head.repo}@{head.commit[:12]}: {name}", "no part of this checkpoint", do="Delete the file on the Hub.")
    bad.check(VerifyError)


def check_destination(repo: Repo, before: Snapshot | None, *, private: bool, create_pr: bool) -> None:
    """Raises:  UsageError for wishes that contradict each other or what is there."""
    if create_pr and repo.revision is not None:
        raise UsageError(complain("--create-pr", "a pull request goes to the default branch", do="Drop --revision or --create-pr."))
    if create_pr and before is None:
        raise UsageError(complain(repo.id, "no such repository", do="Push without --create-pr to make it."))
    if before is not None and private and not before.private:
        raise UsageError(complain(repo.id, "visibility", expected="private", found="public", do="Change it on the Hub, or drop --private."))


def check_vacant(parcel: Parcel, head: Snapshot, ref: str) -> None:
    """Raises:  UsageError if readers of the branch would see another checkpoint broken, or two mixed."""
    if obstacles := [*take_down(parcel, head), *find_foreign(parcel, head)]:
        shown = ", ".join(obstacles[:3]) + (f" and {len(obstacles) - 3} more" if len(obstacles) > 3 else "")
        raise UsageError(
            complain(
                f"{head.repo}@{ref}",
                "the branch holds another checkpoint",
                expected="no config, index or shards but ours",
                found=shown,
                do="Use --revision BRANCH or --create-pr, or --replace to take it down while the new weights go up.",
            )
        )


def _rehearse(parcel: Parcel, repo: Repo, before: Snapshot | None, *, create_pr: bool, replace: bool, tag: str | None) -> Pushed:
    """What a push would do; reads the Hub and writes nothing, here or there."""
    head, ref, fresh = before, "a new pull request" if create_pr else repo.revision or "main", before is None or create_pr
    if before is not None and repo.revision is not None and not create_pr:
        with speaking(repo):
            refs = patiently(lambda: hub_api().list_repo_refs(repo.id))
        fresh = all(ref.name != repo.revision for ref in refs.branches)
        head = before if fresh else read_snapshot(repo)
    if head is not None and not fresh and not replace:
        check_vacant(parcel, head, ref)
    shown = head.files if head is not None else {}
    todo = [file for file in parcel.files if not file.is_there(shown.get(file.name))]
    commits = len(list(_batches([file for file in todo if file in parcel.weights]))) + any(file in parcel.rest for file in todo)
    url = f"{hub_api().endpoint}/{repo.id}"
    sent_bytes = sum(file.record.size for file in todo)
    names = tuple(file.name for file in todo)
    return Pushed(repo.id, ref, "", url, names, len(parcel.files) - len(todo), sent_bytes, commits, tag, dry_run=True)


def _batches(files: Sequence[Outgoing]) -> Iterator[list[Outgoing]]:
    batch: list[Outgoing] = []
    for file in files:
        if batch and (len(batch) == COMMIT_FILES or sum(f.record.size for f in batch) + file.record.size > COMMIT_BYTES):
            yield batch
            batch = []
        batch.append(file)
    if batch:
        yield batch


def _check_tag(parcel: Parcel, repo: str, tag: str) -> bool:
    """True if the tag is there and shows this very checkpoint.

    Raises:  UsageError if it shows another one.
    """
    with speaking(repo):
        taken = {found.name: found.target_commit for found in patiently(lambda: hub_api().list_repo_refs(repo)).tags}
    if tag not in taken:
        return False
    head = read_snapshot(Repo(repo, taken[tag]))
    if any(not file.is_there(head.files.get(file.name)) for file in parcel.files):
        raise UsageError(complain(f"{repo}: --tag {tag}", "tag is taken", expected="a new tag", found=f"one at {taken[tag][:12]}"))
    return True


def _tag(branch: Branch, parcel: Parcel, tag: str) -> None:
    if _check_tag(parcel, branch.repo, tag):
        return
    with speaking(f"{branch.repo}: tag {tag}"):
        patiently(lambda: hub_api().create_tag(branch.repo, tag=tag, revision=branch.head.commit, exist_ok=True))
