"""The block around an MLP: its residual and its norms in one op with the MLP."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import modules
from block_layers import (
    NOT_SETTLED,
    OTHER_FORMS,
    Around,
    AroundDropping,
    AroundFunction,
    AroundSequence,
    Behind,
    Branching,
    Decoding,
    HalfAndNorm,
    InFront,
    LayerScale,
    Multiplied,
    OfConv1D,
    OwnScale,
    PackedDecoding,
    Parallel,
    Reordered,
    Sandwich,
    Scaling,
    Settled,
    SettledTwice,
    Summed,
)  # fmt: skip
from modules import Gated, Halves, RMSNorm
from safety import alike, assert_close, warmed, x_of
from test_block_ops import LAYER, NONE, RMS, SCALE
from test_coverage import built, inputs_of, largest_error

KINDS = {
    OfConv1D: (1.0, LAYER, NONE, False),
    Halves: (1.0, NONE, LAYER, True),
    Behind: (1.0, NONE, LAYER, True),
    InFront: (1.0, LAYER, NONE, False),
    Summed: (1.0, NONE, NONE, False),
    Around: (1.0, LAYER, NONE, False),
    Decoding: (1.0, RMS, NONE, False),
    PackedDecoding: (1.0, RMS, NONE, False),
    AroundDropping: (1.0, LAYER, NONE, False),
    AroundSequence: (1.0, LAYER, NONE, False),
    Branching: (1.0, LAYER, NONE, False),
    Sandwich: (1.0, RMS, RMS, False),
    Reordered: (1.0, NONE, LAYER, False),
    Multiplied: (0.22, RMS, NONE, False),
    HalfAndNorm: (0.5, NONE, LAYER, True),
    Scaling: (1.0, LAYER, SCALE, False),
    AroundFunction: (1.0, LAYER, NONE, False),
    OwnScale: (1.0, LAYER, SCALE, False),
    Parallel: (1.0, NONE, NONE, False),
    Settled: (1.0, RMS, RMS, False),
    SettledTwice: (1.0, LAYER, NONE, False),
}


def fused_pair(fused_mlp, device, kind):
    return warmed(fused_mlp, kind().to(device).eval(), x_of(device), extent="full")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_one_op(fused_mlp, device, blocks, kind, mode):
    module, fused = fused_pair(fused_mlp, device, kind)
    blocks.clear()
    for x in (x_of(device), x_of(device).mT.contiguous().mT, x_of(device)[:, :0]):
        with mode():
            got, expected = fused(x), module(x)
        assert_close(got, expected)
        assert got.is_contiguous()
    assert blocks == 3 * [KINDS[kind]]


@pytest.mark.parametrize(
    ("kind", "name", "calls"),
    [(Settled, "doubles", []), (Settled, "flips", []), (SettledTwice, "norm_after", [(1.0, NONE, LAYER, False)])],
)
def test_settled_conditions_are_asked_at_each_call(fused_mlp, device, blocks, kind, name, calls):
    module, fused = fused_pair(fused_mlp, device, kind)
    x, before = x_of(device), getattr(module, name)
    for value, expected in ((not before, calls), (before, [KINDS[kind]])):
        blocks.clear()
        for each in (module, fused):
            setattr(each, name, value)
        with torch.no_grad():
            assert_close(fused(x), module(x))
        assert blocks == expected


@pytest.mark.parametrize("kind", NOT_SETTLED.values(), ids=NOT_SETTLED)
def test_conditions_that_are_not_settled(fused_mlp, device, kind):
    module, fused = fused_pair(fused_mlp, device, kind)
    with torch.no_grad():
        module(x_of(device))  # to match the calls of the fused one
        for _ in range(3):
            x = x_of(device)
            assert_close(fused(x), module(x))
            assert fused.norm_after == module.norm_after


class Others:
    """A replacement of `F`."""

    silu = staticmethod(torch.tanh)

    def __getattr__(self, name):
        return getattr(torch.nn.functional, name)


@pytest.mark.parametrize("patched", ["the function", "the name of its module"])
def test_another_function_of_the_name(fused_mlp, device, blocks, monkeypatch, patched):
    module, fused = fused_pair(fused_mlp, device, AroundFunction)
    x = x_of(device)
    with torch.no_grad():
        usual = module(x)
        with monkeypatch.context() as patch:
            if patched == "the function":
                patch.setattr(F, "silu", torch.tanh)
            else:
                patch.setattr(modules, "F", Others())
            expected = module(x)
            assert (expected - usual).abs().max() > 1e-3
            assert_close(fused(x), expected)
        blocks.clear()
        assert_close(fused(x), usual)
    assert blocks == [KINDS[AroundFunction]]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_what_autograd_follows_has_parts(fused_mlp, device, blocks, kind):
    module, fused = fused_pair(fused_mlp, device, kind)
    blocks.clear()
    taken, x = [], x_of(device).requires_grad_()
    for each in (module, fused):
        taken.append(torch.autograd.grad(each(x).sin().sum(), [x, *each.parameters()]))
    assert_close(list(taken[1]), list(taken[0]))
    for parameter in fused.parameters():
        parameter.requires_grad_(False)
    assert not fused(x_of(device)).requires_grad
    norm = next(part for part in fused.modules() if is_norm(part))
    norm.weight.requires_grad_(True)
    assert fused(x_of(device)).requires_grad
    assert len(blocks) == 1


def the_norm(module):
    return next((part, name) for part in module.modules() for name, child in part.named_children() if is_norm(child))


def is_norm(part):
    return isinstance(part, (nn.LayerNorm, RMSNorm))


def changed_norm(make):
    def change(module, monkeypatch):
        part, name = the_norm(module)
        setattr(part, name, make(getattr(part, name)))

    return change


def with_attribute(name, value):
    def change(module, monkeypatch):
        part, child = the_norm(module)
        setattr(getattr(part, child), name, value(getattr(part, child)) if callable(value) else value)

    return change


class Doubling(nn.LayerNorm):
    def forward(self, input):
        return 2 * super().forward(input)


def hooked(norm):
    norm.register_forward_hook(lambda part, args, output: 2 * output)
    return norm


def of_two_dimensions(norm):
    return nn.LayerNorm((7, 32)).to(norm.weight)


def patched(owner, name):
    def change(module, monkeypatch):
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **kwargs: 2 * original(*args, **kwargs))

    return change


# Changes to a fused module, and whether its block still runs as one op.
CHANGES = {
    "another eps": (with_attribute("eps", 0.5), True),
    "another weight": (with_attribute("weight", lambda norm: nn.Parameter(2 * norm.weight)), True),
    "no bias": (with_attribute("bias", None), True),
    "no weight": (with_attribute("weight", None), True),
    "an overridden forward": (with_attribute("forward", lambda norm: lambda x: 2 * x), False),
    "an eps that is no float": (with_attribute("eps", 1), False),
    "another norm": (changed_norm(lambda norm: nn.LayerNorm(32, bias=False).to(norm.weight)), True),
    "torch's RMSNorm": (changed_norm(lambda norm: nn.RMSNorm(32, eps=1e-6).to(norm.weight)), True),
    "RMSNorm without an eps": (changed_norm(lambda norm: nn.RMSNorm(32).to(norm.weight)), False),
    "Identity": (changed_norm(lambda norm: nn.Identity()), False),
    "a subclass": (changed_norm(lambda norm: Doubling(32).to(norm.weight)), False),
    "two dimensions": (changed_norm(of_two_dimensions), False),
    "a hook": (changed_norm(hooked), False),
    "a patched class": (patched(nn.LayerNorm, "forward"), False),
    "a patched function": (patched(F, "layer_norm"), False),
    "wider": (lambda module, monkeypatch: module.double(), False),
}


@pytest.mark.parametrize("kind", [Halves, Behind, InFront, Around, Reordered], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_seen(fused_mlp, device, monkeypatch, blocks, change, kind):
    module, fused = fused_pair(fused_mlp, device, kind)
    x, (alter, is_one) = x_of(device), CHANGES[change]
    for each in (module, fused):
        torch.manual_seed(0)
        with monkeypatch.context() if each is module and change.startswith("a patched") else torch.no_grad() as context:
            alter(each, context or monkeypatch)
            if each is module:
                with torch.no_grad():
                    expected = module(x.to(next(module.parameters()).dtype))
    blocks.clear()
    with torch.no_grad():
        for _ in range(2):
            assert_close(fused(x.to(expected.dtype)), expected)
    passes = change == "Identity" and kind is Reordered  # this norm acts on the MLP's result
    assert len(blocks) == 2 * (is_one or passes)


class Casting(nn.LayerNorm):
    """As in OpenCLIP."""

    def forward(self, x):
        dtype = x.dtype
        x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return x.to(dtype)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_a_layer_norm_that_casts_its_result(fused_mlp, device, blocks, dtype):
    module = InFront().eval()
    changed_norm(lambda norm: Casting(32, eps=0.1))(module, None)
    module, fused = warmed(fused_mlp, module.to(device, dtype), x_of(device).to(dtype), extent="full")
    blocks.clear()
    x = x_of(device).to(dtype)
    with torch.no_grad():
        assert_close(fused(x), module(x), 1e-4 if dtype == torch.float32 else 1e-2)
    assert blocks == [KINDS[InFront]]


def hook(part):
    part.register_forward_hook(lambda part, args, output: 2 * output)


def setting(name, make):
    """Returns a change that sets a module's attribute to a value made on the module's device."""

    def change(module, patch):
        with next(module.parameters()).device:
            setattr(module, name, make())

    return change


def own_scale(make):
    return setting("scale", lambda: nn.Parameter(make()))


def patched_scale(name, value):
    return lambda module, patch: patch.setattr(LayerScale, name, value, raising=False)


# Changes to other parts of a fused module by its kind, and the block op's call that remains, if any.
PART_CHANGES = {
    (Around, "a hook"): (lambda module, _: hook(module.mlp), None),
    (Around, "a hook of a part"): (lambda module, _: hook(module.mlp.fc2), None),
    (Around, "a hook of the dropout"): (lambda module, _: hook(module.dropout), None),
    (Around, "an overridden forward"): (lambda module, _: setattr(module.mlp, "forward", lambda x: 2 * x), None),
    (Around, "another module"): (setting("mlp", lambda: nn.Linear(32, 32)), None),
    (Around, "another activation"): (lambda module, _: setattr(module.mlp, "activation_fn", nn.Tanh()), None),
    (Around, "a gated one"): (setting("mlp", Gated), None),
    (Multiplied, "another factor"): (setting("residual_multiplier", lambda: 0.7), (0.7, RMS, NONE, False)),
    (Multiplied, "no float"): (setting("residual_multiplier", lambda: 2), None),
    (Multiplied, "a tensor"): (setting("residual_multiplier", lambda: torch.tensor(0.3)), None),
    (Multiplied, "a tensor of features"): (
        setting("residual_multiplier", lambda: torch.arange(32.0)),
        (1.0, RMS, SCALE, False),
    ),
    (Scaling, "another parameter"): (
        lambda module, _: setattr(module.scale, "lambda1", nn.Parameter(3 * module.scale.lambda1)),
        KINDS[Scaling],
    ),
    (Scaling, "a hook"): (lambda module, _: hook(module.scale), None),
    (Scaling, "an overridden forward"): (lambda module, _: setattr(module.scale, "forward", lambda x: 2 * x), None),
    (Scaling, "a patched class"): (patched_scale("forward", lambda self, x: 2 * x), None),
    (Scaling, "an attribute of the class"): (patched_scale("lambda1", 3.0), None),
    (Scaling, "one value"): (
        lambda module, _: setattr(module.scale, "lambda1", nn.Parameter(module.scale.lambda1[:1])),
        KINDS[Scaling],  # which raises
    ),
    (OwnScale, "one for all"): (own_scale(lambda: torch.randn(1)), None),
    (OwnScale, "a number"): (own_scale(lambda: torch.randn(())), None),
    (OwnScale, "for each row too"): (own_scale(lambda: torch.randn(7, 32)), None),
    (OwnScale, "another dtype"): (own_scale(lambda: torch.randn(32, dtype=torch.float64)), None),
    (OwnScale, "strided"): (own_scale(lambda: torch.randn(64)[::2]), KINDS[OwnScale]),
    (OwnScale, "of ones"): (own_scale(lambda: torch.ones(32)), KINDS[OwnScale]),
}


@pytest.mark.parametrize(("kind", "change"), PART_CHANGES, ids=lambda value: getattr(value, "__name__", value))
def test_changes_of_parts_are_seen(fused_mlp, device, monkeypatch, blocks, kind, change):
    alter, call = PART_CHANGES[kind, change]
    xs = x_of(device)[:, :7], x_of(device)[:, :7]

    def changed(module):
        with monkeypatch.context() as patch, torch.no_grad():
            alter(module, patch)
            return [module(x) for x in xs]

    module, fused = fused_pair(fused_mlp, device, kind)
    blocks.clear()
    assert_close(*alike(changed, fused, module))
    assert blocks == ([] if call is None else [call] * 2)


def test_no_factor(fused_mlp, device):
    for each in fused_pair(fused_mlp, device, Multiplied):
        each.residual_multiplier = None
        with pytest.raises(TypeError):
            each(x_of(device))


def patched_later(module):
    type(module.mlp).forward = lambda self, x: 5 * x


# Changes to an MLP that is a sequence.
SEQUENCE_CHANGES = {
    "a hook": lambda module: hook(module.mlp),
    "a hook of a part": lambda module: hook(module.mlp[3]),
    "a hook of a dropout": lambda module: hook(module.mlp[4]),
    "a dropout that is active": lambda module: module.mlp[4].train(),
    "an overridden forward": lambda module: setattr(module.mlp, "forward", lambda x: 2 * x),
    "a part more": lambda module: module.mlp.append(nn.LayerNorm(32).to(module.norm.weight)),
    "a part in front": lambda module: module.mlp.insert(0, nn.LayerNorm(32).to(module.norm.weight)),
    "a part less": lambda module: module.mlp.__delitem__(slice(1, 3)),
    "another activation": lambda module: module.mlp.__setitem__(1, nn.Tanh()),
    "a patched class": patched_later,
}


@pytest.mark.parametrize("change", SEQUENCE_CHANGES)
def test_changes_of_a_sequence_are_seen(fused_mlp, device, blocks, change):
    # A subclass as in torchvision's MLP, made here so that only this test patches it.
    kinds = [type("MLP", (nn.Sequential,), {}) for _ in range(2)]
    module, fused = fused_pair(fused_mlp, device, AroundSequence)
    module.mlp, fused.mlp = (kind(*each.mlp) for kind, each in zip(kinds, (module, fused)))
    fused_mlp.fuse_mlps(fused)
    x = x_of(device)
    with torch.no_grad():
        blocks.clear()
        assert_close(fused(x), module(x))
        assert len(blocks) == 1
        alike(SEQUENCE_CHANGES[change], module, fused)
        blocks.clear()
        assert_close(*alike(lambda each: each(x), module, fused))
    assert not blocks


@pytest.mark.parametrize(
    "kind", [Around, AroundSequence, Decoding, PackedDecoding, Sandwich, Scaling], ids=lambda kind: kind.__name__
)
def test_copies_and_modes(fused_mlp, device, blocks, kind):
    module, fused = kind().to(device).eval(), kind().to(device).eval()
    fused.load_state_dict(module.state_dict())
    report = fused_mlp.fuse_mlps(fused)
    x = x_of(device)

    def calls(expected, each, x=x, tolerance=1e-4):
        with torch.no_grad():
            each(x), blocks.clear()  # the first call learns the activation's class
            assert_close(each(x), expected(x), tolerance)
        return len(blocks)

    assert calls(module, fused) == 1
    assert calls(module, copy.deepcopy(fused)) == 1
    assert calls(module, pickle.loads(pickle.dumps(fused))) == 0  # pickling drops the fused methods
    with torch.autocast(device.type, torch.bfloat16):
        assert calls(module, fused, tolerance=2e-2) == 0
    with fused_mlp.backend("torch"):
        assert calls(module, fused) == 0
    narrow = copy.deepcopy(module).bfloat16(), copy.deepcopy(fused).bfloat16()
    assert calls(*narrow, x.bfloat16(), tolerance=4e-2) == 1
    report.restore()
    assert calls(module, fused) == 0


def test_blocks_around_modules_are_not_reported(fused_mlp, device):
    """The report lists the MLP and not the block around it, and restores both."""
    module = Around().to(device).eval()
    report = fused_mlp.fuse_mlps(module)
    assert [(entry.path, entry.pattern) for entry in report.modules] == [("mlp", "plain with residual and norm")]
    assert "forward" in vars(module) and fused_mlp.explain(module).implementation == "fused"
    assert fused_mlp.fuse_mlps(module).modules == report.modules
    report.restore()
    assert "forward" not in vars(module)


def test_blocks_around_what_is_left_are_left(fused_mlp, device):
    """fuse_mlps changes a layer only if it fuses its MLP."""
    module = nn.Sequential(Around(), Around()).to(device).eval()
    module[0].mlp.fc1.double()  # no op takes weights of two dtypes
    report = fused_mlp.fuse_mlps(module)
    assert {entry.path: entry.fused for entry in report.modules} == {"0.mlp": False, "1.mlp": True}
    assert ["forward" in vars(each) for each in module] == [False, True]
    report.restore()
    assert "forward" not in vars(module[1])


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        *((kind, "") for kind in (Behind, InFront, Around, HalfAndNorm, AroundDropping, AroundSequence, OwnScale)),
        (AroundDropping, "mlp"),
    ],
)
def test_dropout_that_is_active_is_applied(fused_mlp, device, blocks, kind, part):
    module, fused = fused_pair(fused_mlp, device, kind)
    for each in (module, fused):
        each.get_submodule(part).train()
    blocks.clear()
    with torch.no_grad():
        x = x_of(device)
        assert_close(*alike(lambda each: each(x), fused, module))
    assert not blocks


class Given(Halves):
    """Takes a residual from elsewhere."""

    residual = 1.0

    def forward(self, x):
        residual = self.residual
        return self.output(self.intermediate(x), residual)


def test_residuals_of_other_shapes(fused_mlp, device):
    """Residuals of other shapes broadcast and promote as in PyTorch."""
    module, fused = fused_pair(fused_mlp, device, Given)
    lead = x_of(device).shape[:-1]
    for residual in (torch.randn(32), torch.randn(*lead, 1), torch.randn(4, *lead, 32), 2.0):
        residual = residual.to(device) if isinstance(residual, torch.Tensor) else residual
        for each in (module, fused):
            each.residual = residual
        with torch.no_grad():
            for x in (x_of(device), x_of(device)):
                assert_close(fused(x), module(x))


@pytest.mark.parametrize("kind", OTHER_FORMS)
def test_other_forms(fused_mlp, device, kind):
    module, fused = fused_pair(fused_mlp, device, kind)
    with torch.no_grad():
        for x in (x_of(device), x_of(device)):
            assert_close(fused(x), module(x))


def test_compiled(fused_mlp, device):
    """A compiled block runs as one MLP op without separate linear layers."""
    kinds = set(KINDS) - ({OfConv1D} if device.type == "cuda" else set())  # on a GPU, the compiler makes its products
    for kind in kinds:
        module, fused = fused_pair(fused_mlp, device, kind)
        targets = []

        def backend(graph, example, targets=targets):
            graph.graph.eliminate_dead_code()
            targets.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
            return graph

        torch.compiler.reset()
        x = x_of(device)
        with torch.no_grad():
            assert_close(torch.compile(fused, backend=backend, fullgraph=True)(x), module(x))
        mlps = [target for target in targets if ".mlp" in target or ".gated_mlp" in target]
        assert len(mlps) == 1 and not any("linear" in target for target in targets), kind


# Models, and their number of blocks.
MODELS = {"vit": 2, "bart": 4, "opt": 2, "whisper": 4, "bert": 4, "xlm-roberta-xl": 2}
MODELS.update({"t5": 4, "umt5": 4, "llama": 2, "gemma": 2, "gemma2": 2, "phi3": 2, "qwen3": 2})
MODELS.update({"gpt2": 2, "imagegpt": 2, "olmo2": 2, "glm4": 2, "exaone4": 2, "granite": 2, "dinov2": 2})
MODELS.update({"gpt_neox": 2, "starcoder2": 2})


@pytest.mark.parametrize("model_type", MODELS)
def test_models(fused_mlp, device, blocks, model_type):
    model = built(model_type).to(device)
    inputs = {name: value.to(device) for name, value in inputs_of(model).items()}
    with torch.no_grad():
        expected = model(**inputs)[0]
        fused_mlp.fuse_mlps(model)
        model(**inputs)
        blocks.clear()
        assert largest_error([model(**inputs)[0]], [expected]) <= 5e-5
    assert len(blocks) == MODELS[model_type]
