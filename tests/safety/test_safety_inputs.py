"""Fused modules take every kind of input that unfused ones take."""

import pytest
import torch

from modules import Gated, PackedGated, Plain
from safety import assert_close, assert_same, kinds, pair, ways

modes = pytest.mark.parametrize("with_grad", [False, True], ids=["no_grad", "grad"])

LAYOUTS = {
    "channels last": lambda: torch.randn(2, 3, 4, 32).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.randn(2, 32, 5).transpose(1, 2),
    "expanded": lambda: torch.randn(1, 32).expand(6, 32),
    "every other column": lambda: torch.randn(8, 64)[:, ::2],
    "flipped and permuted": lambda: torch.randn(2, 3, 5, 32).permute(2, 0, 1, 3).flip(0),
    "one row": lambda: torch.randn(32),
    "no rows": lambda: torch.randn(2, 0, 32),
    "unaligned": lambda: torch.randn(5 * 32 + 1)[1:].view(5, 32),
    "negated view": lambda: torch._neg_view(torch.randn(3, 32)),
    "zeros without memory": lambda: torch._efficientzerotensor((3, 32)),
    "imaginary part of a conjugate": lambda: torch.randn(3, 32, dtype=torch.complex64).conj().imag,
}


@ways
@pytest.mark.parametrize("layout", LAYOUTS)
@kinds
def test_layouts(fused_mlp, device, way, kind, layout):
    model, fused = pair(fused_mlp, way, kind(bias=True).to(device))
    assert_same(model, fused, LAYOUTS[layout]().to(device))


@modes
@ways
@kinds
def test_subclasses(fused_mlp, device, way, kind, with_grad):
    """Tensor subclasses give a result of the type that the unfused module returns."""

    class Marked(torch.Tensor):
        pass

    model, fused = pair(fused_mlp, way, kind(bias=True).to(device))
    x = torch.randn(3, 32, device=device)
    with torch.set_grad_enabled(with_grad):
        for given in (x.as_subclass(Marked), torch.nn.Parameter(x), torch.nn.Buffer(x)):
            got, expected = fused(given), model(given)
            assert type(got) is type(expected)
            assert_close(got.as_subclass(torch.Tensor), expected.as_subclass(torch.Tensor))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@ways
@pytest.mark.parametrize(
    ("kind", "layout"),
    [(Gated, torch.strided), (Plain, torch.strided)] + [(kind, torch.jagged) for kind in (Gated, PackedGated, Plain)],
)
def test_nested(fused_mlp, device, way, kind, layout):
    model, fused = pair(fused_mlp, way, kind(bias=True).to(device))
    x = torch.nested.nested_tensor([torch.randn(n, 32, device=device) for n in (3, 5)], layout=layout)
    with torch.no_grad():
        assert_close(fused(x).unbind(), model(x).unbind())


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@modes
@ways
def test_sparse(fused_mlp, device, way, with_grad):
    """A sparse input and a sparse weight give the unfused result."""
    model, fused = pair(fused_mlp, way, Gated().to(device))
    x = torch.randn(3, 32, device=device)
    with torch.set_grad_enabled(with_grad):
        assert_close(fused(x.to_sparse()), model(x.to_sparse()))
    for candidate in (model, fused):
        candidate.up_proj.weight = torch.nn.Parameter(candidate.up_proj.weight.detach().to_sparse_csr(), False)
    with torch.no_grad():
        assert_close(fused(x), model(x))


@ways
@kinds
def test_what_fails_unfused_fails_fused(fused_mlp, device, way, kind):
    """An input of the wrong width, dtype or type raises an error and never gives a result."""
    model, fused = pair(fused_mlp, way, kind(bias=True).to(device))
    wrong = [torch.randn(3, 33), torch.randn(3, 32).double(), torch.ones(3, 32, dtype=torch.int64), [1.0], None]
    for x in wrong:
        x = x.to(device) if isinstance(x, torch.Tensor) else x
        for candidate in (model, fused):
            with pytest.raises((RuntimeError, TypeError, ValueError, AttributeError)):
                candidate(x)
