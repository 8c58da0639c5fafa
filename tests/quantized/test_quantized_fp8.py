"""Models with transformers' FP8Linear, fused and not.

Its own products are kernels from the Hub. Here a function stands in their place, which multiplies by the decoded
weight and counts how often it is called. On a CPU the compiled ops are forced.
"""

import copy
import sys

import pytest
import torch
import transformers
import transformers.integrations.finegrained_fp8 as fp8
from torch import nn

import machine
from safety import alike, assert_close
from safety import run_with_gradients as run
from test_quantized import of_fp8
from test_quantized_models import MLPS, WIDE, forced
from test_quantized_models import MODELS as FOUR_BIT

MODELS = {name: of[:4] for name, of in FOUR_BIT.items() if name != "BERT"}
assert forced  # a fixture
BLOCK = (128, 128)


@pytest.fixture
def own(monkeypatch):
    """The products that layers make in their own way."""
    called = []

    def multiply(x, weight, scales, block, dtype, activation_scale=None):
        called.append(tuple(weight.shape))
        wide = fp8._dequantize_fp8_weight(weight, scales.float(), block, torch.float32)
        return (x.float() @ wide.t()).to(dtype)

    monkeypatch.setattr(fp8, "_FINEGRAINED_FP8", fp8.FineGrainedFP8(multiply, None, None))
    monkeypatch.setenv("TRANSFORMERS_DISABLE_DEEPGEMM_LINEAR", "1")
    return called


@pytest.fixture
def ops(fused_mlp, monkeypatch, dispatched):
    quantized = sys.modules[f"{fused_mlp.__name__}.quantized.weights"]
    called, op = [], quantized.run
    monkeypatch.setattr(quantized, "run", lambda *given: (called.append("packed"), op(*given))[1])
    return called


def layer_of(fused_mlp, source, block=BLOCK):
    made = fp8.FP8Linear(source.in_features, source.out_features, block, has_bias=source.bias is not None)
    weight = of_fp8(fused_mlp, source.weight, block or tuple(source.weight.shape))
    made.weight = nn.Parameter(weight.data, requires_grad=False)
    made.weight_scale_inv = nn.Parameter(weight.scales if block else weight.scales[0, 0], requires_grad=False)
    made.bias = source.bias
    return made


def build(fused_mlp, kind, device, **options):
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    name, config, own, _ = MODELS[kind]
    model = getattr(transformers, name)(getattr(transformers, config)(**WIDE | own)).to(device, dtype)
    for path, layer in list(model.named_modules()):
        if type(layer) is nn.Linear and "head" not in path and "att" not in path:
            parent, _, child = path.rpartition(".")
            setattr(model.get_submodule(parent), child, layer_of(fused_mlp, layer, **options))
    inputs = {"input_ids": torch.randint(3, 64, (2, 9), device=device)}
    return model.eval().requires_grad_(False), inputs


def pair(fused_mlp, *rest, **options):
    model, inputs = build(fused_mlp, *rest, **options)
    fused = copy.deepcopy(model)
    report = fused_mlp.fuse_mlps(fused)
    assert not report.left
    return model, fused, inputs


def most_rows(block=BLOCK):
    """Hopper GPUs round more rows to FP8, but where blocks are lower."""
    if machine.device_type() == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        return 16
    return 128 if machine.device_type() == "cuda" and block != (96, 128) else 32


def tolerance(device):
    return 1e-4 if device.type == "cpu" else 6e-2


@pytest.mark.parametrize("block", [BLOCK, None], ids=["blocks", "one scale"])
@pytest.mark.parametrize("kind", MODELS)
def test_values(fused_mlp, device, ops, own, kind, block):
    model, fused, inputs = pair(fused_mlp, kind, device, block=block)
    wanted = f"{MODELS[kind][3]} in fp8 up to {most_rows()} rows"
    assert {part.pattern for part in fused_mlp.explain(fused).parts} == {wanted}
    expected = run(model, inputs)
    assert len(own) == MLPS * (3 if kind == "Llama" else 2)
    own.clear()
    assert_close(run(fused, inputs), expected, tolerance(device))
    assert (ops, own) == (["packed"] * MLPS, [])


@torch.no_grad()
def test_layers_alone(fused_mlp, device, ops, own, monkeypatch):
    """Up to as many rows as an MLP's; more are left."""
    monkeypatch.setattr(sys.modules[f"{fused_mlp.__name__}.models.running.adapted"], "_LEAST_ELEMENTS", 0)
    monkeypatch.setattr(sys.modules[f"{fused_mlp.__name__}.models.running.adapted"], "_LEAST_WEIGHTS", 0)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    layer = layer_of(fused_mlp, nn.Linear(256, 128, dtype=dtype)).to(device).requires_grad_(False)
    fused = copy.deepcopy(nn.Sequential(layer))
    report = fused_mlp.fuse_mlps(fused)
    assert [module.pattern for module in report.fused] == [f"linear in fp8 up to {most_rows()} rows"]
    for rows, is_fused in ((1, True), (most_rows(), True), (most_rows() + 1, False)):
        x = torch.randn(rows, 256, device=device, dtype=dtype)
        expected = layer(x)
        own.clear()
        ops.clear()
        assert_close([fused(x)], [expected], tolerance(device))
        assert (len(ops), len(own)) == ((1, 0) if is_fused else (0, 1))


