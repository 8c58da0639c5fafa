"""Writes random modules with MLPs in them, as the source of a file that is the same for equal seeds."""

import itertools
import random
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

# In, hidden, out: mostly equal, so that a wrong tensor fits too. Widths of 32 suffice for the kernels of few rows.
WIDTHS = ((8, 8, 8), (32, 32, 32), (6, 10, 4))

HEAD = """\
import contextlib
import copy
import functools
import math
import types
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import gelu
from fuzz_parts import Casting, Ending, FeedForward, GatedPerceptron, Halves, Options, Perceptron, Quick, RootMeanSquare
from fuzz_parts import Scaled, Scales, Turns, Wide, cubed, handed, in_turn, lora, named, record, relu_and_mul, tanh_gelu
from fuzz_parts import wrapped
from modules import WRAPPERS, FalconLinear, GateUp, UpGate

_here = True


def of_another(self, x, *args, **kwargs):
    parts = [part for part in self.children() if isinstance(part, nn.Linear)]
    return self.act(parts[0](x))


def is_here():
    return _here
"""

# Activations: modules for the attribute `act`, and expressions of {h}. Those in neither row of the table must be left.
ACT_MODULES = [
    "nn.GELU()",
    'nn.GELU("tanh")',
    'nn.GELU(approximate="tanh")',
    "nn.SiLU()",
    "nn.SiLU()",
    "nn.SiLU()",
    "nn.GELU()",
    "nn.ReLU()",
    "nn.Sigmoid()",
    "nn.Identity()",
    "Quick()",
    "Wide()",
    "nn.SiLU(inplace=True)",
    "nn.ReLU(inplace=True)",
    "nn.Tanh()",
    "nn.LeakyReLU(0.2)",
    "Scaled()",
    "nn.Mish()",
    "nn.Sequential(nn.GELU())",
    "F.silu",
    "F.gelu",
    "torch.relu",
    "tanh_gelu",
    "cubed",
]
ACTIVATIONS = ("GELU", "SiLU", "ReLU", "Tanh", "LeakyReLU", "Mish")
SPELLED = """
F.gelu({h}) | gelu({h}) | F.silu({h}) | F.relu({h}) | torch.relu({h}) | torch.sigmoid({h}) | tanh_gelu({h})
F.gelu({h}, approximate="tanh") | F.gelu({h}, approximate=self.options.way)
F.gelu({h}, approximate=self.approximate) | F.gelu(input={h}) | cubed({h})
F.silu({h}, inplace=True) | F.relu({h}, True) | F.silu({h}, inplace=self.training) | F.silu({h}, other=1)
{h}.relu() | {h}.sigmoid() | {h}.tanh() | {h}.relu_() | {h}.pow(2) | F.leaky_relu({h}, 0.1) | torch.tanh({h})
{h} * torch.sigmoid({h}) | torch.sigmoid({h}) * {h} | {h} * torch.sigmoid(1.702 * {h}) | {h} * {h}.sigmoid()
F.sigmoid({h} * 1.702) * {h} | {h} * torch.sigmoid(1.5 * {h}) | F.relu({h}).square() | F.relu({h}) ** 2
torch.square(F.relu({h})) | torch.square({h}.relu()) | F.relu({h}) ** 3 | {h}.relu().pow(2)
0.5 * {h} * (1 + torch.erf({h} / math.sqrt(2))) | F.gelu({h}) if self.flag else F.silu({h}) | act_here({h})
""".replace("\n", "|").split("|")
SPELLED = [spelled.strip() for spelled in SPELLED if spelled.strip()]

BETWEEN = """
self.drop({h}) | self.drop({h}) | self.same({h}) | F.dropout({h}, 0.3, self.training) | F.dropout({h}, p=0.3)
F.dropout({h}, p=self.p, training=self.training) | F.dropout({h}, self.p, training=True) | {h} + 1 | {h} * 0.5
{h}.clamp(-1, 1) | self.norm({h}) | {h}.contiguous() | self.drop(self.same({h})) | -{h}
""".replace("\n", "|").split("|")
BETWEEN = [between.strip() for between in BETWEEN if between.strip()]

# Other code between an MLP and the sum of its block.
BEHIND = [
    "F.dropout({h}, 0.3, self.training)",
    "self.after({h})",
    "self.root({h})",
    "self.root({h})",
    "self.scales({h})",
    "self.scales({h})",
]
FACTORS = ["{h} * 0.5", "0.5 * {h}", "{h} * self.factor", "self.factor * {h}", "{h} * self.mean"]

# Conditions for casting hidden values to the dtype of the last weight.
CASTS = [
    "{h}.dtype != self.{p}.weight.dtype",
    "isinstance(self.{p}.weight, torch.Tensor) and {h}.dtype != self.{p}.weight.dtype",
    "self.flag",
    "True",
    "record.append('cast') or True",
]

UNPACKED = [
    "{h}.chunk(2, dim=-1)",
    "{h}.chunk(2, -1)",
    "torch.chunk({h}, 2, dim=-1)",
    "{h}.tensor_split(2, dim=-1)",
    "{h}.chunk(dim=-1, chunks=2)",
    "{h}.chunk(2, dim=0)",
    "{h}.chunk(2, dim=self.dim)",
    "{h}.chunk(2, self.dim)",
]

