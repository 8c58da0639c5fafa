"""One call that fuses the MLPs of an existing model.

An MLP is what the code of a module computes, whatever its parts are called: its methods are read, and made anew for the
instance with fused calls where the output of a projection goes through an activation. All else in them stays as it is
written, so that a module is never taken for something it is not. Weights stay where they are;
``FusionReport.restore`` gives the original methods back.
"""

from __future__ import annotations

import inspect
import weakref
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any, Callable, Dict, List, Optional, Set, Tuple

import torch
from torch import nn

from . import forwards, obstacles, rewriting, sites, switching, verification
from .recognition import activation_of, name_of
from .source import tree_of


@dataclass(frozen=True)
class ModuleReport:
    """What became of one module: its path, its class, the patterns it holds, whether it was fused and why."""

    path: str
    class_name: str
    pattern: str
    fused: bool
    reason: str


@dataclass
class FusionReport:
    """The outcome of :func:`fuse_mlps`: prints as a table; ``modules`` is the same as data.

    ``[dataclasses.asdict(module) for module in report.modules]`` is what ``json.dumps`` takes. A report does not keep
    the model alive.
    """

    modules: List[ModuleReport] = field(default_factory=list)
    _restoring: List[Callable[[], None]] = field(default_factory=list, repr=False)

    @property
    def fused(self) -> List[ModuleReport]:
        """The modules that are fused, by this call or by an earlier one."""
        return [module for module in self.modules if module.fused]

    @property
    def left(self) -> List[ModuleReport]:
        """The modules that look like an MLP and were left as they were."""
        return [module for module in self.modules if not module.fused]

    def restore(self) -> None:
        """Gives every module in ``fused`` its own methods back.

        Where somebody has wrapped a fused method since, the wrapper stays, and what it wraps runs the original.
        """
        for restore in self._restoring:
            restore()
        self._restoring.clear()

    def __str__(self) -> str:
        head = f"{len(self.fused)} fused, {len(self.left)} left"
        rows: Dict[Tuple[str, ...], List[str]] = {}
        for module in self.modules:
            key = (module.class_name, module.pattern, "yes" if module.fused else "no", module.reason)
            rows.setdefault(key, []).append(module.path)
        table = [("class", "pattern", "fused", "reason", "modules")]
        for key, paths in rows.items():
            table.append((*key, paths[0] if len(paths) == 1 else f"{len(paths)}: {paths[0]} ... {paths[-1]}"))
        widths = [max(len(row[i]) for row in table) for i in range(5)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in table]
        return "\n".join([head, *lines])


