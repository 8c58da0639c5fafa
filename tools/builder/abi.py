"""Checks an extension against the Hub's rules on which symbols of Python, torch and the system it may use."""

import re
import subprocess
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from . import mach_o

PYTHON_ABI = "3.9"
MANYLINUX = "manylinux_2_28"
MACOS = "15.0"  # the target of kernel-builder's CPU variants, in the version that flake.lock pins


@dataclass(frozen=True)
class Check:
    name: str
    symbols: list[str] | None  # those that break the rule; None: not checked

    @property
    def failed(self) -> bool:
        return bool(self.symbols)

    def __str__(self) -> str:
        if self.symbols is None:
            return "not checked"
        return f"{len(self.symbols)} symbols" if self.symbols else "ok"


def check(extension: Path, released: bool = False) -> list[Check]:
    """Checks an extension. Only a `released` one is checked for symbols of a C library that is too new."""
    file = None
    if find_spec("kernel_abi_check") is not None:
        from kernel_abi_check import ObjectFile

        file = ObjectFile(extension)
    python = file and [symbol.name for symbol in file.check_python_abi(PYTHON_ABI)]
    checks = [
        Check(f"Python {PYTHON_ABI} ABI", python),
        Check("torch stable ABI", _unstable_torch_symbols(extension)),
        Check("local statics", unique_symbols(extension)),
    ]
    if mach_o.is_one(extension):
        return [*checks, _macos(file)]
    return [*checks, _manylinux(file)] if released else checks


def _manylinux(file) -> Check:
    found = file and [f"{symbol.name}@{symbol.dep}_{symbol.version}" for symbol in file.check_manylinux(MANYLINUX)]
    return Check(MANYLINUX, found)


def _macos(file) -> Check:
    return Check(f"macOS {MACOS}", file and [str(found) for found in file.check_macos(MACOS)])


def _unstable_torch_symbols(extension: Path) -> list[str]:
    # torch's C++ API outside torch::stable changes with its version. kernel-builder checks for this; the Python package
    # of its checker does not.
    if mach_o.is_one(extension):  # not every nm reads these
        symbols = mach_o.undefined_symbols(extension)
        command = ["c++filt", *(name.removeprefix("_") for name in symbols)]
        names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    else:
        names = _dynamic_symbols(extension, "wvU")
    return [name for name in names if re.match(r"(\w+ for )?(at|c10|torch)::(?!stable::)", name)]


def unique_symbols(extension: Path) -> list[str]:
    """Statics that exist once per process, even if it loads several builds. macOS has no such symbols."""
    return [] if mach_o.is_one(extension) else _dynamic_symbols(extension, "u")


def _dynamic_symbols(extension: Path, kinds: str) -> list[str]:
    """The names of the symbols that nm marks with one of these letters."""
    command = ["nm", "--dynamic", "--demangle", str(extension)]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return re.findall(rf"^[0-9a-f ]* [{kinds}] (.*)$", listed, re.MULTILINE)
