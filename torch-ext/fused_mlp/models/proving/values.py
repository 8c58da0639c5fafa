"""Values of an abstract evaluation, and the dependencies of a proof."""

from __future__ import annotations

from dataclasses import dataclass
from types import FunctionType
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple, Union

import torch
from torch import nn

from ..reading import attributes


class NotProved(Exception):
    """A function's result could not be derived; the message names the unsupported construct and its place."""


@dataclass(frozen=True)
class Node:
    """A tensor, or a part of one such as its dtype, as an operation and its arguments.

    Operations have one name each and their arguments one order, however they are written in the source.
    """

    op: str
    args: Tuple[Any, ...] = ()


@dataclass(frozen=True, eq=False)
class Held:
    """An object that the root of the proof holds under a path of attributes: a module or a configuration."""

    path: Tuple[str, ...]
    value: Any


@dataclass(frozen=True, eq=False)
class Bound:
    """A method and the object that it is bound to."""

    function: FunctionType
    owner: Held


@dataclass(frozen=True)
class Method:
    """A method of a computed tensor."""

    name: str
    owner: Node


MISSING = object()
PLAIN = (bool, int, float, str, type(None), torch.dtype)


class Dependency:
    """A value that was read and must stay the same for the proof to hold.

    ``owner`` is the path of an object from the root, or a dictionary, a class or a function. ``part`` says what
    was read of the object: an item of its dictionary if empty, or of ``_parameters``; the "type" of an item; its own
    "class"; or what a "call" of it does beyond its forward.
    """

    __slots__ = ("name", "owner", "part", "value")

    def __init__(self, owner: Any, part: str, name: str, value: Any) -> None:
        self.owner, self.part, self.name, self.value = owner, part, name, value

    @property
    def key(self) -> Tuple[Any, ...]:
        return (self.owner if type(self.owner) is tuple else id(self.owner), self.part, self.name)

    def holds(self, root: Optional[nn.Module]) -> bool:
        owner = self.owner
        if type(owner) is tuple:
            owner = held_at(root, owner)
            if owner is MISSING:
                return False
            if self.part == "class":
                return class_of(owner) is self.value
            if self.part == "call":
                return attributes.of_call(owner, kernelizable=True) == self.value
            if self.part == "type":
                return type(owner.__dict__.get(self.name)) is self.value
            owner = owner.__dict__
            owner = owner if self.part == "" else owner[self.part]
        return is_same(looked_up(owner, self.name), self.value)


def holds(dependencies: Tuple[Dependency, ...], root: Optional[nn.Module]) -> bool:
    """True if no dependency of a proof has changed."""
    return all(dependency.holds(root) for dependency in dependencies)


class Proof(NamedTuple):
    """A fact about code, with its dependencies."""

    found: Any
    dependencies: Tuple[Dependency, ...]


def proved(evaluation: Any, callee: Any, given: Tuple[Any, ...], read: Callable[[Any], Any]) -> Proof:
    """Return a proof of what ``read`` finds in the result of a call; it found None if the result is not proved."""
    try:
        found = read(evaluation.returned(callee, given))
    except NotProved:
        found = None
    return Proof(found, evaluation.dependencies)


def calls_nothing(part: Held, given: Tuple[Any, ...]) -> None:
    """The ``leaf`` of an evaluation of code that is known to call no other module."""
    raise NotProved("a call of another module")


class Proofs:
    """Proofs of functions or classes; each is valid as long as its dependencies hold."""

    def __init__(self, most: int = 4) -> None:
        self._most = most  # proofs per key, one per configuration
        self.known: Dict[Any, List[Proof]] = {}

    def get(self, key: Any, root: Optional[nn.Module], prove: Callable[[], Proof]) -> Proof:
        """Return a proof under a key whose dependencies hold for the module ``root``; else the one ``prove`` makes."""
        known = self.known.setdefault(key, [])
        for proof in known:
            if holds(proof.dependencies, root):
                return proof
        known.insert(0, prove())
        del known[self._most :]
        return known[0]


def looked_up(owner: Any, name: str) -> Any:
    """Return the entry of a dictionary, class or function under a name, without running a descriptor."""
    if isinstance(owner, dict):
        return owner.get(name, MISSING)
    if isinstance(owner, type):
        return next((vars(base)[name] for base in owner.__mro__ if name in vars(base)), MISSING)
    return getattr(owner, name)  # a function's code and defaults


def is_same(found: Any, value: Any) -> bool:
    found = found.__func__ if type(found) is staticmethod else found  # as attribute access returns it
    if found is value:
        return True
    if type(found) is not type(value):
        return False
    if type(value) in (tuple, list):
        return len(found) == len(value) and all(map(is_same, found, value))
    return type(value) in PLAIN and found == value


def class_of(value: Any) -> type:
    return attributes.class_of(value) if isinstance(value, nn.Module) else type(value)


def held_at(root: Any, path: Tuple[str, ...]) -> Any:
    """Return the object at a path of attributes, using only look-ups in dictionaries."""
    for name in path:
        state = root.__dict__
        root = state[name] if name in state else state.get("_modules", {}).get(name, MISSING)
        if root is MISSING or not hasattr(type(root), "__dict__") or not hasattr(root, "__dict__"):
            return MISSING
    return root


Value = Union[Node, Held, Bound, Method, Any]
Names = Dict[str, Value]
