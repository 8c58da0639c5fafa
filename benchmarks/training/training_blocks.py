"""One block of a decoder, norm, MLP and sum, forward and backward, for `training.py --blocks`.

On a GPU `forward_us` and `backward_us` are the CPU time that launching a chain of blocks takes, per block.
"""

import statistics
import time
from collections.abc import Callable

import torch
from points import DEVICE, ON_GPU
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

import measure

SHAPES = {"cuda": [(8192, 768, 3072), (1024, 1024, 4096)], "cpu": [(128, 768, 3072), (1024, 768, 3072)]}
VARIANTS = ("eager", "ours", "compile")
CHAIN = 8


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        config = LlamaConfig(hidden_size=width, intermediate_size=hidden)
        self.norm, self.mlp = LlamaRMSNorm(width), LlamaMLP(config)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


def host_microseconds(chain: nn.Module, x: Tensor, grad: Tensor, rounds: int = 15) -> dict[str, float]:
    """CPU time of the process, since autograd runs the backward in another thread."""
    taken = []
    for _ in range(rounds):
        chain.zero_grad()
        measure.synchronize()
        start = time.process_time()
        result = chain(x)
        middle = time.process_time()
        measure.synchronize()
        turned = time.process_time()
        result.backward(grad)
        taken.append((middle - start, time.process_time() - turned))
    forward, backward = (statistics.median(times) * 1e6 / len(chain) for times in zip(*taken, strict=True))
    return {"forward_us": forward, "backward_us": backward}


def figures(
    shape: tuple[int, int, int], dtype: torch.dtype, fused_mlp, variants: list[str], take_turns: Callable[[dict], dict]
) -> dict:
    rows, width, hidden = shape
    chains, steps = {}, {}
    for variant in variants:
        torch.manual_seed(0)
        with torch.device(DEVICE):
            chain = nn.Sequential(*(Block(width, hidden) for _ in range(CHAIN))).to(dtype)
            x, grad = torch.randn(rows, width, dtype=dtype).requires_grad_(), torch.randn(rows, width, dtype=dtype)
        if variant == "ours" and len(fused_mlp.fuse_mlps(chain).fused) < CHAIN:
            raise RuntimeError("not all blocks were fused")
        if variant == "compile":
            chain = nn.Sequential(*map(torch.compile, chain))

        def step(block: nn.Module = chain[0], x: Tensor = x, grad: Tensor = grad) -> None:
            block.zero_grad()
            x.grad = None
            block(x).backward(grad)

        step()
        chains[variant], steps[variant] = (chain, x, grad), step
    host = {variant: host_microseconds(*each) if ON_GPU else {} for variant, each in chains.items()}
    taken = take_turns(steps)
    return {"providers": {variant: taken[variant] | host[variant] for variant in variants}, "left": {}}
