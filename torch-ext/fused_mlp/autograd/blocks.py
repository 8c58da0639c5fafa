"""Autograd nodes of MLP blocks: one node per block, whose forward and backward call the ops of the parts.

The blocks are ``x + dropout(mlp(norm(x)))`` and ``norm(residual + dropout(mlp(x)))``. A single linear layer may replace
the MLP, as at the end of an attention. A node costs the host about as much as an op, and small models are host-bound.
The kernel of the norm's gradient also adds that of the residual, so that no other kernel reads and writes both. The
norm of x, an operand of the MLP's gradients, is kept as in eager PyTorch: ``M D`` values that a kernel of ``4 M D``
bytes could recompute. A gradient that is differentiated again is composed of torch operations.
"""

from __future__ import annotations

from typing import Any, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..backends import native, reference
from . import attention, nodes, norms, training

# The nodes' operands are the seven of ``training_forward``; the residual, or None if it is x; weight and bias of the
# norm; and one tuple, because torch spends time on each argument that is not a tensor: eps and code of the norm
# (torch-ext/ops/norms/norm.h); the activation's code; ``up_first`` and ``keep`` of ``training_forward``, None for a
# single layer; and the probability of a dropout, 0 for none. They are for calls that nothing traces or observes.

# Past torch's dispatcher, in one call; None if it has to see the ops (torch-ext/calls/direct/ops.h).
_pre_normed_forward, _post_normed_forward = (
    getattr(native.plain_modules, name, None) for name in ("pre_normed_forward", "post_normed_forward")
)

_compiled = (getattr(native.plain_modules, f"{name}_backward", None) for name in ("pre_normed", "post_normed"))

# Bound once: this look-up is a measurable part of a small call.
_native_dropout = torch._VF.native_dropout


def _pre_normed_values(block: Tuple[Any, ...]) -> Tuple[Optional[Tensor], ...]:
    """Return the result, the norm of x and its statistics, the values of gate and up, and the mask of the dropout."""
    x, *layers = block[:7]
    *norm, (eps, code, activation, up_first, keep, dropout) = block[8:]
    if dropout == 0.0:
        found = _pre_normed_forward(x, *layers, *norm, eps, code, activation, keep, up_first)
        if found is not None:
            return (*found, None, None)[:6]
    normed, statistics = norms._plain_forward(x, *norm, eps, code, False)
    result, gate, up = training._plain_forward(normed, *layers, activation, keep, up_first)
    mask = None
    if dropout != 0.0:
        result, mask = _native_dropout(result, dropout, True)
    return x + result, normed, statistics, gate, up, mask


class _PreNormed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *block: Any) -> Tensor:
        x, *layers = block[:7]
        norm_weight, norm_bias, (eps, code, activation, up_first, keep, dropout) = block[8:]
        result, normed, statistics, gate, up, mask = _pre_normed_values(block)
        needs = _of_mlp(ctx.needs_input_grad)
        more = x if needs[0] else None, norm_weight, norm_bias, statistics, mask
        how = activation, up_first, keep
        training.save(ctx, nodes.saved(needs, keep), (normed, *layers), (gate, up), needs, how, more)
        ctx.norm = eps, code, dropout
        return result

    @staticmethod
    def backward(ctx: Any, grad: Optional[Tensor]) -> Tuple[Optional[Tensor], ...]:
        if grad is None:
            return (None,) * 11
        saved, (eps, code, dropout), needs = ctx.saved_tensors, ctx.norm, ctx.needs_input_grad
        x, norm_weight, norm_bias, statistics, mask = saved[-5:]
        norm = norms.Given(x, norm_weight, norm_bias, eps, code, False)
        of_x, *of_layers = nodes.asked(ctx, grad, saved[:7])
        of_norm = of_x, needs[8], needs[9]
        is_seen = training.is_gradient_seen(grad)
        if is_seen and x is not None:
            with torch.enable_grad():
                saved = (reference.norm(*norm), *saved[1:])  # recorded by autograd
        elif saved[0] is None:
            saved = (x, *saved[1:])  # only its shape is needed
        behind = grad if mask is None else norms.dropout_gradient(grad, mask, dropout)
        asked = (of_x or needs[8] or needs[9], *of_layers)
        of_normed, *of_layers = training.gradients(ctx, behind, saved, _of_mlp(needs), asked, is_seen)[:7]
        if of_normed is None:
            return (grad if of_x else None, *of_layers, *(None,) * 4)
        of_x, *of_norm = norms.gradients(norm, statistics, of_normed, grad, of_norm, is_seen)
        return (of_x, *of_layers, None, *of_norm, None)


