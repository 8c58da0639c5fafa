"""backend() and explain(): forced and refused backends, and explanations that match the call."""

import importlib
import json
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import machine
import project
from reference import FUNCTIONS, operands


def implementation_of(fused_mlp, function, **options):
    made = operands(function, device=machine.device_type(), **options)
    return fused_mlp.explain(getattr(fused_mlp, function), **made).implementation


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_compiled_ops_come_first(fused_mlp, device, function):
    made = operands(function, device=device)
    explanation = fused_mlp.explain(getattr(fused_mlp, function), **made)
    assert explanation.implementation == device.type
    assert explanation.operation == function
    assert explanation.reason
    assert str(explanation) == f"{function}: {device.type} ({explanation.reason})"


def ops_called(function, operands):
    """Returns the names of this package's ops that a call reaches, as seen by the dispatcher."""

    class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            if "fused_mlp" in op.namespace:
                names.append(op._schema.name.split("::")[1])
            return op(*args, **(kwargs or {}))

    names = []
    with Recorder():
        function(**operands)
    return names


@pytest.mark.parametrize("function", FUNCTIONS)
def test_one_op_for_a_whole_call(fused_mlp, device, function):
    """Inference enters C++ once, and with backend "torch" never."""
    made = operands(function, device=device)
    call = getattr(fused_mlp, function)
    assert ops_called(call, made) == [function]
    with fused_mlp.backend(device.type):
        assert ops_called(call, made) == [function]
    with fused_mlp.backend("torch"):
        assert ops_called(call, made) == []


