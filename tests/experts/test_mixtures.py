"""Groups of experts: how classes are read, the function registered with transformers, and groups left unfused."""

import copy
import itertools
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2FN
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation

import forks
import machine
import project
from safety import assert_close

EXPERTS, WIDTH, HIDDEN, TOKENS, TOP_K = 6, 16, 12, 9, 2


class Config:
    def __init__(self, implementation="eager"):
        self._experts_implementation = implementation


def weights_of(module, gated, transposed):
    columns = (2 if gated else 1) * HIDDEN
    shapes = {"up": (columns, WIDTH), "down": (WIDTH, HIDDEN)}
    for name, (rows, inner) in shapes.items():
        shape = (EXPERTS, inner, rows) if transposed else (EXPERTS, rows, inner)
        yield name, rows, nn.Parameter(torch.randn(shape) * inner**-0.5)


class Base(nn.Module):
    """Weights as the interface has them, and a loop over the experts as transformers writes it."""

    def __init__(self, config, gated=True, biased=False, transposed=False, act="silu"):
        super().__init__()
        self.num_experts, self.act_fn = EXPERTS, ACT2FN[act]
        for name, rows, weight in weights_of(self, gated, transposed):
            full = "down_proj" if name == "down" else "gate_up_proj" if gated else "up_proj"
            self.register_parameter(full, weight)
            if biased:
                self.register_parameter(f"{full}_bias", nn.Parameter(torch.randn(EXPERTS, rows)))

    def forward(self, hidden_states, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            position, token = torch.where((top_k_index == expert).T)
            hidden = F.linear(hidden_states[token], self.gate_up_proj[expert])
            gate, up = hidden.chunk(2, dim=-1)
            hidden = F.linear(self.act_fn(gate) * up, self.down_proj[expert])
            out.index_add_(0, token, hidden * top_k_weights[token, position, None])
        return out


class Interleaved(Base):
    def _apply_gate(self, gate_up):
        return self.act_fn(gate_up[..., ::2]) * gate_up[..., 1::2]


class Limited(Base):
    limit = 0.5

    def __init__(self, config, limit=0.5, alpha=1.702):
        super().__init__(config)
        self.limit, self.alpha = limit, alpha

    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate.clamp(max=self.limit)) * up.clamp(min=-self.limit, max=self.limit)


class OfGptOss(Limited):
    def _apply_gate(self, gate_up):
        gate, up = gate_up[..., ::2], gate_up[..., 1::2]
        gate = gate.clamp(min=None, max=self.limit)
        up = up.clamp(min=-self.limit, max=self.limit)
        glu = gate * torch.sigmoid(gate * self.alpha)
        return (up + 1) * glu


class InFloat(Base):
    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return (self.act_fn(gate.float()) * up.float()).to(gate.dtype)


class UpFirst(Base):
    def _apply_gate(self, gate_up):
        up, gate = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate) * up


class BoundedAfter(Limited):
    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate).clamp(max=self.limit) * up


class Counting(Base):
    calls = 0

    def _apply_gate(self, gate_up):
        Counting.calls += 1
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate) * up


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def made(kind, *args, implementation="eager", flags=(), **options):
    """A module whose class is decorated with the interface."""
    decorated = use_experts_implementation(type(kind.__name__, (kind,), {}), **dict(flags))
    config = Config(implementation)
    module = decorated(config, *args, **options)
    if dict(flags).get("has_post_expert_norm"):
        module.post_expert_norm = Norm()
    return module.eval()


def routed(device="cpu", dtype=torch.float32, experts=EXPERTS):
    x = torch.randn(TOKENS, WIDTH, device=device, dtype=dtype)
    weights, index = torch.rand(TOKENS, experts, device=device).topk(TOP_K, dim=-1)
    return x, index, weights.to(dtype)


def run(module, given, implementation):
    """A module's results with and without autograd by an implementation, and the gradients."""
    module.config._experts_implementation = implementation
    x, index, weights = given
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    module.zero_grad()
    out = module(x, index, weights)
    out.square().sum().backward()
    with torch.no_grad():
        alone = module(x, index, weights)
    return [out.detach(), alone, x.grad, weights.grad, *(parameter.grad for parameter in module.parameters())]


def assert_alike(got, expected):
    """The tolerance is relative to the largest value: four products of up to 24 terms, added in another order, differ
    by some 1e-6 of it, even if terms cancel."""
    assert_close(got, expected, tolerance=1e-5)


