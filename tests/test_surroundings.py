"""What watches or changes the functions of torch, and every module, also watches and changes fused modules."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from modules import Decoder, Gated, Intermediate, PackedGated, Plain, TanhGelu
from safety import assert_close, pair, x_of


class Dropping(nn.Module):
    def __init__(self, act=nn.SiLU):
        super().__init__()
        parts = nn.Linear(32, 88), act(), nn.Dropout(0.5), nn.Identity(), nn.Linear(88, 32)
        self.parts = nn.Sequential(*parts)

    def forward(self, x):
        return self.parts(x)


class DroppingBetween(nn.Module):
    """The same parts, in a method that names them."""

    def __init__(self):
        super().__init__()
        self.fc1, self.act, self.drop, self.same, self.fc2 = Dropping().parts

    def forward(self, x):
        return self.fc2(self.same(self.drop(self.act(self.fc1(x)))))


KINDS = (Gated, PackedGated, Plain, Intermediate, Dropping)
kinds = pytest.mark.parametrize("kind", KINDS)


class FunctionMode(TorchFunctionMode):
    """Doubles what linear layers and activations give, and remembers their names."""

    def __init__(self):
        self.seen = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function not in (F.linear, F.silu, F.gelu):
            return result
        self.seen.append(function.__name__)
        return 2 * result


class DispatchMode(TorchDispatchMode):
    """The same for operations of ATen."""

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


def test_counting_of_operations(fused_mlp, device):
    """torch's own counter counts what it counts of the unfused module."""
    model, fused = pair(fused_mlp, "fuse_mlps", Gated().to(device))
    counts = []
    for candidate in (model, fused):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            candidate(x_of(device))
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_a_default_device_is_no_obstacle(fused_mlp, device):
    """It is a mode too, but one that concerns new tensors alone."""
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


# The functions that are patched, and modules which call them.
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
]


@pytest.mark.parametrize(("home", "name", "make"), PATCHED, ids=lambda value: getattr(value, "__name__", str(value)))
@pytest.mark.parametrize("patched", [doubled, doubled_under_its_name])
@pytest.mark.parametrize("when", ["before", "after"])
def test_patched_functions(fused_mlp, device, monkeypatch, home, name, make, when, patched):
    """Before the module is fused or after: what is in its place is called."""
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
@pytest.mark.parametrize("hook", HOOKS)
def test_global_hooks(fused_mlp, device, kind, hook):
    """Each part is seen, in the same order as unfused."""
    module = kind().to(device).eval()
    fused = fused_copy(fused_mlp, module)
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
