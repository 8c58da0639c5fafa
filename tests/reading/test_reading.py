"""The reader of source leaves experts, gates and activations that do not compute what they seem to, and a proof's
premises are checked at every call."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fuzz_experts
import written
from safety import assert_close

EXPERTS, WIDTH, HIDDEN, TOKENS = 4, 16, 12, 96


class Config:
    def __init__(self, factor=1.0):
        self.factor = factor


class Loop(nn.Module):
    """Commonly written experts; each subclass changes one thing."""

    def __init__(self, factor=1.0):
        super().__init__()
        self.config, self.capacity, self.limit = Config(factor), 3, 20.0
        self.counts = torch.zeros(EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * HIDDEN, WIDTH) * 0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) * 0.5)

    def forward(self, x, index, weights):
        out = torch.zeros_like(x)
        for expert in range(EXPERTS):
            position, token = torch.where(self.chosen(index, weights, expert).T)
            token, position = self.taken(token, position)
            gate, up = F.linear(x[token], self.up[expert]).chunk(2, dim=-1)
            hidden = F.linear(self.product(gate, up), self.down[expert])
            out.index_add_(0, token, hidden * weights[token, position, None] * self.config.factor)
        return out

    def chosen(self, index, weights, expert):
        return index == expert

    def taken(self, token, position):
        return token, position

    def product(self, gate, up):
        return F.silu(gate) * up


class Bounded(Loop):
    def product(self, gate, up):
        return F.silu(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)


def method(name, arguments, body):
    """Returns a subclass of Loop with one method replaced."""
    kind = written.with_forward(Loop, body, arguments)
    return type("Written", (Loop,), {name: kind.forward, "__module__": __name__})


def loop(of="x", experts="range(EXPERTS)", chosen="index == expert", start="", each="", end="", add="{}", out="out"):
    """Returns a class with Loop's forward with one thing changed."""
    body = f"""\
out = torch.zeros_like(x)
{start}
for expert in {experts}:
    {each}
    position, token = torch.where(({chosen}).T)
    gate, up = F.linear({of}[token], self.up[expert]).chunk(2, dim=-1)
    hidden = F.linear(F.silu(gate) * up, self.down[expert])
    {end}
    out.index_add_(0, token, {add.format("hidden * weights[token, position, None]")})
return {out}"""
    return written.with_forward(Loop, body, "x, index, weights")


LEAVING_OUT = """\
expert = expert[0]
    if expert == 2:
        continue
    if expert == EXPERTS:
        continue"""
OTHERS = {
    "capacity": method("taken", "token, position", "return token[: self.capacity], position[: self.capacity]"),
    "a threshold": method("chosen", "index, weights, expert", "return (index == expert) & (weights > 0.1)"),
    "a literal": method("product", "gate, up", "return F.silu(gate.clamp(max=20.0)) * up"),
    "early": loop(start="if x.shape[0] > 64:\n    return x"),
    "early of another's": method(
        "forward",
        "x, index, weights",
        "if x.shape[0] > 64:\n    return x\nreturn Loop.forward(self, x, index, weights)",
    ),
    "counting": loop(start="self.counts.index_add_(0, index.flatten(), torch.ones(index.numel()))"),
    "carried": loop("last", start="last = x", end="last = x * 2"),
    "detached": method("product", "gate, up", "with torch.no_grad():\n    hidden = F.silu(gate)\nreturn hidden * up"),
    "seen": loop(start="same = out.view(-1)", out="out + same.view_as(out)"),
    "fewer": loop(experts="range(EXPERTS - 1)"),
    # Skips one expert besides the number that belongs to no expert.
    "leaving out": loop(
        start="mask = F.one_hot(index, num_classes=EXPERTS + 1).permute(2, 1, 0)",
        experts="torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()",
        each=LEAVING_OUT,
        chosen="mask[expert].T",
    ),
    "rounded": loop(add="({}).bfloat16().to(out.dtype)"),
}


class Property(Loop):
    asked = 0

    @property
    def factor(self):
        Property.asked += 1
        return 1.0

    def product(self, gate, up):
        return F.silu(gate) * up * self.factor


class Asking(Loop):
    asked = 0

    def __getattr__(self, name):
        Asking.asked += name == "up"
        return super().__getattr__(name)


def routed(tokens=TOKENS):
    x = torch.randn(tokens, WIDTH) * 4
    weights, index = torch.rand(tokens, EXPERTS).topk(2, dim=-1)
    return x, index, weights * 0.3


def outputs(module, fused, given):
    with torch.no_grad():
        return fused(*given), module(*given)


def is_fused(fused_mlp, module):
    return bool(fused_mlp.fuse_mlps(module).fused)


OTHERS |= {"a property": Property, "asking": Asking}


