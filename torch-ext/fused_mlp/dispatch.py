"""Chooses a backend for a call, and can say why."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from types import ModuleType
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple, TypeVar

import torch
from torch import Tensor

from .backends import native, reference, triton

_T = TypeVar("_T")

_BACKENDS: Dict[str, ModuleType] = {"triton": triton, "torch": reference}
if native.DEVICE_TYPE is not None:
    _BACKENDS[native.DEVICE_TYPE] = native
_NAMES = ("cuda", "triton", "cpu", "torch")

# Measured order: the compiled ops win wherever they exist, the Triton kernels where a build has no code for the GPU.
# Kernels that never ran on a kind of GPU, as all of a build without compiled ops, are for those who force them.
_AUTO: Tuple[str, ...] = {"cuda": ("cuda", "triton"), "cpu": ("cpu",), None: ()}[native.DEVICE_TYPE]
_AUTO_BACKENDS = tuple(_BACKENDS[name] for name in _AUTO)

# Up to so many rows an expert, on average, Triton's kernels of experts were measured to be faster than torch's grouped
# products, on a Hopper GPU. They take weights of every layout, as the compiled ones do not.
_TRITON_EXPERTS_ROWS = 8

NEVER = 1 << 62  # more elements than there are

# On a CPU, an op under autograd costs a node written in Python: these pay from so many elements of their hidden values
# on, by measurement.
LEAST_RECORDED: Dict[torch.dtype, Dict[str, int]] = {
    dtype: {
        "act_and_mul": 1 << 18,
        **dict.fromkeys(("linear", "mlp", "gated_linear", "gated_mlp"), native.least_recorded(dtype)),
    }
    for dtype in native._DTYPES
    if native.DEVICE_TYPE == "cpu"
}

# On a GPU, such a node costs the host more time than it saves, and small models wait for the host. A key says whether
# an MLP is gated, and whether it is in eval mode, where likely no backward follows that would make up for the node. The
# value says from how many multiplications in the first layer on an op pays. At 700 TFLOP/s, 2^34 take 50 us. They
# count four times where no gate and an activation of several operations, or a norm of the sum behind the MLP, are part
# of the op: it takes the place of more then. Compiled code takes the number too.
LEAST_WORK: Dict[Tuple[bool, bool], int] = (
    {(False, False): 1 << 34, (False, True): 1 << 36, (True, False): 1 << 30, (True, True): 1 << 34}
    if native.DEVICE_TYPE == "cuda"
    else {}
)
WORK_OF_MANY = 4

# Under torch.compile an MLP without a gate that autograd follows is left to the compiler below so many multiplications
# in its first layer: it fuses the norm and the sum around the MLP as well, and steps that small wait for the host. Just
# above, an op takes 0.90 of the compiler's time on the GPU, and 0.94 to 1.02 of its wall time.
LEAST_COMPILED: int = 1 << 34 if native.DEVICE_TYPE == "cuda" else 0

# A dropout, the sum with a residual and the norm of that as one op where autograd follows: from so many elements on.
# The host takes 1.05 to 1.2 of eager's time for it, so it pays where a GPU has more to do than the host: about where
# LEAST_WORK begins for MLPs of four times the width. On a CPU it was not measured.
LEAST_SUM: Dict[torch.dtype, int] = dict.fromkeys(native._DTYPES, NEVER if native.DEVICE_TYPE == "cpu" else 1 << 22)

# Projections of one input as one node where autograd follows: from so many elements of the input on, in training mode.
# The host takes longer for the node than for three layers. On a CPU small models took 1.07 to 1.10 of their time with
# it, and larger ones were not measured; nor was inference on a GPU.
LEAST_PROJECTED: int = 1 << 22 if native.DEVICE_TYPE == "cuda" else NEVER

# A norm by itself in eval mode, where likely no backward follows that would make up for its node. Inside of a model the
# node takes a CPU as long as the kernel saves up to about so many elements.
LEAST_NORM: Dict[torch.dtype, int] = dict.fromkeys(native._DTYPES, 1 << 15) if native.DEVICE_TYPE == "cpu" else {}

# One kernel for an activation and its product with up, and nothing else, pays from so many elements on. On a GPU the
# host takes longer for it than for torch's two operations, and for what autograd records twice as long: it pays where
# the GPU has more to do than the host (benchmarks/models/unfused.py).
LEAST_PRODUCT: Dict[torch.dtype, int] = {
    dtype: 1 << 24 if native.DEVICE_TYPE == "cuda" else 1 << 15 if dtype == torch.bfloat16 else 1 << 16
    for dtype in native._DTYPES
}
LEAST_RECORDED_PRODUCT = 3 << 24 if native.DEVICE_TYPE == "cuda" else 0

# Formats of quantised weights that a CPU takes by itself, where it has tiles.
_ON_TILES = native.DEVICE_TYPE == "cpu" and native.reads_codes_on_tiles()
_ON_CPU = ("nf4", "fp4", "int8")

# Layers with weights of four bits and adapters: up to so many rows a product reads the weight packed, and the adapter's
# products are added to its result. For more rows the weight is decoded first, and the adapter is part of the product.
_FEW_ROWS = 64


class _Block:
    """A ``with backend(name)`` that is open in some thread."""

    def __init__(self, name: str) -> None:
        self.name = name


# The latest comes last. To append and to remove a block are atomic, so that threads need no lock. A plain global:
# torch.compile guards on it, which it does not on a context variable.
_open_blocks: List[_Block] = [_Block("auto")]


@contextlib.contextmanager
def backend(name: str) -> Iterator[None]:
    """Forces an implementation for the calls inside a ``with`` block, in all threads.

    Where several blocks are open, nested or in different threads, the one entered last counts. Leaving a block ends
    that block alone.

    ``name`` is ``"cuda"`` (compiled CUDA C++), ``"triton"``, ``"cpu"`` (compiled C++), ``"torch"`` (the operations a
    model written in PyTorch runs) or ``"auto"`` (the default choice). Raises ValueError for another name; a call that
    the forced implementation does not take raises ValueError too.
    """
    if name not in (*_NAMES, "auto"):
        raise ValueError(f"backend must be one of {', '.join(_NAMES)} or auto, got {name!r}")
    block = _Block(name)
    _open_blocks.append(block)
    try:
        yield
    finally:
        _open_blocks.remove(block)


def select(op: str, x: Tensor, recorded: Optional[int] = None) -> ModuleType:
    """The backend module that takes ``op`` on ``x``; ValueError if one is forced and refuses.

    ``recorded`` is the number of elements of the hidden values, or the result, that autograd records.
    """
    forced = _open_blocks[-1].name
    if forced != "auto":
        reason = _forced_refusal(forced, op, x)
        if reason is not None:
            raise ValueError(f"backend {forced!r} is forced, and it does not take {op}: {reason}")
        return _BACKENDS[forced]
    for implementation in () if is_too_small(op, x, recorded) else _AUTO_BACKENDS:
        if implementation.refusal(op, x) is None and _reserve(op, implementation, x) is None:
            return implementation
    return reference


def is_native(op: str, x: Tensor) -> bool:
    """True if the compiled ops take ``op`` on ``x``, and no other implementation is forced."""
    return _open_blocks[-1].name in ("auto", native.DEVICE_TYPE) and native.refusal(op, x) is None


QUANTIZED_DEVICES = {"cuda"}  # where layers with quantised weights of every kind are taken, and read in compiled code


def may_take_quantized() -> bool:
    """True if :func:`quantized_refusal` may refuse nothing: where this build has kernels that were measured to pay, or
    is forced."""
    return native.DEVICE_TYPE in QUANTIZED_DEVICES or _ON_TILES or is_forced()


def may_take_tiles() -> bool:
    """True if :func:`quantized_refusal` refuses int4 in tiles on none of the GPUs at hand."""
    return all(torch.cuda.get_device_capability(index) == (9, 0) for index in range(torch.cuda.device_count()))


def may_train_quantized() -> bool:
    """True if layers with quantised weights are not left to themselves where autograd follows, or they have adapters.

    On a CPU they are: that decodes them, and was not measured.
    """
    return native.DEVICE_TYPE in QUANTIZED_DEVICES or is_forced()


def may_train_rounded(x: Tensor) -> bool:
    """True if such layers whose own products round x to int8 are not left to these: where that was measured to pay."""
    return is_forced() or (x.is_cuda and native.is_hopper(x))


def least_decoded_rows(shape: Sequence[int]) -> int:
    """The number of rows from which on the product with a frozen weight of int8, decoded each way, takes less time than
    torchao's, which keeps the decoded weight for the backward: what is saved grows with the rows."""
    return 0 if is_forced() else min(shape) // 4


