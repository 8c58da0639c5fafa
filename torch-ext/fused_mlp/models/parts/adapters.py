"""Linear layers with PEFT's low-rank adapters around them, as their modules hold them at a call.

Their class is known by name, and what it computes by its source: the methods that a call runs are those of a version
that was read. Any other version, class or variant of an adapter is called.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
from types import CodeType
from typing import Any, Dict, Iterable, Iterator, Optional, Tuple, Union

import torch
from torch import Tensor, nn

from ...adapters import DROPS, Adapter, Layer
from ...operands import is_narrowed
from ..reading.attributes import are_unchanged, of_call
from . import obstacles

is_traced = torch.compiler.is_dynamo_compiling
_NAME = "peft.tuners.lora.layer.Linear"
# The names that its forward looks up in the class. Versions before 0.15 have no _cast_input_dtype.
_METHODS = ("forward", "_cast_input_dtype", "_check_forward_args", "disable_adapters", "merged", "active_adapters")
_METHODS += ("active_adapter",)
# Hashes of the source of these methods, each with the first version that has it.
_DIGESTS = {
    "c7d74534b63f24c0": "0.11",
    "c4b4273bce2c0516": "0.12",
    "1ac9dabfcb94da02": "0.13",
    "5b8fe8b448fcc805": "0.14",
    "10d6e9e921684537": "0.15",
    "d86a2c0bd2112c14": "0.16",
    "5e9f75694d140a6e": "0.18",
    "c6a93b365556c804": "0.20",
}


# Those known by now, and what they looked up when they were read: owners, names and values. Compiled code asks them.
CLASSES: Dict[type, Tuple[Tuple[Any, str, Any], ...]] = {}


def is_adapted(part: nn.Module) -> bool:
    """True if a module is a layer of PEFT's LoRA, whatever its state is."""
    return known(type(part)) is not None


def layer_of(part: nn.Module) -> Union[str, Layer]:
    """The operands of a linear layer, with its adapter if it has one; or, as a noun phrase, why it must be called.

    torch.compile calls all layers with adapters: no op takes them there, and Dynamo cannot look for a source.
    """
    methods = None if is_traced() else known(type(part))
    if methods is None:
        found = obstacles.parameters_of(part)
        return found if isinstance(found, str) else Layer(*found)
    if not are_unchanged(methods):
        return f"a patched {_NAME}"
    effect = of_call(part)
    return _read(part) if effect is None else effect


def of_projection(part: nn.Module) -> Optional[str]:
    """The reason why a projection has to be called, or None if it is a plain linear layer, perhaps with an adapter."""
    found = layer_of(part)
    return found if isinstance(found, str) else None


def of_state(part: nn.Module) -> Optional[str]:
    """The reason why a projection has to be called in its present state: in training that may be a dropout."""
    found = layer_of(part)
    if isinstance(found, str):
        return found
    is_dropped = found.adapter is not None and found.adapter.dropout > 0.0 and not (DROPS and found.weight.is_cuda)
    return "dropout in front of its adapter" if is_dropped else None


def words_of(parts: Iterable[nn.Module]) -> str:
    """The words for the adapters of layers, behind the pattern of their MLP; nothing where there are none."""
    found = [layer_of(part) for part in parts]
    ranks = {layer.adapter.a.shape[0] for layer in found if not isinstance(layer, str) and layer.adapter is not None}
    return f"{WITH_ADAPTERS} of rank {', '.join(map(str, sorted(ranks)))}" if ranks else ""


WITH_ADAPTERS = " with LoRA"


def is_wrapped(part: nn.Module) -> bool:
    """True for a layer that multiplies in a way of its own as long as it is there: none whose adapter is known."""
    return obstacles.is_wrapped(part) and not is_adapted(part)


def is_plainly_left(part: nn.Module) -> bool:
    """True if the adapters of a layer are of another kind, several at once, or behind dropout that no op takes: all
    that it takes to call it, where it is asked at every call."""
    state = part.__dict__
    name = state.get("_active_adapter")
    if type(name) is list:
        if len(name) > 1:
            return True
        name = name[0] if name else None
    if name in state.get("lora_variant", ()):
        return True
    dropout = state["_modules"]["lora_dropout"].__dict__["_modules"].get(name)
    return type(dropout) is nn.Dropout and dropout.training and not DROPS


_STATE = {"_disable_adapters", "merged_adapters", "_active_adapter", "scaling"}


