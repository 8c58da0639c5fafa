"""Autograd nodes of a mixture's experts: one op forward and one backward, by the compiled ops.

Unsupported calls, and gradients that are differentiated again, are composed of torch operations (``experts``).
"""

from __future__ import annotations

from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from .. import dispatch, experts
from ..backends import native, plans, reference
from . import padded_experts, training

_is_compiling = torch.compiler.is_compiling


def refusal(
    given: Sequence[Optional[Tensor]], form: experts.Form, adapters: experts.Adapters = experts.NO_ADAPTERS
) -> Optional[str]:
    """Return the reason why a call of plain tensors under autograd is not one op each way; None if it is."""
    x, index, _, gate_up, down, *biases = given
    if adapters != experts.NO_ADAPTERS if _is_compiling() else training.is_transformed() or training.is_followed():
        return "a tracer, mode, hook or transform must see the separate operations"
    if native.DEVICE_TYPE != "cuda" or dispatch.select("experts_mlp", x) is not native:
        return "no training kernel for this device"
    if adapters != experts.NO_ADAPTERS and not native.is_hopper(x):
        return "no training kernel with adapters for this device"
    others = (tensor.dtype for tensor in (gate_up, down, *biases) if tensor is not None)
    if x.dtype not in (torch.bfloat16, torch.float16) or any(dtype != x.dtype for dtype in others):
        return "operands that are not all bfloat16 or all float16"
    if x.dim() != 2 or index.dim() != 2 or gate_up.dim() != 3 or down.dim() != 3:
        return "operands with unsupported shapes"
    inner, outer = (1, 2) if form.transposed else (2, 1)
    if down.shape[outer] != gate_up.shape[inner]:
        return "experts with different input and output sizes"
    call = native.ExpertsCall(x, index, gate_up, down, form.interleaved, form.transposed, trained=True)
    refused = native.experts_refusal(call)
    if refused == "odd_features" and adapters == experts.NO_ADAPTERS and native.is_hopper(x):
        return None  # run() pads them
    return None if refused is None else plans.REFUSALS[refused]


_BLOCK = 128  # sorted rows of one expert, as in cuda/gemm/grouped.h


# Allowed excess over torch, as a part of trained weights, whose gradients and optimizer state take far more.
_SPARE = 1 / 32


def keeps_no_more(given: Sequence[Optional[Tensor]], form: experts.Form) -> bool:
    """True if a call that :func:`refusal` accepts keeps no more for its backward than torch's grouped products and
    pointwise gate, which keep the values before and after the activation, and the inputs of the weights' gradients.

    If all its weights are trained, a call may keep :data:`_SPARE` of their size more. With frozen weights the
    backward's peak counts too, which was measured to exceed torch's from twice as many rows as slots on.
    """
    x, index, weights, gate_up, down = given[:5]
    is_trained = all_trained(given[3:])
    if padded_experts.is_needed(given, form):
        return is_trained
    hidden, slots = down.shape[1 if form.transposed else 2], index.numel()
    rows = (slots + min(gate_up.shape[0], slots) * (_BLOCK - 1)) // _BLOCK * _BLOCK
    before = 2 * hidden if form.gated else hidden
    features = x.shape[1] if gate_up.requires_grad else 0
    ours = rows * (before + features) + x.numel()
    of_down = (hidden if down.requires_grad else 0) + (x.shape[1] if weights.requires_grad else 0)
    theirs = slots * (before + hidden + features + of_down)
    if is_trained:
        return ours <= theirs + _SPARE * (gate_up.numel() + down.numel())
    return 2 * rows <= 3 * slots and ours <= theirs


def all_trained(tensors: Sequence[Optional[Tensor]]) -> bool:
    """True if all tensors that are given require gradients."""
    return all(tensor is None or tensor.requires_grad for tensor in tensors)


def factors_of(adapters: experts.Adapters) -> Tuple[List[Optional[Tensor]], List[float]]:
    """Return the factors a and b of both products' adapters, and their scalings, as the ops' arguments."""
    factors = [factor for adapter in adapters for factor in ((None, None) if adapter is None else adapter[:2])]
    return factors, [1.0 if adapter is None else float(adapter.scaling) for adapter in adapters]


