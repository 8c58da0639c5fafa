"""Which classes of modules are norms, or scales: torch's and one of diffusers by name, others by what they compute.

An RMSNorm's forward is read as a product of what it multiplies: its input, the weight, and the scale that it makes of
the mean of the input's squares. That of a scale, such as a vision model's LayerScale, multiplies its input by a
parameter alone. What is not such a product is neither. At each call compiled code asks whether a class and
a module of it are still what was read (torch-ext/parts.cpp, ``read_norm``).
"""

from __future__ import annotations

import ast
from types import FunctionType
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple, Union

import torch
import torch.nn.functional as F
from torch import nn

from ..reading.effects import readable
from ..reading.names import body_of, is_name
from ..reading.source import remembered, value_of
from . import obstacles
from .casts import cast_of

LAYER, RMS, RMS_OF_ONE_MORE, SCALE = 1, 2, 3, 4  # the codes of the ops (torch-ext/norm.h)


class Norm(NamedTuple):
    """A class of norms: its code, the attribute that is its eps if it has one, and what has to stay as it is for that.

    ``own`` are items of a module's dictionary: a name and its value, or a name alone that must not be there. ``hidden``
    are names that its class must not have.
    """

    code: int
    eps: Optional[str]
    of_torch: bool
    has_bias: bool
    unchanged: Tuple[Tuple[Any, str, Any], ...]
    own: Tuple[Tuple[Any, ...], ...] = ()
    hidden: Tuple[str, ...] = ()
    weight: str = "weight"


def _of_torch(code: int, kind: type, function: str, has_bias: bool) -> Norm:
    home = nn.modules.normalization
    unchanged = ((kind, "forward", obstacles.unpatched(kind, "forward", home)),)
    return Norm(code, "eps", True, has_bias, (*unchanged, (F, function, obstacles.unpatched(F, function, F))))


_FLOAT32 = "diffusers.models.normalization.FP32LayerNorm"  # casts to float32, norms, and casts back

known: Dict[type, Norm] = {nn.LayerNorm: _of_torch(LAYER, nn.LayerNorm, "layer_norm", True)}
if hasattr(nn, "RMSNorm"):
    known[nn.RMSNorm] = _of_torch(RMS, nn.RMSNorm, "rms_norm", False)


def code_of(kind: type) -> Optional[int]:
    """The code of a class of norms over the last dimension, or of scales of it, which is remembered in ``known``."""
    if kind in known and known[kind].of_torch:
        return known[kind].code
    forward = getattr(kind, "forward", None)
    is_called = kind.__call__ is obstacles._CALL and isinstance(forward, FunctionType)
    if f"{kind.__module__}.{kind.__qualname__}" == _FLOAT32 and issubclass(kind, nn.LayerNorm) and is_called:
        own = (kind, "__call__", obstacles._CALL), (kind, "forward", forward)
        known[kind] = known[nn.LayerNorm]._replace(unchanged=(*own, *known[nn.LayerNorm].unchanged))
        return LAYER
    read = _read(kind, forward) if is_called and not hasattr(forward, "__wrapped__") else None
    if read is None:
        return None
    known[kind] = read
    return read.code


class _Value(NamedTuple):
    """The product of some factors; ``wide`` if it is computed in float32 where the module's input is of 16 bits."""

    factors: Tuple[str, ...]
    wide: bool = False


class _Scaled(NamedTuple):
    """The module's input times an attribute of the module."""

    weight: str


class _OwnDtype(NamedTuple):
    """That of the module's input, and of its weight."""


_Any = Union[_Value, _Scaled, _OwnDtype, torch.dtype, int, float, str, None]  # a string is the name of an attribute

_X, _WEIGHT = _Value(("x",)), _Value(("weight",))
_ONE_MORE = ("1 + weight",)
_MEAN, _WITH_EPS = ("mean square",), ("mean square + eps",)
_OF_16_BITS = {torch.float16, torch.bfloat16}
_PRODUCTS = {("scale", "weight", "x"): RMS, ("1 + weight", "scale", "x"): RMS_OF_ONE_MORE}

