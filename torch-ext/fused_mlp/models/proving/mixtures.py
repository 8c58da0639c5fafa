"""Proof of what experts compute, from the form of their gate and of the loop over them."""

from __future__ import annotations

import itertools
from typing import Any, Dict, Iterator, NamedTuple, Optional, Set, Tuple

from torch import nn

from ...activations import ACTIVATIONS
from ...experts import Form as ExpertsForm
from . import algebra
from .activations import form_of
from .algebra import Form, Sum, atom
from .evaluation import Evaluation, inputs
from .values import Held, Node, NotProved, Value

(_HIDDEN, _X, _INDEX, _SHARES) = inputs("hidden", "x", "index", "weights")
_GIVEN = (_X, _INDEX, _SHARES)

SKIPS_NONE, SKIPS_ONE, SKIPS_ALL = 0, 1, 2  # skipped indices past the last expert; the first of them is the sentinel


class Loop(NamedTuple):
    """A loop that sums each token's expert outputs, scaled by their routing weights.

    ``names`` are parameter names: the weights of both products, their biases, and the part that normalises the result.
    ``wide`` is True if the products are computed in float32, whatever the input dtype.
    """

    names: Tuple[Optional[str], ...]
    form: ExpertsForm
    wide: bool
    skips: int


def gate_of(evaluation: Evaluation, name: str) -> ExpertsForm:
    """Return the form of experts whose method computes the product of gate and up, given both in one tensor.

    Raises:
        NotProved: the method computes anything else.
    """
    value = evaluation.returned(evaluation.attribute(name), (_HIDDEN,))
    _is_in_own_dtype(value)
    return _gated(Form(_leaf_of_gate)(value), atom("hidden"))


def activation_of(evaluation: Evaluation, name: str) -> ExpertsForm:
    """Like :func:`gate_of`, for experts without a gate. Raises NotProved."""
    value = evaluation.returned(evaluation.attribute(name), (_HIDDEN,))
    _is_in_own_dtype(value)
    return _ungated(Form(_leaf_of_gate)(value), atom("hidden"))


def loop_of(evaluation: Evaluation, method: Any, sizes: Sizes) -> Loop:
    """Return the computation of a class's own loop over its experts.

    Raises:
        NotProved: the loop computes anything but the sum, over a token's experts, of expert output times weight.
    """
    value = evaluation.returned(method, _GIVEN)
    _is_in_own_dtype(value)
    found = algebra.as_atom(Form(_leaf_of_sum)(value))
    if not isinstance(found, Node):
        raise NotProved("a sum over experts that is modified afterwards")
    over, start, skips, (dim, token, source) = found.args
    if start.op != "zeros_like" or start.args[0] != _X or dim != 0:
        raise NotProved("a sum that does not start from zeros for each token")
    loop = _Body(over, sizes)
    if loop.slot(token) != "token":
        raise NotProved("a sum over rows other than an expert's tokens")
    algebra.dtype_of(source, _is_own)
    for condition in skips:
        loop.leave_out(condition)
    return loop.read(source)


class Sizes:
    """The number of experts in the weight stacks of a module, which decides conditions on expert numbers."""

    def __init__(self, module: nn.Module) -> None:
        parameters = module._parameters
        self._of = {name: value.shape for name, value in parameters.items() if value is not None}
        self._of.update({name: getattr(module, name).shape for name in module._modules.get("parametrizations", ())})

    def number(self, value: Any) -> Optional[int]:
        return value if type(value) is int else None

    def experts(self, name: str) -> int:
        return self._of[name][0]

    def decide(self, condition: Node) -> Optional[bool]:
        if condition.op not in ("eq", "ne", "ge", "gt", "lt", "le") or len(condition.args) != 2:
            return None
        each, least = _element(condition.args[0]), self.number(condition.args[1])
        most = None if each is None else self.number(_count(each))
        if least is None or most is None or least < most:
            return None
        return condition.op in ("ne", "lt", "le")


