"""The experts of a mixture as autograd follows them: one op forward and one backward, by the compiled ops of Hopper.

What they do not take is composed (``experts``), and so is a gradient that is differentiated in its turn.
"""

from __future__ import annotations

from typing import Any, Optional, Sequence, Tuple

import torch
from torch import Tensor

from . import dispatch, experts, training
from .backends import native, reference

_is_compiling = torch.compiler.is_compiling


def refusal(given: Sequence[Optional[Tensor]], form: experts.Form) -> Optional[str]:
    """The reason why a call that autograd follows, of plain tensors, is not one op each way; None if it is."""
    x, index, _, gate_up, down, *biases = given
    if _is_compiling() or training.is_transformed() or training.is_followed():
        return "something follows the parts"
    if form != experts.Form(form.activation, True, False, False, None, 0.0) or biases != [None, None]:
        return "experts with more than gates and ups side by side"
    if native.DEVICE_TYPE != "cuda" or dispatch.select("experts_mlp", x) is not native or not native.is_hopper(x):
        return "no kernel that trains on this device"
    if x.dtype not in (torch.bfloat16, torch.float16) or x.dtype != gate_up.dtype or x.dtype != down.dtype:
        return "operands of other dtypes"
    if x.dim() != 2 or index.dim() != 2 or gate_up.dim() != 3 or down.dim() != 3:
        return "operands of other shapes"
    if native.experts_refusal(x, index, gate_up, down, False, False) is not None:
        return "operands that the kernels do not take"
    features, hidden = gate_up.shape[2], down.shape[2]
    if features % _FEATURES or hidden % _FEATURES or features == _FEATURES or down.shape[1] != features:
        return f"features that are no multiples of {_FEATURES}"
    return None


# As in cuda/experts_training.cpp: a step of the sums over them.
_FEATURES = 64


def run(given: Sequence[Optional[Tensor]], form: experts.Form) -> Tensor:
    """The result of a call of which :func:`refusal` says nothing."""
    x, index, weights, gate_up, down = given[:5]
    return _Experts.apply(x, weights, gate_up, down, index, form)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, form: experts.Form
    ) -> Tensor:
        out, sorted_x, kept = native.experts_training_forward(x, index, weights, gate_up, down, form.activation)
        ctx.form = form
        ctx.save_for_backward(x, weights, gate_up, down, index, sorted_x, kept)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tuple[Optional[Tensor], ...]:
        x, weights, gate_up, down, index, sorted_x, kept = ctx.saved_tensors
        needs = ctx.needs_input_grad[:4]
        if training.is_gradient_seen(grad):
            found = _composed_gradients((x, weights, gate_up, down), index, grad, needs, ctx.form)
        else:
            bits = sum(need << place for place, need in enumerate(needs))
            given = (grad, sorted_x, kept, index, weights, gate_up, down)
            composed = ((x, weights, gate_up, down), index, grad, needs, ctx.form)
            arguments = (*given, ctx.form.activation, bits)
            backward = native.experts_training_backward
            found = dispatch.op_or_parts(backward, arguments, lambda: _composed_gradients(*composed))
        found = iter(found)
        return (*[next(found) if need else None for need in needs], None, None)


def _composed_gradients(
    given: Tuple[Tensor, ...], index: Tensor, grad: Tensor, needs: Tuple[bool, ...], form: experts.Form
) -> Tuple[Tensor, ...]:
    """The gradients by PyTorch's operations, which can be differentiated again."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        x, weights, gate_up, down = given = tuple(tensor.view_as(tensor) for tensor in given)
        result = experts.composed(x, index, weights, gate_up, down, None, None, form, reference.act_and_mul)
    wanted = [tensor for tensor, need in zip(given, needs) if need]
    return torch.autograd.grad(result, wanted, grad, create_graph=create_graph)
