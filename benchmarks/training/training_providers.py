"""Providers that can train a gated MLP. Each is a function of x; all use the weights of one MLP."""

import contextlib
import importlib
import importlib.util
from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gemm_kernels

ACTIVATIONS = {"silu": F.silu, "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh")}
Forward = Callable[[Tensor], Tensor]


class GatedMLP(nn.Module):
    """The MLP as models write it."""

    def __init__(self, width: int, hidden: int, activation: str) -> None:
        super().__init__()
        self.config = SimpleNamespace(hidden_size=width, intermediate_size=hidden, hidden_act=activation)
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)
        self.register_parameter("packed", None)  # for QuACK

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(ACTIVATIONS[self.config.hidden_act](self.gate_proj(x)) * self.up_proj(x))


# Liger's module and class for each of its three ways, by activation: fused pointwise; the same on tiles of rows,
# keeping only x; Triton GEMMs, for SiLU only.
_LIGER = {
    "liger": {"silu": ("swiglu", "LigerSwiGLUMLP"), "gelu_pytorch_tanh": ("geglu", "LigerGEGLUMLP")},
    "liger-tiled": {
        "silu": ("tiled_mlp", "LigerTiledSwiGLUMLP"),
        "gelu_pytorch_tanh": ("tiled_mlp", "LigerTiledGEGLUMLP"),
    },
    "liger-gemm": {"silu": ("mlp", "LigerMLP")},
}


def _liger(name: str) -> Callable[[GatedMLP], Forward]:
    def make(mlp: GatedMLP) -> Forward:
        module, kind = _LIGER[name][mlp.config.hidden_act]
        with torch.device("meta"):
            made = getattr(importlib.import_module(f"liger_kernel.transformers.{module}"), kind)(mlp.config)
        for part, projection in mlp.named_children():
            setattr(made, part, projection)
        return lambda x: made(x[None])[0]  # Liger's GEMMs need a batch dimension

    return make


def _quack(recompute: bool) -> Callable[[GatedMLP], Forward]:
    """QuACK interleaves the rows of gate and up in one weight."""

    def make(mlp: GatedMLP) -> Forward:
        from quack.mlp import mlp_func

        weights = [mlp.gate_proj.weight.detach(), mlp.up_proj.weight.detach()]
        packed = mlp.packed = nn.Parameter(torch.stack(weights, dim=1).flatten(0, 1))
        activation = {"silu": "swiglu", "gelu_pytorch_tanh": "geglu"}[mlp.config.hidden_act]
        return lambda x: mlp_func(x, packed, mlp.down_proj.weight, activation=activation, recompute=recompute)

    return make


def makers(fused_mlp) -> dict[str, Callable[[GatedMLP], Forward]]:
    """Makes the providers, the most important first: the time limit may drop the last ones."""

    def ours(memory: str) -> Callable[[GatedMLP], Forward]:
        def make(mlp: GatedMLP) -> Forward:
            weights = [part.weight for part in mlp.children()]
            return lambda x: fused_mlp.gated_mlp(x, *weights, activation=mlp.config.hidden_act, memory=memory)

        return make

    return {
        "eager": lambda mlp: mlp,
        "ours": ours("activations"),
        "ours-recompute": ours("recompute"),
        "ours-sm90": ours("activations"),
        "ours-sm90-recompute": ours("recompute"),
        "liger": _liger("liger"),
        "liger-tiled": _liger("liger-tiled"),
        "checkpoint": lambda mlp: lambda x: checkpoint(mlp, x, use_reentrant=False, preserve_rng_state=False),
        "compile": torch.compile,
        "ours-compiled": lambda mlp: torch.compile(ours("activations")(mlp)),
        "quack": _quack(recompute=False),
        "quack-recompute": _quack(recompute=True),
        "liger-gemm": _liger("liger-gemm"),
    }


PROVIDERS = ("gemms", *makers(None))
DEFAULT = tuple(name for name in PROVIDERS if "sm90" not in name)  # sm90's are forced, for comparison
AUTOTUNED = ("liger-gemm",)  # may take minutes at a new shape
ON_HOPPER = torch.cuda.is_available() and gemm_kernels.runs_on("sm90", torch.cuda.get_device_capability())


def kernels_of(name: str, fused_mlp) -> contextlib.AbstractContextManager:
    """Selects the kernels for a provider's step: all of Hopper's for training, or those that are chosen."""
    return gemm_kernels.forced(fused_mlp, "sm90") if "sm90" in name else contextlib.nullcontext()


def unavailable(name: str, activation: str) -> str | None:
    """The reason why a provider cannot run here, or None."""
    if "sm90" in name and not ON_HOPPER:
        return "it is for Hopper GPUs"
    package = {"liger": "liger_kernel", "quack": "quack"}.get(name.split("-")[0])
    if package is None:
        return None
    if importlib.util.find_spec(package) is None:
        return f"{package} is not installed"
    if activation not in _LIGER.get(name, ACTIVATIONS):
        return f"it does not know {activation}"
    return None if torch.cuda.is_available() else "it is for GPUs"


def six_gemms(mlp: GatedMLP, x: Tensor) -> Callable[[], object]:
    """The products of a forward and a backward, gate and up as one: an MLP's time if all else were free."""
    gate, up, down = (part.weight.detach() for part in mlp.children())
    packed, x = torch.cat([gate, up]), x.detach()
    hidden = torch.randn(len(x), len(gate), dtype=x.dtype, device=x.device)
    both, grad = torch.cat([hidden, hidden], 1), torch.randn_like(x)

    def run() -> None:
        F.linear(x, packed), F.linear(hidden, down)
        grad @ down, grad.t() @ hidden, both @ packed, both.t() @ x

    return run
