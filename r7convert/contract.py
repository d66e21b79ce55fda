"""The part "contract": would the target's readers take this folder? Every rule of FORMAT.md sections 3 to 6 and 8, as our own code.

Rules on JSON stand in contract_config, on headers in contract_layers and contract_slabs, on payload values in contract_values;
here is which of them a target asks for, and what every target asks for: headers, metadata, index, the stamp.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from r7convert import contract_config as config_rules
from r7convert.contract_layers import Layout, check_free_k, check_layer, check_rank_names, check_slab_tiers, check_stock_k
from r7convert.contract_slabs import check_pointer, check_sidecar_head, check_slab_layer
from r7convert.contract_values import check_dense_values, check_layer_values, check_shared_experts
from r7convert.evidence import Evidence, LayerExperts, gather, layer_number
from r7convert.findings import Part
from r7convert.format import PROJECTIONS, R7_K_VALUES, SHARED_H_V1, TAIL_K_VALUES, Geometry, is_expert_name
from r7convert.geometry import parse_geometry
from r7convert.progress import Progress
from r7convert.store import FileRecord, read_json

Json = Any

TARGETS = ("rank-sliced", "slabs", "r7", "exl3")
INDEX = "model.safetensors.index.json"
MOST_HEADER_BYTES = 20_000_000
ALIGNMENT = 8
DENSE_MLP = re.compile(r"\.(?:mlp|ffn|block_sparse_moe)\.(?:down_proj|w2)\.\w+$")


@dataclass(frozen=True, slots=True)
class Claims:
    """What a folder is held to: its target, tp and reader level; `marks` are tensors it owns up to as non-finite, `encoded` the
    modules that were encoded.
    """

    target: str
    tp: int
    reader: str
    marks: Mapping[str, Json]
    encoded: Mapping[str, Json]


@dataclass(frozen=True, slots=True)
class Case:
    """What is judged, and by which claims."""

    evidence: Evidence
    config: Mapping[str, Json]
    block: Mapping[str, Json]
    geometry: Geometry
    claims: Claims
    files: Mapping[str, FileRecord]
    part: Part

    @property
    def folder(self) -> Path:
        return self.evidence.folder

    @property
    def tp(self) -> int:
        return self.claims.tp

    @property
    def reader(self) -> str:
        return self.claims.reader


def check_contract(
    folder: Path, files: Mapping[str, FileRecord], part: Part, claims: Claims, *, threads: int, progress: Progress
) -> Evidence:
    """Judge a folder by the rules of its target's readers; hands back the headers it read. `files` are those the manifest lists."""
    shards = [name for name in files if name.endswith(".safetensors") and (folder / name).exists()]
    evidence = gather(folder, shards, part.check("headers are sound", "files"))
    _check_headers(evidence, part)
    _check_index(evidence, part)
    readable = part.check("config.json gives the geometry", "files")
    config, geometry = None, None
    with readable.collecting():
        config = read_json(folder / "config.json")
        geometry = parse_geometry(config)
    if geometry is None or config is None:
        return evidence
    codebooks = _codebooks(evidence) if claims.target == "exl3" else ["mcg"]
    block = config_rules.check_stamp(folder, config, part, codebooks)
    config_rules.check_mtp(evidence, layers=geometry.layers, mtp_layers=geometry.mtp_layers, part=part)
    case = Case(evidence, config, block, geometry, claims, files, part)
    if claims.target != "slabs":
        config_rules.check_no_pointer(block, part)
    {"rank-sliced": _check_rank_sliced, "slabs": _check_slabs, "r7": _check_r7, "exl3": _check_exl3}[claims.target](case)

    layers = sorted(evidence.expert_tensors)
    values = {n: sum(e.nbytes for e in evidence.expert_tensors[n] if not e.name.endswith(".trellis")) for n in layers}
    progress.start(sum(values.values()), "contract: payload values")
    with ThreadPoolExecutor(threads) as pool:
        checked = pool.map(lambda layer: check_layer_values(evidence, evidence.layer(layer), claims.marks), layers)
        for layer, found in zip(layers, checked, strict=True):
            part.absorb(found)
            progress.advance(values[layer], f"layer {layer}")
    part.absorb(check_dense_values(evidence, claims.marks))
    if claims.encoded:
        part.absorb(check_shared_experts(evidence, claims.encoded))
    part.scope.append(
        f"target {claims.target}, tp {claims.tp}, reader {claims.reader}: {len(evidence.tensors):,} tensors in "
        f"{len(evidence.headers):,} files, {len(layers)} layers of routed experts"
    )
    return evidence


