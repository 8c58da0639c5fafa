"""The activations that fuse_mlps recognises by their source, and the MLPs that it reports as not fusible."""

import copy
import importlib
import math
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import written
from modules import Gated, Plain


def gelu_by_erf(x):
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


def gelu_by_tanh(x):
    """GELU as written by GPT-2's authors."""
    inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
    return 0.5 * x * (1.0 + torch.tanh(inner))


def slanted(x):
    return F.silu(x) + 0.01 * x


def module_of(body):
    return written.with_forward(nn.Module, body)


SWISH, NEAR_SILU = "return x * torch.sigmoid(x)", "return x * torch.sigmoid(1.01 * x)"
KNOWN = {
    "silu": "return F.silu(x)",
    "swish": SWISH,
    "swish by method": "gate = x.sigmoid()\nreturn x.mul(gate)",
    "float32 silu": "return F.silu(x.float()).to(x.dtype)",
    "float32 silu by type_as": "return F.silu(x.to(torch.float32)).type_as(x)",
    "quick": "return x * torch.sigmoid(1.702 * x)",
    "squared": "return F.relu(x) ** 2",
    "tanh gelu": 'return F.gelu(x, approximate="tanh")',
    "gelu of fewer digits": "return 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x * x * x)))",
}
# Elementwise functions that are not in the table.
OTHERS = (
    NEAR_SILU,
    "return F.silu(x.half()).to(x.dtype)",
    "return F.silu(x.float())",
    "return x * torch.tanh(F.softplus(x))",
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [Gated, Plain])
@pytest.mark.parametrize("forward", KNOWN.values(), ids=KNOWN)
def test_classes_that_write_an_activation_out(fused_mlp, device, forward, kind, dtype):
    """An activation that a class writes out is as accurate as eager against float64, up to chance in the last digit."""
    module = kind(module_of(forward)).to(device, dtype)
    x = torch.randn(64, 32, device=device, dtype=dtype)
    expected = module(x)
    exact = module.double()(x.double())
    module.to(dtype)
    (entry,) = fused_mlp.fuse_mlps(module).modules
    has_kernel = device.type == "cuda" or dtype != torch.float16
    assert entry.extent == ("full" if has_kernel else "none") and (has_kernel or "float16" in entry.reason)
    error = ((module(x).double() - exact).norm() / exact.norm()).item()
    assert error <= 1.1 * ((expected.double() - exact).norm() / exact.norm()).item() + torch.finfo(dtype).eps / 8


@pytest.mark.parametrize("function", [gelu_by_erf, gelu_by_tanh])
def test_functions_that_write_an_activation_out(fused_mlp, device, function):
    module = Gated(lambda: function).to(device)
    x = torch.randn(8, 32, device=device)
    expected = module(x)
    assert [entry.extent for entry in fused_mlp.fuse_mlps(module).modules] == ["full"]
    torch.testing.assert_close(module(x), expected, rtol=1e-4, atol=1e-5)


def test_a_written_out_activation_compiles(fused_mlp, device):
    module = Gated(module_of(SWISH)).to(device)
    x = torch.randn(8, 32, device=device)
    expected = module(x)
    fused_mlp.fuse_mlps(module)
    torch._dynamo.reset()
    torch.testing.assert_close(
        torch.compile(module, backend="eager", fullgraph=True)(x), expected, rtol=1e-4, atol=1e-5
    )


class StarReLU(nn.Module):
    """MetaFormer's activation, with a learnt scale and bias."""

    def __init__(self):
        super().__init__()
        self.relu = nn.ReLU()
        self.scale = nn.Parameter(torch.ones(1))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return self.scale * self.relu(x) ** 2 + self.bias


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        context.save_for_backward(x)
        return x * torch.sigmoid(x)


class EfficientSwish(nn.Module):
    def forward(self, x):
        return Swish.apply(x)


class Slope(nn.Module):
    def __init__(self):
        super().__init__()
        self.slope = 1.0

    def forward(self, x):
        return x * torch.sigmoid(self.slope * x)


UNKNOWN = [
    *map(module_of, OTHERS),
    *(StarReLU, EfficientSwish, Slope, nn.PReLU, nn.LeakyReLU, nn.Tanh, nn.Mish, lambda: F.mish, lambda: slanted),
]


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("make", UNKNOWN)
def test_other_activations_are_left_and_reported(fused_mlp, device, make, sequence):
    act = make()
    if sequence and not isinstance(act, nn.Module):
        return
    module = nn.Sequential(nn.Linear(32, 48), act, nn.Linear(48, 32)) if sequence else Plain(lambda: act)
    before = set(vars(module))
    report = fused_mlp.fuse_mlps(module.to(device))
    ((reason,),) = (left.reasons for left in report.modules)
    name = type(act).__name__ if isinstance(act, nn.Module) else act.__name__
    assert (report.fused, reason.code, reason.part) == ([], "unknown activation", name)
    assert set(vars(module)) == before


