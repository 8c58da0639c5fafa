"""Providers of a gated MLP with adapters. Each is a function of x; all use the operands of one MLP."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from points import DEVICE
from torch import Tensor

SCALING = 2.0


@dataclass(frozen=True)
class Adapters:
    """The dtype and dropout of a case's adapters, which decide how they are computed."""

    dtype: torch.dtype = torch.bfloat16
    dropout: float = 0.0

    def __str__(self) -> str:
        name = "bf16" if self.dtype is torch.bfloat16 else "float32 in autocast"
        return name + (f", dropout {self.dropout}" if self.dropout else "")

    @property
    def autocast(self) -> torch.dtype | None:
        return torch.bfloat16 if self.dtype is torch.float32 else None

    def context(self) -> contextlib.AbstractContextManager:
        return torch.autocast(DEVICE, self.autocast, enabled=self.autocast is not None)


class GatedMLP:
    """Frozen weights, adapters and a batch. `forwards` returns the ways to compute the MLP, functions of x."""

    def __init__(self, shape: tuple[int, int, int, int], adapters: Adapters, fused_mlp) -> None:
        rows, width, hidden, rank = shape
        torch.manual_seed(0)

        def random(*sizes: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return (scale * torch.randn(sizes, device=DEVICE)).to(dtype)

        self.dropout, self.fused_mlp = adapters.dropout, fused_mlp
        self.x, self.grad = random(rows, width), random(rows, width)
        sizes = ((hidden, width), (hidden, width), (width, hidden))
        self.weights = [random(*size, scale=size[1] ** -0.5) for size in sizes]
        small = partial(random, dtype=adapters.dtype)
        self.adapters = [
            (small(rank, size[1], scale=size[1] ** -0.5), small(size[0], rank, scale=0.5 * rank**-0.5))
            for size in sizes
        ]
        self.leaves = [self.x, *(tensor for pair in self.adapters for tensor in pair)]

    def forwards(self) -> dict[str, Callable[[Tensor], Tensor]]:
        made = [self.fused_mlp.Adapter(a, b, SCALING, dropout=self.dropout) for a, b in self.adapters]
        named = dict(zip(("gate_adapter", "up_adapter", "down_adapter"), made, strict=True))

        def ours(memory: str, given: dict) -> Callable[[Tensor], Tensor]:
            return lambda x: self.fused_mlp.gated_mlp(x, *self.weights, activation="silu", memory=memory, **given)

        return {
            "eager": self.by_formula,
            "compile": torch.compile(self.by_formula),
            "ours": ours("activations", named),
            "ours-recompute": ours("recompute", named),
            "ours-base": ours("activations", {}),
            "unsloth": self.by_unsloth,
        }

    def by_formula(self, x: Tensor) -> Tensor:
        hidden = F.silu(self.layer(0, x)) * self.layer(1, x)
        return self.layer(2, hidden)

    def by_unsloth(self, x: Tensor) -> Tensor:
        """Unsloth's node. By default it writes the gradient of x over x, which these turns use again."""
        from unsloth.kernels.fast_lora import LoRA_MLP
        from unsloth.kernels.swiglu import swiglu_DWf_DW_dfg_kernel, swiglu_fg_kernel

        given = zip(self.weights, self.adapters, strict=True)
        operands = [each for weight, (a, b) in given for each in (weight, None, a, b, SCALING)]
        dropout = 3 * (self.dropout,) if self.dropout else None
        return LoRA_MLP.apply(x[None], *operands, swiglu_fg_kernel, swiglu_DWf_DW_dfg_kernel, False, dropout)[0]

    def layer(self, place: int, x: Tensor) -> Tensor:
        """PEFT's formula; the result has the dtype of the base's product."""
        (a, b), result = self.adapters[place], F.linear(x, self.weights[place])
        given = x.to(a.dtype)
        given = F.dropout(given, self.dropout) if self.dropout else given
        return (result + F.linear(F.linear(given, a), b) * SCALING).to(result.dtype)

    def gemms(self, backward: bool) -> Callable[[], object]:
        """Only the products of the base, gate and up as one, without gradients of the frozen weights."""
        gate, up, down = self.weights
        packed, x, grad = torch.cat([gate, up]), self.x.detach(), self.grad
        hidden = torch.randn(len(x), len(gate), dtype=x.dtype, device=DEVICE)
        both = torch.cat([hidden, hidden], 1)

        def run() -> None:
            F.linear(x, packed), F.linear(hidden, down)
            if backward:
                grad @ down, both @ packed

        return run
