"""What a judge reads of a checkpoint folder, on its own and with nothing assumed: headers, routed experts layer by layer, payloads.

It parses names as format.py spells them and headers as store.py checks them; everything else here is read off the page again,
so that a mistake of the writer's plan is not repeated by its judge.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from r7convert.errors import FormatError, InputError, complain
from r7convert.findings import Check
from r7convert.format import PROJECTIONS, ExpertName, SharedVectorName, TensorEntry, is_expert_name, is_int, layer_of, mtp_layer, parse_name
from r7convert.store import Header, read_header, read_json

Json = Any
Array = npt.NDArray[Any]
Key = tuple[int, str, int | None, str]
"""(expert, projection, rank or None for a whole matrix, field)."""

NO_MTP = 1 << 30
CHUNK_BYTES = 1 << 23
HIDDEN_FIELD = {"gate_proj": "suh", "up_proj": "suh", "down_proj": "svh"}
"""The vector of a projection that lies along H: no rank cuts it, a layer may share it."""
R7_SHARED_FIELD = {"gate_proj": "gate_up_suh", "up_proj": "gate_up_suh", "down_proj": "down_svh"}
NUMPY = {"I16": "<i2", "F16": "<f2", "I32": "<i4", "F32": "<f4"}


@dataclass(slots=True)
class LayerExperts:
    """The routed experts of one layer as the files have them. `bases` are what names of experts begin with; `unknown` are names under
    `.experts.` that say nothing; `ranks` and `experts` are the numbers that names of experts have, ascending, `ranks` [] for whole
    matrices.
    """

    layer: int
    roots: set[str] = field(default_factory=set)
    bases: set[str] = field(default_factory=set)
    own: dict[Key, TensorEntry] = field(default_factory=dict)
    shared_h: dict[tuple[str, int, str], TensorEntry] = field(default_factory=dict)
    r7_shared: dict[str, TensorEntry] = field(default_factory=dict)
    unknown: list[TensorEntry] = field(default_factory=list)

    ranks: list[int] = field(default_factory=list)
    experts: list[int] = field(default_factory=list)

    def pieces(self, expert: int, proj: str, field: str) -> list[TensorEntry]:
        """What there is of one field of one matrix: itself, or its ranks in order; a vector the layer shares stands in for its own."""
        own = [self.own.get((expert, proj, rank, field)) for rank in (None, *self.ranks)]
        shared = [self.shared_h.get((proj, rank, field)) for rank in self.ranks]
        if field == HIDDEN_FIELD[proj]:
            shared.append(self.r7_shared.get(R7_SHARED_FIELD[proj]))
        found = [entry for entry in own if entry is not None]
        return found or [entry for entry in shared if entry is not None]

    def bits(self, expert: int, proj: str) -> set[int]:
        """K of one matrix over its pieces; a misshapen trellis counts as K 0."""
        return {entry.shape[2] // 16 if len(entry.shape) == 3 else 0 for entry in self.pieces(expert, proj, "trellis")}

    def k_rows(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """(expert, (K of gate, up, down)); 0 where the ranks of a matrix do not agree on one."""
        for expert in self.experts:
            found = [self.bits(expert, proj) for proj in PROJECTIONS]
            yield expert, tuple(next(iter(ks)) if len(ks) == 1 else 0 for ks in found)

    @property
    def codebook(self) -> str:
        """What its markers say: mul1 as soon as one does, for then every other must."""
        return "mul1" if any(field == "mul1" for *_, field in self.own) else "mcg"

    def where(self, expert: int, proj: str) -> str:
        return f"layer {self.layer}: expert {expert}: {proj}"


class Evidence:
    """A folder's headers. `tensors` has the last of each name; `expert_tensors` the names among routed experts of each layer that has
    trellis experts, MTP layers counted from `layers` on; `carried` all others (experts in BF16 among them).
    """

    def __init__(self, folder: Path, headers: dict[str, Header], layers: int) -> None:
        self.folder = folder
        self.headers = headers
        self.layers = layers
        self.tensors: dict[str, TensorEntry] = {}
        self.expert_tensors: dict[int, list[TensorEntry]] = {}
        self.carried: list[TensorEntry] = []
        for header in headers.values():
            self.tensors.update(header.tensors)
        for entry in self.tensors.values():
            layer = layer_number(entry.name, layers) if is_expert_name(entry.name) else None
            if layer is None:
                self.carried.append(entry)
            else:
                self.expert_tensors.setdefault(layer, []).append(entry)
        for layer, entries in list(self.expert_tensors.items()):
            if not any(entry.name.endswith(".trellis") for entry in entries):
                self.carried += self.expert_tensors.pop(layer)

    def layer(self, layer: int) -> LayerExperts:
        """Parsed anew at each call: a layer's names are many, and few layers are at hand at a time."""
        made = LayerExperts(layer)
        for entry in self.expert_tensors.get(layer, ()):
            name = parse_name(entry.name)
            if isinstance(name, ExpertName):
                made.own[name.expert, name.proj, name.rank, name.field] = entry
            elif isinstance(name, SharedVectorName) and name.proj is not None and name.rank is not None:
                made.shared_h[name.proj, name.rank, name.field] = entry
            elif isinstance(name, SharedVectorName):
                made.r7_shared[name.field] = entry
            else:
                made.unknown.append(entry)
                continue
            made.roots.add(name.root)
            made.bases.add(name.base)
        made.ranks = sorted({rank for _, _, rank, _ in made.own if rank is not None})
        made.experts = sorted({expert for expert, _, _, _ in made.own})
        return made


