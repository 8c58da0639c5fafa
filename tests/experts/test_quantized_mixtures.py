"""Models whose experts are transformers' FP8Experts, fused and unfused.

Their own products are kernels from the Hub, replaced here by a function that multiplies by the decoded weights and
counts its calls. On a CPU the compiled ops are forced, or requested by name.
"""

import contextlib
import copy

import pytest
import torch
import transformers
import transformers.integrations.finegrained_fp8 as fp8
from torch import nn
from transformers.integrations.moe import use_experts_implementation

import machine

EXPERTS, CHOSEN, WIDTH, HIDDEN = 4, 2, 128, 192


@pytest.fixture
def own(monkeypatch):
    """Records the calls of the modules' own products."""
    called = []

    def grouped(rows, weight, scales, offsets, tokens_per_expert, block_size):
        called.append(tuple(weight.shape))
        wide = fp8._dequantize_fp8_weight(weight, scales, block_size, torch.float32)
        out, begin = rows.new_zeros(rows.shape[0], weight.shape[1]), 0
        for expert, end in enumerate(offsets.tolist()):
            out[begin:end] = (rows[begin:end].float() @ wide[expert].t()).to(rows.dtype)
            begin = end
        return out

    def multiply(x, weight, scales, block, dtype, activation_scale=None):
        called.append(tuple(weight.shape))
        return (x.float() @ fp8._dequantize_fp8_weight(weight, scales, block, torch.float32).t()).to(dtype)

    monkeypatch.setattr(fp8, "_FINEGRAINED_FP8", fp8.FineGrainedFP8(multiply, None, grouped))
    monkeypatch.setenv("TRANSFORMERS_DISABLE_DEEPGEMM_LINEAR", "1")
    return called


def experts(implementation="grouped_mm", device="cpu", **changed):
    """A module of experts as transformers' quantiser makes it."""
    config = transformers.Qwen3MoeConfig(
        hidden_size=WIDTH, moe_intermediate_size=HIDDEN, num_experts=EXPERTS, num_experts_per_tok=CHOSEN
    )
    config._experts_implementation = implementation
    for name, value in changed.items():
        setattr(config, name, value)
    kind = use_experts_implementation(
        experts_class=fp8.FP8Experts,
        experts_interface=fp8.ALL_FP8_EXPERTS_FUNCTIONS,
        has_bias=False,
        has_gate=True,
    )
    module = kind(config, block_size=(128, 128)).to(device).eval().requires_grad_(False)
    for name in ("gate_up_proj", "down_proj"):
        weight, scales = getattr(module, name), getattr(module, f"{name}_scale_inv")
        weight.copy_(torch.randn(weight.shape, device=device).to(weight.dtype))
        scales.copy_(torch.rand(scales.shape, device=device) * 0.1 + 0.02)
    return module


def given(device, tokens=6, dtype=torch.bfloat16):
    index = torch.rand(tokens, EXPERTS, device=device).topk(CHOSEN, 1)[1]
    return torch.randn(tokens, WIDTH, device=device).to(dtype), index, torch.rand(tokens, CHOSEN, device=device)


def holder(module):
    model = nn.Module()
    model.experts = module
    return model


@contextlib.contextmanager
def taken(fused_mlp):
    with fused_mlp.backend("cpu") if machine.device_type() == "cpu" else contextlib.nullcontext():
        yield


@pytest.mark.parametrize("way", ["grouped_mm", "eager"])
@pytest.mark.parametrize("changed", [{}, {"swiglu_limit": 1.0}, {"swiglu_limit": 1.0, "swiglu_alpha": 1.702}], ids=str)
def test_fused_equals_unfused(fused_mlp, device, own, way, changed):
    module = experts(way, device, **changed)
    operands = given(device)
    with torch.no_grad(), taken(fused_mlp):
        expected = module(*operands)
        assert own
        model = holder(module)
        report = fused_mlp.fuse_mlps(model)
        assert report.fused
        own.clear()
        found = model.experts(*operands)
        assert not own
        torch.testing.assert_close(found, expected, rtol=3e-2, atol=3e-2)
        report.restore()
        assert torch.equal(model.experts(*operands), expected) and own


