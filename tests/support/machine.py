"""The build under test, and its device on this machine."""

import os
import re
from pathlib import Path

import torch

import project

os.environ.setdefault("LOCAL_KERNELS", project.local_kernels())
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def build_folder() -> Path:
    """The folder of the variants, or of the one variant to load."""
    overrides = dict(entry.split("=", 1) for entry in os.environ["LOCAL_KERNELS"].split(":"))
    return Path(overrides[project.repo_id()])


def variants() -> list[Path]:
    folder = build_folder()
    return sorted(path.parent for path in [*folder.glob("metadata.json"), *folder.glob("*/metadata.json")])


def device_type() -> str:
    return "cuda" if torch.version.cuda is not None and torch.cuda.is_available() else "cpu"


def implementations() -> list[str]:
    """The backends that backend() can force here, besides "torch", which they are compared with."""
    return ["cuda", "triton"] if device_type() == "cuda" else ["cpu"]


def takes(implementation: str, dtype: torch.dtype) -> bool:
    """True if the implementation has kernels for the dtype; otherwise PyTorch computes a call."""
    return implementation != "cpu" or dtype in (torch.float32, torch.bfloat16)


def cpu_flags() -> set[str]:
    """The instruction sets of this CPU, as Linux names them."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"^flags\s*:(.*)$", info.read_text(), re.MULTILINE) if info.exists() else None
    return set(found[1].split()) if found else set()


def has_tiles() -> bool:
    """True if this run's kernels multiply bfloat16 on AMX tiles."""
    of_cpu = device_type() == "cpu" and {"amx_tile", "amx_bf16"} <= cpu_flags()
    return of_cpu and os.environ.get("FUSED_MLP_CPU_ISA", "amx") == "amx"
