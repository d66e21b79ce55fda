"""The copy plan: from headers and a target to output files, in the order they are written, with every source tensor in
exactly one place.

    what the reader takes              rules.py, asked first
    routed experts that change shape   moves.py: a LayerPlan a layer, tp files side by side
    everything else                    carry.py: shards as they are, or without what left them; small files
    JSON                               targets.py: config with a corrected stamp, tail, tier map; the index and slabs.json here
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from r7convert import policy
from r7convert.carry import CarriedShard, carried_shards, custom_metadata, small_files
from r7convert.checkpoint import Checkpoint
from r7convert.errors import FormatError, UnsupportedError, UsageError, complain
from r7convert.format import PROJECTIONS, SLICED
from r7convert.moves import LayerPlan
from r7convert.rules import Choose, check_choices, check_reader, check_words, choose_forms, slab_notes, target_bits
from r7convert.slab_layout import place_slabs, sidecar_header, sidecar_layer
from r7convert.stamp import Change
from r7convert.store import find_twins
from r7convert.targets import has_tier_map, repaired_stamp, tail_layers, tier_map_of
from r7convert.vectors import Vectors

Json = Any


@dataclass(frozen=True)
class Plan:
    """Everything a run will do. `layers` and `shards` are the work, `files` are small ones that are copied."""

    checkpoint: Checkpoint
    target: str
    tp: int | None
    reader: str | None
    rotation_layout: str | None
    selected: tuple[int, int] | None
    drop_mtp: bool
    layers: tuple[LayerPlan, ...]
    shards: tuple[CarriedShard, ...]
    files: tuple[str, ...]
    left_out: tuple[str, ...]
    config: Json
    quantization: Json
    changes: tuple[Change, ...]
    notes: tuple[str, ...]
    accounting: Mapping[str, tuple[int, int]]
    """What became of the source's tensors: kind -> (tensors, bytes). Each tensor counts once."""
    policy: Mapping[str, Json] | None = None
    """What the K policy chose, where it had to choose: for report and manifest."""

    @property
    def is_partial(self) -> bool:
        """A plan for some layers only (--layers) writes their files, index and sidecar, and no config: nothing can load it whole."""
        return self.selected is not None

    @property
    def r7_layers(self) -> list[LayerPlan]:
        """Layers written in R7's form, each with a sidecar of its own."""
        return [layer for layer in self.layers if layer.hidden == "r7_shared"]

    @property
    def reencoded(self) -> int:
        return sum(layer.reencoded for layer in self.layers)

    @property
    def payload_bytes(self) -> int:
        carried = sum(entry.nbytes for shard in self.shards for entry in shard.entries)
        return carried + sum(layer.file_nbytes * len(layer.files) for layer in self.layers)

    def index(self) -> Json:
        """model.safetensors.index.json: true bytes in place of the source's, names sorted."""
        weight_map = {entry.name: shard.file for shard in self.shards for entry in shard.entries}
        for layer in self.layers:
            for rank, file in enumerate(layer.files):
                weight_map |= {name: file for name, _, _ in layer.tensors(rank)}
        metadata = {**self.checkpoint.index_metadata, "total_size": self.payload_bytes}
        return {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}

    def tier_map(self) -> Json | None:
        """tier_map.json, where the tail points to one."""
        tail = tail_layers(self.checkpoint, self.target, self.layers)
        return tier_map_of(tail) if has_tier_map(self.target, tail) else None

    def sidecar(self) -> Json | None:
        """slabs.json, for the sliced targets."""
        if self.target not in SLICED or self.rotation_layout is None or self.tp is None:
            return None
        g = self.checkpoint.geometry
        made = sidecar_header(
            hidden=g.hidden, intermediate=g.intermediate, experts=g.experts, tp=self.tp, rotation_layout=self.rotation_layout
        )
        for layer in self.layers:
            slabs = layer.slabs
            ranks = [place_slabs(slabs, self.rotation_layout, file, len(layer.header(rank))) for rank, file in enumerate(layer.files)]
            made["layers"][str(layer.layer)] = sidecar_layer(slabs, ranks)
        return made


