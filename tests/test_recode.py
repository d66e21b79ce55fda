"""Matrices encoded again: lift and fit from end to end, originals with permuted channels, figures, deaths, what stays untouched."""

from __future__ import annotations

import json
import shutil
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from r7convert import codec, devices
from r7convert.checkpoint import Checkpoint, read_checkpoint
from r7convert.errors import FormatError, UnsupportedError, UsageError
from r7convert.format import PROJECTIONS
from r7convert.journal import MANIFEST, read_manifest
from r7convert.ktable import STEPS, Budget
from r7convert.mixed_k import KChoice, energies
from r7convert.originals import correlation, match_channels
from r7convert.recode import to_rotated
from r7convert.repack import repack
from r7convert.verify import verify
from tests.folders import contents, edited_json, sample
from tests.kill import at_every_step

SMALL = {"hidden": 128, "intermediate": 256, "mtp": "none", "experts": 4}


def convert(source: Path, output: Path, **choices: Any) -> Any:
    return repack(source, output, **{"target": "rank-sliced", "tp": 2, "mixed_k": "lift", "device": "cpu", **choices})


@pytest.fixture(scope="module")
def lifted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Any]:
    """A sample whose layers mix K, one of them K3 to K5, and its lift."""
    root = tmp_path_factory.mktemp("lifted")
    source = sample(root / "s", **SMALL)
    return source, root / "o", convert(source, root / "o")


def test_a_lift_has_one_k_an_expert_and_leaves_the_rest_alone(lifted: tuple[Path, Path, Any]) -> None:
    source, output, made = lifted
    before, after = contents(source), contents(output)
    stated = read_manifest(output).facts["reencoded"]
    changed = {name.removesuffix(".trellis") for name in before if before[name] != after[name]}
    assert changed == set(stated)
    assert len(changed) == made.plan.reencoded > 5
    old = read_checkpoint(source)
    for layer, found in read_checkpoint(output).experts.items():
        assert all(len(set(row)) == 1 for row in found.bits)
        assert len(found.tiers) <= 2
        for expert, (theirs, ours) in enumerate(zip(old.experts[layer].bits, found.bits, strict=True)):
            for proj, a, b in zip(PROJECTIONS, theirs, ours, strict=True):
                said = stated.get(f"model.layers.{layer}.mlp.experts.{expert}.{proj}")
                assert (said is None) == (a == b)
                assert said is None or (said["from"], said["to"]) == (a, b)


def test_errors_are_those_of_the_page(lifted: tuple[Path, Path, Any]) -> None:
    """The payload is Gaussian enough: the mean error of every step lies within 2% of FORMAT.md section 7."""
    _, output, _ = lifted
    by_step: dict[tuple[int, int], list[float]] = {}
    for said in read_manifest(output).facts["reencoded"].values():
        by_step.setdefault((said["from"], said["to"]), []).append(said["relative_error"])
    assert len(by_step) >= 2
    for step, errors in by_step.items():
        assert np.mean(errors) == pytest.approx(STEPS[step].step, rel=0.02), step


@pytest.mark.parametrize(("reader", "layout"), [("r14", "per_expert_v1"), ("r28", "shared_h_v1")])
def test_stock_readers_take_it(
    lifted: tuple[Path, Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: str, layout: str
) -> None:
    source, _, _ = lifted
    monkeypatch.setattr(devices, "reencode_matrix", drawn)
    convert(source, tmp_path / "o", reader=reader)
    assert read_manifest(tmp_path / "o").facts["rotation_layout"] == layout
    verdict = verify(tmp_path / "o", tp=2, reader=reader)
    assert verdict.ok, verdict.failure_lines()


def drawn(trellis: torch.Tensor, *, bits_from: int, bits_to: int) -> codec.Reencoded:
    """In place of the search: words drawn from the old ones."""
    seed = int(trellis.long().sum()) & 0xFFFF
    shape = (*trellis.shape[:2], 16 * bits_to)
    words = torch.randint(-(1 << 15), 1 << 15, shape, generator=torch.Generator().manual_seed(seed)).to(torch.int16)
    return codec.Reencoded(words, bits_to, 0.5)


def test_the_same_bytes_again(lifted: tuple[Path, Path, Any], tmp_path: Path) -> None:
    source, output, _ = lifted
    convert(source, tmp_path / "o", layers=(4, 4))
    for rank in range(2):
        name = f"experts-layer-004-rank-{rank}-of-2.safetensors"
        assert (tmp_path / "o" / name).read_bytes() == (output / name).read_bytes()


def test_lossless_layers_stay_what_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "reencode_matrix", drawn)
    source = sample(tmp_path / "s", **{**SMALL, "mode": "mixed,uniform", "mtp": "r7", "layers": 6, "dense": 3})
    convert(source, tmp_path / "lifted")
    convert(source, tmp_path / "alone", mixed_k="refuse", layers=(4, 4))
    stated = {int(module.split(".")[2]) for module in read_manifest(tmp_path / "lifted").facts["reencoded"]}
    assert stated == {3, 5}
    for rank in range(2):
        name = f"experts-layer-004-rank-{rank}-of-2.safetensors"
        assert (tmp_path / "lifted" / name).read_bytes() == (tmp_path / "alone" / name).read_bytes()


