"""Operands that the autograd nodes of ``training`` save, and gradients that a backward has to compute.

A node saves nothing that eager PyTorch would not: an optimizer or an in-place sum may change the rest before the
backward. ``needs`` says which operands need a gradient, in their order.
"""

from __future__ import annotations

import functools
import itertools
import sys
from operator import itemgetter
from typing import Any, Callable, Dict, NamedTuple, Optional, Tuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..backends import native, strides

Operands = Tuple[Optional[Tensor], ...]
Needs = Tuple[bool, ...]

# Bound once: these look-ups are a measurable part of a small call.
_is_compiling, _is_traced = torch.compiler.is_compiling, torch.compiler.is_dynamo_compiling
_will_run = torch._C._will_engine_execute_node

_WEIGHTS_FIRST = (1, 2, 3, 0, 4, 5, 6)
_LITTLE_WORK = 1 << 20  # multiplications


class Saved(NamedTuple):
    """The values saved for a backward that may have to compute certain gradients.

    ``operands`` selects them, by their ``places``, from all operands followed by None. ``gate`` and ``up`` say whether
    their values before the activation are saved; ``lost`` are the places of operands that need gradients but are not
    saved. Compiled code reads the fields by position (torch-ext/calls/saving.cpp).
    """

    operands: Callable[[Operands], Operands]
    places: Tuple[int, ...]
    gate: bool
    up: bool
    lost: Tuple[int, ...]


@functools.cache
def saved(needs: Needs, keep: Optional[bool]) -> Saved:
    """Return what is saved. ``keep`` is None for linear layers of one input, which save the input and their weights."""
    x, weight, up_weight, second_weight, bias, *_ = needs = needs[:7]
    if keep is False:
        places = (0, 1, 2, 3, 4, 5, -1)
        return Saved(itemgetter(*places), places, False, False, (6,) * needs[6])
    is_mlp = keep is True
    wanted = (weight or up_weight or (second_weight and not is_mlp), x, x, is_mlp or x, False, False, False)
    places = tuple(index if want else -1 for index, want in enumerate(wanted))
    lost = tuple(index for index, (need, want) in enumerate(zip(needs, wanted)) if need and not want)
    return Saved(itemgetter(*places), places, is_mlp, is_mlp and (x or weight or bias or second_weight), lost)


if native.plain_modules is not None:
    native.plain_modules.configure_backwards(
        torch._C._functorch.is_legacy_batchedtensor,
        _will_run,
        torch._C._autograd._get_current_graph_task_keep_graph,
        sys.getrefcount,
        ((forward_ad, "_current_level", -1),),
    )


def applied(kind: type, compiled: Optional[Callable[..., Any]] = None) -> Callable[..., Any]:
    """Return the ``apply`` of a node, without the Python code that torch's own runs first for operands of transforms.

    ``compiled`` computes the gradients instead of the node's ``backward`` where it can (torch-ext/calls/direct/
    gradients.h). The engine calls both without the Python code that torch's own path runs first.
    """
    backward = kind.backward

    def both(ctx: Any, *grads: Optional[Tensor]) -> Tuple[Optional[Tensor], ...]:
        found = None if _is_traced() else compiled(ctx, *grads)  # Dynamo cannot trace compiled code
        return backward(ctx, *grads) if found is None else found

    if compiled is not None:
        kind.backward = staticmethod(both)
    kind._backward_cls.apply = kind.backward
    return super(torch.autograd.Function, kind).apply


def layout(inputs: Tuple[Any, ...], needs: Needs) -> int:
    """Return the bits of ``needs`` in backward.h that say which gradients have adjacent columns."""
    x, weight, up_weight = inputs[:3]
    bits = 0
    if needs[0] and not x.is_contiguous() and strides.is_by_column(x, needs[1 if up_weight is None else 2]):
        bits = 1 << 7
    if needs[1] and not weight.is_contiguous():
        bits |= 1 << 8
    if needs[2] and not up_weight.is_contiguous():
        bits |= 1 << 9
    return bits


def asked(ctx: Any, grad: Tensor, operands: Operands) -> Needs:
    """Return which of the required gradients the running backward computes.

    A bias's gradient is computed along with its weight's. For a leaf given to autograd.grad, torch raises an error
    instead of returning True, which takes as long as a little work; then the other gradients are computed as well.
    """
    needs = ctx.needs_input_grad[:7]
    if _is_compiling() or _will_all_run(ctx):
        return needs
    found, nodes = list(needs), _next_nodes(ctx)
    for place in _WEIGHTS_FIRST:
        if place in nodes and not (place > 3 and found[place - 3]):
            try:
                found[place] = _will_run(nodes[place])
            except RuntimeError:
                x, weight = operands[:2]
                source = weight if x is None else x
                if source is None or grad.numel() * source.shape[-1] < _LITTLE_WORK:
                    break
    return tuple(found)


def _will_all_run(ctx: Any) -> bool:
    """True if the running backward is known to compute all gradients, as most do."""
    try:
        for node, _ in ctx.next_functions:
            if node is not None and not _will_run(node):
                return False
    except RuntimeError:  # for a leaf given to autograd.grad
        return False
    return True


def executed(ctx: Any, needs: Needs) -> Needs:
    """Return which of the required gradients the running backward computes; ``needs`` are the last inputs.

    For a leaf given to autograd.grad, torch raises an error instead of returning True.
    """
    nodes = (node for node, _ in ctx.next_functions if node is not None)
    found = []
    for need in needs:
        if need:
            try:
                need = _will_run(next(nodes))
            except RuntimeError:
                need = True
        found.append(need)
    return tuple(found)


def _next_nodes(ctx: Any) -> Dict[int, Any]:
    """Return the nodes that gradients flow to, by the places of their operands."""
    nodes = (node for node, _ in ctx.next_functions if node is not None)
    return dict(zip(itertools.compress(range(7), ctx.needs_input_grad), nodes))


def variables(ctx: Any, operands: Operands) -> Operands:
    """Return the operands for a gradient that is differentiated again; unsaved ones without their values."""
    found = list(operands)
    for place, node in _next_nodes(ctx).items():
        if found[place] is None or (place > 0 and not found[place].requires_grad):
            edge = ctx.edges.get(place)
            found[place] = node.variable if edge is None else edge
    return tuple(found)


class _Edge(torch.autograd.Function):
    """A tensor with another tensor's shape and gradients, but neither its values nor its memory."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.materialize_grads = False
        return tensor.new_empty(()).expand(tensor.shape)

    @staticmethod
    def backward(ctx: Any, grad: Optional[Tensor]) -> Optional[Tensor]:
        return grad


def edges(inputs: Tuple[Any, ...], lost: Tuple[int, ...]) -> Dict[int, Tensor]:
    """Return stand-ins for the lost operands that are not leaves."""
    found = {}
    for place in lost:
        if not inputs[place].is_leaf:
            with torch.enable_grad():
                found[place] = _Edge.apply(inputs[place])
    return found
