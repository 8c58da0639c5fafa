"""The single table of activations: the function and the derivative of each.

Special values. Every kernel computes in float32 and rounds once. Values and gradients are NaN, infinite or finite
exactly where PyTorch's formulas are when evaluated in float64:

- NaN gives NaN, and 0 times infinity is NaN. Only ``linear`` and ``relu`` have a derivative of 1 at NaN.
- The value at +inf is +inf, except for ``sigmoid``, where it is 1. At -inf it is 0 for ``relu``, ``relu2`` and
  ``sigmoid``, -inf for ``linear``, and NaN for the others, which multiply x by a weight of zero.
- The derivative at either infinity is NaN for the GELUs and ``silu``, 0 for ``sigmoid`` and 1 for ``linear``. At +inf
  it is 1 for ``relu`` and +inf for ``relu2``; at -inf it is 0 for both.
- A gradient that arrives as NaN or infinite gives NaN where the derivative is 0. PyTorch's ``relu`` gives 0 there.
- A finite x, however large, has a finite value and derivative, except that ``relu2`` and its derivative overflow to
  +inf. PyTorch's float32 operations differ here: their derivative of tanh-GELU is NaN beyond 1e19.
- Subnormal operands are not flushed. A result below the smallest normal number may be zero. The sign of a zero is not
  specified.

Calls that fall back to PyTorch's operations (``explain`` says which) have PyTorch's special values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Callable, Dict, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

_TANH_SLOPE = 2.0 * math.sqrt(2.0 / math.pi)  # slope of the sigmoid in tanh-GELU: 0.5 (1 + tanh u) = sigmoid(2u)
_TANH_CUBIC = 0.044715
_QUICK_SLOPE = 1.702


@dataclass(frozen=True)
class Activation:
    """One elementwise activation.

    ``code`` is its number in ``activation.h``, which the compiled ops use. ``function`` and ``derivative`` map a tensor
    of any shape and floating dtype to one of the same shape and dtype, using differentiable operations. ``aliases`` are
    the other names of the same function in ``transformers.activations.ACT2FN``. ``result_kept`` is True if autograd
    saves the result of PyTorch's operations for the backward, or nothing, rather than x.

    The other fields serve ``models``. ``calls`` lists the functions that modules with this activation call, as pairs of
    owner and name; if one has been replaced, nothing is fused. ``spellings`` are other torch functions that compute it.
    ``classes`` are the qualified names of classes that compute it with one torch function, whatever their attributes,
    except one that holds that function; ``composites`` are those that use several functions.
    """

    name: str
    code: int
    function: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor], Tensor]
    aliases: Tuple[str, ...] = ()
    result_kept: bool = False
    calls: Tuple[Tuple[Any, str], ...] = ()
    spellings: Tuple[Callable[[Tensor], Tensor], ...] = ()
    classes: Tuple[str, ...] = ()
    composites: Tuple[str, ...] = ()


def _gelu_derivative(x: Tensor) -> Tensor:
    cdf = 0.5 * torch.erfc(x * -math.sqrt(0.5))
    pdf = torch.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)
    return cdf + x * pdf


def _gelu_tanh_derivative(x: Tensor) -> Tensor:
    x = x.clamp(-32.0, 32.0) + (x - x)  # constant to the last bit beyond, where x * x may overflow; NaN at infinity
    z = _TANH_SLOPE * x * (1.0 + _TANH_CUBIC * x * x)
    return torch.sigmoid(z) + x * _sigmoid_derivative(z) * _TANH_SLOPE * (1.0 + 3.0 * _TANH_CUBIC * x * x)


def _sigmoid_weighted_derivative(x: Tensor, slope: float) -> Tensor:
    z = slope * x
    return torch.sigmoid(z) + x * (slope * _sigmoid_derivative(z))  # z may be infinite where x is finite


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


_OF_TORCH = "torch.nn.modules.activation."
_OF_TRANSFORMERS = "transformers.activations."

ACTIVATIONS: Tuple[Activation, ...] = (
    Activation(
        "linear",
        0,
        _identity,
        torch.ones_like,
        result_kept=True,
        classes=("torch.nn.modules.linear.Identity", _OF_TRANSFORMERS + "LinearActivation"),
    ),
    Activation(
        "gelu",
        1,
        F.gelu,
        _gelu_derivative,
        ("gelu_python",),
        calls=((F, "gelu"),),
        classes=(_OF_TRANSFORMERS + "GELUActivation",),
    ),
    Activation(
        "gelu_pytorch_tanh",
        2,
        _gelu_tanh,
        _gelu_tanh_derivative,
        ("gelu_new", "gelu_fast", "gelu_accurate", "gelu_python_tanh"),
        calls=((F, "gelu"), (torch, "pow"), (torch, "tanh")),
        classes=(_OF_TRANSFORMERS + "GELUTanh",),
        composites=(
            _OF_TRANSFORMERS + "NewGELUActivation",
            _OF_TRANSFORMERS + "FastGELUActivation",
            _OF_TRANSFORMERS + "AccurateGELUActivation",
            "transformers.models.bloom.modeling_bloom.BloomGelu",
        ),
    ),
    Activation(
        "quick_gelu",
        3,
        _quick_gelu,
        lambda x: _sigmoid_weighted_derivative(x, _QUICK_SLOPE),
        calls=((torch, "sigmoid"),),
        composites=(_OF_TRANSFORMERS + "QuickGELUActivation",),
    ),
    Activation(
        "silu",
        4,
        F.silu,
        lambda x: _sigmoid_weighted_derivative(x, 1.0),
        ("swish",),
        calls=((F, "silu"),),
        classes=(_OF_TORCH + "SiLU", _OF_TRANSFORMERS + "SiLUActivation"),
    ),
    Activation(
        "relu",
        5,
        F.relu,
        lambda x: 1.0 - (x <= 0).to(x.dtype),
        result_kept=True,
        calls=((F, "relu"),),
        spellings=(torch.relu,),
        classes=(_OF_TORCH + "ReLU",),
    ),
    Activation(
        "relu2",
        6,
        _relu2,
        lambda x: 2.0 * F.relu(x),
        result_kept=True,
        calls=((F, "relu"), (torch, "square")),
        composites=(_OF_TRANSFORMERS + "ReLUSquaredActivation",),
    ),
    Activation(
        "sigmoid",
        7,
        torch.sigmoid,
        _sigmoid_derivative,
        result_kept=True,
        calls=((torch, "sigmoid"),),
        spellings=(F.sigmoid,),
        classes=(_OF_TORCH + "Sigmoid",),
    ),
)

_BY_NAME: Dict[Optional[str], Activation] = {
    name: activation for activation in ACTIVATIONS for name in (activation.name, *activation.aliases)
}
_BY_NAME[None] = _BY_NAME["linear"]

BY_CODE: Tuple[Activation, ...] = tuple(sorted(ACTIVATIONS, key=lambda activation: activation.code))


def get_activation(name: Optional[str]) -> Activation:
    """Return the activation with that name or alias; None means ``linear``.

    Raises ValueError for an unknown name, and TypeError for anything but a string or None.
    """
    found = _BY_NAME.get(name) if name is None or isinstance(name, str) else None
    if found is None:
        if not isinstance(name, str):
            raise TypeError(f"activation must be a string or None, got {type(name).__name__}")
        known = ", ".join(known for known in _BY_NAME if known is not None)
        raise ValueError(f"activation must be one of {known}, or None, got {name!r}")
    return found
