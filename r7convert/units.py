"""Numbers as people read them: with units, and several as ranges."""

from __future__ import annotations

from collections.abc import Iterable


def in_bytes(count: float) -> str:
    """A size for people, in decimal units as disks and the Hub count: 346.0 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def in_time(seconds: float) -> str:
    """A duration for people: 45 s, 12 min 5 s, 3 h 20 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def ranges(numbers: Iterable[int]) -> str:
    """Numbers for people: "0-3, 7, 9-11"."""
    spans: list[list[int]] = []
    for n in sorted(numbers):
        if spans and n == spans[-1][1] + 1:
            spans[-1][1] = n
        else:
            spans.append([n, n])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)
