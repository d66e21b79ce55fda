"""Open the slabs of a written folder: memory-mapped torch tensors of every table a kernel takes, without a copy.

slab_layout.py says what the tables are. slabs.json says where they begin; everything else in it follows from the K of the
matrices, so the reader works it out again and refuses a sidecar that differs.
"""

from __future__ import annotations

import functools
import math
import mmap
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from r7convert.errors import FormatError, UsageError, complain
from r7convert.format import MAX_SIZE, PER_EXPERT_V1, PROJECTIONS, SHARED_H_V1, is_int, legal_tps
from r7convert.slab_layout import (
    RANK_TABLES,
    SIDECAR,
    SIDECAR_FORMAT,
    SIZES,
    Range,
    RankSlabs,
    SlabLayout,
    place_slabs,
    plan_slabs,
    sidecar_layer,
)
from r7convert.store import check_plain_name, read_json

if TYPE_CHECKING:
    from torch import Tensor

Json = Any


@dataclass(frozen=True)
class Slabs:
    """The tables of one layer and rank, mapped, not copied; shapes as in FORMAT.md section 5 less what is not stored.

    Shapes:  w13[t] int16 [gate_n[t] + up_n[t], H/16, I_r/16, 16K], up planes from gate_n[t] on; w2[t] int16 [down_n[t], I_r/16,
             H/16, 16K]; a count of 0 gives [0, ...]. rotations float16 [E, 3*I_r], columns gate svh, up svh, down suh.
             gate_suh, up_suh, down_svh float16 [1, H] or [E, H]. route_map int32 [E]; descriptors int32 [3*stride], or None
             where a tier holds more than 256 experts of one projection; places int32 [3, E, 2], tier and index, are there always.
    Note:    the mapping is private: writing to a tensor changes this process's copy of the page, never the file.
    """

    layer: int
    rank: int
    tp: int
    rotation_layout: str
    hidden: int
    inner: int
    experts: int
    tiers: tuple[int, ...]
    gate_n: tuple[int, ...]
    up_n: tuple[int, ...]
    down_n: tuple[int, ...]
    fc1_slots: tuple[int, ...]
    stride: int
    w13: tuple[Tensor, ...]
    w2: tuple[Tensor, ...]
    rotations: Tensor
    gate_suh: Tensor
    up_suh: Tensor
    down_svh: Tensor
    route_map: Tensor
    descriptors: Tensor | None
    places: Tensor


def open_slabs(folder: str | os.PathLike[str], layer: int, rank: int) -> Slabs:
    """Map one layer of one rank of a `slabs` or `rank-sliced` folder. The sidecar is parsed once a process.

    Raises:  UsageError for a layer or rank that is not there; FormatError for a sidecar that breaks its own arithmetic or points
             outside its file.
    Source:  FORMAT.md sections 5 and 6.
    """
    import torch

    where = Path(folder) / SIDECAR
    tp, rotation_layout, layers = read_sidecar(where)
    if layer not in layers:
        raise UsageError(complain(where, "layer", expected=f"one of {sorted(layers)}", found=layer))
    if not is_int(rank) or not 0 <= rank < tp:
        raise UsageError(complain(where, "rank", expected=f"0..{tp - 1}", found=rank))
    layout, ranks = layers[layer]
    placed = ranks[rank]
    path = where.parent / placed.file
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise FormatError(complain(path, "cannot be mapped", expected=f"the file of layer {layer}, rank {rank}", found=error)) from None

    def table(place: Range, dtype: torch.dtype) -> Tensor:
        if place.offset + place.nbytes > len(mapped):
            found = f"{place.offset + place.nbytes} bytes for a table of shape {list(place.shape)}"
            raise FormatError(complain(path, "size", expected=f"at least {found}", found=f"{len(mapped)} bytes", do="Run verify."))
        if not place.nbytes:
            return torch.empty(place.shape, dtype=dtype)
        return torch.frombuffer(mapped, dtype=dtype, count=math.prod(place.shape), offset=place.offset).view(place.shape)

    descriptors = layout.descriptors()
    return Slabs(
        layer=layer,
        rank=rank,
        tp=tp,
        rotation_layout=rotation_layout,
        hidden=layout.hidden,
        inner=layout.inner,
        experts=layout.experts,
        tiers=layout.tiers,
        gate_n=tuple(map(len, layout.gates)),
        up_n=tuple(map(len, layout.ups)),
        down_n=tuple(map(len, layout.downs)),
        fc1_slots=layout.fc1_slots,
        stride=layout.stride,
        w13=tuple(table(place, torch.int16) for place in placed.w13),
        w2=tuple(table(place, torch.int16) for place in placed.w2),
        rotations=table(placed.rotations, torch.float16),
        gate_suh=table(placed.gate_suh, torch.float16),
        up_suh=table(placed.up_suh, torch.float16),
        down_svh=table(placed.down_svh, torch.float16),
        route_map=torch.arange(layout.experts, dtype=torch.int32),
        descriptors=None if descriptors is None else torch.tensor(descriptors, dtype=torch.int32),
        places=torch.tensor(layout.places(), dtype=torch.int32),
    )


