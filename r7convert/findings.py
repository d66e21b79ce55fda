"""What a judge writes down: parts with named checks, each with how much it looked at and what offended it."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal

from r7convert.errors import SHOWN_OFFENDERS, R7Error, complain

Json = Any
State = Literal["passed", "failed", "skipped"]

PARTS = ("seal", "contract", "bytes", "numbers")
LONG_BYTES = 10**9
"""From here on a part says beforehand how much it reads."""


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
        self.add_line(complain(where, what, expected=_brief(expected), found=_brief(found), do=do))

    def expect(self, ok: bool, where: object, what: str, *, expected: object = None, found: object = None) -> bool:
        """Count one look; a failure unless `ok`, which is handed back."""
        self.looked_at += 1
        if not ok:
            self.fail(where, what, expected=expected, found=found)
        return ok

    def same(self, where: object, what: str, *, expected: object, found: object) -> bool:
        return self.expect(found == expected and type(found) is type(expected), where, what, expected=expected, found=found)

    def same_json(self, where: str, *, expected: Json, found: Json) -> None:
        """A failure for each place where two JSON values differ; 1, 1.0 and true are three values."""
        if isinstance(expected, dict) and isinstance(found, dict):
            for key in [*expected, *(key for key in found if key not in expected)]:
                if key not in found or key not in expected:
                    self.expect(False, where, f"key {key!r}", expected="there" if key in expected else "none", found=found.get(key))
                else:
                    self.same_json(f"{where}: {key}", expected=expected[key], found=found[key])
        elif isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
            for n, (one, other) in enumerate(zip(expected, found, strict=True)):
                self.same_json(f"{where}[{n}]", expected=one, found=other)
        else:
            self.same(where, "value", expected=expected, found=found)

    def absorb(self, other: Check) -> None:
        """Add what the same rule found elsewhere (another thread's share of the work)."""
        self.looked_at += other.looked_at
        self.failures += other.failures
        self.shown += other.shown[: SHOWN_OFFENDERS - len(self.shown)]
        self.notes += other.notes[: SHOWN_OFFENDERS - len(self.notes)]

    def collecting(self, count: int = 1) -> Collecting:
        """Errors that a reader raises inside the `with` block become failures of this check, which counts the block as one look."""
        self.looked_at += count
        return Collecting(self)

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

    def add_line(self, line: str) -> None:
        """A failure already worded."""
        self.failures += 1
        if len(self.shown) < SHOWN_OFFENDERS:
            self.shown.append(line)


class Collecting:
    def __init__(self, check: Check) -> None:
        self._check = check

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        if isinstance(error, R7Error):
            for line in str(error).splitlines():
                self._check.add_line(line)
        return isinstance(error, R7Error)


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
    layers: dict[str, Json] = field(default_factory=dict)
    """Figures of each layer, where the part has some."""

    def check(self, name: str, unit: str = "tensors") -> Check:
        """The check of that name, made on first use, so that a rule that looked at nothing is seen to have."""
        return self.checks.setdefault(name, Check(name, unit))

    def absorb(self, other: Part) -> None:
        for name, check in other.checks.items():
            self.check(name, check.unit).absorb(check)
        self.layers |= other.layers

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
        made |= {"failures": self.failures, "scope": self.scope, "checks": [check.to_json() for check in self.checks.values()]}
        return made | {"layers": self.layers} if self.layers else made
