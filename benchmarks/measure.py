"""How the benchmarks measure: providers take turns inside one process, and medians are compared, never single times."""

import platform
import statistics
import sys
import time
from collections.abc import Callable
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
    on_gpu = [event for event in trace.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    spans = sorted((event.time_range.start, event.time_range.end) for event in on_gpu)
    busy, reached = 0.0, float("-inf")
    for start, end in spans:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return busy / iterations, len(spans) / iterations


def synchronize() -> None:
    """Waits for the GPU, where there is one; on a CPU a call is done when it returns."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def wall_microseconds(run: Callable[[], object], iterations: int) -> float:
    """Time of one call with the GPU waited for at the end, launch gaps included."""
    synchronize()
    start = time.perf_counter()
    for _ in range(iterations):
        run()
    synchronize()
    return (time.perf_counter() - start) / iterations * 1e6


def cpu_microseconds(run: Callable[[], object], iterations: int) -> float:
    """CPU time of one call: what the caller's thread spends before it may go on."""
    synchronize()
    start = time.perf_counter()
    for _ in range(iterations):
        run()
    spent = time.perf_counter() - start
    synchronize()
    return spent / iterations * 1e6


def iterations_within(run: Callable[[], object], budget_us: float) -> int:
    """How many calls fit the budget, after some that warm up."""
    for _ in range(3):
        run()
    return max(3, min(100, int(budget_us / wall_microseconds(run, 3))))


def median_wall_microseconds(run: Callable[[], object], rounds: int = 5, budget_us: float = 20_000.0) -> float:
    iterations = iterations_within(run, budget_us)
    return statistics.median(wall_microseconds(run, iterations) for _ in range(rounds))


def compare(
    providers: dict[str, Callable[[], object]], rounds: int = 5, budget_us: float = 20_000.0
) -> dict[str, dict[str, float]]:
    """Medians over `rounds` turns of every provider: wall_us, and on a GPU kernel_us, kernels and cpu_us."""
    iterations = {name: iterations_within(run, budget_us) for name, run in providers.items()}
    samples = {name: {} for name in providers}
    for _ in range(rounds):
        for name, run in providers.items():
            figures = {"wall_us": wall_microseconds(run, iterations[name])}
            if torch.cuda.is_available():
                kernel_us, kernels = gpu_microseconds(run, max(3, iterations[name] // 4))
                cpu_us = cpu_microseconds(run, min(20, iterations[name]))
                figures = {"kernel_us": kernel_us, "kernels": kernels, **figures, "cpu_us": cpu_us}
            for key, value in figures.items():
                samples[name].setdefault(key, []).append(value)
    return {name: {key: statistics.median(values) for key, values in s.items()} for name, s in samples.items()}


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
    source = torch.empty(megabytes << 20, dtype=torch.uint8, device=device).random_()
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
    run()
    if torch.cuda.is_available():
        return statistics.median(gpu_microseconds(run, 5)[0] for _ in range(5)) * 1e-6
    return statistics.median(wall_microseconds(run, 1) for _ in range(5)) * 1e-6
