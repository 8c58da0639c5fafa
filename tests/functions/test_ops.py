"""The compiled ops reject operands that do not fit with an error, and never read them."""

import sys

import pytest
import torch

import reference

PRODUCTS = ("linear", "gated_linear", "gated_mlp", "mlp")
SIZES = (8, 12, 6)
ACTIVATION = 2  # gelu_pytorch_tanh


@pytest.fixture(scope="module")
def ops(fused_mlp):
    return sys.modules[f"{fused_mlp.__name__}.backends.native"]


def good(op, device):
    """Returns valid operands in the op's order, including all biases."""
    return reference.operands(op, (3,), SIZES, device=device)


def faults(name, operand):
    """Yields the operands with one fault at a time, and its description."""
    if name == "x":
        return [(operand[..., :-1], "too narrow"), (operand[0, 0], "a scalar")]
    made = [(operand.bfloat16(), "of another dtype"), (operand[None], "of one dimension more")]
    made.append((operand[:-1], "one row short"))
    if operand.dim() == 2:
        made.append((operand[:, :-1], "one column short"))
    if operand.is_cuda:
        made.append((operand.cpu(), "on the CPU"))
    return made


@pytest.mark.parametrize("op", PRODUCTS)
def test_operands_that_do_not_fit(ops, device, op):
    operands = good(op, device)
    for name, operand in operands.items():
        for fault, what in faults(name, operand):
            with pytest.raises(RuntimeError, match=r"must be|must have|differs in|not on the device"):
                getattr(ops, op)(*(operands | {name: fault}).values(), ACTIVATION)
                pytest.fail(f"{op} took {name} {what}")


def test_pointwise_operands_that_do_not_fit(ops, device):
    good = torch.randn(3, 8, device=device)
    for fault in (good[:-1], good[:, :-1], good[0], good[None], good.bfloat16()):
        with pytest.raises(RuntimeError, match="differs in"):
            ops.act_and_mul(good, fault, ACTIVATION)
        for position in range(1, 3):
            operands = [good, good, good]
            operands[position] = fault
            with pytest.raises(RuntimeError, match="differs in"):
                ops.act_and_mul_backward(*operands, ACTIVATION)


@pytest.mark.parametrize("op", (*PRODUCTS, "act_and_mul"))
def test_codes_that_name_no_activation(ops, device, op):
    for code in (-1, 8, 1 << 40):
        with pytest.raises(RuntimeError, match="activation"):
            getattr(ops, op)(*good(op, device).values(), code)
