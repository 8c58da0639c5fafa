"""Kernels of experts keep no more for the backward than torch does, with frozen and with trained weights."""

import copy
import sys
import unittest.mock

import pytest
import torch
from transformers import GptOssConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import machine

CAPABILITY = torch.cuda.get_device_capability() if machine.device_type() == "cuda" else None
hopper = pytest.mark.skipif(CAPABILITY != (9, 0), reason="needs a Hopper GPU")
TOP_K = 4
WEIGHTS = "gate_up_proj", "down_proj"


def made(kind, device, trained=()):
    sizes = {"hidden_size": 512, "num_experts_per_tok": TOP_K}
    if kind is GptOssExperts:
        config = GptOssConfig(**sizes, intermediate_size=768, num_local_experts=8)
    else:
        config = Qwen3MoeConfig(**sizes, moe_intermediate_size=768, num_experts=8)
    config._experts_implementation = "grouped_mm"
    with torch.device(device):
        module = kind(config).bfloat16()
    for name, parameter in module.named_parameters():
        torch.nn.init.normal_(parameter, std=0.05)
        parameter.requires_grad_(name in trained or trained == WEIGHTS)
    return module


def by_kernels(fused_mlp):
    module = sys.modules[f"{fused_mlp.__name__}.autograd.experts_training"]
    return unittest.mock.patch.object(module, "run", wraps=module.run)


def step(module, x, index, weights):
    """Kept and peak bytes of a call and its backward, and the gradients."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = module(x, index, weights)
    kept = torch.cuda.memory_allocated() - before
    wanted = [leaf for leaf in (x, weights, *module.parameters()) if leaf.requires_grad]
    found = torch.autograd.grad(out.sum(), wanted)
    return kept, torch.cuda.max_memory_allocated() - before, found


@hopper
@pytest.mark.parametrize("routed", [False, True], ids=["router frozen", "router trained"])
@pytest.mark.parametrize("trained", [(), ("down_proj",), ("gate_up_proj",), WEIGHTS], ids=str)
@pytest.mark.parametrize("kind", [GptOssExperts, Qwen3MoeExperts])
def test_what_is_kept(fused_mlp, device, kind, trained, routed):
    module = made(kind, device, trained)
    x = torch.randn(4096, 512, device=device).bfloat16().requires_grad_()
    index = torch.rand(4096, 8, device=device).topk(TOP_K).indices
    weights = torch.rand(4096, TOP_K, device=device).bfloat16().requires_grad_(routed)
    step(module, x, index, weights)
    kept, peak, _ = step(module, x, index, weights)
    wide = (given.detach().float().requires_grad_(given.requires_grad) for given in (x, weights))
    *_, expected = step(copy.deepcopy(module).float(), next(wide), index, next(wide))  # torch sums biases in bfloat16
    fused_mlp.fuse_mlps(module)
    with by_kernels(fused_mlp) as run:
        step(module, x, index, weights)
        our_kept, our_peak, found = step(module, x, index, weights)
    assert run.call_count == 2
    assert our_kept <= kept and our_peak <= peak, (our_kept, kept, our_peak, peak)
    for mine, theirs in zip(found, expected, strict=True):
        assert ((mine.float() - theirs.float()).norm() / theirs.float().norm()).item() < 2e-2


@hopper
@pytest.mark.parametrize("trained", [(), WEIGHTS], ids=str)
def test_few_tokens_are_left(fused_mlp, device, trained):
    """With few tokens an expert's rows hardly fill a block, so the kernels, which would keep more, do not run."""
    module = made(Qwen3MoeExperts, device, trained)
    fused_mlp.fuse_mlps(module)
    x = torch.randn(16, 512, device=device).bfloat16().requires_grad_()
    index = torch.rand(16, 8, device=device).topk(TOP_K).indices
    with by_kernels(fused_mlp) as run:
        module(x, index, torch.rand(16, TOP_K, device=device).bfloat16()).sum().backward()
    assert run.call_count == 0
