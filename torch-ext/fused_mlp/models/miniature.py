"""Small copies of modules that hold stacks of weights: what a method computes shows on one as well."""

from __future__ import annotations

from types import MethodType
from typing import Any, Dict, Tuple

import torch
from torch import Tensor, nn

from . import switching

EXPERTS, WIDTH, HIDDEN = 5, 10, 6  # a miniature's, where the module's own are all different


class MiniatureError(Exception):
    """No small copy can be made: for what a module holds."""


def sizes_of(experts: int, width: int, hidden: int) -> Dict[int, int]:
    """What each size of a module becomes in its miniature: equal ones equal, and twice the hidden one twice."""
    small = {hidden: HIDDEN, 2 * hidden: 2 * HIDDEN}
    small.setdefault(width, WIDTH)
    small.setdefault(experts, EXPERTS)
    return small


def miniature(module: nn.Module, sizes: Dict[int, int]) -> nn.Module:
    """A module of the same class with weights of its own, float64, drawn at random; numbers that are sizes shrink too.

    Parts without weights are the module's own, with what they hold.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    return _shrunk(module, sizes, generator)


def _shrunk(module: nn.Module, sizes: Dict[int, int], generator: torch.Generator) -> nn.Module:
    kind = switching.class_of(module)
    small = kind.__new__(kind)
    nn.Module.__init__(small)
    own = set(vars(small))
    held = {name: value for name, value in vars(module).items() if name not in own and type(value) is not MethodType}
    vars(small).update({name: _small(value, sizes) for name, value in held.items()})
    parts, parameters = dict(module._modules), dict(module._parameters)
    for name in parts.pop("parametrizations", ()):
        parameters[name] = getattr(module, name)
    for name, parameter in parameters.items():
        small._parameters[name] = None if parameter is None else _weights(parameter, sizes, generator)
    for name, part in parts.items():
        has_weights = part is not None and next(part.parameters(), None) is not None
        small._modules[name] = _shrunk(part, sizes, generator) if has_weights else part
    if any(buffer is not None for buffer in module._buffers.values()):
        raise MiniatureError("it has buffers")
    return small.train(module.training)


def _weights(parameter: Tensor, sizes: Dict[int, int], generator: torch.Generator) -> nn.Parameter:
    shape = _small(tuple(parameter.shape), sizes)
    if torch.Size(shape).numel() > 4096:
        raise MiniatureError(f"a parameter of shape {list(parameter.shape)}")
    values = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    return nn.Parameter(values, requires_grad=False)


def _small(value: Any, sizes: Dict[int, int]) -> Any:
    if type(value) is int:
        return sizes.get(value, value)
    return tuple(_small(part, sizes) for part in value) if type(value) in (tuple, torch.Size) else value


def routing(tokens: int, experts: int, top_k: int) -> Tuple[Tensor, Tensor]:
    """Different experts for each token, and their weights, float64."""
    generator = torch.Generator("cpu").manual_seed(1)
    scores = torch.rand(tokens, experts, generator=generator, dtype=torch.float64, device="cpu")
    weights, index = scores.topk(top_k, dim=-1)
    return index, weights
