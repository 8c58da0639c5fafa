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
_is_compiling = torch.compiler.is_compiling
_backends = dispatch._open_blocks
_on_gpu, _dtypes, _gpu_refusal = native.DEVICE_TYPE == "cuda", native._DTYPES, native._cached_gpu_refusal
# Without what OpOverload does before this in Python.
_ops = {name: getattr(getattr(native, name), "_op", None) for name in ("linear", "mlp", "gated_linear", "gated_mlp")}

_originals = {(owner, name): original for owner, name, original in obstacles._ORIGINALS}
_call = _originals[nn.Linear, "__call__"]
_plain = native.plain_modules  # None where nothing is compiled

if _plain is not None:
    _plain.configure(
        nn.Linear,
        nn.Parameter,
        nn.Dropout,
        _call,
        (
            torch._C._is_any_autocast_enabled,
            torch._C._len_torch_dispatch_stack,
            torch._C._len_torch_function_stack,
            torch._C._get_tracing_state,
        ),
        (
            _torch_module._global_forward_hooks,
            _torch_module._global_forward_pre_hooks,
            _torch_module._global_backward_hooks,
            _torch_module._global_backward_pre_hooks,
        ),
        (
            (forward_ad, "_current_level", -1),
            (nn.Linear, "__call__", _call),
            (nn.Linear, "forward", _originals[nn.Linear, "forward"]),
            (F, "linear", _originals[F, "linear"]),
            (nn.Dropout, "forward", obstacles.unpatched(nn.Dropout, "forward", nn.modules.dropout)),
            (F, "dropout", _originals[F, "dropout"]),
        ),
    )


class _Known(NamedTuple):
    """A class of activations: its forward, the code of its row, and the functions of torch that it calls."""

    forward: Callable[..., Tensor]
    code: int
    functions: Tuple[Tuple[Any, str, Any], ...]


_known: Dict[Union[type, str], _Known] = {}  # those of torch.nn.GELU by its ``approximate``

Act = Union[nn.Module, Callable[[Tensor], Tensor]]


def fused(
    pattern: Pattern,
    x: Tensor,
    projections: Sequence[nn.Module],
    act: Act,
    between: Sequence[Union[nn.Module, float]] = (),
) -> Tensor:
    """``forwards.fused`` of what ``act`` computes, by the short way where there is one."""
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
    if _is_compiling() or type(x) is not Tensor or x.dtype not in _dtypes or _backends[-1].name != "auto":
        return None
    if not x.is_cuda or _gpu_refusal(x.get_device()) is not None if _on_gpu else not x.is_cpu:
        return None
    kind = type(act)
    known = _known.get(kind if kind is not nn.GELU else act.approximate)
    if known is None:
        _learn(act)  # for the next call
        return None
    given = _plain.operands(projections, act, known.forward, known.functions, between)
    if given is None:
        return None
    recorded = training.is_recording() and (x.requires_grad or _needs_gradient(given))
    count = len(projections)
    weights, biases, up_first = given[:count], given[count:], None
    if pattern.packed:
        if weights[0].size(0) % 2 != 0:  # there are no halves
            return None
        if recorded:
            up_first, nothing = pattern.up_first, (None,) * (3 - count)
            weights, biases = (weights[0], *nothing, *weights[1:]), (biases[0], *nothing, *biases[1:])
        else:
            weights = (*halves(weights[0], pattern.up_first), *weights[1:])
            biases = (*halves(biases[0], pattern.up_first), *biases[1:])
        count = len(weights)
    name = "linear" if count == 1 else "gated_mlp" if count == 3 else "mlp" if pattern.whole else "gated_linear"
    try:
        if not recorded:
            return _ops[name](x, *weights, *biases, known.code)
        refused = training.refusal(name) is not None
        return None if refused else training.run(name, (x, *weights, *biases), known.code, pattern.memory, up_first)
    except RuntimeError:  # the long way says what is wrong with the operands, or broadcasts them
        return None


def is_bare(module: nn.Module) -> bool:
    """Whether calling a module runs the forward of its class and nothing else."""
    if _plain is None or _is_compiling():  # Dynamo cannot look into compiled code
        return "forward" not in module.__dict__ and obstacles.of_call(module) is None
    return _plain.is_bare(module)


def is_undisturbed() -> bool:
    """Whether it is certain that nobody watches or changes every call of a module, or of a function of torch."""
    return _plain is not None and not _is_compiling() and _plain.is_undisturbed()


def _needs_gradient(given: Tuple[Optional[Tensor], ...]) -> bool:
    for tensor in given:  # noqa: SIM110 (a generator costs more than what it runs)
        if tensor is not None and tensor.requires_grad:
            return True
    return False


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
