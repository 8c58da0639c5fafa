"""`check` tells what is chosen, and `benchmark` compares in turns and leaves a model unchanged."""

import subprocess
import sys
from collections import UserDict
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import machine
import modules
import project


def part_of(fused_mlp, place):
    return sys.modules[f"{fused_mlp.__name__}.{place}"]


# check


def test_the_screen(fused_mlp):
    found = fused_mlp.check()
    lines = str(found).splitlines()
    assert len(lines) <= 30 and max(map(len, lines)) <= 100
    assert found.variant in {path.name for path in machine.variants()} and found.variant in lines[0]
    assert torch.__version__ in lines[1]
    html = found._repr_html_()
    for product, by_dtype in found.products.items():
        assert any(line.startswith(product) for line in lines) and product.replace(">", "&gt;") in html
        assert list(by_dtype) == ["bfloat16", "float16", "float32"]
    for words in found.advice:
        assert f"- {words}" in lines


def kind_at(words, rows):
    """Returns a cell's kind of kernel for a number of rows."""
    for part in words.split(", "):
        kind, _, end = part.partition(" ")
        if not end.startswith("to ") or rows <= int(end.removeprefix("to ")):
            return kind
    raise AssertionError(words)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_it_says_what_explain_says(fused_mlp, device, dtype):
    cell = fused_mlp.check().products["gate and up"][str(dtype).removeprefix("torch.")]
    weight = torch.empty(4096, 1024, dtype=dtype, device=device)
    for rows in (1, 4, 64, 4096):
        x = torch.empty(rows, 1024, dtype=dtype, device=device)
        explanation = fused_mlp.explain(fused_mlp.gated_linear, x, weight, weight)
        kind = kind_at(cell, rows)
        assert (kind == "GEMM") == any(part.fused for part in explanation.parts), (cell, rows)
        assert kind != "torch" or not explanation.parts or explanation.parts[0].pointwise in (None, "epilogue")


def test_thresholds_are_those_of_dispatch(fused_mlp, monkeypatch):
    product = "act(gate) * up"
    assert fused_mlp.check().products[product]["float32"] == "pointwise"
    monkeypatch.setitem(part_of(fused_mlp, "dispatch").LEAST_PRODUCT, torch.float32, 64 * 4096)
    assert fused_mlp.check().products[product]["float32"] == "torch to 32, pointwise above"


def test_nothing_is_ours_where_torch_is_forced(fused_mlp):
    with fused_mlp.backend("torch"):
        found = fused_mlp.check()
    assert {cell for by_dtype in found.products.values() for cell in by_dtype.values()} == {"torch"}
    assert found.kernels == ()


@pytest.mark.parametrize(
    ("built_for", "gpu", "advice"),
    [
        ("cpu", True, 'get_kernel(..., backend="cuda")'),
        ("cuda", False, 'get_kernel(..., backend="cpu")'),
        (None, False, 'backend("triton")'),
    ],
)
def test_advice_for_the_wrong_build(fused_mlp, monkeypatch, built_for, gpu, advice):
    check = part_of(fused_mlp, "diagnostics.check")
    assert not any(advice in each for each in fused_mlp.check().advice)
    monkeypatch.setattr(check, "native", SimpleNamespace(DEVICE_TYPE=built_for))
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    assert any(advice in each for each in check._advice("cpu", fused_mlp.check().products))


def test_advice_for_capped_instructions(fused_mlp, monkeypatch):
    monkeypatch.setattr(part_of(fused_mlp, "diagnostics.check"), "native", SimpleNamespace(DEVICE_TYPE="cpu"))
    monkeypatch.setenv("FUSED_MLP_CPU_ISA", "avx2")
    found = part_of(fused_mlp, "diagnostics.check")._advice("cpu", {})
    assert "unset FUSED_MLP_CPU_ISA, which limits the kernels to avx2" in found


