"""Shared parts of the safety tests: equal modules, one of them fused in either way, and their comparison."""

import copy
import functools

import kernels
import pytest
import torch
import transformers
from kernels import LayerRepository, Mode
from torch import nn

import machine
import project
from modules import Gated, Intermediate, Output, PackedGated, Plain
from tiny_models import GQA

WAYS = ("fuse_mlps", "kernelize")
ways = pytest.mark.parametrize("way", WAYS)
KINDS = (Gated, PackedGated, Plain, Intermediate)
kinds = pytest.mark.parametrize("kind", KINDS)

LAYER_OF = {
    Gated: "GatedMLP",
    PackedGated: "PackedGatedMLP",
    Plain: "MLP",
    Intermediate: "Intermediate",
    Output: "Output",
    transformers.models.llama.modeling_llama.LlamaMLP: "GatedMLP",
    transformers.models.bert.modeling_bert.BertIntermediate: "Intermediate",
    transformers.models.bert.modeling_bert.BertOutput: "Output",
}


def fuse(fused_mlp, way, model):
    """Fuses all MLPs of a model in place, and returns it."""
    if way == "fuse_mlps":
        fused_mlp.fuse_mlps(model)
        return model
    repository = {
        layer: LayerRepository(project.repo_id(), layer_name=layer, revision=f"v{project.version()}")
        for layer in LAYER_OF.values()
    }
    for kind, layer in LAYER_OF.items():
        kernels.replace_kernel_forward_from_hub(kind, f"Test{layer}")
    mapping = {f"Test{layer}": {machine.device_type(): repository[layer]} for layer in repository}
    try:
        with kernels.use_kernel_mapping(mapping, inherit_mapping=False):
            return kernels.kernelize(model, mode=Mode.TRAINING | Mode.TORCH_COMPILE, device=machine.device_type())
    finally:
        for kind in LAYER_OF:
            del kind.kernel_layer_name, kind.kernel_condition


def pair(fused_mlp, way, model):
    """The model, and a fused copy."""
    fused = fuse(fused_mlp, way, copy.deepcopy(model))
    is_here = all(part.device.type == machine.device_type() for part in model.parameters())
    assert states(fused_mlp, fused) == {"fused"} or not is_here
    return model, fused


def warmed(fused_mlp, module, *args, extent=None, pattern=""):
    """The module, and a fused copy after its first call, which for example learns the activation's class."""
    fused = copy.deepcopy(module)
    entries = fused_mlp.fuse_mlps(fused).fused
    assert any(pattern in entry.pattern and extent in (None, entry.extent) for entry in entries)
    with torch.no_grad():
        fused(*args)
    return module, fused


def mlps(model):
    return [module for module in model.modules() if isinstance(module, tuple(LAYER_OF))]


def states(fused_mlp, model):
    """The extents to which a model's MLPs are fused, by explain."""
    return {fused_mlp.explain(module).implementation for module in mlps(model)}


def reasons(fused_mlp, model):
    return {fused_mlp.explain(module).reason for module in mlps(model)}


def llama(device, **options):
    """A tiny whole model, with grouped heads and biases in its MLPs, and input ids."""
    config = transformers.LlamaConfig(**GQA | {"mlp_bias": True, "eos_token_id": None} | options)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():  # the MLPs of a new model hardly affect its logits
        for parameter in (parameter for mlp in mlps(model) for parameter in mlp.parameters()):
            parameter.normal_(std=0.2)
    return model.to(device).eval(), torch.randint(3, 64, (2, 9), device=device)


def outcome(model, *args, **kwargs):
    """Output, output without autograd, and gradients of the inputs and of all parameters that require them."""
    model.zero_grad()
    args = tuple(arg.detach().requires_grad_() if arg.is_floating_point() else arg for arg in args)
    output = _tensor(model(*args, **kwargs))
    gradients = {}
    if output.requires_grad:
        output.square().mean().backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    with torch.no_grad():
        without = _tensor(model(*args, **kwargs))
    return output.detach(), without, [arg.grad for arg in args if arg.is_floating_point()], gradients


def assert_same(model, fused, *args, tolerance=1e-4, **kwargs):
    """Both have the same outcome, with the same random numbers."""
    assert_close(*alike(lambda each: outcome(each, *args, **kwargs), fused, model), tolerance)


def assert_close(got, expected, tolerance=1e-4):
    """Structures, types and shapes agree, and all errors are small relative to a tensor's largest value."""
    if isinstance(expected, torch.Tensor):
        assert (type(got), got.shape, got.dtype) == (type(expected), expected.shape, expected.dtype)
        if expected.numel():
            error, largest = (got - expected).abs().max().item(), expected.abs().max().item()
            assert error <= tolerance * largest + 1e-6, f"error {error:.1e}, largest value {largest:.1e}"
    elif isinstance(expected, dict):
        assert got.keys() == expected.keys()
        for key in expected:
            assert_close(got[key], expected[key], tolerance)
    elif expected is not None:
        for one, other in zip(got, expected, strict=True):
            assert_close(one, other, tolerance)
    else:
        assert got is None


def count_calls(monkeypatch, kind, name, called):
    """Wraps a class's method or property so that each call appends to a list."""
    original = getattr(kind, name)
    if isinstance(original, property):
        around = property(lambda self: (called.append(1), original.fget(self))[1])
    else:
        around = functools.wraps(original)(lambda *given, **named: (called.append(1), original(*given, **named))[1])
    monkeypatch.setattr(kind, name, around)


def alike(function, *modules):
    """The results of a function for each module, with the same random numbers."""
    results = []
    for module in modules:
        torch.manual_seed(1)
        results.append(function(module))
    return results


def _tensor(output):
    return output if isinstance(output, torch.Tensor) else output.logits


def x_of(device, *shape):
    return torch.randn(*(shape or (3, 7)), 32, device=device)


class Blocks(nn.Module):
    """Two MLPs of a kind in sequence, each with a residual and a norm."""

    def __init__(self, kind=Gated):
        super().__init__()
        self.mlps = nn.ModuleList(kind(bias=True) for _ in range(2))
        self.norm = nn.LayerNorm(32)

    def forward(self, x):
        for mlp in self.mlps:
            x = x + mlp(self.norm(x))
        return x


def run_with_gradients(model, inputs, autocast=None):
    """The first output and the gradients of all parameters, with fixed random numbers."""
    torch.manual_seed(2)
    model.zero_grad()
    device = next(model.parameters()).device.type
    with torch.autocast(device, dtype=autocast, enabled=autocast is not None):
        output = model(**inputs)[0]
    if not output.requires_grad:
        return [output], {}
    weights = torch.linspace(0.5, 1.5, output.numel(), device=output.device).view(output.shape)
    (output.float().square() * weights).mean().backward()
    return output.detach(), {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
