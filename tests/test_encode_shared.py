"""encode-shared: what is encoded and what stays, where it is written, what the JSON says, and that nothing else changes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from r7convert import codec, devices
from r7convert.card import CARD
from r7convert.checkpoint import read_checkpoint
from r7convert.encode_shared import SharedReport, encode_shared
from r7convert.errors import FormatError, ResourceError, UnsupportedError, UsageError
from r7convert.journal import MANIFEST, VERDICT, Manifest, read_manifest, write_manifest
from r7convert.restamp import restamp
from r7convert.sample import write_sample
from r7convert.store import hash_file, read_json, write_json
from r7convert.team import Team
from r7convert.verify import verify
from tests.fakes import FakeEncoder, fake_encoder
from tests.folders import tree
from tests.kill import at_every_step

__all__ = ["fake_encoder"]
INDEX = "model.safetensors.index.json"


def seal(folder: Path, **facts: Any) -> None:
    files = {path.name: hash_file(path) for path in sorted(folder.iterdir()) if path.is_file() and path.name != CARD}
    write_manifest(folder, Manifest("test", files, facts))


def sealed(tmp_path: Path, **choices: Any) -> Path:
    """A sealed folder of target r7, with a verdict."""
    write_sample(tmp_path / "sample", **{"hidden": 128, "intermediate": 128, "split": True, **choices})
    restamp(tmp_path / "sample", output=tmp_path / "out")
    found = read_checkpoint(tmp_path / "out")
    seal(
        tmp_path / "out",
        target="r7",
        tp=None,
        accounting={"kept": {"tensors": len(found.tensors), "bytes": found.payload_bytes}},
        note="carried",
    )
    (tmp_path / "out" / VERDICT).write_text("{}")
    return tmp_path / "out"


def tensors(folder: Path) -> dict[str, bytes]:
    """Every tensor of the folder, through the index and the official reader."""
    found = {}
    for name, file in read_json(folder / INDEX)["weight_map"].items():
        with safe_open(folder / file, "pt") as shard:
            found[name] = shard.get_tensor(name).contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return found


def check_seal(folder: Path) -> Manifest:
    manifest = read_manifest(folder)
    standing = {path.name for path in folder.iterdir()} - {MANIFEST, CARD}
    assert standing == set(manifest.files)
    for name, record in manifest.files.items():
        assert hash_file(folder / name) == record, name
    return manifest


def names_of(base: str) -> set[str]:
    return {f"{base}.{proj}.{field}" for proj in ("gate_proj", "up_proj", "down_proj") for field in ("trellis", "suh", "svh", "mcg")}


def test_split_unsliced_marked_and_nothing_else_changes(tmp_path: Path, fake_encoder: FakeEncoder) -> None:
    out = sealed(tmp_path)
    before, config = tensors(out), read_json(out / "config.json")
    report = encode_shared(out, device="cpu")
    after, manifest = tensors(out), check_seal(out)

    bases = [f"model.layers.{layer}.mlp.shared_experts" for layer in (3, 4, 5)]
    gone = {f"{base}.{proj}.weight" for base in bases for proj in ("gate_proj", "up_proj", "down_proj")}
    assert after.keys() == before.keys() - gone | set().union(*map(names_of, bases))
    assert all(after[name] == before[name] for name in before.keys() - gone)
    assert len(before.keys() - gone) > 100
    checkpoint = read_checkpoint(out)
    for base in bases:
        for proj, rows, cols in (("gate_proj", 128, 128), ("up_proj", 128, 128), ("down_proj", 128, 128)):
            assert checkpoint.tensors[f"{base}.{proj}.trellis"].shape == (rows // 16, cols // 16, 96)
            assert checkpoint.tensors[f"{base}.{proj}.mcg"].shape == ()
        assert after[f"{base}.gate_proj.suh"] == after[f"{base}.up_proj.suh"]

    # The signs of gate and up are those of the merged module, as readers name it.
    merged = "model.layers.3.mlp.shared_experts.gate_up_proj"
    assert (merged, 6, codec.module_seed(merged)) in fake_encoder.calls
    assert len(fake_encoder.calls) == 6

    # One block in both files; a record a module; the rest of config.json as it was.
    now = read_json(out / "config.json")
    storage = now["quantization_config"].pop("tensor_storage")
    assert storage == read_json(out / "quantization_config.json")["tensor_storage"]
    old = config["quantization_config"].pop("tensor_storage")
    assert now == config
    assert storage.keys() - old.keys() == {f"{base}.{proj}" for base in bases for proj in ("gate_proj", "up_proj", "down_proj")}
    assert storage[f"{bases[0]}.down_proj"] == {
        "quant_format": "exl3",
        "stored_tensors": {
            f"{bases[0]}.down_proj.trellis": {"shape": [8, 8, 96], "n_bytes": 12288, "dtype": "torch.int16"},
            f"{bases[0]}.down_proj.suh": {"shape": [128], "n_bytes": 256, "dtype": "torch.float16"},
            f"{bases[0]}.down_proj.svh": {"shape": [128], "n_bytes": 256, "dtype": "torch.float16"},
            f"{bases[0]}.down_proj.mcg": {"shape": [], "n_bytes": 4, "dtype": "torch.int32"},
        },
        "bits_per_weight": 6,
        "mcg_multiplier": 3417055213,
    }

    # The BF16 shard is gone, the index is true, the manifest says what happened, the verdict is void.
    assert not (out / "model-sharedbf16.safetensors").exists()
    assert report.removed_files == ("model-sharedbf16.safetensors",)
    assert read_json(out / INDEX)["metadata"]["total_size"] == sum(map(len, after.values()))
    nbytes = 9 * 128 * 128 * 2
    assert manifest.facts["accounting"] == {
        "encoded": {"tensors": 9, "bytes": nbytes},
        "kept": {"tensors": len(before) - 9, "bytes": sum(map(len, before.values())) - nbytes},
    }
    assert manifest.facts["note"] == "carried"
    assert set(manifest.facts["encoded"]) == set(report.encoded) == storage.keys() - old.keys()
    assert not (out / VERDICT).exists()


def test_cut_at_column_i_decodes_to_the_weights(tmp_path: Path) -> None:
    """The real encoder, one layer: the error of each matrix is that of K6, and what the report says of it."""
    out = sealed(tmp_path, layers=4, mtp="none", intermediate=256)
    weights = {n.rsplit(".", 2)[-2]: t for n, t in load_file(out / "model-sharedbf16.safetensors").items()}
    report = encode_shared(out, device="cpu")
    shard = load_file(out / "shared-experts-layer-003.safetensors")
    base = "model.layers.3.mlp.shared_experts"
    for proj, weight in weights.items():
        trellis, suh, svh = (shard[f"{base}.{proj}.{field}"] for field in ("trellis", "suh", "svh"))
        decoded = codec.decode_matrix(trellis, suh, svh, bits=6).double()
        truth = weight.t().double()
        relative = float((decoded - truth).square().sum() / truth.square().sum())
        said = report.encoded[f"{base}.{proj}"]
        assert relative == pytest.approx(said["relative_error"], rel=1e-5)
        assert 0.0002 < relative < 0.0005
        column = (decoded - truth).square().sum(0) / truth.square().sum(0)
        assert said["worst_column"] == [int(column.argmax()), pytest.approx(float(column.max()), rel=1e-5)]
        assert 0.0002 < said["proxy_error"] < 0.0006


def test_a_second_run_has_nothing_to_do(tmp_path: Path, fake_encoder: FakeEncoder) -> None:
    out = sealed(tmp_path)
    encode_shared(out, device="cpu")
    seal_before, calls = (out / MANIFEST).read_bytes(), len(fake_encoder.calls)
    report = encode_shared(out, device="cpu")
    assert len(fake_encoder.calls) == calls
    assert not report.written
    assert len(report.already) == 9
    assert (out / MANIFEST).read_bytes() == seal_before
    assert not (out / ".r7convert").exists()


def test_layers_by_turns_end_in_the_same_tensors_as_at_once(tmp_path: Path, fake_encoder: FakeEncoder) -> None:
    out = sealed(tmp_path)
    shutil.copytree(out, tmp_path / "once")
    encode_shared(out, device="cpu", layers=(3, 3))
    check_seal(out)
    assert read_manifest(out).facts["accounting"]["encoded"]["tensors"] == 3
    encode_shared(out, device="cpu", layers=(4, 9))
    encode_shared(tmp_path / "once", device="cpu")
    assert tensors(out) == tensors(tmp_path / "once")
    assert read_json(out / "config.json") == read_json(tmp_path / "once" / "config.json")
    assert check_seal(out).facts == check_seal(tmp_path / "once").facts
    with pytest.raises(UsageError, match=r"layers with shared experts: expected \(7, 9\), got \[3, 4, 5\]"):
        encode_shared(out, device="cpu", layers=(7, 9))


def test_a_shard_with_other_tensors_keeps_them(tmp_path: Path, fake_encoder: FakeEncoder) -> None:
    out = sealed(tmp_path, split=False)
    before = tensors(out)
    report = encode_shared(out, device="cpu")
    after = tensors(out)
    assert report.removed_files == ()
    kept = [name for name in before if ".shared_experts." not in name]
    assert all(after[name] == before[name] for name in kept)
    with safe_open(out / "model-carrier.safetensors", "pt") as shard:
        assert not [name for name in shard.keys() if ".shared_experts." in name]  # noqa: SIM118
    check_seal(out)


def test_any_folder_into_an_output(tmp_path: Path, fake_encoder: FakeEncoder) -> None:
    """A checkpoint that is not ours, old stamp and all: corrected, encoded, sealed; its own files untouched."""
    source, out = tmp_path / "sample", tmp_path / "out"
    write_sample(source, hidden=128, intermediate=128, hf_quant_config=True)
    digests = {path.name: hash_file(path) for path in source.iterdir()}
    encode_shared(source, output=out, device="cpu")
    manifest = check_seal(out)
    assert manifest.facts["target"] == "r7"
    assert digests == {path.name: hash_file(path) for path in source.iterdir()}
    config = read_json(out / "config.json")
    assert config["quantization_config"]["quant_method"] == "exl3"
    assert config["quantization_config"] == read_json(out / "quantization_config.json")
    assert not (out / "hf_quant_config.json").exists()
    assert (out / "LICENSE").read_bytes() == (source / "LICENSE").read_bytes()
    assert sum(name.endswith(".down_proj.trellis") and ".shared_experts." in name for name in tensors(out)) == 3
    with pytest.raises(UsageError, match="sealed already"):
        encode_shared(source, output=out, device="cpu")
    with pytest.raises(UsageError, match="not sealed by r7convert"):
        encode_shared(source, device="cpu")
    with pytest.raises(UsageError, match="may not contain each other"):
        encode_shared(source, output=source / "inside", device="cpu")


def test_a_checkpoint_without_exl3_at_all(tmp_path: Path, fake_encoder: FakeEncoder) -> None:
    source, out = tmp_path / "plain", tmp_path / "out"
    source.mkdir()
    base = "model.layers.0.mlp.shared_expert"  # the singular, as some models spell it
    shapes = {"gate_proj": (256, 128), "up_proj": (256, 128), "down_proj": (128, 256)}
    made = {f"{base}.{proj}.weight": torch.randn(shape).bfloat16() for proj, shape in shapes.items()}
    save_file({**made, "model.layers.0.mlp.shared_expert_gate.weight": torch.ones(1, 128)}, source / "model.safetensors")
    config = {"hidden_size": 128, "moe_intermediate_size": 128, "num_experts": 4, "num_hidden_layers": 1}
    write_json(source / "config.json", config)
    encode_shared(source, output=out, device="cpu", bits=4)
    after = tensors(out)
    assert after.keys() == names_of(base) | {"model.layers.0.mlp.shared_expert_gate.weight"}
    block = read_json(out / "config.json")["quantization_config"]
    assert (block["quant_method"], block["bits"], len(block["tensor_storage"])) == ("exl3", 4, 3)
    assert fake_encoder.calls[0][0] == f"{base}.gate_up_proj"
    check_seal(out)


def poison(folder: Path, name: str, value: float) -> None:
    """Set one weight of the BF16 shard, and seal the folder again."""
    path = folder / "model-sharedbf16.safetensors"
    found = load_file(path)
    found[name][3, 5] = value
    path.unlink()  # it is a link into the source
    save_file(found, path, {"format": "pt"})
    facts = read_manifest(folder).facts
    (folder / MANIFEST).unlink()
    (folder / VERDICT).unlink()
    seal(folder, **facts)


def test_a_weight_that_cannot_be_encoded_stops_or_stays(tmp_path: Path, fake_encoder: FakeEncoder) -> None:
    out = sealed(tmp_path)
    bad = "model.layers.4.mlp.shared_experts.up_proj"
    poison(out, f"{bad}.weight", float("nan"))
    before, seal_before = tensors(out), (out / MANIFEST).read_bytes()
    with pytest.raises(FormatError, match=rf"{bad}.weight: 1 weights are not finite, the first at \[out, in\] = \[3, 5\]"):
        encode_shared(out, device="cpu")
    assert (out / MANIFEST).read_bytes() == seal_before
    assert tensors(out) == before

    report = encode_shared(out, device="cpu", on_failure="keep", restart=True)
    after = tensors(out)
    pair = [bad, bad.replace("up_proj", "gate_proj")]
    assert set(report.kept) == set(pair)
    assert all("not finite" in why for why in report.kept.values())
    assert all(after[f"{module}.weight"] == before[f"{module}.weight"] for module in pair)
    assert "model.layers.4.mlp.shared_experts.down_proj.trellis" in after
    manifest = check_seal(out)
    assert manifest.facts["accounting"]["encoded"]["tensors"] == 7
    assert set(manifest.facts["not_encoded"]) == set(pair)

    # Once the weight is sound (here: read from a source that has it right) the part joins the others.
    again = encode_shared(out, device="cpu", source=tmp_path / "sample")
    assert set(again.encoded) == set(pair)
    assert check_seal(out).facts["accounting"]["encoded"]["tensors"] == 9
    assert check_seal(out).facts["not_encoded"] == {}
    assert names_of("model.layers.4.mlp.shared_experts") < tensors(out).keys()


def test_too_little_signal_is_a_failure_by_name(tmp_path: Path, fake_encoder: FakeEncoder) -> None:
    out = sealed(tmp_path)
    with pytest.raises(UnsupportedError, match=r"down_proj: signal to noise: expected at least 36 dB, got 35.23 dB|gate_proj"):
        encode_shared(out, device="cpu", min_snr=36)
    kept = encode_shared(out, device="cpu", min_snr=36, on_failure="keep", restart=True)
    assert len(kept.kept) == 9
    assert not kept.written
    assert not (out / ".r7convert").exists()
    assert "encoded" not in read_manifest(out).facts["accounting"]


def test_what_readers_refuse_stays_in_bf16(tmp_path: Path, fake_encoder: FakeEncoder) -> None:
    """Layers outside moe_layers, and sides that are no multiple of 128."""
    out = sealed(tmp_path)
    shard = load_file(out / "model-sharedbf16.safetensors")
    extra = {
        f"model.layers.1.mlp.shared_experts.{proj}.weight": torch.randn(128, 128).bfloat16()
        for proj in ("gate_proj", "up_proj", "down_proj")
    }
    for proj, shape in (("gate_proj", (192, 128)), ("up_proj", (192, 128)), ("down_proj", (128, 192))):
        shard[f"model.layers.4.mlp.shared_experts.{proj}.weight"] = torch.randn(shape).bfloat16()
    (out / "model-sharedbf16.safetensors").unlink()
    save_file({**shard, **extra}, out / "model-sharedbf16.safetensors", {"format": "pt"})
    index = read_json(out / INDEX)
    index["weight_map"] |= dict.fromkeys(extra, "model-sharedbf16.safetensors")
    write_json(out / INDEX, index)
    facts = read_manifest(out).facts
    for name in (MANIFEST, VERDICT):
        (out / name).unlink()
    seal(out, **facts)

    report = encode_shared(out, device="cpu")
    assert {module.split(".")[2] for module in report.encoded} == {"3", "5"}
    assert report.kept["model.layers.1.mlp.shared_experts.up_proj"].startswith("layer 1 is outside moe_layers")
    assert report.kept["model.layers.4.mlp.shared_experts.down_proj"] == "a side of [128, 192] is no multiple of 128"
    assert len(report.kept) == 6
    check_seal(out)


def test_shapes_that_contradict_each_other_are_refused(tmp_path: Path, fake_encoder: FakeEncoder) -> None:
    out = sealed(tmp_path)
    shard = load_file(out / "model-sharedbf16.safetensors")
    name = "model.layers.3.mlp.shared_experts.up_proj.weight"
    shard[name] = torch.zeros(256, 128).bfloat16()
    (out / "model-sharedbf16.safetensors").unlink()
    save_file(shard, out / "model-sharedbf16.safetensors", {"format": "pt"})
    with pytest.raises(FormatError, match=rf"{name}: shape: expected \[128, 128\], got \[256, 128\]"):
        encode_shared(out, device="cpu", dry_run=True)


def test_a_dry_run_touches_nothing_and_prices(tmp_path: Path, fake_encoder: FakeEncoder) -> None:
    out = sealed(tmp_path, nested=True)
    before = {path: path.stat().st_mtime_ns for path in [out, *out.iterdir()]}
    report = encode_shared(out, device="cpu", dry_run=True)
    assert before == {path: path.stat().st_mtime_ns for path in [out, *out.iterdir()]}
    assert fake_encoder.calls == []
    assert report.bytes_before == 9 * 128 * 128 * 2
    assert report.bytes_after == 9 * (128 * 128 * 6 // 8 + 2 * 256 + 4)
    assert report.estimate_s is not None
    assert report.estimate_s > 0
    json.dumps(report.to_json(), allow_nan=False)
    done = encode_shared(out, device="cpu")
    assert "model.language_model.layers.3.mlp.shared_experts.gate_up_proj" in [name for name, _, _ in fake_encoder.calls]
    assert (done.bytes_before, done.bytes_after) == (report.bytes_before, report.bytes_after)
    config = read_json(out / "config.json")
    assert config["quantization_config"] == config["text_config"]["quantization_config"] == read_json(out / "quantization_config.json")


def run(out: Path, **choices: Any) -> SharedReport:
    return encode_shared(out, device="cpu", **choices)


@pytest.mark.parametrize("into_output", [False, True])
def test_a_kill_at_any_step_resumes_to_the_same_bytes(
    tmp_path: Path, fake_encoder: FakeEncoder, monkeypatch: pytest.MonkeyPatch, into_output: bool
) -> None:
    out = sealed(tmp_path, layers=3, dense=1, mtp="none", experts=1)
    whole = tmp_path / "whole"
    encode_shared(out, output=whole, device="cpu")
    encoded_at_once = len(fake_encoder.calls)
    new = tensors(whole)
    original = tmp_path / "original"
    shutil.copytree(out, original)
    old = tensors(original)

    def command() -> SharedReport:
        return run(original, output=out) if into_output else run(out)

    def fresh() -> None:
        shutil.rmtree(out)
        if not into_output:
            shutil.copytree(original, out)

    steps = 0
    for _ in at_every_step(monkeypatch, command, fresh=fresh, stride=5 if into_output else 3):
        steps += 1
        if (out / MANIFEST).exists():
            assert tensors(out) in (old, new)
        if into_output and (out / MANIFEST).exists():
            continue
        fake_encoder.calls.clear()
        command()
        assert len(fake_encoder.calls) <= encoded_at_once
        assert tensors(out) == new
        assert check_seal(out).facts == check_seal(whole).facts
        assert {path.name: path.read_bytes() for path in out.iterdir()} == {path.name: path.read_bytes() for path in whole.iterdir()}
    assert steps > 15


def test_layers_that_are_done_are_not_encoded_again(tmp_path: Path, fake_encoder: FakeEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    out = sealed(tmp_path)
    real = fake_encoder.encode_matrix

    def fails_in_layer_5(weight: Any, **options: Any) -> Any:
        if ".5." in options["name"]:
            raise KeyboardInterrupt
        return real(weight, **options)

    monkeypatch.setattr(devices, "encode_matrix", fails_in_layer_5)
    with pytest.raises(KeyboardInterrupt):
        run(out)
    check = read_manifest(out)  # still the old folder, sealed
    assert all(hash_file(out / name) == record for name, record in check.files.items())
    monkeypatch.setattr(devices, "encode_matrix", real)
    fake_encoder.calls.clear()
    verify(out)  # a verdict that comes in between changes nothing
    with pytest.raises(UsageError, match="unfinished run with another bits: expected 6, got 5"):
        run(out, bits=5)
    run(out)
    assert {name.split(".")[2] for name, _, _ in fake_encoder.calls} == {"5"}
    check_seal(out)


def test_other_bits_need_a_source(tmp_path: Path, fake_encoder: FakeEncoder) -> None:
    out = sealed(tmp_path)
    run(out)
    report = run(out, bits=4)
    assert not report.written
    assert all("EXL3 at K [6] already" in why for why in report.kept.values())
    report = run(out, bits=4, source=tmp_path / "sample")
    assert len(report.encoded) == 9
    checkpoint = read_checkpoint(out)
    assert {checkpoint.shared_experts[layer].bits for layer in (3, 4, 5)} == {(4,)}
    assert check_seal(out).facts["accounting"]["encoded"]["tensors"] == 9
    assert len([path for path in out.iterdir() if path.name.startswith("shared-experts")]) == 3


def test_a_team_of_one_shares_with_nobody() -> None:
    team = Team()
    assert (team.share([1, 2, 3]), team.gather("x", "y")) == ([1, 2, 3], ["x"])
    assert [Team(rank, 2).share(list(range(5))) for rank in range(2)] == [[0, 2, 4], [1, 3]]
    assert np.array_equal(np.sort(np.concatenate([Team(r, 3).share(np.arange(7)) for r in range(3)])), np.arange(7))


def test_a_run_that_is_refused_for_room_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_sample(tmp_path / "sample", hidden=128, intermediate=128)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 0))
    with pytest.raises(ResourceError, match="free space"):
        run(tmp_path / "sample", output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_cut_between_the_seal_and_the_end_of_its_journal(
    tmp_path: Path, fake_encoder: FakeEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "sample"
    write_sample(source, hidden=128, intermediate=128)
    run(source, output=tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr("r7convert.journal.Journal.close", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(source, output=tmp_path / "out")
    assert (tmp_path / "out" / MANIFEST).exists()
    fake_encoder.calls.clear()
    with pytest.raises(UsageError, match="another bits"):
        run(source, output=tmp_path / "out", bits=4)
    run(source, output=tmp_path / "out")
    assert fake_encoder.calls == []
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")
