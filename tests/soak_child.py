"""A command line in a forked child: imports are done, everything else is `r7convert WORDS` from its first line to its exit code."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from tests.faults import Tap

LONGEST_S = 120
_write, _read = os.write, os.read  # a tap wraps those of os


@dataclass(frozen=True)
class Ended:
    """The exit code, less than 0 for a signal, and what was said. `steps` and `struck` are the tap's, where the child lived to tell."""

    code: int
    said: str
    steps: Counter[str]
    struck: bool


def run(
    words: list[str],
    notes: Path,
    *,
    tap: Callable[[], Tap] | None = None,
    before: Callable[[], None] = lambda: None,
    meanwhile: Callable[[], None] = lambda: None,
) -> Ended:
    """Run it to its end. `before` is called in the child, first of all; `meanwhile` here, while the child stands still at a fault
    of kind "two". `notes` is a file for what it says.
    """
    told_r, told_w = os.pipe()
    go_r, go_w = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(told_r)
        os.close(go_w)
        _child(words, notes, told_w, go_r, tap, before)
    os.close(told_w)
    os.close(go_r)
    told, deadline = b"", time.monotonic() + LONGEST_S
    try:
        while True:
            if not select.select([told_r], [], [], max(0.0, deadline - time.monotonic()))[0]:
                os.kill(pid, signal.SIGALRM)
                break
            if not (data := os.read(told_r, 1 << 16)):
                break
            told += data
            if told == b"paused":
                told = b""
                try:
                    meanwhile()
                finally:
                    os.write(go_w, b"go")
    finally:
        os.close(told_r)
        os.close(go_w)
        _, status = os.waitpid(pid, 0)
    said = notes.read_text(errors="replace").strip()[-2000:] if notes.exists() else ""
    facts = json.loads(told) if told.startswith(b"{") else {}
    return Ended(os.waitstatus_to_exitcode(status), said, Counter(facts.get("steps")), bool(facts.get("struck")))


def _child(words: list[str], notes: Path, told: int, go: int, make_tap: Callable[[], Tap] | None, before: Callable[[], None]) -> NoReturn:
    from r7convert import cli

    code, tap = 99, None
    try:
        out = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(out, 1)
        os.dup2(out, 2)
        sys.stdout, sys.stderr = (open(fd, "w", closefd=False) for fd in (1, 2))  # noqa: SIM115
        sys.argv = ["r7convert", *words]
        sleep = time.sleep
        time.sleep = lambda seconds: sleep(min(seconds, 0.01))  # the patience of the Hub's client, cut short
        before()
        if make_tap is not None:
            tap = make_tap()
            tap.pause = lambda: (_write(told, b"paused"), _read(go, 2))
            tap.install()
        try:
            cli.run()
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else 0
    finally:
        try:  # a signal may still come, and nothing of the parent's may run in here
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            if tap is not None:
                _write(told, json.dumps({"steps": tap.counts, "struck": tap.struck}).encode())
        finally:
            os._exit(code)
