"""Tensors as the matrices that the kernels address."""

from __future__ import annotations

import math

from torch import Tensor


def as_rows(tensor: Tensor) -> Tensor:
    """Return ``tensor`` [..., cols] as a matrix of rows of adjacent elements: a view if its strides allow one (as for a
    chunk of a packed projection), else a copy."""
    cols = tensor.shape[-1] if tensor.dim() else 1
    if cols > 1 and tensor.stride(-1) != 1:
        tensor = tensor.contiguous()
    return tensor.reshape(math.prod(tensor.shape[:-1]), cols)
