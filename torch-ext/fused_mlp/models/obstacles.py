"""When a module must be called as it is: what its call does that reading its weights, or its class, would skip.

A projection may be wrapped by an adapter, quantised, sharded, offloaded or watched by hooks. The rule is narrow on
purpose: what is not known to be plain is called. The answers are noun phrases, for reports.
"""

from __future__ import annotations

import inspect
from types import FunctionType
from typing import Any, Callable, Optional, Tuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as _torch_module
from torch.utils._device import DeviceContext

from .. import functional

_CONV1D = "transformers.pytorch_utils.Conv1D"  # GPT-2's linear layer, weight [in, out]


def is_original(function: Any, home: Any) -> bool:
    """Whether a function is one that was written in the module ``home``, and not what somebody put in its place."""
    if not isinstance(function, FunctionType):
        return inspect.isbuiltin(function)
    return not hasattr(function, "__wrapped__") and function.__globals__ is vars(home)


_LINEAR_FORWARD = nn.Linear.forward if is_original(nn.Linear.forward, nn.modules.linear) else None
_MODULE_CALL = nn.Module.__call__ if is_original(nn.Module.__call__, _torch_module) else None

# The functions that the parts of an MLP call, in their place or None where they are patched already. Some do patch
# them: profilers that count operations, quantisers, loggers.
_FUNCTIONS = tuple(
    (home, name, getattr(home, name) if is_original(getattr(home, name), home) else None)
    for home, names in (
        (F, ("linear", "dropout", "gelu", "relu", "silu")),
        (torch, ("addmm", "pow", "sigmoid", "square", "tanh")),
    )
    for name in names
)


def linear_forward(self: nn.Module, input: Tensor) -> Tensor:
    """The forward of the layer that ``kernels.kernelize`` puts into linear layers: they stay plain."""
    return functional.linear(input, self.weight, self.bias)


linear_forward.__name__ = "forward"  # the name under which a bound method is pickled


def of_surroundings() -> Optional[str]:
    """What watches or changes every call of a module or of a function of torch, or None."""
    if (
        _torch_module._global_forward_hooks
        or _torch_module._global_forward_pre_hooks
        or _torch_module._global_backward_hooks
        or _torch_module._global_backward_pre_hooks
    ):
        return "global module hooks"
    if nn.Linear.__call__ is not _MODULE_CALL:
        return "a patched call of modules"
    for home, name, original in _FUNCTIONS:
        if getattr(home, name) is not original:
            return f"a patched {home.__name__}.{name}"
    for index in range(torch._C._len_torch_function_stack()):
        mode = torch._C._get_function_stack_at(index)
        if type(mode) is not DeviceContext:  # that of torch.set_default_device, which changes no product
            return f"the mode {type(mode).__name__}"
    # What torch.compile records is run under modes of its own.
    if not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack():
        return "a dispatch mode"
    return None


def of_call(module: nn.Module, kernelizable: bool = False) -> Optional[str]:
    """What calling ``module`` does beyond the forward that its class was written with, or None.

    ``kernelizable``: where the class is made for it, a layer of a kernel, which ``kernels.kernelize`` put in the place
    of the forward, computes the same.
    """
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return "hooks"
    own = module.__dict__.get("forward")
    if own is not None:
        function = getattr(own, "__func__", None)
        known = function in (type(module).forward, linear_forward)
        if not known and not (kernelizable and hasattr(type(module), "kernel_layer_name") and _is_of_a_layer(function)):
            return "a forward of its own"
    return None


def of_projection(projection: nn.Module) -> Optional[str]:
    """Why the weight of ``projection`` must not be used without calling it, or None if it is a plain linear layer."""
    found = parameters_of(projection)
    return found if isinstance(found, str) else None


def parameters_of(projection: nn.Module) -> Union[str, Tuple[Tensor, Optional[Tensor]]]:
    """The weight of a plain linear layer as ``[out, in]`` and its bias, or what :func:`of_projection` says of it."""
    kind = type(projection)
    if kind is nn.Linear:
        if kind.forward is not _LINEAR_FORWARD:
            return "a patched torch.nn.Linear"
    elif not _is_conv1d(kind):
        return f"a {kind.__module__}.{kind.__qualname__}"
    elif kind.forward.__module__ != kind.__module__:
        return f"a patched {_CONV1D}"
    obstacle = of_call(projection)
    if obstacle is not None:
        return obstacle
    parameters = projection._parameters  # asked first, it is several times as fast as the attribute
    weight = parameters["weight"] if "weight" in parameters else projection.weight  # noqa: SIM401 (which asks both)
    if type(weight) not in (nn.Parameter, Tensor):
        return f"a weight of type {type(weight).__name__}"
    if not weight.dtype.is_floating_point:
        return f"a weight of {weight.dtype}"
    if weight.layout is not torch.strided:
        return f"a weight of {weight.layout}"
    bias = parameters["bias"] if "bias" in parameters else projection.bias  # noqa: SIM401
    return (weight if kind is nn.Linear else weight.t()), bias


def weight_of(projection: nn.Module) -> Tensor:
    """The weight of a plain projection as ``[out, in]``."""
    weight, _ = parameters_of(projection)
    return weight


def of_input(x: Tensor) -> Optional[str]:
    """Why no kernel takes ``x``, whatever it is multiplied with, or None: what it is, or what is around the call."""
    if x.layout is not torch.strided:
        return f"an input of {x.layout}"
    return "a nested input" if x.is_nested else of_surroundings()


def _is_of_a_layer(function: Optional[Callable[..., Tensor]]) -> bool:
    """Whether a function is the forward of a class in the ``layers`` of a kernel, and not wrapped since."""
    if function is None or hasattr(function, "__wrapped__"):
        return False
    return function.__module__.endswith(".layers") and function.__qualname__.endswith(".forward")


def _is_conv1d(kind: type) -> bool:
    return f"{kind.__module__}.{kind.__qualname__}" == _CONV1D
