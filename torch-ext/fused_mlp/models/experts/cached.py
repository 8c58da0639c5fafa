"""Cached decisions about modules of experts: the compiled op of one, for as long as what decided it is as it was.

To ask what a module of experts computes, and whether one op may compute it, takes longer than the op. Here is what it
was asked of: attributes, by their names and values, each compared by identity at each call. Weights are not remembered,
but read; the op asks of them, and of the inputs, what there is to ask.
"""

from __future__ import annotations

from types import CellType
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Tuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ... import dispatch
from ...autograd import training
from ...backends import native
from ...operands import is_narrowed
from ..parts import refusals
from ..proving.values import MISSING, Proof, held_at
from ..reading.attributes import FUSED, class_of
from ..running import shortcut
from . import interface, proofs

# Bound once: a name of another module costs two look-ups more.
_is_recording = training.is_recording
_plain = shortcut.plain  # None where nothing is compiled, and nothing is cached
_backends, _compute, _on_gpu = dispatch._open_blocks, native.experts_mlp, native.DEVICE_TYPE == "cuda"
_Parameter, _state_of = nn.Parameter, object.__getattribute__

_Pairs = Tuple[Tuple[Any, ...], ...]  # a name and its value, or a name alone that stands for nothing


class _Entry(NamedTuple):
    kind: type
    dtype: torch.dtype
    experts: int
    last: Optional[int]  # the largest index that is no error; None if none is
    weights: Tuple[Optional[str], ...]  # their names
    form: proofs.Form
    own: _Pairs  # in the module's ``__dict__``: to hold that would hold the weights
    parts: _Pairs  # in its ``_modules``
    activations: Tuple[nn.Module, ...]  # nobody may have put hooks on them
    items: Tuple[Tuple[Dict[str, Any], _Pairs], ...]  # in other dictionaries
    attributes: Tuple[Tuple[Any, str, Any], ...]
    absent: Tuple[Tuple[str, Mapping[str, Any]], ...]  # what classes must not have


# By module, and by what transformers is set to: it is set to another way for the time in which it decodes.
_known: WeakKeyDictionary[nn.Module, Dict[Optional[str], _Entry]] = WeakKeyDictionary()


def output(module: nn.Module, x: Any, index: Any, weights: Any) -> Optional[Tensor]:
    """The output of experts that are cached; None where they have to be asked about. Not for what is compiled."""
    entry = found(module, x, index, weights)
    if entry is None:
        return None
    recorded = _is_recording()
    if recorded and (x.requires_grad or weights.requires_grad):
        return None
    tensors = tensors_of(module, entry)
    if tensors is None or (recorded and any(tensor is not None and tensor.requires_grad for tensor in tensors)):
        return None
    up, form = tensors[0], entry.form
    if form.transposed and native.has_many_rows(index, up):
        return None
    if native.chooses_experts(x) and native.experts_refusal(
        x, index, up, tensors[1], form.interleaved, form.transposed
    ):
        return None
    if entry.last is not None and not are_experts(index, entry.last):
        return None
    try:
        return _compute(x, index, weights, *tensors, *form)
    except RuntimeError:  # the long way says what is wrong with the operands
        return None


def found(module: nn.Module, x: Any, index: Any, weights: Any) -> Optional[_Entry]:
    """The entry of a module, where it holds for a call; autograd is not asked about."""
    known = _known.get(module)
    if known is None:
        return None
    state = module.__dict__
    entry = known.get(_set_to(state))
    if entry is None or type(x) is not Tensor or type(index) is not Tensor or type(weights) is not Tensor:
        return None
    if (
        not (x.is_cuda if _on_gpu else x.is_cpu)
        or _backends[-1].name != "auto"
        or not _plain.is_undisturbed()
        or not _holds(entry, module, state)
        or is_narrowed(x)
    ):
        return None
    return entry


def tensors_of(module: nn.Module, entry: _Entry) -> Optional[List[Optional[Tensor]]]:
    """The weights of a cached module, or None where they are of another kind by now."""
    parameters, tensors = module.__dict__["_parameters"], []
    for name in entry.weights:
        tensor = None if name is None else parameters.get(name, module)
        if tensor is not None and type(tensor) is not _Parameter:
            return None
        tensors.append(tensor)
    up = tensors[0]
    return tensors if up.dtype is entry.dtype and up.size(0) == entry.experts else None


