"""Faults at system calls: the N-th call of one sort that a process makes under a folder ends as a plan says.

    FAULT is kind:step:number, as in kill:rename:3, full:write:12, io:read:1
    python -m tests.faults FAULT ROOT -- repack SRC OUT --target r7         without FAULT ("count"): prints how many there are

The point of injection is the module `os`. In the process under test `_pyio`, the standard library's own Python version of
`open`, takes the place of `io.open`, so that every file that Python opens, reads or writes passes through `os`; the functions
of `os` that touch a disk are then wrapped, and the socket's two. A wrapper asks which file the call is about, counts it if that
is under ROOT, and strikes if it is the one.

What it cannot see: reads that C or Rust code makes by itself (mmap, safetensors), which change nothing on a disk.
"""

# pathlib goes through the very calls that are wrapped here
# ruff: noqa: PTH100, PTH110, PTH113, PTH115, PTH118, PTH202

from __future__ import annotations

import _pyio
import builtins
import errno
import io
import json
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# The calls, by the sort of step they are. Those under "open" that create or write count as "create".
STEPS: dict[str, tuple[str, ...]] = {
    "open": ("open",),
    "read": ("read", "pread", "preadv", "readv", "sendfile", "copy_file_range"),
    "write": ("write", "pwrite", "pwritev", "writev"),
    "list": ("listdir", "scandir"),
    "fsync": ("fsync", "fdatasync"),
    "rename": ("rename", "replace"),
    "link": ("link", "symlink"),
    "unlink": ("unlink", "remove"),
    "mkdir": ("mkdir",),
    "rmdir": ("rmdir",),
    "truncate": ("truncate", "ftruncate"),
}
NET = "net"
CHANGES = ("create", "write", "fsync", "rename", "link", "unlink", "mkdir", "rmdir", "truncate")
TAKES_ROOM = ("create", "write", "fsync", "link", "mkdir")
ANY = ("open", "read", "list", *CHANGES)

# kind: the steps that it strikes at
KINDS: dict[str, tuple[str, ...]] = {
    "kill": (*ANY, NET),  # SIGKILL before the call
    "torn": ("write",),  # SIGKILL in the middle of a write
    "power": CHANGES,  # SIGKILL, and what was not synced is zeros
    "term": (*ANY, NET),  # SIGTERM
    "int": (*ANY, NET),  # SIGINT, as Ctrl-C sends it
    "full": TAKES_ROOM,  # ENOSPC, from here on
    "io": ANY,  # EIO, once
    "read-only": CHANGES,  # EROFS, from here on
    "denied": ("open", "create", "list", "mkdir", "unlink", "rename", "link"),  # EACCES, once
    "no-rename": ("rename",),  # EPERM, from here on
    "no-fsync": ("fsync",),  # EINVAL, from here on
    "dropped": (NET,),  # the connection, once
    "changed": ("read",),  # somebody writes to the source file that is being read
    "clock": ANY,  # the clock jumps by ten years, there or back
    "two": ANY,  # a second process does its work in the middle of this one's
}
_ERRNO = {"full": errno.ENOSPC, "io": errno.EIO, "read-only": errno.EROFS, "denied": errno.EACCES}
_ERRNO |= {"no-rename": errno.EPERM, "no-fsync": errno.EINVAL}
_LASTING = ("full", "read-only", "no-rename", "no-fsync")
TEN_YEARS_S = 10 * 365 * 86400.0

_real: dict[str, Callable[..., Any]] = {name: getattr(os, name) for names in STEPS.values() for name in names if hasattr(os, name)}


@dataclass(frozen=True)
class Fault:
    kind: str
    step: str
    number: int
    choice: int = 0  # where a kind has several ways: how the source changes, which way the clock jumps

    @classmethod
    def parse(cls, text: str) -> Fault:
        kind, step, *rest = text.split(":")
        assert step in KINDS[kind], f"{kind} strikes at {KINDS[kind]}"
        return cls(kind, step, *map(int, rest))

    def __str__(self) -> str:
        return f"{self.kind}:{self.step}:{self.number}:{self.choice}"


