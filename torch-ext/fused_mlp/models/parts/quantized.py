"""Linear layers with quantised weights, read from their modules at each call: bitsandbytes' four-bit and int8 layers,
transformers' FP8 layers with scales per block and per row, and torch's with torchao's int8 and FP8 weights.

A class is identified by its name and by a hash of its source, like PEFT's (``adapters``). A module may quantise its
weight when it moves to a device, and weights may be decoded, replaced and moved again, so each call reads the current
state.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import weakref
from types import FunctionType
from typing import Any, Dict, Iterable, NamedTuple, Optional, Tuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ... import dispatch
from ...adapters import Layer
from ...backends import native
from ...quantized import weights as quantized
from ..reading import attributes
from ..reading.attributes import name_of_class, of_call
from ..reading.digests import codes_of, digest
from .guards import are_unchanged

Guarded = Tuple[Tuple[Any, str, Any], ...]


class _Class(NamedTuple):
    """The code that a call of a class of layers runs: its methods, the functions that these look up, and the autograd
    function of the last one. ``digests`` are hashes of their source, each with the first version that contains it;
    ``format`` is the format of weights with scales per block of rows and columns."""

    methods: Tuple[str, ...]
    functions: Tuple[str, ...]
    product: Optional[str]
    digests: Dict[str, str]
    format: Optional[str] = None


_OF_4BIT = _Class(
    ("forward", "set_compute_type"),
    ("fix_4bit_weight_quant_state_from_module", "bnb.matmul_4bit"),
    "MatMul4Bit",
    {
        "ab7e0659037f6e16": "0.45",
        "79d4c72e4f00eba6": "0.47",
        "075e230958674e24": "0.48",
        "1af9dd492eedd1b0": "0.49",
        "16194b72eb85875b": "0.50",
    },
)
_INT8 = "bitsandbytes.nn.modules.Linear8bitLt"
_FP8 = "transformers.integrations.finegrained_fp8.FP8Linear"
_FP8_ROWS = "transformers.integrations.compressed_tensors.CompressedTensorsFP8Linear"
CLASSES: Dict[str, _Class] = {
    **{f"bitsandbytes.nn.modules.{name}": _OF_4BIT for name in ("Linear4bit", "LinearNF4", "LinearFP4")},
    _INT8: _Class(
        ("forward", "init_8bit_state"), ("bnb.matmul",), "MatMul8bitLt", {"02e0964f6b8f0fb3": "0.50"}, "int8"
    ),
    _FP8: _Class(
        ("forward",),
        ("_apply_if_grad", "fp8_linear", "finegrained_fp8_linear"),
        "FP8LinearFunction",
        {"785a8136028dbb60": "5.22"},
        "fp8",
    ),
    _FP8_ROWS: _Class(
        ("forward",), ("quantize_fp8_per_row", "_scaled_mm_rowwise"), None, {"52c146d100529629": "5.22"}, "fp8"
    ),
}
# The same for torchao's product, by the class of the weight.
_TENSORS = {
    "torchao.quantization.Int8Tensor": "int8",
    "torchao.quantization.Float8Tensor": "fp8",
    "torchao.quantization.Int4TilePackedTo4dTensor": quantized.TILES,
}
TENSOR_DIGESTS = dict.fromkeys(("0aed1dbfb2e63f18", "42c8ad64cc1146f8", "3d117d897853c536"), "0.18")


def is_read(part: nn.Module) -> bool:
    """True for a layer whose quantised weight this package's functions may read on the devices of this build."""
    return is_known(part) and dispatch.may_take_quantized()


def is_known(part: nn.Module) -> bool:
    """True for a layer of a known class, or with a weight of a known class."""
    kind = type(part)
    if kind is nn.Linear:
        return known_tensor(type(part.__dict__["_parameters"].get("weight"))) is not None
    return known(kind) is not None


@functools.lru_cache(maxsize=64)
def known(kind: type) -> Optional[Guarded]:
    """Return the attributes that a class depends on if it is one of those named with known source, else None."""
    if name_of_class(kind) not in CLASSES or digest_of(kind) not in CLASSES[name_of_class(kind)].digests:
        return None
    methods = ("__call__", *CLASSES[name_of_class(kind)].methods)
    unchanged = (*((kind, name, getattr(kind, name)) for name in methods), *_called(kind))
    if native.DEVICE_TYPE in dispatch.QUANTIZED_DEVICES:
        form, home = _FORMS.index(CLASSES[name_of_class(kind)]), sys.modules[kind.__module__]
        COMPILED[kind] = unchanged, form, getattr(home, _OWN_PARAMETERS.get(form, ""), nn.Parameter)
    return unchanged


