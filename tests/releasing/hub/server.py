"""The Hub's HTTP interface, as far as `kernels` and `huggingface_hub` use it to load and to publish kernels."""

import base64
import json
import re
import threading
from collections.abc import Iterable
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from .repository import Entry, Repository, pointer

TEXT = (".py", ".md", ".json", ".toml")  # all other files are big files


class Hub:
    """Serves on a free port of 127.0.0.1 while it is entered.

    token: its holder may write to existing repositories, but not create any, like a token for one repository.
    identity: a client that presents it gets the token, as a publishing workflow does.
    trusted: the organisations that are trusted publishers of kernels; a test may change them.
    requests: the method and path of every request so far.
    """

    def __init__(self, folder: Path, token: str, trusted: Iterable[str] = (), identity: str = ""):
        self.folder = folder
        self.token = token
        self.identity = identity
        self.trusted = set(trusted)
        self.requests: list[str] = []
        self.lock = threading.Lock()
        handler = type("Handler", (Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True

    def __enter__(self) -> "Hub":
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exception) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def exists(self, repo_id: str) -> bool:
        return (self.folder / repo_id).exists()

    @cache  # noqa: B019 - few, and they live as long
    def repository(self, repo_id: str) -> Repository:
        """The repository of this name, created if it does not exist."""
        return Repository(self.folder / repo_id)


class Refused(Exception):
    """An error response. The clients know some by their code, and show the message."""

    def __init__(self, status: int, message: str, code: str = ""):
        super().__init__(message)
        self.status, self.code = status, code


# The interface: method, pattern of the path and handler. Path parts are quoted, so slashes only separate them.
ROUTES: list[tuple[str, re.Pattern, str]] = []
REPO = r"(?P<repo>[^/]+/[^/]+)"


def route(method: str, pattern: str):
    def register(function):
        ROUTES.append((method, re.compile(pattern), function.__name__))
        return function

    return register


class Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    # Loading

    @route("GET", "/api/organizations/(?P<name>[^/]+)/overview")
    def organization(self, name: str) -> None:
        self.json({"name": name, "trustedKernelPublisher": name in self.hub.trusted})

    @route("GET", f"/api/kernels/{REPO}/refs")
    def refs(self, repo: str) -> None:
        branches = self.repository(repo).branches().items()
        infos = [{"name": name, "ref": f"refs/heads/{name}", "targetCommit": commit} for name, commit in branches]
        self.json({"branches": infos, "converts": [], "tags": []})

    @route("GET", f"/api/kernels/{REPO}(/revision/(?P<revision>[^/]+))?")
    def info(self, repo: str, revision: str | None) -> None:
        _, commit = self.at(repo, revision or "main")
        self.json({"id": repo, "author": repo.split("/")[0], "private": False, "gated": False, "sha": commit})

    @route("GET", f"/api/kernels/{REPO}/tree/(?P<revision>[^/]+)(/(?P<path>.+))?")
    def tree(self, repo: str, revision: str, path: str | None) -> None:
        repository, commit = self.at(repo, revision)
        recursive = self.query.get("recursive") in (["true"], ["True"])
        entries = repository.tree(commit, path or "", recursive=recursive)
        if path and not entries:
            raise Refused(404, f"{path} does not exist on {revision}", "EntryNotFound")
        self.json([describe(entry) for entry in entries])

    @route("GET|HEAD", f"/kernels/{REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)")
    def resolve(self, repo: str, revision: str, path: str) -> None:
        repository, commit = self.at(repo, revision)
        entry = repository.entry(commit, path)
        if entry is None or entry.type != "file":
            raise Refused(404, f"{path} does not exist on {revision}", "EntryNotFound")
        self.answer(HTTPStatus.OK, repository.read(entry), {"ETag": f'"{entry.etag}"', "X-Repo-Commit": commit})

    # Publishing

    @route("POST", "/api/repos/create")
    def create(self) -> None:
        raise Refused(403, "this token may not create repositories")

    @route("POST", "/oauth/token")
    def token(self) -> None:
        asked = self.body_json()
        if not self.hub.identity or asked["subject_token"] != self.hub.identity:
            raise Refused(401, "no publisher of any repository")
        if not self.hub.exists(asked["resource"].removeprefix("kernels/")):
            raise Refused(404, f"no {asked['resource']}", "RepoNotFound")
        self.json({"access_token": self.hub.token, "token_type": "bearer", "expires_in": 3600})

    @route("POST", "/api/validate-yaml")
    def validate_yaml(self) -> None:
        has_metadata = self.body_json()["content"].startswith("---\n")
        self.json({"errors": [], "warnings": [] if has_metadata else [{"message": "empty or missing metadata"}]})

    @route("POST", f"/api/kernels/{REPO}/branch/(?P<branch>[^/]+)")
    def branch(self, repo: str, branch: str) -> None:
        self.authorize()
        repository, commit = self.at(repo, "main")
        if branch in repository.branches():
            raise Refused(409, f"{branch} exists")
        repository.branch(branch, commit)
        self.json({})

    @route("POST", f"/api/kernels/{REPO}/preupload/(?P<revision>[^/]+)")
    def preupload(self, repo: str, revision: str) -> None:
        self.authorize()
        repository, commit = self.at(repo, revision)
        files = []
        for file in self.body_json()["files"]:
            entry = repository.entry(commit, file["path"])
            mode = "regular" if file["path"].endswith(TEXT) else "lfs"
            known = {"oid": entry.etag} if entry else {}
            files.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, **known})
        self.json({"files": files})

    @route("POST", f"/kernels/{REPO}.git/info/lfs/objects/batch")
    def lfs_batch(self, repo: str) -> None:
        self.authorize()
        repository = self.repository(repo)
        objects = []
        for file in self.body_json()["objects"]:
            upload = {"upload": {"href": f"{self.hub.url}/lfs/{repo}/{file['oid']}"}}
            present = (repository.lfs / file["oid"]).exists()
            objects.append({"oid": file["oid"], "size": file["size"], **({} if present else {"actions": upload})})
        self.json({"transfer": "basic", "objects": objects})

    @route("PUT", f"/lfs/{REPO}/(?P<oid>[0-9a-f]{{64}})")
    def lfs_upload(self, repo: str, oid: str) -> None:
        if not self.repository(repo).upload(oid, self.body):
            raise Refused(400, f"the content is not {oid}")
        self.json({})

    @route("POST", f"/api/kernels/{REPO}/commit/(?P<branch>[^/]+)")
    def commit(self, repo: str, branch: str) -> None:
        self.authorize()
        repository, _ = self.at(repo, branch)
        message, added, removed = "", {}, []
        for line in self.body.splitlines():
            item = json.loads(line)
            value = item["value"]
            match item["key"]:
                case "header":
                    message = value["summary"]
                case "file":
                    added[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    if not (repository.lfs / value["oid"]).exists():
                        raise Refused(400, f"{value['path']} was not uploaded")
                    added[value["path"]] = pointer(value["oid"], value["size"])
                case "deletedFile" | "deletedFolder":
                    removed.append(value["path"])
        with self.hub.lock:
            commit = repository.commit(branch, message, added, removed)
        self.json({"commitUrl": f"{self.hub.url}/kernels/{repo}/commit/{commit}", "commitOid": commit})

    # Common to all requests

    def serve(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        address = urlsplit(self.path)
        self.query = parse_qs(address.query)
        self.hub.requests.append(f"{self.command} {unquote(address.path)}")
        try:
            for method, pattern, name in ROUTES:
                if self.command in method.split("|") and (found := pattern.fullmatch(address.path)):
                    parts = {key: part and unquote(part) for key, part in found.groupdict().items()}
                    return getattr(self, name)(**parts)
            raise Refused(404, f"no {self.command} {address.path}")
        except Refused as refused:
            headers = {"X-Error-Code": refused.code, "X-Error-Message": str(refused)}
            self.answer(refused.status, json.dumps({"error": str(refused)}).encode(), headers)

    do_GET = do_HEAD = do_POST = do_PUT = serve

    def repository(self, repo: str) -> Repository:
        if not self.hub.exists(repo):
            raise Refused(404, f"no repository {repo}", "RepoNotFound")
        return self.hub.repository(repo)

    def at(self, repo: str, revision: str) -> tuple[Repository, str]:
        repository = self.repository(repo)
        if (commit := repository.resolve(revision)) is None:
            raise Refused(404, f"{repo} has no revision {revision}", "RevisionNotFound")
        return repository, commit

    def authorize(self) -> None:
        if self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            raise Refused(403, "no permission to write")

    def body_json(self) -> dict:
        return json.loads(self.body)

    def json(self, value, status: int = HTTPStatus.OK) -> None:
        self.answer(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def answer(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *arguments) -> None:
        """Logs nothing: Hub.requests is the log."""


def describe(entry: Entry) -> dict:
    facts = {"type": entry.type, "path": entry.path, "oid": entry.id, "size": entry.size}
    if entry.lfs:
        facts["lfs"] = {"oid": entry.lfs, "size": entry.size, "pointerSize": 0}
    return facts
