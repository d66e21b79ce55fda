"""Stage `inspect`: what a checkpoint holds and what each target would make of it, from headers and JSON alone."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from r7convert import policy
from r7convert.checkpoint import Checkpoint
from r7convert.errors import R7Error, UnsupportedError
from r7convert.experts import ExpertLayer
from r7convert.format import PER_EXPERT_V1, PROJECTIONS, SLICED, legal_tps
from r7convert.journal import MANIFEST
from r7convert.ktable import Problem
from r7convert.plan import plan_repack
from r7convert.stamp import TARGETS, Place, StampFiles, diagnose, repair
from r7convert.targets import codebook_of
from r7convert.units import ranges
from r7convert.vectors import Unread

Json = Any

READ_BY = {
    "r7": "R7-aware servers",
    "rank-sliced": "stock servers, r14 to r33",
    "slabs": "slab readers, open_slabs",
    "exl3": "exllamav3 and its kin",
}


@dataclass(frozen=True, slots=True)
class LayerCensus:
    """One layer's routed experts: their form on disk and how many matrices of each projection have which K."""

    layer: int
    tp: int | None
    hidden: str
    counts: Mapping[str, Mapping[int, int]]
    mixed_experts: int

    @property
    def tiers(self) -> tuple[int, ...]:
        return tuple(sorted({k for row in self.counts.values() for k in row}))


@dataclass(frozen=True, slots=True)
class TargetAnswer:
    """What one target makes of the checkpoint: `why` is who reads it, or what is in the way; `cost` what is encoded again."""

    target: str
    accepted: bool
    lossless: bool
    why: str
    cost: str = ""
    bytes_after: int | None = None


@dataclass(frozen=True)
class Inspection:
    """Everything `r7convert inspect` says."""

    checkpoint: Checkpoint
    places: tuple[Place, ...]
    stamp_due: bool | None
    """None where the stamp cannot be repaired; the places say why."""
    census: tuple[LayerCensus, ...]
    bytes_by_class: Mapping[str, int]
    shared_experts: Mapping[str, tuple[int, ...]]
    """State -> the layers in it."""
    mtp: str
    targets: tuple[TargetAnswer, ...]

    @property
    def kind(self) -> str:
        """What the checkpoint is, and the signs that say so."""
        return f"{self.checkpoint.kind}: {_signs_of(self.checkpoint)}"

    @property
    def names(self) -> str:
        """How the routed experts are spelled, all layers of one spelling in one pattern."""
        layers = self.checkpoint.experts.values()
        return "; ".join(dict.fromkeys(_pattern_of(layer) for layer in layers))

    def to_json(self) -> Json:
        cp, g = self.checkpoint, self.checkpoint.geometry
        return {
            "kind": cp.kind,
            "signs": _signs_of(cp),
            "names": self.names,
            "source": {"repo": cp.source.repo, "commit": cp.source.commit, "sealed": MANIFEST in cp.sizes},
            "tensors": len(cp.tensors),
            "shards": len(cp.headers),
            "payload_bytes": cp.payload_bytes,
            "geometry": {
                "root": cp.root,
                "hidden": g.hidden,
                "intermediate": g.intermediate,
                "experts": g.experts,
                "shared_experts": g.shared_experts,
                "layers": g.layers,
                "first_moe": g.first_moe,
                "moe_layers": list(g.moe_layers),
                "mtp_layers": g.mtp_layers,
                "legal_tp": legal_tps(g.intermediate),
            },
            "stamp": {
                "due": self.stamp_due,
                "places": [
                    {"place": p.name, "present": p.present, "quant_method": p.quant_method, "problems": p.problems} for p in self.places
                ],
            },
            "census": [
                {
                    "layer": c.layer,
                    "tp": c.tp,
                    "hidden_vectors": c.hidden,
                    "codebook": cp.experts[c.layer].codebook,
                    "mixed_experts": c.mixed_experts,
                    "k": {proj: {str(k): n for k, n in row.items()} for proj, row in c.counts.items()},
                }
                for c in self.census
            ],
            "bytes": dict(self.bytes_by_class),
            "shared_experts": {state: list(layers) for state, layers in self.shared_experts.items()},
            "mtp": self.mtp,
            "targets": [
                {
                    "target": a.target,
                    "accepted": a.accepted,
                    "lossless": a.lossless,
                    "why": a.why,
                    "cost": a.cost,
                    "bytes_after": a.bytes_after,
                }
                for a in self.targets
            ],
            "foreign_shards": list(cp.foreign),
            "left_out": list(cp.left_out),
            "warnings": list(cp.warnings),
        }


