"""Forms of code around layers of one input: which of them are called at once, and that all compute what they say."""

import copy
import gc
import importlib
import weakref

import pytest
import torch
from torch import nn


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.w = (nn.Linear(8, 8) for _ in range(4))
        self.norm, self.drop, self.flag = nn.LayerNorm(8), nn.Dropout(0.0), True


class Adjacent(Layers):
    def forward(self, x, y):
        q = self.q(x).view(-1, 4, 2).transpose(0, 1)
        k = self.k(x).view(-1, 4, 2).transpose(0, 1)
        v = self.v(x).view(-1, 4, 2).transpose(0, 1)
        return q * k + v


class InATuple(Layers):
    def forward(self, x, y):
        q, k, v = self.q(x), self.k(x), self.v(x)
        return q * k + v


class Four(Layers):
    def forward(self, x, y):
        return self.q(x) * self.k(x) + self.v(x) * self.w(x)


class Two(Layers):
    def forward(self, x, y):
        q = self.norm(self.q(x))
        k = self.norm(self.k(y))
        v = self.v(y)
        return q * k + v


class BoundAnew(Layers):
    def forward(self, x, y):
        q = self.q(x)
        x = x + 1
        k = self.k(x)
        x, v = self.v(x), x
        return q * k + v * x


class ChangedInPlace(Layers):
    def forward(self, x, y):
        x = x * 1
        q = self.q(x)
        x.add_(1)
        k = self.k(x)
        x += 1
        v = self.v(x)
        x[0] = 0
        return q * k + v + self.w(x)


class Once(Layers):
    def forward(self, x, y):
        return self.q(x) * self.q(x)


class Nested(Layers):
    def forward(self, x, y):
        return self.q(self.k(x)) * self.v(self.drop(x))


class UnderACondition(Layers):
    def forward(self, x, y):
        q = self.q(x)
        k = self.k(x) if self.flag else y
        if self.flag:
            v, w = self.v(x), self.w(x)
        else:
            v, w = x, y
        return q * k + v * w


class InALoop(Layers):
    def forward(self, x, y):
        for _ in range(2):
            q, k = self.q(x), self.k(x)
            x = q * k
        return x + self.v(y)


class InALambda(Layers):
    def forward(self, x, y):
        q = self.q(x)
        later = lambda: self.k(x)  # noqa: E731
        x = x * 2
        return q * later() + self.v(x)


class Replaced(Layers):
    def forward(self, x, y):
        q = self.q(x)
        self.k = self.v
        return q * self.k(x) * self.v(x)


class OfOthers(Layers):
    def forward(self, x, y, other=None):
        other = self if other is None else other
        return self.q(x) * other.k(x) + self.v(x, *())


# The number of groups that are called at once, and of layers in each.
FORMS = {
    Adjacent: [3],
    InATuple: [3],
    Four: [3],
    Two: [2],
    BoundAnew: [2],
    Once: [],
    Nested: [],
    UnderACondition: [2],
    InALoop: [2, 2],
    InALambda: [],
    Replaced: [2],
    OfOthers: [],
}


@pytest.fixture(autouse=True)
def any_size(fused_mlp, monkeypatch):
    """Projections are taken on every device, of any size."""
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


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_forms(fused_mlp, device, counted, form):
    torch.manual_seed(0)
    plain = form().to(device)
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
    assert counted == FORMS[form]
    for got, right in zip(*found, strict=True):
        assert got.keys() == right.keys()
        for name, expected in right.items():
            assert (got[name] is None) == (expected is None), name
            if expected is not None:
                torch.testing.assert_close(got[name], expected, rtol=1e-4, atol=1e-5)


def test_an_input_that_is_changed_in_place(fused_mlp, device, counted):
    plain = ChangedInPlace().to(device)
    fused = copy.deepcopy(plain)
    fused_mlp.fuse_mlps(fused)
    given = torch.randn(2, 5, 8, device=device)
    with torch.no_grad():
        torch.testing.assert_close(fused(*given), plain(*given))
    assert counted == []


def test_nothing_is_kept_of_a_result(fused_mlp, device):
    """The results of one call are freed where the code lets go of each."""
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
