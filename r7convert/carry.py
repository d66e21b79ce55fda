"""What is carried: shards that stay as they are or only lose tensors, and the small files beside the weights. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from r7convert.checkpoint import SHARD, Checkpoint
from r7convert.format import TensorEntry
from r7convert.sidecars import sidecar_names
from r7convert.store import is_plain_name

_OURS = frozenset({"config.json", "quantization_config.json", "hf_quant_config.json", "model.safetensors.index.json"})
_SEALS = frozenset({"MANIFEST.json", "VERDICT.json", "slabs.json"})
_PLACE = frozenset({"layer", "tp", "rank"})
"""What a file of ours says in its `__metadata__` of where it belongs: no longer true of another file."""
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".gguf", ".onnx", ".h5", ".msgpack")


@dataclass(frozen=True, slots=True)
class CarriedShard:
    """A source shard in the output, under its own name. `as_is`: byte for byte; else `entries` under a new header."""

    file: str
    size: int
    entries: tuple[TensorEntry, ...]
    metadata: Mapping[str, str]
    as_is: bool


def custom_metadata(checkpoint: Checkpoint, files: set[str]) -> dict[str, str]:
    """The shards' own `__metadata__`, merged; where two give a key, the first file by name counts."""
    merged: dict[str, str] = {}
    for file in sorted(files):
        merged = {**checkpoint.headers[file].metadata, **merged}
    return {key: value for key, value in merged.items() if key not in _PLACE}


def carried_shards(checkpoint: Checkpoint, leaving: Collection[str]) -> Iterator[CarriedShard]:
    for file in sorted(checkpoint.headers):
        header = checkpoint.headers[file]
        entries = tuple(entry for name, entry in header.tensors.items() if name not in leaving)
        if entries:
            # Readers want "format": "pt" and data on an 8-byte boundary: a shard without them gets a new header.
            is_sound = header.metadata.get("format") == "pt" and header.data_start % 8 == 0
            as_is = is_sound and len(entries) == len(header.tensors)
            yield CarriedShard(file, header.size, entries, {**header.metadata, "format": "pt"}, as_is)


def small_files(checkpoint: Checkpoint, target: str, *, drop_mtp: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Files carried beside the weights, and those left out. Sidecars and tier maps describe shards as the source has them."""
    describing = set(_OURS | _SEALS)
    stays_r7 = target == "r7" and checkpoint.r7 is not None
    for layer in checkpoint.experts.values():
        is_gone = drop_mtp and not checkpoint.mtp.names.isdisjoint(layer.tensors)
        if not stays_r7 or is_gone:
            describing |= set(sidecar_names(layer))
    if checkpoint.tail is not None and checkpoint.tail.map_file is not None and not stays_r7:
        describing.add(checkpoint.tail.map_file)
    files, left_out = [], [*checkpoint.left_out, *checkpoint.foreign]
    for name in checkpoint.sizes:
        if name.endswith(SHARD) or name in describing:
            continue
        if name.lower().endswith(_OTHER_WEIGHTS) or not is_plain_name(name):
            left_out.append(name)
        else:
            files.append(name)
    return tuple(files), tuple(sorted(left_out))
