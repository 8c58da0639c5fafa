"""Checks for modules that must be called: reading their weights or class would skip effects of the call.

A projection may be wrapped by an adapter, quantised, sharded, offloaded or watched by hooks. The rule is deliberately
narrow: a module that is not known to be plain is called. The reasons are noun phrases, for reports.
"""

from __future__ import annotations

import inspect
from types import CodeType, FunctionType
from typing import Any, Dict, Optional, Tuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as _torch_module
from torch.utils._device import DeviceContext

from ... import functional
from ...activations import ACTIVATIONS
from ...backends import native
from ...operands import NARROWED, is_narrowed
from ..reading.attributes import PLAIN_FORWARDS, name_of_class, of_call, state_of

# Linear classes of transformers, and whether their weight is [in, out]. Falcon's adds its bias to the product, and the
# sum may have the bias's dtype, so it is equivalent to torch's only without a bias.
_OTHER_LINEARS = {
    "transformers.pytorch_utils.Conv1D": True,  # GPT-2's
    "transformers.models.falcon.modeling_falcon.FalconLinear": False,
}


def unpatched(owner: Any, name: str, home: Any) -> Any:
    """Return an attribute of ``owner`` if it was defined in the module ``home``; None if it was patched."""
    function = getattr(owner, name)
    if isinstance(function, FunctionType):
        return None if hasattr(function, "__wrapped__") or function.__globals__ is not vars(home) else function
    return function if inspect.isbuiltin(function) else None


# Functions that the parts of an MLP call, activations included. Profilers that count operations, quantisers and
# loggers patch them.
_PATCHABLE = (
    (nn.Linear, "__call__", _torch_module),  # and with it every module's
    (nn.Linear, "forward", nn.modules.linear),
    *((F, name, F) for name in ("linear", "dropout")),
    (torch, "addmm", torch),
    *((owner, name, owner) for owner, name in dict.fromkeys(call for row in ACTIVATIONS for call in row.calls)),
)
_ORIGINALS = tuple((owner, name, unpatched(owner, name, home)) for owner, name, home in _PATCHABLE)
_CALL = _ORIGINALS[0][2]


def codes_of(*forwards: Any) -> Tuple[Tuple[Any, ...], ...]:
    """Return the code of these functions, which may be replaced in place, as attributes that must be unchanged."""
    return tuple((each, "__code__", each.__code__) for each in forwards if isinstance(each, FunctionType))


# torch.compile traces the code itself.
_CODES = codes_of(*(kind.forward for kind in (nn.Linear, nn.Dropout, nn.Identity)))
_WATCHED = (*_ORIGINALS, *_CODES)
_are_unchanged = getattr(native.plain_modules, "are_unchanged", None)  # the same check in compiled code


def linear_forward(self: nn.Module, input: Tensor) -> Tensor:
    """Forward of the layer that ``kernels.kernelize`` installs in linear layers, which stay plain."""
    return functional.linear(input, self.weight, self.bias)


linear_forward.__name__ = "forward"  # the name under which a bound method is pickled
PLAIN_FORWARDS[nn.Linear] = linear_forward


def of_global_state() -> Optional[str]:
    """Return the first thing found that watches or changes every call of a module or of a torch function, or None."""
    if (
        _torch_module._global_forward_hooks
        or _torch_module._global_forward_pre_hooks
        or _torch_module._global_backward_hooks
        or _torch_module._global_backward_pre_hooks
    ):
        return "global module hooks"
    watched = _ORIGINALS if torch.compiler.is_compiling() else _WATCHED
    is_asked = _are_unchanged is not None and watched is _WATCHED
    for owner, name, original in () if is_asked and _are_unchanged(watched) else watched:
        if getattr(owner, name) is not original:
            return f"a patched {getattr(owner, '__qualname__', owner.__name__)}.{name}"
    for index in range(torch._C._len_torch_function_stack()):
        mode = torch._C._get_function_stack_at(index)
        if type(mode) is not DeviceContext:  # the mode of torch.set_default_device, which changes no product
            return f"the mode {type(mode).__name__}"
    if torch._C._get_tracing_state() is not None:
        return "torch.jit tracing"
    if torch._C._are_functorch_transforms_active():
        return "a torch.func transform"
    # torch.compile records under modes of its own.
    if not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack():
        return "a dispatch mode"
    return None