@pytest.fixture
def registered(fused_mlp):
    fused_mlp.register_experts()
    yield
    del ALL_EXPERTS_FUNCTIONS._global_mapping["fused_mlp"]


FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "has_post_expert_norm")
combinations = [dict(zip(FLAGS, values, strict=True)) for values in itertools.product((True, False), repeat=len(FLAGS))]
combinations = [flags for flags in combinations if flags["has_gate"] or flags["is_concatenated"]]


@pytest.mark.parametrize("flags", combinations, ids=lambda flags: " ".join(name for name, on in flags.items() if on))
@pytest.mark.parametrize("parallel", [False, True], ids=["", "expert parallel"])
def test_flags(fused_mlp, device, registered, flags, parallel):
    """The registered function gives right results and gradients for every layout of weights."""
    kind = Base if flags["is_concatenated"] else Interleaved
    module = made(kind, flags["has_gate"], flags["has_bias"], flags["is_transposed"], flags=flags).to(device)
    x, index, weights = routed(device, experts=EXPERTS + 4 * parallel)
    if parallel:  # as in transformers' router: indices of other processes are the number of experts, weights zero
        module._is_expert_parallel = True
        weights = weights.masked_fill(index >= EXPERTS, 0.0)
        index = index.clamp(max=EXPERTS)
    expected = run(module, (x, index, weights), "batched_mm")
    assert_alike(run(module, (x, index, weights), "fused_mlp"), expected)
    assert fused_mlp.explain(module).implementation == "fused"
    if device.type == "cpu":
        fused_mlp.fuse_mlps(module)
        assert_alike(run(module, (x, index, weights), "batched_mm"), expected)


GATES = [
    (Base, {"act": "gelu_pytorch_tanh"}),
    (Base, {"act": "relu2"}),
    (Limited, {}),
    (Limited, {"limit": 2}),
    (Limited, {"limit": float("inf")}),
    (OfGptOss, {}),
    (InFloat, {}),
]


@pytest.mark.parametrize(("kind", "options"), GATES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_gates(fused_mlp, device, registered, kind, options):
    """A gate is recognised by what it computes."""
    module, given = made(kind, **options).to(device), routed(device)
    expected = run(module, given, "batched_mm")
    assert_alike(run(module, given, "fused_mlp"), expected)
    assert fused_mlp.explain(module).implementation == "fused"


@pytest.mark.parametrize(
    ("kind", "options"),
    [(UpFirst, {}), (BoundedAfter, {}), (OfGptOss, {"alpha": 1.5}), (Counting, {}), (Base, {"act": "tanh"})],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_gates_that_are_not_known(fused_mlp, device, registered, kind, options):
    """Unrecognised gates run as written, whichever way they are fused, and explain says so."""
    module, given = made(kind, **options).to(device), routed(device)
    expected = run(module, given, "batched_mm")
    calls = Counting.calls
    for implementation in ("fused_mlp", "batched_mm"):
        module.config._experts_implementation = implementation
        (entry,) = fused_mlp.fuse_mlps(module).modules
        assert not entry.fused
        assert entry.reason.startswith("runs unfused: a gate that is not recognised")
        assert fused_mlp.explain(module).implementation == "original"
    assert Counting.calls == calls, "it was run to see what it computes"
    assert_alike(run(module, given, "fused_mlp"), expected)


def test_a_limit_that_changes(fused_mlp, device):
    """The attributes of a gate are read at every call."""
    module, given = made(Limited).to(device), routed(device)
    fused = copy.deepcopy(module)
    assert fused_mlp.fuse_mlps(fused).modules
    for limit in (0.5, 0.1):
        module.limit = fused.limit = limit
        assert_alike(run(fused, given, "batched_mm"), run(module, given, "batched_mm"))


# Implementations set in transformers.


class OtherLoop(Base):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            position, token = torch.where((top_k_index == expert).T)
            gate, up = F.linear(hidden_states[token], self.gate_up_proj[expert]).chunk(2, dim=-1)
            hidden = F.linear(self.act_fn(gate) * up, self.down_proj[expert])
            out.index_add_(0, token, 2.0 * hidden * top_k_weights[token, position, None])
        return out


class Printing(Base):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        print("run")
        return hidden_states


class InFloatThroughout(Base):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden_states, dtype=torch.float32)
        for expert in range(self.num_experts):
            position, token = torch.where((top_k_index == expert).T)
            gate, up = F.linear(hidden_states[token].float(), self.gate_up_proj[expert].float()).chunk(2, dim=-1)
            hidden = F.linear(self.act_fn(gate) * up, self.down_proj[expert].float())
            out.index_add_(0, token, hidden * top_k_weights[token, position, None].float())
        return out.to(hidden_states.dtype)


def reason(fused_mlp, module):
    explanation = fused_mlp.explain(module)
    return None if explanation.implementation == "fused" else explanation.reason


def test_a_loop_that_computes_something_else(fused_mlp, device, capsys):
    """An unrecognised loop is left; transformers' implementations, which follow the flags of the class, are not."""
    for kind, why in ((OtherLoop, "not a plain sum of products"), (Printing, "print('run') (line ")):
        module, given = made(kind).to(device), routed(device)
        fused = copy.deepcopy(module)
        fused_mlp.fuse_mlps(fused)
        assert reason(fused_mlp, fused).startswith(f"runs unfused: a custom loop: {why}")
        assert "run" not in capsys.readouterr().out
        with torch.no_grad():
            assert torch.equal(fused(*given), module(*given))
        capsys.readouterr()
        module.config._experts_implementation = fused.config._experts_implementation = "batched_mm"
        assert_alike(fused(*given), module(*given))


def test_a_loop_in_float32(fused_mlp, device):
    fused = made(InFloatThroughout).to(device)
    fused_mlp.fuse_mlps(fused)
    assert reason(fused_mlp, fused) is None
    fused.bfloat16()
    assert reason(fused_mlp, fused) == "runs unfused: a custom loop that computes in float32"


def test_functions_of_others(fused_mlp, device, monkeypatch):
    """A user's function runs under a name of its own, or under one of transformers' names."""
    module, (x, *routing) = made(Base).to(device), routed(device)
    fused_mlp.fuse_mlps(module)
    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "mine", lambda module, x, *_: x + 1)
    for name in ("mine", "batched_mm"):
        monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, name, lambda module, x, *_: x + 1)
        module.config._experts_implementation = name
        assert reason(fused_mlp, module) == f"runs unfused: experts_implementation {name!r}"
        assert torch.equal(module(x, *routing), x + 1)