# Classes of layers, and of torchao's weights, that compiled code reads too, with the attributes they depend on, the
# form of the code and the class of the weights; and the values of codes by four-bit format and device index
# (torch-ext/calls/quantized/packed_layer.cpp).
COMPILED: Dict[type, Tuple[Guarded, int, type]] = {}
CODES: Dict[str, Dict[int, Tensor]] = {}
_FORMS = (_OF_4BIT, CLASSES[_FP8], CLASSES[_INT8], CLASSES[_FP8_ROWS])
_OWN_PARAMETERS = {0: "Params4bit", 2: "Int8Params"}  # by form


@functools.lru_cache(maxsize=64)
def _know_codes(format: str, device: torch.device) -> None:
    CODES.setdefault(format, {})[device.index or 0] = quantized.code_of(format, device)


def digest_of(kind: type) -> Optional[str]:
    """Return a hash of the source that a call of such a class runs; None if there is none."""
    what, called = CLASSES[name_of_class(kind)], [value for *_, value in _called(kind)]
    if len(called) != len(what.functions) + (what.product is not None):
        return None
    functions, product = called[: len(what.functions)], called[len(what.functions) :]
    ways = (code for each in product for code in codes_of(each, ("forward", "backward")))
    return digest((*codes_of(kind, what.methods), *(each.__code__ for each in functions), *ways))


def _called(kind: type) -> Guarded:
    """Return the functions that a class's forward calls: owners, names, values. Fewer if one is not as expected."""
    what, forward = CLASSES[name_of_class(kind)], getattr(kind, "forward", None)
    found = []
    for path in what.functions if isinstance(forward, FunctionType) else ():
        owner, _, name = path.rpartition(".")
        home = forward.__globals__.get(owner) if owner else sys.modules[kind.__module__]
        function = getattr(home, name, None)
        if not isinstance(function, FunctionType):
            return ()
        found.append((home, name, function))
    if found and what.product is not None:
        home = sys.modules[found[-1][2].__module__]
        product = getattr(home, what.product, None)
        found += [(home, what.product, product)] if isinstance(product, type) else []
    return tuple(found)


@functools.lru_cache(maxsize=64)
def known_tensor(kind: type) -> Optional[Guarded]:
    """Return the attributes that a class of weights depends on if it is torchao's with known source, else None."""
    if name_of_class(kind) not in _TENSORS or digest_of_tensor(kind) not in TENSOR_DIGESTS:
        return None
    products = kind._TORCH_FN_TABLE[kind]
    unchanged = ((products, F.linear, products[F.linear]),)
    in_tiles = _TENSORS[name_of_class(kind)] == quantized.TILES
    if native.DEVICE_TYPE in dispatch.QUANTIZED_DEVICES and (not in_tiles or dispatch.may_take_tiles()):
        COMPILED[kind] = unchanged, len(_FORMS) + in_tiles, kind
    return unchanged


def digest_of_tensor(kind: type) -> Optional[str]:
    """Return a hash of the source that the product with one of torchao's weights runs; None if there is none."""
    product = getattr(kind, "_TORCH_FN_TABLE", {}).get(kind, {}).get(F.linear)
    product = getattr(product, "__wrapped__", None)
    if not isinstance(product, FunctionType):
        return None
    called = product.__globals__.get("_float8_addmm_impl")
    return digest([each.__code__ for each in (product, called) if isinstance(each, FunctionType)])


def is_plainly_left(part: nn.Module, x: Any) -> bool:
    """True if a known layer's own product of ``x`` runs whatever its weight is. This is the cheap check for layers that
    are examined at every call and have to be called."""
    of_tensor = type(part) is nn.Linear
    kind = type(part.__dict__["_parameters"]["weight"] if of_tensor else part)
    format = _TENSORS[name_of_class(kind)] if of_tensor else CLASSES[name_of_class(kind)].format
    if not isinstance(x, Tensor):
        return False
    if x.requires_grad and torch.is_grad_enabled():
        least = 0 if format is None else _least_trained(part, x)
        return not dispatch.may_train_quantized() or least is None or x.shape[:-1].numel() < least
    if format is None:
        return False
    is_rounded = name_of_class(kind) == _FP8 or _rounds_rows(part)
    return x.shape[:-1].numel() > dispatch.most_rows_of(format, x, is_rounded)


