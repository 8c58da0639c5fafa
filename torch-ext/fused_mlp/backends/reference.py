"""The operations as a model written in PyTorch runs them: correct for every dtype, device and tensor subclass."""

from __future__ import annotations

from typing import Any, Callable, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import experts
from ..activations import BY_CODE
from ..operands import CENTRED_NORMS, NORMS_OF_ONE_MORE


def refusal(op: str, x: Tensor) -> Optional[str]:
    """Return None: this backend never refuses."""
    return None


def act_and_mul(gate: Tensor, up: Tensor, activation: int) -> Tensor:
    return BY_CODE[activation].function(gate) * up


def act_and_mul_backward(grad: Tensor, gate: Tensor, up: Tensor, activation: int) -> Tuple[Tensor, Tensor]:
    row = BY_CODE[activation]
    wide = torch.promote_types(gate.dtype, torch.float32)  # round once, at the end
    grad, gate, up, dtype = grad.to(wide), gate.to(wide), up.to(wide), gate.dtype
    return (grad * up * row.derivative(gate)).to(dtype), (grad * row.function(gate)).to(dtype)


def linear(x: Tensor, weight: Tensor, bias: Optional[Tensor], activation: int) -> Tensor:
    return BY_CODE[activation].function(F.linear(x, weight, bias))


def gated_linear(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    gate_bias: Optional[Tensor],
    up_bias: Optional[Tensor],
    activation: int,
) -> Tensor:
    return act_and_mul(F.linear(x, gate_weight, gate_bias), F.linear(x, up_weight, up_bias), activation)


def gated_mlp(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    gate_bias: Optional[Tensor],
    up_bias: Optional[Tensor],
    down_bias: Optional[Tensor],
    activation: int,
    first: Callable[..., Tensor] = gated_linear,
) -> Tensor:
    return F.linear(first(x, gate_weight, up_weight, gate_bias, up_bias, activation), down_weight, down_bias)


def packed_gated(
    x: Tensor,
    weight: Tensor,
    second_weight: Optional[Tensor],
    bias: Optional[Tensor],
    second_bias: Optional[Tensor],
    activation: int,
    up_first: bool,
    product: Callable[[Tensor, Tensor, int], Tensor] = act_and_mul,
) -> Tensor:
    """Run gate and up as one GEMM: faster than two, and no gradient has to be concatenated from its halves."""
    first, second = F.linear(x, weight, bias).chunk(2, dim=-1)
    hidden = product(*((second, first) if up_first else (first, second)), activation)
    return hidden if second_weight is None else F.linear(hidden, second_weight, second_bias)


def mlp(
    x: Tensor,
    fc1_weight: Tensor,
    fc2_weight: Tensor,
    fc1_bias: Optional[Tensor],
    fc2_bias: Optional[Tensor],
    activation: int,
    first: Callable[..., Tensor] = linear,
) -> Tensor:
    return F.linear(first(x, fc1_weight, fc1_bias, activation), fc2_weight, fc2_bias)


def experts_mlp(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    gate_up_bias: Optional[Tensor],
    down_bias: Optional[Tensor],
    *form: Any,
) -> Tensor:
    tensors = (x, top_k_index, top_k_weights, gate_up_weight, down_weight, gate_up_bias, down_bias)
    return experts.composed(*tensors, experts.Form(*form), act_and_mul)


def norm(x: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], eps: float, code: int, rounded: bool) -> Tensor:
    """Return a norm over the last dimension as modules write it, given its code in torch-ext/ops/norms/norm.h.

    It computes in float32 and casts the result to the dtype of ``x``. If ``rounded``, the normalised values are also
    cast before they are multiplied by the weight.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if code in CENTRED_NORMS:
        wide = wide - wide.mean(-1, keepdim=True)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if rounded:
        normed = normed.to(x.dtype)
    if weight is not None:
        normed = normed * (1.0 + weight.to(wide.dtype) if code in NORMS_OF_ONE_MORE else weight)
    if bias is not None:
        normed = normed + bias
    return normed.to(x.dtype)


_ZERO_BITS = 31  # bits of an int4 scale that hold the zero point


def _decoded_tiles(data: Tensor, scales: Tensor, out: int, width: int, group: int) -> Tensor:
    """Decode int4 from tensor-core tiles to a float32 tensor ``[out, width]``."""
    rows, columns = data.shape[0] * 8, data.shape[1] * 128
    codes = torch.stack([data >> 4 * place & 15 for place in range(8)], dim=-1)
    # Permute to row (tile, row in it), then column: tile, word, place in the word, lane, and which of two adjacent
    # columns.
    codes = codes.view(-1, data.shape[1], 8, 4, 4, 2, 4).permute(0, 2, 1, 4, 6, 3, 5).reshape(rows, columns)
    scale, zero = scales.double().permute(2, 1, 0).repeat_interleave(group, 2)
    return ((codes - 8) * scale + zero)[:out, :width].float()


def quantized_decode(
    weight: Sequence[Optional[Tensor]], layout: Sequence[int], offset: float, dtype: torch.dtype
) -> Tensor:
    """Decode a quantised weight to ``[out, in]``, given the operands of the compiled op (torch-ext/ops/quantized.h)."""
    data, scales, code, nested_scales, nested_code = weight
    out, width, block_rows, block, nested_block = layout
    if data.dtype is torch.int32:
        return _decoded_tiles(data, scales, out, width, block).to(dtype)
    if code is None:
        grid = scales.view(-(-out // block_rows), -(-width // block))
        wide = grid.repeat_interleave(block_rows, 0)[:out].repeat_interleave(block, 1)[:, :width]
        if data.dtype is torch.uint8:
            bits = wide.view(torch.int32)
            data = torch.stack((data & 15, data >> 4), dim=-1).view(out, width) - (bits & _ZERO_BITS)
            wide = (bits & ~_ZERO_BITS).view(torch.float32)
        wide = wide * (1 / nested_block) if data.dtype is torch.int8 else wide
        return (data.view(out, width).float() * wide).to(dtype)
    if nested_scales is not None:
        of_blocks = nested_scales.repeat_interleave(nested_block)[: scales.numel()]
        scales = F.embedding(scales.view(-1).int(), nested_code.view(-1, 1)).view(-1) * of_blocks + offset
    pairs = torch.stack((code.repeat_interleave(16), code.repeat(16)), dim=-1)
    values = F.embedding(data.view(-1).int(), pairs).view(-1)
    padded = F.pad(values[: out * width], (0, scales.numel() * block - out * width))
    decoded = padded.view(-1, block) * scales.view(-1, 1)
    return decoded.view(-1)[: out * width].view(out, width).to(dtype)
