from __future__ import annotations

import ast
import os
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from r7convert import __version__
from tests.release_check import archive_problems

ROOT = Path(__file__).parents[1]
NAME = f"r7convert-{__version__}"


def files_of(folder: str) -> set[str]:
    """What stands in a folder of the checkout, compiled Python left out."""
    found = (path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(ROOT).as_posix() for path in found}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An sdist, and a wheel made from that sdist, without a download."""
    out = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)], check=True, capture_output=True, timeout=120
    )
    return out


def test_the_wheel_has_the_package_its_data_and_nothing_else(built: Path) -> None:
    with zipfile.ZipFile(built / f"{NAME}-py3-none-any.whl") as wheel:
        names = {name for name in wheel.namelist() if not name.startswith(f"{NAME}.dist-info/")}
    data = {f"r7convert/_data/{name}" for folder in ("kernels", "recipes") for name in files_of(folder) if not name.endswith(".gitkeep")}
    expected = files_of("r7convert") | data
    assert len(expected) > 40
    assert "r7convert/py.typed" in names
    assert {name for name in names if not name.endswith(".gitkeep")} == expected


def test_the_sdist_has_what_a_build_and_the_tests_need(built: Path) -> None:
    with tarfile.open(built / f"{NAME}.tar.gz") as sdist:
        names = {name.removeprefix(f"{NAME}/") for name in sdist.getnames()}
    wanted = {name for folder in ("r7convert", "kernels", "recipes", "examples", "tests", "docs") for name in files_of(folder)}
    assert wanted | {"pyproject.toml", "Makefile", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "PKG-INFO"} <= names
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no git checkout: nothing to compare an sdist with")
def test_the_release_check_accepts_these_and_names_what_is_missing(built: Path, tmp_path: Path) -> None:
    sdist, wheel = built / f"{NAME}.tar.gz", built / f"{NAME}-py3-none-any.whl"
    assert archive_problems(sdist, wheel) == []
    poor = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(poor, "w") as copy:
        for name in whole.namelist():
            if name != "r7convert/py.typed":
                copy.writestr(name, whole.read(name))
    assert archive_problems(sdist, poor) == [f"{wheel.name} lacks r7convert/py.typed"]


def test_an_installed_wheel_works_away_from_the_checkout(built: Path, tmp_path: Path) -> None:
    """A fresh environment that borrows this one's dependencies through a .pth file, so that nothing is downloaded."""
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    python = tmp_path / "venv/bin/python"
    site = Path(
        subprocess.run(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], capture_output=True, text=True
        ).stdout.strip()
    )
    mine = next(Path(folder) for folder in sys.path if (Path(folder) / "typer").is_dir())
    (site / "borrowed.pth").write_text(f"{mine}\n")
    wheel = str(built / f"{NAME}-py3-none-any.whl")
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", "-q", wheel], check=True, timeout=120
    )
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

    def run(*words: str) -> str:
        done = subprocess.run([*words], capture_output=True, text=True, cwd=tmp_path, env=clean, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    command = str(tmp_path / "venv/bin/r7convert")
    assert run(command, "--version") == f"r7convert {__version__}\n"
    assert "Commands:" in run(command, "--help")
    where = "import r7convert, r7convert.data as d; print(r7convert.__file__, d.data_dir('kernels') / 'trellis.cuh', d.data_dir('recipes'))"
    found = [Path(word) for word in run(str(python), "-c", where).split()]
    assert all(path.is_relative_to(site) for path in found)
    assert found[1].is_file()
    assert found[2].is_dir()
    assert "14 files" in run(command, "sample", "made")


def test_declared_dependencies_are_what_the_package_imports() -> None:
    """Every third-party import of the package is a dependency or an extra, by the name it is installed under."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {line for lines in (project["dependencies"], *project["optional-dependencies"].values()) for line in lines}
    names = {line.split(">")[0].split("=")[0].split("<")[0].split("[")[0].strip().lower().replace("-", "_") for line in declared}
    provided = {"cuda": "cuda_core", "yaml": "pyyaml", "llvmlite": "numba"}  # import name -> what brings it
    imported = set()
    for path in ROOT.glob("r7convert/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add((node.module or "").split(".")[0])
    outside = imported - set(sys.stdlib_module_names) - {"r7convert"}
    assert {"torch", "typer", "numpy"} <= outside
    assert {provided.get(name, name) for name in outside} <= names
