"""Every stage cut at random, hundreds of times: resumed, compared byte for byte, and looked at in between by verify and push.

    make soak                               600 cuts, seed from the clock and printed
    make soak SEED=7 CUTS=2000
    make soak ONLY='repack slabs:kill:rename:3:0'        one cut again, as a failure prints it

1. Each stage (soak_stages.py) runs once, uncut: what it leaves is what every cut run has to end in. A tap (faults.py) counts its
   steps.
2. Stage, kind of fault, step and number are drawn; every pair of stage and kind comes once before any comes twice.
3. A child, forked from this process, runs into the fault. What it left is looked at: nothing incomplete under a final name, and
   verify and push refuse the folder unless it is whole.
4. The same command again, undisturbed: world and branch have to be those of the uncut run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import soak_machine
from tests.faults import KINDS, Fault, Tap
from tests.hub_server import HubServer
from tests.soak_child import Ended, run
from tests.soak_stages import RECIPE, SIZE, STAGES, Stage, World, disk_bytes, files_below, files_of, read_tree

# Exit codes that a fault may end in, besides 0 where the stage can do without; no room, no device and the like where none is named.
CODES = {"kill": (-9,), "torn": (-9,), "power": (-9,), "term": (130,), "int": (130,), "dropped": (6,), "changed": (3, 4, 5), "clock": ()}
USAGE, UNVERIFIED, NO_ROOM, NETWORK = 2, 4, 5, 6
VERDICT = "VERDICT.json"
ALL_KINDS = (*KINDS, *soak_machine.KINDS)


class Soak:
    def __init__(self, root: Path, hub: HubServer) -> None:
        self.root = root
        self.hub = hub
        self.worlds: dict[str, World] = {}
        self.steps: dict[str, Counter[str]] = {}
        self.mounts = soak_machine.can_mount()

    def prepare(self, stage: Stage) -> None:
        """Run a stage uncut, and count its steps."""
        from r7convert.sample import write_sample

        world = self.worlds[stage.name] = World(self.root, stage, self.hub)
        world.clear()
        write_sample(world.path / "source", **SIZE, **stage.sample)
        if stage.recipe:
            (world.path / "recipe.toml").write_text(RECIPE)
        for words in stage.first:
            ended = self._run(stage.command(world.path, words))
            assert ended.code == 0, ended.said
        world.keep()
        if stage.middle:
            ended = self._run(stage.command(world.path, stage.middle))
            assert ended.code == 0, ended.said
            world.middle = read_tree(world.path)
        if stage.encodes and not stage.hub:
            self._encode_once(stage, world)
        world.restore()
        ended = self._run(stage.command(world.path), tap=lambda: Tap(str(world.path)))
        assert ended.code == 0, ended.said
        world.finish()
        self.steps[stage.name] = ended.steps

    def _encode_once(self, stage: Stage, world: World) -> None:
        """In this very process, so that every child has the answers of the search."""
        from r7convert.cli import app

        world.restore()
        with (self.root / "notes").open("w") as notes, contextlib.redirect_stdout(notes), contextlib.redirect_stderr(notes):
            app(stage.command(world.path), standalone_mode=False)

    def kinds(self, stage: Stage) -> list[str]:
        """The kinds of fault that this stage can meet."""
        steps = self.steps[stage.name]
        kinds = [kind for kind, at in KINDS.items() if any(steps[step] for step in at) and (kind != "changed" or stage.source)]
        return kinds + ["disk"] + ["tmp"] * self.mounts + ["memory"] * stage.encodes

    def draw(self, stage: Stage, kind: str, draw: random.Random) -> Fault:
        if kind in soak_machine.KINDS:
            return Fault(kind, "-", draw.randrange(1000), draw.randrange(1 << 20))
        steps = self.steps[stage.name]
        step = draw.choice([step for step in KINDS[kind] if steps[step]])
        return Fault(kind, step, draw.randrange(1, steps[step] + 1), draw.randrange(1 << 20))

    # ---- one cut --------------------------------------------------------------------------------------------------------

    def cut(self, stage: Stage, fault: Fault) -> str:
        """Cut, look, repeat, compare; returns how the cut ended.

        Raises:  AssertionError for anything lost, corrupt, taken for whole too early, or said without an exit code of its own.
        """
        world = self.worlds[stage.name]
        words = stage.command(world.path)
        world.clear()
        sizes = disk_bytes(world.before), disk_bytes(world.after)
        with soak_machine.Machine(fault, world.path, *sizes, mounts=self.mounts) as machine:
            world.restore()
            ended = self._run_into(stage, fault, words, machine)
            self._check_end(stage, fault, ended)
            if fault.kind == "changed":
                if (
                    ended.code == 0
                    and stage.source != stage.output
                    and files_below(self._now(stage), stage.output) != files_below(world.after.digests, stage.output)
                ):
                    self._check_converted_what_it_read(stage)
                    return "came through, with what the source became"
                world.restore_source()
            self._look(stage, any_bytes=fault.kind == "changed" or (fault.kind == "power" and stage.client_names))
            machine.mend()
            if ended.code or self._differs(world):
                again = self._run(words)
                # Usage: the output is there and finished, says a stage that takes none but a new one.
                assert again.code in (0, USAGE), f"the same command again: exit {again.code}: {again.said}"
            assert not (differs := self._differs(world)), f"not what an uncut run leaves: {differs}"
            assert not (early := world.looks_whole_too_early()), f"the branch looked whole too early: {early}"
        if ended.code < 0:
            return "killed, resumed"
        return "came through" if ended.code == 0 else f"exit {ended.code}, resumed"

    def _run(self, words: list[str], **options: Any) -> Ended:
        return run(words, self.root / f"notes-{time.monotonic_ns()}", **options)

    def _run_into(self, stage: Stage, fault: Fault, words: list[str], machine: soak_machine.Machine) -> Ended:
        world = self.worlds[stage.name].path
        if fault.kind in soak_machine.KINDS:
            return self._run(words, before=machine.enter)
        source = str(world / stage.source) if stage.source else ""
        rival = words if fault.choice % 2 else ["verify", str(world / stage.output)]

        def meanwhile() -> None:
            ended = self._run(rival)
            assert ended.code in (0, USAGE, 3, 4, NO_ROOM), f"the second process: exit {ended.code}: {ended.said}"
            if rival != words and not any(name.endswith(VERDICT) for name in self.worlds[stage.name].after.digests):
                (world / stage.output / VERDICT).unlink(missing_ok=True)  # the second's own, and sound

        return self._run(words, tap=lambda: Tap(str(world), fault, source=source), meanwhile=meanwhile)

    def _check_end(self, stage: Stage, fault: Fault, ended: Ended) -> None:
        allowed: tuple[int, ...] = (0, *CODES.get(fault.kind, (NO_ROOM, NETWORK)))
        if stage.judges and fault.kind in ("io", "denied"):  # a file that cannot be read is not what the manifest says
            allowed += (UNVERIFIED,)
        if fault.kind == "memory":  # a card on which nothing fits; any other has to do
            allowed = (NO_ROOM,) if soak_machine.most_tiles(fault) == 0 else (0,)
        assert ended.code in allowed, f"exit {ended.code}, expected {' or '.join(map(str, allowed))}: {ended.said}"
        assert "Traceback" not in ended.said, ended.said

    def _check_converted_what_it_read(self, stage: Stage) -> None:
        """The source changed before it was read: then the outcome is that source's conversion."""
        world = self.worlds[stage.name].path
        words = ["verify", str(world / stage.output), "--source", str(world / stage.source), "--device", "cpu"]
        ended = self._run(words)
        assert ended.code == 0, f"exit 0 while the source changed, and the outcome is no conversion of it: {ended.said}"

    def _now(self, stage: Stage) -> dict[str, str]:
        return read_tree(self.worlds[stage.name].path).digests

    def _differs(self, world: World) -> list[str]:
        now, due = read_tree(world.path).digests, world.after.digests
        sent, sent_due = world.read_published(), world.published
        files = [
            f"{name} ({'changed' if name in now and name in due else 'left' if name in now else 'missing'})"
            for name in now.keys() | due.keys()
            if now.get(name) != due.get(name)
        ]
        return sorted(files) + [
            f"published {name}" for name in sorted(sent.keys() | sent_due.keys()) if sent.get(name) != sent_due.get(name)
        ]

    def _look(self, stage: Stage, *, any_bytes: bool) -> None:
        """In between: what stands under a final name is whole; verify and push refuse a folder that is not."""
        from r7convert.errors import R7Error
        from r7convert.push import pack
        from r7convert.verify import verify

        world = self.worlds[stage.name]
        folder = world.path / stage.output
        if not folder.is_dir():
            return
        found, known = files_of(self._now(stage), stage.output), world.whole_states()
        for name, digest in found.items():
            whole = any_bytes or any(digest == files.get(name) for files in known)
            assert whole, f"{name} stands under its final name and is not whole"
        assert not (early := world.looks_whole_too_early()), f"the branch looked whole too early: {early}"
        if found in known:
            return
        copied = self.root / "looked-at"
        shutil.copytree(folder, copied, symlinks=True)
        try:
            assert not _takes(pack, copied), "push takes a folder that is not whole"
            passed = False
            with contextlib.suppress(R7Error):
                passed = verify(copied, threads=1).ok
            if passed:  # taking the lock has completed what a kill cut short, or the folder is not whole
                now = files_of({f"x/{name}": digest for name, digest in read_tree(copied).digests.items()}, "x")
                assert now in known, "verify passes a folder that is not whole"
            else:
                assert not _takes(pack, copied), "push takes a folder that verify has refused"
        finally:
            shutil.rmtree(copied)


