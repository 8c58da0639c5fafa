"""Standalone norms and x + mlp(norm(x)) in training: the ops, the modules of transformers, and whole models."""

import copy
import importlib
import pickle
import sys

import pytest
import torch
import transformers
from torch import nn
from torch.autograd import gradcheck
from torch.utils.checkpoint import checkpoint
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

import machine

LAYER, RMS, RMS_OF_ONE_MORE, LAYER_OF_ONE_MORE = 1, 2, 3, 5
KINDS = [LAYER, RMS, RMS_OF_ONE_MORE, LAYER_OF_ONE_MORE]
SHAPES = [(7, 33), (3, 4, 64), (1, 2048), (0, 8), (300, 1000), (5000, 128), (9, 12288), (40, 5376), (2049, 16)]
MODULES = [LlamaRMSNorm, Qwen3RMSNorm, GemmaRMSNorm, Olmo2RMSNorm]


def dtypes_on(device):
    return [torch.float32, torch.bfloat16, *([torch.float16] if device.type == "cuda" else [])]


def error(got, expected):
    expected = expected.double()
    return float((got.double() - expected).norm() / expected.norm().clamp_min(1e-30)) if expected.numel() else 0.0


def made(shape, dtype, kind, device, wide=False):
    generator = torch.Generator(device).manual_seed(0)

    def random(*sizes):
        return torch.randn(sizes, generator=generator, device=device)

    of_weights = torch.float32 if wide else dtype
    weight = random(shape[-1]).to(of_weights)
    bias = random(shape[-1]).to(of_weights) if kind in (LAYER, LAYER_OF_ONE_MORE) else None
    return (2 * random(*shape) + 0.5).to(dtype), weight, bias, random(*shape).to(dtype), random(*shape).to(dtype)


def gradients(written, given, grad, kind, dtype=None):
    leaves = [None if t is None else t.detach().to(dtype or t.dtype).requires_grad_() for t in given]
    result = written(*leaves, 1e-6, kind, False)
    there = [leaf for leaf in leaves if leaf is not None]
    return [result.detach(), *torch.autograd.grad(result, there, grad.to(dtype or grad.dtype))]


