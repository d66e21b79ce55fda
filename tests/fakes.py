"""Encoders that cost nothing, for tests of what happens around them: trellises are drawn from the seed, any words decode."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor

from r7convert import codec, devices


class FakeEncoder:
    """Stands in for `encode_matrix`; `calls` has (name, bits, seed) of each call."""

    def __init__(self, slow_s: float = 0.0) -> None:
        self.calls: list[tuple[str, int, int]] = []
        self.slow_s = slow_s

    def encode_matrix(self, weight: Tensor, *, bits: int, seed: int, name: str = "weight", **_: Any) -> codec.Encoded:
        self.calls.append((name, bits, seed))
        time.sleep(self.slow_s)
        rows, cols = weight.shape
        generator = torch.Generator().manual_seed(seed)
        trellis = torch.randint(-(1 << 15), 1 << 15, (rows // 16, cols // 16, 16 * bits), generator=generator).to(torch.int16)
        suh, svh = torch.full((rows,), 0.01).half(), torch.ones(cols).half()
        return codec.Encoded(trellis, suh, svh, bits, 0.0003, 0.0003, (0, 0.0004))


@pytest.fixture
def fake_encoder(monkeypatch: pytest.MonkeyPatch) -> FakeEncoder:
    fake = FakeEncoder()
    monkeypatch.setattr(devices, "encode_matrix", fake.encode_matrix)
    return fake
