"""Rewritten methods compute the same as their originals; methods that cannot be rewritten are left."""

import copy
import importlib.util
import inspect
import itertools
import pickle
import sys
import textwrap
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_flatten

import look_alikes
from modules import Decoder, Gated, Lora, PackedGated, Plain
from safety import alike

# Look-alikes have the structure of an MLP and compute another function.


def behaviour(module, x):
    """Returns the effects of a call in evaluation and in training: results, gradients, state and the input."""
    seen = []
    for training in (False, True):
        module.train(training).zero_grad()
        given = x.clone().requires_grad_()
        torch.manual_seed(0)
        result = module(given + 0)
        results = [part for part in (result if isinstance(result, tuple) else (result,)) if part is not None]
        if results[0].requires_grad:
            sum(part.square().sum() for part in results).backward()
        gradients = [parameter.grad for parameter in module.parameters()]
        seen += [*results, given.grad, *gradients, *module.buffers(), torch.tensor(getattr(module, "calls", 0))]
        with torch.no_grad():
            inputs = x.clone()
            torch.manual_seed(0)
            result = module(inputs)
            seen += [inputs, *(result if isinstance(result, tuple) else (result,))]
    return [part.detach().clone() if isinstance(part, torch.Tensor) else part for part in seen]


def assert_alike(got, expected, **tolerance):
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        assert type(one) is type(other)
        if isinstance(one, torch.Tensor):
            torch.testing.assert_close(one, other, **tolerance)


@pytest.fixture(params=[*look_alikes.ALL, *look_alikes.WRITTEN], ids=lambda kind: getattr(kind, "__name__", kind))
def look_alike(request, written):
    """Gives a class, the pattern fused in it, and whether it has an MLP."""
    if isinstance(request.param, type):
        return request.param, request.param.fused, True
    parent, fused, body = look_alikes.WRITTEN[request.param]
    return written(body, parent), fused, request.param not in look_alikes.NO_MLPS


@pytest.mark.parametrize("verify", [True, False], ids=["verified", "unverified"])
def test_look_alikes(fused_mlp, device, look_alike, verify):
    """Only what the code proves is fused, with or without verification, and all results stay the same."""
    kind, fused, has_mlp = look_alike
    module = kind(bias=True).to(device)
    x = torch.randn(4, 32, device=device)
    plain = copy.deepcopy(module)
    report = fused_mlp.fuse_mlps(module, verify=verify)
    assert_alike(behaviour(module, x), behaviour(plain, x), rtol=1e-3, atol=1e-4)
    assert len(report.modules) == has_mlp
    if fused is None:
        assert report.fused == [] and all(left.reason for left in report.left)
        assert "forward" not in vars(module)
        assert fused_mlp.explain(module).implementation == "original"
    else:
        assert [entry.pattern for entry in report.modules if entry.extent != "none"] == [fused]
        report.restore()
        assert_alike(behaviour(module, x), behaviour(plain, x), rtol=0, atol=0)


def test_look_alikes_compile(fused_mlp, device, look_alike):
    """A fused look-alike compiles and gives the original's results."""
    torch.compiler.reset()
    module = look_alike[0](bias=True).to(device).eval()
    x = torch.randn(4, 32, device=device)
    with torch.no_grad():
        torch.manual_seed(0)
        expected = copy.deepcopy(module)(x)
        fused_mlp.fuse_mlps(module)
        compiled = torch.compile(module, backend="eager")
        torch.manual_seed(0)
        torch.testing.assert_close(compiled(x), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("sparsities", [(0.5, 0.0), (0.0, 0.5)], ids=str)
def test_what_an_attribute_decides(fused_mlp, device, sparsities):
    """Two instances of one class with different attributes compute different things, also after a change of each."""
    model = nn.Sequential(*(look_alikes.Configurable(sparsity) for sparsity in sparsities)).to(device)
    plain = copy.deepcopy(model)
    fused_mlp.fuse_mlps(model)
    x = torch.randn(3, 32, device=device)
    for _ in range(2):
        torch.testing.assert_close(model(x), plain(x))
        for module in (*model, *plain):
            module.activation_sparsity = 0.5 - module.activation_sparsity


class Detector(nn.Module):
    """A head with its layers in a loop, as in DETR."""

    def __init__(self, widths=(32, 40, 48, 4)):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in itertools.pairwise(widths))

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = F.relu(layer(x)) if i < len(self.layers) - 1 else layer(x)
        return x


