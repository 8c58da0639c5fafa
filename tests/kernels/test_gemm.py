"""The GEMMs with fused epilogues, through the public functions: right, repeatable, and really fused.

Every test runs with the kernels that are chosen, and with those of each architecture that the GPU can run: a Hopper GPU
also runs sm80's.
"""

import random
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import gemm_kernels
import machine
import reference
import sanitizer_cases
from layouts import misaligned
from reference import FORMULAS, assert_no_worse_than_eager, operands, shapes

pytestmark = pytest.mark.skipif(machine.device_type() != "cuda", reason="needs a GPU and a torch with CUDA")

FUNCTIONS = ("linear", "gated_linear", "gated_mlp", "mlp")
functions = pytest.mark.parametrize("function", FUNCTIONS)
half_dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
GIB = 2**30
SILU = 4  # the code of the activation


@pytest.fixture(autouse=True, params=("chosen", *gemm_kernels.ARCHITECTURES))
def architecture(request, fused_mlp) -> str:
    """The architecture whose kernels are forced, or "chosen"."""
    capability = torch.cuda.get_device_capability()
    if request.param == "chosen":
        if gemm_kernels.any_forced() or capability != (9, 0):
            pytest.skip("kernels are forced for the whole run, or chosen by a model of this GPU")
        yield request.param
        return
    if not gemm_kernels.runs_on(request.param, capability):
        pytest.skip(f"the kernels of {request.param} do not run on a GPU of {capability}")
    with gemm_kernels.forced(fused_mlp, request.param):
        yield request.param


def gemms_of(function: str) -> int:
    return 2 if function.endswith("mlp") else 1


def assert_right(result, function, made, activation="silu"):
    eager = reference.eager(function, made, activation)
    assert_no_worse_than_eager(result, eager, reference.exact(function, made, activation), roundings=8)


def fused_gemms(fused_mlp, function, made, activation) -> int:
    """The number of a call's GEMMs that are fused, as explain says."""
    parts = fused_mlp.explain(getattr(fused_mlp, function), **made, activation=activation).parts
    return sum(part.implementation in gemm_kernels.ARCHITECTURES for part in parts)


# Random shapes


LINES = [(0, 0), (0, 0), (0, 64), (64, 64)]  # elements before and after a row; whole lines stay whole
ALIGNED = [(0, 8), (8, 16)]
MISALIGNED = [(0, 3), (1, 7)]


def relaid(tensor, before, after):
    """The tensor, or its values as a view with rows padded (by a multiple of 16 bytes or not) or misaligned."""
    if before == after == 0:
        return tensor
    cols = tensor.shape[-1]
    padded = tensor.new_full((*tensor.shape[:-1], before + cols + after), torch.nan)  # a kernel that reads it shows it
    view = padded[..., before : before + cols]
    return view.copy_(tensor)


