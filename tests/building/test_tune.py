"""The model fitted by `make tune` chooses near the best kernel, and the package compiled with it chooses the same. No
GPU is needed.
"""

import itertools
import re
import shutil
from dataclasses import astuple

import numpy as np
import pytest

import gemm_kernels
import project
from tuning import bench, fit
from tuning.header import header
from tuning.kernels import KINDS, STREAMED, Gpu, Kernel, Point
from tuning.model import Model, build
from tuning.sm80 import mma_sync
from tuning.sm80.prediction import GPUS, Predictor

MULTIPROCESSORS = 132


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Model:
    return Model(build(tmp_path_factory.mktemp("model")), MULTIPROCESSORS)


def constants(model: Model) -> fit.Constants:
    """Constants like an H100's, all different."""
    random = np.random.default_rng(3)

    def near(*values: float) -> list[float]:
        return [value * random.uniform(0.8, 1.25) for value in values]

    def tiled(kernel: Kernel) -> fit.TiledTime:
        k_block = 0.003 * kernel.block_n * (1 + 0.1 * kernel.split_k)
        return fit.TiledTime(*near(2.0, 0.3 * kernel.split_k, k_block, 0.015 * kernel.block_n))

    all_tiled = {
        kind == "gated": {kernel: tiled(kernel) for kernel in model.candidates(kind, 4096, 4096, 4096) if kernel.tiled}
        for kind in ("gated", "plain")
    }
    streamed = {kind: fit.StreamedTime(*near(*astuple(fit.StreamedTime()))) for kind in STREAMED}
    torch = fit.TorchTime(*near(*astuple(fit.TorchTime())))
    return fit.Constants(all_tiled, streamed, 2.8e6, 7e8, torch)


def points(
    model: Model, shapes: list[tuple[int, int]], rows: list[int], times: fit.Constants | None = None
) -> list[Point]:
    """The layers of these widths; their times are those that `times` estimates, give or take 3%."""
    random = np.random.default_rng(4)
    found = []
    for (d, h), m, kind in itertools.product(shapes, rows, KINDS):
        n, k = (d, h) if kind == "plain" else (h, d)
        kernels = model.candidates(kind, m, n, k)
        point = Point(kind, m, n, k, dict.fromkeys(kernels, 1.0), 1.0, kernels[0])
        if times is not None:
            estimates = times.estimates(model, point)
            point.times = {kernel: time * random.normal(1, 0.03) for kernel, time in estimates.items()}
        found.append(point)
    return found


def test_what_is_fitted_chooses_near_the_best(monkeypatch, model):
    monkeypatch.setattr(fit, "EVALUATIONS", 1000)
    monkeypatch.setattr(fit, "GENERATIONS", 20)
    timed = points(model, bench.QUICK_SHAPES, bench.ROWS, constants(model))
    fitted = fit.fit(timed, model)
    for kind in KINDS:
        alike = [point for point in timed if point.kind == kind]
        slower = [point.times[fitted.choose(model, point)] / point.best - 1 for point in alike]
        blind = [np.mean(list(point.times.values())) / point.best - 1 for point in alike]
        assert np.mean(slower) < 0.03, f"{kind}: {slower}"
        assert np.mean(blind) > 0.3, "any choice is as good"