def _takes(pack: Any, folder: Path) -> bool:
    from r7convert.errors import R7Error

    try:
        pack(folder, "org/out")
    except R7Error:
        return False
    return True


# ---- the run ------------------------------------------------------------------------------------------------------------


def soak(soak: Soak, cuts: int, seed: int, stages: list[Stage]) -> dict[str, Any]:
    """`cuts` cuts over the stages; what happened, by stage, kind and outcome, and every failure with the words that repeat it."""
    draw = random.Random(seed)
    pairs = [(stage, kind) for stage in stages for kind in soak.kinds(stage)]
    outcomes: Counter[tuple[str, str, str]] = Counter()
    failures: list[dict[str, str]] = []
    turn: list[tuple[Stage, str]] = []
    for number in range(cuts):
        if not turn:
            turn = draw.sample(pairs, len(pairs))
        stage, kind = turn.pop()
        fault = soak.draw(stage, kind, draw)
        try:
            outcome = soak.cut(stage, fault)
        except AssertionError as error:
            outcome = "FAILED"
            failures.append({"only": f"{stage.name}:{fault}", "why": str(error)})
            print(f"FAILED  make soak ONLY='{stage.name}:{fault}'\n        {str(error)[-600:]}", flush=True)
        outcomes[stage.name, kind, outcome] += 1
        if (number + 1) % 100 == 0:
            print(f"{number + 1} cuts, {len(failures)} failures", flush=True)
    counts = [{"stage": s, "kind": k, "outcome": o, "cuts": n} for (s, k, o), n in sorted(outcomes.items())]
    return {"seed": seed, "cuts": cuts, "pairs": len(pairs), "steps": soak.steps, "outcomes": counts, "failures": failures}


