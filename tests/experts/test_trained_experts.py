"""Training of experts by kernels and by calls that are not one op."""

import functools
import gc
import importlib
import itertools
import sys
import unittest.mock

import pytest
import torch
from torch import nn

import expert_calls
import gemm_kernels
import reference
from expert_calls import (
    CAPABILITY,
    GPT_OSS,
    OF_GPT_OSS,
    ROUTINGS,
    TWO_BYTES,
    conditioning,
    drawn,
    dtypes,
    forms,
    gradients,
    grouped,
    hopper,
    loop,
    trained_by_kernels,
)
from reference import ACTIVATIONS, FORMULAS, assert_no_worse_than_eager

architecture = expert_calls.architecture
# Experts that the kernels train: features are any multiples of 8
TRAINED = [
    (1, 1, 1, (128, 64)),
    (7, 3, 4, (128, 128)),
    (300, 3, 5, (192, 448)),
    (900, 2, 3, (320, 192)),
    (128, 4, 130, (128, 64)),
    (5, 2, 3, (8, 8)),
    (40, 2, 3, (64, 16)),
    (300, 3, 5, (200, 136)),
    (700, 2, 3, (328, 712)),
    (260, 4, 130, (136, 72)),
    (200, 3, 4, (1000, 88)),
]
PADDING = "autograd.padded_experts", "experts"

# Experts that are padded with zeros
FILLED = [(300, 3, 5, (203, 129)), (40, 2, 3, (8, 12)), (70, 2, 3, (33, 64)), (5, 1, 2, (3, 5))]


def check_trained(fused_mlp, made, activation="silu", calls=2, **form):
    """Checks that the kernels compute the gradients, no worse than eager operations, and that their bits repeat."""
    dtype, out = made["x"].dtype, made["down_weight"].shape[2 if form.get("transposed") else 1]
    grad = torch.randn(made["x"].shape[0], out, device=made["x"].device).to(dtype)
    ours = functools.partial(fused_mlp.experts_mlp, activation=activation, **form)
    with trained_by_kernels(fused_mlp) as run, reference.poisoned_memory(made["x"].device):
        got, again = (gradients(ours, made, grad) for _ in range(2))
    assert run.call_count == calls
    of_eager = gradients(functools.partial(loop, FORMULAS[activation].eager, **form), made, grad)

    def of_exact(made):
        wide = {name: value.double() if value.is_floating_point() else value for name, value in made.items()}
        return list(gradients(functools.partial(loop, FORMULAS[activation].exact, **form), wide, grad).values())

    condition = conditioning(of_exact, made)
    for index, (name, expected) in enumerate(zip(got, of_exact(made), strict=True)):
        assert torch.equal(got[name], again[name]), name
        assert got[name].stride() == made[name].stride()
        at_index = functools.partial(condition, index)
        what = f"gradient of {name}, {activation}, {form}, {[list(value.shape) for value in made.values()]}"
        assert_no_worse_than_eager(got[name], of_eager[name], expected, what, 16, dtype=dtype, conditioning=at_index)


@grouped
@pytest.mark.parametrize("dtype", TWO_BYTES, ids=str)
@pytest.mark.parametrize(("tokens", "k", "experts", "sizes"), TRAINED, ids=str)
def test_trained_shapes(fused_mlp, device, architecture, tokens, k, experts, sizes, dtype):
    made = drawn(tokens, k, experts, (*sizes, sizes[0]), dtype=dtype, device=device)
    made["top_k_weights"] = made["top_k_weights"].nan_to_num(0.3)
    made["top_k_index"][0, 0] = 0  # otherwise the loop has no gradient
    if tokens == 300:
        made["top_k_weights"] = made["top_k_weights"].to(dtype)
    check_trained(fused_mlp, made)
    explained = fused_mlp.explain(fused_mlp.experts_mlp, **made | {"x": made["x"].clone().requires_grad_()})
    assert {part.implementation for part in explained.parts} == {architecture}, explained


