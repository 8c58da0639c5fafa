"""The block that an MLP is part of: its residual and its norm in one op with it."""

import copy
import importlib
import pickle
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from modules import Gated, Halves, PackedGated, Plain, RMSNorm, TransposedPlain
from reference import FLOAT32_ROUNDING
from safety import assert_close, x_of
from test_coverage import built, inputs_of, largest_error

GELU = 1


@pytest.fixture
def op(fused_mlp):
    return sys.modules[f"{fused_mlp.__name__}.backends.native"].residual_mlp


@pytest.fixture
def blocks(fused_mlp, monkeypatch):
    """The calls of the op: whether there is a norm, and whether it comes first."""
    shortcut = importlib.import_module(f"{fused_mlp.__name__}.models.shortcut")
    taken = []

    def spied(op):
        def spy(*args):
            taken.append((args[-2] is not None, args[-1] % 2 == 1))
            return op(*args)

        return spy

    for name in ("residual_mlp", "residual_gated_mlp"):
        monkeypatch.setitem(shortcut._ops, name, spied(shortcut._ops[name]))
    return taken


# The op.


def operands(device, dtype, rows, sizes, layers=2, norm=True):
    n_in, hidden, out = sizes

    def made(*shape, scale=1.0):
        return (scale * torch.randn(shape, device=device)).to(dtype)

    first = (made(hidden, n_in, scale=n_in**-0.5), made(hidden)) if layers == 2 else (None, None)
    second = made(out, hidden if layers == 2 else n_in, scale=hidden**-0.5), made(out)
    norms = (made(out), made(out)) if norm else (None, None)
    return made(rows, n_in), first[0], second[0], first[1], second[1], made(rows, out), *norms


def computed(x, fc1, fc2, bias1, bias2, residual, weight, bias, eps, norm_first, dtype):
    """The block by torch's functions in a dtype."""
    wide = (None if each is None else each.to(dtype) for each in (x, fc1, fc2, bias1, bias2, residual, weight, bias))
    x, fc1, fc2, bias1, bias2, residual, weight, bias = wide
    if norm_first:
        x = F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    values = x if fc1 is None else F.gelu(F.linear(x, fc1, bias1))
    values = F.linear(values, fc2, bias2) + residual
    return values if eps is None or norm_first else F.layer_norm(values, values.shape[-1:], weight, bias, eps)


FORMS = {
    "norm behind": (1e-12, False, True),
    "norm without parameters": (1e-5, False, False),
    "norm in front": (1e-5, True, True),
    "sum": (None, False, False),
}
# Rows, and in, hidden, out: a warp, a block, more than registers hold; in vectors and one by one.
SHAPES = [(1, (64, 96, 64)), (37, (33, 70, 33)), (130, (768, 64, 768)), (3, (40, 24, 4099)), (2, (16, 8, 20000))]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_errors_are_no_larger_than_eager_ones(op, device, dtype, form):
    if device.type == "cpu" and dtype == torch.float16:
        pytest.skip("no kernel")
    eps, norm_first, norm = FORMS[form]
    for rows, sizes in SHAPES:
        for layers in (1, 2) if form == "norm behind" else (2,):
            sizes = (sizes[0], sizes[1], sizes[0]) if norm_first else sizes
            given = operands(device, dtype, rows, sizes, layers, norm)
            residual = 3 * given[5] + 20
            given = (*given[:5], residual, *given[6:])
            got = op(*given[:5], GELU, residual, *given[6:], eps, norm_first)
            expected, eager = (computed(*given, eps, norm_first, kind) for kind in (torch.float64, dtype))
            error, its = ((each.double() - expected).norm() / expected.norm() for each in (got, eager))
            assert error <= 1.06 * its + 4 * FLOAT32_ROUNDING, (rows, sizes, layers)


