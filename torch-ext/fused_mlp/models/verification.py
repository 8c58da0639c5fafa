"""Compares each kind of fused call with its parts, called one after the other, before it is used.

Nothing else runs. Methods do not: they are user code, which may print, count, draw random numbers, write to parameters
or communicate with other processes, and running them on a copy prevents only some of that. They need not run either: by
construction, a rewritten method differs from its original only in its fused calls, which the tests of this package
prove. The tests cannot prove that a fused call agrees with its parts on this machine's kernels and with the activation
class of the installed library version. So this calls plain linear layers without hooks and known activations, which
read a module's weights and change nothing.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from torch import Tensor, nn

from .. import calls
from ..adapters import Layer
from ..backends import reference
from ..experts import traceable
from ..quantized import weights as quantized
from .experts import mixtures, proofs
from .experts.quantized import is_read as are_quantized
from .parts import adapters, refusals
from .rewriting.found import FoundMLP
from .running import forwards

# Largest relative error of a row between two correct ways to compute an MLP, by dtype (float32: with TensorFloat-32).
_TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-3, torch.float16: 5e-3, torch.bfloat16: 3e-2}

_ROW_SCALES = (0.1, 1.0, 1.0, 10.0, 100.0)  # an activation that was misidentified differs at one of these


class Verification:
    """Caches comparisons, since a model's layers differ only in the values of their weights."""

    def __init__(self) -> None:
        self._known: Dict[Tuple[Any, ...], Optional[str]] = {}

    def disagreement(self, mlps: List[FoundMLP]) -> Optional[str]:
        """Describe the first MLP whose fused call differs from its parts on a random input.

        Returns None if all agree or none can be compared.
        """
        return next(filter(None, map(self._of_call, mlps)), None)

    def _of_call(self, mlp: FoundMLP) -> Optional[str]:
        if not mlp.projections or not _can_be_computed(mlp):
            return None  # its parts are called anyway
        parts = list(mlp.projections.values())
        kinds = ((type(part), *map(_kind, part.parameters())) for part in parts)
        key = (mlp.pattern, type(mlp.act), mlp.activation, len(_casts(mlp)), *kinds)
        if key not in self._known:
            self._known[key] = _difference_of_call(mlp, _values_of(adapters.layer_of(parts[0])))
        return self._known[key]

    def disagreement_of_experts(self, module: nn.Module) -> Optional[str]:
        """Like :meth:`disagreement`, for an experts module; only two experts are computed."""
        if mixtures.refusal(module) is not None or are_quantized(module):
            return None  # FP8 experts round their input, and their code may come from the Hub
        found = proofs.of(module)
        tensors = proofs.tensors_of(module, found.weights)
        if not all(tensor is None or _is_computable(tensor) for tensor in tensors):
            return None
        key = (found.form, *(None if tensor is None else _kind(tensor) for tensor in tensors))
        if key not in self._known:
            self._known[key] = _difference_of_experts(found, tensors)
        return self._known[key]


def _can_be_computed(mlp: FoundMLP) -> bool:
    """True if a sample call has no side effects (no hooks or modes) and all weights are materialised."""
    if refusals.of_global_state() is not None or mlp.activation is None:
        return False
    layers = [adapters.layer_of(part) for part in mlp.projections.values()]
    if any(isinstance(layer, str) or (layer.adapter is not None and layer.adapter.dropout) for layer in layers):
        return False
    if any(layer.dtype is not None and layer.weight.is_cpu for layer in layers):
        return False  # a call on a CPU may repack the weight of a four-bit layer
    if any(quantized.are_blocked(layer.weight) for layer in layers):
        return False  # its own GEMM rounds its input to FP8 or int8, and may come from the Hub
    weights = map(_values_of, layers)
    return all(weight.dim() == 2 and _is_computable(weight) for weight in weights)  # others: not gathered yet


def _values_of(layer: Layer) -> Tensor:
    """Return the weight, or a tensor with the shape and dtype of a quantised one."""
    return layer.weight if layer.dtype is None else quantized.shape_alone(layer.weight, layer.dtype)


def _is_computable(weight: Tensor) -> bool:
    return weight.dtype in _TOLERANCE and not weight.is_meta


def _kind(parameter: Tensor) -> Tuple[Any, ...]:
    return parameter.shape, parameter.stride(), parameter.dtype, parameter.device


def _difference_of_experts(found: proofs.Experts, tensors: Tuple[Optional[Tensor], ...]) -> Optional[str]:
    of_two = [None if tensor is None else tensor[:2] for tensor in tensors]
    x = _rows(of_two[0][0].t() if found.form.transposed else of_two[0][0])
    index = torch.arange(2, device=x.device).repeat(x.shape[0], 1)
    given = (x, index, torch.full_like(index, 0.5, dtype=x.dtype), *of_two, found.form)
    return _difference_between(lambda: calls.experts_mlp(*given), lambda: traceable(*given, reference.act_and_mul), x)


def _difference_of_call(mlp: FoundMLP, weight: Tensor) -> Optional[str]:
    x, parts, casts = _rows(weight), tuple(mlp.projections.values()), _casts(mlp)
    return _difference_between(
        lambda: forwards.fused(mlp.pattern, x, parts, mlp.activation, casts),
        lambda: forwards.called(mlp.pattern, x, parts, mlp.act, casts),
        x,
    )


def _casts(mlp: FoundMLP) -> List[Callable[[Tensor], Tensor]]:
    """Return the casts between the projections, as functions of the hidden values."""
    *_, last = mlp.projections.values()
    return [lambda hidden: hidden.to(last.weight.dtype) for part in mlp.between.values() if part is forwards.cast]


def _difference_between(fused: Callable[[], Optional[Tensor]], plain: Callable[[], Tensor], x: Tensor) -> Optional[str]:
    try:
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            got, expected = fused(), plain()
    except Exception as error:  # e.g. a width or device that does not fit: do not fuse what cannot be compared
        return f"could not be compared: {type(error).__name__}: {error}".splitlines()[0]
    difference = 0.0 if got is None else _difference(got, expected)  # None: no op, so the parts run
    if difference <= _TOLERANCE[x.dtype]:
        return None
    return f"its fused call gives a different result (relative difference {difference:.1e})"


def _rows(weight: Tensor) -> Tensor:
    generator = torch.Generator(weight.device).manual_seed(0)
    scales = torch.tensor(_ROW_SCALES, device=weight.device).unsqueeze(1)
    x = torch.randn(len(_ROW_SCALES), weight.shape[1], generator=generator, device=weight.device)
    return (x * scales).to(weight.dtype)


def _difference(got: Tensor, expected: Tensor) -> float:
    """Return the largest relative error of a row; 0 if no row is finite, for example before weights are loaded."""
    got, expected = got.double(), expected.double()
    finite = torch.isfinite(expected).all(dim=-1)
    error = (got - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    return float(error[finite].max()) if finite.any() else 0.0
