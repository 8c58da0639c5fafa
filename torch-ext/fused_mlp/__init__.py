"""Fused MLP kernels for Hugging Face models: GeGLU and its family, biases and activations in the GEMMs' epilogues."""

from . import layers
from .adapters import Adapter
from .backends import VERSION as __version__  # noqa: F401
from .diagnostics.benchmark import benchmark
from .diagnostics.check import check
from .diagnostics.explanation import explain
from .dispatch import backend
from .functional import act_and_mul, experts_mlp, gated_linear, gated_mlp, geglu, linear, mlp, swiglu
from .models.experts.mixtures import register_experts
from .models.fuse import fuse_mlps, is_fused
from .quantized.experts import QuantizedStack
from .quantized.weights import QuantizedWeight

__all__ = [
    "Adapter",
    "QuantizedStack",
    "QuantizedWeight",
    "act_and_mul",
    "backend",
    "benchmark",
    "check",
    "experts_mlp",
    "explain",
    "fuse_mlps",
    "gated_linear",
    "gated_mlp",
    "geglu",
    "is_fused",
    "layers",
    "linear",
    "mlp",
    "register_experts",
    "swiglu",
]
