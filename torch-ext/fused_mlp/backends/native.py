"""The compiled ops of this build: CUDA C++ in a ``cuda`` variant, C++ in a ``cpu`` variant."""

from __future__ import annotations

import functools
import json
from typing import Any, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from .. import _ops, operands
from .._ops import ops
from . import BUILT_FOR, fakes, plans

DEVICE_TYPE: str = BUILT_FOR["type"]  # "cuda" or "cpu"

_DTYPES = {
    "cuda": (torch.bfloat16, torch.float16, torch.float32),
    "cpu": (torch.bfloat16, torch.float32),
}[DEVICE_TYPE]

act_and_mul = ops.act_and_mul.default
act_and_mul_backward = ops.act_and_mul_backward.default
linear = ops.linear.default
gated_linear = ops.gated_linear.default
gated_mlp = ops.gated_mlp.default
mlp = ops.mlp.default
mm = ops.mm.default
residual_mlp = ops.residual_mlp.default
residual_gated_mlp = ops.residual_gated_mlp.default
training_forward = ops.training_forward.default
graph_training_forward = ops.graph_training_forward.default
training_backward = ops.training_backward.default
training_backward_ = ops.training_backward_.default
norm_forward = ops.norm_forward.default
sum_norm_forward = ops.sum_norm_forward.default
norm_backward = ops.norm_backward.default
projections_forward = ops.projections_forward.default
projections_backward = ops.projections_backward.default
rotary = ops.rotary.default
experts_mlp = ops.experts_mlp.default
top_k_router = ops.top_k_router.default
sigmoid_router = ops.sigmoid_router.default
adapted_experts = ops.adapted_experts.default
quantized_experts = ops.quantized_experts.default
decoded_experts = ops.decoded_experts.default
experts_training_forward = ops.experts_training_forward.default
experts_training_backward = ops.experts_training_backward.default
experts_training_backward_ = ops.experts_training_backward_.default
adapted_forward = ops.adapted_forward.default
adapted_backward = ops.adapted_backward.default
quantized_decode = ops.quantized_decode.default
quantized_linear = ops.quantized_linear.default
quantized_mlp = ops.quantized_mlp.default

# The extension as a Python module, with the checks it makes on torch modules (torch-ext/calls/plain_modules.h).
plain_modules = getattr(_ops, ops.name)


def refusal(op: str, x: Tensor) -> Optional[str]:
    """Return why no compiled op takes a call on ``x``: its device, its dtype, or a GPU the build has no code for."""
    if not (x.is_cuda if DEVICE_TYPE == "cuda" else x.is_cpu):  # several times as fast as comparing x.device.type
        return f"this build holds {DEVICE_TYPE} kernels and x is on {x.device.type}"
    if x.dtype not in _DTYPES:
        return f"no {DEVICE_TYPE} kernel for {x.dtype}"
    if DEVICE_TYPE == "cpu":
        return operands.NARROWED if op != "act_and_mul" and operands.is_narrowed(x) else None
    # Dynamo traces through a cached function and warns about it.
    return (_gpu_refusal if torch.compiler.is_compiling() else _cached_gpu_refusal)(x.get_device())


def reads(weight: Tensor) -> bool:
    """True if a kernel of this build reads a weight without a copy; GPU kernels need rows of adjacent elements."""
    return DEVICE_TYPE == "cpu" or weight.stride(1) == 1 or weight.shape[1] == 1


def reads_codes_on_tiles() -> bool:
    """True if this CPU has tiles on which quantised weights are multiplied without decoding them first."""
    if DEVICE_TYPE != "cpu":
        return False
    x, weight = torch.empty(64, 32, dtype=torch.bfloat16), torch.empty(32, 32, dtype=torch.int8)
    operands_given = [weight, torch.ones(32), None, None, None], [32, 32, 1, 32, 1], [None], 0, False
    return all(part.kernel == "amx" for part in plan_quantized(("linear",), x, *operands_given))


def is_hopper(x: Tensor) -> bool:
    """True if ``x`` is on a Hopper GPU, where the expert kernels were measured and support adapters."""
    return _capability_of(x) == (9, 0)


def has_experts(x: Tensor) -> bool:
    """True if ``x`` is on a GPU that the expert kernels support, as in cuda/sm80/gemm.cpp."""
    major, minor = _capability_of(x)
    return major in (8, 12) or (major, minor) == (9, 0)


def _capability_of(x: Tensor) -> Tuple[int, int]:
    ask = torch.cuda.get_device_capability if torch.compiler.is_compiling() else _cached_capability
    return ask(x.get_device())


class ExpertsCall(NamedTuple):
    """The operands of ``experts_mlp`` that decide how it is computed, or, if ``trained``, how its forward and backward
    ops are."""

    x: Tensor
    top_k_index: Tensor
    gate_up_weight: Tensor
    down_weight: Tensor
    interleaved: bool
    transposed: bool
    trained: bool = False

    def record(self) -> str:
        ask, top_k = ops.plan_experts.default, self.top_k_index.shape[-1]
        return ask(self.x, self.gate_up_weight, self.down_weight, top_k, self.transposed, self.trained)


