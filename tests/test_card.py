"""The model card: it says what manifest, verdict and payload say, keeps the source's words, and nothing of this machine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from r7convert.card import BEGIN, END, render_card
from r7convert.facts import READERS, command_line
from r7convert.journal import Manifest, read_manifest
from r7convert.push import make_card
from r7convert.store import FileRecord
from r7convert.verdict import check_verdict
from tests.sealed import write_sealed

COMMIT = "7c73450f05a151439d0f184f216b1eefcc394a31"
SOURCE_README = """---
license: mit
language: [en, zh]
base_model: zai-org/GLM-5.2
tags: [glm, exl3]
pipeline_tag: text-generation
---
# GLM-5.2

Words of the source, with a table | of | its own.
"""
VERDICT: dict[str, Any] = {
    "manifest_sha256": "ab" * 32,
    "parts": [
        {"name": "seal", "state": "passed", "scope": ["every file"], "checks": [{"name": "digests", "looked_at": "12 files"}]},
        {"name": "contract", "state": "passed", "scope": ["reader r28"], "checks": []},
        {"name": "numbers", "state": "skipped", "why": "no GPU"},
    ],
}
CENSUS = {3: [(3, 4, 4), (3, 3, 4)], 4: [(5, 5, 5), (3, 3, 3)]}


def manifest(**facts: Any) -> Manifest:
    stated = {"target": "rank-sliced", "tp": 4, "reader": "r28", "source": {"repo": "org/source", "commit": COMMIT}}
    return Manifest("r7convert 0.1.0", {}, stated | {"accounting": {"kept": 10, "sliced": 90, "lifted": 5}} | facts)


def front(card: str) -> dict[str, Any]:
    match = re.match(r"---\n(.*?)\n---\n", card, re.DOTALL)
    assert match
    parsed = yaml.safe_load(match[1])
    assert isinstance(parsed, dict)
    return parsed


def test_metadata_is_completed_and_nothing_lost() -> None:
    metadata = front(render_card("org/out", manifest(), VERDICT, SOURCE_README, CENSUS))
    assert metadata == {
        "license": "mit",
        "language": ["en", "zh"],
        "base_model": "org/source",
        "tags": ["glm", "exl3", "trellis", "r7convert", "rank-sliced"],
        "pipeline_tag": "text-generation",
        "base_model_relation": "quantized",
    }


def test_says_where_from_how_made_how_served_what_was_kept_and_checked() -> None:
    card = render_card("org/out", manifest(), VERDICT, SOURCE_README, CENSUS)
    for text in (
        f"[org/source](https://huggingface.co/org/source) at commit `{COMMIT}` by r7convert 0.1.0",
        "r7convert repack org/source OUT --target rank-sliced --tp 4 --reader r28",
        "vllm serve org/out --tensor-parallel-size 4",
        "release r28 or later",
        "| **sum** | **105** |",
        "5 tensors were encoded anew",
        "| gate_proj | 3 | 0 | 1 | 3.50 |",
        "| seal | passed | every file |",
        "<details><summary>All 1 checks</summary>",
        "- seal: digests: 12 files",
        "| numbers | skipped | no GPU |",
        "- Not judged: numbers (no GPU).",
        "tensor-parallel size 4 and no other",
        "ab" * 32,
        "Words of the source, with a table | of | its own.",
    ):
        assert text in card, text
    assert card.index(END) < card.index("Words of the source")
    assert "Lossless" not in card


def test_census_picture_has_a_mark_a_layer() -> None:
    card = render_card("org/out", manifest(), VERDICT, "", {layer: [(3, 3, 3 + layer % 3)] for layer in range(3, 78)})
    strips = dict(re.findall(r"^(\w+_proj) +([▁-█]+)$", card, re.MULTILINE))
    assert {proj: len(strip) for proj, strip in strips.items()} == {"gate_proj": 75, "up_proj": 75, "down_proj": 75}
    assert set(strips["gate_proj"]) == {"▁"}
    assert strips["down_proj"].startswith("▁▅█▁")
    assert max(len(line) for line in card.splitlines() if line.startswith("gate_proj")) < 90


def test_figures_of_what_was_encoded_anew() -> None:
    reencoded = {
        "layer-3": {"m.a": {"from": 3, "to": 4, "relative_error": 0.004}, "m.b": {"from": 3, "to": 4, "relative_error": 0.006}},
        "layer-4": {"m.c": {"from": 4, "to": 3, "relative_error": 0.0174, "original_error_before": 0.0045, "original_error": 0.0175}},
    }
    encoded = {"m.shared": {"from": "bfloat16", "bits": 6, "relative_error": 0.00032}}
    accounting = {"kept": {"tensors": 9, "bytes": 1}, "lifted": {"tensors": 2, "bytes": 1}, "lowered": {"tensors": 1, "bytes": 1}}
    accounting |= {"encoded": {"tensors": 1, "bytes": 9}}
    policy = {"name": "fit", "budget": 1000, "importance": None, "reference": "x"}
    made = manifest(reencoded=reencoded, encoded=encoded, accounting=accounting, policy=policy)
    card = render_card("org/out", made, VERDICT, "", CENSUS)
    assert "| **sum** | **13** |" in card
    assert "4 tensors were encoded anew" in card
    assert "| K3 to K4 | 2 | 0.005 | 0.006 (`m.b`) |" in card
    assert "| K4 to K3 | 1 | 0.0174 | 0.0174 (`m.c`) |" in card
    assert "| bfloat16 to K6 | 1 | 0.00032 |" in card
    assert "these 1 matrices had a mean relative squared error of 0.0045; now 0.0175." in card
    assert "--mixed-k fit --budget 1000 --reference ORIGINALS\nr7convert encode-shared OUT --bits 6" in card


def test_lossless_is_said_only_where_it_is() -> None:
    card = render_card("org/out", manifest(accounting={"kept": 10, "sliced": 5}), VERDICT, "", CENSUS)
    assert "Lossless: no weight was decoded or encoded again." in card
    assert "encoded anew" not in card


@pytest.mark.parametrize("target", READERS)
def test_every_target_has_its_reader_and_command(target: str) -> None:
    card = render_card("org/out", manifest(target=target, tp=2), VERDICT, "", CENSUS)
    serve = card[card.index("## Serve") : card.index("## What was kept")]
    assert "org/out" in serve
    assert "{" not in serve
    assert f"--target {target}" in command_line(manifest(target=target).facts)


def test_a_card_over_a_card_is_the_same_card() -> None:
    first = render_card("org/out", manifest(), VERDICT, SOURCE_README, CENSUS)
    assert render_card("org/out", manifest(), VERDICT, first, CENSUS) == first
    assert first.count(BEGIN) == first.count(END) == 1


def test_a_licence_without_a_word_in_the_metadata_is_linked() -> None:
    licensed = Manifest("r7convert 0.1.0", {"LICENSE": FileRecord(1, "00")}, {"target": "r7"})
    assert front(render_card("org/out", licensed, VERDICT, "", CENSUS)).items() >= {"license": "other", "license_link": "LICENSE"}.items()
    assert front(render_card("org/out", licensed, VERDICT, SOURCE_README, CENSUS))["license"] == "mit"
    assert "license" not in front(render_card("org/out", manifest(), VERDICT, "", CENSUS))


@pytest.mark.parametrize(
    "readme", ["", "# plain\n", "---\n: [broken\n---\n# body\n", "---\n- a list\n---\nbody", "\ufeff# bom", "--- no front ---"]
)
def test_any_readme_will_do(readme: str) -> None:
    card = render_card("org/out", manifest(), VERDICT, readme, CENSUS)
    assert front(card)["base_model"] == "org/source"
    assert readme.strip().splitlines()[-1:] == [] or readme.strip().splitlines()[-1] in card


def test_without_facts_nothing_is_invented() -> None:
    card = render_card("org/out", Manifest("r7convert 0.1.0", {}, {"target": "r7"}), VERDICT, "", {})
    assert "base_model" not in front(card)
    assert "an EXL3 checkpoint" in card
    assert "The manifest states no accounting." in card
    assert "None" not in card


def test_card_of_a_real_folder_tells_nothing_of_this_machine(tmp_path: Path) -> None:
    out = write_sealed(tmp_path / "out")
    (out / "README.md").write_text(SOURCE_README)
    card = make_card(out, "org/out", read_manifest(out), check_verdict(out)).decode()
    assert "Words of the source" in card
    assert "| gate_proj |" in card
    assert str(tmp_path) not in card
    assert make_card(out, "org/out", read_manifest(out), check_verdict(out)).decode() == card


@pytest.mark.parametrize(
    "front",
    [
        "date: 2024-99-99",
        "tags: 5",
        "tags: {a: b}",
        "tags: [[1], 2]",
        "a: " + "[" * 5000,
        "a: " + "9" * 5000,
        "a: !!python/object/apply:os.system [x]",
        "? [a]\n: b",
        "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\nd: &d [*c, *c]\ne: &e [*d, *d]\nf: [*e, *e]",
        "\x00",
    ],
)
def test_hostile_metadata_of_a_readme(front: str) -> None:
    manifest = Manifest("r7convert 0.1.0", {}, {"target": "exl3"})
    card = render_card("org/name", manifest, VERDICT, f"---\n{front}\n---\n# body\n", CENSUS)
    assert "# body" in card
    assert len(card) < 20_000
