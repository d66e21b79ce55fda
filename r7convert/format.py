"""FORMAT.md as code: names, shapes, dtypes, markers and the JSON blocks that describe routed experts. No torch, no disk.

Glossary, used everywhere with these meanings:

    trellis   the quantized payload of a matrix: int16 [in/16, out/16, 16*K]
    tile      16x16 weights, 256 symbols of K bits, 16*K words of the trellis
    K         bits a weight of one matrix (its rate), always trellis.shape[2] / 16
    suh, svh  float16 [in] and [out]: scale and sign before the input, after the output Hadamard
    mcg       int32 scalar, the codebook marker 0xCBAC1FED (`mul1` is another codebook)
    geometry  H hidden size, I moe intermediate size, E routed experts of a layer
    tp, rank  tensor-parallel size; rank r owns intermediate channels [r*I/tp, (r+1)*I/tp)
    tier      one of the distinct K of a layer, ascending; tier index t
    slab      the planes of one tier of a layer and rank, one contiguous range of a file
    tail      `hybrid_tr3_tail` of config.json: what a stock reader knows of rank-sliced experts
    carried   a tensor that passes through unchanged
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from r7convert.errors import FormatError, UnsupportedError, complain
from r7convert.families import CANONICAL, GATE_UP_DOWN, SPELLINGS

Json = Any

PROJECTIONS = GATE_UP_DOWN
FIELDS = ("trellis", "suh", "svh", "mcg")
TILE = 16
HADAMARD = 128
MCG_MULTIPLIER = 0xCBAC1FED
MCG_MARKER = MCG_MULTIPLIER - (1 << 32)
MUL1_MULTIPLIER = 0x83DCD12D
MUL1_MARKER = MUL1_MULTIPLIER - (1 << 32)

R7_SCHEMA = "r7-complete-v2-checkpoint-v1"
R7_K_VALUES = frozenset({3, 4, 5})
TAIL_FORMAT = "exl3-trellis"
TAIL_K_VALUES = frozenset({3, 4, 5, 6})
TENSOR_SCHEMA = "model.layers.{L}.mlp.experts.{E}.{proj}.rank{r}.{trellis|suh|svh|mcg}"
SHARED_H_SCHEMA = "model.layers.{L}.mlp.experts.shared_h.{proj}.rank{r}.{suh|svh}"
SHARED_H_V1 = "shared_h_v1"
PER_EXPERT_V1 = "per_expert_v1"
STOCK_READERS = ("r14", "r28")
"""The stock releases whose rules differ: r28 takes shared_h_v1."""
SLICED = ("rank-sliced", "slabs")
"""The targets with a file a layer and rank, in slab order."""

# Far above every model there is, and low enough that a size which is no model's costs neither time nor memory.
MAX_SIZE = 1 << 20
MAX_COUNT = 4096

# Bits of one element, by the safetensors dtype names.
DTYPE_BITS: Mapping[str, int] = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a safetensors file: `offset` is absolute in the file, `nbytes` its length there."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    nbytes: int


def tensor_nbytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a contiguous tensor; sub-byte dtypes must fill whole bytes."""
    bits = DTYPE_BITS[dtype] * math.prod(shape)
    if bits % 8:
        raise FormatError(complain(dtype, "a tensor must fill whole bytes", expected="a multiple of 8 bits", found=f"{bits} bits"))
    return bits // 8


# ---- names ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ExpertName:
    """A tensor of one routed expert: `{root}.{layer}.mlp.experts.{expert}.{proj}[.rank{rank}].{field}`.

    `proj` is gate_proj, up_proj or down_proj whatever the family's words are; `spelling` is a key of families.SPELLINGS.
    """

    root: str
    layer: int
    expert: int
    proj: str
    field: str
    rank: int | None = None
    spelling: str = CANONICAL

    @property
    def base(self) -> str:
        """What the names of all experts of the layer begin with."""
        return f"{self.root}.{self.layer}.{self.spelling}.experts"

    @property
    def module(self) -> str:
        return f"{self.base}.{self.expert}.{SPELLINGS[self.spelling].routed[PROJECTIONS.index(self.proj)]}"


