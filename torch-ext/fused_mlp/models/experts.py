"""What a module with stacks of experts' weights computes: read from its class, and seen on a miniature of it.

A class that transformers decorates with its experts interface says how its weights lie; what is left to find out is the
gate, and whether its own loop over the experts does the same. Of any other class all is found out. Its methods are run
on a small copy with other weights, if their source says that they only compute (``purity``), and what comes out is
compared with the formulas of ``experts_mlp``. What computes anything else is not understood.
"""

from __future__ import annotations

import ast
import ctypes
import functools
import inspect
import itertools
import math
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple, Union

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..activations import ACTIVATIONS, BY_CODE
from ..backends import reference
from ..experts import Form, traceable
from . import interface, obstacles, purity, switching
from .miniature import MiniatureError, miniature, routing, sizes_of
from .recognition import activation_of
from .source import tree_of

# The largest relative error of a row. A gate that is computed in float32 whatever it is given is nearer than this, and
# two formulas are further apart than ten times as much.
_TOLERANCE = 1e-5

_DTYPE = torch.float64


class Weights(NamedTuple):
    """The names of a module's parameters; of the part that normalises what an expert gives, if one does."""

    up: str
    down: str
    up_bias: Optional[str] = None
    down_bias: Optional[str] = None
    norm: Optional[str] = None


@dataclass(frozen=True)
class Experts:
    """What experts compute.

    ``loop``: whether the class's own loop over them computes it too; ``wide``: that it does so in float32 throughout.
    """

    weights: Weights
    form: Form
    loop: bool
    wide: bool


@dataclass(frozen=True)
class Unknown:
    """Why it is not understood what a module computes that looks like experts."""

    reason: str


def looks_like_experts(module: nn.Module) -> bool:
    """Whether a module's class has the experts interface, or holds two stacks of weights and takes a routing."""
    method = method_of(module)
    if not isinstance(method, FunctionType):
        return False
    return interface.original_of(method) is not None or (len(_stacks(module)) == 2 and takes_routing(method))


def constantly_of(module: nn.Module) -> Optional[Experts]:
    """:func:`of` for torch.compile, which takes what it is at the time for a constant; None also where unknown."""
    plain = _plainly_of(id(module))  # a module is no constant to torch 2.11, its identity is, and is guarded on
    return None if plain is None else Experts(Weights(*plain[0]), Form(*plain[1]), *plain[2:])


@interface.constant
def _plainly_of(identity: int) -> Optional[Tuple[Any, ...]]:
    found = of(ctypes.cast(identity, ctypes.py_object).value)
    if not isinstance(found, Experts):
        return None
    return tuple(found.weights), tuple(found.form), found.loop, found.wide


def of(module: nn.Module) -> Optional[Union[Experts, Unknown]]:
    """What a module computes that looks like experts; None for one that is none after all.

    It is found out once for all modules that are alike in what their methods read, but for the values of weights.
    """
    method = method_of(module)
    key = _key(module, method)
    if key not in _known:
        around = obstacles.of_surroundings()
        if around is not None:  # which a copy would be run under: it is found out another time
            return Unknown(around)
        _known[key] = _found_out(module, method)
    return _known[key]


_known: Dict[Tuple[Any, ...], Optional[Union[Experts, Unknown]]] = {}


def computed(
    module: nn.Module,
    found: Experts,
    call: Callable[..., Optional[Tensor]],
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    tensors: Tuple[Optional[Tensor], ...],
) -> Optional[Tensor]:
    """The output of experts, by a function with the arguments of ``calls.experts_mlp``; None where it gives none."""
    if found.weights.norm is None:
        return call(x, index, weights, *tensors, found.form)
    tokens, top_k = index.shape  # every slot is a token of one expert, since a norm stands before the sum
    ones = torch.ones_like(weights, dtype=x.dtype)
    of_slots = call(x.repeat_interleave(top_k, 0), index.reshape(-1, 1), ones.reshape(-1, 1), *tensors, found.form)
    if of_slots is None:
        return None
    products = getattr(module, found.weights.norm)(of_slots) * weights.reshape(-1, 1)
    products = products.masked_fill((index >= tensors[0].shape[0]).reshape(-1, 1), 0.0)
    return products.view(tokens, top_k, -1).sum(1).to(x.dtype)


def tensors_of(module: nn.Module, weights: Weights) -> Tuple[Optional[Tensor], ...]:
    """The weights of a module, as ``experts_mlp`` takes them."""
    names = (weights.up, weights.down, weights.up_bias, weights.down_bias)
    return tuple(None if name is None else getattr(module, name) for name in names)


# Which modules are looked at, and what they are told apart by.


def method_of(module: nn.Module) -> FunctionType:
    """The forward that the class of a module has, or had before it was fused."""
    return switching.class_of(module).forward


