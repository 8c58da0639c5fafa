"""The variants without compiled ops: only the Triton kernels, for AMD's and Intel's GPUs.

No such GPU is needed: torch is made to look like a build for them, and Triton's interpreter computes.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from kernels._rust import Backend, Build
from kernels.variants import parse_variant, resolve_variant

import forks
import machine
import noarch
import project
from builder import layout, plan
from releasing.rules import sources, variants

pytest.importorskip("triton")

# The attributes of torch that `kernels` checks, as in torch's own builds.
TORCH = {"rocm": ("hip", "7.1.52802"), "xpu": ("xpu", "20250302")}
both = pytest.mark.parametrize("backend", noarch.BACKENDS)


def look_like(backend: str, monkeypatch) -> None:
    monkeypatch.setattr("torch.version.cuda", None)
    monkeypatch.setattr(f"torch.version.{TORCH[backend][0]}", TORCH[backend][1], raising=False)


@pytest.fixture(scope="module")
def build(tmp_path_factory) -> Path:
    """Both variants, and the one for CPUs."""
    folder = tmp_path_factory.mktemp("build")
    for backend in noarch.BACKENDS:
        variant = plan.noarch(backend)
        layout.install(variant, None, folder / variant.label)
    (cpu,) = (path for path in machine.variants() if "-cpu-" in path.name)
    shutil.copytree(cpu, folder / cpu.name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def test_kernel_builder_parses_its_build_toml(tmp_path):
    """kernel-builder gets a source tree of real files: the Python files of the other build and nothing else."""
    noarch.write(tmp_path)
    assert Build.open(tmp_path).general.backends == [Backend.ROCm, Backend.XPU]
    files = {path.relative_to(tmp_path).as_posix(): path for path in tmp_path.rglob("*") if not path.is_dir()}
    assert not [path for path in files.values() if path.is_symlink()]
    package = f"torch-ext/{project.python_name()}"
    assert files.keys() == {"build.toml", *(f"{package}/{place}" for place in plan.package_files())}
    for place, path in plan.package_files().items():
        assert files[f"{package}/{place}"].read_bytes() == path.read_bytes()


@both
def test_variant_may_be_released(build, backend):
    faults = variants.faults(build / f"torch-{backend}")
    assert [fault for fault in faults if not fault.startswith("was built from a tree with changes")] == []
    assert sources.faults(build / f"torch-{backend}") == []


def test_one_with_an_extension_may_not(build, tmp_path):
    variant = shutil.copytree(build / "torch-rocm", tmp_path / "torch-rocm")
    (extension,) = build.glob("*-cpu-*/*.so")
    shutil.copy(extension, variant)
    assert "has 1 extensions, not none" in variants.faults(variant)


@both
def test_which_variant_is_taken(build, backend, monkeypatch):
    """The loader picks this variant among a release's variants, and the CPU variant if asked for it."""
    names = [path.name for path in build.iterdir()]
    names += ["torch-stable-abi211-cu126-x86_64-linux", "torch-stable-abi211-cu130-x86_64-linux"]
    look_like(backend, monkeypatch)
    resolved, _ = resolve_variant([parse_variant(name) for name in names])
    assert resolved.variant_str == f"torch-{backend}"
    resolved, _ = resolve_variant([parse_variant(name) for name in names], "cpu")
    assert resolved.variant_str.startswith("torch-stable-abi211-cpu-")


def torch_for(backend: str) -> str:
    """Code that makes torch look like a build for these GPUs."""
    return f"import torch\ntorch.version.{TORCH[backend][0]} = {TORCH[backend][1]!r}\n"


def environment(build: Path, **more: str) -> dict[str, str]:
    return os.environ | {"LOCAL_KERNELS": f"{project.repo_id()}={build}", "HF_HUB_OFFLINE": "1", **more}


def test_the_two_hold_the_same_code(build):
    def code(backend: str) -> dict[Path, bytes]:
        folder = build / f"torch-{backend}"
        files = (path.relative_to(folder) for path in folder.rglob("*.py"))
        return {path: (folder / path).read_bytes() for path in files if path.name != "_ops.py"}

    one, other = map(code, noarch.BACKENDS)
    assert one and one == other


def test_the_kernels_compute(build, tmp_path):
    """kernel-builder's tests for every variant pass on Triton's interpreter; one of the two variants suffices."""
    (tmp_path / "torch_for.py").write_text(torch_for("rocm"))
    tests = [str(project.ROOT / "tests/test_kernels_ci.py"), "--rootdir", str(tmp_path), "--noconftest"]
    command = [sys.executable, "-m", "pytest", *tests, "-p", "torch_for", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "-o", "markers=kernels_ci"],
        cwd=tmp_path,
        env=environment(build, TRITON_INTERPRET="1", PYTHONPATH=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "22 passed, " in done.stdout  # bfloat16 is skipped: the interpreter computes it wrongly


PROGRAM = """
import torch
import torch.nn.functional as F
from kernels import get_kernel, get_loaded_kernels
fused_mlp = get_kernel({repo!r}, version={version})
(loaded,) = get_loaded_kernels()
print(loaded.metadata.backend.backend_type)
x, gate, up, down = torch.randn(4, 32), torch.randn(48, 32), torch.randn(48, 32), torch.randn(32, 48)
print(fused_mlp.explain(fused_mlp.gated_mlp, x, gate, up, down).reason)
for name in ("auto", "torch"):
    with fused_mlp.backend(name):
        y = fused_mlp.gated_mlp(x, gate, up, down, activation="silu")
        print(torch.equal(y, F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)))
for name in ("cuda", "cpu", "triton"):
    try:
        with fused_mlp.backend(name):
            fused_mlp.linear(x, gate)
    except ValueError as error:
        print(error)
found = fused_mlp.check()
print({{cell for by_dtype in found.products.values() for cell in by_dtype.values()}}, found.advice[0])
cpu = get_kernel({repo!r}, version={version}, backend="cpu")
print(cpu.explain(cpu.linear, x, gate).implementation)
"""


@both
def test_what_is_chosen(build, backend, tmp_path):
    """PyTorch computes until such a GPU has been measured; forcing a missing backend gives the reason."""
    program = PROGRAM.format(repo=project.repo_id(), version=project.version())
    done = forks.run(program, cwd=tmp_path, env=environment(build), before=torch_for(backend))
    assert done.returncode == 0, done.stderr
    refused = "is forced but does not support linear:"
    assert done.stdout.splitlines() == [
        backend,
        "the Triton kernels are untested on this kind of GPU: backend('triton') forces them",
        "True",
        "True",
        f"backend 'cuda' {refused} this build has only Triton kernels",
        f"backend 'cpu' {refused} this build has only Triton kernels",
        f"backend 'triton' {refused} Triton kernels run on GPUs, but x is on cpu",
        "{'torch'} backend(\"triton\") runs the Triton kernels of this build, which are untested on this kind of GPU",
        "cpu",
    ]


def test_launch_parameters_off_nvidia(fused_mlp):
    """Options that only NVIDIA's compiler knows are not passed to others."""
    configs = sys.modules[f"{fused_mlp.__name__}.backends.triton.configs"]
    gpu = configs.Gpu("AMD Instinct MI300X", 0, 64 * 1024, 304)
    for wide in (False, True):
        for rows in (1, 64, 8192):
            config = configs.default_config("gated_linear", rows, 3072, 2, wide, gpu)
            assert not config["DESCRIPTORS"] and "maxnreg" not in config and config["num_stages"] == 2
