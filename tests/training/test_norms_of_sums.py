"""``norm(residual + dropout(...))`` in training: the op, and the blocks and attention outputs that use it."""

import copy
import importlib

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint

from modules import Halves
from test_norm_training import KINDS, LAYER, SHAPES, dtypes_on, error, made

DROPS = torch.cuda.is_available()  # on a CPU, PyTorch draws the dropouts
P = 0.3 if DROPS else 0.0


@pytest.fixture
def norms(fused_mlp):
    return importlib.import_module(f"{fused_mlp.__name__}.autograd.norms")


@pytest.fixture
def blocks(fused_mlp):
    return importlib.import_module(f"{fused_mlp.__name__}.autograd.blocks")


def by_parts(written, x, residual, weight, bias, behind, mask, p, kind):
    """The result and its leaves by torch operations in the dtype of x, for a given dropout mask."""
    leaves = [t if t is None else t.detach().requires_grad_() for t in (x, residual, weight, bias, behind)]
    x, residual, weight, bias, behind = leaves
    dropped = x + 0 * behind  # x already contains behind
    if mask is not None:
        dropped = torch.ops.aten.native_dropout_backward(dropped, mask, 1 / (1 - p))
    return written(dropped + residual, weight, bias, 1e-6, kind, False), [t for t in leaves if t is not None]


def behind_gradient(x_grad):
    return x_grad.reshape(-1, x_grad.shape[-1]).sum(0)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.7] if DROPS else [0.0])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@torch.no_grad()
def test_op_is_no_less_exact_than_torch(ops, norms, written, device, shape, kind, p):
    for dtype in dtypes_on(device):
        x, weight, bias, grad, residual = made(shape, dtype, kind, device)
        behind = torch.randn(shape[-1], device=device).to(dtype) if DROPS else None
        given = x, residual, weight, bias, behind
        torch.manual_seed(3)
        mask = torch.native_dropout(x, p, True)[1] if p and x.numel() else None
        drawn = torch.rand(3, device=device)
        found = []
        for _ in range(2):
            torch.manual_seed(3)
            y, *saved = ops.sum_norm_forward(*given[:4], 1e-6, kind, p)
            assert torch.equal(torch.rand(3, device=device), drawn)
            of_sum = norms.OfSum(saved[0], *given[2:4], saved[1], *(saved[2:] or [None]), 1e-6, kind, p)
            gradients = norms.sum_gradients(of_sum, grad, None, tuple(each is not None for each in given))
            found.append([y, *(each for each in gradients if each is not None)])
        assert all(map(torch.equal, *found))
        there = torch.zeros(shape[-1], dtype=dtype, device=device) if behind is None else behind
        results = []
        for of in (torch.float64, dtype):
            operands = [t if t is None else t.to(of) for t in (x, residual, weight, bias, there)]
            with torch.enable_grad():
                y, leaves = by_parts(written, *operands, mask, p, kind)
            *gradients, _ = torch.autograd.grad(y, leaves, grad.to(of))
            gradients += [] if behind is None else [behind_gradient(gradients[0])]
            results.append([y.detach(), *gradients])
        for got, right, by_torch in zip(found[0], *results, strict=True):
            assert got.dtype == by_torch.dtype
            slack = 1.05 if got.numel() > 1000 else 2.0  # with few numbers, either error may be small by chance
            assert error(got, right) <= max(slack * error(by_torch, right), 6e-7), dtype


def of_layer(blocks, x, layer_weight, layer_bias, *others, p=P):
    """``norm(residual + dropout(linear(x)))`` as one node, given the residual, weight and bias of the norm."""
    given = x, layer_weight, None, None, layer_bias, None, None, *others, (1e-6, LAYER, 0, None, None, p)
    return blocks.post_normed(*given)[0]


SHAPES_OF_LAYER = (3, 5, 24), (16, 24), (16,), (3, 5, 16), (16,), (16,)