class Chunked(Plain):
    """Its MLP is in a method that another method calls."""

    def ff_chunk(self, x):
        return self.fc2(self.activation_fn(self.fc1(x)))

    def forward(self, x):
        return torch.cat([self.ff_chunk(part) for part in x.split(1)])


class Inherited(Plain):
    """Its code reads names from its closure and has a multi-line string."""

    def forward(self, x):
        """A string
        of two lines."""
        return self.fc2(self.activation_fn(self.fc1(super().forward(Plain.forward(self, x)))))


def outer_function(self, x):
    return self.fc2(self.activation_fn(self.fc1(x)))


class Borrowed(Plain):
    """Its method was defined elsewhere under another name."""

    chunk = outer_function

    def forward(self, x):
        return self.chunk(x)


def sequence(*parts):
    return lambda: nn.Sequential(*(part() for part in parts))


def first(*sizes):
    return lambda: nn.Linear(*sizes)


FORMS = {
    "inline": (Decoder, "plain with residual and norm"),
    "method": (Chunked, "plain"),
    "closure": (Inherited, "plain"),
    "function": (Borrowed, "plain"),
    "loop": (Detector, "linear"),
    "sequence": (sequence(first(32, 88), nn.GELU, first(88, 32)), "plain"),
    "sequence with dropout": (sequence(first(32, 88), nn.SiLU, nn.Dropout, nn.Identity, first(88, 32)), "plain"),
    "half a sequence": (sequence(lambda: nn.LayerNorm(32), first(32, 88), nn.ReLU, lambda: nn.LayerNorm(88)), "linear"),
    "long sequence": (sequence(first(32, 8), nn.ReLU, first(8, 16), nn.ReLU, first(16, 4)), "linear, plain"),
}


def refused(fused_mlp, module):
    """Returns a pickled copy, fused again."""
    copied = pickle.loads(pickle.dumps(module))
    assert fused_mlp.explain(copied).implementation == "original"
    assert fused_mlp.fuse_mlps(copied).modules
    return copied


@pytest.mark.parametrize("form", FORMS)
def test_forms(fused_mlp, device, form):
    """MLPs without a module or a method of their own are fused, and restored."""
    make, pattern = FORMS[form]
    module = make().to(device)
    plain = copy.deepcopy(module)
    report = fused_mlp.fuse_mlps(module)
    assert [entry.pattern for entry in report.modules if entry.extent != "none"] == [pattern]
    x = torch.randn(4, 32, device=device)
    for candidate in (module, copy.deepcopy(module), refused(fused_mlp, module)):
        results = []
        for each in (candidate, plain):
            each.zero_grad()
            torch.manual_seed(0)
            trained = each.train()(x)
            (trained[0] if isinstance(trained, tuple) else trained).square().sum().backward()
            results.append([trained, [p.grad.clone() for p in each.parameters()], each.eval()(x)])
        torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)
    assert fused_mlp.explain(module).implementation == "fused"
    report.restore()
    assert fused_mlp.explain(module).implementation == "original"
    assert torch.equal(*(part[0] if isinstance(part, tuple) else part for part in (module(x), plain(x))))


def test_arguments_of_an_inline_mlp(fused_mlp, device):
    module = Decoder().to(device).eval()
    plain = copy.deepcopy(module)
    fused_mlp.fuse_mlps(module)
    x, mask = torch.randn(2, 32, device=device), torch.rand(32, device=device)
    for args, kwargs in (
        ((x,), {}),
        ((x, mask), {"scale": 3.0}),
        ((x, mask, 5, 6), {"scale": 2.0, "other": 7}),
        ((), {"hidden_states": x, "mask": mask}),
    ):
        torch.testing.assert_close(module(*args, **kwargs), plain(*args, **kwargs))
    for call in (lambda module: module(), lambda module: module(x, hidden_states=x)):
        with pytest.raises(TypeError) as of_fused:
            call(module)
        with pytest.raises(TypeError) as of_plain:
            call(plain)
        assert str(of_fused.value) == str(of_plain.value)


