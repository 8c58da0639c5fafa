"""The shortcut takes the commonest calls and passes all others to forwards.fused."""

import contextlib
import copy
import importlib
import sys

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.utils._pytree import tree_leaves
from transformers.activations import ACT2FN, NewGELUActivation
from transformers.pytorch_utils import Conv1D

import machine
from modules import (
    Decoder,
    Gated,
    Halves,
    Intermediate,
    OfFunctions,
    OwnLinears,
    PackedGated,
    Plain,
    SpelledOut,
    TransposedPlain,
)
from safety import alike, assert_close, llama, warmed, x_of


def sequence():
    return nn.Sequential(nn.Linear(32, 88), nn.GELU(), nn.Linear(88, 32))


def sequence_with_dropout():
    return nn.Sequential(nn.LayerNorm(32), *sequence()[:2], nn.Dropout(0.5), nn.Linear(88, 32), nn.Dropout(0.5))


def sequence_of_conv1d():
    return nn.Sequential(Conv1D(88, 32), nn.GELU(), Conv1D(32, 88))


def of_own_function():
    """Holds the activation as an attribute, not as a child, as torch's decoder layer does."""
    return Plain(lambda: F.gelu)


KINDS = [
    *(Decoder, Gated, Intermediate, OfFunctions, OwnLinears, PackedGated, Plain, SpelledOut),
    *(TransposedPlain, of_own_function, sequence, sequence_of_conv1d, sequence_with_dropout),
]


@pytest.fixture
def long_way(fused_mlp, monkeypatch):
    """Collects the patterns of the calls that reach forwards.fused."""
    forwards = importlib.import_module(f"{fused_mlp.__name__}.models.running.forwards")
    taken, fused = [], forwards.fused

    def spy(pattern, *args):
        taken.append(str(pattern))
        return fused(pattern, *args)

    monkeypatch.setattr(forwards, "fused", spy)
    return taken


def fused_pair(fused_mlp, module, device):
    return warmed(fused_mlp, module.to(device).eval(), x_of(device))


@contextlib.contextmanager
def default_device():
    """Sets a default device: a mode that sees every torch function, but changes only those that create tensors."""
    with torch.no_grad(), torch.device("meta"), torch.device(machine.device_type()):
        yield
        assert torch._C._len_torch_function_stack() == 2 and torch._C._is_torch_function_mode_enabled()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, default_device])
@pytest.mark.parametrize("kernelized", [False, True])
def test_it_is_taken_in_inference(fused_mlp, device, long_way, kind, mode, kernelized):
    """Inference takes the shortcut, also with forwards that kernelize bound to modules that it has no kernel for."""
    module, fused = fused_pair(fused_mlp, kind(), device)
    for part in fused.children() if kernelized else ():
        part.forward = part.forward
    long_way.clear()
    x = x_of(device)
    with mode():
        assert_close(fused(x), module(x))
    assert long_way == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_is_taken_under_autocast(fused_mlp, device, long_way, kind, dtype):
    """The op gets operands that autocast keeps as they are, and others cast as autocast's products cast them."""
    module, fused = fused_pair(fused_mlp, kind(), device)
    module, fused = module.to(dtype), fused.to(dtype)
    long_way.clear()
    x = x_of(device).to(dtype)
    with torch.no_grad():
        for enabled in (True, False):
            with torch.autocast(device.type, torch.bfloat16, enabled=enabled):
                got, expected = fused(x), module(x)
            assert [each.dtype for each in tree_leaves(got)] == [each.dtype for each in tree_leaves(expected)]
            assert_close(got, expected, tolerance=3e-2)
    assert long_way == []


class Cubic(nn.Module):
    def forward(self, x):
        return 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x**3)))


class GatedAlone(Gated):
    def forward(self, x):
        return self.act_fn(self.gate_proj(x)) * self.up_proj(x)


ACTS = {name: ACT2FN[name] for name in ("gelu_new", "gelu_accurate", "gelu_fast", "gelu_pytorch_tanh", "relu2", "silu")}
ACTS |= {"held": transformers.activations.GELUTanh(use_gelu_tanh_python=True), "written out": Cubic()}


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("kind", [Intermediate, GatedAlone])
def test_a_layer_alone_has_autocasts_dtype(fused_mlp, device, kind, act):
    """Autocast on a GPU computes torch.pow and torch.square in float32, and what follows them."""
    module, fused = fused_pair(fused_mlp, kind(lambda: copy.deepcopy(ACTS[act])), device)
    for dtype in (torch.float32, torch.bfloat16):
        module, fused, x = module.to(dtype), fused.to(dtype), x_of(device).to(dtype)
        with torch.autocast(device.type, torch.bfloat16):
            assert_close(fused(x), module(x), tolerance=3e-2)
            with torch.no_grad():
                assert_close(fused(x), module(x), tolerance=3e-2)


