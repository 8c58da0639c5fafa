"""A fused method that cannot run fused runs the statements of its source, and little else."""

import copy
import functools
import sys

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

import machine
import project
from modules import Gated, PackedGated, Plain
from safety import assert_close, x_of


def frames(fused_mlp, call) -> int:
    """Returns the number of calls of this package's Python functions, including fused methods, in a call."""
    home, count = fused_mlp.__path__[0], 0

    def see(frame, event, _):
        nonlocal count
        is_ours = frame.f_code.co_filename.startswith(home) or any("@" in name for name in frame.f_code.co_freevars)
        count += event == "call" and is_ours

    sys.setprofile(see)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


def hooked(module):
    for part in module.children():
        if isinstance(part, nn.Linear):
            part.register_forward_hook(lambda *_: None)
    return module


def adapted(module, **options):
    names = [name for name, part in module.named_children() if isinstance(part, nn.Linear)]
    return inject_adapter_in_model(LoraConfig(r=2, target_modules=names, init_lora_weights=False, **options), module)


# Most frames per call, fused or not, by the alteration of the module before fusing.
MOST = {"nothing": 9, "hooks": 11, "adapters": 4, "other adapters": 13}
MOST["adapters", PackedGated] = 9  # Python makes the halves of its operands
ALTERED = {"nothing": lambda module: module, "hooks": hooked, "adapters": adapted}
ALTERED["other adapters"] = functools.partial(adapted, use_dora=True)


@pytest.mark.parametrize("altered", ALTERED)
@pytest.mark.parametrize("kind", [Gated, PackedGated, Plain])
def test_calls_take_few_frames(fused_mlp, device, monkeypatch, kind, altered):
    dispatch = sys.modules[f"{fused_mlp.__name__}.dispatch"]
    monkeypatch.setattr(dispatch, "LEAST_PRODUCT", dict.fromkeys(dispatch.native._DTYPES, 1 << 40))
    module = ALTERED[altered](kind()).to(device).eval()
    plain = copy.deepcopy(module)
    fused_mlp.fuse_mlps(module)
    x = x_of(device)
    with torch.no_grad():
        for _ in range(6):  # fusing is retried after one, two and four misses
            assert_close(module(x), plain(x))
        # Python retries fusing at its first, second, fourth, ... miss. The whole and the first layer are
        # counted separately, and never retry in three consecutive calls.
        fewest = min(frames(fused_mlp, lambda: module(x)) for _ in range(3))
    assert fewest <= MOST.get((altered, kind), MOST[altered])


@pytest.mark.parametrize("altered", ["hooks", "other adapters"])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", [Gated, PackedGated, Plain])
def test_what_is_not_fused_has_the_bits_of_the_original(fused_mlp, device, monkeypatch, kind, training, altered):
    dispatch = sys.modules[f"{fused_mlp.__name__}.dispatch"]
    monkeypatch.setattr(dispatch, "LEAST_PRODUCT", dict.fromkeys(dispatch.native._DTYPES, 1 << 40))
    module = ALTERED[altered](kind()).to(device).train(training)
    plain = copy.deepcopy(module)
    assert fused_mlp.fuse_mlps(module).fused == []
    x = x_of(device).requires_grad_(training)
    for _ in range(3):
        got, expected = module(x), plain(x)
        assert torch.equal(got, expected)
        if training:
            given = [x, *(part for part in module.parameters() if part.requires_grad)]
            others = [x, *(part for part in plain.parameters() if part.requires_grad)]
            pairs = zip(torch.autograd.grad(got.sum(), given), torch.autograd.grad(expected.sum(), others), strict=True)
            assert all(torch.equal(*pair) for pair in pairs)


class Counting(nn.Module):
    """An MLP with a part before it that counts its calls."""

    def __init__(self):
        super().__init__()
        self.counter, self.fc1, self.fc2, self.act = nn.LayerNorm(32), nn.Linear(32, 88), nn.Linear(88, 32), nn.GELU()

    def forward(self, x):
        h = self.act(self.fc1(self.counter(x)))
        return x + self.fc2(h)


def test_an_input_is_computed_once(fused_mlp, device):
    module = Counting().to(device).eval()
    plain = copy.deepcopy(module)
    assert fused_mlp.fuse_mlps(module).fused
    x = x_of(device)
    for hook in (False, True):
        for each in (module, plain) if hook else ():
            each.fc2.register_forward_hook(lambda *_: None)
        calls = []
        handle = module.counter.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        with torch.no_grad():
            assert_close(module(x), plain(x))
        handle.remove()
        assert calls == [1]


