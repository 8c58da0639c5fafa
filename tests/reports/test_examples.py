"""The examples, the recipes and the README run as printed, through LOCAL_KERNELS and without the Hub."""

import functools
import os
import re
from pathlib import Path

import pytest

import forks
import machine
import project
from survey import blocks

HUB_WAYS = ("default_names", "kernel_config", "kernelize", "standalone_layer")
RECIPES = sorted((project.ROOT / "examples/recipes").glob("*/*.py"))

# Code to run first, by torch. pip installs a PyTorch for CUDA, on machines without a GPU too.
TORCHS = {
    "this torch": "",
    "a CUDA torch without a GPU": """
import torch
torch.version.cuda = "13.0"
torch.cuda.is_available = lambda: False
""",
}
THIS, OTHER = TORCHS
# timm is installed separately (requirements/timm.txt), and uses only torchvision's image transforms.
BEFORE = {
    "timm_model": f"""
import importlib.abc, importlib.machinery, sys, unittest.mock

class Torchvision(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torchvision":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return unittest.mock.MagicMock(__path__=[], __version__="0.28.0")

    def exec_module(self, module):
        pass

sys.meta_path.insert(0, Torchvision())
sys.path.append({str(blocks.TIMM)!r})
"""
}


def run(installed, program, folder, before="", **variables):
    """Returns the output of a successful program, with LOCAL_KERNELS unset unless given."""
    environment = {name: value for name, value in os.environ.items() if name != "LOCAL_KERNELS"} | variables
    done = forks.run(Path(program), cwd=folder, env=environment, before=TORCHS[installed] + before)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No kernel mapping" not in done.stderr
    return done.stdout


@functools.cache
def exported(installed):
    """Returns the variables that the README's `export` sets."""
    assert "export LOCAL_KERNELS=$(.venv/bin/python tools/project.py)" in (project.ROOT / "README.md").read_text()
    value = run(installed, project.ROOT / "tools/project.py", project.ROOT).strip()
    return {"LOCAL_KERNELS": value, "HF_HUB_OFFLINE": "1"}


# With the other torch, one for `kernels` and one for transformers suffice: all find the build by the same lines.
@pytest.mark.parametrize(
    ("name", "installed"), [*((name, THIS) for name in HUB_WAYS), ("kernelize", OTHER), ("kernel_config", OTHER)]
)
def test_ways_of_the_hub(name, installed):
    """Each example runs from any folder, and reports at the end that the results agree."""
    said = run(installed, project.ROOT / f"examples/{name}.py", "/")
    assert "largest difference" in said
    assert max(len(line) for line in said.splitlines()) <= 100


@pytest.mark.parametrize("name", ["kernel_config", "default_names"])
def test_ways_where_transformers_takes_kernels_for_absent(name):
    """The examples exit with an error: else one would fail in transformers, and the other show what does not happen."""
    program = project.ROOT / f"examples/{name}.py"
    code = f"""
import runpy, sys
from transformers.utils import import_utils
import_utils.is_kernels_available = lambda: False
sys.path.insert(0, {str(program.parent)!r})
runpy.run_path({str(program)!r})
"""
    done = forks.run(code)
    assert done.returncode == 1 and re.search(r"^error: transformers [\d.]+ does not take kernels", done.stderr, re.M)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipes(recipe):
    """A recipe is at most 40 lines, names its command, is listed, fuses something and passes its own checks."""
    text = recipe.read_text()
    assert len(text.splitlines()) <= 40
    place = recipe.relative_to(project.ROOT)
    assert f"Run: `python {place}`" in text
    assert f"(../{place})" in (project.ROOT / "docs/recipes.md").read_text()
    said = run(THIS, recipe, project.ROOT, BEFORE.get(recipe.stem, ""), **exported(THIS))
    fused = max(map(int, re.findall(r"^(\d+) of \d+ MLPs run in one call each", said, re.MULTILINE)))
    assert fused > 0 or machine.device_type() == "cuda"  # a GPU has no kernel for float32 experts


@pytest.mark.parametrize("installed", TORCHS)
def test_what_the_readme_shows(installed, tmp_path):
    """The README's code runs as a program."""
    readme = (project.ROOT / "README.md").read_text()
    code = [*re.findall(r"^```python\n(.*?)^```", readme, re.MULTILINE | re.DOTALL), "print(fused_mlp.__file__)"]
    (tmp_path / "shown.py").write_text("\n".join(code))
    said = run(installed, tmp_path / "shown.py", tmp_path, **exported(installed))
    assert "2 of 2 MLPs run in one call each" in said
    loaded = Path(said.splitlines()[-1]).parent.name
    assert ("-cpu-" in loaded) == (machine.device_type() == "cpu" or installed == OTHER)
