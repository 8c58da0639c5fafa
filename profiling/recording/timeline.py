"""A Chrome trace of torch.profiler, read as forwards: the CPU ops of each, and their launches.

On a GPU a launch is a kernel, a copy or a fill. On a CPU it is an op that computes: the outermost one that is not a
view, an allocation or a mere wrapper of other ops (`aten::linear` is a wrapper, the `aten::mm` in it computes).
"""

import json
import re
import statistics
from dataclasses import dataclass, replace
from pathlib import Path

FORWARD = "forward"  # the record_function range around a forward

GEMM, POINTWISE, FUSED, AUX = "gemm", "pointwise", "fused", "aux"
KINDS = {
    GEMM: "GEMM",
    POINTWISE: "pointwise",
    FUSED: "fused, of this package",
    AUX: "copies, fills, partial sums",
}
# The first pattern that matches a name determines its kind; names without a match are pointwise.
_KIND_PATTERNS = (
    (FUSED, r"fused_mlp::sm\d+::\w*gemm_kernel|^matmul_kernel|^_fused_mlp\w*::(gated_)?(mlp|linear)"),
    (AUX, r"^Mem(cpy|set)|splitK|aten::(copy|fill|zero)_"),
    (GEMM, r"(?i)gemm|gemv|nvjet|cutlass|cublas|xmma|triton_tem|aten::(addmm|mm|bmm|baddbmm|_addmm)|mkldnn"),
)

SHELLS = {"aten::linear", "aten::matmul"}
COMPUTES_NOTHING = {
    *("aten::t", "aten::transpose", "aten::as_strided", "aten::view", "aten::reshape", "aten::_unsafe_view"),
    *("aten::expand", "aten::unsqueeze", "aten::squeeze", "aten::detach", "aten::alias", "aten::slice", "aten::select"),
    *("aten::resolve_conj", "aten::resolve_neg", "aten::lift_fresh"),
    *("aten::empty", "aten::empty_strided", "aten::new_empty", "aten::empty_like", "aten::_reshape_alias"),
}
_COMPUTES = re.compile(r"^aten::|^_fused_mlp\w*::|cpp_fused")  # beside Dynamo's and Inductor's own ranges
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
DYNAMO = re.compile(r"^(TorchDynamo|Torch-Compiled Region|AOTDispatcher)")


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in _KIND_PATTERNS if re.search(pattern, name)), POINTWISE)


@dataclass(frozen=True)
class Launch:
    name: str
    kind: str
    start: float  # microseconds from the start of the forward, like all times here
    end: float


@dataclass(frozen=True)
class Op:
    name: str
    start: float
    end: float
    launches: int = 0  # within its range: its own and those of nested ops

    def holds(self, other: "Op") -> bool:
        return other is not self and self.start <= other.start and other.end <= self.end


@dataclass(frozen=True)
class Forward:
    ops: tuple[Op, ...]
    launches: tuple[Launch, ...]
    cpu_before_launch_us: float
    latency_us: float  # from the call to the end of its last launch, or to its return if that is later
    peak_bytes: int  # peak allocation on the device, above the level at the start

    @property
    def busy_us(self) -> float:
        """Time during which any launch runs; overlaps count once."""
        busy, reached = 0.0, float("-inf")
        for launch in sorted(self.launches, key=lambda launch: launch.start):
            busy += max(0.0, launch.end - max(launch.start, reached))
            reached = max(reached, launch.end)
        return busy

    @property
    def steps(self) -> tuple[Launch, ...]:
        """The launches without a library's own copies, fills and sums."""
        return tuple(launch for launch in self.launches if launch.kind != AUX)


def middle(forwards: tuple[Forward, ...]) -> Forward:
    """The forward with the median latency: a typical one, not an average of several."""
    latency = statistics.median_low(forward.latency_us for forward in forwards)
    return next(forward for forward in forwards if forward.latency_us == latency)


def read(path: Path) -> tuple[Forward, ...]:
    """The forwards of a trace that torch.profiler exported."""
    return parse(json.loads(path.read_text())["traceEvents"])


def parse(events: list[dict]) -> tuple[Forward, ...]:
    timed = sorted((event for event in events if event.get("ph") in ("X", "i")), key=lambda event: event["ts"])
    ranges = [event for event in timed if event.get("cat") == "user_annotation" and event["name"] == FORWARD]
    on_gpu = any(event.get("cat") in _ON_GPU for event in timed)
    following = [*(range_["ts"] for range_ in ranges[1:]), float("inf")]
    return tuple(
        _forward(range_, [event for event in timed if range_["ts"] <= event["ts"] < until], on_gpu)
        for range_, until in zip(ranges, following, strict=True)
    )


def _forward(range_: dict, timed: list[dict], on_gpu: bool) -> Forward:
    """One forward. The next starts only after the GPU has finished, so all GPU work before that belongs to this one."""
    origin, end = range_["ts"], range_["ts"] + range_["dur"]
    inside = [event for event in timed if event["ts"] <= end]
    same_thread = [event for event in inside if event.get("tid") == range_["tid"]]
    kernels = [event for event in timed if event.get("cat") in _ON_GPU]
    correlations = {kernel["args"].get("correlation") for kernel in kernels}
    calls = [  # calls of the CUDA runtime and driver that enqueue GPU work
        event
        for event in same_thread
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and event["args"].get("correlation") in correlations
    ]
    spans = [
        Op(event["name"], event["ts"] - origin, event["ts"] + event["dur"] - origin)
        for event in same_thread
        if event.get("cat") == "cpu_op" and event["ph"] == "X"
    ]
    if on_gpu:
        launches = [
            Launch(k["name"], kind_of(k["name"]), k["ts"] - origin, k["ts"] + k["dur"] - origin) for k in kernels
        ]
        launched_at = [call["ts"] - origin for call in calls]
    else:
        launches = [Launch(op.name, kind_of(op.name), op.start, op.end) for op in _computing(spans)]
        launched_at = [launch.start for launch in launches]
    ops = [replace(op, launches=sum(op.start <= at <= op.end for at in launched_at)) for op in spans]
    return Forward(
        ops=tuple(ops),
        launches=tuple(sorted(launches, key=lambda launch: launch.start)),
        cpu_before_launch_us=min(launched_at, default=end - origin),
        latency_us=max([end - origin, *(launch.end for launch in launches)]),
        peak_bytes=_peak_bytes(inside, device_type=1 if on_gpu else 0),
    )


def _computing(ops: list[Op]) -> list[Op]:
    found = []
    for op in ops:  # by start: an op comes before its nested ops
        passed = op.name in SHELLS or op.name in COMPUTES_NOTHING or not _COMPUTES.search(op.name)
        if not passed and not any(outer.holds(op) for outer in found):
            found.append(op)
    return found


def _peak_bytes(events: list[dict], device_type: int) -> int:
    allocated = peak = 0
    for event in events:
        if event["name"] == "[memory]" and event["args"]["Device Type"] == device_type:
            allocated += event["args"]["Bytes"]
            peak = max(peak, allocated)
    return peak