def inspect(checkpoint: Checkpoint) -> Inspection:
    """Describe a checkpoint, and ask every target's rules about it. Reads no payload.

    Source:  FORMAT.md sections 2 to 4, 7 and 8.
    """
    files = StampFiles(checkpoint.config, checkpoint.quantization_file, checkpoint.hf_quant_config)
    shared: dict[str, list[int]] = {}
    for layer, expert in checkpoint.shared_experts.items():
        state = expert.dtype or "" if expert.form == "weight" else "EXL3 " + "/".join(f"K{k}" for k in expert.bits)
        shared.setdefault(state if expert.form != "mixed" else f"{expert.dtype} and {state}", []).append(layer)
    return Inspection(
        checkpoint=checkpoint,
        places=diagnose(files, codebook_of(checkpoint)),
        stamp_due=_stamp_due(files, checkpoint),
        census=tuple(census_of(layer) for layer in checkpoint.experts.values()),
        bytes_by_class=count_bytes_by_class(checkpoint),
        shared_experts={state: tuple(layers) for state, layers in shared.items()},
        mtp=_mtp_state(checkpoint),
        targets=tuple(answer for target in TARGETS for answer in _ask(checkpoint, target)),
    )


def _signs_of(checkpoint: Checkpoint) -> str:
    r7, tail, said = checkpoint.r7, checkpoint.tail, []
    if r7 is not None:
        said.append(f"r7_routed_experts over layers {_span(r7.moe_layers)}, K {_words(r7.k_values)}")
    if tail is not None:
        ks = f"K {_words(tail.k_values)}" + (f" by {tail.map_file}" if tail.map_file else "")
        said.append(f"hybrid_tr3_tail over layers {_span(tail.moe_layers)}, tp {tail.tp}, {tail.rotation_layout}, {ks}")
    books = _words(dict.fromkeys(layer.codebook for layer in checkpoint.experts.values()))
    if checkpoint.kind == "slabs":
        said.append(f"r7convert_slabs, tp {next(iter(checkpoint.experts.values())).tp}")
    elif checkpoint.kind == "exl3":
        records = any((block or {}).get("tensor_storage") for block in (checkpoint.quantization, checkpoint.quantization_file))
        said.append(f"whole matrices declared exl3, codebook {books}, {'a' if records else 'no'} tensor_storage")
    return "; ".join(said) or "no routed experts in EXL3"


def _span(layers: tuple[int, int]) -> str:
    return ranges(range(layers[0], layers[1] + 1))


