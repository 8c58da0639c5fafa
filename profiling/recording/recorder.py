"""Runs a set-up under torch.profiler and returns the data for the expectations and the page."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import environment  # noqa: F401
import timeline
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile, record_function, schedule

import measure

WAIT, WARMUP, ACTIVE = 1, 1, 3


@dataclass(frozen=True)
class Recording:
    device: str
    forwards: tuple[timeline.Forward, ...]
    answer: Tensor
    compilations_on_new_shape: int


@torch.no_grad()
def record(call: Callable[[Tensor], Tensor], x: Tensor, of_other_shape: Tensor, trace: Path) -> Recording:
    """Profiles `call(x)` into a Chrome trace at `trace`, then calls it on another shape."""
    answer = call(x)
    _profile(call, x, trace)
    before = counters["stats"]["unique_graphs"]
    call(of_other_shape)
    return Recording(
        device=x.device.type,
        forwards=timeline.read(trace),
        answer=answer,
        compilations_on_new_shape=counters["stats"]["unique_graphs"] - before,
    )


def _profile(call: Callable[[Tensor], Tensor], x: Tensor, trace: Path) -> None:
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if x.is_cuda else [])]
    trace.parent.mkdir(parents=True, exist_ok=True)
    with profile(
        activities=activities,
        schedule=schedule(wait=WAIT, warmup=WARMUP, active=ACTIVE),
        profile_memory=True,
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(trace)),
    ) as profiler:
        for _ in range(WAIT + WARMUP + ACTIVE):
            with record_function(timeline.FORWARD):
                call(x)
            measure.synchronize()  # otherwise a forward would start with its predecessor's kernels
            profiler.step()
