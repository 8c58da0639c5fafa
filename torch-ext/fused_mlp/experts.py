"""Experts of a mixture in torch operations: sort rows by expert, grouped GEMMs, weighted sums.

A *slot* is one of the K choices of a token: slot ``t * K + k``. A *row* is a slot after sorting by expert, so that the
rows of an expert are adjacent; those of expert ``e`` end at ``offsets[e]``. Slots whose index names no expert are
skipped: their rows come last and are not computed. Our GEMMs leave zeros there; torch's leave arbitrary values.

Nothing here waits for data on the device, except :func:`grouped_mm` if torch has no grouped GEMM for the operands.
"""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ._ops import add_op_namespace_prefix, ops
from .activations import BY_CODE

Pointwise = Callable[[Tensor, Tensor, int], Tensor]  # act(gate) * up
Adapters = Tuple[Optional[Any], Optional[Any]]  # of the first and the second GEMM: each an ``Adapter`` of all experts
NO_ADAPTERS: Adapters = (None, None)


class Form(NamedTuple):
    """The layout of expert weights and what runs between the two GEMMs, in the argument order of the compiled ops."""

    activation: int
    gated: bool
    interleaved: bool
    transposed: bool
    limit: Optional[float]
    up_offset: float


class Routing(NamedTuple):
    """The order of rows. ``skipped`` is [T, K], ``offsets`` is [E], the other tensors are [T * K]."""

    skipped: Tensor
    experts: Tensor  # the expert of each row, E if skipped
    slots: Tensor  # the slot of each row
    rows: Tensor  # the row of each slot
    offsets: Tensor
    top_k: int
    masked: bool  # whether rows of skipped slots may hold arbitrary values that have to be masked


def routing(index: Tensor, experts: int, masked: bool) -> Routing:
    """Sort the slots of ``index`` [T, K] by expert, and those of one expert by token."""
    index = counted(index)
    skipped = (index < 0) | (index >= experts)
    sorted_experts, slots = torch.sort(torch.where(skipped, experts, index).flatten(), stable=True)
    rows = torch.empty_like(slots).scatter_(0, slots, torch.arange(slots.numel(), device=slots.device))
    numbers = torch.arange(experts, device=index.device, dtype=sorted_experts.dtype)
    offsets = torch.searchsorted(sorted_experts, numbers, right=True, out_int32=True)
    return Routing(skipped, sorted_experts, slots, rows, offsets, index.shape[1], masked)


def counted(index: Tensor) -> Tensor:
    """Return ``index`` in a dtype that torch indexes by and that can name any number of experts, unlike int8."""
    return index if index.dtype in (torch.int64, torch.int32) else index.int()


def composed(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    gate_up_bias: Optional[Tensor],
    down_bias: Optional[Tensor],
    form: Form,
    act_and_mul: Pointwise,
    adapters: Adapters = NO_ADAPTERS,
) -> Tensor:
    """Run the experts on x [T, D] with torch's grouped GEMMs and the given pointwise kernel between them."""
    order = routing(index, gate_up_weight.shape[0], masked=x.is_cuda)
    rows = _TokensToRows.apply(x, *order)
    hidden = _activated(_product(rows, gate_up_weight, gate_up_bias, order, form, adapters[0]), form, act_and_mul)
    rows = _product(hidden, down_weight, down_bias, order, form, adapters[1])
    return _RowsToTokens.apply(rows, weights, *order)


def traceable(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    gate_up_bias: Optional[Tensor],
    down_bias: Optional[Tensor],
    form: Form,
    act_and_mul: Pointwise,
    adapters: Adapters = NO_ADAPTERS,
) -> Tensor:
    """Like :func:`composed`, in operations that support every derivative and any tensor subclass: every expert
    computes all tokens, and results that no token chose are masked out."""
    index, wide = counted(index), torch.promote_types(x.dtype, torch.float32)
    columns = (lambda weight: weight) if form.transposed else (lambda weight: weight.transpose(-2, -1))
    out = x.new_zeros((x.shape[0], columns(down_weight).shape[-1]), dtype=wide)

    def product(rows: Tensor, weight: Tensor, adapter: Optional[Any], expert: int) -> Tensor:
        result = rows @ columns(weight[expert])
        if adapter is None:
            return result
        a, b = (factor[expert].to(rows.dtype) for factor in adapter[:2])
        return result + (rows @ a.t() * adapter.scaling) @ b.t()

    for expert in range(gate_up_weight.shape[0]):
        chosen = index == expert
        hidden = product(x, gate_up_weight, adapters[0], expert)
        if gate_up_bias is not None:
            hidden = hidden + gate_up_bias[expert]
        result = product(_activated(hidden, form, act_and_mul), down_weight, adapters[1], expert)
        if down_bias is not None:
            result = result + down_bias[expert]
        share = torch.where(chosen, weights.to(wide), 0).sum(-1, keepdim=True)
        out = out + torch.where(chosen.any(-1, keepdim=True), result.to(wide) * share, 0)
    return out.to(x.dtype)


