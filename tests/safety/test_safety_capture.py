"""Fused models compile, export and trace like unfused ones."""

import copy
import io
import sys
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo import compiled_autograd
from torch.fx.experimental.proxy_tensor import make_fx

import tiny_models
from modules import Gated
from safety import KINDS, Blocks, alike, assert_close, assert_same, kinds, llama, outcome, pair, ways, x_of

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
modes = pytest.mark.parametrize("with_grad", [False, True], ids=["no_grad", "grad"])


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()


def compiled(model):
    """Compiles the model in place, which keeps the names of its modules."""
    model.compile(fullgraph=True, backend="aot_eager")
    return model


class Dropping(Blocks):
    """Blocks with dropout, whose mode a compiled model has to follow."""

    def forward(self, x):
        return super().forward(torch.nn.functional.dropout(x, 1.0, self.training))


@ways
def test_compiled(fused_mlp, device, way):
    """A compiled fused model matches eager through switches of training mode and gradients."""
    model, fused = pair(fused_mlp, way, Dropping().to(device))
    compiled(fused)
    x = x_of(device)
    for training in (False, True, False):
        assert_same(model.train(training), fused.train(training), x)
    with torch.inference_mode():
        assert_close(fused(x), model(x))


def test_compiled_before_it_is_fused(fused_mlp, device):
    model, x = Blocks().to(device), x_of(device)
    expected, report = outcome(model, x), None
    compiled(model)
    for _ in range(2):
        assert_close(outcome(model, x), expected)
        report = fused_mlp.fuse_mlps(model)
        assert len(report.fused) == 2
        assert_close(outcome(model, x), expected)
        report.restore()
    assert_close(outcome(model, x), expected)


@ways
def test_changed_after_it_was_compiled(fused_mlp, device, way):
    """Compiled code follows new children, activations and requires_grad; it misses later hooks, fused or not."""
    model, fused = pair(fused_mlp, way, Gated(bias=True).to(device))
    compiled(fused)
    x = x_of(device)
    assert_same(model, fused, x)
    for change in (
        lambda module: setattr(module, "act_fn", torch.nn.ReLU()),
        lambda module: setattr(module, "gate_proj", torch.nn.Linear(32, 88).to(device)),
        lambda module: setattr(module, "down_proj", torch.nn.Sequential(module.down_proj, torch.nn.Tanh())),
        lambda module: module.requires_grad_(False),
    ):
        alike(change, model, fused)
        assert_same(model, fused, x)


def test_no_class_is_learned_while_traced(fused_mlp, device, monkeypatch):
    """Compilation learns no class: Dynamo cannot trace looking up functions by module once other code has done so."""
    model, fused = pair(fused_mlp, "kernelize", Gated(bias=True).to(device))
    shortcut = sys.modules[f"{fused_mlp.__name__}.models.running.shortcut"]
    monkeypatch.setattr(shortcut, "learn", None)
    assert_same(model, compiled(fused), x_of(device))


@pytest.mark.parametrize("shape", [(1,), (), (3, 1)], ids=str)
@pytest.mark.parametrize("index", [0, -1], ids=["first", "last"])
@kinds
def test_compiled_with_a_bias_that_is_broadcast(fused_mlp, device, kind, index, shape):
    """No op takes a bias that is broadcast, so compiled code keeps torch's operations."""
    model = kind(bias=True).to(device)
    layers = [part for part in model.modules() if isinstance(part, torch.nn.Linear)]
    layers[index].bias = torch.nn.Parameter(torch.randn(shape, device=device))
    fused = copy.deepcopy(model)
    fused_mlp.fuse_mlps(fused)
    assert_same(model, compiled(fused), x_of(device, 3))


@ways
@pytest.mark.parametrize(
    ("strict", "with_grad"), [(False, True), (True, False)], ids=["non-strict-grad", "strict-no_grad"]
)
@kinds
def test_exported(fused_mlp, device, way, kind, with_grad, strict):
    """An export with named inputs and dynamic rows needs no op of this package and has right gradients."""
    model, fused = pair(fused_mlp, way, kind(bias=True).to(device))
    name = "x" if kind is Gated else "hidden_states"
    with torch.set_grad_enabled(with_grad):
        program = torch.export.export(
            fused, (x_of(device, 4),), dynamic_shapes={name: {0: torch.export.Dim.DYNAMIC}}, strict=strict
        )
    assert not any("fused_mlp" in str(node.target) for node in program.graph.nodes)
    assert_same(model, program.module(), x_of(device, 9))
    assert_same(model, program.run_decompositions().module(), x_of(device, 2))


