"""Fusion of a mixture block, its router and its experts into one call of compiled code, in inference.

The class's forward is analysed: it passes all tokens to a router and to experts and returns the experts' output in the
shape of its input, optionally plus the output of a shared part. Router and experts are also fused separately. The one
call saves the host time between them: if all are as they were when analysed, neither is called as a module.
"""

from __future__ import annotations

import weakref
from types import FunctionType
from typing import Any, Dict, NamedTuple, Optional, Tuple

import torch
from torch import Tensor, nn

from ...backends import native
from ..methods import switching
from ..parts import refusals
from ..proving.evaluation import Evaluation, inputs
from ..proving.values import Bound, Dependency, Held, Node, NotProved, Proof, Proofs, Value, proved
from ..reading.attributes import class_of, of_call, own_method
from ..running import shortcut, split_mlps
from . import cached, mixtures, proofs, routers
from .cached import Entry
from .conditions import Conditions, conditions_of
from .routers import Router


class _Children(NamedTuple):
    router: str
    experts: str
    shared: Optional[str]  # a part called with the same input, whose result is added


class Record(NamedTuple):
    """A block in its present state. Compiled code reads the fields by position, and checks whether each still holds
    (torch-ext/calls/mixtures/plain_mixture.cpp)."""

    conditions: Conditions
    children: _Children
    router: Router
    experts: Entry


# By the block's id and the implementation that transformers selected for its experts. A finalizer removes the entries.
_records: Dict[int, Dict[Optional[str], Record]] = {}
_missed: Dict[int, Dict[Optional[str], int]] = {}
KIND = "block of a mixture"
_proofs = Proofs()
_plain = shortcut.plain
(_X,) = inputs("x")
_SHAPE = Node("shape", (_X,))


def fused_methods(module: nn.Module) -> Dict[str, FunctionType]:
    """Return the method to install in a mixture block; empty if the module is none or is not understood."""
    children = _children_of(module)
    if children is None:
        return {}
    method = class_of(module).forward
    made = switching.fused_forward(KIND, method, called)
    if children.shared is None:
        split_mlps.wholes[made] = split_mlps.Segment(method, (_records,), None, None)
    return {"forward": made}


def is_whole(module: nn.Module) -> bool:
    """True if compiled code computes a block together with a preceding norm and a following sum."""
    children = _children_of(module)
    return children is not None and children.shared is None


def refusal(module: nn.Module) -> Optional[str]:
    """Return the reason why a fused block in its present state calls its parts separately; None if it is one call."""
    children = _children_of(module)
    if children is None:
        return "a patched class"
    router, experts = (module._modules[name] for name in children[:2])
    reason = of_call(router) or of_call(experts) or routers.refusal(router) or mixtures.refusal(experts)
    if reason is None and native.chooses_experts(router.weight):
        return "experts whose kernels a performance model chooses"
    return reason or refusals.of_global_state()


def _children_of(module: nn.Module) -> Optional[_Children]:
    method = getattr(class_of(module), "forward", None)
    is_plain = isinstance(method, FunctionType) and not hasattr(method, "__wrapped__")
    if _plain is None or not is_plain or method.__code__.co_argcount != 2 or len(module._modules) not in (2, 3):
        return None
    parts = module._modules.values()
    if any(part is None or issubclass(type(part), torch.jit.ScriptModule) for part in parts):
        return None
    if not any(map(proofs.looks_like_experts, parts)):
        return None
    return _proof_of(module, method).found


def _proof_of(module: nn.Module, method: FunctionType) -> Proof:
    return _proofs.get((method, *map(class_of, module._modules.values())), module, lambda: _proved(module, method))


def _proved(module: nn.Module, method: FunctionType) -> Proof:
    evaluation = Evaluation(module, _of_part)
    return proved(evaluation, Bound(method, evaluation.root), (_X,), _read)


def _of_part(part: Held, given: Tuple[Value, ...]) -> Value:
    if len(part.path) == 1 and len(given) == 1 and routers.fused_methods(part.value):
        return tuple(Node(name, (part.path[0], *given)) for name in ("logits", "shares", "index"))
    if len(part.path) == 1 and len(given) == 3 and mixtures.fused_methods(part.value):
        return Node("experts", (part.path[0], *given))
    if len(part.path) == 1 and given == (_X,):
        return Node("shared", (part.path[0],))
    raise NotProved("a block that calls another module")


