"""The compared providers, by name: callables that compute the same result from the same operands."""

import importlib
import importlib.util
from functools import partial

import torch
import torch.nn.functional as F

# The measured activations of an MLP, as eager computes them, and Liger's and QuACK's names of their gated forms.
GELU_TANH = "gelu_pytorch_tanh"
ACTIVATIONS = {GELU_TANH: partial(F.gelu, approximate="tanh"), "gelu": F.gelu, "silu": F.silu}
_LIGER = {GELU_TANH: ("geglu", "LigerGELUMulFunction"), "silu": ("swiglu", "LigerSiLUMulFunction")}
_QUACK = {GELU_TANH: "geglu", "silu": "swiglu"}
_GATED = {"liger": _LIGER, "quack": _QUACK}


def device():
    return "cuda" if torch.cuda.is_available() else "cpu"


def unavailable(name, activation=GELU_TANH):
    """The reason why a provider cannot run on this machine, or not with this activation; None if it can."""
    if name in _GATED and activation not in _GATED[name]:
        return f"it has no {activation}"
    if device() == "cpu" and name in ("compile-max", "liger", "quack", "ours-triton"):
        return "it is for GPUs"
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        return f"{NEEDS[name]} is not installed"
    return None


NEEDS = {"liger": "liger_kernel", "quack": "quack"}
PARTS = ("gemms", "gate-up-gemm", "ours-gated", "gemm")  # these compute only a part of the work, so they are no peers


def eager_mlp(x, gate, up, down, function):
    return F.linear(function(F.linear(x, gate)) * F.linear(x, up), down)


def eager_act_and_mul(gate, up):
    return F.gelu(gate, approximate="tanh") * up


def eager_linear(x, weight, bias):
    return F.gelu(F.linear(x, weight, bias), approximate="tanh")


def compiled(function, *operands, **options):
    function = torch.compile(function, **options)
    return lambda: function(*operands)


def mlp_providers(shape, dtype, fused_mlp, wanted, activation=GELU_TANH):
    """Callables that compute down(activation(gate(x)) * up(x)), by name; `gemms` computes only the products."""
    function = ACTIVATIONS[activation]
    m, d, h = shape
    x = torch.randn(m, d, dtype=dtype, device=device())
    gate, up = (torch.randn(h, d, dtype=dtype, device=device()) * d**-0.5 for _ in range(2))
    down = torch.randn(d, h, dtype=dtype, device=device()) * h**-0.5
    packed = torch.cat([gate, up])
    hidden = torch.randn(m, h, dtype=dtype, device=device())

    def forced(name):
        def run():
            with fused_mlp.backend(name):
                return fused_mlp.gated_mlp(x, gate, up, down, activation=activation)

        return run

    def liger():
        module, name = _LIGER[activation]
        product = getattr(importlib.import_module(f"liger_kernel.ops.{module}"), name).apply
        return lambda: F.linear(product(F.linear(x, gate), F.linear(x, up)), down)

    def quack():
        from quack.gemm_interface import gemm_gated

        interleaved = torch.stack([gate, up], dim=1).reshape(2 * h, d)
        return lambda: F.linear(
            gemm_gated(x, interleaved.T, activation=_QUACK[activation], store_preact=False)[1], down
        )

    makers = {
        "eager": lambda: lambda: eager_mlp(x, gate, up, down, function),
        "compile": lambda: compiled(eager_mlp, x, gate, up, down, function),
        "compile-max": lambda: compiled(eager_mlp, x, gate, up, down, function, mode="max-autotune-no-cudagraphs"),
        "liger": liger,
        "quack": quack,
        "gemms": lambda: lambda: (F.linear(x, packed), F.linear(hidden, down)),
        "gate-up-gemm": lambda: lambda: F.linear(x, packed),
        "ours-gated": lambda: lambda: fused_mlp.gated_linear(x, gate, up, activation=activation),
        "ours": lambda: lambda: fused_mlp.gated_mlp(x, gate, up, down, activation=activation),
        "ours-triton": lambda: forced("triton"),
    }
    return {name: make() for name, make in makers.items() if name in wanted}


def linear_providers(shape, dtype, fused_mlp, wanted):
    """Callables that compute gelu_tanh(x w^T + b), by name; `gemm` computes only the product."""
    m, k, n = shape
    x = torch.randn(m, k, dtype=dtype, device=device())
    weight = torch.randn(n, k, dtype=dtype, device=device()) * k**-0.5
    bias = torch.randn(n, dtype=dtype, device=device())
    makers = {
        "eager": lambda: lambda: eager_linear(x, weight, bias),
        "compile": lambda: compiled(eager_linear, x, weight, bias),
        "addmm-activation": lambda: lambda: torch._addmm_activation(bias, x, weight.t(), use_gelu=True),
        "gemm": lambda: lambda: F.linear(x, weight),
        "ours": lambda: lambda: fused_mlp.linear(x, weight, bias, "gelu_pytorch_tanh"),
        "ours-erf": lambda: lambda: fused_mlp.linear(x, weight, bias, "gelu"),
    }
    return {name: make() for name, make in makers.items() if name in wanted}


def pointwise_providers(shape, dtype, fused_mlp, wanted):
    """Callables that compute gelu_tanh(gate) * up, or its gradients, by name.

    `copy` and `copy-backward` move as many bytes as the forward (two reads, a write) and the backward (three and two).
    """
    gate, up, grad = (torch.randn(shape, dtype=dtype, device=device()) for _ in range(3))
    half = gate.numel() // 2
    source = torch.randn(5 * half, dtype=dtype, device=device())
    target = torch.empty_like(source)
    gate_leaf, up_leaf = gate.clone().requires_grad_(), up.clone().requires_grad_()

    def backward(function):
        with torch.enable_grad():
            out = function(gate_leaf, up_leaf)
        return lambda: torch.autograd.grad(out, (gate_leaf, up_leaf), grad, retain_graph=True)

    def triton():
        with fused_mlp.backend("triton"):
            return fused_mlp.act_and_mul(gate, up)

    makers = {
        "eager": lambda: lambda: eager_act_and_mul(gate, up),
        "compile": lambda: compiled(eager_act_and_mul, gate, up),
        "copy": lambda: lambda: target[: 3 * half].copy_(source[: 3 * half]),
        "ours": lambda: lambda: fused_mlp.act_and_mul(gate, up),
        "ours-triton": lambda: triton,
        "eager-backward": lambda: backward(eager_act_and_mul),
        "copy-backward": lambda: lambda: target.copy_(source),
        "ours-backward": lambda: backward(fused_mlp.act_and_mul),
    }
    return {name: make() for name, make in makers.items() if name in wanted}


# The computations: the callables, and the names of all providers.
WORKLOADS = {
    "mlp": (
        mlp_providers,
        [
            *("eager", "compile", "compile-max", "liger", "quack", "gemms", "gate-up-gemm"),
            *("ours-gated", "ours", "ours-triton"),
        ],
    ),
    "pointwise": (
        pointwise_providers,
        ["eager", "compile", "copy", "ours", "ours-triton", "eager-backward", "copy-backward", "ours-backward"],
    ),
    "linear": (linear_providers, ["eager", "compile", "addmm-activation", "gemm", "ours", "ours-erf"]),
}
