"""Cached decisions about modules of experts: the compiled op of a module, valid while its conditions hold.

Deciding what a module of experts computes, and whether one op may compute it, takes longer than the op. The cache holds
the attributes that the decision depends on, by name and value; each call compares them by identity. Weights are read at
each call instead, and the op checks them and the inputs.
"""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Tuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ... import dispatch
from ...autograd import training
from ...backends import native
from ...operands import is_narrowed
from ..proving.values import Proof
from ..reading.attributes import class_of
from ..running import shortcut
from . import interface, proofs
from .conditions import Conditions, conditions_of

# Bound once: a name of another module costs two more look-ups.
_is_recording = training.is_recording
_plain = shortcut.plain  # None without compiled code; then nothing is cached
_backends, _compute, _on_gpu = dispatch._open_blocks, native.experts_mlp, native.DEVICE_TYPE == "cuda"
_Parameter, _state_of = nn.Parameter, object.__getattribute__


class Entry(NamedTuple):
    """Compiled code reads the fields by position (torch-ext/calls/mixtures/plain_mixture.cpp)."""

    conditions: Conditions
    dtype: torch.dtype
    experts: int
    weights: Tuple[Optional[str], ...]  # parameter names
    form: proofs.Form
    last: Optional[int]  # the largest index that raises no error; None if all are valid


# By module and by the implementation that transformers selected, because it selects another one while decoding.
_known: WeakKeyDictionary[nn.Module, Dict[Optional[str], Entry]] = WeakKeyDictionary()


def output(module: nn.Module, x: Any, index: Any, weights: Any) -> Optional[Tensor]:
    """Return the output of cached experts; None if the full checks have to run. Not for use under torch.compile."""
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
    if native.chooses_experts(x):
        call = native.ExpertsCall(x, index, up, tensors[1], form.interleaved, form.transposed)
        if native.experts_refusal(call) is not None:
            return None
    if entry.last is not None and not are_experts(index, entry.last):
        return None
    try:
        return _compute(x, index, weights, *tensors, *form)
    except RuntimeError:  # the slow path reports what is wrong with the operands
        return None


def found(module: nn.Module, x: Any, index: Any, weights: Any) -> Optional[Entry]:
    """Return the entry of a module if it holds for a call, ignoring autograd; None otherwise."""
    known = _known.get(module)
    if known is None:
        return None
    entry = known.get(set_to(module.__dict__))
    if entry is None or type(x) is not Tensor or type(index) is not Tensor or type(weights) is not Tensor:
        return None
    if (
        not (x.is_cuda if _on_gpu else x.is_cpu)
        or _backends[-1].name != "auto"
        or not _plain.is_undisturbed()
        or not _plain.hold(entry.conditions, module)
        or is_narrowed(x)
    ):
        return None
    return entry


def entry_of(module: nn.Module) -> Optional[Entry]:
    """Return the entry of a module as it is configured, which may no longer hold."""
    return _known.get(module, {}).get(set_to(module.__dict__))


def tensors_of(module: nn.Module, entry: Entry) -> Optional[List[Optional[Tensor]]]:
    """Return the weights of a cached module; None if their kind has changed."""
    parameters, tensors = module.__dict__["_parameters"], []
    for name in entry.weights:
        tensor = None if name is None else parameters.get(name, module)
        if tensor is not None and type(tensor) is not _Parameter:
            return None
        tensors.append(tensor)
    up = tensors[0]
    return tensors if up.dtype is entry.dtype and up.size(0) == entry.experts else None


def are_experts(index: Tensor, last: int) -> bool:
    """True if all indices are in 0..``last``. Always true on a GPU, where checking would block the host."""
    if not index.is_cpu or index.numel() == 0:
        return True
    low, high = torch.aminmax(index)
    return int(low) >= 0 and int(high) <= last


def set_to(state: Dict[str, Any]) -> Optional[str]:
    """Return the implementation that a module with this ``__dict__`` is configured to use, or None."""
    config = state.get("config")  # its attributes are looked up by Python functions
    return None if config is None else _state_of(config, "__dict__").get(interface.SET_TO)


def store(module: nn.Module, proof: Proof, last: Optional[int], x: Tensor, index: Tensor) -> None:
    """Cache a module that the compiled op has computed in its present state, if all its conditions can be expressed."""
    if dispatch.select("experts_mlp", x) is not native:
        return
    found, parameters = proof.found, module.__dict__["_parameters"]
    method, way, weights = proofs.method_of(module), set_to(module.__dict__), found.weights[:4]
    if found.weights.norm is not None or not all(name is None or _is_plain(parameters, name) for name in weights):
        return
    decided = []
    if interface.decorates(method):
        decided = interface.decided_by(way, method) if way == interface.implementation_of(module) else None
        if decided is None:
            return
    up, down = (parameters[name] for name in weights[:2])
    call = native.ExpertsCall(x, index, up, down, found.form.interleaved, found.form.transposed)
    if native.experts_refusal(call) is not None:
        return
    forward = class_of(module), "forward", method
    conditions = conditions_of(module, proof.dependencies, filter(None, weights), decided, [forward])
    if conditions is not None:
        entry = Entry(conditions, up.dtype, up.shape[0], weights, found.form, last)
        _known.setdefault(module, {})[way] = entry


def _is_plain(parameters: Dict[str, Any], name: str) -> bool:
    return type(parameters.get(name)) is nn.Parameter
