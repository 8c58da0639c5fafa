"""Modes, patches and global hooks that watch or change torch's functions act on fused modules too."""

import contextlib
import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.pytorch_utils import Conv1D

import machine
import mixtures
import reference
from modules import (
    Decoder,
    Gated,
    Halves,
    Intermediate,
    OfFunctions,
    OwnBlock,
    OwnLinears,
    PackedGated,
    Plain,
    TanhGelu,
    TransposedPlain,
)  # fmt: skip
from safety import assert_close, fuse, ways, x_of


class Dropping(nn.Module):
    def __init__(self, act=nn.SiLU):
        super().__init__()
        parts = nn.Linear(32, 88), act(), nn.Dropout(0.5), nn.Identity(), nn.Linear(88, 32)
        self.parts = nn.Sequential(*parts)

    def forward(self, x):
        return self.parts(x)


class DroppingBetween(nn.Module):
    """The parts of Dropping in a method that names them."""

    def __init__(self):
        super().__init__()
        self.fc1, self.act, self.drop, self.same, self.fc2 = Dropping().parts

    def forward(self, x):
        return self.fc2(self.same(self.drop(self.act(self.fc1(x)))))


KINDS = (Gated, PackedGated, Plain, Intermediate, Dropping)
kinds = pytest.mark.parametrize("kind", KINDS)


class FunctionMode(TorchFunctionMode):
    """Doubles the results of linear layers and activations, and records their names."""

    def __init__(self):
        self.seen = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function not in (F.linear, F.silu, F.gelu):
            return result
        self.seen.append(function.__name__)
        return 2 * result


class DispatchMode(TorchDispatchMode):
    """Does the same for ATen operations."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if name not in ("addmm", "mm", "silu", "gelu"):
            return result
        self.seen.append(name)
        return 2 * result


def seen_by(mode, module, x):
    with torch.no_grad(), mode:
        return module(x), mode.seen


@kinds
@pytest.mark.parametrize("mode", [FunctionMode, DispatchMode])
def test_modes(fused_mlp, device, kind, mode):
    module = kind().to(device).eval()
    model, fused = module, fused_copy(fused_mlp, module)
    x = x_of(device)
    (got, names), (expected, all_names) = (seen_by(mode(), each, x) for each in (fused, model))
    assert_close(got, expected)
    assert names == all_names != []
    with mode():
        explanation = fused_mlp.explain(part_of(fused))
    assert explanation.implementation != "fused" and "mode" in explanation.reason
    assert fused_mlp.explain(part_of(fused)).implementation == "fused"


def fused_copy(fused_mlp, module):
    fused = copy.deepcopy(module)
    assert fused_mlp.fuse_mlps(fused).fused
    return fused


def part_of(module):
    return module.parts if isinstance(module, Dropping) else module


@pytest.mark.parametrize("memory", ["activations", "recompute"])
@pytest.mark.parametrize("function", [name for name in reference.FUNCTIONS if name != "act_and_mul"])
def test_counting_of_operations_of_functions(fused_mlp, device, function, memory):
    """The ops count as many operations as torch's for every choice of gradients, plus those of recomputation."""
    given = reference.operands(function, (2, 3), (8, 12, 6), device=device)
    options = {} if function == "linear" else {"memory": memory}
    again = 0 if function == "linear" or memory == "activations" else flops(lambda: first_layer(given, device))
    calls = (
        lambda: getattr(fused_mlp, function)(**given, **options, activation="silu"),
        lambda: reference.eager(function, given, "silu"),
    )
    for wanted in reference.subsets(tuple(given)):
        for name, operand in given.items():
            operand.requires_grad_(name in wanted)
        leaves = [given[name] for name in wanted]
        got, expected = (flops(lambda call=call, of=leaves: differentiated(call(), of)) for call in calls)
        alone = {*wanted} <= {"fc2_bias", "down_bias"}  # these need no hidden values
        assert expected > 0 and got == expected + (0 if alone else again), wanted