def test_rows_of_a_norm(op, device):
    """A NaN stays in its row, what is no row is not touched, and a row of equal values has no deviation."""
    torch.manual_seed(0)
    x, fc1, fc2, bias1, bias2, residual, weight, bias = operands(device, torch.float32, 5, (64, 96, 40))
    residual[2, 7], residual[3, 1] = torch.nan, torch.inf
    wide = torch.full((5, 100), torch.nan, device=device)
    wide[:, 30:70] = residual
    got = op(x, fc1, fc2, bias1, bias2, GELU, wide[:, 30:70], weight, bias, 1e-5, False)
    expected = computed(x, fc1, fc2, bias1, bias2, residual, weight, bias, 1e-5, False, torch.float32)
    torch.testing.assert_close(got, expected, equal_nan=True, rtol=1e-4, atol=1e-4)
    assert got[2].isnan().all() and got[[0, 1, 4]].isfinite().all()
    for value in (0.1, 3.1e4, 1e30):
        equal = torch.full((5, 40), value, device=device)
        got = op(torch.zeros_like(x), fc1, fc2, None, None, GELU, equal, None, bias, 1e-12, False)
        assert torch.equal(got, bias.expand(5, 40))


def test_rows_of_sums_are_adjacent(op, device):
    """Also where those of the residual are not: Whisper's first hidden values lie column by column."""
    x, fc1, fc2, bias1, bias2, *_ = operands(device, torch.float32, 14, (64, 96, 40))
    x = x.view(2, 7, 64)
    values = F.linear(F.gelu(F.linear(x, fc1, bias1)), fc2, bias2)
    for residual in (torch.randn(2, 40, 7, device=device).mT, torch.randn(2, 7, 80, device=device)[..., ::2]):
        got = op(x, fc1, fc2, bias1, bias2, GELU, residual, None, None, None, False)
        assert got.is_contiguous()
        assert_close(got, residual + values)
        given = (x, fc1, fc2, bias1, bias2, GELU, residual, None, None)
        for norm in ((None, False), (1e-5, False), (1e-5, True)):
            torch.library.opcheck(op, (*given, *norm), test_utils=("test_schema", "test_faketensor"))


def test_empty(op, device):
    for rows, n_in, out in ((0, 64, 40), (5, 64, 0), (5, 0, 40)):
        x, fc1, fc2, bias1, bias2, residual, weight, bias = operands(
            device, torch.float32, rows, (max(n_in, 1), 8, out)
        )
        got = op(x[:, :n_in], fc1[:, :n_in], fc2, bias1, bias2, GELU, residual, weight, bias, 1e-5, False)
        assert got.shape == (rows, out) and got.isfinite().all()


def test_operands_that_do_not_fit(op, device):
    good = operands(device, torch.float32, 5, (64, 96, 40))
    for index, fault in (
        (5, good[5][:, :-1]),
        (5, good[5][0]),
        (5, good[5][None]),
        (5, good[5].bfloat16()),
        (6, good[6][:-1]),
        (6, good[6][None]),
        (7, good[7].bfloat16()),
        (2, good[2][:, 1:]),
    ):
        given = [*good]
        given[index] = fault
        with pytest.raises(RuntimeError, match=r"must be|must have|differs in"):
            op(*given[:5], GELU, given[5], *given[6:], 1e-5, False)
    with pytest.raises(RuntimeError, match="eps"):
        op(*good[:5], GELU, good[5], *good[6:], None, False)
    with pytest.raises(RuntimeError, match="norm_weight"):
        op(*good[:5], GELU, good[5], *good[6:], 1e-5, True)  # of the width of x


# Modules.


class Behind(nn.Module):
    """BART's layer without its attention."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.norm = nn.Linear(32, 88), nn.Linear(88, 32), nn.LayerNorm(32)
        self.act, self.dropout = nn.GELU(), 0.1

    def forward(self, hidden_states):
        residual = hidden_states
        hidden_states = self.act(self.fc1(hidden_states))
        hidden_states = F.dropout(hidden_states, p=self.dropout, training=self.training)
        hidden_states = self.fc2(hidden_states)
        hidden_states = F.dropout(hidden_states, p=self.dropout, training=self.training)
        hidden_states = residual + hidden_states
        hidden_states = self.norm(hidden_states)
        return hidden_states


class InFront(Behind):
    """Whisper's."""

    def forward(self, hidden_states):
        residual = hidden_states
        hidden_states = self.norm(hidden_states)
        hidden_states = self.act(self.fc1(hidden_states))
        hidden_states = self.fc2(hidden_states)
        hidden_states = F.dropout(hidden_states, p=self.dropout, training=self.training)
        hidden_states = residual + hidden_states
        return hidden_states


class Summed(Behind):
    """The sum alone, of more than a name; the norm is somebody else's too."""

    def forward(self, x):
        normed = self.norm(x)
        return self.fc2(self.act(self.fc1(normed))) + normed


