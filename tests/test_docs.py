"""Pages that are generated are current; in the others every command, link, path and figure is looked at, and what can run is run."""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from r7convert import __version__
from r7convert.cli import app
from r7convert.facts import READERS, serve_command
from tests import make_docs
from tests.make_docs import PAGES, ROOT
from tests.make_errors import refusals
from tests.matrix import KINDS
from tests.release_check import changelog_head

STALE = "is not what `make docs` writes: run it"
HAND = [page for page in PAGES if page.name not in (*make_docs.GENERATED, "log.md")]  # the log's commands are those of its day
BLOCK = re.compile(r"(<!-- tried -->\n+)?((?:^(?: {4}).*\n)+)", re.MULTILINE)


def commands() -> dict[str, Any]:
    return typer.main.get_command(app).commands  # type: ignore[attr-defined,no-any-return]


# ---- generated --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", make_docs.GENERATED)
def test_a_generated_page_is_current(name: str) -> None:
    assert (ROOT / "docs" / name).read_text() == make_docs.GENERATED[name](), f"docs/{name} {STALE}"


def test_the_command_page_has_every_command_in_80_columns() -> None:
    text = (ROOT / "docs/cli.md").read_text()
    assert len(re.findall(r"^## r7convert \S+$", text, re.MULTILINE)) == len(commands()) >= 6
    assert max(len(line) for block in re.findall(r"```text\n(.*?)```", text, re.DOTALL) for line in block.splitlines()) <= 80


