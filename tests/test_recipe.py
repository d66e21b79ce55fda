from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from r7convert.address import Repo
from r7convert.data import data_dir
from r7convert.errors import FormatError, InputError
from r7convert.recipe import find_recipe, parse_recipe, read_recipe

COMMIT = "7c73450f05a151439d0f184f216b1eefcc394a31"
RECIPES = sorted(data_dir("recipes").glob("*.toml"))
GOOD: dict[str, Any] = {
    "format": "r7convert-recipe-v1",
    "title": "t",
    "source": {"repo": "org/name", "commit": COMMIT},
    "convert": {"target": "rank-sliced", "tp": 4, "mixed_k": "fit", "budget": "105%", "drop_mtp": True},
    "shared_experts": {"bits": 6},
    "destination": {"repo": "org/out", "private": True, "tag": "v1"},
}


def test_recipes_come_along() -> None:
    assert {path.stem for path in RECIPES} >= {
        "glm-5.2-rank-sliced-tp4",
        "glm-5.2-r7",
        "glm-5.2-exl3",
        "glm-5.3-flash-k34-tp2",
        "rank-sliced-to-tp8",
        "exl3-to-rank-sliced-tp4",
        "sample",
    }


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_loads(path: Path) -> None:
    recipe = read_recipe(path)
    assert recipe.title
    assert find_recipe(path.stem) == path
    if recipe.source is not None:
        assert recipe.source == Repo("brandonmusic/GLM-5.2-EXL3-TR3v4-3.5bpw-MTP78", COMMIT)
    assert recipe.destination is None, "a recipe for everybody pushes nowhere"


def test_a_whole_recipe() -> None:
    recipe = parse_recipe(GOOD)
    assert recipe.source == Repo("org/name", COMMIT)
    assert (recipe.convert.target, recipe.convert.tp, recipe.convert.reader) == ("rank-sliced", 4, "r28")
    assert recipe.shared_bits == 6
    assert recipe.destination is not None
    assert recipe.destination.address() == Repo("org/out", None)
    assert parse_recipe(GOOD) == recipe
    assert parse_recipe(GOOD).to_json() == recipe.to_json()


def test_what_may_be_left_out() -> None:
    recipe = parse_recipe({"format": "r7convert-recipe-v1", "convert": {"target": "r7"}})
    assert (recipe.source, recipe.sample, recipe.shared_bits, recipe.destination) == (None, None, None, None)


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("format", "r7convert-recipe-v2", "format: expected r7convert-recipe-v1"),
        ("colour", "red", "unknown key: expected none, got 'colour'"),
        ("source.branch", "main", "unknown key"),
        ("source.commit", "main", "40 hex digits: a branch moves"),
        ("source.commit", COMMIT.upper(), "40 hex digits"),
        ("source.repo", "name", "source: repo: name: repository"),
        ("source.repo", "org/name@dev", "its revision apart"),
        ("source.repo", 7, "repo: value: expected str, got 7"),
        ("source", {"sample": {"sed": 1}}, "unknown key: expected a choice of `r7convert sample`, got 'sed'"),
        ("source", {"sample": {}, "repo": "org/name"}, "unknown key"),
        ("convert.target", "rank_sliced", "target: value: expected r7 or rank-sliced or slabs or exl3"),
        ("convert.tp", True, "tp: value: expected int, got True"),
        ("convert.tp", "4", "tp: value: expected int"),
        ("convert.tp", 0, "at least 1"),
        ("convert.tp", None, "target rank-sliced: expected a tp, got none"),
        ("convert.reader", "r15", "reader: value: expected r14 or r28"),
        ("convert.mixed_k", "keep", "mixed_k: value: expected refuse or lift or fit"),
        ("convert.budget", "much", "budget"),
        ("convert.budget", 7, "budget: value: expected str, got 7"),
        ("convert.mixed_k", "lift", "budget: mixed_k lift: expected none: it is of fit"),
        ("convert.drop_mtp", 1, "drop_mtp: value: expected bool, got 1"),
        ("convert.threads", 4, "unknown key"),
        ("convert", None, "convert: expected dict, got nothing"),
        ("convert", "r7", "convert: value: expected dict"),
        ("shared_experts.bits", 9, "K: expected 1 to 8, got 9"),
        ("shared_experts.bits", 6.0, "bits: value: expected int, got 6.0"),
        ("destination.repo", "org/out@dev", "its revision apart"),
        ("destination.repo", None, "repo: expected str, got nothing"),
        ("destination.token", "hf_x", "unknown key"),
    ],
)
def test_what_is_refused(path: str, value: Any, says: str) -> None:
    raw = copy.deepcopy(GOOD)
    place, *rest = path.split(".")
    table, key = (raw, place) if not rest else (raw[place], rest[0])
    if value is None:
        del table[key]
    else:
        table[key] = value
    with pytest.raises(FormatError) as caught:
        parse_recipe(raw)
    assert says in str(caught.value)


def test_all_offenders_are_named_at_once() -> None:
    raw = copy.deepcopy(GOOD) | {"colour": "red"}
    raw["convert"]["tp"] = "4"
    raw["destination"]["token"] = "x"
    with pytest.raises(FormatError) as caught:
        parse_recipe(raw)
    assert len(str(caught.value).splitlines()) == 3


def test_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no such recipe: expected a \.toml file, or one of .*sample"):
        find_recipe("nonsense")
    with pytest.raises(InputError, match="no such recipe file"):
        find_recipe(str(tmp_path / "x.toml"))
    (tmp_path / "x.toml").write_bytes(b"format = ")
    with pytest.raises(FormatError, match="not TOML"):
        read_recipe(find_recipe(str(tmp_path / "x.toml")))
    (tmp_path / "x.toml").write_bytes(b'format = "\xff"')
    with pytest.raises(FormatError, match="not TOML"):
        read_recipe(tmp_path / "x.toml")


def test_the_docs_list_every_recipe() -> None:
    page = (Path(__file__).parents[1] / "docs" / "hub.md").read_text()
    for path in RECIPES:
        assert f"| `{path.stem}` | {read_recipe(path).title} |" in page
