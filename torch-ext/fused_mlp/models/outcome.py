"""How far the MLPs of a module are fused in its present state, and what keeps them from it."""

from __future__ import annotations

from types import FunctionType
from typing import Iterable, Optional

from torch import nn

from . import forwards, obstacles, rewriting, sites
from .recognition import activation_of, name_of
from .source import tree_of


def words_for(module: nn.Module, methods: Iterable[FunctionType]) -> str:
    """How far the MLPs in fused methods of a module are fused, in a few words."""
    mlps = (mlp for method in methods for mlp in rewriting.mlps_in(method, module))
    return "; ".join(sorted({_explain(mlp) for mlp in mlps}, key=lambda words: (not words.startswith("partly"), words)))


def patterns_in(module: nn.Module, methods: Iterable[FunctionType]) -> str:
    """The patterns of the MLPs in fused methods of a module."""
    mlps = (mlp for method in methods for mlp in rewriting.mlps_in(method, module))
    return ", ".join(dict.fromkeys(mlp.pattern for mlp in mlps))


def why_nothing(module: nn.Module) -> Optional[str]:
    """Why nothing was found in a module that has the parts of an MLP; None if it has not."""
    roles = {rewriting.role_of(part) for part in (*module._modules.values(), *vars(module).values())}
    if not {sites.PROJECTION, sites.ACTIVATION} <= roles or isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return None
    if tree_of(type(module).forward) is None:
        return "the source of its forward cannot be had"
    return "its forward does not apply its activation to the output of a projection in a form that is known"


def _explain(mlp: rewriting.FoundMLP) -> str:
    """How far one MLP is fused in its present state."""
    found = {name: obstacles.of_projection(part) for name, part in mlp.projections.items()}
    found.update({name: forwards.alteration(part) for name, part in mlp.between.items()})
    if activation_of(mlp.act) is None:
        found[name_of(mlp.act)] = "an activation that is not known"
    blocked = {name: obstacle for name, obstacle in found.items() if obstacle is not None}
    return "activation and product" if not blocked and not mlp.projections else obstacles.summary(blocked)
