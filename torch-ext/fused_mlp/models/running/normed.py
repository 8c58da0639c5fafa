"""A standalone norm as one op: before an attention, of queries and keys, or at the end of a model.

This covers norms whose class spells them out in several torch operations; torch's own norms are one operation already.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any, Dict, Optional

from torch import Tensor, nn

from ...autograd import norms as ops
from ...backends import native
from ..methods import switching
from ..parts import norms, refusals
from . import shortcut

KIND = "norm"


def fused_methods(module: nn.Module) -> Dict[str, FunctionType]:
    """Return the regenerated forward of a norm, by name; empty for any other module."""
    if not takes(module):
        return {}
    kind = type(module)
    method = switching.fused_forward(KIND, kind.forward, called)
    shortcut.know_kernel(kind, method)
    return {"forward": method}


def takes(module: nn.Module) -> bool:
    """True for a norm whose class uses several torch operations and that may run as one op."""
    kind = type(module)
    if shortcut.plain is None or (kind not in norms.known and norms.code_of(module) is None):
        return False
    return not norms.known[kind].of_torch and norms.known[kind].code != norms.SCALE


def called(norm: nn.Module, x: Any) -> Optional[Tensor]:
    """Run a norm of a known class as an op; None if its own code has to run."""
    found = shortcut.plain.normed(norm, x)
    if type(found) is not tuple:
        return found
    try:
        return ops.run(found)
    except RuntimeError:  # the module's own code reports the error
        return None


def name_of(module: nn.Module) -> str:
    """Return the pattern of a norm for reports."""
    known = (norms.known[kind] for kind in type(module).__mro__ if kind in norms.known)  # its class may have changed
    return "LayerNorm" if next(known).code == norms.LAYER else "RMSNorm"


def refusal(module: nn.Module) -> Optional[str]:
    """Return why a fused norm runs its original forward in its present state; None if it is one op."""
    norm = norms.known.get(type(module))
    if norm is None:
        return f"a {type(module).__name__}"
    weight = module._parameters.get(norm.weight)
    if type(weight) is not nn.Parameter or weight.is_meta:
        return None if type(weight) is nn.Parameter else f"a weight of type {type(weight).__name__}"
    return refusals.of_global_state() or native.refusal("norm_forward", weight)
