"""Launch parameters of the GEMM kernel: measured ones if configs/ has a file, else computed from the shape and GPU.

A file holds the best parameters of one op, weight shape and GPU for each tuned M (number of rows of x). The
repository's tune.py writes these files. They are measured on 16-bit operands and used only for those.
"""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Dict, NamedTuple, Optional

import torch
import triton

DIRECTORY = Path(__file__).parent / "configs"

Config = Dict[str, int]


class Gpu(NamedTuple):
    """The properties of a GPU that the choice of launch parameters depends on."""

    name: str
    capability: int  # 90 for 9.0, and 0 if the GPU is not NVIDIA's
    shared_memory: int  # bytes that one block may use
    multiprocessors: int


# A lower bound for GPUs of AMD and Intel, none of which was measured.
_LEAST_SHARED_MEMORY = 64 * 1024


@functools.cache
def gpu(device: torch.device) -> Gpu:
    if device.type == "xpu":
        properties = torch.xpu.get_device_properties(device)
        return Gpu(properties.name, 0, _LEAST_SHARED_MEMORY, properties.gpu_subslice_count)
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return Gpu(properties.name, 0, _LEAST_SHARED_MEMORY, properties.multi_processor_count)
    return Gpu(
        properties.name,
        10 * properties.major + properties.minor,
        properties.shared_memory_per_block_optin,
        properties.multi_processor_count,
    )


# The interpreter uses the properties of an H100, so that kernels run as they would there.
INTERPRETER = Gpu("interpreter", 90, 227 * 1024, 132)


def file_name(op: str, N: int, K: int, device_name: str) -> str:
    return f"{op},N={N},K={K},device_name={device_name.replace(' ', '_')}.json"


@functools.lru_cache(maxsize=4096)
def launch_config(op: str, M: int, N: int, K: int, element_size: int, wide: bool, gpu: Gpu) -> Config:
    """Return parameters for ``op`` (``"linear"`` or ``"gated_linear"``) on x [M, K] and weights [N, K]: those of the
    nearest tuned M in log space, or :func:`default_config`.

    ``wide`` means that tensor cores multiply and loads are vectorised. Otherwise the elements of an operand, or their
    addresses, pass through registers, where only small tiles fit.
    """
    tuned = _tuned_configs(file_name(op, N, K, gpu.name)) if wide and element_size == 2 else None
    if tuned is None:
        return default_config(op, M, N, element_size, wide, gpu)
    return tuned[min(tuned, key=lambda tuned_m: abs(math.log(M / tuned_m)))]


@functools.cache
def _tuned_configs(name: str) -> Optional[Dict[int, Config]]:
    path = DIRECTORY / name
    if not path.exists():
        return None
    return {int(m): config for m, config in json.loads(path.read_text()).items()}


def default_config(op: str, M: int, N: int, element_size: int, wide: bool, gpu: Gpu) -> Config:
    """Return the largest tile whose accumulators fit in registers, cut to fit M and to occupy every multiprocessor."""
    weights = 2 if op == "gated_linear" else 1
    if wide:
        # Hopper and its data-centre successor multiply from shared memory, other GPUs from registers.
        block_m, block_n = 128, 128 if 90 <= gpu.capability < 120 else 256 // element_size // weights
    else:
        block_m, block_n = 64, 64 // weights
    block_m = max(16, min(block_m, triton.next_power_of_2(M)))
    least_m, least_n = (64, 64) if wide and block_m >= 64 else (block_m, 32)

    def fills(m: int, n: int) -> bool:
        return triton.cdiv(M, m) * triton.cdiv(N, n) >= gpu.multiprocessors

    while block_n > least_n and not fills(block_m, block_n):
        block_n //= 2
    if block_m > least_m and not fills(block_m, block_n):
        block_m //= 2
    # Bytes of a row per step: a cache line, or two if rows are few, latency dominates and three stages fit.
    rows, shared_memory = block_m + weights * block_n, gpu.shared_memory - 1024  # 1 KiB for the barriers
    two_lines = gpu.capability and block_m <= 64 and 3 * 256 * rows <= shared_memory
    k_bytes = 64 if not wide else 256 if two_lines else 128
    config = {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": k_bytes // element_size,
        "GROUP_M": 8,
        "DESCRIPTORS": wide and block_m >= 64 and gpu.capability >= 90,
        "num_warps": 4 if wide and weights * block_m * block_n < 128 * 128 else 8,
        "num_stages": min(6 if block_m >= 64 else 4, shared_memory // (rows * k_bytes)) if gpu.capability else 2,
    }
    # Unless it may use every register, NVIDIA's assembler spills some to fit one more block.
    return config if wide or not gpu.capability else {**config, "maxnreg": 255}
