"""The part "bytes", on what is no tensor: config keys the stamp leaves alone, header metadata, carried files."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from r7convert.evidence import Evidence
from r7convert.findings import Check, Part
from r7convert.store import PARTIAL, hash_file, read_json

Json = Any

STAMPED = ("quantization_config", "hybrid_tr3_tail")
PROVENANCE = "r7convert_provenance"
BLOCK_KEYS = frozenset({"quant_method", "bits", "codebook", "version", "head_bits", "tensor_storage", "r7convert_slabs"})
"""Keys of the embedded block that a conversion may set; every other is the source's, here or under the provenance."""
MTP_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")

CONFIG = "config.json"
QUANT_CONFIG = "quantization_config.json"
HF_QUANT_CONFIG = "hf_quant_config.json"
INDEX = "model.safetensors.index.json"
REWRITTEN = frozenset({CONFIG, QUANT_CONFIG, HF_QUANT_CONFIG, INDEX, "slabs.json", "MANIFEST.json", "VERDICT.json"})
"""Files that are judged by the contract and not carried."""
R7_SIDECAR = re.compile(r"r7-experts-layer-\d+\.json")


def compare_config(source: Path, output: Path, part: Part, *, dropped_mtp: bool) -> None:
    """config.json but for the stamp, key by key; what the stamp took out is found again, word for word."""
    kept = part.check("config.json: keys other than the stamp's are the source's", "values")
    before: Json = {}
    after: Json = {}
    with kept.collecting():
        before, after = read_json(source / CONFIG), read_json(output / CONFIG)
    if not isinstance(before, dict) or not isinstance(after, dict):
        kept.fail(CONFIG, "JSON", expected="an object", found=type(after).__name__)
        return
    free = MTP_KEYS if dropped_mtp else ()
    kept.same_json(CONFIG, expected=_plain(before, free), found=_plain(after, free))

    places = dict(_places(source, before))
    entries, earlier = _provenance(after), _provenance(before)
    _check_moved(part, after.get("quantization_config"), places, entries)
    true = part.check("provenance: what was taken out stands there word for word", "blocks")
    for n, entry in enumerate(entries):
        good = entry in earlier or _is_true(entry, places)
        true.expect(
            good, f"{CONFIG}: {PROVENANCE}.blocks[{n}]", "block", expected=f"that of {entry.get('place')}", found=entry.get("block")
        )


def _check_moved(part: Part, block: Json, places: Mapping[str, Mapping[str, Json]], entries: Collection[Mapping[str, Json]]) -> None:
    """Each key of the source's block, the preferred place's where they differ, is kept or under the provenance; none is new."""
    check = part.check("quantization_config: each key of the source's kept, or under the provenance", "keys")
    block = block if isinstance(block, dict) else {}
    known: dict[str, Json] = {}
    for where, old in places.items():
        for key, value in old.items():
            if key in known or key in BLOCK_KEYS - {"quant_method"}:
                continue
            known[key] = value
            here = key in block and block[key] == value
            away = any(
                entry["block"] == value or (isinstance(entry["block"], dict) and entry["block"].get(key) == value) for entry in entries
            )
            check.expect(here or away, f"{where}: {key}", "value", expected=f"kept, or under {PROVENANCE}", found=block.get(key))
    for key in block.keys() - BLOCK_KEYS - known.keys():
        check.expect(False, f"{CONFIG}: quantization_config: {key}", "key", expected="one of the source", found=block[key])


def _is_true(entry: Mapping[str, Json], places: Mapping[str, Mapping[str, Json]]) -> bool:
    """What an entry of the provenance says of its place: some keys of the block there, or one key's whole value."""
    place, block = entry.get("place"), entry["block"]
    if not isinstance(place, str):
        return False
    if place in places:
        return isinstance(block, dict) and all(key in places[place] and places[place][key] == value for key, value in block.items())
    where, _, key = place.rpartition(".")
    return where in places and key in places[where] and places[where][key] == block


def _plain(config: Mapping[str, Json], free: Collection[str]) -> Json:
    made = {key: value for key, value in config.items() if key not in (*STAMPED, PROVENANCE, *free)}
    if isinstance(made.get("text_config"), dict):
        made["text_config"] = {key: value for key, value in made["text_config"].items() if key not in (*STAMPED, *free)}
    return made


def _places(source: Path, config: Mapping[str, Json]) -> Iterator[tuple[str, dict[str, Json]]]:
    """Every block of the source that a stamp may sit in, the tail's old form and earlier provenance among them."""
    text = config.get("text_config")
    for where, value in (
        ("config.json: quantization_config", config.get("quantization_config")),
        ("config.json: text_config.quantization_config", text.get("quantization_config") if isinstance(text, dict) else None),
        (QUANT_CONFIG, read_json(source / QUANT_CONFIG) if (source / QUANT_CONFIG).exists() else None),
        (HF_QUANT_CONFIG, read_json(source / HF_QUANT_CONFIG) if (source / HF_QUANT_CONFIG).exists() else None),
    ):
        if isinstance(value, dict):
            yield where, value


def _provenance(config: Mapping[str, Json]) -> list[dict[str, Json]]:
    kept = config.get(PROVENANCE)
    entries = kept.get("blocks") if isinstance(kept, dict) else None
    return [entry for entry in entries or [] if isinstance(entry, dict) and "block" in entry]


def compare_metadata(source: Evidence, output: Evidence, part: Part) -> None:
    """A shard carried under its own name keeps its custom metadata."""
    check = part.check("carried shards: custom metadata kept", "keys")
    for name, header in output.headers.items():
        if name in source.headers:
            before = {**source.headers[name].metadata, "format": "pt"}
            check.same_json(f"{name}: __metadata__", expected=before, found=header.metadata)


def compare_files(
    source: Path, output: Path, part: Part, *, listed: Collection[str], shards: Collection[str], generated: Collection[str]
) -> int:
    """Every other file, byte for byte, in both directions; returns the bytes compared.

    `listed` are the files the manifest names, `shards` the safetensors files of the source, `generated` what the contract judges.
    """
    check = part.check("carried files: equal the source's, none missing, none of unknown origin", "files")
    nbytes = 0
    for name in sorted(listed):
        if name in REWRITTEN or name in generated or name.endswith(".safetensors"):
            continue
        if check.expect((source / name).is_file(), name, "file", expected="one of the source", found="none of that name there"):
            nbytes += _same_file(source / name, output / name, check)
    for path in sorted(source.iterdir()):
        if _is_carried(path) and path.name not in shards and path.name not in listed:
            check.expect(path.name in generated, path.name, "file of the source", expected="carried", found="left out")
    return nbytes


def _is_carried(path: Path) -> bool:
    left_out = path.name.startswith(".") or path.name.endswith((PARTIAL, ".incomplete", ".safetensors")) or not path.is_file()
    return not left_out and path.name not in REWRITTEN and path.name != "README.md" and not R7_SIDECAR.fullmatch(path.name)


def _same_file(before: Path, after: Path, check: Check) -> int:
    if not after.is_file():
        return 0  # the seal has named it
    old, new = hash_file(before), hash_file(after)
    check.expect(old == new, after.name, "bytes", expected=old.sha256, found=f"{new.sha256}{_first_difference(before, after)}")
    return new.size


def _first_difference(before: Path, after: Path) -> str:
    at = 0
    with before.open("rb") as old, after.open("rb") as new:
        while True:
            one, other = old.read(1 << 20), new.read(1 << 20)
            if one != other:
                differs = (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
                return f" (first at byte {at + next(differs, min(len(one), len(other)))})"
            if not one:
                return ""
            at += len(one)
