"""Linear layers with low-rank adapters (LoRA), and functions of several of them.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", arXiv:2106.09685.
"""

from __future__ import annotations

import functools
from operator import itemgetter
from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import calls, dispatch, drawn
from .activations import BY_CODE, get_activation
from .autograd import nodes, training
from .backends import native
from .operands import OperandTypeError, OperandValueError, check_like, check_number, halves, shape_of
from .quantized import weights as quantized
from .quantized.weights import AnyWeight, QuantizedWeight


class Adapter(NamedTuple):
    """``scaling * (dropout(x) a^T) b^T``, which a layer adds to its product.

    ``a`` is ``[rank, in]`` and ``b`` ``[out, rank]``, on the layer's device, in its dtype or float32. ``bias``,
    ``[out]`` or None, is scaled too. ``dropout`` is the probability that an element of ``x`` is dropped, and 0 outside
    of training. An adapter of experts has an ``a`` ``[experts, rank, in]`` and a ``b`` ``[experts, out, rank]``, and
    neither bias nor dropout.
    """

    a: Tensor
    b: Tensor
    scaling: float = 1.0
    bias: Optional[Tensor] = None
    dropout: float = 0.0


class Layer(NamedTuple):
    """``x weight^T + bias``, and its adapter, if any: ``weight`` is ``[out, in]``, ``bias`` ``[out]`` or None.

    ``dtype`` is the dtype of the product if that of x and the result may differ, otherwise None. ``least_trained`` is
    the least number of rows at which a model's quantised layer without an adapter is fused under autograd; None for a
    layer that is never fused there, with or without an adapter.
    """

    weight: AnyWeight
    bias: Optional[Tensor] = None
    adapter: Optional[Adapter] = None
    dtype: Optional[torch.dtype] = None
    least_trained: Optional[int] = 0

    def __call__(self, x: Tensor, mask: Optional[Tensor] = None) -> Tensor:
        """Compute the result with torch operations, ``[..., out]``, in the dtype of the layer's own product.

        ``mask`` is the mask of an earlier dropout, in bits (torch-ext/ops/adapted.h).
        """
        multiply = quantized.product if type(self.weight) is QuantizedWeight else F.linear
        result = multiply(x, self.weight, self.bias)
        if self.adapter is None:
            return result
        a, b, scaling, bias, dropout = self.adapter
        given = x.to(a.dtype)
        if mask is not None:
            given = given * _kept(mask, x).to(a.dtype) / (1.0 - dropout)
        elif dropout > 0.0:
            given = F.dropout(given, dropout)
        return (result + F.linear(F.linear(given, a), b, bias) * scaling).to(result.dtype)


class Layers(NamedTuple):
    """The layers of a call: ``first``, or gate; ``up``, if there is one; and the ``second``, or down, of an MLP."""

    first: Layer
    up: Optional[Layer] = None
    second: Optional[Layer] = None

    @property
    def op(self) -> str:
        """The function that computes them without adapters."""
        single = "linear" if self.up is None else "gated_linear"
        whole = "mlp" if self.up is None else "gated_mlp"
        return single if self.second is None else whole

    @property
    def tensors(self) -> Tuple[Optional[Tensor], ...]:
        """Weights, biases, a and b, each for the three layers. A bias is the sum of the layer's and its adapter's.

        Quantised weights are missing; ``packed`` holds them.
        """
        weights, biases, a, b = [None] * 3, [None] * 3, [None] * 3, [None] * 3
        for place, layer in enumerate(self):
            if layer is not None:
                weight, biases[place], adapter, *_ = layer
                weights[place] = None if type(weight) is QuantizedWeight else weight
                if adapter is not None:
                    a[place], b[place], _, bias, _ = adapter
                    if bias is not None:
                        biases[place] = _sum_of_biases(layer)
        return (*weights, *biases, *a, *b)

    @property
    def packed(self) -> Packed:
        """The quantised weights of the three layers; None if there are none."""
        weights = [None if layer is None else layer.weight for layer in self]
        found = tuple([weight if type(weight) is QuantizedWeight else None for weight in weights])
        return None if found == _NONE else found

    @property
    def are_packed(self) -> bool:
        """True if all weights are quantised, and there is no adapter."""
        for layer in self:
            if layer is not None and (layer.adapter is not None or type(layer.weight) is not QuantizedWeight):
                return False
        return True

    @property
    def scalings(self) -> Tuple[float, ...]:
        return tuple([1.0 if layer is None or layer.adapter is None else layer.adapter.scaling for layer in self])

    @property
    def dropouts(self) -> Tuple[float, ...]:
        return tuple([0.0 if layer is None or layer.adapter is None else layer.adapter.dropout for layer in self])


