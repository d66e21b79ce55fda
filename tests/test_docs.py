from __future__ import annotations

import re
import tomllib
from pathlib import Path

import typer

from r7convert import __version__
from r7convert.cli import app
from tests import make_docs

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/*.md"), ROOT / "kernels/README.md"])
STALE = "is not what `make docs` writes: run it"


def commands() -> dict[str, set[str]]:
    """Command -> every option it takes, from the live registry."""
    found = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    return {name: {opt for parameter in command.params for opt in parameter.opts} | {"--help"} for name, command in found.items()}


def test_the_command_page_is_current() -> None:
    text = make_docs.CLI.read_text()
    assert text == make_docs.render_cli(), f"docs/cli.md {STALE}"
    assert len(re.findall(r"^## r7convert \S+$", text, re.MULTILINE)) == len(commands()) >= 6
    assert max(len(line) for line in re.findall(r"```text\n(.*?)```", text, re.DOTALL)[0].splitlines()) <= 80


def test_the_map_is_current_and_has_every_module() -> None:
    text = make_docs.DESIGN.read_text()
    assert text == make_docs.render_design(), f"docs/design.md {STALE}"
    modules = {path.stem for path in (ROOT / "r7convert").glob("*.py")}
    assert set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) == modules
    assert len(modules) > 50


def test_the_readmes_example_is_what_the_commands_print() -> None:
    readme = make_docs.README.read_text()
    assert readme == make_docs.with_example(readme), f"README.md {STALE}"
    assert "stock: ok for target rank-sliced" in readme


def test_every_command_and_option_in_the_pages_exists() -> None:
    known, looked = commands(), 0
    for page in PAGES:
        for line in re.findall(r"r7convert ((?:[a-z][a-z-]*)(?: +[^`|\n#(]*)?)", re.sub(r"\\\n\s*", " ", page.read_text())):
            words = line.split()
            if words[0] not in known and not any(word.startswith("-") for word in words):
                continue  # a sentence about r7convert
            assert words[0] in known, f"{page.name}: r7convert {line}"
            for word in words[1:]:
                option = re.match(r"--?[a-z][a-z-]*", word)
                assert option is None or option[0] in known[words[0]], f"{page.name}: r7convert {line}"
            looked += 1
    assert looked >= 15


def test_every_make_target_in_the_pages_exists_and_make_lists_them() -> None:
    makefile = (ROOT / "Makefile").read_text()
    listed = set(re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE))
    named = {
        target for page in [*PAGES, ROOT / ".ci/run"] for target in re.findall(r"(?:`|^ *)make ([a-z-]+)", page.read_text(), re.MULTILINE)
    }
    assert {"demo", "test", "docs"} <= named
    assert named <= listed


def test_links_between_pages_lead_somewhere() -> None:
    looked = 0
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
            looked += 1
    assert looked >= 4


def test_the_changelog_has_the_version() -> None:
    newest = re.search(r"^## (\S+) \((unreleased|\d{4}-\d\d-\d\d)\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == __version__
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["version"]["path"] == "r7convert/__init__.py"
