"""The layers through kernels.kernelize, on classes as in models: they give equal results and bypass nothing."""

import copy
import importlib
import inspect
from types import SimpleNamespace

import kernels
import pytest
import torch
import transformers
from kernels import LayerRepository, LocalLayerRepository, Mode, kernelize, use_kernel_mapping
from kernels.layer.layer import _validate_layer
from torch import nn
from transformers import activations

import machine
import project
from modules import Gated, Intermediate, PackedGated, Plain, TanhGelu

MODES = [
    Mode.INFERENCE,
    Mode.TRAINING,
    Mode.INFERENCE | Mode.TORCH_COMPILE,
    Mode.TRAINING | Mode.TORCH_COMPILE,
]


class NoActivationGated(Gated):
    """Has its activation in its forward but not among its attributes."""

    def __init__(self, function):
        super().__init__()
        del self.act_fn
        self.function = [function]

    def forward(self, x):
        return self.down_proj(self.function[0](self.gate_proj(x)) * self.up_proj(x))


class PackedActAndMul(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.act = [act]

    def forward(self, x):
        gate, up = x.chunk(2, dim=-1)
        return self.act[0](gate) * up


# Layer, module with the replaced forward, input width.
CASES = {
    "GatedMLP-silu": ("GatedMLP", lambda: Gated(nn.SiLU), 32),
    "GatedMLP-gelu-bias": ("GatedMLP", lambda: Gated(nn.GELU, bias=True), 32),
    "GatedMLP-relu-odd": ("GatedMLP", lambda: Gated(nn.ReLU, sizes=(17, 31, 7)), 17),
    "GatedMLP-unknown": ("GatedMLP", lambda: Gated(nn.Mish), 32),
    "GeGLUMLP": ("GeGLUMLP", lambda: Gated(TanhGelu), 32),
    "GeGLUMLP-erf": ("GeGLUMLP", lambda: Gated(nn.GELU), 32),  # act_fn decides, not the layer's name
    "GeGLUMLP-no-act_fn": ("GeGLUMLP", lambda: NoActivationGated(nn.GELU(approximate="tanh")), 32),
    "SwiGLUMLP": ("SwiGLUMLP", lambda: Gated(nn.SiLU, bias=True), 32),
    "SwiGLUMLP-no-act_fn": ("SwiGLUMLP", lambda: NoActivationGated(nn.SiLU()), 32),
    "PackedGatedMLP": ("PackedGatedMLP", lambda: PackedGated(nn.SiLU), 32),
    "PackedGatedMLP-bias": ("PackedGatedMLP", lambda: PackedGated(nn.GELU, bias=True), 32),
    "PackedGatedMLP-unknown": ("PackedGatedMLP", lambda: PackedGated(nn.Mish), 32),
    "MLP": ("MLP", lambda: Plain(nn.GELU), 32),
    "MLP-no-bias": ("MLP", lambda: Plain(TanhGelu, bias=False), 32),
    "MLP-unknown": ("MLP", lambda: Plain(nn.Mish), 32),
    "Intermediate": ("Intermediate", lambda: Intermediate(nn.GELU), 32),
    "Intermediate-unknown": ("Intermediate", lambda: Intermediate(nn.Mish), 32),
    "Linear": ("Linear", lambda: nn.Linear(32, 48), 32),
    "Linear-no-bias": ("Linear", lambda: nn.Linear(32, 48, bias=False), 32),
    "GeluAndMul": ("GeluAndMul", lambda: PackedActAndMul(nn.GELU()), 64),
    "GeluTanhAndMul": ("GeluTanhAndMul", lambda: PackedActAndMul(TanhGelu()), 64),
    "SiluAndMul": ("SiluAndMul", lambda: PackedActAndMul(nn.SiLU()), 64),
    "GeLU": ("GeLU", activations.GELUActivation, 32),
    "GeluTanh": ("GeluTanh", activations.GELUTanh, 32),
    "NewGELU": ("NewGELU", activations.NewGELUActivation, 32),
    "FastGELU": ("FastGELU", activations.FastGELUActivation, 32),
    "QuickGELU": ("QuickGELU", activations.QuickGELUActivation, 32),
    "SiLU": ("SiLU", activations.SiLUActivation, 32),
}
cases = pytest.mark.parametrize(("layer", "make", "width"), CASES.values(), ids=CASES)


def kernelized(module, layer, mode=Mode.INFERENCE, repository=None, use_fallback=False):
    """Returns a kernelized copy of the module, of a subclass marked with the layer's name.

    With ``use_fallback`` it may have parts of other classes that kernelize knows.
    """
    module = copy.deepcopy(module)
    kind = type(module)
    own = type(kind.__name__, (kind,), {"__module__": kind.__module__})
    if kind is nn.Linear:  # a layer may read only an exact nn.Linear, so nn.Linear itself is marked during this call
        own = kind
    module.__class__ = own
    kernels.replace_kernel_forward_from_hub(own, f"Test{layer}")
    repository = repository or LayerRepository(project.repo_id(), layer_name=layer, revision=f"v{project.version()}")
    try:
        with use_kernel_mapping({f"Test{layer}": {machine.device_type(): repository}}, inherit_mapping=False):
            return kernelize(module, mode=mode, device=machine.device_type(), use_fallback=use_fallback)
    finally:
        if own is nn.Linear:
            del nn.Linear.kernel_layer_name, nn.Linear.kernel_condition


def assert_equal(module, fused, x):
    """Asserts equal results and gradients."""
    outcomes = []
    for candidate in (module, fused):
        candidate.zero_grad()
        leaf = x.clone().requires_grad_()
        result = candidate(leaf)
        result.square().sum().backward()
        with torch.no_grad():
            without = candidate(x)
        gradients = [parameter.grad for parameter in candidate.parameters()]
        outcomes.append((result.detach(), without, leaf.grad, gradients))
    torch.testing.assert_close(*outcomes, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: str(mode).replace("Mode.", ""))
@cases
def test_kernelize(fused_mlp, device, layer, make, width, mode):
    module = make().to(device)
    fused = kernelized(module, layer, mode)
    assert fused.forward.__func__ is getattr(fused_mlp.layers, layer).forward
    assert_equal(module, fused, torch.randn(3, 7, width, device=device))


@pytest.fixture
def no_long_way(fused_mlp, monkeypatch):
    """Returns a function after which any call that misses the shortcut fails."""
    forwards = importlib.import_module(f"{fused_mlp.__name__}.models.running.forwards")
    return lambda: monkeypatch.setattr(forwards, "fused", None)


@pytest.mark.parametrize(
    ("layer", "make", "bound"),
    [
        ("GatedMLP", lambda: Gated(activations.SiLUActivation), ["act_fn"]),
        ("SwiGLUMLP", lambda: NoActivationGated(nn.SiLU()), []),
    ],
    ids=["activation kernelized", "no activation"],
)
def test_the_short_way_of_a_layer(fused_mlp, device, no_long_way, layer, make, bound):
    """A layer takes the shortcut, also if kernelize knows the activation's class but has no kernel for it."""
    module = make().to(device)
    fused = kernelized(module, layer, use_fallback=True)
    assert [name for name, part in fused.named_children() if "forward" in vars(part)] == bound
    x = torch.randn(3, 32, device=device)
    with torch.no_grad():
        expected = module(x)
        fused(x)  # the first call learns the activation's class
        no_long_way()
        torch.testing.assert_close(fused(x), expected)


def test_the_short_way_with_a_kernel_for_the_activation(fused_mlp, device, no_long_way):
    """An activation kernelized as by transformers' ``use_kernels`` keeps the shortcut; any other forward is called."""
    module = Gated(activations.SiLUActivation).to(device)
    fused = copy.deepcopy(module)
    fused.act_fn = kernelized(fused.act_fn, "SiLU")
    assert fused_mlp.fuse_mlps(fused).fused
    x = torch.randn(3, 32, device=device)
    with torch.no_grad():
        expected = module(x)
        fused(x)
        kernel, fused.act_fn.forward = fused.act_fn.forward, lambda x: 2 * kernel(x)
        torch.testing.assert_close(
            fused(x), module.down_proj(2 * module.act_fn(module.gate_proj(x)) * module.up_proj(x))
        )
        fused.act_fn.forward = kernel
        no_long_way()
        torch.testing.assert_close(fused(x), expected)


@cases
def test_kernelized_and_compiled(fused_mlp, device, layer, make, width):
    torch.compiler.reset()
    module = make().to(device)
    fused = kernelized(module, layer, Mode.TRAINING | Mode.TORCH_COMPILE)
    assert_equal(
        module, torch.compile(fused, fullgraph=True, backend="aot_eager"), torch.randn(3, width, device=device)
    )


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float64], ids=["bfloat16", "float16", "float64"]
)
@cases
def test_dtypes(fused_mlp, device, layer, make, width, dtype):
    module = make().to(device, dtype)
    fused = kernelized(module, layer)
    x = torch.randn(5, width, device=device).to(dtype)
    with torch.no_grad():
        got, expected = fused(x), module(x)
        exact = copy.deepcopy(module).double()(x.double())
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    worst = max(torch.finfo(dtype).eps, 1e-11) * exact.abs().max()  # FastGELU's constant has ten digits
    assert (got - exact).abs().max() <= (expected - exact).abs().max() + worst


