"""Search for MLPs in the source of a function: projections whose output goes through an activation.

Only listed syntax is matched; all other code stays as it is. P is a projection, A an activation.
"""

from __future__ import annotations

import ast
import dataclasses
from typing import Dict, Iterator, List, Optional, Tuple, Union

from ..reading.effects import is_harmless, is_plain, is_reached, is_view, uses
from ..reading.names import SIMPLE, Place, Value, assignment, body_of, expressions, is_name, reads_of
from . import casts
from .matches import Act, AnyMatch, Block, Ending, Match, Modulation, SplitMLP, Start, Whole
from .pattern import Pattern
from .roles import Role, RoleOf, asking, harmless_calls, is_call, passed_through

_OPTIONS = {"approximate", "inplace"}  # keywords beside the input


def matches_of(value: Value, role: RoleOf) -> Iterator[AnyMatch]:
    """Yield the matches that end in a value, the largest first."""
    yield from _blocks_of(value, role)
    for kind in (_split_mlp, _whole, _hidden, _pointwise):
        match = kind(value, role)
        if match is not None:
            yield match


def _blocks_of(value: Value, role: RoleOf) -> Iterator[Block]:
    """Match ``last(residual + ...(whole of first(x)) * factor)``, with or without norms and a factor."""
    last, summed = None, value
    if is_call(value.node, role, Role.NORM):
        last, summed = value.node.func, value.part(value.node.args[0])
    summed, narrow = _narrowed(summed)
    if summed.half is not None or not (isinstance(summed.node, ast.BinOp) and isinstance(summed.node.op, ast.Add)):
        return
    left, right = summed.node.left, summed.node.right
    for residual, other in ((left, right), (right, left)):
        wide = narrow is not None
        residual = _widened(residual, narrow) if wide else residual
        value = summed.part(other)
        passed, outer = _through(value, role)
        for scaled, factor in _factored(passed):
            if wide:
                inside = None if scaled.half is not None else _widened(scaled.node)
                scaled = None if inside is None else scaled.part(inside)
            if residual is None or scaled is None or (wide and (last is not None or factor is None)):
                continue
            inner, behind, norm = _behind(value if factor is None else scaled, role)
            behind = behind if factor is None else (*behind, *outer)
            if inner.half is not None or not _is_sum_of_names(residual) or None not in (norm, last):
                continue
            match, first = _whole(inner, role), inner
            if is_call(inner.node, role, Role.WHOLE):
                match = Whole(inner.node.func, (inner.node.args[0],), inner.read)
            elif match is None or match.pattern.gated:
                continue
            else:  # find the first projection
                hidden, _ = _through(inner.part(inner.node.args[0]), role, inner.node.func)
                _, first = _applied(hidden, role)
            is_normed = last is not None or (norm is not None and role(norm) == Role.NORM)
            block = Block(match, behind, residual, factor, is_normed, last=last, wide=wide)
            yield from _with_first_norm(block, first.part(first.node.args[0]), role)
            yield block


def _with_first_norm(block: Block, x: Value, role: RoleOf) -> Iterator[Block]:
    """Yield a block extended by the norm that produces its MLP's input, with that norm's modulation if there is one."""
    inner, narrow = _narrowed(x)
    for modulation, given in ((None, x), _modulated(inner, role)):
        if given is None or given.half is not None or not is_call(given.node, role, Role.NORM):
            continue
        argument = given.node.args[0]
        if narrow is not None and given is not x:
            argument, modulation = _widened(argument, narrow), dataclasses.replace(modulation, wide=True)
        if argument is not None:
            normed = dataclasses.replace(block.match, inputs=(argument,), read=block.match.read | given.read)
            yield dataclasses.replace(block, match=normed, is_normed=True, first=given.node.func, modulation=modulation)


def _narrowed(value: Value) -> Tuple[Value, Optional[str]]:
    """Split ``(...).type_as(x)`` into the value that is cast and the name ``x``; any other value has no name."""
    call = value.node
    is_method = value.half is None and isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
    if not is_method or call.func.attr != "type_as" or call.keywords or len(call.args) != 1:
        return value, None
    (of,) = call.args
    return (value.part(call.func.value), of.id) if isinstance(of, ast.Name) else (value, None)


