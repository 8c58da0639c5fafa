"""Mixture blocks, router and experts with norm and residual, as one direct call: its results, and when it runs."""

import copy
import gc
import sys
import types
import weakref

import accelerate
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts, Qwen3MoeMLP, Qwen3MoeTopKRouter

import machine
import mixtures
from test_mixture_models import error

MODELS = ["qwen3_moe", "mixtral", "olmoe", "qwen3_vl_moe_text"]


class Calls:
    """The compiled checks, with a count of the calls that computed a result."""

    def __init__(self, plain):
        self.plain, self.made = plain, {"mixture": 0, "block_of": 0}

    def __getattr__(self, name):
        return getattr(self.plain, name)

    def mixture(self, *given):
        return self._counted("mixture", given)

    def block_of(self, *given):
        return self._counted("block_of", given)

    def _counted(self, name, given):
        result = getattr(self.plain, name)(*given)
        self.made[name] += type(result) is torch.Tensor  # otherwise it names a part that has to be called first
        return result


@pytest.fixture
def calls(fused_mlp, monkeypatch):
    found = None
    for name in ("models.experts.blocks", "models.running.blocks"):
        module = sys.modules[f"{fused_mlp.__name__}.{name}"]
        found = found or Calls(module._plain)
        monkeypatch.setattr(module, "_plain", found)
    return found


def layer_of(model):
    return next(module for module in model.modules() if type(module).__name__.endswith("DecoderLayer"))


def pair(fused_mlp, device, model_type="qwen3_moe", **options):
    """A model and its fused copy, warmed up by a few calls."""
    model = mixtures.build(model_type, num_hidden_layers=1, **options).to(device).eval()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data.normal_(std=0.3)
    fused = copy.deepcopy(model)
    for each in (model, fused):
        if type(each)._can_set_experts_implementation():
            each.set_experts_implementation("eager")
    fused_mlp.fuse_mlps(fused)
    with torch.no_grad():
        for _ in range(4):
            layer_of(fused).mlp(torch.randn(1, 3, 32, device=device, dtype=model.dtype))
    return model, fused


def bound(dtype):
    return 1e-5 if dtype == torch.float32 else 2e-2


def dtypes(device):
    # GPUs have no kernels for experts in float32, and CPUs none for routers in bfloat16.
    return [torch.float32] if device.type == "cpu" else [torch.bfloat16, torch.float16]


@pytest.fixture
def dtype(device):
    return dtypes(device)[0]


@pytest.mark.parametrize("model_type", MODELS)
def test_blocks(fused_mlp, device, calls, model_type):
    """A block runs as one call, alone and with the norm and residual of its layer."""
    for dtype in dtypes(device):
        model, fused = pair(fused_mlp, device, model_type, dtype=dtype)
        plain, ours, before = layer_of(model), layer_of(fused), dict(calls.made)
        with torch.no_grad():
            for shape in ((1, 1), (2, 1), (1, 5), (3, 40)):
                x = torch.randn(*shape, 32, device=device, dtype=dtype)
                assert error(ours.mlp(x), plain.mlp(x)) < bound(dtype)
        assert calls.made["mixture"] == before["mixture"] + 4
        with torch.inference_mode():
            ids = torch.randint(90, (2, 7), device=device)
            assert error(fused(ids)[0], model(ids)[0]) < bound(dtype)
        assert calls.made["block_of"] == before["block_of"] + 1


class SharedBlock(nn.Module):
    """A block in the form of DeepSeek-V3's, made of other parts."""

    def __init__(self, config):
        super().__init__()
        self.experts = Qwen3MoeExperts(config)
        self.gate = Qwen3MoeTopKRouter(config)
        self.shared_experts = Qwen3MoeMLP(config, intermediate_size=40)

    def forward(self, hidden_states):
        residuals = hidden_states
        orig_shape = hidden_states.shape
        _, topk_weights, topk_indices = self.gate(hidden_states)
        hidden_states = hidden_states.view(-1, hidden_states.shape[-1])
        hidden_states = self.experts(hidden_states, topk_indices, topk_weights).view(*orig_shape)
        hidden_states = hidden_states + self.shared_experts(residuals)
        return hidden_states