@grouped
@pytest.mark.parametrize("dtype", TWO_BYTES, ids=str)
@pytest.mark.parametrize("biases", [False, True], ids=["without biases", "with biases"])
@pytest.mark.parametrize("form", list(forms()), ids=str)
def test_trained_forms(fused_mlp, device, architecture, form, biases, dtype):
    """All forms train right; with limits, first-layer sums are multiples of 1/16, so no rounding crosses a limit."""
    shapes = (1, 1, 1, (128, 128)), (300, 3, 5, (192, 448)), (130, 2, 130, (320, 192)), (150, 2, 3, (72, 40))
    for tokens, k, experts, sizes in shapes:
        made = drawn(tokens, k, experts, (*sizes, sizes[0]), dtype=dtype, device=device, biases=biases, **form)
        made["top_k_weights"] = made["top_k_weights"].nan_to_num(0.3)
        made["top_k_index"][0, 0] = 0
        for name in ("x", "gate_up_weight", "gate_up_bias") if "limit" in form else ():
            if name in made:
                whole = torch.randint(-1, 2, made[name].shape, device=device)
                made[name] = (whole if name == "x" else whole / 16).to(dtype)
        check_trained(fused_mlp, made, **form)


@hopper
@pytest.mark.parametrize("form", [form for form in forms() if "limit" not in form], ids=str)
@pytest.mark.parametrize(("tokens", "k", "experts", "sizes"), FILLED, ids=str)
def test_trained_by_copies(fused_mlp, device, tokens, k, experts, sizes, form):
    made = drawn(tokens, k, experts, (*sizes, sizes[0]), dtype=torch.bfloat16, device=device, biases=True, **form)
    made["top_k_weights"] = made["top_k_weights"].nan_to_num(0.3)
    made["top_k_index"][0, 0] = 0
    check_trained(fused_mlp, made, calls=4, **form)
    leaf = {"x": made["x"].clone().requires_grad_()}
    assert "zero-padded copies" in fused_mlp.explain(fused_mlp.experts_mlp, **made | leaf, **form).reason


@pytest.mark.parametrize("form", [form for form in forms() if "limit" not in form], ids=str)
def test_padded_copies_are_contiguous(fused_mlp, form):
    """F.pad keeps the strides of a view that it takes for channels_last, which no kernel could read."""
    padded, experts = (importlib.import_module(f"{fused_mlp.__name__}.{name}") for name in PADDING)
    made = {name: operand.mT.contiguous().mT for name, operand in drawn(sizes=(33, 65, 33), **form).items()}
    layout = (form.get(name, name == "gated") for name in ("gated", "interleaved", "transposed"))
    filled = padded.filled((*made.values(), None, None), experts.Form(0, *layout, None, 0.0))
    assert all(operand.is_contiguous() for operand in filled[3:5])


@hopper
def test_gpt_oss_trained(fused_mlp, device):
    """GPT-OSS's experts train right at their width and in their dtype, with values at which the limits apply."""
    made = drawn(200, 4, 6, (2880, 2880, 2880), dtype=torch.bfloat16, device=device, biases=True, **OF_GPT_OSS)
    made["top_k_weights"] = made["top_k_weights"].nan_to_num(0.3)
    made["gate_up_bias"] *= 6
    check_trained(fused_mlp, made, "quick_gelu", **OF_GPT_OSS)


