"""Liger's MLPs and fused ones: applied before and after fusing, to classes, to instances and by Trainer.

Liger's kernels run only on a GPU. Everywhere, fused models are compared with those before Liger.
"""

import copy
import logging
import sys

import liger_kernel.transformers as liger
import pytest
import torch
import torch.nn.functional as F
import transformers
from liger_kernel.ops import LigerSiLUMulFunction
from torch import nn

from modules import Gated, RMSNorm
from safety import assert_close
from trainers import losses_of

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
SMALL.update(num_key_value_heads=4, vocab_size=100, pad_token_id=0, eos_token_id=1)
OFF = {"rope": False, "cross_entropy": False, "fused_linear_cross_entropy": False, "rms_norm": False}
KINDS = {
    "Llama": (liger.apply_liger_kernel_to_llama, "swiglu"),
    "Gemma": (liger.apply_liger_kernel_to_gemma, "geglu"),
    "Phi3": (liger.apply_liger_kernel_to_phi3, "swiglu"),
}
kinds = pytest.mark.parametrize("kind", KINDS)
MLPS = 2


def of(kind, device):
    config = getattr(transformers, f"{kind}Config")(**SMALL)
    return getattr(transformers, f"{kind}ForCausalLM")(config).to(device).eval()


def apply(kind, model=None):
    function, option = KINDS[kind]
    function(**OFF, **{option: True}, **({} if model is None else {"model": model}))


@pytest.fixture
def classes():
    """Restores the classes in models' modules that Liger replaces."""
    homes = [getattr(transformers.models, kind.lower()) for kind in KINDS]
    homes = [getattr(home, f"modeling_{kind.lower()}") for home, kind in zip(homes, KINDS, strict=True)]
    before = [dict(vars(home)) for home in homes]
    yield
    for home, names in zip(homes, before, strict=True):
        vars(home).update(names)


@pytest.fixture
def given(device):
    return torch.randint(2, 100, (2, 6), device=device)


def logits(model, given):
    with torch.no_grad():
        return model(given).logits


def ops_of(tell_ops):
    ops = []
    tell_ops(lambda name, given: ops.append(name))
    return ops


@kinds
def test_in_an_instance_before(fused_mlp, device, classes, tell_ops, dispatched, given, kind):
    model = of(kind, device)
    expected, kept = logits(model, given), copy.deepcopy(model)
    apply(kind, model)
    ops = ops_of(tell_ops)
    report = fused_mlp.fuse_mlps(model)
    assert len(report.fused) == MLPS
    assert_close(logits(model, given), expected)
    assert ops.count("residual_gated_mlp") == MLPS
    report.restore()
    mlp = model.model.layers[0].mlp
    assert mlp.forward.__func__.__module__.startswith("liger_kernel")
    assert not fused_mlp.is_fused(mlp)
    assert_close(logits(kept, given), expected)


@kinds
def test_in_an_instance_behind(fused_mlp, device, classes, tell_ops, dispatched, given, kind, caplog):
    """If Liger replaces a fused method, a log line and ``explain`` name Liger, and the module can be fused again."""
    model = of(kind, device)
    expected = logits(model, given)
    fused_mlp.fuse_mlps(model)
    with caplog.at_level(logging.WARNING, "fused_mlp"):
        apply(kind, model)
    name = f"{kind}MLP.forward is no longer fused"
    (line,) = [record.getMessage() for record in caplog.records if record.name == "fused_mlp"]
    assert line.startswith(name)
    assert "liger_kernel" in line
    assert "its fused forward was replaced (from liger_kernel" in str(fused_mlp.explain(model))
    ops = ops_of(tell_ops)
    assert len(fused_mlp.fuse_mlps(model).fused) == MLPS
    assert_close(logits(model, given), expected)
    assert ops.count("residual_gated_mlp") == MLPS


@kinds
def test_in_classes(fused_mlp, device, classes, tell_ops, dispatched, given, kind):
    plain = of(kind, device)
    apply(kind)
    model = of(kind, device)
    model.load_state_dict(plain.state_dict())
    assert type(model.model.layers[0].mlp).__module__.startswith("liger_kernel")
    ops = ops_of(tell_ops)
    assert len(fused_mlp.fuse_mlps(model).fused) == MLPS
    assert_close(logits(model, given), logits(plain, given))
    assert ops.count("residual_gated_mlp") == MLPS


class Fusing(transformers.TrainerCallback):
    def __init__(self, fused_mlp):
        self.fused_mlp, self.report = fused_mlp, None

    def on_train_begin(self, args, state, control, model=None, **given):
        self.report = self.fused_mlp.fuse_mlps(model)


