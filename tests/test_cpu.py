"""The CPU search is the truth, faster: same states, same errors, on any number of threads."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch

from r7convert import cpu, trellis
from r7convert.errors import FormatError

# Relative squared error of one encode of Gaussian weights at the deviation that suits each K: FORMAT.md section 7.
SECTION_7 = {3: (1.17, 0.0174), 4: (1.12, 0.00453), 5: (1.07, 0.00119), 6: (0.98, 0.00032)}


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def gaussian(tiles: int, seed: int) -> torch.Tensor:
    return torch.randn(tiles, 256, generator=torch.Generator().manual_seed(seed))


def relative(error: torch.Tensor, tiles: torch.Tensor) -> float:
    return float(error.sum() / tiles.double().square().sum())


@pytest.mark.parametrize("bits", range(1, 9))
def test_a_valid_stream_comes_back_without_loss(bits: int) -> None:
    words = torch.randint(-32768, 32768, (40, 16 * bits), dtype=torch.int16, generator=torch.Generator().manual_seed(bits))
    tiles = trellis.codebook("cpu")[trellis.unpack_states(words, bits=bits)].float()
    states, error = cpu.search_tiles(tiles, bits=bits)
    assert error.max() == 0
    assert torch.equal(trellis.codebook("cpu")[states].float(), tiles)
    assert torch.equal(trellis.unpack_states(trellis.pack_symbols(states, bits=bits), bits=bits), states), "the path is not a ring"


@pytest.mark.parametrize("bits", range(1, 9))
def test_equals_the_truth(bits: int) -> None:
    # 12 tiles hold one at K3 (with a chance of 95%) whose ring does not close at first; odd scales, zeros, a spike.
    tiles = gaussian(12, bits) * torch.linspace(0.3, 1.6, 12)[:, None]
    tiles[3, 100:180] = 0.0
    tiles[4] = 0.0
    tiles[5, 17] = 30.0
    truth, truth_error = trellis.search_tiles(tiles, bits=bits)
    states, error = cpu.search_tiles(tiles, bits=bits)
    assert torch.all(error <= truth_error * 1.00001)
    assert (states == truth).all(1).sum() >= 11
    assert torch.equal(error, trellis.squared_error(tiles, states))
    assert torch.equal(trellis.unpack_states(trellis.pack_symbols(states, bits=bits), bits=bits), states)


@pytest.mark.parametrize("bits", SECTION_7)
def test_error_on_gaussian_tiles_is_section_7s(bits: int) -> None:
    deviation, figure = SECTION_7[bits]
    tiles = gaussian(512, 77) * deviation
    _, error = cpu.search_tiles(tiles, bits=bits)
    # The page gives K6 in two digits: half a unit of the last one.
    assert relative(error, tiles) == pytest.approx(figure, rel=0.01, abs=0.000005)


def test_lifting_and_lowering_cost_what_section_7_says() -> None:
    original = gaussian(256, 5)
    values = trellis.codebook("cpu").float()
    checked = 0
    for k_from, step_figures in {3: {4: 0.00439, 5: 0.00113}, 4: {5: 0.00114, 3: 0.0174}, 5: {4: 0.0045, 3: 0.0177}}.items():
        scale = SECTION_7[k_from][0]
        states, error = cpu.search_tiles(original * scale, bits=k_from)
        before = relative(error, original * scale)
        payload = values[states]
        for k_to, figure in step_figures.items():
            states, error = cpu.search_tiles(payload, bits=k_to)
            assert relative(error, payload) == pytest.approx(figure, rel=0.03)
            after = relative((values[states] - original * scale).double().square().sum(1), original * scale)
            assert after == pytest.approx(before + figure, rel=0.03), "errors of the two steps add up"
            checked += 1
    assert checked == 6


def test_result_does_not_depend_on_threads_batch_or_order() -> None:
    tiles = gaussian(70, 0)
    torch.set_num_threads(1)
    states, error = cpu.search_tiles(tiles, bits=4)
    torch.set_num_threads(2)
    order = torch.randperm(70, generator=torch.Generator().manual_seed(1))
    again, error_again = cpu.search_tiles(tiles[order], bits=4)
    assert torch.equal(again, states[order])
    assert torch.equal(error_again, error[order])
    alone, _ = cpu.search_tiles(tiles[69:], bits=4)
    assert torch.equal(alone[0], states[69])
    nothing, no_error = cpu.search_tiles(tiles[:0], bits=4)
    assert nothing.shape == (0, 256)
    assert no_error.shape == (0,)


def test_input_need_not_be_contiguous_and_is_not_touched() -> None:
    tiles = gaussian(256, 3)[:, :4].T.repeat(1, 1)
    wide = torch.stack((tiles, -tiles), dim=-1)
    before = wide.clone()
    states, _ = cpu.search_tiles(wide[..., 0], bits=6)
    assert torch.equal(states, cpu.search_tiles(tiles.contiguous(), bits=6)[0])
    assert torch.equal(wide, before)


@pytest.mark.parametrize("bits", [3, 6])
def test_extreme_weights_give_a_ring_and_no_nan(bits: int) -> None:
    tiles = torch.stack((torch.full((256,), 3e38), torch.full((256,), 1e-45), torch.full((256,), -1e20), torch.zeros(256)))
    states, error = cpu.search_tiles(tiles, bits=bits)
    assert error.isfinite().all()
    assert torch.equal(trellis.unpack_states(trellis.pack_symbols(states, bits=bits), bits=bits), states)


def test_weights_that_are_not_finite_are_refused() -> None:
    tiles = gaussian(2, 0)
    tiles[1, 3] = torch.inf
    with pytest.raises(FormatError, match="tile 1: 1 weights that are not finite"):
        cpu.search_tiles(tiles, bits=6)


def test_a_stream_survives_a_codebook_full_of_equal_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """At K4 with 16 distinct values the exact free paths branch without end, and the one found may not close."""
    coarse = torch.randint(0, 16, (65536,), generator=torch.Generator().manual_seed(3)).half()
    monkeypatch.setattr(trellis, "codebook", lambda device: coarse)
    values = coarse.float().numpy()
    monkeypatch.setattr(cpu, "_values", lambda bits: (values, cpu._in_lanes(values, bits)))
    words = torch.randint(-32768, 32768, (64, 64), dtype=torch.int16, generator=torch.Generator().manual_seed(0))
    tiles = coarse[trellis.unpack_states(words, bits=4)].float()

    handed_over = []
    truth = trellis.search_tiles
    monkeypatch.setattr(trellis, "search_tiles", lambda tiles, *, bits: handed_over.append(len(tiles)) or truth(tiles, bits=bits))
    states, error = cpu.search_tiles(tiles, bits=4)
    assert sum(handed_over) > 0, "no tile needed a second closing node: the test shows nothing"
    assert error.max() == 0
    assert torch.equal(trellis.unpack_states(trellis.pack_symbols(states, bits=4), bits=4), states)


def test_is_much_faster_than_the_truth() -> None:
    """One thread each, in one run, by processor time. bench_cpu_search.py measures about 90 at K6; half the vector width must pass too."""
    torch.set_num_threads(1)
    tiles = gaussian(96, 0)
    cpu.search_tiles(tiles[:1], bits=6)

    def rate(search: object, n: int) -> float:
        start = time.process_time()
        search(tiles[:n], bits=6)  # type: ignore[operator]
        return n / (time.process_time() - start)

    ratios = [rate(cpu.search_tiles, 96) / rate(trellis.search_tiles, 8) for _ in range(3)]
    assert max(ratios) > 25, ratios


def test_compiled_code_is_cached_for_the_next_process() -> None:
    script = (
        "import torch, r7convert.cpu as cpu; cpu.search_tiles(torch.zeros(1, 256), bits=3);"
        "print(sum(cpu._search.stats.cache_hits.values()), sum(cpu._search.stats.cache_misses.values()))"
    )
    cpu.search_tiles(torch.zeros(1, 256), bits=3)
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert result.stdout.split() == ["1", "0"]
