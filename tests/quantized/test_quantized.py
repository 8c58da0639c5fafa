"""Functions with quantised weights, against float64 over the decoded weights, and bitsandbytes' own results."""

import functools
import importlib
import random
import sys

import pytest
import torch
import torch.nn.functional as F

from test_adapters import ACTIVATIONS, DTYPES, OPERATIONS, Case, assert_as_good, results

bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes does not load on this machine", exc_type=ImportError)

FORMATS = ("nf4", "fp4")
formats = pytest.mark.parametrize("format", FORMATS)
nestings = pytest.mark.parametrize("nested", [False, True], ids=["scales", "nested scales"])


def params(weight, format="nf4", nested=False, block=64):
    options = {"quant_type": format, "compress_statistics": nested, "blocksize": block}
    return bnb.nn.Params4bit(weight.cpu(), requires_grad=False, **options).to(weight.device)


def of_fp8(kernel, weight, block=(128, 128)):
    """A weight quantised as libraries do: by its largest value in each block."""
    (rows, columns), (out, width) = block, weight.shape
    padded = F.pad(weight.detach().float(), (0, -width % columns, 0, -out % rows))
    tiles = padded.view(padded.shape[0] // rows, rows, -1, columns)
    scales = tiles.abs().amax((1, 3)).clamp(min=1e-6) / 448
    values = (tiles / scales[:, None, :, None]).view(padded.shape)[:out, :width].to(torch.float8_e4m3fn)
    return kernel.QuantizedWeight.from_fp8(values.contiguous(), scales, block)


class Quantized(Case):
    """Operands, some with quantised weights. The seed decides which others are, and which operands need gradients.

    `layers` holds the decoded weights, for the reference.
    """

    def __init__(self, kernel, device, seed, *rest, every=False, adapters=None, **named):
        super().__init__(device, seed, *rest, **named)
        chance = random.Random(seed + 1)
        if not (chance.random() < 0.5 if adapters is None else adapters):
            for layer in self.layers:
                layer[2] = None
        self.packed = [None] * len(self.layers)
        certain = chance.randrange(len(self.layers))
        # Hopper kernels round x to FP8 for more rows than this (test_quantized_scaled.py), unless blocks are smaller.
        more_rows = device.type == "cuda" and self.x.shape[:-1].numel() > 32
        for place, layer in enumerate(self.layers):
            if every or place == certain or chance.random() < 0.7:
                form = chance.choice((None, "int8", "int4"))
                if form is not None and layer[0].shape[1] % 8 == 0:
                    self.packed[place] = of_integers(kernel, layer[0], form)
                elif chance.random() < 0.4:
                    block = chance.choice(((128, 128), (1, layer[0].shape[1]), layer[0].shape))
                    block = (4, 128) if more_rows else block
                    self.packed[place] = of_fp8(kernel, layer[0], tuple(block))
                else:
                    form = chance.choice(FORMATS), chance.random() < 0.5, chance.choice((32, 64, 128))
                    self.packed[place] = kernel.QuantizedWeight.from_bitsandbytes(params(layer[0], *form))
                layer[0] = self.packed[place].dequantize(self.dtype)
        frozen = {id(layer[0]) for layer, packed in zip(self.layers, self.packed, strict=True) if packed}
        self.needs = [id(leaf) not in frozen and chance.random() < 0.6 for leaf in self.leaves()]

    def fused(self, kernel, x, layers):
        given = [[packed or layer[0], *layer[1:]] for layer, packed in zip(layers, self.packed, strict=True)]
        return super().fused(kernel, x, given)


# The format.


@nestings
@formats
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(32, 64), (33, 7), (5, 13), (1, 1), (1000, 640), (64, 96)], ids=str)
def test_decoded_as_bitsandbytes_does(fused_mlp, device, shape, dtype, format, nested):
    """Weights decode bit for bit as in bitsandbytes, including odd numbers of values and a partial last block."""
    weight = torch.randn(shape, device=device, dtype=dtype)
    packed = params(weight, format, nested)
    found = fused_mlp.QuantizedWeight.from_bitsandbytes(packed)
    assert (found.shape, found.format, type(found.data)) == (shape, format, torch.Tensor)
    assert found.data.data_ptr() == packed.data_ptr()
    decoded = found.dequantize(dtype)
    if device.type != "cpu" or shape[1] % 64 != 32:  # bitsandbytes' AVX-512 code gives each such row its own blocks
        assert torch.equal(decoded, bnb.functional.dequantize_4bit(packed.data, packed.quant_state))
    assert (decoded - weight).norm() <= 0.2 * weight.norm()
    assert found.dequantize(torch.float64).dtype == torch.float64


