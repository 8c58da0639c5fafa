"""The fused GEMMs of a CUDA build, by the names of their kernels, and functions that force them."""

import contextlib
import ctypes
import functools
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

import project
from tuning.kernels import SCHEDULES

TRAINING = ("PlainKept", "GatedKept", "PlainGradient", "GatedGradient", "Pair")
ENUMS = {"Product": ("Plain", "Gated", *TRAINING), "Schedule": SCHEDULES}  # as in cuda/gemm/problem.h
DTYPES = ("__nv_bfloat16", "__half")
ARCHITECTURES = ("sm90", "sm80")  # the folders of cuda/
CAPABILITIES = {"sm90": {(9, 0)}, "sm80": {(8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (12, 0), (12, 1)}}


def named(names: Iterable[str], architecture: str = "sm90") -> set[tuple[str, ...]]:
    """Main loop and template arguments of an architecture's GEMMs among demangled kernel names."""
    found = set()
    pattern = rf"{architecture}::(tiled|streamed)_gemm_kernel<.*?Gemm<(__nv_bfloat16|__half), ([^>]*)>"
    for name in names:
        if kernel := re.search(pattern, name):
            found.add((kernel[1], kernel[2], *map(_argument, kernel[3].split(", "))))
    return found


def _argument(text: str) -> str:
    cast, number = re.fullmatch(r"(?:\((?:fused_mlp::)?(\w+)\))?(\d+)", text).groups()
    return ENUMS[cast][int(number)] if cast in ENUMS else number


def built(extension: Path, architecture: str = "sm90") -> set[tuple[str, ...]]:
    """The GEMMs in a compiled extension."""
    pattern = rf"_ZN9fused_mlp4{architecture}\d+\w+_gemm_kernel\w+"
    symbols = b"\n".join(set(re.findall(pattern.encode(), extension.read_bytes())))
    demangled = subprocess.run(["c++filt"], input=symbols, capture_output=True, check=True).stdout.decode()
    found = named(demangled.splitlines(), architecture)
    assert found, f"no GEMM kernels of {architecture} in {extension}"
    return found


def entries(architecture: str = "sm90") -> list[tuple[str, ...]]:
    """Main loop and arguments of each line of the list that the extension is compiled from, in its order."""
    text = (project.ROOT / f"cuda/{architecture}/plan/kernels.def").read_text()
    found = re.findall(r"^FUSED_MLP_(TILED|STREAMED|TRAINING)\((.*)\)$", text, re.MULTILINE)
    return [(loop.lower().replace("training", "tiled"), *arguments.split(", ")) for loop, arguments in found]


def listed(architecture: str = "sm90") -> set[tuple[str, ...]]:
    """The GEMMs of the list, for each dtype."""
    return {(loop, dtype, *arguments) for loop, *arguments in entries(architecture) for dtype in DTYPES}


def runs_on(architecture: str, capability: tuple[int, int]) -> bool:
    return capability in CAPABILITIES[architecture]


@functools.cache
def library(fused_mlp) -> ctypes.CDLL:
    """The extension of a loaded CUDA build."""
    (path,) = Path(fused_mlp.__file__).parent.glob("*.so")
    return ctypes.CDLL(str(path))


_forced: list[tuple[bytes | None, int]] = [(None, -1)]


def any_forced() -> bool:
    return len(_forced) > 1


@contextlib.contextmanager
def forced(fused_mlp, architecture: str, kernel: int = -1) -> Iterator[None]:
    """Forces an architecture's GEMMs, or one of them, for all that they can compute: cuda/gemm/choice/choice.cpp."""
    force = library(fused_mlp).fused_mlp_force_gemms
    count = force(architecture.encode(), kernel)
    assert count == len(entries(architecture)), f"{architecture} has {count} kernels, or no kernel {kernel}"
    with _while_forced(force, (architecture.encode(), kernel)):
        yield


@contextlib.contextmanager
def chosen(fused_mlp) -> Iterator[None]:
    """Suspends forcing."""
    force = library(fused_mlp).fused_mlp_force_gemms
    force(None, -1)
    with _while_forced(force, (None, -1)):
        yield


@contextlib.contextmanager
def _while_forced(force, arguments: tuple[bytes | None, int]) -> Iterator[None]:
    _forced.append(arguments)
    try:
        yield
    finally:
        _forced.pop()
        force(*_forced[-1])