def doubled(module, args, output):
    return 2 * output


@pytest.mark.parametrize("whole", [True, False], ids=["MLP", "layer"])
def test_parts_of_a_sequence_that_are_altered(fused_mlp, device, whole):
    """Changes to parts of a sequence take effect, though their classes were seen before."""
    parts = [nn.LayerNorm(32), nn.Linear(32, 88), nn.GELU(), nn.Dropout(0.5)]
    parts += [nn.Linear(88, 32), nn.Dropout(0.5), nn.Linear(32, 8)][: 3 if whole else 0]
    plain = nn.Sequential(*parts).to(device).eval()
    module = copy.deepcopy(plain)
    assert fused_mlp.fuse_mlps(module).fused
    x = torch.randn(3, 32, device=device)

    def assert_same_now():
        with torch.no_grad():
            torch.testing.assert_close(*alike(lambda each: each(x), module, plain), rtol=1e-3, atol=1e-4)

    assert_same_now()
    for index in range(len(parts)):
        hooks = [each[index].register_forward_hook(doubled) for each in (module, plain)]
        assert_same_now()
        for hook in hooks:
            hook.remove()
    for index, part in enumerate(parts):
        if isinstance(part, nn.Dropout):
            for training in (True, False):
                module[index].train(training), plain[index].train(training)
                assert_same_now()
        elif isinstance(part, nn.Linear):
            for each in (module, plain):
                each[index].forward = lambda x, part=each[index]: 3 * nn.Linear.forward(part, x)
            assert_same_now()


def test_code_is_read_only_if_it_is_what_runs(fused_mlp, device):
    """A function without source, or with another function's, is left."""

    class Edited(Plain):  # as if its file changed after the import
        def forward(self, x):
            return self.fc2(self.activation_fn(self.fc1(x)))

        def doubled(self, x):
            return self.fc2(2 * self.activation_fn(self.fc1(x)))

    class Made(Plain):
        pass

    line = Edited.forward.__code__.co_firstlineno
    Edited.forward.__code__ = Edited.doubled.__code__.replace(co_firstlineno=line)
    del Edited.doubled
    exec("def forward(self, x):\n    return self.fc2(F.silu(self.fc1(x)))", names := {"F": F})

    class Decorated(Plain):
        forward = torch.no_grad()(names["forward"])

    Made.forward = names["forward"]
    for kind in (Edited, Made, Decorated):
        module = kind().to(device)
        if kind is Made:  # the names in its code show an MLP
            del module.activation_fn
        report = fused_mlp.fuse_mlps(module)
        assert [reason.code for left in report.left for reason in left.reasons] == ["no source"]


def test_a_method_shows_its_own_lines(fused_mlp, device):
    """An error inside a fused method points at the original's source line."""
    module = Decoder().to(device)
    fused_mlp.fuse_mlps(module)
    module.self_attn = None
    with pytest.raises(TypeError) as caught:
        module(torch.randn(2, 32, device=device))
    assert "hidden_states + self.self_attn(" in str(caught.traceback[-1].statement)
    assert inspect.signature(module.forward) == inspect.signature(Decoder().forward)


# Methods as users write them: their fused versions compute the same, in the same order.

HEAD = """
import contextlib
import torch
import torch.nn.functional as F
from torch import nn
from modules import Gated, PackedGated, Plain
"""


