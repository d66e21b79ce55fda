"""`make docs`: what can rot is generated. docs/cli.md from the live commands, README's example from running them.

tests/test_docs.py fails when either is not what this would write.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import typer
from typer.testing import CliRunner

from r7convert.cli import app

ROOT = Path(__file__).parents[1]
CLI = ROOT / "docs" / "cli.md"
README = ROOT / "README.md"
BEGIN, END = "<!-- example: written by `make docs` -->\n", "<!-- end of example -->\n"
EXAMPLE = (
    "sample r7 --mode uniform",
    "stamp r7 --check",
    "repack r7 stock --target rank-sliced --tp 2",
    "verify stock --source r7 --tp 2",
)
INTRO = """# Commands

Written by `make docs` from `r7convert COMMAND --help`; a test keeps it current.

Results go to stdout, progress and talk to stderr. Exit codes: 0 ok, 1 unexpected, 2 usage, 3 input unusable or unsupported (or, with
`--check`, a repair is due), 4 verification failed, 5 no room, device or permission, 6 network, 130 interrupted. An error is one line,
`where: what: expected X, got Y. Do Z.`; `R7_DEBUG=1` adds the traceback.
"""


def command_names() -> list[str]:
    return list(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def render_cli() -> str:
    pages = [f"\n## r7convert\n\n```text\n{page()}```\n"]
    pages += [f"\n## r7convert {name}\n\n```text\n{page(name)}```\n" for name in command_names()]
    return INTRO + "".join(pages)


def page(*words: str) -> str:
    with fixed_width():
        done = CliRunner().invoke(app, [*words, "--help"], prog_name="r7convert")
    assert done.exit_code == 0, done.output
    return done.stdout


def render_example() -> str:
    """The commands of EXAMPLE and what they print, run in an empty folder."""
    lines = ["```text\n"]
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), fixed_width():
        for command in EXAMPLE:
            done = CliRunner().invoke(app, command.split(), prog_name="r7convert")
            lines.append(f"$ r7convert {command}\n{done.stdout}")
            if done.exception and not isinstance(done.exception, SystemExit):
                lines += [f"error: {line}\n" for line in str(done.exception).splitlines()]
            lines.append("\n" if command != EXAMPLE[-1] else "")
    return "".join([*lines, "```\n"])


def with_example(readme: str) -> str:
    head, rest = readme.split(BEGIN)
    return head + BEGIN + render_example() + END + rest.split(END)[1]


@contextlib.contextmanager
def fixed_width() -> Iterator[None]:
    before = {name: os.environ.get(name) for name in ("COLUMNS", "NO_COLOR")}
    os.environ |= {"COLUMNS": "80", "NO_COLOR": "1"}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


if __name__ == "__main__":
    CLI.write_text(render_cli())
    README.write_text(with_example(README.read_text()))