def test_a_local_repository(fused_mlp, device):
    module = Gated(TanhGelu).to(device)
    repository = LocalLayerRepository(machine.build_folder(), layer_name="GeGLUMLP")
    assert_equal(module, kernelized(module, "GeGLUMLP", repository=repository), torch.randn(4, 32, device=device))


@cases
def test_the_hub_s_rules(fused_mlp, layer, make, width):
    """A layer follows the Hub's rules: it is pure, and its forward has the parameters of the replaced one."""
    cls = getattr(fused_mlp.layers, layer)
    _validate_layer(check_cls=type(make()), cls=cls, repo=None)
    assert cls.has_backward
    assert cls.can_torch_compile
    assert [name for name, value in vars(cls).items() if inspect.isfunction(value)] == ["forward"]


@cases
def test_explanations(fused_mlp, device, layer, make, width):
    module = make()
    explanation = fused_mlp.explain(kernelized(module.to(device), layer))
    if layer == "Linear":
        reason = "GEMM and bias"
    elif layer.endswith("AndMul"):
        reason = "activation and product"
    elif hasattr(activations, type(module).__name__):
        reason = "activation"
    elif any(isinstance(part, nn.Mish) for part in module.modules()):
        reason = "unknown activation Mish"
    else:
        reason = "GEMMs and activation"
    assert explanation.reason == reason
    assert explanation.implementation == ("original" if "Mish" in reason else "fused")


