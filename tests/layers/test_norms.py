"""Norms and scales: the classes that are recognised as such by their source."""

import importlib
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers.models.dinov2.modeling_dinov2 import Dinov2LayerScale
from transformers.models.dinov3_vit.modeling_dinov3_vit import DINOv3ViTLayerScale
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.helium.modeling_helium import HeliumRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.llama4.modeling_llama4 import Llama4TextRMSNorm
from transformers.models.mimi.modeling_mimi import MimiLayerScale
from transformers.models.moshi.modeling_moshi import MoshiRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.phi3.modeling_phi3 import Phi3RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm, Qwen3NextRMSNormGated
from transformers.models.t5.modeling_t5 import T5LayerNorm

from modules import Gated, RMSNorm
from safety import assert_close, warmed, x_of
from written import with_forward

LAYER, RMS, RMS_OF_ONE_MORE, SCALE = range(1, 5)


@pytest.fixture
def norms(fused_mlp):
    return importlib.import_module(f"{fused_mlp.__name__}.models.parts.norms")


KNOWN = {
    LlamaRMSNorm: RMS,
    Phi3RMSNorm: RMS,
    Qwen3RMSNorm: RMS,
    Olmo2RMSNorm: RMS,
    HeliumRMSNorm: RMS,
    Llama4TextRMSNorm: RMS,
    MoshiRMSNorm: RMS,
    Gemma4RMSNorm: RMS,
    T5LayerNorm: RMS,
    GemmaRMSNorm: RMS_OF_ONE_MORE,
    Qwen3NextRMSNorm: RMS_OF_ONE_MORE,
    nn.RMSNorm: RMS,
    nn.LayerNorm: LAYER,
}


@pytest.mark.parametrize("kind", KNOWN, ids=lambda kind: kind.__name__)
def test_known_classes(norms, kind):
    assert norms.code_of(kind(32, eps=0.125)) == norms.known[kind].code == KNOWN[kind]


@pytest.mark.parametrize(
    "module",
    [Qwen3NextRMSNormGated(32), nn.GroupNorm(2, 32), nn.Linear(32, 32), nn.BatchNorm1d(32)],
    ids=lambda module: type(module).__name__,
)
def test_other_classes(norms, module):
    assert norms.code_of(module) is None


@pytest.mark.parametrize(
    ("kind", "weight"), [(Dinov2LayerScale, "lambda1"), (DINOv3ViTLayerScale, "lambda1"), (MimiLayerScale, "scale")]
)
def test_known_scales(norms, kind, weight):
    config = SimpleNamespace(hidden_size=8, layerscale_value=1.0, layer_scale_initial_scale=1.0)
    assert norms.code_of(kind(config)) == SCALE and norms.known[kind].weight == weight


class Around(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm, self.mlp = norm, Gated()

    def forward(self, hidden_states):
        return hidden_states + self.mlp(self.norm(hidden_states))


@pytest.fixture
def calls(tell_ops, dispatched):
    taken = []
    tell_ops(lambda name, given: taken.append(given[-6]) if name == "residual_gated_mlp" else None)
    return taken


def fused_pair(fused_mlp, device, kind):
    torch.manual_seed(0)
    module = Around(kind(32, eps=0.125)).to(device).eval()
    nn.init.normal_(module.norm.weight)
    return warmed(fused_mlp, module, x_of(device), extent="full")


@pytest.mark.parametrize("kind", KNOWN, ids=lambda kind: kind.__name__)
def test_they_compute_what_their_class_does(fused_mlp, device, calls, kind):
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 4e-2)):
        module, fused = (each.to(dtype) for each in fused_pair(fused_mlp, device, kind))
        calls.clear()
        x = x_of(device).to(dtype)
        with torch.no_grad():
            for scale in (1.0, 1e-2, 30.0):
                assert_close(fused(scale * x), module(scale * x), tolerance)
        assert calls == 3 * [KNOWN[kind]]


class Meta(RMSNorm):
    """Computes the norm in its own method, in other terms."""

    def normed(self, x):
        return x * torch.pow(x.square().mean(dim=-1, keepdim=True) + self.variance_epsilon, -0.5)

    def forward(self, x):
        """A docstring."""
        normed = self.normed(x.float()).type_as(x)
        return normed * self.weight


def test_words_of_others(fused_mlp, norms, device, calls):
    assert norms.code_of(Meta(32)) == RMS
    module, fused = fused_pair(fused_mlp, device, Meta)
    calls.clear()
    with torch.no_grad():
        x = x_of(device)
        assert_close(fused(x), module(x))
    assert calls == [RMS]


class Halved(nn.Module):
    def forward(self, weight):
        return weight / 2


