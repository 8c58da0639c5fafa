"""The Hub's rules for shipped Python: it runs on Python 3.9, imports its own modules relatively, and imports only the
standard library, torch and, for the Triton kernels, triton."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

OLDEST_PYTHON = "3.9"


def faults(package: Path) -> list[str]:
    return [*_too_new(package), *_imports(package)]


def _too_new(package: Path) -> list[str]:
    """Syntax, modules, functions and arguments that a later Python introduced."""
    options = [f"--target={OLDEST_PYTHON}-", "--violations", "--no-tips", "--format", "parsable"]
    vermin = "import sys, vermin; sys.exit(vermin.main())"
    result = subprocess.run([sys.executable, "-c", vermin, *options, str(package)], capture_output=True, text=True)
    found = re.findall(r"^(.+?):(\d+):\d*:.*:([\d.]+):(.+)$", result.stdout, re.MULTILINE)
    if result.returncode != 0 and not found:
        raise RuntimeError(f"vermin failed: {result.stdout}{result.stderr}")
    return [f"{Path(path).relative_to(package)}:{line}: {what} needs Python {new}" for path, line, new, what in found]


def _imports(package: Path) -> Iterator[str]:
    for path in sorted(package.rglob("*.py")):
        place = path.relative_to(package)
        allowed = {*sys.stdlib_module_names, "torch"} | ({"triton"} if "triton" in place.parts[:-1] else set())
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            for name in names:
                if name.split(".")[0] not in allowed:
                    yield f"{place}:{node.lineno}: imports {name}: relative imports, Python's own and torch only"
