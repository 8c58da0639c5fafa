"""Recognition of norms over the last dimension and of scales: torch's by class, others by proof from their source.

At each call compiled code checks that the class and the module have not changed since (torch-ext/calls/parts.cpp,
``read_norm``).
"""

from __future__ import annotations

from types import FunctionType
from typing import Any, Dict, Iterator, NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import nn

from ..proving import algebra
from ..proving.algebra import Sum, atom, number, plus, power, times
from ..proving.evaluation import Evaluation, inputs
from ..proving.values import Bound, Dependency, Node, NotProved, Proof, Proofs, Value, calls_nothing, looked_up, proved
from . import refusals
from .guards import Guards, guards_of

LAYER, RMS, RMS_OF_ONE_MORE, SCALE = 1, 2, 3, 4  # the codes of the ops (torch-ext/ops/norms/norm.h)


class Norm(NamedTuple):
    """A class of norms: its code, and the attributes that hold its eps, if it has one, and its weight.

    ``rounded``: the normalised values are rounded before the multiplication by the weight. ``wide``: the weight may be
    float32 although x is not.
    """

    guards: Guards
    code: int
    eps: Optional[str]
    of_torch: bool
    has_bias: bool
    weight: str = "weight"
    rounded: bool = False
    wide: bool = False


def _of_torch(code: int, kind: type, function: str, has_bias: bool) -> Norm:
    home = nn.modules.normalization
    forward = kind, "forward", refusals.unpatched(kind, "forward", home)
    guards = Guards((forward, *refusals.codes_of(kind.forward), (F, function, refusals.unpatched(F, function, F))))
    return Norm(guards, code, "eps", True, has_bias)


known: Dict[type, Norm] = {nn.LayerNorm: _of_torch(LAYER, nn.LayerNorm, "layer_norm", True)}
if hasattr(nn, "RMSNorm"):
    known[nn.RMSNorm] = _of_torch(RMS, nn.RMSNorm, "rms_norm", False)
_OF_TORCH = tuple(known)


def code_of(module: nn.Module) -> Optional[int]:
    """Return the code of a norm or a scale and register its class in ``known``; None for any other module."""
    kind, state = type(module), module.__dict__
    if kind in _OF_TORCH:
        return known[kind].code
    if state["_modules"] or not state["_parameters"]:
        return None
    forward = looked_up(kind, "forward")
    if kind.__call__ is not refusals._CALL or type(forward) is not FunctionType or hasattr(forward, "__wrapped__"):
        return None
    found = _proofs.get(kind, module, lambda: _proved(module, forward)).found
    if found is None:
        return None
    known[kind] = found
    return found.code


_proofs = Proofs()
(_X,) = inputs("x")
_WEIGHT, _BIAS, _EPS = Node("parameter", (("weight",),)), Node("parameter", (("bias",),)), Node("attribute", ("eps",))
_SHAPE = Node("attribute", ("normalized_shape",))


def _proved(module: nn.Module, forward: FunctionType) -> Proof:
    evaluation = Evaluation(module, calls_nothing, _is_narrow, symbols=(float, tuple))

    def norm_in(value: Value) -> Optional[Norm]:
        is_norm = isinstance(value, Node) and algebra.dtype_of(value, _is_own) == algebra.OWN
        return _norm_of(value, type(module), forward, evaluation.dependencies) if is_norm else None

    return proved(evaluation, Bound(forward, evaluation.root), (_X,), norm_in)


def _is_narrow(condition: Node) -> Optional[bool]:
    """True if a condition tests for a 16-bit weight; for other weights, the cast that it guards does nothing."""
    if condition.op != "in":
        return None
    (of, among) = condition.args
    return True if set(among) == {torch.float16, torch.bfloat16} and of.args[0].op == "parameter" else None


def _is_own(node: Node) -> bool:
    """True for nodes with the dtype of x, which the weight of a fused norm has too."""
    return node == _X or node.op == "parameter"


