"""Kills for tests: a process that stops dead at its k-th change of the disk, at every k in turn."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

CALLS = ("rename", "replace", "unlink", "fsync", "mkdir", "rmdir")


class Killed(BaseException):
    """The process is gone: nothing of it may run on, so nothing may be cleaned up."""


def at_every_step(
    monkeypatch: pytest.MonkeyPatch, run: Callable[[], object], *, fresh: Callable[[], object] = lambda: None, stride: int = 1
) -> Iterator[int]:
    """Call `run` again and again, dead from the k-th call on that changes the disk, k = 1, 1 + stride, ...; yields k after each death,
    the disk as the kill left it, and ends when a run comes through. `fresh` is called before each, unharmed.
    """
    for k in range(1, 1000, stride):
        fresh()
        left = k
        with monkeypatch.context() as patch:

            def deadly(call: Callable[..., Any]) -> Callable[..., Any]:
                def counted(*args: Any, **kwargs: Any) -> Any:
                    nonlocal left
                    left -= 1
                    if left <= 0:
                        raise Killed
                    return call(*args, **kwargs)

                return counted

            for name in CALLS:
                patch.setattr(os, name, deadly(getattr(os, name)))
            patch.setattr(shutil, "rmtree", deadly(shutil.rmtree))
            try:
                run()
            except Killed:
                pass
            else:
                return
        yield k
    raise AssertionError("the run never came through")
