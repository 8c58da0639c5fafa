"""Compares a module's fused forward with its own, before the module is fused."""

from __future__ import annotations

import copy
from typing import Any, Callable, Dict, Optional

import torch
from torch import Tensor, nn

from . import obstacles

Forward = Callable[[nn.Module, Dict[str, Any], Tensor], Tensor]

# Largest relative error of a row between two right ways to compute an MLP, by dtype (float32: TensorFloat-32's).
_TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-3, torch.float16: 5e-3, torch.bfloat16: 3e-2}

# Rows of growing size: a clamp or a threshold in a look-alike shows at one of them.
_ROW_SCALES = (0.1, 1.0, 1.0, 10.0, 100.0)


def disagreement(module: nn.Module, plan: Dict[str, Any], fused: Forward) -> Optional[str]:
    """How ``fused(module, plan, x)`` differs from the module's own forward on a random ``x``; None if it does not."""
    like = _floating_parameter(module)
    in_features = _in_features(getattr(module, plan["projections"][0]))
    if in_features is None or like is None:
        return "not compared: the width of its input is not known"
    if any(parameter.is_meta for parameter in module.parameters()):
        return "not compared: its weights are on the meta device"
    generator = torch.Generator(like.device).manual_seed(0)
    gpus = [like.device] if like.device.type == "cuda" else []
    try:
        with torch.no_grad(), torch.random.fork_rng(gpus):
            return _difference(_quiet_copy(module), plan, fused, _rows(in_features, like, generator), generator)
    except Exception as error:  # a foreign forward may raise anything; what cannot be compared is left alone
        return f"not compared: {type(error).__name__}: {error}".splitlines()[0]


def _rows(in_features: int, like: Tensor, generator: torch.Generator) -> Tensor:
    x = torch.randn(len(_ROW_SCALES), in_features, generator=generator, device=like.device, dtype=torch.float32)
    return (x * torch.tensor(_ROW_SCALES, device=like.device).unsqueeze(1)).to(like.dtype)


def _difference(
    probe: nn.Module, plan: Dict[str, Any], fused: Forward, x: Tensor, generator: torch.Generator
) -> Optional[str]:
    own = type(probe).forward
    expected = own(probe, x)
    if isinstance(expected, Tensor) and not (expected != expected[:1]).any():  # x does not matter: weights are zeros
        _randomise(probe, generator)
    for probe.training in (False, True):  # not so its parts: their dropouts are kept, and need not agree
        expected, got = own(probe, x), fused(probe, plan, x)
        when = " in training" if probe.training else ""
        if not isinstance(expected, Tensor) or expected.shape != got.shape or expected.dtype != got.dtype:
            return f"its own forward returns something else{when}"
        message = _error_message(got.double(), expected.double(), _TOLERANCE[x.dtype])
        if message is not None:
            return message + when
    return None


def _error_message(got: Tensor, expected: Tensor, tolerance: float) -> Optional[str]:
    finite = torch.isfinite(expected).all(dim=-1) & torch.isfinite(got).all(dim=-1)
    if not finite.any():
        return "not compared: its outputs are not finite"
    error = (got - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    worst = float(error[finite].max())
    return None if worst <= tolerance else f"its own forward computes something else (relative difference {worst:.1e})"


def _quiet_copy(module: nn.Module) -> nn.Module:
    """A copy in evaluation mode that shares all tensors and runs nobody's hooks."""
    shared = {}
    for part in module.modules():
        for value in (*part._parameters.values(), *part._buffers.values(), *vars(part).values()):
            if isinstance(value, Tensor):
                shared[id(value)] = value
    probe = copy.deepcopy(module, shared)
    for part in probe.modules():
        for hooks in (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks):
            hooks.clear()
    return probe.eval()


def _randomise(probe: nn.Module, generator: torch.Generator) -> None:
    for part in probe.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and parameter.dtype.is_floating_point:
                values = torch.randn(parameter.shape, generator=generator, device=parameter.device)
                part._parameters[name] = nn.Parameter((0.1 * values).to(parameter.dtype), requires_grad=False)


def _floating_parameter(module: nn.Module) -> Optional[Tensor]:
    return next((p for p in module.parameters() if p.dtype in _TOLERANCE), None)


def _in_features(projection: nn.Module) -> Optional[int]:
    if hasattr(projection, "in_features"):
        return projection.in_features
    if obstacles.of_projection(projection) is None:
        return obstacles.weight_of(projection).shape[1]
    return None