def test_weights_are_read_at_each_call(fused_mlp, device, own):
    model = holder(experts(device=device))
    operands = given(device)
    with torch.no_grad(), taken(fused_mlp):
        fused_mlp.fuse_mlps(model)
        before = model.experts(*operands)
        model.experts.down_proj_scale_inv.mul_(2.0)
        torch.testing.assert_close(model.experts(*operands), before * 2)
        assert not own


def test_what_is_left(fused_mlp, device, own, monkeypatch):
    """Experts whose code or state is not understood, or has changed since, run as written."""
    operands = given(device)
    with torch.no_grad(), taken(fused_mlp):
        model = holder(experts(device=device))
        fused_mlp.fuse_mlps(model)
        scales = model.experts.down_proj_scale_inv
        changes = {
            "activation scales": lambda: setattr(model.experts, "activation_scheme", "static"),
            "float64": lambda: setattr(model.experts, "down_proj_scale_inv", nn.Parameter(scales.double(), False)),
            "form": lambda: setattr(model.experts, "block_size", (64, 64)),
            "not a parameter": lambda: model.experts.__dict__.update(down_proj=torch.ones(1)),
            "patched": lambda: monkeypatch.setattr(fp8, "fp8_linear", lambda *given: given),
        }
        for reason, change in changes.items():
            assert fused_mlp.explain(model).implementation == "fused"
            state, parameters, function = dict(model.experts.__dict__), dict(model.experts._parameters), fp8.fp8_linear
            change()
            explained = fused_mlp.explain(model)
            assert explained.implementation != "fused" and reason in explained.reason, explained
            model.experts.__dict__.clear()
            model.experts.__dict__.update(state)
            model.experts._parameters.clear()
            model.experts._parameters.update(parameters)
            monkeypatch.setattr(fp8, "fp8_linear", function)
        own.clear()
        model.experts(*operands)
        assert not own


def test_registered(fused_mlp, device, own):
    """The registered name needs no call of fuse_mlps, on a CPU too, which has no FP8 products."""
    fused_mlp.register_experts()
    module, operands = experts(device=device), given(device)
    with torch.no_grad():
        expected = module(*operands)
        own.clear()
        module.config._experts_implementation = "fused_mlp"
        found = module(*operands)
    assert not own
    torch.testing.assert_close(found, expected, rtol=3e-2, atol=3e-2)


def test_training_runs_as_written(fused_mlp, device, own):
    """Frozen experts run their own products in training, which pass the gradient of x to adapters elsewhere."""
    model, operands = holder(experts(device=device)), given(device)
    with taken(fused_mlp):
        fused_mlp.fuse_mlps(model)
        x = operands[0].requires_grad_()
        model.experts(x, *operands[1:]).float().sum().backward()
    assert own and x.grad is not None and x.grad.abs().sum() > 0


@pytest.mark.parametrize("hidden", [HIDDEN, 256])
def test_many_rows(fused_mlp, device, own, hidden):
    """Hopper's kernels round many rows as the modules do, if gate and up share no block; elsewhere, the modules' own
    products run."""
    module, operands = experts(device=device, moe_intermediate_size=hidden), given(device, tokens=200)
    model = holder(copy.deepcopy(module))
    with torch.no_grad():
        expected = module(*operands)
        own.clear()
        report = str(fused_mlp.fuse_mlps(model))
        found = model.experts(*operands)
    is_gpu = device.type == "cuda"
    takes = is_gpu and torch.cuda.get_device_capability(device) == (9, 0) and hidden % 128 == 0
    assert bool(own) != takes and ("up to 64 rows" in report) == (is_gpu and not takes)
    assert (found - expected).norm() <= (6e-2 if takes else 0) * expected.norm()


def test_report_names_the_format(fused_mlp, device, own):
    model = holder(experts(device=device))
    with taken(fused_mlp):
        assert "fp8" in str(fused_mlp.fuse_mlps(model))
        assert "fp8" in fused_mlp.explain(model).parts[0].pattern
