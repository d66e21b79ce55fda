"""Hostile documents: every file r7convert reads and somebody else may have written, ways to spoil it, and what is asked of its readers.

A *door* is one document in a folder that is otherwise whole, and everything that opens it. Whatever stands in the document, a door
ends in an answer or in an error of ours: one short printable line an offender, in bounded time, with no tensor outside its file.
tests/test_hostile.py sends random documents through every door, and the corpus of tests/data/hostile.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from r7convert import policy, slabs
from r7convert.address import RECEIPT, read_origin
from r7convert.card import render_card
from r7convert.checkpoint import Checkpoint, read_checkpoint
from r7convert.cli import app
from r7convert.convert import STATE, _Chain
from r7convert.download import _receipt_files
from r7convert.errors import R7Error
from r7convert.inspect import inspect
from r7convert.journal import JOURNAL, MANIFEST, VERDICT, Journal, read_journal, read_manifest
from r7convert.ktable import parse_importance
from r7convert.plan import plan_repack
from r7convert.progress import Progress
from r7convert.recipe import read_recipe
from r7convert.repack import repack
from r7convert.report import report as make_report
from r7convert.report_html import render_html
from r7convert.restamp import restamp
from r7convert.sample import write_sample
from r7convert.sample_shape import Sample, check_sample
from r7convert.slab_layout import SIDECAR
from r7convert.store import STATE_DIR, encode_json, hash_file, is_plain_name, read_json, write_json
from r7convert.terminal import report_error
from r7convert.verdict import check_verdict
from r7convert.verify import verify
from tests.outputs import SMALLEST

EXAMPLES = int(os.environ.get("R7_FUZZ_EXAMPLES", "0"))
"""Cases a door and kind. 0: the few that `make test` sends, the same ones each time."""
MOST_SECONDS = 20.0
"""A case takes milliseconds; this much is a loop that does not end, on however busy a machine."""
MOST_LINES = 21
MOST_LINE = 4000

FINGERPRINT = {"tool": "r7convert", "target": "slabs", "source": {"repo": None, "commit": None}, "files": "abc"}
RECIPE = """\
format = "r7convert-recipe-v1"
title = "a recipe"
[source]
repo = "org/name"
commit = "7c73450f05a151439d0f184f216b1eefcc394a31"
[convert]
target = "rank-sliced"
tp = 4
reader = "r28"
mixed_k = "fit"
budget = "105%"
drop_mtp = false
[shared_experts]
bits = 6
[destination]
repo = "org/out"
private = true
"""
SAMPLE_RECIPE = """\
format = "r7convert-recipe-v1"
title = "a sample"
[source.sample]
seed = 1
mode = "mixed"
hidden = 256
k_values = [3, 4, 5]
[convert]
target = "exl3"
"""


# ---- what is asked of a reader ----------------------------------------------------------------------------------------


class Endless(AssertionError):
    """A case that took too long."""


@contextlib.contextmanager
def bounded(seconds: float = MOST_SECONDS) -> Iterator[None]:
    """Raises:  Endless once the time is up."""

    def ring(_: int, frame: FrameType | None) -> None:
        raise Endless(f"still running after {seconds} s, at {frame}")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def check_line(line: str) -> None:
    assert line.isprintable(), f"not fit for a terminal: {line[:200]!r}"
    assert len(line) <= MOST_LINE, f"{len(line)} characters: {line[:100]}"


def check_error(error: R7Error) -> None:
    """An error of ours keeps to its grammar whatever it quotes."""
    lines = str(error).split("\n")
    assert 1 <= len(lines) <= MOST_LINES, f"{len(lines)} lines"
    for line in lines:
        assert line.strip(), f"an empty line: {lines}"
        check_line(line)


class Asked:
    """The outcome of a case: the first error of ours that a call ended in, or "sound"."""

    def __init__(self) -> None:
        self.errors: list[R7Error] = []
        self.codes: list[int] = []
        """Exit codes, where commands were run."""

    def __call__(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except R7Error as error:
            check_error(error)
            self.errors.append(error)
            return None

    @property
    def outcome(self) -> str:
        if self.codes:
            return f"exit {self.codes[0]}"
        return type(self.errors[0]).__name__ if self.errors else "sound"


# ---- doors ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Door:
    """`file` of a copy of `folder` is spoiled, then `ask` opens it. `form` says how the bytes are made: json, header, lines, toml."""

    name: str
    folder: str
    file: str
    form: str
    ask: Callable[[Path, Asked], None]


def ask_checkpoint(folder: Path, asked: Asked) -> None:
    """read_checkpoint, inspect, a plan for every target, and the stamp: what `inspect`, `repack --dry-run` and `stamp --check` do."""
    checkpoint: Checkpoint | None = asked(read_checkpoint, folder)
    asked(restamp, folder)
    if checkpoint is None:
        return
    for header in checkpoint.headers.values():
        for entry in header.tensors.values():
            assert header.data_start <= entry.offset <= entry.offset + entry.nbytes <= (folder / entry.file).stat().st_size
    found = asked(inspect, checkpoint)
    if found is not None:
        json.dumps(found.to_json(), allow_nan=False)
    for target, tp in (("r7", None), ("rank-sliced", 2), ("slabs", 1), ("exl3", None))[checkpoint.r7 is None :]:
        plan = asked(plan_repack, checkpoint, target=target, tp=tp, choose=policy.lift)
        if plan is not None:
            for value in (plan.index(), plan.tier_map(), plan.sidecar(), plan.config, plan.quantization):
                encode_json(value)
            for layer in plan.layers:
                for rank in range(len(layer.files)):
                    layer.header(rank)


def ask_judge(folder: Path, asked: Asked) -> None:
    """A whole folder whose seal is right: only the contract can tell. The verdict is a failure or a good one, never a crash."""
    reseal(folder)
    verdict = asked(verify, folder, threads=1)
    if verdict is not None:
        encode_json(verdict.to_json())
        for line in verdict.failure_lines():
            check_line(line)
        asked(verdict.check)


def ask_judge_of_source(folder: Path, asked: Asked) -> None:
    """A good output beside a source that is not what it was."""
    verdict = asked(verify, folder.with_name("sliced"), source=folder, threads=1, device="cpu")
    if verdict is not None:
        asked(verdict.check)


def ask_slabs(folder: Path, asked: Asked) -> None:
    found = asked(slabs.read_sidecar, folder / SIDECAR)
    for layer in sorted(found[2])[:3] if found else ():
        for rank in range(min(found[0], 2)):
            asked(slabs.open_slabs, folder, layer, rank)
    ask_judge(folder, asked)


def ask_seal(folder: Path, asked: Asked) -> None:
    """MANIFEST.json and VERDICT.json and what quotes them: the judge, the report, the page, the card."""
    manifest = asked(read_manifest, folder)
    asked(verify, folder, threads=1)
    ask_verdict(folder, asked)
    if manifest is not None:
        asked(repack, folder.with_name("source"), folder, target="rank-sliced", tp=2, dry_run=True)


def ask_verdict(folder: Path, asked: Asked) -> None:
    verdict = asked(check_verdict, folder)
    report = asked(make_report, folder)
    if report is not None:
        encode_json(report.to_json())
        asked(render_html, report)
    manifest = asked(read_manifest, folder)
    if verdict is not None and manifest is not None:
        asked(render_card, "org/name", manifest, verdict, "", {})


def ask_journal(folder: Path, asked: Asked) -> None:
    asked(read_journal, folder)
    journal = asked(Journal, folder, FINGERPRINT)
    if journal is not None:
        for name in journal.done:
            assert "/" not in name
            journal.is_done(folder, name)
    asked(repack, folder.with_name("source"), folder, target="slabs", tp=1, dry_run=True)


def ask_receipt(folder: Path, asked: Asked) -> None:
    asked(read_origin, folder)
    asked(_receipt_files, folder)
    asked(read_checkpoint, folder)


def ask_outputs(folder: Path, asked: Asked) -> None:
    """The list of what a killed run meant to write: with --restart these files are removed, and no others."""
    beside = folder.with_name("source")
    before = sorted(path.name for path in beside.iterdir())
    asked(repack, beside, folder, target="slabs", tp=1, dry_run=True)
    asked(repack, beside, folder, target="slabs", tp=1, restart=True)
    assert sorted(path.name for path in beside.iterdir()) == before


def ask_recipe(folder: Path, asked: Asked) -> None:
    recipe = asked(read_recipe, folder / "recipe.toml")
    if recipe is not None:
        encode_json(recipe.to_json())
        if recipe.sample is not None:
            sample = asked(lambda: Sample(**recipe.sample))
            if sample is not None:
                asked(check_sample, sample)
        asked(_Chain(recipe, folder, None, Progress())._choices)


def ask_chain(folder: Path, asked: Asked) -> None:
    recipe = read_recipe(folder / "recipe.toml")
    asked(_Chain(recipe, folder, None, Progress()).read_state, restart=False)


def ask_importance(folder: Path, asked: Asked) -> None:
    value = asked(read_json, folder / "importance.json")
    if value is not None:
        asked(parse_importance, value, {1: 2, 2: 2})


def ask_commands(folder: Path, asked: Asked) -> None:
    """The same through the command line, which reads and writes nothing."""
    before = snapshot(folder.parent)
    for words in (
        ("inspect", str(folder)),
        ("inspect", str(folder), "--json"),
        ("stamp", str(folder), "--check"),
        ("repack", str(folder), str(folder.with_name("out")), "--target", "slabs", "--tp", "2", "--dry-run"),
        ("repack", str(folder), str(folder.with_name("out")), "--target", "rank-sliced", "--tp", "1", "--mixed-k", "lift", "--dry-run"),
    ):
        asked.codes.append(check_command(words, {0, 3}))
    assert snapshot(folder.parent) == before, "a command that only looks has changed something"


def ask_verify_command(folder: Path, asked: Asked) -> None:
    reseal(folder)
    before = snapshot(folder.parent)
    asked.codes.append(check_command(("verify", str(folder), "--threads", "1"), {0, 3, 4}))
    assert {path: at for path, at in snapshot(folder.parent).items() if path.name != VERDICT and path != folder} == {
        path: at for path, at in before.items() if path.name != VERDICT and path != folder
    }, "verify has changed more than its verdict"


def snapshot(base: Path) -> dict[Path, tuple[int, int]]:
    """Size and time of everything under a folder."""
    return {path: (path.lstat().st_size, path.lstat().st_mtime_ns) for path in base.rglob("*")}


R7 = "r7-experts-layer-001"
RANK = "experts-layer-001-rank-1-of-2.safetensors"
INDEX = "model.safetensors.index.json"

DOORS = {
    door.name: door
    for door in (
        Door("config", "source", "config.json", "json", ask_checkpoint),
        Door("quantization_config", "source", "quantization_config.json", "json", ask_checkpoint),
        Door("hf_quant_config", "source", "hf_quant_config.json", "json", ask_checkpoint),
        Door("index", "source", INDEX, "json", ask_checkpoint),
        Door("bit_map", "source", f"{R7}.json", "json", ask_checkpoint),
        Door("header", "source", f"{R7}.safetensors", "header", ask_checkpoint),
        Door("carrier", "source", "model-carrier.safetensors", "header", ask_checkpoint),
        Door("tail", "sliced", "config.json", "json", ask_checkpoint),
        Door("tier_map", "sliced", "tier_map.json", "json", ask_checkpoint),
        Door("judged config", "sliced", "config.json", "json", ask_judge),
        Door("judged index", "sliced", INDEX, "json", ask_judge),
        Door("judged tier_map", "sliced", "tier_map.json", "json", ask_judge),
        Door("judged header", "sliced", RANK, "header", ask_judge),
        Door("slabs", "sliced", SIDECAR, "json", ask_slabs),
        Door("judged source config", "source", "config.json", "json", ask_judge_of_source),
        Door("judged source index", "source", INDEX, "json", ask_judge_of_source),
        Door("judged source header", "source", f"{R7}.safetensors", "header", ask_judge_of_source),
        Door("command: config", "source", "config.json", "json", ask_commands),
        Door("command: index", "source", INDEX, "json", ask_commands),
        Door("command: bit_map", "source", f"{R7}.json", "json", ask_commands),
        Door("command: header", "source", f"{R7}.safetensors", "header", ask_commands),
        Door("command: tail", "sliced", "config.json", "json", ask_commands),
        Door("command: tier_map", "sliced", "tier_map.json", "json", ask_commands),
        Door("command: verify config", "sliced", "config.json", "json", ask_verify_command),
        Door("command: verify slabs", "sliced", SIDECAR, "json", ask_verify_command),
        Door("command: verify header", "sliced", RANK, "header", ask_verify_command),
        Door("command: verify manifest", "sliced", MANIFEST, "json", ask_verify_command),
        Door("manifest", "sliced", MANIFEST, "json", ask_seal),
        Door("verdict", "sliced", VERDICT, "json", ask_verdict),
        Door("journal", "unfinished", f"{STATE_DIR}/{JOURNAL}", "lines", ask_journal),
        Door("outputs", "unfinished", f"{STATE_DIR}/outputs.json", "json", ask_outputs),
        Door("receipt", "source", str(RECEIPT), "json", ask_receipt),
        Door("recipe", "recipe", "recipe.toml", "toml", ask_recipe),
        Door("sample recipe", "sample recipe", "recipe.toml", "toml", ask_recipe),
        Door("chain", "recipe", STATE, "json", ask_chain),
        Door("importance", "recipe", "importance.json", "json", ask_importance),
    )
}


def reseal(folder: Path) -> None:
    """Let the manifest say what stands there, so that the seal passes and the contract has to look."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
    except (ValueError, RecursionError):
        return  # it is the manifest that is hostile
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        return
    for name in [name for name in manifest["files"] if is_plain_name(name)]:
        if (folder / name).is_file():
            record = hash_file(folder / name)
            manifest["files"][name] = {"size": record.size, "sha256": record.sha256}
    (folder / MANIFEST).write_text(json.dumps(manifest))


