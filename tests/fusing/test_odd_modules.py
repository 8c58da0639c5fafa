"""Modules that cannot be read or fused are left with a reason, and the rest of the model is fused."""

import copy
import functools
import importlib

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from modules import Gated, Intermediate, Plain

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Lazy modules")


class Callable:
    __hash__ = None

    def __call__(self, x):
        return x


class Parted(Gated):
    forward = functools.partialmethod(Gated.forward)


def with_forward(forward):
    kind = type("Odd", (Gated,), {"forward": forward})
    return kind()


class Grumpy(Gated):
    """Rejects attributes set after construction."""

    ready = False

    def __init__(self):
        super().__init__()
        self.ready = True

    def __setattr__(self, name, value):
        assert not self.ready, "read only"
        super().__setattr__(name, value)


def lazy():
    module = Gated()
    module.gate_proj, module.up_proj = nn.LazyLinear(88, bias=False), nn.LazyLinear(88, bias=False)
    return module


ODD = {
    "scripted": (lambda: torch.jit.script(Intermediate()), "scripted"),
    "traced": (lambda: torch.jit.trace(Gated(), torch.randn(3, 32)), "scripted"),
    "graph": (lambda: torch.fx.symbolic_trace(Gated()), "graph"),
    "partial": (lambda: with_forward(functools.partial(lambda x: x)), "no function"),
    "partial method": (Parted, "no function"),
    "callable object": (lambda: with_forward(Callable()), "no function"),
    "builtin": (lambda: with_forward(torch.relu), "no function"),
    "None": (lambda: with_forward(None), "no function"),
    "property": (lambda: with_forward(property(lambda self: lambda x: x)), "no function"),
    "static method": (lambda: with_forward(staticmethod(lambda x: x)), "no function"),
    "class method": (lambda: with_forward(classmethod(lambda cls, x: x)), "no function"),
}


@pytest.mark.parametrize("odd", ODD)
def test_what_is_odd_is_left_and_the_rest_is_fused(fused_mlp, device, odd):
    make, code = ODD[odd]
    module = make().to(device)
    model = nn.Sequential(Gated(), module, Plain()).to(device)
    kind = type(module)
    report = fused_mlp.fuse_mlps(model)
    assert [entry.path for entry in report.fused] == ["0", "2"]
    assert [(entry.path, entry.reasons[0].code) for entry in report.left] == [("1", code)]
    assert type(module) is kind
    assert fused_mlp.explain(module).implementation == "original"
    assert str(report)
    report.restore()
    assert [type(part) for part in model] == [Gated, kind, Plain]


def test_lazy_modules(fused_mlp, device):
    """Lazy modules are fused before their weights exist, and compute the right result once they do."""
    model = nn.Sequential(lazy(), nn.LazyLinear(8), nn.LazyBatchNorm1d(), Plain(sizes=(8, 16, 32))).to(device)
    report = fused_mlp.fuse_mlps(model)
    assert [entry.path for entry in report.modules] == ["0", "3"]
    x = torch.randn(3, 32, device=device)
    model(x)
    torch.testing.assert_close(model[0](x), Gated.forward(model[0], x))
    assert fused_mlp.explain(model[0]).implementation == "fused"


def test_attributes_that_cannot_be_set(fused_mlp, device):
    module = Grumpy().to(device)
    report = fused_mlp.fuse_mlps(module)
    assert fused_mlp.explain(module).implementation == "fused"
    report.restore()
    assert type(module) is Grumpy


def test_an_error_that_nobody_foresaw(fused_mlp, device, monkeypatch):
    rewriting = importlib.import_module(f"{fused_mlp.__name__}.models.rewriting.rewriter")
    read = rewriting.fused_methods

    def failing(module, memory):
        if isinstance(module, Intermediate):
            raise ZeroDivisionError("nobody\nforesaw this")
        return read(module, memory)

    monkeypatch.setattr(rewriting, "fused_methods", failing)
    model = nn.Sequential(Gated(), Intermediate(sizes=(32, 32)), Plain()).to(device)
    report = fused_mlp.fuse_mlps(model)
    assert [entry.path for entry in report.fused] == ["0", "2"]
    assert [entry.reason for entry in report.left] == ["cannot be fused: ZeroDivisionError: nobody"]
    assert type(model[1]) is Intermediate
    assert fused_mlp.explain(model)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
