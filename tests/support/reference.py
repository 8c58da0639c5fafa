"""The references for the kernel's results: float64 formulas of the tests' own, and the eager PyTorch sequence that the
kernel replaces.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

FLOAT32_ROUNDING = torch.finfo(torch.float32).eps / 2
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Formula:
    exact: Callable[[Tensor], Tensor]  # for float64
    derivative: Callable[[Tensor], Tensor]  # for float64
    eager: Callable[[Tensor], Tensor]  # as models compute it, in any dtype


def _phi(x: Tensor) -> Tensor:
    return torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def _tanh_argument(x: Tensor) -> Tensor:
    return math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)


def _gelu_tanh_derivative(x: Tensor) -> Tensor:
    t = torch.tanh(_tanh_argument(x))
    return (1 + t) / 2 + x * (1 - t * t) / 2 * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x**2)


def _logistic(x: Tensor) -> Tensor:
    return (1 + torch.tanh(x / 2)) / 2


def _logistic_derivative(x: Tensor) -> Tensor:
    return 1 / (4 * torch.cosh(x / 2) ** 2)


FORMULAS = {
    None: Formula(lambda x: x * 1, torch.ones_like, lambda x: x),
    "linear": Formula(lambda x: x * 1, torch.ones_like, lambda x: x),
    "gelu": Formula(
        lambda x: x * torch.erfc(-x / math.sqrt(2)) / 2,
        lambda x: torch.erfc(-x / math.sqrt(2)) / 2 + x * _phi(x),
        F.gelu,
    ),
    "gelu_pytorch_tanh": Formula(
        lambda x: x * (1 + torch.tanh(_tanh_argument(x))) / 2,
        _gelu_tanh_derivative,
        lambda x: F.gelu(x, approximate="tanh"),
    ),
    "quick_gelu": Formula(
        lambda x: x * _logistic(1.702 * x),
        lambda x: _logistic(1.702 * x) + 1.702 * x * _logistic_derivative(1.702 * x),
        lambda x: x * torch.sigmoid(1.702 * x),
    ),
    "silu": Formula(
        lambda x: x * _logistic(x),
        lambda x: _logistic(x) + x * _logistic_derivative(x),
        F.silu,
    ),
    "relu": Formula(lambda x: x.clamp(min=0), lambda x: (x > 0).double(), F.relu),
    "relu2": Formula(lambda x: x.clamp(min=0) ** 2, lambda x: 2 * x.clamp(min=0), lambda x: torch.square(F.relu(x))),
    "sigmoid": Formula(_logistic, _logistic_derivative, torch.sigmoid),
}
ACTIVATIONS = tuple(name for name in FORMULAS if name is not None)


# The package's functions for any `act`; they compute in the dtype of their operands.


def act_and_mul(act, gate, up):
    return act(gate) * up


def linear(act, x, weight, bias=None):
    return act(F.linear(x, weight, bias))


def gated_linear(act, x, gate_weight, up_weight, gate_bias=None, up_bias=None):
    return act(F.linear(x, gate_weight, gate_bias)) * F.linear(x, up_weight, up_bias)


def gated_mlp(act, x, gate_weight, up_weight, down_weight, gate_bias=None, up_bias=None, down_bias=None):
    return F.linear(gated_linear(act, x, gate_weight, up_weight, gate_bias, up_bias), down_weight, down_bias)


def mlp(act, x, fc1_weight, fc2_weight, fc1_bias=None, fc2_bias=None):
    return F.linear(linear(act, x, fc1_weight, fc1_bias), fc2_weight, fc2_bias)


# The number of roundings by which two right sums differ: PyTorch has several products, which add in different orders,
# and chooses one by shape and strides.
ROUNDINGS = {"act_and_mul": 1, "linear": 8, "gated_linear": 8, "gated_mlp": 8, "mlp": 8}

FUNCTIONS = {function.__name__: function for function in (act_and_mul, linear, gated_linear, gated_mlp, mlp)}


def shapes(function: str, lead: tuple[int, ...], sizes: tuple[int, int, int]) -> dict[str, tuple[int, ...]]:
    """The shapes of a function's operands, by name, in order; `sizes` are in, hidden and out."""
    n_in, hidden, out = sizes
    if function == "act_and_mul":
        return {"gate": (*lead, hidden), "up": (*lead, hidden)}
    x, first, second = (*lead, n_in), (hidden, n_in), (out, hidden)
    if function == "linear":
        return {"x": x, "weight": first, "bias": (hidden,)}
    if function == "mlp":
        return {"x": x, "fc1_weight": first, "fc2_weight": second, "fc1_bias": (hidden,), "fc2_bias": (out,)}
    gated = {"x": x, "gate_weight": first, "up_weight": first}
    biases = {"gate_bias": (hidden,), "up_bias": (hidden,)}
    if function == "gated_linear":
        return gated | biases
    return gated | {"down_weight": second} | biases | {"down_bias": (out,)}


