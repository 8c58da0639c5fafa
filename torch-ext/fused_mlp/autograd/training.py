"""Autograd nodes of calls: one op forward and one backward, by the compiled ops.

The forward keeps the values before the activation ("activations"), or only its operands ("recompute"); of either, only
what a possible gradient needs. The backward computes the gradients that are needed. A gradient that is differentiated
again is composed of torch operations.
"""

from __future__ import annotations

import functools
import itertools
import math
from operator import itemgetter
from sys import getrefcount
from types import ModuleType
from typing import Any, Callable, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from .. import dispatch
from .._ops import add_op_namespace_prefix
from ..activations import ACTIVATIONS, BY_CODE, get_activation
from ..backends import native, plans, reference
from ..operands import halves
from . import nodes
from .nodes import Operands

KEPT, RECOMPUTED = MEMORY = ("activations", "recompute")

_forward, _backward = native.training_forward, native.training_backward
# Past torch's dispatcher, if nothing has to observe the ops (torch-ext/calls/direct/ops.h), for calls that nothing
# traces.
_plain_forward, _plain_backward, _plain_backward_in_place = (
    getattr(native.plain_modules, f"training_{name}", None) for name in ("forward", "backward", "backward_")
)

# Sets the attributes of a node that :func:`gradients` reads (torch-ext/calls/saving.h), in compiled code.
save, _compiled_backward = (getattr(native.plain_modules, name, None) for name in ("save", "recorded_backward"))

# Bound once: these look-ups are a measurable part of a small call.
_dispatch_modes = torch._C._len_torch_dispatch_stack
is_transformed = torch._C._are_functorch_transforms_active
_is_compiling, _is_grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled
_is_inference, _set_grad_enabled = torch.is_inference_mode_enabled, torch._C._set_grad_enabled
_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_tracing_state = torch._C._get_tracing_state
_is_batched = torch._C._functorch.is_legacy_batchedtensor


def is_recording() -> bool:
    """True if autograd records operands that need gradients: never in inference mode, which Dynamo cannot query."""
    return _is_grad_enabled() and (_is_compiling() or not _is_inference())


def is_as_recorded(module: Any, x: Tensor) -> bool:
    """True if a call of a module on x that autograd does not record must have the bits of one that it does.

    This is so under ``no_grad`` in training mode. Code that compares such calls, for example by ratios of
    probabilities, or repeats one as the other, as a reentrant checkpoint does, assumes that they are equal. In eval
    mode, and in inference mode, a call runs the fastest kernels.
    """
    is_off = not _is_grad_enabled() and module.training and not (_is_compiling() or _is_inference())
    return is_off and not (x.is_inference() or is_transformed() or is_followed() or _tracing_state() is not None)


def as_recorded(compute: Callable[[Tensor], Any], x: Tensor) -> Any:
    """Run ``compute(x)`` as autograd would record it, without a gradient. Autograd is off, and stays off."""
    given = x.detach().requires_grad_() if x.is_floating_point() else x
    _set_grad_enabled(True)  # torch's context manager takes several times as long
    try:
        found = compute(given)
    finally:
        _set_grad_enabled(False)
    return found.detach() if isinstance(found, Tensor) else found


def likened(x: Tensor, first_weight: Tensor, memory: str) -> Tensor:
    """Return x for a call that must have the bits of a recorded one: if it matters, one that needs a gradient."""
    is_alike = (memory == KEPT and first_weight.requires_grad) or x.is_inference()
    return x if is_alike else x.detach().requires_grad_()


def is_followed() -> bool:
    """True if a dispatch mode sees the operations of this thread, or hooks see the tensors that autograd saves."""
    return _dispatch_modes() > 0 or _saved_tensors_hooks(False) is not None


def is_gradient_seen(grad: Tensor) -> bool:
    """True if the computation of a gradient from the incoming one has to be observable, so that no kernel may do it.

    The gradient is differentiated again, by create_graph or a tangent of the incoming one, or many are computed at
    once.
    """
    if _is_grad_enabled():
        return True
    if _is_compiling():  # the other checks do not work there
        return False
    return is_transformed() or _is_batched(grad) or forward_ad._current_level >= 0


