"""The network door: what a repository holds, byte ranges of its files, retries, and errors of ours in place of the client's.

huggingface_hub does the work (sessions, tokens, endpoints, uploads, its own retries); this module adds what its calls lack:
one snapshot of names, sizes and digests at a resolved commit, bounded retries around calls that it tries only once, and
one line for every failure, without tokens, home paths or signed URLs.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from r7convert import __version__
from r7convert.address import Repo
from r7convert.errors import FormatError, InputError, NetworkError, R7Error, ResourceError, complain
from r7convert.format import is_int

T = TypeVar("T")

logger = logging.getLogger(__name__)

LIBRARY: dict[str, Any] = {"library_name": "r7convert", "library_version": __version__}
RETRIES = 5
RETRIES_TO_CONNECT = 2
SILENT_WAIT_S = 3.0
LONGEST_WAIT_S = 300.0
TRANSIENT = frozenset({408, 429, 500, 502, 503, 504})
READ_TIMEOUT_S = 30.0
MOST_LISTED = 100_000
"""Ten times what the Hub lets a folder hold: a listing without end is not read to it."""
_COMMIT = re.compile(r"[0-9a-f]{40,64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class HubFile:
    """One file of a repository as the Hub lists it. `sha256` is known for LFS files, `git_oid` is a blob's SHA-1 for the rest."""

    name: str
    size: int
    sha256: str | None
    git_oid: str

    def check(self, path: Path, where: str) -> str:
        """SHA-256 of the file on disk, once it has proved to be the one listed.

        Raises:  NetworkError naming the digest that differs.
        """
        sha256, sha1 = hashlib.sha256(), hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)
        with path.open("rb", buffering=0) as file:
            while block := file.read(1 << 22):
                sha256.update(block)
                if self.sha256 is None:
                    sha1.update(block)
        kind, expected, found = (
            ("sha256", self.sha256, sha256.hexdigest()) if self.sha256 else ("git blob id", self.git_oid, sha1.hexdigest())
        )
        if found != expected:
            raise NetworkError(complain(where, kind, expected=expected, found=found, do="The bytes served differ from the Hub's listing."))
        return sha256.hexdigest()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A repository at one commit: the files of its top level, by name."""

    repo: str
    revision: str
    commit: str
    private: bool
    files: dict[str, HubFile]


def read_snapshot(repo: Repo) -> Snapshot:
    """Resolve a revision to its commit and list what stands there.

    Raises:  NetworkError (no such repository, no access, no network), InputError (a dangling listing).
    """
    from huggingface_hub.hf_api import RepoFile

    api = hub_api()
    try:
        with speaking(repo):
            info = patiently(lambda: api.model_info(repo.id, revision=repo.revision))
            if info.sha is None:
                raise InputError(complain(repo, "the Hub names no commit", do="Is the repository empty?"))
            if not _COMMIT.fullmatch(info.sha):
                raise TypeError(f"commit {info.sha!r}")
            entries = patiently(lambda: list(itertools.islice(api.list_repo_tree(repo.id, revision=info.sha), MOST_LISTED + 1)))
        listed = [_listed(entry) for entry in entries if isinstance(entry, RepoFile)]
        if len(entries) > MOST_LISTED or len({file.name for file in listed}) < len(listed):
            raise TypeError(f"over {MOST_LISTED:,} files, or one of them twice")
    except (LookupError, TypeError, AttributeError, RecursionError) as error:  # the client takes answers apart without looking
        do = "Is HF_ENDPOINT right?"
        raise NetworkError(complain(repo, "the Hub's answer", expected="that of a model repository", found=_cause(error), do=do)) from None
    return Snapshot(repo.id, repo.revision or "main", info.sha, bool(info.private), {file.name: file for file in listed})


def _listed(entry: Any) -> HubFile:
    """Raises:  TypeError for an entry that lists no file."""
    sha256 = entry.lfs.sha256 if entry.lfs else None
    sound = isinstance(entry.path, str) and is_int(entry.size) and 0 <= entry.size < 1 << 63 and isinstance(entry.blob_id, str)
    if not sound or not (sha256 is None or (isinstance(sha256, str) and _SHA256.fullmatch(sha256))):
        raise TypeError(f"file {entry.path!r}")
    return HubFile(entry.path, entry.size, sha256, entry.blob_id)


def hub_api() -> Any:
    """huggingface_hub's client under our name; its variables (HF_ENDPOINT, HF_TOKEN, HF_HOME, ...) hold."""
    from huggingface_hub import HfApi

    return HfApi(**LIBRARY)


