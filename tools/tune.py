#!/usr/bin/env python3
"""Makes cuda/sm90/tuning.h: times every sm_90a GEMM on this GPU over the layers of models, torch's beside them, and
fits what the dispatch chooses by. Takes two minutes on an H100.
"""

import argparse
import dataclasses
import json
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
    from tuning.kernels import Kernel, Point
except ModuleNotFoundError as error:
    sys.exit(f"error: {error.name!r} is not installed for {sys.executable} (requirements/bench.txt)")

HEADER = project.ROOT / "cuda/sm90/tuning.h"
FOLDER = project.BUILD / "tune"
TIMES = FOLDER / "times.json"


@dataclasses.dataclass
class Times:
    gpu: str
    multiprocessors: int
    points: list[Point]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a third of the shapes, half of the rows")
    parser.add_argument("--dry-run", action="store_true", help="print the header, and write none")
    parser.add_argument("--times", type=Path, help=f"fit to these, of a run before ({TIMES.relative_to(project.ROOT)})")
    arguments = parser.parse_args()
    try:
        times = load(arguments.times) if arguments.times else measure(arguments.quick)
    except (bench.TuneError, BuildError, OSError) as error:
        sys.exit(f"error: {error}")
    constants = fit.fit(times.points, times.multiprocessors)
    report("present", times.points, lambda point: point.present)
    report("fitted", times.points, lambda point: constants.choose(point, times.multiprocessors))
    if arguments.dry_run:
        print(header(constants, times.gpu))
    else:
        HEADER.write_text(header(constants, times.gpu))
        print(f"wrote {HEADER.relative_to(project.ROOT)}")


def measure(quick: bool) -> Times:
    gpu = bench.check_gpu()
    library = bench.build(FOLDER)
    with torch.cuda.stream(torch.cuda.Stream()):  # graphs are captured on any but the default stream
        layers = tqdm(bench.grid(quick), desc=gpu, unit="layer")
        points = [bench.measure(library, *layer) for layer in layers]
    times = Times(gpu, torch.cuda.get_device_properties(0).multi_processor_count, points)
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
    return Times(stored["gpu"], stored["multiprocessors"], [Point(**point) for point in stored["points"]])


def report(name: str, points: list[Point], choose: Callable[[Point], Kernel]) -> None:
    """How the choice compares with the best kernel, and with torch's."""
    print(f"{name:10} {'points':>6} {'of the best':>12} {'at worst':>9}  torch's is faster")
    for streamed in (True, False):
        for kind in ("gated", "activated", "plain"):
            chosen = {
                id(point): point.times[choose(point)]
                for point in points
                if point.kind == kind and point.streamed == streamed
            }
            some = [point for point in points if id(point) in chosen]
            ratios = [chosen[id(point)] / point.best for point in some]
            slower = sum(point.torch < chosen[id(point)] for point in some)
            label = f"{'streamed' if streamed else 'tiled'} {kind}"
            print(f"{label:18} {len(some):4} {sum(ratios) / len(ratios):8.3f} {max(ratios):8.3f}  at {slower}")
    for kind in ("plain", "activated"):
        print(f"torch is faster, {kind}: {fit.torch_rows(points, kind, choose)}")


if __name__ == "__main__":
    main()
