"""Methods made anew with fused calls in the place of MLPs, everything else in them as it was written.

A rewritten method computes what its original computes, for any arguments and in any state of the module: a fused call
reads the parts that the original reads, and decides from what they are then how far to fuse.
"""

from __future__ import annotations

import ast
import copy
import functools
import itertools
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any, Callable, Dict, List, Optional, Set, Tuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parameter import is_lazy

from . import forwards, obstacles, sites, switching
from .recognition import activation_of, looks_like_activation, name_of, recognise
from .source import around, function_of, inside, tree_of, value_of, values_of

_SIGMOID, UNKNOWN = "sigmoid", "unknown activation"  # roles beside those of sites.py
_ACTIVATIONS = {sites.ACTIVATION, _SIGMOID, UNKNOWN}

_SITES = "_fused_mlp_sites"  # the attribute of a rewritten function that holds its sites
_made: Set[FunctionType] = set()  # functools.wraps copies attributes: they do not tell a rewritten function


@dataclass(frozen=True)
class FoundMLP:
    """An MLP of a module, or what there is of one: its parts as they are now, by the names they have there."""

    pattern: str
    projections: Dict[str, nn.Module]
    act: Callable
    between: Dict[str, Any]


def fused_methods(module: nn.Module) -> Tuple[Dict[str, FunctionType], List[Any]]:
    """The methods of a module with MLPs in them, fused; and the activations in MLPs that are not known."""
    if type(module).forward is nn.Sequential.forward:
        mlps = _mlps_in_sequence(module, sites.ACTIVATION)
        unknown = {name_of(mlp.act): mlp.act for mlp in _mlps_in_sequence(module, UNKNOWN)}
        return ({"forward": forwards.sequential} if mlps else {}), list(unknown.values())
    parts = {name: role_of(part) for name, part in {**vars(module), **module._modules}.items()}
    wanted = {name for name, role in parts.items() if role == sites.PROJECTION or role in _ACTIVATIONS}
    # Experts hold their weights themselves, stacked. What runs them one by one may stand in a decorator, which chooses
    # between it and other ways.
    experts = any(_is_stacked(parameter) for parameter in module._parameters.values())
    has_layers = experts or not {sites.PROJECTION, sites.LAYER}.isdisjoint(parts.values())
    made, unknown = {}, {}
    for name, decorated in _functions(type(module)).items() if wanted and has_layers else ():
        inner = inside(decorated) if experts else None
        function = decorated if inner is None else inner
        if experts or wanted.intersection(function.__code__.co_names):
            callees = {text: values_of(node, function, module) for text, node in _callees(function).items()}
            roles = {text: {role_of(value) for value in values.values()} for text, values in callees.items()}
            known = tuple((text, *alike) for text, alike in roles.items() if len(alike) == 1 and None not in alike)
            rewritten, left = _rewritten(function, name, decorated, known)
            if rewritten is not None and inner is not None:
                rewritten = _decorated_again(decorated, inner, rewritten)
            made.update({name: rewritten} if rewritten is not None else {})
            unknown.update({name_of(value): value for text in left for value in callees[text].values()})
    return made, list(unknown.values())


def is_fused(function: Any) -> bool:
    """Whether a function is one that :func:`fused_methods` makes."""
    return function is forwards.sequential or function in _made


def mlps_in(function: FunctionType, module: nn.Module) -> List[FoundMLP]:
    """What a fused method fuses of its module."""
    if function is forwards.sequential:
        return _mlps_in_sequence(module, sites.ACTIVATION)
    found, original = [], function.__wrapped__
    for site in getattr(function, _SITES):
        act, *_ = values_of(site.activation, original, module).values()
        between = {_name(node): _between(node, original, module) for node in site.between}
        projections = [list(values_of(node, original, module).items()) for node in site.projections]
        for turn in range(max(map(len, projections), default=1)):  # of a loop
            now = dict(parts[min(turn, len(parts) - 1)] for parts in projections)
            found.append(FoundMLP(site.pattern, now, act, between))
    return found


def role_of(part: Any) -> Optional[str]:
    """What a part of a module may be in a site."""
    if part is F.dropout:
        return sites.DROPOUT
    if isinstance(part, (nn.Dropout, nn.Identity)):
        return sites.PASSING
    if isinstance(part, nn.ModuleList):  # that of all its parts
        return role_of(part[0]) if len(part) and len({role_of(each) for each in part}) == 1 else None
    if not isinstance(part, (nn.Module, FunctionType, MethodType, type(torch.relu))):
        return None
    activation = recognise(part)
    if activation is not None:
        return _SIGMOID if part in (torch.sigmoid, F.sigmoid) else sites.ACTIVATION
    if looks_like_activation(part):
        return UNKNOWN
    if not isinstance(part, nn.Module):
        return None
    if hasattr(part, "in_features") or obstacles.of_projection(part) is None:
        return sites.PROJECTION
    return sites.LAYER if next(part.parameters(), None) is not None else None


def _is_stacked(parameter: Optional[nn.Parameter]) -> bool:
    return parameter is not None and not is_lazy(parameter) and parameter.dim() == 3


# Rewriting.


def _functions(kind: type) -> Dict[str, FunctionType]:
    """The methods that a class of modules adds to nn.Module, as they are now: some patch classes."""
    inherited = {}
    for base in reversed(kind.__mro__[: kind.__mro__.index(nn.Module)]):
        inherited.update(vars(base))
    return {name: value for name, value in inherited.items() if isinstance(value, FunctionType) and name[:2] != "__"}