@pytest.mark.parametrize("change", ["subclassed", "parametrized"])
def test_of_another_class_since(fused_mlp, device, change):
    """A norm whose class changes after fusing computes the right result, and explain names the new class."""
    module, fused = fused_pair(fused_mlp, device, Meta)
    for norm in (module.norm, fused.norm):
        if change == "parametrized":
            nn.utils.parametrize.register_parametrization(norm, "weight", Halved())
        else:
            norm.__class__ = type("Doubled", (Meta,), {"__call__": lambda self, x: 2 * Meta.__call__(self, x)})
    x = x_of(device)
    with torch.no_grad():
        assert_close(fused(x), module(x))
    assert f"a {type(fused.norm).__name__}" in fused_mlp.explain(fused.norm).reason


# Near misses of an RMSNorm, by scale or by ending.
NEARLY = {
    "eps outside": "torch.rsqrt(x.pow(2).mean(-1, keepdim=True)) + self.variance_epsilon",
    "no eps": "torch.rsqrt(x.pow(2).mean(-1, keepdim=True))",
    "another dimension": "torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + self.variance_epsilon)",
    "no dimension": "torch.rsqrt(x.pow(2).mean() + self.variance_epsilon)",
    "no keepdim": "torch.rsqrt(x.pow(2).mean(-1) + self.variance_epsilon)",
    "cubes": "torch.rsqrt(x.pow(3).mean(-1, keepdim=True) + self.variance_epsilon)",
    "a sum": "torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + self.variance_epsilon)",
    "the mean's square": "torch.rsqrt(x.mean(-1, keepdim=True).pow(2) + self.variance_epsilon)",
    "a sixth root": "torch.pow(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon, -0.6)",
    "eps of a child": "torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config.eps)",
    "clamped": "torch.rsqrt(x.pow(2).mean(-1, keepdim=True).clamp(max=9) + self.variance_epsilon)",
}
ROOT = "torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)"
ENDINGS = {
    "float32 goes on": "return self.weight * (x * {scale})",
    "the weight twice": "return (self.weight * self.weight * x * {scale}).to(dtype)",
    "two more": "return ((2 + self.weight) * x * {scale}).to(dtype)",
    "a bias": "return (self.weight * x * {scale} + self.bias).to(dtype)",
    "a difference": "return ((1 - self.weight) * x * {scale}).to(dtype)",
    "another weight": "return (self.scale * x * {scale}).to(dtype)",
    "no weight": "return (x * {scale}).to(dtype)",
    "no x": "return (self.weight * {scale}).to(dtype)",
    "x twice": "return (self.weight * x * x * {scale}).to(dtype)",
    "the scale twice": "s = {scale}; return (self.weight * x * s * s).to(dtype)",
    "half precision": "return (self.weight * x * {scale}).to(torch.float16)",
    "in training": "return (self.weight * x * {scale}).to(dtype) if not self.training else x",
    "a loop": "for _ in (1, 2):\n        x = self.weight * x * {scale}\n    return x.to(dtype)",
    "remembered": "self.last = x\n    return (self.weight * x * {scale}).to(dtype)",
    "in place": "x *= {scale}\n    return (self.weight * x).to(dtype)",
    "nothing": "x.to(dtype)",
    "called by itself": "return self.forward(x)",
    "shown and forgotten": "_ = print(x)\n    return (self.weight * x * {scale}).to(dtype)",
    **{
        f"cast {how}": f"x = x * {{scale}}\n    if {how}\n    return self.weight * x"
        for how in (
            "self.weight.dtype in [torch.float16]: x = x.to(self.weight.dtype)",
            "self.weight.dtype in [torch.float16, torch.bfloat16, torch.int8]: x = x.to(self.weight.dtype)",
            "self.weight.dtype not in [torch.float16, torch.bfloat16]: x = x.to(self.weight.dtype)",
            "self.weight.device in [torch.float16, torch.bfloat16]: x = x.to(self.weight.dtype)",
            "self.weight.dtype in [torch.float16, torch.bfloat16]: x = x.to(torch.float16)",
            "self.weight.dtype in [torch.float16, torch.bfloat16]: y = x.to(self.weight.dtype)",
        )
    },
    **{
        f"under {test}": f"x = x * {{scale}}\n    if {test}: x = x * self.weight\n    return x.to(dtype)"
        for test in ("not self.training", "x.is_cuda", "self.config.scaled", "self.weight is None", "torch")
    },
    "or else": "x = x * {scale}\n    if self.training: x = x * self.weight\n    else: x = 1\n    return x.to(dtype)",
    "returned early": "if self.training: return (x * self.weight * {scale}).to(dtype)\n    return x.to(dtype)",
    "shown": "print(x)\n    return (self.weight * x * {scale}).to(dtype)",
}


def written(body, arguments="x"):
    start = "dtype = x.dtype\nx = x.to(torch.float32)\n"
    return with_forward(RMSNorm, start + body.replace("\n    ", "\n"), arguments)


def test_what_is_written_is_read(norms):
    """The unmodified source is recognised, so the next tests fail to match only because of their changes."""
    kind = written(f"return (self.weight * x * {ROOT}).to(dtype)")
    assert norms.code_of(kind(32)) == RMS and norms.known[kind].eps == "variance_epsilon"
    kind = written(f"return ((self.weight.float() + 1) * (x * {ROOT})).to(dtype)")
    assert norms.code_of(kind(32)) == RMS_OF_ONE_MORE