class Workshop:
    """One good folder of each kind, and copies of them to spoil."""

    def __init__(self, base: Path) -> None:
        self.good = base / "good"
        self.good.mkdir(parents=True)
        source, sliced, unfinished = (self.good / name for name in ("source", "sliced", "unfinished"))
        write_sample(source, **SMALLEST, mode="uniform", hf_quant_config=True, tail_tp=2)
        receipt = source / RECEIPT
        receipt.parent.mkdir(parents=True)
        files = {"config.json": {"size": 3, "sha256": "0" * 64}}
        write_json(receipt, {"repo": "org/name", "revision": "main", "commit": "7c73450f05a151439d0f184f216b1eefcc394a31", "files": files})
        repack(source, sliced, target="rank-sliced", tp=2)
        verify(sliced, threads=1).check()
        (unfinished / STATE_DIR).mkdir(parents=True)
        journal = Journal(unfinished, FINGERPRINT)
        journal.record("a.safetensors", hash_file(source / "config.json"), {"zeros": {}})
        journal.record("b.json", hash_file(source / "config.json"))
        write_json(unfinished / STATE_DIR / "outputs.json", ["a.safetensors", "b.json"])
        for name, text in (("recipe", RECIPE), ("sample recipe", SAMPLE_RECIPE)):
            (self.good / name).mkdir()
            (self.good / name / "recipe.toml").write_text(text)
            write_json(self.good / name / "importance.json", {"1": [0.5, 1], "2": [0, 3]})
            chain = _Chain(read_recipe(self.good / name / "recipe.toml"), self.good / name, None, Progress())
            (self.good / name / STATE).parent.mkdir(exist_ok=True)
            chain.write_state({"download": {"repo": "org/name"}})
        self.work = base / "work"
        self.fresh()

    def fresh(self) -> None:
        """All copies anew: a case may have moved or removed anything in them."""
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.copytree(self.good, self.work)

    def raw(self, door: Door) -> bytes:
        return (self.good / door.folder / door.file).read_bytes()

    def send(self, door: Door, raw: bytes) -> Asked:
        """One case: the document in its place, the door opened, the folder put right again."""
        path = self.work / door.folder / door.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(raw)
        asked = Asked()
        try:
            with bounded():
                door.ask(self.work / door.folder, asked)
        finally:
            if door.folder in ("unfinished", "sliced"):
                shutil.rmtree(self.work / door.folder)
                shutil.copytree(self.good / door.folder, self.work / door.folder)
            else:
                path.write_bytes(self.raw(door))
        return asked


