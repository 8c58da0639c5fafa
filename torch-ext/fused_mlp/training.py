"""Calls that autograd follows: one op forward and one backward, by the compiled ops.

The forward keeps the values before the activation ("activations"), or nothing but its operands ("recompute"). The
backward computes those gradients that are asked for. A gradient that is differentiated in its turn is composed.
"""

from __future__ import annotations

import functools
import itertools
from operator import itemgetter
from sys import getrefcount
from types import ModuleType
from typing import Any, Callable, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from . import dispatch
from ._ops import add_op_namespace_prefix
from .activations import ACTIVATIONS
from .backends import native, plans, reference
from .operands import halves

KEPT, RECOMPUTED = MEMORY = ("activations", "recompute")

_forward, _backward = native.training_forward, native.training_backward
# Without what OpOverload does before them in Python, for calls that nothing traces.
_plain_forward, _plain_backward, _plain_backward_in_place = (
    getattr(op, "_op", None) for op in (_forward, _backward, native.training_backward_)
)

# Bound once: to look these up is a measurable part of a small call.
_below_autograd = torch._C._AutoDispatchBelowAutograd
_dispatch_modes = torch._C._len_torch_dispatch_stack
is_transformed = torch._C._are_functorch_transforms_active
_is_compiling, _is_grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled
_is_inference = torch.is_inference_mode_enabled
_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_is_batched = torch._C._functorch.is_legacy_batchedtensor

Operands = Tuple[Optional[Tensor], ...]


def is_recording() -> bool:
    """Whether autograd records what needs gradients: never in inference mode, of which Dynamo cannot be asked."""
    return _is_grad_enabled() and (_is_compiling() or not _is_inference())


def is_followed() -> bool:
    """Whether somebody sees the operations of this thread, or what autograd keeps of them."""
    return _dispatch_modes() > 0 or _saved_tensors_hooks(False) is not None


def is_gradient_seen(grad: Tensor) -> bool:
    """Whether somebody has to see how a gradient is computed from the one that comes in, so that no kernel does it.

    It is differentiated in its turn, by create_graph or a tangent on what comes in, or computed for many at once.
    """
    if _is_grad_enabled():
        return True
    if _is_compiling():  # which can ask none of the others
        return False
    return is_transformed() or _is_batched(grad) or forward_ad._current_level >= 0


def check_memory(memory: str) -> None:
    """Raises ValueError for what is none of :data:`MEMORY`."""
    if memory not in MEMORY:
        raise ValueError(f"memory must be one of {', '.join(map(repr, MEMORY))}, got {memory!r}")


def refusal(op: str, activation: int) -> Optional[str]:
    """Why a call that autograd follows is not one op, or None if it can be.

    Of one layer alone an op saves next to nothing but on a CPU, and it would keep more than eager does where that keeps
    an activation's result.
    """
    is_left = op == "linear" and (native.DEVICE_TYPE != "cpu" or activation not in _WITH_INPUT_KEPT)
    return "autograd follows the parts" if op not in _NAMES or is_left else None


def kept(op: str, given: Operands, memory: str) -> Tuple[Tuple[str, ...], int]:
    """What the forward keeps beside its operands, and the bytes of it."""
    if memory == RECOMPUTED:
        return (), 0
    x, weight = given[:2]
    names = {"linear": ("result",), "mlp": ("fc1",)}.get(op, ("gate", "up"))
    if is_first_frozen(*_full(op, given)):
        names = ("hidden",)
    return names, len(names) * x.shape[:-1].numel() * weight.shape[0] * x.element_size()


def recorded_elements(op: str, given: Operands, memory: str) -> Optional[int]:
    """How many hidden values a call has, by which it is known whether its op saves time; None where memory is saved."""
    if memory == RECOMPUTED:
        return None
    x, weight = given[:2]
    return x.shape[:-1].numel() * weight.shape[0]


def products(op: str, given: Operands, activation: int, memory: str) -> Tuple[plans.Part, ...]:
    """How the products with an epilogue of training would be computed."""
    given = _full(op, given)
    if memory == KEPT and is_first_frozen(*given):
        return ()
    return native.plan_training(given, activation, memory == KEPT)


def run(
    op: str, given: Operands, activation: int, memory: str, up_first: Optional[bool] = None, is_quiet: bool = False
) -> Tensor:
    """The result of a function of this package on its operands, followed by autograd.

    ``up_first``, of ``gated_mlp``: the first weight and bias hold gate and up, in the order that it tells, and the
    second weight may be None. ``is_quiet``: nothing traces the call or watches its operations, as the caller knows.
    """
    given, keep = given if op == "gated_mlp" else _full(op, given), memory == KEPT
    if keep and not given[1].requires_grad and is_first_frozen(*given):
        hidden = _first_layer(given, activation, up_first, native)
        return F.linear(hidden, given[3], given[6])
    if is_quiet or not (_is_compiling() or _dispatch_modes()):
        return _record(*given, activation, keep, up_first)
    return _forward(*given, activation, keep, up_first)[0]


def _first_layer(given: Operands, activation: int, up_first: Optional[bool], backend: ModuleType) -> Tensor:
    x, weight, up_weight, _, bias, up_bias, _ = given
    if up_first is not None:
        (weight, up_weight), (bias, up_bias) = halves(weight, up_first), halves(bias, up_first)
    if up_weight is None:
        return backend.linear(x, weight, bias, activation)
    return backend.gated_linear(x, weight, up_weight, bias, up_bias, activation)


