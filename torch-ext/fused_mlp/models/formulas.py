"""Activations that somebody has written out: what the source of a function computes of its one tensor."""

from __future__ import annotations

import ast
import functools
import inspect
import math
from dataclasses import dataclass
from types import FunctionType
from typing import Callable, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from ..activations import ACTIVATIONS, Activation
from .source import tree_of, value_of

# Functions that compute each element of their result from one element, in any precision: their names as methods too.
_NAMES = """
    abs add cos div elu erf erfc exp expm1 gelu hardsigmoid hardswish leaky_relu log1p logsigmoid maximum minimum mish
    mul multiply neg pow reciprocal relu relu6 rsqrt selu sigmoid silu sin softplus softsign sqrt square sub tanh
    tanhshrink
"""
ELEMENTWISE = {
    getattr(owner, name) for name in _NAMES.split() for owner in (torch, F, torch.special) if hasattr(owner, name)
}
METHODS = {name for name in _NAMES.split() if hasattr(Tensor, name)} | {"float", "double", "half", "bfloat16", "to"}
METHODS |= {"type_as", "clone", "contiguous"}
_LINEAR = {"add", "div", "mul", "multiply", "neg", "sub", "type_as", "clone", "contiguous", "to"}
_LINEAR |= {"float", "double", "half", "bfloat16"}
_NUMBERS = (math.sqrt, math.exp, math.log, math.pow)

# The largest difference as a part of |x|: four roundings of float32. Two functions that agree so closely in float64 are
# the same one, with constants that were written out to fewer digits, or computed in float32 in between.
_TOLERANCE = 4 * torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Formula:
    """What a function computes of its tensor: ``row`` of the table of activations, if it is one of these."""

    row: Optional[Activation]


@functools.cache
def formula_of(function: FunctionType, is_method: bool) -> Optional[Formula]:
    """The formula that a function of one tensor computes, element by element; None if it does anything else, or may,
    or is linear.

    It has a row only if it uses nothing but its argument, constants and functions of torch, so that it is the same
    for every instance of its class.
    """
    reader = _Reader(function, is_method)
    if not reader.reads_elements():
        return None
    call = functools.partial(function, None) if is_method else function
    return Formula(row_computed(call) if reader.is_closed else None)


class _Reader:
    """Reads the source of a function: whether each element of what it returns comes from one element of its input."""

    def __init__(self, function: FunctionType, is_method: bool) -> None:
        self._function = function
        self._tree = tree_of(function)
        names = list(inspect.signature(function).parameters)
        self._instance = names.pop(0) if is_method and names else None
        self._tensors = set(names)  # names of values that depend on the input
        self._takes_one = len(names) == 1 and function.__code__.co_argcount == 1 + is_method
        self.is_closed = True  # whether the instance and the functions of others have no part in it
        self._is_linear = True  # for all that was read until now

    def reads_elements(self) -> bool:
        if self._tree is None or not self._takes_one:
            return False
        *statements, last = self._tree.body
        if statements and isinstance(statements[0], ast.Expr) and isinstance(statements[0].value, ast.Constant):
            del statements[0]  # the docstring
        for statement in statements:
            if not isinstance(statement, ast.Assign) or not self._is_elementwise(statement.value):
                return False
            if len(statement.targets) != 1 or not isinstance(statement.targets[0], ast.Name):
                return False
            self._tensors.add(statement.targets[0].id)
        returns = isinstance(last, ast.Return) and last.value is not None and self._is_elementwise(last.value)
        return returns and not self._is_linear

    def _is_elementwise(self, node: ast.expr) -> bool:
        if isinstance(node, ast.BinOp):
            self._is_linear = self._is_linear and not isinstance(node.op, ast.Pow)
            return self._is_elementwise(node.left) and self._is_elementwise(node.right)
        if isinstance(node, ast.UnaryOp):
            return isinstance(node.op, (ast.USub, ast.UAdd)) and self._is_elementwise(node.operand)
        if isinstance(node, ast.Call):
            return self._is_elementwise_call(node)
        if isinstance(node, ast.Name) and node.id in self._tensors:
            return True
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id in self._tensors:
                return node.attr == "dtype"
            if node.value.id == self._instance:
                self.is_closed = False
                return True
        return self._is_number(node)

    def _is_number(self, node: ast.expr) -> bool:
        if isinstance(node, ast.BinOp):
            return self._is_number(node.left) and self._is_number(node.right)
        if isinstance(node, ast.Call):
            callee = value_of(node.func, self._function, None)
            return any(callee is known for known in _NUMBERS) and all(map(self._is_number, node.args))
        value = node.value if isinstance(node, ast.Constant) else value_of(node, self._function, None)
        return type(value) in (int, float, torch.dtype)

    def _is_elementwise_call(self, node: ast.Call) -> bool:
        if self._is_number(node):
            return True
        given = list(node.args)
        for word in node.keywords:
            if word.arg == "approximate" and isinstance(word.value, ast.Constant):
                continue
            if word.arg not in ("dtype", "input"):
                return False
            given.append(word.value)
        if not all(map(self._is_elementwise, given)):
            return False
        callee = node.func
        owner = callee.value if isinstance(callee, ast.Attribute) else None
        owner_name = owner.id if isinstance(owner, ast.Name) else None
        if owner_name == self._instance and owner_name is not None:
            self.is_closed = self._is_linear = False  # who asks knows the parts of the module
            return True
        if owner_name in self._tensors or (owner is not None and owner_name is None and self._is_elementwise(owner)):
            self._is_linear = self._is_linear and callee.attr in _LINEAR
            return callee.attr in METHODS
        if owner is not None and callee.attr == "apply" and self._is_autograd_function(owner):
            self.is_closed = self._is_linear = False
            return True
        value = value_of(callee, self._function, None)
        self._is_linear = self._is_linear and getattr(value, "__name__", "") in _LINEAR
        return any(value is known for known in ELEMENTWISE)

    def _is_autograd_function(self, node: ast.expr) -> bool:
        value = value_of(node, self._function, None)
        return isinstance(value, type) and issubclass(value, torch.autograd.Function)


def row_computed(function: Callable[[Tensor], Tensor]) -> Optional[Activation]:
    """The row of the table that a function computes which is known to read elements alone."""
    steps = torch.linspace(-40.0, 40.0, 4001, dtype=torch.float64, device="cpu")
    x = torch.cat([steps, steps * 1e-3])
    try:
        with torch.no_grad():
            if any(function(x[:0].to(dtype)).dtype != dtype for dtype in (torch.float32, torch.bfloat16)):
                return None
            got = function(x)
    except Exception:  # it does not compute with its constants, say: it is called, and raises there
        return None
    bounds = _TOLERANCE * x.abs()
    return next((row for row in ACTIVATIONS if bool(((got - row.function(x)).abs() <= bounds).all())), None)
