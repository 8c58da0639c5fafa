"""A matrix product and the kernels that can compute it, as the C++ code of this folder defines them."""

from dataclasses import dataclass
from typing import NamedTuple

LOOPS = ("Tiled", "Streamed")
SCHEDULES = ("PingPong", "Cooperative", "Swapped", "SwappedHalfRows")
KINDS = ("gated", "activated", "plain")  # two weights; one with an activation; one without
STREAMED = (*(f"few_{kind}" for kind in KINDS), *KINDS, "tall")  # the kinds of streamed kernels with separate constants
TILED_ROWS, TALL_ROWS = 33, 65  # as in cuda/sm90/chip.h


class Kernel(NamedTuple):
    """Like GemmKernel of cuda/gemm/problem.h, with the numbers of its enums; the kind determines the product."""

    loop: int
    block_m: int
    block_n: int
    schedule: int
    split_k: int

    @property
    def tiled(self) -> bool:
        return LOOPS[self.loop] == "Tiled"

    def __str__(self) -> str:
        return f"{LOOPS[self.loop]} {SCHEDULES[self.schedule]} {self.block_m} x {self.block_n}, split-k {self.split_k}"


class Gpu(NamedTuple):
    """A GPU as its driver describes it: MeasuredOn of cuda/sm90/plan/time_model.h."""

    multiprocessors: int
    cycles_per_microsecond: float
    bytes_per_microsecond: float  # nominal memory bandwidth


@dataclass
class Point:
    """One product, and the microseconds of every way to compute it."""

    kind: str
    m: int
    n: int
    k: int
    times: dict[Kernel, float]
    torch: float  # its GEMMs and the pointwise kernel after them
    present: Kernel  # the choice with the present constants

    @property
    def gated(self) -> bool:
        return self.kind == "gated"

    @property
    def streamed(self) -> str:
        """The names of the constants of the streamed kernels."""
        if self.m >= TALL_ROWS:
            return "tall"
        return self.kind if self.m >= TILED_ROWS else f"few_{self.kind}"

    @property
    def bytes(self) -> int:
        return 2 * (self.m * (self.k + self.n) + (2 if self.gated else 1) * self.n * self.k)

    @property
    def flops(self) -> int:
        return 2 * self.m * (2 if self.gated else 1) * self.n * self.k

    @property
    def best(self) -> float:
        return min(self.times.values())