def test_three_k_a_layer_become_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "reencode_matrix", drawn)
    source = sample(tmp_path / "s", **{**SMALL, "mode": "three-k"})
    with pytest.raises(UnsupportedError, match="--mixed-k lift"):
        convert(source, tmp_path / "o", mixed_k="refuse")
    made = convert(source, tmp_path / "o")
    assert [len(layer.slabs.tiers) for layer in made.plan.layers] == [2, 2]
    assert verify(tmp_path / "o").ok


@pytest.mark.parametrize(("budget", "share"), [(Budget("share", Fraction(95, 100)), 0.95), (None, 1.0)])
def test_fit_keeps_its_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: Budget | None, share: float) -> None:
    monkeypatch.setattr(devices, "reencode_matrix", drawn)
    source = sample(tmp_path / "s", **SMALL)
    made = convert(source, tmp_path / "o", mixed_k="fit", budget=budget)
    old = sum(sum(map(sum, layer.source.bits)) for layer in made.plan.layers)
    new = sum(sum(map(sum, layer.bits)) for layer in made.plan.layers)
    assert new <= share * old
    facts = read_manifest(tmp_path / "o").facts
    assert facts["policy"]["name"] == "fit"
    assert facts["accounting"]["lowered"]["tensors"] > 0
    assert verify(tmp_path / "o").ok


