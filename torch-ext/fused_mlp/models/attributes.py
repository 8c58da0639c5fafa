"""What modules hold, in the order in which Python finds it, read without running any code of their classes."""

from __future__ import annotations

import inspect
from types import FunctionType, MethodType
from typing import Any, Dict, Iterator, Optional, Set, Tuple

from torch import nn

_MISSING = object()
_FINDERS = {name: inspect.getattr_static(nn.Module, name) for name in ("__getattribute__", "__getattr__")}


def state_of(module: nn.Module) -> Dict[str, Any]:
    """The dictionary of a module."""
    return object.__getattribute__(module, "__dict__")


def children_of(module: nn.Module) -> Dict[str, nn.Module]:
    """The children of a module by name."""
    children = state_of(module).get("_modules") or {}
    return {name: child for name, child in children.items() if isinstance(child, nn.Module)}


def modules_of(model: nn.Module) -> Iterator[Tuple[str, nn.Module]]:
    """A module and all that are in it, once each, with their paths, as ``named_modules`` gives them."""
    seen: Set[int] = set()
    waiting = [("", model)]
    while waiting:
        path, module = waiting.pop()
        if id(module) not in seen:
            seen.add(id(module))
            yield path, module
            inner = [(f"{path}.{name}" if path else name, child) for name, child in children_of(module).items()]
            waiting += reversed(inner)


def parameters_of(module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of a module and of all that are in it."""
    for _, each in modules_of(module):
        yield from (parameter for parameter in state_of(each)["_parameters"].values() if parameter is not None)


def attribute_of(module: nn.Module, name: str, default: Any = None) -> Any:
    """An attribute of a module; the default where there is none, or code of its class would have to run for it."""
    kind, state = type(module), state_of(module)
    found = inspect.getattr_static(kind, name, _MISSING)
    if name in state and not inspect.isdatadescriptor(found):
        return state[name]
    if isinstance(found, FunctionType):
        return MethodType(found, module)
    if found is not _MISSING:
        return default if hasattr(type(found), "__get__") else found
    for held in ("_parameters", "_buffers", "_modules"):
        if name in state.get(held, ()):
            return state[held][name]
    return default


def method_in(module: nn.Module, place: str) -> Optional[FunctionType]:
    """The function of a method that a module itself holds, bound to it; None for anything else."""
    own = state_of(module).get(place)
    is_bound = type(own) is MethodType and own.__self__ is module and type(own.__func__) is FunctionType
    return own.__func__ if is_bound else None


def finder_of(kind: type) -> Optional[str]:
    """The method of a class of modules that Python runs where an attribute is read, if nn.Module has another one."""
    return next((name for name, own in _FINDERS.items() if inspect.getattr_static(kind, name, None) is not own), None)