@pytest.mark.parametrize(
    "layer", ["GatedMLP", "GeGLUMLP", "SwiGLUMLP", "PackedGatedMLP", "MLP", "Intermediate", "Output"]
)
def test_a_layer_alone_says_what_stands_alone(fused_mlp, device, layer):
    layers = fused_mlp.layers
    with pytest.raises(AttributeError, match=f"layers.{layer} has no weights") as caught:
        getattr(layers, layer)()(*[torch.zeros(2, 32, device=device)] * (2 if layer == "Output" else 1))
    assert (f"layers.{layer}Layout(config)" in str(caught.value)) == hasattr(layers, f"{layer}Layout")


def test_a_module_without_a_part_says_which(fused_mlp, device):
    module = kernelized(Gated().to(device), "GatedMLP")
    del module.up_proj
    with pytest.raises(AttributeError, match="'Gated' object has no attribute 'up_proj'"):
        module(torch.zeros(2, 32, device=device))


def test_every_layer_is_tested(fused_mlp):
    layers = {name for name in fused_mlp.layers.__all__ if not name.endswith("Layout")}
    assert layers == {layer for layer, *_ in CASES.values()} | {
        "MegaBlocksMoeMLP",
        "Output",
        "RMSNorm",
    }  # covered by their own tests


LAYOUTS = {
    "GatedMLP": (Gated, "silu", nn.SiLU),
    "GeGLUMLP": (Gated, None, TanhGelu),
    "SwiGLUMLP": (Gated, None, nn.SiLU),
    "PackedGatedMLP": (PackedGated, "gelu", nn.GELU),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(fused_mlp, device, name, bias):
    """A layout made from a config works alone, and shares its state dict with the models' MLPs."""
    kind, hidden_act, act = LAYOUTS[name]
    config = SimpleNamespace(hidden_size=32, intermediate_size=88, mlp_bias=bias, hidden_act=hidden_act)
    layout = getattr(fused_mlp.layers, f"{name}Layout")(config).to(device)
    module = kind(act, bias=bias).to(device)
    module.load_state_dict(layout.state_dict())
    assert_equal(module, layout, torch.randn(2, 5, 32, device=device))
    assert fused_mlp.explain(layout).implementation == "fused"


def test_the_layout_of_a_plain_mlp(fused_mlp, device):
    """The layout of CLIP's and SigLIP's MLP always has biases."""
    layout = fused_mlp.layers.MLPLayout(transformers.SiglipVisionConfig(hidden_size=32, intermediate_size=88)).to(
        device
    )
    module = Plain(TanhGelu).to(device)
    module.load_state_dict(layout.state_dict())
    assert_equal(module, layout, torch.randn(2, 5, 32, device=device))


def test_every_layout_has_a_layer_and_is_tested(fused_mlp):
    """Every layout has the name, by which transformers finds it, and the forward of a layer."""
    layouts = {name.removesuffix("Layout") for name in fused_mlp.layers.__all__ if name.endswith("Layout")}
    assert layouts == {*LAYOUTS, "MLP"}
    for name in layouts:
        layer, layout = (getattr(fused_mlp.layers, full) for full in (name, f"{name}Layout"))
        assert layout.forward is layer.forward
        assert layout.__module__ == layer.__module__


@pytest.mark.parametrize("name", ["GatedMLP", "GeGLUMLP", "SwiGLUMLP", "PackedGatedMLP"])
@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "quick_gelu", "silu", "relu", "relu2", "sigmoid"])
def test_a_layout_has_the_activation_of_its_config(fused_mlp, device, name, activation):
    """A layout applies its config's activation, even one other than its name suggests."""
    config = transformers.LlamaConfig(hidden_size=32, intermediate_size=88, hidden_act=activation)
    layout = getattr(fused_mlp.layers, f"{name}Layout")(config).to(device)
    module = LAYOUTS[name][0](lambda: activations.ACT2FN[activation]).to(device)
    module.load_state_dict(layout.state_dict())
    assert_equal(module, layout, torch.randn(3, 32, device=device))
    assert fused_mlp.explain(layout).implementation == "fused"


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({"hidden_act": "mish"}, "mish"),
        ({"hidden_activation": "mish"}, "mish"),
        ({}, "config must have hidden_act"),
    ],
)
def test_a_layout_wants_an_activation_that_is_known(fused_mlp, named, said):
    config = SimpleNamespace(hidden_size=4, intermediate_size=8, **named)
    for layout in ("GatedMLPLayout", "PackedGatedMLPLayout", "MLPLayout", *(["GeGLUMLPLayout"] if named else [])):
        with pytest.raises(ValueError, match=said):
            getattr(fused_mlp.layers, layout)(config)


