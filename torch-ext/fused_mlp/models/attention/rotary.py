"""Rotary embeddings of queries and keys, recognised by a proof from their source.

transformers wraps such a function in a module that calls it, for kernelize to find; these are known by class.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any, Dict, Optional, Tuple

import torch
from torch import Tensor, nn

from ..parts import refusals
from ..parts.guards import Guards, guards_of
from ..proving.evaluation import Evaluation, inputs
from ..proving.values import Proof, Proofs, proved

# By function, or by the class of a module that calls one: the guards to check at a call.
known: Dict[Any, Guards] = {}
_proofs = Proofs()
_GIVEN = tuple(inputs("q", "k", "cos", "sin"))


def _rotate_half(x: Tensor) -> Tensor:
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)


def _written(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Tuple[Tensor, Tensor]:
    """The function that the op computes."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return (q * cos) + (_rotate_half(q) * sin), (k * cos) + (_rotate_half(k) * sin)


def is_rotary(callee: Any) -> bool:
    """True for a function that rotates queries and keys, given cos and sin; from then on it is in ``known``."""
    function, own = _function_of(callee)
    if function is None:
        return False
    guards = _proofs.get(function, None, lambda: _proved(function)).found
    if guards is not None:
        known[key_of(callee)] = Guards((*own, *guards.unchanged))
    return guards is not None


def key_of(callee: Any) -> Any:
    """Return a function itself, or the class of a module."""
    return callee if type(callee) is FunctionType else type(callee)


def _function_of(callee: Any) -> Tuple[Optional[FunctionType], Tuple[Tuple[Any, ...], ...]]:
    """Return the function that a call runs, and the attributes that this depends on."""
    if type(callee) is FunctionType:
        return callee, ()
    kind = type(callee)
    forward = vars(kind).get("forward") if issubclass(kind, nn.Module) else None
    if type(forward) is not FunctionType or forward.__qualname__ != "_create_func_module.<locals>.Func.forward":
        return None, ()
    cells = [cell for cell in forward.__closure__ or () if type(cell.cell_contents) is FunctionType]
    if len(cells) != 1 or forward.__module__ != "kernels.layer.layer":
        return None, ()
    function = cells[0].cell_contents
    calls = (kind, "__call__", refusals._CALL), (kind, "forward", forward), (forward, "__code__", forward.__code__)
    return function, (*calls, (cells[0], "cell_contents", function))


def _proved(function: FunctionType) -> Proof:
    evaluation, right = Evaluation(), Evaluation().returned(_written, _GIVEN)
    return proved(
        evaluation, function, _GIVEN, lambda value: guards_of(evaluation.dependencies) if value == right else None
    )
