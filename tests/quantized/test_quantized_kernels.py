"""The ops of layers with quantised weights, held to float64 formulas over the decoded weights."""

import importlib
import random

import pytest
import torch
from torch import Tensor

import machine
import reference
from layouts import misaligned
from reference import errors, poisoned_memory

NF4 = (-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0)
NF4 += (0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0)
FP4 = (0.0, 1 / 192, 2 / 3, 1.0, 1 / 3, 0.5, 1 / 6, 0.25)
CODES = {"nf4": NF4, "fp4": (*FP4, *(-value for value in FP4))}
ON_GPU = machine.device_type() == "cuda"
DTYPES = (torch.bfloat16, torch.float16, torch.float32) if ON_GPU else (torch.bfloat16, torch.float32)
SILU = 4  # the code of the activation
gpu_only = pytest.mark.skipif(not ON_GPU, reason="needs a GPU and a torch with CUDA")
codes = pytest.mark.parametrize("code", CODES)
nestings = pytest.mark.parametrize("nested", [False, True], ids=["scales", "nested"])
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


class Weight:
    """A random weight [n, k] of four-bit codes with elements of about k^-1/2: operands of the ops, and decoded."""

    def __init__(self, n: int, k: int, device, code: str = "nf4", block: int = 64, nested: bool = False):
        self.n, self.k, self.block = n, k, block
        elements = n * k
        blocks = -(-elements // block)
        self.data = torch.randint(256, ((elements + 1) // 2, 1), dtype=torch.uint8, device=device)
        self.code = torch.tensor(CODES[code], device=device)
        typical = 1.7 * max(k, 1) ** -0.5
        if nested:
            self.nested_block, self.offset = 256, 1.3 * typical
            self.scales = torch.randint(256, (blocks,), dtype=torch.uint8, device=device)
            self.nested_code = torch.linspace(-1, 1, 256, device=device)
            self.nested_scales = (0.3 + 0.1 * torch.rand(-(-blocks // 256), device=device)) * typical
            nest = self.nested_scales.repeat_interleave(256)[:blocks]
            self.absmax = self.nested_code[self.scales.long()] * nest + self.offset
        else:
            self.nested_block, self.offset, self.nested_scales, self.nested_code = 0, 0.0, None, None
            self.absmax = self.scales = (0.5 + torch.rand(blocks, device=device)) * typical

    @property
    def operands(self) -> list[Tensor | None]:
        return [self.data, self.scales, self.code, self.nested_scales, self.nested_code]

    @property
    def layout(self) -> list[int]:
        return [self.n, self.k, 1, self.block, self.nested_block]

    def decoded(self, dtype: torch.dtype) -> Tensor:
        """Decodes as bitsandbytes does: a float32 product, rounded once; for float64 the unrounded product."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        pairs = torch.stack([self.data >> 4, self.data & 15], -1).flatten().long()[: self.n * self.k]
        scales = self.absmax.to(wide).repeat_interleave(self.block)[: self.n * self.k]
        return (self.code.to(wide)[pairs] * scales).to(dtype).view(self.n, self.k)


class Blocked:
    """A random weight of e4m3 values, int8 or int4 with one scale per block of rows and columns."""

    offset = 0.0

    def __init__(self, n: int, k: int, device, block: tuple[int, int] = (128, 128), format: str = "fp8"):
        self.n, self.k, self.block, self.format = n, k, block, format
        self.divisor = 127 if format == "int8" else 0
        bits = torch.randint(256, (n, k // 2 if format == "int4" else k), dtype=torch.uint8, device=device)
        if format == "fp8":
            bits = bits.where(bits % 128 != 127, bits - 1).view(torch.float8_e4m3fn)  # no NaN
        self.data = bits.view(torch.int8) if format == "int8" else bits
        grid = -(-n // block[0]), -(-k // block[1])
        typical = {"fp8": 150, "int8": 74 / 127, "int4": 4.6}[format]  # of codes; of int8, divided by 127
        self.scales = (0.5 + torch.rand(grid, device=device)) * max(k, 1) ** -0.5 / typical
        if format == "int4":  # the low bits hold the zero points
            bits = self.scales.view(torch.int32) & ~31
            self.scales = (bits | torch.randint(17, grid, device=device, dtype=torch.int32)).view(torch.float32)

    @classmethod
    def drawn(cls, draw: random.Random, n: int, k: int, rows: int, device, format: str):
        """Draws a weight and its block; many FP8 rows get blocks for which no kernel rounds x.

        test_quantized_scaled.py has the other blocks. Weights in int4 have an even number of columns.
        """
        blocks = [(4, 256), (4, 128)]
        if format == "int4":
            blocks = [(1, columns) for columns in (32, 64, 128, 256, max(k, 1))]
        elif rows <= 32 or not ON_GPU or format == "int8":
            blocks += [(128, 128), (128, 128), (1, max(k, 1)), (max(n, 1), max(k, 1))]
        return cls(n, k, device, draw.choice(blocks), format)

    @property
    def operands(self) -> list[Tensor | None]:
        return [self.data, self.scales, None, None, None]

    @property
    def layout(self) -> list[int]:
        return [self.n, self.k, *self.block, self.divisor]

    def decoded(self, dtype: torch.dtype) -> Tensor:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        rows, columns = (torch.arange(count, device=self.data.device) for count in (self.n, self.k))
        stored = self.scales[rows // self.block[0]][:, columns // self.block[1]]
        scales, values = stored.to(wide), self.data
        if self.format == "int4":
            bits = stored.view(torch.int32)
            scales = (bits & ~31).view(torch.float32).to(wide)
            values = torch.stack((self.data % 16, self.data // 16), -1).view(self.n, self.k).to(wide) - (bits & 31)
        if self.format == "int8":
            scales = scales * torch.tensor(1 / 127, dtype=torch.float32, device=scales.device).to(wide)
        return (values.to(wide) * scales).to(dtype)


@pytest.fixture
def ops(fused_mlp):
    return importlib.import_module(f"{fused_mlp.__name__}._ops").ops


def shared(*weights: Weight) -> tuple[Weight, ...]:
    """Makes the weights share one code tensor."""
    for weight in weights:
        weight.code = weights[0].code
    return weights


def run_mlp(ops, x: Tensor, weights: tuple[Weight, ...], biases, gated: bool, activation: int = SILU) -> Tensor:
    operands = [operand for weight in weights for operand in weight.operands]
    layouts = [size for weight in weights for size in weight.layout]
    return ops.quantized_mlp(x, operands, layouts, [w.offset for w in weights], biases, activation, gated)


def assert_no_worse(found: Tensor, function: str, x: Tensor, weights, biases, activation: str | None) -> None:
    """Checks that the error is no larger than that of eager layers on the weight decoded to the dtype."""
    names = list(reference.shapes(function, (1,), (1, 1, 1)))[1:]

    def given(dtype: torch.dtype, weights_of) -> dict[str, Tensor]:
        tensors = [*map(weights_of, weights), *(bias if bias is None else bias.to(dtype) for bias in biases)]
        return {"x": x.to(dtype)} | dict(zip(names, tensors, strict=True))

    made = given(x.dtype, lambda weight: weight.decoded(x.dtype))
    wide = given(torch.float64, lambda weight: weight.decoded(torch.float64))
    exact = reference.exact(function, {k: v for k, v in wide.items() if v is not None}, activation)
    eager = reference.eager(function, {k: v for k, v in made.items() if v is not None}, activation)
    assert found.dtype == x.dtype and found.shape == exact.shape and found.is_contiguous()
    (norm, largest), (of_eager, largest_of_eager) = errors(found, exact), errors(eager, exact)
    few = 2 if exact.numel() <= 512 else 1.1  # a single result may dominate the norm
    assert norm <= few * of_eager + 1e-7, (norm, of_eager, exact.shape, [weight.layout for weight in weights])
    assert largest <= 3 * largest_of_eager + 1e-6, (largest, largest_of_eager)  # some cases have few results


@dtypes
@nestings
@codes
def test_decoding_is_exact(ops, device, dtype, code, nested):
    """All codes decode exactly, including blocks across rows, a partial last block and an unused half byte."""
    for n, k, block in ((16, 64, 64), (7, 33, 64), (5, 200, 128), (1, 1, 64), (3, 5, 7), (129, 4096, 4096), (0, 8, 64)):
        weight = Weight(n, k, device, code, block, nested)
        with poisoned_memory(device):
            found = ops.quantized_decode(weight.operands, weight.layout, weight.offset, dtype)
        assert torch.equal(found, weight.decoded(dtype)), (n, k, block)
    shifted = Weight(24, 64, device, code, 64, nested)
    shifted.data = misaligned(shifted.data, 0)
    found = ops.quantized_decode(shifted.operands, shifted.layout, shifted.offset, dtype)
    assert torch.equal(found, shifted.decoded(dtype))


@dtypes
@pytest.mark.parametrize("format", ["fp8", "int8", "int4"])
def test_blocks_are_decoded_exactly(ops, device, dtype, format):
    """All finite codes decode exactly, including partial blocks, rows of any length and unaligned data."""
    every = Blocked(256, 256, device, format=format)
    codes = torch.arange(256, device=device)
    codes = (
        codes.where(codes % 128 != 127, 0)
        if format == "fp8"
        else codes[: every.data.shape[1]] * 256 // every.data.shape[1]
    )
    every.data.view(torch.uint8).copy_(codes.to(torch.uint8))
    cuts = ((129, 200, (128, 128)), (7, 34, (1, 34)), (0, 8, (128, 128)), (5, 48, (5, 48)), (1, 2, (1, 1)))
    cuts += ((70, 4096, (3, 7)), (9, 200, (1, 64)))
    odd = () if format == "int4" else ((7, 33, (1, 33)), (1, 1, (1, 1)))
    cases = [every, *(Blocked(n, k, device, block, format) for n, k, block in (*cuts, *odd))]
    for weight in cases:
        with poisoned_memory(device):
            found = ops.quantized_decode(weight.operands, weight.layout, 0.0, dtype)
        assert torch.equal(found, weight.decoded(dtype)), weight.layout
    shifted = Blocked(24, 64, device, format=format)
    shifted.data = misaligned(shifted.data.view(torch.uint8), 0).view(shifted.data.dtype)
    found = ops.quantized_decode(shifted.operands, shifted.layout, 0.0, dtype)
    assert torch.equal(found, shifted.decoded(dtype))


@pytest.mark.skipif(ON_GPU, reason="kernels of GPUs multiply in other orders")
@dtypes
@pytest.mark.parametrize("rows", [3, 96])  # by vector code and, in bfloat16, on tiles
@pytest.mark.parametrize("format", ["nf4", "nested", "fp4", "fp8", "int8", "int4"])
def test_every_code_in_products(ops, device, dtype, rows, format):
    """Products with rows of the identity give the decoded weight, bit for bit."""
    if format in ("nf4", "nested", "fp4"):
        shapes = ((64, 256, 64), (40, 192, 64), (33, 96, 32), (64, 64, 4096), (36, 1088, 64), (48, 128, 256))
        code = "nf4" if format == "nested" else format
        weights = [Weight(n, k, device, code, block, format == "nested") for n, k, block in shapes]
    else:
        shapes = ((256, 256, (128, 128)), (40, 192, (1, 192)), (33, 192, (1, 128)), (70, 1088, (2, 64)))
        weights = [Blocked(n, k, device, block, format) for n, k, block in shapes]
        bytes_of = torch.arange(256, device=device) % (128 if format == "fp8" else 256)
        every = torch.where(bytes_of == 127, 0, bytes_of) if format == "fp8" else bytes_of
        weights[0].data.view(torch.uint8).copy_(every[: weights[0].data.shape[1]].to(torch.uint8))
    for weight in weights:
        expected = weight.decoded(dtype)
        for begin in range(0, weight.k, rows):
            x = torch.eye(weight.k, device=device, dtype=dtype)[begin : begin + rows]
            offset = getattr(weight, "offset", 0.0)
            with poisoned_memory(device):
                found = ops.quantized_linear(x, weight.operands, weight.layout, offset, None, 0)
            assert torch.equal(found, expected[:, begin : begin + rows].t()), (weight.layout, begin)


def drawn_features(draw: random.Random) -> int:
    return 64 * draw.randint(1, 20) if draw.random() < 0.8 else draw.randint(1, 900)


@dtypes
@nestings
@pytest.mark.parametrize("function", ["linear", "gated_linear", "gated_mlp", "mlp"])
def test_random_shapes(ops, device, dtype, function, nested):
    draw = random.Random(f"{function} {nested} {dtype}")
    for _ in range(40 if ON_GPU else 8):
        torch.manual_seed(draw.getrandbits(32))
        n_in, hidden, out = (drawn_features(draw) for _ in range(3))
        rows = draw.choice([1, 2, 5, 8, 9, 16, 17, 31, 33, 64, 65, 100, 300])
        block = draw.choice([64, 64, 64, 128])
        gated = function.startswith("gated")
        shapes = [(hidden, n_in)] * (2 if gated else 1) + ([(out, hidden)] if function.endswith("mlp") else [])
        code = draw.choice([*CODES, "fp8", "int8", "int8", "int4", "int4"])
        if code not in CODES:
            shapes = [(n, k + k % 2) for n, k in shapes] if function.endswith("linear") else shapes
            code = "int8" if code == "int4" and any(k % 2 for _, k in shapes) else code
            n_in = shapes[0][1]
            weights = tuple(Blocked.drawn(draw, n, k, rows, device, code) for n, k in shapes)
        else:
            weights = shared(*(Weight(n, k, device, code, block, nested) for n, k in shapes))
        biases = [torch.randn(n, device=device).to(dtype) if draw.random() < 0.5 else None for n, _ in shapes]
        x = torch.randn(rows, n_in, device=device).to(dtype)
        with poisoned_memory(device):
            if function == "linear":
                weight = weights[0]
                found = ops.quantized_linear(x, weight.operands, weight.layout, weight.offset, biases[0], SILU)
            else:
                found = run_mlp(ops, x, weights, biases, gated)
        assert_no_worse(found, function, x, weights, biases, "silu")


def test_rows_as_they_lie(ops, device):
    """x may have any leading dimensions, no rows, strided, misaligned or repeated rows, or be transposed."""
    weights = shared(Weight(72, 128, device), Weight(72, 128, device), Weight(40, 72, device))
    x = torch.randn(6, 5, 136, device=device).bfloat16()
    rows = x[..., :128]
    for view in (rows, x[..., 3:131], rows[:0], rows.transpose(0, 1)):
        found = run_mlp(ops, view, weights, [None] * 3, True)
        assert found.shape == (*view.shape[:-1], 40)
        if view.numel() > 0:
            assert_no_worse(found, "gated_mlp", view, weights, [None] * 3, "silu")
    one = run_mlp(ops, rows[0, 0], weights, [None] * 3, True)
    several = run_mlp(ops, rows[:1, :1].expand(8, 5, 128), weights, [None] * 3, True)
    assert one.shape == (40,) and several.shape == (8, 5, 40) and torch.equal(several, several[:1, :1].expand(8, 5, 40))
    for result in (one, several[0, 0]):  # too few values for error norms, and another number of rows rounds differently
        torch.testing.assert_close(result, run_mlp(ops, rows, weights, [None] * 3, True)[0, 0], rtol=3e-2, atol=4e-2)


def test_codes_of_their_own(ops, device):
    """Gate and up may have different codes."""
    weights = Weight(64, 128, device, "nf4"), Weight(64, 128, device, "fp4")
    x = torch.randn(3, 128, device=device).bfloat16()
    assert_no_worse(run_mlp(ops, x, weights, [None] * 2, True), "gated_linear", x, weights, [None] * 2, "silu")


@pytest.mark.parametrize("rows", [4, 40, 100])
def test_formats_of_their_own(ops, device, rows):
    """Gate, up and down may have different formats."""
    x = torch.randn(rows, 128, device=device).bfloat16()
    blocks = ((4, 128), (4, 64), (4, 128)) if rows > 32 else ((128, 128), (128, 128), (1, 128))
    fp8 = [lambda n, k, block=block: Blocked(n, k, device, block) for block in blocks]
    int8, int4 = (lambda n, k, format=format: Blocked(n, k, device, (1, k), format) for format in ("int8", "int4"))
    for weights in (
        (int8(64, 128), int4(64, 128), int8(128, 64)),
        (int4(64, 128), int4(64, 128), int8(128, 64)),
        (Weight(64, 128, device), fp8[0](64, 128), fp8[1](128, 64)),
        (fp8[0](64, 128), fp8[2](64, 128), Weight(128, 64, device)),
    ):
        found = run_mlp(ops, x, weights, [None] * 3, True)
        assert_no_worse(found, "gated_mlp", x, weights, [None] * 3, "silu")


def test_wrong_operands(ops, device):
    weight = Weight(32, 64, device)
    x = torch.randn(2, 64, device=device).bfloat16()

    def call(x=x, bias=None, activation=0, layout=weight.layout, **changed):
        names = ("data", "scales", "code", "nested_scales", "nested_code")
        operands = [changed.get(name, operand) for name, operand in zip(names, weight.operands, strict=True)]
        return ops.quantized_linear(x, operands, layout, 0.0, bias, activation)

    call()
    for match, changed in {
        "data": {"data": weight.data[1:]},
        "scales": {"scales": weight.scales.double()},
        "code": {"code": weight.code[:15]},
        "nested_scales and nested_code": {"nested_code": torch.zeros(256, device=device), "scales": weight.scales},
        "with in = 32": {"x": x[:, :32]},
        "bias": {"bias": torch.zeros(31, device=device).bfloat16()},
        "activation": {"activation": 99},
        "layout": {"layout": [32, 64, 1, 0, 0]},
        "only data and scales": {"data": torch.zeros(32, 64, device=device).to(torch.float8_e4m3fn)},
        "even number of columns": {
            "code": None,
            "layout": [30, 33, 1, 33, 0],
            "data": weight.data[:495],
            "x": x[:, :33],
        },
        "positive divisor": {"code": None, "data": torch.zeros(32, 64, device=device, dtype=torch.int8)},
    }.items():
        if match in ("only data and scales", "positive divisor"):
            changed["scales"] = torch.ones(32, device=device)
        if match.startswith("even"):
            changed["scales"] = torch.ones(30, device=device)
        with pytest.raises(RuntimeError, match=match):
            call(**changed)


@gpu_only
@pytest.mark.parametrize("rows", [1, 16, 64, 200])
def test_same_bits_in_graphs_and_streams(ops, device, rows):
    weights = shared(Weight(1024, 512, device), Weight(1024, 512, device), Weight(512, 1024, device, nested=True))
    x = torch.randn(rows, 512, device=device).bfloat16()
    expected = run_mlp(ops, x, weights, [None] * 3, True)
    for _ in range(20):
        assert torch.equal(run_mlp(ops, x, weights, [None] * 3, True), expected)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        assert torch.equal(run_mlp(ops, x, weights, [None] * 3, True), expected)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run_mlp(ops, x, weights, [None] * 3, True)
    captured.fill_(torch.nan)
    graph.replay()
    assert_no_worse(captured, "gated_mlp", x, weights, [None] * 3, "silu")


@gpu_only
@pytest.mark.parametrize("format", ["int8", "int4"])
def test_integers_in_order(ops, device, format):
    """Products with the identity give each column alone: codes meet the elements of x that they belong to."""
    for rows in (1, 8, 16, 32, 64, 128):
        weight = Blocked(136, 256, device, (1, 128 if format == "int4" else 256), format)
        for first in range(0, 256, rows):
            x = torch.eye(256, device=device)[first : first + rows].bfloat16()
            found = ops.quantized_linear(x, weight.operands, weight.layout, 0.0, None, 0)
            torch.testing.assert_close(found, weight.decoded(torch.bfloat16).t()[first : first + rows])


@gpu_only
def test_the_plan_names_the_kernel(ops, device):
    weights = shared(Weight(1024, 512, device), Weight(1024, 512, device), Weight(512, 1024, device))
    operands = [operand for weight in weights for operand in weight.operands]
    layouts = [size for weight in weights for size in weight.layout]
    for rows, kind in ((1, "quantized"), (64, "quantized"), (4096, "decoded")):
        x = torch.empty(rows, 512, device=device, dtype=torch.bfloat16)
        text = ops.plan_quantized(x, operands, layouts, [None] * 3, SILU, True)
        assert text.count(f'"{kind}"') == 2, text
