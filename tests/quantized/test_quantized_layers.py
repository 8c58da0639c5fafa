"""Models with int8 and FP8 weights, fused and not: bitsandbytes' Linear8bitLt, torchao's tensors in torch's linear
layers, transformers' layers for compressed-tensors, and its FP8Linear.

Their own products also round x, or decode the weight at each call. On a CPU the compiled ops are forced.
"""

import copy
import functools
import importlib
import sys

import pytest
import torch
import transformers
import transformers.integrations.finegrained_fp8 as fp8
from torch import nn
from transformers.integrations.compressed_tensors import CompressedTensorsFP8Linear

import machine
from safety import alike, assert_close
from safety import run_with_gradients as run
from test_quantized import of_fp8
from test_quantized_models import MLPS, WIDE, forced
from test_quantized_models import MODELS as FOUR_BIT

bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes does not load on this machine", exc_type=ImportError)

ON_CPU = machine.device_type() == "cpu"
IS_HOPPER = not ON_CPU and torch.cuda.get_device_capability() == (9, 0)
MODELS = {name: of[:4] for name, of in FOUR_BIT.items() if name != "BERT"}
assert forced  # a fixture


def decode_in_products(monkeypatch):
    """Replaces FP8Linear's products, kernels from the Hub, by products with the decoded weight."""

    def multiply(x, weight, scales, block, dtype, activation_scale=None):
        wide = fp8._dequantize_fp8_weight(weight, scales.float(), block, torch.float32)
        return (x.float() @ wide.t()).to(dtype)

    monkeypatch.setattr(fp8, "_FINEGRAINED_FP8", fp8.FineGrainedFP8(multiply, None, None))
    monkeypatch.setenv("TRANSFORMERS_DISABLE_DEEPGEMM_LINEAR", "1")


own = pytest.fixture(autouse=True)(decode_in_products)


@pytest.fixture
def ops(fused_mlp, monkeypatch, dispatched):
    quantized = sys.modules[f"{fused_mlp.__name__}.quantized.weights"]
    called, op = [], quantized.run
    monkeypatch.setattr(quantized, "run", lambda *given: (called.append("packed"), op(*given))[1])
    return called


def of_bitsandbytes(source):
    made = bnb.nn.Linear8bitLt(
        source.in_features, source.out_features, bias=source.bias is not None, has_fp16_weights=False, threshold=6.0
    )
    made.weight = bnb.nn.Int8Params(source.weight.detach().float().cpu(), requires_grad=False, has_fp16_weights=False)
    made = made.to(source.weight.device)
    made.bias = source.bias
    return made


def of_torchao(config, **options):
    def quantized(source):
        torchao = pytest.importorskip("torchao.quantization")
        made = nn.Sequential(copy.deepcopy(source))
        torchao.quantize_(made, getattr(torchao, config)(**options))
        return made[0]

    return quantized


def of_dynamic(granularity, **limits):
    """A layer whose x torchao rounds to FP8; ``quantize_`` makes none on a CPU."""

    def quantized(source):
        torchao = pytest.importorskip("torchao.quantization")
        tensors = importlib.import_module("torchao.quantization.quantize_.workflows.float8.float8_tensor")
        config = importlib.import_module("torchao.float8.inference").Float8MMConfig(use_fast_accum=True)
        kind = getattr(torchao, granularity)()
        rounding = tensors.QuantizeTensorToFloat8Kwargs(granularity=kind, **limits)
        made, weight = copy.deepcopy(source), source.weight.detach()
        options = {"granularity": kind, "mm_config": config, "act_quant_kwargs": rounding}
        made.weight = nn.Parameter(tensors.Float8Tensor.from_hp(weight, **options), requires_grad=False)
        return made

    return quantized


def of_rows(source):
    made = CompressedTensorsFP8Linear(source.in_features, source.out_features, has_bias=source.bias is not None)
    scales = source.weight.detach().float().abs().amax(1, keepdim=True) / 448
    made.weight = nn.Parameter((source.weight.detach().float() / scales).to(torch.float8_e4m3fn), requires_grad=False)
    made.weight_scale = nn.Parameter(scales.t().contiguous(), requires_grad=False)
    made.bias = source.bias
    return made


