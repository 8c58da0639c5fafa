"""Modules with the parts of an MLP that compute something else, or the same in ways that are easily misread."""

import torch
import torch.nn.functional as F
from torch import nn

from modules import Gated, Intermediate, PackedGated, Plain

# Another function of the same parts. Behind each: what of it may be fused, as the report names it; None if nothing.


class ExtraResidual(Gated):
    fused = "gated"

    def forward(self, x):
        return x + self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class ScaledParent(Gated):
    fused = None

    def forward(self, x):
        return 1.05 * super().forward(x)


class Swapped(Gated):
    fused = "gated"

    def forward(self, x):
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))


class Clamped(Gated):
    fused = "pointwise"

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x).clamp(max=7.0)) * self.up_proj(x).clamp(-7.0, 7.0))


class ClampedHidden(Gated):
    fused = "gated linear"

    def forward(self, x):
        return self.down_proj((self.act_fn(self.gate_proj(x)) * self.up_proj(x)).clamp(-20.0, 20.0))


class UpPlusOne(Gated):
    fused = "pointwise"

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * (self.up_proj(x) + 1))


class ActivationTwice(Gated):
    fused = "pointwise, linear"

    def forward(self, x):
        return self.down_proj(self.act_fn(self.act_fn(self.gate_proj(x))) * self.up_proj(x))


class TwoInputs(Gated):
    fused = "linear"

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x.roll(1, 0)))


class Summed(Gated):
    fused = "linear"

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) + self.up_proj(x))


class SwappedPacked(PackedGated):
    fused = "packed gated, up first"

    def forward(self, hidden_states):
        up, gate = self.gate_up_proj(hidden_states).chunk(2, dim=-1)
        return self.down_proj(up * self.activation_fn(gate))


class OrderedByAnAttribute(PackedGated):
    """As timm's GluMlp: attributes say which dimension is halved, and which half is activated."""

    fused = "packed gated"
    gate_last, chunk_dim = False, -1

    def forward(self, hidden_states):
        both = self.gate_up_proj(hidden_states)
        first, second = both.chunk(2, dim=self.chunk_dim)
        x = first * self.activation_fn(second) if self.gate_last else self.activation_fn(first) * second
        return self.down_proj(x)


class OrderedTheOtherWay(OrderedByAnAttribute):
    fused = "packed gated, up first"
    gate_last = True


class RowsByAnAttribute(OrderedByAnAttribute):
    fused = "pointwise"
    chunk_dim = 0

    def forward(self, hidden_states):
        both = self.gate_up_proj(torch.cat([hidden_states] * 2))
        first, second = both.chunk(2, dim=self.chunk_dim)
        x = first * self.activation_fn(second) if self.gate_last else self.activation_fn(first) * second
        return self.down_proj(x[..., ::2])


class OneHalfTwice(PackedGated):
    fused = "pointwise"

    def forward(self, hidden_states):
        gate, up = self.gate_up_proj(hidden_states).chunk(2, dim=-1)
        return self.down_proj(self.activation_fn(gate) * gate) + up.sum()


class Interleaved(PackedGated):
    fused = "pointwise"

    def forward(self, hidden_states):
        both = self.gate_up_proj(hidden_states)
        return self.down_proj(both[..., 1::2] * self.activation_fn(both[..., ::2]))


class RowsChunked(PackedGated):
    fused = "pointwise"

    def forward(self, hidden_states):
        gate, up = self.gate_up_proj(torch.cat([hidden_states] * 2)).chunk(2, dim=0)
        return self.down_proj((self.activation_fn(gate) * up)[..., ::2])


class Normalised(Plain):
    fused = "plain"

    def forward(self, hidden_states):
        return self.fc2(self.activation_fn(self.fc1(F.layer_norm(hidden_states, hidden_states.shape[-1:]))))


class NoActivation(Plain):
    fused = None

    def forward(self, hidden_states):
        return self.fc2(self.fc1(hidden_states))