# ---- what every target asks for -------------------------------------------------------------------------------------


def _check_headers(evidence: Evidence, part: Part) -> None:
    """Size, alignment, metadata; and the official reader's word."""
    form = part.check("headers: under 20,000,000 bytes, data at a multiple of 8, format pt", "files")
    official = part.check("the official safetensors reader opens every file", "files")
    for name, header in evidence.headers.items():
        form.expect(
            header.data_start - 8 < MOST_HEADER_BYTES, name, "header", expected="under 20,000,000 bytes", found=header.data_start - 8
        )
        form.expect(header.data_start % ALIGNMENT == 0, name, "start of data", expected="a multiple of 8", found=header.data_start)
        form.same(f"{name}: __metadata__", "format", expected="pt", found=header.metadata.get("format"))
        try:
            with safe_open(evidence.folder / name, framework="np") as file:
                names = set(file.keys())
            official.same(name, "tensors", expected=len(header.tensors), found=len(names & header.tensors.keys()))
        except (SafetensorError, OSError) as error:
            official.expect(False, name, "safe_open", expected="a file it takes", found=str(error))


def _check_index(evidence: Evidence, part: Part) -> None:
    """Index and headers in both directions; every name once."""
    once = part.check("every tensor stands in one file")
    counts = Counter(name for header in evidence.headers.values() for name in header.tensors)
    once.saw(len(counts))
    for name in (name for name, count in counts.items() if count > 1):
        files = [file for file, header in evidence.headers.items() if name in header.tensors]
        once.fail(name, "duplicate tensor: the last wins, in silence", expected="one file", found=files)
    check = part.check("index and headers agree, in both directions", "names")
    index: Json = None
    with check.collecting():
        index = read_json(evidence.folder / INDEX)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not isinstance(index, dict):
        check.fail(INDEX, "weight_map", expected="an object", found=type(weight_map).__name__)
        return
    check.same_json(INDEX, expected=["metadata", "weight_map"], found=sorted(index))
    for name, file in weight_map.items():
        there = isinstance(file, str) and file in evidence.headers and name in evidence.headers[file].tensors
        check.expect(
            there,
            f"{INDEX}: {name}",
            "tensor",
            expected=f"in {file}",
            found=evidence.tensors[name].file if name in evidence.tensors else "nowhere",
        )
    for name in evidence.tensors.keys() - weight_map.keys():
        check.expect(False, f"{evidence.tensors[name].file}: {name}", "tensor of a file", expected=f"in {INDEX}", found="not there")
    total = sum(entry.nbytes for header in evidence.headers.values() for entry in header.tensors.values())
    metadata = index.get("metadata")
    stated = metadata.get("total_size") if isinstance(metadata, dict) else None
    check.same(f"{INDEX}: metadata", "total_size, the payload's bytes", expected=total, found=stated)


def _due_layers(case: Case) -> list[int]:
    """Layers that config.json says have routed experts, less those whose experts are carried in another form (BF16). It does not say
    it of MTP layers: there one with a dense MLP has none.
    """
    geometry, evidence = case.geometry, case.evidence
    mtp = range(geometry.layers, geometry.layers + geometry.mtp_layers)
    other = {layer_number(entry.name, evidence.layers) for entry in evidence.carried if is_expert_name(entry.name)}
    dense = {layer_number(entry.name, evidence.layers) for entry in evidence.carried if DENSE_MLP.search(entry.name)}
    return sorted({*geometry.moe_layers, *(layer for layer in mtp if layer not in dense)} - other)


def _codebooks(evidence: Evidence) -> list[str]:
    """The codebooks that markers name."""
    found = {name.rpartition(".")[2] for name in evidence.tensors} & {"mcg", "mul1"}
    return sorted(found) or ["mcg"]


def _layers(case: Case) -> Iterator[LayerExperts]:
    """The layers with EXL3 routed experts; parsed one at a time."""
    return map(case.evidence.layer, sorted(case.evidence.expert_tensors))


