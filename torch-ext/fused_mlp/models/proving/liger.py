"""Liger's activation products: autograd functions over Triton kernels, whose source is not analysed here.

A function is identified by its name and by a hash of its source file.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
from types import FunctionType
from typing import Any, Dict, Iterator, Optional, Tuple

from ..reading.attributes import name_of_class
from . import operations
from .values import Node

_ACTIVATIONS: Dict[str, Tuple[str, Dict[str, str]]] = {
    "liger_kernel.ops.swiglu.LigerSiLUMulFunction": ("silu", {}),
    "liger_kernel.ops.geglu.LigerGELUMulFunction": ("gelu", {"approximate": "tanh"}),
}
# Hashes of these files, each with the first version that contains it.
_DIGESTS = {
    "0fb9dde2efcb227c": "0.6",
    "5d55bd62ea4e9e22": "0.8.0",
    "bb2d719649ccf868": "0.8.2",
    "7397029e8fefac0d": "0.8.4",
    "af4592abd13ddf3c": "0.6",
    "fabb8c0020ec147d": "0.6.5",
    "c868f150d58fe1ff": "0.8.2",
}


def applied(kind: type, args: Tuple[Any, ...]) -> Optional[Node]:
    """Return the value that ``kind.apply(*args)`` computes; None if it is unknown.

    Both functions are ``act(gate * gate_multiplier) * up * down_multiplier``; the multipliers default to one.
    """
    found = _ACTIVATIONS.get(name_of_class(kind))
    is_known = found is not None and 2 <= len(args) <= 4 and all(isinstance(each, Node) for each in args[:2])
    if not is_known or digest(kind) not in _DIGESTS or not all(type(each) in (int, float) for each in args[2:]):
        return None
    if any(value.__module__ != kind.__module__ for _, _, value in rests_on(kind)):
        return None  # patched
    gate, up, gate_multiplier, down_multiplier = (*args, 1.0, 1.0)[:4]
    name, options = found
    activated = operations.applied(name, (Node("mul", (gate, gate_multiplier)),), options)
    return Node("mul", (Node("mul", (activated, up)), down_multiplier))


def rests_on(kind: type) -> Iterator[Tuple[Any, str, Any]]:
    """Yield the owners, names and values of the attributes that the result depends on."""
    for name in ("forward", "backward"):
        method = getattr(kind, name)
        yield kind, name, method
        code, names = inspect.unwrap(method).__code__, vars(sys.modules[kind.__module__])
        yield from ((names, each, names[each]) for each in code.co_names if type(names.get(each)) is FunctionType)


@functools.cache
def digest(kind: type) -> str:
    """Return a hash of the source of the file that defines a class."""
    try:
        source = inspect.getsource(sys.modules[kind.__module__])
    except (OSError, TypeError):
        return ""
    return hashlib.sha256(source.encode()).hexdigest()[:16]
