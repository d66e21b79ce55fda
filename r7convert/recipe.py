"""A recipe: one published conversion as a TOML file, read into a frozen Recipe. Strict: an unknown key is an error, and so is
a bool where a number stands.

    format = "r7convert-recipe-v1"
    title = "what it makes, in one line"

    [source]                       # a repository at a commit, or a sample; neither: --source says
    repo = "org/name"
    commit = "40 hex digits"

    [convert]
    target = "rank-sliced"         # r7, rank-sliced, slabs, exl3
    tp = 4
    reader = "r28"
    mixed_k = "lift"               # refuse, lift, fit; fit takes a budget such as "105%"

    [shared_experts]               # left out: they stay as they are
    bits = 6

    [destination]                  # left out: nothing is pushed
    repo = "org/out"
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from r7convert.address import Repo, parse_repo
from r7convert.data import data_dir
from r7convert.errors import FormatError, InputError, Offences, R7Error, complain
from r7convert.format import PER_EXPERT_V1, SHARED_H_V1, SLICED, STOCK_READERS, is_int
from r7convert.ktable import parse_budget
from r7convert.sample_shape import Sample
from r7convert.stamp import TARGETS

Json = Any

RECIPE_FORMAT = "r7convert-recipe-v1"
POLICIES = ("refuse", "lift", "fit")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class Convert:
    """What `repack` is asked for; the names are its options."""

    target: str
    tp: int | None = None
    reader: str = "r28"
    rotation_layout: str | None = None
    mixed_k: str = "refuse"
    budget: str | None = None
    drop_mtp: bool = False
    allow_nonfinite: bool = False


@dataclass(frozen=True, slots=True)
class Destination:
    """Where `push` sends the outcome; the names are its options."""

    repo: str
    revision: str | None = None
    private: bool = False
    create_pr: bool = False
    tag: str | None = None

    def address(self) -> Repo:
        return Repo(self.repo, self.revision)


@dataclass(frozen=True, slots=True)
class Recipe:
    """A whole chain. `source` is pinned to a commit; `sample` are choices of `r7convert sample`; both None: given when run."""

    title: str
    source: Repo | None
    sample: Mapping[str, Json] | None
    convert: Convert
    shared_bits: int | None
    destination: Destination | None

    def to_json(self) -> Json:
        """Everything that decides the outcome, the same for the same recipe."""
        return {
            "source": {"repo": self.source.id, "commit": self.source.revision} if self.source else None,
            "sample": dict(self.sample) if self.sample is not None else None,
            "convert": asdict(self.convert),
            "shared_bits": self.shared_bits,
            "destination": asdict(self.destination) if self.destination else None,
        }


def find_recipe(name: str) -> Path:
    """The file of a recipe: a path, or the name of one that comes with r7convert.

    Raises:  InputError with the names there are.
    """
    path = Path(name)
    if path.suffix == ".toml" or path.exists():
        if not path.is_file():
            raise InputError(complain(name, "no such recipe file"))
        return path
    shipped = {found.stem: found for found in sorted(data_dir("recipes").glob("*.toml"))}
    if name not in shipped:
        raise InputError(complain(name, "no such recipe", expected=f"a .toml file, or one of {', '.join(shipped)}", found="neither"))
    return shipped[name]


def read_recipe(path: Path) -> Recipe:
    """A recipe file, read and checked; nothing of what it names is looked at.

    Raises:  FormatError with every offender.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(complain(path, "no such recipe file")) from None
    except (ValueError, RecursionError) as error:
        raise FormatError(complain(path, "not TOML", expected="UTF-8 TOML", found=str(error)[:200])) from None
    return parse_recipe(raw, path.name)


def parse_recipe(raw: Mapping[str, Json], where: str = "recipe") -> Recipe:
    """Raises:  FormatError with every offender."""
    bad = Offences()
    top = _Table(raw, where, bad)
    if top.take("format", str, None) != RECIPE_FORMAT:
        bad.add(where, "format", expected=RECIPE_FORMAT, found=repr(raw.get("format")))
    title = top.take("title", str, "")
    source, sample = _source(top.table("source"), bad)
    convert = _convert(top.table("convert", needed=True), bad)
    shared = top.table("shared_experts")
    bits = shared.take("bits", int, 6) if shared else None
    if bits is not None and not 1 <= bits <= 8:
        bad.add(f"{where}: shared_experts.bits", "K", expected="1 to 8", found=bits)
    place = top.table("destination")
    destination = _dataclass(place, Destination) if place else None
    if destination is not None:
        _checked(bad, f"{where}: destination.repo", destination.repo)
    for table in (top, shared, place):
        if table is not None:
            table.finish()
    bad.check()
    assert convert is not None
    return Recipe(title or "", source, sample, convert, bits, destination)


