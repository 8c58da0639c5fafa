"""Calls of experts_mlp: operands, an eager loop, and checks of the results."""

import importlib
import itertools
import unittest.mock

import pytest
import torch

import gemm_kernels
import machine
import reference
from reference import DTYPES, FORMULAS, assert_no_worse_than_eager

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
GPT_OSS = {"limit": 7.0, "up_offset": 1.0}


def forms():
    """Yields every form in which models store the weights of experts."""
    for gated, interleaved, is_transposed, limits in itertools.product(
        (True, False), (False, True), (False, True), ({}, {"limit": 0.5, "up_offset": 1.0})
    ):
        if gated or not (interleaved or limits):
            yield {"gated": gated, "interleaved": interleaved, "transposed": is_transposed, **limits}


def drawn(tokens=7, k=3, experts=4, sizes=(40, 24, 33), *, dtype=torch.float32, device="cpu", biases=False, **form):
    """Random operands; some indices name no expert, and have NaN as weight."""
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
    """The eager reference: computes expert by expert in the operands' dtype, with sums at least in float32."""
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
    return reference.conditioning(lambda moved: compute(wide | moved), floats)  # the operands in order


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


OF_GPT_OSS = {"interleaved": True, "transposed": True, **GPT_OSS}
ROUTINGS = {
    "one expert": lambda index, experts: index.fill_(1),
    "the same twice": lambda index, experts: index.copy_(index[:, :1].expand_as(index)),
    "none": lambda index, experts: index.fill_(experts),
    "far outside": lambda index, experts: index.fill_(1 << 40),
    "in order": lambda index, experts: index.copy_((torch.arange(index.numel()) % experts).view_as(index)),
    "skewed": lambda index, experts: index.copy_((torch.rand(index.shape) ** 4 * experts).long()),
}

CAPABILITY = torch.cuda.get_device_capability() if machine.device_type() == "cuda" else None
hopper = pytest.mark.skipif(CAPABILITY != (9, 0), reason="needs a Hopper GPU")
grouped = pytest.mark.skipif(
    not any(gemm_kernels.runs_on(each, CAPABILITY) for each in gemm_kernels.ARCHITECTURES),
    reason="needs a GPU that kernels of experts are for",
)


@pytest.fixture(params=gemm_kernels.ARCHITECTURES)
def architecture(request, fused_mlp):
    """Forces each architecture whose kernels run here."""
    if not gemm_kernels.runs_on(request.param, CAPABILITY):
        pytest.skip(f"the kernels of {request.param} do not run on this GPU")
    with gemm_kernels.forced(fused_mlp, request.param):
        yield request.param


TWO_BYTES = [torch.bfloat16, torch.float16]


def trained_by_kernels(fused_mlp):
    module = importlib.import_module(f"{fused_mlp.__name__}.autograd.experts_training")
    return unittest.mock.patch.object(module, "run", wraps=module.run)


def gradients(function, made, grad):
    leaves = {
        name: value.detach().clone().requires_grad_() if value.is_floating_point() else value
        for name, value in made.items()
    }
    wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    result = function(**leaves)
    return dict(zip(wanted, torch.autograd.grad(result, wanted.values(), grad.to(result.dtype)), strict=True))
