"""Invalid input raises the right exception type, and the message names the argument, its value and the requirement."""

import functools

import pytest
import torch

import reference
from reference import FUNCTIONS, operands

PRODUCTS = [name for name in FUNCTIONS if name != "act_and_mul"]


def raises(error, *words):
    """Returns pytest.raises for a message with all the words, in any order."""
    return pytest.raises(error, match="".join(f"(?=.*{word})" for word in words))


def each(fused_mlp, function):
    """Returns the function and its explain call, which refuse the same input."""
    call = getattr(fused_mlp, function)
    return call, functools.partial(fused_mlp.explain, call)


def good(function, device, biases=True):
    return operands(function, (3,), (8, 12, 6), device=device, biases=biases)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_an_operand_that_is_no_tensor(fused_mlp, device, function):
    for name in good(function, device):
        for call in each(fused_mlp, function):
            with raises(TypeError, rf"\b{name}\b", "tensor", "list"):
                call(**good(function, device) | {name: [1.0, 2.0]})


@pytest.mark.parametrize("wrong", [None, "silu", 3, 2.5], ids=repr)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_an_operand_of_another_kind(fused_mlp, device, function, wrong):
    for name in good(function, device):
        if wrong is not None or not name.endswith("bias"):
            for call in each(fused_mlp, function):
                with raises(TypeError, rf"\b{name}\b", "tensor", type(wrong).__name__):
                    call(**good(function, device) | {name: wrong})


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_nested_operand(fused_mlp, device, function):
    """A nested tensor of strided layout, which has no shape, is refused."""
    for name, operand in good(function, device).items():
        nested = torch.nested.nested_tensor([operand, operand], layout=torch.strided)
        for call in each(fused_mlp, function):
            with raises(TypeError, rf"\b{name}\b", "nested"):
                call(**good(function, device) | {name: nested})


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("function", PRODUCTS)
def test_sparse_operands_are_computed_by_torch(fused_mlp, device, function):
    made = good(function, device, biases=False)
    expected = reference.eager(function, made, "silu")
    weight = next(name for name in made if name.endswith("weight"))
    for name, sparse in (("x", made["x"].to_sparse()), (weight, made[weight].to_sparse_csr())):
        call, explain = each(fused_mlp, function)
        torch.testing.assert_close(call(**made | {name: sparse}, activation="silu"), expected)
        explanation = explain(**made | {name: sparse})
        assert (explanation.implementation, "sparse" in explanation.reason) == ("torch", True)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_errors_are_what_pytorch_raises_too(fused_mlp, device, function):
    """Code that catches RuntimeError from the eager operations also catches the functions' errors."""
    _, second, *_ = made = good(function, device, biases=False)
    for wrong in (made[second].bfloat16(), made[second][:, :-1], made[second].to("meta"), None):
        with pytest.raises(RuntimeError, match=second):
            getattr(fused_mlp, function)(**made | {second: wrong})


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.int8, torch.complex64], ids=str)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_an_operand_of_no_floating_dtype(fused_mlp, device, function, dtype):
    for name, operand in good(function, device).items():
        for call in each(fused_mlp, function):
            with raises(TypeError, rf"\b{name}\b", "floating", str(dtype)):
                call(**good(function, device) | {name: operand.to(dtype)})


@pytest.mark.parametrize(("other", "error"), [(torch.bfloat16, TypeError), (torch.device("meta"), ValueError)])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_operands_of_two_dtypes_or_devices(fused_mlp, device, function, other, error):
    first, *others = good(function, device)
    said = ("float32", "bfloat16") if error is TypeError else (device.type, "meta")
    for name in others:
        made = good(function, device)
        for call in each(fused_mlp, function):
            with raises(error, rf"\b{name}\b", rf"\b{first}\b", *said):
                call(**made | {name: made[name].to(other)})


