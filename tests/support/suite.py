"""Loads the kernel as a user does, from the local build, and reports the device that the tests run on."""

import contextlib
import gc
import importlib
import json
import os
import random
import sys
import zlib

# Test processes that run in parallel share the cores, as do their child processes. torch reads this when it loads.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    cores = len(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))))

import pytest
import torch

import gemm_kernels
import machine
import project
from builder import plan, toolchain

# The seed of all random inputs: a new one in every run, unless FUSED_MLP_TEST_SEED repeats an old one.
SEED = int(os.environ.setdefault("FUSED_MLP_TEST_SEED", str(random.randrange(2**32))))  # parallel processes inherit it


def pytest_report_header() -> list[str]:
    gpu = torch.cuda.get_device_name() if machine.device_type() == "cuda" else "no GPU: the tests in test_gpu.py skip"
    return [
        f"{project.repo_id()}: {', '.join(path.name for path in machine.variants()) or 'no build'}",
        f"tested: the {machine.device_type()} variant ({gpu}), torch {torch.__version__}",
        f"random inputs: FUSED_MLP_TEST_SEED={SEED}",
    ]


# The files that take longest, most of them because they start processes. Parallel runs begin with these, so that none
# is left running alone at the end.
LONGEST = ("recipes", "hub", "hub_ways", "package", "triton", "coverage", "release", "compile", "cuda_binary", "build")


def pytest_collection_modifyitems(items) -> None:
    places = {f"test_{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))
    if not machine.variants() and any("fused_mlp" in item.fixturenames for item in items):
        raise pytest.UsageError(f"no kernel in {machine.build_folder()}: run `make build`")


def pytest_collection_finish() -> None:
    """Freezes all modules imported so far; otherwise the garbage collector scans them again every few tests."""
    gc.collect()
    gc.freeze()


def pytest_generate_tests(metafunc) -> None:
    if "implementation" in metafunc.fixturenames:
        metafunc.parametrize("implementation", machine.implementations())


@pytest.fixture(scope="session")
def fused_mlp():
    """The kernel under test; with FUSED_MLP_TEST_GEMMS=sm80 in the environment, with the GEMMs of that architecture.

    Normally torch computes small trained calls, and on a CPU small products. All calls in tests are small and meant for
    the ops, so the thresholds are removed.
    """
    from kernels import get_kernel  # reads the environment that `machine` sets when it is imported

    kernel = get_kernel(project.repo_id(), version=project.version(), backend=machine.device_type())
    dispatch = sys.modules[f"{kernel.__name__}.dispatch"]
    for least in dispatch.LEAST_RECORDED.values():
        least.update(mlp=0, linear=0, gated_linear=0, gated_mlp=0)
    dispatch.LEAST_PRODUCT.clear()
    dispatch.LEAST_WORK.clear()
    dispatch.LEAST_SUM.clear()
    dispatch.LEAST_NORM.clear()
    forced = os.environ.get("FUSED_MLP_TEST_GEMMS")
    with gemm_kernels.forced(kernel, forced) if forced else contextlib.nullcontext():
        yield kernel


@pytest.fixture(scope="session")
def cuda_variant() -> plan.Variant:
    """The CUDA variant of these sources, which is in build/ if there is a GPU or if it was requested."""
    nvcc = toolchain.nvcc()
    if nvcc is None:
        pytest.skip("no nvcc: there is no CUDA build")
    variant = plan.variant("cuda", nvcc)
    metadata = project.BUILD / variant.label / "metadata.json"
    if not metadata.is_file() or json.loads(metadata.read_text())["id"] != variant.id:
        pytest.skip("there is no CUDA build of these sources: run `make build BACKEND=cuda`")
    return variant


@pytest.fixture
def tell_ops(fused_mlp, monkeypatch):
    """A function that makes every op call tell(name, operands) first: direct calls' ops, or those of another table."""
    shortcut = importlib.import_module(f"{fused_mlp.__name__}.models.running.shortcut")

    def spy(tell, ops=shortcut._ops):
        for name, op in ops.items():
            monkeypatch.setitem(ops, name, lambda *given, name=name, op=op: (tell(name, given), op(*given))[1])

    return spy


@pytest.fixture
def dispatched():
    """Runs a profiler, under which direct calls go through torch's dispatcher."""
    with torch.autograd.profiler.profile():
        yield


@pytest.fixture
def called_ops(tell_ops, dispatched):
    """The names of the ops that direct calls dispatch."""
    names = []
    tell_ops(lambda name, _: names.append(name))
    return names


@pytest.fixture
def blocks(tell_ops, dispatched):
    """Records a block op's calls: the factor, the norm of the input, the other norm, and whether it is of the sum."""
    taken = []

    def tell(name, given):
        if name.startswith("residual"):
            taken.append((given[-10], given[-6], given[-2], given[-1]))

    tell_ops(tell)
    return taken


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device(machine.device_type())


@pytest.fixture(autouse=True)
def fresh_inputs(request) -> None:
    """Seeds each test's random inputs by its name, whichever other tests run."""
    torch.manual_seed(SEED + zlib.crc32(request.node.nodeid.encode()))