@pytest.mark.parametrize("config", [OFF, {**OFF, "swiglu": False}], ids=["fused behind", "fused before"])
def test_trainer(fused_mlp, device, classes, tmp_path, config):
    """``Trainer.train`` may apply Liger to the model with or without its MLPs."""
    model = of("Llama", device).train()
    plain = copy.deepcopy(model)
    ids, losses = torch.randint(2, 100, (8, 6)), []
    for each, options in ((plain, {}), (model, {"use_liger_kernel": True, "liger_kernel_config": config})):
        fusing = Fusing(fused_mlp)
        callbacks = [fusing] if options and config is OFF else []
        if options and not callbacks:
            fused_mlp.fuse_mlps(each)
        options = {"max_steps": 3, "per_device_train_batch_size": 4, **options}
        losses.append(losses_of(each, ids, tmp_path, callbacks, **options))
        assert not callbacks or len(fusing.report.fused) == MLPS
    assert all(fused_mlp.is_fused(layer.mlp) for layer in model.model.layers)
    assert losses[0][-1] < losses[0][0]
    torch.testing.assert_close(*losses[::-1], rtol=1e-3, atol=1e-3)


def test_with_its_norms(fused_mlp, device, classes):
    """Liger's norms are called, and the MLPs after them are fused."""
    model = of("Llama", device)
    liger.apply_liger_kernel_to_llama(**{**OFF, "rms_norm": True}, swiglu=True, model=model)
    report = fused_mlp.fuse_mlps(model)
    assert len(report.fused) == MLPS
    mlp, x = model.model.layers[0].mlp, torch.randn(3, 64, device=device)
    with torch.no_grad():
        assert_close(mlp(x), mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x)))


def changed(ctx, gate, up, *_):
    return gate + up


def test_a_product_that_somebody_patches(fused_mlp, device, classes, monkeypatch):
    model = of("Llama", device)
    apply("Llama", model)
    mlp, x = model.model.layers[0].mlp, torch.randn(3, 64, device=device)
    fused_mlp.fuse_mlps(model)
    monkeypatch.setattr(LigerSiLUMulFunction, "forward", staticmethod(changed))
    with torch.no_grad():
        assert_close(mlp(x), mlp.down_proj(mlp.gate_proj(x) + mlp.up_proj(x)))
    assert "unknown activation" in str(fused_mlp.explain(mlp))


def test_a_version_that_nobody_has_read(fused_mlp, device, classes, monkeypatch):
    """A Liger version with an unknown digest is left, and the report gives the reason."""
    monkeypatch.setattr(sys.modules[f"{fused_mlp.__name__}.models.proving.liger"], "_DIGESTS", {})
    activations = sys.modules[f"{fused_mlp.__name__}.models.proving.activations"]
    activations._products.known.clear()
    model = of("Llama", device)
    apply("Llama", model)
    report = fused_mlp.fuse_mlps(model)
    activations._products.known.clear()
    assert not report.fused
    assert all("forward is overridden on the instance (from liger_kernel" in each.reason for each in report.left)


# The same kinds without Liger: a product in a function, and a method held by the module itself.


def silu_and_mul(gate, up):
    return F.silu(gate) * up


class ByAFunction(Gated):
    def forward(self, x):
        return self.down_proj(silu_and_mul(self.gate_proj(x), self.up_proj(x)))


def tanh_gelu_forward(self, x):
    return self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


def test_a_product_by_a_function(fused_mlp, device, tell_ops, dispatched, monkeypatch):
    module, x = ByAFunction().to(device).eval(), torch.randn(3, 32, device=device)
    expected, ops = module(x).detach(), ops_of(tell_ops)
    assert fused_mlp.fuse_mlps(module).fused
    with torch.no_grad():
        assert_close(module(x), expected)
        assert ops == ["gated_mlp"]
        monkeypatch.setitem(globals(), "silu_and_mul", lambda gate, up: gate - up)
        assert torch.equal(module(x), module.down_proj(module.gate_proj(x) - module.up_proj(x)))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = RMSNorm(), Gated()

    def forward(self, x):
        residual = x
        x = self.norm(x)
        x = self.mlp(x)
        return residual + x


@pytest.mark.parametrize("fused_first", [False, True])
def test_another_forward_in_an_instance(fused_mlp, device, tell_ops, dispatched, fused_first):
    """A forward set on the instance is read in place of its class's, and the block around it computes the same."""
    model = Layer().to(device)
    x = torch.randn(2, 5, 32, device=device)
    if fused_first:
        fused_mlp.fuse_mlps(model)
    for module in model.modules():
        if type(module) is Gated:
            module.forward = tanh_gelu_forward.__get__(module)
    plain = copy.deepcopy(model) if not fused_first else None
    report = fused_mlp.fuse_mlps(model)
    assert report.fused
    with torch.no_grad():
        got = model(x)
        report.restore()
        expected = model(x)
        assert_close(got, expected)
        if plain is not None:
            assert torch.equal(plain(x), expected)
    assert all(
        vars(module)["forward"].__func__ is tanh_gelu_forward for module in model.modules() if type(module) is Gated
    )