def _stacks(module: nn.Module) -> List[str]:
    """The parameters of a module that are stacks of matrices, one for each expert."""
    found = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    return [name for name, parameter in found.items() if not is_lazy(parameter) and parameter.dim() == 3]


@functools.cache
def takes_routing(method: FunctionType) -> bool:
    """Whether it takes three arguments: tokens, the experts of each, and their weights."""
    parameters = list(inspect.signature(method).parameters.values())
    return len(parameters) == 4 and all(part.kind is part.POSITIONAL_OR_KEYWORD for part in parameters)


_FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "has_post_expert_norm")


def _key(module: nn.Module, method: FunctionType) -> Tuple[Any, ...]:
    """What decides what a module computes, but for its weights."""
    kind, state = switching.class_of(module), module.__dict__
    gate, parts = getattr(kind, "_apply_gate", None), state["_modules"]
    key = [method, gate, "_apply_gate" in state]
    for name in names_read(method, gate):
        value = parts.get(name)
        if value is not None:
            key.append((type(value), activation_of(value)))
            continue
        value = state[name] if name in state else getattr(kind, name, None)
        known = value is None or type(value) in (bool, int, float, str, FunctionType)
        key.append(value if known else activation_of(value) if callable(value) else type(value))
    return tuple(key)


@functools.cache
def names_read(method: FunctionType, gate: Any) -> Tuple[str, ...]:
    """The attributes of a module that its methods read."""
    names = set(_FLAGS)
    for function in (interface.original_of(method) or method, gate):
        tree = tree_of(function) if isinstance(function, FunctionType) else None
        for node in () if tree is None else ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                names.add(node.attr)
    return tuple(sorted(names))


# Finding out.


def _found_out(module: nn.Module, method: FunctionType) -> Optional[Union[Experts, Unknown]]:
    own = interface.original_of(method)
    try:
        return _of_any_class(module, method) if own is None else _of_decorated(module, own)
    except MiniatureError as error:
        return Unknown(str(error))
    except Exception as error:  # a class may have what nobody foresaw: its own code runs
        return Unknown(f"{type(error).__name__}: {error}".splitlines()[0])


def _of_decorated(module: nn.Module, own: FunctionType) -> Union[Experts, Unknown]:
    """The experts of a class that says by flags how its weights lie."""
    flags = {flag: getattr(module, flag, None) for flag in _FLAGS}
    if not all(type(flag) is bool for flag in flags.values()):
        return Unknown("the flags of the experts interface are missing")
    gated, biased = flags["has_gate"], flags["has_bias"]
    up = "gate_up_proj" if gated else "up_proj"
    weights = Weights(up, "down_proj", *((f"{up}_bias", "down_proj_bias") if biased else (None, None)))
    weights = weights._replace(norm="post_expert_norm" if flags["has_post_expert_norm"] else None)
    if any(name is not None and getattr(module, name, None) is None for name in weights):
        return Unknown("the parameters of the experts interface are missing")
    sizes = _sizes(module, weights, gated, flags["is_transposed"])
    if sizes is None:
        return Unknown("weights of shapes that do not fit each other")
    small = miniature(module, sizes)
    form = _form_of_gate(module, small, sizes) if gated else _form_of_act(module)
    if form is None:
        return Unknown("a gate that is not known" if gated else "an activation that is not known")
    found = Experts(weights, form._replace(transposed=flags["is_transposed"]), False, False)
    return _with_loop(found, module, small, own, sizes)


def _of_any_class(module: nn.Module, method: FunctionType) -> Optional[Experts]:
    """Those of a class whose own loop is all there is to go by. What is not understood is not taken for experts."""
    if purity.reads(method, module) is None:
        return None
    for up, down in itertools.permutations(_stacks(module), 2):
        biases = (name if module._parameters.get(name) is not None else None for name in (f"{up}_bias", f"{down}_bias"))
        weights = Weights(up, down, *biases)
        for gated, transposed in itertools.product((True, False), repeat=2):
            sizes = _sizes(module, weights, gated, transposed)
            if sizes is None:
                continue
            small = miniature(module, sizes)
            for form in _forms(gated, _numbers(module, method, sizes)):
                found = Experts(weights, form._replace(transposed=transposed), False, False)
                found = _with_loop(found, module, small, method, sizes)
                if found.loop:
                    return found
    return None


def _sizes(module: nn.Module, weights: Weights, gated: bool, transposed: bool) -> Optional[Dict[int, int]]:
    """The sizes of a miniature; None where the weights do not fit each other."""
    up, down = getattr(module, weights.up), getattr(module, weights.down)
    if up.dim() != 3 or down.dim() != 3 or up.shape[0] != down.shape[0]:
        return None
    in_dim, out_dim = (1, 2) if transposed else (2, 1)
    width, hidden = up.shape[in_dim], down.shape[in_dim]
    if down.shape[out_dim] != width or up.shape[out_dim] != (2 * hidden if gated else hidden):
        return None
    return sizes_of(up.shape[0], width, hidden)