def _rounds_rows(part: nn.Module) -> bool:
    """True for an FP8 layer whose own product is torch's of x, rounded in rows or as a whole by torch operations."""
    if type(part) is not nn.Linear:
        return name_of_class(type(part)) == _FP8_ROWS
    state = vars(part.__dict__["_parameters"]["weight"])
    by_torch = getattr(state.get("kernel_preference"), "name", None) == "TORCH" or not _has_other_products()
    return state.get("act_quant_kwargs") is not None and by_torch


@functools.lru_cache(maxsize=1)
def _has_other_products() -> bool:
    """True if torchao may round and multiply by kernels of another package, which were not measured."""
    return importlib.util.find_spec("mslk") is not None


def _least_trained(part: nn.Module, like: Tensor) -> Optional[int]:
    """Return the least number of rows at which a layer with a blocked weight is fused under autograd: if the gradient
    of its own product uses the decoded weight, and that product is not faster. None for other layers."""
    if type(part) is not nn.Linear:
        return 0 if name_of_class(type(part)) == _INT8 and dispatch.may_train_rounded(like) else None
    weight = part.__dict__["_parameters"]["weight"]
    if vars(weight).get("act_quant_kwargs") is not None or _TENSORS[name_of_class(type(weight))] == quantized.TILES:
        return None
    return dispatch.least_decoded_rows(weight.shape) if _TENSORS[name_of_class(type(weight))] == "int8" else 0


def layer_of(part: nn.Module) -> Union[str, Layer]:
    """Return the operands of a layer of a known class; or a noun phrase for why it must be called."""
    kind = type(part)
    if kind is nn.Linear:
        return _of_tensor(part)
    if not are_unchanged(known(kind)):
        return f"a patched {name_of_class(kind)}"
    found = of_call(part)
    if found is not None:
        return found
    found = _READERS.get(name_of_class(kind), _read)(part)
    return f"a {name_of_class(kind)} {found}" if type(found) is str else found


def _of_tensor(part: nn.Module) -> Union[str, Layer]:
    kind = type(part.__dict__["_parameters"]["weight"])
    if not attributes.are_unchanged(known_tensor(kind)):
        return f"a patched weight of type {kind.__name__}"
    read = _read_tiles if _TENSORS[name_of_class(kind)] == quantized.TILES else _read_tensor
    found = of_call(part) or read(part)
    return f"a weight of type {kind.__name__} {found}" if type(found) is str else found


def _read(part: nn.Module) -> Union[str, Layer]:
    state = part.__dict__
    held = state["_parameters"]
    weight, bias = held.get("weight"), held.get("bias")
    # Pickling turns the weight into a plain parameter with the same state.
    if type(weight).__name__ not in _PARAMETERS or not held.keys().isdisjoint(state):
        return f"with a weight of type {type(weight).__name__}"
    packed = weight.__dict__.get("quant_state")
    if packed is None:
        return "whose weight is not quantised yet"
    dtype = state.get("compute_dtype")
    if dtype is None or not state.get("compute_type_is_set"):
        return "whose compute_dtype is not chosen yet"
    fields = vars(packed)
    if fields.get("packing_format_for_cpu") or fields.get("ipex"):
        return "whose weight was repacked"
    if not _FIELDS.issubset(fields) or len(packed.shape) != 2 or packed.quant_type not in quantized.CODES:
        return "in an unrecognised form"
    if bias is not None and (type(bias) is not nn.Parameter or bias.dtype is not dtype):
        return f"whose bias is not a parameter of {dtype}"
    refusal = dispatch.quantized_refusal(packed.absmax.device, dtype, packed.quant_type)
    if refusal is not None:
        return refusal
    offset = _number(packed.offset) if packed.nested else 0.0
    if offset is None:
        return "first called during CUDA graph capture"
    _know_codes(packed.quant_type, packed.absmax.device)
    found = quantized.of_state(weight, packed, offset)
    refusal = dispatch.layout_refusal(found)
    return Layer(found, bias, None, dtype) if refusal is None else refusal


