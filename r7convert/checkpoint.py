"""A checkpoint as one frozen object: config, index, every header, and what they say together. No payload byte is read.

`read_checkpoint(folder)` is the everyday door. The checks stand in `build_checkpoint`, which sees files only through a `Source`,
so that a repo on the Hub, read by range requests, passes exactly the same ones.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from r7convert.errors import SHOWN_OFFENDERS, FormatError, Offences, complain
from r7convert.experts import ExpertLayer
from r7convert.format import (
    Geometry,
    R7Block,
    SharedExpertName,
    Tail,
    TensorEntry,
    is_expert_name,
    layer_of,
    mtp_layer,
    parse_name,
    parse_r7_block,
    parse_tail,
)
from r7convert.geometry import parse_geometry
from r7convert.kinds import Kind, Signs, check_layers, check_modules, check_signs, check_storage, read_signs
from r7convert.sidecars import check_bit_map, check_tail_map
from r7convert.signs import LayerNames, build_layer
from r7convert.source import Folder, Source, collect, compare_payloads
from r7convert.store import Header, check_plain_name, find_twins

Json = Any

INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
QUANT_CONFIG = "quantization_config.json"
HF_QUANT_CONFIG = "hf_quant_config.json"
SHARD = ".safetensors"


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """The shared expert of a layer: `form` "weight" (dtype in `dtype`) or "exl3" (K in `bits`); `module` as the names spell it."""

    layer: int
    module: str
    form: str
    dtype: str | None
    bits: tuple[int, ...]
    tensors: tuple[TensorEntry, ...]


@dataclass(frozen=True, slots=True)
class Mtp:
    """The multi-token-prediction layers: how many config.json declares, from layer `first` on, and the tensors there are."""

    first: int
    declared: int
    layers: tuple[int, ...]
    names: frozenset[str]

    @property
    def problem(self) -> str | None:
        """Why declaration and tensors do not agree, or None. A plan refuses it unless it drops the layers."""
        if self.layers == tuple(range(self.first, self.first + self.declared)):
            return None
        expected = f"tensors of {self.declared} MTP layers" if self.declared else "no MTP tensors, since num_nextn_predict_layers is 0"
        found = f"{len(self.names)} tensors" + (f" of layers {list(self.layers)}" if self.layers else "") if self.names else "none"
        return complain(
            CONFIG, "MTP layers", expected=expected, found=found, do="Correct the number, or use --drop-mtp to leave these layers out."
        )


@dataclass(frozen=True)
class Checkpoint:
    """What headers and JSON say. `experts` has a layer for each one with EXL3 routed experts; `foreign` are shards that the index
    does not name; `left_out` are files that are no part of a checkpoint.
    """

    source: Source
    kind: Kind
    sizes: Mapping[str, int]
    config: Mapping[str, Json]
    quantization: Mapping[str, Json] | None
    quantization_file: Mapping[str, Json] | None
    hf_quant_config: Mapping[str, Json] | None
    geometry: Geometry
    weight_map: Mapping[str, str]
    index_metadata: Mapping[str, Json]
    headers: Mapping[str, Header]
    tensors: Mapping[str, TensorEntry]
    root: str
    r7: R7Block | None
    tail: Tail | None
    experts: Mapping[int, ExpertLayer]
    shared_experts: Mapping[int, SharedExpert]
    dense_exl3: Mapping[str, int]
    """Modules outside the routed experts that hold a trellis, shared experts among them, and their K."""
    storage: Mapping[str, Mapping[str, Json]]
    """The records of tensor_storage that hold, of all places."""
    mtp: Mtp
    foreign: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    warnings: tuple[str, ...] = field(default=())

    @property
    def where(self) -> str:
        return self.source.where

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return tuple(self.experts)

    @property
    def payload_bytes(self) -> int:
        return sum(entry.nbytes for entry in self.tensors.values())

    @property
    def headers_sha256(self) -> str:
        """A digest over names, dtypes, shapes and places of every tensor, in every file."""
        digest = hashlib.sha256()
        for file in sorted(self.headers):
            header = self.headers[file]
            digest.update(f"{file} {header.size} {header.data_start}\n".encode())
            for entry in header.tensors.values():
                digest.update(f"{entry.name} {entry.dtype} {entry.shape} {entry.offset}\n".encode())
        return digest.hexdigest()


def read_checkpoint(folder: Path) -> Checkpoint:
    """A folder's checkpoint, every header checked and all offenders named at once.

    Raises:  FormatError, UnsupportedError.
    """
    return build_checkpoint(Folder(Path(folder)))


def build_checkpoint(source: Source) -> Checkpoint:
    """Read and check a checkpoint wherever it is.

    Raises:  FormatError (what breaks the format), UnsupportedError (another codec or geometry); one error, all offenders.
    Source:  FORMAT.md section 2.
    """
    sizes = source.sizes()
    config = _object(source, CONFIG)
    geometry = parse_geometry(config)
    file_block = _object(source, QUANT_CONFIG) if QUANT_CONFIG in sizes else None
    block = embedded_quantization(config) or file_block
    r7 = _r7_block(config, file_block)
    tail = parse_tail(config["hybrid_tr3_tail"]) if config.get("hybrid_tr3_tail") is not None else None
    if tail is not None and tail.experts != geometry.experts:
        raise FormatError(complain(f"{CONFIG}: hybrid_tr3_tail", "experts_per_layer", expected=geometry.experts, found=tail.experts))
    places = {f"{CONFIG}: quantization_config": embedded_quantization(config), QUANT_CONFIG: file_block}
    signs = read_signs({place: found for place, found in places.items() if found is not None}, r7, tail)

    bad = Offences()
    weight_map, index_metadata = _read_index(source, sizes, bad)
    shards = sorted(set(weight_map.values()))
    headers = {header.file: header for header in source.headers(shards)}
    tensors = _match_index(source, weight_map, headers, bad)
    bad.check()

    check_signs(signs, tensors, geometry, bad)
    layers, shared, elsewhere = _sort_tensors(tensors, geometry, bad)
    experts = _build_layers(layers, signs, geometry, bad)
    roots = {layer.root for layer in experts.values() if layer.layer < geometry.layers} or {layer.root for layer in experts.values()}
    if len(roots) > 1:
        bad.add(source.where, "tensor root", expected="one", found=sorted(roots))
    dense = check_modules(tensors, bad)
    if experts and not bad:
        check_layers(signs, experts, elsewhere, geometry, bad)
    warnings = check_bit_map(r7, experts, source, sizes, bad)
    storage, told = check_storage(signs, tensors, [layer.base for layer in experts.values() if layer.tp is not None], bad)
    warnings += told
    if tail is not None:
        check_tail_map(tail, experts, source, sizes, bad)
    bad.check()

    mtp_names = {name: at for name in tensors if (at := mtp_layer(name, geometry.layers)) is not None}
    mtp = Mtp(geometry.layers, geometry.mtp_layers, tuple(sorted(set(mtp_names.values()))), frozenset(mtp_names))
    return Checkpoint(
        source=source,
        kind=signs.kind if experts else "other",
        sizes=sizes,
        config=config,
        quantization=block,
        quantization_file=file_block,
        hf_quant_config=_object(source, HF_QUANT_CONFIG) if HF_QUANT_CONFIG in sizes else None,
        geometry=geometry,
        weight_map=weight_map,
        index_metadata=index_metadata,
        headers=headers,
        tensors=tensors,
        root=roots.pop() if roots else "model.layers",
        r7=r7,
        tail=tail,
        experts=experts,
        shared_experts=_shared_experts(shared),
        dense_exl3=dense,
        storage=storage,
        mtp=mtp,
        foreign=tuple(name for name in sizes if name.endswith(SHARD) and name not in headers),
        left_out=tuple(source.left_out),
        warnings=tuple(warnings),
    )


def embedded_quantization(config: Mapping[str, Json]) -> Mapping[str, Json] | None:
    """config.json's own quantization block, from the top level or from text_config."""
    for place in (config, config.get("text_config")):
        if isinstance(place, Mapping) and isinstance(place.get("quantization_config"), Mapping):
            return place["quantization_config"]  # type: ignore[no-any-return]
    return None


