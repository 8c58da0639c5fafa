"""The program that test_recipes.py runs in a copy of the tree with its synthetic activation or epilogue."""

import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import modules
import reference

CAP = 2.0**100
SHAPES = [(1, 64, 128), (7, 96, 160), (200, 64, 96)]  # for the kernels of few rows and of many
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


class Spelled(nn.Module):
    """A model whose code calls the activation as a function of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(64, 128), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x):
        return self.down_proj(F.hardswish(self.gate_proj(x)) * self.up_proj(x))


def as_an_attribute() -> nn.Module:
    return modules.Gated(nn.Hardswish)


# An activation


@dtypes
@pytest.mark.parametrize("make", [as_an_attribute, Spelled])
def test_activation_of_models(fused_mlp, make, dtype):
    torch.manual_seed(0)
    module = make().to(dtype)
    x = torch.randn(16, next(module.parameters()).shape[1], dtype=dtype)
    eager = module(x)
    exact = module.double()(x.double())
    report = fused_mlp.fuse_mlps(module.to(dtype))
    assert [entry.extent for entry in report.modules] == ["full"]
    with torch.no_grad():
        found = module(x)
    (error, of_eager) = (((each.double() - exact).norm() / exact.norm()).item() for each in (found, eager))
    assert error <= 1.1 * of_eager + torch.finfo(dtype).eps / 8


def test_a_replaced_function_of_an_activation_is_called(fused_mlp, monkeypatch):
    module = as_an_attribute()
    fused_mlp.fuse_mlps(module)
    calls, original = [], F.hardswish
    monkeypatch.setattr(F, "hardswish", lambda *given: calls.append(1) or original(*given))
    with torch.no_grad():
        module(torch.randn(3, module.gate_proj.in_features))
    assert calls


# An epilogue


@dtypes
@pytest.mark.parametrize("shape", SHAPES)
def test_epilogue(fused_mlp, dtype, shape):
    """Every result of a gated product is at most CAP."""
    torch.manual_seed(0)
    m, k, n = shape
    x, gate, up = (torch.randn(size, dtype=dtype) for size in ((m, k), (n, k), (n, k)))
    x *= 2.0**47  # so that sums reach 2^50
    given = {"x": x, "gate_weight": gate, "up_weight": up}
    with fused_mlp.backend("triton" if os.environ.get("TRITON_INTERPRET") else "cpu"), torch.no_grad():
        found = fused_mlp.gated_linear(**given, activation="silu")
    plain = reference.exact("gated_linear", given, "silu")
    assert (plain > CAP).any() and (plain < CAP).any()
    torch.testing.assert_close(found.double(), plain.clamp(max=CAP), rtol=0.02, atol=0.02 * CAP)