# Invalid replacements for an operand of x [3, 8], hidden 12 and out 6, and the message's words besides its name.
BAD_SHAPES = {
    "act_and_mul": [
        ("up", (3, 11), ["gate", r"\[3, 12\]", r"\[3, 11\]"]),
        ("up", (12,), ["gate", r"\[3, 12\]", r"\[12\]"]),  # would broadcast
        ("up", (1, 12), ["gate", r"\[3, 12\]", r"\[1, 12\]"]),
        ("up", (), ["gate", r"\[\]"]),
    ],
    "linear": [
        ("x", (), ["scalar"]),
        ("weight", (12, 7), ["8", r"\[12, 7\]"]),
        ("weight", (8, 12), ["8", r"\[8, 12\]"]),  # transposed
        ("weight", (8,), ["8", r"\[8\]"]),
        ("weight", (1, 12, 8), [r"\[1, 12, 8\]"]),
        ("bias", (11,), ["12", r"\[11\]"]),
        ("bias", (1,), ["12", r"\[1\]"]),  # would broadcast
        ("bias", (3, 12), ["12", r"\[3, 12\]"]),
        ("bias", (), ["12", r"\[\]"]),
    ],
    "gated_linear": [
        ("x", (), ["scalar"]),
        ("gate_weight", (12, 7), ["8", r"\[12, 7\]"]),
        ("up_weight", (12, 7), ["8", r"\[12, 7\]"]),
        ("up_weight", (11, 8), ["gate_weight", r"\[12, 8\]", r"\[11, 8\]"]),
        ("up_weight", (1, 8), ["gate_weight", r"\[12, 8\]", r"\[1, 8\]"]),  # would broadcast
        ("gate_bias", (11,), ["12", r"\[11\]"]),
        ("up_bias", (1,), ["12", r"\[1\]"]),
    ],
    "gated_mlp": [
        ("x", (), ["scalar"]),
        ("gate_weight", (12,), ["8", r"\[12\]"]),
        ("up_weight", (8, 12), ["8", r"\[8, 12\]"]),
        ("down_weight", (6, 11), ["12", r"\[6, 11\]"]),
        ("down_weight", (12, 6), ["12", r"\[12, 6\]"]),
        ("gate_bias", (1, 12), ["12", r"\[1, 12\]"]),
        ("up_bias", (6,), ["12", r"\[6\]"]),
        ("down_bias", (12,), ["6", r"\[12\]"]),
    ],
    "mlp": [
        ("x", (), ["scalar"]),
        ("fc1_weight", (12, 7), ["8", r"\[12, 7\]"]),
        ("fc2_weight", (12, 6), ["12", r"\[12, 6\]"]),
        ("fc1_bias", (6,), ["12", r"\[6\]"]),
        ("fc2_bias", (12,), ["6", r"\[12\]"]),
    ],
}


@pytest.mark.parametrize(
    ("function", "name", "shape", "words"),
    [(function, *case) for function, cases in BAD_SHAPES.items() for case in cases],
)
def test_a_shape_that_does_not_fit(fused_mlp, device, function, name, shape, words):
    made = good(function, device, biases=(name,))  # other biases would not fit an invalid weight either
    for call in each(fused_mlp, function):
        with raises(ValueError, rf"\b{name}\b", *words):
            call(**made | {name: torch.randn(shape, device=device)})


@pytest.mark.parametrize("function", PRODUCTS)
def test_an_input_of_another_width(fused_mlp, device, function):
    made = good(function, device) | {"x": torch.randn(3, 9, device=device)}
    weight = next(name for name in made if name.endswith("weight"))
    for call in each(fused_mlp, function):
        with raises(ValueError, weight, "9", r"\[12, 8\]"):
            call(**made)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_an_activation_that_is_not_known(fused_mlp, device, function):
    for call in each(fused_mlp, function):
        with raises(ValueError, "activation", "'swiglue'", "gelu_pytorch_tanh", "silu", "None"):
            call(**good(function, device), activation="swiglue")
    for wrong, kind in ((torch.nn.SiLU(), "SiLU"), (4, "int"), (["silu"], "list")):
        for call in each(fused_mlp, function):
            with raises(TypeError, "activation", "string", kind):
                call(**good(function, device), activation=wrong)


@pytest.mark.parametrize("approximate", ["erf", None, True])
def test_geglu_of_an_unknown_approximation(fused_mlp, device, approximate):
    for call in each(fused_mlp, "geglu"):
        with raises(ValueError, "approximate", "'tanh'", "'none'", repr(approximate)):
            call(**good("act_and_mul", device), approximate=approximate)


@pytest.mark.parametrize("function", ["geglu", "swiglu"])
def test_the_short_forms_check_too(fused_mlp, device, function):
    gate = torch.randn(3, 12, device=device)
    for call in each(fused_mlp, function):
        with raises(ValueError, r"\bup\b", r"\[3, 12\]", r"\[12\]"):
            call(gate, gate[0])


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_missing_or_an_unknown_argument(fused_mlp, device, function):
    first, second, *_ = made = good(function, device)
    for call in each(fused_mlp, function):
        with raises(TypeError, second):
            call(made[first])
    for call in each(fused_mlp, function):
        with raises(TypeError, "inplace"):
            call(**made, inplace=True)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_errors_are_the_same_under_autograd(fused_mlp, device, function):
    made = {name: operand.requires_grad_() for name, operand in good(function, device).items()}
    name = list(made)[1]
    for call in each(fused_mlp, function):
        with raises(ValueError, name):
            call(**made | {name: made[name][:, :-1]})
