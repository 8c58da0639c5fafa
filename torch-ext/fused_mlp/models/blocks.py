"""The block of a layer, a norm, an MLP and a sum with the residual, whose MLP is a module of its own."""

from __future__ import annotations

from typing import Any, Optional, Tuple, Union

from torch import Tensor, nn

from . import halves, sequences, shortcut

_plain = shortcut.plain
_sequences = dict.fromkeys(
    (nn.Sequential.forward, *sequences.SEQUENTIAL.values()), halves.Half(nn.Sequential.forward, None, None, None)
)


def block(
    module: Union[nn.Module, str],
    x: Tensor,
    behind: Tuple[Union[nn.Module, float, str], ...],
    factor: Any,
    residual: Tensor,
    order: Tuple[bool, bool, int],
    first: Union[nn.Module, str, None],
    last: Union[nn.Module, str, None],
    modulation: shortcut.Modulation = None,
    owner: Optional[nn.Module] = None,
    names: Tuple[str, ...] = (),
) -> Tensor:
    """``shortcut.block`` of a module that is an MLP, and what is around it; parts by name as there."""
    if _plain is not None:
        around = behind, factor, residual, first, last, modulation
        found = _plain.block_of(halves.wholes, module, x, *around, owner, names)
        if type(found) is tuple:
            found = shortcut.packed_block(*found)
        if found is not None:
            return found
    module = shortcut.read(owner, module)
    whole = None if _plain is None else _whole_in_turn(module, x)
    if whole is not None:
        pattern, projections, act, between, passing = whole
        around = (*passing, *behind), factor, residual, first, last, modulation
        found = _plain.block(pattern, x, projections, shortcut.known_by(act), between, *around, owner, names)
        if type(found) is tuple:
            found = shortcut.packed_block(*found)
        if found is not None:
            return found
    behind, first, last = (shortcut.read(owner, part) for part in (behind, first, last))
    return shortcut.around(module(shortcut.normed(x, first, modulation)), behind, factor, residual, order, last)


def _whole_in_turn(module: nn.Module, x: Tensor) -> Optional[sequences.Whole]:
    """The MLP that a module is which runs its parts in turn, where calling it does nothing else."""
    if isinstance(module, nn.Sequential):
        return None if type(halves.running(module, _sequences)) is str else sequences.whole(tuple(module), x)
    half = halves.running(module, halves.wholes)
    if type(half) is str or half.names is not None:
        return None
    parts = module._modules.get(half.found)
    return sequences.whole((*parts._modules.values(),), x) if type(parts) is nn.ModuleList else None
