"""Rewrites methods: fused calls replace the MLPs, and all other code stays as written.

A rewritten method computes what its original computes, for any arguments and in any state of the module: a fused call
reads the parts that the original reads, and chooses from their current state how much to fuse.
"""

from __future__ import annotations

import ast
import copy
import functools
import itertools
from dataclasses import replace
from types import CellType, FunctionType, MethodType
from typing import Any, Callable, Dict, List, Optional, Set, Tuple, Union

import torch
import torch.nn.functional as F
from torch import nn

from ...autograd.training import KEPT
from ..experts import blocks
from ..experts.interface import original_of
from ..matching.matches import Act, AnyMatch, Block, Match, SplitMLP, Turns, Whole
from ..matching.roles import Role, RoleOf
from ..matching.search import ending_of, start_of
from ..methods import functions, traced
from ..methods.functions import Instead, function_of
from ..parts import adapters, norms
from ..parts.guards import Guards
from ..parts.recognition import altered_halves, halves_of_class, known_halves, looks_like_activation, name_of, recognise
from ..proving import activations
from ..reading import effects
from ..reading.attributes import (
    as_written,
    children_of,
    finder_of,
    forward_of,
    is_module,
    method_in,
    own_method,
    parameters_of,
    place_of,
    state_of,
    written,
)
from ..reading.names import body_of
from ..reading.source import inside, read_of, remembered, tree_of, values_of
from ..running import forwards, sequences, shortcut, split_mlps
from . import branches, chunks, substitution
from .found import FoundMLP, act_of, around_of, mlp_behind, mlps_of
from .fused_calls import NAMES, call_of, made_call
from .split_mlps import first_of, names_of, whole_of

_MATCHES = "_fused_mlp_matches"  # the attribute of a rewritten function that holds its matches
_BRANCHES = "_fused_mlp_branches"  # the attribute with a tuple of conditions per match and branch
_SOURCE = "_fused_mlp_source"  # the attribute with the function that was read, if decorators surround it
_MEMORY = "_fused_mlp_memory"  # the attribute with the values that training keeps
TRACED = CellType(traced)
_made: Set[FunctionType] = set()  # attributes cannot mark a rewritten function: functools.wraps copies them


def fused_methods(module: nn.Module, memory: str = "activations") -> Tuple[Dict[str, FunctionType], List[Any]]:
    """Return the methods of a module that contain MLPs, fused, and the unknown activations inside MLPs."""
    methods = _functions(type(module))
    if methods.get("forward") is nn.Sequential.forward:
        if _mlps_in_turn(children_of(module)):
            return {"forward": sequences.SEQUENTIAL[memory]}, []
        return {}, _unknown_in_sequence(module)
    state = state_of(module)
    parts = {name: role_of(part) for name, part in {**state["_modules"], **state}.items()}
    wanted = {name for name, role in parts.items() if role in _WANTED}
    has_layers = not {Role.PROJECTION, Role.SEQUENCE, *Role.LAYERS}.isdisjoint(parts.values())
    # Experts hold their weights themselves, stacked. They are fused as a whole (``mixtures``) or not at all: run one by
    # one, each has so few rows that launching a kernel between its products takes longer than the kernel saves.
    stacked = any(map(_is_stacked, state["_parameters"].values())) and original_of(methods.get("forward")) is None
    # A method in the module's own dict overrides its class's. If it has no MLP, the class's method supplies the reason.
    own = {name: method_in(module, place_of(module, name)) for name in methods}
    own = {name: function for name, function in own.items() if function is not None and function not in written}
    made, unknown = {}, {}
    for name, function in (*own.items(), *methods.items()) if wanted and (has_layers or stacked) else ():
        outer, function = undecorated(function)
        if name in made or (not has_layers and _has_loop(function)):
            continue
        if stacked or wanted.intersection(function.__code__.co_names):
            rewritten, left = _rewritten(
                function, name, roles_in(function, module), memory, answers_in(function, module), outer
            )
            made.update({name: rewritten} if rewritten is not None else {})
            unknown.update({name_of(act): act for act in (act_of(act, function, module) for act in left)})
    fused = tuple(made.items())
    for name in [name for name in methods if made and name not in made]:
        whole = _unchunked(methods[name], name, fused, memory)
        if whole is not None and own_method(module, name) in (None, methods[name]):
            made[name] = whole
    return made, list(unknown.values())


