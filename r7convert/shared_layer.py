"""One layer's shared expert: weights read, encoded, measured, and written as a shard of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from r7convert import codec, devices, kernels
from r7convert.checkpoint import Checkpoint
from r7convert.errors import FormatError, InputError, UnsupportedError, complain
from r7convert.format import TILE, TensorEntry
from r7convert.shared_plan import Outcome, SharedLayer, SharedPart, stored_fields
from r7convert.store import FileRecord, WholeFile, encode_header

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Json = Any


def encode_layer(
    layer: SharedLayer,
    weights: Checkpoint,
    place: Path,
    *,
    bits: int,
    device: torch.device,
    min_snr: float | None,
    keep_failures: bool,
) -> tuple[Outcome, FileRecord | None]:
    """Encode the parts of a layer and write them to `place`; no file where none of them could be encoded.

    Raises:  FormatError or UnsupportedError for a part that cannot be encoded, unless `keep_failures`.
    """
    stored: dict[str, Tensor] = {}
    figures: dict[str, Json] = {}
    kept: dict[str, str] = {}
    shapes: list[tuple[str, str, Sequence[int]]] = []
    for part in layer.parts:
        try:
            tensors, measured = encode_part(part, read_weight(part, weights), bits=bits, device=device)
            _check_snr(part, measured, min_snr)
        except InputError as error:
            if not keep_failures:
                raise
            kept |= dict.fromkeys(part.modules, str(error))
            continue
        stored |= tensors
        figures |= measured
        for module, weight in zip(part.modules, part.weights, strict=True):
            shapes += stored_fields(module, weight.shape, bits)
    outcome = Outcome(figures, kept)
    if not stored:
        return outcome, None
    shapes.sort(key=lambda tensor: tensor[0].endswith(".mcg"))  # markers last, so that every other tensor stays aligned
    with WholeFile(place) as file:
        file.write(encode_header(shapes, {"format": "pt"}, place))
        for name, _, _ in shapes:
            file.write(stored[name].contiguous().cpu().numpy().tobytes())
    return outcome, file.whole_record


def read_weight(part: SharedPart, weights: Checkpoint) -> list[Tensor]:
    """The weights of a part, [out, in] each, in their own dtype."""
    return [read_tensor(entry, weights) for entry in part.weights]


def read_tensor(entry: TensorEntry, checkpoint: Checkpoint) -> Tensor:
    import torch

    dtype = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[entry.dtype]
    raw = bytearray(checkpoint.source.read(entry.file, entry.offset, entry.nbytes))
    return torch.frombuffer(raw, dtype=dtype).view(entry.shape)


def encode_part(
    part: SharedPart, weights: Sequence[Tensor], *, bits: int, device: torch.device
) -> tuple[dict[str, Tensor], dict[str, Json]]:
    """Encode a part as one matrix and cut it into its modules: tensors by name, and the figures of each module.

    Units:   proxy_error is the part's, in the rotated space; relative_error and worst_column are the module's own, squared, in
             weight space, measured on what a reader decodes.
    Raises:  FormatError for weights that are not finite, UnsupportedError for a scale that float16 cannot hold.
    """
    import torch

    for module, weight in zip(part.modules, weights, strict=True):
        if not weight.isfinite().all():
            where = (~weight.isfinite()).nonzero()
            first = where[0].tolist()
            raise FormatError(complain(f"{module}.weight", f"{len(where)} weights are not finite, the first at [out, in] = {first}"))
    merged = torch.cat([weight.to(device) for weight in weights]).t()
    made = devices.encode_matrix(merged, bits=bits, seed=codec.module_seed(part.name), name=part.name)
    tensors: dict[str, Tensor] = {}
    figures: dict[str, Json] = {}
    at = 0
    for module, weight in zip(part.modules, weights, strict=True):
        end = at + weight.shape[0]
        trellis, svh = made.trellis[:, at // TILE : end // TILE].contiguous(), made.svh[at:end]
        tensors |= {f"{module}.trellis": trellis, f"{module}.suh": made.suh, f"{module}.svh": svh, f"{module}.mcg": made.mcg}
        if len(weights) == 1:
            relative, worst = made.relative_error, made.worst_column
        else:
            decoded = kernels.decode_matrix(trellis, made.suh, svh, bits=bits)
            relative, worst = weight_error(merged[:, at:end].float(), decoded)
        figures[module] = {
            "from": str(weight.dtype).removeprefix("torch."),
            "bits": bits,
            "seed_name": part.name,
            "proxy_error": made.proxy_error,
            "relative_error": relative,
            "worst_column": list(worst),
        }
        at = end
    return tensors, figures


def weight_error(weight: Tensor, decoded: Tensor) -> tuple[float, tuple[int, float]]:
    """Relative squared error of a decoded weight [in, out], and the output channel whose own is worst."""
    import torch

    energy = codec.tree_sum(weight.double().square(), 0)
    lost = codec.tree_sum((weight.double() - decoded.double()).square(), 0)
    of_column = torch.where(energy > 0, lost / energy, 0.0)
    worst = int(of_column.argmax())
    whole = float(codec.tree_sum(energy, 0))
    return (float(codec.tree_sum(lost, 0)) / whole if whole else 0.0), (worst, float(of_column[worst]))


def snr_db(relative_error: float) -> float:
    return -10 * math.log10(relative_error) if relative_error > 0 else math.inf


def _check_snr(part: SharedPart, figures: Mapping[str, Json], least: float | None) -> None:
    for module, measured in figures.items():
        snr = snr_db(measured["relative_error"])
        if least is not None and snr < least:
            raise UnsupportedError(complain(module, "signal to noise", expected=f"at least {least:g} dB", found=f"{snr:.2f} dB"))
