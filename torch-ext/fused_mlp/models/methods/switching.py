"""Fused methods in a module, and out of it again: bound methods that the module itself holds.

Its class is untouched, as by kernelize and by accelerate's hooks. A copy has methods bound to the copy; a pickle names
the method, and loads with that of the class. Beside the methods a module holds a mark, without which they run the
original, for whoever wraps one may keep it; and its replicas for ``nn.DataParallel`` get methods of their own.
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

from ..reading.attributes import FUSED, Written, as_written, method_in, state_of, written

_REPLICATE = "_replicate_for_data_parallel"
_MISSING = object()

lock = threading.RLock()  # held by whoever fuses, restores or explains


def switch(module: nn.Module, methods: Dict[str, FunctionType]) -> None:
    """Puts fused methods into a module: inside of what wraps earlier ones, if anything does."""
    state = state_of(module)
    places = {name: place_of(module, name) for name in methods}
    held = {name: method_in(module, name) is written[method].function for name, method in methods.items()}
    for name, method in methods.items():
        state[places[name]] = bound = MethodType(method, module)
        weakref.finalize(bound, _gone, weakref.ref(module), name).atexit = False
    state[FUSED], state[_REPLICATE] = held, MethodType(_replicate, module)
    _told.clear()


_log = logging.getLogger("fused_mlp")
_told: Set[Tuple[str, str]] = set()  # one line for all modules of a class


def _gone(reference: weakref.ReferenceType[nn.Module], name: str) -> None:
    """Says who has put another method in the place of a fused one, which nothing runs any more."""
    module = reference()
    if module is None or FUSED not in state_of(module) or name in methods_in(module):
        return
    told = f"{type(module).__name__}.{name}", origin_of(state_of(module).get(name, getattr(type(module), name, None)))
    if told not in _told:
        _told.add(told)
        _log.warning("%s is not fused any more: it was replaced (%s): fuse again", *told)


def origin_of(method: Any) -> str:
    """Describe the origin of an object that shadows a method."""
    while type(method) in (MethodType, functools.partial):
        method = method.__func__ if type(method) is MethodType else method.func
    return f"from {method.__module__}" if isinstance(method, FunctionType) else f"a {type(method).__name__}"


def switch_back(module: nn.Module) -> None:
    """Gives a module its own methods back. Where somebody wraps a fused one, that stays, and runs the original."""
    state = state_of(module)
    for name, was_held in state.pop(FUSED, {}).items():
        method = _fused_in(module, name)
        if method is not None and was_held:
            state[name] = MethodType(written[method].function, module)
        elif method is not None:
            del state[name]
    if method_in(module, _REPLICATE) is _replicate:
        del state[_REPLICATE]


def saved(module: nn.Module) -> Dict[str, Any]:
    """The methods that a module holds, for :func:`put_back`."""
    return dict(state_of(module))


def put_back(module: nn.Module, before: Dict[str, Any]) -> None:
    """Undoes what was switched in a module since."""
    state = state_of(module)
    names = {FUSED, _REPLICATE, *before.get(FUSED, ()), *state.pop(FUSED, ())}
    for name in {*names, *(place_of(module, name) for name in names)}:
        state.pop(name, None)
        state.update({name: before[name]} if name in before else {})


def methods_in(module: nn.Module) -> Dict[str, FunctionType]:
    """The fused methods that a module runs: directly, or inside of what wraps them."""
    found = {}
    for name in state_of(module).get(FUSED, ()):
        method = _fused_in(module, place_of(module, name))
        if method is not None and _instead(written[method], module) is None:
            found[name] = method
    return found


def place_of(module: nn.Module, name: str) -> str:
    """Under which name a module holds a fused method of this name: its own, or that which a wrapper keeps it under."""
    if _fused_in(module, name) is None:
        for place in state_of(module):
            method = _fused_in(module, place)
            if method is not None and written[method].name == name:
                return place
    return name


def _fused_in(module: nn.Module, place: str) -> Optional[FunctionType]:
    """The fused method of a module that it holds in a place."""
    function = method_in(module, place)
    return function if function in written else None


def is_unchanged(module: nn.Module) -> bool:
    """True if the class of a fused module has the methods that the fused ones were made from."""
    return state_of(module).get(FUSED, {}).keys() == methods_in(module).keys() != set()


_kinds: Dict[Any, str] = {}  # by fused methods that are not made of the source of a class


def kind_of(function: Any) -> Optional[str]:
    """What a fused method computes, by the name that it was made under; None for one that is made of source."""
    return _kinds.get(function)


def made(kind: str, forward: FunctionType, original: Written) -> FunctionType:
    """A function that stands for a method of a class, known from then on as fused and of this kind."""
    functools.update_wrapper(forward, original.function)
    written[forward], _kinds[forward] = original, kind
    return forward


def fused_forward(
    kind: str,
    method: FunctionType,
    compute: Callable[..., Any],
    trace: Optional[Callable[..., Any]] = None,
    arguments: int = 1,
) -> FunctionType:
    """The forward of a class made anew: the result of ``compute`` for a call with so many arguments.

    The original runs where that is None, and where a graph is traced; by ``trace``, if given (``traced.run``).
    """
    original = as_written("forward", method)
    instead, code, is_traced = instead_of(original), method.__code__, torch.compiler.is_compiling

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if trace is not None and torch.compiler.is_dynamo_compiling():
            return trace("activations", "forward", method, instead, self, *args, **kwargs)
        if FUSED not in self.__dict__ or type(self).forward is not method or method.__code__ is not code:
            another = instead(self)
            if another is not None:
                return another(self, *args, **kwargs)
        if kwargs or len(args) != arguments or is_traced():
            return method(self, *args, **kwargs)
        result = compute(self, *args)
        return method(self, *args) if result is None else result

    return made(kind, forward, original)


def instead_of(method: Written) -> Callable[[Any], Optional[Callable[..., Any]]]:
    """A function that says what is to run in place of the fused method made of this one; None if that is to run."""
    return lambda module: _instead(method, module)


def _instead(method: Written, module: nn.Module) -> Optional[Callable[..., Any]]:
    kind, held = type(module), module.__dict__.get(FUSED)
    if method.is_in(kind):
        return method.function if held is None else None
    # A method that the module itself held hides all that its class has but data descriptors.
    found = inspect.getattr_static(kind, method.name, None)
    if held is None or not held.get(method.name) or inspect.isdatadescriptor(found):
        return _as_found(found, kind, method)
    return None if method.is_as_read() else method.function


def _as_found(found: Any, kind: type, method: Written) -> Callable[..., Any]:
    """Calls what an instance of a class finds there, a method or anything else, with the arguments of a fused method.

    Those that have their defaults are left out: the defaults may be others now, or the arguments gone.
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
    """The replica that torch makes of a module, with methods bound to it."""
    replica = getattr(type(self), _REPLICATE)(self)
    fused = {place: _fused_in(self, place) for place in state_of(self)}
    methods = {**fused, _REPLICATE: _replicate}
    state_of(replica).update({place: MethodType(method, replica) for place, method in methods.items() if method})
    return replica


_replicate.__name__ = _REPLICATE  # by which a bound method is pickled