def test_energies_are_those_of_the_weights(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(sample(tmp_path / "s", **{**SMALL, "mtp": "tail", "tail_tp": 2}))
    for layer in (3, 5):  # whole matrices with shared vectors, and rank-sliced ones with their own
        found = checkpoint.experts[layer]
        table = energies(checkpoint, found)
        for proj in ("up_proj", "down_proj"):
            weight = decoded(checkpoint, layer, 1, proj)
            truth = float(weight.double().square().sum())
            assert table[1, PROJECTIONS.index(proj)] == pytest.approx(truth, rel=0.02)


def test_importance_and_energy_move_the_choice(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(sample(tmp_path / "s", **SMALL))
    experts = {str(layer): [1.0, 1.0, 1.0, 1e6] for layer in (3, 4)}
    table = {}
    for name, importance in (("plain", None), ("weighed", experts)):
        choice = KChoice(checkpoint, "fit", Budget("share", Fraction(9, 10)), importance)
        from r7convert.plan import plan_repack

        plan = plan_repack(checkpoint, target="rank-sliced", tp=1, choose=choice)
        table[name] = [row[0] for layer in plan.layers for row in layer.bits]
        assert choice.problem is not None
        assert all(t.energy is not None for t in choice.problem.tables)
    assert table["plain"] != table["weighed"]
    assert table["weighed"][3] == max(checkpoint.experts[3].bits[3])


def test_a_dry_run_prices_every_policy_and_touches_nothing(tmp_path: Path) -> None:
    source = sample(tmp_path / "s", **SMALL)
    made = convert(source, tmp_path / "o", dry_run=True)
    assert not (tmp_path / "o").exists()
    prices = made.to_json()["prices"]
    assert set(prices) == {"lift", "fit"}
    assert prices["lift"]["lifted"] == made.plan.reencoded
    assert prices["lift"]["bytes_after"] > prices["lift"]["bytes_before"] >= prices["fit"]["bytes_after"]
    assert prices["lift"]["encode_s"] > 0
    json.dumps(made.to_json(), allow_nan=False)
    with pytest.raises(UnsupportedError, match=r"encoding here, --mixed-k lift: about \d+ s\nencoding here, --mixed-k fit"):
        convert(source, tmp_path / "o", mixed_k="refuse", dry_run=True)
    with pytest.raises(UsageError, match="--budget"):
        convert(source, tmp_path / "o", budget=Budget("bytes", Fraction(1)), dry_run=True)


def test_deaths_resume_to_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "reencode_matrix", drawn)
    source = sample(tmp_path / "s", **{**SMALL, "experts": 2})
    convert(source, tmp_path / "whole", threads=1)
    whole = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    out, deaths = tmp_path / "o", 0

    def fresh() -> None:
        shutil.rmtree(out, ignore_errors=True)

    for _ in at_every_step(monkeypatch, lambda: convert(source, out, threads=1), fresh=fresh, stride=6):
        deaths += 1
        convert(source, out)
        assert {path.name: path.read_bytes() for path in out.iterdir()} == whole
    assert deaths > 5


def test_figures_of_finished_layers_survive_a_death(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = sample(tmp_path / "s", **SMALL)
    calls: list[int] = []

    def dies(old: torch.Tensor, *, bits_from: int, bits_to: int) -> codec.Reencoded:
        calls.append(1)
        if len(calls) == most:
            raise KeyboardInterrupt
        return drawn(old, bits_from=bits_from, bits_to=bits_to)

    monkeypatch.setattr(devices, "reencode_matrix", dies)
    most = 1 << 30
    convert(source, tmp_path / "whole", threads=1)
    most, calls[:] = len(calls), []
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "o", threads=1)
    assert not (tmp_path / "o" / MANIFEST).exists()
    most, calls[:] = 1 << 30, []
    convert(source, tmp_path / "o", threads=1)
    assert 0 < len(calls) < len(read_manifest(tmp_path / "o").facts["reencoded"])
    assert read_manifest(tmp_path / "o").facts == read_manifest(tmp_path / "whole").facts


# ---- originals ------------------------------------------------------------------------------------------------------


def decoded(checkpoint: Checkpoint, layer: int, expert: int, proj: str) -> torch.Tensor:
    """A matrix of a checkpoint, ranks joined, as a weight [in, out]."""
    found = checkpoint.experts[layer]
    bits = found.bits[expert][PROJECTIONS.index(proj)]
    dtypes = {"I16": torch.int16, "F16": torch.float16}

    def whole(field: str, axis: int) -> torch.Tensor:
        parts = found.parts(expert, proj, field)
        read = [
            torch.frombuffer(bytearray(checkpoint.source.read(e.file, e.offset, e.nbytes)), dtype=dtypes[e.dtype]).view(e.shape)
            for e in parts
        ]
        return read[0] if field == ("svh" if proj == "down_proj" else "suh") else torch.cat(read, axis)

    return codec.decode_matrix(whole("trellis", 0 if proj == "down_proj" else 1), whole("suh", 0), whole("svh", 0), bits=bits)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[int, list[int]]]:
    """A payload of one layer, and BF16 weights that it could have been encoded from: off by about the error of K3, their
    intermediate channels in an order of their own for each expert."""
    root = tmp_path_factory.mktemp("originals")
    source = sample(root / "s", **{**SMALL, "layers": 4, "experts": 2})
    checkpoint = read_checkpoint(source)
    generator = torch.Generator().manual_seed(5)
    weights, orders = {}, {}
    for expert in range(2):
        order = torch.randperm(256, generator=generator)  # payload channel c is channel order[c] of the original
        orders[expert] = order.tolist()
        for proj in PROJECTIONS:
            weight = decoded(checkpoint, 3, expert, proj)
            noise = torch.randn(weight.shape, generator=generator)
            weight = weight + noise * (0.0174**0.5 * weight.norm() / noise.norm())
            inner = 0 if proj == "down_proj" else 1
            back = torch.empty_like(order)
            back[order] = torch.arange(256)
            weight = weight.index_select(inner, back)
            weights[f"model.layers.3.mlp.experts.{expert}.{proj}.weight"] = weight.t().contiguous().bfloat16()
    (root / "bf16").mkdir()
    save_file(weights, root / "bf16" / "model.safetensors")
    shutil.copy(source / "config.json", root / "bf16" / "config.json")
    with edited_json(root / "bf16" / "config.json") as config:
        del config["quantization_config"]
    return source, root / "bf16", orders


