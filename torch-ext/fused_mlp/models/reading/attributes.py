"""Look-up of module attributes in Python's order, without running any code of their classes."""

from __future__ import annotations

import functools
import inspect
from types import CodeType, FunctionType, MethodType
from typing import Any, Dict, Iterable, Iterator, NamedTuple, Optional, Set, Tuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from . import device_hooks

_MISSING = object()


def is_module(part: Any) -> bool:
    """True if an object is a module. ``isinstance`` would read the object's own ``__class__``."""
    return issubclass(type(part), nn.Module)


def state_of(module: Any) -> Dict[str, Any]:
    """Return the ``__dict__`` of a module or another object; empty if it has none."""
    try:
        return object.__getattribute__(module, "__dict__")
    except AttributeError:
        return {}


def children_of(module: nn.Module) -> Dict[str, nn.Module]:
    """Return the children of a module by name."""
    # Modules compiled by TorchScript store their children elsewhere.
    is_scripted = issubclass(type(module), torch.jit.ScriptModule)
    children = module._modules if is_scripted else state_of(module)["_modules"]
    return {name: child for name, child in children.items() if is_module(child)}


def modules_of(model: nn.Module) -> Iterator[Tuple[str, nn.Module]]:
    """Yield a module and all its submodules, once each, with their paths, in the order of ``named_modules``."""
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
    """Yield the parameters of a module and of all its submodules."""
    for _, each in modules_of(module):
        yield from (held for held in state_of(each).get("_parameters", {}).values() if held is not None)


def attribute_of(module: Any, name: str) -> Any:
    """Return an attribute of a module or another object; None if there is none, or if reading it would run code."""
    kind, state = type(module), state_of(module)
    found = inspect.getattr_static(kind, name, _MISSING)
    if name in state and not inspect.isdatadescriptor(found):
        return state[name]
    if isinstance(found, FunctionType):
        return MethodType(found, module)
    if found is not _MISSING:
        return None if hasattr(type(found), "__get__") else found
    for held in ("_parameters", "_buffers", "_modules"):
        if name in state.get(held, ()):
            return state[held][name]
    return None


def method_in(module: nn.Module, place: str) -> Optional[FunctionType]:
    """Return the function of a method that a module's own dict holds, bound to it; None for anything else."""
    own = state_of(module).get(place)
    is_bound = type(own) is MethodType and own.__self__ is module and type(own.__func__) is FunctionType
    return own.__func__ if is_bound else None


def place_of(module: nn.Module, name: str) -> str:
    """Return the name under which a module's own dict holds its method ``name``: accelerate keeps a forward under its
    own."""
    return device_hooks.place_of(module, state_of(module), name)


def forward_of(module: nn.Module) -> Any:
    """Return the forward that a call of a module runs, without fusion: the bound one in the module's own dict, or that
    of its class."""
    own = method_in(module, place_of(module, "forward"))
    return getattr(type(module), "forward", None) if own is None else written[own].function if own in written else own


def finder_of(kind: type) -> Optional[str]:
    """Return the name of the method that overrides nn.Module's attribute look-up in a class; None if there is none."""
    names = ("__getattribute__", "__getattr__")
    return next((name for name in names if getattr(kind, name, None) is not getattr(nn.Module, name)), None)


def name_of_class(kind: type) -> str:
    """Return the name of a class, qualified by its module."""
    return f"{kind.__module__}.{kind.__qualname__}"


def class_of(module: nn.Module) -> type:
    """Return the class of a module, without the subclass that torch's parametrizations create."""
    kind, parts = type(module), module._modules  # Dynamo traces this
    return kind.__base__ if "parametrizations" in parts and "Parametrized" in kind.__name__ else kind


# Methods in the dicts of modules: fused ones, those of kernels, and wrappers.

# The mark on a fused module: its fused methods by name, and whether the module's own dict held the class's method. The
# name contains this build's, so that builds do not take each other's fused modules for their own.
FUSED = f"{__package__.partition('.')[0]}_fused"


