"""Obstacles to fusing experts: a group runs fused with equal results, or is left unfused with a reason."""

import copy
import pickle

import accelerate
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.distributed.expert_parallel import EpRouterParallel, MoEParamShard
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, FP8Experts
from transformers.integrations.moe import use_experts_implementation
from transformers.integrations.mxfp4 import Mxfp4GptOssExperts

import mixtures
from test_mixture_models import BOUND, IDS, error, logits, one_thread, states

assert one_thread  # a fixture


def pair(fused_mlp, device, model_type="mixtral", implementation="eager"):
    """A model, its fused copy, and inputs."""
    model = mixtures.build(model_type).to(device)
    model.set_experts_implementation(implementation)
    fused = copy.deepcopy(model)
    fused_mlp.fuse_mlps(fused)
    assert set(states(fused_mlp, fused)) == {"fused"}
    return model, fused, IDS.to(device)


def assert_same(fused, model, ids):
    assert error(logits(fused, ids), logits(model, ids)) <= BOUND


def first(model):
    return next(iter(mixtures.groups(model).values()))


def routed(device, dtype=torch.float32, tokens=7):
    """The tokens, expert indices and weights of a call of experts."""
    x, weights = torch.randn(tokens, 32, device=device), torch.rand(tokens, 2, device=device)
    return x.to(dtype), torch.randint(0, 6, (tokens, 2), device=device), weights.to(dtype)


def why(fused_mlp, module):
    return fused_mlp.explain(module).reason


@pytest.mark.parametrize("when", ["before", "after"])
def test_offloaded(fused_mlp, device, when):
    """Experts give the same results under accelerate's forward, which loads their weights for each call."""
    model, fused, ids = pair(fused_mlp, device)
    if when == "before":
        fused = accelerate.cpu_offload(copy.deepcopy(model), execution_device=device)
        report = fused_mlp.fuse_mlps(fused)
        (entry,) = {(entry.fused, entry.reason) for entry in report.modules if entry.class_name == "MixtralExperts"}
        assert entry == (True, "")
    else:
        fused = accelerate.cpu_offload(fused, execution_device=device)
    assert_same(fused, model, ids)


def test_hooks(fused_mlp, device):
    """Hooks on the experts run around the fused call; a hook on the activation makes the experts run unfused."""
    model, fused, ids = pair(fused_mlp, device)
    seen = []
    first(fused).register_forward_pre_hook(lambda module, given: seen.append("before"))
    first(fused).register_forward_hook(lambda module, given, out: seen.append("after"))
    assert_same(fused, model, ids)
    assert seen == ["before", "after"] and states(fused_mlp, fused) == ["fused", "fused"]
    first(fused).act_fn.register_forward_hook(lambda module, given, out: seen.append("inside"))
    assert why(fused_mlp, first(fused)).startswith(
        "runs unfused: a gate that is not recognised: SiLUActivation with hooks"
    )
    assert_same(fused, model, ids)
    assert "inside" in seen


def test_weights_replaced(fused_mlp, device):
    """A call runs unfused if a weight has become a Parameter subclass or float64."""
    model, fused, ids = pair(fused_mlp, device)

    class Special(nn.Parameter):
        pass

    first(fused).down_proj = Special(first(model).down_proj.detach().clone())
    assert why(fused_mlp, first(fused)) == "runs unfused: a weight of type Special"
    assert_same(fused, model, ids)
    first(fused).double()
    assert why(fused_mlp, first(fused)) == "runs unfused: a weight of torch.float64"


def test_quantized(fused_mlp):
    """Experts with eight-bit weights are left, in transformers' class for them and in the model's own."""
    model = mixtures.build("mixtral")
    group = first(model)
    kind = use_experts_implementation(
        type("FP8Experts", (FP8Experts,), {}), experts_interface=ALL_FP8_EXPERTS_FUNCTIONS
    )
    model.model.layers[0].mlp.experts = kind(model.config, block_size=(16, 16)).requires_grad_(False)
    group.gate_up_proj = nn.Parameter(group.gate_up_proj.detach().to(torch.float8_e4m3fn), requires_grad=False)
    model.model.layers[1].mlp.experts = group
    report = fused_mlp.fuse_mlps(model)
    reasons = {entry.class_name: entry.reason for entry in report.left}
    assert reasons.keys() == {"FP8Experts", "MixtralExperts"}
    assert reasons["MixtralExperts"] == "runs unfused: a weight of torch.float8_e4m3fn"
    assert not any(entry.pattern == "experts" for entry in report.fused)


def test_weights_of_four_bits(fused_mlp):
    """transformers' four-bit experts, which a router of their own calls, are left, and the other experts are fused."""
    model = mixtures.build("gpt_oss", intermediate_size=32)
    model.set_experts_implementation("eager")
    model.model.layers[0].mlp.experts = Mxfp4GptOssExperts(model.config)
    (left,) = fused_mlp.fuse_mlps(model).left
    assert (left.class_name, left.reason.partition(":")[0]) == ("Mxfp4GptOssExperts", "runs unfused")
    assert fused_mlp.explain(model.model.layers[1].mlp.experts).implementation == "fused"


