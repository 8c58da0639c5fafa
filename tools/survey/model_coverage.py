#!/usr/bin/env python3
"""Counts the MLPs that fuse_mlps fuses in a tiny model of every type in transformers, and writes docs/coverage.md.
Takes two minutes. survey/mlps.py decides what is an MLP, independently of fuse_mlps.
"""

import argparse
import logging
import os
import signal
import sys
import warnings
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import documents
import project

os.environ.setdefault("HF_HUB_OFFLINE", "1")

try:
    import torch
    import transformers
    from kernels import get_kernel
    from rich.console import Console
    from rich.table import Table
    from tqdm import tqdm

    from survey import blocks, kinds, mlps, tiny
except ModuleNotFoundError as error:
    sys.exit(f"error: {error.name!r} is not installed for {sys.executable} (requirements/coverage.txt)")

os.environ.setdefault("LOCAL_KERNELS", project.local_kernels())
DOCUMENT = project.ROOT / "docs/coverage.md"
SECONDS = 30  # for one model type

FUSED, POINTWISE, LEFT = "fused", "pointwise", "left"


@dataclass
class Coverage:
    """MLPs by kind and outcome; reasons why MLPs were not fused, with classes and model types; types not built."""

    counts: Counter = field(default_factory=Counter)
    types: Counter = field(default_factory=Counter)
    left: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    not_built: dict[str, str] = field(default_factory=dict)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="only these model types; docs/coverage.md stays as it is")
    arguments = parser.parse_args()
    unknown = set(arguments.types) - set(tiny.model_types())
    if unknown:
        sys.exit(f"error: transformers {transformers.__version__} has no model type {', '.join(sorted(unknown))}")
    quiet()
    fused_mlp = get_kernel(project.repo_id(), version=project.version(), backend="cpu")
    coverage = survey(fused_mlp, arguments.types or tiny.model_types())
    found = survey_blocks(fused_mlp)
    show(coverage, found)
    if not arguments.types:
        DOCUMENT.write_text(document(coverage, found))
        print(f"wrote {DOCUMENT.relative_to(project.ROOT)}")


