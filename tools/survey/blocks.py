"""The MLP blocks of diffusers and timm, for any fuser to try."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from torch import nn

TIMM = Path(sys.prefix, "timm")


def blocks() -> dict[tuple[str, str], Callable[[], nn.Module]]:
    """What makes each block, by package and name."""
    made = {("diffusers", name): make for name, make in _diffusers().items()}
    return made | {("timm", name): make for name, make in _timm().items()}


def survey(fused_mlp) -> list[tuple[str, str, str, str]]:
    """Package, block, outcome and what is fused."""
    found = []
    for (package, name), make in blocks().items():
        report = fused_mlp.fuse_mlps(make())
        patterns = ", ".join(f"{entry.class_name}: {entry.pattern}" for entry in report.fused)
        only = {entry.pattern for entry in report.fused} == {"pointwise"}
        found.append((package, name, "pointwise" if only else "fused" if patterns else "left", patterns))
    return found


def _diffusers() -> dict[str, Callable[[], nn.Module]]:
    attention = importlib.import_module("diffusers.models.attention")
    names = ("geglu", "gelu", "gelu-approximate", "geglu-approximate", "swiglu", "linear-silu")
    return {f"FeedForward({name})": lambda name=name: attention.FeedForward(32, activation_fn=name) for name in names}


def _timm() -> dict[str, Callable[[], nn.Module]]:
    mlp = _timm_layers("mlp")
    return {
        "Mlp": lambda: mlp.Mlp(32, 88),
        "GluMlp": lambda: mlp.GluMlp(32, 88),
        "SwiGLUPacked": lambda: mlp.SwiGLUPacked(32, 88),
        "SwiGLU": lambda: mlp.SwiGLU(32, 88),
        "GatedMlp": lambda: mlp.GatedMlp(32, 88),
        "GlobalResponseNormMlp": lambda: mlp.GlobalResponseNormMlp(32, 88),
    }


def _timm_layers(name: str) -> ModuleType:
    """A file of timm.layers, without the rest of timm: that imports torchvision, whose wheels need a GPU's torch.

    For the same reason timm lies in a folder of its own, where transformers does not see it and rely on it.
    """
    if not TIMM.is_dir():
        raise FileNotFoundError(
            f"timm is not in {TIMM}: pip install --no-deps --target {TIMM} -r requirements/timm.txt"
        )
    for package in ("timm", "timm.layers"):
        module = sys.modules.setdefault(package, ModuleType(package))
        module.__path__ = [str(TIMM / package.replace(".", "/"))]
    return importlib.import_module(f"timm.layers.{name}")
