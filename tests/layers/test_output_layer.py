"""A module with a projection and the norm of its sum with a residual runs as one call, through `fuse_mlps` and through
the layer `Output` with kernels.kernelize."""

import copy

import pytest
import torch
import torch.nn.functional as F
from kernels.layer.layer import _validate_layer
from torch import nn

import reference
from modules import Halves, Output
from safety import alike, fuse, pair


def operands(device, dtype=torch.float32, shape=(2, 5), sizes=(88, 32)):
    return [torch.randn(*shape, size, device=device, dtype=dtype) for size in sizes]


def spread(module):
    """Returns the module with random weights and biases in its norm."""
    with torch.no_grad():
        module.LayerNorm.weight.uniform_(0.5, 1.5), module.LayerNorm.bias.normal_()
    return module


@pytest.fixture(params=["fuse_mlps", "kernelize"])
def fused_pair(fused_mlp, device, request):
    """Returns a function that makes a module in eval mode and its fused copy."""

    def make(module=None, dtype=torch.float32):
        return pair(fused_mlp, request.param, spread(module or Output()).to(device, dtype).eval())

    return make


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", [(88, 32), (17, 7), (256, 64)], ids=str)
@pytest.mark.parametrize("shape", [(1,), (2, 5), (3, 40), (300,)], ids=str)
def test_one_call_with_an_error_no_larger_than_eager_s(device, fused_pair, called_ops, dtype, sizes, shape):
    module, fused = fused_pair(Output(sizes), dtype)
    if dtype == torch.float16 and device.type == "cpu":
        pytest.skip("GPUs have float16 kernels")
    given = operands(device, dtype, shape, sizes)
    exact = copy.deepcopy(module).double()(*(operand.double() for operand in given))
    with torch.no_grad():
        got, expected = fused(*given), module(*given)
    assert called_ops == ["residual_mlp"]
    reference.assert_no_worse_than_eager(got, expected, exact, roundings=8)


@pytest.mark.parametrize("training", [False, True])
def test_gradients(device, fused_pair, training):
    outcomes = []
    for module in fused_pair():
        module.train(training)
        torch.manual_seed(0)
        leaves = [operand.requires_grad_() for operand in operands(device)]
        result = module(*leaves)
        result.square().sum().backward()
        outcomes.append([result.detach(), *(leaf.grad for leaf in (*leaves, *module.parameters()))])
    torch.testing.assert_close(*outcomes, rtol=1e-4, atol=1e-4)


def test_compiled(device, fused_pair):
    torch.compiler.reset()
    module, fused = fused_pair()
    given = operands(device)
    with torch.no_grad():
        got = torch.compile(fused, fullgraph=True, backend="aot_eager")(*given)
        torch.testing.assert_close(got, module(*given))


class Doubled(nn.Dropout):
    def forward(self, input):
        return 2 * input


def hooked(name):
    def change(module, monkeypatch):
        getattr(module, name).register_forward_hook(lambda *given: 2 * given[-1])

    return change


