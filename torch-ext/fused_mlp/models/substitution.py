"""Puts fused calls in the place of what they compute, in the source of a function.

A site is given up wherever taking the statements of its parts together could change what the function computes, or the
order in which it calls modules, whatever its arguments are.
"""

from __future__ import annotations

import ast
from typing import Callable, Iterator, List, Optional, Set, Tuple

from . import casts
from .effects import bound, is_harmless, is_reached, uses
from .matches import matches
from .names import SIMPLE, Place, Value, blocks, expressions, reads_of
from .roles import Role, RoleOf, asking, harmless_calls, is_call
from .sites import AnySite

_BINDING = (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)


def rewrite(
    function: ast.FunctionDef,
    role: RoleOf,
    wanted: Callable[[AnySite], bool],
    replacement: Callable[[AnySite], ast.expr],
) -> List[AnySite]:
    """Puts ``replacement(site)`` in the place of every wanted site of ``function``, and returns these sites."""
    sites: List[AnySite] = []
    local = _bound_in_body(function)
    for block in list(blocks(function)):
        casts.as_values(block, asking(role))
        index = len(block) - 1
        while index >= 0:
            place = Place(function, block, index)
            site, node, absorbed = next(_sites(place, role, wanted), (None, None, ()))
            if site is None:
                index -= 1
                continue
            sites.append(site)
            block[index] = replace(block[index], node, replacement(site))
            for k in sorted(absorbed, reverse=True):
                del block[k]
            index -= len(absorbed)
    arguments = {part.arg for part in ast.walk(function.args) if isinstance(part, ast.arg)}  # are local in any case
    _keep_local(function, local - _bound_in_body(function) - arguments)
    return sites


def _bound_in_body(function: ast.FunctionDef) -> Set[str]:
    return {name for statement in function.body for name in bound(statement)}


def _keep_local(function: ast.FunctionDef, names: Set[str]) -> None:
    """Binds names where it is never done: what reads them raises UnboundLocalError as before, and finds no global."""
    read = [ast.Name(name, ast.Store()) for name in sorted(names) if uses(function, name)]
    if read:
        never = ast.If(ast.Constant(False), [ast.Assign(read, ast.Constant(None))], [])
        for node in ast.walk(never):
            ast.copy_location(node, function.body[-1])
        function.body.append(never)


def _sites(
    place: Place, role: RoleOf, wanted: Callable[[AnySite], bool]
) -> Iterator[Tuple[AnySite, ast.expr, Set[int]]]:
    """The sites in a statement, the outermost first, and the statements that each takes in."""
    if not isinstance(place.block[place.index], SIMPLE):
        return
    for node in expressions(place.block[place.index]):
        for site in matches(Value(node, place), role):
            absorbed = _absorbed(site, node, place, role) if wanted(site) else None
            if absorbed is not None:
                yield site, node, absorbed


def _absorbed(site: AnySite, node: ast.expr, place: Place, role: RoleOf) -> Optional[Set[int]]:
    """The statements that a site makes superfluous; None if it must not be where it is, or they are needed."""
    if any(isinstance(each, _BINDING) for part in site.parts for each in ast.walk(part)):
        return None
    absorbed, served, followed = set(), set(), {name.id for name in site.read}
    for index in range(place.index):
        there = Place(place.function, place.block, index)
        reads = {name: reads_of(name, there) for name in bound(place.block[index])}
        if any(read is None and name in followed for name, read in reads.items()):
            return None
        if any(read is not None and read & site.read for read in reads.values()):
            if any(read is None or not read <= site.read for read in reads.values()):
                return None
            absorbed.add(index)
            served.update(*reads.values())
    if served != site.read:
        return None
    if not absorbed:
        return absorbed
    needed = {name.id for part in site.parts for name in ast.walk(part) if isinstance(name, ast.Name)}
    for index in range(min(absorbed), place.index):
        if index not in absorbed:
            statement = place.block[index]
            if not is_harmless(statement, harmless_calls(role)) or needed & bound(statement):
                return None
    return absorbed if is_reached(node, place.block[place.index], harmless_calls(role)) else None


def replace(holder: ast.AST, old: ast.expr, new: ast.expr) -> ast.AST:
    """The holder with another expression in the place of one in it."""
    return _Replacement(old, new).visit(holder)


def without_passing(holder: ast.AST, role: RoleOf) -> Tuple[ast.AST, List[ast.expr]]:
    """The holder with the arguments of passing modules in the place of their calls; and these modules."""
    taken = _Taken(role)
    return taken.visit(holder), taken.modules


class _Replacement(ast.NodeTransformer):
    def __init__(self, old: ast.expr, new: ast.expr) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self.new if node is self.old else self.generic_visit(node)


class _Taken(ast.NodeTransformer):
    def __init__(self, role: RoleOf) -> None:
        self.role, self.modules = role, []

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if not is_call(node, self.role, Role.PASSING):
            return node
        self.modules.append(node.func)
        return node.args[0]
