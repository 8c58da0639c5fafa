"""The public functions: argument checks, autograd, autocast, and the call of the chosen backend.

A call is one op of one backend wherever nothing has to see the parts. Where something has to (autograd, autocast with
operands to cast, a tensor subclass with ways of its own), torch runs the GEMMs and only the pointwise part is fused:
``composition_reason`` says which.

Every function takes float32, float16 or bfloat16 operands of one dtype and device (others run in plain PyTorch), any
leading dimensions, any strides. Each raises TypeError for an operand that is no tensor, is not of a floating dtype or
differs in dtype from the first, and ValueError for a shape, a device or an activation that does not fit; the message
names the argument, what came and what is needed.
"""

from __future__ import annotations

from typing import Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from . import dispatch
from .activations import get_activation
from .backends import reference

_PLAIN_TENSORS = (Tensor, torch.nn.Parameter)


def act_and_mul(gate: Tensor, up: Tensor, activation: Optional[str] = "gelu_pytorch_tanh") -> Tensor:
    """``act(gate) * up``, elementwise: the pointwise part of a gated MLP in one kernel.

    Args:
        gate: ``[...]``, the branch that the activation applies to.
        up: the same shape, dtype and device as ``gate``.
        activation: a name of ``transformers.activations.ACT2FN`` that the package knows, or None for the identity.

    Returns:
        A contiguous tensor of the shape and dtype of ``gate``.

    Source: Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202.
    """
    row = get_activation(activation)
    _check_tensor("gate", gate)
    _check_tensor("up", up)
    if gate.shape != up.shape:
        raise ValueError(f"up must have the shape of gate, {_shape(gate)}, got {_shape(up)}")
    if gate.device != up.device:
        raise ValueError(f"up must be on the device of gate, {gate.device}, got {up.device}")
    if gate.dtype != up.dtype:
        if not _autocasts(gate):
            raise TypeError(f"up must have the dtype of gate, {gate.dtype}, got {up.dtype}")
        dtype = torch.promote_types(gate.dtype, up.dtype)  # what a product does under autocast
        gate, up = gate.to(dtype), up.to(dtype)
    return _act_and_mul(gate, up, row.code)


