"""The verdict: what counts as ok, how failures are counted and shown, and what push may rely on."""

from __future__ import annotations

from pathlib import Path

import pytest

from r7convert.errors import FormatError, VerifyError
from r7convert.findings import Part
from r7convert.journal import VERDICT, Manifest, manifest_digest, write_manifest
from r7convert.store import read_json, write_json
from r7convert.verdict import Verdict, check_verdict, write_verdict


def verdict(digest: str, *parts: Part) -> Verdict:
    return Verdict(digest, "rank-sliced", 2, "r28", parts)


def passed(name: str) -> Part:
    part = Part(name)
    part.check("rule").saw()
    return part


def test_ok_needs_seal_and_contract_and_no_failure() -> None:
    assert verdict("", passed("seal"), passed("contract"), Part("bytes", why_skipped="no source")).ok
    assert not verdict("", passed("seal"), Part("contract", why_skipped="no seal")).ok
    assert not verdict("").ok
    failed = passed("bytes")
    failed.check("rule").fail("file", "digest", expected="a", found="b")
    judged = verdict("", passed("seal"), passed("contract"), failed)
    assert not judged.ok
    with pytest.raises(VerifyError, match=r"bytes: rule: file: digest: expected a, got b") as error:
        judged.check()
    assert error.value.exit_code == 4


def test_failures_are_all_counted_and_twenty_are_shown() -> None:
    part = Part("contract")
    for n in range(57):
        part.check("rule").expect(n % 2 == 1, f"tensor {n}", "K", expected=3, found=4)
    lines = verdict("", part).failure_lines()
    assert part.failures == 29
    assert part.check("rule").looked_at == 57
    assert len(lines) == 21
    assert lines[-1] == "... and 9 more"


def test_a_true_for_a_one_is_no_match() -> None:
    part = Part("contract")
    assert not part.check("rule").same("config.json", "tp", expected=1, found=True)
    assert part.check("rule").same("config.json", "tp", expected=1, found=1)


def test_errors_of_a_parser_become_failures_line_by_line() -> None:
    part = Part("contract")
    with part.check("headers").collecting():
        raise FormatError("a: broken\nb: broken")
    assert part.check("headers").failures == 2


def test_push_takes_only_an_ok_verdict_of_this_manifest(tmp_path: Path) -> None:
    write_manifest(tmp_path, Manifest("r7convert", {}, {"target": "rank-sliced", "tp": 2}))
    with pytest.raises(VerifyError, match="nobody judged"):
        check_verdict(tmp_path)
    write_verdict(tmp_path, verdict(manifest_digest(tmp_path), passed("seal"), passed("contract")))
    assert check_verdict(tmp_path)["ok"] is True
    assert {path.name for path in tmp_path.iterdir()} == {"MANIFEST.json", VERDICT}

    write_manifest(tmp_path, Manifest("r7convert", {}, {"target": "rank-sliced", "tp": 2, "reader": "r28"}))
    with pytest.raises(VerifyError, match="another manifest"):
        check_verdict(tmp_path)
    write_verdict(tmp_path, verdict(manifest_digest(tmp_path), passed("seal")))
    with pytest.raises(VerifyError, match="failed"):
        check_verdict(tmp_path)
    written = read_json(tmp_path / VERDICT)
    parts = [{**written["parts"][0], "state": "failed"}], [{**written["parts"][0], "failures": 1}], written["parts"] * 2
    others = ("target", "r7"), ("tp", 4), ("tp", True), ("reader", "r99"), ("tool", "x"), ("more", 1), *(("parts", part) for part in parts)
    for broken in (
        *({**written, key: value} for key, value in others),
        [],
        {**written, "ok": 1},
        {**written, "format": "other"},
        {**written, "parts": None},
    ):
        write_json(tmp_path / VERDICT, broken)
        with pytest.raises(VerifyError):
            check_verdict(tmp_path)


def test_an_unsealed_folder_gets_no_verdict(tmp_path: Path) -> None:
    write_verdict(tmp_path, verdict("", passed("seal")))
    assert list(tmp_path.iterdir()) == []