def table(report: dict[str, Any]) -> list[str]:
    """Cuts by stage and kind, a row a stage; a failure shows as 3!1."""
    cells: Counter[tuple[str, str]] = Counter()
    failed: Counter[tuple[str, str]] = Counter()
    for line in report["outcomes"]:
        cells[line["stage"], line["kind"]] += line["cuts"]
        failed[line["stage"], line["kind"]] += line["cuts"] * (line["outcome"] == "FAILED")
    stages, kinds = (list(dict.fromkeys(key[at] for key in cells)) for at in (0, 1))
    kinds.sort(key=ALL_KINDS.index)
    stages.sort(key=[stage.name for stage in STAGES].index)
    rows = [["stage", *kinds, "all", "steps"]]
    for stage in stages:
        shown = [f"{cells[stage, kind]}{f'!{failed[stage, kind]}' if failed[stage, kind] else ''}" for kind in kinds]
        total = sum(cells[stage, kind] for kind in kinds)
        rows.append(
            [
                stage,
                *(cell.replace("0", "-") if cell == "0" else cell for cell in shown),
                str(total),
                f"{sum(report['steps'][stage].values()):,}",
            ]
        )
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) if at == 0 else cell.rjust(width) for at, (cell, width) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]


def warm() -> None:
    """Imports, which are the same in every child, and a memory for the CPU's search, which gives the same answers to each."""
    import torch

    torch.set_num_threads(1)
    from r7convert import cli, convert, cpu, encode_shared, fix_hub, push, recode, stream, verify_layer  # noqa: F401

    cpu.search_tiles = remember(cpu.search_tiles)