# ---- the command line ---------------------------------------------------------------------------------------------------


def command(*words: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command, as `cli.run` ends one, in this process."""
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace", write_through=True) for _ in range(2)]
    with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
        try:
            app(list(words), prog_name="r7convert")
            code: Any = 0
        except SystemExit as leaving:
            code = leaving.code
        except Exception as error:
            code = report_error(error)
            if code == R7Error.exit_code:
                raise
    out, err = (stream.buffer.getvalue().decode() for stream in streams)  # type: ignore[attr-defined]
    return int(code or 0), out, err


def check_command(words: tuple[str, ...], allowed: set[int]) -> int:
    """A command on a hostile folder: an allowed exit code, errors of one printable line each, no traceback."""
    code, out, err = command(*words)
    assert code in allowed, f"exit code {code} of {words}: {err[:500]}"
    assert "Traceback" not in err + out
    lines = err.split("\n")
    assert lines.pop() == ""
    if code:
        assert any(line.startswith("error: ") for line in lines)
    for line in [*lines, *out.split("\n")]:
        check_line(line)
    return code


# ---- making documents -------------------------------------------------------------------------------------------------


def header_of(raw: bytes) -> tuple[Any, bytes]:
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def with_header(header: bytes, data: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def document_of(form: str, raw: bytes) -> Any:
    """The value to spoil: of a journal its list of lines, of a safetensors file its header."""
    if form == "header":
        return header_of(raw)[0]
    if form == "lines":
        return [json.loads(line) for line in raw.splitlines()]
    return tomllib.loads(raw.decode()) if form == "toml" else json.loads(raw)


def bytes_of(form: str, text: Callable[[Any], bytes], value: Any, before: bytes) -> bytes:
    """A spoiled value as a file again; `text` writes one JSON value."""
    if form == "header":
        return with_header(text(value), header_of(before)[1])
    if form == "lines":
        return b"".join(text(line) + b"\n" for line in value) if isinstance(value, list) else text(value) + b"\n"
    if form == "toml":
        if not isinstance(value, dict):
            return b"x = " + toml_value(value, text)
        return b"".join(toml_key(key, text) + b" = " + toml_value(inner, text) + b"\n" for key, inner in value.items())
    return text(value)


def toml_key(key: str, text: Callable[[Any], bytes]) -> bytes:
    return text(key)


def toml_value(value: Any, text: Callable[[Any], bytes]) -> bytes:
    if isinstance(value, dict):
        return b"{" + b", ".join(toml_key(key, text) + b" = " + toml_value(inner, text) for key, inner in value.items()) + b"}"
    if isinstance(value, list):
        return b"[" + b", ".join(toml_value(inner, text) for inner in value) + b"]"
    return b"nan" if value is None else text(value)