class _Table:
    """A TOML table that is taken apart key by key; what is left at the end is unknown."""

    def __init__(self, raw: Mapping[str, Json], where: str, bad: Offences) -> None:
        self.where = where
        self.bad = bad
        self._left = dict(raw)

    def take(self, key: str, kind: type, default: Json = ...) -> Json:
        if key not in self._left:
            if default is ...:
                self.bad.add(self.where, key, expected=kind.__name__, found="nothing")
                return None
            return default
        value = self._left.pop(key)
        if not (is_int(value) if kind is int else isinstance(value, kind)):
            self.bad.add(f"{self.where}: {key}", "value", expected=kind.__name__, found=repr(value)[:80])
            return None if default is ... else default
        return value

    def table(self, key: str, *, needed: bool = False) -> _Table | None:
        value = self.take(key, dict, ... if needed else None)
        if value is None:
            return _Table({}, f"{self.where}: {key}", Offences()) if needed else None
        return _Table(value, f"{self.where}: {key}", self.bad)

    def rest(self) -> dict[str, Json]:
        left, self._left = self._left, {}
        return left

    def finish(self) -> None:
        for key in self._left:
            self.bad.add(self.where, "unknown key", expected="none", found=repr(key))


def _source(table: _Table | None, bad: Offences) -> tuple[Repo | None, Mapping[str, Json] | None]:
    if table is None:
        return None, None
    sample = table.take("sample", dict, None)
    if sample is not None:
        table.finish()
        defaults = {spec.name: spec.default for spec in fields(Sample)}
        choices = {key: tuple(value) if isinstance(value, list) else value for key, value in sample.items()}
        for key, value in choices.items():
            if key not in defaults:
                bad.add(f"{table.where}: sample", "unknown key", expected="a choice of `r7convert sample`", found=repr(key))
            elif type(value) is not type(defaults[key]) or (isinstance(value, tuple) and not all(map(is_int, value))):
                bad.add(f"{table.where}: sample: {key}", "value", expected=f"such as {defaults[key]!r}", found=repr(value)[:80])
        return None, choices
    repo, commit = table.take("repo", str), table.take("commit", str)
    table.finish()
    if commit is not None and not _COMMIT.fullmatch(commit):
        bad.add(f"{table.where}: commit", "commit", expected="40 hex digits: a branch moves", found=repr(commit))
    if repo is not None:
        _checked(bad, f"{table.where}: repo", repo)
    return (Repo(repo, commit) if repo and commit else None), None


def _convert(table: _Table | None, bad: Offences) -> Convert | None:
    assert table is not None
    before = len(bad)
    convert: Convert | None = _dataclass(table, Convert)
    table.finish()
    if convert is None or len(bad) > before:
        return convert
    choices: tuple[tuple[str, Json, tuple[Json, ...]], ...] = (
        ("target", convert.target, TARGETS),
        ("reader", convert.reader, STOCK_READERS),
        ("mixed_k", convert.mixed_k, POLICIES),
        ("rotation_layout", convert.rotation_layout, (None, SHARED_H_V1, PER_EXPERT_V1)),
    )
    for name, value, allowed in choices:
        if value not in allowed:
            bad.add(f"{table.where}: {name}", "value", expected=" or ".join(str(a) for a in allowed if a), found=repr(value))
    if convert.tp is not None and convert.tp < 1:
        bad.add(f"{table.where}: tp", "value", expected="at least 1", found=convert.tp)
    if convert.target in SLICED and convert.tp is None:
        bad.add(f"{table.where}: tp", f"target {convert.target}", expected="a tp", found="none")
    if convert.budget is not None:
        if convert.mixed_k != "fit":
            bad.add(f"{table.where}: budget", f"mixed_k {convert.mixed_k}", expected="none: it is of fit", found=repr(convert.budget))
        try:
            parse_budget(convert.budget)
        except R7Error as error:
            bad.lines.append(f"{table.where}: budget: {error}")
    return convert


def _dataclass(table: _Table, kind: Any) -> Any:
    """A flat dataclass from a table: field types give the kinds, defaults make keys optional."""
    values: dict[str, Json] = {}
    before = len(table.bad)
    for spec in fields(kind):
        base = {"str": str, "int": int, "bool": bool}[str(spec.type).split(" ")[0]]
        values[spec.name] = table.take(spec.name, base, ... if spec.default is MISSING else spec.default)
    return kind(**values) if len(table.bad) == before else None


def _checked(bad: Offences, where: str, repo: str) -> None:
    try:
        if parse_repo(repo).revision is not None:
            bad.add(where, "repository", expected="org/name, its revision apart", found=repr(repo))
    except R7Error as error:
        bad.lines.append(f"{where}: {error}")
