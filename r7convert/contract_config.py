"""The contract on JSON: the stamp, the tail and its tier map, the R7 block, tensor_storage, MTP (FORMAT.md sections 3, 4 and 8)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from r7convert.evidence import Evidence, is_ours, layer_number
from r7convert.findings import Check, Part
from r7convert.format import (
    MCG_MULTIPLIER,
    MUL1_MULTIPLIER,
    PER_EXPERT_V1,
    R7_SCHEMA,
    R7Block,
    Tail,
    TensorEntry,
    is_int,
    mtp_layer,
    parse_r7_block,
    parse_tail,
)
from r7convert.store import check_plain_name, is_plain_name, read_json

Json = Any
Config = Mapping[str, Json]

PRODUCER_KEYS = ("producer", "quant_algo", "quantization", "config_groups")
MODULE_FIELDS = ("trellis", "suh", "svh", "mcg", "mul1")
MULTIPLIERS = {"mcg": MCG_MULTIPLIER, "mul1": MUL1_MULTIPLIER}
TORCH_DTYPE = {"I16": "torch.int16", "F16": "torch.float16", "I32": "torch.int32", "BF16": "torch.bfloat16", "F32": "torch.float32"}


def check_stamp(folder: Path, config: Config, part: Part, codebooks: Sequence[str]) -> Config:
    """The four places of the stamp; hands back the embedded block, {} if there is none. `codebooks` are those of the payload.

    Source:  FORMAT.md section 3.
    """
    block = config.get("quantization_config")
    stamp = part.check("stamp: quant_method exl3, no producer's keys", "keys")
    where = "config.json: quantization_config"
    if not stamp.expect(isinstance(block, dict), where, "block", expected="an object", found=type(block).__name__):
        return {}
    assert isinstance(block, dict)
    stamp.same(where, "quant_method", expected="exl3", found=block.get("quant_method"))
    found = block.get("codebook")
    stamp.expect(found in codebooks, where, "codebook", expected=" or ".join(codebooks), found=found)
    bits = block.get("bits")
    is_number = isinstance(bits, int | float) and not isinstance(bits, bool)
    stamp.expect(is_number, where, "bits", expected="a number", found=bits)
    version = block.get("version", "unknown")
    stamp.expect(isinstance(version, str), where, "version", expected="a string, where known", found=version)
    head_bits = block.get("head_bits", 16)
    stamp.expect(is_int(head_bits), where, "head_bits", expected="an integer, where known", found=head_bits)
    for key in PRODUCER_KEYS:
        stamp.expect(key not in block, where, key, expected="no such key: a reader would take the block for its own", found=block.get(key))

    same = part.check("stamp: the same block in every place", "values")
    with same.collecting():
        same.same_json("quantization_config.json", expected=block, found=read_json(folder / "quantization_config.json"))
    text = config.get("text_config")
    if isinstance(text, dict) and "quantization_config" in text:
        same.same_json("config.json: text_config.quantization_config", expected=block, found=text["quantization_config"])
    old = folder / "hf_quant_config.json"
    part.check("stamp: no hf_quant_config.json", "files").expect(not old.exists(), old, "file", expected="none", found="one")
    return block


def check_no_r7_block(config: Config, block: Config, part: Part) -> None:
    """An R7-aware loader would slice rank-sliced experts again."""
    check = part.check("no r7_routed_experts beside rank-sliced or plain experts", "places")
    text = config.get("text_config")
    for where, place in (("quantization_config", block), ("config.json", config), ("text_config", text)):
        if isinstance(place, Mapping):
            check.expect("r7_routed_experts" not in place, where, "r7_routed_experts", expected="no such block", found="one")


def check_no_pointer(block: Config, part: Part) -> None:
    """A slab reader goes where the pointer says: it must not lead to a file that is not there, or not of these weights."""
    check = part.check("no r7convert_slabs but in slabs", "keys")
    check.expect("r7convert_slabs" not in block, "quantization_config", "r7convert_slabs", expected="no such key", found="one")


def check_r7_sidecar(sidecar: Json, name: str, check: Check, *, layer: int, shard: str, sha256: str) -> None:
    """A sidecar of r7convert's own making says nothing but what is so; a producer's is carried, and says what it says."""
    provenance = sidecar.get("provenance") if isinstance(sidecar, dict) else None
    producer = provenance.get("producer") if isinstance(provenance, dict) else None
    if not isinstance(producer, str) or not is_ours(producer):
        return
    due = {"schema": R7_SCHEMA, "layer": layer, "shard": shard, "shard_sha256": sha256, "provenance": {"producer": producer}}
    check.same_json(name, expected=due, found={key: value for key, value in sidecar.items() if key != "bit_map"})


def check_r7_block(block: Config, part: Part) -> R7Block | None:
    with part.check("r7_routed_experts is whole and strict", "blocks").collecting():
        return parse_r7_block(block.get("r7_routed_experts"))
    return None


def check_tail(folder: Path, config: Config, part: Part, *, experts: int, tp: int | None, reader: str) -> Tail | None:
    """`hybrid_tr3_tail`: every key a stock reader reads. `tp` None: the tail may have its own.

    Source:  FORMAT.md section 4; the keys are parsed by format.parse_tail, which refuses what readers misread in silence.
    """
    check = part.check("hybrid_tr3_tail: every key a stock reader takes", "keys")
    where, raw = "config.json: hybrid_tr3_tail", config.get("hybrid_tr3_tail")
    tail = None
    with check.collecting():
        tail = parse_tail(raw)
    if tail is None or not isinstance(raw, dict):
        return None
    check.same(where, "experts_per_layer", expected=experts, found=tail.experts)
    if tp is not None:
        check.same(where, "tp", expected=tp, found=tail.tp)
    for key in ("tp", "experts_per_layer", "bits"):
        check.expect(not isinstance(raw.get(key), float), where, f"{key}: readers truncate", expected="an integer", found=raw.get(key))
    if tail.map_file is not None:
        plain = is_plain_name(tail.map_file) and (folder / tail.map_file).is_file()
        check.expect(plain, where, "bits_per_expert", expected="a file of this folder", found=tail.map_file)
    levels = part.check(f"a {reader} reader knows the rotation layout", "layouts")
    known = tail.rotation_layout == PER_EXPERT_V1 or reader != "r14"
    levels.expect(known, where, "rotation_layout", expected=f"{PER_EXPERT_V1}, the only one r14 knows", found=tail.rotation_layout)
    if tail.rotation_layout != PER_EXPERT_V1 and reader != "r14":
        levels.note("an r14 reader ignores rotation_layout and fails late: this output needs r28 or later")
    return tail


def check_tier_map(folder: Path, tail: Tail, part: Part) -> dict[int, list[int]]:
    """K of each expert of each layer of the tail's range, as the config and its map state it; layers in error are left out."""
    check = part.check("tier map: an entry for every layer of the range", "layers")
    first, last = tail.moe_layers
    if tail.bits is not None:
        check.saw(last - first + 1)
        return {layer: [tail.bits] * tail.experts for layer in range(first, last + 1)}
    tier_map: Json = None
    with check.collecting():
        tier_map = read_json(folder / check_plain_name(tail.map_file, "config.json: hybrid_tr3_tail: bits_per_expert"))
    if not isinstance(tier_map, dict):
        check.fail(tail.map_file, "tier map", expected="an object", found=type(tier_map).__name__)
        return {}
    stated = {}
    for layer in range(first, last + 1):
        where, entry = f"{tail.map_file}: {layer}", tier_map.get(str(layer))
        ks = entry.get(tail.map_field) if isinstance(entry, dict) else None
        tr3 = entry.get("tail_tr3") if isinstance(entry, dict) else None
        if ks is None and isinstance(tr3, list):
            ks = [3] * len(tr3)
        sound = isinstance(ks, list) and len(ks) == tail.experts and all(is_int(k) and k in tail.k_values for k in ks)
        if check.expect(sound, where, tail.map_field or "", expected=f"{tail.experts} integers out of {list(tail.k_values)}", found=ks):
            stated[layer] = list(ks or [])
    for key in tier_map:
        known = re.fullmatch(r"0|[1-9][0-9]{0,5}", key) is not None and first <= int(key) <= last
        check.expect(known, tail.map_file, f"layer {key!r}", expected=f"{first}..{last}", found=key)
    return stated


