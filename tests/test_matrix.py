"""Every kind of source to every target: what docs/targets.md says comes true, is judged, and can be gone back on, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from r7convert.address import Repo
from r7convert.card import render_card
from r7convert.checkpoint import read_checkpoint
from r7convert.errors import FormatError, R7Error, UnsupportedError
from r7convert.format import PER_EXPERT_V1, SHARED_H_V1, is_expert_name
from r7convert.inspect import inspect
from r7convert.journal import MANIFEST, VERDICT, read_manifest
from r7convert.push import push
from r7convert.repack import repack
from r7convert.report import report
from r7convert.sample import write_sample
from r7convert.stamp import TARGETS
from r7convert.store import read_header, read_json
from r7convert.verify import verify
from tests import tamper
from tests.folders import contents, edited_shard, tree
from tests.hub_server import HubServer
from tests.matrix import KINDS, SMALL, TP, outcome, quantized_head
from tests.outputs import failed_parts, lines_of

pytestmark = pytest.mark.usefixtures("no_fsync")
Made = Callable[[str], Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The source folder of each kind, made once; tests read it."""
    folders: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in folders:
            folders[name] = KINDS[name].write(tmp_path_factory.mktemp(name))
        return folders[name]

    return get


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_pair_comes_out_as_the_plan_says(made: Made, tmp_path: Path, kind: str, target: str) -> None:
    source, output = made(kind), tmp_path / "output"
    said = outcome(source, target)
    choices: dict[str, Any] = {"target": target, "tp": TP[target], "threads": 1}
    if said.answer != "lossless":
        with pytest.raises(R7Error):
            repack(source, output, **choices)
        assert not output.exists(), "nothing is written before the plan stands"
    if said.answer == "no":
        return
    if said.answer == "by policy":
        choices |= {"mixed_k": "lift", "device": "cpu"}
    done = repack(source, output, **choices)
    verdict = verify(output, source=source, threads=1, device="cpu")
    assert verdict.ok, lines_of(verdict)
    before, after = contents(source), contents(output)
    lifted = {name.removesuffix(".trellis") for name in before if before[name] != after[name]}
    assert set(before) == set(after)
    assert lifted == set(read_manifest(output).facts.get("reencoded", {}))
    assert bool(lifted) == (said.answer == "by policy")

    checkpoint = read_checkpoint(source)
    assert sum(count for count, _ in done.plan.accounting.values()) == len(checkpoint.tensors)
    assert sum(nbytes for _, nbytes in done.plan.accounting.values()) == checkpoint.payload_bytes
    told = report(output)
    assert told.verdict.state == "ok"
    assert told.target == target
    assert sum(told.accounting.values()) == len(checkpoint.tensors)
    card = render_card("org/name", read_manifest(output), read_json(output / VERDICT), "", told.census)
    assert told.loads in card
    assert "every one, once" in card
    assert read_checkpoint(output).kind == target, "it is a source again, and says of itself what it is"
    _check_that_one_bit_is_found(source, output, f"{kind} {target}")


def _check_that_one_bit_is_found(source: Path, output: Path, seed: str) -> None:
    """In a routed tensor and in a carried one, drawn by the pair's name, so that all pairs together touch every class."""
    headers = [read_header(path) for path in sorted(output.glob("*.safetensors"))]
    entries = sorted((entry for header in headers for entry in header.tensors.values()), key=lambda entry: entry.name)
    draw = random.Random(seed)
    for routed in (True, False):
        entry = draw.choice([entry for entry in entries if is_expert_name(entry.name) == routed])
        tamper.flip_bit(output / entry.file, entry.offset + draw.randrange(entry.nbytes), bit=draw.randrange(8))
    tamper.reseal(output)
    verdict = verify(output, source=source, threads=1, device="cpu")
    assert "bytes" in failed_parts(verdict)
    assert entry.name in lines_of(verdict)
    assert sum(check.failures for check in verdict.parts[2].checks.values()) >= 2


