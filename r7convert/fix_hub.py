"""fix-hub: the stamp repair for a published repository, as a pull request that holds the changed JSON files and nothing else.

The JSON files come into a temporary folder, `stamp` repairs them there as it would beside the weights, and what it changed
goes up. No weight is read, here or there.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from r7convert.address import Repo
from r7convert.branch import Outgoing, open_branch
from r7convert.checkpoint import CONFIG, HF_QUANT_CONFIG, INDEX, QUANT_CONFIG
from r7convert.errors import InputError, UsageError, complain
from r7convert.hub import read_snapshot, read_whole
from r7convert.journal import MANIFEST
from r7convert.progress import Progress
from r7convert.restamp import Restamped, restamp
from r7convert.store import MAX_JSON_BYTES, write_bytes

Json = Any

TITLE = "Repair the quantization stamp: this is EXL3"
STAMP_FILES = (CONFIG, QUANT_CONFIG, HF_QUANT_CONFIG)


@dataclass(frozen=True, slots=True)
class FixedHub:
    """What is due in a repository, and where the repair went: `url` is None while nothing was sent."""

    repo: str
    commit: str
    report: Restamped
    changed: tuple[str, ...]
    removed: tuple[str, ...]
    url: str | None = None

    @property
    def due(self) -> bool:
        return self.report.due

    def to_json(self) -> Json:
        stamp = {key: value for key, value in self.report.to_json().items() if key not in ("folder", "backup", "written")}
        where = {"repo": self.repo, "commit": self.commit, "changed": list(self.changed), "removed": list(self.removed), "url": self.url}
        return where | stamp


def fix_hub(repo: Repo, *, create_pr: bool = False, target: str | None = None, progress: Progress | None = None) -> FixedHub:
    """Say what the stamp of a repository needs, and with `create_pr` propose it there. Once proposed, asking again finds the
    same pull request.

    Raises:  NetworkError, InputError (no config.json), UnsupportedError (not EXL3), UsageError (sealed by r7convert).
    """
    snapshot = read_snapshot(repo)
    if CONFIG not in snapshot.files:
        raise InputError(complain(repo, "not a model repository", expected=CONFIG, found="no such file"))
    if MANIFEST in snapshot.files:
        raise UsageError(complain(repo, f"sealed by {MANIFEST}, which a new stamp would break", do="Repack it and push it again."))
    if create_pr and repo.revision is not None:
        raise UsageError(complain(repo, "a pull request goes to the default branch", do="Leave out the revision."))
    with tempfile.TemporaryDirectory(prefix="r7convert-") as scratch:
        folder = Path(scratch)
        for name in (*STAMP_FILES, INDEX):
            if name in snapshot.files:
                write_bytes(folder / name, read_whole(snapshot, name, MAX_JSON_BYTES))
        report = restamp(folder, in_place=True, target=target, progress=progress)
        changed = {name: (folder / name).read_bytes() for name in report.written if (folder / name).exists()}
    removed = tuple(name for name in report.written if name not in changed)
    url = None
    if create_pr and report.written:
        branch = open_branch(repo.id, pull_request_title=TITLE, note=_note(report))
        branch.commit([Outgoing.of_bytes(name, data) for name, data in changed.items()], TITLE, delete=removed)
        branch.publish()
        url = branch.url
    return FixedHub(snapshot.repo, snapshot.commit, report, tuple(changed), removed, url)


def _note(report: Restamped) -> str:
    """The description of the pull request: why, and each changed field."""
    lines = [
        "The weights here are EXL3, and another producer's stamp stands over them: stock servers drop it, build the experts",
        "unquantized and run out of memory. Proposed by `r7convert fix-hub`; no weight is touched. Changed fields:",
        "",
        *(f"- `{change}`" for change in report.repaired.changes),
    ]
    return "\n".join(lines)
