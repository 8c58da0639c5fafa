"""The tests of kernel-builder's `nix run .#ci-test`, run from the files that kernel-builder copies from this tree."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import machine
import project

# The environment of the ci-test has torch, kernels and pytest. Saved as sitecustomize.py, this runs at Python's start.
NOTHING_ELSE = """
import sys
for name in ("transformers", "accelerate", "peft", "diffusers", "rich", "jinja2", "project", "machine"):
    sys.modules[name] = None
"""


@pytest.fixture(scope="module")
def source_set(tmp_path_factory) -> Path:
    """build.toml, its listed sources, and the real files of tests/ and torch-ext/ with its listed suffixes."""
    folder = tmp_path_factory.mktemp("source")
    config = project.config()
    tables = [config["torch"], *config["kernel"].values()]
    places = {
        project.ROOT / place for place in ("build.toml", *(source for table in tables for source in table["src"]))
    }
    for root in ("tests", "torch-ext"):
        for suffix in config["torch"]["pyext"]:
            places |= {path for path in (project.ROOT / root).rglob(f"*.{suffix}") if not path.is_symlink()}
    for place in places:
        target = folder / place.relative_to(project.ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(place, target)
    return folder


def test_the_ci_test_runs(source_set, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(NOTHING_ELSE)
    environment = os.environ | {
        "PYTHONPATH": str(tmp_path),
        "LOCAL_KERNELS": f"{project.repo_id()}={machine.build_folder().resolve()}",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", "pytest", source_set / "tests", "-m", "kernels_ci", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_kernels_ci.py" in done.stdout and " passed" in done.stdout
