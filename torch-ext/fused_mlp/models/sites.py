"""Finds MLPs in the source of a function: where the output of a projection goes through an activation.

A site is an expression that one call of ``forwards`` computes, its parts perhaps bound to names in statements before
it. Names are followed only to the one assignment that certainly bound them, and a site is given up wherever taking the
statements together could change what the function computes, or the order in which it calls modules, whatever its
arguments are. What is understood is listed; other syntax is left as it is.
"""

from __future__ import annotations

import ast
import dataclasses
from dataclasses import dataclass
from typing import Callable, Dict, FrozenSet, Iterator, List, Optional, Set, Tuple, Union

from . import casts
from .effects import bound, is_harmless, is_plain, is_reached, uses
from .pattern import Pattern

# What the callee of a call may be. SIGMOID, RELU: activations that forms below are made of. UNKNOWN: an activation that
# is not in the table. PASSING: a module that hands its input on in evaluation; DROPOUT: F.dropout; GLU: F.glu; SQUARE:
# torch.square; ASKING: isinstance; NORM, SCALE: see `norms`; LAYER: another module, with parameters; HEAD: one that
# computes the hidden values of an MLP; TAIL: one that begins with the last projection of an MLP; WHOLE: one that is an
# MLP and no more; OTHER: what is known to be none of these.
PROJECTION, PASSING, DROPOUT, LAYER = "projection", "passing", "dropout", "layer"
HEAD, TAIL, WHOLE, NORM, SCALE = "head", "tail", "whole", "norm", "scale"
LAYERS = (LAYER, HEAD, TAIL, WHOLE, NORM, SCALE)
ACTIVATION, SIGMOID, RELU, UNKNOWN = "activation", "sigmoid", "relu", "unknown activation"
GLU, SQUARE, ASKING, OTHER = "glu", "square", "asking", "other"
ACTIVATIONS = {ACTIVATION, SIGMOID, RELU, UNKNOWN}
Role = Callable[[ast.expr], Optional[str]]

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_SCOPES += (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)

# Statements with an MLP in them, and those with blocks of such.
_SIMPLE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return, ast.Expr)
_COMPOUND = (ast.FunctionDef, ast.If, ast.For, ast.While, ast.With)

# By what a block may be left in its middle, while the function goes on: a context may swallow an exception.
_LEAVING = (ast.Break, ast.Continue, ast.With, ast.AsyncWith, ast.Try, getattr(ast, "TryStar", ast.Try))

_HARMLESS_METHODS = {"chunk", "clamp", "float", "reshape", "to", "view"}  # of tensors: they change nothing
_METHODS = {"relu": RELU, "sigmoid": SIGMOID, "tanh": UNKNOWN}  # of tensors
_OPTIONS = {"call": {"approximate", "inplace"}, "glu": {"dim"}}  # keywords beside the input
_QUICK_SLOPE = 1.702


@dataclass(frozen=True)
class Act:
    """How the source applies an activation to ``h``.

    ``form``: ``call`` is ``callee(h, *options, **named)``, ``method`` is ``h.name()``, ``self-gated`` is
    ``h * callee(slope * h)``, ``glu`` is ``callee(h, *options, **named)``, which halves h; ``squared`` is the square of
    ``call`` or ``method``, as ``base`` says.
    """

    form: str
    role: str
    callee: Optional[ast.expr] = None
    name: str = ""
    slope: float = 1.0
    options: Tuple[ast.expr, ...] = ()
    named: Tuple[ast.keyword, ...] = ()
    base: Optional[Act] = None

    @property
    def parts(self) -> Tuple[ast.expr, ...]:
        """The expressions of the source in it."""
        base = () if self.base is None else self.base.parts
        callee = () if self.callee is None else (self.callee,)
        return (*callee, *self.options, *(word.value for word in self.named), *base)


@dataclass(frozen=True)
class Site:
    """One fused call; all parts are expressions of the source.

    ``between`` are what the hidden values go through before the last projection: modules, probabilities of dropout, or
    functions that cast them (``casts``).
    ``read`` are the names that were followed. The inputs of a pointwise site are gate and up.
    """

    pattern: Pattern
    inputs: Tuple[ast.expr, ...]
    projections: Tuple[ast.expr, ...]
    act: Act
    between: Tuple[ast.expr, ...] = ()
    read: FrozenSet[ast.Name] = frozenset()

    @property
    def parts(self) -> Tuple[ast.expr, ...]:
        return (*self.inputs, *self.projections, *self.act.parts, *self.between)


