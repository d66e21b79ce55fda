"""Every error r7convert raises on purpose, and the exit code each one ends the process with.

    R7Error                 1   unexpected; the base, never raised itself
    ├── UsageError          2   the command line asks for something that makes no sense
    ├── InputError          3   the input cannot be used
    │   ├── FormatError     3   bytes or JSON that break the format's rules
    │   └── UnsupportedError 3  sound, but not something this target or this version can hold
    ├── VerifyError         4   the output is not what it should be
    ├── ResourceError       5   no room, no device, no permission, a folder in use
    └── NetworkError        6   the Hub or the way to it

An interrupted run (Ctrl-C, SIGTERM) ends with 130.

Messages follow one grammar: `where: what: expected X, got Y. Do Z.` A check collects all its offenders and raises
once: `Offences` is that collection. Where no line of a message says what to do, its class does: `next_step`.
"""

from __future__ import annotations

from typing import NoReturn

EXIT_INTERRUPTED = 130
SHOWN_OFFENDERS = 20
MOST_QUOTED = 800
"""Characters of one piece of a message. Names and values in it may be anybody's."""


class R7Error(Exception):
    exit_code = 1
    next_step = ""


class UsageError(R7Error):
    exit_code = 2
    next_step = "look at the command's --help"


class InputError(R7Error):
    exit_code = 3
    next_step = "mend or fetch again what is named, then repeat the command"


class FormatError(InputError):
    pass


class UnsupportedError(InputError):
    next_step = "r7convert inspect SRC says what each target makes of it"


class VerifyError(R7Error):
    exit_code = 4
    next_step = "do not serve it; r7convert verify OUT --verbose lists every check"


class ResourceError(R7Error):
    exit_code = 5
    next_step = "see to what is named, then repeat the command: it goes on where it stopped"


class NetworkError(R7Error):
    exit_code = 6
    next_step = "repeat the command: it goes on where it stopped"


def complain(where: object, what: str, *, expected: object = None, found: object = None, do: str = "") -> str:
    """One line in the error grammar; `expected` and `found` are left out when both are None. Each piece is made fit to print."""
    text = f"{printable(where)}: {printable(what)}"
    if expected is not None or found is not None:
        text += f": expected {printable(expected)}, got {printable(found)}"
    return f"{text}. {printable(do)}".rstrip() if do else text


def printable(value: object, most: int = MOST_QUOTED) -> str:
    """The value as text for a terminal: no line break, no escape sequence, no half of a surrogate pair, and of great length only
    both ends.
    """
    try:
        text = str(value)
    except ValueError:  # Python writes no integer of over 4,300 digits
        text = "a number of thousands of digits"
    if len(text) > most:
        text = f"{text[: most // 2]}[... {len(text) - most:,} characters ...]{text[len(text) - most // 2 :]}"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


class Offences:
    """Offenders gathered by one check, raised together: at most 20 lines, then a count.

    Raises (from `check`):  the error class given, if anything was added.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __len__(self) -> int:
        return len(self.lines)

    def add(self, where: object, what: str, *, expected: object = None, found: object = None, do: str = "") -> None:
        self.lines.append(complain(where, what, expected=expected, found=found, do=do))

    def check(self, error: type[R7Error] = FormatError) -> None:
        if self.lines:
            self._raise(error)

    def _raise(self, error: type[R7Error]) -> NoReturn:
        shown = self.lines[:SHOWN_OFFENDERS]
        more = len(self.lines) - len(shown)
        if more:
            shown.append(f"... and {more} more")
        raise error("\n".join(shown))