def _read(value: Value) -> Optional[_Children]:
    """Return the children of a block that returns the output of its experts for all tokens, routed by its router, plus
    the output of a shared part if there is one."""
    if not isinstance(value, Node):
        return None
    value, shared = value.args if value.op == "add" else (value, None)
    is_added = shared is not None
    if is_added and (not isinstance(value, Node) or not isinstance(shared, Node) or shared.op != "shared"):
        return None
    experts = value.args[0] if value.op in ("reshape", "view") else None
    if not isinstance(experts, Node) or experts.op != "experts" or not _is_shape(value.args[1]):
        return None
    name, rows, index, shares = experts.args
    router, given = index.args if isinstance(index, Node) and index.op == "index" else (None, None)
    if shares != Node("shares", (router, given)) or given not in (rows, _X) or not _are_rows(rows):
        return None
    return _Children(router, name, shared.args[0] if is_added else None)


def _is_shape(shape: Any) -> bool:
    """True for the sizes of x, assumed to have three dimensions: compiled code supports no other number."""
    if shape == (_SHAPE,):
        return True
    return len(shape) == 3 and all(size in (_size(place), _size(place - 3)) for place, size in enumerate(shape))


def _size(place: int) -> Node:
    return Node("item of", (_SHAPE, place)) if place >= 0 else Node("size", (_X, place))


def _are_rows(rows: Value) -> bool:
    if not isinstance(rows, Node) or rows.op not in ("reshape", "view") or rows.args[0] != _X:
        return False
    shape = rows.args[1]
    return len(shape) == 2 and shape[0] == -1 and shape[1] in (_size(2), _size(-1))


def called(module: nn.Module, x: Any) -> Optional[Tensor]:
    """Return the output of a block; None if its own code has to run."""
    if shortcut.is_grad_enabled() and isinstance(x, Tensor) and x.requires_grad:
        return None
    found = _plain.mixture(_records, module, x, None)
    if found is None and _learns(module):
        found = _plain.mixture(_records, module, x, None)
    if type(found) is not str:
        return found
    # The shared part is called only after all other checks have passed, so it runs only once.
    found = _plain.mixture(_records, module, x, getattr(module, found)(x))
    if found is None:  # its result does not fit; the next attempt needs twice as many misses
        _records.pop(id(module), None)
    return found


def _learns(module: nn.Module) -> bool:
    """Try to make a record of a block, at its first, second, fourth, eighth, ... miss; True if there is a new one."""
    if module.training or not _is_asked(module):
        return False
    children = _children_of(module)
    if children is None or refusal(module) is not None:
        return False
    router, experts = (module._modules[name] for name in children[:2])
    entry, found = cached.entry_of(experts), routers.router_of(router)
    if entry is None or found is None or entry.form.transposed or router.weight.shape[0] != entry.experts:
        return False
    calls = [(type(part), "__call__", nn.Module.__call__) for part in (router, experts)]
    # The children's dependencies are in their own conditions. Holding them here would keep the weights alive.
    own = [each for each in _proof_of(module, class_of(module).forward).dependencies if not _is_of_child(each)]
    conditions = conditions_of(module, own, filter(None, children), attributes=calls)
    if conditions is None:
        return False
    for part in (router, experts):
        shortcut.know_kernel(type(part), own_method(part, "forward") or type(part).forward)
    _records.setdefault(id(module), {})[_set_to(module)] = Record(conditions, children, found, entry)
    return True


def _is_of_child(dependency: Dependency) -> bool:
    return type(dependency.owner) is tuple and dependency.owner != ()


def _is_asked(module: nn.Module) -> bool:
    key, way = id(module), _set_to(module)
    if key not in _missed:
        weakref.finalize(module, _forget, key).atexit = False
    missed = _missed.setdefault(key, {})
    count = missed[way] = missed.get(way, 0) + 1
    return count & (count - 1) == 0


def _set_to(module: nn.Module) -> Optional[str]:
    return next((cached.set_to(part.__dict__) for part in module._modules.values() if "config" in part.__dict__), None)


def _forget(key: int) -> None:
    _records.pop(key, None)
    _missed.pop(key, None)