def are_experts(index: Tensor, last: int) -> bool:
    """True if indices are none but from 0 to ``last``. On a GPU nobody asks: the host would have to wait."""
    if not index.is_cpu or index.numel() == 0:
        return True
    low, high = torch.aminmax(index)
    return int(low) >= 0 and int(high) <= last


def _set_to(state: Dict[str, Any]) -> Optional[str]:
    config = state.get("config")  # whose attributes are found by functions in Python
    return None if config is None else _state_of(config, "__dict__").get(interface.SET_TO)


def _holds(entry: _Entry, module: nn.Module, state: Dict[str, Any]) -> bool:
    try:
        return (
            type(module) is entry.kind
            and _plain.are_items(state, entry.own)
            and _plain.are_items(state["_modules"], entry.parts)
            and all(_plain.are_items(*items) for items in entry.items)
            and all(map(_plain.is_bare, entry.activations))
            and _plain.are_unchanged(entry.attributes)
            and not any(name in found for name, found in entry.absent)
        )
    except AttributeError:  # one is gone
        return False


def store(module: nn.Module, proof: Proof, last: Optional[int], x: Tensor, index: Tensor) -> None:
    """Remembers a module that the compiled op has computed in its present state, if all that decided it can be told."""
    if dispatch.select("experts_mlp", x) is not native:
        return
    found, state, parameters = proof.found, module.__dict__, module.__dict__["_parameters"]
    method, way, weights = proofs.method_of(module), _set_to(state), found.weights[:4]
    if found.weights.norm is not None or not all(name is None or _is_plain(parameters, name) for name in weights):
        return
    own, parts = dict.fromkeys((*_ALWAYS, *filter(None, weights))), {}
    items: List[Tuple[Dict[str, Any], Tuple[str, ...]]] = []
    attributes = [(owner, name, getattr(owner, name)) for owner, name, _ in refusals._ORIGINALS]
    absent, called = [], []
    for each in proof.dependencies:
        owner = each.owner
        if type(owner) is tuple and each.part in ("class", "call"):
            if owner and isinstance(held_at(module, owner), nn.Module):
                part = held_at(module, owner)
                attributes.append((part, "__class__", type(part)))
                called += [part] if each.part == "call" else []
        elif type(owner) is tuple:
            held = held_at(module, owner).__dict__
            if each.part in held:
                items.append((held[each.part], (each.name,)))
            elif owner:
                items.append((held, (each.name,)))
            else:
                own[each.name] = None
        elif isinstance(owner, dict):
            items.append((owner, (each.name,)))
        elif each.value is MISSING:
            absent += [(each.name, vars(base)) for base in owner.__mro__[:-2]]  # but for those of torch and Python
        else:
            name = "cell_contents" if isinstance(owner, CellType) else each.name
            attributes.append((owner, name, getattr(owner, name)))
        if type(owner) is tuple and owner and owner[0] in state["_modules"]:
            parts[owner[0]] = state["_modules"][owner[0]]
    if any(isinstance(state.get(name), (Tensor, nn.Module)) for name in own) or not all(map(_plain.is_bare, called)):
        return
    if interface.decorates(method):
        decided = interface.decided_by(way, method) if way == interface.implementation_of(module) else None
        if decided is None:
            return
        items += [(table, (name,)) for table, name in decided]
    up, down = (parameters[name] for name in weights[:2])
    if native.experts_refusal(x, index, up, down, found.form.interleaved, found.form.transposed) is not None:
        return
    attributes.append((class_of(module), "forward", method))
    _known.setdefault(module, {})[way] = _Entry(
        kind=type(module),
        dtype=up.dtype,
        experts=up.shape[0],
        last=last,
        weights=weights,
        form=found.form,
        own=_pairs(state, own),
        parts=_pairs(parts, parts),
        activations=tuple(called),
        items=tuple((held, _pairs(held, names)) for held, names in items),
        attributes=tuple(attributes),
        absent=tuple(absent),
    )


# Attributes that decide besides those that were read.
_ALWAYS = ("config", "parametrizations", "_is_expert_parallel", FUSED)


def _pairs(dictionary: Dict[str, Any], names: Iterable[str]) -> _Pairs:
    return tuple((name, dictionary[name]) if name in dictionary else (name,) for name in names)


def _is_plain(parameters: Dict[str, Any], name: str) -> bool:
    return type(parameters.get(name)) is nn.Parameter
