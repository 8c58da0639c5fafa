#!/usr/bin/env python3
"""Writes the source tree of a second build, which holds only the Triton kernels, for GPUs of AMD and Intel.

kernel-builder calls it noarch: the same Python for every machine. It needs its own build.toml in its own folder,
without links, so this tool generates them from the tree. .github/workflows/build.yaml builds them; tools/build.py lays
out the same variants for development.
"""

import argparse
import shutil
from pathlib import Path

import project
from builder import plan

BACKENDS = ("rocm", "xpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what is there is replaced")
    write(parser.parse_args().folder)


def write(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    for place, path in plan.package_files().items():
        target = folder / "torch-ext" / project.python_name() / place
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    (folder / "build.toml").write_text(build_toml())


def build_toml() -> str:
    """The general part of the tree's build.toml, with these backends and nothing to compile."""
    general = project.config()["general"]
    hub = general.pop("hub")
    lines = [f"{key} = {_value(value)}" for key, value in (general | {"backends": [*BACKENDS]}).items()]
    lines = ["[general]", *lines, "", "[general.hub]", *(f"{key} = {_value(value)}" for key, value in hub.items())]
    return "\n".join([*lines, "", "[torch-noarch]", f"pyext = {_value(project.config()['torch']['pyext'])}", ""])


def _value(value: str | int | list[str]) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    return f'"{value}"' if isinstance(value, str) else str(value)


if __name__ == "__main__":
    main()
