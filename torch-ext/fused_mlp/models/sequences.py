"""Modules that run one after the other: which of them are MLPs is decided by their classes, as they are at each call.

So run the parts of a ``nn.Sequential``, and those of a ``nn.ModuleList`` in a loop that does nothing else.

Where MLPs can be among parts of some classes is found once and kept. Whether the parts there are plain is asked at each
call, by what fuses them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Dict, Iterable, Iterator, NamedTuple, Optional, Tuple

from torch import Tensor, nn

from .. import training
from . import halves, obstacles, shortcut, switching, traced
from .forwards import LINEAR, PLAIN
from .pattern import Pattern
from .recognition import row_of_class


def sequential(self: nn.Sequential, input: Tensor) -> Tensor:
    """The forward of ``nn.Sequential``, with what is an MLP among its parts fused."""
    return _sequential(self, input, PLAIN)


def sequential_recomputed(self: nn.Sequential, input: Tensor) -> Tensor:
    """The same, keeping less for the backward."""
    return _sequential(self, input, _RECOMPUTED)


_RECOMPUTED = replace(PLAIN, memory=training.RECOMPUTED)


def _sequential(self: nn.Sequential, input: Tensor, plain: Pattern) -> Tensor:
    if traced.is_traced():
        return traced.run(plain.memory, nn.Sequential.forward, _instead_of_sequential, self, input)
    instead = _instead_of_sequential(self)
    if instead is not None:
        return instead(self, input)
    runs_as_written = (
        plain.memory == training.KEPT
        and shortcut.plain is not None
        and shortcut.plain.runs_as_written(input, self, False)
    )
    if runs_as_written:
        return nn.Sequential.forward(self, input)
    return _in_turn(tuple(self), input, plain)


def in_turn(memory: str, modules: Iterable[nn.Module], x: Tensor) -> Tensor:
    """What ``for module in modules: x = module(x)`` makes of x; ``memory``: what training keeps."""
    if type(modules) is nn.ModuleList:
        return _in_turn(tuple(modules), x, PLAIN if memory == training.KEPT else _RECOMPUTED)
    for module in modules:
        x = module(x)
    return x


def _in_turn(parts: Tuple[nn.Module, ...], x: Tensor, plain: Pattern) -> Tensor:
    index = 0
    for first, act, second in _places(parts):
        for part in parts[index:first]:
            x = part(x)
        if act is None:
            x = halves.followed(plain.memory, parts[first], parts[first + 1 : second], parts[second], x)
        elif second is None:
            x = shortcut.fused(LINEAR, x, (parts[first],), parts[act])
        else:
            x = shortcut.fused(plain, x, (parts[first], parts[second]), parts[act], parts[act + 1 : second])
        index = (act if second is None else second) + 1
    for part in parts[index:]:
        x = part(x)
    return x


class Whole(NamedTuple):
    """The parts of a sequence that is an MLP and no more. Those behind it are dropouts and identities."""

    projections: Tuple[nn.Module, nn.Module]
    act: nn.Module
    between: Tuple[nn.Module, ...]
    behind: Tuple[nn.Module, ...]


def whole(module: nn.Sequential) -> Optional[Whole]:
    """What a sequence is by the classes of its parts; None if it is no such."""
    parts = tuple(module)
    first, *others = _places(parts) or (None,)
    if first is None or others or first.act != 1 or first.second is None:
        return None
    behind = parts[first.second + 1 :]
    if _behind_passing(behind, 0) < len(behind):
        return None
    return Whole((parts[0], parts[first.second]), parts[1], parts[2 : first.second], behind)


class _Place(NamedTuple):
    """Where an MLP stands among parts: the indices of its first linear layer, of the activation behind it, and of its
    second linear layer. That is None where there is only the first. Where the first part is a head, there is no index
    of an activation."""

    first: int
    act: Optional[int]
    second: Optional[int]


_known: Dict[Tuple[type, ...], Tuple[_Place, ...]] = {}  # by the classes of the parts


def _places(parts: Tuple[nn.Module, ...]) -> Tuple[_Place, ...]:
    """Where there can be MLPs and layers to fuse among parts of these classes, in their order."""
    kinds = tuple(map(type, parts))
    if kinds not in _known:
        _known[kinds] = tuple(_found_places(parts))
    return _known[kinds]


def _found_places(parts: Tuple[nn.Module, ...]) -> Iterator[_Place]:
    index = 0
    while index < len(parts):
        is_head = halves.is_head(type(parts[index]))
        act = None if is_head else index + 1
        if not is_head and (obstacles.is_foreign(parts[index]) or not _is_activation(parts[act : act + 1])):
            index += 1
            continue
        last = index if is_head else act
        second = _behind_passing(parts, last + 1)
        is_mlp = second < len(parts) and not obstacles.is_foreign(parts[second])
        # A second layer with an activation of its own begins the next MLP.
        is_mlp = is_mlp and not _is_activation(parts[second + 1 : second + 2])
        if is_mlp or not is_head:
            yield _Place(index, act, second if is_mlp else None)
        index = (second if is_mlp else last) + 1


def _is_activation(part: Tuple[nn.Module, ...]) -> bool:
    """Whether a slice of parts has one whose class computes a row of the table."""
    return any(isinstance(each, nn.Module) and row_of_class(each) is not None for each in part)


def _behind_passing(parts: Tuple[nn.Module, ...], index: int) -> int:
    while index < len(parts) and type(parts[index]) in (nn.Dropout, nn.Identity):
        index += 1
    return index


SEQUENTIAL = {"activations": sequential, "recompute": sequential_recomputed}  # by what training keeps
for _forward in SEQUENTIAL.values():
    _forward.__name__ = "forward"  # the name under which a bound method is pickled
    _forward.__wrapped__ = nn.Sequential.forward  # what torch.jit.script compiles
_instead_of_sequential = switching.instead_of("forward", nn.Sequential.forward, nn.Sequential.forward)
