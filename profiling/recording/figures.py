"""The figures of a run as plain data for JSON: all that the page, the tables and the docs need."""

from dataclasses import asdict
from pathlib import Path

import timeline
from expectations import Expectation
from recorder import Recording
from setups import Setup, Workload

import measure


def verdict(expectation: Expectation, recording: Recording, eager: Recording) -> dict:
    held, seen = expectation.look(recording, eager)
    return {"claim": expectation.claim, "held": held, "seen": seen}


def of_setup(setup: Setup, workload: Workload, recording: Recording, eager: Recording, trace: Path) -> dict:
    """The record of a set-up; `wall_us` and `wall_us_spread` come later, from interleaved turns of all set-ups."""
    forward = timeline.middle(recording.forwards)
    return {
        "key": setup.key,
        "title": setup.title,
        "note": setup.note,
        "steps": [step.name for step in setup.steps],
        "launches": [asdict(launch) for launch in forward.launches],
        "ops": len(forward.ops),
        "cpu_before_launch_us": forward.cpu_before_launch_us,
        "latency_us": forward.latency_us,
        "busy_us": forward.busy_us,
        "bytes_moved": workload.size.bytes_moved(setup.steps),
        "peak_bytes": forward.peak_bytes,
        "expectations": [verdict(expectation, recording, eager) for expectation in setup.expectations],
        "trace": trace.name,
    }


def of_workload(workload: Workload, setups: list[dict], flops_per_second: float, bytes_per_second: float) -> dict:
    """The record of a workload. Its floor uses the fastest arithmetic seen, in a set-up or PyTorch's large products."""
    flops_per_second = max([flops_per_second, *(workload.size.flops / (s["busy_us"] * 1e-6) for s in setups)])
    return {
        "key": workload.key,
        "title": workload.title,
        "shape": workload.shape,
        "flops": workload.size.flops,
        "floor_us": workload.size.floor_seconds(flops_per_second, bytes_per_second) * 1e6,
        "noisy_above": measure.timing.NOISY,
        "setups": setups,
    }
