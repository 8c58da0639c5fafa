"""Constants of the sm_80 GEMMs' time model for the GPUs of a capability, measured on one of them: a row of
cuda/sm80/plan/tuned.def. Every kernel and torch's GEMM are timed on a few products. A constant of ours makes the model
exact for the product where our kernel reached least; a constant of torch's, where torch reached most.
"""

import ctypes
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

import project
from tuning import bench
from tuning.sm80.prediction import Gpu, Predictor

ROWS = project.ROOT / "cuda/sm80/plan/tuned.def"


class Product(NamedTuple):
    m: int
    n: int
    k: int
    gated: bool

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k * (2 if self.gated else 1)

    @property
    def plain(self) -> tuple[int, int, int]:
        """The same as one product with both weights, as torch's GEMM computes it."""
        return self.m, self.n * (2 if self.gated else 1), self.k


LARGE = (
    Product(8192, 3072, 768, True),
    Product(4096, 4096, 4096, False),
    Product(4096, 8192, 2048, True),
    Product(8192, 2048, 8192, False),
)
WIDE = (Product(1, 14336, 4096, True), Product(16, 14336, 4096, True), Product(16, 4096, 14336, False))
SMALL = Product(8, 64, 64, False)
Times = dict[Product, dict[int | None, float]]  # microseconds by kernel number; None: torch's GEMM


def describe() -> Gpu:
    """The current GPU, as cuda/device.h describes it."""
    found = torch.cuda.get_device_properties()
    shared = found.shared_memory_per_block_optin, found.shared_memory_per_multiprocessor
    bandwidth = found.memory_clock_rate / 1e3 * 2 * found.memory_bus_width / 8
    sizes = (found.clock_rate / 1e3, bandwidth, found.L2_cache_size, "GeForce" in found.name)
    return Gpu(found.major, found.minor, found.multi_processor_count, *shared, *sizes)


def candidates(predictor: Predictor, gpu: Gpu, product: Product) -> Iterator[int]:
    """The numbers of the kernels that are timed for a product: tiled ones for large ones, streamed ones for others."""
    for number, kernel in enumerate(predictor.kernels()):
        if kernel.product != int(product.gated) or not predictor.offered(gpu, number):
            continue
        if kernel.tiled == (product in LARGE) and (kernel.tiled or kernel.block_m >= product.m):
            yield number


def measure(library: ctypes.CDLL, predictor: Predictor, gpu: Gpu) -> Times:
    """Runs on the current stream, which must not be the default stream, because that cannot capture graphs."""
    found: Times = {}
    for product in (*LARGE, *WIDE, SMALL):
        m, n, k = product.plain
        x, weights = (torch.randn(rows, k, dtype=torch.bfloat16, device="cuda") * k**-0.5 for rows in (m, n))
        out = torch.empty(m, product.n, dtype=x.dtype, device="cuda")
        numbers = [*candidates(predictor, gpu, product)]
        ways: list[Callable[[], object]] = [lambda x=x, weights=weights: torch.mm(x, weights.t())]
        ways += [_launcher(library, gpu, number, product, x, weights, out) for number in numbers]
        least = predictor.predict(gpu, *product, "linear").torch_microseconds
        found[product] = dict(zip([None, *numbers], bench.medians(ways, 2, least), strict=True))
    return found


def _launcher(library, gpu, number, product, x, weights, out) -> Callable[[], None]:
    shape = (ctypes.c_int64 * 6)(*product, 0, gpu.multiprocessors)
    up = weights[product.n :] if product.gated else None
    operands = [ctypes.c_void_p(None if each is None else each.data_ptr()) for each in (x, weights, up, out)]

    def run() -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        if error := library.tune_listed(shape, number, *operands, stream):
            raise bench.TuneError(f"CUDA error {error}: kernel {number}, {product}")

    return run


def fit(times: Times, predictor: Predictor, gpu: Gpu) -> list[float | list[float]]:
    """The members of Tuning (cuda/sm80/plan/tuning.h) after the capability."""
    shares, of_bandwidth, start, *_ = predictor.constants(gpu)
    started, torch_started = (
        min(time for number, time in times[SMALL].items() if number is not None),
        times[SMALL][None],
    )

    def share(product: Product, number: int, assumed: float) -> float:
        """The constant that makes a kernel's estimate equal its measured time; `assumed` gave the present estimate."""
        bound = predictor.estimated(gpu, product, number) - start
        return assumed * bound / (times[product][number] - started)

    kernels = predictor.kernels()
    fitted = []
    for tile, assumed in zip(predictor.tiles(), shares, strict=True):
        found = [
            share(product, number, assumed)
            for product in LARGE
            for number in times[product]
            if number is not None and (kernels[number].block_m, kernels[number].block_n) == tile
        ]
        fitted.append(min(found, default=assumed))
    of_bandwidth = min(
        max(share(product, number, of_bandwidth) for number in times[product] if number is not None) for product in WIDE
    )
    peak = predictor.flops_per_microsecond(gpu)
    of_peak = max(product.flops / peak / (times[product][None] - torch_started) for product in LARGE)
    torch_of_bandwidth = max(
        2.0 * product.plain[1] * product.k / gpu.bytes_per_microsecond / (times[product][None] - torch_started)
        for product in WIDE
    )
    return [fitted, of_bandwidth, started, of_peak, torch_of_bandwidth, torch_started]


def row(gpu: Gpu, name: str, constants: list[float | list[float]]) -> str:
    shares, *others = constants
    listed = ", ".join(f"{share:.3f}" for share in shares)
    return (
        f"{{{gpu.major}, {gpu.minor}, false, {{{listed}}}, {', '.join(f'{each:.3f}' for each in others)}}},  // {name}"
    )


def withheld(gpu: Gpu, name: str) -> str:
    return f"{{{gpu.major}, {gpu.minor}, true}},  // {name}"


def write(made: str, path: Path = ROWS) -> None:
    """Replaces the row of the capability, or appends one."""
    kept = [line for line in path.read_text().splitlines() if not line.startswith(_capability(made))]
    path.write_text("\n".join([*kept, made]) + "\n")


def has(made: str, path: Path = ROWS) -> bool:
    """True if there is a row of that capability."""
    return any(line.startswith(_capability(made)) for line in path.read_text().splitlines())


def _capability(row: str) -> str:
    return re.match(r"\{\d+, \d+,", row)[0]
