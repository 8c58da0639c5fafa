"""Rehearses a release in a clone of the checked-out commit, on a local stand-in for the Hub."""

import os
import secrets
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

from kernels._rust import Metadata
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table

import project
from builder import abi

from . import publish, rebuild
from .rules import variants

SMOKE = Path(__file__).with_name("smoke.py")


def run(folder: Path, console: Console) -> str | None:
    """Runs the steps one by one and returns the error of the first that fails."""
    console.rule("1 of 7: clone", align="left")
    if subprocess.run(["git", "diff", "--quiet", "HEAD"], cwd=project.ROOT).returncode != 0:
        console.print("[yellow]what is not committed is not in the release")
    clone = rebuild.clone(folder / project.name())
    with _hub(clone, folder / "hub") as (address, identity):
        writer = address | {"HF_OIDC_ID_TOKEN": identity, "HF_HUB_DISABLE_XET": "1"}
        release = ["tools/release.py"]
        steps = {
            "build": (["tools/build.py", "--backend", "all"], {}),
            "check": ([*release, "check"], {}),
            "stage": ([*release, "stage"], writer),
            "test what was staged": ([*release, "try", publish.STAGING], address),
            "promote": ([*release, "promote", publish.STAGING], writer),
            "load, fuse a model, compare": (["-I", str(SMOKE), project.repo_id(), str(project.version())], address),
        }
        for number, (name, (command, environment)) in enumerate(steps.items(), 2):
            console.rule(f"{number} of 7: {name}", align="left")
            if subprocess.run([sys.executable, *command], cwd=clone, env=_environment(**environment)).returncode != 0:
                return f"error: the rehearsal failed at step {number}: {name}"
    console.print(_table(clone / "build"))
    console.print(f"[green]rehearsed: {project.repo_id()} version {project.version()} can be released")


def smoke() -> int:
    """Runs a user's first steps, with the Hub that the environment names and a cache that may be warm."""
    command = [sys.executable, "-I", str(SMOKE), project.repo_id(), str(project.version())]
    kept = {name: os.environ[name] for name in ("HF_ENDPOINT", "HF_HOME") if name in os.environ}
    return subprocess.run(command, env=_environment(**kept)).returncode


@contextmanager
def _hub(clone: Path, folder: Path):
    """A Hub in its own process: yields its environment, with an empty cache, and the identity that may publish."""
    identity = secrets.token_hex()
    command = [sys.executable, clone / "tests/releasing/hub", folder / "repositories", "--identity", identity]
    command += ["--repository", project.repo_id(), "--trusted", project.repo_id().split("/")[0]]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}  # it ends when its input does
    with subprocess.Popen(command, text=True, **pipes) as process:
        address = process.stdout.readline().strip()
        yield {"HF_ENDPOINT": address, "HF_HOME": str(folder / "home")}, identity


def _environment(**more: str) -> dict[str, str]:
    """This process's environment, without variables that would point a step to another kernel, Hub or cache."""
    misleading = ("HF_", "KERNELS_CACHE", "LOCAL_KERNELS")
    return {name: value for name, value in os.environ.items() if not name.startswith(misleading)} | more


def _table(build: Path) -> Table:
    """A table of the published variants, and the result of their checks."""
    whole = [Column(name, no_wrap=True) for name in ("variant", "size", "digests", "symbols")]
    table = Table(whole[0], "archs", *whole[1:], box=SIMPLE_HEAD, pad_edge=False)
    for folder in variants.variants(build):
        metadata = Metadata.read_from_file(folder / "metadata.json")
        extensions = [*folder.glob("*.so")]
        archs = " ".join(metadata.backend.archs or ["-"])
        size = "\n".join(f"{extension.stat().st_size / 2**20:.1f} MiB" for extension in extensions) or "-"
        symbols = "\n".join(f"{check.name}: {check}" for path in extensions for check in abi.check(path)) or "-"
        table.add_row(folder.name, archs, size, f"{len(metadata.digest.files)} ok", symbols)
    return table
