"""Calls past torch's dispatcher: results are the op's, and the op is called wherever the dispatcher has more to do."""

import contextlib
import copy
import functools
import importlib
import os
import threading

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import gemm_kernels
import machine
from modules import Gated, Intermediate, PackedGated, Plain, TanhGelu

DEVICE = machine.device_type()
ON_GPU = DEVICE == "cuda"
ISA = os.environ.get("FUSED_MLP_CPU_ISA", torch.backends.cpu.get_cpu_capability())
pytestmark = pytest.mark.skipif(not ON_GPU and ISA in ("scalar", "DEFAULT"), reason="this CPU runs torch's products")
on_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a GPU")

# Compiled kernels serve all layers of these sizes, on every GPU and CPU.
SIZES = 64, 192, 64
DTYPES = (torch.bfloat16, torch.float16, torch.float32) if ON_GPU else (torch.bfloat16, torch.float32)
SHAPES = ((64,), (1, 64), (2, 2, 64), (1, 1, 300, 64)) if ON_GPU else ((64,), (4, 64), (2, 1, 2, 64))
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


class Around(nn.Module):
    """A block with a norm of its input, or of the sum."""

    def __init__(self, mlp, first=None, last=None):
        super().__init__()
        self.first, self.mlp, self.last = first or nn.Identity(), mlp, last or nn.Identity()


class Before(Around):
    def forward(self, hidden_states):
        return hidden_states + self.mlp(self.first(hidden_states))


class Behind(Around):
    def forward(self, hidden_states):
        return self.last(self.mlp(hidden_states) + hidden_states)


def by_columns(module, *names):
    """Makes weights transposed views, as GPT-2's are; all of them, or only those of the named layers."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear) and (not names or name in names):
            layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
    return module


KINDS = {
    "linear": lambda: Intermediate(sizes=SIZES[:2]),
    "plain": lambda: Plain(sizes=SIZES),
    "plain without biases": lambda: Plain(bias=False, sizes=SIZES),
    "gated": lambda: Gated(sizes=SIZES),
    "gated with biases": lambda: Gated(bias=True, sizes=SIZES),
    "packed": lambda: PackedGated(bias=True, sizes=SIZES),
    "narrowing": lambda: Plain(sizes=(64, 192, 32)),
    "block": lambda: Before(Gated(sizes=SIZES), LlamaRMSNorm(64)),
    "block, packed": lambda: Before(PackedGated(sizes=SIZES), nn.LayerNorm(64)),
    "block without a norm": lambda: Before(Plain(sizes=SIZES)),
    "block, norm of the sum": lambda: Behind(Plain(sizes=SIZES), last=nn.LayerNorm(64)),
}
# Weights that our kernels cannot read. On a GPU torch's GEMM computes one layer or both, with GELU in its epilogue.
BY_COLUMNS = {
    "linear by columns": lambda: by_columns(Intermediate(sizes=SIZES[:2])),
    "plain by columns": lambda: by_columns(Plain(TanhGelu, sizes=SIZES)),
    "plain, the first by columns": lambda: by_columns(Plain(sizes=SIZES), "fc1"),
    "plain, the second by columns": lambda: by_columns(Plain(bias=False, sizes=SIZES), "fc2"),
    "gated by columns": lambda: by_columns(Gated(bias=True, sizes=SIZES)),
    "packed by columns": lambda: by_columns(PackedGated(bias=True, sizes=SIZES)),
    "block, first by columns": lambda: by_columns(Before(Plain(TanhGelu, sizes=SIZES), nn.LayerNorm(64)), "mlp.fc1"),
    "block, second by columns": lambda: by_columns(Behind(Plain(sizes=SIZES), last=nn.LayerNorm(64)), "mlp.fc2"),
}
if ON_GPU:
    KINDS |= BY_COLUMNS
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def ops(tell_ops):
    """Records the names of called ops."""
    taken = []
    tell_ops(lambda name, _: taken.append(name))
    return taken


def fused_pair(fused_mlp, kind, dtype=torch.bfloat16):
    torch.manual_seed(0)
    module = (KINDS | BY_COLUMNS)[kind]().to(DEVICE, dtype).eval().requires_grad_(False)
    for norm in module.modules():
        if isinstance(norm, (nn.LayerNorm, LlamaRMSNorm)):
            nn.init.normal_(norm.weight)
    fused = copy.deepcopy(module)
    assert fused_mlp.fuse_mlps(fused).fused
    for _ in range(2):  # the first call learns the activation's class and creates torch's cuBLAS handle
        fused(x_of(dtype=dtype))
    return module, fused


def x_of(*shape, dtype=torch.bfloat16):
    return torch.randn(shape or (2, 2, 64), device=DEVICE, dtype=dtype)


def by_op(call, *given):
    """The result through torch's dispatcher, which calls take under a profiler."""
    with torch.autograd.profiler.profile():
        return call(*given)


