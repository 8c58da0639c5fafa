"""Loads the kernel as a user does, from the local build, and says on which device the tests run."""

import os
import random
import zlib
from pathlib import Path

import kernels
import project
import pytest
import torch
from kernels.importer import get_loaded_kernels

os.environ.setdefault("LOCAL_KERNELS", project.local_kernels())
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # for processes that tests start; this one loads from LOCAL_KERNELS

# The seed of all random inputs: new in every run, repeated with FUSED_MLP_TEST_SEED.
SEED = int(os.environ.get("FUSED_MLP_TEST_SEED", random.randrange(2**32)))

GPU_REASON = "needs a GPU and a torch with CUDA"


def build_folder() -> Path:
    overrides = dict(entry.split("=", 1) for entry in os.environ["LOCAL_KERNELS"].split(":"))
    return Path(overrides[project.repo_id()])


def variants() -> list[Path]:
    return sorted(path.parent for path in build_folder().glob("*/metadata.json"))


def device_type() -> str:
    """The device whose variant get_kernel loads: it goes by torch."""
    return "cuda" if torch.version.cuda is not None and torch.cuda.is_available() else "cpu"


def implementations() -> list[str]:
    """What backend() can force on this device; "torch" is what the others are compared with."""
    return ["cuda", "triton"] if device_type() == "cuda" else ["cpu"]


def pytest_report_header(config) -> list[str]:
    found = ", ".join(path.name for path in variants()) or "none"
    where = torch.cuda.get_device_name() if device_type() == "cuda" else "no GPU here, GPU tests are skipped"
    return [
        f"{project.repo_id()}: build {found}; torch {torch.__version__}, device {device_type()} ({where})",
        f"random inputs: FUSED_MLP_TEST_SEED={SEED}",
    ]


def pytest_collection_modifyitems(items) -> None:
    if not variants() and any("fused_mlp" in item.fixturenames for item in items):
        raise pytest.UsageError(f"no kernel in {build_folder()}: run `make build`")
    for item in items:
        if item.get_closest_marker("gpu") and device_type() != "cuda":
            item.add_marker(pytest.mark.skip(reason=GPU_REASON))


def pytest_generate_tests(metafunc) -> None:
    if "implementation" in metafunc.fixturenames:
        metafunc.parametrize("implementation", implementations())


@pytest.fixture(scope="session")
def fused_mlp():
    kernel = kernels.get_kernel(project.repo_id(), version=project.version())
    loaded = next(loaded for loaded in get_loaded_kernels() if loaded.module is kernel)
    assert loaded.metadata.backend.type == device_type()
    return kernel


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device(device_type())


@pytest.fixture(autouse=True)
def fresh_inputs(request) -> None:
    """Every test has random inputs of its own, whichever other tests run."""
    torch.manual_seed(SEED + zlib.crc32(request.node.nodeid.encode()))
