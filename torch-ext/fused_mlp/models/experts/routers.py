"""Routers of mixtures, which choose the experts of each token and their weights: one op instead of six, or twenty."""

from __future__ import annotations

from types import FunctionType
from typing import Any, Dict, NamedTuple, Optional, Tuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ... import calls, dispatch
from ...backends import native
from ..methods import switching
from ..parts import refusals
from ..parts.guards import Guards, guards_of
from ..proving.evaluation import Evaluation, inputs
from ..proving.routers import BIAS, Sigmoid, Softmax, form_of
from ..proving.values import Bound, Proof, Proofs, Value, calls_nothing, proved
from ..reading.attributes import as_written, class_of
from ..running import shortcut
from .conditions import Conditions, conditions_of

_is_compiling = torch.compiler.is_compiling


class _Form(NamedTuple):
    """A router's computation, with its guards."""

    router: Union[Softmax, Sigmoid]
    guards: Guards


def fused_methods(module: nn.Module) -> Dict[str, FunctionType]:
    """Return the method to install in a router; empty if the module is none or is not understood."""
    method = _method_of(module)
    is_left = method is not None and type(_forms[method].router) is Sigmoid and native.DEVICE_TYPE == "cpu"
    return {} if method is None or is_left else {"forward": method}


KIND = "router"
_forms: Dict[FunctionType, _Form] = {}  # by fused method
_proofs = Proofs()
_SOFTMAX, _TOPK = refusals.unpatched(F, "softmax", F), refusals.unpatched(torch, "topk", torch)
(_X,) = inputs("x")


def _method_of(module: nn.Module) -> Optional[FunctionType]:
    """Return the fused forward of a router, if the router's computation is known."""
    method = getattr(class_of(module), "forward", None)
    if not isinstance(method, FunctionType) or hasattr(method, "__wrapped__") or method.__code__.co_argcount != 2:
        return None
    if "weight" not in module._parameters or module._modules:
        return None
    return _proof_of(module).found


def _proof_of(module: nn.Module) -> Proof:
    method = class_of(module).forward
    return _proofs.get(method, module, lambda: _proved(module, method))


def _proved(module: nn.Module, method: FunctionType) -> Proof:
    evaluation = Evaluation(module, calls_nothing, symbols=(int, float))

    def made_of(value: Value) -> Optional[FunctionType]:
        found, guards = form_of(value, _X), guards_of(evaluation.dependencies)
        return None if found is None or guards is None else _fused_method(method, _Form(found, guards))

    return proved(evaluation, Bound(method, evaluation.root), (_X,), made_of)


