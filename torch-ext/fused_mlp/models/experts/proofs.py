"""Proof, from the source of a class, of what a module with stacked expert weights computes.

A class that transformers decorates with its experts interface declares the layout of its weights; its gate is analysed,
and its own loop over the experts is checked to compute the same. For any other class, only the loop is analysed.
Modules not proved to compute the sum that ``experts_mlp`` computes are not fused.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Callable, List, NamedTuple, Optional, Tuple, Union

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ...experts import Form
from ..proving import mixtures as reading
from ..proving.evaluation import Evaluation
from ..proving.mixtures import SKIPS_NONE, SKIPS_ONE, Loop, Sizes
from ..proving.values import MISSING, PLAIN, Bound, NotProved, Proof, Proofs
from ..reading.attributes import class_of
from . import interface, quantized


class Weights(NamedTuple):
    """Names of a module's parameters, and of the part that normalises an expert's output, if there is one."""

    up: str
    down: str
    up_bias: Optional[str] = None
    down_bias: Optional[str] = None
    norm: Optional[str] = None


@dataclass(frozen=True)
class Experts:
    """The computation of a module of experts.

    ``other_loop`` is the reason why the class's own loop is not known to compute it too; None if it is. ``wide`` is
    True if the loop computes in float32 throughout. ``skips`` says which indices past the last expert the loop skips.
    """

    weights: Weights
    form: Form
    experts: int
    other_loop: Optional[str] = None
    wide: bool = False
    skips: int = SKIPS_NONE


@dataclass(frozen=True)
class Unknown:
    """The reason why the computation of a module that looks like experts is not proved."""

    reason: str


def looks_like_experts(module: nn.Module) -> bool:
    """True if the class has the experts interface, or the module holds two weight stacks and takes a routing."""
    method = method_of(module)
    if not isinstance(method, FunctionType):
        return False
    return interface.original_of(method) is not None or (len(_stacks(module)) == 2 and takes_routing(method))


def of(module: nn.Module) -> Union[Experts, Unknown]:
    """Return the computation of a module that looks like experts, or the reason why it is unknown."""
    return proof_of(module).found


def proof_of(module: nn.Module) -> Proof:
    """Return the proof of what a module computes, valid while its dependencies hold. Proofs are cached by class."""
    key = class_of(module), _shapes(module)
    return _proofs.get(key, module, lambda: _proved(module))


_proofs = Proofs(most=8)


def _shapes(module: nn.Module) -> Tuple[Any, ...]:
    """Return the shapes of a module's parameters, and the names that torch parametrizes."""
    parts = module._modules.get("parametrizations", ())
    return tuple((name, value if value is None else value.shape) for name, value in module._parameters.items()), *parts


def computed(
    module: nn.Module,
    found: Experts,
    call: Callable[..., Optional[Tensor]],
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    tensors: Tuple[Optional[Tensor], ...],
) -> Optional[Tensor]:
    """Return the output of experts, computed by ``call`` with the arguments of ``calls.experts_mlp``, or None."""
    if found.weights.norm is None:
        return call(x, index, weights, *tensors, found.form)
    tokens, top_k = index.shape  # each slot is a token of one expert, because a norm precedes the sum
    ones = torch.ones_like(weights, dtype=x.dtype)
    of_slots = call(x.repeat_interleave(top_k, 0), index.reshape(-1, 1), ones.reshape(-1, 1), *tensors, found.form)
    if of_slots is None:
        return None
    products = getattr(module, found.weights.norm)(of_slots) * weights.reshape(-1, 1)
    products = products.masked_fill((index >= tensors[0].shape[0]).reshape(-1, 1), 0.0)
    return products.view(tokens, top_k, -1).sum(1).to(x.dtype)


def tensors_of(module: nn.Module, weights: Weights) -> Tuple[Optional[Tensor], ...]:
    """Return the weights of a module in the order in which ``experts_mlp`` accepts them."""
    names = (weights.up, weights.down, weights.up_bias, weights.down_bias)
    return tuple(None if name is None else getattr(module, name) for name in names)


