"""Dropouts in front of adapters, drawn by a kernel of this package, against torch's own."""

import sys

import pytest
import torch

CASES = [  # rows, width, hidden values, rank, p
    (4096, 96, 288, 16, 0.05),
    (1001, 288, 1056, 5, 0.5),
    (333, 4096, 1024, 64, 0.9),
    (700, 1024, 416, 72, 0.3),  # more ranks than the kernel takes
]


@pytest.fixture(autouse=True)
def draws(fused_mlp, device):
    """Skips the test unless the kernel is known to draw as torch does here."""
    if device.type != "cuda" or not sys.modules[f"{fused_mlp.__name__}.drawn"]._threads(device.index or 0):
        pytest.skip("torch draws")


def operands(device, dtype, rows, width, hidden, rank):
    drawn = lambda *sizes: torch.randn(sizes, device=device).to(dtype) / sizes[-1] ** 0.5  # noqa: E731
    sizes = ((hidden, width), (hidden, width), (width, hidden))
    a, b = [drawn(rank, n_in) for _, n_in in sizes], [drawn(n_out, rank) for n_out, _ in sizes]
    return drawn(rows, width), [drawn(*size) for size in sizes], a, b


def as_bits(kept):
    """A mask packed into bits, as the op keeps it."""
    bits = kept.unflatten(-1, (-1, 32)).long() << torch.arange(32, device=kept.device)
    return bits.sum(-1).int().flatten(0, -2)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype, wide", [(torch.bfloat16, False), (torch.float16, True), (torch.float32, False)])
def test_masks_are_those_of_torch(fused_mlp, device, case, dtype, wide):
    """The masks and the random numbers that follow are torch's, whichever of gate and up draws first."""
    adapters, drawn = (sys.modules[f"{fused_mlp.__name__}.{name}"] for name in ("adapters", "drawn"))
    *sizes, p = case
    x, weights, a, b = operands(device, dtype, *sizes)
    draw_dtype = torch.float32 if wide else dtype
    for seed, up_first in ((3, False), (-2, True), (2**40 + 1, False)):
        torch.manual_seed(seed)
        numbers = drawn.taken(x, sizes[2], (p, p, p), up_first)
        assert numbers
        lists = weights, [None] * 3, a, b, [2.0] * 3, [p] * 3
        *_, gate, up, down = adapters._forward(x, *lists, wide, up_first, numbers, True, 1, 1)
        following = torch.rand(4, device=device)
        torch.manual_seed(seed)
        for place in (1, 0, 2) if up_first else (0, 1, 2):
            like = torch.empty(sizes[0], (sizes[1], sizes[1], sizes[2])[place], dtype=draw_dtype, device=device)
            assert torch.equal((gate, up, down)[place], as_bits(torch.native_dropout(like, p, True)[1]))
        assert torch.equal(torch.rand(4, device=device), following)


def test_torch_draws_in_a_graph(fused_mlp, device):
    """A captured graph draws new numbers at each replay."""
    x, weights, a, b = operands(device, torch.bfloat16, 4096, 128, 256, 8)
    adapter = fused_mlp.Adapter(a[0], b[0], dropout=0.5)
    compute = lambda: fused_mlp.linear(x, weights[0], adapter=adapter)  # noqa: E731
    compute()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = compute()
    graph.replay()
    first = found.clone()
    graph.replay()
    assert not torch.equal(first, found)