def check_range(stated: tuple[int, int] | None, due: Sequence[int], of_block: Sequence[int], found: Sequence[int], part: Part) -> None:
    """One contiguous range that covers exactly the layers of its block; and all layers that config.json says have experts do.

    `of_block` are the layers in the block's form, `found` all with experts, `due` those that config.json says have them.
    """
    check = part.check("moe_layers: one contiguous range, MTP included, every layer there", "layers")
    for layer in sorted({*range(stated[0], stated[1] + 1), *of_block}) if stated is not None else ():
        inside, there = stated is not None and stated[0] <= layer <= stated[1], layer in of_block
        expected = "experts of this form" if inside else f"none outside {stated}"
        check.expect(inside == there, "moe_layers", f"layer {layer}", expected=expected, found="there" if there else "none")
    for layer in sorted({*due, *found}):
        what = f"routed experts of layer {layer}"
        check.expect((layer in due) == (layer in found), "config.json", what, expected=layer in due, found=layer in found)


def check_mtp(evidence: Evidence, *, layers: int, mtp_layers: int, part: Part) -> None:
    """num_nextn_predict_layers and the tensors of layers from num_hidden_layers on agree."""
    check = part.check("MTP layers: as many as config.json says", "layers")
    found = set()
    for name in evidence.tensors:
        if (layer := mtp_layer(name, layers)) is not None:
            found.add(layer)
    check.same(
        "config.json: num_nextn_predict_layers", "MTP layers", expected=list(range(layers, layers + mtp_layers)), found=sorted(found)
    )


