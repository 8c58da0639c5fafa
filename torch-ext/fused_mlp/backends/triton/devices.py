"""The GPUs that Triton compiles for: NVIDIA's and AMD's, both torch.cuda, and Intel's, torch.xpu."""

from __future__ import annotations

from typing import ContextManager

import torch
from torch import Tensor


def on_gpu(x: Tensor) -> bool:
    return x.is_cuda or x.is_xpu


def device_of(x: Tensor) -> ContextManager[None]:
    """Make the GPU of ``x`` current, since Triton launches on the current one; no effect for other devices."""
    return (torch.xpu if x.is_xpu else torch.cuda).device_of(x)
