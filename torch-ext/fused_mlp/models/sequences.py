"""The forward of ``nn.Sequential``: which of its parts are MLPs is decided anew at each call."""

from __future__ import annotations

from dataclasses import replace
from typing import Sequence

from torch import Tensor, nn

from .. import training
from . import forwards, obstacles, shortcut, switching, traced
from .forwards import LINEAR, PLAIN
from .pattern import Pattern
from .recognition import activation_of


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
    if runs_as_written or obstacles.of_surroundings() is not None:
        return nn.Sequential.forward(self, input)
    parts, index = list(self), 0
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


SEQUENTIAL = {"activations": sequential, "recompute": sequential_recomputed}  # by what training keeps
for _forward in SEQUENTIAL.values():
    _forward.__name__ = "forward"  # the name under which a bound method is pickled
    _forward.__wrapped__ = nn.Sequential.forward  # what torch.jit.script compiles
_instead_of_sequential = switching.instead_of("forward", nn.Sequential.forward, nn.Sequential.forward)


def _ends(parts: Sequence[nn.Module]) -> bool:
    """Whether an MLP ends with the first part: a projection, without an activation to go with it."""
    return obstacles.of_projection(parts[0]) is None and (len(parts) == 1 or activation_of(parts[1]) is None)
