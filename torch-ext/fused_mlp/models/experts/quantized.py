"""transformers' FP8Experts: experts whose weights are FP8 stacks, read in place.

The class is identified by name and by its source, like FP8Linear (``parts/quantized.py``); its gate is proved like that
of other experts (``proofs``). The state of a module is read at each call.
"""

from __future__ import annotations

import functools
import sys
from types import CodeType, FunctionType
from typing import Any, Iterator, Optional, Tuple, Union

import torch
from torch import nn

from ... import dispatch
from ...quantized import experts as quantized_experts
from ...quantized.experts import QuantizedStack
from ..parts.guards import are_unchanged
from ..reading.attributes import class_of
from ..reading.digests import codes_of, digest
from ..reading.source import inside

MODULE = "transformers.integrations.finegrained_fp8"
_METHODS = ("_apply_gate", "linear")
_FUNCTIONS = ("_apply_if_grad", "fp8_linear", "finegrained_fp8_linear", "fp8_grouped_matmul")
_FUNCTIONS += ("fp8_batched_mm_experts_forward", "fp8_grouped_mm_experts_forward")
_RECORDED = ("FP8LinearFunction", "FP8GroupedMatmulFunction")
# Hashes of the source of all these and of the loop over the experts, each with the first version that contains it.
_DIGESTS = {"0b8954cb93de279c": "5.22", "d693eb3f1f0ea271": "5.23"}

Guarded = Tuple[Tuple[Any, str, Any], ...]


def is_read(module: nn.Module) -> bool:
    """True for a module whose FP8 weights are understood."""
    return known(class_of(module)) is not None


@functools.lru_cache(maxsize=64)
def known(kind: type) -> Optional[Guarded]:
    """Return the attributes that FP8Experts depends on, if a class is FP8Experts with known source; None otherwise."""
    if kind.__module__ != MODULE or kind.__qualname__ != "FP8Experts" or digest_of(kind) not in _DIGESTS:
        return None
    home = sys.modules[MODULE]
    of_home = ((home, name, getattr(home, name)) for name in (*_FUNCTIONS, *_RECORDED))
    return (*((kind, name, getattr(kind, name)) for name in _METHODS), *of_home)


def digest_of(kind: type) -> Optional[str]:
    """Return a hash of the source that a call of FP8Experts runs; None if there is none."""
    return digest(_codes(kind))


def _codes(kind: type) -> Iterator[Optional[CodeType]]:
    home, forward = sys.modules[MODULE], kind.forward
    while inside(forward) is not None:  # one decorator per module that was made
        forward = inside(forward)
    yield getattr(forward, "__code__", None)
    yield from codes_of(kind, _METHODS)
    for name in _FUNCTIONS:
        found = getattr(home, name, None)
        yield found.__code__ if isinstance(found, FunctionType) else None
    for name in _RECORDED:
        yield from codes_of(getattr(home, name, object), ("forward", "backward"))


def refusal(module: nn.Module, weights: Any) -> Optional[str]:
    """Return the reason why the weights of a module are not read in its present state; None if they are."""
    found = stacks_of(module, weights)
    return found if isinstance(found, str) else None


def stacks_of(module: nn.Module, weights: Any) -> Union[str, Tuple[QuantizedStack, QuantizedStack]]:
    """Return both stacks of a module by the names of its weights; or a noun phrase for why they are not read."""
    if not are_unchanged(known(class_of(module))):
        return "a patched FP8Experts"
    state = module.__dict__
    if state.get("activation_scheme") != "dynamic":
        return "activation scales"
    found = []
    for name in (weights.up, weights.down):
        stack = _stack(state, name)
        if isinstance(stack, str):
            return stack
        found.append(stack)
    return tuple(found)


def _stack(state: Any, name: str) -> Union[str, QuantizedStack]:
    held, block = state["_parameters"], state.get("block_size")
    weight, scales = held.get(name), held.get(f"{name}_scale_inv")
    if type(weight) is not nn.Parameter or type(scales) is not nn.Parameter or not held.keys().isdisjoint(state):
        return "a weight that is not a parameter"
    if weight.dtype is not torch.float8_e4m3fn or scales.dtype is not torch.float32:
        return f"a weight of {weight.dtype} with scales of {scales.dtype}"
    if block is None or len(block) != 2 or min(block) < 1:
        return "a per-tensor scale"
    experts, out, width = weight.shape
    grid = experts, -(-out // block[0]), -(-width // block[1])
    if scales.shape != grid or not (weight.is_contiguous() and scales.is_contiguous()):
        return "weights in an unrecognised form"
    if weight.device != scales.device:
        return "scales on another device"
    return QuantizedStack(weight.detach(), scales.detach(), (experts, out, width), "fp8", tuple(block))


def device_refusal(stacks: Tuple[QuantizedStack, QuantizedStack], form: Any, rows: int = 1) -> Optional[str]:
    """Return the reason why transformers' own products run calls with this many rows on a device; None if they do
    not."""
    device = stacks[0].device
    reason = dispatch.quantized_refusal(device, torch.bfloat16, "fp8")
    if reason is not None or dispatch.is_forced():
        return None if reason is None else f"weights in FP8 {reason}"
    x = torch.empty((1, stacks[0].shape[2]), dtype=torch.bfloat16, device=device)
    one = torch.empty((1, 1), dtype=torch.int64, device=device), torch.empty((1, 1), device=device)
    routing = (each.expand(rows, 1) for each in one)
    return quantized_experts.refusal((x, *routing, *stacks, None, None), form)


def words_of(module: nn.Module, weights: Any, form: Any) -> str:
    """Return the report's words for FP8 weights, which follow the pattern of experts; empty for other weights."""
    if not is_read(module):
        return ""
    stacks, most = stacks_of(module, weights), quantized_experts.MOST_ROWS["fp8"]
    more = None if isinstance(stacks, str) else stacks[0].shape[0] * most + 1
    has_limit = more is None or device_refusal(stacks, form, more) is not None
    return f" in fp8 up to {most} rows per expert" if has_limit else " in fp8"
