"""The ops of the block around an MLP: norms, scale, factor and residual."""

import sys
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

from reference import FLOAT32_ROUNDING
from safety import assert_close

SILU = 4
NONE, LAYER, RMS, RMS_OF_ONE_MORE, SCALE, LAYER_OF_ONE_MORE = range(6)
NORMS = (LAYER, RMS, RMS_OF_ONE_MORE, LAYER_OF_ONE_MORE)
EPS = 1e-6


class Form(NamedTuple):
    first: int = NONE
    last: int = NONE
    norms_sum: bool = False
    factor: float = 1.0


FORMS = {
    "sum": Form(),
    "factor": Form(factor=0.22),
    "scale": Form(last=SCALE),
    "sandwich": Form(RMS_OF_ONE_MORE, RMS_OF_ONE_MORE),
    "all": Form(LAYER, RMS, False, -0.7),
    "all of the sum": Form(RMS, LAYER, True, 0.5),
    **{f"first {kind}": Form(first=kind) for kind in NORMS},
    **{f"of the result {kind}": Form(last=kind) for kind in NORMS},
    **{f"of the sum {kind}": Form(last=kind, norms_sum=True) for kind in NORMS},
}


@pytest.fixture
def ops(fused_mlp):
    native = sys.modules[f"{fused_mlp.__name__}.backends.native"]
    return {2: native.residual_mlp, 3: native.residual_gated_mlp, 1: native.residual_mlp}


@dataclass
class Case:
    """An MLP with one to three weights, and the operands of its block."""

    x: torch.Tensor
    weights: list
    biases: list
    residual: torch.Tensor
    first: tuple  # weight, bias
    last: tuple
    form: Form

    def to(self, dtype):
        def cast(each):
            return None if each is None else each.to(dtype)

        lists = ([*map(cast, each)] for each in (self.weights, self.biases))
        pairs = (tuple(map(cast, each)) for each in (self.first, self.last))
        return Case(cast(self.x), *lists, cast(self.residual), *pairs, self.form)

    def operands(self):
        """Returns the operands, weights first, in their order."""
        return [*self.weights, *self.biases, self.x, self.residual, *self.first, *self.last]

    def arguments(self):
        layers = [*self.weights, *self.biases]
        if len(self.weights) == 1:
            layers = [None, self.weights[0], None, self.biases[0]]
        norms = [
            *(*self.first, EPS if self.form.first else 0.0, self.form.first),
            *(*self.last, EPS if self.form.last else 0.0, self.form.last),
        ]
        return [self.x, *layers, SILU, self.residual, self.form.factor, *norms, self.form.norms_sum]

    def computed(self):
        """Computes the block with torch's functions, as models do."""
        values = normed(self.x, self.form.first, *self.first)
        if len(self.weights) == 3:
            gate, up = (F.linear(values, *each) for each in zip(self.weights[:2], self.biases[:2]))
            values = F.silu(gate) * up
        elif len(self.weights) == 2:
            values = F.silu(F.linear(values, self.weights[0], self.biases[0]))
        values = F.linear(values, self.weights[-1], self.biases[-1])
        if self.form.norms_sum:
            return normed(values * self.form.factor + self.residual, self.form.last, *self.last)
        return normed(values, self.form.last, *self.last) * self.form.factor + self.residual


def normed(values, kind, weight, bias):
    if kind == NONE:
        return values
    if kind == SCALE:
        return values * weight
    if kind == LAYER and all(each is None or each.dim() == 1 for each in (weight, bias)):
        return F.layer_norm(values, values.shape[-1:], weight, bias, EPS)
    if kind in (LAYER, LAYER_OF_ONE_MORE):
        values = F.layer_norm(values, values.shape[-1:], eps=EPS)
        values = values if weight is None else values * (weight + (kind == LAYER_OF_ONE_MORE))
        return values if bias is None else values + bias
    wide = values if values.dtype == torch.float64 else values.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    if weight is None:
        return wide.to(values.dtype)
    if kind == RMS_OF_ONE_MORE:
        wide = wide * (1 + weight.to(wide))
        return (wide if bias is None else wide + bias.to(wide)).to(values.dtype)
    return weight * wide.to(values.dtype)


