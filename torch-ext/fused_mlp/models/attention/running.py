"""The calls that stand in fused methods of attentions."""

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
    """The results of linear layers of one input, children of a module, the last first: whoever takes one leaves no
    reference here. None of them where the layers have to be called, or take the host less time."""
    # Under no_grad too: a call in training mode has the bits of one that autograd records.
    if not module.training or not isinstance(x, Tensor) or x.numel() < dispatch.LEAST_PROJECTED:
        return []
    found = _plain.projected(names, module, x)
    if found is None:
        return []
    try:
        results = attention.projected(*found)
    except RuntimeError:  # the layers themselves say what is wrong with their operands
        return []
    return [*reversed(results)]


def rotated(callee: Any, q: Any, k: Any, cos: Any, sin: Any) -> Sequence[Tensor]:
    """``callee(q, k, cos, sin)``, which turns queries and keys, by one op where that takes them."""
    found = _rotated(callee, q, k, cos, sin)
    return callee(q, k, cos, sin) if found is None else found


def _rotated(callee: Any, q: Any, k: Any, cos: Any, sin: Any) -> Optional[Sequence[Tensor]]:
    guards = rotary.known.get(rotary.key_of(callee))
    if guards is None or not (_plain.is_undisturbed() and _plain.are_unchanged(guards.unchanged)):
        return None
    if isinstance(callee, nn.Module) and not _plain.is_bare(callee):
        return None
    for tensor in (q, k, cos, sin):
        if type(tensor) not in PLAIN_TENSORS or tensor.dtype != q.dtype or tensor.device != q.device:
            return None
    is_laid_out = q.dim() == k.dim() == 4 and q.stride(3) == 1 and k.stride(3) == 1
    if not is_laid_out or cos.requires_grad or sin.requires_grad or not dispatch.is_native("rotary", q):
        return None
    try:
        return attention.rotated(q, k, cos, sin)
    except RuntimeError:  # the function itself says what is wrong with its operands, or broadcasts them
        return None
