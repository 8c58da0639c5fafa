"""Training ops bypass torch's dispatcher unless something has to observe them there."""

import importlib
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from safety import assert_close


@pytest.fixture
def module_of(fused_mlp):
    return lambda name: importlib.import_module(f"{fused_mlp.__name__}.{name}")


@pytest.fixture
def ops_that_raise(module_of):
    """Makes every op raise when it is called through the dispatcher."""
    shortcut = module_of("models.running.shortcut")

    def refuse(*_):
        raise NotImplementedError("an op was called")

    shortcut.plain.configure({**shortcut._settings, "ops": dict.fromkeys(shortcut._ops, refuse)})
    yield
    shortcut.plain.configure(shortcut._settings)


@pytest.fixture
def run(module_of, device):
    """Returns a function that runs forward and backward of a block and returns its result and gradients."""
    blocks, activations = module_of("autograd.blocks"), module_of("activations")
    code = activations.get_activation("gelu").code
    torch.manual_seed(0)
    sizes = (2, 3, 32), (48, 32), (32, 48), (48,), (32,), (32,), (32,)
    x, *parameters = (torch.randn(size, device=device) for size in sizes)

    def run(kind, x=x, in_leaves=False):
        leaves = [each.clone().requires_grad_() for each in (x, *parameters)]
        given, first, second, bias, second_bias, *norm = leaves
        residual = None if kind == "pre_normed" else given
        layers = given, first, None, second, bias, None, second_bias
        found = getattr(blocks, kind)(*layers, residual, *norm, (1e-5, 1, code, None, True, 0.0))
        result = found if kind == "pre_normed" else found[0]
        if in_leaves:
            result.square().sum().backward()
            return [result.detach(), *(leaf.grad for leaf in leaves)]
        return [result.detach(), *torch.autograd.grad(result.square().sum(), leaves)]

    return run


@pytest.mark.parametrize("kind", ["pre_normed", "post_normed"])
def test_past_the_dispatcher(run, kind, ops_that_raise, module_of):
    found = run(kind)
    shortcut = module_of("models.running.shortcut")
    shortcut.plain.configure({**shortcut._settings, "handles": None})
    assert all(map(torch.equal, found, run(kind)))


@pytest.mark.parametrize("kind", ["pre_normed", "post_normed"])
def test_a_backward_in_compiled_code(run, kind, module_of):
    """A backward runs a single Python function per node if all of its gradients are requested."""
    frames, folder = [], str(Path(module_of("autograd.blocks").__file__).parent)

    def called(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(folder):
            frames.append(frame.f_code.co_name)

    expected = run(kind)
    with torch.autograd.set_multithreading_enabled(False):
        sys.setprofile(called)
        try:
            found = run(kind, in_leaves=True)
        finally:
            sys.setprofile(None)
    assert [name for name in frames if name in ("both", "backward", "gradients", "asked")] == ["both"]
    assert all(map(torch.equal, found, expected))


def test_gradients_are_not_compared(device, module_of, monkeypatch):
    """A backward never compares tensors with None by ==, which takes longer than a small kernel."""

    def compared(*_):
        raise AssertionError("tensors were compared")

    q, k = (torch.randn(2, heads, 5, 16, device=device, requires_grad=True) for heads in (4, 2))
    cos, sin = (torch.randn(1, 5, 16, device=device) for _ in range(2))
    turned = module_of("autograd.attention").rotated(q, k, cos, sin)
    loss = sum(each.square().sum() for each in turned)
    monkeypatch.setattr(torch.Tensor, "__eq__", compared)
    loss.backward()
    assert q.grad is not None and k.grad is not None


@pytest.mark.parametrize("kind", ["pre_normed", "post_normed"])
def test_a_profiler_sees_the_ops(run, kind):
    expected = run(kind)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        found = run(kind)
    seen = {event.key.rpartition("::")[2] for event in profile.key_averages()}
    norm = "norm_forward" if kind == "pre_normed" else "sum_norm_forward"
    assert {norm, "norm_backward", "training_forward", "training_backward_"} <= seen
    assert all(map(torch.equal, found, expected))


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, kinds, arguments=(), named=None):
        self.names.add(function._schema.name.rpartition("::")[2])
        return function(*arguments, **(named or {}))


@pytest.mark.parametrize("kind", ["pre_normed", "post_normed"])
def test_a_dispatch_mode_sees_the_ops(run, kind):
    with Seen() as seen:
        found = run(kind)
    assert "graph_training_forward" in seen.names and "norm_backward" in seen.names
    assert seen.names & {"training_backward", "training_backward_"}
    for each, expected in zip(found, run(kind), strict=True):
        assert_close(each, expected)


def test_operands_that_are_not_plain(device, module_of):
    """Operands that are not plain go through the dispatcher, which computes or rejects them as usual."""
    norms = module_of("autograd.norms")
    weight = torch.ones(8, device=device)
    negated = torch._neg_view(torch.randn(2, 8, device=device))
    y, _ = norms._plain_forward(negated, weight, None, 1e-5, 1, False)
    assert_close(y, nn.functional.layer_norm(negated.resolve_neg(), (8,), weight, eps=1e-5))
    on_meta = [torch.ones(size, device="meta") for size in ((2, 8), (8,))]
    assert norms._plain_forward(*on_meta, None, 1e-5, 1, False)[0].is_meta
    for given in ((weight.to_sparse(), weight), ([1.0], weight)):
        with pytest.raises((RuntimeError, TypeError)):
            norms._plain_forward(*given, None, 1e-5, 1, False)
    with pytest.raises((RuntimeError, TypeError)):
        norms._plain_forward(weight)


def test_errors_are_those_of_the_op(device, module_of):
    norms, native = module_of("autograd.norms"), module_of("backends.native")
    x, weight = torch.ones(2, 8, device=device), torch.ones(9, device=device)
    words = []
    for op in (norms._plain_forward, native.norm_forward):
        with pytest.raises(RuntimeError, match="as it norms") as raised:
            op(x, weight, None, 1e-5, 1, False)
        words.append(str(raised.value).splitlines()[0])
    assert words[0] == words[1]


def test_results_are_not_leaked(device, module_of):
    norms, weight = module_of("autograd.norms"), torch.ones(8, device=device)
    y, statistics = norms._plain_forward(torch.randn(2, 8, device=device), weight, None, 1e-5, 1, False)
    for each in (y, statistics):
        assert each._use_count() == 1
        gone = weakref.ref(each)
    del y, statistics, each
    assert gone() is None