@dataclass(frozen=True)
class Joint:
    """``tail(head(x), *rest, **named)``: an MLP whose halves are two modules."""

    tail: ast.expr
    head: ast.expr
    x: ast.expr
    rest: Tuple[ast.expr, ...]
    named: Tuple[ast.keyword, ...]
    read: FrozenSet[ast.Name]

    @property
    def parts(self) -> Tuple[ast.expr, ...]:
        """The expressions of the source in it."""
        return (self.tail, self.head, self.x, *self.rest, *(word.value for word in self.named))


@dataclass(frozen=True)
class Start:
    """What the code of a module begins with: ``projection(...(h))`` of its first argument, which nothing else reads."""

    node: ast.Call
    argument: ast.Name
    projection: ast.expr
    between: Tuple[ast.expr, ...]


@dataclass(frozen=True)
class Ending:
    """What the code of a module ends with: ``norm(...(h) + residual)`` of two values that it has, or the sum alone.

    ``behind`` are the modules that pass h on.
    """

    behind: Tuple[ast.expr, ...] = ()
    residual_first: bool = False
    norm: Optional[ast.expr] = None


@dataclass(frozen=True)
class Whole:
    """``module(x)``, of a module that is an MLP and no more."""

    module: ast.expr
    inputs: Tuple[ast.expr, ...]
    read: FrozenSet[ast.Name]

    @property
    def parts(self) -> Tuple[ast.expr, ...]:
        """The expressions of the source in it."""
        return (self.module, *self.inputs)


@dataclass(frozen=True)
class Block:
    """``last(residual + ...(mlp(first(x))) * factor)``, of which a sum must be there, of an MLP in one method.

    ``behind`` is to the sum what ``between`` is to the last projection, and may have a norm or a scale in it. The
    site's own input is what the first norm is given.
    """

    site: Union[Site, Whole]
    behind: Tuple[ast.expr, ...]
    factor: Optional[ast.expr]
    residual: ast.Name
    residual_first: bool
    is_normed: bool
    first: Optional[ast.expr] = None
    last: Optional[ast.expr] = None

    @property
    def read(self) -> FrozenSet[ast.Name]:
        return self.site.read

    @property
    def parts(self) -> Tuple[ast.expr, ...]:
        """The expressions of the source in it."""
        others = (part for part in (self.factor, self.first, self.last) if part is not None)
        return (*self.site.parts, *self.behind, self.residual, *others)


AnySite = Union[Site, Joint, Block]


def rewrite(
    function: ast.FunctionDef, role: Role, wanted: Callable[[AnySite], bool], replacement: Callable[[AnySite], ast.expr]
) -> List[AnySite]:
    """Puts ``replacement(site)`` in the place of every wanted site of ``function``, and returns these sites."""
    sites: List[Site] = []
    local = _bound_in_body(function)
    for block in list(_blocks(function)):
        casts.as_values(block, _asking(role))
        index = len(block) - 1
        while index >= 0:
            place = _Place(function, block, index)
            site, node, absorbed = next(_sites(place, role, wanted), (None, None, ()))
            if site is None:
                index -= 1
                continue
            sites.append(site)
            block[index] = replace(block[index], node, replacement(site))
            for k in sorted(absorbed, reverse=True):
                del block[k]
            index -= len(absorbed)
    _keep_local(function, local - _bound_in_body(function))
    return sites


def replace(holder: ast.AST, old: ast.expr, new: ast.expr) -> ast.AST:
    """The holder with another expression in the place of one in it."""
    return _Replacement(old, new).visit(holder)


def without_passing(holder: ast.AST, role: Role) -> Tuple[ast.AST, List[ast.expr]]:
    """The holder with the arguments of passing modules in the place of their calls; and these modules."""
    taken = _Taken(role)
    return taken.visit(holder), taken.modules


