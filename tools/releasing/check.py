"""Runs all checks of a build and prints a table, with the findings of each below it."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from kernels import get_local_kernel
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import project

from . import rebuild
from .publish import dropped_variants
from .rules import api, layers, sources, variants


def run(build: Path, folder: Path, console: Console) -> str | None:
    """Prints the findings and returns the error, if any. `folder` is for the second build."""
    if not variants.variants(build):
        return f"error: no variants in {build}: run `make build`"
    found = dict(_checks(build, released=False))
    if not any(found.values()):  # takes as long as all builds did
        again = rebuild.build(rebuild.clone(folder / project.name()))
        found["a second build is the same"] = rebuild.faults(build, again)
    return _report(found, console)


def gate(build: Path, published: set[str], console: Console) -> str | None:
    """The same for variants built by Nix that will replace the published ones. Only Nix can repeat these builds."""
    if not variants.variants(build):
        return f"error: no variants in {build}"
    found = {"variants published before": dropped_variants(build, published)}
    if not any(found.values()):  # otherwise this machine's variant may be missing, so nothing could be loaded
        found |= _checks(build, released=True)
    return _report(found, console)


def _report(found: dict[str, list[str]], console: Console) -> str | None:
    table = Table("check", "result", box=SIMPLE_HEAD)
    for name, faults in found.items():
        table.add_row(name, f"[red]{len(faults)} found" if faults else "[green]ok")
    console.print(table)
    for name, faults in found.items():
        for fault in faults:
            console.print(f"{name}: {fault}", markup=False)
    return "error: not to be released" if any(found.values()) else None


def load(build: Path) -> ModuleType:
    sys.dont_write_bytecode = True  # all files in the build are published
    return get_local_kernel(build, backend="cpu")


def _checks(build: Path, released: bool) -> Iterator[tuple[str, list[str]]]:
    kernel = load(build)
    yield f"API as in {api.snapshot().name}", api.faults(kernel)
    yield "layers", layers.faults(kernel)
    for variant in variants.variants(build):
        yield variant.name, [*variants.faults(variant, released), *sources.faults(variant)]
