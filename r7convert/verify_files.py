"""The part "bytes", on what is no tensor: config keys the stamp leaves alone, header metadata, carried files."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from r7convert.evidence import Evidence, is_ours
from r7convert.findings import Check, Part
from r7convert.format import is_int
from r7convert.store import hash_file, is_plain_name, read_json

Json = Any

STAMPED = ("quantization_config", "hybrid_tr3_tail")
PROVENANCE = "r7convert_provenance"
BLOCK_KEYS = frozenset({"quant_method", "bits", "codebook", "version", "head_bits", "tensor_storage", "r7convert_slabs"})
"""Keys of the embedded block that a conversion may set; every other is the source's, here or under the provenance."""
PLACE = ("layer", "tp", "rank")
"""What a rank's file says of its place; of another file it is no longer true."""
MTP_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")

CONFIG = "config.json"
QUANT_CONFIG = "quantization_config.json"
HF_QUANT_CONFIG = "hf_quant_config.json"
INDEX = "model.safetensors.index.json"
REWRITTEN = frozenset({CONFIG, QUANT_CONFIG, HF_QUANT_CONFIG, INDEX, "slabs.json", "MANIFEST.json", "VERDICT.json"})
"""Files that are judged by the contract and not carried."""
LEFT_OUT = (".safetensors", ".partial", ".incomplete", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".gguf", ".onnx", ".h5", ".msgpack")
"""Weights that the index does not name, in this form or another, and what a download left behind."""


def compare_config(source: Path, output: Evidence, part: Part, *, nominal: float | None, last_layer: int | None) -> None:
    """config.json but for the stamp, key by key; what the stamp took out is found again, word for word.

    `nominal` is the mean K of the output's routed experts; `last_layer` the last that stays where MTP layers were dropped.
    """
    kept = part.check("config.json: keys other than the stamp's are the source's", "values")
    before: Json = {}
    after: Json = {}
    with kept.collecting():
        before, after = read_json(source / CONFIG), read_json(output.folder / CONFIG)
    if not isinstance(before, dict) or not isinstance(after, dict):
        kept.fail(CONFIG, "JSON", expected="an object", found=type(after).__name__)
        return
    free = MTP_KEYS if last_layer is not None else ()
    kept.same_json(CONFIG, expected=_plain(before, free), found=_plain(after, free))

    places = {where: _shortened(old, last_layer) for where, old in _places(source, before)}
    entries, earlier = _provenance(after), _provenance(before)
    due = None if any("r7_routed_experts" in old for old in places.values()) else _r7_block_due(output)
    _check_moved(part, after.get("quantization_config"), places, entries, {"r7_routed_experts": due} if due else {})
    _check_bits(part, after.get("quantization_config"), before.get("hybrid_tr3_tail"), places.values(), nominal)
    true = part.check("provenance: what was taken out stands there word for word", "blocks")
    for n, entry in enumerate(entries):
        good = entry in earlier or _is_true(entry, places)
        true.expect(
            good, f"{CONFIG}: {PROVENANCE}.blocks[{n}]", "block", expected=f"that of {entry.get('place')}", found=entry.get("block")
        )


def is_r7(source: Path) -> bool:
    """Whether the source says itself that it is R7: then target r7 carries what it says."""
    config = read_json(source / CONFIG)
    return any("r7_routed_experts" in block for _, block in _places(source, config if isinstance(config, dict) else {}))


def _r7_block_due(output: Evidence) -> Json:
    """The R7 block of an output whose source had none, as its own headers have it; None where no layer is in R7's form."""
    layers = {number: layer for number in sorted(output.expert_tensors) if (layer := output.layer(number)).r7_shared}
    if not layers:
        return None
    shards = [sorted({entry.file for entry in layer.r7_shared.values()})[0] for layer in layers.values()]
    return {
        "schema": "r7-complete-v2-checkpoint-v1",
        "schema_version": 2,
        "codebook": "mcg",
        "bits": "mixed_tensor",
        "moe_layers": [min(layers), max(layers)],
        "k_values": sorted({k for layer in layers.values() for _, ks in layer.k_rows() for k in ks}),
        "tp_slice_quantum": 128,
        "bit_map_manifests": [f"{shard.removesuffix('.safetensors')}.json" for shard in shards],
    }


def _check_moved(
    part: Part,
    block: Json,
    places: Mapping[str, Mapping[str, Json]],
    entries: Collection[Mapping[str, Json]],
    made: Mapping[str, Json],
) -> None:
    """Each key of the source's block, the preferred place's where they differ, is kept or under the provenance; none is new but
    those `made`, with their values.
    """
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
    for key, value in made.items():
        check.same_json(f"{CONFIG}: quantization_config: {key}", expected=value, found=block.get(key))
    for key in block.keys() - BLOCK_KEYS - known.keys() - made.keys():
        check.expect(False, f"{CONFIG}: quantization_config: {key}", "key", expected="one of the source", found=block[key])


