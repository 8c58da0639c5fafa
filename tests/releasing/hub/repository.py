"""A repository of the Hub: git for the history, and a folder of big files, to which git holds pointers (LFS)."""

import hashlib
import os
import re
import subprocess
import tempfile
import zlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

POINTER_BYTES = 200  # no pointer is longer
ABSENT = "0" * 40  # git's name for a missing object


def pointer(oid: str, size: int | str) -> bytes:
    """The pointer that git holds for a big file: its SHA-256 and its size."""
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize {size}\n".encode()


POINTER = re.compile(pointer("([0-9a-f]{64})", "([0-9]+)"))


@dataclass(frozen=True)
class Entry:
    type: str  # "file" or "directory"
    path: str
    id: str  # git's
    size: int
    lfs: str | None = None  # a big file's SHA-256

    @property
    def etag(self) -> str:
        return self.lfs or self.id


class Repository:
    """A repository that nobody else writes to while it is open. Commits never change, so git is read once for each: a
    client requests a hundred files one by one, and a process for each would take most of the tests' time.
    """

    def __init__(self, folder: Path):
        self.git_dir = folder / "git"
        self.lfs = folder / "lfs"
        self.lfs.mkdir(parents=True, exist_ok=True)
        self._branches: dict[str, str] = {}
        if self.git_dir.exists():
            lines = self._git("for-each-ref", "--format=%(refname:strip=2) %(objectname)", "refs/heads").decode()
            self._branches.update(line.split() for line in lines.splitlines())
        else:
            self._git("init", "--quiet", "--bare")
            self.commit("main", "Initial commit", added={}, removed=[])

    def branches(self) -> dict[str, str]:
        return dict(self._branches)

    def resolve(self, revision: str) -> str | None:
        """The commit of a branch, a full reference or a commit."""
        branch = self.branches().get(revision.removeprefix("refs/heads/"))
        if branch is None and re.fullmatch("[0-9a-f]{40}", revision) and self._type(revision) == "commit":
            return revision
        return branch

    def tree(self, commit: str, path: str = "", *, recursive: bool = False) -> list[Entry]:
        folder = f"{path}/" if path else ""
        inside = [entry for entry in self._entries(commit).values() if entry.path.startswith(folder)]
        return [entry for entry in inside if recursive or "/" not in entry.path.removeprefix(folder)]

    def entry(self, commit: str, path: str) -> Entry | None:
        return self._entries(commit).get(path)

    def read(self, entry: Entry) -> bytes:
        return (self.lfs / entry.lfs).read_bytes() if entry.lfs else self._blob(entry.id)

    def upload(self, oid: str, content: bytes) -> bool:
        """Stores a big file; returns False if its SHA-256 is not the announced one."""
        if hashlib.sha256(content).hexdigest() != oid:
            return False
        (self.lfs / oid).write_bytes(content)
        return True

    def branch(self, name: str, commit: str) -> None:
        self._git("update-ref", f"refs/heads/{name}", commit, ABSENT)
        self._branches[name] = commit

    def commit(self, branch: str, message: str, added: dict[str, bytes], removed: list[str]) -> str:
        """Adds files, removes files and folders, and returns the new head of the branch."""
        parent = self._branches.get(branch)
        lines = []
        for path in removed:
            gone = [name for name in self._entries(parent) if name == path or name.startswith(f"{path}/")]
            lines += [f"0 {ABSENT}\t{name}" for name in gone]
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
        self._branches[branch] = commit
        return commit

    def _store(self, content: bytes) -> str:
        """Writes an object as git itself does."""
        whole = b"blob %d\0" % len(content) + content
        id = hashlib.sha1(whole).hexdigest()
        place = self.git_dir / "objects" / id[:2] / id[2:]
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(zlib.compress(whole))
        return id

    @cache  # noqa: B019 - small, and lives as long as a test
    def _type(self, id: str) -> str | None:
        command = ["git", f"--git-dir={self.git_dir}", "cat-file", "-t", id]
        result = subprocess.run(command, capture_output=True, text=True)
        return result.stdout.strip() if result.returncode == 0 else None

    @cache  # noqa: B019
    def _entries(self, commit: str) -> dict[str, Entry]:
        """All files and folders, by their paths."""
        lines = self._git("ls-tree", "-r", "-t", "-z", "--long", commit).decode().split("\0")
        return {entry.path: entry for entry in (self._entry(line) for line in lines if line)}

    @cache  # noqa: B019
    def _blob(self, id: str) -> bytes:
        return self._git("cat-file", "blob", id)

    def _entry(self, line: str) -> Entry:
        facts, path = line.split("\t", 1)
        _, type, id, size = facts.split()
        if type == "tree":
            return Entry("directory", path, id, 0)
        if int(size) < POINTER_BYTES and (big := self._pointer(id)):
            return Entry("file", path, id, size=int(big[2]), lfs=big[1].decode())
        return Entry("file", path, id, int(size))

    def _pointer(self, id: str) -> re.Match | None:
        return POINTER.fullmatch(self._blob(id))

    def _git(self, *arguments: str, stdin: bytes = b"", **environment: str) -> bytes:
        who = ["-c", "user.name=hub", "-c", "user.email=hub@localhost"]
        command = ["git", f"--git-dir={self.git_dir}", *who, *arguments]
        return subprocess.run(
            command, input=stdin, env={**os.environ, **environment}, stdout=subprocess.PIPE, check=True
        ).stdout
