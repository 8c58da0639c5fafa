"""Gradients of every kind: reverse, double, forward mode and torch.func, compared with float64 like the results."""

from functools import partial

import pytest
import torch
from torch.autograd import forward_ad

import machine
import reference
from reference import ACTIVATIONS, DTYPES, FORMULAS, FUNCTIONS, ROUNDINGS, assert_no_worse_than_eager, operands

functions = pytest.mark.parametrize("function", FUNCTIONS)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def forced(fused_mlp, implementation, dtype):
    return fused_mlp.backend(implementation if machine.takes(implementation, dtype) else "auto")


def fused(fused_mlp, function, activation):
    return lambda **operands: getattr(fused_mlp, function)(**operands, activation=activation)


def eager(function, activation):
    return lambda **operands: reference.eager(function, operands, activation)


def exact(function, activation):
    return lambda **operands: reference.exact(function, operands, activation)


def leaves(operands, dtype=None, of=None):
    """Returns fresh leaves with the operands' values; those named in `of` (default: all) require gradients."""
    return {
        name: operand.detach().clone().to(dtype or operand.dtype).requires_grad_(of is None or name in of)
        for name, operand in operands.items()
    }


def gradients(function, operands, grad):
    """Returns the gradients of function(**operands) by operand, for the gradient `grad` of its result."""
    wanted = {name: operand for name, operand in operands.items() if operand.requires_grad}
    result = function(**operands)
    return dict(zip(wanted, torch.autograd.grad(result, wanted.values(), grad.to(result.dtype)), strict=True))


def check(fused_mlp, implementation, function, operands, activation="gelu_pytorch_tanh", of=None):
    dtype = next(iter(operands.values())).dtype
    grad = torch.randn_like(reference.eager(function, operands, activation))
    with forced(fused_mlp, implementation, dtype):
        got = gradients(fused(fused_mlp, function, activation), leaves(operands, of=of), grad)
    of_eager = gradients(eager(function, activation), leaves(operands, of=of), grad)

    def of_exact(operands):
        return gradients(exact(function, activation), leaves(operands, torch.float64, of=of), grad).values()

    conditioning = reference.conditioning(of_exact, operands)
    for index, (name, expected) in enumerate(zip(got, of_exact(operands), strict=True)):
        what, roundings = f"gradient of {name}", ROUNDINGS[function]
        its = partial(conditioning, index)
        assert_no_worse_than_eager(got[name], of_eager[name], expected, what, roundings, conditioning=its)


@dtypes
@pytest.mark.parametrize("activation", ACTIVATIONS)
@functions
def test_gradients(fused_mlp, device, implementation, function, activation, dtype):
    check(fused_mlp, implementation, function, operands(function, dtype=dtype, device=device), activation)


@dtypes
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_against_written_derivatives(fused_mlp, device, implementation, activation, dtype):
    """act_and_mul's gradients match written-out derivatives over a range where each activation bends."""
    gate = torch.linspace(-12, 12, 2001, device=device).to(dtype)
    up, grad = torch.randn_like(gate), torch.randn_like(gate)
    made = {"gate": gate, "up": up}
    with forced(fused_mlp, implementation, dtype):
        got = gradients(fused(fused_mlp, "act_and_mul", activation), leaves(made), grad)
    of_eager = gradients(eager("act_and_mul", activation), leaves(made), grad)
    formula, wide = FORMULAS[activation], grad.double()
    expected_gate = wide * up.double() * formula.derivative(gate.double())
    assert_no_worse_than_eager(got["gate"], of_eager["gate"], expected_gate, "gradient of gate")
    assert_no_worse_than_eager(got["up"], of_eager["up"], wide * formula.exact(gate.double()), "gradient of up")


@dtypes
def test_gradients_of_many_elements(fused_mlp, device, implementation, dtype):
    """Gradients of tensors that exceed one round of a GPU's blocks and end in a partial vector are right."""
    made = operands("act_and_mul", (1009,), (8, 1607, 8), dtype=dtype, device=device)
    check(fused_mlp, implementation, "act_and_mul", made)


@pytest.mark.parametrize("lead", [(), (1,), (0,), (131,), (2, 0, 3), (2, 3, 5)], ids=str)
@functions
def test_gradients_over_shapes(fused_mlp, device, implementation, function, lead):
    check(fused_mlp, implementation, function, operands(function, lead, (33, 47, 21), device=device))


