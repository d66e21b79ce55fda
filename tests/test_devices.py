"""Devices: which there are, a pool that keeps all of them busy, and layers by turns; the GPUs are pretended, the pool is not."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from r7convert import codec, devices, kernels
from r7convert.devices import find_devices, seconds_to_encode, work_on
from r7convert.errors import ResourceError
from r7convert.repack import repack
from tests.folders import contents, sample


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Four GPUs that torch believes in; what is done on them is done on the CPU, and noted as (device, thread)."""
    seen: list[tuple[str, int]] = []

    @contextlib.contextmanager
    def at_work_on(device: torch.device) -> Iterator[None]:
        seen.append((str(device), threading.get_ident()))
        yield

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(devices, "at_work_on", at_work_on)
    return seen


def test_every_gpu_or_the_one_of_this_rank_or_the_cpu(four_gpus: object, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [str(d) for d in find_devices("auto")] == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    assert [str(d) for d in find_devices("cuda", local_rank=2)] == ["cuda:2"]
    assert [str(d) for d in find_devices("auto", local_rank=5)] == ["cuda:1"]
    assert [str(d) for d in find_devices("cuda:3")] == ["cuda:3"]
    assert [str(d) for d in find_devices("cpu", local_rank=1)] == ["cpu"]
    for wrong in ("cuda:4", "gpu", "cuda:x", ""):
        with pytest.raises(ResourceError, match="expected auto, cpu, cuda or cuda:N"):
            find_devices(wrong)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert [str(d) for d in find_devices("auto")] == ["cpu"]
    with pytest.raises(ResourceError, match="with 0 CUDA devices here"):
        find_devices("cuda")


def test_the_pool_keeps_all_devices_busy(four_gpus: list[tuple[str, int]]) -> None:
    everyone = threading.Barrier(8, timeout=20)  # two jobs for each of four GPUs: passed only if all run at once

    def work(job: int, device: torch.device) -> str:
        everyone.wait()
        return f"{job} on {device}"

    done = dict(work_on(find_devices("auto"), range(16), work))
    assert sorted(done) == list(range(16))
    assert Counter(name for name, _ in four_gpus) == {f"cuda:{n}": 4 for n in range(4)}


def test_the_first_error_ends_the_pool() -> None:
    started = []

    def work(job: int, device: torch.device) -> int:
        started.append(job)
        if job == 2:
            raise ValueError("job 2")
        return job

    with pytest.raises(ValueError, match="job 2"):
        list(work_on([torch.device("cpu")], range(100), work))
    assert started == [0, 1, 2]


def test_layers_of_a_lift_take_the_devices_by_turns(
    four_gpus: list[tuple[str, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drawn(trellis: torch.Tensor, *, bits_from: int, bits_to: int) -> codec.Reencoded:
        return codec.Reencoded(torch.zeros(*trellis.shape[:2], 16 * bits_to, dtype=torch.int16), bits_to, 0.5)

    monkeypatch.setattr(devices, "reencode_matrix", drawn)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *_: self)  # no such device: the tensor stays where it is
    source = sample(tmp_path / "s", hidden=128, intermediate=128, mtp="none", layers=9, experts=2)
    choices = {"target": "rank-sliced", "tp": 1, "mixed_k": "lift"}
    made = repack(source, tmp_path / "o", device="auto", **choices)
    assert {name for name, _ in four_gpus} == {"cuda:0", "cuda:1", "cuda:2", "cuda:3"}
    assert len(four_gpus) == made.plan.reencoded
    repack(source, tmp_path / "one", device="cuda:0", **choices)
    assert contents(tmp_path / "o") == contents(tmp_path / "one")


def test_the_estimate_is_matrices_times_tiles_over_the_devices_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    speed = {4: 100.0, 5: 50.0}
    monkeypatch.setattr(devices, "tiles_per_s", lambda device, bits: speed[bits])
    two = [torch.device("cpu"), torch.device("cpu")]
    assert seconds_to_encode({(3, 4): 10, (3, 5): 1, (4, 5): 1}, 20, two) == 10 * 20 / 200 + 2 * 20 / 100
    assert seconds_to_encode({}, 20, two) == 0


def test_where_memory_runs_out_halves_are_searched_down_to_one_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """The card is pretended, the search is not: what fits in smaller batches comes out the same to the bit."""
    real, sizes = kernels.search_tiles, []
    tiles = torch.randn(33, 256, generator=torch.Generator().manual_seed(1))
    due = real(tiles, bits=4)

    def card(most: int) -> None:
        def search_tiles(tiles: torch.Tensor, *, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
            sizes.append(len(tiles))
            if len(tiles) > most:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore words.")
            return real(tiles, bits=bits)

        monkeypatch.setattr(kernels, "search_tiles", search_tiles)

    for most in (33, 9, 1):
        card(most)
        sizes.clear()
        states, error = devices.search_tiles(tiles, bits=4)
        assert torch.equal(states, due[0])
        assert torch.equal(error, due[1])
        assert sum(size for size in sizes if size <= most) == 33
    assert sizes[:3] == [33, 17, 9]

    card(0)
    matrix = torch.randn(128, 128, generator=torch.Generator().manual_seed(2))
    with pytest.raises(ResourceError, match=r"^cpu: out of memory: expected room for one matrix, got CUDA out of memory. Tried .* 2 GiB. "):
        list(work_on([torch.device("cpu")], [0], lambda _, __: devices.encode_matrix(matrix, bits=4, seed=1, name="m")))
    assert sizes[-1] == 1, "it went down to one tile before it gave up"
