"""Names of the processors that benchmark figures depend on. Like ``timing``, imports nothing from the package."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import torch


def cpu_name() -> str:
    """Return the model name of the CPU, as its maker gives it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def instructions() -> str:
    """Return the CPU's instruction sets that matter for GEMMs, as torch detects them."""
    amx = bool(torch.cpu.get_capabilities().get("amx_tile", False))
    return torch.backends.cpu.get_cpu_capability() + (" and AMX" if amx else "")


def cpu() -> str:
    """Describe the CPU: its model, its instruction sets and torch's number of threads."""
    threads = torch.get_num_threads()
    return f"{cpu_name()}, {instructions()}, {threads} thread{'s' if threads != 1 else ''}"


def gpu() -> str:
    """Describe the current GPU: its model and, for NVIDIA and AMD, its architecture and memory."""
    if not torch.cuda.is_available():
        return torch.xpu.get_device_name()
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    arch = getattr(device, "gcnArchName", None) or f"compute capability {device.major}.{device.minor}"
    return f"{device.name}, {arch}, {device.total_memory / 2**30:.0f} GiB"
