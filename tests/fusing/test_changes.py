"""Every kind of change to a fused module between two calls takes effect at the next call, as in an unfused one."""

import copy
from collections import OrderedDict
from types import MethodType

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

from modules import PROJECTIONS, WRAPPERS, CountingTensor, Gated, Halves, Intermediate, Output, ScaledLinear
from safety import KINDS, WAYS, alike, assert_close, fuse, x_of

cases = pytest.mark.parametrize(
    ("kind", "way"),
    [*((kind, way) for kind in KINDS for way in WAYS), (Halves, "fuse_mlps")],
    ids=lambda case: case if isinstance(case, str) else case.__name__,
)
PARTS = {**PROJECTIONS, Halves: ("intermediate.dense", "output.dense")}


class Halved(nn.Module):
    def forward(self, x):
        return x / 2


class Sine(nn.Module):
    def forward(self, x):
        return torch.sin(x)


def doubled(self, *args):
    return 2 * type(self).forward(self, *args)


def with_forward_of_another(part):
    """Gives a part the forward of another module of its class with other weights or options."""
    other = copy.deepcopy(part)
    for parameter in other.parameters():
        parameter.data.mul_(2)
    if isinstance(other, nn.GELU):
        other.approximate = "tanh" if other.approximate == "none" else "none"
    part.forward = other.forward


def hook(register, result):
    return lambda part: getattr(part, register)(result)


def replaced_hooks(part):
    """Replaces the dictionary of hooks itself."""
    part._forward_hooks = OrderedDict({0: lambda module, args, output: 3 * output})


def new_data(part):
    part.weight.data = 2 * part.weight.data.flip(0)


def with_bias_of(*shape):
    """Sets a bias of a shape that torch broadcasts; None stands for the number of features."""

    def change(part):
        sizes = [part.weight.shape[0] if size is None else size for size in shape]
        # A norm after the layer cancels a bias equal for all features: its gradient is only rounding errors.
        part.bias = nn.Parameter(torch.randn(sizes), requires_grad=None in shape)

    return change


def of_one_row(part):
    part.weight, part.bias = nn.Parameter(part.weight.data[0].clone()), None


def other_strides(part):
    part.weight.data = (2 * part.weight.data).t().contiguous().t()


def assigned(part):
    part.load_state_dict({name: 2 * value for name, value in part.state_dict().items()}, assign=True)


def as_plain_tensor(part):
    weight = 2 * part.weight.detach()
    del part.weight
    part.weight = weight


def of_other_class(part):
    part.__class__ = ScaledLinear


def in_place(part):
    with torch.no_grad():
        part.weight.mul_(2)


def set_in_parameters(part):
    part._parameters["weight"] = nn.Parameter(3 * part.weight.detach())


def of_a_subclass(part):
    part.weight = nn.Parameter((2 * part.weight.detach()).as_subclass(CountingTensor))


def without_bias(part):
    part.bias = None


def with_another_weight(part):
    """Sets an attribute on the instance, which Python finds before the parameters."""
    part.__dict__["weight"] = 3 * part.weight.detach()


def with_another_bias(part):
    part.__dict__["bias"] = 3 * part.bias.detach()


def with_hooked_weight(part):
    part.weight = nn.Parameter(part.weight.detach() * 2)
    part.weight.register_hook(lambda grad: 3 * grad)


# Changes to a projection.
OF_PROJECTIONS = {
    "forward hook": hook("register_forward_hook", lambda module, args, output: 2 * output),
    "forward pre-hook": hook("register_forward_pre_hook", lambda module, args: (2 * args[0],)),
    "backward hook": hook("register_full_backward_hook", lambda module, into, out: (3 * into[0],)),
    "backward pre-hook": hook("register_full_backward_pre_hook", lambda module, out: (3 * out[0],)),
    "other dictionary of hooks": replaced_hooks,
    "forward of its own": lambda part: setattr(part, "forward", MethodType(doubled, part)),
    "forward of its class": lambda part: setattr(part, "forward", part.forward),
    "forward of another": with_forward_of_another,
    "other class": of_other_class,
    "new data": new_data,
    "other strides": other_strides,
    "assigned state": assigned,
    "changed in place": in_place,
    "set behind its back": set_in_parameters,
    "plain tensor": as_plain_tensor,
    "tensor subclass": of_a_subclass,
    "no bias": without_bias,
    "bias of one element": with_bias_of(1),
    "bias of no dimension": with_bias_of(),
    "bias of a row each token": with_bias_of(7, None),
    "bias of a row each token of a batch": with_bias_of(3, 7, None),
    "weight of one dimension": of_one_row,
    "tensor that hides the weight": with_another_weight,
    "tensor that hides the bias": with_another_bias,
    "hook of the weight": with_hooked_weight,
    "frozen": lambda part: part.requires_grad_(False),
    "parametrized": lambda part: parametrize.register_parametrization(part, "weight", Halved()),
    "pruned": lambda part: prune.l1_unstructured(part, "weight", 0.5),
}


