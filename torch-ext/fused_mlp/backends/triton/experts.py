"""Experts of a mixture in four launches without a host sync: routing, two grouped GEMMs, weighted sums.

A slot is one choice of one token; a row is a slot after sorting by expert. Each grid has as many programs as there can
be tiles, because only the device knows how the rows are distributed over the experts; a program without a tile returns.
"""

from __future__ import annotations

from typing import Optional, Tuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...activations import get_activation
from ...experts import Form
from .activations import activate
from .configs import Config
from .devices import device_of
from .gemm import input_precision
from .rows import as_rows


@triton.jit
def route_kernel(index_ptr, slots_ptr, ends_ptr, slots, BLOCK: tl.constexpr):
    """Program e finds the slots of expert e, in their order, and writes them to its rows, which end at ``ends[e]``.

    Every program reads the whole index twice, the first time to count the rows before its own.
    """
    expert = tl.program_id(0)
    before = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, slots, BLOCK):
        slot = first + tl.arange(0, BLOCK)
        index = tl.load(index_ptr + slot, mask=slot < slots, other=-1)
        before += ((index >= 0) & (index < expert)).to(tl.int32)
    row = tl.sum(before, 0)
    for first in range(0, slots, BLOCK):
        slot = first + tl.arange(0, BLOCK)
        chosen = (tl.load(index_ptr + slot, mask=slot < slots, other=-1) == expert).to(tl.int32)
        tl.store(slots_ptr + row + tl.cumsum(chosen, 0) - chosen, slot, mask=chosen != 0)
        row += tl.sum(chosen, 0)
    tl.store(ends_ptr + expert, row)


