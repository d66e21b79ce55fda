"""The stages that tests/soak.py cuts: what stands before each, its command line, and what stands and is published when it is done.

A stage works in a world of its own, one folder at a fixed path: WORLD/source, WORLD/out, WORLD/work. It is put back as it was
before every cut, files with their times, and a Hub of our own with it.
"""

from __future__ import annotations

import copy
import hashlib
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.hub_server import HubServer, Repo

SIZE: dict[str, Any] = {"hidden": 128, "intermediate": 256, "experts": 2, "layers": 3, "dense": 1, "split": True}
MIXED, ONE_K = {"mode": "mixed", "tail_tp": 2}, {"mode": "uniform", "tail_tp": 2, "equal_tail_vectors": True}
SOURCE, TARGET = "org/glm", "org/out"
STOCK = ("--target", "rank-sliced", "--tp", "2")
RECIPE = """
format = "r7convert-recipe-v1"
title = "soak"
[convert]
target = "rank-sliced"
tp = 2
[shared_experts]
bits = 6
[destination]
repo = "org/out"
"""


@dataclass(frozen=True)
class Stage:
    """`words` is the command; `first` are commands that make what stands before. `{w}` is the world. `source` may be changed under
    the stage while it reads; `output` is what verify and push are asked about in between, and `middle` a command that leaves
    another whole state which the stage goes through. `client_names`: the Hub's client gives files their names before we have synced
    them, so that for a moment a power cut can leave one that is not whole; nobody is told that it is there.
    """

    name: str
    words: str
    sample: dict[str, Any] = field(default_factory=lambda: MIXED)
    first: tuple[str, ...] = ()
    source: str = "source"
    output: str = "out"
    middle: str = ""
    hub: bool = False
    encodes: bool = False
    recipe: bool = False
    judges: bool = False
    client_names: bool = False

    def command(self, world: Path, words: str = "") -> list[str]:
        return (words or self.words).format(w=world).split()


_SEALED = ("repack {w}/source {w}/out --target rank-sliced --tp 2", "verify {w}/out")
STAGES = (
    Stage("stamp in place", "stamp {w}/source --in-place", source="", output="source"),
    Stage("stamp to a folder", "stamp {w}/source --output {w}/out", source=""),
    Stage("repack r7", "repack {w}/source {w}/out --target r7"),
    Stage("repack r7, links", "repack {w}/source {w}/out --target r7 --link --threads 1"),
    Stage("repack exl3", "repack {w}/source {w}/out --target exl3"),
    Stage("repack slabs", "repack {w}/source {w}/out --target slabs --tp 2"),
    Stage("repack rank-sliced", "repack {w}/source {w}/out --target rank-sliced --tp 2", ONE_K),
    Stage("repack, r14", "repack {w}/source {w}/out --target rank-sliced --tp 1 --reader r14 --threads 1", {"mode": "uniform"}),
    Stage("repack, lift", "repack {w}/source {w}/out --target rank-sliced --tp 2 --mixed-k lift --device cpu", encodes=True),
    Stage("repack, fit", "repack {w}/source {w}/out --target rank-sliced --tp 2 --mixed-k fit --budget +9% --device cpu", encodes=True),
    Stage("encode-shared in place", "encode-shared {w}/out --device cpu", ONE_K, _SEALED, source="", encodes=True),
    Stage("encode-shared to a folder", "encode-shared {w}/source --output {w}/out --device cpu", encodes=True),
    Stage("download", f"download {SOURCE} {{w}}/out", ONE_K, source="", hub=True, client_names=True),
    Stage("stream", f"repack {SOURCE} {{w}}/out --target rank-sliced --tp 2 --stream", ONE_K, source="", hub=True),
    Stage(
        "push as you go",
        f"repack {SOURCE} {{w}}/out --target rank-sliced --tp 2 --stream --push-as-you-go {TARGET}",
        ONE_K,
        source="",
        hub=True,
    ),
    Stage("push", f"push {{w}}/out {TARGET}", ONE_K, _SEALED, source="out", hub=True),
    Stage("verify", "verify {w}/out --source {w}/source --device cpu", ONE_K, _SEALED[:1], judges=True),
    Stage(
        "convert",
        "convert {w}/recipe.toml --source {w}/source --work {w}/work",
        ONE_K,
        output="work/out",
        middle="repack {w}/source {w}/work/out --target rank-sliced --tp 2",
        hub=True,
        encodes=True,
        recipe=True,
        judges=True,
    ),
)


