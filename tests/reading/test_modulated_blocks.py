"""Blocks of diffusion transformers: a modulated norm, an MLP that runs its parts in turn, and a gate."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.activations import GEGLU
from diffusers.models.attention import FeedForward
from diffusers.models.normalization import FP32LayerNorm
from torch import nn

from safety import assert_close, warmed
from test_block_ops import LAYER_OF_ONE_MORE, RMS_OF_ONE_MORE, SCALE

MODULATED = (1.0, LAYER_OF_ONE_MORE, SCALE, False)


def feed_forward(activation="gelu-approximate"):
    return FeedForward(32, inner_dim=88, activation_fn=activation, dropout=0.1, final_dropout=True)


def in_chunks(module, x, size):
    return torch.cat([module(part) for part in x.split(size, dim=1)], dim=1)


class AskingHead(nn.Module):
    """Reads the norm's output, which does not exist if the op contains the norm."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(32, 88)

    def forward(self, x):
        if x.mean() > 1:
            return self.proj(2 * x)
        return F.relu(self.proj(x))


class ChangingHead(AskingHead):
    def forward(self, x):
        return F.relu(self.proj(x + 1))


class AskingItself(AskingHead):
    """Has a branch with a side effect and no MLP."""

    def __init__(self):
        super().__init__()
        self.calls = None

    def forward(self, x):
        if self.calls is not None:
            self.calls += 1
            return self.proj(x)
        return F.relu(self.proj(x))


class Counting(AskingItself):
    def forward(self, x):
        if self.calls is not None:
            self.calls += 1
        return F.relu(self.proj(x))


class AlwaysCounting(AskingItself):
    def forward(self, x):
        self.calls = (self.calls or 0) + 1
        return F.relu(self.proj(x))


class Modulated(nn.Module):
    """As in Stable Diffusion 3."""

    norm_of = functools.partial(nn.LayerNorm, 32, elementwise_affine=False, eps=1e-6)

    def __init__(self, activation="gelu-approximate"):
        super().__init__()
        self.norm, self.ff, self.chunk_size = self.norm_of(), feed_forward(activation), None

    def forward(self, x, shift, scale, gate):
        normed = self.norm(x)
        normed = normed * (1 + scale[:, None]) + shift[:, None]
        if self.chunk_size is not None:  # noqa: SIM108 (as in the original)
            values = in_chunks(self.ff, normed, self.chunk_size)
        else:
            values = self.ff(normed)
        values = gate.unsqueeze(1) * values
        x = x + values
        return x


class InOneExpression(Modulated):
    """As in LTX, whose scales include the tokens' dimension."""

    def forward(self, x, shift, scale, gate):
        shift, scale, gate = shift[:, None], scale.unsqueeze(1), gate[:, None, :]
        return self.ff((scale + 1) * self.norm(x) + shift) * gate + x


class OnlyScaled(Modulated):
    """As in Lumina, with RMSNorm."""

    norm_of = functools.partial(nn.RMSNorm, 32, elementwise_affine=False, eps=1e-5)

    def forward(self, x, shift, scale, gate):
        values = self.ff(self.norm(x) * (1 + scale.unsqueeze(1)))
        return x + gate.unsqueeze(1) * values


class Nested(Modulated):
    """As in the other stream of Stable Diffusion 3: inside a branch."""

    def __init__(self, activation="gelu-approximate"):
        super().__init__(activation)
        self.pre_only = False

    def forward(self, x, shift, scale, gate):
        if self.pre_only:
            x = None
        else:
            normed = self.norm(x)
            normed = normed * (1 + scale[:, None]) + shift[:, None]
            if self.chunk_size is not None:  # noqa: SIM108 (as in the original)
                values = in_chunks(self.ff, normed, self.chunk_size)
            else:
                values = self.ff(normed)
            x = x + gate.unsqueeze(1) * values
        return x


