"""Compares an MLP's fused call with its parts, called one after the other, before it is fused."""

from __future__ import annotations

from typing import Any, Dict, Iterator, Optional, Tuple

import torch
from torch import Tensor, nn

from . import forwards, obstacles
from .activations import activation_of
from .rewriting import FoundMLP

# Largest relative error of a row between two right ways to compute an MLP, by dtype (float32: TensorFloat-32's).
_TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-3, torch.float16: 5e-3, torch.bfloat16: 3e-2}

_ROW_SCALES = (0.1, 1.0, 1.0, 10.0, 100.0)  # an activation that is not what it is taken for shows at one of them


class Verification:
    """Remembers what was compared: a model's layers differ in nothing but the values of their weights."""

    def __init__(self) -> None:
        self._known: Dict[Tuple[Any, ...], Optional[str]] = {}

    def disagreement(self, mlp: FoundMLP) -> Optional[str]:
        """How the fused call differs from the parts on a random input; None if it does not, or cannot be compared."""
        projections = list(mlp.projections.values())
        if not projections or any(obstacles.of_projection(part) is not None for part in projections):
            return None  # its parts are called
        weights = [obstacles.weight_of(part) for part in projections]
        if any(weight.dtype not in _TOLERANCE or weight.is_meta for weight in weights):
            return None
        kinds = ((type(part), tuple(_kinds(part))) for part in projections)
        key = (mlp.pattern, type(mlp.act), activation_of(mlp.act), *kinds)
        if key not in self._known:
            self._known[key] = _disagreement(mlp, weights[0])
        return self._known[key]


def _kinds(projection: nn.Module) -> Iterator[Optional[Tuple[Any, ...]]]:
    for parameter in (projection.weight, projection.bias):
        yield None if parameter is None else (parameter.shape, parameter.stride(), parameter.dtype, parameter.device)


def _disagreement(mlp: FoundMLP, weight: Tensor) -> Optional[str]:
    forward, parts = forwards.BY_PATTERN[mlp.pattern], mlp.projections.values()
    x = _rows(weight)
    try:
        with torch.no_grad():
            got = forward(x, *parts, activation_of(mlp.act), mlp.act)
            expected = forward(x, *parts, None, mlp.act)
    except Exception as error:  # of a width or a device that does not fit, say: what cannot be compared is left alone
        return f"not compared: {type(error).__name__}: {error}".splitlines()[0]
    difference = _difference(got.double(), expected.double())
    if difference <= _TOLERANCE[x.dtype]:
        return None
    return f"its fused call computes something else (relative difference {difference:.1e})"


def _rows(weight: Tensor) -> Tensor:
    generator = torch.Generator(weight.device).manual_seed(0)
    scales = torch.tensor(_ROW_SCALES, device=weight.device).unsqueeze(1)
    x = torch.randn(len(_ROW_SCALES), weight.shape[1], generator=generator, device=weight.device)
    return (x * scales).to(weight.dtype)


def _difference(got: Tensor, expected: Tensor) -> float:
    """The largest relative error of a row; 0 if no row is finite, as where weights are yet to be loaded."""
    finite = torch.isfinite(expected).all(dim=-1)
    error = (got - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    return float(error[finite].max()) if finite.any() else 0.0
