"""Forwards of fused experts. Each call decides whether ``experts_mlp`` runs.

It replaces a class's own loop. If it is a kernel, it also replaces transformers' grouped products. Composed of torch
operations, as under autograd on a CPU, it keeps more for the backward than either; the original forward runs then.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from types import FunctionType
from typing import Any, Callable, Dict, Optional, Tuple

import torch
from torch import Tensor, nn

from ... import calls, dispatch
from ...autograd import experts_training, training
from ...backends import native, reference
from ...experts import NO_ADAPTERS, Adapters
from ...quantized import experts as quantized_experts
from ..methods import switching
from ..parts import refusals
from ..proving.mixtures import SKIPS_ALL
from ..reading.attributes import as_written, of_call
from ..reading.source import remembered
from ..running import shortcut
from . import cached, interface, proofs, quantized
from .proofs import Experts, Unknown

_is_compiling = torch.compiler.is_compiling
_PLAIN = (Tensor, nn.Parameter)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def fused_methods(module: nn.Module) -> Dict[str, FunctionType]:
    """Return the method to install in a module of experts; empty if the module is none or is not understood."""
    found = proofs.of(module) if proofs.looks_like_experts(module) else None
    return {"forward": fused_method(proofs.method_of(module))} if isinstance(found, Experts) else {}


KIND = "experts"


def is_registered(module: nn.Module) -> bool:
    """True if a module of experts is configured to use the function of this package."""
    method = getattr(type(module), "forward", None)
    if interface.original_of(method) is None or interface.implementation_of(module) != interface.NAME:
        return False
    return interface.is_own(interface.NAME, method)


def are_left(module: nn.Module) -> bool:
    """True if an unfused module holds experts, by the interface of transformers or by its class name."""
    method = getattr(type(module), "forward", None)
    if interface.original_of(method) is not None:
        return True
    if not type(module).__name__.endswith("Experts") or not isinstance(method, FunctionType):
        return False
    # Experts with four-bit weights are called with other arguments, but their last weight has the same name.
    are_experts = proofs.takes_routing(method) or hasattr(module, "down_proj")
    return are_experts and not any(isinstance(part, nn.Linear) for part in module.modules())


@remembered
def fused_method(method: FunctionType) -> FunctionType:
    """Return the fused forward of a class of experts, with one call of ``experts_mlp`` where possible."""
    original = as_written("forward", method)
    instead, names = switching.instead_of(original), names_of(method)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        if kwargs:
            given = switching.in_order(args, kwargs, names)
            args, kwargs = (args, kwargs) if given is None else (given, {})
        if args and type(args[0]) is Tensor and args[0].is_cpu and shortcut.is_left_in_training(self, method, *args):
            return method(self, *args, **kwargs)
        is_off = not shortcut.is_grad_enabled() and self.training
        is_as_recorded = is_off and bool(args) and shortcut.is_as_recorded(self, args[0])
        if not (is_as_recorded or _is_compiling() or len(args) != 3 or kwargs):
            result = cached.output(self, *args)
            if result is not None:
                return result
        another = instead(self)
        if another is not None:
            return another(self, *args, **kwargs)
        result = None
        if len(args) == 3 and not kwargs:
            if is_as_recorded:
                result = training.as_recorded(lambda x: _fused(self, x, *args[1:]), args[0])
            else:
                result = _fused(self, *args)
        return method(self, *args, **kwargs) if result is None else result

    return switching.made(KIND, forward, original)


def names_of(method: FunctionType) -> Tuple[Optional[str], ...]:
    """Return the names by which a call of experts may give their arguments; None where transformers' functions, which
    may run in place of a class's own loop, have another name."""
    own = interface.original_of(method)
    if own is None:
        return switching.names_in(method)
    both = zip(switching.names_in(own), switching.names_in(registered))
    return tuple(name if name == other else None for name, other in both)


def registered(
    self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *others: Any, **named: Any
) -> Tensor:
    """Compute the experts of any class with transformers' interface; registered there under this package's name."""
    given = (hidden_states, top_k_index, top_k_weights)
    result = None
    if not (others or named):
        result = None if _is_compiling() else cached.output(self, *given)
        result = _fused(self, *given) if result is None else result
    if result is not None:
        return result
    method = proofs.method_of(self)
    return interface.fallback(method, hidden_states)(self, *given, *others, **named)


