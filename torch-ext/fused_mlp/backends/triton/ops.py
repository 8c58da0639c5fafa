"""The kernels as PyTorch ops, as torch.compile, export and vmap require, at 2 us of CPU overhead a call."""

from __future__ import annotations

from functools import partial

import torch

from ..._ops import add_op_namespace_prefix, ops
from .. import fakes, reference
from . import experts, gemm, glu

_DEVICES = ("cuda", "xpu", "cpu")  # the interpreter's tensors are on the CPU

_GATED = (
    "(Tensor x, Tensor gate_weight, Tensor up_weight, Tensor? gate_bias, Tensor? up_bias, int activation) -> Tensor"
)
_EXPERTS = (
    "(Tensor x, Tensor top_k_index, Tensor top_k_weights, Tensor gate_up_weight, Tensor down_weight, "
    "Tensor? gate_up_bias, Tensor? down_bias, int activation, bool gated, bool interleaved, bool transposed, "
    "float? limit, float up_offset) -> Tensor"
)

for _name, _schema, _compute, _made in (
    ("act_and_mul", "(Tensor gate, Tensor up, int activation) -> Tensor", glu.act_and_mul, fakes.like_gate),
    (
        "act_and_mul_backward",
        "(Tensor grad, Tensor gate, Tensor up, int activation) -> (Tensor, Tensor)",
        glu.act_and_mul_backward,
        fakes.like_gate_and_up,
    ),
    ("linear", "(Tensor x, Tensor weight, Tensor? bias, int activation) -> Tensor", gemm.linear, fakes.like_product),
    ("gated_linear", _GATED, gemm.gated_linear, lambda x, gate_weight: fakes.like_product(x, gate_weight)),
    ("experts_mlp", _EXPERTS, experts.experts_mlp, fakes.of_experts),
):
    _op = f"triton_{_name}"
    torch.library.define(add_op_namespace_prefix(_op), _schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(add_op_namespace_prefix(_op), _DEVICES, _compute)
    fakes.register_result(_op, _made)

act_and_mul = ops.triton_act_and_mul.default
act_and_mul_backward = ops.triton_act_and_mul_backward.default
linear = ops.triton_linear.default
gated_linear = ops.triton_gated_linear.default
experts_mlp = ops.triton_experts_mlp.default

# The last layer has nothing to fuse, and PyTorch's GEMM is faster.
gated_mlp = partial(reference.gated_mlp, first=gated_linear)
mlp = partial(reference.mlp, first=linear)
