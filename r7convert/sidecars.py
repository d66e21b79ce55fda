"""What stands beside the payload about K: the producer's `bit_map` of each R7 shard, and the tier map of a mixed tail."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from r7convert.errors import FormatError, Offences, complain
from r7convert.experts import ExpertLayer
from r7convert.format import PROJECTIONS, R7Block, Tail, is_int

Json = Any


class Jsons(Protocol):
    def json(self, name: str) -> Json: ...


def sidecar_names(layer: ExpertLayer) -> list[str]:
    """The JSON files that may stand beside a layer's shards."""
    return sorted({entry.file.removesuffix(".safetensors") + ".json" for entry in layer.tensors.values()})


def check_bit_map(
    r7: R7Block | None, experts: Mapping[int, ExpertLayer], source: Jsons, sizes: Mapping[str, int], bad: Offences
) -> list[str]:
    """Compare each sidecar's bit_map with the payload's K, both ways; returns a warning a layer that has no sidecar.

    Source:  FORMAT.md section 2: the payload rules, and a sidecar that says otherwise belongs to another shard.
    """
    missing = []
    for layer in experts.values():
        if r7 is None or layer.tp is not None:
            continue
        names = [name for name in sidecar_names(layer) if name in sizes]
        if not names:
            missing.append(layer.layer)
        for name in names:
            _check_one(layer, source.json(name), name, bad)
    return [f"no sidecar beside the shards of layers {missing}: K is taken from the payload alone"] if missing else []


def _check_one(layer: ExpertLayer, sidecar: Json, name: str, bad: Offences) -> None:
    bit_map = sidecar.get("bit_map") if isinstance(sidecar, dict) else None
    if not isinstance(bit_map, dict):
        bad.add(name, "bit_map", expected="an object of module: K", found=type(bit_map).__name__)
        return
    expected = {layer.module(expert, proj): k for expert, row in enumerate(layer.bits) for proj, k in zip(PROJECTIONS, row, strict=True)}
    for module in sorted(expected.keys() | bit_map.keys()):
        said = bit_map.get(module)
        if module not in expected:
            bad.add(f"{name}: bit_map", f"unknown module {module!r}", expected=f"modules of layer {layer.layer}", found=said)
        elif not is_int(said) or said != expected[module]:
            bad.add(f"{name}: bit_map: {module}", "K", expected=f"{expected[module]}, as the payload has it", found=said)


def check_tail_map(tail: Tail, experts: Mapping[int, ExpertLayer], source: Jsons, sizes: Mapping[str, int], bad: Offences) -> None:
    """A mixed tail's tier map against the payload: every layer of the range, one K an expert.

    Source:  FORMAT.md section 4; a `tail_tr3` list in place of the field means K3 throughout.
    """
    if tail.map_file is None or tail.map_field is None:
        return
    if tail.map_file not in sizes:
        bad.add(tail.map_file, "missing tier map, named by hybrid_tr3_tail.bits_per_expert", do="Download it.")
        return
    tier_map = source.json(tail.map_file)
    if not isinstance(tier_map, dict):
        raise FormatError(complain(tail.map_file, "tier map", expected="an object", found=type(tier_map).__name__))
    for layer in range(tail.moe_layers[0], tail.moe_layers[1] + 1):
        where = f"{tail.map_file}: {layer}"
        entry = tier_map.get(str(layer))
        said = entry.get(tail.map_field) if isinstance(entry, dict) else None
        if said is None and isinstance(entry, dict) and isinstance(entry.get("tail_tr3"), list):
            said = [3] * len(entry["tail_tr3"])
        if not isinstance(said, list) or len(said) != tail.experts or not all(is_int(k) for k in said):
            bad.add(where, tail.map_field, expected=f"{tail.experts} integers", found=repr(said)[:80])
        elif layer in experts:
            for expert, (k, row) in enumerate(zip(said, experts[layer].bits, strict=True)):
                if set(row) != {k}:
                    bad.add(where, f"K of expert {expert}", expected=f"{row[0] if len(set(row)) == 1 else row} in the payload", found=k)
