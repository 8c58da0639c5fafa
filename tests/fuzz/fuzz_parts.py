"""Parts for the modules of fuzz_modules.py, in addition to torch's and those of modules.py."""

import functools
import math

import peft
import torch
import torch.nn.functional as F
from torch import nn

record = []  # the calls seen by hooks


def tanh_gelu(h):
    return 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))


def cubed(h):
    return h * h * h


def relu_and_mul(gate, up):
    return F.relu(gate) * up


def wrapped(function):
    @functools.wraps(function)
    def around(*args, **kwargs):
        record.append("around")
        return function(*args, **kwargs)

    return around


def named(function):
    @functools.wraps(function)
    def around(module, *args, **kwargs):
        record.append(function.__name__)
        return function(module, *args, **kwargs)

    return around


def handed(function):
    @functools.wraps(function)
    def around(module, *args, **kwargs):
        if module.training:
            return functools.partial(function, module, **kwargs)(*args)
        return function(module, *args, **kwargs)

    return around


def lora(layer, name="default", **options):
    """Returns a linear layer with one more PEFT adapter of random weights."""
    config = peft.LoraConfig(target_modules=["layer"], init_lora_weights=False, **{"r": 2, "lora_alpha": 3, **options})
    held = peft.inject_adapter_in_model(config, nn.ModuleDict({"layer": layer}), adapter_name=name)
    return held["layer"].train(layer.training)


class Wide(nn.Module):
    def forward(self, h):
        return F.silu(h.float()).to(h.dtype)


class Quick(nn.Module):
    def forward(self, input):
        return input * torch.sigmoid(1.702 * input)


class Options:
    def __init__(self):
        self.way = "none"


class Halves(nn.Module):
    def __init__(self, dim=-1):
        super().__init__()
        self.dim = dim

    def forward(self, h):
        h, gate = h.chunk(2, dim=-1) if self.dim == -1 else h.chunk(2, dim=1)
        return F.gelu(gate) * h


class Scaled(nn.Module):
    scale = 1.5

    def forward(self, h):
        return F.gelu(h) * self.scale


class Perceptron(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(width, 24), nn.GELU(), nn.Linear(24, width)

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


class GatedPerceptron(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(width, 24), nn.Linear(width, 24), nn.Linear(24, width)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class HiddenValues(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.proj, self.act = nn.Linear(width, 24), nn.GELU()

    def forward(self, x):
        return self.act(self.proj(x))


class FeedForward(nn.Module):
    """Runs its parts in turn."""

    def __init__(self, width):
        super().__init__()
        self.net = nn.ModuleList([HiddenValues(width), nn.Dropout(), nn.Linear(24, width)])

    def forward(self, x, *args):
        if len(args) > 0:
            raise TypeError("args")
        for module in self.net:
            x = module(x)
        return x


class Ending(nn.Module):
    def __init__(self, width, norm):
        super().__init__()
        self.dense, self.drop, self.norm = nn.Linear(width, width), nn.Dropout(), norm(width)

    def forward(self, h, residual):
        return self.norm(self.drop(self.dense(h)) + residual)


class RootMeanSquare(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.linspace(0.5, 1.5, width)), 0.1

    def forward(self, x):
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * h.to(x.dtype)


class Casting(nn.LayerNorm):
    def forward(self, x):
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps).to(x.dtype)


class Scales(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gamma = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x):
        return x * self.gamma


class Turns(nn.Module):
    """Runs its parts in turn."""

    def __init__(self, *parts):
        super().__init__()
        self.net = nn.ModuleList(parts)

    def forward(self, x):
        for part in self.net:
            x = part(x)
        return x


def in_turn(kind, head, width):
    """Returns a module of the given kind that runs a head of `width` hidden features and the rest of an MLP in turn."""
    made = kind(head, nn.Dropout(0.4), nn.Linear(width, 4))
    return made.to(next((p.dtype for p in head.parameters()), None)).train(head.training)
