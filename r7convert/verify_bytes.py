"""The part "bytes": every tensor of the output, ranks joined again, against the source's, bit by bit.

Both folders are read from their own headers. A matrix is compared in one piece: what a rank cut is joined along the axis that
FORMAT.md section 4 cuts, what a rank repeats is compared copy by copy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import numpy as np

from r7convert.evidence import HIDDEN_FIELD, Array, Evidence, Payloads
from r7convert.findings import Check, Part
from r7convert.format import FIELDS, PROJECTIONS, TensorEntry

REENCODED = ("lifted", "lowered", "encoded")
"""Classes whose payload is new: every one of them must be accounted for in the manifest."""
UNREAD = "left unread by quick"
CLASSES = {"trellis": "trellis", "suh": "vectors", "svh": "vectors", "mcg": "markers", "mul1": "markers"}
MARKERS = ("mcg", "mul1")


@dataclass(slots=True)
class Compared:
    """One task's findings. `tallies` counts tensors and bytes of the source by class; `encoded` are weights that EXL3 tensors stand
    for; `source_used` and `output_used` are the names that found their match.
    """

    part: Part = field(default_factory=lambda: Part("bytes"))
    tallies: dict[str, tuple[int, int]] = field(default_factory=dict)
    encoded: set[str] = field(default_factory=set)
    source_used: set[str] = field(default_factory=set)
    output_used: set[str] = field(default_factory=set)

    def tally(self, name: str, entries: Collection[TensorEntry]) -> None:
        count, nbytes = self.tallies.get(name, (0, 0))
        self.tallies[name] = (count + len(entries), nbytes + sum(entry.nbytes for entry in entries))

    def absorb(self, other: Compared) -> None:
        self.part.absorb(other.part)
        for name, (count, nbytes) in other.tallies.items():
            before = self.tallies.get(name, (0, 0))
            self.tallies[name] = (before[0] + count, before[1] + nbytes)
        self.encoded |= other.encoded
        self.source_used |= other.source_used
        self.output_used |= other.output_used


def compare_layer(source: Evidence, output: Evidence, layer: int, *, bits: bool = True) -> Compared:
    """The routed experts of one layer. A trellis of another K was encoded anew: counted here, judged by numbers. Without `bits`
    the files are not read: every tensor still has to be there.

    Source:  FORMAT.md sections 2 and 4.
    """
    done = Compared()
    theirs, ours = source.layer(layer), output.layer(layer)
    check = done.part.check("routed experts: ranks joined equal the source, bit by bit")
    seen: set[tuple[str, ...]] = set()
    with check.collecting(0), Payloads(source.folder) as old, Payloads(output.folder) as new:
        for expert in sorted({*theirs.experts, *ours.experts}):
            for proj in PROJECTIONS:
                for name in CLASSES:
                    before, after = theirs.pieces(expert, proj, name), ours.pieces(expert, proj, name)
                    pair = tuple(entry.name for entry in (*before, *after))
                    if pair in seen:
                        continue
                    seen.add(pair)
                    where = f"{ours.where(expert, proj)}.{name}"
                    if name in MARKERS and not before and not after:
                        continue  # the other codebook's
                    if not before or not after:
                        missing = "the output" if before else "the source"
                        check.expect(False, where, "tensor", expected="in source and output", found=f"none in {missing}")
                        continue
                    new_source = [entry for entry in before if entry.name not in done.source_used]
                    done.source_used |= {entry.name for entry in before}
                    done.output_used |= {entry.name for entry in after}
                    if name == "trellis" and (ks := (theirs.bits(expert, proj), ours.bits(expert, proj)))[0] != ks[1]:
                        done.tally("lifted" if min(ks[0]) < min(ks[1]) else "lowered", new_source)
                        continue
                    done.tally(CLASSES[name] if bits else UNREAD, new_source)
                    if not bits:
                        continue
                    whole = name in MARKERS or name == HIDDEN_FIELD[proj]
                    axis = 1 if name == "trellis" and proj != "down_proj" else 0
                    _compare(check, where, _joined(old, before, axis, whole), _joined(new, after, axis, whole))
    return done


def compare_carried(source: Evidence, output: Evidence, entries: Collection[TensorEntry]) -> Compared:
    """Carried tensors of the source, each against the output's of the same name, in chunks."""
    done = Compared()
    check = done.part.check("carried tensors: equal the source, bit by bit")
    with check.collecting(0), Payloads(source.folder) as old, Payloads(output.folder) as new:
        for before in entries:
            after = output.tensors.get(before.name)
            where = f"{after.file if after else before.file}: {before.name}"
            if after is None and (made := _encoded(before, output)):
                done.source_used.add(before.name)
                done.output_used |= made
                done.encoded.add(before.name)
                done.tally("encoded", [before])
                continue
            if after is None:
                check.expect(False, where, "carried tensor", expected="in the output", found="none")
                continue
            done.source_used.add(before.name)
            done.output_used.add(before.name)
            form = (before.dtype, list(before.shape))
            if not check.same(where, "dtype and shape", expected=form, found=(after.dtype, list(after.shape))):
                continue
            done.tally("carried tensors", [before])
            for (at, one), (_, other) in zip(old.chunks(before), new.chunks(after), strict=True):
                differs = np.flatnonzero(one != other)
                if len(differs):
                    first = int(differs[0])
                    place = f"byte {at + first} (offset {after.offset + at + first} of the file)"
                    check.fail(f"{where}: {place}", "byte", expected=f"{one[first]:#04x}", found=f"{other[first]:#04x}")
                    break
    return done


