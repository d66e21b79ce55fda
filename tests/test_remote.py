"""A checkpoint read from the Hub by ranges: the same object as from a folder, for a few bytes of it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from r7convert.address import Repo
from r7convert.checkpoint import INDEX, Checkpoint, build_checkpoint, read_checkpoint
from r7convert.errors import FormatError, NetworkError
from r7convert.remote import MOST_FETCHED_BYTES, RemoteSource
from r7convert.sample import write_sample
from r7convert.store import encode_header
from tests.hub_server import Fault, HubServer

REPO = Repo("org/glm")


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sample") / "src"
    write_sample(folder)
    return folder


def upload(hub: HubServer, folder: Path, **more: bytes) -> str:
    files: dict[str, Any] = {path.name: path.read_bytes() for path in folder.iterdir()}
    return hub.add_repo(REPO.id, files | more)


def said(checkpoint: Checkpoint) -> dict[str, Any]:
    names = ("config", "quantization", "geometry", "weight_map", "headers", "tensors", "r7", "tail", "experts", "shared_experts", "mtp")
    return {name: getattr(checkpoint, name) for name in names}


def test_the_same_checkpoint_as_from_a_folder(hub: HubServer, sample: Path) -> None:
    commit = upload(hub, sample)
    source = RemoteSource(REPO)
    checkpoint = build_checkpoint(source)
    assert said(checkpoint) == said(read_checkpoint(sample))
    assert (source.repo, source.commit) == (REPO.id, commit)
    assert not source.notes
    payload = sum(path.stat().st_size for path in sample.glob("*.safetensors"))
    assert hub.sent_bytes() < payload / 5, "a payload was fetched"
    assert source.fetched_bytes <= hub.sent_bytes()
    name, entry = next(iter(checkpoint.tensors.items()))
    assert name
    raw = (sample / entry.file).read_bytes()
    assert source.read(entry.file, entry.offset, 10) == raw[entry.offset : entry.offset + 10]
    assert not [r for r in hub.requests if r.port == "cdn" and r.authorized]


def test_the_bound_leaves_out_the_index_then_the_sidecars(hub: HubServer, sample: Path) -> None:
    upload(hub, sample)
    whole = RemoteSource(REPO)
    build_checkpoint(whole)
    index_bytes = (sample / INDEX).stat().st_size
    hub.requests.clear()
    tight = RemoteSource(REPO, most_bytes=whole.fetched_bytes - 1)
    assert said(build_checkpoint(tight)) == said(read_checkpoint(sample))
    assert tight.fetched_bytes == whole.fetched_bytes - index_bytes
    assert [INDEX in note for note in tight.notes] == [True]
    assert not hub.asked(f"GET .*{INDEX}")
    tighter = RemoteSource(REPO, most_bytes=tight.fetched_bytes - 1)
    checkpoint = build_checkpoint(tighter)
    assert said(checkpoint) == said(read_checkpoint(sample))
    assert "sidecars" in tighter.notes[1]
    assert checkpoint.warnings
    assert tighter.fetched_bytes < tight.fetched_bytes


def test_faults_on_the_way_are_waited_out(hub: HubServer, sample: Path) -> None:
    upload(hub, sample)
    hub.faults += [
        Fault("GET /cdn/", cut=3),
        Fault("GET /cdn/", skip=1, cut=1000, times=2),
        Fault("GET /cdn/", skip=1, status=429, headers={"Retry-After": "3"}),
        Fault("GET /org/glm/resolve/.*config.json", status=503, times=2),
    ]
    assert said(build_checkpoint(RemoteSource(REPO))) == said(read_checkpoint(sample))
    assert all(fault.times == 0 for fault in hub.faults)
    assert any(3 <= s < 4 for s in hub.sleeps)


def test_a_server_without_ranges_is_refused_not_drained(hub: HubServer, sample: Path) -> None:
    upload(hub, sample)
    hub.faults.append(Fault("GET /cdn/", whole=True, times=1000))
    with pytest.raises(NetworkError, match="range request: expected status 206, got 200"):
        build_checkpoint(RemoteSource(REPO))


def test_pointer_and_broken_shards_are_all_named(hub: HubServer, sample: Path) -> None:
    shards = sorted(path.name for path in sample.glob("*.safetensors"))
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 99\n"
    upload(hub, sample, **{shards[0]: pointer, shards[1]: b"\xff" * 64})
    with pytest.raises(FormatError) as caught:
        build_checkpoint(RemoteSource(REPO))
    assert f"{shards[0]}: this is a pointer" in str(caught.value)
    assert f"{shards[1]}: header length" in str(caught.value)


def test_a_full_size_repository_costs_at_most_30_mb(hub: HubServer, tmp_path: Path) -> None:
    """GLM-5.2's R7 layers at full geometry: 172,950 tensors, 346 GB of sparse files behind a real HTTP server."""
    hidden, inner, experts, layers = 6144, 2048, 256, range(3, 78)
    files: dict[str, Any] = {}
    weight_map: dict[str, str] = {}
    template = _one_layer(hidden, inner, experts)
    total = 0
    for layer in layers:
        name = f"r7-experts-layer-{layer:03d}.safetensors"
        tensors = [(tensor.replace("{L}", str(layer)), dtype, shape) for tensor, dtype, shape in template]
        header = encode_header(tensors, {"format": "pt"}, name)
        path = tmp_path / name
        path.write_bytes(header)
        size = len(header) + sum(_nbytes(dtype, shape) for _, dtype, shape in tensors)
        os.truncate(path, size)
        total += size
        files[name] = path
        weight_map |= dict.fromkeys((tensor for tensor, _, _ in tensors), name)
        bit_map = {t.removesuffix(".trellis"): shape[2] // 16 for t, _, shape in tensors if t.endswith(".trellis")}
        files[f"r7-experts-layer-{layer:03d}.json"] = json.dumps({"bit_map": bit_map}, indent=2).encode()
    files[INDEX] = json.dumps({"metadata": {}, "weight_map": weight_map}, indent=2).encode()
    r7 = {"schema": "r7-complete-v2-checkpoint-v1", "codebook": "mcg", "bits": "mixed_tensor", "moe_layers": [3, 77], "k_values": [3, 4]}
    config = {"hidden_size": hidden, "moe_intermediate_size": inner, "n_routed_experts": experts}
    config |= {"num_hidden_layers": 78, "first_k_dense_replace": 3}
    files["config.json"] = json.dumps(config | {"quantization_config": {"r7_routed_experts": r7}}).encode()
    hub.add_repo(REPO.id, files)
    assert total > 280e9
    source = RemoteSource(REPO)
    checkpoint = build_checkpoint(source)
    assert len(checkpoint.tensors) == 75 * 2306
    assert len(checkpoint.experts) == 75
    assert hub.sent_bytes() <= MOST_FETCHED_BYTES
    assert source.fetched_bytes > 20e6
    assert len(source.notes) == 1


def _one_layer(hidden: int, inner: int, experts: int) -> list[tuple[str, str, list[int]]]:
    base = "model.layers.{L}.mlp.experts"
    tensors: list[tuple[str, str, list[int]]] = []
    for expert in range(experts):
        for proj in ("gate_proj", "up_proj", "down_proj"):
            rows, cols = (inner, hidden) if proj == "down_proj" else (hidden, inner)
            bits = 3 + (expert + len(proj)) % 2
            tensors += [
                (f"{base}.{expert}.{proj}.trellis", "I16", [rows // 16, cols // 16, 16 * bits]),
                (f"{base}.{expert}.{proj}.{'suh' if proj == 'down_proj' else 'svh'}", "F16", [inner]),
                (f"{base}.{expert}.{proj}.mcg", "I32", []),
            ]
    return [*tensors, (f"{base}.r7_shared.gate_up_suh", "F16", [hidden]), (f"{base}.r7_shared.down_svh", "F16", [hidden])]


def _nbytes(dtype: str, shape: list[int]) -> int:
    count = 1
    for n in shape:
        count *= n
    return count * (4 if dtype == "I32" else 2)


def test_a_snapshot_of_the_clients_own_cache_is_a_source(hub: HubServer, sample: Path) -> None:
    from huggingface_hub import snapshot_download

    commit = upload(hub, sample)
    snapshot = Path(snapshot_download(REPO.id))
    found = read_checkpoint(snapshot)
    assert said(found) == said(read_checkpoint(sample))
    assert (found.source.repo, found.source.commit) == (REPO.id, commit)
    (snapshot / "r7-experts-layer-003.safetensors").resolve().unlink()
    with pytest.raises(FormatError, match=r"r7-experts-layer-003\.safetensors: dangling link"):
        read_checkpoint(snapshot)


def test_an_incomplete_snapshot_is_refused_by_name(hub: HubServer, sample: Path) -> None:
    from huggingface_hub import snapshot_download

    upload(hub, sample)
    snapshot = Path(snapshot_download(REPO.id, ignore_patterns=["r7-experts-layer-004.safetensors"]))
    with pytest.raises(FormatError, match=r"r7-experts-layer-004\.safetensors: missing file, named by \d+ index entries"):
        read_checkpoint(snapshot)
