"""Fused models under torch.func, checkpointing, higher derivatives, and hooks on tensors that autograd saves."""

import copy
import sys

import peft
import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.functional import jacobian
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, stack_module_state, vmap
from torch.utils.checkpoint import checkpoint

import mixtures
import tiny_models
from modules import Gated, Intermediate, PackedGated, Plain, TanhGelu
from safety import KINDS, Blocks, assert_close, assert_same, fuse, kinds, llama, outcome, pair, ways, x_of

modes = pytest.mark.parametrize("with_grad", [False, True], ids=["no_grad", "grad"])


def parameters_like(model):
    return {name: 0.3 * torch.randn_like(parameter) for name, parameter in model.named_parameters()}


@modes
@ways
@kinds
def test_functional_call(fused_mlp, device, way, kind, with_grad):
    """functional_call uses the given parameters: plain tensors, parameters, and values computed from others."""
    model, fused = pair(fused_mlp, way, kind(bias=True).to(device))
    x, given = x_of(device), parameters_like(model)
    with torch.set_grad_enabled(with_grad):
        for values in (
            given,
            {name: nn.Parameter(value) for name, value in given.items()},
            {name: 2 * nn.Parameter(value) for name, value in given.items()},
        ):
            assert_close(functional_call(fused, values, (x,)), functional_call(model, values, (x,)))
    assert_same(model, fused, x)


@modes
@ways
@kinds
def test_vmap(fused_mlp, device, way, kind, with_grad):
    """vmap over inputs and over the weights of an ensemble gives the unfused result."""
    model, fused = pair(fused_mlp, way, kind(bias=True).to(device))
    stacked, _ = stack_module_state([kind(bias=True).to(device) for _ in range(3)])
    x = x_of(device, 4, 5)
    with torch.set_grad_enabled(with_grad):
        assert_close(vmap(fused)(x), vmap(model)(x))
        assert_close(vmap(fused, in_dims=1)(x), vmap(model, in_dims=1)(x))
        got, expected = (
            vmap(lambda weights, module=module: functional_call(module, weights, (x,)))(stacked)
            for module in (fused, model)
        )
        assert_close(got, expected)


@kinds
def test_vmap_is_of_torch(fused_mlp, device, kind, tell_ops, recwarn, monkeypatch):
    """vmap runs torch's operations and no op once per sample, and torch gives no warning."""
    names = []
    model, fused = pair(fused_mlp, "fuse_mlps", kind(bias=True).to(device))
    shortcut = sys.modules[f"{fused_mlp.__name__}.models.running.shortcut"]
    monkeypatch.setattr(shortcut.forwards, "fused", None)  # raises if anything looks for the reason
    monkeypatch.setattr(shortcut, "_is_asked_again", None)
    stacked, _ = stack_module_state([model, model])
    tell_ops(lambda name, _: names.append(name))
    with torch.no_grad():
        x = x_of(device, 2, 3)
        assert torch.equal(vmap(fused)(x), vmap(model)(x))
        assert_close(*(vmap(lambda w, each=each: functional_call(each, w, (x,)))(stacked) for each in (fused, model)))
    assert names == [] and len(recwarn) == 0


@pytest.mark.parametrize("batched", ["weights", "routing", "gradients"])
def test_vmap_of_experts(fused_mlp, device, batched, recwarn):
    x, index = torch.randn(6, 16, device=device), torch.randint(-1, 5, (6, 2), device=device)
    shares, up = torch.rand(6, 2, device=device), torch.randn(4, 24, 16, device=device)
    down = torch.randn(4, 8, 12, device=device)
    if batched == "weights":
        ups = torch.stack([up, 2 * up, -up])
        got = vmap(lambda up: fused_mlp.experts_mlp(x, index, shares, up, down))(ups)
        expected = [fused_mlp.experts_mlp(x, index, shares, up, down) for up in ups]
    elif batched == "routing":
        given = [torch.stack([each, each.flip(0), each.roll(1, 0)]) for each in (x, index, shares)]
        got = vmap(lambda *given: fused_mlp.experts_mlp(*given, up, down))(*given)
        expected = [fused_mlp.experts_mlp(*each, up, down) for each in zip(*given, strict=True)]
    else:
        got = jacrev(lambda x: fused_mlp.experts_mlp(x, index, shares, up, down))(x)
        expected = jacobian(lambda x: fused_mlp.experts_mlp(x, index, shares, up, down), x)
    assert_close(got, expected if batched == "gradients" else torch.stack(expected))
    assert len(recwarn) == 0


