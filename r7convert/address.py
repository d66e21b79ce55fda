"""Where a checkpoint is: a folder of this machine, or a repository of the Hub at a revision.

./folder   C:\\models\\folder   ~/folder       a folder
org/name   org/name@rev                       a repository, unless a folder of that name stands here
hf://org/name@rev   https://huggingface.co/…  always a repository
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from r7convert.errors import InputError, UsageError, complain

_REPO = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)(?:@(?P<revision>.*))?", re.ASCII | re.DOTALL)
RECEIPT = Path(".cache", "r7convert", "download.json")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_LOOKS_LIKE_PATH = re.compile(r"[.~/\\]|[A-Za-z]:|.*\\")


@dataclass(frozen=True, slots=True)
class Repo:
    """A model repository. `revision` is a branch, a tag or a commit; None means the default branch."""

    id: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.id if self.revision is None else f"{self.id}@{self.revision}"


def parse_address(text: str) -> Path | Repo:
    """The folder or repository that `text` names. Looks at this disk, never at the Hub.

    Raises:  UsageError for a malformed repository, InputError for a folder that is not there.
    """
    if text.startswith("hf://") or re.match(r"https?://", text):
        return _parse_uri(text)
    folder = Path(text).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise InputError(complain(text, "not a folder", expected="the folder that holds config.json", found="a file"))
    match = _REPO.fullmatch(text)
    if match is None or _LOOKS_LIKE_PATH.match(text):
        raise InputError(complain(text, "no such folder", do="A repository of the Hub is written org/name or org/name@revision."))
    return _checked(match["id"], match["revision"], text)


def locate(text: str) -> Path | Repo:
    """As `parse_address`; with HF_HUB_OFFLINE a repository is its snapshot in the Hub's cache, where there is one.

    Raises:  as `parse_address`.
    """
    found = parse_address(text)
    if isinstance(found, Path) or os.environ.get("HF_HUB_OFFLINE", "").upper() not in ("1", "ON", "YES", "TRUE"):
        return found
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(found.id, revision=found.revision, local_files_only=True))
    except LocalEntryNotFoundError:
        return found  # whoever asks the Hub for it will say that it is offline


def parse_repo(text: str) -> Repo:
    """A repository where only a repository will do, such as the destination of a push.

    Raises:  UsageError.
    """
    if text.startswith("hf://") or re.match(r"https?://", text):
        return _parse_uri(text)
    match = _REPO.fullmatch(text)
    if match is None or _LOOKS_LIKE_PATH.match(text):
        raise UsageError(complain(text, "repository", expected="org/name or org/name@revision", found=repr(text)))
    return _checked(match["id"], match["revision"], text)


def _parse_uri(text: str) -> Repo:
    from huggingface_hub.errors import HfUriError
    from huggingface_hub.utils import parse_hf_uri

    try:
        uri = parse_hf_uri(text)
    except HfUriError as error:
        raise UsageError(complain(text, "repository", expected="hf://org/name@revision", found=_first_line(error))) from None
    if uri.type != "model" or uri.path_in_repo:
        found = f"a {uri.type}" if uri.type != "model" else f"the path {uri.path_in_repo!r} in it"
        do = "Write a / of the revision as %2F." if uri.path_in_repo else ""
        raise UsageError(complain(text, "repository", expected="a model repository, whole", found=found, do=do))
    return Repo(uri.id, uri.revision)


def _checked(repo_id: str, revision: str | None, text: str) -> Repo:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise UsageError(complain(text, "repository", expected="org/name", found=_first_line(error))) from None
    if revision is not None and (not revision or re.search(r"[\s~^:?*\[\\]|\.\.|^[-/]|/$|//|@\{", revision)):
        raise UsageError(complain(text, "revision", expected="a branch, a tag or a commit", found=repr(revision)))
    return Repo(repo_id, revision)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__


def read_origin(folder: Path) -> Repo | None:
    """The repository and commit that a folder was fetched from, if it tells: by our receipt, or as a snapshot of the Hub's
    cache.
    """
    try:
        note = json.loads((folder / RECEIPT).read_bytes())
        if isinstance(note, dict) and isinstance(note.get("repo"), str) and _COMMIT.fullmatch(str(note.get("commit"))):
            return Repo(note["repo"], note["commit"])
    except (OSError, ValueError, RecursionError):
        pass
    place = folder.absolute()  # as named, not resolved: inside a snapshot the files are links, the folder is real
    if place.parent.name == "snapshots" and _COMMIT.fullmatch(place.name) and place.parent.parent.name.startswith("models--"):
        return Repo(place.parent.parent.name.removeprefix("models--").replace("--", "/", 1), place.name)
    return None
