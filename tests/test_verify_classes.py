"""No byte of an output that its judge would overlook: every byte has a class (byte_classes.py), and harm to one of each is found.

What is harmed is sealed again, as a wrong writer would have done it, but for the seal and the verdict themselves. The verdict is
push's to judge, everything else verify's, with the source at hand. `make harm` tries every class of every output; the suite tries
each where its rules are a target's own, and a draw of the rest.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from r7convert.encode_shared import encode_shared
from r7convert.errors import R7Error
from r7convert.journal import MANIFEST, VERDICT, read_manifest
from r7convert.push import pack
from r7convert.repack import repack
from r7convert.sample import write_sample
from r7convert.store import read_json
from r7convert.verify import verify
from tests import tamper
from tests.byte_classes import Span, spans
from tests.folders import edited_shard
from tests.outputs import SMALLEST, Made

EVERY = os.environ.get("R7_HARM") == "all"
DRAWN = 40  # of the classes under one rule, unless every one is tried
OUTPUTS = ("rank-sliced shared_h_v1", "rank-sliced per_expert_v1", "slabs", "r7", "exl3")
LIFTED, MARKED = "rank-sliced, lifted, shared experts encoded", "exl3 with zeros and a NaN, from the Hub"

# What stands on purpose, by class; why nothing is lost by it.
STANDS = {
    r"README.md: the file": "the card quotes the verdict, so it cannot be under the seal; verify says that it was not looked into",
    r"MANIFEST.json: value allow_nonfinite": "what was asked for; values are judged, and where one is not finite this has to be true",
    r"MANIFEST.json: value policy.expected_error_(before|after)": "what was expected before the work; what came of it is measured again",
    r"MANIFEST.json: value encoded\..*\.proxy_error": "of the encoder's own space; relative_error beside it is measured again",
    r"VERDICT.json: value parts.N.(why|scope.*|layers.*|checks.N.(name|looked_at|notes.*))": "words for people; nobody decides by them",
}
# Under one rule whatever the target, or thousands of names under one: a draw of them.
ONE_RULE = re.compile(r"(config|quantization_config|model.safetensors.index|tokenizer|tokenizer_config|generation_config)\.json: .*")


@pytest.fixture(scope="module")
def made(make: Callable[[str], Made], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    def get(name: str) -> Made:
        if name in OUTPUTS:
            return make(name)
        place = tmp_path_factory.mktemp("classes")
        source, output = place / "source", place / "output"
        write_sample(source, **SMALLEST, mode="mixed")
        if name == LIFTED:
            repack(source, output, target="rank-sliced", tp=2, mixed_k="lift", device="cpu")
            encode_shared(output, device="cpu")
        else:
            with edited_shard(source / "r7-experts-layer-001.safetensors") as tensors:
                first, *_, last = sorted(key for key in tensors if key.endswith("down_proj.suh"))
                tensors[first][3], tensors[last][5] = 0.0, float("nan")
            (source / ".cache/r7convert").mkdir(parents=True)
            (source / ".cache/r7convert/download.json").write_text(json.dumps({"repo": "org/glm", "commit": "7c" * 20}))
            repack(source, output, target="exl3", allow_nonfinite=True)
        verify(output, source=source, threads=1)
        return Made(source, output)

    return get


def classes(folder: Path) -> Iterator[tuple[str, str, Span]]:
    """(class, file, span), the last span of each class: not the one that a lazy check would look at first."""
    last = {f"{tamper.class_of(path.name)}: {span.kind}": (path.name, span) for path in sorted(folder.iterdir()) for span in spans(path)}
    for kind, (file, span) in last.items():
        yield kind, file, span


def harm(file: Path, span: Span) -> None:
    """The smallest that means something: a key or value of JSON one bit apart, a measured figure by a hundredth, a bit of the rest."""
    if file.suffix != ".json" or not span.path:
        tamper.flip_bit(file, (span.start + span.stop) // 2)
        return
    value: Any = read_json(file)
    place = value
    for step in span.path[:-1]:
        place = place[step]
    if not span.is_key and isinstance(place[span.path[-1]], float):
        place[span.path[-1]] *= 1.01
    else:
        tamper.apply_change(value, span.path, "key" if span.is_key else "value")
    tamper.put(file, json.dumps(value).encode())


def is_found(made: Made, folder: Path, file: str) -> bool:
    if file == VERDICT:
        try:
            pack(folder, "org/out")
        except R7Error:
            return True
        return False
    if file != MANIFEST and file in read_manifest(folder).files:
        tamper.reseal(folder)
    return not made.judge(folder).ok


@pytest.mark.usefixtures("no_fsync", "without_numbers")
@pytest.mark.parametrize("name", [*OUTPUTS, LIFTED, MARKED])
def test_harm_to_one_byte_of_each_class_is_found(made: Callable[[str], Made], tmp_path: Path, name: str) -> None:
    output = made(name)
    whole = tamper.copy_output(output.output, tmp_path / "whole")
    assert output.judge(whole).ok
    (whole / "README.md").write_text("the card")
    tried = list(classes(whole))
    assert len({file for _, file, _ in tried}) >= 9
    if not EVERY:
        seed = int.from_bytes(os.urandom(2), "little")
        print(f"drawn with seed {seed}")
        shared = [item for item in tried if ONE_RULE.fullmatch(item[0])]
        kept = random.Random(seed).sample(shared, min(DRAWN, len(shared)))
        tried = [item for item in tried if item in kept or item not in shared]
    stood = []
    for kind, file, span in tried:
        folder = tamper.copy_output(whole, tmp_path / "copy")
        harm(folder / file, span)
        if not is_found(output, folder, file):
            stood.append(kind)
        shutil.rmtree(folder)
    reasons = {kind: [why for pattern, why in STANDS.items() if re.fullmatch(pattern, kind)] for kind in stood}
    print(f"{name}: {len(tried)} classes of bytes harmed, {len(tried) - len(stood)} found, {len(stood)} stand on purpose")
    assert [kind for kind, why in reasons.items() if not why] == []


def test_every_reason_is_needed_and_every_file_has_classes(made: Callable[[str], Made]) -> None:
    """A class that stands by a reason is there; and the files of all outputs are those that have a judge."""
    kinds = [kind for name in (*OUTPUTS, LIFTED, MARKED) for kind, _, _ in classes(made(name).output)] + ["README.md: the file"]
    for pattern in STANDS:
        assert any(re.fullmatch(pattern, kind) for kind in kinds), pattern
    for due in ("trellis", "suh", "svh", "mcg", "length word", "tensor name", "dtype", "shape", "data_offsets 0", "padding", "punctuation"):
        assert any(kind.startswith("experts-layer-N-rank-N-of-N.safetensors: ") and kind.endswith(due) for kind in kinds), due
    for due in ("zeros", "nonfinite", "source.repo", "policy.name", "reencoded", "errors", "encoded", "moe_layers", "tool", "partial"):
        assert any(kind.startswith(f"MANIFEST.json: key {due}") for kind in kinds), due


def test_bytes_without_a_class_are_noticed(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"a": [1, {"b": "c"}], "d": true}')
    found = spans(tmp_path / "x.json")
    assert [span.kind for span in found if span.path] == ["key a", "value a.0", "key a.1.b", "value a.1.b", "key d", "value d"]
    assert sum(span.stop - span.start for span in found) == (tmp_path / "x.json").stat().st_size
    (tmp_path / "y.json").write_bytes(b'{"a": 1 \x01}')
    with pytest.raises(AssertionError, match="are of no class"):
        spans(tmp_path / "y.json")
