"""Measures launch parameters of the Triton GEMMs on this machine's GPU, and writes the best where they ship.

    python triton/tune.py --shape 768,3072
    python triton/tune.py --op gated_linear --shape 4096,14336 --rows 1 16 8192

For each op, weight shape and number of rows, every candidate is compiled, checked and timed. The best five and the
default parameters are timed again, longer, and the PyTorch sequence beside them. Results go to
torch-ext/.../backends/triton/configs/, into the file of this op, shape and GPU; rows tuned earlier stay.
Rebuild for them to take effect.
"""

import argparse
import importlib
import itertools
import json
import math
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

import kernels
import torch
import torch.nn.functional as F
from tqdm import tqdm
from triton.runtime.errors import OutOfResources

import measure
import project

OPS = ("linear", "gated_linear")
ROWS = (1, 16, 64, 256, 1024, 4096, 16384)
ACTIVATION = "gelu_pytorch_tanh"
DTYPE = torch.bfloat16
FINALISTS = 5
CHECKED_ROWS = 4096  # more would be too much memory for a process of every core


def package_module(name):
    os.environ.setdefault("LOCAL_KERNELS", project.local_kernels())
    package = kernels.get_kernel(project.repo_id(), version=project.version())
    return importlib.import_module(f"{package.__name__}.{name}")


