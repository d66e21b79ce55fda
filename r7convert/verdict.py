"""What verify says, as data: parts, named checks, failures; and VERDICT.json, bound to the digest of the manifest it judged.

Verdict -> Part (seal, contract, bytes, numbers) -> Check -> failures, at most 20 lines kept, all counted
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from r7convert import __version__
from r7convert.errors import SHOWN_OFFENDERS, FormatError, ResourceError, VerifyError, complain
from r7convert.evidence import is_ours
from r7convert.findings import PARTS, Part
from r7convert.format import STOCK_READERS, is_int
from r7convert.journal import VERDICT, manifest_digest, read_manifest
from r7convert.store import read_json, write_json

Json = Any

VERDICT_FORMAT = "r7convert-verdict-v1"
_KEYS = {"format", "tool", "ok", "manifest_sha256", "target", "tp", "reader", "parts"}
_RAN_KEYS = {"name", "state", "failures", "scope", "checks"}
_CHECK_KEYS = {"name", "looked_at", "failures"}


@dataclass(frozen=True, slots=True)
class Verdict:
    """The judgement of one sealed folder. `manifest_sha256` is "" where there was no seal to judge."""

    manifest_sha256: str
    target: str
    tp: int
    reader: str
    parts: tuple[Part, ...]

    @property
    def ok(self) -> bool:
        """True if the seal and the contract ran, and no part that ran failed."""
        return _is_ok({part.name: part.state for part in self.parts})

    def failure_lines(self) -> list[str]:
        """At most 20 lines over all parts, then a count."""
        lines = [f"{part.name}: {check.name}: {line}" for part in self.parts for check in part.checks.values() for line in check.shown]
        count = sum(part.failures for part in self.parts)
        shown = lines[:SHOWN_OFFENDERS]
        return [*shown, f"... and {count - len(shown)} more"] if count > len(shown) else shown

    def check(self) -> None:
        """Raises:  VerifyError with the failures, unless the verdict is ok."""
        if not self.ok:
            raise VerifyError("\n".join(self.failure_lines() or ["nothing was judged"]))

    def to_json(self) -> Json:
        return {
            "format": VERDICT_FORMAT,
            "tool": f"r7convert {__version__}",
            "ok": self.ok,
            "manifest_sha256": self.manifest_sha256,
            "target": self.target,
            "tp": self.tp,
            "reader": self.reader,
            "parts": [part.to_json() for part in self.parts],
        }


def write_verdict(folder: Path, verdict: Verdict) -> None:
    """Write VERDICT.json beside the manifest it is bound to; call it under the folder's lock. An unsealed folder gets none: there
    is nothing to bind it to.

    Raises:  ResourceError if the folder cannot be written.
    """
    if not verdict.manifest_sha256:
        return
    try:
        write_json(folder / VERDICT, verdict.to_json())
    except OSError as error:
        raise ResourceError(complain(folder / VERDICT, "cannot write the verdict", expected="a writable folder", found=error)) from None


def check_verdict(folder: Path) -> Json:
    """The verdict of a folder as JSON, if it is ok and belongs to the manifest that stands there now: what push asks.

    Raises:  VerifyError if it is missing, failed, malformed, or judged another manifest.
    """
    value = read_verdict(folder)
    if value["ok"] is not True:
        raise VerifyError(complain(folder / VERDICT, "the verdict on this folder is: failed", do=_verify(folder)))
    return value


def read_verdict(folder: Path) -> Json:
    """The verdict of a folder as JSON, good or bad, if it belongs to the manifest that stands there now.

    Raises:  VerifyError if it is missing, malformed, or judged another manifest.
    """
    path = folder / VERDICT
    do = _verify(folder)
    if not path.exists():
        raise VerifyError(complain(folder, f"no {VERDICT}: nobody judged this folder", do=do))
    try:
        value = read_json(path)
    except FormatError as error:
        raise VerifyError(str(error)) from None
    if not isinstance(value, dict) or value.get("format") != VERDICT_FORMAT or not isinstance(value.get("ok"), bool):
        raise VerifyError(complain(path, "verdict", expected=VERDICT_FORMAT, found="something else", do=do))
    parts = value.get("parts")
    if value.keys() != _KEYS or not is_ours(str(value["tool"])) or not isinstance(parts, list) or not all(map(_is_part, parts)):
        raise VerifyError(complain(path, "verdict", expected=sorted(_KEYS), found=sorted(value), do=do))
    states = {part["name"]: part["state"] for part in parts}
    if value["ok"] != _is_ok(states) or len(states) != len(parts):
        raise VerifyError(complain(path, "verdict", expected="`ok` as its parts are", found=states, do=do))
    try:
        digest = manifest_digest(folder)
    except OSError:
        digest = "none"
    if value.get("manifest_sha256") != digest:
        raise VerifyError(complain(path, "verdict of another manifest", expected=digest, found=value.get("manifest_sha256"), do=do))
    facts = read_manifest(folder).facts
    tp = facts.get("tp")
    due = {"target": facts.get("target", ""), "tp": tp if isinstance(tp, int) and is_int(tp) and tp > 0 else 1}
    found = {key: value[key] for key in due}
    if found != due or not is_int(value["tp"]) or value["reader"] not in STOCK_READERS:
        raise VerifyError(complain(path, "verdict of another output", expected=due, found=found | {"reader": value["reader"]}, do=do))
    return value


def _is_ok(states: Mapping[str, str]) -> bool:
    return states.get("seal") == states.get("contract") == "passed" and "failed" not in states.values()


def _is_part(value: Json) -> bool:
    """Whether a part reads as `Part.to_json` writes it, with the state that its checks add up to."""
    if not isinstance(value, dict) or value.get("name") not in PARTS:
        return False
    if value.get("state") == "skipped":
        return value.keys() == {"name", "state", "why"} and isinstance(value["why"], str)
    checks, scope = value.get("checks"), value.get("scope")
    if not _RAN_KEYS <= value.keys() <= _RAN_KEYS | {"layers"} or not isinstance(scope, list) or not isinstance(checks, list):
        return False
    failures = 0
    for check in checks:
        if not isinstance(check, dict) or not _CHECK_KEYS <= check.keys() <= _CHECK_KEYS | {"shown", "notes"}:
            return False
        if not isinstance(check["name"], str) or not isinstance(check["looked_at"], str) or not is_int(check["failures"]):
            return False
        failures += check["failures"]
    stated = value["failures"]
    return is_int(stated) and stated == failures and value["state"] == ("failed" if failures else "passed")


def _verify(folder: Path) -> str:
    return f"Run `r7convert verify {folder}`, best with --source."
