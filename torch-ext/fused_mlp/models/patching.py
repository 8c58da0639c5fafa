"""One call that fuses the MLPs of an existing model.

An MLP is what the code of a module computes, whatever its parts are called: its methods are read, and made anew for the
instance with fused calls where the output of a projection goes through an activation. All else in them stays as it is
written, so that a module is never taken for something it is not. Weights stay where they are; ``FusionReport.restore``
gives the original methods back.
"""

from __future__ import annotations

from functools import partial
from types import FunctionType, MethodType
from typing import Dict, Optional, Tuple

from torch import nn

from . import forwards, outcome, rewriting, verification
from .report import FusionReport, ModuleReport


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
        pattern, fused, reason = _fuse(module, check)
        if reason is not None:
            report.modules.append(ModuleReport(path, type(module).__name__, pattern, fused, reason))
        if fused:
            report._restoring.append(partial(_restore, module))
    return report


def is_fused(module: nn.Module) -> bool:
    """Whether a method of ``module`` is one that :func:`fuse_mlps` put there, and that was not restored since."""
    return forwards.FUSED in vars(module) and bool(_fused_methods(module))


def explain_plan(module: nn.Module) -> str:
    """How far a fused module is fused in its present state, in a few words."""
    return outcome.words_for(module, _fused_methods(module).values())


def _fuse(module: nn.Module, check: Optional[verification.Verification]) -> Tuple[str, bool, Optional[str]]:
    """Fuses one module: the patterns in it, whether it was fused, and why; None for why if it is no MLP."""
    if is_fused(module):
        return outcome.patterns_in(module, _fused_methods(module).values()), False, "already fused"
    methods, unknown = rewriting.fused_methods(module)
    if not methods:
        return "", False, f"activation {', '.join(unknown)} is not known" if unknown else outcome.why_nothing(module)
    pattern = outcome.patterns_in(module, methods.values())
    for name, method in methods.items():
        own = vars(module).get(name)
        own = getattr(own, "__func__", own)
        if own not in (None, getattr(type(module), name)) and not rewriting.is_fused(own):
            return pattern, False, f"has a {name} of its own"
        reason = check and check.disagreement(module, name, method, rewriting.mlps_in(method, module))
        if reason is not None:
            return pattern, False, reason
    for name, method in methods.items():
        setattr(module, name, MethodType(method, module))
    setattr(module, forwards.FUSED, True)
    module._replicate_for_data_parallel = MethodType(_replicate_for_data_parallel, module)
    return pattern, True, explain_plan(module)


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