def test_other_storage(fused_mlp, device):
    weight = bnb.nn.Params4bit(torch.randn(32, 64), quant_storage=torch.bfloat16, quant_type="nf4").to(device)
    found = fused_mlp.QuantizedWeight.from_bitsandbytes(weight)
    assert found.data.dtype == torch.uint8
    assert torch.equal(found.dequantize(), bnb.functional.dequantize_4bit(weight.data, weight.quant_state))


def test_scales_of_fp8(fused_mlp, device):
    """The shape of the scales selects scales per row, per tensor or per block; blocks at the edges may be partial."""
    data = torch.randn(200, 136, device=device).to(torch.float8_e4m3fn)
    of_rows, of_blocks = torch.rand(200, 1, device=device), torch.rand(2, 2, device=device)
    wide = of_blocks.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :136]
    for scales, factor in ((of_rows, of_rows), (of_rows[:, 0], of_rows), (of_rows[:1], of_rows[0]), (of_blocks, wide)):
        found = fused_mlp.QuantizedWeight.from_fp8(data, scales)
        assert (found.data.data_ptr(), found.scales.data_ptr()) == (data.data_ptr(), scales.data_ptr())
        assert torch.equal(found.dequantize(), data.float() * factor)
        assert torch.equal(found.dequantize(torch.bfloat16), (data.float() * factor).bfloat16())


def of_integers(kernel, weight, format, group=None):
    """A weight quantised to integers: int8 by rows, int4 in groups."""
    out, width = weight.shape
    groups = weight.detach().float().view(out, -1, group or width)
    scales = groups.abs().amax(-1, keepdim=True).clamp(min=1e-6)
    if format == "int8":
        data = (groups / scales * 127).round().to(torch.int8).view(out, width)
        return kernel.QuantizedWeight.from_int8(data, scales.view(out), divisor=127)
    codes = (groups / scales * 7).round().view(out, width).to(torch.int32) + 8
    packed = (codes.view(out, -1, 8) << torch.arange(0, 32, 4, device=weight.device)).sum(-1).to(torch.int32)
    return kernel.QuantizedWeight.from_int4(packed, (scales / 7).squeeze(-1))


def test_int8_of_bitsandbytes(fused_mlp, device):
    """Int8 weights decode from a layer before its first call, which moves them to the layer, or from their scales."""
    layer = bnb.nn.Linear8bitLt(96, 64, bias=False, has_fp16_weights=False).to(device)
    weight, scales = layer.weight.CB, layer.weight.SCB
    wanted = bnb.functional.int8_vectorwise_dequant(weight, scales)
    for found in (
        fused_mlp.QuantizedWeight.from_bitsandbytes(layer.weight),
        fused_mlp.QuantizedWeight.from_int8(weight, scales[:, None], divisor=127),
        fused_mlp.QuantizedWeight.from_int8(weight, scales / 127),
    ):
        assert found.data.data_ptr() == weight.data_ptr()
        torch.testing.assert_close(found.dequantize(), wanted, rtol=1e-6, atol=0)
    layer(torch.randn(2, 96, device=device).half())
    with pytest.raises(ValueError, match="must have CB and SCB"):
        fused_mlp.QuantizedWeight.from_bitsandbytes(layer.weight)