def feature_count(rng):
    """Draws a feature count whose rows fill whole memory lines (most often), whole sectors, or neither."""
    step = rng.choice((8, 16, 64, 64))
    return step * rng.randint(1, 1600 // step) if rng.random() < 0.9 else rng.randint(1, 800)


@half_dtypes
@functions
def test_random_shapes(fused_mlp, device, function, dtype):
    """A thousand random calls over all parameters are no worse than eager against float64, in memory full of NaNs."""
    rng = random.Random(torch.initial_seed())
    activations = [name for name in FORMULAS if name is not None]
    rounding = torch.finfo(dtype).eps
    fused = 0
    ours, eager = [], []
    for index in range(125):
        rows = round(4096 ** rng.random())
        lead = rng.choice([(rows,), (1, rows), (2, (rows + 1) // 2)])
        sizes = tuple(feature_count(rng) for _ in range(3))
        names = [name for name in shapes(function, lead, sizes) if name.endswith("bias")]
        biases = rng.choice([True, False, tuple(name for name in names if rng.random() < 0.5)])
        made = operands(function, lead, sizes, dtype=dtype, device=device, biases=biases)
        layouts = LINES + rng.choice([[], [], ALIGNED, MISALIGNED])
        made = {name: relaid(operand, *rng.choice(layouts)) for name, operand in made.items()}
        activation = rng.choice(activations)
        what = f"{index}: {function}, {lead} x {sizes}, {activation}, " + ", ".join(
            f"{name} {operand.stride()} from {operand.storage_offset()}" for name, operand in made.items()
        )
        fused += fused_gemms(fused_mlp, function, made, activation) > 0
        with reference.poisoned_memory(device):
            result = getattr(fused_mlp, function)(**made, activation=activation)
        exact = reference.exact(function, made, activation)
        assert (result.shape, result.dtype) == (exact.shape, dtype), what
        norm, maximum = reference.errors(result, exact)
        eager_norm, eager_maximum = reference.errors(reference.eager(function, made, activation), exact)
        # One large element's rounding may decide the error of a single call, so each call gets a tolerance for chance.
        # Over all calls chance evens out.
        assert norm <= 3 * eager_norm + rounding * exact.numel() ** -0.5, f"{what}: {norm}, eager's {eager_norm}"
        assert maximum <= 3 * eager_maximum + rounding, f"{what}: {maximum}, eager's {eager_maximum}"
        ours.append((norm, maximum))
        eager.append((eager_norm, eager_maximum))
    norm, maximum = (sum(column) for column in zip(*ours))
    eager_norm, eager_maximum = (sum(column) for column in zip(*eager))
    assert norm <= eager_norm
    assert maximum <= 1.1 * eager_maximum
    assert fused >= 30, f"{fused} of 125 calls were fused: this tests something else"


def test_every_kernel_is_right(fused_mlp, device, architecture):
    """Shapes that reach every kernel, with tails, are no worse than eager, in memory that holds NaNs."""
    for function, made, activation in sanitizer_cases.gemms_of(architecture, fused_mlp):
        with reference.poisoned_memory(device):
            result = getattr(fused_mlp, function)(**made, activation=activation)
        assert_right(result, function, made, activation)


@half_dtypes
@pytest.mark.parametrize("rows", [1, 13, 40, 64])
@pytest.mark.parametrize(("function", "sizes"), [("gated_linear", (1096, 520, 0)), ("linear", (2120, 520, 0))])
def test_blocks_of_k_that_are_read_in_pairs(fused_mlp, device, function, sizes, rows, dtype):
    """Weights with rows multiples of 256 bytes apart are right if k ends before or within a pair's second block."""
    made = operands(function, (rows,), sizes, dtype=dtype, device=device)
    wide = {name for name, operand in made.items() if operand.shape[-1] == sizes[0]}
    made.update({name: relaid(made[name], 0, -sizes[0] % 128) for name in wide})
    for n_in in (sizes[0], sizes[0] - 8):
        given = {name: operand[..., :n_in] if name in wide else operand for name, operand in made.items()}
        assert fused_gemms(fused_mlp, function, given, "silu")
        with reference.poisoned_memory(device):
            result = getattr(fused_mlp, function)(**given, activation="silu")
        assert_right(result, function, given)


# Exact repetition


@half_dtypes
@pytest.mark.parametrize(
    ("function", "rows", "sizes"),
    [
        ("linear", 1, (4096, 512, 0)),  # few rows, k split over eight
        ("linear", 600, (4160, 264, 0)),  # few tiles, k split
        ("linear", 1500, (2112, 2048, 0)),
        ("gated_linear", 33, (1032, 200, 0)),
        ("gated_linear", 300, (576, 4104, 0)),
        ("gated_mlp", 7, (1032, 2112, 1032)),
        ("gated_mlp", 777, (768, 3072, 768)),
        ("mlp", 600, (1088, 2112, 264)),
    ],
)
def test_same_bits_every_time(fused_mlp, device, function, rows, sizes, dtype):
    made = operands(function, (rows,), sizes, dtype=dtype, device=device)
    assert fused_gemms(fused_mlp, function, made, "gelu_pytorch_tanh")
    first = getattr(fused_mlp, function)(**made, activation="gelu_pytorch_tanh")
    assert first.isfinite().all()
    different = torch.zeros((), dtype=torch.bool, device=device)
    for _ in range(100):
        with reference.poisoned_memory(device):
            again = getattr(fused_mlp, function)(**made, activation="gelu_pytorch_tanh")
        different |= (again.view(torch.int16) != first.view(torch.int16)).any()
    assert not different


@half_dtypes
@pytest.mark.parametrize("rows", [33, 65, 77, 130, 200, 450])
def test_a_row_has_the_same_bits_wherever_it_lies(fused_mlp, device, architecture, rows, dtype):
    """Equal rows get equal bits. Tiles that would pass the edge are moved inward and overlap; either may store last."""
    if architecture != "sm90":
        pytest.skip("its tiled kernels alone move tiles and shares inward")
    for kernel, (loop, product, *_) in enumerate(gemm_kernels.entries(architecture)):
        if loop != "tiled" or product in gemm_kernels.TRAINING:
            continue
        function = "gated_linear" if product == "Gated" else "linear"
        made = operands(function, (rows,), (1032, 328, 0), dtype=dtype, device=device)
        made["x"] = made["x"][:1].repeat(rows, 1)
        with gemm_kernels.forced(fused_mlp, architecture, kernel), reference.poisoned_memory(device):
            result = getattr(fused_mlp, function)(**made, activation="silu")
        assert torch.equal(result, result[:1].expand_as(result)), gemm_kernels.entries(architecture)[kernel]
        assert_right(result, function, made)


# Sizes past 2^31


@pytest.mark.parametrize(
    ("function", "rows", "n_in", "n_out"),
    [
        ("linear", 40_000, 64, 65_536),
        ("gated_linear", 40_000, 64, 65_536),
        ("linear", 16, 16, 2**27 + 8),
        ("gated_linear", 16, 8, 2**27 + 8),
        ("linear", 3, 4104, 2**19 + 8),
        ("linear", 600, 4160, 2**19 + 8),
    ],
    ids=["out-tiled", "out-tiled-gated", "out-streamed", "out-streamed-gated", "weight-streamed", "weight-tiled"],
)
def test_past_2_to_the_31_elements(fused_mlp, device, function, rows, n_in, n_out):
    """A result or weight past 2^31 elements is written everywhere and right in samples of all regions."""
    free = torch.cuda.mem_get_info()[0]
    if free < 24 * GIB:
        pytest.skip(f"needs 24 GiB of free GPU memory, there are {free / GIB:.0f}")
    assert max(rows, n_in) * n_out > 2**31
    weights = [name for name in shapes(function, (rows,), (n_in, n_out, 0)) if name.endswith("weight")]
    made = {"x": torch.randn(rows, n_in, device=device).bfloat16()}
    for name in weights:
        made[name] = torch.empty(n_out, n_in, dtype=torch.bfloat16, device=device).normal_(std=n_in**-0.5)
    with reference.poisoned_memory(device):
        result = getattr(fused_mlp, function)(**made, activation="silu")
    assert fused_gemms(fused_mlp, function, made, "silu")
    assert not any(part.isnan().any() for part in result.flatten().split(2**29))

    def sample(size):
        ends = torch.tensor([0, 1, size - 2, size - 1], device=device)
        return torch.cat([ends, torch.randint(size, (1000,), device=device)])

    some_rows, some_columns = sample(rows), sample(n_out)
    small = {"x": made["x"][some_rows]} | {name: made[name][some_columns] for name in weights}
    assert_no_worse_than_eager(
        result[some_rows[:, None], some_columns],
        reference.eager(function, small, "silu"),
        reference.exact(function, small, "silu"),
        roundings=8,
    )


# Graphs and streams

ROWS = pytest.mark.parametrize("rows", [1, 40, 300, 2048])


@pytest.mark.parametrize("in_a_block", [False, True])
def test_graph_of_a_thread_whose_products_were_all_ours(fused_mlp, device, in_a_block):
    """In a graph, torch computes the second layer and finds a cuBLAS handle, which it cannot create during capture."""
    made = operands("mlp", (2048,), (768, 3072, 768), dtype=torch.bfloat16, device=device)
    residual_mlp = sys.modules[f"{fused_mlp.__name__}.backends.native"].residual_mlp
    residual = torch.zeros_like(made["x"])

    def call():
        if in_a_block:
            return residual_mlp(
                *made.values(), SILU, residual, 1.0, *(None, None, 0.0, 0), *(None, None, 0.0, 0), False
            )
        return fused_mlp.mlp(**made, activation="silu")

    def captured():
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = call()
        graph.replay()
        return result

    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(captured).result()
    assert_right(result, "mlp", made)


@ROWS
@functions
def test_graph_replays_on_new_inputs(fused_mlp, device, function, rows):
    made = operands(function, (rows,), (768, 3072, 768), dtype=torch.bfloat16, device=device)
    getattr(fused_mlp, function)(**made, activation="silu")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = getattr(fused_mlp, function)(**made, activation="silu")
    for _ in range(3):
        fresh = operands(function, (rows,), (768, 3072, 768), dtype=torch.bfloat16, device=device)
        for name, operand in made.items():
            operand.copy_(fresh[name])
        result.fill_(torch.nan)
        graph.replay()
        assert_right(result, function, made)


@ROWS
def test_order_on_a_stream(fused_mlp, device, rows):
    """Dependent calls on a stream that starts late give the same bits: no kernel runs before its input is ready."""
    layers = [operands("gated_mlp", (rows,), (768, 3072, 768), dtype=torch.bfloat16, device=device) for _ in range(8)]
    start = layers[0].pop("x")
    for layer in layers[1:]:
        del layer["x"]

    def chain(x, wait):
        for layer in layers:
            x = fused_mlp.gated_mlp(x, **layer, activation="silu")
            wait()
        return x

    expected = chain(start, torch.cuda.synchronize)
    assert expected.isfinite().all()
    late = torch.full_like(start, torch.nan)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late.copy_(start)
        result = chain(late, lambda: None)
    stream.synchronize()
    assert torch.equal(result, expected)


# Which kernels run


def kernels_of(run) -> list[str]:
    """The names of the GPU's kernels, including copies and fills, in any order."""
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]


LARGE_AND_SMALL = [
    (1, (4096, 14336, 4096)),
    (16, (768, 3072, 768)),
    (128, (768, 3072, 768)),
    (2048, (4096, 8192, 4096)),
    (8192, (768, 3072, 768)),
]


@functions
def test_one_kernel_for_each_gemm(fused_mlp, device, function, architecture):
    """If all GEMMs of a call are fused, nothing else runs: a whole MLP takes two kernels."""
    checked = 0
    for rows, sizes in LARGE_AND_SMALL:
        made = operands(function, (rows,), sizes, dtype=torch.bfloat16, device=device)
        if fused_gemms(fused_mlp, function, made, "gelu_pytorch_tanh") < gemms_of(function):
            continue
        checked += 1
        names = kernels_of(lambda: getattr(fused_mlp, function)(**made, activation="gelu_pytorch_tanh"))  # noqa: B023
        assert len(names) == gemms_of(function), names
        whose = gemm_kernels.ARCHITECTURES if architecture == "chosen" else (architecture,)
        assert all(any(f"fused_mlp::{each}" in name for each in whose) for name in names), names
    assert checked, "explain calls none of the shapes fused"


def test_sanitizer_cases_reach_every_kernel(fused_mlp, architecture):
    if architecture == "chosen":
        pytest.skip("the kernels are an architecture's")
    (extension,) = (machine.build_folder()).glob("*-cu*/*.so")

    def run():
        for function, made, activation in sanitizer_cases.gemms_of(architecture, fused_mlp):
            getattr(fused_mlp, function)(**made, activation=activation)
        for each, kernel, kind in sanitizer_cases.training_kernels():
            if each != architecture:
                continue
            with gemm_kernels.forced(fused_mlp, architecture, kernel):
                for what, call in sanitizer_cases.training(fused_mlp):
                    if what.startswith(kind):
                        call()

    reached = gemm_kernels.named(kernels_of(run), architecture)
    missed = {
        kernel
        for kernel in gemm_kernels.built(extension, architecture) - reached
        if sanitizer_cases.fits(architecture, kernel)
    }
    assert not missed, f"no case of sanitizer_cases.py runs {sorted(missed)}"


# Fallbacks


@functions
def test_fused_call_is_explained(fused_mlp, device, function):
    """The unmodified call, which the fallbacks below change, is fused."""
    made = operands(function, (10,), (80, 208, 64), dtype=torch.bfloat16, device=device)
    assert fused_gemms(fused_mlp, function, made, "silu") == gemms_of(function)


def repeated(rows):
    return rows[:1].expand_as(rows)


FALLBACKS = {
    "misaligned-x": ("x", misaligned, "unaligned_rows"),
    "misaligned-weight": ("weight", misaligned, "unaligned_rows"),
    "odd-row-stride": ("x", lambda t: torch.cat([t, t[..., :3]], -1)[..., :-3], "unaligned_rows"),
    "repeated-row": ("x", repeated, "unaligned_rows"),
    "column-major-weight": ("weight", lambda t: t.t().contiguous().t(), "column_major_weight"),
    "strided-bias": ("bias", lambda t: torch.stack([t, t], -1)[:, 0], "strided_bias"),
    "odd-features": ("x", lambda t: t, "odd_features"),
    "float32": ("x", lambda t: t, "float32"),
    "no-rows": ("x", lambda t: t[:0], "empty"),
}


@pytest.mark.parametrize(("operand", "change", "refusal"), FALLBACKS.values(), ids=FALLBACKS)
@pytest.mark.parametrize(
    ("function", "activation"),
    [("linear", "silu"), ("linear", "gelu_pytorch_tanh"), ("gated_linear", "silu")],
)
def test_fallback_is_right_and_explained(fused_mlp, device, function, activation, operand, change, refusal):
    dtype = torch.float32 if refusal == "float32" else torch.bfloat16
    sizes = (72, 203, 0) if refusal == "odd_features" else (72, 200, 0)
    made = operands(function, (10,), sizes, dtype=dtype, device=device)
    for name in made:
        if name.endswith(operand):
            made[name] = change(made[name])
    explanation = fused_mlp.explain(getattr(fused_mlp, function), **made, activation=activation)
    assert explanation.implementation == "cuda"
    (part,) = explanation.parts
    assert (part.implementation, part.refusal) == ("torch", refusal)
    in_epilogue = (
        function == "linear"
        and activation == "gelu_pytorch_tanh"
        and refusal not in ("float32", "odd_features")
        and (refusal != "unaligned_rows" or change is repeated)
    )
    assert part.pointwise == ("epilogue" if in_epilogue else "cuda")
    assert str(part) in explanation.reason
    result = getattr(fused_mlp, function)(**made, activation=activation)
    assert_right(result, function, made, activation)


@half_dtypes
def test_epilogue_of_torch_lets_a_nan_through(fused_mlp, device, dtype):
    made = operands("linear", (100,), (72, 200, 0), dtype=dtype, device=device)
    made["weight"] = made["weight"].t().contiguous().t()  # else the fused GEMM would run
    explanation = fused_mlp.explain(fused_mlp.linear, **made, activation="gelu_pytorch_tanh")
    assert explanation.parts[0].pointwise == "epilogue"
    made["x"][4, 3] = torch.nan
    result = fused_mlp.linear(**made, activation="gelu_pytorch_tanh")
    assert result[4].isnan().all()
    others = torch.arange(100, device=device) != 4
    kept = {**made, "x": made["x"][others]}
    expected = reference.eager("linear", kept, "gelu_pytorch_tanh")
    exact = reference.exact("linear", kept, "gelu_pytorch_tanh")
    assert_no_worse_than_eager(result[others], expected, exact, roundings=8)


def test_explain_says_which_gemm_is_not_fused(fused_mlp, device):
    """If only the down projection has an unsupported width, explain names it."""
    made = operands("gated_mlp", (30,), (72, 200, 51), dtype=torch.bfloat16, device=device)
    explanation = fused_mlp.explain(fused_mlp.gated_mlp, **made, activation="silu")
    first, second = explanation.parts
    assert first.fused and (second.layer, second.refusal) == ("down", "odd_features")


@pytest.mark.parametrize(
    ("function", "rows", "sizes", "fused"),
    [
        ("gated_linear", 1000, (16384, 64, 0), 0),  # few tiles, each with a long k
        ("gated_linear", 1000, (2048, 512, 0), 1),
        ("gated_linear", 400, (104, 184, 0), 1),  # rows are not whole sectors
        ("gated_linear", 1400, (2232, 10952, 0), 0),
        ("gated_linear", 690, (3520, 2176, 0), 1),  # estimated to be barely faster
        ("linear", 463, (1728, 17856, 0), 1),  # a short k
        ("mlp", 800, (1536, 9216, 1536), 2),  # few tiles with a long k
        ("linear", 300, (56, 200, 0), 1),
        ("linear", 1500, (8520, 4760, 0), 0),
        ("linear", 6, (27456, 192, 0), 0),
        ("mlp", 55, (128, 21184, 0), 1),
    ],
    ids=str,
)
def test_in_a_graph_the_faster_gemm_is_taken(fused_mlp, device, architecture, function, rows, sizes, fused):
    """Both sides of each rule of the choice take the faster GEMM. Outside a graph, the CPU's time would count too."""
    if architecture != "chosen":
        pytest.skip("forced kernels are compared with nothing")
    made = operands(function, (rows,), sizes, dtype=torch.bfloat16, device=device)
    getattr(fused_mlp, function)(**made, activation="gelu")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = getattr(fused_mlp, function)(**made, activation="gelu")
        assert fused_gemms(fused_mlp, function, made, "gelu") == fused
    graph.replay()
    assert_right(result, function, made, "gelu")


@pytest.mark.parametrize(
    ("rows", "n_in", "n_out", "launched", "captured"),
    [
        (32, 3072, 768, True, True),
        (1500, 3072, 768, True, False),  # tiled and standalone; in an MLP, it may start early
        (8, 16384, 128, True, False),  # few outputs with a long k
        (3000, 1536, 384, True, False),  # more rows than were measured
        (2048, 14336, 4096, False, False),  # the GPU's time decides
    ],
)
def test_plain_products_are_fused_for_the_time_of_whoever_is_waited_for(
    fused_mlp, device, architecture, rows, n_in, n_out, launched, captured
):
    """Short plain products are fused to save CPU time where the CPU launches; in a graph, the GPU's time decides."""
    if architecture != "chosen":
        pytest.skip("forced kernels are compared with nothing")
    made = operands("linear", (rows,), (n_in, n_out, 0), dtype=torch.bfloat16, device=device)
    assert (fused_gemms(fused_mlp, "linear", made, "linear") == 1) == launched
    fused_mlp.linear(**made, activation="linear")
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        fused_mlp.linear(**made, activation="linear")
        assert (fused_gemms(fused_mlp, "linear", made, "linear") == 1) == captured
    result = fused_mlp.linear(**made, activation="linear")
    assert_right(result, "linear", made, "linear")


@pytest.mark.parametrize(
    ("function", "rows", "n_in", "fused"),
    [
        ("linear", 8, 4360, True),
        ("linear", 12, 1000, True),
        ("linear", 48, 4360, False),
        ("linear", 128, 4360, False),
        ("linear", 32, 4304, True),
        ("linear", 48, 4304, True),
        ("linear", 128, 4304, True),  # short
        ("linear", 2048, 4304, False),
        ("gated_linear", 12, 4360, True),
        ("gated_linear", 32, 4360, True),
        ("gated_linear", 128, 4360, False),
        ("gated_linear", 128, 2064, True),
        ("gated_linear", 300, 4304, False),
        ("gated_linear", 300, 1040, True),
    ],
)
def test_rows_in_parts_of_lines(fused_mlp, device, architecture, function, rows, n_in, fused):
    """Rows of whole sectors (4304 elements, 32-byte sectors but not 128-byte lines) and of neither (4360) use the right
    GEMM.

    With whole sectors, short products are fused where the CPU launches them.
    """
    if architecture != "chosen":
        pytest.skip("forced kernels are compared with nothing")
    made = operands(function, (rows,), (n_in, 1024, 0), dtype=torch.bfloat16, device=device)
    assert (fused_gemms(fused_mlp, function, made, "silu") == 1) == fused
    result = getattr(fused_mlp, function)(**made, activation="silu")
    assert_right(result, function, made)