class _Body:
    """One iteration of the body of a loop over experts."""

    def __init__(self, over: Node, sizes: Sizes) -> None:
        self._each, self._sizes = Node("each", (over,)), sizes
        self._left_out: Set[int] = set()  # experts whose tokens are all skipped by a condition
        self._masked: Any = None  # number of experts that the mask distinguishes
        if _count(self._each) is None:
            raise NotProved("a loop over something other than experts")

    def slot(self, node: Any) -> Optional[str]:
        """Return which coordinate of this expert's slots a node holds: the token, or the position in its top-k."""
        node = _attached(node)
        if node.op != "item of" or _attached(node.args[0]).op != "where":
            return None
        condition, *others = _attached(node.args[0]).args
        chosen = self._chosen(condition) if others == [None, None] else None
        return None if chosen is None else chosen[node.args[1]]

    def _chosen(self, node: Any) -> Optional[Tuple[str, str]]:
        """Return the dimensions of a mask that selects the slots routed to this expert."""
        node = _attached(node)
        if node.op == "squeeze" and node.args[1] == 0:
            node = _attached(node.args[0])
        if node.op == "getitem" and len(node.args[1]) == 1 and _element(node.args[1][0]) == self._each:
            self._masked = _classes(node.args[0])
            return ("position", "token") if self._masked is not None else None
        if node.op == "transpose" and set(node.args[1:]) in ({0, 1}, {-1, -2}):
            dims = self._chosen(node.args[0])
            return None if dims is None else dims[::-1]
        is_choice = node.op == "eq" and node.args[0] == _INDEX and _element(node.args[1]) == self._each
        return ("token", "position") if is_choice else None

    def leave_out(self, condition: Node) -> None:
        """Record a condition that ends the iteration: on the number of an expert, or on having no tokens."""
        left, right = condition.args if len(condition.args) == 2 else (None, None)
        if condition.op == "eq" and _element(left) == self._each and self._sizes.number(right) is not None:
            self._left_out.add(self._sizes.number(right))
            return
        counts = isinstance(left, Node) and (left.op == "numel" or (left.op == "size" and left.args[1] == 0))
        if counts and self.slot(left.args[0]) is not None and (condition.op, right) in (("eq", 0), ("lt", 1)):
            return
        raise NotProved(f"a condition ({condition.op}) that leaves out experts or tokens")

    def read(self, source: Node) -> Loop:
        terms = self._without_share(Form(self._leaf)(source))
        norm = algebra.as_atom(terms)
        norm = norm if norm is not None and norm[0] == "module" else None
        inner, down, transposed, down_bias = _product(terms if norm is None else norm[2])
        hidden = next(_found(inner, "half"), None)
        hidden = next(_found(inner, "product"), None) if hidden is None else hidden
        if hidden is None:
            raise NotProved("no product of an expert's tokens and weights")
        gated, hidden = hidden[0] == "half", hidden[1] if hidden[0] == "half" else atom(hidden)
        form = _gated(inner, hidden) if gated else _ungated(inner, hidden)
        rows, up, up_transposed, up_bias = _product(hidden)
        if rows != atom("rows") or transposed != up_transposed:
            raise NotProved("a product of something other than an expert's tokens")
        names = (up, down, up_bias, down_bias, None if norm is None else norm[1])
        return Loop(names, form._replace(transposed=transposed), _is_wide(source), self._skips(up))

    def _skips(self, up: str) -> int:
        """The ``SKIPS_`` constant for the indices past the last expert that the loop skips; others raise."""
        experts, count = self._sizes.experts(up), self._sizes.number(_count(self._each))
        if self._left_out and min(self._left_out) < experts:
            raise NotProved(f"a loop that leaves out expert {min(self._left_out)}")
        masked = None if self._masked is None else self._sizes.number(self._masked)
        over_all, most = self._each.args[0].op == "range", (experts, experts + 1)
        is_known = (
            count == experts and masked in (None, *most) if over_all else count in most and masked in (None, count)
        )
        if not is_known:
            raise NotProved(f"a loop over {count} experts, of {experts}")
        if over_all:
            return SKIPS_ALL if masked is None else masked - experts
        return SKIPS_ONE if experts in self._left_out and count > experts else SKIPS_NONE

    def _without_share(self, value: Sum) -> Sum:
        """Divide a sum by the routing weights of the expert."""
        terms: Dict[Any, float] = {}
        for factors, scale in value:
            rest = dict(factors)
            if rest.pop("share", None) != 1:
                raise NotProved("no product with a token's routing weights")
            terms[frozenset(rest.items())] = scale
        return frozenset(terms.items())

    def _leaf(self, node: Node, form: Form) -> Optional[Sum]:
        if node.op in ("getitem", "unsqueeze"):
            return self._rows(node) or _half(node, form) or self._bias(node)
        if node.op == "item of":
            return _half(node, form)
        if node.op in ("linear", "matmul"):
            return self._times_weight(node, form)
        if node.op == "module":
            return atom(("module", node.args[0], form(node.args[1])))
        return None

    def _rows(self, node: Node) -> Optional[Sum]:
        """Match the tokens of the expert, or its weights for them."""
        if node.op == "unsqueeze":
            inner = _attached(node.args[0])
            is_share = node.args[1] in (-1, 1) and inner.op == "getitem"
            return atom("share") if is_share and self._is_share(inner, 2) else None
        if node.op != "getitem":
            return None
        if node.args[0] == _X and len(node.args[1]) == 1 and self.slot(node.args[1][0]) == "token":
            return atom("rows")
        return atom("share") if self._is_share(node, 3) else None

    def _is_share(self, node: Node, dims: int) -> bool:
        of, keys = node.args
        is_slot = [self.slot(key) for key in keys[:2]] == ["token", "position"]
        return of == _SHARES and is_slot and keys[2:] == (None,) * (dims - 2)

    def _bias(self, node: Node) -> Optional[Sum]:
        name = self._weight(node)
        return None if name is None else atom(("bias", name))

    def _weight(self, node: Any) -> Optional[str]:
        """Return the name of the stack that this expert's weight is taken from."""
        if isinstance(node, Node) and node.op == "to":
            return self._weight(node.args[0])
        if not isinstance(node, Node) or node.op != "getitem" or node.args[0].op != "parameter":
            return None
        ((name, *more),), keys = node.args[0].args, node.args[1]
        return None if more or len(keys) != 1 or _element(keys[0]) != self._each else name

    def _times_weight(self, node: Node, form: Form) -> Optional[Sum]:
        rows, weight, *biases = node.args
        name = self._weight(weight)
        if name is None:
            raise NotProved("a product with something other than an expert's weights")
        product = atom(("product", form(rows), name, node.op == "matmul"))
        return product if biases in ([], [None]) else algebra.plus(product, form(biases[0]))


