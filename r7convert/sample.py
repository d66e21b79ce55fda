"""A small but complete checkpoint: what tests, the demo and benches convert when no real one is at hand. R7 unless asked otherwise.

Every kind of tensor and every JSON block of a published checkpoint is here, at a size that geometry alone decides: a few
MB by default, any number of GB when asked. Trellis words are random, which any decoder takes and which decode to the
codebook's own near-Gaussian values; vectors are signs times magnitudes that keep activations near one. Each tensor has its
own random stream, seeded by its name, and only raw generator words are used, so the bytes depend on the seed alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from r7convert.errors import UsageError, complain
from r7convert.format import MCG_MARKER, MUL1_MARKER
from r7convert.progress import Progress
from r7convert.sample_config import (
    TIER_MAP,
    config_json,
    index_json,
    older_quant_config,
    quantization_json,
    sidecar_json,
    storage_json,
    tier_map_json,
)
from r7convert.sample_shape import Sample, check_sample
from r7convert.sample_tensors import SampleTensor, plan_shards
from r7convert.store import FileRecord, WholeFile, encode_header, write_bytes, write_json

Words = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float32]

_CHUNK_WORDS = 1 << 18


def write_sample(folder: Path, *, progress: Progress | None = None, **choices: Any) -> Sample:
    """Write a sample checkpoint into a new or empty folder; `choices` are the fields of Sample. config.json comes last.

    Raises:  UsageError for a folder that holds something or a choice that cannot be; UnsupportedError for a tail tp that cuts
             a Hadamard block.
    Source:  FORMAT.md sections 2, 4 and 8, CASES.md "Fixture F0".
    """
    sample = Sample(**choices)
    check_sample(sample)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(complain(folder, "output", expected="a new or empty folder", found="something there", do="Choose another."))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        _write(folder, sample, progress or Progress())
    except BaseException:
        for path in folder.iterdir():  # it was empty: whatever is here is ours, and the same command must find it empty again
            path.unlink()
        raise
    return sample


def _write(folder: Path, sample: Sample, progress: Progress) -> None:
    shards = plan_shards(sample)
    progress.start(sum(t.nbytes for tensors in shards.values() for t in tensors), "sample")
    for shard, tensors in shards.items():
        # The safetensors library writes by falling dtype, then by name: expert 10 comes before expert 2, markers first.
        tensors.sort(key=lambda t: (("I32", "F32", "BF16", "F16", "I16").index(t.dtype), t.name))
        record, payload_sha256 = _write_shard(folder / shard, tensors, sample.seed, progress)
        if shard.startswith("r7-experts-"):
            write_json(folder / f"{Path(shard).stem}.json", sidecar_json(sample, shard, record, payload_sha256))
    everything = [t for tensors in shards.values() for t in tensors]
    write_json(folder / "model.safetensors.index.json", index_json(shards))
    _write_small_files(folder, sample.kind)
    quantization = quantization_json(sample, everything)
    if sample.kind == "exl3" and sample.storage:  # exllamav3 has the records in this file alone
        write_json(folder / "quantization_config.json", {**quantization, "tensor_storage": storage_json(sample, everything)})
    elif sample.kind != "exl3":
        write_json(folder / "quantization_config.json", quantization)
    if sample.hf_quant_config:
        write_json(folder / "hf_quant_config.json", older_quant_config())
    if (tiers := tier_map_json(sample)) is not None:
        write_json(folder / TIER_MAP, tiers)
    write_json(folder / "config.json", config_json(sample, quantization))
    progress.finish()


# ---- bytes ------------------------------------------------------------------------------------------------------------


def _payload(tensor: SampleTensor, seed: int) -> Iterator[bytes]:
    """The bytes of a tensor, in chunks of bounded size."""
    if tensor.dtype == "I32":
        yield (MUL1_MARKER if tensor.name.endswith(".mul1") else MCG_MARKER).to_bytes(4, "little", signed=True)
        return
    generator = np.random.SFC64(int.from_bytes(hashlib.sha256(f"{seed}/{tensor.stream}".encode()).digest()[:16], "little"))
    left = tensor.nbytes
    while left:
        words = np.asarray(generator.random_raw(min(_CHUNK_WORDS, -(-left // 8))), "<u8")
        chunk = words.tobytes() if tensor.dtype == "I16" else _encode(tensor, _gaussian(words))
        yield chunk[:left]
        left -= min(len(chunk), left)


def _gaussian(words: Words) -> Floats:
    """One near-normal value a word, mean 0 and deviation 1: the sum of its four 16-bit parts."""
    sums = words.view("<u2").reshape(-1, 4).sum(axis=1, dtype=np.int32)
    return np.asarray((sums - 131070) * (3**0.5 / 65536), np.float32)


def _encode(tensor: SampleTensor, normal: Floats) -> bytes:
    """Values in the tensor's dtype: vectors of EXL3 are signed and near their gain, norms near 1, weights Gaussian."""
    if tensor.dtype == "F16":
        return (np.copysign(1 + np.abs(normal) / 8, normal) * np.float32(tensor.gain)).astype("<f2").tobytes()
    if tensor.dtype == "F32":
        return (normal * np.float32(tensor.gain)).astype("<f4").tobytes()
    values = 1 + normal / 16 if len(tensor.shape) == 1 else normal * np.float32(tensor.gain)
    bits = np.asarray(values, "<f4").view("<u4")
    return bytes(np.asarray((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, "<u2").tobytes())


def _write_shard(path: Path, tensors: Sequence[SampleTensor], seed: int, progress: Progress) -> tuple[FileRecord, str]:
    payload = hashlib.sha256()
    with WholeFile(path) as file:
        file.write(encode_header([(t.name, t.dtype, t.shape) for t in tensors], {"format": "pt"}, path))
        for tensor in tensors:
            for chunk in _payload(tensor, seed):
                file.write(chunk)
                payload.update(chunk)
                progress.advance(len(chunk), path.stem)
    assert file.record is not None
    return file.record, payload.hexdigest()


def _write_small_files(folder: Path, kind: str) -> None:
    """The files around the weights, as stubs that their readers take."""
    words = {"<unk>": 0, "<eos>": 1, "hello": 2, "world": 3}
    tokenizer = {"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"}}
    write_json(folder / "tokenizer.json", tokenizer)
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"})
    write_json(folder / "generation_config.json", {"eos_token_id": 1, "temperature": 1.0})
    write_bytes(folder / "chat_template.jinja", b"{% for m in messages %}{{ m.content }}<eos>{% endfor %}\n")
    write_bytes(folder / "LICENSE", b"The sample's weights are random numbers: do with them what you like.\n")
    word = {"r7": "R7"}.get(kind, kind)
    page = f"---\nlicense: cc0-1.0\n---\n\n# An {word} sample\n\nRandom weights in the shape of an {word} checkpoint.\n"
    write_bytes(folder / "README.md", page.encode())
