"""Fused methods in a module, and out of it again: the module becomes an instance of a subclass of its class.

The subclass holds the methods, and nothing is stored in the module: no bound method keeps it alive, a copy has methods
of its own, hooks and wrappers are where they were, and whoever gives the module another class gets that class's
methods. ``torch.nn.utils.parametrize`` and FSDP change modules in this way too. The subclass has the name of the class;
code that asks for ``type(module) is Class`` sees the difference, ``isinstance`` does not.
"""

from __future__ import annotations

import copy
import copyreg
import inspect
from types import FunctionType, MethodType
from typing import Any, Callable, Dict, FrozenSet, Optional, Tuple

from torch import nn

# Attributes of a fused module: the class that it was made from (None where it is restored), and the methods of that
# class that the fused ones replace. They have the name of this build: what another one fused is not its own.
FUSED = f"{__package__.partition('.')[0]}_fused"
_REPLACED = f"{FUSED}_replaced"
# The names of those that the module held itself, bound: what the class is patched with later does not concern it.
_BOUND = f"{FUSED}_bound"


_MISSING = object()


class _Fused:
    """What the subclasses have beside fused methods."""

    def __init_subclass__(cls) -> None:
        """Does nothing: the class of a user's module may keep account of its subclasses, and this is not one to it."""

    def __reduce_ex__(self, protocol: int) -> Any:
        """Pickled as one of the class that it was made from: it loads where this package is not."""
        reduced = super().__reduce_ex__(protocol)
        if isinstance(reduced, str):
            return reduced
        kind, original = type(self), vars(type(self)).get(FUSED, type(self))
        make, args, *rest = reduced
        args = tuple(original if arg is kind else arg for arg in args)
        if make is copyreg.__newobj__:  # which pickle takes only with the object's own class
            make = original.__new__
        return (original if make is kind else make, args, *rest)

    def __copy__(self) -> Any:
        own = getattr(super(), "__copy__", None)
        return _made_again(self, super().__reduce_ex__(4), {}, lambda part, _: part) if own is None else own()

    def __deepcopy__(self, memo: Dict[int, Any]) -> Any:
        own = getattr(super(), "__deepcopy__", None)
        return _made_again(self, super().__reduce_ex__(4), memo, copy.deepcopy) if own is None else own(memo)


def _made_again(module: Any, reduced: Tuple[Any, ...], memo: Dict[int, Any], copied: Callable[[Any, Any], Any]) -> Any:
    """A copy of a module, as the ``copy`` module makes one, but of the module's own class."""
    make, args, *state = reduced
    made = memo[id(module)] = make(*copied(args, memo))
    if state and state[0] is not None:
        made.__setstate__(copied(state[0], memo))
    return made


def switch(module: nn.Module, methods: Dict[str, FunctionType]) -> None:
    """Puts fused methods in the place of those that the class of a module has.

    Raises TypeError for a module whose class cannot be changed.
    """
    bound = frozenset(methods.keys() & vars(module).keys())  # methods of the class, as a wrapper leaves them behind
    if isinstance(module, _Fused):  # restored under somebody's class
        del vars(module)[FUSED]
    else:
        object.__setattr__(module, "__class__", _subclass(type(module), methods, bound))
    for name in bound:
        del vars(module)[name]


def switch_back(module: nn.Module) -> None:
    """Gives a module its own methods back; what is not fused stays as it is.

    Where somebody's class stands on the fused one, that stays, and the methods in it run the original.
    """
    if FUSED in vars(type(module)):
        bound = {name: MethodType(getattr(module, _REPLACED)[name], module) for name in getattr(module, _BOUND)}
        object.__setattr__(module, "__class__", vars(type(module))[FUSED])
        vars(module).update(bound)
    elif isinstance(module, _Fused):
        vars(module)[FUSED] = None


