"""An MLP of a module as one op, with the operands that its parts hold at the call.

``activation`` is the row of the table that ``act`` computes, if any. ``between`` lists what the hidden values pass
through before the last projection: dropout and similar modules, dropout probabilities, or functions that cast the
values to the dtype of its weight, as :func:`cast` does.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any, Callable, List, Optional, Sequence, Tuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ... import calls, dispatch
from ...activations import Activation
from ...adapters import Layer, Layers, in_one_op
from ...operands import autocasts, halves
from ...quantized import weights as quantized
from ...quantized.weights import QuantizedWeight
from ..matching.pattern import Pattern
from ..parts import adapters, refusals
from ..reading.attributes import attribute_of, of_call

LINEAR, PLAIN = Pattern(), Pattern(whole=True)
GATED, PACKED_GATED = Pattern(gated=True, whole=True), Pattern(gated=True, whole=True, packed=True)

Act = Callable[[Tensor], Tensor]
Part = Union[nn.Module, float, FunctionType]
Between = Sequence[Part]


def fused(
    pattern: Pattern,
    x: Tensor,
    projections: Sequence[nn.Module],
    activation: Optional[Activation],
    between: Between = (),
) -> Optional[Tensor]:
    """Run one op for projections in the order gate, up, down (``packed``: gate and up in one).

    Returns None if a part has to be called, or if torch runs the parts.
    """
    if activation is None or refusals.of_input(x) is not None:
        return None
    if pattern.whole and not passes(between, x, projections[-1]):
        return None
    layers: List[Layer] = []
    for projection in projections:
        layer = adapters.layer_of(projection)
        if type(layer) is str or layer.weight.dim() != 2:
            return None
        layers.append(layer)
    if any(layer.adapter is not None or type(layer.weight) is QuantizedWeight for layer in layers):
        return of_layers(pattern, x, layers, activation)
    weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
    if not pattern.packed:
        return calls.in_one_op(pattern.op, (x, *weights, *biases), activation, pattern.memory)
    nothing = () if pattern.whole else (None,)
    given = (x, weights[0], None, *weights[1:], *nothing, biases[0], None, *biases[1:], *nothing)
    return calls.in_one_op("gated_mlp", given, activation, pattern.memory, pattern.up_first)


def of_layers(pattern: Pattern, x: Tensor, layers: Sequence[Layer], activation: Activation) -> Optional[Tensor]:
    """Like :func:`fused`, for layers of which some have adapters or quantised weights."""
    if any(type(layer.weight) is QuantizedWeight for layer in layers) and not dispatch.reads_codes_for(x):
        return None
    if not pattern.packed and _are_plainly_packed(x, layers):
        return _by_codes(pattern, x, layers, activation)
    if not dispatch.may_train_quantized() and not _are_read_in_place(x, layers):
        return None
    if any(quantized.are_blocked(layer.weight) for layer in layers) and not _takes_blocked(x, layers):
        return None
    dtypes = {layer.dtype for layer in layers if layer.dtype is not None}
    if not dtypes:
        return _in_one_op(pattern, x, layers, activation)
    dtype, *others = dtypes
    if others or not _is_taken_in(dtype, x, layers):
        return None
    if x.dtype is dtype and not autocasts(x):
        return _in_one_op(pattern, x, layers, activation)
    result = _in_one_op(pattern, x.to(dtype), layers, activation)
    return None if result is None else result.to(x.dtype)


def _are_plainly_packed(x: Tensor, layers: Sequence[Layer]) -> bool:
    """True if all weights are quantised and nothing records or casts, so the op needs no further checks."""
    for layer in layers:
        if layer.adapter is not None or type(layer.weight) is not QuantizedWeight or _of_another_dtype(layer, x):
            return False
    if calls.is_plainly_recorded("linear", (x, *[layer.bias for layer in layers])) is not False:
        return False
    return all(layer.dtype is x.dtype for layer in layers) or _takes_blocked(x, layers)


def _are_read_in_place(x: Tensor, layers: Sequence[Layer]) -> bool:
    """True if no weight is quantised, or if all are, without adapters or autograd."""
    count = sum(type(layer.weight) is QuantizedWeight for layer in layers)
    if count == 0:
        return True
    is_bare = count == len(layers) and all(layer.adapter is None for layer in layers)
    return is_bare and not calls.autograd_follows(x, *(layer.bias for layer in layers))


def _by_codes(pattern: Pattern, x: Tensor, layers: Sequence[Layer], activation: Activation) -> Optional[Tensor]:
    first, *others = layers
    up = others.pop(0) if pattern.gated else None
    try:
        return quantized.run(x, Layers(first, up, *others), activation.code)
    except RuntimeError:  # eager reports what is wrong with the operands
        return None


def _takes_blocked(x: Tensor, layers: Sequence[Layer]) -> bool:
    """True if layers, some with blocked weights, are fused; if not, their own GEMMs run, which also round x."""
    if (x.is_cuda and x.dtype is torch.float32) or any(_of_another_dtype(layer, x) for layer in layers):
        return False
    blocked = [layer.weight for layer in layers if quantized.are_blocked(layer.weight)]
    is_recorded = calls.autograd_follows(x, *Layers(*layers).tensors)
    is_bare = not is_recorded and all(layer.adapter is None for layer in layers)
    if is_bare and (autocasts(x) or len(blocked) < len(layers)):
        return False
    if not is_bare and not all(_is_decoded(layer, x) for layer in layers):
        return False
    if not (is_bare or is_recorded or dispatch.has_few_rows(x)):  # not measured: adapters, more rows, inference
        return False
    if any(weight.format == quantized.TILES for weight in blocked) and x.dtype is not torch.bfloat16:
        return False  # their own GEMM rounds x to bfloat16
    least, most = dispatch.least_blocked_rows(blocked), dispatch.most_blocked_rows(x, blocked)
    return is_recorded or least <= x.shape[:-1].numel() <= most


def _is_decoded(layer: Layer, x: Tensor) -> bool:
    """True if a layer is fused under autograd, or together with adapters, by decoding its weight."""
    if autocasts(x) and torch.get_autocast_dtype(x.device.type) is not x.dtype:
        return False
    if layer.least_trained is None or (layer.bias is not None and layer.bias.requires_grad):
        return False
    if layer.adapter is None:
        return x.shape[:-1].numel() >= layer.least_trained
    return layer.adapter.a.dtype in (x.dtype, torch.float32)


def _of_another_dtype(layer: Layer, x: Tensor) -> bool:
    return layer.bias is not None and layer.bias.dtype is not x.dtype


def _is_taken_in(dtype: torch.dtype, x: Tensor, layers: Sequence[Layer]) -> bool:
    """True if layers, of which some cast their input to this dtype and their result back, may stay in it throughout.

    A quantised layer without an adapter ignores autocast; one with an adapter, and a plain layer, compute in autocast's
    dtype, or without autocast in that of x. Under autocast, dropout draws its random numbers in the dtype of x in one
    PEFT class and in the adapter's dtype in another, so both must be the same.
    """
    if autocasts(x):
        adapters = [layer.adapter for layer in layers if layer.adapter is not None]
        if any(adapter.dropout > 0.0 and adapter.a.dtype is not x.dtype for adapter in adapters):
            return False
        return torch.get_autocast_dtype(x.device.type) is dtype and x.dtype in (dtype, torch.float32)
    is_cast = all(layer.dtype is not None and layer.adapter is None for layer in layers)
    return x.dtype is dtype or (is_cast and x.is_floating_point())


def _in_one_op(pattern: Pattern, x: Tensor, layers: Sequence[Layer], activation: Activation) -> Optional[Tensor]:
    first, *others = layers
    up = None
    if pattern.packed:
        if first.adapter is not None and first.adapter.dropout > 0.0:  # with one mask for gate and up
            return None
        first, up = _halved(first, pattern.up_first)
        if up is None:
            return None
    elif pattern.gated:
        up, *others = others
    try:
        return in_one_op(x, Layers(first, up, *others), activation.code, pattern.memory, pattern.up_before)
    except RuntimeError:  # eager broadcasts the operands or reports what is wrong
        return None


def _halved(both: Layer, up_first: bool) -> Tuple[Layer, Optional[Layer]]:
    """Split a packed layer, with its adapter, into gate and up; returns the layer and None if it cannot be halved."""
    adapter, dtype = both.adapter, both.dtype
    is_quantized = type(both.weight) is QuantizedWeight
    if both.weight.shape[0] % 2 != 0:
        return both, None
    weights = (quantized.halves if is_quantized else halves)(both.weight, up_first)
    if weights is None:
        return both, None
    biases, adapters = halves(both.bias, up_first), (None, None)
    if adapter is not None:
        parts = zip(halves(adapter.b, up_first), halves(adapter.bias, up_first))
        adapters = [adapter._replace(b=b, bias=bias) for b, bias in parts]
    gate, up = (Layer(*each, dtype) for each in zip(weights, biases, adapters))
    return gate, up


def called(pattern: Pattern, x: Tensor, projections: Sequence[nn.Module], act: Act, between: Between = ()) -> Tensor:
    """Run the parts one after the other."""
    first, *others = projections
    if not pattern.gated:
        hidden = act(first(x))
    else:
        if pattern.packed:
            halves = first(x).chunk(2, dim=-1)
            gate, up = reversed(halves) if pattern.up_first else halves
            gate = act(gate)
        else:
            gate, up = act(first(x)), others[0](x)
        hidden = up * gate if pattern.up_left else gate * up
    return second_half(hidden, between, projections[-1]) if pattern.whole else hidden


# The forwards of modules that pass their input through, or None if they have been patched.
_PASSING = {
    nn.Dropout: refusals.unpatched(nn.Dropout, "forward", nn.modules.dropout),
    nn.Identity: refusals.unpatched(nn.Identity, "forward", nn.modules.linear),
}


def cast(hidden: Tensor) -> Tensor:
    """Marks, among the parts between projections, a cast in a module's code; never called."""
    raise NotImplementedError


