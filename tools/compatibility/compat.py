#!/usr/bin/env python3
"""Loads and tests the local build under every minor version of torch since the oldest it is built for, and of
transformers since the one that the tests run with.

Each version is installed from PyPI into its own environment, which is deleted afterwards: several GB at a time. Prints
a table and writes it to docs/compatibility.md, with the variants that `kernels` selects from a release.
"""

import argparse
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from kernels.backends import CUDA
from kernels.variants import _resolve_variant_for_system, parse_variant
from packaging.version import Version
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import documents
import project

SMOKES = project.ROOT / "tools/compatibility"
DOCUMENT = project.ROOT / "docs/compatibility.md"
ENVIRONMENTS = project.BUILD / "compat"
COLUMNS = ("torch", "its CUDA", "CPU variant", "CUDA variant")
SUMMARY = ("", "tested", "minimum")
MODELS = ("transformers", "`fuse_mlps`", "`register_experts`", "`use_kernels=True` and its own mapping")
# CUDA versions: the targets of kernel-builder, in the version that flake.lock pins, and those of torch since 2.11.
BUILT = ("12.6", "13.0", "13.2")
TORCHS = ("12.6", "12.8", "12.9", "13.0", "13.2")


@dataclass(frozen=True)
class Row:
    cells: tuple[str, ...]
    failed: bool


class CompatError(Exception):
    """An error whose message fits one line."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", nargs="+", metavar="X.Y.Z", help="only these, and leave the document as it is")
    arguments = parser.parse_args()
    console = Console(width=100)
    rows: list[Row] = []
    models: list[Row] = []
    try:
        wanted = arguments.torch or newest_of_each_minor(available("torch"), oldest())
        for number, version in enumerate(wanted, 1):
            console.rule(f"{number} of {len(wanted)}: torch {version}", align="left")
            rows.append(tried(version))
        if not arguments.torch:
            for version in newest_of_each_minor(available("transformers"), tested("transformers")):
                console.rule(f"transformers {version}", align="left")
                models.append(tried_with(version))
    except CompatError as error:
        sys.exit(f"error: {error}")
    console.print(table(COLUMNS, rows), table(MODELS, models))
    if not arguments.torch:
        DOCUMENT.write_text(document(rows, models))
    sys.exit(any(row.failed for row in [*rows, *models]))


def oldest() -> str:
    """The version of torch whose stable ABI the extensions are built against."""
    return min(project.config()["torch"]["stable-abi"].values(), key=_number)


def pinned() -> list[str]:
    """The versions that the tests run with, as lines of requirements."""
    return (project.ROOT / "requirements/constraints.txt").read_text().splitlines()


def tested(package: str) -> str:
    (line,) = [line for line in pinned() if line.startswith(f"{package}==")]
    return line.split("==")[1]


def available(package: str) -> list[str]:
    """The releases of a package that pip finds."""
    command = [sys.executable, "-m", "pip", "index", "versions", package]
    listed = subprocess.run(command, capture_output=True, text=True)
    found = re.search(r"^Available versions: (.*)$", listed.stdout, re.MULTILINE)
    if found is None:
        raise CompatError(f"pip lists no version of {package}: {listed.stderr.strip() or listed.stdout.strip()}")
    return [version for version in found[1].split(", ") if re.fullmatch(r"[\d.]+", version)]


def newest_of_each_minor(versions: list[str], since: str) -> list[str]:
    newest: dict[tuple[int, ...], str] = {}
    for version in sorted(versions, key=_number):
        if _number(version)[:2] >= _number(since)[:2]:
            newest[_number(version)[:2]] = version
    return list(newest.values())


def tried(version: str) -> Row:
    """Tries the build under one version of torch, in a temporary environment."""
    with _environment({"torch": version}) as python:
        cpu, cuda = (_smoke(python, "smoke.py", backend) for backend in ("cpu", "cuda"))
    if cpu["cuda"] is None:
        cuda = {**cuda, "found": {}}
    failed = any(error is not None for part in (cpu, cuda) for error in part["found"].values())
    return Row((cpu["torch"], cpu["cuda"] or "none", _words(cpu["found"]), _words(cuda["found"])), failed)


def tried_with(version: str) -> Row:
    """The report of models of one version of transformers, with the torch and the kernels of the tests."""
    with _environment({"torch": tested("torch"), "transformers": version}) as python:
        found = _smoke(python, "models.py", "cpu")
    errors = [found["fuse_mlps"], found["register_experts"]]
    taken = "runs" if found["wants"] is None else f"disabled: requires kernels {found['wants']}"
    return Row((version, *(error or "computes" for error in errors), taken), any(errors))


@contextmanager
def _environment(versions: dict[str, str]) -> Iterator[Path]:
    """The interpreter of a temporary environment with these versions and the tests' other packages."""
    environment = ENVIRONMENTS / "-".join(versions.values())
    shutil.rmtree(environment, ignore_errors=True)
    try:
        venv.create(environment, with_pip=True)
        constraints = environment / "constraints.txt"
        others = [line for line in pinned() if line.split("==")[0] not in {*versions, "triton"}]
        constraints.write_text("\n".join(others))
        python = environment / "bin/python"
        pip = [str(python), "-m", "pip", "install", "--quiet", "--no-cache-dir", "-c", str(constraints)]
        wanted = [f"{package}=={version}" for package, version in versions.items()]
        if subprocess.run([*pip, *wanted, "kernels", "numpy"]).returncode != 0:
            raise CompatError(f"{' '.join(wanted)} was not installed: pip's messages are above")
        yield python
    finally:
        shutil.rmtree(environment, ignore_errors=True)


