"""One call that fuses the MLPs of an existing model.

An MLP is what the code of a module computes, whatever its parts are called: its methods are read, and made anew for the
instance with fused calls where the output of a projection goes through an activation. All else in them stays as it is
written, so that a module is never taken for something it is not. Weights stay where they are; ``FusionReport.restore``
gives the original methods back.
"""

from __future__ import annotations

from functools import partial
from types import FunctionType, MethodType
from typing import Collection, Dict, Optional, Sequence

from torch import nn

from . import forwards, outcome, rewriting, verification
from .outcome import Outcome, Reason
from .report import FusionReport, of_module


def fuse_mlps(model: nn.Module, *, verify: bool = True) -> FusionReport:
    """Replaces the MLPs in the methods of the modules of ``model`` by fused calls, in place.

    Args:
        model: any module; its parameters are neither copied nor changed.
        verify: before it is fused, compare each kind of MLP with its parts, called one after the other, and each kind
            of module with its original, as a whole, in evaluation and in training, if its method needs one tensor alone
            (on a few random rows, with the module's own weights; what runs as a whole is a copy that shares them), and
            leave alone what does not agree. Nothing is compared where weights are on the meta device, or must not be
            read; nothing is run as a whole that has hooks, or in one of several processes.

    Returns:
        A report that prints as a table: what was fused, what was not, and why.

    Raises:
        TypeError: ``model`` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    report = FusionReport()
    check = verification.Verification(model) if verify else None
    for path, module in model.named_modules():
        found = _fuse(module, check)
        if found is not None:
            report.modules.append(of_module(path, module, found))
        if found is not None and found.extent != outcome.NONE:
            report._restoring.append(partial(_restore, module))
    return report


def is_fused(module: nn.Module) -> bool:
    """Whether a method of ``module`` is one that :func:`fuse_mlps` put there, and that was not restored since."""
    return forwards.FUSED in vars(module) and bool(_fused_methods(module))


def outcome_of(module: nn.Module) -> Optional[Outcome]:
    """How far a module is fused at present, and why not further; None if it is no MLP."""
    if is_fused(module):
        return outcome.of_methods(module, _fused_methods(module).values())
    methods, unknown = rewriting.fused_methods(module)
    return _not_fused(module, methods.values(), unknown)


def _not_fused(module: nn.Module, methods: Collection[FunctionType], unknown: Sequence[object]) -> Optional[Outcome]:
    if methods:
        return outcome.left(module, methods, Reason(outcome.NOT_FUSED))
    if unknown:
        return Outcome(outcome.NONE, tuple(map(outcome.of_activation, unknown)))
    return outcome.of_nothing(module)


def _fuse(module: nn.Module, check: Optional[verification.Verification]) -> Optional[Outcome]:
    """Fuses one module, and says how far; None if it is no MLP."""
    if is_fused(module):
        return outcome.left(module, _fused_methods(module).values(), Reason(outcome.ALREADY_FUSED))
    methods, unknown = rewriting.fused_methods(module)
    if not methods:
        return _not_fused(module, (), unknown)
    for name, method in methods.items():
        own = vars(module).get(name)
        own = getattr(own, "__func__", own)
        if own not in (None, getattr(type(module), name)) and not rewriting.is_fused(own):
            return outcome.left(module, methods.values(), Reason(outcome.OWN_METHOD, name))
        words = check and check.disagreement(module, name, method, rewriting.mlps_in(method, module))
        if words is not None:
            return outcome.left(module, methods.values(), Reason(outcome.DISAGREES, name, words))
    for name, method in methods.items():
        setattr(module, name, MethodType(method, module))
    setattr(module, forwards.FUSED, True)
    module._replicate_for_data_parallel = MethodType(_replicate_for_data_parallel, module)
    return outcome.of_methods(module, methods.values())


def _restore(module: nn.Module) -> None:
    """Gives a module its own methods back."""
    for name in _fused_methods(module):
        if hasattr(type(module), name):  # else it is what a wrapper remembers
            delattr(module, name)
    module.__dict__.pop(forwards.FUSED, None)
    module.__dict__.pop("_replicate_for_data_parallel", None)


def _fused_methods(module: nn.Module) -> Dict[str, FunctionType]:
    own = {name: getattr(value, "__func__", None) for name, value in vars(module).items()}
    return {name: function for name, function in own.items() if rewriting.is_fused(function)}


def _replicate_for_data_parallel(self: nn.Module) -> nn.Module:
    """A replica shares the attributes of its module: its methods would be bound to the weights of another device."""
    replica = type(self)._replicate_for_data_parallel(self)
    for name, value in vars(self).items():
        if isinstance(value, MethodType) and value.__self__ is self:
            replica.__dict__[name] = MethodType(value.__func__, replica)
    return replica