def _roots(case: Case) -> set[str]:
    """The one tensor root there may be: the one most layers have."""
    counts = Counter(root for layer in _layers(case) for root in layer.roots if layer.layer < case.geometry.layers)
    return {counts.most_common(1)[0][0]} if counts else set()


# ---- what each target asks for --------------------------------------------------------------------------------------


def _check_rank_sliced(case: Case) -> None:
    """Stock readers: FORMAT.md section 4, and section 6 for the order in the file."""
    part, found, roots = case.part, sorted(case.evidence.expert_tensors), _roots(case)
    config_rules.check_no_r7_block(case.config, case.block, part)
    tail = config_rules.check_tail(case.folder, case.config, part, experts=case.geometry.experts, tp=case.tp, reader=case.reader)
    due = _due_layers(case)
    config_rules.check_range(tail.moe_layers if tail else None, due, found, found, part)
    config_rules.check_dense(case.evidence, case.block, part, moe_range=tail.moe_layers if tail else (0, -1), experts_too=False)
    check_rank_names(case.evidence.tensors.values(), part, tp=case.tp)
    stated = config_rules.check_tier_map(case.folder, tail, part) if tail else {}
    layout: Layout = "shared_h_v1" if tail and tail.rotation_layout == SHARED_H_V1 else "per_expert_v1"
    for layer in _layers(case):
        check_layer(layer, part, geometry=case.geometry, tp=case.tp, layout=layout, roots=roots)
        check_stock_k(layer, stated.get(layer.layer), part)
    _check_slab_files(case, layout)


def _check_slabs(case: Case) -> None:
    """Slab readers: FORMAT.md sections 5 and 6, a K per projection."""
    part, found, roots = case.part, sorted(case.evidence.expert_tensors), _roots(case)
    config_rules.check_no_r7_block(case.config, case.block, part)
    part.check("no tail: a stock reader must not take mixed experts for its own", "keys").expect(
        "hybrid_tr3_tail" not in case.config, "config.json", "hybrid_tr3_tail", expected="none", found="one"
    )
    check_pointer(case.block, found, part, tp=case.tp)
    config_rules.check_range(None, _due_layers(case), found, found, part)
    config_rules.check_dense(case.evidence, case.block, part, moe_range=None, experts_too=False)
    check_rank_names(case.evidence.tensors.values(), part, tp=case.tp)
    layout: Layout = "per_expert_v1"
    for layer in _layers(case):
        layout = "shared_h_v1" if layer.shared_h else layout
    for layer in _layers(case):
        check_layer(layer, part, geometry=case.geometry, tp=case.tp, layout=layout, roots=roots, any_names=True)
        check_free_k(layer, TAIL_K_VALUES, part)
        check_slab_tiers(layer, part)
    _check_slab_files(case, layout)


def _check_slab_files(case: Case, layout: Layout) -> None:
    sidecar: Json = None
    with case.part.check("slabs.json: sizes and layers", "values").collecting():
        sidecar = read_json(case.folder / "slabs.json")
    found = sorted(case.evidence.expert_tensors)
    check_sidecar_head(sidecar, found, case.part, geometry=case.geometry, tp=case.tp, rotation_layout=layout)
    entries = sidecar.get("layers") if isinstance(sidecar, dict) else None
    entries = entries if isinstance(entries, dict) else {}
    for layer in _layers(case):
        check_slab_layer(
            layer,
            entries.get(str(layer.layer)),
            case.evidence.headers,
            case.part,
            geometry=case.geometry,
            tp=case.tp,
            shared_h=layout == "shared_h_v1",
        )


