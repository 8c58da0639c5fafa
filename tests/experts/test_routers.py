"""The routers of mixtures: the choice of experts and their weights, as transformers computes them."""

import copy
import inspect
import sys
import textwrap

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

import machine
import mixtures
import reference
from written import with_forward

MODELS = ["qwen3_moe", "qwen2_moe", "qwen3_vl_moe_text", "mixtral"]


def routers(model):
    return [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]


def pair(fused_mlp, device, model_type="qwen3_moe", **options):
    model = mixtures.build(model_type, num_hidden_layers=1, **options).to(device)
    fused = copy.deepcopy(model)
    report = fused_mlp.fuse_mlps(fused)
    assert [entry.extent for entry in report.modules if entry.pattern == "router"] == ["full"]
    return routers(model)[0], routers(fused)[0]


def taken(fused_mlp, monkeypatch):
    """Records the calls of the op from now on."""
    module, calls = sys.modules[f"{fused_mlp.__name__}.models.experts.routers"], []
    op = module.native.top_k_router
    monkeypatch.setattr(module.native, "top_k_router", lambda *given: calls.append(given) or op(*given))
    return calls


def assert_same(got, expected):
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
    torch.testing.assert_close(got[0], expected[0], rtol=0, atol=0)
    torch.testing.assert_close(got[1], expected[1], rtol=1e-2 if got[1].dtype == torch.bfloat16 else 1e-5, atol=1e-7)
    assert torch.equal(got[2], expected[2])


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("model_type", MODELS)
def test_routers(fused_mlp, device, monkeypatch, model_type, normalized):
    plain, fused = pair(fused_mlp, device, model_type, norm_topk_prob=normalized)
    calls = taken(fused_mlp, monkeypatch)
    with torch.no_grad():
        for rows in (1, 7, 300):
            x = torch.randn(rows, 32, device=device)
            assert_same(fused(x), plain(x))
        x = torch.randn(2, 3, 64, device=device)[..., ::2]  # three-dimensional and strided
        assert_same(fused(x), plain(x))
    assert len(calls) == 4


def test_what_trains_is_asked_nothing(fused_mlp, device, monkeypatch):
    """The op has no autograd, so under autograd the class's forward runs at once, patched or not."""
    plain, fused = pair(fused_mlp, device)
    x, module = torch.randn(5, 32, device=device), sys.modules[f"{fused_mlp.__name__}.models.experts.routers"]
    monkeypatch.setattr(module, "_routed", None)
    for got, expected in zip(fused(x), plain(x), strict=True):
        assert torch.equal(got, expected) and got.requires_grad == expected.requires_grad
    with monkeypatch.context() as patch:
        patch.setattr(type(plain), "forward", lambda self, x: x * 2)
        assert torch.equal(fused(x), x * 2)


@pytest.mark.parametrize("experts", [8, 33, 128, 160, 512])
def test_sizes(fused_mlp, device, experts):
    """The op chooses torch's experts; in bfloat16, on a GPU too, both take the first of many equal logits."""
    plain, fused = pair(fused_mlp, device)
    top_k = 8
    for router in (plain, fused):
        router.weight, router.top_k = nn.Parameter(torch.randn(experts, 32, device=device)), top_k
    fused.weight.data.copy_(plain.weight.data)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(65, 32, device=device, dtype=dtype)
        with torch.no_grad():
            got, expected = fused.to(dtype)(x), plain.to(dtype)(x)
        torch.testing.assert_close(got[1], expected[1], rtol=1e-2, atol=1e-6)
        ours, theirs = (found[2].sort(-1).values for found in (got, expected))
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("experts", "top_k"), [(6, 2), (8, 8), (64, 8), (128, 2), (512, 8)])
@pytest.mark.parametrize("alike", ["all", "some", "pairs", "nearly", "no numbers"])
def test_equal_probabilities(fused_mlp, device, experts, top_k, alike):
    """The op chooses torch's experts among equal probabilities, on a CPU in torch's order too."""
    plain, fused = pair(fused_mlp, device)
    weight = torch.randn(experts, 32, device=device)
    if alike == "all":
        weight.zero_()
    elif alike == "some":
        weight[::3] = weight[0]
    elif alike == "pairs":
        weight[1::2] = weight[::2]
    elif alike == "nearly":
        weight = weight[:1] * (1 + torch.rand(experts, 1, device=device) * 1e-7)
    for router in (plain, fused):
        router.weight, router.top_k = nn.Parameter(weight.clone()), top_k
    x = torch.randn(33, 32, device=device)
    if alike == "no numbers":
        x[7, 3] = x[8, 4] = float("nan")
    with torch.no_grad():
        got, expected = fused(x), plain(x)
    torch.testing.assert_close(got[1], expected[1], rtol=1e-5, atol=1e-7, equal_nan=True)
    if device.type == "cpu":
        assert torch.equal(got[2], expected[2])
    elif alike != "nearly":  # there the last digit of an exponential decides
        assert torch.equal(*(found[2].sort(-1).values for found in (got, expected)))


