"""What a judge writes down: parts with named checks, each with how much it looked at and what offended it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from r7convert.errors import SHOWN_OFFENDERS, R7Error, complain

Json = Any
State = Literal["passed", "failed", "skipped"]

PARTS = ("seal", "contract", "bytes", "numbers")


@dataclass(slots=True)
class Check:
    """One rule: how much it looked at, and what offended it. `notes` are worth saying and fail nothing."""

    name: str
    unit: str
    looked_at: int = 0
    failures: int = 0
    shown: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def saw(self, count: int = 1) -> None:
        self.looked_at += count

    def fail(self, where: object, what: str, *, expected: object = None, found: object = None, do: str = "") -> None:
        self._fail(complain(where, what, expected=_brief(expected), found=_brief(found), do=do))

    def expect(self, ok: bool, where: object, what: str, *, expected: object = None, found: object = None) -> bool:
        """Count one look; a failure unless `ok`, which is handed back."""
        self.looked_at += 1
        if not ok:
            self.fail(where, what, expected=expected, found=found)
        return ok

    def same(self, where: object, what: str, *, expected: object, found: object) -> bool:
        return self.expect(found == expected and type(found) is type(expected), where, what, expected=expected, found=found)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Errors that a parser raises inside become failures of this check."""
        self.looked_at += 1
        try:
            yield
        except R7Error as error:
            for line in str(error).splitlines():
                self._fail(line)

    def note(self, line: str) -> None:
        if len(self.notes) < SHOWN_OFFENDERS:
            self.notes.append(line)

    def to_json(self) -> Json:
        made: dict[str, Json] = {"name": self.name, "looked_at": f"{self.looked_at:,} {self.unit}", "failures": self.failures}
        if self.shown:
            made["shown"] = self.shown
        if self.notes:
            made["notes"] = self.notes
        return made

    def _fail(self, line: str) -> None:
        self.failures += 1
        if len(self.shown) < SHOWN_OFFENDERS:
            self.shown.append(line)


def _brief(value: object) -> object:
    text = value if isinstance(value, str) else repr(value) if value is not None else None
    return text if text is None or len(text) <= 160 else text[:157] + "..."


@dataclass(slots=True)
class Part:
    """One of PARTS: skipped with the reason why, or run with its checks. `scope` says in lines what it compared."""

    name: str
    why_skipped: str = ""
    scope: list[str] = field(default_factory=list)
    checks: dict[str, Check] = field(default_factory=dict)

    def check(self, name: str, unit: str = "tensors") -> Check:
        """The check of that name, made on first use, so that a rule that looked at nothing is seen to have."""
        return self.checks.setdefault(name, Check(name, unit))

    @property
    def failures(self) -> int:
        return sum(check.failures for check in self.checks.values())

    @property
    def state(self) -> State:
        if self.why_skipped:
            return "skipped"
        return "failed" if self.failures else "passed"

    def to_json(self) -> Json:
        made: dict[str, Json] = {"name": self.name, "state": self.state}
        if self.why_skipped:
            return made | {"why": self.why_skipped}
        return made | {"failures": self.failures, "scope": self.scope, "checks": [check.to_json() for check in self.checks.values()]}
