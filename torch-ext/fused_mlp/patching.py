"""One call that fuses the MLPs of an existing model.

A module is taken for an MLP by its structure (which projections it has, and nothing else), and believed only after its
fused forward has been compared with its own on a random input. Its weights stay where they are; only the instance's
forward is replaced, and ``FusionReport.restore`` puts the original back.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, Callable, Dict, List, Optional, Tuple

from torch import Tensor, nn

from . import forwards, obstacles, verification
from .activations import BY_CODE, activation_of, name_of


@dataclass(frozen=True)
class Pattern:
    """A kind of MLP: the spellings of its projections, in the order that its forward takes them."""

    name: str
    spellings: Tuple[Tuple[str, ...], ...]
    forward: Callable[..., Tensor]


PATTERNS = (
    Pattern(
        "gated",
        (
            ("gate_proj", "up_proj", "down_proj"),
            ("wi_0", "wi_1", "wo"),
            ("w1", "w3", "w2"),
            ("gate", "up", "down"),
        ),
        forwards.gated,
    ),
    Pattern(
        "packed gated",
        (
            ("gate_up_proj", "down_proj"),
            ("input_linear", "output_linear"),
        ),
        forwards.packed_gated,
    ),
    Pattern(
        "plain",
        (
            ("fc1", "fc2"),
            ("lin1", "lin2"),
            ("linear_fc1", "linear_fc2"),
            ("linear1", "linear2"),
            ("dense_h_to_4h", "dense_4h_to_h"),
            ("up_proj", "down_proj"),
            ("wi", "wo"),
            ("c_fc", "c_proj"),
        ),
        forwards.plain,
    ),
    Pattern("linear", (("dense",),), forwards.linear),
)

_PATTERN_BY_NAME = {pattern.name: pattern for pattern in PATTERNS}

_ACTIVATION_ATTRIBUTES = (
    "act_fn",
    "activation_fn",
    "intermediate_act_fn",
    "act",
    "activation",
    "activation_function",
    "hidden_act",
)

_PLAN = "_fused_mlp"  # the attribute of a fused module that holds its plan, plain data that pickles anywhere


@dataclass(frozen=True)
class ModuleReport:
    """What became of one module: its path, its class, the pattern it fits, whether it was fused and why."""

    path: str
    class_name: str
    pattern: str
    fused: bool
    reason: str


@dataclass
class FusionReport:
    """The outcome of :func:`fuse_mlps`: prints as a table; ``modules`` is the same as data."""

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
        """Gives every module that was fused its own forward back."""
        for module in self._restored.values():
            module.__dict__.pop("forward", None)
            module.__dict__.pop(_PLAN, None)
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
    """Replaces the forwards of the MLPs of ``model``, in place.

    Args:
        model: any module; its parameters are neither copied nor changed.
        verify: compare each module with its own forward before it is fused (on a few random rows, in the module's own
            dtype and on its device), and leave alone what does not agree.

    Returns:
        A report that prints as a table: what was fused, what was not, and why.

    Raises:
        TypeError: ``model`` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    report = FusionReport()
    for path, module in model.named_modules():
        match = _match(module)
        if match is None:
            continue
        pattern, names = match
        plan, reason = _plan(module, pattern, names)
        if plan is not None and verify:
            reason = verification.disagreement(module, plan, _run)
        if plan is not None and reason is None:
            setattr(module, _PLAN, plan)
            module.forward = MethodType(forward, module)
            report._restored[path] = module
            reason = explain_plan(module)
            report.modules.append(ModuleReport(path, type(module).__name__, pattern.name, True, reason))
        else:
            report.modules.append(ModuleReport(path, type(module).__name__, pattern.name, False, reason or ""))
    return report


def forward(self: nn.Module, *args: Tensor, **kwargs: Tensor) -> Tensor:
    """The forward of a fused module: takes what the original takes, and runs the original where that is safer."""
    plan = getattr(self, _PLAN)
    if len(args) + len(kwargs) != 1 or (kwargs and plan["input"] not in kwargs) or original_is_needed(self):
        return type(self).forward(self, *args, **kwargs)
    return _run(self, plan, args[0] if args else kwargs[plan["input"]])


