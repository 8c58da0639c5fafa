"""NaN, infinities, zeros, subnormal and huge values, and the gradients that the package promises for them."""

import torch

import machine
import reference

SPECIAL = (0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1.0, -1.0, 1e4, -1e4, 1e-41, -1e-41, 6e-8, -6e-8)
SPECIAL += (1e19, -1e19, 2.5e38, -2.5e38, 3e38, -3e38)  # their squares and multiples overflow


def check_gradients(fused_mlp, implementation, device, activation, dtype, create_graph=False):
    """Gradients are NaN, infinite or finite wherever PyTorch's formulas are in float64."""
    values = torch.tensor(SPECIAL, device=device).to(dtype)
    ups = torch.tensor([1.0, -2.0, 0.0, torch.inf, torch.nan], device=device).to(dtype)
    gate, up = (grid.repeat(1, 7).requires_grad_() for grid in torch.meshgrid(values, ups, indexing="ij"))
    with fused_mlp.backend(implementation if machine.takes(implementation, dtype) else "auto"):
        result = fused_mlp.act_and_mul(gate, up, activation)
        got = torch.autograd.grad(result, (gate, up), torch.ones_like(result), create_graph=create_graph)
    act = reference.FORMULAS[activation].eager
    if machine.takes(implementation, dtype):
        wide = gate.detach().double().requires_grad_()
        value = act(wide)
        (derivative,) = torch.autograd.grad(value, wide, torch.ones_like(value))
        expected = (derivative.float() * up.float()).to(dtype), value.float().to(dtype)
    else:
        eager = act(gate) * up
        expected = torch.autograd.grad(eager, (gate, up), torch.ones_like(eager))
    info = torch.finfo(dtype)
    atol = max(info.smallest_normal * info.eps, 1e-44)
    if create_graph:  # then up's gradient contains PyTorch's value, and its gelu of infinity is a NaN on CPUs
        got, expected = got[:1], expected[:1]
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one.detach(), other.detach(), rtol=2 * info.eps, atol=atol, equal_nan=True)