@pytest.mark.parametrize("wide", [False, True], ids=["own", "float32 weights"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_ops_are_no_less_exact_than_torch(ops, written, device, shape, kind, wide):
    for dtype in dtypes_on(device):
        x, weight, bias, grad, _ = made(shape, dtype, kind, device, wide)
        given, needs = (x, weight, bias), 3 if bias is None else 7
        expected = gradients(written, given, grad, kind, torch.float64)
        eager = gradients(written, given, grad, kind)
        y, statistics = ops.norm_forward(*given, 1e-6, kind, False)
        found = ops.norm_backward(grad, x, weight, statistics, None, None, 0.0, kind, needs)
        for got, right, by_torch in zip((y, *found), expected, eager, strict=True):
            assert got.dtype == by_torch.dtype
            # The floor covers float32, whose sums are added in another order.
            assert error(got, right) <= max(1.05 * error(by_torch, right), 6e-7), dtype
        again = ops.norm_backward(grad, x, weight, statistics, None, None, 0.0, kind, needs)
        assert all(map(torch.equal, found, again))


@pytest.mark.parametrize("kind", [LAYER, RMS])
def test_the_gradient_of_the_residual_is_added(ops, device, kind):
    for dtype in dtypes_on(device):
        x, weight, bias, grad, residual = made((333, 2048), dtype, kind, device)
        _, statistics = ops.norm_forward(x, weight, bias, 1e-6, kind, False)
        (alone,) = ops.norm_backward(grad.float(), x.float(), weight.float(), statistics, None, None, 0.0, kind, 1)
        (both,) = ops.norm_backward(grad, x, weight, statistics, residual, None, 0.0, kind, 1)
        torch.testing.assert_close(both, (alone + residual.float()).to(dtype))


def test_rows_of_any_strides(ops, device):
    x, weight, _, grad, _ = made((64, 4096), torch.bfloat16, RMS, device)
    rows, others = x[:, 3 : 3 + 2048], grad.t()[:2048].t()
    y, statistics = ops.norm_forward(rows, weight[:2048], None, 1e-6, RMS, True)
    dense, of_dense = ops.norm_forward(rows.contiguous(), weight[:2048], None, 1e-6, RMS, True)
    torch.testing.assert_close(y, dense)
    found = ops.norm_backward(others, rows, weight[:2048], statistics, None, None, 0.0, RMS, 3)
    expected = ops.norm_backward(
        others.contiguous(), rows.contiguous(), weight[:2048], of_dense, None, None, 0.0, RMS, 3
    )
    for got, right in zip(found, expected, strict=True):
        torch.testing.assert_close(got, right)


def test_bad_operands_are_named(ops, device):
    x, weight = torch.randn(4, 8, device=device), torch.randn(8, device=device)
    _, statistics = ops.norm_forward(x, weight, None, 1e-6, RMS, False)
    with pytest.raises(RuntimeError, match="the weight of norm must be"):
        ops.norm_forward(x, weight[:4], None, 1e-6, RMS, False)
    with pytest.raises(RuntimeError, match="code of a norm"):
        ops.norm_forward(x, weight, None, 1e-6, 4, False)
    with pytest.raises(RuntimeError, match="grad differs in shape"):
        ops.norm_backward(x[:2], x, weight, statistics, None, None, 0.0, RMS, 3)
    with pytest.raises(RuntimeError, match="statistics must be those that the forward returned"):
        ops.norm_backward(x, x, weight, statistics, None, None, 0.0, LAYER, 3)


@pytest.mark.skipif(machine.device_type() != "cpu", reason="a GPU's op pays at any size")
def test_small_ones_in_eval_mode_run_as_they_were_written(fused_mlp, device, monkeypatch):
    """In eval mode with autograd on, a norm of few values runs as written; larger norms and training use the op."""
    norm = LlamaRMSNorm(16)
    fused = copy.deepcopy(norm)
    assert fused_mlp.fuse_mlps(fused).norms
    monkeypatch.setitem(sys.modules[f"{fused_mlp.__name__}.dispatch"].LEAST_NORM, torch.float32, 64)
    for rows, training, is_op in ((3, False, False), (4, False, True), (3, True, True)):
        result = fused.train(training)(torch.randn(rows, 16, requires_grad=True))
        assert (type(result.grad_fn) is not type(norm(torch.randn(3, 16)).grad_fn)) == is_op


@pytest.mark.parametrize("kind", MODULES, ids=lambda kind: kind.__name__)
def test_modules_compute_what_their_code_says(fused_mlp, device, kind):
    for dtype in dtypes_on(device):
        norm = kind(768).to(device, dtype)
        nn.init.normal_(norm.weight)
        x, grad = (torch.randn(4, 96, 768, device=device).to(dtype) for _ in range(2))
        exact, plain, fused = (copy.deepcopy(norm) for _ in range(3))
        report = fused_mlp.fuse_mlps(fused)
        assert [each.fused for each in report.norms] == [True]
        assert fused_mlp.explain(fused).implementation == "fused"
        found = []
        for module, of in ((exact.double(), torch.float64), (plain, dtype), (fused, dtype)):
            leaf = x.detach().to(of).requires_grad_()
            result = module(leaf)
            result.backward(grad.to(of))
            found.append((result.detach(), leaf.grad, module.weight.grad))
        assert type(fused(x.requires_grad_()).grad_fn).__name__ == "_NormBackward"
        for right, by_torch, got in zip(*found, strict=True):
            assert got.dtype == by_torch.dtype
            assert error(got, right) <= max(1.05 * error(by_torch, right), 6e-7)
        # Values are rounded where the code rounds: only the rare one at a rounding edge differs, as sums are reordered.
        assert (found[1][0] != found[2][0]).float().mean() < (1e-3 if dtype != torch.float32 else 1)
        with torch.no_grad():
            assert torch.equal(fused(x), found[2][0])
        report.restore()
        assert "forward" not in vars(fused)


def fused_norm(fused_mlp, device, features=64):
    norm = LlamaRMSNorm(features).to(device)
    nn.init.normal_(norm.weight)
    plain = copy.deepcopy(norm)
    fused_mlp.fuse_mlps(norm)
    return norm, plain, torch.randn(1024, features, device=device)


def test_second_derivatives(fused_mlp, device):
    norm, plain, x = fused_norm(fused_mlp, device)
    found = []
    for module in (norm, plain):
        leaf = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(module(leaf).square().sum(), leaf, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), (leaf, module.weight)))
    for got, right in zip(*found, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-4)


