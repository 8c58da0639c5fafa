"""The one table of activations: what each computes, its derivative, and the modules that stand for it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Callable, Dict, Optional, Tuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor

from . import obstacles

_TANH_SLOPE = 2.0 * math.sqrt(2.0 / math.pi)  # of sigmoid in gelu's tanh form: 0.5 (1 + tanh u) = sigmoid(2u)
_TANH_CUBIC = 0.044715
_QUICK_SLOPE = 1.702


@dataclass(frozen=True)
class Activation:
    """One elementwise activation.

    ``code`` is its number in ``activation.h``, by which the compiled ops know it. ``function`` and ``derivative`` map a
    tensor of any shape and floating dtype to one of the same shape and dtype, in operations that autograd can follow.
    ``aliases`` are the other names that ``transformers.activations.ACT2FN`` has for the same function.
    """

    name: str
    code: int
    function: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor], Tensor]
    aliases: Tuple[str, ...] = ()


def _gelu_derivative(x: Tensor) -> Tensor:
    cdf = 0.5 * torch.erfc(x * -math.sqrt(0.5))
    pdf = torch.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)
    return cdf + x * pdf


def _gelu_tanh_derivative(x: Tensor) -> Tensor:
    z = _TANH_SLOPE * x * (1.0 + _TANH_CUBIC * x * x)
    return torch.sigmoid(z) + x * _sigmoid_derivative(z) * _TANH_SLOPE * (1.0 + 3.0 * _TANH_CUBIC * x * x)


def _sigmoid_weighted_derivative(x: Tensor, slope: float) -> Tensor:
    z = slope * x
    return torch.sigmoid(z) + z * _sigmoid_derivative(z)


def _sigmoid_derivative(x: Tensor) -> Tensor:
    return torch.sigmoid(x) * torch.sigmoid(-x)  # 1 - sigmoid(x) would cancel


def _identity(x: Tensor) -> Tensor:
    return x


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(_QUICK_SLOPE * x)


def _relu2(x: Tensor) -> Tensor:
    return torch.square(F.relu(x))


ACTIVATIONS: Tuple[Activation, ...] = (
    Activation("linear", 0, _identity, torch.ones_like),
    Activation("gelu", 1, F.gelu, _gelu_derivative, ("gelu_python",)),
    Activation(
        "gelu_pytorch_tanh",
        2,
        _gelu_tanh,
        _gelu_tanh_derivative,
        ("gelu_new", "gelu_fast", "gelu_accurate", "gelu_python_tanh"),
    ),
    Activation(
        "quick_gelu",
        3,
        _quick_gelu,
        lambda x: _sigmoid_weighted_derivative(x, _QUICK_SLOPE),
    ),
    Activation("silu", 4, F.silu, lambda x: _sigmoid_weighted_derivative(x, 1.0), ("swish",)),
    Activation("relu", 5, F.relu, lambda x: (x > 0).to(x.dtype)),
    Activation("relu2", 6, _relu2, lambda x: 2.0 * F.relu(x)),
    Activation("sigmoid", 7, torch.sigmoid, _sigmoid_derivative),
)

_BY_NAME: Dict[Optional[str], Activation] = {
    name: activation for activation in ACTIVATIONS for name in (activation.name, *activation.aliases)
}
_BY_NAME[None] = _BY_NAME["linear"]

BY_CODE: Tuple[Activation, ...] = tuple(sorted(ACTIVATIONS, key=lambda activation: activation.code))

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


def get_activation(name: Optional[str]) -> Activation:
    """The activation of that name (or alias); None is ``linear``.

    Raises ValueError for a name the table has not, TypeError for anything but a string or None.
    """
    found = _BY_NAME.get(name) if name is None or isinstance(name, str) else None
    if found is None:
        if not isinstance(name, str):
            raise TypeError(f"activation must be a string or None, got {type(name).__name__}")
        known = ", ".join(known for known in _BY_NAME if known is not None)
        raise ValueError(f"activation {name!r} is not known; expected one of: {known}, or None")
    return found


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
        return None if name is None else _BY_NAME[name]
    kind = type(function)
    if kind.forward.__module__ != kind.__module__:  # patched for all
        return None
    if obstacles.of_call(function, kernelizable=True) is not None:
        return None
    if kind is torch.nn.GELU:
        return _BY_NAME["gelu" if function.approximate == "none" else "gelu_pytorch_tanh"]
    name = _BY_CLASS.get(f"{kind.__module__}.{kind.__qualname__}")
    return None if name is None else _BY_NAME[name]


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
