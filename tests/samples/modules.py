"""Modules for the tests: MLPs as models have them, and projections that a fused forward must not bypass."""

import functools

import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.pytorch_utils import Conv1D

TanhGelu = functools.partial(nn.GELU, approximate="tanh")


class Gated(nn.Module):
    """Llama's and Gemma's MLP."""

    def __init__(self, act=nn.SiLU, bias=False, sizes=(32, 88, 32)):
        super().__init__()
        n_in, hidden, out = sizes
        self.gate_proj = nn.Linear(n_in, hidden, bias=bias)
        self.up_proj = nn.Linear(n_in, hidden, bias=bias)
        self.down_proj = nn.Linear(hidden, out, bias=bias)
        self.act_fn = act()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class PackedGated(nn.Module):
    """Phi-3's MLP."""

    def __init__(self, act=nn.SiLU, bias=False, sizes=(32, 88, 32)):
        super().__init__()
        n_in, hidden, out = sizes
        self.gate_up_proj = nn.Linear(n_in, 2 * hidden, bias=bias)
        self.down_proj = nn.Linear(hidden, out, bias=bias)
        self.activation_fn = act()

    def forward(self, hidden_states):
        gate, up = self.gate_up_proj(hidden_states).chunk(2, dim=-1)
        return self.down_proj(up * self.activation_fn(gate))


class Plain(nn.Module):
    """CLIP's MLP."""

    def __init__(self, act=nn.GELU, bias=True, sizes=(32, 88, 32)):
        super().__init__()
        n_in, hidden, out = sizes
        self.fc1 = nn.Linear(n_in, hidden, bias=bias)
        self.fc2 = nn.Linear(hidden, out, bias=bias)
        self.activation_fn = act()

    def forward(self, hidden_states):
        return self.fc2(self.activation_fn(self.fc1(hidden_states)))


class OwnBlock(Plain):
    """An MLP whose method also contains its block."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(32)

    def forward(self, hidden_states):
        residual = hidden_states
        hidden_states = self.fc2(self.activation_fn(self.fc1(self.norm(hidden_states))))
        return residual + hidden_states


class TransposedPlain(nn.Module):
    """GPT-2's MLP."""

    def __init__(self, act=nn.GELU):
        super().__init__()
        self.c_fc, self.c_proj, self.act, self.dropout = Conv1D(88, 32), Conv1D(32, 88), act(), nn.Dropout(0.1)
        nn.init.normal_(self.c_fc.bias), nn.init.normal_(self.c_proj.bias)

    def forward(self, hidden_states):
        hidden_states = self.c_fc(hidden_states)
        hidden_states = self.act(hidden_states)
        hidden_states = self.c_proj(hidden_states)
        hidden_states = self.dropout(hidden_states)
        return hidden_states


class OwnLinears(Plain):
    """An MLP like Falcon's, with linear layers of a class of its own."""

    def __init__(self, bias=False):
        super().__init__()
        self.fc1, self.fc2 = FalconLinear(32, 88, bias=bias), FalconLinear(88, 32, bias=False)


class Dropping(Plain):
    """DETR's MLP, which calls dropout as a function."""

    def __init__(self):
        super().__init__()
        self.activation_dropout, self.dropout = 0.1, 0.2

    def forward(self, hidden_states):
        hidden_states = self.activation_fn(self.fc1(hidden_states))
        hidden_states = F.dropout(hidden_states, p=self.activation_dropout, training=self.training)
        hidden_states = self.fc2(hidden_states)
        hidden_states = F.dropout(hidden_states, p=self.dropout, training=self.training)
        return hidden_states


class OfFunctions(nn.Module):
    """LFM2's MLP, with a torch function as activation."""

    def __init__(self):
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(32, 88), nn.Linear(88, 32), nn.Linear(32, 88)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class SpelledOut(OfFunctions):
    """A gated MLP that calls a torch function with an option as activation."""

    def forward(self, x):
        return self.w2(F.gelu(self.w1(x), approximate="tanh") * self.w3(x))


class Intermediate(nn.Module):
    """The first half of BERT's MLP."""

    def __init__(self, act=nn.GELU, bias=True, sizes=(32, 88)):
        super().__init__()
        self.dense = nn.Linear(*sizes, bias=bias)
        self.intermediate_act_fn = act()

    def forward(self, hidden_states):
        return self.intermediate_act_fn(self.dense(hidden_states))


class Output(nn.Module):
    """The second half of BERT's MLP, with the dropout, residual sum and norm after it."""

    def __init__(self, sizes=(88, 32)):
        super().__init__()
        self.dense = nn.Linear(*sizes)
        self.LayerNorm = nn.LayerNorm(sizes[1])
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden_states, input_tensor):
        hidden_states = self.dense(hidden_states)
        hidden_states = self.dropout(hidden_states)
        return self.LayerNorm(hidden_states + input_tensor)