class ActivationFirst(Plain):
    fused = None

    def forward(self, hidden_states):
        return self.fc2(self.fc1(self.activation_fn(hidden_states)))


class ActivationLast(Plain):
    fused = "linear"

    def forward(self, hidden_states):
        return self.activation_fn(self.fc2(self.activation_fn(self.fc1(hidden_states))))


class TupleResult(Plain):
    fused = "plain"

    def forward(self, hidden_states):
        return self.fc2(self.activation_fn(self.fc1(hidden_states))), None


class AddsTheMean(Intermediate):
    fused = "linear"

    def forward(self, hidden_states):
        return self.intermediate_act_fn(self.dense(hidden_states)) + hidden_states.mean(dim=-1, keepdim=True)


# Values that are needed once more, or that are not what their names suggest.


class HiddenUsedTwice(Plain):
    fused = None

    def forward(self, x):
        hidden = self.fc1(x)
        return self.fc2(self.activation_fn(hidden)) + hidden.sum()


class ActivatedUsedTwice(Plain):
    fused = "linear"

    def forward(self, x):
        hidden = self.activation_fn(self.fc1(x))
        return self.fc2(hidden), hidden


class HalfUsedTwice(PackedGated):
    fused = "pointwise"

    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(self.activation_fn(gate) * up) + up.sum()


class InputRebound(Gated):
    fused = "pointwise"

    def __init__(self, **options):
        super().__init__(sizes=(32, 32, 32), **options)

    def forward(self, x):
        x = self.up_proj(x)
        gate = self.gate_proj(x)
        return self.down_proj(self.act_fn(gate) * x)


class InputReboundBetween(Plain):
    fused = None

    def forward(self, x):
        hidden = self.fc1(x)
        x = 2 * x
        hidden = hidden + 0 * x.sum()
        return self.fc2(self.activation_fn(hidden)) + x


class InputNameTakenBetween(Plain):
    fused = "linear"

    def forward(self, x):
        hidden = self.activation_fn(self.fc1(x))
        x = x.sum(-1, keepdim=True)
        return self.fc2(hidden) + x


class InputChangedInPlace(Gated):
    fused = "pointwise"

    def forward(self, x):
        x = x + 0
        gate = self.gate_proj(x.clone())
        x.mul_(2.0)
        return self.down_proj(self.act_fn(gate) * self.up_proj(x))


class HiddenChangedInPlace(Plain):
    fused = None

    def forward(self, x):
        hidden = self.fc1(x)
        hidden += 1
        return self.fc2(self.activation_fn(hidden))


class HiddenWrittenTo(Plain):
    fused = None

    def forward(self, x):
        hidden = self.fc1(x) + 0
        hidden[..., 0] = 3.0
        return self.fc2(self.activation_fn(hidden))


class BoundUnderACondition(Plain):
    fused = None

    def forward(self, x):
        hidden = self.fc1(x)
        if x.shape[0] > 1:
            hidden = hidden * 2
        return self.fc2(self.activation_fn(hidden))


class BoundInALoop(Plain):
    fused = "linear"

    def forward(self, x):
        total, hidden = 0, x.new_zeros(88)
        for _ in range(3):
            total = total + hidden
            hidden = self.activation_fn(self.fc1(x))
        return self.fc2(total)


class HeldByAClosure(Plain):
    fused = None

    def forward(self, x):
        hidden = x.new_zeros(88)

        def peek():
            return hidden.sum()

        hidden = self.fc1(x)
        result = self.fc2(self.activation_fn(hidden))
        return result + peek()


class BoundByAWalrus(Plain):
    fused = None

    def forward(self, x):
        hidden = x
        other = (hidden := self.fc1(x)) + 1
        return self.fc2(self.activation_fn(hidden)) + other.sum()


class Unpacked(Plain):
    fused = None

    def forward(self, x):
        hidden, other = self.fc1(torch.stack([x, 2 * x]))
        return self.fc2(self.activation_fn(hidden)) + other.sum()


class LocalActivation(Plain):
    fused = None

    def forward(self, x):
        gelu = torch.tanh
        return self.fc2(gelu(self.fc1(x)))