Layers = Mapping[int, tuple[SlabLayout, tuple[RankSlabs, ...]]]


def read_sidecar(path: Path) -> tuple[int, str, Layers]:
    """A checked slabs.json: tp, rotation layout, and the tables of every layer and rank.

    Raises:  FormatError.
    """
    try:
        status = path.stat()
    except OSError:
        raise FormatError(complain(path, "missing file", expected="a folder of target slabs or rank-sliced", found="none")) from None
    return _read_sidecar(path, status.st_mtime_ns, status.st_size, status.st_ino)


@functools.lru_cache(maxsize=4)
def _read_sidecar(path: Path, mtime_ns: int, size: int, inode: int) -> tuple[int, str, Layers]:
    value = read_json(path)
    keys = {"format", *SIZES, "rotation_layout", "layers"}
    if not isinstance(value, dict) or set(value) != keys or value["format"] != SIDECAR_FORMAT:
        raise FormatError(complain(path, "sidecar", expected=f"{SIDECAR_FORMAT} with {sorted(keys)}", found=repr(value)[:80]))
    sizes = [value[name] for name in SIZES]
    layers, rotation_layout = value["layers"], value["rotation_layout"]
    if not all(is_int(n) and 0 < n <= MAX_SIZE for n in sizes) or sizes[1] % 128 or sizes[3] not in legal_tps(sizes[1]):
        raise FormatError(complain(path, ", ".join(SIZES), expected="sizes that fit together", found=sizes))
    if rotation_layout not in (SHARED_H_V1, PER_EXPERT_V1) or not isinstance(layers, dict):
        raise FormatError(complain(path, "rotation_layout and layers", expected="a layout and an object", found=repr(rotation_layout)))
    made = {}
    for name, described in layers.items():
        if re.fullmatch(r"0|[1-9][0-9]{0,5}", name) is None:
            raise FormatError(complain(path, "layer", expected="a number", found=repr(name)[:80]))
        made[int(name)] = _parse_layer(described, sizes, rotation_layout, f"{path}: layer {name}")
    return sizes[3], rotation_layout, made


def _parse_layer(value: Json, sizes: Sequence[int], rotation_layout: str, where: str) -> tuple[SlabLayout, tuple[RankSlabs, ...]]:
    """Everything but `bits`, the file names and where the data begins follows from arithmetic; what differs from it is refused."""
    hidden, intermediate, experts, tp = sizes
    bits = value.get("bits") if isinstance(value, dict) else None
    if (
        not isinstance(bits, list)
        or len(bits) != experts
        or not all(isinstance(row, list) and len(row) == len(PROJECTIONS) and all(is_int(k) and 1 <= k <= 8 for k in row) for row in bits)
    ):
        raise FormatError(complain(where, "bits", expected=f"[{experts}][3] integers in 1..8", found=repr(bits)[:80]))
    layout = plan_slabs(bits, hidden=hidden, inner=intermediate // tp)
    ranks = value.get("ranks")
    if not isinstance(ranks, list) or len(ranks) != tp:
        raise FormatError(complain(where, "ranks", expected=f"{tp} entries", found=repr(ranks)[:80]))
    placed = []
    for rank, said in enumerate(ranks):
        try:
            file, start = check_plain_name(said["file"], where), said["w13"][0]["offset"]
        except (KeyError, IndexError, TypeError):
            raise FormatError(complain(f"{where}: rank {rank}", "tables", expected=list(RANK_TABLES), found=repr(said)[:80])) from None
        if not is_int(start) or start < 8 or start % 8:
            raise FormatError(complain(f"{where}: rank {rank}", "offset of w13[0]", expected="a multiple of 8", found=start))
        placed.append(place_slabs(layout, rotation_layout, file, start))
    expected = sidecar_layer(layout, placed)
    for key in sorted(expected.keys() | value.keys()):
        if value.get(key) != expected.get(key) or key not in value:
            raise FormatError(complain(f"{where}: {key}", "table", expected=repr(expected.get(key))[:80], found=repr(value.get(key))[:80]))
    return layout, tuple(placed)
