"""accelerate's hooks, which ``device_map`` puts on every module of a model that is spread over devices.

A hook replaces the forward in the module's own dict by a partial that calls the hook, then the forward that was there
before, which the module keeps under another name. Most hooks only move the arguments to the device of the module's
weights. Where they are on it already, as the ops require, such a hook changes nothing. Others load offloaded weights,
or move results.
"""

from __future__ import annotations

import functools
import sys
from types import CodeType, FunctionType
from typing import Any, Dict, Optional, Tuple

from . import digests

KEPT = "_old_forward"
_HOOK, _HOME = "_hf_hook", "accelerate.hooks"
_DIGEST_OF_CALL = "205b1e849ca0f989"  # the function in the partial
# Hashes of the source of a hook's methods, each with the first version that contains it.
_DIGESTS = {
    "97e7e607946f0a33": "1.1",
    "c7d93a825242f07c": "1.5",
    "a88ac58fdd1c370e": "1.7",
    "d13a1b84e8d4cbea": "1.13",
    "2c419b9dbc8b6536": "1.14",
}
# What a hook's own dict must hold, or lack, so that it only moves arguments.
_OWN = (("offload", False), ("io_same_device", False), ("no_grad",), ("pre_forward",), ("post_forward",))

# By class of hooks: the guards (parts/guards.py) under which a hook only moves arguments, and the code of the function
# in the partial; None for other classes. Compiled code reads this.
KNOWN: Dict[type, Optional[Tuple[Tuple[Any, ...], CodeType]]] = {}
_calls: Dict[CodeType, bool] = {}


def place_of(module: Any, state: Dict[str, Any], name: str) -> str:
    """Return the name under which the dict of a module, ``state``, holds its own method ``name``, if it does."""
    return KEPT if name == "forward" and _is_called(module, state) else name


def is_plain(module: Any, state: Dict[str, Any]) -> bool:
    """True if the forward in the dict of a module only moves arguments before it calls the one that it keeps."""
    hook = state.get(_HOOK)
    found = known(type(hook)) if _is_called(module, state) else None
    if found is None:
        return False
    (unchanged, own, _), code = found
    held = object.__getattribute__(hook, "__dict__")
    has_own = all(held.get(name) is (value[0] if value else None) for name, *value in own)
    is_unchanged = all(getattr(owner, name) is value for owner, name, value in unchanged)
    return has_own and is_unchanged and state["forward"].func.__code__ is code


def known(kind: type) -> Optional[Tuple[Tuple[Any, ...], CodeType]]:
    """Return what :data:`KNOWN` says of a class of hooks, which is read once."""
    if kind not in KNOWN:
        KNOWN[kind] = _read(kind)
    return KNOWN[kind]


def _is_called(module: Any, state: Dict[str, Any]) -> bool:
    """True if the forward in the dict of a module is accelerate's."""
    call = state.get("forward")
    if type(call) is not functools.partial or KEPT not in state or type(call.func) is not FunctionType:
        return False
    if len(call.args) != 1 or call.args[0] is not module or call.keywords:
        return False
    return _is_call(call.func.__code__) and call.func.__globals__.get("__name__") == _HOME


def _is_call(code: CodeType) -> bool:
    if code not in _calls:
        _calls[code] = digests.digest([code]) == _DIGEST_OF_CALL
    return _calls[code]


def _read(kind: type) -> Optional[Tuple[Tuple[Any, ...], CodeType]]:
    home = sys.modules.get(_HOME)
    if home is None or kind is not getattr(home, "AlignDevicesHook", None):
        return None
    methods = [getattr(kind, name) for name in ("pre_forward", "post_forward")]
    digest = digests.digest(map(_code_of, (*methods, home.send_to_device)))
    adds = _code_of(home.add_hook_to_module)
    inner = (each for each in (adds.co_consts if adds is not None else ()) if type(each) is CodeType)
    call = next(filter(_is_call, inner), None)
    if digest not in _DIGESTS or call is None:
        return None
    looked_up = (home, "send_to_device", home.send_to_device), (kind, "no_grad", False)
    return ((*((kind, each.__name__, each) for each in methods), *looked_up), _OWN, ()), call


def _code_of(function: Any) -> Optional[CodeType]:
    """Return the code inside accelerate's and Dynamo's own wrappers; None if other code wraps it."""
    while getattr(function, "__globals__", {}).get("__name__", "").startswith(("accelerate.", "torch._dynamo.")):
        if not hasattr(function, "__wrapped__"):
            return function.__code__
        function = function.__wrapped__
    return None