def quantized_refusal(device: torch.device, dtype: torch.dtype, format: str) -> Optional[str]:
    """The reason, behind a noun, why a layer with a quantised weight is left to its own product.

    ``dtype`` is that of the product. Kernels for CPUs were measured beside those of bitsandbytes and torchao, on one
    with tiles; the products of FP8 there are none to measure beside.
    """
    return _quantized_refusal(device, dtype, format, is_forced())


@functools.lru_cache(maxsize=64)
def _quantized_refusal(device: torch.device, dtype: torch.dtype, format: str, is_forced: bool) -> Optional[str]:
    is_taken = device.type in QUANTIZED_DEVICES or (device.type == "cpu" and _ON_TILES and format in _ON_CPU)
    if not is_taken and not is_forced:
        return f"on a {'CPU' if device.type == 'cpu' else device.type}, where its own product runs"
    if device.type == "cuda" and dtype == torch.float32:
        return "that multiplies in float32"
    like = torch.empty((), dtype=dtype, device=device)
    if format == _TILES and device.type == "cuda" and not (is_forced or native.is_hopper(like)):
        return "on a GPU that is no Hopper, where nothing was measured"
    reason = native.refusal("quantized_mlp", like)
    return None if reason is None else f"with {reason}"


def layout_refusal(weight: Any) -> Optional[str]:
    """The same for a weight of four bits, which no kernel of this build reads; on GPUs those are decoded first."""
    width, block = weight.shape[1], weight.block
    if weight.device.type != "cpu" or is_forced():
        return None
    if width % 32 != 0 or (width % block != 0 and block % width != 0):
        return f"of {width} features in blocks of {block}, which no kernel reads"
    return None


