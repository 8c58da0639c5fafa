"""Autograd nodes of parts of an attention: projections of one input, and rotary embeddings.

The projections are torch's products, or on Hopper GPUs ours, which the host launches in less time. Their node
accumulates the input's gradient in the products themselves, while autograd would add the layers' gradients one by one,
and sums the gradients of all biases in one kernel. A gradient that is differentiated again is composed of torch
operations.
"""

from __future__ import annotations

import functools
from typing import Any, List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from .. import dispatch
from ..backends import native
from . import nodes, training

# Past torch's dispatcher, if nothing has to observe the ops (torch-ext/calls/direct/ops.h).
_project, _plain_gradients, _rotate = (
    getattr(native.plain_modules, name, None) for name in ("projections_forward", "projections_backward", "rotary")
)

# Bound once: this look-up is a measurable part of a small call.
_dispatch_modes = torch._C._len_torch_dispatch_stack


class _Projections(torch.autograd.Function):
    """Node of x, three weights and three biases; the last weight and any bias may be None."""

    @staticmethod
    def forward(ctx: Any, *operands: Any) -> Tuple[Tensor, ...]:
        needs = ctx.needs_input_grad
        training.save(ctx, nodes.saved(needs, None), operands, (None, None), needs, (), ())
        return tuple(_project(*operands))

    @staticmethod
    def backward(ctx: Any, *grads: Optional[Tensor]) -> Tuple[Optional[Tensor], ...]:
        grads = (*grads, None)[:3]
        first = next((grad for grad in grads if grad is not None), None)
        if first is None:
            return (None,) * 7
        saved = ctx.saved_tensors[:7]
        asked = nodes.asked(ctx, first, saved)
        there = [grad is not None for grad in grads]
        needs = (asked[0], *(need and has for need, has in zip(asked[1:], (*there, *there))))
        return gradients(ctx, grads, saved, needs, training.is_gradient_seen(first))


def gradients(
    ctx: Any, grads: Sequence[Optional[Tensor]], saved: nodes.Operands, needs: Sequence[bool], is_seen: bool
) -> Tuple[Optional[Tensor], ...]:
    """Return the gradients of x, three weights and three biases, given those of the results and the saved operands.

    ``is_seen`` is the result of ``training.is_gradient_seen``.
    """

    def composed() -> List[Tensor]:
        return _composed(nodes.variables(ctx, saved), grads, needs)

    if not any(needs):
        return (None,) * 7
    if is_seen:
        found = composed()
    else:
        backward = native.projections_backward if _dispatch_modes() else _plain_gradients
        bits = sum(need << place for place, need in enumerate(needs))
        found = dispatch.op_or_parts(backward, (*grads, *saved[:4], bits), composed)
    found = iter(found)
    return tuple([next(found) if need else None for need in needs])


_record_projections = nodes.applied(_Projections, getattr(native.plain_modules, "projected_backward", None))


def _composed(
    operands: Sequence[Optional[Tensor]], grads: Sequence[Optional[Tensor]], needs: Sequence[bool]
) -> List[Tensor]:
    """Compute the gradients with torch operations, which can be differentiated again."""
    x, *weights = operands[:4]
    rows = [None if grad is None else grad.reshape(-1, grad.shape[-1]) for grad in grads]
    found = []
    if needs[0]:
        products = [grad @ weight for grad, weight in zip(grads, weights) if grad is not None]
        found.append(functools.reduce(torch.add, products))
    found += [of.t() @ x.reshape(-1, x.shape[-1]) for of, need in zip(rows, needs[1:4]) if need]
    return found + [of.sum(0) for of, need in zip(rows, needs[4:]) if need]


class _Rotary(torch.autograd.Function):
    """Node of queries, keys, cosines and sines; the last two have no gradient."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Tuple[Tensor, ...]:
        # Set the attributes that set_materialize_grads() and save_for_backward() set.
        ctx.materialize_grads, ctx.to_save = False, (cos, sin)
        return tuple(_rotate(q, k, cos, sin, False))

    @staticmethod
    def backward(ctx: Any, *grads: Optional[Tensor]) -> Tuple[Optional[Tensor], ...]:
        angles = ctx.saved_tensors

        def composed() -> Tuple[Optional[Tensor], ...]:
            return tuple([None if grad is None else _turned_back(grad, *angles) for grad in grads])

        # A test with `in` would compare tensors with None, which raises an exception for each.
        if grads[0] is None or grads[1] is None or training.is_gradient_seen(grads[0]):
            return (*composed(), None, None)
        rotate = native.rotary if _dispatch_modes() else _rotate
        return (*dispatch.op_or_parts(rotate, (*grads, *angles, True), composed), None, None)


def _turned_back(grad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Compute the gradient of a rotary embedding's input with torch operations."""
    low, high = (grad * sin.unsqueeze(1)).chunk(2, dim=-1)
    return grad * cos.unsqueeze(1) + torch.cat((high, -low), dim=-1)


_record_rotary = nodes.applied(_Rotary)


def projected(is_followed: bool, operands: Tuple[Any, ...]) -> Sequence[Tensor]:
    """Return the results of layers of one input: x ``[..., in]``, three weights ``[out, in]``, three biases ``[out]``.

    The third weight and every bias may be None. ``is_followed``: autograd records one of the operands.
    """
    return _record_projections(*operands) if is_followed else _project(*operands)


def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Sequence[Tensor]:
    """Rotate queries and keys ``[batch, heads, tokens, features]`` by angles ``[batch or 1, tokens, features]``."""
    is_followed = training.is_recording() and (q.requires_grad or k.requires_grad)
    return _record_rotary(q, k, cos, sin) if is_followed else tuple(_rotate(q, k, cos, sin, False))
