"""Payload that comes from the Hub file by file, in the order in which the work needs it, and goes as soon as nobody does.

One thread fetches ahead while another converts. What is on disk at any moment stays within a bound: a step's files, and its
outputs where they do not stay, are given room before they are fetched, and what a later step needs again gives way to what
the present one needs now.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from r7convert.download import GRACE_S, fetch_file
from r7convert.errors import ResourceError, complain
from r7convert.hub import Snapshot, Stop
from r7convert.source import Step
from r7convert.store import check_free_space

Json = Any


class Fetcher:
    """A `Payload` for one thread that goes through the steps in order. Use as a context manager; `peak_bytes` is what it held at
    most. `most_bytes` None: room for any step and the one after it. `count_outputs`: outputs hold room until they are `sent`.

    Raises:  ResourceError from `prepare` for a bound with no room for one step; from `acquire` whatever the fetching met.
    """

    def __init__(self, snapshot: Snapshot, folder: Path, most_bytes: int | None, *, count_outputs: bool = False) -> None:
        self.snapshot = snapshot
        self.folder = folder
        self.peak_bytes = 0
        self._count_outputs = count_outputs
        self._most = most_bytes
        self._steps: Sequence[Step] = ()
        self._last_use: dict[str, int] = {}
        self._here: dict[str, int] = {}  # ready files -> readers
        self._held: dict[str, int] = {}  # outputs that take room
        self._used = 0
        self._at = 0  # the step that runs, or runs next
        self._error: BaseException | None = None
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._fetch_ahead, name="r7convert-fetch", daemon=True)

    def __enter__(self) -> Fetcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.abandon()
        if self._thread.is_alive():
            self._thread.join(GRACE_S)  # a stalled transfer ends by itself
        shutil.rmtree(self.folder, ignore_errors=True)

    # ---- Payload ----

    def identity(self) -> Json:
        return {"repo": self.snapshot.repo, "commit": self.snapshot.commit}

    def prepare(self, steps: Sequence[Step]) -> None:
        needs = [self._need(step) for step in steps]
        if self._most is None:
            self._most = max((a + b for a, b in itertools.pairwise([*needs, 0])), default=0)
        if max(needs, default=0) > self._most:
            least = f"at least {max(needs):,} bytes"
            raise ResourceError(complain("--max-disk", "room for one step", expected=least, found=f"{self._most:,}"))
        shutil.rmtree(self.folder, ignore_errors=True)  # of a killed run: what it held comes again, file by file
        self.folder.mkdir(parents=True)
        check_free_space(self.folder, min(self._most, sum(needs)))
        self._steps = steps
        self._last_use = {name: at for at, step in enumerate(steps) for name in step.inputs}
        self._thread.start()

    def acquire(self, name: str) -> Path:
        with self._changed:
            while name not in self._here:
                if self._error is not None:
                    raise self._error
                if self._stop.is_set():
                    raise Stop
                self._changed.wait(1.0)
            self._here[name] += 1
        return self.folder / name

    def release(self, name: str) -> None:
        """When the last file of a step is let go the step is over, and what no later one needs goes."""
        with self._changed:
            self._here[name] -= 1
            if not any(self._here.values()):
                self._at += 1
                for done in [n for n in self._here if self._last_use[n] < self._at]:
                    self._drop(done)
            self._changed.notify_all()

    def abandon(self) -> None:
        self._stop.set()
        with self._changed:
            self._changed.notify_all()

    def sent(self, name: str) -> None:
        """An output has left the disk."""
        with self._changed:
            self._used -= self._held.pop(name, 0)
            self._changed.notify_all()

    # ---- the fetching thread ----

    def _need(self, step: Step) -> int:
        return sum(self.snapshot.files[name].size for name in step.inputs) + self._outputs(step)

    def _outputs(self, step: Step) -> int:
        return sum(step.outputs.values()) if self._count_outputs else 0

    def _fetch_ahead(self) -> None:
        try:
            for at, step in enumerate(self._steps):
                self._make_room(at, self._outputs(step))
                if self._count_outputs:
                    self._held |= step.outputs
                for name in step.inputs:
                    if name in self._here:
                        continue
                    self._make_room(at, self.snapshot.files[name].size)
                    fetch_file(self.snapshot, self.snapshot.files[name], self.folder, lambda _: None, self._stop)
                    with self._changed:
                        self._here[name] = 0
                        self._changed.notify_all()
        except BaseException as error:  # also Stop: whoever waits for a file shall hear of it
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _make_room(self, at: int, nbytes: int) -> None:
        """Wait until `nbytes` more fit, for the step numbered `at`, and take them."""
        assert self._most is not None
        with self._changed:
            while self._used + nbytes > self._most:
                if self._stop.is_set():
                    raise Stop
                soon = {name for step in self._steps[self._at : at + 1] for name in step.inputs}
                idle = [name for name, readers in self._here.items() if not readers and name not in soon]
                if idle:
                    self._drop(max(idle, key=lambda name: self._last_use[name]))
                else:
                    self._changed.wait(1.0)
            self._used += nbytes
            self.peak_bytes = max(self.peak_bytes, self._used)

    def _drop(self, name: str) -> None:
        del self._here[name]
        self._used -= self.snapshot.files[name].size
        with contextlib.suppress(FileNotFoundError):
            (self.folder / name).unlink()
