"""The package's choice of a kernel and its time model: its own C++ code, called through ctypes."""

import ctypes
import subprocess
from pathlib import Path

import numpy as np

import project
from builder import toolchain
from tuning.kernels import Kernel

SOURCES = ("cuda/sm90/plan/plan.cpp", "cuda/sm90/plan/time_model.cpp", "tools/tuning/model.cpp")
LINEAR, GELU_TANH = 0, 2  # codes of torch-ext/operands/activation.h

SHAPE = np.dtype([(name, np.int64) for name in ("m", "n", "k", "gated", "activation", "multiprocessors")])
KERNEL = np.dtype([(name, np.int32) for name in Kernel._fields])


class Model:
    def __init__(self, library: Path, multiprocessors: int):
        self._library = ctypes.CDLL(str(library))
        self._multiprocessors = multiprocessors

    def shape(self, kind: str, m: int, n: int, k: int) -> np.ndarray:
        activation = LINEAR if kind == "plain" else GELU_TANH
        return np.array((m, n, k, kind == "gated", activation, self._multiprocessors), SHAPE)

    def candidates(self, kind: str, m: int, n: int, k: int) -> list[Kernel]:
        """Every kernel that can compute the product."""
        shape = self.shape(kind, m, n, k)
        kernels = np.zeros(self._library.tune_candidates(_pointer(shape), None), KERNEL)
        self._library.tune_candidates(_pointer(shape), _pointer(kernels))
        return [Kernel(*kernel) for kernel in kernels.tolist()]

    def choice(self, kind: str, m: int, n: int, k: int) -> Kernel:
        """The kernel that the constants of tuning.h choose."""
        kernel = np.zeros((), KERNEL)
        self._library.tune_choose(_pointer(self.shape(kind, m, n, k)), _pointer(kernel))
        return Kernel(*kernel.tolist())

    def estimates(
        self, shapes: np.ndarray, kernels: np.ndarray, constants: np.ndarray, bytes_per_microsecond: float
    ) -> np.ndarray:
        """Microseconds for pairs of a shape and a kernel, with one row of constants for each, or one for all."""
        constants = np.ascontiguousarray(constants, dtype=np.float64)
        stride = 0 if constants.ndim == 1 else constants.shape[1]
        result = np.empty(len(shapes))
        count, bandwidth = ctypes.c_int64(len(shapes)), ctypes.c_double(bytes_per_microsecond)
        operands = [_pointer(array) for array in (shapes, kernels, constants)]
        self._library.tune_estimate(*operands, ctypes.c_int64(stride), count, bandwidth, _pointer(result))
        return result

    def torch_estimates(self, shapes: np.ndarray, constants: np.ndarray, bytes_per_microsecond: float) -> np.ndarray:
        """Microseconds of torch's way."""
        result = np.empty(len(shapes))
        count, bandwidth = ctypes.c_int64(len(shapes)), ctypes.c_double(bytes_per_microsecond)
        self._library.tune_torch(_pointer(shapes), _pointer(constants), count, bandwidth, _pointer(result))
        return result


def build(folder: Path, root: Path = project.ROOT) -> Path:
    """The library for Model, from the sources under `root`."""
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "model.so"
    command = [toolchain.cxx(), "-std=c++20", "-O3", "-fPIC", "-shared", "-o", library]
    result = subprocess.run([*command, *(root / source for source in SOURCES)], capture_output=True, text=True)
    if result.returncode != 0:
        raise toolchain.BuildError(f"the model of the times does not compile: {result.stderr}")
    return library


def _pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