def returned(function: ast.FunctionDef, role: Role) -> Tuple[Optional[ast.Call], Tuple[ast.expr, ...]]:
    """The call whose result a function returns, and what passes it on, modules and dropouts; if that is all it does."""
    found: Optional[ast.Call] = None
    name, behind = "", []
    *statements, last = function.body[int(ast.get_docstring(function, clean=False) is not None) :] or [ast.Pass()]
    for statement in (*statements, last):
        target, value = _assignment(statement)
        passing: List[ast.expr] = []
        value = value if isinstance(target, ast.Name) else getattr(statement, "value", None)
        while value is not None and (part := _between(value, role)) is not None:
            passing.insert(0, part)
            value = value.args[0]
        is_last = statement is last and isinstance(statement, ast.Return)
        is_next = found is None if isinstance(value, ast.Call) else value is not None and _is_name(value, name)
        if not is_next or isinstance(target, ast.Name) == is_last:
            return None, ()
        found, behind = found or value, [*behind, *passing]
        name = target.id if isinstance(target, ast.Name) else ""
    return (found, tuple(behind)) if name == "" else (None, ())


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


@dataclass(frozen=True)
class _Place:
    """A statement, in its block, in its function."""

    function: ast.FunctionDef
    block: List[ast.stmt]
    index: int


@dataclass(frozen=True)
class _Value:
    """An expression, the place where it is evaluated, and the names that were followed to it.

    ``half`` says which half of the expression's last dimension, if not the whole.
    """

    node: ast.expr
    place: _Place
    read: FrozenSet[ast.Name] = frozenset()
    half: Optional[int] = None

    def part(self, node: ast.expr) -> _Value:
        """A part of this expression, followed to where it was bound."""
        return _follow(_Value(node, self.place, self.read))


def _sites(
    place: _Place, role: Role, wanted: Callable[[AnySite], bool]
) -> Iterator[Tuple[AnySite, ast.expr, Set[int]]]:
    """The sites in a statement, the outermost first, and the statements that each takes in."""
    if not isinstance(place.block[place.index], _SIMPLE):
        return
    for node in _expressions(place.block[place.index]):
        for site in _matches(_Value(node, place), role):
            absorbed = _absorbed(site, node, place, role) if wanted(site) else None
            if absorbed is not None:
                yield site, node, absorbed


# Patterns. P is a projection, A an activation.


def _matches(value: _Value, role: Role) -> Iterator[AnySite]:
    """What a value may be, the largest first."""
    yield from _blocks_of(value, role)
    for match in (_joint, _whole, _hidden, _pointwise):
        site = match(value, role)
        if site is not None:
            yield site


def _blocks_of(value: _Value, role: Role) -> Iterator[Block]:
    """``last(residual + ...(whole of first(x)) * factor)``, with or without norms and a factor."""
    last, summed = None, value
    if _is_call(value.node, role, NORM):
        last, summed = value.node.func, value.part(value.node.args[0])
    if summed.half is not None or not (isinstance(summed.node, ast.BinOp) and isinstance(summed.node.op, ast.Add)):
        return
    left, right = summed.node.left, summed.node.right
    for residual, other in ((left, right), (right, left)):
        scaled, factor = _factored(summed.part(other))
        inner, behind, norm = _behind(scaled, role)
        if inner.half is not None or not isinstance(residual, ast.Name) or None not in (norm, last):
            continue
        site, first = _whole(inner, role), inner
        if _is_call(inner.node, role, WHOLE):
            site = Whole(inner.node.func, (inner.node.args[0],), inner.read)
        elif site is None or site.pattern.gated:
            continue
        else:  # the first projection
            hidden, _ = _through(inner.part(inner.node.args[0]), role, inner.node.func)
            _, first = _applied(hidden, role)
        is_normed = last is not None or (norm is not None and role(norm) == NORM)
        block = Block(site, behind, factor, residual, residual is left, is_normed, last=last)
        x = first.part(first.node.args[0])
        if x.half is None and _is_call(x.node, role, NORM):
            normed = dataclasses.replace(site, inputs=(x.node.args[0],), read=site.read | x.read)
            yield dataclasses.replace(block, site=normed, is_normed=True, first=x.node.func)
        yield block


def _factored(value: _Value) -> Tuple[_Value, Optional[ast.expr]]:
    """What is multiplied by an attribute, or by a number, before it is added; and that factor."""
    if value.half is None and isinstance(value.node, ast.BinOp) and isinstance(value.node.op, ast.Mult):
        left, right = value.node.left, value.node.right
        for factor, other, kinds in ((right, left, (ast.Constant, ast.Attribute)), (left, right, ast.Constant)):
            if isinstance(factor, kinds):
                return value.part(other), factor
    return value, None


