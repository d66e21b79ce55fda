"""`make docs`: what can rot is generated. docs/cli.md from the live commands, README's example from running them, docs/design.md
from the modules' own words and the levels they keep to.

tests/test_docs.py fails when either is not what this would write.
"""

from __future__ import annotations

import ast
import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import typer
from typer.testing import CliRunner

from r7convert.cli import app
from tests.test_architecture import LEVELS, PACKAGE

ROOT = Path(__file__).parents[1]
CLI = ROOT / "docs" / "cli.md"
README = ROOT / "README.md"
DESIGN = ROOT / "docs" / "design.md"
BEGIN, END = "<!-- example: written by `make docs` -->\n", "<!-- end of example -->\n"
EXAMPLE = (
    "sample r7 --mode uniform",
    "stamp r7 --check",
    "repack r7 stock --target rank-sliced --tp 2",
    "verify stock --source r7 --tp 2 --device cpu",  # the same page on a machine with a GPU
)
INTRO = """# Commands

Written by `make docs` from `r7convert COMMAND --help`; a test keeps it current.

Results go to stdout, progress and talk to stderr. Exit codes: 0 ok, 1 unexpected, 2 usage, 3 input unusable or unsupported (or, with
`--check`, a repair is due), 4 verification failed, 5 no room, device or permission, 6 network, 130 interrupted. An error is one line,
`where: what: expected X, got Y. Do Z.`; `R7_DEBUG=1` adds the traceback.
"""


DESIGN_INTRO = """# The map

Written by `make docs`: each line is the beginning of the module's own docstring, the level is the one that tests/test_architecture.py
holds it to. A module imports lower levels only, so this page can be read from top to bottom, and the code as well.

Three rules carry the design. Stages meet in folders, never in memory: `download`, `stamp`, `repack`, `encode-shared`, `verify`, `push`
can each be run, killed and repeated alone. What decides is pure (`plan_repack` from headers, `repair` from JSON, the policies from K
tables), and what touches the disk or the network is a door of its own (`store`, `whole_file`, `hub`). And writer and checker share the
specification, never the code: `contract*`, `evidence` and `verify*` read a folder with rules of their own.

An hour's way in: `format`, `plan`, `repack`, `verify`; then `checkpoint` for what is refused and `codec` for what the bits mean.
"""


def render_design() -> str:
    """Every module of the package, by level."""
    lines, level = [DESIGN_INTRO], -1
    for path in sorted(PACKAGE.glob("*.py"), key=lambda path: (LEVELS[path.stem], path.stem)):
        if LEVELS[path.stem] != level:
            level = LEVELS[path.stem]
            lines.append(f"\n## Level {level}\n\n| module | what it is |\n|---|---|\n")
        lines.append(f"| `{path.stem}` | {opening(path)} |\n")
    return "".join(lines)


def opening(path: Path) -> str:
    """The first paragraph of a module's docstring, without a last sentence that only leads over to what follows."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0].split())
    if text.endswith(":"):
        text = text[: text.rindex(". ") + 1]
    assert text.endswith("."), f"{path.name} opens with no sentence"
    return text


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
            lines.append(f"$ r7convert {command}\n{done.output}")
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
    DESIGN.write_text(render_design())
    README.write_text(with_example(README.read_text()))
