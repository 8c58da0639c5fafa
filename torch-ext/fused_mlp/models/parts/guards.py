"""Guards: the dependencies of a proof, in the form that compiled code checks at each call."""

from __future__ import annotations

from types import FunctionType
from typing import Any, Iterable, List, NamedTuple, Optional, Tuple

from ...backends import native
from ..proving.values import MISSING, Dependency
from ..reading import attributes

# The compiled check, if there is compiled code.
are_unchanged = getattr(native.plain_modules, "are_unchanged", attributes.are_unchanged)


class Guards(NamedTuple):
    """``unchanged`` are attributes: owner, name and value. For a global name the owner is a dictionary; a name without
    a value must not be in it.

    ``own`` are items of the module's ``__dict__``: (name, value), or (name,) if the name must be absent. ``hidden`` are
    names that the module's class must not have.
    """

    unchanged: Tuple[Tuple[Any, ...], ...]
    own: Tuple[Tuple[Any, ...], ...] = ()
    hidden: Tuple[str, ...] = ()


def guards_of(dependencies: Iterable[Dependency]) -> Optional[Guards]:
    """Return the guards of a proof; None if compiled code cannot check one of its dependencies."""
    unchanged: List[Tuple[Any, ...]] = []
    own: List[Tuple[Any, ...]] = []
    hidden: List[str] = []
    for each in dependencies:
        owner, name, value = each.owner, each.name, each.value
        if each.part == "class":
            continue
        if type(owner) is tuple:
            if owner != () or each.part != "" or name == "training" or type(value) not in (bool, type(MISSING)):
                return None
            own.append((name,) if value is MISSING else (name, value))
        elif value is MISSING and isinstance(owner, type):
            hidden.append(name)
        elif value is MISSING:
            unchanged.append((owner, name))
        elif not (value is None and isinstance(owner, FunctionType)):  # a function without defaults
            unchanged.append((owner, name, value))
    return Guards(tuple(unchanged), tuple(own), tuple(hidden))