def _leaf_of_sum(node: Node, form: Form) -> Optional[Sum]:
    return atom(node) if node.op == "loop" else None


def _attached(value: Any) -> Node:
    """Strip ``detach`` from a node."""
    node = value if isinstance(value, Node) else Node("number", (value,))
    return _attached(node.args[0]) if node.op == "detach" else node


def _classes(node: Any) -> Any:
    """Return the number of experts of a one-hot mask [experts, top_k, tokens]; None if a node is no such mask."""
    node = _attached(node)
    if node.op != "permute" or node.args[1] != (2, 1, 0):
        return None
    inner = _attached(node.args[0])
    return inner.args[1] if inner.op == "one_hot" and inner.args[0] == _INDEX else None


def _element(node: Any) -> Optional[Node]:
    """Return the loop's symbol for the current expert if a node is the expert's number."""
    node = _attached(node)
    while node.op == "scalar" or (node.op == "getitem" and node.args[1] == (0,)):
        node = _attached(node.args[0])
    return node if node.op == "each" else None


def _count(each: Node) -> Any:
    """Return the exclusive upper bound of the expert numbers that a loop iterates over; None if it is another loop."""
    over = _attached(each.args[0])
    if over.op == "range":
        return over.args[0]
    if over.op == "squeeze" and over.args[1] == -1:
        over = _attached(over.args[0])
    if over.op != "nonzero":
        return None
    hit = _attached(over.args[0])
    sums = _attached(hit.args[0]) if hit.op == "gt" and hit.args[1] == 0 else hit
    is_sum = sums.op == "sum" and set(sums.args[1] or ()) in ({-1, -2}, {1, 2}) and not sums.args[2]
    return _classes(sums.args[0]) if is_sum else None


def _leaf_of_gate(node: Node, form: Form) -> Optional[Sum]:
    return atom("hidden") if node == _HIDDEN else _half(node, form)


