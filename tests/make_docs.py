"""`make docs`: what can rot is generated. docs/cli.md from the live commands, docs/design.md from the modules' own words and the levels
they keep to, docs/errors.md from every refusal in the code, docs/api.md from docstrings, docs/targets.md from plans of samples, and
every screen in any page from running the commands that stand above it; the diagrams from what they explain.

tests/test_docs.py fails when one of them is not what this would write. A screen is written in a page as

    <!-- screen
    sample r7
    inspect r7
    -->
    (what they print, written here)
    <!-- end of screen -->

The screens of a page run one after the other in one folder, which is empty at first.
"""

from __future__ import annotations

import ast
import contextlib
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import typer
from typer.testing import CliRunner

from r7convert.cli import app
from tests.make_api import render_api
from tests.make_diagrams import DIAGRAMS
from tests.make_errors import render_errors
from tests.matrix import render as render_targets
from tests.test_architecture import LEVELS, PACKAGE

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "kernels/README.md", *ROOT.glob("docs/*.md")])
SCREEN = re.compile(r"(<!-- screen\n(.*?)-->\n).*?(<!-- end of screen -->\n)", re.DOTALL)

CLI_INTRO = """# Commands

Written by `make docs` from `r7convert COMMAND --help`; a test keeps it current.

Results go to stdout, progress, talk and what to do next to stderr. An error is one line, `where: what: expected X, got Y. Do Z.`; exit
codes and all messages are on the page [Errors](errors.md).
"""
MODULES = (
    "<!-- from here on written by `make docs`: the beginning of each module's docstring, by its level in tests/test_architecture.py -->\n"
)


def render_design() -> str:
    """The page as it is down to the mark, then every module of the package, by level."""
    lines, level = [(ROOT / "docs/design.md").read_text().partition(MODULES)[0], MODULES], -1
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
    pages = [f"\n## r7convert\n\n```text\n{help_of()}```\n"]
    pages += [f"\n## r7convert {name}\n\n```text\n{help_of(name)}```\n" for name in command_names()]
    return CLI_INTRO + "".join(pages)


def help_of(*words: str) -> str:
    with fixed_width():
        done = CliRunner().invoke(app, [*words, "--help"], prog_name="r7convert")
    assert done.exit_code == 0, done.output
    return done.stdout


# ---- screens ----------------------------------------------------------------------------------------------------------


def with_screens(page: str) -> str:
    """The page with each of its screens as its commands print it today."""
    if SCREEN.search(page) is None:
        return page
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), fixed_width():
        return SCREEN.sub(lambda found: f"{found[1]}```text\n{capture(found[2].splitlines())}```\n{found[3]}", page)


def capture(commands: list[str]) -> str:
    """What a person sees who runs these: results and talk in their order."""
    lines = []
    for command in commands:
        done = CliRunner().invoke(app, command.split(), prog_name="r7convert")
        lines.append(f"$ r7convert {command}\n{done.output}")
        if done.exception and not isinstance(done.exception, SystemExit):
            lines[-1] += "".join(f"error: {line}\n" for line in str(done.exception).splitlines())
    return "\n".join(lines)


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


GENERATED = {
    "cli.md": render_cli,
    "design.md": render_design,
    "errors.md": render_errors,
    "api.md": render_api,
    "targets.md": render_targets,
    **DIAGRAMS,
}

if __name__ == "__main__":
    for name, render in GENERATED.items():
        (ROOT / "docs" / name).write_text(render())
    for path in PAGES:
        path.write_text(with_screens(path.read_text()))
