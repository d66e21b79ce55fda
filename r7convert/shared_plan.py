"""Which shared experts are encoded, which stay as they are and why, and what the JSON says of them afterwards. Pure.

A shared expert has three matrices and is encoded in two parts, as a server that does it online would (FORMAT.md section 9): gate
and up as one merged matrix, so that they share suh, then cut at column I; down alone. The signs of a part come from the CRC of
the name that readers give its module, `{base}.gate_up_proj` or `{base}.down_proj`, with {base} as the checkpoint spells it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from r7convert.checkpoint import Checkpoint
from r7convert.errors import FormatError, Offences, UsageError, complain
from r7convert.format import (
    FIELD_DTYPE,
    FIELDS,
    HADAMARD,
    TILE,
    SharedExpertName,
    TensorEntry,
    mtp_layer,
    parse_name,
    tensor_nbytes,
)

Json = Any

PARTS: Mapping[str, tuple[str, ...]] = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
SOURCE_DTYPES = ("BF16", "F16", "F32")


@dataclass(frozen=True, slots=True)
class SharedPart:
    """What is encoded as one matrix. `weights` are read, [out, in] each; `replaced` are the tensors of the folder that go."""

    name: str
    """The module's name as a reader has it, of which the seed is made."""
    modules: tuple[str, ...]
    """The modules it is stored under, one a weight."""
    weights: tuple[TensorEntry, ...]
    replaced: tuple[str, ...]

    @property
    def sides(self) -> tuple[int, int]:
        """(in, out) of the matrix, out being the sum over its weights."""
        return self.weights[0].shape[1], sum(weight.shape[0] for weight in self.weights)

    @property
    def tiles(self) -> int:
        rows, cols = self.sides
        return rows * cols // TILE**2

    def payload_bytes(self, bits: int) -> int:
        return sum(tensor_nbytes(dtype, shape) for w in self.weights for _, dtype, shape in stored_fields("", w.shape, bits))


@dataclass(frozen=True, slots=True)
class SharedLayer:
    """The parts of one layer to encode, and the file they go to."""

    layer: int
    file: str
    parts: tuple[SharedPart, ...]


