"""The MLP blocks of diffusers and timm."""

import functools
import importlib
import sys
from pathlib import Path
from types import ModuleType

from torch import nn

WIDTH = 32
TIMM = Path(sys.prefix, "timm")  # outside Python's search path

_ACTIVATIONS = ("geglu", "gelu", "gelu-approximate", "geglu-approximate", "swiglu", "linear-silu")
_TIMM = ("Mlp", "GluMlp", "SwiGLUPacked", "SwiGLU", "GatedMlp", "GlobalResponseNormMlp")

NAMES = [("diffusers", f"FeedForward({name})") for name in _ACTIVATIONS] + [("timm", name) for name in _TIMM]


def make(package: str, name: str) -> nn.Module:
    """A block with random weights that takes inputs of WIDTH."""
    if package == "timm":
        return getattr(_timm_mlp(), name)(WIDTH, 88)
    attention = importlib.import_module("diffusers.models.attention")
    activation = name.partition("(")[2].rstrip(")")
    return attention.FeedForward(WIDTH, activation_fn=activation, dropout=0.0)


@functools.cache
def _timm_mlp() -> ModuleType:
    """timm.layers.mlp without the rest of timm, which imports torchvision, whose wheels need a CUDA torch.

    For the same reason timm is in a separate folder, where transformers does not find it and rely on it.
    """
    if not TIMM.is_dir():
        command = f"{sys.executable} -m pip install --no-deps --target {TIMM} -r requirements/timm.txt"
        raise FileNotFoundError(f"timm is not in {TIMM}: {command}")
    try:
        for package in ("timm", "timm.layers"):
            sys.modules[package] = ModuleType(package)
            sys.modules[package].__path__ = [str(TIMM / package.replace(".", "/"))]
        return importlib.import_module("timm.layers.mlp")
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "timm"]:
            del sys.modules[name]
