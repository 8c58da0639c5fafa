"""Look-up of attributes of modules, in Python's order and without running any code of their classes."""

from __future__ import annotations

import inspect
from types import FunctionType, MethodType
from typing import Any, Dict, Iterator, Optional, Set, Tuple

import torch
from torch import nn

_MISSING = object()


def is_module(part: Any) -> bool:
    """True if an object is a module. ``isinstance`` would read the object's own ``__class__``."""
    return issubclass(type(part), nn.Module)


def state_of(module: Any) -> Dict[str, Any]:
    """The dictionary of a module, or of another object; empty where that has none."""
    try:
        return object.__getattribute__(module, "__dict__")
    except AttributeError:
        return {}


def children_of(module: nn.Module) -> Dict[str, nn.Module]:
    """The children of a module by name."""
    # Modules compiled by TorchScript keep their children elsewhere.
    is_scripted = issubclass(type(module), torch.jit.ScriptModule)
    children = module._modules if is_scripted else state_of(module)["_modules"]
    return {name: child for name, child in children.items() if is_module(child)}


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
        yield from (held for held in state_of(each).get("_parameters", {}).values() if held is not None)


def attribute_of(module: Any, name: str, default: Any = None) -> Any:
    """An attribute of a module, or of another object; the default where there is none, or code would have to run."""
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
    names = ("__getattribute__", "__getattr__")
    return next((name for name in names if getattr(kind, name, None) is not getattr(nn.Module, name)), None)
