"""Abstract interpreter that derives the result of a Python function, and everything that the result depends on.

It walks the AST in execution order, with symbols in place of tensors. It runs no code of the function, and no
descriptor, operator or property of an object. Any construct that it does not understand raises ``NotProved``; it never
skips one.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import math
import operator
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

import torch
from torch import nn

from ..reading.attributes import of_call
from ..reading.effects import bound
from ..reading.source import tree_of
from . import liger, operations
from .values import MISSING, PLAIN, Bound, Dependency, Held, Method, Node, NotProved, Value, class_of, looked_up

_GENERATORS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_OPERATORS = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.Pow: "pow", ast.MatMult: "matmul"}
_OPERATORS.update({ast.BitAnd: "and", ast.BitOr: "or", ast.FloorDiv: "floordiv", ast.Mod: "mod"})
_OPERATORS.update({ast.Eq: "eq", ast.NotEq: "ne", ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge"})
_ON_NUMBERS = {"add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv}
_ON_NUMBERS.update({"pow": operator.pow, "floordiv": operator.floordiv, "mod": operator.mod})
_ON_NUMBERS.update({name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")})
_DEEPEST = 8  # nested calls


@dataclass(eq=False)
class _Frame:
    """A function under evaluation: the values of its names and, inside a loop, the effects of the current iteration."""

    function: FunctionType
    names: Dict[str, Value]
    turn: Optional[_Turn] = None
    detached: bool = False  # under no_grad


@dataclass(eq=False)
class _Turn:
    """A loop iteration for a symbolic element: the conditions under which it ends early, and the values it adds."""

    skips: List[Value] = field(default_factory=list)
    sum: Optional[Node] = None  # the accumulator, as it was before the loop
    added: Optional[Tuple[Any, ...]] = None


class _Returned(NamedTuple):
    value: Value


Leaf = Callable[[Held, Tuple[Value, ...]], Optional[Value]]


class Evaluation:
    """One proof. ``root`` is the module whose methods are read. ``leaf`` gives the value of a call of one of its parts
    that is not to be read; ``decide`` gives the truth of a condition on symbols, if it is known."""

    def __init__(
        self,
        root: Optional[nn.Module] = None,
        leaf: Leaf = lambda part, given: None,
        decide: Callable[[Node], Optional[bool]] = lambda condition: None,
        symbols: Tuple[type, ...] = (),
    ) -> None:
        self._symbols = symbols
        self._leaf, self._decide = leaf, decide
        self._frames: List[_Frame] = []
        self._found: Dict[Any, Dependency] = {}
        self.root = Held((), root)

    @property
    def dependencies(self) -> Tuple[Dependency, ...]:
        return tuple(self._found.values())

    def returned(self, callee: Value, args: Tuple[Value, ...], options: Optional[Dict[str, Value]] = None) -> Value:
        """Return the result of a call. Raises NotProved if the call cannot be evaluated."""
        return self._called(callee, args, options or {})

    def attribute(self, name: str) -> Value:
        """Return the value of an attribute of the root. Raises NotProved if it is of a kind that is not understood."""
        return self._held(self.root, name, None)

    def truth(self, condition: ast.expr, method: FunctionType) -> bool:
        """Return the value of a condition in a method of the root; the root is the only local name that it may use.

        Raises NotProved if the value is unknown, or if evaluating the condition would raise.
        """
        frame = _Frame(method, {method.__code__.co_varnames[0]: self.root})
        return self._truth(self._value(condition, frame), condition)

    # Functions and statements.

    def _inlined(self, function: FunctionType, args: Tuple[Value, ...], options: Dict[str, Value]) -> Value:
        code, tree = function.__code__, tree_of(function)
        self._depends(function, "", "__code__", code)
        self._depends(function, "", "__defaults__", function.__defaults__)
        self._depends(function, "", "__kwdefaults__", function.__kwdefaults__)
        if tree is None or code.co_flags & _GENERATORS or len(self._frames) >= _DEEPEST:
            raise NotProved(f"{function.__qualname__}, whose source is unknown")
        try:
            given = inspect.signature(function, follow_wrapped=False).bind(*args, **options)
        except TypeError:
            raise NotProved(f"a call of {function.__qualname__} with other arguments") from None
        if code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS):
            raise NotProved(f"{function.__qualname__}, which takes any arguments")
        given.apply_defaults()
        self._frames.append(_Frame(function, dict(given.arguments)))
        try:
            result = self._run(tree.body, self._frames[-1])
        finally:
            self._frames.pop()
        return result.value if isinstance(result, _Returned) else None

    def _run(self, statements: List[ast.stmt], frame: _Frame) -> Any:
        for statement in statements:
            if isinstance(statement, ast.If):
                said = self._truth(self._value(statement.test, frame), statement, undecided=True)
                if type(said) is not bool:
                    result = self._skip(said, statement, frame)
                else:
                    result = self._run(statement.body if said else statement.orelse, frame)
            elif isinstance(statement, ast.With):
                result = self._without_gradients(statement, frame)
            elif isinstance(statement, ast.Return):
                if frame.turn is not None:
                    raise _unknown(statement, "a return in a loop")
                return _Returned(None if statement.value is None else self._value(statement.value, frame))
            else:
                result = self._done(statement, frame)
            if result is not None:
                return result
        return None

    def _done(self, statement: ast.stmt, frame: _Frame) -> None:
        if isinstance(statement, ast.Assign):
            value = self._value(statement.value, frame)
            for target in statement.targets:
                self._bind(target, value, frame)
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            self._bind(statement.target, self._value(statement.value, frame), frame)
        elif isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
            old, name = self._value(ast.Name(statement.target.id, ast.Load()), frame), statement.target.id
            if isinstance(old, Node):
                self._is_alone(old, frame, name, statement)
            frame.names[name] = self._operated(statement.op, old, self._value(statement.value, frame), statement)
        elif isinstance(statement, ast.For):
            self._loop(statement, frame)
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            self._expression(statement.value, frame)
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            pass  # a docstring
        elif not isinstance(statement, ast.Pass):
            raise _unknown(statement)

    def _skip(self, condition: Node, statement: ast.If, frame: _Frame) -> None:
        """Handle a condition on symbols that ends the iteration early."""
        (first, *more), turn = statement.body, frame.turn
        if more or statement.orelse or turn is None or not isinstance(first, ast.Continue):
            raise _unknown(statement, f"a condition on {ast.unparse(statement.test)}")
        if turn.added is not None:
            raise _unknown(statement, "an iteration that ends early after its sum")
        turn.skips.append(condition)

    def _without_gradients(self, statement: ast.With, frame: _Frame) -> Any:
        for item in statement.items:
            call = item.context_expr
            plain = isinstance(call, ast.Call) and not call.args and not call.keywords and item.optional_vars is None
            if not plain or self._value(call.func, frame) is not torch.no_grad:
                raise _unknown(statement, f"with {ast.unparse(call)}")
        before, frame.detached = frame.detached, True
        result = self._run(statement.body, frame)
        frame.detached = before
        return result

    def _bind(self, target: ast.expr, value: Value, frame: _Frame) -> None:
        if isinstance(target, ast.Name):
            frame.names[target.id] = Node("detach", (value,)) if frame.detached and type(value) is Node else value
        elif isinstance(target, (ast.Tuple, ast.List)):
            parts = self._parts(value, len(target.elts), target)
            for part, each in zip(target.elts, parts):
                self._bind(part, each, frame)
        else:
            raise _unknown(target, f"an assignment to {ast.unparse(target)}")

    def _parts(self, value: Value, count: int, node: ast.AST) -> List[Value]:
        if isinstance(value, Node):
            return [Node("item of", (value, index)) for index in range(count)]
        if not isinstance(value, (tuple, list)) or len(value) != count:
            raise _unknown(node, "an unpacking")
        return list(value)

    def _loop(self, statement: ast.For, frame: _Frame) -> None:
        """Run a loop: over known values by unrolling it, over a symbol if each iteration adds to one sum."""
        over = self._value(statement.iter, frame)
        if statement.orelse or frame.turn is not None:
            raise _unknown(statement)
        if isinstance(over, (tuple, list)):
            for value in over:
                self._bind(statement.target, value, frame)
                if self._run(statement.body, frame) is not None:
                    raise _unknown(statement)
            return
        if not isinstance(over, Node) or frame.detached:
            raise _unknown(statement, f"a loop over {ast.unparse(statement.iter)}")
        local = {name for part in (statement.target, *statement.body) for name in bound(part)}
        for name in local:  # values from the previous iteration are unknown
            frame.names.pop(name, None)
        self._bind(statement.target, Node("each", (over,)), frame)
        frame.turn = turn = _Turn()
        ended = self._run(statement.body, frame)
        frame.turn = None
        for name in local:
            frame.names.pop(name, None)
        if turn.added is None or ended is not None:
            raise _unknown(statement, "a loop that adds nothing")
        name = next(name for name, value in frame.names.items() if value is turn.sum)
        frame.names[name] = Node("loop", (over, turn.sum, tuple(turn.skips), turn.added))

    def _expression(self, call: ast.Call, frame: _Frame) -> None:
        """Handle a call made for its side effect: adding rows to a sum, or writing into a tensor with one reference."""
        callee = call.func
        if not (isinstance(callee, ast.Attribute) and isinstance(callee.value, ast.Name)):
            raise _unknown(call)
        old, turn = self._value(callee.value, frame), frame.turn
        if callee.attr == "scatter_" and isinstance(old, Node) and turn is None and not call.keywords:
            self._is_alone(old, frame, callee.value.id, call)
            self._method("scatter_", torch.Tensor.scatter_)
            given = (old, *(self._value(part, frame) for part in call.args))
            frame.names[callee.value.id] = self._applied("scatter", given, {}, call)
            return
        if callee.attr != "index_add_" or not isinstance(old, Node) or turn is None or frame.detached:
            raise _unknown(call)
        self._is_alone(old, frame, callee.value.id, call)
        self._method("index_add_", torch.Tensor.index_add_)
        given = operations.applied("index_add", (old, *(self._value(part, frame) for part in call.args)), {})
        if call.keywords or turn.added is not None or old.op != "zeros_like" or given.args[4] != 1:
            raise _unknown(call)
        turn.sum, turn.added = old, given.args[1:4]

    def _is_alone(self, node: Node, frame: _Frame, name: str, where: ast.AST) -> None:
        """Raise unless this name is the only reference to the tensor that is written into."""
        others = [
            value
            for each in self._frames
            for other, value in each.names.items()
            if (each is not frame or other != name) and _shares(value, node)
        ]
        if others or frame.detached or node.op in operations.VIEWS - {"item of"} or node.op in ("input", "parameter"):
            raise _unknown(where, "an in-place write to a tensor with another reference")
        if node.op == "item of" and node.args[0].op != "topk":
            raise _unknown(where, "an in-place write to part of a tensor")

    # Expressions.

    def _value(self, node: ast.expr, frame: _Frame) -> Value:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            return self._name(node, frame)
        if isinstance(node, ast.Attribute):
            return self._attribute(self._value(node.value, frame), node)
        if isinstance(node, (ast.Tuple, ast.List)):
            return tuple(self._value(part, frame) for part in node.elts)
        if isinstance(node, ast.Call):
            if any(word.arg is None for word in node.keywords):
                raise _unknown(node)
            callee = self._value(node.func, frame)
            args = tuple(self._given(part, frame) for part in node.args)
            return self._called(
                callee, args, {word.arg: self._value(word.value, frame) for word in node.keywords}, node
            )
        if isinstance(node, ast.BinOp):
            return self._operated(node.op, self._value(node.left, frame), self._value(node.right, frame), node)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
            value = self._value(node.operand, frame)
            if isinstance(value, Node):
                return Node("invert", (value,))
        if isinstance(node, ast.UnaryOp) and not isinstance(node.op, ast.Invert):
            value = self._value(node.operand, frame)
            if isinstance(node.op, ast.Not):
                return not self._truth(value, node)
            if type(value) in (int, float):
                return -value if isinstance(node.op, ast.USub) else value
            if isinstance(value, Node):
                return Node("neg", (value,)) if isinstance(node.op, ast.USub) else value
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            return self._compared(node, self._value(node.left, frame), self._value(node.comparators[0], frame))
        if isinstance(node, ast.BoolOp):
            return self._connected(node, frame)
        if isinstance(node, ast.IfExp):
            said = self._truth(self._value(node.test, frame), node)
            return self._value(node.body if said else node.orelse, frame)
        if isinstance(node, ast.Subscript):
            return self._item(self._value(node.value, frame), self._key(node.slice, frame), node)
        raise _unknown(node)

    def _given(self, node: ast.expr, frame: _Frame) -> Value:
        """Return an argument of a call. A starred shape, which passes all sizes, stands for the shape."""
        if not isinstance(node, ast.Starred):
            return self._value(node, frame)
        value = self._value(node.value, frame)
        if not isinstance(value, Node) or value.op != "shape":
            raise _unknown(node)
        return value

    def _name(self, node: ast.Name, frame: _Frame) -> Value:
        name, function = node.id, frame.function
        if name in frame.names:
            return frame.names[name]
        code = function.__code__
        if name in (*code.co_varnames, *code.co_cellvars, *code.co_freevars):
            raise _unknown(node, f"{name}, which may be unset, from another iteration or from another function")
        if name in function.__globals__:
            return self._read(function.__globals__, "", name, node)
        self._depends(function.__globals__, "", name, MISSING)
        return self._read(vars(builtins), "", name, node)

    def _read(self, owner: Any, part: str, name: str, node: ast.AST) -> Value:
        value = looked_up(owner, name)
        if value is MISSING:
            raise _unknown(node, f"{name}, which does not exist")
        self._depends(owner, part, name, value)
        return value

    def _depends(self, owner: Any, part: str, name: str, value: Any) -> None:
        dependency = Dependency(owner, part, name, value)
        self._found.setdefault(dependency.key, dependency)

    def _method(self, name: str, method: Any) -> None:
        self._depends(torch.Tensor, "", name, looked_up(torch.Tensor, name))
        if getattr(torch.Tensor, name) is not method:
            raise NotProved(f"a patched Tensor.{name}")

    def _attribute(self, owner: Value, node: ast.Attribute) -> Value:
        name = node.attr
        if name.startswith("__"):
            raise _unknown(node)
        if isinstance(owner, Node):
            if name in ("dtype", "device", "shape"):
                return Node(name, (owner,))
            if name in ("T", "mT"):
                return Node("transpose", (owner, -2, -1))  # the matcher supports only matrices
            return Method(name, owner)
        if isinstance(owner, ModuleType):
            return self._read(vars(owner), "", name, node)
        if isinstance(owner, type) and issubclass(owner, torch.autograd.Function) and name == "apply":
            return Method("apply", Node("autograd", (owner,)))
        if isinstance(owner, Held):
            return self._held(owner, name, node)
        raise _unknown(node, f"an attribute of {type(owner).__name__}")

    def _held(self, owner: Held, name: str, node: ast.AST) -> Value:
        """Return an attribute as Python would look it up, if the look-up runs no code of the owner's class."""
        value, path = owner.value, (*owner.path, name)
        kind = class_of(value)
        self._depends(owner.path, "class", "", kind)
        if not _finds_plainly(kind, type(value)):
            raise _unknown(node, f"{kind.__name__}, which runs code on attribute access")
        if not isinstance(value, nn.Module):
            renamed = looked_up(kind, "attribute_map") if _is_config(kind) else None
            name = renamed.get(name, name) if type(renamed) is dict else name
        state, of_class = value.__dict__, looked_up(kind, name)
        if of_class is not MISSING or name not in state:
            self._depends(kind, "", name, of_class)
        if name in state:
            if hasattr(type(of_class), "__set__") or isinstance(of_class, property):
                raise _unknown(node, f"{kind.__name__}.{name}, a property")
            return self._read_held(owner.path, "", name, state[name], path, node)
        self._depends(owner.path, "", name, MISSING)
        if of_class is not MISSING:
            if isinstance(of_class, FunctionType):
                return Bound(of_class, owner)
            if type(of_class) in PLAIN:
                return of_class
            raise _unknown(node, f"{kind.__name__}.{name}, which is not a plain value")
        if isinstance(value, nn.Module):
            for part in ("_parameters", "_buffers", "_modules"):
                if name in state[part]:
                    found = state[part][name]
                    if part == "_modules" or found is None:
                        return self._read_held(owner.path, part, name, found, path, node)
                    return Node("parameter", (path,))
            if name in state["_modules"].get("parametrizations", ()):  # a property that torch adds
                return Node("parameter", (path,))
        raise _unknown(node, f"{kind.__name__}.{name}, which does not exist")

    def _read_held(self, owner: Any, part: str, name: str, found: Any, path: Tuple[str, ...], node: ast.AST) -> Value:
        if owner == () and type(found) in self._symbols:
            return Node("attribute", (name,))
        if type(found) in (*PLAIN, FunctionType, BuiltinFunctionType) or isinstance(found, (type, ModuleType)):
            self._depends(owner, part, name, found)
            return found
        if type(found) in (tuple, list) and all(type(value) in PLAIN for value in found):
            self._depends(owner, part, name, tuple(found) if type(found) is tuple else list(found))
            return tuple(found)
        if type(found) is functools.partial and all(map(_is_operand, (*found.args, *found.keywords.values()))):
            self._depends(owner, part, name, found)
            return found
        if isinstance(found, MethodType) and type(found.__func__) is FunctionType:
            parent = self.root.value
            for each in path[:-1]:
                parent = parent.__dict__.get(each) or parent.__dict__["_modules"].get(each)
            if found.__self__ is parent:
                self._depends(owner, part, name, found)
                return Bound(found.__func__, Held(path[:-1], parent))
        if part == "":
            self._depends(owner, "type", name, type(found))
        if isinstance(found, nn.Module) or (hasattr(found, "__dict__") and not isinstance(found, torch.Tensor)):
            return Held(path, found)
        raise _unknown(node, f"{name}, an unknown {type(found).__name__}")

    def _called(self, callee: Value, args: Tuple[Value, ...], options: Dict[str, Value], node: Any = None) -> Value:
        if isinstance(callee, Method):
            if callee.name == "apply":
                return self._applied_by_autograd(callee.owner.args[0], args)
            if callee.name not in operations.METHODS:
                raise _unknown(node, f"{callee.name} of a tensor")
            self._method(callee.name, operations.METHODS[callee.name])
            return self._applied(callee.name, (callee.owner, *args), options, node)
        if isinstance(callee, Bound):
            return self._inlined(callee.function, (callee.owner, *args), options)
        if isinstance(callee, Held):
            return self._part(callee, args, options, node)
        if type(callee) is functools.partial:
            return self._called(callee.func, (*callee.args, *args), {**callee.keywords, **options}, node)
        name = operations.operation_of(callee)
        if name is not None:
            return self._applied(name, args, options, node)
        if isinstance(callee, FunctionType):
            return self._inlined(callee, args, options)
        if callee is builtins.isinstance and not options and isinstance(args[0], Held) and type(args[1]) is type:
            self._depends(args[0].path, "class", "", class_of(args[0].value))
            return issubclass(class_of(args[0].value), args[1])
        if callee is builtins.range and len(args) == 1 and not options:
            return Node("range", args)
        if callee is builtins.float and args == ("-inf",) and not options:
            return -math.inf
        if callee in (builtins.int, builtins.float) and len(args) == 1 and isinstance(args[0], Node):
            return Node("scalar", args)
        if callee is builtins.len and len(args) == 1 and isinstance(args[0], Node):
            return Node("size", (args[0], 0))
        numbers = all(type(value) in (int, float) for value in args) and args and not options
        if any(callee is known for known in operations.NUMBERS) and numbers:
            return self._number(callee, args, node)
        raise _unknown(node, f"a call of {getattr(callee, '__qualname__', type(callee).__name__)}")

    def _part(self, part: Held, args: Tuple[Value, ...], options: Dict[str, Value], node: Any) -> Value:
        if not isinstance(part.value, nn.Module):
            raise _unknown(node, f"a call of a {type(part.value).__name__}")
        found = None if options else self._leaf(part, args)
        kind = class_of(part.value)
        self._depends(part.path, "class", "", kind)
        if found is not None:
            return found
        forward, call = looked_up(kind, "forward"), looked_up(kind, "__call__")
        refusal = of_call(part.value, kernelizable=True)
        self._depends(kind, "", "forward", forward)
        self._depends(kind, "", "__call__", call)
        self._depends(part.path, "call", "", refusal)
        if call is not looked_up(nn.Module, "__call__") or not isinstance(forward, FunctionType):
            raise _unknown(node, f"{kind.__name__}, whose __call__ is not torch's")
        if refusal is not None:
            raise _unknown(node, f"{kind.__name__} with {refusal}")
        return self._inlined(forward, (part, *args), options)

    def _applied(self, name: str, args: Tuple[Value, ...], options: Dict[str, Value], node: Any) -> Value:
        if not all(map(_is_operand, (*args, *options.values()))):
            raise _unknown(node)
        try:
            made = operations.applied(name, args, options)
        except NotProved as error:
            raise _unknown(node, str(error)) from None
        if made.op == "to" and not (isinstance(made.args[1], (torch.dtype, Node))):
            raise _unknown(node, "a cast to something that is not a dtype")
        return made

    def _applied_by_autograd(self, kind: type, args: Tuple[Value, ...]) -> Node:
        found = liger.applied(kind, args)
        if found is None:
            return Node("elementwise", (kind, *args))
        for owner, name, value in liger.rests_on(kind):
            self._depends(owner, "", name, value)
        return found

    def _operated(self, op: Any, left: Value, right: Value, node: ast.AST) -> Value:
        name = _OPERATORS.get(type(op))
        if name is None:
            raise _unknown(node)
        if isinstance(left, Node) or isinstance(right, Node):
            if all(isinstance(value, Node) or type(value) in (int, float, bool) for value in (left, right)):
                return Node(name, (left, right))
        elif name in _ON_NUMBERS and all(type(value) in (int, float, bool) for value in (left, right)):
            return self._number(_ON_NUMBERS[name], (left, right), node)
        raise _unknown(node, f"{type(left).__name__} and {type(right).__name__} in one operation")

    def _number(self, function: Callable[..., Any], args: Tuple[Any, ...], node: ast.AST) -> Any:
        try:
            return function(*args)
        except (ArithmeticError, ValueError) as error:
            raise _unknown(node, str(error)) from None

    def _compared(self, node: ast.Compare, left: Value, right: Value) -> Value:
        op = node.ops[0]
        if isinstance(op, (ast.Is, ast.IsNot)):
            if right is not None and (isinstance(left, Node) or type(left) in (int, float, str)):
                raise _unknown(node)
            same = left is right or (isinstance(left, Held) and left.value is right)
            return same == isinstance(op, ast.Is)
        if isinstance(op, ast.In) and isinstance(right, tuple) and isinstance(left, Node) and left.op == "dtype":
            return Node("in", (left, right))
        if isinstance(op, (ast.In, ast.NotIn)) and isinstance(right, tuple) and type(left) in PLAIN:
            return (left in right) == isinstance(op, ast.In)
        if type(left) is type(right) and type(left) in (str, torch.dtype) and isinstance(op, (ast.Eq, ast.NotEq)):
            return (left == right) == isinstance(op, ast.Eq)
        if left is None or right is None:
            raise _unknown(node)
        return self._operated(op, left, right, node)

    def _connected(self, node: ast.BoolOp, frame: _Frame) -> Value:
        value: Value = None
        for part in node.values:
            value = self._value(part, frame)
            if self._truth(value, part) != isinstance(node.op, ast.And):
                return value
        return value

    def _truth(self, value: Value, node: ast.AST, undecided: bool = False) -> Any:
        if isinstance(value, Node):
            said = self._decide(value)
            if said is None and not undecided:
                raise _unknown(node, f"a condition on {ast.unparse(node)}")
            return value if said is None else said
        if isinstance(value, Held) and isinstance(value.value, nn.Module):
            kind = class_of(value.value)
            if any(looked_up(kind, name) is not MISSING for name in ("__bool__", "__len__")):
                raise _unknown(node, f"a condition on a {kind.__name__}")
            return True
        if type(value) not in (*PLAIN, tuple, FunctionType):
            raise _unknown(node, f"a condition on a {type(value).__name__}")
        return bool(value)

    def _key(self, node: ast.expr, frame: _Frame) -> Any:
        if isinstance(node, ast.Tuple):
            return tuple(self._key(part, frame) for part in node.elts)
        if isinstance(node, ast.Slice):
            parts = (node.lower, node.upper, node.step)
            return ("slice", *(None if part is None else self._value(part, frame) for part in parts))
        return self._value(node, frame)

    def _item(self, value: Value, key: Any, node: ast.AST) -> Value:
        if isinstance(value, tuple) and type(key) is int and -len(value) <= key < len(value):
            return value[key]
        if not isinstance(value, Node):
            raise _unknown(node, f"an item of a {type(value).__name__}")
        if value.op == "shape" and type(key) is int:
            return Node("size", (value.args[0], key))
        if value.op in operations.TUPLES and type(key) is int:
            return Node("item of", (value, key))
        keys = key if isinstance(key, tuple) and key[:1] != ("slice",) else (key,)
        return Node("getitem", (value, keys))


