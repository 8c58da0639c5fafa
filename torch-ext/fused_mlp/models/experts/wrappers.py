"""PEFT's low-rank adapters on expert weights (``target_parameters``), with one ``ParamWrapper`` per weight.

PEFT materialises the changed weights of all experts at each call. Here the forward of the outermost wrapper reads the
factors of all wrappers and computes the experts with their adapters in one call. The class is identified by its source,
like those of ``parts/adapters.py``. Unknown classes, and wrappers with several active adapters, run as written.
"""

from __future__ import annotations

import functools
import inspect
from types import FunctionType
from typing import Any, Dict, Iterator, NamedTuple, Optional, Tuple, Union

import torch
from torch import Tensor, nn

from ...adapters import Adapter
from ...autograd import training
from ..methods import switching
from ..parts import adapters
from ..parts.guards import are_unchanged
from ..reading import digests
from ..reading.attributes import name_of_class, of_call
from ..running import shortcut
from . import cached, mixtures, proofs

_NAME = "peft.tuners.lora.layer.ParamWrapper"
# The names that a call looks up in the class, and a class that it puts around a weight.
_METHODS = ("forward", "_check_forward_args", "disable_adapters", "merged", "active_adapters", "active_adapter")
_METHODS += ("get_base_layer", "get_param", "get_delta_factors", "get_delta_weight", "_activate_lora")
_PROXY = "_LoraFactorsProxy"
# Hashes of their source, each with the first version that contains it.
_DIGESTS = {"690c7b5db9d1ff24": "0.21"}


class Wrapped(NamedTuple):
    """The module of experts inside wrappers, and their active adapters by the names of its weights."""

    module: nn.Module
    adapters: Dict[str, Tuple[Tensor, Tensor, float]]  # a weight's factors [E, m, rank] and [E, rank, n]


def is_wrapper(module: nn.Module) -> bool:
    """True if a module is such a wrapper, in any state, around experts whose computation is proved."""
    if known(type(module)) is None:
        return False
    base = list(_chain(module))[-1]
    return proofs.looks_like_experts(base) and isinstance(proofs.of(base), proofs.Experts)


def within(module: nn.Module) -> Tuple[nn.Module, ...]:
    """Return the wrappers inside another one, and the experts; the outermost wrapper reports their outcome."""
    return tuple(_chain(module))[1:] if is_wrapper(module) else ()


def fused_methods(module: nn.Module) -> Dict[str, FunctionType]:
    """Return the method to install in the outermost wrapper of a module of experts; empty for anything else."""
    if not is_wrapper(module):
        return {}
    return {"forward": switching.fused_forward(KIND, type(module).forward, _output, names_of=_names_of)}


KIND = "experts with adapters"


def refusal(module: nn.Module) -> Optional[str]:
    """Return the reason why a wrapper runs its original forward in its present state; None if it is fused."""
    found = _read(module)
    return found if isinstance(found, str) else mixtures.refusal(found.module, adapted=bool(found.adapters))


def rank_of(module: nn.Module) -> str:
    """Return the ranks of the active adapters, for a report."""
    found = _read(module)
    ranks = set() if isinstance(found, str) else {rhs.shape[1] for _, rhs, _ in found.adapters.values()}
    return ", ".join(map(str, sorted(ranks)))


def _output(module: nn.Module, x: Any, index: Any, weights: Any) -> Optional[Tensor]:
    if not shortcut.is_grad_enabled() and module.training and shortcut.is_as_recorded(module, x):
        return training.as_recorded(lambda given: _output(module, given, index, weights), x)
    *_, base = _chain(module)
    known = cached.found(base, x, index, weights)
    proof = known or proofs.of(base)
    found = _read(module, proof)
    if isinstance(found, str) or not found.adapters:  # without adapters PEFT calls the experts directly
        return None
    return mixtures.with_adapters(base, known, x, index, weights, _operands(proof, found))


def _names_of(wrapper: nn.Module) -> Tuple[str, ...]:
    """Return the names of a call's arguments: a wrapper passes all but its first on to the experts."""
    *_, base = _chain(wrapper)
    return (*switching.names_in(type(wrapper).forward)[:1], *mixtures.names_of(proofs.method_of(base))[1:])


def _operands(proof: Any, found: Wrapped) -> Tuple[Optional[Adapter], Optional[Adapter]]:
    """Return the adapters of both products. ``a^T b^T`` changes a weight ``[in, out]``; ``b a`` one ``[out, in]``."""

    def adapter(name: str) -> Optional[Adapter]:
        if name not in found.adapters:
            return None
        left, right, scaling = found.adapters[name]
        a, b = (left.transpose(1, 2), right.transpose(1, 2)) if proof.form.transposed else (right, left)
        return Adapter(a, b, scaling)

    up, down = proof.weights[:2]
    return adapter(up), adapter(down)


