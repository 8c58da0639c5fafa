"""experts_mlp with quantised stacks against float64 over decoded weights; an eager loop's error is the limit."""

import random

import pytest
import torch

import reference
from expert_calls import GPT_OSS, drawn, eager, exact, hopper
from reference import FORMULAS, assert_no_worse_than_eager

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FORMATS = ("fp8", "mxfp4")


def fp8_values(codes):
    return codes.view(torch.float8_e4m3fn).double()


def mxfp4_values(data, scales):
    """The values of codes [..., n / 2] and scales [..., n / 32], in float64."""
    table = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=torch.float64, device=data.device)
    codes = torch.stack((data % 16, data // 16), -1).flatten(-2).long()
    factors = torch.pow(2.0, scales.double() - 127)
    return table[codes] * factors.repeat_interleave(32, -1)


def stack(fused_mlp, weight, format, block=(128, 128)):
    """A stack that approximates a weight [E, out, in], and its values in float64."""
    if format == "mxfp4":
        data = torch.randint(256, (*weight.shape[:2], weight.shape[2] // 2), dtype=torch.uint8, device=weight.device)
        scales = torch.randint(120, 124, (*weight.shape[:2], weight.shape[2] // 32), device=weight.device)
        scales = scales.to(torch.uint8)
        blocks = data.view(*scales.shape, 16)
        return fused_mlp.QuantizedStack.from_mxfp4(blocks, scales), mxfp4_values(data, scales)
    rows, columns = block
    grid = [weight.shape[0], -(-weight.shape[1] // rows), -(-weight.shape[2] // columns)]
    scales = torch.rand(grid, device=weight.device) * 2e-2 + 1e-3
    of_rows, of_columns = (torch.arange(size) // each for size, each in zip(weight.shape[1:], block, strict=True))
    wide = scales[:, of_rows][..., of_columns]
    data = (weight / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
    return fused_mlp.QuantizedStack.from_fp8(data, scales, block), data.double() * wide.double()


def to_fp8(rows):
    """Rounds rows to e4m3, each 128 columns scaled by their largest value."""
    groups = torch.nn.functional.pad(rows.float(), (0, -rows.shape[1] % 128)).unflatten(1, (-1, 128))
    scales = (groups.abs().amax(-1, keepdim=True) / 448).clamp(min=1e-36)
    return ((groups / scales).to(torch.float8_e4m3fn).float() * scales).flatten(1)[:, : rows.shape[1]].double()


def of_rounded_rows(made, wide, activation, gated=True):
    """The result of FP8 by FP8 products, which round x and the hidden values; all else is in float64."""
    x, act = to_fp8(made["x"]), FORMULAS[activation].exact
    slots = x.new_zeros(*made["top_k_index"].shape, wide["down_weight"].shape[1])
    for expert, (first, second) in enumerate(zip(wide["gate_up_weight"], wide["down_weight"], strict=True)):
        token, slot = (made["top_k_index"] == expert).nonzero().T
        hidden = x[token] @ first.T
        hidden = act(hidden.chunk(2, 1)[0]) * hidden.chunk(2, 1)[1] if gated else act(hidden)
        share = made["top_k_weights"][token, slot, None].double()
        slots[token, slot] = (to_fp8(hidden) @ second.T).to(torch.bfloat16).double() * share
    return slots.sum(1).to(made["x"].dtype)


def check(fused_mlp, made, format, activation="silu", block=(128, 128), **form):
    """Compares the function with the decoded weights' result; the module's own way rounds these to the dtype."""
    given, wide = dict(made), dict(made)
    for name in ("gate_up_weight", "down_weight"):
        given[name], wide[name] = stack(fused_mlp, made[name].float(), format, block)
    with torch.no_grad(), reference.poisoned_memory(made["x"].device):
        result = fused_mlp.experts_mlp(**given, activation=activation, **form)
    floats = [name for name in wide if name.endswith(("_weight", "_bias"))]
    rounded = wide | {name: wide[name].to(made["x"].dtype) for name in floats}
    expected, own = exact(wide, activation, form), eager(rounded, activation, form)
    if "rounded to FP8" in fused_mlp.explain(fused_mlp.experts_mlp, **given, activation=activation, **form).reason:
        own = of_rounded_rows(made, wide, activation, **form)
    assert_no_worse_than_eager(result, own, expected, f"{format} {block} {activation} {form}", 8)
    return given, result


def drawn_tokens(count, k=2, experts=4, sizes=(128, 192, 64), device="cpu", dtype=torch.bfloat16, **form):
    return drawn(count, k, experts, sizes, dtype=dtype, device=device, **form)


def test_every_code(fused_mlp, device):
    codes = torch.arange(256, dtype=torch.uint8, device=device).repeat(2, 3, 1)
    scales = torch.tensor([[0.5], [3.0]], device=device).view(2, 1, 1)
    found = fused_mlp.QuantizedStack.from_fp8(codes.view(torch.float8_e4m3fn), scales, (3, 256)).dequantize()
    expected = (fp8_values(codes) * scales.double()).float()
    assert torch.equal(found.nan_to_num(), expected.nan_to_num()) and torch.equal(found.isnan(), expected.isnan())
    scales = torch.tensor([0, 1, 100, 127, 128, 200, 253, 254], dtype=torch.uint8, device=device)
    data = torch.arange(256, dtype=torch.uint8, device=device).view(2, 1, 128).expand(2, 8, 128).contiguous()
    of_rows = scales.view(1, 8, 1).expand(2, 8, 8).contiguous()
    found = fused_mlp.QuantizedStack.from_mxfp4(data.view(2, 8, 8, 16), of_rows).dequantize()
    assert torch.equal(found, mxfp4_values(data, of_rows).float())
    nan = fused_mlp.QuantizedStack.from_mxfp4(data.view(2, 8, 8, 16), torch.full_like(of_rows, 255)).dequantize()
    assert nan.isnan().all()


@pytest.mark.parametrize("format", FORMATS)
def test_every_code_in_a_product(fused_mlp, device, format):
    """With one expert and an identity as x and second layer, results are the codes themselves."""
    width = 256
    if format == "fp8":
        codes = torch.arange(256, dtype=torch.uint8, device=device)
        codes[127], codes[255] = 0, 0  # NaN
        data = codes.view(1, 256, 1).expand(1, 256, width).contiguous().view(torch.float8_e4m3fn)
        weight = fused_mlp.QuantizedStack.from_fp8(data, torch.ones(1, 2, 2, device=device))
        values = data.double()
    else:
        data = torch.arange(256, dtype=torch.uint8, device=device).view(1, 256, 1).expand(1, 256, width // 2)
        scales = torch.arange(256, device=device).view(1, 256, 1).expand(1, 256, 8) % 20 + 118
        data, scales = data.contiguous(), scales.to(torch.uint8).contiguous()
        weight = fused_mlp.QuantizedStack.from_mxfp4(data.view(1, 256, 8, 16), scales)
        values = mxfp4_values(data, scales)
    x = torch.eye(width, dtype=torch.bfloat16, device=device)
    index, ones = torch.zeros(width, 1, dtype=torch.int64, device=device), torch.ones(width, 1, device=device)
    identity = torch.eye(256, dtype=torch.bfloat16, device=device)[None]
    eye = fused_mlp.QuantizedStack.from_fp8(identity.to(torch.float8_e4m3fn), torch.ones(1, 2, 2, device=device))
    if format == "mxfp4":
        code = torch.zeros(1, 256, 128, dtype=torch.uint8, device=device)
        rows = torch.arange(256, device=device)
        code[0, rows, rows // 2] = torch.where(rows % 2 == 0, 2, 32).to(torch.uint8)
        whole = torch.full((1, 256, 8), 127, dtype=torch.uint8, device=device)
        eye = fused_mlp.QuantizedStack.from_mxfp4(code.view(1, 256, 8, 16), whole)
    for tokens in (1, 20, width):  # kernels for few rows and for more
        given = x[:tokens], index[:tokens], ones[:tokens]
        found = fused_mlp.experts_mlp(*given, weight, eye, activation=None, gated=False)
        assert torch.equal(found, values[0].T[:tokens].to(torch.bfloat16))


# x, choices, experts, (in, hidden, out); blocks of FP8
SHAPES = [
    (1, 2, 4, (128, 192, 64), (128, 128)),
    (3, 2, 8, (320, 64, 72), (128, 128)),
    (8, 4, 8, (2880, 192, 40), (128, 128)),
    (40, 4, 8, (64, 448, 104), (32, 64)),
    (70, 2, 16, (576, 128, 136), (64, 256)),
    (300, 2, 3, (128, 64, 64), (128, 128)),
    (300, 2, 3, (448, 384, 104), (128, 128)),
    (700, 2, 5, (192, 256, 272), (256, 1024)),
    (90, 3, 2, (704, 320, 8), (1, 4096)),
    (5, 2, 3, (96, 160, 30), (128, 128)),
    (5, 2, 3, (160, 96, 24), (96, 96)),
    (0, 2, 3, (128, 64, 64), (128, 128)),
    (5, 0, 3, (128, 64, 64), (128, 128)),
]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", reference.DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "k", "experts", "sizes", "block"), SHAPES, ids=str)
def test_shapes(fused_mlp, device, tokens, k, experts, sizes, block, dtype, format):
    for form in ({}, {"interleaved": True, **GPT_OSS}, {"gated": False}):
        made = drawn(tokens, k, experts, sizes, dtype=dtype, device=device, biases=bool(form), **form)
        check(fused_mlp, made, format, "quick_gelu" if "limit" in form else "silu", block, **form)


@hopper
@pytest.mark.parametrize("outputs", [8, 64, 104, 264])
def test_the_same_bits_beside_other_work(fused_mlp, device, outputs):
    """The memory through which results are stored is not reused before it was read, however late that is."""
    made = drawn(300, 2, 3, (448, 384, outputs), dtype=torch.bfloat16, device=device, biases=False)
    given, result = check(fused_mlp, made, "fp8")
    busy = torch.empty(2, 1 << 28, dtype=torch.uint8, device=device)
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(300):
            busy[0].copy_(busy[1])
    for _ in range(1000):
        assert torch.equal(fused_mlp.experts_mlp(**given, activation="silu"), result)


# Rows per expert: full, half-full and partial tiles.
ROWS = [(0, 1, 63, 64), (65, 0, 128, 129), (255, 17, 16, 192), (193, 400, 31, 177)]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_rows_of_an_expert(fused_mlp, device, rows, format):
    """Calls with many rows repeat bit for bit; MXFP4 gives the same bits as the decoded weights."""
    count = sum(rows)
    for form in ({}, {"gated": False}, {"interleaved": True, **GPT_OSS}):
        biased = format == "mxfp4" and "gated" not in form
        made = drawn_tokens(count, 1, len(rows), (448, 384, 264), device=device, biases=biased, **form)
        index = torch.arange(len(rows)).repeat_interleave(torch.tensor(rows))[torch.randperm(count)]
        made |= {"top_k_index": index[:, None].to(device), "top_k_weights": torch.rand(count, 1, device=device)}
        if biased:
            made["down_bias"] = made["down_bias"].float()
        activation = "quick_gelu" if "limit" in form else "silu"
        given, result = check(fused_mlp, made, format, activation, **form)
        assert torch.equal(fused_mlp.experts_mlp(**given, activation=activation, **form), result)
        if format == "mxfp4" and device.type == "cuda" and count > 96 * len(rows):
            stacks = ("gate_up_weight", "down_weight")
            wide = given | {name: given[name].dequantize(torch.bfloat16) for name in stacks}
            wide |= {name: wide[name].bfloat16() for name in wide if name.endswith("_bias")}
            assert torch.equal(fused_mlp.experts_mlp(**wide, activation=activation, **form), result)


@pytest.mark.parametrize("seed", range(6))
def test_random_calls(fused_mlp, device, seed):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    for format in FORMATS:
        sizes = [64 * draw.randint(1, 12), 64 * draw.randint(1, 6), 8 * draw.randint(1, 40)]
        experts, tokens = draw.randint(1, 40), draw.choice((1, 2, 9, 33, 150))
        form = draw.choice(({}, {"interleaved": True}, {"limit": 0.5, "up_offset": 1.0}, {"gated": False}))
        made = drawn(
            tokens,
            draw.randint(1, 6),
            experts,
            sizes,
            dtype=torch.bfloat16,
            device=device,
            biases=draw.random() < 0.5,
            **form,
        )
        for name in ("gate_up_bias", "down_bias"):
            if name in made and draw.random() < 0.5:
                made[name] = made[name].float()
        if draw.random() < 0.5:
            made["top_k_index"] = made["top_k_index"].to(draw.choice((torch.int32, torch.int16)))
        check(fused_mlp, made, format, block=(draw.choice((16, 128)), draw.choice((64, 128, 1 << 20))), **form)


def test_strided_operands(fused_mlp, device):
    made = drawn_tokens(50, device=device, biases=True)
    wide = torch.randn(50, 300, dtype=torch.bfloat16, device=device)
    for x in (wide[:, 7:135], wide[:, 8:136], wide[:, ::2][:, :128]):
        for format in FORMATS:
            bias = made["down_bias"].t().contiguous().t()
            check(fused_mlp, made | {"x": x, "down_bias": bias}, format)


def test_leading_dimensions_and_the_same_bits(fused_mlp, device):
    given, result = check(fused_mlp, drawn_tokens(60, device=device), "fp8")
    shaped = {name: given[name].view(3, 20, -1) for name in ("x", "top_k_index", "top_k_weights")}
    assert torch.equal(fused_mlp.experts_mlp(**given | shaped), result.view(3, 20, -1))
    assert torch.equal(fused_mlp.experts_mlp(**given), result)


@pytest.mark.parametrize("format", FORMATS)
def test_gradients_of_frozen_experts(fused_mlp, device, format):
    """Gradients of x, routing weights and biases match float64; frozen weights get none."""
    made = drawn_tokens(20, device=device, dtype=torch.float32, biases=True)
    made["top_k_index"] = made["top_k_index"].clamp(0, 3)
    made["top_k_weights"] = torch.rand(20, 2, device=device)
    given, wide = dict(made), dict(made)
    for name in ("gate_up_weight", "down_weight"):
        given[name], wide[name] = stack(fused_mlp, made[name], format)
    names = ("x", "top_k_weights", "gate_up_bias", "down_bias")

    def gradients(operands, dtype, compute):
        leaves = {name: operands[name].to(dtype).detach().requires_grad_() for name in names}
        result = compute(operands | leaves)
        result.backward(torch.ones_like(result))
        return [leaves[name].grad for name in names]

    found = gradients(given, torch.float32, lambda operands: fused_mlp.experts_mlp(**operands))
    expected = gradients(wide, torch.float64, lambda operands: exact(operands, "silu", {}))
    for name, one, other in zip(names, found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("format", FORMATS)
def test_compiled(fused_mlp, device, format):
    made = drawn_tokens(9, device=device)
    given, result = check(fused_mlp, made, format)
    names = ("x", "top_k_index", "top_k_weights")
    stacks = given["gate_up_weight"], given["down_weight"]
    with torch.no_grad():
        compiled = torch.compile(
            lambda *args: fused_mlp.experts_mlp(*args, *stacks), fullgraph=True, backend="aot_eager"
        )
        found = compiled(*(given[name] for name in names))
    torch.testing.assert_close(found, result, rtol=2e-2, atol=2e-2)


def test_what_is_said(fused_mlp, device):
    made = drawn_tokens(5, device=device)
    for format in FORMATS:
        given, _ = check(fused_mlp, made, format)
        said = fused_mlp.explain(fused_mlp.experts_mlp, **given)
        assert format in said.reason
        takes = device.type == "cuda" and torch.cuda.get_device_capability()[0] in (8, 9, 12)
        assert ("read packed" in said.reason) == takes and (said.implementation == "cuda") == takes
    narrow = fused_mlp.explain(fused_mlp.experts_mlp, **given | {"x": given["x"].half()})
    assert "decoded first" in narrow.reason


def test_errors(fused_mlp, device):
    made = drawn_tokens(5, device=device)
    given, _ = check(fused_mlp, made, "mxfp4")
    good = given["gate_up_weight"]
    wrong = {
        "format": good._replace(format="int3"),
        "block": good._replace(block=(1, 64)),
        "data": good._replace(data=good.data[:, :5]),
        "scales": good._replace(scales=good.scales.int()),
        "shape": good._replace(shape=good.shape[1:]),
        "shape must be .* got None": good._replace(shape=None),
    }
    for name, weight in wrong.items():
        with pytest.raises((TypeError, ValueError), match=f"gate_up_weight.*{name}"):
            fused_mlp.experts_mlp(**given | {"gate_up_weight": weight})
        if name in ("format", "data", "shape"):
            with pytest.raises((TypeError, ValueError), match=f"weight.*{name}"):
                weight.dequantize()
    with pytest.raises(ValueError, match="transposed"):
        fused_mlp.experts_mlp(**given, transposed=True)
    with pytest.raises(ValueError, match="in = "):
        fused_mlp.experts_mlp(**given | {"x": given["x"][:, :64]})
    with pytest.raises(TypeError, match="blocks"):
        fused_mlp.QuantizedStack.from_mxfp4(good.data[0], good.scales)
    with pytest.raises(TypeError, match=r"blocks must be .* got NoneType"):
        fused_mlp.QuantizedStack.from_mxfp4(None, good.scales)


@pytest.mark.parametrize("format", FORMATS)
def test_adapters_beside_them(fused_mlp, device, format):
    made = drawn_tokens(6, device=device, dtype=torch.float32)
    given, wide = dict(made), dict(made)
    for name in ("gate_up_weight", "down_weight"):
        given[name], wide[name] = stack(fused_mlp, made[name], format)
    a, b = torch.randn(4, 3, 128, device=device) / 8, torch.randn(4, 384, 3, device=device) / 8
    changed = wide | {"gate_up_weight": wide["gate_up_weight"] + 2.0 * (b @ a).double()}
    found = fused_mlp.experts_mlp(**given, gate_up_adapter=fused_mlp.Adapter(a, b, 2.0))
    torch.testing.assert_close(found.double(), exact(changed, "silu", {}), rtol=1e-4, atol=1e-4)