def _widened(node: ast.expr, name: Optional[str] = None) -> Optional[ast.expr]:
    """Return ``h`` in ``h.float()``, if it has this name; None for anything else."""
    is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "float"
    if not is_method or node.args or node.keywords:
        return None
    return node.func.value if name is None or is_name(node.func.value, name) else None


def _modulated(value: Value, role: RoleOf) -> Tuple[Optional[Modulation], Optional[Value]]:
    """Split ``h * (1 + scale) + shift`` into its modulation and h; the shift is optional. (None, None) otherwise."""
    shift = None
    if value.half is None and isinstance(value.node, ast.BinOp) and isinstance(value.node.op, ast.Add):
        shift = value.node.right
        value = value.part(value.node.left)
    product = value.node
    is_product = value.half is None and isinstance(product, ast.BinOp) and isinstance(product.op, ast.Mult)
    if not is_product or not (shift is None or is_view(shift)):
        return None, None
    for factor, other in ((product.right, product.left), (product.left, product.right)):
        if isinstance(factor, ast.BinOp) and isinstance(factor.op, ast.Add):
            for one, scale in ((factor.left, factor.right), (factor.right, factor.left)):
                if isinstance(one, ast.Constant) and type(one.value) is int and one.value == 1 and is_view(scale):
                    return Modulation(scale, shift), value.part(other)
    return None, None


