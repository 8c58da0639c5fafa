"""Canonical form of expressions: sums of products of powers, with numeric coefficients.

The form omits casts. ``dtype_of`` returns the precision in which an expression is computed, and rejects expressions
that lose digits on the way.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Callable, Dict, FrozenSet, Optional, Tuple

import torch

from .values import Node, NotProved

Atom = Any  # an operation's name and its arguments
Product = FrozenSet[Tuple[Atom, float]]  # atoms with their exponents
Sum = FrozenSet[Tuple[Product, float]]  # products with their coefficients

ELEMENTWISE = {"abs", "add", "celu", "clamp", "cos", "div", "elementwise", "elu", "erf", "erfc", "exp", "expm1", "gelu"}
ELEMENTWISE |= {"hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "log1p", "logsigmoid", "maximum", "minimum"}
ELEMENTWISE |= {"mish", "mul", "neg", "pow", "reciprocal", "relu", "relu6", "rsqrt", "selu", "sigmoid", "silu", "sin"}
ELEMENTWISE |= {"softplus", "softsign", "sqrt", "square", "sub", "tanh", "tanhshrink", "to", "clone", "contiguous"}

_SAME = {"to", "clone", "contiguous"}
_LONGEST = 200  # terms in a sum

OWN = "own"  # the dtype of the function's inputs


def number(value: float) -> Sum:
    return frozenset() if value == 0 else frozenset({(frozenset(), _rounded(value))})


def atom(value: Atom) -> Sum:
    return frozenset({(frozenset({(value, 1)}), 1.0)})


def as_number(value: Sum) -> Optional[float]:
    """Return the number that a sum equals; None if it is not constant."""
    if not value:
        return 0.0
    ((factors, scale), *more) = value
    return scale if not factors and not more else None


def as_atom(value: Sum) -> Atom:
    """Return the atom that a sum equals; None if it is anything else."""
    ((factors, scale), *more) = value or ((frozenset(), 0.0),)
    ((found, exponent), *others) = factors or ((None, 1),)
    return found if scale == exponent == 1 and not more and not others else None


def plus(a: Sum, b: Sum, scale: float = 1.0) -> Sum:
    terms = dict(a)
    for factors, value in b:
        terms[factors] = terms.get(factors, 0.0) + scale * value
    return _sum(terms)


def times(a: Sum, b: Sum) -> Sum:
    terms: Dict[Product, float] = {}
    for one, x in a:
        for other, y in b:
            powers = dict(one)
            for part, exponent in other:
                powers[part] = powers.get(part, 0) + exponent
            if any(exponent == 0 for exponent in powers.values()):
                raise NotProved("a quotient of equal factors")
            product = frozenset(powers.items())
            terms[product] = terms.get(product, 0.0) + x * y
    if not a or not b:
        raise NotProved("a product with zero")
    return _sum(terms)


def power(base: Sum, exponent: float) -> Sum:
    scale = as_number(base)
    if scale is not None:
        return number(scale**exponent)
    if exponent == int(exponent) and 0 < exponent <= 6:
        return functools.reduce(times, [base] * int(exponent))
    return atom(("pow", base, exponent))


def sigmoid(value: Sum) -> Sum:
    return atom(("sigmoid", value))


def _sum(terms: Dict[Product, float]) -> Sum:
    if len(terms) > _LONGEST:
        raise NotProved("an expression that is too long")
    found = {factors: _rounded(scale) for factors, scale in terms.items()}
    if any(scale == 0 and factors for factors, scale in found.items()):
        raise NotProved("terms that cancel")
    return frozenset((factors, scale) for factors, scale in found.items() if scale != 0)


def _rounded(value: float, digits: int = 13) -> float:
    """Round off the last digits, which depend on the order of operations."""
    return float(f"{value:.{digits - 1}e}") if math.isfinite(value) else value


def compared(value: Any) -> Any:
    """Return the form by which expressions are compared. Constants are rounded to seven digits, because models often
    spell them out to seven digits or compute them in float32."""
    if isinstance(value, frozenset):
        return frozenset(
            (frozenset((compared(part), exponent) for part, exponent in factors), _rounded(scale, 7))
            for factors, scale in value
        )
    return tuple(map(compared, value)) if isinstance(value, tuple) else value


Leaf = Callable[[Node, "Form"], Optional[Sum]]


class Form:
    """Maps expressions to their form; ``leaf`` returns the form of nodes that are treated as opaque."""

    def __init__(self, leaf: Leaf) -> None:
        self._leaf = leaf
        self._known: Dict[int, Tuple[Node, Sum]] = {}

    def __call__(self, value: Any) -> Sum:
        if isinstance(value, Node):
            if id(value) not in self._known:
                found = self._leaf(value, self)
                self._known[id(value)] = value, self._of(value) if found is None else found
            return self._known[id(value)][1]
        if type(value) in (int, float) and math.isfinite(value):
            return number(float(value))
        raise NotProved(f"{value!r} as an operand")

    def _of(self, node: Node) -> Sum:
        name, args = node.op, node.args
        if name in _SAME:
            return self(args[0])
        if name in ("add", "sub"):
            return plus(self(args[0]), self(args[1]), 1.0 if name == "add" else -1.0)
        if name == "mul":
            return times(self(args[0]), self(args[1]))
        if name == "div":
            return times(self(args[0]), power(self(args[1]), -1))
        if name == "neg":
            return times(number(-1.0), self(args[0]))
        if name in _POWERS:
            return power(self(args[0]), _POWERS[name])
        if name == "pow" and type(args[1]) in (int, float):
            return power(self(args[0]), args[1])
        if name in _EXPANDED:
            return _EXPANDED[name](self(args[0]), *args[1:])
        if name in ELEMENTWISE:
            return atom((name, *(self(part) if isinstance(part, Node) else part for part in args)))
        raise NotProved(f"{name}, which is unknown here")


_POWERS = {"square": 2, "sqrt": 0.5, "rsqrt": -0.5, "reciprocal": -1}


def _tanh(x: Sum) -> Sum:
    return plus(times(number(2.0), sigmoid(times(number(2.0), x))), number(1.0), -1.0)


def _gelu(x: Sum, approximate: str) -> Sum:
    half = times(number(0.5), x)
    if approximate == "none":
        return plus(half, times(half, atom(("erf", times(number(math.sqrt(0.5)), x)))))
    if approximate != "tanh":
        raise NotProved("an unknown gelu")
    inner = plus(x, times(number(0.044715), power(x, 3)))
    return times(x, sigmoid(times(number(2.0 * math.sqrt(2.0 / math.pi)), inner)))


def _clamp(x: Sum, low: Any, high: Any) -> Sum:
    for bound in (low, high):
        if bound is not None and type(bound) not in (int, float):
            raise NotProved("a clamp with a bound that is not a number")
    if low is high is None:
        raise NotProved("a clamp without bounds")
    low = None if low is None or low == -math.inf else float(low)
    high = None if high is None or high == math.inf else float(high)
    if low is high is None:
        return x
    return atom(("relu", x)) if (low, high) == (0.0, None) else atom(("clamp", x, low, high))


_EXPANDED: Dict[str, Callable[..., Sum]] = {
    "clamp": _clamp,
    "gelu": _gelu,
    "sigmoid": sigmoid,
    "silu": lambda x: times(x, sigmoid(x)),
    "tanh": _tanh,
}


_OF_FIRST = {"getitem", "item of", "chunk", "detach", "unsqueeze", "squeeze", "view", "reshape", "index_select"}
_OF_FIRST |= {"transpose"}  # operations whose result has the dtype of their first argument


def dtype_of(value: Any, own: Callable[[Node], bool]) -> Any:
    """Return the dtype in which a node is computed: ``OWN`` or a wider one, or None for a number.

    ``own`` is true for the nodes that are inputs.

    Raises:
        NotProved: the dtype is unknown, or digits are lost on the way.
    """
    if not isinstance(value, Node) or value.op == "attribute":
        return None
    if own(value):
        return OWN
    if value.op == "to":
        return _cast(dtype_of(value.args[0], own), value.args[1], own)
    if value.op in _OF_FIRST:
        return dtype_of(value.args[0], own)
    if value.op == "loop":
        return dtype_of(value.args[1], own)
    if value.op == "zeros_like":
        given = value.args[1]
        return dtype_of(value.args[0], own) if given is None else _cast(OWN, given, own)
    if value.op in ELEMENTWISE or value.op in ("layer_norm", "linear", "matmul", "module", "mean", "sum"):
        found = {dtype_of(part, own) for part in value.args if isinstance(part, Node) and part.op != "dtype"} - {None}
        if not found:
            raise NotProved(f"{value.op} of something that is not a tensor")
        return functools.reduce(_wider, found)
    raise NotProved(f"{value.op}, whose dtype is unknown")


def _cast(source: Any, target: Any, own: Callable[[Node], bool]) -> Any:
    if isinstance(target, Node):
        if target.op != "dtype":
            raise NotProved("a cast to something that is not a dtype")
        return dtype_of(target.args[0], own)
    if target not in (torch.float32, torch.float64):
        raise NotProved(f"a cast to {target}")
    return target


def _wider(a: Any, b: Any) -> Any:
    order = (OWN, torch.float32, torch.float64)
    return max(a, b, key=order.index)
