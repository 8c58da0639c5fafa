"""The strides that PyTorch gives to ``act(gate) * up`` and its gradients; ``elementwise.h`` implements the same rules.

The rules are those of TensorIterator for operands of one shape. Strides and sizes may be symbolic.
"""

from __future__ import annotations

from typing import List, Sequence, Tuple

from torch import Tensor

from ..activations import BY_CODE

Strides = Tuple[int, ...]

_CHANNELS_LAST = (1, 3, 2, 0)


def new_product(gate: Tensor, up: Tensor, activation: int) -> Tensor:
    """Return an uninitialised tensor for ``act(gate) * up``."""
    if gate.is_contiguous() and up.is_contiguous():  # also decidable for data-dependent sizes
        return gate.new_empty(gate.shape)
    return gate.new_empty_strided(gate.shape, of_product(gate, up, activation))


def new_gradients(grad: Tensor, gate: Tensor, up: Tensor, activation: int) -> Tuple[Tensor, Tensor]:
    """Return uninitialised tensors for the gradients of gate and up."""
    if grad.is_contiguous() and gate.is_contiguous() and up.is_contiguous():
        return gate.new_empty(gate.shape), up.new_empty(up.shape)
    of_gate, of_up = of_gradients(grad, gate, up, activation)
    return gate.new_empty_strided(gate.shape, of_gate), up.new_empty_strided(up.shape, of_up)


def of_product(gate: Tensor, up: Tensor, activation: int) -> Strides:
    """Return the strides of ``act(gate) * up``."""
    rules = _Rules(gate.shape)
    return rules.binary(rules.activated(BY_CODE[activation].name, gate.stride()), up.stride())


def of_gradients(grad: Tensor, gate: Tensor, up: Tensor, activation: int) -> Tuple[Strides, Strides]:
    """Return the strides of the gradients of gate and up, as autograd would compute them."""
    rules, name = _Rules(gate.shape), BY_CODE[activation].name
    value = rules.activated(name, gate.stride())
    of_value, of_up = rules.binary(grad.stride(), up.stride()), rules.binary(grad.stride(), value)
    if name == "linear":
        return of_value, of_up
    if name == "quick_gelu":
        return rules.binary(of_value, rules.unary(rules.with_a_number(gate.stride()))), of_up
    if name == "relu":
        return rules.binary(value, of_value), of_up
    if name == "relu2":
        relu = rules.unary(gate.stride())
        return rules.binary(relu, rules.binary(of_value, rules.with_a_number(rules.unary(relu)))), of_up
    return rules.binary(of_value, value if name == "sigmoid" else gate.stride()), of_up


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


def by_column(sizes: Sequence[int]) -> Strides:
    """Return the strides of a tensor without gaps whose last dimension is the slowest."""
    strides, rows = [], 1
    for size in reversed(sizes[:-1]):
        strides.append(rows)
        rows = rows * size
    return (*reversed(strides), rows)


class _Rules:
    """Derives the strides of results from those of operands that all have the given sizes."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes
        self.row_major = tuple(reversed(range(len(sizes))))

    def unary(self, x: Strides) -> Strides:
        return self._result(x)

    def binary(self, x: Strides, y: Strides) -> Strides:
        return self._result(x, y)

    def with_a_number(self, x: Strides) -> Strides:
        return self._result(x, short_cut=False)

    def activated(self, name: str, x: Strides) -> Strides:
        if name == "linear":
            return x
        if name == "quick_gelu":
            return self.binary(x, self.unary(self.with_a_number(x)))  # x * sigmoid(1.702 * x)
        return self.unary(self.unary(x)) if name == "relu2" else self.unary(x)

    def _result(self, *operands: Strides, short_cut: bool = True) -> Strides:
        if all(self._lies_as(x, self.row_major) for x in operands):
            return self._dense(self.row_major)
        if short_cut:
            if len(self.sizes) == 4 and all(self._lies_as(x, _CHANNELS_LAST) for x in operands):
                return self._dense(_CHANNELS_LAST)
            first = operands[0]
            by_stride = sorted(self.row_major, key=first.__getitem__)
            if self._lies_as(first, by_stride) and all(x == first for x in operands):
                return first
        return self._dense(self._sorted(operands))

    def _lies_as(self, x: Strides, order: Sequence[int]) -> bool:
        """True if the elements are dense, with the first dimension of ``order`` fastest."""
        if any(size == 0 for size in self.sizes):
            return True
        expected = 1
        for d in order:
            if self.sizes[d] != 1:
                if x[d] != expected:
                    return False
                expected = expected * self.sizes[d]
        return True

    def _dense(self, order: Sequence[int]) -> Strides:
        strides, stride = [1] * len(order), 1
        for d in order:
            strides[d] = stride
            stride = stride * (1 if self.sizes[d] == 0 else self.sizes[d])
        return tuple(strides)

    def _sorted(self, operands: Sequence[Strides]) -> List[int]:
        """Return the dimensions, fastest first; the first operand that distinguishes two dimensions orders them.

        Like PyTorch, this uses an insertion sort, because the comparison may leave two dimensions undecided although
        both compare differently with a third.
        """
        order = list(self.row_major)
        for i in range(1, len(order)):
            inner = i
            for outer in reversed(range(i)):
                decided = self._compare(operands, order[outer], order[inner])
                if decided < 0:
                    break
                if decided > 0:
                    order[outer], order[inner] = order[inner], order[outer]
                    inner = outer
        return order

    def _compare(self, operands: Sequence[Strides], a: int, b: int) -> int:
        for x in operands:
            if x[a] == 0 or x[b] == 0:
                continue
            if x[a] != x[b]:
                return -1 if x[a] < x[b] else 1
            if self.sizes[a] > self.sizes[b]:
                return 1
        return 0