@every_kind
@every_dtype
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_the_result_is_the_ops(fused_mlp, ops, kind, dtype, mode):
    module, fused = fused_pair(fused_mlp, kind, dtype)
    ops.clear()
    for shape in SHAPES:
        x = x_of(*shape, dtype=dtype)
        with mode():
            got = fused(x)
        assert ops == []
        expected = by_op(fused, x)
        assert len(ops) == 1
        ops.clear()
        assert torch.equal(got, expected) and got.stride() == expected.stride()
        assert got.is_inference() == (mode is torch.inference_mode) and not got.requires_grad
        torch.testing.assert_close(got, module(x), rtol=0, atol=5e-2)


def test_functions(fused_mlp, tell_ops):
    """The package's functions give the op's bits without calling it."""
    calls = importlib.import_module(f"{fused_mlp.__name__}.calls")
    names, taken = ("linear", "gated_linear", "mlp", "gated_mlp"), []
    tell_ops(lambda name, _: taken.append(name), calls._COMPILED_OPS)
    x, gate, up, down = x_of(), *(x_of(192, 64) / 8 for _ in range(2)), x_of(64, 192) / 8
    weights = (gate,), (gate, up), (gate, down), (gate, up, down)
    for name, given in zip(names, weights, strict=True):
        function = functools.partial(getattr(fused_mlp, name), activation="silu")
        with torch.no_grad():
            got = function(x, *given)
            assert taken == []
            assert torch.equal(got, by_op(function, x, *given))
        assert taken == [name]
        taken.clear()


@pytest.mark.skipif(ON_GPU, reason="torch's GEMMs read such weights in a direct call")
@pytest.mark.parametrize("kind", BY_COLUMNS)
def test_weights_by_columns_are_read_by_the_op(fused_mlp, ops, kind):
    module, fused = fused_pair(fused_mlp, kind)
    ops.clear()
    x = x_of()
    torch.testing.assert_close(fused(x), module(x), rtol=0, atol=5e-2)
    assert len(ops) == 1


@on_gpu
def test_a_layer_that_torch_makes_the_result_of(fused_mlp, ops):
    """A direct call cannot set the output of torch's GEMM epilogue, so the op runs instead."""
    layer = by_columns(Intermediate(TanhGelu, sizes=SIZES[:2]).to(DEVICE, torch.bfloat16)).requires_grad_(False)
    fused = copy.deepcopy(layer)
    assert fused_mlp.fuse_mlps(fused).fused
    x = x_of()
    torch.testing.assert_close(fused(x), layer(x), rtol=0, atol=5e-2)
    assert ops == ["linear"]


@on_gpu
@pytest.mark.parametrize("architecture", gemm_kernels.ARCHITECTURES)
@pytest.mark.parametrize("features", [64, 72, 200])
def test_every_kernel_that_adds_the_residual(fused_mlp, ops, architecture, features):
    """Each kernel adds a scaled residual of strided rows in a direct call, with the bits of the op's sum kernel."""
    if not gemm_kernels.runs_on(architecture, torch.cuda.get_device_capability()):
        pytest.skip("not on this GPU")
    shortcut = importlib.import_module(f"{fused_mlp.__name__}.models.running.shortcut")
    torch.manual_seed(0)
    layers = x_of(192, 64) / 8, x_of(features, 192) / 8, x_of(192), x_of(features), 4
    nothing = None, None, 0.0, 0, None, None, 0.0, 0, False
    streamed = [
        number
        for number, (loop, product, *_) in enumerate(gemm_kernels.entries(architecture))
        if (loop, product) == ("streamed", "Plain")
    ]
    for rows in (1, 5, 7, 64):
        residual = x_of(rows, 2 * features)[:, features:]
        operands = (x_of(rows, 64), *layers, residual, 0.5, *nothing)
        for kernel in streamed:
            with gemm_kernels.forced(fused_mlp, architecture, kernel):
                got = shortcut.plain.directly(False, operands)
                expected = shortcut._ops["residual_mlp"](*operands)
            assert torch.equal(got, expected), (rows, kernel)
    assert len(streamed) > 5


@every_kind
def test_rows_that_are_apart(fused_mlp, ops, kind):
    """Rows of a wider matrix are read in place; the op copies other layouts."""
    _, fused = fused_pair(fused_mlp, kind)
    ops.clear()
    x = x_of(4, 128)[:, :64]
    got = fused(x)
    assert ops == [] and torch.equal(got, fused(x.contiguous()))
    for turned in (x_of(2, 64, 5).transpose(1, 2), x_of(5, 128)[:, ::2]):
        assert torch.equal(fused(turned), fused(turned.contiguous()))


def negated(module):
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(torch._neg_view(layer.weight.detach()), requires_grad=False)


@every_kind
def test_negative_bits(fused_mlp, ops, kind):
    """Inputs and weights that are lazily negated views go through the op and give right results."""
    module, fused = fused_pair(fused_mlp, kind)
    ops.clear()
    x = torch._neg_view(x_of())
    torch.testing.assert_close(fused(x), module(x), rtol=0, atol=5e-2)
    assert len(ops) == 1
    negated(module), negated(fused)
    x = x_of()
    torch.testing.assert_close(fused(x), module(x), rtol=0, atol=5e-2)