ACTIVE = "active in training"


def alteration(part: Part, dtype: Any = None, projection: Any = None) -> Optional[str]:
    """Return why a part before a projection changes hidden values of this dtype; None if it does not."""
    if isinstance(part, FunctionType):
        if torch._C._is_any_autocast_enabled():
            return "in autocast"
        wanted = dtype_of(projection)
        return None if wanted is dtype else f"from {dtype} to {wanted}"
    if part is None:
        return "None, which cannot be called"
    if not isinstance(part, nn.Module):
        return ACTIVE if part else None
    kind = type(part)
    if kind not in _PASSING:
        return f"a {kind.__name__}"
    if kind.forward is not _PASSING[kind] or kind.__call__ is not nn.Linear.__call__:
        return f"a patched {kind.__name__}"
    return ACTIVE if kind is nn.Dropout and part.training and part.p > 0.0 else of_call(part)


def dtype_of(projection: Any) -> Optional[torch.dtype]:
    """Return the dtype of a weight that a module holds. A computed weight is not read, since that may change it."""
    weight = attribute_of(projection, "weight") if isinstance(projection, nn.Module) else None
    return weight.dtype if isinstance(weight, Tensor) else None


def passes(between: Between, x: Any = None, projection: Any = None) -> bool:
    """True if none of these parts before a projection changes hidden values of x's dtype."""
    for part in between:  # noqa: SIM110 (a generator costs more than the loop)
        if alteration(part, getattr(x, "dtype", None), projection) is not None:
            return False
    return True


def second_half(hidden: Tensor, between: Between, projection: nn.Module) -> Tensor:
    """Run the parts between the projections and the last projection on hidden values."""
    for part in between:
        hidden = part(hidden) if callable(part) else F.dropout(hidden, part, True)
    return projection(hidden)
