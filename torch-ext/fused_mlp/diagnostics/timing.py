"""Compares the times of several calls: they run in interleaved turns in one process and are compared by their medians.

A machine that slows down as it warms up, or is busy for a while, then slows all of them alike; noisy figures give no
verdict. This file imports nothing from the package, because the repository's benchmarks load it on its own.
"""

from __future__ import annotations

import random
import statistics
import time
from functools import partial
from typing import Callable, Dict, Hashable, List, Mapping, Tuple

import torch

NOISY = 0.15  # figures with a larger spread are meaningless
EVEN = 0.02  # ratios this close to 1 are neither a gain nor a loss

_chance = random.Random()  # a private generator leaves the user's random state unchanged


def synchronize() -> None:
    """Wait for the GPU, if there is one; a call on a CPU is done when it returns."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def at_any_depth(run: Callable[[], object]) -> object:
    """Call ``run`` at a random depth of Python's stack, and return its result.

    CPython allocates frames in chunks of 16 KiB. It maps a chunk when a call does not fit the previous one, and unmaps
    it when that call returns, so calls in a loop that happens to sit at the end of a chunk take a page fault each. At
    some depths a compiled Gemma 2 takes 1.4 times as long, while a variant with different frames next to it does not.
    """
    frames_of_chunk = 150  # frames of _deeper that fill a chunk, and a few more
    return _deeper(run, _chance.randrange(frames_of_chunk))


def _deeper(run: Callable[[], object], frames: int) -> object:
    return run() if frames == 0 else _deeper(run, frames - 1)


def wall_microseconds(run: Callable[[], object], iterations: int) -> float:
    """Return the time of one call, including launch gaps and a final wait for the GPU."""
    return at_any_depth(partial(_times, run, iterations))[0]


def cpu_microseconds(run: Callable[[], object], iterations: int) -> float:
    """Return the CPU time of one call: how long it occupies the caller's thread."""
    return at_any_depth(partial(_times, run, iterations))[1]


def _times(run: Callable[[], object], iterations: int) -> Tuple[float, float]:
    """Return the microseconds of one call, with a final wait for the GPU, and in the caller's thread alone."""
    synchronize()
    start = time.perf_counter()
    for _ in range(iterations):
        run()
    launched = time.perf_counter()
    synchronize()
    whole, own = ((end - start) / iterations * 1e6 for end in (time.perf_counter(), launched))
    return whole, own


def iterations_within(run: Callable[[], object], budget_us: float, least: int = 3) -> int:
    """Return the number of calls that fit the budget, from ``least`` to 100, measured after a few warm-up calls."""
    for _ in range(3):
        run()
    return max(least, min(100, int(budget_us / wall_microseconds(run, least))))


def in_turns(turns: Mapping[Hashable, Callable[[], Dict[str, float]]], rounds: int) -> Dict[Hashable, Dict[str, float]]:
    """Return the medians of the figures that the turns report, over ``rounds`` rounds with one turn each.

    Each figure comes with its spread, as ``<figure>_spread``: maximum minus minimum, in units of the median.
    """
    return {name: summary(found) for name, found in samples_in_turns(turns, rounds).items()}


def samples_in_turns(
    turns: Mapping[Hashable, Callable[[], Dict[str, float]]], rounds: int
) -> Dict[Hashable, List[Dict[str, float]]]:
    """Return the figures of every turn, by round."""
    samples: Dict[Hashable, List[Dict[str, float]]] = {name: [] for name in turns}
    for _ in range(rounds):
        for name, turn in turns.items():
            samples[name].append(turn())
    return samples


def summary(samples: List[Dict[str, float]]) -> Dict[str, float]:
    """Return the median and the spread of each figure, as :func:`in_turns` does."""
    found = {}
    for key in samples[0]:
        values = [sample[key] for sample in samples]
        found[key] = statistics.median(values)
        found[f"{key}_spread"] = (max(values) - min(values)) / found[key] if found[key] else 0.0
    return found


def middle(values: List[float]) -> Tuple[float, float]:
    """Return the median of at least two values, and their interquartile range in units of the median; a few interrupted
    turns do not change it."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return median, (high - low) / median if median else 0.0


def _nothing(name: str) -> None:
    pass


def neighbours(
    runs: Mapping[str, Callable[[], object]],
    iterations: Mapping[str, int],
    prepare: Callable[[str], object] = _nothing,
) -> Dict[str, float]:
    """Time several calls right after one another, in random order: for each ``<name> ms`` and ``<name> ratio``, its
    time over that of the first one named. ``prepare(name)`` runs before each call and is not timed.

    A host's processor may run at half speed for seconds, which slows everything that waits for it. Calls that are close
    in time see the same speed.
    """
    times = {}
    for name in _chance.sample(list(runs), len(runs)):
        prepare(name)
        times[name] = wall_microseconds(runs[name], iterations[name]) / 1e3
    first = times[next(iter(runs))]
    figures = {f"{name} ms": times[name] for name in runs}
    return {**figures, **{f"{name} ratio": times[name] / first for name in runs}}


def verdict(ratio: float, spread: float) -> str:
    """Judge a time that is ``ratio`` of the reference, with the given spread over the turns: "faster", "even",
    "slower", or "too noisy to tell"."""
    if spread > NOISY:
        return "too noisy to tell"
    if ratio < 1 - EVEN:
        return "faster"
    return "even" if ratio <= 1 + EVEN else "slower"
