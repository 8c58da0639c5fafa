"""RMSNorms: which classes are some, by their source; and their op, with gated MLPs."""

import copy
import importlib
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.helium.modeling_helium import HeliumRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.llama4.modeling_llama4 import Llama4TextRMSNorm
from transformers.models.moshi.modeling_moshi import MoshiRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.phi3.modeling_phi3 import Phi3RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm, Qwen3NextRMSNormGated
from transformers.models.t5.modeling_t5 import T5LayerNorm

from modules import Gated, RMSNorm
from reference import FLOAT32_ROUNDING
from safety import assert_close, x_of

SILU = 4
RMS, RMS_OF_ONE_MORE = 2, 4


@pytest.fixture
def norms(fused_mlp):
    return importlib.import_module(f"{fused_mlp.__name__}.models.norms")


@pytest.fixture
def op(fused_mlp):
    return sys.modules[f"{fused_mlp.__name__}.backends.native"].residual_gated_mlp


# The op.


def computed(x, gate, up, down, biases, residual, weight, bias, eps, norm, dtype):
    """The block by torch's functions in a dtype, the norm as models have it."""
    given = (None if each is None else each.to(dtype) for each in (x, gate, up, down, *biases, residual, weight, bias))
    x, gate, up, down, gate_bias, up_bias, down_bias, residual, weight, bias = given

    def normed(values):
        if norm // 2 == 0:
            return F.layer_norm(values, values.shape[-1:], weight, bias, eps)
        wide = values if dtype == torch.float64 else values.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return weight * wide.to(dtype) if norm // 2 == 1 else (wide * (1 + weight.to(wide))).to(dtype)

    values = normed(x) if norm % 2 else x
    values = F.linear(F.silu(F.linear(values, gate, gate_bias)) * F.linear(values, up, up_bias), down, down_bias)
    return values + residual if norm % 2 else normed(values + residual)


# Rows, and in, hidden, out: a warp, a block, all that registers hold, and more; in vectors and one by one.
SHAPES = [
    (1, (1024, 400, 1024)),
    (19, (64, 96, 64)),
    (37, (33, 70, 33)),
    (130, (768, 64, 768)),
    (5, (1501, 100, 1501)),
    (4, (9000, 100, 9000)),
    (3, (4096, 40, 4096)),
    (3, (8192, 40, 8192)),
    (3, (8200, 40, 8200)),
]


@pytest.mark.parametrize("norm", range(6))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_errors_are_no_larger_than_eager_ones(op, device, dtype, norm):
    if device.type == "cpu" and dtype == torch.float16:
        pytest.skip("no kernel")
    torch.manual_seed(0)
    for rows, (n_in, hidden, out) in SHAPES:

        def made(*shape, scale=1.0):
            return (scale * torch.randn(shape, device=device)).to(dtype)

        x, residual = made(rows, n_in, scale=5.0), 3 * made(rows, out) + 2
        gate, up = (made(hidden, n_in, scale=n_in**-0.5) for _ in range(2))
        biases = (made(hidden), None, made(out)) if rows != 37 else (None, None, None)
        weights = (gate, up, made(out, hidden, scale=hidden**-0.5))
        scale, shift = made(out), made(out) if norm // 2 == 0 else None
        given = (x, *weights, biases, residual, scale, shift, 1e-6, norm)
        expected, eager = (computed(*given, kind) for kind in (torch.float64, dtype))
        for each in (x, x.new_zeros(rows, n_in + 8)[:, :n_in].copy_(x)):
            got = op(each, *weights, *biases, SILU, residual, scale, shift, 1e-6, norm)
            error, its = ((each.double() - expected).norm() / expected.norm() for each in (got, eager))
            assert error <= 1.06 * its + 4 * FLOAT32_ROUNDING, (rows, n_in)
            assert got.is_contiguous()


def operands(device):
    sizes = ((5, 32), (96, 32), (96, 32), (32, 96))
    return *(torch.randn(size, device=device) for size in sizes), None, None, None, SILU


def test_rows(op, device):
    """NaN and infinity stay in their rows, a row of zeros has no scale; and no rows are no error."""
    x, *given = operands(device)
    residual, weight = torch.randn(5, 32, device=device), torch.randn(32, device=device)
    x[1, 3], x[2, 5], x[3] = torch.nan, torch.inf, 0.0
    got = op(x, *given, residual, weight, None, 1e-6, RMS + 1)
    assert got[1].isnan().all() and got[[0, 3, 4]].isfinite().all()
    torch.testing.assert_close(got[3], residual[3])
    assert op(x[:0], *given, residual[:0], weight, None, 1e-6, RMS + 1).shape == (0, 32)
    torch.library.opcheck(
        op, (x, *given, residual, weight, None, 1e-6, RMS + 1), test_utils=("test_schema", "test_faketensor")
    )


def test_operands_that_do_not_fit(op, device):
    x, *given = operands(device)
    residual, weight = torch.randn(5, 32, device=device), torch.randn(32, device=device)
    good = (residual, weight, None, 1e-6, RMS + 1)
    for index, fault in ((0, residual[:, 1:]), (0, residual[0]), (1, weight[1:]), (1, weight.double()), (3, None)):
        faulty = [*good]
        faulty[index] = fault
        with pytest.raises(RuntimeError, match=r"must|differs"):
            op(x, *given, *faulty)
    for norm in (-1, 6):
        with pytest.raises(RuntimeError, match="norm must be"):
            op(x, *given, *good[:-1], norm)