@hopper
def test_memory_of_trained_forms(fused_mlp, device):
    """The kernels keep no more and peak no higher than the composed experts."""
    made = drawn(2048, 4, 8, (512, 1024, 512), dtype=torch.bfloat16, device=device, biases=True, **OF_GPT_OSS)
    made["top_k_weights"] = made["top_k_weights"].nan_to_num(0.3)
    leaves = {name: value.requires_grad_(value.is_floating_point()) for name, value in made.items()}
    compute = functools.partial(fused_mlp.experts_mlp, activation="quick_gelu", **leaves, **OF_GPT_OSS)

    def held():
        gc.collect()  # so that nothing left by other tests is freed in between
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = compute()
        kept = torch.cuda.memory_allocated() - before
        torch.autograd.grad(result.sum(), [leaf for leaf in leaves.values() if leaf.requires_grad])
        return kept, torch.cuda.max_memory_allocated() - before

    ours = held()
    module = sys.modules[f"{fused_mlp.__name__}.autograd.experts_training"]
    with unittest.mock.patch.object(module, "refusal", return_value="none here"):
        composed = held()
    assert all(mine <= other for mine, other in zip(ours, composed, strict=True)), (ours, composed)


@hopper
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("form", [{}, OF_GPT_OSS], ids=["plain", "gpt-oss"])
def test_trained_compiled(fused_mlp, device, form, dynamic):
    """torch.compile makes one graph each way of the same ops, with the same bits."""
    torch._dynamo.reset()
    compute = torch.compile(functools.partial(fused_mlp.experts_mlp, **form), fullgraph=True, dynamic=dynamic)
    for tokens in (60, 100) if dynamic else (60,):
        made = drawn(tokens, 2, 3, (128, 192, 128), dtype=torch.bfloat16, device=device, biases=bool(form), **form)
        made["top_k_weights"] = made["top_k_weights"].nan_to_num(0.3)
        grad = torch.randn(tokens, 128, device=device).bfloat16()
        expected = gradients(functools.partial(fused_mlp.experts_mlp, **form), made, grad)
        for name, found in gradients(compute, made, grad).items():
            assert torch.equal(found, expected[name]), name


@grouped
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_trained_activations(fused_mlp, device, architecture, activation):
    for form, hidden in (({}, 64), ({"gated": False}, 128), ({"transposed": True, "interleaved": True}, 128)):
        made = drawn(150, 2, 3, (128, hidden, 128), dtype=torch.bfloat16, device=device, **form)
        made["top_k_weights"] = made["top_k_weights"].nan_to_num(0.3)
        check_trained(fused_mlp, made, activation, **form)


@grouped
@pytest.mark.parametrize("form", [{}, OF_GPT_OSS], ids=["plain", "gpt-oss"])
def test_trained_beside_what_is_not_finite(fused_mlp, device, architecture, form):
    """NaN weights of an unchosen expert are not read, even if a step of the sums ends within its neighbour."""
    made = drawn(200, 2, 5, (136, 72, 136), dtype=torch.bfloat16, device=device, biases=bool(form), **form)
    made["top_k_index"] = torch.where(made["top_k_index"] == 2, 1, made["top_k_index"])
    made["top_k_weights"] = made["top_k_weights"].nan_to_num(0.3)
    grad = torch.randn(200, 136, device=device).bfloat16()
    compute = functools.partial(fused_mlp.experts_mlp, **form)
    with trained_by_kernels(fused_mlp) as run, reference.poisoned_memory(made["x"].device):
        expected = gradients(compute, made, grad)
        for name, value in made.items():
            if ("weight" in name and value.dim() == 3) or "bias" in name:
                value[2] = torch.nan
        found = gradients(compute, made, grad)
    assert run.call_count == 2
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


@grouped
@pytest.mark.parametrize("routing", ROUTINGS)
def test_trained_routings(fused_mlp, device, architecture, routing):
    for form in ({}, OF_GPT_OSS):
        made = drawn(300, 4, 8, (128, 192, 128), dtype=torch.bfloat16, device=device, biases=bool(form), **form)
        ROUTINGS[routing](made["top_k_index"], 8)
        made["top_k_weights"] = torch.rand(300, 4, device=device)
        if routing in ("none", "far outside"):
            grad = torch.ones(300, 128, device=device).bfloat16()
            compute = functools.partial(fused_mlp.experts_mlp, **form)
            assert not any(found.any() for found in gradients(compute, made, grad).values())
        else:
            check_trained(fused_mlp, made, **form)