def test_experts_in_another_form(fused_mlp):
    """DBRX's experts, with stacked weights in a submodule, are left; JetMoe's have their activation fused."""
    dbrx, jetmoe = (fused_mlp.fuse_mlps(mixtures.build(name)) for name in ("dbrx", "jetmoe"))
    assert {(left.class_name, left.reason) for left in dbrx.left} == {
        ("DbrxExperts", "runs unfused: an unrecognised loop: view, which is unknown here")
    }
    assert [(entry.class_name, entry.extent) for entry in jetmoe.modules] == [("JetMoeMoE", "pointwise")] * 2


@pytest.fixture
def mesh(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_sharded(fused_mlp, mesh):
    """DTensor weights run unfused; the local weights that a parallel plan substitutes for a call run fused."""
    model, fused, ids = pair(fused_mlp, torch.device("cpu"))
    group, expected = first(fused), logits(model, ids)
    local = group.gate_up_proj
    group.gate_up_proj = nn.Parameter(distribute_tensor(local.detach(), mesh, [Replicate()]))
    assert isinstance(group.gate_up_proj, DTensor)
    assert why(fused_mlp, group) == "runs unfused: a weight of type DTensor"
    group.gate_up_proj = local
    assert error(logits(fused, ids), expected) <= BOUND
    x, index, weights = torch.randn(5, 32), torch.randint(0, 6, (5, 2)), torch.rand(5, 2)
    whole = first(model)(x, index, weights)
    parts = []
    for rank in range(2):  # halves of two processes, whose results are summed
        part = copy.deepcopy(group)
        gate, up = (half.chunk(2, dim=1)[rank] for half in group.gate_up_proj.chunk(2, dim=1))
        part.gate_up_proj = nn.Parameter(torch.cat([gate, up], dim=1))
        part.down_proj = nn.Parameter(group.down_proj.chunk(2, dim=2)[rank])
        assert fused_mlp.explain(part).implementation == "fused"
        parts.append(part(x, index, weights))
    torch.testing.assert_close(sum(parts), whole, rtol=1e-4, atol=1e-5)


def test_expert_parallel(fused_mlp, mesh):
    """A forward that transformers' plan overrides is left; around a fused forward, the plan hands it local weights."""

    class Style(MoEParamShard):
        def should_use_local_tensors(self, module):
            return True

    model, ids = mixtures.build("mixtral"), IDS
    expected, fused = logits(model, ids), copy.deepcopy(model)
    fused_mlp.fuse_mlps(fused)
    for each in (model, fused):
        for group in mixtures.groups(each).values():
            style = Style(Shard(0), shards_expert_dim=True)
            for name in ("gate_up_proj", "down_proj"):
                style.shard_param(group, name, mesh)
            style.install_forward(group, mesh)
        for layer in each.model.layers:
            EpRouterParallel().install_forward(layer.mlp.gate, mesh)
    report = fused_mlp.fuse_mlps(model)
    assert {(entry.class_name, entry.reason) for entry in report.modules} == {
        (
            "MixtralExperts",
            "its forward is overridden on the instance (from transformers.distributed.expert_parallel); "
            'load it with experts_implementation="fused_mlp"',
        )
    }
    for each in (model, fused):
        assert error(logits(each, ids), expected) <= BOUND


def test_global_state(fused_mlp, device, monkeypatch):
    """Dispatch modes and patched functions see the experts' operations, and autocast gives the unfused result."""

    class Counting(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.count += "aten.mm" in str(function)
            return function(*args, **(kwargs or {}))

    model, fused, ids = pair(fused_mlp, device)
    counts = []
    for each in (model, fused):
        with Counting() as mode:
            logits(each, ids)
        counts.append(mode.count)
    assert counts[0] == counts[1] > 0
    with torch.autocast(device.type, torch.bfloat16):
        assert torch.equal(logits(fused, ids), logits(model, ids))
    monkeypatch.setattr(nn.functional, "linear", lambda x, weight, bias=None: torch.zeros_like(x @ weight.t()))
    assert torch.equal(logits(fused, ids), logits(model, ids))
    assert why(fused_mlp, first(fused)) == "runs unfused: a patched torch.nn.functional.linear"


def test_copies(fused_mlp, device):
    """A deep copy stays fused; a pickle is unfused and loads without the package."""
    model, fused, ids = pair(fused_mlp, device)
    assert set(states(fused_mlp, copy.deepcopy(fused))) == {"fused"}
    assert_same(copy.deepcopy(fused), model, ids)
    loaded = pickle.loads(pickle.dumps(first(fused)))
    assert type(loaded) is type(first(model))
    assert first(fused).__class__.__name__ == "MixtralExperts" and isinstance(first(fused), type(first(model)))


@pytest.mark.parametrize("way", ["eager", "grouped_mm", "fused_mlp"])
def test_compiled(fused_mlp, device, way):
    """Experts fused by fuse_mlps or, with no call before, by name compile to one graph; the class's loop does not."""
    if device.type != "cpu" and way == "grouped_mm":
        pytest.skip("is left on a GPU, in float32")
    fused_mlp.register_experts()
    model = mixtures.build("mixtral", num_hidden_layers=1).to(device)
    fused = copy.deepcopy(model)
    fused.set_experts_implementation(way)
    if way != "fused_mlp":
        fused_mlp.fuse_mlps(fused)
    group = first(fused)
    torch.compiler.reset()
    compiled = torch.compile(group, fullgraph=True)
    given = routed(device)
    with torch.no_grad(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        got = compiled(*given)
    torch.testing.assert_close(got, first(model)(*given), rtol=1e-4, atol=1e-5)
    assert any("fused_mlp" in event.name for event in profile.events())


@pytest.mark.parametrize("way", ["grouped_mm", "fused_mlp"])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_equal_layers_compile_one_graph(fused_mlp, device, way, model_type):
    """Equal groups of experts compile to one graph, as Dynamo sees no difference between them."""
    if device.type != "cpu" and way == "grouped_mm":
        pytest.skip("is left on a GPU, in float32")
    fused_mlp.register_experts()
    model = mixtures.build(model_type, num_hidden_layers=4).to(device)
    model.set_experts_implementation(way)
    if way != "fused_mlp":
        fused_mlp.fuse_mlps(model)
    torch.compiler.reset()
    counted = torch._dynamo.utils.counters["stats"]
    counted.clear()
    given = routed(device)
    with torch.no_grad():
        for module in mixtures.groups(model).values():
            compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
            torch.testing.assert_close(compiled(*given), module(*given), rtol=1e-4, atol=1e-5)
    assert counted["unique_graphs"] == 1


@pytest.mark.parametrize("way", ["grouped_mm", "batched_mm"])
def test_in_the_place_of_products_of_groups(fused_mlp, device, way):
    """A kernel replaces grouped or batched products in inference and, on a GPU only, in training."""
    if device.type == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU: others have no kernels of experts")
    model = mixtures.build("mixtral", num_hidden_layers=1).to(device, torch.bfloat16)
    model.set_experts_implementation(way)
    fused = copy.deepcopy(model)
    fused_mlp.fuse_mlps(fused)
    assert set(states(fused_mlp, fused)) == {"fused"}
    given = routed(device, torch.bfloat16, tokens=7 if device.type == "cpu" else 2048)  # enough to train by kernels
    for recorded in (False, True):
        with torch.set_grad_enabled(recorded):
            expected = first(model)(*given)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                got = first(fused)(*given)
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)
        taken = {event.name.rpartition("::")[2] for event in profile.events() if "fused_mlp" in event.name}
        if not recorded:
            assert taken == {"experts_mlp"}
        elif device.type == "cuda":
            assert "experts_training_forward" in taken


def test_transforms(fused_mlp, device):
    """torch.func transforms run the parts of the experts, with the unfused derivatives."""
    model, fused, _ = pair(fused_mlp, device, implementation="batched_mm" if device.type == "cpu" else "eager")
    x, *routing = routed(device)
    results = []
    for group in (first(model), first(fused)):
        for parameter in group.parameters():
            parameter.requires_grad_(False)
        tangent = torch.func.jvp(lambda x, group=group: group(x, *routing), (x,), (torch.ones_like(x),))[1]
        gradient = torch.func.grad(lambda x, group=group: group(x, *routing).square().sum())(x)
        results.append((tangent, gradient))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


def test_a_disagreement(fused_mlp, device, monkeypatch):
    """fuse_mlps rejects a fused call that gives a different result, unless verify=False skips the check."""
    model = mixtures.build("mixtral").to(device)
    model.set_experts_implementation("eager")
    verification = __import__("sys").modules[f"{fused_mlp.__name__}.models.verification"]
    monkeypatch.setattr(verification.calls, "experts_mlp", lambda x, *_: torch.zeros_like(x))
    entries = [entry for entry in fused_mlp.fuse_mlps(model).modules if entry.class_name == "MixtralExperts"]
    assert [entry.fused for entry in entries] == [False, False]
    assert "gives a different result" in entries[0].reason
    assert type(first(model)).__dict__.get("__module__").startswith("transformers")
    monkeypatch.undo()
    report = fused_mlp.fuse_mlps(model, verify=False)
    assert set(states(fused_mlp, model)) == {"fused"}
    pattern = "experts in inference" if device.type == "cpu" else "experts"
    assert any(line.split("  ")[0].strip() == "MixtralExperts" and pattern in line for line in str(report).split("\n"))
