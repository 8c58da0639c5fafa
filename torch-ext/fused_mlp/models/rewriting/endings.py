"""Fusion of the end of attention in encoders: modules that compute ``norm(projection(x) + residual)``, in one call.

The second segment of an encoder's MLP is such a module too. If the surrounding code passes it the first segment, one
call covers both (``running.split_mlps``), and the module keeps its own forward.
"""

from __future__ import annotations

import ast
import copy
from types import FunctionType
from typing import Any, Dict, Optional, Tuple

from torch import nn

from ..matching.roles import Role
from ..methods.functions import Instead
from ..parts import refusals
from ..reading import effects
from ..reading.attributes import as_written, attribute_of, class_of
from ..reading.source import remembered
from ..running import forwards, plans, shortcut, split_mlps
from . import branches, rewriter
from .fused_calls import NAMES, made_call


def fused_methods(module: nn.Module, memory: str) -> Dict[str, FunctionType]:
    """Return the method to install in such a module; empty if the module is not one.

    ``memory`` says what training keeps of the surrounding MLPs; a second call uses it to detect that nothing changed.
    """
    forward = getattr(class_of(module), "forward", None)
    if shortcut.plain is None or not isinstance(forward, FunctionType):
        return {}
    read = rewriter.roles_in(forward, module), rewriter.answers_in(forward, module)
    made = _made(forward, *read, memory)
    projection = None if made is None else attribute_of(module, _names[made][0])
    if projection is None or refusals.has_own_product(projection):
        return {}
    shortcut.learn_layers((projection,))
    return {"forward": made}


def is_fused(function: Any) -> bool:
    """True if a function was made by :func:`fused_methods`."""
    return function in _names


def parts_of(function: FunctionType, module: nn.Module) -> Dict[str, Any]:
    """Return the parts that a fused method calls: the projection, the parts that pass its result on, and the norm."""
    return {name: attribute_of(module, name) for name in _names[function]}


_FOUND = "@found"  # a name that no source spells
_names: Dict[Any, Tuple[str, ...]] = {}  # names of parts, by fused method


@remembered
def _made(
    forward: FunctionType, roles: Tuple[Tuple[str, str], ...], answers: branches.Answers, memory: str
) -> Optional[FunctionType]:
    """Return the forward with the fused call inserted first; the original code is the fallback if no op supports it."""
    if rewriter.segment_role(forward, roles, answers) != Role.SECOND:
        return None
    segment = split_mlps.seconds[forward]
    if not segment.ending or segment.names is None or segment.found.between:
        return None
    projection, *behind, norm = segment.names
    tree = copy.deepcopy(effects.readable(forward))
    given = [ast.Name(name, ast.Load()) for name in ("@plan", *forward.__code__.co_varnames[:3])]
    given += [ast.Constant(1.0), ast.Constant(None), ast.Name("@operands", ast.Load())]
    plan = plans.made(forwards.LINEAR, (projection,), 0, behind=tuple(behind), last=norm)
    place = int(ast.get_docstring(tree, clean=False) is not None)
    tree.body[place:place] = [
        ast.Assign([ast.Name(_FOUND, ast.Store())], made_call("block", *given)),
        ast.If(
            ast.Compare(ast.Name(_FOUND, ast.Load()), [ast.IsNot()], [ast.Constant(None)]),
            [ast.Return(ast.Name(_FOUND, ast.Load()))],
            [],
        ),
    ]
    instead = Instead(as_written("forward", forward), rewriter.TRACED, None, None, False)
    made = rewriter.method_of(
        tree, forward, {**NAMES, "@plan": plan, "@operands": shortcut.OF_ENDING}, instead, (), memory
    )
    _names[made] = segment.names
    split_mlps.seconds[made] = segment
    return made