def routed(module: nn.Module, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Return the output of experts called by a layer of this package, from ``experts_mlp`` on every device."""
    called = of_call(module) is not None or type(module).__call__ is not nn.Module.__call__
    result = None if called else _fused(module, x, index, weights, interface.NAME)
    return module(x, index, weights) if result is None else result


def register_experts() -> None:
    """Register ``experts_mlp`` with transformers as an experts implementation named ``"fused_mlp"``.

    Afterwards ``from_pretrained(..., experts_implementation="fused_mlp")`` and
    ``model.set_experts_implementation("fused_mlp")`` select it, for every class with the experts interface. A class's
    computation is analysed at its first call. If it is not understood, or a weight must not be read (quantised, or of a
    tensor subclass), transformers' ``grouped_mm`` runs; ``explain(model)`` reports that.

    Raises:
        ImportError: transformers is missing, or has no such interface.
    """
    for table in interface.tables():
        table.register(interface.NAME, registered)


def with_adapters(
    module: nn.Module, known: Any, x: Tensor, index: Tensor, weights: Tensor, adapters: Adapters
) -> Optional[Tensor]:
    """Return the output of experts with adapters beside their weights; None if PEFT's own code has to run.

    ``known`` is the result of ``cached.found`` for the call.
    """
    tensors = None if known is None else cached.tensors_of(module, known)
    if tensors is None or _of_adapters(x) is not None or _of_call(x, index, weights, tensors[0]) is not None:
        return _fused(module, x, index, weights, adapters=adapters)
    if known.last is not None and not cached.are_experts(index, known.last):
        return None
    return calls.adapted_experts(x, index, weights, *tensors, known.form, adapters=adapters)


def refusal(
    module: nn.Module, asked: Optional[str] = None, adapted: bool = False, around: bool = False
) -> Optional[str]:
    """Return the reason why a module of experts runs its original forward in its present state; None if it is fused.

    ``asked`` is the name of the implementation that overrides the configured one, if any. ``adapted`` is true if there
    are adapters beside the weights, ``around`` if the wrapper by transformers' expert parallelism runs too.
    """
    found = proofs.of(module)
    if isinstance(found, Unknown):
        return found.reason
    tensors, way = proofs.tensors_of(module, found.weights), _way(module)
    if around:
        found, tensors = _in_a_call(module, found, tensors)
    if quantized.is_read(module):
        reason = "adapters on FP8 weights" if adapted else _of_module(module, found, tensors, way)
        is_asked = (asked or way) == interface.NAME and tensors[0].is_cpu
        stacks = quantized.stacks_of(module, found.weights)
        return reason or (None if is_asked else quantized.device_refusal(stacks, found.form))
    of_adapters = _of_adapters(tensors[0]) if adapted else None
    return _of_module(module, found, tensors, way) or _of_device(tensors[0], asked or way) or of_adapters


def _in_a_call(
    module: nn.Module, found: Experts, tensors: Tuple[Optional[Tensor], ...]
) -> Tuple[Experts, Tuple[Optional[Tensor], ...]]:
    """Return the experts and weights as the method of a module's class sees them: if transformers' expert parallelism
    wraps the method and replaces DTensors by their local tensors, the local ones."""
    origin = getattr(module.__dict__.get("forward"), "__module__", None) or ""
    if not origin.startswith("transformers.distributed.") or module.__dict__.get("_is_expert_parallel") is not True:
        return found, tensors
    own = tuple(tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors)
    return replace(found, experts=own[0].shape[0]), own


def trains_as_written(module: nn.Module) -> bool:
    """True if a fusible module of experts runs its original forward under autograd, as on a CPU."""
    return quantized.is_read(module) or proofs.tensors_of(module, proofs.of(module).weights)[0].is_cpu


def words_of(module: nn.Module) -> str:
    """Return the report's words for the format of a module's weights, which follow the pattern of experts."""
    found = proofs.of(module)
    return "" if found is None else quantized.words_of(module, found.weights, found.form)


def _fused(
    module: nn.Module,
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    asked: Optional[str] = None,
    adapters: Adapters = NO_ADAPTERS,
) -> Optional[Tensor]:
    """Return the output of experts from one call; None if their original forward has to run."""
    if type(x) not in _PLAIN:  # the cheapest checks come first
        return None
    follows = calls.autograd_follows(x, weights, *module._parameters.values())
    is_adapted = adapters != NO_ADAPTERS
    if _of_adapters(x) is not None if is_adapted else x.is_cpu and follows:
        return None
    way = _way(module)
    if _of_device(x, asked or way) is not None:
        return None
    proof = None if _is_compiling() else proofs.proof_of(module)
    found = proofs.constantly_of(module) if proof is None else proof.found
    if type(found) is not Experts:
        return None
    tensors = proofs.tensors_of(module, found.weights)
    if quantized.is_read(module):
        is_left = follows or is_adapted or proof is None
        return None if is_left else _of_codes(module, found, tensors, x, index, weights, asked or way)
    if _of_module(module, found, tensors, way) is not None or _of_call(x, index, weights, tensors[0]) is not None:
        return None
    if follows and not is_adapted:
        given = (x, index, weights, *tensors)
        is_op = calls.are_trained(given, found.form)
        is_light = experts_training.keeps_no_more(given, found.form) if is_op else experts_training.all_trained(tensors)
        if not is_light:  # the unfused code keeps less than the op, and with frozen weights less than its parts
            return None
    last = _last_index(module, found, way)
    if proof is not None and last is not None and not cached.are_experts(index, last):
        return None
    trained = way == interface.NAME and follows
    call: Callable[..., Optional[Tensor]] = (
        calls.experts_by_a_kernel if x.is_cuda and (trained or _are_products(way)) else calls.experts_mlp
    )
    if is_adapted:
        call = functools.partial(calls.adapted_experts, adapters=adapters)
    result = proofs.computed(module, found, call, x, index, weights, tensors)
    if result is not None and proof is not None and (is_adapted or not follows):
        cached.store(module, proof, last, x, index)
    return result


def _of_codes(
    module: nn.Module,
    found: Experts,
    tensors: Tuple[Optional[Tensor], ...],
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    way: str,
) -> Optional[Tensor]:
    """Return the output of experts with FP8 weights; None if transformers' own products have to run.

    Those round x to FP8. They are kept for many rows where no kernel here rounds x, because arithmetic is the
    bottleneck. They do not exist on a CPU: if this package is selected there, it decodes the weights.
    """
    if _of_module(module, found, tensors, way) is not None or _of_kind(x, index, weights, tensors[0]) is not None:
        return None
    given = (x, index, weights, *quantized.stacks_of(module, found.weights), None, None)
    last = _last_index(module, found, way)
    if last is not None and not cached.are_experts(index, last):
        return None
    is_asked = dispatch.is_forced() or (way == interface.NAME and x.is_cpu)
    if not is_asked and quantized_experts.refusal(given, found.form) is not None:
        return None
    return quantized_experts.computed(given, found.form)


def _last_index(module: nn.Module, found: Experts, way: str) -> Optional[int]:
    """Return the largest expert index for which the unfused code raises no error; None if it accepts any index."""
    if way in (_OWN_LOOP, "eager"):
        return None if found.skips == SKIPS_ALL else found.experts - 1 + found.skips
    parallel = module.__dict__.get("_is_expert_parallel") is True
    return None if way == interface.NAME else found.experts - 1 + parallel


def _way(module: nn.Module) -> str:
    """Return the name of the implementation that transformers uses for a module of experts; ``_OWN_LOOP`` if none."""
    decorated = interface.decorates(proofs.method_of(module))
    return interface.implementation_of(module) if decorated else _OWN_LOOP


_OWN_LOOP = "own loop"


def _of_module(module: nn.Module, found: Experts, tensors: Tuple[Optional[Tensor], ...], way: str) -> Optional[str]:
    """Return the reason why ``experts_mlp`` cannot compute a module, whatever the call's arguments; None if it can."""
    around = refusals.of_global_state()
    if around is not None:
        return around
    up = tensors[0]
    is_read = quantized.is_read(module)
    reason = quantized.refusal(module, found.weights) if is_read else refusal_of_weights(tensors)
    if reason is not None:
        return reason
    number = module.__dict__.get("num_experts", found.experts)
    if up.shape[0] != found.experts or number != found.experts:
        return f"weights for {up.shape[0]} experts instead of {number}"
    if way in (_OWN_LOOP, "eager"):
        if found.other_loop is not None:
            return f"a custom loop: {found.other_loop}"
        if found.wide and up.dtype != torch.float32:
            return "a custom loop that computes in float32"
    elif not interface.is_own(way, proofs.method_of(module)):
        return f"experts_implementation {way!r}"
    return None


def refusal_of_weights(tensors: Tuple[Optional[Tensor], ...]) -> Optional[str]:
    for tensor in tensors:
        if tensor is None:
            continue
        if type(tensor) not in _PLAIN:
            return f"a weight of type {type(tensor).__name__}"
        if tensor.layout is not torch.strided:
            return f"a weight of {tensor.layout}"
        if tensor.dtype not in _DTYPES or tensor.dtype != tensors[0].dtype:
            return f"a weight of {tensor.dtype}"
    return None


def _of_device(x: Tensor, way: str) -> Optional[str]:
    """Return the reason to keep the configured implementation for the device and dtype of x, or None."""
    if not _are_products(way):
        return None
    if dispatch.select("experts_mlp", x) is reference or (x.is_cuda and x.dtype == torch.float32):
        return f"{way} in {x.dtype} on {x.device.type}, which no kernel supports"
    return None


def _of_adapters(x: Tensor) -> Optional[str]:
    """Return the reason why PEFT computes adapters of experts on the device of x, or None."""
    if x.is_cuda and not (native.DEVICE_TYPE == "cuda" and native.is_hopper(x)):
        return "adapters on experts, which no kernel supports on this GPU"
    return None


def _are_products(way: str) -> bool:
    """True if an implementation is a grouped GEMM of transformers and no backend is forced."""
    return way in interface.PRODUCTS and dispatch._open_blocks[-1].name == "auto"


def _of_call(x: Any, index: Any, weights: Any, up: Tensor) -> Optional[str]:
    """Return the reason why ``experts_mlp`` cannot compute a call; None if it can."""
    return "unsupported operands" if x.dtype != up.dtype else _of_kind(x, index, weights, up)


def _of_kind(x: Any, index: Any, weights: Any, up: Tensor) -> Optional[str]:
    """Like :func:`_of_call`, for any dtype of x."""
    for tensor in (x, index, weights):
        if type(tensor) not in _PLAIN or tensor.dim() != 2 or tensor.device != up.device:
            return "unsupported operands"
    if not (x.is_cpu or x.is_cuda):
        return "unsupported operands"
    return "autocast" if calls.autocasts(x) else calls.ambient_reason()
