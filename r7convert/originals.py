"""BF16 originals of the routed experts, brought into the order of channels that the payload has.

A producer may permute an expert's intermediate channels, the same for gate, up and down. Where the layer's sidecar has
`permutation`, {"<expert>": [channel of the original, for each channel of the payload]}, it holds. Where it has none the
originals are tried as they are; where they do not match so, each payload channel is looked up among the original's, which is
certain as long as encoding left most of a channel's direction alone. Originals that do not match the payload in the end, being
those of another model or of another revision, are refused by name.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from r7convert import codec, kernels
from r7convert.checkpoint import Checkpoint
from r7convert.errors import FormatError, Offences, UnsupportedError, complain
from r7convert.format import PROJECTIONS, expert_module, is_int
from r7convert.moves import LayerPlan
from r7convert.sidecars import sidecar_names

if TYPE_CHECKING:
    from torch import Tensor

Json = Any

LEAST_CORRELATION = 0.9
"""Of a decoded payload with its original: 0.99 at K3 on Gaussian weights, about 0 for another matrix or another order."""
DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


class Originals:
    """A checkpoint with `{root}.{L}.mlp.experts.{E}.{proj}.weight` [out, in], for the experts of `payload`.

    Raises:  UnsupportedError if it lacks weights, or has them in another form, for layers that are to be encoded again.
    """

    def __init__(self, checkpoint: Checkpoint, payload: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.payload = payload
        self._found: dict[tuple[int, int], Tensor | None] = {}  # (layer, expert) -> permutation, None for none
        self._lock = threading.Lock()

    def identity(self) -> Json:
        """Which originals, for manifest and journal."""
        source = self.checkpoint.source
        return {"repo": source.repo, "commit": source.commit, "headers_sha256": self.checkpoint.headers_sha256}

    def check(self, layers: Sequence[LayerPlan]) -> None:
        """Every weight that will be asked for is there, in a form that can be read: before anything is written."""
        bad = Offences()
        for layer in layers:
            for expert, (old, new) in enumerate(zip(layer.source.bits, layer.bits, strict=True)):
                for proj, a, b in zip(PROJECTIONS, old, new, strict=True):
                    name = self._name(layer, expert, proj)
                    entry = self.checkpoint.tensors.get(name)
                    g = layer.geometry
                    shape = (g.hidden, g.intermediate) if proj == "down_proj" else (g.intermediate, g.hidden)
                    if a == b:
                        continue
                    if entry is None:
                        bad.add(f"--reference: {name}", "missing weight", expected=f"{list(shape)}", found="none")
                    elif entry.dtype not in DTYPES or entry.shape != shape:
                        found = f"{entry.dtype} {list(entry.shape)}"
                        bad.add(f"--reference: {name}", "weight", expected=f"{' or '.join(DTYPES)} {list(shape)}", found=found)
        bad.check(UnsupportedError)

    def weight(self, layer: LayerPlan, expert: int, proj: str, payload: codec.Matrix) -> Tensor:
        """The original of one matrix, [in, out] float32 on the payload's device, channels in the payload's order.

        Raises:  UnsupportedError if it does not match the payload.
        """
        weight = self._read(self._name(layer, expert, proj)).to(payload.trellis.device).float().t()
        decoded = kernels.decode_matrix(payload.trellis, payload.suh, payload.svh, bits=payload.bits)
        inner = 0 if proj == "down_proj" else 1
        key = (layer.layer, expert)
        with self._lock:
            known, order = key in self._found, self._found.get(key)
        if not known:
            order = self._stated(layer, expert)
            if order is None and correlation(decoded, weight) < LEAST_CORRELATION:
                order = match_channels(decoded, weight, inner)
            with self._lock:
                self._found[key] = order
        if order is not None:
            weight = weight.index_select(inner, order.to(weight.device))
        found = correlation(decoded, weight)
        if found < LEAST_CORRELATION:
            where = expert_module(layer.source.root, layer.layer, expert, proj)
            do = "Are these the originals of this checkpoint? Leave out --reference to encode from the payload."
            what = "correlation of the original with the payload"
            raise UnsupportedError(complain(where, what, expected=f"at least {LEAST_CORRELATION}", found=f"{found:.3f}", do=do))
        return weight

    def _name(self, layer: LayerPlan, expert: int, proj: str) -> str:
        """By the payload's root, or the plain one where the originals are no vision wrapper."""
        name = f"{expert_module(layer.source.root, layer.layer, expert, proj)}.weight"
        plain = f"{expert_module('model.layers', layer.layer, expert, proj)}.weight"
        return name if name in self.checkpoint.tensors or plain not in self.checkpoint.tensors else plain

    def _read(self, name: str) -> Tensor:
        import torch

        entry = self.checkpoint.tensors[name]
        raw = bytearray(self.checkpoint.source.read(entry.file, entry.offset, entry.nbytes))
        return torch.frombuffer(raw, dtype=getattr(torch, DTYPES[entry.dtype])).view(entry.shape)

    def _stated(self, layer: LayerPlan, expert: int) -> Tensor | None:
        """The sidecar's permutation of an expert, checked.

        Raises:  FormatError.
        """
        import torch

        size = layer.geometry.intermediate
        for name in sidecar_names(layer.source):
            sidecar = self.payload.source.json(name) if name in self.payload.sizes else {}
            stated = sidecar.get("permutation") if isinstance(sidecar, dict) else None
            order = stated.get(str(expert)) if isinstance(stated, dict) else None
            if order is None:
                continue
            if not isinstance(order, list) or not all(is_int(n) for n in order) or sorted(order) != list(range(size)):
                raise FormatError(
                    complain(f"{name}: permutation: {expert}", "channels", expected=f"each of 0..{size - 1} once", found="not")
                )
            return torch.tensor(order)
        return None


def correlation(a: Tensor, b: Tensor) -> float:
    """Cosine of two matrices taken as vectors; 0 where one is zero."""
    a, b = a.flatten().double(), b.flatten().double()
    length = float(a.norm() * b.norm())
    return float(a @ b) / length if length else 0.0


def match_channels(decoded: Tensor, original: Tensor, dim: int) -> Tensor | None:
    """For each payload channel along `dim` the original's channel that points the same way, or None if that is no permutation."""
    a, b = decoded.movedim(dim, 0), original.movedim(dim, 0)
    likeness = (a / a.norm(dim=1, keepdim=True).clamp(min=1e-30)) @ (b / b.norm(dim=1, keepdim=True).clamp(min=1e-30)).t()
    order = likeness.argmax(dim=1)
    return order if len(order.unique()) == len(order) else None
