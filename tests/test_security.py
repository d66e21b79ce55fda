"""What r7convert never does, held by the code's own syntax trees; the modes of what it writes; the token; the dependencies."""

from __future__ import annotations

import ast
import os
import re
import stat
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from tests import check_deps
from tests.folders import sample
from tests.hub_server import TOKEN, HubServer
from tests.outputs import SMALLEST

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "r7convert"
LOCK = ROOT / "requirements-dev.lock"

# Readers that run what they read, and ways to run anything at all.
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "runpy", "code", "codeop", "imp", "pty"}
MODULES |= {"subprocess", "multiprocessing", "tarfile", "zipfile", "transformers", "pdb"}
NAMES = {"eval", "exec", "compile", "__import__", "breakpoint", "input"}
ATTRIBUTES = {"system", "popen", "unpack_archive", "extractall", "mktemp", "load_module", "import_module", "fork", "forkpty", "startfile"}
ATTRIBUTES |= {f"{kind}{end}" for kind in ("exec", "spawn") for end in ("l", "le", "lp", "lpe", "v", "ve", "vp", "vpe")}
OF_MODULE = {("torch", "load"), ("torch", "hub"), ("yaml", "load"), ("yaml", "unsafe_load"), ("yaml", "full_load"), ("yaml", "Loader")}
OF_MODULE |= {
    ("np", "load"),
    ("numpy", "load"),
    ("np", "fromfile"),
    ("torch", "package"),
    ("torch", "jit"),
    ("os", "chmod"),
    ("os", "umask"),
}
KEYWORDS = {"shell", "trust_remote_code", "allow_pickle", "weights_only"}


def offences(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom):
            if (node.module or "").split(".")[0] in MODULES and not node.level:
                yield node.lineno, node.module or ""
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names if (node.module, alias.name) in OF_MODULE)
            yield from ((node.lineno, f"{node.module}.{a.name}") for a in node.names if node.module == "os" and a.name in ATTRIBUTES)
        elif isinstance(node, ast.Name) and node.id in NAMES:
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if (owner, node.attr) in OF_MODULE or (owner in ("os", "shutil", "importlib", "tempfile") and node.attr in ATTRIBUTES):
                yield node.lineno, f"{owner}.{node.attr}"
        elif isinstance(node, ast.Call):
            yield from ((node.lineno, f"{word.arg}=") for word in node.keywords if word.arg in KEYWORDS)


def test_nothing_read_is_ever_run() -> None:
    files = sorted(PACKAGE.glob("**/*.py"))
    nodes, found = 0, []
    for path in files:
        tree = ast.parse(path.read_text())
        nodes += sum(1 for _ in ast.walk(tree))
        found += [f"{path.name}:{line}: {what}" for line, what in offences(tree)]
    print(f"looked at {nodes:,} nodes of {len(files)} files")
    assert not found
    assert len(files) > 90
    assert nodes > 90_000


BAD = (
    "import pickle",
    "from pickle import loads",
    "import os; os.system('x')",
    "from os import system",
    "import subprocess",
    "eval('1')",
    "exec('1')",
    "__import__('x')",
    "import torch; torch.load('x')",
    "from torch import load",
    "import numpy as np; np.load('x')",
    "f(x, allow_pickle=True)",
    "f(x, trust_remote_code=True)",
    "f('x', shell=True)",
    "import yaml; yaml.load('x')",
    "import shutil; shutil.unpack_archive('x')",
    "import tarfile",
    "import importlib; importlib.import_module('x')",
    "import tempfile; tempfile.mktemp()",
)


@pytest.mark.parametrize("line", BAD)
def test_the_scan_sees_what_it_is_for(line: str) -> None:
    assert list(offences(ast.parse(line)))


# ---- modes ------------------------------------------------------------------------------------------------------------

WRITE = """
import os, sys
from pathlib import Path
os.umask(int(sys.argv[2], 8))
base = Path(sys.argv[1])
from r7convert.sample import write_sample
from r7convert.repack import repack
from r7convert.restamp import restamp
from r7convert.verify import verify
from r7convert.cli_report import write_page
from r7convert.journal import Journal, locked
from r7convert.nvrtc import Cubin, _write_cubin
small = dict(hidden=128, intermediate=256, experts=3, layers=3, dense=1, mode="uniform", hf_quant_config=True)
write_sample(base / "source", **small)
repack(base / "source", base / "sliced", target="rank-sliced", tp=2)
repack(base / "source", base / "r7", target="r7", link=True)
verify(base / "sliced", source=base / "source", device="cpu")
restamp(base / "source", output=base / "copy")
restamp(base / "source", in_place=True)
write_page(base / "page.html", "<p>")
with locked(base / "unfinished"):
    Journal(base / "unfinished", {"tool": "x"})
    print("|".join(str(p) for p in base.rglob("*")))
from r7convert.encode_shared import encode_shared
encode_shared(base / "sliced", device="cpu")
_write_cubin(base / "cache" / "x.cubin", Cubin(code=b"x", **{f: v for f, v in CUBIN.items()}))
"""