def _shares(value: Any, node: Node) -> bool:
    """True if a value may share memory with the tensor ``node``."""
    if value is node:
        return True
    if isinstance(value, (tuple, list)):
        return any(_shares(part, node) for part in value)
    if not isinstance(value, Node) or value.op not in (*operations.VIEWS, "detach"):
        return False
    return _shares(value.args[0], node)


def _is_operand(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_operand, value))
    return isinstance(value, Node) or type(value) in PLAIN


def _finds_plainly(kind: type, actual: type) -> bool:
    """True if attribute look-up on instances of a class only reads dictionaries."""
    getting = looked_up(kind, "__getattribute__")
    if _is_config(kind):
        return True
    inside = looked_up(kind, "__getattr__")
    plain = inside is MISSING or (issubclass(kind, nn.Module) and inside is vars(nn.Module)["__getattr__"])
    return plain and getting is vars(object)["__getattribute__"] and type(actual) is type


def _is_config(kind: type) -> bool:
    """True if a class is a transformers configuration, whose attribute look-up only renames attributes by a map."""
    home = next((base for base in kind.__mro__ if base.__name__ in ("PreTrainedConfig", "PretrainedConfig")), None)
    if home is None or not home.__module__.startswith("transformers.configuration_utils"):
        return False
    return looked_up(kind, "__getattribute__") is looked_up(home, "__getattribute__")


def _unknown(node: Any, what: Optional[str] = None) -> NotProved:
    line = getattr(node, "lineno", None)
    text = what or (type(node).__name__ if node is None else ast.unparse(node).splitlines()[0])
    return NotProved(text if line is None else f"{text} (line {line})")


def inputs(*names: str) -> Iterator[Node]:
    return (Node("input", (name,)) for name in names)
