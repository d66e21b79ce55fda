"""Sizes that readers set limits to, for whole models: headers and indexes at any tp. `make scale` builds them; see bench_scale.py."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from r7convert.experts import ExpertLayer, Hidden
from r7convert.format import Geometry, TensorEntry, legal_tps
from r7convert.moves import LayerPlan
from r7convert.store import MAX_HEADER_READ, MAX_HEADER_WRITE, MAX_JSON_BYTES, MAX_JSON_CONTAINERS, MAX_JSON_VALUES, parse_header

HUB_HELPERS = 25_000_000
OFFICIAL = 100_000_000


def geometry(hidden: int, intermediate: int, experts: int, layers: int) -> Geometry:
    return Geometry(hidden, intermediate, experts, 1, layers, tuple(range(3, layers)), 1, False)


MODELS = {
    "GLM-5.2": geometry(6144, 2048, 256, 78),
    "384 experts, as Kimi has them": geometry(7168, 2048, 384, 61),
    "1,024 experts of 4,096 channels": geometry(8192, 4096, 1024, 128),
}


class Markers(dict[str, TensorEntry]):
    """Every marker there could be: of a source's tensors a header is told nothing else."""

    def __missing__(self, name: str) -> TensorEntry:
        return TensorEntry(name, "I32", (), "x", 0, 4)


@dataclass(frozen=True)
class Sizes:
    header: int
    entries: int
    index: int


def sizes_of(model: Geometry, tp: int | None, hidden: Hidden) -> Sizes:
    """Bytes of the longest header, and of the whole index: that of the last layer's last rank, whose numbers are longest, for all."""
    layer = model.layers
    base = f"model.layers.{layer}.mlp.experts"
    bits = tuple((3 + e % 3, 3 + (e + 1) % 3, 3 + (e + 2) % 3) for e in range(model.experts))
    source = ExpertLayer("model.layers", layer, base, "mlp", None, "r7_shared", "mcg", bits, Markers())
    plan = LayerPlan(source, model, tp, hidden, bits, {"format": "pt"})
    rank = (tp or 1) - 1
    raw = plan.header(rank)
    header = parse_header(raw[8:], file="x", size=len(raw) + plan.file_nbytes)
    entries = len(header.tensors) * (tp or 1) * (len(model.moe_layers) + 1)
    one = sum(len(json.dumps({name: plan.files[rank]}, separators=(",", ":"))) - 1 for name in header.tensors)
    return Sizes(len(raw) - 8, entries, one * (tp or 1) * (len(model.moe_layers) + 1))


def every_form(model: Geometry) -> Iterator[tuple[int | None, Hidden]]:
    for tp in legal_tps(model.intermediate):
        yield tp, "shared_h"
        yield tp, "per_expert"
    yield None, "per_expert"
    yield None, "r7_shared"


@pytest.mark.parametrize("name", list(MODELS))
def test_headers_stay_under_every_readers_limit_at_any_tp(name: str) -> None:
    model, looked = MODELS[name], 0
    for tp, hidden in every_form(model):
        sizes = sizes_of(model, tp, hidden)
        print(f"{name}: tp {tp}, {hidden}: header {sizes.header:,} bytes; index {sizes.entries:,} entries, {sizes.index:,} bytes")
        assert sizes.header < MAX_HEADER_WRITE < HUB_HELPERS < OFFICIAL
        looked += 1
    assert looked >= 12
    assert MAX_HEADER_READ == OFFICIAL


@pytest.mark.parametrize("name", ["GLM-5.2", "384 experts, as Kimi has them"])
def test_what_is_written_can_be_read_and_downloaded_again(name: str) -> None:
    """The index is the largest JSON there is: the reader's bounds on hostile documents leave room for it."""
    model = MODELS[name]
    largest = sizes_of(model, 16, "per_expert")
    assert 3_000_000 < largest.entries < MAX_JSON_VALUES // 2
    assert largest.index < MAX_JSON_BYTES
    # tensor_storage of target exl3: a module has two objects and four tensors with an object and a shape each
    assert 10 * 3 * model.experts * (len(model.moe_layers) + 1) < MAX_JSON_CONTAINERS // 2


def test_the_issues_figure_at_tp_4() -> None:
    """FORMAT.md section 4: 12,288 tensors a layer with own vectors, 9,228 with shared ones."""
    assert sizes_of(MODELS["GLM-5.2"], 4, "per_expert").entries == 12_288 * 76
    assert sizes_of(MODELS["GLM-5.2"], 4, "shared_h").entries == 9_228 * 76
