"""The stamp: which quantization method a checkpoint's JSON claims, in each of the places a reader may look. Pure.

An earlier producer's stamp (`quant_method: modelopt`) over EXL3 payloads makes stock servers drop the block and run out of
memory. `diagnose` says what stands in the four places, `repair` gives the corrected objects and every field that changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from r7convert.errors import FormatError, UnsupportedError, complain
from r7convert.format import is_expert_name, parse_r7_block, parse_tail

Json = Any

TARGETS = ("r7", "rank-sliced", "slabs", "exl3")
PROVENANCE = "r7convert_provenance"
"""The one top-level key of config.json under which what was taken out is kept; no reader interprets it."""

EMBEDDED = "config.json: quantization_config"
NESTED = "config.json: text_config.quantization_config"
FILE = "quantization_config.json"
HF_FILE = "hf_quant_config.json"

# A block that holds one of the first four is some other reader's; the rest are the same producer's and mean nothing without them.
_FOREIGN_KEYS = ("producer", "quant_algo", "quantization", "config_groups")
_PRODUCER_KEYS = frozenset(
    (*_FOREIGN_KEYS, "kv_cache_quant_algo", "kv_cache_scheme", "exclude_modules", "group_size", "quantized_layers", "pre_quant_scale")
)
_LEADING_KEYS = ("quant_method", "bits", "codebook", "version", "head_bits")
KEEP: Final = object()


class _Absent:
    """No such field; JSON's null is a value of its own."""

    def __repr__(self) -> str:
        return "(absent)"


ABSENT: Final = _Absent()


@dataclass(frozen=True, slots=True)
class StampFiles:
    """The JSON objects that can carry a stamp; None where the file is absent."""

    config: Mapping[str, Json]
    quantization_file: Mapping[str, Json] | None = None
    hf_quant_config: Mapping[str, Json] | None = None

    @property
    def nested(self) -> Mapping[str, Json] | None:
        text = self.config.get("text_config")
        return _mapping(text.get("quantization_config"), NESTED) if isinstance(text, Mapping) else None

    @property
    def embedded(self) -> Mapping[str, Json] | None:
        return _mapping(self.config.get("quantization_config"), EMBEDDED)

    def places(self) -> dict[str, Mapping[str, Json] | None]:
        """The four places, in the order in which readers prefer them."""
        return {EMBEDDED: self.embedded, NESTED: self.nested, FILE: self.quantization_file, HF_FILE: self.hf_quant_config}


@dataclass(frozen=True, slots=True)
class Place:
    """One of the four places: what it claims, and what is wrong with that."""

    name: str
    present: bool
    quant_method: str | None
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Change:
    """One field that a repair changed: `path` inside the file, "" for the file itself; ABSENT before or after where there is none."""

    file: str
    path: str
    before: Json
    after: Json

    def __str__(self) -> str:
        return f"{self.file}: {self.path or 'file'}: {_short(self.before)} -> {_short(self.after)}"

    def to_json(self) -> Json:
        values = {"before": self.before, "after": self.after}
        return {"file": self.file, "path": self.path} | {key: value for key, value in values.items() if value is not ABSENT}


@dataclass(frozen=True, slots=True)
class Repaired:
    """Corrected objects, every changed field, and what to know about them. No change at all: the stamp was right."""

    files: StampFiles
    changes: tuple[Change, ...]
    notes: tuple[str, ...] = ()


def _mapping(value: Json, where: str) -> Mapping[str, Json] | None:
    if value is not None and not isinstance(value, Mapping):
        raise FormatError(complain(where, "block", expected="an object", found=type(value).__name__))
    return value


# ---- diagnosis --------------------------------------------------------------------------------------------------------


def diagnose(files: StampFiles, codebook: str = "mcg") -> tuple[Place, ...]:
    """What each of the four places claims, absent ones included; `codebook` is the payload's.

    Source:  FORMAT.md section 3.
    """
    embedded = files.embedded
    found = []
    for name, block in files.places().items():
        problems: list[str] = []
        if name == HF_FILE:
            if block is not None:
                problems.append("read as soon as config.json has no embedded block: an old stamp would come back")
        elif block is None:
            if name == EMBEDDED:
                problems.append("absent: readers fall back to hf_quant_config.json, or load without quantization")
            elif name == FILE:
                problems.append("absent: it must repeat the embedded block")
        else:
            problems += _block_problems(block, codebook)
            if name != EMBEDDED and embedded is not None and block != embedded:
                problems.append("differs from the embedded block of config.json")
        method = (block or {}).get("quant_method")
        found.append(Place(name, block is not None, method if isinstance(method, str) else None, tuple(problems)))
    return tuple(found)