def test_the_map_has_every_module() -> None:
    modules = {path.stem for path in (ROOT / "r7convert").glob("*.py")}
    assert set(re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/design.md").read_text(), re.MULTILINE)) == modules
    assert len(modules) > 50


def test_the_table_of_targets_has_every_kind_of_source() -> None:
    rows = re.findall(r"^\| (\w.*?) \|", (ROOT / "docs/targets.md").read_text(), re.MULTILINE)
    assert rows == ["from", *(kind.words for kind in KINDS.values())]
    assert len(rows) >= 19


def test_the_error_page_has_every_refusal() -> None:
    """Against a count of another kind: the text of the sources."""
    found = [refusal for path in ROOT.glob("r7convert/*.py") for refusal in refusals(path)]
    calls = sum(
        len(re.findall(r"\bcomplain\($|\bcomplain\((?!where: object)", path.read_text(), re.MULTILINE))
        for path in ROOT.glob("r7convert/*.py")
    )
    added = sum(
        len(re.findall(r"\b(?:bad|wrong|offences|missing|foreign)\.add\(", path.read_text())) for path in ROOT.glob("r7convert/*.py")
    )
    assert 300 < len(found) == calls + added
    page = (ROOT / "docs/errors.md").read_text()
    assert "| this is a pointer, not the file |  | Fetch it with `hf download REPO` or `git lfs pull`, then run again. | 3 |" in page
    assert page.count("\n| ") > 250


@pytest.mark.parametrize("page", [page for page in PAGES if make_docs.SCREEN.search(page.read_text())], ids=lambda page: page.name)
def test_screens_are_what_the_commands_print(page: Path) -> None:
    text = page.read_text()
    assert is_same(text, make_docs.with_screens(text)), f"{page.name} {STALE}"
    assert not re.search(r"^\w+ +failed +[1-9]", text, re.MULTILINE), f"{page.name} shows a verdict that failed"
    for shown in re.findall(r"^```text\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        assert max(map(len, (line for line in shown.splitlines() if not line.startswith(("$ ", "error: "))))) <= 80


def is_same(page: str, today: str) -> bool:
    """Word for word, but for measured errors: another processor may round a sum otherwise."""
    one, other = (re.split(r"(0\.\d+)", text) for text in (page, today))
    return one[::2] == other[::2] and all(abs(float(a) - float(b)) <= 0.02 * float(b) for a, b in zip(one[1::2], other[1::2], strict=True))


# ---- commands ---------------------------------------------------------------------------------------------------------


def command_lines(text: str) -> Iterator[str]:
    """Everything that is set as code and begins with r7convert or python -m r7convert, one line each."""
    text = re.sub(r"\\\n\s*", " ", re.sub(r"```text\n.*?```", "", text, flags=re.DOTALL))
    for code in [*re.findall(r"^ {4}(.+)$", text, re.MULTILINE), *re.findall(r"`([^`\n]+)`", text)]:
        for part in re.split(r" && |; ", code):
            if found := re.search(r"(?:^|-m )r7convert ([a-z-][^|#]*)", part.removeprefix("R7_DEBUG=1 ")):
                yield found[1].strip()


def check_command(line: str) -> None:
    """Parse a line as the shell and the registry would. `[--optional]` parts are taken, N is a number."""
    words = shlex.split(re.sub(r"[\[\]]", "", line))
    if words[0].startswith("-"):
        assert words[0] in ("--version", "--help", "--install-completion")
        return
    command = commands()[words[0]]
    known = {option for parameter in command.params for option in parameter.opts}
    arguments = words[1:]
    assert {word.partition("=")[0] for word in arguments if word.startswith("-") and not word[1:].isdigit()} <= known, line
    if len(arguments) > 1 or (arguments and not arguments[0].startswith("-")):
        command.make_context(words[0], ["4" if word == "N" else word for word in arguments])


def test_every_command_in_the_pages_parses() -> None:
    looked, wrong = 0, []
    for page in HAND:
        for line in command_lines(page.read_text()):
            try:
                check_command(line)
            except Exception as error:  # Typer's own classes, which it keeps to itself
                wrong.append(f"{page.name}: r7convert {line}: {error!r} {error}")
            looked += 1
    assert not wrong
    assert looked >= 45
    for bad in ("repack a b --target exl4", "verify a --tq 4", "inspect a b", "conver x"):
        with pytest.raises(Exception, match=r"exl4|verify a --tq|unexpected extra|conver"):
            check_command(bad)


def test_what_is_marked_as_tried_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    ran = 0
    for page in (page for page in HAND if "<!-- tried -->\n" in page.read_text()):
        folder = tmp_path / page.stem
        folder.mkdir()
        shutil.copytree(ROOT / "examples", folder / "examples")
        with contextlib.chdir(folder):
            CliRunner().invoke(app, ["sample", "src", "--experts", "2", "--hidden", "128", "--intermediate", "256"])
            for tried, block in BLOCK.findall(page.read_text()):
                for line in block.splitlines() if tried else ():
                    words = line.split()
                    if words[0] == "python":
                        done = subprocess.run([sys.executable, *words[1:]], capture_output=True, text=True)
                        assert done.returncode == 0, f"{page.name}: {line}: {done.stdout}{done.stderr}"
                    else:
                        shown = CliRunner().invoke(app, words[1:])
                        assert shown.exit_code == 0, f"{page.name}: {line}: {shown.exception}"
                    ran += 1
    assert ran >= 12


def test_the_python_of_the_pages_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    code = re.findall(r"```python\n(.*?)```", (ROOT / "docs/api.md").read_text(), re.DOTALL)[0]
    exec(compile(code, "docs/api.md", "exec"), {})
    assert capsys.readouterr().out.startswith("slabs (3, 4, 5) [(")
    monkeypatch.chdir(tmp_path)
    Path("source").rename("src")
    Path("out").rename("out-slabs")
    readme = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(readme) == 1
    exec(compile(readme[0], "README.md", "exec"), {})


def test_every_bench_in_the_pages_exists_and_has_its_options() -> None:
    looked = 0
    for page in HAND:
        for module, options in re.findall(r"python3? -m tests\.([\w.]+)([^`|\n]*)", page.read_text()):
            source = (ROOT / "tests" / f"{module.replace('.', '/')}.py").read_text()
            for option in re.findall(r"--[a-z][a-z-]*", options):
                assert f'"{option}"' in source, f"{page.name}: python -m tests.{module} {option}"
            looked += 1
    assert looked >= 8


def test_the_serve_commands_are_those_that_report_gives() -> None:
    page = (ROOT / "docs/how-to.md").read_text()
    for target in READERS:
        command = serve_command({"target": target, "tp": 4}, "out", layer=3, is_repo=False)
        assert re.search(rf"^\| `{target}`[^|]*\| `{re.escape(command)}`", page, re.MULTILINE), target
    assert len(READERS) == 4


# ---- links, paths, targets, figures -----------------------------------------------------------------------------------


def test_every_make_target_in_the_pages_exists_and_make_lists_them() -> None:
    listed = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    pages = [*PAGES, ROOT / ".ci/run", ROOT / ".github/pull_request_template.md"]
    named = {target for page in pages for target in re.findall(r"(?:`|^ *)make ([a-z-]+)", page.read_text(), re.MULTILINE)}
    assert {"demo", "test", "docs", "site", "release-check"} <= named
    assert named <= listed


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub and the site make them."""
    heads = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_links_lead_somewhere() -> None:
    looked = 0
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            assert not target.startswith("http"), f"{page.name}: {target}: a page that nobody here can check"
            path, _, anchor = target.partition("#")
            place = page.parent / path if path else page
            assert place.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(place), f"{page.name}: {target}"
            looked += 1
    assert looked >= 60


def test_paths_in_the_pages_exist() -> None:
    looked = 0
    for page in [page for page in PAGES if page.name not in ("errors.md", "api.md", "log.md")]:
        text = re.sub(r"```text\n.*?```", "", page.read_text(), flags=re.DOTALL)
        for path in re.findall(r"(?<![\w/.-])((?:r7convert|tests|kernels|recipes|examples|docs)/[\w./-]+\.(?:py|cuh?|md|toml|svg))", text):
            assert (ROOT / path).exists(), f"{page.name}: {path}"
            looked += 1
    assert looked >= 20


def test_figures_of_the_performance_page_stand_in_the_log() -> None:
    log = (ROOT / "docs/log.md").read_text()
    sections = {
        re.sub(r"[^\w\- ]", "", part.partition("\n")[0].lower()).replace(" ", "-"): part
        for part in re.split(r"^## ", log, flags=re.MULTILINE)
    }
    looked = 0
    for line in (ROOT / "docs/performance.md").read_text().splitlines():
        if not (link := re.search(r"\(log\.md#([^)]+)\)", line)):
            continue
        _, _, figures, *rest = line.split("|")
        for cell in (figures, *(rest[:1] if len(rest) == 4 else ())):
            for number in re.findall(r"\d[\d,]*(?:\.\d+)?(?![\w.]*%)", cell):
                assert re.search(rf"(?<![\d.,]){re.escape(number.rstrip(','))}(?![\d]|\.\d)", sections[link[1]]), (
                    f"{number} is not in {link[1]}: {line}"
                )
                looked += 1
    assert looked >= 40


def test_the_site_builds_strictly_and_fetches_nothing(tmp_path: Path) -> None:
    pytest.importorskip("myst_parser", reason="the extra `docs` is not installed")
    pytest.importorskip("furo", reason="the extra `docs` is not installed")
    site = tmp_path / "site"
    words = [
        sys.executable,
        "-m",
        "sphinx",
        "-W",
        "-n",
        "-q",
        "--keep-going",
        "-b",
        "html",
        "-d",
        tmp_path / "doctrees",
        ROOT / "docs",
        site,
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    pages = sorted(site.glob("*.html"))
    assert {page.stem for page in pages} >= {page.stem for page in ROOT.glob("docs/*.md")}
    for page in pages:
        loaded = re.findall(r'<(?:script|link|img|iframe)[^>]*?(?:src|href)="([^"]+)"', page.read_text())
        assert loaded
        assert not [place for place in loaded if re.match(r"(https?:)?//", place)], page.name


# ---- project ----------------------------------------------------------------------------------------------------------


def test_the_changelog_has_the_version() -> None:
    assert changelog_head((ROOT / "CHANGELOG.md").read_text())[0] == __version__
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["version"]["path"] == "r7convert/__init__.py"


def test_issue_forms_are_sound_and_ask_for_the_machine() -> None:
    import yaml

    forms = {path.stem: yaml.safe_load(path.read_text()) for path in ROOT.glob(".github/ISSUE_TEMPLATE/*.yml")}
    assert set(forms) == {"bug", "conversion", "config"}
    for name in ("bug", "conversion"):
        ids = [part["id"] for part in forms[name]["body"]]
        assert len(ids) == len(set(ids)) >= 3
        assert all(part["type"] in ("input", "textarea") and part["attributes"]["label"] for part in forms[name]["body"])
    assert "r7convert env --json" in str(forms["bug"])
    assert all(check_command(line) is None for line in re.findall(r"`r7convert ([^`]+)`", str(forms)) if "SRC" not in line)
