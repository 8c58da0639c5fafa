"""Substitution of fused calls for the code they compute, in the source of a function.

A match is rejected if merging the statements of its parts could change, for any arguments, what the function computes
or the order in which it calls modules.
"""

from __future__ import annotations

import ast
import itertools
from typing import Callable, Iterator, List, Optional, Set, Tuple

from ..matching import casts
from ..matching.matches import AnyMatch, Block, Match, Turns
from ..matching.roles import Role, RoleOf, asking, harmless_calls, is_call
from ..matching.search import matches_of
from ..reading.effects import bound, is_harmless, is_plain, is_reached, uses
from ..reading.names import SIMPLE, Place, Value, assignment, blocks, expressions, is_name, reads_of

_BINDING = (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)


def rewrite(
    function: ast.FunctionDef,
    role: RoleOf,
    wanted: Callable[[AnyMatch], bool],
    replacement: Callable[[AnyMatch], ast.expr],
    otherwise: bool = False,
) -> List[AnyMatch]:
    """Replace every wanted match of ``function`` by ``replacement(match)``, and return these matches.

    With ``otherwise``, the original statements run if the replacement gives None. Smaller matches inside them are then
    replaced: the MLP of a block, the first layer of an MLP, and the product of an activation.
    """
    local = _bound_in_body(function)
    rewriter = _Rewriter(function, role, replacement, otherwise)
    for block in list(blocks(function)):
        rewriter.rewrite(block, wanted)
    arguments = {part.arg for part in ast.walk(function.args) if isinstance(part, ast.arg)}  # always local
    _keep_local(function, local - _bound_in_body(function) - arguments)
    return rewriter.matches


class _Rewriter:
    def __init__(
        self, function: ast.FunctionDef, role: RoleOf, replacement: Callable[[AnyMatch], ast.expr], otherwise: bool
    ) -> None:
        self._function, self._role, self._replacement, self._otherwise = function, role, replacement, otherwise
        self.matches: List[AnyMatch] = []
        self._left: Set[ast.AST] = set()  # expressions that run if their replacement gives None
        self._names = (f"@value {number}" for number in itertools.count())  # names that no source can spell

    def rewrite(self, block: List[ast.stmt], wanted: Callable[[AnyMatch], bool]) -> None:
        casts.as_values(block, asking(self._role))
        index = len(block) - 1
        while index >= 0:
            place = Place(self._function, block, index)
            found = (each for each in _matches_in(place, self._role, wanted) if each[1] not in self._left)
            match, node, absorbed = next(found, (None, None, ()))
            if match is None:
                index -= 1
                continue
            self.matches.append(match)
            statements, body = self._made(block, index, match, node, absorbed)
            block[index : index + 1] = statements
            for k in sorted(absorbed, reverse=True):
                del block[k]
            index += len(statements) - 1 - len(absorbed)
            if body:
                self._within(body, lambda other, match=match: _is_smaller(other, match) and wanted(other))

    def _within(self, body: List[ast.stmt], wanted: Callable[[AnyMatch], bool]) -> None:
        """Rewrite the fallback statements of a match; they are not matches of their own."""
        matches = len(self.matches)
        self.rewrite(body, wanted)
        del self.matches[matches:]

    def _made(
        self, block: List[ast.stmt], index: int, match: AnyMatch, node: ast.expr, absorbed: Set[int]
    ) -> Tuple[List[ast.stmt], List[ast.stmt]]:
        """Return the statements that replace one, and those among them that run if its match is not fused."""
        call, statement = self._replacement(match), block[index]
        if isinstance(call, ast.IfExp):  # the size of one factor decides which product runs
            self._left.add(call.orelse)
        if not self._otherwise or isinstance(call, ast.IfExp):
            return [replace(statement, node, call)], []
        values, made = next(self._names), []
        originals = [block[k] for k in sorted(absorbed)]
        hoisted = bool(absorbed) or is_reached(node, statement, harmless_calls(self._role))
        for part in (part for part in match.parts if not is_plain(part) and _holds([*originals, node], part)):
            name = next(self._names)  # evaluated once, whichever path runs
            value = _assigned(name, part) if hoisted else ast.NamedExpr(ast.Name(name, ast.Store()), part)
            made += [value] if hoisted else []
            call = replace(call, part, ast.Name(name, ast.Load()) if hoisted else value)
            originals = [replace(each, part, ast.Name(name, ast.Load())) for each in originals]
            statement = replace(statement, part, ast.Name(name, ast.Load()))
            node = ast.Name(name, ast.Load()) if node is part else node
        if not hoisted:
            self._left.update(ast.walk(node))
            is_found = ast.NamedExpr(ast.Name(values, ast.Store()), call)
            test = ast.Compare(is_found, [ast.IsNot()], [ast.Constant(None)])
            return [replace(statement, node, ast.IfExp(test, ast.Name(values, ast.Load()), node))], []
        body = [*originals, _assigned(values, node)]
        test = ast.Compare(ast.Name(values, ast.Load()), [ast.Is()], [ast.Constant(None)])
        made += [_assigned(values, call), ast.If(test, body, [])]
        for part in (part for each in made for part in ast.walk(each) if not hasattr(part, "lineno")):
            ast.copy_location(part, statement)
        return [*made, replace(statement, node, ast.Name(values, ast.Load()))], body


