"""Several processes that share one run: who does what, and what rank 0 learns from the others.

`torchrun --nproc-per-node N -m r7convert ...` starts N processes with RANK and WORLD_SIZE set, on one machine or on several that
see the same folders. Every rank takes its share of the layers; rank 0 alone holds the lock, writes the common files and seals.
Nothing but small Python objects travels between ranks, over gloo: payloads go to disk. Alone, a Team of one does nothing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

from r7convert.errors import ResourceError, complain

T = TypeVar("T")

# Ranks may wait for each other as long as a layer takes; one that died is noticed by its closed connection, not by this.
_LONGEST_WAIT = timedelta(days=7)
_AGAIN = "Its own message says why. Repeat the command: what is finished is kept."


@dataclass(frozen=True, slots=True)
class Team:
    """This process among those that share the run."""

    rank: int = 0
    size: int = 1
    local_rank: int | None = None
    """Which process of its machine: its GPU, where there is one each."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """The items this rank works on: every item belongs to exactly one rank, whatever the others do."""
        return items[self.rank :: self.size]

    def wait(self, what: str) -> None:
        """Until every rank is here.

        Raises:  ResourceError if one of them ended; the same from `gather`.
        """
        if self.size > 1:
            import torch.distributed as dist

            with self._all_alive(what):
                dist.barrier()

    def gather(self, value: T, what: str) -> list[T]:
        """Every rank's value, in rank order, on rank 0; [] on the others."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        found: list[T | None] | None = [None] * self.size if self.is_first else None
        with self._all_alive(what):
            dist.gather_object(value, found)
        return [item for item in found or [] if item is not None]

    def first(self, value: T | None, what: str) -> T:
        """Rank 0's value, on every rank."""
        held = [value]
        if self.size > 1:
            import torch.distributed as dist

            with self._all_alive(what):
                dist.broadcast_object_list(held)
        assert held[0] is not None
        return held[0]

    @contextlib.contextmanager
    def _all_alive(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            found = str(error).splitlines()[0][:120]
            raise ResourceError(
                complain(f"rank {self.rank}", f"another rank ended before {what}", expected=f"{self.size} ranks", found=found, do=_AGAIN)
            ) from None


@contextlib.contextmanager
def join_team() -> Iterator[Team]:
    """The team that torchrun started this process in, or a team of one."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Team()
        return
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=_LONGEST_WAIT)
    team = Team(dist.get_rank(), dist.get_world_size(), int(os.environ.get("LOCAL_RANK", "0")))
    try:
        yield team
    except KeyboardInterrupt:  # torchrun ends the others when one rank is gone
        what = "stopped by torchrun, because another rank ended or somebody interrupted the run"
        raise ResourceError(complain(f"rank {team.rank}", what, do=_AGAIN)) from None
    finally:
        dist.destroy_process_group()
