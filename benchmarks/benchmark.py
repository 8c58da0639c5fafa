"""The whole gated MLP, for `kernels benchmark`. peers.py compares more providers at these shapes."""

from functools import partialmethod

import torch
import torch.nn.functional as F
from kernels.benchmark import Benchmark

# M, D, H
SHAPES = [
    (8192, 768, 3072),
    (1024, 1024, 4096),
    (8192, 2048, 16384),
    (8192, 4096, 14336),
    (2048, 4096, 14336),
    (256, 4096, 14336),
    (16, 4096, 14336),
    (1, 4096, 14336),
    (1, 2048, 16384),
]


class GatedMLP(Benchmark):
    seed = 0

    def prepare(self, m, d, h):
        def random(*sizes, scale=1.0):
            return (scale * torch.randn(sizes, device=self.device)).bfloat16()

        self.x = random(m, d)
        self.gate, self.up = (random(h, d, scale=d**-0.5) for _ in range(2))
        # Keeps results small: the runner's tolerance, 0.01, is less than one rounding of bfloat16 above 2.
        self.down = random(d, h, scale=0.1 * h**-0.5)

    def fused(self):
        self.out = self.kernel.gated_mlp(self.x, self.gate, self.up, self.down)

    def eager(self):
        hidden = F.gelu(F.linear(self.x, self.gate), approximate="tanh") * F.linear(self.x, self.up)
        return F.linear(hidden, self.down)


for shape in SHAPES:
    name = "x".join(map(str, shape))
    setattr(GatedMLP, f"setup_{name}", partialmethod(GatedMLP.prepare, *shape))
    setattr(GatedMLP, f"benchmark_{name}", GatedMLP.fused)
    setattr(GatedMLP, f"verify_{name}", GatedMLP.eager)
