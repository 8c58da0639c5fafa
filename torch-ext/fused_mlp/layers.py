"""Layers for ``kernels.kernelize``: stateless modules whose forward replaces that of an existing class.

They own no weights: ``self`` is the adopted module, and each forward reads its projections and activation.

The ``...Layout`` classes are standalone versions with weights, built from a model's config. If a ``KernelConfig`` asks
for them, transformers puts them in place of a model's MLPs and loads the checkpoint into them. Each shares the forward
of its layer, so it computes the same when it is not kernelized.
"""

from __future__ import annotations

from typing import Any, Callable, Optional, Tuple

import torch
from torch import nn

from . import functional
from .activations import get_activation
from .models.checkpoints import PackedWeights
from .models.experts import mixtures
from .models.parts import refusals
from .models.running import forwards, normed, plans, shortcut

_GATED = plans.made(forwards.GATED, ("gate_proj", "up_proj", "down_proj"), "act_fn")
_PACKED = plans.made(forwards.PACKED_GATED, ("gate_up_proj", "down_proj"), "activation_fn")
_PLAIN = plans.made(forwards.PLAIN, ("fc1", "fc2"), "activation_fn")
_LINEAR = plans.made(forwards.LINEAR, ("dense",), "intermediate_act_fn")
_OUTPUT = plans.made(forwards.LINEAR, ("dense",), 0, behind=("dropout",), last="LayerNorm")
_GATED_WITHOUT_ACT = plans.made(forwards.GATED, _GATED.projections, 0)


class _Layer(nn.Module):
    has_backward = True
    can_torch_compile = True


class GatedMLP(_Layer):
    """``down_proj(act_fn(gate_proj(x)) * up_proj(x))``: the MLP of Llama, Gemma, Qwen, Mistral and similar models.

    x ``[..., in]`` -> ``[..., out]``. An ``act_fn`` that the package does not know is called unchanged.
    """

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module
    act_fn: Callable[[torch.Tensor], torch.Tensor]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _fused(self, x, _GATED)


class GeGLUMLP(_Layer):
    """:class:`GatedMLP` that defaults to tanh-GELU if the adopted module has no ``act_fn``."""

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _fused(self, x, _GATED, default="gelu_pytorch_tanh")


class SwiGLUMLP(_Layer):
    """:class:`GatedMLP` that defaults to SiLU if the adopted module has no ``act_fn``."""

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _fused(self, x, _GATED, default="silu")


class PackedGatedMLP(_Layer):
    """``down_proj(activation_fn(gate) * up)``, ``gate, up = gate_up_proj(x).chunk(2, -1)``: the MLP of Phi-3 and GLM.

    hidden_states ``[..., in]`` -> ``[..., out]``.
    """

    gate_up_proj: nn.Module
    down_proj: nn.Module
    activation_fn: Callable[[torch.Tensor], torch.Tensor]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return _fused(self, hidden_states, _PACKED)


class MLP(_Layer):
    """``fc2(activation_fn(fc1(x)))``: the MLP of CLIP, SigLIP, Whisper-like encoders and similar models.

    hidden_states ``[..., in]`` -> ``[..., out]``. ``fuse_mlps`` handles other attribute names.
    """

    fc1: nn.Module
    fc2: nn.Module
    activation_fn: Callable[[torch.Tensor], torch.Tensor]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return _fused(self, hidden_states, _PLAIN)


class Intermediate(_Layer):
    """``intermediate_act_fn(dense(x))``: the first half of the MLP of BERT, RoBERTa, ViT and similar models.

    hidden_states ``[..., in]`` -> ``[..., hidden]``.
    """

    dense: nn.Module
    intermediate_act_fn: Callable[[torch.Tensor], torch.Tensor]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return _fused(self, hidden_states, _LINEAR)


