"""Models of the kernels' times, as cuda/sm90/gemm.cpp evaluates them, with constants fitted to what was measured."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass

import numpy as np
from tqdm import trange

from tuning.kernels import STREAMED_ROWS, TILED_GATED, TILED_PLAIN, TILED_ROWS, Kernel, Point, ceil_div

LARGE_BYTES = 100e6  # more than stays in the L2 cache from one run to the next
TIE = 0.1  # as kTie of cuda/sm90/gemm.cpp
KINDS = ("gated", "activated", "plain")
NEAR_FLOOR_ROWS = 640  # up to here, a plain product near the floor is ours
COST_OF_OURS = 1.5  # the weight of what a plain product of ours takes longer than torch's
STARTS, STEPS = 8, 4000  # of the searches for constants


@dataclass
class TiledTime:
    """Microseconds: start, and for each round of tiles round + k_block * blocks of k + activation, bounded by the
    round's part of bytes / bandwidth."""

    start: float
    round: float
    k_block: float
    activation: float


@dataclass
class StreamedTime:
    """Microseconds: start + split of k * load + blocks of k a CTA * block, bounded by bytes / bandwidth * (1 + tail *
    the part of the chip that is idle in the last round of as many CTAs as it holds), where the split is split_2, with
    split_4 added from 4 parts on, and split_8 from 8, and a block takes

    (k_block + k_row * rows of a tile) * load + (round_k_block + round_k_row * rows of a tile) * rounds

    with the load that CTAs / (saturating * multiprocessors) is, at least 1, and rounds of one CTA a multiprocessor.
    """

    start: float = 2.3
    split_2: float = 1.3
    split_4: float = 0.5
    split_8: float = 0.5
    k_block: float = 0.1
    k_row: float = 0.002
    saturating: float = 0.75
    round_k_block: float = 0.1
    round_k_row: float = 0.002
    tail: float = 0.1


@dataclass
class Rows:
    """The rows, from first to last, at which torch's GEMM is faster; last is None where there is no end."""

    first: int
    last: int | None


@dataclass
class Constants:
    tiled: dict[str, dict[Kernel, TiledTime]]  # by kind, where activated and plain have the same
    streamed: dict[str, StreamedTime]  # by kind
    bytes_per_microsecond: float
    flops_per_microsecond: float
    torch: dict[str, Rows | None]  # activated and plain
    near_floor: float = 1.0  # a plain product estimated at up to so many times the floor is ours where torch's rows are

    def choose(self, point: Point, multiprocessors: int) -> Kernel:
        return min(point.times, key=lambda kernel: self.microseconds(point, kernel, multiprocessors))

    def over_floor(self, point: Point, multiprocessors: int) -> float:
        """The estimate for the chosen kernel over the time that the bytes and the arithmetic take at least."""
        floor = max(point.bytes / self.bytes_per_microsecond, point.flops / self.flops_per_microsecond)
        return self.microseconds(point, self.choose(point, multiprocessors), multiprocessors) / floor

    def microseconds(self, point: Point, kernel: Kernel, multiprocessors: int) -> float:
        """What is expected of a kernel."""
        floor = point.bytes / self.bytes_per_microsecond
        if not kernel.streamed:
            time = np.array([astuple(self.tiled[point.kind][kernel])])
            return tiled_times(time, np.array([tiled_terms(point, kernel, floor, multiprocessors)]))[0]
        terms = np.array([streamed_terms(point, kernel)])
        return streamed_times(self.streamed[point.kind], terms, np.array([floor]), multiprocessors)[0]


def fit(points: list[Point], multiprocessors: int) -> Constants:
    large = [point for point in points if point.bytes > LARGE_BYTES and point.m >= TILED_ROWS] or points
    bandwidth = round(max(point.bytes / point.best for point in large), -5)
    many = [point for point in points if point.m >= TILED_ROWS]
    tiled = {}
    for kinds, kernels in ((("gated",), TILED_GATED), (("activated", "plain"), TILED_PLAIN)):
        timed = [point for point in many if point.kind in kinds]
        tiled.update(dict.fromkeys(kinds, fit_tiled(kernels, timed, bandwidth, multiprocessors)))
    arithmetic = round(max(point.flops / min(point.best, point.torch) for point in points), -7)
    constants = Constants(tiled, {}, bandwidth, arithmetic, {})
    for kind in KINDS:
        few = [point for point in points if point.kind == kind and point.m <= STREAMED_ROWS]
        constants.streamed[kind] = fit_streamed(kind, few, constants, multiprocessors)

    def choose(point: Point) -> Kernel:
        return constants.choose(point, multiprocessors)

    constants.torch["activated"] = torch_rows([point for point in points if point.kind == "activated"], choose)
    plain = [
        (point.m, constants.over_floor(point, multiprocessors), saved_by_torch(point, choose))
        for point in points
        if point.kind == "plain"
    ]
    constants.torch["plain"], constants.near_floor = torch_unless_near_floor(plain)
    return constants