def of_projection(projection: nn.Module) -> Optional[str]:
    """Return the reason why ``projection`` has to be called, or None if it is a plain linear layer."""
    found = parameters_of(projection)
    return found if isinstance(found, str) else None


def parameters_of(projection: nn.Module) -> Union[str, Tuple[Tensor, Optional[Tensor]]]:
    """Return the weight of a plain linear layer as ``[out, in]`` and its bias; else why it has to be called."""
    kind = type(projection)
    if kind is not nn.Linear:
        if not is_other_linear(projection):
            return f"a {name_of_class(kind)}"
        if not is_as_written(kind):
            return f"a patched {name_of_class(kind)}"
    refusal = of_call(projection)
    if refusal is not None:
        return refusal
    weight = projection.weight
    if type(weight) not in (nn.Parameter, Tensor):
        return f"a weight of type {type(weight).__name__}"
    if not weight.dtype.is_floating_point:
        return f"a weight of {weight.dtype}"
    if weight.layout is not torch.strided:
        return f"a weight of {weight.layout}"
    if is_narrowed(weight):
        return NARROWED
    weight = weight.t() if kind is not nn.Linear and is_transposed(kind) else weight
    bias = projection.bias
    if bias is not None and weight.dim() == 2 and bias.shape != weight.shape[:1]:  # torch broadcasts it
        return f"a bias of shape {list(bias.shape)}"
    return weight, bias


def is_foreign(projection: nn.Module) -> bool:
    """True if the class of ``projection`` is not a plain linear layer, whatever its hooks and its weight."""
    return type(projection) is not nn.Linear and not is_other_linear(projection)


def is_wrapped(projection: nn.Module) -> bool:
    """True for a layer with a product of its own, as long as it is in place: an adapter or quantised weights."""
    if not isinstance(projection, nn.Module) or is_foreign(projection):
        return True
    kind = type(state_of(projection)["_parameters"].get("weight"))
    # Weights sharded over devices are gathered while a method runs.
    return issubclass(kind, Tensor) and kind not in (nn.Parameter, Tensor) and kind.__name__ != "DTensor"


def has_own_product(projection: nn.Module) -> bool:
    """True if ``projection`` is a linear layer whose class permanently has a product of its own."""
    kind = type(projection)
    return isinstance(projection, nn.Linear) and is_foreign(projection) and kind.forward is not nn.Linear.forward


def of_input(x: Tensor) -> Optional[str]:
    """Return the reason why no kernel supports ``x``, its kind or the state around the call; None otherwise."""
    if not isinstance(x, Tensor):
        return f"an input of type {type(x).__name__}"
    if x.layout is not torch.strided:
        return f"an input of {x.layout}"
    return "a nested input" if x.is_nested else of_global_state()


def is_other_linear(projection: nn.Module) -> bool:
    """True if ``projection`` is of a class of transformers that computes the same as nn.Linear."""
    kind = type(projection)
    return name_of_class(kind) in _OTHER_LINEARS and (is_transposed(kind) or projection.bias is None)


def is_transposed(kind: type) -> bool:
    """True if such a class has an [in, out] weight."""
    return _OTHER_LINEARS[name_of_class(kind)]


def is_as_written(kind: type) -> bool:
    """True if the forward of a class is defined in the class's own module, whose name alone a wrapper copies, and has
    the code with which it was first seen."""
    forward = kind.forward
    if getattr(forward, "__globals__", {}).get("__name__") != kind.__module__:
        return False
    return torch.compiler.is_compiling() or _codes.setdefault(forward, forward.__code__) is forward.__code__


_codes: Dict[FunctionType, CodeType] = {}  # by forwards of such classes
