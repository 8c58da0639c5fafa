"""Times every kernel and torch's GEMM on this GPU, as interleaved CUDA graphs, by their medians."""

import ctypes
import itertools
import math
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

import measure as timing
import project
from builder import toolchain
from tuning.kernels import Gpu, Kernel, Point
from tuning.model import KERNEL, Model

ROUNDS = 4
BUDGET_US = 1000.0  # the length of one candidate's turn
WEIGHT_BYTES = 200e6  # calls alternate over that many bytes of weights, so that no call finds its own in the L2 cache
MOST_CALLS = 60  # per turn
ENTRY = Path(__file__).with_name("entry.cpp")
SUFFIXES = (".cpp", ".cu", ".cuh", ".def", ".h")

SHAPES = [
    (384, 1536),
    (576, 1536),
    (768, 3072),
    (896, 4864),
    (1024, 4096),
    (1152, 6912),
    (1280, 5120),
    (1536, 8960),
    (2048, 768),
    (2048, 5632),
    (2048, 16384),
    (2304, 9216),
    (2560, 10240),
    (2880, 2880),
    (3072, 8192),
    (3072, 24576),
    (3584, 14336),
    (4096, 1792),
    (4096, 14336),
    (5120, 17408),
    (5376, 21504),
    (7168, 2048),
    (8192, 28672),
]
ROWS = [1, 8, 16, 24, 32, 48, 64, 77, 104, 128, 144, 160, 197, 256, 288, 320, 400, 512, 640, 1000, 2048, 4096]
QUICK_SHAPES = SHAPES[::3]
QUICK_ROWS = [1, 16, 64, 128, 256, 512, 2048]


class TuneError(Exception):
    pass


def capability() -> tuple[int, int] | None:
    """The compute capability of the current GPU, or None without a GPU."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def check_gpu() -> str:
    """The name of the GPU."""
    if not torch.cuda.is_available():
        raise TuneError("no GPU: the kernels are timed on an H100 or H200")
    name = torch.cuda.get_device_name()
    if capability() != (9, 0):
        raise TuneError(f"the GPU is a {name}: the kernels are for compute capability 9.0 (H100, H200)")
    return name


def describe() -> Gpu:
    """The current GPU. Its memory transfers data twice per clock cycle."""
    found = torch.cuda.get_device_properties()
    bytes_per_microsecond = found.memory_clock_rate / 1e3 * 2 * found.memory_bus_width / 8
    return Gpu(found.multi_processor_count, found.clock_rate / 1e3, bytes_per_microsecond)


def build(folder: Path, architecture: str = "sm90", code: str = "90a") -> ctypes.CDLL:
    """Compiles the project's sources with entry.cpp in `folder`; reuses the library if no source is newer."""
    library = folder / f"{architecture}_{code}.so"
    if library.exists() and library.stat().st_mtime > _last_change():
        return ctypes.CDLL(str(library))
    nvcc = toolchain.nvcc()
    if nvcc is None:
        raise TuneError("no nvcc in CUDA_HOME, on the PATH or in /usr/local/cuda")
    folder.mkdir(parents=True, exist_ok=True)
    listed = project.config()["kernel"][f"cuda_{architecture}"]["src"]
    listed = [*listed, "cuda/gemm/choice/refusal.cpp", "cuda/pointwise/pointwise.cu"]
    sources = [project.ROOT / source for source in listed if source.endswith((".cpp", ".cu"))]
    flags = ["-std=c++20", "-O3", "--expt-relaxed-constexpr", f"-gencode=arch=compute_{code},code=sm_{code}"]
    flags += [f"-DTUNED={architecture}", "-Xcompiler=-fPIC", "-shared"]
    threads = f"--threads={len(os.sched_getaffinity(0))}"
    command = [nvcc.path, *flags, threads, "-o", library, *sources, ENTRY]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise TuneError(f"nvcc failed: {next(iter((result.stderr or result.stdout).splitlines()), 'no message')}")
    return ctypes.CDLL(str(library))


