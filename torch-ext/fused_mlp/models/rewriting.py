"""Methods made anew with fused calls in the place of MLPs, everything else in them as it was written.

A rewritten method computes what its original computes, for any arguments and in any state of the module: a fused call
reads the parts that the original reads, and decides from what they are then how far to fuse.
"""

from __future__ import annotations

import ast
import copy
import functools
import itertools
from dataclasses import dataclass, field, replace
from types import CellType, FunctionType, MethodType
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..activations import Activation
from ..dispatch import is_small_product
from ..training import KEPT
from . import effects, forms, forwards, halves, norms, obstacles, sequences, shortcut, substitution, switching, traced
from .interface import original_of
from .matches import ending_of, returned, start_of
from .pattern import Pattern
from .recognition import looks_like_activation, name_of, recognise
from .roles import Role, RoleOf
from .sites import Act, AnySite, Block, Joint, Site, Whole
from .source import ORIGINAL, Instead, function_of, value_of, values_of

_SITES = "_fused_mlp_sites"  # the attribute of a rewritten function that holds its sites
_MEMORY = "_fused_mlp_memory"  # and the one that says what training keeps
_made: Set[FunctionType] = set()  # functools.wraps copies attributes: they do not tell a rewritten function


@dataclass(frozen=True)
class FoundMLP:
    """An MLP of a module, or what there is of one: its parts as they are now, by the names they have there.

    ``halves`` are the two modules that hold the parts, if the module itself does not; each with what keeps its call
    from being skipped, or None. ``around`` says what else of its block is in the call.
    """

    pattern: Pattern
    projections: Dict[str, nn.Module]
    act: Optional[Callable]
    between: Dict[str, Any]
    halves: Dict[str, Optional[str]] = field(default_factory=dict)
    around: str = ""

    @property
    def activation(self) -> Optional[Activation]:
        """The row of the table that the activation computes now, or None."""
        return None if self.act is None else forms.row_of(self.act)


def fused_methods(module: nn.Module, memory: str = "activations") -> Tuple[Dict[str, FunctionType], List[Any]]:
    """The methods of a module with MLPs in them, fused; and the activations in MLPs that are not known."""
    methods = _functions(type(module))
    if methods.get("forward") is nn.Sequential.forward:
        if _mlps_in_sequence(module):
            return {"forward": sequences.SEQUENTIAL[memory]}, []
        return {}, _unknown_in_sequence(module)
    parts = {name: role_of(part) for name, part in {**vars(module), **module._modules}.items()}
    wanted = {name for name, role in parts.items() if role in _WANTED}
    has_layers = not {Role.PROJECTION, *Role.LAYERS}.isdisjoint(parts.values())
    # Experts hold their weights themselves, stacked. They are fused as a whole (``mixtures``), or left: where they run
    # one by one, each has so few rows that a call of a kernel between its products takes longer than it saves.
    stacked = any(map(_is_stacked, module._parameters.values())) and original_of(methods.get("forward")) is None
    made, unknown = {}, {}
    for name, function in methods.items() if wanted and (has_layers or stacked) else ():
        if not has_layers and _has_loop(function):
            continue
        if stacked or wanted.intersection(function.__code__.co_names):
            callees = {text: values_of(node, function, module) for text, node in _callees(function).items()}
            rewritten, left = _rewritten(function, name, _roles(callees), memory)
            made.update({name: rewritten} if rewritten is not None else {})
            unknown.update({name_of(act): act for act in (_act_of(act, function, module) for act in left)})
    return made, list(unknown.values())


def is_fused(function: Any) -> bool:
    """Whether a function is one that :func:`fused_methods` makes."""
    return function in sequences.SEQUENTIAL.values() or function in _made


def memory_of(function: FunctionType) -> str:
    """What training keeps in a fused method."""
    return "recompute" if function is sequences.sequential_recomputed else getattr(function, _MEMORY, "activations")


