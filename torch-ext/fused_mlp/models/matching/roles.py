"""The roles of callees in code that contains an MLP, and the recognition of calls by role."""

from __future__ import annotations

import ast
from typing import Callable, Optional

from ..reading.effects import is_harmless


class Role:
    """The roles of callees.

    - PROJECTION: a linear layer; LAYER: another module with parameters; SEQUENCE: a list of modules that includes MLPs
    - FIRST: a module that computes the hidden values of an MLP; SECOND: one that begins with the last projection of an
      MLP; WHOLE: one that is exactly one MLP; NORM, SCALE: see ``norms``
    - ACTIVATION: a row of the table; SIGMOID: a row that gates other things too; BOUND: a row that is a method;
      UNKNOWN: an activation without a row; PRODUCT: a function of two tensors that is ``act(gate) * up``
    - PASSING: a module that returns its input in evaluation; DROPOUT: F.dropout
    - ASKING: isinstance; FLAG: a function that returns a global; OTHER: known to be none of these
    """

    PROJECTION, PASSING, DROPOUT, LAYER = "projection", "passing", "dropout", "layer"
    FIRST, SECOND, WHOLE, NORM, SCALE = "first module", "second module", "whole", "norm", "scale"
    LAYERS = (LAYER, FIRST, SECOND, WHOLE, NORM, SCALE)
    SEQUENCE = "sequence"
    ACTIVATION, SIGMOID, BOUND = "activation", "sigmoid", "bound activation"
    UNKNOWN, PRODUCT = "unknown activation", "product"
    ASKING, FLAG, OTHER = "asking", "flag", "other"
    ACTIVATIONS = frozenset((ACTIVATION, SIGMOID, BOUND, UNKNOWN))


RoleOf = Callable[[ast.expr], Optional[str]]  # the role of a callee

# Methods of tensors without side effects.
_HARMLESS_METHODS = {"chunk", "clamp", "float", "reshape", "to", "type_as", "unsqueeze", "view"}


def is_call(node: ast.expr, role: RoleOf, *wanted: str) -> bool:
    """True if a node is a call with exactly one argument of a callee with one of these roles."""
    if not isinstance(node, ast.Call) or len(node.args) != 1 or node.keywords or role(node.func) not in wanted:
        return False
    return not isinstance(node.args[0], ast.Starred)


def passed_through(node: ast.expr, role: RoleOf) -> Optional[ast.expr]:
    """Return a module that passes the hidden values on, or the probability of a functional dropout; None otherwise."""
    if is_call(node, role, Role.PASSING):
        return node.func
    if not (isinstance(node, ast.Call) and node.args and role(node.func) == Role.DROPOUT):
        return None
    given = [*zip(("input", "p", "training"), node.args), *((word.arg, word.value) for word in node.keywords)]
    named = dict(given)
    if len(given) != 3 or named.keys() != {"input", "p", "training"}:
        return None
    if not all(is_harmless(named[name], harmless_calls(role)) for name in ("p", "training")):
        return None
    return ast.IfExp(named["training"], named["p"], ast.Constant(0.0))


def asking(role: RoleOf) -> Callable[[ast.expr], bool]:
    """Return a predicate on callees that is true for isinstance."""
    return lambda callee: role(callee) == Role.ASKING


def harmless_calls(role: RoleOf, also: Optional[str] = None) -> Callable[[ast.expr], bool]:
    """Return a predicate on callees that is true for methods of tensors, and for callees with the role ``also``."""

    def tells(callee: ast.expr) -> bool:
        found = role(callee)
        of_tensor = found is None and isinstance(callee, ast.Attribute) and callee.attr in _HARMLESS_METHODS
        return of_tensor or (also is not None and found == also)

    return tells