# Classes.


KNOWN = {
    LlamaRMSNorm: RMS,
    Phi3RMSNorm: RMS,
    Qwen3RMSNorm: RMS,
    Olmo2RMSNorm: RMS,
    HeliumRMSNorm: RMS,
    Llama4TextRMSNorm: RMS,
    MoshiRMSNorm: RMS,
    T5LayerNorm: RMS,
    GemmaRMSNorm: RMS_OF_ONE_MORE,
    Qwen3NextRMSNorm: RMS_OF_ONE_MORE,
    nn.RMSNorm: RMS,
    nn.LayerNorm: 0,
}


@pytest.mark.parametrize("kind", KNOWN, ids=lambda kind: kind.__name__)
def test_known_classes(norms, kind):
    assert norms.is_norm(kind) and norms.known[kind].code == KNOWN[kind]


@pytest.mark.parametrize("kind", [Qwen3NextRMSNormGated, nn.GroupNorm, nn.Linear, nn.BatchNorm1d])
def test_other_classes(norms, kind):
    assert not norms.is_norm(kind)


class Around(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm, self.mlp = norm, Gated()

    def forward(self, hidden_states):
        return hidden_states + self.mlp(self.norm(hidden_states))


@pytest.fixture
def calls(fused_mlp, monkeypatch):
    shortcut = importlib.import_module(f"{fused_mlp.__name__}.models.shortcut")
    taken, op = [], shortcut._ops["residual_gated_mlp"]
    monkeypatch.setitem(shortcut._ops, "residual_gated_mlp", lambda *args: (taken.append(args[-1]), op(*args))[1])
    return taken


def fused_pair(fused_mlp, device, kind):
    torch.manual_seed(0)
    module = Around(kind(32, eps=0.125)).to(device).eval()
    nn.init.normal_(module.norm.weight)
    fused = copy.deepcopy(module)
    assert fused_mlp.fuse_mlps(fused).fused[0].extent == "full"
    with torch.no_grad():
        fused(x_of(device))  # the class of an activation is learnt at its first call
    return module, fused


@pytest.mark.parametrize("kind", KNOWN, ids=lambda kind: kind.__name__)
def test_they_compute_what_their_class_does(fused_mlp, device, calls, kind):
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 4e-2)):
        module, fused = (each.to(dtype) for each in fused_pair(fused_mlp, device, kind))
        calls.clear()
        x = x_of(device).to(dtype)
        with torch.no_grad():
            for scale in (1.0, 1e-2, 30.0):
                assert_close(fused(scale * x), module(scale * x), tolerance)
        assert calls == 3 * [KNOWN[kind] + 1]


class Meta(RMSNorm):
    """By a method of its own, and with other words."""

    def normed(self, x):
        return x * torch.pow(x.square().mean(dim=-1, keepdim=True) + self.variance_epsilon, -0.5)

    def forward(self, x):
        """A docstring."""
        normed = self.normed(x.float()).type_as(x)
        return normed * self.weight


def test_words_of_others(fused_mlp, norms, device, calls):
    assert norms.is_norm(Meta) and norms.known[Meta].code == RMS
    module, fused = fused_pair(fused_mlp, device, Meta)
    calls.clear()
    with torch.no_grad():
        x = x_of(device)
        assert_close(fused(x), module(x))
    assert calls == [RMS + 1]


# What is nearly an RMSNorm: another scale, or another ending.
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
SCALE = "torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)"
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
    "shown": "print(x)\n    return (self.weight * x * {scale}).to(dtype)",
}


@pytest.fixture
def written(tmp_path):
    """A class whose forward is a text in a file, as that which is read has to be."""

    def make(body, arguments="self, x"):
        path = tmp_path / f"norm{len(list(tmp_path.iterdir()))}.py"
        start = "    dtype = x.dtype\n    x = x.to(torch.float32)\n"
        path.write_text(f"import torch\n\n\ndef forward({arguments}):\n{start}    {body}\n")
        names = {}
        exec(compile(path.read_text(), str(path), "exec"), names)
        return type("Written", (RMSNorm,), {"forward": names["forward"]})

    return make


def test_what_is_written_is_read(norms, written):
    """What the next tests replace is not why they pass."""
    kind = written(f"return (self.weight * x * {SCALE}).to(dtype)")
    assert norms.is_norm(kind) and norms.known[kind].eps == "variance_epsilon"
    kind = written(f"return ((self.weight.float() + 1) * (x * {SCALE})).to(dtype)")
    assert norms.is_norm(kind) and norms.known[kind].code == RMS_OF_ONE_MORE


@pytest.mark.parametrize("name", [*NEARLY, *ENDINGS])
def test_look_alikes(norms, written, name):
    scale = NEARLY.get(name, SCALE)
    ending = ENDINGS.get(name, "return (self.weight * x * ({scale})).to(dtype)")
    assert not norms.is_norm(written(ending.format(scale=scale)))


@pytest.mark.parametrize("arguments", ["self, x, y=None", "self, x, *rest", "self, x, **more", "self, x, *, y=1"])
def test_other_arguments(norms, written, arguments):
    assert not norms.is_norm(written(f"return (self.weight * x * {SCALE}).to(dtype)", arguments))


# What is done to a fused module whose norm is Meta, and whether its block is one op still.


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
            assert calls == [RMS + 1] * is_one
    assert_close(*outcomes)
