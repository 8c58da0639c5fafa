"""CUDA toolkits from PyPI, each in a folder of its own: several versions side by side, no GPU and no root needed."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import project

from .toolchain import BuildError

REQUIREMENTS = project.ROOT / "requirements"


def versions() -> list[str]:
    """Those with a requirements/cuda<version>.txt: "12.6", "13.0", ..."""
    names = (re.fullmatch(r"cuda(\d+)(\d)", path.stem) for path in REQUIREMENTS.glob("cuda*.txt"))
    return sorted((f"{name[1]}.{name[2]}" for name in names), key=lambda version: [*map(int, version.split("."))])


def install(version: str, folder: Path) -> Path:
    """Makes `folder` that toolkit, unless it is, and returns the folder in it where its parts lie."""
    requirements = REQUIREMENTS / f"cuda{version.replace('.', '')}.txt"
    installed = folder / requirements.name
    if not installed.is_file() or installed.read_text() != requirements.read_text():
        shutil.rmtree(folder, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        if subprocess.run([*pip, "-r", str(requirements)]).returncode != 0:
            raise BuildError(f"CUDA {version} was not installed: pip's messages are above")
        if (libraries := folder / "nvidia/cu13/lib").is_dir():
            libraries.with_name("lib64").symlink_to("lib")  # where the nvcc of 13.0 looks
        shutil.copyfile(requirements, installed)
    return folder / "nvidia"
