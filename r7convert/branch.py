"""Where a push goes: a branch or pull request of a repository, written in commits that can each be lost and repeated.

Every commit names the head it was made on, and before each try the head is read anew: a commit whose answer was lost is
found to be there, and a branch that somebody else moved is seen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from r7convert.address import Repo
from r7convert.errors import UsageError, VerifyError, complain
from r7convert.hub import HubFile, Snapshot, hub_api, patiently, read_snapshot, speaking
from r7convert.store import FileRecord, hash_file


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A file to be sent: its name there, a path or the bytes themselves, and what is known of them."""

    name: str
    data: Path | bytes
    record: FileRecord

    @classmethod
    def of_bytes(cls, name: str, data: bytes) -> Outgoing:
        return cls(name, data, FileRecord(len(data), hashlib.sha256(data).hexdigest()))

    def is_there(self, remote: HubFile | None) -> bool:
        """True if the Hub's digest of the file is ours."""
        if remote is None or remote.size != self.record.size:
            return False
        return remote.sha256 == self.record.sha256 if remote.sha256 else remote.git_oid == self._git_oid()

    def _git_oid(self) -> str:
        data = self.data if isinstance(self.data, bytes) else self.data.read_bytes()
        return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def check_same(file: Outgoing, sha256: str, repo: str) -> None:
    """Raises:  VerifyError if the file is no longer what its record says."""
    if sha256 != file.record.sha256:
        do = "The file changed since it was sealed: verify again."
        raise VerifyError(complain(f"{repo}: {file.name}", "sha256 at upload", expected=file.record.sha256, found=sha256, do=do))


@dataclass(slots=True)
class Branch:
    """A branch, or the ref of a pull request. `fresh` means that this push created it, so that nobody reads it yet."""

    repo: str
    ref: str
    fresh: bool
    pull_request: int | None = None
    head: Snapshot = field(init=False)
    commit_url: str = field(init=False, default="")

    def __post_init__(self) -> None:
        self.refresh()

    def refresh(self) -> Snapshot:
        self.head = read_snapshot(Repo(self.repo, self.ref))
        return self.head

    def missing(self, files: Sequence[Outgoing]) -> list[Outgoing]:
        """Those whose digest the branch does not show."""
        return [file for file in files if not file.is_there(self.head.files.get(file.name))]

    def commit(self, files: Sequence[Outgoing], message: str, *, delete: Sequence[str] = ()) -> bool:
        """Make the branch show `files` and none of `delete`; False if it did already.

        Raises:  VerifyError if a file is no longer what its record says; NetworkError.
        """
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        api, hashed = hub_api(), False

        def attempt() -> bool:
            nonlocal hashed
            self.refresh()
            todo, gone = self.missing(files), [name for name in delete if name in self.head.files]
            if not todo and not gone:
                return hashed
            additions = [CommitOperationAdd(file.name, file.data) for file in todo]
            if hashed:  # at an earlier try; a terabyte is not read twice
                for addition, file in zip(additions, todo, strict=True):
                    addition.upload_info.sha256 = bytes.fromhex(file.record.sha256)
            try:
                api.preupload_lfs_files(self.repo, additions, revision=self.ref)
            except RuntimeError:  # the client's word for whatever ended an upload: the Hub takes no bytes but those it was told of
                for file in todo:
                    check_same(file, hash_file(file.data).sha256 if isinstance(file.data, Path) else file.record.sha256, self.repo)
                raise
            for addition, file in zip(additions, todo, strict=True):
                check_same(file, addition.upload_info.sha256.hex(), self.repo)
            hashed = True
            operations = [*additions, *(CommitOperationDelete(name) for name in gone)]
            info = api.create_commit(self.repo, operations, commit_message=message, revision=self.ref, parent_commit=self.head.commit)
            self.commit_url = info.commit_url
            return True

        with speaking(f"{self.repo}@{self.ref}"):
            changed = patiently(attempt)
        self.refresh()
        return changed

    def publish(self) -> None:
        """Take a pull request out of its draft state, now that it is whole."""
        if self.pull_request is None:
            return
        api, number = hub_api(), self.pull_request
        with speaking(f"{self.repo}: pull request {number}"):
            details = patiently(lambda: api.get_discussion_details(self.repo, number))
            if details.status == "draft":
                patiently(lambda: api.change_discussion_status(self.repo, number, "open"))

    @property
    def url(self) -> str:
        """Of the pull request if there is one, of the last commit otherwise."""
        base = f"{hub_api().endpoint}/{self.repo}"
        if self.pull_request is not None:
            return f"{base}/discussions/{self.pull_request}"
        return self.commit_url or f"{base}/commit/{self.head.commit}"


def find_repo(repo: str) -> Snapshot | None:
    """The default branch of a repository, or None where there is no such repository (or none that we may see)."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    api = hub_api()
    with speaking(repo):
        try:
            patiently(lambda: api.model_info(repo))
        except GatedRepoError:
            raise
        except RepositoryNotFoundError:
            return None
    return read_snapshot(Repo(repo))


def open_branch(
    repo: str, *, private: bool = False, revision: str | None = None, pull_request_title: str | None = None, note: str = ""
) -> Branch:
    """The place a push writes to, created where it is missing: repository, then branch or (draft) pull request. A pull
    request of ours of the same title that is still open is the unfinished push of the same folder, and is taken up again.

    Raises:  NetworkError, UsageError (--private, and the repository is public).
    """
    api = hub_api()
    with speaking(repo):
        before = find_repo(repo)
        if before is None:
            patiently(lambda: api.create_repo(repo, private=private, exist_ok=True))
        elif private and not before.private:
            raise UsageError(
                complain(repo, "visibility", expected="private", found="public", do="Change it on the Hub, or drop --private.")
            )
        if pull_request_title is not None:
            number = patiently(lambda: _pull_request(api, repo, pull_request_title, note))
            return Branch(repo, f"refs/pr/{number}", fresh=True, pull_request=number)
        if revision is None:
            return Branch(repo, "main", fresh=before is None)
        refs = patiently(lambda: api.list_repo_refs(repo))
        fresh = all(ref.name != revision for ref in refs.branches)
        if fresh:
            patiently(lambda: api.create_branch(repo, branch=revision, exist_ok=True))
        return Branch(repo, revision, fresh=fresh)


def _pull_request(api: Any, repo: str, title: str, note: str) -> int:
    """The number of our own open pull request of that title, or of a new one; anybody may open one of the same title."""
    for pull in api.get_repo_discussions(repo, discussion_type="pull_request", author=api.whoami()["name"]):
        if pull.title == title and pull.status in ("open", "draft"):
            return int(pull.num)
    return int(api.create_pull_request(repo, title, description=note).num)