class LocalCondition(nn.Module):
    """A rebound local name decides a branch after the MLP."""

    def __init__(self):
        super().__init__()
        self.norm, self.mlp, self.gain = nn.LayerNorm(32), Gated(), 0.5

    def forward(self, x, large=False):
        h = self.mlp(self.norm(x))
        large = not large
        if large:
            h = h * self.gain
        return x + h


@pytest.mark.parametrize("large", [False, True])
def test_conditions_on_names_that_are_bound_anew(fused_mlp, device, large):
    module = LocalCondition().to(device).eval()
    plain = copy.deepcopy(module)
    assert fused_mlp.fuse_mlps(module).fused
    x = x_of(device)
    with torch.no_grad():
        for _ in range(2):
            assert_close(module(x, large), plain(x, large))


@pytest.mark.skipif(machine.device_type() != "cpu", reason="on a GPU float16 has kernels")
def test_a_dtype_without_kernels_is_reported(fused_mlp):
    report = fused_mlp.fuse_mlps(Gated().half())
    assert report.fused == []
    assert str(report).splitlines()[0] == "0 of 1 MLP runs in one call"
    assert report.left[0].reason == "not cpu: no cpu kernel for torch.float16; cast the model to torch.bfloat16"


def test_a_module_in_training_is_reported_with_its_rows(fused_mlp, device, monkeypatch):
    dispatch = sys.modules[f"{fused_mlp.__name__}.dispatch"]
    if device.type == "cpu":
        monkeypatch.setitem(dispatch.LEAST_RECORDED[torch.float32], "gated_mlp", 880)
        expected = "fused in training with at least 10 rows"
    else:
        monkeypatch.setitem(dispatch.LEAST_WORK, (True, False), 88 * 32 * 10)
        expected = "fused in training with at least 10 rows"
    module = Gated().to(device).train()
    (entry,) = fused_mlp.fuse_mlps(module).fused
    assert entry.reason == expected
    assert fused_mlp.fuse_mlps(module, memory="recompute").fused[0].reason == ""
    assert fused_mlp.fuse_mlps(module.eval()).fused[0].reason == ""


def test_rows_of_relu(fused_mlp, device, monkeypatch):
    """If autograd keeps the activation's result, an op pays only from 64 times as many rows."""
    dispatch = sys.modules[f"{fused_mlp.__name__}.dispatch"]
    for key in dispatch.LEAST_WORK:
        monkeypatch.setitem(dispatch.LEAST_WORK, key, 0)
    for bounds in dispatch.LEAST_RECORDED.values():
        monkeypatch.setitem(bounds, "mlp", 880)
    monkeypatch.setattr(dispatch, "LEAST_COMPILED", 0)
    (entry,) = fused_mlp.fuse_mlps(Plain(nn.ReLU).to(device).train()).fused
    assert entry.reason == ("fused in training with at least 640 rows" if device.type == "cpu" else "")


@pytest.mark.parametrize("forced", ["triton", "torch", "cpu", "cuda"])
def test_a_forced_backend_is_explained(fused_mlp, forced):
    """explain never raises for a forced backend, even if the call would or a layer has no features."""
    for module in (Gated(), Gated(sizes=(32, 0, 32)), Plain(sizes=(32, 0, 32))):
        fused_mlp.fuse_mlps(module.train())
        with fused_mlp.backend(forced):
            assert fused_mlp.explain(module).implementation in ("fused", "original")


def test_public_answers(fused_mlp):
    module = Gated()
    assert not fused_mlp.is_fused(module)
    report = fused_mlp.fuse_mlps(module)
    assert fused_mlp.is_fused(module) and not fused_mlp.is_fused(module.act_fn)
    report.restore()
    assert not fused_mlp.is_fused(module)
    with pytest.raises(TypeError, match=r"module must be a torch.nn.Module, got str"):
        fused_mlp.is_fused("a module")
    assert fused_mlp.__version__ == str(project.version())


class Other(Gated):
    """A class with the same part names as Gated."""


def test_misses_of_another_class(fused_mlp, device, monkeypatch):
    """Python handles the first miss of a class, however often another class missed before."""
    shortcut, asked = sys.modules[f"{fused_mlp.__name__}.models.running.shortcut"], []
    monkeypatch.setattr(shortcut, "_missed", {})
    modules = [kind().to(device).eval() for kind in (Gated, Other)]
    for module in modules:
        fused_mlp.fuse_mlps(module)
        module.down_proj.register_forward_hook(lambda *_: None)
    learn, x = shortcut.learn, x_of(device)
    monkeypatch.setattr(shortcut, "learn", lambda act: asked.append(1) or learn(act))
    with torch.no_grad():
        for _ in range(8):  # a power of two, after which the wait is longest
            modules[0](x)
        before = len(asked)
        modules[0](x)
        assert len(asked) == before > 0
        modules[1](x)
    assert len(asked) > before
