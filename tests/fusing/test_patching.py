"""fuse_mlps on transformers' own models, and on look-alikes that it must leave alone."""

import copy
import dataclasses
import json
import re
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.activations import NewGELUActivation, QuickGELUActivation
from transformers.pytorch_utils import Conv1D

from modules import PROJECTIONS, WRAPPERS, CountingTensor, Gated, OwnBlock, PackedGated, Plain, TransposedPlain
from safety import alike, fuse, ways
from tiny_models import MODELS, build, outcome


def paths(reports):
    return {report.path for report in reports}


def codes(report):
    return tuple(reason.code for reason in report.reasons)


@pytest.mark.parametrize("name", MODELS)
def test_models(fused_mlp, device, name):
    """A fused model keeps its outputs, gradients and state, and the report lists its MLPs."""
    model, inputs = build(name, device)
    before = outcome(model, inputs)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    report = fused_mlp.fuse_mlps(model)
    torch.testing.assert_close(outcome(model, inputs), before, rtol=1e-3, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs)[0], before[0], rtol=1e-3, atol=1e-5)

    class_name, count, pattern = MODELS[name][3]
    # The report also has the ends of attention.
    mlps = [fused for fused in report.fused if not fused.pattern.startswith("linear with residual")]
    assert len(mlps) == count
    for fused in mlps:
        assert fused.class_name == type(model.get_submodule(fused.path)).__name__ == class_name
        assert fused.pattern.partition(" with ")[0] == pattern
        assert (fused.extent, fused.reason) == ("full", "")
        assert fused_mlp.explain(model.get_submodule(fused.path)).implementation == "fused"
    assert all(left.reason for left in report.left)
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", MODELS)
def test_models_in_bfloat16(fused_mlp, device, name):
    model, inputs = build(name, device, torch.bfloat16)
    with torch.no_grad():
        expected = model(**inputs)[0].float()
        report = fused_mlp.fuse_mlps(model)
        got = model(**inputs)[0].float()
    assert report.fused
    assert (got - expected).norm() <= 2e-2 * expected.norm()


@pytest.mark.parametrize("name", ["Phi3", "GPT-2", "BERT"])
def test_a_fused_model_compiles(fused_mlp, device, name):
    torch.compiler.reset()
    model, inputs = build(name, device)
    expected = outcome(model, inputs)
    fused_mlp.fuse_mlps(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    model.zero_grad()
    output = compiled(**inputs)[0]
    output.square().mean().backward()
    torch.testing.assert_close(output.detach(), expected[0], rtol=1e-3, atol=1e-5)
    for path, parameter in model.named_parameters():
        if path in expected[1]:
            torch.testing.assert_close(parameter.grad, expected[1][path], rtol=1e-3, atol=1e-5)


def test_a_projection_that_stays_in_float32(fused_mlp, device):
    """T5, which keeps `wo` in float32 in a 16-bit model and casts before it, is fused in part."""
    model, inputs = build("T5 gated", device, torch.bfloat16)
    for block in model.encoder.block:
        block.layer[1].DenseReluDense.wo.float()
    with torch.no_grad():
        expected = model(**inputs)[0].float()
        report = fused_mlp.fuse_mlps(model)
        got = model(**inputs)[0].float()
    assert {left.extent for left in report.left} == {"partly"}
    assert (got - expected).norm() <= 2e-2 * expected.norm()


class Written(TorchDispatchMode):
    """Counts the elements of new matrices with the width of ``x`` in their shape, as in its projection's weight."""

    def __init__(self, x):
        super().__init__()
        (self.rows, self.in_features), self.elements = x.shape, 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor) and not tensor._is_view():
                is_of_weights = self.in_features in tensor.shape and self.rows not in tensor.shape
                self.elements += tensor.numel() if is_of_weights else 0
        return result


@pytest.mark.parametrize("trained", ["gate_up_proj.weight", "gate_up_proj.bias", "input", "all"])
@pytest.mark.parametrize("rows", [5, 600], ids=["small", "large"])
def test_packed_projections_in_training(fused_mlp, device, rows, trained):
    """Values and gradients match eager's; the packed weight's gradient is not assembled from those of its halves."""
    module = PackedGated(bias=True, sizes=(32, 256, 24)).to(device)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(trained in (name, "all"))
    x = torch.randn(rows, 32, device=device, requires_grad=trained in ("input", "all"))
    leaves = [leaf for leaf in (x, *module.parameters()) if leaf.requires_grad]
    grad = torch.randn(rows, 24, device=device)

    def results():
        output = module(x)
        with Written(x) as written:
            gradients = torch.autograd.grad(output, leaves, grad)
        return [output.detach(), *gradients], written.elements

    expected, of_eager = results()
    assert [fused.pattern for fused in fused_mlp.fuse_mlps(module).fused] == ["packed gated"]
    got, of_fused = results()
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert of_fused <= of_eager


# Reports.