Packed = Optional[Tuple[Optional[QuantizedWeight], ...]]
_NONE = (None, None, None)


def _sum_of_biases(layer: Layer) -> Tensor:
    scaled = layer.adapter.bias * layer.adapter.scaling
    if layer.bias is not None:
        return (layer.bias + scaled).to(layer.bias.dtype)
    return scaled.to(layer.dtype if type(layer.weight) is QuantizedWeight else layer.weight.dtype)


def check_any(x: Tensor, **given: Tuple[Optional[Adapter], AnyWeight]) -> None:
    """Run :func:`check` on the adapters that are given, by argument name, each with its weight."""
    for name, (adapter, weight) in given.items():
        if adapter is not None:
            check(name, adapter, weight, x)


def check(name: str, adapter: Adapter, weight: AnyWeight, x: Tensor) -> None:
    """Raise OperandTypeError or OperandValueError, naming the argument, for an adapter that does not fit a weight
    ``[out, in]``, or ``[experts, out, in]``."""
    if not isinstance(adapter, Adapter):
        raise OperandTypeError(f"{name} must be an Adapter or None, got {type(adapter).__name__}")
    for part, tensor in (("a", adapter.a), ("b", adapter.b), ("bias", adapter.bias)):
        if tensor is not None or part != "bias":
            check_like(x, f"{name}.{part}", tensor, may_be_wide=True)
    if adapter.a.dtype != adapter.b.dtype:
        raise OperandTypeError(f"{name}.b must have the dtype of {name}.a, {adapter.a.dtype}, got {adapter.b.dtype}")
    *experts, features, width = weight.shape
    before = "".join(f"{number}, " for number in experts)
    if adapter.a.dim() != weight.dim() or list(adapter.a.shape) != [*experts, adapter.a.shape[-2], width]:
        raise OperandValueError(
            f"{name}.a must be [{before}rank, {width}] to fit its weight, got {shape_of(adapter.a)}"
        )
    rank = adapter.a.shape[-2]
    if adapter.b.shape != (*experts, features, rank):
        raise OperandValueError(
            f"{name}.b must be [{before}{features}, {rank}] to fit its weight and {name}.a, got {shape_of(adapter.b)}"
        )
    if adapter.bias is not None and adapter.bias.shape != (features,):
        raise OperandValueError(f"{name}.bias must be [{features}] to fit its weight, got {shape_of(adapter.bias)}")
    check_number(f"{name}.scaling", adapter.scaling)
    check_number(f"{name}.dropout", adapter.dropout)
    if not 0.0 <= adapter.dropout <= 1.0:
        raise OperandValueError(f"{name}.dropout must be a probability, from 0 to 1, got {adapter.dropout}")


def check_of_experts(
    x: Tensor, transposed: bool, given: Tuple[Optional[Adapter], ...], weights: Tuple[Tensor, ...]
) -> None:
    """Run :func:`check` on adapters of experts, whose weights are ``[experts, out, in]``, or ``[experts, in, out]``."""
    for name, adapter, weight in zip(("gate_up_adapter", "down_adapter"), given, weights):
        if adapter is None:
            continue
        if isinstance(adapter, Adapter) and (adapter.bias is not None or adapter.dropout != 0.0):
            got = "a bias" if adapter.bias is not None else f"dropout = {adapter.dropout}"
            raise OperandValueError(f"{name} must have neither bias nor dropout for experts, got {got}")
        of_each = weight.transpose(1, 2) if transposed else weight
        check(name, adapter, of_each, x)


def _kept(mask: Tensor, x: Tensor) -> Tensor:
    """Return ones for the elements of x that a mask in bits keeps, and zeros for the others."""
    bits = mask.unsqueeze(-1).bitwise_right_shift(torch.arange(32, dtype=mask.dtype, device=mask.device)) & 1
    return bits.flatten(1)[:, : x.shape[-1]].reshape(x.shape)


class _Factors(NamedTuple):
    """The numbers of three layers, and how their dropouts draw: in float32 if ``wide``, and up or gate first."""

    scalings: Tuple[float, ...]
    dropouts: Tuple[float, ...]
    wide: bool = False
    up_first: bool = False


