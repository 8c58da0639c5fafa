"""A large linear layer whose widths are not multiples of 8, for example for a vocabulary of 50,257 tokens, on a GPU.

torch's 16-bit products take up to seven times as long if the rows of an operand do not begin at multiples of 16 bytes.
This package multiplies padded copies where that is faster (cuda/dense/torch/products.h).
"""

from __future__ import annotations

import math
from typing import Any, Optional, Tuple

import torch
from torch import Tensor

from ..backends import native
from . import nodes, training

# Least number of multiplications: 512 rows of GPT-2's head take 429 us by torch, 200 with padded copies (H200). Smaller
# products are host-bound, and the host takes longer for the copies.
_LEAST_WORK = 1 << 34
_LEAST_WEIGHTS = 1 << 20
_DTYPES = (torch.bfloat16, torch.float16)
VECTOR = 8  # elements of 16 bytes
_ODD_RATE, _EVEN_RATE, _RATE, _COPY_RATE = 95e6, 230e6, 650e6, 2.5e6  # operations and bytes per microsecond (H200)


def suits(weight: Tensor) -> bool:
    """True for a weight ``[out, in]`` whose products may be faster."""
    is_odd = weight.dim() == 2 and any(size % VECTOR != 0 for size in weight.shape)
    return native.DEVICE_TYPE == "cuda" and is_odd and weight.numel() >= _LEAST_WEIGHTS


def is_large(x: Tensor, weight: Tensor) -> bool:
    """True for operands on a GPU with enough multiplications to pay."""
    return x.is_cuda and x.shape[:-1].numel() * weight.numel() >= _LEAST_WORK


def gains(x: Tensor, weight: Tensor) -> bool:
    """True if such a product, with operands as cast by autocast, is expected to take less time than torch's."""
    return suits(weight) and refusal(weight) is None and x.dtype is weight.dtype


def refusal(weight: Tensor) -> Optional[str]:
    """Return the reason why torch computes products with such a weight; None if it does not."""
    if not weight.is_cuda or not native.is_hopper(weight):
        return "on a device that was not measured"
    return None if weight.dtype in _DTYPES else f"in {weight.dtype}"


def gains_in_graph(x: Tensor, weight: Tensor, dtype: torch.dtype) -> bool:
    """True if a compiler's product in a dtype is expected to be faster with zeros after the rows of the operands.

    This follows the rates in products.cpp. A dynamic number of rows is judged by its traced value.
    """
    rows = math.prod(x.shape[:-1])
    rows = rows.node.hint if isinstance(rows, torch.SymInt) else rows
    if rows is None or dtype not in _DTYPES or not suits(weight) or not _fits(rows, weight):
        return False
    out, width = weight.shape
    copied = weight.numel() + rows * (out * (out % VECTOR != 0) + width * (width % VECTOR != 0))
    operations, rate = 2 * rows * weight.numel(), _ODD_RATE if out % 2 or width % 2 else _EVEN_RATE
    return 0.9 * operations / rate > operations / _RATE + 4 * copied / _COPY_RATE + 10


def _fits(rows: int, weight: Tensor) -> bool:
    return weight.is_cuda and native.is_hopper(weight) and min(rows, *weight.shape) >= 64


def run(x: Tensor, weight: Tensor, bias: Optional[Tensor], is_recorded: bool) -> Tensor:
    """Compute ``x weight^T + bias`` for x ``[..., in]``, weight ``[out, in]`` and bias ``[out]``."""
    return _record(x, weight, bias) if is_recorded else native.linear(x, weight, bias, training.NO_ACTIVATION)


class _Recorded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tensor:
        needs, ctx.materialize_grads = ctx.needs_input_grad, False
        ctx.save_for_backward(x if needs[1] else None, weight if needs[0] else None)
        return native.linear(x, weight, bias, training.NO_ACTIVATION)

    @staticmethod
    def backward(ctx: Any, grad: Optional[Tensor]) -> Tuple[Optional[Tensor], ...]:
        if grad is None:
            return None, None, None
        x, weight = ctx.saved_tensors
        mm = torch.mm if training.is_gradient_seen(grad) else native.mm
        return training.gradients_of_layer(grad, x, weight, ctx.needs_input_grad, mm)


_record = nodes.applied(_Recorded)
