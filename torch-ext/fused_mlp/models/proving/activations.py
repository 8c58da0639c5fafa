"""Proof, from the form of its result, that a function computes an activation of the table."""

from __future__ import annotations

import functools
from types import MethodType
from typing import Any, Dict, NamedTuple, Optional, Tuple

import torch
from torch import nn

from ...activations import ACTIVATIONS, Activation
from . import algebra
from .algebra import Form, Sum
from .evaluation import Evaluation, inputs
from .values import Dependency, Held, Method, Node, NotProved, Proof, Proofs, Value, class_of, looked_up, proved

_X, _Y = inputs("x", "y")


class Read(NamedTuple):
    """The elementwise function that a callable computes. ``row`` is its row of the table, None if there is none."""

    row: Optional[Activation]
    is_closed: bool  # the result does not depend on the instance
    dependencies: Tuple[Dependency, ...]


def read(callee: Any) -> Optional[Read]:
    """Return the elementwise function that a function of one tensor, or the forward of a module, computes.

    None if it is linear or not proved to be elementwise.
    """
    root = callee if isinstance(callee, nn.Module) else None
    key = callee if root is None else looked_up(class_of(root), "forward")
    return _proofs.get(key, root, lambda: _proved(root, callee if root is None else Held((), root))).found


def read_product(callee: Any) -> Optional[Read]:
    """Return the activation ``act`` if a function of two tensors computes ``act(gate) * up``; None otherwise."""
    return _products.get(callee, None, lambda: _proved_product(callee)).found


def read_halves(module: nn.Module) -> Optional[Tuple[Read, bool]]:
    """Return the activation ``act`` if a module's class computes ``act(gate) * up`` of the halves of its input's last
    dimension, whatever its instance, and whether up is the first half; None otherwise."""
    key = looked_up(class_of(module), "forward")
    found = _halved.get(key, module, lambda: _proved_of_halves(module)).found
    return found if found is not None and found[0].is_closed else None


_proofs, _products, _halved = Proofs(), Proofs(), Proofs()


def _proved(root: Optional[nn.Module], callee: Value) -> Proof:
    evaluation = Evaluation(root, leaf=_part)
    return proved(evaluation, callee, (_X,), lambda value: _read(evaluation, value))


def _proved_product(callee: Any) -> Proof:
    evaluation, names = Evaluation(), {_X: algebra.atom("x"), _Y: algebra.atom("y")}
    is_of_autograd = type(callee) is MethodType and callee.__func__ is torch.autograd.Function.apply.__func__
    given = Method("apply", Node("autograd", (callee.__self__,))) if is_of_autograd else callee

    def found_in(value: Value) -> Optional[Read]:
        row = _product_row_of(value, names)
        return None if row is None else Read(row, True, evaluation.dependencies)

    return proved(evaluation, given, (_X, _Y), found_in)


# Conditions on an odd number of features, which no op supports; the module itself runs then.
_ODD = Node("mod", (Node("size", (_X, -1)), 2))
_IF_EVEN = {_ODD: False, Node("ne", (_ODD, 0)): False, Node("eq", (_ODD, 0)): True}


def _proved_of_halves(module: nn.Module) -> Proof:
    evaluation = Evaluation(module, decide=_IF_EVEN.get)
    halves = [Node("item of", (Node("chunk", (_X, 2, -1)), each)) for each in (0, 1)]

    def found_in(value: Value) -> Optional[Tuple[Read, bool]]:
        for gate in (0, 1):
            row = _product_row_of(value, {halves[gate]: algebra.atom("x"), halves[1 - gate]: algebra.atom("y")})
            if row is not None:
                return Read(row, _is_closed(evaluation), evaluation.dependencies), gate == 1
        return None

    return proved(evaluation, Held((), module), (_X,), found_in)


def _product_row_of(value: Value, names: Dict[Node, Sum]) -> Optional[Activation]:
    """Return the row of ``act`` in ``act(x) * y``, whose operands have the forms x and y in ``names``."""
    if not isinstance(value, Node) or algebra.dtype_of(value, names.__contains__) != algebra.OWN:
        return None
    return _product_rows().get(algebra.compared(Form(lambda node, form: names.get(node))(value)))


@functools.cache
def _product_rows() -> Dict[Sum, Activation]:
    """Return the rows by the forms of their products with an atom named y."""
    x, y = algebra.atom("x"), algebra.atom("y")
    rows = (row for row in ACTIVATIONS if row.name != "linear")
    return {algebra.compared(algebra.times(form_of(row, x), y)): row for row in rows}


def _read(evaluation: Evaluation, value: Value) -> Optional[Read]:
    if not _is_elementwise(value) or _is_linear(value):
        return None
    return Read(row_of(value), _is_closed(evaluation), evaluation.dependencies)


def _is_closed(evaluation: Evaluation) -> bool:
    own = [each for each in evaluation.dependencies if type(each.owner) is tuple]
    return all(each.owner == () and each.part in ("class", "call") for each in own)


def _part(part: Held, given: Tuple[Value, ...]) -> Optional[Value]:
    """Treat a part of a module that computes an activation as opaque: the caller knows the parts."""
    return Node("elementwise", (type(part.value), *given)) if part.path and len(given) == 1 else None


def row_of(value: Node, x: Node = _X) -> Optional[Activation]:
    """Return the row of the table that an expression of ``x`` computes, in the dtype of x; None if there is none."""
    try:
        if algebra.dtype_of(value, x.__eq__) != algebra.OWN:
            return None
        form = Form(lambda node, form: algebra.atom("x") if node == x else None)
        return rows().get(algebra.compared(form(value)))
    except NotProved:
        return None


@functools.cache
def rows() -> Dict[Sum, Activation]:
    """Return the rows of the table by their forms, as functions of an atom named x."""
    return {algebra.compared(form_of(row, algebra.atom("x"))): row for row in ACTIVATIONS}


def form_of(row: Activation, x: Sum) -> Sum:
    """Return the form of a row of the table, applied to a given x."""
    return Form(lambda node, form: x if node == _X else None)(_returned(row))


@functools.cache
def _returned(row: Activation) -> Value:
    return Evaluation().returned(row.function, (_X,))


def _is_elementwise(value: Value) -> bool:
    if not isinstance(value, Node):
        return type(value) in (int, float, str, bool, type(None), torch.dtype) or isinstance(value, type)
    if value == _X or value.op == "parameter":
        return True
    if value.op == "dtype":
        return _is_elementwise(value.args[0])
    return value.op in algebra.ELEMENTWISE and all(map(_is_elementwise, value.args))


_LINEAR = {"add", "sub", "mul", "div", "neg", "to", "clone", "contiguous", "input", "parameter"}


def _is_linear(value: Value) -> bool:
    return not isinstance(value, Node) or (value.op in _LINEAR and all(map(_is_linear, value.args)))
