"""Modules that torch.nn or their owner changes, before and after fusing."""

import copy
import importlib
from functools import partial, update_wrapper, wraps
from types import MethodType

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from transformers import activations

from modules import PROJECTIONS, Gated, Intermediate, PackedGated, Plain
from safety import Blocks, alike, assert_close, assert_same, fuse, kinds, llama, pair, states, ways, x_of

# Computed weights in place of stored ones: both generations in torch.nn, and pruning.
CHANGES = {
    "weight norm": parametrizations.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "old weight norm": nn.utils.weight_norm,
    "old spectral norm": nn.utils.spectral_norm,
    "pruned at random": lambda projection: prune.random_unstructured(projection, "weight", 0.3),
    "pruned rows": lambda projection: prune.ln_structured(projection, "weight", 0.5, n=2, dim=0),
    "pruned biases": lambda projection: prune.l1_unstructured(projection, "bias", 0.5),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@ways
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize(
    ("kind", "change"),
    [(Gated, change) for change in CHANGES]
    + [
        (kind, change) for kind in (PackedGated, Plain, Intermediate) for change in ("spectral norm", "old weight norm")
    ],
)
def test_computed_weights(fused_mlp, device, way, kind, change, training, when):
    model, fused = (kind(bias=True).to(device).train(training) for _ in range(2))
    fused.load_state_dict(model.state_dict())
    if when == "after":
        fuse(fused_mlp, way, fused)
    alike(lambda module: CHANGES[change](module.get_submodule(PROJECTIONS[kind][-1])), model, fused)
    if when == "before":
        fuse(fused_mlp, way, fused)
    x = x_of(device)
    assert_same(model, fused, x)
    assert "fused" not in states(fused_mlp, fused)
    with torch.no_grad():
        for parameters in zip(model.parameters(), fused.parameters(), strict=True):
            for parameter in parameters:
                parameter.mul_(1.5)
    assert_same(model, fused, x)


@ways
def test_made_permanent(fused_mlp, device, way):
    model, fused = pair(fused_mlp, way, Gated(bias=True).to(device))
    for change, undo in (
        (parametrizations.weight_norm, lambda part: parametrize.remove_parametrizations(part, "weight")),
        (CHANGES["pruned at random"], lambda part: prune.remove(part, "weight")),
    ):
        alike(lambda module, change=change: change(module.up_proj), model, fused)
        alike(lambda module, undo=undo: undo(module.up_proj), model, fused)
        assert states(fused_mlp, fused) == {"fused"}
        assert_same(model, fused, x_of(device))


@ways
def test_cached_parametrizations(fused_mlp, device, way):
    model, fused = pair(fused_mlp, way, Gated().to(device).eval())
    alike(lambda module: parametrizations.spectral_norm(module.gate_proj), model, fused)
    with parametrize.cached(), torch.no_grad():
        x = x_of(device)
        torch.testing.assert_close(fused(x), model(x))


def tie_across_layers(model):
    for mlp in model.mlps[1:]:
        mlp.gate_proj.weight = model.mlps[0].gate_proj.weight
    return model


def tie_inside(model):
    for mlp in model.mlps:
        mlp.up_proj.weight = mlp.gate_proj.weight
    return model


def tie_modules(model):
    for mlp in model.mlps:
        mlp.up_proj = mlp.gate_proj
    return model


@ways
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("tie", [tie_across_layers, tie_inside, tie_modules])
def test_tied_weights(fused_mlp, device, way, when, tie):
    model = Blocks().to(device)
    model, fused = pair(fused_mlp, way, tie(model) if when == "before" else model)
    if when == "after":
        model, fused = tie(model), tie(fused)
    assert states(fused_mlp, fused) == {"fused"}
    for _ in range(2):
        assert_same(model, fused, x_of(device))
        with torch.no_grad():
            for candidate in (model, fused):
                candidate.mlps[0].gate_proj.weight.mul_(2)


class Doubling(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    def forward(self, x):
        return 2 * self.linear(x)


CHILDREN = {
    "wrapped": lambda module: setattr(module, "up_proj", Doubling(module.up_proj)),
    "low rank": lambda module: setattr(module, "gate_proj", nn.Sequential(nn.Linear(32, 4), nn.Linear(4, 88))),
    "other linear": lambda module: setattr(module, "up_proj", nn.Linear(32, 88)),
    "other output": lambda module: setattr(module, "down_proj", nn.Linear(88, 32, bias=False)),
    "narrower": lambda module: [
        setattr(module, name, nn.Linear(*shape))
        for name, shape in (("gate_proj", (32, 40)), ("up_proj", (32, 40)), ("down_proj", (40, 32)))
    ],
    "broadcast gate": lambda module: setattr(module, "gate_proj", nn.Linear(32, 1)),
    "broadcast up": lambda module: setattr(module, "up_proj", nn.Linear(32, 1)),
    "no activation": lambda module: setattr(module, "act_fn", nn.Identity()),
    "other activation": lambda module: setattr(module, "act_fn", nn.Mish()),
    "activation with parameters": lambda module: setattr(module, "act_fn", nn.PReLU()),
    "new weight": lambda module: setattr(module.up_proj, "weight", nn.Parameter(torch.randn(88, 32))),
    "no bias": lambda module: setattr(module.down_proj, "bias", None),
}


def test_a_wider_result_of_one_projection(fused_mlp, device):
    """A wrapped projection may return a wider dtype, to which the products promote."""

    class Wide(Doubling):
        def forward(self, x):
            return super().forward(x).double()

    model, fused = pair(fused_mlp, "fuse_mlps", Gated().to(device))
    for candidate in (model, fused):
        candidate.gate_proj, candidate.down_proj = Wide(candidate.gate_proj), candidate.down_proj.double()
    with torch.no_grad():
        x = x_of(device)
        torch.testing.assert_close(fused(x), model(x))


def doubled(self, x):
    return 2 * type(self).forward(self, x)


PATCHES = {
    "a function": lambda act: setattr(act, "forward", lambda x: 2 * type(act).forward(act, x)),
    "a method": lambda act: setattr(act, "forward", MethodType(doubled, act)),
    "a wrapped method": lambda act: setattr(act, "forward", MethodType(wraps(type(act).forward)(doubled), act)),
    "a partial": lambda act: setattr(act, "forward", update_wrapper(partial(doubled, act), act.forward)),
}


CHILDREN.update({name: lambda module, patch=patch: patch(module.act_fn) for name, patch in PATCHES.items()})


@ways
@pytest.mark.parametrize("change", CHILDREN)
@pytest.mark.parametrize("act", [nn.SiLU, activations.SiLUActivation])
def test_a_child_is_changed(fused_mlp, device, way, change, act):
    """A changed child takes effect, also with an activation class whose forward kernelize may replace by a kernel's."""
    model, fused = pair(fused_mlp, way, Gated(act, bias=True).to(device))
    x = x_of(device)
    before = model(x).detach()
    alike(CHILDREN[change], model, fused)
    model, fused = model.to(device), fused.to(device)
    assert not torch.allclose(model(x), before, atol=1e-3)
    assert_same(model, fused, x)


HELD = {"gelu": F.gelu, "partial": partial(F.gelu, approximate="none"), "module": nn.ReLU()}


@ways
@pytest.mark.parametrize("in_python", [False, True])
@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("act", [activations.GELUActivation, activations.GELUTanh])
def test_an_activation_holds_another_function(fused_mlp, device, way, act, held, in_python):
    """transformers' GELUs call the function that they hold, and follow when another replaces it."""
    model, fused = pair(fused_mlp, way, Gated(lambda: act(in_python)).to(device))
    x = x_of(device)
    if way == "fuse_mlps":
        assert states(fused_mlp, fused) == {"fused"}
    assert_same(model, fused, x)
    for each in (model, fused):
        del each.act_fn.act
        each.act_fn.act = HELD[held]
    assert_same(model, fused, x, tolerance=1e-6)


def test_an_activation_of_a_kernel_that_is_wrapped(fused_mlp, device):
    """A kernel's forward counts as the class's own; a wrapper with its name does not."""
    model, fused = pair(fused_mlp, "fuse_mlps", Gated(activations.SiLUActivation).to(device))
    kernel = fused_mlp.layers.SiLU.forward
    fused.act_fn.forward = MethodType(kernel, fused.act_fn)
    assert states(fused_mlp, fused) == {"fused"}
    assert_same(model, fused, x_of(device))
    for act in (model.act_fn, fused.act_fn):
        act.forward = MethodType(wraps(kernel)(doubled), act)
    assert states(fused_mlp, fused) != {"fused"}
    assert_same(model, fused, x_of(device))


@ways
@pytest.mark.parametrize("act", [nn.SiLU, activations.SiLUActivation])
def test_an_activation_patched_for_all(fused_mlp, device, way, act, monkeypatch):
    model, fused = pair(fused_mlp, way, Gated(act).to(device))
    original = act.forward
    monkeypatch.setattr(act, "forward", lambda self, input: 2 * original(self, input))
    for part in (model.act_fn, fused.act_fn):
        part.__dict__.pop("forward", None)  # kernelize has stored the original forward there
    assert_same(model, fused, x_of(device))


@ways
def test_requires_grad_is_toggled(fused_mlp, device, way):
    model, ids = llama(device)
    model, fused = pair(fused_mlp, way, model)

    def only(names):
        def toggle(model):
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(any(part in name for part in names))

        return toggle

    for names in ([], ["layers.0.mlp.up_proj.weight"], ["mlp.down_proj.bias"], ["norm"], [""]):
        alike(only(names), model, fused)
        assert_same(model, fused, ids)


@ways
@kinds
@pytest.mark.parametrize("name", ["_call_impl", "_compiled_call_impl"])
def test_a_call_of_its_own(fused_mlp, device, way, kind, name):
    """A wrapped or compiled projection is called whenever the module is."""
    model, fused = pair(fused_mlp, way, kind(bias=True).to(device))
    for each in (model, fused):
        layer = each.get_submodule(PROJECTIONS[kind][-1])
        setattr(layer, name, lambda x, call=layer._call_impl: 2 * call(x))
    assert_same(model, fused, x_of(device))
    assert "fused" not in states(fused_mlp, fused)


@ways
@kinds
def test_a_weight_replaced_before_the_backward(fused_mlp, device, way, kind):
    """The gradients use the weights that were multiplied, though replaced since, as in a linear layer."""
    model, fused = pair(fused_mlp, way, kind(bias=True).to(device))
    x, gradients = x_of(device), []
    for each in (model, fused):
        given = x.clone().requires_grad_()
        result = each(given).square().mean()
        for projection in PROJECTIONS[kind]:
            weight = each.get_submodule(projection).weight
            weight.data = weight.data * 2
        gradients.append(torch.autograd.grad(result, [given, *each.parameters()]))
    assert_close(*reversed(gradients))


@ways
def test_hooks_of_tensors(fused_mlp, device, way):
    """Gradient hooks and post-accumulate hooks on parameters fire, and a hook may change the gradient."""
    model, fused = pair(fused_mlp, way, Gated(bias=True).to(device))
    accumulated = []
    for candidate in (model, fused):
        candidate.up_proj.weight.register_hook(lambda grad: 2 * grad)
        candidate.down_proj.weight.register_post_accumulate_grad_hook(accumulated.append)
    assert_same(model, fused, x_of(device))
    assert [id(parameter) for parameter in accumulated] == [id(fused.down_proj.weight), id(model.down_proj.weight)]


@kinds
def test_replicas_of_data_parallel(fused_mlp, device, kind, monkeypatch):
    """Each replica that nn.DataParallel makes uses its own weights, not those of its source device."""
    replication = importlib.import_module("torch.nn.parallel.replicate")
    factors = (2.0, 3.0)  # scale the replicas' weights, in place of devices

    def copies(tensors, devices, detach=False):
        return [[factor * tensor for tensor in tensors] for factor in factors]

    monkeypatch.setattr(replication, "_broadcast_coalesced_reshape", copies)
    model, fused = pair(fused_mlp, "fuse_mlps", nn.Sequential(kind(bias=True)).to(device))
    x, replicas = x_of(device), replication.replicate(fused, [0, 1])
    for factor, replica in zip(factors, replicas, strict=True):
        expected = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in expected.parameters():
                parameter.mul_(factor)
        assert_close(replica(x), expected(x))
        fused.zero_grad()
        replica(x).sum().backward()  # accumulates into the originals
        expected(x).sum().backward()
        gradients = [factor * parameter.grad for parameter in expected.parameters()]
        assert_close([parameter.grad for parameter in fused.parameters()], gradients)
    assert_same(model, fused, x)
