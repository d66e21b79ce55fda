"""One repack on its way: what stood before, what is written by whom, and the JSON at the end. repack.py calls it in order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from r7convert import __version__
from r7convert.card import CARD
from r7convert.checkpoint import CONFIG, INDEX, QUANT_CONFIG
from r7convert.copying import Findings, Recoder, Stopped, Work, copy_file, write_layer, write_shard
from r7convert.errors import FormatError, ResourceError, UsageError, complain
from r7convert.format import R7_SCHEMA, SLICED
from r7convert.journal import MANIFEST, VERDICT, Journal, forget_journals, locked, read_journal, read_manifest
from r7convert.moves import LayerPlan
from r7convert.plan import Plan, fingerprint
from r7convert.progress import Progress
from r7convert.slab_layout import SIDECAR
from r7convert.source import Payload, Step
from r7convert.store import PARTIAL, STATE_DIR, FileRecord, check_free_space, check_plain_name, read_json, write_json
from r7convert.targets import TIER_MAP, bit_map_file, bit_map_of
from r7convert.team import Team

Json = Any
Results = dict[str, tuple[FileRecord, Json]]
Write = Callable[..., dict[str, FileRecord]]

TOOL = f"r7convert {__version__}"
OUTPUTS = "outputs.json"
HEADER_ROOM = 1 << 20


@dataclass(frozen=True)
class Repacked:
    """What a run did, or would do. `files` is empty after a dry run; `resumed` counts files an earlier run had finished."""

    plan: Plan
    output: Path
    dry_run: bool
    files: Mapping[str, FileRecord] = field(default_factory=dict)
    findings: Findings = field(default_factory=Findings)
    resumed: int = 0
    prices: Mapping[str, Json] = field(default_factory=dict)
    """Of a dry run: what each K policy would cost."""

    def to_json(self) -> Json:
        plan = self.plan
        return {
            **plan_facts(plan),
            "output": str(self.output),
            "dry_run": self.dry_run,
            "payload_bytes": plan.payload_bytes,
            "reencoded": plan.reencoded,
            **({"prices": dict(self.prices)} if self.prices else {}),
            "changes": [change.to_json() for change in plan.changes],
            "left_out": list(plan.left_out),
            "notes": list(plan.notes),
            "resumed": self.resumed,
            **self.findings.to_json(),
            "files": {name: {"size": record.size, "sha256": record.sha256} for name, record in sorted(self.files.items())},
        }


def plan_facts(plan: Plan) -> dict[str, Json]:
    """What a manifest states of a run: the same for the same source and choices, on any machine."""
    return {
        **fingerprint(plan),
        "moe_layers": [layer.layer for layer in plan.layers],
        "partial": {"layers": list(plan.selected)} if plan.selected else None,
        "accounting": {kind: {"tensors": count, "bytes": nbytes} for kind, (count, nbytes) in plan.accounting.items()},
        **({"policy": dict(plan.policy)} if plan.policy else {}),
    }


class Outlet(Protocol):
    """Where finished files go that do not stay in the output folder."""

    def has(self, name: str, record: FileRecord) -> bool:
        """True if that very file has gone there."""

    def send(self, files: Mapping[str, FileRecord]) -> None:
        """Take over files that stand finished in the output folder; those that went may be gone from it."""


@dataclass(frozen=True, slots=True)
class _Job:
    """What makes some output files, and from which source files."""

    outputs: tuple[str, ...]
    inputs: tuple[str, ...]
    run: Callable[[], Results]


class Run:
    """One conversion on its way: the plan, where it comes from and goes to, and what all its parts need to know."""

    def __init__(
        self,
        plan: Plan,
        payload: Payload,
        output: Path,
        link: bool,
        allow_nonfinite: bool,
        recoder: Recoder | None,
        outlet: Outlet | None,
        progress: Progress,
    ) -> None:
        self.plan = plan
        self.payload = payload
        self.output = output
        self.link = link
        self.allow_nonfinite = allow_nonfinite
        self.recoder = recoder
        self.outlet = outlet
        self.progress = progress
        self.facts = {**plan_facts(plan), "allow_nonfinite": allow_nonfinite}
        self.fingerprint = {"tool": TOOL, **self.facts, "files": payload.identity()}
        if recoder is not None:
            self.facts["policy"] = {**self.facts.get("policy", {}), "reference": recoder.reference}
            self.fingerprint |= {"engine": recoder.engine, "reference": recoder.reference}

    # ---- before ----

    def sealed_before(self) -> Repacked | None:
        """The report of an earlier run that finished this very work, or None."""
        if not (self.output / MANIFEST).is_file():
            return None
        manifest = read_manifest(self.output)
        if manifest.tool != TOOL or any(manifest.facts.get(key) != value for key, value in self.facts.items()):
            return None
        if (self.output / STATE_DIR).exists():  # killed between the seal and the journal's end
            with locked(self.output):
                forget_journals(self.output)
        self.progress.say(f"{self.output} is complete already")
        findings = Findings(manifest.facts.get("zeros", {}), manifest.facts.get("nonfinite", {}))
        return Repacked(self.plan, self.output, False, manifest.files, findings, resumed=len(manifest.files))

    def check_output(self, *, restart: bool) -> None:
        """Raises:  UsageError for an output that is no folder, or holds what no earlier run of repack left."""
        if not self.output.exists():
            return
        if not self.output.is_dir():
            raise UsageError(complain(self.output, "output", expected="a folder", found="a file"))
        names = {path.name for path in self.output.iterdir()} - {STATE_DIR}
        unfinished, _ = read_journal(self.output)
        is_sealed = MANIFEST in names
        if (unfinished is not None or restart) if is_sealed else (unfinished is not None or names <= self._listed_before()):
            return
        found = "another conversion" if is_sealed else f"{len(names)} files of something else"
        do = "Choose another folder" + (", or use --restart to replace it." if is_sealed else ".")
        raise UsageError(complain(self.output, "output", expected="a new or empty folder, or an unfinished run", found=found, do=do))

    def check_room(self) -> None:
        """Raises:  ResourceError. Files that are done, and those a restart will remove, count as room."""
        if self.outlet is not None:
            return  # they do not stay; whoever takes them knows how much may stand here
        there = sum(path.stat().st_size for name in self.output_names() if (path := self.output / name).is_file())
        check_free_space(self.output, max(0, sum(self._rooms().values()) - there))

    def _rooms(self) -> dict[str, int]:
        """Weights by name -> bytes at most."""
        rooms = {} if self.link else {shard.file: shard.size for shard in self.plan.shards}
        return rooms | {name: layer.file_nbytes + HEADER_ROOM for layer in self.plan.layers for name in layer.files}

    def output_names(self) -> list[str]:
        """Every file this run will have written but the seal."""
        plan = self.plan
        payload = [*plan.files, *(shard.file for shard in plan.shards), *(file for layer in plan.layers for file in layer.files)]
        return sorted([*payload, *self._json_files()])

    def _listed_before(self) -> set[str]:
        """Names that an earlier run meant to write, whole or partial."""
        listed = self.output / STATE_DIR / OUTPUTS
        found = read_json(listed) if listed.exists() else []
        if not isinstance(found, list):
            raise FormatError(complain(listed, "outputs of a run", expected="a list of names", found=type(found).__name__))
        names = {check_plain_name(name, listed) for name in found}  # they will be removed
        return names | {name + PARTIAL for name in names}

    def discard(self) -> None:
        """Remove what an earlier run left, the seal first; the list of what is to go is written before."""
        names = self._listed_before()
        if (self.output / MANIFEST).exists():
            names |= {*read_manifest(self.output).files, VERDICT, CARD}
            write_json(self.output / STATE_DIR / OUTPUTS, sorted(names))
        for name in (MANIFEST, *sorted(names)):
            (self.output / name).unlink(missing_ok=True)

    # ---- the work ----

    def copy(self, journal: Journal, threads: int, team: Team) -> int:
        """This rank's share of the layer files, shards and small files, less what is done; returns how many files were.

        Raises:  the first error of any of them, once all have stopped.
        """
        stop = threading.Event()
        if self.outlet is not None:
            self.outlet.send({name: record for name, record in journal.done.items() if journal.is_done(self.output, name)})
        jobs = team.share(list(self._jobs(stop)))
        todo = [job for job in jobs if not all(self._is_done(journal, name) for name in job.outputs)]
        names_todo = {name for job in todo for name in job.outputs}
        self.progress.start(self._bytes_of(names_todo), "repack")
        rooms = self._rooms()
        self.payload.prepare([Step(job.inputs, {name: rooms.get(name, 0) for name in job.outputs}) for job in todo])
        with ThreadPoolExecutor(threads) as pool:
            futures = [pool.submit(job.run) for job in todo]
            waiting = set(futures)
            try:
                while waiting:
                    done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                    for future in sorted(done, key=lambda future: future.exception() is not None):  # what is done counts, first
                        results = future.result()
                        for name, (record, facts) in results.items():
                            journal.record(name, record, facts)
                        if self.outlet is not None:
                            self.outlet.send({name: record for name, (record, _) in results.items()})
            except BaseException:
                stop.set()
                self.payload.abandon()
                for future in futures:
                    future.cancel()
                raise
        return sum(len(job.outputs) for job in jobs) - len(names_todo)

    def _is_done(self, journal: Journal, name: str) -> bool:
        record = journal.done.get(name)
        return journal.is_done(self.output, name) or (record is not None and self.outlet is not None and self.outlet.has(name, record))

    def _jobs(self, stop: threading.Event) -> Iterator[_Job]:
        """Largest kinds first, so that threads end together."""
        for shard in sorted(self.plan.shards, key=lambda shard: -shard.size):
            write: Write = partial(write_shard, shard, self.payload, link=self.link)
            yield _Job((shard.file,), (shard.file,), partial(self._job, stop, write, shard.file))
        for layer in self.plan.layers:
            write = partial(write_layer, layer, self.payload, recoder=self.recoder)
            inputs = tuple(sorted({entry.file for entry in layer.source.tensors.values()}))
            recoded = layer.layer if layer.reencoded else None
            yield _Job(layer.files, inputs, partial(self._job, stop, write, f"layer {layer.layer}", recoded))
        for name in self.plan.files:
            yield _Job((name,), (name,), partial(self._job, stop, partial(copy_file, name, self.payload), name))

    def _job(self, stop: threading.Event, write: Write, what: str, recoded_layer: int | None = None) -> Results:
        """Run one job; what it found goes with its first file."""
        work = Work(self.output, self.progress, stop, self.allow_nonfinite)
        if stop.is_set():
            raise Stopped
        try:
            records = write(work=work)
        except OSError as error:
            do = "The run can be repeated once this is mended: it goes on where it stopped."
            raise ResourceError(complain(self.output, f"{what} failed", expected="no error", found=error.strerror, do=do)) from error
        facts: dict[str, Json] = work.findings.to_json()
        if recoded_layer is not None and self.recoder is not None:
            facts["reencoded"] = self.recoder.facts(recoded_layer)
        return {name: (record, facts if at == 0 else None) for at, (name, record) in enumerate(records.items())}

    def _bytes_of(self, names: set[str]) -> int:
        shards = sum(entry.nbytes for shard in self.plan.shards if shard.file in names for entry in shard.entries)
        return shards + sum(layer.file_nbytes * len(layer.files) for layer in self.plan.layers if layer.files[0] in names)

    # ---- JSON, in the order in which a reader must not find it too early ----

    def _json_files(self) -> list[str]:
        sliced = [SIDECAR] if self.plan.target in SLICED else []
        tiers = [TIER_MAP] if self.plan.tier_map() is not None else []
        r7 = [bit_map_file(layer) for layer in self.plan.r7_layers]
        return [INDEX, *tiers, *sliced, *r7, *([] if self.plan.is_partial else [QUANT_CONFIG, CONFIG])]

    def write_json_files(self, journal: Journal) -> dict[str, FileRecord]:
        """The index and what describes the layers, then the configs: a reader that finds config.json finds everything."""
        plan = self.plan
        makers: dict[str, Callable[[], Json]] = {
            INDEX: plan.index,
            TIER_MAP: plan.tier_map,
            SIDECAR: plan.sidecar,
            **{bit_map_file(layer): partial(_r7_sidecar, layer, journal.done) for layer in plan.r7_layers},
            QUANT_CONFIG: lambda: plan.quantization,
            CONFIG: lambda: plan.config,
        }
        return {name: write_json(self.output / name, makers[name](), compact=name in (INDEX, SIDECAR)) for name in self._json_files()}


def _r7_sidecar(layer: LayerPlan, done: Mapping[str, FileRecord]) -> Json:
    """What R7 has beside each shard of experts.

    Source:  FORMAT.md section 2.
    """
    shard = layer.files[0]
    return {
        "schema": R7_SCHEMA,
        "layer": layer.layer,
        "shard": shard,
        "shard_sha256": done[shard].sha256,
        "bit_map": bit_map_of(layer),
        "provenance": {"producer": TOOL},
    }


def merge_findings(facts: Mapping[str, Json]) -> Findings:
    """Findings of all files, by tensor name."""
    zeros = {name: found for fact in facts.values() for name, found in fact.get("zeros", {}).items()}
    nonfinite = {name: found for fact in facts.values() for name, found in fact.get("nonfinite", {}).items()}
    return Findings(dict(sorted(zeros.items())), dict(sorted(nonfinite.items())))
