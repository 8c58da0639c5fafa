"""Compiles the CUDA code with a toolkit for which PyPI has no nvcc, to check that this version accepts it.

The device code goes through NVRTC, which has nvcc's front end, and through ptxas. NVRTC refuses host code, so it gets
the headers of the device code and the names of the kernels that an nvcc build instantiated. The C++ files go through
the C++ compiler with the toolkit's headers. Only the launches in the .cu files are not covered.
"""

import ctypes
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import project

from . import plan
from .toolchain import BuildError

# NVRTC has no standard library. CUDA's own has the headers that the kernels use; cuda.h includes the C ones.
STANDARD_HEADERS = {
    "cstdint": "#include <cuda/std/cstdint>\nusing namespace cuda::std;\n",
    "type_traits": "#include <cuda/std/type_traits>\nnamespace std { using namespace cuda::std; }\n",
    "limits": "#include <cuda/std/limits>\nnamespace std { using namespace cuda::std; }\n",
    "stdint.h": '#include "cstdint"\n',
    "stdlib.h": "",
}


@dataclass(frozen=True)
class Toolkit:
    """A CUDA 12 toolkit, with a folder in `root` for each of its packages."""

    version: str
    root: Path

    @property
    def includes(self) -> list[Path]:
        return [self.root / part / "include" for part in ("cuda_runtime", "cuda_nvcc", "cuda_cccl")]

    @property
    def ptxas(self) -> str:
        return str(self.root / "cuda_nvcc/bin/ptxas")

    def nvrtc(self) -> ctypes.CDLL:
        library = ctypes.CDLL(str(self.root / "cuda_nvrtc/lib/libnvrtc.so.12"))
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        return library

    def archs(self) -> frozenset[str]:
        """The capabilities it compiles for: "8.0", "9.0", ..."""
        library, count = self.nvrtc(), ctypes.c_int()
        _check(library, library.nvrtcGetNumSupportedArchs(ctypes.byref(count)))
        numbers = (ctypes.c_int * count.value)()
        _check(library, library.nvrtcGetSupportedArchs(numbers))
        return frozenset(f"{number // 10}.{number % 10}" for number in numbers)


@dataclass(frozen=True)
class Cubin:
    bytes: int
    spilled: int  # bytes of registers kept in local memory, over all its kernels
    serialized: int  # kernels whose wgmma instructions wait for each other


def kernels(compiled: Path) -> list[str]:
    """The kernels, as C++ names, that an object file of nvcc's launches."""
    symbols = subprocess.run(["nm", "--demangle", str(compiled)], capture_output=True, text=True, check=True).stdout
    names = set(re.findall(r"^\w+ [tTW] (?:void )?((?:\w+::)*\w+_kernel(?:<.*>)?)\(", symbols, re.MULTILINE))
    if not names:
        raise BuildError(f"no kernels in {compiled}")
    return sorted(names)


def compile(toolkit: Toolkit, section: plan.Section, names: list[str], arch: str, out: Path) -> Cubin:
    """The named kernels of a section for one capability, as the file `out`."""
    number = arch.removesuffix("+PTX").replace(".", "")
    headers = device_headers(section)
    includes = [*toolkit.includes, *{header.parent for header in headers}]
    options = [f"--gpu-architecture=compute_{number}", "--std=c++20", "--device-as-default-execution-space"]
    options += [f"--include-path={include}" for include in includes]
    text = "".join(f'#include "{header.name}"\n' for header in headers)
    out.parent.mkdir(parents=True, exist_ok=True)
    ptx = out.with_suffix(".ptx")
    ptx.write_bytes(_ptx(toolkit.nvrtc(), text, names, options))
    command = [toolkit.ptxas, "-v", f"-arch=sm_{number}", str(ptx), "-o", str(out)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise BuildError(f"ptxas {toolkit.version} for {arch}: {_first_error(result.stderr)}")
    return Cubin(out.stat().st_size, *losses(result.stderr))


def device_headers(section: plan.Section) -> list[Path]:
    """The headers that define kernels or their parts."""
    paths = [project.ROOT / source for source in section.sources if source.endswith(".cuh")]
    return [path for path in paths if re.search("__(global|device)__", path.read_text())]


def losses(messages: str) -> tuple[int, int]:
    """Parses ptxas's notes about kernels that are correct but slow: returns `spilled` and `serialized`."""
    spilled = sum(int(size) for size in re.findall(r"(\d+) bytes spill stores", messages))
    return spilled, len(re.findall(r"wgmma\.mma_async instructions are serialized", messages))


def _ptx(library: ctypes.CDLL, text: str, names: list[str], options: list[str]) -> bytes:
    program = ctypes.c_void_p()
    contents, places = _strings(STANDARD_HEADERS.values()), _strings(STANDARD_HEADERS)
    source = (text.encode(), b"kernels.cu", len(STANDARD_HEADERS), contents, places)
    _check(library, library.nvrtcCreateProgram(ctypes.byref(program), *source))
    try:
        for name in names:
            _check(library, library.nvrtcAddNameExpression(program, name.encode()))
        if library.nvrtcCompileProgram(program, len(options), _strings(options)) != 0:
            raise BuildError(f"NVRTC: {_first_error(_result(library, 'ProgramLog', program).decode())}")
        return _result(library, "PTX", program)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _result(library: ctypes.CDLL, what: str, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _check(library, getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(library, getattr(library, f"nvrtcGet{what}")(program, buffer))
    return buffer.value


def _strings(texts) -> ctypes.Array:
    encoded = [text.encode() for text in texts]
    return (ctypes.c_char_p * len(encoded))(*encoded)


def _check(library: ctypes.CDLL, status: int) -> None:
    if status != 0:
        raise BuildError(f"NVRTC: {library.nvrtcGetErrorString(status).decode()}")


def _first_error(log: str) -> str:
    lines = log.strip().splitlines() or ["no message"]
    return next((line for line in lines if "error" in line), lines[0])
