"""Detection of MLPs by the data flow between the parts of a module, however the code is written."""

from __future__ import annotations

import ast
import inspect
from types import FunctionType
from typing import Dict, Iterator, Optional, Set

import torch.nn.functional as F
from torch import nn

from ..matching.roles import Role
from ..reading.attributes import children_of, state_of
from ..reading.source import tree_of, values_of
from . import rewriter

_ACTIVATIONS = {
    Role.ACTIVATION,
    Role.BOUND,
    Role.UNKNOWN,
    Role.PRODUCT,
}  # without Role.SIGMOID: a sigmoid is more often a gate of something else


def has_parts_of_mlp(module: nn.Module) -> bool:
    """True if a module has two projections, and an activation or a forward that names one of torch's functions."""
    roles = {rewriter.role_of(part) for part in state_of(module).values()}
    forward = inspect.getattr_static(type(module), "forward")
    names = forward.__code__.co_names if isinstance(forward, FunctionType) else ()  # readable even without source
    roles.update(rewriter.role_of(vars(F).get(name)) for name in names)
    roles.update(map(rewriter.role_of, children_of(module).values()))
    return has_two_projections(module) and not _ACTIVATIONS.isdisjoint(roles)


def has_two_projections(module: nn.Module) -> bool:
    """True if a module has at least two projections; poolers, time-step embeddings and modulations have only one."""
    parts = list(children_of(module).values())
    parts += [part for each in parts if type(each) is nn.ModuleList for part in children_of(each).values()]
    return sum(rewriter.role_of(part) == Role.PROJECTION for part in parts) > 1


def applies_activation_to_projection(module: nn.Module) -> bool:
    """True if a method of a module passes the result of a projection to an activation."""
    functions = map(inspect.unwrap, _methods(type(module)))  # a decorator calls the function that it wraps
    return any(_Flow(function, module).reaches_activation() for function in functions)


def _methods(kind: type) -> Iterator[FunctionType]:
    """Yield the methods of a class of modules, and the inherited ones that they call by the same name."""
    bases = kind.__mro__[: kind.__mro__.index(nn.Module)]
    for name in {name for base in bases for name in vars(base)}:
        for function in filter(None, (vars(base).get(name) for base in bases)):
            if not isinstance(function, FunctionType):
                break
            yield function
            if name not in function.__code__.co_names:  # no call of super().name
                break


class _Flow:
    """Data flow from projections through the names of a function, whatever the order of its statements."""

    def __init__(self, function: FunctionType, module: nn.Module) -> None:
        self._function, self._module, self._tree = function, module, tree_of(function)
        self._hidden: Set[str] = set()  # names that hold a projection's output, or a value computed from it
        self._aliases: Dict[str, ast.expr] = {}  # names bound to a function or a module

    def reaches_activation(self) -> bool:
        if self._tree is None:
            return False
        nodes = list(ast.walk(self._tree))
        kinds = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr)
        for node in nodes:
            if isinstance(node, ast.Assign) and isinstance(node.value, (ast.Name, ast.Attribute)):
                self._aliases.update({name.id: node.value for name in node.targets if isinstance(name, ast.Name)})
        bindings = [node for node in nodes if isinstance(node, kinds) and node.value is not None]
        before = -1
        while len(self._hidden) > before:  # a loop may bind a name after it is read
            before = len(self._hidden)
            for node in bindings:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
                self._hidden |= names if self._holds(node.value) else set()
        calls = (node for node in nodes if isinstance(node, ast.Call) and self._role(node.func) in _ACTIVATIONS)
        return any(self._holds(argument) for call in calls for argument in call.args)

    def _holds(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Name):
            return node.id in self._hidden
        if isinstance(node, ast.Call):
            role = self._role(node.func)
            if role in (Role.PROJECTION, *Role.LAYERS):  # the output of another layer is no longer hidden
                return role == Role.PROJECTION
        return any(map(self._holds, ast.iter_child_nodes(node)))

    def _role(self, node: ast.expr) -> Optional[str]:
        node = self._aliases.get(node.id, node) if isinstance(node, ast.Name) else node
        if not isinstance(node, (ast.Name, ast.Attribute)):
            return None
        roles = {rewriter.role_of(value) for value in values_of(node, self._function, self._module).values()}
        return roles.pop() if len(roles) == 1 else None
