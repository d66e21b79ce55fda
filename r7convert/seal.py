"""The seal: MANIFEST.json names every file of the folder, and every file is what the manifest says."""

from __future__ import annotations

import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from r7convert.findings import LONG_BYTES, Part
from r7convert.journal import COMMITTED, JOURNAL, MANIFEST, STAGED, VERDICT, Manifest, read_manifest
from r7convert.progress import Progress
from r7convert.store import STATE_DIR, hash_file
from r7convert.team import Team
from r7convert.units import in_time

# What the Hub's clients and git leave in a folder, and the card, which quotes the verdict and so cannot be under the seal that the
# verdict is bound to. No reader of checkpoints looks at them.
OTHERS_FILES = frozenset({".cache", ".git", ".gitattributes", "README.md"})


QUICK_SHARDS = 8
"""--quick hashes one in so many files of weights, and every other file."""


@dataclass(frozen=True, slots=True)
class Sealed:
    """The manifest, None where there is none to judge by, and how fast its files were read, None where too little was."""

    manifest: Manifest | None
    bytes_a_second: float | None = None

    def forecast(self, nbytes: int) -> str:
        """How long reading so many bytes takes at the least; "" where nothing is known."""
        if not self.bytes_a_second:
            return ""
        return f": {in_time(nbytes / self.bytes_a_second)} or more at the {self.bytes_a_second / 1e9:.2f} GB/s of the seal"


def choose_files(files: Collection[str], *, quick: bool) -> list[str]:
    """The files to hash: all of them; quick: the first, every eighth and the last of the weights, and all others."""
    weights = sorted(name for name in files if name.endswith(".safetensors"))
    read = {*weights[::QUICK_SHARDS], *weights[-1:]} if quick else set(weights)
    return [name for name in files if name in read or not name.endswith(".safetensors")]


def check_seal(folder: Path, part: Part, *, threads: int, progress: Progress, team: Team, quick: bool = False) -> Sealed:
    """Read the manifest strictly and hash every file it lists, or a sample whose size the scope states.

    Source:  DESIGN.md "Verification"; nothing is complete without its seal.
    """
    sealed = part.check("the folder is sealed", "manifests")
    manifest = None
    with sealed.collecting():
        manifest = read_manifest(folder)
    for left in (JOURNAL, COMMITTED):
        there = (folder / STATE_DIR / left).exists()
        sealed.expect(not there, f"{STATE_DIR}/{left}", "an unfinished run", expected="none", found="one: repeat its command")
    if (folder / STATE_DIR / STAGED).exists():
        sealed.note("a change of this folder is staged and not committed: what is judged is the folder as it stands")
    if manifest is None:
        return Sealed(None)

    unlisted = part.check("no file is unlisted", "files")
    for path in sorted(folder.iterdir()):
        if path.name in OTHERS_FILES and path.name not in manifest.files:
            unlisted.note(f"{path.name} is not under the seal and was not looked into")
        elif path.name not in (MANIFEST, VERDICT, STATE_DIR):
            unlisted.expect(path.name in manifest.files, path, "file the manifest does not list", expected="none", found=path.name)

    listed = part.check("every listed file has its size and SHA-256", "files")
    hashed = set(choose_files(manifest.files, quick=quick))
    mine = team.share(list(manifest.files))
    nbytes = sum(manifest.files[name].size for name in hashed)
    if team.is_first and nbytes > LONG_BYTES:
        progress.say(f"seal: {nbytes / 1e9:.1f} GB to hash")
    progress.start(sum(manifest.files[name].size for name in mine if name in hashed), "seal")

    def judge(name: str) -> tuple[str, str]:
        path, record = folder / name, manifest.files[name]
        try:
            size = path.stat().st_size if path.is_file() else None
            if size is None:
                return "missing file", "none"
            if size != record.size:
                return "size", str(size)
            sha256 = hash_file(path).sha256 if name in hashed else record.sha256
            return ("", "") if sha256 == record.sha256 else ("SHA-256", sha256)
        except OSError as error:
            return "unreadable file", str(error)

    judged = {}
    began = time.monotonic()
    with ThreadPoolExecutor(threads) as pool:
        for name, verdict in zip(mine, pool.map(judge, mine), strict=True):
            judged[name] = verdict
            progress.advance(manifest.files[name].size if name in hashed else 0, name)
    spent = time.monotonic() - began
    every = {name: verdict for share in team.gather(judged, "its files were hashed") for name, verdict in share.items()}
    for name, record in manifest.files.items():
        what, found = every.get(name, ("", ""))  # of other ranks' files only rank 0 learns
        expected = {"size": record.size, "SHA-256": record.sha256}.get(what, "a file of the manifest")
        listed.expect(not what, folder / name, what, expected=expected, found=found)
    whole = sum(record.size for record in manifest.files.values())
    if len(hashed) == len(manifest.files):
        part.scope.append(f"{len(hashed):,} files, {whole:,} bytes hashed")
    else:
        part.scope.append(
            f"quick: {len(hashed):,} of {len(manifest.files):,} files hashed, {nbytes:,} of {whole:,} bytes; of the rest the size"
        )
    return Sealed(manifest, nbytes / spent if nbytes > LONG_BYTES else None)