def shared_block(device, dtype):
    """A block with a shared expert, in eval mode."""
    plain = SharedBlock(mixtures.build("qwen3_moe", num_hidden_layers=1).config).to(device, dtype).eval()
    for parameter in plain.parameters():
        parameter.data.normal_(std=0.3)
    return plain


def test_a_shared_expert(fused_mlp, device, dtype, calls):
    """The shared expert is called once with the block's own input, even if the block does not run as one call."""
    plain = shared_block(device, dtype)
    fused, seen = copy.deepcopy(plain), []
    fused_mlp.fuse_mlps(fused)
    fused.shared_experts.register_forward_hook(lambda module, given, out: seen.append(given[0]))
    x = torch.randn(2, 5, 32, device=device, dtype=dtype)
    with torch.no_grad():
        for _ in range(6):
            assert error(fused(x), plain(x)) < bound(dtype)
        assert len(seen) == 6 and all(given is x for given in seen) and calls.made["mixture"] == 5
        fused.gate.register_forward_hook(lambda module, given, out: None)
        assert error(fused(x), plain(x)) < bound(dtype)
        fused.shared_experts = nn.Linear(32, 32).to(device, dtype)
        plain.shared_experts = fused.shared_experts
        assert error(fused(x), plain(x)) < bound(dtype)
    assert len(seen) == 7 and calls.made["mixture"] == 5


@pytest.mark.skipif(machine.device_type() != "cuda", reason="there are kernels on GPUs alone")
@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm4_moe"])
def test_blocks_of_sigmoids(fused_mlp, device, calls, model_type):
    model = mixtures.build(model_type, torch.bfloat16, n_group=2, topk_group=1).to(device).eval()
    blocks = [module for module in model.modules() if type(module).__name__.endswith("MoE")]
    fused = copy.deepcopy(model)
    fused_mlp.fuse_mlps(fused)
    others = [module for module in fused.modules() if type(module).__name__.endswith("MoE")]
    assert blocks
    with torch.no_grad():
        for plain, ours in zip(blocks, others):
            for parameter, other in zip(plain.parameters(), ours.parameters()):
                parameter.data.normal_(std=0.3)
                other.data.copy_(parameter.data)
            for _ in range(4):
                ours(torch.randn(1, 3, 32, device=device, dtype=torch.bfloat16))
            before = calls.made["mixture"]
            for shape in ((1, 1), (2, 1), (1, 5), (3, 40)):
                x = torch.randn(*shape, 32, device=device, dtype=torch.bfloat16)
                assert error(ours(x), plain(x)) < bound(torch.bfloat16)
            assert calls.made["mixture"] == before + 4


def test_strides(fused_mlp, device, dtype, calls):
    """Inputs that are not dense run as written, with right results."""
    model, fused = pair(fused_mlp, device, dtype=dtype)
    before = calls.made["mixture"]
    x = torch.randn(2, 3, 64, device=device, dtype=dtype)
    with torch.no_grad():
        for given in (x[..., ::2], x[..., :32]):
            assert error(layer_of(fused).mlp(given), layer_of(model).mlp(given)) < bound(dtype)
        for block in (layer_of(fused).mlp, layer_of(model).mlp):
            with pytest.raises(RuntimeError, match="view size is not compatible"):
                block(x[..., :32].transpose(0, 1))
    assert calls.made["mixture"] == before


def hooked(part):
    part.register_forward_hook(lambda module, given, out: None)


def watched(layer):
    layer.mlp.gate.register_forward_hook(lambda module, given, out: (out[0], out[1] * 2, out[2]))


def scaled(layer):
    layer.mlp.experts.act_fn.register_forward_hook(lambda module, given, out: out * 2)


def rewired(layer):
    layer.mlp.gate, layer.mlp.experts = copy.deepcopy((layer.mlp.gate, layer.mlp.experts))
    layer.mlp.gate.forward = lambda x: tuple(part * 1 for part in type(layer.mlp.gate).forward(layer.mlp.gate, x))


