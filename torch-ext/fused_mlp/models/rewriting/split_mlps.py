"""Classification of a rewritten forward: the first module of a split MLP, or a whole MLP (``running.split_mlps``)."""

from __future__ import annotations

import ast
import copy
import itertools
import sys
from dataclasses import replace
from types import FunctionType, ModuleType
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

from ..matching.matches import AnyMatch, Match, Turns
from ..matching.roles import Role, RoleOf
from ..matching.search import returned
from ..methods.functions import function_of
from ..parts.guards import Guards, guards_of
from ..proving import activations
from ..reading.effects import is_harmless, uses
from ..reading.names import assignment, body_of, is_name
from ..reading.source import read_of, value_of
from ..running import forwards, sequences, split_mlps
from .fused_calls import arguments_of, name_of_pattern

_NOTHING = ast.parse("def nothing(): pass").body[0]


def first_of(
    tree: ast.FunctionDef, forward: FunctionType, found: List[AnyMatch], names: Dict[str, Any], role: RoleOf
) -> Optional[split_mlps.Segment]:
    """Return the segment of a rewritten forward as the first module of a split MLP; None if it does more with its
    result than return it."""
    match, arguments = found[0], [*tree.args.posonlyargs, *tree.args.args]
    is_hidden = isinstance(match, Match) and not (match.pattern.pointwise or match.pattern.whole)
    if not is_hidden or len(found) > 1 or len(arguments) != 2 or not _is_returned(tree):
        return None
    tree, match = copy.deepcopy((tree, match))
    call, behind = returned(tree, role)
    is_alone = call is not None and not behind and ast.unparse(match.inputs[0]) == arguments[1].arg
    if is_alone:
        tree.body = [ast.copy_location(ast.Return(call), tree.body[-1])]
    for node in [node for node in ast.walk(tree) if isinstance(node, ast.Call) and is_name(node.func, "@fused")]:
        node.args = arguments_of(match)
    whole = {name_of_pattern(match.pattern): replace(match.pattern, whole=True), "@fused": split_mlps.Pending}
    called = (match.act.callee,) if match.act.is_callee else ()
    parts = names_of((*called, *match.projections), forward) if called and is_alone else None
    own = None if parts is None else (whole[name_of_pattern(match.pattern)], parts)
    known = {**names, **whole}
    only_handing_on = _only_handing_on(copy.deepcopy(tree), forward, role)
    asks_nothing = is_name(match.inputs[0], arguments[1].arg) and len(uses(only_handing_on, arguments[1].arg)) == 1
    is_sure = asks_nothing and all(_may_run_again(statement, role) for statement in only_handing_on.body)
    before_a_norm = function_of(only_handing_on, forward, known) if is_sure else None
    function, read = function_of(tree, forward, known), read_of(forward, tree, only_handing_on)
    return split_mlps.Segment(forward, own, None, match, function, before_a_norm=before_a_norm, guards=Guards(read))


def _only_handing_on(tree: ast.FunctionDef, forward: FunctionType, role: RoleOf) -> ast.FunctionDef:
    """Return the code of a first module, changed to return None in branches that hand over no result."""
    tree.body = [statement for statement in body_of(tree) if not _is_skipped(statement, tree.args, forward)]
    for node in list(ast.walk(tree)):
        for branch in (node.body, node.orelse) if isinstance(node, ast.If) else ():
            names = (part.id for statement in branch for part in ast.walk(statement) if isinstance(part, ast.Name))
            if branch and "@fused" not in names:
                branch[:] = [ast.copy_location(ast.Return(ast.Constant(None)), branch[0])]
    return tree


def _may_run_again(statement: ast.stmt, role: RoleOf) -> bool:
    """True if a statement that hands over a fused result may run twice without side effects."""
    if isinstance(statement, ast.If):
        parts = all(_may_run_again(part, role) for part in (*statement.body, *statement.orelse))
        return parts and is_harmless(statement.test, lambda callee: role(callee) == Role.FLAG)
    made = [node for node in ast.walk(statement) if isinstance(node, ast.Call) and ast.unparse(node.func)[0] == "@"]
    value = statement.value if isinstance(statement, ast.Return) else assignment(statement)[1]
    is_bound = isinstance(statement, ast.Return) or isinstance(assignment(statement)[0], ast.Name)
    return is_bound and (value in made or (value is not None and is_harmless(value, lambda callee: False)))


def _is_returned(tree: ast.FunctionDef) -> bool:
    """True if the result of the fused call is returned, or bound and then returned, perhaps under conditions."""

    def ends(block: List[ast.stmt]) -> Iterator[ast.expr]:
        for statement, following in itertools.zip_longest(block, block[1:]):
            if isinstance(statement, ast.If):
                yield from (*ends(statement.body), *ends(statement.orelse))
            target, value = assignment(statement)
            if isinstance(statement, ast.Return):
                yield statement.value
            elif isinstance(following, ast.Return) and isinstance(target, ast.Name):
                yield from [value] if is_name(following.value, target.id) else []

    calls = {node for node in ast.walk(tree) if isinstance(node, ast.Call) and is_name(node.func, "@fused")}
    return calls <= set(ends(tree.body))


