"""Ways to write layers of one input: which layers run as one call, and that every form computes the right result."""

import copy
import gc
import importlib
import weakref

import pytest
import torch
from torch import nn

from written import with_forward


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.w = (nn.Linear(8, 8) for _ in range(4))
        self.norm, self.drop, self.flag = nn.LayerNorm(8), nn.Dropout(0.0), True


# Forwards of x and y, and the number of layers in each group that runs as one call.
FORMS = {
    "adjacent": (
        "q = self.q(x).view(-1, 4, 2).transpose(0, 1)\nk = self.k(x).view(-1, 4, 2).transpose(0, 1)\n"
        "v = self.v(x).view(-1, 4, 2).transpose(0, 1)\nreturn q * k + v",
        [3],
    ),
    "in a tuple": ("q, k, v = self.q(x), self.k(x), self.v(x)\nreturn q * k + v", [3]),
    "four": ("return self.q(x) * self.k(x) + self.v(x) * self.w(x)", [3]),
    "two": ("q = self.norm(self.q(x))\nk = self.norm(self.k(y))\nv = self.v(y)\nreturn q * k + v", [2]),
    "bound anew": ("q = self.q(x)\nx = x + 1\nk = self.k(x)\nx, v = self.v(x), x\nreturn q * k + v * x", [2]),
    "once": ("return self.q(x) * self.q(x)", []),
    "nested": ("return self.q(self.k(x)) * self.v(self.drop(x))", []),
    "under a condition": (
        "q = self.q(x)\nk = self.k(x) if self.flag else y\nif self.flag:\n    v, w = self.v(x), self.w(x)\n"
        "else:\n    v, w = x, y\nreturn q * k + v * w",
        [2],
    ),
    "in a loop": ("for _ in range(2):\n    q, k = self.q(x), self.k(x)\n    x = q * k\nreturn x + self.v(y)", [2, 2]),
    "in a lambda": ("q = self.q(x)\nlater = lambda: self.k(x)\nx = x * 2\nreturn q * later() + self.v(x)", []),
    "replaced": ("q = self.q(x)\nself.k = self.v\nreturn q * self.k(x) * self.v(x)", [2]),
    "of others": (
        "other = self if other is None else other\nreturn self.q(x) * other.k(x) + self.v(x, *())",
        [],
    ),
}
IN_PLACE = """\
x = x * 1
q = self.q(x)
x.add_(1)
k = self.k(x)
x += 1
v = self.v(x)
x[0] = 0
return q * k + v + self.w(x)"""


def written(body):
    return with_forward(Layers, body, "x, y, other=None")


@pytest.fixture(autouse=True)
def any_size(fused_mlp, monkeypatch):
    """Projections run as one op on every device and at any size."""
    monkeypatch.setattr(importlib.import_module(f"{fused_mlp.__name__}.dispatch"), "LEAST_PROJECTED", 0)


@pytest.fixture
def counted(fused_mlp, monkeypatch):
    nodes, found = importlib.import_module(f"{fused_mlp.__name__}.autograd.attention"), []
    project = nodes.projected

    def projected(is_followed, operands):
        found.append(sum(weight is not None for weight in operands[1:4]))
        return project(is_followed, operands)

    monkeypatch.setattr(nodes, "projected", projected)
    return found


@pytest.mark.parametrize("form", FORMS)
def test_forms(fused_mlp, device, counted, form):
    torch.manual_seed(0)
    plain = written(FORMS[form][0])().to(device)
    fused = copy.deepcopy(plain)
    fused_mlp.fuse_mlps(fused)
    x, y = torch.randn(2, 5, 8, device=device)
    found = []
    for model in (fused, plain):
        leaves = [x.clone().requires_grad_(), y.clone().requires_grad_()]
        result = model(*leaves)
        result.square().sum().backward()
        named = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
        found.append(({"result": result.detach(), "x": leaves[0].grad, "y": leaves[1].grad}, named))
    assert counted == FORMS[form][1]
    for got, right in zip(*found, strict=True):
        assert got.keys() == right.keys()
        for name, expected in right.items():
            assert (got[name] is None) == (expected is None), name
            if expected is not None:
                torch.testing.assert_close(got[name], expected, rtol=1e-4, atol=1e-5)


def test_an_input_that_is_changed_in_place(fused_mlp, device, counted):
    plain = written(IN_PLACE)().to(device)
    fused = copy.deepcopy(plain)
    fused_mlp.fuse_mlps(fused)
    given = torch.randn(2, 5, 8, device=device)
    with torch.no_grad():
        torch.testing.assert_close(fused(*given), plain(*given))
    assert counted == []


def test_nothing_is_kept_of_a_result(fused_mlp, device):
    """Each result of a joint call is freed as soon as the code drops its last reference."""
    seen = []

    class Drops(Layers):
        def forward(self, x, y):
            q = self.q(x)
            k = self.k(x)
            seen.append(weakref.ref(q))
            q = k * 2
            gc.collect()
            seen.append(seen[0]())
            return q

    model = Drops().to(device)
    fused_mlp.fuse_mlps(model)
    with torch.no_grad():
        model(*torch.randn(2, 5, 8, device=device))
    assert len(seen) == 2 and seen[1] is None
