"""Repeats a build from the commit in another folder; both must be identical, byte for byte."""

import subprocess
import sys
from pathlib import Path

import project

from .rules.variants import files, variants


def clone(folder: Path) -> Path:
    """Clones the commit checked out here, without uncommitted changes."""
    subprocess.run(["git", "clone", "--quiet", str(project.ROOT), str(folder)], check=True)
    return folder


def build(checkout: Path) -> Path:
    """Builds all variants that can be built here, with the compilers' own progress on the terminal."""
    subprocess.run([sys.executable, "tools/build.py", "--backend", "all"], cwd=checkout, check=True)
    return checkout / "build"


def faults(first: Path, second: Path) -> list[str]:
    """The files in which two builds differ."""
    contents = [
        {f"{variant.name}/{place}": path.read_bytes() for variant in variants(build) for place, path in files(variant)}
        for build in (first, second)
    ]
    one, other = contents
    differing = sorted(place for place in one.keys() | other.keys() if one.get(place) != other.get(place))
    return [f"{place} differs between two builds of one commit" for place in differing]
