"""Public functions.

Every function takes operands of one dtype (float32, float16 or bfloat16; other dtypes run in plain PyTorch) and one
device, with any leading dimensions and any strides. Each raises TypeError or ValueError for invalid operands (see
``operands``); both are also a RuntimeError, as PyTorch's own errors are. ``activations`` specifies how NaN, infinities
and overflow propagate.
"""

from __future__ import annotations

from typing import Optional

from torch import Tensor

from . import adapters, calls, operands
from .activations import get_activation
from .adapters import Adapter, Layer, Layers
from .autograd import training
from .experts import Form
from .quantized import experts as quantized_experts
from .quantized import weights as quantized
from .quantized.experts import AnyStack
from .quantized.weights import AnyWeight


def act_and_mul(gate: Tensor, up: Tensor, activation: Optional[str] = "gelu_pytorch_tanh") -> Tensor:
    """Return ``act(gate) * up``, elementwise: the pointwise part of a gated MLP in one kernel.

    Args:
        gate: ``[...]``, the branch that the activation applies to.
        up: a tensor with the shape, dtype and device of ``gate``.
        activation: a name of ``transformers.activations.ACT2FN`` that the package knows, or None for the identity.

    Returns:
        A tensor with the shape and dtype of ``gate`` and the strides that ``act(gate) * up`` has in PyTorch. If both
        operands are dense in the same permuted order (transposed, channels_last), so is the result.

    Source: Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202.
    """
    return calls.act_and_mul(gate, up, get_activation(activation))


def geglu(gate: Tensor, up: Tensor, approximate: str = "tanh") -> Tensor:
    """Return ``gelu(gate) * up``; ``approximate`` is that of :func:`torch.nn.functional.gelu`."""
    return act_and_mul(gate, up, gelu_name(approximate))


