"""A Hub of our own on 127.0.0.1: enough of the real HTTP API for the real huggingface_hub client, with faults to order.

Two ports, as in life: the Hub (API, small files, redirects) and its CDN (LFS bytes), so that a token sent to the wrong
place is seen. Blobs live in a folder by SHA-256, so a multi-gigabyte repository costs no memory; everything else is a
handful of dicts. Only plain LFS is spoken: clients set HF_HUB_DISABLE_XET=1 (2.x uploads through xet without asking).

    with HubServer(tmp_path) as hub:
        hub.add_repo("org/name", {"config.json": b"{}", "model.safetensors": b"..."})
        hub.faults.append(Fault("GET /cdn/", cut=1000, times=2))
        ...                                    # client runs with hub.env
        hub.requests                           # what it asked, in order
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from time import sleep  # by name: tests replace time.sleep to hurry the client
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_loopbackTokenThatMustNeverBePrinted"
LFS_SUFFIXES = (".safetensors", ".bin", ".gguf")
LFS_THRESHOLD_BYTES = 1 << 20
BLOCK_BYTES = 1 << 16


@dataclass(frozen=True)
class Blob:
    """One version of one file. `oid` is what git calls it: the blob's own SHA-1, or for LFS the pointer's."""

    sha256: str
    size: int
    oid: str
    lfs: bool


@dataclass(frozen=True)
class Commit:
    id: str
    parent: str | None
    title: str
    files: dict[str, Blob]


@dataclass
class Repo:
    id: str
    private: bool = False
    branches: dict[str, str] = field(default_factory=dict)  # also refs/pr/N
    tags: dict[str, str] = field(default_factory=dict)
    pulls: dict[int, dict[str, Any]] = field(default_factory=dict)
    commits: dict[str, Commit] = field(default_factory=dict)


@dataclass
class Fault:
    """What to do to the next `times` requests whose "METHOD /path" the pattern finds."""

    pattern: str
    times: int = 1
    skip: int = 0  # let that many matching requests pass first
    ranged: bool | None = None  # only requests with, or without, a Range header
    status: int | None = None  # answer with this status instead
    body: bytes | None = None  # answer with this JSON instead
    headers: dict[str, str] = field(default_factory=dict)
    cut: int | None = None  # send that many body bytes, then drop the connection
    whole: bool = False  # pay no heed to Range
    corrupt: bool = False  # flip one bit in the body, length kept
    seconds: float = 0.0  # wait before answering
    call: Callable[[], None] | None = None  # run this first (move a branch, kill the client)


@dataclass
class Request:
    method: str
    path: str
    port: str  # "hub" or "cdn"
    authorized: bool
    range: str | None
    status: int
    sent_bytes: int


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    errors: list[BaseException]

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hangs up is no news; anything else is a mistake of this module and fails the test (conftest.py)."""
        error = sys.exc_info()[1]
        if error is not None and not isinstance(error, (ConnectionError, TimeoutError)):
            self.errors.append(error)


class Lost(Exception):
    """Close the connection without an answer."""


