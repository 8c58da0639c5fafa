"""Lays a variant out as kernel-builder does, with the files that the loader expects in build/<variant>/."""

import json
import os
import shutil
import subprocess
from pathlib import Path

from kernels._rust import Digest, DigestAlgorithm

import project

from .plan import Variant, package_files

OPS = '''\
import torch
{import_extension}
ops = torch.ops.{id}


def add_op_namespace_prefix(op_name: str):
    """The op's full name: this build's namespace is its own, so that several builds can be loaded in one process."""
    return f"{id}::{{op_name}}"
'''


def install(variant: Variant, extension: Path | None, folder: Path) -> None:
    """Makes `folder` the variant: replaces files that differ and removes files that do not belong."""
    files = {place: path.read_bytes() for place, path in package_files().items()}
    import_extension = "" if extension is None else f"\nfrom . import {variant.id}\n"
    files["_ops.py"] = OPS.format(id=variant.id, import_extension=import_extension).encode()
    if extension is not None:
        files[f"{variant.id}.abi3.so"] = extension.read_bytes()
    for path in folder.rglob("*"):
        if path.is_file() and path.relative_to(folder).as_posix() not in files:
            path.unlink()
    for place, content in files.items():
        _write(folder / place, content)
    _write(folder / "metadata.json", (json.dumps(_metadata(variant, folder), indent=2) + "\n").encode())


def _write(path: Path, content: bytes) -> None:
    if path.is_file() and path.read_bytes() == content:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(path.name + ".new")
    fresh.write_bytes(content)
    os.replace(fresh, path)  # a process that has the old file loaded keeps it whole


def _metadata(variant: Variant, folder: Path) -> dict:
    general = project.config()["general"]
    backend = {"type": variant.backend}
    if variant.archs:
        backend["archs"] = variant.archs
    # kernel-builder writes its version here; this build is not one of its own.
    provenance = {"kernel-builder": {"version": "none: tools/build.py"}}
    if (source := _git_status()) is not None:
        provenance["kernel"] = source
    return {
        "name": general["name"],
        "id": variant.id,
        "version": general["version"],
        "license": general["license"],
        **({"source": general["source"]} if "source" in general else {}),
        "python-depends": [],
        "kernel-depends": [],
        "backend": backend,
        "digest": {
            "algorithm": "sha256",
            "files": Digest.hash_variant(DigestAlgorithm.SHA256, folder).files,
        },
        "provenance": provenance,
    }


def _git_status() -> dict | None:
    """The commit checked out and whether tracked files differ from it; None outside a repository with commits."""

    def git(*arguments: str) -> str | None:
        result = subprocess.run(["git", *arguments], cwd=project.ROOT, capture_output=True, text=True)
        return result.stdout.strip() if result.returncode == 0 else None

    if shutil.which("git") is None or (commit := git("rev-parse", "--verify", "HEAD")) is None:
        return None
    return {"commit": commit, "dirty": bool(git("status", "--porcelain", "--untracked-files=no"))}
