"""fix-hub: what is due is said, what is sent is the changed JSON alone, and asking twice proposes once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from r7convert.address import Repo
from r7convert.errors import InputError, NetworkError, UnsupportedError, UsageError
from r7convert.fix_hub import TITLE, fix_hub
from r7convert.restamp import restamp
from r7convert.sample import write_sample
from tests.hub_server import TOKEN, Fault, HubServer

REPO = Repo("org/glm")


@pytest.fixture
def published(hub: HubServer, tmp_path: Path) -> Path:
    write_sample(tmp_path / "src", hf_quant_config=True)
    hub.add_repo(REPO.id, {path.name: path.read_bytes() for path in (tmp_path / "src").iterdir()})
    return tmp_path / "src"


def test_says_what_is_due_and_sends_nothing(hub: HubServer, published: Path) -> None:
    found = fix_hub(REPO)
    assert found.due
    assert set(found.changed) == {"config.json", "quantization_config.json"}
    assert found.removed == ("hf_quant_config.json",)
    assert found.url is None
    assert not [r for r in hub.requests if r.method in ("POST", "PUT")]
    assert not hub.asked("GET /cdn/"), "a weight was read"
    assert "quant_method" in json.dumps(found.to_json())


def test_a_pull_request_with_the_changed_json_alone(hub: HubServer, published: Path) -> None:
    found = fix_hub(REPO, create_pr=True)
    assert found.url == f"{hub.url}/org/glm/discussions/1"
    before, after = hub.files(REPO.id, "main"), hub.files(REPO.id, "refs/pr/1")
    assert {name for name in before if before[name] != after.get(name)} == {*found.changed, *found.removed}
    assert set(after) - set(before) == set()
    restamp(published, in_place=True)
    for name in found.changed:
        assert hub.read(REPO.id, name, "refs/pr/1") == (published / name).read_bytes(), "as beside the weights"
    pull = hub.repos[REPO.id].pulls[1]
    assert (pull["title"], pull["status"]) == (TITLE, "open")
    assert [commit.title for commit in hub.history(REPO.id, "refs/pr/1")] == ["first", TITLE]


def test_asking_again_finds_the_same_pull_request(hub: HubServer, published: Path) -> None:
    first = fix_hub(REPO, create_pr=True)
    assert fix_hub(REPO, create_pr=True).url == first.url
    assert list(hub.repos[REPO.id].pulls) == [1]
    assert len(hub.history(REPO.id, "refs/pr/1")) == 2


def test_a_pull_request_of_somebody_else_is_not_ours(hub: HubServer, published: Path) -> None:
    fix_hub(REPO, create_pr=True)
    hub.repos[REPO.id].pulls[1]["author"] = "mallory"
    assert fix_hub(REPO, create_pr=True).url == f"{hub.url}/org/glm/discussions/2"
    hub.repos[REPO.id].pulls[2]["status"] = "closed"
    assert fix_hub(REPO, create_pr=True).url == f"{hub.url}/org/glm/discussions/3"


@pytest.mark.parametrize("where", ["POST .*/discussions", "POST .*/commit/", "GET .*/discussions$"])
@pytest.mark.parametrize("fault", [{"status": 503}, {"status": 429, "headers": {"Retry-After": "2"}}, {"cut": 0}])
def test_faults_are_waited_out_and_propose_once(hub: HubServer, published: Path, where: str, fault: dict[str, object]) -> None:
    hub.faults.append(Fault(where, **fault))  # type: ignore[arg-type]
    fix_hub(REPO, create_pr=True)
    assert list(hub.repos[REPO.id].pulls) == [1]
    assert len(hub.history(REPO.id, "refs/pr/1")) == 2


def test_a_right_stamp_is_left_alone(hub: HubServer, published: Path) -> None:
    restamp(published, in_place=True)
    hub.commit(REPO.id, "main", "merged", {n: (published / n).read_bytes() for n in ("config.json", "quantization_config.json")})
    hub.commit(REPO.id, "main", "merged", {}, delete=("hf_quant_config.json",))
    found = fix_hub(REPO, create_pr=True)
    assert not found.due
    assert found.url is None
    assert not hub.repos[REPO.id].pulls


def test_refusals(hub: HubServer) -> None:
    hub.add_repo("org/empty", {"README.md": b"x"})
    with pytest.raises(InputError, match=r"config\.json"):
        fix_hub(Repo("org/empty"))
    hub.add_repo("org/other", {"config.json": b'{"model_type": "llama"}'})
    with pytest.raises(UnsupportedError, match="no sign of EXL3"):
        fix_hub(Repo("org/other"))
    hub.add_repo("org/sealed", {"config.json": b"{}", "MANIFEST.json": b"{}"})
    with pytest.raises(UsageError, match="sealed"):
        fix_hub(Repo("org/sealed"))
    hub.repos["org/other"].branches["dev"] = hub.repos["org/other"].branches["main"]
    with pytest.raises(UsageError, match="default branch"):
        fix_hub(Repo("org/other", "dev"), create_pr=True)


def test_needs_a_token(hub: HubServer, published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "")
    assert fix_hub(REPO).due
    with pytest.raises(NetworkError) as caught:
        fix_hub(REPO, create_pr=True)
    assert TOKEN not in str(caught.value)