def test_int4_as_it_is_packed(fused_mlp, device):
    """int4 codes are read from 32-bit words and from bytes; 16-bit scales are cast."""
    codes = torch.arange(16, device=device, dtype=torch.int32).repeat(5, 8)
    words = (codes.view(5, -1, 8) << torch.arange(0, 32, 4, device=device)).sum(-1).to(torch.int32)
    scales = (torch.rand(5, 2, device=device) + 0.5).bfloat16()
    wanted = (codes.float() - 8) * scales.float().repeat_interleave(64, 1)
    for data in (words, words.view(torch.uint8)):
        found = fused_mlp.QuantizedWeight.from_int4(data, scales)
        assert (found.shape, found.block, found.data.data_ptr()) == ((5, 128), (1, 64), words.data_ptr())
        assert torch.equal(found.dequantize(), wanted)
    with pytest.raises(ValueError, match="groups that divide in = 128"):
        fused_mlp.QuantizedWeight.from_int4(words, scales[:, :1].expand(5, 3))
    with pytest.raises(TypeError, match=r"torch.uint8 or torch.int32"):
        fused_mlp.QuantizedWeight.from_int4(words.float(), scales)
    zeros = torch.randint(17, scales.shape, device=device)
    found = fused_mlp.QuantizedWeight.from_int4(words, scales, zeros)
    wanted = (codes.float() - zeros.repeat_interleave(64, 1)) * scales.float().repeat_interleave(64, 1)
    assert torch.equal(found.dequantize(), wanted)
    with pytest.raises(ValueError, match="zeros must be 0 to 16, got 8 to 17"):
        fused_mlp.QuantizedWeight.from_int4(words, scales, torch.arange(8, 18, device=device).view(5, 2))
    with pytest.raises(ValueError, match=r"or an integer tensor \[5, 2\]"):
        fused_mlp.QuantizedWeight.from_int4(words, scales, zeros[:1])
    for wrong in (None, "8", [8]):
        with pytest.raises(TypeError, match=f"zeros must be an integer or a tensor .* got {type(wrong).__name__}"):
            fused_mlp.QuantizedWeight.from_int4(words, scales, wrong)
    with pytest.raises(TypeError, match=r"scales must be a tensor of a floating dtype, got torch\.complex64"):
        fused_mlp.QuantizedWeight.from_int4(words, scales.to(torch.complex64))


def packed(values, order):
    """Packs eight four-bit values of a row into each word: position i of a word holds column order[i]."""
    shifts = torch.arange(0, 32, 4, device=values.device)
    return (values.view(values.shape[0], -1, 8)[..., order].long() << shifts).sum(-1).to(torch.int32)


@pytest.fixture
def checkpoint(device):
    """Values, zero points and scales of a layer [24, 128], in groups of 32, in checkpoint layout [in, out]."""
    values, zeros = torch.randint(16, (128, 24), device=device), torch.randint(1, 16, (4, 24), device=device)
    scales = (torch.rand(4, 24, device=device) + 0.5).half()
    wide = ((values - zeros.repeat_interleave(32, 0)) * scales.float().repeat_interleave(32, 0)).t()
    return values, zeros, scales, wide


@pytest.mark.parametrize("checkpoint_format", ["gptq", "gptq_v2"])
def test_weights_of_gptq(fused_mlp, device, checkpoint, checkpoint_format):
    values, zeros, scales, wanted = checkpoint
    order, groups = list(range(8)), torch.arange(128, device=device, dtype=torch.int32) // 32
    qweight = packed(values.t().contiguous(), order).t().contiguous()
    qzeros = packed(zeros - (1 if checkpoint_format == "gptq" else 0), order)
    given = qweight, qzeros, scales
    for g_idx in (None, groups):
        found = fused_mlp.QuantizedWeight.from_gptq(*given, g_idx, checkpoint_format)
        assert (found.shape, found.block) == ((24, 128), (1, 32))
        assert torch.equal(found.dequantize(), wanted)
    with pytest.raises(ValueError, match="contiguous groups"):
        fused_mlp.QuantizedWeight.from_gptq(*given, groups.flip(0))
    with pytest.raises(TypeError, match=r"g_idx must be a tensor \[in\] or None, got list"):
        fused_mlp.QuantizedWeight.from_gptq(*given, groups.tolist())
    with pytest.raises(ValueError, match="checkpoint_format must be gptq or gptq_v2, got 'marlin'"):
        fused_mlp.QuantizedWeight.from_gptq(*given, checkpoint_format="marlin")
    with pytest.raises(ValueError, match="with out = 24"):
        fused_mlp.QuantizedWeight.from_gptq(qweight, qzeros[:3], scales)


