"""Triton kernels, for every GPU that Triton compiles for. Without Triton, this module imports and refuses all calls."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Optional

import torch
from torch import Tensor

from .devices import on_gpu

_SPEC = find_spec("triton")
INSTALLED = _SPEC is not None and _SPEC.origin is not None  # a plain folder of that name has no origin
INTERPRETED = False

if INSTALLED:
    import triton

    from .ops import act_and_mul, act_and_mul_backward, experts_mlp, gated_linear, gated_mlp, linear, mlp

    INTERPRETED = triton.knobs.runtime.interpret  # as of the definition of the kernels, which is when it takes effect

__all__ = [
    "act_and_mul",
    "act_and_mul_backward",
    "experts_mlp",
    "gated_linear",
    "gated_mlp",
    "linear",
    "mlp",
    "refusal",
]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_MIN_CAPABILITY = (8, 0)


def refusal(op: str, x: Tensor) -> Optional[str]:
    """Return why no Triton kernel takes ``op`` on ``x``: no Triton, an unsupported device or dtype, or an old GPU."""
    if not INSTALLED:
        return "triton is not installed"
    if x.dtype not in _DTYPES:
        return f"no Triton kernel for {x.dtype}"
    if INTERPRETED:  # the interpreter's bfloat16 GEMMs are garbage, and its rounding to bfloat16 truncates
        return "Triton's interpreter gives wrong results in bfloat16" if x.dtype == torch.bfloat16 else None
    if not on_gpu(x):
        return f"Triton kernels run on GPUs, but x is on {x.device.type}"
    if x.is_cuda and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(x.device)
        if capability < _MIN_CAPABILITY:
            return "GPU of compute capability {}.{}, at least 8.0 is required".format(*capability)
    return None