def _chain(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a wrapper, the wrappers inside it, and last the module that they wrap."""
    while module is not None:
        yield module
        module = module._modules.get("base_layer") if known(type(module)) is not None else None


def _read(module: nn.Module, proof: Any = None) -> Union[str, Wrapped]:
    """Return the current adapters of a wrapper and those inside it; or a noun phrase for why they must be called.

    ``proof`` is the known computation of the experts; None to look it up.
    """
    *wrappers, base = _chain(module)
    proof = proofs.of(base) if proof is None else proof
    if isinstance(proof, proofs.Unknown):
        return proof.reason
    if (
        "parametrizations" in base._modules
        or type(base).__call__ is not nn.Module.__call__
        or of_call(base) is not None
    ):
        return "experts that are called differently"
    found: Dict[str, Tuple[Tensor, Tensor, float]] = {}
    for wrapper in wrappers:
        if not are_unchanged(known(type(wrapper))):
            return f"a patched {_NAME}"
        effect = of_call(wrapper)
        adapter = _adapter(wrapper, base) if effect is None else f"a {_NAME} with {effect}"
        if isinstance(adapter, str):
            return adapter
        name = wrapper.__dict__.get("parameter_name")
        if adapter is None:
            continue
        if name in found or name not in proof.weights[:2]:
            return f"an adapter of {name}"
        found[name] = adapter
    return Wrapped(base, found)


_STATE = {"_disable_adapters", "merged_adapters", "_active_adapter", "scaling", "num_experts", "parameter_name"}
_STATE |= {"_did_swap_in_out_features"}


def _adapter(wrapper: nn.Module, base: nn.Module) -> Union[str, Tuple[Tensor, Tensor, float], None]:
    """Return a wrapper's factors and their scaling; None if no adapter is active; or the reason why it is called."""
    state, unknown = wrapper.__dict__, f"a {_NAME} in an unrecognised form"
    if not state.keys() >= _STATE:
        return unknown
    if state["_disable_adapters"] or state["merged_adapters"]:
        takes_out = state["_disable_adapters"] and state["merged_adapters"]
        return f"a {_NAME} whose merged adapters are yet to be unmerged" if takes_out else None
    modules, name, experts = state["_modules"], state["_active_adapter"], state["num_experts"]
    held = [modules[part] for part in ("lora_A", "lora_B")]
    names = [each for each in ([name] if type(name) is str else name) if each in held[0]._modules]
    if not names:
        return None
    if len(names) > 1:
        return f"a {_NAME} with {len(names)} active adapters"
    scaling, layers = state["scaling"].get(names[0]), [part._modules.get(names[0]) for part in held]
    is_known = type(scaling) in (int, float) and type(experts) is int and experts > 1
    if not is_known or any(type(layer) is not nn.Linear for layer in layers) or state.get("lora_variant"):
        return unknown
    factors = []
    for layer in layers:
        found = adapters.parameters_of(layer)
        if isinstance(found, str):
            return f"a {_NAME} with {found}"
        factors.append(found[0])
    a, b = factors
    weight = base._parameters.get(state["parameter_name"])
    if a.shape[0] % experts or b.shape[1] != a.shape[0] or weight is None or weight.shape[0] != experts:
        return unknown
    if a.dtype != b.dtype or a.dtype not in (weight.dtype, torch.float32) or a.device != weight.device:
        return f"a {_NAME} with adapters of another dtype"
    a, b = a.reshape(experts, -1, a.shape[1]), b.reshape(b.shape[0], -1, experts).permute(2, 0, 1)
    left, right = (b, a) if state["_did_swap_in_out_features"] else (a.transpose(1, 2), b.transpose(1, 2))
    if left.shape[1] != weight.shape[1] or right.shape[2] != weight.shape[2]:
        return unknown
    return left, right, scaling


@functools.lru_cache(maxsize=64)
def known(kind: type) -> Optional[Tuple[Tuple[Any, str, Any], ...]]:
    """Return the names that a call looks up in PEFT's wrapper, if a class is that wrapper with known source."""
    if name_of_class(kind) != _NAME or digest(kind) not in _DIGESTS:
        return None
    return tuple((kind, name, getattr(kind, name)) for name in ("__call__", *_METHODS))


def digest(kind: type) -> Optional[str]:
    """Return a hash of the source that a call of PEFT's wrapper runs; None if there is none."""
    activate = inspect.unwrap(getattr(kind, "_activate_lora", None))  # unwraps contextlib's decorator
    if not isinstance(activate, FunctionType):
        return None
    proxy = activate.__globals__.get(_PROXY)
    codes = digests.codes_of(kind, _METHODS[:-1])
    return digests.digest((*codes, activate.__code__, *digests.codes_of(proxy, ("forward",))))