def test_weights_of_awq(fused_mlp, checkpoint):
    values, zeros, scales, wanted = checkpoint
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    qweight, qzeros = packed(values, order), packed(zeros, order)
    found = fused_mlp.QuantizedWeight.from_awq(qweight, qzeros, scales)
    assert (found.shape, found.block) == ((24, 128), (1, 32))
    assert torch.equal(found.dequantize(), wanted)
    with pytest.raises(TypeError, match=r"qweight must be a torch.int32 tensor \[in, out / 8\]"):
        fused_mlp.QuantizedWeight.from_awq(qweight.float(), qzeros, scales)
    with pytest.raises(ValueError, match="with out = 24"):
        fused_mlp.QuantizedWeight.from_awq(qweight, qzeros[:, :2], scales)
    with pytest.raises(TypeError, match=r"qzeros must be a torch.int32 tensor .*, got str"):
        fused_mlp.QuantizedWeight.from_awq(qweight, "qzeros", scales)
    with pytest.raises(ValueError, match=r"qweight must be .* with an even in, got \[127, 3\]"):
        fused_mlp.QuantizedWeight.from_awq(qweight[1:], qzeros, scales)


# Values and gradients.


@pytest.mark.parametrize("seed", range(100))
def test_values_and_gradients(fused_mlp, device, seed):
    assert_as_good(Quantized(fused_mlp, device, seed), fused_mlp)


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("op", OPERATIONS)
def test_many_rows(fused_mlp, device, op, adapters):
    for seed in range(2):
        dtype = DTYPES[device.type][seed % 2]
        case = Quantized(fused_mlp, device, seed, op, dtype, rows=700, every=True, adapters=adapters)
        assert_as_good(case, fused_mlp)


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("op", OPERATIONS)
def test_without_autograd(fused_mlp, device, op, adapters):
    for seed, rows in enumerate((1, 3, 17, 64, 65)):
        dtype = DTYPES[device.type][seed % 2]
        case = Quantized(fused_mlp, device, seed, op, dtype, rows=rows, every=True, adapters=adapters)
        case.needs = [False] * len(case.needs)
        assert_as_good(case, fused_mlp)


@pytest.mark.parametrize("op", OPERATIONS)
def test_a_gradient_alone(fused_mlp, device, op):
    case = Quantized(fused_mlp, device, 3, op, torch.float32, rows=7, every=True, adapters=True)
    frozen = {id(layer[0]) for layer in case.layers}
    for place, leaf in enumerate(case.leaves()):
        case.needs = [each == place and id(leaf) not in frozen for each in range(len(case.needs))]
        assert_as_good(case, fused_mlp)


@formats
@nestings
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_as_the_layer_of_bitsandbytes(fused_mlp, device, dtype, nested, format):
    """In training, where no CPU repacks weights, values and gradients of x and bias match bitsandbytes' layer."""
    options = {"compute_dtype": dtype, "compress_statistics": nested, "quant_type": format}
    layer = bnb.nn.Linear4bit(128, 160, **options).to(dtype).to(device).train()
    weight, bias = fused_mlp.QuantizedWeight.from_bitsandbytes(layer.weight), layer.bias
    xs = [torch.randn(5, 128, device=device, dtype=dtype).requires_grad_()]
    xs.append(xs[0].detach().clone().requires_grad_())
    grad, grads = torch.randn(5, 160, device=device, dtype=dtype), []
    for x, result in ((xs[0], fused_mlp.linear(xs[0], weight, bias)), (xs[1], layer(xs[1]))):
        grads.append([result, *torch.autograd.grad(result, [x, bias], grad)])
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-2)


