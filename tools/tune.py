#!/usr/bin/env python3
"""Writes cuda/sm90/plan/tuning.h: times every sm_90a GEMM and torch's on this GPU, over the layers of models, and fits
the values that the dispatch uses. Takes about six minutes on an H100. On GPUs that run the sm_80 GEMMs, it times those
instead, in a minute, and writes the row of the compute capability into cuda/sm80/plan/tuned.def.
"""

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

try:
    import torch
    from tqdm import tqdm

    import project
    from builder.toolchain import BuildError
    from tuning import bench, fit
    from tuning.header import header
    from tuning.kernels import KINDS, Gpu, Kernel, Point
    from tuning.model import Model, build
    from tuning.sm80 import mma_sync
    from tuning.sm80.prediction import Predictor
except ModuleNotFoundError as error:
    sys.exit(f"error: {error.name!r} is not installed for {sys.executable} (requirements/bench.txt)")

HEADER = project.ROOT / "cuda/sm90/plan/tuning.h"
FOLDER = project.BUILD / "tune"
TIMES = FOLDER / "times.json"
FEW_ROWS = 256  # reported separately


@dataclasses.dataclass
class Times:
    name: str  # the name of the GPU
    gpu: Gpu
    points: list[Point]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a third of the shapes, half of the rows")
    parser.add_argument("--dry-run", action="store_true", help="print the header, and write none")
    parser.add_argument("--times", type=Path, help=f"fit to these, of a run before ({TIMES.relative_to(project.ROOT)})")
    parser.add_argument("--withhold", action="store_true", help="leave all products on GPUs of this kind to torch")
    parser.add_argument("--sm80", action="store_true", help="the GEMMs of sm_80 on a Hopper GPU too")
    arguments = parser.parse_args()
    try:
        if arguments.withhold:
            withhold()
            return
        if arguments.sm80 or bench.capability() not in (None, (9, 0)):
            tune_sm80(arguments.dry_run)
            return
        times = load(arguments.times) if arguments.times else measure(arguments.quick)
    except (bench.TuneError, BuildError, OSError) as error:
        sys.exit(f"error: {error}")
    model = Model(build(FOLDER), times.gpu.multiprocessors)
    constants = fit.fit(times.points, model)
    report(constants, model, times.points)
    if arguments.dry_run:
        print(header(constants, times.name, times.gpu))
    else:
        HEADER.write_text(header(constants, times.name, times.gpu))
        print(f"wrote {HEADER.relative_to(project.ROOT)}")


def withhold() -> None:
    row = mma_sync.withheld(mma_sync.describe(), torch.cuda.get_device_name())
    if bench.capability() == (9, 0) or mma_sync.has(row):
        raise bench.TuneError("GPUs of this capability were measured: nothing to withhold")
    mma_sync.write(row)


def tune_sm80(dry_run: bool) -> None:
    gpu, name = mma_sync.describe(), torch.cuda.get_device_name()
    library, predictor = bench.build(FOLDER, "sm80", f"{gpu.major}{gpu.minor}"), Predictor(FOLDER)
    with torch.cuda.stream(torch.cuda.Stream()):
        times = mma_sync.measure(library, predictor, gpu)
    for product, found in times.items():
        print(", ".join(map(str, product)), {number: round(time, 1) for number, time in found.items()})
    row = mma_sync.row(gpu, name, mma_sync.fit(times, predictor, gpu))
    print(row)
    if not dry_run:
        mma_sync.write(row)
        print(f"wrote {mma_sync.ROWS.relative_to(project.ROOT)}")


def measure(quick: bool) -> Times:
    name, gpu = bench.check_gpu(), bench.describe()
    library, model = bench.build(FOLDER), Model(build(FOLDER), gpu.multiprocessors)
    with torch.cuda.stream(torch.cuda.Stream()):
        layers = tqdm(bench.grid(quick), desc=name, unit="layer")
        points = [bench.measure(library, model, *layer) for layer in layers]
    times = Times(name, gpu, points)
    save(times, TIMES)
    return times


def save(times: Times, path: Path) -> None:
    points = [vars(point) | {"times": list(point.times.items())} for point in times.points]
    path.write_text(json.dumps(vars(times) | {"points": points}))


def load(path: Path) -> Times:
    stored = json.loads(path.read_text())
    for point in stored["points"]:
        point["times"] = {Kernel(*kernel): time for kernel, time in point["times"]}
        point["present"] = Kernel(*point["present"])
    return Times(stored["name"], Gpu(*stored["gpu"]), [Point(**point) for point in stored["points"]])


def report(constants: fit.Constants, model: Model, timed: list[Point]) -> None:
    """Compares the present and the fitted choice with the best kernel, and with torch's way."""

    def fitted(point: Point) -> Kernel:
        return constants.choose(model, point)

    print("                           present                          fitted")
    print("                   points  mean   worst  slower than torch  mean   worst  slower than torch")
    for name, few_rows in ((f"to {FEW_ROWS} rows", True), ("more", False)):
        for kind in KINDS:
            points = [point for point in timed if point.kind == kind and (point.m <= FEW_ROWS) == few_rows]
            quality = [*choice_quality(points, lambda point: point.present), *choice_quality(points, fitted)]
            cells = "{:6.3f} {:6.3f} {:18}  {:6.3f} {:6.3f} {:18}".format(*quality)
            print(f"{f'{name} {kind}':18} {len(points):6} {cells}")


def choice_quality(points: list[Point], choose: Callable[[Point], Kernel]) -> tuple[float, float, int]:
    """The time in units of the best kernel's, on average and at worst; the number of points where torch's way is
    faster. A kernel that no longer exists counts as infinitely slow.
    """
    chosen = [point.times.get(choose(point), math.inf) for point in points]
    ratios = [time / point.best for point, time in zip(points, chosen)]
    return sum(ratios) / len(ratios), max(ratios), sum(time > point.torch for point, time in zip(points, chosen))


if __name__ == "__main__":
    main()
