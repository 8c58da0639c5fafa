"""Compilers from PyPI, each in its own folder: several CUDA versions side by side, without a GPU or root."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import project

from .abi import MACOS
from .toolchain import BuildError

REQUIREMENTS = project.ROOT / "requirements/toolkits"


def versions() -> list[str]:
    """The versions with a requirements/toolkits/cuda<version>.txt: "12.6", "13.0", ..."""
    names = (re.fullmatch(r"cuda(\d+)(\d)", path.stem) for path in REQUIREMENTS.glob("cuda*.txt"))
    return sorted((f"{name[1]}.{name[2]}" for name in names), key=lambda version: [*map(int, version.split("."))])


def install(version: str, folder: Path) -> Path:
    """Installs the toolkit into `folder`, unless it is there, and returns the subfolder that holds its parts."""
    _install(f"cuda{version.replace('.', '')}", folder)
    libraries = folder / "nvidia/cu13/lib"
    if libraries.is_dir() and not libraries.with_name("lib64").exists():
        libraries.with_name("lib64").symlink_to("lib")  # nvcc 13.0 looks there
    return folder / "nvidia"


def macos_compiler(folder: Path) -> list[str]:
    """Installs Zig's clang with the macOS headers into `folder`."""
    _install("macos", folder)
    return [str(folder / "ziglang/zig"), "c++", "-target", f"aarch64-macos.{MACOS}"]


def _install(name: str, folder: Path) -> None:
    """Installs the requirements in requirements/toolkits/<name>.txt, unless they are there."""
    requirements = REQUIREMENTS / f"{name}.txt"
    installed = folder / requirements.name
    if not installed.is_file() or installed.read_text() != requirements.read_text():
        shutil.rmtree(folder, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        if subprocess.run([*pip, "-r", str(requirements)]).returncode != 0:
            raise BuildError(f"what {requirements.name} asks for was not installed: pip's messages are above")
        shutil.copyfile(requirements, installed)
