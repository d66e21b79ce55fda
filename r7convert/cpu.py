"""The trellis search on the CPU: trellis.search_tiles about a hundred times faster, with the same result.

*The step.* All 65,536 states are tried at every step, 16 to a vector register, with no branch and no argmin: the node
costs of every step are kept, and the way back recomputes the 2^K candidates of the one node that it stands on. Numba's
own vectoriser does this for some K and not for others, so `_relax` spells the vectors out for LLVM. They are plain
subtractions, multiplications, additions and compares in the truth's order: the same bits on every machine. Pruning was
tried on paper and left: on average 2 of a node's 2^K candidates can still win, but finding out which costs more than
the 4 instructions that try 16 of them.

*The second pass goes on where the first ended.* The first pass starts free at position 128 and its best path chooses
the closing node, where position 0 begins; the second is the best path from that node to itself. Instead of starting
it over, the first pass runs on around the ring, over positions 128 to 255 again. Where the path to the closing node
then came through the closing node, it is the second pass's path: 384 steps, not 512. Where it did not (23, 14, 9 and
2% of Gaussian tiles at K3 to K6) the second pass is run as the truth runs it.

*Threads.* Tiles are independent and compiled code holds no lock: as many threads as torch uses, some tiles at a time.

What can differ from the truth: sums that the second pass would begin at 0 begin at the first pass's costs, so float32
rounds them elsewhere, and two paths within a millionth of each other may change places.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from . import trellis

_TASK_TILES = 32  # a twentieth of a second: threads end together, Ctrl-C is heard
_LANES = 16
_STEPS = 384  # once around the ring from position 128, and from there to position 255 again


def search_tiles(tiles: Tensor, *, bits: int) -> tuple[Tensor, Tensor]:
    """Find the states whose codebook values come closest to the given weights; as trellis.search_tiles, on CPU tensors.

    The squared error of a tile is at most 1.00001 of the truth's, and the states are the truth's but for ties.

    Shapes:  tiles [n, 256] float32, finite, in stream order; returns states [n, 256] int32 and the squared error
             [n] float64.
    Raises:  FormatError on another shape or dtype, or a weight that is not finite.
    Source:  FORMAT.md section 10, "Encoding".
    """
    trellis.check_search(tiles, bits)
    x = tiles.contiguous().numpy()
    states = np.empty(x.shape, dtype=np.int32)
    lossy = np.zeros(len(x), dtype=np.bool_)
    values, lanes = _values(bits)

    def search(task: slice) -> None:
        costs = torch.empty(_STEPS + 1, trellis.STATES >> bits).numpy()
        _search(bits, x[task], values, lanes, costs, states[task], lossy[task])

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        running = [pool.submit(search, slice(first, first + _TASK_TILES)) for first in range(0, len(x), _TASK_TILES)]
        try:
            for task in running:
                task.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    found = torch.from_numpy(states)
    if lossy.any():  # a closed path of zero error may exist through another node: the truth tries them all
        again = torch.from_numpy(lossy)
        found[again], _ = trellis.search_tiles(tiles[again], bits=bits)
    return found, trellis.squared_error(tiles, found)


@lru_cache(maxsize=8)
def _values(bits: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The codebook in state order, and in the order in which a step reads it."""
    values = trellis.codebook("cpu").float().numpy()
    return values, _in_lanes(values, bits)


def _span(bits: int) -> int:
    """How many nodes a step works on at a time: 4 vectors, or one group where that is larger."""
    return max(4 * _LANES, 1 << bits)