def plan_repack(
    checkpoint: Checkpoint,
    *,
    target: str,
    tp: int | None = None,
    reader: str = "r28",
    rotation_layout: str | None = None,
    choose: Choose = policy.refuse,
    layers: tuple[int, int] | None = None,
    drop_mtp: bool = False,
    vectors: Vectors | None = None,
) -> Plan:
    """The plan for a target, or the reason why it cannot be, before anything is written.

    `choose` is the K policy of target rank-sliced. `rotation_layout` None takes the smallest that reader and vectors allow. With
    `vectors` those of ranks are compared, all of them; without, none is read but where a form depends on it.

    Raises:  UsageError for choices that contradict each other; UnsupportedError for what the target's reader cannot take, all
             offenders named; FormatError for an MTP declaration without its layers, and for ranks that do not agree.
    """
    check_choices(checkpoint, target, tp, reader, rotation_layout, layers)
    if checkpoint.mtp.problem and not drop_mtp:
        raise FormatError(checkpoint.mtp.problem)
    gone = checkpoint.mtp.names if drop_mtp else frozenset()
    experts = [found for found in checkpoint.experts.values() if not gone.intersection(found.tensors)]
    if layers is not None:
        experts = [found for found in experts if layers[0] <= found.layer <= layers[1]]
        if not experts:
            raise UsageError(complain("--layers", "layers with routed experts", expected="at least one", found=f"{layers[0]}-{layers[1]}"))
    elif not experts:
        raise UnsupportedError(complain(checkpoint.where, "routed experts in EXL3", expected="some", found="none but MTP layers"))

    check_words(checkpoint, experts, target)
    if vectors is not None:
        vectors.check_ranks(experts)
    forms, notes = choose_forms(
        checkpoint,
        experts,
        vectors or Vectors(checkpoint.source),
        target=target,
        tp=tp,
        reader=reader,
        rotation_layout=rotation_layout,
    )
    moved = [found for found in experts if found.layer in forms]
    bits = target_bits(checkpoint, moved, choose) if target == "rank-sliced" else {found.layer: found.bits for found in moved}
    plans = tuple(
        LayerPlan(
            found,
            checkpoint.geometry,
            *forms[found.layer],
            bits[found.layer],
            custom_metadata(checkpoint, {entry.file for entry in found.tensors.values()}),
        )
        for found in moved
    )
    layout = next((plan.rotation_layout for plan in plans if plan.tp is not None), None)
    leaving = {name for found in moved for name in found.tensors}
    shards = () if layers is not None else tuple(carried_shards(checkpoint, leaving | gone))
    kept = [entry.name for shard in shards for entry in shard.entries]
    check_reader(checkpoint, target, plans, kept, partial=layers is not None)
    notes = [*checkpoint.warnings, *notes, *(slab_notes(plans) if target in SLICED else [])]

    stamp = repaired_stamp(checkpoint, target, layers=plans, kept=kept, tp=tp, drop_mtp=drop_mtp)
    files, left_out = small_files(checkpoint, target, drop_mtp=drop_mtp)
    names = [*files, *(shard.file for shard in shards), *(file for layer in plans for file in layer.files)]
    if twice := find_twins(names):
        raise UnsupportedError(complain(checkpoint.where, "files in the way of the output's own", expected="other names", found=twice))
    return Plan(
        checkpoint=checkpoint,
        target=target,
        tp=tp,
        reader=reader if target == "rank-sliced" else None,
        rotation_layout=layout,
        selected=layers,
        drop_mtp=drop_mtp,
        layers=plans,
        shards=shards,
        files=() if layers is not None else files,
        left_out=left_out,
        config=stamp.files.config,
        quantization=stamp.files.quantization_file,
        changes=stamp.changes,
        notes=(*notes, *stamp.notes),
        accounting=_account(checkpoint, plans, kept, gone),
    )


def _account(
    checkpoint: Checkpoint, layers: Sequence[LayerPlan], kept: Sequence[str], dropped: frozenset[str]
) -> dict[str, tuple[int, int]]:
    """Each source tensor under one kind: what LayerPlan.fate says of a routed one, or lifted, lowered; kept (its name, its bytes),
    dropped (by --drop-mtp), outside (of --layers).
    """
    kinds = dict.fromkeys(dropped, "dropped") | dict.fromkeys(kept, "kept")
    for layer in layers:
        kinds |= {name: layer.fate(name) for name in layer.source.tensors}
        for expert, (old, new) in enumerate(zip(layer.source.bits, layer.bits, strict=True)):
            for proj, a, b in zip(PROJECTIONS, old, new, strict=True):
                if a != b:
                    kind = "lifted" if b > a else "lowered"
                    kinds |= {entry.name: kind for entry in layer.source.parts(expert, proj, "trellis")}
    total: dict[str, tuple[int, int]] = {}
    for name, entry in checkpoint.tensors.items():
        count, nbytes = total.get(kind := kinds.get(name, "outside"), (0, 0))
        total[kind] = (count + 1, nbytes + entry.nbytes)
    return dict(sorted(total.items()))


def fingerprint(plan: Plan) -> dict[str, Json]:
    """What two runs must share so that one may finish the other's work, and what the manifest says of the source."""
    source = plan.checkpoint.source
    return {
        "target": plan.target,
        "tp": plan.tp,
        "reader": plan.reader,
        "rotation_layout": plan.rotation_layout,
        "layers": list(plan.selected) if plan.selected else None,
        "drop_mtp": plan.drop_mtp,
        "source": {"repo": source.repo, "commit": source.commit, "headers_sha256": plan.checkpoint.headers_sha256},
    }
