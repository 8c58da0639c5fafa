"""The expected launches of a set-up, as data that determines the launches to look for and the bytes they move."""

import math
from dataclasses import dataclass

from timeline import FUSED, GEMM, POINTWISE


@dataclass(frozen=True)
class Step:
    """One launch: the names of the operands that it must read and write."""

    name: str
    kind: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]


LINEAR = (Step("x W + b", GEMM, ("x", "weight", "bias"), ("y",)),)

_GATE = Step("gate", GEMM, ("x", "gate_weight"), ("hidden",))
_UP = Step("up", GEMM, ("x", "up_weight"), ("hidden",))
_DOWN = Step("down", GEMM, ("hidden", "down_weight"), ("y",))
EAGER = (
    _GATE,
    Step("gelu", POINTWISE, ("hidden",), ("hidden",)),
    _UP,
    Step("mul", POINTWISE, ("hidden", "hidden"), ("hidden",)),
    _DOWN,
)
POINTWISE_FUSED = (_GATE, _UP, Step("gelu mul", POINTWISE, ("hidden", "hidden"), ("hidden",)), _DOWN)
GATED_GEMM = (Step("gate up gelu mul", FUSED, ("x", "gate_weight", "up_weight"), ("hidden",)), _DOWN)
GATED_GEMM_AND_OURS = (GATED_GEMM[0], Step("down", FUSED, ("hidden", "down_weight"), ("y",)))
ONE_OP = (Step("the whole MLP", FUSED, ("x", "gate_weight", "up_weight", "down_weight"), ("y",)),)


def of_ours(explanation) -> tuple[Step, ...]:
    """The steps of `gated_mlp`, derived from `explain`."""
    whole = {"cpu": ONE_OP, "triton": GATED_GEMM, "torch": EAGER}
    if explanation.implementation in whole:
        return whole[explanation.implementation]
    gate_up, down = explanation.parts
    if not gate_up.fused:
        return POINTWISE_FUSED
    return GATED_GEMM_AND_OURS if down.fused else GATED_GEMM


@dataclass(frozen=True)
class Size:
    """The operands of a workload, and its minimum number of operations."""

    operands: dict[str, tuple[int, ...]]
    flops: int
    element_size: int

    def bytes_of(self, *names: str) -> int:
        return self.element_size * sum(math.prod(self.operands[name]) for name in names)

    def bytes_moved(self, steps: tuple[Step, ...]) -> int:
        return sum(self.bytes_of(*step.reads, *step.writes) for step in steps)

    def floor_seconds(self, flops_per_second: float, bytes_per_second: float) -> float:
        """The roofline, a lower bound for any way to compute it, with intermediate values never in memory."""
        least = self.bytes_of(*(name for name in self.operands if name != "hidden"))
        return max(self.flops / flops_per_second, least / bytes_per_second)


def linear_size(m: int, k: int, n: int, element_size: int) -> Size:
    return Size({"x": (m, k), "weight": (n, k), "bias": (n,), "y": (m, n)}, 2 * m * k * n, element_size)


def mlp_size(m: int, d: int, h: int, element_size: int) -> Size:
    weights = {"gate_weight": (h, d), "up_weight": (h, d), "down_weight": (d, h)}
    return Size({"x": (m, d), **weights, "hidden": (m, h), "y": (m, d)}, 6 * m * d * h, element_size)
