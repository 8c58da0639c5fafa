"""The fused GEMMs of a CUDA build, by the names of their kernels."""

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

import project
from tuning.kernels import SCHEDULES

ENUMS = {"Product": ("Plain", "Gated"), "Schedule": SCHEDULES}  # as in cuda/gemm/problem.h


def named(names: Iterable[str]) -> set[tuple[str, ...]]:
    """Main loop and template arguments of the fused GEMMs among kernel names, as a demangler writes them."""
    found = set()
    for name in names:
        if kernel := re.search(r"(tiled|streamed)_gemm_kernel<.*?Gemm<(__nv_bfloat16|__half), ([^>]*)>", name):
            found.add((kernel[1], kernel[2], *map(_argument, kernel[3].split(", "))))
    return found


def _argument(text: str) -> str:
    cast, number = re.fullmatch(r"(?:\((?:fused_mlp::)?(\w+)\))?(\d+)", text).groups()
    return ENUMS[cast][int(number)] if cast in ENUMS else number


def built(extension: Path) -> set[tuple[str, ...]]:
    """Those in a compiled extension."""
    symbols = b"\n".join(set(re.findall(rb"_ZN9fused_mlp4sm90\d+\w+_gemm_kernel\w+", extension.read_bytes())))
    demangled = subprocess.run(["c++filt"], input=symbols, capture_output=True, check=True).stdout.decode()
    found = named(demangled.splitlines())
    assert found, f"no GEMM kernels in {extension}"
    return found


def listed() -> set[tuple[str, ...]]:
    """Those of the list that the extension is compiled from."""
    text = (project.ROOT / "cuda/sm90/kernels.def").read_text()
    entries = re.findall(r"^FUSED_MLP_(TILED|STREAMED)\((.*)\)$", text, re.MULTILINE)
    dtypes = ("__nv_bfloat16", "__half")
    return {(loop.lower(), dtype, *arguments.split(", ")) for loop, arguments in entries for dtype in dtypes}