def remember(search: Callable[..., Any]) -> Callable[..., Any]:
    """The same search, asked once for each tile."""
    import torch

    known: dict[bytes, tuple[Any, Any]] = {}

    def search_tiles(tiles: Any, *, bits: int) -> tuple[Any, Any]:
        keys = [bytes([bits]) + tile.tobytes() for tile in tiles.numpy()]
        if new := [at for at, key in enumerate(keys) if key not in known]:
            for at, *answer in zip(new, *search(tiles[new], bits=bits), strict=True):
                known[keys[at]] = answer[0], answer[1]
        return torch.stack([known[key][0] for key in keys]), torch.stack([known[key][1] for key in keys])

    return search_tiles


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description="Cut every stage at random; see the head of the file.")
    parser.add_argument("--cuts", type=int, default=600)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--only", default="", help="STAGE or STAGE:FAULT")
    parser.add_argument("--stages", type=int, default=len(STAGES), help="only so many of them, drawn")
    parser.add_argument("--json", type=Path, default=None)
    asked = parser.parse_args()
    began = time.monotonic()
    seed = int.from_bytes(os.urandom(3), "little") if asked.seed is None else asked.seed
    root = Path(tempfile.mkdtemp(prefix="r7convert-soak-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    name, _, fault = asked.only.partition(":")
    stages = [stage for stage in STAGES if name in ("", stage.name)]
    stages = random.Random(seed).sample(stages, min(asked.stages, len(stages)))
    with HubServer(root / "hub") as hub:
        os.environ |= hub.env(root / "hf")
        warm()
        try:
            work = Soak(root, hub)
            for stage in stages:
                work.prepare(stage)
            prepared_s = time.monotonic() - began
            print(
                f"seed {seed}, {len(stages)} stages, {'tmpfs' if work.mounts else 'no mount: a limit on file sizes instead'}; in {root}",
                flush=True,
            )
            if fault:
                print(work.cut(stages[0], Fault.parse(fault)))
                return 0
            report = soak(work, asked.cuts, seed, stages)
        finally:
            shutil.rmtree(root, ignore_errors=True)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    report |= {
        "commit": commit,
        "seconds": round(time.monotonic() - began, 1),
        "of_these_to_prepare": round(prepared_s, 1),
        "tmpfs": work.mounts,
    }
    print("\n".join(table(report)))
    totals: Counter[str] = Counter()
    for line in report["outcomes"]:
        totals[line["outcome"]] += line["cuts"]
    print(", ".join(f"{outcome}: {count}" for outcome, count in totals.most_common()))
    print(f"seed {seed}: {asked.cuts} cuts in {report['seconds']} s, {len(report['failures'])} failures")
    if asked.json is not None:
        asked.json.write_text(json.dumps(report, indent=1) + "\n")
    return bool(report["failures"])


if __name__ == "__main__":
    sys.exit(main())
