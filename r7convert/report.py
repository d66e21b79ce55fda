"""Stage `report`: what a sealed folder holds, what it cost and how it was judged, as plain data.

From headers, the manifest's facts and VERDICT.json alone; no payload is read and nothing is judged here: that is verify's work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from r7convert.checkpoint import Checkpoint, read_checkpoint
from r7convert.errors import UsageError, VerifyError, complain
from r7convert.facts import Census, ErrorStep, count_k, error_steps, matrix_figures, mean_of, serve_command, tensor_counts, who_loads
from r7convert.format import PROJECTIONS, ExpertName, Geometry, SharedExpertName, parse_name
from r7convert.inspect import TargetAnswer, inspect
from r7convert.journal import VERDICT, Manifest, manifest_digest, read_manifest
from r7convert.verdict import read_verdict

Json = Any

REPORT_FORMAT = "r7convert-report-v1"
TRELLIS, VECTORS, SHARED = "routed experts: trellis", "routed experts: vectors and markers", "shared experts"


@dataclass(frozen=True, slots=True)
class Bytes:
    """One class of payload; `before` is None where the manifest does not tell."""

    name: str
    before: int | None
    after: int


@dataclass(frozen=True, slots=True)
class LayerErrors:
    """Relative squared errors of the re-encoded matrices of one layer and projection."""

    layer: int
    proj: str
    matrices: int
    mean: float
    worst: float


@dataclass(frozen=True, slots=True)
class SharedError:
    layer: int
    proj: str
    bits: int | None
    relative_error: float


@dataclass(frozen=True, slots=True)
class Judged:
    """One part of the verdict: what it compared, or why it was skipped."""

    name: str
    state: str
    scope: str
    checks: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Judgement:
    """`state` is "ok", "failed" or "not verified"; the last has a reason and no parts."""

    state: str
    why: str
    parts: tuple[Judged, ...]


@dataclass(frozen=True)
class Report:
    """Everything `r7convert report` says. `name` is the folder's own, without the path to it."""

    name: str
    tool: str
    manifest_sha256: str
    geometry: Geometry
    target: str
    tp: int | None
    reader: str | None
    loads: str
    serve: str
    census: Census
    bytes_by_class: tuple[Bytes, ...]
    accounting: Mapping[str, int]
    """Source tensors by what became of them."""
    steps: tuple[ErrorStep, ...]
    errors: tuple[LayerErrors, ...]
    shared: tuple[SharedError, ...]
    verdict: Judgement
    targets: tuple[TargetAnswer, ...]

    @property
    def bytes_before(self) -> int | None:
        known = [row.before for row in self.bytes_by_class if row.before is not None]
        return sum(known) if len(known) == len(self.bytes_by_class) else None

    @property
    def bytes_after(self) -> int:
        return sum(row.after for row in self.bytes_by_class)

    def to_json(self) -> Json:
        census = {
            str(layer): {proj: [row[at] for row in rows] for at, proj in enumerate(PROJECTIONS)} for layer, rows in self.census.items()
        }
        means = {proj: mean_of(count_k(self.census, at)) for at, proj in enumerate(PROJECTIONS)} if self.census else {}
        return {
            "format": REPORT_FORMAT,
            "name": self.name,
            "tool": self.tool,
            "manifest_sha256": self.manifest_sha256,
            "geometry": asdict(self.geometry),
            "target": self.target,
            "tp": self.tp,
            "reader": self.reader,
            "loads": self.loads,
            "serve": self.serve,
            "verdict": asdict(self.verdict),
            "bytes": [asdict(row) for row in self.bytes_by_class],
            "accounting": dict(self.accounting),
            "mean_k": means,
            "k": census,
            "encoded_anew": [asdict(step) for step in self.steps],
            "reencode_errors": [asdict(row) for row in self.errors],
            "shared_experts": [asdict(row) for row in self.shared],
            "targets": [asdict(answer) for answer in self.targets],
        }


def report(folder: Path) -> Report:
    """Describe a sealed folder. The same folder gives the same report: no dates, no machine, no path.

    Raises:  FormatError for a folder without its seal, or one whose headers are unsound; UsageError for a part of a checkpoint.
    """
    manifest = read_manifest(folder)
    if partial := manifest.facts.get("partial"):
        do = "A part is looked at with r7convert.open_slabs."
        raise UsageError(complain(folder, "a part of a checkpoint", expected="all layers", found=partial, do=do))
    checkpoint = read_checkpoint(folder)
    found, facts = inspect(checkpoint), manifest.facts
    census = {layer: experts.bits for layer, experts in checkpoint.experts.items()}
    name = folder.resolve().name
    return Report(
        name=name,
        tool=manifest.tool,
        manifest_sha256=manifest_digest(folder),
        geometry=checkpoint.geometry,
        target=str(facts.get("target", "unknown")),
        tp=_integer(facts.get("tp")),
        reader=facts["reader"] if isinstance(facts.get("reader"), str) else None,
        loads=who_loads(facts),
        serve=serve_command(facts, name, layer=min(census, default=0), is_repo=False),
        census=census,
        bytes_by_class=_before_and_after(checkpoint, manifest, found.bytes_by_class),
        accounting=tensor_counts(facts),
        steps=tuple(error_steps(facts)),
        errors=_layer_errors(facts),
        shared=_shared_errors(facts),
        verdict=_judgement(folder),
        targets=tuple(_without_path(answer, checkpoint.where, name) for answer in found.targets),
    )


