"""Bits, states, values and the search, against FORMAT.md section 10 word by word."""

from __future__ import annotations

import pytest
import torch

from r7convert.errors import FormatError
from r7convert.trellis import (
    codebook,
    decode_tiles,
    from_tiles,
    pack_symbols,
    search_tiles,
    squared_error,
    to_tiles,
    unpack_states,
)

# K: first states, first words, last word, for the symbols (37*i + 11) mod 2^K
WORKED = {
    6: ("198b 62f0 bc15 057a", "7a7c 2f05 cd8f 4a4e", "52dd"),
    5: ("04cb 9970 2e15 c2ba", "af91 5c2b 3a23 2e9e", "1b2b"),
    4: ("c16b 16b0 6b05 b05a", "f49e b05a 7c16 38d2", "38d2"),
    3: ("7873 c398 1cc5 e62a", "0e62 62af 62af af0e", "0e62"),
}


def hexes(values: torch.Tensor) -> str:
    return " ".join(f"{v & 0xFFFF:04x}" for v in values.tolist())


def random_words(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randint(-32768, 32768, shape, dtype=torch.int16, generator=generator)


def test_codebook_has_the_worked_values_and_moments() -> None:
    values = codebook("cpu")
    states = torch.tensor([0, 1, 2, 3, 100, 12345, 32768, 65534, 65535])
    assert hexes(values[states].view(torch.int16)) == "3f60 304e ba13 3ab8 a620 b682 b915 bca2 3acd"
    wide = values.double()
    assert len(values) == 65536
    assert len(values.unique()) == 10746
    assert abs(wide.mean()) < 1e-4
    assert abs(wide.std() - 1.2441) < 1e-4
    assert wide.max() == -wide.min() == pytest.approx(3.9492, abs=1e-4)


@pytest.mark.parametrize("bits", WORKED)
def test_packing_has_the_worked_words(bits: int) -> None:
    words = pack_symbols((37 * torch.arange(256) + 11) % (1 << bits), bits=bits)
    states = unpack_states(words, bits=bits)
    first_states, first_words, last_word = WORKED[bits]
    assert hexes(states[:4]) == first_states
    assert hexes(words[:4]) == first_words
    assert hexes(words[-1:]) == last_word
    ring = torch.cat((states[-1:], states))
    assert torch.equal(((ring[:-1] << bits) | (ring[1:] & ((1 << bits) - 1))) & 0xFFFF, ring[1:])


@pytest.mark.parametrize("bits", range(1, 9))
def test_pack_and_unpack_are_inverse_on_random_words(bits: int) -> None:
    words = random_words(torch.Generator().manual_seed(bits), 3, 5, 16 * bits)
    states = unpack_states(words, bits=bits)
    assert states.shape == (3, 5, 256)
    assert torch.equal(pack_symbols(states, bits=bits), words)
    assert torch.equal(pack_symbols(states & ((1 << bits) - 1), bits=bits), words)


def test_positions_are_the_formula_of_the_page() -> None:
    weight = torch.arange(48 * 32).view(48, 32)
    tiles = to_tiles(weight)
    assert tiles.shape == (3, 2, 256)
    for i in range(256):
        lane, j = divmod(i, 8)
        row = 2 * (lane % 4) + (j & 1) + 8 * ((j >> 1) & 1)
        column = lane // 4 + 8 * (j >= 4)
        assert tiles[2, 1, i] == weight[32 + row, 16 + column]
    assert torch.equal(from_tiles(tiles), weight)


@pytest.mark.parametrize("bits", [3, 6])
def test_decoding_is_the_bit_string_read_by_hand(bits: int) -> None:
    trellis = random_words(torch.Generator().manual_seed(7), 2, 3, 16 * bits)
    decoded = decode_tiles(trellis, bits=bits)
    assert decoded.shape == (32, 48)
    assert decoded.dtype == torch.float16
    # Little-endian uint32, most significant bit first, as a string.
    words = trellis[1, 2].tolist()
    stream = "".join(f"{words[k + 1] & 0xFFFF:016b}{words[k] & 0xFFFF:016b}" for k in range(0, len(words), 2))
    for i in range(256):
        state = int("".join(stream[((i + 1) * bits - 16 + k) % len(stream)] for k in range(16)), 2)
        assert to_tiles(decoded)[1, 2, i] == codebook("cpu")[state]


@pytest.mark.parametrize("bits", range(1, 9))
def test_a_valid_stream_comes_back_without_loss(bits: int) -> None:
    words = random_words(torch.Generator().manual_seed(bits), 4, 16 * bits)
    tiles = codebook("cpu")[unpack_states(words, bits=bits)].float()
    states, error = search_tiles(tiles, bits=bits)
    assert error.tolist() == [0.0] * 4
    assert torch.equal(codebook("cpu")[states].float(), tiles)
    assert torch.equal(unpack_states(pack_symbols(states, bits=bits), bits=bits), states), "the path is not a ring"


def test_search_result_does_not_depend_on_batch_or_order() -> None:
    tiles = torch.randn(19, 256, generator=torch.Generator().manual_seed(0))
    states, error = search_tiles(tiles, bits=6)
    order = torch.randperm(19, generator=torch.Generator().manual_seed(1))
    again, error_again = search_tiles(tiles[order], bits=6)
    assert torch.equal(again, states[order])
    assert torch.equal(error_again, error[order])
    alone, error_alone = search_tiles(tiles[5:6], bits=6)
    assert torch.equal(alone[0], states[5])
    assert error_alone[0] == error[5]
    assert torch.equal(error, squared_error(tiles, states))


def test_bad_input_is_refused_by_name() -> None:
    with pytest.raises(FormatError, match=r"int16 \[..., 48\]"):
        unpack_states(torch.zeros(4, 64, dtype=torch.int16), bits=3)
    with pytest.raises(FormatError, match="1 to 8"):
        pack_symbols(torch.zeros(256, dtype=torch.int32), bits=9)
    with pytest.raises(FormatError, match="float32"):
        search_tiles(torch.zeros(1, 256, dtype=torch.float64), bits=3)
    tiles = torch.zeros(3, 256)
    tiles[1, 7] = torch.nan
    with pytest.raises(FormatError, match="tile 1: 1 weights"):
        search_tiles(tiles, bits=3)
    with pytest.raises(FormatError, match="multiples of 16"):
        to_tiles(torch.zeros(16, 24))
