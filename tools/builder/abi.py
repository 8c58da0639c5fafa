"""Checks an extension against what the Hub requires: which symbols it may use of Python, torch and the system."""

import re
import subprocess
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

PYTHON_ABI = "3.9"
MANYLINUX = "manylinux_2_28"


@dataclass(frozen=True)
class Check:
    name: str
    symbols: list[str] | None  # those that break the rule; None: not checked
    excuse: str = ""  # why symbols found are no fault

    @property
    def failed(self) -> bool:
        return bool(self.symbols) and not self.excuse

    def __str__(self) -> str:
        if self.symbols is None:
            return "not checked"
        return f"{len(self.symbols)} symbols" if self.symbols else "ok"


def check(extension: Path) -> list[Check]:
    python = manylinux = None
    if find_spec("kernel_abi_check") is not None:
        from kernel_abi_check import ObjectFile

        file = ObjectFile(extension)
        python = [symbol.name for symbol in file.check_python_abi(PYTHON_ABI)]
        manylinux = [f"{symbol.name}@{symbol.dep}_{symbol.version}" for symbol in file.check_manylinux(MANYLINUX)]
    return [
        Check(f"Python {PYTHON_ABI} ABI", python),
        Check("torch stable ABI", _unstable_torch_symbols(extension)),
        Check(MANYLINUX, manylinux, excuse=" (they come with this machine's C library; releases link an older one)"),
    ]


def _unstable_torch_symbols(extension: Path) -> list[str]:
    # torch's C++ API outside torch::stable changes with its version. kernel-builder checks for this; the Python package
    # of its checker does not.
    command = ["nm", "--dynamic", "--undefined-only", "--demangle", str(extension)]
    symbols = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    names = [symbol.split(maxsplit=1)[1] for symbol in symbols]
    return [name for name in names if re.match(r"(\w+ for )?(at|c10|torch)::(?!stable::)", name)]
