"""A gated MLP with FP8 weights and torch's GEMMs: blocks of 128 x 128, as in transformers' FP8Linear, or per-row
scales.

Compiled functions round x and the hidden values to FP8, in groups of 128 or by row; the second also applies the
activation. Gate and up are one GEMM. CPUs have no such GEMMs, so weights are decoded there.
"""

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


def activated(gate_up: Tensor, group: int) -> tuple[Tensor, Tensor]:
    gate, up = gate_up.float().chunk(2, -1)
    return rounded(F.silu(gate) * up, group)


class GatedMLP(nn.Module):
    def __init__(self, width: int, hidden: int, block: tuple[int, int] | None) -> None:
        super().__init__()
        self.block = block
        for name, out, of in (("gate_up", 2 * hidden, width), ("down", width, hidden)):
            rows, columns = block or (1, of)
            tiles = torch.randn(out // rows, rows, of // columns, columns) * of**-0.5
            scales = tiles.abs().amax((1, 3)) / LARGEST
            values = (tiles / scales[:, None, :, None]).view(out, of).to(torch.float8_e4m3fn)
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
        found = []
        for values, scales in self.parts():
            rows, columns = self.block or (1, values.shape[1])
            wide = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
            found.append((values.float() * wide).to(dtype))
        return found

    def operands(self) -> tuple:
        """The weights in the op's form."""
        weights, layouts = [], []
        for values, scales in self.parts():
            weights += [values, scales, None, None, None]
            layouts += [*values.shape, *(self.block or (1, values.shape[1])), 0]
        return weights, layouts, [0.0] * 3