@triton.jit
def _tile_of_program(ends_ptr, experts, tile, BLOCK_M: tl.constexpr, EXPERTS: tl.constexpr):
    """Return the expert of a row tile, the first row of the tile and the end of the expert; none if past all tiles."""
    number = tl.arange(0, EXPERTS)
    exists = number < experts
    ends = tl.load(ends_ptr + number, mask=exists, other=0)
    begins = tl.load(ends_ptr + number - 1, mask=exists & (number > 0), other=0)
    tiles = tl.where(exists, (ends - begins + BLOCK_M - 1) // BLOCK_M, 0)
    last = tl.cumsum(tiles, 0)
    expert = tl.sum((exists & (last <= tile)).to(tl.int32), 0)
    mine = number == expert
    first_tile = tl.sum(tl.where(mine, last - tiles, 0), 0)
    begin = tl.sum(tl.where(mine, begins, 0), 0) + (tile - first_tile) * BLOCK_M
    return expert, begin, tl.sum(tl.where(mine, ends, 0), 0)


@triton.jit
def _plus_product(acc, x_tile, w_tile, exists, INPUT_PRECISION: tl.constexpr, EXACT: tl.constexpr):
    """Return ``acc`` plus the product of two tiles.

    In full float32 the product is a chain of rounded additions. For K = 3000, one chain through all of K has three
    times the rounding error of PyTorch's sums; one chain per tile, with their sums added up, has less error than
    PyTorch.
    """
    if EXACT:
        product = tl.dot(x_tile, w_tile, input_precision=INPUT_PRECISION)
        return acc + tl.where(exists[:, None], product, 0.0)  # Triton would merge a plain sum into one chain
    else:
        return tl.dot(x_tile, w_tile, acc, input_precision=INPUT_PRECISION)


@triton.jit
def grouped_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,  # or None
    out_ptr,
    slots_ptr,
    ends_ptr,
    experts,
    row_tiles,
    N,
    K,
    x_stride,
    expert_stride,
    feature_stride,
    column_stride,
    up_weight_offset,  # elements from the weight row of a gate to that of its up
    bias_expert_stride,
    bias_stride,
    up_bias_offset,
    limit,
    up_offset,
    TOP_K: tl.constexpr,  # slots per row of x; 0 if x has one row per sorted row
    SCATTER: tl.constexpr,  # write to slots; otherwise write to rows
    GATED: tl.constexpr,
    LIMITED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One layer: rows times the weights of their expert, bias, activation and gate."""
    tile = tl.program_id(0) % row_tiles
    expert, begin, end = _tile_of_program(ends_ptr, experts, tile, BLOCK_M, EXPERTS)
    if expert < experts:
        row = begin + tl.arange(0, BLOCK_M)
        exists = row < end
        slot = tl.load(slots_ptr + row, mask=exists, other=0)
        source = (slot // TOP_K if TOP_K > 0 else row).to(tl.int64)
        col = (tl.program_id(0) // row_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
        x_ptrs = x_ptr + source[:, None] * x_stride
        weight_ptrs = weight_ptr + expert.to(tl.int64) * expert_stride + col.to(tl.int64)[None, :] * feature_stride
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        up_acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        exact: tl.constexpr = out_ptr.dtype.element_ty == tl.float32 and INPUT_PRECISION == "ieee"
        for first in range(0, K, BLOCK_K):
            k = first + tl.arange(0, BLOCK_K)
            x_tile = tl.load(x_ptrs + k[None, :], mask=exists[:, None] & (k < K)[None, :], other=0.0)
            at = weight_ptrs + k.to(tl.int64)[:, None] * column_stride
            inside = (k < K)[:, None] & (col < N)[None, :]
            acc = _plus_product(acc, x_tile, tl.load(at, mask=inside, other=0.0), exists, INPUT_PRECISION, exact)
            if GATED:
                w_tile = tl.load(at + up_weight_offset, mask=inside, other=0.0)
                up_acc = _plus_product(up_acc, x_tile, w_tile, exists, INPUT_PRECISION, exact)
        if bias_ptr is not None:
            bias_ptrs = bias_ptr + expert.to(tl.int64) * bias_expert_stride + col * bias_stride
            acc += tl.load(bias_ptrs, mask=col < N, other=0.0).to(tl.float32)[None, :]
            if GATED:
                up_acc += tl.load(bias_ptrs + up_bias_offset, mask=col < N, other=0.0).to(tl.float32)[None, :]
        if LIMITED:
            acc = tl.minimum(acc, limit, propagate_nan=tl.PropagateNan.ALL)
            up_acc = tl.minimum(up_acc, limit, propagate_nan=tl.PropagateNan.ALL)
            up_acc = tl.maximum(up_acc, -limit, propagate_nan=tl.PropagateNan.ALL) + up_offset
        out = activate(acc, ACTIVATION, exact)
        if GATED:
            out *= up_acc
        target = (slot if SCATTER else row).to(tl.int64)
        out_ptrs = out_ptr + target[:, None] * N + col[None, :]
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=exists[:, None] & (col < N)[None, :])


@triton.jit
def add_up_kernel(
    rows_ptr, index_ptr, weights_ptr, out_ptr, experts, features, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):
    """Write out [T, features]: the sum of the rows of a token's slots times their weights, in slot order."""
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in range(TOP_K):
        slot = token * TOP_K + k
        index = tl.load(index_ptr + slot)
        chosen = (index >= 0) & (index < experts)
        weight = tl.load(weights_ptr + slot, mask=chosen, other=0.0).to(tl.float32)
        value = tl.load(rows_ptr + slot * features + col, mask=(col < features) & chosen, other=0.0)
        total += value.to(tl.float32) * weight
    tl.store(out_ptr + token * features + col, total.to(out_ptr.dtype.element_ty), mask=col < features)


def experts_mlp(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    gate_up_bias: Optional[Tensor],
    down_bias: Optional[Tensor],
    activation: int,
    gated: bool,
    interleaved: bool,
    transposed: bool,
    limit: Optional[float],
    up_offset: float,
) -> Tensor:
    form = Form(activation, gated, interleaved, transposed, limit, up_offset)
    (tokens, top_k), experts = top_k_index.shape, gate_up_weight.shape[0]
    if not transposed:
        gate_up_weight, down_weight = gate_up_weight.transpose(1, 2), down_weight.transpose(1, 2)
    slots, hidden, features = tokens * top_k, down_weight.shape[1], down_weight.shape[2]
    if slots == 0 or features == 0:
        return x.new_zeros((tokens, features))
    index, weights = top_k_index.contiguous(), top_k_weights.contiguous()
    slot_of_row = torch.empty(slots, dtype=torch.int32, device=x.device)
    ends = torch.empty(experts, dtype=torch.int32, device=x.device)
    values = x.new_empty((slots, hidden))
    results = x.new_empty((slots, features))
    out = x.new_empty((tokens, features))
    with device_of(x):
        route_kernel[(experts,)](index, slot_of_row, ends, slots, BLOCK=route_block(slots))
        rows = (slot_of_row, ends, slots)
        _grouped(values, as_rows(x), gate_up_weight, gate_up_bias, rows, form, top_k=top_k)
        plain = form._replace(activation=_LINEAR, gated=False, interleaved=False, limit=None, up_offset=0.0)
        _grouped(results, values, down_weight, down_bias, rows, plain, scatter=True)
        block = add_up_block(features)
        grid = (tokens, triton.cdiv(features, block))
        add_up_kernel[grid](results, index, weights, out, experts, features, TOP_K=top_k, BLOCK=block)
    return out


_LINEAR = get_activation("linear").code


def _grouped(
    out: Tensor,
    x: Tensor,
    weight: Tensor,  # [E, in, out], any strides
    bias: Optional[Tensor],
    rows: Tuple[Tensor, Tensor, int],
    form: Form,
    top_k: int = 0,
    scatter: bool = False,
) -> None:
    slot_of_row, ends, slots = rows
    (experts, K, _), N = weight.shape, out.shape[1]
    if N == 0:
        return
    expert_stride, column_stride, feature_stride = weight.stride()
    between = 1 if form.interleaved else N  # distance from the weight row of a gate to that of its up
    step = 2 if form.interleaved else 1
    config = tiles(slots, experts, form.gated, x.element_size())
    row_tiles = min(slots, experts + slots // config["BLOCK_M"])
    grouped_kernel[(row_tiles * triton.cdiv(N, config["BLOCK_N"]),)](
        x,
        weight,
        None if bias is None else bias.contiguous(),
        out,
        slot_of_row,
        ends,
        experts,
        row_tiles,
        N,
        K,
        x.stride(0),
        expert_stride,
        feature_stride * step,
        column_stride,
        feature_stride * between,
        weight.shape[2],
        step,
        between,
        float("inf") if form.limit is None else float(form.limit),
        float(form.up_offset),
        TOP_K=top_k,
        SCATTER=scatter,
        GATED=form.gated,
        LIMITED=form.limit is not None or form.up_offset != 0,
        ACTIVATION=form.activation,
        INPUT_PRECISION=input_precision(x),
        EXPERTS=triton.next_power_of_2(experts),
        **config,
    )


def tiles(slots: int, experts: int, gated: bool, element_size: int) -> Config:
    """Return launch parameters from the average number of rows per expert, which is all that the host knows."""
    block_m = max(16, min(128, triton.next_power_of_2(slots // experts)))
    if element_size == 4:
        return {"BLOCK_M": min(block_m, 64), "BLOCK_N": 32, "BLOCK_K": 16, "num_warps": 4, "num_stages": 2}
    wide = {"BLOCK_M": block_m, "BLOCK_N": 64 if gated else 128, "BLOCK_K": 64}
    return {**wide, "num_warps": 8 if block_m == 128 else 4, "num_stages": 3}


def route_block(slots: int) -> int:
    return max(16, min(1024, triton.next_power_of_2(slots)))


def add_up_block(features: int) -> int:
    return min(1024, triton.next_power_of_2(features))