def mlps_in(function: FunctionType, module: nn.Module) -> List[FoundMLP]:
    """What a fused method fuses of its module."""
    if function in sequences.SEQUENTIAL.values():
        return _mlps_in_sequence(module)
    found, original = [], getattr(function, ORIGINAL)
    for site in getattr(function, _SITES):
        if isinstance(site, Joint):
            found += _mlps_across(site, original, module)
            continue
        around = ""
        if isinstance(site, Block):
            around, site = _around(True, site.is_normed), site.site
        if isinstance(site, Whole):
            continue  # the module's own
        act = _act_of(site.act, original, module)
        between = {_name(node): _between(node, original, module) for node in site.between}
        projections = [list(values_of(node, original, module).items()) for node in site.projections]
        for turn in range(max(map(len, projections), default=1)):  # of a loop
            now = dict(parts[min(turn, len(parts) - 1)] for parts in projections)
            found.append(FoundMLP(site.pattern, now, act, between, around=around))
    return found


def _around(is_summed: bool, is_normed: bool) -> str:
    return (" with residual and norm" if is_normed else " with residual") if is_summed else ""


def role_of(part: Any) -> Optional[str]:
    """What a part of a module may be in a site."""
    if part is None:
        return None
    if isinstance(part, nn.ModuleList):  # that of all its parts
        return role_of(part[0]) if len(part) and len({role_of(each) for each in part}) == 1 else Role.OTHER
    if isinstance(part, nn.Module):
        return _role_of_module(part)
    if not isinstance(part, (FunctionType, MethodType, type(torch.relu))):
        return Role.OTHER
    role = _ROLES.get(part)
    if role is None:
        activation = recognise(part)
        if activation is not None:
            return _BY_ROW.get(activation.name, Role.ACTIVATION)
        role = Role.UNKNOWN if looks_like_activation(part) else Role.OTHER
    return role


def _role_of_module(part: nn.Module) -> str:
    if isinstance(part, (nn.Dropout, nn.Identity)):
        return Role.PASSING
    if type(part) is nn.GLU:
        return Role.GLU
    code = norms.code_of(type(part))
    if code is not None and code != norms.SCALE:
        return Role.NORM
    activation = recognise(part)
    if activation is not None:
        return Role.RELU if activation.name == "relu" else Role.ACTIVATION
    if looks_like_activation(part):
        return Role.UNKNOWN
    if "in_features" in vars(part) or hasattr(type(part), "in_features") or obstacles.of_projection(part) is None:
        return Role.PROJECTION
    if code is not None:
        return Role.SCALE
    return _role_of_layer(part) if next(part.parameters(), None) is not None else Role.OTHER


def _role_of_layer(part: nn.Module) -> str:
    """Whether a layer is half of an MLP: by its forward, if it has a projection itself."""
    forward = getattr(type(part), "forward", None)  # none of what TorchScript has compiled
    if not isinstance(forward, FunctionType):
        return Role.LAYER
    if all(obstacles.of_projection(child) is not None for child in part.children()):
        return Role.LAYER
    forward = getattr(forward, ORIGINAL) if forward in _made else forward
    callees = {text: values_of(node, forward, part) for text, node in _callees(forward).items()}
    return _half(forward, _roles(callees))