# ---- bytes ------------------------------------------------------------------------------------------------------------


def _before_and_after(checkpoint: Checkpoint, manifest: Manifest, after: Mapping[str, int]) -> tuple[Bytes, ...]:
    """What the source's classes weighed follows from ours: only routed experts change their size by K and by copies of vectors,
    only shared experts by encoding; the sum is the accounting's. What was left out by request has a row of its own.
    """
    names = sorted({*after, TRELLIS, VECTORS, SHARED} if checkpoint.experts else after)
    sums = _accounted_bytes(manifest.facts)
    if sums is None:
        return tuple(Bytes(name, None, after.get(name, 0)) for name in names)
    before = dict(after)
    weights = checkpoint.geometry.hidden * checkpoint.geometry.intermediate
    for _, figures in matrix_figures(manifest.facts.get("reencoded")):
        was, now = _integer(figures.get("from")), _integer(figures.get("to"))
        if was is not None and now is not None:
            before[TRELLIS] = before.get(TRELLIS, 0) - weights * (now - was) // 8
    encoded = {name for name, _ in matrix_figures(manifest.facts.get("encoded"))}
    made = sum(e.nbytes for shared in checkpoint.shared_experts.values() for e in shared.tensors if e.name.rpartition(".")[0] in encoded)
    before[SHARED] = before.get(SHARED, 0) - made + sums.get("encoded", 0)
    dropped = sums.get("dropped", 0)
    before[VECTORS] = sum(sums.values()) - dropped - sum(count for name, count in before.items() if name != VECTORS)
    if min(before.values()) < 0:  # a manifest that does not fit the folder
        return tuple(Bytes(name, None, after.get(name, 0)) for name in names)
    rows = [Bytes(name, before.get(name, 0), after.get(name, 0)) for name in names if before.get(name) or after.get(name)]
    return (*rows, Bytes("left out by request", dropped, 0)) if dropped else tuple(rows)


def _accounted_bytes(facts: Mapping[str, Json]) -> dict[str, int] | None:
    """The source's bytes by what became of them; None where the accounting has none."""
    accounting = facts.get("accounting")
    if not isinstance(accounting, dict) or not accounting:
        return None
    sums = {kind: _integer(entry.get("bytes")) if isinstance(entry, dict) else None for kind, entry in accounting.items()}
    known = {kind: count for kind, count in sums.items() if count is not None}
    return known if len(known) == len(sums) else None


# ---- errors -----------------------------------------------------------------------------------------------------------


def _layer_errors(facts: Mapping[str, Json]) -> tuple[LayerErrors, ...]:
    found: dict[tuple[int, int], list[float]] = {}
    for module, figures in matrix_figures(facts.get("reencoded")):
        name = parse_name(f"{module}.trellis")
        if isinstance(name, ExpertName):
            found.setdefault((name.layer, PROJECTIONS.index(name.proj)), []).append(float(figures["relative_error"]))
    return tuple(
        LayerErrors(layer, PROJECTIONS[at], len(errors), sum(errors) / len(errors), max(errors))
        for (layer, at), errors in sorted(found.items())
    )


def _shared_errors(facts: Mapping[str, Json]) -> tuple[SharedError, ...]:
    rows = []
    for module, figures in matrix_figures(facts.get("encoded")):
        name = parse_name(f"{module}.trellis")
        if isinstance(name, SharedExpertName):
            rows.append(SharedError(name.layer, name.proj, _integer(figures.get("bits")), float(figures["relative_error"])))
    return tuple(sorted(rows, key=lambda row: (row.layer, PROJECTIONS.index(row.proj))))


def _integer(value: Json) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


# ---- verdict and targets ----------------------------------------------------------------------------------------------


def _judgement(folder: Path) -> Judgement:
    """The folder's verdict, its reasons without the path that verdict.py's own errors have."""
    if not (folder / VERDICT).exists():
        return Judgement("not verified", f"no {VERDICT}: nobody judged this folder", ())
    try:
        value = read_verdict(folder)
    except VerifyError:
        return Judgement("not verified", f"{VERDICT} is unreadable, or judged another manifest than the one that stands here", ())
    parts = tuple(_judged(part) for part in value["parts"] if isinstance(part, dict))
    return Judgement("ok" if value["ok"] else "failed", "", parts)


def _judged(part: Mapping[str, Json]) -> Judged:
    scope, checks = part.get("scope"), part.get("checks")
    lines = [str(line) for line in scope] if isinstance(scope, list) else []
    rows = []
    for check in checks if isinstance(checks, list) else ():
        if isinstance(check, dict):
            shown = check.get("shown")
            failures = [f"FAILED: {line}" for line in shown] if isinstance(shown, list) else []
            rows.append((str(check.get("name")), "; ".join([str(check.get("looked_at")), *failures])))
    skipped = part.get("state") == "skipped"
    return Judged(str(part.get("name")), str(part.get("state")), str(part.get("why", "")) if skipped else "; ".join(lines), tuple(rows))


def _without_path(answer: TargetAnswer, where: str, name: str) -> TargetAnswer:
    why = answer.why.replace(where, name)
    return TargetAnswer(answer.target, answer.accepted, answer.lossless, why, answer.cost, answer.bytes_after)
