"""Llama 4's mixture, whose class multiplies all tokens by all experts: fused, only the chosen experts compute."""

import copy
import sys
import unittest.mock

import pytest
import torch
from transformers import Llama4TextConfig
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_local_experts": 5}


def module_of(fused_mlp):
    return sys.modules[f"{fused_mlp.__name__}.models.experts.known.llama4"]


@pytest.fixture(autouse=True)
def any_number_of_tokens(fused_mlp, monkeypatch, request):
    """Disables the rule on when routing pays in tests that do not set the number of tokens."""
    if "tokens" not in request.fixturenames:
        monkeypatch.setattr(module_of(fused_mlp), "_pays", lambda *_: True)


def pair(fused_mlp, device, dtype=torch.float32, top_k=1, activation="silu"):
    """A block and its fused copy."""
    block = Llama4TextMoe(Llama4TextConfig(**SIZES, num_experts_per_tok=top_k, hidden_act=activation))
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    block = block.to(device, dtype)
    fused = copy.deepcopy(block)
    fused_mlp.fuse_mlps(fused)
    return block, fused


def chosen(fused_mlp):
    """Watches whether only the chosen experts compute."""
    module = module_of(fused_mlp)
    return unittest.mock.patch.object(module, "_routed", wraps=module._routed)


def differ(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("top_k", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_result_and_gradients(fused_mlp, device, dtype, top_k, activation):
    block, fused = pair(fused_mlp, device, dtype, top_k, activation)
    x = torch.randn(3, 37, 64, device=device).to(dtype)
    grad = torch.randn(3 * 37, 64, device=device).to(dtype)

    def computed(module, given=None):
        leaf = (x if given is None else given).clone().requires_grad_()
        out, logits = module(leaf)
        wanted = [leaf, *module.parameters()]
        return [out, logits, *torch.autograd.grad(out, wanted, grad.to(out.dtype))]

    with chosen(fused_mlp) as routed:
        found = computed(fused)
        with torch.no_grad():
            inferred, _ = fused.eval()(x)
    assert routed.call_count == 2
    # Rounding differs in order; errors against float64 are limited by those of the block as it was written.
    exact = [each.double() for each in computed(copy.deepcopy(block).double(), x.double())]
    as_written = computed(block)
    assert torch.equal(found[1], as_written[1])
    assert differ(inferred.double(), exact[0]) <= 2 * max(differ(as_written[0].double(), exact[0]), 1e-6)
    if dtype == torch.bfloat16 and top_k > 1:
        return  # in float64, a token near a tie goes to another expert
    for mine, theirs, wanted in zip(found, as_written, exact, strict=True):
        assert differ(mine.double(), wanted) <= 2 * max(differ(theirs.double(), wanted), 1e-6)


def test_experts_that_nobody_chose(fused_mlp, device):
    """Experts that no token chose get gradients of zeros, as in the class itself."""
    block, fused = pair(fused_mlp, device)
    for module in (block, fused):
        with torch.no_grad():
            module.router.weight.zero_()[2] = 1.0
    x = torch.rand(1, 9, 64, device=device)
    for module in (block, fused):
        module(x)[0].sum().backward()
    assert fused.experts.down_proj.grad[2].any() and not fused.experts.down_proj.grad[[0, 1, 3, 4]].any()
    assert differ(fused.experts.gate_up_proj.grad, block.experts.gate_up_proj.grad) <= 1e-5


def test_explained(fused_mlp, device):
    """The report has the block and its shared expert, an ordinary MLP, but no entry for its experts."""
    block, fused = pair(fused_mlp, device)
    report = fused_mlp.fuse_mlps(torch.nn.Sequential(block))
    found = {each.path: (each.extent, each.pattern) for each in report.modules}
    assert found.pop("0") == ("full", "experts") and [*found] == ["0.shared_expert"], found
    assert fused_mlp.explain(fused).implementation == "fused"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda block: block.experts.register_forward_hook(lambda *_: None), "experts with"),
        (lambda block: block.router.register_forward_hook(lambda *_: None), "router with"),
        (lambda block: setattr(block.router, "top_k", 9), "9 of 5 experts"),
        (lambda block: setattr(block.experts, "forward", lambda x: x), "experts with"),
    ],
)
def test_what_runs_as_written(fused_mlp, device, change, words):
    _, fused = pair(fused_mlp, device)
    change(fused)
    assert words in str(fused_mlp.explain(fused))
    if words.startswith("9"):
        return
    with chosen(fused_mlp) as routed:
        fused(torch.randn(1, 7, 64, device=device))
    assert routed.call_count == 0


def test_another_source_is_left(fused_mlp, device):
    class Other(Llama4TextMoe):
        pass

    block = Other(Llama4TextConfig(**SIZES, num_experts_per_tok=1)).to(device)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    x = torch.randn(1, 7, 64, device=device)
    expected = block(x)[0]
    fused_mlp.fuse_mlps(block)
    with chosen(fused_mlp) as routed:
        assert differ(block(x)[0], expected) <= 1e-5
    assert routed.call_count == 0


def test_patched(fused_mlp, device, monkeypatch):
    _, fused = pair(fused_mlp, device)
    monkeypatch.setattr(type(fused.experts), "forward", lambda self, x: torch.zeros_like(x))
    with chosen(fused_mlp) as routed:
        fused(torch.randn(1, 7, 64, device=device))
    assert routed.call_count == 0


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("tokens", [1, 60, 2000])
def test_what_pays(fused_mlp, device, tokens, trains):
    """Few tokens run as written if all experts take less time: on a CPU by the work saved, on a GPU in training."""
    _, fused = pair(fused_mlp, device, torch.float32 if device.type == "cpu" else torch.bfloat16)
    fused.train(trains)
    x = torch.randn(1, tokens, 64, device=device, dtype=fused.router.weight.dtype)
    with chosen(fused_mlp) as routed, torch.set_grad_enabled(trains):
        fused(x)
    if device.type == "cpu":
        taken = tokens >= (2000 if trains else 60)
    elif torch.cuda.get_device_capability() == (9, 0):
        taken = not trains or tokens != 60
    else:
        taken = tokens == 2000
    assert routed.called == taken