def of_blocks(source, fused_mlp, block=None):
    """An FP8Linear with a scale for each block, or one scale in total."""
    made = fp8.FP8Linear(source.in_features, source.out_features, block, has_bias=source.bias is not None)
    weight = of_fp8(fused_mlp, source.weight, block or tuple(source.weight.shape))
    made.weight = nn.Parameter(weight.data, requires_grad=False)
    made.weight_scale_inv = nn.Parameter(weight.scales if block else weight.scales[0, 0], requires_grad=False)
    made.bias = source.bias
    return made


# The function that converts a plain layer, the format, and the error of the layer's own products.
KINDS = {
    "bitsandbytes": (of_bitsandbytes, "int8", 4e-2),
    "torchao int8": (of_torchao("Int8WeightOnlyConfig"), "int8", 1e-4),
    "torchao fp8": (of_torchao("Float8WeightOnlyConfig"), "fp8", 1e-4),
    "torchao fp8 in rows": (of_dynamic("PerRow"), "fp8", 8e-2),
    "torchao fp8 rounded whole": (of_dynamic("PerTensor"), "fp8", 8e-2),
    "compressed-tensors fp8": (of_rows, "fp8", 8e-2),
    "fp8 under one scale": (of_blocks, "fp8", 1e-4),
    "fp8 in blocks": (functools.partial(of_blocks, block=(128, 128)), "fp8", 1e-4),
    "fp8 in low blocks": (functools.partial(of_blocks, block=(96, 128)), "fp8", 1e-4),
}
*MOST_KINDS, LOW = KINDS  # a block of the last kind would straddle the halves of a packed weight
OF_TRANSFORMERS = [kind for kind in KINDS if kind.startswith("fp8")]  # its FP8Linear
kinds = pytest.mark.parametrize("kind", MOST_KINDS)


def dtype_on(device):
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def layer_of(fused_mlp, kind, source):
    return KINDS[kind][0](source, **({"fused_mlp": fused_mlp} if kind in OF_TRANSFORMERS else {}))


def build(fused_mlp, device, kind, name="Llama"):
    model, config, own, _ = MODELS[name]
    model = getattr(transformers, model)(getattr(transformers, config)(**WIDE | own)).to(device, dtype_on(device))
    for path, layer in list(model.named_modules()):
        if type(layer) is nn.Linear and "head" not in path and "att" not in path:
            model.set_submodule(path, layer_of(fused_mlp, kind, layer))
    return model.eval().requires_grad_(False), {"input_ids": torch.randint(3, 64, (2, 9), device=device)}


def pair(fused_mlp, *rest):
    model, inputs = build(fused_mlp, *rest)
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


@pytest.mark.parametrize("kind", ["torchao fp8", "compressed-tensors fp8", *OF_TRANSFORMERS[:2]])
@torch.no_grad()
def test_layers_alone(fused_mlp, device, ops, monkeypatch, kind):
    """Single layers are fused up to as many rows as an MLP; more rows are left to the layer."""
    monkeypatch.setattr(sys.modules[f"{fused_mlp.__name__}.models.running.adapted"], "_LEAST_ELEMENTS", 0)
    monkeypatch.setattr(sys.modules[f"{fused_mlp.__name__}.models.running.adapted"], "_LEAST_WEIGHTS", 0)
    layer = layer_of(fused_mlp, kind, nn.Linear(256, 128, dtype=dtype_on(device))).to(device).requires_grad_(False)
    fused, most = copy.deepcopy(nn.Sequential(layer)), most_rows(kind)
    report = fused_mlp.fuse_mlps(fused)
    up_to = "" if most is None else f" up to {most} rows"
    assert [module.pattern for module in report.fused] == [f"linear in fp8{up_to}"]
    for rows, is_fused in ((1, True), (most or 600, True), ((most or 600) + 1, most is None)):
        x = torch.randn(rows, 256, device=device, dtype=dtype_on(device))
        ops.clear()
        assert_close([fused(x)], [layer(x)], tolerance(kind))
        assert len(ops) == is_fused