def _is_sum_of_names(node: ast.expr) -> bool:
    """True if an expression is a sum of names, which may be evaluated at any time."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _is_sum_of_names(node.left) and _is_sum_of_names(node.right)
    return isinstance(node, ast.Name)


def _factored(value: Value) -> Iterator[Tuple[Value, Optional[ast.expr]]]:
    """Yield the values that may be multiplied by a number, an attribute or a name before the sum, with that factor.

    The value itself comes last, without a factor.
    """
    if value.half is None and isinstance(value.node, ast.BinOp) and isinstance(value.node.op, ast.Mult):
        left, right = value.node.left, value.node.right
        for factor, other in ((right, left), (left, right)):
            if isinstance(factor, (ast.Constant, ast.Attribute)) or is_view(factor):
                yield value.part(other), factor
    yield value, None


def _behind(value: Value, role: RoleOf) -> Tuple[Value, Tuple[ast.expr, ...], Optional[ast.expr]]:
    """Split a value into the input of the surrounding modules and dropouts, these modules, and the norm or scale in
    them.

    The last is None if there is no norm or scale.
    """
    value, outer = _through(value, role)
    if value.half is not None or not is_call(value.node, role, Role.NORM, Role.SCALE):
        return value, outer, None
    norm = value.node.func
    value, inner = _through(value.part(value.node.args[0]), role)
    return value, (*inner, norm, *outer), norm


def _whole(value: Value, role: RoleOf) -> Optional[Match]:
    """Match ``P(...(hidden))``."""
    if not is_call(value.node, role, Role.PROJECTION):
        return None
    last = value.node.func
    value, between = _through(value.part(value.node.args[0]), role, last)
    match = _hidden(value, role)
    if match is None:
        return None
    pattern = dataclasses.replace(match.pattern, whole=True)
    return dataclasses.replace(match, pattern=pattern, projections=(*match.projections, last), between=between)


def _through(value: Value, role: RoleOf, projection: Optional[ast.expr] = None) -> Tuple[Value, Tuple[ast.expr, ...]]:
    """Split a value into the input of the surrounding modules, dropouts and casts for a projection, and these parts."""
    between: List[ast.expr] = []
    while True:
        part = None if value.half is not None else passed_through(value.node, role)
        cast = None if projection is None else casts.name_of(value.node, projection, asking(role))
        if part is not None:
            value = value.part(value.node.args[0])
        elif cast is not None and value.half is None:
            part, read = casts.as_function(value.node), value.read | uses(value.node, cast)
            value = dataclasses.replace(value, read=read).part(value.node.orelse)
        else:
            return value, tuple(between)
        between.insert(0, part)


def _split_mlp(value: Value, role: RoleOf) -> Optional[SplitMLP]:
    """Match ``second(first(x), ...)``. The second module's other arguments must be names or constants: the first module
    cannot rebind those."""
    node = value.node
    if not (isinstance(node, ast.Call) and node.args and role(node.func) == Role.SECOND):
        return None
    rest, named = tuple(node.args[1:]), tuple(node.keywords)
    given = [*rest, *(word.value for word in named)]
    if any(word.arg is None for word in named) or not all(isinstance(each, (ast.Name, ast.Constant)) for each in given):
        return None
    inner = value.part(node.args[0])
    if inner.half is not None or not is_call(inner.node, role, Role.FIRST):
        return None
    return SplitMLP(node.func, inner.node.func, inner.node.args[0], rest, named, inner.read)


def _hidden(value: Value, role: RoleOf) -> Optional[Match]:
    """Match ``A(P(x))``, ``A(P(x)) * P(x)``, or ``A(half) * other_half`` of ``P(x)``."""
    act, inner = _applied(value, role)
    if act is not None and inner.half is None and is_call(inner.node, role, Role.PROJECTION):
        return Match(Pattern(), (inner.node.args[0],), (inner.node.func,), act, read=inner.read)
    for act, _, gate, other in gated(value, role):
        up = value.part(other)
        if not (is_call(gate.node, role, Role.PROJECTION) and is_call(up.node, role, Role.PROJECTION)):
            continue
        x, read = gate.node.args[0], gate.read | up.read
        if gate.node is up.node and {gate.half, up.half} == {0, 1}:
            pattern = Pattern(gated=True, packed=True, up_first=gate.half == 1)
            return Match(pattern, (x,), (gate.node.func,), act, read=read)
        same_x = isinstance(x, ast.Name) and is_name(up.node.args[0], x.id)
        if gate.half is None and up.half is None and same_x and gate.node is not up.node:
            up_left = other is getattr(value.node, "left", None)
            pattern = Pattern(gated=True, up_left=up_left, up_before=_is_before(up.node, gate.node))
            return Match(pattern, (x,), (gate.node.func, up.node.func), act, read=read)
    return None


def _is_before(node: ast.expr, other: ast.expr) -> bool:
    """True if a node is evaluated before another node that is not part of it."""
    return (node.lineno, node.col_offset) < (other.lineno, other.col_offset)


def _pointwise(value: Value, role: RoleOf) -> Optional[Match]:
    """Match ``A(gate) * up``, evaluated in the order of the source, except that A may run after up."""
    for act, factor, _, up in gated(value, role):
        if act.form != "call":
            continue
        gate, direct, up_left = factor.node.args[0], factor.place == value.place, up is value.node.left
        if direct and not up_left:
            fresh = is_call(gate, role, *Role.LAYERS, Role.PROJECTION) and is_call(up, role, *Role.LAYERS)
            is_safe = fresh or is_harmless(up, harmless_calls(role, Role.PROJECTION))
        else:  # in place, or before a gate that was computed elsewhere
            is_safe = direct or is_harmless(up, harmless_calls(role, None if up_left else Role.PROJECTION))
        if is_safe:
            pattern = Pattern(gated=True, pointwise=True, up_first=up_left)
            return Match(pattern, (gate, up), (), act, read=factor.read)
    return None


def gated(value: Value, role: RoleOf) -> Iterator[Tuple[Act, Value, Value, ast.expr]]:
    """Yield the activation in a product, the factor that it produces, its argument, and the other factor."""
    if value.half is None and isinstance(value.node, ast.Call) and role(value.node.func) == Role.PRODUCT:
        given = value.node.args
        if len(given) == 2 and not value.node.keywords and not any(isinstance(each, ast.Starred) for each in given):
            yield Act("factor", Role.ACTIVATION, value.node.func), value, value.part(given[0]), given[1]
    if value.half is None and isinstance(value.node, ast.BinOp) and isinstance(value.node.op, ast.Mult):
        left, right = value.node.left, value.node.right
        for first, second in ((left, right), (right, left)):
            factor = value.part(first)
            act, inner = _applied(factor, role)
            if act is not None:
                yield act, factor, inner, second


def _applied(value: Value, role: RoleOf) -> Tuple[Optional[Act], Optional[Value]]:
    """Return the activation that produces a value, and its argument."""
    node = value.node
    found = role(node.func) if value.half is None and isinstance(node, ast.Call) else None
    if found not in Role.ACTIVATIONS:
        return None, None
    arguments, options = node.args[:1], node.args[1:]
    given = [*options, *(word.value for word in node.keywords)]
    if not arguments or isinstance(arguments[0], ast.Starred) or not all(map(is_plain, given)):
        return None, None
    if len(options) > 1 or not {word.arg for word in node.keywords} <= _OPTIONS:
        found = Role.UNKNOWN
    return Act("call", found, node.func, tuple(options), tuple(node.keywords)), value.part(arguments[0])


# Matches of whole methods.


def start_of(function: ast.FunctionDef, role: RoleOf) -> Optional[Start]:
    """Match the projection of the first argument, perhaps after dropouts, that begins a method."""
    arguments = [*function.args.posonlyargs, *function.args.args]
    index = int(ast.get_docstring(function, clean=False) is not None)
    if len(arguments) < 2 or index == len(function.body) or not isinstance(function.body[index], SIMPLE):
        return None
    name, place = arguments[1].arg, Place(function, function.body, index)
    for node in expressions(function.body[index]):
        if is_call(node, role, Role.PROJECTION):
            inner, between = _through(Value(node, place).part(node.args[0]), role)
            if is_name(inner.node, name) and reads_of(name, Place(function, function.body, -1)) == {inner.node}:
                reached = is_reached(node, function.body[index], harmless_calls(role))
                return Start(node, inner.node, node.func, between) if reached else None
    return None


def ending_of(function: ast.FunctionDef, start: Start, role: RoleOf) -> Optional[Ending]:
    """Match the residual sum, perhaps with a norm, that a method of two arguments returns."""
    given = function.args
    names = [argument.arg for argument in (*given.posonlyargs, *given.args)]
    if len(names) != 3 or given.vararg or given.kwonlyargs or given.kwarg or given.defaults:
        return None
    known: Dict[str, Union[str, Ending]] = {names[1]: "given", names[2]: "residual"}

    def computed(node: ast.expr) -> Union[str, Ending, None]:
        if isinstance(node, ast.Name):
            return known.get(node.id)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            left, right = computed(node.left), computed(node.right)
            if left == "residual" and type(right) is tuple:
                return Ending(right)
            return Ending(left) if right == "residual" and type(left) is tuple else None
        if node is start.node:
            return ()
        value = computed(node.args[0]) if is_call(node, role, Role.PASSING, Role.NORM) else None
        if value is not None and role(node.func) == Role.PASSING:
            return (*value, node.func) if type(value) is tuple else value if value == "given" else None
        is_sum = type(value) is Ending and value.norm is None
        return dataclasses.replace(value, norm=node.func) if is_sum else None

    *statements, last = body_of(function)
    for statement in statements:
        target, value = assignment(statement)
        if not isinstance(target, ast.Name) or value is None:
            return None
        known[target.id] = computed(value)
    ending = computed(last.value) if isinstance(last, ast.Return) and last.value is not None else None
    return ending if type(ending) is Ending else None


def returned(function: ast.FunctionDef, role: RoleOf) -> Tuple[Optional[ast.Call], Tuple[ast.expr, ...]]:
    """Return the call whose result a function returns, and the modules and dropouts that pass it on; None if the
    function does anything else."""
    found: Optional[ast.Call] = None
    name, behind = "", []
    *statements, last = body_of(function) or [ast.Pass()]
    for statement in (*statements, last):
        target, value = assignment(statement)
        passing: List[ast.expr] = []
        value = value if isinstance(target, ast.Name) else getattr(statement, "value", None)
        while value is not None and (part := passed_through(value, role)) is not None:
            passing.insert(0, part)
            value = value.args[0]
        is_last = statement is last and isinstance(statement, ast.Return)
        is_next = found is None if isinstance(value, ast.Call) else value is not None and is_name(value, name)
        if not is_next or isinstance(target, ast.Name) == is_last:
            return None, ()
        found, behind = found or value, [*behind, *passing]
        name = target.id if isinstance(target, ast.Name) else ""
    return (found, tuple(behind)) if name == "" else (None, ())
