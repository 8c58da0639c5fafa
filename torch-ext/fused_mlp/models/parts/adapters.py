"""Linear layers with PEFT's low-rank adapters, read from their modules at each call.

A class is identified by its name and by a hash of the methods that a call runs; only versions whose source was analysed
are read. Layers of any other version, class or adapter variant are called.
"""

from __future__ import annotations

import functools
from typing import Any, Dict, Iterable, Optional, Tuple, Union

import torch
from torch import Tensor, nn

from ... import dispatch
from ...adapters import DROPS, Adapter, Layer
from ...operands import is_narrowed
from ...quantized.weights import QuantizedWeight
from ..reading import digests
from ..reading.attributes import are_unchanged, name_of_class, of_call
from . import quantized, refusals

is_traced = torch.compiler.is_dynamo_compiling
_NAME, _OF_4BIT = "peft.tuners.lora.layer.Linear", "peft.tuners.lora.bnb.Linear4bit"
_OF_8BIT, _OF_TORCHAO = "peft.tuners.lora.bnb.Linear8bitLt", "peft.tuners.lora.torchao.TorchaoLoraLinear"
# The names that the forward looks up in the class. Versions before 0.15 have no _cast_input_dtype.
_METHODS = ("forward", "_cast_input_dtype", "_check_forward_args", "disable_adapters", "merged", "active_adapters")
_METHODS += ("active_adapter",)
# Hashes of the source of these methods, each with the first version that contains it.
_DIGESTS = {
    _NAME: {
        "c7d74534b63f24c0": "0.11",
        "c4b4273bce2c0516": "0.12",
        "1ac9dabfcb94da02": "0.13",
        "5b8fe8b448fcc805": "0.14",
        "10d6e9e921684537": "0.15",
        "d86a2c0bd2112c14": "0.16",
        "5e9f75694d140a6e": "0.18",
        "c6a93b365556c804": "0.20",
    },
    _OF_4BIT: {
        "0d722a2feab7f4fb": "0.11",
        "f2ede42194044f6c": "0.12",
        "a0ac443e756a12ba": "0.13",
        "1f21c590e7a1dd48": "0.14",
        "9bbd02e5f3d899d1": "0.15",
        "97f8929f3fced7c9": "0.16",
        "64541131d22e7a73": "0.18",
        "3acadf67b9d59bb9": "0.20",
    },
    _OF_8BIT: {"6397ad6ac4bba5ca": "0.20"},
}
_DIGESTS[_OF_TORCHAO] = _DIGESTS[_NAME]  # it inherits all of these methods


# Known classes, with the owners, names and values that they looked up when analysed. Compiled code reads this.
CLASSES: Dict[type, Tuple[Tuple[Any, str, Any], ...]] = {}


def is_adapted(part: nn.Module) -> bool:
    """True if a module is a PEFT LoRA layer, in any state, around a weight that may be read."""
    kind = type(part)
    return known(kind) is not None and (kind.__qualname__ == "Linear" or dispatch.may_train_quantized())


def layer_of(part: nn.Module) -> Union[str, Layer]:
    """Return the operands of a linear layer, with its adapter if it has one; or a noun phrase for why it must be
    called.

    Under torch.compile all layers with adapters or quantised weights are called: no op supports them there, and Dynamo
    cannot trace the look-up of source code.
    """
    if is_traced():
        found = refusals.parameters_of(part)
        return found if isinstance(found, str) else Layer(*found)
    methods = known(type(part))
    if methods is None:
        return _without_adapter(part)
    if not are_unchanged(methods):
        return f"a patched {name_of_class(type(part))}"
    effect = of_call(part)
    return _read(part) if effect is None else effect


def of_projection(part: nn.Module) -> Optional[str]:
    """Return why a projection has to be called; None if it is a plain linear layer, perhaps with an adapter."""
    found = layer_of(part)
    return found if isinstance(found, str) else None


def of_state(part: nn.Module) -> Optional[str]:
    """Return why a projection has to be called in its present state, which may include active dropout."""
    found = layer_of(part)
    if isinstance(found, str):
        return found
    is_dropped = found.adapter is not None and found.adapter.dropout > 0.0 and not (DROPS and found.weight.is_cuda)
    return "dropout before its adapter" if is_dropped else None


def words_of(parts: Iterable[nn.Module]) -> str:
    """Return the report's words for layers' formats and adapters, which follow the MLP's pattern; empty if plain."""
    found = [layer for layer in map(layer_of, parts) if not isinstance(layer, str)]
    ranks = {layer.adapter.a.shape[0] for layer in found if layer.adapter is not None}
    with_adapters = f"{_WITH_ADAPTERS} of rank {', '.join(map(str, sorted(ranks)))}" if ranks else ""
    return f"{quantized.words_of(layer.weight for layer in found)}{with_adapters}"


def is_said_in(pattern: str) -> bool:
    """True if a pattern contains such words."""
    return _WITH_ADAPTERS in pattern or quantized.is_said_in(pattern)


_WITH_ADAPTERS = " with LoRA"


def is_wrapped(part: nn.Module) -> bool:
    """True for a layer with a product of its own, as long as it is in place; False for layers of known classes."""
    return refusals.is_wrapped(part) and not is_known(part)