def tiles_and_resident(p: Point, kernel: Kernel, multiprocessors: int) -> tuple[int, int]:
    """Tiles, each of a cluster, and how many of them the chip holds at once."""
    resident = int(usable(multiprocessors, kernel.split_k)) // kernel.split_k
    columns = kernel.block_n // 2 if p.gated else kernel.block_n
    return ceil_div(p.m, kernel.block_m) * ceil_div(p.n, columns), max(resident, 1)


def usable(multiprocessors: int, cluster: np.ndarray | int) -> np.ndarray:
    """Groups of multiprocessors do not divide evenly into larger clusters."""
    return np.where(np.asarray(cluster) <= 2, multiprocessors, multiprocessors * 10 // 11)


def tiled_terms(p: Point, kernel: Kernel, floor: float, multiprocessors: int) -> list[float]:
    """What the time of a tiled kernel depends on: rounds, blocks of k in each, whether there is an activation without a
    gate; and how long the bytes take at least, all of them and those of a full round."""
    tiles, resident = tiles_and_resident(p, kernel, multiprocessors)
    blocks = ceil_div(ceil_div(p.k, 64), kernel.split_k)
    return [ceil_div(tiles, resident), blocks, p.kind == "activated", floor, floor * resident / tiles]


def tiled_times(constants: np.ndarray, terms: np.ndarray) -> np.ndarray:
    """Of rows of constants, as TiledTime has them, and of terms."""
    start, round_, k_block, activation = constants.T
    rounds, blocks, activated, floor, full = terms.T
    one = round_ + k_block * blocks + activation * activated
    return (rounds - 1) * bounded(one, full) + bounded(start + one, floor - (rounds - 1) * full)


def bounded(times: np.ndarray, floors: np.ndarray) -> np.ndarray:
    """What the bytes take at least, and a little of the rest, which tells kernels apart where that decides."""
    return np.maximum(times, floors) + TIE * np.minimum(times, np.maximum(floors, 0))


def fit_tiled(
    kernels: list[Kernel], points: list[Point], bandwidth: float, multiprocessors: int
) -> dict[Kernel, TiledTime]:
    """By least squares, then by a random walk from there (see `searched`): what counts is the choice."""
    timed = [
        (index, point, kernel) for index, point in enumerate(points) for kernel in kernels if kernel in point.times
    ]
    terms = np.array([tiled_terms(p, kernel, p.bytes / bandwidth, multiprocessors) for _, p, kernel in timed])
    times = np.array([point.times[kernel] for _, point, kernel in timed])
    nearness = np.array([point.best for _, point, _ in timed]) / times
    of_kernel = np.array([kernels.index(kernel) for _, _, kernel in timed])
    loss_of = choice_loss(np.array([index for index, _, _ in timed]), times)
    first = np.array(
        [least_squares(*(each[of_kernel == i] for each in (terms, times, nearness))) for i in range(len(kernels))]
    )

    def loss(values: np.ndarray) -> float:
        return loss_of(tiled_times(values.reshape(first.shape)[of_kernel], terms))

    found = searched(first.ravel(), loss, spread=0.03)[1].reshape(first.shape)
    return {kernel: TiledTime(*(round(float(value), 3) for value in row)) for kernel, row in zip(kernels, found)}


def least_squares(terms: np.ndarray, times: np.ndarray, nearness: np.ndarray) -> np.ndarray:
    """The least relative error, above all where the kernel is near the best: elsewhere it need not be exact."""
    rounds, blocks, activated, _, _ = terms.T
    linear = np.stack([np.ones_like(rounds), rounds, rounds * blocks, rounds * activated], axis=1)
    return non_negative_least_squares(linear * (nearness / times)[:, None], nearness)


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


def streamed_terms(p: Point, kernel: Kernel) -> list[float]:
    """What the time of a streamed kernel depends on: rows of a tile, parts of k, CTAs, blocks of k a CTA."""
    ctas = ceil_div(p.m, kernel.block_m) * ceil_div(p.n, kernel.block_n) * kernel.split_k
    return [kernel.block_m, kernel.split_k, ctas, ceil_div(ceil_div(p.k, 64), kernel.split_k)]


def streamed_times(time: StreamedTime, terms: np.ndarray, floors: np.ndarray, multiprocessors: int) -> np.ndarray:
    rows, parts, ctas, blocks = terms.T
    load = np.maximum(1, ctas / (time.saturating * multiprocessors))
    rounds = np.ceil(ctas / usable(multiprocessors, parts))
    block = (time.k_block + time.k_row * rows) * load + (time.round_k_block + time.round_k_row * rows) * rounds
    split = time.split_2 * (parts >= 2) + time.split_4 * (parts >= 4) + time.split_8 * (parts >= 8)
    capacity = usable(multiprocessors, parts) * np.where(rows < 32, 3, 2)  # streamed_ctas() of cuda/sm90/gemm.h
    idle = np.where(ctas > capacity, np.ceil(ctas / capacity) * capacity / ctas - 1, 0)
    return bounded(time.start + split * load + blocks * block, floors * (1 + time.tail * idle))


def fit_streamed(kind: str, points: list[Point], constants: Constants, multiprocessors: int) -> StreamedTime:
    """By random walks from several starts (see `searched`), with the tiled kernels, as fitted, to choose from too."""
    of_point, terms, fixed, floors, times = [], [], [], [], []
    for index, point in enumerate(points):
        for kernel, measured in point.times.items():
            of_point.append(index)
            times.append(measured)
            floors.append(point.bytes / constants.bytes_per_microsecond)
            terms.append(streamed_terms(point, kernel))
            fixed.append(np.nan if kernel.streamed else constants.microseconds(point, kernel, multiprocessors))
    terms, fixed, floors = map(np.array, (terms, fixed, floors))
    loss_of = choice_loss(np.array(of_point), np.array(times))

    def loss(values: np.ndarray) -> float:
        streamed = streamed_times(StreamedTime(*values), terms, floors, multiprocessors)
        return loss_of(np.where(np.isnan(fixed), streamed, fixed))

    random = np.random.default_rng(0)
    first = np.array(astuple(StreamedTime()))
    starts = [first, *(first * np.exp(random.normal(0, 0.3, len(first))) for _ in range(STARTS - 1))]
    found = [searched(start, loss, spread=0.3, what=f"streamed, {kind}") for start in starts]
    return StreamedTime(*(round(float(value), 5) for value in min(found, key=lambda each: each[0])[1]))


def choice_loss(of_point: np.ndarray, times: np.ndarray) -> Callable[[np.ndarray], float]:
    """The loss of choosing, at every point, the kernel of the least estimate, and some of the estimates' errors, above
    all near the best kernel: without these, the choice is worse at widths that were not timed.

    of_point: the point of each time, ascending.
    """
    starts = np.flatnonzero(np.diff(of_point, prepend=-1))
    best = np.minimum.reduceat(times, starts)
    weights = (np.repeat(best, np.diff(starts, append=len(times))) / times) ** 3

    def loss(estimates: np.ndarray) -> float:
        chosen = np.lexsort((estimates, of_point))[starts]
        slower = times[chosen] / best - 1
        error = np.average((estimates / times - 1) ** 2, weights=weights)
        return float(np.mean(slower**2) + 0.1 * np.mean(slower) + 0.15 * error)

    return loss


def searched(
    values: np.ndarray, loss: Callable[[np.ndarray], float], spread: float, what: str = "tiled"
) -> tuple[float, np.ndarray]:
    """The least loss on a random walk, and where: the choice of kernels has no gradient. The same at each run."""
    random = np.random.default_rng(0)
    least = loss(values)
    for step in trange(STEPS, desc=what, leave=False):
        steps = random.normal(0, spread * 0.7 ** (step // 1000), len(values))
        moved = values * np.exp(steps * (random.random(len(values)) < 0.3))
        if (moved_loss := loss(moved)) < least:
            values, least = moved, moved_loss
    return least, values


def saved_by_torch(point: Point, choose: Callable[[Point], Kernel]) -> float:
    """In units of the faster way's time; negative where ours is the faster one."""
    ours = point.times[choose(point)]
    return (ours - point.torch) / min(point.torch, ours)


def torch_unless_near_floor(points: list[tuple[int, float, float]]) -> tuple[Rows, float]:
    """From which m on to take torch's GEMM, and up to how many times the floor ours for all that: so that ours saves
    most, where what it costs counts for more, as torch's way is what it replaces. points: m, the estimate over the
    floor, what torch's GEMM saves.
    """

    def saved(first: int, near_floor: float) -> float:
        ours = [s for m, over, s in points if m < first or (m <= NEAR_FLOOR_ROWS and over <= near_floor)]
        return -sum(s if s < 0 else COST_OF_OURS * s for s in ours)

    firsts = sorted({m for m, _, _ in points})
    index, near_floor = max(
        itertools.product(range(len(firsts)), np.arange(1.0, 1.51, 0.05)),
        key=lambda choice: saved(firsts[choice[0]], choice[1]),
    )
    return Rows(firsts[index - 1] + 1 if index else 1, None), round(float(near_floor), 2)


def torch_rows(points: Iterable[Point], choose: Callable[[Point], Kernel]) -> Rows | None:
    """The run of measured m for which to take torch's GEMM saves most."""
    saved = defaultdict(float)  # by taking torch's way at each m
    for point in points:
        saved[point.m] += saved_by_torch(point, choose)
    measured = sorted(saved)
    runs = itertools.combinations(range(len(measured) + 1), 2)
    start, end = max(runs, key=lambda run: sum(saved[m] for m in measured[slice(*run)]))
    if sum(saved[m] for m in measured[start:end]) <= 0:
        return None
    last = None if end == len(measured) else measured[end - 1]
    return Rows(measured[start - 1] + 1 if start else 1, last)
