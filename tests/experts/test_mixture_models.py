"""fuse_mlps and register_experts on mixture-of-experts models of many types in transformers."""

import copy

import pytest
import torch

import machine
import mixtures

IDS = torch.tensor([[5, 17, 41, 8, 93, 22, 60], [71, 3, 29, 88, 14, 50, 9]])

# float32: products round by some 1e-7. Leaving out a group of experts gives an error of 0.1.
BOUND = 1e-5


@pytest.fixture(autouse=True)
def one_thread():
    """Runs on one thread, which is faster for calls so small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def error(got, expected):
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


def logits(model, ids):
    with torch.no_grad():
        return model(ids)[0]


def tokens(model, ids):
    return model.generate(ids, max_new_tokens=4, do_sample=False) if model.can_generate() else None


def states(fused_mlp, model):
    """The implementation that explain names for each group of experts of a model."""
    return [fused_mlp.explain(module).implementation for module in mixtures.groups(model).values()]


@pytest.mark.parametrize("model_type", mixtures.MODELS)
def test_models(fused_mlp, device, model_type):
    """Logits and greedy tokens are right if fusing replaces the class's loop and, on a CPU, grouped products."""
    model, ids = mixtures.build(model_type).to(device), IDS.to(device)
    fused = copy.deepcopy(model)
    report = fused_mlp.fuse_mlps(fused)
    expected = mixtures.MODELS[model_type][1]
    for implementation in ("eager", "grouped_mm"):
        if type(model)._can_set_experts_implementation():
            model.set_experts_implementation(implementation)
            fused.set_experts_implementation(implementation)
        if device.type == "cpu" or implementation == "eager":
            assert states(fused_mlp, fused).count("fused") == expected
        assert error(logits(fused, ids), logits(model, ids)) <= BOUND
    if model.can_generate():
        assert torch.equal(tokens(fused, ids), tokens(model, ids))
    report.restore()
    assert "fused" not in states(fused_mlp, fused)
    assert torch.equal(logits(fused, ids), logits(model, ids))


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss", "deepseek_v3", "muse_spark_text"])
def test_in_bfloat16(fused_mlp, device, model_type):
    """In bfloat16 the error against float32 is at most 1.5 times the unfused one plus one rounding, 4e-3."""
    model, ids = mixtures.build(model_type, torch.bfloat16).to(device), IDS.to(device)
    exact, fused = copy.deepcopy(model).float(), copy.deepcopy(model)
    for each in (exact, model, fused):
        each.set_experts_implementation("eager")
    fused_mlp.fuse_mlps(fused)
    assert set(states(fused_mlp, fused)) == {"fused"}
    expected = logits(exact, ids)
    assert error(logits(fused, ids), expected) <= 1.5 * error(logits(model, ids), expected) + 4e-3


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_training(fused_mlp, device, model_type):
    """In training mode the gradients of all parameters, those of the routers included, are right."""
    model, ids = mixtures.build(model_type).to(device).train(), IDS.to(device)
    fused = copy.deepcopy(model)
    fused_mlp.fuse_mlps(fused)
    for each in (model, fused):
        each.set_experts_implementation("eager")
        each(ids, labels=ids).loss.backward()
    gradients = dict(model.named_parameters())
    for name, parameter in fused.named_parameters():
        expected = gradients[name].grad
        assert (parameter.grad is None) == (expected is None), name
        if expected is not None and expected.norm() > 1e-6:
            assert error(parameter.grad, expected) <= 1e-4, name


def test_registered(fused_mlp, device):
    """The registered name works in from_pretrained's argument and in set_experts_implementation."""
    fused_mlp.register_experts()
    model, ids = mixtures.build("qwen3_moe").to(device), IDS.to(device)
    fused = mixtures.build("qwen3_moe", experts_implementation="fused_mlp").to(device)
    assert fused.get_experts_implementation() == {"": "fused_mlp"}
    assert fused_mlp.explain(fused).implementation == "fused"
    assert error(logits(fused, ids), logits(model, ids)) <= BOUND
    assert torch.equal(tokens(fused, ids), tokens(model, ids))
    fused.set_experts_implementation("eager")
    assert states(fused_mlp, fused) == ["original", "original"]
    model.set_experts_implementation("fused_mlp")
    assert error(logits(model, ids), logits(fused, ids)) <= BOUND


WAYS = ["eager", "grouped_mm", "batched_mm", "fused_mlp"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_equal_choices(fused_mlp, device, model_type, way):
    """Routers that start at zero, as in a model made from a dense one, choose the experts that torch.topk chooses."""
    fused_mlp.register_experts()
    model, ids = mixtures.build(model_type).to(device), IDS.to(device)
    routers = [part for name, part in model.named_modules() if name.endswith(("mlp.gate", "mlp.router"))]
    for parameter in (parameter for router in routers for parameter in router.parameters()):
        parameter.data.zero_()
    assert routers
    fused = copy.deepcopy(model)
    model.set_experts_implementation("grouped_mm" if way == "fused_mlp" else way)
    fused.set_experts_implementation(way)
    fused_mlp.fuse_mlps(fused)
    assert error(logits(fused, ids), logits(model, ids)) < BOUND


def result(module, *given):
    """The result of a call, or the type of the error that it raises."""
    try:
        return module(*given)
    except Exception as raised:
        return type(raised)


@pytest.mark.skipif(machine.device_type() != "cpu", reason="on a GPU torch ends the process")
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("way", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_an_index_that_no_expert_has(fused_mlp, model_type, way, recorded):
    """An index without an expert is skipped or raises, as unfused, whatever calls came before. For grouped products
    that raise nothing, its result is uninitialised memory."""
    model = mixtures.build(model_type)
    model.set_experts_implementation(way)
    fused = copy.deepcopy(model)
    fused_mlp.fuse_mlps(fused)
    plain, fused = (next(iter(mixtures.groups(each).values())) for each in (model, fused))
    experts, tokens = plain.num_experts, 5
    with torch.set_grad_enabled(recorded):
        for wrong in (experts, experts + 3, -1, -experts, -experts - 2):
            x, weights = torch.randn(tokens, mixtures.SIZES["hidden_size"]), torch.rand(tokens, 2)
            index = torch.randint(0, experts, (tokens, 2))
            for _ in range(2):  # the first call settles what later ones rely on
                assert error(result(fused, x, index, weights), result(plain, x, index, weights)) < BOUND
            index[2, 1] = wrong
            got, expected = result(fused, x, index, weights), result(plain, x, index, weights)
            assert isinstance(got, type) == isinstance(expected, type), (wrong, got, expected)
            if isinstance(expected, type):
                assert got is expected, wrong
            elif way != "grouped_mm":
                assert error(got, expected) < BOUND, wrong
