"""Products of FP8 weights with x rounded to FP8: many rows on a Hopper GPU.

The reference rounds as transformers' FP8Linear does, each 128 values of a row by their largest, and multiplies in
float64. Where torch multiplies by weights with a scale per row, it rounds each row by its largest value.
"""

import importlib
import json
import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import machine
from layouts import misaligned
from reference import FORMULAS, errors, poisoned_memory

pytestmark = pytest.mark.skipif(
    machine.device_type() != "cuda" or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
DTYPES = (torch.bfloat16, torch.float16)
FUNCTIONS = ("linear", "gated_linear", "gated_mlp", "mlp")
CODES = {"silu": 4, "gelu_pytorch_tanh": 2, "sigmoid": 7}
EVERY = 2**30  # rows or columns in one block
BY_ROWS = (1, EVERY)
BLOCKS = ((128, 128), BY_ROWS, (EVERY, EVERY), (256, 512), (EVERY, 128), (128, EVERY))


class Weight:
    """A weight [n, k] rounded as libraries do: by its largest value in each block."""

    def __init__(self, n: int, k: int, block: tuple[int, int], device):
        rows, columns = min(block[0], n), min(block[1], k)
        padded = F.pad(torch.randn(n, k, device=device) * k**-0.5, (0, -k % columns, 0, -n % rows))
        tiles = padded.view(padded.shape[0] // rows, rows, -1, columns)
        self.scales = tiles.abs().amax((1, 3)) / 448
        self.data = (tiles / self.scales[:, None, :, None]).view(padded.shape)[:n, :k].to(torch.float8_e4m3fn)
        self.data = self.data.contiguous()
        wide = self.scales.double().repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k]
        self.exact = self.data.double() * wide
        self.operands = [self.data, self.scales.contiguous(), None, None, None]
        self.layout = [n, k, rows, columns, 0]


def rounded(x: Tensor, group: int = 128) -> Tensor:
    """Rounds as the kernels do, by true division; PyTorch divides by a number through its inverse."""
    groups = F.pad(x.float(), (0, -x.shape[-1] % group)).unflatten(-1, (-1, group))
    scales = (groups.abs().amax(-1, keepdim=True) / torch.full((), 448.0, device=x.device)).clamp(min=1e-36)
    values = (groups / scales).to(torch.float8_e4m3fn).double() * scales.double()
    return values.flatten(-2)[..., : x.shape[-1]]


@pytest.fixture
def ops(fused_mlp):
    return importlib.import_module(f"{fused_mlp.__name__}._ops").ops


class Call:
    def __init__(self, function: str, x: Tensor, sizes, block, has_biases: bool, activation: str = "silu"):
        hidden, out = sizes
        self.gated, self.whole = function.startswith("gated"), function.endswith("mlp")
        self.x, self.activation, self.linear = x, activation, function == "linear"
        shapes = [(hidden, x.shape[-1])] * (2 if self.gated else 1) + ([(out, hidden)] if self.whole else [])
        self.weights = [Weight(n, k, block, x.device) for n, k in shapes]
        biases = [torch.randn(n, device=x.device).to(x.dtype) for n, _ in shapes]
        self.biases = biases if has_biases else [None] * len(shapes)

    @property
    def lists(self):
        operands = [operand for weight in self.weights for operand in weight.operands]
        return operands, [size for weight in self.weights for size in weight.layout]

    def run(self, ops) -> Tensor:
        operands, layouts = self.lists
        code, zeros = CODES[self.activation], [0.0] * len(self.weights)
        if self.linear:
            return ops.quantized_linear(self.x, operands, layouts, 0.0, *self.biases, code)
        return ops.quantized_mlp(self.x, operands, layouts, zeros, self.biases, code, self.gated)

    def kernels(self, ops) -> list[str]:
        plan = ops.plan_quantized(self.x, *self.lists, self.biases, CODES[self.activation], self.gated)
        return [part.get("kernel", part["implementation"]) for part in json.loads(plan)]

    @property
    def is_by_torch(self) -> bool:
        rows, by_rows = self.x.shape[:-1].numel(), all(weight.layout[2] == 1 for weight in self.weights)
        return by_rows and rows > 128 and self.x.dtype == torch.bfloat16

    def rounded(self, x: Tensor) -> Tensor:
        return rounded(x, x.shape[-1] if self.is_by_torch else 128)

    def reference(self, given=lambda x: x, result=lambda y: y) -> Tensor:
        """The float64 result; `given` rounds the operands of products, `result` what products and activation return."""

        def product(x, place):
            bias = self.biases[place]
            return result(x @ self.weights[place].exact.T + (0.0 if bias is None else bias.double()))

        x = given(self.x.double())
        y = result(FORMULAS[self.activation].exact(product(x, 0)))
        y = result(y * product(x, 1)) if self.gated else y
        return product(given(y), -1) if self.whole else y

    def check(self, ops) -> None:
        with poisoned_memory(self.x.device):
            found = self.run(ops)
        assert set(self.kernels(ops)) == {"scaled_mm" if self.is_by_torch else "scaled"}
        dtype = self.x.dtype
        assert found.dtype == dtype and found.is_contiguous() and found.isfinite().all()
        in_dtype = lambda y: y.to(dtype).double()  # noqa: E731
        exact, fine, own = self.reference(), self.reference(self.rounded), self.reference(self.rounded, in_dtype)
        assert found.shape == exact.shape
        if not self.whole:  # in whole MLPs, hidden values that differ in their last bits are rounded to FP8 again
            (norm, largest), (of_dtype, largest_of_dtype) = errors(found, fine), errors(in_dtype(fine), fine)
            roundings = 3 if self.is_by_torch else 1  # of gate, up and their product
            assert norm <= 1.1 * roundings * of_dtype + 1e-3, (norm, of_dtype)
            assert largest <= 2 * roundings * largest_of_dtype + 3e-3, (largest, largest_of_dtype)
        (norm, largest), (of_own, largest_of_own) = errors(found, exact), errors(own, exact)
        assert norm <= 1.1 * of_own + 1e-4, (norm, of_own)
        assert largest <= 3 * largest_of_own + 1e-3, (largest, largest_of_own)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_misaligned_biases(ops, device, function):
    """The kernels read biases in pairs; if a pair is not aligned, other ones take the call."""
    call = Call(function, torch.randn(200, 256, device=device).bfloat16(), (256, 136), (128, 128), True)
    call.check(ops)
    call.biases = [misaligned(bias) for bias in call.biases]
    assert "scaled" not in call.kernels(ops)
    norm, _ = errors(call.run(ops), call.reference())
    assert norm <= 1e-2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_random_shapes(ops, device, dtype, function):
    """Results are right with odd numbers of rows and partial tiles, blocks and groups."""
    draw = random.Random(f"{function} {dtype}")
    for _ in range(30):
        torch.manual_seed(draw.getrandbits(32))
        n_in, hidden, out = (draw.choice([16, 128]) * draw.randint(1, 20) for _ in range(3))
        rows = draw.choice([65, 70, 100, 127, 129, 250, 300, 513, 1100])
        x = torch.randn(rows, n_in, device=device).to(dtype)
        activation = draw.choice(list(CODES))
        Call(function, x, (hidden, out), draw.choice(BLOCKS), draw.random() < 0.5, activation).check(ops)


@pytest.mark.parametrize("rows", [100, 200, 1000])
@pytest.mark.parametrize("sizes", [(4096, 1024, 4096), (1024, 8192, 256)], ids=str)
def test_split_k_and_clusters(ops, device, rows, sizes):
    """Results are right with few tiles, which split k, and with many; for large weights also with fewer rows."""
    if rows == 100 and sizes[0] == 4096:
        Call("linear", torch.randn(40, 8192, device=device).bfloat16(), (4096, 0), (128, 128), True).check(ops)
    x = torch.randn(rows, sizes[0], device=device).bfloat16()
    Call("gated_mlp", x, sizes[1:], (128, 128), True).check(ops)


ROUNDED = pytest.mark.parametrize(("rows", "block"), [(90, (128, 128)), (190, BY_ROWS)], ids=str)


@ROUNDED
@pytest.mark.parametrize("function", FUNCTIONS)
def test_values_of_any_size(ops, device, function, rows, block):
    """Results are right for zero rows, for large and small rows, and if one column dwarfs all others."""
    for factor in (
        (torch.arange(rows, device=device) % 3 > 0)[:, None],
        10.0 ** torch.randint(-6, 4, (rows, 1), device=device),
        1 + 3e3 * (torch.arange(512, device=device) == 77),
    ):
        x = (torch.randn(rows, 512, device=device) * factor).bfloat16()
        Call(function, x, (256, 128), block, False).check(ops)
    for size in (1e-30, 1e25):
        x = (torch.randn(rows, 512, device=device) * size).bfloat16()
        call = Call("linear", x, (256, 128), block, False, "gelu_pytorch_tanh")
        norm, _ = errors(call.run(ops), call.reference(call.rounded))
        assert norm <= 3e-3
    nothing = Call("mlp", torch.zeros(rows, 512, device=device).bfloat16(), (256, 128), block, False)
    assert torch.equal(nothing.run(ops), torch.zeros(rows, 128, device=device).bfloat16())


@ROUNDED
def test_what_is_no_number(ops, device, rows, block):
    x = torch.randn(rows, 512, device=device).bfloat16()
    x[3, 5], x[40, 300] = torch.nan, torch.inf
    call = Call("gated_mlp", x, (256, 128), block, False)
    found = call.run(ops)
    of_numbers = torch.tensor([row not in (3, 40) for row in range(rows)], device=device)
    assert found[of_numbers].isfinite().all() and not found[~of_numbers].isfinite().any()


def test_rows_as_they_lie(ops, device):
    """x may have leading dimensions and strided rows; unaligned rows are not rounded."""
    x = torch.randn(6, 16, 264, device=device).bfloat16()
    for view, kernel in ((x[..., :256], "scaled"), (x[..., 8:].transpose(0, 1), "scaled"), (x[..., 3:259], "decoded")):
        call = Call("gated_mlp", view, (384, 128), (128, 128), False)
        assert set(call.kernels(ops)) <= {kernel, "scaled"} and call.kernels(ops)[0] == kernel
        norm, _ = errors(call.run(ops), call.reference())
        assert norm <= 1.02 * errors(call.reference(rounded), call.reference())[0] + 3e-3


def test_left_to_others(ops, device):
    """Few rows, float32, low blocks, unaligned weights and unsupported feature counts use other kernels."""
    x = torch.randn(80, 256, device=device).bfloat16()
    assert Call("linear", x[:64], (128, 0), (128, 128), False).kernels(ops) != ["scaled"]
    assert Call("linear", x.float(), (128, 0), (128, 128), False).kernels(ops) != ["scaled"]
    assert Call("linear", x, (128, 0), (64, 128), False).kernels(ops) != ["scaled"]
    assert Call("linear", x, (124, 0), (128, 128), False).kernels(ops) != ["scaled"]
    call = Call("linear", x, (128, 0), (128, 128), False)
    assert call.kernels(ops) == ["scaled"]
    weight = call.weights[0]
    weight.operands[0] = misaligned(weight.data.view(torch.uint8), 0).view(torch.float8_e4m3fn)
    assert call.kernels(ops) != ["scaled"]
    assert errors(call.run(ops), call.reference())[0] <= 5e-3


@pytest.mark.parametrize("width", [16, 1008, 20000, 65536])
@pytest.mark.parametrize("fast", [False, True])
def test_rows_of_any_width(ops, device, width, fast):
    """Rows that torch multiplies may have any width, and its sums fewer bits."""
    x = torch.randn(300, width, device=device).bfloat16()
    for view in (x, F.pad(x, (0, 64))[:, :width]):
        call = Call("gated_linear", view, (48, 0), BY_ROWS, True)
        for weight in call.weights:
            weight.layout[-1] = 2 * fast
        call.check(ops)
    Call("gated_mlp", x[:, :16].contiguous(), (width, 16), BY_ROWS, fast).check(ops)


@pytest.mark.parametrize("block", [(128, 128), BY_ROWS], ids=str)
@pytest.mark.parametrize("rows", [80, 200, 1000])
def test_same_bits_in_graphs_and_streams(ops, device, rows, block):
    x = torch.randn(rows, 1024, device=device).bfloat16()
    call = Call("gated_mlp", x, (4096, 1024), block, True)
    expected = call.run(ops)
    for _ in range(20):
        assert torch.equal(call.run(ops), expected)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        assert torch.equal(call.run(ops), expected)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call.run(ops)
    captured.fill_(torch.nan)
    graph.replay()
    assert torch.equal(captured, expected)
