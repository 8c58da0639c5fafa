"""Gated MLPs with integer weights, and other libraries' GEMMs for them.

`int8` is bitsandbytes' Linear8bitLt, which rounds x to int8. Its outlier threshold is 0, because with another it
synchronises with the GPU and cannot be captured in a CUDA graph. `int4` has groups of 128; torch's GEMM needs such
weights repacked by torchao. `int4-tiles` uses the repacked form, torchao's Int4TilePackedTo4dTensor, for both
providers.
"""

import bitsandbytes
import torch
import torch.nn.functional as F
from torch import Tensor, nn

GROUP = 128
SIZES = ("gate", "up", "down")


class Int8MLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        for name, sizes in zip(SIZES, ((width, hidden), (width, hidden), (hidden, width)), strict=True):
            self.add_module(
                name, bitsandbytes.nn.Linear8bitLt(*sizes, bias=False, has_fp16_weights=False, device="cpu")
            )

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))

    def parts(self) -> list[tuple[Tensor, Tensor]]:
        """Values and scales; the first call moves them."""
        layers = [getattr(self, name) for name in SIZES]
        holders = [layer.state if layer.weight.CB is None else layer.weight for layer in layers]
        return [(holder.CB, holder.SCB) for holder in holders]

    def decoded(self, dtype: torch.dtype) -> list[Tensor]:
        return [(values.float() * (scales[:, None] / 127)).to(dtype) for values, scales in self.parts()]

    def operands(self) -> tuple:
        """The weights in the op's form."""
        weights, layouts = [], []
        for values, scales in self.parts():
            weights += [values, scales, None, None, None]
            layouts += [*values.shape, 1, values.shape[1], 127]
        return weights, layouts, [0.0] * 3


class Int4MLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.shapes = ((hidden, width), (hidden, width), (width, hidden))
        for name, (out, of) in zip(SIZES, self.shapes, strict=True):
            self.register_buffer(name, torch.randint(256, (out, of // 2), dtype=torch.uint8))
            scales = (0.5 + torch.rand(out, of // GROUP)) * of**-0.5 / 4.6
            self.register_buffer(f"{name}_scales", scales.bfloat16().float())
            data = getattr(self, name)
            if torch.get_default_device().type == "cuda":  # on a GPU the first value is in the upper half
                packed = torch._convert_weight_to_int4pack(data % 16 * 16 + data // 16, 8)
            else:
                values = torch.stack((data % 16, data // 16), -1).view(out, of)
                packed = torch._convert_weight_to_int4pack_for_cpu(values.int(), 1)
            self.register_buffer(f"{name}_packed", packed)
            pairs = torch.stack((scales, torch.zeros_like(scales)), -1).transpose(0, 1)  # scales beside zeros
            self.register_buffer(f"{name}_pairs", pairs.contiguous().bfloat16())

    def product(self, x: Tensor, name: str) -> Tensor:
        packed, pairs = getattr(self, f"{name}_packed"), getattr(self, f"{name}_pairs")
        multiply = torch._weight_int4pack_mm if x.is_cuda else torch._weight_int4pack_mm_for_cpu
        return multiply(x, packed, GROUP, pairs)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(F.silu(self.product(x, "gate")) * self.product(x, "up"), "down")

    def decoded(self, dtype: torch.dtype) -> list[Tensor]:
        found = []
        for name, shape in zip(SIZES, self.shapes, strict=True):
            data, scales = getattr(self, name), getattr(self, f"{name}_scales")
            values = torch.stack((data % 16, data // 16), -1).view(shape).float() - 8
            found.append((values * scales.repeat_interleave(GROUP, 1)).to(dtype))
        return found

    def operands(self) -> tuple:
        weights, layouts = [], []
        for name, shape in zip(SIZES, self.shapes, strict=True):
            with_zeros = getattr(self, f"{name}_scales").view(torch.int32) | 8  # the last bits are the zero points
            weights += [getattr(self, name), with_zeros.view(torch.float32), None, None, None]
            layouts += [*shape, 1, GROUP, 0]
        return weights, layouts, [0.0] * 3


class Int4TilesMLP(Int4MLP):
    def operands(self) -> tuple:
        weights, layouts = [], []
        for name, shape in zip(SIZES, self.shapes, strict=True):
            weights += [getattr(self, f"{name}_packed"), getattr(self, f"{name}_pairs"), None, None, None]
            layouts += [*shape, 1, GROUP, shape[1]]
        return weights, layouts, [0.0] * 3