def run(
    given: Sequence[Optional[Tensor]], form: experts.Form, adapters: experts.Adapters = experts.NO_ADAPTERS
) -> Tensor:
    """Return the result of a call that :func:`refusal` accepts."""
    x, index, *others = given
    if padded_experts.is_needed(given, form):
        return run(padded_experts.filled(given, form), form)[:, : x.shape[1]]
    if _is_compiling():
        return _Traced.apply(x, *others, index, form)
    factors, scalings = factors_of(adapters)
    return _Experts.apply(x, *others[:3], *factors, *others[3:], index, form, scalings)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, *others: Any) -> Tensor:
        *factors, gate_up_bias, down_bias, index, form, scalings = others
        given = x, index, weights, gate_up, down, gate_up_bias, down_bias
        keeps = ctx.needs_input_grad[2]  # for the gradient of gate_up
        out, sorted_x, of_gate_up, *rank_rows = native.experts_training_forward(*given, factors, scalings, *form, keeps)
        # They belong to the node, if no hooks have to see what autograd saves: its backward may overwrite them.
        is_own = training._saved_tensors_hooks(False) is None
        ctx.materialize_grads = False
        ctx.form, ctx.scalings, ctx.own = form, scalings, (of_gate_up, None) if is_own else None
        kept = sorted_x if keeps else None, None if is_own else of_gate_up, *rank_rows
        ctx.save_for_backward(x, weights, gate_up, down, *others[:-3], index, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Optional[Tensor]) -> Tuple[Optional[Tensor], ...]:
        if grad is None:
            return (None,) * (_OPERANDS + 3)
        *given, index, sorted_x, of_gate_up = ctx.saved_tensors[: _OPERANDS + 3]
        rank_rows = next(iter(ctx.saved_tensors[_OPERANDS + 3 :]), None)
        needs = ctx.needs_input_grad[:_OPERANDS]
        own, is_alone = ctx.own, False
        if own is not None and not training._keeps_graph():
            ctx.own = ()  # autograd frees what it saves as well
            is_alone = training._are_alone(own) and not training._dispatch_modes()
        of_gate_up = of_gate_up if own is None else own[0]
        composed = (tuple(given), index, grad, needs, ctx.form, ctx.scalings)
        if training.is_gradient_seen(grad):
            found = _composed_gradients(*composed)
        else:
            bits = sum(need << place for place, need in enumerate(needs))
            x, *weights, a, b, second_a, second_b, gate_up_bias, down_bias = given
            if sorted_x is None and needs[4]:  # the first factor's gradient gathers the tokens
                sorted_x, bits = x, bits | _OF_TOKENS
            arguments = (grad, sorted_x, of_gate_up, index, *weights, gate_up_bias, down_bias)
            arguments = (*arguments, (a, b, second_a, second_b), ctx.scalings, rank_rows, *ctx.form, bits)
            backward = native.experts_training_backward_ if is_alone else native.experts_training_backward
            found = dispatch.op_or_parts(backward, arguments, lambda: _composed_gradients(*composed))
        found = iter(found)
        return (*[next(found) if need else None for need in needs], None, None, None)


class _Traced(torch.autograd.Function):
    """Node for torch.compile, without adapters: the graph owns the kept values, and no gradient is differentiated.

    The backward is two calls, so that the graph frees the kept values of gate and up after the first.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, *others: Any) -> Tensor:
        *stacks, index, form = others
        found = native.experts_training_forward(x, index, weights, *stacks, *_NO_FACTORS, *form, True)
        ctx.form = form
        ctx.save_for_backward(weights, *stacks, index, *found[1:])
        return found[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tuple[Optional[Tensor], ...]:
        *given, index, sorted_x, of_gate_up = ctx.saved_tensors
        needs = ctx.needs_input_grad[:6]
        others = index, *given, *_NO_FACTORS, None, *ctx.form
        places = (0, 1, 2, 3, _OPERANDS - 2, _OPERANDS - 1)
        bits = [need << place for place, need in zip(places, needs)]
        behind, before = sum(bits[i] for i in _BEHIND_SUMS), sum(bits[i] for i in _BEFORE_SUMS)
        if not behind:
            found = native.experts_training_backward(grad, None, of_gate_up, *others, before)
        else:
            *found, sums = native.experts_training_backward(grad, None, of_gate_up, *others, before | _OF_SUMS)
            sorted_x = sorted_x if needs[2] else None
            of_sums = native.experts_training_backward(grad, sorted_x, sums, *others, behind | _BY_SUMS)
            found = [*found, *of_sums]
        gradients = dict(zip([i for i in (*_BEFORE_SUMS, *_BEHIND_SUMS) if needs[i]], found))
        return (*[gradients.get(i) for i in range(6)], None, None)


_NO_FACTORS = ((None,) * 4, (1.0, 1.0))
_BEFORE_SUMS, _BEHIND_SUMS = (1, 3, 5), (0, 2, 4)  # gradients of each call, among x, shares, weights and biases
_OF_SUMS, _BY_SUMS, _OF_TOKENS = 1 << 10, 1 << 11, 1 << 12  # as in cuda/experts/experts_training.cpp
_OPERANDS = 10  # operands that may have gradients: x, its shares, two weights, four factors, two biases


def _composed_gradients(
    given: Tuple[Optional[Tensor], ...],
    index: Tensor,
    grad: Tensor,
    needs: Tuple[bool, ...],
    form: experts.Form,
    scalings: Sequence[float],
) -> Tuple[Tensor, ...]:
    """Compute the gradients with torch operations, which can be differentiated again."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        given = tuple(tensor if tensor is None else tensor.view_as(tensor) for tensor in given)
        x, weights, gate_up, down, *factors, gate_up_bias, down_bias = given
        both = zip(factors[::2], factors[1::2], scalings)
        adapters = tuple(None if a is None else _Adapter(a, b, scaling) for a, b, scaling in both)
        operands = (x, index, weights, gate_up, down, gate_up_bias, down_bias)
        result = experts.composed(*operands, form, reference.act_and_mul, adapters)
    wanted = [tensor for tensor, need in zip(given, needs) if need]
    return torch.autograd.grad(result, wanted, grad, create_graph=create_graph)


class _Adapter(NamedTuple):
    """The fields of ``Adapter`` that experts use."""

    a: Tensor
    b: Tensor
    scaling: float
