"""Layers for ``kernels.kernelize``: pure modules whose forward takes the place of an existing class's.

They own no weights: ``self`` is the adopted module, and each reads that module's own projections and activation. The
``...Layout`` companions are the same modules standing alone, built from a model's config.
"""

from __future__ import annotations

from typing import Callable

import torch
from torch import nn

from . import forwards, functional
from .activations import activation_of, get_activation


class GatedMLP(nn.Module):
    """``down_proj(act_fn(gate_proj(x)) * up_proj(x))``: the MLP of Llama, Gemma, Qwen, Mistral and their kin.

    x ``[..., in]`` -> ``[..., out]``. An ``act_fn`` that the package does not know is called as it is.
    """

    has_backward = True
    can_torch_compile = True

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module
    act_fn: Callable[[torch.Tensor], torch.Tensor]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        act = self.act_fn
        return forwards.gated(x, self.gate_proj, self.up_proj, self.down_proj, activation_of(act), act)


class GeGLUMLP(nn.Module):
    """:class:`GatedMLP` whose activation is tanh-GELU where the adopted module has no ``act_fn`` to say otherwise."""

    has_backward = True
    can_torch_compile = True

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        act = getattr(self, "act_fn", None)
        activation = get_activation("gelu_pytorch_tanh") if act is None else activation_of(act)
        return forwards.gated(x, self.gate_proj, self.up_proj, self.down_proj, activation, act)


class SwiGLUMLP(nn.Module):
    """:class:`GatedMLP` whose activation is SiLU where the adopted module has no ``act_fn`` to say otherwise."""

    has_backward = True
    can_torch_compile = True

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        act = getattr(self, "act_fn", None)
        activation = get_activation("silu") if act is None else activation_of(act)
        return forwards.gated(x, self.gate_proj, self.up_proj, self.down_proj, activation, act)


class PackedGatedMLP(nn.Module):
    """``down_proj(activation_fn(gate) * up)``, ``gate, up = gate_up_proj(x).chunk(2, -1)``: the MLP of Phi-3 and GLM.

    hidden_states ``[..., in]`` -> ``[..., out]``.
    """

    has_backward = True
    can_torch_compile = True

    gate_up_proj: nn.Module
    down_proj: nn.Module
    activation_fn: Callable[[torch.Tensor], torch.Tensor]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        act = self.activation_fn
        return forwards.packed_gated(hidden_states, self.gate_up_proj, self.down_proj, activation_of(act), act)


class MLP(nn.Module):
    """``fc2(activation_fn(fc1(x)))``: the MLP of CLIP, SigLIP, Whisper-like encoders and their kin.

    hidden_states ``[..., in]`` -> ``[..., out]``. Other spellings of the parts: ``fuse_mlps``.
    """

    has_backward = True
    can_torch_compile = True

    fc1: nn.Module
    fc2: nn.Module
    activation_fn: Callable[[torch.Tensor], torch.Tensor]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        act = self.activation_fn
        return forwards.plain(hidden_states, self.fc1, self.fc2, activation_of(act), act)


class Intermediate(nn.Module):
    """``intermediate_act_fn(dense(x))``: the first half of the MLP of BERT, RoBERTa, ViT and their kin.

    hidden_states ``[..., in]`` -> ``[..., hidden]``.
    """

    has_backward = True
    can_torch_compile = True

    dense: nn.Module
    intermediate_act_fn: Callable[[torch.Tensor], torch.Tensor]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        act = self.intermediate_act_fn
        return forwards.linear(hidden_states, self.dense, activation_of(act), act)


class Linear(nn.Module):
    """``x weight^T + bias``, for ``torch.nn.Linear``: input ``[..., in]`` -> ``[..., out]``."""

    has_backward = True
    can_torch_compile = True

    weight: torch.Tensor

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return functional.linear(input, self.weight, self.bias)


class GeluAndMul(nn.Module):
    """``gelu(gate) * up`` (erf form) of a packed ``x = [gate, up]``: ``[..., 2 d]`` -> ``[..., d]``."""

    has_backward = True
    can_torch_compile = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.act_and_mul(*x.chunk(2, dim=-1), "gelu")


class GeluTanhAndMul(nn.Module):
    """``gelu(gate) * up`` (tanh form) of a packed ``x = [gate, up]``: ``[..., 2 d]`` -> ``[..., d]``."""

    has_backward = True
    can_torch_compile = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.act_and_mul(*x.chunk(2, dim=-1), "gelu_pytorch_tanh")


class SiluAndMul(nn.Module):
    """``silu(gate) * up`` of a packed ``x = [gate, up]``: ``[..., 2 d]`` -> ``[..., d]``."""

    has_backward = True
    can_torch_compile = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.act_and_mul(*x.chunk(2, dim=-1), "silu")


class GeGLUMLPLayout(nn.Module):
    """A :class:`GeGLUMLP` that stands alone, from a config with ``hidden_size`` and ``intermediate_size``.

    ``mlp_bias`` of the config, where there is one, says whether the projections have biases.
    """

    def __init__(self, config) -> None:
        super().__init__()
        bias = getattr(config, "mlp_bias", False)
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=bias)

    forward = GeGLUMLP.forward


class SwiGLUMLPLayout(GeGLUMLPLayout):
    """A :class:`SwiGLUMLP` that stands alone; see :class:`GeGLUMLPLayout`."""

    forward = SwiGLUMLP.forward


__all__ = [
    "MLP",
    "GatedMLP",
    "GeGLUMLP",
    "GeGLUMLPLayout",
    "GeluAndMul",
    "GeluTanhAndMul",
    "Intermediate",
    "Linear",
    "PackedGatedMLP",
    "SiluAndMul",
    "SwiGLUMLP",
    "SwiGLUMLPLayout",
]