def read_range(snapshot: Snapshot, name: str, start: int, stop: int) -> bytes:
    """Bytes [start, stop) of a file by an HTTP range request; the body is never read further than asked.

    Raises:  NetworkError, also where the server answers with another range.
    """
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff

    where = f"{snapshot.repo}: {name}"
    url = hf_hub_url(snapshot.repo, name, revision=snapshot.commit)
    headers = build_hf_headers(**LIBRARY) | {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}

    def fetch() -> bytes:
        # A wait between reads ends, so a stalled server cannot hold the run; dropped connections are tried again.
        with http_stream_backoff("GET", url, headers=headers, timeout=READ_TIMEOUT_S, max_retries=0, retry_on_exceptions=()) as response:
            hf_raise_for_status(response)
            whole = response.status_code == 200 and start == 0
            if response.status_code != 206 and not whole:
                raise NetworkError(complain(where, "range request", expected="status 206", found=response.status_code))
            data = bytearray()
            for block in response.iter_bytes(1 << 20):
                data += block
                if len(data) >= stop - start:
                    break
        return bytes(data[: stop - start])

    if stop <= start:
        return b""
    with speaking(where):
        data = patiently(fetch)
    if len(data) != stop - start:
        raise NetworkError(complain(where, "range request", expected=f"{stop - start} bytes", found=len(data), do="Run again."))
    return data


def read_whole(snapshot: Snapshot, name: str, most_bytes: int) -> bytes:
    """A small file, whole, in memory.

    Raises:  InputError where the repository has none, FormatError over `most_bytes`, NetworkError.
    """
    file = snapshot.files.get(name)
    if file is None:
        raise InputError(complain(f"{snapshot.repo}@{snapshot.commit[:12]}", "missing file", expected=name, found="no such file"))
    if file.size > most_bytes:
        raise FormatError(complain(f"{snapshot.repo}: {name}", "size", expected=f"at most {most_bytes} bytes", found=file.size))
    return read_range(snapshot, name, 0, file.size)


# ---- patience and errors ----------------------------------------------------------------------------------------------


def patiently(call: Callable[[], T], *, retries: int = RETRIES) -> T:
    """Call again after 429, 5xx and broken connections. The Hub's word on how long to wait is honoured, the number of tries is
    bounded, and where it asks for more than five minutes the error is the answer.

    For calls that the client makes only once and that are safe to repeat.
    """
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
    from huggingface_hub.utils import httpx  # the client's own HTTP library, whichever it is

    wait_s, tried = 1.0, 0
    while True:
        tried += 1
        try:
            return call()
        except OfflineModeIsEnabled:
            raise
        except HfHubHTTPError as error:
            wait_s = _asked_wait_s(error.response.headers) or wait_s
            if error.response.status_code not in TRANSIENT or tried > retries or wait_s > LONGEST_WAIT_S:
                raise
            why = f"status {error.response.status_code}"
        except (httpx.TransportError, json.JSONDecodeError) as error:
            # A gateway's HTML in place of JSON is a 5xx in disguise; a port that nobody listens on seldom comes back soon.
            if tried > (min(retries, RETRIES_TO_CONNECT) if isinstance(error, httpx.ConnectError) else retries):
                raise
            why = type(error).__name__
        if wait_s > SILENT_WAIT_S:
            logger.warning("the Hub answers %s; waiting %.0f s, try %d of %d", why, wait_s, tried, retries)
        time.sleep(wait_s)
        wait_s = min(wait_s * 2, 8.0)


def _asked_wait_s(headers: Any) -> float | None:
    """Seconds the Hub asks to wait: by a spent rate limit, or by Retry-After."""
    from huggingface_hub.utils import parse_ratelimit_headers

    limit = parse_ratelimit_headers(headers)
    if limit is not None and limit.remaining == 0:
        return float(limit.reset_in_seconds) + 1.0  # whole seconds: one more against rounding
    value = headers.get("Retry-After", "")
    return float(value) + 0.1 if re.fullmatch(r"\d+(\.\d+)?", value) else None