def test_what_is_left(fused_mlp, device, monkeypatch):
    """A router runs as written under autograd, autocast, transforms and patches, and in another dtype."""
    plain, fused = pair(fused_mlp, device)
    calls, x = taken(fused_mlp, monkeypatch), torch.randn(5, 32, device=device)
    gradients = []
    for router in (plain, fused):
        (weight,) = torch.autograd.grad(router(x)[1].square().sum(), router.weight)
        gradients.append(weight)
    assert torch.equal(*gradients)
    with torch.no_grad():
        with torch.autocast(device.type, torch.bfloat16):
            assert_same(fused(x), plain(x))
        assert_same(torch.func.vmap(fused)(x.view(1, 5, 32)), torch.func.vmap(plain)(x.view(1, 5, 32)))
        with monkeypatch.context() as patch:
            patch.setattr(F, "softmax", lambda x, dtype=None, dim=-1: x.sigmoid())
            assert_same(fused(x), plain(x))
        with monkeypatch.context() as patch:
            patch.setattr(type(plain), "forward", lambda self, x: x * 2)
            assert torch.equal(fused(x), x * 2)
            assert fused_mlp.explain(fused).implementation == "original"
        for router in (plain, fused):
            router.double()
        assert_same(fused(x.double()), plain(x.double()))
        assert not calls
        for router in (plain, fused):
            router.float().top_k = 3
        assert_same(fused(x), plain(x))
    assert len(calls) == 1


def test_hooks_and_compilation(fused_mlp, device, monkeypatch):
    plain, fused = pair(fused_mlp, device)
    x, seen = torch.randn(5, 32, device=device), []
    with torch.no_grad():
        torch.compiler.reset()
        assert_same(torch.compile(fused, fullgraph=True, backend="aot_eager")(x), plain(x))
        fused.register_forward_hook(lambda module, given, out: seen.append(out[0]))
        fused(x)
    assert torch.equal(seen[0], plain(x)[0])


def test_a_patched_softmax_is_compiled(fused_mlp, device, monkeypatch):
    """A compiled router follows a softmax that is patched after torch.compile saw it."""
    plain, fused = pair(fused_mlp, device)
    x = torch.randn(5, 32, device=device)
    torch.compiler.reset()
    compiled = torch.compile(fused, backend="eager")
    with torch.no_grad():
        assert_same(compiled(x), plain(x))
        monkeypatch.setattr(F, "softmax", lambda x, dtype=None, dim=-1: x.to(dtype).sigmoid())
        assert_same(compiled(x), plain(x))


SIGMOIDS = ["deepseek_v3", "glm4_moe", "nemotron_h", "dots1", "exaone_moe"]


@pytest.mark.parametrize("model_type", SIGMOIDS)
def test_sigmoids_are_read(fused_mlp, model_type):
    """Reading a sigmoid router gives the names that the code of its class looks up."""
    model = mixtures.build(model_type)
    router = next(module for module in model.modules() if type(module).__name__.endswith("TopkRouter"))
    module = sys.modules[f"{fused_mlp.__name__}.models.experts.routers"]
    found = module._forms[module._method_of(router)].router
    names = ("hidden_dim", "top_k", router.norm_topk_prob, "num_experts", "num_group", "topk_group")
    assert tuple(found) == (*names, "routed_scaling_factor")


def other_forms():
    """DeepSeek's forward with a single place changed in each."""
    source = textwrap.dedent(inspect.getsource(DeepseekV3TopkRouter.forward).partition(":\n")[2])
    for old, new in (
        (".sigmoid()", ".tanh()"),
        ("scores + self", "scores - self"),
        ("topk(2, dim=-1)", "topk(3, dim=-1)"),
        ("group_mask.scatter_(1, group_idx, 1)", "group_mask.scatter_(1, group_idx, 0)"),
        ("~score_mask.bool()", "score_mask.bool()"),
        ('float("-inf")', "0.0"),
        ("scores.gather", "scores_for_choice.gather"),
        ("1e-20", "1e-6"),
        ("* self.routed_scaling_factor", "+ self.routed_scaling_factor"),
        ("zeros_like(group_scores)", "ones_like(group_scores)"),
    ):
        assert source.count(old) == 1, old
        yield pytest.param(source.replace(old, new), id=new)


