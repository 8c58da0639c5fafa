"""Planted traces, as torch.profiler exports them."""

import sys

import project

sys.path.append(str(project.ROOT / "profiling/recording"))

import timeline


class Planted:
    """The events of consecutive forwards, each put together from ops and launches at given times."""

    def __init__(self):
        self.events = []
        self.origin = 1000.0
        self.correlation = 0

    def forward(self, duration=100.0):
        self.origin += 1000.0
        self._add("user_annotation", timeline.FORWARD, 0.0, duration)
        return self

    def op(self, name, start, duration):
        self._add("cpu_op", name, start, duration)
        return self

    def kernel(self, name, start, duration, called=1.0, category="kernel"):
        self.correlation += 1
        args = {"correlation": self.correlation}
        self._add("cuda_runtime", "cudaLaunchKernel", called, 2.0, args=args)
        self._add(category, name, start, duration, tid=7, args=args)
        return self

    def memory(self, start, size, device_type=0):
        args = {"Bytes": size, "Device Type": device_type}
        self.events.append(
            {
                "ph": "i",
                "cat": "cpu_instant_event",
                "name": "[memory]",
                "ts": self.origin + start,
                "tid": 1,
                "args": args,
            }
        )
        return self

    def _add(self, category, name, start, duration, tid=1, args=None):
        timed = {"ph": "X", "cat": category, "name": name, "ts": self.origin + start, "dur": duration}
        self.events.append({**timed, "tid": tid, "args": args or {}})

    def read(self):
        return timeline.parse(self.events)


def eager_mlp(forwards=3):
    """An eager MLP on a GPU: five kernels, and a fill of cuBLAS's own."""
    planted = Planted()
    for _ in range(forwards):
        planted.forward(duration=60.0)
        for i, name in enumerate(("nvjet_gate", "gelu_kernel", "nvjet_up", "mul_kernel", "nvjet_down")):
            planted.op("aten::linear" if "nvjet" in name else f"aten::{name.split('_')[0]}", 10.0 * i, 9.0)
            if "nvjet" in name:
                planted.op("aten::t", 10.0 * i + 0.5, 0.5)
            planted.kernel(name, 20.0 * i + 30.0, 18.0, called=10.0 * i + 4.0)
        planted.kernel("Memset (Device)", 130.0, 1.0, called=58.0, category="gpu_memset")
    return planted
