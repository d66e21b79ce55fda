"""Hostile inputs: random documents through every door of tests/hostile.py. `make fuzz` sends many more; the corpus is in test_corpus.py."""

from __future__ import annotations

import os
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.hostile import DOORS, EXAMPLES, Door, Workshop, bytes_of, document_of
from tests.spoil import lengths, scratched, spoiled, text_of

FEW, FEW_COMMANDS = 8, 2

settings.register_profile(
    "hostile",
    settings(
        deadline=None,
        database=None,
        derandomize=not EXAMPLES,
        print_blob=False,
        phases=[Phase.generate],  # the smallest document of each finding is kept: shrinking one would hide the others
        suppress_health_check=list(HealthCheck),
    ),
)

FOUND = Path(os.environ.get("R7_FUZZ_FOUND", "build/hostile"))

sent: Counter[tuple[str, str]] = Counter()
findings: dict[tuple[str, str], bytes] = {}
"""(door, what happened and where) -> the smallest document that brought it about."""


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    yield Workshop(tmp_path_factory.mktemp("hostile"))
    for name in dict.fromkeys(door for door, _ in sent):
        rows = {outcome: count for (door, outcome), count in sent.items() if door == name}
        print(f"{name}: {sum(rows.values()):,} cases: {', '.join(f'{count:,} {outcome}' for outcome, count in sorted(rows.items()))}")
    print(f"hostile: {sum(sent.values()):,} cases through {len(DOORS)} doors")


@pytest.mark.parametrize("name", list(DOORS))
@pytest.mark.usefixtures("no_fsync", "without_numbers")
def test_spoiled_values(workshop: Workshop, name: str) -> None:
    door = DOORS[name]
    good = workshop.raw(door)

    @settings(settings.get_profile("hostile"), max_examples=examples(name))
    @given(spoiled(document_of(door.form, good)))
    def send(value: Any) -> None:
        count(workshop, door, bytes_of(door.form, text_of, value, good))

    send()
    check_none_found(door)


@pytest.mark.parametrize("name", list(DOORS))
@pytest.mark.usefixtures("no_fsync", "without_numbers")
def test_scratched_bytes(workshop: Workshop, name: str) -> None:
    door = DOORS[name]
    good = workshop.raw(door)
    strategy: st.SearchStrategy[bytes] = scratched(good)
    if door.form == "header":
        strategy |= lengths.map(lambda length: length.to_bytes(8, "little") + good[8:])

    @settings(settings.get_profile("hostile"), max_examples=examples(name))
    @given(strategy)
    def send(raw: bytes) -> None:
        count(workshop, door, raw)

    send()
    check_none_found(door)


def examples(name: str) -> int:
    """Command lines take fifty times as long as readers."""
    return -(-EXAMPLES // 10) or FEW_COMMANDS if name.startswith("command") else EXAMPLES or FEW


def count(workshop: Workshop, door: Door, raw: bytes) -> None:
    try:
        sent[door.name, workshop.send(door, raw).outcome] += 1
    except Exception as error:
        sent[door.name, "crashes"] += 1
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/r7convert/" in frame.filename]
        place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "the test"
        key = door.name, f"{type(error).__name__} at {place}: {str(error)[:100]}"
        if key not in findings or len(raw) < len(findings[key]):
            findings[key] = raw


def check_none_found(door: Door) -> None:
    """Every finding at once, each with a file that belongs into tests/data/hostile."""
    mine = {what: raw for (name, what), raw in findings.items() if name == door.name}
    for number, (what, raw) in enumerate(mine.items()):
        FOUND.mkdir(parents=True, exist_ok=True)
        path = FOUND / f"{door.name.replace(' ', '-')}-{number}"
        path.write_bytes(raw)
        print(f"{path}: {what}")
    assert not mine, "\n".join(mine)


def test_doors_let_the_good_in(workshop: Workshop) -> None:
    """What is refused above is refused for what was spoiled."""
    for door in DOORS.values():
        assert not workshop.send(door, workshop.raw(door)).errors, door.name
    assert len(DOORS) > 20
