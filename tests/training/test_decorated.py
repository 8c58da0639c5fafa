"""Methods inside the functions of decorators, such as gradient checkpointing of layers."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from safety import assert_close, x_of

ran = []


def told(function):
    """Reads the name of the function, and the method's arguments without naming one."""

    @functools.wraps(function)
    def around(*args, **kwargs):
        ran.append(f"{type(args[0]).__name__}.{function.__name__}")
        return function(*args, **kwargs)

    return around


def checkpointed(function):
    @functools.wraps(function)
    def around(self, *args, **kwargs):
        is_outermost = type(self).forward is around
        if is_outermost and self.training and torch.is_grad_enabled():
            return checkpoint(functools.partial(function, self, **kwargs), *args, use_reentrant=False)
        return function(self, *args, **kwargs)

    return around


def counted(function):
    """Does more with the function than calling it."""
    calls = {function: 0}

    @functools.wraps(function)
    def around(self, x):
        calls[function] += 1
        return function(self, x)

    return around


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(32), nn.Linear(32, 88), nn.Linear(88, 32)

    def forward(self, x):
        ran.append("layer")
        return x + self.fc2(F.gelu(self.fc1(self.norm(x))))


DECORATORS = {
    "no self": (told,),
    "checkpoint": (checkpointed,),
    "checkpoint, no self": (checkpointed, told),
    "two": (told, told),
    "a subclass": (checkpointed, checkpointed),
}


def layer_of(*decorators):
    kind = type("Decorated", (Layer,), {})
    for decorator in reversed(decorators):
        kind.forward = decorator(kind.forward)
    torch.manual_seed(0)
    return kind()


def pair(fused_mlp, device, decorators):
    layer = layer_of(*decorators).to(device)
    fused = copy.deepcopy(layer)
    report = fused_mlp.fuse_mlps(fused)
    assert [entry.pattern for entry in report.fused] == ["plain with residual and norm"]
    return layer, fused, report


def outcomes(layers, x, mode):
    found = []
    for layer in layers:
        x = x.detach().clone().requires_grad_()
        ran.clear()
        getattr(layer, mode)().zero_grad()
        result = layer(x)
        result.square().sum().backward()
        found.append(([result, x.grad, *(parameter.grad for parameter in layer.parameters())], list(ran)))
    return found


@pytest.mark.parametrize("mode", ("eval", "train"))
@pytest.mark.parametrize("name", DECORATORS)
def test_decorators_run_around_the_fused_method(fused_mlp, device, name, mode):
    layer, fused, report = pair(fused_mlp, device, DECORATORS[name])
    (expected, seen), (found, also_seen) = outcomes((layer, fused), x_of(device), mode)
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other)
    assert seen == also_seen
    report.restore()
    assert "forward" not in vars(fused)


@pytest.mark.parametrize("name", DECORATORS)
def test_one_op(fused_mlp, device, tell_ops, dispatched, name):
    layer, fused, _ = pair(fused_mlp, device, DECORATORS[name])
    called, x = [], x_of(device)
    tell_ops(lambda name, given: called.append(name))
    with torch.no_grad():
        fused(x)
        called.clear()
        assert_close(fused.eval()(x), layer.eval()(x))
    assert called == ["residual_mlp"]


def doubled(self, x):
    return 2 * x


def replace_inside(kind):
    kind.forward.__closure__[kind.forward.__code__.co_freevars.index("function")].cell_contents = doubled


CHANGES = {
    "a method of the class": lambda kind: setattr(kind, "forward", doubled),
    "the function inside": replace_inside,
    "its code": lambda kind: setattr(kind.forward.__wrapped__, "__code__", doubled.__code__),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(fused_mlp, device, monkeypatch, change):
    layer, fused, _ = pair(fused_mlp, device, (checkpointed,))
    x = x_of(device)
    monkeypatch.setattr(Layer.forward, "__code__", Layer.forward.__code__)  # restored after the test
    with torch.no_grad():
        CHANGES[change](type(fused))
        assert_close(fused.eval()(x), layer.eval()(x))
        assert_close(fused(x), 2 * x)


def test_a_decorator_that_keeps_the_function_is_left(fused_mlp, device):
    fused_layer = layer_of(counted).to(device)
    assert not fused_mlp.fuse_mlps(fused_layer).fused


def test_compiled(fused_mlp, device):
    layer, fused, _ = pair(fused_mlp, device, (checkpointed, checkpointed))
    torch._dynamo.reset()
    x = x_of(device)
    with torch.no_grad():
        assert_close(torch.compile(fused.eval(), backend="eager")(x), layer.eval()(x))


def test_compiled_by_its_decorator(fused_mlp, device):
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    layer, fused, _ = pair(fused_mlp, device, (functools.partial(torch.compile, backend=backend),))
    x = x_of(device)
    with torch.no_grad():
        assert_close(fused.eval()(x), Layer.forward(layer.eval(), x))
    assert any(f"{fused_mlp.__name__}" in str(node.target) for node in graphs[0].graph.nodes)