def _check_bits(part: Part, block: Json, tail: Json, places: Iterable[Mapping[str, Json]], nominal: float | None) -> None:
    """`bits` is what the source said, or the mean K of the experts; version and head_bits are the source's."""
    check = part.check("quantization_config: bits, version and head_bits are true", "values")
    block = block if isinstance(block, dict) else {}
    said = [old.get("bits") for old in places] + [tail.get("bits") if isinstance(tail, dict) else None]
    said += [old["r7_routed_experts"].get("target_bpw") for old in places if isinstance(old.get("r7_routed_experts"), dict)]
    due = [value for value in (nominal, *said) if value is not None]
    check.expect(block.get("bits") in due, f"{CONFIG}: quantization_config", "bits", expected=f"one of {due}", found=block.get("bits"))
    for key in ("version", "head_bits"):
        due = [old[key] for old in places if key in old]
        good = block[key] in due if key in block else not due
        check.expect(good, f"{CONFIG}: quantization_config", key, expected=due or "none", found=block.get(key))


def _shortened(block: Mapping[str, Json], last_layer: int | None) -> dict[str, Json]:
    """The block as it reads once layers after `last_layer` are dropped."""
    r7 = block.get("r7_routed_experts")
    if last_layer is None or not isinstance(r7, dict):
        return dict(block)
    layers = r7.get("moe_layers")
    if not isinstance(layers, list) or len(layers) != 2 or not is_int(layers[1]):
        return dict(block)
    return {**block, "r7_routed_experts": {**r7, "moe_layers": [layers[0], min(layers[1], last_layer)]}}


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
    """Custom metadata of headers and index is kept; a file of ours adds its format, layer, tp and rank."""
    check = part.check("custom metadata of shards and index kept", "values")
    layers = {entry.file: layer for layer, entries in output.expert_tensors.items() for entry in entries}
    for name, header in output.headers.items():
        if name in source.headers:
            due: dict[str, str] = {**source.headers[name].metadata, "format": "pt"}
        else:
            theirs = {entry.file for entry in source.expert_tensors.get(layers.get(name, -1), ())}
            own = {key: header.metadata[key] for key in PLACE if key in header.metadata}  # the contract's to judge
            due = {key: value for file in sorted(theirs, reverse=True) for key, value in source.headers[file].metadata.items()}
            due = {key: value for key, value in due.items() if key not in PLACE} | {"format": "pt"} | own
        check.same_json(f"{name}: __metadata__", expected=due, found=header.metadata)
    if (source.folder / INDEX).exists():
        with check.collecting():
            before, after = (_without_size(read_json(folder / INDEX)) for folder in (source.folder, output.folder))
            check.same_json(f"{INDEX}: metadata", expected=before, found=after)


def _without_size(index: Json) -> Json:
    """The index's own metadata; total_size is the contract's to judge."""
    metadata = index.get("metadata") if isinstance(index, dict) else None
    return {key: value for key, value in metadata.items() if key != "total_size"} if isinstance(metadata, dict) else {}


def compare_files(
    source: Evidence, output: Evidence, part: Part, *, stays_r7: bool, listed: Collection[str], generated: Collection[str]
) -> int:
    """Every other file, byte for byte, in both directions; returns the bytes compared.

    `listed` are the files the manifest names, `generated` those of the output that the contract judges. `stays_r7`: the source's
    own sidecars and tier map are still true.
    """
    check = part.check("carried files: equal the source's, none missing, none of unknown origin", "files")
    nbytes = 0
    for name in sorted(listed):
        if name in REWRITTEN or name in generated or name.endswith(".safetensors"):
            continue
        before = source.folder / name
        if check.expect(before.is_file(), name, "file", expected="one of the source", found="none of that name there"):
            nbytes += _same_file(before, output.folder / name, check)
    for name in sorted(generated):
        if name.removesuffix(".json") + ".safetensors" in output.headers:
            _check_producer(
                output.folder / name, part.check("R7 sidecars made anew: r7convert's, so that the contract judges them", "files")
            )
    gone = source.expert_tensors.keys() - output.expert_tensors.keys()
    left_out = _describing(source, gone if stays_r7 else source.expert_tensors.keys(), tail_too=not stays_r7)
    for path in sorted(source.folder.iterdir()):
        if _is_carried(path) and path.name not in left_out and path.name not in generated:
            check.expect(path.name in listed, path.name, "file of the source", expected="carried", found="left out")
    return nbytes


def _check_producer(sidecar: Path, check: Check) -> None:
    with check.collecting():
        said = read_json(sidecar)
        provenance = said.get("provenance") if isinstance(said, dict) else None
        producer = provenance.get("producer") if isinstance(provenance, dict) else None
        good = isinstance(producer, str) and is_ours(producer)
        check.expect(good, f"{sidecar.name}: provenance", "producer", expected="r7convert and its version", found=producer)


def _describing(source: Evidence, layers: Collection[int], *, tail_too: bool) -> set[str]:
    """JSON that describes the source's own shards of these layers and would be untrue beside others: R7 sidecars, the tier map."""
    shards = {entry.file for layer in layers for entry in source.expert_tensors[layer]}
    config = read_json(source.folder / CONFIG)
    tail = config.get("hybrid_tr3_tail") if isinstance(config, dict) else None
    pointer = tail.get("bits_per_expert") if isinstance(tail, dict) and tail_too else None
    tier_map = {pointer.rpartition(":")[0]} if isinstance(pointer, str) else set()
    return {shard.removesuffix(".safetensors") + ".json" for shard in shards} | tier_map


def _is_carried(path: Path) -> bool:
    left_out = not is_plain_name(path.name) or not path.is_file() or path.name.lower().endswith(LEFT_OUT)
    return not left_out and path.name not in REWRITTEN and path.name != "README.md"


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
