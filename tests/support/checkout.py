"""Clean checkouts of this tree in other folders, built for the CPU: releases to publish and to compare."""

import shutil
import subprocess
import sys
from pathlib import Path

import project
from builder import plan, toolchain


def make(folder: Path) -> Path:
    """Copies the tree, including uncommitted changes, as the only commit of a new repository."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=project.ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in listed:
        if name and (project.ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(project.ROOT / name, folder / name)
    git(folder, "init", "--quiet")
    commit(folder)
    return folder


def commit(folder: Path) -> None:
    git(folder, "add", "--all")
    git(folder, "-c", "user.name=tests", "-c", "user.email=tests@localhost", "commit", "--quiet", "-m", "A commit")


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", *arguments], cwd=folder, check=True)


def run(folder: Path, *command: str, **environment) -> subprocess.CompletedProcess:
    """Runs a script of the checkout."""
    return subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=600, **environment
    )


def publisher(address: str, identity: str) -> dict[str, str]:
    """The environment of a process that may publish to a Hub on loopback, if the Hub knows the identity."""
    options = {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "GITHUB_ACTIONS": "false"}
    return {"HF_ENDPOINT": address, "HF_OIDC_ID_TOKEN": identity, **options}


def build(folder: Path, backend: str = "cpu") -> Path:
    """Compiles only the differences from this tree, whose objects are copied."""
    cache = Path("build/.cache", plan.variant(backend, toolchain.nvcc() if backend == "cuda" else None).label)
    if (project.ROOT / cache).is_dir() and not (folder / cache).exists():
        shutil.copytree(project.ROOT / cache, folder / cache)
    done = run(folder, "tools/build.py", "--backend", backend)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "build"


def set_version(folder: Path, version: int) -> None:
    config = folder / "build.toml"
    old = f"version = {project.version()}\n"
    assert config.read_text().count(old) == 1
    config.write_text(config.read_text().replace(old, f"version = {version}\n"))
    commit(folder)