class Around(nn.Module):
    """ViT's: the MLP is a module."""

    def __init__(self):
        super().__init__()
        self.norm, self.mlp, self.dropout = nn.LayerNorm(32), Plain(), nn.Dropout(0.1)

    def forward(self, hidden_states):
        residual = hidden_states
        hidden_states = self.norm(hidden_states)
        hidden_states = self.mlp(hidden_states)
        hidden_states = self.dropout(hidden_states)
        hidden_states = hidden_states + residual
        return hidden_states


class Decoding(nn.Module):
    """Llama's."""

    def __init__(self, kind=Gated):
        super().__init__()
        self.norm, self.mlp = RMSNorm(), kind(bias=True)
        nn.init.normal_(self.norm.weight)

    def forward(self, hidden_states, *, scale=1.0):
        residual = hidden_states
        hidden_states = self.norm(hidden_states)
        hidden_states = self.mlp(hidden_states)
        hidden_states = residual + hidden_states
        return hidden_states


class PackedDecoding(Around):
    """Phi-3's."""

    def __init__(self):
        super().__init__()
        self.norm, self.mlp = RMSNorm(), PackedGated()


class OfConv1D(Around):
    """GPT-2's: weights [in, out], and dropout at the end of the MLP."""

    def __init__(self):
        super().__init__()
        self.mlp = TransposedPlain()


KINDS = {
    OfConv1D: (True, True),
    Halves: (True, False),
    Behind: (True, False),
    InFront: (True, True),
    Summed: (False, False),
    Around: (True, True),
    Decoding: (True, True),
    PackedDecoding: (True, True),
}


def fused_pair(fused_mlp, device, kind):
    module = kind().to(device).eval()
    fused = copy.deepcopy(module)
    assert fused_mlp.fuse_mlps(fused).fused[0].extent == "full"
    with torch.no_grad():
        fused(x_of(device))  # the class of an activation is learnt at its first call
    return module, fused


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


