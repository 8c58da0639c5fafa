"""Whether a method of a module does nothing but compute, by its source: it can be run to see what it computes.

It may call functions and methods of torch that only compute, and other methods and parts of the module of which the
same holds. It may write into no attribute. What is not known to be harmless is not.
"""

from __future__ import annotations

import ast
import builtins
from types import FunctionType, MethodType
from typing import Any, Iterator, Optional, Set

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import obstacles
from .effects import readable
from .recognition import activation_of
from .source import value_of

_FUNCTION_NAMES = """
    abs bmm cat clamp cumsum einsum empty_like exp gelu greater linear matmul maximum mean minimum mm mul one_hot
    ones_like pow relu reshape rsqrt sigmoid silu softplus sqrt square stack sum tanh where zeros zeros_like
"""
_FUNCTIONS = {
    getattr(owner, name): (owner, name)
    for name in _FUNCTION_NAMES.split()
    for owner in (torch, F)
    if hasattr(owner, name)
}
_METHOD_NAMES = """
    abs bfloat16 bmm chunk clamp clone contiguous div double expand flatten float half index_add_ item matmul mean mm
    mul new_zeros nonzero numel permute pow relu reshape rsqrt sigmoid size split square squeeze sum t tanh tolist to
    transpose type_as unbind unsqueeze view
"""
_METHODS = set(_METHOD_NAMES.split())
_BUILTINS = {builtins.enumerate, builtins.float, builtins.int, builtins.len, builtins.max, builtins.min, builtins.range}

_KNOWN = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Return, ast.If, ast.For, ast.With, ast.Continue)
_KNOWN += (ast.Pass, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Call, ast.Attribute, ast.Subscript)
_KNOWN += (ast.Slice, ast.Name, ast.Constant, ast.Tuple, ast.List, ast.Starred)
_KNOWN += (ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.expr_context, ast.keyword, ast.withitem)


def reads(function: Any, module: nn.Module) -> Optional[Set[str]]:
    """The attributes of the module that a method reads, if it is known to do nothing but compute; else None."""
    read: Set[str] = set()
    return read if _only_computes(function, module, read, set()) else None


def _only_computes(function: Any, module: nn.Module, read: Set[str], seen: Set[FunctionType]) -> bool:
    if function in seen:
        return True
    if not isinstance(function, FunctionType) or hasattr(function, "__wrapped__"):
        return False
    seen.add(function)
    tree = readable(function)
    if tree is None:
        return False
    instance = function.__code__.co_varnames[0]
    for node in (part for statement in tree.body for part in (statement, *_nodes(statement))):
        if not isinstance(node, _KNOWN):
            return False
        if isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load):
            return False
        if isinstance(node, ast.Call) and not _may_call(node.func, function, module, read, seen):
            return False
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == instance:
            read.add(node.attr)
        if isinstance(node, ast.With) and not all(_is_no_grad(item, function) for item in node.items):
            return False
    return True


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All that is in a node, but what annotates names."""
    for field, value in ast.iter_fields(node):
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, ast.AST) and field not in ("annotation", "returns"):
                yield part
                yield from _nodes(part)


def _is_no_grad(item: ast.withitem, function: FunctionType) -> bool:
    call = item.context_expr
    return isinstance(call, ast.Call) and value_of(call.func, function, None) is torch.no_grad and not call.args


def _may_call(
    callee: ast.expr, function: FunctionType, module: nn.Module, read: Set[str], seen: Set[FunctionType]
) -> bool:
    value = value_of(callee, function, module)
    if value is None:  # a method of something that is computed
        of_value = isinstance(callee, ast.Attribute) and callee.attr in _METHODS
        return of_value and not _is_known_object(callee.value, function, module)
    if value is torch.no_grad or any(value is known for known in _BUILTINS):
        return True
    if isinstance(value, nn.Module):
        if obstacles.of_call(value) is not None or type(value).__call__ is not nn.Module.__call__:
            return False
        return activation_of(value) is not None or _only_computes(type(value).forward, value, set(), seen)
    if isinstance(value, MethodType) and value.__self__ is module:
        return _only_computes(value.__func__, module, read, seen)
    try:
        return value in _FUNCTIONS or activation_of(value) is not None
    except TypeError:  # it has no hash
        return False


def _is_known_object(node: ast.expr, function: FunctionType, module: nn.Module) -> bool:
    """Whether an expression stands for something that is there before the method runs, and is no tensor."""
    value = value_of(node, function, module)
    return value is not None and value is not module and not isinstance(value, Tensor)