def test_gpus_in_words(fused_mlp, monkeypatch):
    """GPUs of NVIDIA, AMD and Intel are named as torch describes them."""
    gpu = part_of(fused_mlp, "diagnostics.machine").gpu
    found = SimpleNamespace(name="NVIDIA H100 80GB HBM3", major=9, minor=0, total_memory=80 * 2**30)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: found)
    assert gpu() == "NVIDIA H100 80GB HBM3, compute capability 9.0, 80 GiB"
    found.name, found.gcnArchName = "AMD Instinct MI300X", "gfx942"
    assert gpu() == "AMD Instinct MI300X, gfx942, 80 GiB"
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.xpu.get_device_name", lambda: "Intel Arc B580")
    assert gpu() == "Intel Arc B580"


# benchmark


class Model(nn.Module):
    """Returns a mapping of more than tensors, as models do, and records if its MLP is fused at each call."""

    def __init__(self):
        super().__init__()
        self.mlp, self.seen, self.fails_after = modules.Plain(), [], None

    def forward(self, x, scale=1.0):
        self.seen.append("forward" in vars(self.mlp))
        if self.fails_after is not None and len(self.seen) > self.fails_after:
            raise RuntimeError("out of memory")
        return {"logits": self.mlp(x) * scale, "cache": object(), "parts": (torch.ones(3, dtype=torch.int64),)}


@pytest.fixture
def clock(fused_mlp, monkeypatch):
    """Replaces timing: a call takes `per_call` seconds."""
    timing = part_of(fused_mlp, "diagnostics.timing")
    found = SimpleNamespace(per_call=lambda: 1e-3)

    def times(run, iterations):
        spent = 0.0
        for _ in range(iterations):
            run()
            spent += found.per_call()
        return spent / iterations * 1e6

    monkeypatch.setattr(timing, "wall_microseconds", times)
    return found


@pytest.fixture
def model(device):
    return Model().to(device).eval()


@pytest.fixture
def x(device):
    return torch.randn(4, 32, device=device)


def test_it_compares_and_prints(fused_mlp, model, x, clock):
    clock.per_call = lambda: 1e-3 if model.seen[-1] else 2e-3
    found = fused_mlp.benchmark(model, x, seconds=0.05)
    assert (found.speedup, found.spread, found.verdict) == (2.0, 0.0, "faster")
    assert (found.original.milliseconds, found.fused.milliseconds) == pytest.approx((2.0, 1.0))
    assert (found.original.peak_bytes is None) == (x.device.type == "cpu")
    expected = model.mlp(x)
    assert found.largest_value == pytest.approx(expected.abs().max().item(), rel=1e-3)
    assert found.largest_difference <= 1e-4
    assert "1 of 1 MLP runs in one call" in str(found) and "speed-up 2.00x: faster" in str(found)
    assert max(map(len, str(found).splitlines())) <= 100
    assert "speed-up 2.00x: faster" in found._repr_html_()


def test_turns_alternate(fused_mlp, model, x, clock):
    """Each round has a turn of both in either order; the call after each switch is not timed."""
    timed = []
    clock.per_call = lambda: timed.append(model.seen[-1]) or 1e-3
    fused_mlp.benchmark(model, x, seconds=30e-3)  # fifteen rounds of two turns, a call each
    turns = timed[2:]  # the first two tell how many calls fit
    assert [sorted(turns[at : at + 2]) for at in range(0, 30, 2)] == [[False, True]] * 15
    assert len(turns) == 30


def test_noise_is_no_verdict(fused_mlp, model, x, clock):
    calls = iter(range(10**6))
    clock.per_call = lambda: 1e-3 * (1 if model.seen[-1] else 2) * (1.2 if next(calls) % 2 == 0 else 1)
    found = fused_mlp.benchmark(model, x, seconds=30e-3)
    assert found.spread > 0.15 and found.verdict == "too noisy to tell"
    assert "too noisy to tell" in str(found) and "speed-up" not in str(found)


def test_a_few_turns_that_something_interrupts_change_no_verdict(fused_mlp, model, x, clock):
    calls = iter(range(10**6))
    clock.per_call = lambda: 1e-3 * (1 if model.seen[-1] else 2) * (50 if next(calls) in (7, 20) else 1)
    found = fused_mlp.benchmark(model, x, seconds=30e-3)
    assert (found.speedup, found.spread, found.verdict) == (2.0, 0.0, "faster")


