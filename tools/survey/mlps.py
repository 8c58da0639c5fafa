"""The MLPs of a model, by a definition that is independent of fuse_mlps and broader than its own.

A module is an MLP if its class name says so, or if its own linear layers are those of an MLP, one that widens and one
that narrows back; and if it contains an activation. If MLPs are nested, the innermost counts.
"""

import re
from types import FunctionType

from torch import nn

_NAME = re.compile(r"MLP|Mlp|FeedForward|FFN|FFW|Intermediate|DenseActDense|GatedActDense")
_EXPERTS = re.compile(r"Experts?(GLU)?$")
_MIXER = re.compile(r"Attention|Attn|Mixer|Mamba|SSM|Delta|Conv|Quantizer|Lora|ModuleList|ModuleDict")

_ACTIVATION_MODULES = ("torch.nn.modules.activation", "transformers.activations")
_ACTIVATION_NAME = re.compile(r"act(_fn|ivation.*)?$|relu|gelu|silu|swish|tanh|mish|softplus", re.IGNORECASE)


def find(model: nn.Module) -> dict[str, nn.Module]:
    """The MLPs of a model, by path, without experts."""
    named = {path: module for path, module in model.named_modules() if _is_mlp(module)}
    inside = {path.rpartition(".")[0] for path in named}
    for path in list(inside):
        while path:
            path = path.rpartition(".")[0]
            inside.add(path)
    return {path: module for path, module in named.items() if path not in inside or is_experts(module)}


def is_experts(module: nn.Module) -> bool:
    """True if a module is a group of experts: their weights are stacked in its own parameters, or are a list."""
    stacked = any(parameter.dim() == 3 for parameter in module.parameters(recurse=False))
    return bool(_EXPERTS.search(type(module).__name__)) and stacked


def _is_mlp(module: nn.Module) -> bool:
    name = type(module).__name__
    if is_experts(module):
        return True
    if _NAME.search(name):
        return any(map(_is_linear, module.modules())) and _has_activation(module)
    return not _MIXER.search(name) and _widens_and_narrows(module) and _has_activation(module)


def _widens_and_narrows(module: nn.Module) -> bool:
    shapes = [_shape(child) for child in module.children() if _is_linear(child)]
    return any(
        hidden != width and hidden in (last_in, 2 * last_in) and last_out == width
        for width, hidden in shapes
        for last_in, last_out in shapes
    )


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _shape(module: nn.Module) -> tuple[int, int]:
    return (module.in_features, module.out_features) if isinstance(module, nn.Linear) else (module.nx, module.nf)


def _has_activation(module: nn.Module) -> bool:
    for part in module.modules():
        if type(part).__module__ in _ACTIVATION_MODULES:
            return True
        called = (f.__code__.co_names for f in vars(type(part)).values() if isinstance(f, FunctionType))
        if any(_ACTIVATION_NAME.match(name) for names in called for name in names):
            return True
    return False
