"""Modules with the parts of an MLP that compute something else, or the same in ways that are easily misread."""

import torch
import torch.nn.functional as F
from torch import nn

from modules import Gated, Intermediate, PackedGated, Plain

# Other functions of the same parts, each with what the report may name as fused in it, or None.
# By name: its parent class, the fused part, and its forward, a function of x.
WRITTEN = {
    "a residual": ("Gated", "gated", "return x + self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))"),
    "a scaled parent": ("Gated", None, "return 1.05 * super().forward(x)"),
    "clamped hidden values": (
        *("Gated", "gated linear"),
        "return self.down_proj((self.act_fn(self.gate_proj(x)) * self.up_proj(x)).clamp(-20.0, 20.0))",
    ),
    "the activation twice": (
        *("Gated", "pointwise, linear"),
        "return self.down_proj(self.act_fn(self.act_fn(self.gate_proj(x))) * self.up_proj(x))",
    ),
    "two inputs": (
        *("Gated", "linear"),
        "return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x.roll(1, 0)))",
    ),
    "a sum": ("Gated", "linear", "return self.down_proj(self.act_fn(self.gate_proj(x)) + self.up_proj(x))"),
    "one half twice": (
        *("PackedGated", "pointwise"),
        "g, u = self.gate_up_proj(x).chunk(2, dim=-1)\nreturn self.down_proj(self.activation_fn(g) * g) + u.sum()",
    ),
    "a half used once more": (
        *("PackedGated", "pointwise"),
        "g, u = self.gate_up_proj(x).chunk(2, dim=-1)\nreturn self.down_proj(self.activation_fn(g) * u) + u.sum()",
    ),
    "interleaved": (
        *("PackedGated", "pointwise"),
        "both = self.gate_up_proj(x)\nreturn self.down_proj(both[..., 1::2] * self.activation_fn(both[..., ::2]))",
    ),
    "rows in chunks": (
        *("PackedGated", "pointwise"),
        "g, u = self.gate_up_proj(torch.cat([x] * 2)).chunk(2, dim=0)\n"
        "return self.down_proj((self.activation_fn(g) * u)[..., ::2])",
    ),
    "normalised": (
        *("Plain", "plain"),
        "return self.fc2(self.activation_fn(self.fc1(F.layer_norm(x, x.shape[-1:]))))",
    ),
    "no activation": ("Plain", None, "return self.fc2(self.fc1(x))"),
    "the activation first": ("Plain", None, "return self.fc2(self.fc1(self.activation_fn(x)))"),
    "one behind": ("Plain", "linear", "return self.activation_fn(self.fc2(self.activation_fn(self.fc1(x))))"),
    "a tuple": ("Plain", "plain", "return self.fc2(self.activation_fn(self.fc1(x))), None"),
    # Values that are used again, or are not what their names suggest.
    "activated values used twice": ("Plain", "linear", "h = self.activation_fn(self.fc1(x))\nreturn self.fc2(h), h"),
    "the input's name taken": (
        *("Plain", "linear"),
        "h = self.activation_fn(self.fc1(x))\nx = x.sum(-1, keepdim=True)\nreturn self.fc2(h) + x",
    ),
    "the input changed in place": (
        *("Gated", "pointwise"),
        "x = x + 0\ng = self.gate_proj(x.clone())\nx.mul_(2.0)\n"
        "return self.down_proj(self.act_fn(g) * self.up_proj(x))",
    ),
    "hidden values written to": (
        *("Plain", None),
        "h = self.fc1(x) + 0\nh[..., 0] = 3.0\nreturn self.fc2(self.activation_fn(h))",
    ),
    "bound in a loop": (
        *("Plain", "linear"),
        "total, h = 0, x.new_zeros(88)\nfor _ in range(3):\n    total = total + h\n"
        "    h = self.activation_fn(self.fc1(x))\nreturn self.fc2(total)",
    ),
    "held by a closure": (
        *("Plain", None),
        "h = x.new_zeros(88)\ndef peek():\n    return h.sum()\nh = self.fc1(x)\n"
        "result = self.fc2(self.activation_fn(h))\nreturn result + peek()",
    ),
    "unpacked": (
        *("Plain", None),
        "h, other = self.fc1(torch.stack([x, 2 * x]))\nreturn self.fc2(self.activation_fn(h)) + other.sum()",
    ),
    "a local activation": ("Plain", None, "gelu = torch.tanh\nreturn self.fc2(gelu(self.fc1(x)))"),
    "a local module": ("Plain", None, "F = torch\nreturn self.fc2(F.tanh(self.fc1(x)))"),
    "something between": (
        *("Plain", "linear"),
        "h = self.activation_fn(self.fc1(x))\nself.calls = getattr(self, 'calls', 0) + 1\nreturn self.fc2(h)",
    ),
    "counting": (
        *("Plain", "plain"),
        "self.calls = getattr(self, 'calls', 0) + 1\nself.last = self.fc2(self.activation_fn(self.fc1(x)))\n"
        "return self.last * self.calls",
    ),
    "dropout always": ("Plain", "linear", "return self.fc2(F.dropout(self.activation_fn(self.fc1(x)), p=0.5))"),
    "dropout of the input": (
        *("Plain", "plain"),
        "x = F.dropout(x, p=0.5, training=self.training)\nx = self.fc2(self.activation_fn(self.fc1(x)))\n"
        "return F.dropout(x, p=0.5, training=self.training)",
    ),
    "doubled in training": (
        "Gated",
        "gated",
        "y = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))\nreturn 2 * y if self.training else y",
    ),
}
# Forwards that never pass a projection's output to their activation, or to a function known by name.
NO_MLPS = ("no activation", "the activation first", "a local module")