def test_report(fused_mlp, device):
    """The report on BERT lists an MLP and the end of attention per layer; its pooler, a layer and tanh, is no MLP."""
    model, _ = build("BERT", device)
    report = fused_mlp.fuse_mlps(model)
    parts = ("", ".attention.output")
    assert paths(report.fused) == {f"encoder.layer.{i}{part}" for i in range(2) for part in parts}
    assert report.left == [] and report.modules == report.fused
    first, *lines = str(report).splitlines()
    ends = "2 x linear with residual and norm"
    assert first == f"2 of 2 MLPs run in one call each, norm and residual included; {ends}"
    assert [re.split(r" {2,}", line) for line in lines] == [  # similar modules share a line
        ["class", "pattern", "fused", "why not", "modules"],
        ["BertLayer", "plain in two modules with", "yes", "2: encoder.layer.*"],
        ["", "residual and norm"],
        ["BertSelfOutput", "linear with residual and norm", "yes", "2:"],
        ["", "encoder.layer.*.attention.output"],
    ]
    assert json.loads(json.dumps([dataclasses.asdict(module) for module in report.modules]))[-1] == {
        "path": "encoder.layer.1.attention.output",
        "class_name": "BertSelfOutput",
        "pattern": "linear with residual and norm",
        "extent": "full",
        "reasons": [],
    }
    assert first in report._repr_html_() and report._repr_html_().count("<tr>") == 3


def test_a_model_without_mlps(fused_mlp):
    report = fused_mlp.fuse_mlps(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 3)))
    assert report.modules == []
    assert str(report) == "no MLP found"


def test_one_module_at_two_places(fused_mlp, device):
    shared = Gated().to(device)
    model = nn.Sequential(shared, shared)
    x = torch.randn(3, 32, device=device)
    expected = model(x)
    assert len(fused_mlp.fuse_mlps(model).modules) == 1
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("what", [None, "model", [Gated()], {"model": 1}, Gated], ids=lambda what: type(what).__name__)
def test_what_is_no_module(fused_mlp, what):
    with pytest.raises(TypeError, match=rf"(?=.*model)(?=.*Module)(?=.*{type(what).__name__})"):
        fused_mlp.fuse_mlps(what)


@pytest.mark.parametrize("of", ["a function", "another module"])
def test_a_forward_of_its_own(fused_mlp, device, of):
    """A module with an overridden forward is left, also if it is that of another instance with other weights."""
    module, original = Gated().to(device), Gated().to(device).forward
    module.forward = original if of == "another module" else lambda x: 2 * original(x)
    x = torch.randn(2, 32, device=device)
    expected = module(x)
    report = fused_mlp.fuse_mlps(module)
    assert [(reason.code, reason.part) for reason in report.left[0].reasons] == [("own method", "forward")]
    assert torch.equal(module(x), expected)


# Modules that change after they were fused.


@ways
@pytest.mark.parametrize(
    ("kind", "wrapper", "index"),
    [(kind, name, index) for kind in PROJECTIONS for name in WRAPPERS for index in range(len(PROJECTIONS[kind]))],
)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_projection_that_is_more_than_its_weight_is_called(fused_mlp, device, way, kind, wrapper, index, when):
    """A wrapped projection is called, whether wrapped before or after fusing: the extent is decided at each call."""
    module, x, name = kind(bias=True).to(device), torch.randn(3, 32, device=device), PROJECTIONS[kind][index]
    unwrapped = module(x).detach()

    def wrap(module):
        torch.manual_seed(0)
        setattr(module, name, WRAPPERS[wrapper](getattr(module, name)).to(device))
        return module

    plain = wrap(copy.deepcopy(module))
    if when == "before":
        module = fuse(fused_mlp, way, wrap(module))
    else:
        module = fuse(fused_mlp, way, module)
        module(x)
        module = wrap(module)
    with torch.no_grad():
        expected = plain(x).as_subclass(torch.Tensor)
        assert wrapper in ("int8", "tensor subclass") or not torch.allclose(unwrapped, expected, atol=1e-3)
        CountingTensor.products = 0
        torch.testing.assert_close(module(x).as_subclass(torch.Tensor), expected)
        assert bool(CountingTensor.products) == (wrapper == "tensor subclass")
    explanation = fused_mlp.explain(module)
    assert explanation.implementation != "fused"
    if "forward" in vars(module):  # a module left whole has another reason
        assert name in explanation.reason
        assert all(other not in explanation.reason for other in PROJECTIONS[kind] if other != name)


class OwnProduct(nn.Linear):
    """A linear layer of an unknown class."""

    def forward(self, input):
        return input @ self.weight.T + self.bias


def test_what_nothing_can_be_fused_of_is_left(fused_mlp, device):
    """A plain MLP whose first layer has its own product is left, as fusing would only lengthen the call; in a gated one
    the pointwise part is fused."""
    plain, gated = Plain().to(device), Gated(bias=True).to(device)
    plain.fc1, gated.gate_proj = OwnProduct(32, 88).to(device), OwnProduct(32, 88).to(device)
    report = fused_mlp.fuse_mlps(nn.ModuleList([plain, gated]))
    left, pointwise = report.left
    assert (left.path, codes(left), left.reasons[0].part) == ("0", ("called",), "fc1")
    assert (pointwise.path, pointwise.extent) == ("1", "pointwise")
    assert type(plain) is Plain and fused_mlp.explain(plain).implementation == "original"


