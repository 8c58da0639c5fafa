"""How a fused module differs from what it was, and how it does not: its class, its copies, its life, its way back."""

import copy
import functools
import gc
import io
import pickle
import subprocess
import sys
import weakref
from types import MethodType

import cloudpickle
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from modules import PROJECTIONS, Decoder, Gated, Intermediate, Plain
from tiny_models import build, outcome

SEQUENCE = (nn.Linear, (32, 88)), (nn.GELU, ()), (nn.Linear, (88, 32))


def sequence():
    return nn.Sequential(*(kind(*sizes) for kind, sizes in SEQUENCE))


ALL = [*PROJECTIONS, sequence]


@pytest.mark.parametrize("name", ["Llama", "BERT"])
def test_restore(fused_mlp, device, name):
    model, inputs = build(name, device)
    expected = outcome(model, inputs)
    attributes = {path: set(vars(module)) for path, module in model.named_modules()}
    classes = [type(module) for module in model.modules()]
    report = fused_mlp.fuse_mlps(model)
    report.restore()
    assert {path: set(vars(module)) for path, module in model.named_modules()} == attributes
    assert [type(module) for module in model.modules()] == classes
    for entry in report.fused:
        assert fused_mlp.explain(model.get_submodule(entry.path)).implementation == "original"
    torch.testing.assert_close(outcome(model, inputs), expected, rtol=0, atol=0)
    report.restore()  # nothing left to do
    assert len(fused_mlp.fuse_mlps(model).fused) == len(report.fused)


def test_fused_twice(fused_mlp, device):
    """As by a cell of a notebook that is run again: the second report is as good as the first."""
    model, inputs = build("Llama", device)
    expected = outcome(model, inputs)
    first = fused_mlp.fuse_mlps(model)
    second = fused_mlp.fuse_mlps(model)
    assert second.modules == first.modules
    torch.testing.assert_close(outcome(model, inputs), expected, rtol=1e-3, atol=1e-5)
    del first
    second.restore()
    assert fused_mlp.explain(model.model.layers[0].mlp).implementation == "original"
    torch.testing.assert_close(outcome(model, inputs), expected, rtol=0, atol=0)


@pytest.mark.parametrize("kind", PROJECTIONS)
def test_deepcopy(fused_mlp, device, kind):
    """The copy uses its own weights, not those of what it was copied from."""
    module = kind().to(device)
    fused_mlp.fuse_mlps(module)
    x = torch.randn(3, 32, device=device)
    expected = module(x)
    twin = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    torch.testing.assert_close(twin(x), expected)
    assert fused_mlp.explain(twin).implementation == "fused"


@pytest.mark.parametrize("kind", PROJECTIONS)
def test_pickle(fused_mlp, device, kind):
    """What is saved loads anywhere, also without this package: with the original forward, to be fused again."""
    module = kind().to(device)
    fused_mlp.fuse_mlps(module)
    x = torch.randn(3, 32, device=device)
    assert fused_mlp.__name__.encode() not in pickle.dumps(module)
    saved = io.BytesIO()
    torch.save(module, saved)
    saved.seek(0)
    for twin in (pickle.loads(pickle.dumps(module)), torch.load(saved, weights_only=False)):
        torch.testing.assert_close(twin(x), module(x))
        assert fused_mlp.explain(twin).implementation == "original"
        assert len(fused_mlp.fuse_mlps(twin).fused) == 1
        torch.testing.assert_close(twin(x), module(x))


def test_state_dicts_fit_both_ways(fused_mlp, device):
    fused, plain = Gated(bias=True).to(device), Gated(bias=True).to(device)
    fused_mlp.fuse_mlps(fused)
    fused.load_state_dict(plain.state_dict())
    x = torch.randn(3, 32, device=device)
    torch.testing.assert_close(fused(x), plain(x))
    plain.load_state_dict(fused.state_dict())


def test_moved_after_fusing(fused_mlp, device):
    module = Gated()
    fused_mlp.fuse_mlps(module)
    module.to(device, torch.bfloat16)
    plain = copy.deepcopy(module)
    plain.forward = Gated.forward.__get__(plain)
    x = torch.randn(8, 32, device=device, dtype=torch.bfloat16)
    torch.testing.assert_close(module(x), plain(x), rtol=3e-2, atol=3e-2)


# The class.