def _is_smaller(match: AnyMatch, than: AnyMatch) -> bool:
    """True for an MLP inside a block, and for a part of an MLP."""
    if isinstance(than, Block):
        return not isinstance(match, Block)
    return isinstance(match, Match) and not match.pattern.whole and (match.pattern.pointwise or _is_whole(than))


def _is_whole(match: AnyMatch) -> bool:
    return isinstance(match, Match) and match.pattern.whole


def _holds(nodes: List[ast.AST], part: ast.expr) -> bool:
    return any(part is each for node in nodes for each in ast.walk(node))


def _assigned(name: str, value: ast.expr) -> ast.Assign:
    return ast.Assign([ast.Name(name, ast.Store())], value)


def _bound_in_body(function: ast.FunctionDef) -> Set[str]:
    return {name for statement in function.body for name in bound(statement)}


def _keep_local(function: ast.FunctionDef, names: Set[str]) -> None:
    """Bind names in dead code, so that reading them still raises UnboundLocalError instead of finding a global."""
    read = [ast.Name(name, ast.Store()) for name in sorted(names) if uses(function, name)]
    if read:
        never = ast.If(ast.Constant(False), [ast.Assign(read, ast.Constant(None))], [])
        for node in ast.walk(never):
            ast.copy_location(node, function.body[-1])
        function.body.append(never)


def _matches_in(
    place: Place, role: RoleOf, wanted: Callable[[AnyMatch], bool]
) -> Iterator[Tuple[AnyMatch, ast.expr, Set[int]]]:
    """Yield the matches in a statement, outermost first, with the indices of the statements that each absorbs."""
    if not isinstance(place.block[place.index], SIMPLE):
        return
    for node in expressions(place.block[place.index]):
        for match in matches_of(Value(node, place), role):
            absorbed = _absorbed(match, node, place, role) if wanted(match) else None
            if absorbed is not None:
                yield match, node, absorbed


def _absorbed(match: AnyMatch, node: ast.expr, place: Place, role: RoleOf) -> Optional[Set[int]]:
    """Return the statements that a match makes redundant; None if it cannot run here or they are still used."""
    if any(isinstance(each, _BINDING) for part in match.parts for each in ast.walk(part)):
        return None
    absorbed, served, followed = set(), set(), {name.id for name in match.read}
    for index in range(place.index):
        there = Place(place.function, place.block, index)
        reads = {name: reads_of(name, there) for name in bound(place.block[index])}
        if any(read is None and name in followed for name, read in reads.items()):
            return None
        if any(read is not None and read & match.read for read in reads.values()):
            if any(read is None or not read <= match.read for read in reads.values()):
                return None
            absorbed.add(index)
            served.update(*reads.values())
    if served != match.read:
        return None
    if not absorbed:
        return absorbed
    needed = {name.id for part in match.parts for name in ast.walk(part) if isinstance(name, ast.Name)}
    for index in range(min(absorbed), place.index):
        if index not in absorbed:
            statement = place.block[index]
            if not is_harmless(statement, harmless_calls(role)) or needed & bound(statement):
                return None
    return absorbed if is_reached(node, place.block[place.index], harmless_calls(role)) else None


def replace(holder: ast.AST, old: ast.expr, new: ast.expr) -> ast.AST:
    """Return ``holder`` with the expression ``old`` in it replaced by ``new``."""
    return _Replacement(old, new).visit(holder)


def without_passing(holder: ast.AST, role: RoleOf) -> Tuple[ast.AST, List[ast.expr]]:
    """Return ``holder`` with calls of passing modules replaced by their arguments, and these modules."""
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


# Loops that only run modules in sequence: ``for module in self.net: x = module(x)``.


def rewrite_loops(function: ast.FunctionDef, role: RoleOf, replacement: Callable[[Turns], ast.expr]) -> List[Turns]:
    """Replace every such loop over a sequence with MLPs by an assignment of ``replacement(match)``."""
    found: List[Turns] = []
    for block in list(blocks(function)):
        for index, statement in enumerate(block):
            match = _turns(statement, function, role)
            if match is not None:
                found.append(match)
                made = ast.Assign([ast.Name(match.x.id, ast.Store())], replacement(match))
                block[index] = ast.copy_location(made, statement)
    return found


def _turns(statement: ast.stmt, function: ast.FunctionDef, role: RoleOf) -> Optional[Turns]:
    if not isinstance(statement, ast.For) or statement.orelse or len(statement.body) != 1:
        return None
    target, call = assignment(statement.body[0])
    is_sequence = isinstance(statement.iter, ast.Attribute) and role(statement.iter) == Role.SEQUENCE
    if not is_sequence or not isinstance(target, ast.Name) or not isinstance(statement.target, ast.Name):
        return None
    name = statement.target.id
    is_turn = is_call(call, lambda callee: Role.LAYER if is_name(callee, name) else None, Role.LAYER)
    if not is_turn or not is_name(call.args[0], target.id) or name == target.id:
        return None
    return Turns(statement.iter, call.args[0]) if uses(function, name) == {call.func} else None
