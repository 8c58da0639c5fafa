"""Router forms that can be proved from the returned logits, weights and experts."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, Tuple, Union

import torch

from .values import Node, Value

BIAS = "e_score_correction_bias"  # the buffer that is added to the sigmoids
_WEIGHT, _BIAS = Node("parameter", (("weight",),)), Node("parameter", ((BIAS,),))


class Softmax(NamedTuple):
    """Top-k of a softmax. Holds the names of the attributes with the numbers of features and of chosen experts, and
    whether the chosen weights are normalised to sum to one, and whether they are cast to the dtype of the logits."""

    width: str
    top_k: str
    normalized: bool
    narrow: bool


class Sigmoid(NamedTuple):
    """Top-k of sigmoids plus biases, within the best groups. Holds attribute names of numbers, and whether the chosen
    weights are normalised to sum to one. ``scaling`` names the factor of the weights."""

    width: str
    top_k: str
    normalized: bool
    experts: str
    groups: str
    top_groups: str
    scaling: str


def form_of(value: Value, x: Node) -> Union[Softmax, Sigmoid, None]:
    """Return the form of a router that returns this value for its input; None if it has no known form."""
    if not isinstance(value, tuple) or len(value) != 3:
        return None
    return _softmax(value, x) or _sigmoid(value, x)


def _softmax(value: Tuple[Value, ...], x: Node) -> Optional[Softmax]:
    logits, weights, experts = value
    chosen = _argument(experts, "item of", 1)
    scores, top_k, *options = chosen.args if getattr(chosen, "op", None) == "topk" else (None, None)
    of_all = [
        Node("softmax", (logits, -1, torch.float32)),
        Node("softmax", (Node("to", (logits, torch.float32)), -1, None)),
    ]
    width = _width(_argument(logits, "linear", _WEIGHT, None), x)
    if width is None or scores not in of_all or options != [-1, True, True]:
        return None
    names = _names(width, top_k)
    best = Node("item of", (chosen, 0))
    shares = Node("div", (best, Node("sum", (best, -1, True, None))))
    own = _argument(weights, "to", Node("dtype", (logits,)))
    found = weights if own is None else own
    return Softmax(*names, found == shares, own is not None) if names and found in (best, shares) else None


def _sigmoid(value: Tuple[Value, ...], x: Node) -> Optional[Sigmoid]:
    """Match the form of DeepSeek-V3: rebuild the returned value from the names found in it, and compare the two."""
    logits, weights, experts = value
    rows, weight, bias = logits.args if getattr(logits, "op", None) == "linear" else (None, None, None)
    width = _width(_argument(rows, "to", torch.float32), x)
    if width is None or weight != Node("to", (_WEIGHT, torch.float32)) or bias is not None:
        return None
    chosen = _argument(experts, "item of", 1)
    masked, top_k = chosen.args[:2] if getattr(chosen, "op", None) == "topk" else (None, None)
    left_out = masked.args[1] if getattr(masked, "op", None) == "masked_fill" else None
    rows_of_all = _argument(_argument(left_out, "invert"), "to", torch.bool)
    spread, (_, count) = rows_of_all.args if _is_of(rows_of_all, "reshape", 2) else (None, (None, None))
    mask, (_, groups, _) = spread.args if _is_of(spread, "expand", 3) else (None, (None, None, None))
    mask = _argument(mask, "unsqueeze", -1)
    kept = _argument(mask.args[2], "item of", 1) if getattr(mask, "op", None) == "scatter" else None
    top_groups = kept.args[1] if getattr(kept, "op", None) == "topk" else None
    scaling = weights.args[1] if getattr(weights, "op", None) == "mul" else None
    names = _names(width, top_k, count, groups, top_groups, scaling)
    if names is None:
        return None
    for normalized in (False, True):
        if value == _sigmoid_of(logits, normalized, *(Node("attribute", (name,)) for name in names)):
            return Sigmoid(*names[:2], normalized, *names[2:])
    return None


def _is_of(value: Any, op: str, sizes: int) -> bool:
    """True if ``value`` is an operation ``op`` whose second argument has ``sizes`` elements."""
    return getattr(value, "op", None) == op and len(value.args[1]) == sizes


def _sigmoid_of(
    logits: Node,
    normalized: bool,
    width: Node,
    top_k: Node,
    experts: Node,
    groups: Node,
    top_groups: Node,
    scaling: Node,
) -> Tuple[Node, ...]:
    scores = Node("sigmoid", (logits,))
    biased = Node("add", (scores, _BIAS))
    of_group = Node("floordiv", (experts, groups))
    best_two = Node("topk", (Node("view", (biased, (-1, groups, of_group))), 2, -1, True, True))
    of_groups = Node("sum", (Node("item of", (best_two, 0)), -1, False, None))
    kept = Node("item of", (Node("topk", (of_groups, top_groups, -1, True, False)), 1))
    mask = Node("scatter", (Node("zeros_like", (of_groups, None, None)), 1, kept, 1))
    spread = Node("expand", (Node("unsqueeze", (mask, -1)), (-1, groups, of_group)))
    left_out = Node("invert", (Node("to", (Node("reshape", (spread, (-1, experts))), torch.bool)),))
    among = Node("masked_fill", (biased, left_out, -float("inf")))
    chosen = Node("item of", (Node("topk", (among, top_k, -1, True, False)), 1))
    weights = Node("gather", (scores, 1, chosen, False))
    if normalized:
        weights = Node("div", (weights, Node("add", (Node("sum", (weights, -1, True, None)), 1e-20))))
    return logits, Node("mul", (weights, scaling)), chosen


def _width(rows: Any, x: Node) -> Any:
    """Return the number of features if ``rows`` is the input reshaped to rows; None otherwise."""
    given, shape = rows.args if getattr(rows, "op", None) in ("reshape", "view") else (None, ())
    return shape[1] if given == x and len(shape) == 2 and shape[0] == -1 else None


def _names(*values: Any) -> Optional[Tuple[str, ...]]:
    """Return the names of attribute nodes; None if a value is not an attribute."""
    names = [node.args[0] for node in values if getattr(node, "op", None) == "attribute"]
    return tuple(names) if len(names) == len(values) else None


def _argument(value: Any, op: str, *rest: Any) -> Any:
    """Return the first argument of an ``op`` node whose other arguments are ``rest``; None for any other value."""
    return value.args[0] if isinstance(value, Node) and value.op == op and value.args[1:] == rest else None