def test_compiled_code_asks_for_a_layer_alone(fused_mlp, device, long_way, monkeypatch):
    """Compiled code passes on a layer whose activation autocast may widen, and takes MLPs, whose last layer casts."""
    shortcut = importlib.import_module(f"{fused_mlp.__name__}.models.running.shortcut")
    settings = dict(shortcut._settings)
    try:
        *others, _ = settings["autocast"]
        shortcut.plain.configure(settings | {"autocast": (*others, lambda act, code: code == 4)})
        for kind, act, way in ((Intermediate, nn.SiLU, ["linear"]), (Intermediate, nn.GELU, []), (Plain, nn.SiLU, [])):
            _, fused = fused_pair(fused_mlp, kind(act), device)
            long_way.clear()
            with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
                fused.bfloat16()(x_of(device).bfloat16())
            assert long_way == way
    finally:
        shortcut.plain.configure(settings)


@pytest.mark.parametrize("rows", [1, 3])
def test_autocast_of_halves_of_unequal_sizes(fused_mlp, device, rows):
    """A single value of up broadcasts to all of gate; other sizes raise the original's error."""
    module, fused = fused_pair(fused_mlp, Gated(), device)
    module.up_proj = nn.Linear(32, rows).to(device)
    fused.up_proj = copy.deepcopy(module.up_proj)
    x = x_of(device)
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
        if rows == 1:
            assert_close(fused(x), module(x), tolerance=3e-2)
        else:
            for each in (fused, module):
                with pytest.raises(RuntimeError, match="must match the size of tensor"):
                    each(x)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_the_option_of_gelu_is_read_at_each_call(fused_mlp, device, approximate):
    parts = nn.Linear(32, 88), nn.GELU(approximate=approximate), nn.Linear(88, 32)
    module = Plain()
    module.fc1, module.activation_fn, module.fc2 = parts
    module, fused = fused_pair(fused_mlp, module, device)
    other = "tanh" if approximate == "none" else "none"
    module.activation_fn.approximate = fused.activation_fn.approximate = other
    x = 3 * x_of(device)
    with torch.no_grad():
        for _ in range(2):
            assert_close(fused(x), module(x), tolerance=1e-6)


@pytest.mark.parametrize("rows", [2, 1, 3], ids=["even", "one", "odd"])
def test_halves_of_a_packed_projection(fused_mlp, device, rows):
    """A packed projection with an odd number of rows, which has no halves, raises the original's error."""
    module, fused = fused_pair(fused_mlp, PackedGated(bias=True, sizes=(32, 1, 32)), device)
    for each in (module, fused):
        each.gate_up_proj = nn.Linear(32, rows).to(device)
        torch.manual_seed(0)
        nn.init.normal_(each.gate_up_proj.weight), nn.init.normal_(each.gate_up_proj.bias)
    outcomes = []
    with torch.no_grad():
        for each in (fused, module):
            try:
                torch.manual_seed(1)
                outcomes.append(each(x_of(device)))
            except (RuntimeError, ValueError) as error:
                outcomes.append(type(error))
    assert outcomes[0] == outcomes[1] if isinstance(outcomes[1], type) else torch.allclose(*outcomes, atol=1e-5)


@pytest.mark.parametrize("kind", [Gated, PackedGated, Plain])
def test_it_is_taken_under_autograd(fused_mlp, device, long_way, kind):
    module, fused = fused_pair(fused_mlp, kind(), device)
    long_way.clear()
    x, outcomes = x_of(device), []
    for candidate in (fused, module):
        output = candidate(x)
        output.square().sum().backward()
        outcomes.append([output.detach(), *(parameter.grad for parameter in candidate.parameters())])
    assert_close(*outcomes)
    assert long_way == []


