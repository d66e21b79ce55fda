"""What a checkpoint is, told by its config and its headers, never by its name; signs that contradict each other are refused.

r7           `r7_routed_experts` over whole matrices; a `hybrid_tr3_tail` may describe the MTP layer's ranks
rank-sliced  `hybrid_tr3_tail` over ranks
slabs        `r7convert_slabs` over ranks: what repack wrote for slab readers
exl3         whole matrices that `quant_method: exl3` or a tensor_storage declares, and neither block
other        no routed experts in EXL3
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from r7convert.errors import FormatError, Offences, UnsupportedError, complain
from r7convert.experts import MAX_K, Codebook, ExpertLayer, Promise
from r7convert.format import (
    HADAMARD,
    MAX_SIZE,
    MCG_MULTIPLIER,
    MUL1_MULTIPLIER,
    RANK_SUFFIX,
    SHARED_H_V1,
    TILE,
    Geometry,
    R7Block,
    Tail,
    TensorEntry,
    is_expert_name,
    is_int,
)
from r7convert.units import ranges

Json = Any
Kind = Literal["r7", "rank-sliced", "slabs", "exl3", "other"]

R7, TAIL, SLABS, EXL3 = "r7_routed_experts", "hybrid_tr3_tail", "r7convert_slabs", "quant_method exl3"
"""The signs, as messages name them."""
CODEBOOKS: tuple[Codebook, ...] = ("mcg", "mul1")


@dataclass(frozen=True, slots=True)
class Signs:
    """What config.json and quantization_config.json say of routed experts. `methods` are the quant_method of each block there is."""

    r7: R7Block | None
    tail: Tail | None
    slabs: Mapping[str, Json] | None
    methods: tuple[Json, ...]
    storage: Mapping[str, Mapping[str, Json]]
    """Places that hold a tensor_storage -> its records."""
    codebook: Json

    @property
    def says_exl3(self) -> bool:
        records = (record for place in self.storage.values() for record in place.values())
        return "exl3" in self.methods or any(isinstance(record, Mapping) and record.get("quant_format") == "exl3" for record in records)

    @property
    def kind(self) -> Kind:
        """By config.json alone; headers are held against it."""
        return "r7" if self.r7 is not None else "rank-sliced" if self.tail is not None else "slabs" if self.slabs is not None else "exl3"

    def stated(self) -> str:
        """What config.json states, in words for a message."""
        blocks = [(R7, self.r7), (TAIL, self.tail)]
        said = [f"{name} over layers {block.moe_layers[0]} to {block.moe_layers[1]}" for name, block in blocks if block is not None]
        return " and ".join(said) or f"quant_method exl3, {R7} or {TAIL}, and not {' and '.join(map(repr, self.methods)) or 'no block'}"

    def promise(self, layer: int) -> Promise | None:
        """What the layer's routed experts look like; None where nothing says so."""
        if covers(self.r7, layer):
            return Promise("whole", R7)
        if self.tail is not None and covers(self.tail, layer):
            return Promise("ranked", TAIL, self.tail.tp, "shared_h" if self.tail.rotation_layout == SHARED_H_V1 else "per_expert")
        if self.r7 is not None or self.tail is not None:
            return None
        if self.slabs is not None:
            return Promise("ranked", SLABS, self.slabs["tp"])
        if not self.says_exl3:
            return None
        stated = tuple(book for book in CODEBOOKS if book == self.codebook)
        by = f"{EXL3} with codebook {self.codebook}" if stated else EXL3
        return Promise("whole", by, None, "per_expert", stated or CODEBOOKS)


def covers(block: R7Block | Tail | None, layer: int) -> bool:
    return block is not None and block.moe_layers[0] <= layer <= block.moe_layers[1]


