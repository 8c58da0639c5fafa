"""Choices of the sm_80 GEMMs' model on GPUs that are not present: the package's own C++ code, through ctypes."""

import ctypes
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import project
from builder import toolchain

SOURCES = (
    "cuda/sm80/beside_sm90.cpp",
    "cuda/sm80/grouped/grouped_plan.cpp",
    "cuda/sm80/plan/plan.cpp",
    "cuda/sm80/plan/time_model.cpp",
    "tools/tuning/sm80/prediction.cpp",
)
ACTIVATIONS = {"linear": 0, "gelu_pytorch_tanh": 2, "silu": 4}  # codes of torch-ext/operands/activation.h


class Gpu(ctypes.Structure):
    """Like Gpu in cuda/gemm/gpu.h."""

    _fields_ = [
        *((name, ctypes.c_int) for name in ("major", "minor", "multiprocessors")),
        *((name, ctypes.c_int) for name in ("shared_of_cta", "shared_of_multiprocessor")),
        *((name, ctypes.c_double) for name in ("cycles_per_microsecond", "bytes_per_microsecond")),
        ("l2_bytes", ctypes.c_int64),
        ("geforce", ctypes.c_bool),
    ]

    @property
    def capability(self) -> tuple[int, int]:
        return self.major, self.minor


def _gpu(capability: str, multiprocessors: int, mhz: int, gigabytes: int, l2_mib: int, geforce: bool = False) -> Gpu:
    major, minor = (int(part) for part in capability.split("."))
    shared = {(8, 0): 164, (8, 7): 164, (9, 0): 228}.get((major, minor), 100) * 1024
    sizes = (shared - 1024, shared)
    return Gpu(major, minor, multiprocessors, *sizes, mhz, gigabytes * 1e3, l2_mib << 20, geforce)


# The GPUs as their drivers describe them: boost clock and nominal bandwidth, from NVIDIA's data sheets.
GPUS = {
    "A100 80GB SXM": _gpu("8.0", 108, 1410, 2039, 40),
    "Jetson AGX Orin": _gpu("8.7", 16, 1300, 205, 4),
    "A10": _gpu("8.6", 72, 1695, 600, 6),
    "L4": _gpu("8.9", 58, 2040, 300, 48),
    "L40S": _gpu("8.9", 142, 2520, 864, 96),
    "RTX PRO 6000": _gpu("12.0", 188, 2617, 1792, 128),
    "RTX 3090": _gpu("8.6", 82, 1695, 936, 6, geforce=True),
    "RTX 4090": _gpu("8.9", 128, 2520, 1008, 72, geforce=True),
    "RTX 5090": _gpu("12.0", 170, 2407, 1792, 96, geforce=True),
    "H200": _gpu("9.0", 132, 1980, 4917, 50),  # the kernels can be tried on it, forced
}


class _Prediction(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int) for name in ("kernel", "ours")),
        *((name, ctypes.c_double) for name in ("microseconds", "torch_microseconds")),
        ("record", ctypes.c_char * 256),
    ]


@dataclass(frozen=True)
class Prediction:
    kernel: int  # its number in cuda/sm80/plan/kernels.def
    ours: bool  # true if it is chosen
    microseconds: float
    torch_microseconds: float
    record: str  # of a gated layer; `explain` turns it into text


class Listed(NamedTuple):
    """A kernel of the list: GemmKernel of cuda/gemm/problem.h by the numbers of its enums, and its resources."""

    loop: int
    product: int  # 0 plain, 1 gated, then those of training
    block_m: int
    block_n: int
    threads: int
    shared: int  # bytes

    @property
    def tiled(self) -> bool:
        return self.loop == 0