def _of_mlp(needs: Tuple[bool, ...]) -> nodes.Needs:
    """Return which operands of the MLP need gradients, the norm of x among them."""
    return (needs[0] or needs[8] or needs[9], *needs[1:7])


def _post_normed_values(block: Tuple[Any, ...]) -> Tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Return the results of the norm's op, and the kept values of gate and up."""
    residual, norm_weight, norm_bias, how = block[7:]
    eps, code, activation, up_first, keep, dropout = how
    found = _post_normed_forward(*block[:10], *how)
    if found is None:
        if keep is None:
            result, kept = F.linear(block[0], block[1], block[4]), ()
        else:
            result, *kept = training._plain_forward(*block[:7], activation, keep, up_first)
        return norms._plain_sum_forward(result, residual, norm_weight, norm_bias, eps, code, dropout), kept
    count = len(found) - (0 if keep is None else 1 if block[2] is None else 2)
    return found[:count], found[count:]


class _PostNormed(torch.autograd.Function):
    """Its second result is the sum, through which a gradient that is differentiated again reaches the residual."""

    @staticmethod
    def forward(ctx: Any, *block: Any) -> Tuple[Tensor, Tensor]:
        norm_weight, norm_bias, (eps, code, activation, up_first, keep, dropout) = block[8:]
        found, kept = _post_normed_values(block)
        y, total, statistics, mask = (*found, None)[:4]
        more, (gate, up) = (total, norm_weight, norm_bias, statistics, mask), (*kept, None, None)[:2]
        needs, how = ctx.needs_input_grad[:7], (activation, up_first, keep)
        training.save(ctx, nodes.saved(needs, keep), block[:7], (gate, up), needs, how, more)
        ctx.norm = eps, code, dropout
        return y, total

    @staticmethod
    def backward(ctx: Any, grad: Optional[Tensor], sum_grad: Optional[Tensor]) -> Tuple[Optional[Tensor], ...]:
        if grad is None and sum_grad is None:
            return (None,) * 11
        saved, needs = ctx.saved_tensors, ctx.needs_input_grad
        is_layer = ctx.how[2] is None
        of_layers, last_bias = [*nodes.asked(ctx, sum_grad if grad is None else grad, saved[:7])], 4 if is_layer else 6
        in_norm = of_layers[last_bias] and norms.SUMS_BIASES
        of_layers[last_bias] = of_layers[last_bias] and not in_norm
        of_sum = any(of_layers), *needs[7:10], in_norm
        result, *of_norm, of_bias = norms.sum_gradients(norms.OfSum(*saved[-5:], *ctx.norm), grad, sum_grad, of_sum)
        layers = [None] * 7
        if result is not None:
            is_seen = training.is_gradient_seen(result)
            if is_layer:
                layers = [*attention.gradients(ctx, (result, None, None), saved[:7], of_layers, is_seen)]
            else:
                layers = [*training.gradients(ctx, result, saved, needs[:7], tuple(of_layers), is_seen)[:7]]
        if in_norm:
            layers[last_bias] = of_bias
        return (*layers, *of_norm, None)


def pre_normed_alone(block: Tuple[Any, ...]) -> Tensor:
    """Return the bits that :func:`pre_normed` returns, without a node."""
    return _pre_normed_values(block)[0]


def post_normed_alone(block: Tuple[Any, ...]) -> Tensor:
    return _post_normed_values(block)[0][0]


pre_normed, post_normed = map(nodes.applied, (_PreNormed, _PostNormed), _compiled)
