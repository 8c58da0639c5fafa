"""How the benchmarks measure: providers take turns inside one process, and medians are compared, never single times."""

import statistics
import time
from collections.abc import Callable

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


def wall_microseconds(run: Callable[[], object], iterations: int) -> float:
    """Time of one call with the GPU waited for at the end, launch gaps included."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(iterations):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / iterations * 1e6


def cpu_microseconds(run: Callable[[], object], iterations: int) -> float:
    """CPU time of one call: what the caller's thread spends before it may go on."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(iterations):
        run()
    spent = time.perf_counter() - start
    torch.cuda.synchronize()
    return spent / iterations * 1e6


def compare(
    providers: dict[str, Callable[[], object]], rounds: int = 5, budget_us: float = 20_000.0
) -> dict[str, dict]:
    """Medians over `rounds` turns of every provider: kernel_us, kernels, wall_us, cpu_us."""
    iterations = {}
    for name, run in providers.items():
        for _ in range(3):
            run()
        iterations[name] = max(3, min(100, int(budget_us / wall_microseconds(run, 3))))
    samples = {name: {"kernel_us": [], "kernels": [], "wall_us": [], "cpu_us": []} for name in providers}
    for _ in range(rounds):
        for name, run in providers.items():
            kernel_us, kernels = gpu_microseconds(run, max(3, iterations[name] // 4))
            samples[name]["kernel_us"].append(kernel_us)
            samples[name]["kernels"].append(kernels)
            samples[name]["wall_us"].append(wall_microseconds(run, iterations[name]))
            samples[name]["cpu_us"].append(cpu_microseconds(run, min(20, iterations[name])))
    return {name: {key: statistics.median(values) for key, values in s.items()} for name, s in samples.items()}


def machine() -> dict[str, str]:
    """The facts that a figure depends on."""
    facts = {"torch": torch.__version__}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "gpu": properties.name,
            "multiprocessors": str(properties.multi_processor_count),
            "cuda": str(torch.version.cuda),
            "copy_bandwidth_GBps": f"{copy_bandwidth() / 1e9:.0f}",
        }
    return facts


def copy_bandwidth(megabytes: int = 512) -> float:
    """Bytes per second, read plus written, of a device-to-device copy."""
    source = torch.empty(megabytes << 20, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    target.copy_(source)
    times = [gpu_microseconds(lambda: target.copy_(source), 5)[0] for _ in range(5)]
    return 2 * source.numel() / (statistics.median(times) * 1e-6)
