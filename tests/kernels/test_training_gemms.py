"""The training kernels, forced: they run, match eager's error against float64, and repeat their bits."""

import importlib
import itertools
import random

import pytest
import torch

import gemm_kernels
import machine
import measure
import reference
import sanitizer_cases
from reference import ACTIVATIONS, assert_no_worse_than_eager, operands, poisoned_memory
from test_gemm import kernels_of
from test_training import leaves, step

pytestmark = pytest.mark.skipif(machine.device_type() != "cuda", reason="needs a GPU and a torch with CUDA")
half_dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
forced = pytest.mark.usefixtures("architecture")
functions = pytest.mark.parametrize("function", ["gated_mlp", "mlp", "gated_linear"])

PRODUCTS = {
    "gated_mlp": {"GatedKept", "GatedGradient", "Pair"},
    "mlp": {"PlainKept", "PlainGradient"},
    "gated_linear": {"GatedKept", "Pair"},
}
KERNELS = [
    (architecture, number)
    for architecture in gemm_kernels.ARCHITECTURES
    for number, entry in enumerate(gemm_kernels.entries(architecture))
    if entry[1] in gemm_kernels.TRAINING
]


def needs(architecture):
    capability = torch.cuda.get_device_capability()
    if not gemm_kernels.runs_on(architecture, capability):
        pytest.skip(f"the kernels of {architecture} do not run on a GPU of {capability}")


@pytest.fixture(params=gemm_kernels.ARCHITECTURES)
def architecture(request, fused_mlp) -> str:
    """The architecture whose kernels are forced."""
    needs(request.param)
    with gemm_kernels.forced(fused_mlp, request.param):
        yield request.param


def caller(fused_mlp, function, activation, memory="activations"):
    return lambda made: getattr(fused_mlp, function)(**made, activation=activation, memory=memory)


def expected(function, made, activation="silu"):
    """The result and gradients of eager PyTorch, and those in float64."""
    wide = leaves({name: tensor.double() for name, tensor in made.items()})
    eager = step(lambda made: reference.eager(function, made, activation), made)
    return eager, step(lambda made: reference.exact(function, made, activation), wide)


def assert_right(function, made, found):
    for name, *three in zip(["result", *made], found, *expected(function, made), strict=True):
        assert_no_worse_than_eager(*three, name, roundings=8)


@half_dtypes
@functions
@forced
def test_gradients(fused_mlp, device, function, dtype):
    """Gradients are right for random shapes with tails, in memory full of NaNs, kept or recomputed, with or without
    bias.
    """
    rng = random.Random(torch.initial_seed())
    for activation, biases in itertools.product(ACTIVATIONS, (True, False)):
        rows = rng.choice([rng.randint(1, 64), rng.randint(65, 700), rng.randint(701, 3000)])
        n_in, hidden, out = (8 * rng.randint(1, 130) for _ in range(3))
        made = leaves(operands(function, (rows,), (n_in, hidden, out), dtype=dtype, device=device, biases=biases))
        what = f"{function}, {rows} x {(n_in, hidden, out)}, {activation}"
        with poisoned_memory(device):
            found = step(caller(fused_mlp, function, activation), made)
            # A retained graph is not overwritten, and gives the same bits.
            again = step(caller(fused_mlp, function, activation), made, retain=True)
            recomputed = step(caller(fused_mlp, function, activation, "recompute"), made)
        assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True)), what
        of_others = expected(function, made, activation)
        for mine in (found, recomputed):
            for name, *three in zip(["result", *made], mine, *of_others, strict=True):
                sharing = max(1.0, three[0].numel() / (rows * hidden))  # outputs, one hidden value's rounding
                assert_no_worse_than_eager(*three, f"{what}: {name}", roundings=8, chance=3 * sharing**0.5)


