"""MLPs split into two modules of a third, such as BERT's intermediate and output.

A first module computes hidden values, ``act(projection(x))``, and nothing else. A second module begins with the last
projection, applied to its input. If a module's code passes the output of a first module only to a second module, the
two run as one fused call: the first module hands over its parts instead of hidden values, and the second module's code
continues after the projection. This skips the calls of both modules, so if such a call does anything beyond the forward
that was read, the two are called one after the other, as written. In a sequence, a linear layer after a first module is
a second module too.
"""

from __future__ import annotations

from dataclasses import replace
from types import FunctionType
from typing import Any, Callable, Dict, NamedTuple, Optional, Sequence, Tuple, Union

from torch import Tensor, nn
from torch.nn.modules import module as _torch_module

from ... import calls
from ...autograd import training
from ..matching.pattern import Pattern
from ..parts import adapters, forms
from ..parts.guards import Guards
from ..reading.attributes import FUSED, are_unchanged, hooks_of, of_call, own_method, state_of, written
from . import forwards, shortcut

_plain = shortcut.plain
_call = shortcut._originals[nn.Linear, "__call__"]
_forward_hooks, _forward_pre_hooks = _torch_module._global_forward_hooks, _torch_module._global_forward_pre_hooks
_backward_hooks, _backward_pre_hooks = _torch_module._global_backward_hooks, _torch_module._global_backward_pre_hooks


class Pending(NamedTuple):
    """The result of a first module: the pattern of the whole MLP, and its operands up to the activation."""

    pattern: Pattern
    x: Tensor
    projections: Tuple[nn.Module, ...]
    act: Callable[[Tensor], Tensor]


class Parts(NamedTuple):
    """The parts of a module that is an MLP and nothing more.

    ``names`` are those of its activation, its ``layers`` projections, and the parts between and after these. ``drops``
    is True if functional dropouts depend on the module's mode.
    """

    pattern: Pattern
    names: Tuple[Any, ...]
    layers: int
    drops: bool


class Segment(NamedTuple):
    """A first or second module: the forward of a class, what was found in it, and the function generated from it.

    A first module's function takes the module and x, and returns :class:`Pending`, or hidden values in branches without
    an MLP. A second module's function is its forward with a :class:`Pending` in place of hidden values. A module that
    is a whole MLP and nothing more has no function.

    ``names`` is set if the parts are children of the module under names. For a first module it is (pattern of the whole
    MLP, (activation, projections)); for a whole MLP :class:`Parts`; for a second module its projection, the modules
    that may pass their input through, and the norm of ``ending``. For a module that runs the modules of a list one
    after the other, which together are one MLP, it is (None, the name of the list, ``sequences.known``, ``firsts``, the
    pattern of an ungated MLP); for the block of a mixture, (its records,). ``rest`` is a second module's forward after
    its projection, given the projection's result, if its parts have names. ``ending`` is set if the rest is a sum with
    the second module's other argument, and says whether a norm follows. ``before_a_norm`` is a first module's
    ``function`` for a call whose x still has to go through a norm: it only hands x over, and returns None in branches
    without an MLP. ``behind`` is the number of pass-through parts, the last ones, that follow a second module's
    projection or the last projection of a whole MLP.
    """

    forward: FunctionType
    names: Optional[Tuple[Any, ...]]
    ending: Optional[bool]
    found: Any
    function: Optional[Callable[..., Any]] = None
    rest: Optional[Callable[..., Any]] = None
    before_a_norm: Optional[Callable[..., Any]] = None
    guards: Guards = Guards(())
    behind: int = 0


# By forward, including those of fused modules; ``wholes`` has only those of fused modules, since others are called.
firsts: Dict[Callable[..., Any], Segment] = {}
seconds: Dict[Callable[..., Any], Segment] = {}
wholes: Dict[Callable[..., Any], Segment] = {}


