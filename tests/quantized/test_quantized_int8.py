"""Models with weights of int8 and FP8 in rows, fused and not: bitsandbytes' Linear8bitLt, torchao's tensors in
linear layers of torch, and transformers' layers for compressed-tensors.

Their own products round x too, or decode the weight at each call. On a CPU the compiled ops are forced.
"""

import copy
import itertools

import pytest
import torch
import transformers
from torch import nn
from transformers.integrations.compressed_tensors import CompressedTensorsFP8Linear

import machine
from safety import alike, assert_close
from safety import run_with_gradients as run
from test_quantized_fp8 import MLPS, MODELS, WIDE, forced, ops

bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes does not load on this machine", exc_type=ImportError)

ON_CPU = machine.device_type() == "cpu"
assert forced and ops  # fixtures


def of_bitsandbytes(source):
    made = bnb.nn.Linear8bitLt(
        source.in_features, source.out_features, bias=source.bias is not None, has_fp16_weights=False, threshold=6.0
    )
    made.weight = bnb.nn.Int8Params(source.weight.detach().float().cpu(), requires_grad=False, has_fp16_weights=False)
    made = made.to(source.weight.device)
    made.bias = source.bias
    return made


def of_torchao(config):
    def quantized(source):
        torchao = pytest.importorskip("torchao.quantization")
        made = nn.Sequential(copy.deepcopy(source))
        torchao.quantize_(made, getattr(torchao, config)())
        return made[0]

    return quantized


def of_rows(source):
    made = CompressedTensorsFP8Linear(source.in_features, source.out_features, has_bias=source.bias is not None)
    scales = source.weight.detach().float().abs().amax(1, keepdim=True) / 448
    made.weight = nn.Parameter((source.weight.detach().float() / scales).to(torch.float8_e4m3fn), requires_grad=False)
    made.weight_scale = nn.Parameter(scales.t().contiguous(), requires_grad=False)
    made.bias = source.bias
    return made