def owner(module, path):
    """Returns the module that holds a part, and the part's name in it."""
    path, _, name = path.rpartition(".")
    return module.get_submodule(path), name


# Changes to the module itself; the last projection and the activation are given by name.
OF_MODULES = {
    **{
        name: lambda module, last, act, wrap=wrap: setattr(*owner(module, last), wrap(module.get_submodule(last)))
        for name, wrap in WRAPPERS.items()
    },
    "new projection": lambda module, last, act: setattr(*owner(module, last), Halved()),
    "projection behind its back": lambda module, last, act: owner(module, last)[0]._modules.update(
        {owner(module, last)[1]: Halved()}
    ),
    "projection as an attribute": lambda module, last, act: vars(owner(module, last)[0]).update(
        {owner(module, last)[1]: Halved()}
    ),
    "other activation": lambda module, last, act: setattr(*owner(module, act), nn.ReLU()),
    "unknown activation": lambda module, last, act: setattr(*owner(module, act), Sine()),
    "activation with a hook": lambda module, last, act: module.get_submodule(act).register_forward_hook(
        lambda part, args, output: 2 * output
    ),
    "activation with a forward of its own": lambda module, last, act: setattr(
        module.get_submodule(act), "forward", MethodType(doubled, module.get_submodule(act))
    ),
    "activation with the forward of another": lambda module, last, act: with_forward_of_another(
        module.get_submodule(act)
    ),
    "activation of other class": lambda module, last, act: setattr(module.get_submodule(act), "__class__", Sine),
    "hook": lambda module, last, act: module.register_forward_hook(lambda part, args, output: 2 * output),
    "bfloat16": lambda module, last, act: module.bfloat16(),
    "float64": lambda module, last, act: module.double(),
    "one part in float64": lambda module, last, act: module.get_submodule(last).double(),
}


def outcomes(module, x):
    """Returns the result without autograd, the result and the gradients, or the kind of error."""
    torch.manual_seed(0)
    try:
        with torch.no_grad():
            without = module(x)
        given = x.clone().requires_grad_()
        result = module(given)
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        # A norm at the end makes the unweighted sum of squares of its outputs constant.
        scale = torch.linspace(1, 2, result.shape[-1], device=x.device)
        gradients = torch.autograd.grad(
            (result.float() * scale).square().sum(), [given, *parameters], allow_unused=True
        )
    except (RuntimeError, TypeError) as error:
        return isinstance(error, RuntimeError)
    return [plain(part) for part in (without, result.detach(), *gradients)]


def plain(tensor):
    return None if tensor is None else tensor.as_subclass(torch.Tensor)


def changed_alike(fused_mlp, way, kind, device, change):
    """Asserts that a module and its fused copy agree before and after the same change."""
    model = kind(bias=True).to(device).eval()
    fused = fuse(fused_mlp, way, copy.deepcopy(model))
    x = x_of(device)
    before = outcomes(model, x)
    assert_close(outcomes(fused, x), before)
    alike(change, model, fused)
    model, fused = model.to(device), fused.to(device)
    dtype = next(model.parameters(), x).dtype
    # Behind a norm, a bfloat16 gradient is the small difference of larger terms: eager's own error is up to 0.026.
    x, tolerance = x.to(dtype), 6e-2 if dtype is torch.bfloat16 else 1e-4
    got, expected = outcomes(fused, x), outcomes(model, x)
    if isinstance(expected, bool) or isinstance(got, bool):
        assert got == expected
    else:
        assert_close(got, expected, tolerance)