def run(x: Tensor, layers: Layers, activation: int, memory: str = training.KEPT) -> Tensor:
    """Compute layers that fit, ``[..., out]``: as one op, and one backward, or with torch operations.

    Dropouts draw in the order gate, up, down.
    """
    found = in_one_op(x, layers, activation, memory)
    return composed(x, layers, activation, memory) if found is None else found


def in_one_op(
    x: Tensor, layers: Layers, activation: int, memory: str = training.KEPT, up_first: bool = False
) -> Optional[Tensor]:
    """Like :func:`run`, as one op, and one backward under autograd; None if that does not support the operands.

    A float32 adapter beside other weights is cast to their dtype, once per call; its gradients are float32.
    ``up_first``: up's dropout draws before gate's.
    """
    tensors, dropouts = layers.tensors, layers.dropouts
    wide = any(dropouts) and _draws_wide(layers, dropouts)
    is_plain = _are_of(layers, x.dtype) and (not any(dropouts) or dropout_refusal(x, dropouts, wide) is None)
    recorded = calls.is_plainly_recorded(layers.op, (x, *tensors)) if is_plain else None
    if recorded is not None:
        factors = _Factors(layers.scalings, dropouts, False, up_first)
        return _op(x, tensors, layers, factors, activation, memory, recorded)
    if refusal(x, layers) is not None:
        return None
    x, *tensors = calls.autocast((x, *tensors))
    plain, of_adapters = tensors[:_FIRST_OF_ADAPTERS], tensors[_FIRST_OF_ADAPTERS:]
    if any(tensor is not None and tensor.dtype != x.dtype for tensor in plain):
        return None
    tensors = (*plain, *(tensor if tensor is None else tensor.to(x.dtype) for tensor in of_adapters))
    factors = _Factors(layers.scalings, dropouts, bool(wide) and x.dtype is not torch.float32, up_first)
    return _op(x, tensors, layers, factors, activation, memory, calls.autograd_follows(x, *tensors))


def run_parts(
    pattern: Any,
    recorded: bool,
    operands: Tuple[Any, ...],
    adapters: Tuple[Any, ...],
    offsets: Tuple[Optional[float], ...],
) -> Optional[Tensor]:
    """Compute a pattern from operands that compiled code has found (torch-ext/calls/parts.h), of one dtype except that
    adapters may be float32.

    bitsandbytes' four-bit weights have ``offsets``, other weights None. None if the op does not support them.
    """
    x, *given, code = operands
    if recorded and not torch.is_grad_enabled():
        x = training.likened(x, given[0], training.RECOMPUTED)
    if torch._C._is_any_autocast_enabled() and calls.autocast((x,))[0].dtype is not x.dtype:
        return None
    count = len(given) // 2
    lists = given[:count], given[count:], adapters[0::6], adapters[2::6], adapters[4::6], adapters[5::6]
    if any(lists[-1]) and dropout_refusal(x, lists[-1], False) is not None:
        return None
    is_packed = offsets.count(None) < count
    try:
        is_wide = False
        for a in lists[2]:  # a generator would take several frames
            is_wide = is_wide or (a is not None and a.dtype is not x.dtype)
        if is_wide and any(lists[-1]):  # a dropout before a float32 adapter draws in float32
            return None
        if is_wide:
            factors = ([each if each is None else each.to(x.dtype) for each in of] for of in lists[2:4])
            lists = (*lists[:2], *factors, *lists[4:])
        if pattern.packed:
            lists, count = _unpacked(lists, pattern.up_first), count + 1
        if not (recorded or is_packed):
            numbers = drawn.NOTHING
            if any(lists[-1]):
                dropouts = [0.0 if at is None else lists[-1][at] for at in _PLACES[pattern.gated, count]]
                numbers = drawn.taken(x, lists[0][0].shape[0], dropouts, pattern.up_before)
            return _plain_forward(x, *lists, False, pattern.up_before, numbers, pattern.gated, code, _NOTHING)[0]
        places, packed = _PLACES[pattern.gated, count], None
        weights, biases, a, b = ([None if at is None else each[at] for at in places] for each in lists[:4])
        scalings, dropouts = (tuple([0.0 if at is None else each[at] for at in places]) for each in lists[4:])
        factors = _Factors(scalings, dropouts, False, pattern.up_before)
        if is_packed:
            packed = [None if at is None or offsets[at] is None else offsets[at] for at in places]
            packed = tuple([quantized.held(*each) for each in zip(weights, packed)])
            if not recorded:
                whole = [each if each is not None else weight for weight, each in zip(weights, packed)]
                layers = Layers(*map(_layer, whole, biases, a, b, scalings, dropouts))
                return _op(x, layers.tensors, layers, factors, code, pattern.memory, False)
            weights = [weight if each is None else None for weight, each in zip(weights, packed)]
        keep = _VALUES if pattern.memory == training.KEPT else _ROWS
        return _apply(factors, code, keep, packed, x, *weights, *biases, *a, *b)
    except RuntimeError:  # eager broadcasts the operands, or reports what is wrong
        return None