def other_weight(layer):
    layer.weight = nn.Parameter(layer.weight.flip(0).contiguous(), requires_grad=False)


def decoded(layer):
    wide = fp8._dequantize_fp8_weight(layer.weight, layer.weight_scale_inv, BLOCK, layer.bias.dtype)
    layer.weight = nn.Parameter(wide, requires_grad=False)


def static(layer):
    layer.activation_scheme = "static"
    layer.activation_scale = nn.Parameter(torch.ones((), device=layer.weight.device), requires_grad=False)


def of_powers(layer):
    powers = layer.weight_scale_inv.log2().round().exp2().to(torch.float8_e8m0fnu)
    layer.weight_scale_inv = nn.Parameter(powers, requires_grad=False)


def of_another_block(layer):
    layer.block_size, scales = (32, 32), layer.weight_scale_inv
    wide = scales.repeat_interleave(4, 0).repeat_interleave(2, 1).contiguous()
    layer.weight_scale_inv = nn.Parameter(wide, requires_grad=False)


# The change to the first projection, whether the MLP is fused then, and the products that layers make themselves.
CHANGES = {
    "weight": (other_weight, True, 0),
    "hook": (lambda layer: layer.register_forward_hook(lambda module, given, output: output * 2), False, 3),
    "decoded": (decoded, False, 2),
    "static": (static, False, 3),
    "powers of two": (of_powers, True, 0),
    "another block": (of_another_block, False, 3),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_seen(fused_mlp, device, ops, own, change):
    model, fused, inputs = pair(fused_mlp, "Llama", device)
    function, is_fused, products = CHANGES[change]
    alike(lambda each: function(each.model.layers[0].mlp.gate_proj), model, fused)
    expected = run(model, inputs)[:1]
    own.clear()
    assert_close(run(fused, inputs)[:1], expected, tolerance(device))
    assert (len(ops), len(own)) == (MLPS - 1 + is_fused, products)


@pytest.mark.parametrize("block", [BLOCK, None, (96, 128)], ids=["blocks", "one scale", "lower blocks"])
def test_many_rows_are_left(fused_mlp, device, ops, own, block):
    model, fused, inputs = pair(fused_mlp, "Llama", device, block=block)
    most = most_rows(block) // 2
    for rows, is_fused in ((most - 2, True), (most, True), (most + 1, False)):
        inputs = {"input_ids": torch.randint(3, 64, (2, rows), device=device)}
        expected = run(model, inputs)
        own.clear()
        ops.clear()
        assert_close(run(fused, inputs), expected, tolerance(device))
        assert (len(ops), len(own)) == ((MLPS, 0) if is_fused else (0, 3 * MLPS))


@pytest.mark.parametrize("state", ["gradient", "bias", "autocast"])
def test_left_to_the_layers(fused_mlp, device, ops, own, state):
    model, fused, inputs = pair(fused_mlp, "Llama", device)
    if state == "gradient":
        alike(lambda each: each.get_input_embeddings().requires_grad_(True), model, fused)
    if state == "bias":
        alike(lambda each: each.model.layers[0].mlp.gate_proj.bias.requires_grad_(True), model, fused)
    options = {"autocast": torch.bfloat16} if state == "autocast" else {}
    rounding = 2.0**-7 if options else 0.0  # that of bfloat16, behind norms whose last bits differ
    expected = run(model, inputs, **options)
    own.clear()
    assert_close(run(fused, inputs, **options), expected, max(tolerance(device), rounding))
    assert (ops, len(own)) == ([], 3 * MLPS)


def test_patched_products_are_left(fused_mlp, device, ops, own, monkeypatch):
    model, fused, inputs = pair(fused_mlp, "Llama", device)
    original = fp8.fp8_linear
    monkeypatch.setattr(fp8, "fp8_linear", lambda *given, **named: original(*given, **named) * 2)
    assert_close(run(fused, inputs), run(model, inputs), tolerance(device))
    assert ops == []
    assert "a patched" in fused_mlp.explain(fused).reason


@pytest.mark.skipif(machine.device_type() != "cpu", reason="on a GPU they are fused")
def test_left_on_a_cpu(fused_mlp, device, ops, own):
    with fused_mlp.backend("auto"):
        model, inputs = build(fused_mlp, "Llama", device)
        fused = copy.deepcopy(model)
        report = fused_mlp.fuse_mlps(fused)
        assert len(report.left) == MLPS
        assert all("FP8Linear on a CPU, where its own kernel runs" in module.reason for module in report.left)
        assert_close(run(fused, inputs), run(model, inputs), tolerance(device))
    assert ops == []
