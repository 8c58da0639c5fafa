"""Tensors in all memory layouts, and a check of their product against eager's values and strides."""

import random

import torch
from torch import Tensor

from reference import ACTIVATIONS, FORMULAS

# The value between a tensor's elements: large, so that a read of it shows; not NaN, since PyTorch's own products
# multiply some gaps by zeros.
GAP = 1e4


def transposed(tensor: Tensor) -> Tensor:
    return tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor


def chunk(tensor: Tensor, gap: float = GAP) -> Tensor:
    """The same values as a chunk of a wider tensor, as packed projections return."""
    return torch.cat([torch.full_like(tensor, gap), tensor], dim=-1).chunk(2, dim=-1)[1]


def every_other_column(tensor: Tensor, gap: float = GAP) -> Tensor:
    return torch.stack([tensor, torch.full_like(tensor, gap)], dim=-1)[..., 0]


def misaligned(tensor: Tensor, gap: float = GAP) -> Tensor:
    """The same values, one element after the start of their memory."""
    return torch.cat([tensor.new_full((1,), gap), tensor.flatten()])[1:].view(tensor.shape)


def drawn_shape(draw: random.Random, dims: int | None = None) -> tuple[int, ...]:
    dims = draw.randint(0, 5) if dims is None else dims
    return tuple(0 if draw.random() < 0.02 else draw.choice([1, 1, 2, 2, 3, 3, 4]) for _ in range(dims))


def drawn(draw: random.Random, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """A random tensor: dense in some order of its dimensions, with gaps, expanded, or in channels_last.

    Strides of dimensions of size 1 may be arbitrary in all of these.
    """
    dims = range(len(shape))
    kind = draw.choice(["dense", "dense", "gaps", "expanded", "channels last"])
    order = draw.sample(dims, len(shape))
    steps = [draw.choice([1, 2]) if kind == "gaps" else 1 for _ in dims]
    stored = [1 if kind == "expanded" and draw.random() < 0.4 and shape[d] else shape[d] * steps[d] for d in dims]
    tensor = torch.randn([stored[d] for d in order], device=device).to(dtype).permute([order.index(d) for d in dims])
    tensor = tensor[tuple(slice(None, None, step) for step in steps)].expand(shape)
    if kind == "channels last" and len(shape) == 4:
        tensor = tensor.contiguous(memory_format=torch.channels_last)
    if draw.random() < 0.3:
        strides = zip(shape, tensor.stride(), strict=True)
        tensor = tensor.as_strided(shape, [draw.choice([0, 1, 2, 7]) if size == 1 else step for size, step in strides])
    return tensor


def check_product(fused_mlp, implementation, draw: random.Random, device: torch.device, dtype: torch.dtype) -> None:
    """The product of randomly drawn operands, and its gradients, have eager's values and strides, except for those of
    dimensions with one element, which no access uses."""
    shape, activation = drawn_shape(draw, draw.choice([None, 4])), draw.choice(ACTIVATIONS)
    gate, up, grad = (drawn(draw, shape, device, dtype) for _ in range(3))
    if draw.random() < 0.4:  # operands usually share one layout
        up, grad = (torch.randn_like(gate) if draw.random() < 0.7 else each for each in (up, grad))

    def results(call):
        own = [each.detach().requires_grad_() for each in (gate, up)]
        result = call(*own)
        return [result.detach(), *torch.autograd.grad(result, own, grad)]

    with fused_mlp.backend(implementation):
        with torch.no_grad():
            inference = fused_mlp.act_and_mul(gate, up, activation)
        got = results(lambda gate, up: fused_mlp.act_and_mul(gate, up, activation))
    expected = results(lambda gate, up: FORMULAS[activation].eager(gate) * up)
    layout = f"{activation}, {list(shape)}: gate by {gate.stride()}, up by {up.stride()}, gradient by {grad.stride()}"
    what = ("the product", "the gradient of gate", "the gradient of up", "the product without autograd")
    tolerance = 4 * torch.finfo(dtype).eps
    for name, one, other in zip(what, [*got, inference], [*expected, expected[0]], strict=True):
        said = f"{name} with {layout}"
        used, wanted = ([s for s, size in zip(each.stride(), shape, strict=True) if size > 1] for each in (one, other))
        assert used == wanted, f"{said}: {one.stride()}, eager {other.stride()}"
        torch.testing.assert_close(one, other, rtol=tolerance, atol=8 * tolerance, msg=f"{said}: {one}, eager {other}")
