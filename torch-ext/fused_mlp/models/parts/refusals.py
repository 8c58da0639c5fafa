"""When a module must be called as it is: what its call does that reading its weights, or its class, would skip.

A projection may be wrapped by an adapter, quantised, sharded, offloaded or watched by hooks. The rule is narrow on
purpose: what is not known to be plain is called. The answers are noun phrases, for reports.
"""

from __future__ import annotations

import inspect
from types import FunctionType
from typing import Any, Optional, Tuple, Union

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

# Linear layers of transformers with a class of their own, and whether their weight is [in, out]. Falcon's adds its bias
# to the product, and the sum may have the bias's dtype: it stands for torch's without a bias alone.
_OTHER_LINEARS = {
    "transformers.pytorch_utils.Conv1D": True,  # GPT-2's
    "transformers.models.falcon.modeling_falcon.FalconLinear": False,
}


def unpatched(owner: Any, name: str, home: Any) -> Any:
    """The attribute of ``owner``, if it was written in the module ``home``; None if somebody put it there."""
    function = getattr(owner, name)
    if isinstance(function, FunctionType):
        return None if hasattr(function, "__wrapped__") or function.__globals__ is not vars(home) else function
    return function if inspect.isbuiltin(function) else None


# Functions that the parts of an MLP call, activations included. Profilers that count operations, quantisers and
# loggers put functions of their own in these places.
_PATCHABLE = (
    (nn.Linear, "__call__", _torch_module),  # and with it that of every module
    (nn.Linear, "forward", nn.modules.linear),
    *((F, name, F) for name in ("linear", "dropout")),
    (torch, "addmm", torch),
    *((owner, name, owner) for owner, name in dict.fromkeys(call for row in ACTIVATIONS for call in row.calls)),
)
_ORIGINALS = tuple((owner, name, unpatched(owner, name, home)) for owner, name, home in _PATCHABLE)
_CALL = _ORIGINALS[0][2]
_are_unchanged = getattr(native.plain_modules, "are_unchanged", None)  # the same in compiled code


def linear_forward(self: nn.Module, input: Tensor) -> Tensor:
    """The forward of the layer that ``kernels.kernelize`` puts into linear layers: they stay plain."""
    return functional.linear(input, self.weight, self.bias)


linear_forward.__name__ = "forward"  # the name under which a bound method is pickled
PLAIN_FORWARDS[nn.Linear] = linear_forward


def of_global_state() -> Optional[str]:
    """The first thing that watches or changes every call of a module or of a function of torch, or None."""
    if (
        _torch_module._global_forward_hooks
        or _torch_module._global_forward_pre_hooks
        or _torch_module._global_backward_hooks
        or _torch_module._global_backward_pre_hooks
    ):
        return "global module hooks"
    is_asked = _are_unchanged is not None and not torch.compiler.is_compiling()
    for owner, name, original in () if is_asked and _are_unchanged(_ORIGINALS) else _ORIGINALS:
        if getattr(owner, name) is not original:
            return f"a patched {owner.__name__}.{name}"
    for index in range(torch._C._len_torch_function_stack()):
        mode = torch._C._get_function_stack_at(index)
        if type(mode) is not DeviceContext:  # that of torch.set_default_device, which changes no product
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
    """The reason why ``projection`` has to be called, or None if it is a plain linear layer."""
    found = parameters_of(projection)
    return found if isinstance(found, str) else None


def parameters_of(projection: nn.Module) -> Union[str, Tuple[Tensor, Optional[Tensor]]]:
    """The weight of a plain linear layer as ``[out, in]`` and its bias, or what :func:`of_projection` says of it."""
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
    """True if ``projection`` is of a class that is no plain linear layer, whatever its hooks and its weight are."""
    return type(projection) is not nn.Linear and not is_other_linear(projection)


def is_wrapped(projection: nn.Module) -> bool:
    """True for a layer that multiplies in a way of its own as long as it is there: an adapter, quantised weights."""
    if not isinstance(projection, nn.Module) or is_foreign(projection):
        return True
    kind = type(state_of(projection)["_parameters"].get("weight"))
    # Those that are sharded over devices are whole again while a method runs.
    return issubclass(kind, Tensor) and kind not in (nn.Parameter, Tensor) and kind.__name__ != "DTensor"


def has_own_product(projection: nn.Module) -> bool:
    """True if ``projection`` is a linear layer of a class that computes in a way of its own, now and for good."""
    kind = type(projection)
    return isinstance(projection, nn.Linear) and is_foreign(projection) and kind.forward is not nn.Linear.forward


def of_input(x: Tensor) -> Optional[str]:
    """The reason why no kernel takes ``x``, or None: its kind, or the state around the call."""
    if not isinstance(x, Tensor):
        return f"an input of type {type(x).__name__}"
    if x.layout is not torch.strided:
        return f"an input of {x.layout}"
    return "a nested input" if x.is_nested else of_global_state()


def is_other_linear(projection: nn.Module) -> bool:
    """True if ``projection`` is of a class of transformers, and computes what an nn.Linear does."""
    kind = type(projection)
    return name_of_class(kind) in _OTHER_LINEARS and (is_transposed(kind) or projection.bias is None)


def is_transposed(kind: type) -> bool:
    """True if such a class has a weight that is [in, out]."""
    return _OTHER_LINEARS[name_of_class(kind)]


def is_as_written(kind: type) -> bool:
    """True if the forward of a class was defined in the module of the class. A wrapper copies the name of a module."""
    return getattr(kind.forward, "__globals__", {}).get("__name__") == kind.__module__
