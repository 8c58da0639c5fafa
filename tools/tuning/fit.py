"""Fits the constants of the kernels' time model (cuda/sm90/plan/time_model.h) to measured times.

The formulas are those of the package, called through `Model`; none is repeated here.
"""

from collections.abc import Callable
from dataclasses import astuple, dataclass, fields

import numpy as np
import scipy.optimize
from tqdm import tqdm

from tuning.kernels import STREAMED, Kernel, Point
from tuning.model import KERNEL, SHAPE, Model

TORCH_ROWS = 33  # from here on torch's GEMM may be faster
LARGE_BYTES = 100e6  # more than stays in the L2 cache between runs
MANY_ROWS = 33  # from here on a product is bound by memory, not by its start
EVALUATIONS = 8000  # loss evaluations of a search for the constants of tiled kernels
GENERATIONS, POPULATION = 150, 10  # for the others; the second number is per constant
MOST_LOG = 3.0  # a constant is varied by factors of up to e to this power


@dataclass
class TiledTime:
    """As in cuda/sm90/plan/time_model.h, which explains the constants."""

    start: float = 0.0
    round: float = 0.0
    k_block: float = 0.0
    activation: float = 0.0


@dataclass
class StreamedTime:
    """As in cuda/sm90/plan/time_model.h, which explains the constants. A search starts from the defaults."""

    start: float = 2.0
    wide: float = 0.5
    cta: float = 0.5
    split_2: float = 1.0
    split_4: float = 0.5
    split_8: float = 0.5
    k_block: float = 0.1
    k_row: float = 0.001
    shared_k_column: float = 0.001
    shared_k_row: float = 0.001
    tail: float = 0.1
    result: float = 0.0001


@dataclass
class TorchTime:
    """As in cuda/sm90/plan/time_model.h, which explains the constants. A search starts from the defaults."""

    start: float = 2.5
    share_of_bandwidth: float = 0.85
    small_block: float = 0.1
    large_block: float = 0.33
    split: float = 4.0
    pointwise_start: float = 1.5
    pointwise_share: float = 1.0


@dataclass
class Constants:
    tiled: dict[bool, dict[Kernel, TiledTime]]  # by gated
    streamed: dict[str, StreamedTime]  # by Point.streamed
    bytes_per_microsecond: float
    flops_per_microsecond: float
    torch: TorchTime

    def estimates(self, model: Model, point: Point) -> dict[Kernel, float]:
        """The estimated microseconds of each kernel that was timed at the point."""
        found = {}
        for kernel in point.times:
            time = self.tiled[point.gated][kernel] if kernel.tiled else self.streamed[point.streamed]
            pairs = Pairs(model, [(point, kernel)], self.bytes_per_microsecond)
            found[kernel] = float(pairs.estimates(np.array(astuple(time)))[0])
        return found

    def choose(self, model: Model, point: Point) -> Kernel:
        estimates = self.estimates(model, point)
        return min(estimates, key=estimates.get)


class Pairs:
    """Points and kernels to estimate together."""

    def __init__(self, model: Model, pairs: list[tuple[Point, Kernel]], bytes_per_microsecond: float):
        self._model, self._bandwidth = model, bytes_per_microsecond
        self._shapes = np.array([model.shape(p.kind, p.m, p.n, p.k) for p, _ in pairs], SHAPE)
        self._kernels = np.array([tuple(kernel) for _, kernel in pairs], KERNEL)

    def estimates(self, constants: np.ndarray) -> np.ndarray:
        """Estimates with one row of constants for each pair, or one for all."""
        return self._model.estimates(self._shapes, self._kernels, constants, self._bandwidth)


def fit(points: list[Point], model: Model) -> Constants:
    large = [point for point in points if point.bytes > LARGE_BYTES and point.m >= MANY_ROWS] or points
    bandwidth = round(max(point.bytes / point.best for point in large), -5)
    arithmetic = round(max(point.flops / min(point.best, point.torch) for point in points), -7)
    tiled = {
        gated: fit_tiled([point for point in points if point.gated == gated], bandwidth, model)
        for gated in (True, False)
    }
    torch = fit_torch([point for point in points if not point.gated and point.m >= TORCH_ROWS], bandwidth, model)
    constants = Constants(tiled, {}, bandwidth, arithmetic, torch)
    for kind in STREAMED:
        constants.streamed[kind] = fit_streamed(kind, [p for p in points if p.streamed == kind], constants, model)
    return constants


