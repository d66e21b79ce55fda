"""What encode-shared writes once every layer is there: shards without what went, index, configs, the seal.

A shard that held weights which were encoded is written again without them, or goes; every other file stays, or is brought
over to the output. JSON comes after the weights, config.json last of it, then the manifest.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from r7convert import __version__
from r7convert.card import CARD
from r7convert.carry import CarriedShard, carried_shards
from r7convert.checkpoint import CONFIG, HF_QUANT_CONFIG, INDEX, QUANT_CONFIG, Checkpoint
from r7convert.copying import Work as Copying
from r7convert.copying import copy_file, write_shard
from r7convert.journal import MANIFEST, VERDICT, Journal, Manifest, commit_change, write_manifest
from r7convert.progress import Progress
from r7convert.shared_plan import Outcome, SharedPlan
from r7convert.source import Folder
from r7convert.stamp import StampFiles, repair
from r7convert.store import Header, read_header, write_json
from r7convert.targets import codebook_of, storage_record

Json = Any

_WRITTEN_ANEW = {MANIFEST, VERDICT, CONFIG, QUANT_CONFIG, HF_QUANT_CONFIG, INDEX}


@dataclass(frozen=True)
class Work:
    """One run: `stage` is where new files are written, `weights` where the weights are read."""

    folder: Path
    output: Path | None
    checkpoint: Checkpoint
    weights: Checkpoint
    manifest: Manifest | None
    plan: SharedPlan
    stage: Path
    link: bool
    options: Mapping[str, Json]


def all_figures(outcomes: Mapping[int, Outcome]) -> dict[str, Json]:
    return {module: said for layer in sorted(outcomes) for module, said in outcomes[layer].figures.items()}


def all_kept(plan: SharedPlan, outcomes: Mapping[int, Outcome]) -> dict[str, str]:
    return {**plan.kept, **{module: why for layer in sorted(outcomes) for module, why in outcomes[layer].kept.items()}}


def write_output(work: Work, outcomes: Mapping[int, Outcome], journal: Journal, progress: Progress) -> list[str]:
    """The shards, the JSON and the seal, once every layer is there; returns the files that went."""
    checkpoint, stage = work.checkpoint, work.stage
    encoded = {module for outcome in outcomes.values() for module in outcome.figures}
    if not encoded and work.output is None:
        shutil.rmtree(stage)  # nothing could be encoded: the folder keeps its seal
        return []
    gone = {name for part in work.plan.parts if encoded.issuperset(part.modules) for name in part.replaced}
    new = {layer.file: read_header(stage / layer.file) for layer in work.plan.layers if outcomes[layer.layer].figures}
    touched = {checkpoint.tensors[name].file for name in gone}
    rest = {shard.file: shard for shard in carried_shards(checkpoint, gone)}
    removed = sorted(touched - rest.keys())
    anew = {name for name in rest if name in touched} if work.output is None else checkpoint.sizes.keys() - _WRITTEN_ANEW - set(removed)
    _carry(work, sorted(anew), rest, journal, progress)

    files = {**(work.manifest.files if work.manifest and work.output is None else {}), **journal.done}
    for name in (*removed, HF_QUANT_CONFIG, CARD):
        files.pop(name, None)
    tensors = {entry.name: entry for entry in checkpoint.tensors.values() if entry.name not in gone}
    tensors |= {entry.name: entry for header in new.values() for entry in header.tensors.values()}
    for name, value in _documents(work, gone, new, tensors).items():
        files[name] = write_json(stage / name, value, compact=name == INDEX)
    sealed = Manifest(f"r7convert {__version__}", files, _facts(work, outcomes, gone))
    if work.output is None:
        commit_change(work.folder, sealed)
    else:
        write_manifest(stage, sealed)
        journal.close()
    return removed


def _carry(work: Work, names: Sequence[str], rest: Mapping[str, CarriedShard], journal: Journal, progress: Progress) -> None:
    """Bring files over that are not there yet: shards less what went, the others byte for byte."""
    todo = [name for name in names if not journal.is_done(work.stage, name)]
    if not todo:
        return
    payload = work.checkpoint.source
    assert isinstance(payload, Folder)
    progress.start(sum(work.checkpoint.sizes[name] for name in todo), "carry")
    # What is carried is not judged here: a mark that the manifest has for a value that is not finite stays.
    copying = Copying(work.stage, progress, threading.Event(), allow_nonfinite=True)
    for name in todo:
        if name in rest:
            journal.record(name, write_shard(rest[name], payload, copying, link=work.link)[name])
        else:
            journal.record(name, copy_file(name, payload, copying)[name])


def _documents(work: Work, gone: set[str], new: Mapping[str, Header], tensors: Mapping[str, Any]) -> dict[str, Json]:
    """Index, quantization_config.json, config.json, in the order in which they are written."""
    checkpoint = work.checkpoint
    weight_map = {name: file for name, file in checkpoint.weight_map.items() if name not in gone}
    weight_map |= {name: file for file, header in new.items() for name in header.tensors}
    index = checkpoint.source.json(INDEX) if INDEX in checkpoint.sizes else {}
    total = sum(entry.nbytes for entry in tensors.values())
    index = {**index, "metadata": {**(index.get("metadata") or {}), "total_size": total}, "weight_map": dict(sorted(weight_map.items()))}

    target = _target(work)
    files = StampFiles(checkpoint.config, checkpoint.quantization_file, checkpoint.hf_quant_config)
    plain = target == "exl3" and not checkpoint.dense_exl3 and not checkpoint.experts
    if not plain:
        files = repair(files, target, codebook=codebook_of(checkpoint)).files
    storage = _storage((files.embedded or {}).get("tensor_storage") or {}, gone, new)
    stamped = repair(files, target, tensor_storage=storage, bits=work.plan.bits if plain else None, codebook=codebook_of(checkpoint)).files
    return {INDEX: index, QUANT_CONFIG: stamped.quantization_file, CONFIG: stamped.config}


def _storage(before: Mapping[str, Json], gone: set[str], new: Mapping[str, Header]) -> dict[str, Json]:
    """tensor_storage with a record for every new module, and none for modules that went."""
    modules: dict[str, list[tuple[str, str, tuple[int, ...]]]] = {}
    for header in new.values():
        for entry in header.tensors.values():
            modules.setdefault(entry.name.rpartition(".")[0], []).append((entry.name, entry.dtype, entry.shape))
    without = {name.rpartition(".")[0] for name in gone}
    kept = {module: record for module, record in before.items() if module not in without}
    return kept | {module: storage_record(module, tensors) for module, tensors in modules.items()}


def _target(work: Work) -> str:
    """What the manifest says, or what the tensors are laid out for."""
    if work.manifest is not None and isinstance(work.manifest.facts.get("target"), str):
        return str(work.manifest.facts["target"])
    if work.checkpoint.r7 is not None:
        return "r7"
    if any(layer.tp is not None for layer in work.checkpoint.experts.values()):
        return "slabs" if "r7convert_slabs" in (work.checkpoint.quantization or {}) else "rank-sliced"
    return "exl3"


def _facts(work: Work, outcomes: Mapping[int, Outcome], gone: set[str]) -> dict[str, Json]:
    """What the manifest states: the facts there were, and those of this run. A weight that was encoded moves to that account."""
    tail, tensors = work.checkpoint.tail, work.checkpoint.tensors
    facts: dict[str, Json] = {
        "target": _target(work),
        "tp": tail.tp if tail is not None else None,
        "accounting": {"kept": {"tensors": len(tensors), "bytes": work.checkpoint.payload_bytes}},
        **(work.manifest.facts if work.manifest else {}),
    }
    accounting = {kind: dict(total) for kind, total in facts["accounting"].items()}
    encoded = accounting.setdefault("encoded", {"tensors": 0, "bytes": 0})
    for name in gone:
        if name.endswith(".weight"):
            for total, sign in ((accounting["kept"], -1), (encoded, 1)):
                total["tensors"] += sign
                total["bytes"] += sign * tensors[name].nbytes
    kept = all_kept(work.plan, outcomes)
    figures = {**facts.get("encoded", {}), **all_figures(outcomes)}
    return {
        **facts,
        "accounting": dict(sorted(accounting.items())),
        "encoded": figures,
        "not_encoded": {m: why for m, why in {**facts.get("not_encoded", {}), **kept}.items() if m not in figures},
    }