def gated(fused_mlp, device, dtype=torch.float32, rows=9, sizes=(64, 96), **options):
    width, hidden = sizes
    x = torch.randn(rows, width, device=device, dtype=dtype)
    shapes = (hidden, width), (hidden, width), (width, hidden)
    weights = [params((torch.randn(*shape, device=device) * shape[1] ** -0.5).to(dtype), **options) for shape in shapes]
    return x, [fused_mlp.QuantizedWeight.from_bitsandbytes(weight) for weight in weights]


@pytest.mark.parametrize("memory", ["activations", "recompute"])
@pytest.mark.parametrize("adapted", [False, True])
def test_no_decoded_weight_is_kept(fused_mlp, device, adapted, memory):
    """Autograd saves only operands and tensors with fewer elements than a weight."""
    x, weights = gated(fused_mlp, device, sizes=(64, 256))
    adapter = fused_mlp.Adapter(torch.randn(4, 64, device=device), torch.randn(256, 4, device=device))
    out = fused_mlp.gated_mlp(x.requires_grad_(), *weights, memory=memory, gate_adapter=adapter if adapted else None)
    seen, nodes, held = set(), [out.grad_fn], []
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [next_node for next_node, _ in node.next_functions]
            held += [each for each in getattr(node, "saved_tensors", ()) if each is not None]
    assert held
    assert all(each.numel() < 64 * 256 for each in held)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert grad.isfinite().all()


def test_one_decoding_each_way(fused_mlp, device, monkeypatch):
    """Each pass decodes a weight once, and only if a gradient needs it; no call is composed of PyTorch operations."""
    adapters, decoded, decode = sys.modules[f"{fused_mlp.__name__}.adapters"], [], fused_mlp.QuantizedWeight.dequantize
    for name in ("composed", "_packed_forward", "_packed_backward"):  # the last two decode in compiled code
        monkeypatch.setattr(adapters, name, None)
    spy = lambda weight, dtype: (decoded.append(weight.shape), decode(weight, dtype))[1]  # noqa: E731
    monkeypatch.setattr(fused_mlp.QuantizedWeight, "dequantize", spy)
    x, weights = gated(fused_mlp, device)
    out = fused_mlp.gated_mlp(x.requires_grad_(), *weights)
    assert len(decoded) == 3
    out.sum().backward()
    assert len(decoded) == 6
    bias = torch.zeros(96, device=device, requires_grad=True)
    out = fused_mlp.gated_mlp(x.detach(), *weights, bias)
    out.sum().backward()
    assert decoded[9:] == [(64, 96)]  # only the last weight lies on the path to the first bias


def test_double_backward(fused_mlp, device):
    x, weights = gated(fused_mlp, device, rows=2, sizes=(8, 16), block=32)
    x = x.double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: fused_mlp.gated_mlp(x, *weights), x)
    assert torch.autograd.gradgradcheck(lambda x: fused_mlp.gated_mlp(x, *weights), x)
    wide = [weight.dequantize() for weight in weights]
    xs = [x.detach().float().requires_grad_() for _ in range(2)]
    found = []
    for x, given in zip(xs, (weights, wide), strict=True):
        (first,) = torch.autograd.grad(fused_mlp.gated_mlp(x, *given).square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), x))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


# Global state.


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("adapted", [False, True])
def test_compiled(fused_mlp, device, adapted, grad):
    torch.compiler.reset()
    x, weights = gated(fused_mlp, device)
    adapter = fused_mlp.Adapter(torch.randn(4, 64, device=device), torch.randn(96, 4, device=device))
    call = lambda x: fused_mlp.gated_mlp(x, *weights, up_adapter=adapter if adapted else None)  # noqa: E731
    compiled, found = torch.compile(call, fullgraph=True, backend="aot_eager"), []
    for run in (compiled, call):
        given = x.detach().clone().requires_grad_(grad)
        out = run(given)
        found.append([out, *(torch.autograd.grad(out.square().sum(), given) if grad else ())])
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)  # gradients that cancel


