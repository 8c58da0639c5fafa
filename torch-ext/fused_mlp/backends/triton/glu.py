"""act(gate) * up and its gradients, with one pass over memory each."""

from __future__ import annotations

from typing import Tuple

import triton
import triton.language as tl
from torch import Tensor

from .activations import activate, derivative
from .devices import device_of
from .rows import as_rows

_TILE_BYTES = 4096  # per operand: two 16-byte accesses a thread, so that loads overlap


@triton.jit
def _tile(rows, cols, TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr):
    """Return this program's row and column indices and element mask; int64, for tensors past 2^31 elements."""
    col_tiles = tl.cdiv(cols, TILE_COLS)
    pid = tl.program_id(0)
    row = (pid // col_tiles).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)[:, None]
    col = (pid % col_tiles).to(tl.int64) * TILE_COLS + tl.arange(0, TILE_COLS)[None, :]
    return row, col, (row < rows) & (col < cols)


@triton.jit
def act_and_mul_kernel(
    gate_ptr,
    up_ptr,
    out_ptr,
    rows,
    cols,
    gate_stride,
    up_stride,
    ACTIVATION: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLS: tl.constexpr,
):
    row, col, exists = _tile(rows, cols, TILE_ROWS, TILE_COLS)
    gate = tl.load(gate_ptr + row * gate_stride + col, mask=exists).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + col, mask=exists).to(tl.float32)
    out = activate(gate, ACTIVATION, out_ptr.dtype.element_ty == tl.float32) * up
    tl.store(out_ptr + row * cols + col, out.to(out_ptr.dtype.element_ty), mask=exists)


@triton.jit
def act_and_mul_backward_kernel(
    grad_ptr,
    gate_ptr,
    up_ptr,
    dgate_ptr,
    dup_ptr,
    rows,
    cols,
    grad_stride,
    gate_stride,
    up_stride,
    ACTIVATION: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLS: tl.constexpr,
):
    row, col, exists = _tile(rows, cols, TILE_ROWS, TILE_COLS)
    grad = tl.load(grad_ptr + row * grad_stride + col, mask=exists).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + col, mask=exists).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + col, mask=exists).to(tl.float32)
    exact: tl.constexpr = dgate_ptr.dtype.element_ty == tl.float32
    dgate = grad * up * derivative(gate, ACTIVATION, exact)
    dup = grad * activate(gate, ACTIVATION, exact)
    tl.store(dgate_ptr + row * cols + col, dgate.to(dgate_ptr.dtype.element_ty), mask=exists)
    tl.store(dup_ptr + row * cols + col, dup.to(dup_ptr.dtype.element_ty), mask=exists)


def act_and_mul(gate: Tensor, up: Tensor, activation: int) -> Tensor:
    out = gate.new_empty(gate.shape)
    if out.numel():
        _launch(act_and_mul_kernel, (gate, up), (out,), activation)
    return out


def act_and_mul_backward(grad: Tensor, gate: Tensor, up: Tensor, activation: int) -> Tuple[Tensor, Tensor]:
    dgate, dup = gate.new_empty(gate.shape), up.new_empty(up.shape)
    if dgate.numel():
        _launch(act_and_mul_backward_kernel, (grad, gate, up), (dgate, dup), activation)
    return dgate, dup


def _launch(kernel, inputs: Tuple[Tensor, ...], outputs: Tuple[Tensor, ...], activation: int) -> None:
    """Launch on contiguous ``outputs``."""
    if all(operand.is_contiguous() for operand in inputs):
        inputs = tuple(operand.view(1, -1) for operand in inputs)  # one long row: only the last tile is partial
    else:
        inputs = tuple(as_rows(operand) for operand in _flattened(inputs))
    rows, cols = inputs[0].shape
    tile_rows, tile_cols = tile_shape(rows, cols, inputs[0].element_size())
    grid = (triton.cdiv(rows, tile_rows) * triton.cdiv(cols, tile_cols),)
    with device_of(inputs[0]):
        kernel[grid](
            *inputs,
            *outputs,
            rows,
            cols,
            *(operand.stride(0) for operand in inputs),
            ACTIVATION=activation,
            TILE_ROWS=tile_rows,
            TILE_COLS=tile_cols,
        )


def _flattened(operands: Tuple[Tensor, ...]) -> Tuple[Tensor, ...]:
    """Merge the innermost dimensions that are adjacent in all operands, for long rows without copying chunks."""
    shape, adjacent = operands[0].shape, 1
    first = len(shape)
    while first and all(operand.stride(first - 1) == adjacent for operand in operands):
        first -= 1
        adjacent *= shape[first]
    return operands if first == len(shape) else tuple(operand.flatten(first) for operand in operands)


def tile_shape(rows: int, cols: int, element_size: int) -> Tuple[int, int]:
    """Return the number of rows and columns of elements that one program processes."""
    elements = _TILE_BYTES // element_size
    if rows == 1:
        return 1, elements
    tile_cols = min(elements // 2, triton.next_power_of_2(cols))
    return elements // tile_cols, tile_cols
