"""The kernels that dispatch chooses from, and what is known of one product of matrices that they were timed at."""

from dataclasses import dataclass
from typing import NamedTuple

# As in cuda/sm90/gemm.cpp and gemm.h.
TILED_ROWS = 33  # from here on
STREAMED_ROWS = 256  # up to here
STREAMED_TILES = 4  # of rows, at most

LINEAR, GELU_TANH = 0, 2  # codes of torch-ext/activation.h


class Kernel(NamedTuple):
    """As GemmPlan of cuda/sm90/gemm.h."""

    streamed: int
    block_m: int
    block_n: int
    ping_pong: int
    split_k: int

    def __str__(self) -> str:
        way = "streamed" if self.streamed else "ping-pong" if self.ping_pong else "cooperative"
        return f"{way} {self.block_m} x {self.block_n}, split-k {self.split_k}"


# The kernels of launch.cuh. Where two are equally fast, the first is taken.
TILED_GATED = [
    Kernel(0, 128, 192, 1, 1),
    Kernel(0, 128, 176, 1, 1),
    Kernel(0, 128, 160, 1, 1),
    Kernel(0, 128, 144, 1, 1),
    Kernel(0, 128, 128, 1, 1),
    Kernel(0, 128, 224, 0, 1),
    Kernel(0, 128, 128, 0, 1),
    Kernel(0, 144, 256, 0, 1),
    Kernel(0, 64, 128, 0, 1),
    Kernel(0, 96, 128, 0, 1),
    Kernel(0, 160, 128, 0, 1),
    Kernel(0, 224, 128, 0, 1),
]
TILED_PLAIN = [
    Kernel(0, 128, 192, 1, 1),
    Kernel(0, 128, 160, 1, 1),
    Kernel(0, 128, 144, 1, 1),
    Kernel(0, 128, 128, 1, 1),
    Kernel(0, 128, 128, 0, 4),
    Kernel(0, 48, 128, 0, 1),
    Kernel(0, 64, 128, 0, 1),
    Kernel(0, 80, 128, 0, 1),
    Kernel(0, 96, 128, 0, 1),
    Kernel(0, 112, 128, 0, 1),
    Kernel(0, 160, 128, 0, 1),
    Kernel(0, 208, 128, 0, 1),
]
STREAMED_SIZES_GATED = [8, 16, 32, 48, 64]  # rows of a tile
STREAMED_SIZES_PLAIN = [*STREAMED_SIZES_GATED, 80, 128]
STREAMED_COLUMNS = 64


@dataclass
class Point:
    """One product, and microseconds of every way to compute it. kind is gated, activated (one weight) or plain."""

    kind: str
    m: int
    n: int
    k: int
    times: dict[Kernel, float]
    torch: float  # its GEMMs and the pointwise kernel behind them
    present: Kernel  # what plan() chooses as it is

    @property
    def gated(self) -> bool:
        return self.kind == "gated"

    @property
    def bytes(self) -> int:
        return 2 * (self.m * (self.k + self.n) + (2 if self.gated else 1) * self.n * self.k)

    @property
    def flops(self) -> int:
        return 2 * self.m * (2 if self.gated else 1) * self.n * self.k

    @property
    def best(self) -> float:
        return min(self.times.values())


def candidates(kind: str, m: int, k: int) -> list[Kernel]:
    """All that plan() of cuda/sm90/gemm.cpp considers."""
    return streamed(kind, m, k) + tiled(kind, m, k)


def streamed(kind: str, m: int, k: int) -> list[Kernel]:
    if m > STREAMED_ROWS:
        return []
    sizes = STREAMED_SIZES_GATED if kind == "gated" else STREAMED_SIZES_PLAIN
    largest = next((size for size in sizes if size >= m), sizes[-1])
    sizes = [size for size in sizes if size <= largest and ceil_div(m, size) <= STREAMED_TILES]
    parts = [split_k for split_k in (1, 2, 4, 8) if k > 64 * (split_k - 1)]
    return [Kernel(1, size, STREAMED_COLUMNS, 0, split_k) for size in sizes for split_k in parts]


def tiled(kind: str, m: int, k: int) -> list[Kernel]:
    if m < TILED_ROWS:
        return []
    kernels = TILED_GATED if kind == "gated" else TILED_PLAIN
    return [kernel for kernel in kernels if kernel.split_k == 1 or k >= 64 * kernel.split_k]


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)