@dataclass(frozen=True, slots=True)
class SharedVectorName:
    """A hidden-side vector one layer's experts share.

    `kind` "r7": `...experts.r7_shared.{gate_up_suh|down_svh}`, field being that last word.
    `kind` "shared_h": `...experts.shared_h.{proj}.rank{rank}.{suh|svh}`.
    """

    root: str
    layer: int
    kind: Literal["r7", "shared_h"]
    field: str
    proj: str | None = None
    rank: int | None = None

    @property
    def base(self) -> str:
        return f"{self.root}.{self.layer}.{CANONICAL}.experts"


@dataclass(frozen=True, slots=True)
class SharedExpertName:
    """A tensor of the shared expert: `{root}.{layer}.mlp.{shared_experts|shared_expert}.{proj}.{field}`, `proj` as for ExpertName."""

    root: str
    layer: int
    module: str
    proj: str
    field: str
    spelling: str = CANONICAL


_ROOT = rf"(?P<root>[A-Za-z0-9_.]*\blayers|mtp)\.(?P<layer>0|[1-9]\d{{0,5}})\.(?P<block>{'|'.join(SPELLINGS)})\."
_WORDS = "|".join(dict.fromkeys(word for row in SPELLINGS.values() for word in (*row.routed, *row.shared)))
_PROJ = rf"(?P<proj>{_WORDS})"
_RANK = r"\.rank(?P<rank>0|[1-9]\d{0,3})"
_EXPERT = re.compile(_ROOT + rf"experts\.(?P<expert>0|[1-9]\d{{0,5}})\.{_PROJ}(?:{_RANK})?\.(?P<field>trellis|suh|svh|mcg|mul1|su|sv)")
_R7_SHARED = re.compile(_ROOT + r"experts\.r7_shared\.(?P<field>gate_up_suh|down_svh)")
_SHARED_H = re.compile(_ROOT + rf"experts\.shared_h\.{_PROJ}{_RANK}\.(?P<field>suh|svh)")
_SHARED_EXPERT = re.compile(
    _ROOT + rf"(?P<module>shared_\w+)\.(?P<proj>{_WORDS}|gate_up_proj)\.(?P<field>weight|trellis|suh|svh|mcg|mul1|su|sv|bias)"
)
_AMONG_EXPERTS = re.compile(rf"\.(?:{'|'.join(SPELLINGS)})\.experts\.")
RANK_SUFFIX = re.compile(r"\.rank([0-9]{1,9})\.[^.]+$")
LAYER = re.compile(r"(?:^|\.)layers\.([0-9]{1,9})\.")
_MTP = re.compile(r"(?:model\.|language_model\.)*mtp\.(?:layers\.)?(?:([0-9]{1,9})\.)?")

ParsedName = ExpertName | SharedVectorName | SharedExpertName


def parse_name(name: str) -> ParsedName | None:
    """What a tensor name says, or None for a tensor that is no part of an expert."""
    if "expert" not in name and ".shared_mlp." not in name:
        return None
    if m := _EXPERT.fullmatch(name):
        words = SPELLINGS[m["block"]].routed
        if m["proj"] not in words:
            return None
        proj = PROJECTIONS[words.index(m["proj"])]
        rank = None if m["rank"] is None else int(m["rank"])
        return ExpertName(m["root"], int(m["layer"]), int(m["expert"]), proj, m["field"], rank, m["block"])
    if m := _SHARED_EXPERT.fullmatch(name):
        row = SPELLINGS[m["block"]]
        if m["module"] not in row.modules or m["proj"] not in (*row.shared, "gate_up_proj"):
            return None
        proj = PROJECTIONS[row.shared.index(m["proj"])] if m["proj"] in row.shared else m["proj"]
        return SharedExpertName(m["root"], int(m["layer"]), m["module"], proj, m["field"], m["block"])
    m = _R7_SHARED.fullmatch(name) or _SHARED_H.fullmatch(name)
    if m is None or m["block"] != CANONICAL:
        return None
    if m.re is _R7_SHARED:
        return SharedVectorName(m["root"], int(m["layer"]), "r7", m["field"])
    if m["proj"] not in PROJECTIONS:
        return None
    return SharedVectorName(m["root"], int(m["layer"]), "shared_h", m["field"], m["proj"], int(m["rank"]))


def is_expert_name(name: str) -> bool:
    """Whether a tensor stands among routed experts, in any form and family: BF16 weights and unknown names too."""
    return _AMONG_EXPERTS.search(name) is not None


