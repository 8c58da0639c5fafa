"""act(x weight^T + bias), and act(x gate^T + gate_bias) * (x up^T + up_bias) in one pass over x."""

from __future__ import annotations

from typing import Optional

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...activations import BY_CODE
from .activations import activate
from .configs import INTERPRETER, Config, gpu, launch_config
from .devices import device_of, on_gpu
from .glu import act_and_mul
from .rows import as_rows


@triton.jit
def _load_tile(
    matrix,
    row,
    col,
    rows,
    cols,
    row_stride,
    col_stride,
    TILE_ROWS: tl.constexpr,
    TILE_COLS: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """Load the tile of a matrix [rows, cols] that begins at (row, col), with zeros past the edges."""
    if DESCRIPTORS:
        return matrix.load([row, col])
    else:
        r = (row + tl.arange(0, TILE_ROWS)).to(tl.int64)[:, None]
        c = (col + tl.arange(0, TILE_COLS)).to(tl.int64)[None, :]
        return tl.load(matrix + r * row_stride + c * col_stride, mask=(r < rows) & (c < cols), other=0.0)


@triton.jit
def _tile_origin(M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Return the first row and column of this program's tile. Programs that run together share GROUP_M row tiles of x
    and few column tiles of the weights, which then stay in L2."""
    row_tiles = tl.cdiv(M, BLOCK_M)
    col_tiles = tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    group = pid // (GROUP_M * col_tiles)
    group_rows = min(row_tiles - group * GROUP_M, GROUP_M)
    within = pid % (GROUP_M * col_tiles)
    return (group * GROUP_M + within % group_rows) * BLOCK_M, (within // group_rows) * BLOCK_N


@triton.jit
def matmul_kernel(
    x,  # x and the weights are pointers, or tensor descriptors if DESCRIPTORS
    weight,
    up_weight,  # None for an ungated GEMM
    bias_ptr,  # or None
    up_bias_ptr,  # or None
    out_ptr,
    M,
    N,
    K,
    x_stride,
    weight_row_stride,
    weight_col_stride,
    up_weight_row_stride,
    up_weight_col_stride,
    ACTIVATION: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    row, col = _tile_origin(M, N, BLOCK_M, BLOCK_N, GROUP_M)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up_acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        x_tile = _load_tile(x, row, k, M, K, x_stride, 1, BLOCK_M, BLOCK_K, DESCRIPTORS)
        w_tile = _load_tile(weight, col, k, N, K, weight_row_stride, weight_col_stride, BLOCK_N, BLOCK_K, DESCRIPTORS)
        acc = tl.dot(x_tile, w_tile.T, acc, input_precision=INPUT_PRECISION)
        if up_weight is not None:
            w_tile = _load_tile(
                up_weight, col, k, N, K, up_weight_row_stride, up_weight_col_stride, BLOCK_N, BLOCK_K, DESCRIPTORS
            )
            up_acc = tl.dot(x_tile, w_tile.T, up_acc, input_precision=INPUT_PRECISION)

    rows = row + tl.arange(0, BLOCK_M)
    cols = col + tl.arange(0, BLOCK_N)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    exact: tl.constexpr = out_ptr.dtype.element_ty == tl.float32 and INPUT_PRECISION == "ieee"
    out = activate(acc, ACTIVATION, exact)
    if up_weight is not None:
        if up_bias_ptr is not None:
            up_acc += tl.load(up_bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
        out *= up_acc
    out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * N + cols[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=(rows < M)[:, None] & (cols < N)[None, :])


def linear(x: Tensor, weight: Tensor, bias: Optional[Tensor], activation: int) -> Tensor:
    if _torch_multiplies(x):
        return BY_CODE[activation].function(F.linear(x, weight, bias))
    return _matmul("linear", x, weight, None, bias, None, activation)


def gated_linear(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    gate_bias: Optional[Tensor],
    up_bias: Optional[Tensor],
    activation: int,
) -> Tensor:
    if _torch_multiplies(x):
        return act_and_mul(F.linear(x, gate_weight, gate_bias), F.linear(x, up_weight, up_bias), activation)
    return _matmul("gated_linear", x, gate_weight, up_weight, gate_bias, up_bias, activation)


def _torch_multiplies(x: Tensor) -> bool:
    """True if PyTorch runs the GEMMs: in full float32 on a GPU, where it rounds less and is faster."""
    return on_gpu(x) and x.dtype == torch.float32 and input_precision(x) == "ieee"


def _matmul(
    op: str,
    x: Tensor,
    weight: Tensor,
    up_weight: Optional[Tensor],
    bias: Optional[Tensor],
    up_bias: Optional[Tensor],
    activation: int,
) -> Tensor:
    out = x.new_empty((*x.shape[:-1], weight.shape[0]))
    if out.numel():
        x = as_rows(x)
        (M, K), N = x.shape, weight.shape[0]
        tensor_cores = x.dtype != torch.float32 or input_precision(x) == "tf32"
        wide = tensor_cores and all(_vectorizes(matrix) for matrix in (x, weight, up_weight) if matrix is not None)
        device = gpu(x.device) if on_gpu(x) else INTERPRETER
        config = launch_config(op, M, N, K, x.element_size(), wide, device)
        launch(out, x, weight, up_weight, bias, up_bias, activation, config)
    return out


def launch(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    up_weight: Optional[Tensor],
    bias: Optional[Tensor],
    up_bias: Optional[Tensor],
    activation: int,
    config: Config,
) -> None:
    """Compute into contiguous ``out`` from x [M, K] with adjacent columns and weights [N, K] of any strides.

    If ``config`` requests tensor descriptors, the operands must vectorise.
    """
    (M, K), N = x.shape, weight.shape[0]
    matrices = (x, weight) if up_weight is None else (x, weight, up_weight)
    descriptors = config["DESCRIPTORS"] and all(_fits_descriptor(matrix) for matrix in matrices)
    if descriptors:
        x_tile, weight_tile = [config["BLOCK_M"], config["BLOCK_K"]], [config["BLOCK_N"], config["BLOCK_K"]]
        x_operand = TensorDescriptor.from_tensor(x, x_tile)
        weight_operand = TensorDescriptor.from_tensor(weight, weight_tile)
        up_operand = None if up_weight is None else TensorDescriptor.from_tensor(up_weight, weight_tile)
    else:
        x_operand, weight_operand, up_operand = x, weight, up_weight
    grid = (triton.cdiv(M, config["BLOCK_M"]) * triton.cdiv(N, config["BLOCK_N"]),)
    with device_of(x):
        matmul_kernel[grid](
            x_operand,
            weight_operand,
            up_operand,
            None if bias is None else bias.contiguous(),
            None if up_bias is None else up_bias.contiguous(),
            out,
            M,
            N,
            K,
            x.stride(0),
            *weight.stride(),
            *(weight if up_weight is None else up_weight).stride(),
            ACTIVATION=activation,
            INPUT_PRECISION=input_precision(x),
            **{**config, "DESCRIPTORS": descriptors},
        )


def input_precision(x: Tensor) -> str:
    """Return the precision of fp32 GEMMs: on NVIDIA's GPUs, PyTorch's setting. It has no effect on 16-bit operands."""
    asked = x.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if asked and torch.version.hip is None and not x.is_xpu else "ieee"


def _vectorizes(matrix: Tensor) -> bool:
    """True if Triton loads the matrix 16 bytes at a time, which needs sizes and addresses divisible by 16."""
    inner = 1 if matrix.stride(1) == 1 else 0  # the dimension with adjacent elements
    aligned = matrix.data_ptr() % 16 == 0 and matrix.stride(1 - inner) % 16 == 0
    return aligned and matrix.stride(inner) == 1 and matrix.shape[inner] % 16 == 0


def _fits_descriptor(matrix: Tensor) -> bool:
    """True if TMA, whose coordinates are 32-bit, can address a matrix that vectorises."""
    return matrix.stride(1) == 1 and matrix.stride(0) > 0 and 0 < matrix.shape[0] < 2**31 and matrix.shape[1] > 0
