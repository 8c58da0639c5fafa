"""The values that a function computes with while it is read, and what a proof rests on."""

from __future__ import annotations

from dataclasses import dataclass
from types import CellType, FunctionType
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple, Union

import torch
from torch import nn

from ..reading import attributes


class NotProved(Exception):
    """It is not understood what a function computes; the message says which construct is not, and where."""


@dataclass(frozen=True)
class Node:
    """A tensor, or a part of one such as its dtype: an operation and what it is given.

    Operations have one name each, and their arguments one order, however they are written.
    """

    op: str
    args: Tuple[Any, ...] = ()


@dataclass(frozen=True, eq=False)
class Held:
    """An object that the root of the proof holds under a path of attributes: a module, or a configuration."""

    path: Tuple[str, ...]
    value: Any


@dataclass(frozen=True, eq=False)
class Bound:
    """A method and what it is bound to."""

    function: FunctionType
    owner: Held


@dataclass(frozen=True)
class Method:
    """A method of a tensor that is computed."""

    name: str
    owner: Node


MISSING = object()
PLAIN = (bool, int, float, str, type(None), torch.dtype)


class Dependency:
    """Something that was read, and has to be there for the proof to hold.

    ``owner`` is the path of an object from the root, or a dictionary, a class, a function or a cell. ``part`` says
    what of the object: an item of its dictionary if empty, or of ``_parameters``; the "type" of one; its own "class";
    or what a "call" of it does beyond its forward.
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
    """A fact about code, and all that it rests on."""

    found: Any
    dependencies: Tuple[Dependency, ...]


def proved(evaluation: Any, callee: Any, given: Tuple[Any, ...], read: Callable[[Any], Any]) -> Proof:
    """A proof of what ``read`` finds in the result of a call; of None where the result is not known."""
    try:
        found = read(evaluation.returned(callee, given))
    except NotProved:
        found = None
    return Proof(found, evaluation.dependencies)


def calls_nothing(part: Held, given: Tuple[Any, ...]) -> None:
    """The ``leaf`` of an evaluation of code that is known to call no other module."""
    raise NotProved("a call of another module")


class Proofs:
    """The proofs of functions or classes that were made: each is valid as long as its dependencies hold."""

    def __init__(self, most: int = 4) -> None:
        self._most = most  # proofs under one key, for as many configurations
        self.known: Dict[Any, List[Proof]] = {}

    def get(self, key: Any, root: Optional[nn.Module], prove: Callable[[], Proof]) -> Proof:
        """A proof under a key whose dependencies hold for the module ``root``; else the one that ``prove`` makes."""
        known = self.known.setdefault(key, [])
        for proof in known:
            if holds(proof.dependencies, root):
                return proof
        known.insert(0, prove())
        del known[self._most :]
        return known[0]


def looked_up(owner: Any, name: str) -> Any:
    """The entry of a dictionary, class, function or cell with this name. No descriptor runs."""
    if isinstance(owner, dict):
        return owner.get(name, MISSING)
    if isinstance(owner, CellType):
        return owner.cell_contents if owner != CellType() else MISSING
    if isinstance(owner, type):
        return next((vars(base)[name] for base in owner.__mro__ if name in vars(base)), MISSING)
    return getattr(owner, name)  # a function's code and defaults


def is_same(found: Any, value: Any) -> bool:
    found = found.__func__ if type(found) is staticmethod else found  # as reading the attribute gives it
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
    """The object at a path of attributes that are in dictionaries."""
    for name in path:
        state = root.__dict__
        root = state[name] if name in state else state.get("_modules", {}).get(name, MISSING)
        if root is MISSING or not hasattr(type(root), "__dict__") or not hasattr(root, "__dict__"):
            return MISSING
    return root


Value = Union[Node, Held, Bound, Method, Any]
Names = Dict[str, Value]