def test_a_condition_is_asked_at_each_call(fused_mlp, device, calls):
    """A condition on the module's own attribute is evaluated at each call: the op runs only while it is True."""
    module, fused = fused_pair(fused_mlp, device, Gemma4RMSNorm)
    x = x_of(device)
    for with_scale, taken in ((True, [RMS]), (False, []), (1, []), (True, [RMS])):
        calls.clear()
        module.norm.with_scale = fused.norm.with_scale = with_scale
        with torch.no_grad():
            assert_close(fused(x), module(x))
        assert calls == taken


@pytest.mark.parametrize("name", [*NEARLY, *ENDINGS])
def test_look_alikes(norms, name):
    scale = NEARLY.get(name, ROOT)
    ending = ENDINGS.get(name, "return (self.weight * x * ({scale})).to(dtype)")
    assert norms.code_of(written(ending.format(scale=scale))(32)) is None


@pytest.mark.parametrize("arguments", ["x, *rest", "x, **more"])
def test_other_arguments(norms, arguments):
    assert norms.code_of(written(f"return (self.weight * x * {ROOT}).to(dtype)", arguments)(32)) is None


# Forwards of scales and of look-alikes.
SCALES = {
    "return x * self.gamma": True,
    "x = self.gamma * x\n    return x": True,
    "return x.mul(self.gamma)": True,
    "return x * self.gamma * self.beta": False,
    "return x * self.gamma * x": False,
    "return x * self.gamma + self.beta": False,
    "return x * (1 + self.gamma)": False,
    "return x.float() * self.gamma": False,
    "return x * self.gamma.float()": False,
    "return x * 2.0": False,
    "x *= self.gamma\n    return x": False,
    "return x + self.gamma": False,
    "return x * y": False,
}


@pytest.mark.parametrize("body", SCALES)
def test_scales(norms, body):
    module = with_forward(nn.Module, body.replace("\n    ", "\n"))()
    module.gamma, module.beta = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))
    assert (norms.code_of(module) == SCALE) == SCALES[body]


# Changes to a fused module with Meta as its norm, and whether its block still runs as one op.


def of_class(name, value):
    return lambda module, patch: patch.setattr(Meta, name, value, raising=False)


def of_norm(name, value):
    return lambda module, patch: setattr(module.norm, name, value)


def doubled(function):
    return lambda *args, **kwargs: 2 * function(*args, **kwargs)


CHANGES = {
    "another eps": (of_norm("variance_epsilon", 3.0), True),
    "an eps that is no float": (of_norm("variance_epsilon", 3), False),
    "a forward of the class": (of_class("forward", doubled(Meta.forward)), False),
    "a method of the class": (of_class("normed", doubled(Meta.normed)), False),
    "a call of the class": (of_class("__call__", doubled(Meta.__call__)), False),
    "a method of the module": (of_norm("normed", lambda x: 2 * x), False),
    "a forward of the module": (of_norm("forward", lambda x: 2 * x), False),
    "a weight of the class": (of_class("weight", 2.0), False),
    "an eps of the class": (of_class("variance_epsilon", property(lambda self: 4.0)), False),
    "torch.pow": (lambda module, patch: patch.setattr(torch, "pow", doubled(torch.pow)), False),
    "a hook": (lambda module, patch: module.norm.register_forward_hook(lambda part, args, out: 2 * out), False),
    "a wide norm": (lambda module, patch: module.norm.double(), False),
    "one weight": (lambda module, patch: setattr(module.norm, "weight", nn.Parameter(torch.ones(1))), True),  # raises
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_seen(fused_mlp, device, monkeypatch, calls, change):
    module, fused = fused_pair(fused_mlp, device, Meta)
    alter, is_one = CHANGES[change]
    x = x_of(device)
    outcomes = []
    for each in (fused, module):
        calls.clear()
        with monkeypatch.context() as patch, torch.no_grad():
            alter(each, patch)
            each.to(device)
            try:
                outcomes.append(each(x))
            except (RuntimeError, TypeError):
                outcomes.append(None)
        if each is fused:
            assert calls == [RMS] * is_one
    assert_close(*outcomes)


WIDE, EXTRA = torch.float32, None


class OfGlobals(RMSNorm):
    def forward(self, x):
        normed = x.to(WIDE) * torch.rsqrt(x.to(WIDE).pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * normed.to(x.dtype) if EXTRA is None else EXTRA * x


@pytest.mark.parametrize(("name", "value"), [("WIDE", torch.float64), ("EXTRA", 2.0)])
def test_globals_that_a_norm_reads_may_change(fused_mlp, device, monkeypatch, calls, name, value):
    module, fused = fused_pair(fused_mlp, device, OfGlobals)
    x = x_of(device)
    with torch.no_grad():
        for expected in ([RMS], []):
            calls.clear()
            assert_close(fused(x), module(x))
            assert calls == expected
            monkeypatch.setitem(globals(), name, value)
