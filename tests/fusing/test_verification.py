"""The comparison before fuse_mlps fuses a module; it leaves everything in the model untouched."""

import contextlib
import io
import random

import numpy
import pytest
import torch
from torch import nn

import look_alikes
from modules import PROJECTIONS, Gated


class NoSuchActivation(nn.SiLU):
    """A class that poses as SiLU by its name, which the table of activations goes by."""

    def forward(self, input):
        return 1.1 * super().forward(input)


NoSuchActivation.__module__, NoSuchActivation.__qualname__ = nn.SiLU.__module__, nn.SiLU.__qualname__
NoSuchActivation.forward.__module__ = nn.SiLU.__module__


def test_verification(fused_mlp, device):
    """The comparison finds an activation that does not compute what the table says; verify=False skips it."""
    report = fused_mlp.fuse_mlps(Gated(NoSuchActivation).to(device))
    assert "gives a different result" in report.left[0].reason
    assert fused_mlp.fuse_mlps(Gated(NoSuchActivation).to(device), verify=False).fused


YET_TO_COME = {
    "zero": torch.zeros_like,
    "infinite": lambda weight: torch.full_like(weight, torch.inf),  # as in memory that is still to be loaded
    "not numbers": lambda weight: torch.full_like(weight, torch.nan),
    "elsewhere": lambda weight: weight.new_empty(0),  # as in sharded models, which gather weights on use
}


@pytest.mark.parametrize("weights", YET_TO_COME)
@pytest.mark.parametrize("kind", [*PROJECTIONS, look_alikes.Swapped])
def test_weights_that_are_yet_to_come(fused_mlp, device, kind, weights):
    """A real MLP is recognised whatever its weights hold, and uses the weights that it gets later."""
    module, plain = kind().to(device), kind().to(device)
    made = [YET_TO_COME[weights](parameter.data) for parameter in module.parameters()]
    for parameter, data in zip(module.parameters(), made, strict=True):
        parameter.data = data
    assert fused_mlp.fuse_mlps(module).fused or kind is look_alikes.Swapped
    now = [parameter.nan_to_num() for parameter in module.parameters()]
    assert all(torch.equal(*pair) for pair in zip(now, map(torch.nan_to_num, made), strict=True))
    for parameter, full in zip(module.parameters(), plain.parameters(), strict=True):
        parameter.data = full.data
    x = torch.randn(2, 32, device=device)
    torch.testing.assert_close(module(x), plain(x))


def random_states(device):
    states = [torch.get_rng_state(), torch.tensor(random.getstate()[1]), torch.tensor(numpy.random.get_state()[1])]
    return states + ([torch.cuda.get_rng_state()] if device.type == "cuda" else [])


class Eventful(Gated):
    """A module that leaves every kind of trace whenever it is run."""

    runs = 0
    copies = 0

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(32)
        self.dropout = nn.Dropout(0.5)
        self.ema = nn.Parameter(torch.ones(32))
        self.register_buffer("total", torch.zeros(()))
        self.seen = []

    def forward(self, x):
        Eventful.runs += 1
        print("running")
        self.seen.append(x.shape)
        self.total += x.abs().sum()
        with torch.no_grad():
            self.ema.lerp_(x.mean(0), 0.5)
        x = self.dropout(self.norm(x))
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) + torch.rand(32) + random.random()

    def __deepcopy__(self, memo):
        Eventful.copies += 1
        raise AssertionError("copied")


@pytest.mark.parametrize("training", [False, True])
def test_nothing_of_the_model_is_run_or_changed(fused_mlp, device, training):
    module = Eventful().to(device).train(training)
    module.dropout.eval()  # unlike the module's own mode
    state = {name: value.clone() for name, value in module.state_dict().items()}
    versions = [value._version for value in module.state_dict().values()]
    before, modes = random_states(device), [part.training for part in module.modules()]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert fused_mlp.fuse_mlps(module).fused
    assert (printed.getvalue(), Eventful.runs, Eventful.copies, module.seen) == ("", 0, 0, [])
    torch.testing.assert_close(module.state_dict(), state, rtol=0, atol=0)
    assert [value._version for value in module.state_dict().values()] == versions
    assert [part.training for part in module.modules()] == modes
    assert all(map(torch.equal, random_states(device), before))
    assert all(parameter.grad is None for parameter in module.parameters())


def test_large_buffers_are_not_copied(fused_mlp):
    """The comparison allocates a few rows at a time, however large the module's buffers are."""
    module = Gated(sizes=(256, 1024, 256))
    module.register_buffer("table", torch.zeros(1 << 22))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        assert fused_mlp.fuse_mlps(module).modules
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert largest < module.gate_proj.weight.nbytes


def test_under_autocast(fused_mlp, device):
    """The comparison does not mistake 16-bit rounding under autocast for a difference."""
    with torch.autocast(device.type, torch.bfloat16):
        assert fused_mlp.fuse_mlps(Gated(bias=True, sizes=(512, 768, 512)).to(device)).fused


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(32, 88), nn.Linear(88, 32)
        self.act, self.spoilt = nn.SiLU(), NoSuchActivation()

    def forward(self, x):
        return self.spoilt(self.second(torch.sin(self.act(self.first(x)))))


def test_each_call_of_a_method_is_compared(fused_mlp, device):
    report = fused_mlp.fuse_mlps(Two().to(device))
    assert [entry.reasons[0].code for entry in report.left] == ["disagrees"]
    assert len(fused_mlp.fuse_mlps(Two().to(device), verify=False).fused) == 1


def test_nothing_is_compared_where_a_mode_would_see_it(fused_mlp, device):
    seen = []

    class Recorder(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(getattr(function, "__name__", ""))
            return function(*args, **(kwargs or {}))

    with Recorder():
        fused_mlp.fuse_mlps(Gated().to(device))
    assert not {"linear", "silu", "mul"}.intersection(seen)


def test_verify_is_a_bool(fused_mlp):
    for wrong in ("recompute", 1, None, torch.ones(2)):
        with pytest.raises(TypeError, match=f"verify must be True or False, got {type(wrong).__name__}"):
            fused_mlp.fuse_mlps(Gated(), verify=wrong)
