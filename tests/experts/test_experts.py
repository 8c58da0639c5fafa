"""experts_mlp against float64 formulas, with the error of an eager loop over the experts as the limit."""

import functools
import itertools
import random
import sys

import pytest
import torch

import gemm_kernels
import reference
from expert_calls import CAPABILITY, GPT_OSS, ROUTINGS, check, drawn, dtypes, exact, forms
from layouts import chunk, every_other_column, misaligned, transposed
from reference import ACTIVATIONS


@dtypes
def test_any_form(fused_mlp, device, implementation, dtype):
    for form, biases in itertools.product(forms(), (False, True)):
        with reference.poisoned_memory(device):
            made = drawn(dtype=dtype, device=device, biases=biases, **form)
            check(fused_mlp, implementation, made, **form)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_activations(fused_mlp, device, implementation, dtype):
    for activation, gated in itertools.product([*ACTIVATIONS, None], (True, False)):
        made = drawn(dtype=dtype, device=device, gated=gated)
        check(fused_mlp, implementation, made, activation, gated=gated)


def test_the_gate_of_gpt_oss(fused_mlp, device, implementation):
    """The gate of GPT-OSS matches the formula of its class, for large values too."""
    form = {"interleaved": True, "transposed": True, **GPT_OSS}
    made = drawn(biases=True, device=device, **form)
    made["gate_up_bias"] *= 6
    check(fused_mlp, implementation, made, "quick_gelu", **form)
    gate_up = torch.randn(9, 16, dtype=torch.float64, device=device) * 6
    gate, up = gate_up[..., ::2].clamp(max=7), gate_up[..., 1::2].clamp(-7, 7)
    expected = (up + 1) * (gate * torch.sigmoid(gate * 1.702))
    identity = torch.eye(16, dtype=torch.float64, device=device)[None]
    one = torch.zeros(9, 1, dtype=torch.int64, device=device), torch.ones(9, 1, dtype=torch.float64, device=device)
    down = torch.eye(8, dtype=torch.float64, device=device)[None]
    found = fused_mlp.experts_mlp(gate_up, *one, identity, down, activation="quick_gelu", interleaved=True, **GPT_OSS)
    torch.testing.assert_close(found, expected)