class Predictor:
    def __init__(self, folder: Path, root: Path = project.ROOT):
        folder.mkdir(parents=True, exist_ok=True)
        library = folder / "prediction.so"
        command = [toolchain.cxx(), "-std=c++20", "-O1", "-fPIC", "-shared", "-o", library]
        subprocess.run([*command, *(root / source for source in SOURCES)], check=True)
        self._library = ctypes.CDLL(str(library))
        for name in ("estimated", "flops_per_microsecond"):
            getattr(self._library, name).restype = ctypes.c_double

    def predict(
        self, gpu: Gpu, m: int, n: int, k: int, gated: bool, activation: str = "silu", biased: bool = False
    ) -> Prediction:
        shape = (ctypes.c_int64 * 6)(m, n, k, gated, ACTIVATIONS[activation], gpu.multiprocessors)
        found = _Prediction()
        self._library.predict(ctypes.byref(gpu), shape, int(biased), ctypes.byref(found))
        record = found.record.decode()
        return Prediction(found.kernel, bool(found.ours), found.microseconds, found.torch_microseconds, record)

    def predict_training(self, gpu: Gpu, product: int, m: int, n: int, k: int) -> tuple[bool, float, float]:
        """Returns whether our kernel is chosen for a training product (a number of Product), its time and torch's."""
        found = (ctypes.c_double * 2)()
        ours = self._library.predict_training(ctypes.byref(gpu), product, (ctypes.c_int64 * 3)(m, n, k), found)
        return bool(ours), *found

    def predict_experts(
        self, gpu: Gpu, sizes: tuple[int, ...], transposed: bool, trained: bool = False
    ) -> tuple[bool, int, float, float]:
        """Returns whether our kernels are chosen for gated experts, the rows of a tile, their time and that of torch's
        way, in inference or for a forward and its backward.

        The sizes are tokens, choices per token, experts, width and hidden width.
        """
        rows, found = ctypes.c_int(), (ctypes.c_double * 2)()
        given = (ctypes.c_int64 * 5)(*sizes), int(transposed), int(trained), ctypes.byref(rows), found
        ours = self._library.predict_experts(ctypes.byref(gpu), *given)
        return bool(ours), rows.value, *found

    def estimated(self, gpu: Gpu, product: tuple[int, int, int, bool], kernel: int) -> float:
        """Microseconds of a product (m, n, k, gated) by a kernel of the list."""
        shape = (ctypes.c_int64 * 6)(*product, ACTIVATIONS["linear"], gpu.multiprocessors)
        return self._library.estimated(ctypes.byref(gpu), shape, kernel)

    def beside_sm90(self, gpu: Gpu, m: int, n: int, k: int, gated: bool) -> tuple[int, float]:
        """The kernel of the list that is considered beside those of sm_90a and its microseconds, or -1."""
        shape = (ctypes.c_int64 * 6)(m, n, k, gated, ACTIVATIONS["linear"], gpu.multiprocessors)
        microseconds = ctypes.c_double()
        return self._library.beside_sm90(ctypes.byref(gpu), shape, ctypes.byref(microseconds)), microseconds.value

    def offered(self, gpu: Gpu, kernel: int) -> bool:
        """True if the choice on a GPU includes a kernel of the list."""
        return bool(self._library.offered(ctypes.byref(gpu), kernel))

    def flops_per_microsecond(self, gpu: Gpu) -> float:
        """The GPU's peak."""
        return self._library.flops_per_microsecond(ctypes.byref(gpu))

    def constants(self, gpu: Gpu) -> list:
        """The present members of Tuning (cuda/sm80/plan/tuning.h) after the capability, for a GPU."""
        tiles = len(self.tiles())
        found = (ctypes.c_double * (tiles + 5))()
        self._library.constants(ctypes.byref(gpu), found)
        return [found[:tiles], *found[tiles:]]

    def tiles(self) -> list[tuple[int, int]]:
        """The tiles for which Tuning has shares."""
        found, tile = [], (ctypes.c_int * 2)()
        while self._library.tile(len(found), tile) == 0:
            found.append(tuple(tile))
        return found

    def kernels(self) -> list[Listed]:
        """All kernels of the list, in its order."""
        found, described = [], (ctypes.c_int * 6)()
        while self._library.described(len(found), described) == 0:
            found.append(Listed(*described))
        return found