# For torch.compile, which treats a proof as a constant. The proof's dependencies in the module are read in traced code,
# where Dynamo guards on them, so that similar modules share a graph.

_Plain = Tuple[Tuple[Any, ...], Tuple[Any, ...]]  # the fields of Experts, and the paths, names and values that are read


class _Known(type):
    def __instancecheck__(cls, module: Any) -> bool:
        return isinstance(of(module), Experts)


class Known(metaclass=_Known):
    """Modules whose experts are understood. Dynamo evaluates ``isinstance`` while it traces, and adds no guards for
    what the answer depends on; :func:`constantly_of` reads those values in traced code."""


def constantly_of(module: nn.Module) -> Optional[Experts]:
    """Like :func:`of`, for torch.compile; None if the computation is unknown."""
    if not isinstance(module, Known):
        return None
    for fields, read in _plain_proofs(type(module)):
        if _are_read(module, read):
            return Experts(Weights(*fields[0]), Form(*fields[1]), *fields[2:])
    return None


def _are_read(module: nn.Module, read: Tuple[Any, ...]) -> bool:
    for path, name, value in read:
        owner = module
        for part in path:
            owner = getattr(owner, part)
        if name is None:
            if type(owner) is not value:
                return False
        elif getattr(owner, name, None) != value:
            return False
    return True


@interface.constant
def _plain_proofs(kind: type) -> Tuple[_Plain, ...]:
    found = (proof for (of, _), proofs in _proofs.known.items() if of is kind for proof in proofs)
    return tuple(plain for plain in map(_plain, found) if plain is not None)


def _plain(proof: Proof) -> Optional[_Plain]:
    """Return a proof as constants; None if it found no experts, or a dependency outside the module has changed."""
    found, read = proof.found, []
    if not isinstance(found, Experts):
        return None
    for each in proof.dependencies:
        if type(each.owner) is not tuple:
            if not each.holds(None):
                return None
        elif each.part == "class" and each.owner:
            read.append((each.owner, None, each.value))
        elif type(each.value) in PLAIN and each.value is not MISSING and each.part != "call":
            read.append((each.owner, each.name, each.value))
    fields = (tuple(found.weights), tuple(found.form), found.experts, found.other_loop, found.wide, found.skips)
    return fields, tuple(read)


# Selection of modules.


def method_of(module: nn.Module) -> FunctionType:
    """Return the forward of a module's class, the original one if it was fused."""
    return class_of(module).forward


def _stacks(module: nn.Module) -> List[str]:
    """Return the parameters of a module that are stacks of matrices, one per expert."""
    found = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    return [name for name, parameter in found.items() if not is_lazy(parameter) and parameter.dim() == 3]


@functools.cache
def takes_routing(method: FunctionType) -> bool:
    """True if a method takes three arguments: tokens, the experts of each, and their weights."""
    parameters = list(inspect.signature(method).parameters.values())
    return len(parameters) == 4 and all(part.kind is part.POSITIONAL_OR_KEYWORD for part in parameters)


# Analysis.

_FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "has_post_expert_norm")


def _proved(module: nn.Module) -> Proof:
    method = method_of(module)
    own = interface.original_of(method)
    if type(module).__name__ == "Mxfp4GptOssExperts":
        return Proof(Unknown("MXFP4 weights in the layout of triton_kernels"), ())
    if any(parameter is not None and is_lazy(parameter) for parameter in module._parameters.values()):
        return Proof(Unknown("weights that are not initialised yet"), ())
    evaluation = Evaluation(module, decide=Sizes(module).decide)
    if own is not None:
        return _of_decorated(module, own, evaluation)
    try:
        loop = _loop(module, method, evaluation)
    except NotProved as error:
        return Proof(Unknown(f"an unrecognised loop: {error}"), evaluation.dependencies)
    experts = module_shape(module, loop.names[0])[0]
    return Proof(
        Experts(Weights(*loop.names), loop.form, experts, None, loop.wide, loop.skips), evaluation.dependencies
    )


