"""A standalone linear layer, as in an attention or after the last block.

It is a PEFT LoRA layer, whose two small GEMMs become part of its op; a layer with a quantised weight, in inference; or
a large layer whose widths are not multiples of 8.
"""

from __future__ import annotations

from types import FunctionType
from typing import Dict, Optional, Union

from torch import Tensor, nn

from ... import calls, dispatch
from ...activations import get_activation
from ...adapters import Layer
from ...autograd import linear, training
from ...quantized import weights as quantized
from ..methods import switching, traced
from ..parts import adapters, refusals
from . import forwards, shortcut

_IDENTITY = get_activation(None)
KIND = "layer"


# Least number of elements of x at which one op for a layer with an adapter pays on a CPU, and least number of weight
# elements at which the checks take a negligible part of the layer's time.
_LEAST_ELEMENTS, _LEAST_WEIGHTS = 1 << 19, 1 << 18


def fused_methods(module: nn.Module) -> Dict[str, FunctionType]:
    """Return the regenerated forward of such a layer, by name; empty for any other module, or if it cannot pay."""
    if not adapters.is_known(module):
        return {"forward": _fused_method(nn.Linear.forward)} if is_padded(module) else {}
    layer = adapters.layer_of(module)
    if type(layer) is str and not adapters.is_adapted(module):
        return {}
    is_small = type(layer) is not str and layer.weight.is_cpu and layer.weight.numel() < _LEAST_WEIGHTS
    if is_small:
        return {}
    method = _fused_method(type(module).forward)
    shortcut.know_kernel(type(module), method)
    return {"forward": method}


def _fused_method(method: FunctionType) -> FunctionType:
    return switching.fused_forward(KIND, method, _product, traced.run if method is nn.Linear.forward else None)


def is_padded(module: nn.Module) -> bool:
    """True for a plain linear layer whose widths make torch's GEMMs slow."""
    if type(module) is not nn.Linear or adapters.is_known(module):
        return False
    layer = refusals.parameters_of(module)
    return type(layer) is not str and linear.suits(layer[0])


def refusal(module: nn.Module) -> Optional[str]:
    """Return why such a layer runs as written in its present state; None if it is one op."""
    state = adapters.of_state(module)
    if state is None and is_padded(module):
        return refusals.of_global_state() or linear.refusal(module.weight)
    if state is not None:
        return state
    layer = adapters.layer_of(module)
    is_active = layer.adapter is not None or quantized.is_any(layer.weight)
    return refusals.of_global_state() if is_active else "no active adapter"


def _product(module: nn.Module, x: Tensor) -> Optional[Tensor]:
    if not isinstance(x, Tensor):
        return None
    if type(module) is nn.Linear and not adapters.is_known(module):
        return _of_odd_widths(module, x)
    is_adapted = adapters.is_adapted(module)
    if is_adapted and x.is_cpu and x.numel() < _LEAST_ELEMENTS:
        return None
    if is_adapted and not shortcut.is_grad_enabled() and module.training and shortcut.is_as_recorded(module, x):
        return training.as_recorded(lambda given: _product(module, given), x)
    found = None if shortcut.plain is None else shortcut.plain.adapted(forwards.LINEAR, module, x, _IDENTITY.function)
    if found is False:  # its adapter's input dropout is active, which no op supports
        return None
    layer = adapters.layer_of(module) if found is None else None
    if found is not None or type(layer) is str:
        return found
    if not is_adapted or layer.adapter is None:
        return _of_quantised(layer, x)
    if refusals.of_input(x) is not None:
        return None
    return forwards.of_layers(forwards.LINEAR, x, [layer], _IDENTITY)


def _of_odd_widths(module: nn.Module, x: Tensor) -> Optional[Tensor]:
    weight = module._parameters.get("weight")
    if weight is None or not linear.is_large(x, weight):
        return None
    layer = refusals.parameters_of(module)
    if type(layer) is str or refusals.of_input(x) is not None:
        return None
    given = calls.autocast((x, *layer))
    is_recorded = calls.is_plainly_recorded("linear", given)
    if is_recorded is None or not linear.gains(*given[:2]):
        return None
    return dispatch.op_or_parts(linear.run, (*given, is_recorded), lambda: None)


def _of_quantised(layer: Union[str, Layer], x: Tensor) -> Optional[Tensor]:
    """Multiply by a quantised weight; None if the weight is not quantised or under autograd, so that the layer's own
    GEMM runs."""
    if type(layer) is str or not quantized.is_any(layer.weight) or calls.autograd_follows(x, layer.bias):
        return None
    return None if refusals.of_input(x) is not None else forwards.of_layers(forwards.LINEAR, x, [layer], _IDENTITY)