def quiet() -> None:
    """Silences the many warnings of models with random weights."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()


def survey(fused_mlp, model_types: list[str]) -> Coverage:
    coverage = Coverage()
    progress = tqdm(model_types, unit="type", disable=None)
    for model_type in progress:
        progress.set_postfix_str(model_type[:30])
        torch.manual_seed(0)
        try:
            with time_limit(SECONDS):
                model = tiny.build(model_type)
                report = fused_mlp.fuse_mlps(model)
        except (tiny.NoModelError, TimeoutError) as error:
            coverage.not_built[model_type] = str(error).replace("\n", " ")
            continue
        count(coverage, model_type, model, report)
    return coverage


def count(coverage: Coverage, model_type: str, model, report) -> None:
    kind = kinds.of(model_type, model)
    coverage.types[kind] += 1
    for path, module in mlps.find(model).items():
        where = "MoE experts" if mlps.is_experts(module) else kind
        inside = [entry for entry in report.modules if is_in(entry.path, path) or is_across(entry, path)]
        inside += [entry for entry in report.modules if is_around(entry, path)]
        outcome = outcome_of(inside)
        coverage.counts[where, outcome] += 1
        if outcome == LEFT:
            reason = next((entry.reason for entry in inside), "no activation of a projection's output in its code")
            types = coverage.left.setdefault((reason, type(module).__name__), [])
            if model_type not in types:
                types.append(model_type)


def is_in(path: str, outer: str) -> bool:
    return f"{path}.".startswith(f"{outer}." if outer else "")


def is_across(entry, path: str) -> bool:
    """True if an entry is for the owner of two modules that form one MLP, and the path leads to one of them."""
    return "in two modules" in entry.pattern and is_in(path, entry.path)


def is_around(entry, path: str) -> bool:
    """True if an entry is for a block with the outcome of its experts (Llama 4), and the path leads to them."""
    return entry.pattern == "experts" and path == f"{entry.path}.experts"


def survey_blocks(fused_mlp) -> list[tuple[str, str, str, str]]:
    """Package, block, outcome and the fused part."""
    found = []
    for package, name in blocks.NAMES:
        entries = fused_mlp.fuse_mlps(blocks.make(package, name)).modules
        patterns = ", ".join(f"{entry.class_name}: {entry.pattern}" for entry in entries if entry.fused)
        found.append((package, name, outcome_of(entries), patterns))
    return found


def outcome_of(entries) -> str:
    patterns = {pattern for entry in entries if entry.fused for pattern in entry.pattern.split(", ")}
    return FUSED if patterns - {"pointwise"} else POINTWISE if patterns else LEFT


@contextmanager
def time_limit(seconds: int):
    def stop(*_):
        raise TimeoutError(f"not done within {seconds} seconds")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


# Tables.

COLUMNS = ("model types", "MLPs", "fused", "pointwise", "left", "share")


def rows(coverage: Coverage) -> list[tuple[str, ...]]:
    made, whole = [], list(kinds.ALL)
    for name, group in [*((kind, [kind]) for kind in whole), ("all of these", whole), ("MoE experts", ["MoE experts"])]:
        numbers = [sum(coverage.counts[kind, outcome] for kind in group) for outcome in (FUSED, POINTWISE, LEFT)]
        types = sum(coverage.types[kind] for kind in group)
        share = f"{1 - numbers[2] / sum(numbers):.1%}" if sum(numbers) else "-"
        made.append((name, str(types or ""), str(sum(numbers)), *map(str, numbers), share))
    return made


def left(coverage: Coverage) -> list[tuple[str, str, str]]:
    """Reasons, with their classes and model types; the most common first."""
    by_reason: dict[str, dict[str, list[str]]] = {}
    for (reason, name), types in sorted(coverage.left.items()):
        by_reason.setdefault(reason, {})[name] = types
    ordered = sorted(by_reason.items(), key=lambda item: -len(item[1]))
    return [
        (reason, ", ".join(classes), listed(sorted({name for types in classes.values() for name in types})))
        for reason, classes in ordered
    ]


def listed(types: list[str], most: int = 4) -> str:
    return ", ".join(types[:most]) + (f" and {len(types) - most} more" if len(types) > most else "")


def not_built(coverage: Coverage) -> dict[str, list[str]]:
    """The types that were not built, by reason."""
    reasons: dict[str, list[str]] = {}
    for model_type, reason in sorted(coverage.not_built.items()):
        reasons.setdefault(kinds.reason(reason), []).append(model_type)
    return dict(sorted(reasons.items(), key=lambda item: -len(item[1])))


def show(coverage: Coverage, found) -> None:
    console = Console()
    built = sum(coverage.types.values())
    table = Table(title=f"MLPs of transformers {transformers.__version__}, {built} model types")
    for index, name in enumerate(("kind", *COLUMNS)):
        table.add_column(name, justify="right" if index else "left")
    for row in rows(coverage):
        table.add_row(*row)
    console.print(table)
    table = Table("package", "block", "outcome", "what is fused", title="Blocks of other packages")
    for row in found:
        table.add_row(*row)
    console.print(table)
    if coverage.left:
        table = Table("left because", "classes", "model types", title="MLPs that were left")
        for row in left(coverage):
            table.add_row(*row)
        console.print(table)
    console.print(f"{len(coverage.not_built)} model types were not built; docs/coverage.md says why.")


def document(coverage: Coverage, found) -> str:
    built, total = sum(coverage.types.values()), len(coverage.not_built) + sum(coverage.types.values())
    lines = [
        "# What `fuse_mlps` fuses",
        "",
        "`make coverage` writes this page. It fuses a tiny random model of every type in transformers",
        f"{transformers.__version__} ({built} of {total}; the others are listed at the end). *Fused* MLPs run as one",
        "op, or run a GEMM with the activation in its epilogue; *pointwise* ones run `act(gate) * up` as one kernel;",
        "*left* ones run unfused. Class names and shapes define what counts as an MLP, not the fuser",
        "(`tools/survey/mlps.py`). Models have two layers if possible.",
        "",
        documents.table(("kind", *COLUMNS), rows(coverage)),
        "",
        "Experts store their weights in stacks. *Fused* experts of a layer are one call of `experts_mlp`: on a CPU,",
        "where this page was made, with every `experts_implementation`, without gradients; on a Hopper GPU in 16 bit",
        "too, also with gradients; elsewhere on GPUs only in place of `eager`, for lack of kernels. Llama 4's class",
        "multiplies all tokens with all experts; its fused block makes one call for the chosen ones. *Left* experts",
        "have a class of another form.",
        "",
        "## Blocks of diffusers and timm",
        "",
        documents.table(("package", "block", "outcome", "what is fused"), found),
        "",
        "## What is left, and why",
        "",
        documents.table(("reason", "classes", "model types"), left(coverage)),
        "",
        "## Model types that were not built",
        "",
        *(f"- {reason}: {', '.join(types)}" for reason, types in not_built(coverage).items()),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
