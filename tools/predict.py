#!/usr/bin/env python3
"""Prints what the model of the GEMMs of sm_80 expects of GPUs that nobody has measured them on, as the table of
docs/kernels.md. No GPU is needed, and none is meant.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import documents
import project
from tuning.prediction import GPUS, Predictor

SHOWN = ("A100 80GB SXM", "L40S", "RTX 4090", "RTX 5090")
SHAPES = ((8192, 768, 3072), (2048, 2048, 8192), (8192, 4096, 14336), (16, 4096, 14336))


def rows(predictor: Predictor) -> list[tuple[str, ...]]:
    """For each MLP, the time of its gated layer in units of torch's way, and in brackets where ours is not taken."""
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


if __name__ == "__main__":
    print(table(Predictor(project.BUILD / "predict")))