@pytest.mark.parametrize("biases", [True, False])
@functions
def test_one_operand_requires_a_gradient(fused_mlp, device, implementation, function, biases):
    made = operands(function, device=device, biases=biases)
    for name in made:
        check(fused_mlp, implementation, function, made, "silu", of=(name,))
        others = leaves(made, of=(name,))
        getattr(fused_mlp, function)(**others, activation="silu").sum().backward()
        assert [other for other, operand in others.items() if operand.grad is not None] == [name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_strided_operands_and_gradient(fused_mlp, device, implementation, dtype):
    """Chunks of a packed projection and an expanded scalar gradient give the right gradients."""
    packed = torch.randn(7, 3, 2 * 40, device=device).to(dtype)

    def loss(act_and_mul, packed):
        gate, up = packed.chunk(2, dim=-1)
        return act_and_mul(gate, up).sum()

    with fused_mlp.backend(implementation):
        leaf = packed.clone().requires_grad_()
        (got,) = torch.autograd.grad(loss(lambda gate, up: fused_mlp.act_and_mul(gate, up, "gelu"), leaf), leaf)
    results = []
    for dtype_, act in ((dtype, FORMULAS["gelu"].eager), (torch.float64, FORMULAS["gelu"].exact)):
        leaf = packed.to(dtype_).clone().requires_grad_()
        results += torch.autograd.grad(loss(lambda gate, up, act=act: act(gate) * up, leaf), leaf)
    assert_no_worse_than_eager(got, *results)


@pytest.mark.parametrize("activation", [name for name in ACTIVATIONS if name != "relu"])
@functions
def test_gradcheck(fused_mlp, device, function, activation):
    made = leaves(operands(function, (3,), (4, 5, 3), device=device), torch.float64)
    call = getattr(fused_mlp, function)

    def positional(*values):
        return call(**dict(zip(made, values, strict=True)), activation=activation)

    assert torch.autograd.gradcheck(positional, tuple(made.values()), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(positional, tuple(made.values()))


@pytest.mark.parametrize("activation", ["gelu", "gelu_pytorch_tanh", "silu", "quick_gelu", "relu2", "sigmoid"])
@functions
def test_double_backward(fused_mlp, device, implementation, function, activation):
    """A gradient's norm can be differentiated, as for a gradient penalty."""
    made = operands(function, (31,), device=device)

    def penalty_gradients(call, dtype):
        own = leaves(made, dtype)
        result = call(**own)
        first = torch.autograd.grad(result.square().mean(), own.values(), create_graph=True)
        return torch.autograd.grad(sum(gradient.square().sum() for gradient in first), own.values())

    with fused_mlp.backend(implementation):
        got = penalty_gradients(fused(fused_mlp, function, activation), torch.float32)
    of_eager = penalty_gradients(eager(function, activation), torch.float32)
    of_exact = penalty_gradients(exact(function, activation), torch.float64)
    for name, *gradients_ in zip(made, got, of_eager, of_exact, strict=True):
        assert_no_worse_than_eager(
            *gradients_, f"second gradient of {name}", roundings=32
        )  # written in torch operations


def test_backward_twice_and_a_changed_operand(fused_mlp, device, implementation):
    gate, up = leaves(operands("act_and_mul", device=device)).values()
    with fused_mlp.backend(implementation):
        kept = gate * 1
        result = fused_mlp.act_and_mul(kept, up)
        first = torch.autograd.grad(result.sum(), (gate, up), retain_graph=True)
        second = torch.autograd.grad(result.sum(), (gate, up), retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        with torch.no_grad():
            kept.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.sum().backward()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@functions
def test_without_autograd(fused_mlp, device, implementation, function, mode):
    made = operands(function, device=device)
    own = leaves(made)
    with fused_mlp.backend(implementation), mode():
        result = getattr(fused_mlp, function)(**own, activation="silu")
        assert not result.requires_grad
        assert result.grad_fn is None
        again = getattr(fused_mlp, function)(**{name: operand * 1 for name, operand in own.items()}, activation="silu")
    assert torch.equal(result, again)
    eager = reference.eager(function, made, "silu")
    assert_no_worse_than_eager(result, eager, reference.exact(function, made, "silu"), roundings=ROUNDINGS[function])


def first_operand(made):
    """Returns the operand to map or differentiate, gate or x, and a call in terms of it alone."""
    name = next(iter(made))
    rest = {other: operand for other, operand in made.items() if other != name}
    return name, made[name], rest


# torch.func: float32 results are compared with the eager sequence.


@functions
def test_vmap(fused_mlp, device, implementation, function):
    name, x, rest = first_operand(operands(function, (5, 7), device=device))
    call = fused(fused_mlp, function, "gelu")
    with fused_mlp.backend(implementation):
        if function == "act_and_mul":
            got = torch.func.vmap(lambda gate, up: call(gate=gate, up=up))(x, rest["up"])
        else:
            got = torch.func.vmap(lambda x: call(**{name: x}, **rest))(x)
    torch.testing.assert_close(got, reference.eager(function, {name: x} | rest, "gelu"))


@functions
def test_vmap_over_weights(fused_mlp, device, implementation, function):
    """vmap over an ensemble, with a leading dimension of models in every operand, matches eager."""
    models = [operands(function, (7,), device=device) for _ in range(3)]
    stacked = {name: torch.stack([model[name] for model in models]) for name in models[0]}
    call = fused(fused_mlp, function, "silu")
    with fused_mlp.backend(implementation):
        got = torch.func.vmap(lambda operands: call(**operands))(stacked)
    expected = torch.stack([reference.eager(function, model, "silu") for model in models])
    torch.testing.assert_close(got, expected)


@functions
def test_func_grad_and_per_sample_gradients(fused_mlp, device, implementation, function):
    made = operands(function, (5, 7), device=device)
    name, x, rest = first_operand(made)

    def gradient(call):
        def loss(x, rest):
            return call(**{name: x}, **rest).square().sum()

        of_rest = torch.func.grad(loss, argnums=1)
        dims = (0, 0 if function == "act_and_mul" else None)
        return torch.func.grad(loss)(x, rest), torch.func.vmap(of_rest, in_dims=dims)(x, rest)

    with fused_mlp.backend(implementation):
        got = gradient(fused(fused_mlp, function, "gelu"))
    torch.testing.assert_close(got, gradient(eager(function, "gelu")), rtol=1e-4, atol=1e-4)


@functions
def test_forward_mode(fused_mlp, device, implementation, function):
    made = operands(function, (5,), device=device)
    tangents = {name: torch.randn_like(operand) for name, operand in made.items()}

    def jvp(call):
        return torch.func.jvp(lambda operands: call(**operands), (made,), (tangents,))

    with fused_mlp.backend(implementation):
        got = jvp(fused(fused_mlp, function, "gelu_pytorch_tanh"))
        with forward_ad.dual_level():
            duals = {name: forward_ad.make_dual(operand, tangents[name]) for name, operand in made.items()}
            dual = forward_ad.unpack_dual(fused(fused_mlp, function, "gelu_pytorch_tanh")(**duals))
    expected = jvp(eager(function, "gelu_pytorch_tanh"))
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close((dual.primal, dual.tangent), expected)


@pytest.mark.parametrize("activation", [name for name in ACTIVATIONS if name != "silu"])  # PyTorch's own fails
@functions
def test_tangents_of_a_gradient(fused_mlp, device, implementation, function, activation):
    """Forward mode can differentiate a gradient whose graph was recorded before its level was entered."""
    made = operands(function, device=device)

    def tangents(call):
        own = leaves(made)
        result = call(**own)
        direction = (
            torch.ones_like(result),
            torch.arange(result.numel(), device=device).view_as(result) / result.numel(),
        )
        with forward_ad.dual_level():
            found = torch.autograd.grad(result, own.values(), forward_ad.make_dual(*direction))
            return [forward_ad.unpack_dual(gradient).tangent for gradient in found]

    with fused_mlp.backend(implementation):
        got = tangents(fused(fused_mlp, function, activation))
    torch.testing.assert_close(got, tangents(eager(function, activation)), rtol=1e-4, atol=1e-4)


@functions
def test_hessian(fused_mlp, device, implementation, function):
    """Hessians match by forward over reverse and by reverse over reverse."""
    made = operands(function, (2,), (3, 4, 2), device=device)
    name, x, rest = first_operand(made)

    def hessians(call):
        def loss(x):
            return call(**{name: x}, **rest).square().sum()

        return torch.func.hessian(loss)(x), torch.func.jacrev(torch.func.jacrev(loss))(x)

    with fused_mlp.backend(implementation):
        got = hessians(fused(fused_mlp, function, "silu"))
    torch.testing.assert_close(got, hessians(eager(function, "silu")))