def lean_methods(module: nn.Module, methods: Dict[str, FunctionType]) -> Dict[str, FunctionType]:
    """Return the fused methods of a module with the original code for the MLPs that have wrapped projections.

    ``methods`` are the methods with all MLPs fused; the lean ones carry the same matches for reports.
    """
    made = {}
    for name, method in methods.items():
        mlps = mlps_in(method, module) if method in _made else []
        if not any(adapters.is_wrapped(part) for mlp in mlps for part in mlp.projections.values()):
            made[name] = method
            continue
        outer, original = undecorated(written[method].function)
        roles = roles_in(original, module, _role_unwrapped)
        lean, _ = _rewritten(original, name, roles, memory_of(method), answers_in(original, module), outer)
        if lean is not None:
            for attribute in (_MATCHES, _BRANCHES):
                setattr(lean, attribute, getattr(method, attribute))
            made[name] = lean
    return made


def _role_unwrapped(part: Any) -> Optional[str]:
    role = role_of(part)
    return Role.LAYER if role == Role.PROJECTION and adapters.is_wrapped(part) else role


def is_fused(function: Any) -> bool:
    """True if a function was made by :func:`fused_methods`."""
    return function in sequences.SEQUENTIAL.values() or function in _made


def memory_of(function: FunctionType) -> str:
    """Return the ``memory`` setting of a fused method: the values that training keeps."""
    is_sequential = function is sequences.SEQUENTIAL["recompute"]
    return "recompute" if is_sequential else getattr(function, _MEMORY, "activations")


def source_of(function: FunctionType) -> FunctionType:
    """Return the function whose source was rewritten to a fused one."""
    return getattr(function, _SOURCE, None) or written[function].function


def undecorated(function: FunctionType) -> Tuple[Tuple[FunctionType, ...], FunctionType]:
    """Return the functions of decorators around a method, and the function inside all of them."""
    outer = effects.around(function)
    return outer, inside(outer[-1]) if outer else function


def mlps_in(function: FunctionType, module: nn.Module) -> List[FoundMLP]:
    """Return the MLPs of a module that a fused method fuses."""
    if function in sequences.SEQUENTIAL.values():
        return _mlps_in_turn(children_of(module))
    original, found = source_of(function), []
    for match, branch in zip(getattr(function, _MATCHES), getattr(function, _BRANCHES)):
        unmet = [branches.unmet(conditions, original, module) for conditions in branch]
        aside = None if None in unmet else unmet[0]
        found += [replace(mlp, aside=aside) for mlp in _mlps_of(match, original, module)]
    return found


def _mlps_of(match: AnyMatch, function: FunctionType, module: nn.Module) -> List[FoundMLP]:
    if not isinstance(match, Turns):
        return mlps_of(match, function, module)
    ((path, parts),) = values_of(match.modules, function, module).items()
    parts = children_of(parts).values() if type(parts) is nn.ModuleList else ()
    return _mlps_in_turn({f"{path}.{k}": part for k, part in enumerate(parts)})


def modules_in(segment: str, function: FunctionType, module: nn.Module) -> List[Any]:
    """Return the "first" or the "second" modules of the split MLPs in a fused method of a module."""
    nodes = [getattr(match, segment) for match in getattr(function, _MATCHES, ()) if isinstance(match, SplitMLP)]
    return [part for node in nodes for part in values_of(node, source_of(function), module).values()]


def mlps_around(function: FunctionType, module: nn.Module) -> List[Tuple[Any, str]]:
    """Return the MLP modules whose blocks a fused method of another module contains, with what each block adds."""
    blocks = [match for match in getattr(function, _MATCHES, ()) if isinstance(match, Block)]
    return [
        (part, around_of(True, block.is_normed))
        for block in blocks
        if isinstance(block.match, Whole)
        for part in values_of(block.match.module, source_of(function), module).values()
    ]


def role_of(part: Any) -> Optional[str]:
    """Return the role that a part of a module may have in a match."""
    if part is None:
        return None
    if issubclass(type(part), nn.ModuleList):
        return _role_of_list(part)
    if is_module(part):
        return _role_of_module(part)
    if type(part) not in (FunctionType, MethodType, type(torch.relu)):
        return Role.OTHER
    role = _ROLES.get(part)
    if role is None:
        activation = recognise(part)
        if activation is not None:
            return Role.BOUND if isinstance(part, MethodType) else _BY_ROW.get(activation.name, Role.ACTIVATION)
        if activations.read_product(part) is not None:
            return Role.PRODUCT
        role = Role.UNKNOWN if looks_like_activation(part) else Role.FLAG if _is_flag(part) else Role.OTHER
    return role


