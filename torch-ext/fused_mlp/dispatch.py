"""Choice of a backend for a call, and the reason for it."""

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

# Preference order, as measured: the compiled ops win wherever they exist; Triton kernels serve GPUs that the build has
# no code for. Kernels that never ran on a kind of GPU, such as all in a build without compiled ops, must be forced.
_AUTO: Tuple[str, ...] = {"cuda": ("cuda", "triton"), "cpu": ("cpu",), None: ()}[native.DEVICE_TYPE]
_AUTO_BACKENDS = tuple(_BACKENDS[name] for name in _AUTO)

# Largest average number of rows per expert at which Triton's expert kernels were measured to beat torch's grouped GEMM,
# on a Hopper GPU. Unlike the compiled kernels, they accept weights of every layout.
_TRITON_EXPERTS_ROWS = 8

NEVER = 1 << 62  # larger than any number of elements

# Least number of elements of the hidden values at which these ops pay under autograd on a CPU, as measured: each op
# costs an autograd node written in Python.
LEAST_RECORDED: Dict[torch.dtype, Dict[str, int]] = {
    dtype: {
        "act_and_mul": 1 << 18,
        **dict.fromkeys(("linear", "mlp", "gated_linear", "gated_mlp"), native.least_recorded(dtype)),
    }
    for dtype in native._DTYPES
    if native.DEVICE_TYPE == "cpu"
}

# On a GPU, such a node costs more host time than it saves, and small models are host-bound. The key is (gated, in eval
# mode); in eval mode, likely no backward follows to make up for the node. The value is the least number of
# multiplications in the first layer at which an op pays; 2^34 take 50 us at 700 TFLOP/s. The count is multiplied by
# WORK_OF_MANY if the op replaces more: no gate, and an activation of several operations or a norm of the residual sum
# after the MLP. Compiled code uses this table too.
LEAST_WORK: Dict[Tuple[bool, bool], int] = (
    {(False, False): 1 << 34, (False, True): 1 << 36, (True, False): 1 << 30, (True, True): 1 << 34}
    if native.DEVICE_TYPE == "cuda"
    else {}
)
WORK_OF_MANY = 4

# Under torch.compile, an ungated MLP under autograd with fewer multiplications in its first layer is left to the
# compiler, which also fuses the norm and the residual sum around the MLP; steps that small are host-bound. Just above
# this bound, an op takes 0.90 of the compiler's time on the GPU, and 0.94 to 1.02 of its wall time.
LEAST_COMPILED: int = 1 << 34 if native.DEVICE_TYPE == "cuda" else 0

# Least number of elements at which dropout, residual sum and norm run as one op under autograd. The host takes 1.05 to
# 1.2 of eager's time for it, so it pays only if the GPU is the bottleneck: about where LEAST_WORK begins for MLPs of
# four times the width. It was not measured on a CPU.
LEAST_SUM: Dict[torch.dtype, int] = dict.fromkeys(native._DTYPES, NEVER if native.DEVICE_TYPE == "cpu" else 1 << 22)

# Least number of elements of an input at which its projections run as one autograd node, in training mode only. The
# host takes longer for the node than for three layers. On a CPU, small models took 1.07 to 1.10 of their time with it;
# larger models on a CPU and inference on a GPU were not measured.
LEAST_PROJECTED: int = 1 << 22 if native.DEVICE_TYPE == "cuda" else NEVER

# Least number of elements of a standalone norm in eval mode, where likely no backward follows to make up for its node.
# Inside a model on a CPU, the node costs about as much as the kernel saves at this size.
LEAST_NORM: Dict[torch.dtype, int] = dict.fromkeys(native._DTYPES, 1 << 15) if native.DEVICE_TYPE == "cpu" else {}

# Least number of elements at which one kernel for the activation and its product with up, and nothing else, pays. On a
# GPU the host takes longer to launch it than torch's two operations, and twice as long under autograd, so it pays only
# if the GPU is the bottleneck (benchmarks/models/unfused.py).
LEAST_PRODUCT: Dict[torch.dtype, int] = {
    dtype: 1 << 24 if native.DEVICE_TYPE == "cuda" else 1 << 15 if dtype == torch.bfloat16 else 1 << 16
    for dtype in native._DTYPES
}
LEAST_RECORDED_PRODUCT = 3 << 24 if native.DEVICE_TYPE == "cuda" else 0

# Formats of quantised weights that CPUs with tiles use without being forced.
_ON_TILES = native.DEVICE_TYPE == "cpu" and native.reads_codes_on_tiles()
_ON_CPU = ("nf4", "fp4", "int8")