def _unpacked(lists: Sequence[Sequence[Any]], up_first: bool) -> List[List[Any]]:
    """Return the lists with gate and up in place of a first layer that holds both; they share its a, undropped."""
    weights, biases, a, b, scalings, dropouts = lists
    if weights[0].shape[0] % 2 != 0:
        raise OperandValueError("a layer that holds both gate and up must have an even number of features")
    split = [[*halves(each[0], up_first), *each[1:]] for each in (weights, biases, b)]
    return [*split[:2], [a[0], *a], split[2], [scalings[0], *scalings], [0.0, *dropouts]]


# Places of the first layer, up and the second layer in a pattern, by whether it is gated and its number of layers.
_PLACES = {(False, 1): (0, None, None), (False, 2): (0, None, 1), (True, 2): (0, 1, None), (True, 3): (0, 1, 2)}


def _op(
    x: Tensor,
    tensors: Sequence[Optional[Tensor]],
    layers: Layers,
    factors: _Factors,
    activation: int,
    memory: str,
    recorded: bool,
) -> Tensor:
    packed = layers.packed
    if recorded:
        return _apply(factors, activation, _VALUES if memory == training.KEPT else _ROWS, packed, x, *tensors)
    if layers.are_packed:
        return quantized.run(x, layers, activation)
    if packed is not None and not any(factors.dropouts) and dispatch.has_few_rows(x):
        return composed(x, layers, activation)
    numbers = _numbers(x, packed, tensors, factors) if any(factors.dropouts) else drawn.NOTHING

    def arguments(tensors: Sequence[Optional[Tensor]]) -> Tuple[Any, ...]:
        return (x, *_arguments(tensors, factors, numbers), layers.up is not None, activation, _NOTHING)

    by_codes = None if torch.compiler.is_compiling() else _packed_forward
    given = _plain_forward, by_codes, packed, tensors, x.dtype, arguments
    return dispatch.op_or_parts(_over_packed, given, lambda: (composed(x, layers, activation),))[0]


def _unpacked_weights(
    packed: Packed, tensors: Sequence[Optional[Tensor]], dtype: torch.dtype, read: Sequence[bool] = (True, True, True)
) -> Sequence[Optional[Tensor]]:
    """Return the tensors including quantised weights, decoded where ``read`` is true."""
    if packed is None:
        return tensors
    weights = list(tensors[:3])
    for place, weight in enumerate(packed):
        if weight is not None:
            weights[place] = weight.dequantize(dtype) if read[place] else quantized.shape_alone(weight, dtype)
    return (*weights, *tensors[3:])


def _over_packed(
    op: Callable[..., Any],
    by_codes: Optional[Callable[..., Any]],
    packed: Packed,
    tensors: Sequence[Optional[Tensor]],
    dtype: torch.dtype,
    arguments: Callable[[Sequence[Optional[Tensor]]], Tuple[Any, ...]],
    read: Sequence[bool] = (True, True, True),
) -> Any:
    """Compute ``op(*arguments(tensors))`` with quantised weights among the tensors, of ``dtype``.

    ``by_codes`` decodes each weight when it is needed and discards it; without it, all weights that are ``read`` are
    decoded first.
    """
    if packed is None:
        return op(*arguments(tensors))
    if by_codes is not None:
        shapes = _unpacked_weights(packed, tensors, dtype, (False, False, False))
        places = [place for place in range(3) if shapes[place] is not None]
        weights = [(index, packed[place]) for index, place in enumerate(places) if packed[place] is not None]
        lists = quantized.operand_lists(weight for _, weight in weights)
        found = by_codes(*lists, [index for index, _ in weights], *arguments(shapes))
        if found is not None:
            return found
    return op(*arguments(_unpacked_weights(packed, tensors, dtype, read)))