def layer_of(name: str) -> int | None:
    """The decoder layer a tensor belongs to, or None (embeddings, head, final norm)."""
    m = LAYER.search(name)
    return int(m[1]) if m else None


def mtp_layer(name: str, layers: int) -> int | None:
    """The MTP layer a tensor belongs to, or None: layers from `layers` (num_hidden_layers) on, and everything under `mtp.`, whose
    own numbers count from there.
    """
    if m := _MTP.match(name):
        return layers + int(m[1] or 0)
    layer = layer_of(name)
    return layer if layer is not None and layer >= layers else None


def expert_module(root: str, layer: int, expert: int, proj: str) -> str:
    return f"{root}.{layer}.mlp.experts.{expert}.{proj}"


def rank_name(root: str, layer: int, expert: int, proj: str, rank: int, field: str) -> str:
    return f"{root}.{layer}.mlp.experts.{expert}.{proj}.rank{rank}.{field}"


def shared_h_name(root: str, layer: int, proj: str, rank: int) -> str:
    """The rank copy of a layer's hidden-side vector: suh of gate and up, svh of down."""
    return f"{root}.{layer}.mlp.experts.shared_h.{proj}.rank{rank}.{'svh' if proj == 'down_proj' else 'suh'}"


# ---- geometry -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Geometry:
    """The sizes that config.json states. `moe_layers` are those of layers 0..layers-1 that it says have routed experts."""

    hidden: int
    intermediate: int
    experts: int
    shared_experts: int
    layers: int
    moe_layers: tuple[int, ...]
    mtp_layers: int
    nested: bool
    """True where the sizes stand under `text_config` (vision wrappers)."""

    @property
    def first_moe(self) -> int:
        return self.moe_layers[0] if self.moe_layers else self.layers


def is_int(value: object) -> bool:
    """A real JSON integer: bool and float are refused, for readers truncate them in silence."""
    return isinstance(value, int) and not isinstance(value, bool)


def legal_tps(intermediate: int) -> list[int]:
    """Every tp whose ranks own whole Hadamard blocks: I % tp == 0 and (I / tp) % 128 == 0."""
    blocks = intermediate // HADAMARD
    return [tp for tp in range(1, blocks + 1) if blocks % tp == 0]


def check_tp(tp: int, intermediate: int) -> None:
    """Raises:  UnsupportedError with the legal list."""
    if tp not in legal_tps(intermediate):
        raise UnsupportedError(
            complain(
                "--tp",
                f"{intermediate} channels must fall into ranks of whole {HADAMARD}-blocks",
                expected=f"one of {legal_tps(intermediate)}",
                found=tp,
            )
        )