def geglu(gate: Tensor, up: Tensor, approximate: str = "tanh") -> Tensor:
    """``gelu(gate) * up``: :func:`act_and_mul` with GELU, ``approximate`` as in :func:`torch.nn.functional.gelu`."""
    if approximate not in ("tanh", "none"):
        raise ValueError(f"approximate must be 'tanh' or 'none', got {approximate!r}")
    return act_and_mul(gate, up, "gelu_pytorch_tanh" if approximate == "tanh" else "gelu")


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``: :func:`act_and_mul` with SiLU."""
    return act_and_mul(gate, up, "silu")


def linear(x: Tensor, weight: Tensor, bias: Optional[Tensor] = None, activation: Optional[str] = None) -> Tensor:
    """``act(x weight^T + bias)``.

    Args:
        x: ``[..., in]``.
        weight: ``[out, in]``, as in ``torch.nn.Linear``.
        bias: ``[out]`` or None.
        activation: see :func:`act_and_mul`.

    Returns:
        ``[..., out]``.
    """
    row = get_activation(activation)
    _check_input(x)
    _check_projection(x, "x", x.shape[-1], "weight", weight, "bias", bias)
    if composition_reason(x, weight, bias) is not None:
        return reference.linear(x, weight, bias, row.code)
    return dispatch.select("linear", x).linear(x, weight, bias, row.code)


def gated_linear(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    gate_bias: Optional[Tensor] = None,
    up_bias: Optional[Tensor] = None,
    activation: Optional[str] = "gelu_pytorch_tanh",
) -> Tensor:
    """``act(x gate_weight^T + gate_bias) * (x up_weight^T + up_bias)``: the first half of a gated MLP.

    Args:
        x: ``[..., in]``.
        gate_weight, up_weight: ``[hidden, in]`` each, as in ``torch.nn.Linear``; two tensors, or two views of a packed
            one.
        gate_bias, up_bias: ``[hidden]`` or None.
        activation: see :func:`act_and_mul`.

    Returns:
        ``[..., hidden]``.
    """
    row = get_activation(activation)
    _check_input(x)
    _check_gated(x, gate_weight, up_weight, gate_bias, up_bias)
    if composition_reason(x, gate_weight, up_weight, gate_bias, up_bias) is not None:
        return _composed_gated_linear(x, gate_weight, up_weight, gate_bias, up_bias, row.code)
    return dispatch.select("gated_linear", x).gated_linear(x, gate_weight, up_weight, gate_bias, up_bias, row.code)


def gated_mlp(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    gate_bias: Optional[Tensor] = None,
    up_bias: Optional[Tensor] = None,
    down_bias: Optional[Tensor] = None,
    activation: Optional[str] = "gelu_pytorch_tanh",
) -> Tensor:
    """The whole gated MLP: ``gated_linear(x, ...) down_weight^T + down_bias``.

    Args:
        x: ``[..., in]``.
        gate_weight, up_weight: ``[hidden, in]`` each.
        down_weight: ``[out, hidden]``.
        gate_bias, up_bias: ``[hidden]`` or None.
        down_bias: ``[out]`` or None.
        activation: see :func:`act_and_mul`.

    Returns:
        ``[..., out]``.
    """
    row = get_activation(activation)
    _check_input(x)
    _check_gated(x, gate_weight, up_weight, gate_bias, up_bias)
    _check_projection(x, "gate_weight", gate_weight.shape[0], "down_weight", down_weight, "down_bias", down_bias)
    if composition_reason(x, gate_weight, up_weight, down_weight, gate_bias, up_bias, down_bias) is not None:
        hidden = _composed_gated_linear(x, gate_weight, up_weight, gate_bias, up_bias, row.code)
        return F.linear(hidden, down_weight, down_bias)
    return dispatch.select("gated_mlp", x).gated_mlp(
        x, gate_weight, up_weight, down_weight, gate_bias, up_bias, down_bias, row.code
    )


def mlp(
    x: Tensor,
    fc1_weight: Tensor,
    fc2_weight: Tensor,
    fc1_bias: Optional[Tensor] = None,
    fc2_bias: Optional[Tensor] = None,
    activation: Optional[str] = "gelu_pytorch_tanh",
) -> Tensor:
    """The whole plain MLP: ``act(x fc1_weight^T + fc1_bias) fc2_weight^T + fc2_bias``.

    Args:
        x: ``[..., in]``.
        fc1_weight: ``[hidden, in]``.
        fc2_weight: ``[out, hidden]``.
        fc1_bias: ``[hidden]`` or None.
        fc2_bias: ``[out]`` or None.
        activation: see :func:`act_and_mul`.

    Returns:
        ``[..., out]``.
    """
    row = get_activation(activation)
    _check_input(x)
    _check_projection(x, "x", x.shape[-1], "fc1_weight", fc1_weight, "fc1_bias", fc1_bias)
    _check_projection(x, "fc1_weight", fc1_weight.shape[0], "fc2_weight", fc2_weight, "fc2_bias", fc2_bias)
    if composition_reason(x, fc1_weight, fc2_weight, fc1_bias, fc2_bias) is not None:
        return reference.mlp(x, fc1_weight, fc2_weight, fc1_bias, fc2_bias, row.code)
    return dispatch.select("mlp", x).mlp(x, fc1_weight, fc2_weight, fc1_bias, fc2_bias, row.code)


def composition_reason(*operands: Optional[Tensor]) -> Optional[str]:
    """Why a call on these operands (the input first) cannot be one op, or None if it can."""
    x = operands[0]
    grad_enabled = torch.is_grad_enabled()
    for tensor in operands:
        if tensor is None:
            continue
        if type(tensor) not in _PLAIN_TENSORS:
            return f"an operand is a {type(tensor).__name__}"
        if grad_enabled and tensor.requires_grad:
            return "autograd follows the parts"
    if forward_ad._current_level >= 0:
        return "forward-mode autograd follows the parts"
    if _autocasts(x):
        dtype = torch.get_autocast_dtype(x.device.type)
        if any(tensor is not None and tensor.dtype != dtype for tensor in operands):
            return f"autocast casts the operands to {dtype}"
    return None


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
    if type(gate) not in _PLAIN_TENSORS or type(up) not in _PLAIN_TENSORS or forward_ad._current_level >= 0:
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


def _autocasts(x: Tensor) -> bool:
    if x.is_cuda:
        return torch.is_autocast_enabled("cuda")
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)  # which raises for meta


def _shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))


def _check_tensor(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if not tensor.dtype.is_floating_point:
        raise TypeError(f"{name} must be of a floating dtype, got {tensor.dtype}")


def _check_input(x: Tensor) -> None:
    _check_tensor("x", x)
    if x.dim() == 0:
        raise ValueError("x must have at least one dimension, [..., in], got a scalar")


def _check_like(x: Tensor, name: str, tensor: Tensor) -> None:
    if type(tensor) in _PLAIN_TENSORS and tensor.dtype == x.dtype and tensor.device == x.device:
        return
    _check_tensor(name, tensor)
    if tensor.device != x.device:
        raise ValueError(f"{name} must be on the device of x, {x.device}, got {tensor.device}")
    if tensor.dtype != x.dtype and not _autocasts(x):
        raise TypeError(f"{name} must have the dtype of x, {x.dtype}, got {tensor.dtype}")


def _check_projection(
    x: Tensor,
    in_name: str,
    in_features: int,
    weight_name: str,
    weight: Tensor,
    bias_name: str,
    bias: Optional[Tensor],
) -> None:
    _check_like(x, weight_name, weight)
    if weight.dim() != 2 or weight.shape[1] != in_features:
        raise ValueError(
            f"{weight_name} must be [out, in] with in = {in_features} to fit {in_name}, got {_shape(weight)}"
        )
    if bias is not None:
        _check_like(x, bias_name, bias)
        if bias.dim() != 1 or bias.shape[0] != weight.shape[0]:
            raise ValueError(f"{bias_name} must be [{weight.shape[0]}] to fit {weight_name}, got {_shape(bias)}")


def _check_gated(
    x: Tensor, gate_weight: Tensor, up_weight: Tensor, gate_bias: Optional[Tensor], up_bias: Optional[Tensor]
) -> None:
    _check_projection(x, "x", x.shape[-1], "gate_weight", gate_weight, "gate_bias", gate_bias)
    _check_projection(x, "x", x.shape[-1], "up_weight", up_weight, "up_bias", up_bias)
    if up_weight.shape[0] != gate_weight.shape[0]:
        raise ValueError(
            f"up_weight must have the shape of gate_weight, {_shape(gate_weight)}, got {_shape(up_weight)}"
        )