def test_gradients_of_gradients(blocks, written, device):
    given = [torch.randn(*shape, device=device) for shape in SHAPES_OF_LAYER]
    found = []
    for mode in ("node", "parts"):
        leaves = [t.clone().requires_grad_() for t in given]
        torch.manual_seed(1)
        if mode == "node":
            y = of_layer(blocks, *leaves)
        else:
            y = written(F.dropout(F.linear(*leaves[:3]), P) + leaves[3], *leaves[4:], 1e-6, LAYER, False)
        first = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
        found.append([*first, *torch.autograd.grad(sum(each.square().sum() for each in first), leaves)])
    for got, right in zip(*found, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-3, atol=1e-3)


def test_a_layer_in_front_is_of_the_same_node(blocks, device):
    """The layer in front shares the norm's autograd node, and any subset of gradients has the bits of the full set."""
    leaves = [torch.randn(*shape, device=device).requires_grad_() for shape in SHAPES_OF_LAYER]
    torch.manual_seed(1)
    y = of_layer(blocks, *leaves)
    assert {type(node).__name__ for node, _ in y.grad_fn.next_functions if node is not None} == {"AccumulateGrad"}
    grad = torch.randn_like(y)
    expected = torch.autograd.grad(y, leaves, grad, retain_graph=True)
    for place, leaf in enumerate(leaves):
        assert torch.equal(*torch.autograd.grad(y, [leaf], grad, retain_graph=True), expected[place])
    saved = leaves[1].detach().clone()
    leaves[1].data = torch.zeros_like(saved)  # the product used the old values
    assert torch.equal(*torch.autograd.grad(y, leaves[:1], grad), expected[0])


def test_bad_operands_are_named(ops, device):
    x, weight = torch.randn(4, 8, device=device), torch.randn(8, device=device)
    with pytest.raises(RuntimeError, match="residual differs in shape"):
        ops.sum_norm_forward(x, x[:2], weight, None, 1e-6, LAYER, 0.0)
    with pytest.raises(RuntimeError, match="dropout must be at least 0 and less than 1"):
        ops.sum_norm_forward(x, x, weight, None, 1e-6, LAYER, 1.0)
    _, total, statistics = ops.sum_norm_forward(x, x, weight, None, 1e-6, LAYER, 0.0)
    with pytest.raises(RuntimeError, match="kept must be the mask"):
        ops.norm_backward(x, total, weight, statistics, None, torch.ones(3, device=device) > 0, 0.1, LAYER, 9)
    if DROPS:
        with pytest.raises(RuntimeError, match="x must be contiguous if dropout is applied to it"):
            ops.sum_norm_forward(x.t(), x.t(), weight[:4], None, 1e-6, LAYER, 0.5)
    else:
        with pytest.raises(RuntimeError, match="dropout must be 0 in this build"):
            ops.sum_norm_forward(x, x, weight, None, 1e-6, LAYER, 0.5)


SIZES = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = SIZES | {"vocab_size": 96, "hidden_dropout_prob": P, "attention_probs_dropout_prob": 0.1}
# Model types, and the number of sums with norms per model that run as one op in training.
TYPES = {
    "bert": (lambda: transformers.BertForMaskedLM(transformers.BertConfig(**TEXT)), 4),
    "roberta": (lambda: transformers.RobertaForMaskedLM(transformers.RobertaConfig(**TEXT, pad_token_id=0)), 4),
    "electra": (lambda: transformers.ElectraForMaskedLM(transformers.ElectraConfig(**TEXT)), 4),
    "deberta-v2": (lambda: transformers.DebertaV2ForMaskedLM(transformers.DebertaV2Config(**TEXT)), 4),
}
PRE_NORM = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=96, use_cache=False, resid_pdrop=P)
    ),
    "vit": lambda: transformers.ViTForImageClassification(
        transformers.ViTConfig(**SIZES, image_size=32, patch_size=8, num_labels=7, hidden_dropout_prob=P)
    ),
}


@pytest.fixture
def counted(fused_mlp, monkeypatch):
    """Records each block that autograd follows: "block" for a norm in front, "ending" for the norm of a sum."""
    shortcut, found = importlib.import_module(f"{fused_mlp.__name__}.models.running.shortcut"), []

    def counting(name, record):
        def counted(*given):
            result = record(*given)
            found.extend([name] * (result is not None))
            return result

        return counted

    recorded = (
        (shortcut.whole_blocks, "pre_normed", "block"),
        (shortcut.whole_blocks, "post_normed", "ending"),
    )
    for owner, name, kind in recorded:
        monkeypatch.setattr(owner, name, counting(kind, getattr(owner, name)))
    return found


