"""The kernels that dispatch chooses from, and what is known of one product of matrices that they were timed at."""

from dataclasses import dataclass
from typing import NamedTuple

FEW_ROWS = 64  # up to here, streamed kernels alone
WIDE_ROWS = 256  # beyond, tiled kernels alone
LINEAR, GELU_TANH = 0, 2  # codes of torch-ext/activation.h


class Kernel(NamedTuple):
    """As GemmPlan of cuda/sm90/gemm.h."""

    streamed: int
    block_n: int
    ping_pong: int
    multicast: int
    split_k: int

    def __str__(self) -> str:
        way = "streamed" if self.streamed else "ping-pong" if self.ping_pong else "cooperative"
        return f"{way} {self.block_n}, multicast {self.multicast}, split-k {self.split_k}"


# The kernels of launch.cuh for more than FEW_ROWS rows. Where two are equally fast, the first is taken.
GATED_KERNELS = [
    Kernel(0, 256, 0, 2, 1),
    Kernel(0, 192, 1, 2, 1),
    Kernel(0, 256, 0, 1, 1),
    Kernel(0, 192, 1, 1, 1),
    Kernel(0, 224, 0, 2, 1),
    Kernel(0, 128, 1, 2, 1),
    Kernel(0, 128, 0, 1, 1),
]
PLAIN_KERNELS = [
    Kernel(0, 256, 0, 2, 1),
    Kernel(0, 192, 1, 2, 1),
    Kernel(0, 192, 0, 2, 1),
    Kernel(0, 128, 1, 2, 1),
    Kernel(0, 128, 0, 1, 1),
    Kernel(0, 128, 0, 1, 2),
    Kernel(0, 128, 0, 1, 4),
    Kernel(1, 128, 0, 1, 2),
    Kernel(1, 128, 0, 1, 4),
    Kernel(1, 128, 0, 1, 8),
]


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
    def few_rows(self) -> bool:
        return self.m <= FEW_ROWS

    @property
    def bytes(self) -> int:
        return 2 * (self.m * (self.k + self.n) + (2 if self.gated else 1) * self.n * self.k)

    @property
    def best(self) -> float:
        return min(self.times.values())


def candidates(kind: str, m: int, k: int) -> list[Kernel]:
    if m <= FEW_ROWS:
        rows = next(rows for rows in (8, 16, 32, 64) if m <= rows)
        blocks = k_blocks(kind, k)
        return [Kernel(1, rows, 0, 1, split_k) for split_k in (1, 2, 4, 8) if split_k <= blocks]
    kernels = GATED_KERNELS if kind == "gated" else PLAIN_KERNELS
    return [kernel for kernel in kernels if takes(kernel, m, k)]


def takes(kernel: Kernel, m: int, k: int) -> bool:
    """For more than FEW_ROWS rows, as timed_plan() of cuda/sm90/gemm.cpp."""
    return (kernel.split_k == 1 or k >= 64 * kernel.split_k) and not (kernel.streamed and m > WIDE_ROWS)


def k_blocks(kind: str, k: int) -> int:
    """Blocks of k that a streamed kernel for few rows reads."""
    return ceil_div(k, 64 if kind == "gated" else 128)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)
