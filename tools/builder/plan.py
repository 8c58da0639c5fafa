"""The sources and options of a variant, read from build.toml."""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import project

from .toolchain import BuildError, Nvcc


@dataclass(frozen=True)
class Section:
    """[torch] or a [kernel.<name>] of build.toml: sources that are compiled with the same options."""

    name: str
    sources: tuple[str, ...]  # headers among them
    include: tuple[str, ...]
    cxx_flags: tuple[str, ...]
    cuda_flags: tuple[str, ...]
    archs: tuple[str, ...]  # CUDA capabilities as in build.toml: "8.0", "9.0a", "12.0+PTX"


@dataclass(frozen=True)
class Variant:
    backend: str
    label: str  # the name of its folder; the loader chooses by it
    stable_abi: str  # the torch version whose stable ABI it uses; empty if nothing is compiled
    id: str  # the name of the module, and the namespace of the ops
    sections: tuple[Section, ...]

    @property
    def archs(self) -> list[str]:
        """The capabilities of all sections, in ascending order."""
        return sorted({arch for section in self.sections for arch in section.archs}, key=_rank)


def variant(backend: str, nvcc: Nvcc | None = None, only_archs: frozenset[str] = frozenset()) -> Variant:
    """The variant of a backend. A non-empty `only_archs` drops all other CUDA capabilities."""
    config = project.config()
    sections = [_section("torch", config["torch"], ())]
    for name, table in config["kernel"].items():
        if table["backend"] == backend:
            sections.append(_section(name, table, _archs(name, table, nvcc, only_archs) if nvcc else ()))
    stable_abi = config["torch"]["stable-abi"][backend]
    compute = "cu" + nvcc.version.replace(".", "") if nvcc else backend
    abi = stable_abi.replace(".", "")
    return Variant(
        backend=backend,
        label=f"torch-stable-abi{abi}-{compute}-{project.machine()}",
        stable_abi=stable_abi,
        id=f"_{project.python_name()}_{backend}_{_fingerprint(sections)}",
        sections=tuple(sections),
    )


def noarch(backend: str) -> Variant:
    """The variant of a backend without compiled code: only the package's Python."""
    return Variant(
        backend=backend,
        label=f"torch-{backend}",
        stable_abi="",
        id=f"_{project.python_name()}_{backend}_{_fingerprint([])}",
        sections=(),
    )


def package_files() -> dict[str, Path]:
    """The Python and data files that ship, by their path in the package."""
    root = project.package()
    suffixes = {f".{extension}" for extension in project.config()["torch"].get("pyext", ["py", "pyi"])}
    if not (root / "__init__.py").is_file():
        raise BuildError(f"no package: {root / '__init__.py'} does not exist")
    return {
        path.relative_to(root).as_posix(): path
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.suffix in suffixes and path.name != "_ops.py"
    }


def base(arch: str) -> str:
    """The capability without its suffix: 9.0 for 9.0a, 12.0 for 12.0+PTX."""
    return re.match(r"\d+\.\d+", arch)[0]


def chosen(listed: list[str], known: Iterable[str]) -> list[str]:
    """The capabilities of build.toml that kernel-builder compiles a section for, given those that the compiler knows.

    For each known capability it is the newest listed one whose code runs there: machine code runs within its major
    version, PTX on everything newer. Code for exactly one capability (9.0a) is compiled if the compiler knows it.
    """
    exact = [arch for arch in listed if arch.endswith(("a", "f")) and base(arch) in known]
    plain = sorted((arch for arch in listed if not arch.endswith(("a", "f"))), key=_number)
    found = set(exact)
    for target in set(known) - {base(arch) for arch in exact}:
        fitting = [
            arch
            for arch in plain
            if _number(arch) <= _number(target) and (arch.endswith("+PTX") or _number(arch)[0] == _number(target)[0])
        ]
        found.update(fitting[-1:])
    return sorted(found, key=_rank)


def _number(arch: str) -> tuple[int, ...]:
    return tuple(int(part) for part in base(arch).split("."))


def _rank(arch: str) -> tuple:
    return _number(arch), arch


def _section(name: str, table: dict, archs: tuple[str, ...]) -> Section:
    for source in table["src"]:
        if not (project.ROOT / source).is_file():
            raise BuildError(f"build.toml lists {source}, which does not exist")
    options = (tuple(table.get(option, ())) for option in ("include", "cxx-flags", "cuda-flags"))
    return Section(name, tuple(table["src"]), *options, archs)


def _archs(name: str, table: dict, nvcc: Nvcc, only: frozenset[str]) -> tuple[str, ...]:
    # A section that has none of `only` keeps all its capabilities, because other sections call its functions.
    archs = chosen(table["cuda-capabilities"], nvcc.archs)
    if not archs:
        raise BuildError(f"nvcc {nvcc.version} compiles for none of [kernel.{name}]'s cuda-capabilities")
    return tuple([arch for arch in archs if base(arch) in only] or archs)


def _fingerprint(sections: list[Section]) -> str:
    # Covers everything that makes two builds differ, so that one process can load both, and nothing else, so that a
    # build is reproducible.
    digest = hashlib.sha256()
    for section in sections:
        digest.update(repr(section).encode())
        for source in section.sources:
            digest.update((project.ROOT / source).read_bytes())
    for place, path in package_files().items():
        digest.update(place.encode() + b"\0" + path.read_bytes())
    digest.update((project.ROOT / "build.toml").read_bytes())
    return digest.hexdigest()[:10]