@hopper
@pytest.mark.parametrize("form", [{}, OF_GPT_OSS], ids=["plain", "gpt-oss"])
def test_trained_in_part(fused_mlp, device, form):
    """A gradient that is not requested is not computed, and the others are the same."""
    hidden = 128 if form else 64
    made = drawn(200, 2, 4, (128, hidden, 128), dtype=torch.bfloat16, device=device, biases=bool(form), **form)
    made["top_k_weights"] = made["top_k_weights"].nan_to_num(0.3)
    names = [name for name, value in made.items() if value.is_floating_point()]

    def found(wanted):
        leaves = {name: value.detach().clone().requires_grad_(name in wanted) for name, value in made.items()}
        with trained_by_kernels(fused_mlp) as run:
            result = fused_mlp.experts_mlp(**leaves, **form)
        assert run.call_count == 1
        return torch.autograd.grad(result.float().square().sum(), [leaves[name] for name in wanted])

    everything = dict(zip(names, found(names), strict=True))
    for count in (1, 2, 3):
        for wanted in itertools.combinations(names, count):
            assert all(torch.equal(everything[name], of) for name, of in zip(wanted, found(wanted), strict=True))


@hopper
@pytest.mark.parametrize("form", [{}, OF_GPT_OSS], ids=["plain", "gpt-oss"])
def test_trained_twice(fused_mlp, device, form):
    """Second derivatives are those of the composed experts."""
    made = drawn(20, 2, 3, (128, 128, 128), dtype=torch.bfloat16, device=device, biases=bool(form), **form)
    made["top_k_weights"] = made["top_k_weights"].nan_to_num(0.3)

    def second(function):
        x = made["x"].clone().requires_grad_()
        (first,) = torch.autograd.grad(function(**{**made, "x": x}).float().square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.float().square().sum(), x)[0]

    with trained_by_kernels(fused_mlp) as run:
        got = second(functools.partial(fused_mlp.experts_mlp, **form))
    assert run.call_count == 1
    expected = second(functools.partial(loop, FORMULAS["silu"].eager, **form))
    torch.testing.assert_close(got, expected, rtol=0.05, atol=0.05 * expected.float().abs().max().item())


# Calls that are not one op


@dtypes
def test_gradients(fused_mlp, device, dtype):
    """The gradients of x, the routing's weights, and all weights and biases are right."""
    for form in forms() if dtype == torch.float32 else ({}, {"interleaved": True, "transposed": True, **GPT_OSS}):
        made = drawn(dtype=dtype, device=device, biases=True, **form)
        made["top_k_weights"].nan_to_num_(0.3)
        grad = torch.randn(7, 33, device=device).to(dtype)
        got = gradients(functools.partial(fused_mlp.experts_mlp, activation="silu", **form), made, grad)
        of_eager = gradients(functools.partial(loop, FORMULAS["silu"].eager, **form), made, grad)
        for name, found in got.items():
            assert found.stride() == made[name].stride()

        def of_exact(made, form=form, grad=grad):
            wide = {name: value.double() if value.is_floating_point() else value for name, value in made.items()}
            return list(gradients(functools.partial(loop, FORMULAS["silu"].exact, **form), wide, grad).values())

        condition = conditioning(of_exact, made)
        for index, (name, expected) in enumerate(zip(got, of_exact(made), strict=True)):
            assert_no_worse_than_eager(
                got[name],
                of_eager[name],
                expected,
                f"gradient of {name}, {form}",
                16,
                dtype=dtype,
                conditioning=functools.partial(condition, index),
            )


