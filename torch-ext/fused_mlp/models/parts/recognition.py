"""Recognition of a module or a function as a row of the table of activations."""

from __future__ import annotations

import functools
from types import FunctionType, MethodType
from typing import Any, Callable, Dict, NamedTuple, Optional, Tuple, Union

import torch
import torch.nn.functional as F
from torch.nn.parameter import is_lazy

from ...activations import ACTIVATIONS, Activation, get_activation
from ..proving import activations as reading
from ..proving.values import Dependency, holds
from ..reading.attributes import children_of, name_of_class, of_call, parameters_of
from .guards import Guards, are_unchanged, guards_of

# Classes whose instances compute a row of the table in any state; torch.nn.GELU and _HOLDERS are handled below.
_BY_CLASS: Dict[str, str] = {name: row.name for row in ACTIVATIONS for name in (*row.classes, *row.composites)}
# Classes that compute it with several torch operations, by the name under which compiled code looks them up.
COMPOSITES = {name.rpartition(".")[2]: True for row in ACTIVATIONS for name in row.composites}


def is_composite(act: Any) -> bool:
    """True for a module of such a class."""
    return type(act).__name__ in COMPOSITES


# Classes that hold their function as ``act``: torch's, the value of ``approximate`` in a partial of it or None, and the
# name of the method that an option of theirs sets instead.
_HOLDERS: Dict[str, Tuple[Callable, Optional[str], str]] = {
    "transformers.activations.GELUActivation": (F.gelu, None, "_gelu_python"),
    "transformers.activations.GELUTanh": (F.gelu, "tanh", "_gelu_tanh_python"),
}
Held = Tuple[Callable, Optional[str], Optional[FunctionType]]
_held: Dict[type, Held] = {}  # the same for the classes of _HOLDERS seen so far, with methods for names


def held_by(kind: type) -> Optional[Held]:
    """Return what an unchanged instance of a known class may hold as ``act``; None if it does not matter."""
    return _held.get(kind)


def _holds_own(module: torch.nn.Module, held: Held) -> bool:
    """The same as holds_own() of torch-ext/calls/parts.cpp."""
    found, (function, approximate, method) = module.__dict__.get("act"), held
    if type(found) is MethodType:
        return found.__self__ is module and found.__func__ is method
    if type(found) is functools.partial:
        return found.func is function and not found.args and found.keywords == {"approximate": approximate}
    return found is function and approximate is None


# Functions and methods of optional packages that compute a row of the table.
_BY_QUALIFIED_NAME: Dict[str, str] = {
    "diffusers.models.activations.GEGLU.gelu": "gelu",
}

_FUNCTIONS: Dict[Callable, str] = {
    function: row.name for row in ACTIVATIONS for function in (row.function, *row.spellings)
}


_CALLABLES = (FunctionType, MethodType, type(torch.relu))

# Functions, and forwards of classes, that spell out a row of the table, with the dependencies of the proof.
_WRITTEN_OUT: Dict[FunctionType, Tuple[str, Tuple[Dependency, ...]]] = {}

# Classes of _BY_CLASS seen so far, since a look-up by class is faster than building its name; and their forward's code.
_classes: Dict[type, str] = {}
_codes: Dict[type, Any] = {torch.nn.GELU: torch.nn.GELU.forward.__code__}

_NOT_ELEMENTWISE = {"LogSoftmax", "MultiheadAttention", "Softmax", "Softmax2d", "Softmin"}
_OTHER_FUNCTIONS = {
    *(F.celu, F.elu, F.hardsigmoid, F.hardswish, F.hardtanh, F.leaky_relu, F.logsigmoid, F.mish, F.relu6, F.selu),
    *(F.softplus, F.softsign, F.tanh, F.tanhshrink, torch.celu, torch.selu, torch.tanh),
}


