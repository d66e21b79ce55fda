"""Hidden-side vectors, what headers cannot tell of them: whether ranks agree, experts share theirs, gate and up have the same one.

Each stored vector is read once at most, as a digest. Of a checkpoint on the Hub, where every vector is a request, the first and
the last expert stand for all; the writer compares every copy on its way and stops at one that differs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

from r7convert.errors import Offences
from r7convert.experts import HIDDEN_FIELD, ExpertLayer
from r7convert.format import PROJECTIONS, TensorEntry
from r7convert.source import Folder, Source

GATE, UP, DOWN = PROJECTIONS


class Vectors:
    """The hidden-side vectors of one checkpoint."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._is_thorough = isinstance(source, Folder)
        self._digests: dict[str, bytes] = {}

    def check_ranks(self, layers: Iterable[ExpertLayer]) -> None:
        """Every rank repeats the vectors that no rank cuts: where one differs the matrix cannot be joined, nor served whole.

        Raises:  FormatError naming each one that differs from rank 0's.
        Source:  FORMAT.md section 4.
        """
        bad = Offences()
        for layer in layers if self._is_thorough else ():
            for proj in PROJECTIONS:
                for copies in self._copies(layer, proj):
                    for other in copies[1:]:
                        if self._digest(other) != self._digest(copies[0]):
                            found = f"others than {copies[0].name}"
                            bad.add(f"{other.file}: {other.name}", "copies on every rank", expected="the same bytes", found=found)
        bad.check()

    def find_own(self, layer: ExpertLayer) -> str | None:
        """The first vector that is not that of expert 0, or None where a layer's experts share theirs. Stops at the first."""
        if layer.hidden != "per_expert":
            return None
        for proj in PROJECTIONS:
            first: bytes | None = None
            for copies in self._copies(layer, proj):
                for entry in copies:
                    first = first or self._digest(entry)
                    if self._digest(entry) != first:
                        return f"{entry.file}: {entry.name}"
        return None

    def find_apart(self, layer: ExpertLayer) -> str | None:
        """The first vector that keeps a layer from having one for gate and up and one for down, as R7 writes them, or None."""
        if layer.hidden == "r7_shared":
            return None
        if (own := self.find_own(layer)) is not None:
            return own
        gate, up = (next(self._copies(layer, proj))[0] for proj in (GATE, UP))
        return None if self._digest(gate) == self._digest(up) else f"{up.file}: {up.name}"

    def _copies(self, layer: ExpertLayer, proj: str) -> Iterator[tuple[TensorEntry, ...]]:
        """The stored copies of one projection's vector, rank by rank: of each expert, or once where the layer has one for all."""
        experts = range(len(layer.bits)) if layer.hidden == "per_expert" else range(1)
        for expert in experts if self._is_thorough else dict.fromkeys((0, experts[-1])):
            copies = layer.parts(expert, proj, HIDDEN_FIELD[proj])
            yield copies if self._is_thorough else copies[:1]

    def _digest(self, entry: TensorEntry) -> bytes:
        if entry.name not in self._digests:
            data = self._source.read(entry.file, entry.offset, entry.nbytes)
            self._digests[entry.name] = hashlib.sha256(data).digest()
        return self._digests[entry.name]


class Unread(Vectors):
    """For who may read headers alone: ranks are taken to agree, and experts to share."""

    def _digest(self, entry: TensorEntry) -> bytes:
        return b"unread"