def hook(layer):
    layer.register_forward_hook(lambda module, given, output: output * 2)


def of_another(layer):
    """Changes the values in place."""
    for tensor in quantized_parts(layer):
        tensor.copy_(tensor.flip(0) if tensor.dim() > 0 else 2 * tensor)


def quantized_parts(layer):
    for name in ("weight_scale", "weight_scale_inv"):
        if hasattr(layer, name):
            return layer.weight, getattr(layer, name)
    if hasattr(layer, "state"):
        holder = layer.state if layer.weight.CB is None else layer.weight
        return holder.CB, holder.SCB
    return layer.weight.qdata, layer.weight.scale


def decoded(layer):
    """Replaces a quantised weight by a plain one."""
    data, scales = quantized_parts(layer)
    dtype = torch.float32 if ON_CPU else torch.bfloat16
    if isinstance(layer, fp8.FP8Linear):
        wide = fp8._dequantize_fp8_weight(data, scales, layer.block_size, dtype)
    else:
        wide = (data.float() * scales.view(-1, 1) / (127 if hasattr(layer, "state") else 1)).to(dtype)
    if hasattr(layer, "state"):
        layer.state.has_fp16_weights = True
        layer.weight = bnb.nn.Int8Params(wide, requires_grad=False, has_fp16_weights=True)
    else:
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


# The change to the first projection, and whether the MLP is fused afterwards; the second table is for FP8Linear.
CHANGES = {"hook": (hook, False), "other values": (of_another, True), "decoded": (decoded, False)}
OF_FP8_LINEAR = {"static": (static, False), "powers": (of_powers, True), "another block": (of_another_block, False)}
CASES = [(kind, change) for kind in MOST_KINDS for change in CHANGES]
CASES.remove(("compressed-tensors fp8", "decoded"))  # the unfused model fails
CASES += [("fp8 in blocks", change) for change in OF_FP8_LINEAR]


@pytest.mark.parametrize(("kind", "change"), CASES)
def test_changes_are_seen(fused_mlp, device, ops, kind, change):
    model, fused, inputs = pair(fused_mlp, device, kind)
    function, is_fused = {**CHANGES, **OF_FP8_LINEAR}[change]
    for _ in range(2):  # before the first call, and after it
        alike(lambda each: function(each.model.layers[0].mlp.gate_proj), model, fused)
        ops.clear()
        assert_close(run(fused, inputs), run(model, inputs), tolerance(kind))
        assert len(ops) == MLPS - 1 + is_fused
        if change == "decoded" or change in OF_FP8_LINEAR:
            return


def most_rows(kind):
    """The most rows that are fused. On Hopper GPUs x is rounded in FP8 layers that round it themselves, unless their
    blocks are lower, and int8 weights are decoded.
    """
    if IS_HOPPER:
        return 32 if kind in ("torchao fp8", LOW) else None
    return 32 if ON_CPU else 16


@pytest.mark.parametrize("kind", KINDS)
def test_many_rows_are_left(fused_mlp, device, ops, kind):
    model, fused, _ = pair(fused_mlp, device, kind)
    (pattern,) = {part.pattern for part in fused_mlp.explain(fused).parts}
    most = most_rows(kind)
    assert pattern.partition(" up to ")[2] == ("" if most is None else f"{most} rows")
    for rows, is_fused in (((most or 600) // 2, True), ((most or 600) // 2 + 1, most is None)):
        inputs = {"input_ids": torch.randint(3, 64, (2, rows), device=device)}
        ops.clear()
        assert_close(run(fused, inputs), run(model, inputs), tolerance(kind))
        assert len(ops) == (MLPS if is_fused else 0)


@pytest.mark.skipif(not IS_HOPPER, reason="Hopper's kernels round many rows")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if KINDS[kind][1] == "fp8"])
def test_many_rows_past_the_dispatcher(fused_mlp, device, kind):
    """The kernels launched by compiled code compute the same as those of the op, with the block's norm and sum."""
    model, fused, _ = pair(fused_mlp, device, kind)
    for rows in (20, 50, 150):
        inputs = {"input_ids": torch.randint(3, 64, (2, rows), device=device)}
        found = run(fused, inputs)
        assert_close(found, run(model, inputs), tolerance(kind))
        with fused_mlp.backend("cuda"):  # through the dispatcher
            assert_close(run(fused, inputs), found, 1e-2)


