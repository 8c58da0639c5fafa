"""The tests that kernel-builder runs on every variant (`nix run .#ci-test`), and a release on its uploaded variants.

This file stands alone: besides torch, kernels and pytest it needs only the build.toml of the repository.
"""

import os
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from kernels import Mode, get_kernel, get_loaded_kernels, kernelize, use_kernel_mapping
from torch import nn

pytestmark = pytest.mark.kernels_ci

GENERAL = tomllib.loads((Path(__file__).parents[1] / "build.toml").read_text())["general"]
REPO = GENERAL["hub"]["repo-id"]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(scope="module")
def kernel():
    return get_kernel(REPO, version=GENERAL["version"], trust_remote_code=[REPO])


@pytest.fixture(scope="module")
def backend(kernel) -> str:
    """The variant's backend: "cuda", "cpu", or "rocm" or "xpu" if it holds only the Triton kernels."""
    (loaded,) = [loaded for loaded in get_loaded_kernels() if loaded.module is kernel]
    return str(loaded.metadata.backend.backend_type)


@pytest.fixture(scope="module")
def device(kernel, backend) -> Iterator[str]:
    """The device of the variant's kernels; without compiled ops, Triton's."""
    device = "cpu" if INTERPRETED else {"rocm": "cuda"}.get(backend, backend)
    if device != "cpu" and not torch.get_device_module(device).is_available():
        pytest.skip(f"a variant for {backend}, and no GPU")
    with kernel.backend("triton" if backend in ("rocm", "xpu") else "auto"):
        yield device


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=str)
def dtype(request, device) -> torch.dtype:
    if INTERPRETED and request.param == torch.bfloat16:
        pytest.skip("Triton's interpreter gives wrong results in bfloat16")
    if device == "cpu" and not INTERPRETED and request.param == torch.float16:
        pytest.skip("on CPUs PyTorch computes in float16")
    return request.param


ROWS, WIDTH, HIDDEN = (16, 64, 96) if INTERPRETED else (256, 512, 1024)
# The sizes of a call's tensors, and its formula.
CALLS = {
    "act_and_mul": ([(ROWS, WIDTH)] * 2, lambda gate, up: F.silu(gate) * up),
    "linear": ([(ROWS, WIDTH), (HIDDEN, WIDTH), (HIDDEN,)], lambda x, weight, bias: F.silu(F.linear(x, weight, bias))),
    "gated_linear": ([(ROWS, WIDTH), *[(HIDDEN, WIDTH)] * 2], lambda x, gate, up: F.silu(x @ gate.T) * (x @ up.T)),
    "gated_mlp": (
        [(ROWS, WIDTH), *[(HIDDEN, WIDTH)] * 2, (WIDTH, HIDDEN)],
        lambda x, gate, up, down: (F.silu(x @ gate.T) * (x @ up.T)) @ down.T,
    ),
    "mlp": ([(ROWS, WIDTH), (HIDDEN, WIDTH), (WIDTH, HIDDEN)], lambda x, fc1, fc2: F.silu(x @ fc1.T) @ fc2.T),
}
calls = pytest.mark.parametrize("name", CALLS)


def operands(name: str, device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [(torch.randn(size, device=device) * size[-1] ** -0.25).to(dtype) for size in CALLS[name][0]]


def call(kernel, name: str, given: list[torch.Tensor]) -> torch.Tensor:
    return getattr(kernel, name)(*given, activation="silu")


def assert_close(result: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    error = ((result.double() - expected).norm() / expected.norm()).item()
    sums = HIDDEN**0.5 * torch.finfo(torch.float32).eps  # accumulated in float32
    assert error < 4 * torch.finfo(dtype).eps + sums


@calls
def test_the_op_runs_and_is_right(kernel, device, dtype, name):
    given = operands(name, device, dtype)
    expected = CALLS[name][1](*(tensor.double() for tensor in given))
    with torch.no_grad(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        result = call(kernel, name, given)
    assert_close(result, expected, dtype)
    ran = [event.name for event in profiled.events() if event.name.startswith(f"{kernel.__name__}::")]
    assert ran, f"no op of the build has run: {kernel.explain(getattr(kernel, name), *given, activation='silu')}"


@calls
def test_gradients(kernel, device, name):
    given = [tensor.requires_grad_() for tensor in operands(name, device, torch.float32)]
    wide = [tensor.detach().double().requires_grad_() for tensor in given]
    found = torch.autograd.grad(call(kernel, name, given).sum(), given)
    expected = torch.autograd.grad(CALLS[name][1](*wide).sum(), wide)
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, torch.float32)


@calls
def test_no_graph_breaks(kernel, device, name):
    given = operands(name, device, torch.float32)
    compiled = torch.compile(lambda *given: call(kernel, name, given), fullgraph=True, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(*given), call(kernel, name, given))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(64, 176, bias=False), nn.Linear(64, 176, bias=False)
        self.down_proj, self.act_fn = nn.Linear(176, 64, bias=False), nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def test_a_model_is_fused(kernel, device):
    model, x = nn.Sequential(MLP(), MLP()).to(device).eval(), torch.randn(5, 64, device=device)
    with torch.no_grad():
        expected = model(x)
        report = kernel.fuse_mlps(model)
        torch.testing.assert_close(model(x), expected)
    assert len(report.fused) == 2, report
    report.restore()


def test_a_layer_takes_the_place_of_a_forward(kernel, backend, device):
    class Layer:  # the interface that `kernels` expects of a repository
        layer_name = "GatedMLP"

        def load(self):
            return kernel.layers.GatedMLP

    MLP.kernel_layer_name = "GatedMLP"
    try:
        mlp, x = MLP().to(device).eval(), torch.randn(5, 64, device=device)
        expected = mlp(x)
        place = "cpu" if device == "cpu" else backend
        with use_kernel_mapping({"GatedMLP": {place: Layer()}}, inherit_mapping=False):
            mlp = kernelize(mlp, mode=Mode.INFERENCE, device=place)
        assert mlp.forward.__func__ is kernel.layers.GatedMLP.forward
        torch.testing.assert_close(mlp(x), expected)
    finally:
        del MLP.kernel_layer_name
