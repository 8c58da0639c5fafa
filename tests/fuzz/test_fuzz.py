"""Random modules and calls."""

import collections
import random
from functools import partial

import pytest
import torch

import expert_calls
import fuzz
import fuzz_changes
import machine
import reference
from reference import ACTIVATIONS, DTYPES, FUNCTIONS, operands
from test_functional import LAYOUTS

CASES = 200


def test_modules(fused_mlp, tmp_path):
    """Fusing keeps a module's behaviour, and enough modules are fused for this to be meaningful.

    The cases are the same in every run; fuzz.py runs thousands of new ones.
    """
    counts = collections.Counter()
    for seed in range(CASES):
        counts.update(fuzz.outcome(fused_mlp, seed, tmp_path))
    fuzz.assert_enough(counts, CASES)


@pytest.mark.parametrize("seed", range(3))
def test_a_seed_is_a_case(seed):
    assert str(fuzz.source_of(seed)) == str(fuzz.source_of(seed))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_gradients_of_any_call(fused_mlp, device, implementation, function):
    """Gradients are right for random shapes, dtypes, activations, layouts, biases and required gradients."""
    draw = random.Random(torch.initial_seed())
    for _ in range(12):
        lead = tuple(draw.randint(1, 5) for _ in range(draw.randint(1, 3)))
        sizes = tuple(draw.choice([1, 3, 8, 17, 32]) for _ in range(3))
        dtype, activation = draw.choice(DTYPES), draw.choice(ACTIVATIONS)
        made = operands(function, lead, sizes, dtype=dtype, device=device, biases=draw.random() < 0.5)
        made = {name: draw.choice([*LAYOUTS, torch.clone])(operand) for name, operand in made.items()}
        wanted = draw.sample(list(made), draw.randint(1, len(made)))
        layout = draw.choice(["contiguous", "expanded", "transposed"])
        with fused_mlp.backend(implementation if machine.takes(implementation, dtype) else "auto"):
            got = gradients(partial(getattr(fused_mlp, function), activation=activation), made, wanted, layout)
        formulas = reference.FORMULAS[activation]
        eager = gradients(partial(FUNCTIONS[function], formulas.eager), made, wanted, layout)
        wide = {name: operand.double() for name, operand in made.items()}
        exact = gradients(partial(FUNCTIONS[function], formulas.exact), wide, wanted, layout)
        for name in ("result", *wanted):
            case = (
                f"{function} with {activation} in {dtype}, {lead} by {sizes}, {layout}, gradients of {wanted}: {name}"
            )
            assert reference.strides(got[name]) == reference.strides(eager[name]), case
            limit = (
                3 * (eager[name].double() - exact[name]).abs().max()
                + 16
                * torch.finfo(dtype).eps
                * exact[name].abs().max().clamp(min=1)  # cancelling terms are of order one
            )
            assert (got[name].double() - exact[name]).abs().max() <= limit, case


def gradients(function, operands, wanted, layout):
    """Returns the result, and the gradients of the wanted operands."""
    given = {name: operand.detach().requires_grad_(name in wanted) for name, operand in operands.items()}
    result = function(**given)
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(result.shape, generator=generator).to(result)
    if layout == "expanded":
        grad = grad[:1].expand(grad.shape)
    elif layout == "transposed":
        grad = grad.transpose(0, -1).contiguous().transpose(0, -1)
    found = torch.autograd.grad(result, [given[name] for name in wanted], grad)
    return {"result": result.detach(), **dict(zip(wanted, found, strict=True))}


def test_any_call_of_experts(fused_mlp, device, implementation):
    """Values are right for random forms, dtypes of the index, layouts, biases, and more experts than int8 can name."""
    draw = random.Random(torch.initial_seed())
    forms = list(expert_calls.forms())
    for _ in range(12):
        form, dtype = draw.choice(forms), draw.choice(DTYPES)
        sizes = tuple(draw.choice([1, 3, 8, 17, 32]) for _ in range(3))
        counts = draw.choice([0, 1, 7, 40]), draw.randint(1, 4), draw.choice([1, 3, 130])
        options = {"dtype": dtype, "device": device, "biases": draw.random() < 0.5}
        made = expert_calls.drawn(*counts, sizes, **options, **form)
        for name in ("x", *list(made)[3:]):
            made[name] = draw.choice([*LAYOUTS, torch.clone])(made[name])
        index = made["top_k_index"]
        narrow = draw.choice([torch.int64, torch.int32, torch.int16, torch.int8])
        made["top_k_index"] = torch.where(index > 127, -1, index).to(narrow)
        expert_calls.check(fused_mlp, implementation, made, draw.choice(ACTIVATIONS), **form)


@pytest.mark.parametrize("seed", range(30))
def test_models_that_change(fused_mlp, device, seed):
    """Changed models compute the same as unfused ones. Cases are fixed; fuzz_changes.py runs thousands of new ones."""
    fuzz_changes.check(fused_mlp, seed, device)
