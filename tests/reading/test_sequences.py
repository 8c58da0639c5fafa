"""Modules run one after the other: one that computes hidden values and a linear layer after it form an MLP."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from modules import UpGate
from safety import alike, assert_close, warmed, x_of

_has_own_kernel = False


def has_own_kernel():
    return _has_own_kernel


class GatedHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj, self.act = nn.Linear(32, 176), nn.SiLU()

    def forward(self, x):
        x = self.proj(x)
        x, gate = x.chunk(2, dim=-1)
        return x * self.act(gate)


class ConditionalHead(nn.Module):
    """Calls another package's function between the projection and the product, as diffusers' GEGLU does."""

    def __init__(self):
        super().__init__()
        self.proj, self.asked = nn.Linear(32, 176), 0

    def forward(self, x, *args, **kwargs):
        if len(args) > 0 or kwargs.get("scale") is not None:
            raise TypeError("scale")
        self.asked = self.asked + 1
        x = self.proj(x)
        if has_own_kernel():
            return F.relu(x[..., :88])
        else:
            x, gate = x.chunk(2, dim=-1)
            return x * F.gelu(gate)


class PlainHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(32, 88)

    def forward(self, x):
        return F.gelu(self.proj(x))


class Changing(nn.Module):
    """Computes hidden values and changes them under a condition, so it is no head."""

    def __init__(self):
        super().__init__()
        self.proj, self.doubled = nn.Linear(32, 88), True

    def forward(self, x):
        x = F.relu(self.proj(x))
        if self.doubled:
            return 2 * x
        return x


def parts(head):
    return [head(), nn.Dropout(0.5), nn.Linear(88, 32), nn.Dropout(0.5)]


class Loop(nn.Module):
    """Runs its parts in a loop, as diffusers' FeedForward does."""

    def __init__(self, head):
        super().__init__()
        self.net = nn.ModuleList(parts(head))

    def forward(self, x):
        for module in self.net:
            x = module(x)
        return x


class Chain(nn.Module):
    def __init__(self, head):
        super().__init__()
        self.net = nn.Sequential(*parts(head))

    def forward(self, x):
        return self.net(x)


class LoopAndMore(Loop):
    def forward(self, x):
        for module in self.net:
            x = module(x)
        return x, module


HEADS = (GatedHead, ConditionalHead, PlainHead)
heads = pytest.mark.parametrize("head", HEADS)
owners = pytest.mark.parametrize("owner", (Loop, Chain))


@pytest.fixture
def ops(tell_ops, dispatched):
    called = []
    tell_ops(lambda name, given: called.append(name))
    return called


def pair(fused_mlp, device, owner, head):
    torch.manual_seed(0)
    return warmed(fused_mlp, owner(head).to(device).eval(), x_of(device), pattern="in two modules")


@heads
@owners
def test_one_op(fused_mlp, device, ops, owner, head):
    module, fused = pair(fused_mlp, device, owner, head)
    x = x_of(device)
    ops.clear()
    with torch.no_grad():
        assert_close(fused(x), module(x))
    assert ops == ["mlp" if head is PlainHead else "gated_mlp"]


@heads
@owners
@pytest.mark.parametrize("mode", ("eval", "train"))
def test_gradients(fused_mlp, device, owner, head, mode):
    module, fused = pair(fused_mlp, device, owner, head)
    results, given = [], x_of(device)
    for each in (module, fused):
        getattr(each, mode)()
        x = given.clone().requires_grad_()
        torch.manual_seed(1)
        result = each(x)
        result.square().sum().backward()
        results.append([result, x.grad, *(parameter.grad for parameter in each.parameters())])
    for one, other in zip(*results):
        assert_close(other, one)


def hook(part):
    return lambda net, _: net[part].register_forward_hook(lambda module, args, output: 2 * output)


def raise_the_flag(net, monkeypatch):
    monkeypatch.setitem(globals(), "_has_own_kernel", True)


def replace_the_flag(net, monkeypatch):
    monkeypatch.setitem(globals(), "has_own_kernel", lambda: True)


CHANGES = {
    "a hook of the head": hook(0),
    "a hook of the dropout": hook(1),
    "a hook of the projection": hook(2),
    "the dropout in training": lambda net, _: net[1].train(),
    "the last dropout in training": lambda net, _: net[3].train(),
    "another head": lambda net, _: net.__setitem__(0, nn.Linear(32, 88).to(net[2].weight)),
    "another projection": lambda net, _: net.__setitem__(2, nn.Linear(88, 32, bias=False).to(net[2].weight)),
    "another weight": lambda net, _: setattr(net[2], "weight", nn.Parameter(torch.ones_like(net[2].weight))),
    "a projection less": lambda net, _: net.__delitem__(2),
    "another part": lambda net, _: net.append(nn.ReLU()),
    "nothing": lambda net, _: [net.__delitem__(0) for _ in range(4)],
    "a forward of the head": lambda net, _: setattr(net[0], "forward", lambda x: x.new_ones(*x.shape[:-1], 88)),
    "a flag": raise_the_flag,
    "another question": replace_the_flag,
}


