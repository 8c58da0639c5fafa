"""Fake implementations of the compiled ops, for torch.compile, export and other shape tracing.

The operands of an op are those of its schema (``torch-ext/torch_binding.cpp``). A function here lists only those it
needs, by name.
"""

from __future__ import annotations

import inspect
from operator import itemgetter
from typing import Any, Callable, List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from .. import operands
from .._ops import add_op_namespace_prefix, ops
from . import strides

Made = Callable[..., Any]  # returns the result, given operands by name


def register() -> None:
    """Register fakes for all ops that return tensors."""
    for name, (made, check) in _RESULTS.items():
        register_result(name, made, check)


def register_result(name: str, made: Made, check: Optional[Callable[..., None]] = None) -> None:
    """Register the fake of an op; ``made`` and ``check`` are each called with the operands that they name."""
    schema = getattr(ops, name).default._schema
    take_made, take_check = (_operands_of(function, schema) for function in (made, check))

    def result(*given: Any) -> Any:
        if check is not None:
            check(*take_check(given))
        return made(*take_made(given))

    torch.library.register_fake(add_op_namespace_prefix(name), result)


def _operands_of(function: Optional[Callable[..., Any]], schema: Any) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Return a selector of the operands that ``function`` names, from all operands of an op."""
    places = {argument.name: place for place, argument in enumerate(schema.arguments)}
    wanted = [] if function is None else [places[name] for name in inspect.signature(function).parameters]
    return itemgetter(*wanted) if len(wanted) > 1 else lambda given: [given[place] for place in wanted]


def like_gate(gate: Tensor) -> Tensor:
    return gate.new_empty(gate.shape)


def like_gate_and_up(gate: Tensor, up: Tensor) -> Tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


def like_product(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def of_experts(x: Tensor, down_weight: Tensor, transposed: bool) -> Tensor:
    return x.new_empty((x.shape[0], down_weight.shape[2 if transposed else 1]))


def _experts_training(
    x: Tensor, top_k_index: Tensor, gate_up_weight: Tensor, down_weight: Tensor, transposed: bool, keeps_sorted: bool
) -> List[Tensor]:
    """Return the result and the saved rows, sorted into as many 128-row blocks of one expert as there can be."""
    slots = top_k_index.shape[0] * top_k_index.shape[1]
    blocks = (slots + torch.sym_min(gate_up_weight.shape[0], slots) * 127) // 128
    width = gate_up_weight.shape[2 if transposed else 1]
    sorted_x = x.new_empty((blocks * 128, x.shape[1])) if keeps_sorted else x.new_empty(0)
    return [of_experts(x, down_weight, transposed), sorted_x, x.new_empty((blocks * 128, width))]


def _experts_gradients(
    grad: Tensor,
    gate_up: Tensor,
    top_k_weights: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    gate_up_bias: Optional[Tensor],
    down_bias: Optional[Tensor],
    factors: List[Optional[Tensor]],
    transposed: bool,
    needs: int,
) -> List[Tensor]:
    x = (grad.shape[0], gate_up_weight.shape[1 if transposed else 2])
    others = (top_k_weights, gate_up_weight, down_weight, *factors, gate_up_bias, down_bias, gate_up)
    made = (grad.new_empty(x), *(each if each is None else each.new_empty(each.shape) for each in others))
    return [each for place, each in enumerate(made) if each is not None and needs >> place & 1]


def _statistics(x: Tensor, norm: int) -> Tensor:
    kinds = 2 if norm in operands.CENTRED_NORMS else 1
    return x.new_empty((kinds, x.shape[:-1].numel()), dtype=torch.float32)


def _sum_norm(x: Tensor, norm: int, dropout: float) -> List[Tensor]:
    masks = [x.new_empty(x.shape, dtype=torch.bool)] if dropout > 0.0 else []
    return [x.new_empty(x.shape), x.new_empty(x.shape), _statistics(x, norm), *masks]


def _norm_gradients(x: Tensor, weight: Optional[Tensor], needs: int) -> List[Tensor]:
    like, features = x if weight is None else weight, x.shape[-1:]
    made = ((x, x.shape), (like, features), (like, features), (x, x.shape), (x, features))
    return [of.new_empty(shape) for index, (of, shape) in enumerate(made) if needs >> index & 1]


def _router(x: Tensor, weight: Tensor, top_k: int, narrow: bool) -> Tuple[Tensor, Tensor, Tensor]:
    tokens, dtype = x.shape[0], x.dtype if narrow else torch.float32
    weights = x.new_empty((tokens, top_k), dtype=dtype)
    return x.new_empty((tokens, weight.shape[0])), weights, x.new_empty((tokens, top_k), dtype=torch.int64)


def _sigmoid_router(x: Tensor, weight: Tensor, top_k: int) -> Tuple[Tensor, Tensor, Tensor]:
    tokens, wide = x.shape[0], torch.float32
    weights, index = x.new_empty((tokens, top_k), dtype=wide), x.new_empty((tokens, top_k), dtype=torch.int64)
    return x.new_empty((tokens, weight.shape[0]), dtype=wide), weights, index


def _training(
    x: Tensor,
    weight: Tensor,
    up_weight: Optional[Tensor],
    second_weight: Optional[Tensor],
    bias: Optional[Tensor],
    up_bias: Optional[Tensor],
    second_bias: Optional[Tensor],
    keep: bool,
    up_first: Optional[bool],
) -> Tuple[Tensor, Tensor, Tensor]:
    operands.check_gated_linear(x, weight, weight if up_weight is None else up_weight, bias, up_bias)
    lead, features, nothing = x.shape[:-1], weight.shape[0], (0,)
    out = features if up_first is None else features // 2
    if second_weight is not None:
        operands.check_linear(x.new_empty((*lead, out)), second_weight, second_bias)
        out = second_weight.shape[0]
    kept = x.new_empty((*lead, features) if keep else nothing)
    return x.new_empty((*lead, out)), kept, x.new_empty(nothing if up_weight is None or not keep else kept.shape)


def _gradients(
    grad: Tensor,
    x: Optional[Tensor],
    weight: Optional[Tensor],
    second_weight: Optional[Tensor],
    gate: Optional[Tensor],
    needs: int,
) -> List[Tensor]:
    hidden = weight.shape[0] if gate is None else gate.shape[-1]
    source = weight if x is None else x
    width = 0 if source is None else source.shape[-1]

    def matrix(features: int, columns: int, by_column: int) -> Tensor:
        return grad.new_empty((columns, features)).t() if by_column else grad.new_empty((features, columns))

    def of_input() -> Tensor:
        sizes = (*grad.shape[:-1], width)
        return grad.new_empty_strided(sizes, strides.by_column(sizes)) if needs >> 7 & 1 else grad.new_empty(sizes)

    made = (
        of_input,
        lambda: matrix(hidden, width, needs >> 8 & 1),
        lambda: matrix(hidden, width, needs >> 9 & 1),
        lambda: matrix(*second_weight.shape, not _has_no_gaps(second_weight)),
        lambda: grad.new_empty(hidden),
        lambda: grad.new_empty(hidden),
        lambda: grad.new_empty(grad.shape[-1]),
    )
    return [make() for index, make in enumerate(made) if needs >> index & 1]


def _has_no_gaps(weight: Tensor) -> bool:
    return weight.stride(1) == 1 and weight.stride(0) == weight.shape[1]


def _quantized_mlp(x: Tensor, layouts: List[int], offsets: List[float], gated: bool) -> Tensor:
    is_mlp = len(offsets) == (3 if gated else 2)
    return x.new_empty((*x.shape[:-1], layouts[-5 if is_mlp else 0]))


def _projections(
    x: Tensor,
    first_weight: Tensor,
    second_weight: Optional[Tensor],
    third_weight: Optional[Tensor],
    first_bias: Optional[Tensor],
    second_bias: Optional[Tensor],
    third_bias: Optional[Tensor],
) -> List[Tensor]:
    layers = (first_weight, first_bias), (second_weight, second_bias), (third_weight, third_bias)
    layers = [(weight, bias) for weight, bias in layers if weight is not None]
    for weight, bias in layers:
        operands.check_linear(x, weight, bias)
    return [like_product(x, weight) for weight, _ in layers]


def _projection_gradients(
    first_grad: Optional[Tensor],
    second_grad: Optional[Tensor],
    third_grad: Optional[Tensor],
    x: Optional[Tensor],
    first_weight: Optional[Tensor],
    second_weight: Optional[Tensor],
    third_weight: Optional[Tensor],
    needs: int,
) -> List[Tensor]:
    grads, weights = (first_grad, second_grad, third_grad), (first_weight, second_weight, third_weight)
    like = next(grad for grad in grads if grad is not None)
    source = next((each for each in (x, *weights) if each is not None), None)
    found = [like.new_empty((*like.shape[:-1], source.shape[-1]))] if needs & 1 else []
    found += [like.new_empty((grad.shape[-1], x.shape[-1])) for i, grad in enumerate(grads) if needs >> 1 + i & 1]
    return found + [like.new_empty(grad.shape[-1]) for i, grad in enumerate(grads) if needs >> 4 + i & 1]


def _rotary(q: Tensor, k: Tensor) -> Tuple[Tensor, Tensor]:
    def like(x: Tensor) -> Tensor:
        if x.stride(1) >= x.stride(2):
            return x.new_empty(x.shape)
        batch, heads, tokens, features = x.shape
        return x.new_empty((batch, tokens, heads, features)).transpose(1, 2)

    return tuple([like(x if x.stride(-1) == 1 else x.contiguous()) for x in (q, k)])


_RESULTS = {  # and the check of the operands
    "act_and_mul": (like_gate, operands.check_act_and_mul),
    "act_and_mul_backward": (like_gate_and_up, None),
    "mm": (lambda a, b: a.new_empty((a.shape[0], b.shape[1])), None),
    "linear": (like_product, operands.check_linear),
    "gated_linear": (lambda x, gate_weight: like_product(x, gate_weight), operands.check_gated_linear),
    "gated_mlp": (lambda x, down_weight: like_product(x, down_weight), operands.check_gated_mlp),
    "mlp": (lambda x, fc2_weight: like_product(x, fc2_weight), operands.check_mlp),
    "residual_mlp": (lambda x, fc2_weight: like_product(x, fc2_weight), None),
    "residual_gated_mlp": (lambda x, down_weight: like_product(x, down_weight), None),
    "norm_forward": (lambda x, norm: (x.new_empty(x.shape), _statistics(x, norm)), None),
    "sum_norm_forward": (_sum_norm, None),
    "norm_backward": (_norm_gradients, None),
    "projections_forward": (_projections, None),
    "projections_backward": (_projection_gradients, None),
    "rotary": (_rotary, None),
    "experts_mlp": (of_experts, operands.check_experts_mlp),
    "top_k_router": (_router, None),
    "sigmoid_router": (_sigmoid_router, None),
    "experts_training_forward": (_experts_training, None),
    "experts_training_backward": (_experts_gradients, None),
    "training_forward": (_training, None),
    "graph_training_forward": (_training, None),
    "training_backward": (_gradients, None),
    "training_backward_": (_gradients, None),
    "quantized_decode": (lambda weight, layout, dtype: weight[0].new_empty(layout[:2], dtype=dtype), None),
    "quantized_linear": (lambda x, layout: x.new_empty((*x.shape[:-1], layout[0])), None),
    "quantized_mlp": (_quantized_mlp, None),
    "quantized_experts": (lambda x, layouts: x.new_empty((x.shape[0], layouts[6])), None),
    "decoded_experts": (lambda data, layout, dtype: data.new_empty(layout[:3], dtype=dtype), None),
}
