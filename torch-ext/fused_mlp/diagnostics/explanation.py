"""``explain``: reports which implementation a call or a module uses, and why."""

from __future__ import annotations

import inspect
from collections import Counter
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any, Callable, Dict, Iterator, Optional, Tuple, Union

import torch
from torch import Tensor, nn

from .. import adapters, calls, dispatch, experts, functional, layers, operands
from ..activations import get_activation
from ..adapters import Adapter, Layer, Layers
from ..autograd import padded_experts, training
from ..backends import native, plans
from ..models import fuse, outcome, report
from ..models.experts.interface import NAME
from ..models.outcome import Outcome
from ..models.parts.recognition import activation_of
from ..models.reading.attributes import attribute_of, children_of, method_in, modules_of, place_of, state_of
from ..models.running import normed
from ..quantized import experts as quantized_experts
from ..quantized import weights as quantized


@dataclass(frozen=True)
class Explanation:
    """``implementation`` is the name of a backend ("cuda", "triton", "cpu", "torch"); for a module it is "fused",
    "partly fused" or "original". ``reason`` says why, in words.

    ``parts`` is the same as data. For a call that the compiled ops run, it says how each layer is computed, or under
    autograd, what is saved for the backward. For a module, it gives the outcome of each MLP in it, as :func:`fuse_mlps`
    reports it.
    """

    operation: str
    implementation: str
    reason: str
    parts: Tuple[Any, ...] = ()

    def __str__(self) -> str:
        return f"{self.operation}: {self.implementation} ({self.reason})"


def explain(target: Union[Callable[..., Tensor], nn.Module], *args: Any, **kwargs: Any) -> Explanation:
    """Report which implementation a call or a module would use, and why. Nothing is computed.

    Args:
        target: a public function of this package, followed by the arguments of the call; or a module and nothing else.

    Raises:
        TypeError: ``target`` is neither, or the arguments are not those of the function.
        ValueError, TypeError: whatever the call would raise for invalid arguments.
    """
    if isinstance(target, nn.Module):
        if args or kwargs:
            raise TypeError("explain takes no other arguments if target is a module")
        return _explain_module(target)
    if isinstance(target, FunctionType) and target in _OPERATIONS:
        return _explain_call(target, inspect.signature(target).bind(*args, **kwargs))
    raise TypeError(f"target must be a module or a public function of this package, got {target!r}")


_OPERATIONS = {
    functional.act_and_mul: "act_and_mul",
    functional.geglu: "act_and_mul",
    functional.swiglu: "act_and_mul",
    functional.linear: "linear",
    functional.gated_linear: "gated_linear",
    functional.gated_mlp: "gated_mlp",
    functional.mlp: "mlp",
    functional.experts_mlp: "experts_mlp",
}


def _explain_call(function: FunctionType, call: inspect.BoundArguments) -> Explanation:
    op = _OPERATIONS[function]
    call.apply_defaults()
    if op == "experts_mlp":
        return _explain_experts(**call.arguments)
    apart = ("activation", "approximate", "memory", *_ADAPTERS)
    named = {name: value for name, value in call.arguments.items() if name not in apart}
    given = list(named.values())
    memory = call.arguments.get("memory", training.KEPT)
    training.check_memory(memory)
    if "approximate" in call.arguments:
        functional.gelu_name(call.arguments["approximate"])
    activation = get_activation(call.arguments.get("activation"))
    getattr(operands, f"check_{op}")(*quantized.stand_ins(given[0], **named))
    if quantized.is_any(*given) or any(call.arguments.get(name) is not None for name in _ADAPTERS):
        return _explain_adapted(function.__name__, op, call.arguments, activation.code)
    if op != "act_and_mul" and calls.autograd_follows(*given):
        cast = calls.autocast(given)
        composed = calls.recording_reason(op, cast, activation.code, memory)
        if composed is None:
            name, reason = dispatch.reasoned(op, cast[0])
            gemms = training.products(op, cast, activation.code, memory)
            kept = plans.Kept(*training.kept(op, cast, memory), gemms)
            return Explanation(function.__name__, name, f"{reason}; one op forward and one backward; {kept}", (kept,))
        if memory == training.RECOMPUTED:
            composed = f"{composed}; the backward reruns the separate operations"
    else:
        composed = calls.composition_reason(*given)
    pointwise = calls.pointwise_reason(*given)
    recorded = _recorded(op, call)
    if op == "act_and_mul":
        composed = pointwise
    elif composed is not None and op.startswith("gated"):
        part = "torch" if pointwise is not None else dispatch.reasoned("act_and_mul", given[0], recorded)[0]
        composed = f"{composed}; pointwise part: {part}"
    if composed is not None:
        return Explanation(function.__name__, "torch", composed)
    name, reason = dispatch.reasoned(op, given[0], recorded)
    if name != native.DEVICE_TYPE or op == "act_and_mul":
        return Explanation(function.__name__, name, reason)
    layers, names = _GEMMS[op]
    given = [call.arguments[name] if name else None for name in names]
    parts = native.plan(layers, *given, activation.code)
    return Explanation(function.__name__, name, f"{reason}; {plans.in_words(parts)}", parts)


