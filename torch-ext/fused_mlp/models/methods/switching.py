"""Installs fused methods in a module and removes them: bound methods that the module itself holds.

Its class is untouched, as with kernelize and accelerate's hooks. A copy of the module gets methods bound to the copy; a
pickle stores only the name of the method, and loads with that of the class. The module also holds a mark, without which
its fused methods run the original, because a wrapper may keep one. Replicas for ``nn.DataParallel`` get their own
methods.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
import weakref
from types import FunctionType, MethodType
from typing import Any, Callable, Dict, Optional, Set, Tuple

import torch
from torch import nn

from ...backends import native
from ..reading import attributes
from ..reading.attributes import FUSED, Written, as_written, method_in, state_of, written

_REPLICATE = "_replicate_for_data_parallel"
_MISSING = object()

lock = threading.RLock()  # held while fusing, restoring or explaining


def switch(module: nn.Module, methods: Dict[str, FunctionType]) -> None:
    """Install fused methods in a module; if earlier ones are wrapped, they are replaced inside the wrapper."""
    state = state_of(module)
    places = {name: place_of(module, name) for name in methods}
    held = {name: method_in(module, places[name]) is written[method].function for name, method in methods.items()}
    for name, method in methods.items():
        state[places[name]] = bound = MethodType(method, module)
        weakref.finalize(bound, _gone, weakref.ref(module), name).atexit = False
    state[FUSED], state[_REPLICATE] = held, MethodType(_replicate, module)
    _told.clear()
    if native.plain_modules is not None:
        native.plain_modules.forget_left()


_log = logging.getLogger("fused_mlp")
_told: Set[Tuple[str, str]] = set()  # one message for all modules of a class


def _gone(reference: weakref.ReferenceType[nn.Module], name: str) -> None:
    """Log what replaced a fused method, which no longer runs."""
    module = reference()
    if module is None or FUSED not in state_of(module) or name in methods_in(module):
        return
    told = f"{type(module).__name__}.{name}", origin_of(state_of(module).get(name, getattr(type(module), name, None)))
    if told not in _told:
        _told.add(told)
        _log.warning("%s is no longer fused because it was replaced (%s): fuse again", *told)


def origin_of(method: Any) -> str:
    """Describe the origin of an object that shadows a method."""
    while type(method) in (MethodType, functools.partial):
        method = method.__func__ if type(method) is MethodType else method.func
    return f"from {method.__module__}" if isinstance(method, FunctionType) else f"a {type(method).__name__}"


def switch_back(module: nn.Module) -> None:
    """Restore a module's own methods. A wrapper of a fused method stays, and runs the original."""
    state = state_of(module)
    for name, was_held in state.pop(FUSED, {}).items():
        place = place_of(module, name)
        method = _fused_in(module, place)
        if method is not None and was_held:
            state[place] = MethodType(written[method].function, module)
        elif method is not None and place == name:
            del state[place]
    if method_in(module, _REPLICATE) is _replicate:
        del state[_REPLICATE]


def saved(module: nn.Module) -> Dict[str, Any]:
    """Return the methods that a module holds, for :func:`put_back`."""
    return dict(state_of(module))


def put_back(module: nn.Module, before: Dict[str, Any]) -> None:
    """Undo all switching in a module since ``before`` was saved."""
    state = state_of(module)
    names = {FUSED, _REPLICATE, *before.get(FUSED, ()), *state.pop(FUSED, ())}
    for name in {*names, *(place_of(module, name) for name in names)}:
        state.pop(name, None)
        state.update({name: before[name]} if name in before else {})


def methods_in(module: nn.Module) -> Dict[str, FunctionType]:
    """Return the fused methods that a module runs, directly or inside a wrapper."""
    found = {}
    for name in state_of(module).get(FUSED, ()):
        method = _fused_in(module, place_of(module, name))
        if method is not None and _instead(written[method], module) is None:
            found[name] = method
    return found


def place_of(module: nn.Module, name: str) -> str:
    """Return the name under which a module holds a fused method, or would: its own, or that under which a wrapper keeps
    it."""
    if _fused_in(module, name) is not None:
        return name
    for place in state_of(module):
        method = _fused_in(module, place)
        if method is not None and written[method].name == name:
            return place
    return attributes.place_of(module, name)


def _fused_in(module: nn.Module, place: str) -> Optional[FunctionType]:
    """Return the fused method that a module holds under this name."""
    function = method_in(module, place)
    return function if function in written else None


