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
    """Those with a requirements/toolkits/cuda<version>.txt: "12.6", "13.0", ..."""
    names = (re.fullmatch(r"cuda(\d+)(\d)", path.stem) for path in REQUIREMENTS.glob("cuda*.txt"))
    return sorted((f"{name[1]}.{name[2]}" for name in names), key=lambda version: [*map(int, version.split("."))])


def install(version: str, folder: Path) -> Path:
    """Makes `folder` that toolkit, unless it is, and returns the folder in it where its parts lie."""
    _install(f"cuda{version.replace('.', '')}", folder)
    libraries = folder / "nvidia/cu13/lib"
    if libraries.is_dir() and not libraries.with_name("lib64").exists():
        libraries.with_name("lib64").symlink_to("lib")  # where the nvcc of 13.0 looks
    return folder / "nvidia"


def macos_compiler(folder: Path) -> list[str]:
    """clang with the headers of macOS, as the packagers of Zig ship it, installed into `folder`."""
    _install("macos", folder)
    return [str(folder / "ziglang/zig"), "c++", "-target", f"aarch64-macos.{MACOS}"]


def _install(name: str, folder: Path) -> None:
    """Install what requirements/toolkits/<name>.txt asks for, unless it is there."""
    requirements = REQUIREMENTS / f"{name}.txt"
    installed = folder / requirements.name
    if not installed.is_file() or installed.read_text() != requirements.read_text():
        shutil.rmtree(folder, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        if subprocess.run([*pip, "-r", str(requirements)]).returncode != 0:
            raise BuildError(f"what {requirements.name} asks for was not installed: pip's messages are above")
        shutil.copyfile(requirements, installed)
