"""The Hub's rules for a built variant, which is read back with the functions of `kernels`."""

from collections.abc import Iterator
from pathlib import Path

from kernels._rust import Digest, DigestValidationError, Metadata
from kernels.variants import NoarchVariant, parse_variant

import project
from builder import abi


def variants(build: Path) -> list[Path]:
    """The folders of the variants in a build."""
    return sorted(path.parent for path in build.glob("*/metadata.json"))


def files(variant: Path) -> Iterator[tuple[str, Path]]:
    """All files of a variant, with their relative paths."""
    for path in sorted(variant.rglob("*")):
        if path.is_file():
            yield path.relative_to(variant).as_posix(), path


def bytecode(variant: Path) -> list[str]:
    """Lists bytecode left by imports. No digest covers it, and Python may run it instead of the source."""
    found = [place for place, _ in files(variant) if place.endswith(".pyc")]
    return [f"holds bytecode, which is not to be published: {place}" for place in found]


def faults(folder: Path, released: bool = False) -> list[str]:
    """Lists faults that prevent a variant's release; `released` is false for a rehearsal with a build from here."""
    try:
        parse_variant(folder.name)
        metadata = Metadata.read_from_file(folder / "metadata.json")
    except ValueError as error:
        return [str(error)]
    found = [*_identity(metadata), *_source(metadata), *_digest(metadata, folder)]
    return [*found, *_symbols(folder, released), *bytecode(folder)]


def _identity(metadata: Metadata) -> Iterator[str]:
    is_, meant = (str(metadata.name), metadata.version), (project.name(), project.version())
    if is_ != meant:
        yield f"is {is_[0]} version {is_[1]}, and build.toml says {meant[0]} version {meant[1]}"
    if metadata.license != project.config()["general"]["license"]:
        yield f"has the licence {metadata.license}, and build.toml says {project.config()['general']['license']}"
    backend = str(metadata.backend.backend_type)
    if backend == "cuda" and not metadata.backend.archs:
        yield "is for CUDA and names no architectures: it would be loaded on every GPU"


def _source(metadata: Metadata) -> Iterator[str]:
    source = metadata.provenance and metadata.provenance.kernel
    if source is None:
        yield "says not which commit it was built from: build in a git repository"
    elif source.dirty:
        yield f"was built from a tree with changes that commit {source.commit[:10]} does not have: commit, then build"


def _digest(metadata: Metadata, folder: Path) -> Iterator[str]:
    if metadata.digest is None:
        yield "has no digest"
        return
    try:
        metadata.digest.validate(Digest.hash_variant(metadata.digest.algorithm, folder))
    except DigestValidationError as error:
        yield from map(str, error.violations)


def is_noarch(folder: Path) -> bool:
    """True if a variant has only Python, by its name: torch-rocm and similar."""
    return isinstance(parse_variant(folder.name), NoarchVariant)


def _symbols(folder: Path, released: bool) -> Iterator[str]:
    extensions = list(folder.glob("*.so"))
    if len(extensions) != (meant := 0 if is_noarch(folder) else 1):
        yield f"has {len(extensions)} extensions, not {'none' if meant == 0 else 'one'}"
    for extension in extensions:
        for check in abi.check(extension, released):
            if check.symbols is None:
                yield f"{check.name} was not checked: kernel-abi-check is not installed"
            elif check.failed:
                yield f"uses {len(check.symbols)} symbols outside {check.name}: {', '.join(check.symbols[:3])}"
