"""The forward of ``nn.Sequential``: which of its parts are MLPs is decided by their classes, as they are at each call.

Where MLPs can be among parts of some classes is found once and kept. Whether the parts there are plain is asked at each
call, by what fuses them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Dict, Iterator, NamedTuple, Optional, Tuple

from torch import Tensor, nn

from .. import training
from . import obstacles, shortcut, switching, traced
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
    parts, index = tuple(self), 0
    for act, second in _places(parts):
        for part in parts[index : act - 1]:
            input = part(input)
        if second is None:
            input, index = shortcut.fused(LINEAR, input, (parts[act - 1],), parts[act]), act + 1
        else:
            projections, between = (parts[act - 1], parts[second]), parts[act + 1 : second]
            input, index = shortcut.fused(plain, input, projections, parts[act], between), second + 1
    for part in parts[index:]:
        input = part(input)
    return input


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
    """Where an MLP stands among parts: the indices of its activation, which is behind its first linear layer, and of
    its second one; that is None where there is only the first."""

    act: int
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
        act = index + 1
        if obstacles.is_foreign(parts[index]) or not _is_activation(parts[act : act + 1]):
            index += 1
            continue
        second = _behind_passing(parts, act + 1)
        is_mlp = second < len(parts) and not obstacles.is_foreign(parts[second])
        # A second layer with an activation of its own begins the next MLP.
        is_mlp = is_mlp and not _is_activation(parts[second + 1 : second + 2])
        yield _Place(act, second if is_mlp else None)
        index = (second if is_mlp else act) + 1


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