def test_on_another_device(fused_mlp):
    """On a device without a kernel, grouped products stay, but the class's own loop is replaced."""
    module = made(Base, implementation="grouped_mm").to("meta")
    (entry,) = fused_mlp.fuse_mlps(module).modules
    assert entry.reason == "runs unfused: grouped_mm in torch.float32 on meta, which no kernel supports"
    module.config._experts_implementation = "eager"
    assert reason(fused_mlp, module) is None


def test_without_transformers():
    """The package imports without transformers, and register_experts says what is missing."""
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "import os, kernels, project\n"
        "os.environ['LOCAL_KERNELS'] = project.local_kernels()\n"
        "fused_mlp = kernels.get_kernel(project.repo_id(), version=project.version())\n"
        "try: fused_mlp.register_experts()\n"
        "except ImportError as error: print(error)\n"
        "import types; sys.modules['transformers'] = types.ModuleType('transformers')\n"
        "sys.modules['transformers'].__version__ = '4.57'; sys.modules['transformers'].__path__ = []\n"
        "try: fused_mlp.register_experts()\n"
        "except ImportError as error: print(error)\n"
    )
    done = forks.run(code, cwd=project.ROOT / "tools")
    assert done.returncode == 0, done.stderr
    missing, old = done.stdout.strip().splitlines()[-2:]
    assert missing.startswith("register_experts needs transformers, which cannot be imported")
    assert old == "register_experts needs transformers 5.0 or later, whose experts have an interface; this is 4.57"


# Classes without the interface.


class Loop(nn.Module):
    """A loop with names of its own, the transposed layout and an activation function of torch."""

    scale = 1.0

    def __init__(self):
        super().__init__()
        self.num_experts = EXPERTS
        self.inward = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) * 0.25)
        self.outward = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) * 0.25)

    def forward(self, x, chosen, shares):
        out = torch.zeros_like(x)
        for expert in range(self.num_experts):
            position, token = torch.where((chosen == expert).T)
            if token.numel() == 0:
                continue
            hidden = F.gelu(x[token] @ self.inward[expert])
            out.index_add_(0, token, hidden @ self.outward[expert] * shares[token, position, None])
        return out * self.scale


