from __future__ import annotations

from pathlib import Path

import pytest

from r7convert.address import RECEIPT, Repo, parse_address, parse_repo, read_origin
from r7convert.errors import InputError, UsageError

COMMIT = "7c73450f05a151439d0f184f216b1eefcc394a31"


@pytest.mark.parametrize(
    ("text", "repo"),
    [
        ("org/name", Repo("org/name")),
        ("org/name@main", Repo("org/name", "main")),
        (f"org/name@{COMMIT}", Repo("org/name", COMMIT)),
        ("org/name@refs/pr/3", Repo("org/name", "refs/pr/3")),
        ("brandonmusic/GLM-5.2-EXL3-TR3v4-3.5bpw-MTP78@v1.0", Repo("brandonmusic/GLM-5.2-EXL3-TR3v4-3.5bpw-MTP78", "v1.0")),
        ("hf://org/name", Repo("org/name")),
        ("hf://org/name@refs/pr/3", Repo("org/name", "refs/pr/3")),
        ("hf://models/org/name@dev", Repo("org/name", "dev")),
        ("https://huggingface.co/org/name", Repo("org/name")),
        ("https://huggingface.co/org/name/tree/dev", Repo("org/name", "dev")),
    ],
)
def test_repositories(text: str, repo: Repo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_address(text) == repo
    assert parse_repo(text) == repo


def test_a_folder_of_that_name_wins_and_hf_names_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert parse_address("org/name") == Path("org/name")
    assert parse_address("./org/name") == Path("org/name")
    assert parse_address("hf://org/name") == Repo("org/name")
    assert parse_repo("org/name") == Repo("org/name")


@pytest.mark.parametrize(
    "text",
    [
        "./org/name",
        "../name",
        "/org/name",
        "~/name",
        "name",
        "a/b/c",
        r"org\name",
        r"C:\models\glm",
        "C:/models",
        r"\\server\share",
        r".\glm",
        "org/name/",
        "",
    ],
)
def test_paths_that_are_not_there_are_never_taken_for_repositories(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if text == "":
        assert parse_address(text) == Path()  # what Path makes of nothing: the working folder
        return
    with pytest.raises(InputError, match="no such folder"):
        parse_address(text)
    with pytest.raises(UsageError):
        parse_repo(text)


@pytest.mark.parametrize(
    "text",
    ["hf://name", "hf://datasets/org/name", "hf://org/name@dev/config.json", "org/name@", "org/name@a b", "org/name@a..b", "org/na--me"],
)
def test_malformed_repositories(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"repository|revision"):
        parse_address(text)


def test_a_file_is_not_a_source(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match="not a folder"):
        parse_address(str(tmp_path / "config.json"))


def test_origin_of_a_folder(tmp_path: Path) -> None:
    assert read_origin(tmp_path) is None
    snapshot = tmp_path / "models--org--some-name" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    assert read_origin(snapshot) == Repo("org/some-name", COMMIT)
    receipt = tmp_path / RECEIPT
    receipt.parent.mkdir(parents=True)
    receipt.write_text(f'{{"repo": "org/name", "commit": "{COMMIT}"}}')
    assert read_origin(tmp_path) == Repo("org/name", COMMIT)
    receipt.write_text('{"repo": "org/name", "commit": "main"}')
    assert read_origin(tmp_path) is None
