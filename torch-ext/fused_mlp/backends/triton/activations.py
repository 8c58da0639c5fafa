"""The activations and their derivatives in Triton: fp32 in, fp32 out, selected at compile time by the table's code.

EXACT requests fp32 results as accurate as PyTorch's. Without it the kernels use the hardware's exponential and
division, whose errors vanish when the result is rounded to 16 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...activations import get_activation

LINEAR = tl.constexpr(get_activation("linear").code)
GELU = tl.constexpr(get_activation("gelu").code)
GELU_TANH = tl.constexpr(get_activation("gelu_pytorch_tanh").code)
QUICK_GELU = tl.constexpr(get_activation("quick_gelu").code)
SILU = tl.constexpr(get_activation("silu").code)
RELU = tl.constexpr(get_activation("relu").code)
RELU2 = tl.constexpr(get_activation("relu2").code)
SIGMOID = tl.constexpr(get_activation("sigmoid").code)

SQRT_HALF = tl.constexpr(0.7071067811865476)
INV_SQRT_2PI = tl.constexpr(0.3989422804014327)
TANH_SLOPE = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi), for 0.5 (1 + tanh u) = sigmoid(2u)
TANH_CUBIC = tl.constexpr(0.044715 * 1.5957691216057308)
QUICK_SLOPE = tl.constexpr(1.702)
LOG2_E = tl.constexpr(1.4426950408889634)
LN2_HIGH = tl.constexpr(0.693359375)  # few bits, so that its product with a small integer is exact
LN2_LOW = tl.constexpr(-2.1219444005469057e-4)

# Below, tensors are the left operands of constants, because the interpreter turns constant * tensor into a constant.


@triton.jit
def _exp(x, EXACT: tl.constexpr):
    """exp(x) for x <= 0"""
    if EXACT:
        # tl.exp(x) is 2^(x log2 e), and rounding that product costs accuracy in proportion to x: reduce x first.
        x = tl.maximum(x, -104.0, propagate_nan=tl.PropagateNan.ALL)  # exp(-104) is 0 in fp32
        n = tl.floor(x * LOG2_E + 0.5)
        return tl.exp((x - n * LN2_HIGH) - n * LN2_LOW) * tl.exp2(n)
    else:
        return tl.exp(x)


@triton.jit
def _sigmoid_tail(x, EXACT: tl.constexpr):
    """sigmoid(-|x|): the smaller of sigmoid(x) and 1 - sigmoid(x), neither overflowing nor cancelling"""
    e = _exp(-tl.abs(x), EXACT)
    tail = e / (e + 1.0)
    if EXACT:
        # One Newton step corrects the division; IEEE division would branch for operands that do not occur here.
        tail += tl.fma(-tail, e + 1.0, e) / (e + 1.0)
    return tail


@triton.jit
def _sigmoid(x, EXACT: tl.constexpr):
    tail = _sigmoid_tail(x, EXACT)
    return tl.where(x > 0, 1.0 - tail, tail)


@triton.jit
def _sigmoid_derivative(x, EXACT: tl.constexpr):
    tail = _sigmoid_tail(x, EXACT)
    return tail * (1.0 - tail)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr, EXACT: tl.constexpr):
    if ACTIVATION == LINEAR:
        return x
    elif ACTIVATION == GELU:
        return x * 0.5 * (tl.erf(x * SQRT_HALF) + 1.0)
    elif ACTIVATION == GELU_TANH:
        return x * _sigmoid(x * (x * x * TANH_CUBIC + TANH_SLOPE), EXACT)
    elif ACTIVATION == QUICK_GELU:
        return x * _sigmoid(x * QUICK_SLOPE, EXACT)
    elif ACTIVATION == SILU:
        return x * _sigmoid(x, EXACT)
    elif ACTIVATION == RELU:
        return tl.where(x < 0, 0.0, x)  # NaN stays NaN
    elif ACTIVATION == RELU2:
        positive = tl.where(x < 0, 0.0, x)
        return positive * positive
    else:
        tl.static_assert(ACTIVATION == SIGMOID, "unknown activation code")
        return _sigmoid(x, EXACT)


@triton.jit
def derivative(x, ACTIVATION: tl.constexpr, EXACT: tl.constexpr):
    # In derivatives of x sigmoid(z), x comes last: its factor has vanished before x z' could overflow.
    if ACTIVATION == LINEAR:
        return tl.full(x.shape, 1.0, tl.float32)
    elif ACTIVATION == GELU:
        density = _exp(x * x * -0.5, EXACT) * INV_SQRT_2PI
        return 0.5 * (tl.erf(x * SQRT_HALF) + 1.0) + x * density
    elif ACTIVATION == GELU_TANH:
        # The derivative is exactly 0 or 1 well inside these bounds, and the slope overflows far outside. It is NaN at
        # infinity.
        x = tl.clamp(x, -32.0, 32.0, propagate_nan=tl.PropagateNan.ALL) + (x - x)
        z = x * (x * x * TANH_CUBIC + TANH_SLOPE)
        slope = x * x * TANH_CUBIC * 3.0 + TANH_SLOPE
        return _sigmoid(z, EXACT) + x * (_sigmoid_derivative(z, EXACT) * slope)
    elif ACTIVATION == QUICK_GELU:
        z = x * QUICK_SLOPE
        return _sigmoid(z, EXACT) + x * (_sigmoid_derivative(z, EXACT) * QUICK_SLOPE)
    elif ACTIVATION == SILU:
        return _sigmoid(x, EXACT) + x * _sigmoid_derivative(x, EXACT)
    elif ACTIVATION == RELU:
        return tl.where(x <= 0, 0.0, 1.0)
    elif ACTIVATION == RELU2:
        return 2.0 * tl.where(x < 0, 0.0, x)
    else:
        tl.static_assert(ACTIVATION == SIGMOID, "unknown activation code")
        return _sigmoid_derivative(x, EXACT)