@pytest.mark.parametrize("place", [0, 1, 2, 3, 4, 6, 8, 9, 12, 13])
def test_each_tensor_is_asked_for_its_negative_bit(fused_mlp, place):
    """A negative bit on input, weight, bias, residual, or a norm's weight or bias makes the direct call decline."""
    shortcut = importlib.import_module(f"{fused_mlp.__name__}.models.running.shortcut")
    vectors = [x_of(64) for _ in range(5)]
    layers = x_of(192, 64), x_of(64, 192), x_of(192), vectors[0], 4
    norms = *vectors[1:3], 1e-5, 1, *vectors[3:], 1e-5, 1, True
    operands = [x_of(2, 64), *layers, x_of(2, 64), 1.0, *norms]
    fused_mlp.mlp(operands[0], *layers[:2])  # a thread's first call goes through the op, which creates a cuBLAS handle
    assert shortcut.plain.directly(False, tuple(operands)) is not None
    operands[place] = torch._neg_view(operands[place])
    assert shortcut.plain.directly(False, tuple(operands)) is None


@every_kind
def test_vmap(fused_mlp, kind):
    module, fused = fused_pair(fused_mlp, kind)
    x = x_of(4, 3, 64)
    torch.testing.assert_close(torch.func.vmap(fused)(x), module(x), rtol=0, atol=5e-2)


# With a LayerNorm of the input, tangents are float32.
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("block, packed", "block, first by columns")])
def test_jvp(fused_mlp, kind):
    module, fused = fused_pair(fused_mlp, kind)
    x = x_of(4, 3, 64)
    got, expected = (torch.func.jvp(each, (x,), (torch.ones_like(x),))[1] for each in (fused, module))
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-1)


@every_kind
def test_what_watches_sees_the_op(fused_mlp, kind):
    _, fused = fused_pair(fused_mlp, kind)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        fused(x_of())
    assert any("fused_mlp" in event.name for event in profile.events())


@every_kind
def test_wrong_operands(fused_mlp, kind):
    """Wrong operands raise the same kind of error as in the original module."""
    module, fused = fused_pair(fused_mlp, kind)
    for wrong in (x_of(2, 63), x_of(2, 64, dtype=torch.float64)):
        for each in (module, fused):
            with pytest.raises(RuntimeError):
                each(wrong)
    x = x_of()
    assert torch.equal(fused(x), by_op(fused, x))


@every_kind
def test_changed_weights(fused_mlp, kind):
    """Results follow changes to the parameter, its values, its data, and its layout."""
    module, fused = fused_pair(fused_mlp, kind)
    x = x_of()
    for change in (
        lambda layer: setattr(layer, "weight", nn.Parameter(torch.randn_like(layer.weight) / 8)),
        lambda layer: layer.weight.copy_(torch.randn_like(layer.weight) / 8),
        lambda layer: setattr(layer.weight, "data", torch.randn_like(layer.weight) / 8),
        lambda layer: setattr(layer.weight, "data", layer.weight.data.t().contiguous().t()),
    ):
        for each in (module, fused):
            torch.manual_seed(3)
            for layer in each.modules():
                if isinstance(layer, nn.Linear):
                    with torch.no_grad():
                        change(layer)
            each.requires_grad_(False)
        torch.testing.assert_close(fused(x), module(x), rtol=0, atol=5e-2)


@on_gpu
@every_kind
def test_graphs(fused_mlp, kind):
    """A captured graph replays on new input."""
    _, fused = fused_pair(fused_mlp, kind)
    x, graph = x_of(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fused(x)
    x.copy_(x_of())
    graph.replay()
    torch.testing.assert_close(out, fused(x), rtol=0, atol=5e-2)


def test_threads(fused_mlp):
    """Threads run concurrently, each with its own weights and inputs, and on a GPU its own stream."""
    pairs = [fused_pair(fused_mlp, kind) for kind in ("gated", "plain", "block", "packed")]
    errors = []

    def work(module, fused):
        stream = torch.cuda.stream(torch.cuda.Stream()) if ON_GPU else contextlib.nullcontext()
        with stream, torch.no_grad():
            for _ in range(50):
                x = x_of(3, 64)
                if not torch.allclose(fused(x), module(x), rtol=0, atol=5e-2):
                    errors.append(x)
            if ON_GPU:
                torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=work, args=pair) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_gpu(fused_mlp):
    """Operands on a GPU that is not current work: the op switches to their device."""
    module, fused = (each.to("cuda:1") for each in fused_pair(fused_mlp, "block"))
    x = x_of().to("cuda:1")
    assert torch.cuda.current_device() == 0
    torch.testing.assert_close(fused(x), module(x), rtol=0, atol=5e-2)
