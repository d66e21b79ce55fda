"""The judge on good outputs, on folders that are not whole, and on what is left to numbers.

A broken folder for each single rule: tests/test_contract.py; harm to each class of byte: tests/test_verify_harm.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from r7convert.encode_shared import encode_shared
from r7convert.errors import ResourceError, UsageError, VerifyError
from r7convert.findings import PARTS
from r7convert.journal import MANIFEST, VERDICT, locked, manifest_digest, read_manifest
from r7convert.repack import repack
from r7convert.sample import write_sample
from r7convert.store import STATE_DIR, read_header, read_json
from r7convert.verdict import check_verdict
from r7convert.verify import verify
from tests import tamper
from tests.folders import edited_json, sample
from tests.outputs import OUTPUTS, SMALL, SMALLEST, Made, failed_parts, lines_of

Json = Any
pytestmark = pytest.mark.usefixtures("no_fsync")


# ---- good outputs ---------------------------------------------------------------------------------------------------

UNIFORM = {"mode": "uniform"}
GOOD: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *((UNIFORM, {"target": "rank-sliced", "tp": tp}) for tp in (1, 2, 4)),
    *((UNIFORM, {"target": "rank-sliced", "tp": tp, "reader": "r14"}) for tp in (1, 2, 4)),
    *(({"mode": "mixed"}, {"target": "slabs", "tp": tp}) for tp in (1, 2, 4)),
    ({"mode": "mixed,three-k,one-k,odd", "layers": 5}, {"target": "slabs", "tp": 2}),
    ({"mode": "uniform,one-k,odd", "layers": 4, "mtp": "none"}, {"target": "rank-sliced", "tp": 2}),
    ({"mode": "uniform", "tail_tp": 2, "equal_tail_vectors": True}, {"target": "rank-sliced", "tp": 4}),
    ({"mode": "uniform", "tail_tp": 4}, {"target": "rank-sliced", "tp": 1}),
    ({"mode": "uniform", "k_values": (3, 4)}, {"target": "rank-sliced", "tp": 2}),
    ({"mode": "uniform", "nested": True, "hf_quant_config": True}, {"target": "rank-sliced", "tp": 2}),
    ({"mode": "uniform", "mtp": "r7", "split": True}, {"target": "rank-sliced", "tp": 2}),
    ({"mode": "uniform", "per_expert_vectors": True}, {"target": "rank-sliced", "tp": 2}),
    ({"mode": "uniform"}, {"target": "rank-sliced", "tp": 2, "drop_mtp": True}),
    ({"mode": "mixed", "mtp": "r7", "nested": True}, {"target": "slabs", "tp": 2}),
    ({"mode": "mixed", "storage_for_experts": True}, {"target": "slabs", "tp": 1}),
    ({"mode": "mixed"}, {"target": "slabs", "tp": 2, "drop_mtp": True}),
    ({"mode": "mixed"}, {"target": "r7"}),
    ({"mode": "mixed", "mtp": "r7", "nested": True, "hf_quant_config": True}, {"target": "r7"}),
    ({"mode": "mixed", "per_expert_vectors": True, "storage_for_experts": True, "mtp": "none"}, {"target": "r7"}),
    ({"mode": "mixed", "tail_tp": 2}, {"target": "r7", "tp": 1}),
    ({"mode": "mixed", "mtp": "r7"}, {"target": "r7", "drop_mtp": True}),
    ({"mode": "mixed"}, {"target": "exl3"}),
    ({"mode": "three-k", "tail_tp": 4, "split": True}, {"target": "exl3"}),
    ({"mode": "mixed", "storage_for_experts": True, "nested": True}, {"target": "exl3"}),
    ({"mode": "mixed", "per_expert_vectors": True, "mtp": "none"}, {"target": "exl3"}),
]


@pytest.mark.parametrize(("sample", "choices"), GOOD, ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()))
def test_good_outputs_pass_and_say_what_was_compared(tmp_path: Path, sample: dict[str, Any], choices: dict[str, Any]) -> None:
    sizes = {**SMALL, "intermediate": 512} if 4 in (choices.get("tp"), sample.get("tail_tp")) else SMALL
    write_sample(tmp_path / "source", **{**sizes, **sample})
    repack(tmp_path / "source", tmp_path / "output", **choices)
    verdict = Made(tmp_path / "source", tmp_path / "output").judge()
    verdict.check()
    assert [part.name for part in verdict.parts] == list(PARTS)
    computed = "passed" if choices["target"] in ("rank-sliced", "slabs") else "skipped"
    assert [part.state for part in verdict.parts] == ["passed", "passed", "passed", computed]
    idle = [check.name for part in verdict.parts for check in part.checks.values() if not check.looked_at]
    assert set(idle) <= MAY_BE_IDLE, "a rule that looked at nothing has judged nothing"

    scope = "\n".join(verdict.parts[2].scope)
    headers = [read_header(path) for path in (tmp_path / "source").glob("*.safetensors")]
    tensors = [entry for header in headers for entry in header.tensors.values()]
    compared = [line.split(": ")[1].split() for line in verdict.parts[2].scope if "tensors," in line or "dropped" in line]
    assert sum(int(words[0].replace(",", "")) for words in compared) == len(tensors), scope
    assert check_verdict(tmp_path / "output") == read_json(tmp_path / "output" / VERDICT)


MAY_BE_IDLE: set[str] = {"hidden-side vectors are equal on every rank"}  # one rank has no copies


def test_without_the_source_seal_and_contract_are_judged(make: Callable[[str], Made], tmp_path: Path) -> None:
    folder = tamper.copy_output(make("slabs").output, tmp_path / "copy")
    verdict = verify(folder)
    assert [part.state for part in verdict.parts] == ["passed", "passed", "skipped", "skipped"]
    assert check_verdict(folder)["ok"] is True


def test_the_same_folder_gets_the_same_verdict(make: Callable[[str], Made], tmp_path: Path) -> None:
    made, texts = make("exl3"), []
    for threads in (1, 3):
        folder = tamper.copy_output(made.output, tmp_path / str(threads))
        verify(folder, source=made.source, threads=threads)
        texts.append((folder / VERDICT).read_text())
    assert texts[0] == texts[1]
    assert str(tmp_path) not in texts[0], "a verdict is published: it names no folder of this machine"


# ---- folders that are not whole, and other cases from life ----------------------------------------------------------


def test_an_unsealed_folder_is_refused(make: Callable[[str], Made], tmp_path: Path) -> None:
    folder = tamper.copy_output(make("slabs").output, tmp_path / "copy")
    (folder / MANIFEST).unlink()
    verdict = verify(folder, source=make("slabs").source)
    assert [part.state for part in verdict.parts] == ["failed", "skipped", "skipped", "skipped"]
    with pytest.raises(VerifyError, match="not sealed"):
        verdict.check()
    assert not (folder / VERDICT).exists()
    assert not (folder / STATE_DIR).exists()
    with pytest.raises(VerifyError, match="nobody judged"):
        check_verdict(folder)


def test_the_journal_of_a_run_beside_a_seal_is_refused(make: Callable[[str], Made], tmp_path: Path) -> None:
    folder = tamper.copy_output(make("slabs").output, tmp_path / "copy")
    (folder / STATE_DIR).mkdir()
    (folder / STATE_DIR / "journal.jsonl").write_text("")
    assert "an unfinished run" in lines_of(verify(folder))


def test_an_unreadable_manifest_is_a_failed_seal(make: Callable[[str], Made], tmp_path: Path) -> None:
    for n, text in enumerate(('{"format": "r7convert-manifest-v1", "files": {}', '{"format": 1}', "[]")):
        folder = tamper.copy_output(make("slabs").output, tmp_path / str(n))
        tamper.put(folder / MANIFEST, text.encode())
        verdict = verify(folder)
        assert failed_parts(verdict) == {"seal"}
        assert read_json(folder / VERDICT)["manifest_sha256"] == manifest_digest(folder)


def test_files_beside_the_seal(make: Callable[[str], Made], tmp_path: Path) -> None:
    made = make("rank-sliced shared_h_v1")
    folder = tamper.copy_output(made.output, tmp_path / "copy")
    (folder / "model-extra.safetensors").write_bytes(b"x")
    assert "file the manifest does not list" in lines_of(made.judge(folder))
    (folder / "model-extra.safetensors").unlink()
    (folder / ".cache").mkdir()
    verdict = made.judge(folder)
    verdict.check()
    assert any(".cache" in note for check in verdict.parts[0].checks.values() for note in check.notes)
    shard = next(folder.glob("*-rank-1-of-2.safetensors"))
    shard.unlink()
    verdict = made.judge(folder)
    assert failed_parts(verdict) == {"seal", "contract", "bytes"}
    assert f"{shard.name}: missing file" in lines_of(verdict)


def test_every_file_of_rank_1_deleted_and_sealed_again(make: Callable[[str], Made], tmp_path: Path) -> None:
    made = make("rank-sliced shared_h_v1")
    folder = tamper.copy_output(made.output, tmp_path / "copy")
    gone = sorted(folder.glob("*-rank-1-of-2.safetensors"))
    assert len(gone) == 2
    for path in gone:
        path.unlink()
    tamper.reindex(folder)
    tamper.reseal(folder)
    verdict = made.judge(folder)
    assert failed_parts(verdict) == {"contract", "bytes"}
    assert "rank 1: missing tensor" in lines_of(verdict)


def test_another_tp_than_the_output_has(make: Callable[[str], Made]) -> None:
    verdict = verify(make("rank-sliced shared_h_v1").output, tp=4)
    assert failed_parts(verdict) == {"contract"}
    assert verdict.failure_lines() == ["contract: the manifest says what this is: MANIFEST.json: tp of this output: expected 4, got 2"]


def test_an_r14_reader_does_not_take_shared_vectors(make: Callable[[str], Made]) -> None:
    verdict = verify(make("rank-sliced shared_h_v1").output, reader="r14")
    assert failed_parts(verdict) == {"contract"}
    assert "per_expert_v1, the only one r14 knows" in lines_of(verdict)
    verify(make("rank-sliced per_expert_v1").output, reader="r14").check()
    verify(make("rank-sliced per_expert_v1").output, reader="r28").check()


def test_what_readers_take_but_a_publisher_should_know_is_noted(make: Callable[[str], Made], tmp_path: Path) -> None:
    def notes(name: str) -> str:
        folder = tamper.copy_output(make(name).output, tmp_path / name.replace(" ", "-"))
        verdict = verify(folder)
        verdict.check()
        return "\n".join(note for part in verdict.parts for check in part.checks.values() for note in check.notes)

    assert "apply the tail's tp 2 to every layer" in notes("r7")
    assert "this output needs r28 or later" in notes("rank-sliced shared_h_v1")
    assert "r28" not in notes("rank-sliced per_expert_v1")
    tamper_k = tmp_path / "k"
    write_sample(tamper_k / "source", **SMALLEST, mode="uniform", k_values=(4, 5))
    repack(tamper_k / "source", tamper_k / "output", target="rank-sliced", tp=1)
    verdict = verify(tamper_k / "output")
    verdict.check()
    assert any("K [4, 5]" in note for note in verdict.parts[1].checks["K: one or two in a layer, each in 3..6"].notes)


def test_another_source_than_the_output_came_from(make: Callable[[str], Made], tmp_path: Path) -> None:
    sample, _ = OUTPUTS["slabs"]
    write_sample(tmp_path / "other", **SMALLEST, **sample, seed=1)
    verdict = verify(make("slabs").output, source=tmp_path / "other")
    assert failed_parts(verdict) == {"bytes", "numbers"}
    assert len(verdict.failure_lines()) == 21


def test_two_ranks_exchanged_are_found(make: Callable[[str], Made], tmp_path: Path) -> None:
    """No loader can tell: every name, shape and digest is right."""
    made = make("rank-sliced shared_h_v1")
    folder = tamper.copy_output(made.output, tmp_path / "copy")
    one, other = sorted(folder.glob("*-layer-001-rank-*.safetensors"))
    starts = [read_header(path).data_start for path in (one, other)]
    heads = [path.read_bytes()[:start] for path, start in zip((one, other), starts, strict=True)]
    bodies = [path.read_bytes()[start:] for path, start in zip((one, other), starts, strict=True)]
    tamper.put(one, heads[0] + bodies[1])
    tamper.put(other, heads[1] + bodies[0])
    tamper.reseal(folder)
    verify(folder).check()
    verdict = made.judge(folder)
    assert failed_parts(verdict) == {"bytes", "numbers"}
    assert "words differ" in lines_of(verdict)


def test_nonfinite_values_pass_only_where_the_manifest_owns_up(tmp_path: Path) -> None:
    sample, choices = OUTPUTS["rank-sliced shared_h_v1"]
    write_sample(tmp_path / "source", **SMALL, **sample)
    nan = tamper.with_data(lambda data: b"\x00\x7e" + data[2:])
    zero = tamper.with_data(lambda data: data[:2] + b"\x00\x00" + data[4:])
    for pattern, change in (("gate_up_suh", nan), (r"\.2\.up_proj\.svh", nan), (r"\.1\.down_proj\.suh", zero)):
        tamper.change_tensor(tmp_path / "source", pattern, change)
    repack(tmp_path / "source", tmp_path / "output", allow_nonfinite=True, **choices)
    verdict = verify(tmp_path / "output", source=tmp_path / "source")
    verdict.check()
    notes = "\n".join(verdict.parts[1].checks["every scale vector is finite"].notes)
    assert "nan at index 0" in notes
    assert "1 exact zeros" in notes
    tamper.reseal(tmp_path / "output", facts={"nonfinite": {}})
    refused = verify(tmp_path / "output")
    assert failed_parts(refused) == {"contract"}
    assert "expected finite, got nan at index 0, 1 in all" in lines_of(refused)


def test_matrices_encoded_again_are_counted_and_left_to_numbers(tmp_path: Path) -> None:
    write_sample(tmp_path / "source", **SMALLEST, mode="mixed")
    repack(tmp_path / "source", tmp_path / "output", target="rank-sliced", tp=2, mixed_k="lift", device="cpu")
    verdict = verify(tmp_path / "output", source=tmp_path / "source")
    verdict.check()
    stated = read_manifest(tmp_path / "output").facts["accounting"]["lifted"]
    assert stated["tensors"] > 0
    line = f"lifted, left to numbers: {stated['tensors']:,} tensors, {stated['bytes']:,} bytes"
    assert line in verdict.parts[2].scope
    accounting = read_manifest(tmp_path / "output").facts["accounting"]
    sliced = {key: accounting["sliced"][key] + accounting["lifted"][key] for key in ("tensors", "bytes")}
    tamper.reseal(tmp_path / "output", facts={"accounting": {"kept": accounting["kept"], "sliced": sliced}})
    refused = verify(tmp_path / "output", source=tmp_path / "source")
    assert failed_parts(refused) == {"bytes"}
    assert "lifted tensors" in lines_of(refused)


def test_shared_experts_that_were_encoded(tmp_path: Path) -> None:
    write_sample(tmp_path / "source", **SMALLEST, mode="uniform")
    repack(tmp_path / "source", tmp_path / "output", target="rank-sliced", tp=2)
    encode_shared(tmp_path / "output")
    verdict = verify(tmp_path / "output", source=tmp_path / "source")
    verdict.check()
    assert any(line.startswith("encoded, left to numbers: 6 tensors") for line in verdict.parts[2].scope)
    shared = "model.layers.1.mlp.shared_experts.up_proj"
    for change, part in (
        (
            lambda: tamper.change_tensor(tmp_path / "output", rf"{shared}\.suh", tamper.with_data(lambda data: b"\x01" + data[1:])),
            "contract",
        ),
        (lambda: tamper.reseal(tmp_path / "output", facts={"encoded": {}}), "bytes"),
    ):
        change()
        tamper.reseal(tmp_path / "output")
        verdict = verify(tmp_path / "output", source=tmp_path / "source")
        assert part in failed_parts(verdict)


def test_folders_that_cannot_be_meant(make: Callable[[str], Made], tmp_path: Path) -> None:
    made = make("slabs")
    for source in (made.output, made.output.parent, tmp_path / "nowhere"):
        with pytest.raises(UsageError):
            verify(made.output, source=source)
    with pytest.raises(UsageError):
        verify(tmp_path / "nowhere")
    with pytest.raises(UsageError):
        verify(made.output, reader="r34")


def test_a_folder_that_another_command_writes_to_is_not_judged(make: Callable[[str], Made]) -> None:
    with locked(make("slabs").output), pytest.raises(ResourceError, match="in use"):
        verify(make("slabs").output)


@pytest.mark.parametrize("target", ["slabs", "exl3", "r7"])
def test_a_block_that_only_quantization_config_json_has(tmp_path: Path, target: str) -> None:
    source = sample(tmp_path / "s")
    with edited_json(source / "config.json") as config:
        del config["quantization_config"]
    repack(source, tmp_path / "o", target=target, tp=2 if target == "slabs" else None)
    assert verify(tmp_path / "o", source=source).ok


def test_a_verdict_that_was_cut_while_it_was_written_is_no_unlisted_file(make: Callable[[str], Made], tmp_path: Path) -> None:
    folder = tamper.copy_output(make("r7").output, tmp_path / "o")
    (folder / f"{VERDICT}.partial").write_bytes(b'{"format"')
    assert verify(folder).ok
    assert not (folder / f"{VERDICT}.partial").exists()
