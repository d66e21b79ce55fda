"""The devices of this machine that numbers are worked out on: which, how fast, and a pool that keeps all of them busy.

`encode_matrix` and `reencode_matrix` are codec's, by the fastest search there is for the tensor's device, in smaller batches where
its memory runs out: the states of a tile do not depend on those beside it.
"""

from __future__ import annotations

import contextlib
import math
import queue
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, TypeVar

from r7convert.errors import ResourceError, complain

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from r7convert.codec import Encoded, Reencoded

J = TypeVar("J")
R = TypeVar("R")

_CALIBRATION_S = 0.25
_MOST_CALIBRATION_TILES = 1 << 15


def find_devices(choice: str = "auto", local_rank: int | None = None) -> list[torch.device]:
    """The devices to work on. "auto": every GPU, or the one of this rank; the CPU where there is none. "cuda": the same, but a
    GPU there must be. Any other name is torch's own ("cpu", "cuda:1").

    Raises:  ResourceError for a device that is not there.
    """
    import torch

    count = torch.cuda.device_count() if choice in ("auto", "cuda") or choice.startswith("cuda:") else 0
    if choice == "cpu" or (choice == "auto" and not count):
        return [torch.device("cpu")]
    if choice in ("auto", "cuda") and count:
        numbers = range(count) if local_rank is None else [local_rank % count]
        return [torch.device("cuda", number) for number in numbers]
    if choice.startswith("cuda:") and choice[5:].isdecimal() and int(choice[5:]) < count:
        return [torch.device(choice)]
    raise ResourceError(
        complain("--device", "device", expected="auto, cpu, cuda or cuda:N", found=f"{choice}, with {count} CUDA devices here")
    )


@contextlib.contextmanager
def at_work_on(device: torch.device) -> Iterator[None]:
    """Make `device` the current one of this thread.

    Raises:  ResourceError if its memory runs out inside.
    """
    import torch

    try:
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            yield
    except torch.OutOfMemoryError as error:
        do = "Close what else runs there, or choose another --device."
        said = str(error).partition("\n")[0].rstrip(".")
        raise ResourceError(complain(device, "out of memory", expected="room for one matrix", found=said, do=do)) from None


def work_on(devices: Sequence[torch.device], jobs: Iterable[J], work: Callable[[J, torch.device], R]) -> Iterator[tuple[J, R]]:
    """Run `work` on every job, each on a device of its own, and hand back results as they come.

    A GPU has two jobs at a time, so that one reads and writes while the other computes; the CPU, whose search uses every core,
    has one. The first error ends the run once the jobs at hand are done.
    """
    free: queue.SimpleQueue[torch.device] = queue.SimpleQueue()
    for turn in range(2):
        for device in devices:
            if turn == 0 or device.type == "cuda":
                free.put(device)
    seats = free.qsize()

    def run(job: J) -> R:
        device = free.get()
        try:
            with at_work_on(device):
                return work(job, device)
        finally:
            free.put(device)

    waiting = iter(jobs)
    running: dict[Future[R], J] = {}
    with ThreadPoolExecutor(seats) as pool:
        while True:
            for job in waiting:
                running[pool.submit(run, job)] = job
                if len(running) >= seats:
                    break
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(future), future.result()


def search_tiles(tiles: Tensor, *, bits: int) -> tuple[Tensor, Tensor]:
    """As codec.search_tiles. Where memory runs out both halves are searched one after the other, and so on down to one tile."""
    import torch

    from r7convert import kernels

    try:
        return kernels.search_tiles(tiles, bits=bits)
    except torch.OutOfMemoryError:
        if len(tiles) < 2:
            raise
    # Outside of `except`: the error holds the frames of what failed, and with them its memory.
    if tiles.is_cuda:
        torch.cuda.empty_cache()
    halves = [search_tiles(half, bits=bits) for half in tiles.tensor_split(2)]
    return torch.cat([states for states, _ in halves]), torch.cat([error for _, error in halves])


def encode_matrix(weight: Tensor, *, bits: int, seed: int, name: str) -> Encoded:
    """As codec.encode_matrix."""
    from r7convert import codec, kernels

    return codec.encode_matrix(
        weight, bits=bits, seed=seed, search=search_tiles, hadamard=kernels.hadamard_128, decode=kernels.decode_matrix, name=name
    )


def reencode_matrix(trellis: Tensor, *, bits_from: int, bits_to: int) -> Reencoded:
    """As codec.reencode_matrix."""
    from r7convert import codec

    return codec.reencode_matrix(trellis, bits_from=bits_from, bits_to=bits_to, search=search_tiles)


def tiles_per_s(device: torch.device, bits: int) -> float:
    """How many tiles a second the search does here, from a run of about a quarter of a second on random ones."""
    import torch

    generator = torch.Generator().manual_seed(bits)
    count = 16
    with at_work_on(device):
        search_tiles(torch.zeros(1, 256, device=device), bits=bits)  # compiles, which is not the search
        while True:
            tiles = torch.randn(count, 256, generator=generator).to(device)
            start = time.perf_counter()
            _, error = search_tiles(tiles, bits=bits)
            float(error[0])
            taken = time.perf_counter() - start
            if taken >= _CALIBRATION_S or count >= _MOST_CALIBRATION_TILES:
                return count / taken
            count *= 4


def seconds_to_encode(encodes: Mapping[tuple[int, int], int], tiles: int, work_on: Sequence[torch.device]) -> float:
    """How long so many matrices of `tiles` tiles take, (old K, new K) -> count, from a short run of the search at each new K."""
    speed = {new: sum(tiles_per_s(device, new) for device in work_on) for new in sorted({new for _, new in encodes})}
    return math.fsum(count * tiles / speed[new] for (_, new), count in encodes.items())