def flops(call):
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def first_layer(given, device):
    """Computes the products that are recomputed."""
    weights = [each for name, each in given.items() if name.endswith("weight") and each.shape[1] == 8]
    return [F.linear(given["x"].detach(), weight.detach()) for weight in weights]


def differentiated(result, wanted):
    return torch.autograd.grad(result.sum(), wanted) if wanted else None


@pytest.mark.parametrize("with_grad", [False, True], ids=["no_grad", "grad"])
def test_counting_of_operations_of_experts(fused_mlp, device, with_grad):
    index, shares = torch.randint(4, (6, 2), device=device), torch.rand(6, 2, device=device)
    x, up, down = (
        torch.randn(*shape, device=device, requires_grad=with_grad) for shape in ((6, 16), (4, 24, 16), (4, 8, 12))
    )
    call = functools.partial(fused_mlp.experts_mlp, x, index, shares, up, down)
    assert flops(lambda: differentiated(call(), [x, up, down] if with_grad else [])) == (
        (3 if with_grad else 1) * 2 * 12 * (24 * 16 + 8 * 12)
    )


@contextlib.contextmanager
def products_in_bfloat16():
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.skipif(machine.device_type() != "cpu", reason="on a GPU all products of float32 are torch's")
@pytest.mark.parametrize("with_grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", [*KINDS, Halves, OwnBlock])
def test_products_of_float32_in_bfloat16(fused_mlp, kind, when, with_grad):
    """Fused models narrow float32 products on a CPU as torch may, and only float32."""
    module = kind().eval()
    fused = copy.deepcopy(module)
    with products_in_bfloat16() if when == "before" else contextlib.nullcontext():
        assert fused_mlp.fuse_mlps(fused).modules
    x = x_of(torch.device("cpu"))
    with torch.set_grad_enabled(with_grad):
        exact = module(x)
        assert_close(fused(x), exact)
        with products_in_bfloat16():
            narrowed = module(x)
            # A kernel computes `act(gate) * up`: values that it rounds otherwise may become another bfloat16.
            assert (fused(x) - narrowed).abs().max() <= (narrowed - exact).abs().max() / 4 + 1e-6
            assert "bfloat16" in str(fused_mlp.explain(fused))
        assert "bfloat16" not in str(fused_mlp.explain(fused))
    with products_in_bfloat16():
        assert "bfloat16" not in str(fused_mlp.explain(fused.bfloat16()))


@pytest.mark.skipif(machine.device_type() != "cpu", reason="on a GPU all products of float32 are torch's")
def test_mixtures_with_products_of_float32_in_bfloat16(fused_mlp):
    """Cached experts and their router follow torch's precision of float32 products."""
    model = mixtures.build("mixtral")
    fused, ids = copy.deepcopy(model), torch.randint(3, 30, (2, 9))
    assert fused_mlp.fuse_mlps(fused).fused
    with torch.no_grad():
        for _ in range(2):
            assert_close(fused(ids).logits, model(ids).logits)
        with products_in_bfloat16():
            assert torch.equal(fused(ids).logits, model(ids).logits)
        assert_close(fused(ids).logits, model(ids).logits)


@pytest.mark.skipif(machine.device_type() != "cpu", reason="on a GPU all products of float32 are torch's")
@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("function", [name for name in reference.FUNCTIONS if name != "act_and_mul"])
def test_functions_with_products_of_float32_in_bfloat16(fused_mlp, function, compiles):
    given = reference.operands(function, (3,), (8, 12, 6), device=torch.device("cpu"))
    call = getattr(fused_mlp, function)
    call = torch.compile(call, backend="eager", fullgraph=True) if compiles else call
    with torch.no_grad():
        torch.testing.assert_close(call(**given, activation="silu"), reference.eager(function, given, "silu"))
        with products_in_bfloat16():
            assert torch.equal(call(**given, activation="silu"), reference.eager(function, given, "silu"))


