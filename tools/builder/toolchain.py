"""Finds the tools of a build. A missing one raises BuildError, with one line that names it and what to do."""

import ctypes
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path


class BuildError(Exception):
    pass


def cxx() -> str:
    name = os.environ.get("CXX", "g++")
    path = shutil.which(name)
    if path is None:
        raise BuildError(f"no C++ compiler: {name!r} is not on the PATH; install g++ or name a compiler with CXX=")
    return path


def python_include() -> Path:
    include = Path(sysconfig.get_path("include"))
    if not (include / "Python.h").is_file():
        raise BuildError(f"no Python.h in {include}: install Python's headers (Debian, Ubuntu: python3-dev)")
    return include


def torch(stable_abi: str) -> Path:
    """The folder of the installed torch, found without an import, which takes seconds. It must have the stable ABI."""
    spec = importlib.util.find_spec("torch")
    if spec is None:
        raise BuildError(f"torch is not installed for {sys.executable} (requirements/build.txt)")
    installed = importlib.metadata.version("torch")
    if [int(part) for part in installed.split(".")[:2]] < [int(part) for part in stable_abi.split(".")]:
        raise BuildError(f"torch {installed} is too old: the stable ABI of {stable_abi} needs that version or later")
    root = Path(spec.origin).parent
    if not (root / "include/torch/csrc/stable/library.h").is_file():
        raise BuildError(f"torch {installed} in {root} has no C++ headers (include/torch/csrc/stable/library.h)")
    return root


@dataclass(frozen=True)
class Nvcc:
    path: str
    version: str  # "13.0"
    archs: frozenset[str]  # the capabilities it compiles for: "8.0", "9.0", ...


def nvcc(toolkit: Path | None = None) -> Nvcc | None:
    """The CUDA compiler of a toolkit, otherwise of CUDA_HOME, the PATH or /usr/local/cuda, in this order, or None."""
    home = [f"{os.environ['CUDA_HOME']}/bin"] if "CUDA_HOME" in os.environ else []
    folders = [f"{toolkit}/bin"] if toolkit else [*home, os.environ.get("PATH", ""), "/usr/local/cuda/bin"]
    path = shutil.which("nvcc", path=os.pathsep.join(folders))
    if path is None:
        return None
    release = re.search(r"release (\d+\.\d+)", _output([path, "--version"]))
    if release is None:
        raise BuildError(f"'{path} --version' names no release")
    archs = re.findall(r"compute_(\d+)(\d)$", _output([path, "--list-gpu-arch"]), re.MULTILINE)
    return Nvcc(path, release[1], frozenset(f"{major}.{minor}" for major, minor in archs))


def has_gpu() -> bool:
    """True if the CUDA driver finds a GPU. Asking torch instead would take an import of seconds."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int()
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


def _output(command: list[str]) -> str:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        reason = (result.stderr or result.stdout).strip().splitlines() or [f"exit status {result.returncode}"]
        raise BuildError(f"'{' '.join(command)}' failed: {reason[-1]}")
    return result.stdout