# Statements beside the MLP: every way that Python binds a name, mostly to `other`, and statements with effects.
BINDINGS = r"""
{n} = other
{n}, y0 = other, 1
[{n}, *y0] = [other]
{n} *= other
{n} += 1
{n}: torch.Tensor = other
y0 = ({n} := other)
y0 = [({n} := part) for part in [other]]
while ({n} := other) is None: pass
for {n} in [other]: pass
for {n} in (): pass
with contextlib.nullcontext(other) as {n}: pass
try: raise ValueError(other)\nexcept ValueError as e: {n} = e.args[0]
try: pass\nfinally: {n} = other
from math import pi as {n}
import math as {n}\n{n} = other * {n}.pi
def {n}(): return other\n{n} = {n}()
class {n}: value = other\n{n} = {n}.value
del {n}
match [other, 1]:\n    case [{n}, *_]: pass
match [1, other]:\n    case [_, *{n}]: {n} = {n}[0]
match {{"y": other}}:\n    case {{"y": {n}}}: pass
match {{"y": other}}:\n    case {{**{n}}}: {n} = {n}["y"]
match other:\n    case torch.Tensor(data={n}): pass
match other:\n    case torch.Tensor() as {n}: pass
match other:\n    case {n}: pass
def change():\n    nonlocal {n}\n    {n} = other\nchange()
global {n}
y0 = [{n} for {n} in [other]]
y0 = (lambda {n}: {n})(other)
later = lambda: {n}
if self.flag: {n} = other
if self.training: {n} = {n} * 2
{n} = {n}.clone()
{n} = {n}.transpose(0, -1).contiguous().transpose(0, -1)
""".strip().split("\n")
EFFECTS = r"""
self.calls += 1
self.calls = self.calls + 1
self.last = {n}
self.count.add_(1)
self.mean.mul_(0.9).add_({n}.detach().mean())
record.append("here")
{n}.mul_(2)
{n}.data.add_(1)
{n}[...] = other
torch.rand(2)
y0 = self.norm(other)
y0 = F.dropout(other, 0.3, self.training)
assert {n} is not None
print(end="")
y0 = {n}.shape[0]
y0 = len(locals())
y0 = {n}; y0.add_(1)
if not self.flag: return {n}
if {n}.shape[0] == 0: return {n}
raise ValueError("no")
self.act = nn.Tanh()
with torch.no_grad(): self.{p}.weight.mul_(0.5)
self.{p} = self.{p}
""".strip().split("\n")

BLOCKS = r"""
if self.flag:
if not self.flag:
if is_here():
if not is_here():
if x.dim() > 1:
for _ in range(2):
for k, part in enumerate([1]):
with torch.no_grad():
with contextlib.nullcontext():
with torch.enable_grad():
with torch.autocast("cpu", dtype=torch.bfloat16):
while not self.flag:
match 1:\n    case 1:
""".strip().split("\n")

RETURNS = r"""
return {out}
return {out}
return {out}
return {out}
return {out}, {n}
return {n} + {out}
return {out}.view(-1)
return {{"out": {out}, "n": {n}}}
return ({out}, None, self.calls)
{n} = {out}; return {n}
{n} += {out}; return {n}
self.last = {out}; return self.last
return {out} if self.flag else {n}
return {n} if self.flag else {out}
return (lambda y: y)({out})
return self.flag and {out}
return [{out} for _ in range(2)][1]
try: return {out}\nfinally: record.append("left")
""".strip().split("\n")

ARGUMENTS = """
x | x | x | x, mask=None | x, mask=None, *rest, scale=1.0, **options | x, /, mask=None | x, *, mask=None | *, x
x: torch.Tensor, fused=None | x, self_=1 | x, other=None
""".replace("\n", "|").split("|")
ARGUMENTS = [arguments.strip() for arguments in ARGUMENTS if arguments.strip()]

# Code of a layer around an MLP and its sum: conditions on its own attributes, and changes to these.
AROUND = r"""
h = self.norm(h)
h = self.drop(h)
h = self.scale * h
h = h * self.scale
h = self.norm(h) * (1 + s) + t
h = (s + 1) * self.norm(h)
h = self.norm(h) * (1 + s[None]) + t.unsqueeze(0)
h = g * h
h = (self.norm(h.float()) * (1 + s) + t).type_as(h)
h = ((1 + s) * self.norm(h.float())).type_as(h)
if self.way == 'a': h = self.norm(h) * (1 + s) + t
if self.way == 'b': h = self.norm(h)\nelif not self.drops: h = h * g
if self.drops: h = self.drop(h)
if not self.drops and self.flag: h = self.norm(h)
if self.way != 'a': h = self.drop(h)\nif self.drops: h = self.norm(h)\nif not self.flag: h = 2 * h
if self.flag: h = self.norm(h)
if not self.flag: h = self.norm(h)
if self.flag: h = self.norm(h)
if not self.flag: h = self.drop(h)
if self.flag: h = 2 * h\nelse: h = self.drop(h)
if self.flag and self.scale is not None: h = self.scale * h
if isinstance(self.norm, nn.LayerNorm): h = self.norm(h)
if self.training: h = h + 1
if h.shape[0] > 2: h = -h
if self.flag: return h
if self.flag: self.flag = False
self.flag = not self.flag
self.turn()
record.append(self.flag)
""".strip().split("\n")
SUMS = ["h = r + h", "h = h + r", "h = r + x + h", "h = r + self.scale * h", "h = self.norm(r + h)", "h += r"]
SUMS += ["h = (r.float() + h.float() * g).type_as(r)", "h = (g * self.drop(h).float() + r.float()).type_as(r)"]
SUMS += ["h = r + g * h", "h = h * g[None] + r", "h = self.drop(h) * g.unsqueeze(0) + r"]
SUMS += ["h = self.end(h, r)", "h = self.end(residual=r, h=h)"]