def batch_of(model):
    if model.config.model_type == "vit":
        return {
            "pixel_values": torch.randn(3, 3, 32, 32).to(model.device),
            "labels": torch.tensor([1, 2, 3]).to(model.device),
        }
    ids = torch.randint(3, 96, (3, 40), device=model.device)
    return {"input_ids": ids, "labels": ids}


def step(model, batch, seed=11, autocast=None):
    model.zero_grad()
    torch.manual_seed(seed)
    with torch.autocast(model.device.type, autocast, enabled=autocast is not None):
        loss = model(**batch).loss
    if loss.requires_grad:
        loss.backward()
    grads = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    return {"loss": loss.detach(), **grads}


def assert_alike(found, expected):
    """Gradients are close; with another dropout mask they would be far apart."""
    assert found.keys() == expected.keys()
    for name, right in expected.items():
        torch.testing.assert_close(found[name], right, rtol=2e-4, atol=2e-5, msg=lambda text, n=name: f"{n}: {text}")


def pair(fused_mlp, device, build):
    torch.manual_seed(0)
    plain = build().to(device).train()
    fused = copy.deepcopy(plain)
    fused_mlp.fuse_mlps(fused)
    return plain, fused, batch_of(plain)


@pytest.mark.parametrize("name", [*TYPES, *PRE_NORM])
def test_models_train_as_eager_with_the_same_seed(fused_mlp, device, counted, name):
    build, count = TYPES[name] if name in TYPES else (PRE_NORM[name], 2)
    plain, fused, batch = pair(fused_mlp, device, build)
    step(fused, batch)
    counted.clear()
    expected = step(plain, batch)
    assert_alike(step(fused, batch), expected)
    assert counted == ["ending" if name in TYPES else "block"] * count
    for model in (plain, fused):  # switch to eval mode with autograd on, and back
        model.eval()
    assert_alike(step(fused, batch), step(plain, batch))
    fused.train()
    assert_alike(step(fused, batch), expected)


@pytest.mark.parametrize("drops", [True, False])
def test_explained(fused_mlp, device, monkeypatch, drops):
    outcome = importlib.import_module(f"{fused_mlp.__name__}.models.outcome")
    monkeypatch.setattr(outcome, "DROPS", drops)
    monkeypatch.setitem(outcome.dispatch.LEAST_SUM, torch.float32, 6400)
    _, fused, _ = pair(fused_mlp, device, TYPES["bert"][0])
    end = fused.bert.encoder.layer[0].attention.output
    end.dropout.p = 0.3
    assert ("fused in training with at least 100 rows" in str(fused_mlp.explain(end))) == drops
    assert ("active in training" in str(fused_mlp.explain(end))) != drops
    end.dropout.p = 1.0
    assert "active in training" in str(fused_mlp.explain(end))
    end.eval()
    assert "at least" not in str(fused_mlp.explain(end)) and fused_mlp.explain(end).implementation == "fused"


@pytest.mark.parametrize("frozen", ["embeddings", "LayerNorm", "dense.bias", "output", "attention", "dense.weight"])
def test_frozen_subsets(fused_mlp, device, frozen):
    plain, fused, batch = pair(fused_mlp, device, TYPES["bert"][0])
    for model in (plain, fused):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(frozen not in name)
    assert_alike(step(fused, batch), step(plain, batch))
    for model in (plain, fused):  # now train only these
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(frozen in name)
    assert_alike(step(fused, batch), step(plain, batch))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(fused_mlp, device, reentrant):
    plain, fused, batch = pair(fused_mlp, device, TYPES["bert"][0])
    for model in (plain, fused):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_alike(step(fused, batch), step(plain, batch))


def test_memory_is_saved_as_asked(fused_mlp, device):
    plain, _, batch = pair(fused_mlp, device, TYPES["bert"][0])
    fused = copy.deepcopy(plain)
    fused_mlp.fuse_mlps(fused, memory="recompute")
    assert_alike(step(fused, batch), step(plain, batch))


