"""Routed experts encoded again at the K a policy chose: the recoder that repack asks, a layer at a time.

    from the payload      decode to codebook values, search at the new K; suh and svh stay
    from the originals    the BF16 weight in the payload's own rotated space (originals.py), searched at the new K; suh and svh stay

Every matrix is measured on the way. `relative_error` compares the new trellis with the one it replaces, in rotated space, as
verify does again with the codec: |new - old|^2 / |old|^2. With originals `original_error` compares both with the weight.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from r7convert import codec, devices, kernels
from r7convert.experts import HIDDEN_FIELD
from r7convert.format import PROJECTIONS, expected_shape, expert_module
from r7convert.moves import Axis, LayerPlan, Move
from r7convert.originals import Originals

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Json = Any
Bytes = NDArray[np.uint8]
Read = Callable[[Move], Bytes]


class Reencoder:
    """Encodes on the devices given, layers by turns; `facts` has the figures of every matrix of a layer."""

    def __init__(self, work_on: Sequence[torch.device], originals: Originals | None = None) -> None:
        self.originals = originals
        self.engine = work_on[0].type
        self.devices = len(work_on)
        self.reference: Json = None if originals is None else originals.identity()
        self._turns = itertools.cycle(work_on)
        self._turn = threading.Lock()
        # The CPU's search uses every core: two matrices at a time would only share them.
        self._alone = threading.Lock() if self.engine == "cpu" else contextlib.nullcontext()
        self._figures: dict[int, dict[str, Json]] = {}

    def recode(self, layer: LayerPlan, moves: Sequence[Move], read: Read) -> Iterator[Bytes]:
        with self._turn:
            device = next(self._turns)
            figures = self._figures[layer.layer] = {}
        for move in moves:
            assert move.expert is not None
            assert move.new_bits is not None
            with self._alone, devices.at_work_on(device):
                trellis, figure = self._matrix(layer, move, read, device)
            module = expert_module(layer.source.root, layer.layer, move.expert, move.proj)
            figures[module] = {"from": _old_bits(layer, move), "to": move.new_bits, **figure}
            yield trellis.cpu().numpy().view(np.uint8).reshape(-1)

    def facts(self, layer: int) -> Json:
        return self._figures.pop(layer)

    def _matrix(self, layer: LayerPlan, move: Move, read: Read, device: torch.device) -> tuple[Tensor, dict[str, float]]:
        bits, new_bits = _old_bits(layer, move), move.new_bits or 0
        old = read_trellis(layer, move, read).to(device)
        if self.originals is None:
            made = devices.reencode_matrix(old, bits_from=bits, bits_to=new_bits)
            return made.trellis, {"relative_error": made.relative_error}
        expert = move.expert or 0
        suh, svh = (_read_vector(layer, expert, move.proj, field, read).to(device) for field in ("suh", "svh"))
        payload = codec.Matrix(old, suh, svh, bits)
        weight = self.originals.weight(layer, expert, move.proj, payload)
        tiles = codec.to_tiles(to_rotated(weight, suh, svh))
        states, _ = devices.search_tiles(tiles.flatten(0, 1), bits=new_bits)
        trellis = kernels.pack_symbols(states, bits=new_bits).view(*tiles.shape[:2], 16 * new_bits)
        before, after = (kernels.decode_tiles(t, bits=k).float() for t, k in ((old, bits), (trellis, new_bits)))
        figure = {"relative_error": relative_error(before, after)}
        for key, t, k in (("original_error_before", old, bits), ("original_error", trellis, new_bits)):
            figure[key] = relative_error(weight, kernels.decode_matrix(t, suh, svh, bits=k))
        return trellis, figure


def to_rotated(weight: Tensor, suh: Tensor, svh: Tensor) -> Tensor:
    """A weight [in, out] in the space its trellis is searched in: H (weight / suh / svh) H. A scale of 0 stands for a row or
    column that is zero whatever the trellis says.
    """
    inverses = [(scale.double().reciprocal() * (scale != 0)).nan_to_num(posinf=0.0).float() for scale in (suh, svh)]
    return kernels.hadamard_128(kernels.hadamard_128(weight, dim=1, pre=inverses[1]), dim=0, pre=inverses[0])


def relative_error(before: Tensor, after: Tensor) -> float:
    """|before - after|^2 / |before|^2."""
    energy, lost = (float(codec.tree_sum(codec.tree_sum(x.double().square(), 0), 0)) for x in (before, before.double() - after.double()))
    return lost / energy if energy else 0.0


def read_trellis(layer: LayerPlan, move: Move, read: Read) -> Tensor:
    import torch

    shape = expected_shape(layer.geometry, move.proj, "trellis", _old_bits(layer, move))
    return torch.from_numpy(read(move).view(np.int16).reshape(shape))


def _read_vector(layer: LayerPlan, expert: int, proj: str, field: str, read: Read) -> Tensor:
    import torch

    axis: Axis = "whole" if field == HIDDEN_FIELD[proj] else "rows"
    move = Move(expert, proj, field, layer.source.parts(expert, proj, field), axis, 1)
    return torch.from_numpy(read(move).view(np.float16).copy())


def _old_bits(layer: LayerPlan, move: Move) -> int:
    return layer.source.bits[move.expert or 0][PROJECTIONS.index(move.proj)]