@pytest.mark.parametrize(
    ("given", "scale"),
    [
        (lambda x: x, 1),
        (lambda x: (x, 2), 2),
        (lambda x: {"x": x, "scale": 2}, 2),
        (lambda x: UserDict(x=x), 1),  # like a tokenizer's BatchEncoding
    ],
    ids=["tensor", "tuple", "dict", "UserDict"],
)
def test_inputs(fused_mlp, model, x, clock, given, scale):
    found = fused_mlp.benchmark(model, given(x), seconds=0.01)
    assert found.largest_value == pytest.approx(scale * model.mlp(x).abs().max().item(), rel=1e-3)


@pytest.mark.parametrize("fused_before", [False, True])
@pytest.mark.parametrize("fails_after", [None, 0, 1, 4, 9])
def test_the_model_is_as_it_was(fused_mlp, model, x, clock, fused_before, fails_after):
    """benchmark restores the model's methods, parameters and gradients, even if a call raises."""
    if fused_before:
        report = fused_mlp.fuse_mlps(model, memory="recompute")
    model.mlp.fc1.weight.grad = torch.ones_like(model.mlp.fc1.weight)
    before = [dict(vars(module)) for module in model.modules()]
    weights = {name: parameter.clone() for name, parameter in model.named_parameters()}
    model.fails_after = before[0]["fails_after"] = fails_after
    if fails_after is None:
        assert fused_mlp.benchmark(model, x, seconds=0.01).verdict == "even"
    else:
        with pytest.raises(RuntimeError, match="out of memory"):
            fused_mlp.benchmark(model, x, seconds=0.01)
    assert [vars(module) for module in model.modules()] == before
    assert all(torch.equal(parameter, weights[name]) for name, parameter in model.named_parameters())
    assert model.mlp.fc1.weight.grad.eq(1).all() and model.mlp.fc2.weight.grad is None
    if fused_before:
        report.restore()
    assert not fused_mlp.is_fused(model.mlp)


def test_compiled_models_are_not_compiled_anew(fused_mlp, x, clock):
    """Compiled models are compiled once each way, since both keep their methods from turn to turn."""
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    mlp = modules.Plain().to(x.device).eval()
    torch._dynamo.reset()
    fused_mlp.benchmark(torch.compile(mlp, backend=backend), x, seconds=0.01)
    assert len(compiled) == 2
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (lambda model, x: (len, x), TypeError, "model must be a torch.nn.Module, got builtin_function_or_method"),
        (lambda model, x: (model, [x]), TypeError, "inputs must be a tensor, a tuple or a mapping, got list"),
        (lambda model, x: (model.train(), x), ValueError, "model must be in eval mode, got one in training mode"),
        (lambda model, x: (nn.Linear(32, 32).to(x.device).eval(), x), ValueError, "nothing in model can be fused here"),
    ],
)
def test_what_is_refused(fused_mlp, model, x, given, error, words):
    with pytest.raises(error, match=words):
        fused_mlp.benchmark(*given(model, x))
    with pytest.raises(ValueError, match="seconds must be positive, got 0"):
        fused_mlp.benchmark(model.eval(), x, seconds=0)


def test_an_output_without_tensors(fused_mlp, model, x):
    class Silent(Model):
        def forward(self, x):
            self.mlp(x)

    with pytest.raises(TypeError, match="output of model must hold floating-point tensors to compare, got NoneType"):
        fused_mlp.benchmark(Silent().to(x.device).eval(), x, seconds=0.01)


def test_the_demo():
    """The demo runs both parts in order from any folder."""
    command = [sys.executable, project.ROOT / "examples/demo.py", "--seconds", "0.01"]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "To try:" in done.stdout and done.stdout.count("largest difference") == 2
    assert "BertModel" in done.stdout and "GemmaForCausalLM, bfloat16" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100
