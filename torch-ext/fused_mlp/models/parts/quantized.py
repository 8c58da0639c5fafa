"""Linear layers with quantised weights, as their modules hold them at a call: bitsandbytes' of four bits and of
int8, transformers' of FP8, torch's with torchao's weights of int8 and FP8.

Their class is known by name, and what it computes by its source, as PEFT's are (``adapters``). Weights may be quantised
when a module moves to a device, and may be decoded, replaced and moved again: each call reads what is there.
"""

from __future__ import annotations

import functools
import sys
import weakref
from types import FunctionType
from typing import Any, Dict, Iterable, Optional, Tuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ... import dispatch, quantized
from ...adapters import Layer
from ...backends import native
from ..reading.attributes import are_unchanged, of_call
from ..reading.source import codes_of, digest

_MODULE, _FP8_MODULE = "bitsandbytes.nn.modules", "transformers.integrations.finegrained_fp8"
_NAMES = {"Linear4bit", "LinearNF4", "LinearFP4"}
_METHODS = ("forward", "set_compute_type")
# Hashes of the source of these methods and of the functions that they call, each with the first version that has it.
_DIGESTS = {
    "ab7e0659037f6e16": "0.45",
    "79d4c72e4f00eba6": "0.47",
    "075e230958674e24": "0.48",
    "1af9dd492eedd1b0": "0.49",
    "16194b72eb85875b": "0.50",
}
# The same of the forward of FP8Linear, each with the first version that was read.
_FP8_DIGESTS = {"785a8136028dbb60": "5.22"}
_FP8_FUNCTIONS = ("_apply_if_grad", "fp8_linear", "finegrained_fp8_linear")
# The same of bitsandbytes' layer of int8, and of torchao's products, by the class of the weight.
_INT8, _INT8_METHODS = "Linear8bitLt", ("forward", "init_8bit_state")
_INT8_DIGESTS = {"02e0964f6b8f0fb3": "0.50"}
_TENSORS = "torchao.quantization"
_TENSOR_DIGESTS = {"0aed1dbfb2e63f18": "0.18", "42c8ad64cc1146f8": "0.18"}

Guarded = Tuple[Tuple[Any, str, Any], ...]


def is_read(part: nn.Module) -> bool:
    """True for a layer whose quantised weight functions of this package may take, on the devices of this build."""
    return is_known(part) and dispatch.may_take_quantized()


def is_known(part: nn.Module) -> bool:
    """True for a layer of a class, or with a weight of a class, that was read."""
    kind = type(part)
    return known(kind) is not None or (kind is nn.Linear and known_tensor(type(_held(part).get("weight"))) is not None)


def _held(part: nn.Module) -> Dict[str, Any]:
    return part.__dict__["_parameters"]


@functools.lru_cache(maxsize=64)
def known(kind: type) -> Optional[Guarded]:
    """The attributes that the reading of a class rests on, if it is one of those named and its source was read."""
    if kind.__module__ == _FP8_MODULE and kind.__qualname__ == "FP8Linear" and digest_of_fp8(kind) in _FP8_DIGESTS:
        return (kind, "__call__", kind.__call__), (kind, "forward", kind.forward), *_fp8_functions()
    if kind.__module__ == _MODULE and kind.__qualname__ == _INT8 and digest_of_int8(kind) in _INT8_DIGESTS:
        methods = ((kind, name, getattr(kind, name)) for name in ("__call__", *_INT8_METHODS))
        return *methods, *_int8_function(kind)
    if kind.__module__ != _MODULE or kind.__qualname__ not in _NAMES or digest_of(kind) not in _DIGESTS:
        return None
    return (*((kind, name, getattr(kind, name)) for name in ("__call__", *_METHODS)), *_functions(kind))


def digest_of(kind: type) -> Optional[str]:
    """A hash of the source that a call of such a class of bitsandbytes runs; None where there is none."""
    functions = [function for _, _, function in _functions(kind)]
    product = functions[-1].__globals__.get("MatMul4Bit") if functions else None
    if not isinstance(product, type):
        return None
    codes = *codes_of(kind, _METHODS), *(each.__code__ for each in functions), *codes_of(product, _PRODUCT)
    return digest(codes)


_PRODUCT = ("forward", "backward")


def digest_of_fp8(kind: type) -> Optional[str]:
    """The same of transformers' FP8Linear."""
    found = [value for *_, value in _fp8_functions()]
    if not all(isinstance(each, FunctionType) for each in found[:-1]) or not isinstance(found[-1], type):
        return None
    return digest(
        (*codes_of(kind, ("forward",)), *(each.__code__ for each in found[:-1]), *codes_of(found[-1], _PRODUCT))
    )


def _fp8_functions() -> Guarded:
    home = sys.modules[_FP8_MODULE]
    return tuple((home, name, getattr(home, name, None)) for name in (*_FP8_FUNCTIONS, "FP8LinearFunction"))


def digest_of_int8(kind: type) -> Optional[str]:
    """The same of bitsandbytes' layer of int8."""
    functions = [function for _, _, function in _int8_function(kind)]
    product = functions[0].__globals__.get("MatMul8bitLt") if functions else None
    if not isinstance(product, type):
        return None
    return digest((*codes_of(kind, _INT8_METHODS), functions[0].__code__, *codes_of(product, _PRODUCT)))