@pytest.mark.parametrize("source", list(other_forms()))
def test_another_form_is_not_taken(fused_mlp, source):
    kind = with_forward(DeepseekV3TopkRouter, source, "hidden_states")
    config = mixtures.build("deepseek_v3").config
    module = sys.modules[f"{fused_mlp.__name__}.models.experts.routers"]
    assert module._method_of(kind(config)) is None
    assert module._method_of(DeepseekV3TopkRouter(config)) is not None


@pytest.mark.skipif(machine.device_type() != "cuda", reason="there are kernels on GPUs alone")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("experts", "top_k", "groups", "top_groups", "width"),
    [
        (16, 2, 4, 2, 32),
        (256, 8, 8, 4, 520),
        (160, 6, 1, 1, 64),
        (384, 8, 1, 1, 24),
        (64, 8, 32, 9, 100),
        (6, 6, 3, 3, 8),
    ],
)
def test_sigmoids(fused_mlp, device, monkeypatch, dtype, experts, top_k, groups, top_groups, width):
    """The op's weights match float64, and its experts those of the class's own forward."""
    config = mixtures.build("deepseek_v3").config
    for name, value in (("num_local_experts", experts), ("num_experts_per_tok", top_k), ("hidden_size", width)):
        setattr(config, name, value)
    config.n_group, config.topk_group, config.routed_scaling_factor = groups, top_groups, 2.5
    plain = DeepseekV3TopkRouter(config).to(device)
    plain.weight.data.normal_(std=width**-0.5)
    plain.e_score_correction_bias.normal_(std=0.1)
    plain = plain.to(dtype).eval()
    fused, module = copy.deepcopy(plain), sys.modules[f"{fused_mlp.__name__}.models.experts.routers"]
    fused_mlp.fuse_mlps(fused)
    calls, op = [], module.native.sigmoid_router
    monkeypatch.setattr(module.native, "sigmoid_router", lambda *given: calls.append(given) or op(*given))
    for tokens in (1, 2, 7, 65, 300):
        x = torch.randn(tokens, width, device=device, dtype=dtype)
        with torch.no_grad(), reference.poisoned_memory(device):
            (logits, weights, index), expected = fused(x), plain(x)
        exact = x.double() @ plain.weight.double().t()
        scores = exact.sigmoid()
        torch.testing.assert_close(logits.double(), exact, rtol=1e-5, atol=1e-5)
        assert logits.dtype == weights.dtype == torch.float32 and index.dtype == torch.int64
        shares = scores.gather(1, index)
        shares = shares / shares.sum(-1, keepdim=True) * 2.5
        torch.testing.assert_close(weights.double(), shares, rtol=1e-5, atol=1e-6)
        # If two scores are within rounding of each other, either choice is right.
        differ = (index.sort(-1).values != expected[2].sort(-1).values).any(-1)
        assert differ.sum() <= tokens // 50
    assert len(calls) == 5


@pytest.mark.skipif(machine.device_type() != "cuda", reason="there are kernels on GPUs alone")
def test_sigmoids_that_are_equal(fused_mlp, device):
    """The op takes the first of equal experts and groups, as torch.topk does, and NaN before numbers."""
    op = sys.modules[f"{fused_mlp.__name__}.backends.native"].sigmoid_router
    x, weight = torch.randn(5, 64, device=device), torch.zeros(16, 64, device=device)
    bias = torch.zeros(16, device=device)
    _, weights, index = op(x, weight, bias, 4, 4, 2, True, 1.0)
    assert torch.equal(index.sort(-1).values, torch.arange(4, device=device).expand(5, 4))
    torch.testing.assert_close(weights, torch.full((5, 4), 0.25, device=device))
    bias[9:11] = 1.0
    _, _, index = op(x, weight, bias, 3, 4, 1, True, 1.0)
    assert torch.equal(index, torch.tensor([[9, 10, 8]], device=device).expand(5, 3))
    x[2] = float("nan")
    _, weights, index = op(x, weight, bias, 3, 4, 2, True, 1.0)
    assert weights[2].isnan().all() and (index >= 0).all() and (index < 16).all()


@pytest.mark.skipif(machine.device_type() != "cuda", reason="there are kernels on GPUs alone")
def test_what_the_op_of_sigmoids_does_not_take(fused_mlp, device):
    op = sys.modules[f"{fused_mlp.__name__}.backends.native"].sigmoid_router
    x, weight, bias = (torch.randn(*size, device=device) for size in ((5, 64), (16, 64), (16,)))
    for given, words in (
        ((x, weight, bias[:8], 2, 4, 2), "bias must be"),
        ((x, weight, bias, 17, 4, 2), "top_k must be"),
        ((x, weight, bias, 2, 3, 2), "groups must be"),
        ((x, weight, bias, 2, 16, 2), "groups must be"),
        ((x, weight, bias, 2, 4, 5), "top_groups must be"),
    ):
        with pytest.raises(RuntimeError, match=words):
            op(*given, True, 1.0)
