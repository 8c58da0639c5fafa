"""Projections of one input and rotary embeddings: the ops, their autograd nodes, and the attentions that use them."""

import copy
import importlib

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers.models.llama import modeling_llama

from test_norm_training import dtypes_on, error
from test_norms_of_sums import assert_alike


@pytest.fixture(autouse=True)
def any_size(fused_mlp, monkeypatch):
    """Projections run as one op on every device and at any size."""
    monkeypatch.setattr(importlib.import_module(f"{fused_mlp.__name__}.dispatch"), "LEAST_PROJECTED", 0)


@pytest.fixture
def nodes(fused_mlp):
    return importlib.import_module(f"{fused_mlp.__name__}.autograd.attention")


@pytest.fixture
def counted(nodes, monkeypatch):
    """Counts the calls of both ops in a forward."""
    found = {"projected": 0, "rotated": 0}

    def counting(name, function):
        def call(*given):
            found[name] += 1
            return function(*given)

        return call

    for name in found:
        monkeypatch.setattr(nodes, name, counting(name, getattr(nodes, name)))
    return found


def turned(q, k, cos, sin):
    return modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)


def assert_no_less_exact(ours, by_torch, right):
    for got, eager, exact in zip(ours, by_torch, right, strict=True):
        assert (got.dtype, got.shape) == (eager.dtype, eager.shape)
        slack = 1.05 if got.numel() > 1000 else 2.0  # with few numbers, either error may be small by chance
        assert error(got, exact) <= max(slack * error(eager, exact), 6e-7)


def results(function, leaves, others, grads):
    leaves = [each.detach().requires_grad_() for each in leaves]
    found = function(*leaves, *others)
    return [*(each.detach() for each in found), *torch.autograd.grad(found, leaves, grads)]


HEADS = [(2, 4, 2, 40, 64), (1, 3, 3, 7, 6), (3, 2, 1, 1, 16), (2, 1, 1, 300, 128), (2, 2, 2, 0, 8), (1, 5, 5, 9, 2)]


@pytest.mark.parametrize("lies", ["tokens first", "heads first", "gaps", "column"])
@pytest.mark.parametrize("shape", HEADS, ids=str)
def test_rotary_is_no_less_exact_than_torch(nodes, device, shape, lies):
    batch, heads, of_keys, tokens, features = shape
    for dtype in dtypes_on(device):

        def made(count, dtype=dtype):
            if lies == "column":
                return torch.randn(batch, features, tokens, count, device=device).to(dtype).permute(0, 3, 2, 1)
            if lies == "gaps":
                return (
                    torch.randn(batch, tokens, count, features + 3, device=device).to(dtype)[..., 1:-2].transpose(1, 2)
                )
            found = torch.randn(batch, tokens, count, features, device=device).to(dtype).transpose(1, 2)
            return found if lies == "tokens first" else found.contiguous()

        leaves, grads = [made(heads), made(of_keys)], [made(heads), made(of_keys)]
        sizes = (1 if lies == "heads first" else batch, tokens, features)
        angles = [torch.randn(sizes, device=device).to(dtype) for _ in range(2)]
        ours, by_torch = (results(each, leaves, angles, grads) for each in (nodes.rotated, turned))
        wide = [[each.double() for each in some] for some in (leaves, angles, grads)]
        assert_no_less_exact(ours, by_torch, results(turned, *wide))
        for got, eager in zip(ours[:2], by_torch[:2], strict=True):
            strides = [[step for step, size in zip(each.stride(), each.shape) if size > 1] for each in (got, eager)]
            assert lies == "column" or got.numel() == 0 or strides[0] == strides[1]


def test_one_gradient_of_a_rotary_embedding(nodes, device):
    q, k = (torch.randn(2, heads, 5, 8, device=device) for heads in (3, 1))
    cos, sin = torch.randn(2, 2, 5, 8, device=device)
    for place in range(2):
        found = []
        for function in (nodes.rotated, turned):
            leaves = [each.clone().requires_grad_() for each in (q, k)]
            function(*leaves, cos, sin)[place].square().sum().backward()
            found.append([each.grad for each in leaves])
        assert found[0][1 - place] is None and found[1][1 - place] is None
        torch.testing.assert_close(found[0][place], found[1][place])


LAYERS = [
    ((2, 40), 64, (64, 64, 64)),
    ((300,), 96, (96, 32, 32)),
    ((3, 5), 7, (9, 3)),
    ((0,), 8, (8, 8)),
    ((1,), 33, (5, 64, 8)),
]


