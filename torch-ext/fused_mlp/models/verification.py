"""Compares what is fused with what it replaces, before it is: each call with its parts, and each method as a whole."""

from __future__ import annotations

import copy
import inspect
import itertools
from types import FunctionType
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import torch
from torch import Tensor, nn

from . import forwards, obstacles
from .rewriting import FoundMLP

# Largest relative error of a row between two right ways to compute an MLP, by dtype (float32: TensorFloat-32's).
_TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-3, torch.float16: 5e-3, torch.bfloat16: 3e-2}

_ROW_SCALES = (0.1, 1.0, 1.0, 10.0, 100.0)  # an activation that is not what it is taken for shows at one of them


class Verification:
    """Remembers what was compared: a model's layers differ in nothing but the values of their weights."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = {id(parameter): parameter for parameter in model.parameters()}
        self._known: Dict[Tuple[Any, ...], Optional[str]] = {}

    def disagreement(self, module: nn.Module, name: str, fused: FunctionType, mlps: List[FoundMLP]) -> Optional[str]:
        """How a fused method, or one of the ``mlps`` in it, differs from what it replaces on a random input; None if it
        does not, or cannot be compared."""
        reasons = (self._of_call(mlp) for mlp in mlps)
        return next(filter(None, reasons), None) or self._of_method(module, name, fused, mlps)

    def _of_call(self, mlp: FoundMLP) -> Optional[str]:
        if not mlp.projections or not _can_be_computed(mlp):
            return None  # its parts are called
        parts = list(mlp.projections.values())
        kinds = ((type(part), *map(_kind, part.parameters())) for part in parts)
        key = (mlp.pattern, type(mlp.act), mlp.activation, *kinds)
        if key not in self._known:
            self._known[key] = _difference_of_call(mlp, obstacles.weight_of(parts[0]))
        return self._known[key]

    def _of_method(self, module: nn.Module, name: str, fused: FunctionType, mlps: List[FoundMLP]) -> Optional[str]:
        """A method that needs one tensor alone is run whole, in both modes, on copies that share the parameters."""
        original = getattr(type(module), name)
        first = next((part for mlp in mlps if _can_be_computed(mlp) for part in mlp.projections.values()), None)
        if first is None or not _takes_one_tensor(original) or not _can_be_copied(module):
            return None
        key = (original, fused, *map(type, module.modules()), *map(_kind, module.parameters()))
        if key not in self._known:
            rows = _rows(obstacles.weight_of(first))
            tries = itertools.product((rows.unsqueeze(0), rows), (False, True))
            reasons = (self._difference_of_method(module, original, fused, x, training) for x, training in tries)
            self._known[key] = next(filter(None, reasons), None)
        return self._known[key]

    def _difference_of_method(
        self, module: nn.Module, original: FunctionType, fused: FunctionType, x: Tensor, training: bool
    ) -> Optional[str]:
        try:
            expected = _outputs(original, self._copy(module, training), x)
        except Exception:  # it holds what cannot be copied, or was not written for such an input
            return None
        name = f"its fused {original.__name__}"
        try:
            got = _outputs(fused, self._copy(module, training), x)
        except Exception as error:
            return f"{name} fails: {type(error).__name__}: {error}".splitlines()[0]
        if [output.shape for output in got] != [output.shape for output in expected]:
            return f"{name} gives other shapes"
        difference = max(map(_difference, got, expected), default=0.0)
        if difference <= _TOLERANCE[x.dtype]:
            return None
        return f"{name} computes something else (relative difference {difference:.1e})"

    def _copy(self, module: nn.Module, training: bool) -> nn.Module:
        """A copy in which fused methods run."""
        copied = copy.deepcopy(module, dict(self._parameters)).train(training)
        setattr(copied, forwards.FUSED, True)
        return copied


def _can_be_computed(mlp: FoundMLP) -> bool:
    if any(obstacles.of_projection(part) is not None for part in mlp.projections.values()):
        return False
    weights = [obstacles.weight_of(part) for part in mlp.projections.values()]
    return all(weight.dim() == 2 and _is_computable(weight) for weight in weights)  # else it is yet to be gathered


def _is_computable(weight: Tensor) -> bool:
    return weight.dtype in _TOLERANCE and not weight.is_meta


def _kind(parameter: Tensor) -> Tuple[Any, ...]:
    return parameter.shape, parameter.stride(), parameter.dtype, parameter.device


def _takes_one_tensor(method: Callable[..., Any]) -> bool:
    _, *parameters = inspect.signature(method).parameters.values()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [each for each in parameters if each.default is each.empty and each.kind not in variadic]
    return len(needed) == 1 and needed[0] is parameters[0] and needed[0].kind is not inspect.Parameter.KEYWORD_ONLY


def _can_be_copied(module: nn.Module) -> bool:
    """Whether a copy may be run: nobody watches its parts, and it talks to no other process."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return False
    if any(obstacles.of_call(part) is not None for part in module.modules()):
        return False
    return all(type(each) is nn.Parameter and _is_computable(each) for each in module.parameters())


def _outputs(method: FunctionType, module: nn.Module, x: Tensor) -> List[Tensor]:
    """The floating-point tensors that a method gives for ``x``; the next call has the same random state."""
    with torch.random.fork_rng([x.device] if x.is_cuda else []), torch.no_grad():
        return [output for output in _tensors(method(module, x.clone())) if output.is_floating_point()]


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (list, tuple, dict)):
        for part in output.values() if isinstance(output, dict) else output:
            yield from _tensors(part)


def _difference_of_call(mlp: FoundMLP, weight: Tensor) -> Optional[str]:
    parts = tuple(mlp.projections.values())
    x = _rows(weight)
    try:
        with torch.no_grad():
            got = forwards.fused(mlp.pattern, x, parts, mlp.activation, mlp.act)
            expected = forwards.fused(mlp.pattern, x, parts, None, mlp.act)
    except Exception as error:  # of a width or a device that does not fit, say: what cannot be compared is left alone
        return f"not compared: {type(error).__name__}: {error}".splitlines()[0]
    difference = _difference(got, expected)
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
    got, expected = got.double(), expected.double()
    finite = torch.isfinite(expected).all(dim=-1)
    error = (got - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    return float(error[finite].max()) if finite.any() else 0.0