def check_dense(
    evidence: Evidence,
    block: Config,
    part: Part,
    *,
    moe_range: tuple[int, int] | None,
    experts_too: bool,
    codebooks: Sequence[str] = ("mcg",),
) -> None:
    """EXL3 outside the routed experts: whole modules, embedded records that agree; only where a stock reader takes them.

    `moe_range` is set for stock readers, who load a dense EXL3 module only in layers inside it. `experts_too`: every module of
    the checkpoint, routed experts included, must have a full record (target exl3).
    Source:  FORMAT.md sections 4, 8 and 9.
    """
    storage = block.get("tensor_storage", {})
    modules: dict[str, dict[str, TensorEntry]] = {}
    entries = evidence.tensors.values() if experts_too else evidence.carried
    for entry in entries:
        module, _, field = entry.name.rpartition(".")
        if field in MODULE_FIELDS:
            modules.setdefault(module, {})[field] = entry
    whole = part.check("dense EXL3: trellis, suh, svh and mcg of one shape, no merged gate_up_proj", "modules")
    record = part.check("tensor_storage: embedded, a true record for every EXL3 module", "modules")
    record.expect(isinstance(storage, dict), "quantization_config: tensor_storage", "block", expected="an object", found=storage)
    storage = storage if isinstance(storage, dict) else {}
    for module, fields in modules.items():
        whole.saw()
        marker = next((name for name in codebooks if name in fields), codebooks[0])
        _check_module(module, fields, whole, marker)
        if record.expect(isinstance(storage.get(module), dict), module, "tensor_storage record", expected="one", found=storage.get(module)):
            _check_record(module, fields, storage[module], record, full=experts_too)
        if moe_range is not None:
            layer = layer_number(f"{module}.", evidence.layers)
            inside = layer is not None and moe_range[0] <= layer <= moe_range[1]
            part.check("dense EXL3 only in layers a stock reader takes it in", "modules").expect(
                inside, module, "layer of a dense EXL3 module", expected=f"inside moe_layers {list(moe_range)}", found=layer
            )
    for module in storage:
        there = f"{module}.trellis" in evidence.tensors or (experts_too and _is_plain_record(storage[module], evidence))
        if record.expect(there, f"tensor_storage: {module}", "record", expected="of a module in the files", found="no such module"):
            held = {field: evidence.tensors[name] for field in MODULE_FIELDS if (name := f"{module}.{field}") in evidence.tensors}
            if module not in modules and held and isinstance(storage[module], dict):
                _check_record(module, held, storage[module], record, full=False)


