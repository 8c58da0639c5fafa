"""torch.compile, autocast, export, and torch's own checks of the ops."""

import copy
import importlib

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._inductor import config as inductor

import machine
import reference
from modules import Gated
from reference import FUNCTIONS, assert_no_worse_than_eager, operands
from safety import assert_close, fuse

functions = pytest.mark.parametrize("function", FUNCTIONS)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()


def call(fused_mlp, function, activation="gelu_pytorch_tanh"):
    return lambda operands: getattr(fused_mlp, function)(**operands, activation=activation)


def results(function, made, grad=None):
    """Returns function(made), and with `grad` the gradients of all operands."""
    if grad is None:
        with torch.no_grad():
            return [function(made)]
    leaves = {name: operand.clone().requires_grad_() for name, operand in made.items()}
    result = function(leaves)
    return [result.detach(), *torch.autograd.grad(result, leaves.values(), grad)]


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@functions
def test_fullgraph(fused_mlp, device, implementation, function, training):
    """AOTAutograd compiles one graph with bitwise the results of the uncompiled call."""
    made = operands(function, device=device)
    grad = torch.randn_like(reference.eager(function, made, None)) if training else None
    with fused_mlp.backend(implementation):
        compiled = torch.compile(call(fused_mlp, function), fullgraph=True, backend="aot_eager")
        got = results(compiled, made, grad)
        expected = results(call(fused_mlp, function), made, grad)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("function", "dtype", "training"),
    [
        ("act_and_mul", torch.float32, True),
        ("act_and_mul", torch.bfloat16, False),
        ("gated_mlp", torch.float32, False),
        ("gated_mlp", torch.bfloat16, True),
        ("mlp", torch.float32, True),
        ("mlp", torch.bfloat16, False),
    ],
)
def test_inductor(fused_mlp, device, implementation, function, dtype, training):
    """The default compiler fuses operations around the call. The cases pair any two values of two parameters."""

    def model(call):
        def run(operands):
            first = next(iter(operands))
            return 3 * call(operands | {first: operands[first] * 2}) + 1

        return run

    made = operands(function, dtype=dtype, device=device)
    grad = torch.randn_like(reference.eager(function, made, None)) if training else None
    with fused_mlp.backend(implementation):
        compiled = torch.compile(model(call(fused_mlp, function)), fullgraph=True)
        got = results(compiled, made, grad)
    of_eager = results(model(lambda made: reference.eager(function, made, "gelu_pytorch_tanh")), made, grad)
    wide = {name: operand.double() for name, operand in made.items()}
    of_exact = results(
        model(lambda made: reference.exact(function, made, "gelu_pytorch_tanh")),
        wide,
        grad if grad is None else grad.double(),
    )
    for one, eager, exact in zip(got, of_eager, of_exact, strict=True):
        assert_no_worse_than_eager(one, eager, exact, roundings=16)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_modes_of_the_compiler_in_training(fused_mlp, device, mode, autocast):
    """Whole graphs, in CUDA graphs too, with the ops of both directions in them, and then with dynamic shapes."""
    if device.type == "cpu":
        pytest.skip("no GPU: the modes are about CUDA graphs and GEMMs of a GPU")
    model = nn.Sequential(*(Gated(sizes=(256, 512, 256)) for _ in range(2))).to(device)
    model = model if autocast else model.bfloat16()
    fused = fuse(fused_mlp, "fuse_mlps", copy.deepcopy(model))
    compiled = torch.compile(fused, fullgraph=True, mode=mode)

    def step(each, x):
        torch.compiler.cudagraph_mark_step_begin()
        each.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            loss = each(x).float().square().mean()
        loss.backward()
        return [loss.detach().clone(), *(parameter.grad.clone() for parameter in model_of[each].parameters())]

    model_of = {model: model, compiled: fused}
    only_torch = inductor.patch(max_autotune_gemm_backends="ATEN")  # Triton's GEMMs take minutes to tune
    with torch.profiler.profile() as profile, only_torch:
        for rows in (512, 512, 512, 640):
            x = torch.randn(rows, 256, device=device, dtype=next(model.parameters()).dtype)
            assert_close(step(compiled, x), step(model, x), tolerance=3e-2)
    called = {event.key for event in profile.key_averages() if "fused_mlp" in event.key}
    assert any("forward" in name for name in called) and any("backward" in name for name in called), called


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@functions
def test_other_row_counts_do_not_recompile(fused_mlp, device, implementation, function, training):
    counter = CompileCounter()
    with fused_mlp.backend(implementation):
        compiled = torch.compile(call(fused_mlp, function), fullgraph=True, backend=counter, dynamic=True)
        for rows in (5, 16, 33, 2):
            made = operands(function, (rows, 3), device=device)
            grad = torch.randn_like(reference.eager(function, made, None)) if training else None
            expected = results(call(fused_mlp, function), made, grad)
            for one, other in zip(results(compiled, made, grad), expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert counter.frame_count == 1


@functions
def test_a_dimension_marked_dynamic(fused_mlp, device, function):
    """A dynamic dimension stays dynamic: mark_dynamic raises if it becomes a constant."""
    counter = CompileCounter()
    compiled = torch.compile(call(fused_mlp, function), fullgraph=True, backend=counter)
    for rows in (7, 12):
        made = operands(function, (rows,), device=device)
        for name in ("x", "gate", "up"):
            if name in made:
                torch._dynamo.mark_dynamic(made[name], 0)
        compiled(made)
    assert counter.frame_count == 1


def test_a_compiled_function_honours_backend(fused_mlp, device):
    """A compiled function guards on the forced implementation, in both directions."""
    made = operands("gated_mlp", device=device)
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    def native(graph):
        return any("fused_mlp" in str(node.target) for node in graph.graph.nodes)

    with torch.no_grad():
        compiled = torch.compile(call(fused_mlp, "gated_mlp"), fullgraph=True, backend=keep)
        compiled(made)
        with fused_mlp.backend("torch"):
            compiled(made)
        compiled(made)
        with fused_mlp.backend("torch"):
            compiled(made)
    assert [native(graph) for graph in graphs] == [True, False]
    other = "cpu" if device.type == "cuda" else "cuda"
    with fused_mlp.backend(other), pytest.raises(Exception, match=f"'{other}' is forced"), torch.no_grad():
        compiled(made)


def test_backend_inside_a_compiled_function(fused_mlp, device):
    made = operands("mlp", device=device)

    @torch.compile(fullgraph=True, backend="eager")
    def both(made):
        with fused_mlp.backend("torch"):
            first = fused_mlp.mlp(**made)
        return first, fused_mlp.mlp(**made)

    with torch.no_grad():
        first, second = both(made)
        assert torch.equal(first, reference.eager("mlp", made, "gelu_pytorch_tanh"))
        assert torch.equal(second, fused_mlp.mlp(**made))
    assert fused_mlp.explain(fused_mlp.mlp, **made).implementation == device.type


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@functions
def test_autocast(fused_mlp, device, function, training, compiled):
    """Under autocast, results and gradients have the eager sequence's dtypes and at most its error."""
    made = operands(function, device=device)

    def autocast(call):
        def run(operands):
            with torch.autocast(device.type, dtype=torch.bfloat16):
                return call(operands)

        return run

    run = autocast(call(fused_mlp, function))
    if compiled:
        run = torch.compile(run, fullgraph=True, backend="aot_eager")
    eager = autocast(lambda made: reference.eager(function, made, "gelu_pytorch_tanh"))
    result = eager(made)
    grad = torch.randn_like(result) if training else None
    wide = {name: operand.double() for name, operand in made.items()}
    of_exact = results(
        lambda made: reference.exact(function, made, "gelu_pytorch_tanh"), wide, grad.double() if training else None
    )
    for one, other, exact in zip(results(run, made, grad), results(eager, made, grad), of_exact, strict=True):
        assert_no_worse_than_eager(one, other, exact, roundings=4, dtype=torch.bfloat16)


@pytest.mark.parametrize("function", [name for name in FUNCTIONS if name != "act_and_mul"])
def test_autocast_of_16_bit_operands_is_one_op(fused_mlp, device, function):
    """Autocast of 16-bit operands, which has nothing to cast, costs nothing."""
    made = operands(function, dtype=torch.bfloat16, device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert fused_mlp.explain(getattr(fused_mlp, function), **made).implementation == device.type
        inside = getattr(fused_mlp, function)(**made)
    assert torch.equal(inside, getattr(fused_mlp, function)(**made))


def test_autocast_mixes_dtypes_as_eager_does(fused_mlp, device):
    """A float32 input and bfloat16 weights mix under autocast as in eager."""
    made = operands("gated_mlp", device=device)
    made = {name: operand if name == "x" else operand.bfloat16() for name, operand in made.items()}
    with torch.autocast(device.type, dtype=torch.bfloat16):
        got, eager = fused_mlp.gated_mlp(**made), reference.eager("gated_mlp", made, "gelu_pytorch_tanh")
        gate, up = made["x"], made["x"].bfloat16()
        assert fused_mlp.swiglu(gate, up).dtype == (torch.nn.functional.silu(gate) * up).dtype
    assert_no_worse_than_eager(got, eager, reference.exact("gated_mlp", made, "gelu_pytorch_tanh"))


def test_autocast_switched_off_inside(fused_mlp, device):
    made = operands("mlp", device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16), torch.autocast(device.type, enabled=False):
        assert torch.equal(fused_mlp.mlp(**made), fused_mlp.mlp(**made))
        assert fused_mlp.mlp(**made).dtype == torch.float32
        assert fused_mlp.explain(fused_mlp.mlp, **made).implementation == device.type


class Block(torch.nn.Module):
    def __init__(self, fused_mlp, made):
        super().__init__()
        self.gated_mlp = fused_mlp.gated_mlp
        self.weights = torch.nn.ParameterDict({name: made[name] for name in made if name != "x"})

    def forward(self, x):
        return self.gated_mlp(x, **dict(self.weights.items()))


def test_export(fused_mlp, device):
    made = operands("gated_mlp", (6,), device=device)
    block = Block(fused_mlp, made).requires_grad_(False)
    with torch.no_grad():
        exported = torch.export.export(block, (made["x"],), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},)).module()
        x = torch.randn(9, 64, device=device)
        torch.testing.assert_close(exported(x), block(x))


