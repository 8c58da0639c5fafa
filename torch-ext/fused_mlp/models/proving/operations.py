"""The supported torch operations, with one canonical name and argument order for each."""

from __future__ import annotations

import builtins
import inspect
import math
from types import FunctionType
from typing import Any, Dict, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .values import Node, NotProved

# Their names in torch, in F or as methods, with their parameters. The first parameter of a method is the tensor itself.
_SIGNATURES = """
    abs(input) add(input, other, alpha=1) amax(input, dim, keepdim=False) bfloat16(input) bmm(input, mat2) bool(input)
    cat(tensors, dim=0) celu(input, alpha=1.0, inplace=False) chunk(input, chunks, dim=0)
    clamp(input, min=None, max=None) clamp_max(input, max) clamp_min(input, min) clone(input) contiguous(input)
    cos(input) detach(input) div(input, other) double(input) elu(input, alpha=1.0, inplace=False) eq(input, other)
    erf(input) erfc(input) exp(input) expand(input, *sizes) expm1(input) flatten(input, start_dim=0, end_dim=-1)
    float(input) gather(input, dim, index, sparse_grad=False) ge(input, other) gelu(input, approximate='none')
    greater(input, other) gt(input, other) half(input) hardsigmoid(input, inplace=False)
    hardswish(input, inplace=False) hardtanh(input, min_val=-1.0, max_val=1.0)
    index_add(input, dim, index, source, alpha=1) index_select(input, dim, index) item(input)
    layer_norm(input, normalized_shape, weight=None, bias=None, eps=1e-05) le(input, other)
    leaky_relu(input, negative_slope=0.01, inplace=False) linear(input, weight, bias=None) log1p(input)
    logsigmoid(input) lt(input, other) matmul(input, other) maximum(input, other) minimum(input, other)
    masked_fill(input, mask, value) mean(input, dim=None, keepdim=False, dtype=None) mish(input, inplace=False)
    mm(input, other) mul(input, other) multiply(input, other) ne(input, other) neg(input)
    nonzero(input, as_tuple=False) numel(input) one_hot(input, num_classes=-1) permute(input, *dims)
    pow(input, exponent) reciprocal(input) relu(input, inplace=False) relu6(input, inplace=False)
    reshape(input, *shape) rsqrt(input) scatter(input, dim, index, src) selu(input, inplace=False) sigmoid(input)
    silu(input, inplace=False) sin(input) size(input, dim=None) softmax(input, dim=None, dtype=None)
    softplus(input, beta=1.0, threshold=20.0) softsign(input) split(input, split_size_or_sections, dim=0) sqrt(input)
    square(input) squeeze(input, dim=None) sub(input, other, alpha=1) sum(input, dim=None, keepdim=False, dtype=None)
    t(input) tanh(input) tanhshrink(input) to(input, dtype) topk(input, k, dim=-1, largest=True, sorted=True)
    transpose(input, dim0, dim1) type(input, dtype) type_as(input, other) unsqueeze(input, dim) view(input, *shape)
    where(condition, input=None, other=None) zeros_like(input, dtype=None, device=None)
"""
_METHODS_ALONE = {"bfloat16", "bool", "contiguous", "double", "float", "half", "item", "numel", "size", "to", "type"}
_METHODS_ALONE |= {"type_as", "view"}

_SAME = {"multiply": "mul", "greater": "gt", "mm": "matmul"}
VIEWS = {"view", "reshape", "chunk", "item of", "getitem", "permute", "transpose", "t", "squeeze", "unsqueeze", "to"}
VIEWS |= {"contiguous", "detach", "expand", "flatten", "split"}
TUPLES = {"chunk", "split", "where", "topk", "shape"}  # operations that return several tensors or numbers
NUMBERS = {math.sqrt, math.exp, math.log, math.pow, builtins.float, builtins.int, builtins.abs, builtins.max}
NUMBERS |= {builtins.min, builtins.round, math.erf, math.tanh}


def _signatures() -> Dict[str, inspect.Signature]:
    found = {}
    for text in _SIGNATURES.replace("\n", " ").replace(") ", ")\n").splitlines():
        name, _, parameters = text.strip().partition("(")
        if name:
            found[name] = inspect.signature(eval(f"lambda {parameters[:-1]}: None"))
    return found


SIGNATURES = _signatures()


def _is_of_torch(function: Any) -> bool:
    """True if a function is torch's own and not patched."""
    if not isinstance(function, FunctionType):
        return inspect.isbuiltin(function)
    return function.__globals__.get("__name__", "").startswith("torch.") and not hasattr(function, "__wrapped__")


FUNCTIONS: Dict[Any, str] = {
    getattr(owner, name): name
    for name in SIGNATURES
    if name not in _METHODS_ALONE
    for owner in (torch, F, torch.special)
    if hasattr(owner, name) and _is_of_torch(getattr(owner, name))
}
METHODS = {name: getattr(Tensor, name) for name in SIGNATURES if hasattr(Tensor, name)}


def applied(name: str, args: Tuple[Any, ...], options: Dict[str, Any]) -> Node:
    """Return the node of an operation, however its arguments are passed.

    Raises:
        NotProved: an argument is not supported, or the operation is in-place.
    """
    try:
        given = SIGNATURES[name].bind(*args, **options)
    except TypeError:
        raise NotProved(f"unknown arguments of {name}") from None
    given.apply_defaults()
    values = dict(given.arguments)
    if values.pop("inplace", False) is not False:
        raise NotProved(f"{name} in place")
    listed = next((word for word in ("dims", "shape", "sizes") if word in values), None)
    if listed is not None and len(values[listed]) == 1 and isinstance(values[listed][0], (tuple, list)):
        values[listed] = tuple(values[listed][0])
    return _simplified(_SAME.get(name, name), tuple(map(_frozen, values.values())))


def _simplified(name: str, args: Tuple[Any, ...]) -> Node:
    """Return a canonical node for operations with several spellings, such as casts and clamps; reject multiples."""
    if name == "type":
        return Node("to", args)
    if name in ("float", "double", "half", "bfloat16", "bool"):
        return Node("to", (args[0], getattr(torch, "float32" if name == "float" else name)))
    if name == "type_as":
        return Node("to", (args[0], Node("dtype", (args[1],))))
    if name in ("clamp_max", "clamp_min"):
        return Node("clamp", (args[0], *((None, args[1]) if name == "clamp_max" else (args[1], None))))
    if name in ("add", "sub") and args[2] != 1:
        raise NotProved(f"{name} with alpha")
    if name in ("add", "sub"):
        return Node(name, args[:2])
    if name == "t":
        return Node("transpose", (args[0], 0, 1))
    if name == "size":
        return Node("shape", args[:1]) if args[1] is None else Node("size", args)
    if name == "item":
        return Node("scalar", args)
    if name == "nonzero" and args[1] is not False:
        return Node("where", (args[0], None, None))
    return Node(name, args)


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, (tuple, list)) else value


def operation_of(function: Any) -> Optional[str]:
    """Return the name of a supported torch function."""
    try:
        return FUNCTIONS.get(function)
    except TypeError:  # not hashable
        return None
