"""The kernels as ops that torch.compile takes whole. Eager calls do without: an op costs more CPU time than a launch."""

from __future__ import annotations

from typing import Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._ops import add_op_namespace_prefix
from . import gemm, glu

_act_and_mul = torch.library.custom_op(
    add_op_namespace_prefix("triton_act_and_mul"),
    glu.act_and_mul,
    mutates_args=(),
    schema="(Tensor gate, Tensor up, int activation) -> Tensor",
)
_act_and_mul_backward = torch.library.custom_op(
    add_op_namespace_prefix("triton_act_and_mul_backward"),
    glu.act_and_mul_backward,
    mutates_args=(),
    schema="(Tensor grad, Tensor gate, Tensor up, int activation) -> (Tensor, Tensor)",
)
_linear = torch.library.custom_op(
    add_op_namespace_prefix("triton_linear"),
    gemm.linear,
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor? bias, int activation) -> Tensor",
)
_gated_linear = torch.library.custom_op(
    add_op_namespace_prefix("triton_gated_linear"),
    gemm.gated_linear,
    mutates_args=(),
    schema="(Tensor x, Tensor gate_weight, Tensor up_weight, Tensor? gate_bias, Tensor? up_bias, int activation)"
    " -> Tensor",
)


@_act_and_mul.register_fake
def _(gate: Tensor, up: Tensor, activation: int) -> Tensor:
    return gate.new_empty(gate.shape)


@_act_and_mul_backward.register_fake
def _(grad: Tensor, gate: Tensor, up: Tensor, activation: int) -> Tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


@_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Optional[Tensor], activation: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@_gated_linear.register_fake
def _(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    gate_bias: Optional[Tensor],
    up_bias: Optional[Tensor],
    activation: int,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], gate_weight.shape[0]))


def act_and_mul(gate: Tensor, up: Tensor, activation: int) -> Tensor:
    call = _act_and_mul if torch.compiler.is_compiling() else glu.act_and_mul
    return call(gate, up, activation)


def act_and_mul_backward(grad: Tensor, gate: Tensor, up: Tensor, activation: int) -> Tuple[Tensor, Tensor]:
    call = _act_and_mul_backward if torch.compiler.is_compiling() else glu.act_and_mul_backward
    return call(grad, gate, up, activation)


def linear(x: Tensor, weight: Tensor, bias: Optional[Tensor], activation: int) -> Tensor:
    call = _linear if torch.compiler.is_compiling() else gemm.linear
    return call(x, weight, bias, activation)


def gated_linear(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    gate_bias: Optional[Tensor],
    up_bias: Optional[Tensor],
    activation: int,
) -> Tensor:
    call = _gated_linear if torch.compiler.is_compiling() else gemm.gated_linear
    return call(x, gate_weight, up_weight, gate_bias, up_bias, activation)


def gated_mlp(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    gate_bias: Optional[Tensor],
    up_bias: Optional[Tensor],
    down_bias: Optional[Tensor],
    activation: int,
) -> Tensor:
    hidden = gated_linear(x, gate_weight, up_weight, gate_bias, up_bias, activation)
    return F.linear(hidden, down_weight, down_bias)  # no epilogue to fuse: PyTorch's own product is the best there is


def mlp(
    x: Tensor,
    fc1_weight: Tensor,
    fc2_weight: Tensor,
    fc1_bias: Optional[Tensor],
    fc2_bias: Optional[Tensor],
    activation: int,
) -> Tensor:
    return F.linear(linear(x, fc1_weight, fc1_bias, activation), fc2_weight, fc2_bias)