def experts_of(fused_mlp, device):
    index, shares = torch.randint(-1, 5, (3, 2), device=device), torch.rand(3, 2, device=device)
    up, down = torch.randn(4, 24, 32, device=device), torch.randn(4, 8, 12, device=device)
    biases = torch.randn(4, 24, device=device), torch.randn(4, 8, device=device)
    return (lambda x, *given: fused_mlp.experts_mlp(x, index, *given)), (shares, up, down, *biases)


@pytest.mark.parametrize("memory", ["activations", "recompute"])
@pytest.mark.parametrize("kind", [*KINDS, "experts"])
def test_batched_gradients(fused_mlp, device, kind, memory):
    """Batched gradients by the older vmap of torch.autograd equal gradients computed one by one."""
    x = x_of(device, 3)
    if kind == "experts":
        function, weights = experts_of(fused_mlp, device)
        calls = [function, function]
    else:
        model = kind(TanhGelu, bias=True).to(device)
        fused = copy.deepcopy(model)
        assert fused_mlp.fuse_mlps(fused, memory=memory).fused
        weights = tuple(parameter.detach() for parameter in model.parameters())
        names = [name for name, _ in model.named_parameters()]
        calls = [
            lambda x, *given, each=each: functional_call(each, dict(zip(names, given, strict=True)), (x,))
            for each in (fused, model)
        ]
    assert_close(jacobian(calls[0], (x, *weights), vectorize=True), jacobian(calls[1], (x, *weights)))
    inputs = [each.clone().requires_grad_() for each in (x, *weights)]
    results = [call(*inputs) for call in calls]
    seeds = torch.randn(5, *results[0].shape, device=device)
    got = torch.autograd.grad(results[0], inputs, seeds, is_grads_batched=True)
    expected = [torch.autograd.grad(results[1], inputs, seed, retain_graph=True) for seed in seeds]
    assert_close(got, [torch.stack(each) for each in zip(*expected, strict=True)])


@ways
@kinds
def test_derivatives_by_torch_func(fused_mlp, device, way, kind):
    """Per-sample gradients, both Jacobians, forward-mode products and second derivatives match the unfused model's."""
    model, fused = pair(fused_mlp, way, kind(TanhGelu, bias=True).to(device))
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    x, one = x_of(device, 4), x_of(device, 1)

    def all_of(module):
        def loss(weights, x):
            return functional_call(module, weights, (x,)).square().sum()

        return [
            vmap(grad(loss), in_dims=(None, 0))(weights, x),
            jacrev(module)(one),
            jacfwd(module)(one),
            jvp(module, (x,), (torch.ones_like(x),)),
            hessian(lambda x: module(x).square().sum())(one),
        ]

    for got, expected in zip(all_of(fused), all_of(model), strict=True):
        assert_close(got, expected, 1e-3)


@modes
@ways
@kinds
def test_forward_mode_of_frozen_weights(fused_mlp, device, way, kind, with_grad):
    """Forward-mode tangents are right even if no tensor requires a gradient."""
    model, fused = pair(fused_mlp, way, kind(bias=True).to(device).requires_grad_(False))
    x, tangent = x_of(device), x_of(device)
    with torch.set_grad_enabled(with_grad):
        assert_close(jvp(fused, (x,), (tangent,)), jvp(model, (x,), (tangent,)))
        with forward_ad.dual_level():
            x = forward_ad.make_dual(x, tangent)
            assert_close(*(forward_ad.unpack_dual(module(x)).tangent for module in (fused, model)))


