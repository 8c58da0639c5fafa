"""Modules that halve what they are given, and compute ``act(one half) * the other``: nn.GLU and classes like GEGLU."""

from __future__ import annotations

import ast
from types import FunctionType
from typing import NamedTuple, Optional

from torch import nn

from ...activations import Activation
from ..reading.effects import is_harmless, readable
from ..reading.names import Place, Value, assignment, body_of, is_name
from ..reading.source import remembered, value_of
from . import obstacles
from .forms import Form, glu
from .matches import gated
from .recognition import activation_of, name_of
from .roles import Role

_CALL = nn.Module.__call__


class _Read(NamedTuple):
    """What the forward of a class computes: what it calls for its activation, and whether up is the first half."""

    callee: ast.expr
    up_first: bool


def order_of(kind: type) -> Optional[bool]:
    """Whether up is the first half, of a class of such modules; None if it is none."""
    read = _read(_forward_of(kind))
    return True if kind is nn.GLU else None if read is None else read.up_first


def form(module: nn.Module, up_first: bool) -> Form:
    """Such a module as an activation of what it halves; it has a row if it is one of this order now."""
    if type(module) is nn.GLU and up_first:
        return glu(module)
    return Form(name_of(module), module, _row_of(module, up_first), halves=True)


def _row_of(module: nn.Module, up_first: bool) -> Optional[Activation]:
    kind = type(module)
    forward = _forward_of(kind)
    read = _read(forward)
    if read is None or read.up_first != up_first or kind.__call__ is not _CALL or obstacles.of_call(module) is not None:
        return None
    act = value_of(read.callee, forward, module)
    return None if act is None else activation_of(act)


def _forward_of(kind: type) -> Optional[FunctionType]:
    """The forward of a class."""
    forward = getattr(kind, "forward", None)
    return forward if isinstance(forward, FunctionType) and not hasattr(forward, "__wrapped__") else None


@remembered
def _read(forward: Optional[FunctionType]) -> Optional[_Read]:
    tree = None if forward is None else readable(forward)
    given = None if tree is None else tree.args
    if given is None or len(given.args) != 2 or given.defaults or given.vararg or given.kwonlyargs or given.kwarg:
        return None
    name = given.args[1].arg
    *before, last = body_of(tree) or [None]
    if not isinstance(last, ast.Return) or last.value is None or not all(map(_is_halving, before)):
        return None
    value = Value(last.value, Place(tree, tree.body, len(tree.body) - 1))
    for act, _, gate, other in gated(value, lambda callee: Role.ACTIVATION):
        up = value.part(other)
        halves_one = is_name(gate.node, name) and gate.node is up.node and {gate.half, up.half} == {0, 1}
        if halves_one and act.is_callee:
            return _Read(act.callee, gate.half == 1)
    return None


def _is_halving(statement: ast.stmt) -> bool:
    target, value = assignment(statement)
    return target is not None and is_harmless(value, lambda callee: getattr(callee, "attr", None) == "chunk")
