"""Results of the functions against float64 formulas, with the error of the eager PyTorch sequence as the limit."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import machine
import reference
import special_values
from layouts import GAP, chunk, every_other_column, misaligned, transposed
from reference import ACTIVATIONS, DTYPES, FUNCTIONS, ROUNDINGS, assert_no_worse_than_eager, operands, shapes, subsets

functions = pytest.mark.parametrize("function", FUNCTIONS)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def call(fused_mlp, implementation, function, operands, activation):
    dtype = next(iter(operands.values())).dtype
    with fused_mlp.backend(implementation if machine.takes(implementation, dtype) else "auto"), torch.no_grad():
        return getattr(fused_mlp, function)(**operands, activation=activation)


def check(fused_mlp, implementation, function, operands, activation="gelu_pytorch_tanh", chance=3.0):
    """Checks one call: its result, that it is a new tensor, and that the operands are unchanged."""
    before = {name: operand.clone() for name, operand in operands.items()}
    result = call(fused_mlp, implementation, function, operands, activation)
    eager = reference.eager(function, operands, activation)
    exact = reference.exact(function, operands, activation)
    conditioning = reference.conditioning(lambda made: [reference.exact(function, made, activation)], operands)
    layouts = ", ".join(f"{name} {list(operand.shape)} by {operand.stride()}" for name, operand in operands.items())
    what = f"{function} with {activation} in {result.dtype} of {layouts}"
    assert_no_worse_than_eager(
        result, eager, exact, what, ROUNDINGS[function], chance=chance, conditioning=lambda: conditioning(0)
    )
    assert result.stride() == eager.stride(), what
    for name, operand in operands.items():
        assert torch.equal(operand, before[name]), f"{function} changed {name}"
        shared = result.untyped_storage().data_ptr() == operand.untyped_storage().data_ptr()
        assert not shared or result.numel() == 0, f"the result of {function} shares the memory of {name}"


@dtypes
@pytest.mark.parametrize("activation", [*ACTIVATIONS, None])
@functions
def test_activations_and_dtypes(fused_mlp, device, implementation, function, activation, dtype):
    check(fused_mlp, implementation, function, operands(function, dtype=dtype, device=device), activation)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", [(64, 96, 40), (1, 1, 1), (7, 13, 5), (127, 251, 61), (256, 512, 264)], ids=str)
@pytest.mark.parametrize("lead", [(), (1,), (13,), (257,), (2, 3, 5), (1, 2, 1, 3, 1)], ids=str)
@functions
def test_shapes(fused_mlp, device, implementation, function, lead, sizes, dtype):
    check(fused_mlp, implementation, function, operands(function, lead, sizes, dtype=dtype, device=device))


@dtypes
@pytest.mark.parametrize("rows", [307, 1009, 2003])
@pytest.mark.parametrize("function", ["act_and_mul", "linear"])
def test_many_elements(fused_mlp, device, implementation, function, rows, dtype):
    """Tensors that take one or several rounds of a GPU's blocks and end in a partial vector are right."""
    made = operands(function, (rows,), (8, 1607, 8), dtype=dtype, device=device)
    check(fused_mlp, implementation, function, made, "gelu")