class ManyWays(Modulated):
    """Has more conditions than are moved one by one, as diffusers' BasicTransformerBlock."""

    def __init__(self, activation="gelu-approximate", norm_type="zero"):
        super().__init__(activation)
        self.norm_type, self.other = norm_type, None
        self.plain = nn.LayerNorm(32)

    def forward(self, x, shift, scale, gate):
        if self.norm_type == "continuous":
            normed = self.norm(x, scale)
        elif self.norm_type != "single":
            normed = self.norm(x)
        if self.norm_type == "zero":
            normed = normed * (1 + scale[:, None]) + shift[:, None]
        if self.norm_type == "single":
            normed = self.other(x)
        if self.norm_type == "plain":
            normed = self.plain(x)
        if self.chunk_size is not None:  # noqa: SIM108 (as in the original)
            values = in_chunks(self.ff, normed, self.chunk_size)
        else:
            values = self.ff(normed)
        if self.norm_type == "zero":
            values = gate.unsqueeze(1) * values
        x = values + x
        if x.ndim == 4:
            x = x.squeeze(1)
        return x


class InFloat32(Modulated):
    """As in Wan: modulation and sum in float32, cast to the dtype of x."""

    norm_of = functools.partial(FP32LayerNorm, 32, 1e-6, elementwise_affine=False)

    def forward(self, x, shift, scale, gate):
        shift, scale, gate = torch.stack((shift, scale, gate), dim=1).float().chunk(3, dim=1)
        normed = (self.norm(x.float()) * (1 + scale) + shift).type_as(x)
        values = self.ff(normed)
        x = (x.float() + values.float() * gate).type_as(x)
        return x


KINDS = {
    Modulated: MODULATED,
    InFloat32: MODULATED,
    InOneExpression: MODULATED,
    OnlyScaled: (1.0, RMS_OF_ONE_MORE, SCALE, False),
    Nested: MODULATED,
    ManyWays: MODULATED,
}
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def given(device, batch=3, tokens=7, dtype=torch.float32):
    """Returns x, and a shift, scale and gate for each batch entry."""
    x = torch.randn(batch, tokens, 32, device=device, dtype=dtype)
    return x, *torch.randn(batch, 3 * 32, device=device, dtype=dtype).chunk(3, dim=1)


def fused_pair(fused_mlp, device, kind, *args):
    torch.manual_seed(0)
    return warmed(fused_mlp, kind(*args).to(device).eval(), *given(device))


@every_kind
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_of_16_bits(fused_mlp, device, blocks, kind, dtype):
    """Errors in 16 bits are at most 1.06 times the original's."""
    if device.type == "cpu" and dtype == torch.float16:
        pytest.skip("no kernel")
    module, fused = fused_pair(fused_mlp, device, kind)
    wide = copy.deepcopy(module).double()
    module, fused = module.to(dtype), fused.to(dtype)
    operands = given(device, 4, 33, dtype=dtype)
    wide.load_state_dict(module.state_dict())
    blocks.clear()
    with torch.no_grad():
        expected = wide(*(each.double() for each in operands)).double()
        got, eager = fused(*operands), module(*operands)
    assert got.dtype == eager.dtype == dtype and len(blocks) == 1
    error, its = ((each.double() - expected).norm() for each in (got, eager))
    assert error <= 1.06 * its


