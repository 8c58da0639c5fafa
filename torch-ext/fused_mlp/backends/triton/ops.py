"""The kernels as PyTorch ops: what torch.compile, export and vmap need of them, for 2 us of CPU time a call."""

from __future__ import annotations

from typing import Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._ops import add_op_namespace_prefix, ops
from .. import strides
from . import experts, gemm, glu

_DEVICES = ("cuda", "xpu", "cpu")  # the interpreter's tensors are on the CPU
_TAGS = (torch.Tag.pt2_compliant_tag,)

torch.library.define(
    add_op_namespace_prefix("triton_act_and_mul"), "(Tensor gate, Tensor up, int activation) -> Tensor", tags=_TAGS
)
torch.library.define(
    add_op_namespace_prefix("triton_act_and_mul_backward"),
    "(Tensor grad, Tensor gate, Tensor up, int activation) -> (Tensor, Tensor)",
    tags=_TAGS,
)
torch.library.define(
    add_op_namespace_prefix("triton_linear"),
    "(Tensor x, Tensor weight, Tensor? bias, int activation) -> Tensor",
    tags=_TAGS,
)
torch.library.define(
    add_op_namespace_prefix("triton_gated_linear"),
    "(Tensor x, Tensor gate_weight, Tensor up_weight, Tensor? gate_bias, Tensor? up_bias, int activation) -> Tensor",
    tags=_TAGS,
)

torch.library.define(
    add_op_namespace_prefix("triton_experts_mlp"),
    "(Tensor x, Tensor top_k_index, Tensor top_k_weights, Tensor gate_up_weight, Tensor down_weight, "
    "Tensor? gate_up_bias, Tensor? down_bias, int activation, bool gated, bool interleaved, bool transposed, "
    "float? limit, float up_offset) -> Tensor",
    tags=_TAGS,
)

torch.library.impl(add_op_namespace_prefix("triton_act_and_mul"), _DEVICES, glu.act_and_mul)
torch.library.impl(add_op_namespace_prefix("triton_act_and_mul_backward"), _DEVICES, glu.act_and_mul_backward)
torch.library.impl(add_op_namespace_prefix("triton_linear"), _DEVICES, gemm.linear)
torch.library.impl(add_op_namespace_prefix("triton_gated_linear"), _DEVICES, gemm.gated_linear)
torch.library.impl(add_op_namespace_prefix("triton_experts_mlp"), _DEVICES, experts.experts_mlp)


@torch.library.register_fake(add_op_namespace_prefix("triton_act_and_mul"))
def _(gate: Tensor, up: Tensor, activation: int) -> Tensor:
    return strides.new_product(gate, up, activation)


@torch.library.register_fake(add_op_namespace_prefix("triton_act_and_mul_backward"))
def _(grad: Tensor, gate: Tensor, up: Tensor, activation: int) -> Tuple[Tensor, Tensor]:
    return strides.new_gradients(grad, gate, up, activation)


@torch.library.register_fake(add_op_namespace_prefix("triton_linear"))
def _(x: Tensor, weight: Tensor, bias: Optional[Tensor], activation: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@torch.library.register_fake(add_op_namespace_prefix("triton_gated_linear"))
def _(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    gate_bias: Optional[Tensor],
    up_bias: Optional[Tensor],
    activation: int,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], gate_weight.shape[0]))


@torch.library.register_fake(add_op_namespace_prefix("triton_experts_mlp"))
def _(
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
    return x.new_empty((x.shape[0], down_weight.shape[2 if transposed else 1]))


act_and_mul = ops.triton_act_and_mul.default
act_and_mul_backward = ops.triton_act_and_mul_backward.default
linear = ops.triton_linear.default
gated_linear = ops.triton_gated_linear.default
experts_mlp = ops.triton_experts_mlp.default


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
    return F.linear(hidden, down_weight, down_bias)  # nothing to fuse there: PyTorch's product is the better one


def mlp(
    x: Tensor,
    fc1_weight: Tensor,
    fc2_weight: Tensor,
    fc1_bias: Optional[Tensor],
    fc2_bias: Optional[Tensor],
    activation: int,
) -> Tensor:
    return F.linear(linear(x, fc1_weight, fc1_bias, activation), fc2_weight, fc2_bias)
