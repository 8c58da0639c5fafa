"""experts_mlp by the compiled CUDA kernels, which take 16-bit dtypes in rows of whole 16 bytes."""

import itertools
import random

import pytest
import torch
from torch import nn

import expert_calls
import gemm_kernels
import reference
from expert_calls import GPT_OSS, ROUTINGS, TWO_BYTES, check, drawn, forms, grouped, hopper
from reference import ACTIVATIONS

architecture = expert_calls.architecture


def check_grouped(fused_mlp, architecture, made, activation="silu", **form):
    """Checks that the kernels, not PyTorch, compute the result, that it is right, and that its bits repeat."""
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
    # tokens, k, experts, (in, hidden, out): tiles of 8, 16 and 32 rows, one to eight CTAs per tile
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
    # rows found by one lane each, up to 32 of them, or sorted into blocks
    (32, 1, 3, (72, 40, 104)),
    (33, 1, 3, (72, 40, 104)),
    (43, 3, 70, (1032, 264, 72)),
    (900, 1, 400, (264, 72, 136)),
    # a single token
    (1, 3, 4, (72, 136, 200)),
    (1, 6, 9, (264, 520, 72)),
    (1, 9, 12, (264, 520, 72)),
    # many tokens: tiles as high as needed, several per CTA, tails of columns and of k
    (4096, 1, 7, (72, 40, 8)),
    (700, 2, 3, (520, 264, 136)),
    (2500, 4, 9, (264, 776, 1032)),
    (5000, 1, 512, (72, 40, 104)),
    (1024, 8, 128, (512, 192, 256)),
]


@grouped
def test_any_grouped_call(fused_mlp, device, architecture):
    """Random combinations of operands and options run on the kernels, with right results."""
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
    """The routing may have any dtype, and operands may be views of larger tensors."""
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
    """Launch shapes do not depend on the routing, so a captured graph is right for another routing."""
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


def same_rows(made):
    """Gives all features of an expert the same row of memory."""
    first = made["gate_up_weight"]
    return made | {"gate_up_weight": first[:, :1].expand_as(first)}


@hopper
def test_what_the_grouped_kernels_do_not_take(fused_mlp, device):
    """PyTorch computes what the grouped kernels do not take, forced or not, and the explanation says why."""
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
    """The compiled kernels run if they take the operands; otherwise Triton's for few tokens, or the composed parts."""
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
    """A compiled graph contains the compiled op, for any number of tokens."""
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