def _object(source: Source, name: str) -> dict[str, Json]:
    value = source.json(name)
    if not isinstance(value, dict):
        raise FormatError(complain(name, "JSON", expected="an object", found=type(value).__name__))
    return value


def _r7_block(config: Mapping[str, Json], file_block: Mapping[str, Json] | None) -> R7Block | None:
    """The R7 block, which config.json and quantization_config.json repeat: two that differ are no description at all."""
    inside = (embedded_quantization(config) or {}).get("r7_routed_experts")
    beside = (file_block or {}).get("r7_routed_experts")
    if inside is not None and beside is not None and inside != beside:
        raise FormatError(
            complain(
                QUANT_CONFIG, "r7_routed_experts", expected="the block that config.json has", found="another", do="Keep the right one."
            )
        )
    found = inside if inside is not None else beside
    return None if found is None else parse_r7_block(found)


def _read_index(source: Source, sizes: Mapping[str, int], bad: Offences) -> tuple[dict[str, str], Mapping[str, Json]]:
    """Tensor name -> file, and the index's own metadata. A folder with one shard and no index is its own index."""
    if INDEX not in sizes:
        shards = [name for name in sizes if name.endswith(SHARD)]
        if len(shards) != 1:
            found = f"{len(shards)} shards and no index"
            raise FormatError(complain(source.where, INDEX, expected="the index", found=found, do="Download it."))
        return dict.fromkeys(source.headers(shards)[0].tensors, shards[0]), {}
    index = _object(source, INDEX)
    weight_map, metadata = index.get("weight_map"), index.get("metadata")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError(complain(INDEX, "weight_map", expected="an object of tensor: file", found=type(weight_map).__name__))
    for file in weight_map.values():
        if not isinstance(file, str):
            collect(bad, check_plain_name, file, INDEX)
    files = Counter(file for file in weight_map.values() if isinstance(file, str))
    for name, count in sorted(files.items()):
        if collect(bad, check_plain_name, name, INDEX) and name not in sizes:
            bad.add(name, f"missing file, named by {count} index entries", do="Download it, or repair the index.")
    if twins := find_twins(files):
        bad.add(INDEX, "files whose names differ in case only", expected="one", found=twins, do="Rename one, in the index too.")
    bad.check()
    return weight_map, metadata if isinstance(metadata, dict) else {}