class WithDropout(Gated):
    def __init__(self, p):
        super().__init__()
        self.dropout = nn.Dropout(p)

    def forward(self, x):
        return self.down_proj(self.dropout(self.act_fn(self.gate_proj(x)) * self.up_proj(x)))


def is_recorded_by_an_op(result):
    nodes = [result.grad_fn]
    for node in nodes:
        nodes += [before for before, _ in node.next_functions if before is not None]
    return any(hasattr(node, "own") for node in nodes)


@pytest.mark.parametrize("least", [0, 1 << 20], ids=["op", "parts"])
def test_dropout_is_kept_in_training(fused_mlp, device, monkeypatch, least):
    """Active dropout is applied; the first half is an op of its own, except for few hidden values on a CPU."""
    bounds = sys.modules[f"{fused_mlp.__name__}.dispatch"].LEAST_RECORDED
    monkeypatch.setitem(bounds.get(torch.float32, {}), "gated_linear", least)
    module = WithDropout(0.5).to(device)
    plain = copy.deepcopy(module)
    assert fused_mlp.fuse_mlps(module).left[0].extent == "partly"
    x = torch.randn(2, 32, device=device, requires_grad=True)
    for _ in range(2):  # the second call knows the activation
        results = alike(lambda each: each.train()(x), module, plain)
        torch.testing.assert_close(*results)
        torch.testing.assert_close(*(torch.autograd.grad(each.sum(), x, retain_graph=True) for each in results))
        assert is_recorded_by_an_op(results[0]) == (least == 0 or device.type == "cuda")
    assert not torch.allclose(module(x), module(x))
    explanation = fused_mlp.explain(module)
    assert explanation.implementation != "fused"
    assert "dropout (active in training)" in explanation.reason
    torch.testing.assert_close(module.eval()(x), plain.eval()(x))
    assert fused_mlp.explain(module).implementation == "fused"


def test_dropout_of_zero_costs_nothing(fused_mlp, device):
    module = WithDropout(0.0).to(device).train()
    fused_mlp.fuse_mlps(module)
    assert fused_mlp.explain(module).implementation == "fused"


def test_functions_as_activations(fused_mlp, device):
    """Functions as activations, such as act_fn = F.silu, are fused."""
    for function in (F.silu, F.gelu, torch.relu, F.relu, torch.sigmoid):
        module = Gated(lambda function=function: function).to(device)
        x = torch.randn(2, 32, device=device)
        expected = module(x)
        assert fused_mlp.fuse_mlps(module).fused
        torch.testing.assert_close(module(x), expected)


def test_after_kernelize(fused_mlp, device):
    """A forward that kernelize set counts as overridden."""
    module = Gated().to(device)
    module.forward = fused_mlp.layers.GatedMLP.forward.__get__(module)
    assert fused_mlp.fuse_mlps(module).fused == []
    assert fused_mlp.explain(module).implementation == "fused"


def doubled(self, input):
    return 2 * input


@pytest.mark.parametrize("kind", [nn.GELU, nn.SiLU, QuickGELUActivation, NewGELUActivation])
def test_code_of_an_activation_replaced_in_place(fused_mlp, device, monkeypatch, kind):
    """A fused module follows new code of an activation, as IPython's autoreload sets it when a source file changes."""
    module, x = Plain(kind).to(device), torch.randn(3, 32, device=device)
    fused_mlp.fuse_mlps(module)
    with torch.no_grad():
        for _ in range(2):
            module(x)
        monkeypatch.setattr(kind.forward, "__code__", doubled.__code__)
        assert torch.equal(module(x), Plain.forward(module, x))
        assert fused_mlp.explain(module).implementation == "original"


def with_dropout():
    return nn.Sequential(nn.Linear(32, 88), nn.GELU(), nn.Dropout(0.1), nn.Linear(88, 32))


@pytest.mark.parametrize(
    ("kind", "make"),
    [(nn.Linear, Plain), (nn.LayerNorm, OwnBlock), (Conv1D, TransposedPlain), (nn.Dropout, with_dropout)],
    ids=lambda each: each.__name__,
)
def test_code_of_a_part_replaced_in_place(fused_mlp, device, monkeypatch, kind, make):
    module, x = make().to(device).eval(), torch.randn(3, 32, device=device)
    fused = copy.deepcopy(module)
    fused_mlp.fuse_mlps(fused)
    with torch.no_grad():
        before, _ = fused(x), fused(x)
        monkeypatch.setattr(kind.forward, "__code__", doubled.__code__)
        expected = module(x)
        assert not torch.allclose(expected, before, atol=1e-3)
        torch.testing.assert_close(fused(x), expected, rtol=1e-4, atol=1e-5)