@pytest.mark.parametrize("kind", ALL)
def test_what_stays(fused_mlp, device, kind):
    """Its attributes, its name, its place among classes, its words."""
    module = kind().to(device)
    before = type(module), dict(vars(module)), repr(module), list(module.state_dict())
    fused_mlp.fuse_mlps(module)
    assert fused_mlp.explain(module).implementation == "fused"
    assert isinstance(module, before[0]) and issubclass(type(module), before[0])
    assert (type(module).__name__, type(module).__qualname__) == (before[0].__name__, before[0].__qualname__)
    assert type(module).__module__ == before[0].__module__
    assert vars(module).keys() == before[1].keys()
    assert all(vars(module)[name] is value for name, value in before[1].items())
    assert (repr(module), list(module.state_dict())) == before[2:]


def test_alike_modules_share_a_class(fused_mlp, device):
    model = nn.ModuleList(Gated() for _ in range(3)).to(device)
    fused_mlp.fuse_mlps(model)
    assert len(set(map(type, model))) == 1


def test_what_a_class_does_when_it_is_derived_from_is_not_done(fused_mlp, device):
    derived = []

    class Meta(type):
        def __init__(cls, *args, **kwargs):
            super().__init__(*args, **kwargs)
            derived.append(cls)

    class Registered(Gated, metaclass=Meta):
        def __init_subclass__(cls, key, **kwargs):
            derived.append(cls)

    assert derived == [Registered]
    module = Registered().to(device)
    assert fused_mlp.fuse_mlps(module).fused
    assert derived == [Registered]


def test_a_class_that_is_patched_later(fused_mlp, device, monkeypatch):
    """What the class says counts, as it does for a module that was never fused; and again when it is patched back."""
    module = Gated().to(device)
    report = fused_mlp.fuse_mlps(module)
    x = torch.randn(3, 32, device=device)
    original = Gated.forward
    expected = original(module, x)

    def patched(self, x):
        return 2 * original(self, x)

    with monkeypatch.context() as patch:
        patch.setattr(Gated, "forward", patched)
        torch.testing.assert_close(module(x), 2 * expected)
        assert fused_mlp.explain(module).implementation == "original"
        assert fused_mlp.fuse_mlps(module).fused == []
        torch.testing.assert_close(module(x), 2 * expected)
    torch.testing.assert_close(module(x), expected)
    report.restore()
    assert type(module) is Gated


class Added(nn.Module):
    def forward(self, x):
        return x + 1


PATCHES = {
    "fewer arguments": lambda self, x: 2 * x,
    "other defaults": lambda self, x, mask=3.0, *rest, scale=5.0: x * mask * scale,
    "the method of another class": nn.Identity.forward,
    "partial method": functools.partialmethod(lambda self, factor, x: factor * x, 3),
    "property": property(lambda self: lambda x: x + 1),
    "static method": staticmethod(lambda x: x + 2),
    "builtin": torch.neg,
    "module": Added(),
    "None": None,
}


@pytest.mark.parametrize("patch", PATCHES)
def test_whatever_a_class_is_patched_with(fused_mlp, device, monkeypatch, patch):
    """An instance finds there what one that was never fused does, and gives it what it was given."""
    module = Decoder().to(device).eval()
    plain = copy.deepcopy(module)
    assert fused_mlp.fuse_mlps(module).fused
    monkeypatch.setattr(Decoder, "forward", PATCHES[patch])
    x = torch.randn(3, 32, device=device)
    for call in (lambda each: each(x), lambda each: each(x, 2.0), lambda each: each(x, scale=4.0)):
        results = []
        for each in (module, plain):
            try:
                results.append(call(each))
            except TypeError as error:
                results.append(type(error))
        if isinstance(results[1], torch.Tensor):
            assert torch.equal(*results)
        else:
            assert results[0] is results[1]


def test_a_method_that_is_patched_later(fused_mlp, device, monkeypatch):
    """One that forward calls, of a class that it is inherited from."""

    class Child(Decoder):
        def feed(self, x):
            return self.fc2(self.activation_fn(self.fc1(x)))

        def forward(self, x):
            return self.feed(x)

    class Grandchild(Child):
        pass

    module = Grandchild().to(device).eval()
    assert fused_mlp.fuse_mlps(module).fused
    monkeypatch.setattr(Child, "feed", lambda self, x: x)
    x = torch.randn(3, 32, device=device)
    assert torch.equal(module(x), x)


def test_sequential_patched_later(fused_mlp, device, monkeypatch):
    module = sequence().to(device)
    fused_mlp.fuse_mlps(module)
    monkeypatch.setattr(nn.Sequential, "forward", lambda self, input: 5 * input)
    x = torch.randn(3, 32, device=device)
    assert torch.equal(module(x), 5 * x)
    assert fused_mlp.explain(module).implementation == "original"


