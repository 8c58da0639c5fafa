"""Functions that fused methods of attentions call."""

from __future__ import annotations

from typing import Any, List, Optional, Sequence, Tuple

from torch import Tensor, nn

from ... import dispatch
from ...autograd import attention
from ...operands import PLAIN_TENSORS
from ..running import shortcut
from . import rotary

_plain = shortcut.plain


def projected(names: Tuple[str, ...], module: nn.Module, x: Any) -> List[Tensor]:
    """Return the results of a module's linear layers of one input, in reverse order, so that popping a result leaves no
    reference here. Empty if the layers have to be called, or if that takes less host time.

    Only called in training mode, under no_grad too: such a call gives the same bits as one that autograd records.
    """
    if not isinstance(x, Tensor) or x.numel() < dispatch.LEAST_PROJECTED:
        return []
    found = _plain.projected(names, module, x)
    if found is None:
        return []
    try:
        results = attention.projected(*found)
    except RuntimeError:  # the layers themselves report the error
        return []
    return [*reversed(results)]


def rotated(callee: Any, q: Any, k: Any, cos: Any, sin: Any) -> Sequence[Tensor]:
    """Return ``callee(q, k, cos, sin)``, the rotary embedding, by one op if possible."""
    found = _rotated(callee, q, k, cos, sin)
    return callee(q, k, cos, sin) if found is None else found


def _rotated(callee: Any, q: Any, k: Any, cos: Any, sin: Any) -> Optional[Sequence[Tensor]]:
    guards = rotary.known.get(rotary.key_of(callee))
    if guards is None or type(q) not in PLAIN_TENSORS or not dispatch.is_native("rotary", q):
        return None
    if not (_plain.is_undisturbed() and _plain.are_unchanged(guards.unchanged)):
        return None
    if isinstance(callee, nn.Module) and not _plain.is_bare(callee):
        return None
    for tensor in (q, k, cos, sin):
        if type(tensor) not in PLAIN_TENSORS or tensor.dtype != q.dtype or tensor.device != q.device:
            return None
    is_laid_out = q.dim() == k.dim() == 4 and q.stride(3) == 1 and k.stride(3) == 1
    if not is_laid_out or cos.requires_grad or sin.requires_grad:
        return None
    try:
        return attention.rotated(q, k, cos, sin)
    except RuntimeError:  # the function itself reports the error, or broadcasts
        return None
