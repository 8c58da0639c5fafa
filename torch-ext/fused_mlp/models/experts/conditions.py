"""Conditions under which a decision about a module holds. Compiled code compares each by identity at each call.

They are the dependencies of a proof, for one module: the values of attributes, not the purpose of reading them.
"""

from __future__ import annotations

from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Tuple

from torch import Tensor, nn

from ..parts import refusals
from ..proving.values import MISSING, Dependency, held_at
from ..reading.attributes import FUSED
from ..running import shortcut

_plain = shortcut.plain

_Pairs = Tuple[Tuple[Any, ...], ...]  # (name, value), or (name,) if the name must be absent


class Conditions(NamedTuple):
    """Compiled code reads the fields by position (torch-ext/calls/mixtures/conditions.cpp)."""

    kind: type
    own: _Pairs  # in the module's ``__dict__``; holding that would keep the weights alive
    parts: _Pairs  # in its ``_modules``
    called: Tuple[nn.Module, ...]  # parts that must have no hooks
    items: Tuple[Tuple[Dict[str, Any], _Pairs], ...]  # in other dictionaries
    attributes: Tuple[Tuple[Any, str, Any], ...]
    absent: Tuple[Tuple[str, Mapping[str, Any]], ...]  # names that classes must not have


# Attributes that always matter, beside those that were read.
_ALWAYS = ("config", "parametrizations", "_is_expert_parallel", FUSED)


def conditions_of(
    module: nn.Module,
    dependencies: Iterable[Dependency],
    names: Iterable[str] = (),
    items: Iterable[Tuple[Dict[str, Any], str]] = (),
    attributes: Iterable[Tuple[Any, str, Any]] = (),
) -> Optional[Conditions]:
    """Return the conditions of a module's dependencies, and of additional ``names`` in its ``__dict__``, dictionary
    ``items`` and ``attributes``.

    None if one cannot be expressed or does not hold.
    """
    state = module.__dict__
    own, parts = dict.fromkeys((*_ALWAYS, *names)), {}
    found: List[Tuple[Dict[str, Any], Tuple[str, ...]]] = [(table, (name,)) for table, name in items]
    unchanged = [(owner, name, getattr(owner, name)) for owner, name, _ in refusals._WATCHED] + list(attributes)
    absent, called = [], []
    for each in dependencies:
        owner = each.owner
        if type(owner) is tuple and each.part in ("class", "call"):
            if owner and isinstance(held_at(module, owner), nn.Module):
                part = held_at(module, owner)
                unchanged.append((part, "__class__", type(part)))
                called += [part] if each.part == "call" else []
        elif type(owner) is tuple:
            held = held_at(module, owner).__dict__
            if each.part in held:
                found.append((held[each.part], (each.name,)))
            elif owner:
                found.append((held, (each.name,)))
            else:
                own[each.name] = None
        elif isinstance(owner, dict):
            found.append((owner, (each.name,)))
        elif each.value is MISSING:
            absent += [(each.name, vars(base)) for base in owner.__mro__[:-2]]  # except those of torch and Python
        else:
            unchanged.append((owner, each.name, getattr(owner, each.name)))
        if type(owner) is tuple and owner and owner[0] in state["_modules"]:
            parts[owner[0]] = state["_modules"][owner[0]]
    if any(isinstance(state.get(name), (Tensor, nn.Module)) for name in own) or not all(map(_plain.is_bare, called)):
        return None
    return Conditions(
        kind=type(module),
        own=_pairs(state, own),
        parts=_pairs(parts, parts),
        called=tuple(called),
        items=tuple((held, _pairs(held, names)) for held, names in found),
        attributes=tuple(unchanged),
        absent=tuple(absent),
    )


def _pairs(dictionary: Dict[str, Any], names: Iterable[str]) -> _Pairs:
    return tuple((name, dictionary[name]) if name in dictionary else (name,) for name in names)
