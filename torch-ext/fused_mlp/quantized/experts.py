"""Frozen quantised expert weights: FP8 and MXFP4 stacks that kernels read packed, or that are decoded first.

Sources: Micikevicius et al., "FP8 Formats for Deep Learning", arXiv:2209.05433; Rouhani et al., "Microscaling Data
Formats for Deep Learning", arXiv:2310.10537.
"""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Tuple, Union

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .. import adapters, calls, dispatch, operands
from ..autograd import training
from ..backends import native, plans
from ..experts import NO_ADAPTERS, Adapters, Form, counted
from ..operands import OperandTypeError, OperandValueError, shape_of
from .weights import are_counts, check_parts

FORMATS = ("fp8", "mxfp4")
_MX_BLOCK = 32
# Values of MXFP4 by code: a sign, two exponent bits and one mantissa bit.
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = (*_MAGNITUDES, *(-value for value in _MAGNITUDES))

# Largest average number of rows per expert at which few-row kernels read the codes. With more rows, weights are decoded
# first unless many-row kernels take them (measured on an H200, as is _MOST_MANY_ROWS).
MOST_ROWS: Dict[str, int] = {"fp8": 64, "mxfp4": 80}
# Largest number at which the few-row kernels run; Hopper's many-row kernels take more. For FP8 those round x to FP8.
MOST_FEW_ROWS: Dict[str, int] = {"fp8": 3, "mxfp4": 24}
# Hopper's kernels decode MXFP4 again for each tile of rows; with more rows per expert, decoding it once is faster.
_MOST_MANY_ROWS = 768


