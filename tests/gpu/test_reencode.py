"""Lift, originals and encode-shared on a GPU, each judged by verify. Every test here fails, rather than skips, without one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from r7convert import codec
from r7convert.checkpoint import read_checkpoint
from r7convert.encode_shared import encode_shared
from r7convert.format import PROJECTIONS
from r7convert.journal import read_manifest
from r7convert.repack import repack
from r7convert.verify import verify
from tests.folders import edited_json, sample

pytestmark = pytest.mark.gpu
CHOICES: dict[str, Any] = {"target": "rank-sliced", "tp": 2, "mixed_k": "lift", "device": "cuda"}


@pytest.fixture(autouse=True)
def needs_a_gpu() -> None:
    assert torch.cuda.is_available(), "these tests need a CUDA GPU"


def test_a_lift_and_shared_experts_pass_verify_and_come_out_the_same_twice(tmp_path: Path) -> None:
    source = sample(tmp_path / "s", hidden=512, intermediate=1024, tail_tp=2)
    for name in ("once", "twice"):
        repack(source, tmp_path / name, **CHOICES)
        assert encode_shared(tmp_path / name, device="cuda").devices == ("cuda:0",)
    verdict = verify(tmp_path / "once", source=source, tp=2)
    assert verdict.ok, verdict.failure_lines()
    assert verdict.parts[3].state == "passed"
    assert len(read_manifest(tmp_path / "once").facts["reencoded"]) > 5
    files = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("once", "twice")]
    del files[0]["VERDICT.json"]
    assert files[0] == files[1]


def test_originals_bring_a_lower_error(tmp_path: Path) -> None:
    """Originals off from the payload by the error of K3, channels reversed, which no sidecar says."""
    source = sample(tmp_path / "s", hidden=256, intermediate=512, mtp="none", layers=4)
    found = read_checkpoint(source)
    layer, dtypes = found.experts[3], {"I16": torch.int16, "F16": torch.float16}
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for expert, row in enumerate(layer.bits):
        for proj, bits in zip(PROJECTIONS, row, strict=True):
            entries = [layer.parts(expert, proj, field)[0] for field in ("trellis", "suh", "svh")]
            parts = [
                torch.frombuffer(bytearray(found.source.read(e.file, e.offset, e.nbytes)), dtype=dtypes[e.dtype]).view(e.shape)
                for e in entries
            ]
            weight = codec.decode_matrix(*parts, bits=bits)
            noise = torch.randn(weight.shape, generator=generator)
            weight = (weight + noise * (0.0174**0.5 * weight.norm() / noise.norm())).flip(0 if proj == "down_proj" else 1)
            weights[f"model.layers.3.mlp.experts.{expert}.{proj}.weight"] = weight.t().contiguous().bfloat16()
    (tmp_path / "bf16").mkdir()
    save_file(weights, tmp_path / "bf16" / "model.safetensors")
    shutil.copy(source / "config.json", tmp_path / "bf16")
    with edited_json(tmp_path / "bf16" / "config.json") as config:
        del config["quantization_config"]  # records of what is not there are refused
    repack(source, tmp_path / "o", reference=read_checkpoint(tmp_path / "bf16"), **CHOICES)
    stated = read_manifest(tmp_path / "o").facts["reencoded"]
    assert len(stated) > 3
    for said in stated.values():
        assert said["original_error"] == pytest.approx({4: 0.00453, 5: 0.00119}[said["to"]], rel=0.1)
        assert said["original_error_before"] == pytest.approx(0.0174, rel=0.1)
    assert verify(tmp_path / "o", source=source).ok