def is_unchanged(module: nn.Module) -> bool:
    """True if the class of a fused module still has the methods that the fused ones were generated from."""
    return state_of(module).get(FUSED, {}).keys() == methods_in(module).keys() != set()


_kinds: Dict[Any, str] = {}  # by fused methods that are not generated from a class's source


def kind_of(function: Any) -> Optional[str]:
    """Return the kind under which a fused method was made; None if it was generated from source."""
    return _kinds.get(function)


def made(kind: str, forward: FunctionType, original: Written) -> FunctionType:
    """Register and return a fused method of this kind that stands for a method of a class."""
    functools.update_wrapper(forward, original.function)
    written[forward], _kinds[forward] = original, kind
    return forward


@functools.cache
def fused_forward(
    kind: str,
    method: FunctionType,
    compute: Callable[..., Any],
    trace: Optional[Callable[..., Any]] = None,
    names_of: Optional[Callable[[nn.Module], Tuple[str, ...]]] = None,
) -> FunctionType:
    """Return the fused forward of a class: it returns ``compute``'s result for a call with the method's first argument,
    or with the arguments that ``names_of`` a module names.

    The original runs if that result is None, and while a graph is traced; with ``trace``, Dynamo runs that instead
    (``traced.run``).
    """
    original = as_written("forward", method)
    instead, code, is_traced = instead_of(original), method.__code__, torch.compiler.is_compiling
    first = names_in(method)[:1]

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if trace is not None and torch.compiler.is_dynamo_compiling():
            return trace("activations", "forward", method, instead, self, *args, **kwargs)
        if FUSED not in self.__dict__ or type(self).forward is not method or method.__code__ is not code:
            another = instead(self)
            if another is not None:
                return another(self, *args, **kwargs)
        given = None if is_traced() else in_order(args, kwargs, first if names_of is None else names_of(self))
        result = None if given is None else compute(self, *given)
        return method(self, *args, **kwargs) if result is None else result

    return made(kind, forward, original)


def names_in(method: FunctionType) -> Tuple[str, ...]:
    """Return the names by which a call may give a method's arguments."""
    code = method.__code__
    return () if code.co_posonlyargcount > 1 else code.co_varnames[1 : code.co_argcount]


def in_order(args: Tuple[Any, ...], kwargs: Dict[str, Any], names: Tuple[str, ...]) -> Optional[Tuple[Any, ...]]:
    """Return the arguments of a call in the order of these names; None if it gives fewer or others."""
    given = (*args, *(kwargs[name] for name in names[len(args) :] if name in kwargs)) if kwargs else args
    return given if len(given) == len(names) == len(args) + len(kwargs) else None


def instead_of(method: Written) -> Callable[[Any], Optional[Callable[..., Any]]]:
    """Return a function that maps a module to what must run in place of this method's fused form, or to None."""
    return lambda module: _instead(method, module)


def _instead(method: Written, module: nn.Module) -> Optional[Callable[..., Any]]:
    kind, held = type(module), module.__dict__.get(FUSED)
    if method.is_in(kind):
        return method.function if held is None else None
    # A method that the module itself held hides everything in its class except data descriptors.
    found = inspect.getattr_static(kind, method.name, None)
    if held is None or not held.get(method.name) or inspect.isdatadescriptor(found):
        return _as_found(found, kind, method)
    return None if method.is_as_read() else method.function


def _as_found(found: Any, kind: type, method: Written) -> Callable[..., Any]:
    """Return a function that calls what an instance of a class finds, method or not, with a fused method's arguments.

    Arguments that equal their defaults are omitted: the defaults may have changed, or the arguments may be gone.
    """

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        defaults = list(method.defaults or ())
        if len(args) == method.code.co_argcount - 1:
            while defaults and args[-1] is defaults.pop():
                args = args[:-1]
        named = method.named_defaults or {}
        kwargs = {word: value for word, value in kwargs.items() if named.get(word, _MISSING) is not value}
        get = getattr(type(found), "__get__", None)
        return (found if get is None else get(found, module, kind))(*args, **kwargs)

    return call


def _replicate(self: nn.Module) -> nn.Module:
    """Return the replica that torch makes of a module, with methods bound to it."""
    replica = getattr(type(self), _REPLICATE)(self)
    fused = {place: _fused_in(self, place) for place in state_of(self)}
    methods = {**fused, _REPLICATE: _replicate}
    state_of(replica).update({place: MethodType(method, replica) for place, method in methods.items() if method})
    return replica


_replicate.__name__ = _REPLICATE  # bound methods are pickled by this name
