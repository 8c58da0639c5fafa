"""The fused GEMMs of a CUDA build, by the names of their kernels."""

import re
from collections.abc import Iterable
from pathlib import Path


def named(names: Iterable[str]) -> set[tuple[str, ...]]:
    """Kind and template arguments of the fused GEMMs among kernel names, mangled or demangled."""
    found = set()
    for name in names:
        mangled = re.search(r"(tiled|streamed)_gemm_kernelI.*?GemmI\d+(__nv_bfloat16|__half)((?:L[bi]\d+E)+)E", name)
        plain = re.search(r"(tiled|streamed)_gemm_kernel<.*?Gemm<(__nv_bfloat16|__half), ([^>]*)>", name)
        if mangled:
            found.add((mangled[1], mangled[2], *re.findall(r"\d+", mangled[3])))
        elif plain:
            numbers = plain[3].replace("true", "1").replace("false", "0").replace("(int)", "").replace("(bool)", "")
            found.add((plain[1], plain[2], *numbers.split(", ")))
    return found


def built(extension: Path) -> set[tuple[str, ...]]:
    """Those in a compiled extension."""
    symbols = re.findall(rb"_ZN9fused_mlp4sm90\d+\w+_gemm_kernel\w+", extension.read_bytes())
    found = named(symbol.decode() for symbol in symbols)
    assert found, f"no GEMM kernels in {extension}"
    return found