def experts_refusal(call: ExpertsCall) -> Optional[str]:
    """Return the code in ``plans.REFUSALS`` of why ``experts_mlp`` refuses operands that :func:`refusal` accepts.

    Either the op would raise, as in cuda/experts/experts.cpp (repeated here because it has to be known for traced
    tensors too), or it would be slower than its parts. The kernels of the GPU's architecture decide the latter, unless
    the call is compiled.
    """
    x, top_k_index, gate_up_weight, down_weight, interleaved, transposed, trained = call
    if DEVICE_TYPE == "cpu":
        return None
    if not has_experts(x):
        return "gpu"
    if x.dtype == torch.float32:
        return "float32"
    if top_k_index.numel() == 0:
        return "empty"
    if gate_up_weight.shape[0] > _MOST_EXPERTS or top_k_index.numel() >= _MOST_SLOTS:
        return "many_experts"
    for weight, step in ((gate_up_weight, 2 if interleaved and not trained else 1), (down_weight, 1)):
        experts, features, width = weight.shape
        if features * width == 0:
            return "empty"
        if features % 8 or width % 8:
            return "odd_features"
        if transposed and not trained and features % 64:
            return "odd_inputs"
        of_expert, of_row, of_column = weight.stride()
        if of_column != 1:
            return "column_major_weight"
        rows = features if experts == 1 else of_expert // of_row if of_row else 0
        step = 1 if transposed else step
        if of_row % 8 or of_row < width or rows < features or rows % step or (experts > 1 and of_expert % of_row):
            return "unaligned_rows"
        if experts * rows >= _MOST_ROWS:
            return "too_large"
    transposed_alone = transposed and not trained
    if torch.compiler.is_compiling():  # a graph runs no Python and serves any number of rows
        is_left = transposed_alone and is_hopper(x) and has_many_rows(top_k_index, gate_up_weight)
        return "many_rows" if is_left else None
    if is_hopper(x) and not transposed_alone:  # Hopper's kernels are faster for any number of rows
        return None
    return json.loads(call.record())[0].get("refusal")


# These match cuda/experts/experts.cpp and cuda/gemm/grouped.h.
_MOST_SLOTS, _MOST_EXPERTS = 2**24, 512
_MOST_ROWS = 2**31 - 1 - 1024
# Average number of rows per expert, as in cuda/sm90/grouped/grouped.cpp.
_MOST_TRANSPOSED_ROWS = 32


def has_many_rows(top_k_index: Tensor, gate_up_weight: Tensor) -> bool:
    """True if a Hopper GPU leaves transposed weights to torch's GEMMs."""
    most = _MOST_TRANSPOSED_ROWS * (gate_up_weight.shape[0] if gate_up_weight.dim() == 3 else 0)
    return DEVICE_TYPE == "cuda" and top_k_index.numel() > most


def chooses_experts(x: Tensor) -> bool:
    """True if a time model of the GPU, which has to be queried first, decides between ``experts_mlp`` and its parts."""
    return DEVICE_TYPE == "cuda" and not is_hopper(x)


def _gpu_refusal(device_index: int) -> Optional[str]:
    major, minor = torch.cuda.get_device_capability(device_index)
    for arch in BUILT_FOR["archs"]:
        number = arch.replace("+PTX", "")
        arch_major, arch_minor = (int(part) for part in number.rstrip("af").split("."))
        exact = number.endswith("a")
        if (major, minor) == (arch_major, arch_minor):
            return None
        if not exact and major == arch_major and minor > arch_minor:
            return None
        if arch.endswith("+PTX") and (major, minor) > (arch_major, arch_minor):
            return None
    return f"GPU of compute capability {major}.{minor}, built for {', '.join(BUILT_FOR['archs'])}"


_cached_gpu_refusal = functools.cache(_gpu_refusal)


def takes_every_gpu() -> bool:
    """True if the ops run on all GPUs visible to this process."""
    return all(_cached_gpu_refusal(index) is None for index in range(torch.cuda.device_count()))


_cached_capability = functools.cache(torch.cuda.get_device_capability)


def plan(layers: Sequence[str], x: Tensor, *rest: Any) -> Tuple[plans.Part, ...]:
    """Return the plan by which the compiled ops compute a call, per named layer; arguments as for the op ``plan``."""
    return plans.parsed(ops.plan.default(x, *rest), layers)


def least_recorded(dtype: torch.dtype) -> int:
    """Return the least number of hidden values at which an op trains faster than its parts on a CPU."""
    return ops.least_recorded.default(torch.empty(0, dtype=dtype))


def plan_training(given: Sequence[Optional[Tensor]], activation: int, keep: bool) -> Tuple[plans.Part, ...]:
    """Return the plan for the GEMMs of ``training_forward`` and its backward.

    On a GPU it covers the GEMMs that a pointwise step accompanies; on a CPU, those that are not torch's.
    """
    _, _, up_weight, second_weight, *_ = given
    first = "gate and up" if up_weight is not None else "linear" if second_weight is None else "fc1"
    layers = [first] if keep else []
    record = ops.plan_training.default(*given[:6], activation, keep)
    if DEVICE_TYPE == "cpu":
        return tuple(part for part in plans.parsed(record, [*layers, "products of the backward"]) if part.fused)
    layers += ["gradients before the activation"] if second_weight is not None else []
    layers += ["gradient of x"] if up_weight is not None else []
    return plans.parsed(record, layers)


def plan_experts(call: ExpertsCall) -> Tuple[plans.Part, ...]:
    """Return the plan for ``experts_mlp``, or for its training ops if ``call.trained``."""
    layers, refused = ("gate and up", "down"), experts_refusal(call)
    if refused is not None:
        return tuple(plans.Part(layer, "torch", refused) for layer in layers)
    return plans.parsed(call.record(), layers)


def plan_quantized_experts(x: Tensor, *rest: Any) -> Tuple[plans.Part, ...]:
    """Return the plan for ``quantized_experts``; arguments as for the op ``plan_quantized_experts``."""
    return plans.parsed(ops.plan_quantized_experts.default(x, *rest), ("gate and up", "down"))


def plan_quantized(layers: Sequence[str], x: Tensor, *rest: Any) -> Tuple[plans.Part, ...]:
    """Return the plan for layers with quantised weights; arguments as for the op ``plan_quantized``."""
    return plans.parsed(ops.plan_quantized.default(x, *rest), layers)


fakes.register()
