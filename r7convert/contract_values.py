"""The contract on payload values that no loader checks: markers, finite scales, replicated vectors equal over ranks."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np

from r7convert.evidence import HIDDEN_FIELD, R7_SHARED_FIELD, Evidence, LayerExperts, Payloads
from r7convert.findings import Part
from r7convert.format import MCG_MARKER, MUL1_MARKER, PROJECTIONS, TensorEntry

Json = Any
Marks = Mapping[str, Json]

MARKERS = {"mcg": MCG_MARKER, "mul1": MUL1_MARKER}
VECTOR_FIELDS = ("suh", "svh", "gate_up_suh", "down_svh")


def check_layer_values(evidence: Evidence, layer: LayerExperts, marks: Marks) -> Part:
    """Markers, vectors and replicas of one layer's experts. `marks` are tensors whose non-finite values the manifest owns up to."""
    part = Part("contract")
    with part.check("payloads can be read", "reads").collecting(), Payloads(evidence.folder) as payloads:
        entries = [*layer.own.values(), *layer.shared_h.values(), *layer.r7_shared.values()]
        _check_entries(payloads, entries, part, marks)
        equal = part.check("hidden-side vectors are equal on every rank", "vectors")
        for proj in PROJECTIONS if len(layer.ranks) > 1 else ():
            field = HIDDEN_FIELD[proj]
            owners = layer.experts if not layer.shared_h else layer.experts[:1]
            for expert in owners:
                copies = layer.pieces(expert, proj, field)
                for other in copies[1:]:
                    first = copies[0]
                    if other.nbytes != first.nbytes:
                        continue  # the shape check has named it
                    differs = np.flatnonzero(payloads.array(first).view("<u2") != payloads.array(other).view("<u2"))
                    place = f"{other.file}: {other.name}: channel {differs[0] if len(differs) else 0}"
                    equal.expect(not len(differs), place, "copy on this rank", expected=f"that of {first.name}", found="other bits")
    return part


def check_dense_values(evidence: Evidence, marks: Marks) -> Part:
    """Markers and vectors of EXL3 modules outside the routed experts."""
    part = Part("contract")
    trellised = {entry.name.rpartition(".")[0] for entry in evidence.carried if entry.name.endswith(".trellis")}
    with part.check("payloads can be read", "reads").collecting(), Payloads(evidence.folder) as payloads:
        _check_entries(payloads, [e for e in evidence.carried if e.name.rpartition(".")[0] in trellised], part, marks)
    return part


def check_shared_experts(evidence: Evidence, encoded: Collection[str]) -> Part:
    """Gate and up of a shared expert have one suh, so that a reader can fuse them; `encoded` are the modules r7convert encoded.

    Source:  FORMAT.md section 9.
    """
    part = Part("contract")
    check = part.check("shared experts: one suh for gate and up", "pairs")
    with check.collecting(0), Payloads(evidence.folder) as payloads:
        for entry in evidence.carried:
            up = evidence.tensors.get(entry.name.replace(".gate_proj.suh", ".up_proj.suh"))
            if up is None or up is entry or ".shared_expert" not in entry.name:
                continue
            same = up.nbytes == entry.nbytes and np.array_equal(payloads.array(entry), payloads.array(up))
            if entry.name.removesuffix(".suh") in encoded:
                check.expect(same, f"{up.file}: {up.name}", "copy", expected=f"that of {entry.name}", found="other values")
            elif not same:
                check.note(f"{up.name} is not that of gate_proj: a reader cannot fuse the two")
    return part


def _check_entries(payloads: Payloads, entries: Iterable[TensorEntry], part: Part, marks: Marks) -> None:
    markers = part.check("every marker holds its codebook's value", "markers")
    finite = part.check("every scale vector is finite", "vectors")
    for entry in entries:
        field = entry.name.rpartition(".")[2]
        where = f"{entry.file}: {entry.name}"
        if field in MARKERS and entry.dtype == "I32" and entry.nbytes == 4:
            value = int(payloads.array(entry).reshape(-1)[0])
            found = next((f"{name}, another codebook" for name, other in MARKERS.items() if value == other), value)
            markers.expect(value == MARKERS[field], where, "marker", expected=MARKERS[field], found=found)
        elif field in VECTOR_FIELDS and entry.dtype == "F16":
            values = payloads.array(entry)
            bad = np.flatnonzero(~np.isfinite(values))
            found = f"{values[bad[0]]} at index {bad[0]}, {len(bad)} in all" if len(bad) else ""
            if len(bad) and marked_names(entry.name) & marks.keys():
                finite.note(f"{where}: {found}: copied by request, as the manifest says")
            else:
                finite.expect(not len(bad), where, "value", expected="finite", found=found)
            if zeros := int(np.count_nonzero(values == 0)):
                finite.note(f"{where}: {zeros} exact zeros")


def marked_names(name: str) -> set[str]:
    """The names a mark may have for this vector: its own, or the source's, before ranks were cut or a shared one was spread."""
    whole = re.sub(r"\.rank\d+(?=\.)", "", name)
    m = re.fullmatch(r"(.*\.mlp\.experts)\.(?:\d+|shared_h)\.(\w+)\.(suh|svh)", whole)
    names = {name, whole}
    if m and HIDDEN_FIELD[m[2]] == m[3]:
        names.add(f"{m[1]}.r7_shared.{R7_SHARED_FIELD[m[2]]}")
    return names
