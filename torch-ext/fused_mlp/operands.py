"""Checks of the functions' operands.

A check raises :class:`OperandTypeError` for an operand that is not a tensor, does not have a floating dtype, or differs
from the first operand in dtype. It raises :class:`OperandValueError` for a wrong shape or device. The message names the
argument, the value it got and the value it needs.
"""

from __future__ import annotations

from numbers import Real
from typing import Any, Optional, Tuple

import torch
from torch import Tensor

PLAIN_TENSORS = (Tensor, torch.nn.Parameter)

# Codes of norms (torch-ext/ops/norms/norm.h): those that subtract the mean, and those that store their weight minus 1.
CENTRED_NORMS, NORMS_OF_ONE_MORE = (1, 5), (3, 5)

_INDEX_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8)


class OperandTypeError(TypeError, RuntimeError):
    """A TypeError that is also a RuntimeError, which PyTorch raises for many such operands."""


class OperandValueError(ValueError, RuntimeError):
    """A ValueError that is also a RuntimeError, which PyTorch raises for such operands."""


def check_flags(**flags: bool) -> None:
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise OperandTypeError(f"{name} must be True or False, got {type(value).__name__}")


def check_act_and_mul(gate: Tensor, up: Tensor) -> None:
    _check_tensor("gate", gate)
    _check_tensor("up", up)
    if gate.shape != up.shape:
        raise OperandValueError(f"up must have the shape of gate, {shape_of(gate)}, got {shape_of(up)}")
    if gate.device != up.device:
        raise OperandValueError(f"up must be on the device of gate, {gate.device}, got {up.device}")
    if gate.dtype != up.dtype and not autocasts(gate):
        raise OperandTypeError(f"up must have the dtype of gate, {gate.dtype}, got {up.dtype}")


def are_row_major(first: Tensor, second: Tensor) -> bool:
    """True if the elements of two tensors of one shape are in memory in the order of the dimensions, perhaps with gaps:
    so are those of results of PyTorch's elementwise operations on them, without gaps."""
    if first.is_contiguous() and second.is_contiguous():
        return True
    sizes = first.shape
    for strides in (first.stride(),) if second.stride() == first.stride() else (first.stride(), second.stride()):
        least = 1
        for size, stride in zip(sizes[::-1], strides[::-1]):
            if stride < least:
                return False
            least = stride * size
    return True


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
            f"up_weight must have the shape of gate_weight, {shape_of(gate_weight)}, got {shape_of(up_weight)}"
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


def check_packed_gated(
    x: Tensor,
    weight: Tensor,
    second_weight: Optional[Tensor],
    bias: Optional[Tensor],
    second_bias: Optional[Tensor],
) -> None:
    check_linear(x, weight, bias)
    if weight.shape[0] % 2 != 0:
        raise OperandValueError(f"weight must be [out, in] with an even out if gated, got {shape_of(weight)}")
    if second_weight is not None:
        hidden = weight.shape[0] // 2
        _check_projection(x, "weight", hidden, "second_weight", second_weight, "second_bias", second_bias)


def check_mlp(
    x: Tensor, fc1_weight: Tensor, fc2_weight: Tensor, fc1_bias: Optional[Tensor], fc2_bias: Optional[Tensor]
) -> None:
    _check_input(x)
    _check_projection(x, "x", x.shape[-1], "fc1_weight", fc1_weight, "fc1_bias", fc1_bias)
    _check_projection(x, "fc1_weight", fc1_weight.shape[0], "fc2_weight", fc2_weight, "fc2_bias", fc2_bias)


def check_experts_mlp(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    gate_up_bias: Optional[Tensor],
    down_bias: Optional[Tensor],
    gated: bool,
    interleaved: bool,
    transposed: bool,
    limit: Optional[float],
    up_offset: float,
) -> None:
    _check_input(x)
    check_flags(gated=gated, interleaved=interleaved, transposed=transposed)
    _check_routing(x, top_k_index, top_k_weights)
    check_like(x, "gate_up_weight", gate_up_weight)
    check_like(x, "down_weight", down_weight)
    layout = "[experts, in, out]" if transposed else "[experts, out, in]"
    in_dim, out_dim = (1, 2) if transposed else (2, 1)
    if gate_up_weight.dim() != 3 or gate_up_weight.shape[in_dim] != x.shape[-1] or gate_up_weight.shape[0] == 0:
        raise OperandValueError(
            f"gate_up_weight must be {layout} with in = {x.shape[-1]} to fit x and at least one expert, "
            f"got {shape_of(gate_up_weight)}"
        )
    experts, hidden = gate_up_weight.shape[0], gate_up_weight.shape[out_dim]
    if gated and hidden % 2 != 0:
        raise OperandValueError(
            f"gate_up_weight must be {layout} with an even out if gated, got {shape_of(gate_up_weight)}"
        )
    hidden = hidden // 2 if gated else hidden
    if down_weight.dim() != 3 or down_weight.shape[0] != experts or down_weight.shape[in_dim] != hidden:
        raise OperandValueError(
            f"down_weight must be {layout} with experts = {experts} and in = {hidden} to fit gate_up_weight, "
            f"got {shape_of(down_weight)}"
        )
    for name, bias, weight in (("gate_up", gate_up_bias, gate_up_weight), ("down", down_bias, down_weight)):
        if bias is not None:
            check_like(x, f"{name}_bias", bias)
            features = weight.shape[out_dim]
            if bias.dim() != 2 or bias.shape[0] != experts or bias.shape[1] != features:
                raise OperandValueError(
                    f"{name}_bias must be [{experts}, {features}] to fit {name}_weight, got {shape_of(bias)}"
                )
    check_number("up_offset", up_offset)
    if limit is not None:
        check_number("limit", limit)
    if not gated and (interleaved or limit is not None or up_offset != 0):
        raise OperandValueError("interleaved, limit and up_offset must not be given if gated is False")
    if limit is not None and not limit > 0:
        raise OperandValueError(f"limit must be positive or None, got {limit}")


