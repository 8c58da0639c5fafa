"""The GPUs that Triton compiles for: NVIDIA's and AMD's, which are torch.cuda's both, and Intel's, torch.xpu's."""

from __future__ import annotations

from typing import ContextManager

import torch
from torch import Tensor


def on_gpu(x: Tensor) -> bool:
    return x.is_cuda or x.is_xpu


def device_of(x: Tensor) -> ContextManager[None]:
    """Makes the GPU of ``x`` the current one, which Triton launches on; without effect for another device."""
    return (torch.xpu if x.is_xpu else torch.cuda).device_of(x)
