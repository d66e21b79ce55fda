"""convert: the chain from a recipe, against a loopback Hub: what it makes, where it goes on, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from r7convert import convert as convert_module
from r7convert.address import Repo
from r7convert.convert import STATE, convert, plan_stages
from r7convert.download import download
from r7convert.errors import NetworkError, UnsupportedError, UsageError, VerifyError
from r7convert.journal import read_manifest
from r7convert.recipe import Recipe, find_recipe, parse_recipe, read_recipe
from r7convert.sample import write_sample
from r7convert.verify import verify
from tests.hub_server import Fault, HubServer

SOURCE = "org/glm"


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("convert") / "src"
    write_sample(folder, mode="uniform", hidden=128, intermediate=256)
    return folder


@pytest.fixture
def commit(hub: HubServer, sample: Path) -> str:
    return hub.add_repo(SOURCE, {path.name: path.read_bytes() for path in sample.iterdir()})


def recipe(commit: str | None, *, push: bool = True, **convert: Any) -> Recipe:
    raw: dict[str, Any] = {"format": "r7convert-recipe-v1", "title": "a test", "convert": {"target": "rank-sliced", "tp": 2} | convert}
    if commit is not None:
        raw["source"] = {"repo": SOURCE, "commit": commit}
    if push:
        raw["destination"] = {"repo": "org/out", "private": True, "tag": "v1"}
    return parse_recipe(raw)


@pytest.mark.parametrize(
    ("name", "kind", "stages"),
    [
        ("rank-sliced-to-tp8", {"kind": "rank-sliced", "tail_tp": 4}, ["repack", "encode-shared", "verify"]),
        ("exl3-to-rank-sliced-tp4", {"kind": "exl3", "family": "qwen", "mtp": "none"}, ["repack", "verify"]),
    ],
)
def test_recipes_without_a_repository_run_on_their_kind(tmp_path: Path, name: str, kind: dict[str, Any], stages: list[str]) -> None:
    sizes = {"hidden": 128, "intermediate": 1024, "experts": 2, "layers": 2, "dense": 1}
    write_sample(tmp_path / "source", **sizes, mode="uniform", **kind)
    made = convert(read_recipe(find_recipe(name)), tmp_path / "w", source=tmp_path / "source")
    assert list(made.stages) == stages
    assert {made.stages["verify"][part] for part in ("seal", "contract", "bytes", "numbers")} == {"passed"}
    accounting = read_manifest(made.output).facts["accounting"]
    assert accounting["sliced"]["tensors"] > 0
    assert accounting.keys() <= {"kept", "sliced", "encoded"}


def test_the_samples_recipe_runs_whole(tmp_path: Path) -> None:
    made = convert(read_recipe(find_recipe("sample")), tmp_path / "w")
    assert list(made.stages) == ["sample", "repack", "encode-shared", "verify"]
    assert made.stages["encode-shared"]["encoded"] == 9
    assert (made.stages["verify"]["seal"], made.stages["verify"]["contract"], made.stages["verify"]["bytes"]) == ("passed",) * 3
    assert read_manifest(made.output).facts["target"] == "rank-sliced"
    assert json.dumps(made.to_json())


def test_a_repository_becomes_another(hub: HubServer, commit: str, sample: Path, tmp_path: Path) -> None:
    made = convert(recipe(commit), tmp_path / "w")
    assert list(made.stages) == ["download", "repack", "verify", "push"]
    head = hub.repos["org/out"].branches["main"]
    assert made.url == f"{hub.url}/org/out/commit/{head}"
    assert hub.repos["org/out"].tags == {"v1": head}
    assert hub.repos["org/out"].private
    card = hub.read("org/out", "README.md").decode()
    assert f"base_model: {SOURCE}" in card
    assert f"`{commit}`" in card
    assert "source tensors" in card
    download(Repo("org/out"), tmp_path / "again")
    assert verify(tmp_path / "again", source=sample).ok
    hub.requests.clear()
    assert convert(recipe(commit), tmp_path / "w") == made
    assert not hub.requests, "everything was done before"


@pytest.mark.parametrize(
    ("fault", "done"),
    [
        (Fault("GET /cdn/", status=403, times=1000), []),
        (Fault("POST .*/commit/", skip=1, status=403), ["download", "repack", "verify"]),
    ],
)
def test_a_chain_goes_on_where_it_stopped(hub: HubServer, commit: str, tmp_path: Path, fault: Fault, done: list[str]) -> None:
    hub.faults.append(fault)
    with pytest.raises(NetworkError, match="status 403"):
        convert(recipe(commit), tmp_path / "w")
    assert list(json.loads((tmp_path / "w" / STATE).read_text())["done"]) == done
    hub.faults.clear()
    hub.commit(SOURCE, "main", "moved", {"config.json": b"{}"})
    assert convert(recipe(commit), tmp_path / "w").url
    assert read_manifest(tmp_path / "w" / "out").facts["source"]["commit"] == commit


def test_experts_that_mix_k_are_fitted(tmp_path: Path) -> None:
    write_sample(tmp_path / "src", hidden=128, intermediate=256)
    with pytest.raises(UnsupportedError, match="--mixed-k"):
        convert(recipe(None, push=False), tmp_path / "w", source=tmp_path / "src", dry_run=True)
    fit = recipe(None, push=False, mixed_k="fit", budget="110%")
    assert convert(fit, tmp_path / "w", source=tmp_path / "src", dry_run=True).stages["repack"]["matrices_encoded_again"] > 0
    made = convert(fit, tmp_path / "w", source=tmp_path / "src")
    assert made.stages["verify"]["contract"] == "passed"
    assert read_manifest(made.output).facts["policy"]["name"] == "fit"


def test_a_bad_verdict_stops_before_the_push(hub: HubServer, commit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiled(folder: Path, **rest: Any) -> Any:
        (folder / "LICENSE").write_text("another")
        return verify(folder, **rest)

    monkeypatch.setattr(convert_module, "verify", spoiled)
    with pytest.raises(VerifyError, match="LICENSE"):
        convert(recipe(commit), tmp_path / "w")
    assert "org/out" not in hub.repos


def test_a_given_source(hub: HubServer, commit: str, sample: Path, tmp_path: Path) -> None:
    made = convert(recipe(None, push=False), tmp_path / "a", source=sample)
    assert list(made.stages) == ["repack", "verify"]
    assert not (tmp_path / "a" / "source").exists()
    made = convert(recipe(None, push=False), tmp_path / "b", source=Repo(SOURCE, commit))
    assert list(made.stages) == ["download", "repack", "verify"]
    with pytest.raises(UsageError, match="the recipe names none"):
        convert(recipe(None), tmp_path / "c")
    with pytest.raises(UsageError, match="the recipe names one"):
        convert(recipe(commit), tmp_path / "c", source=sample)
    with pytest.raises(UsageError, match="pinned to a commit"):
        convert(recipe(None), tmp_path / "c", source=Repo(SOURCE))
    assert not (tmp_path / "c").exists()


def test_another_recipes_work_is_not_mixed_in(hub: HubServer, commit: str, sample: Path, tmp_path: Path) -> None:
    convert(recipe(None, push=False), tmp_path / "w", source=sample)
    with pytest.raises(UsageError, match="work of another recipe"):
        convert(recipe(None, push=False, tp=1), tmp_path / "w", source=sample)
    made = convert(recipe(None, push=False, tp=1), tmp_path / "w", source=sample, restart=True)
    assert read_manifest(made.output).facts["tp"] == 1
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "source").mkdir()
    for restart in (False, True):
        with pytest.raises(UsageError, match="expected a new or empty folder, got source"):
            convert(read_recipe(find_recipe("sample")), tmp_path / "mine", restart=restart)


def test_dry_run_prices_the_plan_from_headers(hub: HubServer, commit: str, tmp_path: Path) -> None:
    made = convert(recipe(commit), tmp_path / "w", dry_run=True)
    assert made.stages["repack"]["payload_bytes"] > 100_000
    assert list(made.stages) == ["download", "repack", "verify", "push"]
    assert not (tmp_path / "w").exists()
    assert not [r for r in hub.asked("GET /cdn/") if r.range is None]
    with pytest.raises(UnsupportedError, match="--tp"):
        convert(recipe(commit, tp=3), tmp_path / "w", dry_run=True)


def test_every_recipe_has_its_stages(sample: Path) -> None:
    pinned = {"glm-5.2-r7": ["download", "repack", "verify"], "glm-5.2-rank-sliced-tp4": ["download", "repack", "encode-shared", "verify"]}
    for name, stages in pinned.items():
        assert plan_stages(read_recipe(find_recipe(name)), None) == stages
    assert plan_stages(read_recipe(find_recipe("glm-5.3-flash-k34-tp2")), sample) == ["repack", "encode-shared", "verify"]