def _block_problems(block: Mapping[str, Json], codebook: str) -> Iterator[str]:
    if block.get("quant_method") != "exl3":
        yield f"quant_method is {block.get('quant_method')!r}, the payload is exl3"
    if foreign := [key for key in block if key in _PRODUCER_KEYS]:
        yield f"holds {', '.join(foreign)} of another producer"
    if block.get("codebook") != codebook:
        yield f"codebook is {block.get('codebook')!r}, the payload is {codebook}"
    if not _is_number(block.get("bits")):
        yield f"bits is {block.get('bits')!r}, readers want a number"


def _is_number(value: Json) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


# ---- repair -----------------------------------------------------------------------------------------------------------


def repair(
    files: StampFiles,
    target: str = "r7",
    *,
    tail: Json = KEEP,
    tensor_storage: Mapping[str, Json] | None = None,
    bits: float | None = None,
    codebook: str = "mcg",
    extra: Mapping[str, Json] | None = None,
) -> Repaired:
    """The corrected objects for a target. Repairing them again changes nothing.

    `tail` replaces hybrid_tr3_tail (None removes it), `tensor_storage` and `bits` replace those of the block, `extra` adds keys
    to it. Without them what is there stays, as far as the target lets it: `r7` keeps the R7 block and the tail; the other targets
    keep the R7 block as provenance only, and the sliced ones no storage records of routed experts. `codebook` is the payload's.

    Raises:  FormatError for blocks that contradict each other or break the format; UnsupportedError where nothing says that
             the payload is EXL3 with that codebook.
    Source:  FORMAT.md sections 3, 4 and 8.
    """
    assert target in TARGETS, target
    block, taken = _merge(files)
    block |= extra or {}
    config = dict(files.config)
    if tail is not KEEP:
        config.pop("hybrid_tr3_tail", None)
        if tail is not None:
            config["hybrid_tr3_tail"] = tail
    elif config.get("hybrid_tr3_tail") is not None:
        config["hybrid_tr3_tail"] = _whole_bits(config["hybrid_tr3_tail"])
    _check_evidence(target, block, config.get("hybrid_tr3_tail"), tensor_storage, codebook)

    r7 = block.get("r7_routed_experts")
    if target != "r7" and r7 is not None:
        place = next(name for name, found in files.places().items() if found is not None and found.get("r7_routed_experts") is not None)
        taken.append({"place": f"{place}.r7_routed_experts", "block": r7})
        del block["r7_routed_experts"]
    if target != "slabs":
        block.pop("r7convert_slabs", None)
    block["bits"] = _nominal_bits(bits, block, r7, config.get("hybrid_tr3_tail"))
    block |= {"quant_method": "exl3", "codebook": codebook}
    storage = tensor_storage if tensor_storage is not None else _mapping(block.get("tensor_storage"), f"{EMBEDDED}.tensor_storage")
    if storage is not None:
        sliced = target in ("rank-sliced", "slabs") and tensor_storage is None
        block["tensor_storage"] = {m: r for m, r in storage.items() if not (sliced and is_expert_name(f"{m}."))}
    block = {key: block[key] for key in _LEADING_KEYS if key in block} | {k: v for k, v in block.items() if k not in _LEADING_KEYS}

    config["quantization_config"] = block
    if files.nested is not None:
        config["text_config"] = {**config["text_config"], "quantization_config": block}
    if kept := _provenance(files.config.get(PROVENANCE), taken):
        config[PROVENANCE] = kept
    after = StampFiles(config, dict(block), None)
    return Repaired(after, tuple(_changes(files, after)), tuple(_notes(target, block, config)))


def _merge(files: StampFiles) -> tuple[dict[str, Json], list[Json]]:
    """One block out of all places, the preferred place winning, without the producer's keys; and what was taken out."""
    block: dict[str, Json] = {}
    taken: list[Json] = []
    r7_seen: tuple[str, Json] | None = None
    for name, found in files.places().items():
        if found is None:
            continue
        if name == HF_FILE:
            taken.append({"place": name, "block": found})
            continue
        if (r7 := found.get("r7_routed_experts")) is not None:
            if r7_seen is not None and r7_seen[1] != r7:
                what = "r7_routed_experts: two blocks that differ"
                raise FormatError(complain(name, what, expected=f"that of {r7_seen[0]}", found="another", do="Keep the right one."))
            r7_seen = r7_seen or (name, r7)
        foreign = {key: value for key, value in found.items() if key in _PRODUCER_KEYS or (key == "quant_method" and value != "exl3")}
        if foreign:
            taken.append({"place": name, "block": foreign})
        for key, value in found.items():
            if key not in foreign:
                block.setdefault(key, value)
    return block, taken