def _behind(value: _Value, role: Role) -> Tuple[_Value, Tuple[ast.expr, ...], Optional[ast.expr]]:
    """What goes into the modules and dropouts that a value comes out of, and these; which may be one norm or scale."""
    value, outer = _through(value, role)
    if value.half is not None or not _is_call(value.node, role, NORM, SCALE):
        return value, outer, None
    norm = value.node.func
    value, inner = _through(value.part(value.node.args[0]), role)
    return value, (*inner, norm, *outer), norm


def _whole(value: _Value, role: Role) -> Optional[Site]:
    """``P(...(hidden))``"""
    if not _is_call(value.node, role, PROJECTION):
        return None
    last = value.node.func
    value, between = _through(value.part(value.node.args[0]), role, last)
    site = _hidden(value, role)
    if site is None:
        return None
    pattern = dataclasses.replace(site.pattern, whole=True)
    return dataclasses.replace(site, pattern=pattern, projections=(*site.projections, last), between=between)


def _through(value: _Value, role: Role, projection: Optional[ast.expr] = None) -> Tuple[_Value, Tuple[ast.expr, ...]]:
    """What goes into the modules, dropouts, and casts for a projection, that a value comes out of; and these."""
    between: List[ast.expr] = []
    while True:
        part = None if value.half is not None else _between(value.node, role)
        cast = None if projection is None else casts.name_of(value.node, projection, _asking(role))
        if part is not None:
            value = value.part(value.node.args[0])
        elif cast is not None and value.half is None:
            part, read = casts.as_function(value.node), value.read | uses(value.node, cast)
            value = dataclasses.replace(value, read=read).part(value.node.orelse)
        else:
            return value, tuple(between)
        between.insert(0, part)


def _asking(role: Role) -> Callable[[ast.expr], bool]:
    return lambda callee: role(callee) == ASKING


def _joint(value: _Value, role: Role) -> Optional[Joint]:
    """``tail(head(x), ...)``; what the tail is given besides are names, which the head cannot bind anew."""
    node = value.node
    if not (isinstance(node, ast.Call) and node.args and role(node.func) == TAIL):
        return None
    rest, named = tuple(node.args[1:]), tuple(node.keywords)
    given = [*rest, *(word.value for word in named)]
    if any(word.arg is None for word in named) or not all(isinstance(each, (ast.Name, ast.Constant)) for each in given):
        return None
    inner = value.part(node.args[0])
    if inner.half is not None or not _is_call(inner.node, role, HEAD):
        return None
    return Joint(node.func, inner.node.func, inner.node.args[0], rest, named, inner.read)


def start_of(function: ast.FunctionDef, role: Role) -> Optional[Start]:
    """What a method begins with, if that is a projection of its first argument, or of what comes out of dropouts."""
    arguments = [*function.args.posonlyargs, *function.args.args]
    index = int(ast.get_docstring(function, clean=False) is not None)
    if len(arguments) < 2 or index == len(function.body) or not isinstance(function.body[index], _SIMPLE):
        return None
    name, place = arguments[1].arg, _Place(function, function.body, index)
    for node in _expressions(function.body[index]):
        if _is_call(node, role, PROJECTION):
            inner, between = _through(_Value(node, place).part(node.args[0]), role)
            if _is_name(inner.node, name) and _reads(name, _Place(function, function.body, -1)) == {inner.node}:
                reached = is_reached(node, function.body[index], _harmless_calls(role))
                return Start(node, inner.node, node.func, between) if reached else None
    return None


def ending_of(function: ast.FunctionDef, start: Start, role: Role) -> Optional[Ending]:
    """How a method with two arguments goes on behind its start, if that and nothing else is what it computes."""
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
                return Ending(right, True)
            return Ending(left) if right == "residual" and type(left) is tuple else None
        if node is start.node:
            return ()
        value = computed(node.args[0]) if _is_call(node, role, PASSING, NORM) else None
        if value is not None and role(node.func) == PASSING:
            return (*value, node.func) if type(value) is tuple else value if value == "given" else None
        is_sum = type(value) is Ending and value.norm is None
        return dataclasses.replace(value, norm=node.func) if is_sum else None

    *statements, last = function.body[int(ast.get_docstring(function, clean=False) is not None) :]
    for statement in statements:
        target, value = _assignment(statement)
        if not isinstance(target, ast.Name) or value is None:
            return None
        known[target.id] = computed(value)
    ending = computed(last.value) if isinstance(last, ast.Return) and last.value is not None else None
    return ending if type(ending) is Ending else None