def _role_of_list(modules: nn.ModuleList) -> Optional[str]:
    """Return the common role of the modules in a list, or the role of the list as a sequence."""
    parts = children_of(modules)
    roles = set(map(role_of, parts.values()))
    if len(roles) == 1:
        return roles.pop()
    return Role.SEQUENCE if _mlps_in_turn(parts) else Role.OTHER


def _is_flag(part: Any) -> bool:
    """True if a function takes no arguments and returns a global."""
    if not isinstance(part, FunctionType) or part.__code__.co_freevars or part.__code__.co_varnames:
        return False
    tree = tree_of(part)
    body = [] if tree is None else body_of(tree)
    return len(body) == 1 and isinstance(body[0], ast.Return) and isinstance(body[0].value, ast.Name)


def _role_of_module(part: nn.Module) -> str:
    if finder_of(type(part)) is not None:  # its class's code sets the role, whatever parts it has
        return Role.PROJECTION if "in_features" in state_of(part) else Role.LAYER
    if issubclass(type(part), (nn.Dropout, nn.Identity)):
        return Role.PASSING
    if type(part) is nn.GLU:
        return Role.OTHER
    code = norms.code_of(part)
    if code is not None and code != norms.SCALE:
        return Role.NORM
    activation = recognise(part)
    if activation is not None:
        return Role.ACTIVATION
    if looks_like_activation(part):
        return Role.UNKNOWN
    if "in_features" in state_of(part) or hasattr(type(part), "in_features") or adapters.of_projection(part) is None:
        return Role.PROJECTION
    if code is not None:
        return Role.SCALE
    return _role_of_layer(part) if next(parameters_of(part), None) is not None else Role.OTHER


def _role_of_layer(part: nn.Module) -> str:
    """Return the role of a layer, which may be one module of a split MLP: by its forward, if it has a projection."""
    forward = forward_of(part)  # not a function if TorchScript compiled it
    if not isinstance(forward, FunctionType):
        return Role.LAYER
    if blocks.is_whole(part):
        return Role.WHOLE
    children = children_of(part).values()
    in_turn = any(type(child) is nn.ModuleList and _is_whole(children_of(child)) for child in children)
    if not in_turn and all(adapters.of_projection(child) is not None for child in children):
        return Role.LAYER
    if any(role_of(child) == Role.PROJECTION and adapters.is_wrapped(child) for child in children):
        return Role.LAYER
    if forward is nn.Sequential.forward:
        return Role.LAYER if sequences.whole(part) is None else Role.WHOLE
    return segment_role(forward, roles_in(forward, part), answers_in(forward, part))


_WANTED = {Role.PROJECTION, Role.FIRST, Role.WHOLE, Role.SEQUENCE, *Role.ACTIVATIONS}
_BY_ROW = {"sigmoid": Role.SIGMOID}
_ROLES = {F.dropout: Role.DROPOUT, F.glu: Role.OTHER, isinstance: Role.ASKING}


def _is_stacked(parameter: Optional[nn.Parameter]) -> bool:
    return type(parameter) is nn.Parameter and parameter.dim() == 3


# Rewriting.


def _functions(kind: type) -> Dict[str, FunctionType]:
    """Return the methods that a class of modules currently adds to nn.Module; some code patches classes."""
    inherited = {}
    for base in reversed(kind.__mro__[: kind.__mro__.index(nn.Module)]):
        inherited.update(vars(base))
    return {name: value for name, value in inherited.items() if isinstance(value, FunctionType) and name[:2] != "__"}


@remembered
def callees(function: FunctionType) -> Dict[str, ast.expr]:
    """Return the names and attributes that a function's source calls or iterates over, by their text."""
    tree = effects.readable(function)
    nodes = [] if tree is None else list(ast.walk(tree))
    calls = [node.func for node in nodes if isinstance(node, ast.Call)]
    calls += [node.iter for node in nodes if isinstance(node, ast.For)]
    return {ast.unparse(node): node for node in calls if isinstance(node, (ast.Name, ast.Attribute))}