SHAPES = [
    # tokens, k, experts, (in, hidden, out)
    (1, 1, 1, (1, 1, 1)),
    (0, 2, 3, (8, 8, 8)),
    (5, 0, 3, (8, 8, 8)),
    (1, 4, 8, (257, 65, 31)),
    (33, 16, 5, (20, 7, 12)),
    (70, 2, 512, (4, 3, 5)),
    (64, 4, 64, (32, 16, 32)),
    (600, 1, 2, (64, 48, 40)),
    (5, 2, 3, (0, 4, 6)),
    (5, 2, 3, (4, 0, 6)),
    (5, 2, 3, (4, 6, 0)),
    (300, 2, 3, (3000, 40, 33)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("tokens", "k", "experts", "sizes"), SHAPES, ids=str)
def test_shapes(fused_mlp, device, implementation, tokens, k, experts, sizes, dtype):
    with reference.poisoned_memory(device):
        for form in ({}, {"transposed": True, "interleaved": True}):
            made = drawn(tokens, k, experts, sizes, dtype=dtype, device=device, **form)
            check(fused_mlp, implementation, made, **form)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_routings(fused_mlp, device, implementation, routing, dtype):
    made = drawn(50, 4, 8, dtype=dtype, device=device)
    ROUTINGS[routing](made["top_k_index"], 8)
    made["top_k_weights"] = torch.rand(50, 4, device=device)
    result = check(fused_mlp, implementation, made)
    if routing in ("none", "far outside"):
        assert not result.any()


def test_dtypes_of_the_routing(fused_mlp, device, implementation):
    made = drawn(experts=200, biases=True, device=device)  # more experts than int8 can name
    made["top_k_index"][made["top_k_index"] > 99] = -1
    expected = check(fused_mlp, implementation, made)
    for index in (torch.int32, torch.int16, torch.int8):
        other = check(fused_mlp, implementation, made | {"top_k_index": made["top_k_index"].to(index)})
        assert torch.equal(other, expected)
    for weights in (torch.float64, torch.bfloat16, torch.float16):
        check(fused_mlp, implementation, made | {"top_k_weights": made["top_k_weights"].to(weights)})


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_in_autocast(fused_mlp, device, activation, gated):
    """On a GPU autocast squares in float32, but the second product takes the dtype of its weight."""
    made = drawn(device=device)
    if not gated:
        made["gate_up_weight"] = made["gate_up_weight"][:, ::2]
    with torch.autocast(device.type, torch.bfloat16), torch.no_grad():
        result = fused_mlp.experts_mlp(**made, activation=activation, gated=gated)
    expected = exact(made, activation, {"gated": gated})
    assert (result - expected).norm() <= 0.03 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("layout", [transposed, chunk, every_other_column, misaligned])
def test_strides(fused_mlp, device, implementation, layout, dtype):
    made = drawn(20, sizes=(33, 20, 17), dtype=dtype, device=device, biases=True)
    for names in (*([name] for name in made), list(made)):
        laid_out = {name: layout(made[name]) for name in names if not made[name].isnan().any()}
        check(fused_mlp, implementation, made | laid_out)


def test_experts_of_a_larger_stack(fused_mlp, device, implementation):
    """Experts may be views into a larger stack, as each process has them with expert parallelism."""
    made = drawn(20, 4, 8, dtype=torch.bfloat16, device=device)
    part = made | {name: made[name][2:5] for name in ("gate_up_weight", "down_weight")}
    part["top_k_index"] = made["top_k_index"] - 2
    check(fused_mlp, implementation, part)


def test_leading_dimensions(fused_mlp, device):
    made = drawn(12, device=device, biases=True)
    expected = fused_mlp.experts_mlp(**made)
    for lead in ((3, 4), (2, 1, 6)):
        shaped = {name: made[name].unflatten(0, lead) for name in ("x", "top_k_index", "top_k_weights")}
        assert torch.equal(fused_mlp.experts_mlp(**made | shaped), expected.unflatten(0, lead))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_same_bits_on_every_run(fused_mlp, device, dtype):
    made = drawn(200, 6, 16, (64, 96, 64), dtype=dtype, device=device)
    first = fused_mlp.experts_mlp(**made)
    assert all(torch.equal(fused_mlp.experts_mlp(**made), first) for _ in range(5))


# Operands that do not fit

WRONG = [
    ({"x": 1.0}, TypeError, "x must be a tensor, got float"),
    ({"top_k_index": None}, TypeError, "top_k_index must be a tensor, got NoneType"),
    ({"top_k_index": torch.rand(7, 3)}, TypeError, "top_k_index must have a signed integer dtype, got torch.float32"),
    (
        {"top_k_weights": torch.ones(7, 3).long()},
        TypeError,
        "top_k_weights must have a floating-point dtype, got torch.int64",
    ),
    (
        {"top_k_weights": torch.ones(7, 2)},
        ValueError,
        r"top_k_weights must have the shape of top_k_index, \[7, 3\], got",
    ),
    ({"x": torch.ones(6, 40)}, ValueError, r"top_k_index must be \[tokens, k\] .* got \[7, 3\] and \[6, 40\]"),
    ({"x": torch.ones(7, 39)}, ValueError, r"gate_up_weight must be \[experts, out, in\] with in = 39 to fit x"),
    ({"gate_up_weight": torch.ones(4, 47, 40)}, ValueError, "gate_up_weight must be .* even out"),
    ({"gate_up_weight": torch.ones(0, 48, 40)}, ValueError, "gate_up_weight must be .* at least one expert"),
    ({"down_weight": torch.ones(5, 33, 24)}, ValueError, "down_weight must be .* experts = 4 and in = 24"),
    ({"down_weight": torch.ones(4, 33, 24).bfloat16()}, TypeError, "down_weight must have the dtype of x"),
    ({"gate_up_bias": torch.ones(4, 24)}, ValueError, r"gate_up_bias must be \[4, 48\] to fit gate_up_weight"),
    ({"down_bias": torch.ones(33)}, ValueError, r"down_bias must be \[4, 33\] to fit down_weight"),
    ({"down_bias": torch.ones(4, 33, device="meta")}, ValueError, "down_bias must be on the device of x"),
    ({"gated": False, "interleaved": True}, ValueError, "down_weight must be"),
    ({"limit": -1.0}, ValueError, "limit must be positive or None, got -1.0"),
    ({"limit": "7"}, TypeError, "limit must be a number, got str"),
    ({"up_offset": None}, TypeError, "up_offset must be a number, got NoneType"),
    ({"gate_up_weight": None, "transposed": True}, TypeError, "gate_up_weight must be a tensor, got NoneType"),
    ({"top_k_index": [0], "transposed": True}, TypeError, "top_k_index must be a tensor, got list"),
    ({"transposed": True}, ValueError, r"gate_up_weight must be \[experts, in, out\]"),
    ({"gated": 1}, TypeError, "gated must be True or False, got int"),
    ({"interleaved": "no"}, TypeError, "interleaved must be True or False, got str"),
    ({"transposed": torch.ones(2)}, TypeError, "transposed must be True or False, got Tensor"),
    ({"activation": "nothing"}, ValueError, "activation must be .* got 'nothing'"),
]


@pytest.mark.parametrize(("changes", "error", "words"), WRONG, ids=[words for *_, words in WRONG])
def test_what_does_not_fit(fused_mlp, changes, error, words):
    made = drawn() | changes
    for call in (fused_mlp.experts_mlp, functools.partial(fused_mlp.explain, fused_mlp.experts_mlp)):
        with pytest.raises(error, match=words):
            call(**made)


def test_the_op_reads_nothing_that_does_not_fit(fused_mlp, device):
    if device.type != "cpu":
        pytest.skip("only CPUs have the op")
    op = sys.modules[f"{fused_mlp.__name__}.backends.native"].experts_mlp
    made = drawn(biases=True)
    rest = (4, True, False, False, None, 0.0)
    assert op(*made.values(), *rest).shape == (7, 33)
    for name, value in made.items():
        for fault in (value[None], value[..., :-1], value[:-1], value.to("meta"), value.to(torch.complex64)):
            with pytest.raises(RuntimeError, match=r"must be|differs in|not on the device"):
                op(*(made | {name: fault}).values(), *rest)
    for code in (-1, 8):
        with pytest.raises(RuntimeError, match="activation"):
            op(*made.values(), code, *rest[1:])


# Explanations


def test_explained(fused_mlp, device):
    made = drawn(device=device)

    def explain(**changes):
        return fused_mlp.explain(fused_mlp.experts_mlp, **made | changes)

    found = explain()
    assert found.operation == "experts_mlp"
    if device.type == "cpu" or any(gemm_kernels.runs_on(each, CAPABILITY) for each in gemm_kernels.ARCHITECTURES):
        assert found.implementation == device.type
        assert [part.layer for part in found.parts] == ["gate and up", "down"]
        assert "float32" in found.reason
    else:
        assert (found.implementation, "no experts kernels" in found.reason) == ("torch", True)
    trained = explain(x=made["x"].clone().requires_grad_())
    assert trained.implementation == "torch" and trained.reason.startswith("autograd records the separate operations: ")
    assert explain(top_k_weights=torch.rand(7, 3, device=device).requires_grad_()).reason == trained.reason
    with fused_mlp.backend("torch"):
        assert explain().reason == "forced by backend()"


def test_any_call(fused_mlp, device, implementation):
    """Random combinations of operands and options give right results."""
    draw = random.Random(torch.randint(1 << 30, ()).item())
    for _ in range(12):
        form = draw.choice(list(forms()))
        experts, k = draw.choice([1, 2, 3, 9, 40]), draw.choice([1, 2, 3, 8, 16])
        sizes = tuple(draw.choice([1, 3, 8, 16, 33, 64, 130]) for _ in range(3))
        dtype = draw.choice([torch.float32, torch.bfloat16])
        tokens = draw.choice([1, 2, 5, 31, 64, 120])
        made = drawn(tokens, k, experts, sizes, dtype=dtype, device=device, biases=draw.random() < 0.5, **form)
        check(fused_mlp, implementation, made, draw.choice(ACTIVATIONS), **form)
