"""The contract on slabs: the order of a rank's file, and slabs.json against tables derived again from the headers.

One layer on one rank is one file; its data section is w13 of each tier, w2 of each tier, the rotations, the hidden-side
vectors, the markers. The sidecar must say what the file holds, to the byte (FORMAT.md sections 5 and 6).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from r7convert.evidence import HIDDEN_FIELD, LayerExperts
from r7convert.findings import Part
from r7convert.format import PROJECTIONS, Geometry, TensorEntry
from r7convert.store import Header

Json = Any
Want = tuple[int | None, str, str]
"""(expert or None for the layer's vector, projection, field)."""

FORMAT = "r7convert-slabs-v1"
RANK_FILE = re.compile(r".+-layer-(\d{3,})-rank-(\d+)-of-(\d+)\.safetensors")
PAGE = 4096
SLAB_ALIGNMENT = 16
MOST_IN_A_TIER = 256
NO_ENTRY = -1


def check_slab_layer(
    layer: LayerExperts, described: Json, headers: Mapping[str, Header], part: Part, *, geometry: Geometry, tp: int, shared_h: bool
) -> None:
    """One layer: its rank files, their order, and its entry of slabs.json.

    Source:  FORMAT.md sections 5 and 6, derived again; nothing of the writer's arithmetic.
    """
    ks = dict(layer.k_rows())
    tiers = sorted({k for row in ks.values() for k in row})
    ids = {proj: [[expert for expert in sorted(ks) if ks[expert][p] == tier] for tier in tiers] for p, proj in enumerate(PROJECTIONS)}
    tables = {"bits": [list(ks[expert]) for expert in sorted(ks)], **_tables(ids, tiers, geometry.experts)}
    ranks = [_check_rank(layer, rank, headers, part, ids, geometry, tp, shared_h) for rank in range(tp)]
    sidecar = part.check("slabs.json: tiers, counts, descriptors, route map, offsets as the headers have them", "values")
    sidecar.same_json(f"slabs.json: layer {layer.layer}", expected={**tables, "ranks": ranks}, found=described)


def _tables(ids: Mapping[str, Sequence[Sequence[int]]], tiers: Sequence[int], experts: int) -> dict[str, Json]:
    """What a kernel is handed beside the bytes: counts, slots, stride, descriptors, route map."""
    counts = {proj: [len(found) for found in ids[proj]] for proj in PROJECTIONS}
    gate, up, down = (counts[proj] for proj in PROJECTIONS)
    slots = [max(g, u, 1) for g, u in zip(gate, up, strict=True)]
    stride = sum(slots)
    descriptors: list[int] | None = [NO_ENTRY] * (3 * stride)
    for p, proj in enumerate(PROJECTIONS):
        for t, found in enumerate(ids[proj]):
            for local, expert in enumerate(found):
                if descriptors is not None and p * stride + expert < len(descriptors):
                    descriptors[p * stride + expert] = (t << 8) | local
    if any(count > MOST_IN_A_TIER for row in (gate, up, down) for count in row):
        descriptors = None
    return {
        "tiers": list(tiers),
        "gate_n": gate,
        "up_n": up,
        "down_n": down,
        "fc1_slots": slots,
        "stride": stride,
        "descriptors": descriptors,
        "route_map": list(range(experts)),
    }


def _check_rank(
    layer: LayerExperts,
    rank: int,
    headers: Mapping[str, Header],
    part: Part,
    ids: Mapping[str, Sequence[Sequence[int]]],
    geometry: Geometry,
    tp: int,
    shared_h: bool,
) -> Json:
    """The order of one rank's file; hands back where its slabs are, as slabs.json should say."""
    entries: dict[Want, TensorEntry] = {(e, proj, field): entry for (e, proj, r, field), entry in layer.own.items() if r == rank}
    entries |= {(None, proj, field): entry for (proj, r, field), entry in layer.shared_h.items() if r == rank}
    files = {entry.file for entry in entries.values()}
    where = f"layer {layer.layer}, rank {rank}"
    one = part.check("one file a layer and rank, named and marked so, with nothing else in it", "files")
    if not one.expect(len(files) == 1, where, "files", expected="one", found=sorted(files)):
        return None
    name = files.pop()
    header = headers[name]
    m = RANK_FILE.fullmatch(name)
    named = tuple(map(int, m.groups())) if m else None
    one.same(name, "layer, rank and tp in the name", expected=(layer.layer, rank, tp), found=named)
    one.same(f"{name}: __metadata__", "order of keys", expected=sorted(header.metadata), found=list(header.metadata))
    one.same(name, "tensors in the file", expected=len(entries), found=len(header.tensors))
    for key, value in (("tp", tp), ("rank", rank), ("layer", layer.layer)):
        one.same(f"{name}: __metadata__", key, expected=str(value), found=header.metadata.get(key))
    part.check("slab files: data begins at a page, slabs at 16 bytes", "places").expect(
        header.data_start % PAGE == 0, name, "start of data", expected=f"a multiple of {PAGE}", found=header.data_start
    )

    blocks = _blocks(ids, sorted(ids_of(ids)), shared_h)
    position = {entry.name: n for n, entry in enumerate(header.tensors.values())}
    in_order = part.check("slab files: tensors in slab order, each slab one range", "tensors")
    at, placed = header.data_start, {}
    count = 0
    for label, wanted, is_ordered in blocks:
        found = [entries[want] for want in wanted if want in entries]
        start, end = at, at + sum(entry.nbytes for entry in found)
        for n, entry in enumerate(found):
            here = position[entry.name]
            good = here == count + n if is_ordered else count <= here < count + len(found)
            expected = f"tensor {count + n} of the file ({label})" if is_ordered else f"one of {count}..{count + len(found) - 1} ({label})"
            in_order.expect(good, f"{name}: {entry.name}", "place", expected=expected, found=here)
        part.check("slab files: data begins at a page, slabs at 16 bytes", "places").expect(
            label == "markers" or start % SLAB_ALIGNMENT == 0, f"{name}: {label}", "offset", expected="a multiple of 16", found=start
        )
        placed[label] = start
        at, count = end, count + len(found)
    return _describe(name, placed, ids, layer, geometry, tp, shared_h)


def ids_of(ids: Mapping[str, Sequence[Sequence[int]]]) -> set[int]:
    """Every expert there is."""
    return {expert for table in ids.values() for found in table for expert in found}


def _blocks(ids: Mapping[str, Sequence[Sequence[int]]], experts: Sequence[int], shared_h: bool) -> list[tuple[str, list[Want], bool]]:
    """(label, tensors, whether their order is fixed) of each range of a rank's file, in file order."""
    gate, up, down = PROJECTIONS
    blocks: list[tuple[str, list[Want], bool]] = []
    for t, (gates, ups) in enumerate(zip(ids[gate], ids[up], strict=True)):
        planes: list[Want] = [*((e, gate, "trellis") for e in gates), *((e, up, "trellis") for e in ups)]
        blocks.append((f"w13[{t}]", planes, True))
    for t, downs in enumerate(ids[down]):
        blocks.append((f"w2[{t}]", [(e, down, "trellis") for e in downs], True))
    rows: list[Want] = [want for e in experts for want in ((e, gate, "svh"), (e, up, "svh"), (e, down, "suh"))]
    blocks.append(("rotations", rows, True))
    for proj in PROJECTIONS:
        owners: list[int | None] = [None] if shared_h else list(experts)
        blocks.append((f"{proj[:-5]}_{HIDDEN_FIELD[proj]}", [(e, proj, HIDDEN_FIELD[proj]) for e in owners], True))
    blocks.append(("markers", [(e, proj, "mcg") for e in experts for proj in PROJECTIONS], False))
    return blocks


def _describe(
    name: str,
    placed: Mapping[str, int],
    ids: Mapping[str, Sequence[Sequence[int]]],
    layer: LayerExperts,
    geometry: Geometry,
    tp: int,
    shared_h: bool,
) -> Json:
    inner, hidden = geometry.intermediate // tp, geometry.hidden
    gate, up, down = PROJECTIONS
    rows = 1 if shared_h else geometry.experts
    tiers = sorted({k for _, row in layer.k_rows() for k in row})

    def table(label: str, *shape: int) -> Json:
        return {"offset": placed[label], "shape": list(shape)}

    return {
        "file": name,
        "w13": [table(f"w13[{t}]", len(ids[gate][t]) + len(ids[up][t]), hidden // 16, inner // 16, 16 * k) for t, k in enumerate(tiers)],
        "w2": [table(f"w2[{t}]", len(ids[down][t]), inner // 16, hidden // 16, 16 * k) for t, k in enumerate(tiers)],
        "rotations": table("rotations", geometry.experts, 3 * inner),
        **{label: table(label, rows, hidden) for label in ("gate_suh", "up_suh", "down_svh")},
    }


def check_sidecar_head(sidecar: Json, layers: Sequence[int], part: Part, *, geometry: Geometry, tp: int, rotation_layout: str) -> None:
    """The sizes slabs.json begins with, and an entry for each layer, no more."""
    check = part.check("slabs.json: sizes and layers", "values")
    due = {
        "format": FORMAT,
        "hidden": geometry.hidden,
        "intermediate": geometry.intermediate,
        "experts": geometry.experts,
        "tp": tp,
        "rotation_layout": rotation_layout,
    }
    head = {key: value for key, value in sidecar.items() if key != "layers"} if isinstance(sidecar, dict) else sidecar
    check.same_json("slabs.json", expected=due, found=head)
    found = sidecar.get("layers") if isinstance(sidecar, dict) else None
    names = sorted(found) if isinstance(found, dict) else found
    check.same("slabs.json", "layers", expected=sorted(map(str, layers)), found=names)


def check_pointer(block: Mapping[str, Json], layers: Sequence[int], part: Part, *, tp: int) -> None:
    """`r7convert_slabs` of the embedded block: how a slab reader finds the sidecar."""
    due = {"schema": FORMAT, "file": "slabs.json", "moe_layers": list(layers), "tp": tp}
    check = part.check("r7convert_slabs points to slabs.json", "values")
    check.same_json("quantization_config: r7convert_slabs", expected=due, found=block.get("r7convert_slabs"))