# Largest number of rows at which layers with four-bit weights and adapters read the weight packed and add the adapter's
# products to the result. With more rows the weight is decoded first, and the adapter is part of the GEMM.
_FEW_ROWS = 64


class _Block:
    """A ``with backend(name)`` block that is open in some thread."""

    def __init__(self, name: str) -> None:
        self.name = name


# The latest block comes last. Appending and removing are atomic, so threads need no lock. This is a plain global
# because torch.compile guards on globals, but not on context variables.
_open_blocks: List[_Block] = [_Block("auto")]


@contextlib.contextmanager
def backend(name: str) -> Iterator[None]:
    """Force an implementation for the calls inside a ``with`` block, in all threads.

    If several blocks are open, nested or in different threads, the one entered last applies. Leaving a block ends only
    that block.

    ``name`` is ``"cuda"`` (compiled CUDA C++), ``"triton"``, ``"cpu"`` (compiled C++), ``"torch"`` (the operations that
    a model written in PyTorch runs) or ``"auto"`` (the default choice). Raises ValueError for any other name; a call
    that the forced implementation does not support also raises ValueError.
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
    """Return the backend module that runs ``op`` on ``x``; ValueError if the forced one refuses it.

    ``recorded`` is the number of elements of the hidden values, or of the result, that autograd records.
    """
    forced = _open_blocks[-1].name
    if forced != "auto":
        reason = _forced_refusal(forced, op, x)
        if reason is not None:
            raise ValueError(f"backend {forced!r} is forced but does not support {op}: {reason}")
        return _BACKENDS[forced]
    for implementation in () if is_too_small(op, x, recorded) else _AUTO_BACKENDS:
        if implementation.refusal(op, x) is None and _reserve(op, implementation, x) is None:
            return implementation
    return reference


def is_native(op: str, x: Tensor) -> bool:
    """True if the compiled ops accept ``op`` on ``x`` and no other implementation is forced."""
    return _open_blocks[-1].name in ("auto", native.DEVICE_TYPE) and native.refusal(op, x) is None


QUANTIZED_DEVICES = {"cuda"}  # fuse layers with quantised weights of every kind, and read these in compiled code


def may_take_quantized() -> bool:
    """True if :func:`quantized_refusal` may accept a layer: this build has kernels that were measured to pay, or it is
    forced."""
    return native.DEVICE_TYPE in QUANTIZED_DEVICES or _ON_TILES or is_forced()


def may_take_tiles() -> bool:
    """True if :func:`quantized_refusal` accepts int4 in tiles on all visible GPUs."""
    return all(torch.cuda.get_device_capability(index) == (9, 0) for index in range(torch.cuda.device_count()))


def may_train_quantized() -> bool:
    """True if layers with quantised weights are fused under autograd or with adapters too.

    On a CPU they are not: they would be decoded, and that was not measured.
    """
    return native.DEVICE_TYPE in QUANTIZED_DEVICES or is_forced()


def may_train_rounded(x: Tensor) -> bool:
    """True if layers whose own GEMM rounds x to int8 are fused in training: only where that was measured to pay."""
    return is_forced() or (x.is_cuda and native.is_hopper(x))


def least_decoded_rows(shape: Sequence[int]) -> int:
    """Return the least number of rows at which decoding a frozen int8 weight in both directions is faster than
    torchao's product, which keeps the decoded weight for the backward: the saving grows with the rows."""
    return 0 if is_forced() else min(shape) // 4


def quantized_refusal(device: torch.device, dtype: torch.dtype, format: str) -> Optional[str]:
    """Return why a layer with a quantised weight runs its own product, as a phrase that follows a noun, or None.

    ``dtype`` is the dtype of the product. CPU kernels were measured against bitsandbytes and torchao on a CPU with
    tiles; for FP8 there is no product on CPUs to compare with.
    """
    return _quantized_refusal(device, dtype, format, is_forced())


@functools.lru_cache(maxsize=64)
def _quantized_refusal(device: torch.device, dtype: torch.dtype, format: str, is_forced: bool) -> Optional[str]:
    is_taken = device.type in QUANTIZED_DEVICES or (device.type == "cpu" and _ON_TILES and format in _ON_CPU)
    if not is_taken and not is_forced:
        return f"on a {'CPU' if device.type == 'cpu' else device.type}, where its own kernel runs"
    if device.type == "cuda" and dtype == torch.float32:
        return "that computes in float32"
    like = torch.empty((), dtype=dtype, device=device)
    if format == _TILES and device.type == "cuda" and not (is_forced or native.is_hopper(like)):
        return "on a GPU other than Hopper, which was not measured"
    reason = native.refusal("quantized_mlp", like)
    return None if reason is None else f"with {reason}"


