"""The block of a layer, a norm, an MLP and a sum with the residual, whose MLP is a module of its own."""

from __future__ import annotations

from typing import Any, Optional, Tuple, Union

from torch import Tensor, nn

from . import forwards, halves, sequences, shortcut

_plain = shortcut.plain
_forward = nn.Sequential.forward
_sequences = dict.fromkeys((_forward, *sequences.SEQUENTIAL.values()), halves.Half(_forward, None, None, None))


def block(
    module: Union[nn.Module, str],
    x: Tensor,
    behind: Tuple[Union[nn.Module, float, str], ...],
    factor: Any,
    residual: Tensor,
    first: Union[nn.Module, str, None],
    last: Union[nn.Module, str, None],
    modulation: shortcut.Modulation = None,
    wide: bool = False,
    owner: Optional[nn.Module] = None,
    names: Tuple[str, ...] = (),
) -> Optional[Tensor]:
    """``shortcut.block`` of a module that is an MLP, and what is around it; parts by name as there."""
    if _plain is None:
        return None
    around = behind, factor, residual, first, last, modulation, wide
    found = _plain.block_of(halves.wholes, module, x, *around, owner, names)
    if type(found) is tuple:
        found = shortcut.packed_block(*found)
    if found is not None:
        return found
    module = owner._modules.get(module) if type(module) is str else module
    whole = _whole_sequence(module) if isinstance(module, nn.Sequential) else None
    if whole is None:
        return None
    projections, act, between, passing = whole
    behind, first, last = (shortcut.read(owner, part) for part in (behind, first, last))
    around = (*passing, *behind), factor, residual, first, last, modulation, wide
    return _plain.block(forwards.PLAIN, x, projections, act, between, *around, None, ())


def _whole_sequence(module: nn.Sequential) -> Optional[sequences.Whole]:
    """The MLP that a sequence is, if its call runs its forward and nothing else; None otherwise."""
    return None if type(halves.running(module, _sequences)) is str else sequences.whole(module)