def test_a_config_without_mlp_bias_means_no_bias(fused_mlp):
    config = SimpleNamespace(hidden_size=4, intermediate_size=8)
    assert fused_mlp.layers.GeGLUMLPLayout(config).gate_proj.bias is None


# Models for which kernelize finds no layer.


def mapping_for(layer, modes=None, **options):
    """Returns a mapping for the given modes or all, from this package unless the options name another."""
    options = {"layer_name": layer, "revision": f"v{project.version()}"} | options
    repository = LayerRepository(options.pop("repo_id", project.repo_id()), **options)
    return {machine.device_type(): repository if modes is None else dict.fromkeys(modes, repository)}


NO_LAYER = {
    "no mapping": (lambda: {}, Mode.INFERENCE),
    "no such device": (lambda: {"Test": {"xpu": mapping_for("GatedMLP")[machine.device_type()]}}, Mode.INFERENCE),
    "no such mode": (lambda: {"Test": mapping_for("GatedMLP", [Mode.INFERENCE])}, Mode.TRAINING),
    "no such compiled mode": (
        lambda: {"Test": mapping_for("GatedMLP", [Mode.INFERENCE])},
        Mode.INFERENCE | Mode.TORCH_COMPILE,
    ),
}


def marked(module):
    """Returns the module as an instance of a new class that kernelize knows as "Test"."""
    module.__class__ = type("Marked", (type(module),), {"__module__": __name__})
    kernels.replace_kernel_forward_from_hub(type(module), "Test")
    return module