@pytest.mark.parametrize("stated", [False, True])
def test_originals_come_in_the_payloads_order(
    originals: tuple[Path, Path, dict[int, list[int]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stated: bool
) -> None:
    """With the sidecar's permutation, and without it by likeness; at K5 the result is nearer the original than the payload is."""
    source, reference, orders = originals
    shutil.copytree(source, tmp_path / "s")
    if stated:
        with edited_json(tmp_path / "s" / "r7-experts-layer-003.json") as sidecar:
            sidecar["permutation"] = {str(expert): order for expert, order in orders.items()}
        monkeypatch.setattr("r7convert.originals.match_channels", lambda *_: pytest.fail("the sidecar says it"))
    convert(tmp_path / "s", tmp_path / "o", reference=read_checkpoint(reference))
    facts = read_manifest(tmp_path / "o").facts
    assert len(facts["reencoded"]) >= 3
    for said in facts["reencoded"].values():
        assert said["original_error_before"] == pytest.approx(0.0174, rel=0.1)
        fresh = {4: 0.00453, 5: 0.00119}[said["to"]]
        assert said["original_error"] == pytest.approx(fresh, rel=0.1)
    assert facts["policy"]["reference"]["repo"] is None
    assert verify(tmp_path / "o").ok


def test_a_wrong_permutation_and_foreign_originals_are_refused_by_name(
    originals: tuple[Path, Path, dict[int, list[int]]], tmp_path: Path
) -> None:
    source, reference, orders = originals
    shutil.copytree(source, tmp_path / "s")
    sidecar_name = "r7-experts-layer-003.json"
    with edited_json(tmp_path / "s" / sidecar_name) as sidecar:
        sidecar["permutation"] = {str(expert): order[::-1] for expert, order in orders.items()}
    what = r"model.layers.3.mlp.experts.\d.\w+_proj: correlation of the original with the payload: expected at least 0.9, got -?0.0"
    with pytest.raises(UnsupportedError, match=what):
        convert(tmp_path / "s", tmp_path / "o", reference=read_checkpoint(reference))
    with edited_json(tmp_path / "s" / sidecar_name) as sidecar:
        sidecar["permutation"] = {str(expert): [0] * 256 for expert in orders}
    with pytest.raises(FormatError, match=r"permutation: \d: channels: expected each of 0..255 once"):
        convert(tmp_path / "s", tmp_path / "o", restart=True, reference=read_checkpoint(reference))

    foreign = tmp_path / "foreign"
    shutil.copytree(reference, foreign)
    weights = {name: torch.randn(shape).bfloat16() for name, shape in shapes_of(reference).items()}
    save_file(weights, foreign / "model.safetensors")
    with pytest.raises(UnsupportedError, match=what):
        convert(source, tmp_path / "o2", reference=read_checkpoint(foreign))
    first = sorted(weights)[0]
    save_file({name: w for name, w in weights.items() if name != first}, foreign / "model.safetensors")
    choice = convert(source, tmp_path / "o3", dry_run=True, reference=read_checkpoint(foreign)).plan
    touched = [a != b for a, b in zip(choice.layers[0].source.bits[0], choice.layers[0].bits[0], strict=True)]
    assert any(touched)
    name = f"model.layers.3.mlp.experts.0.{PROJECTIONS[touched.index(True)]}.weight"
    save_file({n: w for n, w in weights.items() if n != name}, foreign / "model.safetensors")
    with pytest.raises(UnsupportedError, match=f"{name}: missing weight"):
        convert(source, tmp_path / "o3", reference=read_checkpoint(foreign))
    assert not (tmp_path / "o3").exists()


def shapes_of(folder: Path) -> dict[str, tuple[int, ...]]:
    return {name: entry.shape for name, entry in read_checkpoint(folder).tensors.items()}


def test_the_rotated_space_is_the_payloads_own() -> None:
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(-(1 << 15), 1 << 15, (8, 16, 64), generator=generator).to(torch.int16)
    suh, svh = torch.randn(128, generator=generator).half(), torch.randn(256, generator=generator).half()
    suh[3] = 0
    back = to_rotated(codec.decode_matrix(words, suh, svh, bits=4), suh, svh)
    truth = codec.decode_tiles(words, bits=4).float()
    kept = codec.hadamard_128(codec.hadamard_128(truth, dim=0) * (torch.arange(128) != 3)[:, None], dim=0)
    assert torch.allclose(back, kept, atol=1e-4)
    assert torch.isfinite(to_rotated(torch.randn(128, 256), torch.zeros(128).half(), svh)).all()


def test_channels_are_matched_or_not_at_all() -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(64, 32, generator=generator)
    order = torch.randperm(32, generator=generator)
    noisy = weight[:, order] + 0.2 * torch.randn(64, 32, generator=generator)
    assert match_channels(noisy, weight, 1).tolist() == order.tolist()  # type: ignore[union-attr]
    assert match_channels(torch.ones(64, 32), weight, 1) is None
    assert correlation(weight, torch.zeros(64, 32)) == 0