def _activated(gate_up: Tensor, form: Form, act_and_mul: Pointwise) -> Tensor:
    """Return what the second GEMM multiplies, in the dtype of ``gate_up``; autocast would square in float32."""
    if not form.gated:
        return BY_CODE[form.activation].function(gate_up).to(gate_up.dtype)
    gate, up = (gate_up[..., 0::2], gate_up[..., 1::2]) if form.interleaved else gate_up.chunk(2, dim=-1)
    if form.limit is not None:
        gate, up = gate.clamp(max=form.limit), up.clamp(min=-form.limit, max=form.limit)
    if form.up_offset != 0:
        up = up + form.up_offset
    return act_and_mul(gate, up, form.activation).to(gate_up.dtype)


def _product(
    rows: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    order: Routing,
    form: Form,
    adapter: Optional[Any] = None,
) -> Tensor:
    result = _of_groups(rows, weight if form.transposed else weight.transpose(-2, -1), order)
    if adapter is not None:
        result = result + _low_rank(rows, adapter, order)
    return result if bias is None else _PlusBias.apply(result, bias, order.experts, order.offsets)


def _of_groups(rows: Tensor, weight: Tensor, order: Routing) -> Tensor:
    if _takes_grouped_mm(rows, weight):
        return F.grouped_mm(rows, weight, offs=order.offsets)
    return grouped_mm(rows, weight, order.offsets)


def _low_rank(rows: Tensor, adapter: Any, order: Routing) -> Tensor:
    """Return the term that an adapter adds to a GEMM.

    With fewer rows than experts, only the factors of the chosen experts are gathered and cast.
    """
    a, b, scaling = adapter[:3]
    if rows.shape[0] < a.shape[0]:
        named, of_rows = (order.experts < a.shape[0]).unsqueeze(-1), order.experts.clamp(max=a.shape[0] - 1)
        a, b = (factor.index_select(0, of_rows).to(rows.dtype) for factor in (a, b))
        # Mask in both directions: rows of skipped slots must reach neither a factor nor a gradient.
        rows = torch.where(named, rows, 0)
        return torch.where(named, torch.bmm(b, torch.bmm(a, rows.unsqueeze(-1)) * scaling).squeeze(-1), 0)
    a, b = (factor.to(rows.dtype).transpose(1, 2) for factor in (a, b))
    return _of_groups(_of_groups(rows, a, order) * scaling, b, order)


def _takes_grouped_mm(rows: Tensor, weight: Tensor) -> bool:
    """True if torch's grouped GEMM supports the operands, and the gradient of its result, without a host sync.

    On a CPU, torch loops over all experts; our loop visits only experts that have rows.
    """
    if not rows.is_cuda or rows.dtype != torch.bfloat16 or torch.cuda.get_device_capability(rows.device) < (9, 0):
        return False
    if weight.shape[-1] % 8 != 0 or 0 in weight.shape:
        return False
    return all(_is_aligned(matrix) for matrix in (rows, weight))


def _is_aligned(matrix: Tensor) -> bool:
    *outer, row, column = matrix.stride()
    leading = row if column == 1 else column
    aligned = all((stride * matrix.element_size()) % 16 == 0 for stride in (*outer, leading))
    return min(row, column) == 1 and aligned and (torch.compiler.is_compiling() or matrix.data_ptr() % 16 == 0)


