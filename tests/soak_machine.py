"""Faults of the machine rather than of one call: a disk with too little room, a /tmp that is full, a GPU that runs out of memory."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.faults import Fault

KINDS = {
    "disk": "a tmpfs with room for a part of the output",
    "tmp": "TMPDIR on a tmpfs without room",
    "memory": "torch.cuda.OutOfMemoryError from the search",
}
PAGE = 4096


def can_mount() -> bool:
    """True if a tmpfs can be mounted here; without one a small disk is a limit on the size of a file (EFBIG)."""
    place = tempfile.mkdtemp(prefix="r7convert-mount-")
    try:
        if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", place], capture_output=True, check=False).returncode:
            return False
        subprocess.run(["umount", place], check=True)
        return True
    finally:
        Path(place).rmdir()


def most_tiles(fault: Fault) -> int:
    """How many tiles a search may have before the card of a fault "memory" is full: 0, 1, 64 or 4096."""
    return (0, 1, 64, 4096)[fault.choice % 4]


class Machine:
    """One fault of the machine around a cut: `enter` is called in the child, `mend` before the command is repeated."""

    def __init__(self, fault: Fault, world: Path, before_bytes: int, after_bytes: int, *, mounts: bool) -> None:
        self._fault = fault
        self._world = world
        self._mounts = mounts
        self._room = before_bytes + max(after_bytes - before_bytes, before_bytes // 3) * fault.number // 1000
        self._tmp = world.with_name("tmp")

    def __enter__(self) -> Self:
        if self._mounts and self._fault.kind == "disk":
            _mount(self._world, self._room)
        elif self._mounts and self._fault.kind == "tmp":
            self._tmp.mkdir(exist_ok=True)
            _mount(self._tmp, PAGE)
            (self._tmp / "full").write_bytes(b"x")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._mounts and self._fault.kind in ("disk", "tmp"):
            subprocess.run(["umount", self._world if self._fault.kind == "disk" else self._tmp], check=True)

    def enter(self) -> None:
        match self._fault.kind:
            case "disk":
                if self._fault.choice % 2:  # the room was there when it was asked for
                    ample: Any = shutil.disk_usage("/")._replace(free=1 << 50)
                    shutil.disk_usage = lambda _: ample
                if not self._mounts:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (self._room // 20, resource.RLIM_INFINITY))
            case "tmp":
                os.environ["TMPDIR"] = str(self._tmp)
                tempfile.tempdir = None
            case "memory":
                _fill_card(most_tiles(self._fault))

    def mend(self) -> None:
        if self._mounts and self._fault.kind == "disk":
            subprocess.run(["mount", "-o", "remount,size=1g", self._world], check=True)


def _mount(place: Path, size_bytes: int) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={max(size_bytes, PAGE)}", "tmpfs", place], check=True)


def _fill_card(most: int) -> None:
    import torch

    from r7convert import kernels

    real = kernels.search_tiles

    def search_tiles(tiles: Any, *, bits: int) -> Any:
        if len(tiles) > most:
            raise torch.cuda.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {len(tiles)} tiles.")
        return real(tiles, bits=bits)

    kernels.search_tiles = search_tiles