def _check_r7(case: Case) -> None:
    """R7-aware readers: names unchanged, the R7 block strict, the tail as it was; FORMAT.md sections 2 and 8."""
    part, found, roots = case.part, sorted(case.evidence.expert_tensors), _roots(case)
    r7 = config_rules.check_r7_block(case.block, part)
    tail = None
    if "hybrid_tr3_tail" in case.config:
        tail = config_rules.check_tail(case.folder, case.config, part, experts=case.geometry.experts, tp=None, reader=case.reader)
    elif not case.block.get("tensor_storage"):
        part.check("tensor_storage: not empty where there is no tail", "blocks").fail(
            "config.json: quantization_config", "tensor_storage", expected="records: these readers need some without a tail", found="none"
        )
    told = part.check("r7_routed_experts is whole and strict", "blocks")
    if tail is None:
        told.note("with no tail R7-aware readers need eager mode")
    elif tail.tp != 1 or tail.bits is None:
        told.note(f"some R7-aware releases apply the tail's tp {tail.tp} to every layer, and a mixed tail breaks them")
    stated = config_rules.check_tier_map(case.folder, tail, part) if tail else {}
    whole = [layer.layer for layer in _layers(case) if not layer.ranks]
    for block, layers in ((r7, whole), (tail, [layer for layer in found if layer not in whole])):
        if block is not None:
            config_rules.check_range(block.moe_layers, _due_layers(case), layers, found, part)
    config_rules.check_dense(case.evidence, case.block, part, moe_range=None, experts_too=False)
    tail_layers = range(tail.moe_layers[0], tail.moe_layers[1] + 1) if tail else range(0)
    check_rank_names(case.evidence.tensors.values(), part, tp=tail.tp if tail else None)
    covered = part.check("every layer is R7's or the tail's", "layers")
    for layer in _layers(case):
        is_tail = layer.layer in tail_layers and bool(layer.ranks)
        is_r7 = r7 is not None and r7.moe_layers[0] <= layer.layer <= r7.moe_layers[1]
        covered.expect(is_tail or is_r7, f"layer {layer.layer}", "block", expected="r7_routed_experts or hybrid_tr3_tail", found="neither")
        if is_tail and tail is not None:
            layout: Layout = "shared_h_v1" if tail.rotation_layout == SHARED_H_V1 else "per_expert_v1"
            check_layer(layer, part, geometry=case.geometry, tp=tail.tp, layout=layout, roots=roots)
            check_stock_k(layer, stated.get(layer.layer), part)
        else:
            shared: Layout = "r7_shared" if layer.r7_shared else "per_expert"
            check_layer(layer, part, geometry=case.geometry, tp=None, layout=shared, roots=roots)
            check_free_k(layer, r7.k_values if r7 else R7_K_VALUES, part)
            _check_bit_map(case, layer)


def _check_bit_map(case: Case, layer: LayerExperts) -> None:
    """An R7 sidecar that stands beside its shard says the payload's K."""
    check = case.part.check("R7 sidecars: bit_map says the payload's K", "values")
    for shard in sorted({entry.file for entry in layer.own.values()}):
        path = case.folder / f"{shard.removesuffix('.safetensors')}.json"
        if not path.exists():
            continue
        with check.collecting():
            sidecar = read_json(path)
            root = next(iter(layer.roots), "")
            due = {
                f"{root}.{layer.layer}.mlp.experts.{expert}.{proj}": k
                for expert, ks in layer.k_rows()
                for proj, k in zip(PROJECTIONS, ks, strict=True)
            }
            found = sidecar.get("bit_map") if isinstance(sidecar, dict) else None
            check.same_json(f"{path.name}: bit_map", expected=dict(sorted(due.items())), found=found)
            config_rules.check_r7_sidecar(sidecar, path.name, check, layer=layer.layer, shard=shard, sha256=case.files[shard].sha256)


def _check_exl3(case: Case) -> None:
    """Topology-neutral EXL3: whole matrices with their own vectors, a full record for every module; FORMAT.md section 8."""
    part, found, roots = case.part, sorted(case.evidence.expert_tensors), _roots(case)
    config_rules.check_no_r7_block(case.config, case.block, part)
    part.check("no tail over whole matrices", "keys").expect(
        "hybrid_tr3_tail" not in case.config, "config.json", "hybrid_tr3_tail", expected="none", found="one"
    )
    config_rules.check_range(None, _due_layers(case), found, found, part)
    config_rules.check_dense(case.evidence, case.block, part, moe_range=None, experts_too=True, codebooks=("mcg", "mul1"))
    check_rank_names(case.evidence.tensors.values(), part, tp=None)
    for layer in _layers(case):
        check_layer(
            layer,
            part,
            geometry=case.geometry,
            tp=None,
            layout="per_expert",
            roots=roots,
            codebook=layer.codebook,
            any_names=True,
        )
        check_free_k(layer, range(1, 9), part)