def _int8_function(kind: type) -> Guarded:
    forward = getattr(kind, "forward", None)
    package = forward.__globals__.get("bnb") if isinstance(forward, FunctionType) else None
    multiply = getattr(package, "matmul", None)
    return ((package, multiply.__name__, multiply),) if isinstance(multiply, FunctionType) else ()


@functools.lru_cache(maxsize=64)
def known_tensor(kind: type) -> Optional[Guarded]:
    """What the reading of a class of weights rests on, if it is torchao's and the source of its products was read."""
    if kind.__module__ != _TENSORS or digest_of_tensor(kind) not in _TENSOR_DIGESTS:
        return None
    products = kind._TORCH_FN_TABLE[kind]
    return ((products, F.linear, products[F.linear]),)


def digest_of_tensor(kind: type) -> Optional[str]:
    """A hash of the source that the product with a weight of torchao's runs; None where there is none."""
    product = getattr(kind, "_TORCH_FN_TABLE", {}).get(kind, {}).get(F.linear)
    product = getattr(product, "__wrapped__", None)
    if not isinstance(product, FunctionType):
        return None
    called = product.__globals__.get("_float8_addmm_impl")
    return digest([each.__code__ for each in (product, called) if isinstance(each, FunctionType)])


def _functions(kind: type) -> Guarded:
    """What the forward of a class calls: owners, names and functions; nothing where one is not there."""
    forward = getattr(kind, "forward", None)
    around = forward.__globals__ if isinstance(forward, FunctionType) else {}
    fix, package = around.get("fix_4bit_weight_quant_state_from_module"), around.get("bnb")
    multiply = getattr(package, "matmul_4bit", None)
    if not isinstance(fix, FunctionType) or not isinstance(multiply, FunctionType):
        return ()
    return (sys.modules[_MODULE], fix.__name__, fix), (package, multiply.__name__, multiply)


_are_unchanged = are_unchanged if native.plain_modules is None else native.plain_modules.are_unchanged


def layer_of(part: nn.Module) -> Union[str, Layer]:
    """The operands of a layer of a known class; or, as a noun phrase, why it must be called."""
    kind = type(part)
    if kind is nn.Linear:
        return _of_tensor(part)
    if not _are_unchanged(known(kind)):
        return f"a patched {kind.__module__}.{kind.__qualname__}"
    found = of_call(part)
    if found is not None:
        return found
    of_bitsandbytes = _read_int8 if kind.__qualname__ == _INT8 else _read
    found = of_bitsandbytes(part) if kind.__module__ == _MODULE else _read_fp8(part)
    return f"a {kind.__module__}.{kind.__qualname__} {found}" if type(found) is str else found


def _of_tensor(part: nn.Module) -> Union[str, Layer]:
    kind = type(_held(part).get("weight"))
    if not are_unchanged(known_tensor(kind)):
        return f"a patched weight of type {kind.__name__}"
    found = of_call(part) or _read_tensor(part)
    return f"a weight of type {kind.__name__} {found}" if type(found) is str else found


def _read(part: nn.Module) -> Union[str, Layer]:
    state = part.__dict__
    held = state["_parameters"]
    weight, bias = held.get("weight"), held.get("bias")
    # A plain parameter with the state of the other is what pickling makes of it.
    if type(weight).__name__ not in _PARAMETERS or not held.keys().isdisjoint(state):
        return f"with a weight of type {type(weight).__name__}"
    packed = weight.__dict__.get("quant_state")
    if packed is None:
        return "whose weight is not quantised yet"
    dtype = state.get("compute_dtype")
    if dtype is None or not state.get("compute_type_is_set"):
        return "that has not chosen its compute_dtype yet"
    fields = vars(packed)
    if fields.get("packing_format_for_cpu") or fields.get("ipex"):
        return "whose weight was packed anew"
    if not _FIELDS.issubset(fields) or len(packed.shape) != 2 or packed.quant_type not in quantized.CODES:
        return "in a form that is not known"
    if bias is not None and (type(bias) is not nn.Parameter or bias.dtype is not dtype):
        return f"with a bias that is no parameter of {dtype}"
    refusal = dispatch.quantized_refusal(packed.absmax.device, dtype)
    if refusal is not None:
        return refusal
    offset = _number(packed.offset) if packed.nested else 0.0
    if offset is None:
        return "first called while a CUDA graph is recorded"
    return Layer(quantized.of_state(weight, packed, offset), bias, None, dtype)


