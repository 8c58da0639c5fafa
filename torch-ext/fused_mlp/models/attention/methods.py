"""Regenerated forwards of attentions: one call for linear layers of the same input, another for rotary embeddings."""

from __future__ import annotations

import ast
import copy
from types import FunctionType
from typing import Any, Dict, List, NamedTuple, Optional, Set, Tuple

from torch import nn

from ... import dispatch
from ..matching.roles import Role, harmless_calls, is_call
from ..methods.functions import Instead
from ..parts import adapters, refusals
from ..reading import effects
from ..reading.attributes import as_written, attribute_of, class_of
from ..reading.names import SIMPLE, blocks, expressions
from ..reading.source import remembered, values_of
from ..rewriting import rewriter
from ..rewriting.fused_calls import made_call
from ..rewriting.substitution import replace
from ..running import shortcut
from . import rotary, running

_NAMES = {"@projected": running.projected, "@rotated": running.rotated}
PROJECTIONS, ROTARY = "projections of one input", "rotary embedding"  # for patterns in reports
_MOST = 3  # layers per call
_VIEWS = {"transpose", "permute", "flatten", "unflatten", "contiguous"}  # methods of tensors, besides the harmless ones


class Parts(NamedTuple):
    """The parts of a fused forward: the groups of layers, by name, that one call runs, and its rotary functions."""

    layers: Tuple[Tuple[str, ...], ...]
    rotaries: Tuple[str, ...]


_parts: Dict[Any, Parts] = {}  # by fused methods


def fused_methods(module: nn.Module, memory: str) -> Dict[str, FunctionType]:
    """Return the forward to install in a module with several layers of one input or with rotary embeddings; else empty.

    ``memory`` is what training saves for the MLPs around it; a second call compares it to see that nothing changed.
    """
    forward = getattr(class_of(module), "forward", None)
    if shortcut.plain is None or not isinstance(forward, FunctionType):
        return {}
    outer, forward = rewriter.undecorated(forward)
    values = {text: values_of(node, forward, module) for text, node in rewriter.callees(forward).items()}
    takes_layers = dispatch.LEAST_PROJECTED < dispatch.NEVER
    layers = [text for text, found in values.items() if takes_layers and all(map(_is_layer, found.values()))]
    rotaries = [text for text, found in values.items() if all(map(rotary.is_rotary, found.values()))]
    if len(layers) < 2 and not rotaries:
        return {}
    made = _made(forward, rewriter.roles_in(forward, module), tuple(layers), tuple(rotaries), memory, outer)
    return {} if made is None else {"forward": made}


def is_fused(function: Any) -> bool:
    """True if a function was made by :func:`fused_methods`."""
    return function in _parts


def pattern_of(function: FunctionType, module: nn.Module) -> str:
    """Return the pattern, for reports, of what a fused method computes in the module's present mode."""
    layers, rotaries = _parts[function]
    return ", ".join((*([PROJECTIONS] if layers and module.training else []), *([ROTARY] if rotaries else [])))


def refusals_of(function: FunctionType, module: nn.Module) -> Dict[str, Optional[str]]:
    """Return, by name, why layers of a fused method are called one by one in the module's present state."""
    around = refusals.of_global_state()
    names = [name for group in _parts[function].layers for name in group if module.training]
    found = {name: around or _refusal_of(attribute_of(module, name)) for name in names}
    return {**found, **({ROTARY: around} if _parts[function].rotaries else {})}


def _refusal_of(layer: Any) -> Optional[str]:
    is_bare = type(layer) is nn.Linear and layer._parameters.get("weight") is None
    return "no weight" if is_bare else refusals.of_projection(layer)


def _is_layer(part: Any) -> bool:
    has_weight = type(part) is nn.Linear and type(part._parameters.get("weight")) is nn.Parameter
    return has_weight and adapters.of_projection(part) is None


@remembered
def _made(
    forward: FunctionType,
    roles: Tuple[Tuple[str, str], ...],
    layers: Tuple[str, ...],
    rotaries: Tuple[str, ...],
    memory: str,
    outer: Tuple[FunctionType, ...],
) -> Optional[FunctionType]:
    tree = copy.deepcopy(effects.readable(forward))
    if tree is None:
        return None
    owner, role = tree.args.args[0].arg if tree.args.args else "", rewriter.role_by_text(roles)
    finder = _Groups(owner, role, set(layers))
    groups = [_put(block, group) for block in list(blocks(tree)) for group in reversed(finder.of(block))]
    turned = _Turned(set(rotaries))
    turned.visit(tree)
    if not groups and not turned.found:
        return None
    instead = Instead(as_written("forward", forward), rewriter.TRACED, None, None, False)
    made = rewriter.method_of(tree, forward, _NAMES, instead, (), memory, outer=outer)
    _parts[made] = Parts(tuple(groups), tuple(dict.fromkeys(turned.found)))
    return made