def layout_refusal(weight: Any) -> Optional[str]:
    """Like :func:`quantized_refusal`, for a four-bit weight no CPU kernel can read; GPUs decode such weights first."""
    width, block = weight.shape[1], weight.block
    if weight.device.type != "cpu" or is_forced():
        return None
    if width % 32 != 0 or (width % block != 0 and block % width != 0):
        return f"with {width} inputs in blocks of {block}, which no kernel supports"
    return None


def blocked_refusal(out: int, width: int, block: Sequence[int]) -> Optional[str]:
    """Like :func:`quantized_refusal`, for a blocked ``[out, width]`` weight no kernel reads; decoding may be slower.

    :func:`most_blocked_rows` gives the number of rows up to which kernels run.
    """
    if width % 64 != 0 or out % 8 != 0:
        return f"of shape [{out}, {width}], which no kernel supports"
    if width > block[1] and block[1] not in (128, 256, 512):
        return f"in blocks of {block[0]} x {block[1]}, which no kernel supports"
    return None


def most_blocked_rows(x: Tensor, weights: Iterable[Any]) -> int:
    """Return the number of rows of ``x`` up to which layers with blocked weights are fused.

    Kernels for few rows use x as it is. On Hopper, kernels for more rows round x to FP8 if the layers' own products do,
    and int8 weights are decoded first; other GPUs have no kernels for more rows.
    """
    weights = list(weights)
    if any(weight.format == _TILES for weight in weights):
        return ANY_ROWS
    is_rounded = all(map(_may_round_rows, weights))
    return min(most_rows_of_size(x, weight.format == "int8", is_rounded, weight.numel()) for weight in weights)


def least_blocked_rows(weights: Iterable[Any]) -> int:
    """Return the number of rows from which layers with blocked weights are fused: tiled int4 that no few-row kernel
    reads (see cuda/quantized/choice.cpp) is decoded first."""
    tiles = [weight for weight in weights if weight.format == _TILES]
    if is_forced() or all(map(_may_stream, tiles)):
        return 0
    elements = sum(math.prod(weight.shape) for weight in tiles)
    return next(rows for least, rows in _LEAST_ROWS_OF_TILES if elements >= least)


def _may_stream(weight: Any) -> bool:
    """True for tiled int4 that the few-row kernels read."""
    width, group = weight.shape[1], weight.block[1]
    blocks = group // 64
    return width % 64 == 0 and (group >= width or (group % 64 == 0 and blocks & (blocks - 1) == 0))


def most_rows_of_size(x: Tensor, is_int8: bool, is_rounded: bool, elements: int) -> int:
    """Like :func:`most_blocked_rows` for int8 or FP8, by a weight's size: decoding a large int8 weight takes longer
    than bitsandbytes' product. Compiled code calls this too."""
    by_size = _MOST_ROWS_OF_LARGE if is_int8 and elements >= _LARGE else ANY_ROWS
    return min(most_rows_of("int8" if is_int8 else "fp8", x, is_rounded), by_size)


def most_rows_of(format: str, x: Tensor, is_rounded: bool = True) -> int:
    """Like :func:`most_blocked_rows`, for one format; ``is_rounded`` says that x may be rounded to that format."""
    if not x.is_cuda:
        return _MOST_ROWS if is_forced() else _MOST_ROWS_ON_CPU.get(x.dtype, _MOST_ROWS_OF_LARGE)
    if format == _TILES:
        return ANY_ROWS
    if not native.is_hopper(x):
        return _MOST_ROWS_ELSEWHERE
    return ANY_ROWS if format == "int8" or is_rounded else _MOST_ROWS


def _may_round_rows(weight: Any) -> bool:
    """True for the ``QuantizedWeight`` of a layer that rounds x, if Hopper multiplies it in FP8, as
    cuda/quantized/choice.cpp decides."""
    rows = weight.block[0]
    return weight.fast is not None and (rows == 1 or rows % 128 == 0 or rows >= weight.shape[0])


def is_forced() -> bool:
    """True if the compiled ops of this build are forced."""
    return _open_blocks[-1].name == native.DEVICE_TYPE


