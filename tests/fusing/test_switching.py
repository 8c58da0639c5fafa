"""The state that fusing adds to a module, its class, which stays, its copies, its lifetime and its restoration."""

import copy
import functools
import gc
import pickle
import sys
import threading
import weakref
from pathlib import Path
from types import MethodType

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn.utils import parametrize

import forks
from modules import PROJECTIONS, Decoder, Gated, Halves, Intermediate, Output, Plain
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
    """Fusing twice, as a rerun notebook cell does, gives a second report as good as the first."""
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


def methods_of(module):
    """Returns the bound methods in a module's own dictionary, by name."""
    return {name: value for name, value in vars(module).items() if isinstance(value, MethodType)}


# The class.


@pytest.mark.parametrize("kind", ALL)
def test_what_stays(fused_mlp, device, kind):
    """Fusing only adds methods bound to the module and this build's mark; everything else stays."""
    module = kind().to(device)
    before = type(module), dict(vars(module)), repr(module), list(module.state_dict())
    fused_mlp.fuse_mlps(module)
    assert fused_mlp.explain(module).implementation == "fused"
    added = vars(module).keys() - before[1].keys()
    assert added == {"forward", "_replicate_for_data_parallel", f"{fused_mlp.__name__}_fused"}
    assert all(method.__self__ is module for method in methods_of(module).values())
    assert all(vars(module)[name] is value for name, value in before[1].items())
    assert (type(module), repr(module), list(module.state_dict())) == (before[0], *before[2:])


def test_equal_blocks_share_compiled_code(fused_mlp, device):
    torch.compiler.reset()
    model = nn.ModuleList(nn.Sequential(nn.LayerNorm(32), Gated()) for _ in range(6)).to(device)
    fused_mlp.fuse_mlps(model)
    assert len({block[1].forward.__func__ for block in model}) == 1
    counted = CompileCounter()
    for block in model:
        block.compile(backend=counted)
        block(torch.randn(3, 32, device=device))
    assert counted.frame_count == 1


def test_registries_of_classes(fused_mlp):
    """diffusers, which looks blocks up by their exact class, still finds a fused one."""
    hooks = pytest.importorskip("diffusers.hooks._helpers")
    kind = pytest.importorskip("diffusers.models.transformers.transformer_flux").FluxTransformerBlock
    block = kind(dim=32, num_attention_heads=2, attention_head_dim=16)
    registered = hooks.TransformerBlockRegistry.get(kind)
    assert fused_mlp.fuse_mlps(block).modules
    assert hooks.TransformerBlockRegistry.get(type(block)) is registered


def test_parametrizations_that_are_removed(fused_mlp, device):
    module = Gated().to(device)
    module.register_parameter("scale", nn.Parameter(torch.ones(1, device=device)))
    parametrize.register_parametrization(module, "scale", nn.Identity())
    report = fused_mlp.fuse_mlps(module)
    assert fused_mlp.explain(module).implementation == "fused"
    parametrize.remove_parametrizations(module, "scale")
    assert type(module) is Gated and fused_mlp.explain(module).implementation == "fused"
    report.restore()
    assert methods_of(module) == {}


def test_a_class_that_is_patched_later(fused_mlp, device, monkeypatch):
    """A fused module follows a patch of its class's forward, and its removal, as an unfused module does."""
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
    assert methods_of(module) == {}


def test_code_that_is_replaced_in_place(fused_mlp, device):
    """Code replaced in place, as by IPython's autoreload, takes effect at once, and is read when fused again."""

    class Reloaded(Gated):
        def forward(self, x, scale=1.0, *, shift=0.0):
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) * scale + shift

    def later(self, x, scale=1.0, *, shift=0.0):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) * scale - shift - 1.0

    module, x = Reloaded().to(device), torch.randn(3, 32, device=device)
    for name, value in (("__defaults__", (3.0,)), ("__kwdefaults__", {"shift": 5.0}), ("__code__", later.__code__)):
        assert fused_mlp.fuse_mlps(module).fused
        setattr(Reloaded.forward, name, value)
        assert fused_mlp.explain(module).implementation == "original"
        expected = Reloaded.forward(module, x)
        assert torch.equal(module(x), expected)
        assert fused_mlp.fuse_mlps(module).fused
        assert fused_mlp.explain(module).implementation == "fused"
        torch.testing.assert_close(module(x), expected)


def intermediate(self, hidden_states):
    return 2 * self.intermediate_act_fn(self.dense(hidden_states))


def output(self, hidden_states, input_tensor):
    return self.LayerNorm(self.dense(hidden_states) - input_tensor)