class HubServer:
    def __init__(self, folder: Path, *, page_size: int = 1000, multipart_bytes: int = 1 << 22) -> None:
        self.objects = folder / "objects"
        self.objects.mkdir(parents=True, exist_ok=True)
        self.repos: dict[str, Repo] = {}
        self.faults: list[Fault] = []
        self.requests: list[Request] = []
        self.page_size = page_size
        self.multipart_bytes = multipart_bytes
        self.lock = threading.RLock()
        self.sleeps: list[float] = []
        self._clock = 0
        self.errors: list[BaseException] = []
        self._servers: list[ThreadingHTTPServer] = []

    # -- life -------------------------------------------------------------------------------------------------------

    def __enter__(self) -> HubServer:
        for name in ("hub", "cdn"):
            handler = type("Handler", (_Handler,), {"hub": self, "port_name": name})
            server = _Server(("127.0.0.1", 0), handler)
            server.errors = self.errors
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
            self._servers.append(server)
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._servers[0].server_address[1]}"

    @property
    def cdn(self) -> str:
        return f"http://127.0.0.1:{self._servers[1].server_address[1]}"

    def env(self, home: Path, **more: str) -> dict[str, str]:
        """The variables a client needs to talk to this Hub and to nothing else."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_TOKEN": TOKEN,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_OFFLINE": "0",
            "NO_PROXY": "127.0.0.1",
        } | more

    # -- what tests do to the Hub directly ---------------------------------------------------------------------------

    def add_repo(self, repo_id: str, files: dict[str, bytes | Path], *, private: bool = False) -> str:
        """Create a repository whose branch main holds `files`; returns the commit."""
        with self.lock:
            self.repos[repo_id] = Repo(repo_id, private=private)
            return self.commit(repo_id, "main", "first", files)

    def commit(self, repo_id: str, branch: str, title: str, files: dict[str, bytes | Path], delete: tuple[str, ...] = ()) -> str:
        with self.lock:
            repo = self.repos[repo_id]
            blobs = {name: self.store(name, data) for name, data in files.items()}
            return self._commit(repo, branch, title, blobs, delete).id

    def store(self, name: str, data: bytes | Path) -> Blob:
        if isinstance(data, Path):  # adopted by name, not hashed: a sparse stand-in for hundreds of gigabytes
            size, digest = data.stat().st_size, hashlib.sha256(str(data).encode()).hexdigest()
            (self.objects / digest).symlink_to(data)
        else:
            size, digest = len(data), hashlib.sha256(data).hexdigest()
            (self.objects / digest).write_bytes(data)
        return self._blob(digest, size, lfs=name.endswith(LFS_SUFFIXES) or size >= LFS_THRESHOLD_BYTES)

    def read(self, repo_id: str, name: str, revision: str = "main") -> bytes:
        return (self.objects / self.files(repo_id, revision)[name].sha256).read_bytes()

    def files(self, repo_id: str, revision: str = "main") -> dict[str, Blob]:
        commit = self.resolve(self.repos[repo_id], revision)
        assert commit is not None, f"{repo_id} has no {revision}"
        return commit.files

    def history(self, repo_id: str, revision: str = "main") -> list[Commit]:
        """Commits of a branch, oldest first."""
        repo, found = self.repos[repo_id], []
        commit = self.resolve(repo, revision)
        while commit is not None:
            found.append(commit)
            commit = repo.commits.get(commit.parent or "")
        return found[::-1]

    def asked(self, pattern: str) -> list[Request]:
        return [r for r in self.requests if re.search(pattern, f"{r.method} {r.path}")]

    def sent_bytes(self) -> int:
        return sum(r.sent_bytes for r in self.requests)

    # -- the model behind the API ------------------------------------------------------------------------------------

    def _blob(self, digest: str, size: int, *, lfs: bool) -> Blob:
        if lfs:
            pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{digest}\nsize {size}\n".encode()
            return Blob(digest, size, hashlib.sha1(b"blob %d\0" % len(pointer) + pointer).hexdigest(), lfs=True)
        data = (self.objects / digest).read_bytes()
        return Blob(digest, size, hashlib.sha1(b"blob %d\0" % size + data).hexdigest(), lfs=False)

    def resolve(self, repo: Repo, revision: str) -> Commit | None:
        name = repo.branches.get(revision) or repo.tags.get(revision) or revision
        return repo.commits.get(name)

    def _commit(self, repo: Repo, branch: str, title: str, blobs: dict[str, Blob], delete: tuple[str, ...] = ()) -> Commit:
        parent = repo.branches.get(branch)
        files = dict(repo.commits[parent].files) if parent else {}
        files |= blobs
        for name in delete:
            files.pop(name, None)
        self._clock += 1
        commit = Commit(hashlib.sha1(f"{repo.id} {self._clock}".encode()).hexdigest(), parent, title, files)
        repo.commits[commit.id] = commit
        repo.branches[branch] = commit.id
        return commit

    def _pull(self, repo: Repo, title: str, base: str = "main") -> int:
        number = len(repo.pulls) + 1
        repo.pulls[number] = {"title": title, "base": base, "status": "draft", "author": "tester"}
        repo.branches[f"refs/pr/{number}"] = repo.branches[base]
        return number


@dataclass
class Answer:
    status: int = 200
    body: bytes | Path = b""
    headers: dict[str, str] = field(default_factory=dict)

    @classmethod
    def json(cls, value: object, status: int = 200, **headers: str) -> Answer:
        return cls(status, json.dumps(value).encode(), {"Content-Type": "application/json"} | headers)

    @classmethod
    def missing(cls, code: str) -> Answer:
        status = 401 if code == "RepoNotFound" else 404
        return cls(status, b'{"error": "not here"}', {"X-Error-Code": code, "X-Error-Message": "not here"})


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    port_name: str
    protocol_version = "HTTP/1.1"
    timeout = 30
    disable_nagle_algorithm = True  # else 40 ms a request

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._serve()

    do_HEAD = do_POST = do_PUT = do_GET

    def _serve(self) -> None:
        target = urlsplit(self.path)
        path, query = target.path, parse_qs(target.query)
        fault = self._next_fault(path)
        if fault is not None and fault.call is not None:
            fault.call()
        if fault is not None and fault.seconds:
            sleep(fault.seconds)
        length = int(self.headers.get("Content-Length") or 0)
        try:
            body: bytes | Path = self._receive_lfs(path, length) if self.command == "PUT" else self._receive(length)
            if fault is not None and fault.status is not None:
                answer = Answer.json({"error": f"fault {fault.status}"}, fault.status, **fault.headers)
            elif fault is not None and fault.body is not None:
                answer = Answer(200, fault.body, {"Content-Type": "application/json", **fault.headers})
            else:
                with self.hub.lock:
                    answer = self._route(path, query, body)
            self._send(path, answer, fault)
        except (Lost, ConnectionError):
            self.close_connection = True

    def _next_fault(self, path: str) -> Fault | None:
        with self.hub.lock:
            for fault in self.hub.faults:
                is_met = fault.ranged in (None, "Range" in self.headers) and re.search(fault.pattern, f"{self.command} {path}")
                if fault.times > 0 and is_met:
                    if fault.skip:
                        fault.skip -= 1
                        return None
                    fault.times -= 1
                    return fault
        return None

    def _receive(self, length: int) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            data = b""
            while size := int(self.rfile.readline(), 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return data
        data = self.rfile.read(length)
        if len(data) < length:
            raise Lost
        return data

    def _receive_lfs(self, path: str, length: int) -> Path:
        """An upload goes straight to disk, whatever its size."""
        part = self.hub.objects / f"incoming-{threading.get_ident()}"
        left = length
        with part.open("wb") as file:
            if self.headers.get("Transfer-Encoding") == "chunked":
                file.write(self._receive(0))
            while left:
                block = self.rfile.read(min(left, BLOCK_BYTES))
                if not block:
                    raise Lost
                file.write(block)
                left -= len(block)
        return part

    def _send(self, path: str, answer: Answer, fault: Fault | None) -> None:
        start, stop, status = 0, len(answer.body) if isinstance(answer.body, bytes) else answer.body.stat().st_size, answer.status
        total, asked = stop, self.headers.get("Range")
        if asked and status == 200 and not (fault and fault.whole) and (match := re.fullmatch(r"bytes=(\d+)-(\d*)", asked)):
            start, stop = int(match[1]), min(stop, int(match[2]) + 1 if match[2] else stop)
            if start >= total:
                status, start, stop = 416, 0, 0
            else:
                status, answer.headers["Content-Range"] = 206, f"bytes {start}-{stop - 1}/{total}"
        self.send_response(status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(stop - start))
        authorized = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        request = Request(self.command, self.path, self.port_name, authorized, asked, status, 0)
        with self.hub.lock:  # before a byte goes out: whoever has the whole answer finds its request here
            self.hub.requests.append(request)
        self.end_headers()
        if self.command == "HEAD":
            return
        self._send_body(answer.body, start, stop, fault, request)
        if request.sent_bytes < stop - start:
            raise Lost

    def _send_body(self, body: bytes | Path, start: int, stop: int, fault: Fault | None, request: Request) -> None:
        """Counts in `request` what is about to be written, for the same reason."""
        if fault is not None and fault.cut is not None:
            stop = min(stop, start + fault.cut)
        if isinstance(body, bytes):
            block = bytearray(body[start:stop])
            if fault is not None and fault.corrupt and block:
                block[len(block) // 2] ^= 1
            request.sent_bytes = len(block)
            self.wfile.write(block)
            return
        with body.open("rb") as file:
            file.seek(start)
            while (left := stop - start - request.sent_bytes) > 0 and (data := file.read(min(BLOCK_BYTES, left))):
                if fault is not None and fault.corrupt and not request.sent_bytes:
                    data = bytes([data[0] ^ 1]) + data[1:]
                request.sent_bytes += len(data)
                self.wfile.write(data)

    # -- routes -------------------------------------------------------------------------------------------------------

    def _route(self, path: str, query: dict[str, list[str]], body: bytes | Path) -> Answer:
        if self.port_name == "cdn":
            return self._route_cdn(path, query, body)
        if self.headers.get("Authorization") not in (None, f"Bearer {TOKEN}"):
            return Answer(401, b"{}", {"X-Error-Message": "Invalid credentials in Authorization header"})
        if path == "/api/whoami-v2":
            return Answer.json({"name": "tester", "type": "user", "orgs": []})
        if path == "/api/validate-yaml":
            return Answer.json({"errors": [], "warnings": []})
        assert isinstance(body, bytes)
        if path == "/api/repos/create":
            return self._create_repo(json.loads(body))
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(.*))?", path):
            repo = self._visible(match[1])
            return self._route_repo(repo, match[2] or "", query, body) if repo else Answer.missing("RepoNotFound")
        if match := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            repo = self._visible(match[1])
            return self._lfs_batch(json.loads(body)) if repo and self._may_write() else Answer.missing("RepoNotFound")
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            repo = self._visible(match[1])
            return self._resolve(repo, unquote(match[2]), unquote(match[3])) if repo else Answer.missing("RepoNotFound")
        if match := re.fullmatch(r"/lfs-complete/(\w+)", path):
            return self._lfs_complete(match[1], json.loads(body))
        return Answer.missing("EntryNotFound")

    def _visible(self, repo_id: str) -> Repo | None:
        repo = self.hub.repos.get(repo_id)
        return repo if repo and (not repo.private or self._may_write()) else None

    def _may_write(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _create_repo(self, wish: dict[str, Any]) -> Answer:
        repo_id = f"{wish.get('organization') or 'tester'}/{wish['name']}"
        if not self._may_write():
            return Answer(401, b"{}", {"X-Error-Message": "Invalid username or password."})
        if repo_id in self.hub.repos:
            return Answer.json({"error": "You already created this model repo", "url": f"{self.hub.url}/{repo_id}"}, 409)
        private = wish.get("visibility") == "private" or bool(wish.get("private"))
        repo = self.hub.repos[repo_id] = Repo(repo_id, private=private)
        self.hub.commit(repo_id, "main", "initial commit", {".gitattributes": b"*.safetensors filter=lfs\n"})
        return Answer.json({"url": f"{self.hub.url}/{repo.id}"})

    def _route_repo(self, repo: Repo, rest: str, query: dict[str, list[str]], body: bytes) -> Answer:
        action, _, tail = rest.partition("/")
        if self.command == "POST" and action != "paths-info" and not self._may_write():
            return Answer(403, b"{}", {"X-Error-Message": "You need write access"})
        if action == "refs":
            refs = [(n, c) for n, c in repo.branches.items() if not n.startswith("refs/")]
            pulls = [(n, c) for n, c in repo.branches.items() if n.startswith("refs/")]
            return Answer.json(
                {
                    "branches": [{"name": n, "ref": f"refs/heads/{n}", "targetCommit": c} for n, c in refs],
                    "tags": [{"name": n, "ref": f"refs/tags/{n}", "targetCommit": c} for n, c in repo.tags.items()],
                    "pullRequests": [{"name": n.removeprefix("refs/"), "ref": n, "targetCommit": c} for n, c in pulls],
                    "converts": [],
                }
            )
        if action == "branch":
            return self._create_branch(repo, unquote(tail), json.loads(body or b"{}"))
        if action == "discussions":
            return self._discussion(repo, tail, query, body)
        revision, _, inner = tail.partition("/")
        revision = unquote(revision) if action else "main"
        commit = self.hub.resolve(repo, revision)
        if commit is None:
            return Answer.missing("RevisionNotFound")
        if action in ("", "revision"):
            return self._repo_info(repo, commit)
        if action == "tree":
            return self._tree(repo, commit, unquote(inner), query)
        if action == "paths-info":
            paths = parse_qs(body.decode())["paths"]
            return Answer.json([_entry(p, commit.files[p]) for p in paths if p in commit.files])
        if action == "commits":
            log = self.hub.history(repo.id, revision)[::-1]
            when = "2026-01-01T00:00:00.000Z"
            return Answer.json([{"id": c.id, "title": c.title, "message": "", "date": when, "authors": [{"user": "tester"}]} for c in log])
        if action == "preupload":
            return self._preupload(commit, json.loads(body))
        if action == "tag":
            wish = json.loads(body)
            if wish["tag"] in repo.tags:
                return Answer.json({"error": "Tag reference exists already"}, 409)
            repo.tags[wish["tag"]] = commit.id
            return Answer.json({})
        if action == "commit":
            return self._create_commit(repo, revision, commit, query, [json.loads(line) for line in body.splitlines() if line])
        return Answer.missing("EntryNotFound")

    def _create_branch(self, repo: Repo, name: str, wish: dict[str, Any]) -> Answer:
        if name in repo.branches:
            return Answer.json({"error": "Reference already exists"}, 409)
        start = self.hub.resolve(repo, wish.get("startingPoint") or "main")
        if start is None:
            return Answer.missing("RevisionNotFound")
        repo.branches[name] = start.id
        return Answer.json({})

    def _discussion(self, repo: Repo, tail: str, query: dict[str, list[str]], body: bytes) -> Answer:
        if self.command == "POST" and not tail:
            wish = json.loads(body)
            assert wish["pullRequest"], "only pull requests are modelled"
            return Answer.json({"num": self.hub._pull(repo, wish["title"])})
        if not tail:
            author = query.get("author")
            pulls = [self._pull_json(repo, n) for n, pull in repo.pulls.items() if not author or pull["author"] in author]
            return Answer.json({"discussions": pulls, "count": len(pulls), "start": 0})
        number = int(tail.removesuffix("/status"))
        if self.command == "POST":
            repo.pulls[number]["status"] = json.loads(body)["status"]
            event = {"id": "0", "type": "status-change", "createdAt": "2026-01-01T00:00:00.000Z", "author": {"name": "tester"}}
            return Answer.json({"newStatus": event | {"data": {"status": repo.pulls[number]["status"]}}})
        return Answer.json(self._pull_json(repo, number))

    def _pull_json(self, repo: Repo, number: int) -> dict[str, Any]:
        pull = repo.pulls[number]
        return {
            "num": number,
            "title": pull["title"],
            "author": {"name": pull["author"]},
            "createdAt": "2026-01-01T00:00:00.000Z",
            "status": pull["status"],
            "repo": {"name": repo.id, "type": "model"},
            "isPullRequest": True,
            "events": [],
            "filesWithConflicts": False,
            "changes": {"base": f"refs/heads/{pull['base']}"},
            "diff": "",
        }

    def _repo_info(self, repo: Repo, commit: Commit) -> Answer:
        siblings = [{"rfilename": n, "size": b.size, "blobId": b.oid} for n, b in sorted(commit.files.items())]
        return Answer.json({"id": repo.id, "sha": commit.id, "private": repo.private, "tags": [], "downloads": 0, "siblings": siblings})

    def _tree(self, repo: Repo, commit: Commit, inner: str, query: dict[str, list[str]]) -> Answer:
        below = [n for n in sorted(commit.files) if not inner or n.startswith(inner + "/")]
        depth = inner.count("/") + 1 if inner else 0
        recursive = query.get("recursive", ["False"])[0].lower() in ("true", "1")
        names = list(dict.fromkeys(n if recursive else "/".join(n.split("/")[: depth + 1]) for n in below))
        start = int(query.get("cursor", ["0"])[0])
        folder = {"type": "directory", "size": 0, "oid": "0" * 40}
        page = [
            _entry(n, commit.files[n]) if n in commit.files else folder | {"path": n} for n in names[start : start + self.hub.page_size]
        ]
        link = {}
        if start + self.hub.page_size < len(names):
            path = urlsplit(self.path).path
            link["Link"] = f'<{self.hub.url}{path}?recursive={recursive}&cursor={start + self.hub.page_size}>; rel="next"'
        return Answer.json(page, **link)

    def _preupload(self, commit: Commit, wish: dict[str, Any]) -> Answer:
        files = []
        for file in wish["files"]:
            name, size = file["path"], file["size"]
            lfs = name.endswith(LFS_SUFFIXES) or size >= LFS_THRESHOLD_BYTES
            known = commit.files.get(name)
            oid = None if known is None else known.sha256 if known.lfs else known.oid
            files.append({"path": name, "uploadMode": "lfs" if lfs else "regular", "shouldIgnore": False, "oid": oid})
        return Answer.json({"files": files})

    def _create_commit(self, repo: Repo, branch: str, head: Commit, query: dict[str, list[str]], lines: list[dict[str, Any]]) -> Answer:
        header = lines[0]["value"]
        if branch not in repo.branches:
            return Answer.json({"error": "not a branch"}, 400)
        if header.get("parentCommit") not in (None, head.id):
            return Answer.json({"error": "A commit has happened since. Please refresh and try again."}, 412)
        blobs, delete = {}, []
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                data = base64.b64decode(value["content"])
                digest = hashlib.sha256(data).hexdigest()
                (self.hub.objects / digest).write_bytes(data)
                blobs[value["path"]] = self.hub._blob(digest, len(data), lfs=False)
            elif line["key"] == "lfsFile":
                if not (self.hub.objects / value["oid"]).exists():
                    return Answer.json({"error": f"LFS pointer to an object that does not exist: {value['path']}"}, 400)
                blobs[value["path"]] = self.hub._blob(value["oid"], value["size"], lfs=True)
            elif line["key"] == "deletedFile":
                delete.append(value["path"])
        pull_url = None
        if query.get("create_pr"):
            number = self.hub._pull(repo, header["summary"], branch)
            branch, pull_url = f"refs/pr/{number}", f"{self.hub.url}/{repo.id}/discussions/{number}"
        commit = self.hub._commit(repo, branch, header["summary"], blobs, tuple(delete))
        url = f"{self.hub.url}/{repo.id}/commit/{commit.id}"
        return Answer.json({"commitUrl": url, "commitOid": commit.id, "pullRequestUrl": pull_url})

    def _lfs_batch(self, wish: dict[str, Any]) -> Answer:
        objects = []
        for item in wish["objects"]:
            oid, size = item["oid"], item["size"]
            entry: dict[str, Any] = {"oid": oid, "size": size}
            if not (self.hub.objects / oid).exists():
                parts = -(-size // self.hub.multipart_bytes)
                if parts > 1:
                    urls = {str(n + 1): f"{self.hub.cdn}/lfs/{oid}/{n + 1}" for n in range(parts)}
                    header = {"chunk_size": str(self.hub.multipart_bytes)} | urls
                    entry["actions"] = {"upload": {"href": f"{self.hub.url}/lfs-complete/{oid}", "header": header}}
                else:
                    entry["actions"] = {"upload": {"href": f"{self.hub.cdn}/lfs/{oid}"}}
            objects.append(entry)
        return Answer.json({"transfer": "basic", "objects": objects})

    def _lfs_complete(self, oid: str, wish: dict[str, Any]) -> Answer:
        parts = [self.hub.objects / f"{oid}.{p['partNumber']}" for p in wish["parts"]]
        whole = self.hub.objects / f"{oid}.whole"
        with whole.open("wb") as out:
            for part in parts:
                out.write(part.read_bytes())
                part.unlink()
        return self._accept(whole, oid)

    def _accept(self, upload: Path, oid: str) -> Answer:
        digest = hashlib.file_digest(upload.open("rb"), "sha256").hexdigest()
        if digest != oid:
            upload.unlink()
            return Answer.json({"error": "content does not match its oid"}, 400)
        upload.rename(self.hub.objects / oid)
        return Answer.json({})

    def _route_cdn(self, path: str, query: dict[str, list[str]], body: bytes | Path) -> Answer:
        if match := re.fullmatch(r"/cdn/(\w+)", path):
            return Answer(200, self.hub.objects / match[1], {"ETag": f'"{match[1]}"'})
        if match := re.fullmatch(r"/lfs/(\w+)(?:/(\d+))?", path):
            assert isinstance(body, Path)
            if match[2]:
                body.rename(self.hub.objects / f"{match[1]}.{match[2]}")
                return Answer(200, b"", {"ETag": f'"{match[2]}"'})
            return self._accept(body, match[1])
        return Answer.missing("EntryNotFound")

    def _resolve(self, repo: Repo, revision: str, name: str) -> Answer:
        commit = self.hub.resolve(repo, revision)
        if commit is None:
            return Answer.missing("RevisionNotFound")
        blob = commit.files.get(name)
        if blob is None:
            return Answer.missing("EntryNotFound")
        headers = {"X-Repo-Commit": commit.id, "Accept-Ranges": "bytes"}
        if blob.lfs:
            headers |= {
                "X-Linked-Size": str(blob.size),
                "X-Linked-Etag": f'"{blob.sha256}"',
                "Location": f"{self.hub.cdn}/cdn/{blob.sha256}",
            }
            return Answer(302, b"", headers)
        return Answer(200, (self.hub.objects / blob.sha256).read_bytes(), headers | {"ETag": f'"{blob.oid}"'})


def _entry(name: str, blob: Blob) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": name, "size": blob.size, "oid": blob.oid}
    if blob.lfs:
        entry["lfs"] = {"oid": blob.sha256, "size": blob.size, "pointerSize": 134}
    return entry