def _hidden(value: _Value, role: Role) -> Optional[Site]:
    """``A(P(x))``, ``A(P(x)) * P(x)``, ``A(half) * other_half`` of ``P(x)``, ``glu(P(x))``"""
    act, inner = _applied(value, role)
    if act is not None and inner.half is None and _is_call(inner.node, role, PROJECTION):
        halves = {"gated": True, "packed": True, "up_first": True} if act.form == "glu" else {}
        return Site(Pattern(**halves), (inner.node.args[0],), (inner.node.func,), act, read=inner.read)
    for act, factor, gate, other in _gated(value, role):
        up = value.part(other)
        if not (_is_call(gate.node, role, PROJECTION) and _is_call(up.node, role, PROJECTION)):
            continue
        x, read = gate.node.args[0], gate.read | up.read
        if gate.node is up.node and {gate.half, up.half} == {0, 1}:
            pattern = Pattern(gated=True, packed=True, up_first=gate.half == 1)
            return Site(pattern, (x,), (gate.node.func,), act, read=read)
        same_x = isinstance(x, ast.Name) and _is_name(up.node.args[0], x.id)
        if gate.half is None and up.half is None and same_x and gate.node is not up.node:
            sides = (0, 1) if other is value.node.right else (1, 0)
            gate_turn, act_turn = (gate.place.index, sides[0]), (factor.place.index, sides[0])
            up_turn = (up.place.index, sides[1])
            pattern = Pattern(
                gated=True,
                up_first=up_turn < gate_turn,
                act_last=up_turn < act_turn,
                up_left=other is value.node.left,
            )
            return Site(pattern, (x,), (gate.node.func, up.node.func), act, read=read)
    return None


def _pointwise(value: _Value, role: Role) -> Optional[Site]:
    """``A(gate) * up``, computed in the order of the source, but that A may wait for up."""
    for act, factor, _, up in _gated(value, role):
        if act.form != "call":
            continue
        gate, direct, up_left = factor.node.args[0], factor.place == value.place, up is value.node.left
        if direct and not up_left:
            fresh = _is_call(gate, role, *LAYERS, PROJECTION)
            is_safe = is_harmless(up, _harmless_calls(role, PROJECTION)) or (fresh and _is_call(up, role, *LAYERS))
        else:  # in its place, or before a gate that was computed elsewhere
            is_safe = direct or is_harmless(up, _harmless_calls(role, None if up_left else PROJECTION))
        if is_safe:
            pattern = Pattern(gated=True, pointwise=True, up_first=up_left)
            return Site(pattern, (gate, up), (), act, read=factor.read)
    return None


def _gated(value: _Value, role: Role) -> Iterator[Tuple[Act, _Value, _Value, ast.expr]]:
    """The activation in a product, the factor that it is, what it is applied to, and the other factor."""
    if value.half is None and isinstance(value.node, ast.BinOp) and isinstance(value.node.op, ast.Mult):
        left, right = value.node.left, value.node.right
        for first, second in ((left, right), (right, left)):
            factor = value.part(first)
            act, inner = _applied(factor, role)
            if act is not None and act.form != "glu":
                yield act, factor, inner, second


def _applied(value: _Value, role: Role) -> Tuple[Optional[Act], Optional[_Value]]:
    """The activation that gives a value, and what it is applied to."""
    node = value.node
    if value.half is None and isinstance(node, ast.Call):
        found = role(node.func)
        if found in ACTIVATIONS or found == GLU:
            form = "glu" if found == GLU else "call"
            arguments, options = node.args[:1], node.args[1:]
            given = [*options, *(word.value for word in node.keywords)]
            if not arguments or isinstance(arguments[0], ast.Starred) or not all(map(is_plain, given)):
                return None, None
            if len(options) > 1 or not {word.arg for word in node.keywords} <= _OPTIONS[form]:
                found = UNKNOWN
            act = Act(form, found, node.func, options=tuple(options), named=tuple(node.keywords))
            return act, value.part(arguments[0])
        if found is None and not node.args and not node.keywords and isinstance(node.func, ast.Attribute):
            name = node.func.attr
            if name in _METHODS:
                return Act("method", _METHODS[name], name=name), value.part(node.func.value)
    return _squared(value, role) if value.half is None else (None, None)


