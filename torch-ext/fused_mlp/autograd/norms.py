"""A norm by itself, or of a sum, as autograd follows it: one op forward and one backward.

The forward saves its input and two numbers of a row at most. The backward adds the gradient of the residual, where the
input of the norm is that too, in the same kernel. A gradient that is differentiated in its turn is composed.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from .. import dispatch
from .._ops import add_op_namespace_prefix
from ..backends import native, reference
from . import training

_plain_forward, _plain_sum_forward, _plain_backward = (
    getattr(op, "_op", None) for op in (native.norm_forward, native.sum_norm_forward, native.norm_backward)
)

SUMS_BIASES = native.DEVICE_TYPE == "cuda"  # the backward of a norm of a sum also sums the gradient of a bias

# Bound once: to look these up is a measurable part of a small call.
_below_autograd = torch._C._AutoDispatchBelowAutograd
_dispatch_modes = torch._C._len_torch_dispatch_stack
_is_compiling = torch.compiler.is_compiling


class Given(NamedTuple):
    """The operands of a norm: x ``[..., features]``, weight and bias ``[features]``, and what the op is told besides.

    ``code`` is one of torch-ext/ops/norm.h. ``rounded``: what is normed is rounded before the weight multiplies it.
    """

    x: Tensor
    weight: Optional[Tensor]
    bias: Optional[Tensor]
    eps: float
    code: int
    rounded: bool


def run(given: Tuple[Any, ...]) -> Tensor:
    """The norm of :class:`Given` by the compiled op, whether autograd follows it or not."""
    if training.is_recording():
        for tensor in given[:3]:
            if tensor is not None and tensor.requires_grad:
                return _norm(*given)
    return native.norm_forward(*given)[0]


def forked(given: Given) -> Tuple[Tensor, Tensor]:
    """The norm, and x itself for the sum behind what follows: its gradient is added where the norm's is computed."""
    return _forked(*given)


def of_sum(
    x: Tensor,
    residual: Tensor,
    weight: Optional[Tensor],
    bias: Optional[Tensor],
    behind: Optional[Tensor],
    eps: float,
    code: int,
    dropout: float,
) -> Tensor:
    """``norm(residual + dropout(x))``, of a dropout that is active unless it is 0.

    ``behind``: a bias ``[features]`` that x has been added without autograd's knowledge, and that gets its gradient
    here.
    """
    return _of_sum(x, residual, weight, bias, behind, eps, code, dropout)[0]


def _setup(ctx: Any, given: Tuple[Any, ...], statistics: Tensor) -> None:
    x, weight, bias, *ctx.how = given
    ctx.save_for_backward(x, weight, bias, statistics)


def _gradients(ctx: Any, grad: Optional[Tensor], residual_grad: Optional[Tensor]) -> Tuple[Optional[Tensor], ...]:
    needs = ctx.needs_input_grad[:3]
    if grad is None:
        return residual_grad, None, None, None, None, None
    (x, weight, bias, statistics), (eps, code, rounded) = ctx.saved_tensors, ctx.how

    def composed() -> Tuple[Tensor, ...]:
        return _composed(Given(x, weight, bias, eps, code, rounded), grad, residual_grad, needs)

    if training.is_gradient_seen(grad) or (residual_grad is not None and training.is_gradient_seen(residual_grad)):
        found = composed()
    else:
        backward = native.norm_backward if _is_compiling() or _dispatch_modes() else _plain_backward
        bits = needs[0] | needs[1] << 1 | needs[2] << 2
        arguments = (grad, x, weight, statistics, residual_grad if needs[0] else None, None, 0.0, code, bits)
        found = dispatch.op_or_parts(backward, arguments, composed)
    found = iter(found)
    return (*[next(found) if need else None for need in needs], None, None, None)


def _composed(
    given: Given, grad: Tensor, residual_grad: Optional[Tensor], needs: Tuple[bool, ...]
) -> Tuple[Tensor, ...]:
    """The gradients by PyTorch's operations, which can be differentiated again."""
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
        with _below_autograd():
            y, statistics = _plain_forward(*given)
        _setup(ctx, given, statistics)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tuple[Optional[Tensor], ...]:
        return _gradients(ctx, grad, None)


class _Forked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tuple[Tensor, Tensor]:
        with _below_autograd():
            y, statistics = _plain_forward(*given)
        _setup(ctx, given, statistics)
        ctx.set_materialize_grads(False)
        return y, given[0]

    @staticmethod
    def backward(ctx: Any, grad: Optional[Tensor], residual_grad: Optional[Tensor]) -> Tuple[Optional[Tensor], ...]:
        return _gradients(ctx, grad, residual_grad)


class _OfSum(torch.autograd.Function):
    """Its second result is the sum, through which a gradient that is differentiated finds x and the residual."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor,
        weight: Optional[Tensor],
        bias: Optional[Tensor],
        behind: Optional[Tensor],
        *how: Any,
    ) -> Tuple[Tensor, Tensor]:
        with _below_autograd():
            y, total, statistics, *kept = _plain_sum_forward(x, residual, weight, bias, *how)
        ctx.how = how
        # By the attributes that the methods of these names set: set_materialize_grads(), save_for_backward().
        ctx.materialize_grads, ctx.to_save = False, (total, weight, bias, statistics, *kept)
        return y, total

    @staticmethod
    def backward(ctx: Any, grad: Optional[Tensor], sum_grad: Optional[Tensor]) -> Tuple[Optional[Tensor], ...]:
        if grad is None and sum_grad is None:
            return (None,) * 8
        (total, weight, bias, statistics, *kept), (eps, code, dropout) = ctx.saved_tensors, ctx.how
        mask = kept[0] if kept else None
        of_x, of_residual, of_weight, of_bias, _ = needs = ctx.needs_input_grad[:5]
        wanted, bits = _wanted(needs, mask is not None)

        def composed() -> Tuple[Optional[Tensor], ...]:
            found = [sum_grad, None, None]
            if grad is not None:
                of_norm = True, of_weight, of_bias
                given = Given(total, weight, bias, eps, code, False)
                gradients = iter(_composed(given, grad, sum_grad, of_norm))
                found = [next(gradients) if need else None for need in of_norm]
            dropped = found[0]
            if mask is not None:
                dropped = torch.ops.aten.native_dropout_backward(dropped, mask, 1.0 / (1.0 - dropout))
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
        return of_x, both if of_residual else None, of_weight, of_bias, of_behind, None, None, None


@functools.cache
def _wanted(needs: Tuple[bool, ...], drops: bool) -> Tuple[Tuple[bool, ...], int]:
    """The gradients that the op of the backward is asked for, in its order, and their bits."""
    of_x, of_residual, of_weight, of_bias, of_behind = needs
    wanted = of_residual or (of_x and not drops), of_weight, of_bias, of_x and drops, of_behind
    return wanted, sum(want << place for place, want in enumerate(wanted))


# Without what torch's own ``apply`` does before this in Python, for operands of transforms.
_norm, _forked, _of_sum = (super(torch.autograd.Function, kind).apply for kind in (_Norm, _Forked, _OfSum))


def _setup_context(ctx: Any, inputs: Tuple[Any, ...], output: Tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    _setup(ctx, inputs, output[1])


def _registered_gradients(ctx: Any, grad: Optional[Tensor], *_: None) -> Tuple[Optional[Tensor], ...]:
    return _gradients(ctx, grad, None)


if native.DEVICE_TYPE is not None:
    torch.library.register_autograd(
        add_op_namespace_prefix("norm_forward"), _registered_gradients, setup_context=_setup_context
    )
