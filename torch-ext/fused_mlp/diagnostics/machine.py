"""Names of the processors that figures depend on. It imports nothing of the package, as ``timing``."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import torch


def cpu_name() -> str:
    """The model of the CPU, as its maker calls it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def instructions() -> str:
    """The instruction sets of the CPU that matter to products of matrices, as torch finds them."""
    amx = bool(torch.cpu.get_capabilities().get("amx_tile", False))
    return torch.backends.cpu.get_cpu_capability() + (" and AMX" if amx else "")


def cpu() -> str:
    """The CPU in words: its model, its instruction sets and the threads of torch."""
    threads = torch.get_num_threads()
    return f"{cpu_name()}, {instructions()}, {threads} thread{'s' if threads != 1 else ''}"


def gpu() -> str:
    """The current GPU in words: its model and, of NVIDIA's and AMD's, its architecture and its memory."""
    if not torch.cuda.is_available():
        return torch.xpu.get_device_name()
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    arch = getattr(device, "gcnArchName", None) or f"compute capability {device.major}.{device.minor}"
    return f"{device.name}, {arch}, {device.total_memory / 2**30:.0f} GiB"