@functions
def test_on_the_meta_device(fused_mlp, device, function):
    """Results and gradients on the meta device, which large models load on, have the right shapes."""
    made = operands(function, device=device)
    expected = reference.eager(function, made, "gelu_pytorch_tanh")
    meta = {name: operand.to("meta").requires_grad_() for name, operand in made.items()}
    result = call(fused_mlp, function)(meta)
    assert (result.shape, result.dtype, result.device.type) == (expected.shape, expected.dtype, "meta")
    result.sum().backward()
    assert all(operand.grad.shape == operand.shape for operand in meta.values())


@functions
def test_with_fake_tensors(fused_mlp, device, function):
    made = operands(function, device=device)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        result = call(fused_mlp, function)({name: mode.from_tensor(operand) for name, operand in made.items()})
    expected = reference.eager(function, made, "gelu_pytorch_tanh")
    assert (result.shape, result.dtype, result.device) == (expected.shape, expected.dtype, expected.device)
    assert result.is_contiguous()


def sample_inputs(op, device):
    """Returns arguments of an op: full, without biases, strided and empty."""
    codes = (2, 4)
    if op.startswith("act_and_mul"):
        count = 3 if op.endswith("backward") else 2
        dense = [torch.randn(5, 24, device=device) for _ in range(count)]
        strided = [operand.chunk(2, dim=-1)[1] for operand in dense]
        empty = [operand[:0] for operand in dense]
        return [(*operands, code) for operands in (dense, strided, empty) for code in codes]
    samples = []
    for lead in ((5,), (2, 3), (0,)):
        made = operands(op, lead, (16, 24, 8), device=device)
        samples += [(*made.values(), code) for code in codes]
    bare = [None if name.endswith("bias") else operand for name, operand in made.items()]
    return [*samples, (*bare, codes[0])]