def _half(node: Node, form: Form) -> Optional[Sum]:
    """Match a half of a tensor's last dimension, whose halves are adjacent or interleaved."""
    if node.op == "item of" and node.args[0].op == "chunk":
        of, chunks, dim = node.args[0].args
        return atom(("half", form(of), node.args[1], False)) if chunks == 2 and dim in (-1, 1) else None
    if node.op != "getitem" or len(node.args[1]) != 2 or node.args[1][0] is not Ellipsis:
        return None
    part = {("slice", None, None, 2): 0, ("slice", 0, None, 2): 0, ("slice", 1, None, 2): 1}.get(node.args[1][1])
    return None if part is None else atom(("half", form(node.args[0]), part, True))


def _found(value: Any, kind: str) -> Iterator[Any]:
    """Yield the atoms of a kind in a form."""
    for factors, _ in value:
        for part, _ in factors:
            if isinstance(part, tuple):
                if part[0] == kind:
                    yield part
                yield from (each for inner in part[1:] if isinstance(inner, frozenset) for each in _found(inner, kind))


def _product(value: Sum) -> Tuple[Sum, str, bool, Optional[str]]:
    """Split one product into its input, the name of its weights, the transposed flag and the name of its bias."""
    atoms = [algebra.as_atom(frozenset({term})) for term in value]
    products = [part for part in atoms if part is not None and part[0] == "product"]
    biases = [part for part in atoms if part is not None and part[0] == "bias"]
    if len(products) != 1 or len(biases) > 1 or len(atoms) != len(products) + len(biases):
        raise NotProved("not a plain sum of products and biases")
    _, inner, name, transposed = products[0]
    return inner, name, transposed, biases[0][1] if biases else None


def _gated(value: Sum, hidden: Sum) -> ExpertsForm:
    halves = set(_found(value, "half"))
    layouts = {(part[1], part[3]) for part in halves}
    if len(layouts) != 1 or next(iter(layouts))[0] != hidden:
        raise NotProved("a gate that is not recognised")
    ((_, interleaved),) = layouts
    gate, up = (atom(("half", hidden, part, interleaved)) for part in (0, 1))
    limits = {high for _, of, low, high in _found(value, "clamp") if of == gate}
    wanted = algebra.compared(value)
    for row, limit, offset in itertools.product(ACTIVATIONS, (None, *limits), (0.0, 1.0)):
        bounded, linear = gate, up
        if limit is not None:
            bounded, linear = atom(("clamp", gate, None, limit)), atom(("clamp", up, -limit, limit))
        found = algebra.times(form_of(row, bounded), algebra.plus(linear, algebra.number(offset)))
        if algebra.compared(found) == wanted and _limits_of(found) == _limits_of(value):
            return ExpertsForm(row.code, True, interleaved, False, limit, offset)
    raise NotProved("a gate that is not recognised")


def _limits_of(value: Sum) -> Any:
    return {part[2:] for part in _found(value, "clamp")}


def _ungated(value: Sum, hidden: Sum) -> ExpertsForm:
    wanted = algebra.compared(value)
    for row in ACTIVATIONS:
        if algebra.compared(form_of(row, hidden)) == wanted:
            return ExpertsForm(row.code, False, False, False, None, 0.0)
    raise NotProved("an activation that is not recognised")


def _is_own(node: Node) -> bool:
    return node.op in ("input", "parameter")


def _is_in_own_dtype(value: Value) -> None:
    """Raise NotProved if the dtype of a result differs from that of the input."""
    if not isinstance(value, Node) or algebra.dtype_of(value, _is_own) != algebra.OWN:
        raise NotProved("a result of a different dtype")


def _is_wide(value: Any) -> bool:
    if not isinstance(value, Node):
        return False
    products = value.args if value.op in ("linear", "matmul") else ()
    is_wide = any(algebra.dtype_of(part, _is_own) not in (algebra.OWN, None) for part in products)
    return is_wide or any(map(_is_wide, value.args))


def keeps_norm(name: Optional[str]) -> Any:
    """Return a leaf for an evaluation that treats the part that normalises an expert's output as opaque."""

    def leaf(part: Held, given: Tuple[Value, ...]) -> Optional[Value]:
        return Node("module", (name, *given)) if part.path == (name,) and len(given) == 1 else None

    return leaf