def _match_index(source: Source, weight_map: Mapping[str, str], headers: Mapping[str, Header], bad: Offences) -> dict[str, TensorEntry]:
    """Every tensor of the indexed shards, after comparing index and headers in both directions.

    A tensor in two shards is refused though the index names one of them, for readers do not agree on which counts: vLLM takes the
    last shard's, others the index's. Whether it makes a difference is said, which is the only payload that is read here.
    """
    tensors: dict[str, TensorEntry] = {}
    for header in headers.values():
        for name, entry in header.tensors.items():
            if name in tensors:
                same = f", {compare_payloads(source, tensors[name], entry)}" if len(bad) < SHOWN_OFFENDERS else ""
                found = f"{tensors[name].file} and {header.file}{same}"
                bad.add(name, "tensor in two shards", expected=f"one, {weight_map.get(name)} by the index", found=found)
            elif name not in weight_map:
                bad.add(f"{header.file}: {name}", f"tensor is not in {INDEX}", do="The index is stale: fetch the right one.")
            tensors[name] = entry
    for name, file in weight_map.items():
        if name not in tensors:
            bad.add(INDEX, f"entry {name!r}", expected=f"a tensor of {file}", found="no such tensor in any shard")
        elif tensors[name].file != file and name not in headers[file].tensors:
            bad.add(INDEX, f"entry {name!r}", expected=tensors[name].file, found=file)
    return tensors


