"""experts_mlp: held to float64 formulas, with the error of an eager loop over the experts as the limit."""

import functools
import gc
import importlib
import itertools
import random
import sys
import unittest.mock

import pytest
import torch
from torch import nn

import gemm_kernels
import machine
import reference
from layouts import chunk, every_other_column, misaligned, transposed
from reference import ACTIVATIONS, DTYPES, FORMULAS, assert_no_worse_than_eager

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
GPT_OSS = {"limit": 7.0, "up_offset": 1.0}


def forms():
    """Every way in which models store the weights of experts."""
    for gated, interleaved, is_transposed, limits in itertools.product(
        (True, False), (False, True), (False, True), ({}, {"limit": 0.5, "up_offset": 1.0})
    ):
        if gated or not (interleaved or limits):
            yield {"gated": gated, "interleaved": interleaved, "transposed": is_transposed, **limits}


def drawn(tokens=7, k=3, experts=4, sizes=(40, 24, 33), *, dtype=torch.float32, device="cpu", biases=False, **form):
    """Random operands, some of whose indices name no expert; the weight of such a choice is NaN."""
    n_in, hidden, out = sizes
    first = hidden * 2 if form.get("gated", True) else hidden
    shapes = {"gate_up_weight": (experts, first, n_in), "down_weight": (experts, out, hidden)}
    made = {"x": torch.randn(tokens, n_in, device=device).to(dtype)}
    made["top_k_index"] = torch.randint(-1, experts + 1, (tokens, k), device=device)
    made["top_k_weights"] = torch.rand(tokens, k, device=device)
    skipped = (made["top_k_index"] < 0) | (made["top_k_index"] >= experts)
    made["top_k_weights"][skipped] = torch.nan
    for name, shape in shapes.items():
        weight = torch.randn(shape, device=device) * max(shape[2], 1) ** -0.5
        made[name] = (weight.mT.contiguous() if form.get("transposed", False) else weight).to(dtype)
    for name, shape in shapes.items() if biases else ():
        made[name.replace("weight", "bias")] = torch.randn(shape[:2], device=device).to(dtype)
    return made


def loop(
    act,
    x,
    top_k_index,
    top_k_weights,
    gate_up_weight,
    down_weight,
    gate_up_bias=None,
    down_bias=None,
    gated=True,
    interleaved=False,
    transposed=False,
    limit=None,
    up_offset=0.0,
):
    """Expert by expert, in the dtype of the operands; sums in float32 at least."""
    wide = torch.promote_types(x.dtype, torch.float32)
    slots = x.new_zeros((*top_k_index.shape, down_weight.shape[2 if transposed else 1]), dtype=wide)
    for expert, (first, second) in enumerate(zip(gate_up_weight, down_weight, strict=True)):
        chosen = (top_k_index == expert).nonzero()
        if len(chosen) == 0:
            continue
        token, slot = chosen.T
        hidden = x[token] @ (first if transposed else first.T)
        if gate_up_bias is not None:
            hidden = hidden + gate_up_bias[expert]
        if gated:
            gate, up = (hidden[:, ::2], hidden[:, 1::2]) if interleaved else hidden.chunk(2, dim=-1)
            if limit is not None:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            hidden = act(gate) * (up + up_offset)
        else:
            hidden = act(hidden)
        result = hidden @ (second if transposed else second.T)
        if down_bias is not None:
            result = result + down_bias[expert]
        slots = slots.index_put((token, slot), result.to(wide) * top_k_weights[token, slot, None].to(wide))
    return slots.sum(1).to(x.dtype)


def exact(made, activation, form):
    wide = {name: value.double() if value.is_floating_point() else value for name, value in made.items()}
    return loop(FORMULAS[activation].exact, **wide, **form)


def eager(made, activation, form):
    return loop(FORMULAS[activation].eager, **made, **form)


def conditioning(compute, made):
    floats = {name: value for name, value in made.items() if name not in ("top_k_index", "top_k_weights")}
    wide = made | {"top_k_weights": made["top_k_weights"].double()}
    return reference.conditioning(lambda moved: compute(wide | moved), floats)  # the operands in their order


def forced(fused_mlp, implementation, dtype):
    return fused_mlp.backend(implementation if machine.takes(implementation, dtype) else "auto")