def _squared(value: _Value, role: Role) -> Tuple[Optional[Act], Optional[_Value]]:
    """``A(h).square()`` and its spellings, and ``h * sigmoid(h)``"""
    node, base = value.node, None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow) and _is_number(node.right, 2):
        base = node.left
    elif _is_call(node, role, SQUARE):
        base = node.args[0]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not node.keywords:
        arguments = {"square": 0, "pow": 1}.get(node.func.attr)
        if len(node.args) == arguments and all(_is_number(each, 2) for each in node.args):
            base = node.func.value
    if base is not None:
        act, inner = _applied(value.part(base), role)
        if act is not None and act.role == RELU and act.form in ("call", "method"):
            return Act("squared", ACTIVATION, base=act), inner
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        for first, second in ((node.left, node.right), (node.right, node.left)):
            gate, other = value.part(first), value.part(second)
            if gate.half is not None or not _is_call(gate.node, role, SIGMOID):
                continue
            scaled, slope = _scaled(gate.node.args[0])
            inner = gate.part(scaled)
            if inner.node is other.node and inner.half == other.half and slope in (1.0, _QUICK_SLOPE):
                act = Act("self-gated", ACTIVATION, gate.node.func, slope=slope)
                return act, dataclasses.replace(inner, read=inner.read | other.read)
    return None, None


def _scaled(node: ast.expr) -> Tuple[ast.expr, float]:
    """``h`` and ``c`` of ``c * h``."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        for first, second in ((node.left, node.right), (node.right, node.left)):
            if isinstance(first, ast.Constant) and isinstance(first.value, float):
                return second, first.value
    return node, 1.0


def _between(node: ast.expr, role: Role) -> Optional[ast.expr]:
    """A module that the hidden values go through, or the probability of a dropout that is a function."""
    if _is_call(node, role, PASSING):
        return node.func
    if not (isinstance(node, ast.Call) and node.args and role(node.func) == DROPOUT):
        return None
    given = [*zip(("input", "p", "training"), node.args), *((word.arg, word.value) for word in node.keywords)]
    named = dict(given)
    if len(given) != 3 or named.keys() != {"input", "p", "training"}:
        return None
    if not all(is_harmless(named[name], _harmless_calls(role)) for name in ("p", "training")):
        return None
    return ast.IfExp(named["training"], named["p"], ast.Constant(0.0))


def _is_call(node: ast.expr, role: Role, *wanted: str) -> bool:
    if not isinstance(node, ast.Call) or len(node.args) != 1 or node.keywords or role(node.func) not in wanted:
        return False
    return not isinstance(node.args[0], ast.Starred)


# Names and what they were bound to.


def _follow(value: _Value) -> _Value:
    """The expression that a name, or half of a chunked tensor, stands for; the value itself where that is not sure."""
    node, place, half = value.node, value.place, None
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and node.slice.value in (0, 1):
        node, half = node.value, node.slice.value
    if not isinstance(node, ast.Name):
        return value
    for index in range(place.index - 1, -1, -1):
        statement = place.block[index]
        if node.id not in bound(statement):
            continue
        target, given = _assignment(statement)
        there, read = _Place(place.function, place.block, index), value.read | {node}
        if isinstance(target, ast.Tuple) and half is None and len(target.elts) == 2:
            half = next((k for k in (0, 1) if _is_name(target.elts[k], node.id)), None)
            if half is None:
                return value
        elif given is None or not _is_name(target, node.id):
            return value
        if half is None:
            return _follow(_Value(given, there, read))
        source = _chunked(given)
        whole = None if source is None else _follow(_Value(source, there, read))
        return value if whole is None or whole.half is not None else _Value(whole.node, whole.place, whole.read, half)
    return value


def _chunked(node: ast.expr) -> Optional[ast.expr]:
    """The tensor of ``tensor.chunk(2, dim=-1)`` or ``torch.chunk(tensor, 2, dim=-1)``."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "chunk"):
        return None
    tensor, sizes = node.func.value, list(node.args)
    if _is_name(tensor, "torch") and sizes:
        tensor = sizes.pop(0)
    given = [*zip(("chunks", "dim"), sizes), *((word.arg, word.value) for word in node.keywords)]
    named = {name: ast.unparse(size) for name, size in given}
    return tensor if len(given) == 2 and named == {"chunks": "2", "dim": "-1"} else None