def test_derivatives_of_every_order(fused_mlp, device):
    for form in ({"gated": False}, {"interleaved": True, "transposed": True, "limit": 0.7, "up_offset": 1.0}):
        made = drawn(3, 2, 3, (3, 2, 2), dtype=torch.float64, device=device, biases=True, **form)
        made["top_k_weights"] = made["top_k_weights"].nan_to_num(0.3).double()
        names = [name for name, value in made.items() if value.is_floating_point()]

        def call(*values, names=names, made=made, form=form):
            return fused_mlp.experts_mlp(**made | dict(zip(names, values, strict=True)), **form)

        leaves = [made[name].requires_grad_() for name in names]
        torch.autograd.gradcheck(call, leaves, fast_mode=True, check_forward_ad=True)
        torch.autograd.gradgradcheck(call, leaves, fast_mode=True)


def test_func_transforms(fused_mlp, device):
    made = drawn(5, device=device)
    call = lambda x: fused_mlp.experts_mlp(**made | {"x": x})  # noqa: E731
    stacked = torch.stack([made["x"], 2 * made["x"]])
    expected = torch.stack([call(x) for x in stacked])
    torch.testing.assert_close(torch.vmap(call)(stacked), expected)
    grads = torch.func.grad(lambda x: call(x).sum())(made["x"])
    leaf = made["x"].clone().requires_grad_()
    torch.testing.assert_close(grads, torch.autograd.grad(call(leaf).sum(), leaf)[0])


def test_autocast(fused_mlp, device):
    made = drawn(device=device, biases=True)
    made["top_k_weights"].nan_to_num_(0.3)
    low = {name: value.bfloat16() if name != "top_k_weights" else value for name, value in made.items()}
    low["top_k_index"] = made["top_k_index"]
    expected = fused_mlp.experts_mlp(**low)
    with torch.autocast(device.type, torch.bfloat16):
        found = fused_mlp.experts_mlp(**made)
        made["gate_up_weight"].requires_grad_()
        fused_mlp.experts_mlp(**made).sum().backward()
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)
    assert made["gate_up_weight"].grad.dtype == torch.float32


@pytest.mark.parametrize("trained", [False, True])
def test_compiled_without_breaks(fused_mlp, device, trained):
    torch.compiler.reset()
    compiled = torch.compile(
        lambda made: fused_mlp.experts_mlp(**made), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for tokens in (7, 12, 1):
        made = drawn(tokens, device=device, biases=True)
        made["top_k_weights"].nan_to_num_(0.3)
        weight = made["gate_up_weight"].requires_grad_(trained)
        expected, found = fused_mlp.experts_mlp(**made), compiled(made)
        torch.testing.assert_close(found, expected)
        if trained:
            grads = [torch.autograd.grad(result.square().sum(), weight)[0] for result in (expected, found)]
            # Sums over tokens are added in another order, and their terms are as large as the largest value even if
            # they cancel: four products of some 40 terms each differ by some 1e-6 of it.
            torch.testing.assert_close(*grads, rtol=0, atol=1e-5 * grads[0].abs().max().item())


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("form", [{}, {"limit": 0.5}, OF_GPT_OSS], ids=["plain", "limit", "gpt-oss"])
def test_rows_of_skipped_slots_are_not_read(fused_mlp, device, compiled, form, monkeypatch):
    """Rows of skipped slots, which torch's grouped product leaves unset on a GPU, reach no result or gradient."""
    composed = importlib.import_module(f"{fused_mlp.__name__}.experts")
    product, routing = composed._GroupedMm.forward, composed.routing

    def step(function, made):
        leaves = [value.detach().requires_grad_() for value in made.values() if value.is_floating_point()]
        given = iter(leaves)
        result = function(**{n: next(given) if value.is_floating_point() else value for n, value in made.items()})
        first = torch.autograd.grad(result.square().sum(), leaves, create_graph=not compiled)
        second = () if compiled else torch.autograd.grad(sum(each.square().sum() for each in first), leaves)
        return result.detach(), *first, *second

    def poisoned(rows, weight, offsets):
        result = product(rows, weight, offsets)
        numbers = torch.arange(result.shape[0], device=result.device)
        return torch.where((numbers < offsets[-1]).unsqueeze(-1), result, torch.nan)

    made = drawn(20, 2, 3, (16, 8, 12), biases=True, device=device, **form)
    made["top_k_weights"].nan_to_num_(0.3)
    expected = step(functools.partial(loop, FORMULAS["silu"].eager, **form), made)
    monkeypatch.setattr(composed._GroupedMm, "forward", staticmethod(poisoned))
    monkeypatch.setattr(composed, "routing", lambda index, experts, masked: routing(index, experts, masked=True))
    torch.compiler.reset()
    call = functools.partial(fused_mlp.experts_mlp, activation="silu", **form)
    found = step(torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call, made)
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-4 * wanted.abs().max().item())