class Swapped(Gated):
    fused = "gated"

    def forward(self, x):
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))


class SwappedPacked(PackedGated):
    fused = "packed gated, up first"

    def forward(self, hidden_states):
        up, gate = self.gate_up_proj(hidden_states).chunk(2, dim=-1)
        return self.down_proj(up * self.activation_fn(gate))


class OrderedByAnAttribute(PackedGated):
    """Like timm's GluMlp: attributes select the dimension that is halved, and the half that is activated."""

    fused = "packed gated"
    gate_last, chunk_dim = False, -1

    def forward(self, hidden_states):
        both = self.gate_up_proj(hidden_states)
        first, second = both.chunk(2, dim=self.chunk_dim)
        x = first * self.activation_fn(second) if self.gate_last else self.activation_fn(first) * second
        return self.down_proj(x)


class OrderedTheOtherWay(OrderedByAnAttribute):
    fused = "packed gated, up first"
    gate_last = True


class RowsByAnAttribute(OrderedByAnAttribute):
    fused = "pointwise"
    chunk_dim = 0

    def forward(self, hidden_states):
        both = self.gate_up_proj(torch.cat([hidden_states] * 2))
        first, second = both.chunk(2, dim=self.chunk_dim)
        x = first * self.activation_fn(second) if self.gate_last else self.activation_fn(first) * second
        return self.down_proj(x[..., ::2])


class AddsTheMean(Intermediate):
    fused = "linear"

    def forward(self, hidden_states):
        return self.intermediate_act_fn(self.dense(hidden_states)) + hidden_states.mean(dim=-1, keepdim=True)


# Values that are used again, or are not what their names suggest.


class HiddenUsedTwice(Plain):
    fused = None

    def forward(self, x):
        hidden = self.fc1(x)
        return self.fc2(self.activation_fn(hidden)) + hidden.sum()


class InputRebound(Gated):
    fused = "pointwise"

    def __init__(self, **options):
        super().__init__(sizes=(32, 32, 32), **options)

    def forward(self, x):
        x = self.up_proj(x)
        gate = self.gate_proj(x)
        return self.down_proj(self.act_fn(gate) * x)


class InPlaceActivation(Gated):
    fused = "pointwise"

    def __init__(self, **options):
        super().__init__(act=lambda: nn.ReLU(inplace=True), **options)

    def forward(self, x):
        gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(self.act_fn(gate) * up) + gate.sum()


class InPlaceActivationOfOne(Gated):
    fused = "pointwise"

    def __init__(self, **options):
        super().__init__(act=lambda: nn.ReLU(inplace=True), **options)

    def forward(self, x):
        gate = self.gate_proj(x)
        return self.down_proj(self.act_fn(gate) * gate)


class WithoutGradients(Plain):
    fused = "plain"

    @torch.no_grad()
    def forward(self, x):
        return self.fc2(self.activation_fn(self.fc1(x)))


class Options:
    def __init__(self):
        self.approximate = "tanh"


class Configured(Plain):
    """Takes an option of its activation from an object that is no module."""

    fused = "plain"

    def __init__(self, **options):
        super().__init__(**options)
        self.options = Options()

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x), approximate=self.options.approximate))


class FunctionalDropout(Plain):
    """An MLP whose dropout is a function, and so shows only in training."""

    fused = "plain"

    def forward(self, hidden_states):
        hidden = self.activation_fn(self.fc1(hidden_states))
        return self.fc2(F.dropout(hidden, p=0.5, training=self.training))


class Configurable(Gated):
    """Like Gemma 3n's MLP: the result depends on an attribute, and is that of a plain gated MLP if this is 0."""

    fused = "pointwise"

    def __init__(self, sparsity=0.5, **options):
        super().__init__(**options)
        self.activation_sparsity = sparsity

    def forward(self, x):
        gate = self.gate_proj(x)
        if self.activation_sparsity > 0:
            gate = F.relu(gate - self.activation_sparsity * gate.std(dim=-1, keepdim=True))
        return self.down_proj(self.act_fn(gate) * self.up_proj(x))


class WithNorm(Gated):
    fused = "gated linear"

    def __init__(self, **options):
        super().__init__(**options)
        self.norm = nn.LayerNorm(88)

    def forward(self, x):
        return self.down_proj(self.norm(self.act_fn(self.gate_proj(x)) * self.up_proj(x)))


class WithState(Gated):
    fused = "gated linear"

    def __init__(self, **options):
        super().__init__(**options)
        self.scale = nn.Parameter(torch.tensor(3.0))
        self.register_buffer("mask", torch.ones(88).index_fill(0, torch.arange(9), 0.0))

    def forward(self, x):
        hidden = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        self.mask = self.mask.roll(1)
        return self.scale * self.down_proj(self.mask * hidden)


ALL = [
    kind
    for kind in list(vars().values())
    if isinstance(kind, type) and issubclass(kind, nn.Module) and kind.__module__ == __name__
]