class Output(_Layer):
    """``LayerNorm(dropout(dense(hidden_states)) + input_tensor)``: the second half of the MLP of BERT, RoBERTa and
    similar models, and the output of their attention.

    hidden_states ``[..., in]``, input_tensor ``[..., out]`` -> ``[..., out]``. Runs as one call if possible: a GEMM,
    and a kernel for the residual sum and the norm. The original modules are called if one of them has hooks, or if
    dropout is active on a CPU or without autograd.
    """

    dense: nn.Module
    dropout: nn.Module
    LayerNorm: nn.Module

    def forward(self, hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> torch.Tensor:
        try:
            if not shortcut.is_traced():  # the compiler fuses everything after the GEMM into one kernel
                found = shortcut.ending(_OUTPUT, self, hidden_states, input_tensor)
                if found is not None:
                    return found
            return self.LayerNorm(self.dropout(self.dense(hidden_states)) + input_tensor)
        except AttributeError as error:
            raise _alone(self, error) from None


class MegaBlocksMoeMLP(_Layer):
    """``experts(x, *router(x))``: the mixture of gpt-oss, under the name that transformers maps for it.

    hidden_states ``[..., in]`` -> ``[..., in]``, and the weights ``[tokens, k]`` that the router returned. Experts that
    are not recognised, or whose weights must not be read, are called unchanged.
    """

    router: nn.Module
    experts: nn.Module

    def forward(self, hidden_states: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        try:
            router, experts = self.router, self.experts
        except AttributeError as error:
            raise _alone(self, error) from None
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, weights, index = router(x)
        return mixtures.routed(experts, x, index, weights).reshape(hidden_states.shape), weights


class RMSNorm(_Layer):
    """``weight * (x * rsqrt(mean(x ** 2) + eps))``: the norm of Llama, Qwen, Mistral and similar models.

    hidden_states ``[..., features]`` -> ``[..., features]``. The source of the adopted module's class is analysed; if
    it does not compute this norm, the class's own forward runs.
    """

    weight: torch.Tensor

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        kind = type(self)
        if kind.forward is RMSNorm.forward:
            error = AttributeError(f"{kind.__name__!r} object has no attribute 'weight'")
            raise _alone(self, error)
        is_known = not shortcut.is_traced() and normed.takes(self)
        result = normed.called(self, hidden_states) if is_known else None
        return kind.forward(self, hidden_states) if result is None else result


class Linear(_Layer):
    """``x weight^T + bias``, for ``torch.nn.Linear``: input ``[..., in]`` -> ``[..., out]``."""

    weight: torch.Tensor

    forward = refusals.linear_forward


class GeluAndMul(_Layer):
    """``gelu(gate) * up`` (erf form) of a packed ``x = [gate, up]``: ``[..., 2 d]`` -> ``[..., d]``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.act_and_mul(*x.chunk(2, dim=-1), "gelu")


class GeluTanhAndMul(_Layer):
    """``gelu(gate) * up`` (tanh form) of a packed ``x = [gate, up]``: ``[..., 2 d]`` -> ``[..., d]``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.act_and_mul(*x.chunk(2, dim=-1), "gelu_pytorch_tanh")


class SiluAndMul(_Layer):
    """``silu(gate) * up`` of a packed ``x = [gate, up]``: ``[..., 2 d]`` -> ``[..., d]``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.act_and_mul(*x.chunk(2, dim=-1), "silu")


class GeLU(_Layer):
    """``gelu(input)``, erf form, for ``GELUActivation`` of transformers."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return get_activation("gelu").function(input)


class GeluTanh(_Layer):
    """``gelu(input)``, tanh form, for ``GELUTanh`` of transformers."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return get_activation("gelu_pytorch_tanh").function(input)


class NewGELU(_Layer):
    """``gelu(input)``, tanh form, for ``NewGELUActivation`` of transformers: one kernel in place of eight."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return get_activation("gelu_new").function(input)


class FastGELU(_Layer):
    """``gelu(input)``, tanh form, for ``FastGELUActivation`` of transformers: one kernel in place of eight."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return get_activation("gelu_fast").function(input)


class QuickGELU(_Layer):
    """``input * sigmoid(1.702 input)``, for ``QuickGELUActivation`` of transformers."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return get_activation("quick_gelu").function(input)


class SiLU(_Layer):
    """``silu(input)``, for ``SiLUActivation`` of transformers."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return get_activation("silu").function(input)


class GatedMLPLayout(nn.Module):
    """Standalone :class:`GatedMLP`, built from a config with ``hidden_size``, ``intermediate_size`` and the name of an
    activation: ``hidden_activation`` or ``hidden_act``.

    The config's ``mlp_bias``, if present, says whether the projections have biases. Raises ValueError if the config
    names no activation, or one that the package does not know.
    """

    default_activation: Optional[str] = None

    def __init__(self, config: Any) -> None:
        super().__init__()
        bias = getattr(config, "mlp_bias", False)
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=bias)
        self.act_fn = _activation_function(config, self.default_activation)

    forward = GatedMLP.forward


class GeGLUMLPLayout(GatedMLPLayout):
    """:class:`GatedMLPLayout` that defaults to tanh-GELU if the config names no activation."""

    default_activation = "gelu_pytorch_tanh"

    forward = GeGLUMLP.forward


class SwiGLUMLPLayout(GatedMLPLayout):
    """:class:`GatedMLPLayout` that defaults to SiLU if the config names no activation."""

    default_activation = "silu"

    forward = SwiGLUMLP.forward


class PackedGatedMLPLayout(nn.Module):
    """Standalone :class:`PackedGatedMLP`, built from the same config as :class:`GatedMLPLayout`.

    In place of an MLP with ``gate_proj`` and ``up_proj`` it loads that MLP's checkpoints, packing the two weights.
    """

    conversion_mapping = PackedWeights()

    def __init__(self, config: Any) -> None:
        super().__init__()
        bias = getattr(config, "mlp_bias", False)
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=bias)
        self.activation_fn = _activation_function(config)

    forward = PackedGatedMLP.forward


class MLPLayout(nn.Module):
    """Standalone :class:`MLP` with biases, built from the same config as :class:`GatedMLPLayout`."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)
        self.activation_fn = _activation_function(config)

    forward = MLP.forward


def _fused(module: nn.Module, x: torch.Tensor, plan: plans.Plan, default: Optional[str] = None) -> torch.Tensor:
    """Run the module's parts as one fused call; ``default`` names the activation if the module has none."""
    operands: Tuple[Any, ...] = ()
    try:
        # Looking up a child module is faster than reading an attribute of a module.
        if default is not None and module._modules.get(plan.act) is None and getattr(module, plan.act, None) is None:
            plan, operands = _GATED_WITHOUT_ACT, (get_activation(default).function,)
        found = shortcut.fused(plan, module, x, operands)
        if found is not None:
            return found
        projections, act = plans.part_of(module, (plan.projections, plan.act), operands)
    except AttributeError as error:
        alone = _alone(module, error)
        if alone is error:
            raise
        raise alone from None
    return forwards.called(plan.pattern, x, projections, act)


def _alone(module: nn.Module, error: AttributeError) -> AttributeError:
    """Return the error for a missing part; a class of this file that was never adopted gets an explanation."""
    name = type(module).__name__
    if type(module).__module__ != __name__ or name not in __all__:
        return error
    layout = f"{name}Layout"
    stands_alone = f"; layers.{layout}(config) creates its own" if layout in __all__ else ""
    return AttributeError(
        f"layers.{name} has no weights of its own: kernels.kernelize installs its forward in a module that has them"
        f"{stands_alone} ({error})"
    )


def _activation_function(config: Any, default: Optional[str] = None) -> Callable[[torch.Tensor], torch.Tensor]:
    name = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None) or default
    if name is None:
        raise ValueError(f"config must have hidden_act or hidden_activation, got {config!r}")
    return get_activation(name).function


__all__ = [
    "MLP",
    "FastGELU",
    "GatedMLP",
    "GatedMLPLayout",
    "GeGLUMLP",
    "GeGLUMLPLayout",
    "GeLU",
    "GeluAndMul",
    "GeluTanh",
    "GeluTanhAndMul",
    "Intermediate",
    "Linear",
    "MLPLayout",
    "MegaBlocksMoeMLP",
    "NewGELU",
    "Output",
    "PackedGatedMLP",
    "PackedGatedMLPLayout",
    "QuickGELU",
    "RMSNorm",
    "SiLU",
    "SiluAndMul",
    "SwiGLUMLP",
    "SwiGLUMLPLayout",
]