@every_kind
@pytest.mark.parametrize("activation", ["gelu", "gelu-approximate", "geglu", "swiglu", "linear-silu"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_one_op(fused_mlp, device, blocks, kind, activation, mode):
    module, fused = fused_pair(fused_mlp, device, kind, activation)
    blocks.clear()
    for batch, tokens in ((3, 7), (1, 40), (2, 1)):
        operands = given(device, batch, tokens)
        with mode():
            assert_close(fused(*operands), module(*operands))
    assert blocks == 3 * [KINDS[kind]]


def with_attribute(path, value):
    def alter(module):
        *owners, name = path.split(".")
        for owner in owners:
            module = getattr(module, owner)
        setattr(module, name, value() if callable(value) else value)

    return alter


def hook(part):
    part.register_forward_hook(lambda part, args, output: 2 * output)


# Changes to a fused module, and whether its block still runs as one op.
CHANGES = {
    "a norm with a weight": (with_attribute("norm", lambda: with_weight(nn.LayerNorm(32))), False),
    "RMSNorm": (with_attribute("norm", lambda: nn.RMSNorm(32, elementwise_affine=False, eps=1e-6)), True),
    "no norm": (with_attribute("norm", nn.Identity), False),
    "another eps": (with_attribute("norm.eps", 0.5), True),
    "a norm of two dimensions": (
        with_attribute("norm", lambda: nn.LayerNorm((7, 32), elementwise_affine=False)),
        False,
    ),
    "a hook of the norm": (lambda module: hook(module.norm), False),
    "a hook": (lambda module: hook(module.ff), False),
    "a hook of the head": (lambda module: hook(module.ff.net[0]), False),
    "a hook of a projection": (lambda module: hook(module.ff.net[0].proj), False),
    "a hook of a dropout": (lambda module: hook(module.ff.net[3]), False),
    "a dropout that is active": (lambda module: module.ff.net[3].train(), False),
    "an overridden forward": (with_attribute("ff.forward", lambda: lambda x: 2 * x), False),
    "another method": (with_attribute("ff.net.0.gelu", lambda: torch.tanh), False),
    "the other approximation": (with_attribute("ff.net.0.approximate", "none"), True),
    "chunks": (with_attribute("chunk_size", 2), False),
    "a part more": (lambda module: module.ff.net.append(nn.LayerNorm(32).to(module.ff.net[2].weight)), False),
    "a part in front": (lambda module: module.ff.net.insert(0, nn.LayerNorm(32).to(module.ff.net[2].weight)), False),
    "another head": (
        lambda module: module.ff.net.__setitem__(0, of_seed(lambda: GEGLU(32, 88)).to(module.ff.net[2].weight)),
        True,
    ),
    "wider": (lambda module: module.double(), False),
}


def of_seed(kind):
    torch.manual_seed(1)
    return kind()


def with_weight(norm):
    torch.manual_seed(1)
    nn.init.normal_(norm.weight)
    return norm


@pytest.mark.parametrize("kind", [Modulated, ManyWays, InFloat32], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_seen(fused_mlp, device, blocks, change, kind):
    module, fused = fused_pair(fused_mlp, device, kind)
    fused_mlp.fuse_mlps(FeedForward(32, activation_fn="geglu"))  # so that the other head's class has been read
    alter, is_one = CHANGES[change]
    is_one = is_one or (kind is InFloat32 and change == "chunks")  # its chunk size is unused
    operands = given(device, dtype=torch.float64 if change == "wider" else torch.float32)
    outcomes = []
    for each in (module, fused):
        alter(each.to(device))
        each.norm.to(device)
        blocks.clear()
        for _ in range(2):
            torch.manual_seed(0)
            with torch.no_grad():
                outcomes.append(each(*operands))
    assert_close(outcomes[2], outcomes[0])
    assert_close(outcomes[3], outcomes[0])
    assert len(blocks) in ((1, 2) if is_one else (0,))  # the first call learns the activation's class


@pytest.mark.parametrize("norm_type", ["zero", "plain", "single", "nothing"])
def test_each_way(fused_mlp, device, blocks, norm_type):
    """Conditions are evaluated at each call, also if the module was fused in another branch."""
    for at_first in ("zero", "plain"):
        module, fused = fused_pair(fused_mlp, device, ManyWays, "gelu", at_first)
        for each in (module, fused):
            each.norm_type = norm_type
            each.other = each.plain if norm_type == "single" else None
        blocks.clear()
        operands = given(device)
        with torch.no_grad():
            assert_close(fused(*operands), module(*operands))
        assert len(blocks) == (at_first == norm_type)


def test_a_condition_that_raises(fused_mlp, device):
    module, fused = fused_pair(fused_mlp, device, ManyWays)
    del module.chunk_size, fused.chunk_size
    for each in (module, fused):
        with pytest.raises(AttributeError, match="chunk_size"), torch.no_grad():
            each(*given(device))


# Scale and gate in shapes and kinds other than one per batch entry, and whether the op takes them.
OPERANDS = {
    "one for all": (lambda x, *given: (x, *(each[:1] for each in given)), True),
    "a number": (lambda x, shift, scale, gate: (x, shift, scale, gate[:, :1]), False),
    "a wider gate": (lambda x, shift, scale, gate: (x, shift, scale, gate.double()), False),
    "not dense": (lambda x, *given: (x, *(each.repeat_interleave(2, 1)[:, ::2] for each in given)), True),
    "one scale for each token": (lambda x, shift, scale, gate: (x, shift, x.flip(1), gate), False),
}


@pytest.mark.parametrize("form", OPERANDS)
def test_other_operands(fused_mlp, device, blocks, form):
    module, fused = fused_pair(fused_mlp, device, Modulated)
    alter, is_one = OPERANDS[form]
    operands = alter(*given(device, batch=3, tokens=3))
    blocks.clear()
    with torch.no_grad():
        outcomes = [each(*operands) for each in (fused, module)]
    assert outcomes[0].dtype == outcomes[1].dtype
    assert_close(*outcomes)
    assert len(blocks) == is_one


def test_no_broadcast_of_the_residual(fused_mlp, device):
    """Scales for more images than x has give a result with more images, as unfused."""
    module, fused = fused_pair(fused_mlp, device, Modulated)
    x, *others = given(device)
    with torch.no_grad():
        assert_close(fused(x[:1], *others), module(x[:1], *others))
        assert fused(x[:1], *others).shape == x.shape


@every_kind
def test_training(fused_mlp, device, blocks, kind):
    module, fused = fused_pair(fused_mlp, device, kind)
    blocks.clear()
    operands = given(device)
    gradients = []
    for each in (module, fused):
        leaves = [operand.detach().clone().requires_grad_() for operand in operands]
        each(*leaves).sin().sum().backward()
        gradients.append([leaf.grad for leaf in leaves] + [parameter.grad for parameter in each.ff.parameters()])
    for got, expected in zip(*reversed(gradients)):
        assert (got is None) == (expected is None)
        if got is not None:
            assert_close(got, expected)
    assert not blocks


@pytest.mark.parametrize("head", [AskingHead, ChangingHead, AskingItself, Counting, AlwaysCounting])
def test_a_head_that_asks(fused_mlp, device, blocks, head):
    torch.manual_seed(0)
    module = Modulated().to(device).eval()
    module.ff.net[0] = head().to(device)
    fused = copy.deepcopy(module)
    fused_mlp.fuse_mlps(fused)
    with torch.no_grad():
        module(*given(device)), fused(*given(device))  # the first call learns the parts that run in turn
    for offset in (0, 5):
        for calls in (None, 0):
            for each in (module, fused):
                each.ff.net[0].calls = calls
            x, shift, scale, gate = given(device)
            blocks.clear()
            with torch.no_grad():
                assert_close(fused(x, shift + offset, scale, gate), module(x, shift + offset, scale, gate))
            assert fused.ff.net[0].calls == module.ff.net[0].calls
            assert len(blocks) == (head in (AskingItself, Counting) and calls is None)


def test_autocast_and_compiled(fused_mlp, device, blocks):
    module, fused = fused_pair(fused_mlp, device, Modulated)
    operands = given(device)
    blocks.clear()
    with torch.no_grad():
        with torch.autocast(device.type, torch.bfloat16):
            assert_close(fused(*operands), module(*operands), 2e-2)
        assert not blocks
        torch._dynamo.reset()
        assert_close(torch.compile(fused, backend="eager", fullgraph=True)(*operands), module(*operands))