_WANTED = {Role.PROJECTION, Role.HEAD, Role.WHOLE, *Role.ACTIVATIONS}
_BY_ROW = {"relu": Role.RELU, "sigmoid": Role.SIGMOID}
_ROLES = {F.dropout: Role.DROPOUT, F.glu: Role.GLU, torch.square: Role.SQUARE, isinstance: Role.ASKING}


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
    tree = effects.readable(function)
    calls = [] if tree is None else [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return {ast.unparse(node): node for node in calls if isinstance(node, (ast.Name, ast.Attribute))}


def _roles(callees: Dict[str, Dict[str, Any]]) -> Tuple[Tuple[str, str], ...]:
    """What callees may be in a site, where all their values are alike."""
    roles = {text: {role_of(value) for value in values.values()} for text, values in callees.items()}
    return tuple((text, *alike) for text, alike in roles.items() if len(alike) == 1 and None not in alike)


@functools.cache
def _has_loop(function: FunctionType) -> bool:
    tree = effects.readable(function)
    return tree is not None and any(isinstance(node, (ast.For, ast.While)) for node in ast.walk(tree))


@functools.cache
def _rewritten(
    function: FunctionType, name: str, roles: Tuple[Tuple[str, str], ...], memory: str
) -> Tuple[Optional[FunctionType], Tuple[Act, ...]]:
    """The function with its MLPs fused, if it has any; and the activations in it that are not known.

    The outcome depends on nothing else but what its callees are, so that the layers of a model share it.
    """
    if _WANTED.isdisjoint(kind for _, kind in roles):
        return None, ()
    tree, role = copy.deepcopy(effects.readable(function)), _role_by_text(roles)

    def is_known(site: AnySite) -> bool:
        site = site.site if isinstance(site, Block) else site
        if not isinstance(site, Site):
            return True
        if site.act.role == Role.SIGMOID:
            return site.pattern.whole or (site.pattern.gated and not site.pattern.pointwise)  # others gate attention
        return site.act.role != Role.UNKNOWN

    def is_unknown(site: AnySite) -> bool:
        return isinstance(site, Site) and site.act.role == Role.UNKNOWN and not site.pattern.pointwise

    found = substitution.rewrite(tree, role, is_known, functools.partial(_call, memory, function))
    left = substitution.rewrite(copy.deepcopy(tree), role, is_unknown, lambda site: ast.Constant(None))
    made = None
    if found:
        computed = [site.site if isinstance(site, Block) else site for site in found]
        patterns = [site.pattern for site in computed if isinstance(site, Site)]
        names = {**_NAMES, **{_name_of_pattern(each): replace(each, memory=memory) for each in patterns}}
        head = _head(tree, function, found, names, role) if name == "forward" else None
        whole = _whole(tree, function, found, role) if name == "forward" else None
        other = switching.instead_of(name, function, function)
        # A block's MLP may be a module of its own, of any kind.
        gated = any(pattern.gated for pattern in patterns) or any(isinstance(site, Block) for site in found)
        runs_as_written = shortcut.plain.runs_as_written if shortcut.plain is not None and memory == KEPT else None
        instead = Instead(switching.FUSED, name, function, other, _TRACED, memory, runs_as_written, gated)
        made = function_of(tree, function, names, instead)
        setattr(made, _SITES, tuple(found))
        setattr(made, _MEMORY, memory)
        made.__name__ = name  # by which a bound method is pickled
        _made.add(made)
        if head is not None:
            halves.heads[function] = halves.heads[made] = head
        if whole is not None:
            halves.wholes[made] = whole
    return made, tuple(site.act for site in left)


def _role_by_text(roles: Tuple[Tuple[str, str], ...]) -> RoleOf:
    named = dict(roles)
    return lambda node: named.get(ast.unparse(node)) if isinstance(node, (ast.Name, ast.Attribute)) else None


def _call(memory: str, function: FunctionType, site: AnySite) -> ast.expr:
    if isinstance(site, Joint):
        return _joined(memory, site)
    if isinstance(site, Block):
        return _block(function, site)
    act = _act(site.act)
    if site.pattern.pointwise:
        gate, up = site.inputs
        waiting = _made_call("activated", gate, act)
        return _made_call("product", *((up, waiting) if site.pattern.up_first else (waiting, up)))
    return _by_names("fused", function, _arguments(site), {2, 3, 4})


def _arguments(site: Site) -> List[ast.expr]:
    projections, between = (ast.Tuple(list(parts), ast.Load()) for parts in (site.projections, site.between))
    pattern = ast.Name(_name_of_pattern(site.pattern), ast.Load())
    return [pattern, *site.inputs, projections, _act(site.act), between]


def _joined(memory: str, site: Joint) -> ast.expr:
    halves = (site.tail, site.head)
    owners = {ast.unparse(half.value) if isinstance(half, ast.Attribute) else None for half in halves}
    name, given = "joined", halves
    if len(owners) == 1 and isinstance(owner := getattr(site.tail, "value", None), ast.Name):
        name, given = "joined children", (owner, ast.Constant(tuple(half.attr for half in halves)))
    return _made_call(name, ast.Constant(memory), *given, site.x, *site.rest, named=site.named)


def _block(function: FunctionType, block: Block) -> ast.expr:
    """The call of what computes the MLP, with what is around it behind its own arguments."""
    none = ast.Constant(None)
    around = [ast.Tuple(list(block.behind), ast.Load()), block.factor or ast.Constant(1.0), block.residual]
    around += [ast.Constant(block.residual_first), block.first or none, block.last or none]
    if isinstance(block.site, Whole):
        return _by_names("block of a module", function, [*block.site.parts, *around], {0, 2, 6, 7})
    return _by_names("block", function, [*_arguments(block.site), *around], {2, 3, 4, 5, 9, 10})


def _by_names(name: str, function: FunctionType, arguments: List[ast.expr], places: Set[int]) -> ast.expr:
    """A call with names in the place of attributes of the method's first argument; that, and all names, come last."""
    owner, names = function.__code__.co_varnames[0], {}

    def named(node: ast.expr) -> ast.expr:
        if isinstance(node, ast.Tuple):
            return ast.Tuple([named(each) for each in node.elts], ast.Load())
        if not isinstance(node, ast.Attribute) or ast.unparse(node.value) != owner:
            return node
        names[node.attr] = ast.Name(owner, ast.Load())
        return ast.Constant(node.attr)

    given = [named(node) if place in places else node for place, node in enumerate(arguments)]
    return _made_call(name, *given, next(iter(names.values()), ast.Constant(None)), ast.Constant((*names,)))


def _act(act: Act) -> ast.expr:
    """What gives the activation as a callable of one tensor."""
    if act.form == "call" and not act.options and not act.named:
        return act.callee
    if act.form == "method":
        return _made_call("method", ast.Constant(act.name))
    if act.form == "squared":
        return _made_call("squared", _act(act.base))
    if act.form == "self-gated":
        return _made_call("self-gated", act.callee, ast.Constant(act.slope))
    return _made_call(act.form, act.callee, *act.options, named=act.named)


def _name_of_pattern(pattern: Pattern) -> str:
    return f"@{pattern!r}"


def _made_call(name: str, *arguments: ast.expr, named: Tuple[ast.keyword, ...] = ()) -> ast.expr:
    return ast.Call(ast.Name(f"@{name}", ast.Load()), list(arguments), list(named))


# Halves of MLPs.


@functools.cache
def _half(forward: FunctionType, roles: Tuple[Tuple[str, str], ...]) -> str:
    """The role of modules with this forward, and these callees in it. What a half hands over, or takes, is made."""
    if effects.readable(forward) is None or Role.PROJECTION not in dict(roles).values():
        return Role.LAYER
    made, _ = _rewritten(forward, "forward", roles, "activations")
    if made is not None:
        whole = Role.WHOLE if made in halves.wholes else Role.LAYER
        return Role.HEAD if halves.heads.get(made) is not None else whole
    tree, role = copy.deepcopy(effects.readable(forward)), _role_by_text(roles)
    start = start_of(tree, role)
    if start is None:
        return Role.LAYER
    finished = _made_call("finished", start.argument, start.projection, ast.Tuple(list(start.between), ast.Load()))
    whole, node, rest, same_node = copy.deepcopy((tree, start.node)) + copy.deepcopy((tree, start.node))
    function = function_of(substitution.replace(whole, node, finished), forward, _NAMES)
    rest, behind = substitution.without_passing(
        substitution.replace(rest, same_node, copy.deepcopy(start.argument)), role
    )
    ending = ending_of(tree, start, role)
    norm = () if ending is None or ending.norm is None else (ending.norm,)
    names = _children((start.projection, *start.between, *behind, *norm), forward)
    ends = None if ending is None else bool(norm)
    halves.tails[forward] = halves.Half(forward, names, ends, start, function, function_of(rest, forward, {}))
    return Role.TAIL


def _head(
    tree: ast.FunctionDef, forward: FunctionType, found: List[AnySite], names: Dict[str, Any], role: RoleOf
) -> Optional[halves.Half]:
    """What a forward that was rewritten hands over as a head; None if it is none: it does more than one fused call."""
    site, arguments = found[0], [*tree.args.posonlyargs, *tree.args.args]
    call, behind = returned(tree, role)
    is_hidden = isinstance(site, Site) and not (site.pattern.pointwise or site.pattern.whole)
    if not is_hidden or call is None or behind or ast.unparse(call.func) != "@fused" or len(arguments) != 2:
        return None
    if ast.unparse(site.inputs[0]) != arguments[1].arg:
        return None
    tree = copy.deepcopy(tree)
    tree.body = [ast.copy_location(ast.Return(copy.deepcopy(call)), tree.body[-1])]
    whole = {_name_of_pattern(site.pattern): replace(site.pattern, whole=True), "@fused": halves.pending}
    called = (site.act.callee,) if site.act.form == "call" and not (site.act.options or site.act.named) else ()
    parts = _children((*called, *site.projections), forward) if called else None
    own = None if parts is None else (whole[_name_of_pattern(site.pattern)], parts)
    return halves.Half(forward, own, None, site, function_of(tree, forward, {**names, **whole}))


def _whole(tree: ast.FunctionDef, forward: FunctionType, found: List[AnySite], role: RoleOf) -> Optional[halves.Half]:
    """The MLP that a forward that was rewritten is, if it does no more than one fused call of linear layers, and may
    pass its result on."""
    site, arguments = found[0], [*tree.args.posonlyargs, *tree.args.args]
    call, behind = returned(tree, role)
    is_mlp = isinstance(site, Site) and site.pattern.whole and site.act.form == "call"
    if not is_mlp or call is None or ast.unparse(call.func) != "@fused" or len(arguments) != 2:
        return None
    if ast.unparse(site.inputs[0]) != arguments[1].arg or site.act.options or site.act.named:
        return None
    passing = (*site.between, *behind)
    casts = [forwards.cast for node in passing if isinstance(node, ast.Lambda)]
    dropouts = [node for node in passing if isinstance(node, ast.IfExp)]
    modules = [node for node in passing if not isinstance(node, (ast.Lambda, ast.IfExp))]
    parts = _children((site.act.callee, *site.projections, *modules), forward)
    if parts is None or any(_children((node.test,), forward) != ("training",) for node in dropouts):
        return None
    return halves.Half(forward, (site.pattern, (*parts, *casts), len(site.projections), bool(dropouts)), None, site)


def _children(nodes: Sequence[ast.expr], function: FunctionType) -> Optional[Tuple[str, ...]]:
    """The names of what nodes stand for, where all are attributes of the first argument."""
    first = function.__code__.co_varnames[0]
    plain = all(isinstance(node, ast.Attribute) and ast.unparse(node.value) == first for node in nodes)
    return tuple(node.attr for node in nodes) if plain else None


def _mlps_across(joint: Joint, function: FunctionType, module: nn.Module) -> List[FoundMLP]:
    """The MLPs that pairs of modules hold, which a method calls one after the other."""
    pairs = [list(values_of(node, function, module).items()) for node in (joint.head, joint.tail)]
    turns = range(max(map(len, pairs)) if all(pairs) else 0)  # of a loop
    return [_mlp_across(*(parts[min(turn, len(parts) - 1)] for parts in pairs)) for turn in turns]


def _mlp_across(named_head: Tuple[str, Any], named_tail: Tuple[str, Any]) -> FoundMLP:
    (head_name, head), (tail_name, tail) = named_head, named_tail
    first, last = halves.running(head, halves.heads), halves.running(tail, halves.tails)
    words = {head_name: first, tail_name: last}
    words = {name: known if isinstance(known, str) else None for name, known in words.items()}
    if any(words.values()):
        return FoundMLP(forwards.PLAIN, {}, None, {}, words)
    site, start = first.found, last.found

    def parts(name: str, half: nn.Module, forward: FunctionType, node: ast.expr) -> Dict[str, Any]:
        return {f"{name}.{path}": part for path, part in values_of(node, forward, half).items()}

    projections: Dict[str, Any] = {}
    for node in site.projections:
        projections.update(parts(head_name, head, first.forward, node))
    projections.update(parts(tail_name, tail, last.forward, start.projection))
    between = {f"{tail_name}.{_name(node)}": _between(node, last.forward, tail) for node in start.between}
    act, pattern = _act_of(site.act, first.forward, head), replace(site.pattern, whole=True)
    return FoundMLP(
        pattern,
        projections,
        act,
        between,
        words,
        _around(last.ending is not None, bool(last.ending)),
    )


# What was found.


def _mlps_in_sequence(module: nn.Sequential) -> List[FoundMLP]:
    found, parts = [], list(module._modules.items())
    for index in range(len(parts) - 1):
        (name, first), (_, act) = parts[index : index + 2]
        if role_of(first) != Role.PROJECTION or recognise(act) is None:
            continue
        rest = parts[index + 2 :]
        passing = list(itertools.takewhile(lambda item: role_of(item[1]) == Role.PASSING, rest))
        last, *after = rest[len(passing) :][:2] or [(None, None)]
        if role_of(last[1]) == Role.PROJECTION and not any(recognise(part) for _, part in after):
            found.append(FoundMLP(forwards.PLAIN, dict([(name, first), last]), act, dict(passing)))
        else:
            found.append(FoundMLP(forwards.LINEAR, {name: first}, act, {}))
    return found


def _unknown_in_sequence(module: nn.Sequential) -> List[nn.Module]:
    """The activations that are not known, behind projections."""
    pairs = zip(module._modules.values(), list(module._modules.values())[1:])
    unknown = (act for first, act in pairs if (role_of(first), role_of(act)) == (Role.PROJECTION, Role.UNKNOWN))
    return list({type(act): act for act in unknown}.values())


def _act_of(act: Act, function: FunctionType, module: nn.Module) -> Callable[[Tensor], Tensor]:
    """The activation of a site as it is now."""
    return _evaluated(_act(act), function, module)


def _evaluated(node: ast.expr, function: FunctionType, module: nn.Module) -> Any:
    """What an expression of :func:`_act` makes. (As a function inside of another, it would hold the module.)"""
    if not isinstance(node, ast.Call):
        found, *_ = values_of(node, function, module).values()
        return found
    named = {word.arg: _evaluated(word.value, function, module) for word in node.keywords}
    return _NAMES[node.func.id](*(_evaluated(argument, function, module) for argument in node.args), **named)


def _between(node: ast.expr, function: FunctionType, module: nn.Module) -> Any:
    if isinstance(node, ast.Lambda):
        return forwards.cast
    if not isinstance(node, ast.IfExp):
        return value_of(node, function, module)
    return value_of(node.body, function, module) if value_of(node.test, function, module) else 0.0


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Lambda):
        return "cast"
    if isinstance(node, ast.IfExp):
        return "dropout"
    return ast.unparse(node).partition(".")[2]


