"""Execution of a call: which parts run as one op, and autograd around the others.

The functions are those of ``functional``, but take the code of an activation instead of its name. A call is one
op of one backend unless something has to see its parts; under autograd it is an op of ``training``. If something has to
see the parts (autocast with operands to cast, a tensor subclass with its own behaviour, an export, a ``torch.func``
transform), torch runs the GEMMs and at most the pointwise part is fused: ``composition_reason`` and
``recording_reason`` say why.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any, Callable, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from . import dispatch, experts, operands
from .activations import BY_CODE, Activation
from .autograd import experts_training, training
from .backends import flops, native, reference
from .operands import PLAIN_TENSORS, autocasts

flops.register()

Operands = Tuple[Optional[Tensor], ...]

# Bound once: looking these up is a measurable part of a small call.
_is_compiling = torch.compiler.is_compiling
_tracing_state = torch._C._get_tracing_state


def act_and_mul(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    given = (gate, up)
    is_plain = gate is not None and up is not None and is_plainly_recorded("act_and_mul", given) is False
    if is_plain and operands.are_row_major(*given):
        result = _by_op("act_and_mul", given, activation.code)
        if result is not None:
            return result
    operands.check_act_and_mul(gate, up)
    if gate.dtype != up.dtype:
        dtype = torch.promote_types(gate.dtype, up.dtype)  # as a product promotes under autocast
        gate, up = gate.to(dtype), up.to(dtype)
    return _act_and_mul(gate, up, activation.code)


def in_one_op(
    op: str, given: Operands, activation: Activation, memory: str, up_first: Optional[bool] = None
) -> Optional[Tensor]:
    """Return the result of a function as one op of a backend (under autograd one forward and one backward op).

    None if torch computes the parts, or the operands are invalid. ``up_first`` is that of :func:`training.run`.
    """
    try:
        _check(op, given, up_first)
    except (TypeError, ValueError):  # eager may broadcast them, or raise its own error
        return None
    return _taken(op, given, activation.code, memory, up_first)


def _taken(op: str, given: Operands, activation: int, memory: str, up_first: Optional[bool] = None) -> Optional[Tensor]:
    """Like :func:`in_one_op`, for operands that were checked."""
    if autograd_follows(*given):
        cast, more = autocast(given), () if up_first is None else (up_first,)
        if recording_reason(op, cast, activation, memory) is None:
            return _op_or_none(training.run, op, cast, activation, memory, *more)
        if memory == training.RECOMPUTED and not training.is_transformed():
            composed = _COMPOSED[op, up_first is not None]
            return checkpoint(composed, *given, activation, *more, use_reentrant=False, preserve_rng_state=False)
        return None
    if composition_reason(*given) is not None:
        return None
    chosen = dispatch.select(op, given[0])
    if chosen is reference:
        return None
    op, given = (op, given) if up_first is None else _unpacked(given, up_first)
    return _op_or_none(getattr(chosen, op), *given, activation)


def _check(op: str, given: Operands, up_first: Optional[bool]) -> None:
    if up_first is None:
        _CHECKS[op](*given)
    else:
        x, weight, _, second_weight, bias, _, second_bias = given
        operands.check_packed_gated(x, weight, second_weight, bias, second_bias)


def _unpacked(given: Operands, up_first: bool) -> Tuple[str, Operands]:
    """Return the function, and its operands, that a layer with packed gate and up amounts to."""
    x, weight, _, second_weight, bias, _, second_bias = given
    weights, biases = operands.halves(weight, up_first), operands.halves(bias, up_first)
    if second_weight is None:
        return "gated_linear", (x, *weights, *biases)
    return "gated_mlp", (x, *weights, second_weight, *biases, second_bias)


def _op_or_none(op: Callable[..., Tensor], *given: Any) -> Optional[Tensor]:
    return dispatch.op_or_parts(op, given, lambda: None)


def experts_mlp(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    gate_up_bias: Optional[Tensor],
    down_bias: Optional[Tensor],
    form: experts.Form,
) -> Tensor:
    given = (x, top_k_index, top_k_weights, gate_up_weight, down_weight, gate_up_bias, down_bias)
    result = _short_experts(given, form)
    if result is not None:
        return result
    operands.check_experts_mlp(*given, *form[1:])
    flat = [tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() != 2 else tensor for tensor in given[:3]]
    result = _recorded_experts((*flat, *given[3:]), form)
    if result is None:
        chosen = _experts_backend(given, form)
        compute = _composed_experts if chosen is None else chosen.experts_mlp
        arguments = (*flat, *given[3:], *form)
        result = dispatch.op_or_parts(compute, arguments, lambda: _composed_experts(*arguments))
    return result if x.dim() == 2 else result.reshape(*x.shape[:-1], result.shape[-1])


def adapted_experts(*arguments: Any, adapters: experts.Adapters) -> Tensor:
    """Run ``experts_mlp`` with adapters; all operands were checked."""
    *given, form = arguments
    x = given[0]
    flat = [tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() != 2 else tensor for tensor in given[:3]]
    flat = (*flat, *given[3:])
    result = _adapted_by_op(flat, form, adapters)
    if result is None:
        result = _composed_experts(*flat, *form, adapters=adapters)
    return result if x.dim() == 2 else result.reshape(*x.shape[:-1], result.shape[-1])


def adapted_reason(given: Operands, form: experts.Form, adapters: experts.Adapters) -> Optional[str]:
    """Return why a call with adapters is composed of parts; None if it is one op, or one op each way."""
    x, index, _, gate_up, down = given[:5]
    factors = [factor for adapter in adapters if adapter is not None for factor in adapter[:2]]
    reason = pointwise_reason(*given, *factors)
    if reason is not None or autocasts(x):
        return reason or "autocast casts the operands"
    if any(factor.numel() == 0 for factor in factors):
        return "an adapter of rank 0"
    if autograd_follows(x, *given[2:], *factors):
        return experts_training.refusal(given, form, adapters)
    if _is_compiling() or training.is_followed():
        return "a tracer, mode, hook or transform must see the separate operations"
    if native.DEVICE_TYPE != "cuda" or dispatch.select("experts_mlp", x) is not native or not native.is_hopper(x):
        return "no kernel with adapters for this device"
    if form.transposed or any(tensor is not None and tensor.dtype != x.dtype for tensor in (gate_up, down, *given[5:])):
        return "unsupported operands"
    refused = native.experts_refusal(native.ExpertsCall(x, index, gate_up, down, form.interleaved, False))
    return None if refused is None else "unsupported operands"


def _adapted_by_op(given: Operands, form: experts.Form, adapters: experts.Adapters) -> Optional[Tensor]:
    if adapted_reason(given, form, adapters) is not None:
        return None
    factors, scalings = experts_training.factors_of(adapters)
    if autograd_follows(given[0], *given[2:], *factors):
        return _op_or_none(experts_training.run, given, form, adapters)
    return _op_or_none(native.adapted_experts, *given, factors, scalings, *form)


def experts_by_a_kernel(*arguments: Any) -> Optional[Tensor]:
    """Run ``experts_mlp`` if a backend takes the call as one op; otherwise return None."""
    given, form = arguments[:-1], arguments[-1]
    result = _short_experts(given, form)
    if result is None:
        result = _recorded_experts(given, form)
    if result is not None:
        return result
    chosen = _experts_backend(given, form)
    return None if chosen is None or chosen is reference else experts_mlp(*arguments)


def _short_experts(given: Sequence[Optional[Tensor]], form: experts.Form) -> Optional[Tensor]:
    """``_by_op``, unless the parts may be faster: many rows of transposed weights, or a GPU that needs a time model."""
    stored = given[1], given[3]
    if form.transposed and all(isinstance(each, Tensor) for each in stored) and native.has_many_rows(*stored):
        return None
    if is_plainly_recorded("experts_mlp", given) is not False or native.chooses_experts(given[0]):
        return None
    return _by_op("experts_mlp", given, *form)


def _recorded_experts(given: Sequence[Optional[Tensor]], form: experts.Form) -> Optional[Tensor]:
    """Run ``experts_mlp`` under autograd with one op each way; None if it has to be composed of parts."""
    if not are_trained(given, form):
        return None
    return dispatch.op_or_parts(experts_training.run, (given, form), lambda: _composed_experts(*given, *form))


def are_trained(given: Sequence[Optional[Tensor]], form: experts.Form) -> bool:
    """True if a call of ``experts_mlp`` under autograd is one op forward and one op backward."""
    return _may_be_trained(given) and experts_training.refusal(given, form) is None


def untrained_reason(given: Sequence[Optional[Tensor]], form: experts.Form) -> Optional[str]:
    """Return why a call under autograd is not one op each way, if the kernels are the reason."""
    return experts_training.refusal(given, form) if _may_be_trained(given) else None


def _may_be_trained(given: Sequence[Optional[Tensor]]) -> bool:
    x = given[0]
    return autograd_follows(x, *given[2:]) and pointwise_reason(*given) is None and not autocasts(x)


def _experts_backend(given: Sequence[Optional[Tensor]], form: experts.Form) -> Optional[ModuleType]:
    """Return the backend that takes a call of ``experts_mlp`` as one op; None if it is composed of parts."""
    if experts_reason(*given) is not None:
        return None
    x, top_k_index, _, gate_up_weight, down_weight = given[:5]
    chosen = dispatch.select("experts_mlp", x)
    stored = (gate_up_weight, down_weight, form.interleaved, form.transposed)
    if chosen is native and native.experts_refusal(native.ExpertsCall(x, top_k_index, *stored)) is not None:
        chosen = dispatch.instead_of_native(x, top_k_index.numel() / gate_up_weight.shape[0])
    return chosen


def experts_reason(x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *others: Optional[Tensor]) -> Optional[str]:
    """Like :func:`composition_reason` for ``experts_mlp``, whose routing tensors have other dtypes than the rest."""
    reason = pointwise_reason(top_k_index, top_k_weights) or composition_reason(x, *others)
    return "autograd records the separate operations" if reason is None and autograd_follows(top_k_weights) else reason


def composition_reason(*given: Optional[Tensor]) -> Optional[str]:
    """Return why a call on these operands (the input first) cannot be one op; None if it can."""
    reason = pointwise_reason(*given)
    if reason is not None:
        return reason
    x = given[0]
    if autograd_follows(*given):
        return "autograd records the separate operations"
    if autocasts(x):
        dtype = torch.get_autocast_dtype(x.device.type)
        if any(tensor is not None and tensor.dtype != dtype for tensor in given):
            return f"autocast casts the operands to {dtype}"
    return None


def recording_reason(op: str, given: Tuple[Optional[Tensor], ...], activation: int, memory: str) -> Optional[str]:
    """Return why a call under autograd, on operands already cast by autocast, is not one op; None if it is."""
    reason = pointwise_reason(*given) or training.refusal(op, activation)
    if reason is not None:
        return reason
    x = given[0]
    if any(tensor is not None and tensor.dtype != x.dtype for tensor in given):
        return "operands of different dtypes"
    if not _is_compiling() and any(tensor is not None and tensor.is_inference() for tensor in given):
        return "an operand is an inference tensor, which autograd cannot save"
    recorded = training.recorded_elements(op, given, activation, memory)
    if dispatch.select(op, x, recorded) is native:
        return None
    return f"autograd records the separate operations: {dispatch.reasoned(op, x, recorded)[1]}"


def autograd_follows(*given: Optional[Tensor]) -> bool:
    """True if reverse-mode autograd records a call on these operands."""
    return training.is_recording() and any(tensor is not None and tensor.requires_grad for tensor in given)


def pointwise_reason(*given: Optional[Tensor]) -> Optional[str]:
    """Return why not even the pointwise part of a call on these operands can be one op; None if it can."""
    return _operand_reason(*given) or ambient_reason()


def _operand_reason(*given: Optional[Tensor]) -> Optional[str]:
    for tensor in given:
        if tensor is not None and type(tensor) not in PLAIN_TENSORS:
            return f"an operand is a {type(tensor).__name__}"
        if tensor is not None and tensor.layout != torch.strided:
            return f"an operand has the layout {tensor.layout}"
    return None


def ambient_reason() -> Optional[str]:
    """Return the global state that has to see the parts of any call, or None."""
    return _recorder() or ("torch.func transforms the separate operations" if training.is_transformed() else None)


def _recorder() -> Optional[str]:
    if forward_ad._current_level >= 0:
        return "forward-mode autograd differentiates the separate operations"
    # An exported program outlives this process, so it must not need this build's ops; and it may be trained, which ops
    # cannot be. The flag, because torch.compiler.is_exporting() is true during any compilation in torch 2.11.
    if _tracing_state() is not None or torch.compiler._is_exporting_flag:
        return "torch.export and torch.jit.trace record the separate operations"
    return None


# Without OpOverload's Python overhead, for calls that nothing traces.
_COMPILED_OPS = {
    name: getattr(getattr(native, name), "_op", getattr(native, name))
    for name in ("act_and_mul", "linear", "gated_linear", "gated_mlp", "mlp", "experts_mlp")
}
_plain = native.plain_modules  # None if this build has no compiled ops

# Ops that may be called without torch's dispatcher, and whether they are gated.
_CALLED_DIRECTLY = {"linear": False, "gated_linear": True, "mlp": False, "gated_mlp": True}


def computed(op: str, given: Operands, activation: int, memory: str = training.KEPT) -> Tensor:
    """Return the result of a function of ``functional``, given its name.

    It is one op of a backend, or the composed parts if they are faster or have to be seen.
    """
    recorded = is_plainly_recorded(op, given)
    is_left = bool(recorded) and training.is_left_to_parts(op, given, activation, memory)
    if recorded is not None and not is_left:
        result = _by_op(op, given, activation, memory=memory if recorded else None)
        if result is not None:
            return result
    _CHECKS[op](*given)
    found = None if is_left and memory == training.KEPT else _taken(op, given, activation, memory)
    return _COMPOSED[op, False](*given, activation) if found is None else found


def is_plainly_recorded(op: str, given: Sequence[Optional[Tensor]]) -> Optional[bool]:
    """True if autograd records a call that can be one op, judging by operands and global state; None if it cannot.

    Compiled code (torch-ext/calls/plain_modules.h) checks the same conditions of these as ``composition_reason`` and
    ``recording_reason``, in less time.
    """
    recorded = None if _plain is None or _is_compiling() else _plain.is_recorded(given)
    if op == "experts_mlp" and recorded is not None and dispatch.select(op, given[0]) is not native:
        return None  # some GPUs run experts on another backend
    return recorded


def _by_op(op: str, given: Sequence[Optional[Tensor]], *rest: Any, memory: Optional[str] = None) -> Optional[Tensor]:
    """Run the compiled op, or with ``memory`` the training op; None if it refuses the operands.

    The operands are not checked here: the op does that faster than Python, but reports less, so a refused call falls
    through to the Python checks, which explain the error.
    """
    try:
        if memory is not None:
            return training.run(op, given, *rest, memory, is_quiet=True)
        found = _plain.directly(_CALLED_DIRECTLY[op], (*given, *rest)) if op in _CALLED_DIRECTLY else None
        return _COMPILED_OPS[op](*given, *rest) if found is None else found
    except RuntimeError:
        return None


def autocast(given: Tuple[Optional[Tensor], ...]) -> Tuple[Optional[Tensor], ...]:
    """Return the operands as autocast casts them for a GEMM: only floating point, and not float64."""
    if not autocasts(given[0]):
        return given
    dtype = torch.get_autocast_dtype(given[0].device.type)
    cast = _cast_once if _may_be_cached() else Tensor.to
    return tuple(
        t if t is None or t.dtype == torch.float64 or not t.is_floating_point() else cast(t, dtype) for t in given
    )


def _may_be_cached() -> bool:
    """True if autocast's cache can be used: autograd records the operands, and no mode or transform is active."""
    if _is_compiling() or not training.is_recording() or not torch.is_autocast_cache_enabled():
        return False
    return not training.is_followed() and ambient_reason() is None