@pytest.mark.parametrize("grad", [False, True])
def test_autocast(fused_mlp, device, grad):
    x, weights = gated(fused_mlp, device)
    given = x.clone().requires_grad_(grad)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        found = fused_mlp.gated_mlp(given, *weights, activation="silu")
        wide = [weight.dequantize() for weight in weights]
        wanted = F.linear(F.silu(F.linear(x, wide[0])) * F.linear(x, wide[1]), wide[2])
    assert found.dtype == wanted.dtype == torch.bfloat16
    torch.testing.assert_close(found.detach(), wanted, rtol=3e-2, atol=3e-2)
    if grad:
        (gradient,) = torch.autograd.grad(found.float().sum(), given)
        assert gradient.dtype == torch.float32


def test_transforms(fused_mlp, device):
    x, weights = gated(fused_mlp, device)
    call = lambda x: fused_mlp.gated_mlp(x, *weights).square().sum()  # noqa: E731
    by_row = torch.func.vmap(torch.func.grad(call))(x)
    (wanted,) = torch.autograd.grad(call(x.requires_grad_()), x)
    torch.testing.assert_close(by_row, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["torch", "auto"])
def test_backends(fused_mlp, device, name):
    x, weights = gated(fused_mlp, device)
    wanted = fused_mlp.gated_mlp(x, *[weight.dequantize() for weight in weights])
    with fused_mlp.backend(name):
        torch.testing.assert_close(fused_mlp.gated_mlp(x, *weights), wanted, rtol=1e-4, atol=1e-4)


def test_operations_are_counted(fused_mlp, device):
    from torch.utils.flop_counter import FlopCounterMode

    x, weights = gated(fused_mlp, device)
    for given in (x, x.clone().requires_grad_()):
        with FlopCounterMode(display=False) as counter:
            fused_mlp.gated_mlp(given, *weights)
        assert counter.get_total_flops() == 3 * 2 * 9 * 64 * 96


def test_torchs_product_is_named(fused_mlp):
    plans = importlib.import_module(f"{fused_mlp.__name__}.backends.plans")
    record = '[{"implementation": "quantized", "kernel": "scaled_mm", "block_m": 0, "split_k": 0}]'
    (part,) = plans.parsed(record, ("layer",))
    assert "torch's GEMM" in str(part) and "tiles" not in str(part)


def test_explained(fused_mlp, device):
    x, weights = gated(fused_mlp, device, dtype=torch.bfloat16)
    said = fused_mlp.explain(fused_mlp.gated_mlp, x, *weights)
    assert said.implementation == device.type
    assert "nf4 (blocks of 64)" in said.reason
    of_integer = of_integers(fused_mlp, torch.randn(96, 128, device=device), "int4", 64)
    given = torch.randn(2, 128, device=device), of_integer
    assert "int4 (blocks of 1 x 64)" in fused_mlp.explain(fused_mlp.linear, *given).reason
    for block, words in (
        ((128, 128), "fp8 (blocks of 128 x 128)"),
        ((1, 64), "fp8 (one scale per row)"),
        ((96, 64), "one scale"),
    ):
        wide = torch.randn(96, 256 if block[0] == 128 else 64, device=device)
        given = torch.randn(2, wide.shape[1], device=device), of_fp8(fused_mlp, wide, block)
        assert words in fused_mlp.explain(fused_mlp.linear, *given).reason
    trained = fused_mlp.explain(fused_mlp.gated_mlp, x.requires_grad_(), *weights)
    assert "one op forward and one backward" in trained.reason
    assert "decoded" in trained.reason
    with fused_mlp.backend("torch"):
        assert fused_mlp.explain(fused_mlp.gated_mlp, x, *weights).implementation == "torch"