class Other(Gated):
    def forward(self, x):
        return x - 1


def test_a_class_that_is_switched(fused_mlp, device):
    module = Gated().to(device)
    report = fused_mlp.fuse_mlps(module)
    module.__class__ = Other
    x = torch.randn(3, 32, device=device)
    assert torch.equal(module(x), x - 1)
    assert fused_mlp.explain(module).implementation == "original"
    report.restore()
    assert type(module) is Other


def test_a_class_upon_the_fused_one(fused_mlp, device):
    """As FSDP and parametrizations put one there: it stays, over the fused forward and over the original."""
    module = Gated().to(device)
    plain = copy.deepcopy(module)

    class Doubled(nn.Module):
        def forward(self, x):
            return 2 * x

    module.register_parameter("scale", nn.Parameter(torch.ones(1, device=device)))
    report = fused_mlp.fuse_mlps(module)
    parametrize.register_parametrization(module, "scale", Doubled())
    kind = type(module)
    x = torch.randn(3, 32, device=device)
    for _ in range(2):
        assert fused_mlp.explain(module).implementation == "fused"
        torch.testing.assert_close(module(x), plain(x))
        report.restore()
        assert type(module) is kind
        assert fused_mlp.explain(module).implementation == "original"
        assert torch.equal(module(x), plain(x))
        report = fused_mlp.fuse_mlps(module)
        assert [entry.path for entry in report.fused] == [""]


def test_a_class_upon_the_fused_one_whose_base_is_patched(fused_mlp, device, monkeypatch):
    """Restored or not, the module runs what its class has been patched with, and its own method when that is undone."""
    module = Gated().to(device)
    x = torch.randn(3, 32, device=device)
    expected = module(x)
    report = fused_mlp.fuse_mlps(module)
    module.__class__ = type("Upon", (type(module),), {})
    for restored in (False, True):
        if restored:
            report.restore()
        with monkeypatch.context() as patched:
            patched.setattr(Gated, "forward", nn.Identity.forward)
            assert module(x) is x
        torch.testing.assert_close(module(x), expected)


def test_a_forward_that_is_set_later(fused_mlp, device):
    module = Gated().to(device)
    report = fused_mlp.fuse_mlps(module)
    module.forward = lambda x: x + 1
    x = torch.randn(3, 32, device=device)
    assert torch.equal(module(x), x + 1)
    assert fused_mlp.explain(module).implementation == "original"
    assert [left.reasons[0].code for left in fused_mlp.fuse_mlps(module).left] == ["own method"]
    report.restore()
    assert torch.equal(module(x), x + 1)


def test_a_bound_method_of_the_class(fused_mlp, device):
    """What kernelize leaves in every module of a class it knows does not stand in the way."""
    module = Gated().to(device)
    module.forward = MethodType(Gated.forward, module)
    assert fused_mlp.fuse_mlps(module).fused
    assert fused_mlp.explain(module).implementation == "fused"


def test_a_bound_method_of_a_class_that_is_patched(fused_mlp, device, monkeypatch):
    """A module that holds the method of its class runs that one, whatever the class has: fused, and given back."""
    module = Gated().to(device)
    module.forward = module.forward
    x = torch.randn(3, 32, device=device)
    expected = module(x)
    report = fused_mlp.fuse_mlps(module)
    with monkeypatch.context() as patched:
        patched.setattr(Gated, "forward", property(lambda self: nn.Identity()))  # which comes first, as in Python
        assert module(x) is x
    monkeypatch.setattr(Gated, "forward", None)
    assert fused_mlp.explain(module).implementation == "fused"
    torch.testing.assert_close(module(x), expected)
    assert type(fused_mlp.fuse_mlps(copy.deepcopy(module))) is type(report)
    report.restore()
    assert torch.equal(module(x), expected)


# Copies.


class Scaled(Gated):
    def __init__(self):
        super().__init__()
        self.scale = 1.0
        self.parent = [self]  # a copy has its own

    def forward(self, x):
        return self.scale * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy], ids=["copy", "deepcopy"])
def test_a_copy_that_is_changed(fused_mlp, device, copied):
    module = Scaled().to(device)
    report = fused_mlp.fuse_mlps(module)
    x = torch.randn(3, 32, device=device)
    expected = module(x)
    twin = copied(module)
    twin.scale = 3.0
    assert fused_mlp.explain(twin).implementation == "fused"
    torch.testing.assert_close(twin(x), 3 * expected)
    torch.testing.assert_close(module(x), expected)
    assert twin.parent[0] is (module if copied is copy.copy else twin)
    report.restore()  # the copy is not in it
    torch.testing.assert_close(twin(x), 3 * expected)