def test_a_class_that_changes_later_is_called(fused_mlp, device):
    kind = module_of(SWISH)
    module = Gated(kind).to(device)
    assert fused_mlp.fuse_mlps(module).fused
    kind.forward = module_of(NEAR_SILU).forward
    x = torch.randn(8, 32, device=device)
    torch.testing.assert_close(module(x), Gated.forward(module, x))
    assert fused_mlp.explain(module).implementation != "fused"


def test_a_class_with_a_call_of_its_own(fused_mlp, device):
    kind = type("Called", (module_of(SWISH),), {"__call__": lambda self, x: 2 * self.forward(x)})
    module = Gated(kind).to(device)
    x = torch.randn(8, 32, device=device)
    expected = module(x)
    fused_mlp.fuse_mlps(module)
    torch.testing.assert_close(module(x), expected)


# Parts of an MLP in modules that are not one.


class Conditioned(nn.Module):
    """Applies the activation before the projection, as in adaptive layer norms."""

    def __init__(self):
        super().__init__()
        self.silu, self.linear, self.norm = nn.SiLU(), nn.Linear(32, 64), nn.LayerNorm(32)

    def forward(self, x):
        scale, shift = self.linear(self.silu(x)).chunk(2, dim=-1)
        return self.norm(x) * (1 + scale) + shift


class ConvNet(nn.Module):
    """A classifier after convolutions, which own the activation."""

    def __init__(self):
        super().__init__()
        self.conv, self.act, self.fc = nn.Conv1d(1, 4, 3), nn.ReLU(), nn.Linear(4, 10)

    def forward(self, x):
        return self.fc(self.act(self.conv(x.unsqueeze(-2))).mean(-1))


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.scale * x


NO_MLPS = {
    # A projection behind a scale, without an activation.
    "bottleneck": written.with_forward(Plain, "return self.fc2(self.fc1(x)) + self.activation_fn(x)"),
    "conditioned": Conditioned,
    "convolutions": ConvNet,
    "scaled": lambda: Plain(Scaled),
    "softmax": lambda: Plain(lambda: nn.Softmax(dim=-1)),
    "norm": lambda: nn.Sequential(nn.Linear(32, 8), nn.LayerNorm(8), nn.Linear(8, 32)),
}


@pytest.mark.parametrize("make", NO_MLPS.values(), ids=NO_MLPS)
def test_what_is_no_mlp_is_not_reported(fused_mlp, device, make):
    assert fused_mlp.fuse_mlps(make().to(device)).modules == []


# MLPs in forms that are not fused.


OTHER_FORMS = (
    """\
sample = self.fc1(x)
for _ in range(2):
    sample = self.activation_fn(sample)
return self.fc2(sample)""",
    """\
hidden = self.fc1(x)
hidden = hidden.transpose(0, 1) + 1
return self.fc2(self.activation_fn(hidden).transpose(0, 1))""",
)
Added = written.with_forward(Plain, OTHER_FORMS[1])


class Inherited(Added):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize("kind", [written.with_forward(Plain, OTHER_FORMS[0]), Added, Inherited])
def test_mlps_in_other_forms_are_reported(fused_mlp, device, kind):
    report = fused_mlp.fuse_mlps(kind().to(device))
    assert [[reason.code for reason in left.reasons] for left in report.modules] == [["unknown form"]]


@pytest.mark.parametrize(
    "act",
    [module_of("return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))")(), gelu_by_erf],
    ids=["module", "function"],
)
def test_what_is_read_runs_fused_at_each_call(fused_mlp, device, tell_ops, dispatched, monkeypatch, act):
    """An activation recognised by its source is fused at each call while everything read from it is unchanged."""
    module, calls = Plain(lambda: act).to(device).eval(), []
    fused, x = copy.deepcopy(module), torch.randn(4, 32, device=device)
    assert fused_mlp.fuse_mlps(fused).fused[0].extent == "full"
    tell_ops(lambda name, given: calls.append(name))
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(fused(x), module(x))
        assert calls == 3 * ["mlp"]
        with monkeypatch.context() as patch:
            patch.setattr(torch, "erf", torch.tanh)
            torch.testing.assert_close(fused(x), module(x))
        with monkeypatch.context() as patch:
            patch.setitem(globals(), "math", types.SimpleNamespace(sqrt=lambda value: value))
            torch.testing.assert_close(fused(x), module(x))
        assert len(calls) == 3


class OfNothing(nn.Module):
    """Passes on an argument that nobody gave."""

    def __init__(self):
        super().__init__()
        self.part = nn.Dropout()

    def forward(self, x, other=None):
        return self.part(other)


def test_a_call_of_no_tensor_is_no_activation(fused_mlp):
    recognition = importlib.import_module(f"{fused_mlp.__name__}.models.parts.recognition")
    assert recognition.recognise(OfNothing()) is None