def expected_shape(geometry: Geometry, proj: str, field: str, bits: int, tp: int = 1) -> tuple[int, ...]:
    """Shape of one expert tensor on one rank (tp=1: the whole matrix); FORMAT.md sections 2 and 4."""
    hidden, inner = geometry.hidden, geometry.intermediate // tp
    rows, cols = (inner, hidden) if proj == "down_proj" else (hidden, inner)
    return {"trellis": (rows // TILE, cols // TILE, TILE * bits), "suh": (rows,), "svh": (cols,), "mcg": (), "mul1": ()}[field]


FIELD_DTYPE: Mapping[str, str] = {"trellis": "I16", "suh": "F16", "svh": "F16", "mcg": "I32", "mul1": "I32"}


# ---- JSON blocks ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class R7Block:
    """`quantization_config.r7_routed_experts`: the R7 layers, first and last inclusive, and the K they may use."""

    moe_layers: tuple[int, int]
    k_values: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tail:
    """`hybrid_tr3_tail`: rank-sliced experts, layers first to last inclusive. `bits` is None where the tier map says K."""

    moe_layers: tuple[int, int]
    tp: int
    experts: int
    bits: int | None
    k_values: tuple[int, ...]
    map_file: str | None
    map_field: str | None
    rotation_layout: str


def _layer_range(value: Json, where: str) -> tuple[int, int]:
    if not (
        isinstance(value, list) and len(value) == 2 and all(is_int(v) and 0 <= v <= 2 * MAX_COUNT for v in value) and value[0] <= value[1]
    ):
        raise FormatError(complain(where, "moe_layers", expected="[first, last], two ascending integers", found=repr(value)))
    return value[0], value[1]


def _k_list(value: Json, allowed: frozenset[int], where: str) -> tuple[int, ...]:
    if not (isinstance(value, list) and value and all(is_int(v) and v in allowed for v in value) and len(set(value)) == len(value)):
        raise FormatError(
            complain(where, "k_values", expected=f"a non-empty list out of {sorted(allowed)}, real integers", found=repr(value))
        )
    return tuple(sorted(value))


def parse_r7_block(block: Json, where: str = "config.json: quantization_config.r7_routed_experts") -> R7Block:
    """Strict where FORMAT.md section 2 names a key; informational and unknown keys are not looked at.

    Raises:  UnsupportedError for another schema, codebook or an `sqg` marker; FormatError for a malformed key.
    """
    if not isinstance(block, Mapping):
        raise FormatError(complain(where, "block", expected="an object", found=type(block).__name__))
    if block.get("schema") != R7_SCHEMA:
        raise UnsupportedError(
            complain(where, "schema", expected=R7_SCHEMA, found=repr(block.get("schema")), do="This schema is another codec.")
        )
    if marked := sorted(key for key in block if "sqg" in key.lower()):
        raise UnsupportedError(complain(where, "sqg marker", expected="none", found=marked, do="SQG payloads are another codec."))
    if block.get("codebook") != "mcg":
        raise UnsupportedError(complain(where, "codebook", expected="mcg", found=repr(block.get("codebook"))))
    if block.get("bits") != "mixed_tensor":
        raise FormatError(complain(where, "bits", expected="mixed_tensor", found=repr(block.get("bits"))))
    return R7Block(_layer_range(block.get("moe_layers"), where), _k_list(block.get("k_values"), R7_K_VALUES, where))


def parse_tail(tail: Json, where: str = "config.json: hybrid_tr3_tail") -> Tail:
    """The rank-sliced description of FORMAT.md section 4, refused wherever a stock reader would fail or misread in silence.

    Raises:  FormatError naming the key.
    """
    if not isinstance(tail, Mapping):
        raise FormatError(complain(where, "block", expected="an object", found=type(tail).__name__))
    for key, expected in (("format", TAIL_FORMAT), ("codebook", "mcg"), ("tensor_schema", TENSOR_SCHEMA)):
        if tail.get(key) != expected:
            raise FormatError(complain(where, key, expected=expected, found=repr(tail.get(key))))
    for key, most in (("tp", MAX_SIZE // HADAMARD), ("experts_per_layer", MAX_COUNT)):
        if not is_int(tail.get(key)) or not 1 <= tail[key] <= most:
            raise FormatError(complain(where, key, expected="a positive integer", found=repr(tail.get(key))))
    layout = tail.get("rotation_layout", PER_EXPERT_V1)
    if layout not in (PER_EXPERT_V1, SHARED_H_V1):
        raise FormatError(complain(where, "rotation_layout", expected=f"{PER_EXPERT_V1} or {SHARED_H_V1}", found=repr(layout)))
    if layout == SHARED_H_V1 and tail.get("shared_h_tensor_schema") != SHARED_H_SCHEMA:
        raise FormatError(
            complain(where, "shared_h_tensor_schema", expected=SHARED_H_SCHEMA, found=repr(tail.get("shared_h_tensor_schema")))
        )
    bits, map_file, map_field = tail.get("bits"), None, None
    if bits == "mixed":
        k_values = _k_list(tail.get("k_values"), TAIL_K_VALUES, where)
        pointer = tail.get("bits_per_expert")
        if not isinstance(pointer, str) or ":" not in pointer:
            raise FormatError(complain(where, "bits_per_expert", expected='"file.json:field"', found=repr(pointer)))
        map_file, map_field = pointer.rsplit(":", 1)
        bits = None
    elif isinstance(bits, (int, float)) and not isinstance(bits, bool) and bits in TAIL_K_VALUES:
        # Producers have written 3.0; readers truncate, so a whole float is sound and becomes the integer it means.
        bits = int(bits)
        k_values = (bits,)
    else:
        raise FormatError(complain(where, "bits", expected=f'"mixed" or an integer out of {sorted(TAIL_K_VALUES)}', found=repr(bits)))
    return Tail(
        _layer_range(tail.get("moe_layers"), where), tail["tp"], tail["experts_per_layer"], bits, k_values, map_file, map_field, layout
    )
