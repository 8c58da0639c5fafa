"""Times calls against each other: they take turns inside one process, medians count, and noise is no verdict.

A machine that slows down as it warms up, or is busy for a while, then slows all of them alike. This file imports
nothing of the package: the benchmarks of the repository load it by itself.
"""

from __future__ import annotations

import random
import statistics
import time
from functools import partial
from typing import Callable, Dict, Hashable, List, Mapping, Tuple

import torch

NOISY = 0.15  # figures that spread further than this say nothing
EVEN = 0.02  # ratios this close to 1 are neither a gain nor a loss

_chance = random.Random()  # a user's own draws stay what they are


def synchronize() -> None:
    """Waits for the GPU, where there is one; on a CPU a call is done when it returns."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def at_any_depth(run: Callable[[], object]) -> object:
    """Calls ``run`` at a random depth of Python's stack, and returns its result.

    CPython keeps frames in chunks of 16 KiB, maps a chunk when a call does not fit the one before, and unmaps it when
    that call returns. Calls in a loop that happens to stand at the end of a chunk take a page fault each: at some
    depths a compiled Gemma 2 takes 1.4 times as long, and a variant with other frames beside it does not.
    """
    frames_of_chunk = 150  # frames of _deeper, and a few more
    return _deeper(run, _chance.randrange(frames_of_chunk))


def _deeper(run: Callable[[], object], frames: int) -> object:
    return run() if frames == 0 else _deeper(run, frames - 1)


def wall_microseconds(run: Callable[[], object], iterations: int) -> float:
    """Time of one call with the GPU waited for at the end, launch gaps included."""
    return at_any_depth(partial(_times, run, iterations))[0]


def cpu_microseconds(run: Callable[[], object], iterations: int) -> float:
    """CPU time of one call: what the caller's thread spends before it may go on."""
    return at_any_depth(partial(_times, run, iterations))[1]


def _times(run: Callable[[], object], iterations: int) -> Tuple[float, float]:
    """Microseconds of one call, with the GPU waited for at the end, and of the caller's thread alone."""
    synchronize()
    start = time.perf_counter()
    for _ in range(iterations):
        run()
    launched = time.perf_counter()
    synchronize()
    whole, own = ((end - start) / iterations * 1e6 for end in (time.perf_counter(), launched))
    return whole, own


def iterations_within(run: Callable[[], object], budget_us: float, least: int = 3) -> int:
    """The number of calls that fit the budget, from ``least`` to 100, after some that warm up."""
    for _ in range(3):
        run()
    return max(least, min(100, int(budget_us / wall_microseconds(run, least))))


def in_turns(turns: Mapping[Hashable, Callable[[], Dict[str, float]]], rounds: int) -> Dict[Hashable, Dict[str, float]]:
    """Medians of the figures that the turns return, over ``rounds`` rounds in which each has one turn.

    Beside every figure stands its spread, as ``<figure>_spread``: from the least to the greatest, in units of the
    median.
    """
    return {name: summary(found) for name, found in samples_in_turns(turns, rounds).items()}


def samples_in_turns(
    turns: Mapping[Hashable, Callable[[], Dict[str, float]]], rounds: int
) -> Dict[Hashable, List[Dict[str, float]]]:
    """The figures of each of the turns themselves, by round."""
    samples: Dict[Hashable, List[Dict[str, float]]] = {name: [] for name in turns}
    for _ in range(rounds):
        for name, turn in turns.items():
            samples[name].append(turn())
    return samples


def summary(samples: List[Dict[str, float]]) -> Dict[str, float]:
    """Median and spread of each figure, as :func:`in_turns` returns them."""
    found = {}
    for key in samples[0]:
        values = [sample[key] for sample in samples]
        found[key] = statistics.median(values)
        found[f"{key}_spread"] = (max(values) - min(values)) / found[key] if found[key] else 0.0
    return found


def middle(values: List[float]) -> Tuple[float, float]:
    """The median of at least two values, and the spread of their middle half in units of it: the interquartile range,
    which a few turns that something interrupts do not change."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return median, (high - low) / median if median else 0.0


def _nothing(name: str) -> None:
    pass


def neighbours(
    runs: Mapping[str, Callable[[], object]],
    iterations: Mapping[str, int],
    prepare: Callable[[str], object] = _nothing,
) -> Dict[str, float]:
    """One turn of several calls right after one another, in random order: for each ``<name> ms`` and ``<name> ratio``,
    its time over that of the first one named. ``prepare(name)`` is called before, and not timed.

    A host's processor may be half as fast for seconds, and whoever waits for it then is slow. Neighbours meet the same.
    """
    times = {}
    for name in _chance.sample(list(runs), len(runs)):
        prepare(name)
        times[name] = wall_microseconds(runs[name], iterations[name]) / 1e3
    first = times[next(iter(runs))]
    figures = {f"{name} ms": times[name] for name in runs}
    return {**figures, **{f"{name} ratio": times[name] / first for name in runs}}


def verdict(ratio: float, spread: float) -> str:
    """The meaning of a time that is ``ratio`` of the other one's, where the turns of either spread as far as that:
    "faster", "even", "slower", or "too noisy to tell"."""
    if spread > NOISY:
        return "too noisy to tell"
    if ratio < 1 - EVEN:
        return "faster"
    return "even" if ratio <= 1 + EVEN else "slower"
