"""Frozen quantised weights: four-bit NF4 and FP4 as bitsandbytes stores them, FP8, int8 and int4.

Sources: Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", arXiv:2305.14314; Micikevicius et al., "FP8
Formats for Deep Learning", arXiv:2209.05433.
"""

from __future__ import annotations

import functools
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .. import calls, dispatch
from ..activations import get_activation
from ..autograd import training
from ..backends import native, reference
from ..operands import OperandTypeError, OperandValueError, check_number, shape_of

# Values of the four-bit formats by code. NF4 values are quantiles of a normal distribution; FP4 has a sign, two
# exponent bits and one mantissa bit.
_POSITIVE_FP4 = (0.0, 0.0052083333, 0.6666666667, 1.0, 0.3333333333, 0.5, 0.1666666667, 0.25)
CODES: Dict[str, Tuple[float, ...]] = {
    "nf4": (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
    "fp4": (*_POSITIVE_FP4, *(-value for value in _POSITIVE_FP4)),
}
TILES = "int4_tiles"
# Formats with blocks of rows and columns, and the dtype of their data.
BLOCKED = {"fp8": torch.float8_e4m3fn, "int8": torch.int8, "int4": torch.uint8, TILES: torch.int32}
FORMATS = (*CODES, *BLOCKED)


class QuantizedWeight(NamedTuple):
    """A quantised weight ``[out, in]`` that functions accept instead of a tensor. It has no gradient.

    For format ``"fp8"``, ``data`` is float8_e4m3fn ``[out, in]``, contiguous. ``scales`` is float32, contiguous, with
    one element for each block of ``block = (rows, columns)`` values: ``[ceil(out / rows), ceil(in / columns)]``. On
    Hopper GPUs, products with more than 32 rows of x (64 for a small weight) also round x to float8_e4m3fn, scaling
    each 128 columns of a row by their largest value; ``explain`` says if they do. If the weight has a scale per row,
    products of bfloat16 with more than 128 rows are torch's ``_scaled_mm`` of rows scaled by their largest value;
    ``fast`` is its ``use_fast_accum``. In a model, ``fast`` is None if the layer's own product does not round x.

    Format ``"int8"`` is the same with int8 ``data``, and x is not rounded. The scales are divided by ``divisor``, which
    is 127 if they are the largest values of their blocks.

    Format ``"int4"`` is the same with uint8 ``data`` ``[out, in / 2]``. Each element holds two values, the first in its
    lower bits, with the zero point of the block added. The zero point, 0 to 16, is stored in the last five bits of the
    scale and is not part of the scale. Few-row kernels support blocks of one row whose column count is 64 times a power
    of two.

    For format ``"int4_tiles"``, ``data`` is int32 ``[out / 8, in / 128, 32, 4]``, as torch's ``_weight_int4pack_mm``
    takes it. ``scales`` is bfloat16 ``[groups, out, 2]``, pairs of scale and zero: a value is
    ``(code - 8) * scale + zero``. Both sizes are rounded up to whole tiles. On Hopper, kernels for few rows of bfloat16
    support groups of 64 columns times a power of two; in other cases the weight is decoded first.

    For formats ``"nf4"`` and ``"fp4"``, ``data`` is uint8, contiguous, of any shape. Each element holds two codes, in
    row-major order, the first in its upper bits. A value is the code's entry in a table of 16, times the scale of its
    block; a block is ``block`` consecutive values, which may span rows. ``scales`` is float32 ``[blocks]``. If the
    scales are ``nested`` they are uint8, and the scale of block ``i`` is
    ``nested_code[scales[i]] * nested_scales[i // nested_block] + offset``; ``nested_code`` is float32 ``[256]``, and
    ``nested_scales`` float32 ``[ceil(blocks / nested_block)]``.
    """

    data: Tensor
    scales: Tensor
    shape: Tuple[int, int]
    format: str = "nf4"
    block: Union[int, Tuple[int, int]] = 64
    nested_scales: Optional[Tensor] = None
    nested_code: Optional[Tensor] = None
    nested_block: int = 256
    offset: float = 0.0
    divisor: int = 1
    fast: Optional[bool] = None

    @classmethod
    def from_bitsandbytes(cls, weight: Tensor) -> QuantizedWeight:
        """Return the weight of a ``Params4bit``, or of an ``Int8Params`` that has its scales, sharing its memory.

        Raises TypeError for another type, and ValueError for a weight that is not quantised yet or was repacked for a
        CPU. After its first call, a layer holds the scales of its ``Int8Params`` itself; use ``from_int8(weight,
        layer.state.SCB, divisor=127)``.
        """
        if type(weight).__name__ == "Int8Params":
            data, scales = getattr(weight, "CB", None), getattr(weight, "SCB", None)
            if data is None or scales is None:
                raise OperandValueError(
                    "weight must have CB and SCB, got one without: not quantised yet, or moved into the layer's"
                )
            return cls.from_int8(data, scales, divisor=_LARGEST)
        state = getattr(weight, "quant_state", None)
        if type(weight).__name__ != "Params4bit":
            raise OperandTypeError(f"weight must be a bitsandbytes.nn.Params4bit, got {type(weight).__name__}")
        if state is None or getattr(state, "packing_format_for_cpu", False):
            said = "one that is not quantised yet" if state is None else "one repacked for a CPU"
            raise OperandValueError(f"weight must be in the layout in which bitsandbytes quantises it, got {said}")
        return of_state(weight, state, float(state.offset) if state.nested else 0.0)

    @classmethod
    def from_fp8(cls, weight: Tensor, scales: Tensor, block: Tuple[int, int] = (128, 128)) -> QuantizedWeight:
        """Return the weight of float8_e4m3fn values ``[out, in]``, sharing the memory of both arguments.

        ``scales`` is float32: ``[ceil(out / rows), ceil(in / columns)]`` for blocks of ``block = (rows, columns)``
        values; ``[out, 1]`` or ``[out]`` for per-row scales, or one element for a per-tensor scale, whatever ``block``
        is.
        """
        shape = _shape_of("weight", weight)
        return cls(weight.detach(), _detached(scales), shape, "fp8", _block_of(shape, scales, block))

    @classmethod
    def from_int8(
        cls, weight: Tensor, scales: Tensor, block: Tuple[int, int] = (128, 128), divisor: int = 1
    ) -> QuantizedWeight:
        """Return the weight of int8 values ``[out, in]``; arguments as in :meth:`from_fp8`, scales divided by
        ``divisor``.

        bitsandbytes' ``CB`` and ``SCB`` are values and scales with a divisor of 127; torchao's ``qdata`` and ``scale``
        have a divisor of 1.
        """
        shape = _shape_of("weight", weight)
        block = _block_of(shape, scales, block)
        return cls(weight.detach(), _detached(scales), shape, "int8", block, divisor=divisor)

    @classmethod
    def from_int4(cls, weight: Tensor, scales: Tensor, zeros: Union[int, Tensor] = 8) -> QuantizedWeight:
        """Return the weight of values 0 to 15 minus a zero point, in groups of a row, sharing the memory of ``weight``.

        ``weight`` is uint8 ``[out, in / 2]`` or int32 ``[out, in / 8]``, with the first value of an element in its
        lowest bits, as compressed-tensors packs them (``weight_packed``). ``scales`` is ``[out, groups]``. ``zeros`` is
        an integer from 0 to 16, or a tensor of such integers with the shape of the scales. Both are copied here, into
        float32 scales rounded to 19 bits, which represent 16-bit scales exactly.
        """
        out, columns = _shape_of("weight", weight)
        if weight.dtype not in (torch.uint8, torch.int32) or not weight.is_contiguous():
            raise OperandTypeError(
                f"weight must be a contiguous torch.uint8 or torch.int32 tensor, got {shape_of(weight)}"
            )
        groups = _shape_of("scales", scales)[1]
        width = columns * 2 * weight.element_size()
        if scales.shape[0] != out or groups == 0 or width % groups != 0:
            raise OperandValueError(
                f"scales must be [out, groups] with out = {out} and groups that divide in = {width}, "
                f"got {shape_of(scales)}"
            )
        if not scales.is_floating_point():
            raise OperandTypeError(f"scales must be a tensor of a floating dtype, got {scales.dtype}")
        if not isinstance(zeros, (int, Tensor)):
            raise OperandTypeError(f"zeros must be an integer or a tensor of integers, got {type(zeros).__name__}")
        zeros = torch.as_tensor(zeros, device=scales.device)
        if zeros.is_floating_point() or zeros.is_complex() or (zeros.dim() > 0 and zeros.shape != scales.shape):
            raise OperandValueError(
                f"zeros must be an integer or an integer tensor {list(scales.shape)}, got {shape_of(zeros)}"
            )
        if zeros.numel() > 0 and not bool(((zeros >= 0) & (zeros <= _MOST_ZERO)).all()):
            raise OperandValueError(f"zeros must be 0 to {_MOST_ZERO}, got {int(zeros.min())} to {int(zeros.max())}")
        bits = scales.detach().float().contiguous().view(torch.int32)
        bits = (bits + _ZERO_BITS // 2 & ~_ZERO_BITS) | zeros.int()
        data, block = weight.detach().view(torch.uint8), (1, max(1, width // groups))
        return cls(data, bits.view(torch.float32), (out, width), "int4", block)

    @classmethod
    def from_int4_tiles(
        cls, weight: Tensor, scales_and_zeros: Tensor, shape: Tuple[int, int], group: int
    ) -> QuantizedWeight:
        """Return the four-bit weight of ``shape`` ``[out, in]`` that torch's ``_weight_int4pack_mm`` takes.

        ``weight`` is int32 ``[out / 8, in / 128, 32, 4]`` and ``scales_and_zeros`` bfloat16 ``[groups, out, 2]``, both
        sizes rounded up to whole tiles; torchao's ``Int4TilePackedTo4dTensor`` calls them ``qdata`` and
        ``scale_and_zero``. Their memory is shared. ``group`` columns of a row, a multiple of 32, share a scale, and
        ``in`` must be a multiple of 8. Raises :class:`OperandTypeError` if ``weight`` has another shape; other invalid
        values raise when the weight is used.
        """
        if not isinstance(weight, Tensor) or weight.dim() != 4 or weight.shape[2:] != (32, 4):
            raise OperandTypeError(f"weight must be a tensor [out / 8, in / 128, 32, 4], got {shape_of(weight)}")
        return cls(weight.detach(), _detached(scales_and_zeros), tuple(shape), TILES, (1, group))

    @classmethod
    def from_gptq(
        cls,
        qweight: Tensor,
        qzeros: Tensor,
        scales: Tensor,
        g_idx: Optional[Tensor] = None,
        checkpoint_format: str = "gptq",
    ) -> QuantizedWeight:
        """Return the four-bit weight of a layer in a GPTQ checkpoint, as a copy.

        ``qweight`` is int32 ``[in / 8, out]``, ``qzeros`` int32 ``[groups, out / 8]``, ``scales`` ``[groups, out]``.
        ``checkpoint_format`` is that of the quantisation config: ``"gptq"``, which stores zero points minus one, or
        ``"gptq_v2"``. Raises ValueError if the groups of ``g_idx``, ``[in]``, are not adjacent (act-order).
        """
        _check_words(qweight, qzeros, scales, "[in / 8, out]")
        if checkpoint_format not in ("gptq", "gptq_v2"):
            raise OperandValueError(f"checkpoint_format must be gptq or gptq_v2, got {checkpoint_format!r}")
        width, groups = qweight.shape[0] * 8, scales.shape[0]
        if g_idx is not None and not isinstance(g_idx, Tensor):
            raise OperandTypeError(f"g_idx must be a tensor [in] or None, got {type(g_idx).__name__}")
        if g_idx is not None and not torch.equal(g_idx.int(), _groups(width, groups, g_idx)):
            raise OperandValueError("g_idx must have contiguous groups, got those of an act-order checkpoint")
        zeros = _values_of(qzeros, range(8)) + (1 if checkpoint_format == "gptq" else 0)
        return cls.from_int4(qweight.detach().t().contiguous(), scales.t(), zeros.t())

    @classmethod
    def from_awq(cls, qweight: Tensor, qzeros: Tensor, scales: Tensor) -> QuantizedWeight:
        """Return the four-bit weight of a layer in an AWQ checkpoint (version ``gemm``), as a copy.

        ``qweight`` is int32 ``[in, out / 8]``, ``qzeros`` int32 ``[groups, out / 8]``, ``scales`` ``[groups, out]``.
        """
        _check_words(qweight, qzeros, scales, "[in, out / 8]")
        if qweight.shape[0] % 2 != 0:
            raise OperandValueError(f"qweight must be [in, out / 8] with an even in, got {shape_of(qweight)}")
        values = _values_of(qweight, _AWQ_ORDER).t()
        data = values[:, ::2] | values[:, 1::2] << 4
        return cls.from_int4(data.contiguous(), scales.t(), _values_of(qzeros, _AWQ_ORDER).t())

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def is_cpu(self) -> bool:
        return self.data.is_cpu

    def numel(self) -> int:
        return self.shape[0] * self.shape[1]

    def dim(self) -> int:
        return 2

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight as a tensor ``[out, in]``: code times scale in float32, rounded to ``dtype`` once."""
        try:
            given = operands_of(self)
            like = self.data.new_empty((), dtype=dtype)
            by_op = calls.pointwise_reason(self.data) is None and dispatch.is_native("quantized_decode", like)
            return (native if by_op else reference).quantized_decode(*given, dtype)
        except Exception:
            _check(self.data, "weight", self)  # names what is wrong
            raise


AnyWeight = Union[Tensor, QuantizedWeight]
_LARGEST = 127  # largest int8 value in bitsandbytes
_ZERO_BITS, _MOST_ZERO = 31, 16  # the last five bits of an int4 scale, and the largest zero point there
_TILE = 8, 128  # rows and columns of a tile of int4_tiles
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # positions within a word of the values of adjacent columns


def _check_words(qweight: Tensor, qzeros: Tensor, scales: Tensor, shape: str) -> None:
    """Check dtypes and shapes of the tensors of a GPTQ or AWQ checkpoint; ``shape`` is that of ``qweight``."""
    for name, tensor, axes in (("qweight", qweight, shape), ("qzeros", qzeros, "[groups, out / 8]")):
        if not isinstance(tensor, Tensor) or tensor.dtype != torch.int32 or tensor.dim() != 2:
            raise OperandTypeError(f"{name} must be a torch.int32 tensor {axes}, got {shape_of(tensor)}")
    out = qweight.shape[1] * (8 if shape.endswith("out / 8]") else 1)
    groups, columns = _shape_of("scales", scales)
    if (groups, columns) != (qzeros.shape[0], out) or qzeros.shape[1] * 8 != out:
        raise OperandValueError(
            f"scales must be [groups, out], and qzeros [groups, out / 8], with out = {out} as in a qweight of four "
            f"bits, got {shape_of(scales)} and {shape_of(qzeros)}"
        )


def _values_of(words: Tensor, order: Iterable[int]) -> Tensor:
    """Unpack words of eight values to uint8 ``[rows, 8 words]``; ``order`` gives their positions within a word."""
    values = [(words >> 4 * place & 15).to(torch.uint8) for place in order]
    return torch.stack(values, dim=-1).flatten(1)


def _groups(width: int, count: int, like: Tensor) -> Tensor:
    """Return the group of each column, with ``count`` groups of equally many adjacent columns."""
    return torch.arange(width, dtype=torch.int32, device=like.device) // max(1, width // max(1, count))


def _shape_of(name: str, tensor: Any) -> Tuple[int, int]:
    if not isinstance(tensor, Tensor) or tensor.dim() != 2:
        raise OperandTypeError(f"{name} must be a tensor [out, in], got {shape_of(tensor)}")
    return tuple(tensor.shape)


def _detached(scales: Any) -> Tensor:
    if not isinstance(scales, Tensor):
        raise OperandTypeError(f"scales must be a tensor, got {type(scales).__name__}")
    return scales.detach()


def _block_of(shape: Tuple[int, int], scales: Tensor, block: Tuple[int, int]) -> Tuple[int, int]:
    """Derive the block from the shape of the scales: one per row, one for all, or ``block`` as given."""
    out, width = shape
    if isinstance(scales, Tensor) and tuple(scales.shape) in ((out, 1), (out,)):
        return 1, max(1, width)
    if isinstance(scales, Tensor) and scales.numel() == 1:
        return max(1, out), max(1, width)
    return tuple(block) if isinstance(block, list) else block


def of_state(weight: Tensor, state: Any, offset: float) -> QuantizedWeight:
    """Return the weight of a ``Params4bit`` with this ``QuantState`` and a known offset."""
    with torch._C.DisableTorchFunctionSubclass():  # return a plain tensor, not the weight's subclass
        data = weight.detach()
        data = data if data.dtype is torch.uint8 else data.view(torch.uint8)
    nested = (state.state2.absmax, state.state2.code, state.state2.blocksize) if state.nested else (None, None, 256)
    return QuantizedWeight(data, state.absmax, tuple(state.shape), state.quant_type, state.blocksize, *nested, offset)


def held(weight: Any, offset: Optional[float]) -> Optional[QuantizedWeight]:
    """Return the weight of a ``Params4bit`` with this offset; None if ``offset`` is None."""
    return None if offset is None else of_state(weight, weight.quant_state, offset)


def operands_of(weight: QuantizedWeight) -> Tuple[List[Optional[Tensor]], List[int], float]:
    """Return the operands of the ops: tensors, layout and offset."""
    if weight.format in BLOCKED:
        divisor = weight.divisor if weight.format == "int8" else 2 if weight.fast else 0  # kFastSums in packed.h
        if weight.format == TILES:
            divisor = weight.data.shape[1] * _TILE[1]  # the columns, with padding
        return [weight.data, weight.scales, None, None, None], [*weight.shape, *weight.block, divisor], 0.0
    layout = [*weight.shape, 1, weight.block, 0 if weight.nested_scales is None else weight.nested_block]
    code = code_of(weight.format, weight.device)
    return [weight.data, weight.scales, code, weight.nested_scales, weight.nested_code], layout, weight.offset


def code_of(format: str, device: torch.device) -> Tensor:
    """Return the values of a four-bit format, float32 ``[16]``."""
    is_seen = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack()
    return (_made_code if is_seen else _cached_code)(format, device)


def _made_code(format: str, device: torch.device) -> Tensor:
    return torch.tensor(CODES[format], dtype=torch.float32, device=device)


_cached_code = functools.lru_cache(maxsize=64)(_made_code)


def is_any(*weights: AnyWeight) -> bool:
    """True if at least one of the weights is quantised."""
    for weight in weights:  # noqa: SIM110 (a generator costs more than the loop)
        if type(weight) is QuantizedWeight:
            return True
    return False


def are_blocked(*weights: AnyWeight) -> bool:
    """True if all weights have a format with blocks of rows and columns (FP8, integers), and there is at least one."""
    return bool(weights) and all(type(each) is QuantizedWeight and each.format in BLOCKED for each in weights)


def words_of(weights: Iterable[Optional[QuantizedWeight]]) -> str:
    """Return the formats of weights in words, for reports."""
    return " and ".join(dict.fromkeys(_words_of(each) for each in weights if each is not None))


def _words_of(weight: QuantizedWeight) -> str:
    if weight.format not in BLOCKED:
        return f"{weight.format} (blocks of {weight.block})"
    (rows, columns), (out, width) = weight.block, weight.shape
    if columns < width or 1 < rows < out:
        return f"{weight.format} (blocks of {rows} x {columns})"
    return f"{weight.format} (one scale per {'row' if rows == 1 else 'tensor'})"


def stand_ins(x: Tensor, /, **weights: AnyWeight) -> List[Tensor]:
    """Return the weights in the order of the keywords, with a tensor of the same shape for each quantised one.

    The checks of functions run on these. Raises OperandTypeError or OperandValueError for an invalid quantised weight.
    """
    return [_stand_in(x, name, weight) if is_any(weight) else weight for name, weight in weights.items()]


def _stand_in(x: Tensor, name: str, weight: QuantizedWeight) -> AnyWeight:
    if not isinstance(x, Tensor):  # the function's own check reports it
        return weight
    _check(x, name, weight)
    return shape_alone(weight, x.dtype)


def shape_alone(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """Return a tensor with the shape of a weight and no storage of its own, for code that reads no values."""
    return torch.empty((), dtype=dtype, device=weight.device).expand(weight.shape)


def _check(x: Tensor, name: str, weight: QuantizedWeight) -> None:
    if weight.format not in FORMATS:
        raise OperandValueError(f"{name}.format must be one of {', '.join(FORMATS)}, got {weight.format!r}")
    if weight.format in BLOCKED:
        _check_blocked(x, name, weight)
        return
    shape, blocks = weight.shape, (weight.block, weight.nested_block)
    if not are_counts(shape, 2, 0) or not are_counts(blocks, 2, 1):
        raise OperandValueError(
            f"{name}.shape must be [out, in], and both block sizes positive, got {shape}, "
            f"block = {weight.block!r} and nested_block = {weight.nested_block!r}"
        )
    check_number(f"{name}.offset", weight.offset)
    is_nested, blocks = weight.nested_scales is not None, -(-weight.numel() // weight.block)
    if is_nested != (weight.nested_code is not None):
        raise OperandValueError(f"{name} must have both nested_scales and nested_code, or neither")
    wanted = {
        "data": (torch.uint8, (weight.numel() + 1) // 2),
        "scales": (torch.uint8 if is_nested else torch.float32, blocks),
        "nested_scales": (torch.float32, -(-blocks // weight.nested_block)),
        "nested_code": (torch.float32, 256),
    }
    check_parts(x, name, weight, dict(list(wanted.items())[: 4 if is_nested else 2]))


def are_counts(numbers: Any, count: int, least: int) -> bool:
    """True for a tuple or list of ``count`` integers, each at least ``least``."""
    is_list = isinstance(numbers, (tuple, list)) and len(numbers) == count
    return is_list and all(isinstance(each, (int, torch.SymInt)) and each >= least for each in numbers)


def _check_blocked(x: Tensor, name: str, weight: QuantizedWeight) -> None:
    shape, block = weight.shape, weight.block
    if not are_counts(shape, 2, 0) or not are_counts(block, 2, 1):
        raise OperandValueError(
            f"{name}.shape must be [out, in], and {name}.block a pair of rows and columns, got {shape}, "
            f"block = {block!r}"
        )
    if not (weight.nested_scales is None and weight.nested_code is None):
        raise OperandValueError(f"{name} must have neither nested_scales nor nested_code in {weight.format}")
    if not are_counts((weight.divisor,), 1, 1) or (weight.format == "int4" and shape[1] % 2 != 0):
        raise OperandValueError(
            f"{name}.divisor must be positive, and in even for int4, got {weight.divisor!r} and {list(shape)}"
        )
    if weight.format == TILES:
        _check_tiles(x, name, weight)
        return
    blocks = -(-shape[0] // block[0]) * -(-shape[1] // block[1])
    count = weight.numel() // 2 if weight.format == "int4" else weight.numel()
    wanted = {"data": (BLOCKED[weight.format], count), "scales": (torch.float32, blocks)}
    check_parts(x, name, weight, wanted)


def _check_tiles(x: Tensor, name: str, weight: QuantizedWeight) -> None:
    (out, width), (rows, group) = weight.shape, weight.block
    if rows != 1 or group % 32 != 0 or width % 8 != 0:
        raise OperandValueError(
            f"{name}.block must be 1 row and a multiple of 32 columns, and those of the weight a multiple of 8, "
            f"got {rows} x {group} of {[out, width]}"
        )
    data = weight.data
    of_tiles = -(-out // _TILE[0]), data.shape[1] if isinstance(data, Tensor) and data.dim() == 4 else 0
    columns = of_tiles[1] * _TILE[1]
    if columns < width or columns % group != 0:
        raise OperandValueError(
            f"{name}.data must be [out / 8, in / 128, 32, 4] to fit {[out, width]} in whole groups of {group}, "
            f"got {shape_of(data)}"
        )
    wanted = {
        "data": (torch.int32, of_tiles[0] * of_tiles[1] * 128),
        "scales": (torch.bfloat16, columns // group * of_tiles[0] * _TILE[0] * 2),
    }
    check_parts(x, name, weight, wanted)


def fits_tiles(weight: QuantizedWeight) -> bool:
    """True if the op supports a weight of int4 in tiles."""
    try:
        _check_tiles(weight.data, "weight", weight)
    except (OperandTypeError, OperandValueError):
        return False
    return weight.data.data_ptr() % 16 == 0 and weight.scales.data_ptr() % 4 == 0


def check_parts(x: Tensor, name: str, weight: Any, wanted: Dict[str, Tuple[torch.dtype, int]]) -> None:
    """Check each tensor of a weight or stack: dtype, number of elements, device and contiguity."""
    for part, (dtype, count) in wanted.items():
        tensor = getattr(weight, part)
        if not isinstance(tensor, Tensor) or tensor.dtype != dtype:
            got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise OperandTypeError(f"{name}.{part} must be a tensor of {dtype}, got {got}")
        if tensor.device != x.device:
            raise OperandValueError(f"{name}.{part} must be on the device of x, {x.device}, got {tensor.device}")
        if tensor.numel() != count or not tensor.is_contiguous():
            shape, block = tuple(weight.shape), weight.block
            axes = "[out, in]" if len(shape) == 2 else "[experts, out, in]"
            words = " x ".join(map(str, block)) if isinstance(block, tuple) else str(block)
            strided = "" if tensor.is_contiguous() else f" with strides {list(tensor.stride())}"
            raise OperandValueError(
                f"{name}.{part} must be contiguous with {count} elements to fit {axes} = {list(shape)} in blocks of "
                f"{words}, got {shape_of(tensor)}{strided}"
            )


def halves(both: QuantizedWeight, up_first: bool) -> Optional[Tuple[QuantizedWeight, QuantizedWeight]]:
    """Return the gate half and the up half of a packed weight; None if a block spans the middle."""
    if both.format in BLOCKED:
        return _halves_blocked(both, up_first)
    features, width = both.shape[0] // 2, both.shape[1]
    count = features * width
    blocks, is_nested = count // both.block, both.nested_scales is not None
    if count % (2 * both.block) != 0 or both.shape[0] % 2 != 0 or (is_nested and blocks % both.nested_block != 0):
        return None
    nested_scales = both.nested_scales.chunk(2) if is_nested else (None, None)
    first, second = (
        both._replace(data=data, scales=scales, shape=(features, width), nested_scales=nested)
        for data, scales, nested in zip(both.data.view(-1).chunk(2), both.scales.view(-1).chunk(2), nested_scales)
    )
    return (second, first) if up_first else (first, second)


def _halves_blocked(both: QuantizedWeight, up_first: bool) -> Optional[Tuple[QuantizedWeight, QuantizedWeight]]:
    (out, width), (rows, columns) = both.shape, both.block
    if both.format == TILES:  # their scales lie along the outputs
        return None
    features, of_row = out // 2, -(-width // columns)
    if out % 2 != 0 or (rows < out and features % rows != 0):
        return None
    scales = both.scales.view(-1, of_row)
    parts = (scales, scales) if rows >= out else (scales[: features // rows], scales[features // rows :])
    data = both.data.view(out, -1).chunk(2)
    first, second = (both._replace(data=d, scales=s, shape=(features, width)) for d, s in zip(data, parts))
    return (second, first) if up_first else (first, second)


def run(x: Tensor, layers: Any, activation: int) -> Tensor:
    """Run layers (``adapters.Layers``) that are all quantised, without adapters or autograd, as one op."""
    weights, layouts, offsets, biases = lists_of(layers)
    gated = layers.up is not None
    linear, mlp = (native.quantized_linear, native.quantized_mlp) if torch.compiler.is_compiling() else _plain_ops
    if len(offsets) == 1:
        return linear(x, weights, layouts, *offsets, *biases, activation)
    return mlp(x, weights, layouts, offsets, biases, activation, gated)


def lists_of(layers: Sequence[Optional[Any]]) -> Tuple[List[Any], ...]:
    """Return the lists that the MLP op takes: operands of the weights, layouts, offsets, biases."""
    there = [layer for layer in layers if layer is not None]
    return (*operand_lists(layer.weight for layer in there), [layer.bias for layer in there])


def operand_lists(weights: Iterable[QuantizedWeight]) -> Tuple[List[Any], ...]:
    """Return the lists of weights alone: their operands, layouts and offsets."""
    lists: Tuple[List[Any], ...] = [], [], []
    for weight in weights:
        tensors, layout, offset = operands_of(weight)
        for each, values in zip(lists, (tensors, layout, [offset])):
            each.extend(values)
    return lists


# These skip OpOverload's Python overhead, in calls that are not traced.
_plain_ops = tuple(getattr(op, "_op", op) for op in (native.quantized_linear, native.quantized_mlp))


def product(x: Tensor, weight: QuantizedWeight, bias: Optional[Tensor]) -> Tensor:
    """Return ``x weight^T + bias`` by PyTorch's GEMM. Autograd keeps no decoded weight; the backward decodes again."""
    if calls.autograd_follows(x, bias) and not (training.is_transformed() and not torch.compiler.is_compiling()):
        return checkpoint(_product, x, weight, bias, use_reentrant=False, preserve_rng_state=False)
    return _product(x, weight, bias)


def _product(x: Tensor, weight: QuantizedWeight, bias: Optional[Tensor]) -> Tensor:
    x, bias = calls.autocast((x, bias))
    if calls.autograd_follows(x, bias) or not _is_one_op(x, bias):
        return F.linear(x, weight.dequantize(x.dtype), bias)
    return native.quantized_linear(x, *operands_of(weight), bias, _IDENTITY)


def _is_one_op(x: Tensor, bias: Optional[Tensor]) -> bool:
    is_seen = not torch.compiler.is_compiling() and training.is_followed()
    if is_seen or calls.pointwise_reason(x, bias) is not None or (bias is not None and bias.dtype != x.dtype):
        return False
    return dispatch.is_native("quantized_linear", x)


_IDENTITY = get_activation(None).code