def activation_of(function: Union[torch.nn.Module, Callable]) -> Optional[Activation]:
    """Return the row of the table that a module's activation attribute computes, or None if that is unknown.

    Modules are identified by their class, functions by identity, or either by the result of :func:`recognise`, so this
    needs no computation and torch.compile can trace it. A module with hooks or with a forward of its own is not
    recognised, unless its class allows one: a forward that ``kernels.kernelize`` installed there computes the same as
    the class.
    """
    if not isinstance(function, torch.nn.Module):
        if type(function) not in _CALLABLES:  # other types may run code of their own when compared
            return None
        name = _FUNCTIONS.get(function) or _written_out(function)
        if name is None and type(function) is not type(torch.relu):
            name = _by_qualified_name(function)
        return None if name is None else get_activation(name)
    name = row_of_class(function)
    return None if name is None or _alteration(function) is not None else get_activation(name)


def is_named(function: Union[torch.nn.Module, Callable]) -> bool:
    """True if the table names a function or the class of a module that :func:`activation_of` knows."""
    if isinstance(function, torch.nn.Module):
        return type(function) is torch.nn.GELU or type(function) in _classes
    return function in _FUNCTIONS


def recognise(function: Union[torch.nn.Module, Callable]) -> Optional[Activation]:
    """Like :func:`activation_of`, but first analyse the source of a function, or of the forward of a module's class.

    The result is cached, and :func:`activation_of` uses it from then on.
    """
    found = None if _code_of(function) is None else reading.read(function)
    if found is not None and found.row is not None and found.is_closed:
        _WRITTEN_OUT[_code_of(function)] = (
            found.row.name,
            tuple(each for each in found.dependencies if type(each.owner) is not tuple),
        )
    return activation_of(function)


def guards_of_read(function: Union[torch.nn.Module, Callable]) -> Optional[Guards]:
    """Return the guards of the proof that :func:`recognise` made; None for anything else."""
    found = _WRITTEN_OUT.get(_code_of(function))
    return None if found is None else guards_of(found[1])


def _written_out(function: Any) -> Optional[str]:
    """Return the name of the row that a function was proved to compute, if the proof's dependencies still hold."""
    found = _WRITTEN_OUT.get(function) if type(function) is FunctionType else None
    if found is None or not (torch.compiler.is_compiling() or holds(found[1], None)):
        return None
    return found[0]


class Halves(NamedTuple):
    """``act(gate) * up`` of the halves of a module's input; the proof of it holds as long as its class does."""

    act: Activation
    up_first: bool
    guards: Guards


def halves_of_class(module: torch.nn.Module) -> Optional[Halves]:
    """Return which product of the halves of its input a module's class computes, however the instance was altered."""
    kind = type(module)
    if kind not in _halves and not children_of(module) and _code_of(module) is not None:
        found = reading.read_halves(module)
        read = () if found is None else found[0].dependencies
        guards = None if found is None else guards_of(each for each in read if type(each.owner) is not tuple)
        _halves[kind] = None if guards is None else Halves(found[0].row, found[1], guards)
    return known_halves(module)


_halves: Dict[type, Optional[Halves]] = {}


def known_halves(module: torch.nn.Module) -> Optional[Halves]:
    """The same for a class that was read before."""
    return _halves.get(type(module))


def altered_halves(module: torch.nn.Module, halves: Halves) -> Optional[str]:
    """Return a noun phrase for why a module of such a class may compute anything else; None if it does not."""
    is_own = type(module).__call__ is torch.nn.Linear.__call__ and are_unchanged(halves.guards.unchanged)
    return of_call(module) if is_own else "a patched class"


