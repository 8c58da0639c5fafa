"""What `make tune` fits chooses near the best kernel, and gemm.cpp, compiled with it, chooses the same. No GPU."""

import ctypes
import itertools
import shutil
import subprocess
from dataclasses import astuple

import numpy as np
import pytest

import project
from builder import toolchain
from tuning import bench, fit
from tuning.header import header
from tuning.kernels import TILED_GATED, TILED_PLAIN, Kernel, Point, candidates

MULTIPROCESSORS = 132

# In the place of the kernels and of the pointwise ones, which no choice needs.
STUBS = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include "sm90/gemm.h"
namespace fused_mlp::sm90 {
template <typename Element>
cudaError_t launch(const GemmProblem&, const GemmPlan&, int, cudaStream_t) { return cudaErrorNotSupported; }
template cudaError_t launch<__half>(const GemmProblem&, const GemmPlan&, int, cudaStream_t);
template cudaError_t launch<__nv_bfloat16>(const GemmProblem&, const GemmPlan&, int, cudaStream_t);
}
namespace fused_mlp {
cudaError_t launch_act_and_mul(Matrix, Matrix, Matrix, int64_t, int64_t, DType, int64_t, cudaStream_t) {
  return cudaErrorNotSupported;
}
}
"""


def constants() -> fit.Constants:
    """Such as an H100 has, but no two alike."""
    random = np.random.default_rng(3)

    def near(*values: float) -> list[float]:
        return [value * random.uniform(0.8, 1.25) for value in values]

    def tiled(kernel: Kernel) -> fit.TiledTime:
        k_block = 0.003 * kernel.block_n * (1 + 0.1 * kernel.split_k)
        return fit.TiledTime(*near(2.0, 0.3 * kernel.split_k, k_block, 0.015 * kernel.block_n))

    gated, plain = ({kernel: tiled(kernel) for kernel in kernels} for kernels in (TILED_GATED, TILED_PLAIN))
    streamed = {kind: fit.StreamedTime(*near(*astuple(fit.StreamedTime()))) for kind in fit.KINDS}
    tiled_times = {"gated": gated, "activated": plain, "plain": plain}
    torch_rows = {"activated": fit.Rows(78, 256), "plain": fit.Rows(17, None)}
    return fit.Constants(tiled_times, streamed, 2.8e6, 7e8, torch_rows, near_floor=1.1)


def points(shapes: list[tuple[int, int]], rows: list[int], times: fit.Constants | None = None) -> list[Point]:
    """The layers of these widths, as long as `times` estimates, give or take 3%."""
    random = np.random.default_rng(4)
    found = []
    for (d, h), m, kind in itertools.product(shapes, rows, fit.KINDS):
        n, k = (d, h) if kind == "plain" else (h, d)
        kernels = candidates(kind, m, k)
        point = Point(kind, m, n, k, dict.fromkeys(kernels, 1.0), 1.0, kernels[0])
        if times is not None:
            point.times = {
                kernel: times.microseconds(point, kernel, MULTIPROCESSORS) * random.normal(1, 0.03)
                for kernel in kernels
            }
        found.append(point)
    return found


def test_what_is_fitted_chooses_near_the_best(monkeypatch):
    monkeypatch.setattr(fit, "STARTS", 1)
    monkeypatch.setattr(fit, "STEPS", 1000)
    timed = points(bench.QUICK_SHAPES, bench.ROWS, constants())
    fitted = fit.fit(timed, MULTIPROCESSORS)
    for kind in fit.KINDS:
        alike = [point for point in timed if point.kind == kind]
        slower = [point.times[fitted.choose(point, MULTIPROCESSORS)] / point.best - 1 for point in alike]
        blind = [np.mean(list(point.times.values())) / point.best - 1 for point in alike]
        assert np.mean(slower) < 0.03, f"{kind}: {slower}"
        assert np.mean(blind) > 0.3, "any choice is as good"


def test_rows_of_torch():
    """Faster from 100 rows to 200; by a little at 20, which is not worth more lost at 40."""
    timed = points([(512, 2048)], [20, 40, 100, 200, 400])
    ratios = {20: 0.98, 40: 1.1, 100: 0.8, 200: 0.9, 400: 1.2}
    for point in timed:
        point.torch = ratios[point.m]
    assert fit.torch_rows(timed, lambda point: next(iter(point.times))) == fit.Rows(41, 200)
    for point in timed:
        point.torch = 0.9 if point.m >= 100 else 1.1
    assert fit.torch_rows(timed, lambda point: next(iter(point.times))) == fit.Rows(41, None)
    for point in timed:
        point.torch = 1.1
    assert fit.torch_rows(timed, lambda point: next(iter(point.times))) is None


def test_torch_unless_near_the_floor():
    """Ours saves 10% up to 8 rows and near the floor, and costs 10% elsewhere; too many rows are torch's everywhere."""
    products = []
    for m, over in itertools.product((1, 8, 16, 100, 500, fit.NEAR_FLOOR_ROWS + 1), (1.02, 1.12, 1.4, 2.0)):
        faster = m <= 8 or over < 1.3
        products.append((m, over, -0.1 if faster else 0.1))
    rows, near_floor = fit.torch_unless_near_floor(products)
    assert rows == fit.Rows(9, None)
    assert 1.12 <= near_floor < 1.4
    rows, near_floor = fit.torch_unless_near_floor([(m, over, 0.1) for m, over, _ in products])
    assert rows == fit.Rows(1, None)
    assert near_floor < 1.02


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """plan() of gemm.cpp with a header that `make tune` might write: the kernel for a point."""
    nvcc = toolchain.nvcc()
    if nvcc is None:
        pytest.skip("no nvcc: there is no CUDA build")
    folder = tmp_path_factory.mktemp("tuned")
    for source in ("cuda/sm90/gemm.cpp", "cuda/sm90/gemm.h", "cuda/pointwise.h", "torch-ext/activation.h"):
        (folder / source).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(project.ROOT / source, folder / source)
    shutil.copytree(project.ROOT / "tools/tuning", folder / "tools/tuning")
    (folder / "cuda/sm90/tuning.h").write_text(header(constants(), "a test"))
    (folder / "cuda/stubs.cpp").write_text(STUBS)
    sources = [folder / source for source in ("cuda/sm90/gemm.cpp", "tools/tuning/entry.cpp", "cuda/stubs.cpp")]
    library = folder / "plan.so"
    flags = ["-std=c++20", "-Xcompiler=-fPIC", "-shared", "--cudart=none"]
    subprocess.run([nvcc.path, *flags, *sources, "-o", library], check=True)
    tune_plan = ctypes.CDLL(str(library)).tune_plan

    def chosen(point: Point) -> Kernel:
        activation = bench.LINEAR if point.kind == "plain" else bench.GELU_TANH
        shape = bench.Shape(point.m, point.n, point.k, activation, MULTIPROCESSORS)
        kernel = bench.PlainKernel()
        tune_plan(ctypes.byref(shape), ctypes.c_void_p(16 if point.gated else None), ctypes.byref(kernel))
        return Kernel(*(getattr(kernel, name) for name in Kernel._fields))

    return chosen


def test_gemm_cpp_chooses_what_was_fitted(plan):
    rows = [1, 7, 16, 17, 32, 33, 48, 64, 80, 100, 128, 144, 200, 256, 257, 320, 400, 640, 1000, 5000]
    shapes = [(64, 8), (72, 200), (384, 1536), (520, 4104), (1280, 5120), (2048, 16384), (5120, 17408), (8, 65536)]
    tuned, chosen = constants(), set()
    for point in points(shapes, rows):
        expected = tuned.choose(point, MULTIPROCESSORS)
        assert plan(point) == expected, f"{point.kind} of {point.m} x {point.k} x {point.n}"
        chosen.add((point.kind, expected))
    assert len(chosen) > 40, "the same few kernels everywhere: this tests little"
