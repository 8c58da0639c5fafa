"""Modules of experts with a cached choice of op see every change of what it depends on at the next call."""

import copy
import gc
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.integrations import moe

import machine
import mixtures


def built(device):
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32  # no GPU kernel takes float32 experts
    model = mixtures.build("mixtral", dtype, num_hidden_layers=1).to(device)
    model.set_experts_implementation("eager")
    return model


def given(device):
    generator = torch.Generator().manual_seed(3)
    index = torch.tensor([[0, 1], [2, 3], [4, 5], [1, 1], [5, 0]])
    x, weights = torch.randn(5, 32, generator=generator), torch.rand(5, 2, generator=generator)
    return x.to(device), index.to(device), weights.to(device)


def group(model):
    return next(iter(mixtures.groups(model).values()))


class Silu(nn.Module):
    def forward(self, x):
        return F.silu(x) * 3


def with_activation(module):
    module.act_fn = nn.GELU()


def with_approximate_gelu(module):
    module.act_fn = nn.GELU()
    calls(module)
    module.act_fn.approximate = "tanh"


def with_hook(module):
    module.act_fn.register_forward_hook(lambda module, given, out: out * 2)


def with_own_forward(module):
    module.act_fn.forward = lambda x: x * 2


def with_another_class(module):
    module.act_fn.__class__ = Silu


def with_own_gate(module):
    module._apply_gate = lambda gate_up: gate_up.chunk(2, dim=-1)[0]
    module.config._experts_implementation = "grouped_mm"


def with_weights(module):
    module.down_proj = nn.Parameter(module.down_proj.detach() * 2)


def with_data(module):
    module.gate_up_proj.data = module.gate_up_proj.data * 2


def with_a_tensor_in_front(module):
    vars(module)["down_proj"] = module._parameters["down_proj"].detach() * 2


def with_doubles(module):
    module.double()


def with_fewer_experts(module):
    module.num_experts = 4
    for name in ("gate_up_proj", "down_proj"):
        setattr(module, name, nn.Parameter(getattr(module, name).detach()[:4]))


def with_implementation(module):
    moe.ALL_EXPERTS_FUNCTIONS["of_a_test"] = lambda self, x, index, weights: x * 2
    module.config._experts_implementation = "of_a_test"


def with_another_function(module):
    module.config._experts_implementation = "grouped_mm"
    calls(module)
    moe.ALL_EXPERTS_FUNCTIONS["grouped_mm"] = lambda self, x, index, weights: x * 3


CHANGES = [value for name, value in list(globals().items()) if name.startswith("with_")]


def assert_near(got, expected):
    bound = {"rtol": 2e-2, "atol": 2e-2} if got.dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(got, expected, **bound)


def calls(module):
    """Returns the module's result, which must be the same before and after its op is cached."""
    weight = module._parameters["gate_up_proj"]
    x, index, weights = given(weight.device)
    with torch.no_grad():
        first, *others = (module(x.to(weight.dtype), index % module.num_experts, weights) for _ in range(3))
    assert all(torch.equal(first, other) for other in others)
    return first


@pytest.fixture
def functions():
    yield
    moe.ALL_EXPERTS_FUNCTIONS._local_mapping.clear()


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changes(fused_mlp, device, functions, change):
    model = built(device)
    fused = copy.deepcopy(model)
    fused_mlp.fuse_mlps(fused)
    assert_near(calls(group(fused)), calls(group(model)))
    change(group(fused))
    got = calls(group(fused))
    moe.ALL_EXPERTS_FUNCTIONS._local_mapping.clear()
    change(group(model))
    assert_near(got, calls(group(model)))


def test_patches(fused_mlp, device, monkeypatch):
    """Cached experts follow patches of their class, of their activation's class and of torch's functions."""
    model = built(device)
    fused_mlp.fuse_mlps(model)
    module = group(model)
    x = given(device)[0].to(module.down_proj.dtype)
    kind, expected = type(group(built(device))), calls(module)
    for owner, name, patched, result in (
        (kind, "forward", lambda self, x, index, weights: x * 7, x * 7),
        (F, "silu", lambda x, inplace=False: x * 0, x * 0),
        (type(module.act_fn), "forward", lambda self, x: x * 0, x * 0),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, patched)
            assert torch.equal(calls(module), result)
        torch.testing.assert_close(calls(module), expected)


def test_training_behind_inference(fused_mlp, device):
    model, gradients = built(device), []
    fused = copy.deepcopy(model)
    fused_mlp.fuse_mlps(fused)
    for module in (group(model), group(fused)):
        calls(module)
        x, *others = given(device)
        x = x.to(module.down_proj.dtype).requires_grad_()
        module(x, *others).sum().backward()
        gradients.append((x.grad, module.down_proj.grad))
    for mine, expected in zip(*reversed(gradients), strict=True):
        assert_near(mine, expected)


@pytest.mark.skipif(machine.device_type() != "cpu", reason="a GPU's experts may train")
def test_what_trains_on_a_cpu_is_asked_nothing(fused_mlp, device, monkeypatch):
    model = built(device)
    fused = copy.deepcopy(model)
    fused_mlp.fuse_mlps(fused)
    for name in ("cached", "switching"):
        monkeypatch.setattr(sys.modules[f"{fused_mlp.__name__}.models.experts.mixtures"], name, None)
    x, *others = given(device)
    x = x.to(group(model).down_proj.dtype)
    assert torch.equal(group(fused)(x, *others), group(model)(x, *others))


@pytest.mark.parametrize("kernelized", [False, True])
def test_it_is_decided_once(fused_mlp, device, monkeypatch, kernelized):
    """A second call reuses the cached choice, and the cache does not keep the module alive.

    kernelize binds the forward of its class to an activation that it has no kernel for.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU: others have no kernels of experts")
    model = built(device)
    fused_mlp.fuse_mlps(model)
    if kernelized:
        act = group(model).act_fn
        act.forward = act.forward
        del act
    names = ("cached", "proofs")
    cached, experts = (sys.modules[f"{fused_mlp.__name__}.models.experts.{name}"] for name in names)
    gc.collect()  # garbage from other tests
    before = len(cached._known)
    expected = calls(group(model))
    assert len(cached._known) == before + 1
    monkeypatch.setattr(experts, "of", None)
    assert torch.equal(calls(group(model)), expected)
    del model
    gc.collect()
    assert len(cached._known) == before
