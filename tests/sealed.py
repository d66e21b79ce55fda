"""A sealed and judged folder for tests of what comes after: a sample checkpoint as the `r7` target leaves it, and a verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from r7convert import __version__
from r7convert.findings import Part
from r7convert.journal import MANIFEST, VERDICT, Manifest, manifest_digest, write_manifest
from r7convert.sample import write_sample
from r7convert.store import hash_file
from r7convert.verdict import Verdict, write_verdict


def seal(folder: Path, **facts: Any) -> None:
    """Write manifest and verdict over whatever stands in `folder`."""
    names = sorted(p.name for p in folder.iterdir() if p.is_file() and p.name not in (MANIFEST, VERDICT, "README.md"))
    stated = {
        "target": "r7",
        "tp": 1,
        "reader": "r28",
        "source": {"repo": "org/source", "commit": "7c73450f05a151439d0f184f216b1eefcc394a31"},
        "accounting": {"kept": 100, "sliced": 0, "dropped": 1},
    }
    write_manifest(folder, Manifest(f"r7convert {__version__}", {n: hash_file(folder / n) for n in names}, stated | facts))
    judge(folder)


def judge(folder: Path, *, failed: bool = False) -> None:
    parts = (Part("seal", scope=["every file's SHA-256"]), Part("contract", scope=["the rules of reader r28"]))
    parts += (Part("bytes", scope=["every tensor against the source"]), Part("numbers", why_skipped="no GPU"))
    parts[0].check("digests", "files").saw(11)
    if failed:
        parts[1].check("shapes").fail("tensor", "shape", expected=1, found=2)
    write_verdict(folder, Verdict(manifest_digest(folder), "r7", 1, "r28", parts))


def write_sealed(folder: Path) -> Path:
    write_sample(folder)
    seal(folder)
    return folder