def is_ours(producer: str) -> bool:
    """Whether a sidecar's `provenance.producer` names r7convert at some version."""
    return re.fullmatch(r"r7convert \d\S*", producer) is not None


def is_mtp(name: str, layers: int) -> bool:
    """Whether a tensor belongs to multi-token prediction: layers from `layers` on, or everything under `mtp.`."""
    return mtp_layer(name, layers) is not None


def layer_number(name: str, layers: int) -> int | None:
    """The layer a tensor belongs to; MTP layers count from `layers` on, whatever their names do."""
    mtp = mtp_layer(name, layers)
    return layer_of(name) if mtp is None else mtp


def gather(folder: Path, files: Iterable[str], check: Check) -> Evidence:
    """Read the header of each file named; what cannot be read is a failure of `check` and left out."""
    headers = {}
    for name in sorted(files):
        with check.collecting():
            headers[name] = read_header(folder / name)
    return Evidence(folder, headers, _count_layers(folder / "config.json"))


def _count_layers(path: Path) -> int:
    """num_hidden_layers; whatever is wrong with config.json is for the contract to say."""
    try:
        config = read_json(path)
    except InputError:
        return NO_MTP
    for place in (config.get("text_config"), config) if isinstance(config, dict) else ():
        if isinstance(place, dict) and is_int(place.get("num_hidden_layers")):
            return int(place["num_hidden_layers"])
    return NO_MTP


class Payloads:
    """Reads tensors of one folder by position; files stay open until the `with` block ends. One thread, one Payloads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, int] = {}

    def array(self, entry: TensorEntry) -> Array:
        """A tensor in its own dtype and shape (I16, F16, I32 or F32), any other as bytes."""
        raw = np.empty(entry.nbytes, np.uint8)
        self.fill(entry, 0, raw)
        return raw.view(NUMPY[entry.dtype]).reshape(entry.shape) if entry.dtype in NUMPY else raw

    def chunks(self, entry: TensorEntry) -> Iterator[tuple[int, Array]]:
        """(position in the tensor, bytes) in order, at most CHUNK_BYTES at a time."""
        for at in range(0, entry.nbytes, CHUNK_BYTES):
            raw = np.empty(min(CHUNK_BYTES, entry.nbytes - at), np.uint8)
            self.fill(entry, at, raw)
            yield at, raw

    def fill(self, entry: TensorEntry, at: int, raw: npt.NDArray[np.uint8]) -> None:
        view, offset = memoryview(raw.data), entry.offset + at
        while view:
            try:
                if entry.file not in self._open:
                    self._open[entry.file] = os.open(self.folder / entry.file, os.O_RDONLY)
                count = os.preadv(self._open[entry.file], [view], offset)
            except OSError as error:
                raise FormatError(complain(entry.file, f"cannot read {entry.name}", expected="its bytes", found=error.strerror)) from None
            if count == 0:
                raise FormatError(complain(entry.file, f"ends inside {entry.name}", do="Is something writing to it?"))
            view, offset = view[count:], offset + count

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()
