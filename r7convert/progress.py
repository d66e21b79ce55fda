"""How a stage tells that it is getting on. Stages take a Progress and never print; the command line brings one that draws."""

from __future__ import annotations


class Progress:
    """The silent one, and the interface: override what you want to see.

    A stage calls `start` once with the bytes of the whole job, `advance` as bytes are done, `say` for a line of talk.
    """

    def start(self, total_bytes: int, label: str) -> None:
        """A job of `total_bytes` begins."""

    def advance(self, nbytes: int, note: str = "") -> None:
        """`nbytes` more are done; `note` names what is at hand, for example a layer."""

    def say(self, line: str) -> None:
        """A line for people: a warning, a choice made."""

    def finish(self) -> None:
        """The job is over."""