class Particular(Gated):
    """One that says itself how it is copied and saved."""

    def __init__(self, tag="new"):
        super().__init__()
        self.tag = tag

    def __deepcopy__(self, memo):
        return self._like("deep")

    def __copy__(self):
        return self._like("flat")

    def __reduce__(self):
        return type(self), ("saved",), self.__dict__ | {"tag": "saved"}

    def _like(self, tag):
        made = type(self)(tag)
        made.load_state_dict(self.state_dict())
        return made


def test_a_module_that_copies_itself(fused_mlp):
    module = Particular()
    fused_mlp.fuse_mlps(module)
    x = torch.randn(3, 32)
    saved = pickle.loads(pickle.dumps(module))
    assert type(saved) is Particular
    for twin, tag in ((copy.copy(module), "flat"), (copy.deepcopy(module), "deep"), (saved, "saved")):
        assert twin.tag == tag
        torch.testing.assert_close(twin(x), module(x))


class Slotted(Gated):
    __slots__ = ("extra",)

    def __init__(self):
        super().__init__()
        object.__setattr__(self, "extra", 7)

    def __getstate__(self):
        return self.__dict__ | {"kept": self.extra}


def test_slots_and_states(fused_mlp):
    module = Slotted()
    assert fused_mlp.fuse_mlps(module).fused
    assert module.extra == 7
    assert copy.deepcopy(module).kept == 7
    assert pickle.loads(pickle.dumps(module)).kept == 7


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("kind", [Gated, sequence])
def test_pickle_protocols(fused_mlp, kind, protocol):
    module = kind()
    fused_mlp.fuse_mlps(module)
    x = torch.randn(3, 32)
    loaded = pickle.loads(pickle.dumps(module, protocol))
    assert type(loaded) is type(kind())
    torch.testing.assert_close(loaded(x), module(x))


def test_cloudpickle_where_the_kernel_is_not(fused_mlp):
    """A class of a notebook goes with the module, and its own forward with the class."""

    class Local(Gated):
        def forward(self, x):
            return 2 * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    Local.__module__ = "__main__"
    module = nn.Sequential(Local())
    assert fused_mlp.fuse_mlps(module).fused
    cloudpickle.register_pickle_by_value(sys.modules[Gated.__module__])
    try:
        saved = cloudpickle.dumps((module, torch.ones(1, 32)))
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[Gated.__module__])
    code = (
        "import pickle, sys; module, x = pickle.load(sys.stdin.buffer); print(module(x).sum().item()); "
        "assert not [name for name in sys.modules if 'fused_mlp' in name]"
    )
    ran = subprocess.run([sys.executable, "-c", code], input=saved, capture_output=True, check=False)
    assert ran.returncode == 0, ran.stderr.decode()
    assert float(ran.stdout) == pytest.approx(module(torch.ones(1, 32)).sum().item(), rel=1e-4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", [sequence, Intermediate, Plain, Gated])
def test_scripted_after_it_is_fused(fused_mlp, device, kind):
    """What torch.jit.script compiles is the original."""
    module = nn.Sequential(kind()).to(device)
    fused_mlp.fuse_mlps(module)
    scripted = torch.jit.script(module)
    x = torch.randn(3, 32, device=device)
    torch.testing.assert_close(scripted(x), module(x))
    assert fused_mlp.explain(module[0]).implementation == "fused"


# Its life.


@pytest.fixture
def no_collection():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("called", [False, True])
def test_a_model_is_gone_when_it_is_deleted(fused_mlp, device, kind, called, no_collection):
    """Neither the report nor a cycle keeps it."""
    model = nn.ModuleList([kind(), kind()]).to(device)
    report = fused_mlp.fuse_mlps(model)
    if called:
        model[0](torch.randn(3, 32, device=device))
    fused_mlp.explain(model[0])
    references = [weakref.ref(part) for part in (*model.modules(), *model.parameters())]
    del model
    assert [reference() for reference in references] == [None] * len(references)
    report.restore()  # nothing is left to do
    assert len(report.fused) == 2


def test_a_restored_model_is_gone_when_it_is_deleted(fused_mlp, device, no_collection):
    model = Gated().to(device)
    fused_mlp.fuse_mlps(model).restore()
    reference = weakref.ref(model)
    del model
    assert reference() is None
