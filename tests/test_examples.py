"""The examples, the recipes and the README, run as they are printed, through LOCAL_KERNELS and without the Hub."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import machine
import project

HUB_WAYS = ("default_names", "kernel_config", "kernelize", "standalone_layer")
RECIPES = sorted((project.ROOT / "examples/recipes").glob("*.py"))

# The PyTorch that pip installs is for CUDA, on machines without a GPU too. Python runs a module of this name when it
# starts.
CUDA_TORCH_WITHOUT_GPU = """
import torch
torch.version.cuda = "13.0"
torch.cuda.is_available = lambda: False
"""
TORCHS = ("this torch", "a CUDA torch without a GPU")


@pytest.fixture(params=TORCHS)
def with_torch(request, tmp_path):
    """The environment of a process."""
    chosen = {name: value for name, value in os.environ.items() if name != "LOCAL_KERNELS"}
    if request.param == TORCHS[0]:
        return chosen
    (tmp_path / "sitecustomize.py").write_text(CUDA_TORCH_WITHOUT_GPU)
    return chosen | {"PYTHONPATH": str(tmp_path)}


def run(program, folder, environment):
    """What the program prints; it must succeed."""
    done = subprocess.run(
        [sys.executable, program], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No kernel mapping" not in done.stderr
    return done.stdout


def exported(environment):
    """The environment after the `export` that the README shows."""
    assert "export LOCAL_KERNELS=$(.venv/bin/python tools/project.py)" in (project.ROOT / "README.md").read_text()
    command = [sys.executable, project.ROOT / "tools/project.py"]
    value = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()
    return environment | {"LOCAL_KERNELS": value, "HF_HUB_OFFLINE": "1"}


# Under the other torch one for `kernels` and one for transformers: all of them find the build by the same lines.
@pytest.mark.parametrize(
    ("name", "with_torch"),
    [*((name, TORCHS[0]) for name in HUB_WAYS), ("kernelize", TORCHS[1]), ("kernel_config", TORCHS[1])],
    indirect=["with_torch"],
)
def test_ways_of_the_hub(name, with_torch):
    """Each runs from anywhere, and says at the end that the answers agree."""
    said = run(project.ROOT / f"examples/{name}.py", "/", with_torch)
    assert "largest difference" in said
    assert max(len(line) for line in said.splitlines()) <= 100


@pytest.mark.parametrize("name", ["kernel_config", "default_names"])
def test_ways_where_transformers_takes_kernels_for_absent(name):
    """Else one fails in transformers, and the other shows what it does not do."""
    program = project.ROOT / f"examples/{name}.py"
    code = f"""
import runpy, sys
from transformers.utils import import_utils
import_utils.is_kernels_available = lambda: False
sys.path.insert(0, {str(program.parent)!r})
runpy.run_path({str(program)!r})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and re.search(r"^error: transformers [\d.]+ does not take kernels", done.stderr, re.M)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipes(recipe):
    """Each checks its own results; here, that it is a page, names its command, is listed, and fuses something."""
    text = recipe.read_text()
    assert len(text.splitlines()) <= 40
    assert f"Run: `python examples/recipes/{recipe.name}`" in text
    assert f"(../examples/recipes/{recipe.name})" in (project.ROOT / "docs/recipes.md").read_text()
    said = run(f"examples/recipes/{recipe.name}", project.ROOT, exported(dict(os.environ)))
    fused = max(map(int, re.findall(r"^(\d+) of \d+ MLPs run in one call each", said, re.MULTILINE)))
    assert fused > 0 or machine.device_type() == "cuda"  # which has no kernel for experts in float32


def test_what_the_readme_shows(with_torch, tmp_path):
    """As a program of its own."""
    readme = (project.ROOT / "README.md").read_text()
    code = [*re.findall(r"^```python\n(.*?)^```", readme, re.MULTILINE | re.DOTALL), "print(fused_mlp.__file__)"]
    (tmp_path / "shown.py").write_text("\n".join(code))
    said = run("shown.py", tmp_path, exported(with_torch))
    assert "2 of 2 MLPs run in one call each" in said
    loaded = Path(said.splitlines()[-1]).parent.name
    assert ("-cpu-" in loaded) == (machine.device_type() == "cpu" or "PYTHONPATH" in with_torch)
