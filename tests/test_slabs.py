"""Slab arithmetic against FORMAT.md section 5 read once more in plain loops, and the reader against tables stacked by hand."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import r7convert
from r7convert.errors import FormatError, UsageError
from r7convert.format import PER_EXPERT_V1, PROJECTIONS, SHARED_H_V1
from r7convert.slab_layout import SIDECAR, SlabLayout, place_slabs, plan_slabs, sidecar_header, sidecar_layer, slab_order
from r7convert.slabs import open_slabs
from r7convert.store import encode_header, write_json

HIDDEN, INTERMEDIATE, TP = 256, 512, 2
INNER = INTERMEDIATE // TP
MIXED = ((3, 4, 5), (4, 3, 5), (3, 3, 4), (5, 5, 5))
tables = st.lists(st.tuples(*[st.sampled_from((3, 4, 5))] * 3), min_size=1, max_size=40)


@given(tables)
def test_tables_follow_the_page(bits: list[tuple[int, int, int]]) -> None:
    layout = plan_slabs(bits, hidden=HIDDEN, inner=INNER)
    tiers = sorted({k for row in bits for k in row})
    assert list(layout.tiers) == tiers
    counts = [[sum(row[p] == k for row in bits) for k in tiers] for p in range(3)]
    assert [[len(ids) for ids in table] for table in (layout.gates, layout.ups, layout.downs)] == counts
    assert layout.fc1_slots == tuple(max(g, u, 1) for g, u in zip(counts[0], counts[1], strict=True))
    assert layout.stride == sum(layout.fc1_slots) >= len(bits)
    assert layout.bits() == [list(row) for row in bits]
    descriptors = layout.descriptors()
    assert descriptors is not None
    assert len(descriptors) == 3 * layout.stride
    for p in range(3):
        row = descriptors[p * layout.stride :][: layout.stride]
        running = dict.fromkeys(tiers, 0)
        for expert, k_row in enumerate(bits):
            k = k_row[p]
            assert row[expert] == (tiers.index(k) << 8 | running[k])
            running[k] += 1
        assert set(row[len(bits) :]) <= {-1}


@given(tables, st.sampled_from((PER_EXPERT_V1, SHARED_H_V1)))
def test_ranges_are_the_tensors_of_the_order_end_to_end(bits: list[tuple[int, int, int]], rotation_layout: str) -> None:
    layout = plan_slabs(bits, hidden=HIDDEN, inner=INNER)
    placed = place_slabs(layout, rotation_layout, "f", 4096)
    ranges = [*placed.w13, *placed.w2, placed.rotations, placed.gate_suh, placed.up_suh, placed.down_svh]
    at = 4096
    for place in ranges:
        assert place.offset == at
        assert at % 16 == 0
        at += place.nbytes
    order = list(slab_order(layout, rotation_layout))
    assert len(set(order)) == len(order)
    vectors = 6 if rotation_layout == PER_EXPERT_V1 else 3
    assert len(order) == len(bits) * (6 + vectors) + (0 if vectors == 6 else 3)
    nbytes = sum(len(data) for _, _, _, data in _tensors(layout, rotation_layout, 0, None) if _ != "mcg")
    assert nbytes == at - 4096


def test_a_tier_of_more_than_256_has_no_descriptors() -> None:
    assert plan_slabs([(3, 4, 4)] * 256, hidden=128, inner=128).descriptors() is not None
    assert plan_slabs([(3, 4, 4)] * 257, hidden=128, inner=128).descriptors() is None


# ---- the reader -----------------------------------------------------------------------------------------------------


def _tensors(layout: SlabLayout, rotation_layout: str, rank: int, generator: torch.Generator | None):
    """(expert, proj, field, bytes) in file order; zeros where there is no generator."""
    bits = layout.bits()
    for expert, proj, field in slab_order(layout, rotation_layout):
        k = bits[expert or 0][PROJECTIONS.index(proj)]
        rows, cols = (layout.inner, layout.hidden) if proj == "down_proj" else (layout.hidden, layout.inner)
        nbytes = {"trellis": rows * cols * k // 8, "suh": 2 * rows, "svh": 2 * cols, "mcg": 4}[field]
        if generator is None:
            yield expert, proj, field, bytes(nbytes)
        else:
            yield expert, proj, field, torch.randint(0, 120, (nbytes,), generator=generator, dtype=torch.uint8).numpy().tobytes()


def write_folder(folder: Path, bits, rotation_layout: str) -> dict:
    layout = plan_slabs(bits, hidden=HIDDEN, inner=INNER)
    generator = torch.Generator().manual_seed(7)
    data, placed = {}, []
    for rank in range(TP):
        file = f"experts-layer-003-rank-{rank}-of-{TP}.safetensors"
        tensors = list(_tensors(layout, rotation_layout, rank, generator))
        header = encode_header([(f"{e}.{p}.{f}", "U8", (len(raw),)) for e, p, f, raw in tensors], {}, file)
        (folder / file).write_bytes(header + b"".join(raw for *_, raw in tensors))
        placed.append(place_slabs(layout, rotation_layout, file, len(header)))
        data |= {(rank, e, p, f): raw for e, p, f, raw in tensors}
    sizes = {"hidden": HIDDEN, "intermediate": INTERMEDIATE, "experts": len(bits), "tp": TP}
    sidecar = sidecar_header(**sizes, rotation_layout=rotation_layout)
    sidecar["layers"]["3"] = sidecar_layer(layout, placed)
    write_json(folder / SIDECAR, sidecar)
    return data


@pytest.mark.parametrize("rotation_layout", [PER_EXPERT_V1, SHARED_H_V1])
@pytest.mark.parametrize("bits", [MIXED, ((4, 4, 4),) * 3, ((3, 3, 3), (4, 4, 4))], ids=["mixed", "one-k", "stock"])
def test_opened_tables_are_the_stacked_tensors(tmp_path: Path, bits, rotation_layout: str) -> None:
    data = write_folder(tmp_path, bits, rotation_layout)
    tiers, experts, compared = sorted({k for row in bits for k in row}), len(bits), 0

    def raw(tensor: torch.Tensor) -> bytes:
        return tensor.contiguous().numpy().tobytes()

    for rank in range(TP):
        slabs = open_slabs(tmp_path, 3, rank)
        for t, k in enumerate(tiers):
            gates = [data[rank, e, "gate_proj", "trellis"] for e in range(experts) if bits[e][0] == k]
            ups = [data[rank, e, "up_proj", "trellis"] for e in range(experts) if bits[e][1] == k]
            downs = [data[rank, e, "down_proj", "trellis"] for e in range(experts) if bits[e][2] == k]
            assert raw(slabs.w13[t]) == b"".join(gates + ups)
            assert raw(slabs.w2[t]) == b"".join(downs)
            assert slabs.w13[t].shape == (len(gates) + len(ups), HIDDEN // 16, INNER // 16, 16 * k)
            assert slabs.w2[t].shape == (len(downs), INNER // 16, HIDDEN // 16, 16 * k)
            assert (slabs.gate_n[t], slabs.up_n[t], slabs.down_n[t]) == (len(gates), len(ups), len(downs))
            compared += len(gates) + len(ups) + len(downs)
        fields = (("gate_proj", "svh"), ("up_proj", "svh"), ("down_proj", "suh"))
        assert raw(slabs.rotations) == b"".join(data[rank, e, p, f] for e in range(experts) for p, f in fields)
        rows = [None] if rotation_layout == SHARED_H_V1 else range(experts)
        for name, p, f in (("gate_suh", "gate_proj", "suh"), ("up_suh", "up_proj", "suh"), ("down_svh", "down_proj", "svh")):
            assert raw(getattr(slabs, name)) == b"".join(data[rank, e, p, f] for e in rows)
        assert slabs.route_map.tolist() == list(range(experts))
        assert slabs.descriptors is not None
        assert slabs.descriptors.shape == (3 * slabs.stride,)
    assert compared == TP * 3 * experts


def test_tables_are_views_of_one_private_mapping(tmp_path: Path) -> None:
    write_folder(tmp_path, MIXED, SHARED_H_V1)
    path = tmp_path / "experts-layer-003-rank-0-of-2.safetensors"
    before = path.read_bytes()
    slabs = open_slabs(tmp_path, 3, 0)
    assert slabs.w13[1].data_ptr() - slabs.w13[0].data_ptr() == slabs.w13[0].nbytes
    assert slabs.w2[1].data_ptr() - slabs.w13[-1].data_ptr() == slabs.w13[-1].nbytes
    slabs.w13[0].zero_()
    assert path.read_bytes() == before


def test_empty_tiers_are_empty_tensors(tmp_path: Path) -> None:
    write_folder(tmp_path, ((3, 3, 4), (3, 3, 4)), SHARED_H_V1)
    slabs = open_slabs(tmp_path, 3, 1)
    assert slabs.w13[1].shape[0] == slabs.w2[0].shape[0] == 0
    assert slabs.fc1_slots == (2, 1)
    assert slabs.stride == 3
    assert slabs.descriptors is not None
    assert slabs.descriptors.tolist() == [0, 1, -1, 0, 1, -1, 256, 257, -1]


@pytest.mark.parametrize(("layer", "rank", "named"), [(4, 0, "layer"), (3, 2, "rank"), (3, -1, "rank"), (3, True, "rank")])
def test_what_is_not_there_is_named(tmp_path: Path, layer: int, rank: int, named: str) -> None:
    write_folder(tmp_path, MIXED, SHARED_H_V1)
    with pytest.raises(UsageError, match=named):
        open_slabs(tmp_path, layer, rank)


def _leaves(value, path=()):
    if isinstance(value, dict):
        for key in value:
            yield from _leaves(value[key], (*path, key))
    elif isinstance(value, list):
        for at in range(len(value)):
            yield from _leaves(value[at], (*path, at))
    else:
        yield path


def test_every_number_of_the_sidecar_is_checked(tmp_path: Path) -> None:
    write_folder(tmp_path, MIXED, PER_EXPERT_V1)
    good, checked = (tmp_path / SIDECAR).read_text(), 0
    for path in _leaves(json.loads(good)):
        broken = json.loads(good)
        place = broken
        for key in path[:-1]:
            place = place[key]
        if not isinstance(place[path[-1]], int):
            continue
        place[path[-1]] += 1
        (tmp_path / SIDECAR).write_text(json.dumps(broken))
        with pytest.raises(FormatError):
            open_slabs(tmp_path, 3, 1)
        checked += 1
    assert checked > 100


@pytest.mark.parametrize("file", ["../x.safetensors", "/etc/passwd", "a\0b", ""])
def test_files_outside_the_folder_are_refused(tmp_path: Path, file: str) -> None:
    write_folder(tmp_path, MIXED, SHARED_H_V1)
    broken = json.loads((tmp_path / SIDECAR).read_text())
    broken["layers"]["3"]["ranks"][0]["file"] = file
    (tmp_path / SIDECAR).write_text(json.dumps(broken))
    with pytest.raises(FormatError, match="file name"):
        open_slabs(tmp_path, 3, 0)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, MIXED, SHARED_H_V1)
    path = tmp_path / "experts-layer-003-rank-0-of-2.safetensors"
    path.write_bytes(path.read_bytes()[:10_000])
    with pytest.raises(FormatError, match="10000"):
        open_slabs(tmp_path, 3, 0)


json_values = st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5), lambda s: st.lists(s, max_size=3), max_leaves=5)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_hostile_sidecars_meet_our_own_errors(tmp_path_factory: pytest.TempPathFactory, data) -> None:
    folder = tmp_path_factory.mktemp("hostile")
    write_folder(folder, ((3, 4, 4),), SHARED_H_V1)
    sidecar = json.loads((folder / SIDECAR).read_text())
    path = data.draw(st.sampled_from(list(_leaves(sidecar))))
    cut = data.draw(st.integers(1, len(path)))
    place = sidecar
    for key in path[: cut - 1]:
        place = place[key]
    place[path[cut - 1]] = data.draw(json_values)
    (folder / SIDECAR).write_text(json.dumps(sidecar))
    with contextlib.suppress(FormatError, UsageError):
        open_slabs(folder, 3, 0)


def test_exported_without_importing_torch() -> None:
    assert r7convert.open_slabs is open_slabs
    code = "import sys, r7convert; assert 'torch' not in sys.modules; r7convert.open_slabs; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