def _in_lanes(values: np.ndarray[Any, Any], bits: int) -> np.ndarray[Any, Any]:
    """Values as [span of nodes, branch, node in span]; where a vector holds several groups, their nodes take turns in it."""
    branches, span = 1 << bits, _span(bits)
    together = max(1, _LANES // branches)
    lanes = values.reshape(branches, -1, span // _LANES, together, _LANES // together).swapaxes(3, 4)
    # torch's memory begins at a multiple of 64, numpy's at 16: vectors across two cache lines cost K6 a fifth of its speed.
    return torch.from_numpy(lanes.swapaxes(0, 1).copy()).clone().view(-1).numpy()


def _write_relax(typing: Any, bits: Any, x: Any, cost: Any, lanes: Any, new: Any) -> Any:
    """new[v] = min over branches a of cost[a, v >> K] + (x - value[a, v])^2, for all nodes v; K is a literal.

    The 2^K nodes that share v >> K, a group, have the same 2^K predecessors. The best costs of some nodes stay in
    registers while the branches pass: each time one load spreads the group's cost over the lanes, of two groups at K3,
    whose nodes take turns in a vector so that one load can. IEEE arithmetic, nothing fused, nothing reordered.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        branches, span = 1 << bits.literal_value, _span(bits.literal_value)
        nodes = trellis.STATES // branches
        together = max(1, _LANES // branches)
        unrolled = min(8, branches)
        vector = ir.VectorType(ir.FloatType(), _LANES)
        few = ir.VectorType(ir.FloatType(), together)
        arrays = zip(signature.args[2:], arguments[2:], strict=True)
        cost_at, lanes_at, new_at = (context.make_array(kind)(context, builder, argument).data for kind, argument in arrays)

        def number(value: int) -> Any:
            return ir.Constant(ir.IntType(64), value)

        def at(pointer: Any, index: Any, kind: Any) -> Any:
            return builder.bitcast(builder.gep(pointer, [index]), kind.as_pointer())

        def load(pointer: Any, index: Any, kind: Any) -> Any:
            loaded = builder.load(at(pointer, index, kind))
            loaded.align = 4
            return loaded

        def arranged(source: Any, order: list[int]) -> Any:
            mask = ir.Constant(ir.VectorType(ir.IntType(32), _LANES), order)
            return builder.shuffle_vector(source, ir.Constant(source.type, ir.Undefined), mask)

        single = ir.Constant(ir.VectorType(ir.FloatType(), 1), ir.Undefined)
        weight = arranged(builder.insert_element(single, arguments[1], ir.Constant(ir.IntType(32), 0)), [0] * _LANES)
        bests = [cgutils.alloca_once(builder, vector) for _ in range(span // _LANES)]
        with cgutils.for_range(builder, number(nodes // span)) as outer:
            first = builder.mul(outer.index, number(span))
            group = builder.mul(outer.index, number(span // branches))
            for best in bests:
                builder.store(ir.Constant(vector, [float("inf")] * _LANES), best)
            with cgutils.for_range(builder, number(branches // unrolled)) as inner:
                for nth in range(unrolled):
                    branch = builder.add(builder.mul(inner.index, number(unrolled)), number(nth))
                    node = builder.add(builder.mul(branch, number(nodes // branches)), group)
                    row = builder.add(builder.mul(first, number(branches)), builder.mul(branch, number(span)))
                    for k, best in enumerate(bests):
                        before = load(cost_at, builder.add(node, number(k * _LANES // branches)), few)
                        miss = builder.fsub(weight, load(lanes_at, builder.add(row, number(k * _LANES)), vector))
                        before = arranged(before, [lane % together for lane in range(_LANES)])
                        total = builder.fadd(before, builder.fmul(miss, miss))
                        least = builder.load(best)
                        builder.store(builder.select(builder.fcmp_ordered("<", total, least), total, least), best)
            in_order = [lane % branches * together + lane // branches if together > 1 else lane for lane in range(_LANES)]
            for k, best in enumerate(bests):
                place = at(new_at, builder.add(first, number(k * _LANES)), vector)
                builder.store(arranged(builder.load(best), in_order), place).align = 4
        return context.get_dummy_value()

    return types.void(bits, x, cost, lanes, new), generate


_relax: Any = intrinsic(prefer_literal=True)(_write_relax)


@njit(nogil=True, cache=True)
def _step(bits: Any, x: Any, cost: Any, lanes: Any, new: Any) -> None:
    if bits == 1:
        _relax(1, x, cost, lanes, new)
    elif bits == 2:
        _relax(2, x, cost, lanes, new)
    elif bits == 3:
        _relax(3, x, cost, lanes, new)
    elif bits == 4:
        _relax(4, x, cost, lanes, new)
    elif bits == 5:
        _relax(5, x, cost, lanes, new)
    elif bits == 6:
        _relax(6, x, cost, lanes, new)
    elif bits == 7:
        _relax(7, x, cost, lanes, new)
    else:
        _relax(8, x, cost, lanes, new)


@njit(nogil=True, cache=True)
def _back(bits: Any, x: Any, cost: Any, values: Any, node: Any) -> Any:
    """The state that won `node` in the step from `cost`: the lowest among equals."""
    nodes = cost.size
    least = np.float32(np.inf)
    won = node
    for state in range(node, values.size, nodes):
        miss = x - values[state]
        total = cost[state >> bits] + miss * miss
        if total < least:
            least = total
            won = state
    return won


@njit(nogil=True, cache=True)
def _walk_back(bits: Any, x: Any, costs: Any, values: Any, node: Any, last: Any, states: Any) -> Any:
    """Trace from `node` after step `last` - 1 back to before step 128; fills `states`, returns the node there."""
    for step in range(last - 1, 127, -1):
        position = (128 + step) & 255
        states[position] = _back(bits, x[position], costs[step], values, node)
        node = states[position] >> bits
    return node


@njit(nogil=True, cache=True)
def _search(bits: Any, tiles: Any, values: Any, lanes: Any, costs: Any, states: Any, lossy: Any) -> None:
    """Search some tiles; `lossy` marks those that a free path fits exactly and the closed path found does not.

    costs[step] are the node costs before that step, at position (128 + step) mod 256: step 128 is where the ring closes.
    """
    for tile in range(len(tiles)):
        x = tiles[tile]
        costs[0] = 0.0
        for step in range(_STEPS):
            _step(bits, x[(128 + step) & 255], costs[step], lanes, costs[step + 1])
        best = np.argmin(costs[256])
        bound = costs[256, best]
        closing = _walk_back(bits, x, costs, values, best, 256, states[tile])
        if _walk_back(bits, x, costs, values, closing, _STEPS, states[tile]) != closing:
            costs[128] = np.inf
            costs[128, closing] = 0.0
            for step in range(128, _STEPS):
                _step(bits, x[(128 + step) & 255], costs[step], lanes, costs[step + 1])
            _walk_back(bits, x, costs, values, closing, _STEPS, states[tile])
        if bound == 0:
            for position in range(256):
                if values[states[tile, position]] != x[position]:
                    lossy[tile] = True