@dataclass(frozen=True)
class Tree:
    """SHA-256 of every file by its path; and its bytes."""

    digests: dict[str, str]
    sizes: dict[str, int]


def read_tree(folder: Path) -> Tree:
    """Every file by its path, and empty folders. What the Hub's own client keeps beside a download is no part of it, nor
    the note of a chain, which has times in it.
    """
    digests, sizes = {}, {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if ".cache/huggingface" in name or name.endswith("/convert.json"):
            continue
        if path.is_file():
            digests[name], sizes[name] = hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_size
        elif not any(path.iterdir()):
            digests[name + "/"] = "empty"
    return Tree(digests, sizes)


def disk_bytes(tree: Tree) -> int:
    """What the files take of a tmpfs, in whole pages, folders included."""
    return sum(-(-size // 4096) * 4096 for size in tree.sizes.values()) + 4096 * 8


def files_below(digests: dict[str, str], folder: str) -> dict[str, str]:
    return {name[len(folder) + 1 :]: digest for name, digest in digests.items() if name.startswith(f"{folder}/")}


def files_of(digests: dict[str, str], folder: str) -> dict[str, str]:
    """The files at the top of a folder of the tree, under final names; what is no part of the seal left out."""
    inside = files_below(digests, folder)
    unfinished = (".partial", ".incomplete", "/")
    return {
        n: d for n, d in inside.items() if n and "/" not in n[:-1] and not n.endswith(unfinished) and n not in ("VERDICT.json", "README.md")
    }


class World:
    """Where one stage works, and how it is put back."""

    def __init__(self, root: Path, stage: Stage, hub: HubServer) -> None:
        self.stage = stage
        self.path = root / "w"
        self._before = root / "before" / stage.name.replace(" ", "-")
        self._objects = self._before.with_name(self._before.name + "-objects")
        self._hub = hub
        self._repos: dict[str, Repo] = {}
        self.before = self.middle = self.after = Tree({}, {})
        self.published: dict[str, str] = {}

    def keep(self) -> None:
        """What stands now is what stands before."""
        shutil.copytree(self.path, self._before, symlinks=True)
        self.before = read_tree(self.path)
        for path in self._hub.objects.iterdir():
            path.unlink()
        files = {path.name: path for path in (self.path / "source").iterdir() if path.is_file()} if self.stage.hub else {}
        self._hub.repos.clear()
        if files:
            self._hub.add_repo(SOURCE, {name: path.read_bytes() for name, path in files.items()})
        self._repos = copy.deepcopy(self._hub.repos)
        shutil.copytree(self._hub.objects, self._objects)

    def finish(self) -> None:
        """What stands now is what a run that nobody cut leaves."""
        self.after, self.published = read_tree(self.path), self.read_published()

    def restore(self) -> None:
        self.clear()
        shutil.copytree(self._before, self.path, symlinks=True, dirs_exist_ok=True)
        self._hub.repos.clear()
        self._hub.repos.update(copy.deepcopy(self._repos))
        shutil.rmtree(self._hub.objects)
        shutil.copytree(self._objects, self._hub.objects)

    def restore_source(self) -> None:
        """The source as it was, times included."""
        shutil.rmtree(self.path / self.stage.source)
        shutil.copytree(self._before / self.stage.source, self.path / self.stage.source)

    def clear(self) -> None:
        self.path.mkdir(exist_ok=True)
        for path in self.path.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def read_published(self) -> dict[str, str]:
        """The branch that was pushed to."""
        return {name: blob.sha256 for name, blob in self._hub.files(TARGET).items()} if TARGET in self._hub.repos else {}

    def whole_states(self) -> list[dict[str, str]]:
        """What may stand in the output under final names: before, in the middle, after, and what goes up from there."""
        trees = (self.before, self.middle, self.after)
        return [*(files_of(tree.digests, self.stage.output) for tree in trees), self.published]

    def looks_whole_too_early(self) -> list[str]:
        """Commits of the branch that a reader would take for a checkpoint and that lack some of its files."""
        if TARGET not in self._hub.repos:
            return []
        marks = {"config.json", "model.safetensors.index.json", "quantization_config.json"}
        return [c.title for c in self._hub.history(TARGET) if marks & c.files.keys() and not self.published.keys() <= c.files.keys()]
