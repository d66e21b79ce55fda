"""Options that several commands share, and how their words are read."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from r7convert.errors import UsageError, complain

if TYPE_CHECKING:
    from r7convert.checkpoint import Checkpoint

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no talk.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="More of both.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done; touch nothing.")]
Device = Annotated[str, typer.Option(metavar="DEVICE", help="auto (every GPU, else the CPU), cuda, cuda:N or cpu.")]
Target = Literal["r7", "rank-sliced", "slabs", "exl3"]
Reader = Literal["r14", "r28"]
AGAIN = "the same command without --dry-run"
Source = Annotated[str, typer.Argument(metavar="SRC", help="A checkpoint folder.", show_default=False)]
SourceOrRepo = Annotated[
    str, typer.Argument(metavar="SRC", help="A checkpoint folder, or org/name[@revision] on the Hub.", show_default=False)
]


def local_folder(source: str) -> Path:
    """SRC where only a folder of this machine will do.

    Raises:  UsageError for a repository, InputError for what is not there.
    """
    from r7convert.address import locate

    found = locate(source)
    if not isinstance(found, Path):
        raise UsageError(complain(source, "a repository of the Hub", expected="a folder", do=f"First: r7convert download {found} DIR."))
    return found


def open_checkpoint(source: str) -> Checkpoint:
    """SRC, a folder or a repository; of the latter headers and JSON are read by range requests."""
    from r7convert.address import locate
    from r7convert.checkpoint import build_checkpoint, read_checkpoint

    found = locate(source)
    if isinstance(found, Path):
        return read_checkpoint(found)
    from r7convert.remote import RemoteSource

    remote = RemoteSource(found)
    checkpoint = build_checkpoint(remote)
    return replace(checkpoint, warnings=(*remote.notes, *checkpoint.warnings))


def parse_layers(text: str | None) -> tuple[int, int] | None:
    """ "A" or "A-B" as (first, last), both inclusive.

    Raises:  UsageError.
    """
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", text)
    if match is None or int(match[2] or match[1]) < int(match[1]):
        raise UsageError(complain("--layers", "range", expected="A or A-B, ascending", found=repr(text)))
    return int(match[1]), int(match[2] or match[1])


def wants_bars() -> bool:
    """False where huggingface_hub's own variable asks commands of the network for silence."""
    return os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS", "").upper() not in ("1", "ON", "YES", "TRUE")


def parse_size(option: str, text: str | None) -> int | None:
    """ "40GB", "1.5 TB", "500000000" or "12GiB" in bytes; decimal units as disks and the Hub count.

    Raises:  UsageError.
    """
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?)\s*([kKMGT]?)(i?)[bB]?", text.strip())
    if match is None or (match[3] and not match[2]):
        raise UsageError(complain(option, "size", expected="bytes, or such as 40GB", found=repr(text)))
    return int(float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2].upper() or " "))
