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
    order: Tuple[bool, bool, int],
    first: Union[nn.Module, str, None],
    last: Union[nn.Module, str, None],
    modulation: shortcut.Modulation = None,
    wide: bool = False,
    owner: Optional[nn.Module] = None,
    names: Tuple[str, ...] = (),
) -> Tensor:
    """``shortcut.block`` of a module that is an MLP, and what is around it; parts by name as there."""
    if _plain is not None:
        around = behind, factor, residual, first, last, modulation, wide
        found = _plain.block_of(halves.wholes, module, x, *around, owner, names)
        if type(found) is tuple:
            found = shortcut.packed_block(*found)
        if found is not None:
            return found
    module, behind, first, last = (shortcut.read(owner, part) for part in (module, behind, first, last))
    whole = _whole_sequence(module) if _plain is not None and isinstance(module, nn.Sequential) else None
    if whole is not None:
        projections, act, between, passing = whole
        around = (*passing, *behind), factor, residual, first, last, modulation, wide
        found = _plain.block(forwards.PLAIN, x, projections, act, between, *around, None, ())
        if found is not None:
            return found
    return shortcut.around(module(shortcut.normed(x, first, modulation)), behind, factor, residual, order, last, wide)


def _whole_sequence(module: nn.Sequential) -> Optional[sequences.Whole]:
    """What a sequence is whose call runs its forward, and nothing else."""
    return None if type(halves.running(module, _sequences)) is str else sequences.whole(module)