@kinds
def test_second_derivatives(fused_mlp, device, kind):
    _, fused = pair(fused_mlp, "fuse_mlps", kind(TanhGelu, sizes=(9, 6, 4)[: 2 if kind is Intermediate else 3]))
    fused.to(device, torch.float64)
    x = torch.randn(2, 9, device=device, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(fused, x)
    assert torch.autograd.gradgradcheck(fused, x)


@ways
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing(fused_mlp, device, way, use_reentrant):
    """Checkpointing a whole model or a single MLP gives the unfused gradients, with dropout that must repeat itself."""
    model, ids = llama(device, attention_dropout=0.5)
    model, fused = pair(fused_mlp, way, model.train())
    for candidate in (model, fused):
        candidate.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
        candidate.enable_input_require_grads()
    assert_same(model, fused, ids)

    module, fused = pair(fused_mlp, way, Gated(bias=True).to(device))
    outcomes = []
    for candidate in (fused, module):
        x = torch.linspace(-2, 2, 96, device=device).view(3, 32).requires_grad_()
        checkpoint(candidate, x, use_reentrant=use_reentrant).square().sum().backward()
        outcomes.append([x.grad, *(parameter.grad for parameter in candidate.parameters())])
    assert_close(*outcomes)


@ways
@pytest.mark.parametrize("watching", [torch.autograd.graph.save_on_cpu, torch.autograd.detect_anomaly])
def test_what_watches_autograd(fused_mlp, device, way, watching):
    """Gradients are unchanged while save_on_cpu moves saved tensors or detect_anomaly inspects computed ones."""
    model, fused = pair(fused_mlp, way, Blocks().to(device))
    x = x_of(device)
    expected = outcome(model, x)
    with watching():
        assert_close(outcome(fused, x), expected)


class NoGradient(torch.autograd.Function):
    """As of an op without a derivative, the backward passes no gradient on."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


@pytest.mark.parametrize(("name", "adapted"), [("Llama", False), ("BERT", False), ("mixtral", True)])
def test_no_gradient_arrives(fused_mlp, device, name, adapted):
    """A parameter whose result gets no gradient has none either, so an optimizer leaves it alone."""
    model = mixtures.build(name).to(device) if name in mixtures.MODELS else tiny_models.build(name, device)[0]
    if adapted:
        config = peft.LoraConfig(target_modules="all-linear", init_lora_weights=False)
        model = peft.get_peft_model(model, config)
    fused = copy.deepcopy(model)
    fused_mlp.fuse_mlps(fused)
    ids = torch.randint(3, 60, (2, 9), device=device)
    for path, _ in model.named_modules():
        if not any(word in path for word in ("layers.1", "layer.1")) or "lora" in path:
            continue
        found = []
        for each in (model, fused):
            each.zero_grad()
            hook = each.get_submodule(path).register_forward_hook(
                lambda part, given, out: NoGradient.apply(out) if isinstance(out, torch.Tensor) else out
            )
            each(ids)[0].sum().backward()
            hook.remove()
            found.append([key for key, parameter in each.named_parameters() if parameter.grad is None])
        assert found[0] == found[1], path


@ways
@kinds
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_autocast(fused_mlp, device, way, kind, dtype):
    model, fused = pair(fused_mlp, way, kind(bias=True).to(device))
    with torch.autocast(device.type, dtype):
        assert_same(model, fused, x_of(device), tolerance=3e-2)
        assert_same(model, fused, x_of(device).to(dtype), tolerance=3e-2)


@ways
def test_inference_mode(fused_mlp, device, way):
    """A model fused inside or outside of inference mode runs in both."""
    model, ids = llama(device)
    _, outside = pair(fused_mlp, way, model)
    inside = copy.deepcopy(model)
    with torch.inference_mode():
        fuse(fused_mlp, way, inside)
        assert_close(inside(ids).logits, model(ids).logits)
        assert_close(outside(ids).logits, model(ids).logits)
        module, x = Gated().to(device), x_of(device)
    assert_same(model, inside, ids)
    assert_same(model, outside, ids)
    with torch.no_grad():
        assert_close(fuse(fused_mlp, way, copy.deepcopy(module))(x), module(x))


@pytest.mark.parametrize("kind", [Gated, PackedGated, Plain])
def test_training_to_the_same_weights(fused_mlp, device, kind):
    """Twenty steps of an optimiser that keeps state reach the unfused weights."""
    model, fused = pair(fused_mlp, "fuse_mlps", Blocks(kind).to(device))
    x = x_of(device)
    for candidate in (model, fused):
        optimizer = torch.optim.AdamW(candidate.parameters(), lr=1e-2, eps=1e-3)
        for _ in range(20):
            optimizer.zero_grad()
            (candidate(x) - x.flip(-1)).square().mean().backward()
            optimizer.step()
    assert_close(dict(fused.named_parameters()), dict(model.named_parameters()), 1e-2)