@pytest.fixture
def pays_from(fused_mlp, device, monkeypatch):
    """Returns a function that sets the least size, in this device's measure, at which a trained MLP becomes an op."""
    dispatch = importlib.import_module(f"{fused_mlp.__name__}.dispatch")

    def set_least(least, gated, in_eval, dtype=torch.float32):
        if device.type == "cuda":
            monkeypatch.setitem(dispatch.LEAST_WORK, (gated, in_eval), least)
        else:
            monkeypatch.setitem(dispatch.LEAST_RECORDED[dtype], "gated_mlp" if gated else "mlp", least)

    return set_least


@pytest.mark.parametrize("kind", [Gated, PackedGated, Plain, Halves, sequence])
@pytest.mark.parametrize("in_eval", [False, True])
def test_small_ones_under_autograd_run_as_they_were_written(fused_mlp, device, pays_from, kind, in_eval):
    gated = kind in (Gated, PackedGated)
    module, fused = fused_pair(fused_mlp, kind(), device)
    module, fused = module.train(not in_eval), fused.train(not in_eval)
    x = x_of(device).requires_grad_()
    op = fused(x)
    for other in {(False, False), (False, True), (True, False), (True, True)} - {(gated, in_eval)}:
        if device.type == "cuda" or other[0] != gated:
            pays_from(1 << 40, *other)
    if kind in (Gated, PackedGated, Plain):  # bounds of other kinds and modes do not apply
        assert type(fused(x).grad_fn) is type(op.grad_fn)
    pays_from(1 << 40, gated, in_eval)
    output, expected = alike(lambda each: each(x), fused, module)  # the same seed for dropout
    assert torch.equal(output, expected)
    assert type(output.grad_fn) is type(expected.grad_fn)
    if kind is not Halves:  # Halves end with a norm
        assert type(op.grad_fn) is not type(expected.grad_fn)


def test_a_small_call_is_remembered(fused_mlp, device, pays_from):
    """Larger calls and calls in another mode are judged anew; the same call is judged anew now and then, and once a
    module is fused."""
    _, fused = fused_pair(fused_mlp, Plain(), device)
    rows = {count: torch.randn(count, 32, device=device).requires_grad_() for count in (3, 9)}
    fused.train()
    op = type(fused(rows[3]).grad_fn)

    def is_op(count):
        return type(fused(rows[count]).grad_fn) is op

    pays_from(6 * 88 * (32 if device.type == "cuda" else 1), False, False)
    assert [is_op(count) for count in (3, 9, 3)] == [False, True, False]
    pays_from(0, False, False)
    assert not is_op(3)
    fused.eval()
    assert is_op(3)
    fused.train()
    assert any(is_op(3) for _ in range(100))
    pays_from(1 << 40, False, False)
    assert not is_op(3)
    pays_from(0, False, False)
    fused_mlp.fuse_mlps(Plain().to(device))
    assert is_op(3)


def test_an_mlp_in_a_small_block_computes_its_activation_at_once(fused_mlp, device, monkeypatch, pays_from):
    """The block is left, but torch computes GPT-2's GELU, which its class spells out, in one operation."""
    config = transformers.GPT2Config(n_embd=32, n_head=4, n_layer=2, vocab_size=64, n_positions=16)
    model = transformers.GPT2Model(config).to(device)
    fused_mlp.fuse_mlps(model)
    shortcut = sys.modules[f"{fused_mlp.__name__}.models.running.shortcut"]
    monkeypatch.setitem(shortcut.dispatch.LEAST_WORK, (False, False), 1 << 40)
    pays_from(1 << 40, False, False)
    ids, called = torch.randint(64, (1, 5), device=device), []
    model(ids)  # the first call learns the activation's class
    mlp = shortcut.reference.mlp
    monkeypatch.setattr(shortcut.reference, "mlp", lambda *given: (called.append(given), mlp(*given))[1])
    model.train()(ids)
    assert len(called) == 2


@pytest.mark.parametrize("kind", [Plain, Gated])
def test_a_first_layer_with_a_hook_is_checked_in_compiled_code_only(fused_mlp, device, monkeypatch, kind):
    module, fused = fused_pair(fused_mlp, kind(), device)
    shortcut, called = sys.modules[f"{fused_mlp.__name__}.models.running.shortcut"], []
    monkeypatch.setattr(shortcut, "_has_known", lambda *_: pytest.fail("asked in Python"))
    for model in (module, fused):
        next(model.children()).register_forward_hook(lambda *_: called.append(True))
    with torch.no_grad():
        assert_close(*alike(lambda each: each(x_of(device)), fused, module))
    assert len(called) == 2