_ADAPTERS = ("adapter", "gate_adapter", "up_adapter", "down_adapter", "fc1_adapter", "fc2_adapter")


def _explain_adapted(function: str, op: str, given: Dict[str, Any], activation: int) -> Explanation:
    """Explain a call with adapters or quantised weights: one op, one op each way, or PyTorch's operations."""
    x, (_, *names) = given["x"], _GEMMS[op][1]
    layers = []
    for weight, bias in zip(names[:3], names[3:]):
        if weight is None:
            layers.append(None)
            continue
        adapter = weight.replace("weight", "adapter")
        adapters.check_any(x, **{adapter: (given[adapter], given[weight])})
        layers.append(Layer(given[weight], given[bias], given[adapter]))
    layers = Layers(*layers)
    reason = adapters.refusal(x, layers)
    if reason is not None:
        return Explanation(function, "torch", reason)
    trained, packed = calls.autograd_follows(x, *layers.tensors), layers.packed
    ways = "one op forward and one backward" if trained else "one op"
    formats = "" if packed is None else quantized.words_of(packed)
    if any(layer is not None and layer.adapter is not None for layer in layers):
        if packed is not None and not trained and dispatch.has_few_rows(x):
            return Explanation(function, native.DEVICE_TYPE, f"one op per layer, weights in {formats} read packed")
        ways = f"{ways}, adapters included"
    if layers.are_packed and not trained:
        weights, layouts, _, biases = quantized.lists_of(layers)
        x, *biases = calls.autocast((x, *biases))
        parts = native.plan_quantized(_GEMMS[op][0], x, weights, layouts, biases, activation, layers.up is not None)
        return Explanation(function, native.DEVICE_TYPE, f"{ways}; {formats}: {plans.in_words(parts)}", parts)
    ways += "" if packed is None else f"; weights in {formats} are decoded {'in each' if trained else 'first'}"
    return Explanation(function, native.DEVICE_TYPE, ways)


