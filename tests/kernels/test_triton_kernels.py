"""The Triton kernels, on a GPU or, with TRITON_INTERPRET=1 set for the process, interpreted on the CPU."""

import functools
import importlib
import json
import os
import random
import re
from contextlib import contextmanager

import pytest
import torch

import expert_calls
import layouts
import machine
import reference
import special_values
import test_functional
from reference import ACTIVATIONS, FORMULAS, FUNCTIONS, assert_no_worse_than_eager, operands

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DTYPES = (torch.float32, torch.float16) if INTERPRETED else reference.DTYPES
PRODUCTS = tuple(name for name in FUNCTIONS if name != "act_and_mul")

if not INTERPRETED and machine.device_type() == "cpu":
    pytest.skip("no GPU: test_triton.py has Triton interpret the kernels in here", allow_module_level=True)

on_a_gpu = pytest.mark.skipif(INTERPRETED, reason="needs a GPU")


def of_dtypes(*chosen):
    return pytest.mark.parametrize("dtype", chosen, ids=lambda dtype: str(dtype).removeprefix("torch."))


dtypes = of_dtypes(*DTYPES)
# The two longest tests: when interpreted, shapes use one element size and strides the other.
dtypes_of_shapes = of_dtypes(torch.float16) if INTERPRETED else dtypes
dtypes_of_strides = of_dtypes(torch.float32) if INTERPRETED else dtypes
functions = pytest.mark.parametrize("function", FUNCTIONS)


@pytest.fixture
def device():
    return torch.device("cpu" if INTERPRETED else machine.device_type())


@pytest.fixture
def forced(fused_mlp):
    """The package, with the Triton backend forced and autograd off."""
    with fused_mlp.backend("triton"), torch.no_grad():
        yield fused_mlp


@pytest.fixture
def backend(fused_mlp):
    """A function that returns a module of the Triton backend by name, or the backend itself without a name."""
    name = f"{fused_mlp.__name__}.backends.triton"
    return lambda module="": importlib.import_module(f"{name}.{module}" if module else name)


def check(forced, function, made, activation="gelu_pytorch_tanh"):
    test_functional.check(forced, "triton", function, made, activation)


# Results


@dtypes
@pytest.mark.parametrize("activation", [*ACTIVATIONS, None])
@functions
def test_activations_and_dtypes(forced, device, function, activation, dtype):
    check(forced, function, operands(function, (3, 37), (67, 48, 5), dtype=dtype, device=device), activation)


LEADS = [(), (1,), (17,), (2, 3, 5), (259,)]
SIZES = [(1, 1, 1), (7, 13, 5), (131, 61, 3), (64, 96, 40), (48, 257, 8)]
# All pairs on a GPU; when interpreted, each entry of one list is paired with two of the other.
STEPS = (0, 2) if INTERPRETED else range(len(SIZES))
SHAPES = [(lead, SIZES[(place + step) % len(SIZES)]) for place, lead in enumerate(LEADS) for step in STEPS]


@dtypes_of_shapes
@pytest.mark.parametrize(("lead", "sizes"), SHAPES, ids=str)
@pytest.mark.parametrize("function", ["act_and_mul", "linear", "gated_linear"])
def test_shapes(forced, device, function, lead, sizes, dtype):
    check(forced, function, operands(function, lead, sizes, dtype=dtype, device=device))


@pytest.mark.parametrize("biases", [False, True, ("gate_bias", "fc1_bias"), ("up_bias", "fc2_bias")], ids=str)
@pytest.mark.parametrize("function", PRODUCTS)
def test_biases(forced, device, function, biases):
    check(forced, function, operands(function, (70,), (64, 80, 24), device=device, biases=biases))


@pytest.mark.parametrize(
    ("lead", "sizes"), [((0,), (8, 8, 8)), ((2, 0, 3), (8, 8, 8)), ((5,), (0, 6, 3)), ((5,), (6, 0, 3))], ids=str
)
@functions
def test_empty(forced, device, function, lead, sizes):
    check(forced, function, operands(function, lead, sizes, device=device))


