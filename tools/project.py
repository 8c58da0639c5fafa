"""The project as build.toml describes it, the only place with the kernel's name, version and Hub repository.

As a program, prints the LOCAL_KERNELS value of this machine.
"""

import importlib.util
import platform
import sys
import tomllib
from pathlib import Path
from types import ModuleType

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
    """The folder of the Python that ships."""
    return ROOT / "torch-ext" / python_name()


def package_file(place: str) -> ModuleType:
    """A package file that imports no other one, as a module. Loading the whole package would need a build."""
    name = f"{python_name()}_{Path(place).stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, package() / place)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def local_kernels() -> str:
    """The LOCAL_KERNELS value with which `kernels.get_kernel(repo_id(), version=version())` loads the local build."""
    return f"{repo_id()}={loadable_build()}"


def loadable_build() -> Path:
    """The local build, or its CPU variant if `kernels` would choose one that cannot run here or does not exist.

    `kernels` chooses by the installed torch. PyPI's is built for CUDA, whether or not there is a GPU, and on Macs for
    Metal; and a backend cannot be specified for layers.
    """
    import torch

    without_gpu = torch.version.cuda is not None and not torch.cuda.is_available()
    if without_gpu or torch.backends.mps.is_available():
        return next(BUILD.glob(f"torch*-cpu-{machine()}"), BUILD)
    return BUILD


def machine() -> str:
    """This machine's suffix in the names of variants: x86_64-linux, aarch64-linux, aarch64-darwin."""
    cpu = {"arm64": "aarch64"}.get(platform.machine(), platform.machine())
    return f"{cpu}-{platform.system().lower()}"


if __name__ == "__main__":
    print(local_kernels())
