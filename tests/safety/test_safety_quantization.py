"""Projections quantised by torchao or bitsandbytes, before or after fusing, run their own products or are read packed
if known."""

import copy

import pytest
import torch
from torch import nn
from torchao.quantization import (
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    quantize_,
)
from torchao.quantization.granularity import PerGroup

import machine
from modules import Gated
from safety import Blocks, fuse, llama, mlps, pair, reasons, states, ways, x_of

TORCHAO = {
    "int8": lambda: Int8WeightOnlyConfig(),
    "int8 activations": lambda: Int8DynamicActivationInt8WeightConfig(),
    "int4": lambda: IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(8)),
}
configs = pytest.mark.parametrize("config", TORCHAO)


def quantized(model, config, only=lambda name: "mlp" in name):
    quantize_(model, TORCHAO[config](), filter_fn=lambda module, name: isinstance(module, nn.Linear) and only(name))
    return model


def assert_close(model, fused, x, plain):
    """The fused output follows the quantised model's; `plain`, that of the original weights, is far from both.

    Activations rounded to few bits react to the smallest difference of their inputs.
    """
    with torch.no_grad():
        got, expected = (_tensor(candidate(x)).double() for candidate in (fused, model))
    effect = (expected - plain.double()).norm()
    assert effect > 1e-3 * plain.double().norm()
    assert (got - expected).norm() <= 0.5 * effect


def _tensor(output):
    return output if isinstance(output, torch.Tensor) else output.logits


@torch.no_grad()
def llama_and_logits(device):
    model, ids = llama(device)
    return model, ids, model(ids).logits


@ways
@configs
def test_quantised_after(fused_mlp, device, way, config):
    model, ids, plain = llama_and_logits(device)
    model, fused = pair(fused_mlp, way, model)
    assert_close(quantized(model, config), quantized(fused, config), ids, plain)
    assert "fused" not in states(fused_mlp, fused)
    assert all("Tensor" in reason for reason in reasons(fused_mlp, fused))


@ways
@configs
def test_quantised_before(fused_mlp, device, way, config):
    """A model quantised before fusing runs unfused, and the report gives a reason for each module."""
    model, ids, plain = llama_and_logits(device)
    model = quantized(model, config)
    fused = copy.deepcopy(model)
    report = fused_mlp.fuse_mlps(fused) if way == "fuse_mlps" else fuse(fused_mlp, way, fused)
    assert_close(model, fused, ids, plain)
    assert "fused" not in states(fused_mlp, fused)
    if way == "fuse_mlps":
        assert all(module.reason for module in report.modules)


@ways
def test_one_quantised_projection(fused_mlp, device, way):
    model, ids, plain = llama_and_logits(device)
    model, fused = pair(fused_mlp, way, model)
    for candidate in (model, fused):
        quantized(candidate, "int4", lambda name: "down_proj" in name)
    assert_close(model, fused, ids, plain)
    assert all("down_proj" in reason and "up_proj" not in reason for reason in reasons(fused_mlp, fused))


def test_the_linear_layer_on_a_quantised_linear(fused_mlp, device):
    """Our Linear, which kernelize puts in place of nn.Linear's forward, still runs the weight's own product."""
    linear = nn.Linear(32, 48, device=device)
    quantize_(linear, Int8WeightOnlyConfig())
    x = x_of(device)
    with torch.no_grad():
        expected = linear(x)
        linear.forward = fused_mlp.layers.Linear.forward.__get__(linear)
        assert torch.equal(linear(x), expected)


def linear_8bit(bnb, source):
    linear = bnb.nn.Linear8bitLt(source.in_features, source.out_features, has_fp16_weights=False)
    linear.load_state_dict(source.state_dict())
    return linear


def linear_4bit(bnb, source):
    linear = bnb.nn.Linear4bit(source.in_features, source.out_features, quant_type="nf4", compute_dtype=torch.bfloat16)
    linear.load_state_dict(source.state_dict())
    return linear


@ways
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("make", [linear_8bit, linear_4bit])
def test_bitsandbytes(fused_mlp, device, way, when, make):
    bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes does not load on this machine", exc_type=ImportError)
    dtype = torch.bfloat16 if make is linear_4bit else torch.float32
    model = nn.Sequential(Gated(bias=True, sizes=(64, 128, 64))).to(device, dtype)
    x = torch.randn(5, 64, device=device, dtype=dtype)
    plain, fused = model(x).detach(), copy.deepcopy(model)
    if when == "after":
        fuse(fused_mlp, way, fused)
    for candidate in (model, fused):
        for mlp in mlps(candidate):
            for name in ("gate_proj", "up_proj", "down_proj"):
                setattr(mlp, name, make(bnb, getattr(mlp, name)).to(device))
    if when == "before":
        fuse(fused_mlp, way, fused)
    assert_close(model, fused, x, plain)
    is_read = device.type == "cuda" or machine.has_tiles()  # packed, in inference
    assert ("fused" in states(fused_mlp, fused)) == is_read
    assert is_read or all("bitsandbytes" in reason for reason in reasons(fused_mlp, fused))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@ways
def test_dynamic_quantisation_of_torch(fused_mlp, way):
    """Dynamic quantisation, which torch has on the CPU only, runs its own products."""
    model, x = Blocks().eval(), x_of("cpu")
    plain = model(x).detach()
    model, fused = pair(fused_mlp, way, model)
    model, fused = (torch.ao.quantization.quantize_dynamic(candidate, {nn.Linear}) for candidate in (model, fused))
    assert_close(model, fused, x, plain)
    assert "fused" not in states(fused_mlp, fused)