# The function that makes a layer of a plain one, the format, and the error of its own products.
KINDS = {
    "bitsandbytes": (of_bitsandbytes, "int8", 4e-2),
    "torchao int8": (of_torchao("Int8WeightOnlyConfig"), "int8", 1e-4),
    "torchao fp8": (of_torchao("Float8WeightOnlyConfig"), "fp8", 1e-4),
    "compressed-tensors fp8": (of_rows, "fp8", 8e-2),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def build(device, kind, name="Llama"):
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    model, config, own, _ = MODELS[name]
    model = getattr(transformers, model)(getattr(transformers, config)(**WIDE | own)).to(device, dtype)
    for path, layer in list(model.named_modules()):
        if type(layer) is nn.Linear and "head" not in path and "att" not in path:
            parent, _, child = path.rpartition(".")
            setattr(model.get_submodule(parent), child, KINDS[kind][0](layer))
    return model.eval().requires_grad_(False), {"input_ids": torch.randint(3, 64, (2, 9), device=device)}


def pair(fused_mlp, *rest):
    model, inputs = build(*rest)
    fused = copy.deepcopy(model)
    report = fused_mlp.fuse_mlps(fused)
    assert not report.left
    return model, fused, inputs


def tolerance(kind):
    error = KINDS[kind][2]
    return error if ON_CPU else max(error, 6e-2)


@pytest.mark.parametrize("name", MODELS)
@kinds
def test_values(fused_mlp, device, ops, kind, name):
    model, fused, inputs = pair(fused_mlp, device, kind, name)
    (pattern,) = {part.pattern for part in fused_mlp.explain(fused).parts}
    assert pattern.startswith(f"{MODELS[name][3]} in {KINDS[kind][1]}")
    for _ in range(2):  # the first call of bitsandbytes' layers moves their scales
        assert_close(run(fused, inputs), run(model, inputs), tolerance(kind))
    assert ops == ["packed"] * MLPS * 2


def hook(layer):
    layer.register_forward_hook(lambda module, given, output: output * 2)


def of_another(layer):
    """Other values, in the place of those."""
    data, scales = quantized_parts(layer)
    data.copy_(data.flip(0))
    scales.copy_(scales.flip(0))


def quantized_parts(layer):
    if hasattr(layer, "weight_scale"):
        return layer.weight, layer.weight_scale
    if hasattr(layer, "state"):
        holder = layer.state if layer.weight.CB is None else layer.weight
        return holder.CB, holder.SCB
    return layer.weight.qdata, layer.weight.scale


def decoded(layer):
    """A plain weight in the place of a quantised one."""
    data, scales = quantized_parts(layer)
    divisor = 127 if hasattr(layer, "state") else 1
    wide = (data.float() * scales.view(-1, 1) / divisor).to(torch.float32 if ON_CPU else torch.bfloat16)
    if hasattr(layer, "state"):
        layer.state.has_fp16_weights = True
        layer.weight = bnb.nn.Int8Params(wide, requires_grad=False, has_fp16_weights=True)
    else:
        layer.weight = nn.Parameter(wide, requires_grad=False)


# The change of the first projection, and whether the MLP is fused then.
CHANGES = {"hook": (hook, False), "other values": (of_another, True), "decoded": (decoded, False)}


NO_OWN = ("compressed-tensors fp8", "decoded")  # fails by itself


@pytest.mark.parametrize(("kind", "change"), [each for each in itertools.product(KINDS, CHANGES) if each != NO_OWN])
def test_changes_are_seen(fused_mlp, device, ops, kind, change):
    model, fused, inputs = pair(fused_mlp, device, kind)
    function, is_fused = CHANGES[change]
    for _ in range(2):  # before the first call, and behind it
        alike(lambda each: function(each.model.layers[0].mlp.gate_proj), model, fused)
        ops.clear()
        assert_close(run(fused, inputs), run(model, inputs), tolerance(kind))
        assert len(ops) == MLPS - 1 + is_fused
        if change == "decoded":
            return


@kinds
def test_many_rows_are_left(fused_mlp, device, ops, kind):
    model, fused, inputs = pair(fused_mlp, device, kind)
    (pattern,) = {part.pattern for part in fused_mlp.explain(fused).parts}
    is_any = not ON_CPU and torch.cuda.get_device_capability() == (9, 0) and KINDS[kind][1] == "int8"
    assert is_any == (" up to " not in pattern)
    most = 600 if is_any else int(pattern.split(" up to ")[1].split()[0])
    for rows, is_fused in ((most // 2, True), (most // 2 + 1, is_any)):
        inputs = {"input_ids": torch.randint(3, 64, (2, rows), device=device)}
        ops.clear()
        assert_close(run(fused, inputs), run(model, inputs), tolerance(kind))
        assert len(ops) == (MLPS if is_fused else 0)


@kinds
def test_autocast_is_left_to_the_layers(fused_mlp, device, ops, kind):
    model, fused, inputs = pair(fused_mlp, device, kind)
    found, expected = (run(each, inputs, autocast=torch.bfloat16) for each in (fused, model))
    assert_close(found, expected, max(tolerance(kind), 4e-3))  # norms are fused, whose rounding is rounded again
    assert ops == []


def test_dynamic_rounding_is_left(fused_mlp, device, ops):
    """x is rounded to int8 by torchao: its products of many rows are faster."""
    layer = of_torchao("Int8DynamicActivationInt8WeightConfig")
    model, inputs = build(device, "torchao int8")
    mlp = model.model.layers[0].mlp
    mlp.gate_proj = layer(nn.Linear(64, 256, device=device, dtype=model.dtype)).requires_grad_(False)
    fused = copy.deepcopy(model)
    fused_mlp.fuse_mlps(fused)
    assert_close(run(fused, inputs), run(model, inputs), tolerance("bitsandbytes"))
    assert len(ops) == MLPS - 1


def test_patched_products_are_left(fused_mlp, device, ops, monkeypatch):
    model, fused, inputs = pair(fused_mlp, device, "bitsandbytes")
    original = bnb.matmul
    monkeypatch.setattr(bnb, "matmul", lambda *given, **named: original(*given, **named) * 2)
    assert_close(run(fused, inputs), run(model, inputs), tolerance("bitsandbytes"))
    assert ops == []
    assert "a patched" in fused_mlp.explain(fused).reason


@pytest.mark.skipif(not ON_CPU, reason="on a GPU they are fused")
@kinds
def test_by_themselves_on_a_cpu(fused_mlp, device, ops, kind):
    """Those of int8 are read packed where there are tiles, up to 4 rows of float32; others are left."""
    takes = KINDS[kind][1] == "int8" and machine.has_tiles()
    with fused_mlp.backend("auto"):
        model, inputs = build(device, kind)
        fused = copy.deepcopy(model)
        report = fused_mlp.fuse_mlps(fused)
        assert len(report.left) == (0 if takes else MLPS)
        assert all("on a CPU, where its own kernel runs" in module.reason for module in report.left), report
        assert_close(run(fused, inputs), run(model, inputs), tolerance(kind))
        assert ops == []
        few = {"input_ids": inputs["input_ids"][:1, :4]}
        with torch.no_grad():
            assert_close(run(fused, few), run(model, few), tolerance(kind))
    assert ops == (["packed"] * MLPS if takes else [])