class LocalModule(Plain):
    fused = None

    def forward(self, x, F=torch):
        return self.fc2(F.tanh(self.fc1(x)))


class InPlaceActivation(Gated):
    fused = "pointwise"

    def __init__(self, **options):
        super().__init__(act=lambda: nn.ReLU(inplace=True), **options)

    def forward(self, x):
        gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(self.act_fn(gate) * up) + gate.sum()


class InPlaceActivationOfOne(Gated):
    fused = "pointwise"

    def __init__(self, **options):
        super().__init__(act=lambda: nn.ReLU(inplace=True), **options)

    def forward(self, x):
        gate = self.gate_proj(x)
        return self.down_proj(self.act_fn(gate) * gate)


class PartReplacedBetween(Plain):
    fused = "linear"

    def forward(self, x):
        hidden = self.activation_fn(self.fc1(x))
        self.calls = getattr(self, "calls", 0) + 1
        return self.fc2(hidden)


class Counting(Plain):
    fused = "plain"

    def forward(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        self.last = self.fc2(self.activation_fn(self.fc1(x)))
        return self.last * self.calls


class DeletedName(Plain):
    fused = None

    def forward(self, x):
        hidden = self.fc1(x)
        result = self.activation_fn(hidden)
        del hidden
        return self.fc2(result)


class WithoutGradients(Plain):
    fused = None

    @torch.no_grad()
    def forward(self, x):
        return self.fc2(self.activation_fn(self.fc1(x)))


class FunctionalDropout(Plain):
    """Its dropout is no module, and shows in training alone."""

    fused = "plain"

    def forward(self, hidden_states):
        hidden = self.activation_fn(self.fc1(hidden_states))
        return self.fc2(F.dropout(hidden, p=0.5, training=self.training))


class AlwaysDropout(Plain):
    fused = "linear"

    def forward(self, x):
        return self.fc2(F.dropout(self.activation_fn(self.fc1(x)), p=0.5))


class DropoutOfTheInput(Plain):
    fused = "plain"

    def forward(self, x):
        x = F.dropout(x, p=0.5, training=self.training)
        x = self.fc1(x)
        x = self.activation_fn(x)
        x = self.fc2(x)
        return F.dropout(x, p=0.5, training=self.training)


class DoubledInTraining(Gated):
    fused = "gated"

    def forward(self, x):
        result = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return 2 * result if self.training else result


class Configurable(Gated):
    """Like Gemma 3n's MLP: what an instance computes depends on an attribute, and is whole where that is 0."""

    fused = "pointwise"

    def __init__(self, sparsity=0.5, **options):
        super().__init__(**options)
        self.activation_sparsity = sparsity

    def forward(self, x):
        gate = self.gate_proj(x)
        if self.activation_sparsity > 0:
            gate = F.relu(gate - self.activation_sparsity * gate.std(dim=-1, keepdim=True))
        return self.down_proj(self.act_fn(gate) * self.up_proj(x))


class WithNorm(Gated):
    fused = "gated linear"

    def __init__(self, **options):
        super().__init__(**options)
        self.norm = nn.LayerNorm(88)

    def forward(self, x):
        return self.down_proj(self.norm(self.act_fn(self.gate_proj(x)) * self.up_proj(x)))


class WithState(Gated):
    fused = "gated linear"

    def __init__(self, **options):
        super().__init__(**options)
        self.scale = nn.Parameter(torch.tensor(3.0))
        self.register_buffer("mask", torch.ones(88).index_fill(0, torch.arange(9), 0.0))

    def forward(self, x):
        hidden = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        self.mask = self.mask.roll(1)
        return self.scale * self.down_proj(self.mask * hidden)


ALL = [
    kind
    for kind in list(vars().values())
    if isinstance(kind, type) and issubclass(kind, nn.Module) and kind.__module__ == __name__
]

# Those that never hand the output of a projection to their activation, or to one that a name stands for.
NO_MLPS = (NoActivation, ActivationFirst, LocalModule)