class _TokensToRows(torch.autograd.Function):
    """Gather rows [T * K, D] from x [T, D]. A token's gradient is summed in the order of its slots."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor,
        skipped: Tensor,
        experts: Tensor,
        slots: Tensor,
        rows: Tensor,
        offsets: Tensor,
        top_k: int,
        masked: bool,
    ) -> Tensor:
        return x.index_select(0, slots // top_k)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, skipped, _, _, rows, _, _, ctx.masked = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(skipped, rows)

    @staticmethod
    def backward(ctx, grad: Optional[Tensor]) -> Tuple[Optional[Tensor], ...]:
        if grad is None:
            return (None,) * 8
        skipped, rows = ctx.saved_tensors
        of_slots = _of_slots(grad, skipped, rows, ctx.masked)
        return (of_slots.sum(1), *(None,) * 7)


class _RowsToTokens(torch.autograd.Function):
    """Weight rows [T * K, D] by [T, K] and sum over the slots of each token, in their order, in float32."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        values: Tensor,
        weights: Tensor,
        skipped: Tensor,
        experts: Tensor,
        slots: Tensor,
        rows: Tensor,
        offsets: Tensor,
        top_k: int,
        masked: bool,
    ) -> Tensor:
        wide = _wide(values)
        shares = torch.where(skipped, 0, weights.to(wide))
        sums = (_of_slots(values, skipped, rows, masked) * shares.unsqueeze(-1)).sum(1)
        # torch 2.11 compiles a function without a gradient if its last operation casts to the dtype that is already
        # there.
        return sums if sums.dtype == values.dtype else sums.to(values.dtype)

    @staticmethod
    def setup_context(ctx, inputs, output):
        values, weights, skipped, _, slots, rows, _, _, ctx.masked = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(values, weights, skipped, slots, rows)

    @staticmethod
    def backward(ctx, grad: Optional[Tensor]) -> Tuple[Optional[Tensor], ...]:
        if grad is None:
            return (None,) * 9
        values, weights, skipped, slots, rows = ctx.saved_tensors
        wide, top_k = _wide(values), weights.shape[1]
        values_grad = weights_grad = None
        if ctx.needs_input_grad[0]:
            shares = torch.where(skipped, 0, weights.to(wide)).flatten()
            of_rows = grad.index_select(0, slots // top_k) * shares.index_select(0, slots).unsqueeze(-1)
            if ctx.masked:  # or a second derivative would multiply what the skipped rows hold by 0
                of_rows = torch.where(skipped.flatten().index_select(0, slots).unsqueeze(-1), 0, of_rows)
            values_grad = of_rows.to(values.dtype)
        if ctx.needs_input_grad[1]:
            products = _of_slots(values, skipped, rows, ctx.masked) * grad.to(wide).unsqueeze(1)
            weights_grad = torch.where(skipped, 0, products.sum(-1)).to(weights.dtype)
        return (values_grad, weights_grad, *(None,) * 7)


class _PlusBias(torch.autograd.Function):
    """Add to each row the bias, from [E, N], of its expert."""

    generate_vmap_rule = True

    @staticmethod
    def forward(rows: Tensor, bias: Tensor, experts: Tensor, offsets: Tensor) -> Tensor:
        named = experts < bias.shape[0]
        of_rows = bias.index_select(0, torch.where(named, experts, 0))
        return rows + torch.where(named.unsqueeze(-1), of_rows, 0)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(inputs[3])

    @staticmethod
    def backward(ctx, grad: Optional[Tensor]) -> Tuple[Optional[Tensor], ...]:
        if grad is None:
            return (None,) * 4
        (offsets,) = ctx.saved_tensors
        ones = grad.new_ones((grad.shape[0], 8))  # 16 bytes a row, as torch's grouped GEMM requires
        if _takes_grouped_mm(ones, grad):
            sums = F.grouped_mm(ones.t(), grad, offs=offsets)
        else:
            sums = grouped_outer(ones[:, :1], grad, offsets)
        return grad, sums[:, 0].contiguous(), None, None


def _of_slots(of_rows: Tensor, skipped: Tensor, rows: Tensor, masked: bool) -> Tensor:
    """Reorder [T * K, D] from row order into [T, K, D] in slot order, zero where skipped."""
    of_slots = of_rows.index_select(0, rows).reshape(*skipped.shape, of_rows.shape[1])
    return torch.where(skipped.unsqueeze(-1), 0, of_slots) if masked else of_slots


def _wide(values: Tensor) -> torch.dtype:
    return torch.promote_types(values.dtype, torch.float32)


# Grouped GEMMs, one group after the other, for every dtype, device and stride. On a GPU the host has to wait for the
# offsets.


def _grouped_mm(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Multiply rows [S, K] by weight [E, K, N] into [S, N]; rows past the last group are zero."""
    out = rows.new_empty((rows.shape[0], weight.shape[2]))
    begin = 0
    for expert, end in enumerate(offsets.tolist()):
        if end > begin:
            torch.mm(rows[begin:end], weight[expert], out=out[begin:end])
        begin = end
    out[begin:].zero_()
    return out


def _grouped_outer(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """Multiply a [S, M], transposed, by b [S, N] for every group, into [E, M, N]."""
    out = a.new_empty((offsets.shape[0], a.shape[1], b.shape[1]))
    begin = 0
    for expert, end in enumerate(offsets.tolist()):
        torch.mm(a[begin:end].t(), b[begin:end], out=out[expert])  # zero if there are no rows
        begin = end
    return out


def _mm_of_each(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """``_grouped_mm`` in operations that ``torch.func`` can map over any of the factors."""
    ends = offsets.tolist()
    products = [rows[begin:end] @ weight[expert] for expert, (begin, end) in enumerate(zip([0, *ends], ends))]
    return F.pad(torch.cat(products), (0, 0, 0, rows.shape[0] - ends[-1]))


def _outer_of_each(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    ends = offsets.tolist()
    return torch.stack([a[begin:end].t() @ b[begin:end] for begin, end in zip([0, *ends], ends)])


def _is_mapped() -> bool:
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


for _name, _schema, _compute, _fake in (
    (
        "grouped_mm",
        "(Tensor rows, Tensor weight, Tensor offsets) -> Tensor",
        _grouped_mm,
        lambda rows, weight, offsets: rows.new_empty((rows.shape[0], weight.shape[2])),
    ),
    (
        "grouped_outer",
        "(Tensor a, Tensor b, Tensor offsets) -> Tensor",
        _grouped_outer,
        lambda a, b, offsets: a.new_empty((offsets.shape[0], a.shape[1], b.shape[1])),
    ),
):
    _op = add_op_namespace_prefix(_name)
    torch.library.define(_op, _schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(_op, "CompositeExplicitAutograd", _compute)
    torch.library.register_fake(_op)(_fake)


class _OfGroups(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)


class _GroupedMm(_OfGroups):
    @staticmethod
    def forward(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        return (_mm_of_each if _is_mapped() else ops.grouped_mm)(rows, weight, offsets)

    @staticmethod
    def backward(ctx, grad: Optional[Tensor]) -> Tuple[Optional[Tensor], ...]:
        if grad is None:
            return (None,) * 3
        rows, weight, offsets = ctx.saved_tensors
        rows_grad = weight_grad = None
        if ctx.needs_input_grad[0]:
            rows_grad = grouped_mm(grad, weight.transpose(1, 2), offsets)
        if ctx.needs_input_grad[1] and weight.stride(2) == 1:
            weight_grad = grouped_outer(rows, grad, offsets)
        elif ctx.needs_input_grad[1]:  # in the memory order of the weight
            weight_grad = grouped_outer(grad, rows, offsets).transpose(1, 2)
        return rows_grad, weight_grad, None


class _GroupedOuter(_OfGroups):
    @staticmethod
    def forward(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
        return (_outer_of_each if _is_mapped() else ops.grouped_outer)(a, b, offsets)

    @staticmethod
    def backward(ctx, grad: Optional[Tensor]) -> Tuple[Optional[Tensor], ...]:
        if grad is None:
            return (None,) * 3
        a, b, offsets = ctx.saved_tensors
        a_grad = grouped_mm(b, grad.transpose(1, 2), offsets) if ctx.needs_input_grad[0] else None
        b_grad = grouped_mm(a, grad, offsets) if ctx.needs_input_grad[1] else None
        return a_grad, b_grad, None


grouped_mm, grouped_outer = _GroupedMm.apply, _GroupedOuter.apply