def roles_in(
    function: FunctionType, module: nn.Module, role_of: Callable[[Any], Optional[str]] = role_of
) -> Tuple[Tuple[str, str], ...]:
    """Return the roles that the callees of a method may have in a match, by their text."""
    return _roles({text: values_of(node, function, module) for text, node in callees(function).items()}, role_of)


def answers_in(function: FunctionType, module: nn.Module) -> branches.Answers:
    """Return the values of the conditions in a method that its module decides."""
    return branches.answers_of(_conditions_in(function, roles_in(function, module)), function, module)


@remembered
def _conditions_in(function: FunctionType, roles: Tuple[Tuple[str, str], ...]) -> Tuple[ast.expr, ...]:
    tree = effects.readable(function)
    return () if tree is None else branches.conditions_in(tree, role_by_text(roles))


def _roles(callees: Dict[str, Dict[str, Any]], role_of: Callable[[Any], Optional[str]]) -> Tuple[Tuple[str, str], ...]:
    """Return the roles of callees in a match, for callees whose values all have the same role."""
    roles = {text: {role_of(value) for value in values.values()} for text, values in callees.items()}
    return tuple((text, *alike) for text, alike in roles.items() if len(alike) == 1 and None not in alike)


def _asks_first(match: AnyMatch) -> bool:
    """True if compiled code first checks whether a match is worth fusing, and its parts belong to other modules."""
    return isinstance(match, SplitMLP) or (isinstance(match, Block) and isinstance(match.match, Whole))


@remembered
def _has_loop(function: FunctionType) -> bool:
    tree = effects.readable(function)
    return tree is not None and any(isinstance(node, (ast.For, ast.While)) for node in ast.walk(tree))


@remembered
def _rewritten(
    function: FunctionType,
    name: str,
    roles: Tuple[Tuple[str, str], ...],
    memory: str,
    answers: branches.Answers = (),
    outer: Tuple[FunctionType, ...] = (),
) -> Tuple[Optional[FunctionType], Tuple[Act, ...]]:
    """Return the function with its MLPs fused, None if it has none, and the unknown activations in it.

    ``outer`` are the functions of decorators around it, which are repeated around the result.

    The outcome depends only on the roles of its callees and the answers to its conditions, so the layers of a model
    share it.
    """
    if _WANTED.isdisjoint(kind for _, kind in roles):
        return None, ()
    role = role_by_text(roles)

    def is_known(match: AnyMatch) -> bool:
        match = match.match if isinstance(match, Block) else match
        if not isinstance(match, Match):
            return True
        if match.act.role == Role.SIGMOID:
            return match.pattern.whole or (match.pattern.gated and not match.pattern.pointwise)  # others gate attention
        return match.act.role != Role.UNKNOWN

    def is_unknown(match: AnyMatch) -> bool:
        return isinstance(match, Match) and match.act.role == Role.UNKNOWN and not match.pattern.pointwise

    calls: List[Tuple[AnyMatch, ast.expr]] = []
    planned: Dict[str, Any] = {}

    def replacement(match: AnyMatch) -> ast.expr:
        calls.append((match, call_of(memory, function, match, planned)))
        return calls[-1][1]

    source = effects.readable(function)
    tree = copy.deepcopy(source)
    found = substitution.rewrite(tree, role, is_known, replacement)
    other = branches.parted(source, role, answers) if answers else None
    if other is not None:
        other_tree = copy.deepcopy(other)
        there = substitution.rewrite(other_tree, role, is_known, replacement)
        if _worth(there) > _worth(found):
            source, tree, found = other, other_tree, _once(there)
    found += substitution.rewrite_loops(tree, role, replacement)
    left = substitution.rewrite(copy.deepcopy(tree), role, is_unknown, lambda match: ast.Constant(None))
    made = None
    if found:
        source = copy.deepcopy(source)
        substitution.rewrite(source, role, is_known, replacement, otherwise=True)
        substitution.rewrite_loops(source, role, replacement)
        computed = [match.match if isinstance(match, Block) else match for match, _ in calls]
        patterns = [match.pattern for match in computed if isinstance(match, Match)]
        names = {**NAMES, **planned}
        is_forward = name == "forward" and not outer
        first = first_of(tree, function, found, names, role) if is_forward else None
        whole = None if outer else whole_of(tree, function, found, role)
        # A block's MLP may be a separate module of any kind, and so may the modules that run in sequence.
        gated: Union[bool, str] = any(pattern.gated for pattern in patterns)
        gated = gated or any(isinstance(match, (Block, Turns)) for match in found)
        if any(isinstance(match, Block) for match in found):
            firsts = (part for plan in planned.values() for part in getattr(plan, "projections", ())[:1])
            gated = next((part for part in firsts if type(part) is str), gated)
        runs_as_written = shortcut.plain.runs_as_written if shortcut.plain is not None and memory == KEPT else None
        if all(map(_asks_first, found)):
            runs_as_written = None
        instead = Instead(as_written(name, function), TRACED, memory, runs_as_written, gated)
        conditions = [
            tuple(branches.conditions_of(tree, node, role) for node in _calls_of(match, calls, tree)) for match in found
        ]
        made = method_of(source, function, names, instead, tuple(found), memory, tuple(conditions), tree, outer)
        if first is not None:
            split_mlps.firsts[function] = split_mlps.firsts[made] = first
        if whole is not None:
            split_mlps.wholes[made] = whole
    return made, tuple(match.act for match in left)