@owners
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(fused_mlp, device, monkeypatch, owner, change):
    module, fused = pair(fused_mlp, device, owner, ConditionalHead)
    for each in (module, fused):
        torch.manual_seed(3)
        each.net[0].asked = 0
        CHANGES[change](each.net, monkeypatch)
    x = x_of(device)
    with torch.no_grad():
        assert_close(*alike(lambda each: each(x), fused, module))
    assert [vars(part).get("asked") for part in fused.net] == [vars(part).get("asked") for part in module.net]


@pytest.mark.parametrize("modules", (list, tuple, lambda net: (each for each in net)))
def test_what_is_no_list_of_modules_runs_as_written(fused_mlp, device, modules):
    module, fused = pair(fused_mlp, device, Loop, GatedHead)
    for each in (module, fused):
        net = each.net
        del each.net
        each.net = modules([*net])
    x = x_of(device)
    with torch.no_grad():
        assert_close(fused(x), module(x))


def test_what_the_function_reads_of_its_loop_stays(fused_mlp, device):
    torch.manual_seed(0)
    module = LoopAndMore(GatedHead).to(device).eval()
    fused = copy.deepcopy(module)
    report = fused_mlp.fuse_mlps(fused)
    assert [entry.pattern for entry in report.fused] == ["packed gated linear, up first"]
    x = x_of(device)
    with torch.no_grad():
        (result, last), (expected, _) = fused(x), module(x)
    assert_close(result, expected)
    assert last is fused.net[3]


@owners
def test_hidden_values_that_are_changed_are_computed(fused_mlp, device, owner):
    torch.manual_seed(0)
    module = owner(Changing).to(device).eval()
    fused = copy.deepcopy(module)
    report = fused_mlp.fuse_mlps(fused)
    assert {entry.pattern for entry in report.fused} == {"linear"}
    x = x_of(device)
    for doubled in (True, False):
        module.net[0].doubled = fused.net[0].doubled = doubled
        with torch.no_grad():
            assert_close(fused(x), module(x))


@heads
@owners
def test_compiled(fused_mlp, device, owner, head):
    module, fused = pair(fused_mlp, device, owner, head)
    x = x_of(device)
    torch._dynamo.reset()
    with torch.no_grad():
        assert_close(torch.compile(fused, backend="eager")(x), module(x))


class Up(nn.Module):
    def forward(self, x):
        gate, up = x.chunk(2, dim=-1)
        return up * F.silu(gate)


class Even(nn.Module):
    def forward(self, x):
        if x.shape[-1] % 2 != 0:
            raise ValueError("odd")
        x, gate = x.chunk(2, dim=-1)
        return x * F.relu(gate)


class OfTokens(nn.Module):
    def forward(self, x):
        gate, up = x.chunk(2, dim=1)
        return (up * F.silu(gate)).repeat(1, 2, 1)


def halves(product, width=88):
    return lambda: nn.Sequential(nn.Linear(32, 176), product(), nn.Dropout(0.5), nn.Linear(width, 32))


CHANGES_OF_HALVES = {
    "a hook": lambda net, _: net[1].register_forward_hook(lambda module, args, output: 2 * output),
    "a forward": lambda net, _: setattr(net[1], "forward", lambda x: x[..., :88]),
    "a method": lambda net, patch: patch.setattr(UpGate, "forward", lambda self, x: x[..., :88]),
    "a function": lambda net, patch: patch.setattr(F, "gelu", F.silu),
    "another module": lambda net, _: net.__setitem__(1, Up()),
    "the dropout in training": lambda net, _: net[2].train(),
}


@pytest.mark.parametrize("product", (UpGate, Up, Even))
def test_a_product_of_halves_is_an_activation(fused_mlp, device, ops, product):
    torch.manual_seed(0)
    pattern = "packed gated" if product is Up else "packed gated, up first"
    module, fused = warmed(fused_mlp, halves(product)().to(device).eval(), x_of(device), pattern=pattern)
    ops.clear()
    x = x_of(device)
    with torch.no_grad():
        assert_close(fused(x), module(x))
    assert ops == ["gated_mlp"]


@pytest.mark.parametrize("change", CHANGES_OF_HALVES)
def test_a_change_of_halves_is_seen(fused_mlp, device, monkeypatch, change):
    torch.manual_seed(0)
    module, fused = warmed(
        fused_mlp, halves(UpGate)().to(device).eval(), x_of(device), pattern="packed gated, up first"
    )
    for each in (module, fused):
        CHANGES_OF_HALVES[change](each, monkeypatch)
    x = x_of(device)
    with torch.no_grad():
        assert_close(*alike(lambda each: each(x), fused, module))


def test_an_odd_number_of_features_has_no_halves(fused_mlp, device):
    fused = nn.Sequential(nn.Linear(32, 35), Even(), nn.Linear(17, 32)).to(device)
    fused_mlp.fuse_mlps(fused)
    with pytest.raises(ValueError, match="odd"):
        fused(x_of(device))


def test_halves_of_other_dimensions_are_left(fused_mlp, device):
    assert not fused_mlp.fuse_mlps(halves(OfTokens, 176)().to(device)).fused