@pytest.fixture
def written(tmp_path):
    """Returns a function that writes a class to a file and imports it."""

    def make(body, parent="Plain", arguments="x", head=HEAD):
        path = tmp_path / "written.py"
        method = f"def forward(self, {arguments}):\n{textwrap.indent(body, '    ')}\n"
        path.write_text(f"{head}\nclass Written({parent}):\n{textwrap.indent(method, '    ')}")
        spec = importlib.util.spec_from_file_location("written", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.Written

    return make


def called_in_order(module):
    """Returns a list that hooks fill with the paths of the parts in the order of their calls."""
    paths = []
    for path, part in module.named_modules():
        if path:
            part.register_forward_hook(lambda *_, path=path: paths.append(path))
    return paths


def with_dropout_in_adapters(module):
    """Wraps projections as peft does, with dropout that draws random numbers at each call."""
    torch.manual_seed(0)
    for name, part in list(module.named_children()):
        if isinstance(part, nn.Linear):
            setattr(module, name, nn.Sequential(nn.Dropout(0.5), Lora(part)).to(part.weight.device))
    return module


def assert_same(fused_mlp, module, *args, fused=None):
    """Fuses a module and compares it with its original as it is, with adapters, and with hooks."""
    plain = copy.deepcopy(module).train()
    report = fused_mlp.fuse_mlps(module.train(), verify=False)
    if fused is not None:
        assert [entry.pattern for entry in report.fused] == ([fused] if fused else [])
    assert report.fused or fused == "" or all(entry.reason for entry in report.left)
    for change in (lambda module: module, with_dropout_in_adapters):
        results = alike(lambda each: each(*copy.deepcopy(args)), change(module), change(plain))
        torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)
    calls = [called_in_order(each) for each in (module, plain)]
    alike(lambda each: each(*copy.deepcopy(args)), module, plain)
    assert calls[0] == calls[1] != []
    return report


# Ways to rebind `h` between the projection and the activation.
BINDINGS = {
    "assignment": "h = other",
    "pair": "h, y = other, 1",
    "list": "[h, *y] = [other]",
    "star": "y, *h = 1, other\nh = h[0]",
    "augmented": "h *= other",
    "annotated": "h: torch.Tensor = other",
    "walrus": "y = (h := other)",
    "walrus in a comprehension": "y = [(h := part) for part in [other]]",
    "walrus in a loop": "while (h := other) is None: pass",
    "for": "for h in [other]: pass",
    "for and else": "for _ in []: pass\nelse: h = other",
    "with": "with contextlib.nullcontext(other) as h: pass",
    "finally": "try: pass\nfinally: h = other",
    "list pattern": "match [other, 1]:\n    case [h, *_]: pass",
    "mapping pattern": "match {'y': other}:\n    case {'y': h}: pass",
    "class pattern": "match other:\n    case torch.Tensor(data=h): pass",
    "as pattern": "match other:\n    case torch.Tensor() as h: pass",
    "name pattern": "match other:\n    case h: pass",
    "nonlocal": "def change():\n    nonlocal h\n    h = other\nchange()",
    "comprehension of its own": "y = [h for h in [other]]",
    "function of its own": "y = (lambda h: h)(other)",
    "condition": "if x.shape[0] > 1: h = other",
}


@pytest.mark.parametrize("binding", BINDINGS)
@pytest.mark.parametrize("arguments", ["x", "x, mask=None, *rest, scale=1.0, **options"])
def test_a_name_that_is_bound_anew(fused_mlp, device, written, binding, arguments):
    other = "other = torch.linspace(-1, 1, 88).to(x)"
    body = f"{other}\nh = self.fc1(x)\n{BINDINGS[binding]}\nreturn self.fc2(self.activation_fn(h))"
    assert_same(fused_mlp, written(body, arguments=arguments)().to(device), torch.randn(4, 32, device=device))


@pytest.mark.parametrize("binding", BINDINGS)
def test_an_input_that_is_bound_anew(fused_mlp, device, written, binding):
    """An input may be rebound between the two projections that read it."""
    body = f"""\
other, h = torch.linspace(-1, 1, 88).to(x)[:32], x
gate = self.gate_proj(h)
{BINDINGS[binding]}
return self.down_proj(self.act_fn(gate) * self.up_proj(h))"""
    assert_same(fused_mlp, written(body, "Gated")().to(device), torch.randn(4, 32, device=device))


