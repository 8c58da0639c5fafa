#!/usr/bin/env python3
"""Runs tests/test_kernels_ci.py on the CPU variant for aarch64, under qemu on another machine: `make emulate`.

Needs Debian with qemu-user-static and g++-aarch64-linux-gnu. Python for aarch64 comes from Debian's mirror and torch
from PyPI, 5 GB with its dependencies. Everything goes to build/emulate; nothing is installed.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import project
from builder import compile, layout, plan
from builder.toolchain import BuildError
from compatibility import matrix

FOLDER = project.BUILD / "emulate"
ROOT = FOLDER / "root"  # the emulated programs see it as /
PACKAGES = ROOT / "packages"
PYTHON = "3.11"  # Debian 12's
QEMU = "qemu-aarch64-static"
# torch reads the CPU model from the system, which would report the host's.
CPU = "cortex-a72"
CPUINFO = """processor\t: 0
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 cpuid
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x0
CPU part\t: 0xd08
CPU revision\t: 3
"""
MIDR = "0x00000000410fd083\n"


def main() -> None:
    try:
        for program in (QEMU, matrix.AARCH64_COMPILER, "apt-get", "dpkg-deb"):
            if shutil.which(program) is None:
                raise BuildError(f"no {program} on the PATH")
        if not (FOLDER / "complete").exists():
            shutil.rmtree(FOLDER, ignore_errors=True)
            system()
            packages()
            (FOLDER / "complete").touch()
        variant = build()
    except (BuildError, subprocess.CalledProcessError) as error:
        sys.exit(f"error: {error}")
    sys.exit(run("-m", "pytest", "-p", "no:cacheprovider", "tests/test_kernels_ci.py", "--noconftest", build=variant))


def system() -> None:
    """Unpacks Debian's Python for aarch64 and its dependencies; apt keeps its state in a separate folder."""
    state = FOLDER / "apt"
    for place in ("lists/partial", "cache/archives/partial"):
        (state / place).mkdir(parents=True)
    (state / "status").touch()
    (state / "apt.conf").write_text(f"""APT::Architecture "arm64"; APT::Architectures {{ "arm64"; }};
Dir::State "{state}"; Dir::State::status "{state}/status"; Dir::Cache "{state}/cache";
""")
    apt = {"env": os.environ | {"APT_CONFIG": str(state / "apt.conf")}, "check": True}
    subprocess.run(["apt-get", "update", "-qq"], **apt)
    wanted = [f"python{PYTHON}", "libstdc++6"]
    subprocess.run(["apt-get", "install", "-qq", "-y", "--download-only", "--no-install-recommends", *wanted], **apt)
    for package in sorted(state.glob("cache/archives/*.deb")):
        subprocess.run(["dpkg-deb", "-x", str(package), str(ROOT)], check=True)
    files = {"proc/cpuinfo": CPUINFO, "sys/devices/system/cpu/cpu0/regs/identification/midr_el1": MIDR}
    for place, text in files.items():
        (ROOT / place).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / place).write_text(text)


def packages() -> None:
    platforms = [part for minor in range(17, 37) for part in ("--platform", f"manylinux_2_{minor}_aarch64")]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(PACKAGES), "--no-compile"]
    pip += [*platforms, "--platform", "manylinux2014_aarch64", "--only-binary=:all:", "--python-version", PYTHON]
    constraints = project.ROOT / "requirements/constraints.txt"
    subprocess.run([*pip, "-c", str(constraints), "torch", "numpy", "kernels", "pytest"], check=True)


def build() -> Path:
    """Cross-compiles the variant and links it with torch for aarch64."""
    variant, cache = plan.variant("cpu"), FOLDER / "objects"
    cxx = [matrix.AARCH64_COMPILER]
    objects = []
    for section in variant.sections:
        for source in section.sources:
            if Path(source).suffix in compile.CXX_SUFFIXES:
                objects.append(cache / section.name / f"{source}.o")
                compile.cross_compile(variant, section, source, cxx, set(), objects[-1])
    extension = cache / "extension.so"
    flags = ["--no-as-needed", *compile.LINK_FLAGS, "--allow-shlib-undefined"]  # torch's own undefined symbols
    libraries = [f"-L{PACKAGES}/torch/lib", "-ltorch_cpu", "-lc10", f"-Wl,{','.join(flags)}"]
    subprocess.run([*cxx, "-shared", "-o", str(extension), *map(str, objects), *libraries], check=True)
    folder = FOLDER / variant.label.replace(project.machine(), "aarch64-linux")
    layout.install(variant, extension, folder)
    return folder


def run(*arguments: str, build: Path) -> int:
    """Runs Debian's Python under qemu."""
    environment = os.environ | {
        "PYTHONPATH": str(PACKAGES),
        "LOCAL_KERNELS": f"{project.repo_id()}={build}",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "ATEN_CPU_CAPABILITY": "default",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [QEMU, "-cpu", CPU, "-L", str(ROOT), str(ROOT / f"usr/bin/python{PYTHON}"), *arguments]
    return subprocess.run(command, cwd=project.ROOT, env=environment).returncode


if __name__ == "__main__":
    main()
