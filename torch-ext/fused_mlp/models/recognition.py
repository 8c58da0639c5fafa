"""Which row of the table of activations a module or a function computes."""

from __future__ import annotations

from types import FunctionType, MethodType
from typing import Callable, Dict, Optional, Union

import torch
import torch.nn.functional as F

from ..activations import ACTIVATIONS, Activation, get_activation
from . import obstacles

# Classes whose instances compute a row of the table whatever their attributes are; torch.nn.GELU is read below.
_BY_CLASS: Dict[str, str] = {
    "torch.nn.modules.activation.SiLU": "silu",
    "torch.nn.modules.activation.ReLU": "relu",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
    "torch.nn.modules.linear.Identity": "linear",
    "transformers.activations.GELUActivation": "gelu",
    "transformers.activations.GELUTanh": "gelu_pytorch_tanh",
    "transformers.activations.NewGELUActivation": "gelu_pytorch_tanh",
    "transformers.activations.FastGELUActivation": "gelu_pytorch_tanh",
    "transformers.activations.AccurateGELUActivation": "gelu_pytorch_tanh",
    "transformers.activations.QuickGELUActivation": "quick_gelu",
    "transformers.activations.SiLUActivation": "silu",
    "transformers.activations.ReLUSquaredActivation": "relu2",
    "transformers.activations.LinearActivation": "linear",
    "transformers.models.bloom.modeling_bloom.BloomGelu": "gelu_pytorch_tanh",
}

# Functions and methods that compute a row of the table, of packages that may not be there.
_BY_QUALIFIED_NAME: Dict[str, str] = {
    "transformers.models.esm.modeling_esm.gelu": "gelu",
    "transformers.models.evolla.modeling_evolla.gelu": "gelu",
    "diffusers.models.activations.GEGLU.gelu": "gelu",
}

_FUNCTIONS: Dict[Callable, str] = {
    **{activation.function: activation.name for activation in ACTIVATIONS},
    torch.relu: "relu",
    F.sigmoid: "sigmoid",
}


def activation_of(function: Union[torch.nn.Module, Callable]) -> Optional[Activation]:
    """The row of the table that a module's activation attribute computes, or None where that cannot be told.

    Modules are told by their class, functions by identity, so the answer costs no computation and torch.compile can
    follow it. A module with hooks or with a forward of its own is not recognised, but for one whose class is made for
    that: a forward that ``kernels.kernelize`` put there computes what the class does.
    """
    if not isinstance(function, torch.nn.Module):
        name = _FUNCTIONS.get(function)
        if name is None and isinstance(function, (FunctionType, MethodType)):
            name = _by_qualified_name(function)
        return None if name is None else get_activation(name)
    name = _row_of_class(function)
    if name is None or _is_patched(type(function)) or obstacles.of_call(function, kernelizable=True) is not None:
        return None
    return get_activation(name)


def alteration_of(function: Union[torch.nn.Module, Callable]) -> Optional[str]:
    """What keeps a module of a class in the table from being recognised, as a noun phrase; None for any other."""
    if not isinstance(function, torch.nn.Module) or _row_of_class(function) is None:
        return None
    if _is_patched(type(function)):
        return "a patched class"
    return obstacles.of_call(function, kernelizable=True)


def _row_of_class(module: torch.nn.Module) -> Optional[str]:
    kind = type(module)
    if kind is torch.nn.GELU:
        return "gelu" if module.approximate == "none" else "gelu_pytorch_tanh"
    return _BY_CLASS.get(f"{kind.__module__}.{kind.__qualname__}")


def _is_patched(kind: type) -> bool:
    return kind.forward.__module__ != kind.__module__


def _by_qualified_name(function: Callable) -> Optional[str]:
    if hasattr(function, "__wrapped__") or not hasattr(function, "__qualname__"):
        return None  # another's function under its name, or a method made of no function
    name = f"{function.__module__}.{function.__qualname__}"
    if name == "diffusers.models.activations.GELU.gelu":
        return "gelu" if function.__self__.approximate == "none" else "gelu_pytorch_tanh"
    return _BY_QUALIFIED_NAME.get(name)


def name_of(function: Union[torch.nn.Module, Callable]) -> str:
    """A short name of an activation for messages: its class, or its function's name."""
    if isinstance(function, torch.nn.Module):
        return type(function).__name__
    return getattr(function, "__name__", type(function).__name__)
