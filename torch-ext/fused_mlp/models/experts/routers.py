"""The routers of mixtures: which experts a token goes to, and with which weights, in one op for six.

A router is told by the text of its forward. There are few of them, and each is what many models have.
"""

from __future__ import annotations

import ast
import functools
from types import FunctionType
from typing import Any, Dict, NamedTuple, Optional, Set, Tuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ... import calls, dispatch
from ...backends import native
from ..parts import obstacles
from ..reading.names import body_of
from ..reading.source import remembered, tree_of
from ..running import shortcut, switching

_is_compiling = torch.compiler.is_compiling

_QWEN = """
hidden_states = hidden_states.reshape(-1, self.hidden_dim)
router_logits = F.linear(hidden_states, self.weight)
router_probs = torch.nn.functional.softmax(router_logits, dtype=torch.float, dim=-1)
router_top_value, router_indices = torch.topk(router_probs, self.top_k, dim=-1)
{normalize}
router_top_value = router_top_value.to(router_logits.dtype)
router_scores = router_top_value
return (router_logits, router_scores, router_indices)
"""
_MIXTRAL = """
hidden_states = hidden_states.reshape(-1, self.hidden_dim)
router_logits = F.linear(hidden_states, self.weight)
router_probs = torch.nn.functional.softmax(router_logits.float(), dim=-1)
router_top_value, router_indices = torch.topk(router_probs, self.top_k, dim=-1)
router_top_value /= router_top_value.sum(dim=-1, keepdim=True)
router_scores = router_top_value
return (router_logits, router_scores, router_indices)
"""
_NORMALIZE = "router_top_value /= router_top_value.sum(dim=-1, keepdim=True)"


class _Form(NamedTuple):
    """What a router does: ``normalized`` may be the attribute that says it; ``narrow``: weights are cast to the dtype
    of the logits."""

    normalized: Union[bool, str]
    narrow: bool


_FORMS: Dict[str, _Form] = {
    ast.unparse(ast.parse(text)): form
    for text, form in (
        (_QWEN.format(normalize=f"if self.norm_topk_prob:\n    {_NORMALIZE}"), _Form("norm_topk_prob", True)),
        (_QWEN.format(normalize=_NORMALIZE), _Form(True, True)),
        (_MIXTRAL, _Form(True, False)),
    )
}

# What the texts call besides, as torch wrote it.
_SOFTMAX, _TOPK = obstacles.unpatched(F, "softmax", F), obstacles.unpatched(torch, "topk", torch)
_NAMES = {"F": F, "torch": torch}


def fused_methods(module: nn.Module) -> Dict[str, FunctionType]:
    """The method to put into a router; none where it is no such, or not known."""
    method = getattr(switching.class_of(module), "forward", None)
    form = _form_of(method) if isinstance(method, FunctionType) else None
    return {} if form is None else {"forward": _fused_method(method)}


def is_fused(function: Any) -> bool:
    """Whether a function is one that :func:`fused_methods` gives."""
    return function in _made


_made: Set[FunctionType] = set()


@remembered
def _form_of(method: FunctionType) -> Optional[_Form]:
    if hasattr(method, "__wrapped__") or method.__code__.co_varnames[:2] != ("self", "hidden_states"):
        return None
    tree = tree_of(method)
    if tree is None or method.__code__.co_argcount != 2:
        return None
    body = body_of(tree)
    form = _FORMS.get(ast.unparse(ast.Module(body, [])))
    if form is None:
        return None
    known = all(method.__globals__.get(name, value) is value for name, value in _NAMES.items())
    return form if known else None


@remembered
def _fused_method(method: FunctionType) -> FunctionType:
    """The forward of a class of routers made anew: with one op where it may be."""
    form, written = _form_of(method), switching.as_written("forward", method)
    instead = switching.instead_of(written)

    def forward(self: nn.Module, hidden_states: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
        another = instead(self)
        if another is not None:
            return another(self, hidden_states)
        result = _routed(self, form, hidden_states)
        return method(self, hidden_states) if result is None else result

    functools.update_wrapper(forward, method)
    _made.add(forward)
    switching.written[forward] = written
    return forward


def obstacle(module: nn.Module) -> Optional[str]:
    """Why the forward of a fused router runs as it was written, in its present state; None if it does not."""
    form = _form_of(switching.class_of(module).forward)
    found = "a patched class" if form is None else _operands(module, form)
    if isinstance(found, str):
        return found
    return obstacles.of_surroundings() or native.refusal("top_k_router", found[0])


_Operands = Tuple[Tensor, int, int, bool]  # the weight, its width, how many experts, whether normalized


def _operands(module: nn.Module, form: _Form) -> Union[str, _Operands]:
    """What the op is called with, or why it cannot be."""
    state = module.__dict__
    weight = module.weight if _is_compiling() else state["_parameters"].get("weight")
    if type(weight) is not nn.Parameter or "weight" in state or weight.dim() != 2:
        return f"a weight of type {type(weight).__name__}"
    width, top_k, normalized = state.get("hidden_dim"), state.get("top_k"), form.normalized
    if type(normalized) is str:
        normalized = state.get(normalized)
    if type(width) is not int or type(top_k) is not int or type(normalized) is not bool:
        return "attributes of another kind"
    experts = weight.shape[0]
    if weight.shape[1] != width or not 0 < top_k <= experts or top_k > _MOST_CHOSEN or experts > _MOST_EXPERTS:
        return f"{top_k} of {experts} experts"
    if weight.is_cpu and weight.dtype is not torch.float32:
        return f"no cpu kernel for {weight.dtype}"
    return weight, width, top_k, normalized


_MOST_EXPERTS, _MOST_CHOSEN = 512, 32  # as in cuda/router.h


def _routed(module: nn.Module, form: _Form, x: Any) -> Optional[Tuple[Tensor, Tensor, Tensor]]:
    """What a router gives, by one op; None where its forward is to run as it was written."""
    if (
        type(x) is not Tensor
        or dispatch._open_blocks[-1].name != "auto"
        or native.refusal("top_k_router", x) is not None
    ):
        return None
    if F.softmax is not _SOFTMAX or torch.topk is not _TOPK:
        return None
    if _is_compiling():
        disturbed = obstacles.of_surroundings() is not None or calls.composition_reason(x) is not None
    else:
        disturbed = not shortcut.plain.is_undisturbed()
    found = _operands(module, form)
    if disturbed or type(found) is str:
        return None
    weight, width, top_k, normalized = found
    if x.dtype is not weight.dtype or x.device != weight.device or calls.autograd_follows(x, weight):
        return None
    rows = x if x.dim() == 2 and x.shape[1] == width else x.reshape(-1, width)
    return native.top_k_router(rows, weight, top_k, normalized, form.narrow)