@contextlib.contextmanager
def speaking(where: object) -> Iterator[None]:
    """Turn whatever the client raises into one line of ours.

    Raises:  NetworkError, or ResourceError where this machine's disk is at fault.
    """
    from huggingface_hub import errors
    from huggingface_hub.utils import httpx

    try:
        yield
    except R7Error:
        raise
    except errors.GatedRepoError:
        raise NetworkError(complain(where, "gated repository", do="Ask for access on its page, then set HF_TOKEN.")) from None
    except errors.RepositoryNotFoundError:
        raise NetworkError(complain(where, "no such repository, or no access to it", do="Check the name, and HF_TOKEN.")) from None
    except errors.RevisionNotFoundError:
        raise NetworkError(complain(where, "no such branch, tag or commit")) from None
    except errors.EntryNotFoundError as error:
        if isinstance(error, errors.LocalEntryNotFoundError):
            raise NetworkError(complain(where, "the Hub cannot be reached", found=_cause(error), expected="an answer")) from None
        raise NetworkError(complain(where, "no such file in the repository")) from None
    except errors.OfflineModeIsEnabled:
        raise NetworkError(complain(where, "offline", do="Unset HF_HUB_OFFLINE, or name a folder.")) from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        do = {401: "Set HF_TOKEN.", 403: "The token may not do this."}.get(status, "Run again.")
        if wait_s := _asked_wait_s(error.response.headers):
            do = f"Wait {wait_s:.0f} s, then run again."
        said = redact(error.server_message or "").replace("\n", " ")[:300]
        raise NetworkError(
            complain(where, "the Hub refused", expected="success", found=f"status {status} {said}".rstrip(), do=do)
        ) from None
    except (httpx.TransportError, TimeoutError, ConnectionError, json.JSONDecodeError) as error:
        raise NetworkError(complain(where, "connection lost", expected="an answer", found=_cause(error), do="Run again.")) from None
    except OSError as error:
        if error.errno is None:  # the client's word for a body that ends early
            raise NetworkError(
                complain(where, "transfer failed", found=_cause(error), expected="the whole file", do="Run again.")
            ) from None
        do = {errno.ENOSPC: "Free some space.", errno.EACCES: "Check permissions."}.get(error.errno, "")
        raise ResourceError(complain(where, error.strerror or type(error).__name__, do=do)) from None
    except RuntimeError as error:  # the client's word for an upload that ended, whatever the cause
        found = _cause(error.__cause__ or error)
        raise NetworkError(complain(where, "transfer failed", expected="success", found=found, do="Run again.")) from None
    except ValueError as error:
        raise NetworkError(complain(where, "the Hub refused", expected="success", found=_cause(error))) from None


def _cause(error: BaseException) -> str:
    said = "; ".join(line.strip() for line in redact(str(error)).splitlines() if line.strip())
    return f"{type(error).__name__} ({said[:300]})" if said else type(error).__name__


def redact(text: str) -> str:
    """The text without tokens, home folder, host name, or queries of signed URLs."""
    text = re.sub(r"\bhf_(?:oauth_|jwt_)?[A-Za-z0-9._-]{8,}", "hf_***", text)
    text = re.sub(r"(https?://[^\s?]+)\?\S+", r"\1", text)
    if (token := os.environ.get("HF_TOKEN", "")) and len(token) >= 8:
        text = text.replace(token, "***")
    home, host = str(Path.home()), socket.gethostname()
    if len(home) > 1:
        text = re.sub(rf"{re.escape(home)}(?=[/\\\s'\"]|$)", "~", text)
    return re.sub(rf"\b{re.escape(host)}\b", "host", text) if host and host != "localhost" else text


def tame_client(*, quiet: bool, bars: bool = False) -> None:
    """Our progress in place of the client's bars, unless `bars`; its warnings redacted, for they print signed URLs, and none
    with `quiet`. Its own variables go first.
    """
    from huggingface_hub.utils import disable_progress_bars
    from huggingface_hub.utils import logging as client_logging

    if os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS") is None and not bars:
        disable_progress_bars()
    if os.environ.get("HF_DEBUG"):
        return
    for handler in client_logging.get_logger().handlers:
        handler.addFilter(_redact_record)
    if quiet and not os.environ.get("HF_HUB_VERBOSITY"):
        client_logging.set_verbosity(logging.ERROR)
        logger.setLevel(logging.ERROR)


def _redact_record(record: logging.LogRecord) -> bool:
    record.msg, record.args = redact(record.getMessage()).replace("\n", " "), ()
    return True


class Stop(Exception):
    """Raised inside a transfer that another thread has asked to end."""


def transfer_bar(advance: Callable[[int], None], stop: threading.Event) -> type:
    """A class in the shape of tqdm that the client feeds with bytes, and that ends the transfer once `stop` is set."""

    class Bar:
        def __init__(self, *_: object, total: float | None = None, initial: float = 0, **__: object) -> None:
            self.total, self.n = total, initial

        def update(self, n: float | None = 1) -> None:
            if stop.is_set():
                raise Stop
            self.n += n or 0
            advance(int(n or 0))

        def update_transfer(self, n: float | None = 1) -> None:
            pass

        def close(self, *_: object, **__: object) -> None:
            pass

        refresh = set_postfix_str = set_transfer_postfix_str = set_description = set_description_str = close

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    return Bar
