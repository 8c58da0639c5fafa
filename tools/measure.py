"""GPU time, memory and machine facts, in addition to the interleaved wall times of the package's ``timing``."""

import contextlib
import gc
import itertools
import random
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch.profiler import ProfilerActivity, profile

import project

timing = project.package_file("diagnostics/timing.py")
processors = project.package_file("diagnostics/machine.py")
at_any_depth, synchronize = timing.at_any_depth, timing.synchronize
wall_microseconds, cpu_microseconds = timing.wall_microseconds, timing.cpu_microseconds
iterations_within, in_turns, neighbours = timing.iterations_within, timing.in_turns, timing.neighbours


def gpu_microseconds(run: Callable[[], object], iterations: int) -> tuple[float, float]:
    """GPU busy time and number of kernels of one call, averaged over `iterations` calls.

    Busy time is the union of the kernels' intervals, so a kernel that starts while the previous one drains is not
    counted twice.
    """
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as trace:
        for _ in range(iterations):
            run()
        torch.cuda.synchronize()
    kernels = _kernels_of(trace)
    return _busy(kernels) / iterations, len(kernels) / iterations


def _kernels_of(trace: profile) -> list[tuple[float, float, str]]:
    """Start, end and name of all GPU activities, ordered by start."""
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
    """GPU busy time and number of kernels of a call: medians over rounds with one call of each, in random order.

    Large matrix products make the GPU lower its clock, by up to 15% and for an unknown time. Turns of several calls
    would run at different clocks; single calls in random order see the same.
    """
    marker = torch.zeros(1, dtype=torch.uint8, device="cuda")
    order = []
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as trace:
        for _ in range(rounds):
            for name in random.sample(list(calls), len(calls)):
                torch.bitwise_not(marker, out=marker)  # nothing else uses this kernel, so it marks the start of a call
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
    return {name: timing.summary(of) for name, of in samples.items()}


def compare(
    providers: dict[str, Callable[[], object]], rounds: int = 5, budget_us: float = 20_000.0
) -> dict[str, dict[str, float]]:
    """Figures of one call of each provider, interleaved: wall_us, and on a GPU kernel_us, kernels and cpu_us.

    A turn makes as many calls as fit into `budget_us`, from 3 to 100.
    """
    turns = {name: partial(_turn, run, iterations_within(run, budget_us)) for name, run in providers.items()}
    return in_turns(turns, rounds)


def copies_in_turns(
    made: Mapping[str, Sequence[Callable[[], object]]], rounds: int, budget_us: float
) -> dict[str, list[dict[str, float]]]:
    """Figures of each copy of each variant: the milliseconds of a call, ``ms``, and their ``ratio`` to the first's.

    In a turn one copy of each variant runs, directly after one another, and a ratio compares copies of one turn.
    Figures are medians over the rounds. A variant may have fewer copies than the first one.
    """
    turns = {}
    for copy, runs in enumerate(itertools.zip_longest(*made.values())):
        there = {name: run for name, run in zip(made, runs, strict=True) if run is not None}
        turns[copy] = partial(neighbours, there, {name: iterations_within(there[name], budget_us) for name in there})
    found = in_turns(turns, rounds)
    return {
        name: [{what: found[copy][f"{name} {what}"] for what in ("ms", "ratio")} for copy in range(len(made[name]))]
        for name in made
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
    """Prevents memory of earlier calls from being freed meanwhile, which a GPU would count as freed by this call.

    Disables garbage collection and runs backwards on the calling thread, because autograd's own threads may still hold
    gradients after a backward has returned.
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
    """Bytes that the forward saves for the backward, without its result, and the peak of the allocations in both."""
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
    """A graph of that many calls. The current stream must not be the default stream, which cannot capture graphs."""
    run()  # one-time work, like loading the kernel, must not be captured
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()
    try:
        for _ in range(calls):
            run()
    finally:  # otherwise the stream would stay in capture mode
        graph.capture_end()
    return graph


def compare_in_graphs(
    providers: dict[str, Callable[[], object]], rounds: int = 5, budget_us: float = 20_000.0
) -> dict[str, dict[str, float]]:
    """Time of a call of each provider in a CUDA graph, which the CPU cannot delay: graph_us, interleaved.

    A turn replays a graph with as many calls as :func:`compare` makes.
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
    """The facts about the machine that a figure depends on."""
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
        "cpu": processors.cpu_name(),
        "threads": str(torch.get_num_threads()),
        "instructions": processors.instructions(),
        "copy_bandwidth_GBps": f"{copy_bandwidth() / 1e9:.0f}",
    }


def copy_bandwidth(megabytes: int = 512) -> float:
    """Bytes per second, read plus written, of a copy within device memory."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    source = torch.empty(megabytes << 20, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    return 2 * source.numel() / _median_seconds(lambda: target.copy_(source))


def product_rate(dtype: torch.dtype) -> float:
    """Floating-point operations per second of PyTorch's product of square matrices, at its best size."""
    on_gpu = torch.cuda.is_available()
    rates = []
    for n in (4096, 8192) if on_gpu else (512, 1024, 2048):
        a, b = (torch.randn(n, n, dtype=dtype, device="cuda" if on_gpu else "cpu") for _ in range(2))
        rates.append(2 * n**3 / _median_seconds(lambda a=a, b=b: a @ b))
    return max(rates)


def _median_seconds(run: Callable[[], object]) -> float:
    figures = compare({"": run})[""]
    return figures.get("kernel_us", figures["wall_us"]) * 1e-6
