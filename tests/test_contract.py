"""One broken folder for each rule of a target's readers, sealed again so that the rule itself must see it.

The last test counts: a rule of the contract without a folder that breaks it fails the suite.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from r7convert.format import MUL1_MARKER
from r7convert.journal import MANIFEST
from r7convert.repack import repack
from r7convert.sample import write_sample
from r7convert.store import DATA_ALIGNMENT, encode_header, read_header
from r7convert.verify import verify
from tests import tamper
from tests.tamper import Held, change_tensor, edit_block, edit_config, edit_json, renamed, rewrite_shard

Json = Any
Harm = Callable[[Path], object]
pytestmark = pytest.mark.usefixtures("no_fsync")

SMALLEST: dict[str, Any] = {"hidden": 128, "intermediate": 256, "experts": 3, "layers": 3, "dense": 1}
OUTPUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "r7 made anew": ({"mode": "mixed", "target": "exl3"}, {"target": "r7"}),
    "shared": ({"mode": "uniform", "equal_tail_vectors": True}, {"target": "rank-sliced", "tp": 2}),
    "stock": ({"mode": "uniform"}, {"target": "rank-sliced", "tp": 2, "reader": "r14"}),
    "slabs": ({"mode": "mixed", "mtp": "r7"}, {"target": "slabs", "tp": 2}),
    "r7": ({"mode": "mixed", "tail_tp": 2}, {"target": "r7"}),
    "r7 without tail": ({"mode": "mixed", "mtp": "none"}, {"target": "r7"}),
    "exl3": ({"mode": "mixed"}, {"target": "exl3"}),
    "nested": ({"mode": "uniform", "nested": True}, {"target": "rank-sliced", "tp": 2}),
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            folder = tmp_path_factory.mktemp("made")
            sample, choices = OUTPUTS[name]
            sample, between = {k: v for k, v in sample.items() if k != "target"}, sample.get("target")
            write_sample(folder / "sample", **SMALLEST, **sample)
            source = folder / "sample"
            if between:
                source = folder / "source"
                repack(folder / "sample", source, target=between)
            repack(source, folder / "output", **choices)
            made[name] = folder / "output"
        return made[name]

    return get


# ---- harms ----------------------------------------------------------------------------------------------------------


def tail(key: str, value: Json) -> Harm:
    return lambda folder: edit_config(folder, lambda config: config["hybrid_tr3_tail"].__setitem__(key, value))


def block(key: str, value: Json) -> Harm:
    return lambda folder: edit_block(folder, lambda found: found.__setitem__(key, value))


def config(key: str, value: Json) -> Harm:
    return lambda folder: edit_config(folder, lambda found: found.__setitem__(key, value))


def sidecar(edit: Callable[[Json], object]) -> Harm:
    return lambda folder: edit_json(folder / "slabs.json", edit)


def tier_map(edit: Callable[[Json], object]) -> Harm:
    return lambda folder: edit_json(folder / "tier_map.json", edit)


def tensor(pattern: str, change: Callable[[Held], Held | list[Held]]) -> Harm:
    return lambda folder: change_tensor(folder, pattern, change)


def every_tensor(pattern: str, change: Callable[[Held], Held | list[Held]]) -> Harm:
    """The same change to every tensor that matches, in whatever files they are."""

    def harm(folder: Path) -> None:
        for path in sorted(folder.glob("*.safetensors")):
            if any(re.search(pattern, name) for name in read_header(path).tensors):

                def each(held: list[Held]) -> list[Held]:
                    made: list[Held] = []
                    for one in held:
                        changed = change(one) if re.search(pattern, one.name) else one
                        made += changed if isinstance(changed, list) else [changed]
                    return made

                rewrite_shard(path, each)

    return harm


def gone(_: Held) -> list[Held]:
    return []


def with_k(k: int) -> Callable[[Held], Held]:
    def change(one: Held) -> Held:
        shape = (*one.shape[:2], 16 * k)
        return replace(one, shape=shape, data=bytes(2 * shape[0] * shape[1] * shape[2]))

    return change


def filled(first: bytes) -> Callable[[Held], Held]:
    return lambda one: replace(one, data=first + one.data[len(first) :])


def metadata(pattern: str, edit: Callable[[dict[str, str]], dict[str, str]]) -> Harm:
    def harm(folder: Path) -> None:
        path = sorted(folder.glob(pattern))[-1]
        rewrite_shard(path, list, edit(dict(read_header(path).metadata)))

    return harm


def header_of(pattern: str, pad: Callable[[bytes], bytes]) -> Harm:
    """The JSON of a header padded otherwise, the data as it was."""

    def harm(folder: Path) -> None:
        path = sorted(folder.glob(pattern))[-1]
        raw, start = path.read_bytes(), read_header(path).data_start
        text = pad(raw[8:start].rstrip(b" "))
        tamper.put(path, len(text).to_bytes(8, "little") + text + raw[start:])

    return harm


def to_multiple(of: int, plus: int = 0) -> Callable[[bytes], bytes]:
    return lambda text: text.ljust(-(-(8 + len(text)) // of) * of - 8 + plus)


def duplicate(folder: Path) -> None:
    """One tensor in a second file as well."""
    norm = tamper.read_tensor(folder, "model.norm.weight")
    head = encode_header([(norm.name, norm.dtype, norm.shape)], {"format": "pt"}, "x")
    (folder / "model-extra.safetensors").write_bytes(head + norm.data)
    tamper.reindex(folder)


def unreadable_to_others(folder: Path) -> None:
    """A shape whose product overflows, in a tensor of no bytes: this library's reader counts in big integers."""
    text = b'{"__metadata__":{"format":"pt"},"model.x":{"dtype":"F16","shape":[4611686018427387904,8,0],"data_offsets":[0,0]}}'
    text = text.ljust(DATA_ALIGNMENT - 8)
    (folder / "model-extra.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    tamper.reindex(folder)


def dense_in_layer_0(folder: Path) -> None:
    """An EXL3 attention matrix in a layer before the experts, with a true record."""
    old, new = "model.layers.1.self_attn.q_b_proj", "model.layers.0.self_attn.q_b_proj"
    every_tensor(rf"^{old}\.", lambda one: replace(one, name=one.name.replace(old, new)))(folder)

    def move(found: Json) -> None:
        record = found["tensor_storage"].pop(old)
        stored = {name.replace(old, new): value for name, value in record["stored_tensors"].items()}
        found["tensor_storage"][new] = {**record, "stored_tensors": stored}

    edit_block(folder, move)


def merged_gate_up(folder: Path) -> None:
    old, new = "model.layers.1.self_attn.q_b_proj", "model.layers.1.mlp.shared_experts.gate_up_proj"
    every_tensor(rf"^{old}\.", lambda one: replace(one, name=one.name.replace(old, new)))(folder)
    edit_block(folder, lambda found: found["tensor_storage"].pop(old))


def one_expert_of_k(k: int) -> Harm:
    """Every matrix of expert 0 of layer 1, on every rank, at another K: sound for a stock reader but for the third K."""
    return every_tensor(r"layers\.1\.mlp\.experts\.0\.\w+\.(rank\d\.)?trellis", with_k(k))


def two_in_one_file(folder: Path) -> None:
    """Both ranks of layer 1 in one file."""
    one, other = sorted(folder.glob("*-layer-001-rank-*"))
    taken: list[Held] = []

    def take(held: list[Held]) -> list[Held]:
        taken.extend(held)
        return held

    rewrite_shard(other, take)
    other.unlink()
    rewrite_shard(one, lambda held: [*held, *taken])


def swapped_neighbours(pattern: str) -> Harm:
    """Two tensors that follow each other in the file exchange their places."""

    def harm(folder: Path) -> None:
        path = sorted(folder.glob("*-rank-1-of-2.safetensors"))[0]

        def swap(held: list[Held]) -> list[Held]:
            at = next(n for n, one in enumerate(held) if re.search(pattern, one.name))
            return [*held[:at], held[at + 1], held[at], *held[at + 2 :]]

        rewrite_shard(path, swap)

    return harm


def manifest(key: str, value: Json) -> Harm:
    return lambda folder: edit_json(folder / MANIFEST, lambda found: found.__setitem__(key, value))


def remove(path: str) -> Harm:
    return lambda folder: (folder / path).unlink()


def first_sidecar(edit: Callable[[Json], object]) -> Harm:
    return lambda folder: edit_json(min(folder.glob("r7-experts-*.json")), edit)


def set_in(path: str, value: Json) -> Callable[[Json], object]:
    """An edit: the value at a.b.0.c becomes another."""

    def edit(root: Json) -> None:
        *keys, last = (int(key) if key.isdecimal() and isinstance(key, str) else key for key in path.split("."))
        for key in keys:
            root = root[key] if isinstance(root, list) else root[str(key)]
        root[last if isinstance(root, list) else str(last)] = value

    return edit


def index(edit: Callable[[Json], object]) -> Harm:
    return lambda folder: edit_json(folder / tamper.INDEX, edit)


def in_block(edit: Callable[[Json], object]) -> Harm:
    return lambda folder: edit_block(folder, edit)


def in_config(edit: Callable[[Json], object]) -> Harm:
    return lambda folder: edit_config(folder, edit)


def beside(name: Callable[[str], str]) -> Callable[[Held], list[Held]]:
    """A copy of the tensor under another name."""
    return lambda one: [one, replace(one, name=name(one.name))]


def cut_short(folder: Path) -> None:
    path = max(folder.glob("*.safetensors"))
    tamper.put(path, path.read_bytes()[:-1])


def anonymous_rank_file(folder: Path) -> None:
    max(folder.glob("*-rank-*")).rename(folder / "other.safetensors")
    tamper.reindex(folder)


def other_k_in_the_map(found: Json) -> None:
    found["1"]["bits"] = [7 - k for k in found["1"]["bits"]]


def no_marker_in_records(found: Json) -> None:
    for record in found["tensor_storage"].values():
        del record["mcg_multiplier"]


def other_shape(shape: tuple[int, ...]) -> Callable[[Held], Held]:
    """Fewer elements, or the same in another order of dimensions."""

    def change(one: Held) -> Held:
        count = 1
        for n in shape:
            count *= n
        return replace(one, shape=shape, data=one.data[: 2 * count])

    return change


def wider(dtype: str) -> Callable[[Held], Held]:
    return lambda one: replace(one, dtype=dtype, data=one.data * 2)


SCHEMA_OF_ANOTHER_CODEC = "glm52-sqg-atoms-v2-routed-v1"
EXPERTS = "model.layers.1.mlp.experts"
GATE, DOWN = r"layers\.1\.mlp\.experts\.0\.gate_proj", r"layers\.1\.mlp\.experts\.0\.down_proj"
SVH = rf"{GATE}\.rank1\.svh"
MCG = rf"{GATE}\.rank0\.mcg"
SHARED_UP = r"shared_h\.up_proj\.rank1\.suh"
Q_B = r"layers\.1\.self_attn\.q_b_proj"

# (output, the rule that must see it, what is done)
RULES: list[tuple[str, str, str, Harm]] = [
    # claims of the manifest
    ("shared", "the manifest says what this is", "tp is no number", manifest("tp", "2")),
    ("shared", "the manifest says what this is", "no reader level", manifest("reader", None)),
    ("shared", "the manifest says what this is", "some layers only", manifest("partial", {"layers": [1, 1]})),
    ("shared", "every fact of the manifest", "another layout", manifest("rotation_layout", "per_expert_v1")),
    ("shared", "every fact of the manifest", "a fact of no kind", manifest("quality", 1)),
    # files
    ("shared", "headers are sound", "a shard cut short", cut_short),
    ("shared", "headers: under", "no format pt", metadata("model-*", lambda m: {})),
    ("shared", "headers: under", "data at an odd place", header_of("model-*", to_multiple(8, plus=4))),
    ("shared", "headers: under", "a header too long", header_of("model-*", lambda text: text.ljust(20_000_008))),
    ("shared", "the official safetensors reader", "a shape that overflows", unreadable_to_others),
    ("shared", "every tensor stands in one file", "a tensor in two files", duplicate),
    ("shared", "index and headers agree", "an entry too few", index(lambda i: i["weight_map"].popitem())),
    ("shared", "index and headers agree", "an entry too many", index(lambda i: i["weight_map"].update(x="y"))),
    ("shared", "index and headers agree", "another file", index(lambda i: i["weight_map"].update({"lm_head.weight": "x.safetensors"}))),
    ("shared", "index and headers agree", "no index", remove(tamper.INDEX)),
    ("shared", "index and headers agree", "another total_size", index(set_in("metadata.total_size", 1))),
    ("shared", "config.json gives the geometry", "no hidden_size", in_config(lambda c: c.pop("hidden_size"))),
    # the stamp
    *[
        ("shared", "stamp: quant_method exl3", f"{key} {value!r}", block(key, value))
        for key, value in {
            "quant_method": "modelopt",
            "producer": {"name": "modelopt"},
            "quant_algo": "NVFP4",
            "quantization": {},
            "config_groups": {},
            "codebook": "mul1",
            "bits": "mixed",
            "version": 1,
            "head_bits": "6",
        }.items()
    ],
    ("shared", "stamp: quant_method exl3", "no block", in_config(lambda c: c.pop("quantization_config"))),
    ("shared", "stamp: the same block", "another beside it", lambda f: edit_json(f / "quantization_config.json", set_in("x", 1))),
    ("shared", "stamp: the same block", "none beside it", remove("quantization_config.json")),
    ("nested", "stamp: the same block", "another under text_config", in_config(set_in("text_config.quantization_config.x", 1))),
    ("shared", "stamp: no hf_quant_config.json", "one", lambda f: (f / "hf_quant_config.json").write_text("{}")),
    # MTP
    ("shared", "MTP layers", "one too many said", config("num_nextn_predict_layers", 2)),
    ("shared", "MTP layers", "none said", config("num_nextn_predict_layers", 0)),
    # the tail and its map
    *[(name, "no r7_routed_experts", "one left", block("r7_routed_experts", {})) for name in ("shared", "slabs", "exl3")],
    *[(name, "no r7convert_slabs", "one left", block("r7convert_slabs", {})) for name in ("shared", "r7", "exl3")],
    *[
        ("shared", "hybrid_tr3_tail: every key", f"{key} {value!r}", tail(key, value))
        for key, value in {
            "format": "exl3-trelis",
            "bits": "mixed_tensor",
            "codebook": "mul1",
            "experts_per_layer": 4,
            "tensor_schema": "model.layers.{L}.{proj}",
            "tp": 4,
            "k_values": [],
            "bits_per_expert": "missing.json:bits",
            "rotation_layout": "shared_h_v2",
            "shared_h_tensor_schema": "other",
            "moe_layers": [1, 2, 3],
        }.items()
    ],
    ("stock", "hybrid_tr3_tail: every key", "tp is 2.0, which readers truncate", tail("tp", 2.0)),
    ("stock", "hybrid_tr3_tail: every key", "a map outside the folder", tail("bits_per_expert", "../tier_map.json:bits")),
    ("shared", "hybrid_tr3_tail: every key", "no tail", in_config(lambda c: c.pop("hybrid_tr3_tail"))),
    ("r7", "hybrid_tr3_tail: every key", "bits is 3.0", tail("bits", 3.0)),
    ("shared", "moe_layers: one contiguous range", "the MTP layer left out", tail("moe_layers", [1, 2])),
    ("shared", "moe_layers: one contiguous range", "a dense layer in it", tail("moe_layers", [0, 3])),
    ("shared", "moe_layers: one contiguous range", "config says dense", config("first_k_dense_replace", 2)),
    ("r7", "moe_layers: one contiguous range", "the tail beyond its layer", tail("moe_layers", [2, 3])),
    ("shared", "tier map: an entry for every layer", "a layer missing", tier_map(lambda m: m.pop("2"))),
    ("shared", "tier map: an entry for every layer", "an expert missing", tier_map(lambda m: m["2"]["bits"].pop())),
    ("shared", "tier map: an entry for every layer", "K as text", tier_map(set_in("2.bits", ["3", "3", "3"]))),
    ("shared", "tier map: an entry for every layer", "a layer of no range", tier_map(lambda m: m.update({"9": m["2"]}))),
    ("shared", "tier map: an entry for every layer", "another field", tail("bits_per_expert", "tier_map.json:bitz")),
    # dense EXL3
    ("shared", "dense EXL3: trellis, suh", "mul1 beside mcg", tensor(rf"{Q_B}\.mcg", beside(lambda n: n[:-3] + "mul1"))),
    ("shared", "dense EXL3: trellis, suh", "mcg missing", tensor(rf"{Q_B}\.mcg", gone)),
    ("shared", "dense EXL3: trellis, suh", "svh too short", tensor(rf"{Q_B}\.svh", other_shape((16,)))),
    ("shared", "dense EXL3: trellis, suh", "a trellis of no K", tensor(rf"{Q_B}\.trellis", other_shape((8, 16, 90)))),
    ("shared", "dense EXL3: trellis, suh", "a merged gate_up_proj", merged_gate_up),
    ("shared", "tensor_storage: embedded", "none", in_block(lambda b: b.pop("tensor_storage"))),
    ("shared", "tensor_storage: embedded", "another K", tensor(rf"{Q_B}\.trellis", with_k(5))),
    ("exl3", "tensor_storage: embedded", "no record of an expert", in_block(lambda b: b["tensor_storage"].popitem())),
    ("exl3", "tensor_storage: embedded", "records without markers", in_block(no_marker_in_records)),
    ("shared", "tensor_storage: embedded", "a record of nothing", in_block(set_in("tensor_storage.x", {}))),
    ("shared", "dense EXL3 only in layers", "in a dense layer", dense_in_layer_0),
    ("r7 without tail", "tensor_storage: not empty", "none at all", block("tensor_storage", {})),
    # names
    ("shared", "no `.rank<n>.` name", "on a norm", tensor(r"^model\.norm\.weight", renamed(lambda n: "model.norm.rank0.weight"))),
    ("shared", "no `.rank<n>.` name", "a third rank of two", tensor(SVH, beside(lambda n: n.replace("rank1", "rank2")))),
    ("exl3", "no `.rank<n>.` name", "in whole matrices", tensor(rf"{GATE}\.svh", renamed(lambda n: n[:-3] + "rank0.svh"))),
    ("shared", "expert tensors: none missing", "a vector gone", tensor(SVH, gone)),
    ("shared", "expert tensors: none missing", "a marker gone", tensor(MCG, gone)),
    ("shared", "expert tensors: none missing", "mul1 in place of mcg", tensor(MCG, renamed(lambda n: n[:-3] + "mul1"))),
    ("shared", "expert tensors: none missing", "mul1 beside mcg", tensor(MCG, beside(lambda n: n[:-3] + "mul1"))),
    ("shared", "expert tensors: none missing", "an expert too many", tensor(SVH, beside(lambda n: n.replace("experts.0", "experts.7")))),
    ("shared", "expert tensors: none missing", "a vector under an expert", tensor(SVH, beside(lambda n: n[:-3] + "suh"))),
    ("shared", "expert tensors: none missing", "a shared vector gone", tensor(SHARED_UP, gone)),
    (
        "shared",
        "expert tensors: none missing",
        "an alias for two",
        tensor(SHARED_UP, renamed(lambda n: n.replace("up_proj", "gate_up_proj"))),
    ),
    ("stock", "expert tensors: none missing", "a shared vector", tensor(SVH, beside(lambda n: f"{EXPERTS}.shared_h.up_proj.rank0.suh"))),
    ("shared", "expert tensors: none missing", "r7_shared left", tensor(SVH, beside(lambda n: f"{EXPERTS}.r7_shared.down_svh"))),
    ("shared", "expert tensors: none missing", "padding", tensor(SVH, beside(lambda n: f"{EXPERTS}.padding"))),
    ("shared", "expert tensors: none missing", "another root", tensor(SVH, renamed(lambda n: n.replace("model.", "model.text.")))),
    ("r7", "expert tensors: none missing", "a shared vector gone", tensor(r"layers\.1\..*r7_shared\.down_svh", gone)),
    ("exl3", "expert tensors: none missing", "a vector gone", tensor(rf"{DOWN}\.svh", gone)),
    ("shared", "expert tensors: dtype and shape", "svh as F32", tensor(SVH, wider("F32"))),
    ("shared", "expert tensors: dtype and shape", "trellis as I32", tensor(rf"{GATE}\.rank0\.trellis", wider("I32"))),
    ("shared", "expert tensors: dtype and shape", "a shared vector too short", tensor(SHARED_UP, other_shape((64,)))),
    ("shared", "expert tensors: dtype and shape", "a flat trellis", tensor(rf"{GATE}\.rank0\.trellis", other_shape((1, 64, 48)))),
    # K
    ("slabs", "K: one over all ranks", "rank 1 at another K", tensor(rf"{GATE}\.rank1\.trellis", with_k(6))),
    ("stock", "K: one an expert", "up at another K", every_tensor(r"layers\.1\..*experts\.0\.up_proj\.rank\d\.trellis", with_k(5))),
    ("stock", "K: one or two in a layer", "a third", one_expert_of_k(5)),
    ("stock", "K: one or two in a layer", "K2", one_expert_of_k(2)),
    ("stock", "K: as the tail states it", "another K in the map", tier_map(other_k_in_the_map)),
    ("r7", "K: as the tail states it", "another K in the tail", tail("bits", 4)),
    ("slabs", "K: each one the target's readers decode", "K2", one_expert_of_k(2)),
    ("r7", "K: each one the target's readers decode", "none of k_values", one_expert_of_k(6)),
    ("slabs", "tiers: at most three", "3, 4, 5 and 6", one_expert_of_k(6)),
    # slabs
    ("slabs", "no tail: a stock reader", "a tail over mixed experts", config("hybrid_tr3_tail", {"format": "exl3-trellis"})),
    ("exl3", "no tail over whole matrices", "a tail", config("hybrid_tr3_tail", {"format": "exl3-trellis"})),
    ("slabs", "r7convert_slabs points", "to another file", in_block(set_in("r7convert_slabs.file", "x.json"))),
    ("slabs", "slabs.json: sizes and layers", "another tp", sidecar(set_in("tp", 4))),
    ("slabs", "slabs.json: sizes and layers", "a layer missing", sidecar(lambda s: s["layers"].pop("2"))),
    ("slabs", "slabs.json: sizes and layers", "no sidecar", remove("slabs.json")),
    *[
        ("slabs", "slabs.json: tiers, counts", f"{path} {value}", sidecar(set_in(f"layers.1.{path}", value)))
        for path, value in {
            "descriptors.0": 1 << 12,
            "gate_n.0": 100,
            "fc1_slots.1": 100,
            "stride": 2,
            "route_map": [1, 0, 2],
            "bits.0.0": 6,
            "tiers": [3, 4],
            "ranks.1.w13.0.offset": 8,
            "ranks.1.w2.1.offset": 8,
            "ranks.1.rotations.shape": [3, 128],
            "ranks.0.down_svh.offset": 8,
            "ranks.0.file": "x.safetensors",
        }.items()
    ],
    ("slabs", "one file a layer and rank", "two ranks in one", two_in_one_file),
    ("slabs", "one file a layer and rank", "another rank in the metadata", metadata("*-rank-1-of-2*", lambda m: {**m, "rank": "0"})),
    ("slabs", "one file a layer and rank", "another tp in the metadata", metadata("*-rank-1-of-2*", lambda m: {**m, "tp": "4"})),
    ("slabs", "one file a layer and rank", "a name that says nothing", anonymous_rank_file),
    ("slabs", "slab files: data begins at a page", "at 8 bytes only", header_of("*-rank-1-of-2*", to_multiple(8, plus=8))),
    ("slabs", "slab files: tensors in slab order", "two rows of rotations", swapped_neighbours(r"gate_proj\.rank1\.svh")),
    ("slabs", "slab files: tensors in slab order", "two planes", swapped_neighbours(r"gate_proj\.rank1\.trellis")),
    # values
    ("shared", "every marker holds", "mul1's value", tensor(MCG, filled(MUL1_MARKER.to_bytes(4, "little", signed=True)))),
    ("shared", "every marker holds", "of a dense matrix", tensor(rf"{Q_B}\.mcg", filled(b"\x00"))),
    ("shared", "every scale vector is finite", "a NaN", tensor(SVH, filled(b"\x00\x7e"))),
    ("exl3", "every scale vector is finite", "an Inf", tensor(rf"{GATE}\.suh", filled(b"\x00\x7c"))),
    ("r7", "every scale vector is finite", "a NaN all experts share", tensor(r"r7_shared\.gate_up_suh", filled(b"\x00\x7e"))),
    ("shared", "hidden-side vectors are equal", "a copy apart", tensor(SHARED_UP, filled(b"\x01"))),
    ("stock", "hidden-side vectors are equal", "a copy apart", tensor(rf"{DOWN}\.rank1\.svh", filled(b"\x01"))),
    # R7
    ("r7", "r7_routed_experts is whole", "another schema", in_block(set_in("r7_routed_experts.schema", SCHEMA_OF_ANOTHER_CODEC))),
    ("r7", "r7_routed_experts is whole", "k_values as floats", in_block(set_in("r7_routed_experts.k_values", [3.0, 4.0]))),
    ("r7", "every layer is R7's or the tail's", "a shorter block", in_block(set_in("r7_routed_experts.moe_layers", [1, 1]))),
    ("r7 made anew", "R7 sidecars", "another shard's digest", first_sidecar(lambda s: s.update(shard_sha256="0" * 64))),
    ("r7 made anew", "R7 sidecars", "another layer", first_sidecar(lambda s: s.update(layer=7))),
    ("r7", "R7 sidecars", "another K", first_sidecar(lambda s: s["bit_map"].update(dict.fromkeys(s["bit_map"], 5)))),
]
UNREACHED = {
    "a r14 reader knows the rotation layout",  # tests/test_verify.py asks for that reader
    "a r28 reader knows the rotation layout",  # knows both
    "payloads can be read",  # needs a disk that fails after the headers were read
}


@pytest.mark.parametrize(("output", "rule", "harm"), [(o, r, h) for o, r, _, h in RULES], ids=[f"{o}: {r}: {n}" for o, r, n, _ in RULES])
def test_each_rule_sees_the_folder_that_breaks_it(built: Callable[[str], Path], tmp_path: Path, output: str, rule: str, harm: Harm) -> None:
    folder = tamper.copy_output(built(output), tmp_path / "copy")
    harm(folder)
    tamper.reseal(folder)
    verdict = verify(folder, threads=1)
    contract = verdict.parts[1]
    assert verdict.parts[0].state == "passed", verdict.failure_lines()
    failed = {check.name: check.shown for check in contract.checks.values() if check.failures}
    assert any(name.startswith(rule) for name in failed), failed
    assert all(shown for shown in failed.values())


def test_every_rule_of_the_contract_has_a_folder_that_breaks_it(built: Callable[[str], Path], tmp_path: Path) -> None:
    rules = set()
    for name in OUTPUTS:
        folder = tamper.copy_output(built(name), tmp_path / name.replace(" ", "-"))
        verdict = verify(folder, threads=1)
        verdict.check()
        rules |= set(verdict.parts[1].checks)
    assert len(rules) >= 35
    broken = {rule for _, rule, _, _ in RULES}
    unbroken = {rule for rule in rules if not any(rule.startswith(start) for start in broken)}
    assert unbroken <= UNREACHED