def original_is_needed(module: nn.Module) -> Optional[str]:
    """Why a fused module runs its original forward in its present state, or None."""
    plan = getattr(module, _PLAN)
    if not module.training:
        return None
    for name in plan["dropouts"]:
        dropout = getattr(module, name)
        if dropout.training and dropout.p > 0.0:
            return f"dropout ({name}) is active in training"
    return None


def explain_plan(module: nn.Module) -> str:
    """How far a fused module is fused in its present state, in a few words."""
    needed = original_is_needed(module)
    if needed is not None:
        return f"original forward: {needed}"
    plan = getattr(module, _PLAN)
    blocked = []
    for name in plan["projections"]:
        obstacle = obstacles.of_projection(getattr(module, name))
        if obstacle is not None:
            blocked.append(f"{name} {obstacle}")
    if not blocked:
        return "GEMMs and activation"
    return "partly: " + "; ".join(blocked) + " and is called"


def _run(module: nn.Module, plan: Dict[str, Any], x: Tensor) -> Tensor:
    projections = [getattr(module, name) for name in plan["projections"]]
    act = getattr(module, plan["activation_attribute"])
    activation = BY_CODE[plan["activation"]]
    if activation_of(act) is not activation:  # replaced or hooked since the module was fused
        activation = activation_of(act)
    return _PATTERN_BY_NAME[plan["pattern"]].forward(x, *projections, activation, act)


def _match(module: nn.Module) -> Optional[Tuple[Pattern, Tuple[str, ...]]]:
    """The pattern whose projections the module has, if it also has an activation."""
    children = module._modules
    activated = any(callable(getattr(module, attribute, None)) for attribute in _ACTIVATION_ATTRIBUTES)
    for pattern in PATTERNS:
        for names in pattern.spellings:
            if activated and all(isinstance(children.get(name), nn.Module) for name in names):
                return pattern, names
    return None


def _plan(
    module: nn.Module, pattern: Pattern, names: Tuple[str, ...]
) -> Tuple[Optional[Dict[str, Any]], Optional[str]]:
    """The plan of a fused forward as plain data, or None and the reason why there is none."""
    own = module.__dict__.get("forward")
    own = getattr(own, "__func__", own)
    if own is forward:
        return None, "already fused"
    if own not in (None, type(module).forward):
        return None, "has a forward of its own"
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    if len(parameters) != 1 or parameters[0].kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
        return None, f"forward takes {len(parameters)} arguments, not one"
    attributes = [name for name in _ACTIVATION_ATTRIBUTES if callable(getattr(module, name, None))]
    if len(attributes) != 1:
        return None, f"has {len(attributes)} activations: {', '.join(attributes)}"
    activation = activation_of(getattr(module, attributes[0]))
    if activation is None:
        return None, f"activation {name_of(getattr(module, attributes[0]))} is not known"
    projections = [getattr(module, name) for name in names]
    dtypes = {str(part.weight.dtype) for part in projections if obstacles.of_projection(part) is None}
    if len(dtypes) > 1:
        return None, f"its projections differ in dtype: {', '.join(sorted(dtypes))}"
    dropouts = []
    for name, child in module._modules.items():
        if isinstance(child, nn.Dropout):
            dropouts.append(name)
        elif name not in (*names, attributes[0]) and not isinstance(child, nn.Identity) and child is not None:
            return None, f"has another part: {name}, a {type(child).__name__}"
    if module._parameters or module._buffers:
        return None, f"has parameters of its own: {', '.join([*module._parameters, *module._buffers])}"
    plan = {
        "pattern": pattern.name,
        "projections": names,
        "activation": activation.code,
        "activation_attribute": attributes[0],
        "dropouts": tuple(dropouts),
        "input": parameters[0].name,
    }
    return plan, None
