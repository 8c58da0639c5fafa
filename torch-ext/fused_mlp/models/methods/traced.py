"""Fused methods under torch.compile: Dynamo records the original, and MLPs are matched in the recorded graph.

At every call of compiled code, Dynamo guards on everything that it read while tracing, so each check of a module would
be repeated each time. Therefore nothing is checked: Dynamo traces the method as written, with hooks and patched
functions, and the nodes recorded for an MLP are then replaced by one node of an op. The guards are the same as without
fusion, and anything that was not recorded as an MLP stays unchanged.

Nodes without users stay in the graph, and compilers drop them; a user's hook may hold their results.
"""

from __future__ import annotations

import contextlib
import operator
import warnings
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Set, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ... import calls, dispatch
from ...activations import BY_CODE, Activation
from ...autograd import linear, training
from ...backends import native
from ...dispatch import _open_blocks
from ..proving import activations, algebra, operations
from ..proving.values import Node, NotProved
from . import switching

is_traced = torch.compiler.is_dynamo_compiling


class _Unchanged(type):
    def __instancecheck__(cls, module: Any) -> bool:
        return switching.is_unchanged(module)


class Unchanged(metaclass=_Unchanged):
    """Fused modules whose class still has the methods that the fused ones were generated from.

    Dynamo evaluates ``isinstance`` while tracing and guards on nothing that the answer depends on.
    """


class _Recorded(type):
    def __instancecheck__(cls, module: Any) -> bool:
        try:
            from torch._dynamo.comptime import comptime  # noqa: F401
        except ImportError as error:
            _warn(error)
            return False
        return True


class Recorded(metaclass=_Recorded):
    """All modules, if this torch exposes what Dynamo records; otherwise none."""


def _warn(error: Exception) -> None:
    warnings.warn(f"nothing is fused under torch.compile: {type(error).__name__}: {error}", stacklevel=2)


