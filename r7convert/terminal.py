"""What people see: results on stdout, progress and talk on stderr, errors as one line each with the exit code they ask for."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import shutil
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

from r7convert.errors import EXIT_INTERRUPTED, R7Error, ResourceError, printable
from r7convert.progress import Progress
from r7convert.units import in_bytes, in_time

Json = Any

LINE_EVERY_S = 30.0
"""On a pipe a line of progress comes no more often than this."""
PIPE_WIDTH = 80
MOST_LINE = 4000
_NUMBER = re.compile(r"[+-]?[\d,]+(\.\d+)?(e-?\d+)?(%| (B|kB|MB|GB|TB|s))?")
_OUR_MISTAKES = (errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY, errno.EBADF)
"""What a system call says of a name that should not have been asked for; of anything else the machine is the cause."""


class Terminal:
    """The three switches every command has: `as_json` turns results into JSON, `quiet` silences talk, `verbose` adds to it."""

    def __init__(self, *, as_json: bool = False, quiet: bool = False, verbose: bool = False, bars: bool = True) -> None:
        self.as_json = as_json
        self.quiet = quiet
        self.bars = bars
        self.verbose = verbose and not quiet

    def progress(self) -> Progress:
        """What a stage is given: silent, a bar on a terminal, whole lines on a pipe; without `bars` only what it has to say."""
        if self.quiet:
            return Progress()
        if not self.bars:
            return Talk(sys.stderr)
        if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
            return Bar(sys.stderr)
        return Lines(sys.stderr)

    def say(self, line: str) -> None:
        if not self.quiet:
            print(printable(line, MOST_LINE), file=sys.stderr)

    def result(self, data: Json, lines: Iterable[str], *next_steps: str) -> None:
        """The answer of a command: `data` as JSON, or `lines` for people and, as talk, what one may do next."""
        if self.as_json:
            print(json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False))
            return
        for line in lines:
            print(printable(line, MOST_LINE))
        sys.stdout.flush()  # talk must not come before what it follows
        for step in next_steps:
            self.say(f"next: {step}")


# ---- progress ---------------------------------------------------------------------------------------------------------


class Talk(Progress):
    """No progress, only talk: where somebody else draws, or a variable asks for silence."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def say(self, line: str) -> None:
        print(printable(line, MOST_LINE), file=self._stream)


class Bar(Progress):
    """A tqdm bar with bytes, rate, time left and what is at hand. Threads may advance it together."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._bar: Any = None

    def start(self, total_bytes: int, label: str) -> None:
        from tqdm import tqdm

        self.finish()
        self._bar = tqdm(
            total=total_bytes, desc=label, unit="B", unit_scale=True, file=self._stream, dynamic_ncols=True, mininterval=0.2, leave=False,
            bar_format="{desc}: {percentage:3.0f}% {bar} {n_fmt}B of {total_fmt}B, {rate_fmt}, {remaining} left{postfix}",
        )  # fmt: skip

    def advance(self, nbytes: int, note: str = "") -> None:
        with self._lock:
            if self._bar is not None:
                if note:
                    self._bar.set_postfix_str(note, refresh=False)
                self._bar.update(nbytes)

    def say(self, line: str) -> None:
        with self._lock:
            if self._bar is None:
                print(printable(line, MOST_LINE), file=self._stream)
            else:
                self._bar.write(printable(line, MOST_LINE), file=self._stream)

    def finish(self) -> None:
        with self._lock:
            if self._bar is not None:
                self._bar.close()
                self._bar = None


class Lines(Progress):
    """Whole lines for logs, one every 30 s."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._total = self._done = 0
        self._label = self._note = ""
        self._began = self._told = time.monotonic()

    def start(self, total_bytes: int, label: str) -> None:
        with self._lock:
            self._total, self._done, self._label, self._note = total_bytes, 0, label, ""
            self._began = self._told = time.monotonic()

    def advance(self, nbytes: int, note: str = "") -> None:
        with self._lock:
            self._done += nbytes
            now = time.monotonic()
            self._note = note or self._note
            if now - self._told >= LINE_EVERY_S:
                self._told = now
                self._print(self._line(now - self._began))

    def say(self, line: str) -> None:
        with self._lock:
            self._print(line)

    def _line(self, spent_s: float) -> str:
        rate = self._done / spent_s if spent_s > 0 else 0.0
        share = f" ({self._done / self._total:.0%})" if self._total else ""
        parts = [f"{self._label}: {in_bytes(self._done)} of {in_bytes(self._total)}{share}", f"{in_bytes(rate)}/s"]
        if rate and self._total > self._done:
            parts.append(f"{in_time((self._total - self._done) / rate)} left")
        return ", ".join([*parts, self._note] if self._note else parts)

    def _print(self, line: str) -> None:
        # One write a line, newline included: several processes may share the log.
        self._stream.write(printable(line, MOST_LINE) + "\n")
        self._stream.flush()