def _explain_experts(
    activation: Optional[str], gate_up_adapter: Optional[Adapter], down_adapter: Optional[Adapter], **given: Any
) -> Explanation:
    form = experts.Form(get_activation(activation).code, *list(given.values())[7:])
    if quantized_experts.is_any(given["gate_up_weight"], given["down_weight"]):
        operands_given = tuple(given.values())[:7]
        found = quantized_experts.explained(operands_given, form, (gate_up_adapter, down_adapter))
        return Explanation("experts_mlp", *found)
    operands.check_experts_mlp(**given)
    x, gate_up_weight, down_weight = (given[name] for name in ("x", "gate_up_weight", "down_weight"))
    flat = [given[name].reshape(-1, given[name].shape[-1]) for name in ("x", "top_k_index", "top_k_weights")]
    if gate_up_adapter is not None or down_adapter is not None:
        found = gate_up_adapter, down_adapter
        adapters.check_of_experts(x, form.transposed, found, (gate_up_weight, down_weight))
        reason = calls.adapted_reason((*flat, *list(given.values())[3:7]), form, found)
        name = native.DEVICE_TYPE if reason is None else "torch"
        return Explanation("experts_mlp", name, reason or "its GEMMs add the adapters")
    followed = [*flat, *list(given.values())[3:7]]
    stored = *flat[:2], gate_up_weight, down_weight, form.interleaved, form.transposed
    if calls.are_trained(followed, form):
        reason = f"{dispatch.reasoned('experts_mlp', x)[1]}; one op forward and one backward"
        if padded_experts.is_needed(followed, form):
            return Explanation("experts_mlp", native.DEVICE_TYPE, f"{reason}, on zero-padded copies")
        parts = native.plan_experts(native.ExpertsCall(*stored, trained=True))
        return Explanation("experts_mlp", native.DEVICE_TYPE, f"{reason}; {plans.in_words(parts)}", parts)
    composed = calls.experts_reason(*list(given.values())[:7])
    if composed is not None:
        untrained = calls.untrained_reason(followed, form)
        return Explanation("experts_mlp", "torch", composed if untrained is None else f"{composed}: {untrained}")
    name, reason = dispatch.reasoned("experts_mlp", x)
    if name != native.DEVICE_TYPE:
        return Explanation("experts_mlp", name, reason)
    top_k_index = given["top_k_index"]
    parts = native.plan_experts(native.ExpertsCall(*stored))
    if x.is_cuda and not any(part.fused for part in parts):
        rows = top_k_index.numel() / gate_up_weight.shape[0]
        if dispatch.instead_of_native(x, rows) is not None:
            return Explanation("experts_mlp", "triton", f"not {name}: {plans.REFUSALS[parts[0].refusal]}")
    return Explanation("experts_mlp", name, f"{reason}; {plans.in_words(parts)}", parts)


def _recorded(op: str, call: inspect.BoundArguments) -> Optional[int]:
    """Return the number of elements of the product of gate and up, if autograd records it."""
    if op == "act_and_mul":
        gate, up = call.arguments["gate"], call.arguments["up"]
        return gate.numel() if calls.autograd_follows(gate, up) else None
    if not op.startswith("gated"):
        return None
    names = ("x", "gate_weight", "up_weight", "gate_bias", "up_bias")
    x, gate_weight, *others = (call.arguments[name] for name in names)
    return x.shape[:-1].numel() * gate_weight.size(0) if calls.autograd_follows(x, gate_weight, *others) else None


# The layers of each function, and its arguments in the order that the compiled op `plan` takes them.
_GEMMS = {
    "linear": (("linear",), ("x", "weight", None, None, "bias", None, None)),
    "gated_linear": (("gate and up",), ("x", "gate_weight", "up_weight", None, "gate_bias", "up_bias", None)),
    "mlp": (("fc1", "fc2"), ("x", "fc1_weight", None, "fc2_weight", "fc1_bias", None, "fc2_bias")),
    "gated_mlp": (
        ("gate and up", "down"),
        ("x", "gate_weight", "up_weight", "down_weight", "gate_bias", "up_bias", "down_bias"),
    ),
}


_LAYER_FORWARDS = {getattr(layers, name).forward for name in layers.__all__}
_LAYER_EXTENTS = {layers.Linear.forward: outcome.BIAS}
_LAYER_EXTENTS.update({layer.forward: outcome.POINTWISE for layer in (layers.GeluAndMul, layers.GeluTanhAndMul)})
_LAYER_EXTENTS[layers.SiluAndMul.forward] = outcome.POINTWISE
_LAYER_ACTIVATIONS = ("act_fn", "activation_fn", "intermediate_act_fn")


