"""fuse_mlps on models of many transformers types, and on the MLP blocks of diffusers and timm."""

import copy
import random
from pathlib import Path

import pytest
import torch

import machine
from suite import SEED
from survey import blocks, mlps, tiny

# Model types with quick tiny models that run with the inputs below alone.
TYPES = Path(__file__).with_name("model_types.txt").read_text().split()

IN_BFLOAT16 = ("bert", "clip_vision_model", "deepseek_v4", "gemma2", "glm", "gpt2", "llama", "opt", "vit")

# The above are always tested. Types share most of their code: each run draws SAMPLE of them by its inputs' seed.
SAMPLE = 90
CHOSEN = sorted({*IN_BFLOAT16, *random.Random(SEED).sample(TYPES, SAMPLE)})


def inputs_of(model, dtype=torch.float32):
    """Returns the least random inputs that a model takes."""
    config, name = model.config, model.main_input_name
    if name == "pixel_values":
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        return {name: torch.randn(2, getattr(config, "num_channels", 3), height, width, dtype=dtype)}
    if name == "input_values":
        return {name: torch.randn(2, 4000, dtype=dtype)}
    if name == "input_features":
        features = torch.randn(2, config.num_mel_bins, 2 * config.max_source_positions, dtype=dtype)
        return {name: features} | decoder(config)
    return {"input_ids": torch.randint(3, 200, (2, 9))} | decoder(config)


def decoder(config):
    return {"decoder_input_ids": torch.randint(3, 200, (2, 5))} if config.is_encoder_decoder else {}


def built(model_type, dtype=torch.float32):
    """Returns a tiny model with nonzero biases and MLPs that show in its outputs; always the same one.

    Some models choose (a group or experts for a token), and some fresh weights are so near to a tie that a rounding
    error decides.
    """
    torch.manual_seed(1)
    model = tiny.build(model_type).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
        for module in mlps.find(model).values():
            for parameter in module.parameters():
                if parameter.dim() >= 2:
                    parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return model.to(dtype)


def outcome(model, inputs):
    """Returns all floating-point outputs in evaluation, and the gradients of all parameters."""
    model.zero_grad()
    torch.manual_seed(0)
    outputs = [value for value in model(**inputs).values() if isinstance(value, torch.Tensor) and value.requires_grad]
    # Random weights: a norm at the end makes the sum, or the sum of squares, of its outputs constant.
    sum((output * torch.randn_like(output)).sum() for output in outputs).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return [output.detach() for output in outputs], gradients


def largest_error(got, expected):
    """Returns the norm of the difference relative to the expected norm, over all of a model's outputs."""
    difference = sum((one.double() - other.double()).square().sum() for one, other in zip(got, expected, strict=True))
    return (difference / sum(other.double().square().sum() for other in expected)).sqrt().item()


def are_experts_for_a_gpu(report):
    """Returns whether only experts are left, which run as they are on a CPU with a build for GPUs."""
    codes = {reason.code for module in report.modules for reason in module.reasons}
    return machine.device_type() == "cuda" and codes == {"own way"}


@pytest.mark.parametrize("model_type", CHOSEN)
def test_models(fused_mlp, model_type):
    """Outputs and gradients match in float32: rounding is about 1e-7 per product, and a few add up in two layers.

    The bounds leave a factor of a few hundred for models that amplify: the worst is off by 1e-5 from itself in float64.
    An MLP left out, or fused wrongly, is off by 0.1.
    """
    model = built(model_type)
    inputs = inputs_of(model)
    before, gradients = outcome(model, inputs)
    report = fused_mlp.fuse_mlps(model)
    assert report.fused or are_experts_for_a_gpu(report)
    after, fused_gradients = outcome(model, inputs)
    assert largest_error(after, before) <= 5e-5
    assert fused_gradients.keys() == gradients.keys()
    assert largest_error(fused_gradients.values(), gradients.values()) <= 5e-4
    with torch.no_grad():  # runs whole MLPs as one op
        torch.manual_seed(0)
        alone = [value for value in model(**inputs).values() if isinstance(value, torch.Tensor)]
    alone = [value for value in alone if value.is_floating_point()][: len(before)]
    assert largest_error(alone, before) <= 5e-5
    report.restore()
    torch.testing.assert_close(outcome(model, inputs), (before, gradients), rtol=0, atol=0)


@pytest.mark.parametrize("model_type", IN_BFLOAT16)
def test_models_in_bfloat16(fused_mlp, model_type):
    """A fused bfloat16 model has at most 1.5 times the unfused one's error against float32, plus a rounding of 4e-3."""
    model = built(model_type, torch.bfloat16)
    inputs = inputs_of(model, torch.bfloat16)
    exact = copy.deepcopy(model).float()
    wide = {name: value.float() if value.is_floating_point() else value for name, value in inputs.items()}
    with torch.no_grad():
        expected, unfused = exact(**wide)[0], model(**inputs)[0]
        assert fused_mlp.fuse_mlps(model).fused
        fused = model(**inputs)[0]
    assert fused.dtype == torch.bfloat16
    assert largest_error([fused], [expected]) <= 1.5 * largest_error([unfused], [expected]) + 4e-3


# Blocks of other packages.

LEFT = {("diffusers", "FeedForward(geglu-approximate)")}  # x * sigmoid(1.702 x), written out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("block", blocks.NAMES, ids=" ".join)
def test_blocks(fused_mlp, block, dtype):
    module = blocks.make(*block).to(dtype)
    plain = copy.deepcopy(module)
    report = fused_mlp.fuse_mlps(module)
    assert bool(report.fused) == (block not in LEFT)
    x = torch.randn(2, 5, blocks.WIDTH, dtype=dtype)
    results = []
    for candidate in (module, plain):
        given = x.clone().requires_grad_()
        result = candidate.train()(given)
        result.square().sum().backward()
        with torch.no_grad():
            alone = candidate.eval()(x)
        results.append([result.detach(), given.grad, *(part.grad for part in candidate.parameters()), alone])
    assert largest_error(*results) <= (1e-5 if dtype == torch.float32 else 2e-2)


# Modules that the survey counts as an MLP.


def test_what_counts_as_an_mlp():
    """The survey counts MLPs by name or by shape, fused or not, and neither attention nor a pooler."""
    bert = mlps.find(tiny.build("bert"))
    assert {type(module).__name__ for module in bert.values()} == {"BertIntermediate"} and len(bert) == 2
    opt = mlps.find(tiny.build("opt"))
    assert {type(module).__name__ for module in opt.values()} == {"OPTDecoderLayer"} and len(opt) == 2
    mixtral = mlps.find(tiny.build("mixtral"))
    assert {type(module).__name__ for module in mixtral.values()} == {"MixtralExperts"}
    assert all(map(mlps.is_experts, mixtral.values()))
    assert mlps.find(torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Linear(96, 64))) == {}


def test_a_type_without_a_model():
    with pytest.raises(tiny.NoModelError, match="part of another model"):
        tiny.build("sam_mask_decoder")
