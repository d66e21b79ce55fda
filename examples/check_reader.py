"""Would a stock server of this release load the folder? Its own rules, from docs/format.md, on what headers and config.json say.

    python examples/check_reader.py FOLDER --reader r14|r28 --tp N

Loaders check little of this themselves: a wrong rank is dropped in silence, a missing key switches the mechanism off. `r7convert
verify` asks more, of payloads too; this is the part that an author of a loader can take along.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from r7convert.checkpoint import Checkpoint, read_checkpoint
from r7convert.errors import R7Error

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
HIDDEN = {"gate_proj": "suh", "up_proj": "suh", "down_proj": "svh"}  # vectors that shared_h_v1 keeps once a layer and rank
LAYOUTS = {"r14": ("per_expert_v1",), "r28": ("per_expert_v1", "shared_h_v1")}


def problems(cp: Checkpoint, folder: Path, reader: str, tp: int) -> Iterator[str]:
    """What this reader would refuse, misread or drop, in words."""
    if (method := (cp.quantization or {}).get("quant_method")) != "exl3":
        yield f"config.json: quant_method is {method!r}: the experts would be built unquantized"
    if cp.r7 is not None:
        yield "config.json: an r7_routed_experts block remains: an R7-aware loader would slice again"
    tail = cp.tail
    if tail is None:
        yield "config.json: no hybrid_tr3_tail: the experts would not be found"
        return
    if tail.tp != tp:
        yield f"config.json: the tail is for tp {tail.tp}: ranks of another tp are dropped in silence"
    if tail.rotation_layout not in LAYOUTS[reader]:
        yield f"config.json: rotation layout {tail.rotation_layout}: {reader} does not know it"
    if list(cp.experts) != list(range(tail.moe_layers[0], tail.moe_layers[1] + 1)):
        yield f"config.json: moe_layers {list(tail.moe_layers)}, but layers with experts are {list(cp.experts)}"
    said = json.loads((folder / tail.map_file).read_text()) if tail.map_file else {}
    for number, layer in cp.experts.items():
        where = f"layer {number}"
        mixed = [e for e, row in enumerate(layer.bits) if len(set(row)) > 1]
        if mixed:
            yield f"{where}: gate, up and down of experts {mixed} differ in K: their stacks have unequal shapes"
        if len(layer.tiers) > 2:
            yield f"{where}: K {list(layer.tiers)}: at most two in a layer"
        bits = said.get(str(number), {}).get(tail.map_field) or [tail.bits] * len(layer.bits)
        if not mixed and bits != [row[0] for row in layer.bits]:
            yield f"{where}: the tier map and the payload differ in K"
        shared = tail.rotation_layout == "shared_h_v1"
        present = {name.partition(".mlp.experts.")[2] for name in layer.tensors}
        for rank in range(tp):
            due = {f"{e}.{p}.rank{rank}.{f}" for e in range(tail.experts) for p in PROJECTIONS for f in ("trellis", "suh", "svh", "mcg")}
            if shared:
                due -= {f"{e}.{p}.rank{rank}.{HIDDEN[p]}" for e in range(tail.experts) for p in PROJECTIONS}
                due |= {f"shared_h.{p}.rank{rank}.{HIDDEN[p]}" for p in PROJECTIONS}
            if missing := sorted(due - present):
                yield f"{where}, rank {rank}: {len(missing)} tensors missing, the first {missing[0]}"
            present -= due
        if present:
            yield f"{where}: {len(present)} tensors that no rank asks for, the first {min(present)}"


def main() -> int:
    words = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    words.add_argument("folder", type=Path)
    words.add_argument("--reader", choices=LAYOUTS, default="r28")
    words.add_argument("--tp", type=int, required=True)
    asked = words.parse_args()
    try:
        checkpoint = read_checkpoint(asked.folder)
        found = list(problems(checkpoint, asked.folder, asked.reader, asked.tp))
    except R7Error as error:  # a header or a JSON block that nobody could read
        found = str(error).splitlines()
    if found:
        print(*found, f"{asked.reader} at tp {asked.tp} would not load {asked.folder.name}", sep="\n")
        return 1
    for number, layer in checkpoint.experts.items():
        tiers = Counter(row[0] for row in layer.bits)
        print(f"layer {number}:", ", ".join(f"{count} experts of K{k}" for k, count in sorted(tiers.items())))
    print(f"{asked.reader} at tp {asked.tp} would load {asked.folder.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
