"""The experts interface of transformers: the classes that it decorates, and the implementations that it selects."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
from types import CodeType, FunctionType
from typing import Any, Dict, List, Optional, Tuple

import torch
from torch import nn

from ..reading.source import inside

NAME = "fused_mlp"

SET_TO = "_experts_implementation_internal"  # attribute of a configuration with the name of the implementation

_MODULE = "transformers.integrations.moe"
_FP8_MODULE, _FP8_TABLE = "transformers.integrations.finegrained_fp8", "ALL_FP8_EXPERTS_FUNCTIONS"
PRODUCTS = ("batched_mm", "grouped_mm")  # transformers' own; one of them is the default


def tables() -> List[Any]:
    """Import transformers and return the interface's function tables, including the one for FP8 weights if it exists.

    Raises ImportError if transformers is missing or has no such interface.
    """
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise ImportError(f"register_experts needs transformers, which cannot be imported: {error}") from error
    try:
        plain = importlib.import_module(_MODULE).ALL_EXPERTS_FUNCTIONS
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"register_experts needs transformers 5.0 or later, whose experts have an interface; this is "
            f"{transformers.__version__}"
        ) from error
    of_fp8 = importlib.import_module(_FP8_MODULE) if importlib.util.find_spec(_FP8_MODULE) is not None else None
    in_fp8 = getattr(of_fp8, _FP8_TABLE, None)
    return [plain] if in_fp8 is None else [plain, in_fp8]


def constant(function: FunctionType) -> FunctionType:
    """Make torch.compile treat the result of a function as a constant.

    Like ``torch.compiler.assume_constant_result``, without importing the compiler.
    """
    function._dynamo_marked_constant = True
    return function


def original_of(method: Any) -> Optional[FunctionType]:
    """Return the method of a class that the interface's decorator wraps; None for anything else."""
    return _original_of(method) if isinstance(method, FunctionType) else None


@functools.cache
def _original_of(method: FunctionType) -> Optional[FunctionType]:
    decorate = getattr(sys.modules.get(_MODULE), "use_experts_implementation", None)
    if decorate is None:
        return None
    return inside(method) if method.__code__ in _codes(inspect.unwrap(decorate).__code__) else None


@constant
def decorates(method: Any) -> bool:
    """True if a method was made by the decorator of the interface."""
    return original_of(method) is not None


def implementation_of(module: nn.Module) -> str:
    """Return the name of the implementation that a decorated module is configured to use."""
    return getattr(module.__dict__.get("config"), "_experts_implementation", None) or "eager"


@constant
def is_own(name: str, method: FunctionType) -> bool:
    """True if a name selects a function of transformers or of this package that is equivalent to the class's own."""
    if name == "eager":
        return True
    table = _table_of(method)
    function = None if table is None else table.get(name)
    if name == NAME:
        return getattr(function, "__module__", "").startswith(f"{__package__}.")
    return name in PRODUCTS and function is _product(name, table)


def _product(name: str, table: Any) -> Optional[FunctionType]:
    """Return transformers' own function of a name, from the FP8 functions if the table is theirs."""
    in_fp8 = sys.modules.get(_FP8_MODULE)
    if table is not None and table is getattr(in_fp8, _FP8_TABLE, None):
        return getattr(in_fp8, f"fp8_{name}_experts_forward", None)
    return getattr(sys.modules.get(_MODULE), f"{name}_experts_forward", None)


def decided_by(way: Optional[str], method: FunctionType) -> Optional[List[Tuple[Dict[str, Any], str]]]:
    """Return the dictionaries, with keys, that determine :func:`is_own` of an implementation; None if unknown."""
    if way == "eager":
        return []
    table, module = _table_of(method), sys.modules.get(_MODULE)
    if way not in (*PRODUCTS, NAME) or not is_own(way, method):
        return None
    tables = (getattr(table, "_local_mapping", None), getattr(table, "_global_mapping", None))
    if not all(type(mapping) is dict for mapping in tables):
        return None
    return [*((mapping, way) for mapping in tables), (vars(module), f"{way}_experts_forward")]


def fallback(method: FunctionType, x: Any) -> FunctionType:
    """Return the fallback for ``experts_mlp``: the function that computes the experts of a class with this method."""
    if x.dtype in (torch.float32, torch.float16, torch.bfloat16):
        return _product("grouped_mm", _table_of(method))
    return original_of(method)


@functools.cache
def _table_of(method: FunctionType) -> Any:
    """Return the functions that a decorated method chooses from."""
    return inspect.getclosurevars(method).nonlocals.get("experts_interface")


def _codes(code: CodeType) -> List[CodeType]:
    found = [part for part in code.co_consts if isinstance(part, CodeType)]
    return found + [inner for part in found for inner in _codes(part)]