def check_memory(memory: str) -> None:
    """Raise ValueError for anything outside :data:`MEMORY`."""
    if memory not in MEMORY:
        raise ValueError(f"memory must be one of {', '.join(map(repr, MEMORY))}, got {memory!r}")


def refusal(op: str, activation: int) -> Optional[str]:
    """Return the reason why a call under autograd is not one op, or None if it can be.

    For a single layer, an op saves next to nothing except on a CPU, and it would keep more than eager if eager keeps
    the activation's result. For any call, it saves nothing without an activation to fuse.
    """
    is_left = op == "linear" and (native.DEVICE_TYPE != "cpu" or activation not in _WITH_INPUT_KEPT)
    is_left = is_left or activation == NO_ACTIVATION
    return "autograd records the separate operations" if op not in _NAMES or is_left else None


def kept(op: str, given: Operands, memory: str) -> Tuple[Tuple[str, ...], int]:
    """Return the names of the values that the forward keeps beside its operands, and their size in bytes."""
    given = _full(op, given)
    if not keeps(given, memory):
        return (), 0
    x, weight = given[:2]
    names = {"linear": ("result",), "mlp": ("fc1",)}.get(op, ("gate", "up"))
    if is_first_frozen(*given):
        names = ("hidden",) if given[3].requires_grad else ()
    elif not nodes.saved(tuple(tensor is not None and tensor.requires_grad for tensor in given), True).up:
        names = names[:1]
    return names, len(names) * x.shape[:-1].numel() * weight.shape[0] * x.element_size()


def recorded_elements(op: str, given: Operands, activation: int, memory: str) -> Optional[int]:
    """Return the number of hidden values of a call, which decides if its op saves time; None if it recomputes.

    With an activation as cheap as ReLU, which keeps its result, an ungated op saves much less: then as many values as
    :data:`SHARES` says count as one.
    """
    if memory == RECOMPUTED:
        return None
    x, weight = given[:2]
    return x.shape[:-1].numel() * weight.shape[0] // _share(op, activation)


def _share(op: str, activation: int) -> int:
    return SHARES.get(activation, 1) if op == "mlp" else 1


