"""FLOP formulas of the ops for ``torch.utils.flop_counter``, which counts only GEMMs."""

from __future__ import annotations

from math import prod
from typing import Any, Optional, Sequence

from torch.utils.flop_counter import register_flop_formula

from .._ops import ops

_Shape = Optional[Sequence[int]]


def _of_layers(x: Sequence[int], *weights: _Shape) -> int:
    """Count ``x`` [..., in] times weights [out, in], of which the second layer takes the result of the first."""
    return 2 * prod(x[:-1]) * sum(prod(weight) for weight in weights if weight is not None)


def _of_one(x: Sequence[int], weight: Sequence[int], *_: Any, **__: Any) -> int:
    return _of_layers(x, weight)


def _of_two(x: Sequence[int], first: _Shape, second: Sequence[int], *_: Any, **__: Any) -> int:
    return _of_layers(x, first, second)


def _of_three(x: Sequence[int], first: _Shape, up: _Shape, second: _Shape, *_: Any, **__: Any) -> int:
    return _of_layers(x, first, up, second)


def _of_training_backward(
    grad: Sequence[int],
    x: _Shape,
    weight: _Shape,
    up_weight: _Shape,
    second_weight: _Shape,
    bias: _Shape,
    up_bias: _Shape,
    gate: _Shape,
    up: _Shape,
    activation: int,
    needs: int,
    up_first: Optional[bool],
    **_: Any,
) -> int:
    of_x, of_weight, of_up, of_second, *of_biases = (bool(needs >> place & 1) for place in range(6))
    is_before = of_x or of_weight or of_up or any(of_biases)  # a gradient that passes through the activation
    # Operands that no gradient needs are missing; the others tell their shapes.
    hidden = next(shape[-1] for shape in (gate, up, weight and weight[:1], grad) if shape is not None)
    first = (hidden, x[-1]) if weight is None and x is not None else weight
    second = (grad[-1], hidden if up_first is None else hidden // 2)
    computed = (
        (gate is None and up is None and (is_before or of_second), (weight, up_weight)),  # recompute the first layer
        (is_before, (second_weight,)),
        (of_x, (weight, up_weight)),
        (of_weight, (first,)),
        (of_up, (first,)),
        (of_second, (second,)),
    )
    return sum(_of_layers(grad, *weights) for is_computed, weights in computed if is_computed)


def _of_projections_backward(
    first: _Shape, second: _Shape, third: _Shape, x: _Shape, w0: _Shape, w1: _Shape, w2: _Shape, needs: int, **_: Any
) -> int:
    grads, weights = (first, second, third), (w0, w1, w2)
    like = next(grad for grad in grads if grad is not None)
    of_x = _of_layers(like, *(weight for grad, weight in zip(grads, weights) if grad is not None)) if needs & 1 else 0
    of_weights = [grad for place, grad in enumerate(grads) if needs >> 1 + place & 1]
    return of_x + sum(_of_layers(grad, (grad[-1], x[-1])) for grad in of_weights)


def _of_experts(
    x: Sequence[int], index: Sequence[int], shares: Any, first: Sequence[int], second: Sequence[int], *_: Any, **__: Any
) -> int:
    """Count every choice of a token, including skipped ones, which no shape reveals."""
    return _of_layers((*index, 1), first[1:], second[1:])


def _of_experts_backward(
    grad: Any,
    sorted_x: Any,
    gate_up: Any,
    index: Sequence[int],
    shares: Any,
    first: Sequence[int],
    second: Sequence[int],
    *others: Any,
    **_: Any,
) -> int:
    needs = others[-1]
    of_hidden = None if needs >> 11 & 1 else second  # another call computed it
    computed = of_hidden, first if needs & 1 else None, first if needs & 4 else None, second if needs & 8 else None
    return _of_layers((*index, 1), *(weight and weight[1:] for weight in computed))


def _of_groups(rows: Sequence[int], factor: Sequence[int], *_: Any, **__: Any) -> int:
    return _of_layers(rows, (rows[1], factor[-1]))


def _of_quantized(x: Sequence[int], weights: Any, layouts: Sequence[int], *_: Any, **__: Any) -> int:
    return _of_layers(x, *(layouts[place : place + 2] for place in range(0, len(layouts), 5)))


_FORMULAS = {
    "mm": lambda a, b, *_, **__: 2 * prod(a) * b[1],
    "linear": _of_one,
    "gated_linear": _of_two,
    "mlp": _of_two,
    "gated_mlp": _of_three,
    "residual_mlp": _of_two,
    "residual_gated_mlp": _of_three,
    "training_forward": _of_three,
    "graph_training_forward": _of_three,
    "training_backward": _of_training_backward,
    "training_backward_": _of_training_backward,
    "projections_forward": _of_three,
    "projections_backward": _of_projections_backward,
    "experts_mlp": _of_experts,
    "experts_training_forward": _of_experts,
    "experts_training_backward": _of_experts_backward,
    "experts_training_backward_": _of_experts_backward,
    "top_k_router": _of_one,
    "sigmoid_router": _of_one,
    "quantized_linear": _of_quantized,
    "quantized_mlp": _of_quantized,
    "grouped_mm": _of_groups,
    "grouped_outer": _of_groups,
    "triton_linear": _of_one,
    "triton_gated_linear": _of_two,
    "triton_experts_mlp": _of_experts,
}


def register() -> None:
    """Register the formulas of the ops that this build has; the ops must exist by now."""
    for name, formula in _FORMULAS.items():
        if hasattr(ops, name):
            register_flop_formula(getattr(ops, name))(formula)
