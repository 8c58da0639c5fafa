#!/usr/bin/env python3
"""Builds every variant that can be built without a GPU, a CUDA torch or an installed CUDA toolkit, into build/matrix/.

The CUDA versions are those of requirements/toolkits/, from PyPI. CUDA 13 includes nvcc there, so its variant is built
completely. CUDA 12 has no nvcc there; builder/device.py describes which of the code is compiled. Cross-compilers also
build the CPU variant for aarch64 and for macOS.
"""

import argparse
import os
import shutil
import sys
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

import build
import project
from builder import compile, device, plan, toolchain, toolkits
from builder.toolchain import BuildError, Nvcc

OUT = project.BUILD / "matrix"
AARCH64_COMPILER = "aarch64-linux-gnu-g++"


@dataclass(frozen=True)
class Row:
    name: str
    archs: list[str]
    size: int | None
    seconds: float
    findings: list[str]
    failed: bool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = toolkits.versions()
    parser.add_argument("--cuda", nargs="+", choices=known, default=known, help="the versions (default: all)")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="compilers at a time")
    arguments = parser.parse_args()
    console = Console(width=100)
    # The newest first: its object files provide the names of the kernels.
    steps = {"CPU": cpu, "aarch64": aarch64, "macOS": macos}
    for version in sorted(arguments.cuda, key=known.index, reverse=True):
        steps[f"CUDA {version}"] = partial(cuda, version)
    rows = []
    with build.locked(OUT / ".cache"):
        for number, (name, step) in enumerate(steps.items(), 1):
            console.rule(f"{number} of {len(steps)}: {name}", align="left")
            start = time.monotonic()
            try:
                rows.append(step(arguments.jobs))
            except BuildError as error:
                rows.append(Row(name, [], None, time.monotonic() - start, [str(error)], True))
    console.print(table(rows))
    sys.exit(any(row.failed for row in rows))


def cpu(jobs: int) -> Row:
    return _row(build.build("cpu", None, OUT, jobs, frozenset()))


def aarch64(jobs: int) -> Row:
    cxx = shutil.which(AARCH64_COMPILER)
    if cxx is None:
        raise BuildError(f"no {AARCH64_COMPILER} on the PATH (Debian, Ubuntu: install g++-aarch64-linux-gnu)")
    return _cross_compiled("aarch64", [cxx], set(), jobs)


def macos(jobs: int) -> Row:
    cxx = toolkits.macos_compiler(project.BUILD / "toolkits/macos")
    return _cross_compiled("macOS", cxx, compile.NOT_OF_CLANG, jobs)


def _cross_compiled(machine: str, cxx: list[str], without: set[str], jobs: int) -> Row:
    """Compiles the CPU variant's sources for another machine, without a torch to link with."""
    start = time.monotonic()
    variant, cache = plan.variant("cpu"), OUT / ".cache" / machine
    with ThreadPoolExecutor(jobs) as pool:
        tasks = {
            source: pool.submit(
                compile.cross_compile, variant, section, source, cxx, without, cache / section.name / f"{source}.o"
            )
            for section in variant.sections
            for source in section.sources
            if Path(source).suffix in compile.CXX_SUFFIXES
        }
    errors = [f"{source}: {task.exception()}" for source, task in tasks.items() if task.exception()]
    size = None if errors else sum(task.result() for task in tasks.values())
    findings = errors or ["compiled, not linked"]
    return Row(f"cpu, {machine}", [], size, time.monotonic() - start, findings, bool(errors))


def cuda(version: str, jobs: int) -> Row:
    root = toolkits.install(version, project.BUILD / "toolkits" / version)
    nvcc = toolchain.nvcc(root / "cu13")
    if nvcc is not None:
        return _row(build.build("cuda", nvcc, OUT, jobs, frozenset()))
    return _check(device.Toolkit(version, root), jobs)


def _row(built: build.Built) -> Row:
    findings = [f"{check.name}: {check}" for check in built.checks]
    return Row(_compute(built.variant), built.variant.archs, built.bytes, built.seconds, findings, built.failed)


def _compute(variant: plan.Variant) -> str:
    """The part of the label that tells the variants apart: cpu, cu130, ..."""
    return variant.label.split("-")[3]


def _check(toolkit: device.Toolkit, jobs: int) -> Row:
    start = time.monotonic()
    variant = plan.variant("cuda", Nvcc(toolkit.ptxas, toolkit.version, toolkit.archs()))
    cache = OUT / ".cache" / variant.label
    with ProcessPoolExecutor(jobs) as pool:
        tasks = {}
        for section in variant.sections:
            for source in section.sources:
                if source.endswith(".cu"):
                    names = device.kernels(_compiled(section, source))
                    for arch in section.archs:
                        cubin = cache / f"{Path(source).stem}-{arch}.cubin"
                        tasks[pool.submit(device.compile, toolkit, section, names, arch, cubin)] = f"{source} {arch}"
                elif Path(source).suffix in compile.CXX_SUFFIXES:
                    tasks[pool.submit(compile.check_syntax, variant, section, source, toolkit.includes)] = source
        errors, cubins = [], []
        for task in tqdm(as_completed(tasks), total=len(tasks), unit="file", leave=False):
            try:
                cubins.append(task.result())
            except BuildError as error:
                errors.append(f"{tasks[task]}: {error}")
    spilled = sum(cubin.spilled for cubin in cubins if cubin)
    serialized = sum(cubin.serialized for cubin in cubins if cubin)
    findings = ["compiled, not linked", f"{spilled} bytes of registers spilled", f"{serialized} serialized kernels"]
    size = sum(cubin.bytes for cubin in cubins if cubin)
    failed = bool(errors) or serialized > 0
    return Row(_compute(variant), variant.archs, size, time.monotonic() - start, errors or findings, failed)


def _compiled(section: plan.Section, source: str) -> Path:
    """The newest object file that any nvcc made from a source: the set of kernels does not depend on its version."""
    found = (OUT / ".cache").glob(f"*/{section.name}/{source}.o")
    newest = max(found, key=lambda path: path.stat().st_mtime, default=None)
    if newest is None:
        raise BuildError("the names of the kernels come from a build by nvcc: name a CUDA 13 too")
    return newest


def table(rows: list[Row]) -> Table:
    result = Table(box=SIMPLE_HEAD, title="torch-stable-abi<version of torch>-<variant>-<machine>")
    result.add_column("variant")
    result.add_column("archs")
    result.add_column("size", justify="right")
    result.add_column("time", justify="right")
    result.add_column("findings")
    for row in rows:
        size = "-" if row.size is None else f"{row.size / 2**20:.1f} MiB"
        style = "red" if row.failed else None
        result.add_row(
            row.name, " ".join(row.archs), size, f"{row.seconds:.0f} s", "\n".join(row.findings), style=style
        )
    return result


if __name__ == "__main__":
    main()
