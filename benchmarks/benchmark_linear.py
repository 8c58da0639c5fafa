"""One linear layer with bias and GELU, for `kernels benchmark`. peers.py compares more providers at these shapes."""

from functools import partialmethod

import torch
import torch.nn.functional as F
from kernels.benchmark import Benchmark

# M, K, N
SHAPES = [(8192, 768, 3072), (8192, 3072, 768), (4096, 1024, 4096), (16384, 1280, 5120)]


class Linear(Benchmark):
    seed = 0

    def prepare(self, m, k, n):
        def random(*sizes, scale=1.0):
            return (scale * torch.randn(sizes, device=self.device)).bfloat16()

        # Keeps results small: the runner's tolerance, 0.01, is less than one rounding of bfloat16 above 2.
        self.x, self.weight, self.bias = random(m, k), random(n, k, scale=0.1 * k**-0.5), random(n, scale=0.1)

    def fused(self):
        self.out = self.kernel.linear(self.x, self.weight, self.bias, "gelu_pytorch_tanh")

    def eager(self):
        return F.gelu(F.linear(self.x, self.weight, self.bias), approximate="tanh")


for shape in SHAPES:
    name = "x".join(map(str, shape))
    setattr(Linear, f"setup_{name}", partialmethod(Linear.prepare, *shape))
    setattr(Linear, f"benchmark_{name}", Linear.fused)
    setattr(Linear, f"verify_{name}", Linear.eager)