def blocked_refusal(out: int, width: int, block: Sequence[int]) -> Optional[str]:
    """The same for a weight ``[out, width]`` in blocks, which no kernel reads: to decode it first may take longer.

    :func:`most_blocked_rows` says up to how many rows kernels take it.
    """
    if width % 64 != 0 or out % 8 != 0:
        return f"of [{out}, {width}] features, which no kernel reads"
    if width > block[1] and block[1] not in (128, 256, 512):
        return f"in blocks of {block[0]} x {block[1]}, which no kernel reads"
    return None


def most_blocked_rows(x: Tensor, weights: Iterable[Any]) -> int:
    """The number of rows of ``x`` up to which layers with weights in blocks are not left to their own products.

    Kernels of few rows compute with x as it is. On Hopper GPUs those of more rows round it to FP8 where weights are
    of that, as the layers' own products do, and weights of int8 are decoded first; elsewhere there are none.
    """
    weights = list(weights)
    if any(weight.format == _TILES for weight in weights):
        return ANY_ROWS
    is_rounded = all(map(_may_round_rows, weights))
    return min(most_rows_of_size(x, weight.format == "int8", is_rounded, weight.numel()) for weight in weights)


def least_blocked_rows(weights: Iterable[Any]) -> int:
    """The number of rows from which on they are not left to these: int4 in tiles that no kernel of few rows reads, as
    cuda/quantized/choice.cpp says, is decoded first."""
    tiles = [weight for weight in weights if weight.format == _TILES]
    if is_forced() or all(map(_may_stream, tiles)):
        return 0
    elements = sum(math.prod(weight.shape) for weight in tiles)
    return next(rows for least, rows in _LEAST_ROWS_OF_TILES if elements >= least)