def is_known(part: nn.Module) -> bool:
    """True for a layer with adapters or quantised weights whose class is known."""
    return is_adapted(part) or quantized.is_read(part)


def is_plainly_left(part: nn.Module) -> bool:
    """True if a layer's adapters are of another kind, more than one is active, or they have a dropout that no op
    supports. This is the cheap check for layers that are examined at every call and have to be called."""
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
    state, kind = part.__dict__, name_of_class(type(part))
    modules = state["_modules"]
    if not state.keys() >= _STATE:
        return f"a {kind} in an unrecognised form"
    base = _without_adapter(modules["base_layer"])
    if type(base) is str:
        return f"a {kind} around {base}"
    if state["_disable_adapters"]:
        return f"a {kind} whose merged adapters are yet to be unmerged" if state["merged_adapters"] else base
    if state["merged_adapters"]:
        return base
    is_quantized = type(base.weight) is QuantizedWeight
    if base.least_trained is None:
        return f"a {kind} around a weight in {base.weight.format}"
    name, held = state["_active_adapter"], modules["lora_A"].__dict__["_modules"]
    if type(name) is not str:
        active = [each for each in name if each in held]
        if len(active) > 1:
            return f"a {kind} with {len(active)} active adapters"
        name = active[0] if active else ""
    if name not in held:
        return base
    if name in state.get("lora_variant", ()) or state.get("use_dora", {}).get(name, False):
        return f"a {kind} of an unsupported variant"
    adapter = _adapter(state, held[name], name, kind)
    if type(adapter) is str:
        return adapter
    if is_quantized and not dispatch.may_train_quantized():
        return f"a {kind} around a quantised weight on a CPU, where its own kernel runs"
    is_of_any = is_quantized and base.dtype is None  # the product then has its input's dtype
    if is_of_any and adapter.bias is not None:
        return f"a {kind} with an adapter bias around a weight in {base.weight.format}"
    dtype = adapter.a.dtype if is_of_any else base.dtype or base.weight.dtype
    dtypes = {each.dtype for each in (adapter.a, adapter.b, adapter.bias) if each is not None}
    if dtypes != {dtype} and dtypes != {torch.float32}:
        return f"a {kind} with an adapter of another dtype"
    return base._replace(adapter=adapter)


def _without_adapter(part: nn.Module) -> Union[str, Layer]:
    if quantized.is_known(part):
        return quantized.layer_of(part)
    found = parameters_of(part)
    return found if type(found) is str else Layer(*found)


def _adapter(state: Dict[str, Any], a: nn.Module, name: str, kind: str) -> Union[str, Adapter]:
    modules, scaling = state["_modules"], state["scaling"].get(name)
    of_b, of_dropout = modules["lora_B"], modules["lora_dropout"]
    containers = {type(modules["lora_A"]), type(of_b), type(of_dropout)}
    if containers != _CONTAINERS or type(scaling) not in (int, float):
        return f"a {kind} in an unrecognised form"
    b, dropout = of_b.__dict__["_modules"].get(name), of_dropout.__dict__["_modules"].get(name)
    drops = type(dropout)
    if type(a) is not nn.Linear or type(b) is not nn.Linear or (drops is not nn.Identity and drops is not nn.Dropout):
        return f"a {kind} with unsupported parts"
    first, second = parameters_of(a), parameters_of(b)
    effect = next((each for each in (first, second) if type(each) is str), None) or of_call(dropout)
    if effect is not None:
        return f"a {kind} with {effect}"
    if first[1] is not None or not state.get("cast_input_dtype_enabled", True):
        return f"a {kind} of an unsupported variant"
    is_dropped = drops is nn.Dropout and dropout.training
    return Adapter(first[0], second[0], scaling, second[1], dropout.p if is_dropped else 0.0)


_CONTAINERS = {nn.ModuleDict}


def parameters_of(part: nn.Module) -> Union[str, Tuple[Tensor, Optional[Tensor]]]:
    """Like :func:`refusals.parameters_of`, but faster for layers that need no further checks."""
    if type(part) is not nn.Linear:
        return refusals.parameters_of(part)
    state = part.__dict__
    if not (
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
    return refusals.parameters_of(part)


# Attributes of a module that may override those of its class or of torch.
_OWN = {"forward", "weight", "bias", "_call_impl", "_compiled_call_impl"}
_PLAIN = {torch.float32, torch.bfloat16, torch.float16}


@functools.lru_cache(maxsize=64)
def known(kind: type) -> Optional[Tuple[Tuple[Any, str, Any], ...]]:
    """Return the methods of a class if it is one of PEFT's with known source; None otherwise."""
    name = name_of_class(kind)
    if name not in _DIGESTS or digest(kind) not in _DIGESTS[name]:
        return None
    names = ("__call__", *_METHODS)
    CLASSES[kind] = tuple((kind, name, getattr(kind, name)) for name in names if hasattr(kind, name))
    return CLASSES[kind]


def digest(kind: type) -> Optional[str]:
    """Return a hash of the source of the methods that a call of a class runs; None if there is none."""
    return digests.digest(digests.codes_of(kind, _METHODS))