def looks_like_activation(function: Union[torch.nn.Module, Callable]) -> bool:
    """True if a callable that is not in the table computes an elementwise function of its input."""
    if not isinstance(function, torch.nn.Module):
        return type(function) in _CALLABLES and (function in _OTHER_FUNCTIONS or _is_elementwise(function))
    kind = type(function)
    if name_of_class(kind) in _BY_CLASS or kind.__module__ == "transformers.activations":
        return True
    if kind.__module__ == torch.nn.GELU.__module__:
        return kind.__name__ not in _NOT_ELEMENTWISE
    parameters = list(parameters_of(function))  # a learnt slope, scale or bias, if any
    if any(is_lazy(parameter) or parameter.numel() > 1 for parameter in parameters) or not _is_elementwise(function):
        return False
    return all(recognise(part) is not None or looks_like_activation(part) for part in children_of(function).values())


def _is_elementwise(function: Union[torch.nn.Module, Callable]) -> bool:
    return _code_of(function) is not None and reading.read(function) is not None


def _code_of(function: Union[torch.nn.Module, Callable]) -> Optional[FunctionType]:
    """Return the Python function that a call runs; None if there is none, or if it is wrapped."""
    if isinstance(function, torch.nn.Module):
        kind = type(function)
        runs_forward = kind.__call__ is torch.nn.Module.__call__ and not issubclass(kind, torch.jit.ScriptModule)
        function = kind.forward if runs_forward else None
    return function if isinstance(function, FunctionType) and not hasattr(function, "__wrapped__") else None


def alteration_of(function: Union[torch.nn.Module, Callable]) -> Optional[str]:
    """Return a noun phrase for why a module whose class is in the table is not recognised; None for any other."""
    if not isinstance(function, torch.nn.Module):
        return None
    halves = None if row_of_class(function) is not None else known_halves(function)
    if halves is not None:
        return altered_halves(function, halves)
    return None if row_of_class(function) is None else _alteration(function)


def row_of_class(module: torch.nn.Module) -> Optional[str]:
    """Return the name of the row that a module's class computes, however the instance was altered."""
    kind = type(module)
    if kind is torch.nn.GELU:
        return "gelu" if module.approximate == "none" else "gelu_pytorch_tanh"
    if kind in _classes:
        return _classes[kind]
    name = _BY_CLASS.get(name_of_class(kind))
    if name is not None and not torch.compiler.is_compiling():
        _classes[kind], _codes[kind] = name, getattr(getattr(kind, "forward", None), "__code__", None)
        if name_of_class(kind) in _HOLDERS:
            *torch_function, method = _HOLDERS[name_of_class(kind)]
            _held[kind] = (*torch_function, getattr(kind, method, None))
    if name is not None or issubclass(kind, torch.jit.ScriptModule):  # a scripted class has no forward to look at
        return name
    return _written_out(kind.forward)


def _alteration(module: torch.nn.Module) -> Optional[str]:
    kind = type(module)
    forward = kind.forward
    if kind.__call__ is not torch.nn.Linear.__call__ or hasattr(forward, "__wrapped__"):
        return "a patched class"
    if kind in _codes and getattr(forward, "__code__", None) is not _codes[kind]:  # as autoreload does
        return "a patched class"
    if forward.__module__ != kind.__module__ and _written_out(forward) is None:
        return "a patched class"
    if kind in _held and not _holds_own(module, _held[kind]):
        return "another function as act"
    return of_call(module, kernelizable=True)


def _by_qualified_name(function: Callable) -> Optional[str]:
    if hasattr(function, "__wrapped__") or not hasattr(function, "__qualname__"):
        return None  # a function that wraps another, or a method of a builtin
    name = f"{function.__module__}.{function.__qualname__}"
    if name == "diffusers.models.activations.GELU.gelu":
        return "gelu" if function.__self__.approximate == "none" else "gelu_pytorch_tanh"
    return _BY_QUALIFIED_NAME.get(name)


def name_of(function: Union[torch.nn.Module, Callable]) -> str:
    """Return a short name of an activation for messages: its class or its function's name."""
    if isinstance(function, torch.nn.Module):
        return type(function).__name__
    return getattr(function, "__name__", type(function).__name__)
