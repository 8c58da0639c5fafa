"""gelu(gate) * up, for `kernels benchmark`. peers.py compares more providers at these shapes."""

from functools import partialmethod

import torch
import torch.nn.functional as F
from kernels.benchmark import Benchmark

# M, H
SHAPES = [(8192, 3072), (1024, 4096), (8192, 14336)]


class ActAndMul(Benchmark):
    seed = 0

    def prepare(self, m, h):
        # Keeps results small: the runner's tolerance, 0.01, is less than one rounding of bfloat16 above 2.
        self.gate, self.up = ((0.1 * torch.randn(m, h, device=self.device)).bfloat16() for _ in range(2))

    def fused(self):
        self.out = self.kernel.act_and_mul(self.gate, self.up)

    def eager(self):
        return F.gelu(self.gate, approximate="tanh") * self.up


for shape in SHAPES:
    name = "x".join(map(str, shape))
    setattr(ActAndMul, f"setup_{name}", partialmethod(ActAndMul.prepare, *shape))
    setattr(ActAndMul, f"benchmark_{name}", ActAndMul.fused)
    setattr(ActAndMul, f"verify_{name}", ActAndMul.eager)