def least_rows(op: str, gated: bool, activation: int, weight: Tensor, memory: str, composite: bool = False) -> int:
    """Return the least number of rows at which a call with this first weight [hidden, in] is one op under autograd.

    ``composite``: the parts are many torch operations, in the sense of ``dispatch.WORK_OF_MANY``.
    """
    hidden, width = weight.shape
    if memory == RECOMPUTED or weight.numel() == 0:
        return 1
    if weight.is_cpu:
        return -(-dispatch.LEAST_RECORDED.get(weight.dtype, {}).get(op, 0) * _share(op, activation) // hidden)
    times = dispatch.WORK_OF_MANY if composite and not gated else 1
    return -(-dispatch.LEAST_WORK.get((gated, False), 0) // (hidden * width * times))


def is_left_to_compiler(op: str, x: Tensor, weight: Tensor, memory: str) -> bool:
    """True if torch.compile makes faster code of an MLP under autograd than an op is, judged by the traced sizes.

    Never true for an MLP that saves memory, or with a forced backend.
    """
    if op != "mlp" or memory != KEPT or dispatch._open_blocks[-1].name != "auto":
        return False
    work = math.prod(x.shape[:-1]) * weight.numel()
    if isinstance(work, torch.SymInt):  # comparing it would trace again for the other side of the bound
        work = work.node.hint
    return work is not None and work < dispatch.LEAST_COMPILED


def least_compiled_rows(op: str, weight: Tensor, memory: str) -> int:
    """Return the least number of rows at which such an MLP with this first weight [hidden, in] is an op."""
    if op != "mlp" or memory != KEPT or weight.numel() == 0:
        return 1
    return -(-dispatch.LEAST_COMPILED // weight.numel())


def is_left_to_parts(op: str, given: Operands, activation: int, memory: str) -> bool:
    """True if a call under autograd is faster by its parts, or is not one of those that are one op."""
    if refusal(op, activation) is not None:
        return True
    x = given[0]
    return x.is_cpu and dispatch.is_too_small(op, x, recorded_elements(op, given, activation, memory))


def products(op: str, given: Operands, activation: int, memory: str) -> Tuple[plans.Part, ...]:
    """Return the plans of the training GEMMs that have an epilogue."""
    given = _full(op, given)
    keep = keeps(given, memory)
    return () if keep and is_first_frozen(*given) else native.plan_training(given, activation, keep)


def run(
    op: str, given: Operands, activation: int, memory: str, up_first: Optional[bool] = None, is_quiet: bool = False
) -> Tensor:
    """Return the result of one of this package's functions under autograd.

    ``up_first``, for ``gated_mlp``: the first weight and bias hold gate and up, in the order that it says, and the
    second weight may be None. ``is_quiet``: the caller knows that nothing traces the call or observes its operations.
    """
    given = given if op == "gated_mlp" else _full(op, given)
    keep = memory == KEPT or keeps(given, memory)
    if keep and not given[1].requires_grad and is_first_frozen(*given):
        hidden = _first_layer(given, activation, up_first, native)
        return F.linear(hidden, given[3], given[6])
    if is_quiet and not _is_grad_enabled():  # as recorded, but without a node
        return _plain_forward(*given, activation, keep, up_first)[0]
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
SHARES = {row.code: 64 for row in ACTIVATIONS if row.result_kept}
_WITH_INPUT_KEPT = frozenset(row.code for row in ACTIVATIONS if not row.result_kept)
NO_ACTIVATION = get_activation(None).code


def _full(op: str, given: Operands) -> Operands:
    """Return the operands of a function in the order of the op."""
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


def keeps(given: Operands, memory: str) -> bool:
    """True if values of the first layer are kept: also when saving memory, if the input would take more."""
    x, weight, up_weight, second_weight = given[:4]
    if memory == KEPT:
        return True
    if weight.requires_grad or (up_weight is not None and up_weight.requires_grad):
        return False  # the input is kept anyway
    values = weight.shape[0] * (1 if up_weight is None else 2)
    if is_first_frozen(*given):
        values = second_weight.shape[1] if second_weight.requires_grad else 0
    return values <= x.shape[-1]


def is_first_frozen(
    x: Tensor,
    weight: Tensor,
    up_weight: Optional[Tensor],
    second_weight: Optional[Tensor],
    bias: Optional[Tensor],
    up_bias: Optional[Tensor],
    second_bias: Optional[Tensor],
) -> bool:
    """True if only the last layer is trained: it needs its input, and nothing from before the activation."""
    if weight.requires_grad or x.requires_grad or second_weight is None:
        return False
    return not any(tensor is not None and tensor.requires_grad for tensor in (up_weight, bias, up_bias))


def _setup_context(ctx: Any, inputs: Tuple[Any, ...], output: Tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    needs, keep = ctx.needs_input_grad, inputs[8]
    # All operands, for a gradient that is differentiated again: tracers see which operands the op gets.
    ctx.save_for_backward(*inputs[:7], *_values(inputs, output[1:], nodes.saved(needs, keep)))
    ctx.how, ctx.own, ctx.edges = (inputs[7], inputs[9], keep, nodes.layout(inputs, needs)), None, {}


def _values(inputs: Tuple[Any, ...], kept: Sequence[Tensor], saved: nodes.Saved) -> Tuple[Optional[Tensor], ...]:
    return (kept[0] if saved.gate else None, kept[1] if saved.up and inputs[2] is not None else None)


def _gradients(ctx: Any, grad: Optional[Tensor], *_: None) -> Tuple[Optional[Tensor], ...]:
    if grad is None:
        return (None,) * 10
    saved = ctx.saved_tensors
    needs = nodes.asked(ctx, grad, saved[:7])
    return gradients(ctx, grad, saved, ctx.needs_input_grad, needs, is_gradient_seen(grad))


def gradients(
    ctx: Any,
    grad: Tensor,
    saved: Tuple[Optional[Tensor], ...],
    recorded: nodes.Needs,
    needs: nodes.Needs,
    is_seen: bool,
) -> Tuple[Optional[Tensor], ...]:
    """Return the gradients of the operands of a node that :func:`save` set up, and None for the other arguments.

    ``recorded`` are the operands that need gradients, and ``needs`` those whose gradients are computed now. ``is_seen``
    is the result of :func:`is_gradient_seen`.
    """
    own, (activation, up_first, keep, layout) = ctx.own, ctx.how[:4]
    operands = saved[:7]
    bits, in_places = _placed(needs)
    plain = alone = False
    if own is not None and not _is_compiling():
        plain = not _dispatch_modes()
        if not _keeps_graph():
            ctx.own = ()  # autograd frees what it saves as well
            alone = plain and _are_alone(own)
    is_lost = not _is_compiling() and hasattr(ctx, "overwritten")  # an op that wrote to them has failed
    gate, up = saved[7:9] if own is None else own

    def composed() -> Tuple[Tensor, ...]:
        return _composed_gradients(nodes.variables(ctx, operands), gate, up, grad, needs, activation, up_first)

    def composed_after_the_op() -> Tuple[Tensor, ...]:
        found = composed()
        if alone or is_lost:
            raise RuntimeError("a torch function failed after the values that the gradients need were overwritten")
        return found

    if is_seen or is_lost:
        found = composed_after_the_op() if is_lost else composed()
    else:
        backward = _plain_backward_in_place if alone else _plain_backward if plain else _backward
        given = nodes.saved(recorded, keep).operands((*operands, None))[:6]
        arguments = (grad, *given, gate, up, activation, bits | layout, up_first)
        found = dispatch.op_or_parts(backward, arguments, composed_after_the_op)
    return in_places((*found, None))


@functools.cache
def _placed(
    needs: Tuple[bool, ...],
) -> Tuple[int, Callable[[Tuple[Optional[Tensor], ...]], Tuple[Optional[Tensor], ...]]]:
    """Return the needed gradients as bits, and a function that puts them and None at their operands' places."""
    places = itertools.accumulate(needs)
    bits = sum(need << index for index, need in enumerate(needs))
    return bits, itemgetter(*(place - 1 if need else -1 for need, place in zip(needs, places)), -1, -1, -1)


class _Traced(torch.autograd.Function):
    """Node of the op. Tracers see another op that computes the same and is unknown to autograd: a graph that calls an
    op with an autograd formula in Python makes the host run Python each time."""

    @staticmethod
    def forward(*inputs: Any) -> Tuple[Tensor, ...]:
        return native.graph_training_forward(*inputs)

    setup_context = staticmethod(_setup_context)
    backward = staticmethod(_gradients)


def _record_traced(*inputs: Any) -> Tuple[Tensor, ...]:
    return _Traced.apply(*inputs) if _is_grad_enabled() else _Traced.forward(*inputs)


if native.DEVICE_TYPE is not None:
    _autograd = torch.library.Library(add_op_namespace_prefix("").rstrip(":"), "FRAGMENT")
    _autograd.impl("training_forward", _record_traced, "Autograd")


class _Recorded(torch.autograd.Function):
    """Like :class:`_Traced`, in a third of the time, for calls that nothing traces."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        result, gate, up = _plain_forward(*inputs)
        needs, (activation, keep, up_first) = ctx.needs_input_grad, inputs[7:]
        save(ctx, nodes.saved(needs, keep), inputs, (gate, up), needs, (activation, up_first, keep), ())
        return result

    backward = staticmethod(_gradients)


_record = nodes.applied(_Recorded, _compiled_backward)


def _are_alone(own: Tuple[Optional[Tensor], Optional[Tensor]]) -> bool:
    """True if there are values and this tuple holds the only references to them."""
    gate, up = own
    return gate is not None and getrefcount(gate) <= _REFERENCES and (up is None or getrefcount(up) <= _REFERENCES)


def _references(own: Tuple[object]) -> int:
    (gate,) = own
    return getrefcount(gate)


_REFERENCES = _references((object(),))  # depends on the Python version


class _KnownLayer(torch.autograd.Function):
    """The known values of a linear layer, recorded by autograd as computed from its operands."""

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, x: Optional[Tensor], weight: Optional[Tensor], bias: Optional[Tensor]
    ) -> Tensor:
        ctx.materialize_grads = False
        ctx.save_for_backward(x, weight)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Optional[Tensor]) -> Tuple[Optional[Tensor], ...]:
        if grad is None:
            return None, None, None, None
        return (None, *gradients_of_layer(grad, *ctx.saved_tensors, ctx.needs_input_grad[1:], torch.mm))


def gradients_of_layer(
    grad: Tensor, x: Optional[Tensor], weight: Optional[Tensor], needs: Sequence[bool], mm: Callable[..., Tensor]
) -> Tuple[Optional[Tensor], ...]:
    """Return the needed gradients of x, weight and bias of a linear layer, from that of its result, by ``mm``.

    That of a weight has the weight's layout, as torch's has.
    """
    rows = grad.reshape(-1, grad.shape[-1])
    of_x = mm(rows, weight).view(*grad.shape[:-1], weight.shape[1]) if needs[0] else None
    of_weight = None
    if needs[1]:
        inputs = x.reshape(-1, x.shape[-1])
        is_by_column = weight is not None and not weight.is_contiguous()
        of_weight = mm(inputs.t(), rows).t() if is_by_column else mm(rows.t(), inputs)
    return of_x, of_weight, rows.sum(0) if needs[2] else None


# Without the Python code that torch's own ``apply`` runs first: under a transform of gradients, no operand is of it.
_known_layer = super(torch.autograd.Function, _KnownLayer).apply


def _composed_gradients(
    given: Operands,
    gate: Optional[Tensor],
    up: Optional[Tensor],
    grad: Tensor,
    needs: Tuple[bool, ...],
    activation: int,
    up_first: Optional[bool],
) -> Tuple[Tensor, ...]:
    """Compute the gradients with torch operations, which can be differentiated again."""
    create_graph = _is_grad_enabled()
    with torch.enable_grad():
        given = _apart(given, needs)
        result = _composed_mlp(given, gate, up, needs, activation, up_first)
    wanted = [tensor for tensor, need in zip(given, needs) if need]
    return torch.autograd.grad(result, wanted, grad, create_graph=create_graph)


def _apart(given: Operands, needs: nodes.Needs) -> Operands:
    """Return views of operands, so that equal tensors among them have gradients of their own."""
    found = []
    for tensor, need in zip(given, needs):
        is_leaf = need and not tensor.requires_grad  # the norm that a block computes, in its backward
        found.append(
            tensor if tensor is None else tensor.detach().requires_grad_() if is_leaf else tensor.view_as(tensor)
        )
    return tuple(found)


def _composed_mlp(
    given: Operands,
    gate: Optional[Tensor],
    up: Optional[Tensor],
    needs: nodes.Needs,
    activation: int,
    up_first: Optional[bool],
) -> Tensor:
    """Compute the result with torch operations, from the values of the first layer if they were kept."""
    x, weight, up_weight, second_weight, bias, up_bias, second_bias = given
    if gate is None:
        result = _first_layer(given, activation, up_first, reference)
    else:
        is_up_alone = up is None and (needs[2] or needs[5])  # then any values do
        gate, up = _known_layer(gate, x, weight, bias), gate if is_up_alone else up
        if up_first is not None:
            first, second = gate.chunk(2, dim=-1)
            gate, up = (second, first) if up_first else (first, second)
        elif up is not None:
            up = _known_layer(up, x, up_weight, up_bias)
        function = BY_CODE[activation].function
        result = function(gate) if up is None else function(gate) * up
    return result if second_weight is None else F.linear(result, second_weight, second_bias)