class Scaled(Loop):
    scale = 2.0


class Keeping(Loop):
    def forward(self, x, chosen, shares):
        self.latest = chosen
        return super().forward(x, chosen, shares)


def test_loops_of_other_classes(fused_mlp, device):
    """Loops of other classes are fused if they compute the known sum, and left otherwise."""
    experts = "experts" if device.type == "cuda" else "experts in inference"
    for kind, pattern in ((Loop, experts), (Scaled, None), (Keeping, None)):
        torch.manual_seed(0)
        module, (x, chosen, shares) = kind().to(device), routed(device)
        fused = copy.deepcopy(module)
        report = fused_mlp.fuse_mlps(fused)
        assert [entry.pattern for entry in report.fused] == ([pattern] if pattern else [])
        assert_alike(fused(x, shares=shares, chosen=chosen), module(x, chosen, shares))
        assert_alike(fused(x, chosen, shares=shares), module(x, chosen, shares))
        report.restore()
        assert type(fused) is kind


@pytest.mark.parametrize("make", [Loop, lambda: made(Base)], ids=["a loop", "the interface"])
def test_arguments_by_name(fused_mlp, device, monkeypatch, make):
    """Experts are fused however their arguments are given; a call that lacks one, or has others, fails as before."""
    module, given = make().to(device).eval(), routed(device)
    mixtures, taken = sys.modules[f"{fused_mlp.__name__}.models.experts.mixtures"], []

    def spy(owner, name):
        compute = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given: (taken.append(compute(*given)), taken[-1])[1])

    spy(mixtures, "_fused")
    spy(mixtures.cached, "output")
    names = ("x", "chosen", "shares") if make is Loop else ("hidden_states", "top_k_index", "top_k_weights")
    named = dict(zip(names, given, strict=True))
    with torch.no_grad():
        expected = module(*given)
        for count in range(4):
            fused = copy.deepcopy(module)
            fused_mlp.fuse_mlps(fused)
            taken.clear()
            assert_alike(fused(*given[:count], **{name: named[name] for name in reversed(names[count:])}), expected)
            assert any(each is not None for each in taken)
        for wrong in ({"x": given[0]}, {"scale": 1.0, **named}, {**named, names[0]: None}):
            raised = []
            for each in (fused, module):
                with pytest.raises((TypeError, AttributeError)) as error:
                    each(**wrong)
                raised.append((error.type, str(error.value)))
            assert raised[0] == raised[1]


@pytest.mark.skipif(machine.device_type() != "cpu", reason="a rule for CPUs")
@pytest.mark.parametrize("way", ["eager", "grouped_mm"])
def test_what_trains_on_a_cpu(fused_mlp, monkeypatch, way):
    """CPU training runs no composed experts: they keep more for the backward than a loop or transformers' products."""
    module = made(Base, implementation=way)
    fused = copy.deepcopy(module)
    (entry,) = fused_mlp.fuse_mlps(fused).fused
    assert entry.pattern == "experts in inference"
    calls, taken = sys.modules[f"{fused_mlp.__name__}.calls"], []
    composed = calls._composed_experts
    monkeypatch.setattr(calls, "_composed_experts", lambda *given: (taken.append(1), composed(*given))[1])
    given = routed()
    assert_alike(run(fused, given, way), run(module, given, way))
    assert not taken


def bytes_kept(module, given):
    """The bytes that autograd saves for a call, without parameters, and the result."""
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = module(*given)
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    return sum(size for place, size in kept.items() if place not in own), out


@pytest.mark.parametrize("way", ["eager", "grouped_mm", "fused_mlp"])
@pytest.mark.parametrize("trained", [(), ("gate_up_proj",), ("down_proj",), ("gate_up_proj", "down_proj")])
def test_memory_of_training(fused_mlp, device, registered, way, trained):
    """Training keeps no more than the unfused way (grouped_mm, for the package's own), whatever is trained."""
    module = made(Base).to(device)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name in trained)
    fused = copy.deepcopy(module)
    fused_mlp.fuse_mlps(fused)
    module.config._experts_implementation = "grouped_mm" if way == "fused_mlp" else way
    fused.config._experts_implementation = way
    x, index, weights = routed(device)
    given = (x.requires_grad_(), index, weights.requires_grad_())
    (got, out), (expected, _) = bytes_kept(fused, given), bytes_kept(module, given)
    assert out.requires_grad
    assert got <= expected
