"""Numbers with units, as people read them."""

from __future__ import annotations


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
