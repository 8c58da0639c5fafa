"""In training mode a fused forward has the same bits with and without autograd, like an unfused one."""

import copy
import sys

import pytest
import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tiny_models import GQA, HEAD, MODELS, build

DTYPES = [torch.bfloat16, torch.float32]
DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout_rate", "dropout", "attention_dropout")
DROPOUTS += ("resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout", "residual_dropout", "embedding_dropout")


def made(name, device, dtype):
    torch.manual_seed(0)
    model, inputs = build(name, device, dtype)
    model.set_attn_implementation("eager")  # torch's fused attention runs other kernels if a bias needs a gradient
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for attribute in DROPOUTS:
            if isinstance(module.__dict__.get(attribute), float):
                setattr(module, attribute, 0.0)
    return model.train(), inputs


def assert_same_bits(model, inputs):
    with torch.no_grad():
        alone = model(**inputs)[0]
    recorded = model(**inputs)[0]
    assert recorded.requires_grad and not alone.requires_grad
    assert torch.equal(alone, recorded.detach())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_models(fused_mlp, device, name, dtype):
    model, inputs = made(name, device, dtype)
    fused_mlp.fuse_mlps(model)
    assert_same_bits(model, inputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["Llama", "BERT", "GPT-NeoX", "Phi3", "T5 gated"])
def test_frozen_behind_something_trained(fused_mlp, device, name, dtype):
    """A frozen MLP behind a trained embedding has the same bits without autograd, where its input needs no gradient."""
    model, inputs = made(name, device, dtype)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.get_input_embeddings().weight.requires_grad_(True)
    fused_mlp.fuse_mlps(model)
    assert_same_bits(model, inputs)


@pytest.mark.parametrize("rows", [1, 17, 300])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wide_layers(fused_mlp, device, dtype, rows):
    """The bits are equal at sizes at which training uses an op."""
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "num_hidden_layers": 1}
    torch.manual_seed(0)
    for kind, config in (
        (transformers.LlamaModel, transformers.LlamaConfig(**sizes, vocab_size=64)),
        (transformers.Gemma2Model, transformers.Gemma2Config(**sizes, vocab_size=64, num_key_value_heads=8)),
        (transformers.GPTNeoXModel, transformers.GPTNeoXConfig(**sizes, vocab_size=64)),
    ):
        model = kind(config).to(device, dtype).train()
        fused_mlp.fuse_mlps(model)
        assert_same_bits(model, {"input_ids": torch.randint(64, (1, rows), device=device)})


@pytest.mark.parametrize("name", ["BERT", "Llama", "Phi3"])
def test_without_autograd_no_node_is_made(fused_mlp, device, monkeypatch, name):
    model, inputs = made(name, device, torch.float32)
    fused_mlp.fuse_mlps(model)
    model(**inputs)
    blocks, training = (sys.modules[f"{fused_mlp.__name__}.autograd.{name}"] for name in ("blocks", "training"))
    for owner, function in (
        (blocks, "pre_normed"),
        (blocks, "post_normed"),
        (training, "_record"),
        (training, "as_recorded"),
    ):
        monkeypatch.setattr(owner, function, lambda *_: pytest.fail("recorded"))
    with torch.no_grad():
        model(**inputs)


@pytest.mark.parametrize("tokens", [3, 200])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mixtures(fused_mlp, device, dtype, tokens):
    torch.manual_seed(0)
    sizes = GQA | HEAD | {"moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes)).to(device, dtype).train()
    fused_mlp.fuse_mlps(model)
    assert_same_bits(model, {"input_ids": torch.randint(3, 64, (1, tokens), device=device)})


def test_a_checkpoint_that_is_reentrant(fused_mlp, device):
    """A reentrant checkpoint recomputes exactly the values of its forward, which ran without autograd."""
    model, _ = made("Gemma2", device, torch.bfloat16)
    fused_mlp.fuse_mlps(model)
    mlp = model.model.layers[0].mlp
    found = []
    mlp.register_forward_hook(lambda module, given, result: found.append(result.detach().clone()))
    x = torch.randn(3, 7, 32, device=device, dtype=torch.bfloat16, requires_grad=True)
    checkpoint(mlp, x, use_reentrant=True).sum().backward()
    assert len(found) == 2 and torch.equal(*found)


def test_explain_says_so(fused_mlp, device):
    """explain names the guarantee in training mode with autograd off, but not in inference mode."""
    model, _ = made("Llama", device, torch.bfloat16)
    fused_mlp.fuse_mlps(model)
    for each in (model, model.model.layers[0].mlp):
        said = {}
        for training in (True, False):
            each.train(training)
            for name in ("enable_grad", "no_grad", "inference_mode"):
                with getattr(torch, name)():
                    said[training, name] = "bitwise equal to a call that autograd records" in str(
                        fused_mlp.explain(each)
                    )
        assert [case for case, is_said in said.items() if is_said] == [(True, "no_grad")]


def test_no_graph_is_kept_and_eval_is_left_alone(fused_mlp, device):
    model, inputs = made("Llama", device, torch.bfloat16)
    fused_mlp.fuse_mlps(model)
    with torch.no_grad():
        output = model(**inputs)[0]
        assert output.grad_fn is None and not output.requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())
    mlp = copy.deepcopy(model.model.layers[0].mlp)
    x = torch.randn(5, 32, device=device, dtype=torch.bfloat16)
    with torch.inference_mode():
        assert mlp(x).is_inference()
    with torch.no_grad():
        assert mlp(x).grad_fn is None
    with torch.inference_mode():
        made_there = torch.randn(5, 32, device=device, dtype=torch.bfloat16)
    with torch.no_grad():  # autograd accepts none of these tensors
        assert mlp(made_there).grad_fn is None