def made_case(device, dtype, form, layers=3, rows=5, sizes=(32, 96, 32), biased=True, weighted=True):
    n_in, hidden, out = sizes

    def made(*shape, scale=1.0):
        return (scale * torch.randn(shape, device=device)).to(dtype)

    def norm(kind, width):
        weight = made(width) if kind == SCALE or (kind and weighted) else None
        return weight, made(width) if kind in (LAYER, LAYER_OF_ONE_MORE) and weighted else None

    widths = [n_in, *(hidden,) * (layers > 1), out]
    shapes = [(hidden, n_in)] * (layers - 1) + [(out, widths[-2])]
    weights = [made(*shape, scale=max(shape[1], 1) ** -0.5) for shape in shapes]
    biases = [made(shape[0]) if biased else None for shape in shapes]
    residual = made(rows, out, scale=3.0) + 2
    return Case(
        made(rows, n_in, scale=5.0), weights, biases, residual, norm(form.first, n_in), norm(form.last, out), form
    )


# Weights; rows; in, hidden, out: widths for a warp, a block, all registers and more, vectorised or not.
SHAPES = [
    (3, 1, (1024, 400, 1024)),
    (2, 19, (64, 96, 64)),
    (1, 37, (33, 70, 33)),
    (3, 130, (768, 64, 768)),
    (1, 5, (1501, 100, 1501)),
    (2, 4, (9000, 100, 9000)),
    (3, 3, (4096, 40, 4096)),
    (2, 3, (8200, 40, 8200)),
    (1, 2, (24, 8, 20000)),
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_errors_are_no_larger_than_eager_ones(ops, device, dtype, form):
    if device.type == "cpu" and dtype == torch.float16:
        pytest.skip("no kernel")
    torch.manual_seed(0)
    for layers, rows, sizes in SHAPES:
        case = made_case(device, dtype, FORMS[form], layers, rows, sizes, biased=rows != 37, weighted=rows != 5)
        expected, eager = case.to(torch.float64).computed(), case.computed()
        for x in (case.x, case.x.new_zeros(rows, sizes[0] + 8)[:, : sizes[0]].copy_(case.x)):
            case.x = x
            got = ops[layers](*case.arguments())
            error, its = ((each.double() - expected).norm() / expected.norm() for each in (got, eager))
            assert error <= 1.06 * its + 4 * FLOAT32_ROUNDING, (rows, sizes, layers)
            assert got.is_contiguous()


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("rows", [1, 16, 64, 200])
@pytest.mark.parametrize("form", [f"first {RMS}", f"of the sum {LAYER}", "sandwich"])
def test_operands_that_were_just_written(ops, device, form, rows, captured):
    """On a GPU, a block's kernels overlap with preceding ones, and each waits for everything that it reads."""
    if device.type == "cpu" and captured:
        pytest.skip("no graphs")
    torch.manual_seed(0)
    made = [made_case(device, torch.bfloat16, FORMS[form], 3, rows, (1024, 2816, 1024)) for _ in range(3)]
    *sources, target = ([each for each in case.operands() if each is not None] for case in made)
    arguments = made[-1].arguments()

    def call(source):
        for each, value in zip(reversed(target), reversed(source)):  # the first product's weight comes last
            each.copy_(value)
        return ops[3](*arguments)

    expected = [ops[3](*case.arguments()) for case in made[:-1]]
    calls = [lambda source=source: call(source) for source in sources]
    if captured:
        calls = [replayed(call) for call in calls]
    results = [run().clone() for _ in range(10) for run in calls]
    for index, result in enumerate(results):  # a graph may choose torch's GEMM, which rounds differently
        torch.testing.assert_close(result, expected[index % 2], rtol=2e-2, atol=6e-2)


def test_a_weight_that_a_norm_has_just_written(ops, device):
    """The norm of one block lets the next block's norm start early, which lets a GEMM prefetch its weights: not before
    the first norm has written them."""
    torch.manual_seed(0)
    writers = [
        made_case(device, torch.bfloat16, FORMS[f"of the result {RMS}"], 1, 2816, (64, 0, 1024)) for _ in range(3)
    ]
    reader = made_case(device, torch.bfloat16, FORMS[f"first {RMS}"], 3, 16, (1024, 2816, 1024))

    def chain(writer, waits):
        reader.weights[0] = ops[1](*writer.arguments())
        if waits and device.type == "cuda":
            torch.cuda.synchronize()
        return ops[3](*reader.arguments())

    expected = [chain(writer, True) for writer in writers]
    assert all(each.isfinite().all() for each in expected) and not torch.equal(*expected[:2])
    results = [chain(writers[i % 3], False) for i in range(30)]
    assert all(torch.equal(result, expected[i % 3]) for i, result in enumerate(results))


def replayed(call):
    """Captures a call in a CUDA graph, and returns a function that replays it."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    return lambda: (graph.replay(), out)[1]


@pytest.mark.parametrize("form", FORMS)
def test_rows(ops, device, form):
    """NaN and infinity stay in their rows, memory outside rows is not touched, and empty inputs work."""
    torch.manual_seed(0)
    case = made_case(device, torch.float32, FORMS[form], sizes=(64, 96, 40))
    case.x[1, 3], case.residual[2, 7], case.residual[3, 1] = torch.nan, torch.nan, torch.inf
    wide = torch.full((5, 100), torch.nan, device=device)
    wide[:, 30:70] = case.residual
    case.residual = wide[:, 30:70]
    got = ops[3](*case.arguments())
    torch.testing.assert_close(got, case.computed(), equal_nan=True, rtol=1e-4, atol=1e-4)
    assert got[1].isnan().all() and got[2].isnan().any() and got[[0, 4]].isfinite().all()
    torch.library.opcheck(ops[3], case.arguments(), test_utils=("test_schema", "test_faketensor"))
    for rows, n_in, out in ((0, 64, 40), (5, 64, 0), (5, 0, 40)):
        case = made_case(device, torch.float32, FORMS[form], 2, rows, (n_in, 8, out))
        got = ops[2](*case.arguments())
        assert got.shape == (rows, out) and got.isfinite().all()


# Leading dimensions of x, and of the weights and biases of its norms.
SHARED = [
    ((3, 7), (3, 1)),
    ((3, 7), (1, 1)),
    ((3, 7), (1,)),
    ((3, 7), (3, 7)),
    ((3, 1), (3, 1)),
    ((2, 3, 5), (2, 1, 1)),
    ((2, 3, 5), (2, 3, 1)),
    ((2, 3, 5), (1, 1, 1)),
    ((1, 400), (1, 1)),
    ((9, 130), (9, 1)),
]


@pytest.mark.parametrize("kinds", [(LAYER_OF_ONE_MORE, SCALE), (RMS_OF_ONE_MORE, LAYER_OF_ONE_MORE), (LAYER, RMS)])
@pytest.mark.parametrize("features", [96, 33])
@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_features_of_some_rows(ops, device, dtype, wide, shared, features, kinds):
    """Consecutive rows, as of one image, may share weights and biases: chunks of a tensor, possibly float32."""
    if device.type == "cpu" and dtype == torch.float16:
        pytest.skip("no kernel")
    torch.manual_seed(0)
    leading, given = shared
    case = made_case(device, dtype, Form(*kinds), 2, sizes=(features, 64, features))
    case.x, case.residual = (torch.randn(*leading, features, device=device, dtype=dtype) for _ in range(2))
    of_features = torch.randn(*given, 4 * features, device=device).to(torch.float32 if wide else dtype)
    scale, shift, gate, other = of_features.chunk(4, dim=-1)
    case.first, case.last = (scale, shift), (gate, None if kinds[1] == SCALE else other)
    if kinds[0] == LAYER:
        case.first, case.last = (None, shift), (gate, None)
    expected, narrow = case.to(torch.float64).computed(), case.to(dtype)
    error = (ops[2](*case.arguments()).double() - expected).norm() / expected.norm()
    its = (narrow.computed().double() - narrow.to(torch.float64).computed()).norm() / expected.norm()
    assert error <= 1.06 * its + 4 * FLOAT32_ROUNDING


@pytest.mark.parametrize("given", [(1, 7), (3, 1, 1), (7,), (3,), (2, 1), (1, 3, 1)])
def test_features_of_rows_that_are_apart(ops, device, given):
    case = made_case(device, torch.float32, Form(LAYER_OF_ONE_MORE), 2)
    case.x, case.residual = torch.randn(3, 7, 32, device=device), torch.randn(3, 7, 32, device=device)
    case.first = (torch.randn(*given, 32, device=device), None)
    with pytest.raises(RuntimeError, match="weight of first_norm must be"):
        ops[2](*case.arguments())


def test_equal_values_have_no_deviation(ops, device):
    case = made_case(device, torch.float32, Form(last=LAYER, norms_sum=True), 2)
    case.x, case.biases = torch.zeros_like(case.x), [None, None]
    for value in (0.1, 3.1e4, 1e30):
        case.residual = torch.full((5, 32), value, device=device)
        case.last = (None, case.last[1])
        assert torch.equal(ops[2](*case.arguments()), case.last[1].expand(5, 32))


def test_large_values(ops, device):
    """RMSNorm of values with squares that overflow float32 is 0, as in PyTorch."""
    case = made_case(device, torch.float32, Form(first=RMS), 2, sizes=(32, 96, 32))
    case.x = torch.full_like(case.x, 1e30)
    torch.testing.assert_close(ops[2](*case.arguments()), case.computed())


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_sums_are_adjacent(ops, device, form):
    """The result is contiguous even if the residual is not: Whisper's first hidden values are column-major."""
    case = made_case(device, torch.float32, FORMS[form], 2, 14, (64, 96, 40))
    case.x = case.x.view(2, 7, 64)
    for residual in (torch.randn(2, 40, 7, device=device).mT, torch.randn(2, 7, 80, device=device)[..., ::2]):
        case.residual = residual
        got = ops[2](*case.arguments())
        assert got.is_contiguous()
        assert_close(got, case.computed())
        torch.library.opcheck(ops[2], case.arguments(), test_utils=("test_schema", "test_faketensor"))


def test_one_tensor_as_input_and_residual(ops, device):
    for form in (Form(RMS), Form(), Form(LAYER, LAYER)):
        for x in (torch.randn(2, 32, 7, device=device).mT, torch.randn(5, 32, device=device)):
            case = made_case(device, torch.float32, form)
            case.x = case.residual = x
            before = x.clone()
            assert_close(ops[3](*case.arguments()), case.computed())
            assert torch.equal(x, before)


# Changes to a valid case of `all` with in 64 and out 40, and the error's words.
FAULTS = {
    "residual's width": (lambda case: setattr(case, "residual", case.residual[:, :-1]), "residual must have"),
    "residual's dimensions": (lambda case: setattr(case, "residual", case.residual[0]), "residual must have"),
    "more dimensions": (lambda case: setattr(case, "residual", case.residual[None]), "residual must have"),
    "residual's dtype": (lambda case: setattr(case, "residual", case.residual.bfloat16()), "residual differs"),
    "first weight": (lambda case: setattr(case, "first", (case.last[0], None)), "weight of first_norm must be"),
    "last weight": (
        lambda case: setattr(case, "last", (case.last[0].expand(2, 40), None)),
        "weight of last_norm must be",
    ),
    "last bias": (lambda case: setattr(case, "last", (None, case.first[1])), "bias of last_norm must be"),
    "its dtype": (lambda case: setattr(case, "last", (case.last[0].double(), None)), "weight differs in dtype"),
    "no norm": (lambda case: setattr(case, "form", case.form._replace(last=NONE)), "weight of last_norm must be"),
    "no such norm": (lambda case: setattr(case, "form", case.form._replace(last=6)), "last_norm must be"),
    "a negative one": (lambda case: setattr(case, "form", case.form._replace(first=-1)), "first_norm must be"),
    "a scale of x": (lambda case: setattr(case, "form", case.form._replace(first=SCALE)), "a scale must be"),
    "a scale of the sum": (
        lambda case: setattr(case, "form", case.form._replace(last=SCALE, norms_sum=True)),
        "a scale must be",
    ),
    "the second layer": (lambda case: case.weights.__setitem__(1, case.weights[1][:, 1:]), "second layer's weight"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_operands_that_do_not_fit(ops, device, fault):
    alter, words = FAULTS[fault]
    case = made_case(device, torch.float32, FORMS["all"], 2, sizes=(64, 96, 40))
    ops[2](*case.arguments())
    alter(case)
    with pytest.raises(RuntimeError, match=words):
        ops[2](*case.arguments())
