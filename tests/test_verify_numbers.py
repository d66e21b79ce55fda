"""The part numbers on the CPU: good slabs pass, and each mistake a writer could make is named by it, whatever bytes says.

A wrong writer is played by a source that was spoiled before repack and is judged against the sound one: seal and contract pass.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from r7convert.errors import UsageError
from r7convert.evidence import Payloads, gather
from r7convert.findings import Check, Part
from r7convert.format import PROJECTIONS
from r7convert.journal import read_manifest
from r7convert.moe import load_experts
from r7convert.repack import repack
from r7convert.seal import choose_files
from r7convert.slabs import Slabs, open_slabs
from r7convert.terminal import Terminal
from r7convert.verdict import Verdict
from r7convert.verify import verify
from r7convert.verify_errors import QUICK_MATRICES
from r7convert.verify_layer import BOUND, draw_call, judge_layer
from r7convert.verify_numbers import CPU_WEIGHTS, choose_experts, choose_layers, read_matrix
from tests import folders, tamper
from tests.random_slabs import Source, random_slabs

Json = Any
pytestmark = pytest.mark.usefixtures("no_fsync")

CHOICES = {"hidden": 128, "intermediate": 256, "experts": 4, "layers": 5, "mtp": "none"}
LAYER = "model.layers.{}.mlp.experts."


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.sample(tmp_path_factory.mktemp("numbers") / "source", **CHOICES)


@pytest.fixture(scope="module")
def slabs(source: Path) -> Path:
    repack(source, source.parent / "slabs", target="slabs", tp=2)
    return source.parent / "slabs"


def numbers(verdict: Verdict) -> Part:
    return verdict.parts[3]


def shown(part: Part) -> list[str]:
    return [line for check in part.checks.values() for line in check.shown]


# ---- good slabs -----------------------------------------------------------------------------------------------------


def test_good_slabs_pass_and_say_what_was_computed(source: Path, slabs: Path) -> None:
    verdict = verify(slabs, source=source)
    verdict.check()
    part = numbers(verdict)
    assert part.state == "passed"
    assert part.checks["experts: each alone on each rank, against the source's channels"].looked_at == 2 * 4 * 2
    assert part.checks["layers: slabs computed against the source"].looked_at == 2
    how = "slabs, without a GPU: codec in float16 against codec in float64: 2 of 2 layers, 8 of 8 experts, 2 ranks summed"
    assert part.scope[0].startswith(how)
    rows = json.loads(json.dumps(part.to_json()["layers"], allow_nan=False))
    assert rows.keys() == {"3", "4"}
    for row in rows.values():
        assert 1e-5 < row["relative_l2"] < row["bound"] == BOUND
        assert row["relative_l2"] / 4 < row["worst_expert_l2"] < BOUND
        assert row["max_error"] > 0


def test_a_long_run_says_beforehand_how_much_it_reads(
    source: Path, slabs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in ("seal", "verify", "verify_numbers"):
        monkeypatch.setattr(f"r7convert.{module}.LONG_BYTES", 1000)
    verify(slabs, source=source, progress=Terminal().progress())
    said = capsys.readouterr().err
    rate = r": \d+ s or more at the \d+\.\d\d GB/s of the seal"
    assert re.search(r"seal: \d+\.\d GB to hash", said)
    assert re.search(rf"bytes: \d+\.\d GB of the source to read, and as much of the output{rate}", said)
    assert re.search(rf"numbers: 2 of 2 layers on \w+, \d+\.\d GB to read and decode{rate}", said)


def test_tiers_that_outgrow_descriptors_are_judged(tmp_path: Path) -> None:
    """288 experts of one K: no descriptors, so that a GPU's kernel does not take them; the codec does, and names what is wrong."""
    sample = folders.sample(tmp_path / "s", hidden=128, intermediate=128, experts=288, layers=4, mtp="none", mode="one-k")
    repack(sample, tmp_path / "o", target="slabs", tp=1)
    assert open_slabs(tmp_path / "o", 3, 0).descriptors is None
    part = numbers(verify(tmp_path / "o", source=sample))
    assert part.state == "passed"
    assert part.layers["3"]["relative_l2"] < BOUND / 4
    harm = tamper.with_data(lambda data: bytes(len(data) // 2) + data[len(data) // 2 :])
    tamper.change_tensor(tmp_path / "o", r"layers\.3\..*\.287\.down_proj\.rank0\.trellis", harm)
    tamper.reseal(tmp_path / "o")
    assert any("layer 3: expert 287: rank 0: down_proj" in line for line in shown(numbers(verify(tmp_path / "o", source=sample))))


def test_reencoded_layers_have_a_bound_of_their_own(source: Path, tmp_path: Path) -> None:
    repack(source, tmp_path / "o", target="rank-sliced", tp=1, mixed_k="lift", device="cpu")
    verdict = verify(tmp_path / "o", source=source)
    verdict.check()
    rows = numbers(verdict).layers
    for row in rows.values():
        assert BOUND < row["relative_l2"] < row["bound"] < 0.3, "what was lifted is off by what lifting costs, and no more"
    assert any("layers with re-encoded matrices: 0.004 + 1.5 x root" in line for line in numbers(verdict).scope)
    stated = read_manifest(tmp_path / "o").facts["reencoded"]
    tamper.reseal(tmp_path / "o", facts={"reencoded": {name: {**said, "relative_error": 1e-9} for name, said in stated.items()}})
    refused = numbers(verify(tmp_path / "o", source=source))
    assert refused.checks["layers: slabs computed against the source"].failures == 2


def test_quick_samples_layers_and_experts_and_says_so(tmp_path: Path) -> None:
    many = folders.sample(tmp_path / "s", **{**CHOICES, "layers": 13, "dense": 1, "intermediate": 128})
    repack(many, tmp_path / "o", target="slabs", tp=1)
    verdict = verify(tmp_path / "o", source=many, quick=True)
    verdict.check()
    assert numbers(verdict).scope[0].split(": ")[2].startswith("3 of 12 layers, 3 of 48 experts, a sample")
    scope = verdict.parts[2].scope
    assert "quick: bits of 3 of 12 layers of experts; of the rest names and K" in scope
    assert any(line.startswith("left unread by quick: ") for line in scope)
    harm = tamper.with_data(lambda data: bytes([data[0] ^ 1]) + data[1:])
    for layer, seen in ((1, True), (2, False)):
        tamper.change_tensor(tmp_path / "o", rf"layers\.{layer}\..*\.0\.gate_proj\.rank0\.trellis", harm)
        tamper.reseal(tmp_path / "o")
        assert (verify(tmp_path / "o", source=many, quick=True).parts[2].state == "failed") is seen
        tamper.change_tensor(tmp_path / "o", rf"layers\.{layer}\..*\.0\.gate_proj\.rank0\.trellis", harm)


def test_quick_hashes_a_sample_of_the_weights_and_says_so(source: Path, tmp_path: Path) -> None:
    repack(source, tmp_path / "o", target="slabs", tp=2)
    files = read_manifest(tmp_path / "o").files
    weights = sorted(name for name in files if name.endswith(".safetensors"))
    assert len(weights) >= 3
    hashed = choose_files(files, quick=True)
    assert set(hashed) & set(weights) == {weights[0], *weights[8::8], weights[-1]}
    assert set(files) - set(hashed) == set(weights) - set(hashed), "files beside the weights are all hashed"
    assert choose_files(files, quick=False) == list(files)
    verdict = verify(tmp_path / "o", quick=True)
    verdict.check()
    whole, some = (sum(files[name].size for name in names) for names in (files, hashed))
    said = f"quick: {len(hashed)} of {len(files)} files hashed, {some:,} of {whole:,} bytes; of the rest the size"
    assert verdict.parts[0].scope == [said]
    for name, seen in ((weights[0], True), (weights[1], False), ("config.json", True)):
        tamper.flip_bit(tmp_path / "o" / name, files[name].size - 3, bit=0)
        assert (verify(tmp_path / "o", quick=True).parts[0].state == "failed") is seen
        assert verify(tmp_path / "o").parts[0].state == "failed"
        tamper.flip_bit(tmp_path / "o" / name, files[name].size - 3, bit=0)
    (tmp_path / "o" / weights[1]).write_bytes(b"short")
    assert verify(tmp_path / "o", quick=True).parts[0].state == "failed"


def test_quick_measures_a_sample_of_what_was_encoded_anew(source: Path, tmp_path: Path) -> None:
    repack(source, tmp_path / "o", target="rank-sliced", tp=1, mixed_k="lift", device="cpu")
    stated = read_manifest(tmp_path / "o").facts["reencoded"]
    check = "lifted and lowered matrices: error against what they came from"
    whole, some = (numbers(verify(tmp_path / "o", source=source, quick=quick)) for quick in (False, True))
    assert whole.checks[check].looked_at >= 2 * len(stated)
    count = -(-len(stated) // QUICK_MATRICES)
    assert 0 < count < len(stated)
    assert any(f"matrices of another K: {count} of {len(stated)}, a sample, decoded by the codec" in line for line in some.scope)
    assert any(f"matrices of another K: {len(stated)} decoded by the codec" in line for line in whole.scope)
    assert some.checks["matrices of another K are those the manifest names"].looked_at == 1


def test_what_is_sampled_depends_on_sizes() -> None:
    assert choose_layers(range(3, 79), quick=False) == list(range(3, 79))
    assert choose_layers(range(3, 79), quick=True) == [3, 11, 19, 27, 35, 43, 51, 59, 67, 75, 78]
    each = 3 * 6144 * 2048
    assert choose_experts(3, 256, each, on_gpu=True, quick=False) == list(range(256))
    assert len(choose_experts(3, 256, each, on_gpu=True, quick=True)) == 64
    few = [choose_experts(layer, 256, each, on_gpu=False, quick=False) for layer in range(3, 79)]
    assert {len(found) for found in few} == {CPU_WEIGHTS // each} == {3}
    assert len({expert for found in few for expert in found}) > 128, "another few in each layer"
    assert len(choose_experts(3, 256, 1 << 40, on_gpu=False, quick=True)) == 1


@pytest.mark.parametrize(("experts", "given"), [(1, 0), (3, 0), (5, 100), (256, 0), (7, 1000)])
def test_every_expert_is_hit_equally_often(experts: int, given: int) -> None:
    held = torch.randn(given, 128).half() if given else None
    ids = [2 * n for n in range(experts)]
    x, routes, weights = draw_call(3, ids, 128, held)
    assert torch.equal(routes, draw_call(3, ids, 128, held)[1])
    assert routes.unique(return_counts=True)[0].tolist() == ids
    assert len(set(routes.unique(return_counts=True)[1].tolist())) == 1
    assert all(len(set(row)) == len(row) for row in routes.tolist())
    assert torch.allclose(weights.sum(1), torch.ones(len(x)))
    assert held is None or torch.equal(x[: min(given, 256)], held[: min(given, 256)])


def test_activations_of_a_file(source: Path, slabs: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"x": torch.randn(21, 128)}, path)
    verdict = verify(slabs, source=source, activations=path)
    verdict.check()
    assert "21 activations of a file" in numbers(verdict).scope[0]
    for held in ({"x": torch.randn(2, 64)}, {"x": torch.randn(128)}, {"a": torch.ones(1, 128), "b": torch.ones(1, 128)}):
        save_file(held, path)
        with pytest.raises(UsageError, match="activations: expected"):
            verify(slabs, source=source, activations=path)
    with pytest.raises(UsageError, match="expected --source"):
        verify(slabs, activations=path)


# ---- a writer's mistakes, found in a sealed folder --------------------------------------------------------------------

Spoil = Callable[[dict[str, Tensor], Path], None]


def swap(tensors: dict[str, Tensor], one: str, other: str) -> None:
    assert tensors[one].shape == tensors[other].shape
    tensors[one], tensors[other] = tensors[other].clone(), tensors[one].clone()


def swap_gate_and_up(held: dict[str, Tensor], _: Path) -> None:
    for field in ("trellis", "svh"):
        swap(held, f"{LAYER.format(3)}1.gate_proj.{field}", f"{LAYER.format(3)}1.up_proj.{field}")


def equal_k(held: dict[str, Tensor], proj: str) -> tuple[int, int]:
    ks = [held[f"{LAYER.format(3)}{expert}.{proj}.trellis"].shape[2] for expert in range(4)]
    return next((a, b) for a in range(4) for b in range(a + 1, 4) if ks[a] == ks[b])


def exchange_planes(held: dict[str, Tensor], _: Path) -> None:
    a, b = equal_k(held, "down_proj")
    swap(held, f"{LAYER.format(3)}{a}.down_proj.trellis", f"{LAYER.format(3)}{b}.down_proj.trellis")


def shift_rotations(held: dict[str, Tensor], _: Path) -> None:
    for field in ("gate_proj.svh", "up_proj.svh", "down_proj.suh"):
        swap(held, f"{LAYER.format(3)}2.{field}", f"{LAYER.format(3)}3.{field}")


def foreign_suh(held: dict[str, Tensor], folder: Path) -> None:
    other = folders.load(folder / folders.R7.replace("003", "004"))
    held[f"{LAYER.format(3)}r7_shared.gate_up_suh"] = other[f"{LAYER.format(4)}r7_shared.gate_up_suh"]


def wrong_k(held: dict[str, Tensor], _: Path) -> None:
    name = f"{LAYER.format(3)}2.up_proj.trellis"
    k = held[name].shape[2] // 16
    held[name] = torch.zeros(*held[name].shape[:2], 16 * (4 if k != 4 else 3), dtype=torch.int16)


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (swap_gate_and_up, r"layer 3: expert 1: rank 0: gate_proj, up_proj: relative L2: expected at most 0\.004, got"),
        (exchange_planes, r"layer 3: expert \d: rank 1: down_proj: relative L2: expected at most 0\.004, got 1\."),
        (shift_rotations, r"layer 3: expert 3: rank 0: gate_proj, up_proj, down_proj: relative L2"),
        (foreign_suh, r"layer 3: expert 0: rank 0: gate_proj, up_proj: relative L2"),
        (wrong_k, r"layer 3: expert 2: rank 0: up_proj \(K\d, the source's K\d\): relative L2"),
    ],
)
def test_a_mistake_is_named(source: Path, tmp_path: Path, spoil: Spoil, named: str) -> None:
    spoiled = tmp_path / "spoiled"
    folders.sample(spoiled, **CHOICES)
    sound = None
    if spoil is swap_gate_and_up:  # of equal K, or a swap would be seen in the headers: the sound source has gate's words turned
        sound = folders.sample(tmp_path / "sound", **CHOICES)
        for folder in (sound, spoiled):
            with folders.edited_shard(folder / folders.R7) as held:
                gate = held[f"{LAYER.format(3)}1.gate_proj.trellis"]
                held[f"{LAYER.format(3)}1.up_proj.trellis"] = gate.flip(0).contiguous()
    with folders.edited_shard(spoiled / folders.R7) as held:
        spoil(held, spoiled)
    for folder in filter(None, (spoiled, sound)):
        (folder / folders.R7.replace(".safetensors", ".json")).unlink()  # its bit_map is of the sample
    repack(spoiled, tmp_path / "o", target="slabs", tp=2)
    verdict = verify(tmp_path / "o", source=sound or source)
    assert [part.state for part in verdict.parts[:2]] == ["passed", "passed"], "only a comparison with the source can tell"
    part = numbers(verdict)
    assert part.state == "failed"
    assert any(re.match(named, line) for line in shown(part)), shown(part)
    assert any(line.startswith("layer 3: relative L2") for line in shown(part))
    assert not any(line.startswith("layer 4") for line in shown(part))
    assert part.layers["3"]["relative_l2"] > 50 * part.layers["4"]["relative_l2"]


# ---- mistakes in the tables, found by the function alone --------------------------------------------------------------


@dataclass
class Case:
    slabs: Slabs
    source: Source

    def judge(self) -> Part:
        part = Part("numbers")
        judge_layer(3, self.source.experts.__getitem__, range(4), [load_experts(self.slabs, "cpu")], part)
        return part


@pytest.fixture
def case() -> Case:
    return Case(*random_slabs([(4, 3, 4), (4, 4, 3), (3, 4, 4), (4, 3, 4)], hidden=128, inner=128))


def test_sound_tables_pass(case: Case) -> None:
    part = case.judge()
    assert part.state == "passed"
    assert sum(check.looked_at for check in part.checks.values()) == 5


def test_a_descriptor_off_by_one(case: Case) -> None:
    assert case.slabs.descriptors is not None
    wrong = case.slabs.descriptors.clone()
    row = 2 * case.slabs.stride
    assert wrong[row + 2] == (1 << 8) | 1
    wrong[row + 2] -= 1
    case.slabs = replace(case.slabs, descriptors=wrong)
    assert [line.split(": relative")[0] for line in shown(case.judge())] == ["layer 3: expert 2: rank 0: down_proj", "layer 3"]


def test_rotation_rows_in_tier_order(case: Case) -> None:
    order = [2, 0, 1, 3]  # by the K of gate, ascending, then by number
    case.slabs = replace(case.slabs, rotations=case.slabs.rotations[order].contiguous())
    found = [line.split(": relative")[0] for line in shown(case.judge())]
    assert found == [*(f"layer 3: expert {e}: rank 0: gate_proj, up_proj, down_proj" for e in (0, 1, 2)), "layer 3"]


def test_tiers_that_changed_places(case: Case) -> None:
    """Wrong K where every shape fits: gate of 1 and of 2, one a tier at the same index, take each other's descriptor."""
    assert case.slabs.descriptors is not None
    wrong = case.slabs.descriptors.clone()
    wrong[[1, 2]] = wrong[[2, 1]]
    case.slabs = replace(case.slabs, descriptors=wrong)
    found = shown(case.judge())
    assert found[0].startswith("layer 3: expert 1: rank 0: gate_proj (K3, the source's K4): relative L2")
    assert found[1].startswith("layer 3: expert 2: rank 0: gate_proj (K4, the source's K3): relative L2")


def test_vectors_of_another_layer(case: Case) -> None:
    other, _ = random_slabs([(4, 3, 4)] * 4, hidden=128, inner=128, seed=9)
    for field, named in (("gate_suh", "gate_proj"), ("up_suh", "up_proj"), ("down_svh", "down_proj")):
        spoiled = Case(replace(case.slabs, **{field: getattr(other, field)}), case.source)
        assert [line.split(": relative")[0] for line in shown(spoiled.judge())][:4] == [
            f"layer 3: expert {expert}: rank 0: {named}" for expert in range(4)
        ]


def test_two_ranks_that_changed_places(source: Path, slabs: Path) -> None:
    """Their sum is the same: only each rank's own share can tell."""
    whole = [load_experts(open_slabs(slabs, 3, rank), "cpu") for rank in range(2)]
    theirs = gather(source, [path.name for path in source.glob("*.safetensors")], Check("headers", "files")).layer(3)
    with Payloads(source) as payloads:

        def original(expert: int) -> Any:
            return tuple(read_matrix(theirs, expert, proj, payloads, (128, 256), torch.device("cpu")) for proj in PROJECTIONS)

        for ranks, state in ((whole, "passed"), (whole[::-1], "failed")):
            part = Part("numbers")
            judge_layer(3, original, range(4), ranks, part)
            assert part.state == state
    assert shown(part)[0].startswith("layer 3: expert 0: rank 0: gate_proj, up_proj, down_proj: relative L2: expected at most 0.004, got 1")
    assert part.checks["layers: slabs computed against the source"].failures == 0


def test_what_is_not_finite_fails(case: Case) -> None:
    case.slabs = replace(case.slabs, rotations=case.slabs.rotations.clone())
    case.slabs.rotations[1, 5] = torch.nan
    part = case.judge()
    assert shown(part)[0].startswith("layer 3: expert 1: rank 0: gate_proj: relative L2: expected at most 0.004, got nan")
    assert part.layers["3"]["relative_l2"] == "nan"
    assert part.layers["3"]["worst_expert"] == 1
    json.dumps(part.to_json(), allow_nan=False)