def method_of(
    tree: ast.FunctionDef,
    function: FunctionType,
    names: Dict[str, Any],
    instead: Instead,
    matches: Tuple[AnyMatch, ...],
    memory: str,
    conditions: Tuple[Tuple[branches.Condition, ...], ...] = (),
    fused: Optional[ast.FunctionDef] = None,
    outer: Tuple[FunctionType, ...] = (),
) -> FunctionType:
    """Return the fused method of a rewritten definition, registered as fused. See :func:`function_of` for ``fused``.

    ``outer`` are the functions of decorators around the method, from the outside.
    """
    made = function_of(tree, function, names, instead._replace(is_inner=bool(outer)), fused)
    for place in reversed(range(len(outer))):
        method = as_written(instead.method.name, outer[0])
        checked = instead._replace(method=method, runs_as_written=None) if place == 0 else None
        made = functions.around(outer[place], (*outer[1:], function)[place], made, checked)
    setattr(made, _SOURCE, function if outer else None)
    setattr(made, _MATCHES, matches)
    setattr(made, _BRANCHES, conditions)
    setattr(made, _MEMORY, memory)
    _made.add(made)
    return made


@remembered
def _unchunked(
    given: FunctionType, name: str, methods: Tuple[Tuple[str, FunctionType], ...], memory: str
) -> Optional[FunctionType]:
    """Rewrite a method that runs fused ones on chunks, so that it calls them directly if there is one chunk."""
    outer, function = undecorated(given)
    tree, names = chunks.rewritten(function, dict(methods), functools.partial(made_call, "in one"))
    if tree is None:
        return None
    instead = Instead(as_written(name, function), TRACED, None, None, False)
    return method_of(tree, function, {**NAMES, **names}, instead, (), memory, outer=outer)


def _worth(matches: List[AnyMatch]) -> Tuple[int, int, int]:
    """Count MLP modules with a block around them, fused products, and MLP modules whose block begins with a norm."""
    blocks = [match for match in matches if isinstance(match, Block) and isinstance(match.match, Whole)]
    modules, normed = (
        {ast.unparse(block.match.module) for block in blocks if block.first is not None or not with_norm}
        for with_norm in (False, True)
    )
    products = sum(isinstance(match, Match) and not match.pattern.pointwise for match in _once(matches))
    return len(modules), products, len(normed)


def _once(matches: List[AnyMatch]) -> List[AnyMatch]:
    """Return matches without duplicates: branches may contain matches of the same parts."""
    return list({_key(match): match for match in matches}.values())


def _key(match: AnyMatch) -> Tuple[Any, ...]:
    computed = match.match if isinstance(match, Block) else match
    return (type(match), getattr(computed, "pattern", None), *map(ast.unparse, match.parts))


def _calls_of(match: AnyMatch, calls: List[Tuple[AnyMatch, ast.expr]], tree: ast.FunctionDef) -> List[ast.expr]:
    """Return the nodes that replace a match in a tree, one for each branch."""
    nodes = set(ast.walk(tree))
    return [node for other, node in calls if node in nodes and _key(other) == _key(match)]


def role_by_text(roles: Tuple[Tuple[str, str], ...]) -> RoleOf:
    named = dict(roles)
    return lambda node: named.get(ast.unparse(node)) if isinstance(node, (ast.Name, ast.Attribute)) else None