class QuantizedStack(NamedTuple):
    """A quantised weight ``[experts, out, in]`` that ``experts_mlp`` accepts instead of a tensor. It has no gradient.

    For format ``"fp8"``, ``data`` is float8_e4m3fn ``[experts, out, in]``. ``scales`` is float32, with one element for
    each block of ``block = (rows, columns)`` values: ``[experts, ceil(out / rows), ceil(in / columns)]``.

    On Hopper GPUs, calls with more than 3 rows per expert, on average, may also round x and the hidden values to
    float8_e4m3fn, scaling each 128 columns of a row by their largest value; ``explain`` says if they do.

    For format ``"mxfp4"``, ``data`` is uint8 ``[experts, out, in / 2]``, or any shape with the same elements. Each
    element holds two e2m1 codes, the first in its lower bits. ``scales`` is uint8 ``[experts, out, in / 32]``: a scale
    ``s`` multiplies 32 values by ``2 ** (s - 127)``, and 255 stands for NaN. ``block`` is ``(1, 32)``. Kernels that
    read the codes are exact for scales from ``2 ** -100`` to ``2 ** 33``; they treat larger ones as infinite.

    ``data`` and ``scales`` are contiguous.
    """

    data: Tensor
    scales: Tensor
    shape: Tuple[int, int, int]
    format: str = "fp8"
    block: Tuple[int, int] = (128, 128)

    @classmethod
    def from_fp8(cls, weight: Tensor, scales: Tensor, block: Tuple[int, int] = (128, 128)) -> QuantizedStack:
        """Return a stack of float8_e4m3fn values ``[experts, out, in]`` that shares the memory of both arguments."""
        _check_tensors(weight, scales, "weight must be a tensor [experts, out, in]", 3)
        block = tuple(block) if isinstance(block, list) else block
        return cls(weight.detach(), scales.detach(), tuple(weight.shape), "fp8", block)

    @classmethod
    def from_mxfp4(cls, blocks: Tensor, scales: Tensor) -> QuantizedStack:
        """Return the stack of a gpt-oss checkpoint, sharing the memory of both arguments: ``blocks`` is uint8
        ``[experts, out, in / 32, 16]``, and ``scales`` uint8 ``[experts, out, in / 32]``."""
        _check_tensors(blocks, scales, "blocks must be a tensor [experts, out, in / 32, 16]", 4)
        experts, out, count = blocks.shape[:3]
        return cls(blocks.detach(), scales.detach(), (experts, out, count * _MX_BLOCK), "mxfp4", (1, _MX_BLOCK))

    @property
    def device(self) -> torch.device:
        return self.data.device

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weights ``[experts, out, in]``: value times scale in float32, rounded to ``dtype`` once."""
        _check_stack(self.data, "weight", self)
        if calls.pointwise_reason(self.data) is None and self.data.is_cuda and native.DEVICE_TYPE == "cuda":
            like = self.data.new_empty((), dtype=dtype)
            if dispatch.is_native("decoded_experts", like):
                return native.decoded_experts(self.data, self.scales, layout_of(self), dtype)
        return _decoded(self, dtype)


AnyStack = Union[Tensor, QuantizedStack]


def is_any(*weights: AnyStack) -> bool:
    """True if at least one of the weights is a quantised stack."""
    return any(type(weight) is QuantizedStack for weight in weights)


def layout_of(weight: QuantizedStack) -> List[int]:
    """Return the sizes and the block of a stack, as the ops take them."""
    return [*weight.shape, *weight.block]


def words_of(weight: QuantizedStack) -> str:
    """Return the format of a stack in words, for reports."""
    return "mxfp4" if weight.format == "mxfp4" else f"fp8 (blocks of {weight.block[0]} x {weight.block[1]})"


def run(given: Tuple[Any, ...], form: Form, given_adapters: Adapters = NO_ADAPTERS) -> Tensor:
    """Run ``experts_mlp`` with at least one quantised weight. The operands are checked here."""
    check(given, form, given_adapters)
    x = given[0]
    flat = tuple(tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() != 2 else tensor for tensor in given[:3])
    result = computed((*flat, *given[3:]), form, given_adapters)
    return result if x.dim() == 2 else result.reshape(*x.shape[:-1], result.shape[-1])


def check(given: Tuple[Any, ...], form: Form, given_adapters: Adapters = NO_ADAPTERS) -> None:
    """Raise OperandTypeError or OperandValueError for invalid operands."""
    x, index, weights, gate_up, down, *biases = given
    if form.transposed:
        raise OperandValueError("transposed must be False for quantised weights, which are [experts, out, in]")
    stand_ins = []
    for name, weight in (("gate_up_weight", gate_up), ("down_weight", down)):
        if is_any(weight) and isinstance(x, Tensor):
            _check_stack(x, name, weight)
            weight = torch.empty((), dtype=x.dtype, device=weight.device).expand(weight.shape)
        stand_ins.append(weight)
    for name, bias in zip(("gate_up_bias", "down_bias"), biases):
        if isinstance(x, Tensor) and bias is not None:
            operands.check_like(x, name, bias, may_be_wide=True)
    in_dtype = [bias.to(x.dtype) if isinstance(bias, Tensor) and bias.dtype != x.dtype else bias for bias in biases]
    operands.check_experts_mlp(x, index, weights, *stand_ins, *in_dtype, *form[1:])
    if given_adapters != NO_ADAPTERS:
        adapters.check_of_experts(x, False, given_adapters, stand_ins)


def computed(given: Tuple[Any, ...], form: Form, given_adapters: Adapters = NO_ADAPTERS) -> Tensor:
    """Return the result for checked operands, with x ``[tokens, in]``.

    Autograd keeps no decoded weight: the backward decodes it again.
    """
    if given_adapters == NO_ADAPTERS and refusal(given, form) is None:
        return dispatch.op_or_parts(_by_op, (given, form), lambda: _composed(given, form))
    tensors = [part for each in given[3:] if each is not None for part in (each[:1] if is_any(each) else (each,))]
    factors = [factor for adapter in given_adapters if adapter is not None for factor in adapter[:2]]
    seen = training.is_transformed() and not torch.compiler.is_compiling()
    if calls.autograd_follows(given[0], given[2], *tensors, *factors) and not seen:
        return checkpoint(_composed, given, form, given_adapters, use_reentrant=False, preserve_rng_state=False)
    return _composed(given, form, given_adapters)


def _by_op(given: Tuple[Any, ...], form: Form) -> Tensor:
    x, index, weights, gate_up, down, *biases = given
    layouts = [*layout_of(gate_up), *layout_of(down)]
    stored = (gate_up.data, gate_up.scales, down.data, down.scales)
    activation, gated, interleaved, _, limit, up_offset = form
    return native.quantized_experts(
        *(x, index, weights, *stored, layouts, *biases, activation, gated, interleaved, limit, up_offset),
        _has_many_rows(given, form),
    )


def _has_many_rows(given: Tuple[Any, ...], form: Form) -> bool:
    """True if a call has many rows and Hopper's kernels take it. For FP8 those also round the rows to FP8."""
    x, index, _, gate_up, down, *biases = given
    if gate_up.format != down.format or not native.is_hopper(x):
        return False
    if index.numel() <= MOST_FEW_ROWS[gate_up.format] * gate_up.shape[0]:
        return False
    if gate_up.format == "mxfp4":
        return index.numel() <= _MOST_MANY_ROWS * gate_up.shape[0]
    if any(bias is not None for bias in biases):
        return False
    if form.interleaved or form.limit is not None or form.up_offset != 0:
        return False
    return all(_has_large_blocks(each, parts) for each, parts in ((gate_up, 2 if form.gated else 1), (down, 1)))


