"""How a call is computed: which parts are one op, and autograd around the others.

The functions are those of ``functional``, with a row of the table of activations in the place of its name. A call is
one op of one backend wherever nothing has to see the parts. Where something has to (autograd, autocast with operands to
cast, a tensor subclass with ways of its own, an export), torch runs the GEMMs and only the pointwise part is fused, or
nothing: ``composition_reason`` says which.
"""

from __future__ import annotations

from typing import Callable, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from . import dispatch, operands
from .activations import Activation
from .backends import native, reference
from .operands import PLAIN_TENSORS, autocasts


def act_and_mul(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    operands.check_act_and_mul(gate, up)
    if gate.dtype != up.dtype:
        dtype = torch.promote_types(gate.dtype, up.dtype)  # what a product does under autocast
        gate, up = gate.to(dtype), up.to(dtype)
    return _act_and_mul(gate, up, activation.code)


def linear(x: Tensor, weight: Tensor, bias: Optional[Tensor], activation: Activation) -> Tensor:
    if composition_reason(x, weight, bias) is None:
        return _one_op("linear", operands.check_linear, (x, weight, bias), activation.code)
    operands.check_linear(x, weight, bias)
    return reference.linear(x, weight, bias, activation.code)


def gated_linear(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    gate_bias: Optional[Tensor],
    up_bias: Optional[Tensor],
    activation: Activation,
) -> Tensor:
    given = (x, gate_weight, up_weight, gate_bias, up_bias)
    if composition_reason(*given) is None:
        return _one_op("gated_linear", operands.check_gated_linear, given, activation.code)
    operands.check_gated_linear(*given)
    return _composed_gated_linear(*given, activation.code)


def gated_mlp(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    gate_bias: Optional[Tensor],
    up_bias: Optional[Tensor],
    down_bias: Optional[Tensor],
    activation: Activation,
) -> Tensor:
    given = (x, gate_weight, up_weight, down_weight, gate_bias, up_bias, down_bias)
    if composition_reason(*given) is None:
        return _one_op("gated_mlp", operands.check_gated_mlp, given, activation.code)
    operands.check_gated_mlp(*given)
    hidden = _composed_gated_linear(x, gate_weight, up_weight, gate_bias, up_bias, activation.code)
    return F.linear(hidden, down_weight, down_bias)


def mlp(
    x: Tensor,
    fc1_weight: Tensor,
    fc2_weight: Tensor,
    fc1_bias: Optional[Tensor],
    fc2_bias: Optional[Tensor],
    activation: Activation,
) -> Tensor:
    given = (x, fc1_weight, fc2_weight, fc1_bias, fc2_bias)
    if composition_reason(*given) is None:
        return _one_op("mlp", operands.check_mlp, given, activation.code)
    operands.check_mlp(*given)
    return reference.mlp(*given, activation.code)


def composition_reason(*given: Optional[Tensor]) -> Optional[str]:
    """Why a call on these operands (the input first) cannot be one op, or None if it can."""
    reason = pointwise_reason(*given)
    if reason is not None:
        return reason
    x = given[0]
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in given):
        return "autograd follows the parts"
    if autocasts(x):
        dtype = torch.get_autocast_dtype(x.device.type)
        if any(tensor is not None and tensor.dtype != dtype for tensor in given):
            return f"autocast casts the operands to {dtype}"
    return None


def pointwise_reason(*given: Optional[Tensor]) -> Optional[str]:
    """Why not even the pointwise part of a call on these operands can be one op, or None if it can."""
    for tensor in given:
        if tensor is not None and type(tensor) not in PLAIN_TENSORS:
            return f"an operand is a {type(tensor).__name__}"
    if forward_ad._current_level >= 0:
        return "forward-mode autograd follows the parts"
    # A program that outlives this process must not need ops of this build, and may be trained, which ops cannot be.
    # The flag, not torch.compiler.is_exporting(), which is true in all that torch 2.11 compiles.
    if torch._C._get_tracing_state() is not None or torch.compiler._is_exporting_flag:
        return "torch.export and torch.jit.trace record the parts"
    return None


def _one_op(op: str, check: Callable[..., None], given: Tuple[Optional[Tensor], ...], activation: int) -> Tensor:
    implementation = dispatch.select(op, given[0])
    if implementation is not native or torch.compiler.is_compiling():
        check(*given)
        return getattr(implementation, op)(*given, activation)
    try:
        return getattr(native, op)(*given, activation)
    except RuntimeError:  # the compiled ops check what they are given, in less time than it takes here, but say less
        check(*given)
        raise


def _composed_gated_linear(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    gate_bias: Optional[Tensor],
    up_bias: Optional[Tensor],
    activation: int,
) -> Tensor:
    return _act_and_mul(F.linear(x, gate_weight, gate_bias), F.linear(x, up_weight, up_bias), activation)


def _act_and_mul(gate: Tensor, up: Tensor, activation: int) -> Tensor:
    if pointwise_reason(gate, up) is not None:
        return reference.act_and_mul(gate, up, activation)
    implementation = dispatch.select("act_and_mul", gate)
    if implementation is not reference and torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):
        return _ActAndMul.apply(gate, up, activation, implementation)
    return implementation.act_and_mul(gate, up, activation)


class _ActAndMul(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(gate: Tensor, up: Tensor, activation: int, implementation) -> Tensor:
        return implementation.act_and_mul(gate, up, activation)

    @staticmethod
    def setup_context(ctx, inputs, output):
        gate, up, ctx.activation, ctx.implementation = inputs
        ctx.save_for_backward(gate, up)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tuple[Optional[Tensor], ...]:
        gate, up = ctx.saved_tensors
        # With create_graph the gradient itself must be differentiable, which no kernel is.
        implementation = reference if torch.is_grad_enabled() else ctx.implementation
        gate_grad, up_grad = implementation.act_and_mul_backward(grad, gate, up, ctx.activation)
        return gate_grad, up_grad, None, None
