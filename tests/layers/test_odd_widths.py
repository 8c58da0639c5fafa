"""Products with widths that are not multiples of 8: the op, and the layers that use it."""

import copy
import importlib
import itertools
import random
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import machine
import project
import reference
from reference import assert_no_worse_than_eager, poisoned_memory

on_gpu = pytest.mark.skipif(machine.device_type() != "cuda", reason="needs a GPU and a torch with CUDA")

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture
def native(fused_mlp):
    return importlib.import_module(f"{fused_mlp.__name__}.backends.native")


@pytest.fixture
def linear(fused_mlp, monkeypatch):
    """Returns the module of such layers, with its size limits lifted."""
    found = importlib.import_module(f"{fused_mlp.__name__}.autograd.linear")
    monkeypatch.setattr(found, "_LEAST_WORK", 0)
    monkeypatch.setattr(found, "_LEAST_WEIGHTS", 0)
    return found


def test_a_graph_expects_the_rates_of_the_op(linear):
    source = (project.ROOT / "cuda/dense/torch/products.cpp").read_text()
    rates = {name: float(value) for name, value in re.findall(r"(k\w*Rate) = ([\d.e]+)", source)}
    of_graph = (linear._ODD_RATE, linear._EVEN_RATE, linear._RATE, linear._COPY_RATE)
    assert of_graph == tuple(rates[name] for name in ("kOddRate", "kEvenRate", "kRate", "kCopyRate"))


def laid_out(rows, columns, draw, device, dtype):
    """Returns a random row- or column-major matrix, possibly a view into a larger one filled with NaN."""
    by_column, gap, lead = draw.choice([False, True]), draw.choice([0, 0, 1, 8]), draw.choice([0, 0, 1, 3])
    lines, length = (columns, rows) if by_column else (rows, columns)
    memory = torch.full((lines * (length + gap) + lead,), torch.nan, device=device, dtype=dtype)
    matrix = memory.as_strided((lines, length), (length + gap, 1), lead)
    matrix.copy_(torch.randn(lines, length, device=device))
    return matrix.t() if by_column else matrix


@pytest.mark.parametrize("seed", range(24))
def test_product(native, device, seed):
    """Products of any layout are as accurate as eager's. On a Hopper GPU, large odd ones use padded copies."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    most = 2400 if device.type == "cuda" else 70
    m, k, n = (draw.randint(most // 2, most) // step * step for step in draw.choices((1, 1, 2, 4, 8), k=3))
    dtype = draw.choice([each for each in DTYPES if machine.takes(machine.device_type(), each)])
    a, b = laid_out(m, k, draw, device, dtype), laid_out(k, n, draw, device, dtype)
    with poisoned_memory(device):
        found = native.mm(a, b)
    exact = a.double() @ b.double()
    assert found.is_contiguous()
    eager = a @ b if device.type == "cuda" else a.contiguous() @ b.contiguous()  # oneDNN reads beyond the ends of rows
    assert_no_worse_than_eager(found, eager, exact)


@on_gpu
@pytest.mark.parametrize(("rows", "width", "out"), [(9000, 512, 50_257), (30_001, 264, 9001)])
def test_blocks_of_rows(native, device, rows, width, out):
    """A result this large is computed in several blocks of rows, which keeps the copies small."""
    x, weight = (torch.randn(size, width, device=device, dtype=torch.bfloat16) for size in (rows, out))
    native.mm(x, weight.t())
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = native.mm(x, weight.t())
    beside = torch.cuda.max_memory_allocated() - before - found.nbytes
    assert beside < 2**27 + 1.1 * weight.nbytes + 2**22
    torch.testing.assert_close(found, F.linear(x, weight), rtol=2e-2, atol=2e-1)


@on_gpu
@pytest.mark.parametrize("op", ["linear", "gated_linear", "mlp", "gated_mlp"])
@pytest.mark.parametrize("hidden", [2730, 1365])
def test_functions_of_odd_widths(fused_mlp, device, op, hidden):
    """Functions of odd widths, large enough for padding, are as accurate as eager forward and backward."""
    made = reference.operands(op, (2048,), (1024, hidden, 1024), dtype=torch.bfloat16, device=device)
    for operand in made.values():
        operand.requires_grad_()
    results = []
    for compute in (
        lambda given: getattr(fused_mlp, op)(**given, activation="silu"),
        lambda given: reference.eager(op, given, "silu"),
    ):
        result = compute(made)
        grads = torch.autograd.grad(result, list(made.values()), torch.ones_like(result))
        results.append((result, *grads))
    wide = {name: operand.detach().double().requires_grad_() for name, operand in made.items()}
    exact = reference.eager(op, wide, "silu")
    exact = (exact, *torch.autograd.grad(exact, list(wide.values()), torch.ones_like(exact)))
    for ours, eager, wanted in zip(*results, exact, strict=True):
        assert_no_worse_than_eager(ours, eager, wanted, roundings=4)


class Head(nn.Module):
    """The output layer of a language model."""

    def __init__(self, bias, width=64, out=301):
        super().__init__()
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, out, bias=bias)

    def forward(self, x):
        return self.head(self.norm(x))


def test_left_on_a_cpu(fused_mlp, linear):
    model = Head(True)
    x = torch.randn(5, 64)
    expected = model(x)
    assert not fused_mlp.fuse_mlps(model).modules
    assert torch.equal(model(x), expected)


@on_gpu
@pytest.mark.parametrize(("bias", "dtype"), itertools.product([True, False], [torch.bfloat16, torch.float16]))
def test_layer(fused_mlp, linear, device, monkeypatch, bias, dtype):
    """The fused layer matches eager's values and gradients, with the same bits in all modes."""
    taken = []
    run = linear.run
    monkeypatch.setattr(linear, "run", lambda *given: taken.append(given[-1]) or run(*given))
    torch.manual_seed(0)
    eager = Head(bias, 200, 4001).to(device, dtype)
    fused = copy.deepcopy(eager)
    report = fused_mlp.fuse_mlps(fused)
    assert "1 x linear, padded" in str(report)
    x, grad = (
        torch.randn(2, 700, 200, device=device, dtype=dtype),
        torch.randn(2, 700, 4001, device=device, dtype=dtype),
    )
    results = {}
    for name, model in (("eager", eager), ("fused", fused)):
        given = x.clone().requires_grad_()
        result = model(given)
        result.backward(grad)
        results[name] = result, given.grad, *(parameter.grad for parameter in model.parameters())
    assert taken == [True]
    for ours, theirs in zip(results["fused"], results["eager"]):
        torch.testing.assert_close(ours, theirs, rtol=3e-2, atol=3e-2 * theirs.abs().max().item())
    with torch.no_grad():
        assert torch.equal(fused(x), results["fused"][0])
    assert taken == [True, False]
    report.restore()
    assert torch.equal(fused(x), eager(x)) and len(taken) == 2