def _norm_of(value: Node, kind: type, forward: FunctionType, dependencies: Tuple[Dependency, ...]) -> Optional[Norm]:
    own = ((kind, "__call__", refusals._CALL), (kind, "forward", forward))
    if issubclass(kind, nn.LayerNorm) and _is_layer_norm(value):
        guards = guards_of(each for each in dependencies if each.owner != () or each.name not in _OF_LAYER_NORM)
        if guards is None:
            return None
        torchs = known[nn.LayerNorm]
        return torchs._replace(guards=Guards((*own, *guards.unchanged, *torchs.guards.unchanged)))
    guards, leaves = guards_of(dependencies), set(_leaves(value))
    weights = [node.args[0][0] for node in leaves if node.op == "parameter" and len(node.args[0]) == 1]
    attributes = [node.args[0] for node in leaves if node.op == "attribute"]
    if guards is None or len(weights) != 1 or len(attributes) > 1:
        return None
    (weight,), eps = weights, next(iter(attributes), None)
    code = _code(algebra.Form(_leaf)(value), weight, eps)
    names = dict.fromkeys((weight, *attributes, *(name for name, *value in guards.own if value), *guards.hidden))
    guards = Guards((*own, *guards.unchanged), guards.own, tuple(names))
    rounded = _is_rounded(value)
    wide = not rounded and value.op == "to" and value.args[1] == Node("dtype", (_X,))
    return None if code is None else Norm(guards, code, eps, False, False, weight, rounded, wide)


def _is_rounded(value: Node) -> bool:
    """True if a factor of the product with the weight has the dtype of x."""
    product = _uncast(value)
    factors = [part for part in product.args if isinstance(part, Node) and part != _X] if product.op == "mul" else []
    others = [part for part in factors if all(leaf.op != "parameter" for leaf in _leaves(part))]
    return any(algebra.dtype_of(part, _is_own) == algebra.OWN for part in others)


def _leaves(value: Any) -> Iterator[Node]:
    if isinstance(value, Node):
        yield from [value] if value.op in ("parameter", "attribute") else []
        for part in value.args:
            yield from _leaves(part)


def _code(form: Sum, weight: str, eps: Optional[str]) -> Optional[int]:
    x, scale = atom("x"), atom(("parameter", (weight,)))
    if eps is None:
        return SCALE if form == times(x, scale) else None
    normed = times(x, power(plus(atom("mean square"), atom(("attribute", eps))), -0.5))
    codes = {times(normed, scale): RMS, times(normed, plus(number(1.0), scale)): RMS_OF_ONE_MORE}
    return codes.get(form)


def _leaf(node: Node, form: algebra.Form) -> Optional[Sum]:
    if node == _X:
        return atom("x")
    if node.op in ("parameter", "attribute"):
        return atom((node.op, node.args[0]))
    if node.op != "mean":
        return None
    squares, *options = node.args
    is_wide = algebra.dtype_of(squares, _is_own) == torch.float32
    if not is_wide or options != [-1, True, None] or form(squares) != power(atom("x"), 2):
        raise NotProved("a mean of something other than the squares")
    return atom("mean square")


_OF_LAYER_NORM = ("weight", "bias", "normalized_shape", "")  # compiled code checks these and the class


def _is_layer_norm(value: Node) -> bool:
    """True for torch's layer norm, which computes in float32 whether or not its input is cast."""
    norm = _uncast(value)
    if norm.op != "layer_norm":
        return False
    x, shape, weight, bias, eps = norm.args
    is_computed_alike = algebra.dtype_of(x, _is_own) in (algebra.OWN, torch.float32)
    own = _uncast(weight) in (None, _WEIGHT) and _uncast(bias) in (None, _BIAS)
    return is_computed_alike and own and (_uncast(x), shape, eps) == (_X, _SHAPE, _EPS)


def _uncast(value: Any) -> Any:
    while isinstance(value, Node) and value.op == "to":
        value = value.args[0]
    return value