def gelu_name(approximate: str) -> str:
    """Return our name of ``gelu(approximate=approximate)``; ValueError unless it is "tanh" or "none"."""
    if approximate not in ("tanh", "none"):
        raise ValueError(f"approximate must be 'tanh' or 'none', got {approximate!r}")
    return "gelu_pytorch_tanh" if approximate == "tanh" else "gelu"


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return ``silu(gate) * up``: :func:`act_and_mul` with SiLU."""
    return act_and_mul(gate, up, "silu")


def linear(
    x: Tensor,
    weight: AnyWeight,
    bias: Optional[Tensor] = None,
    activation: Optional[str] = None,
    *,
    adapter: Optional[Adapter] = None,
) -> Tensor:
    """Return ``act(x weight^T + bias)``.

    Args:
        x: ``[..., in]``.
        weight: ``[out, in]``, as in ``torch.nn.Linear``; or a :class:`QuantizedWeight`.
        bias: ``[out]`` or None.
        activation: see :func:`act_and_mul`.
        adapter: a low-rank product of x, added before the activation; see :class:`Adapter`.

    Returns:
        ``[..., out]``.
    """
    row = get_activation(activation)
    if adapter is None and not quantized.is_any(weight):
        return calls.computed("linear", (x, weight, bias), row.code)
    operands.check_linear(x, *quantized.stand_ins(x, weight=weight), bias)
    adapters.check_any(x, adapter=(adapter, weight))
    return adapters.run(x, Layers(Layer(weight, bias, adapter)), row.code)


def gated_linear(
    x: Tensor,
    gate_weight: AnyWeight,
    up_weight: AnyWeight,
    gate_bias: Optional[Tensor] = None,
    up_bias: Optional[Tensor] = None,
    activation: Optional[str] = "gelu_pytorch_tanh",
    memory: str = training.KEPT,
    *,
    gate_adapter: Optional[Adapter] = None,
    up_adapter: Optional[Adapter] = None,
) -> Tensor:
    """Return ``act(x gate_weight^T + gate_bias) * (x up_weight^T + up_bias)``, the first half of a gated MLP.

    Args:
        x: ``[..., in]``.
        gate_weight, up_weight: ``[hidden, in]`` each, as in ``torch.nn.Linear``; two tensors, or two views of one
            packed tensor. Each may be a :class:`QuantizedWeight`.
        gate_bias, up_bias: ``[hidden]`` or None.
        activation: see :func:`act_and_mul`.
        memory: what autograd saves for the backward. ``"activations"`` saves gate and up before the activation;
            ``"recompute"`` saves only the operands, and the backward recomputes gate and up. Without autograd, nothing
            is saved.
        gate_adapter, up_adapter: see :class:`Adapter`.

    Returns:
        ``[..., hidden]``.
    """
    row = get_activation(activation)
    training.check_memory(memory)
    if gate_adapter is None and up_adapter is None and not quantized.is_any(gate_weight, up_weight):
        given = (x, gate_weight, up_weight, gate_bias, up_bias)
        return calls.computed("gated_linear", given, row.code, memory)
    weights = quantized.stand_ins(x, gate_weight=gate_weight, up_weight=up_weight)
    operands.check_gated_linear(x, *weights, gate_bias, up_bias)
    adapters.check_any(x, gate_adapter=(gate_adapter, gate_weight), up_adapter=(up_adapter, up_weight))
    layers = Layers(Layer(gate_weight, gate_bias, gate_adapter), Layer(up_weight, up_bias, up_adapter))
    return adapters.run(x, layers, row.code, memory)


def gated_mlp(
    x: Tensor,
    gate_weight: AnyWeight,
    up_weight: AnyWeight,
    down_weight: AnyWeight,
    gate_bias: Optional[Tensor] = None,
    up_bias: Optional[Tensor] = None,
    down_bias: Optional[Tensor] = None,
    activation: Optional[str] = "gelu_pytorch_tanh",
    memory: str = training.KEPT,
    *,
    gate_adapter: Optional[Adapter] = None,
    up_adapter: Optional[Adapter] = None,
    down_adapter: Optional[Adapter] = None,
) -> Tensor:
    """Return the whole gated MLP: ``gated_linear(x, ...) down_weight^T + down_bias``.

    Args:
        x: ``[..., in]``.
        gate_weight, up_weight: ``[hidden, in]`` each.
        down_weight: ``[out, hidden]``. Each of the three may be a :class:`QuantizedWeight`.
        gate_bias, up_bias: ``[hidden]`` or None.
        down_bias: ``[out]`` or None.
        activation: see :func:`act_and_mul`.
        memory: see :func:`gated_linear`.
        gate_adapter, up_adapter, down_adapter: see :class:`Adapter`.

    Returns:
        ``[..., out]``.
    """
    row = get_activation(activation)
    training.check_memory(memory)
    is_quantized = quantized.is_any(gate_weight, up_weight, down_weight)
    if is_quantized or not (gate_adapter is None and up_adapter is None and down_adapter is None):
        weights = quantized.stand_ins(x, gate_weight=gate_weight, up_weight=up_weight, down_weight=down_weight)
        operands.check_gated_mlp(x, *weights, gate_bias, up_bias, down_bias)
        adapters.check_any(
            x,
            gate_adapter=(gate_adapter, gate_weight),
            up_adapter=(up_adapter, up_weight),
            down_adapter=(down_adapter, down_weight),
        )
        gate, up = Layer(gate_weight, gate_bias, gate_adapter), Layer(up_weight, up_bias, up_adapter)
        return adapters.run(x, Layers(gate, up, Layer(down_weight, down_bias, down_adapter)), row.code, memory)
    given = (x, gate_weight, up_weight, down_weight, gate_bias, up_bias, down_bias)
    return calls.computed("gated_mlp", given, row.code, memory)


def mlp(
    x: Tensor,
    fc1_weight: AnyWeight,
    fc2_weight: AnyWeight,
    fc1_bias: Optional[Tensor] = None,
    fc2_bias: Optional[Tensor] = None,
    activation: Optional[str] = "gelu_pytorch_tanh",
    memory: str = training.KEPT,
    *,
    fc1_adapter: Optional[Adapter] = None,
    fc2_adapter: Optional[Adapter] = None,
) -> Tensor:
    """Return the whole plain MLP: ``act(x fc1_weight^T + fc1_bias) fc2_weight^T + fc2_bias``.

    Args:
        x: ``[..., in]``.
        fc1_weight: ``[hidden, in]``.
        fc2_weight: ``[out, hidden]``. Each of the two may be a :class:`QuantizedWeight`.
        fc1_bias: ``[hidden]`` or None.
        fc2_bias: ``[out]`` or None.
        activation: see :func:`act_and_mul`.
        memory: see :func:`gated_linear`.
        fc1_adapter, fc2_adapter: see :class:`Adapter`.

    Returns:
        ``[..., out]``.
    """
    row = get_activation(activation)
    training.check_memory(memory)
    if fc1_adapter is None and fc2_adapter is None and not quantized.is_any(fc1_weight, fc2_weight):
        return calls.computed("mlp", (x, fc1_weight, fc2_weight, fc1_bias, fc2_bias), row.code, memory)
    weights = quantized.stand_ins(x, fc1_weight=fc1_weight, fc2_weight=fc2_weight)
    operands.check_mlp(x, *weights, fc1_bias, fc2_bias)
    adapters.check_any(x, fc1_adapter=(fc1_adapter, fc1_weight), fc2_adapter=(fc2_adapter, fc2_weight))
    layers = Layers(Layer(fc1_weight, fc1_bias, fc1_adapter), None, Layer(fc2_weight, fc2_bias, fc2_adapter))
    return adapters.run(x, layers, row.code, memory)


def experts_mlp(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_weight: AnyStack,
    down_weight: AnyStack,
    gate_up_bias: Optional[Tensor] = None,
    down_bias: Optional[Tensor] = None,
    activation: Optional[str] = "silu",
    *,
    gated: bool = True,
    interleaved: bool = False,
    transposed: bool = False,
    limit: Optional[float] = None,
    up_offset: float = 0.0,
    gate_up_adapter: Optional[Adapter] = None,
    down_adapter: Optional[Adapter] = None,
) -> Tensor:
    """Return the experts layer of a mixture: for each token, the weighted sum of the MLPs that its router chose.

    The terms are added in the order of ``top_k_index``, in float32, so every run gives the same bits.

    Args:
        x: ``[..., in]``, the tokens.
        top_k_index: ``[..., k]``, integers: the experts of each token. An index that is negative or past the last
            expert is skipped: it adds nothing and no weight is read. Under expert parallelism, such experts are on
            other ranks.
        top_k_weights: ``[..., k]``, any floating dtype: the factor applied to each expert's result.
        gate_up_weight: ``[experts, 2 * hidden, in]``, gate and up; ``[experts, hidden, in]`` if not ``gated``.
        down_weight: ``[experts, out, hidden]``. Either weight may be a :class:`QuantizedStack`; kernels read its codes,
            or it is decoded first. Biases may then be float32.
        gate_up_bias: ``[experts, 2 * hidden]``, or ``[experts, hidden]``, or None.
        down_bias: ``[experts, out]`` or None.
        activation: see :func:`act_and_mul`.
        interleaved: True if gate and up features alternate in ``gate_up_weight`` and its bias; False if gates come
            first.
        transposed: True if both weights are stored as ``[experts, in, out]``.
        limit: upper bound of gate, and bound of the magnitude of up, before the activation; None for no bound.
        up_offset: constant added to up after clamping. The gate of gpt-oss is that of the activation
            ``x * sigmoid(1.702 x)``, with ``limit=7.0`` and ``up_offset=1.0``.
        gate_up_adapter, down_adapter: LoRA for the two weights, or None. Each :class:`Adapter` covers all experts:
            ``a`` is ``[experts, rank, in]`` and ``b`` ``[experts, out, rank]``, however the weights are stored. The
            features of ``b`` are in the order of the weight's. No tensor of a weight's size is materialised for them.

    Returns:
        ``[..., out]``, in the dtype of ``x``.
    """
    form = Form(get_activation(activation).code, gated, interleaved, transposed, limit, up_offset)
    operands.check_flags(gated=gated, interleaved=interleaved, transposed=transposed)
    given = (x, top_k_index, top_k_weights, gate_up_weight, down_weight, gate_up_bias, down_bias)
    given_adapters = gate_up_adapter, down_adapter
    if quantized_experts.is_any(gate_up_weight, down_weight):
        return quantized_experts.run(given, form, given_adapters)
    if gate_up_adapter is None and down_adapter is None:
        return calls.experts_mlp(*given, form)
    operands.check_experts_mlp(*given, *form[1:])
    adapters.check_of_experts(x, transposed, given_adapters, (gate_up_weight, down_weight))
    return calls.adapted_experts(*given, form, adapters=given_adapters)
