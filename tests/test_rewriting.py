"""Methods made anew: they compute what their originals compute, or they are left."""

import copy
import inspect
import itertools
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import look_alikes
from modules import Decoder, Plain

# Look-alikes: the structure of an MLP, another function.


def behaviour(module, x):
    """What a module does with an input, in evaluation and in training: results, gradients, state, the input itself."""
    seen = []
    for training in (False, True):
        module.train(training).zero_grad()
        given = x.clone().requires_grad_()
        torch.manual_seed(0)
        result = module(given + 0)
        results = [part for part in (result if isinstance(result, tuple) else (result,)) if part is not None]
        if results[0].requires_grad:
            sum(part.square().sum() for part in results).backward()
        gradients = [parameter.grad for parameter in module.parameters()]
        seen += [*results, given.grad, *gradients, *module.buffers(), torch.tensor(getattr(module, "calls", 0))]
        with torch.no_grad():
            inputs = x.clone()
            torch.manual_seed(0)
            result = module(inputs)
            seen += [inputs, *(result if isinstance(result, tuple) else (result,))]
    return [part.detach().clone() if isinstance(part, torch.Tensor) else part for part in seen]


def assert_alike(got, expected, **tolerance):
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        assert type(one) is type(other)
        if isinstance(one, torch.Tensor):
            torch.testing.assert_close(one, other, **tolerance)


@pytest.mark.parametrize("verify", [True, False], ids=["verified", "unverified"])
@pytest.mark.parametrize("kind", look_alikes.ALL)
def test_look_alikes(fused_mlp, device, kind, verify):
    """Nothing but what the code says is fused, with or without a comparison; and what it computes stays the same."""
    module = kind(bias=True).to(device)
    x = torch.randn(4, 32, device=device)
    plain = copy.deepcopy(module)
    report = fused_mlp.fuse_mlps(module, verify=verify)
    assert_alike(behaviour(module, x), behaviour(plain, x), rtol=1e-3, atol=1e-4)
    assert len(report.modules) == (0 if kind in look_alikes.NO_MLPS else 1)
    if kind.fused is None:
        assert report.fused == [] and all(left.reason for left in report.left)
        assert "forward" not in vars(module)
        assert fused_mlp.explain(module).implementation == "original"
    else:
        assert [fused.pattern for fused in report.fused] == [kind.fused]
        report.restore()
        assert_alike(behaviour(module, x), behaviour(plain, x), rtol=0, atol=0)


@pytest.mark.parametrize("kind", look_alikes.ALL)
def test_look_alikes_compile(fused_mlp, device, kind):
    """As PyTorch compiles them, with the results of the original."""
    torch.compiler.reset()
    module = kind(bias=True).to(device).eval()
    x = torch.randn(4, 32, device=device)
    with torch.no_grad():
        torch.manual_seed(0)
        expected = copy.deepcopy(module)(x)
        fused_mlp.fuse_mlps(module)
        compiled = torch.compile(module, backend="eager")
        torch.manual_seed(0)
        torch.testing.assert_close(compiled(x), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("sparsities", [(0.5, 0.0), (0.0, 0.5)], ids=str)
def test_what_an_attribute_decides(fused_mlp, device, sparsities):
    """Two instances of one class that compute different things, and each of them after a change."""
    model = nn.Sequential(*(look_alikes.Configurable(sparsity) for sparsity in sparsities)).to(device)
    plain = copy.deepcopy(model)
    fused_mlp.fuse_mlps(model)
    x = torch.randn(3, 32, device=device)
    for _ in range(2):
        torch.testing.assert_close(model(x), plain(x))
        for module in (*model, *plain):
            module.activation_sparsity = 0.5 - module.activation_sparsity


class Detector(nn.Module):
    """A head whose layers are in a loop, as those of DETR."""

    def __init__(self, widths=(32, 40, 48, 4)):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in itertools.pairwise(widths))

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = F.relu(layer(x)) if i < len(self.layers) - 1 else layer(x)
        return x


class Chunked(Plain):
    """Its MLP is in a method that another function calls."""

    def ff_chunk(self, x):
        return self.fc2(self.activation_fn(self.fc1(x)))

    def forward(self, x):
        return torch.cat([self.ff_chunk(part) for part in x.split(1)])


class Inherited(Plain):
    """Its code reads names around it, and a string over several lines."""

    def forward(self, x):
        """A string
        of two lines."""
        return self.fc2(self.activation_fn(self.fc1(super().forward(Plain.forward(self, x)))))


def outer_function(self, x):
    return self.fc2(self.activation_fn(self.fc1(x)))


class Borrowed(Plain):
    """Its method was written elsewhere, under another name."""

    chunk = outer_function

    def forward(self, x):
        return self.chunk(x)


def sequence(*parts):
    return lambda: nn.Sequential(*(part() for part in parts))


def first(*sizes):
    return lambda: nn.Linear(*sizes)