def _may_stream(weight: Any) -> bool:
    """True for int4 in tiles that kernels of few rows read."""
    width, group = weight.shape[1], weight.block[1]
    blocks = group // 64
    return width % 64 == 0 and (group >= width or (group % 64 == 0 and blocks & (blocks - 1) == 0))


def most_rows_of_size(x: Tensor, is_int8: bool, is_rounded: bool, elements: int) -> int:
    """The same of int8 or FP8, by a weight's size: large ones of int8 are decoded in more time than bitsandbytes'
    products take. Compiled code asks it too."""
    by_size = _MOST_ROWS_OF_LARGE if is_int8 and elements >= _LARGE else ANY_ROWS
    return min(most_rows_of("int8" if is_int8 else "fp8", x, is_rounded), by_size)


def most_rows_of(format: str, x: Tensor, is_rounded: bool = True) -> int:
    """The same for weights of one format; ``is_rounded``: x may be rounded to that."""
    if not x.is_cuda:
        return _MOST_ROWS if is_forced() else _MOST_ROWS_ON_CPU.get(x.dtype, _MOST_ROWS_OF_LARGE)
    if format == _TILES:
        return ANY_ROWS
    if not native.is_hopper(x):
        return _MOST_ROWS_ELSEWHERE
    if format == "int8":
        return ANY_ROWS
    return _MOST_ROUNDED_ROWS if is_rounded else _MOST_ROWS


def _may_round_rows(weight: Any) -> bool:
    """True for a ``QuantizedWeight`` that Hopper multiplies by x in FP8, as cuda/quantized/choice.cpp says."""
    rows = weight.block[0]
    return weight.format == "fp8" and (rows % 128 == 0 or rows >= weight.shape[0])


def is_forced() -> bool:
    """True if the compiled ops of this build are forced."""
    return _open_blocks[-1].name == native.DEVICE_TYPE


# On an H200, as measured beside torch's products in FP8; GPUs that do not round x are bound by the weights' bytes.
_MOST_ROWS, _MOST_ROWS_ELSEWHERE, _MOST_ROUNDED_ROWS = 32, 16, 128
# On a Xeon, int8 beside bitsandbytes, whose products of rounded x take less time for more rows of float32. Those of
# bfloat16 were measured up to _MOST_ROWS_OF_LARGE.
_MOST_ROWS_ON_CPU = {torch.float32: 4}
_MOST_DECODED_IN_REGISTERS = 96  # rows of float32 there: more take several times as long as bitsandbytes' product
FEW_QUANTIZED_ROWS = min(_MOST_ROWS, _MOST_ROWS_ELSEWHERE)  # which are left nowhere
_LARGE, _MOST_ROWS_OF_LARGE = 1 << 27, 64  # 8192 x 28672 at 256 and 512 rows: 1.15 of the layers' own time
ANY_ROWS = sys.maxsize
# torch's product with int4 in tiles decodes it again for each 16 rows. By the least number of elements of a call's
# weights that no kernel of few rows reads, the rows from which on to decode them once takes less time (measured on an
# H200).
_TILES = "int4_tiles"
_LEAST_ROWS_OF_TILES = ((1 << 23, 17), (1 << 20, 33), (0, 129))


def reads_codes_for(x: Tensor) -> bool:
    """True if kernels read quantised weights for so many rows; else, on a CPU, the layers take less time."""
    return x.dtype != torch.float32 or x.is_cuda or is_forced() or _rows_of(x) <= _MOST_DECODED_IN_REGISTERS


