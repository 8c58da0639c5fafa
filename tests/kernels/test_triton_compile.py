"""The Triton kernels compile for every GPU generation, without spills, within its shared memory. No GPU is needed."""

import importlib
import subprocess
import sys

import pytest

import project

pytest.importorskip("triton")


@pytest.mark.parametrize(
    ("targets", "activations"),
    [
        (("90",), "all"),
        (("80", "86", "89", "100", "120"), "gelu_pytorch_tanh"),
        (("gfx942",), "gelu_pytorch_tanh"),
    ],
    ids=["every activation", "every target", "AMD"],
)
def test_every_target_compiles(targets, activations):
    command = [sys.executable, "triton/compile_targets.py", "--dtype", "bf16", "--activations", activations]
    for target in targets:
        command += ["--target", target]
    run = subprocess.run(command, cwd=project.ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    for target in targets:
        assert f"\n{target:>7} " in run.stdout


@pytest.fixture
def compile_targets(monkeypatch):
    monkeypatch.syspath_prepend(project.ROOT / "triton")
    return importlib.import_module("compile_targets")


def test_spills_are_found(compile_targets):
    """Register spills are reported: the tile needs 256 accumulators per thread, but a thread has 255 registers."""
    gpu = compile_targets.gpus()["80"]
    *_, case = compile_targets.gemm_cases("bf16", ("relu", 5), gpu, (8192,), ops=("linear",))
    constants = case.constants | {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 32}
    case = case._replace(constants=constants, options={"num_warps": 4, "num_stages": 2})
    assert "spills registers" in compile_targets.verdict(compile_targets.compile_case(case, "80"), gpu)


def test_verdicts(compile_targets):
    gpu = compile_targets.gpus()["86"]
    fits = compile_targets.Resources(registers=255, spills=0, shared=gpu.shared_memory)
    assert compile_targets.verdict(fits, gpu) == ""
    assert "shared memory" in compile_targets.verdict(fits._replace(shared=gpu.shared_memory + 1), gpu)
    assert compile_targets.verdict("CompilationError: no", gpu) == "CompilationError: no"
