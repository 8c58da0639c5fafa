"""A repository of the Hub: git for the history, and beside it the big files, to which git holds pointers (LFS)."""

import hashlib
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

POINTER_BYTES = 200  # no pointer is longer
ABSENT = "0" * 40  # git's word for an object that is not there


def pointer(oid: str, size: int | str) -> bytes:
    """What git holds of a big file: its SHA-256 and its size."""
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize {size}\n".encode()


POINTER = re.compile(pointer("([0-9a-f]{64})", "([0-9]+)"))


@dataclass(frozen=True)
class Entry:
    type: str  # "file" or "directory"
    path: str
    id: str  # git's
    size: int
    lfs: str | None = None  # the SHA-256 of a big file

    @property
    def etag(self) -> str:
        return self.lfs or self.id


class Repository:
    def __init__(self, folder: Path):
        self.git_dir = folder / "git"
        self.lfs = folder / "lfs"
        self.lfs.mkdir(parents=True, exist_ok=True)
        if not self.git_dir.exists():
            self._git("init", "--quiet", "--bare")
            self.commit("main", "Initial commit", added={}, removed=[])

    def branches(self) -> dict[str, str]:
        lines = self._git("for-each-ref", "--format=%(refname:strip=2) %(objectname)", "refs/heads").decode()
        return dict(line.split() for line in lines.splitlines())

    def resolve(self, revision: str) -> str | None:
        """The commit of a branch, a full reference or a commit."""
        branch = self.branches().get(revision.removeprefix("refs/heads/"))
        if branch is None and re.fullmatch("[0-9a-f]{40}", revision) and self._type(revision) == "commit":
            return revision
        return branch

    def tree(self, commit: str, path: str = "", *, recursive: bool = False) -> list[Entry]:
        options = ["-r", "-t"] if recursive else []
        output = self._git("ls-tree", "-z", "--long", *options, commit, *([f"{path}/"] if path else []))
        return [self._entry(line) for line in output.decode().split("\0") if line]

    def entry(self, commit: str, path: str) -> Entry | None:
        line = self._git("ls-tree", "-z", "--long", commit, path).decode().rstrip("\0")
        return self._entry(line) if line else None

    def read(self, entry: Entry) -> bytes:
        return (self.lfs / entry.lfs).read_bytes() if entry.lfs else self._git("cat-file", "blob", entry.id)

    def upload(self, oid: str, content: bytes) -> bool:
        """Keeps a big file; False if its SHA-256 is not the one it was announced with."""
        if hashlib.sha256(content).hexdigest() != oid:
            return False
        (self.lfs / oid).write_bytes(content)
        return True

    def branch(self, name: str, commit: str) -> None:
        self._git("update-ref", f"refs/heads/{name}", commit, ABSENT)

    def commit(self, branch: str, message: str, added: dict[str, bytes], removed: list[str]) -> str:
        """Adds files, removes files and folders, and returns the new head of the branch."""
        parent = self.branches().get(branch)
        lines = []
        for path in removed:
            gone = self._git("ls-tree", "-r", "-z", "--name-only", parent, path).decode().split("\0")
            lines += [f"0 {ABSENT}\t{name}" for name in gone if name]
        for path, content in added.items():
            lines.append(f"100644 {self._store(content)}\t{path}")
        with tempfile.TemporaryDirectory() as folder:
            index = {"GIT_INDEX_FILE": f"{folder}/index"}
            self._git("read-tree", parent or "--empty", **index)
            self._git("update-index", "-z", "--index-info", stdin="\0".join(lines).encode(), **index)
            tree = self._git("write-tree", **index).decode().strip()
        ancestry = ["-p", parent] if parent else []
        commit = self._git("commit-tree", tree, *ancestry, "-m", message).decode().strip()
        self._git("update-ref", f"refs/heads/{branch}", commit, parent or ABSENT)
        return commit

    def _store(self, content: bytes) -> str:
        return self._git("hash-object", "-w", "--stdin", stdin=content).decode().strip()

    def _type(self, id: str) -> str | None:
        command = ["git", f"--git-dir={self.git_dir}", "cat-file", "-t", id]
        result = subprocess.run(command, capture_output=True, text=True)
        return result.stdout.strip() if result.returncode == 0 else None

    def _entry(self, line: str) -> Entry:
        facts, path = line.split("\t", 1)
        _, type, id, size = facts.split()
        if type == "tree":
            return Entry("directory", path, id, 0)
        if int(size) < POINTER_BYTES and (big := self._pointer(id)):
            return Entry("file", path, id, size=int(big[2]), lfs=big[1].decode())
        return Entry("file", path, id, int(size))

    @cache  # noqa: B019 - as many as there are small files, for as long as a test lasts
    def _pointer(self, id: str) -> re.Match | None:
        return POINTER.fullmatch(self._git("cat-file", "blob", id))

    def _git(self, *arguments: str, stdin: bytes = b"", **environment: str) -> bytes:
        who = ["-c", "user.name=hub", "-c", "user.email=hub@localhost"]
        command = ["git", f"--git-dir={self.git_dir}", *who, *arguments]
        return subprocess.run(
            command, input=stdin, env={**os.environ, **environment}, stdout=subprocess.PIPE, check=True
        ).stdout
