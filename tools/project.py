"""What build.toml says of the project. The kernel's name, version and Hub repository are written nowhere else."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"  # where tools/build.py puts its variants


def config() -> dict:
    return tomllib.loads((ROOT / "build.toml").read_text())


def name() -> str:
    return config()["general"]["name"]


def python_name() -> str:
    return name().replace("-", "_")


def version() -> int:
    return config()["general"]["version"]


def repo_id() -> str:
    return config()["general"]["hub"]["repo-id"]


def package() -> Path:
    """The Python that ships."""
    return ROOT / "torch-ext" / python_name()


def local_kernels() -> str:
    """The LOCAL_KERNELS value with which `kernels.get_kernel(repo_id(), version=version())` loads the local build."""
    return f"{repo_id()}={BUILD}"
