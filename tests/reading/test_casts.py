"""MLPs that cast hidden values to the last projection's dtype run as one op if there is nothing to cast."""

import copy

import pytest
import torch
from torch import nn
from transformers.models.t5.modeling_t5 import T5LayerNorm

from modules import Gated, Plain
from safety import assert_close, warmed, x_of


class Casting(Plain):
    """As in T5."""

    def forward(self, hidden_states):
        hidden_states = self.fc1(hidden_states)
        hidden_states = self.activation_fn(hidden_states)
        if (
            isinstance(self.fc2.weight, torch.Tensor)
            and hidden_states.dtype != self.fc2.weight.dtype
            and self.fc2.weight.dtype != torch.int8
        ):
            hidden_states = hidden_states.to(self.fc2.weight.dtype)
        hidden_states = self.fc2(hidden_states)
        return hidden_states


class GatedCasting(Gated):
    """As in Flan-T5, with a condition of a single comparison."""

    def forward(self, x):
        hidden = self.act_fn(self.gate_proj(x))
        up = self.up_proj(x)
        hidden = hidden * up
        if hidden.dtype != self.down_proj.weight.dtype:
            hidden = hidden.to(self.down_proj.weight.dtype)
        return self.down_proj(hidden)


class Around(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.norm, self.mlp = T5LayerNorm(32), kind()

    def forward(self, hidden_states):
        forwarded_states = self.norm(hidden_states)
        forwarded_states = self.mlp(forwarded_states)
        hidden_states = hidden_states + forwarded_states
        return hidden_states


class InOneMethod(Casting):
    """Contains the norm and the sum of the block."""

    def __init__(self):
        super().__init__()
        self.norm = T5LayerNorm(32)

    def forward(self, x):
        hidden = self.norm(x)
        hidden = self.activation_fn(self.fc1(hidden))
        if hidden.dtype != self.fc2.weight.dtype:
            hidden = hidden.to(self.fc2.weight.dtype)
        hidden = self.fc2(hidden)
        return x + hidden


def last_of(module):
    mlp = module.mlp if isinstance(module, Around) else module
    return mlp.fc2 if isinstance(mlp, Plain) else mlp.down_proj


KINDS = {
    "plain": (Casting, "mlp", "linear"),
    "gated": (GatedCasting, "gated_mlp", "gated_linear"),
    "plain block": (lambda: Around(Casting), "residual_mlp", "linear"),
    "gated block": (lambda: Around(GatedCasting), "residual_gated_mlp", "gated_linear"),
    "block in one method": (InOneMethod, "residual_mlp", "linear"),
}


def fused_pair(fused_mlp, device, kind, dtype=torch.bfloat16):
    torch.manual_seed(0)
    return warmed(fused_mlp, KINDS[kind][0]().to(device, dtype).eval(), x_of(device).to(dtype), extent="full")


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_to_cast(fused_mlp, device, called_ops, kind):
    module, fused = fused_pair(fused_mlp, device, kind)
    called_ops.clear()
    x = x_of(device).bfloat16()
    with torch.no_grad():
        assert_close(fused(x), module(x), tolerance=4e-2)
    assert called_ops == [KINDS[kind][1]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_of_another_dtype(fused_mlp, device, called_ops, kind):
    """If the last weight has another dtype, only the first half is fused, and the report names the cast."""
    module, fused = fused_pair(fused_mlp, device, kind)
    for each in (module, fused):
        last_of(each).float()
    called_ops.clear()
    x = x_of(device).bfloat16()
    with torch.no_grad():
        got, expected = fused(x), module(x)
    assert got.dtype == expected.dtype == torch.float32
    assert_close(got, expected, tolerance=2e-2)
    assert called_ops == [KINDS[kind][2]]
    (outcome,) = fused_mlp.fuse_mlps(copy.deepcopy(module)).left
    assert outcome.extent == "partly" and "cast" in outcome.reasons[0].part


@pytest.mark.parametrize("kind", ["plain", "gated"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast(fused_mlp, device, called_ops, kind, dtype):
    """The result is right under autocast, where hidden values have another dtype than x and the weights."""
    module, fused = fused_pair(fused_mlp, device, kind, dtype)
    other = torch.float16 if dtype == torch.bfloat16 else torch.bfloat16
    x = x_of(device).to(dtype)
    with torch.no_grad(), torch.autocast(device.type, other):
        got, expected = fused(x), module(x)
    assert got.dtype == expected.dtype
    assert_close(got, expected, tolerance=2e-2)


@pytest.mark.parametrize("kind", ["plain", "gated"])
def test_under_autograd(fused_mlp, device, kind):
    module, fused = fused_pair(fused_mlp, device, kind, torch.float32)
    given = x_of(device)
    for wide in (False, True):
        outcomes = []
        for each in (fused, module):
            if wide:
                last_of(each).double()
            each.zero_grad()
            x = given.clone().requires_grad_()
            each(x).double().square().sum().backward()
            outcomes.append([x.grad, *(parameter.grad for parameter in each.parameters())])
        for got, expected in zip(*outcomes, strict=True):
            assert_close(got, expected)


@pytest.mark.parametrize("first", [False, True])
def test_a_computed_weight_is_not_computed_for_the_report(fused_mlp, device, first):
    """Fusing does not read spectral norm's weight, which in training advances its iteration at each read."""
    module = Casting().to(device).train()
    nn.utils.parametrizations.spectral_norm(module.fc1 if first else module.fc2)
    before = copy.deepcopy(module.state_dict())
    fused_mlp.fuse_mlps(module)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name
