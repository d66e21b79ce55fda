"""`make check-deps`: every locked dependency against the advisory databases that pip-audit asks, and what cannot be asked is said.

    python -m tests.check_deps requirements-dev.lock torch==2.13.0

Exit code 0: every dependency was looked up and none has a known vulnerability. 1: some have. 2: not all could be looked up, for
example because the database cannot be reached from here; pip-audit itself calls that "no known vulnerabilities".
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SERVICES = ("pypi", "osv")
FOUND, UNKNOWN = 1, 2


def main() -> None:
    pins = [pin for word in sys.argv[1:] for pin in (read_pins(Path(word)) if Path(word).is_file() else [word])]
    reasons = []
    for service in SERVICES:
        answer, reason = ask(service, pins[:1])  # one, before a database that does not answer is asked a hundred times
        if not reason and not skipped(answer):
            answer, reason = ask(service, pins)
            code, lines = judge(answer, len(pins)) if not reason else (UNKNOWN, [reason])
            print("\n".join([*lines, f"asked: {service}, of {len(pins)} dependencies"]))
            sys.exit(code)
        reasons.append(f"{service}: {reason or '; '.join(skipped(answer))}")
    print("error: no advisory database could be asked, so nothing is known of the dependencies:")
    print("\n".join(reasons))
    sys.exit(UNKNOWN)


def read_pins(lock: Path) -> list[str]:
    """name==version of every package of a lock file, whatever machine it is for."""
    return re.findall(r"^([A-Za-z0-9][A-Za-z0-9._-]*(?:\[[^\]]*\])?==[^ \\;]+)", lock.read_text(), re.MULTILINE)


def ask(service: str, pins: Sequence[str]) -> tuple[list[dict[str, Any]], str]:
    """What the service says of each pin, or why it says nothing."""
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder, "pins.txt")
        listed.write_text("\n".join(pins) + "\n")
        command = [sys.executable, "-m", "pip_audit", "-r", str(listed), "--no-deps", "--disable-pip", "-s", service]
        done = subprocess.run([*command, "-f", "json", "--progress-spinner", "off"], capture_output=True, text=True, check=False)
    try:
        answer: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        said = [line for line in done.stderr.splitlines() if line.strip()]
        return [], said[-1].strip()[:300] if said else f"pip-audit ended with {done.returncode}"
    return answer, ""


def skipped(answer: Sequence[dict[str, Any]]) -> list[str]:
    return [str(entry["skip_reason"]) for entry in answer if "skip_reason" in entry]


def judge(answer: Sequence[dict[str, Any]], count: int) -> tuple[int, list[str]]:
    """Exit code, and a line for each vulnerability and each dependency that nothing is known of."""
    bad = [
        f"{entry['name']} {entry['version']}: {flaw['id']}, mended in {', '.join(flaw.get('fix_versions') or ['no version yet'])}"
        for entry in answer
        for flaw in entry.get("vulns") or []
    ]
    missing = skipped(answer)
    if len(answer) < count:
        missing.append(f"{count - len(answer)} dependencies without an answer")
    code = FOUND if bad else UNKNOWN if missing else 0
    return code, [*bad, *missing] or ["no known vulnerabilities"]


if __name__ == "__main__":
    main()