@pytest.mark.parametrize(("architecture", "number"), KERNELS)
def test_each_kernel(fused_mlp, device, architecture, number):
    """Each kernel, forced by itself, runs and is right if its last tiles are almost empty."""
    needs(architecture)
    kernel = gemm_kernels.entries(architecture)[number]
    if not sanitizer_cases.fits(architecture, kernel):
        pytest.skip("the GPU has not the shared memory for it")
    function = "mlp" if kernel[1].startswith("Plain") else "gated_mlp"
    made = leaves(operands(function, (1033,), (264, 1032, 264), dtype=torch.bfloat16, device=device))
    with gemm_kernels.forced(fused_mlp, architecture, number):
        with poisoned_memory(device):
            found = step(caller(fused_mlp, function, "silu"), made)
        names = kernels_of(lambda: step(caller(fused_mlp, function, "silu"), made))
    assert kernel[1:] in {name[2:] for name in gemm_kernels.named(names, architecture)}
    assert_right(function, made, found)


def test_those_that_are_chosen(fused_mlp, device):
    """On a Hopper GPU many rows use these kernels, and explain says so.

    For few rows gradients come from torch's GEMMs, except that of x, for which two such GEMMs would cost more CPU time.
    """
    needs("sm90")
    products = ("GatedKept", "GatedGradient", "Pair")
    for rows, fused in ((8192, set(products)), (1024, set(products)), (16, {"Pair"})):
        made = leaves(operands("gated_mlp", (rows,), (1024, 4096, 1024), dtype=torch.bfloat16, device=device))
        with gemm_kernels.chosen(fused_mlp):
            (kept,) = fused_mlp.explain(fused_mlp.gated_mlp, **made).parts
            names = kernels_of(lambda: step(caller(fused_mlp, "gated_mlp", "silu"), made))  # noqa: B023
        assert {kernel[2] for kernel in gemm_kernels.named(names)} & set(gemm_kernels.TRAINING) == fused
        assert [part.fused for part in kept.gemms] == [product in fused for product in products]


@functions
def test_the_kernels_run(fused_mlp, device, architecture, function):
    """The kernels run. If the second weight is frozen, hidden values are not stored."""
    for frozen in (False, True):
        made = leaves(operands(function, (300,), (264, 520, 136), dtype=torch.bfloat16, device=device))
        for name in made:
            made[name].requires_grad_(not (frozen and name in ("down_weight", "fc2_weight")))
        names = kernels_of(lambda: step(caller(fused_mlp, function, "silu"), made))  # noqa: B023
        reached = {kernel[2] for kernel in gemm_kernels.named(names, architecture)}
        assert reached >= PRODUCTS[function], reached


@half_dtypes
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_input_gradient_of_some_layers(fused_mlp, device, architecture, count, dtype):
    """Products of equal k are summed in one kernel, rounded once; on sm_80 only two. Unequal k uses no kernel."""
    native, nothing = importlib.import_module(f"{fused_mlp.__name__}.backends.native"), [None] * (3 - count)
    for rows, sizes, width in ((1, [8] * 3, 8), (129, [72] * 3, 136), (3001, [264] * 3, 520), (129, [72, 40, 8], 64)):
        grads = [torch.randn(rows, out, device=device).to(dtype) for out in sizes[:count]]
        weights = [torch.randn(out, width, device=device).to(dtype) for out in sizes[:count]]

        def run(grads=grads, weights=weights):
            return native.projections_backward(*grads, *nothing, None, *weights, *nothing, 1)[0]

        def summed(of, grads=grads, weights=weights):
            return sum(grad.to(of) @ weight.to(of) for grad, weight in zip(grads, weights, strict=True))

        with poisoned_memory(device):
            found = run()
        assert_no_worse_than_eager(found, summed(dtype), summed(torch.float64), f"{rows}, {sizes}, {width}")
        names = kernels_of(run)
        takes = len(set(sizes[:count])) == 1 and (architecture == "sm90" or count == 2)
        assert ({kernel[2] for kernel in gemm_kernels.named(names, architecture)} == {"Pair"}) == takes
        assert len(names) == 1 or not takes