def test_a_default_device_changes_nothing(fused_mlp, device):
    """A default device is a mode that affects only new tensors, so modules stay fused."""
    fused = Gated().to(device)
    fused_mlp.fuse_mlps(fused)
    with torch.device(device):
        assert fused_mlp.explain(fused).implementation == "fused"
        with FunctionMode():
            assert fused_mlp.explain(fused).implementation != "fused"


def doubled(function):
    return lambda *args, **kwargs: 2 * function(*args, **kwargs)


def doubled_under_its_name(function):
    return functools.wraps(function)(doubled(function))


# The patched functions, and modules that call them.
PATCHED = [
    (F, "linear", Gated),
    (F, "linear", Plain),
    (F, "linear", Dropping),
    (F, "silu", Gated),
    (F, "silu", Dropping),
    (F, "gelu", Plain),
    (F, "gelu", lambda: Gated(TanhGelu)),
    (F, "relu", lambda: Intermediate(nn.ReLU)),
    (F, "dropout", Dropping),
    (F, "dropout", Decoder),
    (torch, "sigmoid", lambda: Gated(nn.Sigmoid)),
    (nn.Linear, "__call__", Gated),
    (nn.Module, "__call__", lambda: nn.Sequential(Gated())),
    (nn.Linear, "forward", Gated),
    (nn.Linear, "forward", Dropping),
    (nn.SiLU, "forward", Gated),
    (nn.GELU, "forward", Plain),
    (nn.SiLU, "__call__", Gated),
    (nn.Dropout, "forward", Dropping),
    (nn.Dropout, "__call__", Dropping),
    (nn.Dropout, "__call__", DroppingBetween),
    (nn.Identity, "__call__", DroppingBetween),
    (nn.Identity, "forward", Dropping),
    (F, "silu", OfFunctions),
    (Conv1D, "forward", TransposedPlain),
    (FalconLinear, "forward", OwnLinears),  # a stand-in for torch's
    (torch, "addmm", TransposedPlain),  # Conv1D calls it
    (nn.Dropout, "forward", TransposedPlain),
]


@pytest.mark.parametrize(("home", "name", "make"), PATCHED, ids=lambda value: getattr(value, "__name__", str(value)))
@pytest.mark.parametrize("patched", [doubled, doubled_under_its_name])
@pytest.mark.parametrize("when", ["before", "after"])
def test_patched_functions(fused_mlp, device, monkeypatch, home, name, make, when, patched):
    """A function patched before or after fusing is called."""
    module = make().to(device).eval()
    x = x_of(device)
    with torch.no_grad():
        unpatched = first(module(x))
        fused = fused_copy(fused_mlp, module)
        assert_close(first(fused(x)), unpatched)
        with monkeypatch.context() as patch:
            patch.setattr(home, name, patched(getattr(home, name)))
            if when == "before":
                fused = copy.deepcopy(module)
                fused_mlp.fuse_mlps(fused)
            expected = first(module(x))
            assert not torch.allclose(expected, unpatched, atol=1e-3)
            assert_close(first(fused(x)), expected)
        assert_close(first(fused(x)), unpatched)


def first(output):
    return output[0] if isinstance(output, tuple) else output


HOOKS = {
    "forward": nn.modules.module.register_module_forward_hook,
    "forward pre": nn.modules.module.register_module_forward_pre_hook,
    "backward": nn.modules.module.register_module_full_backward_hook,
    "backward pre": nn.modules.module.register_module_full_backward_pre_hook,
}


@kinds
@ways
@pytest.mark.parametrize("hook", HOOKS)
def test_global_hooks(fused_mlp, device, way, kind, hook):
    """Global hooks see each part, in the same order as unfused."""
    module = kind().to(device).eval()
    fused = fuse(fused_mlp, way, copy.deepcopy(module))
    sequences = []
    for candidate in (module, fused):
        parts = []
        x = x_of(device).requires_grad_()
        handle = HOOKS[hook](lambda part, *_, parts=parts: parts.append(part))
        try:
            candidate(x).sum().backward()
        finally:
            handle.remove()
        names = {part: name for name, part in candidate.named_modules()}
        sequences.append([names[part] for part in parts])
    assert sequences[0] == sequences[1] != []