@pytest.mark.skipif(machine.device_type() != "cpu", reason="test_gemm.py looks at the kernels of a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("change", ["none", "column-major weight", "strided bias"])
@pytest.mark.parametrize("function", ["linear", "gated_linear", "mlp", "gated_mlp"])
def test_parts_are_what_runs_on_a_cpu(fused_mlp, function, change, dtype):
    """The explained parts match a profile, where only torch's GEMM shows. The last layer may decide for both."""
    made = operands(function, (40,), (72, 200, 64), dtype=dtype)
    if change != "none":
        name = [name for name in made if name.endswith(change.split()[1])][-1]
        strided = {"weight": lambda t: t.t().contiguous().t(), "bias": lambda t: torch.stack([t, t], -1)[:, 0]}
        made[name] = strided[change.split()[1]](made[name])
    call = getattr(fused_mlp, function)
    parts = fused_mlp.explain(call, **made).parts
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call(**made)
    beneath = {event.name for event in profile.events() if not event.name.endswith(f"::{function}")}
    copies = {"aten::contiguous", "aten::clone", "aten::empty_like", "aten::empty_strided", "aten::copy_"}
    by_torch = not beneath <= {"aten::empty", "aten::new_empty", *copies}
    assert [part.fused for part in parts] == [not by_torch] * (2 if function.endswith("mlp") else 1)
    assert [part.refusal is None for part in parts] == [part.fused for part in parts]


@pytest.mark.skipif(machine.device_type() != "cpu", reason="test_training_gemms.py looks at the kernels of a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [31, 64])
@pytest.mark.parametrize("function", ["gated_linear", "mlp", "gated_mlp"])
def test_products_of_training_on_a_cpu(fused_mlp, function, rows, dtype):
    """Training uses the backend of inference, except for bfloat16 backward products of few rows."""
    made = operands(function, (rows,), (72, 200, 64), dtype=dtype)
    call = getattr(fused_mlp, function)
    inference = fused_mlp.explain(call, **made).parts[0]
    has_tiles = inference.implementation == "amx"
    (kept,) = fused_mlp.explain(call, **{name: tensor.requires_grad_() for name, tensor in made.items()}).parts
    products = ["fc1" if function == "mlp" else "gate and up"]
    leaves = rows < 32 and inference.implementation in ("amx", "avx512_bf16")
    products += [] if leaves else ["backward GEMMs"]
    assert [part.layer for part in kept.gemms] == (products if inference.fused else [])
    assert ("on AMX tiles" in str(kept)) == has_tiles


def codes_in(header, array):
    text = (project.ROOT / header).read_text()
    return re.findall(r'"(\w+)"', re.search(rf"{array}\[\] = \{{(.*?)\}};", text, re.DOTALL)[1])


def test_every_record_has_words(fused_mlp):
    """Python has words for every record that C++ may write."""
    plans = importlib.import_module(f"{fused_mlp.__name__}.backends.plans")
    none, *refusals = codes_in("torch-ext/ops/plan.h", "kRefusalCodes")
    records = [{"implementation": "torch", "refusal": refusal, "pointwise": "cuda"} for refusal in refusals]
    kernel = {"implementation": "sm90", "block_m": 128, "block_n": 192, "split_k": 2}
    records += [{**kernel, "kernel": "streamed", "schedule": "swapped"}]
    records += [{"implementation": isa} for isa in ("amx", "avx512_bf16", "avx512", "avx2")]
    for schedule in codes_in("cuda/gemm/problem.h", "kNames"):
        records.append({**kernel, "kernel": "tiled", "schedule": schedule})
    records.append({**kernel, "implementation": "sm80", "kernel": "tiled", "schedule": "cooperative", "basis": "model"})
    parts = plans.parsed(json.dumps(records), [f"layer {i}" for i in range(len(records))])
    assert [part.fused for part in parts] == ["refusal" not in record for record in records]
    words = plans.in_words(parts)
    assert none == "none" and all(plans.REFUSALS[refusal] in words for refusal in refusals)
    assert "128 x 192, split-k 2" in words and f"; layer 1: {parts[1]}; " in words
    assert words.endswith("all warps share each tile; chosen by a performance model of this GPU, not a measurement")


@pytest.mark.skipif(machine.device_type() != "cpu", reason="a GPU trains a layer alone by its parts")
def test_one_layer_in_training_on_a_cpu(fused_mlp):
    """A layer in training is an op unless eager keeps only the activation's result or has none, and explain says so."""
    made = operands("linear", (5,), (8, 48, 8))
    made["x"].requires_grad_()
    for activation in ("gelu", "silu", "relu", None):
        called, implementation = (
            (["graph_training_forward"], "cpu") if activation in ("gelu", "silu") else ([], "torch")
        )
        given = made | {"activation": activation}
        assert ops_called(fused_mlp.linear, given) == called
        assert fused_mlp.explain(fused_mlp.linear, **given).implementation == implementation


@pytest.mark.parametrize("memory", ["activations", "recompute"])
@pytest.mark.parametrize("function", ["gated_linear", "gated_mlp", "mlp"])
def test_one_op_forward_and_one_backward(fused_mlp, device, function, memory):
    """Autograd records one op, and explain tells this and the kept tensors; torch.func transforms use the parts."""
    made = operands(function, (2, 32), (8, 256, 8), device=device)
    made["x"].requires_grad_()
    call = getattr(fused_mlp, function)
    assert ops_called(call, made | {"memory": memory}) == ["graph_training_forward"]
    result = call(**made, memory=memory)
    assert ops_called(result.sum().backward, {}) == ["training_backward"]
    explanation = fused_mlp.explain(call, **made, memory=memory)
    assert explanation.implementation == device.type and "one op forward and one backward" in explanation.reason
    (kept,) = explanation.parts
    names = ("fc1",) if function == "mlp" else ("gate", "up")
    assert (kept.names, kept.bytes) == ((names, len(names) * 2 * 32 * 256 * 4) if memory == "activations" else ((), 0))
    with torch.no_grad():
        assert ops_called(call, made) == [function]
    with fused_mlp.backend("torch"):
        assert ops_called(call, made | {"memory": memory}) == []
        reason = fused_mlp.explain(call, **made, memory=memory).reason
        assert ("reruns the separate operations" in reason) == (memory == "recompute")
    torch.func.grad(lambda x: call(**made | {"x": x}).sum())(made["x"].detach())


@pytest.mark.parametrize("function", ["gated_linear", "gated_mlp", "mlp"])
def test_a_choice_of_memory_that_does_not_exist(fused_mlp, device, function):
    made = operands(function, device=device)
    for call in (
        getattr(fused_mlp, function),
        lambda **given: fused_mlp.explain(getattr(fused_mlp, function), **given),
    ):
        with pytest.raises(ValueError, match="memory must be one of 'activations', 'recompute', got 'less'"):
            call(**made, memory="less")


def test_under_autograd_a_product_is_fused(fused_mlp, device):
    made = operands("act_and_mul", (8, 128), (8, 256, 8), device=device)  # gate and up have 2^18 elements
    made["gate"].requires_grad_()
    assert ops_called(fused_mlp.act_and_mul, made) == ["act_and_mul"]


@pytest.mark.skipif(machine.device_type() != "cpu", reason="a rule for CPUs")
def test_a_small_product_under_autograd_is_left_to_torch(fused_mlp):
    made = operands("act_and_mul", (255,), (8, 1024, 8))  # 1024 elements fewer than 2^18
    made["gate"].requires_grad_()
    assert ops_called(fused_mlp.act_and_mul, made) == []
    explanation = fused_mlp.explain(fused_mlp.act_and_mul, **made)
    assert (explanation.implementation, "fewer than 262144" in explanation.reason) == ("torch", True)
    with fused_mlp.backend("cpu"):
        assert ops_called(fused_mlp.act_and_mul, made) == ["act_and_mul"]


def test_nesting(fused_mlp, device):
    assert implementation_of(fused_mlp, "mlp") == device.type
    with fused_mlp.backend("torch"):
        assert implementation_of(fused_mlp, "mlp") == "torch"
        with fused_mlp.backend(device.type):
            assert implementation_of(fused_mlp, "mlp") == device.type
            with fused_mlp.backend("auto"):
                assert implementation_of(fused_mlp, "mlp") == device.type
        assert implementation_of(fused_mlp, "mlp") == "torch"
    assert implementation_of(fused_mlp, "mlp") == device.type


def test_an_exception_restores_what_was(fused_mlp, device):
    with fused_mlp.backend("torch"):
        with pytest.raises(KeyError), fused_mlp.backend(device.type):
            raise KeyError
        assert implementation_of(fused_mlp, "mlp") == "torch"
    assert implementation_of(fused_mlp, "mlp") == device.type


def test_blocks_that_overlap(fused_mlp, device):
    """With overlapping blocks, as in two threads, the block entered last counts, in any order of leaving."""
    first, second, third = (fused_mlp.backend(name) for name in ("torch", device.type, "torch"))
    seen = []
    for step in (first.__enter__, second.__enter__, third.__enter__):
        step()
        seen.append(implementation_of(fused_mlp, "mlp"))
    for block in (first, third, second):
        block.__exit__(None, None, None)
        seen.append(implementation_of(fused_mlp, "mlp"))
    assert seen == ["torch", device.type, "torch", "torch", device.type, device.type]


def test_blocks_in_many_threads(fused_mlp, device):
    """No backend stays forced after blocks in many threads, in any order of entering and leaving."""

    def enter_and_leave(name):
        for _ in range(200):
            with fused_mlp.backend(name):
                pass

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(enter_and_leave, ["torch", device.type] * 4))
    assert implementation_of(fused_mlp, "mlp") == device.type
    assert fused_mlp.explain(fused_mlp.mlp, **operands("mlp", device=device)).reason != "forced by backend()"


def test_as_a_decorator(fused_mlp, device):
    @fused_mlp.backend("torch")
    def forced():
        return implementation_of(fused_mlp, "linear")

    assert [forced(), forced(), implementation_of(fused_mlp, "linear")] == ["torch", "torch", device.type]


@pytest.mark.parametrize("name", ["rocm", "", "CPU", None])
def test_a_backend_that_does_not_exist(fused_mlp, name):
    with pytest.raises(ValueError, match="backend must be one of cuda, triton, cpu, torch or auto") as raised:
        fused_mlp.backend(name).__enter__()
    assert repr(name) in str(raised.value)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_forced_backend_that_cannot(fused_mlp, device, function):
    made = operands(function, device=device)
    other = "cpu" if device.type == "cuda" else "cuda"
    with fused_mlp.backend(other):
        with pytest.raises(ValueError, match=rf"(?=.*'{other}')(?=.*{function})(?=.*{device.type} kernels)"):
            getattr(fused_mlp, function)(**made)
        with pytest.raises(ValueError, match=other):
            fused_mlp.explain(getattr(fused_mlp, function), **made)
    with fused_mlp.backend(device.type), pytest.raises(ValueError, match=r"float64"):
        getattr(fused_mlp, function)(**{name: operand.double() for name, operand in made.items()})


@pytest.mark.skipif(machine.device_type() == "cuda", reason="Triton runs here")
def test_triton_without_a_gpu(fused_mlp, device):
    with fused_mlp.backend("triton"), pytest.raises(ValueError, match="Triton kernels run on GPUs, but x is on cpu"):
        fused_mlp.gated_mlp(**operands("gated_mlp"))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_explain_computes_nothing_and_takes_what_the_function_takes(fused_mlp, device, function):
    made = operands(function, device=device)
    before = {name: operand.clone() for name, operand in made.items()}
    call = getattr(fused_mlp, function)
    assert set(ops_called(lambda **operands: fused_mlp.explain(call, **operands), made)) <= {"plan"}
    by_name = fused_mlp.explain(call, **made)
    assert fused_mlp.explain(call, *made.values()) == by_name
    assert fused_mlp.explain(call, **made, activation="silu").implementation == by_name.implementation
    assert all(torch.equal(made[name], before[name]) for name in made)


def test_explain_of_the_short_forms(fused_mlp, device):
    gate, up = operands("act_and_mul", device=device).values()
    for function in (fused_mlp.geglu, fused_mlp.swiglu):
        assert fused_mlp.explain(function, gate, up).implementation == device.type


@pytest.mark.parametrize("function", FUNCTIONS)
def test_reasons(fused_mlp, device, function):
    call = getattr(fused_mlp, function)
    made = operands(function, device=device)

    def explain(**changes):
        return fused_mlp.explain(call, **made | changes)

    wide = {name: operand.double() for name, operand in made.items()}
    assert (explain(**wide).implementation, "float64" in explain(**wide).reason) == ("torch", True)
    meta = {name: operand.to("meta") for name, operand in made.items()}
    assert (explain(**meta).implementation, "meta" in explain(**meta).reason) == ("torch", True)
    with fused_mlp.backend("torch"):
        assert explain().reason == "forced by backend()"
    if function != "act_and_mul":
        with torch.autocast(device.type, dtype=torch.bfloat16):
            assert (explain().implementation, "autocast" in explain().reason) == ("torch", True)
        subclass = next(iter(made.values())).as_subclass(Subclass)
        assert "Subclass" in explain(**{next(iter(made)): subclass}).reason


class Subclass(torch.Tensor):
    pass


def test_explain_of_something_else(fused_mlp, device):
    for target in (torch.nn.functional.linear, "gated_mlp", torch.zeros(2), fused_mlp.fuse_mlps, None):
        with pytest.raises(TypeError, match="target must be a module or a public function"):
            fused_mlp.explain(target)
    with pytest.raises(TypeError, match="missing a required argument"):
        fused_mlp.explain(fused_mlp.linear, torch.zeros(2, 3, device=device))
    with pytest.raises(TypeError, match="must be a tensor"):
        fused_mlp.explain(fused_mlp.linear, 3, 4)
    with pytest.raises(TypeError, match="no other arguments if target is a module"):
        fused_mlp.explain(torch.nn.Linear(2, 2), torch.zeros(2, 2))


def test_explain_of_a_module_that_is_not_ours(fused_mlp):
    explanation = fused_mlp.explain(torch.nn.Linear(2, 2))
    assert (explanation.operation, explanation.implementation) == ("Linear", "original")