def rebound(layer):
    def doubled(self, *given):
        return type(self).forward(self, *given) * 2

    layer.mlp.experts.forward = types.MethodType(doubled, layer.mlp.experts)


def offloaded(layer):
    accelerate.cpu_offload(layer.mlp, execution_device=layer.mlp.gate.weight.device)


def own_call(layer):
    class Doubled(type(layer.mlp.experts)):
        def __call__(self, *given):
            return super().__call__(*given) * 2

    layer.mlp.experts.__class__ = Doubled


CHANGES = {
    "a hook on the router": watched,
    "a hook on the experts": lambda layer: hooked(layer.mlp.experts),
    "a hook on the activation": scaled,
    "another activation": lambda layer: setattr(layer.mlp.experts, "act_fn", nn.GELU()),
    "another number of choices": lambda layer: setattr(layer.mlp.gate, "top_k", 3),
    "other shares": lambda layer: setattr(layer.mlp.gate, "norm_topk_prob", not layer.mlp.gate.norm_topk_prob),
    "modules with a method of their own": rewired,
    "a method bound to the experts": rebound,
    "hooks of accelerate": offloaded,
    "a call of their own": own_call,
    "training mode": lambda layer: layer.train(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_changes_is_seen(fused_mlp, device, dtype, calls, change):
    model, fused = pair(fused_mlp, device, dtype=dtype)
    x, before = torch.randn(2, 5, 32, device=device, dtype=dtype), calls.made["mixture"]
    with torch.no_grad():
        layer_of(fused).mlp(x)
        assert calls.made["mixture"] == before + 1
        for each in (model, fused):
            change(layer_of(each))
        assert error(layer_of(fused).mlp(x), layer_of(model).mlp(x)) < bound(dtype)
        assert calls.made["mixture"] == before + 1
        for _ in range(3):  # a lasting miss is checked again
            assert error(layer_of(fused).mlp(x), layer_of(model).mlp(x)) < bound(dtype)


@pytest.mark.parametrize("part", ["mlp", "post_attention_layernorm", "mlp.gate"])
def test_hooks_within_a_layer(fused_mlp, device, dtype, calls, part):
    """Hooks within a layer see the same inputs as before, as the layer calls its modules again."""
    model, fused = pair(fused_mlp, device, dtype=dtype)
    ids, seen = torch.randint(90, (2, 7), device=device), ([], [])
    with torch.no_grad():
        fused(ids)
        before = calls.made["block_of"]
        assert before > 0
        for each, found in zip((model, fused), seen):
            layer_of(each).get_submodule(part).register_forward_hook(
                lambda module, given, out, f=found: f.append(given)
            )
        assert error(fused(ids)[0], model(ids)[0]) < bound(dtype)
    assert calls.made["block_of"] == before
    assert len(seen[1]) == len(seen[0]) == 1 and error(seen[1][0][0], seen[0][0][0]) < bound(dtype)


def test_weights_are_read_at_each_call(fused_mlp, device, dtype, calls):
    model, fused = pair(fused_mlp, device, dtype=dtype)
    x, before = torch.randn(2, 5, 32, device=device, dtype=dtype), calls.made["mixture"]
    with torch.no_grad():
        for name in ("gate.weight", "experts.down_proj"):
            for each in (model, fused):
                owner = layer_of(each).mlp.get_submodule(name.split(".")[0])
                old = getattr(owner, name.split(".")[1])
                generator = torch.Generator(device).manual_seed(3)
                new = torch.randn(old.shape, generator=generator, device=device, dtype=dtype)
                setattr(owner, name.split(".")[1], nn.Parameter(new))
            assert error(layer_of(fused).mlp(x), layer_of(model).mlp(x)) < bound(dtype)
    assert calls.made["mixture"] == before + 2


def test_what_is_left(fused_mlp, device, dtype, calls, monkeypatch):
    """A block runs as written under autograd, autocast and patches, in another dtype and on another shape of input."""
    model, fused = pair(fused_mlp, device, dtype=dtype)
    plain, ours, before = layer_of(model).mlp, layer_of(fused).mlp, calls.made["mixture"]
    x = torch.randn(2, 5, 32, device=device, dtype=dtype)
    gradients = []
    for block in (plain, ours):
        (gradient,) = torch.autograd.grad(block(x).float().square().sum(), block.gate.weight)
        gradients.append(gradient)
    assert error(*gradients) < bound(dtype)
    with torch.no_grad():
        with monkeypatch.context() as patch:
            patch.setattr(F, "softmax", lambda x, dim=-1, dtype=None: x.float().sigmoid())
            assert error(ours(x), plain(x)) < bound(dtype)
        with monkeypatch.context() as patch:
            patch.setattr(type(plain), "forward", lambda self, x: x * 2)
            assert torch.equal(ours(x), x * 2)
        for kind in (type(plain.gate), type(plain.experts)):
            with monkeypatch.context() as patch:
                forward = kind.forward
                patch.setattr(kind, "forward", lambda self, *given, forward=forward: forward(self, *given))
                assert error(ours(x), plain(x)) < bound(dtype)
        with torch.autocast(device.type, torch.bfloat16):
            assert error(ours(x), plain(x)) < 2e-2
        with pytest.raises(ValueError):
            ours(x[0])
        for block in (plain, ours):
            block.double()
        assert error(ours(x.double()), plain(x.double())) < bound(dtype)
    assert calls.made["mixture"] == before


def test_copies_and_restoring(fused_mlp, device, dtype, calls):
    """A copy has its own record, and a restored copy runs as written."""
    model, fused = pair(fused_mlp, device, dtype=dtype)
    x = torch.randn(2, 5, 32, device=device, dtype=dtype)
    records = sys.modules[f"{fused_mlp.__name__}.models.experts.blocks"]._records
    other = copy.deepcopy(fused)
    known, key = len(records), id(layer_of(other).mlp)
    with torch.no_grad():
        for _ in range(4):
            assert error(layer_of(other).mlp(x), layer_of(model).mlp(x)) < bound(dtype)
        assert len(records) == known + 1
        report = fused_mlp.fuse_mlps(other)
        report.restore()
        before = calls.made["mixture"]
        assert torch.equal(layer_of(other).mlp(x), layer_of(model).mlp(x))
    assert calls.made["mixture"] == before
    del other, report
    assert key not in records


def test_no_weights_are_held(fused_mlp, device, dtype, calls):
    """A part that is replaced in a block is freed."""
    _, fused = pair(fused_mlp, device, dtype=dtype)
    block, before = layer_of(fused).mlp, calls.made["mixture"]
    with torch.no_grad():
        block(torch.randn(1, 3, 32, device=device, dtype=dtype))
    assert calls.made["mixture"] == before + 1
    replaced = [weakref.ref(part) for part in (block.gate, block.experts, block.experts.gate_up_proj)]
    block.gate, block.experts = nn.Identity(), nn.Identity()
    gc.collect()
    assert [part() for part in replaced] == [None, None, None]


def test_a_shared_part_that_does_not_fit(fused_mlp, device, dtype, calls):
    """If the shared expert returns another dtype, the block's own code casts the sum."""
    plain = shared_block(device, dtype)
    plain.shared_experts.register_forward_hook(lambda module, given, out: out.double())
    fused = copy.deepcopy(plain)
    fused_mlp.fuse_mlps(fused)
    x = torch.randn(2, 5, 32, device=device, dtype=dtype)
    with torch.no_grad():
        for _ in range(6):
            got, expected = fused(x), plain(x)
            assert got.dtype == expected.dtype == torch.float64 and error(got, expected) < bound(dtype)
    assert calls.made["mixture"] == 0


def test_reported(fused_mlp, device, dtype):
    _, fused = pair(fused_mlp, device, dtype=dtype)
    report = fused_mlp.fuse_mlps(fused)
    assert "1 x router and experts in inference with residual and norm" in str(report).splitlines()[0]
    assert fused_mlp.explain(layer_of(fused).mlp).implementation == "fused"