# Measured on an H200 against torch's FP8 products; GPUs that do not round x are bound by the bytes of the weights.
_MOST_ROWS, _MOST_ROWS_ELSEWHERE = 32, 16
# Measured on a Xeon, int8 against bitsandbytes, whose products of rounded x are faster for more rows of float32.
# bfloat16 was measured up to _MOST_ROWS_OF_LARGE.
_MOST_ROWS_ON_CPU = {torch.float32: 4}
_MOST_DECODED_IN_REGISTERS = 96  # rows of float32 on a CPU: more take several times as long as in bitsandbytes
FEW_QUANTIZED_ROWS = min(_MOST_ROWS, _MOST_ROWS_ELSEWHERE)  # fused everywhere
_LARGE, _MOST_ROWS_OF_LARGE = 1 << 27, 64  # 8192 x 28672 at 256 and 512 rows took 1.15 of the layers' own time
ANY_ROWS = sys.maxsize
# torch's GEMM decodes tiled int4 again for each 16 rows. Each pair holds the least number of elements of a call's
# weights that no few-row kernel reads, and the number of rows from which decoding once is faster (measured on an H200).
_TILES = "int4_tiles"
_LEAST_ROWS_OF_TILES = ((1 << 23, 17), (1 << 20, 33), (0, 129))


def reads_codes_for(x: Tensor) -> bool:
    """True if kernels read quantised weights for the rows of ``x``; else, on a CPU, the layers' own are faster."""
    return x.dtype != torch.float32 or x.is_cuda or is_forced() or _rows_of(x) <= _MOST_DECODED_IN_REGISTERS


def _rows_of(x: Tensor) -> int:
    return x.shape[:-1].numel()


def has_few_rows(x: Tensor) -> bool:
    """True if GEMMs of ``x`` with quantised weights are faster if they read the weights packed."""
    return _rows_of(x) <= _FEW_ROWS


def instead_of_native(x: Tensor, rows: float) -> Optional[ModuleType]:
    """Return the backend for ``experts_mlp`` on ``x`` after the compiled op has refused the other operands.

    ``rows`` is the number of rows per weight. None means that the call is composed of its parts.
    """
    measured = x.is_cuda and x.dtype != torch.float32 and rows <= _TRITON_EXPERTS_ROWS
    if not measured or _open_blocks[-1].name != "auto" or triton.refusal("experts_mlp", x) is not None:
        return None
    return triton if native.is_hopper(x) else None


def op_or_parts(op: Callable[..., _T], given: Sequence[Any], parts: Callable[[], _T]) -> _T:
    """Return ``op(*given)``; if a torch function fails inside it, return ``parts()``, which uses torch's operations.

    Across torch's stable ABI an error loses its class and its reason. The parts raise it with both, for example when
    memory runs out, or succeed with the memory that the op could not get.
    """
    if torch.compiler.is_compiling():  # a compiled graph runs no Python
        return op(*given)
    try:
        return op(*given)
    except RuntimeError as error:
        if _TORCH_FAILED not in str(error):
            raise
    return parts()


_TORCH_FAILED = " API call failed at "  # text that torch's headers add to such errors


def reasoned(op: str, x: Tensor, recorded: Optional[int] = None) -> Tuple[str, str]:
    """Return the name of the backend that :func:`select` chooses, and the reason in words."""
    forced = _open_blocks[-1].name
    if forced != "auto":
        select(op, x)
        return forced, "forced by backend()"
    if is_too_small(op, x, recorded):
        return "torch", f"fewer than {LEAST_RECORDED[x.dtype][op]} elements to record"
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
    ) or "the Triton kernels are untested on this kind of GPU: backend('triton') forces them"


def _reserve(op: str, implementation: ModuleType, x: Tensor) -> Optional[str]:
    """Return why a backend that accepts ``op`` on ``x`` is used only if forced, or None."""
    if op != "experts_mlp" or not x.is_cuda:
        return None
    if implementation is native:
        return None if native.has_experts(x) else "no experts kernels for this GPU"
    return "not measured yet"


def is_too_small(op: str, x: Tensor, recorded: Optional[int]) -> bool:
    """True if a recorded call is faster as separate parts; ``recorded`` is as in :func:`select`."""
    # A compiled graph runs no Python, and the bound would make it recompile.
    if recorded is None or not x.is_cpu or torch.compiler.is_compiling():
        return False
    return recorded < LEAST_RECORDED.get(x.dtype, {}).get(op, 0)


def is_small_product(gate: Tensor) -> bool:
    """True if ``act(gate) * up`` is faster as two torch operations."""
    least = LEAST_PRODUCT.get(gate.dtype, 0)
    least = max(least, LEAST_RECORDED_PRODUCT) if least and gate.requires_grad else least
    return gate.numel() < least and _open_blocks[-1].name == "auto"


def _forced_refusal(name: str, op: str, x: Tensor) -> Optional[str]:
    if name not in _BACKENDS:
        return f"this build has only {native.DEVICE_TYPE or 'Triton'} kernels"
    return _BACKENDS[name].refusal(op, x)
