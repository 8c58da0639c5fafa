"""Which activations fuse_mlps knows by their source, and which MLPs it reports that it cannot fuse."""

import copy
import importlib
import math
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from modules import Gated, Plain


def gelu_by_erf(x):
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


def gelu_by_tanh(x):
    """As GPT-2's authors wrote it."""
    inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
    return 0.5 * x * (1.0 + torch.tanh(inner))


def slanted(x):
    return F.silu(x) + 0.01 * x


def module_of(forward):
    return type("Written", (nn.Module,), {"forward": forward, "__module__": __name__})


def _silu(self, x):
    return F.silu(x)


def _swish(self, x):
    return x * torch.sigmoid(x)


def _swish_by_method(self, hidden):
    gate = hidden.sigmoid()
    return hidden.mul(gate)


def _swish_by_exp(self, x):
    return x / (1 + torch.exp(-x))


def _float32_silu(self, x):
    return F.silu(x.float()).to(x.dtype)


def _float32_silu_type_as(self, x):
    return F.silu(x.to(torch.float32)).type_as(x)


def _quick(self, x):
    return x * torch.sigmoid(1.702 * x)


def _squared(self, x):
    return F.relu(x) ** 2


def _tanh_gelu(self, x):
    return F.gelu(x, approximate="tanh")


def _gelu_fewer_digits(self, x):
    return 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x * x * x)))


KNOWN = [
    *(_silu, _swish, _swish_by_method, _swish_by_exp, _float32_silu, _float32_silu_type_as, _quick, _squared),
    *(_tanh_gelu, _gelu_fewer_digits),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [Gated, Plain])
@pytest.mark.parametrize("forward", KNOWN)
def test_classes_that_write_an_activation_out(fused_mlp, device, forward, kind, dtype):
    """Errors against float64 are at most eager's, but for chance in the last digit."""
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
    module = Gated(module_of(_swish)).to(device)
    x = torch.randn(8, 32, device=device)
    expected = module(x)
    fused_mlp.fuse_mlps(module)
    torch._dynamo.reset()
    torch.testing.assert_close(
        torch.compile(module, backend="eager", fullgraph=True)(x), expected, rtol=1e-4, atol=1e-5
    )


# Elementwise, but no row of the table.


def _near_silu(self, x):
    return x * torch.sigmoid(1.01 * x)


def _half_precision(self, x):
    return F.silu(x.half()).to(x.dtype)


def _widens(self, x):
    return F.silu(x.float())


def _softplus(self, x):
    return x * torch.tanh(F.softplus(x))


class StarReLU(nn.Module):
    """The activation of MetaFormer: its scale and its bias are learnt."""

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
    *(module_of(forward) for forward in (_near_silu, _half_precision, _widens, _softplus)),
    *(StarReLU, EfficientSwish, Slope, nn.PReLU, nn.Tanh, nn.Mish, lambda: F.mish, lambda: slanted),
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
    kind = module_of(_swish)
    module = Gated(kind).to(device)
    assert fused_mlp.fuse_mlps(module).fused
    kind.forward = _near_silu
    x = torch.randn(8, 32, device=device)
    torch.testing.assert_close(module(x), Gated.forward(module, x))
    assert fused_mlp.explain(module).implementation != "fused"


def test_a_class_with_a_call_of_its_own(fused_mlp, device):
    kind = type("Called", (module_of(_swish),), {"__call__": lambda self, x: 2 * self.forward(x)})
    module = Gated(kind).to(device)
    x = torch.randn(8, 32, device=device)
    expected = module(x)
    fused_mlp.fuse_mlps(module)
    torch.testing.assert_close(module(x), expected)


# The parts of an MLP, in what is none.


class Bottleneck(Plain):
    """A projection behind a scale, without an activation."""

    def forward(self, x):
        return self.fc2(self.fc1(x)) + self.activation_fn(x)


class Conditioned(nn.Module):
    """As adaptive layer norms have it: the activation comes first."""

    def __init__(self):
        super().__init__()
        self.silu, self.linear, self.norm = nn.SiLU(), nn.Linear(32, 64), nn.LayerNorm(32)

    def forward(self, x):
        scale, shift = self.linear(self.silu(x)).chunk(2, dim=-1)
        return self.norm(x) * (1 + scale) + shift


class ConvNet(nn.Module):
    """A classifier behind convolutions, whose activation is theirs."""

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
    "bottleneck": Bottleneck,
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


class OnlyIf(Plain):
    """As diffusers' TimestepEmbedding has it."""

    def forward(self, x):
        sample = self.fc1(x)
        for _ in range(2):
            sample = self.activation_fn(sample)
        return self.fc2(sample)


class Added(Plain):
    def forward(self, x):
        hidden = self.fc1(x)
        hidden = hidden.transpose(0, 1) + 1
        return self.fc2(self.activation_fn(hidden).transpose(0, 1))


class Inherited(Added):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize("kind", [OnlyIf, Added, Inherited])
def test_mlps_in_other_forms_are_reported(fused_mlp, device, kind):
    report = fused_mlp.fuse_mlps(kind().to(device))
    assert [[reason.code for reason in left.reasons] for left in report.modules] == [["unknown form"]]


class WrittenOut(nn.Module):
    def forward(self, x):
        return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


@pytest.mark.parametrize("act", [WrittenOut(), gelu_by_erf], ids=["module", "function"])
def test_what_is_read_runs_fused_at_each_call(fused_mlp, device, tell_ops, dispatched, monkeypatch, act):
    """As long as all that was read of it is as it was."""
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
    """As a layer that hands on an argument which nobody gave."""

    def __init__(self):
        super().__init__()
        self.part = nn.Dropout()

    def forward(self, x, other=None):
        return self.part(other)


def test_a_call_of_no_tensor_is_no_activation(fused_mlp):
    recognition = importlib.import_module(f"{fused_mlp.__name__}.models.parts.recognition")
    assert recognition.recognise(OfNothing()) is None