def _last_change() -> float:
    """The time of the last change of any file that the library may depend on."""
    folders = (project.ROOT / "cuda", project.ROOT / "torch-ext", ENTRY.parent)
    files = (file for folder in folders for file in folder.rglob("*") if file.suffix in SUFFIXES)
    return max(file.stat().st_mtime for file in files)


def grid(quick: bool) -> list[tuple[str, int, int, int]]:
    """(kind, m, n, k) of layers of models."""
    layers = []
    for d, h in QUICK_SHAPES if quick else SHAPES:
        for m in QUICK_ROWS if quick else ROWS:
            layers += [("gated", m, h, d), ("activated", m, h, d), ("plain", m, d, h)]
    return layers


def measure(library: ctypes.CDLL, model: Model, kind: str, m: int, n: int, k: int) -> Point:
    """Runs on the current stream, which must not be the default stream, because that cannot capture graphs."""
    gated = kind == "gated"
    copies = max(2, min(MOST_CALLS, math.ceil(WEIGHT_BYTES / (2 * n * k * (2 if gated else 1)))))
    x, gates, ups = (
        torch.randn(*size, k, dtype=torch.bfloat16, device="cuda") * k**-0.5
        for size in ((m,), (copies, n), (copies if gated else 0, n))
    )
    out, up_out = (torch.empty(m, n, dtype=x.dtype, device="cuda") for _ in range(2))
    shape = model.shape(kind, m, n, k)
    shape_pointer = ctypes.c_void_p(shape.ctypes.data)

    def weights() -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        return itertools.cycle(zip(gates, ups if gated else [None] * copies))

    def pointer(tensor: torch.Tensor | None) -> ctypes.c_void_p:
        return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())

    def check(error: int, what: object) -> None:
        if error:
            raise TuneError(f"CUDA error {error} at m {m}, n {n}, k {k}, {kind}: {what}")

    def ours(kernel: Kernel) -> Callable[[], None]:
        chosen = np.array(tuple(kernel), KERNEL)
        turns = weights()

        def run() -> None:
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            kernel_pointer = ctypes.c_void_p(chosen.ctypes.data)
            operands = [pointer(tensor) for tensor in (x, *next(turns), out)]
            check(library.tune_gemm(shape_pointer, kernel_pointer, *operands, stream), kernel)

        return run

    torch_turns = weights()

    def torchs() -> None:
        gate, up = next(torch_turns)
        torch.mm(x, gate.t(), out=out)
        if gated:
            torch.mm(x, up.t(), out=up_out)
        if kind != "plain":
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            second = pointer(up_out if gated else None)
            check(library.tune_act_and_mul(shape_pointer, pointer(out), second, stream), "act_and_mul")

    kernels = model.candidates(kind, m, n, k)
    ways = [torchs, *(ours(kernel) for kernel in kernels)]
    torch_us, *times = medians(ways, copies, least_microseconds(kind, m, n, k))
    return Point(kind, m, n, k, dict(zip(kernels, times)), torch_us, model.choice(kind, m, n, k))


def least_microseconds(kind: str, m: int, n: int, k: int) -> float:
    """The least time that a GPU of this kind needs for one product: by flops, bytes or launches."""
    weights = (2 if kind == "gated" else 1) * n * k
    return max(2 * m * weights / 700e6, 2 * weights / 3e6, 4.0)


def medians(ways: list[Callable[[], None]], least_calls: int, least_us: float) -> list[float]:
    """Microseconds of one call of each way."""
    calls = max(least_calls, min(MOST_CALLS, int(BUDGET_US / least_us)))
    graphs = [timing.captured(way, calls) for way in ways]
    turns = {i: lambda graph=graph: {"us": timing.replay_microseconds(graph) / calls} for i, graph in enumerate(graphs)}
    timing.in_turns(turns, 1)  # warms up
    return [figures["us"] for figures in timing.in_turns(turns, ROUNDS).values()]