ORDERS = {
    "return self.down_proj(self.up_proj(x) * self.act_fn(self.gate_proj(x)))": "gated",
    "return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))": "gated",
    "return self.up_proj(x) * self.act_fn(self.gate_proj(x))": "gated linear",
    "return self.down_proj(self.up_proj(x).clamp(-1, 1) * self.act_fn(self.gate_proj(x)))": "pointwise",
    "return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x).clamp(-1, 1))": "pointwise",
    "return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x + 1))": "pointwise",
    "gate = self.gate_proj(x); up = self.up_proj(x); return self.down_proj(self.act_fn(gate) * up)": "gated",
    "up = self.up_proj(x); gate = self.gate_proj(x); return self.down_proj(self.act_fn(gate) * up)": "gated",
    "up = self.up_proj(x); gate = self.act_fn(self.gate_proj(x)); return self.down_proj(gate * up)": "gated",
    "gate = self.act_fn(self.gate_proj(x)); up = self.up_proj(x); return self.down_proj(up * gate)": "gated",
    "gate = self.gate_proj(x); return self.down_proj(self.up_proj(x) * self.act_fn(gate))": "gated",
    "gate = self.act_fn(self.gate_proj(x)); return self.down_proj(self.up_proj(x).tanh() * gate)": "linear",
    # Another part runs in between, or an early return skips the rest.
    "gate = self.gate_proj(x); y = self.down_proj(self.up_proj(x)); return self.act_fn(gate) * self.up_proj(y)": None,
    "gate = self.gate_proj(x); y = self.up_proj(x)\nif y.sum() > 1e9: return y\nreturn self.act_fn(gate) * y": None,
    "gate = self.gate_proj(x); return self.down_proj(self.act_fn(gate)) if self.training else x": None,
}


@pytest.mark.parametrize("body", ORDERS)
def test_calls_in_the_order_of_the_code(fused_mlp, device, written, body):
    module = written(body.replace("; ", "\n"), "Gated")().to(device)
    assert_same(fused_mlp, module, torch.randn(4, 32, device=device), fused=ORDERS[body])


@pytest.mark.parametrize("kind", [Gated, PackedGated, Plain, Decoder, look_alikes.FunctionalDropout])
def test_calls_of_models_in_their_order(fused_mlp, device, kind):
    assert_same(fused_mlp, kind().to(device), torch.randn(4, 32, device=device))


SPELLED = {
    "F.gelu(h, approximate='tanh')": "plain",
    "F.gelu(h, approximate=self.approximate)": "plain",
    "F.relu(h, inplace=True)": "plain",
    "F.relu(h, True)": "plain",
    "F.silu(h, inplace=self.training)": "plain",
    "torch.nn.functional.silu(h, inplace=True)": "plain",
    "h.relu()": "",
    "h * torch.sigmoid(h)": "",
    "F.relu(h) ** 2": "linear",
}


@pytest.mark.parametrize("spelling", SPELLED)
def test_activations_that_are_spelled_out(fused_mlp, device, written, spelling):
    kind = written(f"h = self.fc1(x)\nreturn self.fc2({spelling})")
    module = kind().to(device)
    module.approximate = "none"
    x = torch.randn(4, 32, device=device)
    assert_same(fused_mlp, module, x, fused=SPELLED[spelling])


@pytest.mark.parametrize("spelling", [spelling for spelling, fused in SPELLED.items() if fused == "plain"])
def test_activations_that_are_spelled_out_compile(fused_mlp, device, written, spelling):
    torch.compiler.reset()
    module = written(f"h = self.fc1(x)\nreturn self.fc2({spelling})")().to(device)
    module.approximate = "none"
    x = torch.randn(4, 32, device=device)
    expected = module(x)
    fused_mlp.fuse_mlps(module)
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), expected, rtol=1e-3, atol=1e-4)


