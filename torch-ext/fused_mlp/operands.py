"""What the functions ask of their operands.

A check raises :class:`OperandTypeError` for an operand that is no tensor, is not of a floating dtype or differs in
dtype from the first, and :class:`OperandValueError` for a shape or a device that does not fit; the message names the
argument, what came and what is needed.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

PLAIN_TENSORS = (Tensor, torch.nn.Parameter)


class OperandTypeError(TypeError, RuntimeError):
    """A TypeError that is a RuntimeError too, which is what PyTorch raises for many such operands."""


class OperandValueError(ValueError, RuntimeError):
    """A ValueError that is a RuntimeError too, which is what PyTorch raises for such operands."""


def check_act_and_mul(gate: Tensor, up: Tensor) -> None:
    _check_tensor("gate", gate)
    _check_tensor("up", up)
    if gate.shape != up.shape:
        raise OperandValueError(f"up must have the shape of gate, {_shape(gate)}, got {_shape(up)}")
    if gate.device != up.device:
        raise OperandValueError(f"up must be on the device of gate, {gate.device}, got {up.device}")
    if gate.dtype != up.dtype and not autocasts(gate):
        raise OperandTypeError(f"up must have the dtype of gate, {gate.dtype}, got {up.dtype}")


def check_linear(x: Tensor, weight: Tensor, bias: Optional[Tensor]) -> None:
    _check_input(x)
    _check_projection(x, "x", x.shape[-1], "weight", weight, "bias", bias)


def check_gated_linear(
    x: Tensor, gate_weight: Tensor, up_weight: Tensor, gate_bias: Optional[Tensor], up_bias: Optional[Tensor]
) -> None:
    _check_input(x)
    _check_projection(x, "x", x.shape[-1], "gate_weight", gate_weight, "gate_bias", gate_bias)
    _check_projection(x, "x", x.shape[-1], "up_weight", up_weight, "up_bias", up_bias)
    if up_weight.shape[0] != gate_weight.shape[0]:
        raise OperandValueError(
            f"up_weight must have the shape of gate_weight, {_shape(gate_weight)}, got {_shape(up_weight)}"
        )


def check_gated_mlp(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    gate_bias: Optional[Tensor],
    up_bias: Optional[Tensor],
    down_bias: Optional[Tensor],
) -> None:
    check_gated_linear(x, gate_weight, up_weight, gate_bias, up_bias)
    _check_projection(x, "gate_weight", gate_weight.shape[0], "down_weight", down_weight, "down_bias", down_bias)


def check_mlp(
    x: Tensor, fc1_weight: Tensor, fc2_weight: Tensor, fc1_bias: Optional[Tensor], fc2_bias: Optional[Tensor]
) -> None:
    _check_input(x)
    _check_projection(x, "x", x.shape[-1], "fc1_weight", fc1_weight, "fc1_bias", fc1_bias)
    _check_projection(x, "fc1_weight", fc1_weight.shape[0], "fc2_weight", fc2_weight, "fc2_bias", fc2_bias)


def autocasts(x: Tensor) -> bool:
    """Whether autocast is on for the device of ``x``."""
    if x.is_cuda:  # several times as fast as x.device.type
        return torch.is_autocast_enabled("cuda")
    if x.is_cpu:
        return torch.is_autocast_enabled("cpu")
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)  # which raises for meta


def _shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))


def _check_tensor(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise OperandTypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.is_nested and tensor.layout == torch.strided:
        raise OperandTypeError(
            f"{name} must be a tensor of one shape, or jagged, got a nested tensor of layout torch.strided"
        )
    if not tensor.dtype.is_floating_point:
        raise OperandTypeError(f"{name} must be of a floating dtype, got {tensor.dtype}")


def _check_input(x: Tensor) -> None:
    _check_tensor("x", x)
    if x.dim() == 0:
        raise OperandValueError("x must have at least one dimension, [..., in], got a scalar")


def _check_like(x: Tensor, name: str, tensor: Tensor) -> None:
    _check_tensor(name, tensor)
    if tensor.device != x.device:
        raise OperandValueError(f"{name} must be on the device of x, {x.device}, got {tensor.device}")
    if tensor.dtype != x.dtype and not autocasts(x):
        raise OperandTypeError(f"{name} must have the dtype of x, {x.dtype}, got {tensor.dtype}")


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
        raise OperandValueError(
            f"{weight_name} must be [out, in] with in = {in_features} to fit {in_name}, got {_shape(weight)}"
        )
    if bias is not None:
        _check_like(x, bias_name, bias)
        if bias.dim() != 1 or bias.shape[0] != weight.shape[0]:
            raise OperandValueError(f"{bias_name} must be [{weight.shape[0]}] to fit {weight_name}, got {_shape(bias)}")