def candidates(op, M, gpu):
    """Parameters worth trying: tiles that M rows fill by half, whose accumulators and stages the GPU can hold."""
    weights = OPS.index(op) + 1
    tiles = itertools.product((16, 32, 64, 128, 256), (32, 64, 128, 256), (32, 64, 128), (4, 8))
    for block_m, block_n, block_k, num_warps in tiles:
        accumulators = block_m * block_n * weights / (32 * num_warps)  # a thread's
        if block_m > max(16, 2 * M) or not min(block_m, 32) <= accumulators <= 128:
            continue
        if block_m * block_n * weights < 128 * 128 and M >= 1024:  # a tile's loads would cost more than its products
            continue
        stage = (block_m + weights * block_n) * block_k * DTYPE.itemsize
        most = min(6, (gpu.shared_memory - 1024) // stage)
        for num_stages in range(max(2, most - 1), most + 1):
            for descriptors in {block_m >= 64 and gpu.capability >= 90, gpu.capability >= 90}:
                yield {
                    "BLOCK_M": block_m,
                    "BLOCK_N": block_n,
                    "BLOCK_K": block_k,
                    "GROUP_M": 8,
                    "DESCRIPTORS": descriptors,
                    "num_warps": num_warps,
                    "num_stages": num_stages,
                }


class Problem:
    """One op on random operands: by the kernel with given launch parameters, and by the PyTorch sequence."""

    def __init__(self, op, M, N, K):
        self.gemm = package_module("backends.triton.gemm")
        self.activation = package_module("activations").get_activation(ACTIVATION)
        self.x = torch.randn(M, K, device="cuda", dtype=DTYPE)
        weights = [torch.randn(N, K, device="cuda", dtype=DTYPE) / math.sqrt(K) for _ in range(OPS.index(op) + 1)]
        self.weight, self.up_weight = (*weights, None)[:2]
        self.out = self.x.new_empty(M, N)

    def run(self, config):
        operands = (self.out, self.x, self.weight, self.up_weight, None, None)
        self.gemm.launch(*operands, self.activation.code, config)

    def eager(self):
        out = self.activation.function(F.linear(self.x, self.weight))
        return out if self.up_weight is None else out * F.linear(self.x, self.up_weight)

    def computes(self, config):
        """True if the GPU takes these parameters. AssertionError if the result is not what it should be."""
        self.out.fill_(float("nan"))
        try:
            self.run(config)
        except OutOfResources:
            return False
        expected = self.eager().float()
        error = ((self.out.float() - expected).norm() / expected.norm()).item()
        if not error < 0.02:
            raise AssertionError(f"{config} computes something else: relative error {error:.3g}")
        return True


class Timer:
    """The GPU's time of one op, the launches left out: CUDA graphs, over more operands than L2 keeps."""

    def __init__(self, op, M, N, K):
        weight_bytes = (OPS.index(op) + 1) * N * K * DTYPE.itemsize
        copies = 1 + 2 * torch.cuda.get_device_properties(0).L2_cache_size // weight_bytes
        self.problems = [Problem(op, M, N, K) for _ in range(min(copies, 64))]

    def microseconds(self, ways, rounds):
        """Medians of one ``way(problem)`` each, in turns."""

        def turn(graph):
            return {"us": measure.replay_microseconds(graph) / len(self.problems)}

        with torch.cuda.stream(torch.cuda.Stream()):
            graphs = [measure.captured(partial(self.all, way), 1) for way in ways]
            found = measure.in_turns({i: partial(turn, graph) for i, graph in enumerate(graphs)}, rounds)
        return [figures["us"] for figures in found.values()]

    def all(self, way):
        for problem in self.problems:
            way(problem)


def compute_once(op, M, N, K, config):
    """Leaves the compiled kernel in Triton's cache, where the process that measures finds it."""
    return Problem(op, M, N, K).computes(config)


def tune(op, M, N, K, compilers):
    """The best parameters for op on x [M, K] and weights [N, K], and microseconds: theirs, the default's, PyTorch's."""
    configs = package_module("backends.triton.configs")
    gpu = configs.gpu(torch.device("cuda", torch.cuda.current_device()))
    tried = list(candidates(op, M, gpu))
    checked = min(M, CHECKED_ROWS)
    compiled = compilers.map(compute_once, *zip(*((op, checked, N, K, config) for config in tried)))
    bar = {"desc": f"{op} M={M} N={N} K={K}", "unit": "config", "total": len(tried), "leave": False}
    possible = [config for config, computes in tqdm(zip(tried, compiled), **bar) if computes]
    timer = Timer(op, M, N, K)

    def kernel(config):
        return lambda problem: problem.run(config)

    times = timer.microseconds(map(kernel, possible), rounds=5)
    ranked = [config for _, config in sorted(zip(times, possible), key=lambda found: found[0])]
    finalists = [configs.default_config(op, M, N, DTYPE.itemsize, True, gpu), *ranked[:FINALISTS]]
    *times, eager = timer.microseconds([*map(kernel, finalists), Problem.eager], rounds=50)
    time, best = min(zip(times, finalists), key=lambda found: found[0])
    return best, (time, times[0], eager)


def save(op, N, K, best):
    """Writes the parameters found, by M, beside those of earlier runs."""
    name = package_module("backends.triton.configs").file_name(op, N, K, torch.cuda.get_device_name())
    path = project.package() / "backends" / "triton" / "configs" / name
    tuned = json.loads(path.read_text()) if path.exists() else {}
    tuned.update({str(M): config for M, config in best.items()})
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(dict(sorted(tuned.items(), key=lambda item: int(item[0]))), indent=4) + "\n")
    return path


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", action="append", choices=OPS, help="default: both")
    parser.add_argument("--shape", action="append", required=True, metavar="IN,OUT", help="of the weights; repeatable")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help=f"rows of x; default: {ROWS}")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no GPU here to measure on")
    print(f"{'op':>12} {'rows':>6} {'out':>6} {'in':>6} {'tuned us':>9} {'default':>9} {'PyTorch':>9}  parameters")
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as compilers:
        for op, shape in itertools.product(arguments.op or OPS, arguments.shape):
            K, N = map(int, shape.split(","))
            best = {}
            for M in arguments.rows:
                best[M], times = tune(op, M, N, K, compilers)
                figures = " ".join(f"{time:9.1f}" for time in times)
                parameters = " ".join(f"{key}={int(value)}" for key, value in best[M].items())
                print(f"{op:>12} {M:6} {N:6} {K:6} {figures}  {parameters}", flush=True)
            print(save(op, N, K, best))


if __name__ == "__main__":
    main()