# Modules of split MLPs.


def segment_role(forward: FunctionType, roles: Tuple[Tuple[str, str], ...], answers: branches.Answers) -> str:
    """Return the role of modules with this forward, and with these callees and conditions in it. The segment of a first
    or second module is registered with ``running.split_mlps``."""
    role, segment = _segment_of(forward, roles, answers)
    if segment is not None:
        (split_mlps.firsts if role == Role.FIRST else split_mlps.seconds)[forward] = segment
    return role


@remembered
def _segment_of(
    forward: FunctionType, roles: Tuple[Tuple[str, str], ...], answers: branches.Answers
) -> Tuple[str, Optional[split_mlps.Segment]]:
    if effects.readable(forward) is None or {Role.PROJECTION, Role.SEQUENCE}.isdisjoint(dict(roles).values()):
        return Role.LAYER, None
    made, _ = _rewritten(forward, "forward", roles, "activations", answers)
    if made is not None:
        whole, first = Role.WHOLE if made in split_mlps.wholes else Role.LAYER, split_mlps.firsts.get(made)
        return (whole, None) if first is None else (Role.FIRST, first)
    tree, role = copy.deepcopy(effects.readable(forward)), role_by_text(roles)
    start = start_of(tree, role)
    if start is None:
        return Role.LAYER, None
    finished = made_call("finished", start.argument, start.projection, ast.Tuple(list(start.between), ast.Load()))
    whole, node, rest, same_node = copy.deepcopy((tree, start.node)) + copy.deepcopy((tree, start.node))
    function = function_of(substitution.replace(whole, node, finished), forward, NAMES)
    rest, behind = substitution.without_passing(
        substitution.replace(rest, same_node, copy.deepcopy(start.argument)), role
    )
    ending = ending_of(tree, start, role)
    norm = () if ending is None or ending.norm is None else (ending.norm,)
    names = names_of((start.projection, *start.between, *behind, *norm), forward)
    ends = None if ending is None else bool(norm)
    read = read_of(forward, whole, rest)
    rest = function_of(rest, forward, {})
    segment = split_mlps.Segment(forward, names, ends, start, function, rest, guards=Guards(read), behind=len(behind))
    return Role.SECOND, segment


# Sequences.


def _mlps_in_turn(modules: Dict[str, nn.Module]) -> List[FoundMLP]:
    found, parts = [], list(modules.items())
    for index in range(len(parts) - 1):
        (name, first), (_, act) = parts[index : index + 2]
        is_first = role_of(first) == Role.FIRST
        if not is_first and (role_of(first) != Role.PROJECTION or not _computes_act(act)):
            continue
        rest = parts[index + (1 if is_first else 2) :]
        passing = list(itertools.takewhile(lambda item: role_of(item[1]) == Role.PASSING, rest))
        last, *after = rest[len(passing) :][:2] or [(None, None)]
        is_mlp = role_of(last[1]) == Role.PROJECTION and not any(_computes_act(part) for _, part in after)
        if is_mlp and is_first:
            found.append(mlp_behind(name, first, dict(passing), dict([last])))
        elif not is_first:
            pattern = forwards.PLAIN if is_mlp else forwards.LINEAR
            halves = known_halves(act)
            if halves is not None:
                pattern = sequences.halved(pattern, halves.up_first)
                act = halves.act.function if altered_halves(act, halves) is None else act
            found.append(FoundMLP(pattern, dict([(name, first), *([last] * is_mlp)]), act, dict(passing * is_mlp)))
    return found


def _computes_act(part: nn.Module) -> bool:
    return recognise(part) is not None or halves_of_class(part) is not None


def _is_whole(modules: Dict[str, nn.Module]) -> bool:
    """True if modules run in sequence are exactly one MLP."""
    return bool(_mlps_in_turn(modules)) and sequences.is_whole(tuple(modules.values()))  # the first call fills `firsts`


def _unknown_in_sequence(module: nn.Sequential) -> List[nn.Module]:
    """Return the unknown activations that follow projections."""
    pairs = zip(module._modules.values(), list(module._modules.values())[1:])
    unknown = (act for first, act in pairs if (role_of(first), role_of(act)) == (Role.PROJECTION, Role.UNKNOWN))
    return list({type(act): act for act in unknown}.values())
