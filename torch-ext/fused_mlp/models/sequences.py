"""The forward of ``nn.Sequential``: which of its parts are MLPs is decided anew at each call.

Where the classes of the parts leave one place for an MLP, that is remembered of these classes; whether it is plain is
asked at each call too, by what fuses it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Dict, NamedTuple, Optional, Sequence, Tuple

from torch import Tensor, nn

from .. import training
from . import forwards, obstacles, shortcut, switching, traced
from .forwards import LINEAR, PLAIN
from .pattern import Pattern
from .recognition import activation_of, row_of_class


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
    parts = tuple(self)
    place = _place(parts)
    if place is not None:
        return _in_place(place, parts, input, plain)
    if obstacles.of_surroundings() is not None:
        return nn.Sequential.forward(self, input)
    index = 0
    while index < len(parts):
        first, act = parts[index], parts[index + 1] if index + 1 < len(parts) else None
        is_layer = act is not None and obstacles.of_projection(first) is None and activation_of(act) is not None
        last = index + 2
        while last < len(parts) and forwards.passes(parts[last : last + 1]):
            last += 1
        if not is_layer:
            input, index = first(input), index + 1
        elif last < len(parts) and _ends(parts[last:]):
            input, index = shortcut.fused(plain, input, (first, parts[last]), act), last + 1
        else:
            input, index = shortcut.fused(LINEAR, input, (first,), act), index + 2
    return input


class Whole(NamedTuple):
    """The parts of a sequence that is an MLP and no more; those behind it hand on what they are given, or drop some."""

    projections: Tuple[nn.Module, nn.Module]
    act: nn.Module
    between: Tuple[nn.Module, ...]
    behind: Tuple[nn.Module, ...]


def whole(module: nn.Sequential) -> Optional[Whole]:
    """What a sequence is by the classes of its parts; None if it is no such."""
    parts = tuple(module)
    place = _place(parts)
    if place is None or not place.is_whole:
        return None
    second = place.second
    return Whole((parts[0], parts[second]), parts[1], parts[2:second], parts[second + 1 :])


class _Place(NamedTuple):
    """The indices of an activation behind a linear layer, and of the linear layer behind that, if there is one; and
    whether that is the whole sequence, but for what hands values on."""

    act: int
    second: Optional[int]
    is_whole: bool


_places: Dict[Tuple[type, ...], Optional[_Place]] = {}  # by the classes of the parts


def _place(parts: Tuple[nn.Module, ...]) -> Optional[_Place]:
    """The place of the only MLP or layer that there can be among parts of these classes."""
    kinds = tuple(map(type, parts))
    if kinds not in _places:
        _places[kinds] = _found_place(parts)
    return _places[kinds]


def _found_place(parts: Tuple[nn.Module, ...]) -> Optional[_Place]:
    acts = [i for i, part in enumerate(parts) if isinstance(part, nn.Module) and row_of_class(part) is not None]
    if len(acts) != 1 or acts[0] == 0 or obstacles.is_foreign(parts[acts[0] - 1]):
        return None
    second = _behind_passing(parts, acts[0] + 1)
    if second == len(parts) or obstacles.is_foreign(parts[second]):
        return _Place(acts[0], None, False)
    return _Place(acts[0], second, acts[0] == 1 and _behind_passing(parts, second + 1) == len(parts))


def _behind_passing(parts: Tuple[nn.Module, ...], index: int) -> int:
    while index < len(parts) and type(parts[index]) in (nn.Dropout, nn.Identity):
        index += 1
    return index


def _in_place(place: _Place, parts: Tuple[nn.Module, ...], x: Tensor, plain: Pattern) -> Tensor:
    act, second, _ = place
    for part in parts[: act - 1]:
        x = part(x)
    if second is None:
        x = shortcut.fused(LINEAR, x, (parts[act - 1],), parts[act])
    else:
        x = shortcut.fused(plain, x, (parts[act - 1], parts[second]), parts[act], parts[act + 1 : second])
    for part in parts[(second or act) + 1 :]:
        x = part(x)
    return x


SEQUENTIAL = {"activations": sequential, "recompute": sequential_recomputed}  # by what training keeps
for _forward in SEQUENTIAL.values():
    _forward.__name__ = "forward"  # the name under which a bound method is pickled
    _forward.__wrapped__ = nn.Sequential.forward  # what torch.jit.script compiles
_instead_of_sequential = switching.instead_of("forward", nn.Sequential.forward, nn.Sequential.forward)


def _ends(parts: Sequence[nn.Module]) -> bool:
    """Whether an MLP ends with the first part: a projection, without an activation to go with it."""
    return obstacles.of_projection(parts[0]) is None and (len(parts) == 1 or activation_of(parts[1]) is None)