@pytest.mark.parametrize("biases", [True, False, "one"])
@pytest.mark.parametrize("sizes", LAYERS, ids=str)
def test_projections_are_no_less_exact_than_torch(nodes, device, sizes, biases):
    lead, width, features = sizes
    none = [None] * (3 - len(features))
    for dtype in dtypes_on(device):
        x = torch.randn(*lead, width, device=device).to(dtype)
        weights = [torch.randn(out, width, device=device).div(width**0.5).to(dtype) for out in features]
        with_bias = [biases is True or (biases == "one" and place == 0) for place in range(len(features))]
        given = [torch.randn(out, device=device).to(dtype) for out, has in zip(features, with_bias) if has]
        grads = [torch.randn(*lead, out, device=device).to(dtype) for out in features]

        def split(leaves, with_bias=with_bias):
            x, weights, rest = leaves[0], leaves[1 : 1 + len(features)], iter(leaves[1 + len(features) :])
            return x, weights, [next(rest) if has else None for has in with_bias]

        def by_node(*leaves):
            x, weights, biases = split(leaves)
            return nodes.projected(True, (x, *weights, *none, *biases, *none))

        def by_layers(*leaves):
            x, weights, biases = split(leaves)
            return tuple(F.linear(x, weight, bias) for weight, bias in zip(weights, biases))

        leaves = [x, *weights, *given]
        ours, by_torch = (results(each, leaves, (), grads) for each in (by_node, by_layers))
        right = results(by_layers, [each.double() for each in leaves], (), [each.double() for each in grads])
        assert_no_less_exact(ours, by_torch, right)
        assert all(map(torch.equal, ours[: len(features)], by_torch[: len(features)]))


@pytest.mark.parametrize("trained", ["x", "weights", "biases", "a weight", "x and a bias"])
@pytest.mark.parametrize("used", [(0, 1, 2), (2,), (0, 1)])
def test_gradients_of_some_projections(nodes, device, trained, used):
    """Gradients of frozen operands and of unused layers are None, as in torch, and all others are right."""
    wanted = {"x": (0,), "weights": (1, 2, 3), "biases": (4, 5, 6), "a weight": (2,), "x and a bias": (0, 6)}[trained]
    given = [
        torch.randn(3, 4, 8, device=device),
        *torch.randn(3, 6, 8, device=device),
        *torch.randn(3, 6, device=device),
    ]
    found = []
    for is_node in (True, False):
        leaves = [each.clone().requires_grad_(place in wanted) for place, each in enumerate(given)]
        x, *rest = leaves
        layers = nodes.projected(True, tuple(leaves)) if is_node else [*map(F.linear, (x,) * 3, rest[:3], rest[3:])]
        total = sum(layers[place].square().sum() for place in used)
        if total.requires_grad:
            total.backward()
        found.append([each.grad for each in leaves])
    for got, right in zip(*found, strict=True):
        assert (got is None or not got.any()) if right is None else torch.allclose(got, right, rtol=1e-4, atol=1e-5)


def test_gradients_of_gradients(nodes, device):
    given = [torch.randn(3, 8, device=device), *torch.randn(3, 8, 8, device=device), *torch.randn(3, 8, device=device)]
    angles = [torch.randn(1, 3, 4, device=device) for _ in range(2)]
    found = []
    for is_node in (True, False):
        leaves = [each.clone().requires_grad_() for each in given]
        x, *rest = (each * 1.0 for each in leaves)  # not leaves
        q, k, v = nodes.projected(True, (x, *rest)) if is_node else map(F.linear, (x,) * 3, rest[:3], rest[3:])
        q, k = (each.view(1, 3, 2, 4).transpose(1, 2) for each in (q, k))
        q, k = (nodes.rotated if is_node else turned)(q, k, *angles)
        total = (q * k).sum() + v.pow(3).sum()
        first = torch.autograd.grad(total, leaves, create_graph=True)
        found.append([*first, *torch.autograd.grad(sum(each.square().sum() for each in first), leaves)])
    for got, right in zip(*found, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-3, atol=1e-3)


def test_bad_operands_are_named(ops, device):
    q, angles, weight = torch.randn(2, 3, 5, 8), torch.randn(2, 5, 8), torch.randn(4, 8)
    q, angles, weight = q.to(device), angles.to(device), weight.to(device)
    with pytest.raises(RuntimeError, match="k must be"):
        ops.rotary(q, q[:1], angles, angles, False)
    with pytest.raises(RuntimeError, match="sin must be"):
        ops.rotary(q, q, angles, angles[:, :3], False)
    with pytest.raises(RuntimeError, match="even number of features"):
        ops.rotary(q[..., :7], q[..., :7], angles[..., :7], angles[..., :7], False)
    with pytest.raises(RuntimeError, match="weight must be"):
        ops.projections_forward(q, weight, weight[:, :3], None, None, None, None)
    with pytest.raises(RuntimeError, match="the same number of rows"):
        ops.projections_backward(q, q[:1], None, None, weight, weight, None, 1)


SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}
GQA = SIZES | {"num_key_value_heads": 2, "use_cache": False}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS = {  # with the number of calls of each op per forward
    "llama": (lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**GQA)), 2, 2),
    "qwen2": (lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**GQA)), 2, 2),
    "qwen3": (lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**GQA, head_dim=16)), 2, 2),
    "bert": (lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, **NO_DROPOUT)), 2, 0),
}


def pair(fused_mlp, device, name, dtype=torch.float32):
    torch.manual_seed(0)
    plain = MODELS[name][0]().to(device, dtype).train()
    fused = copy.deepcopy(plain)
    return plain, fused, fused_mlp.fuse_mlps(fused), torch.randint(3, 96, (2, 11), device=device)


def step(model, ids):
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None} | {"": loss.detach()}


@pytest.mark.parametrize("name", MODELS)
def test_models_train_and_infer_by_the_ops(fused_mlp, device, counted, name):
    plain, fused, report, ids = pair(fused_mlp, device, name)
    _, projected, rotated = MODELS[name]
    assert len(report.attentions) == 2 and all(each.fused for each in report.attentions)
    assert_alike(step(fused, ids), step(plain, ids))
    assert counted == {"projected": projected, "rotated": rotated}
    with torch.inference_mode():  # three layers take the host no longer than their op here
        torch.testing.assert_close(fused.eval()(ids).logits, plain.eval()(ids).logits, rtol=2e-4, atol=2e-5)
    assert counted == {"projected": projected, "rotated": 2 * rotated}
    fused(ids)  # eval mode with autograd on: likely no backward makes up for a node
    assert counted == {"projected": projected, "rotated": 3 * rotated}
    report.restore()
    assert torch.equal(fused(ids).logits, plain(ids).logits)
    assert counted == {"projected": projected, "rotated": 3 * rotated}


@pytest.mark.parametrize("change", ["hook", "class", "function", "autocast", "replaced"])
def test_what_changes_is_seen(fused_mlp, device, counted, monkeypatch, change):
    plain, fused, _, ids = pair(fused_mlp, device, "llama")
    seen, autocast = [], None
    for model in (plain, fused):
        attention = model.model.layers[0].self_attn
        if change == "hook":
            attention.k_proj.register_forward_hook(lambda module, given, result: seen.append(1) or result * 2)
        elif change == "class":
            kind = type("Twice", (nn.Linear,), {"forward": lambda self, x: 2 * F.linear(x, self.weight)})
            attention.k_proj.__class__ = kind
        elif change == "replaced":
            attention.k_proj = nn.Sequential(attention.k_proj, nn.Tanh())
        elif change == "autocast":
            autocast = torch.bfloat16
    if change == "function":
        monkeypatch.setattr(modeling_llama, "rotate_half", lambda x: -x)
    with torch.autocast(device.type, autocast, enabled=autocast is not None):
        found, expected = (step(model, ids) for model in (fused, plain))
    if autocast is None:
        assert_alike(found, expected)
    else:
        assert all(error(found[name], right) < 5e-2 for name, right in expected.items())
    assert len(seen) == (2 if change == "hook" else 0)
    assert counted["projected"] == {"function": 2, "autocast": 0}.get(change, 1)
    assert counted["rotated"] == {"function": 0, "autocast": 0}.get(change, 2)


def test_the_state_of_an_attention_is_explained(fused_mlp, device):
    _, fused, report, _ = pair(fused_mlp, device, "llama")
    attention = fused.model.layers[0].self_attn
    assert "2 x projections of one input, rotary embedding" in str(report)
    assert "projections of one input, rotary embedding" in str(fused_mlp.explain(attention))
    attention.k_proj.register_forward_hook(lambda *_: None)
    assert "k_proj" in str(fused_mlp.explain(attention))


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_a_step_keeps_no_more_than_eager(fused_mlp, device, name):
    plain, fused, _, ids = pair(fused_mlp, device, name)
    kept = []
    for model in (fused, plain):
        saved = {}

        def note(tensor, saved=saved):
            storage = tensor.untyped_storage()
            saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            model(input_ids=ids, labels=ids)
        kept.append(sum(saved.values()))
    assert kept[0] <= kept[1]
