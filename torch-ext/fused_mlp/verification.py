"""Compares a module's fused forward with its own, before the module is fused."""

from __future__ import annotations

import copy
from typing import Any, Callable, Dict, Optional, Tuple

import torch
from torch import Tensor, nn

from . import obstacles

# Largest relative error, row by row, that two right ways to compute an MLP show in a dtype.
_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}

# Rows of growing size: a clamp or a threshold in a look-alike shows at one of them.
_ROW_SCALES = (0.1, 1.0, 1.0, 10.0, 100.0)


def kind(module: nn.Module, plan: Dict[str, Any]) -> Tuple[Any, ...]:
    """What modules must have in common for one comparison to speak for all of them."""
    parts = tuple(type(getattr(module, name)) for name in plan["projections"])
    reference = _floating_parameter(module)
    where = None if reference is None else (reference.dtype, reference.device)
    return (type(module), parts, where, *sorted(plan.items()))


def disagreement(
    module: nn.Module, plan: Dict[str, Any], fused: Callable[[nn.Module, Dict[str, Any], Tensor], Tensor]
) -> Optional[str]:
    """How ``fused(module, plan, x)`` differs from the module's own forward on a random ``x``, or None if it does not."""
    in_features = _in_features(getattr(module, plan["projections"][0]))
    like = _floating_parameter(module)
    if in_features is None or like is None:
        return "not compared: the width of its input is not known"
    if any(parameter.is_meta for parameter in module.parameters()):
        return "not compared: its weights are on the meta device"
    probe = _quiet_copy(module)
    generator = torch.Generator(like.device).manual_seed(0)
    x = torch.randn(len(_ROW_SCALES), in_features, generator=generator, device=like.device, dtype=torch.float32)
    x = (x * torch.tensor(_ROW_SCALES, device=like.device).unsqueeze(1)).to(like.dtype)
    with torch.no_grad():
        expected = type(module).forward(probe, x)
        if isinstance(expected, Tensor) and not expected.any():  # zero weights prove nothing
            _randomise(probe, generator)
            expected = type(module).forward(probe, x)
        got = fused(probe, plan, x)
    if not isinstance(expected, Tensor) or expected.shape != got.shape or expected.dtype != got.dtype:
        return "its own forward returns something else"
    return _error_message(got.double(), expected.double(), _TOLERANCE[like.dtype])


def _error_message(got: Tensor, expected: Tensor, tolerance: float) -> Optional[str]:
    finite = torch.isfinite(expected).all(dim=-1) & torch.isfinite(got).all(dim=-1)
    if not finite.any():
        return "not compared: its outputs are not finite"
    error = (got - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    worst = float(error[finite].max())
    return None if worst <= tolerance else f"its own forward computes something else (relative difference {worst:.1e})"


def _quiet_copy(module: nn.Module) -> nn.Module:
    """A copy in evaluation mode that shares the parameters and runs nobody's hooks."""
    shared = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
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