def test_an_option_that_changes(fused_mlp, device, written):
    """An activation's option is read at each call."""
    module = written("return self.fc2(F.gelu(self.fc1(x), approximate=self.approximate))")().to(device)
    module.approximate = "none"
    plain = copy.deepcopy(module)
    assert fused_mlp.fuse_mlps(module).fused
    x = 3 * torch.randn(4, 32, device=device)
    for approximate in ("none", "tanh", "none"):
        module.approximate = plain.approximate = approximate
        torch.testing.assert_close(module(x), plain(x), rtol=1e-5, atol=1e-5)
    module.approximate = plain.approximate = "other"
    for each in (module, plain):
        with pytest.raises(RuntimeError, match="approximate"):
            each(x)


@pytest.mark.parametrize(
    ("spelling", "name"),
    [("F.leaky_relu(h, 0.1)", "leaky_relu"), ("F.silu(h, other=True)", "silu")],
)
def test_activations_that_are_not_known_are_reported(fused_mlp, device, written, spelling, name):
    module = written(f"h = self.fc1(x)\nreturn self.fc2({spelling})")().to(device)
    del module.activation_fn
    report = fused_mlp.fuse_mlps(module)
    assert report.fused == [] and name in report.left[0].reason


@pytest.mark.parametrize("place", range(4))
def test_a_sequence_with_none_in_it(fused_mlp, device, place):
    """A sequence with a None at any place raises the original's error."""
    module = nn.Sequential(nn.Linear(32, 88), nn.GELU(), nn.Identity(), nn.Linear(88, 32)).to(device).eval()
    assert fused_mlp.fuse_mlps(module).fused
    module[place] = None
    with torch.no_grad(), pytest.raises(TypeError, match="'NoneType' object is not callable"):
        module(torch.randn(3, 32, device=device))


@pytest.mark.parametrize("value", [None, 0.0])
@pytest.mark.parametrize("part", ["norm", "fc1", "activation_fn", "fc2"])
def test_a_part_that_cannot_be_called(fused_mlp, device, written, part, value):
    """A part that cannot be called raises the original's error, even if None means an absent operand of the op."""
    module = written("return x + self.fc2(self.activation_fn(self.fc1(self.norm(x))))")()
    module.norm = nn.LayerNorm(32)
    assert fused_mlp.fuse_mlps(module.to(device).eval()).fused
    delattr(module, part)
    setattr(module, part, value)
    with torch.no_grad(), pytest.raises(TypeError, match=f"'{type(value).__name__}' object is not callable"):
        module(torch.randn(3, 32, device=device))


# Names that the source uses already.

TAKEN = """
def fused_plain(*_): raise AssertionError
fused_linear = original_method = method_instead = getattr = fused_plain
"""


@pytest.mark.parametrize("name", ["fused_plain", "fused", "original_method", "method_instead", "getattr", "call"])
def test_names_that_are_taken(fused_mlp, device, written, name):
    """The names that rewriting adds never collide with names around a method or among its arguments."""
    body = f"return self.fc2(self.activation_fn(self.fc1(x))) * {name}"
    module = written(body, arguments=f"x, {name}=2", head=HEAD + TAKEN)().to(device)
    assert_same(fused_mlp, module, torch.randn(4, 32, device=device), 3.0, fused="plain")
    added = set(module.forward.__func__.__code__.co_freevars) - {"__class__"}
    assert added and not any(map(str.isidentifier, added))


# Names that a fused method no longer looks up.

IMPORTED = "from torch.nn.functional import dropout\n"


