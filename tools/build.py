#!/usr/bin/env python3
"""Builds the kernel for development and tests: the variants that this machine can run, and on request CUDA without a
GPU. The variants without compiled ops (noarch.py) are built everywhere.

kernel-builder builds the releases (flake.nix), in a sandbox and for every CUDA version that the Hub requires. This tool
reads the same build.toml and lays out the same build/<variant>/ with the compilers of this machine.
"""

import argparse
import fcntl
import os
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import noarch
import project
from builder import abi, plan, toolchain
from builder.toolchain import BuildError

try:
    from builder import layout
    from builder.compile import compile
except ModuleNotFoundError as error:
    sys.exit(f"error: {error.name!r} is not installed for {sys.executable} (requirements/build.txt)")

NO_NVCC = "no nvcc in CUDA_HOME, on the PATH or in /usr/local/cuda"
ALL = "all"


@dataclass(frozen=True)
class Built:
    variant: plan.Variant
    bytes: int | None  # the size of the extension, if there is one
    seconds: float
    checks: list[abi.Check]

    @property
    def failed(self) -> bool:
        return any(check.failed for check in self.checks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [*project.config()["general"]["backends"], *noarch.BACKENDS]
    parser.add_argument(
        "--backend",
        nargs="+",
        choices=[*known, ALL],
        help=f"what to build for (default: what this machine can run; {ALL}: CUDA too wherever there is an nvcc)",
    )
    parser.add_argument("--out", type=Path, default=project.BUILD, help="the folder of the variants (default: build)")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="compilers at a time")
    parser.add_argument("--cuda-archs", nargs="+", default=[], metavar="X.Y", help="only these, for a quick build")
    arguments = parser.parse_args()
    try:
        sys.exit("\n".join(run(arguments, known)) or None)
    except BuildError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("error: interrupted; what is compiled by now is kept for the next build")


def run(arguments: argparse.Namespace, known: list[str]) -> list[str]:
    """Builds the requested backends, prints a table of the builds and returns the errors."""
    out, builds, errors = arguments.out.resolve(), [], []
    nvcc = toolchain.nvcc()
    backends = wanted(arguments.backend, known, nvcc is not None)
    with locked(out / ".cache"):
        for backend in backends:
            try:
                builds.append(build(backend, nvcc, out, arguments.jobs, frozenset(arguments.cuda_archs)))
            except BuildError as error:
                errors.append(f"error: {error}")
    report(builds)
    return errors + [f"error: {built.variant.label} uses symbols it may not" for built in builds if built.failed]


def wanted(asked: list[str] | None, known: list[str], has_nvcc: bool) -> list[str]:
    """The backends to build for."""
    if "cuda" in (asked or []) and not has_nvcc:
        raise BuildError(f"{NO_NVCC}: cannot build for CUDA")
    if asked and ALL not in asked:
        return asked
    has_gpu = toolchain.has_gpu()
    if has_gpu and not has_nvcc:
        print(f"{NO_NVCC}: not building for the GPU (with a torch for CUDA, name the CPU variant to LOCAL_KERNELS)")
    elif has_nvcc and not has_gpu and not asked:
        print("no GPU here: not building for CUDA, which `make build BACKEND=cuda` does")
    with_cuda = has_nvcc and (has_gpu or ALL in (asked or []))
    return [backend for backend in known if backend != "cuda" or with_cuda]


def build(backend: str, nvcc: toolchain.Nvcc | None, out: Path, jobs: int, cuda_archs: frozenset[str]) -> Built:
    start = time.monotonic()
    if backend in noarch.BACKENDS:
        variant = plan.noarch(backend)
        layout.install(variant, None, out / variant.label)
        return Built(variant, None, time.monotonic() - start, [])
    nvcc = nvcc if backend == "cuda" else None
    variant = plan.variant(backend, nvcc, cuda_archs)
    extension = compile(variant, out / ".cache" / variant.label, nvcc, jobs)
    layout.install(variant, extension, out / variant.label)
    return Built(variant, extension.stat().st_size, time.monotonic() - start, abi.check(extension))


@contextmanager
def locked(cache: Path):
    """Makes a second concurrent build wait, because both would write the same files."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = os.open(cache / "lock", os.O_CREAT | os.O_WRONLY)
    except OSError as error:
        raise BuildError(f"cannot write to {cache}: {error.strerror}") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another build is writing to {cache.parent}: waiting for it", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def report(builds: list[Built]) -> None:
    """Prints a table of the builds, and below it the symbols that the checks found."""
    if not builds:
        return
    names = next(([check.name for check in built.checks] for built in builds if built.checks), [])
    rows = [["variant", "archs", "size", "time", *names]]
    for built in builds:
        numbers = ["-" if built.bytes is None else f"{built.bytes / 2**20:.1f} MiB", f"{built.seconds:.1f} s"]
        checks = [*map(str, built.checks)] or ["-"] * len(names)
        rows.append([built.variant.label, " ".join(built.variant.archs) or "-", *numbers, *checks])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for built in builds:
        for check in built.checks:
            if check.symbols is None:
                print(f"{built.variant.backend}: {check.name} not checked: kernel-abi-check is not installed")
            elif check.symbols:
                some = ", ".join(check.symbols[:6]) + (", ..." if len(check.symbols) > 6 else "")
                print(f"{built.variant.backend}: not in {check.name}: {some}")


if __name__ == "__main__":
    main()