def _check_evidence(target: str, block: Mapping[str, Json], tail: Json, tensor_storage: Mapping[str, Json] | None, codebook: str) -> None:
    """Never stamp exl3 on what nothing says is EXL3."""
    if block.get("codebook", codebook) != codebook:
        raise UnsupportedError(complain(EMBEDDED, "codebook", expected=codebook, found=repr(block["codebook"])))
    if block.get("r7_routed_experts") is not None:
        parse_r7_block(block["r7_routed_experts"])
    if tail is not None:
        parse_tail(tail)
    needs = {
        "r7": ("r7_routed_experts", block.get("r7_routed_experts")),
        "exl3": ("tensor_storage", tensor_storage or block.get("tensor_storage")),
        "rank-sliced": ("hybrid_tr3_tail", tail),
        "slabs": ("r7convert_slabs", block.get("r7convert_slabs")),
    }
    name, evidence = needs[target]
    if not evidence:
        raise UnsupportedError(complain("config.json", name, expected=f"one, for target {target}", found="none"))


def _nominal_bits(bits: float | None, block: Mapping[str, Json], r7: Json, tail: Json) -> float:
    """A number for `bits`: the one given, else what the block says, else the producer's own target, else the mean of its K."""
    candidates: list[Json] = [bits, block.get("bits"), (r7 or {}).get("target_bpw"), (tail or {}).get("bits")]
    for value in candidates:
        if _is_number(value):
            return float(value) if isinstance(value, float) else int(value)
    ks: list[int] = (r7 or {}).get("k_values") or (tail or {}).get("k_values") or []
    if not ks:
        raise UnsupportedError(complain(EMBEDDED, "bits", expected="a number of bits a weight", found=repr(block.get("bits"))))
    return round(sum(ks) / len(ks), 2)


def _whole_bits(tail: Json) -> Json:
    """Producers have written 3.0; readers truncate: write the integer it means."""
    bits = tail.get("bits") if isinstance(tail, Mapping) else None
    return {**tail, "bits": int(bits)} if isinstance(bits, float) and bits.is_integer() else tail


def _provenance(before: Json, taken: list[Json]) -> Json:
    """Blocks taken out, each content once: a repair that was cut short and run again keeps one copy."""
    blocks = list(before["blocks"]) if isinstance(before, Mapping) and isinstance(before.get("blocks"), list) else []
    known = [entry.get("block") for entry in blocks if isinstance(entry, Mapping)]
    for entry in taken:
        if entry["block"] not in known:
            blocks.append(entry)
            known.append(entry["block"])
    return {**(before if isinstance(before, Mapping) else {}), "blocks": blocks} if blocks else None


def _notes(target: str, block: Mapping[str, Json], config: Mapping[str, Json]) -> Iterator[str]:
    tail = config.get("hybrid_tr3_tail")
    if target == "r7" and tail is None and not block.get("tensor_storage"):
        yield "R7-aware readers need a non-empty tensor_storage where there is no tail: this checkpoint has neither"
    if target == "r7" and tail is None:
        yield "with no tail R7-aware readers need eager mode"
    if target == "r7" and tail is not None and tail.get("tp") != 1:
        yield f"some R7-aware releases apply the tail's tp {tail.get('tp')} to every layer"


# ---- what changed -----------------------------------------------------------------------------------------------------


def _changes(before: StampFiles, after: StampFiles) -> Iterator[Change]:
    yield from _diff("config.json", "", before.config, after.config)
    yield from _diff(FILE, "", _or_absent(before.quantization_file), _or_absent(after.quantization_file))
    yield from _diff(HF_FILE, "", _or_absent(before.hf_quant_config), _or_absent(after.hf_quant_config))


def _or_absent(value: Json) -> Json:
    return ABSENT if value is None else value


def _diff(file: str, path: str, before: Json, after: Json) -> Iterator[Change]:
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in dict.fromkeys((*before, *after)):
            yield from _diff(file, f"{path}.{key}" if path else str(key), before.get(key, ABSENT), after.get(key, ABSENT))
    elif before != after or type(before) is not type(after):
        yield Change(file, path, before, after)


def _short(value: Json) -> str:
    if isinstance(value, Mapping):
        return f"{{{', '.join(list(value)[:3])}{', ...' if len(value) > 3 else ''}}}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