def whole_of(
    tree: ast.FunctionDef, forward: FunctionType, found: List[AnyMatch], role: RoleOf
) -> Optional[split_mlps.Segment]:
    """Return the segment of a rewritten forward that is a whole MLP: one fused call of linear layers, whose result may
    pass through further parts."""
    match, arguments = found[0], [*tree.args.posonlyargs, *tree.args.args]
    if isinstance(match, Turns):
        return _whole_in_turn(tree, forward, match, role)
    call, behind = returned(tree, role)
    is_mlp = isinstance(match, Match) and match.pattern.whole and (match.act.is_callee or match.act.form == "factor")
    if not is_mlp or call is None or ast.unparse(call.func) != "@fused" or len(arguments) != 2:
        return None
    if ast.unparse(match.inputs[0]) != arguments[1].arg:
        return None
    passing = (*match.between, *behind)
    casts = [forwards.cast for node in passing if isinstance(node, ast.Lambda)]
    dropouts = [node for node in passing if isinstance(node, ast.IfExp)]
    modules = [node for node in passing if not isinstance(node, (ast.Lambda, ast.IfExp))]
    find = _function if match.act.is_callee else _factor
    act, unchanged = find(match.act.callee, forward) or (None, ())
    parts = names_of((*(() if unchanged else (match.act.callee,)), *match.projections, *modules), forward)
    if parts is None or any(names_of((node.test,), forward) != ("training",) for node in dropouts):
        return None
    parts = (act, *parts, *casts) if unchanged else (*parts, *casts)
    names = split_mlps.Parts(match.pattern, parts, len(match.projections), bool(dropouts))
    guards = Guards((*read_of(forward, _NOTHING), *unchanged))
    last = 0 if casts or dropouts else len(behind)
    return split_mlps.Segment(forward, names, None, match, guards=guards, behind=last)


def _whole_in_turn(
    tree: ast.FunctionDef, forward: FunctionType, match: Turns, role: RoleOf
) -> Optional[split_mlps.Segment]:
    """Like :func:`whole_of`, for a forward that runs children in sequence which form an MLP together.

    The forward may have more arguments; a call as the MLP of a block does not pass them.
    """
    arguments, modules = [*tree.args.posonlyargs, *tree.args.args], names_of((match.modules,), forward)
    taken = copy.copy(tree)
    taken.body = [statement for statement in body_of(tree) if not _is_skipped(statement, tree.args, forward)]
    call, behind = returned(taken, role)
    is_alone = call is not None and is_name(call.func, "@in turn") and not behind and len(arguments) == 2
    if not is_alone or modules is None or tree.args.kwonlyargs or match.x.id != arguments[1].arg:
        return None
    turns = None, modules[0], sequences.known, split_mlps.firsts, forwards.PLAIN
    return split_mlps.Segment(forward, turns, None, match, guards=Guards(read_of(forward, _NOTHING)))


def _is_skipped(statement: ast.stmt, arguments: ast.arguments, forward: FunctionType) -> bool:
    """True if a statement is skipped in calls without extra positional or keyword arguments."""
    if not isinstance(statement, ast.If) or statement.orelse:
        return False
    more = {given.arg: empty for given, empty in ((arguments.vararg, ()), (arguments.kwarg, {})) if given is not None}
    names = {node.id for node in ast.walk(statement.test) if isinstance(node, ast.Name)} - more.keys()
    if not names <= {"len"} or ("len" in names and value_of(ast.Name("len", ast.Load()), forward, None) is not len):
        return False
    code = compile(ast.fix_missing_locations(ast.Expression(copy.deepcopy(statement.test))), "<condition>", "eval")
    try:
        return not eval(code, {"__builtins__": {}, "len": len, **more})
    except Exception:  # the method raises too
        return False


def names_of(nodes: Sequence[ast.expr], function: FunctionType) -> Optional[Tuple[str, ...]]:
    """Return the names of nodes that are all attributes of the first argument; None otherwise."""
    first = function.__code__.co_varnames[0]
    plain = all(isinstance(node, ast.Attribute) and ast.unparse(node.value) == first for node in nodes)
    return tuple(node.attr for node in nodes) if plain else None


def _factor(node: ast.expr, function: FunctionType) -> Optional[Tuple[Any, Tuple[Tuple[Any, ...], ...]]]:
    """Return the activation in the product that a function computes, and the proof's dependencies beside its name."""
    found = activations.read_product(value_of(node, function, None))
    guards = None if found is None else guards_of(found.dependencies)
    return None if guards is None else (found.row.function, guards.unchanged)


def _function(node: ast.expr, function: FunctionType) -> Optional[Tuple[Any, Tuple[Tuple[Any, str, Any], ...]]]:
    """Return the function that a name like ``F.silu`` refers to, and the values that must stay the same; else None."""
    home = sys.modules.get(function.__module__)
    if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)) or home is None:
        return None
    name, owner = node.value.id, value_of(node.value, function, None)
    found = value_of(node, function, None) if isinstance(owner, ModuleType) else None
    is_global = vars(home) is function.__globals__ and vars(home).get(name) is owner
    return (found, ((home, name, owner), (owner, node.attr, found))) if found is not None and is_global else None