def _encoded(weight: TensorEntry, output: Evidence) -> set[str]:
    """The EXL3 tensors that stand where a weight [out, in] was, of the shapes its sides ask for; numbers judges their values."""
    module, _, last = weight.name.rpartition(".")
    trellis = output.tensors.get(f"{module}.trellis")
    if last != "weight" or trellis is None or trellis.shape[:2] != tuple(n // 16 for n in reversed(weight.shape)):
        return set()
    return {f"{module}.{field}" for field in FIELDS} & output.tensors.keys()


@dataclass(slots=True)
class _Side:
    """One side of a comparison: a whole array, and the pieces it came from along `axis` (one piece: a copy)."""

    array: Array
    pieces: list[TensorEntry]
    axis: int

    def place(self, index: tuple[int, ...]) -> str:
        """The file, tensor and index there of an element of the whole."""
        at = list(index)
        for piece in self.pieces:
            size = piece.shape[self.axis] if piece.shape else 1
            if not at or at[self.axis] < size:
                return f"{piece.file}: {piece.name}{at}"
            at[self.axis] -= size
        return "beyond the last rank"


def _joined(payloads: Payloads, entries: list[TensorEntry], axis: int, whole: bool) -> Iterator[_Side]:
    """The whole array of a field: one, joined from its ranks; or every rank's copy where ranks repeat it."""
    if whole:
        for entry in entries:
            yield _Side(payloads.array(entry), [entry], 0)
        return
    arrays = [payloads.array(entry) for entry in entries]
    cut = [n for n in range(arrays[0].ndim) if n != axis]
    if any(a.ndim != arrays[0].ndim or any(a.shape[n] != arrays[0].shape[n] for n in cut) for a in arrays):
        return
    yield _Side(np.concatenate(arrays, axis) if len(arrays) > 1 else arrays[0], entries, axis)


def _compare(check: Check, where: str, before: Iterator[_Side], after: Iterator[_Side]) -> None:
    """The first of the source's copies against its others, and against all of the output's."""
    reference = next(before, None)
    if reference is None:
        check.expect(False, where, "source", expected="ranks of one shape", found="ranks that do not join")
        return
    looked = 0
    for label, side in [*(("source", s) for s in before), *(("output", s) for s in after)]:
        looked += 1
        a, b = reference.array, side.array
        if a.dtype != b.dtype or a.size != b.size or (a.shape != b.shape and a.size != 1):
            found = f"{b.dtype} {list(b.shape)} of {side.pieces[0].file}"
            check.expect(False, f"{where}: {label}", "dtype and shape", expected=f"{a.dtype} {list(a.shape)}", found=found)
            continue
        a, b = a.view(f"<u{a.itemsize}").reshape(b.shape), b.view(f"<u{b.itemsize}")
        if np.array_equal(a, b):
            check.saw()
            continue
        index = tuple(int(n) for n in np.argwhere(a != b)[0])
        count = int(np.count_nonzero(a != b))
        what = f"{label}: {side.place(index)}: {count} of {a.size} words differ, the first"
        check.expect(False, where, what, expected=f"{int(a[index]):#06x}", found=f"{int(b[index]):#06x}")
    if not looked:
        check.expect(False, where, "output", expected="ranks of one shape", found="ranks that do not join")