# Changes to the end of a layer before fusing.
END_CHANGES = [
    *("pass",) * 4,
    "self.end.norm.register_forward_hook(lambda *_: record.append('end'))",
    "self.end.dense = WRAPPERS['LoRA'](self.end.dense)",
    "self.end.dense = nn.Linear(self.end.dense.in_features, self.end.dense.out_features, bias=False)",
    "self.end.drop = nn.Identity()",
    "self.end.forward = self.end.forward",
]

# Changes to a module before fusing, or between fusing and a call. `m` is the module, `p` and `q` name projections.
PART_CHANGES = [
    "m.{p}.weight.data = torch._neg_view(m.{p}.weight.data)",
    *(f"m.{{p}} = WRAPPERS[{name!r}](m.{{p}})" for name in ("LoRA", "int8", "subclass", "parametrized", "weight norm")),
    *(f"m.{{p}} = WRAPPERS[{name!r}](m.{{p}})" for name in ("forward pre-hook", "own forward", "tensor subclass")),
    "m.{p} = WRAPPERS['forward hook'](m.{p})",
    "m.{p}.register_forward_hook(lambda *_: record.append('{p}'))",
    "m.{p}.register_forward_pre_hook(lambda *_: record.append('before {p}'))",
    "m.{p}.register_full_backward_hook(lambda *_: record.append('back {p}'))",
    "m.{p} = nn.Sequential(nn.Dropout(0.5), m.{p})",
    "m.{p} = nn.Sequential(m.{p}, nn.Dropout(0.5))",
    "m.{p} = m.{q}",
    "m.{p}.weight = m.{q}.weight",
    "m.{p}.weight.data = m.{p}.weight.data.t().contiguous().t()",
    "m.{p}.weight.requires_grad_(False)",
    "m.{p}.bias = None",
    "m.{p} = torch.jit.script(m.{p})",
    "m.{p} = nn.LazyLinear(m.{p}.out_features).to(m.{p}.weight.dtype)",
    "m.{p} = None",
    "m.{p}.double()",
    "m.{p}.forward = m.{p}.forward",
    "m.{p}.forward = m.{q}.forward",
    "m.{p}._call_impl = functools.partial(lambda call, *args: 2 * call(*args), m.{p}._call_impl)",
    "m.{p}.compile(backend='eager')",
    "m.{p} = F.silu",
    "m.{p} = nn.Identity()",
    "m.{p}, m.{q} = m.{q}, m.{p}",
    "vars(m)['{p}'] = m._modules.pop('{p}')",
    "vars(m.{p})['weight'] = 2 * m.{p}.weight.detach()",
    "Made.{p} = m._modules.pop('{p}')",
]
MODULE_CHANGES = [
    "torch.inference_mode()(m._apply)(torch.clone)",
    "m.act = nn.GELU()",
    "m.act = nn.Mish()",
    "m.act = torch.tanh",
    "m.act = nn.Sequential(nn.ReLU(), nn.Dropout(0.3))",
    "isinstance(m.act, nn.Module) and m.act.register_forward_hook(lambda *_: record.append('act'))",
    "isinstance(m.act, nn.Module) and m.act.register_forward_hook(lambda m, args, out: out + 1)",
    "m.drop.register_forward_hook(lambda *_: record.append('drop'))",
    "m.after.register_forward_hook(lambda *_: record.append('after'))",
    "m.after.register_forward_hook(lambda m, args, out: out + 1)",
    "m.after.weight.data.mul_(2)",
    "m.after.weight, m.after.eps = None, 0.01",
    "m.after.bias = None",
    "m.after = nn.Identity()",
    "m.after.float()",
    "m.before.normalized_shape = (1,)",
    "m.root.eps = 0.5",
    "m.root.weight.data.mul_(2)",
    "m.root.register_forward_hook(lambda m, args, out: out + 1)",
    "m.first.forward = m.before.forward",
    "m.first = nn.Identity()",
    "m.scales.gamma = nn.Parameter(2 * m.scales.gamma.detach())",
    "m.scales.gamma.data = torch._neg_view(m.scales.gamma.data)",
    "m.scales.float()",
    "m.glu = UpGate()",
    "m.glu = GateUp()",
    "m.glu.act = nn.ReLU()",
    "m.glu.register_forward_hook(lambda m, args, out: 2 * out)",
    "m.dim = 0",
    "m.dim = 1",
    "m.factor = 3",
    "m.factor = 3.0",
    "m.factor = torch.tensor(3.0)",
    "m.drop.train(not m.drop.training)",
    "m.register_forward_pre_hook(lambda m, args: (args[0] * 2, *args[1:]))",
    "m.register_forward_hook(lambda m, args, out: record.append('m'))",
    "m.register_full_backward_hook(lambda *_: record.append('back m'))",
    "m.forward = functools.partial(type(m).forward, m)",
    "own = m.forward; m.forward = lambda *args, **kwargs: own(*args, **kwargs)",
    "m.forward = m.forward",
    "m.forward = copy.deepcopy(m).forward; m.double()",
    "m.forward = of_another.__get__(m)",
    "m.forward = types.MethodType(type(m).forward, m); Made.forward = nn.Identity.forward",
    "globals().update(relu_and_mul=lambda gate, up: gate - up)",
    "isinstance(m.act, nn.Module) and setattr(m.act, 'forward', m.act.forward)",
    "isinstance(m.act, nn.Module) and setattr(m.act, 'forward', nn.ReLU().forward)",
    "m.forward = wrapped(m.forward)",
    "m.old = m.forward; m.forward = functools.partial(lambda m, *args, **kwargs: m.old(*args, **kwargs), m)",
    "m.__class__ = type('Other', (type(m),), {'other': 1})",
    "kind = type(m); m.__class__ = type('Other', (kind,), {'forward': lambda m, *a, **kw: kind.forward(m, *a, **kw)})",
    "Made.forward = wrapped(Made.forward)",
    "Made.forward = functools.partialmethod(Made.forward)",
    "Made.forward = nn.Identity.forward",
    "Made.forward = property(lambda self: lambda x: x + 1)",
    "Made.forward = None",
    "Made.forward = math.sqrt",
    "globals().update(tanh_gelu=torch.tanh, gelu=F.relu)",
    "globals().update(_here=False)",
    "G = type(math)('F'); vars(G).update(vars(F), dropout=lambda h, *_, **__: 2 * h); globals().update(F=G)",
    "Made.forward.__code__ = Made.forward.__code__.replace()",
    "globals().update(is_here=lambda: False)",
    "m.flag = not m.flag",
    "m.approximate = m.options.way = 'tanh'",
    "del m.options.way",
    "m.approximate = 'neither'",
    "m.p = 0.9",
    "m.later = nn.LazyLinear(3)",
    "m.extra = torch.jit.script(nn.ReLU())",
    "m.add_module('again', None)",
    "m.share_memory()",
]