@pytest.mark.parametrize("case", NO_LAYER)
def test_fallback(fused_mlp, device, case):
    """A model keeps its original forward if kernelize may fall back, and kernelize raises if not."""
    make_mapping, mode = NO_LAYER[case]
    module, x = marked(Gated().to(device)), torch.randn(3, 32, device=device)
    expected = module(x)
    with use_kernel_mapping(make_mapping(), inherit_mapping=False):
        with pytest.raises(ValueError, match="Test"):
            kernelize(module, mode=mode, device=device.type, use_fallback=False)
        kernelize(module, mode=mode, device=device.type, use_fallback=True)
    assert fused_mlp.explain(module).implementation == "original"
    assert torch.equal(module(x), expected)
    assert len(fused_mlp.fuse_mlps(module).fused) == 1
    torch.testing.assert_close(module(x), expected)


def test_fallback_where_nothing_can_be_loaded(fused_mlp, device):
    module, x = marked(Gated().to(device)), torch.randn(3, 32, device=device)
    expected = module(x)
    mapping = {"Test": mapping_for("GatedMLP", repo_id="org/not-there")}
    with use_kernel_mapping(mapping, inherit_mapping=False):
        with pytest.raises(FileNotFoundError):
            kernelize(module, mode=Mode.INFERENCE, device=device.type, use_fallback=kernels.KernelizeFallback.DEFAULT)
        kernelize(module, mode=Mode.INFERENCE, device=device.type, use_fallback=kernels.KernelizeFallback.ALL)
    assert torch.equal(module(x), expected)


def test_kernelized_again_for_other_modes(fused_mlp, device):
    """kernelize swaps the layers of each mode as the mode changes, and restores the original."""
    module, x = marked(Gated().to(device)), torch.randn(3, 32, device=device)
    expected = module(x)
    forwards = fused_mlp.layers.GatedMLP.forward, fused_mlp.layers.SwiGLUMLP.forward
    mapping = {
        "Test": {
            machine.device_type(): {
                Mode.INFERENCE: mapping_for("GatedMLP")[machine.device_type()],
                Mode.TRAINING: mapping_for("SwiGLUMLP")[machine.device_type()],
            }
        }
    }
    for mode, forward in ((Mode.INFERENCE, forwards[0]), (Mode.TRAINING, forwards[1]), (Mode.INFERENCE, forwards[0])):
        with use_kernel_mapping(mapping, inherit_mapping=False):
            kernelize(module, mode=mode, device=device.type, use_fallback=False)
        assert module.forward.__func__ is forward
        torch.testing.assert_close(module(x), expected)
    with use_kernel_mapping({}, inherit_mapping=False):
        kernelize(module, mode=Mode.INFERENCE, device=device.type)
    assert torch.equal(module(x), expected)


def test_a_layer_that_is_not_there(fused_mlp, device):
    mapping = use_kernel_mapping({"Test": mapping_for("NoLayer")}, inherit_mapping=False)
    with mapping, pytest.raises(ValueError, match="NoLayer"):
        kernelize(marked(Gated()), mode=Mode.INFERENCE, device=device.type)