@pytest.mark.parametrize("is_loaded", [True, False], ids=["module", "code"])
@pytest.mark.parametrize(
    ("body", "name", "other"),
    [
        ("return self.fc2(dropout(F.relu(self.fc1(x)), 0.1, self.training))", "dropout", lambda x, p, training: 2 * x),
        (
            "h = dropout(F.relu(self.fc1(x)), 0.1, self.training)\nreturn dropout(self.fc2(h).tanh(), 0.1, False)",
            "dropout",
            lambda x, p, training: 2 * x,
        ),
    ],
    ids=["dropout", "dropout twice"],
)
def test_a_name_that_stands_for_something_else_later(
    fused_mlp, device, written, monkeypatch, body, name, other, is_loaded
):
    kind = written(body, head=HEAD + IMPORTED)
    if is_loaded:
        home = types.ModuleType("written")
        vars(home).update(kind.forward.__globals__)
        function = types.FunctionType(kind.forward.__code__, vars(home), "forward")
        kind = type("Written", (kind,), {"forward": function})
        function.__module__ = "written"
        monkeypatch.setitem(sys.modules, "written", home)
    module = nn.ModuleDict({"mlp": kind()}).to(device).eval()["mlp"]
    assert fused_mlp.fuse_mlps(module).fused
    x = torch.randn(4, 32, device=device)
    for _ in range(2):
        torch.testing.assert_close(module(x), kind.forward(module, x))
    with monkeypatch.context() as changed:
        changed.setitem(kind.forward.__globals__, name, other)
        torch.testing.assert_close(module(x), kind.forward(module, x))
        assert fused_mlp.explain(module).implementation == "original"
    assert fused_mlp.explain(module).implementation == "fused"


# Statements whose bytecode depends on their context.

CONTEXTS = {
    "imported": HEAD,
    "imported under a condition": f"if True:{textwrap.indent(HEAD, '    ')}",
    "imported by star": "from look_alikes import *\n",
    "imported elsewhere": "import look_alikes\nglobals().update(vars(look_alikes), __name__=__name__)\n",
    "annotations": f"from __future__ import annotations\n{HEAD}",
    "an attribute's name": f"{HEAD}\nimport math as fc1, math as activation_fn\n",
}


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize(
    "body",
    [
        "return self.fc2(F.silu(self.fc1(x)))",
        "fc1 = x\nreturn self.fc2(F.silu(self.fc1(fc1.float())))",
        "with torch.no_grad():\n    return self.fc2(F.silu(self.fc1(x)))",
        "with torch.no_grad():\n    y = self.fc2(F.silu(self.fc1(x)))\nreturn y",
        "return (lambda y: y)(self.fc2(F.silu(self.fc1(x))))",
    ],
)
def test_code_that_depends_on_global_state(fused_mlp, device, written, context, body):
    module = written(body, head=CONTEXTS[context])().to(device)
    assert_same(fused_mlp, module, torch.randn(4, 32, device=device), fused="plain")


def test_a_method_that_does_nothing_now(fused_mlp, device, written):
    """A method with all of its code in a branch that is not taken when fused works once the branch is taken."""
    body = "gate, up = self.gate_up_proj(x).chunk(2, self.dim)\nreturn self.down_proj(self.activation_fn(gate) * up)"
    module = written(f"if self.flag:\n{textwrap.indent(body, '    ')}", "PackedGated")().to(device)
    module.flag, module.dim = False, -1
    plain, x = copy.deepcopy(module), torch.randn(4, 32, device=device)
    (entry,) = fused_mlp.fuse_mlps(module).modules
    assert [reason.code for reason in entry.reasons] == ["other branch"] and module(x) is None
    module.flag = plain.flag = True
    torch.testing.assert_close(module(x), plain(x), rtol=1e-3, atol=1e-4)


# Methods that are not plain functions of a module.

ODD = {
    "generator": "yield self.fc2(self.activation_fn(self.fc1(x)))",
    "self rebound": "self = self.eval()\nreturn self.fc2(self.activation_fn(self.fc1(x)))",
    "self by a pattern": "match self:\n    case self: return self.fc2(self.activation_fn(self.fc1(x)))",
    "locals": "h = self.fc1(x)\ny = len(locals())\nreturn self.fc2(self.activation_fn(h)) * y",
    "global": "global h\nh = self.fc1(x)\nreturn self.fc2(self.activation_fn(h))",
    "private": "__h = self.fc1(x)\nreturn self.fc2(self.activation_fn(__h))",
}