# PEFT adapters on a projection before fusing, and changes to their state and parts.
ADAPTERS = [
    *("m.{p} = lora(m.{p})",) * 4,
    "m.{p} = lora(m.{p}, r=5)",
    "m.{p} = lora(m.{p}, r=16, use_rslora=True)",
    "m.{p} = lora(m.{p}, lora_dropout=0.3)",
    "m.{p} = lora(m.{p}, lora_bias=True)",
    "m.{p} = lora(m.{p}, use_dora=True)",
    "m.{p} = lora(lora(m.{p}), 'second', r=3)",
]
ADAPTER_CHANGES = [
    *("m.{p}.merge()", "m.{p}.unmerge()", "m.{p}.merge(safe_merge=True)"),
    *("m.{p}.enable_adapters(False)", "m.{p}.enable_adapters(False)", "m.{p}.enable_adapters(True)"),
    "m.{p} = lora(m.{p}, 'second', r=3)",
    "lora(m.{p}, 'second', lora_dropout=0.3)",
    *("m.{p}.set_adapter('second')", "m.{p}.set_adapter(['default'])", "m.{p}.set_adapter([])"),
    "m.{p}.set_adapter(['default', 'second'])",
    "m.{p}.delete_adapter('default')",
    "m.{p} = m.{p}.get_base_layer()",
    "m.{p}.lora_A.float(), m.{p}.lora_B.float()",
    "m.{p}.lora_A.bfloat16(), m.{p}.lora_B.bfloat16()",
    "m.{p}.lora_A.double()",
    "m.{p}.base_layer.double()",
    *("m.{p}.lora_dropout.eval()", "m.{p}.lora_dropout.train()", "m.{p}.train(not m.{p}.training)"),
    "m.{p}.lora_dropout['default'] = nn.Dropout(0.2)",
    "m.{p}.register_forward_hook(lambda *_: record.append('{p}'))",
    "m.{p}.base_layer.register_forward_hook(lambda *_: record.append('base of {p}'))",
    "m.{p}.lora_A['default'].register_forward_hook(lambda m, args, out: 2 * out)",
    "m.{p}.lora_B['default'].register_forward_pre_hook(lambda *_: record.append('B of {p}'))",
    "m.{p}.lora_A['default'].register_full_backward_hook(lambda *_: record.append('A of {p}'))",
    "m.{p}.lora_dropout['default'].register_forward_hook(lambda m, args, out: 2 * out)",
    *("m.{p}.scaling['default'] = 0.3", "m.{p}.scaling['default'] = 2", "m.{p}.scaling['default'] = torch.tensor(2.0)"),
    "m.{p}.lora_A['default'].weight = nn.Parameter(2 * m.{p}.lora_A['default'].weight.detach())",
    "m.{p}.lora_B['default'].weight.data = m.{p}.lora_B['default'].weight.data.t().contiguous().t()",
    "m.{p}.lora_B['default'].weight.data = torch._neg_view(m.{p}.lora_B['default'].weight.data)",
    "m.{p}.lora_A['default'].weight.requires_grad_(False)",
    "m.{p}.lora_A['default'] = nn.Sequential(m.{p}.lora_A['default'], nn.ReLU())",
    "m.{p}.lora_A['default'] = WRAPPERS['parametrized'](m.{p}.lora_A['default'])",
    "m.{p}.base_layer = WRAPPERS['int8'](m.{p}.base_layer)",
    "m.{p}.base_layer.bias = None",
    "m.{p}.lora_A = m.{q}.lora_A",
    "m.{p}.forward = m.{p}.forward",
    "m.{p}.forward = m.{p}.base_layer.forward",
    "m.{p}.__class__ = type('Linear', (type(m.{p}),), {})",
    "m.{p}.lora_variant['default'] = None",
    "m.{p}.cast_input_dtype_enabled = False",
    "del m.{p}.lora_B['default']",
]


# The modes around a case's calls.
AMBIENTS = ["grad", "no_grad", "inference_mode", "autocast", "autocast, no_grad", "function mode", "default device"]


@dataclass
class Step:
    """A value in the method: ``names`` (two for an unpacked tensor) of an expression of other values."""

    names: tuple[str, ...]
    template: str
    read: tuple[str, ...]


