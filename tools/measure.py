"""Timing of everything here: what is compared takes turns inside one process, and medians count, never single times.

A machine that slows down as it warms up, or is busy for a while, then slows all of them alike.
"""

import contextlib
import gc
import itertools
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


def gpu_microseconds(run: Callable[[], object], iterations: int) -> tuple[float, float]:
    """GPU busy time and number of kernels of one call, averaged over `iterations` calls.

    Busy time is the union of the kernels' intervals: a kernel that starts while the one before it drains is not counted
    twice.
    """
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as trace:
        for _ in range(iterations):
            run()
        torch.cuda.synchronize()
    kernels = _kernels_of(trace)
    return _busy(kernels) / iterations, len(kernels) / iterations


def _kernels_of(trace: profile) -> list[tuple[float, float, str]]:
    """Start, end and name of what ran on the GPU, in the order of the starts."""
    on_gpu = [event for event in trace.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return sorted((event.time_range.start, event.time_range.end, event.name) for event in on_gpu)


def _busy(kernels: list[tuple[float, float, str]]) -> float:
    busy, reached = 0.0, float("-inf")
    for start, end, _ in kernels:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return busy


def gpu_microseconds_call_by_call(
    calls: Mapping[Hashable, Callable[[], object]], rounds: int
) -> dict[Hashable, dict[str, float]]:
    """GPU busy time and number of kernels of a call: medians of single calls, each with one a round, in random order.

    Products of large matrices make the GPU lower its clock, by up to 15% and for as long as it likes. Turns of several
    calls each meet clocks of their own; here all calls meet the same.
    """
    marker = torch.zeros(1, dtype=torch.uint8, device="cuda")
    order = []
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as trace:
        for _ in range(rounds):
            for name in random.sample(list(calls), len(calls)):
                torch.bitwise_not(marker, out=marker)  # nobody else uses this kernel: it tells where a call begins
                calls[name]()
                order.append(name)
            torch.cuda.synchronize()
    found: list[list] = []
    for kernel in _kernels_of(trace):
        if "bitwise_not" in kernel[2]:
            found.append([])
        elif found:
            found[-1].append(kernel)
    if len(found) != len(order):
        raise RuntimeError(f"the profiler saw {len(found)} of {len(order)} calls")
    samples = {name: [] for name in calls}
    for name, kernels in zip(order, found, strict=True):
        samples[name].append({"kernel_us": _busy(kernels), "kernels": len(kernels)})
    return {name: _summary(of) for name, of in samples.items()}


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
    return _deeper(run, random.randrange(frames_of_chunk))


def _deeper(run: Callable[[], object], frames: int) -> object:
    return run() if frames == 0 else _deeper(run, frames - 1)


def wall_microseconds(run: Callable[[], object], iterations: int) -> float:
    """Time of one call with the GPU waited for at the end, launch gaps included."""
    return at_any_depth(partial(_times, run, iterations))[0]


def cpu_microseconds(run: Callable[[], object], iterations: int) -> float:
    """CPU time of one call: what the caller's thread spends before it may go on."""
    return at_any_depth(partial(_times, run, iterations))[1]


def _times(run: Callable[[], object], iterations: int) -> tuple[float, float]:
    """Microseconds of one call, with the GPU waited for at the end, and of the caller's thread alone."""
    synchronize()
    start = time.perf_counter()
    for _ in range(iterations):
        run()
    launched = time.perf_counter()
    synchronize()
    return tuple((end - start) / iterations * 1e6 for end in (time.perf_counter(), launched))


def iterations_within(run: Callable[[], object], budget_us: float) -> int:
    """The number of calls that fit the budget, after some that warm up."""
    for _ in range(3):
        run()
    return max(3, min(100, int(budget_us / wall_microseconds(run, 3))))


def in_turns(turns: Mapping[Hashable, Callable[[], dict[str, float]]], rounds: int) -> dict[Hashable, dict[str, float]]:
    """Medians of the figures that the turns return, over `rounds` rounds in which each has one turn.

    Beside every figure stands its spread, as `<figure>_spread`: from the least to the greatest, in units of the median.
    """
    samples = {name: [] for name in turns}
    for _ in range(rounds):
        for name, turn in turns.items():
            samples[name].append(turn())
    return {name: _summary(found) for name, found in samples.items()}


def _summary(samples: list[dict[str, float]]) -> dict[str, float]:
    summary = {}
    for key in samples[0]:
        values = [sample[key] for sample in samples]
        summary[key] = statistics.median(values)
        summary[f"{key}_spread"] = (max(values) - min(values)) / summary[key] if summary[key] else 0.0
    return summary


def compare(
    providers: dict[str, Callable[[], object]], rounds: int = 5, budget_us: float = 20_000.0
) -> dict[str, dict[str, float]]:
    """Figures of a call of each provider, in turns: wall_us, and on a GPU kernel_us, kernels and cpu_us.

    A turn is as many calls as fit into `budget_us`, from 3 to 100.
    """
    turns = {name: partial(_turn, run, iterations_within(run, budget_us)) for name, run in providers.items()}
    return in_turns(turns, rounds)


def copies_in_turns(
    made: Mapping[str, Sequence[Callable[[], object]]], rounds: int, budget_us: float
) -> dict[str, list[dict[str, float]]]:
    """Figures of each copy of each variant: the milliseconds of a call, ``ms``, and their ``ratio`` to the first's.

    In a turn a copy of each variant runs, in random order, one right after the other: a host's processor may be half as
    fast for seconds, and whoever waits for it then is slow. A ratio is that of such neighbours. Figures are medians
    over the rounds. There may be fewer copies of a variant than of the first one.
    """
    turns = {}
    for copy, runs in enumerate(itertools.zip_longest(*made.values())):
        there = {name: run for name, run in zip(made, runs, strict=True) if run is not None}
        turns[copy] = partial(_neighbours, there, {name: iterations_within(there[name], budget_us) for name in there})
    found = in_turns(turns, rounds)
    return {
        name: [{what: found[copy][f"{name} {what}"] for what in ("ms", "ratio")} for copy in range(len(made[name]))]
        for name in made
    }


def _neighbours(runs: Mapping[str, Callable[[], object]], iterations: Mapping[str, int]) -> dict[str, float]:
    shuffled = random.sample(list(runs), len(runs))
    times = {name: wall_microseconds(runs[name], iterations[name]) / 1e3 for name in shuffled}
    first = times[next(iter(runs))]
    return {f"{name} ms": time for name, time in times.items()} | {
        f"{name} ratio": time / first for name, time in times.items()
    }


def _turn(run: Callable[[], object], iterations: int) -> dict[str, float]:
    wall_us = wall_microseconds(run, iterations)
    if not torch.cuda.is_available():
        return {"wall_us": wall_us}
    kernel_us, kernels = gpu_microseconds(run, max(3, iterations // 4))
    cpu_us = cpu_microseconds(run, min(20, iterations))
    return {"kernel_us": kernel_us, "kernels": kernels, "wall_us": wall_us, "cpu_us": cpu_us}


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Nothing of earlier calls is freed meanwhile: on a GPU that would count as memory which this gives back.

    Garbage is not collected, and backwards run on the calling thread: a thread of autograd's own may still hold
    gradients when the backward that it ran has returned.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        if was_enabled:
            gc.enable()


@_undisturbed()
def saved_and_peak(forward: Callable[[], torch.Tensor], backward: Callable[[torch.Tensor], object]) -> tuple[int, int]:
    """Bytes that the forward leaves for the backward, its result apart, and the most that were allocated in both."""
    if torch.cuda.is_available():
        synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = forward()
        saved = torch.cuda.memory_allocated() - before - out.nbytes
        backward(out)
        return saved, torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        out = forward()
        with torch.profiler.record_function("between"):
            pass
        backward(out)
    held = peak = saved = 0
    for event in sorted(trace.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
        elif event.name() == "between":
            saved = held - out.nbytes
    return saved, peak


def captured(run: Callable[[], object], calls: int) -> torch.cuda.CUDAGraph:
    """A graph of that many calls. The current stream must not be the default one, which captures no graphs."""
    run()  # what happens once, like loading the kernel, must not be captured
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()
    for _ in range(calls):
        run()
    graph.capture_end()
    return graph


def compare_in_graphs(
    providers: dict[str, Callable[[], object]], rounds: int = 5, budget_us: float = 20_000.0
) -> dict[str, dict[str, float]]:
    """Time of a call of each provider in a CUDA graph, which the CPU cannot keep waiting: graph_us, in turns.

    A turn replays a graph of as many calls as :func:`compare` makes.
    """
    with torch.cuda.stream(torch.cuda.Stream()):
        turns = {name: partial(_replay, *_graph_within(run, budget_us)) for name, run in providers.items()}
        return in_turns(turns, rounds)


def _graph_within(run: Callable[[], object], budget_us: float) -> tuple[torch.cuda.CUDAGraph, int]:
    calls = iterations_within(run, budget_us)
    graph = captured(run, calls)
    graph.replay()  # the first replay uploads the graph
    return graph, calls


def _replay(graph: torch.cuda.CUDAGraph, calls: int) -> dict[str, float]:
    return {"graph_us": replay_microseconds(graph) / calls}


def replay_microseconds(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def machine() -> dict[str, str]:
    """The facts that a figure depends on."""
    facts = {"torch": torch.__version__}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        return facts | {
            "gpu": properties.name,
            "multiprocessors": str(properties.multi_processor_count),
            "cuda": str(torch.version.cuda),
            "copy_bandwidth_GBps": f"{copy_bandwidth() / 1e9:.0f}",
        }
    return facts | {
        "cpu": _cpu_name(),
        "threads": str(torch.get_num_threads()),
        "instructions": torch.backends.cpu.get_cpu_capability() + (" and AMX" if _has_amx() else ""),
        "copy_bandwidth_GBps": f"{copy_bandwidth() / 1e9:.0f}",
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _has_amx() -> bool:
    return bool(torch.cpu.get_capabilities().get("amx_tile", False))


def copy_bandwidth(megabytes: int = 512) -> float:
    """Bytes per second, read plus written, of a copy within the device's memory."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    source = torch.empty(megabytes << 20, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    return 2 * source.numel() / _median_seconds(lambda: target.copy_(source))


def product_rate(dtype: torch.dtype) -> float:
    """Floating-point operations per second of PyTorch's product of square matrices, of the size that suits it best."""
    on_gpu = torch.cuda.is_available()
    rates = []
    for n in (4096, 8192) if on_gpu else (512, 1024, 2048):
        a, b = (torch.randn(n, n, dtype=dtype, device="cuda" if on_gpu else "cpu") for _ in range(2))
        rates.append(2 * n**3 / _median_seconds(lambda a=a, b=b: a @ b))
    return max(rates)


def _median_seconds(run: Callable[[], object]) -> float:
    figures = compare({"": run})[""]
    return figures.get("kernel_us", figures["wall_us"]) * 1e-6