def methods_in(module: nn.Module) -> Dict[str, FunctionType]:
    """The fused methods that a module runs: directly, or inside of what wraps them."""
    original = getattr(module, FUSED, None)
    if original is None:
        return {}
    bound = [getattr(value, "__func__", None) for value in vars(module).values()]
    found = {}
    for name, method in _held(module).items():
        runs = name not in vars(module) or method in bound
        is_patched = getattr(original, name, None) is not getattr(module, _REPLACED)[name]
        if runs and not (is_patched and _is_seen(module, original, name)):
            found[name] = method
    return found


def is_unchanged(module: nn.Module) -> bool:
    """Whether the class of a fused module has the methods that the fused ones were made from."""
    kind = getattr(module, FUSED, None)
    return kind is not None and all(
        getattr(kind, name, None) is method for name, method in getattr(module, _REPLACED).items()
    )


def class_of(module: nn.Module) -> type:
    """The class of a module as it was written: without what was fused, and what torch parametrizes in it."""
    kind = getattr(module, FUSED, None) or type(module)
    return kind.__base__ if "parametrizations" in module._modules and "Parametrized" in kind.__name__ else kind


def restored_in(module: nn.Module) -> Dict[str, FunctionType]:
    """The fused methods that a module keeps, since somebody's class stands on the fused one, and does not run."""
    return _held(module) if FUSED in vars(module) else {}


def _held(module: nn.Module) -> Dict[str, FunctionType]:
    return {name: inspect.getattr_static(type(module), name) for name in getattr(module, _REPLACED)}


def instead_of(name: str, method: FunctionType, original: FunctionType) -> Callable[[Any], Optional[FunctionType]]:
    """A function that says what is to run in place of the fused method ``name``; None if that is to run itself.

    ``method`` is what the class had when the fused one was made, ``original`` what the fused one was made from.
    """

    def instead(module: nn.Module) -> Optional[FunctionType]:
        kind, otherwise = getattr(module, FUSED, None), None
        if (
            kind is None
        ):  # restored, while somebody's wrapper holds the fused method, or his class stands on the fused one
            kind, otherwise = getattr(type(module), FUSED, None), original
        if kind is None or getattr(kind, name) is method or not _is_seen(module, kind, name):
            return otherwise
        return _as_found_in(kind, name, original)  # the class was patched

    return instead


def _is_seen(module: nn.Module, kind: type, name: str) -> bool:
    """Whether what its class was patched with concerns a module: a method that it held hides all but properties."""
    return name not in getattr(module, _BOUND) or inspect.isdatadescriptor(inspect.getattr_static(kind, name, None))


def _as_found_in(kind: type, name: str, original: FunctionType) -> Callable[..., Any]:
    """Calls what an instance of a class finds there, a method or anything else, with the arguments of ``original``.

    Those that have their defaults are left out: the defaults may be others now, or the arguments gone.
    """
    found = inspect.getattr_static(kind, name)

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        defaults = list(original.__defaults__ or ())
        if len(args) == original.__code__.co_argcount - 1:
            while defaults and args[-1] is defaults.pop():
                args = args[:-1]
        named = original.__kwdefaults__ or {}
        kwargs = {word: value for word, value in kwargs.items() if named.get(word, _MISSING) is not value}
        get = getattr(type(found), "__get__", None)
        return (found if get is None else get(found, module, kind))(*args, **kwargs)

    return call


def _subclass(kind: type, methods: Dict[str, FunctionType], bound: FrozenSet[str]) -> type:
    """The subclass of ``kind`` with these methods: one that is in use, or a new one."""
    wanted = {**methods, FUSED: kind}
    kept = {_REPLACED: {name: getattr(kind, name) for name in methods}, _BOUND: bound}
    for known in type.__subclasses__(kind):
        if all(vars(known).get(name) is value for name, value in wanted.items()) and vars(known)[_BOUND] == bound:
            return known
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    # As type() would make it, but for what a metaclass of the user's may do then.
    return type.__new__(type(kind), kind.__name__, (_Fused, kind), {**names, **wanted, **kept})