# What is done to a fused module, and whether its block is one op still.
CHANGES = {
    "another eps": (with_attribute("eps", 0.5), True),
    "another weight": (with_attribute("weight", lambda norm: nn.Parameter(2 * norm.weight)), True),
    "no bias": (with_attribute("bias", None), True),
    "no weight": (with_attribute("weight", None), False),
    "a forward of its own": (with_attribute("forward", lambda norm: lambda x: 2 * x), False),
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


@pytest.mark.parametrize("kind", [Halves, Behind, InFront, Around], ids=lambda kind: kind.__name__)
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
    assert len(blocks) == 2 * is_one


def hook(part):
    part.register_forward_hook(lambda part, args, output: 2 * output)


# What is done to the module that is the MLP.
MLP_CHANGES = {
    "a hook": lambda module: hook(module.mlp),
    "a hook of a part": lambda module: hook(module.mlp.fc2),
    "a hook of the dropout": lambda module: hook(module.dropout),
    "a forward of its own": lambda module: setattr(module.mlp, "forward", lambda x: 2 * x),
    "another module": lambda module: setattr(module, "mlp", nn.Linear(32, 32).to(module.norm.weight)),
    "another activation": lambda module: setattr(module.mlp, "activation_fn", nn.Tanh()),
    "a gated one": lambda module: setattr(module, "mlp", Gated().to(module.norm.weight)),
}


@pytest.mark.parametrize("change", MLP_CHANGES)
def test_changes_of_the_mlp_are_seen(fused_mlp, device, blocks, change):
    module, fused = fused_pair(fused_mlp, device, Around)
    for each in (module, fused):
        torch.manual_seed(0)
        MLP_CHANGES[change](each)
    blocks.clear()
    with torch.no_grad():
        for x in (x_of(device), x_of(device)):
            assert_close(fused(x), module(x))
    assert not blocks


@pytest.mark.parametrize("kind", [Around, Decoding, PackedDecoding], ids=lambda kind: kind.__name__)
def test_copies_and_modes(fused_mlp, device, blocks, kind):
    module, fused = kind().to(device).eval(), kind().to(device).eval()
    fused.load_state_dict(module.state_dict())
    report = fused_mlp.fuse_mlps(fused)
    x = x_of(device)

    def calls(expected, each, x=x, tolerance=1e-4):
        with torch.no_grad():
            each(x), blocks.clear()  # the class of an activation is learnt at its first call
            assert_close(each(x), expected(x), tolerance)
        return len(blocks)

    assert calls(module, fused) == 1
    assert calls(module, copy.deepcopy(fused)) == 1
    assert calls(module, pickle.loads(pickle.dumps(fused))) == 0  # what is pickled is not fused
    with torch.autocast(device.type, torch.bfloat16):
        assert calls(module, fused, tolerance=2e-2) == 0
    with fused_mlp.backend("torch"):
        assert calls(module, fused) == 0
    narrow = copy.deepcopy(module).bfloat16(), copy.deepcopy(fused).bfloat16()
    assert calls(*narrow, x.bfloat16(), tolerance=4e-2) == 1
    report.restore()
    assert calls(module, fused) == 0


def test_blocks_around_modules_are_not_reported(fused_mlp, device):
    """The MLP is; and both are given back."""
    module = Around().to(device).eval()
    report = fused_mlp.fuse_mlps(module)
    assert [(entry.path, entry.pattern) for entry in report.modules] == [("mlp", "plain")]
    assert type(module) is not Around and fused_mlp.explain(module).implementation == "fused"
    assert fused_mlp.fuse_mlps(module).modules == report.modules
    report.restore()
    assert type(module) is Around


@pytest.mark.parametrize("kind", [Behind, InFront, Around], ids=lambda kind: kind.__name__)
def test_dropout_that_is_active_is_applied(fused_mlp, device, blocks, kind):
    module, fused = fused_pair(fused_mlp, device, kind)
    module.train(), fused.train()
    blocks.clear()
    with torch.no_grad():
        x = x_of(device)
        torch.manual_seed(0)
        expected = module(x)
        torch.manual_seed(0)
        assert_close(fused(x), expected)
    assert not blocks


class Given(Halves):
    """The residual comes from elsewhere."""

    residual = 1.0

    def forward(self, x):
        residual = self.residual
        return self.output(self.intermediate(x), residual)


def test_residuals_of_other_shapes(fused_mlp, device):
    """What PyTorch broadcasts or promotes it goes on to."""
    module, fused = fused_pair(fused_mlp, device, Given)
    lead = x_of(device).shape[:-1]
    for residual in (torch.randn(32), torch.randn(*lead, 1), torch.randn(4, *lead, 32), 2.0):
        residual = residual.to(device) if isinstance(residual, torch.Tensor) else residual
        for each in (module, fused):
            each.residual = residual
        with torch.no_grad():
            for x in (x_of(device), x_of(device)):
                assert_close(fused(x), module(x))


class Twice(Behind):
    """The normed values are read twice."""

    def forward(self, x):
        normed = self.norm(x)
        return x + self.fc2(self.act(self.fc1(normed))) + normed


class Rebound(Behind):
    """The residual is another one by then."""

    def forward(self, x):
        residual = x
        hidden = self.fc2(self.act(self.fc1(x)))
        residual = residual * 2
        return self.norm(residual + hidden)


class Scaled(Behind):
    def forward(self, x):
        return self.norm(0.5 * self.fc2(self.act(self.fc1(x))) + x)


class InPlace(Behind):
    def forward(self, x):
        residual = x.clone()
        hidden = self.fc2(self.act(self.fc1(x)))
        residual += hidden
        return residual


@pytest.mark.parametrize("kind", [Twice, Rebound, Scaled, InPlace], ids=lambda kind: kind.__name__)
def test_other_forms(fused_mlp, device, kind):
    module, fused = fused_pair(fused_mlp, device, kind)
    with torch.no_grad():
        for x in (x_of(device), x_of(device)):
            assert_close(fused(x), module(x))


def test_compiled(fused_mlp, device):
    """The traced parts of a block are those of the source."""
    kinds = set(KINDS) - ({OfConv1D} if device.type == "cuda" else set())  # whose products a GPU's compiler makes
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


# Models, and how many blocks they have.
MODELS = {"vit": 2, "bart": 4, "opt": 2, "whisper": 4, "bert": 2, "xlm-roberta-xl": 2}
MODELS.update({"t5": 4, "umt5": 4, "llama": 2, "gemma": 2, "gemma2": 0, "phi3": 2, "qwen3": 2})
MODELS.update({"gpt2": 2, "imagegpt": 2})


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