def _explain_module(module: nn.Module) -> Explanation:
    """Explain a module by its own outcome, or else by its parts: how many are fused, and why the others are not."""
    name, found = type(module).__name__, tuple(_parts(module))
    beside = tuple(part for part in found if part.path and outcome.is_beside(part.pattern))
    parts = tuple(part for part in found if part not in beside)
    fused = [part for part in parts if part.fused]
    if parts and parts[0].path == "" and (len(parts) == 1 or parts[0].extent != outcome.NONE):
        root = parts[0]
        reason = root.reason or outcome.words_of(root.extent, root.pattern)
        implementation = "fused" if root.fused else "original" if root.extent == outcome.NONE else "partly fused"
        return Explanation(name, implementation, f"{reason}{_of_mode(module, implementation)}", parts)
    if not parts:
        implementation = "partly fused" if any(part.fused for part in beside) else "original"
        return Explanation(name, implementation, report.summary((), beside), beside)
    whys = Counter((part.class_name, part.reason) for part in parts if part.reasons)
    counted = (f"; {kind} ({n}): {why}" if n > 1 else f"; {kind}: {why}" for (kind, why), n in whys.items())
    nothing = all(part.extent == outcome.NONE for part in parts)
    implementation = "fused" if len(fused) == len(parts) else "original" if nothing else "partly fused"
    reason = f"{report.summary(parts, beside)}{''.join(counted)}{_of_mode(module, implementation)}"
    return Explanation(name, implementation, reason, parts)


def _of_mode(module: nn.Module, implementation: str) -> str:
    """Return a suffix for a module whose calls use the training kernels although autograd records nothing."""
    is_training = attribute_of(module, "training") is True
    is_off = is_training and not (torch.is_grad_enabled() or torch.is_inference_mode_enabled())
    says = is_off and implementation != "original"
    return "; in training mode, so bitwise equal to a call that autograd records" if says else ""


def _parts(model: nn.Module) -> Iterator[report.ModuleReport]:
    """Yield the modules of a model that are MLPs or run a layer of this package, in their present state, root first."""
    taken_in = set()  # by id: experts that an enclosing layer computes, and first modules of split MLPs
    around: Dict[int, str] = {}
    for path, module in modules_of(model):
        if id(module) in taken_in:
            continue
        kernel = inspect.getattr_static(type(module), "forward")
        if "forward" in state_of(module):
            kernel = method_in(module, place_of(module, "forward"))
        is_layer = isinstance(kernel, FunctionType) and kernel in _LAYER_FORWARDS and not fuse.is_fused(module)
        if is_layer and kernel is layers.MegaBlocksMoeMLP.forward:
            taken_in.add(id(attribute_of(module, "experts")))
        found = _outcome_of_layer(module, kernel) if is_layer else fuse.outcome_of(module)
        taken_in.update(map(id, fuse.first_modules_in(module)))
        around.update(fuse.blocks_around(module))
        if found is not None:
            yield report.of_module(path, module, fuse.in_block(found, around.get(id(module), "")))


def _outcome_of_layer(module: nn.Module, kernel: Callable[..., Tensor]) -> Outcome:
    if kernel is layers.MegaBlocksMoeMLP.forward:
        return outcome.of_experts(attribute_of(module, "experts"), NAME)
    if kernel is layers.RMSNorm.forward:
        takes = normed.takes(module)
        return outcome.of_norm(module) if takes else Outcome(outcome.NONE, (outcome.Reason(outcome.UNKNOWN_FORM),))
    if kernel is layers.Output.forward:
        parts = {name: attribute_of(module, name) for name in ("dense", "dropout", "LayerNorm")}
        return outcome.of_sum(parts)
    for attribute in _LAYER_ACTIVATIONS:
        act = attribute_of(module, attribute)
        if act is not None and activation_of(act) is None:
            return Outcome(outcome.NONE, (outcome.of_activation(act),))
    projections = {name: part for name, part in children_of(module).items() if name not in _LAYER_ACTIVATIONS}
    if kernel in _LAYER_EXTENTS or not projections:
        return Outcome(_LAYER_EXTENTS.get(kernel, outcome.ACTIVATION))
    found = outcome.of_parts(projections)
    return replace(found, pattern=f"{_LAYER_PATTERNS.get(kernel, '')}{found.pattern}")


_LAYER_PATTERNS = {
    **dict.fromkeys((each.forward for each in (layers.GatedMLP, layers.GeGLUMLP, layers.SwiGLUMLP)), "gated"),
    layers.PackedGatedMLP.forward: "packed gated",
    layers.MLP.forward: "plain",
    layers.Intermediate.forward: "linear",
}