def _rows_of(x: Tensor) -> int:
    return x.shape[:-1].numel()


def has_few_rows(x: Tensor) -> bool:
    """True if products of ``x`` with quantised weights take less time where the weights are read packed."""
    return _rows_of(x) <= _FEW_ROWS


def instead_of_native(op: str, x: Tensor, rows: float) -> Optional[ModuleType]:
    """The backend that takes ``op`` on ``x``, of so many rows a weight, where the compiled op refuses other operands.

    None is for the parts of the call, one by one.
    """
    measured = op == "experts_mlp" and x.is_cuda and x.dtype != torch.float32 and rows <= _TRITON_EXPERTS_ROWS
    if not measured or _open_blocks[-1].name != "auto" or triton.refusal(op, x) is not None:
        return None
    return triton if native.is_hopper(x) else None


def op_or_parts(op: Callable[..., _T], given: Sequence[Any], parts: Callable[[], _T]) -> _T:
    """``op(*given)``; where a function of torch's fails in it, ``parts()``: the same by torch's operations.

    Behind torch's stable ABI an error has neither its class nor its reason. The parts raise it with both, as where
    memory runs out, or find the room that the op did not.
    """
    if torch.compiler.is_compiling():  # a graph runs no Python
        return op(*given)
    try:
        return op(*given)
    except RuntimeError as error:
        if _TORCH_FAILED not in str(error):
            raise
    return parts()


_TORCH_FAILED = " API call failed at "  # what torch's headers say of it


def reasoned(op: str, x: Tensor, recorded: Optional[int] = None) -> Tuple[str, str]:
    """Name of the backend that :func:`select` takes, and why, in a sentence."""
    forced = _open_blocks[-1].name
    if forced != "auto":
        select(op, x)
        return forced, "forced by backend()"
    if is_too_small(op, x, recorded):
        return "torch", f"autograd records fewer than {LEAST_RECORDED[x.dtype][op]} elements"
    refusals = []
    for name in _AUTO:
        reason = _BACKENDS[name].refusal(op, x)
        if reason is None:
            reason = _reserve(op, _BACKENDS[name], x)
        if reason is None:
            return name, "; ".join(refusals) or "first choice for this device and dtype"
        refusals.append(f"not {name}: {reason}")
    return "torch", "; ".join(
        refusals
    ) or "the Triton kernels have not been run on such GPUs: backend('triton') takes them"


def _reserve(op: str, implementation: ModuleType, x: Tensor) -> Optional[str]:
    """The reason why a backend that takes ``op`` on ``x`` is left to those who force it, or None."""
    if op != "experts_mlp" or not x.is_cuda:
        return None
    if implementation is native:
        return None if native.has_experts(x) else "it has no kernels of experts for this GPU"
    return "not measured yet"


def is_too_small(op: str, x: Tensor, recorded: Optional[int]) -> bool:
    """True if a call that autograd records takes less time by its parts: ``recorded`` is as for :func:`select`."""
    # A compiled graph runs no Python, and would be compiled anew for the other side of the bound.
    if recorded is None or not x.is_cpu or torch.compiler.is_compiling():
        return False
    return recorded < LEAST_RECORDED.get(x.dtype, {}).get(op, 0)


def is_small_product(gate: Tensor) -> bool:
    """True if ``act(gate) * up`` takes less time as two operations of torch."""
    least = LEAST_PRODUCT.get(gate.dtype, 0)
    least = max(least, LEAST_RECORDED_PRODUCT) if least and gate.requires_grad else least
    return gate.numel() < least and _open_blocks[-1].name == "auto"


def _forced_refusal(name: str, op: str, x: Tensor) -> Optional[str]:
    if name not in _BACKENDS:
        return f"this build holds {native.DEVICE_TYPE or 'Triton'} kernels"
    return _BACKENDS[name].refusal(op, x)