@pytest.mark.parametrize("kind", [Plain, Gated])
def test_a_dtype_that_no_op_supports_is_seen_in_compiled_code_only(fused_mlp, device, monkeypatch, kind):
    module, fused = (each.double() for each in fused_pair(fused_mlp, kind(), device))
    shortcut = sys.modules[f"{fused_mlp.__name__}.models.running.shortcut"]
    monkeypatch.setattr(shortcut, "_has_known", lambda *_: pytest.fail("asked in Python"))
    x = x_of(device).double()
    with torch.no_grad():
        assert torch.equal(fused(x), module(x))


def called_within(names, call):
    """Returns the names of Python functions called inside functions of the given names."""
    found, open_frames = [], []

    def see(frame, event, _):
        if event == "call":
            found.extend([frame.f_code.co_name] if open_frames else [])
            open_frames.extend([frame] if frame.f_code.co_name in names else [])
        elif event == "return" and open_frames[-1:] == [frame]:
            open_frames.pop()

    sys.setprofile(see)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def test_a_small_block_is_left_at_a_look(fused_mlp, device, pays_from):
    """Under autograd, a small block is left by the size and dtype of x alone: no function is called to decide."""
    layer = llama(device)[0].model.layers[0].eval()
    assert fused_mlp.fuse_mlps(layer).fused
    x = torch.randn(1, 3, layer.hidden_size, device=device, requires_grad=True)
    rotary = [torch.ones(1, 3, layer.self_attn.head_dim, device=device)] * 2
    asked = {}
    for least in (0, 1 << 40):
        pays_from(least, True, True)
        asked[least] = called_within({"block"}, lambda: layer(x * 1, position_embeddings=rotary))
    assert asked[0] and not asked[1 << 40]


@pytest.mark.parametrize("is_left", [False, True])
def test_a_layer_with_its_mlp_inline_is_left_by_the_size_of_that(fused_mlp, device, pays_from, is_left):
    """A layer with an inline MLP is left by that MLP's 88 hidden values, not by four times its 32 inputs."""
    layer = Decoder().to(device).eval()
    assert fused_mlp.fuse_mlps(layer).fused
    x = x_of(device).requires_grad_()
    work = x.numel() // 32 * 88 * (32 if device.type == "cuda" else 1)
    for gated in (False, True):
        pays_from(work + is_left, gated, True)
    assert ("block" not in called_within({"forward"}, lambda: layer(x))) == is_left


@pytest.mark.parametrize("gated", [False, True])
def test_bounds_are_of_the_work(fused_mlp, device, pays_from, gated):
    """The bound applies to the work: 88 hidden values for each of 21 rows, times 32 inputs on a GPU."""
    module, fused = fused_pair(fused_mlp, Gated() if gated else Plain(), device)
    work = 21 * 88 * (32 if device.type == "cuda" else 1)
    x = x_of(device).requires_grad_()
    written = type(module(x).grad_fn)
    for least, expected in ((work, False), (work + 1, True)):
        pays_from(least, gated, True)
        assert (type(fused(x).grad_fn) is written) == expected


@pytest.mark.parametrize("kind", [Gated, PackedGated, Plain, Halves])
def test_small_ones_for_which_autocast_casts_run_as_they_were_written(fused_mlp, device, pays_from, monkeypatch, kind):
    shortcut = importlib.import_module(f"{fused_mlp.__name__}.models.running.shortcut")
    gated = kind in (Gated, PackedGated)
    module, fused = fused_pair(fused_mlp, kind(), device)
    x = x_of(device)
    pays_from(1 << 40, gated, True, torch.bfloat16)
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
        with monkeypatch.context() as nothing_else:
            nothing_else.setattr(shortcut, "fused", None)
            assert torch.equal(fused(x), module(x))
        pays_from(0, gated, True, torch.bfloat16)
        assert_close(fused(x), module(x), tolerance=3e-2)


def test_an_activation_of_many_operations_is_not_left(fused_mlp, device, pays_from):
    pays_from(1 << 40, False, True)
    for act, written in ((NewGELUActivation, False), (nn.GELU, True)):
        module, fused = fused_pair(fused_mlp, Plain(act), device)
        x = x_of(device).requires_grad_()
        assert torch.equal(fused(x), module(x)) == written
        assert_close(fused(x).detach(), module(x).detach())


