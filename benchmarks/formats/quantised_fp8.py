"""Gated MLPs with FP8 weights: by torch's GEMMs, and by the layers of transformers and torchao.

With torch's GEMMs, weights have scales for blocks of 128 x 128 or for rows. Compiled functions round x and the hidden
values to FP8, in groups of 128 or by row; the second also applies the activation. Gate and up are one GEMM. CPUs have
no such GEMMs, so weights are decoded there.

The products of transformers' FP8Linear are Triton kernels from the Hub (DeepGEMM is switched off). Those of its
CompressedTensorsFP8Linear and of torchao's Float8Tensor are torch's. All three round x in each layer.
"""

import importlib
import os

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Makes sizes constants of the compiled code: a benchmark patches torch._dynamo.config with it.
COMPILED = {"automatic_dynamic_shapes": False, "recompile_limit": 64}
LARGEST = torch.finfo(torch.float8_e4m3fn).max


def rounded(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Values in FP8, and the scales of groups of columns, [rows, groups]."""
    groups = x.float().unflatten(-1, (-1, group))
    scales = groups.abs().amax(-1, keepdim=True).clamp(min=1e-12) / LARGEST
    return (groups / scales).to(torch.float8_e4m3fn).flatten(-2), scales.squeeze(-1)


def in_fp8(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """A weight [n, k] in FP8, and the scales of its blocks."""
    (out, of), (rows, columns) = weight.shape, block
    tiles = weight.view(out // rows, rows, of // columns, columns)
    scales = tiles.abs().amax((1, 3)) / LARGEST
    return (tiles / scales[:, None, :, None]).view(out, of).to(torch.float8_e4m3fn), scales


def decoded(values: Tensor, scales: Tensor, block: tuple[int, int] | None, dtype: torch.dtype) -> Tensor:
    rows, columns = block or (1, values.shape[1])
    return (values.float() * scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)).to(dtype)


def operands_of(parts: list[tuple[Tensor, Tensor]], block: tuple[int, int] | None, fast: int = 0) -> tuple:
    """Weights in the op's form."""
    weights, layouts = [], []
    for values, scales in parts:
        weights += [values, scales, None, None, None]
        layouts += [*values.shape, *(block or (1, values.shape[1])), fast]
    return weights, layouts, [0.0] * 3


def activated(gate_up: Tensor, group: int) -> tuple[Tensor, Tensor]:
    gate, up = gate_up.float().chunk(2, -1)
    return rounded(F.silu(gate) * up, group)


class LayersMLP(nn.Module):
    """A gated MLP of one kind of layer: "linear", "compressed" or "torchao"."""

    def __init__(self, width: int, hidden: int, kind: str) -> None:
        super().__init__()
        os.environ["TRANSFORMERS_DISABLE_DEEPGEMM_LINEAR"] = "1"
        self.block, self.fast = ((128, 128), 0) if kind == "linear" else (None, 2 if kind == "torchao" else 0)
        for name, of, out in (("gate", width, hidden), ("up", width, hidden), ("down", hidden, width)):
            plain = nn.Linear(of, out, bias=False, dtype=torch.bfloat16)
            self.add_module(name, getattr(self, f"_{kind}")(plain))

    def _linear(self, plain: nn.Linear) -> nn.Module:
        kind = importlib.import_module("transformers.integrations.finegrained_fp8").FP8Linear
        return self._filled(kind(plain.in_features, plain.out_features, self.block), plain, "weight_scale_inv")

    def _compressed(self, plain: nn.Linear) -> nn.Module:
        home = importlib.import_module("transformers.integrations.compressed_tensors")
        made = home.CompressedTensorsFP8Linear(plain.in_features, plain.out_features)
        return self._filled(made, plain, "weight_scale")

    def _torchao(self, plain: nn.Linear) -> nn.Module:
        torchao = importlib.import_module("torchao.quantization")
        config = torchao.Float8DynamicActivationFloat8WeightConfig(granularity=torchao.PerRow())
        torchao.quantize_(plain, config)
        return plain

    def _filled(self, layer: nn.Module, plain: nn.Linear, scales: str) -> nn.Module:
        values, of_values = in_fp8(plain.weight.detach().float(), self.block or (1, plain.in_features))
        of_values = of_values if self.block else of_values.t().contiguous()
        for name, tensor in (("weight", values), (scales, of_values)):
            setattr(layer, name, nn.Parameter(tensor, requires_grad=False))
        return layer

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))

    def parts(self) -> list[tuple[Tensor, Tensor]]:
        """Values and scales of gate, up and down."""
        found = []
        for layer in (self.gate, self.up, self.down):
            weight = layer.weight
            scales = getattr(layer, "weight_scale_inv", getattr(layer, "weight_scale", None))
            found.append((weight.qdata, weight.scale) if scales is None else (weight.detach(), scales.detach()))
        return found

    def decoded(self, dtype: torch.dtype) -> list[Tensor]:
        return [
            decoded(values, scales.view(-1, 1) if self.block is None else scales, self.block, dtype)
            for values, scales in self.parts()
        ]

    def operands(self) -> tuple:
        return operands_of(self.parts(), self.block, self.fast)


class GatedMLP(nn.Module):
    def __init__(self, width: int, hidden: int, block: tuple[int, int] | None) -> None:
        super().__init__()
        self.block = block
        for name, out, of in (("gate_up", 2 * hidden, width), ("down", width, hidden)):
            values, scales = in_fp8(torch.randn(out, of) * of**-0.5, block or (1, of))
            self.register_buffer(name, values)
            self.register_buffer(f"{name}_scales", scales)
        if torch.get_default_device().type == "cuda":
            self.round, self.activate = map(torch.compile, (rounded, activated))

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_cuda:
            gate, up, down = self.decoded(x.dtype)
            return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
        torch._dynamo.maybe_mark_dynamic(x, 0)  # one compilation for all numbers of rows
        hidden = self.product(*self.round(x, self.group(x.shape[-1])), self.gate_up, self.gate_up_scales)
        torch._dynamo.maybe_mark_dynamic(hidden, 0)
        given = self.activate(hidden, self.group(hidden.shape[-1] // 2))
        return self.product(*given, self.down, self.down_scales)

    def group(self, width: int) -> int:
        return self.block[1] if self.block else width

    def product(self, x: Tensor, scales: Tensor, weight: Tensor, of_weight: Tensor) -> Tensor:
        if self.block is None:
            return torch._scaled_mm(
                x, weight.t(), scale_a=scales, scale_b=of_weight.t(), out_dtype=torch.bfloat16, use_fast_accum=True
            )
        kinds = F.ScalingType
        scales = scales.t().contiguous().as_strided(scales.shape, (1, scales.shape[0]))
        given = (scales, kinds.BlockWise1x128, of_weight.t(), kinds.BlockWise128x128)
        return F.scaled_mm(x, weight.t(), *given, output_dtype=torch.bfloat16)

    def parts(self) -> list[tuple[Tensor, Tensor]]:
        """Values and scales of gate, up and down."""
        pairs = zip(self.gate_up.chunk(2), self.gate_up_scales.chunk(2), strict=True)
        return [*pairs, (self.down, self.down_scales)]

    def decoded(self, dtype: torch.dtype) -> list[Tensor]:
        return [decoded(values, scales, self.block, dtype) for values, scales in self.parts()]

    def operands(self) -> tuple:
        return operands_of(self.parts(), self.block)