LAYOUTS = ["contiguous", "contiguous", "transposed", "sliced", "expanded", "misaligned", "negated", "without memory"]


@dataclass
class Source:
    """A case: its settings and file (``make()`` makes the module, ``before(m)`` and ``later(m)`` change it)."""

    seed: int
    text: str
    kind: str
    is_clear: bool  # an MLP of modules with nothing odd beside it, which must be reported if left
    place: str  # the file's place: "file", "linecache", "nowhere"
    dtype: str
    training: bool
    ambient: str
    shape: tuple[int, ...]
    layout: str
    x_grad: bool
    arguments: str

    def __str__(self) -> str:
        said = ", ".join(f"{name}={value!r}" for name, value in vars(self).items() if name != "text")
        return f"{self.text}\n# {said}"


class Writer:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.draw = random.Random(seed)
        self.n_in, self.hidden, self.n_out = self.draw.choice(WIDTHS)

    def likely(self, chance: float) -> bool:
        return self.draw.random() < chance

    # The MLP, as steps in a valid order.

    def act(self, h: str) -> str:
        template = "self.act({h})" if self.likely(0.65) else self.draw.choice(SPELLED)
        self.is_clear &= template == "self.act({h})"
        return template.replace("{h}", f"{{{h}}}")

    def steps(self) -> tuple[str, dict[str, tuple[int, int]], list[Step]]:
        """Returns a kind of MLP, its projections with their sizes, and its steps."""
        kind = self.draw.choice(
            ["plain"] * 3 + ["gated", "packed"] * 2 + ["linear", "gated linear", "packed linear", "glu"]
        )
        first, second = (self.n_in, self.hidden), (self.hidden, self.n_out)
        names = self.draw.choice([["gate_proj", "up_proj", "down_proj"], ["w1", "w3", "w2"], ["fc1", "fused", "fc2"]])
        gate, up, down = names
        sizes = {gate: first, down: second}
        steps = []
        if kind in ("plain", "linear"):
            steps += [Step(("h",), f"self.{gate}({{x}})", ("x",)), Step(("s",), self.act("h"), ("h",))]
        elif kind == "glu":
            sizes[gate] = (self.n_in, 2 * self.hidden)
            self.is_clear = False
            glu = self.draw.choice(["F.glu({h})", "F.glu({h}, dim=-1)", "F.glu({h}, -1)", *["self.glu({h})"] * 3])
            steps += [Step(("h",), f"self.{gate}({{x}})", ("x",)), Step(("s",), glu, ("h",))]
        else:
            if kind.startswith("packed"):
                sizes[gate] = (self.n_in, 2 * self.hidden)
                halves = ("g", "u") if self.likely(0.7) else ("u", "g")
                steps.append(Step(("h",), f"self.{gate}({{x}})", ("x",)))
                unpacked = self.draw.choice(UNPACKED[:2] if self.likely(0.8) else UNPACKED)
                if self.likely(0.7):
                    steps.append(Step(halves, unpacked, ("h",)))
                else:
                    steps.append(Step(("c",), unpacked, ("h",)))
                    steps += [Step((half,), f"{{c}}[{k}]", ("c",)) for k, half in enumerate(halves)]
            else:
                sizes[up] = first
                steps += [Step(("g",), f"self.{gate}({{x}})", ("x",)), Step(("u",), f"self.{up}({{x}})", ("x",))]
            product = self.draw.choice(["{a} * {u}", "{u} * {a}", "{a} * {u}", "{u} * {a}", "torch.mul({a}, {u})"])
            if self.likely(0.15):  # a convolution's gate and up have these strides
                self.is_clear = False
                steps += [Step((name + "t",), f"{{{name}}}.transpose(0, -1)", (name,)) for name in ("g", "u")]
                steps.append(Step(("a",), self.act("gt"), ("gt",)))
                steps.append(Step(("st",), product.replace("{u}", "{ut}"), ("a", "ut")))
                steps.append(Step(("s",), "{st}.transpose(0, -1)", ("st",)))
            else:
                if self.likely(0.15):  # a function of both
                    steps.append(Step(("s",), "relu_and_mul({g}, {u})", ("g", "u")))
                else:
                    steps.append(Step(("a",), self.act("g"), ("g",)))
                    steps.append(Step(("s",), product, ("a", "u")))
        value = "s"
        if not kind.endswith("linear"):
            if self.likely(0.3):
                steps.append(Step(("t",), self.draw.choice(BETWEEN).replace("{h}", "{s}"), ("s",)))
                value = "t"
            steps.append(Step(("out",), f"self.{down}({{{value}}})", (value,)))
            if self.likely(0.35):
                steps += self.block(steps.pop())
        else:
            steps.append(Step(("out",), f"{{{value}}} + 0" if self.likely(0.3) else f"{{{value}}}", (value,)))
            del sizes[down]
        if self.likely(0.2):
            steps.insert(
                0, Step(("x1",), self.draw.choice(["{x} * 2", "self.before({x})", "self.first({x})", "{x}"]), ("x",))
            )
            for k, step in enumerate(steps[1:], 1):
                if "x" in step.read and self.likely(0.9):
                    read = tuple("x1" if name == "x" else name for name in step.read)
                    steps[k] = Step(step.names, step.template.replace("{x}", "{x1}"), read)
        return kind, sizes, steps

    def block(self, last: Step) -> list[Step]:
        """Returns an MLP's last step and its block: a residual, and perhaps norms, a scale and a factor."""
        steps = [Step(("o",), last.template, last.read)]
        value = "o"
        if self.likely(0.4):
            behind = self.draw.choice(BETWEEN if self.likely(0.5) else BEHIND).replace("self.norm", "self.after")
            steps.append(Step(("p",), behind.replace("{h}", f"{{{value}}}"), (value,)))
            value = "p"
        if self.likely(0.2):
            steps.append(Step(("q",), self.draw.choice(FACTORS).replace("{h}", f"{{{value}}}"), (value,)))
            value = "q"
        residual = "x"
        if self.likely(0.5):
            steps.append(Step(("r",), self.draw.choice(["{x}", "{x}", "{x} * 2", "self.before({x})"]), ("x",)))
            residual = "r"
        total = self.draw.choice(["{a} + {b}", "{a} + {b}", "torch.add({a}, {b})", "{a} + {b} + 1", "{a} - {b}"])
        both = self.draw.sample([value, residual], 2)
        total = total.replace("{a}", f"{{{both[0]}}}").replace("{b}", f"{{{both[1]}}}")
        if self.likely(0.5):
            return [*steps, Step(("out",), total, (value, residual))]
        return [*steps, Step(("t1",), total, (value, residual)), Step(("out",), "self.after({t1})", ("t1",))]

    # The method.

    def body(self, steps: list[Step], projections: list[str]) -> list[str]:
        """Returns the method's statements: the steps in some order, inlined or named, and others between them."""
        for _ in range(self.draw.choice([0, 0, 3, 6])):
            k = self.draw.randrange(len(steps) - 1)
            if not set(steps[k].names) & set(steps[k + 1].read):
                steps[k], steps[k + 1] = steps[k + 1], steps[k]
        inlining = self.draw.choice([0.0, 0.5, 0.5, 0.9, 1.0])
        written, statements = {"x": "x"}, []
        for k, step in enumerate(steps):
            expression = step.template.format(**written)
            last = k == len(steps) - 1
            if last or (len(step.names) == 1 and self.likely(inlining)):
                written[step.names[0]] = f"({expression})" if " " in expression else expression
                continue
            used_later = {name for later in steps[k + 1 :] for name in later.read}
            free = [written[name] for name in step.read if name not in used_later and written[name].isidentifier()]
            for name in step.names:
                taken = set(written.values())
                choices = (
                    free if free and self.likely(0.5) else [n for n in (name, "h", "y", "fused") if n not in taken]
                )
                written[name] = self.draw.choice(choices or [name]) if self.likely(0.97) else "x"
            statements.append(f"{', '.join(written[name] for name in step.names)} = {expression}")
        bound = ["x", *(value for value in written.values() if value.isidentifier())]
        for _ in range(self.draw.choice([0, 0, 0, 1, 1, 2])):
            self.is_clear = False
            where = self.draw.randint(0, len(statements))
            beside = self.draw.choice(BINDINGS if self.likely(0.6) else EFFECTS)
            statements.insert(where, self.filled(beside, bound, projections))
        returned = self.draw.choice(RETURNS) if self.likely(0.5) else RETURNS[0]
        statements.append(self.filled(returned.replace("{out}", "{{out}}"), bound, projections))
        statements[-1] = statements[-1].replace("{out}", written["out"])
        if self.likely(0.15):
            statements = self.with_cast(statements, projections[-1])
        if self.likely(0.2):
            statements = self.in_block(statements)
        if any("other" in statement for statement in statements):
            statements.insert(0, f"other = torch.linspace(-1, 1, {self.hidden}).to(x.dtype)")
        return statements

    def with_cast(self, statements: list[str], last: str) -> list[str]:
        """Inserts a conditional cast before the last projection if its input has a name."""
        for k, statement in enumerate(statements):
            given = re.search(rf"self\.{last}\((\w+)\)", statement)
            if given is not None:
                test = self.draw.choice(CASTS).format(h=given[1], p=last)
                cast = f"if {test}:\n    {given[1]} = {given[1]}.to(self.{last}.weight.dtype)"
                return [*statements[:k], cast, *statements[k:]]
        return statements

    def filled(self, template: str, bound: list[str], projections: list[str]) -> str:
        template = template.replace("\\n", "\n")
        return template.format(n=self.draw.choice(bound), p=self.draw.choice(projections))

    def in_block(self, statements: list[str]) -> list[str]:
        start = self.draw.randrange(len(statements))
        end = self.draw.randint(start + 1, len(statements))
        head = self.draw.choice(BLOCKS).replace("\\n", "\n")
        depth = 8 if "\n" in head else 4
        block = head + "\n" + textwrap.indent("\n".join(statements[start:end]), " " * depth)
        if head.startswith("while"):
            block += "" if re.search(r"^\s*return", block, re.MULTILINE) else "\n    break"
        return [*statements[:start], block, *statements[end:]]

    # The class, and the file.

    def source(self) -> Source:
        self.is_clear = True
        kind, sizes, steps = self.steps()
        if self.likely(0.08):
            made, sizes = self.sequence(sizes)
            kind, self.is_clear = "sequence", False
        else:
            made = self.module(sizes, self.body(steps, list(sizes)))
        adapted = [name for name in sizes if self.likely(0.6)] if self.likely(0.2) else []
        before = self.changes(list(sizes), 0.15 if adapted else 0.35, adapted, list(map(self.adapter, adapted)))
        later = self.changes(list(sizes), 0.05 if adapted else 0.15, adapted)
        root = self.root("*, x" in made, kind.endswith("linear"))
        text = f"{HEAD}\n\n{made}\n\n{before('before')}\n\n{later('later')}\n\n{root}"
        draw = self.draw
        # Falcon's layer sums in another order than F.linear, which float64 uses, if x is transposed.
        wide = 0 if "FalconLinear(" in made else 1
        arguments = "x=x" if "*, x" in made else "x"
        if self.likely(0.03):
            arguments = draw.choice(["x, 2", "x, x=x", "x, nothing=1", "", "None", "x.long()", "x[0]"])
        shape = draw.choice([(3,), (1,), (2, 3), (2, 1, 3), (), (0,)] if self.likely(0.5) else [(3,), (2, 3)])
        width = self.n_in + (1 if self.likely(0.02) else 0)
        return Source(
            seed=self.seed,
            text=text,
            kind=kind,
            is_clear=self.is_clear and before("")[-4:] == "pass",
            place=draw.choices(["file", "linecache", "nowhere"], [6, 5, 1])[0],
            dtype=draw.choices(["float32", "bfloat16", "float64", "float16"], [6, 3, wide, 1])[0],
            training=self.likely(0.5),
            ambient=draw.choices(AMBIENTS, [6, 4, 1, 1, 1, 1, 1])[0],
            shape=(*shape, width),
            layout=draw.choice(LAYOUTS),
            x_grad=self.likely(0.5),
            arguments=arguments,
        )

    def module(self, sizes: dict[str, tuple[int, int]], statements: list[str]) -> str:
        bias, layer = self.draw.choice([True, False]), "FalconLinear" if self.likely(0.1) else "nn.Linear"
        parts = [f"self.{name} = {layer}({a}, {b}, bias={bias})" for name, (a, b) in sizes.items()]
        act = self.draw.choice(ACT_MODULES)
        self.is_clear &= act.startswith("nn.") and act[3:].partition("(")[0] in ACTIVATIONS
        parts += [f"self.act = {act}"]
        parts += [f"self.drop, self.same, self.norm = nn.Dropout(0.4), nn.Identity(), nn.LayerNorm({self.hidden})"]
        glu = self.draw.choice(["nn.GLU()", "UpGate()", "GateUp()"])
        parts += [f"self.before, self.glu = nn.LayerNorm({self.n_in}), {glu}"]
        parts += [f"self.after, self.scales = nn.LayerNorm({self.n_out}, eps=0.1), Scales({self.n_out})"]
        parts += [f"self.first, self.root = RootMeanSquare({self.n_in}), RootMeanSquare({self.n_out})"]
        parts += ["self.factor, self.dim, self.options = 0.25, -1, Options()"]
        parts += ["self.flag, self.calls, self.p, self.approximate, self.last = True, 0, 0.2, 'none', None"]
        parts += ["self.register_buffer('count', torch.zeros(()))", "self.mean = nn.Parameter(torch.zeros(()))"]
        self.draw.shuffle(parts)
        arguments = self.draw.choice(ARGUMENTS)
        instance = "self" if self.likely(0.9) else "this"
        body = "\n".join(statements).replace("self.", f"{instance}.")
        method = f"def forward({instance}, {arguments}):\n{textwrap.indent(body, '    ')}"
        way = self.draw.choices(["alone", "helper", "decorated", "no_grad", "inherited", "inner"], [16, 3, 4, 1, 2, 1])[
            0
        ]
        if way == "helper":
            method = method.replace("def forward", "def chunk", 1)
            method += "\n\ndef forward(self, *args, **kwargs):\n    return self.chunk(*args, **kwargs)"
        elif way == "decorated":
            decorators = self.draw.choices(["wrapped", "named", "handed"], k=self.draw.choice([1, 1, 2]))
            method = "".join(f"@{name}\n" for name in decorators) + method
        elif way == "no_grad":
            method = f"@torch.no_grad()\n{method}"
        elif way == "inner":
            self.is_clear = False
            method = "def forward(self, *args, **kwargs):\n" + textwrap.indent(
                f"{method.replace('def forward', 'def run', 1)}\n\nreturn run(self, *args, **kwargs)", "    "
            )
        base = "Base" if way == "inherited" else "Made"
        init = f"def __init__(self):\n    super().__init__()\n{textwrap.indent(chr(10).join(parts), '    ')}"
        written = f"class {base}(nn.Module):\n{textwrap.indent(init, '    ')}\n\n{textwrap.indent(method, '    ')}"
        if way == "inherited":
            written += "\n\n\nclass Made(Base):\n    def forward(self, *args, **kwargs):\n"
            written += "        return super().forward(*args, **kwargs)"
        # `act_here` is a global, or a closure variable of the class.
        here = self.draw.choice(["F.silu", "nn.functional.gelu", "tanh_gelu", "torch.tanh"])
        if self.likely(0.2):
            return (
                f"def around(act_here):\n{textwrap.indent(written, '    ')}\n    return Made\n\n\nMade = around({here})"
            )
        return f"act_here = {here}\n\n\n{written}"

    def sequence(self, sizes: dict[str, tuple[int, int]]) -> tuple[str, dict[str, tuple[int, int]]]:
        """Returns the source of an nn.Sequential of layers and activations."""
        parts, width, projections = [], self.n_in, {}
        for _ in range(self.draw.randint(2, 5)):
            if self.likely(0.2):
                parts.append(f"nn.LayerNorm({width})")
            out = self.draw.choice([self.hidden, self.n_out])
            projections[str(len(parts))] = (width, out)
            parts.append(f"nn.Linear({width}, {out})")
            width = out
            if self.likely(0.2) and width % 2 == 0:
                parts.append(self.draw.choice(["nn.GLU()", "UpGate()", "GateUp()", "Halves()", "Halves(dim=1)"]))
                width //= 2
            elif self.likely(0.8):
                parts.append(self.draw.choice([act for act in ACT_MODULES if act.startswith(("nn.", "Q", "W", "S"))]))
            if self.likely(0.3):
                parts.append(self.draw.choice(["nn.Dropout(0.4)", "nn.Identity()", "nn.Dropout(0.0)"]))
        listed = ", ".join(parts)
        kind = "(nn.Sequential)" if self.likely(0.3) else None
        if kind:
            return f"class Made{kind}:\n    def __init__(self):\n        super().__init__({listed})", projections
        return f"def Made():\n    return nn.Sequential({listed})", projections

    def adapter(self, projection: str) -> str:
        return self.suppressed(self.draw.choice(ADAPTERS), projection, projection)

    def suppressed(self, change: str, p: str, q: str) -> str:
        if p.isdigit():  # parts of a sequence have numbers for names
            change = change.replace("m.{p}", "m[{p}]").replace("m.{q}", "m[{q}]")
        return f"with contextlib.suppress(Exception): {change.replace('{p}', p).replace('{q}', q)}"

    def changes(self, projections: list[str], chance: float, adapted: Sequence[str] = (), first: Sequence[str] = ()):
        """Returns changes to parts of a module; ``adapted`` ones have adapters, possibly from the lines ``first``."""
        p, q = self.draw.choice(projections), self.draw.choice(projections)
        lines = list(first)
        while adapted and self.likely(0.35):
            lines.append(self.suppressed(self.draw.choice(ADAPTER_CHANGES), *self.draw.choices(adapted, k=2)))
        while self.likely(chance):
            change = self.draw.choice(PART_CHANGES if self.likely(0.6) else MODULE_CHANGES)
            if p.isdigit() and any(name in change for name in ("Made", "m.act", "m.drop", "m.flag")):
                continue
            # A wrapper around a fused method cannot know if the class was patched before or after.
            if "m.forward" in change + "".join(lines) and "Made.forward" in change + "".join(lines):
                continue
            lines.append(self.suppressed(change, p, q))
        return lambda name: f"def {name}(m):\n" + textwrap.indent("\n".join(lines or ["pass"]), "    ")

    def root(self, alone: bool, is_half: bool) -> str:
        """Returns the module's owner; ``is_half`` modules lack the last projection."""
        width = self.hidden if is_half else self.n_out
        holders = {
            "m": 12,
            "nn.Sequential(m)": 2,
            "nn.Sequential(m, nn.Identity())": 2,
            "nn.Sequential(m, m)": 1,
            "nn.Sequential(odd(), m)": 1,
            f"in_turn(nn.Sequential, m, {width})": 10 if is_half else 1,
            f"in_turn(Turns, m, {width})": 15 if is_half else 1,
            "Layer(m)": 9 if self.n_in == self.n_out else 0,
        }
        holder = "m" if alone else self.draw.choices(list(holders), list(holders.values()))[0]
        odd = self.draw.choice(["torch.jit.script(nn.ReLU())", "nn.Identity()"])
        layer = f"{self.layer()}\n\n\n" if holder == "Layer(m)" else ""
        return f"{layer}def odd():\n    return {odd}\n\n\ndef hold(m):\n    return {holder}"

    def layer(self) -> str:
        """Returns a class of layers: the module, and a sum around an MLP of its own."""
        mlp = self.draw.choice(["Perceptron", "Perceptron", "GatedPerceptron", "FeedForward"])
        init = ["super().__init__()", f"self.norm, self.drop, self.mlp = nn.LayerNorm({self.n_out}), nn.Dropout(), "]
        init[-1] += f"{mlp}({self.n_out})"
        if self.draw.random() < 0.5:
            init += [f"self.norm = nn.LayerNorm({self.n_out}, elementwise_affine=False)"]
        elif self.draw.random() < 0.3:
            init += [f"self.norm = Casting({self.n_out})"]
        shape = self.draw.choice(["{n}", "{n}", "1, {n}", "1", "2, {n}"]).format(n=self.n_out)
        cast = self.draw.choice(["", "", ".float()"])
        init += ["self.way, self.drops = 'a', False"]
        init += [f"self.scale, self.flag = nn.Parameter(torch.linspace(-1, 1, {self.n_out})), True"]
        init += [f"self.end = Ending({self.n_out}, {self.draw.choice(['nn.LayerNorm', 'RootMeanSquare'])})"]
        init += [self.draw.choice(END_CHANGES)]
        init += ["self.to(next((p.dtype for p in m.parameters()), None)).train(m.training)", "self.m = m"]
        table = f"torch.linspace(-1, 1, 3 * torch.Size(({shape},)).numel()).view(3, {shape})"
        init += [f"self.table = {table}.to(self.scale){cast}"]
        # Contiguous, since a block's op gives a contiguous result for any residual.
        start = [f"h = r = {self.draw.choice(['x', 'self.m(x)'])}.contiguous()", "s, t, g = self.table"]
        parts = [start, ["h = self.mlp(h)"], [self.draw.choice(SUMS)], ["return h"]]
        for part in parts[:-1]:
            part += self.draw.sample(AROUND, self.draw.choice([0, 0, 1, 1, 2]))
        methods = {
            "__init__(self, m)": init,
            "turn(self)": ["self.flag = not self.flag"],
            "forward(self, x)": "\n".join(itertools.chain(*parts)).replace("\\n", "\n").split("\n"),
        }
        written = [f"def {name}:\n" + textwrap.indent("\n".join(lines), "    ") for name, lines in methods.items()]
        return "class Layer(nn.Module):\n" + textwrap.indent("\n\n".join(written), "    ")