def _is_plain_record(record: Json, evidence: Evidence) -> bool:
    """A record of a module that is not quantized: its tensors are there, in the forms it states."""
    stored = record.get("stored_tensors") if isinstance(record, dict) else None
    if not isinstance(stored, dict) or not stored or set(record) != {"stored_tensors"}:
        return False
    for name, form in stored.items():
        entry = evidence.tensors.get(name)
        dtype = TORCH_DTYPE.get(entry.dtype, entry.dtype) if entry else ""
        if entry is None or form != {"shape": list(entry.shape), "n_bytes": entry.nbytes, "dtype": dtype}:
            return False
    return True


def _check_module(module: str, fields: Mapping[str, TensorEntry], check: Check, marker: str) -> None:
    if set(fields) != {"trellis", "suh", "svh", marker}:
        check.fail(module, "tensors", expected=f"trellis, suh, svh, {marker}", found=", ".join(sorted(fields)))
        return
    shape = fields["trellis"].shape
    if len(shape) != 3 or shape[2] % 16 or not 1 <= shape[2] // 16 <= 8:
        check.fail(f"{module}.trellis", "shape", expected="[in/16, out/16, 16*K], K in 1..8", found=list(shape))
        return
    wanted = {"trellis": ("I16", shape), "suh": ("F16", (16 * shape[0],)), "svh": ("F16", (16 * shape[1],)), marker: ("I32", ())}
    for field, (dtype, size) in wanted.items():
        entry = fields[field]
        if entry.dtype != dtype or (entry.shape != size and not (field == marker and entry.shape == (1,))):
            check.fail(entry.name, "dtype and shape", expected=f"{dtype} {list(size)}", found=f"{entry.dtype} {list(entry.shape)}")
    if module.endswith(".gate_up_proj"):
        check.fail(module, "merged payload: no reader loads it", expected="gate_proj and up_proj apart", found="gate_up_proj")


def _check_record(module: str, fields: Mapping[str, TensorEntry], record: Mapping[str, Json], check: Check, *, full: bool) -> None:
    """A record of ours is full; one carried from a source may say less, and what it says is true."""
    stored = {
        entry.name: {"shape": list(entry.shape), "n_bytes": entry.nbytes, "dtype": TORCH_DTYPE.get(entry.dtype, entry.dtype)}
        for entry in fields.values()
    }
    shape = fields["trellis"].shape if "trellis" in fields else ()
    bits = shape[2] // 16 if len(shape) == 3 else 0
    true = {"quant_format": "exl3", "stored_tensors": stored, "bits_per_weight": bits}
    true |= {f"{name}_multiplier": value for name, value in MULTIPLIERS.items() if name in fields}
    for key in record.keys() & {f"{name}_multiplier" for name in MULTIPLIERS} - true.keys():
        check.fail(f"tensor_storage: {module}: {key}", "value", expected="none: it has no such marker", found=record[key])
    for key in true if full else true.keys() & record.keys():
        check.same_json(f"tensor_storage: {module}: {key}", expected=true[key], found=record.get(key))