class _Call(NamedTuple):
    """A call of a layer, in the statement at this index of a block."""

    index: int
    node: ast.Call


class _Groups:
    """Finds calls of layers that take the same name as input, one after the other, with only views between them.

    Norms may stand between them too, such as those of queries and keys, which cannot change the input.
    """

    def __init__(self, owner: str, role: Any, layers: Set[str]) -> None:
        self._owner, self._role, self._layers = owner, role, layers
        self._harmless = harmless_calls(role, Role.NORM)

    def of(self, block: List[ast.stmt]) -> List[List[_Call]]:
        found: List[List[_Call]] = []
        group: List[_Call] = []
        for index, statement in enumerate(block):
            calls = self._calls_in(statement, index)
            for call in calls:
                if group and (ast.unparse(call.node.args[0]) != self._input(group) or len(group) == _MOST):
                    found.append(group)
                    group = []
                group.append(call)
            name = self._input(group) if group else ""
            if not self._is_harmless(statement) or {name, self._owner} & effects.bound(statement):
                found.append(group)
                group = []
        return [each for each in (*found, group) if self._is_taken(each)]

    @staticmethod
    def _input(group: List[_Call]) -> str:
        return ast.unparse(group[0].node.args[0])

    @staticmethod
    def _is_taken(group: List[_Call]) -> bool:
        return len(group) > 1 and len({ast.unparse(call.node.func) for call in group}) == len(group)

    def _calls_in(self, statement: ast.stmt, index: int) -> List[_Call]:
        if not isinstance(statement, SIMPLE):
            return []
        nodes = [node for node in expressions(statement) if self._is_call(node)]
        reached = [node for node in nodes if effects.is_reached(node, statement, self._may_call)]
        return [_Call(index, node) for node in sorted(reached, key=lambda node: (node.lineno, node.col_offset))]

    def _is_call(self, node: ast.expr) -> bool:
        is_layer = is_call(node, self._role, Role.PROJECTION) and ast.unparse(node.func) in self._layers
        is_child = is_layer and isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == self._owner
        return is_child and isinstance(node.args[0], ast.Name)

    def _is_harmless(self, statement: ast.stmt) -> bool:
        return isinstance(statement, SIMPLE) and effects.is_harmless(statement, self._may_call)

    def _may_call(self, callee: ast.expr) -> bool:
        is_view = self._role(callee) is None and isinstance(callee, ast.Attribute) and callee.attr in _VIEWS
        return is_view or self._harmless(callee) or ast.unparse(callee) in self._layers


def _put(block: List[ast.stmt], group: List[_Call]) -> Tuple[str, ...]:
    """Insert the call of a group before its first statement, and use its results in place of the group's calls."""
    first = block[group[0].index]
    names = tuple(call.node.func.attr for call in group)
    found = f"@found {'.'.join(names)}"  # a name that no source can contain
    for call in group:
        name = ast.Name(found, ast.Load())
        taken = ast.Call(ast.Attribute(name, "pop", ast.Load()), [], [])
        replace(block[call.index], call.node, ast.IfExp(name, taken, call.node))
    owner, x = group[0].node.func.value, group[0].node.args[0]
    given = ast.Constant(names), copy.deepcopy(owner), copy.deepcopy(x)
    training = ast.Attribute(copy.deepcopy(owner), "training", ast.Load())
    made = ast.BoolOp(ast.And(), [training, made_call("projected", *given)])
    made = ast.Assign([ast.Name(found, ast.Store())], made)
    block.insert(block.index(first), made)
    for part in (part for statement in block for part in ast.walk(statement) if not hasattr(part, "lineno")):
        ast.copy_location(part, first)
    return names


class _Turned(ast.NodeTransformer):
    """Replaces calls of rotary functions by the op's call."""

    def __init__(self, rotaries: Set[str]) -> None:
        self._rotaries, self.found = rotaries, []

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        text = ast.unparse(node.func)
        is_plain = len(node.args) == 4 and not node.keywords and not any(isinstance(a, ast.Starred) for a in node.args)
        if text not in self._rotaries or not is_plain:
            return node
        self.found.append(text)
        return ast.copy_location(made_call("rotated", node.func, *node.args), node)