def _absorbed(site: AnySite, node: ast.expr, place: _Place, role: Role) -> Optional[Set[int]]:
    """The statements that a site makes superfluous; None if it must not be where it is, or they are needed."""
    if any(isinstance(each, _BINDING) for part in site.parts for each in ast.walk(part)):
        return None
    absorbed, served, followed = set(), set(), {name.id for name in site.read}
    for index in range(place.index):
        there = _Place(place.function, place.block, index)
        reads = {name: _reads(name, there) for name in bound(place.block[index])}
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
            if not is_harmless(statement, _harmless_calls(role)) or needed & bound(statement):
                return None
    return absorbed if is_reached(node, place.block[place.index], _harmless_calls(role)) else None


def _reads(name: str, place: _Place) -> Optional[Set[ast.Name]]:
    """Where the value that a statement gives to a name may be read; None if that cannot be told."""
    for scope in ast.walk(place.function):
        if isinstance(scope, _SCOPES) and scope is not place.function and uses(scope, name):
            return None
    inner = place.block is not place.function.body
    is_left = inner and any(isinstance(part, _LEAVING) for part in ast.walk(place.function))
    later: List[ast.stmt] = []
    for statement in place.block[place.index + 1 :]:
        later.append(statement)
        target, given = _assignment(statement)
        if given is not None and name in bound(target) and not is_left:
            break  # what is read in the value comes first
    else:
        if inner and not _used(name, _after_block(place.function.body, place.block)) <= _used(name, later):
            return None
    return _used(name, later)


def _used(name: str, statements: List[ast.stmt]) -> Set[ast.Name]:
    return set().union(*(uses(statement, name) for statement in statements))


def _after_block(statements: List[ast.stmt], block: List[ast.stmt]) -> Optional[List[ast.stmt]]:
    """What may run after a block that is in one of the statements; None if it is in none of them.

    That is what is behind the statements that hold it, and a whole loop, for its next turn.
    """
    if statements is block:
        return []
    for index, statement in enumerate(statements):
        for _, field in ast.iter_fields(statement):
            after = _after_block(field, block) if isinstance(field, list) else None
            if after is not None:
                loop = [statement] if isinstance(statement, (ast.For, ast.AsyncFor, ast.While)) else []
                return [*loop, *after, *statements[index + 1 :]]
    return None


def _assignment(statement: ast.stmt) -> Tuple[Optional[ast.expr], Optional[ast.expr]]:
    """Target and value of a statement that is one assignment."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        return statement.targets[0], statement.value
    if isinstance(statement, ast.AnnAssign):
        return statement.target, statement.value
    return None, None


_BINDING = (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)


def _harmless_calls(role: Role, also: Optional[str] = None) -> Callable[[ast.expr], bool]:
    """Tells calls of methods of tensors, and of what has the role ``also``, by their callees."""

    def tells(callee: ast.expr) -> bool:
        found = role(callee)
        of_tensor = found is None and isinstance(callee, ast.Attribute) and callee.attr in _HARMLESS_METHODS
        return of_tensor or (also is not None and found == also)

    return tells


# The tree.


def _blocks(node: ast.AST) -> Iterator[List[ast.stmt]]:
    """The lists of statements of a function, but not of functions inside it."""
    for _, field in ast.iter_fields(node):
        if isinstance(field, list) and field and isinstance(field[0], ast.stmt):
            yield field
            for child in field:
                if isinstance(child, _COMPOUND) and not isinstance(child, _SCOPES):
                    yield from _blocks(child)


def _expressions(node: ast.AST) -> Iterator[ast.expr]:
    """The expressions of a statement itself, from the outside in."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr) and not isinstance(child, _SCOPES):
            yield child
            yield from _expressions(child)
        elif isinstance(child, ast.keyword):
            yield from _expressions(child)


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _is_number(node: ast.expr, number: int) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) in (int, float) and node.value == number


class _Replacement(ast.NodeTransformer):
    def __init__(self, old: ast.expr, new: ast.expr) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self.new if node is self.old else self.generic_visit(node)


class _Taken(ast.NodeTransformer):
    def __init__(self, role: Role) -> None:
        self.role, self.modules = role, []

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if not _is_call(node, self.role, PASSING):
            return node
        self.modules.append(node.func)
        return node.args[0]
