"""Reads the results.json that compare.py writes. Needs no PyTorch."""

from collections import Counter

from timeline import AUX, KINDS


def kernel_rows(setup: dict) -> list[dict]:
    """The launches of a set-up by name, the longest first."""
    calls, times, kinds = Counter(), Counter(), {}
    for launch in setup["launches"]:
        calls[launch["name"]] += 1
        times[launch["name"]] += launch["end"] - launch["start"]
        kinds[launch["name"]] = launch["kind"]
    total = sum(times.values())
    return [
        {"name": name, "kind": kinds[name], "calls": calls[name], "us": us, "share": us / total if total else 0.0}
        for name, us in times.most_common()
    ]


def kinds(workload: dict) -> list[tuple[str, str]]:
    """The kinds of launches in a workload, with their names."""
    present = {launch["kind"] for setup in workload["setups"] for launch in setup["launches"]}
    return [(kind, words) for kind, words in KINDS.items() if kind in present]


def steps(setup: dict) -> int:
    """The number of launches of a set-up, without those that a library adds to its GEMMs."""
    return sum(launch["kind"] != AUX for launch in setup["launches"])


def launches(setup: dict) -> str:
    """The same, and after a plus the launches that a library adds."""
    added = len(setup["launches"]) - steps(setup)
    return f"{steps(setup)} + {added}" if added else f"{steps(setup)}"


def time(us: float, in_ms: bool) -> str:
    return f"{us / 1e3:.3g} ms" if in_ms else f"{us:.0f} µs" if us >= 100 else f"{us:.1f} µs"


def wall_time(setup: dict, in_ms: bool) -> str:
    """The median of a set-up's turns, and their spread if set-ups were interleaved."""
    words = time(setup["wall_us"], in_ms)
    return f"{words} ({setup['wall_us_spread']:.0%})" if "wall_us_spread" in setup else words


def of_eager(setup: dict, workload: dict) -> str:
    """The wall time in units of eager's; no figure if the turns of either spread too far."""
    eager = workload["setups"][0]
    spread = max(each.get("wall_us_spread", 0.0) for each in (setup, eager))
    return "noisy" if spread > workload.get("noisy_above", spread) else f"{setup['wall_us'] / eager['wall_us']:.2f}"


def took_turns(run: dict) -> bool:
    """True if the set-ups of a run were timed interleaved; older runs timed one after another."""
    return all("wall_us_spread" in setup for workload in run["workloads"] for setup in workload["setups"])


def in_milliseconds(workload: dict) -> bool:
    """True if the times of a workload are more readable in milliseconds."""
    return max(setup["wall_us"] for setup in workload["setups"]) >= 10_000


def mebibytes(size: int) -> str:
    return f"{size / 2**20:.0f} MiB" if size >= 10 * 2**20 else f"{size / 2**20:.2g} MiB"


def machine(results: dict) -> str:
    """The machine in one line."""
    facts = results["machine"]
    name = facts.get("gpu") or f"{facts['cpu']}, {facts['threads']} threads, {facts['instructions']}"
    return f"{name}, PyTorch {facts['torch']}"


COLUMNS = (
    "set-up",
    "launches",
    "CPU before the first",
    "launches run",
    "wall time",
    "of eager",
    "bytes to move",
    "of the roofline",
    "peak memory",
)


def comparison(workload: dict) -> list[tuple[str, ...]]:
    """The set-ups of a workload, one row each, with the columns COLUMNS."""
    in_ms = in_milliseconds(workload)
    return [
        (
            setup["title"],
            launches(setup),
            time(setup["cpu_before_launch_us"], in_ms=False),
            time(setup["busy_us"], in_ms),
            wall_time(setup, in_ms),
            of_eager(setup, workload),
            mebibytes(setup["bytes_moved"]),
            f"{workload['floor_us'] / setup['busy_us']:.0%}",
            mebibytes(setup["peak_bytes"]),
        )
        for setup in workload["setups"]
    ]