def run(
    memory: Optional[str],
    name: str,
    method: Callable[..., Any],
    instead: Callable[[Any], Optional[Callable[..., Any]]],
    module: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run ``method(module, *args, **kwargs)`` as Dynamo traces it, with its MLPs fused, or the method that replaces it.

    ``memory`` selects the values that training saves; None if the method itself has no MLP. ``name`` is that of the
    method in its class, which may be patched. If a backend other than the compiled ops is forced, PyTorch runs the
    parts.
    """
    if getattr(type(module), name) is not method or not isinstance(module, Unchanged):
        method = instead(module) or method
    return recorded(memory, method, module, *args, **kwargs)


def recorded(memory: Optional[str], method: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
    """The same for a method that no class replaces: one inside a decorator's function, which may have compiled it."""
    if memory is None or not isinstance(module, Recorded):
        return method(module, *args, **kwargs)
    from torch._dynamo.comptime import comptime

    _open_blocks[-1].name  # for the guard: a retrace if another backend is forced  # noqa: B018
    comptime(_begin)
    result = method(module, *args, **kwargs)
    comptime(_end)
    return result


_BEGUN = "_fused_mlp_begun"  # an attribute of graphs: the methods that have begun and not ended


def _begin(context: Any) -> None:
    try:
        graph, memory = context.graph(), context.get_local("memory").as_python_constant()
        vars(graph).setdefault(_BEGUN, []).append((next(iter(reversed(graph.nodes)), None), memory))
    except KeyError:  # resumed after a graph break
        return
    except Exception as error:
        _warn(error)


def _end(context: Any) -> None:
    try:
        graph, nodes = context.graph(), []
        if not vars(graph).get(_BEGUN):  # the method began before a graph break
            return
        last, memory = vars(graph)[_BEGUN].pop()
        for node in reversed(graph.nodes):
            if node is last:
                break
            nodes.append(node)
        if calls.pointwise_reason() is None:
            _fuse(nodes[::-1], memory)
    except Exception as error:  # a different torch version may record differently; its unfused graph is correct
        if _open_blocks[-1].name != "auto":  # a forced backend may refuse
            raise
        _warn(error)


def _fuse(nodes: List[fx.Node], memory: str) -> None:
    fresh, inside, found = set(nodes), set(), {}
    for node in reversed(nodes):  # the longest formula ends last
        hidden = None if node in inside else _of_op(node) or _hidden(node, fresh)
        if hidden is not None:
            inside |= hidden.nodes
            found[node] = hidden
    for node in nodes:
        last = _projection(node)
        if last is not None and last.nodes == (node,):
            *views, first = _behind_views(last.x)
            if first in found and _is_replaced(node, found[first], last, views, memory):
                del found[first]
    for node, hidden in found.items():
        if _of_op(node) is None:
            _is_replaced(node, hidden, None, [], memory)
    for node in nodes:
        if node.target is torch._C._nn.linear and not node.kwargs and _open_blocks[-1].name == "auto":
            _pad(node, *node.args)


# Nodes recorded for the parts of an MLP.


class _Projection(NamedTuple):
    x: fx.Node
    weight: fx.Node
    bias: Optional[fx.Node]
    is_transposed: bool  # weight [in, out]
    nodes: Tuple[fx.Node, ...]


class _Hidden(NamedTuple):
    """``act(gate)``, or ``act(gate) * up``; ``up_first`` is set if one projection holds both, and gives their order."""

    gate: _Projection
    up: Optional[_Projection]
    row: Activation
    nodes: Set[fx.Node]
    up_first: Optional[bool] = None


_OPERATORS = {
    operator.truediv: "div",
    **{getattr(operator, name): name for name in ("add", "mul", "neg", "pow", "sub")},
}
_VIEWS = {"view", "reshape", "contiguous"}
_NO_MLP = ("linear", "sigmoid")  # activations of no ungated MLP: sigmoids belong to attentions
_LONGEST = 16  # more nodes than any row's formula has


def _hidden(root: fx.Node, fresh: Set[fx.Node]) -> Optional[_Hidden]:
    """Return the first half of an MLP that ends with a node."""
    nodes, given = _formula(root, fresh)
    if nodes and len(given) == 1:
        (leaf,) = given
        gate = _projection(leaf)
        row = None if gate is None else _row(nodes, leaf)
        return None if row is None or row.name in _NO_MLP else _Hidden(gate, None, row, {*nodes, *gate.nodes})
    if len(given) != 2 or root.target not in (operator.mul, torch.mul, "mul") or len(root.args) != 2:
        return None
    for up, activated in (root.args, root.args[::-1]):
        nodes, inner = _formula(activated, fresh)
        if not nodes or len(inner) != 1 or up not in given:
            continue
        (leaf,) = inner
        (both, up_first), gate, other = _halved(leaf, up), _projection(leaf), _projection(up)
        row = None if both is None and (gate is None or other is None or gate.x is not other.x) else _row(nodes, leaf)
        if row is not None and both is None:
            return _Hidden(gate, other, row, {root, *nodes, *gate.nodes, *other.nodes})
        if row is not None:
            return _Hidden(both, None, row, {root, *nodes, leaf, up, leaf.args[0], *both.nodes}, up_first)
    return None


def _of_op(node: fx.Node) -> Optional[_Hidden]:
    """Return the first half of an MLP that was fused in a method called by this one."""
    if node.target not in (native.linear, native.gated_linear):
        return None
    x, *given, code = node.args
    parts = [_Projection(x, *pair, False, ()) for pair in zip(given, given[len(given) // 2 :])]
    return _Hidden(parts[0], parts[1] if len(parts) == 2 else None, BY_CODE[code], {node})


def _formula(root: fx.Node, fresh: Set[fx.Node]) -> Tuple[List[fx.Node], Set[fx.Node]]:
    """Return the nodes of an elementwise formula that ends with a node, and the inputs of the formula."""
    if root not in fresh or not _is_elementwise(root):
        return [], {root}
    nodes: List[fx.Node] = []
    given: Set[fx.Node] = set()
    for argument in root.all_input_nodes:
        inner, leaves = _formula(argument, fresh) if len(nodes) < _LONGEST else ([], {argument})
        nodes += [node for node in inner if node not in nodes]
        given |= leaves
    return [*nodes, root], given


def _is_elementwise(node: fx.Node) -> bool:
    inplace = any(value is True for value in (*node.args, *node.kwargs.values()))
    return not inplace and _operation(node) in algebra.ELEMENTWISE | _CASTS


def _operation(node: fx.Node) -> Optional[str]:
    if node.op != "call_function":
        return node.target if node.op == "call_method" else None
    return _OPERATORS.get(node.target) or operations.operation_of(node.target)


_CASTS = {"float", "double", "type_as"}


def _row(nodes: List[fx.Node], given: fx.Node) -> Optional[Activation]:
    """Return the row of the table that a formula computes."""
    first, last = _value(given), _value(nodes[-1])
    if len(nodes) > _LONGEST or (first.dtype, first.device) != (last.dtype, last.device):
        return None
    x = Node("input", ("x",))
    values = {given: x}
    try:
        for node in nodes:
            args, options = fx.node.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
            args = [Node("dtype", (x,)) if value is first.dtype else value for value in args]
            values[node] = operations.applied(_operation(node), args, options)
        return activations.row_of(values[nodes[-1]], x)
    except NotProved:
        return None


def _projection(node: Any) -> Optional[_Projection]:
    """Return the projection whose result a node is, possibly reshaped."""
    if not isinstance(node, fx.Node):
        return None
    *views, last = _behind_views(node)
    if last.op != "call_function" or last.kwargs:
        return None
    if last.target is torch._C._nn.linear:
        x, weight, bias = (*last.args, None)[:3]
    elif last.target is torch.addmm and len(last.args) == 3:
        bias, x, weight = last.args
    elif last.target is operator.matmul and _is_transpose(last.args[1]) and _value(last.args[1]).dim() == 2:
        x, weight, bias = last.args[0], last.args[1].args[0], None
    else:
        return None
    return _Projection(x, weight, bias, last.target is torch.addmm, (*views, last))


def _halved(gate: fx.Node, up: fx.Node) -> Tuple[Optional[_Projection], bool]:
    """Return the projection whose halves two nodes are, and whether up is the first half."""
    if gate.target is not operator.getitem or up.target is not operator.getitem or gate.args[0] is not up.args[0]:
        return None, False
    both = gate.args[0]
    if both.target not in ("chunk", torch.chunk) or (*both.args[1:], *both.kwargs.values()) != (2, -1):
        return None, False
    return _projection(both.args[0]), up.args[1] == 0


def _is_view(node: fx.Node) -> bool:
    """True if a node returns its first argument, possibly reshaped."""
    if node.op == "call_method":
        return node.target in _VIEWS
    return node.target is F.dropout and _is_inactive(*node.args, **node.kwargs)


def _is_transpose(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is getattr and node.args[1] == "T"


def _is_inactive(x: fx.Node, p: Any = 0.5, training: Any = True, inplace: Any = False) -> bool:
    return training is False or (type(p) is float and p == 0.0)


def _behind_views(node: fx.Node) -> List[fx.Node]:
    """Return a node, the node that it is a view of, the node that this is a view of, and so on."""
    return [node, *_behind_views(node.args[0])] if _is_view(node) else [node]


def _value(node: fx.Node) -> Any:
    return node.meta.get("example_value")


# Replacement by fused calls.


class _Made:
    """Nodes inserted before another; those that remain unused are removed again."""

    def __init__(self, root: fx.Node) -> None:
        self.root, self._nodes = root, []

    def __enter__(self) -> _Made:
        return self

    def node(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        value = _computed(target, *args, **kwargs)
        with self.root.graph.inserting_before(self.root):
            made = self.root.graph.create_node(_kind(target), target, args, kwargs)
        made.meta["example_value"] = value
        self._nodes.append(made)
        return made

    def __exit__(self, *_: Any) -> None:
        for node in reversed(self._nodes):
            if not node.users:
                self.root.graph.erase_node(node)


def _kind(target: Any) -> str:
    return "call_method" if type(target) is str else "call_function"


def _computed(target: Any, *args: Any, **kwargs: Any) -> Any:
    from torch._dispatch.python import enable_python_dispatcher

    args, kwargs = fx.node.map_arg((args, kwargs), _value)
    with torch.no_grad(), enable_python_dispatcher():  # as Dynamo does it; otherwise a size may become a constant
        return getattr(args[0], target)(*args[1:], **kwargs) if type(target) is str else target(*args, **kwargs)


def _is_replaced(
    root: fx.Node, hidden: _Hidden, last: Optional[_Projection], views: List[fx.Node], memory: str
) -> bool:
    """Replace a node by that of an op which computes everything before it, and return True, if such an op exists."""
    if not _is_apart(root, hidden.nodes.union(views)):
        return False
    for x in _behind_views(hidden.gate.x):
        with _Made(root) as made, contextlib.suppress(RuntimeError):  # no op takes these operands
            call = _call(made, x, hidden, last, memory)
            if call is not None and _are_alike(_value(root), *call):
                root.target, root.args, root.kwargs = call
                root.op = _kind(root.target)
                return True
    return False


def _pad(root: fx.Node, x: fx.Node, weight: fx.Node, bias: Optional[fx.Node] = None) -> None:
    """Pad the operands of a GEMM with zeros if its rows are not aligned to 16 bytes and padding gains time.

    The compiler fuses the copies with the computation before and after them.
    """
    given, dtype = [node for node in (x, weight, bias) if node is not None], _value(root).dtype
    if not all(_is_plain(_value(node)) for node in given) or not linear.gains_in_graph(*map(_value, given[:2]), dtype):
        return
    out, width = _value(weight).shape
    below, behind = (-size % linear.VECTOR for size in (out, width))
    zeros = (0, behind), (0, behind, 0, below), (0, below)
    with _Made(root) as made:
        for place, node in enumerate(given):
            if _value(node).dtype != dtype:  # autocast
                node = made.node("to", node, dtype)
            given[place] = made.node(torch.constant_pad_nd, node, zeros[place]) if any(zeros[place]) else node
        product = made.node(root.target, *given)
        call = "contiguous", (made.node("narrow", product, -1, 0, out),), {}
        if _are_alike(_value(root), *call):
            root.op, (root.target, root.args, root.kwargs) = "call_method", call


def _is_apart(root: fx.Node, nodes: Set[fx.Node]) -> bool:
    """True if the nodes have no other users, and no other computation lies between them and their root."""
    node, missing = root, nodes - {root}
    while missing:
        node = node.prev
        if node in missing:
            missing.remove(node)
            if any(user is not root and user not in nodes and not _is_size(user) for user in node.users):
                return False
        elif not (_is_view(node) or _is_size(node) or _is_transpose(node)):
            return False
    return True


def _is_size(node: fx.Node) -> bool:
    return isinstance(_value(node), (int, torch.SymInt, torch.Size))


class _Call(NamedTuple):
    target: Any
    args: Tuple[Any, ...]
    kwargs: Dict[str, Any]


def _call(made: _Made, x: fx.Node, hidden: _Hidden, last: Optional[_Projection], memory: str) -> Optional[_Call]:
    """Return the fused call that computes an MLP from x; None if there is none."""
    parts, dtype = (hidden.gate, hidden.up, last), _value(made.root).dtype
    given = [x, *(part and part.weight for part in parts), *(part and part.bias for part in parts)]
    values = [node and _value(node) for node in given]  # before casts, since these carry requires_grad
    for place, node in enumerate(given):
        if node is not None and not _is_plain(_value(node)):
            return None
        if node is not None and _value(node).dtype != dtype:  # autocast
            given[place] = node = made.node("to", node, dtype)
        if 1 <= place <= 3 and node is not None and parts[place - 1].is_transposed:
            given[place] = made.node("t", node)
    is_gated = hidden.up is not None or hidden.up_first is not None
    name = ("gated_" if is_gated else "") + ("linear" if last is None else "mlp")
    if dispatch.select(name, _value(given[0])) is not native:
        return None
    if _value(made.root).requires_grad:
        keep = training.keeps(values, memory)
        if name == "linear":  # left to the compiler, unless a second half follows in another module
            return None
        if training.is_left_to_compiler(name, values[0], values[1], memory):
            return None
        if training.refusal(name, hidden.row.code) is not None or (keep and training.is_first_frozen(*values)):
            return None
        result = made.node(native.training_forward, *given, hidden.row.code, keep, hidden.up_first)
        return _Call(operator.getitem, (result, 0), {})
    transposed = [node for part, node in zip(parts, given[1:]) if part is not None and part.is_transposed]
    if _open_blocks[-1].name == "auto" and not all(native.reads(_value(node)) for node in transposed):
        return _by_torch(made, hidden, *given) if (hidden.up, hidden.up_first, last) == (None, None, None) else None
    if hidden.up_first is not None:
        for place in (1, 4):
            if given[place] is not None:
                halves = made.node("chunk", given[place], 2)
                first, second = made.node(operator.getitem, halves, 0), made.node(operator.getitem, halves, 1)
                given[place : place + 2] = (second, first) if hidden.up_first else (first, second)
    there = [place for place in (1, 2, 3) if given[place] is not None]
    weights, biases = ([given[place + shift] for place in there] for shift in (0, 3))
    return _Call(getattr(native, name), (given[0], *weights, *biases, hidden.row.code), {})


def _by_torch(made: _Made, hidden: _Hidden, x: fx.Node, *given: Optional[fx.Node]) -> Optional[_Call]:
    """Return torch's own GEMM with tanh-GELU in its epilogue, which no compiler forms from the two operations.

    Our op would call it for a weight [in, out], such as GPT-2's, that no kernel can read. Calling it directly from
    compiled code takes less CPU time, and leaves the second layer's GEMM to the compiler.
    """
    columns, bias = given[0], given[3]
    first, weight = _value(x), _value(columns)
    is_taken = hidden.row.name == "gelu_pytorch_tanh" and first.dim() == 2 and first.dtype != torch.float32
    if not is_taken or weight.shape[1] == 0:  # torch skips the activation if there are no inputs
        return None
    call = _Call(torch.ops.aten._addmm_activation.default, (bias, x, made.node("t", columns)), {"use_gelu": True})
    for view in hidden.gate.nodes[-2::-1]:
        call = _Call(view.target, (made.node(call.target, *call.args, **call.kwargs), *view.args[1:]), view.kwargs)
    return call


def _is_plain(value: Any) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(value, FakeTensor) and value.layout is torch.strided and value.dtype.is_floating_point


def _are_alike(value: Tensor, target: Any, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> bool:
    """True if a call's result has the dtype, device, shape and strides of a value, as far as Dynamo knows."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    other = _computed(target, *args, **kwargs)
    if (value.dtype, value.device, value.dim()) != (other.dtype, other.device, other.dim()):
        return False
    pairs = zip((*value.shape, *value.stride()), (*other.shape, *other.stride()))
    return all(statically_known_true(one == another) for one, another in pairs)
