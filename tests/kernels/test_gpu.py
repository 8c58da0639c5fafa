"""Tests that only a GPU can run: streams, graphs, memory, sizes past 2^31, and the number of kernels of a call."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import machine
import reference
from reference import FUNCTIONS, operands
from test_gemm import kernels_of

pytestmark = pytest.mark.skipif(machine.device_type() != "cuda", reason="needs a GPU and a torch with CUDA")

functions = pytest.mark.parametrize("function", FUNCTIONS)
GIB = 2**30
TOOLS = Path(__file__).parents[2] / "tools"


def call(fused_mlp, function, made):
    return getattr(fused_mlp, function)(**made, activation="silu")


def needs_memory(gib):
    free = torch.cuda.mem_get_info()[0]
    if free < gib * GIB:
        pytest.skip(f"needs {gib} GiB of free GPU memory, there are {free / GIB:.0f}")


def assert_close(result, function, made):
    """Checks closely enough to tell elements apart; test_functional.py checks the accuracy."""
    torch.testing.assert_close(result, reference.eager(function, made, "silu"), rtol=6e-2, atol=6e-2)


@functions
def test_on_the_current_stream(fused_mlp, device, implementation, function):
    """Calls run on the current stream: its input is written after a long wait, and another stream would read NaNs."""
    made = operands(function, (64,), (256, 512, 256), dtype=torch.bfloat16, device=device)
    name = next(iter(made))
    values = made[name].clone()
    with fused_mlp.backend(implementation):
        call(fused_mlp, function, made)  # loads and compiles
        made[name].fill_(torch.nan)
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            made[name].copy_(values)
            result = call(fused_mlp, function, made)
        stream.synchronize()
    assert_close(result, function, made)


@pytest.mark.parametrize("rows", [8, 1024])
@functions
def test_first_in_a_thread(fused_mlp, device, function, rows):
    """A thread's first call works without a current GPU context, like that of autograd's thread when it starts."""
    made = operands(function, (rows,), (256, 512, 256), dtype=torch.bfloat16, device=device)
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(call, fused_mlp, function, made).result()
    assert_close(result, function, made)


def test_first_in_a_thread_of_autograd(device):
    program = """
import os, kernels, project, torch
os.environ["LOCAL_KERNELS"] = project.local_kernels()
kernel = kernels.get_kernel(project.repo_id(), version=1)
x, gate, up, down = (torch.randn(*sizes, device="cuda", dtype=torch.bfloat16) / 16 for sizes in
                     ((1024, 256), (512, 256), (512, 256), (256, 512)))
x.requires_grad_()
y = kernel.gated_mlp(x, gate, up, down, activation="silu")
found, = torch.autograd.grad(y, x, torch.ones_like(y))
y = torch.nn.functional.linear(torch.nn.functional.silu(x @ gate.t()) * (x @ up.t()), down)
torch.testing.assert_close(found, torch.autograd.grad(y, x, torch.ones_like(y))[0], rtol=6e-2, atol=6e-2)
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TOOLS), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-P", "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@functions
def test_two_streams_at_a_time(fused_mlp, device, implementation, function):
    """Calls on two streams at once share no memory."""
    streams = [torch.cuda.Stream() for _ in range(2)]
    made = [operands(function, (512,), (512, 1024, 512), dtype=torch.bfloat16, device=device) for _ in streams]
    with fused_mlp.backend(implementation):
        expected = [call(fused_mlp, function, operands) for operands in made]
        torch.cuda.synchronize()
        results = [[], []]
        for _ in range(20):
            for index, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    results[index].append(call(fused_mlp, function, made[index]))
        torch.cuda.synchronize()
    for index in range(2):
        for result in results[index]:
            torch.testing.assert_close(result, expected[index], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("rows", [1, 16, 300])
@functions
def test_graphs(fused_mlp, device, implementation, function, rows):
    """A captured call replays on its operands' current values."""
    made = operands(function, (rows,), (256, 512, 256), dtype=torch.bfloat16, device=device)
    with fused_mlp.backend(implementation):
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                call(fused_mlp, function, made)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = call(fused_mlp, function, made)
        for _ in range(3):
            for operand in made.values():
                operand.copy_(torch.randn_like(operand) * (operand.shape[-1] ** -0.5 if operand.dim() == 2 else 1))
            result.fill_(torch.nan)
            graph.replay()
            torch.cuda.synchronize()
            assert_close(result, function, made)


def test_a_graph_of_forward_and_backward(fused_mlp, device, implementation):
    made = operands("gated_mlp", (64,), (128, 256, 128), dtype=torch.bfloat16, device=device)
    leaves = {name: operand.clone().requires_grad_() for name, operand in made.items()}

    def gradients():
        return torch.autograd.grad(call(fused_mlp, "gated_mlp", leaves).float().square().sum(), leaves.values())

    with fused_mlp.backend(implementation):
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                gradients()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = gradients()
        graph.replay()
        torch.cuda.synchronize()
        for one, other in zip(captured, gradients(), strict=True):  # other kernels may compute these
            torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2 * other.abs().max().item())