def _cast_once(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``tensor.to(dtype)``; a weight uses autocast's cache, so all its uses share one copy and one gradient."""
    is_matrix = type(tensor) in PLAIN_TENSORS and tensor.dtype == torch.float32 and tensor.dim() == 2
    if not (is_matrix and tensor.is_leaf and tensor.requires_grad):  # the cache accepts nothing else
        return tensor.to(dtype)
    # No function queries the cache, so run an empty product: its factors are cast, and autograd saves them.
    nothing = torch.empty(tensor.size(1), 0, dtype=dtype, device=tensor.device, requires_grad=True)
    return torch.mm(tensor, nothing).grad_fn._saved_self


def product(gate: Tensor, up: Tensor, activation: int) -> Tensor:
    """Return ``act(gate) * up`` for tensors that torch computed, by a kernel if that pays."""
    is_small = not _is_compiling() and dispatch.is_small_product(gate)
    return (reference.act_and_mul if is_small else _act_and_mul)(gate, up, activation)


def _composed_gated_linear(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    gate_bias: Optional[Tensor],
    up_bias: Optional[Tensor],
    activation: int,
) -> Tensor:
    gate, up = F.linear(x, gate_weight, gate_bias), F.linear(x, up_weight, up_bias)
    if dispatch.select("gated_linear", x) is reference:
        return reference.act_and_mul(gate, up, activation)
    return product(gate, up, activation)


def _composed_packed_gated(
    x: Tensor,
    weight: Tensor,
    _: None,
    second_weight: Optional[Tensor],
    bias: Optional[Tensor],
    __: None,
    second_bias: Optional[Tensor],
    activation: int,
    up_first: bool,
) -> Tensor:
    return reference.packed_gated(x, weight, second_weight, bias, second_bias, activation, up_first, _act_and_mul)


_CHECKS = {name: getattr(operands, f"check_{name}") for name in ("linear", "gated_linear", "mlp", "gated_mlp")}
_COMPOSED = {  # by function, and True if gate and up are the halves of one layer
    ("linear", False): reference.linear,
    ("mlp", False): reference.mlp,
    ("gated_linear", False): _composed_gated_linear,
    ("gated_mlp", False): functools.partial(reference.gated_mlp, first=_composed_gated_linear),
    ("gated_mlp", True): _composed_packed_gated,
}


def _composed_experts(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    gate_up_bias: Optional[Tensor],
    down_bias: Optional[Tensor],
    *form: Any,
    adapters: experts.Adapters = experts.NO_ADAPTERS,
) -> Tensor:
    given = (x, gate_up_weight, down_weight, gate_up_bias, down_bias)
    factors = [factor for adapter in adapters if adapter is not None for factor in adapter[:2]]
    all_given = (top_k_index, top_k_weights, *given, *factors)
    plain = _operand_reason(*all_given) is None and _recorder() is None and not _is_mapped()
    x, *others = autocast(given)  # autocast does not cover grouped GEMMs
    compute = experts.composed if plain else experts.traceable
    return compute(x, top_k_index, top_k_weights, *others, experts.Form(*form), _act_and_mul, adapters)


def _is_mapped() -> bool:
    """True if a call runs under torch.func.vmap, where no shape may depend on values."""
    if _is_compiling() or not training.is_transformed():
        return False
    return any(each.key() == _VMAP for each in torch._C._functorch.get_interpreter_stack())


_VMAP = torch._C._functorch.TransformType.Vmap


def _act_and_mul(gate: Tensor, up: Tensor, activation: int) -> Tensor:
    if pointwise_reason(gate, up) is not None or not operands.are_row_major(gate, up):  # torch's result has its strides
        return reference.act_and_mul(gate, up, activation)
    recorded = autograd_follows(gate, up)
    implementation = dispatch.select("act_and_mul", gate, gate.numel() if recorded else None)
    if recorded and implementation is not reference:
        return _ActAndMul.apply(gate, up, activation, implementation)
    return _computed_act_and_mul(implementation, gate, up, activation)


def _computed_act_and_mul(implementation: ModuleType, *given: Any) -> Tensor:
    return dispatch.op_or_parts(implementation.act_and_mul, given, lambda: reference.act_and_mul(*given))


class _ActAndMul(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(gate: Tensor, up: Tensor, activation: int, implementation) -> Tensor:
        return _computed_act_and_mul(implementation, gate, up, activation)

    @staticmethod
    def setup_context(ctx, inputs, output):
        gate, up, ctx.activation, ctx.implementation = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(gate, up if ctx.needs_input_grad[0] else None)

    @staticmethod
    def backward(ctx, grad: Optional[Tensor]) -> Tuple[Optional[Tensor], ...]:
        if grad is None:
            return (None,) * 4
        gate, up = ctx.saved_tensors
        function, is_seen = BY_CODE[ctx.activation].function, training.is_gradient_seen(grad)
        if not (is_seen or _is_compiling() or operands.are_row_major(grad, gate)):  # give them torch's strides
            with torch.enable_grad():
                own = gate.detach().requires_grad_()
                value = function(own)
            gate_grad = None if up is None else torch.autograd.grad(value, own, grad * up)[0]
            return gate_grad, grad * value.detach(), None, None
        implementation = reference if is_seen else ctx.implementation
        if up is None:
            return None, _computed_act_and_mul(implementation, gate, grad, ctx.activation), None, None
        given = grad, gate, up, ctx.activation
        backward = implementation.act_and_mul_backward
        gate_grad, up_grad = dispatch.op_or_parts(backward, given, lambda: reference.act_and_mul_backward(*given))
        return gate_grad, up_grad, None, None