def check(fused_mlp, implementation, made, activation="silu", **form):
    before = {name: value.clone() for name, value in made.items()}
    with forced(fused_mlp, implementation, made["x"].dtype), torch.no_grad():
        result = fused_mlp.experts_mlp(**made, activation=activation, **form)
    what = f"{activation}, {form}, {[(name, list(value.shape), value.stride()) for name, value in made.items()]}"
    condition = conditioning(lambda moved: [exact(moved, activation, form)], made)
    assert_no_worse_than_eager(
        result, eager(made, activation, form), exact(made, activation, form), what, 8, conditioning=lambda: condition(0)
    )
    assert result.is_contiguous()
    for name, value in made.items():
        assert torch.equal(value.nan_to_num(), before[name].nan_to_num()), f"changed {name}"
    return result


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
    """As its class computes it, of large values too."""
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


ROUTINGS = {
    "one expert": lambda index, experts: index.fill_(1),
    "the same twice": lambda index, experts: index.copy_(index[:, :1].expand_as(index)),
    "none": lambda index, experts: index.fill_(experts),
    "far outside": lambda index, experts: index.fill_(1 << 40),
    "in order": lambda index, experts: index.copy_((torch.arange(index.numel()) % experts).view_as(index)),
    "skewed": lambda index, experts: index.copy_((torch.rand(index.shape) ** 4 * experts).long()),
}


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
    made = drawn(device=device)
    expected = check(fused_mlp, implementation, made)
    for index in (torch.int32, torch.int16, torch.int8):
        other = check(fused_mlp, implementation, made | {"top_k_index": made["top_k_index"].to(index)})
        assert torch.equal(other, expected)
    for weights in (torch.float64, torch.bfloat16, torch.float16):
        check(fused_mlp, implementation, made | {"top_k_weights": made["top_k_weights"].to(weights)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("layout", [transposed, chunk, every_other_column, misaligned])
def test_strides(fused_mlp, device, implementation, layout, dtype):
    made = drawn(20, sizes=(33, 20, 17), dtype=dtype, device=device, biases=True)
    for names in (*([name] for name in made), list(made)):
        laid_out = {name: layout(made[name]) for name in names if not made[name].isnan().any()}
        check(fused_mlp, implementation, made | laid_out)


def test_experts_of_a_larger_stack(fused_mlp, device, implementation):
    """As each process has them with expert parallelism: views, whose experts are a part of all."""
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


# The compiled CUDA kernels, which take what lies in rows of 16 bytes, in two bytes a number

CAPABILITY = torch.cuda.get_device_capability() if machine.device_type() == "cuda" else None
hopper = pytest.mark.skipif(CAPABILITY != (9, 0), reason="needs a Hopper GPU")
grouped = pytest.mark.skipif(
    not any(gemm_kernels.runs_on(each, CAPABILITY) for each in gemm_kernels.ARCHITECTURES),
    reason="needs a GPU that kernels of experts are for",
)


@pytest.fixture(params=gemm_kernels.ARCHITECTURES)
def architecture(request, fused_mlp):
    """Each one whose kernels run here, forced."""
    if not gemm_kernels.runs_on(request.param, CAPABILITY):
        pytest.skip(f"the kernels of {request.param} do not run on this GPU")
    with gemm_kernels.forced(fused_mlp, request.param):
        yield request.param


TWO_BYTES = [torch.bfloat16, torch.float16]


def check_grouped(fused_mlp, architecture, made, activation="silu", **form):
    """That the kernels, and not PyTorch, compute it; that they are right; and that the bits are the same again."""
    with fused_mlp.backend("cuda"):
        explained = fused_mlp.explain(fused_mlp.experts_mlp, **made, activation=activation, **form)
    assert {part.implementation for part in explained.parts} == {architecture}, explained
    with reference.poisoned_memory(made["x"].device):
        result = check(fused_mlp, "cuda", made, activation, **form)
        with fused_mlp.backend("cuda"), torch.no_grad():
            again = fused_mlp.experts_mlp(**made, activation=activation, **form)
    assert torch.equal(result, again)
    return result


@grouped
@pytest.mark.parametrize("dtype", TWO_BYTES, ids=str)
def test_grouped_forms(fused_mlp, device, architecture, dtype):
    for form, biases in itertools.product(forms(), (False, True)):
        sizes = (128, 64, 32) if form["transposed"] else (40, 24, 32)
        made = drawn(sizes=sizes, dtype=dtype, device=device, biases=biases, **form)
        check_grouped(fused_mlp, architecture, made, **form)
    for activation, gated in itertools.product([*ACTIVATIONS, None], (True, False)):
        check_grouped(
            fused_mlp,
            architecture,
            drawn(sizes=(72, 136, 8), dtype=dtype, device=device, gated=gated),
            activation,
            gated=gated,
        )


GROUPED = [
    # tokens, k, experts, (in, hidden, out): tiles of 8, 16 and 32 rows, one to eight CTAs to each
    (1, 1, 1, (8, 8, 8)),
    (1, 8, 16, (2048, 768, 2048)),
    (3, 2, 5, (72, 136, 200)),
    (1, 2, 8, (4104, 1544, 520)),
    (33, 16, 5, (264, 40, 72)),
    (16, 8, 128, (520, 264, 136)),
    (70, 2, 512, (136, 72, 40)),
    (64, 4, 16, (136, 136, 136)),
    (128, 8, 64, (328, 200, 264)),
    (300, 2, 12, (200, 328, 72)),
    (512, 8, 128, (136, 72, 200)),
    # rows searched for by a lane each, up to 32 of them, or sorted into blocks
    (32, 1, 3, (72, 40, 104)),
    (33, 1, 3, (72, 40, 104)),
    (43, 3, 70, (1032, 264, 72)),
    (900, 1, 400, (264, 72, 136)),
    # a single token
    (1, 3, 4, (72, 136, 200)),
    (1, 6, 9, (264, 520, 72)),
    (1, 9, 12, (264, 520, 72)),
    # many tokens: tiles as high as they have to be, several to each CTA, tails of columns and of k
    (4096, 1, 7, (72, 40, 8)),
    (700, 2, 3, (520, 264, 136)),
    (2500, 4, 9, (264, 776, 1032)),
    (5000, 1, 512, (72, 40, 104)),
    (1024, 8, 128, (512, 192, 256)),
]


@grouped
def test_any_grouped_call(fused_mlp, device, architecture):
    """All of it drawn by chance."""
    draw = random.Random(torch.randint(1 << 30, ()).item())
    for _ in range(12):
        form = draw.choice(list(forms()))
        step = 64 if form["transposed"] else 8
        n_in, hidden = (step * draw.randint(1, 700 // step) for _ in range(2))
        experts, k = draw.choice([1, 2, 3, 9, 40, 130]), draw.choice([1, 2, 3, 8, 16])
        tokens = draw.choice([1, 2, 5, 31, 64, 120, 300, 700])
        if architecture == "sm90" and form["transposed"] and tokens * k > 32 * experts:
            continue
        sizes, dtype = (n_in, hidden, 8 * draw.randint(1, 40)), draw.choice(TWO_BYTES)
        made = drawn(tokens, k, experts, sizes, dtype=dtype, device=device, biases=draw.random() < 0.5, **form)
        check_grouped(fused_mlp, architecture, made, draw.choice(ACTIVATIONS), **form)


@grouped
@pytest.mark.parametrize("dtype", TWO_BYTES, ids=str)
@pytest.mark.parametrize(("tokens", "k", "experts", "sizes"), GROUPED, ids=str)
def test_grouped_shapes(fused_mlp, device, architecture, tokens, k, experts, sizes, dtype):
    for form in ({}, {"interleaved": True, **GPT_OSS}, {"gated": False}):
        check_grouped(
            fused_mlp, architecture, drawn(tokens, k, experts, sizes, dtype=dtype, device=device, **form), **form
        )
    if architecture == "sm90" and tokens * k > 32 * experts:
        return
    n_in, hidden, out = sizes
    sizes = (-(-n_in // 64) * 64, -(-hidden // 64) * 64, out)
    for form in ({}, {"interleaved": True, **GPT_OSS}, {"gated": False}):
        form["transposed"] = True
        check_grouped(
            fused_mlp, architecture, drawn(tokens, k, experts, sizes, dtype=dtype, device=device, **form), **form
        )


@grouped
def test_tiles_of_every_height(fused_mlp, device, architecture):
    for tokens in range(40, 640, 23):
        check_grouped(fused_mlp, architecture, drawn(tokens, 1, 1, (72, 40, 136), dtype=torch.bfloat16, device=device))


@grouped
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(("tokens", "k", "experts"), [(1, 4, 8), (50, 4, 8), (200, 16, 40), (1000, 4, 8)])
def test_grouped_routings(fused_mlp, device, architecture, tokens, k, experts, routing):
    made = drawn(tokens, k, experts, (72, 136, 40), dtype=torch.bfloat16, device=device)
    ROUTINGS[routing](made["top_k_index"], experts)
    made["top_k_weights"] = torch.rand(tokens, k, device=device)
    result = check_grouped(fused_mlp, architecture, made)
    if routing in ("none", "far outside"):
        assert not result.any()


@grouped
@pytest.mark.parametrize("tokens", [20, 300])
def test_grouped_operands(fused_mlp, device, architecture, tokens):
    """The routing may have any dtype, and operands may be views of more."""
    made = drawn(tokens, 4, 8, (72, 40, 24), dtype=torch.bfloat16, device=device, biases=True)
    for dtype in (torch.int32, torch.int16, torch.int8):
        check_grouped(fused_mlp, architecture, made | {"top_k_index": made["top_k_index"].to(dtype)})
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        check_grouped(fused_mlp, architecture, made | {"top_k_weights": made["top_k_weights"].to(dtype)})
    check_grouped(
        fused_mlp,
        architecture,
        made | {name: made[name].mT.contiguous().mT for name in ("x", "gate_up_bias", "down_bias")},
    )
    check_grouped(fused_mlp, architecture, made | {"x": made["x"][:1].expand(tokens, -1)})
    part = made | {name: made[name][2:5] for name in made if name.startswith(("gate_up", "down"))}
    check_grouped(fused_mlp, architecture, part | {"top_k_index": made["top_k_index"] - 2})
    wide = {name: nn.functional.pad(made[name], (0, 8, 0, 6)) for name in ("gate_up_weight", "down_weight")}
    wide = {name: value[:, :-6, :-8] for name, value in wide.items()}
    check_grouped(fused_mlp, architecture, made | wide)
    check_grouped(fused_mlp, architecture, made | wide, interleaved=True)


@grouped
def test_grouped_in_a_graph(fused_mlp, device, architecture):
    """The shapes of the launches do not depend on the routing: a graph computes another one as well."""
    for tokens in (1, 40, 1000):
        made = drawn(tokens, 4, 8, (136, 72, 264), dtype=torch.bfloat16, device=device)
        other = drawn(tokens, 4, 8, (136, 72, 264), dtype=torch.bfloat16, device=device)
        with fused_mlp.backend("cuda"), torch.no_grad():
            expected = [fused_mlp.experts_mlp(**operands) for operands in (made, other)]
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                found = fused_mlp.experts_mlp(**made)
        for operands, result in zip((made, other), expected, strict=True):
            for name, value in operands.items():
                made[name].copy_(value)
            graph.replay()
            assert torch.equal(found, result)


# Experts that train by kernels: features of any multiples of 8
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
# Those that zeros fill up
FILLED = [(300, 3, 5, (203, 129)), (40, 2, 3, (8, 12)), (70, 2, 3, (33, 64)), (5, 1, 2, (3, 5))]


def trained_by_kernels(fused_mlp):
    module = importlib.import_module(f"{fused_mlp.__name__}.autograd.experts_training")
    return unittest.mock.patch.object(module, "run", wraps=module.run)


def check_trained(fused_mlp, made, activation="silu", calls=2, **form):
    """That the kernels compute the gradients, no worse than eager operations, and the same bits again."""
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
    made["top_k_index"][0, 0] = 0  # or the loop has no gradient
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
    """With limits, sums of the first layer are multiples of 1/16, which nobody rounds across a limit."""
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


OF_GPT_OSS = {"interleaved": True, "transposed": True, **GPT_OSS}


@hopper
@pytest.mark.parametrize("form", [form for form in forms() if "limit" not in form], ids=str)
@pytest.mark.parametrize(("tokens", "k", "experts", "sizes"), FILLED, ids=str)
def test_trained_by_copies(fused_mlp, device, tokens, k, experts, sizes, form):
    made = drawn(tokens, k, experts, (*sizes, sizes[0]), dtype=torch.bfloat16, device=device, biases=True, **form)
    made["top_k_weights"] = made["top_k_weights"].nan_to_num(0.3)
    made["top_k_index"][0, 0] = 0
    check_trained(fused_mlp, made, calls=4, **form)
    leaf = {"x": made["x"].clone().requires_grad_()}
    assert "zeros fill up" in fused_mlp.explain(fused_mlp.experts_mlp, **made | leaf, **form).reason


@hopper
def test_gpt_oss_trained(fused_mlp, device):
    """Its experts, at its width and in its dtype, of values at which the limits hold."""
    made = drawn(200, 4, 6, (2880, 2880, 2880), dtype=torch.bfloat16, device=device, biases=True, **OF_GPT_OSS)
    made["top_k_weights"] = made["top_k_weights"].nan_to_num(0.3)
    made["gate_up_bias"] *= 6
    check_trained(fused_mlp, made, "quick_gelu", **OF_GPT_OSS)


@hopper
def test_memory_of_trained_forms(fused_mlp, device):
    """No more is kept, and no more is held at the peak, than of the composition."""
    made = drawn(2048, 4, 8, (512, 1024, 512), dtype=torch.bfloat16, device=device, biases=True, **OF_GPT_OSS)
    made["top_k_weights"] = made["top_k_weights"].nan_to_num(0.3)
    leaves = {name: value.requires_grad_(value.is_floating_point()) for name, value in made.items()}
    compute = functools.partial(fused_mlp.experts_mlp, activation="quick_gelu", **leaves, **OF_GPT_OSS)

    def held():
        gc.collect()  # what other tests have left must not be freed in between
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
    """One graph each way, by the same ops: the same bits as without."""
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
    """What an expert has that nobody chose is not read, where a step of the sums ends within its neighbour."""
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
    """A gradient that is not asked for is not computed, and the others are the same."""
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
    """A gradient that is differentiated in its turn is that of the composition."""
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


def same_rows(made):
    """All features of an expert in one row of memory."""
    first = made["gate_up_weight"]
    return made | {"gate_up_weight": first[:, :1].expand_as(first)}


@hopper
def test_what_the_grouped_kernels_do_not_take(fused_mlp, device):
    """PyTorch computes it instead, forced or not, and the explanation says why."""
    sizes = (72, 40, 24)
    for words, made, form in (
        ("float32", drawn(sizes=sizes, device=device), {}),
        ("multiple of 8", drawn(dtype=torch.bfloat16, device=device), {}),
        (
            "multiple of 64",
            drawn(sizes=sizes, dtype=torch.bfloat16, device=device, transposed=True),
            {"transposed": True},
        ),
        ("more experts", drawn(3, 2, 513, sizes=sizes, dtype=torch.bfloat16, device=device), {}),
        ("overlap", same_rows(drawn(sizes=sizes, dtype=torch.bfloat16, device=device)), {}),
    ):
        check(fused_mlp, "cuda", made, **form)
        with fused_mlp.backend("cuda"):
            explained = fused_mlp.explain(fused_mlp.experts_mlp, **made, **form)
        assert words in explained.reason and not any(part.fused for part in explained.parts)


@hopper
@pytest.mark.parametrize("tokens", [1, 1000])
def test_what_is_chosen(fused_mlp, device, tokens):
    """The compiled kernels; where they do not take the operands, Triton's for few tokens, or the parts."""
    for form in ({}, {"transposed": True}):
        made = drawn(tokens, sizes=(64, 128, 24), dtype=torch.bfloat16, device=device, **form)
        with gemm_kernels.chosen(fused_mlp):
            check(fused_mlp, "auto", made, **form)
            found = fused_mlp.explain(fused_mlp.experts_mlp, **made, **form)
        way = "torch" if form and tokens == 1000 else "sm80" if not form and tokens == 1 else "sm90"
        assert (found.implementation, {part.implementation for part in found.parts}) == ("cuda", {way})
    made = drawn(tokens, dtype=torch.bfloat16, device=device)
    check(fused_mlp, "auto", made)
    found = fused_mlp.explain(fused_mlp.experts_mlp, **made)
    assert (found.implementation, "multiple of 8" in found.reason) == ("triton" if tokens == 1 else "cuda", True)
    assert not any(part.fused for part in found.parts)
    trained = fused_mlp.explain(fused_mlp.experts_mlp, **made | {"x": made["x"].requires_grad_()})
    assert trained.implementation == "torch"


@hopper
def test_grouped_compiled(fused_mlp, device):
    """The compiled op is in the graph, for any number of tokens."""
    torch.compiler.reset()
    compiled = torch.compile(
        lambda made: fused_mlp.experts_mlp(**made), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for tokens in (7, 300, 1):
        made = drawn(tokens, sizes=(72, 40, 24), dtype=torch.bfloat16, device=device)
        with torch.no_grad(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            found = compiled(made)
        assert torch.equal(found, fused_mlp.experts_mlp(**made))
        assert any(event.name.endswith("::experts_mlp") for event in profile.events())


# Calls that are not one op


def gradients(function, made, grad):
    leaves = {
        name: value.detach().clone().requires_grad_() if value.is_floating_point() else value
        for name, value in made.items()
    }
    wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    result = function(**leaves)
    return dict(zip(wanted, torch.autograd.grad(result, wanted.values(), grad.to(result.dtype)), strict=True))


@dtypes
def test_gradients(fused_mlp, device, dtype):
    """They are those of x, the routing's weights, all weights and biases."""
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
            # Sums over tokens, in another order: their terms are as large as the largest, also where they cancel. Four
            # products of some 40 terms each differ by some 1e-6 of that.
            torch.testing.assert_close(*grads, rtol=0, atol=1e-5 * grads[0].abs().max().item())


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("form", [{}, {"limit": 0.5}, OF_GPT_OSS], ids=["plain", "limit", "gpt-oss"])
def test_rows_of_skipped_slots_are_not_read(fused_mlp, device, compiled, form, monkeypatch):
    """torch's grouped product on a GPU leaves them as they were in memory: no result and no gradient of any order has
    it."""
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
    """If the call would be composed of parts, as under autograd, nothing is computed."""
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
    """The answers that torch wants of an op: its schema, and what it says of shapes that it has not computed."""
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


# Operands that do not fit

WRONG = [
    ({"x": 1.0}, TypeError, "x must be a tensor, got float"),
    ({"top_k_index": None}, TypeError, "top_k_index must be a tensor, got NoneType"),
    ({"top_k_index": torch.rand(7, 3)}, TypeError, "top_k_index must be of a signed integer dtype, got torch.float32"),
    (
        {"top_k_weights": torch.ones(7, 3).long()},
        TypeError,
        "top_k_weights must be of a floating dtype, got torch.int64",
    ),
    (
        {"top_k_weights": torch.ones(7, 2)},
        ValueError,
        r"top_k_weights must have the shape of top_k_index, \[7, 3\], got",
    ),
    ({"x": torch.ones(6, 40)}, ValueError, r"top_k_index must be \[tokens, k\] .* got \[7, 3\] and \[6, 40\]"),
    ({"x": torch.ones(7, 39)}, ValueError, r"gate_up_weight must be \[experts, out, in\] with in = 39 to fit x"),
    ({"gate_up_weight": torch.ones(4, 47, 40)}, ValueError, "gate_up_weight must be .* even out"),
    ({"gate_up_weight": torch.ones(0, 48, 40)}, ValueError, "gate_up_weight must be .* an expert at least"),
    ({"down_weight": torch.ones(5, 33, 24)}, ValueError, "down_weight must be .* experts = 4 and in = 24"),
    ({"down_weight": torch.ones(4, 33, 24).bfloat16()}, TypeError, "down_weight must have the dtype of x"),
    ({"gate_up_bias": torch.ones(4, 24)}, ValueError, r"gate_up_bias must be \[4, 48\] to fit gate_up_weight"),
    ({"down_bias": torch.ones(33)}, ValueError, r"down_bias must be \[4, 33\] to fit down_weight"),
    ({"down_bias": torch.ones(4, 33, device="meta")}, ValueError, "down_bias must be on the device of x"),
    ({"gated": False, "interleaved": True}, ValueError, "down_weight must be"),
    ({"limit": -1.0}, ValueError, "limit must be positive or None, got -1.0"),
    ({"transposed": True}, ValueError, r"gate_up_weight must be \[experts, in, out\]"),
    ({"activation": "nothing"}, ValueError, "'nothing' is not known"),
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
        assert (found.implementation, "no kernels of experts" in found.reason) == ("torch", True)
    trained = explain(x=made["x"].clone().requires_grad_())
    assert trained.implementation == "torch" and trained.reason.startswith("autograd follows the parts: ")
    assert explain(top_k_weights=torch.rand(7, 3, device=device).requires_grad_()).reason == trained.reason
    with fused_mlp.backend("torch"):
        assert explain().reason == "forced by backend()"


def test_any_call(fused_mlp, device, implementation):
    """Cases that nobody thought of: everything drawn by chance."""
    draw = random.Random(torch.randint(1 << 30, ()).item())
    for _ in range(12):
        form = draw.choice(list(forms()))
        experts, k = draw.choice([1, 2, 3, 9, 40]), draw.choice([1, 2, 3, 8, 16])
        sizes = tuple(draw.choice([1, 3, 8, 16, 33, 64, 130]) for _ in range(3))
        dtype = draw.choice([torch.float32, torch.bfloat16])
        tokens = draw.choice([1, 2, 5, 31, 64, 120])
        made = drawn(tokens, k, experts, sizes, dtype=dtype, device=device, biases=draw.random() < 0.5, **form)
        check(fused_mlp, implementation, made, draw.choice(ACTIVATIONS), **form)