@ways
@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
def test_exported_whole(fused_mlp, device, way, strict):
    model, ids = llama(device)
    model, fused = pair(fused_mlp, way, model)
    with torch.no_grad():
        program = torch.export.export(fused, (ids,), kwargs={"use_cache": False}, strict=strict)
        saved = io.BytesIO()
        torch.export.save(program, saved)
        saved.seek(0)
        loaded = torch.export.load(saved).module()
        assert_close(loaded(ids, use_cache=False).logits, model(ids).logits)


@modes
@ways
@kinds
def test_traced(fused_mlp, device, way, kind, with_grad):
    """torch.jit.trace of a fused module handles other row counts and gradients, also after saving and loading."""
    model, fused = pair(fused_mlp, way, kind(bias=True).to(device))
    with torch.set_grad_enabled(with_grad):
        traced = torch.jit.trace(fused, x_of(device, 4))
    saved = io.BytesIO()
    torch.jit.save(traced, saved)
    saved.seek(0)
    assert_same(model, traced, x_of(device, 7))
    assert_same(model, torch.jit.load(saved), x_of(device, 7))


@modes
@pytest.mark.parametrize("name", ["Llama", "BERT", "GPT-2"])
def test_traced_whole(fused_mlp, device, recwarn, name, with_grad):
    """A traced model holds torch operations only, however often torch traces it, as ONNX export does; inside a model,
    sizes are traced too and inputs require gradients."""
    model, inputs = tiny_models.build(name, device)
    model.config.use_cache = False
    fused, ids = copy.deepcopy(model), inputs["input_ids"]
    assert fused_mlp.fuse_mlps(fused).fused
    with torch.set_grad_enabled(with_grad):
        traced = torch.jit.trace(tiny_models.First(fused), ids)
        assert_close(traced(ids), model(ids)[0])
    assert "fused_mlp" not in str(traced.inlined_graph)
    assert not [warning for warning in recwarn if "fused-mlp" in warning.filename or "build/" in warning.filename]


@modes
@pytest.mark.parametrize("kind", [*KINDS, Blocks])
def test_exported_to_onnx(fused_mlp, device, monkeypatch, kind, with_grad):
    """The ONNX export by torch.jit's trace equals the unfused model's byte for byte.

    torch needs the package `onnx` only to look for functions of onnxscript in its output, which has none.
    """
    nothing = SimpleNamespace(graph=SimpleNamespace(node=()))
    monkeypatch.setitem(sys.modules, "onnx", SimpleNamespace(load_model_from_string=lambda _: nothing))
    written, x = [], x_of(device)
    for model in pair(fused_mlp, "fuse_mlps", kind().to(device).eval()):
        file = io.BytesIO()
        with torch.set_grad_enabled(with_grad):
            torch.onnx.export(model, (x,), file, dynamo=False, input_names=["x"], dynamic_axes={"x": {0: "rows"}})
        written.append(file.getvalue())
    assert written[0] == written[1] and b"MatMul" in written[0]


# Every kind of MLP with either memory mode; the forward alternates between eager and compiled.
FORWARDS = [
    (kind, memory, (row + column) % 2 == 1)
    for row, kind in enumerate(KINDS)
    for column, memory in enumerate(("activations", "recompute"))
]


@pytest.mark.parametrize(("kind", "memory", "is_compiled"), FORWARDS)
def test_compiled_autograd(fused_mlp, device, kind, memory, is_compiled):
    """compiled_autograd compiles the backward as one graph, with right gradients."""
    model = kind(bias=True).to(device)
    fused = copy.deepcopy(model)
    assert fused_mlp.fuse_mlps(fused, memory=memory).fused
    x = x_of(device)
    model(x).square().mean().backward()
    call = torch.compile(fused, fullgraph=True, backend="aot_eager") if is_compiled else fused
    loss = call(x).square().mean()
    with compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
        loss.backward()
    gradients = ({name: p.grad for name, p in each.named_parameters()} for each in (fused, model))
    assert_close(*gradients)


@ways
@kinds
def test_recorded_by_fx(fused_mlp, device, way, kind):
    model, fused = pair(fused_mlp, way, kind(bias=True).to(device))
    x = x_of(device, 4)
    with torch.no_grad():
        assert_close(make_fx(fused)(x)(x), model(x))
    assert_same(model, torch.fx.symbolic_trace(fused), x)