WRONG = {
    "format": ({"format": "int3"}, "weight.format must be one of nf4, fp4, fp8, int8, int4, int4_tiles, got 'int3'"),
    "shape": (
        {"shape": (96, 65)},
        r"weight.data must be contiguous with 3120 elements to fit \[out, in\] = \[96, 65\]",
    ),
    "width": ({"shape": (48, 128)}, r"weight must be \[out, in\] with in = 64 to fit x"),
    "block": ({"block": 32}, "weight.scales must be contiguous with 192 elements"),
    "scales": ({"scales": torch.zeros(96, dtype=torch.bfloat16)}, "weight.scales must be a tensor of torch.float32"),
    "data": ({"data": None}, "weight.data must be a tensor of torch.uint8, got NoneType"),
    "nested": ({"nested_scales": torch.zeros(1)}, "weight must have both nested_scales and nested_code, or neither"),
    "text": ({"shape": "x"}, r"weight.shape must be \[out, in\], and both block sizes positive, got x"),
    "no block": ({"block": None}, "weight.shape must be .* block = None"),
    "offset": ({"offset": "1"}, "weight.offset must be a number, got str"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_weights(fused_mlp, device, case):
    changes, words = WRONG[case]
    changes = {name: each.to(device) if isinstance(each, torch.Tensor) else each for name, each in changes.items()}
    x, (weight, *_) = gated(fused_mlp, device)
    wrong = weight._replace(**changes)
    for use in (functools.partial(fused_mlp.linear, x, wrong), wrong.dequantize):
        if use == wrong.dequantize and case == "width":  # fits itself, but not x
            continue
        with pytest.raises((TypeError, ValueError), match=words):
            use()


WRONG_FP8 = {
    "data": ({"data": torch.zeros(96, 64)}, "weight.data must be a tensor of torch.float8_e4m3fn, got torch.float32"),
    "scales": ({"scales": torch.ones(2, 1)}, r"weight.scales must be contiguous with 1 elements .* blocks of 96 x 64"),
    "dtype": ({"scales": torch.ones(1).half()}, "weight.scales must be a tensor of torch.float32, got torch.float16"),
    "block": ({"block": 128}, "weight.block a pair of rows and columns"),
    "block of text": ({"block": ("a", 1)}, "weight.block a pair of rows and columns"),
    "divisor": ({"divisor": None}, "weight.divisor must be positive"),
    "nested": ({"nested_scales": torch.zeros(1)}, "weight must have neither nested_scales nor nested_code"),
}


@pytest.mark.parametrize("case", WRONG_FP8)
def test_wrong_weights_of_fp8(fused_mlp, device, case):
    changes, words = WRONG_FP8[case]
    changes = {name: each.to(device) if isinstance(each, torch.Tensor) else each for name, each in changes.items()}
    weight = of_fp8(fused_mlp, torch.randn(96, 64, device=device))
    fused_mlp.linear(torch.randn(3, 64, device=device), weight)
    with pytest.raises((TypeError, ValueError), match=words):
        fused_mlp.linear(torch.randn(3, 64, device=device), weight._replace(**changes))
    strided = weight._replace(data=weight.data.t().contiguous().t())
    with pytest.raises(ValueError, match=r"weight.data must be contiguous .* got \[96, 64\] with strides \[1, 96\]"):
        strided.dequantize()
    for other, got in ((weight.data.view(-1), r"\[6144\]"), (3.0, "float")):
        with pytest.raises(TypeError, match=rf"weight must be a tensor \[out, in\], got {got}"):
            fused_mlp.QuantizedWeight.from_fp8(other, weight.scales)


def test_what_is_no_weight_of_bitsandbytes(fused_mlp, device):
    with pytest.raises(TypeError, match=r"must be a bitsandbytes\.nn\.Params4bit, got Tensor"):
        fused_mlp.QuantizedWeight.from_bitsandbytes(torch.randn(3, 4))
    with pytest.raises(ValueError, match="not quantised yet"):
        fused_mlp.QuantizedWeight.from_bitsandbytes(bnb.nn.Params4bit(torch.randn(3, 4)))


def test_all_activations(fused_mlp, device):
    x, weights = gated(fused_mlp, device)
    wide = [weight.dequantize() for weight in weights]
    for name, function in ACTIVATIONS.items():
        wanted = F.linear(function(F.linear(x, wide[0])), wide[2])
        found = fused_mlp.mlp(x, weights[0], weights[2], activation=name)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_the_same_bits(fused_mlp, device):
    case = Quantized(fused_mlp, device, 1, "gated_mlp", torch.bfloat16, rows=33, every=True)
    first, second = (results(lambda x, layers: case.fused(fused_mlp, x, layers), case) for _ in range(2))
    assert all(map(torch.equal, first, second))