@pytest.mark.parametrize(("umask", "file_mode", "folder_mode"), [("022", 0o644, 0o755), ("077", 0o600, 0o700), ("002", 0o664, 0o775)])
def test_modes_are_what_the_umask_says(tmp_path: Path, umask: str, file_mode: int, folder_mode: int) -> None:
    """No file that others may write, and none that its owner's colleagues surprisingly cannot read."""
    base = tmp_path / "base"
    base.mkdir()
    code = WRITE.replace("CUBIN", repr(cubin_fields()))
    done = subprocess.run([sys.executable, "-c", code, str(base), umask], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-1500:]
    files = [path for path in base.rglob("*") if path.is_file()]
    wrong = {str(path.relative_to(base)): oct(mode) for path in files if (mode := stat.S_IMODE(path.stat().st_mode)) != file_mode}
    folders = [path for path in base.rglob("*") if path.is_dir()]
    wrong |= {str(path.relative_to(base)): oct(mode) for path in folders if (mode := stat.S_IMODE(path.stat().st_mode)) != folder_mode}
    assert not wrong
    print(f"umask {umask}: {len(files)} files {oct(file_mode)}, {len(folders)} folders {oct(folder_mode)}")
    assert len(files) > 50


def cubin_fields() -> dict[str, object]:
    from dataclasses import fields

    from r7convert.nvrtc import Cubin

    return {f.name: "x" if "str" in str(f.type) else 0 for f in fields(Cubin) if f.name != "code"}


# ---- the token --------------------------------------------------------------------------------------------------------

CONVERT = """\
format = "r7convert-recipe-v1"
title = "through the loopback"
[source]
repo = "org/source"
commit = "{commit}"
[convert]
target = "rank-sliced"
tp = 2
[destination]
repo = "org/out"
"""


def test_the_token_is_in_no_output_and_no_log(tmp_path: Path) -> None:
    """download, repack, verify and push of a recipe with a token in the environment, the client's own log turned up; then a refusal."""
    source = sample(tmp_path / "source", **SMALLEST, mode="uniform", tail_tp=2)
    with HubServer(tmp_path / "hub") as server:
        commit = server.add_repo("org/source", {path.name: path.read_bytes() for path in source.iterdir()})
        (tmp_path / "recipe.toml").write_text(CONVERT.format(commit=commit))
        env = {**os.environ, **server.env(tmp_path / "hf_home"), "PYTHONPATH": str(ROOT), "R7_DEBUG": "1", "HF_HUB_VERBOSITY": "debug"}
        assert env["HF_TOKEN"] == TOKEN
        said = b""
        for number, (words, code) in enumerate(
            (
                (("convert", "recipe.toml", "--work", "work", "-v"), 0),
                (("push", "work/out", "org/out", "-v"), 0),
                (("inspect", "org/none", "-v"), 6),
                (("env", "--json"), 0),
            )
        ):
            command = [sys.executable, "-m", "r7convert", *words]
            done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, timeout=120, check=False)
            assert done.returncode == code, (number, done.stderr[-1500:])
            said += done.stdout + done.stderr
        assert sum(request.authorized for request in server.requests) > 20, "the token was not even used"
    assert TOKEN.encode() not in said
    looked = 0
    for path in [*(tmp_path / "work").rglob("*"), *(tmp_path / "hub").rglob("*"), *(tmp_path / "hf_home").rglob("*")]:
        if path.is_file():
            assert TOKEN.encode() not in path.read_bytes(), path
            looked += path.stat().st_size
    assert looked > 1_000_000
    print(f"token looked for in {looked:,} bytes of files and {len(said):,} of output")


# ---- dependencies -----------------------------------------------------------------------------------------------------


def test_the_lock_is_whole_and_fits_pyproject() -> None:
    """Every direct dependency is pinned within its range, every pin has hashes. torch is not: `make` installs one exact build of it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins: dict[str, list[str]] = {}
    for pin in check_deps.read_pins(LOCK):
        name, _, version = pin.partition("==")
        pins.setdefault(canonicalize_name(name.partition("[")[0]), []).append(version)
    looked = 0
    for line in [
        *project["dependencies"],
        *(line for extra in ("dev", "plot", "cu13") for line in project["optional-dependencies"][extra]),
    ]:
        wanted = Requirement(line)
        name = canonicalize_name(wanted.name)
        if name == "torch":
            continue
        assert name in pins, f"{line} is not in {LOCK.name}: run `make lock`"
        for version in pins[name]:
            assert SpecifierSet(str(wanted.specifier)).contains(version, prereleases=True), f"{line}: locked at {version}: run `make lock`"
        looked += 1
    assert looked >= 20
    assert "torch" not in pins
    assert re.search(r"^TORCH\s+\?= torch==", (ROOT / "Makefile").read_text(), re.MULTILINE)
    text = LOCK.read_text()
    assert len(re.findall(r"^\S+==", text, re.MULTILINE)) == len(
        re.findall(r"^\S+==[^\n]*\\\n +--hash=sha256:[0-9a-f]{64}", text, re.MULTILINE)
    )


def test_an_audit_that_asked_nobody_is_no_good_news() -> None:
    sound = {"name": "a", "version": "1", "vulns": []}
    flawed = {"name": "b", "version": "2", "vulns": [{"id": "CVE-1", "fix_versions": ["3"]}]}
    unasked = {"name": "c", "skip_reason": "Dependency not found on PyPI and could not be audited: c (1)"}
    assert check_deps.judge([sound], 1) == (0, ["no known vulnerabilities"])
    assert check_deps.judge([sound, flawed, unasked], 3)[0] == check_deps.FOUND
    assert check_deps.judge([sound, unasked], 2) == (check_deps.UNKNOWN, [unasked["skip_reason"]])
    assert check_deps.judge([sound], 2)[0] == check_deps.UNKNOWN