@pytest.mark.parametrize(
    ("lead", "sizes"),
    [
        ((0,), (64, 96, 40)),
        ((4, 0, 3), (8, 8, 8)),
        ((5,), (0, 6, 3)),
        ((5,), (6, 0, 3)),
        ((5,), (6, 3, 0)),
        ((), (0, 0, 0)),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@functions
def test_empty(fused_mlp, device, implementation, function, lead, sizes, dtype):
    check(fused_mlp, implementation, function, operands(function, lead, sizes, dtype=dtype, device=device))


@pytest.mark.parametrize("lead", [(70_001,), (3, 23_333)], ids=str)
@functions
def test_many_rows(fused_mlp, device, implementation, function, lead):
    check(fused_mlp, implementation, function, operands(function, lead, (8, 24, 8), device=device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 2, 8, 33])
@functions
def test_model_sized(fused_mlp, device, implementation, function, rows, dtype):
    check(
        fused_mlp, implementation, function, operands(function, (rows,), (768, 2304, 640), dtype=dtype, device=device)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("function", ["linear", "gated_linear", "gated_mlp", "mlp"])
def test_few_rows(fused_mlp, device, implementation, function, dtype):
    """Every number of rows that a kernel may be specialised for is right, also with overlapping blocks of features."""
    for rows in (*range(1, 18), 32, 33, 49, 65, 128, 129):
        for sizes in ((64, 96, 32), (45, 77, 39)):
            check(fused_mlp, implementation, function, operands(function, (rows,), sizes, dtype=dtype, device=device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["x", "weight"])
def test_few_rows_have_special_values_once(fused_mlp, device, implementation, name, dtype):
    """An infinity in features shared by two blocks is not multiplied by the zeros of one of them."""
    for rows, column in ((1, 0), (2, 20), (4, 31), (5, 44)):
        made = operands("linear", (rows,), (45, 77, 39), dtype=dtype, device=device)
        made[name][0, column] = torch.inf
        result = call(fused_mlp, implementation, "linear", made, None)
        eager = reference.eager("linear", made, None)
        assert torch.equal(result.isnan(), eager.isnan()) and torch.equal(result.isinf(), eager.isinf())


def every_other_row(tensor):
    return torch.stack([tensor, torch.full_like(tensor, GAP)], dim=1).flatten(0, 1)[::2]


def permuted(tensor):
    return tensor.movedim(0, -2).contiguous().movedim(-2, 0) if tensor.dim() > 2 else tensor


def expanded(tensor):
    return tensor[:1].expand(tensor.shape)


LAYOUTS = (transposed, chunk, every_other_row, every_other_column, misaligned, permuted, expanded)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
@functions
def test_strides_of_one_operand(fused_mlp, device, implementation, function, layout, dtype):
    for name in shapes(function, (4, 5, 6), (32, 48, 24)):
        made = operands(function, (4, 5, 6), (32, 48, 24), dtype=dtype, device=device)
        made[name] = layout(made[name])
        check(fused_mlp, implementation, function, made)


@pytest.mark.parametrize("layout", LAYOUTS)
@functions
def test_strides_of_all_operands(fused_mlp, device, implementation, function, layout):
    made = operands(function, (3, 7), (33, 47, 21), device=device)
    check(fused_mlp, implementation, function, {name: layout(operand) for name, operand in made.items()})


@dtypes
def test_views_of_a_packed_projection(fused_mlp, device, implementation, dtype):
    made = operands("gated_mlp", dtype=dtype, device=device)
    weight = torch.cat([made["gate_weight"], made["up_weight"]])
    bias = torch.cat([made["gate_bias"], made["up_bias"]])
    made["gate_weight"], made["up_weight"] = weight.chunk(2)
    made["gate_bias"], made["up_bias"] = bias.chunk(2)
    check(fused_mlp, implementation, "gated_mlp", made)
    gate, up = torch.randn(3, 5, 2 * 56, device=device).to(dtype).chunk(2, dim=-1)
    check(fused_mlp, implementation, "act_and_mul", {"gate": gate, "up": up})


def test_one_tensor_as_two_operands(fused_mlp, device, implementation):
    gate = torch.randn(9, 33, device=device)
    check(fused_mlp, implementation, "act_and_mul", {"gate": gate, "up": gate})
    made = operands("gated_linear", biases=False, device=device)
    check(fused_mlp, implementation, "gated_linear", made | {"up_weight": made["gate_weight"]})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("function", ["linear", "gated_linear", "gated_mlp", "mlp"])
def test_biases(fused_mlp, device, implementation, function, dtype):
    names = tuple(name for name in shapes(function, (1,), (1, 1, 1)) if name.endswith("bias"))
    for present in subsets(names):
        check(
            fused_mlp, implementation, function, operands(function, biases=present, dtype=dtype, device=device), "silu"
        )


@pytest.mark.parametrize("repetition", range(3))
def test_any_call(fused_mlp, device, implementation, repetition):
    """Calls with random combinations of function, shapes, dtype, activation, layouts and biases are right."""
    draw = random.Random(torch.initial_seed())
    for _ in range(40):
        function = draw.choice(tuple(FUNCTIONS))
        lead = tuple(draw.randint(1, 9) for _ in range(draw.randint(1, 3)))
        sizes = tuple(draw.choice([1, 2, 3, 8, 15, 16, 17, 31, 64, 100, 129, 192]) for _ in range(3))
        made = operands(function, lead, sizes, dtype=draw.choice(DTYPES), device=device, biases=draw.random() < 0.5)
        made = {name: draw.choice([*LAYOUTS, lambda tensor: tensor])(operand) for name, operand in made.items()}
        # The few roundings here repeat many times in an expanded operand.
        check(fused_mlp, implementation, function, made, draw.choice(ACTIVATIONS), chance=12.0)


@pytest.mark.parametrize(
    ("function", "options", "activation"),
    [
        ("geglu", {"approximate": "tanh"}, "gelu_pytorch_tanh"),
        ("geglu", {"approximate": "none"}, "gelu"),
        ("swiglu", {}, "silu"),
    ],
)
@dtypes
def test_named_products(fused_mlp, device, implementation, dtype, function, options, activation):
    made = operands("act_and_mul", dtype=dtype, device=device)
    with fused_mlp.backend(implementation if machine.takes(implementation, dtype) else "auto"):
        result = getattr(fused_mlp, function)(*made.values(), **options)
    eager, exact = (way("act_and_mul", made, activation) for way in (reference.eager, reference.exact))
    assert_no_worse_than_eager(result, eager, exact)


def test_defaults(fused_mlp, device):
    gate, up = operands("act_and_mul", device=device).values()
    tanh = fused_mlp.act_and_mul(gate, up, "gelu_pytorch_tanh")
    assert torch.equal(fused_mlp.act_and_mul(gate, up), tanh)
    assert torch.equal(fused_mlp.geglu(gate, up), tanh)
    for function in ("gated_linear", "gated_mlp", "mlp"):
        made = operands(function, device=device)
        default = getattr(fused_mlp, function)(**made)
        assert torch.equal(default, getattr(fused_mlp, function)(**made, activation="gelu_pytorch_tanh"))
    made = operands("linear", device=device)
    assert torch.equal(fused_mlp.linear(**made), fused_mlp.linear(**made, activation="linear"))


def test_operands_by_position(fused_mlp, device):
    for function in FUNCTIONS:
        made = operands(function, device=device)
        named = getattr(fused_mlp, function)(**made, activation="silu")
        assert torch.equal(getattr(fused_mlp, function)(*made.values(), "silu"), named)


def test_names_mean_what_they_mean_to_transformers(fused_mlp, device):
    from transformers.activations import ACT2FN

    gate, up = operands("act_and_mul", device=device).values()
    names = [*ACTIVATIONS, "gelu_new", "gelu_fast", "gelu_accurate", "gelu_python_tanh", "gelu_python", "swish"]
    for name in names:
        expected = ACT2FN[name](gate.double()) * up
        torch.testing.assert_close(fused_mlp.act_and_mul(gate.double(), up.double(), name), expected, msg=name)


@functions
def test_a_dtype_without_kernels_is_computed_by_torch(fused_mlp, device, function):
    made = {name: operand.double() for name, operand in operands(function, device=device).items()}
    result = getattr(fused_mlp, function)(**made, activation="gelu")
    assert torch.equal(result, reference.eager(function, made, "gelu"))
    assert fused_mlp.explain(getattr(fused_mlp, function), **made).implementation == "torch"


@functions
def test_the_torch_backend_is_the_eager_sequence(fused_mlp, device, function):
    made = operands(function, device=device, dtype=torch.bfloat16)
    with fused_mlp.backend("torch"):
        result = getattr(fused_mlp, function)(**made, activation="silu")
    assert torch.equal(result, reference.eager(function, made, "silu"))


@functions
def test_calls_repeat_bit_for_bit(fused_mlp, device, implementation, function):
    made = operands(function, (67,), (256, 512, 256), device=device, dtype=torch.bfloat16)
    first = call(fused_mlp, implementation, function, made, "gelu")
    for _ in range(3):
        assert torch.equal(call(fused_mlp, implementation, function, made, "gelu"), first)


@functions
def test_uninitialised_memory_does_not_show(fused_mlp, device, implementation, function):
    for sizes in ((64, 96, 40), (127, 251, 61)):
        for dtype in (torch.float32, torch.bfloat16):
            made = operands(function, (37,), sizes, dtype=dtype, device=device)
            with reference.poisoned_memory(device):
                check(fused_mlp, implementation, function, made)


@functions
def test_threads(fused_mlp, device, implementation, function):
    """Concurrent calls from several threads are right."""
    made = [operands(function, (33,), (128, 192, 128), device=device) for _ in range(8)]
    expected = [call(fused_mlp, implementation, function, operands, "silu") for operands in made]
    with fused_mlp.backend(implementation), ThreadPoolExecutor(8) as pool:
        run = getattr(fused_mlp, function)
        results = list(pool.map(lambda operands: [run(**operands, activation="silu") for _ in range(10)], made))
    for repeated, one in zip(results, expected, strict=True):
        for result in repeated:
            torch.testing.assert_close(result, one, rtol=1e-5, atol=1e-5)


@dtypes
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_extreme_values(fused_mlp, device, implementation, activation, dtype):
    """Overflow, NaN and zeros appear as computed in float32 and rounded once."""
    values = torch.tensor(special_values.SPECIAL, device=device).to(dtype)
    gate, up = (grid.repeat(1, 3) for grid in torch.meshgrid(values, values, indexing="ij"))
    result = call(fused_mlp, implementation, "act_and_mul", {"gate": gate, "up": up}, activation)
    act = reference.FORMULAS[activation].eager
    if machine.takes(implementation, dtype):
        # The activation is from float64: PyTorch's float32 gelu of infinity is a NaN on CPUs.
        expected = (act(gate.double()).float() * up.float()).to(dtype)
    else:
        expected = act(gate) * up
    info = torch.finfo(dtype)
    # Ties of subnormal numbers may round either way, and the last bits of float32's may differ.
    atol = max(info.smallest_normal * info.eps, 1e-44)
    torch.testing.assert_close(result, expected, rtol=2 * info.eps, atol=atol, equal_nan=True)


@pytest.mark.parametrize("create_graph", [False, True])
@dtypes
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_extreme_gradients(fused_mlp, device, implementation, activation, dtype, create_graph):
    special_values.check_gradients(fused_mlp, implementation, device, activation, dtype, create_graph)


@pytest.mark.skipif(machine.device_type() != "cpu", reason="GPUs take no longer for subnormal numbers")
@pytest.mark.parametrize("activation", ["gelu", "gelu_pytorch_tanh"])
def test_no_traces_of_which_products_are_subnormal(fused_mlp, activation):
    """The ops give zero for subnormal products, as eager does: these take a CPU up to a hundred times as long."""
    gate = torch.linspace(-16, 16, 4096).reshape(2, 2048).requires_grad_()
    up = torch.ones(2, 2048)
    with fused_mlp.backend("cpu"):
        result = fused_mlp.act_and_mul(gate, up, activation)
        (gradient,) = torch.autograd.grad(result.sum(), gate)
    for values in (result, gradient):
        assert values[values != 0].abs().min() > 2.0**-80
        assert torch.isfinite(values).all()


@pytest.mark.parametrize("special", [torch.inf, -torch.inf, torch.nan, 1e4, 1e30])
@dtypes
@pytest.mark.parametrize("function", ["linear", "gated_linear", "gated_mlp", "mlp"])
def test_extreme_rows(fused_mlp, device, implementation, function, dtype, special):
    """A row of x that overflows does so as in eager PyTorch, without effect on other rows."""
    made = operands(function, (9,), dtype=dtype, device=device)
    made["x"][4, 3] = special
    result = call(fused_mlp, implementation, function, made, "silu")
    eager = reference.eager(function, made, "silu")
    others = torch.arange(9, device=device) != 4
    assert result[others].isfinite().all()
    assert torch.equal(result.isfinite().all(dim=-1), eager.isfinite().all(dim=-1))
    kept = {name: operand[others] if name == "x" else operand for name, operand in made.items()}
    assert_no_worse_than_eager(result[others], eager[others], reference.exact(function, kept, "silu"), roundings=4)


@pytest.mark.parametrize("special", [torch.inf, torch.nan])
@pytest.mark.parametrize("function", ["linear", "gated_linear", "gated_mlp", "mlp"])
def test_a_special_value_in_a_bias_or_weight_is_seen(fused_mlp, device, implementation, function, special):
    for name in shapes(function, (9,), (64, 96, 40)):
        made = operands(function, (9,), device=device)
        made[name].view(-1)[3] = special
        result = call(fused_mlp, implementation, function, made, "silu")
        assert torch.equal(result.isfinite(), reference.eager(function, made, "silu").isfinite()), name


@pytest.mark.parametrize("up", [1, 0, 2], ids=["up follows", "gate follows", "a gap between"])
@pytest.mark.parametrize("biases", ["none", "halves", "apart"])
def test_gate_and_up_that_are_halves_of_one_weight(fused_mlp, device, up, biases):
    """Gate and up as halves of one weight give the same result as separate weights; on a CPU they are one product."""
    gate = 1 if up == 0 else 0
    x, down = torch.randn(5, 24, device=device), torch.randn(24, 40, device=device)
    weights, packed = torch.randn(3, 40, 24, device=device), torch.randn(3, 40, device=device)
    own = [None, None] if biases == "none" else [packed[gate], packed[up]]
    if biases == "apart":
        own = [bias.clone() for bias in own]
    copies = [None if bias is None else bias.clone() for bias in own]
    with torch.no_grad():
        for function, last in ((fused_mlp.gated_mlp, (down,)), (fused_mlp.gated_linear, ())):
            got = function(x, weights[gate], weights[up], *last, *own, activation="silu")
            expected = function(x, weights[gate].clone(), weights[up].clone(), *last, *copies, activation="silu")
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
