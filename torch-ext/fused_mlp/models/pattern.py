"""What a fused call computes, apart from its operands."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pattern:
    """The form of an MLP, or of the part of one that a fused call computes.

    ``gated``: ``act(gate) * up``, else ``act`` of one value. ``whole``: a last projection follows. ``packed``: gate and
    up are the halves of one projection's output. ``pointwise``: no projection is part of it.

    ``up_first``: up is the first half where they are packed, else the first to be called. ``act_last``: where the
    activation must be called, that is after up. ``up_left``: whether up is the left factor of the product,
    which decides how the product lies in memory where the two lie differently. ``memory``: what training keeps.
    """

    gated: bool = False
    whole: bool = False
    packed: bool = False
    pointwise: bool = False
    up_first: bool = False
    act_last: bool = False
    up_left: bool = False
    memory: str = "activations"

    def __str__(self) -> str:
        if self.pointwise:
            return "pointwise"
        if not self.gated:
            return "plain" if self.whole else "linear"
        words = ("packed " if self.packed else "") + ("gated" if self.whole else "gated linear")
        return words + (", up first" if self.packed and self.up_first else "")
