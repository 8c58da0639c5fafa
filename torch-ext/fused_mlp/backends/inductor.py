"""What torch.compile's default backend makes of the compiled ops.

An op is opaque to it: it is called from Python and launches kernels of its own. Where CUDA graphs replay them, only the
GPU's time counts, and the op has the better kernels. Else a model with small layers waits for the host, and PyTorch's
products with a kernel of inductor's between them take less of its time than an op does. So a small MLP without a gate,
or its first layer, is handed to inductor as PyTorch's operations.
"""

from __future__ import annotations

import sys
from typing import Any, Callable, Optional, Sequence, Union

import torch
from torch import Tensor

# Floating-point operations: fewer take a large GPU less time than the host needs for a layer (measured on an H200).
_SMALL = 5e10


def offer(op: Any, composed: Callable[..., Tensor], weights: int) -> None:
    """Has inductor call ``composed`` for small calls of an op for GPUs, whose operands are x, weights and the rest.

    It is called while a call is traced. Where inductor is the backend, torch.compile() has imported all of it. These
    are no public functions of torch: where a version has others, every call stays the op.
    """
    table, lowering = (sys.modules.get(f"torch._inductor.{name}") for name in ("decomposition", "lowering"))
    copied, make_fallback = getattr(table, "fast_random_decomps", None), getattr(lowering, "make_fallback", None)
    if not hasattr(copied, "cache_clear") or make_fallback is None or op in table.decompositions:
        return

    def decomposed(x: Tensor, *rest: Any) -> Union[Tensor, Any]:
        is_left = table.config.triton.cudagraphs or not _is_small(x, rest[:weights])
        return NotImplemented if is_left else composed(x, *rest)

    make_fallback(op, warn=False, override_decomp=True)  # for calls that stay the op, which it will not make behind us
    table.register_decomposition([op])(decomposed)
    copied.cache_clear()  # a copy of the table, made for an earlier model


def _is_small(x: Tensor, weights: Sequence[Tensor]) -> bool:
    rows = _known(x.shape[:-1].numel())
    return rows is not None and 2 * rows * sum(weight.shape.numel() for weight in weights) < _SMALL


def _known(size: Union[int, torch.SymInt]) -> Optional[int]:
    """A size as it was in the call that is traced, without a guard on it; None if it depends on data."""
    return size.node.hint if isinstance(size, torch.SymInt) else size