def test_by_a_kernel_or_not_at_all(fused_mlp, device):
    """Nothing is computed if the call would be composed of parts, as under autograd."""
    calls = importlib.import_module(f"{fused_mlp.__name__}.calls")
    made = drawn(device=device)
    if device.type == "cuda":
        made = {name: each.bfloat16() if each.is_floating_point() else each for name, each in made.items()}
    given = [made.get(name) for name in (*made, "gate_up_bias", "down_bias")][:7]
    form = importlib.import_module(f"{fused_mlp.__name__}.experts").Form(4, True, False, False, None, 0.0)
    with torch.no_grad():
        found = calls.experts_by_a_kernel(*given, form)
        assert found is None or torch.equal(found, calls.experts_mlp(*given, form))
        runs = [gemm_kernels.runs_on(each, CAPABILITY) for each in gemm_kernels.ARCHITECTURES]
        assert (found is None) == (device.type == "cuda" and not any(runs))
    given[3].requires_grad_()
    assert calls.experts_by_a_kernel(*given, form) is None


@pytest.mark.parametrize("is_transposed", [False, True])
def test_the_short_way_is_not_for_many_rows_of_transposed_weights(fused_mlp, device, monkeypatch, is_transposed):
    calls = importlib.import_module(f"{fused_mlp.__name__}.calls")
    made, short = drawn(40, 2, 1, transposed=is_transposed, device=device), []
    monkeypatch.setattr(calls, "_by_op", lambda *given, **others: short.append(given))
    for many in (True, False):
        monkeypatch.setattr(calls.native, "has_many_rows", lambda *_, many=many: many)
        with torch.no_grad():
            fused_mlp.experts_mlp(**made, transposed=is_transposed)
    assert len(short) == (1 if is_transposed else 2)


class Module(nn.Module):
    def __init__(self, fused_mlp, made):
        super().__init__()
        self.call, self.rest = fused_mlp.experts_mlp, made

    def forward(self, x):
        return self.call(**self.rest | {"x": x})


def test_exported(fused_mlp, device):
    made = drawn(device=device)
    module = Module(fused_mlp, made)
    program = torch.export.export(module, (made["x"],))
    torch.testing.assert_close(program.module()(made["x"]), module(made["x"]))
    assert not any("fused_mlp" in str(node.target) for node in program.graph.nodes)


def test_ops(fused_mlp, device):
    """The ops pass torch's checks of their schemas and of the shapes from their fake kernels."""
    namespace = getattr(torch.ops, fused_mlp.__name__)
    offsets = torch.tensor([2, 2, 5], dtype=torch.int32, device=device)
    a, b = torch.randn(6, 4, device=device), torch.randn(6, 5, device=device)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        namespace.grouped_mm.default, (a, torch.randn(3, 4, 5, device=device), offsets), test_utils=tests
    )
    torch.library.opcheck(namespace.grouped_outer.default, (a, b, offsets), test_utils=tests)
    if device.type == "cpu":
        made = drawn(biases=True)
        rest = (4, True, False, False, 0.5, 1.0)
        torch.library.opcheck(namespace.experts_mlp.default, (*made.values(), *rest), test_utils=tests)