def _are_of(layers: Layers, dtype: torch.dtype) -> bool:
    """True if all adapters have this dtype, and a rank."""
    for layer in layers:
        adapter = None if layer is None else layer.adapter
        if adapter is not None and (adapter.a.dtype is not dtype or adapter.a.shape[0] == 0):
            return False
    return True


def _draws_wide(layers: Layers, dropouts: Tuple[float, ...]) -> Optional[bool]:
    """True if the active dropouts precede float32 adapters and draw numbers in float32; None if they differ."""
    of = {layer.adapter.a.dtype is torch.float32 for layer, dropout in zip(layers, dropouts) if dropout > 0.0}
    return None if len(of) > 1 else any(of)


def dropout_refusal(x: Tensor, dropouts: Sequence[float], wide: Optional[bool]) -> Optional[str]:
    """Return the reason why torch runs the dropouts before adapters; None if an op draws the same numbers."""
    if not DROPS:
        return "no kernel applies dropout before an adapter on this device"
    if wide is None or max(dropouts) >= 1.0:
        return "dropout in mixed dtypes or with probability 1, which no kernel supports"
    return None if x.is_contiguous() and x.numel() > 0 else "dropout of an empty or strided x, which no kernel supports"


DROPS = native.DEVICE_TYPE == "cuda"  # CPU dropout draws differently


def refusal(x: Tensor, layers: Layers) -> Optional[str]:
    """Return the reason why a call is composed of torch operations, or None if it is one op."""
    dropouts = layers.dropouts
    reason = dropout_refusal(x, dropouts, _draws_wide(layers, dropouts)) if any(dropouts) else None
    if reason is not None:
        return reason
    if torch.compiler.is_compiling():
        is_seen = not layers.are_packed or calls.autograd_follows(x, *layers.tensors)
    else:
        is_seen = training.is_followed()
    if is_seen:
        return "torch.compile, a dispatch mode or saved-tensor hooks must see the separate operations"
    reason = calls.pointwise_reason(x, *layers.tensors)
    if reason is not None:
        return reason
    if any(layer is not None and layer.adapter is not None and layer.adapter.a.shape[0] == 0 for layer in layers):
        return "an adapter of rank 0"
    like = x if not calls.autocasts(x) else x.new_empty((), dtype=torch.get_autocast_dtype(x.device.type))
    return None if dispatch.select(layers.op, like) is native else dispatch.reasoned(layers.op, like)[1]


def composed(
    x: Tensor,
    layers: Layers,
    activation: int,
    memory: str = training.KEPT,
    masks: Sequence[Optional[Tensor]] = (None, None, None),
) -> Tensor:
    """Compute the result with torch operations, and the kernel of ``act(gate) * up`` where that pays.

    ``masks`` are those of earlier dropouts.
    """
    if memory == training.RECOMPUTED and calls.autograd_follows(x, *layers.tensors) and not training.is_transformed():
        return torch.utils.checkpoint.checkpoint(composed, x, layers, activation, use_reentrant=False)
    first, up, second = layers
    hidden = first(x, masks[0])
    hidden = BY_CODE[activation].function(hidden) if up is None else calls.product(hidden, up(x, masks[1]), activation)
    return hidden if second is None else second(hidden, masks[2])


_forward, _backward = native.adapted_forward, native.adapted_backward
# For calls that nothing traces: past torch's dispatcher, or at least without OpOverload's Python overhead.
_plain_forward, _plain_backward = (
    getattr(native.plain_modules, f"adapted_{name}", getattr(op, "_op", op))
    for name, op in (("forward", _forward), ("backward", _backward))
)
# The same over quantised weights; they return None if torch's dispatcher has more to do.
_packed_forward, _packed_backward = (
    getattr(native.plain_modules, f"packed_adapted_{name}", None) for name in ("forward", "backward")
)
_NOTHING, _ROWS, _VALUES = range(3)  # values that a forward keeps, as in torch-ext/ops/adapted.h
_IDENTITY = get_activation(None).code
_FIRST_OF_ADAPTERS = 6  # after three weights and three biases


def _operands(tensors: Sequence[Optional[Tensor]], *others: Sequence[Any]) -> List[List[Any]]:
    """Return an op's lists of operands: weights, biases, a, b and others of the layers that are given."""
    there = [place for place in range(3) if tensors[place] is not None]
    return [[each[place] for place in there] for each in (*_lists(tensors), *others)]


