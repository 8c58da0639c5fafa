"""The Triton backend without a GPU, on Triton's interpreter."""

import os
import subprocess
import sys

import pytest

import machine
import project


@pytest.mark.skipif(machine.device_type() == "cuda", reason="test_triton_kernels.py runs on the GPU here")
def test_kernels_in_the_interpreter():
    """The Triton kernels' tests pass on the interpreter, chosen when kernels are defined, so in another process."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    ignore = ["-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning"]  # numpy's, of intended overflows
    command = [sys.executable, "-m", "pytest", "-q", *ignore, "tests/kernels/test_triton_kernels.py"]
    run = subprocess.run(command, env=environment, cwd=project.ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


NOT_INSTALLED = "import sys; sys.modules['triton'] = None"
# Finds the repository's folder `triton` as a search from its root does.
A_FOLDER = """
import sys
from importlib.machinery import PathFinder
class Finder:
    def find_spec(name, path=None, target=None):
        return PathFinder.find_spec(name, ["."]) if name == "triton" else None
sys.meta_path.insert(0, Finder)
"""


@pytest.mark.parametrize("hide", [NOT_INSTALLED, A_FOLDER], ids=["not installed", "a folder of that name"])
def test_without_triton(hide):
    """Without Triton the package imports and works, and forcing the backend says that Triton is missing."""
    program = f"""
{hide}
import torch
from kernels import get_kernel
fused_mlp = get_kernel({project.repo_id()!r}, version={project.version()}, backend={machine.device_type()!r})
gate, up = torch.randn(2, 3, 4)
print(fused_mlp.act_and_mul(gate, up, "relu").equal(gate.relu() * up))
with fused_mlp.backend("triton"):
    fused_mlp.act_and_mul(gate, up)
"""
    run = subprocess.run([sys.executable, "-c", program], cwd=project.ROOT, capture_output=True, text=True)
    assert run.stdout == "True\n", run.stderr
    assert "triton is not installed" in run.stderr