def fit_tiled(points: list[Point], bandwidth: float, model: Model) -> dict[Kernel, TiledTime]:
    """Fits by least squares, then by a search from there for the best choice."""
    timed = [(i, point, kernel) for i, point in enumerate(points) for kernel in point.times if kernel.tiled]
    kernels = list(dict.fromkeys(kernel for _, _, kernel in timed))
    times = np.array([point.times[kernel] for _, point, kernel in timed])
    nearness = np.array([point.best for _, point, _ in timed]) / times
    of_kernel = np.array([kernels.index(kernel) for _, _, kernel in timed])
    pairs = [(point, kernel) for _, point, kernel in timed]
    # If bytes take no time, the estimate is linear in the constants: setting one at a time gives the columns.
    unbound = Pairs(model, pairs, np.inf)
    terms = np.stack([unbound.estimates(unit) for unit in np.eye(len(fields(TiledTime)))], axis=1)
    first = np.array(
        [least_squares(*(each[of_kernel == i] for each in (terms, times, nearness))) for i in range(len(kernels))]
    )
    bound, loss_of = Pairs(model, pairs, bandwidth), choice_loss(np.array([i for i, _, _ in timed]), times)

    def loss(values: np.ndarray) -> float:
        return loss_of(bound.estimates(values.reshape(first.shape)[of_kernel]))

    found = searched(first.ravel(), loss).reshape(first.shape)
    return {kernel: TiledTime(*(round(float(value), 3) for value in row)) for kernel, row in zip(kernels, found)}


def least_squares(terms: np.ndarray, times: np.ndarray, nearness: np.ndarray) -> np.ndarray:
    """Minimises the relative error, weighted toward kernels near the best: elsewhere it need not be exact."""
    return scipy.optimize.nnls(terms * (nearness / times)[:, None], nearness)[0]


def fit_streamed(kind: str, points: list[Point], constants: Constants, model: Model) -> StreamedTime:
    """Fits by a search, with the fitted tiled kernels as alternatives."""
    points = [point for point in points if not all(kernel.tiled for kernel in point.times)]
    timed = [(i, point, kernel) for i, point in enumerate(points) for kernel in point.times]
    times = np.array([point.times[kernel] for _, point, kernel in timed])
    loss_of = choice_loss(np.array([i for i, _, _ in timed]), times)
    is_tiled = np.array([kernel.tiled for _, _, kernel in timed])

    def pairs(tiled: bool) -> Pairs:
        chosen = [(point, kernel) for _, point, kernel in timed if kernel.tiled == tiled]
        return Pairs(model, chosen, constants.bytes_per_microsecond)

    of_tiled = constants.tiled[kind == "gated"]
    rows = np.array([astuple(of_tiled[kernel]) for _, _, kernel in timed if kernel.tiled])
    estimates = np.empty(len(timed))
    if is_tiled.any():
        estimates[is_tiled] = pairs(True).estimates(rows)
    streamed = pairs(False)

    def loss(values: np.ndarray) -> float:
        estimates[~is_tiled] = streamed.estimates(values)
        return loss_of(estimates)

    return StreamedTime(*evolved(astuple(StreamedTime()), loss, f"streamed, {kind}"))


def choice_loss(of_point: np.ndarray, times: np.ndarray) -> Callable[[np.ndarray], float]:
    """The loss of choosing the kernel with the smallest estimate at every point, plus a part of the estimates' errors,
    weighted toward the best kernel: without that part, the choice is worse at widths that were not timed.

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


def searched(values: np.ndarray, loss: Callable[[np.ndarray], float]) -> np.ndarray:
    """Searches for the least loss near these values, each times a factor. The choice of kernels has no gradient."""
    options = {"maxfev": EVALUATIONS, "ftol": 1e-5}
    found = scipy.optimize.minimize(
        lambda logs: loss(values * np.exp(logs)), np.zeros(len(values)), method="Powell", options=options
    )
    return values * np.exp(found.x)


def evolved(values: tuple[float, ...], loss: Callable[[np.ndarray], float], name: str) -> list[float]:
    """Searches for the least loss near these values, each times a factor, by differential evolution. Powell's method
    from several starts ends in worse optima here.
    """
    first = np.array(values)
    bounds, start = [(-MOST_LOG, MOST_LOG)] * len(first), np.zeros(len(first))
    size = {"maxiter": GENERATIONS, "popsize": POPULATION, "tol": 0, "polish": False}
    with tqdm(total=GENERATIONS, desc=name, leave=False) as progress:

        def tell(*_: object) -> None:
            progress.update()

        found = scipy.optimize.differential_evolution(
            lambda logs: loss(first * np.exp(logs)), bounds, **size, x0=start, rng=0, callback=tell
        )
    return [round(float(value), 5) for value in first * np.exp(found.x)]


def fit_torch(points: list[Point], bandwidth: float, model: Model) -> TorchTime:
    """Minimises the median relative error, because torch sometimes chooses a kernel far from its best, which no
    estimate can predict.
    """
    shapes = np.array([model.shape(p.kind, p.m, p.n, p.k) for p in points], SHAPE)
    times = np.array([point.torch for point in points])

    def loss(values: np.ndarray) -> float:
        return float(np.mean(np.abs(np.log(model.torch_estimates(shapes, values, bandwidth) / times))))

    return TorchTime(*evolved(astuple(TorchTime()), loss, "torch"))