def read_signs(blocks: Mapping[str, Mapping[str, Json]], r7: R7Block | None, tail: Tail | None) -> Signs:
    """Signs out of the quantization blocks, by the places they stand in, config.json's first.

    Raises:  FormatError where r7convert_slabs or tensor_storage is no such thing; UnsupportedError for a third codebook.
    """
    slabs = next((block["r7convert_slabs"] for block in blocks.values() if block.get("r7convert_slabs") is not None), None)
    if slabs is not None and not (isinstance(slabs, Mapping) and is_int(slabs.get("tp")) and 0 < slabs["tp"] <= MAX_SIZE // HADAMARD):
        raise FormatError(complain("quantization_config: r7convert_slabs", "tp", expected="a positive integer", found=repr(slabs)[:80]))
    storage = {}
    for place, block in blocks.items():
        if (found := block.get("tensor_storage")) is not None:
            if not isinstance(found, Mapping):
                raise FormatError(complain(f"{place}: tensor_storage", "block", expected="an object", found=type(found).__name__))
            storage[place] = found
    codebook = next((block["codebook"] for block in blocks.values() if block.get("codebook") is not None), None)
    signs = Signs(r7, tail, slabs, tuple(block.get("quant_method") for block in blocks.values()), storage, codebook)
    if signs.kind == "exl3" and signs.says_exl3 and codebook not in (None, *CODEBOOKS):
        raise UnsupportedError(complain("quantization_config", "codebook", expected="mcg or mul1", found=repr(codebook)))
    return signs


# ---- config against headers -------------------------------------------------------------------------------------------


def check_signs(signs: Signs, tensors: Mapping[str, TensorEntry], geometry: Geometry, bad: Offences) -> None:
    """What can be seen before the layers are built: ranges that overlap or end beyond the model, a method without a payload."""
    ranges_of = {name: block.moe_layers for name, block in ((R7, signs.r7), (TAIL, signs.tail)) if block is not None}
    limit = geometry.layers + max(geometry.mtp_layers, 1)
    for name, (first, last) in ranges_of.items():
        if last >= limit:
            bad.add(f"config.json: {name}", "moe_layers", expected=f"layers below {limit}", found=[first, last])
    if signs.r7 is not None and signs.tail is not None:
        first, last = (pick(a, b) for pick, a, b in zip((max, min), signs.r7.moe_layers, signs.tail.moe_layers, strict=True))
        if first <= last:
            found = " and ".join(f"{name} {list(span)}" for name, span in ranges_of.items())
            bad.add("config.json", f"two descriptions of layers {first} to {last}", expected="one", found=found)
    if signs.slabs is not None and ranges_of:
        bad.add("quantization_config", SLABS, expected=f"no {' or '.join(ranges_of)} beside it", found=", ".join([SLABS, *ranges_of]))
    for name, entry in tensors.items():
        if ".rank" in name and (rank := RANK_SUFFIX.search(name)) and not is_expert_name(name):
            do = "Readers of ranks drop the names of other ranks, whatever they belong to."
            bad.add(f"{entry.file}: {name}", f"rank {rank[1]} of a tensor that is no routed expert's", do=do)
    if "exl3" in signs.methods and not any(name.endswith(".trellis") for name in tensors):
        found = f"none in {len(tensors):,} tensors"
        bad.add("quantization_config", EXL3, expected="a trellis in some shard", found=found, do="Are these the original weights?")


def check_layers(signs: Signs, experts: Mapping[int, ExpertLayer], elsewhere: Collection[int], geometry: Geometry, bad: Offences) -> None:
    """Layers that were built, without offence, against blocks and sizes: each one said is there, none besides, K as stated.

    `elsewhere` are the layers whose routed experts are not EXL3.
    """
    for name, block in ((R7, signs.r7), (TAIL, signs.tail)):
        for layer in range(block.moe_layers[0], block.moe_layers[1] + 1) if block is not None else ():
            # An MTP layer that is absent is told by Mtp.problem, where --drop-mtp can answer.
            if layer not in experts and layer < geometry.layers:
                bad.add(f"layer {layer}", f"no routed experts, though {name} covers it", expected=geometry.experts, found=0)
    if len(bad):
        return
    there = {layer for layer in (*experts, *elsewhere) if layer < geometry.layers}
    if missing := set(geometry.moe_layers) - there:
        what = f"no routed experts in layers {ranges(missing)}"
        bad.add(
            "config.json", what, expected=f"{geometry.experts} in layers {ranges(geometry.moe_layers)}", found=f"layers {ranges(there)}"
        )
    if extra := there - set(geometry.moe_layers):
        what = f"routed experts in layers {ranges(extra)}, which it says are dense"
        bad.add("config.json", what, expected=f"layers {ranges(geometry.moe_layers)}", found=f"layers {ranges(there)}")
    for found in experts.values():
        block, name = (signs.tail, TAIL) if covers(signs.tail, found.layer) else (signs.r7, R7)
        for expert, row in enumerate(found.bits) if block is not None else ():
            if block is not None and (outside := sorted(set(row) - set(block.k_values))):
                where = f"{found.base}.{expert}"
                bad.add(where, "K", expected=f"one of {list(block.k_values)}, as {name} says", found=outside)


def check_modules(tensors: Mapping[str, TensorEntry], bad: Offences) -> dict[str, int]:
    """Modules outside the routed experts that hold a trellis, and their K: one codebook each, whole bits, today's vectors."""
    found = {}
    for name, entry in tensors.items():
        module, _, field = name.rpartition(".")
        if field != "trellis" or is_expert_name(name):
            continue
        words = entry.shape[2] if len(entry.shape) == 3 else 0
        if words % TILE or not 1 <= words // TILE <= MAX_K:
            bad.add(f"{entry.file}: {name}", "K from the last dimension", expected=f"{TILE}*K, K in 1..{MAX_K}", found=list(entry.shape))
        if f"{module}.mcg" in tensors and f"{module}.mul1" in tensors:
            bad.add(module, "codebook markers", expected="one codebook", found=f"{module}.mcg and {module}.mul1")
        for packed in ("su", "sv"):
            if f"{module}.{packed}" in tensors:
                bad.add(f"{module}.{packed}", "packed signs of an older EXL3", expected=f"{packed}h", found=packed)
        found[module] = words // TILE
    return found


def check_storage(
    signs: Signs, tensors: Mapping[str, TensorEntry], sliced: Collection[str], bad: Offences
) -> tuple[dict[str, Mapping[str, Json]], list[str]]:
    """Every EXL3 record of tensor_storage against the headers: what it says of a trellis must be true, and a module that stands
    nowhere is missing. Hands back the records that hold, config.json's before the file's, and warnings.

    Two things are warnings and left out, for nothing is left to guess. Records that an earlier form of the checkpoint left behind: the
    module stands there as plain weights, or in ranks (`sliced` are the bases of ranked layers). And, under an R7 block, untrue
    records of routed experts: their K is the payload's (FORMAT.md section 2), and their records are no reader's.
    """
    held, stale, untrue = dict[str, Mapping[str, Json]](), set[str](), dict[str, str]()
    for place, records in signs.storage.items():
        for module, record in records.items():
            where = f"{place}: tensor_storage: {module}"
            if isinstance(record, Mapping):
                held.setdefault(module, record)
            if not isinstance(record, Mapping) or record.get("quant_format") != "exl3":
                continue
            if f"{module}.trellis" not in tensors:
                parts = (
                    [module] if not module.endswith(".gate_up_proj") else [module.replace("gate_up_", word) for word in ("gate_", "up_")]
                )
                is_plain = all(f"{part}.weight" in tensors or f"{part}.trellis" in tensors for part in parts)
                if is_plain or any(module.startswith(f"{base}.") for base in sliced):
                    stale.add(module)
                else:
                    bad.add(where, "record of an EXL3 module", expected=f"{module}.trellis in some shard", found="no such tensor")
                continue
            for what, expected, found in _record_faults(module, record, tensors):
                if signs.r7 is not None and is_expert_name(f"{module}."):
                    untrue.setdefault(module, complain(where, what, expected=expected, found=found))
                else:
                    bad.add(where, what, expected=expected, found=found)
    said = [f"tensor_storage calls {len(stale):,} modules EXL3 that are not, such as {min(stale)}: left out"] if stale else []
    if untrue:
        said.append(f"tensor_storage is untrue of {len(untrue):,} routed matrices, and the payload counts: {min(untrue.values())}")
    return {module: record for module, record in held.items() if module not in stale and module not in untrue}, said


def _record_faults(module: str, record: Mapping[str, Json], tensors: Mapping[str, TensorEntry]) -> Iterator[tuple[str, object, object]]:
    """(what, what the headers have, what the record says) of each untruth about a module that has a trellis."""
    trellis = tensors[f"{module}.trellis"]
    k = trellis.shape[2] / TILE if len(trellis.shape) == 3 else 0
    if "bits_per_weight" in record and record["bits_per_weight"] != k:
        yield "bits_per_weight", f"{k:g}, as {trellis.file} has it", record["bits_per_weight"]
    for field, multiplier in (("mcg", MCG_MULTIPLIER), ("mul1", MUL1_MULTIPLIER)):
        said, there = record.get(f"{field}_multiplier"), f"{module}.{field}" in tensors
        if said and not there:
            yield f"{field}_multiplier", f"none, for there is no {module}.{field}", said
        elif said and not (is_int(said) and said % (1 << 32) == multiplier):  # signed, as the marker is stored, is the same number
            yield f"{field}_multiplier", multiplier, said
    stored = record.get("stored_tensors")
    for name, form in stored.items() if isinstance(stored, Mapping) else ():
        entry = tensors.get(name)
        if entry is None:
            yield f"stored_tensors: {name}", "a tensor of some shard", "no such tensor"
        elif isinstance(form, Mapping) and "shape" in form and form["shape"] != list(entry.shape):
            yield f"stored_tensors: {name}: shape", f"{list(entry.shape)}, as {entry.file} has it", form["shape"]
