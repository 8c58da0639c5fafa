"""The layout that PyTorch gives to the gradient of a linear layer's input."""

from __future__ import annotations

from typing import Sequence, Tuple

from torch import Tensor


def is_by_column(x: Tensor, is_always_matrix: bool) -> bool:
    """True if F.linear's gradient of an input is column-major rather than row-major.

    It is if x, viewed as a matrix, is column-major without gaps. F.linear folds more dimensions into a matrix if their
    strides, including those of dimensions of size 1, allow it, and always if the weight needs a gradient.
    """
    if x.dim() < 2 or (x.dim() > 2 and x.shape[:-1].numel() <= 1):
        return False
    is_free = [x.dim() > 2 and size == 1 and is_always_matrix for size in x.shape[:-1]] + [False]
    wanted = by_column(x.shape)
    return all(free or stride == want for free, stride, want in zip(is_free, x.stride(), wanted))


def by_column(sizes: Sequence[int]) -> Tuple[int, ...]:
    """Return the strides of a tensor without gaps whose last dimension is the slowest."""
    strides, rows = [], 1
    for size in reversed(sizes[:-1]):
        strides.append(rows)
        rows = rows * size
    return (*reversed(strides), rows)
