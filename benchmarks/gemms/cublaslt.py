"""cuBLASLt's algorithms of one class, selected by kernel name: those that use mma.sync, on any GPU."""

import contextlib
import ctypes
import re
from collections.abc import Callable
from typing import ClassVar

import torch

AMPERE = re.compile(r"ampere|sm80|cutlass_80|s16816|s1688")
NEWER = re.compile(r"sm90|sm100|nvjet|hopper|blackwell")
WORKSPACE = 64 << 20

# As in cublasLt.h.
COMPUTE_32F, R_32F, TYPES = 68, 0, {torch.float16: 2, torch.bfloat16: 14}
TRANSPOSE_A, OPERATION_T = 3, 1
CAP_TILES, CAP_STAGES = 6, 13
SET_TILE, SET_SWIZZLING, SET_STAGES = 1, 4, 6


class Algorithm(ctypes.Structure):
    _fields_ = [("data", ctypes.c_uint64 * 8)]


class Heuristic(ctypes.Structure):
    _fields_ = [
        ("algorithm", Algorithm),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


class Product:
    """out [m, n] = x [m, k] weight [n, k]^T, dense, by any algorithm of cuBLASLt."""

    _ids_of_ampere: ClassVar[dict[torch.dtype, set[int]]] = {}  # once these are known, no others are tried

    def __init__(self, x: torch.Tensor, weight: torch.Tensor):
        self.x, self.weight = x, weight
        (m, k), n = x.shape, weight.shape[0]
        self.out = torch.empty(m, n, dtype=x.dtype, device=x.device)
        self.workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=x.device)
        self.type = TYPES[x.dtype]
        self.library = next(
            library for name in ("libcublasLt.so.13", "libcublasLt.so.12") if (library := _loaded(name)) is not None
        )
        self.handle, self.description = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cublasLtCreate", ctypes.byref(self.handle))
        self._call("cublasLtMatmulDescCreate", ctypes.byref(self.description), COMPUTE_32F, R_32F)
        transposed = ctypes.c_int32(OPERATION_T)
        size = ctypes.c_size_t(4)
        self._call("cublasLtMatmulDescSetAttribute", self.description, TRANSPOSE_A, ctypes.byref(transposed), size)
        # Column-major: out^T [n, m] = (weight^T [k, n])^T x^T [k, m].
        self.layouts = [self._layout(rows, columns) for rows, columns in ((k, n), (k, m), (n, m))]
        self.one, self.zero = ctypes.c_float(1.0), ctypes.c_float(0.0)

    def _call(self, name: str, *arguments) -> None:
        if status := getattr(self.library, name)(*arguments):
            raise RuntimeError(f"{name}: status {status}")

    def _layout(self, rows: int, columns: int) -> ctypes.c_void_p:
        layout = ctypes.c_void_p()
        sizes = (ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows))
        self._call("cublasLtMatrixLayoutCreate", ctypes.byref(layout), self.type, *sizes)
        return layout

    def run(self, algorithm: Algorithm) -> None:
        a, b, d = self.layouts
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (self.weight, self.x, self.out, self.workspace)]
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        one, zero, chosen = (ctypes.byref(each) for each in (self.one, self.zero, algorithm))
        size = ctypes.c_size_t(WORKSPACE)
        operands = (one, pointers[0], a, pointers[1], b, zero, pointers[2], d, pointers[2], d)
        self._call("cublasLtMatmul", self.handle, self.description, *operands, chosen, pointers[3], size, stream)

    def _attempt(self, algorithm: Algorithm) -> None:
        """Runs an algorithm if cuBLASLt can; it does not know beforehand."""
        with contextlib.suppress(RuntimeError):
            self.run(algorithm)

    def algorithms(self, only: set[int] | None = None) -> list[tuple[int, Algorithm]]:
        """Every algorithm, tile, number of stages and order of CTAs that accepts this product, with the algorithm's id;
        k is not split."""
        ids, count = (ctypes.c_int * 256)(), ctypes.c_int()
        types = (COMPUTE_32F, R_32F, *[self.type] * 4)
        self._call("cublasLtMatmulAlgoGetIds", self.handle, *types, 256, ids, ctypes.byref(count))
        found = []
        for number in ids[: count.value]:
            if only is not None and number not in only:
                continue
            first = Algorithm()
            if self.library.cublasLtMatmulAlgoInit(self.handle, *types, number, ctypes.byref(first)):
                continue
            for tile in self._capability(first, CAP_TILES) or [0]:
                for stages in self._capability(first, CAP_STAGES) or [0]:
                    for swizzling in (0, 1):
                        made = Algorithm.from_buffer_copy(first)
                        for attribute, value in ((SET_TILE, tile), (SET_STAGES, stages), (SET_SWIZZLING, swizzling)):
                            set_to = (attribute, ctypes.byref(ctypes.c_int(value)), ctypes.c_size_t(4))
                            self.library.cublasLtMatmulAlgoConfigSetAttribute(ctypes.byref(made), *set_to)
                        if self._takes(made):
                            found.append((number, made))
        return found

    def _capability(self, algorithm: Algorithm, which: int) -> list[int]:
        values, written = (ctypes.c_int * 1024)(), ctypes.c_size_t()
        size = ctypes.c_size_t(ctypes.sizeof(values))
        get = self.library.cublasLtMatmulAlgoCapGetAttribute
        if get(ctypes.byref(algorithm), which, values, size, ctypes.byref(written)):
            return []
        return list(values[: written.value // 4])

    def _takes(self, algorithm: Algorithm) -> bool:
        a, b, d = self.layouts
        result = Heuristic()
        check = self.library.cublasLtMatmulAlgoCheck
        status = check(self.handle, self.description, a, b, d, d, ctypes.byref(algorithm), ctypes.byref(result))
        return status == 0 and result.state == 0 and result.workspace <= WORKSPACE

    def ampere(self) -> list[tuple[str, Algorithm]]:
        """The algorithms that launch a single Ampere kernel, with its name."""
        known = self._ids_of_ampere.get(self.x.dtype)
        offered = self.algorithms(known)
        launched = launches([lambda each=each: self._attempt(each) for _, each in offered])
        found = [
            (number, names[0], algorithm)
            for (number, algorithm), names in zip(offered, launched, strict=True)
            if len(names) == 1 and AMPERE.search(names[0]) and not NEWER.search(names[0])
        ]
        self._ids_of_ampere.setdefault(self.x.dtype, {number for number, _, _ in found})
        return [(name, algorithm) for _, name, algorithm in found]


def launches(runs: list[Callable[[], None]]) -> list[list[str]]:
    """The names of the kernels that each run launches, from one profile in which a fill separates the runs."""
    marker = torch.empty(1, device="cuda")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        for run in runs:
            marker.fill_(1.0)
            run()
        torch.cuda.synchronize()
    events = [event for event in trace.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    found: list[list[str]] = []
    for event in sorted(events, key=lambda event: event.time_range.start):
        if "FillFunctor" in event.name:
            found.append([])
        else:
            found[-1].append(event.name)
    return found


def _loaded(name: str) -> ctypes.CDLL | None:
    torch.cuda.current_blas_handle()  # loads torch's cuBLAS
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None