@pytest.mark.parametrize(("kind", "later"), [(Intermediate, intermediate), (Output, output)])
def test_code_of_a_half_that_is_replaced_in_place(fused_mlp, device, monkeypatch, kind, later):
    module = Halves().to(device).eval()
    fused_mlp.fuse_mlps(module)
    x = torch.randn(3, 32, device=device)
    module(x)
    monkeypatch.setattr(kind.forward, "__code__", later.__code__)
    torch.testing.assert_close(module(x), Halves.feed_forward_chunk(module, x))
    assert f"a patched {kind.__name__}" in fused_mlp.explain(module).reason


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
    """A fused module treats anything that its class is patched with as an unfused one does, with the same arguments."""
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
    """A fused module follows a patch of a method that forward calls, in a base class that it inherits from."""

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
        return super().forward(x) - 1


@pytest.mark.parametrize("own", [False, True], ids=["inherited forward", "own forward"])
def test_a_class_that_is_switched(fused_mlp, device, own):
    """A module switched to a subclass, as by FSDP or parametrizations, runs the fused or the subclass's forward."""
    module = Gated().to(device)
    report = fused_mlp.fuse_mlps(module)
    kind = module.__class__ = Other if own else type("Sub", (Gated,), {})
    x = torch.randn(3, 32, device=device)
    torch.testing.assert_close(module(x), kind.forward(module, x))
    assert fused_mlp.explain(module).implementation == "fused" if not own else "original"
    report.restore()
    assert type(module) is kind and methods_of(module) == {}


def by_accelerate(module):
    accelerate = pytest.importorskip("accelerate.hooks")
    accelerate.add_hook_to_module(module, accelerate.ModelHook())


def by_partial(module):
    module.forward = functools.partial(module.forward)


def by_closure(module):
    forward = module.forward
    module.forward = lambda x: forward(x)


@pytest.mark.parametrize("wrap", [by_accelerate, by_partial, by_closure])
def test_a_wrapper_around_a_fused_method(fused_mlp, device, tell_ops, wrap):
    """A wrapper stays; the method that it wraps is fused, and runs the original once restored."""
    ops = []
    tell_ops(lambda name, given: ops.append(name))
    module, x = Gated().to(device).eval(), torch.randn(3, 32, device=device)
    expected = Gated.forward(module, x)
    report = fused_mlp.fuse_mlps(module)
    module(x)  # the first call learns the activation
    wrap(module)
    wrapper = module.forward
    is_seen = wrap is by_accelerate
    for _ in range(2):
        ops.clear()
        with torch.no_grad(), torch.autograd.profiler.profile():
            torch.testing.assert_close(module(x), expected)
        assert ops == ["gated_mlp"]
        assert fused_mlp.explain(module).implementation == ("fused" if is_seen else "original")
        report.restore()
        ops.clear()
        assert torch.equal(module(x), expected) and ops == []
        assert module.forward is wrapper
        assert fused_mlp.explain(module).implementation == "original"
        report = fused_mlp.fuse_mlps(module)
        assert bool(report.fused) == is_seen
        if not is_seen:
            break
    if is_seen:
        pytest.importorskip("accelerate.hooks").remove_hook_from_module(module)
        assert fused_mlp.explain(module).implementation == "fused"
        report.restore()
        assert methods_of(module) == {}


def test_a_forward_that_is_set_later(fused_mlp, device):
    module = Gated().to(device)
    report = fused_mlp.fuse_mlps(module)
    module.forward = lambda x: x + 1
    x = torch.randn(3, 32, device=device)
    assert torch.equal(module(x), x + 1)
    assert fused_mlp.explain(module).implementation == "original"
    (left,) = fused_mlp.fuse_mlps(module).left
    assert left.reason == f"its forward is overridden on the instance (from {__name__})"
    report.restore()
    assert torch.equal(module(x), x + 1)


def test_a_bound_method_of_a_class_that_is_patched(fused_mlp, device, monkeypatch):
    """A module that holds its class's method on the instance, as kernelize leaves it, runs that method however the
    class is patched, both fused and restored."""
    module = Gated().to(device)
    module.forward = module.forward
    x = torch.randn(3, 32, device=device)
    expected = module(x)
    report = fused_mlp.fuse_mlps(module)
    assert report.fused and fused_mlp.explain(module).implementation == "fused"
    with monkeypatch.context() as patched:
        patched.setattr(Gated, "forward", property(lambda self: nn.Identity()))  # a property comes first, as in Python
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
        self.parent = [self]  # a copy refers to itself

    def forward(self, x):
        return self.scale * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def test_a_copy_that_is_changed(fused_mlp, device):
    module = Scaled().to(device)
    report = fused_mlp.fuse_mlps(module)
    x = torch.randn(3, 32, device=device)
    expected = module(x)
    twin = copy.deepcopy(module)
    twin.scale = 3.0
    assert fused_mlp.explain(twin).implementation == "fused"
    torch.testing.assert_close(twin(x), 3 * expected)
    torch.testing.assert_close(module(x), expected)
    assert twin.parent[0] is twin
    report.restore()  # the report does not include the copy
    torch.testing.assert_close(twin(x), 3 * expected)


