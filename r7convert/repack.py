"""Stage `repack`: EXL3 experts in any form in, a folder for one reader out.

    fingerprint -> journal -> layer files and shards -> small files -> index, tier map, slabs.json
                -> quantization_config.json -> config.json -> MANIFEST.json, the seal

Everything that headers can refuse is refused before the output folder exists. A killed run leaves whole files, partial ones
under `.partial` names, and a journal; the same command finishes it, and the folder is the same to the byte.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from r7convert.card import CARD
from r7convert.checkpoint import Checkpoint, read_checkpoint
from r7convert.copying import Recoder
from r7convert.errors import UnsupportedError, UsageError, complain
from r7convert.journal import Journal, Manifest, locked, read_journal, write_manifest
from r7convert.ktable import Budget
from r7convert.mixed_k import KChoice, bytes_budget, price_json, reencoded_facts, time_lines
from r7convert.plan import Plan, plan_repack
from r7convert.progress import Progress
from r7convert.repack_run import OUTPUTS, TOOL, Outlet, Repacked, Run, merge_findings
from r7convert.source import Folder, Payload
from r7convert.store import STATE_DIR, check_disjoint, write_json
from r7convert.team import Team
from r7convert.vectors import Vectors

__all__ = ["Outlet", "Repacked", "choose_plan", "execute", "repack"]

Json = Any

MOST_THREADS = 8


def repack(
    source: Path,
    output: Path,
    *,
    target: str,
    tp: int | None = None,
    reader: str = "r28",
    rotation_layout: str | None = None,
    mixed_k: str = "refuse",
    budget: Budget | None = None,
    budget_bytes: int | None = None,
    importance: Json = None,
    reference: Checkpoint | None = None,
    device: str = "auto",
    layers: tuple[int, int] | None = None,
    threads: int | None = None,
    link: bool = False,
    dry_run: bool = False,
    restart: bool = False,
    drop_mtp: bool = False,
    allow_nonfinite: bool = False,
    team: Team | None = None,
    progress: Progress | None = None,
) -> Repacked:
    """Convert a checkpoint folder for a target. A finished folder is left as it is; an unfinished one is finished.

    `mixed_k`, `budget` and `importance` say how experts that mix K come to one (docs/policies.md). `reference` has the BF16
    originals to encode from; else matrices whose K changes are encoded from the payload. `device` encodes them.

    Raises:  UsageError (choices, folders that overlap, an output that holds something else), FormatError and UnsupportedError
             (the source), ResourceError (room, permission, a device, a folder in use, a rank that died).
    """
    _check_policy(target, mixed_k=mixed_k, budget=budget or budget_bytes, importance=importance, reference=reference)
    check_disjoint(source, output)
    checkpoint = read_checkpoint(source)
    choice = KChoice(checkpoint, mixed_k, budget or bytes_budget(budget_bytes), importance, from_originals=reference is not None)
    try:
        plan = plan_repack(
            checkpoint,
            target=target,
            tp=tp,
            reader=reader,
            rotation_layout=rotation_layout,
            choose=choice,
            layers=layers,
            drop_mtp=drop_mtp,
            vectors=Vectors(checkpoint.source),
        )
    except UnsupportedError as error:
        if dry_run and choice.problem is not None:
            raise UnsupportedError("\n".join([str(error), *time_lines(choice, device)])) from None
        raise
    plan = replace(plan, policy=choice.facts())
    if dry_run:
        return Repacked(plan, output, dry_run=True, prices=price_json(choice, device) if plan.reencoded else {})
    assert isinstance(checkpoint.source, Folder)
    return execute(
        plan,
        checkpoint.source,
        output,
        threads=threads,
        link=link,
        restart=restart,
        allow_nonfinite=allow_nonfinite,
        device=device,
        reference=reference,
        team=team,
        progress=progress,
    )


def choose_plan(
    checkpoint: Checkpoint,
    *,
    mixed_k: str = "refuse",
    budget: Budget | None = None,
    budget_bytes: int | None = None,
    importance: Json = None,
    reference: Checkpoint | None = None,
    **choices: Any,
) -> Plan:
    """The plan of `plan_repack` with a K policy by its name; the checkpoint may be on the Hub.

    Raises:  as `plan_repack`.
    """
    _check_policy(choices["target"], mixed_k=mixed_k, budget=budget or budget_bytes, importance=importance, reference=reference)
    choice = KChoice(checkpoint, mixed_k, budget or bytes_budget(budget_bytes), importance, from_originals=reference is not None)
    return replace(plan_repack(checkpoint, choose=choice, **choices), policy=choice.facts())


def _check_policy(target: str, **given: Json) -> None:
    """Raises:  UsageError for an option that this target would pass over in silence."""
    if target == "rank-sliced":
        return
    for name, value in given.items():
        if value not in (None, "refuse"):
            found = f"one for {target}, which keeps every K"
            raise UsageError(complain(f"--{name.replace('_', '-')}", "K policy", expected="one for target rank-sliced alone", found=found))


def execute(
    plan: Plan,
    payload: Payload,
    output: Path,
    *,
    threads: int | None = None,
    link: bool = False,
    restart: bool = False,
    allow_nonfinite: bool = False,
    device: str = "auto",
    reference: Checkpoint | None = None,
    outlet: Outlet | None = None,
    team: Team | None = None,
    progress: Progress | None = None,
) -> Repacked:
    """Carry a plan out, reading payload wherever it comes from; finished files stay, unless an outlet takes them. In a team every
    rank calls it and writes its share of the files.

    Raises:  as `repack`.
    """
    team = team or Team()
    recoder = _recoder(plan, device, reference, team)
    run = Run(plan, payload, output, link, allow_nonfinite, recoder, outlet, progress or Progress())
    sealed = run.sealed_before() if team.is_first and not restart else None
    if team.first(sealed is not None, "the output was looked at"):
        return sealed or Repacked(plan, output, dry_run=False)
    if team.is_first:
        run.check_output(restart=restart)
        run.check_room()
    with locked(output) if team.is_first else contextlib.nullcontext():
        if team.is_first:
            if restart or read_journal(output)[0] is None:
                run.discard()
            journal = Journal(output, run.fingerprint, restart=restart)
            write_json(output / STATE_DIR / OUTPUTS, run.output_names())
        team.wait("the journal was begun")
        if not team.is_first:
            journal = Journal(output, run.fingerprint, rank=team.rank)
        resumed = run.copy(journal, threads or _threads(recoder), team)
        for done, learnt in team.gather((journal.done, journal.facts), "its files were written"):
            journal.done |= done
            journal.facts |= learnt
        files = dict(journal.done)
        findings = merge_findings(journal.facts)
        if team.is_first:
            files |= run.write_json_files(journal)
            files.pop(CARD, None)  # the card quotes the verdict, which is bound to the seal: sealed, it would be a circle
            facts = {**run.facts, **findings.to_json(), **reencoded_facts(journal.facts)}
            write_manifest(output, Manifest(TOOL, files, facts))
            journal.close()
        team.wait("the seal was written")
    run.progress.finish()
    return Repacked(plan, output, dry_run=False, files=files, findings=findings, resumed=resumed)


def _recoder(plan: Plan, device: str, reference: Checkpoint | None, team: Team) -> Recoder | None:
    """What encodes again, where anything is: torch is not imported for a lossless plan."""
    if not plan.reencoded:
        return None
    from r7convert.devices import find_devices
    from r7convert.originals import Originals
    from r7convert.recode import Reencoder

    originals = None if reference is None else Originals(reference, plan.checkpoint)
    if originals is not None:
        originals.check(plan.layers)
    return Reencoder(find_devices(device, team.local_rank), originals)


def _threads(recoder: Recoder | None) -> int:
    """Two layers at a time for every device that encodes: one reads and writes while the other computes."""
    return max(min(MOST_THREADS, 2 * (os.cpu_count() or 1)), 2 * recoder.devices if recoder is not None else 0)