_RSQRT, _POW = obstacles.unpatched(torch, "rsqrt", torch), obstacles.unpatched(torch, "pow", torch)


@remembered
def _read(kind: type, forward: FunctionType) -> Optional[Norm]:
    """What is to be known of a class with this forward, if that is an RMSNorm's or a scale's."""
    reader = _Reader(kind)
    value = reader.returned(forward, [_X])
    functions = [(kind, "__call__", obstacles._CALL), (kind, "forward", forward), *reader.used]
    functions.append((forward, "__code__", forward.__code__))
    own = [(name,) for owner, name, _ in reader.used if owner is kind]
    own += [(name, True) for name in reader.true]
    if isinstance(value, _Scaled) or value == _Value(("weight", "x")):
        weight = value.weight if isinstance(value, _Scaled) else "weight"
        return Norm(SCALE, None, False, False, tuple(functions), tuple(own), (weight, *reader.true), weight)
    code = _PRODUCTS.get(value.factors) if isinstance(value, _Value) and not value.wide else None
    if code is None or reader.eps is None:
        return None
    hidden = ("weight", reader.eps, *reader.true)
    return Norm(code, reader.eps, False, False, tuple(functions), tuple(own), hidden)


class _Reader:
    """Reads the methods of a class, of which one may call others: what they compute of their arguments."""

    def __init__(self, kind: type) -> None:
        self._kind = kind
        self.eps: Optional[str] = None
        self.used: List[Tuple[Any, str, Any]] = []  # what is called by its name in a class or in torch
        self.true: List[str] = []  # the attributes that have to be True for what was read to be what runs

    def returned(self, function: FunctionType, given: List[_Any]) -> _Any:
        """What a method returns; None where that is not understood."""
        tree = readable(function) if function.__code__.co_argcount == 1 + len(given) else None
        if tree is None or any(value for name, value in ast.iter_fields(tree.args) if name != "args"):
            return None
        names = [argument.arg for argument in tree.args.args]
        scope = _Scope(function, names[0], dict(zip(names[1:], given)))
        for statement in self._taken(body_of(tree), scope):
            if isinstance(statement, ast.Return) and statement.value is not None:
                return self._value(statement.value, scope) if statement is tree.body[-1] else None
            statement = self._done(statement, scope)
            if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
                return None
            target, value = statement.targets[0], self._value(statement.value, scope)
            if not isinstance(target, ast.Name) or value is None:  # which may do anything, also where nobody uses it
                return None
            scope.values[target.id] = value
        return None

    def _taken(self, statements: List[ast.stmt], scope: _Scope) -> Iterator[ast.stmt]:
        """The statements that run where the attributes that a condition is are True."""
        for statement in statements:
            test = statement.test if isinstance(statement, ast.If) and not statement.orelse else None
            if isinstance(test, ast.Attribute) and is_name(test.value, scope.instance):
                self.true.append(test.attr)
                yield from self._taken(statement.body, scope)
            else:
                yield statement

    def _done(self, statement: ast.stmt, scope: _Scope) -> ast.stmt:
        """The statement that is as good as one: of a cast to the weight's dtype where that has 16 bits, the cast alone.

        Where it has not, what kernels take is of float32, as what would be cast is then.
        """
        cast = cast_of(statement)
        test = None if cast is None else cast.test
        if not (isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.In)):
            return statement
        among = {value_of(each, scope.function, None) for each in getattr(test.comparators[0], "elts", ())}
        is_own = all(isinstance(self._value(each, scope), _OwnDtype) for each in (test.left, cast.dtype))
        return cast.assignment if is_own and among == _OF_16_BITS else statement

    def _value(self, node: ast.expr, scope: _Scope) -> _Any:
        if isinstance(node, ast.Name) and node.id in scope.values:
            return scope.values[node.id]
        if isinstance(node, ast.BinOp):
            left, right = self._value(node.left, scope), self._value(node.right, scope)
            return self._combined(node.op, left, right)
        if isinstance(node, ast.Call):
            return self._called(node, scope)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == scope.instance:
                return _WEIGHT if node.attr == "weight" else node.attr
            if node.value.id in scope.values:
                value = scope.values[node.value.id]
                is_own = isinstance(value, _Value) and not value.wide and node.attr == "dtype"
                return _OwnDtype() if is_own else None
        if isinstance(node, ast.Attribute) and node.attr == "dtype" and self._value(node.value, scope) == _WEIGHT:
            return _OwnDtype()
        found = value_of(node, scope.function, None)
        return found if type(found) in (int, float, torch.dtype) else None

    def _combined(self, op: ast.operator, left: _Any, right: _Any) -> _Any:
        if isinstance(op, ast.Pow):
            return _power(left, right)
        if isinstance(op, ast.Mult) and _X in (left, right) and str in (type(left), type(right)):
            return _Scaled(right if left == _X else left)
        if isinstance(op, ast.Mult) and isinstance(left, _Value) and isinstance(right, _Value):
            return _Value(tuple(sorted((*left.factors, *right.factors))), left.wide or right.wide)
        if not isinstance(op, ast.Add):
            return None
        for one, other in ((left, right), (right, left)):
            if not isinstance(one, _Value):
                continue
            if one.factors == _MEAN and type(other) is str and self.eps in (None, other):
                self.eps = other
                return _Value(_WITH_EPS, one.wide)
            if one.factors == _WEIGHT.factors and type(other) in (int, float) and other == 1:
                return _Value(_ONE_MORE, one.wide)
        return None

    def _called(self, node: ast.Call, scope: _Scope) -> _Any:
        callee, named = node.func, {word.arg: self._constant(word.value, scope) for word in node.keywords}
        if not isinstance(callee, ast.Attribute):
            return None
        given = [self._value(argument, scope) for argument in node.args]
        if isinstance(callee.value, ast.Name) and callee.value.id == scope.instance:
            method = getattr(self._kind, callee.attr, None)
            use = (self._kind, callee.attr, method)
            if named or not isinstance(method, FunctionType) or hasattr(method, "__wrapped__") or use in self.used:
                return None
            self.used.append(use)
            return self.returned(method, given)
        function = value_of(callee, scope.function, None)
        if function is not None:
            self.used.append((torch, callee.attr, function))
            return _method(function, given[0], given[1:], named) if function in (_RSQRT, _POW) and given else None
        return _method(callee.attr, self._value(callee.value, scope), given, named)

    def _constant(self, node: ast.expr, scope: _Scope) -> Any:
        return node.value if isinstance(node, ast.Constant) else self._value(node, scope)