_NAMES = frozenset(("linear", "gated_linear", "mlp", "gated_mlp"))
_WITH_INPUT_KEPT = frozenset(row.code for row in ACTIVATIONS if not row.result_kept)


def _full(op: str, given: Operands) -> Operands:
    """The operands of a function as those of the op."""
    if op == "gated_mlp":
        return given
    if op == "linear":
        x, weight, bias = given
        return (x, weight, None, None, bias, None, None)
    if op == "mlp":
        x, weight, second_weight, bias, second_bias = given
        return (x, weight, None, second_weight, bias, None, second_bias)
    x, weight, up_weight, bias, up_bias = given
    return (x, weight, up_weight, None, bias, up_bias, None)


def is_first_frozen(
    x: Tensor,
    weight: Tensor,
    up_weight: Optional[Tensor],
    second_weight: Optional[Tensor],
    bias: Optional[Tensor],
    up_bias: Optional[Tensor],
    second_bias: Optional[Tensor],
) -> bool:
    """Whether only the last layer is trained: it needs its input, and nothing from before the activation."""
    if weight.requires_grad or x.requires_grad or second_weight is None:
        return False
    return not any(tensor is not None and tensor.requires_grad for tensor in (up_weight, bias, up_bias))


def _setup_context(ctx: Any, inputs: Tuple[Any, ...], output: Tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:7], *_kept(inputs, output))
    ctx.how, ctx.own = (inputs[7], inputs[9]), None


def _kept(inputs: Tuple[Any, ...], output: Tuple[Tensor, ...]) -> Tuple[Optional[Tensor], Optional[Tensor]]:
    if not inputs[8]:
        return (None, None)
    return (output[1], None if inputs[2] is None else output[2])


def _gradients(ctx: Any, grad: Optional[Tensor], *_: None) -> Tuple[Optional[Tensor], ...]:
    if grad is None:
        return (None,) * 10
    saved, own, (activation, up_first) = ctx.saved_tensors, ctx.own, ctx.how
    bits, in_places = _asked(ctx.needs_input_grad)
    plain = alone = False
    if own is not None and not _is_compiling():
        plain = not _dispatch_modes()
        if not _keeps_graph():
            ctx.own = ()  # what autograd saves it frees as well
            alone = plain and _are_alone(own)
    gate, up = saved[7:] if own is None else own
    if is_gradient_seen(grad):
        found = _composed_gradients(saved[:7], grad, ctx.needs_input_grad, activation, up_first)
    else:
        backward = _plain_backward_in_place if alone else _plain_backward if plain else _backward
        composed = (saved[:7], grad, ctx.needs_input_grad, activation, up_first)
        arguments = (grad, *saved[:6], gate, up, activation, bits, up_first)
        found = dispatch.op_or_parts(backward, arguments, lambda: _composed_gradients(*composed))
    return in_places((*found, None))


@functools.cache
def _asked(
    needs: Tuple[bool, ...],
) -> Tuple[int, Callable[[Tuple[Optional[Tensor], ...]], Tuple[Optional[Tensor], ...]]]:
    """The gradients that are asked for: as bits, and what puts them, with None behind them, where the operands are."""
    needs = needs[:7]
    places = itertools.accumulate(needs)
    bits = sum(need << index for index, need in enumerate(needs))
    return bits, itemgetter(*(place - 1 if need else -1 for need, place in zip(needs, places)), -1, -1, -1)


if native.DEVICE_TYPE is not None:
    torch.library.register_autograd(
        add_op_namespace_prefix("training_forward"), _gradients, setup_context=_setup_context
    )


class _Recorded(torch.autograd.Function):
    """What is registered for the op, in a third of the time, for calls that nothing traces.

    Values that are kept belong to the node, where no hooks have to see what autograd saves: nobody else gets hold of
    them, so that they may be overwritten.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        with _below_autograd():
            output = _plain_forward(*inputs)
        own = _kept(inputs, output)
        ctx.how = (inputs[7], inputs[9])
        # By the attributes that the methods of these names set: set_materialize_grads(), save_for_backward().
        ctx.materialize_grads = False
        if _saved_tensors_hooks(False) is None:
            ctx.to_save, ctx.own = inputs[:7], own
        else:
            ctx.to_save, ctx.own = (*inputs[:7], *own), None
        return output[0]

    backward = staticmethod(_gradients)


# Without what torch's own ``apply`` does before this in Python, for operands of transforms.
_record = super(torch.autograd.Function, _Recorded).apply


def _are_alone(own: Tuple[Optional[Tensor], Optional[Tensor]]) -> bool:
    """Whether there are values, and nobody holds them but this tuple."""
    gate, up = own
    return gate is not None and getrefcount(gate) <= _REFERENCES and (up is None or getrefcount(up) <= _REFERENCES)


def _references(own: Tuple[object]) -> int:
    (gate,) = own
    return getrefcount(gate)


_REFERENCES = _references((object(),))  # versions of Python differ


def _composed_gradients(
    given: Operands, grad: Tensor, needs: Tuple[bool, ...], activation: int, up_first: Optional[bool]
) -> Tuple[Tensor, ...]:
    """The gradients by PyTorch's operations, which can be differentiated again."""
    create_graph = _is_grad_enabled()
    with torch.enable_grad():
        given = tuple(tensor if tensor is None else tensor.view_as(tensor) for tensor in given)  # tied ones apart
        result = _first_layer(given, activation, up_first, reference)
        if given[3] is not None:
            result = F.linear(result, given[3], given[6])
    wanted = [tensor for tensor, need in zip(given, needs) if need]
    return torch.autograd.grad(result, wanted, grad, create_graph=create_graph)