def test_gradcheck_of_the_node(fused_mlp, ops, device):
    """The composed gradients, which the node computes when they are differentiated again, pass gradcheck in float64."""
    alone = importlib.import_module(f"{fused_mlp.__name__}.autograd.norms")
    x = torch.randn(3, 8, dtype=torch.float64, device=device, requires_grad=True)
    weight = torch.randn(8, dtype=torch.float64, device=device, requires_grad=True)

    def composed(x, weight):
        return torch.stack(alone._composed(alone.Given(x, weight, None, 1e-6, RMS, False), x, x, (True, False)))

    assert gradcheck(composed, (x, weight))


def test_hooks_frozen_weights_and_what_watches(fused_mlp, device):
    norm, plain, x = fused_norm(fused_mlp, device)
    seen = []
    handle = norm.register_forward_hook(lambda module, given, result: seen.append(result.shape))
    torch.testing.assert_close(norm(x), plain(x))
    assert seen == [x.shape]
    handle.remove()
    for module in (norm, plain):
        module.weight.requires_grad_(False)
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    for module, leaf in zip((norm, plain), leaves, strict=True):
        module(leaf).sum().backward()
        assert module.weight.grad is None
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad)
    assert norm(x).grad_fn is None
    tangents = [torch.func.jvp(module, (x,), (x,))[1] for module in (norm, plain)]
    torch.testing.assert_close(*tangents)
    jacobians = [torch.func.vmap(torch.func.grad(lambda row, m=module: m(row).sum()))(x) for module in (norm, plain)]
    torch.testing.assert_close(*jacobians)
    with torch.autograd.graph.save_on_cpu():
        leaf = x.clone().requires_grad_()
        result = norm(leaf).sum()
    result.backward()
    torch.testing.assert_close(leaf.grad, leaves[1].grad)


def test_a_patched_class_runs_its_own_code(fused_mlp, device, monkeypatch):
    norm, _, x = fused_norm(fused_mlp, device)
    monkeypatch.setattr(LlamaRMSNorm, "forward", lambda self, hidden_states: hidden_states + 1)
    torch.testing.assert_close(norm(x), x + 1)
    monkeypatch.undo()
    norm.variance_epsilon = 1.0
    torch.testing.assert_close(norm(x), copy.deepcopy(norm).forward(hidden_states=x))
    other = pickle.loads(pickle.dumps(norm))
    torch.testing.assert_close(other(x), norm(x))


def test_the_layer_for_kernelize(fused_mlp, device):
    _, norm, x = fused_norm(fused_mlp, device)
    expected = norm(x)
    norm.forward = fused_mlp.layers.RMSNorm.forward.__get__(norm)
    torch.testing.assert_close(norm(x), expected)
    assert type(norm(x.requires_grad_()).grad_fn).__name__ == "_NormBackward"
    assert fused_mlp.explain(norm).implementation == "fused"
    assert torch.compile(norm, backend="eager", fullgraph=True)(x).shape == x.shape
    with pytest.raises(AttributeError, match="no weights"):
        fused_mlp.layers.RMSNorm()(x)


SIZES = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 4}
GATED = SIZES | {"vocab_size": 512, "use_cache": False, "num_key_value_heads": 2}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**GATED)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**GATED, head_dim=64)),
    "gemma": lambda: transformers.GemmaForCausalLM(transformers.GemmaConfig(**GATED, head_dim=64)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=2, n_embd=256, n_head=4, vocab_size=512, use_cache=False, **NO_DROPOUT)
    ),
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, vocab_size=512)).eval(),
}