def test_where_a_stock_server_takes_dense_exl3_is_said_before_and_after(made: Made, tmp_path: Path) -> None:
    """By the plan, in inspect's answer, and by verify of a folder that somebody made all the same."""
    answers = {answer.target: answer for answer in inspect(read_checkpoint(made("exl3-head"))).targets}
    assert not answers["rank-sliced"].accepted
    assert answers["rank-sliced"].why.startswith("lm_head: dense EXL3 with an mcg marker: expected a layer of 1-3, got no layer")
    assert answers["slabs"].accepted
    with pytest.raises(UnsupportedError, match=r"^lm_head: dense EXL3"):
        repack(made("exl3-head"), tmp_path / "no", target="rank-sliced", tp=2, dry_run=True)
    repack(made("exl3-one-k"), tmp_path / "output", target="rank-sliced", tp=2)
    quantized_head(tmp_path / "output")
    tamper.reseal(tmp_path / "output")
    contract = verify(tmp_path / "output").parts[1]
    failed = {check.name: check.shown for check in contract.checks.values() if check.failures}
    assert "lm_head: layer of a dense EXL3 module" in failed["dense EXL3 only in layers a stock reader takes it in"][0]


@pytest.mark.parametrize(("kind", "target"), [("slabs", "r7"), ("sliced", "rank-sliced"), ("deepseek-v4", "exl3")])
def test_what_came_of_another_kind_can_be_pushed(hub: HubServer, made: Made, tmp_path: Path, kind: str, target: str) -> None:
    repack(made(kind), tmp_path / "output", target=target, tp=TP[target], threads=1)
    verify(tmp_path / "output", source=made(kind), threads=1, device="cpu").check()
    push(tmp_path / "output", Repo("org/out"), private=True)
    there = hub.files("org/out")
    assert there.keys() >= read_manifest(tmp_path / "output").files.keys()
    assert f"`{target}` target" in hub.read("org/out", "README.md").decode()


# ---- there and back --------------------------------------------------------------------------------------------------

SLICED = {"target": "rank-sliced", "reader": "r14"}
TRIPS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "tp 4 to 2 to 4": ("sliced", [{**SLICED, "tp": tp} for tp in (4, 2, 1, 4)]),
    "shared_h, tp 4 to 1 to 2 to 4": ("sliced-shared", [{"target": "rank-sliced", "tp": tp} for tp in (4, 1, 2, 4)]),
    "sliced to exl3 to sliced": ("sliced", [{**SLICED, "tp": 4}, {"target": "exl3"}, {**SLICED, "tp": 4}]),
    "sliced to slabs to sliced": ("sliced-k6", [{**SLICED, "tp": 4}, {"target": "slabs", "tp": 1}, {**SLICED, "tp": 4}]),
    "shared_h to per_expert and back": (
        "sliced-shared",
        [{"target": "rank-sliced", "tp": 4, "rotation_layout": layout} for layout in (SHARED_H_V1, PER_EXPERT_V1, SHARED_H_V1)],
    ),
    "exl3 to slabs to exl3": ("exl3", [{"target": "slabs", "tp": 1}, {"target": "exl3"}, {"target": "slabs", "tp": 1}]),
    "r7 to slabs to r7": ("slabs", [{"target": "r7"}, {"target": "slabs", "tp": 2}, {"target": "r7", "tp": 4}]),
    "r7 to exl3 to r7": ("exl3-from-r7", [{"target": "r7"}, {"target": "exl3"}, {"target": "r7"}]),
    "r7 to sliced to r7": ("r7-whole-mtp", [{"target": "rank-sliced", "tp": 2}, {"target": "r7"}, {"target": "rank-sliced", "tp": 2}]),
    "families' own names": ("deepseek-v4", [{"target": "slabs", "tp": 2}, {"target": "exl3"}, {"target": "slabs", "tp": 2}]),
}