@dataclass(frozen=True)
class SharedPlan:
    """`kept` says of each module that stays as it is why; `encoded` are those that have the K asked for already."""

    bits: int
    layers: tuple[SharedLayer, ...]
    kept: Mapping[str, str]
    encoded: tuple[str, ...]

    @property
    def parts(self) -> list[SharedPart]:
        return [part for layer in self.layers for part in layer.parts]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a layer: figures of each module that was encoded, and why each other one was kept."""

    figures: Mapping[str, Json]
    kept: Mapping[str, str]

    def to_json(self) -> Json:
        return {"figures": self.figures, "kept": self.kept}


def plan_shared(folder: Checkpoint, weights: Checkpoint, bits: int, layers: tuple[int, int] | None = None) -> SharedPlan:
    """What encoding `folder`'s shared experts at K = bits means, their weights being read from `weights` (`folder` itself, or the
    checkpoint it was made from). `layers` is first and last, inclusive.

    Raises:  FormatError for shapes that contradict each other, UsageError where there are no shared experts to look at.
    Source:  FORMAT.md sections 4 and 9.
    """
    found = _modules(folder)
    here = {layer for layer, _ in found if layers is None or layers[0] <= layer <= layers[1]}
    if not here:
        have = sorted({layer for layer, _ in found}) or "none"
        raise UsageError(complain(folder.where, "layers with shared experts", expected=layers or "any", found=have))
    bad, kept, encoded = Offences(), dict[str, str](), list[str]()
    planned: dict[int, list[SharedPart]] = {}
    for layer, base in found:
        if layer not in here:
            continue
        _check_shapes(base, weights, folder.geometry.hidden, bad)
        for part, projections in PARTS.items():
            modules = tuple(f"{base}.{proj}" for proj in projections)
            ks = {_bits_of(folder, module) for module in modules}
            if ks == {bits}:
                encoded += modules
            elif reason := _why_not(folder, weights, layer, modules, ks):
                kept |= dict.fromkeys(modules, reason)
            else:
                entries = tuple(weights.tensors[f"{module}.weight"] for module in modules)
                planned.setdefault(layer, []).append(SharedPart(f"{base}.{part}", modules, entries, tuple(_owned(folder, modules))))
    bad.check(FormatError)
    made = tuple(SharedLayer(layer, _new_file(folder, layer), tuple(planned[layer])) for layer in sorted(planned))
    return SharedPlan(bits, made, kept, tuple(encoded))


def _new_file(folder: Checkpoint, layer: int) -> str:
    """A name that no shard has: one that an earlier run wrote may hold parts that stay."""
    stem, turn = f"shared-experts-layer-{layer:03d}", 1
    name = f"{stem}.safetensors"
    while name in folder.sizes:
        turn += 1
        name = f"{stem}-{turn}.safetensors"
    return name


def _modules(folder: Checkpoint) -> list[tuple[int, str]]:
    """(layer, base) of every shared expert, MTP layers numbered from num_hidden_layers on."""
    found = set()
    for name in folder.tensors:
        parsed = parse_name(name)
        if isinstance(parsed, SharedExpertName):
            layer = mtp_layer(name, folder.geometry.layers)
            found.add((parsed.layer if layer is None else layer, name.rsplit(".", 2)[0]))
    return sorted(found)


def _bits_of(folder: Checkpoint, module: str) -> int | None:
    trellis = folder.tensors.get(f"{module}.trellis")
    return trellis.shape[2] // TILE if trellis is not None and len(trellis.shape) == 3 else None


def _owned(folder: Checkpoint, modules: Sequence[str]) -> Iterator[str]:
    for module in modules:
        yield from (name for field in ("weight", *FIELDS) if (name := f"{module}.{field}") in folder.tensors)


def _why_not(folder: Checkpoint, weights: Checkpoint, layer: int, modules: Sequence[str], ks: set[int | None]) -> str | None:
    """Why the part stays as it is, or None."""
    if not _readers_take(folder, layer):
        return f"layer {layer} is outside moe_layers, where stock readers refuse dense EXL3"
    if weights is folder and ks != {None}:
        return f"is EXL3 at K {sorted(k for k in ks if k)} already: name the BF16 weights with --source to encode it again"
    for module in modules:
        entry = weights.tensors.get(f"{module}.weight")
        if entry is None:
            return f"no {module}.weight in {'the source' if weights is not folder else 'the folder'}"
        if entry.dtype not in SOURCE_DTYPES:
            return f"weight is {entry.dtype}, which is not one of {', '.join(SOURCE_DTYPES)}"
        if f"{module}.bias" in weights.tensors:
            return "has a bias, which the encoded form has no place for"
        if any(side % HADAMARD for side in entry.shape):
            return f"a side of {list(entry.shape)} is no multiple of {HADAMARD}"
    return None


def _readers_take(folder: Checkpoint, layer: int) -> bool:
    """Stock readers take dense EXL3 in the layers of the tail alone, R7-aware ones in the layers of either block."""
    blocks = [block for block in (folder.tail, folder.r7) if block is not None]
    return not blocks or any(block.moe_layers[0] <= layer <= block.moe_layers[1] for block in blocks)


def _check_shapes(base: str, weights: Checkpoint, hidden: int, bad: Offences) -> None:
    """Gate and up [I, H], down [H, I]; what is absent is said elsewhere."""
    gate, up, down = (weights.tensors.get(f"{base}.{proj}.weight") for proj in ("gate_proj", "up_proj", "down_proj"))
    known = [entry.shape[nth] for entry, nth in ((gate, 0), (up, 0), (down, 1)) if entry is not None and len(entry.shape) == 2]
    inner = known[0] if known else 0
    for entry, shape in ((gate, (inner, hidden)), (up, (inner, hidden)), (down, (hidden, inner))):
        if entry is not None and entry.shape != shape:
            bad.add(f"{entry.file}: {entry.name}", "shape", expected=list(shape), found=list(entry.shape))


# ---- what is stored -------------------------------------------------------------------------------------------------


def stored_fields(module: str, weight_shape: Sequence[int], bits: int) -> list[tuple[str, str, tuple[int, ...]]]:
    """(name, dtype, shape) of what stands for a weight [out, in]: split, unsliced, marked."""
    out, rows = weight_shape
    shapes: dict[str, tuple[int, ...]] = {
        "trellis": (rows // TILE, out // TILE, TILE * bits),
        "suh": (rows,),
        "svh": (out,),
        "mcg": (),
    }
    return [(f"{module}.{field}", FIELD_DTYPE[field], shapes[field]) for field in FIELDS]