@pytest.mark.parametrize(("m", "n", "k"), [(1, 17408, 5120), (32, 5120, 17408), (64, 1096, 8), (60, 51000, 72)])
@pytest.mark.parametrize("kind", KINDS)
def test_streamed_tiles_share_the_columns_out(model, kind, m, n, k):
    parts = 2 if kind == "gated" else 1
    cuts = [kernel for kernel in model.candidates(kind, m, n, k) if not kernel.tiled]
    assert len(cuts) == len(set(cuts)) > 0
    for cut in cuts:
        columns = cut.block_n // parts
        assert cut.block_n % (4 * parts) == 0 and 0 < columns <= 128
    if n == 17408 and kind == "gated":
        tiles = [-(-n // (cut.block_n // 2)) for cut in cuts if cut.split_k == 1]
        assert 3 * MULTIPROCESSORS in tiles, "three to each multiprocessor"


def test_the_time_of_torch(model):
    """A fit to the estimates of given constants, give or take 5% each, estimates the same within 5%."""
    random = np.random.default_rng(5)
    true = constants(model).torch
    timed = [point for point in points(model, bench.SHAPES[::2], bench.ROWS) if point.m >= fit.TORCH_ROWS]
    timed = [point for point in timed if not point.gated]
    shapes = np.array([model.shape(point.kind, point.m, point.n, point.k) for point in timed])
    for point, time in zip(timed, model.torch_estimates(shapes, np.array(astuple(true)), 2.8e6)):
        point.torch = time * random.normal(1, 0.05)
    fitted = fit.fit_torch(timed, 2.8e6, model)
    expected = model.torch_estimates(shapes, np.array(astuple(true)), 2.8e6)
    found = model.torch_estimates(shapes, np.array(astuple(fitted)), 2.8e6)
    assert np.max(np.abs(found / expected - 1)) < 0.05, f"{fitted} for {true}"


def test_the_package_chooses_what_was_fitted(model, tmp_path):
    for folder in ("cuda", "tools/tuning", "torch-ext"):
        shutil.copytree(project.ROOT / folder, tmp_path / folder)
    tuned = constants(model)
    (tmp_path / "cuda/sm90/plan/tuning.h").write_text(header(tuned, "a test", Gpu(MULTIPROCESSORS, 1980.0, 3.35e6)))
    compiled = Model(build(tmp_path / "build", tmp_path), MULTIPROCESSORS)
    rows = [1, 7, 16, 17, 32, 33, 48, 64, 80, 100, 128, 144, 200, 256, 257, 320, 400, 640, 1000, 5000]
    shapes = [(64, 8), (72, 200), (384, 1536), (520, 4104), (1280, 5120), (2048, 16384), (5120, 17408), (8, 65536)]
    chosen = set()
    for point in points(model, shapes, rows):
        expected = tuned.choose(model, point)
        assert compiled.choice(point.kind, point.m, point.n, point.k) == expected, point
        chosen.add((point.kind, expected))
    assert len(chosen) > 40, "the same few kernels everywhere: this tests little"


def test_every_tiled_kernel_has_been_timed():
    """All tiled kernels in kernels.def have constants, or are never chosen. Training kernels have their own file."""
    row = r"\{MainLoop::kTiled, Product::k(\w+), (\d+), (\d+), Schedule::k(\w+), (\d+)\}"
    listed = {kernel[1:] for kernel in gemm_kernels.entries() if kernel[0] == "tiled"}
    for file, training in (("tuning.h", False), ("training_times.h", True)):
        timed = set(re.findall(row, (project.ROOT / "cuda/sm90/plan" / file).read_text()))
        assert timed == {kernel for kernel in listed if (kernel[0] in gemm_kernels.TRAINING) == training}


def test_the_gemms_of_sm80_on_a_gpu_that_was_measured(tmp_path):
    """Times from a model with other constants yield these constants by a fit, and the package then uses them."""
    gpu = GPUS["A100 80GB SXM"]
    for folder in ("cuda", "tools/tuning"):
        shutil.copytree(project.ROOT / folder, tmp_path / folder)
    (tmp_path / "torch-ext").symlink_to(project.ROOT / "torch-ext")
    rows = tmp_path / "cuda/sm80/plan/tuned.def"
    true = [[0.80, 0.70, 0.75, 0.60, 0.50], 0.80, 4.0, 0.90, 0.85, 3.0]
    mma_sync.write(mma_sync.row(gpu, "another", [[0.1] * 5, *[0.1] * 5]), rows)
    mma_sync.write(mma_sync.row(gpu, "a test", true), rows)
    estimated, measured = Predictor(tmp_path / "estimated"), Predictor(tmp_path / "measured", tmp_path)
    assert [measured.constants(gpu), measured.constants(GPUS["L40S"])] == [true, estimated.constants(gpu)]
    times = {}
    for product in (*mma_sync.LARGE, *mma_sync.WIDE, mma_sync.SMALL):
        numbers = list(mma_sync.candidates(estimated, gpu, product))
        times[product] = {number: measured.estimated(gpu, product, number) for number in numbers}
        times[product][None] = measured.predict(gpu, *product.plain, False, "linear").torch_microseconds
    shares, *values = mma_sync.fit(times, estimated, gpu)
    assert [*shares, *values] == pytest.approx([*true[0], *true[1:]], rel=0.05)
    mma_sync.write(mma_sync.withheld(GPUS["L40S"], "a test"), rows)
    assert mma_sync.has(mma_sync.withheld(GPUS["L4"], "of the same capability"), rows)
    withheld = Predictor(tmp_path / "withheld", tmp_path)
    assert [withheld.predict(GPUS[name], 512, 3072, 768, True).ours for name in ("L4", "A10")] == [False, True]
    for name, other in GPUS.items():
        record = measured.predict(other, 8192, 3072, 768, True).record
        assert ("model" in record) == (name != "A100 80GB SXM")