def _read(part: nn.Module) -> Union[str, Layer]:
    state = part.__dict__
    modules = state["_modules"]
    if not state.keys() >= _STATE:
        return f"a {_NAME} in a form that is not known"
    base = _parameters_of(modules["base_layer"])
    if type(base) is str:
        return f"a {_NAME} around {base}"
    if state["_disable_adapters"]:
        return f"a {_NAME} that will take its adapters out" if state["merged_adapters"] else Layer(*base)
    if state["merged_adapters"]:
        return Layer(*base)
    name, held = state["_active_adapter"], modules["lora_A"].__dict__["_modules"]
    if type(name) is not str:
        active = [each for each in name if each in held]
        if len(active) > 1:
            return f"a {_NAME} with {len(active)} active adapters"
        name = active[0] if active else ""
    if name not in held:
        return Layer(*base)
    if name in state.get("lora_variant", ()) or state.get("use_dora", {}).get(name, False):
        return f"a {_NAME} of another kind"
    adapter = _adapter(state, held[name], name)
    if type(adapter) is str:
        return adapter
    dtype, given = base[0].dtype, (adapter.a, adapter.b, adapter.bias)
    dtypes = {each.dtype for each in given if each is not None}
    if dtypes != {dtype} and dtypes != {torch.float32}:
        return f"a {_NAME} in another dtype"
    return Layer(base[0], base[1], adapter)


def _adapter(state: Dict[str, Any], a: nn.Module, name: str) -> Union[str, Adapter]:
    modules, scaling = state["_modules"], state["scaling"].get(name)
    of_b, of_dropout = modules["lora_B"], modules["lora_dropout"]
    containers = {type(modules["lora_A"]), type(of_b), type(of_dropout)}
    if containers != _CONTAINERS or type(scaling) not in (int, float):
        return f"a {_NAME} in a form that is not known"
    b, dropout = of_b.__dict__["_modules"].get(name), of_dropout.__dict__["_modules"].get(name)
    kind = type(dropout)
    if type(a) is not nn.Linear or type(b) is not nn.Linear or (kind is not nn.Identity and kind is not nn.Dropout):
        return f"a {_NAME} of other parts"
    first, second = _parameters_of(a), _parameters_of(b)
    effect = next((each for each in (first, second) if type(each) is str), None) or of_call(dropout)
    if effect is not None:
        return f"a {_NAME} with {effect}"
    if first[1] is not None or not state.get("cast_input_dtype_enabled", True):
        return f"a {_NAME} of another kind"
    is_dropped = kind is nn.Dropout and dropout.training
    return Adapter(first[0], second[0], scaling, second[1], dropout.p if is_dropped else 0.0)


_CONTAINERS = {nn.ModuleDict}


def _parameters_of(part: nn.Module) -> Union[str, Tuple[Tensor, Optional[Tensor]]]:
    """:func:`obstacles.parameters_of`, in less time for what needs no more questions."""
    state = part.__dict__
    if type(part) is nn.Linear and not (
        state["_forward_hooks"]
        or state["_forward_pre_hooks"]
        or state["_backward_hooks"]
        or state["_backward_pre_hooks"]
        or not _OWN.isdisjoint(state)
    ):
        held = state["_parameters"]
        weight, bias = held.get("weight"), held.get("bias", part)
        is_plain = type(weight) is nn.Parameter and bias is None and weight.dtype in _PLAIN
        if is_plain and weight.layout is torch.strided and not is_narrowed(weight):
            return weight, None
    return obstacles.parameters_of(part)


_OWN = {"forward", "weight", "bias"}  # what a module may hold in the place of what its class, or torch, has put there
_PLAIN = {torch.float32, torch.bfloat16, torch.float16}


@functools.lru_cache(maxsize=64)
def known(kind: type) -> Optional[Tuple[Tuple[Any, str, Any], ...]]:
    """The methods of PEFT's class, if this is it and its source is one that was read."""
    if f"{kind.__module__}.{kind.__qualname__}" != _NAME or digest(kind) not in _DIGESTS:
        return None
    names = ("__call__", *_METHODS)
    CLASSES[kind] = tuple((kind, name, getattr(kind, name)) for name in names if hasattr(kind, name))
    return CLASSES[kind]


def digest(kind: type) -> Optional[str]:
    """A hash of the source of the methods that a call of a class runs, without comments and white space; None where
    there is none."""
    try:
        sources = [inspect.getsource(code) for code in _codes(kind)]
    except (OSError, TypeError):
        return None
    bare = re.sub(r"\s+", "", re.sub(r"\s#.*", "", "\n".join(sources)))
    return hashlib.sha256(bare.encode()).hexdigest()[:16]


def _codes(kind: type) -> Iterator[CodeType]:
    """The code of the methods themselves: of a wrapper, inspect would find the source of what it stands around."""
    for name in _METHODS:
        found = inspect.getattr_static(kind, name, None)
        found = found.fget if isinstance(found, property) else found
        if found is not None:
            yield getattr(found, "__code__", None)