@pytest.mark.parametrize("trip", TRIPS)
def test_there_and_back_every_tensor_is_the_same_and_every_file_of_ours(made: Made, tmp_path: Path, trip: str) -> None:
    """Tensors are compared at each step, files where the same target was written before."""
    kind, steps = TRIPS[trip]
    start, folder = contents(made(kind)), made(kind)
    first: dict[str, str] = {}
    for turn, choices in enumerate(steps):
        output = tmp_path / str(turn)
        repack(folder, output, **choices, threads=1)
        assert contents(output) == start, f"{turn}: {choices}"
        folder, files = output, {name: digest for name, digest in tree(output).items() if name != MANIFEST}
        if turn == 0:
            first = files
    assert files.keys() == first.keys()
    assert {name for name in files if files[name] != first[name]} <= {"config.json"}
    before, after = (read_json(tmp_path / str(turn) / "config.json") for turn in (0, len(steps) - 1))
    assert after.pop("r7convert_provenance", None) == before.pop("r7convert_provenance", None) or kind.startswith(("r7", "exl3", "slabs"))
    assert after == before


def test_repack_of_its_own_output_changes_no_byte(made: Made, tmp_path: Path) -> None:
    choices: dict[str, Any] = {"target": "rank-sliced", "tp": 2, "threads": 1}
    repack(made("sliced"), tmp_path / "once", **choices)
    again = repack(tmp_path / "once", tmp_path / "twice", **choices)
    once, twice = tree(tmp_path / "once"), tree(tmp_path / "twice")
    assert {name for name in once if once[name] != twice[name]} == {MANIFEST}
    assert set(again.plan.accounting) == {"kept"}
    verify(tmp_path / "twice", source=tmp_path / "once", threads=1, device="cpu").check()


# ---- ranks that do not belong together -------------------------------------------------------------------------------

RANKED = "model.layers.1.mlp.experts.2"


def other(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors[name] = tensors[name] + 1


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (
            lambda t: [other(t, f"{RANKED}.down_proj.rank3.svh"), other(t, f"{RANKED}.gate_proj.rank1.suh")],
            "rank3.svh: copies on every rank",
        ),
        (lambda t: [t.pop(name) for name in list(t) if ".layers.1." in name and ".rank2." in name], "ranks 0-1, 3"),
        (lambda t: t.update({n.replace(".rank3.", ".rank4."): t.pop(n) for n in list(t) if ".rank3." in n and ".layers.1." in n}), "rank"),
        (lambda t: t.update({f"{RANKED}.up_proj.rank7.suh": t[f"{RANKED}.up_proj.rank0.suh"].clone()}), "rank"),
    ],
    ids=["a copy apart", "one missing", "one beyond tp", "a stray"],
)
def test_ranks_that_do_not_belong_together_are_named_and_nothing_is_written(
    tmp_path: Path, harm: Callable[[dict[str, torch.Tensor]], object], words: str, target: str
) -> None:
    write_sample(tmp_path / "source", **SMALL, kind="rank-sliced", mode="uniform", tail_tp=4)
    shard = next(path for path in (tmp_path / "source").glob("*.safetensors") if RANKED.encode() in path.read_bytes()[:200_000])
    with edited_shard(shard) as tensors:
        harm(tensors)
    before = tree(tmp_path / "source")
    with pytest.raises(FormatError, match="layer") as caught:
        repack(tmp_path / "source", tmp_path / "output", target=target, tp=TP[target])
    assert words in str(caught.value)
    assert not (tmp_path / "output").exists()
    assert tree(tmp_path / "source") == before


def test_every_rank_apart_is_named(tmp_path: Path) -> None:
    write_sample(tmp_path / "source", **SMALL, kind="rank-sliced", mode="uniform", tail_tp=2, shared_h=True)
    shard = next(path for path in (tmp_path / "source").glob("*.safetensors") if b"shared_h" in path.read_bytes()[:200_000])
    names = [f"model.layers.2.mlp.experts.shared_h.{name}" for name in ("gate_proj.rank1.suh", "down_proj.rank1.svh")]
    with edited_shard(shard) as tensors:
        for name in names:
            other(tensors, name)
    with pytest.raises(FormatError) as caught:
        repack(tmp_path / "source", tmp_path / "output", target="exl3", dry_run=True)
    assert all(name in str(caught.value) for name in names)
    assert len(str(caught.value).splitlines()) == 2