def test_scripted_parts(fused_mlp, device, written):
    """A module compiled by TorchScript is called, whether set before or after fusing."""
    kind = written("return self.fc2(self.activation_fn(self.fc1(self.before(x))))")
    module = kind().to(device)
    module.before = torch.jit.script(nn.Sequential(nn.Linear(32, 32), nn.ReLU())).to(device)
    plain, x = copy.deepcopy(module), torch.randn(4, 32, device=device)
    assert [entry.pattern for entry in fused_mlp.fuse_mlps(module).fused] == ["plain"]
    torch.testing.assert_close(module(x), plain(x), rtol=1e-3, atol=1e-4)
    module.activation_fn = plain.activation_fn = torch.jit.script(nn.SiLU())
    torch.testing.assert_close(module(x), plain(x), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("odd", ODD)
def test_methods_that_are_left(fused_mlp, device, written, odd):
    module = written(ODD[odd])().to(device)
    report = fused_mlp.fuse_mlps(module)
    assert report.fused == [] and report.left[0].reason


def test_positional_only(fused_mlp, device, written):
    module = written("return self.fc2(self.activation_fn(self.fc1(x)))", arguments="/, x")().to(device)
    assert_same(fused_mlp, module, torch.randn(4, 32, device=device), fused="plain")


def test_a_local_name_that_is_read_before_it_is_bound(fused_mlp, device, written):
    """A local name read before it is bound raises, even with a global of that name and binding in the fused call."""
    body = "y = h\nh = self.fc1(x)\nreturn self.fc2(self.activation_fn(h)) + y"
    module = written(body, head=f"{HEAD}\nh = 1.0\n")().to(device)
    assert fused_mlp.fuse_mlps(module).fused
    with pytest.raises(UnboundLocalError):
        module(torch.randn(4, 32, device=device))


@pytest.mark.parametrize("turned", ["gate_proj", "up_proj"])
@pytest.mark.parametrize(
    "body",
    [
        "return self.act_fn(self.gate_proj(x)) * self.up_proj(x)",
        "return self.up_proj(x) * self.act_fn(self.gate_proj(x))",
        "up = self.up_proj(x)\nreturn self.act_fn(self.gate_proj(x)) * up",
        "gate = self.gate_proj(x)\nup = self.up_proj(x)\nreturn up * self.act_fn(gate)",
        "up = self.up_proj(x) + 1\nreturn up * self.act_fn(self.gate_proj(x))",
        "up = self.up_proj(x) + 1\nreturn self.act_fn(self.gate_proj(x)) * up",
        "gate = self.gate_proj(x)\nup = self.up_proj(x)\nreturn up * self.act_fn(gate), gate",
    ],
)
@pytest.mark.parametrize("act", [nn.SiLU, nn.Mish], ids=lambda act: act.__name__)
def test_products_of_what_lies_differently(fused_mlp, device, written, body, turned, act):
    """Products of differently strided factors have the left factor's strides, as in eager."""
    module = written(body, "Gated")(act=nn.SiLU, sizes=(32, 32, 32)).to(device)
    setattr(module, turned, nn.Identity())
    plain, x = copy.deepcopy(module), torch.randn(32, 3, device=device).t()
    assert fused_mlp.fuse_mlps(module).fused
    module.act_fn = plain.act_fn = act()
    got, expected = (tree_flatten(each(x))[0] for each in (module, plain))
    assert [each.stride() for each in got] == [each.stride() for each in expected]


def test_attributes_that_order_the_halves_may_change(fused_mlp, device):
    module = look_alikes.OrderedByAnAttribute().to(device)
    plain, x = copy.deepcopy(module), torch.randn(4, 32, device=device)
    fused_mlp.fuse_mlps(module)
    for changes in ({"gate_last": True}, {"gate_last": False}, {"chunk_dim": 0, "down_proj": nn.Identity()}, {}):
        for each in (module, plain):
            for name, value in changes.items():
                setattr(each, name, value)
        with torch.no_grad():
            torch.testing.assert_close(module(x), plain(x), rtol=1e-5, atol=1e-5)