def _of_decorated(module: nn.Module, own: FunctionType, evaluation: Evaluation) -> Proof:
    """Return the experts of a class whose flags declare the layout of its weights."""
    try:
        flags = {flag: evaluation.attribute(flag) for flag in _FLAGS}
    except NotProved:
        flags = {}
    if not flags or not all(type(flag) is bool for flag in flags.values()):
        return Proof(Unknown("missing flags of the experts interface"), evaluation.dependencies)
    gated, biased = flags["has_gate"], flags["has_bias"]
    up = "gate_up_proj" if gated else "up_proj"
    weights = Weights(up, "down_proj", *((f"{up}_bias", "down_proj_bias") if biased else (None, None)))
    weights = weights._replace(norm="post_expert_norm" if flags["has_post_expert_norm"] else None)
    parameters = [name for name in weights[:4] if name is not None]
    is_there = weights.norm is None or weights.norm in module._modules
    if not is_there or any(module_shape(module, name) is None for name in parameters):
        return Proof(Unknown("missing parameters of the experts interface"), evaluation.dependencies)
    if not _fit(module, weights, gated, flags["is_transposed"]):
        return Proof(Unknown("weights whose shapes do not match"), evaluation.dependencies)
    try:
        read = reading.gate_of if gated else reading.activation_of
        form = read(evaluation, "_apply_gate" if gated else "act_fn")
    except NotProved as error:
        what = "a gate" if gated else "an activation"
        reason = str(error) if str(error).startswith(what) else f"{what} that is not recognised: {error}"
        return Proof(Unknown(reason), evaluation.dependencies)
    form = form._replace(transposed=flags["is_transposed"])
    experts = Experts(weights, form, module_shape(module, up)[0], "it computes something different")
    if quantized.is_read(module):
        return Proof(dataclasses.replace(experts, other_loop=None, skips=SKIPS_ONE), evaluation.dependencies)
    of_loop = Evaluation(module, reading.keeps_norm(weights.norm), Sizes(module).decide)
    try:
        loop = _loop(module, own, of_loop)
        if loop.names == tuple(weights) and loop.form == form:
            experts = Experts(weights, form, experts.experts, None, loop.wide, loop.skips)
    except NotProved as error:
        experts = Experts(weights, form, experts.experts, str(error))
    merged = {each.key: each for each in (*evaluation.dependencies, *of_loop.dependencies)}
    return Proof(experts, tuple(merged.values()))


def _loop(module: nn.Module, method: FunctionType, evaluation: Evaluation) -> Loop:
    loop = reading.loop_of(evaluation, Bound(method, evaluation.root), Sizes(module))
    weights = Weights(*loop.names)
    if any(name is not None and module_shape(module, name) is None for name in weights[:4]):
        raise NotProved("weights that are not parameters of the module")
    if not _fit(module, weights, loop.form.gated, loop.form.transposed):
        raise NotProved("weights whose shapes do not match")
    return loop


def module_shape(module: nn.Module, name: str) -> Optional[torch.Size]:
    """Return the shape of a module's parameter, including one that torch parametrizes; None if there is none."""
    if name in module._modules.get("parametrizations", ()):
        return getattr(module, name).shape
    parameter = module._parameters.get(name)
    return None if parameter is None else parameter.shape


def _fit(module: nn.Module, weights: Weights, gated: bool, transposed: bool) -> bool:
    up, down = module_shape(module, weights.up), module_shape(module, weights.down)
    if len(up) != 3 or len(down) != 3 or up[0] != down[0]:
        return False
    in_dim, out_dim = (1, 2) if transposed else (2, 1)
    width, hidden = up[in_dim], down[in_dim]
    return down[out_dim] == width and up[out_dim] == (2 * hidden if gated else hidden)