def _sort_tensors(
    tensors: Mapping[str, TensorEntry], geometry: Geometry, bad: Offences
) -> tuple[dict[int, LayerNames], dict[int, list[tuple[SharedExpertName, TensorEntry]]], set[int]]:
    """Tensors by what their names say: EXL3 routed experts and shared experts by layer, and the layers whose routed experts are not
    EXL3. MTP layers count from num_hidden_layers on, whatever their names do.
    """
    layers: dict[int, LayerNames] = {}
    shared: dict[int, list[tuple[SharedExpertName, TensorEntry]]] = {}
    strangers: dict[int, list[TensorEntry]] = {}
    for name, entry in tensors.items():
        parsed = parse_name(name)
        if parsed is not None:
            at = mtp_layer(name, geometry.layers)
            at = parsed.layer if at is None else at
            if isinstance(parsed, SharedExpertName):
                shared.setdefault(at, []).append((parsed, entry))
            else:
                layers.setdefault(at, []).append((parsed, entry))
        elif "sqg" in name.lower():
            bad.add(f"{entry.file}: {name}", "sqg marker", expected="none", found=name.rsplit(".", 1)[-1], do="SQG is another codec.")
        elif is_expert_name(name):
            at = mtp_layer(name, geometry.layers)
            strangers.setdefault(layer_of(name) or 0 if at is None else at, []).append(entry)
    for layer in strangers.keys() & layers.keys():
        # Experts that are no EXL3 (a BF16 MTP layer) are carried; beside EXL3 ones in the same layer they are a mistake.
        beside = layers[layer][0][1]
        for entry in strangers[layer]:
            what = "unknown tensor among the routed experts of an EXL3 layer"
            bad.add(f"{entry.file}: {entry.name}", what, expected=f"names like {beside.name}", found=f"{entry.dtype} {list(entry.shape)}")
    return layers, shared, set(strangers)


def _build_layers(layers: Mapping[int, LayerNames], signs: Signs, geometry: Geometry, bad: Offences) -> dict[int, ExpertLayer]:
    experts = {}
    for layer in sorted(layers):
        promise = signs.promise(layer)
        if promise is None:
            name, entry = layers[layer][0]
            said = "neither r7_routed_experts nor hybrid_tr3_tail covers" if signs.r7 or signs.tail else "nothing in config.json declares"
            do = "Repair moe_layers." if signs.r7 or signs.tail else "Add the quantization_config that belongs to them."
            form = "whole matrices" if name.rank is None else f"rank {name.rank}"
            what = f"routed experts of layer {layer}, which {said}"
            bad.add(f"{entry.file}: {entry.name}", what, expected=signs.stated(), found=form, do=do)
        elif (built := build_layer(layer, layers[layer], geometry, bad, promise)) is not None:
            experts[layer] = built
    return experts


def _shared_experts(found: Mapping[int, Iterable[tuple[SharedExpertName, TensorEntry]]]) -> dict[int, SharedExpert]:
    made = {}
    for layer in sorted(found):
        names = list(found[layer])
        entries = tuple(entry for _, entry in names)
        is_exl3 = any(name.field == "trellis" for name, _ in names)
        dtypes = sorted({entry.dtype for name, entry in names if name.field == "weight"})
        bits = tuple(sorted({entry.shape[2] // 16 for name, entry in names if name.field == "trellis" and len(entry.shape) == 3}))
        form = "mixed" if is_exl3 and dtypes else "exl3" if is_exl3 else "weight"
        made[layer] = SharedExpert(layer, names[0][0].module, form, dtypes[0] if dtypes else None, bits, entries)
    return made