@functions
def test_memory_that_holds_nans(fused_mlp, device, implementation, function):
    """NaNs in reused memory for outputs, workspaces and padding do not reach results."""
    for sizes in ((64, 96, 40), (127, 251, 61), (512, 1024, 512)):
        made = operands(function, (77,), sizes, dtype=torch.bfloat16, device=device)
        with fused_mlp.backend(implementation):
            for _ in range(3):
                poison = [torch.full((2**n,), torch.nan, device=device) for n in range(7, 24) for _ in range(3)]
                del poison
                assert_close(call(fused_mlp, function, made), function, made)


@functions
def test_no_memory_is_kept(fused_mlp, device, implementation, function):
    made = operands(function, (256,), (256, 512, 256), dtype=torch.bfloat16, device=device)
    with fused_mlp.backend(implementation):
        for _ in range(2):
            call(fused_mlp, function, made)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for _ in range(5):
            call(fused_mlp, function, made)
        torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


def chunks(rows, step):
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


@pytest.mark.parametrize("packed", [False, True], ids=["contiguous", "packed"])
def test_act_and_mul_past_2_to_the_31(fused_mlp, device, implementation, packed):
    """Every element is right past 2^31 elements, forward and backward."""
    needs_memory(40)
    cols = 4096
    rows = 2**31 // cols + 7
    both = torch.empty(rows, 2 * cols, dtype=torch.bfloat16, device=device).normal_()
    gate, up = both.chunk(2, dim=-1)
    if not packed:
        gate, up = gate.contiguous(), up.contiguous()
        del both
    grad = torch.empty(rows, cols, dtype=torch.bfloat16, device=device).normal_()
    with fused_mlp.backend(implementation):
        result = fused_mlp.act_and_mul(gate, up, "silu")
        leaves = [gate.detach().requires_grad_(), up.detach().requires_grad_()]
        gate_grad, up_grad = torch.autograd.grad(fused_mlp.act_and_mul(*leaves, "silu"), leaves, grad)
    assert result.numel() > 2**31
    for part in chunks(rows, 2**14):
        g, u, d = (tensor[part].float() for tensor in (gate, up, grad))
        s = torch.sigmoid(g)
        for got, expected in (
            (result, g * s * u),
            (gate_grad, d * u * (s + g * s * (1 - s))),
            (up_grad, d * g * s),
        ):
            torch.testing.assert_close(got[part].float(), expected, rtol=2**-7, atol=4e-3)


@pytest.mark.parametrize(
    ("function", "sizes"),
    [
        ("linear", (520, 16, 0)),
        ("linear", (16, 520, 0)),
        ("gated_linear", (520, 16, 0)),
        ("gated_linear", (16, 520, 0)),
        ("gated_mlp", (16, 520, 16)),
        ("mlp", (16, 520, 16)),
    ],
    ids=[
        "linear-input",
        "linear-output",
        "gated_linear-input",
        "gated_linear-output",
        "gated_mlp-hidden",
        "mlp-hidden",
    ],
)
def test_products_past_2_to_the_31(fused_mlp, device, implementation, function, sizes):
    """Rows of all regions are right if an operand, the result or the hidden values exceed 2^31 elements."""
    needs_memory(40)
    rows = 2**22 + 5
    made = operands(function, (1,), sizes, dtype=torch.bfloat16, device=device)
    made["x"] = torch.empty(rows, sizes[0], dtype=torch.bfloat16, device=device).normal_()
    with fused_mlp.backend(implementation):
        result = call(fused_mlp, function, made)
    edge = 2**31 // 520
    for start in (0, rows // 2, edge - 500, rows - 1000):
        part = slice(start, start + 1000)
        assert_close(result[part], function, made | {"x": made["x"][part]})
    assert result.isfinite().all()


@pytest.mark.parametrize("rows", [1, 64, 2048])
def test_kernels_of_a_forward(fused_mlp, device, implementation, rows):
    """A forward takes two GEMMs and at most two kernels between them; eager PyTorch takes five, and one per bias."""
    made = operands("gated_mlp", (rows,), (768, 3072, 768), dtype=torch.bfloat16, device=device, biases=False)
    with fused_mlp.backend(implementation):
        names = kernels_of(lambda: call(fused_mlp, "gated_mlp", made))
    print(f"\ngated_mlp, {rows} rows, {implementation}: {len(names)} kernels")
    for name in names:
        print(f"    {name[:110]}")
    assert 1 <= len(names) <= 4
    assert len(names) < len(kernels_of(lambda: reference.eager("gated_mlp", made, "silu")))


@functions
def test_cpu_tensors_in_a_cuda_build(fused_mlp, function):
    """CPU tensors are computed by PyTorch, and explain says why."""
    made = operands(function)
    assert torch.equal(call(fused_mlp, function, made), reference.eager(function, made, "silu"))
    explanation = fused_mlp.explain(getattr(fused_mlp, function), **made)
    assert explanation.implementation == "torch"
    assert "this build has cuda kernels, but x is on cpu" in explanation.reason
    for implementation in ("cuda", "triton"):
        with fused_mlp.backend(implementation), pytest.raises(ValueError, match=f"{implementation}.*is forced"):
            call(fused_mlp, function, made)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@functions
def test_on_a_gpu_that_is_not_the_current_one(fused_mlp, implementation, function):
    made = operands(function, dtype=torch.bfloat16, device="cuda:1")
    with fused_mlp.backend(implementation):
        result = call(fused_mlp, function, made)
    assert torch.cuda.current_device() == 0
    assert result.device == torch.device("cuda:1")
    assert_close(result, function, made)