def _words(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


def _pattern_of(layer: ExpertLayer) -> str:
    """The names of a layer's routed experts, with {L}, {E} and the three words of its family."""
    base = re.sub(r"\.\d+\.", ".{L}.", layer.base)
    words = ",".join(layer.module(0, proj).rpartition(".")[2] for proj in PROJECTIONS)
    return f"{base}.{{E}}.{{{words}}}"


def census_of(layer: ExpertLayer) -> LayerCensus:
    counts = {proj: dict(sorted(Counter(row[nth] for row in layer.bits).items())) for nth, proj in enumerate(PROJECTIONS)}
    return LayerCensus(layer.layer, layer.tp, layer.hidden, counts, sum(len(set(row)) > 1 for row in layer.bits))


def _stamp_due(files: StampFiles, checkpoint: Checkpoint) -> bool | None:
    target = "exl3" if checkpoint.kind == "other" else checkpoint.kind
    try:
        return bool(repair(files, target, codebook=codebook_of(checkpoint)).changes)
    except R7Error:
        return None


def count_bytes_by_class(checkpoint: Checkpoint) -> dict[str, int]:
    classes: Counter[str] = Counter()
    seen: set[str] = set()
    for layer in checkpoint.experts.values():
        seen |= set(layer.tensors)
        for name, entry in layer.tensors.items():
            classes["routed experts: trellis" if name.endswith(".trellis") else "routed experts: vectors and markers"] += entry.nbytes
    for expert in checkpoint.shared_experts.values():
        seen |= {entry.name for entry in expert.tensors}
        classes["shared experts"] += sum(entry.nbytes for entry in expert.tensors)
    for name, entry in checkpoint.tensors.items():
        if name not in seen:
            classes["dense EXL3" if name.rpartition(".")[0] in checkpoint.dense_exl3 else "everything else"] += entry.nbytes
    return dict(classes)


def _mtp_state(checkpoint: Checkpoint) -> str:
    mtp = checkpoint.mtp
    if mtp.problem:
        return mtp.problem
    if not mtp.declared:
        return "none"
    forms = []
    for number in mtp.layers:
        layer = checkpoint.experts.get(number)
        if layer is None:
            forms.append(f"layer {number}: carried, no EXL3 experts")
        else:
            form = "whole matrices" if layer.tp is None else f"rank-sliced, tp {layer.tp}"
            forms.append(f"layer {number}: {form}, {', '.join(f'K{k}' for k in layer.tiers)}")
    return "; ".join(forms)


# ---- targets ----------------------------------------------------------------------------------------------------------


def _ask(checkpoint: Checkpoint, target: str) -> list[TargetAnswer]:
    """A target's verdict; for a K that the stock reader cannot take also those of the policies that re-encode."""
    # The layout is given, for finding the smaller one would read vectors.
    choices: dict[str, Any] = {"tp": 1, "rotation_layout": PER_EXPERT_V1} if target in SLICED else {}
    try:
        plan = plan_repack(checkpoint, target=target, choose=_refuse, vectors=Unread(checkpoint.source), **choices)
        who = READ_BY[target]
        if any(layer.source.hidden != "r7_shared" for layer in plan.r7_layers):
            who += ", if gate and up of all experts share a vector, and down: --dry-run looks"
        return [TargetAnswer(target, True, True, who, "nothing", plan.payload_bytes)]
    except R7Error as error:
        answers = [TargetAnswer(target, False, False, _first_line(error))]
    if target == "rank-sliced":
        for name, choose in (("lift", policy.lift), ("fit", policy.fit)):
            try:
                answers.append(_priced(checkpoint, f"{target} --mixed-k {name}", choose, choices))
            except R7Error:
                break  # what is in the way has nothing to do with K, and the answer above names it
    return answers


def _refuse(problem: Problem) -> policy.Plan:
    """policy.refuse in one line: what the other policies cost has answers of its own here."""
    mixed = [table for table in problem.tables if not table.is_stock_shaped]
    if mixed:
        which = ranges(table.layer for table in mixed)
        raise UnsupportedError(f"layers {which}: experts that mix K, or more than two K in a layer; a stock reader takes neither")
    return policy.refuse(problem)


def _priced(checkpoint: Checkpoint, name: str, choose: Callable[[Problem], policy.Plan], choices: Mapping[str, Any]) -> TargetAnswer:
    seen: list[policy.Plan] = []

    def chosen(problem: Problem) -> policy.Plan:
        seen.append(choose(problem))
        return seen[-1]

    plan = plan_repack(checkpoint, target="rank-sliced", choose=chosen, **choices)
    made = seen[-1]
    cost = f"{made.lifted:,} matrices lifted, {made.lowered:,} lowered, summed error {made.error_before:.3g} -> {made.error_after:.3g}"
    return TargetAnswer(name, True, False, READ_BY["rank-sliced"], cost, plan.payload_bytes)


def _first_line(error: R7Error) -> str:
    first, *rest = str(error).splitlines()
    return f"{first} (and {len(rest)} more)" if rest else first
