"""How far the MLPs of a module are fused in its present state and what keeps them from it, as records with words."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from types import FunctionType
from typing import Dict, Iterable, List, Optional, Tuple

from torch import nn

from . import endings, forwards, mixtures, norms, obstacles, recognition, rewriting, routers, shape
from .found import FoundMLP
from .source import tree_of

# Extents: what of an MLP is one call of a kernel.
FULL = "full"  # its GEMMs, with the activation in their epilogue
POINTWISE = "pointwise"  # the activation and the product of two tensors: it has no GEMM, or none that could be taken in
BIAS = "bias"  # a GEMM and its bias: there is no activation
ACTIVATION = "activation"  # the activation: there is nothing else
PARTLY = "partly"  # what is left when some of its parts are called as they are
NONE = "none"

_EXTENT_WORDS = {  # where there is no reason to give
    FULL: "GEMMs and activation",
    POINTWISE: "activation and product",
    BIAS: "GEMM and bias",
    ACTIVATION: "activation",
}
FUSED_EXTENTS = tuple(_EXTENT_WORDS)  # those of modules of which all is fused that can be

# Codes of reasons: why a part is called, or why a module is left as it was.
CALLED = "called"
UNKNOWN_ACTIVATION = "unknown activation"
ALTERED_ACTIVATION = "altered activation"
NOT_FUSED = "not fused"
OWN_METHOD = "own method"
SCRIPTED = "scripted"
GRAPH = "graph"
NO_FUNCTION = "no function"
NO_SOURCE = "no source"
UNKNOWN_FORM = "unknown form"
OTHER_BRANCH = "other branch"
DISAGREES = "disagrees"
OWN_WAY = "own way"
ERROR = "error"

_REASON_WORDS = {
    CALLED: "calls {part} ({detail})",
    UNKNOWN_ACTIVATION: "activation {part} is not known",
    ALTERED_ACTIVATION: "activation {part} has {detail}",
    NOT_FUSED: "not fused",
    OWN_METHOD: "has a {part} of its own",
    SCRIPTED: "compiled by TorchScript",
    GRAPH: "a graph of torch.fx, which writes its methods itself",
    NO_FUNCTION: "its forward is a {detail}, not a function",
    NO_SOURCE: "source of its code not found",
    UNKNOWN_FORM: "code in a form that is not known",
    OTHER_BRANCH: "runs another branch of its code ({detail})",
    DISAGREES: "{detail}",
    OWN_WAY: "runs as it is: {detail}",
    ERROR: "cannot be changed: {detail}",
}


@dataclass(frozen=True)
class Reason:
    """Why something is not fused: ``code`` is one of this file's, ``part`` names what it is about (the path of a part,
    the class of an activation, a method), ``detail`` is what was found there. ``str`` gives its words."""

    code: str
    part: str = ""
    detail: str = ""

    def __str__(self) -> str:
        return _REASON_WORDS[self.code].format(part=self.part, detail=self.detail)


@dataclass(frozen=True)
class Outcome:
    """How far a module is fused: the patterns of the MLPs in it, the extent, and the reasons why it is not more."""

    extent: str
    reasons: Tuple[Reason, ...] = ()
    pattern: str = ""


def of_methods(module: nn.Module, methods: Iterable[FunctionType]) -> Optional[Outcome]:
    """How far the MLPs in fused methods of a module are fused."""
    methods = list(methods)
    if any(map(mixtures.is_fused, methods)):
        return of_experts(module)
    if any(map(routers.is_fused, methods)):  # no MLP: where it runs as it is, there is nothing to say
        return None if routers.obstacle(module) is not None else Outcome(FULL, (), _ROUTER)
    for method in filter(endings.is_fused, methods):
        return of_sum(endings.parts_of(method, module))
    mlps = [mlp for method in methods for mlp in rewriting.mlps_in(method, module)]
    if not mlps:  # they are modules of their own, and have an outcome
        return None
    running = [mlp for mlp in mlps if mlp.aside is None]
    if not running:
        reasons = (Reason(OTHER_BRANCH, "", aside) for aside in dict.fromkeys(mlp.aside for mlp in mlps))
        return Outcome(NONE, tuple(reasons), _pattern(mlps))
    reasons = tuple(dict.fromkeys(reason for mlp in running for reason in _reasons(mlp)))
    full = any(mlp.projections for mlp in running)
    return Outcome(PARTLY if reasons else FULL if full else POINTWISE, reasons, _pattern(running))


def of_experts(module: nn.Module, asked: Optional[str] = None) -> Outcome:
    """Whether a module of experts, whose forward asks that at each call, is one call of ``experts_mlp``."""
    obstacle = mixtures.obstacle(module, asked)
    if obstacle is None:
        return Outcome(FULL, (), _UNTRAINED_EXPERTS if mixtures.trains_as_written(module) else _EXPERTS)
    return Outcome(NONE, (Reason(OWN_WAY, "", obstacle),), _EXPERTS)


_EXPERTS, _UNTRAINED_EXPERTS, _ROUTER = "experts", "experts in inference", "router"


def words_of(extent: str, pattern: str) -> str:
    """What one call computes of a module with this pattern that is fused to this extent."""
    return "GEMM, sum and norm" if pattern == _SUM else _EXTENT_WORDS[extent]


def left(module: nn.Module, methods: Iterable[FunctionType], reason: Reason) -> Optional[Outcome]:
    """That a module was left as it was, though these methods of it could be made."""
    methods = list(methods)
    if any(map(mixtures.is_fused, methods)):
        return Outcome(NONE, (reason,), _EXPERTS)
    if any(map(routers.is_fused, methods)) or any(map(endings.is_fused, methods)):
        return None
    return Outcome(NONE, (reason,), _pattern(mlp for method in methods for mlp in rewriting.mlps_in(method, module)))


def of_nothing_to_fuse(module: nn.Module, methods: Iterable[FunctionType]) -> Optional[Outcome]:
    """Why nothing would be fused by these methods, ever; None if something may be."""
    mlps = [mlp for method in methods if rewriting.is_fused(method) for mlp in rewriting.mlps_in(method, module)]
    firsts = [next(iter(mlp.projections.values()), None) for mlp in mlps]
    never = [not mlp.pattern.gated and obstacles.has_own_product(first) for mlp, first in zip(mlps, firsts)]
    if not all(never) or not mlps:
        return None
    return Outcome(NONE, tuple(dict.fromkeys(reason for mlp in mlps for reason in _reasons(mlp))), _pattern(mlps))


def of_parts(projections: Dict[str, nn.Module]) -> Outcome:
    """How far an MLP is fused that has these projections, and an activation that is known."""
    around = obstacles.of_surroundings()
    reasons = called({name: around or obstacles.of_projection(part) for name, part in projections.items()})
    return Outcome(PARTLY if reasons else FULL, reasons)


def of_sum(parts: Dict[str, nn.Module]) -> Outcome:
    """Whether a layer, the first of these parts, and the last one, the norm of its sum with a residual, are one call.
    What is between them passes its result on."""
    (projection, layer), *behind, (last, norm) = parts.items()
    unknown = None if type(norm) in norms.known else f"a {type(norm).__name__}"
    found = {projection: obstacles.of_projection(layer)}
    found.update({name: forwards.alteration(part) for name, part in behind})
    found[last] = unknown or obstacles.of_call(norm)
    around = obstacles.of_surroundings()
    reasons = called(found if around is None else dict.fromkeys(found, around))
    return Outcome(NONE if reasons else FULL, reasons, _SUM)


_SUM = f"{forwards.LINEAR} with residual and norm"


def of_error(error: Exception) -> Reason:
    """That something went wrong that nobody foresaw, with one module alone."""
    return Reason(ERROR, "", f"{type(error).__name__}: {error}".splitlines()[0])


def called(obstacle_of: Dict[str, Optional[str]]) -> Tuple[Reason, ...]:
    """The parts that are called since there is an obstacle; parts that are alike share a reason."""
    names: Dict[str, List[str]] = {}
    for name, obstacle in obstacle_of.items():
        if obstacle is not None:
            names.setdefault(obstacle, []).append(name)
    return tuple(Reason(CALLED, ", ".join(alike), obstacle) for obstacle, alike in names.items())


def of_activation(function: object) -> Reason:
    """Why no kernel computes what is no row of the table of activations."""
    name, alteration = recognition.name_of(function), recognition.alteration_of(function)
    return Reason(UNKNOWN_ACTIVATION, name) if alteration is None else Reason(ALTERED_ACTIVATION, name, alteration)


def of_nothing(module: nn.Module) -> Optional[Outcome]:
    """Why nothing was found in a module that is an MLP all the same; None if it is none."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) or not shape.has_parts_of_mlp(module):
        return None
    forward = inspect.getattr_static(type(module), "forward")
    forward = (
        inspect.unwrap(forward) if isinstance(forward, FunctionType) else forward
    )  # a decorator calls what is in it
    if not isinstance(forward, FunctionType):
        return Outcome(NONE, (Reason(NO_FUNCTION, "", type(forward).__name__),))
    if tree_of(forward) is None:
        return Outcome(NONE, (Reason(NO_SOURCE),))
    return Outcome(NONE, (Reason(UNKNOWN_FORM),)) if shape.applies_activation_to_projection(module) else None


def _reasons(mlp: FoundMLP) -> List[Reason]:
    """Why one MLP is not fused further."""
    around = obstacles.of_surroundings()
    if around is not None:
        return [Reason(CALLED, "all parts", around)]
    if any(mlp.halves.values()):  # then their parts are not looked at
        return list(called(mlp.halves))
    found = {name: obstacles.of_projection(part) for name, part in mlp.projections.items()}
    projections = list(mlp.projections.values()) or [None]
    given = forwards.dtype_of(projections[0]), projections[-1]
    found.update({name: forwards.alteration(part, *given) for name, part in mlp.between.items()})
    unknown = [] if mlp.activation is not None else [of_activation(mlp.act)]
    return [*called(found), *unknown]


def _pattern(mlps: Iterable[FoundMLP]) -> str:
    words = (f"{mlp.pattern}{' in two modules' if mlp.halves else ''}{mlp.around}" for mlp in mlps)
    return ", ".join(dict.fromkeys(words))