@half_dtypes
@forced
@pytest.mark.parametrize("shape", [(8192, 768, 3072), (1024, 1024, 4096), (4100, 1032, 2056)], ids=str)
def test_same_bits_every_time(fused_mlp, device, shape, dtype):
    rows, width, hidden = shape
    made = leaves(operands("gated_mlp", (rows,), (width, hidden, width), dtype=dtype, device=device))
    first = step(caller(fused_mlp, "gated_mlp", "silu"), made)
    for _ in range(10):
        again = step(caller(fused_mlp, "gated_mlp", "silu"), made)
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


@half_dtypes
@pytest.mark.parametrize("sizes", [(64, 256, 64), (33, 47, 21)], ids=str)
def test_the_gradients_of_two_weights_in_a_batch(fused_mlp, device, sizes, dtype):
    """Gradients are right and have the same bits wherever gate, up and their gradients lie in memory."""
    made = leaves(operands("gated_mlp", (3000,), sizes, dtype=dtype, device=device))
    call = caller(fused_mlp, "gated_mlp", "silu")
    found = [step(call, made) for _ in range(6)]  # all kept, so that each step gets other memory
    assert all(torch.equal(one, other) for again in found for one, other in zip(found[0], again, strict=True))
    assert_right("gated_mlp", made, found[0])


@half_dtypes
@pytest.mark.parametrize("by_column", [False, True])
@functions
def test_what_is_made_again_in_blocks_of_rows(fused_mlp, device, function, by_column, dtype):
    """Recomputing three blocks of rows, the last one short, rounds gradients once and takes the memory of one block."""
    rows, width, hidden = 30000, 64, 4096
    made = leaves(operands(function, (rows,), (width, hidden, width), dtype=dtype, device=device, biases=True))
    if by_column:
        made = {name: tensor.detach().t().contiguous().t().requires_grad_() for name, tensor in made.items()}
    call = caller(fused_mlp, function, "silu", "recompute")
    with poisoned_memory(device):
        found = step(call, made)
        again = step(call, made, retain=True)
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))
    assert_right(function, made, found)
    assert [each.stride() for each in found[1:]] == [tensor.stride() for tensor in made.values()]
    grad, wanted = torch.randn_like(found[0]), list(made.values())
    _, peak = measure.saved_and_peak(lambda: call(made), lambda result: torch.autograd.grad(result, wanted, grad))
    # The matrices of a block; the result, the gradient of x, and a copy of the latter if the layout needs one.
    block, ends = 3 * 10240 * hidden, rows * (2 * width + (hidden if function == "gated_linear" else width))
    cublas = 2**25 + 2**25  # this thread's workspace, and that of float32 products
    assert peak <= 2 * (block + ends) + 4 * 5 * width * hidden + cublas + 2**23


@pytest.mark.parametrize("of", ["x", "weight", "bias"])
@functions
@forced
def test_only_what_is_asked_for(fused_mlp, device, function, of):
    """Gradients of some operands have the same bits as when all are computed."""
    made = operands(function, (200,), (72, 136, 40), dtype=torch.bfloat16, device=device)
    everything = dict(zip(made, step(caller(fused_mlp, function, "gelu"), leaves(made))[1:], strict=True))
    some = leaves(made, [name for name in made if name.endswith(of)])
    wanted = [name for name, tensor in some.items() if tensor.requires_grad]
    for name, found in zip(wanted, step(caller(fused_mlp, function, "gelu"), some)[1:], strict=True):
        assert torch.equal(found, everything[name]), name


@forced
def test_operands_that_no_kernel_takes(fused_mlp, device):
    """Unsupported operands use composed operations and are right: odd feature counts, misaligned and expanded rows."""
    for sizes, relay in [
        ((33, 47, 21), lambda x: x),
        ((64, 96, 40), lambda x: torch.cat([x, x], 1)[:, 1 : 1 + x.shape[1]]),
        ((64, 96, 40), lambda x: x[:1].expand_as(x)),
    ]:
        made = operands("gated_mlp", (130,), sizes, dtype=torch.bfloat16, device=device)
        made["x"] = relay(made["x"])
        made = {name: tensor.detach().requires_grad_() for name, tensor in made.items()}
        found = step(caller(fused_mlp, "gated_mlp", "silu"), made)
        assert_right("gated_mlp", made, found)
