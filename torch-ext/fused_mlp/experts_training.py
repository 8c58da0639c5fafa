"""The experts of a mixture as autograd follows them: one op forward and one backward, by the compiled ops of Hopper.

What they do not take is composed (``experts``), and so is a gradient that is differentiated in its turn.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import dispatch, experts, training
from .backends import native, reference

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


# As in cuda/experts_training.cpp: a step of the sums over them.
_FEATURES = 64
_ADAPTED_FEATURES = 128  # rows of a tile of an outer product


Factors = Tuple[Optional[Tensor], ...]  # a and b of the first product, and of the second


def run(given: Sequence[Optional[Tensor]], form: experts.Form, factors: Factors = (None,) * 4) -> Tensor:
    """The result of a call of which :func:`refusal` says nothing, with adapters' factors as ``factors_of`` gives them.
    """
    x, index, weights, gate_up, down = given[:5]
    return _Experts.apply(x, weights, gate_up, down, *factors, index, form)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, *others: Any) -> Tensor:
        *factors, index, form = others
        lists = [] if factors == [None] * 4 else factors
        kept = native.experts_training_forward(x, index, weights, gate_up, down, lists, form.activation)
        out, sorted_x, of_gate_up, *rank_rows = kept
        ctx.form = form
        ctx.save_for_backward(x, weights, gate_up, down, *factors, index, sorted_x, of_gate_up, *rank_rows)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tuple[Optional[Tensor], ...]:
        *given, index, sorted_x, of_gate_up = ctx.saved_tensors[:11]
        rank_rows = next(iter(ctx.saved_tensors[11:]), None)
        needs = ctx.needs_input_grad[:8]
        composed = (tuple(given), index, grad, needs, ctx.form)
        if training.is_gradient_seen(grad):
            found = _composed_gradients(*composed)
        else:
            bits = sum(need << place for place, need in enumerate(needs))
            kept = (grad, sorted_x, of_gate_up, index, *given[1:4], _factors_of_backward(given[4:]), rank_rows)
            arguments = (*kept, ctx.form.activation, bits)
            backward = native.experts_training_backward
            found = dispatch.op_or_parts(backward, arguments, lambda: _composed_gradients(*composed))
            found = _as_they_lie(found, needs)
        found = iter(found)
        return (*[next(found) if need else None for need in needs], None, None)


def factors_of(adapter: Any, dtype: torch.dtype, of_slots: Optional[Tensor] = None) -> Factors:
    """The factors of an adapter as the ops take them: scaled, dense, of this dtype and of a multiple of 8 ranks.

    ``of_slots``: the experts [slots] whose factors they are; None for all.
    """
    if adapter is None:
        return None, None
    a, b = adapter[:2] if of_slots is None else (factor.index_select(0, of_slots) for factor in adapter[:2])
    more = -a.shape[1] % _RANKS
    if more:
        a, b = F.pad(a, (0, 0, 0, more)), F.pad(b, (0, more))
    a = a if adapter.scaling == 1.0 else a * adapter.scaling
    return tuple(factor.to(dtype, memory_format=torch.contiguous_format).contiguous() for factor in (a, b))


_RANKS = 8


def _factors_of_backward(factors: Sequence[Optional[Tensor]]) -> Sequence[Optional[Tensor]]:
    """b transposed, and a with zeros up to a multiple of 64 ranks, of both products."""
    if factors == [None] * 4:
        return []
    found = []
    for a, b in (factors[:2], factors[2:]):
        more = 0 if a is None else -a.shape[1] % _FEATURES
        found += [None, None] if a is None else [b.transpose(1, 2).contiguous(), F.pad(a, (0, 0, 0, more))]
    return found


def _as_they_lie(found: Sequence[Tensor], needs: Tuple[bool, ...]) -> Sequence[Tensor]:
    """The gradients with those of a, which are transposed, turned."""
    places = [place for place, need in enumerate(needs) if need]
    return [each.transpose(1, 2) if place in (4, 6) else each for place, each in zip(places, found)]


def _composed_gradients(
    given: Tuple[Optional[Tensor], ...], index: Tensor, grad: Tensor, needs: Tuple[bool, ...], form: experts.Form
) -> Tuple[Tensor, ...]:
    """The gradients by PyTorch's operations, which can be differentiated again."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        given = tuple(tensor if tensor is None else tensor.view_as(tensor) for tensor in given)
        x, weights, gate_up, down, *factors = given
        adapters = tuple(None if a is None else _Scaled(a, b) for a, b in (factors[:2], factors[2:]))
        operands = (x, index, weights, gate_up, down, None, None)
        result = experts.composed(*operands, form, reference.act_and_mul, adapters)
    wanted = [tensor for tensor, need in zip(given, needs) if need]
    return torch.autograd.grad(result, wanted, grad, create_graph=create_graph)


class _Scaled(NamedTuple):
    """An adapter whose a is scaled."""

    a: Tensor
    b: Tensor
    scaling: float = 1.0