@pytest.mark.parametrize("op", [*FUNCTIONS, "act_and_mul_backward"])
def test_opcheck(fused_mlp, device, op):
    """The registered ops pass opcheck of schema (no mutation or aliasing), fake kernel and dynamic compilation."""
    ops = importlib.import_module(f"{fused_mlp.__name__}._ops").ops
    # test_autograd_registration is left out: functional.py, not the ops, provides autograd.
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    for sample in sample_inputs(op, device):
        torch.library.opcheck(getattr(ops, op).default, sample, test_utils=tests)


@pytest.mark.parametrize("keep", [True, False], ids=["keep", "recompute"])
@pytest.mark.parametrize("up_first", [None, True], ids=["two weights", "one"])
@pytest.mark.parametrize("op", ["gated_linear", "gated_mlp"])
def test_opcheck_training(fused_mlp, device, op, up_first, keep):
    """The training ops pass the same checks and that of autograd, with one transposed weight.

    training_backward_ is left out, since it frees tensors that opcheck reads afterwards.
    """
    ops = importlib.import_module(f"{fused_mlp.__name__}._ops").ops
    for lead in ((2, 3), (0,)):
        x, gate, up, *rest = operands(op, lead, (16, 24, 8), device=device).values()
        down, *biases = rest if op == "gated_mlp" else (None, *rest, None)
        given = [x, gate, up.t().contiguous().t(), down, *biases]
        if up_first:
            given[1:3] = [torch.cat([up, gate]).t().contiguous().t(), None]
            given[4:6] = [torch.cat([biases[1], biases[0]]), None]
        given = [tensor if tensor is None else tensor.detach().requires_grad_() for tensor in given]
        torch.library.opcheck(ops.training_forward.default, (*given, 4, keep, up_first))
        needs = sum(1 << bit for bit, tensor in enumerate(given) if tensor is not None)
        with torch.no_grad():
            out, gate, up = ops.training_forward(*given, 4, keep, up_first)
            kept = (gate if keep else None, up if keep and not up_first else None)
            backward = (torch.randn_like(out), *given[:-1], *kept, 4, needs, up_first)
            torch.library.opcheck(ops.training_backward.default, backward)


@pytest.mark.skipif(machine.device_type() == "cuda", reason="GPUs have float16 kernels")
def test_cpu_ops_refuse_float16(fused_mlp):
    ops = importlib.import_module(f"{fused_mlp.__name__}._ops").ops
    half = torch.randn(4, 8).half()
    with pytest.raises(RuntimeError, match="float32 or bfloat16"):
        ops.act_and_mul(half, half, 2)
