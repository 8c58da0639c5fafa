"""Layers around an MLP, as those of transformers are written, without their attention."""

import torch
import torch.nn.functional as F
from torch import nn

import written
from modules import Dropping, Gated, OfFunctions, PackedGated, Plain, RMSNorm, TransposedPlain


class Behind(nn.Module):
    """BART's layer."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.norm = nn.Linear(32, 88), nn.Linear(88, 32), nn.LayerNorm(32)
        self.act, self.dropout = nn.GELU(), 0.1

    def forward(self, hidden_states):
        residual = hidden_states
        hidden_states = self.act(self.fc1(hidden_states))
        hidden_states = F.dropout(hidden_states, p=self.dropout, training=self.training)
        hidden_states = self.fc2(hidden_states)
        hidden_states = F.dropout(hidden_states, p=self.dropout, training=self.training)
        hidden_states = residual + hidden_states
        hidden_states = self.norm(hidden_states)
        return hidden_states


class Around(nn.Module):
    """ViT's layer, with the MLP as a module."""

    norm_of, mlp_of = staticmethod(lambda: nn.LayerNorm(32)), Plain

    def __init__(self):
        super().__init__()
        self.norm, self.mlp, self.dropout = self.norm_of(), self.mlp_of(), nn.Dropout(0.1)

    def forward(self, hidden_states):
        residual = hidden_states
        hidden_states = self.norm(hidden_states)
        hidden_states = self.mlp(hidden_states)
        hidden_states = self.dropout(hidden_states)
        hidden_states = hidden_states + residual
        return hidden_states


class Decoding(nn.Module):
    """Llama's layer."""

    def __init__(self, kind=Gated):
        super().__init__()
        self.norm, self.mlp = RMSNorm(), kind(bias=True)
        nn.init.normal_(self.norm.weight)

    def forward(self, hidden_states, *, scale=1.0):
        return hidden_states + self.mlp(self.norm(hidden_states))


class PackedDecoding(Around):
    """Phi-3's layer."""

    norm_of, mlp_of = RMSNorm, PackedGated


class OfConv1D(Around):
    """GPT-2's layer: weights [in, out], and dropout at the end of the MLP."""

    mlp_of = TransposedPlain


class AroundDropping(Around):
    """DETR's layer."""

    mlp_of = Dropping


class AroundFunction(Around):
    mlp_of = OfFunctions


class AroundSequence(Around):
    """torchvision's layer: the MLP is an nn.Sequential that contains dropout."""

    @staticmethod
    def mlp_of():
        return nn.Sequential(nn.Linear(32, 88), nn.GELU(), nn.Dropout(0.1), nn.Linear(88, 32), nn.Dropout(0.1))


class Sandwich(nn.Module):
    """Gemma 2's layer."""

    def __init__(self):
        super().__init__()
        self.before, self.mlp, self.norm = RMSNorm(), Gated(), RMSNorm()
        nn.init.normal_(self.norm.weight)

    def forward(self, hidden_states):
        return hidden_states + self.norm(self.mlp(self.before(hidden_states)))


class LayerScale(nn.Module):
    def __init__(self):
        super().__init__()
        self.lambda1 = nn.Parameter(torch.randn(32))

    def forward(self, hidden_state):
        return hidden_state * self.lambda1


class Scaling(Around):
    """DINOv2's layer."""

    def __init__(self):
        super().__init__()
        self.scale, self.drop_path = LayerScale(), nn.Identity()

    def forward(self, hidden_states):
        residual = hidden_states
        hidden_states = self.norm(hidden_states)
        hidden_states = self.mlp(hidden_states)
        hidden_states = self.scale(hidden_states)
        hidden_states = self.drop_path(hidden_states) + residual
        return hidden_states


def layer(name, parent, body, arguments="x", **attributes):
    """A subclass with another forward, and attributes that are set at construction."""

    def init(self):
        parent.__init__(self)
        for key, value in attributes.items():
            setattr(self, key, value() if callable(value) else value)

    kind = written.with_forward(parent, body, arguments, name)
    kind.__init__ = init
    return kind


