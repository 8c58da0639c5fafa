"""Results have eager's strides for any strides of the operands, so that a later view works as unfused."""

import random

import pytest
import torch

import layouts
import machine
import reference
from reference import FUNCTIONS, operands

PRODUCTS = [name for name in FUNCTIONS if name != "act_and_mul"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("repetition", range(4))
def test_any_product(fused_mlp, device, implementation, repetition, dtype):
    """Products have the values and strides of the eager operations' results and gradients."""
    draw = random.Random(torch.initial_seed())
    for _ in range(200):
        layouts.check_product(fused_mlp, implementation, draw, device, dtype)


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("activation", ["silu", "relu2"])
def test_compiled(fused_mlp, device, implementation, activation, training):
    """Inductor's check of each op's strides passes."""
    torch.compiler.reset()
    shape = (2, 6, 5, 3)
    gate = torch.randn(shape, device=device).to(memory_format=torch.channels_last)
    up = torch.randn(5, 2, 3, 6, device=device).permute(1, 3, 0, 2)

    def run(gate, up):
        return fused_mlp.act_and_mul(gate, up, activation)

    compiled = torch.compile(run, fullgraph=True)
    for first, second in ((gate, gate * 2), (gate, up), (up, gate)):
        first, second = (each.detach().requires_grad_(training) for each in (first, second))
        with fused_mlp.backend(implementation):
            got, expected = compiled(first, second), run(first, second)
            assert got.stride() == expected.stride()
            torch.testing.assert_close(got, expected)
            if training:
                got, expected = (torch.autograd.grad(each.square().sum(), (first, second)) for each in (got, expected))
                torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("function", PRODUCTS)
def test_any_input(fused_mlp, device, implementation, function, dtype):
    """A layer's result has eager's contiguous strides for any strides of the input."""
    draw = random.Random(torch.initial_seed())
    for _ in range(60):
        shape = layouts.drawn_shape(draw, draw.randint(1, 4))
        made = operands(function, (), (shape[-1], 6, 5), dtype=dtype, device=device, biases=draw.random() < 0.5)
        made["x"] = layouts.drawn(draw, shape, device, dtype)
        with fused_mlp.backend(implementation if machine.takes(implementation, dtype) else "auto"), torch.no_grad():
            got = getattr(fused_mlp, function)(**made, activation="silu")
        expected = reference.eager(function, made, "silu")
        assert got.stride() == expected.stride(), (shape, made["x"].stride())