class _Scope(NamedTuple):
    """A method that is read, the name of the module in it, and what other names stand for."""

    function: FunctionType
    instance: str
    values: Dict[str, _Any]


def _method(name: Any, value: _Any, given: List[_Any], named: Dict[str, Any]) -> _Any:
    """What a method of a tensor gives, or a function of torch."""
    if not isinstance(value, _Value):
        return None
    if name == "mean":
        options = {**({"dim": given[0]} if len(given) == 1 else {}), **named}
        is_mean_square = value == _Value(("x", "x"), True) and len(given) <= 1
        return _Value(_MEAN, True) if is_mean_square and options == {"dim": -1, "keepdim": True} else None
    if named:
        return None
    if name in ("rsqrt", _RSQRT):
        return None if given else _power(value, -0.5)
    if name in ("pow", _POW):
        return _power(value, given[0]) if len(given) == 1 else None
    if name == "square":
        return None if given else _power(value, 2)
    if name == "float":
        return None if given else value._replace(wide=True)
    if name == "type_as":
        is_own = len(given) == 1 and isinstance(given[0], _Value) and not given[0].wide
        return value._replace(wide=False) if is_own else None
    if name == "to" and len(given) == 1 and (given[0] is torch.float32 or isinstance(given[0], _OwnDtype)):
        return value._replace(wide=given[0] is torch.float32)
    return None


def _power(value: _Any, exponent: _Any) -> Optional[_Value]:
    if not isinstance(value, _Value) or type(exponent) not in (int, float):
        return None
    if exponent == 2:
        return _Value(tuple(sorted(2 * value.factors)), value.wide)
    return _Value(("scale",), value.wide) if exponent == -0.5 and value.factors == _WITH_EPS else None