def _arguments(tensors: Sequence[Optional[Tensor]], factors: _Factors, numbers: List[int]) -> List[Any]:
    """Return the arguments of the forward after x, up to ``gated``."""
    scalings, dropouts, wide, up_first = factors
    return [*_operands(tensors, scalings, dropouts), wide, up_first, numbers]


def _numbers(x: Tensor, packed: Packed, tensors: Sequence[Optional[Tensor]], factors: _Factors) -> List[int]:
    """Return the random numbers of dropouts before adapters, and advance torch's generator past them."""
    first = tensors[0] if packed is None or packed[0] is None else packed[0]
    return drawn.taken(x, first.shape[0], factors.dropouts, factors.up_first)


def _lists(tensors: Sequence[Optional[Tensor]]) -> Tuple[Sequence[Optional[Tensor]], ...]:
    """Return weights, biases, a and b."""
    return tensors[:3], tensors[3:6], tensors[6:9], tensors[9:]


class _Layout(NamedTuple):
    """Selectors of the values that a node keeps, among its operands, x first, and the further results of its op.

    ``saved`` selects the operands that a possible gradient needs, ``others`` the rest except x: weights and adapters,
    for their shapes. ``all`` restores the operands from both, followed by None. ``kept`` selects the existing ones of
    gate, up, the rows of the adapters, and the masks of their dropouts, from these followed by None. ``read`` are the
    weights whose values a gradient may need; quantised ones are not saved, but decoded again.
    """

    saved: Callable[[Tuple[Any, ...]], Tuple[Any, ...]]
    others: Callable[[Tuple[Any, ...]], Tuple[Any, ...]]
    all: Callable[[Tuple[Any, ...]], Tuple[Any, ...]]
    kept: Callable[[Tuple[Any, ...]], Tuple[Any, ...]]
    read: Tuple[bool, ...]


class _Adapted(torch.autograd.Function):
    """One op forward and one backward. It saves what possible gradients need, as eager PyTorch does."""

    @staticmethod
    def forward(
        ctx: Any, factors: _Factors, activation: int, keep: int, packed: Packed, x: Tensor, *tensors: Optional[Tensor]
    ) -> Tensor:
        given = (x, *tensors)
        held = there = tuple([tensor is not None for tensor in given])
        if packed is not None:
            there = (True, *[is_held or weight is not None for is_held, weight in zip(held[1:], packed)], *held[4:])
        numbers = _numbers(x, packed, tensors, factors) if any(factors.dropouts) else drawn.NOTHING

        def arguments(whole: Sequence[Optional[Tensor]]) -> Tuple[Any, ...]:
            return (x, *_arguments(whole, factors, numbers), there[2], activation, keep)

        result, *kept = _over_packed(_plain_forward, _packed_forward, packed, tensors, x.dtype, arguments)
        drops = tuple([dropout > 0.0 for dropout in factors.dropouts])
        layout = _layout(ctx.needs_input_grad[4:], there, held, drops, keep == _ROWS, activation == _IDENTITY)
        others = layout.others(given)
        ctx.how = factors, activation, layout, others, [tensor._version for tensor in others]
        ctx.packed, ctx.dtype = packed, x.dtype
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*layout.saved(given), *layout.kept((*kept, None)))
        return result

    @staticmethod
    def backward(ctx: Any, grad: Optional[Tensor]) -> Tuple[Optional[Tensor], ...]:
        needs, (factors, activation, layout, others, versions) = ctx.needs_input_grad[4:], ctx.how
        if grad is None:
            return (None,) * (4 + len(needs))
        needs = nodes.executed(ctx, needs)
        *saved, gate, up, first_rows, second_rows, of_first, of_up, of_second = ctx.saved_tensors
        masks = of_first, of_up, of_second
        x, *held = layout.all((*saved, *others, None))

        def by_parts() -> Tuple[Tensor, ...]:
            if x is None or [tensor._version for tensor in others] != versions:
                raise RuntimeError("a second-order gradient of a call with adapters needs values that were not saved")
            tensors = _unpacked_weights(ctx.packed, held, ctx.dtype)
            return _composed_gradients(x, tensors, factors, masks, activation, grad, needs)

        if training.is_gradient_seen(grad):
            found = by_parts()
        else:
            bits = sum([need << place for place, need in enumerate(needs)])

            def arguments(tensors: Sequence[Optional[Tensor]]) -> Tuple[Any, ...]:
                lists = _operands(tensors, factors.scalings, factors.dropouts, masks)
                return (grad, x, *lists, gate, up, first_rows, second_rows, tensors[1] is not None, activation, bits)

            given = _plain_backward, _packed_backward, ctx.packed, held, ctx.dtype, arguments, layout.read
            found = dispatch.op_or_parts(_over_packed, given, by_parts)
        gradients = iter(found)
        return (None, None, None, None, *[next(gradients) if need else None for need in needs])