def test_autocast_and_accumulation(fused_mlp, device):
    plain, fused, batch = pair(fused_mlp, device, TYPES["bert"][0])
    found, by_torch = (step(model, batch, autocast=torch.bfloat16).values() for model in (fused, plain))
    assert error(*(torch.cat([each.flatten() for each in of]) for of in (found, by_torch))) < 0.05
    expected = step(fused, batch)
    torch.manual_seed(11)
    fused(**batch).loss.backward()
    for name, parameter in fused.named_parameters():
        torch.testing.assert_close(parameter.grad, 2 * expected[name], rtol=1e-3, atol=1e-5)


def halves(device, p=P):
    torch.manual_seed(2)
    module = Halves().to(device).train()
    module.output.dropout.p = p
    return module


CHANGES = {
    "p of 1": lambda module, monkeypatch: setattr(module.output.dropout, "p", 1.0),
    "a hook of the dropout": lambda module, monkeypatch: module.output.dropout.register_forward_hook(
        lambda *args: 2 * args[-1]
    ),
    "a hook of the norm": lambda module, monkeypatch: module.output.LayerNorm.register_forward_hook(
        lambda *args: 2 * args[-1]
    ),
    "a hook of the projection": lambda module, monkeypatch: module.output.dense.register_full_backward_hook(
        lambda module, grads, given: tuple(each if each is None else 2 * each for each in grads)
    ),
    "another dropout": lambda module, monkeypatch: setattr(module.output, "dropout", nn.AlphaDropout(0.2)),
    "a patched function": lambda module, monkeypatch: monkeypatch.setattr(
        F, "dropout", lambda input, p=0.5, training=True, inplace=False: input * 3
    ),
    "a patched norm": lambda module, monkeypatch: monkeypatch.setattr(nn.LayerNorm, "forward", lambda self, x: x * 3),
    "float64": lambda module, monkeypatch: module.double(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_changed_runs_as_it_is(fused_mlp, device, counted, monkeypatch, change):
    plain = halves(device)
    fused = copy.deepcopy(plain)
    fused_mlp.fuse_mlps(fused)
    x = torch.randn(6, 32, device=device)
    step_of = lambda module: (torch.manual_seed(4), module(x.to(module.output.dense.weight.dtype)))[1]  # noqa: E731
    torch.testing.assert_close(step_of(fused), step_of(plain))
    assert counted == ["ending"]
    CHANGES[change](plain, monkeypatch), CHANGES[change](fused, monkeypatch)
    counted.clear()
    results = [step_of(module) for module in (fused, plain)]
    torch.testing.assert_close(*results)
    assert counted == []
    found = [
        torch.autograd.grad(result.square().sum(), module.parameters(), allow_unused=True)
        for result, module in zip(results, (fused, plain), strict=True)
    ]
    for got, right in zip(*found, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_same_bits_without_dropout(fused_mlp, device, dtype):
    module = halves(device, 0.0).to(dtype)
    fused_mlp.fuse_mlps(module)
    x = torch.randn(70, 32, device=device).to(dtype)
    recorded = module(x)
    with torch.no_grad():
        assert torch.equal(module(x), recorded)
    results = []
    module.output.register_forward_hook(lambda module, given, result: results.append(result.detach()))
    checkpoint(module, x.requires_grad_(), use_reentrant=True).sum().backward()
    assert torch.equal(*results)


def test_without_autograd_in_training_mode_masks_are_eager_s(fused_mlp, device):
    module = halves(device)
    fused = copy.deepcopy(module)
    fused_mlp.fuse_mlps(fused)
    x = torch.randn(70, 32, device=device)
    with torch.no_grad():
        torch.manual_seed(0)
        expected = module(x)
        torch.manual_seed(0)
        torch.testing.assert_close(fused(x), expected)


def test_a_broadcast_residual_and_compiled_code(fused_mlp, device):
    torch.manual_seed(0)
    end = transformers.models.bert.modeling_bert.BertSelfOutput(transformers.BertConfig(**TEXT)).to(device).eval()
    fused = copy.deepcopy(end)
    fused_mlp.fuse_mlps(nn.ModuleList([fused]))
    x, residual = torch.randn(5, 64, device=device), torch.randn(64, device=device)
    torch.testing.assert_close(fused(x, residual), end(x, residual))
    compiled = torch.compile(fused, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, x), end(x, x))