# Whisper's layer.
InFront = layer(
    "InFront",
    Behind,
    """\
residual = x
x = self.norm(x)
x = self.act(self.fc1(x))
x = self.fc2(x)
x = F.dropout(x, p=self.dropout, training=self.training)
x = residual + x
return x""",
)
# Only the sum can be fused: the residual is normed values, which the MLP reads too.
Summed = layer("Summed", Behind, "normed = self.norm(x)\nreturn self.fc2(self.act(self.fc1(normed))) + normed")
# GPT-NeoX's layer, with two paths.
Branching = layer(
    "Branching",
    Around,
    """\
if parallel:
    values = self.mlp(x)
    values = values + 1
else:
    values = self.mlp(self.norm(x))
    values = self.dropout(values)
    x = values + x
return x""",
    "x, parallel=False",
)
# OLMo 2's layer, with another norm.
Reordered = layer("Reordered", Around, "residual = x\nx = self.mlp(x)\nx = self.norm(x)\nreturn residual + x")
# Granite's layer.
Multiplied = layer(
    "Multiplied",
    Decoding,
    "residual = x\nx = self.mlp(self.norm(x))\nreturn residual + x * self.residual_multiplier",
    residual_multiplier=0.22,
)
# A Conformer's layer: half of the MLP's result, and the norm of the sum.
HalfAndNorm = layer("HalfAndNorm", Around, "x = self.norm(0.5 * self.dropout(self.mlp(x)) + x)\nreturn x")
# BEiT's layer: the scale is a parameter of the layer itself.
OwnScale = layer(
    "OwnScale",
    Around,
    """\
residual = x
x = self.mlp(self.norm(x))
x = self.scale * self.dropout(x)
return self.drop_path(x) + residual""",
    scale=lambda: nn.Parameter(torch.randn(32)),
    drop_path=lambda: nn.Dropout(0.2),
)
# Cohere's layer: attention also reads the normed values, and the residual is a sum.
Parallel = layer(
    "Parallel",
    Around,
    "residual = x\nx = self.norm(x)\nattended = x.flip(1)\nvalues = self.mlp(x)\nreturn residual + attended + values",
)
# Gemma 4's layer: the configuration decides on an operation between the MLP and its norm.
Settled = layer(
    "Settled",
    Sandwich,
    """\
residual = x
x = self.before(x)
x = self.mlp(x)
if self.doubles:
    x = 2 * x
x = self.norm(x)
x = residual + x
if self.flips:
    x = x.flip(1).contiguous()
return x""",
    doubles=False,
    flips=True,
)
# Molmo 2's layer: the norm is before or after the MLP.
SettledTwice = layer(
    "SettledTwice",
    Around,
    """\
residual = x
if not self.norm_after:
    x = self.norm(x)
x = self.mlp(x)
if self.norm_after:
    x = self.norm(x)
return residual + x""",
    norm_after=False,
)


def turn(self):
    self.norm_after = not self.norm_after


SettledTwice.turn = turn

# Conditions that change during the forward: after the MLP, directly or by a method; in a branch, after which an earlier
# condition no longer holds; likewise after a block; and one that depends on values.
NOT_SETTLED = {
    "stored": """\
residual = x
x = self.mlp(x)
self.norm_after = not self.norm_after
if self.norm_after:
    x = self.norm(x)
return residual + x""",
    "stored by a method": """\
residual = x
x = self.mlp(x)
self.turn()
if self.norm_after:
    x = self.norm(x)
return residual + x""",
    "stored in a branch": """\
residual = x
if self.norm_after:
    x = self.norm(x)
    self.norm_after = False
x = self.mlp(x)
if self.norm_after:
    x = self.norm(x)
else:
    self.norm_after = True
return residual + x""",
    "stored behind": """\
residual = x
if self.norm_after:
    x = self.mlp(x)
else:
    x = 2 * self.mlp(x)
x = residual + x
self.turn()
if self.norm_after:
    x = self.norm(x)
return x""",
    "of values": """\
residual = x
x = self.mlp(x)
if x.sum() > residual.sum():
    x = self.norm(x)
return residual + x""",
}
NOT_SETTLED = {name: layer(name, SettledTwice, body) for name, body in NOT_SETTLED.items()}
# Normed values that are read twice, a residual that has changed by then, half of the result, a sum in place.
OTHER_FORMS = [
    "normed = self.norm(x)\nreturn x + self.fc2(self.act(self.fc1(normed))) + normed",
    "residual = x\nx = self.fc2(self.act(self.fc1(x)))\nresidual = residual * 2\nreturn self.norm(residual + x)",
    "return self.norm(0.5 * self.fc2(self.act(self.fc1(x))) + x)",
    "residual = x.clone()\nhidden = self.fc2(self.act(self.fc1(x)))\nresidual += hidden\nreturn residual",
]
OTHER_FORMS = [layer("Other", Behind, body) for body in OTHER_FORMS]