# Without the Python code that torch's own ``apply`` runs first for operands of transforms.
_apply = super(torch.autograd.Function, _Adapted).apply


@functools.cache
def _layout(
    needs: Tuple[bool, ...],
    there: Tuple[bool, ...],
    held: Tuple[bool, ...],
    drops: Tuple[bool, ...],
    recomputes: bool,
    is_identity: bool,
) -> _Layout:
    """Return the layout. ``there`` are the operands of the op, ``held`` those among them that are tensors."""
    is_gated, is_mlp, of_first, of_second = there[2], there[3], there[7] or there[8], there[9]
    has_values = not recomputes and (is_gated or not is_identity)
    is_kept = has_values, has_values and is_gated, of_first, of_second, *drops
    # Hidden values without an activation are not kept.
    wanted = _wanted(needs, recomputes or (is_identity and is_mlp and not is_gated))
    # Differentiating a gradient again requires x, so x is saved whenever some weights are not held.
    wanted = (wanted[0] or held != there, *wanted[1:])
    saved = tuple(place for place, (want, is_held) in enumerate(zip(wanted, held)) if want and is_held)
    others = tuple(place for place in range(1, len(there)) if held[place] and place not in saved)
    places = {place: index for index, place in enumerate((*saved, *others))}
    return _Layout(
        _taking(saved),
        _taking(others),
        _taking(tuple(places.get(place, -1) for place in range(len(there)))),
        _taking(tuple(place if is_there else -1 for place, is_there in enumerate(is_kept))),
        wanted[1:4],
    )


def _taking(places: Tuple[int, ...]) -> Callable[[Tuple[Any, ...]], Tuple[Any, ...]]:
    """Return a selector of these places of a tuple, in this order."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda given: tuple([given[place] for place in places])


def _wanted(needs: Tuple[bool, ...], recomputes: bool) -> Tuple[bool, ...]:
    """Return which operands the gradients of ``needs`` require, x first."""
    of_x, of_weights, of_biases, of_a, of_b = needs[0], needs[1:4], needs[4:7], needs[7:10], needs[10:]
    first = of_x or any(any(each[:2]) for each in (of_weights, of_biases, of_a, of_b))
    again = recomputes and (first or of_weights[2] or of_a[2])
    return (
        recomputes or any(of_weights[:2]) or any(of_a[:2]),
        *(of_x or again,) * 2,
        first,
        *(again,) * 2,
        False,
        *(of_x,) * 2,
        first,
        *(of_x or again or needed for needed in of_a[:2]),
        first or of_a[2],
    )


def _composed_gradients(
    x: Tensor,
    tensors: Sequence[Optional[Tensor]],
    factors: _Factors,
    masks: Sequence[Optional[Tensor]],
    activation: int,
    grad: Tensor,
    needs: Tuple[bool, ...],
) -> Tuple[Tensor, ...]:
    """Compute the gradients with torch operations, which can be differentiated again."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        given = tuple(
            tensor if tensor is None else tensor.view_as(tensor) for tensor in (x, *tensors)
        )  # separates tied tensors
        weights, biases, a, b = _lists(given[1:])
        layers = Layers(*map(_layer, weights, biases, a, b, factors.scalings, factors.dropouts))
        result = composed(given[0], layers, activation, masks=masks)
    wanted = [tensor for tensor, need in zip(given, needs) if need]
    return torch.autograd.grad(result, wanted, grad, create_graph=create_graph)


def _layer(
    weight: Optional[Tensor],
    bias: Optional[Tensor],
    a: Optional[Tensor],
    b: Optional[Tensor],
    scaling: float,
    dropout: float,
) -> Optional[Layer]:
    if weight is None:
        return None
    return Layer(weight, bias, None if a is None or b is None else Adapter(a, b, scaling, dropout=dropout))
