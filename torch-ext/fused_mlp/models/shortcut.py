"""The short way of a fused call: from the parts of a module to the compiled op, in one function.

A call inside of a model finds the processor's caches full of the rest of the model, so its time goes with the code and
the data that it touches. This asks of the commonest case, plain linear layers and a known activation, what
:mod:`forwards` asks with the help of four other modules, and leaves all other cases to that. Nothing is remembered of a
module: weights that were replaced, hooks, adapters, modes and patched functions are seen as they are at the call.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, NamedTuple, Optional, Sequence, Tuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as _torch_module

from .. import dispatch, training
from ..backends import native
from ..operands import halves
from . import forms, forwards, obstacles, recognition
from .pattern import Pattern

# Bound once: a name of another module costs two look-ups more.
_any_autocast = torch._C._is_any_autocast_enabled
_dispatch_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_is_compiling = torch.compiler.is_compiling
_tracing_state = torch._C._get_tracing_state
_forward_hooks, _forward_pre_hooks = _torch_module._global_forward_hooks, _torch_module._global_forward_pre_hooks
_backward_hooks, _backward_pre_hooks = _torch_module._global_backward_hooks, _torch_module._global_backward_pre_hooks
_Linear, _Dropout, _Parameter = nn.Linear, nn.Dropout, nn.Parameter

_backends = dispatch._open_blocks
_on_gpu, _dtypes, _gpu_refusal = native.DEVICE_TYPE == "cuda", native._DTYPES, native._cached_gpu_refusal
_linear, _mlp, _gated_linear, _gated_mlp = native.linear, native.mlp, native.gated_linear, native.gated_mlp
_NAMES = {_linear: "linear", _mlp: "mlp", _gated_linear: "gated_linear", _gated_mlp: "gated_mlp"}

_originals = {(owner, name): original for owner, name, original in obstacles._ORIGINALS}
_call, _linear_forward = _originals[nn.Linear, "__call__"], _originals[nn.Linear, "forward"]
_linear_function, _dropout_function = _originals[F, "linear"], _originals[F, "dropout"]
_dropout_forward = obstacles.unpatched(nn.Dropout, "forward", nn.modules.dropout)


class _Known(NamedTuple):
    """A class of activations: its forward, the code of its row, and the functions of torch that it calls."""

    forward: Callable[..., Tensor]
    code: int
    functions: Tuple[Tuple[Any, str, Any], ...]


_known: Dict[Union[type, str], _Known] = {}  # those of torch.nn.GELU by its ``approximate``

Act = Union[nn.Module, Callable[[Tensor], Tensor]]

# In eager, a layer of an encoder keeps the host busy for some 400 us, and the GPU for less up to so many elements of
# its input. An MLP without a gate, whose activation is one kernel, launches hardly fewer kernels when it is fused. So
# it gains nothing there, and what it asks of its parts makes it lose: whole models took 1.02 to 1.06 (H200).
LEAST_ON_GPU = 1 << 22
_ONE_KERNEL = frozenset(("GELU", "GELUActivation", "GELUTanh", "PytorchGELUTanh", "ReLU", "SiLU", "SiLUActivation"))


def is_small(x: Any) -> bool:
    """Whether the host, not the GPU, decides how long an MLP of this input takes in an eager model."""
    return (
        not _is_compiling()
        and type(x) is Tensor
        and x.is_cuda
        and x.numel() < LEAST_ON_GPU
        and _backends[-1].name == "auto"
        and not training.is_recording()
        and not torch.cuda.is_current_stream_capturing()
    )


def fused(
    pattern: Pattern,
    x: Tensor,
    projections: Sequence[nn.Module],
    act: Act,
    between: Sequence[Union[nn.Module, float]] = (),
) -> Tensor:
    """``forwards.fused`` of what ``act`` computes, by the short way where there is one."""
    if not pattern.gated and is_small(x) and type(act).__name__ in _ONE_KERNEL:
        return forwards.fused(pattern, x, projections, None, act, between)  # all parts are called
    result = _short_way(pattern, x, projections, act, between)
    return forwards.fused(pattern, x, projections, forms.row_of(act), act, between) if result is None else result


def _short_way(
    pattern: Pattern,
    x: Tensor,
    projections: Sequence[nn.Module],
    act: Act,
    between: Sequence[Union[nn.Module, float]],
) -> Optional[Tensor]:
    """The result, where one compiled op plainly computes it."""
    if _is_compiling() or type(x) is not Tensor:
        return None
    grad = training.is_recording()
    recorded = grad and x.requires_grad
    kind = type(act)
    known = _known.get(kind if kind is not nn.GELU else act.approximate)
    if known is None:
        _learn(act)  # for the next call
        return None
    forward, code, functions = known
    state = act.__dict__
    if (
        kind.forward is not forward
        or kind.__call__ is not _call
        or state["_forward_hooks"]
        or state["_forward_pre_hooks"]
        or state["_backward_hooks"]
        or state["_backward_pre_hooks"]
        or "forward" in state
    ):
        return None
    weights, biases = [], []
    for part in projections:
        if type(part) is not _Linear:
            return None
        state = part.__dict__
        if (
            state["_forward_hooks"]
            or state["_forward_pre_hooks"]
            or state["_backward_hooks"]
            or state["_backward_pre_hooks"]
            or "forward" in state
        ):
            return None
        parameters = state["_parameters"]
        weight, bias = parameters.get("weight"), parameters.get("bias", part)
        if type(weight) is not _Parameter or (bias is not None and type(bias) is not _Parameter):
            return None
        if grad and (weight.requires_grad or (bias is not None and bias.requires_grad)):
            recorded = True
        weights.append(weight)
        biases.append(bias)
    for part in between:
        if type(part) is not _Dropout:
            if part.__class__ is float and part == 0.0:
                continue
            return None
        state = part.__dict__
        if (
            state["training"]
            or state["_forward_hooks"]
            or state["_forward_pre_hooks"]
            or state["_backward_hooks"]
            or state["_backward_pre_hooks"]
            or "forward" in state
            or _Dropout.forward is not _dropout_forward
        ):
            return None
    if between and F.dropout is not _dropout_function:
        return None
    if (
        _forward_hooks
        or _forward_pre_hooks
        or _backward_hooks
        or _backward_pre_hooks
        or _function_modes()
        or _dispatch_modes()
        or _any_autocast()
        or _tracing_state() is not None
        or forward_ad._current_level >= 0
        or _Linear.__call__ is not _call
        or _Linear.forward is not _linear_forward
        or F.linear is not _linear_function
    ):
        return None
    for owner, name, original in functions:
        if getattr(owner, name) is not original:
            return None
    if _backends[-1].name != "auto" or x.dtype not in _dtypes:
        return None
    if not x.is_cuda or _gpu_refusal(x.get_device()) is not None if _on_gpu else not x.is_cpu:
        return None
    up_first = None
    if pattern.packed:
        if weights[0].size(0) % 2 != 0:  # there are no halves
            return None
        if recorded:
            up_first = pattern.up_first
            weights[1:1] = biases[1:1] = [None] * (3 - len(weights))
        else:
            weights[:1], biases[:1] = halves(weights[0], pattern.up_first), halves(biases[0], pattern.up_first)
    count = len(weights)
    op = _linear if count == 1 else _gated_mlp if count == 3 else _mlp if pattern.whole else _gated_linear
    try:
        if recorded:
            name = _NAMES[op]
            refused = training.refusal(name) is not None
            return None if refused else training.run(name, (x, *weights, *biases), code, pattern.memory, up_first)
        return op(x, *weights, *biases, code)
    except RuntimeError:  # the long way says what is wrong with the operands, or broadcasts them
        return None


def _learn(act: Act) -> None:
    """Takes the class of an activation among those known, if the table names it and nobody has altered it."""
    kind = type(act)
    row = recognition.activation_of(act) if isinstance(act, nn.Module) else None
    if row is None or (kind is not nn.GELU and kind not in recognition._classes):  # or read: it may call anything
        return
    functions = tuple(
        (owner, function, _originals[owner, function]) for owner, function in recognition.FUNCTIONS_OF[row.name]
    )
    _known[kind if kind is not nn.GELU else act.approximate] = _Known(kind.forward, row.code, functions)