def _read_fp8(part: nn.Module) -> Union[str, Layer]:
    state = part.__dict__
    held = state["_parameters"]
    weight, scales, bias = held.get("weight"), held.get("weight_scale_inv"), held.get("bias")
    if type(weight) is not nn.Parameter or weight.dtype is not torch.float8_e4m3fn or not held.keys().isdisjoint(state):
        return f"with a weight of {getattr(weight, 'dtype', type(weight).__name__)}"
    if state.get("activation_scheme") != "dynamic" or held.get("activation_scale") is not None:
        return "with scales for what it is given"
    if type(scales) is not nn.Parameter or scales.dtype is not torch.float32 or not scales.is_contiguous():
        return f"with scales of {getattr(scales, 'dtype', type(scales).__name__)}"
    if bias is not None and type(bias) is not nn.Parameter:
        return f"with a bias of type {type(bias).__name__}"
    out, width = weight.shape
    block = state.get("block_size")
    block = (out, width) if block is None else tuple(block)
    grid = -(-out // block[0]) * -(-width // block[1]) if len(block) == 2 and min(block) > 0 else 0
    if scales.numel() != grid or not weight.is_contiguous() or weight.device != scales.device:
        return "in a form that is not known"
    refusal = dispatch.quantized_refusal(weight.device, torch.bfloat16) or dispatch.blocked_refusal(out, width, block)
    if refusal is not None:
        return refusal
    return Layer(quantized.QuantizedWeight(weight.detach(), scales.detach(), (out, width), "fp8", block), bias)


def _read_int8(part: nn.Module) -> Union[str, Layer]:
    state = part.__dict__
    held, kept = state["_parameters"], vars(state["state"])
    weight, bias = held.get("weight"), held.get("bias")
    if type(weight).__name__ != "Int8Params" or not held.keys().isdisjoint(state):
        return f"with a weight of type {type(weight).__name__}"
    if kept.get("has_fp16_weights"):
        return "that quantises its weight at each call"
    # The first call moves both from the weight into the state.
    kept = kept if vars(weight).get("CB") is None else vars(weight)
    data, scales = kept.get("CB"), kept.get("SCB")
    if type(data) is not Tensor or type(scales) is not Tensor or data.dtype is not torch.int8:
        return "whose weight is not quantised yet"
    return _in_rows(data, scales, bias, divisor=127)


def _read_tensor(part: nn.Module) -> Union[str, Layer]:
    held = part.__dict__["_parameters"]
    weight, bias = held["weight"], held.get("bias")
    state = vars(weight)
    data, scales = state.get("qdata"), state.get("scale")
    if not held.keys().isdisjoint(part.__dict__) or type(data) is not Tensor or type(scales) is not Tensor:
        return "in a form that is not known"
    if state.get("act_pre_scale") is not None or state.get("act_quant_scale") is not None:
        return "with scales for what it is given"
    if data.dim() != 2 or state.get("block_size") not in ([1, data.shape[1]], list(data.shape)):
        return f"in blocks of {state.get('block_size')}"
    if data.dtype not in (torch.int8, torch.float8_e4m3fn):
        return f"of {data.dtype}"
    return _in_rows(data, scales, bias)


def _in_rows(data: Tensor, scales: Tensor, bias: Optional[Tensor], **options: int) -> Union[str, Layer]:
    """The operands of a layer whose weight has a scale for each row, or one for all."""
    out, width = data.shape
    if scales.dtype is not torch.float32 or not scales.is_contiguous() or scales.numel() not in (1, out):
        return f"with scales of {scales.dtype}"
    if bias is not None and type(bias) is not nn.Parameter:
        return f"with a bias of type {type(bias).__name__}"
    if not data.is_contiguous() or data.device != scales.device:
        return "in a form that is not known"
    refusal = dispatch.quantized_refusal(data.device, torch.bfloat16)
    refusal = refusal or dispatch.blocked_refusal(out, width, (1, max(1, width)))
    if refusal is not None:
        return refusal
    of = quantized.QuantizedWeight.from_int8 if data.dtype is torch.int8 else quantized.QuantizedWeight.from_fp8
    return Layer(of(data, scales.view(-1), **options), bias)


_PARAMETERS = {"Params4bit", "Parameter"}
_FIELDS = {"absmax", "shape", "blocksize", "quant_type", "nested", "offset"}

# Offsets of nested scales, by id: a weak reference, the version, and the number, which the host waits for once.
_numbers: Dict[int, Tuple[Any, int, float]] = {}


def _number(offset: Tensor) -> Optional[float]:
    """The number in a tensor; None where it is not known and may not be waited for."""
    key, version = id(offset), 0 if offset.is_inference() else offset._version
    known = _numbers.get(key)
    if known is not None and known[0]() is offset and known[1] == version:
        return known[2]
    if offset.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    found = offset.item()
    _numbers[key] = weakref.ref(offset, lambda _: _numbers.pop(key, None)), version, found
    return found


def words_of(weights: Iterable[Any]) -> str:
    """The words for the formats of quantised weights, behind the pattern of their MLP; nothing where there are none."""
    found = [each for each in weights if type(each) is quantized.QuantizedWeight]
    is_blocked = quantized.are_blocked(*found)
    rows = f" up to {dispatch.most_blocked_rows(found[0].data, found)} rows" if is_blocked else ""
    return f" in {' and '.join(dict.fromkeys(each.format for each in found))}{rows}" if found else ""


def is_said_in(pattern: str) -> bool:
    """True if a pattern has such words."""
    return any(f" in {format}" in pattern for format in quantized.FORMATS)