def _read_fp8(part: nn.Module) -> Union[str, Layer]:
    state = part.__dict__
    held = state["_parameters"]
    weight, scales, bias = held.get("weight"), held.get("weight_scale_inv"), held.get("bias")
    if type(weight) is not nn.Parameter or weight.dtype is not torch.float8_e4m3fn or not held.keys().isdisjoint(state):
        return f"with a weight of {getattr(weight, 'dtype', type(weight).__name__)}"
    if state.get("activation_scheme") != "dynamic" or held.get("activation_scale") is not None:
        return "with activation scales"
    if type(scales) is not nn.Parameter or scales.dtype not in _SCALES or not scales.is_contiguous():
        return f"with scales of {getattr(scales, 'dtype', type(scales).__name__)}"
    if bias is not None and type(bias) is not nn.Parameter:
        return f"with a bias of type {type(bias).__name__}"
    out, width = weight.shape
    block = state.get("block_size")
    block = (out, width) if block is None else tuple(block)
    grid = -(-out // block[0]) * -(-width // block[1]) if len(block) == 2 and min(block) > 0 else 0
    if scales.numel() != grid or not weight.is_contiguous() or weight.device != scales.device:
        return "in an unrecognised form"
    refusal = dispatch.quantized_refusal(weight.device, torch.bfloat16, "fp8")
    refusal = refusal or dispatch.blocked_refusal(out, width, block)
    if refusal is not None:
        return refusal
    floats = scales.detach().float()  # converts e8m0 at each call: some writes cannot be detected
    found = quantized.QuantizedWeight(weight.detach(), floats, (out, width), "fp8", block, fast=False)
    return Layer(found, bias, least_trained=None)


def _read_int8(part: nn.Module) -> Union[str, Layer]:
    state = part.__dict__
    held, kept = state["_parameters"], vars(state["state"])
    weight, bias = held.get("weight"), held.get("bias")
    if type(weight).__name__ != "Int8Params" or not held.keys().isdisjoint(state):
        return f"with a weight of type {type(weight).__name__}"
    if kept.get("has_fp16_weights"):
        return "that quantises its weight in every call"
    # The first call moves both from the weight into the state.
    kept = kept if vars(weight).get("CB") is None else vars(weight)
    data, scales = kept.get("CB"), kept.get("SCB")
    if type(data) is not Tensor or type(scales) is not Tensor or data.dtype is not torch.int8:
        return "whose weight is not quantised yet"
    return _in_rows(data, scales, bias, _least_trained(part, data), divisor=127)


def _read_tensor(part: nn.Module) -> Union[str, Layer]:
    held = part.__dict__["_parameters"]
    weight, bias = held["weight"], held.get("bias")
    state = vars(weight)
    data, scales = state.get("qdata"), state.get("scale")
    if not held.keys().isdisjoint(part.__dict__) or type(data) is not Tensor or type(scales) is not Tensor:
        return "in an unrecognised form"
    if state.get("act_pre_scale") is not None or state.get("act_quant_scale") is not None:
        return "with activation scales"
    if state.get("act_quant_kwargs") is not None and data.dtype is torch.int8:
        return "that quantises its input to int8"
    if any(getattr(state.get("act_quant_kwargs"), bound, None) is not None for bound in ("hp_value_lb", "hp_value_ub")):
        return "that limits its input"
    if data.dim() != 2 or state.get("block_size") not in ([1, data.shape[1]], list(data.shape)):
        return f"in blocks of {state.get('block_size')}"
    if data.dtype not in (torch.int8, torch.float8_e4m3fn):
        return f"of {data.dtype}"
    fast = getattr(state.get("mm_config"), "use_fast_accum", False) is True if _rounds_rows(part) else None
    return _in_rows(data, scales, bias, _least_trained(part, data), fast=fast)


def _read_tiles(part: nn.Module) -> Union[str, Layer]:
    held = part.__dict__["_parameters"]
    weight, bias = held["weight"], held.get("bias")
    state = vars(weight)
    data, scales, block = state.get("qdata"), state.get("scale_and_zero"), state.get("block_size")
    if not held.keys().isdisjoint(part.__dict__) or type(data) is not Tensor or type(scales) is not Tensor:
        return "in an unrecognised form"
    if state.get("act_pre_scale") is not None:
        return "with activation scales"
    if bias is not None and type(bias) is not nn.Parameter:
        return f"with a bias of type {type(bias).__name__}"
    with torch._C.DisableTorchFunctionSubclass():
        shape = tuple(weight.shape)
    if len(shape) != 2 or not isinstance(block, (list, tuple)) or len(block) != 2 or data.device != scales.device:
        return "in an unrecognised form"
    refusal = dispatch.quantized_refusal(data.device, torch.bfloat16, quantized.TILES)
    if refusal is not None:
        return refusal
    found = quantized.QuantizedWeight(data.detach(), scales.detach(), shape, quantized.TILES, tuple(block))
    fits = quantized.fits_tiles(found)
    return Layer(found, bias, least_trained=None) if fits else f"of {list(shape)} features in blocks of {list(block)}"


def _read_fp8_rows(part: nn.Module) -> Union[str, Layer]:
    held = part.__dict__["_parameters"]
    weight, scales, bias = held.get("weight"), held.get("weight_scale"), held.get("bias")
    if (
        not held.keys().isdisjoint(part.__dict__)
        or type(weight) is not nn.Parameter
        or type(scales) is not nn.Parameter
    ):
        return "in an unrecognised form"
    if weight.dtype is not torch.float8_e4m3fn or weight.dim() != 2:
        return f"with a weight of {weight.dtype}"
    return _in_rows(weight, scales, bias, least_trained=None, fast=False)


def _in_rows(
    data: Tensor,
    scales: Tensor,
    bias: Optional[Tensor],
    least_trained: Optional[int],
    divisor: int = 1,
    fast: Optional[bool] = None,
) -> Union[str, Layer]:
    """Return the operands of a layer whose weight has a scale per row, or one in all."""
    out, width = data.shape
    if scales.dtype is not torch.float32 or not scales.is_contiguous() or scales.numel() not in (1, out):
        return f"with scales of {scales.dtype}"
    if bias is not None and type(bias) is not nn.Parameter:
        return f"with a bias of type {type(bias).__name__}"
    if not data.is_contiguous() or data.device != scales.device:
        return "in an unrecognised form"
    format = "int8" if data.dtype is torch.int8 else "fp8"
    refusal = dispatch.quantized_refusal(data.device, torch.bfloat16, format)
    refusal = refusal or dispatch.blocked_refusal(out, width, (1, max(1, width)))
    if refusal is not None:
        return refusal
    if format == "int8":
        found = quantized.QuantizedWeight.from_int8(data, scales.view(-1), divisor=divisor)
    else:
        found = quantized.QuantizedWeight.from_fp8(data, scales.view(-1))._replace(fast=fast)
    return Layer(found, bias, least_trained=least_trained)


_READERS = {_INT8: _read_int8, _FP8: _read_fp8, _FP8_ROWS: _read_fp8_rows}
_PARAMETERS = {"Params4bit", "Parameter"}
_FIELDS = {"absmax", "shape", "blocksize", "quant_type", "nested", "offset"}

_SCALES = (torch.float32, torch.float8_e8m0fnu)

# Offsets of nested scales, by id: a weak reference, the version, and the number, for which the host waits once.
OFFSETS: Dict[int, Tuple[Any, int, float]] = {}


def _number(offset: Tensor) -> Optional[float]:
    """Return the number in a tensor; None if it is unknown and must not be waited for."""
    key, version = id(offset), 0 if offset.is_inference() else offset._version
    known = OFFSETS.get(key)
    if known is not None and known[0]() is offset and known[1] == version:
        return known[2]
    if offset.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    found = offset.item()
    OFFSETS[key] = weakref.ref(offset, lambda _, pop=OFFSETS.pop: pop(key, None)), version, found
    return found


def words_of(weights: Iterable[Any]) -> str:
    """Return the report's words for the formats of quantised weights, which follow the MLP's pattern; empty if none."""
    found = [each for each in weights if type(each) is quantized.QuantizedWeight]
    most = dispatch.most_blocked_rows(found[0].data, found) if quantized.are_blocked(*found) else dispatch.ANY_ROWS
    rows = f" up to {most} rows" if most < dispatch.ANY_ROWS else ""
    least = dispatch.least_blocked_rows(found)
    rows = f" with at least {least} rows" if least > 0 else rows
    return f" in {' and '.join(dict.fromkeys(each.format for each in found))}{rows}" if found else ""


def is_said_in(pattern: str) -> bool:
    """True if a pattern contains such words."""
    return any(f" in {format}" in pattern for format in quantized.FORMATS)