@pytest.mark.parametrize("kind", OTHERS.values(), ids=OTHERS)
def test_experts_that_compute_something_else(fused_mlp, kind):
    """Experts that compute something else are left, and none of their code runs during fusing."""
    module = kind()
    asked, counts, given = getattr(kind, "asked", 0), module.counts.clone(), routed()
    fused = copy.deepcopy(module)
    before = getattr(kind, "asked", 0)
    assert not is_fused(fused_mlp, fused)
    assert torch.equal(fused.counts, counts)
    if kind is Property:
        assert kind.asked == before == asked
    assert torch.equal(*outputs(module, fused, given))


SAME = loop(), method("taken", "token, position", "return token, position")


@pytest.mark.parametrize("kind", [Loop, Bounded, *SAME])
def test_experts_that_are_proved(fused_mlp, kind):
    """Experts equivalent to the loop are proved and fused."""
    module = kind()
    fused = copy.deepcopy(module)
    assert is_fused(fused_mlp, fused)
    assert_close(*([value] for value in outputs(module, fused, routed())), tolerance=1e-5)


def with_factor(module, patch):
    module.config.factor = 2.5


def with_limit(module, patch):
    module.limit = 0.5


def with_global(module, patch):
    patch.setitem(Loop.forward.__globals__, "EXPERTS", 2)


def with_method(module, patch):
    patch.setattr(Loop, "product", lambda self, gate, up: gate * up)


def with_code(module, patch):
    patch.setattr(Loop.taken, "__code__", (lambda self, token, position: (token[:2], position[:2])).__code__)


def with_function(module, patch):
    original = torch.where
    patch.setattr(torch, "where", lambda mask: tuple(part[:2] for part in original(mask)))


def with_own_method(module, patch):
    module.taken = lambda token, position: (token[:2], position[:2])


CHANGES = [value for name, value in list(globals().items()) if name.startswith("with_")]


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_later(fused_mlp, monkeypatch, change):
    """A later change takes effect at the next call, even after the choice was cached."""
    module = Bounded()
    fused, given = copy.deepcopy(module), routed()
    if change is with_method:
        module, fused = Loop(), Loop()
        fused.load_state_dict(module.state_dict())
    assert is_fused(fused_mlp, fused)
    for _ in range(2):
        got, first = outputs(module, fused, given)
        assert_close([got], [first], tolerance=1e-5)
    for each in (module, fused):
        change(each, monkeypatch)
    got, expected = outputs(module, fused, given)
    assert not torch.allclose(expected, first, rtol=1e-2, atol=1e-2)
    assert_close([got], [expected], tolerance=1e-5)


def test_two_configurations_of_a_class(fused_mlp):
    """A second model of the same class with another configuration gets a proof of its own."""
    assert is_fused(fused_mlp, Loop(1.0))
    assert not is_fused(fused_mlp, Loop(2.5))
    assert is_fused(fused_mlp, Loop(1.0))


@pytest.mark.parametrize("wrong", [-1, EXPERTS, 9])
def test_indices_of_no_expert(fused_mlp, wrong):
    """Indices of no expert are skipped or raise as unfused."""
    import mixtures

    model = mixtures.build("mixtral", num_hidden_layers=1)
    fused = copy.deepcopy(model)
    (module,), (other,) = (list(mixtures.groups(each).values()) for each in (model, fused))
    fused_mlp.fuse_mlps(fused)
    x, weights = torch.randn(3, 32), torch.rand(3, 2)
    index = torch.tensor([[0, 1], [2, 3 if wrong == EXPERTS else 5], [4, wrong if wrong != EXPERTS else 6]])
    for way in ("eager", "batched_mm"):
        for each in (model, fused):
            each.set_experts_implementation(way)
        for _ in range(2):
            assert outcome(module, x, index, weights) == outcome(other, x, index, weights)


def outcome(module, *given):
    try:
        with torch.no_grad():
            return module(*given).mul(1e3).round().tolist()
    except (IndexError, RuntimeError) as error:
        return type(error)


SQUARE = 2


def powered(x):
    return F.relu(x) ** SQUARE


def by_erf(x):
    return x * 0.5 * (1.0 + torch.erf(x / 2**0.5))


@pytest.mark.parametrize("function", [powered, by_erf])
def test_activations_whose_names_change_later(fused_mlp, device, monkeypatch, function):
    from modules import Plain

    module, x = Plain(lambda: function).to(device), torch.randn(8, 32, device=device)
    fused = copy.deepcopy(module)
    assert [entry.extent for entry in fused_mlp.fuse_mlps(fused).modules] == ["full"]
    assert_close([fused(x)], [module(x)], tolerance=1e-5)
    monkeypatch.setitem(powered.__globals__, "SQUARE", 3)
    monkeypatch.setattr(torch, "erf", torch.sigmoid)
    assert_close([fused(x)], [module(x)], tolerance=1e-5)


def test_experts_written_at_random(fused_mlp, tmp_path):
    """Random experts are fused or left; fused ones compute the same as before, also after a change."""
    outcomes = [fuzz_experts.outcome(fused_mlp, seed, tmp_path) for seed in range(120)]
    assert 12 <= outcomes.count("fused") <= 80