@functools.cache
def _callees(function: FunctionType) -> Dict[str, ast.expr]:
    """What a function calls by name or attribute, by its source."""
    tree = tree_of(function)
    calls = [] if tree is None else [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return {ast.unparse(node): node for node in calls if isinstance(node, (ast.Name, ast.Attribute))}


@functools.cache
def _rewritten(
    function: FunctionType, name: str, method: FunctionType, roles: Tuple[Tuple[str, str], ...]
) -> Tuple[Optional[FunctionType], Tuple[str, ...]]:
    """The function with its MLPs fused, if it has any; and the activations in it that are not known.

    ``method`` is what the class has under ``name``: the function itself, or a decorator's around it. The outcome
    depends on nothing else but what its callees are, so that the layers of a model share it.
    """
    named = dict(roles)
    if _ACTIVATIONS.isdisjoint(named.values()):
        return None, ()
    tree = copy.deepcopy(tree_of(function))

    def role(node: ast.expr) -> Optional[str]:
        found = named.get(ast.unparse(node)) if isinstance(node, (ast.Name, ast.Attribute)) else None
        return sites.ACTIVATION if found in _ACTIVATIONS else found

    def is_known(site: sites.Site) -> bool:
        activation = named[ast.unparse(site.activation)]
        if activation == _SIGMOID:
            return site.pattern not in ("linear", "pointwise")  # attention and experts have such gates
        return activation == sites.ACTIVATION

    def is_unknown(site: sites.Site) -> bool:
        return site.pattern != "pointwise" and named[ast.unparse(site.activation)] == UNKNOWN

    found = sites.rewrite(tree, role, is_known, _call)
    left = sites.rewrite(copy.deepcopy(tree), role, is_unknown, lambda site: ast.Constant(None))
    made = function_of(tree, function, _CALLS, switching.instead_of(name, method, function)) if found else None
    if made is not None:
        setattr(made, _SITES, tuple(found))
        made.__name__ = name  # by which a bound method is pickled
        _made.add(made)
    return made, tuple(ast.unparse(site.activation) for site in left)


def _decorated_again(decorated: FunctionType, inner: FunctionType, rewritten: FunctionType) -> FunctionType:
    """The decorator's function around what was made of the function inside it."""
    made = around(decorated, inner, rewritten)
    setattr(made, _SITES, getattr(rewritten, _SITES))
    _made.add(made)
    return made


def _call(site: sites.Site) -> ast.expr:
    callee = ast.Name(_call_name(site.pattern), ast.Load())
    if site.pattern == "pointwise":  # in the order in which they are computed
        gate, up = ast.keyword("gate", site.inputs[0]), ast.keyword("up", site.inputs[1])
        return ast.Call(
            callee, [], [*((up, gate) if site.up_first else (gate, up)), ast.keyword("act", site.activation)]
        )
    return ast.Call(callee, [*site.inputs, *site.projections, site.activation, *site.between], [])


# What was found.


def _mlps_in_sequence(module: nn.Sequential, activation: str) -> List[FoundMLP]:
    """The MLPs among the parts of a sequence whose activation has that role."""
    found, parts = [], list(module._modules.items())
    for index in range(len(parts) - 1):
        (name, first), (_, act) = parts[index : index + 2]
        if role_of(first) != sites.PROJECTION or role_of(act) != activation:
            continue
        rest = parts[index + 2 :]
        passing = list(itertools.takewhile(lambda item: role_of(item[1]) == sites.PASSING, rest))
        roles = [role_of(part) for _, part in rest[len(passing) :]]
        if roles[:1] == [sites.PROJECTION] and roles[1:2] != [sites.ACTIVATION]:
            found.append(FoundMLP("plain", {name: first, **dict(rest[len(passing) :][:1])}, act, dict(passing)))
        else:
            found.append(FoundMLP("linear", {name: first}, act, {}))
    return found


def _between(node: ast.expr, function: FunctionType, module: nn.Module) -> Any:
    if not isinstance(node, ast.IfExp):
        return value_of(node, function, module)
    return value_of(node.body, function, module) if value_of(node.test, function, module) else 0.0


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.IfExp):
        return "dropout"
    return ast.unparse(node).partition(".")[2]


# What rewritten methods call, by pattern.


def _linear(x, projection, act):
    return forwards.linear(x, projection, activation_of(act), act)


def _plain(x, fc1, fc2, act, *between):
    return forwards.plain(x, fc1, fc2, activation_of(act), act, between)


def _gated(x, gate, up, down, act, *between):
    return forwards.gated(x, gate, up, down, activation_of(act), act, between)


def _gated_linear(x, gate, up, act):
    return forwards.gated_linear(x, gate, up, activation_of(act), act)


def _packed_gated(x, gate_up, down, act, *between):
    return forwards.packed_gated(x, gate_up, down, activation_of(act), act, between)


def _packed_gated_up_first(x, gate_up, down, act, *between):
    return forwards.packed_gated(x, gate_up, down, activation_of(act), act, between, up_first=True)


def _packed_gated_linear(x, gate_up, act):
    return forwards.packed_gated_linear(x, gate_up, activation_of(act), act)


def _packed_gated_linear_up_first(x, gate_up, act):
    return forwards.packed_gated_linear(x, gate_up, activation_of(act), act, up_first=True)


def _pointwise(gate, up, act):
    return forwards.pointwise(gate, up, activation_of(act), act)


def _call_name(pattern: str) -> str:
    return "fused_" + pattern.replace(",", "").replace(" ", "_")


_CALLS = {
    _call_name("linear"): _linear,
    _call_name("plain"): _plain,
    _call_name("gated"): _gated,
    _call_name("gated linear"): _gated_linear,
    _call_name("packed gated"): _packed_gated,
    _call_name("packed gated, up first"): _packed_gated_up_first,
    _call_name("packed gated linear"): _packed_gated_linear,
    _call_name("packed gated linear, up first"): _packed_gated_linear_up_first,
    _call_name("pointwise"): _pointwise,
}
