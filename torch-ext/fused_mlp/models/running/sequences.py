"""Modules that run one after the other; their classes at each call decide which of them are MLPs.

These are the parts of an ``nn.Sequential``, or of an ``nn.ModuleList`` in a loop that does nothing else.

Possible places of MLPs among parts of given classes are computed once and cached. At each call, the code that fuses the
parts checks if they are plain.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from types import FunctionType
from typing import Dict, Iterable, Iterator, NamedTuple, Optional, Tuple

from torch import Tensor, nn

from ...autograd import training
from ..matching.pattern import Pattern
from ..methods import switching, traced
from ..parts import adapters, recognition, refusals
from ..reading.attributes import as_written, written
from . import shortcut, split_mlps
from .forwards import LINEAR, PLAIN

_RECOMPUTED = replace(PLAIN, memory=training.RECOMPUTED)


def _sequential(plain: Pattern) -> FunctionType:
    """Return the forward of ``nn.Sequential`` with the MLPs among its parts fused."""
    asks = shortcut.plain is not None and plain.memory == training.KEPT

    def forward(self: nn.Sequential, input: Tensor) -> Tensor:
        if traced.is_traced():
            return traced.run(plain.memory, "forward", nn.Sequential.forward, _instead_of_sequential, self, input)
        instead = _instead_of_sequential(self)
        if instead is not None:
            return instead(self, input)
        if asks and shortcut.plain.runs_as_written(input, self, False):
            return nn.Sequential.forward(self, input)
        return _in_turn(tuple(self), input, plain)

    forward.__wrapped__ = nn.Sequential.forward  # torch.jit.script compiles this
    written[forward] = as_written("forward", nn.Sequential.forward)
    return forward


def in_turn(memory: str, modules: Iterable[nn.Module], x: Tensor) -> Tensor:
    """Run ``for module in modules: x = module(x)`` and return x; ``memory`` selects the values that training saves."""
    if type(modules) is nn.ModuleList:
        is_compiled = shortcut.plain is not None and memory == training.KEPT and not shortcut.is_traced()
        is_left = not shortcut.is_grad_enabled() and modules.training and shortcut.is_as_recorded(modules, x)
        if is_compiled and not is_left:
            found = shortcut.plain.in_turn(modules, x, known, split_mlps.firsts, PLAIN)
            if type(found) is tuple:
                pattern, operands = found
                found = shortcut.recorded_or_packed(pattern, *operands)
            if found is not None:
                return found
        return _in_turn(tuple(modules), x, PLAIN if memory == training.KEPT else _RECOMPUTED)
    for module in modules:
        x = module(x)
    return x


def _in_turn(parts: Tuple[nn.Module, ...], x: Tensor, plain: Pattern) -> Tensor:
    index = 0
    for first, act, second in _places(parts):
        for part in parts[index:first]:
            x = part(x)
        index = (act if second is None else second) + 1
        if act is None:
            found = split_mlps.followed(plain.memory, parts[first], parts[first + 1 : second], parts[second], x)
        else:
            pattern, function = _applied(plain if second is not None else LINEAR, parts[act])
            projections = (parts[first],) if second is None else (parts[first], parts[second])
            between = () if second is None else parts[act + 1 : second]
            found = None if function is None else shortcut.fused_parts(pattern, x, projections, function, between)
        for part in parts[first:index] if found is None else ():
            x = part(x)
        x = x if found is None else found
    for part in parts[index:]:
        x = part(x)
    return x


def _applied(pattern: Pattern, act: nn.Module) -> Tuple[Pattern, Optional[shortcut.Act]]:
    """Return the pattern of layers with an activation of one tensor or of two halves, and its function; None if the
    module that computes it was altered."""
    halves = recognition.known_halves(act)
    if halves is None:
        return pattern, act
    if shortcut.plain is not None:
        is_own = shortcut.plain.is_bare(act) and shortcut.plain.are_unchanged(halves.guards.unchanged)
    else:
        is_own = recognition.altered_halves(act, halves) is None
    return halved(pattern, halves.up_first), halves.act.function if is_own else None


@functools.cache
def halved(pattern: Pattern, up_first: bool) -> Pattern:
    """Return the pattern of layers with such a product in place of the activation."""
    return replace(pattern, gated=True, packed=True, up_first=up_first)


class Whole(NamedTuple):
    """The parts of a sequence that is an MLP and nothing more; ``behind`` are the dropouts and identities after it."""

    projections: Tuple[nn.Module, nn.Module]
    act: nn.Module
    between: Tuple[nn.Module, ...]
    behind: Tuple[nn.Module, ...]


def whole(module: nn.Sequential) -> Optional[Whole]:
    """Return the MLP that a sequence is, by its classes; None if it is not one or begins with a first module."""
    parts = tuple(module._modules.values())
    if not is_whole(parts) or _places(parts)[0].act is None:
        return None
    ((_, act, second),) = _places(parts)
    if recognition.known_halves(parts[act]) is not None:
        return None
    return Whole((parts[0], parts[second]), parts[act], parts[act + 1 : second], parts[second + 1 :])


def is_whole(parts: Tuple[nn.Module, ...]) -> bool:
    """True if modules that run one after the other form exactly one MLP, by their classes."""
    first, *others = _places(parts) or (None,)
    is_mlp = first is not None and not others and first.first == 0 and first.second is not None
    return is_mlp and _behind_passing(parts, first.second + 1) == len(parts)


class _Place(NamedTuple):
    """The indices of an MLP among parts: its first linear layer, the activation after it, its second linear layer.

    ``second`` is None if there is only one layer, and ``act`` is None if the first part is a first module.
    """

    first: int
    act: Optional[int]
    second: Optional[int]


known: Dict[Tuple[type, ...], Tuple[_Place, ...]] = {}  # by the classes of the parts


def _places(parts: Tuple[nn.Module, ...]) -> Tuple[_Place, ...]:
    """Return the places of fusible MLPs and layers among parts of these classes, in order."""
    kinds = tuple(map(type, parts))
    if kinds not in known:
        known[kinds] = tuple(_found_places(parts))
    return known[kinds]


def _found_places(parts: Tuple[nn.Module, ...]) -> Iterator[_Place]:
    index = 0
    while index < len(parts):
        is_first = split_mlps.is_first(type(parts[index]))
        act = None if is_first else index + 1
        if not is_first and (not _is_layer(parts[index]) or not _is_activation(parts[act : act + 1])):
            index += 1
            continue
        last = index if is_first else act
        second = _behind_passing(parts, last + 1)
        is_mlp = second < len(parts) and _is_layer(parts[second])
        # A second layer that has its own activation begins the next MLP.
        is_mlp = is_mlp and not _is_activation(parts[second + 1 : second + 2])
        if is_mlp or not is_first:
            yield _Place(index, act, second if is_mlp else None)
        index = (second if is_mlp else last) + 1


def _is_layer(part: nn.Module) -> bool:
    """True for a class of linear layers, or a layer with an adapter."""
    return not refusals.is_foreign(part) or adapters.is_known(part)


def _is_activation(part: Tuple[nn.Module, ...]) -> bool:
    """True if a slice of parts holds one whose class computes a row of the table, or its product of two halves."""
    return any(isinstance(each, nn.Module) and _computes_act(each) for each in part)


def _computes_act(part: nn.Module) -> bool:
    return recognition.row_of_class(part) is not None or recognition.halves_of_class(part) is not None


def _behind_passing(parts: Tuple[nn.Module, ...], index: int) -> int:
    while index < len(parts) and type(parts[index]) in (nn.Dropout, nn.Identity):
        index += 1
    return index


SEQUENTIAL = {plain.memory: _sequential(plain) for plain in (PLAIN, _RECOMPUTED)}  # by the values that training saves
_instead_of_sequential = switching.instead_of(as_written("forward", nn.Sequential.forward))