def split_mlp_of_children(
    memory: str, owner: nn.Module, names: Tuple[str, str], x: Tensor, *rest: Any, **named: Any
) -> Any:
    """Run :func:`split_mlp` on the children of a module under these names."""
    if _plain is not None:
        found = _plain.split_mlp(firsts, seconds, owner, names, x, () if named else rest)
        if type(found) is tuple and type(found[0]) is Pattern:
            pattern, *others = found
            pattern = pattern if memory == training.KEPT else replace(pattern, memory=memory)
            found = shortcut.of_operands(pattern, *others)
        if found is False and memory == training.KEPT:  # it does too little work for an op
            return None
        if found is not None and found is not False:
            if type(found) is not tuple:
                return found
            result, segment, second = found
            return segment.rest(second, result, *rest, **named)
    second, first = (getattr(owner, name) for name in names)
    return split_mlp(memory, second, first, x, *rest, **named)


def split_mlp(memory: str, second: nn.Module, first: nn.Module, x: Tensor, *rest: Any, **named: Any) -> Any:
    """Return ``second(first(x), *rest, **named)``, or None if the two have to be called; training saves ``memory``."""
    last = running(second, seconds)
    handed = None if type(last) is str else _handed(memory, first, x)
    if type(handed) is Pending:
        return last.function(second, handed, *rest, **named) if _is_taken(handed) else None
    return None if handed is None else second(handed, *rest, **named)


def followed(
    memory: str, first: nn.Module, between: Tuple[nn.Module, ...], projection: nn.Module, x: Tensor
) -> Optional[Tensor]:
    """Return ``projection(...(first(x)))`` with dropouts and identities between; None if they have to be called.

    ``memory`` selects the values that training saves.
    """
    if adapters.of_projection(projection) is not None or not forwards.passes(between, x, projection):
        return None
    handed = _handed(memory, first, x)
    if type(handed) is Pending:
        return finished(handed, projection, between)
    return None if handed is None else forwards.second_half(handed, between, projection)


def _is_taken(pending: Pending) -> bool:
    """True if no known condition keeps the parts of a first module and a projection from being one op."""
    return forms.row_of(pending.act) is not None and all(
        adapters.of_projection(each) is None for each in pending.projections
    )


def _handed(memory: str, first: nn.Module, x: Tensor) -> Union[Pending, Tensor, None]:
    """Return the result of a first module for its second module; None if it is not a first module, or if calling it
    does more than its forward.

    The result is a tensor of hidden values if the first module takes a branch without an MLP.
    """
    segment = running(first, firsts)
    if type(segment) is str or _are_watched():
        return None
    handed = segment.function(first, x)
    if memory != training.KEPT and type(handed) is Pending:
        handed = handed._replace(pattern=replace(handed.pattern, memory=memory))
    return handed


def finished(pending: Pending, projection: nn.Module, between: Sequence[Any]) -> Tensor:
    """Return the result of the projection that a second module begins with."""
    pattern, x, projections, act = pending
    found = shortcut.fused_parts(pattern, x, (*projections, projection), act, between)
    return forwards.called(pattern, x, (*projections, projection), act, between) if found is None else found


def is_first(kind: type) -> bool:
    """True if a class has the forward of a first module."""
    forward = getattr(kind, "forward", None)
    return type(forward) is FunctionType and forward in firsts


def running(part: Any, segments: Dict[Callable[..., Any], Segment]) -> Union[Segment, str]:
    """Return the segment that calling a module runs and nothing else; otherwise what else the call does, as a noun."""
    kind = type(part)
    forward = getattr(kind, "forward", None)
    own = own_method(part, "forward") if isinstance(part, nn.Module) else None
    mark = state_of(part).get(FUSED) if own in written else None
    segment = segments.get(forward if mark is None else own) if type(forward) is FunctionType else None
    if segment is None or kind.__call__ is not _call:
        return f"a {kind.__name__}"
    held = mark is not None and mark.get("forward")  # generated from a method that the module itself held
    if not (held or forward is segment.forward) or not are_unchanged(segment.guards.unchanged):
        return f"a patched {kind.__name__}"
    return (hooks_of(part) if held else of_call(part)) or segment


def _are_watched() -> bool:
    """True if hooks or modes may observe every module call."""
    hooks = _forward_hooks or _forward_pre_hooks or _backward_hooks or _backward_pre_hooks
    return bool(hooks) or calls.pointwise_reason() is not None