def _check_routing(x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> None:
    for name, tensor in (("top_k_index", top_k_index), ("top_k_weights", top_k_weights)):
        if not isinstance(tensor, Tensor):
            raise OperandTypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if tensor.device != x.device:
            raise OperandValueError(f"{name} must be on the device of x, {x.device}, got {tensor.device}")
    if top_k_index.dtype not in _INDEX_DTYPES:
        raise OperandTypeError(f"top_k_index must have a signed integer dtype, got {top_k_index.dtype}")
    _check_tensor("top_k_weights", top_k_weights)
    if top_k_index.dim() != x.dim() or top_k_index.shape[:-1] != x.shape[:-1] or x.dim() < 2:
        raise OperandValueError(
            f"top_k_index must be [tokens, k] and x [tokens, in], with the same leading dimensions, "
            f"got {shape_of(top_k_index)} and {shape_of(x)}"
        )
    if top_k_weights.shape != top_k_index.shape:
        raise OperandValueError(
            f"top_k_weights must have the shape of top_k_index, {shape_of(top_k_index)}, got {shape_of(top_k_weights)}"
        )


def autocasts(x: Tensor) -> bool:
    """True if autocast is on for the device of ``x``."""
    if x.is_cuda:  # several times as fast as x.device.type
        return torch.is_autocast_enabled("cuda")
    if x.is_cpu:
        return torch.is_autocast_enabled("cpu")
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)  # raises for meta


def is_narrowed(x: Tensor) -> bool:
    """True if torch multiplies tensors of the dtype and device of ``x`` in bfloat16, as it may for float32 on a CPU.

    On a GPU, float32 GEMMs are always torch's own.
    """
    return x.is_cpu and x.dtype == torch.float32 and narrows_float32()


def narrows_float32() -> bool:
    """True if ``torch.set_float32_matmul_precision`` or ``torch.backends`` sets bfloat16 for float32 GEMMs on CPUs."""
    return _precision("mkldnn", "matmul") == "bf16"


NARROWED = "float32 GEMMs that torch is set to compute in bfloat16"

_precision = torch._C._get_fp32_precision_getter
narrows_float32._dynamo_marked_constant = True  # as torch.compiler.assume_constant_result would, which imports Dynamo


def halves(both: Optional[Tensor], up_first: bool) -> Tuple[Optional[Tensor], Optional[Tensor]]:
    """Return the gate half and the up half of a packed weight or bias, which must have an even number of rows."""
    first, second = (None, None) if both is None else both.chunk(2)
    return (second, first) if up_first else (first, second)


def shape_of(tensor: Any) -> str:
    """Return the shape of a tensor in words; of anything else the type."""
    return str(list(tensor.shape)) if isinstance(tensor, Tensor) else type(tensor).__name__


def _check_tensor(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise OperandTypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.is_nested and tensor.layout == torch.strided:
        raise OperandTypeError(
            f"{name} must be a regular or jagged tensor, got a nested tensor with layout torch.strided"
        )
    if not tensor.dtype.is_floating_point:
        raise OperandTypeError(f"{name} must have a floating-point dtype, got {tensor.dtype}")


def _check_input(x: Tensor) -> None:
    _check_tensor("x", x)
    if x.dim() == 0:
        raise OperandValueError("x must have at least one dimension, [..., in], got a scalar")


def check_like(x: Tensor, name: str, tensor: Tensor, may_be_wide: bool = False) -> None:
    """Raise OperandTypeError or OperandValueError unless ``tensor`` has the device and dtype of ``x``.

    If ``may_be_wide``, float32 is accepted too.
    """
    _check_tensor(name, tensor)
    if tensor.device != x.device:
        raise OperandValueError(f"{name} must be on the device of x, {x.device}, got {tensor.device}")
    is_wide = may_be_wide and tensor.dtype == torch.float32
    if tensor.dtype != x.dtype and not is_wide and not autocasts(x):
        raise OperandTypeError(f"{name} must have the dtype of x, {x.dtype}, got {tensor.dtype}")


def check_number(name: str, number: float) -> None:
    if torch.compiler.is_compiling():  # the type of a traced number is unknown
        return
    if type(number) not in (float, int) and not isinstance(number, Real):
        raise OperandTypeError(f"{name} must be a number, got {type(number).__name__}")


def _check_projection(
    x: Tensor,
    in_name: str,
    in_features: int,
    weight_name: str,
    weight: Tensor,
    bias_name: str,
    bias: Optional[Tensor],
) -> None:
    check_like(x, weight_name, weight)
    if weight.dim() != 2 or weight.shape[1] != in_features:
        raise OperandValueError(
            f"{weight_name} must be [out, in] with in = {in_features} to fit {in_name}, got {shape_of(weight)}"
        )
    if bias is not None:
        check_like(x, bias_name, bias)
        if bias.dim() != 1 or bias.shape[0] != weight.shape[0]:
            raise OperandValueError(
                f"{bias_name} must be [{weight.shape[0]}] to fit {weight_name}, got {shape_of(bias)}"
            )
