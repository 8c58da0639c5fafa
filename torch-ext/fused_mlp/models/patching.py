"""One call that fuses the MLPs of an existing model.

An MLP is what the code of a module computes, whatever its parts are called: its methods are read, and made anew for the
instance with fused calls where the output of a projection goes through an activation. All else in them stays as it is
written, so that a module is never taken for something it is not. Weights stay where they are; ``FusionReport.restore``
gives the original methods back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any, Callable, Dict, List, Optional, Tuple

from torch import nn

from . import forwards, obstacles, rewriting, sites, verification
from .recognition import name_of
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

    ``[dataclasses.asdict(module) for module in report.modules]`` is what ``json.dumps`` takes.
    """

    modules: List[ModuleReport] = field(default_factory=list)
    _restored: Dict[str, nn.Module] = field(default_factory=dict, repr=False)

    @property
    def fused(self) -> List[ModuleReport]:
        """The modules that were fused."""
        return [module for module in self.modules if module.fused]

    @property
    def left(self) -> List[ModuleReport]:
        """The modules that look like an MLP and were left as they were."""
        return [module for module in self.modules if not module.fused]

    def restore(self) -> None:
        """Gives every module that was fused its own methods back.

        Where somebody has wrapped a fused method since, the wrapper stays, and what it wraps runs the original.
        """
        for module in self._restored.values():
            for name in _fused_methods(module):
                if hasattr(type(module), name):  # else it is what a wrapper remembers
                    delattr(module, name)
            module.__dict__.pop(forwards.FUSED, None)
            module.__dict__.pop("_replicate_for_data_parallel", None)
        self._restored.clear()

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
            report._restored[path] = module
    return report


def is_fused(module: nn.Module) -> bool:
    """Whether a method of ``module`` is one that :func:`fuse_mlps` put there, and that was not restored since."""
    return forwards.FUSED in vars(module) and bool(_fused_methods(module))


def explain_plan(module: nn.Module) -> str:
    """How far a fused module is fused in its present state, in a few words."""
    mlps = (mlp for method in _fused_methods(module).values() for mlp in rewriting.mlps_in(method, module))
    return "; ".join(sorted({_explain(mlp) for mlp in mlps}, key=lambda words: (not words.startswith("partly"), words)))


def _fuse(module: nn.Module, check: Optional[verification.Verification]) -> Tuple[str, bool, Optional[str]]:
    """Fuses one module: the patterns in it, whether it was fused, and why; None for why if it is no MLP."""
    if is_fused(module):
        return _patterns(module, _fused_methods(module)), False, "already fused"
    methods, unknown = rewriting.fused_methods(module)
    if not methods:
        return "", False, f"activation {', '.join(unknown)} is not known" if unknown else _why_nothing(module)
    pattern = _patterns(module, methods)
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


def _why_nothing(module: nn.Module) -> Optional[str]:
    """Why nothing was found in a module that has the parts of an MLP; None if it has not."""
    roles = {rewriting.role_of(part) for part in (*module._modules.values(), *vars(module).values())}
    if (
        sites.PROJECTION not in roles
        or roles.isdisjoint({sites.ACTIVATION, sites.RELU})
        or isinstance(module, (nn.ModuleList, nn.ModuleDict))
    ):
        return None
    if tree_of(type(module).forward) is None:
        return "the source of its forward cannot be had"
    return "its forward does not apply its activation to the output of a projection in a form that is known"


def _explain(mlp: rewriting.FoundMLP) -> str:
    """How far one MLP is fused in its present state."""
    found = {name: obstacles.of_projection(part) for name, part in mlp.projections.items()}
    found.update({name: forwards.alteration(part) for name, part in mlp.between.items()})
    if mlp.activation is None:
        found[name_of(mlp.act)] = "an activation that is not known"
    blocked = {name: obstacle for name, obstacle in found.items() if obstacle is not None}
    return "activation and product" if not blocked and not mlp.projections else obstacles.summary(blocked)


def _patterns(module: nn.Module, methods: Dict[str, Callable[..., Any]]) -> str:
    mlps = (mlp for method in methods.values() for mlp in rewriting.mlps_in(method, module))
    return ", ".join(dict.fromkeys(str(mlp.pattern) for mlp in mlps))


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