@kinds
def test_autocast_is_left_to_the_layers(fused_mlp, device, ops, kind):
    model, fused, inputs = pair(fused_mlp, device, kind)
    found, expected = (run(each, inputs, autocast=torch.bfloat16) for each in (fused, model))
    assert_close(found, expected, max(tolerance(kind), 2.0**-7))  # norms are fused, and their rounding is rounded again
    assert ops == []


@pytest.mark.parametrize("trained", ["embed_tokens", "layers.0.mlp.gate_proj"])
def test_training_is_left_to_fp8_linear(fused_mlp, device, ops, trained):
    model, fused, inputs = pair(fused_mlp, device, "fp8 in blocks")
    for each in (model, fused):
        part = each.model.get_submodule(trained)
        getattr(part, "bias", part.weight).requires_grad_(True)
    assert_close(run(fused, inputs), run(model, inputs), tolerance("fp8 in blocks"))
    assert ops == []


def test_dynamic_rounding_is_left(fused_mlp, device, ops):
    """Layers whose x torchao rounds to int8 are left: its products are faster for many rows."""
    layer = of_torchao("Int8DynamicActivationInt8WeightConfig")
    model, inputs = build(fused_mlp, device, "torchao int8")
    mlp = model.model.layers[0].mlp
    mlp.gate_proj = layer(nn.Linear(64, 256, device=device, dtype=model.dtype)).requires_grad_(False)
    fused = copy.deepcopy(model)
    fused_mlp.fuse_mlps(fused)
    assert_close(run(fused, inputs), run(model, inputs), tolerance("bitsandbytes"))
    assert len(ops) == MLPS - 1


@pytest.mark.parametrize("limits", [{}, {"hp_value_ub": 2.0}, {"hp_value_lb": 1e-3}], ids=str)
def test_limits_of_x_are_left(fused_mlp, device, ops, limits):
    """torchao's layers may limit x before they round it, which no kernel does."""
    model, inputs = build(fused_mlp, device, "torchao fp8")
    mlp = model.model.layers[0].mlp
    layer = nn.Linear(64, 256, bias=False, device=device, dtype=model.dtype)
    mlp.gate_proj = of_dynamic("PerRow", **limits)(layer).requires_grad_(False)
    fused = copy.deepcopy(model)
    fused_mlp.fuse_mlps(fused)
    assert_close(run(fused, inputs), run(model, inputs), tolerance("torchao fp8 in rows"))
    assert len(ops) == MLPS - bool(limits)


@pytest.mark.parametrize(
    ("kind", "owner", "name"), [("bitsandbytes", bnb, "matmul"), ("fp8 in blocks", fp8, "fp8_linear")]
)
def test_patched_products_are_left(fused_mlp, device, ops, monkeypatch, kind, owner, name):
    model, fused, inputs = pair(fused_mlp, device, kind)
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *given, **named: original(*given, **named) * 2)
    assert_close(run(fused, inputs), run(model, inputs), tolerance(kind))
    assert ops == []
    assert "a patched" in fused_mlp.explain(fused).reason


@pytest.mark.skipif(not ON_CPU, reason="on a GPU they are fused")
@kinds
def test_by_themselves_on_a_cpu(fused_mlp, device, ops, kind):
    """On CPUs with tiles, int8 weights are read packed for up to 4 rows of float32; all else is left."""
    takes = KINDS[kind][1] == "int8" and machine.has_tiles()
    with fused_mlp.backend("auto"):
        model, inputs = build(fused_mlp, device, kind)
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