def _form_of_act(module: nn.Module) -> Optional[Form]:
    act = getattr(module, "act_fn", None)
    row = activation_of(act) if callable(act) else None
    return None if row is None else Form(row.code, False, False, False, None, 0.0)


def _form_of_gate(module: nn.Module, small: nn.Module, sizes: Dict[int, int]) -> Optional[Form]:
    """The form whose product of gate and up a module's method computes of both in one tensor."""
    gate = type(small)._apply_gate
    if "_apply_gate" in vars(module) or purity.reads(gate, module) is None:
        return None
    numbers = _numbers(module, gate, sizes)
    packed = _normal(12, 64) * _scales(12, numbers)
    try:
        with torch.no_grad():
            got = gate(small, packed)
    except Exception:  # whatever it needs, it cannot be seen
        return None
    forms = _forms(True, numbers)
    return next((form for form in forms if _error(got, _product(packed, form)) <= _TOLERANCE), None)


def _product(packed: Tensor, form: Form) -> Tensor:
    """What stands between the products of experts of this form."""
    gate, up = (packed[..., 0::2], packed[..., 1::2]) if form.interleaved else packed.chunk(2, dim=-1)
    if form.limit is not None:
        gate, up = gate.clamp(max=form.limit), up.clamp(-form.limit, form.limit)
    return BY_CODE[form.activation].function(gate) * (up + form.up_offset)


def _forms(gated: bool, numbers: List[float]) -> Iterator[Form]:
    """All forms that there may be; a gate is bounded by a number that the module holds."""
    for row in ACTIVATIONS:
        if not gated:
            yield Form(row.code, False, False, False, None, 0.0)
            continue
        for interleaved, limit, offset in itertools.product((False, True), (None, *numbers), (0.0, 1.0)):
            yield Form(row.code, True, interleaved, False, limit, offset)


def _numbers(module: nn.Module, method: FunctionType, sizes: Dict[int, int]) -> List[float]:
    """The numbers that a method reads of its module, and that are no sizes."""
    values = (vars(module).get(name) for name in sorted(purity.reads(method, module) or ()))
    numbers = [float(value) for value in values if type(value) in (int, float) and value not in sizes]
    return list(dict.fromkeys(number for number in numbers if 0.0 < number < math.inf))


def _with_loop(
    found: Experts, module: nn.Module, small: nn.Module, own: FunctionType, sizes: Dict[int, int]
) -> Experts:
    """Whether the class's own loop computes that too, and how."""
    if purity.reads(own, module) is None:
        return found
    up = getattr(small, found.weights.up)
    x = _normal(12, up.shape[1 if found.form.transposed else 2]) * _scales(12, _numbers(module, own, sizes)) / 3.0
    index, weights = routing(12, up.shape[0], 2)
    given = (x, index, weights)
    try:
        with torch.no_grad():
            got = own(small, *given)
            expected = computed(small, found, _traceable, *given, tensors_of(small, found.weights))
            if not _error(got, expected) <= _TOLERANCE:
                return found
            rounded = [value.bfloat16() if value.is_floating_point() else value for value in given]
            small.bfloat16()
            got = own(small, *rounded)
            wide = (value.to(_DTYPE) if value.is_floating_point() else value for value in rounded)
            expected = computed(small.to(_DTYPE), found, _traceable, *wide, tensors_of(small, found.weights))
    except Exception:  # whatever it needs, it cannot be seen
        return found
    exact = float((got == expected.bfloat16()).double().mean())
    return Experts(found.weights, found.form, True, exact > 0.9)


def _traceable(*arguments: Any) -> Tensor:
    return traceable(*arguments, reference.act_and_mul)


def _normal(rows: int, columns: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(2)
    return torch.randn(rows, columns, generator=generator, dtype=_DTYPE, device="cpu")


def _scales(rows: int, numbers: List[float]) -> Tensor:
    """Scales of rows: gates within the bend of an activation, beyond it, and beyond every bound."""
    scales = torch.tensor([1.0, 1.0, 4.0, 3.0 * max(numbers, default=1.0)], dtype=_DTYPE, device="cpu")
    return scales.repeat(rows // 4 + 1)[:rows].unsqueeze(1)


def _error(got: Any, expected: Tensor) -> float:
    """The largest relative error of a row; infinite for what is no such tensor."""
    if not isinstance(got, Tensor) or got.shape != expected.shape:
        return math.inf
    error = (got.to(_DTYPE) - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-30)
    return float(error.max()) if bool(error.isfinite().all()) else math.inf