@cases
@pytest.mark.parametrize("change", OF_PROJECTIONS)
@pytest.mark.parametrize("index", [0, -1], ids=["first", "last"])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_changes_of_a_projection(fused_mlp, device, way, kind, change, index):
    name = PARTS[kind][index]
    changed_alike(fused_mlp, way, kind, device, lambda module: OF_PROJECTIONS[change](module.get_submodule(name)))


@cases
@pytest.mark.parametrize("change", OF_MODULES)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_changes_of_a_module(fused_mlp, device, way, kind, change):
    last = PARTS[kind][-1]
    changed_alike(fused_mlp, way, kind, device, lambda module: OF_MODULES[change](module, last, act_of(module)))


def act_of(module):
    return next(name for name, part in module.named_modules() if isinstance(part, (nn.SiLU, nn.GELU)))


# Changes to the two modules of an MLP.
OF_HALVES = {
    "forward hook": hook("register_forward_hook", lambda module, args, output: 2 * output),
    "forward pre-hook": hook("register_forward_pre_hook", lambda module, args: (2 * args[0], *args[1:])),
    "backward hook": hook("register_full_backward_hook", lambda module, into, out: (3 * into[0], *into[1:])),
    "other dictionary of hooks": replaced_hooks,
    "forward of its own": lambda part: setattr(part, "forward", MethodType(doubled, part)),
    "forward of another": with_forward_of_another,
    "other class": lambda part: setattr(part, "__class__", type(part.__class__.__name__, (Doubled, type(part)), {})),
    "training": lambda part: part.train(),
    "frozen": lambda part: part.requires_grad_(False),
}


class Doubled:
    def forward(self, *args):
        return 2 * super().forward(*args)


@pytest.mark.parametrize("change", OF_HALVES)
@pytest.mark.parametrize("name", ["intermediate", "output"])
def test_changes_of_a_half(fused_mlp, device, change, name):
    changed_alike(fused_mlp, "fuse_mlps", Halves, device, lambda module: OF_HALVES[change](module.get_submodule(name)))


@pytest.mark.parametrize("names", [("intermediate",), ("output",), ("intermediate", "output")], ids=", ".join)
def test_other_modules_in_the_place_of_halves(fused_mlp, device, names):
    def changed(module):
        for name in names:
            other = nn.Linear(32, 88) if name == "intermediate" else nn.Bilinear(88, 32, 32)
            setattr(module, name, other)

    changed_alike(fused_mlp, "fuse_mlps", Halves, device, changed)


@pytest.mark.parametrize("kind", [Halves, Intermediate, Output], ids=lambda kind: kind.__name__)
def test_a_class_patched_later(fused_mlp, device, monkeypatch, kind):
    """A fused MLP follows a later patch of its parent's method or of the forward of a half."""
    name = "feed_forward_chunk" if kind is Halves else "forward"
    original = getattr(kind, name)
    module = Halves().to(device).eval()
    fused = fuse(fused_mlp, "fuse_mlps", copy.deepcopy(module))
    monkeypatch.setattr(kind, name, lambda self, *args: 2 * original(self, *args))
    x = x_of(device)
    assert_close(outcomes(fused, x), outcomes(module, x))


def test_an_option_of_the_activation(fused_mlp, device):
    """A fused MLP follows a later change of GELU's `approximate` attribute."""

    def other_form(module):
        module.act_fn.approximate = "tanh"

    changed_alike(fused_mlp, "fuse_mlps", lambda bias: Gated(nn.GELU, bias), device, other_form)


GLOBAL_STATES = {
    "autocast": lambda device: torch.autocast(device.type, torch.bfloat16),
    "inference mode": lambda device: torch.inference_mode(),
    "no grad": lambda device: torch.no_grad(),
    "default device": lambda device: torch.device("meta"),
}


@cases
@pytest.mark.parametrize("global_state", GLOBAL_STATES)
def test_global_state_that_changes(fused_mlp, device, way, kind, global_state):
    model = kind(bias=True).to(device).eval()
    fused = fuse(fused_mlp, way, copy.deepcopy(model))
    x = x_of(device)
    for around in (GLOBAL_STATES[global_state], GLOBAL_STATES["no grad"], GLOBAL_STATES[global_state]):
        with around(device):
            got, expected = fused(x), model(x)
        assert (got.requires_grad, got.is_inference()) == (expected.requires_grad, expected.is_inference())
        assert_close(got.detach(), expected.detach(), 3e-2)