def _fused_method(method: FunctionType, form: _Form) -> FunctionType:
    """Return the fused forward of a class of routers, with one op where possible."""
    original = as_written("forward", method)
    instead = switching.instead_of(original)

    def forward(self: nn.Module, hidden_states: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
        if shortcut.is_left_in_training(self, method, hidden_states):
            return method(self, hidden_states)
        another = instead(self)
        if another is not None:
            return another(self, hidden_states)
        result = _routed(self, form, hidden_states)
        return method(self, hidden_states) if result is None else result

    _forms[forward] = form
    return switching.made(KIND, forward, original)


class Router(NamedTuple):
    """A router in its present state: its parameters and the conditions under which they hold.

    Compiled code reads the fields by position (torch-ext/calls/mixtures/plain_mixture.cpp).
    """

    conditions: Conditions
    top_k: int
    normalized: bool
    narrow: bool
    groups: Optional[Tuple[int, int, float]]  # for sigmoids: number of groups, number kept, scaling


def router_of(module: nn.Module) -> Optional[Router]:
    """Return a module as a router that one op computes; None if it is none."""
    method = _method_of(module)
    if method is None or refusal(module) is not None:
        return None
    form, proof = _forms[method].router, _proof_of(module)
    of_class = [(type(module), name, getattr(type(module), name)) for name in ("forward", "__call__")]
    state, names = module.__dict__, [name for name in form if type(name) is str]
    conditions = conditions_of(module, proof.dependencies, (*names, "weight", BIAS), attributes=of_class)
    if conditions is None:
        return None
    if type(form) is Softmax:
        return Router(conditions, state[form.top_k], form.normalized, form.narrow, None)
    groups = state[form.groups], state[form.top_groups], float(state[form.scaling])
    return Router(conditions, state[form.top_k], form.normalized, False, groups)


def refusal(module: nn.Module) -> Optional[str]:
    """Return the reason why a fused router runs its original forward in its present state; None if it is fused."""
    method = _method_of(module)
    found = "a patched class" if method is None else _operands(module, _forms[method])
    if isinstance(found, str):
        return found
    return refusals.of_global_state() or native.refusal("top_k_router", found[0])


_Operands = Tuple[Tensor, int, Tuple[Any, ...]]  # the weight, its width, and the op's other arguments


def _operands(module: nn.Module, form: _Form) -> Union[str, _Operands]:
    """Return the arguments of the op that a module holds, or the reason why it cannot be called."""
    state = module.__dict__
    weight = module.weight if _is_compiling() else state["_parameters"].get("weight")
    if type(weight) is not nn.Parameter or "weight" in state or weight.dim() != 2:
        return f"a weight of type {type(weight).__name__}"
    width, top_k = state.get(form.router.width), state.get(form.router.top_k)
    if type(width) is not int or type(top_k) is not int:
        return "unsupported attributes"
    experts = weight.shape[0]
    if weight.shape[1] != width or not 0 < top_k <= experts or top_k > _MOST_CHOSEN or experts > _MOST_EXPERTS:
        return f"{top_k} of {experts} experts"
    if type(form.router) is Sigmoid:
        return _of_sigmoids(module, form.router, weight, width, top_k)
    if weight.is_cpu and weight.dtype is not torch.float32:
        return f"no cpu kernel for {weight.dtype}"
    return weight, width, (top_k, form.router.normalized, form.router.narrow)


def _of_sigmoids(module: nn.Module, form: Sigmoid, weight: Tensor, width: int, top_k: int) -> Union[str, _Operands]:
    state = module.__dict__
    bias = state["_buffers"].get(BIAS)
    if type(bias) is not Tensor or BIAS in state:
        return f"a bias of type {type(bias).__name__}"
    experts, groups, top_groups, scaling = (state.get(name) for name in form[3:])
    if not all(type(number) is int for number in (experts, groups, top_groups)) or type(scaling) not in (int, float):
        return "unsupported attributes"
    if weight.is_cpu:
        return "no cpu kernel for a sigmoid router"
    if experts != weight.shape[0] or bias.shape != (experts,) or bias.device != weight.device:
        return f"{experts} experts"
    if not 0 < groups <= _MOST_GROUPS or experts % groups or experts < 2 * groups or not 0 < top_groups <= groups:
        return f"{top_groups} of {groups} groups"
    return weight, width, (bias, top_k, groups, top_groups, form.normalized, float(scaling))


_MOST_GROUPS = 32
_MOST_EXPERTS, _MOST_CHOSEN = 512, 32  # as in cuda/router/router.h


def _routed(module: nn.Module, form: _Form, x: Any) -> Optional[Tuple[Tensor, Tensor, Tensor]]:
    """Return the result of a router from one op; None if its original forward has to run."""
    if (
        type(x) is not Tensor
        or (not shortcut.is_grad_enabled() and module.training and shortcut.is_as_recorded(module, x))
        or dispatch._open_blocks[-1].name != "auto"
        or native.refusal("top_k_router", x) is not None
    ):
        return None
    if _is_compiling():
        if type(form.router) is Sigmoid:
            return None
        # Dynamo cannot trace compiled code; it guards on the values read here.
        flags = all(module.__dict__.get(name) is value for name, *values in form.guards.own for value in values)
        unpatched = F.softmax is _SOFTMAX and torch.topk is _TOPK
        disturbed = (
            not (flags and unpatched)
            or refusals.of_global_state() is not None
            or calls.composition_reason(x) is not None
        )
    else:
        holds = shortcut.plain.are_items(module.__dict__, form.guards.own)
        disturbed = not (holds and shortcut.plain.is_undisturbed())
        disturbed = disturbed or not shortcut.plain.are_unchanged(form.guards.unchanged)
    found = _operands(module, form)
    if disturbed or type(found) is str:
        return None
    weight, width, others = found
    if (
        x.dtype is not weight.dtype
        or x.device != weight.device
        or calls.autograd_follows(x, weight, *(part for part in others if isinstance(part, Tensor)))
    ):
        return None
    rows = x if x.dim() == 2 and x.shape[1] == width else x.reshape(-1, width)
    op = native.sigmoid_router if type(form.router) is Sigmoid else native.top_k_router
    return op(rows, weight, *others)
