"""Activations that a method calls other than as a function or module of one tensor.

A rewritten method turns ``F.gelu(h, approximate=self.approximate)``, or a function of gate and up, into a callable that
computes the same and knows which row of the table that is, given the current state of its parts.
"""

from __future__ import annotations

from types import MethodType
from typing import Any, Callable, Dict, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...activations import ACTIVATIONS, Activation, get_activation
from ...operands import autocasts
from ..proving import activations
from .guards import are_unchanged, guards_of
from .recognition import activation_of, is_composite, is_named, name_of

# The functions at import. Replacements patched in later are called.
_GELU_FUNCTION = F.gelu
_GELU = {"none": get_activation("gelu"), "tanh": get_activation("gelu_pytorch_tanh")}  # by ``approximate``
_INPLACE = (F.relu, F.silu)  # functions with an option of that name


class Form:
    """``function`` of one tensor; ``activation`` is the row of the table that it computes, or None."""

    def __init__(
        self,
        name: str,
        function: Callable[[Tensor], Tensor],
        activation: Optional[Activation],
        inplace: bool = False,
    ) -> None:
        self.__name__, self.function, self.activation, self.inplace = name, function, activation, inplace

    def __call__(self, x: Tensor) -> Tensor:
        return self.function(x)


def row_of(act: Callable[[Tensor], Tensor]) -> Optional[Activation]:
    """Return the row of the table that an activation of a match computes, or None."""
    return act.activation if type(act) is Form else activation_of(act)


# The rows that some code computes by functions that autocast runs in float32 on a GPU.
_POWERS = {row.code for row in ACTIVATIONS if not {(torch, "pow"), (torch, "square")}.isdisjoint(row.calls)}


def may_be_widened(act: Callable[[Tensor], Tensor], code: int) -> bool:
    """True if autocast on a GPU may compute an activation of this row in float32, so that its result is wide."""
    if code not in _POWERS:
        return False
    if type(act) is Form:
        return act.function is act.activation.function  # a function of gate and up that may compute it in any way
    if not isinstance(act, nn.Module):
        return True
    return is_composite(act) or not is_named(act) or type(act.__dict__.get("act")) is MethodType


def is_widened(act: Callable[[Tensor], Tensor], x: Any) -> bool:
    """True if that may happen to a product of x."""
    row = row_of(act) if isinstance(x, Tensor) and x.is_cuda and autocasts(x) else None
    return row is not None and may_be_widened(act, row.code)


def call(function: Callable[..., Tensor], *options: Any, **named: Any) -> Form:
    """Return ``function(h, *options, **named)`` as a form; there is at least one option."""
    row, inplace = activation_of(function), False
    if function in _INPLACE:
        inplace, *others = (*options, *named.values())
        row = None if others else row
    elif function is _GELU_FUNCTION and not options and named.keys() == {"approximate"}:
        row = _GELU.get(named["approximate"])
    else:
        row = None
    return Form(name_of(function), lambda h: function(h, *options, **named), row, inplace)


def factor(function: Callable[[Tensor, Tensor], Tensor]) -> Form:
    """Return ``act`` as a form if ``function(h, up)`` computes ``act(h) * up``."""
    form, unchanged = _products.get(function, (None, ()))
    if form is not None and are_unchanged(unchanged):
        return form
    found = activations.read_product(function)
    guards = None if found is None else guards_of(found.dependencies)
    if guards is None:
        return Form(name_of(function), function, None)
    form = Form(name_of(function), found.row.function, found.row)
    _products[function] = form, guards.unchanged
    return form


_products: Dict[Callable[..., Tensor], Tuple[Form, Tuple[Any, ...]]] = {}  # known products and their guards


FORMS: Dict[str, Callable[..., Form]] = {"call": call, "factor": factor}
