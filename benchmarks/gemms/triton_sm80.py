"""A Triton GEMM compiled for compute capability 8.0 on any GPU, whose driver compiles the PTX."""

import functools
import re

import torch
import triton
import triton.language as tl
from torch.cuda._utils import _cuda_load_module
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

# Each tile's rows of x, weight rows and k, then warps and stages.
TILES = [(128, 256, 64, 8, 3), (256, 128, 32, 8, 4), (128, 128, 64, 4, 3), (128, 128, 32, 4, 4), (64, 128, 64, 4, 3)]


@triton.jit
def product(a, w, out, m, n, k, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    tile = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(m, BM), tl.cdiv(n, BN)
    group = tile // (8 * tiles_n)
    rows = min(tiles_m - group * 8, 8)
    row = (group * 8 + tile % (8 * tiles_n) % rows) * BM + tl.arange(0, BM)
    column = tile % (8 * tiles_n) // rows * BN + tl.arange(0, BN)
    depth = tl.arange(0, BK)
    at_a = a + (row % m)[:, None] * k + depth[None, :]
    at_w = w + (column % n)[None, :] * k + depth[:, None]
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for begin in range(0, k, BK):
        left = k - begin
        total = tl.dot(
            tl.load(at_a, mask=depth[None, :] < left, other=0.0),
            tl.load(at_w, mask=depth[:, None] < left, other=0.0),
            total,
        )
        at_a += BK
        at_w += BK
    inside = (row < m)[:, None] & (column < n)[None, :]
    tl.store(out + row[:, None] * n + column[None, :], total.to(out.dtype.element_ty), mask=inside)


@functools.cache
def loaded(tile: tuple[int, ...]):
    """The kernel, the shared memory and the number of parameters of a tile. The driver compiles the PTX slowly."""
    bm, bn, bk, warps, stages = tile
    types = {"a": "*bf16", "w": "*bf16", "out": "*bf16", "m": "i32", "n": "i32", "k": "i32"}
    types |= dict.fromkeys(("BM", "BN", "BK"), "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(6)}
    source = ASTSource(product, types, {"BM": bm, "BN": bn, "BK": bk}, aligned)
    options = {"num_warps": warps, "num_stages": stages}
    made = triton.compile(source, target=GPUTarget("cuda", 80, 32), options=options)
    ptx, name = made.asm["ptx"], made.metadata.name
    kernel = _cuda_load_module(ptx, [name])[name]
    kernel.set_shared_memory_config(made.metadata.shared)
    parameters = len(re.findall(r"\.param", re.search(rf"\.entry {name}\((.*?)\)", ptx, re.DOTALL)[1]))
    return kernel, made.metadata.shared, parameters


class Product:
    """out [m, n] = x [m, k] weight [n, k]^T, with one of TILES; m is a multiple of 16."""

    def __init__(self, x: torch.Tensor, weight: torch.Tensor, tile: tuple[int, ...]):
        self.x, self.weight, self.out = x, weight, x.new_empty(len(x), len(weight))
        self.kernel, self.shared, parameters = loaded(tile)
        self.block = (32 * tile[3], 1, 1)
        self.grid = (triton.cdiv(len(x), tile[0]) * triton.cdiv(len(weight), tile[1]), 1, 1)
        sizes = [len(x), len(weight), x.shape[1]]
        scratch = torch.empty(16, device=x.device)  # Triton adds pointers to scratch memory, unused here
        self.arguments = [self.x, self.weight, self.out, *sizes, *[scratch] * (parameters - 6)]

    def run(self) -> None:
        self.kernel(self.grid, self.block, self.arguments, self.shared)