# What rewritten methods call. They know it by names that no source can spell.


class _Waiting(NamedTuple):
    """An activation that is applied when the other factor is there."""

    gate: Tensor
    activation: Activation
    act: Callable[[Tensor], Tensor]


def _activated(gate, act):
    if type(gate) is Tensor and is_small_product(gate):
        return act(gate)
    activation = forms.row_of(act)
    if activation is None or getattr(act, "inplace", False) or not isinstance(gate, Tensor):
        return act(gate)
    if obstacles.of_input(gate) is not None:  # somebody may see in which order things are called
        return act(gate)
    return _Waiting(gate, activation, act)


def _product(left, right):
    if type(left) is _Waiting:
        return forwards.pointwise(left.gate, right, left.activation, left.act)
    if type(right) is _Waiting:
        return forwards.pointwise(right.gate, left, right.activation, right.act, up_left=True)
    return left * right


_CALLS = {
    "block": shortcut.block,
    "block of a module": halves.block,
    "joined": halves.joined,
    "joined children": halves.joined_children,
    "finished": halves.finished,
}
_CALLS.update({"fused": shortcut.fused, "activated": _activated, "product": _product, **forms.FORMS})
_NAMES = {f"@{name}": function for name, function in _CALLS.items()}
_TRACED = CellType(traced)
