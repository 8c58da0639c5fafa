"""int4 in tensor-core tiles: torchao's Int4TilePackedTo4dTensor in torch's linear layers.

torch's product for it runs only on GPUs; elsewhere the compiled ops are forced, and the weights are packed here.
"""

import contextlib
import copy
import importlib
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import machine
from modules import Gated
from safety import assert_close

torchao = pytest.importorskip("torchao.quantization")

ON_CPU = machine.device_type() == "cpu"
HOPPER = not ON_CPU and torch.cuda.get_device_capability() == (9, 0)


@pytest.fixture(autouse=True)
def forced(fused_mlp):
    with contextlib.nullcontext() if HOPPER else fused_mlp.backend(machine.device_type()):
        yield


@pytest.fixture
def ops(fused_mlp, monkeypatch):
    quantized = sys.modules[f"{fused_mlp.__name__}.quantized.weights"]
    called, op = [], quantized.run
    monkeypatch.setattr(quantized, "run", lambda *given: (called.append("packed"), op(*given))[1])
    return called


def in_tiles(codes):
    """Packs codes ``[out, in]`` as the lanes of a warp hold them for m16n8k16, padded to whole tiles."""
    out, width = codes.shape
    codes = F.pad(codes.int(), (0, -width % 1024, 0, -out % 8))
    words = torch.zeros(codes.shape[0] // 8, codes.shape[1] // 128, 32, 4, dtype=torch.int32, device=codes.device)
    for lane in range(32):
        for word in range(4):
            for place, column in enumerate((0, 8, 16, 24, 1, 9, 17, 25)):
                found = codes[lane // 4 :: 8, word * 32 + lane % 4 * 2 + column :: 128]
                words[:, :, lane, word] |= found << 4 * place
    return words


def made(out, width, group, device):
    """A layer with such a weight, and the decoded weight in float64."""
    codes = torch.randint(16, (out, width), device=device)
    words = in_tiles(codes)
    pairs = torch.randn(words.shape[1] * 128 // group, words.shape[0] * 8, 2, device=device)
    pairs = (pairs * 0.3 * width**-0.5).bfloat16()
    scale, zero = pairs.double().permute(2, 1, 0).repeat_interleave(group, 2)[:, :out, :width]
    layer = nn.Linear(width, out, bias=False, device=device, dtype=torch.bfloat16)
    weight = torchao.Int4TilePackedTo4dTensor(words, pairs, [1, group], torch.Size((out, width)))
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer, (codes - 8) * scale + zero


@pytest.mark.parametrize("shape", [(8, 1024, 128), (13, 1032, 256), (72, 1000, 32), (256, 2048, 64)])
def test_decoded(fused_mlp, device, shape):
    layer, wanted = made(*shape, device)
    weight = layer.weight
    found = fused_mlp.QuantizedWeight.from_int4_tiles(weight.qdata, weight.scale_and_zero, shape[:2], shape[2])
    assert found.data.data_ptr() == weight.qdata.data_ptr()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(found.dequantize(dtype), wanted.to(dtype))
    if not ON_CPU:
        identity = torch.eye(shape[1], device=device, dtype=torch.bfloat16)
        assert torch.equal(layer(identity).t(), found.dequantize(torch.bfloat16))
    x = torch.randn(5, shape[1], device=device, dtype=torch.bfloat16)
    assert_close(fused_mlp.linear(x, found).double(), x.double() @ wanted.t(), 8e-3)


def test_what_is_no_such_weight(fused_mlp, device):
    layer, _ = made(16, 1024, 64, device)
    words, pairs = layer.weight.qdata, layer.weight.scale_and_zero
    of_tiles, x = fused_mlp.QuantizedWeight.from_int4_tiles, torch.randn(2, 1024, device=device).bfloat16()
    with pytest.raises(TypeError, match=r"weight must be a tensor \[out / 8, in / 128, 32, 4\]"):
        of_tiles(words.view(-1), pairs, (16, 1024), 64)
    for weight, error, said in (
        (of_tiles(words, pairs, (24, 1024), 64), ValueError, "weight.data must be contiguous with 3072 elements"),
        (of_tiles(words, pairs[1:], (16, 1024), 64), ValueError, "weight.scales must be contiguous with 512 elements"),
        (of_tiles(words, pairs.float(), (16, 1024), 64), TypeError, "weight.scales must be a tensor of torch.bfloat16"),
        (of_tiles(words, pairs, (16, 1024), 48), ValueError, "a multiple of 32 columns"),
    ):
        with pytest.raises(error, match=said):
            fused_mlp.linear(x, weight)


def built(fused_mlp, device, group=64):
    mlp = Gated(sizes=(1024, 256, 1024))
    weights = []
    for name, sizes in (("gate_proj", (256, 1024)), ("up_proj", (256, 1024)), ("down_proj", (1024, 256))):
        layer, weight = made(*sizes, group, device)
        setattr(mlp, name, layer)
        weights.append(weight)
    model = nn.Sequential(mlp).eval().requires_grad_(False)
    fused = copy.deepcopy(model)
    assert not fused_mlp.fuse_mlps(fused).left
    return model, fused, weights


def product(x, weights):
    gate, up, down = weights
    x = x.double()
    return (F.silu(x @ gate.t()) * (x @ up.t())) @ down.t()


def test_an_mlp(fused_mlp, device, ops):
    model, fused, weights = built(fused_mlp, device)
    x = torch.randn(3, 50, 1024, device=device, dtype=torch.bfloat16)
    for rows in (x, x[:1, :1], x[0, :20]):
        assert_close(fused(rows).double(), product(rows, weights), 2e-2)
    assert ops == ["packed"] * (1 if HOPPER else 3)  # elsewhere compiled code reads the weights
    assert "at least" not in str(fused_mlp.explain(fused).parts)
    if not ON_CPU:
        assert_close(fused(x), model(x), 2e-2)
    ops.clear()
    with contextlib.suppress(NotImplementedError, RuntimeError):  # torch may have no product to fall back on
        fused(x.half())
    assert ops == []


@pytest.mark.skipif(not HOPPER, reason="where they were not measured they are forced")
def test_few_rows_and_others_are_left(fused_mlp, device, ops):
    """Few rows with groups of 32, autocast and autograd are left to the layers: no few-row kernel reads such groups."""
    model, fused, _ = built(fused_mlp, device, 32)
    assert "with at least 129 rows" in str(fused_mlp.explain(fused).parts)
    for rows, is_taken in ((1, False), (128, False), (129, True)):
        x = torch.randn(rows, 1024, device=device, dtype=torch.bfloat16)
        assert_close(fused(x), model(x), 2e-2)
        assert ops == ["packed"] * is_taken
    ops.clear()
    x = torch.randn(129, 1024, device=device, dtype=torch.bfloat16)
    with torch.autocast("cuda", torch.bfloat16):
        assert_close(fused(x), model(x), 2e-2)
    assert fused(x.requires_grad_()).shape == x.shape
    assert ops == []


@pytest.mark.parametrize(("elements", "rows"), [(1 << 18, 129), (1 << 20, 33), (1 << 23, 17)])
def test_fewest_rows_are_those_of_a_call(fused_mlp, monkeypatch, elements, rows):
    """The least number of rows that pays shrinks as all weights of a call grow in total."""
    dispatch = importlib.import_module(f"{fused_mlp.__name__}.dispatch")
    monkeypatch.setattr(dispatch, "is_forced", lambda: False)
    weight = types.SimpleNamespace(format="int4_tiles", shape=(elements // 1024 // 2, 1024), block=(1, 32))
    streamed = types.SimpleNamespace(format="int4_tiles", shape=(elements, 1024), block=(1, 128))
    assert dispatch.least_blocked_rows([weight, weight]) == rows
    assert dispatch.least_blocked_rows([weight, streamed]) >= 17 and dispatch.least_blocked_rows([streamed]) == 0
    assert dispatch.least_blocked_rows([types.SimpleNamespace(format="int8", shape=(8, 1024))]) == 0


def scaled(layer, monkeypatch):
    layer.weight.act_pre_scale = torch.ones(1024, device=layer.weight.device)


def hooked(layer, monkeypatch):
    layer.register_forward_hook(lambda module, given, output: output * 2)


def of_wide_blocks(layer, monkeypatch):
    layer.weight.block_size = [2, 64]


def patched(layer, monkeypatch):
    kind = type(layer.weight)
    monkeypatch.setitem(kind._TORCH_FN_TABLE[kind], F.linear, lambda *given: None)


CHANGES = {
    "with activation scales": scaled,
    "hook": hooked,
    "in blocks of": of_wide_blocks,
    "a patched weight": patched,
}


@pytest.mark.parametrize("said", CHANGES)
def test_changes_are_seen(fused_mlp, device, monkeypatch, said):
    parts = importlib.import_module(f"{fused_mlp.__name__}.models.parts.quantized")
    layer, wanted = made(256, 1024, 64, device)
    assert parts.is_read(layer)
    assert torch.equal(parts.layer_of(layer).weight.dequantize(torch.float32), wanted.float())
    layer.weight.qdata.zero_()
    assert parts.layer_of(layer).weight.dequantize(torch.float32).ne(wanted.float()).any()
    CHANGES[said](layer, monkeypatch)
    assert said in parts.layer_of(layer)


def test_on_a_cpu_they_are_left(fused_mlp, device):
    if not ON_CPU:
        pytest.skip("on a GPU they are taken")
    parts = importlib.import_module(f"{fused_mlp.__name__}.models.parts.quantized")
    layer, _ = made(256, 1024, 64, device)
    with fused_mlp.backend("auto"):
        assert "on a CPU" in parts.layer_of(layer)


@pytest.mark.skipif(not HOPPER, reason="kernels of few rows are Hopper's")
@pytest.mark.parametrize("shape", [(13, 1088, 64), (264, 320, 128), (72, 2048, 256), (1000, 64, 1024)])
@pytest.mark.parametrize("rows", [1, 3, 9, 17, 33, 64, 100])
def test_kernels_of_few_rows(fused_mlp, device, rows, shape):
    """NaN scales beyond the last column do not affect the result."""
    weights, values = [], []
    for _ in range(2):
        layer, value = made(*shape, device)
        pairs = layer.weight.scale_and_zero
        pairs[-(-shape[1] // shape[2]) :] = torch.nan
        weights.append(fused_mlp.QuantizedWeight.from_int4_tiles(layer.weight.qdata, pairs, shape[:2], shape[2]))
        values.append(value.bfloat16().double())  # rounded as in torch's product
    x = torch.randn(rows, shape[1], device=device, dtype=torch.bfloat16)
    bias = torch.randn(shape[0], device=device, dtype=torch.bfloat16)
    poison = torch.full((rows, shape[0]), torch.nan, device=device, dtype=torch.bfloat16)
    del poison
    found = fused_mlp.gated_linear(x, *weights, bias, None, activation="silu")
    gate, up = (x.double() @ value.t() for value in values)
    assert_close(found.double(), F.silu(gate + bias.double()) * up, 6e-3)
    assert "weights stream" in str(fused_mlp.explain(fused_mlp.linear, x, weights[0]))


@pytest.mark.skipif(not HOPPER, reason="in compiled code on Hopper alone")
def test_compiled_code_sees_changes(fused_mlp, device, ops):
    model, fused, _ = built(fused_mlp, device)
    x = torch.randn(2, 1024, device=device, dtype=torch.bfloat16)
    before = fused(x)
    for change in (
        lambda layer: layer.weight.qdata.fill_(0x1234567),
        lambda layer: layer.weight.scale_and_zero.mul_(2),
        lambda layer: setattr(layer.weight, "act_pre_scale", torch.full((1024,), 3.0, device=device).bfloat16()),
        lambda layer: hooked(layer, None),
    ):
        for each in (model, fused):
            change(each[0].gate_proj)
        assert_close(fused(x), model(x), 2e-2)
        assert fused(x).ne(before).any()
        before = fused(x)
    assert ops == []
    with torch.inference_mode():
        graph, given = torch.cuda.CUDAGraph(), x.clone()
        fused[0].gate_proj._forward_hooks.clear()
        fused[0].gate_proj.weight.act_pre_scale = None
        wanted = fused(x)
        with torch.cuda.graph(graph):
            found = fused(given)
        graph.replay()
    assert torch.equal(found, wanted)
