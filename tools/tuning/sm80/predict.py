#!/usr/bin/env python3
"""Prints the predictions of the sm_80 GEMMs' model for GPUs that were not measured, as the table of
cuda/sm80/README.md; with --explain, what `explain` reports there for gated layers. No GPU is needed or used.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import documents
import project
from tuning.sm80.prediction import GPUS, Predictor

SHOWN = ("A100 80GB SXM", "L40S", "RTX 4090", "RTX 5090")
SHAPES = ((8192, 768, 3072), (2048, 2048, 8192), (8192, 4096, 14336), (16, 4096, 14336))


def rows(predictor: Predictor) -> list[tuple[str, ...]]:
    """For each MLP, the time of its gated layer in units of torch's way, in brackets if torch's way is chosen."""
    found = []
    for m, dim, hidden in SHAPES:
        cells = []
        for name in SHOWN:
            predicted = predictor.predict(GPUS[name], m, hidden, dim, gated=True)
            ratio = f"{predicted.microseconds / predicted.torch_microseconds:.2f}"
            cells.append(ratio if predicted.ours else f"({ratio})")
        found.append((f"{m}, {dim}, {hidden}", *cells))
    return found


def table(predictor: Predictor) -> str:
    return documents.table(("M, D, H", *SHOWN), rows(predictor), left=1)


def explanations(predictor: Predictor, shape: tuple[int, int, int]) -> dict[str, str]:
    """The output of `explain` for an MLP's gated layer, by GPU. A Hopper GPU has other kernels."""
    plans = project.package_file("backends/plans.py")
    m, dim, hidden = shape
    others = {name: gpu for name, gpu in GPUS.items() if gpu.major != 9}
    records = {name: predictor.predict(gpu, m, hidden, dim, gated=True).record for name, gpu in others.items()}
    return {name: plans.in_words(plans.parsed(record, ["gated"])) for name, record in records.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--explain", action="store_true", help="the words of `explain`, for every GPU")
    given = parser.parse_args()
    predictor = Predictor(project.BUILD / "predict")
    if not given.explain:
        print(table(predictor))
        return
    for shape in SHAPES:
        for name, words in explanations(predictor, shape).items():
            major, minor = GPUS[name].capability
            print(f"{', '.join(map(str, shape))}, {name} ({major}.{minor}): {words}")


if __name__ == "__main__":
    main()