@on_gpu
def test_autocast_and_changes(fused_mlp, linear, device, monkeypatch):
    """Under autocast the weight is cast as by torch; operands that no kernel takes run as written."""
    taken = []
    run = linear.run
    monkeypatch.setattr(linear, "run", lambda *given: taken.append(given[0].dtype) or run(*given))
    eager = Head(True).to(device)
    fused = copy.deepcopy(eager)
    fused_mlp.fuse_mlps(fused)
    x = torch.randn(3, 80, 64, device=device)
    for model in (eager, fused):
        with torch.autocast("cuda", torch.bfloat16):
            model(x).float().square().mean().backward()
    assert taken == [torch.bfloat16] and fused.head.weight.grad.dtype == torch.float32
    torch.testing.assert_close(fused.head.weight.grad, eager.head.weight.grad, rtol=5e-2, atol=1e-3)
    assert torch.equal(fused(x), eager(x)) and len(taken) == 1  # float32 is not taken
    fused.bfloat16()
    seen = []
    handle = fused.head.register_forward_hook(lambda *_: seen.append(1))
    fused(x.bfloat16())
    handle.remove()
    assert seen == [1]
    fused.head.weight = nn.Parameter(torch.randn(304, 64, device=device, dtype=torch.bfloat16))
    fused.head.bias = None
    assert torch.equal(fused(x.bfloat16()), F.linear(fused.norm(x.bfloat16()), fused.head.weight))


@on_gpu
def test_gradients_that_are_differentiated(fused_mlp, linear, device):
    model = Head(True).to(device, torch.bfloat16)
    fused_mlp.fuse_mlps(model)
    x = torch.randn(70, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    (first,) = torch.autograd.grad(model(x).float().square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.float().square().sum(), x)
    assert torch.isfinite(second).all() and second.abs().sum() > 0


@pytest.mark.parametrize(("bias", "width", "out"), [(True, 64, 301), (False, 36, 44), (True, 36, 64)])
def test_compiled(fused_mlp, linear, device, monkeypatch, bias, width, out):
    """A compiled layer is one product of zero-padded operands, forward and backward, for any number of rows."""
    if device.type == "cpu":  # there are no measurements for CPUs
        monkeypatch.setattr(linear, "suits", lambda weight: any(size % 8 for size in weight.shape))
    monkeypatch.setattr(linear, "_fits", lambda rows, weight: True)
    monkeypatch.setattr(linear, "_ODD_RATE", 1.0)
    monkeypatch.setattr(linear, "_EVEN_RATE", 1.0)
    torch.compiler.reset()
    torch.manual_seed(0)
    dtype, graphs = torch.bfloat16, []
    eager = Head(bias, width, out).to(device, dtype)
    fused = copy.deepcopy(eager)
    report = fused_mlp.fuse_mlps(fused)

    def backend(graph, example):
        graphs.append(graph)
        return graph

    run = torch.compile(fused, backend=backend, fullgraph=True, dynamic=True)
    for rows in (80, 70):
        results = []
        for module, model in ((eager, eager), (fused, run)):
            module.zero_grad()
            x = torch.randn(
                2, rows, width, device=device, dtype=dtype, generator=torch.Generator(device).manual_seed(1)
            )
            result = model(x.requires_grad_())
            result.view(-1).square().mean().backward()
            results.append([result, x.grad, *(parameter.grad for parameter in module.parameters())])
        for ours, theirs in zip(*reversed(results)):
            torch.testing.assert_close(ours, theirs, rtol=3e-2, atol=3e-2 * theirs.abs().max().item())
    (graph,) = graphs
    (product,) = (node for node in graph.graph.nodes if node.target is torch._C._nn.linear)
    assert [size % 8 for size in product.args[1].meta["example_value"].shape] == [0, 0]
    report.restore()
