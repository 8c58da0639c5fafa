"""Autograd nodes of a standalone norm and of the norm of a sum: one op forward and one backward.

The forward saves its input and at most two numbers per row. If the norm's input is also the residual, the backward adds
the residual's gradient in the same kernel. A gradient that is differentiated again is composed of torch operations.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from .. import dispatch
from .._ops import add_op_namespace_prefix
from ..backends import native, reference
from . import nodes, training

# Past torch's dispatcher, if nothing has to observe the ops (torch-ext/calls/direct/ops.h).
_plain_forward, _plain_sum_forward, _plain_backward = (
    getattr(native.plain_modules, name, None) for name in ("norm_forward", "sum_norm_forward", "norm_backward")
)

SUMS_BIASES = native.DEVICE_TYPE == "cuda"  # the backward of a norm of a sum also sums the gradient of a bias

# Bound once: these look-ups are a measurable part of a small call.
_dispatch_modes = torch._C._len_torch_dispatch_stack
_is_compiling = torch.compiler.is_compiling


class Given(NamedTuple):
    """Operands of a norm: x ``[..., features]``, weight and bias ``[features]``, and the op's other arguments.

    ``code`` is one of torch-ext/ops/norms/norm.h. ``rounded``: normalised values are rounded before the product with
    the weight.
    """

    x: Tensor
    weight: Optional[Tensor]
    bias: Optional[Tensor]
    eps: float
    code: int
    rounded: bool


def run(given: Tuple[Any, ...]) -> Tensor:
    """Compute the norm of :class:`Given` by the compiled op, with or without autograd."""
    if training.is_recording():
        for tensor in given[:3]:
            if tensor is not None and tensor.requires_grad:
                return _norm(*given)
    return native.norm_forward(*given)[0]


def _setup(ctx: Any, given: Tuple[Any, ...], statistics: Tensor) -> None:
    x, weight, bias, *how = given
    ctx.how = tuple(how)
    ctx.save_for_backward(x, weight, bias, statistics)


def _gradients(ctx: Any, grad: Optional[Tensor], *_: None) -> Tuple[Optional[Tensor], ...]:
    if grad is None:
        return (None,) * 6
    x, weight, bias, statistics = ctx.saved_tensors
    given, needs = Given(x, weight, bias, *ctx.how), ctx.needs_input_grad[:3]
    return (*gradients(given, statistics, grad, None, needs, training.is_gradient_seen(grad)), None, None, None)


def gradients(
    given: Given,
    statistics: Tensor,
    grad: Tensor,
    residual_grad: Optional[Tensor],
    needs: Tuple[bool, ...],
    is_seen: bool,
) -> Tuple[Optional[Tensor], ...]:
    """Return the gradients of x, weight and bias. The gradient of x includes that of the residual, which is x too.

    ``is_seen`` is the result of ``training.is_gradient_seen``.
    """

    def composed() -> Tuple[Tensor, ...]:
        return _composed(given, grad, residual_grad, needs)

    if is_seen:
        found = composed()
    else:
        backward = native.norm_backward if _is_compiling() or _dispatch_modes() else _plain_backward
        bits = needs[0] | needs[1] << 1 | needs[2] << 2
        residual_grad = residual_grad if needs[0] else None
        arguments = (grad, given.x, given.weight, statistics, residual_grad, None, 0.0, given.code, bits)
        found = dispatch.op_or_parts(backward, arguments, composed)
    found = iter(found)
    return tuple([next(found) if need else None for need in needs])


def _composed(
    given: Given, grad: Tensor, residual_grad: Optional[Tensor], needs: Tuple[bool, ...]
) -> Tuple[Tensor, ...]:
    """Compute the gradients with torch operations, which can be differentiated again."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        tensors = [tensor if tensor is None else tensor.view_as(tensor) for tensor in given[:3]]
        result = reference.norm(*tensors, *given[3:])
    wanted = [tensor for tensor, need in zip(tensors, needs) if need]
    found = list(torch.autograd.grad(result, wanted, grad, create_graph=create_graph))
    if needs[0] and residual_grad is not None:
        found[0] = found[0] + residual_grad
    return tuple(found)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        y, statistics = _plain_forward(*given)
        ctx.materialize_grads = False
        _setup(ctx, given, statistics)
        return y

    backward = staticmethod(_gradients)


class OfSum(NamedTuple):
    """A norm of ``residual + dropout(x)`` as saved for its backward: the sum, and the mask of an active dropout."""

    total: Tensor
    weight: Optional[Tensor]
    bias: Optional[Tensor]
    statistics: Tensor
    mask: Optional[Tensor]
    eps: float
    code: int
    dropout: float


def sum_gradients(
    norm: OfSum, grad: Optional[Tensor], sum_grad: Optional[Tensor], needs: Tuple[bool, ...]
) -> Tuple[Optional[Tensor], ...]:
    """Return the gradients of x, of the residual, of weight and bias, and of a bias that was added to x.

    One of the gradients of the norm and of the sum may be None.
    """
    total, weight, bias, statistics, mask, eps, code, dropout = norm
    of_x, of_residual, of_weight, of_bias, _ = needs
    wanted, bits = _wanted(needs, mask is not None)

    def composed() -> Tuple[Optional[Tensor], ...]:
        found = [sum_grad, None, None]
        if grad is not None:
            of_norm = True, of_weight, of_bias
            gradients = iter(_composed(Given(total, weight, bias, eps, code, False), grad, sum_grad, of_norm))
            found = [next(gradients) if need else None for need in of_norm]
        dropped = found[0]
        if mask is not None:
            dropped = dropout_gradient(dropped, mask, dropout)
        found += [dropped, dropped.reshape(-1, dropped.shape[-1]).sum(0)]
        return tuple([each for each, want in zip(found, wanted) if want])

    if grad is None or sum_grad is not None or training.is_gradient_seen(grad):
        gradients = composed()
    else:
        backward = native.norm_backward if _dispatch_modes() else _plain_backward
        arguments = (grad, total, weight, statistics, None, mask, dropout, code, bits)
        gradients = dispatch.op_or_parts(backward, arguments, composed)
    gradients = iter(gradients)
    both, of_weight, of_bias, dropped, of_behind = [next(gradients) if want else None for want in wanted]
    of_x = (both if mask is None else dropped) if of_x else None
    return of_x, both if of_residual else None, of_weight, of_bias, of_behind


def dropout_gradient(grad: Tensor, mask: Tensor, dropout: float) -> Tensor:
    """Return the gradient of the input of an active dropout with this mask and probability."""
    return torch.ops.aten.native_dropout_backward(grad, mask, 1.0 / (1.0 - dropout))


@functools.cache
def _wanted(needs: Tuple[bool, ...], drops: bool) -> Tuple[Tuple[bool, ...], int]:
    """Return the gradients that the op of the backward has to compute, in its order, and their bits."""
    of_x, of_residual, of_weight, of_bias, of_behind = needs
    wanted = of_residual or (of_x and not drops), of_weight, of_bias, of_x and drops, of_behind
    return wanted, sum(want << place for place, want in enumerate(wanted))


_norm = nodes.applied(_Norm, getattr(native.plain_modules, "normed_backward", None))


def _setup_context(ctx: Any, inputs: Tuple[Any, ...], output: Tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    _setup(ctx, inputs, output[1])


if native.DEVICE_TYPE is not None:
    torch.library.register_autograd(add_op_namespace_prefix("norm_forward"), _gradients, setup_context=_setup_context)
