"""fuse_mlps and register_experts on models with mixtures of experts, of many types of transformers."""

import copy

import pytest
import torch

import mixtures

IDS = torch.tensor([[5, 17, 41, 8, 93, 22, 60], [71, 3, 29, 88, 14, 50, 9]])

# float32: some 1e-7 of rounding a product. A group of experts left out is off by 0.1.
BOUND = 1e-5


def error(got, expected):
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


def logits(model, ids):
    with torch.no_grad():
        return model(ids)[0]


def tokens(model, ids):
    return model.generate(ids, max_new_tokens=4, do_sample=False) if model.can_generate() else None


def states(fused_mlp, model):
    """How the groups of experts of a model run, as explain has it."""
    return [fused_mlp.explain(module).implementation for module in mixtures.groups(model).values()]


@pytest.mark.parametrize("model_type", mixtures.MODELS)
def test_models(fused_mlp, device, model_type):
    """Logits and greedy tokens, in the place of the class's own loop and, on a CPU, of the products of groups."""
    model, ids = mixtures.build(model_type).to(device), IDS.to(device)
    fused = copy.deepcopy(model)
    report = fused_mlp.fuse_mlps(fused)
    expected = mixtures.MODELS[model_type][1]
    for implementation in ("eager", "grouped_mm"):
        if type(model)._can_set_experts_implementation():
            model.set_experts_implementation(implementation)
            fused.set_experts_implementation(implementation)
        if implementation == "eager":
            assert states(fused_mlp, fused).count("fused") == expected
        assert error(logits(fused, ids), logits(model, ids)) <= BOUND
    if model.can_generate():
        assert torch.equal(tokens(fused, ids), tokens(model, ids))
    report.restore()
    assert "fused" not in states(fused_mlp, fused)
    assert torch.equal(logits(fused, ids), logits(model, ids))