def _smoke(python: Path, script: str, backend: str) -> dict:
    command = [str(python), "-I", str(SMOKES / script), project.repo_id(), str(project.version()), backend]
    environment = {**os.environ, "LOCAL_KERNELS": f"{project.repo_id()}={project.BUILD}", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        raise CompatError(f"{script} {backend} failed: {(done.stderr.strip() or 'no message').splitlines()[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def _words(found: dict[str, str | None]) -> str:
    """The text of one cell: the successful checks, or the errors."""
    errors = [f"{what}: {error}" for what, error in found.items() if error is not None]
    if errors:
        return "; ".join(errors)
    if len(found) > 1:
        return "loads, computes"
    return "loads" if found else "not tried: no CUDA in this torch"


def table(columns: tuple[str, ...], rows: list[Row]) -> Table:
    result = Table(*columns, box=SIMPLE_HEAD)
    for row in rows:
        result.add_row(*row.cells, style="red" if row.failed else None)
    return result


def document(rows: list[Row], models: list[Row]) -> str:
    return f"""# Compatibility

{documents.table(SUMMARY, summary(rows, models))}

Tests and figures ran on an H100 and an H200, with torch 2.11.0+cu130. Nothing ran on any other GPU. Two H200s of one
host ran the parallel cases over NCCL (`tests/distributed`: tensor parallelism, FSDP2, DDP, transformers' plans,
`nn.DataParallel`). They also ran models on the GPU that is not the current one, moved between the two, and split by
accelerate.

## Which torch

`make compat` writes this table. It loads one build of the extensions, for torch's stable ABI of {oldest()}, with
`get_kernel` under each version of torch, on a machine without a GPU. *Computes* means that results in float32 and
bfloat16, gradients, `torch.compile(fullgraph=True)` and `fuse_mlps` were each checked against float64 or the original.

{documents.table(COLUMNS, [row.cells for row in rows])}

{models_of_transformers(models)}
{chosen_variants()}"""


def summary(rows: list[Row], models: list[Row]) -> list[tuple[str, str, str]]:
    """The tested versions, and the oldest that can work."""
    python = importlib.metadata.metadata("kernels")["Requires-Python"].removeprefix(">=")
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    cudas = sorted({row.cells[1] for row in rows} - {"none"})
    return [
        ("torch", ", ".join(row.cells[0].partition("+")[0] for row in rows), f"{oldest()}, for its stable ABI"),
        ("CUDA of torch", ", ".join(cudas), "12.6, compiled for but never run"),
        ("Python", here, f"{python}, required by `kernels`; not free-threaded"),
        ("`kernels`", tested("kernels"), "no other version was tested"),
        (
            "transformers",
            ", ".join(row.cells[0] for row in models),
            "no older version was tested; see [below](#which-transformers)",
        ),
    ]


def models_of_transformers(rows: list[Row]) -> str:
    return f"""## Which transformers

With torch {tested("torch")} and `kernels` {tested("kernels")}. *Computes* means that a tiny Llama's MLPs, and
the experts of a tiny Qwen3-MoE, were checked against the original. transformers' own use of `kernels` (a
`KernelConfig`, and the layer names that its modules are marked with) needs a `kernels` version that transformers
accepts; otherwise transformers behaves as if `kernels` were not installed. `fuse_mlps`, `register_experts` and
`kernels.kernelize` do not depend on this.

{documents.table(MODELS, [row.cells for row in rows])}
"""


def chosen_variants() -> str:
    """The variant of a release that the loader chooses under each CUDA version that a torch is built for."""
    abi = oldest().replace(".", "")
    names = [f"torch-stable-abi{abi}-cu{version.replace('.', '')}-x86_64-linux" for version in BUILT]
    rows = []
    for version in TORCHS:
        system = {"cpu": "x86_64", "os": "linux", "torch_cxx11_abi": True, "tvm_ffi_version": None}
        torch, backend = Version(oldest()), CUDA(version=Version(version))
        resolved, _ = _resolve_variant_for_system(
            [parse_variant(name) for name in names], selected_backend=backend, torch_version=torch, **system
        )
        rows.append((version, f"`{resolved[0].variant_str}`"))
    built = f"{', '.join(BUILT[:-1])} and {BUILT[-1]}"
    return f"""## Which variant a CUDA build of torch gets

A release has variants for CUDA {built}. `kernels` chooses the newest variant of the same major version
of CUDA that is not newer than torch's. The table above has no torch for CUDA 12: since 2.11, pip installs torch only
for CUDA 13. The variant for CUDA 12.6 was never run, but the compilers of 12.6 and 12.8 accept its code
(`make matrix`).

{documents.table(("CUDA of torch", "variant"), rows, left=2)}
"""


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


if __name__ == "__main__":
    main()