def test_a_shallow_copy(fused_mlp, device):
    """A shallow copy has its source's method, and is reported as unfused until it is fused itself."""
    module = Scaled().to(device)
    fused_mlp.fuse_mlps(module)
    twin = copy.copy(module)
    twin.scale = 3.0
    x = torch.randn(3, 32, device=device)
    assert torch.equal(twin(x), module(x))
    assert fused_mlp.explain(twin).implementation == "original"
    report = fused_mlp.fuse_mlps(twin)
    torch.testing.assert_close(twin(x), 3 * module(x))
    report.restore()
    torch.testing.assert_close(twin(x), 3 * module(x))
    assert fused_mlp.explain(module).implementation == "fused"


class Particular(Gated):
    """Defines how it is copied and pickled."""

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


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("kind", [Gated, sequence])
def test_pickle_protocols(fused_mlp, kind, protocol):
    module = kind()
    fused_mlp.fuse_mlps(module)
    x = torch.randn(3, 32)
    loaded = pickle.loads(pickle.dumps(module, protocol))
    assert type(loaded) is type(kind())
    torch.testing.assert_close(loaded(x), module(x))


def test_pickle_where_the_kernel_is_not(fused_mlp, tmp_path):
    module = nn.Sequential(Gated(), sequence())
    assert len(fused_mlp.fuse_mlps(module).modules) == 2
    code = (
        "import pickle, sys; module, x = pickle.load(open(sys.argv[1], 'rb')); print(module(x).sum().item()); "
        "assert not [name for name in sys.modules if 'fused_mlp' in name]"
    )
    saved = tmp_path / "saved"
    saved.write_bytes(pickle.dumps((module, torch.ones(1, 32))))
    ran = forks.run(code, saved, cwd=Path(__file__).parents[1] / "samples")
    assert ran.returncode == 0, ran.stderr
    assert float(ran.stdout) == pytest.approx(module(torch.ones(1, 32)).sum().item(), rel=1e-4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", [sequence, Intermediate, Plain, Gated])
def test_scripted_after_it_is_fused(fused_mlp, device, kind):
    """torch.jit.script compiles the original of a fused module."""
    module = nn.Sequential(kind()).to(device)
    fused_mlp.fuse_mlps(module)
    scripted = torch.jit.script(module)
    x = torch.randn(3, 32, device=device)
    torch.testing.assert_close(scripted(x), module(x))
    assert fused_mlp.explain(module[0]).implementation == "fused"


# Lifetime.


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("called", [False, True])
def test_a_model_is_gone_when_it_is_deleted(fused_mlp, device, kind, called):
    """A report does not keep a deleted model alive. Only fused models are in cycles, those of bound methods."""
    gc.freeze()  # limits collections to objects of this test
    for restored in (False, True):
        model = nn.ModuleList([kind(), kind()]).to(device)
        report = fused_mlp.fuse_mlps(model)
        if called:
            model[0](torch.randn(3, 32, device=device))
        fused_mlp.explain(model[0])
        references = [weakref.ref(part) for part in (*model.modules(), *model.parameters())]
        gc.collect()
        gc.disable()
        if restored:
            report.restore()
        del model
        gc.enable()
        if not restored:
            gc.collect()
        assert [reference() for reference in references] == [None] * len(references)
        report.restore()  # nothing is left to do
        assert len(report.fused) == 2


# Threads.


def test_threads(fused_mlp, device):
    """Threads that fuse and restore one model never see each other's half-done work."""
    model = nn.ModuleList([Gated(), Halves(), sequence()]).to(device)
    before = [dict(vars(module)) for module in model.modules()]
    x, errors = torch.randn(3, 32, device=device), []
    expected = [module(x) for module in model.eval()]

    def turns():
        try:
            for _ in range(20):
                report = fused_mlp.fuse_mlps(model)
                fused_mlp.explain(model)
                for module, result in zip(model, expected, strict=True):
                    torch.testing.assert_close(module(x), result)
                report.restore()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=turns) for _ in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert errors == []
    assert [{**vars(module), "training": True} for module in model.modules()] == before