def step(model, ids, autocast=None):
    model.zero_grad()
    with torch.autocast(ids.device.type, autocast, enabled=autocast is not None):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    grads = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    return {"loss": loss.detach(), **grads}


def assert_no_worse(found, by_torch, exact):
    assert found.keys() == by_torch.keys()
    for name, right in exact.items():
        if right.double().norm() > 1e-9:  # the gradient of the keys' bias is pure rounding noise
            assert error(found[name], right) <= 1.5 * error(by_torch[name], right) + 2e-5, name


@pytest.mark.parametrize("name", MODELS)
def test_models_train_as_before(fused_mlp, device, name):
    torch.manual_seed(0)
    ids = torch.randint(512, (2, 512), device=device)
    plain = MODELS[name]().train(name != "bert").to(device)
    exact = step(copy.deepcopy(plain).double(), ids)
    for dtype in (torch.float32, torch.bfloat16):
        model = copy.deepcopy(plain).to(dtype)
        by_torch = step(model, ids)
        report = fused_mlp.fuse_mlps(model)
        assert len(report.norms) == {"llama": 5, "qwen3": 9, "gemma": 5}.get(name, 0)
        assert_no_worse(step(model, ids), by_torch, exact)
        report.restore()
        again = step(model, ids)
        assert_no_worse(again, by_torch, exact)
        if device.type == "cpu":  # on a GPU, torch's gradients of embeddings differ from run to run
            assert all(torch.equal(again[each], by_torch[each]) for each in again)


@pytest.fixture
def counted(fused_mlp, monkeypatch):
    """Collects the recorded blocks in a list."""
    blocks = importlib.import_module(f"{fused_mlp.__name__}.autograd.blocks")
    record, found = blocks.pre_normed, []
    monkeypatch.setattr(blocks, "pre_normed", lambda *given: found.append(record(*given)) or found[-1])
    return found


def test_blocks_are_recorded_with_their_residual(fused_mlp, device, counted):
    torch.manual_seed(0)
    model = MODELS["llama"]().to(device)
    ids = torch.randint(512, (8, 512), device=device)
    fused_mlp.fuse_mlps(model)
    step(model, ids)
    assert len(counted) == 2 or (device.type == "cuda" and counted)
    assert {type(each.grad_fn).__name__ for each in counted} == {"_PreNormedBackward"}


def test_checkpointing_accumulation_and_autocast(fused_mlp, device):
    torch.manual_seed(0)
    ids = torch.randint(512, (2, 256), device=device)
    plain = MODELS["llama"]().to(device)
    model = copy.deepcopy(plain)
    fused_mlp.fuse_mlps(model)
    expected = step(model, ids)
    model.gradient_checkpointing_enable()
    for name, each in step(model, ids).items():
        torch.testing.assert_close(each, expected[name])
    model.gradient_checkpointing_disable()
    model(input_ids=ids, labels=ids).loss.backward()
    for name, each in model.named_parameters():
        torch.testing.assert_close(each.grad, 2 * expected[name])
    exact = step(copy.deepcopy(plain).double(), ids)
    assert_no_worse(step(model, ids, torch.bfloat16), step(plain, ids, torch.bfloat16), exact)


def test_a_norm_in_a_checkpoint_of_either_kind(fused_mlp, device):
    norm, plain, x = fused_norm(fused_mlp, device)
    for reentrant in (False, True):
        leaves = [x.clone().requires_grad_() for _ in range(2)]
        checkpoint(norm, leaves[0], use_reentrant=reentrant).square().sum().backward()
        plain(leaves[1]).square().sum().backward()
        torch.testing.assert_close(leaves[0].grad, leaves[1].grad)


def test_under_compile_nothing_breaks_the_graph(fused_mlp, device):
    norm, plain, x = fused_norm(fused_mlp, device)
    compiled = torch.compile(norm, backend="eager", fullgraph=True)
    leaf = x.clone().requires_grad_()
    torch.testing.assert_close(compiled(leaf), plain(x))
