"""convert: the whole chain from a recipe. Each arrow is a folder; each stage is the command of its name and resumes by itself.

    download -> WORK/source -> repack -> WORK/out -> encode-shared -> verify -> push

What is done is noted in WORK/convert.json, so that a repeated command goes on where the last one stopped, and a recipe that
changed meanwhile is not mixed into the work of another.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from r7convert.address import Repo
from r7convert.checkpoint import build_checkpoint, read_checkpoint
from r7convert.download import download
from r7convert.errors import FormatError, UsageError, complain
from r7convert.journal import locked
from r7convert.ktable import parse_budget
from r7convert.progress import Progress
from r7convert.push import push
from r7convert.recipe import Recipe
from r7convert.remote import RemoteSource
from r7convert.repack import choose_plan, repack
from r7convert.sample import write_sample
from r7convert.store import STATE_DIR, read_json, write_json
from r7convert.verify import verify

Json = Any

STATE = "convert.json"
SOURCE, OUT = "source", "out"


@dataclass(frozen=True, slots=True)
class Converted:
    """What a chain did: the stages in order, what each one says, and where the outcome is."""

    title: str
    output: Path
    stages: dict[str, Json]
    url: str | None
    dry_run: bool = False

    def to_json(self) -> Json:
        return {"title": self.title, "output": str(self.output), "url": self.url, "dry_run": self.dry_run, "stages": self.stages}


def plan_stages(recipe: Recipe, source: Path | Repo | None) -> list[str]:
    """The stages a recipe asks for, in order.

    Raises:  UsageError for a source that is missing, or given twice.
    """
    pinned = recipe.source is not None or recipe.sample is not None
    if pinned and source is not None:
        raise UsageError(complain("--source", "source", expected="none: the recipe names one", found=source))
    if not pinned and source is None:
        raise UsageError(complain("--source", "source", expected="a folder or org/name@commit: the recipe names none", found="none"))
    if isinstance(source, Repo) and source.revision is None:
        raise UsageError(complain("--source", "source", expected="org/name@commit", found=source, do="A chain is pinned to a commit."))
    first = "sample" if recipe.sample is not None else "download"
    stages = [] if isinstance(source, Path) else [first]
    stages.append("repack")
    if recipe.shared_bits is not None:
        stages.append("encode-shared")
    stages.append("verify")
    if recipe.destination is not None:
        stages.append("push")
    return stages


def convert(
    recipe: Recipe,
    work: Path,
    *,
    source: Path | Repo | None = None,
    restart: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Converted:
    """Run a recipe in `work`, or finish an earlier run of it there.

    Raises:  UsageError (the source; another recipe's work), and what the stages raise: UnsupportedError, VerifyError, ...
    """
    progress = progress or Progress()
    chain = _Chain(recipe, work, source, progress)
    names = plan_stages(recipe, source)
    if dry_run:
        return Converted(recipe.title, chain.out, dict.fromkeys(names) | chain.rehearse(), None, dry_run=True)
    with locked(work):
        done = chain.read_state(restart=restart)
        for name in names:
            if name in done:
                progress.say(f"{name}: done before")
                continue
            progress.say(f"{name} ...")
            done[name] = chain.run(name, restart=restart)
            chain.write_state(done)
    url = done["push"]["url"] if "push" in done else None
    return Converted(recipe.title, chain.out, done, url)


class _Chain:
    def __init__(self, recipe: Recipe, work: Path, source: Path | Repo | None, progress: Progress) -> None:
        self.recipe = recipe
        self.work = work
        self.given = source
        self.progress = progress
        self.source = source if isinstance(source, Path) else work / SOURCE
        self.out = work / OUT
        self.identity = {"recipe": recipe.to_json(), "source": str(source.resolve() if isinstance(source, Path) else source)}

    def read_state(self, *, restart: bool) -> dict[str, Json]:
        """Stages that are done, by an earlier run of this very recipe.

        Raises:  UsageError for another recipe's work.
        """
        path = self.work / STATE
        if not path.exists() and (strangers := sorted(p.name for p in self.work.iterdir() if p.name != STATE_DIR)):
            raise UsageError(complain(self.work, "--work", expected="a new or empty folder", found=", ".join(strangers[:3])))
        if restart or not path.exists():
            self.write_state({})
            return {}
        state = read_json(path)
        if not isinstance(state, dict) or not isinstance(state.get("done"), dict):
            raise FormatError(complain(path, "state of a chain", expected="`done`", found="something else", do="Use --restart."))
        for key, value in self.identity.items():
            if state.get(key) != value:
                do = "Finish that one, choose another --work folder, or use --restart."
                raise UsageError(complain(self.work, f"work of another {key}", expected="this one", found="another", do=do))
        done: dict[str, Json] = state["done"]
        return done

    def write_state(self, done: dict[str, Json]) -> None:
        write_json(self.work / STATE, {**self.identity, "done": done})

    def run(self, name: str, *, restart: bool) -> Json:
        """One stage; what it returns is kept in the state and in the report."""
        stages: dict[str, Callable[[bool], Json]] = {
            "sample": self._sample,
            "download": self._download,
            "repack": self._repack,
            "encode-shared": self._encode_shared,
            "verify": self._verify,
            "push": self._push,
        }
        return stages[name](restart)

    def rehearse(self) -> dict[str, Json]:
        """What headers tell before anything is fetched: the plan, or why there is none. A sample has none before it is written."""
        if self.recipe.sample is not None:
            return {}
        if isinstance(self.given, Path):
            checkpoint = read_checkpoint(self.given)
        else:
            repo = self.given or self.recipe.source
            assert repo is not None
            checkpoint = build_checkpoint(RemoteSource(repo))
        plan = choose_plan(checkpoint, **self._choices())
        accounting = {kind: f"{count:,}" for kind, (count, _) in plan.accounting.items()}
        return {"repack": {"payload_bytes": plan.payload_bytes, "matrices_encoded_again": plan.reencoded, **accounting}}

    def _choices(self) -> dict[str, Any]:
        """What the recipe asks of the plan; the rest of its `convert` table is for the run."""
        asked = asdict(self.recipe.convert)
        budget = asked.pop("budget")
        del asked["allow_nonfinite"]
        return asked | {"budget": parse_budget(budget) if budget is not None else None}

    def _sample(self, restart: bool) -> Json:
        assert self.recipe.sample is not None
        shutil.rmtree(self.source, ignore_errors=True)  # a sample is written whole or not at all
        made = write_sample(self.source, progress=self.progress, **self.recipe.sample)
        return {"layers": list(made.r7_layers)}

    def _download(self, restart: bool) -> Json:
        repo = self.given if isinstance(self.given, Repo) else self.recipe.source
        assert repo is not None
        got = download(repo, self.source, restart=restart, progress=self.progress)
        return {"repo": got.repo, "commit": got.commit, "bytes": got.total_bytes}

    def _repack(self, restart: bool) -> Json:
        allow_nonfinite = self.recipe.convert.allow_nonfinite
        made = repack(self.source, self.out, **self._choices(), allow_nonfinite=allow_nonfinite, restart=restart, progress=self.progress)
        return {"files": len(made.files), "bytes": sum(record.size for record in made.files.values())}

    def _encode_shared(self, restart: bool) -> Json:
        from r7convert.encode_shared import encode_shared  # torch comes with it

        assert self.recipe.shared_bits is not None
        report = encode_shared(self.out, bits=self.recipe.shared_bits, restart=restart, progress=self.progress)
        return {"encoded": len(report.encoded), "kept": len(report.kept), "seconds": round(report.seconds, 1)}

    def _verify(self, restart: bool) -> Json:
        verdict = verify(self.out, source=self.source, progress=self.progress)
        verdict.check()
        return {part.name: part.state for part in verdict.parts}

    def _push(self, restart: bool) -> Json:
        place = self.recipe.destination
        assert place is not None
        sent = push(
            self.out,
            place.address(),
            private=place.private,
            create_pr=place.create_pr,
            tag=place.tag,
            progress=self.progress,
        )
        return {"url": sent.url, "commit": sent.commit}
