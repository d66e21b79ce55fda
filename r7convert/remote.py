"""A checkpoint on the Hub, read by HTTP ranges: JSON files whole, of each shard its header and nothing else.

A 346 GB repository costs about 25 MB. The bound is kept by leaving out, in this order, what the headers say anyway: the
index (15 MB there; rebuilt from the headers), then the sidecars. What was left out is in `notes`.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from r7convert.address import Repo
from r7convert.checkpoint import INDEX, SHARD
from r7convert.download import OTHER_WEIGHTS, PICTURES
from r7convert.errors import FormatError, Offences, complain
from r7convert.hub import Snapshot, read_range, read_snapshot, read_whole
from r7convert.source import collect
from r7convert.store import MAX_JSON_BYTES, Header, check_not_pointer, header_length, parse_header, strict_json

Json = Any

MOST_FETCHED_BYTES = 30_000_000
CONNECTIONS = 8
PREFIX_BYTES = 64  # the length word, and enough to know a pointer by
# What a checkpoint's headers are checked against; everything else of a repository is left where it is.
_UNWANTED = tuple(OTHER_WEIGHTS | PICTURES)
_READ_BEFORE = ("config.json", "quantization_config.json", "hf_quant_config.json")


class RemoteSource:
    """A `Source` over a repository at one resolved commit. `fetched_bytes` counts every body byte that came.

    Raises:  NetworkError; FormatError for pointers and broken headers, all named at once.
    """

    def __init__(self, repo: Repo, *, most_bytes: int = MOST_FETCHED_BYTES) -> None:
        self.snapshot: Snapshot = read_snapshot(repo)
        self.repo: str | None = self.snapshot.repo
        self.commit: str | None = self.snapshot.commit
        self.where = f"{self.snapshot.repo}@{self.snapshot.commit[:12]}"
        # The files that `download` would bring, so that both ways end in the same folder.
        self._names = [name for name in sorted(self.snapshot.files) if not name.startswith(".") and not name.lower().endswith(_UNWANTED)]
        self.left_out: Sequence[str] = tuple(sorted(set(self.snapshot.files) - set(self._names)))
        self.notes: list[str] = []
        self.fetched_bytes = 0
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._lengths: dict[str, int] = {}
        self._headers: dict[str, Header] = {}
        self._sizes: dict[str, int] | None = None
        self._index_from_headers = False

    def sizes(self) -> Mapping[str, int]:
        """Bytes of every file, less what the bound leaves no room to read."""
        if self._sizes is None:
            self._sizes = self._within_bound({name: self.snapshot.files[name].size for name in self._names})
        return self._sizes

    def json(self, name: str) -> Json:
        if name == INDEX and self._index_from_headers:
            return {"metadata": {}, "weight_map": self._weight_map()}
        raw = read_whole(self.snapshot, name, MAX_JSON_BYTES)
        self._count(len(raw))
        check_not_pointer(raw, f"{self.where}: {name}")
        return strict_json(raw, f"{self.where}: {name}")

    def headers(self, names: Sequence[str]) -> list[Header]:
        bad = Offences()
        self._measure(names, bad)
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            found = list(pool.map(lambda name: collect(bad, self._header, name) if name in self._lengths else None, names))
        bad.check()
        return [header for header in found if header is not None]

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        return self._range(name, offset, offset + nbytes)

    def _within_bound(self, sizes: dict[str, int]) -> dict[str, int]:
        shards = [name for name in sizes if name.endswith(SHARD)]
        bad = Offences()
        self._measure(shards, bad)
        bad.check()
        sidecars = [name for name in sizes if name.endswith(".json") and name.removesuffix(".json") + SHARD in sizes]
        left = self._most_bytes - self.fetched_bytes - sum(self._lengths.values()) - sum(sizes.get(name, 0) for name in _READ_BEFORE)
        sidecar_bytes = sum(sizes[name] for name in sidecars)
        if sizes.get(INDEX, 0) + sidecar_bytes > left and INDEX in sizes:
            self._index_from_headers = True
            self.notes.append(f"{INDEX} ({sizes[INDEX]:,} bytes) not fetched: rebuilt from the headers, so a stale index is not seen")
            if sidecar_bytes > left:
                self.notes.append(f"{len(sidecars)} sidecars ({sidecar_bytes:,} bytes) not fetched: their bit_map is not compared")
                return {name: size for name, size in sizes.items() if name not in sidecars}
        return sizes

    def _weight_map(self) -> dict[str, str]:
        """What the index would say if it names every shard. A tensor in two of them is a question only the index answers."""
        weight_map: dict[str, str] = {}
        for header in self.headers([name for name in self.sizes() if name.endswith(SHARD)]):
            for tensor in header.tensors:
                if tensor in weight_map:
                    raise FormatError(
                        complain(
                            f"{self.where}: {tensor}",
                            "tensor in two shards",
                            expected="one",
                            found=f"{weight_map[tensor]} and {header.file}",
                            do=f"Download the repository: only its {INDEX} tells which one counts.",
                        )
                    )
                weight_map[tensor] = header.file
        return weight_map

    def _measure(self, names: Sequence[str], bad: Offences) -> None:
        """Learn the header lengths of shards not yet asked for."""
        new = [name for name in names if name not in self._lengths]
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            for name, length in zip(new, pool.map(lambda name: collect(bad, self._length, name), new), strict=True):
                if length is not None:
                    self._lengths[name] = length

    def _length(self, name: str) -> int:
        size = self.snapshot.files[name].size
        return header_length(self._range(name, 0, min(PREFIX_BYTES, size)), size, f"{self.where}: {name}")

    def _header(self, name: str) -> Header:
        if name not in self._headers:
            raw = self._range(name, 8, 8 + self._lengths[name])
            self._headers[name] = parse_header(raw, file=name, size=self.snapshot.files[name].size)
        return self._headers[name]

    def _range(self, name: str, start: int, stop: int) -> bytes:
        data = read_range(self.snapshot, name, start, stop)
        self._count(len(data))
        return data

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self.fetched_bytes += nbytes