class Halves(nn.Module):
    """BERT's layer without its attention: the two halves of its MLP are modules."""

    def __init__(self, act=nn.GELU, bias=True):
        super().__init__()
        self.intermediate = Intermediate(act, bias)
        self.output = Output()

    def forward(self, x):
        return self.feed_forward_chunk(x)

    def feed_forward_chunk(self, attention_output):
        intermediate_output = self.intermediate(attention_output)
        layer_output = self.output(intermediate_output, attention_output)
        return layer_output


class Decoder(nn.Module):
    """A layer with its MLP written inline, and several arguments."""

    def __init__(self, act=nn.GELU):
        super().__init__()
        self.self_attn = nn.Linear(32, 32)
        self.norm = nn.LayerNorm(32)
        self.fc1, self.fc2 = nn.Linear(32, 88), nn.Linear(88, 32)
        self.activation_fn = act()
        self.activation_dropout = self.dropout = 0.1

    def forward(self, hidden_states, mask=None, *rest, scale=1.0, **options):
        hidden_states = hidden_states + self.self_attn(hidden_states if mask is None else hidden_states * mask)
        residual = hidden_states
        hidden_states = self.activation_fn(self.fc1(self.norm(hidden_states)))
        hidden_states = F.dropout(hidden_states, p=self.activation_dropout, training=self.training)
        hidden_states = self.fc2(hidden_states)
        hidden_states = F.dropout(hidden_states, p=self.dropout, training=self.training)
        return scale * (residual + hidden_states), rest, options


class RMSNorm(nn.Module):
    """Llama's norm."""

    def __init__(self, width=32, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


PROJECTIONS = {
    Gated: ("gate_proj", "up_proj", "down_proj"),
    PackedGated: ("gate_up_proj", "down_proj"),
    Plain: ("fc1", "fc2"),
    Intermediate: ("dense",),
}


class Lora(nn.Module):
    """An adapter like peft's: it also exposes the base layer's weight and bias."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self.a = nn.Linear(base.in_features, 4, bias=False)
        self.b = nn.Linear(4, base.out_features, bias=False)

    weight = property(lambda self: self.base_layer.weight)
    bias = property(lambda self: self.base_layer.bias)
    in_features = property(lambda self: self.base_layer.in_features)

    def forward(self, x):
        return self.base_layer(x) + self.b(self.a(x))


class Int8Linear(nn.Module):
    def __init__(self, base):
        super().__init__()
        scale = base.weight.detach().abs().amax(dim=1, keepdim=True) / 127
        self.in_features, self.out_features = base.in_features, base.out_features
        self.register_buffer("weight", (base.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias = base.bias

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


class ScaledLinear(nn.Linear):
    """A subclass whose forward differs from its parent's."""

    def forward(self, input):
        return 3 * super().forward(input)


class CountingTensor(torch.Tensor):
    """A tensor with a product of its own, like a quantised or a sharded tensor."""

    products = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.linear:
            cls.products += 1
        return super().__torch_function__(func, types, args, kwargs or {})


def _lora(projection):
    return Lora(projection)


def _int8(projection):
    return Int8Linear(projection)


def _subclass(projection):
    scaled = ScaledLinear(projection.in_features, projection.out_features, projection.bias is not None)
    scaled.load_state_dict(projection.state_dict())
    return scaled


def _parametrized(projection):
    class Doubled(nn.Module):
        def forward(self, weight):
            return 2 * weight

    nn.utils.parametrize.register_parametrization(projection, "weight", Doubled())
    return projection


def _weight_norm(projection):
    """Applies the old kind, which computes the weight in a pre-hook."""
    projection = nn.utils.weight_norm(projection)
    with torch.no_grad():
        projection.weight_g.mul_(2)
    return projection


def _hooked(projection):
    projection.register_forward_hook(lambda module, inputs, output: output + 1)
    return projection


def _pre_hooked(projection):
    projection.register_forward_pre_hook(lambda module, inputs: (2 * inputs[0],))
    return projection


def _own_forward(projection):
    """Replaces the instance's forward, as accelerate does for offloading."""
    original = projection.forward
    projection.forward = lambda x: 2 * original(x)
    return projection


def _tensor_subclass(projection):
    weight = projection.weight.detach().clone().as_subclass(CountingTensor)
    projection.weight = nn.Parameter(weight)
    return projection


# Changes after which a projection is more than its weight; each changes a plain nn.Linear or replaces it.
WRAPPERS = {
    "LoRA": _lora,
    "int8": _int8,
    "subclass": _subclass,
    "parametrized": _parametrized,
    "weight norm": _weight_norm,
    "forward hook": _hooked,
    "forward pre-hook": _pre_hooked,
    "own forward": _own_forward,
    "tensor subclass": _tensor_subclass,
}


class UpGate(nn.Module):
    """Halves its input and gates the first half by the second."""

    def forward(self, x):
        x, gate = x.chunk(2, dim=-1)
        return x * F.gelu(gate)


class GateUp(nn.Module):
    def __init__(self):
        super().__init__()
        self.act = nn.SiLU()

    def forward(self, h):
        both = torch.chunk(h, 2, dim=-1)
        return self.act(both[0]) * both[1]