def operands(
    function: str,
    lead: tuple[int, ...] = (3, 37),
    sizes: tuple[int, int, int] = (64, 96, 40),
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    biases: bool | tuple[str, ...] = True,
) -> dict[str, Tensor]:
    """Random operands that make all parts of the result of order one; `biases`: all, none, or those named."""
    made = {}
    for name, shape in shapes(function, lead, sizes).items():
        if name.endswith("bias") and (biases is False or (biases is not True and name not in biases)):
            continue
        scale = max(shape[1], 1) ** -0.5 if name.endswith("weight") else 1.0
        made[name] = (scale * torch.randn(shape, device=device)).to(dtype)
    return made


def exact(function: str, operands: dict[str, Tensor], activation: str | None) -> Tensor:
    wide = {name: operand.double() for name, operand in operands.items()}
    return FUNCTIONS[function](FORMULAS[activation].exact, **wide)


def eager(function: str, operands: dict[str, Tensor], activation: str | None) -> Tensor:
    return FUNCTIONS[function](FORMULAS[activation].eager, **operands)


def errors(result: Tensor, reference: Tensor) -> tuple[float, float]:
    """The error's norm relative to the reference's norm, and its maximum relative to the reference's maximum."""
    error = result.double() - reference
    norm, maximum = reference.norm().item(), reference.abs().max().item()
    return error.norm().item() / (norm or 1.0), error.abs().max().item() / (maximum or 1.0)


def _effective_number(reference: Tensor) -> float:
    """The effective number of elements in the norm: all distinct ones if of similar size, few if few are large."""
    squares = reference.detach().unique().square()
    return max(1.0, float(squares.sum().square() / squares.square().sum()))


def conditioning(compute: Callable[[dict[str, Tensor]], Sequence[Tensor]], operands: dict[str, Tensor]):
    """The factor by which the relative error of the result of an index exceeds that of the operands, in norms.

    If terms cancel, a rounding of each amounts to many roundings of their sum. Each draw moves the operands up or down
    at random, equal elements of an expanded one together; the largest factor of several draws counts. Every draw takes
    float64 results, so this is computed only when called.
    """
    step = 2.0**-24

    @functools.cache
    def found() -> list[float]:
        results = compute({name: operand.double() for name, operand in operands.items()})
        largest = [1.0] * len(results)
        for _ in range(8):
            moved = {name: operand.double() * (1 + step * _signs(operand)) for name, operand in operands.items()}
            for index, (result, other) in enumerate(zip(results, compute(moved), strict=True)):
                if result.numel() > 0:
                    largest[index] = max(largest[index], errors(other, result)[0] / step)
        return largest

    return lambda index: found()[index]


def _signs(operand: Tensor) -> Tensor:
    sizes = [1 if stride == 0 else size for size, stride in zip(operand.shape, operand.stride(), strict=True)]
    return 2.0 * torch.randint(2, sizes, device=operand.device) - 1


def strides(tensor: Tensor) -> list[int]:
    """The strides that matter: a dimension of size 1 has no step."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]


def assert_no_worse_than_eager(
    result: Tensor,
    eager: Tensor,
    reference: Tensor,
    what: str = "result",
    roundings: int = 1,
    dtype: torch.dtype | None = None,
    chance: float = 3.0,
    conditioning: Callable[[], float] | None = None,
) -> None:
    """The contract on accuracy: the error against float64 is at most eager's own, with a tolerance.

    Two right ways to compute the same round differently. The tolerance adds an independent error of `roundings`
    roundings of float32, in which everything is computed, and `chance` times the random error of n roundings to `dtype`
    (the result's, or a coarser one on the way to it); n is the number of elements that make up the norm. Both grow with
    the `conditioning` of the result, which is at least 1 and computed only if 1 is not enough. The largest error of
    thousands depends on a single rounding and varies much more than the norm: it may be twice eager's plus one unit in
    the last place of the largest element. Wrong elements are further off than that.
    """
    assert result.shape == reference.shape, f"{what}: shape {tuple(result.shape)}, expected {tuple(reference.shape)}"
    assert result.dtype == eager.dtype, f"{what}: {result.dtype}, expected {eager.dtype}"
    assert result.device == eager.device, f"{what}: on {result.device}, expected {eager.device}"
    if reference.numel() == 0:
        return
    rounding = torch.finfo(dtype or result.dtype).eps
    norm, maximum = errors(result, reference)
    eager_norm, eager_maximum = errors(eager, reference)
    by_order = roundings * FLOAT32_ROUNDING
    by_chance = chance * rounding * _effective_number(reference) ** -0.5

    def within(factor: float) -> bool:
        allowed_norm = math.hypot(eager_norm, factor * by_order) + factor * by_chance
        allowed_maximum = 2 * math.hypot(eager_maximum, 3 * factor * by_order) + factor * by_chance + rounding
        return norm <= allowed_norm and maximum <= allowed_maximum  # both are false for a NaN

    assert within(1.0) or (conditioning is not None and within(conditioning())), (
        f"{what}: norm of the error {norm:.3e}, eager's {eager_norm:.3e}; "
        f"largest error {maximum:.3e}, eager's {eager_maximum:.3e}"
    )


@contextmanager
def poisoned_memory(device: torch.device) -> Iterator[None]:
    """Newly allocated memory holds NaNs until it is written to, by PyTorch's mode for deterministic code."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(8, device=device).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def subsets(names: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for mask in range(2 ** len(names)):
        yield tuple(name for i, name in enumerate(names) if mask >> i & 1)
