"""What was decided of modules of experts: the compiled op of one, for as long as what decided it is as it was.

To ask what a module of experts computes, and whether one op may compute it, takes longer than the op. Here is what it
was asked of: attributes, by their names and values, each compared by identity at each call. Weights are not remembered,
but read; the op asks of them, and of the inputs, what there is to ask.
"""

from __future__ import annotations

from typing import Any, Dict, Iterable, NamedTuple, Optional, Tuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from .. import dispatch, training
from ..backends import native
from ..operands import is_narrowed
from . import experts, interface, obstacles, shortcut, switching
from .recognition import activation_of

# Bound once: a name of another module costs two look-ups more.
_is_recording = training.is_recording
_plain = shortcut.plain  # None where nothing is compiled, and nothing settled
_backends, _compute, _on_gpu = dispatch._open_blocks, native.experts_mlp, native.DEVICE_TYPE == "cuda"
_Parameter, _state_of = nn.Parameter, object.__getattribute__

_Pairs = Tuple[Tuple[Any, ...], ...]  # a name and its value, or a name alone that stands for nothing


class _Settled(NamedTuple):
    kind: type
    dtype: torch.dtype
    experts: int
    weights: Tuple[Optional[str], ...]  # their names
    form: experts.Form
    own: _Pairs  # in the module's ``__dict__``: to hold that would hold the weights
    parts: _Pairs  # in its ``_modules``
    activations: Tuple[nn.Module, ...]  # nobody may have put hooks on them
    items: Tuple[Tuple[Dict[str, Any], _Pairs], ...]  # in other dictionaries
    attributes: Tuple[Tuple[Any, str, Any], ...]


# By module, and by what transformers is set to: it is set to another way for the time in which it decodes.
_known: WeakKeyDictionary[nn.Module, Dict[Optional[str], _Settled]] = WeakKeyDictionary()


def output(module: nn.Module, x: Any, index: Any, weights: Any) -> Optional[Tensor]:
    """The output of experts that are settled; None where they have to be asked about. Not for what is compiled."""
    known = _known.get(module)
    if known is None:
        return None
    state = module.__dict__
    settled = known.get(_set_to(state))
    if settled is None or type(x) is not Tensor or type(index) is not Tensor or type(weights) is not Tensor:
        return None
    if (
        not (x.is_cuda if _on_gpu else x.is_cpu)
        or _backends[-1].name != "auto"
        or not _plain.is_undisturbed()
        or not _holds(settled, module, state)
    ):
        return None
    parameters, recorded = state["_parameters"], _is_recording()
    if recorded and (x.requires_grad or weights.requires_grad):
        return None
    tensors = []
    for name in settled.weights:
        tensor = None if name is None else parameters.get(name, module)
        if tensor is not None and (type(tensor) is not _Parameter or (recorded and tensor.requires_grad)):
            return None
        tensors.append(tensor)
    up, form = tensors[0], settled.form
    if up.dtype is not settled.dtype or up.size(0) != settled.experts or is_narrowed(x):
        return None
    if form.transposed and native.has_many_rows(index, up):
        return None
    try:
        return _compute(x, index, weights, *tensors, *form)
    except RuntimeError:  # the long way says what is wrong with the operands
        return None


def _set_to(state: Dict[str, Any]) -> Optional[str]:
    config = state.get("config")  # whose attributes are found by functions in Python
    return None if config is None else _state_of(config, "__dict__").get(interface.SET_TO)


def _holds(settled: _Settled, module: nn.Module, state: Dict[str, Any]) -> bool:
    try:
        return (
            type(module) is settled.kind
            and _plain.are_items(state, settled.own)
            and _plain.are_items(state["_modules"], settled.parts)
            and all(_plain.are_items(*items) for items in settled.items)
            and all(map(_plain.is_bare, settled.activations))
            and _plain.are_unchanged(settled.attributes)
        )
    except AttributeError:  # one is gone
        return False


def settle(module: nn.Module, found: experts.Experts, x: Tensor, index: Tensor) -> None:
    """Remembers a module that the compiled op has computed in its present state, if all that decided it can be told."""
    if dispatch.select("experts_mlp", x) is not native:
        return
    original, state, parameters = switching.class_of(module), module.__dict__, module.__dict__["_parameters"]
    method, way = experts.method_of(module), _set_to(state)
    read, weights = experts.names_read(method, getattr(original, "_apply_gate", None)), found.weights[:4]
    parts = {name: state["_modules"][name] for name in read if name in state["_modules"]}
    # What is nowhere is no attribute of the module's, but of something else that has a name in its methods.
    names = {*_ALWAYS, *filter(None, weights), *(name for name in read if name in state or hasattr(original, name))}
    if found.weights.norm is not None or not all(name is None or _is_plain(parameters, name) for name in weights):
        return
    if any(type(state.get(name)) not in _VALUES for name in names if name not in ("config", switching.FUSED)):
        return
    activations = tuple(parts.values())
    if any(act is None or activation_of(act) is None or not _plain.is_bare(act) for act in activations):
        return
    items = [(act.__dict__, (("approximate", act.approximate),)) for act in activations if type(act) is nn.GELU]
    if interface.decorates(method):
        decided = interface.decided_by(way, method) if way == interface.implementation_of(module) else None
        if decided is None:
            return
        items += [(table, _pairs(table, (name,))) for table, name in decided]
    up, down = (parameters[name] for name in weights[:2])
    if native.experts_refusal(x, index, up, down, found.form.interleaved, found.form.transposed) is not None:
        return
    classes = [(original, name) for name in names if hasattr(original, name)] + [(original, "forward")]
    classes += [(act, "__class__") for act in activations]
    classes += [(owner, name) for owner, name, _ in obstacles._ORIGINALS]
    classes += [(type(act), name) for act in activations for name in ("forward", "__call__")]
    _known.setdefault(module, {})[way] = _Settled(
        kind=type(module),
        dtype=up.dtype,
        experts=up.shape[0],
        weights=weights,
        form=found.form,
        own=_pairs(state, names),
        parts=_pairs(parts, parts),
        activations=activations,
        items=tuple(items),
        attributes=tuple((owner, name, getattr(owner, name)) for owner, name in classes),
    )


# What decides besides the attributes that the methods of a class read.
_ALWAYS = ("config", "num_experts", "_apply_gate", "parametrizations", switching.FUSED)

# Values that stay what they are, and hold no module: what held it would keep it.
_VALUES = (bool, int, float, str, type(None))


def _pairs(dictionary: Dict[str, Any], names: Iterable[str]) -> _Pairs:
    return tuple((name, dictionary[name]) if name in dictionary else (name,) for name in names)


def _is_plain(parameters: Dict[str, Any], name: str) -> bool:
    return type(parameters.get(name)) is nn.Parameter
