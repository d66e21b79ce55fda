"""repack --stream: fetch, convert, drop. A checkpoint on the Hub becomes a folder here without ever standing here itself.

    headers by range requests -> plan -> for each step: fetch its files, write its outputs, drop the files
    --push-as-you-go: finished weights go up and are dropped too; config, index and card follow in one last commit

The same plan, writer, journal and seal as `repack` of a folder, so the outcome is the same to the byte; only the payload comes
through fetcher.py. A killed run goes on with the first output that is not there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from r7convert.address import Repo
from r7convert.branch import Branch, Outgoing, find_repo, open_branch
from r7convert.card import CARD, render_card
from r7convert.checkpoint import Checkpoint, build_checkpoint
from r7convert.errors import UsageError, complain
from r7convert.fetcher import Fetcher
from r7convert.journal import MANIFEST, Manifest, manifest_digest, read_journal, read_manifest
from r7convert.plan import Plan
from r7convert.progress import Progress
from r7convert.push import DRAFT_NOTE, LOOKS_WHOLE, Parcel, check_destination, check_no_secrets, check_remote, check_vacant, find_foreign
from r7convert.remote import RemoteSource
from r7convert.repack import Repacked, choose_plan, execute
from r7convert.store import STATE_DIR, FileRecord, hash_file

Json = Any

FETCHED = "fetched"


@dataclass(frozen=True)
class Streamed:
    """What a streamed run did: as `repack`, the bytes of fetched files on disk at most, and where the outcome went."""

    repacked: Repacked
    peak_bytes: int
    notes: tuple[str, ...]
    url: str | None = None

    def to_json(self) -> Json:
        return {**self.repacked.to_json(), "peak_fetched_bytes": self.peak_bytes, "source_notes": list(self.notes), "url": self.url}


def stream(
    source: Repo,
    output: Path,
    *,
    max_disk_bytes: int | None = None,
    push_to: Repo | None = None,
    private: bool = False,
    create_pr: bool = False,
    dry_run: bool = False,
    restart: bool = False,
    allow_nonfinite: bool = False,
    device: str = "auto",
    reference: Checkpoint | None = None,
    progress: Progress | None = None,
    **choices: Any,
) -> Streamed:
    """Convert a repository into `output`, or through it to `push_to`. `choices` are those of `choose_plan`.

    `max_disk_bytes` bounds what is fetched and not yet dropped; with `push_to` also the outputs that have not gone up. None:
    room for one step while the next one's files come.

    Raises:  as `repack`, `download` and `push`; ResourceError for a bound that has no room for one step.
    """
    progress = progress or Progress()
    remote = RemoteSource(_resume_at(source, output, restart))
    plan = choose_plan(build_checkpoint(remote), reference=reference, **choices)
    notes = tuple(remote.notes)
    if dry_run:
        return Streamed(Repacked(plan, output, dry_run=True), 0, notes)
    if push_to is not None and plan.is_partial:
        raise UsageError(complain("--push-as-you-go", "a part of a checkpoint", expected="all layers", found="--layers"))
    going_up = push_to is not None
    with Fetcher(remote.snapshot, output / STATE_DIR / FETCHED, max_disk_bytes, count_outputs=going_up) as fetcher:
        outlet = _open_outlet(push_to, plan, output, fetcher, private, create_pr, progress) if push_to is not None else None
        done = execute(
            plan,
            fetcher,
            output,
            threads=1,  # fetching bounds the pace, and one job at a time can never wait for another's files
            restart=restart,
            allow_nonfinite=allow_nonfinite,
            device=device,
            reference=reference,
            outlet=outlet,
            progress=progress,
        )
    url = outlet.finish() if outlet is not None else None
    return Streamed(done, fetcher.peak_bytes, notes, url)


def _resume_at(source: Repo, output: Path, restart: bool) -> Repo:
    """The commit that an unfinished run of this source began with, though its branch may have moved since."""
    unfinished, _ = (None, {}) if restart else read_journal(output)
    began = (unfinished or {}).get("files")
    if isinstance(began, dict) and began.get("repo") == source.id and isinstance(began.get("commit"), str):
        return replace(source, revision=began["commit"])
    return source


# ---- pushing as it goes ------------------------------------------------------------------------------------------------


def _open_outlet(
    repo: Repo, plan: Plan, output: Path, fetcher: Fetcher, private: bool, create_pr: bool, progress: Progress
) -> BranchOutlet:
    before = find_repo(repo.id)
    check_destination(repo, before, private=private, create_pr=create_pr)
    names = {file for layer in plan.layers for file in layer.files} | {shard.file for shard in plan.shards}
    commit = plan.checkpoint.source.commit or ""
    title = f"r7convert {plan.target} of {commit[:12]}" if create_pr else None
    branch = open_branch(repo.id, private=private, revision=repo.revision, pull_request_title=title, note=DRAFT_NOTE)
    return BranchOutlet(branch, plan, output, names, fetcher, progress)


class BranchOutlet:
    """Weights go to a branch as they are finished, and from the disk; everything else waits for `finish`."""

    def __init__(self, branch: Branch, plan: Plan, output: Path, weights: set[str], fetcher: Fetcher, progress: Progress) -> None:
        self.branch = branch
        self._plan = plan
        self._output = output
        self._weights = weights
        self._fetcher = fetcher
        self._progress = progress
        seal = output / MANIFEST
        is_ours = seal.exists() and not branch.missing([Outgoing(MANIFEST, seal, hash_file(seal))])
        if not branch.fresh and not is_ours:
            check_vacant(Parcel(output, "", tuple(self._outgoing(name, None) for name in sorted(weights)), ()), branch.head, branch.ref)

    def has(self, name: str, record: FileRecord) -> bool:
        return name in self._weights and self._outgoing(name, record).is_there(self.branch.head.files.get(name))

    def send(self, files: Mapping[str, FileRecord]) -> None:
        """Commit finished weights, then drop them here. A kill in between finds them there next time, and drops them then."""
        going = [self._outgoing(name, record) for name, record in sorted(files.items()) if name in self._weights]
        if not going:
            return
        old = [name for name in LOOKS_WHOLE if name in self.branch.head.files]
        self.branch.commit(going, f"Weights: {going[0].name}", delete=old)
        for file in going:
            (self._output / file.name).unlink(missing_ok=True)
            self._fetcher.sent(file.name)
        self._progress.say(f"{self.branch.repo}: {', '.join(file.name for file in going)}")

    def finish(self) -> str:
        """The last commit: everything but weights, the card included. Returns the URL.

        Raises:  VerifyError if the Hub's digests are not the manifest's.
        """
        manifest = read_manifest(self._output)
        left = {name: record for name, record in manifest.files.items() if name in self._weights and (self._output / name).exists()}
        self.send(left)
        names = [name for name in manifest.files if name not in self._weights]
        rest = [self._outgoing(name, manifest.files[name]) for name in names]
        rest.append(Outgoing(MANIFEST, self._output / MANIFEST, hash_file(self._output / MANIFEST)))
        rest.append(Outgoing.of_bytes(CARD, self._card(manifest)))
        check_no_secrets(rest, self._output)
        weights = tuple(self._outgoing(name, manifest.files[name]) for name in sorted(self._weights))
        parcel = Parcel(self._output, manifest_digest(self._output), weights, tuple(rest))
        foreign = find_foreign(parcel, self.branch.head)
        self.branch.commit(rest, f"Config, index and card; seal {parcel.seal[:12]}", delete=foreign)
        check_remote(parcel, self.branch.head)
        self.branch.publish()
        return self.branch.url

    def _outgoing(self, name: str, record: FileRecord | None) -> Outgoing:
        return Outgoing(name, self._output / name, record or FileRecord(-1, ""))

    def _card(self, manifest: Manifest) -> bytes:
        readme = self._output / CARD
        before = readme.read_text(encoding="utf-8-sig", errors="replace") if readme.is_file() else ""
        census = {layer: found.bits for layer, found in self._plan.checkpoint.experts.items()}
        census |= {layer.layer: tuple((row[0], row[1], row[2]) for row in layer.bits) for layer in self._plan.layers}
        return render_card(self.branch.repo, manifest, self._verdict(), before, census).encode()

    def _verdict(self) -> Json:
        """What can be said without the weights at hand: every byte was hashed on its way out and compared with the Hub's digest."""
        why = "the weights left this machine as they were finished; `r7convert verify` on a download judges them"
        seal = {"name": "seal", "state": "passed", "scope": ["SHA-256 taken while writing, compared with the Hub's listing"]}
        rest = [{"name": name, "state": "skipped", "why": why} for name in ("contract", "bytes", "numbers")]
        return {"manifest_sha256": manifest_digest(self._output), "parts": [seal, *rest]}
