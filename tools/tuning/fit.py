"""Models of the kernels' times, as cuda/sm90/gemm.cpp evaluates them, with constants fitted to what was measured."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from tuning.kernels import GATED_KERNELS, PLAIN_KERNELS, Kernel, Point, ceil_div, k_blocks

LARGE_BYTES = 100e6  # more than stays in the L2 cache from one run to the next
SATURATING = [0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0]
REDUCTION = [0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0]


@dataclass
class KernelTime:
    """Microseconds: max(start + rounds * (round + k_block * blocks of k + activation), bytes / bandwidth)."""

    start: float
    round: float
    k_block: float
    activation: float


@dataclass
class Rows:
    """The rows, from first to last, at which torch's GEMM is faster; last is None where there is no end."""

    first: int
    last: int | None


@dataclass
class Constants:
    gated: dict[Kernel, KernelTime]
    plain: dict[Kernel, KernelTime]
    bytes_per_microsecond: float
    saturating: float
    reduction: float
    torch_plain: Rows | None
    torch_activated: Rows | None

    def choose(self, point: Point, multiprocessors: int) -> Kernel:
        if point.few_rows:
            return min(point.times, key=lambda kernel: self._streamed_cost(point, kernel, multiprocessors))
        return min(point.times, key=lambda kernel: self._time(point, kernel, multiprocessors))

    def _streamed_cost(self, p: Point, kernel: Kernel, multiprocessors: int) -> float:
        return streamed_cost(p, kernel.split_k, multiprocessors, self.saturating, self.reduction)

    def _time(self, p: Point, kernel: Kernel, multiprocessors: int) -> float:
        time = (self.gated if p.gated else self.plain)[kernel]
        terms = terms_of(p, kernel, multiprocessors)
        fitted = np.dot(terms, [time.start, time.round, time.k_block, time.activation])
        return max(fitted, p.bytes / self.bytes_per_microsecond)


def fit(points: list[Point], multiprocessors: int) -> Constants:
    many = [point for point in points if not point.few_rows]
    few = [point for point in points if point.few_rows]
    large = [point for point in many if point.bytes > LARGE_BYTES] or many
    bandwidth = round(max(point.bytes / point.best for point in large), -5)
    gated = [point for point in many if point.gated]
    plain = [point for point in many if not point.gated]
    gated_times = {kernel: kernel_time(kernel, gated, multiprocessors) for kernel in GATED_KERNELS}
    plain_times = {kernel: kernel_time(kernel, plain, multiprocessors) for kernel in PLAIN_KERNELS}
    saturating, reduction = min(
        itertools.product(SATURATING, REDUCTION),
        key=lambda constants: streamed_loss(few, multiprocessors, *constants),
    )
    constants = Constants(gated_times, plain_times, bandwidth, saturating, reduction, None, None)
    constants.torch_plain, constants.torch_activated = (
        torch_rows(points, kind, lambda point: constants.choose(point, multiprocessors))
        for kind in ("plain", "activated")
    )
    return constants


def terms_of(p: Point, kernel: Kernel, multiprocessors: int) -> list[float]:
    """What start, round, k_block and activation are multiplied by."""
    cluster = kernel.multicast * kernel.split_k
    resident = (multiprocessors if cluster <= 2 else multiprocessors * 10 // 11) // cluster
    columns = 64 if kernel.streamed else kernel.block_n // 2 if p.gated else kernel.block_n
    tiles = ceil_div(p.m, 128 * kernel.multicast) * ceil_div(p.n, columns)
    rounds = ceil_div(tiles, max(resident, 1))
    blocks = ceil_div(ceil_div(p.k, 64), kernel.split_k)
    return [1.0, rounds, rounds * blocks, rounds * (p.kind == "activated")]


def kernel_time(kernel: Kernel, points: list[Point], multiprocessors: int) -> KernelTime:
    """The least relative error, above all where the kernel is near the best: elsewhere it need not be exact."""
    timed = [point for point in points if kernel in point.times]
    times = np.array([point.times[kernel] for point in timed])
    weights = np.array([point.best for point in timed]) / times
    terms = np.array([terms_of(point, kernel, multiprocessors) for point in timed])
    fitted = non_negative_least_squares(terms * (weights / times)[:, None], weights)
    return KernelTime(*(round(float(constant), 3) for constant in fitted))


def non_negative_least_squares(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """x >= 0 with the least |a x - b|, by trying every set of columns: there are few."""
    columns = range(a.shape[1])
    best, best_error = np.zeros(a.shape[1]), np.inf
    for chosen in itertools.chain.from_iterable(itertools.combinations(columns, count + 1) for count in columns):
        x = np.zeros(a.shape[1])
        x[list(chosen)] = np.linalg.lstsq(a[:, chosen], b, rcond=None)[0]
        error = np.linalg.norm(a @ x - b)
        if (x >= 0).all() and error < best_error:
            best, best_error = x, error
    return best


def streamed_cost(p: Point, split_k: int, multiprocessors: int, saturating: float, reduction: float) -> float:
    """In blocks of k."""
    crowding = max(1.0, ceil_div(p.n, 64) * split_k / (saturating * multiprocessors))
    return ceil_div(k_blocks(p.kind, p.k), split_k) * crowding + reduction * (split_k - 1)


def streamed_loss(few: list[Point], multiprocessors: int, saturating: float, reduction: float) -> float:
    """The mean square of how much slower than the best kernel the chosen one is."""

    def cost(point: Point, kernel: Kernel) -> float:
        return streamed_cost(point, kernel.split_k, multiprocessors, saturating, reduction)

    chosen = [point.times[min(point.times, key=lambda kernel: cost(point, kernel))] for point in few]
    return float(np.mean([(time / point.best - 1) ** 2 for point, time in zip(few, chosen)]))


def torch_rows(points: Iterable[Point], kind: str, choose: Callable[[Point], Kernel]) -> Rows | None:
    """The run of measured m for which to take torch's GEMM saves most, in units of the faster way's time."""
    losses = defaultdict(list)  # of taking torch's way at each m, negative where it is the faster one
    for point in points:
        if point.kind == kind:
            ours = point.times[choose(point)]
            losses[point.m].append((point.torch - ours) / min(point.torch, ours))
    measured = sorted(losses)
    runs = itertools.combinations(range(len(measured) + 1), 2)
    start, end = min(runs, key=lambda run: sum(sum(losses[m]) for m in measured[slice(*run)]))
    if sum(sum(losses[m]) for m in measured[start:end]) >= 0:
        return None
    last = None if end == len(measured) else measured[end - 1]
    return Rows(measured[start - 1] + 1 if start else 1, last)
