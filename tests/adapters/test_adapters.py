"""Functions with low-rank adapters, against float64, PyTorch's own error and PEFT's formula."""

import random
import sys

import pytest
import torch
import torch.nn.functional as F

OPERATIONS = ("linear", "gated_linear", "mlp", "gated_mlp")
NAMES = {
    "linear": ("",),
    "gated_linear": ("gate_", "up_"),
    "mlp": ("fc1_", "fc2_"),
    "gated_mlp": ("gate_", "up_", "down_"),
}
ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    None: lambda x: x,
}
DTYPES = {"cuda": (torch.bfloat16, torch.float16, torch.float32), "cpu": (torch.bfloat16, torch.float32)}


class Case:
    """Operands of a function, with layers' adapters, biases and gradients drawn at random."""

    def __init__(self, device, seed, op=None, dtype=None, rows=None, drops=False):
        chance = random.Random(seed)
        torch.manual_seed(seed)
        self.op = op or chance.choice(OPERATIONS)
        self.activation = chance.choice(tuple(ACTIVATIONS))
        if drops and self.activation == "relu":  # its gradient jumps where rounding changes a sign
            self.activation = "silu"
        self.dtype = dtype or chance.choice(DTYPES[device.type])
        self.memory = chance.choice(("activations", "recompute"))
        step = chance.choice((1, 8, 8, 64))
        width, hidden = (step * chance.randint(1, max(2, 320 // step)) for _ in range(2))
        lead = (rows,) if rows else chance.choice(((1,), (7,), (2, 9), (130,), (257,), (0,)))
        draw = lambda *sizes: torch.randn(*sizes, device=device, dtype=torch.float64).to(self.dtype)  # noqa: E731
        self.x = draw(*lead, width)
        self.layers = []
        for place in range(len(NAMES[self.op])):
            last = place == len(NAMES[self.op]) - 1 and self.op.endswith("mlp")
            out, width_in = (width, hidden) if last else (hidden, width)
            bias = draw(out) if chance.random() < 0.5 else None
            adapter = None
            if chance.random() < 0.8 or (place == 0 and self.op == "linear"):
                rank = chance.choice((1, 3, 4, 8, 16, 24, 64, 72))
                wide = self.dtype != torch.float32 and (seed % 3 == 0 if drops else chance.random() < 0.3)
                made = [draw(rank, width_in) / width_in**0.5, draw(out, rank) / rank**0.5]
                lora_bias = draw(out) if chance.random() < 0.2 else None
                made = [tensor if tensor is None or not wide else tensor.float() for tensor in (*made, lora_bias)]
                adapter = [*made[:2], chance.choice((0.5, 1.0, 2.0, 0.3)), made[2], 0.0]
                if drops:
                    adapter[4] = chance.choice((0.0, 0.1, 0.3, 0.5))
            self.layers.append([draw(out, width_in) / width_in**0.5, bias, adapter])
        if not any(adapter for _, _, adapter in self.layers):
            self.layers[0][2] = [draw(4, width) / width**0.5, draw(hidden, 4) / 2, 2.0, None, 0.3 if drops else 0.0]
        self.needs = [chance.random() < 0.6 for _ in self.leaves()]

    def leaves(self):
        found = [self.x]
        for weight, bias, adapter in self.layers:
            found += [weight, bias, *((adapter[0], adapter[1], adapter[3]) if adapter else ())]
        return [tensor for tensor in found if tensor is not None]

    def copy(self, cast=None):
        """Copies of all tensors, which require gradients as drawn."""
        copies = iter(
            (tensor if cast is None else tensor.to(cast)).detach().clone().requires_grad_(needs)
            for tensor, needs in zip(self.leaves(), self.needs)
        )
        x, layers = next(copies), []
        for _, bias, adapter in self.layers:
            weight = next(copies)
            bias = next(copies) if bias is not None else None
            if adapter:
                a, b = next(copies), next(copies)
                adapter = [a, b, adapter[2], next(copies) if adapter[3] is not None else None, adapter[4]]
            layers.append([weight, bias, adapter])
        return x, layers

    def fused(self, kernel, x, layers):
        torch.manual_seed(3)
        given, adapters = [x, *(weight for weight, _, _ in layers), *(bias for _, bias, _ in layers)], {}
        for name, (_, _, adapter) in zip(NAMES[self.op], layers):
            adapters[f"{name}adapter"] = kernel.Adapter(*adapter) if adapter else None
        memory = {} if self.op == "linear" else {"memory": self.memory}
        return getattr(kernel, self.op)(*given, activation=self.activation, **memory, **adapters)

    def eager(self, x, layers):
        """PEFT's formula, whose result has the dtype of the layer's own product."""
        torch.manual_seed(3)
        dtypes = {id(layer): own[2][0].dtype for layer, own in zip(layers, self.layers) if own[2]}

        def applied(layer, x):
            weight, bias, adapter = layer
            result = F.linear(x, weight, bias)
            if not adapter:
                return result
            a, b, scaling, lora_bias, dropout = adapter
            x = x.to(a.dtype)
            if dropout > 0:  # torch's mask does not depend on the tensor's values
                kept = F.dropout(torch.ones(x.shape, dtype=dtypes[id(layer)], device=x.device), dropout) != 0
                x = x * kept / (1 - dropout)
            return (result + F.linear(F.linear(x, a), b, lora_bias) * scaling).to(result.dtype)

        first, *others = layers
        hidden = ACTIVATIONS[self.activation](applied(first, x))
        if self.op.startswith("gated"):
            hidden = hidden * applied(others[0], x)
        return applied(others[-1], hidden) if self.op.endswith("mlp") else hidden


def results(compute, case, cast=None):
    """The result, and the gradients of all tensors that require one."""
    x, layers = case.copy(cast)
    out = compute(x, layers)
    if not out.requires_grad:
        return [out]
    torch.manual_seed(1)
    grad = torch.randn(out.shape, device=out.device, dtype=torch.float64).to(case.dtype).to(out.dtype)
    leaves = [x, *(t for w, b, a in layers for t in (w, b, *((a[0], a[1], a[3]) if a else ())) if t is not None)]
    return [out, *torch.autograd.grad(out, [leaf for leaf in leaves if leaf.requires_grad], grad)]


def error(found, wanted):
    return (found.double() - wanted).norm() / wanted.norm().clamp_min(1e-30)


def assert_as_good(case, kernel):
    wanted = results(case.eager, case, torch.float64)
    eager = results(case.eager, case)
    found = results(lambda x, layers: case.fused(kernel, x, layers), case)
    slack = {torch.float32: 2e-6, torch.float16: 8e-4, torch.bfloat16: 6e-3}[case.dtype]
    assert len(found) == len(wanted)
    for place, (ours, own, exact) in enumerate(zip(found, eager, wanted)):
        assert (ours.dtype, ours.shape) == (own.dtype, own.shape)
        assert ours.isfinite().all()
        assert error(ours, exact) <= 1.15 * error(own, exact) + slack, place


@pytest.mark.parametrize("seed", range(150))
def test_values_and_gradients(fused_mlp, device, seed):
    assert_as_good(Case(device, seed), fused_mlp)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("op", OPERATIONS)
def test_rank_of_zero(fused_mlp, device, op, seed):
    case = Case(device, seed, op)
    case.activation = "silu"
    for _, _, adapter in case.layers:
        if adapter:
            adapter[:2] = adapter[0][:0], adapter[1][:, :0]
    assert_as_good(case, fused_mlp)


@pytest.mark.parametrize("seed", range(100))
def test_dropout(fused_mlp, device, seed):
    """Dropout drops the same elements as PyTorch and draws as many random numbers."""
    case = Case(device, seed, rows=(None, 300, 6000 if device.type == "cuda" else 300)[seed % 3], drops=True)
    assert_as_good(case, fused_mlp)
    following = []
    for compute in (case.eager, lambda x, layers: case.fused(fused_mlp, x, layers)):
        compute(*case.copy())
        following.append(torch.rand(4, device=device))
    assert torch.equal(*following)


@pytest.mark.parametrize("op", OPERATIONS)
def test_many_rows(fused_mlp, device, op):
    for seed in range(6):
        dtype = DTYPES[device.type][seed % 2]
        assert_as_good(Case(device, seed, op, dtype, rows=700), fused_mlp)


@pytest.mark.parametrize("seed", range(16))
@pytest.mark.parametrize("op", OPERATIONS)
def test_a_gradient_alone(fused_mlp, device, op, seed):
    """The node saves enough for the gradient of any single operand."""
    case = Case(device, seed, op, torch.float32, rows=7)
    for place in range(len(case.needs)):
        case.needs = [each == place for each in range(len(case.needs))]
        assert_as_good(case, fused_mlp)


def test_one_op_computes_them(fused_mlp, device, monkeypatch):
    """No call below is composed of PyTorch's operations."""
    monkeypatch.setattr(sys.modules[f"{fused_mlp.__name__}.adapters"], "composed", None)
    for seed in range(20):
        case = Case(device, seed, dtype=torch.bfloat16)
        results(lambda x, layers, case=case: case.fused(fused_mlp, x, layers), case)
        with torch.no_grad():
            case.fused(fused_mlp, *case.copy())


def test_gradients_that_nobody_asks_for_are_not_computed(fused_mlp, device, monkeypatch):
    adapters, asked = sys.modules[f"{fused_mlp.__name__}.adapters"], []
    backward = adapters._plain_backward
    monkeypatch.setattr(adapters, "_plain_backward", lambda *given: (asked.append(given[-1]), backward(*given))[1])
    case = Case(device, 5, "gated_mlp", torch.float32, rows=9)
    case.needs = [True] * len(case.needs)
    x, layers = case.copy()
    all_of_them = [x, *(tensor for weight, bias, _ in layers for tensor in (weight, bias) if tensor is not None)]
    exact = torch.autograd.grad(case.eager(x, layers).sum(), all_of_them)
    for place, leaf in enumerate(all_of_them):
        (found,) = torch.autograd.grad(case.fused(fused_mlp, x, layers).sum(), leaf)
        torch.testing.assert_close(found, exact[place], rtol=1e-4, atol=1e-4)
    assert all(bits.bit_count() == 1 for bits in asked) and len(asked) == len(all_of_them)
    case.fused(fused_mlp, x, layers).sum().backward()
    assert asked[-1].bit_count() >= len(all_of_them)


@pytest.mark.parametrize(
    "needs, words",
    [
        (1 << 10, "rows are required for the gradient of b"),
        (1 << 3, "gradients are requested of a layer that does not exist"),
        (1 << 9, "gradients are requested of a layer that does not exist"),
        (1 << 7, "x is required"),
    ],
)
def test_the_op_refuses_a_backward_without_its_operands(fused_mlp, device, needs, words):
    backward = sys.modules[f"{fused_mlp.__name__}.adapters"]._backward
    grad, weight, a, b = (torch.randn(*sizes, device=device) for sizes in ((3, 16), (16, 8), (4, 8), (16, 4)))
    given = [weight], [None], [a], [b], [1.0], [0.0], [None], None, None, None, None, False, 0, needs
    with pytest.raises(RuntimeError, match=words):
        backward(grad, None, *given)