def _has_large_blocks(weight: QuantizedStack, parts: int) -> bool:
    _, out, width = weight.shape
    rows, columns = weight.block
    whole = rows >= out or (rows % 128 == 0 and out // parts % rows == 0)
    return whole and (columns >= width or columns % 128 == 0)


def _composed(given: Tuple[Any, ...], form: Form, given_adapters: Adapters = NO_ADAPTERS) -> Tensor:
    """Decode the weights and run the unquantised experts. On a CPU, only the chosen experts are decoded."""
    x, index, weights, *stacks = given
    dtype = torch.get_autocast_dtype(x.device.type) if operands.autocasts(x) else x.dtype
    if x.is_cpu and given_adapters == NO_ADAPTERS and calls.pointwise_reason(index) is None and not _is_traced():
        index = counted(index)
        chosen = torch.unique(index[(index >= 0) & (index < stacks[0].shape[0])])
        chosen = chosen if chosen.numel() > 0 else index.new_zeros(1)  # at least one expert is required
        places = torch.full((stacks[0].shape[0] + 1,), chosen.numel(), dtype=torch.int64)
        places[chosen.long()] = torch.arange(chosen.numel())
        named = torch.where((index >= 0) & (index < stacks[0].shape[0]), index, stacks[0].shape[0])
        index = places[named.long()]
        stacks = [each if each is None else _of_experts(each, chosen.long()) for each in stacks]
    decoded = [each.dequantize(dtype) if is_any(each) else each for each in stacks]
    decoded = [each if each is None or each.dtype == x.dtype else each.to(x.dtype) for each in decoded]
    if given_adapters == NO_ADAPTERS:
        return calls.experts_mlp(x, index, weights, *decoded, form)
    return calls.adapted_experts(x, index, weights, *decoded, form, adapters=given_adapters)


def _is_traced() -> bool:
    """True if shapes must not depend on values."""
    return torch.compiler.is_compiling() or bool(torch._C._len_torch_dispatch_stack()) or training.is_transformed()


def _of_experts(stack: AnyStack, chosen: Tensor) -> AnyStack:
    if not is_any(stack):
        return stack.index_select(0, chosen)
    bits = stack.data.view(torch.uint8).reshape(stack.shape[0], -1).index_select(0, chosen)
    scales = stack.scales.reshape(stack.shape[0], -1).index_select(0, chosen)
    shape = (chosen.numel(), *stack.shape[1:])
    return stack._replace(data=bits.view(stack.data.dtype), scales=scales, shape=shape)


def _decoded(weight: QuantizedStack, dtype: torch.dtype) -> Tensor:
    experts, out, width = weight.shape
    rows, columns = weight.block
    if weight.format == "fp8":
        values = weight.data.view(experts, out, width).float()
        of_rows, of_columns = (torch.arange(size, device=weight.device) for size in (out, width))
        grid = weight.scales.view(experts, -(-out // rows), -(-width // columns))
        wide = grid.index_select(1, of_rows // rows).index_select(2, of_columns // columns)
        return (values * wide).to(dtype)
    codes = weight.data.view(experts, out, -1)
    codes = torch.stack((codes & 15, codes >> 4), dim=-1).view(experts, out, -1, columns)
    values = torch.tensor(_VALUES, device=weight.device)[codes.int()]
    exponents = weight.scales.view(experts, out, -1).int()
    bits = torch.where(exponents == 0, 0x00400000, torch.where(exponents == 255, 0x7FC00000, exponents << 23))
    return (values * bits.int().view(torch.float32).unsqueeze(-1)).view(experts, out, width).to(dtype)


def refusal(given: Tuple[Any, ...], form: Form) -> Optional[str]:
    """Return why no kernel reads the codes in a call on checked operands; None if one does."""
    x, index, weights, gate_up, down, *biases = given
    if not (is_any(gate_up) and is_any(down)):
        return "only one of the weights is quantised"
    tensors = (gate_up.data, gate_up.scales, down.data, down.scales, *biases)
    reason = calls.pointwise_reason(x, index, weights, *tensors)
    if reason is not None:
        return reason
    if calls.autograd_follows(x, weights, *biases):
        return "autograd records the separate operations"
    if operands.autocasts(x) and torch.get_autocast_dtype(x.device.type) != x.dtype:
        return f"autocast casts the operands to {torch.get_autocast_dtype(x.device.type)}"
    if native.DEVICE_TYPE != "cuda" or dispatch.select("experts_mlp", x) is not native or not native.has_experts(x):
        return f"no kernel for {x.device.type}" if not x.is_cuda else "no kernel for this GPU"
    if x.dtype != torch.bfloat16:
        return f"no kernel for {x.dtype}"
    experts = gate_up.shape[0]
    if index.numel() == 0 or index.numel() >= native._MOST_SLOTS or experts > native._MOST_EXPERTS:
        return plans.REFUSALS["empty" if index.numel() == 0 else "many_experts"]
    if gate_up.format != down.format:
        return "weights in two formats"
    if index.numel() > MOST_ROWS[gate_up.format] * experts and not _has_many_rows(given, form):
        return f"{index.numel() // experts} rows per expert"
    hidden = down.shape[2]
    if hidden % 64 or x.shape[-1] % 64 or down.shape[1] % 8 or hidden == 0 or down.shape[1] == 0:
        return "inputs that are not a multiple of 64, or outputs that are not a multiple of 8"
    return _of_stack(gate_up) or _of_stack(down)


def _of_stack(weight: QuantizedStack) -> Optional[str]:
    _, out, width = weight.shape
    columns = weight.block[1]
    if weight.format == "fp8" and columns < width and (columns % 64 or columns & (columns - 1)):
        return f"blocks of {columns} columns"
    if out * width >= native._MOST_ROWS or weight.scales.numel() >= native._MOST_ROWS:
        return plans.REFUSALS["too_large"]
    if not torch.compiler.is_compiling() and (weight.data.data_ptr() % 16 or weight.scales.data_ptr() % 4):
        return "codes that are not aligned to 16 bytes"
    return None


def explained(given: Tuple[Any, ...], form: Form, given_adapters: Adapters) -> Tuple[str, str, Tuple[plans.Part, ...]]:
    """Return the backend of a call, the reason in words, and its parts."""
    check(given, form, given_adapters)
    x, index, weights = (each if each.dim() == 2 else each.reshape(-1, each.shape[-1]) for each in given[:3])
    found = [each for each in given[3:5] if is_any(each)]
    formats = " and ".join(dict.fromkeys(map(words_of, found)))
    reason = "the call has adapters" if given_adapters != NO_ADAPTERS else None
    reason = reason or refusal((x, index, weights, *given[3:]), form)
    if reason is not None:
        return "torch", f"weights in {formats} are decoded first: {reason}", ()
    many_rows = _has_many_rows((x, index, weights, *given[3:]), form)
    is_fp8 = given[3].format == "fp8"
    parts = native.plan_quantized_experts(x, index.shape[-1], given[3].shape[0], is_fp8, many_rows)
    return native.DEVICE_TYPE, f"one op; {formats}: {plans.in_words(parts)}", parts


def _check_tensors(weight: Any, scales: Any, wanted: str, dims: int) -> None:
    if not isinstance(weight, Tensor) or weight.dim() != dims:
        raise OperandTypeError(f"{wanted}, got {shape_of(weight)}")
    if not isinstance(scales, Tensor):
        raise OperandTypeError(f"scales must be a tensor, got {type(scales).__name__}")


def _check_stack(x: Tensor, name: str, weight: QuantizedStack) -> None:
    if weight.format not in FORMATS:
        raise OperandValueError(f"{name}.format must be one of {', '.join(FORMATS)}, got {weight.format!r}")
    shape, block = weight.shape, weight.block
    if not are_counts(shape, 3, 0) or not are_counts(block, 2, 1):
        raise OperandValueError(
            f"{name}.shape must be [experts, out, in], and {name}.block a pair of rows and columns, got "
            f"{shape!r}, block = {block!r}"
        )
    experts, out, width = shape
    is_mx = weight.format == "mxfp4"
    if is_mx and (block != (1, _MX_BLOCK) or width % _MX_BLOCK):
        raise OperandValueError(
            f"{name} in mxfp4 must have in a multiple of {_MX_BLOCK} and block = (1, {_MX_BLOCK}), got in = {width}, "
            f"block = {block}"
        )
    blocks = experts * -(-out // block[0]) * -(-width // block[1])
    count = experts * out * width
    wanted = {
        "data": (torch.uint8, count // 2) if is_mx else (torch.float8_e4m3fn, count),
        "scales": (torch.uint8 if is_mx else torch.float32, blocks),
    }
    check_parts(x, name, weight, wanted)