FORMS = {
    "inline": (Decoder, "plain"),
    "method": (Chunked, "plain"),
    "closure": (Inherited, "plain"),
    "function": (Borrowed, "plain"),
    "loop": (Detector, "linear"),
    "sequence": (sequence(first(32, 88), nn.GELU, first(88, 32)), "plain"),
    "sequence with dropout": (sequence(first(32, 88), nn.SiLU, nn.Dropout, nn.Identity, first(88, 32)), "plain"),
    "half a sequence": (sequence(lambda: nn.LayerNorm(32), first(32, 88), nn.ReLU, lambda: nn.LayerNorm(88)), "linear"),
    "long sequence": (sequence(first(32, 8), nn.ReLU, first(8, 16), nn.ReLU, first(16, 4)), "linear, plain"),
}


def refused(fused_mlp, module):
    """A pickled copy, fused again."""
    copied = pickle.loads(pickle.dumps(module))
    assert fused_mlp.explain(copied).implementation == "original"
    assert fused_mlp.fuse_mlps(copied).fused
    return copied


@pytest.mark.parametrize("form", FORMS)
def test_forms(fused_mlp, device, form):
    """MLPs that are no module of their own, or no code of their own."""
    make, pattern = FORMS[form]
    module = make().to(device)
    plain = copy.deepcopy(module)
    report = fused_mlp.fuse_mlps(module)
    assert [fused.pattern for fused in report.fused] == [pattern]
    x = torch.randn(4, 32, device=device)
    for candidate in (module, copy.deepcopy(module), refused(fused_mlp, module)):
        results = []
        for each in (candidate, plain):
            each.zero_grad()
            torch.manual_seed(0)
            trained = each.train()(x)
            (trained[0] if isinstance(trained, tuple) else trained).square().sum().backward()
            results.append([trained, [p.grad.clone() for p in each.parameters()], each.eval()(x)])
        torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)
    assert fused_mlp.explain(module).implementation == "fused"
    report.restore()
    assert fused_mlp.explain(module).implementation == "original"
    assert torch.equal(*(part[0] if isinstance(part, tuple) else part for part in (module(x), plain(x))))


def test_arguments_of_an_inline_mlp(fused_mlp, device):
    module = Decoder().to(device).eval()
    plain = copy.deepcopy(module)
    fused_mlp.fuse_mlps(module)
    x, mask = torch.randn(2, 32, device=device), torch.rand(32, device=device)
    for args, kwargs in (
        ((x,), {}),
        ((x, mask), {"scale": 3.0}),
        ((x, mask, 5, 6), {"scale": 2.0, "other": 7}),
        ((), {"hidden_states": x, "mask": mask}),
    ):
        torch.testing.assert_close(module(*args, **kwargs), plain(*args, **kwargs))
    for call in (lambda module: module(), lambda module: module(x, hidden_states=x)):
        with pytest.raises(TypeError) as of_fused:
            call(module)
        with pytest.raises(TypeError) as of_plain:
            call(plain)
        assert str(of_fused.value) == str(of_plain.value)


def test_parts_of_a_sequence_that_change(fused_mlp, device):
    """A sequence is fused as it is when it is called."""
    module = nn.Sequential(nn.Linear(32, 88), nn.GELU(), nn.Linear(88, 32)).to(device)
    fused_mlp.fuse_mlps(module)
    x = torch.randn(3, 32, device=device)
    module[1] = nn.Mish()
    torch.testing.assert_close(module(x), module[2](module[1](module[0](x))))
    module.append(nn.LayerNorm(32).to(device))
    del module[1]
    torch.testing.assert_close(module(x), module[2](module[1](module[0](x))))


def test_code_is_read_only_if_it_is_what_runs(fused_mlp, device):
    """A function whose source is another's, or nobody's, is left as it is."""

    class Edited(Plain):  # as when its file has changed since it was imported
        def forward(self, x):
            return self.fc2(self.activation_fn(self.fc1(x)))

        def doubled(self, x):
            return self.fc2(2 * self.activation_fn(self.fc1(x)))

    class Made(Plain):
        pass

    line = Edited.forward.__code__.co_firstlineno
    Edited.forward.__code__ = Edited.doubled.__code__.replace(co_firstlineno=line)
    del Edited.doubled
    exec("def forward(self, x):\n    return self.fc2(self.activation_fn(self.fc1(x)))", names := {})
    Made.forward = names["forward"]
    for kind in (Edited, Made):
        report = fused_mlp.fuse_mlps(kind().to(device))
        assert [reason.code for left in report.left for reason in left.reasons] == ["no source"]


def test_a_method_shows_its_own_lines(fused_mlp, device):
    """An error inside a fused method is found where the original has it."""
    module = Decoder().to(device)
    fused_mlp.fuse_mlps(module)
    module.norm = None
    with pytest.raises(TypeError) as caught:
        module(torch.randn(2, 32, device=device))
    assert "self.activation_fn(self.fc1(self.norm(hidden_states)))" in str(caught.traceback[-1].statement)
    assert inspect.signature(module.forward) == inspect.signature(Decoder().forward)