class Written(NamedTuple):
    """A method of a class as it was analysed, including what notebooks replace in it when its source changes.

    ``looked_up`` are the names that it looks up and the fused method does not: owners, names and values.
    """

    name: str
    function: FunctionType
    code: CodeType
    defaults: Optional[Tuple[Any, ...]]
    named_defaults: Optional[Dict[str, Any]]
    looked_up: Tuple[Tuple[Any, str, Any], ...] = ()

    def is_in(self, kind: type) -> bool:
        """True if a class has this method, unchanged."""
        return getattr(kind, self.name, None) is self.function and self.is_as_read()

    def parts(self) -> Dict[str, Any]:
        """Return its code and defaults by attribute. Without defaults, calls that need some fail as before."""
        parts = {"__code__": self.code, "__defaults__": self.defaults, "__kwdefaults__": self.named_defaults}
        return {name: part for name, part in parts.items() if part is not None}

    def is_as_read(self) -> bool:
        """True if the function itself is unchanged; some fused methods check this at every call."""
        function = self.function
        if function.__code__ is not self.code:
            return False
        if self.defaults is not None and function.__defaults__ is not self.defaults:
            return False
        if self.named_defaults is not None and function.__kwdefaults__ is not self.named_defaults:
            return False
        return not self.looked_up or are_unchanged(self.looked_up)


written: WeakKeyDictionary[FunctionType, Written] = WeakKeyDictionary()  # by the fused function


def are_unchanged(attributes: Iterable[Tuple[Any, ...]]) -> bool:
    """True if owners have these values under these names, and no attribute under a name without a value."""
    return all(_is_unchanged(*each) for each in attributes)


def _is_unchanged(owner: Any, name: str, value: Any = _MISSING) -> bool:
    return (owner.get(name, _MISSING) if type(owner) is dict else getattr(owner, name, _MISSING)) is value


def as_written(name: str, function: FunctionType) -> Written:
    """Return a method as it is now."""
    return Written(name, function, function.__code__, function.__defaults__, function.__kwdefaults__)


# By class of modules: a forward that is not the class's own but computes the same.
PLAIN_FORWARDS: Dict[type, FunctionType] = {}


def of_call(module: nn.Module, kernelizable: bool = False) -> Optional[str]:
    """Return the effect of calling ``module`` beyond its class's original forward, or None.

    ``kernelizable``: a kernel's layer that ``kernels.kernelize`` installed as the forward counts as computing the same,
    if the class supports that.
    """
    hooks = hooks_of(module)
    if hooks is not None:
        return hooks
    function = own_method(module, "forward")
    if function is not None:
        known = function is type(module).forward or function is PLAIN_FORWARDS.get(type(module))
        # The fused version of the class's forward computes the same.
        known = known or (function in written and written[function].function is type(module).forward)
        if not known and not (kernelizable and hasattr(type(module), "kernel_layer_name") and _is_of_a_layer(function)):
            is_hooked = not torch.compiler.is_compiling() and place_of(module, "forward") != "forward"
            return "a hook of accelerate" if is_hooked else "an overridden forward"
    return None


def hooks_of(module: nn.Module) -> Optional[str]:
    """Return the report's word for the hooks that a call of a module runs, or for code that replaces the call; else
    None.

    ``torch.nn.Module.compile`` replaces the call of a module.
    """
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    if hooks:
        return "hooks"
    state = module.__dict__
    return "an overridden or compiled call" if state.get("_call_impl") or state.get("_compiled_call_impl") else None


_NO_METHOD = object()


def own_method(module: nn.Module, name: str) -> Any:
    """Return the function of a method that a module's own dict holds, bound to it; None if the dict lacks the name.

    Anything else, such as a method of another module, gives an object that is not a function. Hooks of accelerate that
    only move arguments do not count.
    """
    own = module.__dict__.get(name)
    if own is None:
        return None
    if not torch.compiler.is_compiling() and type(own) is functools.partial and name == "forward":
        own = module.__dict__[device_hooks.KEPT] if device_hooks.is_plain(module, module.__dict__) else own
    return own.__func__ if isinstance(own, MethodType) and own.__self__ is module else _NO_METHOD


def _is_of_a_layer(function: Any) -> bool:
    """True if a function is the forward of a class in a kernel's ``layers`` and has not been wrapped since."""
    if not isinstance(function, FunctionType) or hasattr(function, "__wrapped__"):
        return False
    return function.__module__.endswith(".layers") and function.__qualname__.endswith(".forward")