@pytest.mark.parametrize("act", [nn.GELU, nn.ReLU])
def test_one_layer_under_autograd(fused_mlp, device, long_way, act):
    """A single layer runs as its source, except as an op on a CPU if eager keeps the activation's input."""
    module, fused = fused_pair(fused_mlp, Intermediate(act), device)
    long_way.clear()
    x = x_of(device)
    output, expected = fused(x), module(x)
    if device.type == "cpu" and act is nn.GELU:
        assert hasattr(output.grad_fn, "own")
        assert_close(output.detach(), expected.detach())
    else:
        assert torch.equal(output, expected)
        assert type(output.grad_fn) is type(expected.grad_fn)  # torch's own node
    assert long_way == []


@pytest.mark.parametrize(
    ("kind", "first", "part"),
    [
        *((TransposedPlain, "c_fc", part) for part in ("c_fc", "c_proj", "dropout")),
        *((OwnLinears, "fc1", part) for part in ("fc1", "fc2")),
    ],
)
def test_layers_of_other_classes_that_change(fused_mlp, device, kind, first, part):
    """Layers of other classes follow a new weight, a hook and dropout in training."""
    module, fused = fused_pair(fused_mlp, kind(), device)
    x = x_of(device)
    for each in (module, fused):
        getattr(each, part).register_forward_hook(lambda part, given, out: 3 * out)
    with torch.no_grad():
        assert_close(fused(x), module(x))
        for each in (module, fused):
            getattr(each, first).weight = nn.Parameter(2 * getattr(each, first).weight)
            each.train()
        assert_close(*alike(lambda each: each(x), fused, module))


def test_layers_that_add_a_bias_by_themselves(fused_mlp, device):
    """A layer that adds its bias itself, even one set later, is called: under autocast the bias decides the dtype."""
    module, fused = fused_pair(fused_mlp, OwnLinears(), device)
    x = x_of(device)
    for each in (module, fused):
        for layer in (each.fc1, each.fc2):
            layer.bias = nn.Parameter(torch.linspace(-1, 1, layer.out_features, device=device))
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
        assert_close(fused(x), module(x), tolerance=3e-2)
        assert fused(x).dtype == module(x).dtype == torch.float32
    report = fused_mlp.fuse_mlps(nn.ModuleList([OwnLinears(bias=True).to(device)]))
    assert not report.fused
    assert "FalconLinear" in str(report)


class Finding(Plain):
    """Looks up one of its children in its own way."""

    def __getattr__(self, name):
        found = super().__getattr__(name)
        return (lambda x: 2 * found(x)) if name == "fc2" else found


def test_attributes_are_what_the_class_finds(fused_mlp, device):
    module, fused = Finding().to(device).eval(), Finding().to(device).eval()
    fused.load_state_dict(module.state_dict())
    fused_mlp.fuse_mlps(fused)
    with torch.no_grad():
        for x in (x_of(device), x_of(device)):
            assert_close(fused(x), module(x))


class Product(nn.Module):
    """A product with a gate from elsewhere."""

    def __init__(self):
        super().__init__()
        self.proj, self.act = nn.Linear(32, 32), nn.SiLU()

    def forward(self, x, gate):
        return self.proj(self.act(gate) * x)


def test_a_small_product_is_left(fused_mlp, device, monkeypatch):
    """A small product is left: one kernel for two operations saves less than its call costs."""
    dispatch = importlib.import_module(f"{fused_mlp.__name__}.dispatch")
    pointwise = importlib.import_module(f"{fused_mlp.__name__}.models.running.pointwise")
    monkeypatch.setitem(dispatch.LEAST_PRODUCT, torch.float32, 65)
    taken, act_and_mul = [], pointwise.calls.act_and_mul
    monkeypatch.setattr(
        pointwise.calls, "act_and_mul", lambda gate, *rest: (taken.append(len(gate)), act_and_mul(gate, *rest))[1]
    )
    module = Product().to(device)
    fused = copy.deepcopy(module)
    assert fused_mlp.fuse_mlps(fused).fused
    for rows in (2, 3):
        x, gate = torch.randn(rows, 32, device=device), torch.randn(rows, 32, device=device)
        with torch.no_grad():
            assert_close(fused(x, gate), module(x, gate))
    assert taken == [3]
