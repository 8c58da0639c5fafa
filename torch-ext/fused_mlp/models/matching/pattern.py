"""The description of a fused call, without its operands."""

from __future__ import annotations

from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Pattern:
    """The form of an MLP, or of the part of one that a fused call computes.

    ``gated``: ``act(gate) * up``, otherwise ``act`` of one value. ``whole``: a last projection follows. ``packed``:
    gate and up are the halves of one projection's output. ``pointwise``: it contains no projection.

    ``up_first``: up is the first half if they are packed, or the first factor if there is no projection. ``up_left``:
    up is the left factor of the product, which decides the product's memory layout if those of gate and up differ.
    ``up_before``: up is computed before gate. ``memory``: the values that training keeps.

    ``op`` is the name of the op that computes it, if one does; ``first_half`` is the pattern without the last
    projection.
    """

    gated: bool = False
    whole: bool = False
    packed: bool = False
    pointwise: bool = False
    up_first: bool = False
    up_left: bool = False
    up_before: bool = False
    memory: str = "activations"
    op: str = field(init=False, repr=False, compare=False)
    first_half: Pattern = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        op = ("gated_mlp" if self.whole else "gated_linear") if self.gated else "mlp" if self.whole else "linear"
        object.__setattr__(self, "op", op)
        object.__setattr__(self, "first_half", replace(self, whole=False) if self.whole else self)

    def __str__(self) -> str:
        if self.pointwise:
            return "pointwise"
        if not self.gated:
            return "plain" if self.whole else "linear"
        words = ("packed " if self.packed else "") + ("gated" if self.whole else "gated linear")
        return words + (", up first" if self.packed and self.up_first else "")