@dtypes
@pytest.mark.parametrize("function", PRODUCTS)
def test_no_columns_of_an_aligned_matrix(forced, device, function, dtype):
    made = operands(function, (70,), (64, 48, 8), dtype=dtype, device=device)
    first = [name for name in made if name in ("x", "weight", "gate_weight", "up_weight", "fc1_weight")]
    check(forced, function, made | {name: made[name][:, :0] for name in first})


@dtypes
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients(fused_mlp, device, activation, dtype):
    gate, up, grad = (torch.randn(33, 130, device=device).to(dtype) for _ in range(3))
    formula = FORMULAS[activation]
    exact = (
        grad.double() * up.double() * formula.derivative(gate.double()),
        grad.double() * formula.exact(gate.double()),
    )

    def gradients(function):
        leaves = [operand.clone().requires_grad_() for operand in (gate, up)]
        return torch.autograd.grad(function(*leaves), leaves, grad)

    with fused_mlp.backend("triton"):
        results = gradients(lambda gate, up: fused_mlp.act_and_mul(gate, up, activation))
    eagers = gradients(lambda gate, up: formula.eager(gate) * up)
    for name, result, eager, reference_ in zip(("gate", "up"), results, eagers, exact, strict=True):
        assert_no_worse_than_eager(result, eager, reference_, f"gradient of {name}")


# Memory layouts


@dtypes
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_of_special_values(fused_mlp, device, activation, dtype):
    special_values.check_gradients(fused_mlp, "triton", device, activation, dtype)


@pytest.mark.parametrize("repetition", range(2))
def test_any_strides(fused_mlp, device, repetition):
    draw = random.Random(torch.initial_seed())
    for _ in range(15):
        layouts.check_product(fused_mlp, "triton", draw, device, torch.float32)


# Gaps between elements hold NaN, so a kernel that reads one shows it.
LAYOUTS = {"transposed": layouts.transposed} | {
    layout.__name__: functools.partial(layout, gap=torch.nan)
    for layout in (layouts.chunk, layouts.every_other_column, layouts.misaligned)
}
in_layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


@dtypes_of_strides
@pytest.mark.parametrize("sizes", [(64, 96, 40), (37, 50, 3)], ids=str)
@in_layouts
@pytest.mark.parametrize("function", ["act_and_mul", "linear", "gated_linear"])
def test_strides(forced, device, function, layout, sizes, dtype):
    """Each operand alone, and all together, may have the layout, with more rows than a tile has."""
    made = operands(function, (2, 7), sizes, dtype=dtype, device=device)
    for name in made:
        check(forced, function, made | {name: layout(made[name])})
    made = operands(function, (2, 35), sizes, dtype=dtype, device=device)
    check(forced, function, {name: layout(operand) for name, operand in made.items()})


@dtypes
@functions
def test_expanded(forced, device, function, dtype):
    """Rows may share their memory."""
    made = operands(function, (1,), (64, 48, 8), dtype=dtype, device=device)
    rows = {name: operand.expand(70, -1) for name, operand in made.items() if name in ("x", "gate", "up")}
    check(forced, function, made | rows)


@in_layouts
def test_gradients_of_strided_operands(fused_mlp, backend, device, layout):
    gate, up, grad = (torch.randn(9, 64, device=device) for _ in range(3))
    code = 2
    expected = backend().act_and_mul_backward(grad, gate, up, code)
    for strided in ((layout(grad), gate, up), (grad, layout(gate), up), tuple(map(layout, (grad, gate, up)))):
        for result, one in zip(backend().act_and_mul_backward(*strided, code), expected, strict=True):
            assert torch.equal(result, one)