def fuse_mlps(model: nn.Module, *, verify: bool = True) -> FusionReport:
    """Replaces the MLPs in the methods of the modules of ``model`` by fused calls, in place.

    Each module that is fused becomes an instance of a subclass of its class, of the same name, that has the fused
    methods. A module that cannot be read, or fused, is left as it is and the report says why; modules that an earlier
    call has fused are in the report as fused. If the call is interrupted, the model is as it was.

    Args:
        model: any module; its parameters, buffers and attributes are neither copied nor changed, and no code of it is
            run.
        verify: before it is fused, compare each kind of MLP with its parts, called one after the other (on a few random
            rows, with the module's own weights), and leave alone what does not agree. Nothing is compared where weights
            are on the meta device, or must not be read.

    Returns:
        A report that prints as a table: what is fused, what is not, and why.

    Raises:
        TypeError: ``model`` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    report, fresh = FusionReport(), []
    check = verification.Verification() if verify else None
    scripted: Set[int] = set()
    try:
        for path, module in model.named_modules():
            if id(module) in scripted:
                continue
            if isinstance(module, torch.jit.ScriptModule):
                scripted.update(map(id, module.modules()))
            fresh += [] if is_fused(module) else [module]
            pattern, fused, reason = _fuse(module, check)
            if reason is not None:
                report.modules.append(ModuleReport(path, type(module).__name__, pattern, fused, reason))
            if fused:
                report._restoring.append(partial(_restore, weakref.ref(module)))
    except BaseException:
        for module in fresh:
            switching.switch_back(module)
        raise
    return report


def _restore(module: weakref.ReferenceType[nn.Module]) -> None:
    alive = module()
    if alive is not None:
        switching.switch_back(alive)


def is_fused(module: nn.Module) -> bool:
    """Whether a module runs a method that :func:`fuse_mlps` put there."""
    return bool(switching.methods_in(module))


def explain_plan(module: nn.Module) -> str:
    """How far a fused module is fused in its present state, in a few words."""
    return _words(module, switching.methods_in(module))


def _words(module: nn.Module, methods: Dict[str, FunctionType]) -> str:
    mlps = (mlp for method in methods.values() for mlp in rewriting.mlps_in(method, module))
    return "; ".join(sorted({_explain(mlp) for mlp in mlps}, key=lambda words: (not words.startswith("partly"), words)))


def _fuse(module: nn.Module, check: Optional[verification.Verification]) -> Tuple[str, bool, Optional[str]]:
    """Fuses one module: the patterns in it, whether it is fused, and why; None for why if it is no MLP.

    Whatever goes wrong with one module is no reason to leave the others.
    """
    try:
        methods = switching.methods_in(module)
        if methods:
            return _patterns(module, methods), True, _words(module, methods)
        switching.switch_back(module)  # it may hold fused methods that do not run any more
        pattern, methods, reason = _plan(module, check)
        if methods:
            switching.switch(module, methods)
        return pattern, bool(methods), reason
    except Exception as error:
        return "", False, f"left for an error: {type(error).__name__}: {error}".splitlines()[0]


def _plan(
    module: nn.Module, check: Optional[verification.Verification]
) -> Tuple[str, Dict[str, FunctionType], Optional[str]]:
    """The patterns in a module, the methods to put into it, and why these, or none."""
    if isinstance(module, torch.jit.ScriptModule):
        return "", {}, "TorchScript has compiled it"
    methods, unknown = switching.restored_in(module), []
    if not methods:
        methods, unknown = rewriting.fused_methods(module)
    if not methods:
        return "", {}, f"activation {', '.join(unknown)} is not known" if unknown else _why_nothing(module)
    pattern = _patterns(module, methods)
    for name, method in methods.items():
        own = vars(module).get(name)
        own = getattr(own, "__func__", own)
        if own not in (None, getattr(type(module), name)) and not rewriting.is_fused(own):
            return pattern, {}, f"has a {name} of its own"
        reason = check and check.disagreement(rewriting.mlps_in(method, module))
        if reason is not None:
            return pattern, {}, reason
    return pattern, methods, _words(module, methods)


def _why_nothing(module: nn.Module) -> Optional[str]:
    """Why nothing was found in a module that has the parts of an MLP; None if it has not."""
    roles = {rewriting.role_of(part) for part in (*module._modules.values(), *vars(module).values())}
    if not {sites.PROJECTION, sites.ACTIVATION} <= roles or isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return None
    forward = inspect.getattr_static(type(module), "forward")
    if not isinstance(forward, FunctionType):
        return f"its forward is no function but of type {type(forward).__name__}"
    if tree_of(forward) is None:
        return "the source of its forward cannot be had"
    return "its forward does not apply its activation to the output of a projection in a form that is known"


def _explain(mlp: rewriting.FoundMLP) -> str:
    """How far one MLP is fused in its present state."""
    found = {name: obstacles.of_projection(part) for name, part in mlp.projections.items()}
    found.update({name: forwards.alteration(part) for name, part in mlp.between.items()})
    if activation_of(mlp.act) is None:
        found[name_of(mlp.act)] = "an activation that is not known"
    blocked = {name: obstacle for name, obstacle in found.items() if obstacle is not None}
    words = obstacles.summary(blocked)
    return words if mlp.projections or words.startswith("partly") else "activation and product"


def _patterns(module: nn.Module, methods: Dict[str, Callable[..., Any]]) -> str:
    mlps = (mlp for method in methods.values() for mlp in rewriting.mlps_in(method, module))
    return ", ".join(dict.fromkeys(mlp.pattern for mlp in mlps))