# ---- words ------------------------------------------------------------------------------------------------------------


def format_table(headers: Sequence[str], rows: Iterable[Sequence[object]], *, width: int | None = None) -> list[str]:
    """Lines of a table no wider than the terminal, or 80 columns on a pipe; cells wrap, the last column gives way first.

    Columns after the first that hold nothing but numbers, with or without units, are flush right.
    """
    from rich.console import Console
    from rich.table import Table

    width = width or stdout_width()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    cells = [[str(cell) for cell in row] for row in rows]
    for nth, header in enumerate(headers):
        filled = [row[nth] for row in cells if row[nth]]
        numbers = nth > 0 and bool(filled) and all(map(_NUMBER.fullmatch, filled))
        is_last = nth == len(headers) - 1
        table.add_column(header, overflow="fold", justify="right" if numbers else "left", ratio=1 if is_last and not numbers else None)
    for row in cells:
        table.add_row(*row)
    console = Console(width=width, color_system=None, markup=False, emoji=False, highlight=False, legacy_windows=False)
    with console.capture() as captured:
        console.print(table)
    return [line.rstrip() for line in captured.get().splitlines()]


def command(*words: object) -> str:
    """A command line of ours that a shell takes as it stands."""
    return shlex.join(["r7convert", *map(str, words)])


def stdout_width() -> int:
    return shutil.get_terminal_size((PIPE_WIDTH, 24)).columns if sys.stdout.isatty() else PIPE_WIDTH


def wrap(line: str, *, width: int | None = None) -> list[str]:
    """A long line in lines that fit, the later ones indented; a word longer than a line stays whole."""
    indent = len(line) - len(line.lstrip()) + 2
    return textwrap.wrap(
        line, width or stdout_width(), subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False, drop_whitespace=True
    ) or [line]


# ---- errors -----------------------------------------------------------------------------------------------------------


def report_error(error: BaseException) -> int:
    """Print an error on stderr in the error grammar and return its exit code; the traceback only with R7_DEBUG=1."""
    if os.environ.get("R7_DEBUG") == "1":
        traceback.print_exception(error)
    if isinstance(error, KeyboardInterrupt):
        print("interrupted: no file is left half-written, repeat the command to go on", file=sys.stderr)
        return EXIT_INTERRUPTED
    step = ""
    if isinstance(error, R7Error):
        lines, code, step = str(error).split("\n"), error.exit_code, error.next_step
    elif isinstance(error, OSError) and error.errno is not None and error.errno not in _OUR_MISTAKES:
        lines, code, step = [f"{error.filename or 'disk'}: {error.strerror}"], ResourceError.exit_code, ResourceError.next_step
    elif isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        lines, code = [f"out of memory: {error}. Use fewer --threads, or a smaller --layers range."], ResourceError.exit_code
    else:
        lines = [f"unexpected {type(error).__name__}: {error}", "Please report it, with the traceback that R7_DEBUG=1 prints."]
        code = R7Error.exit_code
    mark = "\x1b[31merror:\x1b[0m" if has_color(sys.stderr) else "error:"
    for line in lines:
        print(f"{mark} {printable(line, MOST_LINE)}", file=sys.stderr)
    if step and not any(line.endswith(".") for line in lines):  # no line of it says what to do
        print(f"next: {step}", file=sys.stderr)
    return code


def has_color(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