# Changes to a module between calls.
CHANGES = {
    **{f"a hook of {name}": hooked(name) for name in ("dense", "dropout", "LayerNorm")},
    "another dropout": lambda module, monkeypatch: setattr(module, "dropout", Doubled()),
    "a weight": lambda module, monkeypatch: module.dense.weight.data.mul_(2),
    "no bias": lambda module, monkeypatch: setattr(module.dense, "bias", None),
    "a norm without weights": lambda module, monkeypatch: setattr(
        module, "LayerNorm", nn.LayerNorm(32, elementwise_affine=False)
    ),
    "another eps": lambda module, monkeypatch: setattr(module.LayerNorm, "eps", 0.5),
    "another norm": lambda module, monkeypatch: setattr(module, "LayerNorm", nn.Softmax(-1)),
    "a norm of two dimensions": lambda module, monkeypatch: setattr(
        module, "LayerNorm", nn.LayerNorm((5, 32)).to(module.dense.weight)
    ),
    "a function of torch": lambda module, monkeypatch: monkeypatch.setattr(
        F, "layer_norm", lambda x, *given, **named: 3 * x
    ),
    "a forward of a norm": lambda module, monkeypatch: monkeypatch.setattr(
        nn.LayerNorm, "forward", lambda self, x: 3 * x
    ),
    "an attribute of the instance": lambda module, monkeypatch: vars(module).update(
        dense=lambda hidden: hidden[..., :32]
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_seen(device, fused_pair, monkeypatch, change):
    module, fused = fused_pair()
    given = operands(device)
    with torch.no_grad():
        before = fused(*given), fused(*given)
        for either in (module, fused):
            CHANGES[change](either, monkeypatch)
        got = fused(*given), fused(*given)
        expected = module(*given)
    assert not torch.allclose(before[1], expected, atol=1e-3)
    for each in got:
        torch.testing.assert_close(each, expected)


def test_dropout_that_is_active(device, fused_pair):
    module, fused = (either.train() for either in fused_pair())
    given = operands(device)
    with torch.no_grad():
        torch.testing.assert_close(*alike(lambda either: either(*given), module, fused))


ODD_OPERANDS = {
    "a residual that is broadcast": lambda hidden, residual: (hidden, residual[:1, :1]),
    "hidden values that are broadcast": lambda hidden, residual: (hidden[0], residual),
    "no rows": lambda hidden, residual: (hidden[:0], residual[:0]),
    "columns": lambda hidden, residual: (hidden.mT.contiguous().mT, residual.mT.contiguous().mT),
    "a wider residual": lambda hidden, residual: (hidden, residual.double()),
}


@pytest.mark.parametrize("odd", ODD_OPERANDS)
def test_operands_that_a_kernel_does_not_take(device, fused_pair, odd):
    module, fused = fused_pair()
    given = ODD_OPERANDS[odd](*operands(device))
    if odd == "a wider residual":
        module.LayerNorm.double(), fused.LayerNorm.double()
    with torch.no_grad():
        expected = module(*given)
        for _ in range(2):
            torch.testing.assert_close(fused(*given), expected, rtol=1e-5, atol=1e-5)


def test_what_explain_says(fused_mlp, device, fused_pair):
    _, fused = fused_pair()
    explanation = fused_mlp.explain(fused)
    assert (explanation.implementation, explanation.reason) == ("fused", "GEMM, sum and norm")
    assert explanation.parts[0].pattern == "linear with residual and norm"
    fused.train()
    active = fused_mlp.explain(fused)
    if device.type == "cuda":  # an op draws the mask in training there
        assert (active.implementation, active.reason) == (explanation.implementation, explanation.reason)
    else:
        assert (active.implementation, active.reason) == ("original", "calls dropout (active in training)")
    fused.eval().LayerNorm = nn.Softmax(-1)
    assert fused_mlp.explain(fused).reason == "calls LayerNorm (a Softmax)"


def test_the_hub_s_rules(fused_mlp):
    _validate_layer(check_cls=Output, cls=fused_mlp.layers.Output, repo=None)


def test_fuse_mlps_leaves_it_alone(fused_mlp, device):
    """fuse_mlps keeps the layer that kernelize gave a module."""
    module = spread(Output()).to(device).eval()
    fused = fuse(fused_mlp, "fuse_mlps", fuse(fused_mlp, "kernelize", copy.deepcopy(module)))
    assert fused.forward.__func__ is fused_mlp.layers.Output.forward
    given = operands(device)
    with torch.no_grad():
        torch.testing.assert_close(fused(*given), module(*given))


def test_restored(fused_mlp, device):
    """The report lists the module beside MLPs, and restores its own method."""
    module = spread(Output()).to(device).eval()
    report = fused_mlp.fuse_mlps(module)
    assert [(entry.pattern, entry.extent) for entry in report.fused] == [("linear with residual and norm", "full")]
    assert str(report).splitlines()[0].endswith("; 1 x linear with residual and norm")
    assert fused_mlp.fuse_mlps(module).fused == report.fused
    report.restore()
    assert type(module) is Output
    assert fused_mlp.explain(module).implementation == "original"


class Scaled(Output):
    """Scales the residual."""

    def forward(self, hidden_states, input_tensor):
        return self.LayerNorm(self.dropout(self.dense(hidden_states)) + 0.5 * input_tensor)


class Shifted(Output):
    """Changes the residual before the sum."""

    def forward(self, hidden_states, input_tensor):
        input_tensor = input_tensor + 1
        return self.LayerNorm(self.dropout(self.dense(hidden_states)) + input_tensor)


class Summed(Output):
    """Has no norm."""

    def forward(self, hidden_states, input_tensor):
        return self.dropout(self.dense(hidden_states)) + input_tensor


@pytest.mark.parametrize("kind", [Scaled, Shifted, Summed], ids=lambda kind: kind.__name__)
def test_other_modules_are_left(fused_mlp, device, kind):
    module = kind().to(device).eval()
    fused_mlp.fuse_mlps(module)
    assert type(module) is kind


def test_a_tail_that_was_fused_alone(fused_mlp, device, called_ops):
    """A tail that was fused alone still becomes the second half of the MLP around it."""
    module = Halves().to(device).eval()
    expected = copy.deepcopy(module)
    fused_mlp.fuse_mlps(module.output)
    report = fused_mlp.fuse_mlps(module)
    assert report.fused[0].pattern == "plain in two modules with residual and norm"
    x = torch.randn(2, 5, 32, device=device)
    with torch.no_grad():
        module(x)
        called_ops.clear()
        torch.testing.assert_close(module(x), expected(x), rtol=1e-4, atol=1e-5)
    assert called_ops == ["residual_mlp"]