class Tap:
    """Where every call of this process passes, once `install` was called; there is no way back."""

    def __init__(self, root: str, fault: Fault | None = None, *, source: str = "") -> None:
        self.root = os.path.realpath(root) + os.sep
        self.fault = fault
        self.counts: Counter[str] = Counter()
        self.struck = False
        self._source = (os.path.realpath(source) + os.sep) if source else self.root
        self.pause: Callable[[], object] = lambda: None
        self._unsynced: set[str] = set()
        self._lock = threading.RLock()

    def install(self) -> None:
        builtins.open = io.open = _pyio.open  # type: ignore[assignment]
        for step, names in STEPS.items():
            for name in names:
                if name in _real:
                    setattr(os, name, self._wrap(step, name))
        for name in ("send", "sendall", "recv", "recv_into"):
            setattr(socket.socket, name, self._wrap_socket(getattr(socket.socket, name)))

    def _wrap(self, step: str, name: str) -> Callable[..., Any]:
        real = _real[name]

        def call(*args: Any, **kwargs: Any) -> Any:
            this = "create" if step == "open" and args[1] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) else step
            paths = [_path_of(args[0] if args else ".", kwargs.get("dir_fd", kwargs.get("src_dir_fd")))]
            if step in ("rename", "link") or name in ("sendfile", "copy_file_range"):
                paths.append(_path_of(args[1], kwargs.get("dst_dir_fd")))
            if not any(f"{path}/".startswith(self.root) for path in paths):
                return real(*args, **kwargs)
            with self._lock:
                self._pass(this, paths, args)
                result = real(*args, **kwargs)
                self._note(this, paths)
            return result

        return call

    def _wrap_socket(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self._pass(NET, [], args)
            return real(*args, **kwargs)

        return call

    def _pass(self, step: str, paths: list[str], args: tuple[Any, ...]) -> None:
        """Count one call, and strike if it is the one; afterwards the call goes its way, unless an error is raised here."""
        fault = self.fault
        if fault is not None and fault.kind == "changed" and not f"{paths[:1]}"[2:].startswith(self._source):
            return  # only reads of the source count
        self.counts[step] += 1
        if fault is None:
            return
        if self.struck:
            if fault.kind in _LASTING and step in KINDS[fault.kind]:
                self._fail(fault.kind, paths)
            return
        if step != fault.step or self.counts[step] < fault.number:
            return
        self.struck = True
        match fault.kind:
            case "kill":
                _die()
            case "torn":
                _real["write"](args[0], memoryview(args[1]).cast("B")[: len(args[1]) // 2])
                _die()
            case "power":
                self._lose_power()
            case "term" | "int":
                os.kill(os.getpid(), signal.SIGTERM if fault.kind == "term" else signal.SIGINT)
            case "changed":
                change_file(paths[0], fault.choice)
            case "clock":
                _jump(TEN_YEARS_S if fault.choice % 2 else -TEN_YEARS_S)
            case "two":
                self.pause()
            case "dropped":
                raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
            case kind:
                self._fail(kind, paths)

    def _fail(self, kind: str, paths: list[str]) -> None:
        raise OSError(_ERRNO[kind], os.strerror(_ERRNO[kind]), paths[0] if paths else None)

    def _note(self, step: str, paths: list[str]) -> None:
        """Which files have bytes that no fsync has taken to the disk."""
        if step in ("write", "truncate") or (step == "read" and len(paths) > 1):
            self._unsynced.add(paths[0])
            if self.fault is not None and self.fault.kind == "clock" and self.struck and os.path.exists(paths[0]):
                os.utime(paths[0], (time.time(), time.time()))
        elif step == "fsync":
            self._unsynced.discard(paths[0])
        elif step == "rename" and paths[0] in self._unsynced:
            self._unsynced.remove(paths[0])
            self._unsynced.add(paths[1])

    def _lose_power(self) -> None:
        """Every name is as it was; the bytes of a file that was written and not synced are not there, though its size is."""
        for path in self._unsynced:
            if os.path.isfile(path):
                size = os.path.getsize(path)
                _real["truncate"](path, size // 2)
                _real["truncate"](path, size)
        _die()


def change_file(path: str, choice: int) -> None:
    """What somebody else may do to a file: append, cut, flip a byte in place, put another in its place."""
    size = os.path.getsize(path)
    fd = _real["open"](path, os.O_RDWR)
    match choice % 4:
        case 0:
            os.lseek(fd, 0, os.SEEK_END)
            _real["write"](fd, b"\n" * 9)
        case 1:
            _real["ftruncate"](fd, size // 2)
        case 2:
            at = choice // 4 % max(size, 1)
            _real["pwrite"](fd, bytes(byte ^ 1 for byte in _real["pread"](fd, 1, at)), at)
        case 3:
            new = _real["open"](path + ".new", os.O_WRONLY | os.O_CREAT)
            data = _real["pread"](fd, size, 0)
            _real["write"](new, data[: size // 2] + bytes(byte ^ 1 for byte in data[size // 2 :]))
            os.close(new)
            _real["rename"](path + ".new", path)
    os.close(fd)


def _path_of(place: Any, folder: int | None = None) -> str:
    """The path that a call is about: given as such, relative to an open folder, or by the number of an open file."""
    if isinstance(place, int):
        try:
            return os.readlink(f"/proc/self/fd/{place}")
        except OSError:
            return ""
    path = os.fsdecode(place)
    return os.path.join(_path_of(folder), path) if folder is not None else os.path.abspath(path)


def _jump(by_s: float) -> None:
    clock, clock_ns = time.time, time.time_ns
    time.time = lambda: clock() + by_s
    time.time_ns = lambda: clock_ns() + int(by_s * 1e9)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


if __name__ == "__main__":
    plan, root = sys.argv[1:3]
    sys.argv = ["r7convert", *sys.argv[4:]]
    from r7convert import cli

    tap = Tap(root, None if plan == "count" else Fault.parse(plan))
    tap.install()
    try:
        cli.run()
    finally:
        print(json.dumps({"steps": tap.counts, "struck": tap.struck}), file=sys.stderr)