def test_offsets_past_2_to_the_31(forced, backend, device):
    """Offsets past 2^31 work: rows are 2^29 elements apart, in memory that is mostly never touched."""
    rows, cols, stride = 5, 48, 2**29 + 16
    memory = torch.empty((rows - 1) * stride + 2 * cols, dtype=torch.float16, device=device)
    far = memory.as_strided((rows, 2 * cols), (stride, 1))
    near = torch.randn(rows, 2 * cols, device=device).half()
    far.copy_(near)
    weight = torch.randn(33, cols, device=device).half()
    (gate, up), (far_gate, far_up) = near.chunk(2, dim=-1), far.chunk(2, dim=-1)
    assert torch.equal(forced.act_and_mul(far_gate, far_up), forced.act_and_mul(gate, up))
    gradients = backend().act_and_mul_backward(far_up, far_gate, far_up, 2)
    for result, expected in zip(gradients, backend().act_and_mul_backward(up, gate, up, 2), strict=True):
        assert torch.equal(result, expected)
    assert torch.equal(forced.linear(far_gate, weight), forced.linear(gate, weight))
    assert torch.equal(forced.gated_linear(weight, far_gate, far_up), forced.gated_linear(weight, gate, up))


# Numbers


@dtypes
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_large_arguments(forced, backend, device, activation, dtype):
    """Large arguments overflow nowhere if the exact result does not."""
    most = torch.finfo(dtype).max
    sizes = [0.0, 1.0, 9.0, 20.0, 90.0, 1e3, 6e4, most]
    gate = torch.tensor(sizes + [-size for size in sizes], device=device, dtype=dtype)
    one = torch.ones_like(gate)
    formula, code = FORMULAS[activation], forced.activations.get_activation(activation).code
    dgate, dup = backend().act_and_mul_backward(one, gate, one, code)
    tolerance = 4 * torch.finfo(dtype).eps
    exact, derivative = (function(gate.double()).to(dtype) for function in (formula.exact, formula.derivative))
    torch.testing.assert_close(forced.act_and_mul(gate, one, activation), exact, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(dup, exact, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(dgate, derivative, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nan_and_infinity(forced, device, activation):
    gate = torch.tensor([torch.nan, 1.0, torch.inf, -1.0], device=device)
    result = forced.act_and_mul(gate, torch.ones_like(gate), activation)
    torch.testing.assert_close(result, FORMULAS[activation].exact(gate.double()).float(), equal_nan=True)
    identity = torch.eye(4, device=device)
    result = forced.linear(gate.nan_to_num(posinf=0.0) * torch.ones(2, 4, device=device), identity, gate, activation)
    assert torch.equal(result.isnan(), gate.isnan().expand(2, 4))


@contextmanager
def tf32_products():
    """Sets TF32 products; pytest's monkeypatch cannot restore the setting, because it deletes attributes that an object
    only forwards.
    """
    settings = torch.backends.cuda.matmul
    before, settings.fp32_precision = settings.fp32_precision, "tf32"
    try:
        yield
    finally:
        settings.fp32_precision = before


@on_a_gpu
@pytest.mark.parametrize("function", PRODUCTS)
def test_tf32_where_pytorch_was_told_to(forced, device, function):
    made = operands(function, (300,), (512, 256, 128), device=device)
    exact = reference.exact(function, made, "silu")
    error, _ = reference.errors(getattr(forced, function)(**made, activation="silu"), exact)
    assert error < 1e-6
    with tf32_products():
        error, _ = reference.errors(getattr(forced, function)(**made, activation="silu"), exact)
    assert 1e-5 < error < 1.4e-3  # operands cut to TF32 give errors up to 1.02e-3, in bfloat16 at least 1.64e-3


# Experts


@dtypes
def expert_calls_of_any_form(forced, device, dtype):
    for form in expert_calls.forms():
        with reference.poisoned_memory(device):
            made = expert_calls.drawn(5, 2, 3, (20, 12, 17), dtype=dtype, device=device, biases=True, **form)
            expert_calls.check(forced, "triton", made, **form)


EXPERTS = [(1, 1, 1, (1, 1, 1)), (0, 2, 3, (8, 8, 8)), (2, 2, 3, (4, 0, 6)), (40, 2, 3, (70, 34, 130))]


@pytest.mark.parametrize("case", EXPERTS, ids=str)
def expert_calls_of_any_shape(forced, device, case):
    expert_calls.check(forced, "triton", expert_calls.drawn(*case, dtype=torch.half, device=device))


@pytest.mark.parametrize("routing", expert_calls.ROUTINGS)
def expert_calls_of_any_routing(forced, device, routing):
    made = expert_calls.drawn(30, 3, 8, (8, 8, 8), device=device)
    expert_calls.ROUTINGS[routing](made["top_k_index"], 8)
    made["top_k_weights"] = torch.rand(30, 3, device=device)
    expert_calls.check(forced, "triton", made)


def test_many_experts(forced, device):
    expert_calls.check(forced, "triton", expert_calls.drawn(5, 2, 130, (3, 2, 3), device=device))


def expert_calls_as_an_op(forced, device):
    ops = importlib.import_module(f"{forced.__name__}._ops").ops
    sample = (
        *expert_calls.drawn(2, 2, 2, (3, 4, 5), device=device, biases=True).values(),
        4,
        True,
        False,
        False,
        0.5,
        1.0,
    )
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(ops.triton_experts_mlp.default, sample, test_utils=tests)
    assert torch.equal(ops.triton_experts_mlp(*sample), ops.triton_experts_mlp(*sample))


# Ways to call


@functions
def test_compiled(forced, device, function):
    torch.compiler.reset()
    made = operands(function, device=device)
    call = getattr(forced, function)
    compiled = torch.compile(lambda operands: call(**operands), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(made), call(**made))


@pytest.mark.parametrize("op", ["act_and_mul", "act_and_mul_backward", "linear", "gated_linear"])
def test_opcheck(forced, device, op):
    made = [*operands(op.removesuffix("_backward"), (3, 5), (16, 24, 8), device=device).values(), 2]
    if op == "act_and_mul_backward":
        made.insert(0, torch.randn_like(made[0]))
    ops = importlib.import_module(f"{forced.__name__}._ops").ops
    # No test_autograd_registration: functional.py, not the ops, provides autograd.
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(getattr(ops, f"triton_{op}").default, tuple(made), test_utils=tests)


@pytest.mark.filterwarnings("ignore:.*batching rule")
def test_vmap(forced, device):
    """torch.func transforms compute in torch's operations, whatever backend is forced."""
    gate, up = torch.randn(2, 3, 4, 5, device=device)
    torch.testing.assert_close(torch.vmap(forced.act_and_mul)(gate, up), forced.act_and_mul(gate, up))


# Launch parameters


@pytest.fixture
def tuned(backend, monkeypatch, tmp_path):
    """Writes a file of tuned parameters, and makes the backend read only such files."""
    configs = backend("configs")
    monkeypatch.setattr(configs, "DIRECTORY", tmp_path)

    def write(name, content):
        (tmp_path / name).write_text(json.dumps(content))
        forget()

    def forget():
        configs.launch_config.cache_clear()
        configs._tuned_configs.cache_clear()

    forget()
    yield write
    forget()


def test_nearest_tuned_rows(backend, tuned):
    configs = backend("configs")
    gpu = configs.Gpu("NVIDIA H100 80GB HBM3", 90, 227 * 1024, 132)
    tuned("linear,N=96,K=64,device_name=NVIDIA_H100_80GB_HBM3.json", {"16": {"BLOCK_M": 16}, "1024": {"BLOCK_M": 128}})

    def block_m(M, op="linear", N=96, gpu=gpu, element_size=2, wide=True):
        return configs.launch_config(op, M, N, 64, element_size, wide, gpu)["BLOCK_M"]

    assert [block_m(M) for M in (1, 16, 127, 129, 1024, 10**6)] == [16, 16, 16, 128, 128, 128]
    for other in ({"op": "gated_linear"}, {"N": 97}, {"gpu": gpu._replace(name="NVIDIA H200")}, {"element_size": 4}):
        arguments = {"op": "linear", "N": 96, "gpu": gpu, "element_size": 2} | other
        expected = configs.default_config(M=64, wide=True, **arguments)
        assert configs.launch_config(M=64, K=64, wide=True, **arguments) == expected
    assert block_m(1024, wide=False) == configs.default_config("linear", 1024, 96, 2, False, gpu)["BLOCK_M"]


def test_tuned_parameters_are_used(forced, backend, tuned, device, monkeypatch):
    configs, gemm = backend("configs"), backend("gemm")
    gpu = configs.INTERPRETER if INTERPRETED else configs.gpu(torch.device("cuda", torch.cuda.current_device()))
    config = configs.default_config("gated_linear", 70, 96, 2, True, gpu) | {"BLOCK_M": 32, "BLOCK_N": 16}
    tuned(configs.file_name("gated_linear", 96, 64, gpu.name), {"64": config})
    used = []
    launch = gemm.launch
    monkeypatch.setattr(gemm, "launch", lambda *arguments: used.append(arguments[-1]) or launch(*arguments))
    check(forced, "gated_linear", operands("gated_linear", (70,), (64, 96, 8), dtype=torch.float16, device=device))
    assert used == [config]


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("op", ["linear", "gated_linear"])
def test_default_parameters_fit_any_gpu(backend, op, wide):
    configs = backend("configs")
    for capability, shared_memory in ((80, 163), (86, 99), (90, 227), (100, 227), (120, 99)):
        gpu = configs.Gpu("", capability, shared_memory * 1024, 100)
        for M in (1, 17, 64, 100, 5000):
            for N in (1, 100, 3072, 100_000):
                for element_size in (2, 4):
                    config = configs.default_config(op, M, N, element_size, wide, gpu)
                    weights = 2 if op == "gated_linear" else 1
                    stage = (config["BLOCK_M"] + weights * config["BLOCK_N"]) * config["BLOCK_K"] * element_size
                    assert config["num_stages"] >= 2
                    assert config["num_stages"] * stage < gpu.shared_memory
                    assert config["BLOCK_K"] >= 16


def test_shipped_parameters(backend):
    configs = backend("configs")
    for path in sorted(configs.DIRECTORY.glob("*")):
        assert re.fullmatch(r"(gated_)?linear,N=\d+,K=\d+,device_name=\S+\.json", path.name)
        for M, config in json.loads(path.read_text()).items():
            default = configs.default_config("linear", int(M), 100, 2, True, configs.INTERPRETER)
            assert config.keys() == default.keys(), path.name


@on_a_gpu
def test_shipped_parameters_compute(forced, backend, device):
    configs = backend("configs")
    gpu = configs.gpu(torch.device("cuda", torch.cuda.current_device()))
    for path in configs.DIRECTORY.glob("*"):
        op, N, K = re.match(r"(\w+),N=(\d+),K=(\d+),", path.name).groups()
        if path.name == configs.file_name(op, int(N), int(K), gpu.name):
            for M in json.loads(path.read_text()):
                check(forced, op, operands(op, (int(M),), (int(K), int(N), 1), dtype=torch.bfloat16, device=device))


# Refusals


def test_refuses_other_dtypes(forced, device):
    with pytest.raises(ValueError, match="no Triton kernel"):
        forced.linear(*(torch.randn(4, 3, device=device).double() for _ in range(2)))


@pytest.mark.skipif(not INTERPRETED, reason="about the interpreter")
def test_refuses_bfloat16_in_the_interpreter(forced):
    with pytest.raises(ValueError, match="interpreter gives wrong results in bfloat16"):
        forced.act_and_mul(*torch.randn(2, 4, 3).bfloat16())