def test_an_interrupted_call_changes_nothing(fused_mlp, device, monkeypatch, error):
    """An interrupted call restores every module, and keeps those fused that an earlier call fused."""
    verification = importlib.import_module(f"{fused_mlp.__name__}.models.verification")
    model = nn.Sequential(Gated(), Plain(), Intermediate(sizes=(32, 32))).to(device)
    fused_mlp.fuse_mlps(model[0])
    before = [(type(module), dict(vars(module))) for module in model.modules()]

    def interrupted(self, mlps):
        if len(mlps[0].projections) == 1:
            raise error
        return None

    monkeypatch.setattr(verification.Verification, "disagreement", interrupted)
    if error is MemoryError:  # an Exception affects only one module
        assert [entry.path for entry in fused_mlp.fuse_mlps(model).fused] == ["0", "1"]
        return
    with pytest.raises(error):
        fused_mlp.fuse_mlps(model)
    assert [(type(module), dict(vars(module))) for module in model.modules()] == before
    assert fused_mlp.explain(model[0]).implementation == "fused"


# Wrappers that forward attribute lookups.


class Forwarding(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def forward(self, x):
        return self.module(x)


def of_peft(module):
    peft = pytest.importorskip("peft.utils.other")
    return peft.ModulesToSaveWrapper(module, "default")


HANDING_ON = {
    "any": Forwarding,
    "checkpoint_wrapper": checkpoint_wrapper,
    "OptimizedModule": lambda module: torch.compile(module, backend="eager"),
    "PEFT": of_peft,
}


@pytest.mark.parametrize("wrapper", HANDING_ON)
@pytest.mark.parametrize("when", ["before", "after"])
def test_wrappers_that_hand_attributes_on(fused_mlp, device, wrapper, when):
    """The wrapped module is fused; the wrapper, which forwards attribute lookups to it, is not."""
    module = Gated().to(device)
    plain, x = copy.deepcopy(module), torch.randn(3, 32, device=device)
    if when == "after":
        fused_mlp.fuse_mlps(module)
    model = nn.Sequential(HANDING_ON[wrapper](module))
    report = fused_mlp.fuse_mlps(model)
    fused = [entry.path for entry in report.fused]
    assert fused and all(path.startswith("0.") and path.count(".") < 4 for path in fused)
    assert fused_mlp.explain(model).implementation == "fused"
    torch.testing.assert_close(model(x), plain(x))
    report.restore()
    assert fused_mlp.explain(model).implementation == "original"
    assert not any(f"{fused_mlp.__name__}_fused" in vars(each) for each in model.modules())


# Attributes with code of their own, which must not run.


RAN = []


def refuse(*_, **__):
    RAN.append(True)
    raise AssertionError("code of the class was run")


ALONE = ("named_modules", "modules", "children", "named_children", "parameters", "named_parameters", "train", "_apply")
ALONE += ("buffers", "named_buffers", "apply", "__hash__", "__eq__", "__len__", "__bool__", "__iter__", "__setattr__")
ALONE += ("__delattr__", "__new__", "__getstate__", "__reduce_ex__", "__deepcopy__", "__repr__", "extra_repr")


def with_code(kind, *names, **more):
    return type(kind.__name__, (kind,), {**dict.fromkeys(names, refuse), **more})


class Asking(Gated):
    """Reads attributes whose values may be any object."""

    def forward(self, x):
        if self.option:
            x = 2 * x
        if self.scale == self.other and self.option:
            x = -x
        if not self.scale > self.other:
            x = 3 * x
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) + x


class Value:
    __eq__ = __gt__ = __lt__ = __hash__ = __bool__ = __add__ = __mul__ = __getattr__ = __call__ = __len__ = refuse


@pytest.mark.parametrize("kind", [Gated, Plain, Intermediate, nn.Sequential, Asking])
def test_no_code_of_a_class_is_run(fused_mlp, device, kind):
    parts = (nn.Linear(32, 88), nn.GELU(), nn.Linear(88, 32)) if kind is nn.Sequential else ()
    inner, outer = kind(*parts).to(device), nn.ModuleDict({"value": nn.Identity()})
    if kind is Asking:
        vars(inner).update(scale=Value(), other=Value())
    vars(outer).update(value=Value(), other=Value())
    outer.add_module("inner", inner)
    own = {"option": property(refuse)} if kind is Asking else {}
    object.__setattr__(inner, "__class__", with_code(type(inner), *ALONE, **own))
    object.__setattr__(outer, "__class__", with_code(nn.ModuleDict, *ALONE))
    report = fused_mlp.fuse_mlps(outer)
    assert [entry.path for entry in report.fused] == ["inner"], str(report)
    assert fused_mlp.explain(outer).implementation == "fused"
    report.restore()
    assert "forward" not in vars(inner) and RAN == []


@pytest.mark.parametrize("name", ["__getattr__", "__getattribute__"])
def test_a_class_that_runs_code_where_attributes_are_read(fused_mlp, device, name):
    module = Gated().to(device)
    object.__setattr__(module, "__class__", with_code(Gated, name))
    (left,) = fused_mlp.fuse_mlps(module).modules
    assert (left.fused, left.reasons[0].code, left.reasons[0].part) == (False, "own finder", name)
    assert fused_mlp.explain(module).reason == left.reason and RAN == []
