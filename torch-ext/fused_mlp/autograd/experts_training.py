"""The experts of a mixture as autograd follows them: one op forward and one backward, by the compiled ops of Hopper.

What they do not take is composed (``experts``), and so is a gradient that is differentiated in its turn.
"""

from __future__ import annotations

from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from .. import dispatch, experts
from ..backends import native, reference
from . import training

_is_compiling = torch.compiler.is_compiling


def refusal(
    given: Sequence[Optional[Tensor]], form: experts.Form, adapters: experts.Adapters = experts.NO_ADAPTERS
) -> Optional[str]:
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
    if adapters != experts.NO_ADAPTERS and hidden < _ADAPTED_FEATURES:
        return f"adapters of less than {_ADAPTED_FEATURES} hidden features"
    return None


# As in cuda/experts/experts_training.cpp: a step of the sums over them.
_FEATURES = 64
_ADAPTED_FEATURES = 128  # rows of a tile of an outer product


def factors_of(adapters: experts.Adapters) -> Tuple[List[Optional[Tensor]], List[float]]:
    """The factors of both products' adapters, a and b of each, and their scalings, as the ops take them."""
    factors = [factor for adapter in adapters for factor in ((None, None) if adapter is None else adapter[:2])]
    return factors, [1.0 if adapter is None else float(adapter.scaling) for adapter in adapters]


def run(
    given: Sequence[Optional[Tensor]], form: experts.Form, adapters: experts.Adapters = experts.NO_ADAPTERS
) -> Tensor:
    """The result of a call of which :func:`refusal` says nothing."""
    x, index, weights, gate_up, down = given[:5]
    factors, scalings = factors_of(adapters)
    return _Experts.apply(x, weights, gate_up, down, *factors, index, form, scalings)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, *others: Any) -> Tensor:
        *factors, index, form, scalings = others
        found = native.experts_training_forward(x, index, weights, gate_up, down, factors, scalings, form.activation)
        out, sorted_x, of_gate_up, *rank_rows = found
        # They belong to the node, where no hooks have to see what autograd saves: its backward may overwrite them.
        is_own = training._saved_tensors_hooks(False) is None
        ctx.form, ctx.scalings, ctx.own = form, scalings, (of_gate_up, None) if is_own else None
        kept = sorted_x, None if is_own else of_gate_up, *rank_rows
        ctx.save_for_backward(x, weights, gate_up, down, *factors, index, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tuple[Optional[Tensor], ...]:
        *given, index, sorted_x, of_gate_up = ctx.saved_tensors[:11]
        rank_rows = next(iter(ctx.saved_tensors[11:]), None)
        needs = ctx.needs_input_grad[:8]
        own, is_alone = ctx.own, False
        if own is not None and not training._keeps_graph():
            ctx.own = ()  # what autograd saves it frees as well
            is_alone = training._are_alone(own) and not training._dispatch_modes()
        of_gate_up = of_gate_up if own is None else own[0]
        composed = (tuple(given), index, grad, needs, ctx.form, ctx.scalings)
        if training.is_gradient_seen(grad):
            found = _composed_gradients(*composed)
        else:
            bits = sum(need << place for place, need in enumerate(needs))
            arguments = (grad, sorted_x, of_gate_up, index, *given[1:4], given[4:], ctx.scalings, rank_rows)
            backward = native.experts_training_backward_ if is_alone else native.experts_training_backward
            arguments = (*arguments, ctx.form.activation, bits)
            found = dispatch.op_or_parts(backward, arguments, lambda: _composed_gradients(*composed))
        found = iter(found)
        return (*[next(found) if need else None for need in needs], None, None, None)


def _composed_gradients(
    given: Tuple[Optional[Tensor], ...],
    index: Tensor,
    grad: Tensor,
    needs: Tuple[bool, ...],
    form: experts.Form,
    scalings: Sequence[float],
) -> Tuple[Tensor, ...]:
    """The gradients by PyTorch's operations, which can be differentiated again."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        given = tuple(tensor if tensor is None else tensor.view_as(tensor) for tensor in given)
        x, weights, gate_up, down, *factors = given
        both = zip(factors[::2], factors[1::2], scalings)
        adapters = tuple(None if a is None else _Adapter(a, b, scaling) for a, b, scaling in both)
        operands = (x, index, weights, gate_up, down, None, None)
        result = experts.composed(*operands, form, reference.act_and_mul, adapters)
    wanted = [tensor for tensor, need in zip(given, needs) if need]
    return torch.autograd.grad(result, wanted, grad, create_graph=create_graph)


class _Adapter(NamedTuple):
    """The part of an ``Adapter`` that experts have."""

    a: Tensor
    b: Tensor
    scaling: float
